"""Every cluster of a small space simulated, against what a plan's search finds of it."""

from __future__ import annotations

import time

import pytest

from eldr_sim.planning.runs.shared_runs import Runs, side_by_side
from eldr_sim.planning.search.axes import Axes
from eldr_sim.planning.search.candidates import clusters_to_plan, cost, make_candidate
from eldr_sim.planning.search.plan import plan
from eldr_sim.planning.search.trial import try_cluster
from eldr_sim.planning.slo import Objective, Verdict, parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config

SIZES, GPUS = [1, 2], 8
OBJECTIVE = Objective(parse_slo(["ttft:200,tpot:10"]), 0.9, (3,))
POLICIES = ["jsq", "round_robin", "p2c"]


def small(rate):
    """A load that takes few of the GPUs or most of them, in runs of some thousand tokens."""
    return make_config(
        {"trace": "reference-moe", "request_rate": rate, "duration": 3, "warmup": 1,
         "output_len": 24, "goodput": OBJECTIVE.level}
    )  # fmt: skip


def every_cluster(config):
    """Return every cluster of every shape, policy and number of workers."""
    axes = Axes({"policy": POLICIES})
    found = {}
    for each in clusters_to_plan(config, axes, {}):
        for template in make_candidate(each, axes, OBJECTIVE, GPUS, SIZES).templates:
            apart = template.config.n_prefill > 0
            for x in range(1 if apart else 0, GPUS + 1 if apart else 1):
                for y in range(1, GPUS + 1):
                    config = template.at(x, y)
                    if config.n_gpus <= GPUS:
                        found[config.model_dump_json()] = config
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("rate", [150, 400])
def test_the_search_finds_what_all_runs_of_the_space_find(rate):
    """The same cost, in a tenth of the runs; times are printed, both in this process."""
    config = small(rate)
    begin = time.process_time()
    found = plan(
        config, OBJECTIVE, policies=POLICIES, max_gpus=GPUS, tensor_parallel_sizes=SIZES,
        runs=(searched := Runs(1)),
    )  # fmt: skip
    middle = time.process_time()
    clusters, every = every_cluster(config), Runs(1)
    trials = every.ended(side_by_side([try_cluster(each, OBJECTIVE) for each in clusters]))
    end = time.process_time()
    good = [trial for trial in trials if trial.verdict is Verdict.MEETS]
    least = min((cost(trial.config) for trial in good), default=None)
    print(
        f"\n{rate}/s: {len(clusters)} clusters, {len(good)} meet it, the cheapest {least} GPUs: "
        f"{len(every)} runs, {end - middle:.1f} s; the search: "
        f"{found.best and found.best.config.topology}, {found.best and found.best.cost} GPUs, "
        f"{len(searched)} runs, {middle - begin:.1f} s"
    )
    assert len(clusters) >= 200
    assert (found.best and found.best.cost) == least
