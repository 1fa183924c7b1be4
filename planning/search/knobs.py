"""What each choice adds to the best use of a number of GPUs: alone, beside a base of co-located
workers of the fewest GPUs that hold the model and the first value of every axis, and beside all
others: what their best loses when it is set back and workers are split anew."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.planning.runs.run_cache import RunCache, Search
from eldr_sim.planning.search.answer import Answer, Gain, Question, Row
from eldr_sim.planning.search.axes import Axes, Space, value_of
from eldr_sim.planning.search.candidates import ClusterTemplate
from eldr_sim.planning.search.rates import carried_by_seed, carried_row, fastest_first
from eldr_sim.planning.search.split import Splits, best_splits, splits_of
from eldr_sim.planning.slo import Objective, paired_percent

#: Choices of shape, beside the axes.
SIZES, APART = "GPUs of a worker", "prefill apart"
BASE, ALL = "base", "all together"
SEEDS = 3
Fits = Callable[[ClusterTemplate], bool]


def gains_of_choices(space: Space, objective: Objective, n_gpus: int, runs: RunCache) -> Answer:
    """Find the best use of up to ``n_gpus`` GPUs, and what each choice adds to it. Arguments and
    errors as of `split.best_use`.

    Rows: the base, the best of each choice alone, of all together, and of all but each, with the
    rate under three seeds; a search decides by one. ``gains``: on the base, paired by seed."""
    splits = splits_of(space, objective, n_gpus)
    runs.report_start()
    rows = runs.ended(_rows(splits))
    gains = tuple(
        Gain(row.gpu, row.policy, BASE, row.by_seed, rows[0].by_seed, percent)
        for row in rows[1:]
        if row.figure is not None and rows[0].figure is not None
        for percent in [paired_percent(row.by_seed, rows[0].by_seed)]
    )
    question = Question("split", space.config, objective, n_gpus, axes=space.wanted)
    return Answer(question, fastest_first(rows), runs, gains=gains)


def _rows(own: Splits) -> Search[list[Row]]:
    """Return the base, the best of each choice alone, of all together, and of all but each."""
    several = {name: given for name, given in own.space.wanted.values.items() if len(given) > 1}
    base = {name: list(given)[:1] for name, given in own.space.wanted.values.items()}
    able = [
        t for candidate in own.candidates(Axes(base)) for t in candidate.templates if _together(t)
    ]
    smallest = min((_layouts(t)[0].n_gpus for t in able), default=1)

    def small(t: ClusterTemplate) -> bool:
        return all((p.n_gpus, p.data_parallel_size) == (smallest, 1) for p in _layouts(t))

    def plain(t: ClusterTemplate) -> bool:
        return small(t) and _together(t) and not t.config.cluster.enable_expert_parallel

    rows = [(yield from _best(own, BASE, base, plain))]
    rows.append((yield from _best(own, SIZES, base, _together)))
    rows.append((yield from _best(own, APART, base, small)))
    for name, given in several.items():
        rows.append((yield from _best(own, name, {**base, name: given}, plain)))
    every = yield from _best(own, ALL, own.space.wanted.values, lambda t: True)
    rows.append(every)
    if every.config is None:
        return rows
    values = {name: [value_of(every.config, name)] for name in several}
    apart = every.config.cluster.n_prefill > 0
    workers = [pool.parallelism for pool in every.config.pools]

    def like(t: ClusterTemplate) -> bool:
        return _layouts(t) == workers

    def as_decoders(t: ClusterTemplate) -> bool:
        return _layouts(t) == workers[-1:]

    def no_larger(t: ClusterTemplate) -> bool:
        return small(t) and _together(t) != apart

    without: dict[str, tuple[Mapping[str, Sequence[Any]], Fits]] = {SIZES: ({}, no_larger)}
    if apart:
        without[APART] = {"policy": own.space.wanted.values["policy"]}, as_decoders
    changed = [name for name in several if values[name] != base[name]]
    without |= {name: ({name: base[name]}, like) for name in changed}
    for name, (back, fits) in without.items():
        row = yield from _best(own, f"all but {name}", {**base, **values, **back}, fits)
        rows.append(row)
    return rows


def _best(own: Splits, what: str, values: Mapping[str, Sequence[Any]], fits: Fits) -> Search[Row]:
    """Find the best cluster of some shapes and values, and its rate under each seed."""
    candidates = own.candidates(Axes(values))
    kept = [
        dataclasses.replace(candidate, templates=tuple(filter(fits, candidate.templates)))
        for candidate in candidates
    ]
    kept = [each for each in kept if each.templates]
    quick = dataclasses.replace(own.objective, looks=(1,))
    found = yield from best_splits(kept, own.space.wanted.label, quick, own.n_gpus, own.low)
    best = next((row.config for row in found if row.trial is not None), None)
    if best is None:
        return Row("", what, without="none", reasons=["no cluster carries anything"])
    rates = yield from carried_by_seed(best, SEEDS, own.objective, low=own.low)
    return (yield from carried_row(best, what, rates, "not under every seed"))


def _together(template: ClusterTemplate) -> bool:
    return template.config.cluster.n_prefill == 0


def _layouts(template: ClusterTemplate) -> list[Parallelism]:
    return [pool.parallelism for pool in template.config.pools]
