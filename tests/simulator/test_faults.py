"""Workers that die, hang, slow down, drain and join, slower links, and clients that give up."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.simulator import state
from eldr_sim.simulator.cluster import Cluster
from eldr_sim.simulator.faults import Fault, FaultPlan, check_overlaps

from .random_clusters import POLICIES, RANDOM_CLUSTER, policies_of, random_cluster
from .test_engine import assert_same
from .test_groups import GROUPED, grouped_cluster
from .twin.cluster import Twin

RETRIES = "migrate", "before_first_token", "never"


def random_plan(rng, spec, workload, until_s, size=1):
    """Return what goes wrong in a run that lasts about ``until_s``; much at the same time."""
    def whole(seconds):
        return round(seconds * 4096) / 4096 or 1 / 4096

    faults = []
    for _ in range(rng.integers(1, 6)):
        pool = int(rng.integers(2)) if spec.n_prefill and spec.n_decode else int(spec.n_decode > 0)
        n = (spec.n_prefill, spec.n_decode)[pool] // size
        kinds = ["fail", "fail", "fail", "hang", "slow", "drain", "join"]
        kinds += ["link"] * (spec.n_prefill > 0 < spec.n_decode)
        kind = str(rng.choice(kinds))
        at = whole(until_s * float(rng.random()))
        if rng.random() < 0.5 and len(workload.arrival_s):  # as something else happens
            at = float(rng.choice(workload.arrival_s))
        lasts = whole(until_s * float(rng.choice([0.01, 0.1, 0.5])))
        if kind not in ("hang", "join") and rng.random() < 0.3:
            lasts = np.inf
        factor = float(rng.choice([2.0, 3.5]) if kind == "slow" else rng.choice([0.5, 0.1]))
        fault = Fault(kind, pool, int(rng.integers(n)), at, lasts, factor)
        try:
            check_overlaps((*faults, fault))
        except InputError:
            continue
        faults.append(fault)
    cancel = None
    if rng.random() < 0.4:
        patience = [whole(until_s * d) for d in rng.exponential(0.5, len(workload))]
        stays = rng.random(len(workload)) < 0.5
        cancel = np.where(stays, np.inf, workload.arrival_s + patience)
    return FaultPlan(
        tuple(faults),
        cancel,
        health_delay_s=float(rng.choice([0.0, 0.0, whole(until_s / 50), whole(until_s / 3)])),
        retry=str(rng.choice(RETRIES)),
        max_retries=int(rng.choice([0, 1, 5])),
    )


def make_pair(arguments, prefill, decode):
    """Return a cluster and its twin."""

    def policies():
        prefix = arguments["workload"].prefix_block_tokens
        first, second = policies_of(arguments["spec"], prefill, decode, prefix)
        return {"prefill_policy": first, "decode_policy": second}

    known = {name: value for name, value in arguments.items() if name != "placements"}
    return (
        Cluster(**known, **policies(), signatures=lambda ranges: (0, None)),
        Twin(**arguments, **policies()),
    )


def assert_kept(cluster, record, retries=0):
    """Every request has ended once, and every token is somewhere."""
    requests = record.requests
    assert (requests["outcome"] != state.OPEN).all()
    steps = record.decode_steps
    done = record.completed
    if cluster.spec.n_decode:
        assert steps["batch"].sum() == (
            requests["output_len"][done].sum() + requests["generated"][~done].sum()
        )


@settings(max_examples=250, deadline=None)
@given(
    prefill=POLICIES["prefill"], decode=st.sampled_from(["jsq", "round_robin", "p2c", "holds"]),
    **RANDOM_CLUSTER,
)  # fmt: skip
def test_faults_equal_their_twin(prefill, decode, **drawn):
    arguments = random_cluster(**drawn)
    rng = np.random.default_rng([drawn["seed"], 7])
    until = max(0.05, 2 * float(arguments["workload"].arrival_s[-1]))
    plan = random_plan(rng, arguments["spec"], arguments["workload"], until)
    cluster, twin = make_pair(arguments | {"faults": plan}, prefill, decode)
    record = cluster.run()
    assert_same(record, twin.run())
    for router, policy in zip(cluster.routers, twin.policies, strict=True):
        assert getattr(router.policy, "seen", None) == getattr(policy, "seen", None)
