"""``eldr-sim trace``, of routing traces, and ``curve``, of a request log's caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eldr_sim.cli.console import print_table, print_written, progress_bar
from eldr_sim.cli.decorators import complete, option, plot_option, traces, writes
from eldr_sim.cli.lazy import LazyGroup
from eldr_sim.errors import InputError
from eldr_sim.traces.routing.imports.formats import READERS
from eldr_sim.traces.routing.manifest import FILE_NAMES, REFERENCE_TRACE, builtin_traces, one_phase

if TYPE_CHECKING:
    from eldr_sim.traces.routing.format import RoutingTrace
    from eldr_sim.traces.routing.overlap import Overlap
    from eldr_sim.traces.routing.statistics import TraceStatistics
    from eldr_sim.validation.trace_report import TraceReport


from eldr_sim.cli.decorators import models

_COMMANDS = {
    "capture": ("capture:capture", "Record a routing trace from a real engine."),
    "fit-synthetic": ("synthetic:fit_synthetic", "Fit a generative model of routing to a trace."),
    "synthesize": ("synthetic:synthesize", "Write a synthetic trace of any shape."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, short_help="Inspect, list and import routing traces.")
def trace() -> None:
    """Routing traces: which experts a model chose, token by token."""


@trace.command("list")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
def list_traces(folders: tuple[Path, ...]) -> None:
    """List the embedded traces and those in FOLDERS."""
    from eldr_sim.traces.routing.format import open_trace

    names = [*builtin_traces(), *(str(folder) for folder in folders)]
    rows = []
    for name in names:
        opened = open_trace(name)
        manifest, held = opened.manifest, int(opened.is_calibration.sum())
        experts = f"{opened.n_experts} top-{opened.top_k}"
        split = f"{opened.n_requests - held}+{held}"
        rows.append(
            [name, manifest.model, manifest.provenance, str(opened.n_layers), experts, split,
             str(manifest.n_tokens), " ".join(manifest.domains)]
        )  # fmt: skip
    columns = ["trace", "model", "provenance", "layers", "experts", "serving+calibration"]
    columns += ["tokens", "domains"]
    print_table("Routing traces", columns, rows)


@trace.command()
def formats() -> None:
    """List the formats of request logs, each with its first lines.

    `--workload FILE` replays logs and `--load FILE` follows rates; for formats that are not read,
    an alternative is named. `--columns` reads any other table."""
    from eldr_sim.traces.requests.logs.formats import known_formats

    for known in known_formats():
        use = f"--{known.use}" if known.use else f"not read; instead: {known.way}"
        click.echo(f"{known.name} ({use}): {known.about}")
        for line in known.example.splitlines():
            click.echo(f"    {line}")


@trace.command(short_help="Turn the history of a fleet into the events of a run.")
@click.argument("fleet", type=click.Path(path_type=Path))
@option("--log", Path, "Log of the requests of the same time, as for --workload.",
        required=True, metavar="FILE")  # fmt: skip
@option("--columns", None, "Columns of the log if its format is unknown, as for run.",
        metavar="SPEC")  # fmt: skip
@option("--topology", None, "The cluster to run, such as 4C or 2P4D.", required=True,
        metavar="xC|xPyD")  # fmt: skip
@option("--pool", None, "The pool that the workers of FLEET are in: prefill or decode.",
        default="decode", metavar="NAME")  # fmt: skip
@option("--start", None, "Time of the first request on the clock of FLEET, if the log has no "
    "dates.", metavar="TIME")  # fmt: skip
@option("--start-up", click.FloatRange(0.0), "Time from a container's start until the worker "
        "serves, s.", default=0.0, metavar="S")  # fmt: skip
@writes("--out", Path, "YAML file to write, for --events.", default=Path("events.yaml"),
        metavar="FILE")  # fmt: skip
@option("--force", bool, "Replace the file in --out.")
def incident(
    fleet: Path,
    log: Path,
    columns: str | None,
    topology: str,
    pool: str,
    start: str | None,
    start_up: float,
    out: Path,
    force: bool,
) -> None:
    """Turn FLEET, the history of a fleet's workers, into the --events of a run (docs/faults.md).

    FLEET is a CSV with the columns time, worker and event (start, stop, fail, restart), the output
    of `kubectl get events -o json`, or a range export of Prometheus with a series per worker."""
    from eldr_sim.outputs import whole_file
    from eldr_sim.simulator.setup.config.pools import pools_of
    from eldr_sim.traces.requests.logs.fleet_events import events_of, origin_of, read_fleet_events
    from eldr_sim.traces.requests.logs.request_logs import read_request_log

    pools = pools_of(topology).root
    if pool not in pools:
        raise InputError("pool", repr(pool), ", ".join(pools))
    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "--force to replace it")
    history = read_fleet_events(fleet, start_up)
    requests = read_request_log(log, columns)
    if not requests.timed:
        raise InputError("log", f"{log} has no times", "a log of requests with times")
    origin = origin_of(requests.first_ns, history.changes, start)
    end_s = float(requests.arrival_s[-1])
    called = pool if "prefill" in pools else "worker"
    events, named = events_of(history.changes, called, pools[pool].workers, origin, end_s)
    click.echo(f"{history.kind}: {len(history.changes)} changes of {len(named)} workers; "
               f"requests come for {end_s:,.0f} s")  # fmt: skip
    for why, n in history.left_out.items():
        click.echo(f"Left out: {n} {why}")
    for where, name in named.items():
        click.echo(f"  {where}  {name}")
    for event in events:
        click.echo(f"  {json.dumps(event)}")
    if not events:
        raise InputError("fleet", f"{fleet}: all workers served while the requests came")
    with whole_file(out) as file:
        file.write_text("".join(f"- {json.dumps(event)}\n" for event in events), "utf-8")
    click.echo(f"Wrote {out}: eldr-sim run --workload {log} --topology {topology} --events {out}")


@trace.command()
@click.argument("name", default=REFERENCE_TRACE, metavar="[NAME|DIR]",
        shell_complete=complete(traces, "dir"))  # fmt: skip
@option("--json as_json", bool, "Print all figures as JSON instead of tables.")
@writes("--out", Path, "Folder for all figures: statistics.json and CSV files.")
@plot_option
@option("--force", bool, "Replace the report in --out.")
def inspect(name: str, as_json: bool, out: Path | None, plot: bool, force: bool) -> None:
    """Validate a trace and print what is in it."""
    # Imported here: the other commands need none of it.
    from eldr_sim.cli.run_options import check_out
    from eldr_sim.traces.routing.format import open_trace
    from eldr_sim.traces.routing.imports.importers import DECODE_ONLY
    from eldr_sim.validation.trace_report import MARKER, inspect_trace, write_trace_report

    if plot and out is None:
        raise InputError("plot", "--plot without --out", "together with --out DIR")
    check_out(out, force, MARKER)
    opened = open_trace(name)
    with progress_bar("inspecting") as update:
        report = inspect_trace(opened, update)
    if out is not None:
        write_trace_report(report, out, plot=plot, force=force)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
        return
    statistics = report.statistics
    _print_manifest(opened)
    _print_requests(statistics)
    _print_activated(statistics)
    _print_copies(statistics)
    click.echo()
    _print_overlap(report.overlap)
    load = statistics.load_max_over_mean
    click.echo(f"Load of the most loaded expert over the mean, by layer: {_range(load)}")
    click.echo(
        f"Experts that the next token chooses again: {statistics.neighbour_reuse:.3f} "
        f"(random pairs of tokens {statistics.random_reuse:.3f}, "
        f"uniform {statistics.uniform_reuse:.3f})"
    )
    for found in statistics.next_layer:
        before, after = (sum(x) / len(x) for x in (found.entropy, found.conditional))
        bits = f"{before:.2f} bits, {after:.2f} given this layer's"
        click.echo(f"Next layer's expert ({found.of}): {bits}")
    if report.coactivation:
        inside = {name: sum(x) / len(x) for name, x in report.coactivation.items()}
        click.echo(
            f"Pairs of a token's experts in one of 4 equal groups: {inside['affinity']:.3f} by "
            f"affinity, {inside['neighbours']:.3f} of neighbours"
        )
    _print_domains(statistics)
    for group, rho in report.rho.items():
        click.echo(f"Rho of count-idf signatures on all layers, {group}: {rho:.4f}")
    _print_grouping(report)
    if pearson := statistics.prefill_decode_pearson:
        each = ", ".join(f"{domain} {value:.2f}" for domain, value in pearson.items())
        click.echo(
            f"Prefill-decode correlation of expert use, by domain: {each} (an untrained model is "
            "high here too)"
        )
    else:
        click.echo(DECODE_ONLY)
    if out is not None:
        click.echo(f"Wrote {out}")


@trace.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@writes("--out", Path, "Folder of the routing trace to write.", required=True)
@option("--format", [*READERS], "Format of FILE.  [default: detected from the content]")
@option("--model", None, "Model that the experts were recorded from.", required=True)
@option("--experts n_experts", int, "Number of experts per layer, if FILE does not contain it.",
        metavar="N")  # fmt: skip
@option("--ranked", bool, "Treat the ids of a token as ordered by gate weight, highest first.")
@option("--domain", None, "Domain of the requests, for formats without domains.", default="all")
@option("--prompt-share", float, "Share of each request to use as its prompt, 0 to 1, if only "
        "generated or only prompt tokens were recorded: 0.25.", metavar="SHARE")  # fmt: skip
@option("--encoding", [*FILE_NAMES], "Encoding of the ids: npy (plain) or xz (compressed).",
        default="npy")  # fmt: skip
@option("--captured-by", None, "Tool that recorded the experts, for readers of results.",
        required=True)  # fmt: skip
@option("--source-data", None, "Source of the text, with its licence, for readers of results.",
        required=True)  # fmt: skip
@option("--notes", None, "Notes on the recording, shown with every result.", default="",
        show_default=False)  # fmt: skip
@option("--provenance", ["recorded", "synthetic", "imported"], "Origin of the trace, as stated by "
    "results.", default="imported")  # fmt: skip
@option("--calibration-fraction", float, "Share of each domain's requests that calibrate policies, "
        "0 to 1.", default=0.5)  # fmt: skip
@option("--force", bool, "Replace the trace in --out.")
def import_(file: Path, out: Path, **options: Any) -> None:
    """Import chosen experts that another tool recorded.

    FILE is a NumPy archive, a Parquet file, JSON lines with the routed_experts of vLLM or SGLang,
    the folder of a GPT-OSS expert fingerprint, a dump of SGLang's expert distribution recorder,
    or CSV files of llama.cpp's moe-trace or of moe-beyond; docs/formats.md describes them."""
    from eldr_sim.traces.routing.imports.importers import DECODE_ONLY, import_trace

    opened = import_trace(file, out, **options)
    print_written(out, opened)
    if not opened.has_prompts:
        click.echo(DECODE_ONLY)


def _print_manifest(opened: RoutingTrace) -> None:
    manifest = opened.manifest
    click.echo(f"Trace:      {opened.path.name}, format v{manifest.format_version}, valid")
    click.echo(f"Model:      {manifest.model} ({manifest.provenance})")
    click.echo(f"Captured:   {manifest.captured_by}")
    click.echo(f"Text:       {manifest.source_data}")
    click.echo(
        f"Shape:      {manifest.n_tokens} tokens x {opened.n_layers} layers x top-{opened.top_k} "
        f"of {opened.n_experts} experts" + ("" if opened.has_prompts else ", generated tokens only")
    )
    if manifest.rank_groups is not None:
        groups = ", ".join(map(str, manifest.rank_groups))
        ranked = len(manifest.rank_groups) == opened.top_k
        click.echo(f"Gate order: {'all' if ranked else f'in groups of {groups}'}")
    if (scores := opened.gate_scores) is not None:
        kinds = " and ".join(scores.kinds)
        click.echo(f"Gate:       summed {kinds} of {len(scores.requests)} prompts")
    if (stands := one_phase(manifest)) is not None:
        click.echo(f"Phases:     {stands}")
    click.echo(f"Checksum:   {manifest.checksum}")
    if manifest.notes:
        click.echo(f"Notes:      {manifest.notes}")
    click.echo()


def _print_requests(statistics: TraceStatistics) -> None:
    rows = [
        [domain, str(counts["serving"]), str(counts["calibration"]),
         _lengths(statistics.prompt_len[domain]), _lengths(statistics.output_len[domain])]
        for domain, counts in statistics.requests.items()
    ]  # fmt: skip
    columns = ["domain", "serving", "calibration", "prompt tokens", "output tokens"]
    print_table("Requests", columns, rows)
    click.echo()


def _print_activated(statistics: TraceStatistics) -> None:
    rows = [
        [entry.group, str(entry.batch), f"{entry.uniform:.1f}", f"{entry.mixed:.1f}",
         f"{sum(entry.same_domain.values()) / len(entry.same_domain):.1f}",
         f"{100 * entry.reduction:.1f}%"]
        for entry in statistics.distinct_experts
    ]  # fmt: skip
    columns = ["domains", "batch", "uniform", "mixed", "one domain", "saved"]
    print_table("Activated experts a layer in a decode step, no request twice", columns, rows)


def _print_copies(statistics: TraceStatistics) -> None:
    """Print how often copies of a request meet in runs that are longer than the trace."""
    click.echo()
    rows = [
        [entry.group, str(entry.batch), f"{entry.mixed:.1%}", f"{entry.one_domain:.1%}"]
        for entry in statistics.copies
    ]
    title = "Requests of a random batch that have a copy of themselves in it, where a run is longer"
    print_table(f"{title} than the trace", ["domains", "batch", "mixed", "one domain"], rows)


def _print_overlap(overlap: Overlap) -> None:
    def figures(values: dict[int, float], digits: int) -> str:
        return ", ".join(f"{key}: {value:.{digits}f}" for key, value in values.items())

    click.echo(
        f"Experts of a token of each of n requests, a layer: {figures(overlap.mixed, 1)}\n"
        f"Experts of n consecutive tokens of a request: {figures(overlap.one_request, 1)}"
    )
    if overlap.cosine_between:
        click.echo(
            f"Cosine of two requests' expert counts, by percent: "
            f"{figures(overlap.cosine_between, 2)}; nearest {overlap.cosine_nearest:.2f}, a "
            f"request's halves {overlap.cosine_within:.2f}"
        )


def _print_grouping(report: TraceReport) -> None:
    requests, rho = report.rho_by_prompt
    if rho:
        values = ", ".join(f"{n}: {value:.2f}" for n, value in rho.items())
        click.echo(f"Rho by prompt tokens, {requests} requests of 128 tokens or more: {values}")
    if (spectrum := report.spectrum) is not None:
        parts = ", ".join(f"{n}: {share:.2f}" for n, share in spectrum.components.items())
        told = "" if spectrum.label is None else f"; the domain explains {spectrum.label:.0%}"
        click.echo(
            f"Between {spectrum.requests} requests: variance {spectrum.variance:.3f}, share of its "
            f"greatest components {parts}; {spectrum.dimensions:.1f} dimensions{told}; "
            f"{spectrum.families:.0f} families, on which savings by grouping rest: other requests "
            f"of the kind would give \N{PLUS-MINUS SIGN}{spectrum.scatter:.0%} of them"
        )
    if (grouping := report.grouping) is not None:
        names = {"oracle": "an oracle", "signature": "prompt signatures", "label": "the domain"}
        saved = ", ".join(
            f"{names[name]} {saving.saved:.1%} (busiest {saving.busiest:.2f})"
            for name in names
            if (saving := getattr(grouping, name)) is not None
        )
        click.echo(
            f"Grouping {grouping.workers} x {grouping.batch} concurrent requests: "
            f"{grouping.random:.1f} experts a layer in a random group (busiest "
            f"{grouping.random_busiest:.2f} of the mean); saved by {saved}"
        )


def _print_domains(statistics: TraceStatistics) -> None:
    divergence = statistics.domain_divergence
    pairs = [js for a, row in divergence.between.items() for b, js in row.items() if a < b]
    if pairs:
        halves = [*divergence.split_half.values()]
        apart = f", halves of a domain {max(halves):.4f} at most" if halves else ""
        between = f"{min(pairs):.3f} to {max(pairs):.3f} bits"
        click.echo(f"Jensen-Shannon divergence of two domains: {between}{apart}")
    if (nearest := statistics.nearest_neighbour_accuracy) is not None:
        click.echo(f"Requests with the nearest other request in the same domain: {nearest:.3f}")


def _lengths(summary: dict[str, float]) -> str:
    return f"{summary['min']:.0f} to {summary['max']:.0f}, mean {summary['mean']:.1f}"


def _range(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


_MILLIONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@click.group(short_help="Show what a cache of any size would find in a log.")
def curve() -> None:
    """Curves over a size, of a workload alone: no cluster is simulated."""


@curve.command()
@click.argument("log", type=click.Path(path_type=Path))
@option("--sessions-file", None, "Table of sessions: request, parent, gap_s.", metavar="FILE.csv")
@option("--model", None, "Model that gives the size of a cached token.", default="Qwen3-30B-A3B",
        shell_complete=complete(models))  # fmt: skip
def hits(log: Path, sessions_file: str | None, model: str) -> None:
    """Show the prefix hit rate of LOG by the size of one cache, and of one without bounds.

    LOG has block hashes (Mooncake's or Bailian's format). The cache evicts the least recently
    used block (LRU), follows ARC, or evicts the worst session; Belady's bound is the most that
    any order can find. Requests come one after the other."""
    from eldr_sim.kernel_profiles.models import load_model
    from eldr_sim.traces.requests.caches.eviction import hit_rates
    from eldr_sim.traces.requests.caches.reuse import reuse_of
    from eldr_sim.traces.requests.load import Load
    from eldr_sim.traces.requests.request_columns import make_requests
    from eldr_sim.traces.requests.texts import draw_texts

    load = Load(str(log), sessions_file=sessions_file)
    requests = make_requests(draw_texts((("en", 1.0),)), load)
    if not requests.prefix_block_tokens:
        raise InputError("log", f"{log.name} has no hash_ids", "a log with block hashes")
    reuse, size = reuse_of(requests), load_model(model).kv_bytes_per_token
    rows = [
        [f"{millions:g}", f"{size * millions / 1e3:,.0f}", f"{100 * rate:.2f}",
         *(f"{100 * other:.2f}" for other in hit_rates(requests, blocks)),
         f"{100 * rate / reuse.ideal_hit_rate:.0f}" if reuse.ideal_hit_rate else ""]
        for millions in _MILLIONS
        for blocks in [int(millions * 1e6 / reuse.block_tokens)]
        for rate in [reuse.hit_rate(blocks)]
    ]  # fmt: skip
    ideal = f"{100 * reuse.ideal_hit_rate:.2f}"
    rows.append(["without bounds", "", *[ideal] * 4, "100"])
    columns = ["cache (M tokens)", f"GB of {model}", "LRU (%)", "ARC (%)", "by session (%)",
               "Belady's bound (%)", "LRU of the ideal one (%)"]  # fmt: skip
    print_table("", columns, rows)
    click.echo(
        f"{len(requests):,} requests, {reuse.n_tokens / len(requests):,.0f} prompt tokens on "
        f"average; all begin with the same {100 * reuse.common_share:.2f}% of their tokens."
    )
