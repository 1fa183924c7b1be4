"""``eldr-sim plan``: the cheapest cluster for an objective, or the highest rate of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eldr_sim.cli.completion import complete
from eldr_sim.cli.completion import gpus as gpu_names
from eldr_sim.cli.completion import policies as policy_names
from eldr_sim.cli.console import interval_text, number_text, print_table, run_counter
from eldr_sim.cli.groups import GroupedCommand
from eldr_sim.cli.options import check_out, config_from_options, run_options
from eldr_sim.cli.spellings import TENSOR_PARALLEL_SIZE
from eldr_sim.errors import InputError
from eldr_sim.policies.choice import split
from eldr_sim.simulator.outcome.catalogue import label
from eldr_sim.simulator.setup.config import RunConfig

if TYPE_CHECKING:
    from eldr_sim.planning.runs.shared_runs import Runs, Summary
    from eldr_sim.planning.search.plan import Margin, Plan
    from eldr_sim.planning.search.prefill import FastestPlan
    from eldr_sim.planning.search.rates import CarriedRate, RatePlan
    from eldr_sim.planning.search.trial import Trial
    from eldr_sim.planning.slo import Objective

_BUDGET = "tokens a step"


#: Measured window of a run where none is given, s: a plan makes many.
_DURATION = 30.0
_ATTAINMENT, _MAX_GPUS = 0.99, 64
_MANY_REQUESTS = 20_000  # of a log: a run takes seconds


@click.command(cls=GroupedCommand, short_help="Find the cheapest cluster that meets an SLO.")
@click.option(
    "--slo", multiple=True, metavar="METRIC:MS,...",
    help="Bounds that a good request keeps, ms: ttft:500,tpot:30 (also e2el); once with a list, "
    "or repeated. Required but with --prefill-only.",
)  # fmt: skip
@click.option(
    "--attainment", type=float, default=_ATTAINMENT, show_default=True,
    help="Share of the requests that must be good.",
)  # fmt: skip
@click.option(
    "--gpu", "gpus", metavar="NAME,...", help="GPUs to choose from.  [default: H100]",
    shell_complete=complete(gpu_names, "file", listed=True),
)  # fmt: skip
@click.option(
    "--policy", "--policies", "policies", multiple=True, metavar="NAME,...",
    help="Decode policies to choose from; once with a list, or repeated.",
    shell_complete=complete(policy_names("decode"), listed=True),
)  # fmt: skip
@click.option(
    "--max-gpus", type=int, default=_MAX_GPUS, show_default=True, help="Most GPUs of a cluster."
)
@click.option("--price", metavar="GPU=PRICE,...", help="Price of a GPU-hour by GPU, $.")
@click.option(
    *TENSOR_PARALLEL_SIZE, "sizes", metavar="N,...",
    help="GPUs of a worker to choose from, for each pool.  [default: all powers of two up to a "
    "node]",
)  # fmt: skip
@click.option(
    "--num-redundant-experts", "redundant", metavar="N,...",
    help="Numbers of redundant experts to choose from, where engines share experts.  [default: 0]",
)  # fmt: skip
@click.option(
    "--prefill-only", is_flag=True,
    help="Plan prefill workers alone: strategy, token budget, chunks. Without --slo, the fastest "
    "for --num-requests prompts at once.",
)  # fmt: skip
@click.option(
    "--strategy", "strategies", metavar="NAME,...",
    help="How GPUs of such a worker may share the model: async_ep,dp_ep,tp_ep,tp,pp.  "
    "[default: all]",
)  # fmt: skip
@click.option("--topology", metavar="xPyD", help="Find the highest rate of this cluster instead.")
@click.option(
    "--gpus", "n_gpus", type=int, metavar="N",
    help="Find the cluster of up to N GPUs with the highest rate instead.",
)  # fmt: skip
@click.option(
    "--seeds", type=int, default=8, show_default=True,
    help="Most seeds per cluster; fewer if they suffice.",
)  # fmt: skip
@click.option("--jobs", type=int, metavar="N", help="Processes.  [default: one a CPU]")
@run_options(
    without=(
        "policy", "gpu", "topology", "tensor_parallel_size", "goodput", "max_concurrency",
        "num_redundant_experts", "preset",
    )
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write the plan.")
@click.option("--force", is_flag=True, help="Replace the plan in --out.")
@click.option("--verbose", is_flag=True, help="Print what became of every shape of clusters.")
def plan(
    slo: tuple[str, ...],
    attainment: float,
    gpus: str | None,
    policies: tuple[str, ...],
    max_gpus: int,
    price: str | None,
    sizes: str | None,
    redundant: str | None,
    topology: str | None,
    n_gpus: int | None,
    prefill_only: bool,
    strategies: str | None,
    seeds: int,
    jobs: int | None,
    out: Path | None,
    force: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Find the cheapest xPyD or xC cluster that meets an SLO at a rate.

    With --topology, find the highest rate of this cluster within the SLO; with --gpus N, the
    shape and split of N GPUs that carry the highest rate. Exit code 1 if there is none.
    """
    # The simulator takes long to import: --help and completion do without.
    from eldr_sim.planning.search.plan import plan as plan_cluster
    from eldr_sim.planning.search.plan_files import MARKER
    from eldr_sim.planning.search.prefill import FastestPlan, plan_fastest
    from eldr_sim.planning.search.rates import RatePlan, plan_rate
    from eldr_sim.planning.search.split import plan_split
    from eldr_sim.planning.slo import Objective, looks_up_to, parse_slo

    if not slo and not prefill_only:
        raise InputError("slo", "none", "METRIC:MS such as ttft:500,tpot:30, or --prefill-only")
    objective = Objective(parse_slo(slo), attainment, looks_up_to(seeds)) if slo else None
    if objective is None and attainment != _ATTAINMENT:
        raise InputError("attainment", "nothing is attained without a service level", "--slo")
    if max_gpus != _MAX_GPUS and (topology or n_gpus) is not None:
        beside = "--gpus" if topology is None else "--topology"
        raise InputError("max_gpus", f"beside {beside}, which says how many GPUs there are", "none")
    if verbose and (objective is None or (topology or n_gpus) is not None):
        raise InputError("verbose", "no shapes of clusters are searched", "without --verbose")
    rate = options.get("request_rate")
    if n_gpus is not None and (topology is not None or rate is not None):
        other = "--request-rate" if topology is None else "--topology"
        raise InputError("gpus", f"together with {other}", "one of the two")
    if n_gpus is not None and prefill_only:
        raise InputError("gpus", "together with --prefill-only", "one of the two")
    if topology is not None:
        if rate is not None:
            raise InputError("topology", "together with --request-rate", "one of the two")
        if prefill_only:
            raise InputError("prefill_only", "together with --topology", "one of the two")
        options["topology"] = topology
    elif prefill_only:
        options["topology"] = "1P"
    check_out(out, force, MARKER)
    worker_sizes = [_integer("tensor_parallel_size", text) for text in _list(sizes)]
    if len(set(worker_sizes)) < len(worker_sizes):
        raise InputError("tensor_parallel_size", f"{sizes} names one twice")
    if topology is not None and worker_sizes:
        if len(worker_sizes) > 1:
            raise InputError("tensor_parallel_size", f"{sizes} for one cluster", "one size")
        options["tensor_parallel_size"] = worker_sizes[0]
    counts = [_integer("num_redundant_experts", text) for text in _list(redundant)]
    if topology is not None and counts:
        if len(counts) > 1:
            raise InputError("num_redundant_experts", f"{redundant} for one cluster", "one number")
        options["num_redundant_experts"] = counts[0]
    config = config_from_options(options)
    if options.get("config_file") is None and objective is not None:
        config = _with_window(config, objective, options)
    _note_long_log(config)
    asked = topology is not None or n_gpus is not None or objective is None
    if not (asked or config.from_file) and config.request_rate is None:
        raise InputError("request_rate", "none", "--request-rate, or --topology to find it")
    chosen: dict[str, Any] = {
        "policies": [name for text in policies for name in split(text)],
        "gpus": _list(gpus),
        "prices": _prices(price),
        "jobs": jobs,
    }
    names = _list(strategies)
    if names and not prefill_only:
        raise InputError("strategy", "a choice of prefill workers alone", "--prefill-only")
    found: Plan | RatePlan | FastestPlan
    with run_counter("planning") as count:
        if objective is None:
            if rate is not None:
                raise InputError("request_rate", "without --slo all prompts come at once", "--slo")
            if chosen.pop("policies"):
                raise InputError("policy", "prefill workers alone decode nothing")
            chosen |= {"seeds": min(seeds, 3), "worker_gpus": worker_sizes, "strategies": names}
            found = plan_fastest(config, max_gpus=max_gpus, progress=count, **chosen)
        elif n_gpus is not None:
            found = plan_split(
                config, objective, n_gpus, tensor_parallel_sizes=worker_sizes, progress=count,
                **chosen,
            )  # fmt: skip
        elif topology is None:
            found = plan_cluster(
                config, objective, max_gpus=max_gpus, tensor_parallel_sizes=worker_sizes,
                redundant_experts=counts, strategies=names, progress=count, **chosen,
            )  # fmt: skip
        else:
            found = plan_rate(config, objective, progress=count, **chosen)
    if out is not None:
        found.write(out, force=force)
    if isinstance(found, FastestPlan):
        is_found = _print_fastest(found)
    else:
        is_found = (
            _print_rates(found) if isinstance(found, RatePlan) else _print_plan(found, verbose)
        )
    click.echo(f"{len(found.runs)} simulated runs")
    if out is not None:
        click.echo(f"Wrote {out}")
    if not is_found:
        sys.exit(1)


def _with_window(config: RunConfig, objective: Objective, options: dict[str, Any]) -> RunConfig:
    """Return a configuration with the window of a plan's runs, where options do not say it.

    A warm-up is as long as requests live that just keep the TPOT bound: a cluster is full then. Of
    a part of a log those before it are as long as nine in ten of the log are. A whole log has none.
    """
    if options["num_requests"] is not None or config.measures_whole_log:
        return config
    window = {"duration": _DURATION} if config.duration is None and not config.chooses_part else {}
    length: float | str = config.effective_output_len
    if config.replays_log and length == "recorded":
        length = _long_output(config)
    tpot_ms = objective.level.tpot
    if options["warmup"] is None and not isinstance(length, str) and tpot_ms is not None:
        window["warmup"] = max(config.warmup_s, length * tpot_ms / 1e3)
    return config.model_copy(update=window)


def _note_long_log(config: RunConfig) -> None:
    """Say before a plan of a long log what each of its runs replays."""
    if config.measures_whole_log and config.length_shape is None:
        from eldr_sim.traces.requests.load import named_log

        log = named_log(config.workload, config.columns)
        if len(log.arrival_s) > _MANY_REQUESTS:
            click.echo(
                f"Every run replays all {len(log.arrival_s):,} requests of the log, "
                f"{log.arrival_s[-1]:,.0f} s; --busiest 10m plans for its peak",
                err=True,
            )


def _long_output(config: RunConfig) -> float:
    """Return the output tokens that nine in ten requests of a log do not exceed."""
    import numpy as np

    from eldr_sim.traces.requests.request_logs import known_log

    return float(np.quantile(known_log(config.workload, config.columns).output_len, 0.9))


def _list(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _integer(field: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(field, repr(text), "a whole number") from None


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


def _goal(objective: Objective) -> str:
    bounds = objective.level.model_dump(exclude_none=True).items()
    text = ", ".join(f"{name.upper()} {bound:g} ms" for name, bound in bounds)
    return f"{text} for {100 * objective.attainment:g}% of requests"


def _print_plan(plan: Plan, verbose: bool) -> bool:
    """Print a plan, its answer first; return whether there is one."""
    click.echo(f"{plan.rate:g} requests/s within {_goal(plan.objective)}, up to "
               f"{plan.max_gpus} GPUs")  # fmt: skip
    _print_log_part(plan.runs)
    by = "lowest price" if plan.has_prices else "fewest GPUs (no prices given)"
    click.echo()
    prompts = plan.config.prefill_only
    columns = ["strategy" if prompts else "policy", "GPU", "cluster"]
    columns += [_BUDGET] if prompts else []
    columns += [label("gpus"), *_price_column(plan)]
    columns += _memory_column(plan)
    columns += [label("slo_attainment"), "seeds", label("p99_ttft_ms")]
    if prompts:
        columns += [label("prefill_throughput"), label("prefill_mfu"), "step times"]
    else:
        columns += [label("p99_tpot_ms"), label("tokens_per_s_per_user")]
        columns += [label("tokens_per_s_per_gpu"), "step times"]
    best = None if plan.best is None else plan.best.trial
    if best is None or plan.margin is None:
        click.echo("No cluster meets the objective.")
    else:
        _print_answer(plan, best, plan.margin)
    click.echo()
    print_table(
        f"Cheapest cluster of each candidate, {by} first",
        columns,
        [
            _cluster_row(plan, result.trial)
            if result.trial
            else [
                result.policy,
                result.gpu,
                "refused" if result.refused else "none",
                *([""] * (len(columns) - 3)),
            ]
            for result in plan.candidates
        ],
    )
    if best is not None and not prompts:
        click.echo()
        print_table(
            "Pareto front of the clusters that meet the objective",
            columns,
            [_cluster_row(plan, trial) for trial in plan.front],
        )
    click.echo()
    _print_shapes(plan, verbose)
    for result in plan.candidates:
        if result.trial is None:
            for reason in result.reasons:
                click.echo(f"{result.policy} on {result.gpu}: {reason}")
        for note in result.notes:
            click.echo(f"{result.policy} on {result.gpu}: {note}")
    if best is None:
        return False
    click.echo()
    _print_assumptions(best.summaries[0], plan.runs)
    labels = {a.trial.summaries[0]["weakest_provenance"] for a in plan.candidates if a.trial}
    if len(labels) > 1:
        click.echo(
            f"Warning: the candidates' step times are {' and '.join(sorted(labels))}: differences "
            "between them are also differences between sources",
            err=True,
        )
    return True


def _print_answer(plan: Plan, best: Trial, margin: Margin) -> None:
    """Print the cheapest cluster, what comes near it, and what it tolerates."""
    _line("Answer", _name(best))
    _line("Runner-up", "none" if plan.runner_up is None else _name(plan.runner_up))
    least = "at least " if margin.is_bounded else ""
    _line(
        "Margin",
        f"carries {least}{interval_text(*margin.rate, '.1f')} requests/s, "
        f"{interval_text(*margin.percent, '+.1f')}% of the load",
    )
    together = best.config.colocated
    if not plan.config.prefill_only:
        _line(f"One {'' if together else 'decode '}worker less", _lost(margin.lost_decode))
    if not together:
        _line("One prefill worker less", _lost(margin.lost_prefill))
    for each in plan.savings:
        click.echo(
            f"{each.policy} against {each.reference} on {each.gpu}: saves "
            f"{interval_text(*each.gpus, '.2f')} GPUs ({len(each.by_seed)} paired seeds)"
        )


def _print_shapes(plan: Plan, verbose: bool) -> None:
    """Say what became of the shapes of the clusters, one by one if asked, and what was left out."""
    shapes = [(result, each) for result in plan.candidates for each in result.shapes]
    if verbose:
        print_table(
            "Shapes of clusters in the order of the search; each must be cheaper than those before",
            ["policy", "GPU", "shape", "at least", "estimated", "cheapest", "why none"],
            [
                [
                    result.policy,
                    result.gpu,
                    each.shape,
                    f"{each.least_cost:g}",
                    f"{each.estimated_cost:g}",
                    each.topology or "-",
                    each.reason,
                ]
                for result, each in shapes
            ],
        )
    else:
        cheaper = sum(bool(each.topology) for _, each in shapes)
        dear = sum(not each.is_searched for _, each in shapes)
        click.echo(
            f"{len(shapes)} shapes of clusters: {cheaper} each cheaper than those before, "
            f"{len(shapes) - cheaper - dear} without a cheaper cluster that meets the objective, "
            f"{dear} estimated too dear (--verbose lists them)"
        )
    config, left = plan.config, []
    if config.prefill_only:
        left.append("other token budgets (--max-num-batched-tokens)")
    else:
        if config.data_parallel_size == 1:
            left.append("engines that share experts (--data-parallel-size)")
        left.append("expert parallelism in one pool alone")
        if config.max_num_batched_tokens is None:
            left.append("token budgets of prefill workers (--max-num-batched-tokens)")
    if any(not each.is_searched for result in plan.candidates for each in result.shapes):
        left.append(
            "the shapes estimated too dear"
            if config.prefill_only
            else "the shapes estimated at too high a cost"
        )
    click.echo(f"Not searched: {', '.join(left)}")


def _price_of_tokens(per_hour: float | None, tokens_per_s: float | None) -> float | None:
    """Return the price of a million prompt tokens."""
    return None if per_hour is None or not tokens_per_s else 1e6 * per_hour / 3600 / tokens_per_s


def _print_fastest(plan: FastestPlan) -> bool:
    """Print how fast strategies compute prompts; return whether one does."""
    from eldr_sim.planning.search.prefill_strategy import chunk_label

    priced = plan.best is not None and plan.best.price_of_tokens is not None
    columns = ["strategy", "GPU", "cluster", _BUDGET, label("gpus")]
    columns += [label("prefill_throughput"), label("prefill_mfu")]
    columns += ["$ per M tokens"] if priced else []
    rows = []
    for each in plan.clusters:
        row = [each.strategy, each.gpu, "refused", *([""] * (len(columns) - 2))]
        if each.config is not None and each.rate is not None and each.summary is not None:
            row[2:] = [each.config.topology, chunk_label(each.config), str(each.config.n_gpus)]
            row += [interval_text(*each.rate, ".0f"), number_text(each.mfu, ".3f")]
            row += [number_text(each.price_of_tokens, ".3f")] if priced else []
            row.append(str(each.summary["weakest_provenance"]))
        rows.append(row)
    by = "lowest price of a token" if priced else "most tokens a GPU"
    print_table(f"Prompts at once, up to {plan.max_gpus} GPUs, {by} first",
                [*columns, "step times"], rows)  # fmt: skip
    for each in plan.clusters:
        for reason in each.reasons:
            click.echo(f"{each.strategy} on {each.gpu}: {reason}")
    if plan.best is None or plan.best.config is None or plan.best.summary is None:
        click.echo("No strategy has memory.")
        return False
    click.echo()
    config = plan.best.config
    text = f"{config.topology} on {plan.best.gpu}, {plan.best.strategy}"
    _line("Answer", f"{text}, {chunk_label(config)} tokens a step: {config.n_gpus} GPUs")
    click.echo()
    _print_assumptions(plan.best.summary, plan.runs)
    return True


def _price_column(plan: Plan) -> list[str]:
    return ["$/h", "$ per M tokens"] if plan.has_prices else []


def _memory_column(plan: Plan) -> list[str]:
    """Name the KV blocks that redundant experts are paid in, where candidates differ in them."""
    found = [each.trial.config for each in plan.candidates if each.trial]
    numbers = {config.num_redundant_experts for config in found}
    return [label("kv_blocks_per_worker")] if len(numbers) > 1 else []


def _cluster_row(plan: Plan, trial: Trial) -> list[str]:
    from eldr_sim.planning.search.candidates import policy_label
    from eldr_sim.planning.search.plan import per_gpu, per_user
    from eldr_sim.planning.search.prefill_strategy import chunk_label

    config, prompts = trial.config, plan.config.prefill_only
    prices = [config.price_per_hour, trial.mean("cost_per_million_output_tokens")]
    if prompts:
        prices[1] = _price_of_tokens(config.price_per_hour, trial.mean("prefill_throughput"))
        figures = [
            number_text(trial.mean("prefill_throughput"), ".0f"),
            number_text(trial.mean("prefill_mfu"), ".3f"),
        ]
    else:
        figures = [number_text(trial.mean("p99_tpot_ms"), ".2f"), f"{per_user(trial):.1f}"]
        figures.append(f"{per_gpu(trial):.0f}")
    return [
        policy_label(config),
        _gpu(trial),
        _workers(trial.config),
        *([chunk_label(config)] if prompts else []),
        str(config.n_gpus),
        *([number_text(price, ".2f") for price in prices] if plan.has_prices else []),
        *[number_text(trial.mean("kv_blocks_per_worker"), ".0f") for _ in _memory_column(plan)],
        interval_text(*trial.attainment, ".4f"),
        str(len(trial.summaries)),
        number_text(trial.mean("p99_ttft_ms"), ".1f"),
        *figures,
        trial.summaries[0]["weakest_provenance"],
    ]


def _gpu(trial: Trial) -> str:
    return str(trial.summaries[0]["gpu"])


def _workers(config: RunConfig) -> str:
    from eldr_sim.planning.search.candidates import worker_gpus

    engines = config.data_parallel_size
    shared = f"{engines} engines, " if engines > 1 else ""
    size, apart = worker_gpus(config), config.pool("prefill").parallelism.n_gpus
    ranks = f", EP {size}" if config.enable_expert_parallel and size > 1 else ""
    sizes = f"{size}" if config.colocated or apart == size else f"{apart} + {size}"
    many = max(size, 0 if config.colocated else apart) > 1
    budget = config.max_num_batched_tokens
    tokens = f", {budget} tokens a step" if config.colocated and budget else ""
    return config.topology + (f" of {shared}{sizes} GPUs{ranks}" if many else "") + tokens


def _name(trial: Trial) -> str:
    from eldr_sim.planning.search.candidates import policy_label
    from eldr_sim.planning.search.prefill_strategy import chunk_label

    price, chunks = trial.config.price_per_hour, ""
    if trial.config.prefill_only:
        chunks = f", {chunk_label(trial.config)} tokens a step"
    cost = "" if price is None else f", ${price:.2f} an hour"
    return (
        f"{_workers(trial.config)} on {_gpu(trial)} under {policy_label(trial.config)}{chunks}: "
        f"{trial.config.n_gpus} GPUs{cost}"
    )


def _line(label: str, text: str) -> None:
    click.echo(f"{label + ':':<26}{text}")


def _lost(trial: Trial | None) -> str:
    if trial is None:
        return "serves nothing"
    tail = ", under one seed" if trial.hopeless else ""
    return (
        f"attains {100 * trial.attainment.mean:.1f}%, TTFT p99 "
        f"{number_text(trial.mean('p99_ttft_ms'), '.0f')} ms, TPOT p99 "
        f"{number_text(trial.mean('p99_tpot_ms'), '.1f')} ms{tail}"
    )


def _print_rates(plan: RatePlan) -> bool:
    """Print the highest rates; return whether there is one."""
    from eldr_sim.planning.search.candidates import policy_label

    print_table(
        f"Highest rate within {_goal(plan.objective)}, mean over seeds",
        ["policy", "GPU", "cluster", "GPUs", "requests/s", "seeds", "step times"],
        [
            [
                policy_label(each.config),
                each.gpu,
                _workers(each.config),
                str(each.config.n_gpus),
                _rate_text(each),
                str(len(each.by_seed) or 1),
                each.summary["weakest_provenance"] if each.summary else "",
            ]
            for each in plan.rates
        ],
    )
    _print_log_part(plan.runs)
    for gain in plan.gains:
        percent = interval_text(*gain.percent, "+.2f")
        click.echo(f"{gain.policy} against {gain.reference} on {gain.gpu}: {percent}%")
    click.echo()
    summary = next((each.summary for each in plan.rates if each.summary is not None), None)
    if summary is not None:
        _print_assumptions(summary, plan.runs)
    return summary is not None


def _rate_text(each: CarriedRate) -> str:
    if each.rate is not None:
        return interval_text(*each.rate, ".2f")
    return each.reason if each.is_beaten else f"none: {each.reason}"


def _print_log_part(runs: Runs) -> None:
    """Say what of a log the runs of a plan measure, and what their seeds do not vary."""
    from eldr_sim.traces.requests.log_window import part_in_words

    summary = next((summary for _, summary in runs.made()), None)
    part = None if summary is None else summary["trace"].get("log_window")
    if part:
        click.echo(f"Measured: {part_in_words(part)}")
        click.echo(
            "Intervals are over seeds, which draw the routing and random decisions: arrivals and "
            "lengths are the log's in all of them, and another day's are others"
        )


def _print_assumptions(summary: Summary, runs: Runs) -> None:
    from eldr_sim.kernel_profiles.tables.format import parts_by_provenance
    from eldr_sim.simulator.outcome.metrics import warnings_of
    from eldr_sim.simulator.outcome.without_effect import NO_TOKEN

    trace = summary["trace"]
    for known, parts in parts_by_provenance(summary["provenance"]).items():
        _line(f"Step times, {known}", ", ".join(parts))
    if trace["name"] is not None:  # a dense model has none
        _line("Routing", f"{trace['name']} ({trace['provenance']}), {trace['layers']}")
        click.echo(
            f"{'':<26}a trace request is replayed {trace['trace_request_uses_mean']:.1f} times on "
            f"average, {100 * trace['output_tokens_beyond_recorded_share']:.0f}% of the output "
            "tokens go beyond what was recorded"
        )
    if beyond := trace.get("prompt_tokens_beyond_recorded_share"):
        click.echo(f"{'':<26}{100 * beyond:.0f}% of the prompt tokens repeat recorded ones")
    # What one cluster has no use for may have decided between others.
    everywhere = [set(made.get("without_effect", ())) for _, made in runs.made()]
    idle = [
        line for line in summary.get("without_effect", ())
        if all(line in w for w in everywhere) and not line.endswith(NO_TOKEN)
    ]  # fmt: skip
    for warning in warnings_of({**summary, "without_effect": idle}):
        click.echo(f"Warning: {warning}", err=True)
