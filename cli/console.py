"""Output of commands: results in the manner of ``vllm bench serve``, tables, progress bars."""

from __future__ import annotations

import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from eldr_sim.news import HARMLESS, listening
from eldr_sim.simulator.outcome.catalogue import LATENCIES, label
from eldr_sim.start import show_nothing_more

if TYPE_CHECKING:
    from pathlib import Path

    from eldr_sim.planning.compare.paired import PairedDifference
    from eldr_sim.planning.runs.sweep import SweepProgress
    from eldr_sim.traces.routing.format import RoutingTrace

#: A way to show how far something is: `progress_bar`, and `run_counter`.
ShareBar = Callable[[str], AbstractContextManager[Callable[[float], None]]]
RunCounter = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
_WIDTH = 64
_LINE_EVERY_S = 10.0


class _Lines:
    """Lines on standard error, where that is no terminal: what begins, what is done, time left."""

    _every_s = _LINE_EVERY_S

    def __init__(self, title: str) -> None:
        self._title, self._start = title, time.monotonic()
        self._next = self._start + self._every_s
        self._first: tuple[float, float] | None = None
        self._doing, self._over = "", threading.Event()

    def say(self, what: str) -> None:
        """Say what begins; until there are figures, every ten seconds that it goes on."""
        self._echo(f"{self._title}: {what}")
        if not self._doing:
            threading.Thread(target=self._go_on, name=f"{HARMLESS}progress", daemon=True).start()
        self._doing = what

    def _go_on(self) -> None:
        while not self._over.wait(_LINE_EVERY_S) and self._first is None:
            so_far = time.monotonic() - self._start
            self._echo(f"{self._title}: {self._doing}, {so_far:.0f} s so far")

    def _echo(self, text: str) -> None:
        click.echo(text, err=True)

    def close(self) -> None:
        """Say nothing more."""
        self._over.set()

    def update(self, share: float, said: str) -> None:
        now = time.monotonic()
        # What comes before the first news, processes that start, tells nothing of the rest.
        since, had = self._first = self._first or (now, share)
        if now < self._next or not 0.0 < share < 1.0:
            return
        self._next = now + self._every_s
        text = f"{self._title}: {said}, {now - self._start:.0f} s so far"
        if share > had:
            text += f", about {(now - since) * (1.0 - share) / (share - had):.0f} s left"
        self._echo(text)


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
    """Return whether somebody sees progress: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or _notebook_display() is not None


def _lines(title: str) -> _Lines:
    display = _notebook_display()
    return _Lines(title) if display is None else _Cell(title, display)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error; yields a function of the share done. Where that is no
    terminal, a line every ten seconds, and one when something long begins."""
    with _bar(title, 1.0, *_shares()) as update:
        yield lambda share: update(share, f"{100 * share:.0f}% done", completed=share)


@contextmanager
def run_counter(title: str) -> Iterator[Callable[[int, int], None]]:
    """Count the runs of a search, of those expected, as `progress_bar` shows a share."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}: {task.completed:.0f} of about {task.total:.0f} runs"),
        TimeElapsedColumn(),
        TextColumn("about"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with _bar(title, 0.0, *columns) as update:

        def count(done: int, expected: int) -> None:
            said = f"{done} of about {expected} runs"
            update(done / max(expected, 1), said, completed=done, total=expected)

        yield count


def _shares(said: str = "{task.percentage:3.0f}%", *, left: bool = True) -> list[ProgressColumn]:
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn(said), TimeElapsedColumn()]
    return [*columns, TimeRemainingColumn()] if left else columns


def _progress(*columns: ProgressColumn, **options: Any) -> Progress:
    """Return what shows progress on the terminal's standard error, in place of any other word."""
    show_nothing_more()
    shown = sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), disable=not shown, **options)


@contextmanager
def _bar(title: str, total: float, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    """Show progress; yields a function of the share done, how a line says it, and the fields."""
    lines = None if sys.stderr.isatty() else _lines(title)
    with _progress(*columns, transient=True) as progress:
        task = progress.add_task(title, total=total)

        def update(share: float, said: str, **now: Any) -> None:
            if lines is not None:
                lines.update(share, said)
            progress.update(task, description=title, **now)

        def show(what: str) -> None:
            progress.update(task, description=f"{title}: {what}")

        try:
            with listening(show if lines is None else lines.say):
                yield update
        finally:
            if lines is not None:
                lines.close()


@contextmanager
def sweep_bar(title: str) -> Iterator[Callable[[SweepProgress], None]]:
    """Show a sweep's progress and time left on the terminal's standard error."""
    with _progress(
        *_shares("{task.fields[runs]}"),
        transient=True,
        speed_estimate_period=math.inf,  # a run may take longer than any fixed period
    ) as progress:
        task = progress.add_task(title, total=1.0, runs="")

        def update(now: SweepProgress) -> None:
            failed = f", {now.failed} failed" if now.failed else ""
            # rich takes the speed from the first step on, so there is one at the start.
            done: dict[str, Any] = {
                "completed": max(now.share, 1e-9),
                "runs": f"{now.done}/{now.total} runs{failed}",
            }
            progress.update(task, **done)

        yield update


@contextmanager
def task_bar() -> Iterator[Callable[[str, float], None]]:
    """Show one task after the other with its share done; where there is no terminal, a line
    each."""
    shown = sys.stderr.isatty()
    with _progress(*_shares(left=False)) as progress:
        current: tuple[str, TaskID] | None = None

        def update(what: str, share: float) -> None:
            nonlocal current
            if current is None or current[0] != what:
                current = what, progress.add_task(what, total=1.0)
                if not shown:
                    click.echo(what, err=True)
            progress.update(current[1], completed=share)

        yield update


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; columns whose cells are all numbers are right-aligned."""
    click.echo(title)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        numeric = bool(cells) and all(cell[:1] in "-+0123456789" for cell in cells if cell)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Piped output must not depend on a terminal's width.
    width = None if sys.stdout.isatty() else 160
    Console(width=width, highlight=False, markup=False).print(table)


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


def print_summary(summary: dict[str, Any]) -> None:
    """Print a run's summary with the headings of ``vllm bench serve``."""
    click.echo(" Serving Benchmark Result (simulated) ".center(_WIDTH, "="))
    alone = summary["policy"] is None  # requests end with their prompts
    for part in (_print_run, _print_sessions, _print_latencies, _print_decoding, _print_parts):
        part(summary, alone)
    _figures(summary, "preemptions", *(() if alone else ("gpu_hours_per_million_output_tokens",)))
    if summary["cost_per_million_output_tokens"] is not None:
        _figures(summary, "cost_per_million_output_tokens")
    if limits := summary.get("limits"):  # older results have none
        _heading("What limits it")
        _line("Bottleneck", limits["bottleneck"])
        _text(limits["because"], "  ")
    _print_band(summary, alone)
    _print_basis(summary)
    click.echo("=" * _WIDTH)
    print_warnings(summary)


def _print_band(summary: Mapping[str, Any], alone: bool) -> None:
    from eldr_sim.simulator.outcome.error_band import in_words, interval

    band = summary.get("error_band")
    if band is None:  # of older results
        return
    _heading(f"Error band ({100 * band['level']:.0f}% of published runs)")
    shown = {"mean_ttft_ms": "ttft"} if alone else {
        "mean_ttft_ms": "ttft", "mean_tpot_ms": "tpot", "output_throughput": "throughput",
    }  # fmt: skip
    for tag, metric in shown.items():
        if metric in band and summary[tag]:
            low, high = interval(band, metric, summary[tag])
            _line(label(tag), f"{low:.4g} to {high:.4g}")
    for sentence in in_words(band):
        _text(sentence, "  ")


def print_warnings(summary: Mapping[str, Any], of: str = "") -> None:
    """Print the warnings about a run on standard error, each with what it is ``of``."""
    from eldr_sim.simulator.outcome.metrics import warnings_of  # the simulator, not for listings

    for warning in warnings_of(dict(summary)):
        click.echo(f"Warning: {of}{warning}", err=True)


def _heading(title: str) -> None:
    click.echo(title.center(_WIDTH, "-"))


def _figures(summary: Mapping[str, Any], *tags: str) -> None:
    for tag in tags:
        _line(label(tag), summary[tag])


def _print_run(summary: dict[str, Any], alone: bool) -> None:
    if alone:
        _line("Prefill policy", summary["prefill_policy"])
    elif summary["prefill_policy"] is None:
        _line("Policy", summary["policy"])
    else:
        _line("Policy, prefill policy", f"{summary['policy']}, {summary['prefill_policy']}")
    _line("Model on GPU", f"{summary['model_id']} on {summary['gpu']}")
    _line("Topology", summary["topology"])
    _figures(summary, "completed", "failed")
    for reason, count in summary["failed_reasons"].items():
        _line(f"  {reason}", count)
    rate, trace = summary["request_rate"], summary["trace"]
    _line(label("request_rate"), "recorded" if rate is None else rate)
    if "arrivals" in trace:
        _line("Arrivals", trace["arrivals"])
    for line in _log_lines(trace):
        _text(line)
    if summary["max_concurrency"] is not None:
        _figures(summary, "max_concurrency")
    for name in ("isl", "osl"):
        if lengths := trace.get(name):  # older results have none
            mean, middle, p99 = (f"{lengths[key]:.0f}" for key in ("mean", "p50", "p99"))
            _line(f"{name.upper()}: mean, median, p99 (tokens)", f"{mean}, {middle}, {p99}")
    _figures(summary, "duration", "total_input_tokens", "total_output_tokens", "request_throughput")
    if summary["slo_attainment_by_metric"]:  # without an SLO there is nothing to attain
        _figures(summary, "slo_attainment")
    prompts = ("prefill_throughput", "computed_prompt_throughput", "prefill_mfu", "makespan_s")
    _figures(summary, *(prompts if alone else ("output_throughput", "total_token_throughput")))
    _figures(summary, "max_concurrent_requests")
    if summary.get("prefix_cache_hits"):
        _figures(summary, "prefix_cache_hit_rate")
        if summary.get("ideal_prefix_cache_hit_rate"):  # older results have none
            _figures(summary, "ideal_prefix_cache_hit_rate", "common_prefix_share")
    if tiers := summary.get("kv_tiers"):
        rates = (f"{name} {rate:.1%}" for name, rate in tiers["hit_rate"].items())
        _line("Hit rate by tier", ", ".join(rates))
        _line("Mean wait for loads (ms)", tiers["mean_load_wait_ms"])
        _line("Prefill saved by loads (s)", tiers["prefill_seconds_saved"])


def _print_sessions(summary: dict[str, Any], _: bool) -> None:
    if sessions := summary.get("sessions"):
        _heading("Sessions")
        begun, done, lost = (sessions[key] for key in ("begun", "completed", "abandoned"))
        _line("Begun, completed, abandoned", f"{begun}, {done}, {lost}")
        _line("Mean duration (s)", sessions["mean_duration_s"])
        if "p90_e2el_per_token_ms" in summary:  # older results have none
            _figures(summary, "mean_e2el_per_token_ms", "p90_e2el_per_token_ms")
        columns = ("mean_ttft_ms", "mean_tpot_ms", "prefix_cache_hit_rate")
        for row in sessions["by_turn"]:
            shown = (f"{row[key]:.4g}" if row[key] is not None else "-" for key in columns)
            _line(f"Turn {row['turn']}: TTFT, TPOT (ms), hit rate", ", ".join(shown))


def _print_latencies(summary: dict[str, Any], alone: bool) -> None:
    if front_end := summary.get("front_end"):
        _heading("Front end, part of TTFT")
        how = f"{front_end['api_servers']}, {front_end['tokenizer_mode']}"
        _line("API servers, tokenizer", how)
        for statistic in ("mean", "median", "p99"):
            _line(f"{statistic.capitalize()} time (ms)", front_end[f"{statistic}_ms"])
    for tag, latency in LATENCIES.items():
        if not alone or tag == "ttft":
            _heading(latency.heading)
            _figures(summary, *(f"{of}_{tag}_ms" for of in ("mean", "median", "p90", "p99")))


def _print_decoding(summary: dict[str, Any], alone: bool) -> None:
    if not alone:
        _heading("Decode steps")
        _figures(summary, "mean_decode_batch")
        if summary["mean_active_experts_per_step"] is not None:  # a dense model has none
            _figures(summary, "mean_active_experts_per_step", "mean_active_experts_per_token")
            _figures(summary, "p99_active_experts_per_step")
    if drafts := summary.get("speculative_decoding"):
        _heading("Speculative Decoding")
        n, accepted = (drafts[f"spec_decode_num_{of}"] for of in ("drafts", "accepted_tokens"))
        tokens = drafts["spec_decode_num_draft_tokens"]
        _line("Acceptance rate (%)", 100.0 * accepted / tokens if tokens else None)
        _figures(summary, "acceptance_length")
        _line("Drafts", n)
        _line("Draft tokens", tokens)
        _line("Accepted tokens", accepted)
        by_position = drafts["spec_decode_num_accepted_tokens_per_pos"]
        for position, passed in enumerate(by_position if n else ()):
            _line(f"  Position {position} (%)", 100.0 * passed / n)
        _figures(summary, "tokens_per_step", "verify_experts_over_plain", "draft_time_share")
        _text(f"acceptance: {drafts['acceptance_source']}", "  ")
        _text(f"experts of rejected drafts: {drafts['rejected_drafts_experts']}", "  ")


def _print_parts(summary: dict[str, Any], alone: bool) -> None:
    if summary["expert_parallel_size"] > 1 and not alone:
        _line("Expert placement", summary["expert_placement"])
        _figures(summary, "mean_busiest_rank_experts_per_step")
    if group := summary.get("group"):
        _heading("Engines that share experts")
        how = f"{group['data_parallel_size']}, {group['all2all_backend']}"
        _line("Engines a group, all-to-all", how)
        if "ffn_ranks" in group:
            how = f"{group['ffn_ranks']}, {group['micro_batches']}"
            _line("FFN GPUs, micro-batches", how)
            for side in ("attention", "FFN"):
                _line(f"Mean idle time of {side} GPUs (ms)", group[f"mean_{side.lower()}_idle_ms"])
        for part in ("step", "moe", "dispatch", "combine", "idle"):
            _line(f"Mean {part} time (ms)", group[f"mean_{part}_ms"])
        if group.get("mean_replica_choice_ms"):  # older results have none
            _line("Mean replica choice time (ms)", group["mean_replica_choice_ms"])
        _line("Token-expert pairs, busiest / mean rank", group["busiest_rank_pairs_over_mean"])
    if streaming := summary.get("weight_streaming"):
        _heading("Streamed experts")
        _line("Gather of a layer (ms)", streaming["gather_ms"])
        _line("Copy of a layer from the host (ms)", streaming["host_copy_ms"])
        _line("Share of step time waited", streaming["wait_share"])
    if faults := summary.get("faults"):
        _heading("Faults")
        for event in faults["events"]:
            click.echo(event["event"])
            # Without an SLO no request is good: what completes counts.
            kind = "throughput" if event["goodput_during"] is None else "goodput"
            for when in ("before", "during", "after"):
                _line(f"  {kind.capitalize()} {when} (req/s)", event[f"{kind}_{when}"])
            _line("  Time to recover (s)", event["time_to_recover_s"])
        _line("Requests sent again", faults["retried"])
        _line("Requests lost with their worker", faults["worker_lost"])
        _line("Requests that gave up", faults["cancelled"])
    if scaling := summary.get("scaling"):
        _heading("Workers over time")
        _line("Autoscaler", scaling["autoscale"])
        for pool, workers in scaling["mean_workers"].items():
            _line(f"Mean {pool} workers that serve", workers)
        for name, hours in scaling["gpu_hours_by_state"].items():
            _line(f"GPU-hours {name}", hours)
        if scaling["minutes_below_95"] is not None:  # without an SLO no request is good
            _line("GPU-hours a 1,000 good requests", scaling["gpu_hours_per_1000_good"])
            if scaling["cost_per_1000_good"] is not None:
                _line("Cost of 1,000 good requests ($)", scaling["cost_per_1000_good"])
            minutes = f"{scaling['minutes_below_95']} of {scaling['minutes']}"
            _line("Minutes below 95% attainment", minutes)
        events = "starts", "stops", "switches", "reversals"
        _line(", ".join(events).capitalize(), ", ".join(str(scaling[name]) for name in events))


def _print_basis(summary: dict[str, Any]) -> None:
    from eldr_sim.kernel_profiles.tables.format import IN_WORDS, parts_by_provenance

    _heading("Rests on")
    for known, parts in parts_by_provenance(summary.get("provenance", {})).items():
        _text(f"Step times, {known} ({IN_WORDS[known]}): {', '.join(parts)}")
    if handover := summary.get("handover"):  # older results and other topologies have none
        presets = (summary["kv_transfer"], handover)
        _line("KV transfer, hand-over", ", ".join(text.partition(":")[0] for text in presets))
    for note in summary.get("latency_notes", ()):  # older results have none
        _text(note, "  ")
    trace = summary["trace"]
    if trace["name"] is not None:  # a dense model has none
        _line("Routing trace", f"{trace['name']} ({trace['provenance']})")
        _text(trace["rests_on"], "  ")
        _text(trace["layers"], "  ")
    if beyond := trace.get("prompt_tokens_beyond_recorded_share"):
        share = f"  {100 * beyond:.0f}% of the prompt tokens"
        click.echo(f"{share} repeat recorded ones: prompts are longer")


def print_log_part(summary: Mapping[str, Any]) -> None:
    """Print what was read of a log, and what of it is measured, if anything is."""
    for line in _log_lines(summary["trace"]):
        click.echo(line)


def _log_lines(trace: Mapping[str, Any]) -> Iterator[str]:
    if header := trace.get("log"):
        from eldr_sim.traces.requests.logs.log_header import header_in_words

        yield f"Read: {header_in_words(header)}"
    if part := trace.get("log_window"):
        from eldr_sim.traces.requests.logs.log_window import part_in_words

        yield f"Measured: {part_in_words(part)}"


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
