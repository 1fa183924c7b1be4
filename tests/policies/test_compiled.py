"""Compiled decisions against the policies that are asked for each request."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RouterPolicy, Workers, decisions_of
from eldr_sim.policies.compiled import HOLD, least_loaded
from eldr_sim.policies.eldr import online as online_module
from eldr_sim.policies.routing import marginal_cost
from eldr_sim.policies.routing.marginal_cost import MarginalCostPolicy
from eldr_sim.policies.rule import Rule
from eldr_sim.simulator.plane import router
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from .. import digest
from ..random_artifact import random_artifact
from .test_marginal_cost import N_EXPERTS, N_LAYERS, context

WINDOWS = 25


class Query(RouterPolicy):
    """A policy of which the simulator knows nothing but ``select`` and ``on_complete``."""

    def __init__(self, policy):
        self.policy, self.name, self.needs, self.decisions = policy, policy.name, policy.needs, 0
        self.on_complete = policy.on_complete

    def select(self, request, workers):
        self.decisions += 1
        return self.policy.select(request, workers)


def make_signatures(seed, silent):
    """Counts of prompts, a number for each; those of the first ``silent`` texts say nothing."""
    mix = np.random.default_rng(seed).poisson(2.0, (WINDOWS, N_LAYERS, N_EXPERTS)).astype(np.uint16)
    mix[:silent] = 0
    numbers = {}

    def signatures(ranges):
        ((text, start, stop),) = ranges
        return numbers.setdefault(ranges, len(numbers)), (stop - start) * mix[text]

    return signatures


def eldr(spelled):
    def make(n_workers):
        artifact = random_artifact(n_workers, N_LAYERS, N_EXPERTS, seed=7)
        context = PolicyContext(n_workers, np.random.default_rng(7), artifact=artifact)
        return registry.decode_policy(spelled, context)

    return make


POLICIES = {
    "eldr": eldr("eldr:tau=0.2,refit_s=0.005,window_s=0.02"),
    "eldr by similarity": eldr("eldr:tau=0.4,refit_s=0.003,window_s=0.01,ties=similar"),
    "eldr without a band": eldr("eldr:tau=0,refit_s=0.005,window_s=0.02"),
    "marginal_cost": lambda n: MarginalCostPolicy(context(n)),
    "marginal_cost of drafts": lambda n: MarginalCostPolicy(context(n, tokens_per_step=3)),
}


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 120),
    n_workers=st.integers(1, 5),
    gap_s=st.sampled_from([1e-4, 2e-3]),
    name=st.sampled_from(sorted(POLICIES)),
    load_report_delay_s=st.sampled_from([0.0, 1e-3]),
    silent=st.sampled_from([0, 3]),
    at_once=st.sampled_from([512, 2]),
    remembered=st.sampled_from([2048, 4]),
    sick=st.booleans(),
)
def test_compiled_decisions_are_those_of_the_policies(
    make_cluster, make_workload, run_to_rest, seed, n, n_workers, gap_s, name, load_report_delay_s,
    silent, at_once, remembered, sick,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    workload = make_workload(
        np.cumsum(gap_s * rng.exponential(size=n)), rng.choice([4, 9], n), rng.integers(1, 30, n),
        windows=WINDOWS, seed=seed % 1000,
    )  # fmt: skip

    def run(wrap):
        policy = wrap(POLICIES[name](n_workers))
        cluster = make_cluster(
            workload, n_prefill=2, n_decode=n_workers, decode_policy=policy, seed=seed,
            signatures=make_signatures(seed, silent), load_report_delay_s=load_report_delay_s,
        )  # fmt: skip
        if sick and n_workers > 1:  # routers avoid the last worker from the beginning
            cluster.routers[-1].arrays.healthy[-1] = False
        return run_to_rest(cluster), policy, cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "_ASKED_AT_ONCE", at_once)
        for module in (online_module, marginal_cost):
            patch.setattr(module, "_REMEMBERED", remembered)
        asked, policy, _ = run(Query)
        compiled, _, cluster = run(lambda policy: policy)
    assert policy.decisions == n
    assert cluster.routers[-1].decisions is not None
    assert compiled.requests.tobytes() == asked.requests.tobytes()
    assert compiled.decode_steps.tobytes() == asked.decode_steps.tobytes()


@pytest.mark.parametrize("policy", ["eldr", "marginal_cost", "marginal_cost:affinity=0.1"])
def test_requests_that_faults_send_again_are_decided_on_alike(policy, monkeypatch):
    fields = digest.RUNS["faults"] | {"policy": policy, "load_report_delay_ms": 2}
    config = make_config(digest.PLAIN | fields)
    found = [simulate(config)]
    monkeypatch.setattr(router, "decisions_of", lambda *_: None)
    found.append(simulate(config))
    tables = [digest.digest(each) for each in found]
    assert tables[0]["requests"] == tables[1]["requests"]
    assert tables[0]["steps"] == tables[1]["steps"]


def test_a_subclass_that_decides_in_another_way_is_asked():
    policy, workers = POLICIES["eldr"](3), Workers.idle(np.zeros(3))
    assert decisions_of(policy, workers, 1) is not None
    for method in ("select", "near"):
        other = type(policy)
        own = type("Own", (other,), {method: lambda self, *_: 0})
        found = own(PolicyContext(3, np.random.default_rng(0), artifact=policy.artifact))
        assert decisions_of(found, workers, 1) is None
    assert decisions_of(Query(policy), workers, 1) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_the_least_loaded_in_turn(workers):
    loads, healthy = (np.array(column) for column in zip(*workers, strict=True))
    rule, turn = Rule(range(len(workers))), 0
    for _ in range(5):
        found = least_loaded(loads, healthy, turn)
        picked = rule.pick(Workers.idle(loads)._replace(healthy=healthy))
        assert found == (HOLD if picked is None else picked)
        turn = found + 1
        loads[found] += found >= 0
