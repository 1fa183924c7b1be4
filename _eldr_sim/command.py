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
from eldr_sim.outputs import forget_written, written

_tracebacks = False
#: Ctrl-C and SIGTERM so far: C code that calls Python back loses what its handler raises.
_stops: list[KeyboardInterrupt] = []
#: Paths that a command names when it ends early.
_MOST_WRITTEN = 4


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
    forget_written()
    _stops.clear()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as it is where a shell has closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _stop)

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
        _end(stopped.__cause__ or stopped)  # click makes it Abort
    except (InputError, OSError, MemoryError, RecursionError, OverflowError) as error:
        if _tracebacks:
            traceback.print_exc()
        _fail("; ".join([_one_line(error), *_left(error)]))
    except StalledError as error:
        if _tracebacks:
            traceback.print_exc()
        _fail(str(error), 1)
    except Exception as error:
        if not _stops:
            raise
        _stops[-1].__cause__ = error
        _end(_stops[-1])
    finally:
        warnings.showwarning = show


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    _stops.append(_Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
    sys.unraisablehook = lambda lost: None  # the command's last line says it
    raise _stops[-1]


def _end(stopped: BaseException) -> NoReturn:
    terminated = isinstance(stopped, _Terminated)
    said = " ".join(_left(stopped)) or "nothing was written."
    click.echo(f"{'Terminated' if terminated else 'Interrupted'}: {said}", err=True)
    sys.exit(143 if terminated else 130)


def _left(error: BaseException) -> list[str]:
    """Say what a command that ends early leaves on the disk: what it has written whole, and what
    the notes of the error say (`outputs.keeping`)."""
    paths = written()
    said = [f"{path} is written." for path in paths]
    if len(paths) > _MOST_WRITTEN:
        said = [f"{len(paths)} files and folders are written, {paths[-1]} last."]
    notes: list[str] = []
    link: BaseException | None = error
    while link is not None:  # closing a file on a full disk raises again
        notes += [note for note in getattr(link, "__notes__", ()) if note not in notes]
        link = link.__cause__ or link.__context__
    return [*said, *notes]


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
