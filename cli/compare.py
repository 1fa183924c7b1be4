"""``eldr-sim compare``: policies side by side on the same requests; ``what-if``: single changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from eldr_sim.cli.console import (
    ShareBar,
    difference_cell,
    number_text,
    print_log_part,
    print_table,
    print_warnings,
    progress_bar,
)
from eldr_sim.cli.decorators import complete, jobs_option, option, output
from eldr_sim.cli.decorators import policies as policy_names
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
from eldr_sim.simulator.outcome.catalogue import HEADLINE, PREFILL_HEADLINE, label
from eldr_sim.simulator.setup.config.run_config import make_config

if TYPE_CHECKING:
    from eldr_sim.planning.compare.autoscalers import ScalingComparison
    from eldr_sim.planning.compare.drafts import DraftComparison
    from eldr_sim.planning.compare.policies import Comparison
    from eldr_sim.planning.compare.what_if import Change, WhatIf
    from eldr_sim.planning.runs.run_cache import Summary
    from eldr_sim.simulator.setup.config.run_config import RunConfig

#: Options that take a list of values to compare.
_LISTS = ("topology", "model", "gpu")
#: What is not compared beside values: by the parameter's name, the option's.
INSTEAD = {"drafts": "drafts", "concurrencies": "concurrencies", "autoscalers": "autoscale",
           "plot": "plot"}  # fmt: skip
#: The folder of such a comparison is that of a what-if.
WHAT_IF = "what_if.json"
#: Figures of clusters that differ: what follows experts alone is left to `what-if`.
_OF_CLUSTERS = (
    "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "p99_ttft_ms", "output_throughput",
    "request_goodput", "gpu_hours_per_million_output_tokens", "cost_per_million_output_tokens",
)  # fmt: skip
#: Policies that follow experts and are compared by default; dense models do without.
_OF_EXPERTS = ("domain", "eldr")


@click.command(cls=GroupedCommand, short_help="Compare policies on the same requests.")
@option("--policy --policies policies", None, "Decode policies to compare, with parameters as in "
        "eldr:tau=0.2; a list, or repeat the option. round_robin is added as the reference.",
        multiple=True, show_default="random,round_robin,jsq,p2c, and domain,eldr where the model "
        "has experts", metavar="NAME,NAME,...",
        shell_complete=complete(policy_names("decode"), listed=True))  # fmt: skip
@option("--seeds", int, "Number of seeds, counted from --seed.", default=5)
@jobs_option
@option("--drafts", None, "Compare numbers of drafts of --speculative-config, under the first "
    "policy; 0 (no drafts) is always included.", metavar="N,N,...")  # fmt: skip
@option("--concurrencies", None, "Numbers of requests in flight at which --drafts compares.  "
        "[default: 1,4,16,64]", metavar="N,N,...")  # fmt: skip
@option("--vary axes", None, "Compare values of a field instead, under the first policy: "
        "topology=2C,1P1D, model=NAME,NAME-FP8, decode.gpu=H100,H200. Repeat for every "
        "combination. --topology, --model and --gpu also take lists.", multiple=True,
        metavar="FIELD=VALUE,...")  # fmt: skip
@option("--autoscale autoscalers", None, "Compare autoscalers instead, under the first policy, "
        "beside the best fixed fleet.", multiple=True, metavar="NAME,NAME,...",
        shell_complete=complete(policy_names("scaling"), listed=True))  # fmt: skip
@run_options(without=("policy", "autoscale"))
@output("Folder for the comparison.", "the comparison in --out", plot=True)
def compare(
    policies: tuple[str, ...],
    seeds: int,
    jobs: int | None,
    drafts: str | None,
    concurrencies: str | None,
    axes: tuple[str, ...],
    autoscalers: tuple[str, ...],
    out: Path | None,
    force: bool,
    plot: bool,
    **options: Any,
) -> None:
    """Run policies over the same requests; print differences with 95% confidence intervals.

    With --vary, or a list of topologies, models or GPUs, compare these instead; with --drafts,
    numbers of drafts at several requests in flight; with --autoscale, autoscalers."""
    # The simulator takes long to import: --help and completion do without.
    from eldr_sim.simulator.results import MARKER

    several = varied(axes, options)
    check_out(out, force, WHAT_IF if several else MARKER)
    extras = plot_extras(plot, out)
    if several:
        asked = {"drafts": drafts, "concurrencies": concurrencies, "autoscalers": autoscalers}
        check_values(several, asked | {"plot": plot})
        values = compared_values(policies, seeds, jobs, several, **options)
        _print_values(values)
        if out is not None:
            values.write(out, force=force)
            click.echo(f"Wrote {out}")
        for name, summaries in values.named():
            print_warnings(summaries[0], f"{name}: ")
        return
    if drafts is not None or autoscalers:
        if named := _names(policies):
            options["policy"] = named[0]
        config = config_from_options(options)
        found: DraftComparison | ScalingComparison
        if drafts is not None:
            found, *notes = _drafts(config, seeds, jobs, drafts, concurrencies)
        else:
            found, *notes = _autoscalers(config, seeds, jobs, _names(autoscalers))
        title, columns, rows, _ = found.headline()
        print_table(title, list(columns), [list(row) for row in rows])
        for note in notes:
            click.echo(note)
        if out is not None:
            found.write(out, force=force)
            click.echo(f"Wrote {out}")
        return
    if concurrencies is not None:
        raise InputError("concurrencies", "without drafts to compare", "together with --drafts")
    comparison = compared(policies, seeds, jobs, **options)
    _print(comparison)
    if out is not None:
        comparison.write(out, force=force, extras=extras)
        click.echo(f"Wrote {out}")
    for name, summary in comparison.summaries.items():
        print_warnings(summary, f"{name}: ")


def compared(
    policies: tuple[str, ...],
    seeds: int,
    jobs: int | None,
    progress: ShareBar = progress_bar,
    **options: Any,
) -> Comparison:
    """Return the comparison that the options ask for."""
    from eldr_sim.planning.compare.policies import LOAD_BALANCERS
    from eldr_sim.planning.compare.policies import compare as compare_policies

    config = config_from_options(options)
    names = served(config, _names(policies) or [*LOAD_BALANCERS, *_OF_EXPERTS])
    with progress("comparing policies") as update:
        return compare_policies(config, names, seeds, jobs=jobs, progress=update)


def compared_values(
    policies: tuple[str, ...],
    seeds: int,
    jobs: int | None,
    varied: dict[str, list[Any]],
    progress: ShareBar = progress_bar,
    **options: Any,
) -> WhatIf:
    """Return the comparison of values of fields, of which ``options`` hold none."""
    from eldr_sim.planning.compare.what_if import vary

    if named := _names(policies):
        options["policy"] = named[0]
    config = config_from_options(options)
    with progress(f"comparing {' and '.join(varied)}") as update:
        return vary(config, varied, n_seeds=seeds, jobs=jobs, progress=update)


def check_values(several: Mapping[str, object], asked: Mapping[str, object]) -> None:
    """Raise InputError for another comparison beside one of values."""
    if beside := next((name for name in INSTEAD if asked.get(name)), None):
        field = INSTEAD[beside]
        raise InputError(
            field, f"given together with values of {', '.join(several)}", "one of the two"
        )


def varied(texts: tuple[str, ...], options: dict[str, Any]) -> dict[str, list[Any]]:
    """Return values to compare, by field: those of --vary, and lists of `_LISTS`, which leave the
    options."""
    from eldr_sim.planning.search.axes import parse_axes

    axes = parse_axes(texts)
    for name in _LISTS:
        given = options.get(name)
        parts = given.split(",") if isinstance(given, str) else given
        if isinstance(parts, list | tuple) and len(parts) > 1:
            if name in axes:
                raise InputError(name, f"in --vary and in --{name}", "one of the two")
            axes[name] = [part.strip() if isinstance(part, str) else part for part in parts]
            del options[name]
    return axes


def _names(texts: tuple[str, ...]) -> list[str]:
    return [name for text in texts for name in split(text)]


def _numbers(text: str, field: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(field, repr(text), "whole numbers with commas between them") from None


def _drafts(
    config: RunConfig, seeds: int, jobs: int | None, drafts: str, concurrencies: str | None
) -> tuple[DraftComparison, str, str]:
    """Compare numbers of drafts; returns what is to be said below the table, too."""
    from eldr_sim.planning.compare.drafts import compare_drafts

    given = config.requests.max_concurrency
    if given is not None and concurrencies is not None:
        raise InputError("max_concurrency", "given together with --concurrencies", "one of the two")
    usual = "1,4,16,64" if given is None else str(given)
    wanted = _numbers(drafts, "drafts"), _numbers(concurrencies or usual, "concurrencies")
    with progress_bar("comparing drafts") as update:
        found = compare_drafts(config, *wanted, seeds, jobs=jobs, progress=update)
    ranges = f"num_speculative_tokens_per_batch_size {[list(each) for each in found.by_batch]}"
    source = f"acceptance: {found.acceptance_source}; *: the fastest"
    return found, source, f"by batch: {ranges}"


def _autoscalers(
    config: RunConfig, seeds: int, jobs: int | None, rules: list[str]
) -> tuple[ScalingComparison, str]:
    """Compare autoscalers; returns what is to be said below the table, too."""
    from eldr_sim.planning.compare.autoscalers import compare_autoscalers

    with progress_bar("comparing autoscalers") as update:
        found = compare_autoscalers(config, rules, seeds, jobs=jobs, progress=update)
    return found, "*: the best fixed fleet; GPU-hours from its, in %"


def _print(comparison: Comparison) -> None:
    from eldr_sim.planning.slo import mean_known
    from eldr_sim.simulator.outcome.error_band import one_line, relative_line

    paired, n_seeds = comparison.paired.summaries, comparison.n_seeds
    columns = ["policy", *map(label, HEADLINE)]
    rows = []
    for name, runs in paired.items():
        means = [mean_known([summary[metric] for summary in runs]) for metric in HEADLINE]
        cells = [number_text(mean, ".2f") for mean in means]
        rows.append([name, *cells, str(sum(summary["failed"] for summary in runs))])
    first = next(iter(comparison.summaries.values()))
    title = (
        f"Mean over {n_seeds} seed{'s' if n_seeds > 1 else ''}: {first['model_id']} on "
        f"{first['gpu']}, {first['topology']}, {first['weakest_provenance']} tables"
    )
    print_table(title, [*columns, "failed"], rows)
    if band := first.get("error_band"):
        click.echo(one_line(band))
        click.echo(relative_line())
    print_log_part(first)
    for reference in dict.fromkeys(d.reference for d in comparison.differences):
        best = " (best load balancer)" if reference == comparison.best_load_balancer else ""
        against = [d for d in comparison.differences if d.reference == reference]
        own = {name: [difference_cell(d) for d in against if d.name == name] for name in paired}
        rows = [[name, *cells] for name, cells in own.items() if cells]
        click.echo()
        title = f"Difference from {reference}{best}, % [95% confidence interval]"
        print_table(title, columns, rows)


def _print_values(found: WhatIf) -> None:
    """Print the figures of each value, and their differences from the first."""
    from eldr_sim.planning.slo import mean_known
    from eldr_sim.simulator.outcome.error_band import one_line

    first, n_seeds = found.base[0], len(found.base)
    figures = [
        tag
        for tag in (PREFILL_HEADLINE if first["policy"] is None else _OF_CLUSTERS)
        if any(runs[0].get(tag) is not None for _, runs in found.named())
        and (tag != "request_goodput" or first["slo_attainment_by_metric"])
    ]
    columns = ["value", *map(label, figures)]
    rows = []
    for name, runs in found.named():
        means = [mean_known([summary[tag] for summary in runs]) for tag in figures]
        failed = sum(summary["failed"] for summary in runs)
        rows.append([name, *(number_text(mean, ".2f") for mean in means), str(failed)])
    title = (
        f"Mean over {n_seeds} seed{'s' if n_seeds > 1 else ''}: {first['policy']}, "
        f"{first['model_id']} on {first['gpu']}, {first['topology']}, "
        f"{first['weakest_provenance']} tables, beside other values"
    )
    print_table(title, [*columns, "failed"], rows)
    for name, runs in found.named():
        if band := runs[0].get("error_band"):
            click.echo(f"{name}: {one_line(band)}")
    print_log_part(first)
    for change in found.changes:
        if change.other_requests:
            _warn_of_requests(change)
    click.echo()
    effects = {c.name: {e.metric: difference_cell(e) for e in c.effects} for c in found.changes}
    rows = [[name, *(own.get(tag, "-") for tag in figures)] for name, own in effects.items()]
    title = f"Difference from {found.base_name}, % [95% confidence interval]"
    print_table(title, columns, rows)


def _warn_of_requests(change: Change) -> None:
    click.echo(
        f"Warning: {change.name}: {', '.join(change.other_requests)} makes other requests: "
        "pairs share their seed only",
        err=True,
    )


@click.command("what-if", short_help="Change one thing at a time in a run.")
@click.argument("base", type=click.Path(path_type=Path))
@option("--set changes", None, 'A change, such as decode.gpu=h200; repeat for more, each alone '
        'against the base. Fields that belong together are one change: "topology=8P12D '
        'policy.tau=0.2".', multiple=True, metavar="FIELD=VALUE")  # fmt: skip
@option("--together", bool, "Run one more change: all of them at once.")
@option("--seeds", int, "Number of seeds, counted from the base run's.", default=5)
@jobs_option
@output("Folder for the comparison.", "the result in --out")
def what_if(
    base: Path,
    changes: tuple[str, ...],
    together: bool,
    seeds: int,
    jobs: int | None,
    out: Path | None,
    force: bool,
) -> None:
    """Make changes to the run BASE, a result folder, its config.json or a YAML file.

    Base and changes run under the same seeds; differences come with 95% confidence intervals."""
    # The simulator takes long to import: --help and completion do without.
    from eldr_sim.planning.compare.what_if import MARKER, read_base
    from eldr_sim.planning.compare.what_if import what_if as make_what_if

    config = make_config(read_base(base))
    check_out(out, force, MARKER)
    with progress_bar("what if") as update:
        result = make_what_if(
            config, changes, n_seeds=seeds, together=together, jobs=jobs, progress=update
        )
    if out is not None:
        result.write(out, force=force)
    first = result.base[0]
    click.echo(
        f"Base: {config.policies.policy}, {first['topology']}, {first['model_id']} "
        f"on {first['gpu']}, {first['weakest_provenance']} tables; "
        f"{seeds} paired seed{'s' if seeds > 1 else ''}"
    )
    print_log_part(first)
    for change in result.changes:
        click.echo()
        _print_change(change)
    if out is not None:
        click.echo(f"Wrote {out}")
    for name, summary in [("base", first), *((c.name, c.summaries[0]) for c in result.changes)]:
        print_warnings(summary, f"{name}: ")


def _print_change(change: Change) -> None:
    rows = [
        [label(e.metric), _number(e.reference_mean), _number(e.mean), difference_cell(e)]
        for e in change.effects
        if e.reference_mean is not None or e.mean is not None
    ]
    columns = ["figure", "base", "changed", "difference, % [95% confidence interval]"]
    print_table(change.name, columns, rows)
    _print_faults(change.summaries)
    if change.other_requests:
        _warn_of_requests(change)


def _print_faults(summaries: Sequence[Summary]) -> None:
    """Print what each fault did, means over the seeds."""
    seeds = [summary.get("faults", {}).get("events", []) for summary in summaries]
    for events in zip(*seeds, strict=True):
        whens = ("before", "during", "after")
        judged = any(event[f"goodput_{when}"] is not None for event in events for when in whens)
        kind = "goodput" if judged else "throughput"  # without an SLO no request is good
        means = (_mean(event[f"{kind}_{when}"] for event in events) for when in whens)
        figures = ", ".join(map("{} {}".format, means, whens))
        times = [event["time_to_recover_s"] for event in events]
        recovered = [time for time in times if time is not None]
        click.echo(
            f"{events[0]['event']}: {kind} {figures} req/s; {len(recovered)} of {len(times)} "
            f"seeds recover, in {_mean(recovered)} s"
        )


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _number(fmean(known) if known else None)


def _number(value: float | None) -> str:
    return number_text(value, ".4f" if value is not None and abs(value) < 10 else ".2f")
