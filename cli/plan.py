"""``eldr-sim plan``: the cheapest cluster for an objective, or the highest rate of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from eldr_sim.cli.console import RunCounter, print_log_part, print_table, run_counter
from eldr_sim.cli.decorators import (
    OUTPUT,
    TENSOR_PARALLEL_SIZE,
    complete,
    jobs_option,
    option,
    plot_option,
    writes,
)
from eldr_sim.cli.decorators import gpus as gpu_names
from eldr_sim.cli.decorators import policies as policy_names
from eldr_sim.cli.kept_runs import kept_runs
from eldr_sim.cli.run_options import (
    GroupedCommand,
    check_out,
    config_from_options,
    plot_extras,
    run_options,
    served,
)
from eldr_sim.errors import InputError
from eldr_sim.policies.choice import split
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import RunConfig

if TYPE_CHECKING:
    from eldr_sim.planning.runs.journal import Journal
    from eldr_sim.planning.search.answer import Answer
    from eldr_sim.planning.slo import Objective

#: Measured window of a run where none is given, s: a plan makes many.
_DURATION = 30.0
_ATTAINMENT, _MAX_GPUS = 0.99, 64
_MANY_REQUESTS = 20_000  # of a log: a run takes seconds


@click.command(cls=GroupedCommand, short_help="Find the cheapest cluster that meets an SLO.")
@option("--slo", None, "Objective of a good request, ms: ttft:500,tpot:30 (also e2el); a list, or "
    "repeat the option. Required, except with --prefill-only.", multiple=True,
        metavar="METRIC:MS,...")  # fmt: skip
@option("--attainment", float, "Share of requests that must be good, 0 to 1.", default=_ATTAINMENT)
@option("--gpu gpus", None, "GPUs to choose from.  [default: H100]", metavar="NAME,...",
        shell_complete=complete(gpu_names, "file", listed=True))  # fmt: skip
@option("--policy --policies policies", None, "Decode policies to choose from; a list, or repeat "
    "the option.", multiple=True, metavar="NAME,...",
        shell_complete=complete(policy_names("decode"), listed=True))  # fmt: skip
@option("--max-gpus", int, "Maximum number of GPUs of a cluster.", default=_MAX_GPUS)
@option("--price", None, "Price of a GPU-hour by GPU, dollars: h100=2.5.", metavar="GPU=PRICE,...")
@option(f"{TENSOR_PARALLEL_SIZE} sizes", None, "Numbers of GPUs per worker to choose from, for "
        "each pool.  [default: all powers of two up to a node]", metavar="N,...")  # fmt: skip
@option("--data-parallel-size -dp --dp engines", None, "Numbers of engines per worker, which share "
        "experts, to choose from, for each pool.  [default: 1; MLA and large MoE models: 1 and 8]",
        metavar="N,...")  # fmt: skip
@option("--ffn-ranks", None, "Numbers of separate GPUs for the experts of a decode worker to "
    "choose from.  [default: 0]", metavar="N,...", common=False)  # fmt: skip
@option("--num-redundant-experts redundant", None, "Numbers of redundant experts to choose from, "
        "where engines share experts.  [default: 0]", metavar="N,...", common=False)  # fmt: skip
@option("--drafts", None, "Numbers of drafts of --speculative-config to choose from, 0 for none.",
        metavar="N,...", common=False)  # fmt: skip
@option("--vary axes", None, "Another field of a run, with values to choose from: "
        "all2all_backend=deepep_ll,pplx. Repeat for more: every combination is searched.",
        multiple=True, metavar="FIELD=VALUE,...")  # fmt: skip
@option("--prefill-only", bool, "Plan prefill workers alone: their strategy, token budget and "
        "chunks. Without --slo, the fastest for --num-requests prompts at once.")  # fmt: skip
@option("--strategy strategies", None, "With --prefill-only: ways to spread the model over the "
    "GPUs of a worker: async_ep,dp_ep,tp_ep,tp,pp.  [default: all]", metavar="NAME,...",
        common=False)  # fmt: skip
@option("--topology", None, "Find the highest rate of this cluster instead; with --load: the "
    "maximum number of workers.", metavar="xPyD")  # fmt: skip
@option("--autoscale autoscalers", None, "Autoscalers to choose from, for a changing load "
    "(--load, or a log).", multiple=True, show_default="all without knowledge of the future",
        metavar="NAME,NAME,...",
        shell_complete=complete(policy_names("scaling"), listed=True))  # fmt: skip
@option("--gpus n_gpus", int, "Find the cluster of up to N GPUs with the highest rate instead.",
        metavar="N")  # fmt: skip
@option("--knobs", bool, "With --gpus: ablation of each choice, alone and beside the others.",
        common=False)  # fmt: skip
@option("--why-not", None, "Explain why a cluster is not the answer: 1P2D:tp8, 4C:tp2,dp4, or "
        "1P2D:tp2+tp1,dp8 of prefill + decode workers. Repeat for more.", multiple=True,
        metavar="xPyD:SIZES", common=False)  # fmt: skip
@option("--sensitivity", bool, "Report which inputs would change the answer if 10% off.",
        common=False)  # fmt: skip
@option("--seeds", int, "Maximum number of seeds per cluster; fewer are run if they suffice.",
        default=8)  # fmt: skip
@jobs_option
@run_options(
    without=(
        "policy", "gpu", "topology", "tensor_parallel_size", "goodput", "max_concurrency",
        "data_parallel_size", "num_redundant_experts", "preset", "autoscale",
    )
)  # fmt: skip
@writes("--out", Path, "Folder for the plan; completed runs are kept beside it until then.",
        section=OUTPUT)  # fmt: skip
@option("--resume", bool, "Continue an interrupted plan for --out.", section=OUTPUT)
@option("--emit", Path, "Folder for files that launch the answer: vLLM, SGLang, TensorRT-LLM, "
    "llm-d, Dynamo, a benchmark.", section=OUTPUT)  # fmt: skip
@option("--force", bool, "Replace the plan in --out, the files in --emit.", section=OUTPUT)
@plot_option
@option("--verbose", bool, "Print the verdict on every cluster shape.", section=OUTPUT)
def plan(
    out: Path | None,
    resume: bool,
    emit: Path | None,
    force: bool,
    verbose: bool,
    plot: bool,
    **options: Any,
) -> None:
    """Find the cheapest xPyD or xC cluster that meets an SLO at a rate.

    With --topology, find the highest rate of this cluster within the SLO; with --gpus N, the
    shape and split of N GPUs that carry the highest rate; with --load or --autoscale, the cheapest
    autoscaler and fleet for a load that changes. Exit code 1 if there is none."""
    # The simulator takes long to import: --help and completion do without.
    from eldr_sim.planning.search.answer import MARKER

    day = bool(options["autoscalers"] or options["load"])
    if verbose and (not options["slo"] or day or (options["topology"] or options["n_gpus"])):
        raise InputError("verbose", "no cluster shapes are searched", "without --verbose")
    check_out(out, force and (out is not None or emit is None), MARKER)
    if emit is not None:
        from eldr_sim.planning.launch.files import MARKER as LAUNCHES
        from eldr_sim.planning.launch.files import launch_files_of, write_launch_files
        from eldr_sim.simulator.setup.config.pools import pools_of

        if options["prefill_only"] or day:
            what = "fleets that change" if day else "prefill workers alone"
            raise InputError("emit", f"{what} have no launch files", "none")
        topology = options["topology"]
        if topology and any(pool.ffn_ranks for pool in pools_of(topology).root.values()):
            raise InputError("emit", f"{topology} has no launch files", "xPyD or xC")
        if any(_integers("ffn_ranks", options["ffn_ranks"])):
            problem = "decode workers with separate FFN GPUs are not launched"
            raise InputError("emit", problem, "none beside --ffn-ranks")
        try:
            check_out(emit, force, LAUNCHES)
        except InputError as error:
            raise InputError("emit", error.problem, error.allowed) from None
    extras = plot_extras(plot, out)
    if resume and out is None:
        raise InputError(
            "resume", "there is no plan to continue without --out", "together with --out DIR"
        )
    with kept_runs(out, resume, "plan") as journal:
        answer = planned(**options, journal=journal)
        if out is not None:
            answer.write(out, force=force, extras=extras)
    _print(answer, verbose)
    click.echo(f"{len(answer.runs)} simulated runs")
    if out is not None:
        click.echo(f"Wrote {out}")
    if emit is not None and answer.best is not None:
        write_launch_files(launch_files_of(answer), emit, force=force)
        click.echo(f"Wrote {emit}")
    if answer.best is None:
        sys.exit(1)


class _Asked(NamedTuple):
    """The command's own options; the others are of a run."""

    slo: tuple[str, ...]
    attainment: float
    gpus: str | None
    policies: tuple[str, ...]
    max_gpus: int
    price: str | None
    sizes: str | None
    engines: str | None
    ffn_ranks: str | None
    redundant: str | None
    drafts: str | None
    axes: tuple[str, ...]
    topology: str | None
    n_gpus: int | None
    knobs: bool
    prefill_only: bool
    strategies: str | None
    autoscalers: tuple[str, ...]
    why_not: tuple[str, ...]
    sensitivity: bool
    seeds: int
    jobs: int | None

    @property
    def cluster_is_given(self) -> bool:
        """Whether its GPUs are."""
        return self.topology is not None or self.n_gpus is not None


def planned(
    progress: RunCounter = run_counter, journal: Journal | None = None, **options: Any
) -> Answer:
    """Return the answer to what the options of the command ask."""
    from eldr_sim.planning.runs.run_cache import RunCache
    from eldr_sim.planning.search import goals
    from eldr_sim.planning.search.axes import Space
    from eldr_sim.planning.search.why_not import named
    from eldr_sim.planning.slo import Objective, looks_up_to

    asked = _Asked(**{name: options.pop(name) for name in _Asked._fields})
    if not asked.slo and not asked.prefill_only:
        raise InputError("slo", "none", "METRIC:MS such as ttft:500,tpot:30, or --prefill-only")
    objective = None
    if asked.slo:
        looks = looks_up_to(asked.seeds)
        objective = Objective(parse_slo(asked.slo), asked.attainment, looks)
    day = bool(asked.autoscalers) or options.get("load") is not None
    _check_question(asked, options.get("request_rate"), day)
    sizes, groups = _worker_sizes(asked)
    if asked.topology is not None:
        given = {"tensor_parallel_size": sizes, "data_parallel_size": groups}
        options |= {"topology": asked.topology} | {k: v[0] for k, v in given.items() if v}
    elif asked.prefill_only:
        options["topology"] = "1P"
    config = config_from_options(options)
    axes = _axes(asked)
    if options.get("config_file") is None and objective is not None:
        config = _with_window(config, objective, options)
    _note_long_log(config)
    is_search = not (day or asked.cluster_is_given or objective is None)
    if is_search and not config.requests.from_file and config.requests.request_rate is None:
        raise InputError("request_rate", "none", "--request-rate, or --topology to find it")
    for field, about in (("why_not", asked.why_not), ("sensitivity", asked.sensitivity)):
        if about and (not is_search or asked.prefill_only):
            raise InputError(
                field, "there is no search for the cheapest cluster", "--slo, --request-rate"
            )
    for cluster in asked.why_not:  # before anything is prepared
        named(cluster)
    names = _list(asked.strategies)
    decoders = served(config, [name for text in asked.policies for name in split(text)])
    if objective is None and decoders:
        raise InputError("policy", "prefill workers alone do not decode")
    space = Space(
        config, decoders, _list(asked.gpus), asked.max_gpus, _prices(asked.price), sizes, groups,
        _integers("ffn_ranks", asked.ffn_ranks), names, axes,
    )  # fmt: skip
    goal: goals.Goal
    if objective is None:
        goal = goals.Fastest(min(asked.seeds, 3))
    elif day:
        rules = [name for text in asked.autoscalers for name in split(text)]
        goal = goals.CheapestFleet(objective, rules, bounded=asked.topology is not None)
    elif asked.cluster_is_given:
        goal = goals.HighestRate(objective, asked.n_gpus, asked.knobs)
    else:
        goal = goals.Cheapest(objective, asked.why_not, asked.sensitivity)
    with progress("planning") as count:
        return goals.find(space, goal, RunCache(asked.jobs, count, journal))


def _check_question(asked: _Asked, rate: object, day: bool) -> None:
    """Raise InputError for options that ask two questions at once."""
    if not asked.slo and asked.attainment != _ATTAINMENT:
        raise InputError("attainment", "there is no objective to attain", "--slo")
    if asked.max_gpus != _MAX_GPUS and asked.cluster_is_given:
        beside = "--gpus" if asked.topology is None else "--topology"
        raise InputError(
            "max_gpus", f"given together with {beside}, which says how many GPUs there are", "none"
        )
    if asked.n_gpus is not None and (asked.topology is not None or rate is not None):
        other = "--request-rate" if asked.topology is None else "--topology"
        raise InputError("gpus", f"together with {other}", "one of the two")
    if asked.knobs and asked.n_gpus is None:
        raise InputError("knobs", "there is no split of GPUs to search", "together with --gpus N")
    if asked.n_gpus is not None and asked.prefill_only:
        raise InputError("gpus", "together with --prefill-only", "one of the two")
    if day and (asked.n_gpus is not None or asked.prefill_only):
        other = "--gpus" if asked.n_gpus is not None else "--prefill-only"
        field = "autoscale" if asked.autoscalers else "load"
        raise InputError(field, f"together with {other}", "--max-gpus, or --topology")
    if asked.topology is not None and rate is not None and not day:
        raise InputError("topology", "together with --request-rate", "one of the two")
    if asked.topology is not None and asked.prefill_only:
        raise InputError("prefill_only", "together with --topology", "one of the two")
    if not asked.slo and rate is not None:
        raise InputError("request_rate", "without --slo, all prompts arrive at once", "--slo")
    if asked.ffn_ranks and (day or asked.prefill_only or asked.topology is not None):
        problem = "no shapes of decode workers are searched"
        raise InputError("ffn_ranks", problem, "--slo with --request-rate or --gpus")
    if asked.strategies and not asked.prefill_only:
        raise InputError("strategy", "applies only to prefill workers alone", "--prefill-only")
    if asked.engines and asked.prefill_only:
        raise InputError("data_parallel_size", "prefill workers alone have --strategy", "none")


def _worker_sizes(asked: _Asked) -> list[list[int]]:
    worker_sizes = []
    given = {"tensor_parallel_size": asked.sizes, "data_parallel_size": asked.engines}
    for field, text in given.items():
        numbers = _integers(field, text)
        if len(set(numbers)) < len(numbers):
            raise InputError(field, f"{text} names a value twice")
        if min(numbers, default=1) < 1:
            raise InputError(field, str(text), "1 or more")
        if asked.topology is not None and len(numbers) > 1:
            raise InputError(field, f"{text} for one cluster", "one number")
        worker_sizes.append(numbers)
    return worker_sizes


def _axes(asked: _Asked) -> dict[str, list[Any]]:
    """Return further fields and the values to choose from."""
    from eldr_sim.planning.search.axes import DRAFTS, parse_axes

    wanted = parse_axes(asked.axes)
    for field, text in (("num_redundant_experts", asked.redundant), (DRAFTS, asked.drafts)):
        if text:
            wanted[field] = _integers(field, text)
    if wanted and asked.prefill_only:
        raise InputError(next(iter(wanted)), "prefill workers alone have --strategy", "none")
    return wanted


def _with_window(config: RunConfig, objective: Objective, options: dict[str, Any]) -> RunConfig:
    """Return a configuration with the window of a plan's runs, where options do not say it.

    A warm-up is as long as requests live that just keep the TPOT bound: a cluster is full then. Of
    a part of a log those before it are as long as nine in ten of the log are. A whole log has none,
    nor have a load that changes and sessions, all of whose turns count."""
    whole = (
        config.requests.measures_whole_log
        or config.requests.n_sessions is not None
        or bool(config.requests.load)
    )
    if options["num_requests"] is not None or whole:
        return config
    window = (
        {"duration": _DURATION}
        if config.requests.duration is None and not config.requests.chooses_part
        else {}
    )
    length: float | str = config.effective_output_len
    if config.requests.replays_log and length == "recorded":
        length = _long_output(config)
    tpot_ms = objective.level.tpot
    if options["warmup"] is None and not isinstance(length, str) and tpot_ms is not None:
        window["warmup"] = max(config.requests.warmup_s, length * tpot_ms / 1e3)
    return config.model_copy(update=window)


def _note_long_log(config: RunConfig) -> None:
    """Say before a plan of a long log what each of its runs replays."""
    if config.requests.measures_whole_log and config.requests.length_shape is None:
        from eldr_sim.traces.requests.load import named_log

        length, requests = config.effective_output_len, config.requests
        log = named_log(requests.workload, requests.columns, None, length, requests.time_unit)
        if len(log.arrival_s) > _MANY_REQUESTS:
            click.echo(
                f"Every run replays all {len(log.arrival_s):,} requests of the log, "
                f"{log.arrival_s[-1]:,.0f} s; --busiest 10m plans for its peak",
                err=True,
            )


def _long_output(config: RunConfig) -> float:
    """Return the output tokens that nine in ten requests of a log do not exceed."""
    import numpy as np

    from eldr_sim.traces.requests.logs.request_logs import known_log

    requests = config.requests
    log = known_log(requests.workload, requests.columns, time_unit=requests.time_unit)
    return float(np.quantile(log.output_len, 0.9))


def _list(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _integers(field: str, text: str | None) -> list[int]:
    integers = []
    for part in _list(text):
        try:
            integers.append(int(part))
        except ValueError:
            raise InputError(field, repr(part), "a whole number") from None
    return integers


def _prices(text: str | None) -> dict[str, float]:
    prices: dict[str, float] = {}
    for part in _list(text):
        name, equals, price = part.partition("=")
        if name in prices:
            raise InputError("price", f"{name} is given twice", "GPU=PRICE, each once")
        try:
            prices[name] = float(price)
        except ValueError:
            equals = ""
        if not (equals and 0.0 < prices[name] < float("inf")):
            raise InputError("price", repr(part), "GPU=PRICE, such as h100=2.5")
    return prices


def _print(answer: Answer, verbose: bool) -> None:
    from eldr_sim.reports.plan_section import plan_words, shapes_table

    record = answer.record()
    words = plan_words(record, narrow=True)
    assumptions, tables = record["assumptions"], [words[part] for part in ("rows", "front", "day")]
    click.echo(words["question"])
    left_out = [note for note in record["notes"] if note.startswith("Not searched: ")]
    for note in left_out:
        click.echo(note)
    if assumptions is not None and assumptions["trace"].get("log_window"):
        print_log_part(assumptions)
        click.echo(
            "Intervals are over seeds, which draw the routing and random decisions: arrivals and "
            "lengths are the log's in all of them; its blocks say how another day may differ"
        )
    click.echo()
    if answer.best is None:
        click.echo(f"{words['title']}.")
    for name, text in words["answer"]:
        _line(name, _ascii(text))
    if verbose:
        tables.append(shapes_table(record))
    for table in tables:
        if table is not None:
            rows = [[_ascii(cell.text) for cell in row] for row in table.rows]
            click.echo()
            print_table(table.caption, list(table.columns), rows)
    if notes := [note for note in record["notes"] if note not in left_out]:
        click.echo("\n" + "\n".join(notes))
    if answer.best is not None and assumptions is not None:
        _print_assumptions(assumptions)
    for warning in record["warnings"]:
        click.echo(f"Warning: {warning}", err=True)


def _ascii(text: str) -> str:
    """Return text of a page with the signs of a terminal."""
    return text.replace("\N{EN DASH}", "-").replace("\N{MINUS SIGN}", "-")


def _line(name: str, text: str) -> None:
    click.echo(f"{name + ':':<25} {text}")


def _print_assumptions(known: dict[str, Any]) -> None:
    from eldr_sim.kernel_profiles.tables.format import parts_by_provenance

    trace = known["trace"]
    click.echo()
    for label, parts in parts_by_provenance(known["provenance"]).items():
        _line(f"Step times, {label}", ", ".join(parts))
    if trace["name"] is not None:  # a dense model has none
        _line("Routing", f"{trace['name']} ({trace['provenance']}), {trace['layers']}")
        click.echo(
            f"{'':<26}a trace request is replayed {trace['trace_request_uses_mean']:.1f} times on "
            f"average, {100 * trace['output_tokens_beyond_recorded_share']:.0f}% of the output "
            "tokens go beyond what was recorded"
        )
    if beyond := trace.get("prompt_tokens_beyond_recorded_share"):
        click.echo(f"{'':<26}{100 * beyond:.0f}% of the prompt tokens repeat recorded ones")
