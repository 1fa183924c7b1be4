"""Running a command line: what becomes of bad input, Ctrl-C and SIGTERM."""

import io
import os
import signal
import sys
import threading
import traceback
import warnings
from types import FrameType
from typing import NoReturn, TextIO

import click

from eldr_sim.errors import EldrSimWarning, InputError, StalledError

_tracebacks = False


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds as Ctrl-C does: what cleans up after one does after the other."""


def show_tracebacks() -> None:
    """Print the traceback of an error before its line (``eldr-sim --debug``)."""
    global _tracebacks
    _tracebacks = True


def run_command(command: click.Command) -> None:
    """Run a command line. Bad input, and what this machine has too little of, is one line and exit
    code 2; a run that gets no further is one line and 1; Ctrl-C is 130, SIGTERM 143. Our own
    warnings are one line, too."""
    show = warnings.showwarning
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as it is where a shell has closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)

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
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        usage, error_is, message = shown.getvalue().partition("Error: ")
        click.echo(f"{usage}{error_is}{' '.join(message.split())}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as stopped:
        terminated = isinstance(stopped.__cause__ or stopped, _Terminated)  # click makes it Abort
        click.echo(
            f"{'Terminated' if terminated else 'Interrupted'}: nothing was written.", err=True
        )
        sys.exit(143 if terminated else 130)
    except (InputError, OSError, MemoryError, RecursionError, OverflowError) as error:
        if _tracebacks:
            traceback.print_exc()
        _fail(_one_line(error))
    except StalledError as error:
        if _tracebacks:
            traceback.print_exc()
        _fail(str(error), 1)
    finally:
        warnings.showwarning = show


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _one_line(error: Exception) -> str:
    """Say what was wrong, or what this machine has too little of."""
    if isinstance(error, OSError):
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return f"memory: this takes more than there is. {error}".rstrip(" .")
    if isinstance(error, RecursionError):
        return "input: nested too deeply"
    if isinstance(error, OverflowError):
        return f"input: a number is too large: {error}"
    return str(error)


def _fail(problem: str, exit_code: int = 2) -> NoReturn:
    """Print an error and end with ``exit_code``, also where nothing can be printed."""
    try:
        sys.stdout.flush()
    except OSError:  # the disk is full, or nobody reads: Python must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    click.echo(f"Error: {' '.join(problem.split())}", err=True)
    sys.exit(exit_code)
