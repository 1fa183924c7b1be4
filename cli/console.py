"""Output of commands: results in the manner of ``vllm bench serve``, tables, progress bars."""

from __future__ import annotations

import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from eldr_sim.phases import HARMLESS, phases_shown_by
from eldr_sim.start import show_nothing_more

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, ProgressColumn, TaskID

    from eldr_sim.planning.compare.paired import PairedDifference
    from eldr_sim.planning.runs.sweep import SweepProgress
    from eldr_sim.traces.routing.format import RoutingTrace

#: A way to show how far something is: `progress_bar`, and `run_counter`.
ShareBar = Callable[[str], AbstractContextManager[Callable[[float], None]]]
RunCounter = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
_WIDTH = 64
_LINE_EVERY_S = 10.0


#: Share of the work that has to be seen done before the time left is estimated.
_FORETELLS = 0.05


def _time_left(first: tuple[float, float] | None, now: float, share: float) -> str:
    """Say how long the rest may take, at the mean pace since ``first``, a time and the share done
    then; in whole minutes where it is long. Nothing before a part of it has been seen done."""
    since, had = first or (now, share)
    if share >= 1.0 or share - had < _FORETELLS - 1e-9:
        return ""
    left = (now - since) * (1.0 - share) / (share - had)
    return f", about {left:.0f} s left" if left < 100.0 else f", about {left / 60.0:.0f} min left"


class _Lines:
    """Lines on standard error, where that is no terminal: what begins, what is done, time left."""

    _every_s = _LINE_EVERY_S

    def __init__(self, title: str) -> None:
        self._title, self._start = title, time.monotonic()
        self._next = self._start + self._every_s
        self._first: tuple[float, float] | None = None
        self._doing, self._over = "", threading.Event()
        self._began: tuple[float, float] | None = None
        self._share = 0.0
        self._teller = threading.Thread(target=self._go_on, name=f"{HARMLESS}progress", daemon=True)

    def say(self, what: str, share: float | None = None) -> None:
        """Say what begins; until there are figures, every ten seconds which share of it is done."""
        begins_first, is_new = not self._doing, what != self._doing
        if is_new:
            self._doing, self._began = what, None
        if share is not None:  # what comes before, such as waiting, tells nothing of the rest
            self._began = self._began or (time.monotonic(), share)
        self._share = share or 0.0
        if not is_new:
            return
        self._echo(f"{self._title}: {what}")
        if begins_first:
            self._teller.start()

    def _go_on(self) -> None:
        while not self._over.wait(_LINE_EVERY_S) and self._first is None:
            self._echo(f"{self._title}: {self._so_far()}")

    def _so_far(self) -> str:
        """Return what is being done, for how long, and how long it may still take."""
        now, share = time.monotonic(), self._share
        done = f": {100 * share:.0f}% done" if 0.0 < share < 1.0 else ""
        left = _time_left(self._began, now, share)
        return f"{self._doing}{done}, {now - self._start:.0f} s so far{left}"

    def _echo(self, text: str) -> None:
        click.echo(text, err=True)

    def close(self) -> None:
        """Say nothing more: what follows, such as an error, is the last line."""
        self._over.set()
        if self._teller.is_alive():
            self._teller.join()

    def update(self, share: float, said: str) -> None:
        now = time.monotonic()
        # What comes before the first news, processes that start, tells nothing of the rest.
        self._first = self._first or (now, share)
        if now < self._next or not 0.0 < share < 1.0:
            return
        self._next = now + self._every_s
        left = _time_left(self._first, now, share)
        self._echo(f"{self._title}: {said}, {now - self._start:.0f} s so far{left}")


class _Cell(_Lines):
    """One line under a notebook's cell, that is written anew and goes in the end."""

    _every_s = 0.3

    def __init__(self, title: str, display: Callable[..., Any]) -> None:
        super().__init__(title)
        self._handle = display({"text/plain": title}, raw=True, display_id=True)

    def _echo(self, text: str) -> None:
        self._handle.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        super().close()
        self._echo("")


def _notebook_display() -> Callable[..., Any] | None:
    """Return what shows things in the notebook that this code runs in; None where in none."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return sys.modules["IPython"].display.display if hasattr(shell, "kernel") else None


def is_watched() -> bool:
    """Return whether progress can be seen: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or _notebook_display() is not None


def _lines(title: str) -> _Lines:
    display = _notebook_display()
    return _Lines(title) if display is None else _Cell(title, display)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error; yields a function of the share done. Where that is no
    terminal, a line every ten seconds, and one when something long begins."""
    with _bar(title, 1.0, _shares) as update:
        yield lambda share: update(share, f"{100 * share:.0f}% done", completed=share)


@contextmanager
def run_counter(title: str) -> Iterator[Callable[[int, int], None]]:
    """Count the runs of a search, of those expected, as `progress_bar` shows a share."""
    with _bar(title, 0.0, _counts) as update:

        def count(done: int, expected: int) -> None:
            said = f"{done} of about {expected} runs"
            update(done / max(expected, 1), said, completed=done, total=expected)

        yield count


def _shares(said: str = "{task.percentage:3.0f}%", *, left: bool = True) -> list[ProgressColumn]:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn(said), TimeElapsedColumn()]
    return [*columns, TimeRemainingColumn()] if left else columns


def _counts() -> list[ProgressColumn]:
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return [
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed:.0f} of about {task.total:.0f} runs"),
        TimeElapsedColumn(),
        TextColumn("about"),
        TimeRemainingColumn(),
        TextColumn("left"),
    ]


def _progress(*columns: ProgressColumn, **options: Any) -> Progress:
    """Return what shows progress on the terminal's standard error, in place of any other word."""
    from rich.console import Console
    from rich.progress import Progress

    show_nothing_more()
    return Progress(*columns, console=Console(stderr=True), **options)


@contextmanager
def _bar(
    title: str,
    total: float,
    columns: Callable[[], list[ProgressColumn]],
    period_s: float = 30.0,
    **fields: Any,
) -> Iterator[Callable[..., None]]:
    """Show progress; yields a function of the share done, how a line says it, and the fields."""
    if not sys.stderr.isatty():
        lines = _lines(title)
        try:
            with phases_shown_by(lines.say):
                yield lambda share, said, **_now: lines.update(share, said)
        finally:
            lines.close()
        return
    with _progress(*columns(), transient=True, speed_estimate_period=period_s) as progress:
        task = progress.add_task(title, total=total, **fields)

        def update(share: float, said: str, **now: Any) -> None:
            progress.update(task, description=title, **now)

        def show(what: str, share: float | None = None) -> None:
            done = "" if share is None else f": {100 * share:.0f}% done"
            progress.update(task, description=f"{title}: {what}{done}")

        with phases_shown_by(show):
            yield update


@contextmanager
def sweep_bar(title: str) -> Iterator[Callable[[SweepProgress], None]]:
    """Show a sweep's progress and the time left on standard error, as `progress_bar` does."""
    columns = partial(_shares, "{task.fields[runs]}")
    # A run may take longer than any fixed period.
    with _bar(title, 1.0, columns, period_s=math.inf, runs="") as update:

        def tell(now: SweepProgress) -> None:
            failed = f", {now.failed} failed" if now.failed else ""
            runs = f"{now.done}/{now.total} runs{failed}"
            # rich takes the speed from the first step on, so there is one at the start.
            update(now.share, runs, completed=max(now.share, 1e-9), runs=runs)

        yield tell


@contextmanager
def task_bar() -> Iterator[Callable[[str, float], None]]:
    """Show one task after the other with its share done; where there is no terminal, a line
    each."""
    if not sys.stderr.isatty():
        last = ""

        def tell(what: str, share: float) -> None:
            nonlocal last
            if what != last:
                last = what
                click.echo(what, err=True)

        yield tell
        return
    with _progress(*_shares(left=False)) as progress:
        current: tuple[str, TaskID] | None = None

        def update(what: str, share: float) -> None:
            nonlocal current
            if current is None or current[0] != what:
                current = what, progress.add_task(what, total=1.0)
            progress.update(current[1], completed=share)

        yield update


#: Largest number of rows of a table with folded cells.
_FOLDED_ROWS = 500


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; purely numeric columns are right-aligned. Cells are folded where rows are too
    wide, but not of long tables, which takes seconds."""
    click.echo(title)
    cells = [list(column) for column in zip(columns, *rows, strict=True)]
    numeric = [_is_numeric(column[1:]) for column in cells]
    widths = [max(map(len, column)) for column in cells]
    # Piped output must not depend on a terminal's width.
    room = get_terminal_size().columns if sys.stdout.isatty() else 160
    plain = all(text.isascii() and text.isprintable() for column in cells for text in column)
    if len(rows) > _FOLDED_ROWS or (plain and sum(widths) + 2 * len(widths) - 2 <= room):
        aligned = list(zip(widths, numeric, strict=True))
        for number, row in enumerate([columns, *rows]):
            shown = (
                text.rjust(width) if right else text.ljust(width)
                for text, (width, right) in zip(row, aligned, strict=True)
            )
            line = "  ".join(shown)
            click.echo(click.style(line, bold=True) if number == 0 else line)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for cells_of in rows:
        table.add_row(*cells_of)
    Console(width=room, highlight=False, markup=False).print(table)


def _is_numeric(cells: list[str]) -> bool:
    return bool(cells) and all(cell[:1] in "-+0123456789" for cell in cells if cell)


def print_written(out: Path, trace: RoutingTrace, more: str = "") -> None:
    """Print what a trace folder that was just written holds."""
    click.echo(
        f"Wrote {out}: {trace.n_requests} requests, {trace.manifest.n_tokens} tokens, "
        f"{trace.n_layers} layers, {trace.n_experts} experts, top-{trace.top_k}{more}"
    )


def difference_cell(difference: PairedDifference) -> str:
    """Return a paired difference in percent with its 95% interval."""
    return interval_text(difference.percent, difference.low, difference.high, "+.2f")


def number_text(value: float | None, form: str) -> str:
    """Return a number in a format; ``-`` for None."""
    return "-" if value is None else f"{value:{form}}"


def value_text(value: object) -> str:
    """Return a value of a table, numbers with two decimals."""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def interval_text(mean: float, low: float, high: float, form: str) -> str:
    """Return ``mean [low, high]`` in a format; without the ends where there are none."""
    if math.isnan(mean):
        return "-"
    return f"{mean:{form}}" + ("" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]")


def print_summary(summary: dict[str, Any], *, verbose: bool = True) -> None:
    """Print a run's summary with the headings of ``vllm bench serve``; without ``verbose`` what it
    rests on takes two lines."""
    # Not for listings.
    from eldr_sim.simulator.outcome.result_parts import basis_in_short, parts_of

    title = " Serving Benchmark Result (simulated) ".center(_WIDTH, "=")
    parts = parts_of(summary)
    if not verbose:
        parts[-1] = basis_in_short(summary)
    for part in parts:
        click.echo(title or part.title.center(_WIDTH, "-"))
        title, about = "", ""
        for row in part.rows:
            if isinstance(row, str):
                _text(row, "  ")
                continue
            if row.of != about and row.of:
                click.echo(row.of)
            about = row.of
            _line(f"  {row.label}" if row.of else row.label, row.value)
    click.echo("=" * _WIDTH)
    print_warnings(summary)


def print_warnings(summary: Mapping[str, Any], of: str = "") -> None:
    """Print the warnings about a run on standard error, each with what it is ``of``."""
    from eldr_sim.simulator.outcome.metrics import warnings_of  # the simulator, not for listings

    for warning in warnings_of(dict(summary)):
        click.echo(f"Warning: {of}{warning}", err=True)


def print_log_part(summary: Mapping[str, Any]) -> None:
    """Print what was read of a log, and what of it is measured, if anything is."""
    from eldr_sim.simulator.outcome.result_parts import log_lines  # not for listings

    for line in log_lines(summary["trace"]):
        click.echo(line)


def _text(text: str, indent: str = "") -> None:
    """Print text in lines of the result's width; what follows the first is indented."""
    click.echo(textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent="  "))


def _line(name: str, value: Any) -> None:
    if value is None:
        text = "-"
    elif isinstance(value, float):
        text = f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"
    else:
        text = str(value)
    click.echo(f"{name + ':':<36}{text:>{_WIDTH - 36}}")
