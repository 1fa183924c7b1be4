"""Every cluster of a small space simulated, against what a plan's search finds of it."""

import itertools
import time

import pytest

from eldr_sim.planning.runs.run_cache import RunCache, side_by_side
from eldr_sim.planning.search.axes import Axes, Space
from eldr_sim.planning.search.candidates import clusters_to_plan, cost, make_candidate
from eldr_sim.planning.search.goals import Cheapest, find
from eldr_sim.planning.search.trial import try_cluster
from eldr_sim.planning.slo import Objective, Verdict
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config

OBJECTIVE = Objective(parse_slo(["ttft:200,tpot:10"]), 0.9, (3,))
#: Policies, GPUs of a worker, most GPUs: 240 clusters of three candidates, 364 of one.
SPACES = {
    "three policies": (["jsq", "round_robin", "p2c"], [1, 2], 8),
    "one policy": (["jsq"], [1, 2, 4], 14),
}


def small(rate):
    """A load that takes few of the GPUs or most of them, in runs of some thousand tokens."""
    return make_config(
        {"trace": "reference-moe", "request_rate": rate, "duration": 12, "warmup": 4,
         "output_len": 24, "goodput": OBJECTIVE.level}
    )  # fmt: skip


def every_cluster(config, policies, sizes, gpus):
    """Return every cluster of every shape, policy and number of workers."""
    axes = Axes({"policy": policies})
    found = {}
    for each in clusters_to_plan(config, axes, {}):
        for template in make_candidate(each, axes, OBJECTIVE, gpus, sizes).templates:
            apart = template.config.cluster.n_prefill > 0
            for x in range(1 if apart else 0, gpus + 1 if apart else 1):
                for y in range(1, gpus + 1):
                    config = template.at(x, y)
                    if config.n_gpus <= gpus:
                        found[config.model_dump_json()] = config
    return list(found.values())


def nothing_around(*_):
    """In place of margin, savings and Pareto front, which all runs of a space do not tell."""
    return None, (), []
    yield


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("rate", [150, 400])
def test_the_search_finds_what_all_runs_of_the_space_find(rate, space, monkeypatch):
    """The same cost, in a small part of the runs; times are printed, all in this process."""
    policies, sizes, gpus = SPACES[space]
    config = small(rate)
    RunCache(1).ended(
        try_cluster(every_cluster(config, policies, sizes, gpus)[0], OBJECTIVE)
    )  # compiles
    times = [time.process_time()]

    def searched():
        return find(
            Space(config, policies=policies, max_gpus=gpus, tensor_parallel_sizes=sizes),
            Cheapest(OBJECTIVE),
            RunCache(1),
        )

    monkeypatch.setattr("eldr_sim.planning.search.plan._around", nothing_around)
    alone = searched()
    times.append(time.process_time())
    monkeypatch.undo()
    found = searched()
    times.append(time.process_time())
    clusters, every = every_cluster(config, policies, sizes, gpus), RunCache(1)
    trials = every.ended(side_by_side([try_cluster(each, OBJECTIVE) for each in clusters]))
    times.append(time.process_time())
    good = [trial for trial in trials if trial.verdict is Verdict.MEETS]
    least = min((cost(trial.config) for trial in good), default=None)
    took = [end - begin for begin, end in itertools.pairwise(times)]
    print(
        f"\n{rate}/s, {space}: {len(clusters)} clusters, {len(good)} meet it, the cheapest {least} "
        f"GPUs: {len(every)} runs, {took[2]:.1f} s; the search: "
        f"{found.best and found.best.config.cluster.topology}, "
        f"{found.best and found.best.cost} GPUs, "
        f"{len(alone.runs)} runs, {took[0]:.1f} s; with margin, savings and front "
        f"{len(found.runs)} runs, {took[1]:.1f} s"
    )
    assert len(clusters) >= 200
    for answer in (alone, found):
        assert (answer.best and answer.best.cost) == least
    assert len(alone.runs) <= len(every) / 5
    assert took[0] <= took[2] / 8  # a tenth, and some for a busy machine
