"""Running a command line: what becomes of bad input and of Ctrl-C."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

import click

from eldr_sim.errors import EldrSimWarning, InputError

__all__ = ["run_command"]


def run_command(command: click.Command) -> None:
    """Run a command line: bad input is one line and exit code 2, Ctrl-C is 130.

    Our own warnings are one line, too.
    """
    show = warnings.showwarning

    def show_ours(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, EldrSimWarning):
            click.echo(f"Warning: {message}", err=True)
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_ours
    try:
        command.main(standalone_mode=False)
    except InputError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted: nothing was written.", err=True)
        sys.exit(130)
    finally:
        warnings.showwarning = show
