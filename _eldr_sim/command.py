"""Running a command line: what becomes of bad input and of Ctrl-C."""

from __future__ import annotations

import sys

import click

from eldr_sim.errors import InputError

__all__ = ["run_command"]


def run_command(command: click.Command) -> None:
    """Run a command line: bad input is one line and exit code 2, Ctrl-C is 130."""
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
