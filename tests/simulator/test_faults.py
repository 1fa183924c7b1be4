"""Workers that die, hang, slow down, drain and join, slower links, and clients that give up."""

import dataclasses

import numpy as np
import pytest
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.policies.base import RouterPolicy
from eldr_sim.simulator.control import compiled_cluster as cluster_module
from eldr_sim.simulator.control.actions import Actions
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.steps.group_state import NODE
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.engine_rules import rules_of
from eldr_sim.simulator.setup.config.groups import SchedulerConfig
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.fault_plan import Fault, FaultPlan, check_overlaps
from eldr_sim.simulator.setup.transfer import TransferModel

from ..properties import examples
from ..random_rows import random_prompts
from .random_clusters import (
    LONGEST,
    N_TRACE,
    POLICIES,
    RANDOM_CLUSTER,
    cluster_of,
    policies_of,
    random_cluster,
    random_workload,
    reference_of,
    with_engines,
)
from .test_engine import assert_same
from .test_groups import GROUPED, grouped_cluster

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
        where = ("prefill", "decode")[pool], int(rng.integers(n))
        resend = kind == "hang" and bool(rng.random() < 0.7)
        fault = Fault(kind, *where, at, lasts, factor, resend)
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
        user_retry_s=rng.choice([None, None, whole(until_s / 20), whole(until_s / 3)]),
    )


#: What a request lives through, in this order, wherever it comes so far.
LIFE = (
    "arrival_s", "sent_s", "tokenized_s", "prefill_start_s", "prefill_end_s", "transfer_start_s",
    "transfer_end_s", "decode_start_s", "first_token_s", "finish_s",
)  # fmt: skip


def assert_ordered(record):
    """No time of a request comes before another that it lives through earlier."""
    for request in record.requests:
        times = [float(request[name]) for name in LIFE if request[name] >= 0.0]
        assert times == sorted(times), dict(zip(LIFE, request[list(LIFE)].tolist(), strict=True))


def make_pair(arguments, prefill, decode):
    """Return a cluster on both backends."""

    def policies():
        prefix = arguments["workload"].prefix_block_tokens
        first, second = policies_of(arguments["spec"], prefill, decode, prefix)
        return {"prefill_policy": first, "decode_policy": second}

    return cluster_of(**arguments, **policies()), reference_of(**arguments, **policies())


#: Requests that are sent again compete for KV blocks with prompts that wait for reserved ones.
SENT_AGAIN_EARLY = {
    "prefill": "least_loaded", "decode": "jsq", "seed": 54010786, "topology": (1, 1), "prefix": 0,
    "grid": 0, "n_ranks": 1, "own_experts": False, "async_scheduling": False,
    "slow_transfers": False, "signal_intervals": 0, "preempt_by_key": False, "n_queue_keys": 1,
    "aging": None, "windows": None, "front_end": None, "drafts": 0, "threshold": None,
    "early": True, "sglang": None,
}  # fmt: skip


@examples(
    40, 1200, SENT_AGAIN_EARLY, early=st.booleans(), prefill=POLICIES["prefill"],
    decode=st.sampled_from(["jsq", "round_robin", "p2c", "holds"]), **RANDOM_CLUSTER,
)  # fmt: skip
def test_faults_equal_the_reference(prefill, decode, **drawn):
    arguments = random_cluster(**drawn)
    rng = np.random.default_rng([drawn["seed"], 7])
    until = max(0.05, 2 * float(arguments["workload"].arrival_s[-1]))
    plan = random_plan(rng, arguments["spec"], arguments["workload"], until)
    cluster, reference = make_pair(arguments | {"faults": plan}, prefill, decode)
    record = cluster.run()
    assert_ordered(record)
    assert_same(record, reference.run())
    for router, policy in zip(cluster.routers, reference.inputs.policies, strict=True):
        assert getattr(router.policy, "seen", None) == getattr(policy, "seen", None)


#: A hung worker's requests are sent again while a policy reads the KV usage of a group in which
#: one engine has nothing to look at: it plans, and takes blocks, when the step starts.
HOLDS_AT_A_STEP = {
    "prefill": "round_robin", "decode": "holds", "seed": 4230591995, "topology": (2, 1), "size": 3,
    "per_engine": 1, "gpus_per_node": 2, "interval": 5, "balance": (20, 1), "n_redundant": 4,
    "copy_per": NODE, "prefix": 4, "async_scheduling": True, "slow_transfers": False,
    "preempt_by_key": False, "n_queue_keys": 1, "aging": None, "threshold": None,
}  # fmt: skip


@examples(
    25, 800, HOLDS_AT_A_STEP, prefill=POLICIES["prefill"],
    decode=st.sampled_from(["jsq", "round_robin", "holds"]), **GROUPED,
)  # fmt: skip
def test_faults_of_groups_equal_the_reference(prefill, decode, **drawn):
    """A worker is all its engines: they die, hang and slow down together."""
    arguments = grouped_cluster(**drawn)
    rng = np.random.default_rng([drawn["seed"], 7])
    until = max(0.05, 2 * float(arguments["workload"].arrival_s[-1]))
    plan = random_plan(rng, arguments["spec"], arguments["workload"], until, drawn["size"])
    cluster, reference = make_pair(arguments | {"faults": plan}, prefill, decode)
    record = cluster.run()
    assert_ordered(record)
    other = reference.run()
    assert_same(record, other)
    for name in ("prefill_group_steps", "decode_group_steps"):
        ends = [getattr(each, name)["end"] for each in (record, other)]
        np.testing.assert_allclose(*ends, rtol=1e-12)


# -- conservation ------------------------------------------------------------------------------


def free_of(cluster):
    """KV blocks that nobody holds, running sequences, and what the routers believe."""
    engines = cluster.arrays.engines
    idle = engines.workers["n_blank"] + engines.workers["n_idle"]
    idle -= engines.pools["n_blocks"][engines.pool_of]
    loads = cluster.arrays.routers[0].loads.sum()
    waiting = engines.workers["n_waiting"].sum(), engines.workers["waiting_tokens"].sum()
    return idle.any(), engines.workers["batch"].sum(), *waiting, loads


def small(topology, early=False, engine="vllm"):
    """Two prefill workers and two decode workers, or two co-located ones; nine requests."""
    arguments = random_cluster(3, topology, 4, 0, 1, False, True, True, early=early)
    rng, spec = np.random.default_rng(5), arguments["spec"]
    few = {"n_blocks": 30, "max_num_seqs": 3, "engine": engine}
    few["rules"] = rules_of(engine, SchedulerConfig(), 30, 1)
    arguments["spec"] = with_engines(
        spec, block_size=3, prefill=dataclasses.replace(spec.prefill, **few),
        decode=dataclasses.replace(spec.decode, **few), max_concurrency=None,
        max_model_len=LONGEST, enable_prefix_caching=True, load_report_delay_s=0.002,
    )  # fmt: skip
    arguments["workload"] = random_workload(rng, 9, 0.004, 4, 24, 12)
    arguments["prompts"] = None if topology[0] else random_prompts(
        rng, arguments["workload"], N_TRACE, 1, spec.decode.step_time.cost.n_experts
    )  # fmt: skip
    return arguments | {"window": (0.0, np.inf), "time_limit_s": np.inf, "queue_keys": None}


def run_with(arguments, plan):
    first, second = policies_of(arguments["spec"], "least_loaded", "jsq", 4)
    cluster = cluster_of(
        **arguments, prefill_policy=first, decode_policy=second,
        faults=plan,
    )  # fmt: skip
    return cluster, cluster.run()


def instants(arguments):
    """All times at which anything happens without faults, and those just behind."""
    times = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_module, "_EVENTS_A_CALL", 1)
        first, second = policies_of(arguments["spec"], "least_loaded", "jsq", 4)
        cluster = cluster_of(
            **arguments, prefill_policy=first, decode_policy=second,
            signatures=lambda ranges: (0, None),
        )  # fmt: skip
        cluster.run(lambda _share: times.add(float(cluster.arrays.clock["now"][0])))
    return sorted(times | {float(np.nextafter(at, np.inf)) for at in times})


#: Known at once and for good, known when the new worker is there already, and known before.
HEARD = (0.0, np.inf), (0.004, 0.002), (0.003, 0.02)


@pytest.mark.parametrize(
    ("topology", "early", "engine"),
    [
        ((2, 2), False, "vllm"), ((2, 2), True, "vllm"), ((0, 2), False, "vllm"),
        ((2, 2), True, "sglang"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_death_at_any_event_loses_no_request(topology, early, engine, each):
    """INV-4: At every event, and just behind: any worker; each worker in each way if slow."""
    arguments = small(topology, early, engine)
    lengths, tried, again = arguments["workload"].output_len, 0, 0
    workers = [(1, 0), (1, 1)] + [(0, 0), (0, 1)] * (topology[0] > 0)
    cases = [(worker, way) for worker in workers for way in HEARD]
    for i, at in enumerate(instants(arguments)):
        for (pool, worker), (delay, lasts) in cases if each else [cases[i % len(cases)]]:
            fault = Fault("fail", ("prefill", "decode")[pool], worker, at, lasts)
            cluster, record = run_with(arguments, FaultPlan((fault,), None, delay, "migrate"))
            assert record.completed.all(), (fault, delay)
            # Every request has got each of its tokens once, but for those that come with KV.
            outputs = record.decode_steps["outputs"].sum()
            assert outputs == lengths.sum() or engine == "sglang", (fault, delay)
            assert record.retries.max() <= 1
            assert free_of(cluster)[:4] == (False, 0, 0, 0)
            tried, again = tried + 1, again + int(record.retries.sum())
    assert again > tried / 2  # most of them hit requests
    print(f"{topology} {engine}: {i + 1} instants, {tried} deaths, {again} sent again, none lost")


@pytest.mark.parametrize("early", [False, True])
def test_a_client_that_gives_up_at_any_event_leaves_nothing(early):
    arguments = small((2, 2), early)
    n = len(arguments["workload"])
    for i, at in enumerate(instants(arguments)):
        cancel = np.full(n, np.inf)
        cancel[i % n] = at
        if at <= arguments["workload"].arrival_s[i % n]:
            continue
        cluster, record = run_with(arguments, FaultPlan((), cancel))
        gone = ~record.completed
        assert gone.sum() <= 1
        assert (record.requests["outcome"][gone] == state.CANCELLED).all()
        tokens = arguments["workload"].output_len[~gone].sum()
        assert (
            record.decode_steps["outputs"].sum()
            == tokens + record.requests["generated"][gone].sum()
        )
        # The loads of requests that ended last are still to be reported.
        assert free_of(cluster)[:4] == (False, 0, 0, 0)


@pytest.mark.parametrize("where", [("prefill", 0), ("decode", 1)])
def test_a_slow_link_is_slow_both_ways_on_both_backends(where):
    arguments = small((2, 2))
    slow = FaultPlan((Fault("link", *where, 0.0, np.inf, 0.01),))
    cluster, reference = make_pair(arguments | {"faults": slow}, "least_loaded", "jsq")
    record = cluster.run()
    assert_same(record, reference.run())
    _, fast = run_with(arguments, FaultPlan(()))
    took, usual = (
        (each.requests["transfer_end_s"] - each.requests["transfer_start_s"]).max()
        for each in (record, fast)
    )
    assert took > 2 * usual


class Stubborn(RouterPolicy):
    """Always chooses worker 0."""

    name = "stubborn"

    def select(self, request, workers):
        return 0


def test_deaths_cost_what_is_in_flight_and_not_what_was_ever_sent(monkeypatch):
    """Each request is looked at once more than it is in flight when a worker dies."""
    looked = []
    of_requests = Actions._not_ended

    def counted(self, requests):
        found = of_requests(self, requests)
        looked.append((len(requests), len(found)))
        return found

    monkeypatch.setattr(Actions, "_not_ended", counted)
    n_requests, n_deaths = 400, 24
    fields = {
        "topology": "1P4D",
        "num_requests": n_requests,
        "request_rate": 100,
        "trace": "reference-moe",
        "input_len": 50,
        "output_len": 4,
        "warmup": 0.01,
    }
    fails = [f"decode:{n % 4}@{0.1 + n * 0.15:.2f}+0.05" for n in range(n_deaths)]
    result = simulate(make_config(fields | {"fail": fails}))
    assert result.summary["completed"] > 0.9 * n_requests
    assert len(looked) >= n_deaths
    in_flight = sum(found for _, found in looked)
    assert sum(of for of, _ in looked) <= n_requests + in_flight
    assert in_flight < n_requests * n_deaths / 10  # what all that had been sent were before


def test_no_policy_reaches_a_worker_that_is_known_to_be_dead():
    arguments = small((2, 2))
    fault = Fault("fail", "decode", 0, 0.01)
    for decode in (Stubborn(None), *(policies_of(arguments["spec"], "least_loaded", name, 4)[1]
                                 for name in ("jsq", "round_robin", "p2c"))):  # fmt: skip
        cluster = cluster_of(
            **arguments, prefill_policy=Stubborn(None), decode_policy=decode,
            signatures=lambda ranges: (0, None), faults=FaultPlan((fault,), None, 0.0, "migrate"),
        )  # fmt: skip
        requests = cluster.run().requests
        late = requests["prefill_end_s"] > fault.at_s
        assert late.any()
        assert (requests["decode_worker"][late] == 1).all()
        assert (requests["prefill_worker"] == 0).all()


def test_a_worker_that_joins_serves_from_then_on():
    arguments = small((2, 2))
    joined = 0.05
    plan = FaultPlan((Fault("join", "decode", 0, 0.02, 0.03),), None, 0.0, "migrate")
    _, record = run_with(arguments, plan)
    assert record.completed.all()
    first = record.decode_steps[record.decode_steps["worker"] == 0]["start"].min(initial=np.inf)
    assert first >= joined


def test_a_hang_delays_what_is_under_way_and_no_more(make_cluster, make_workload, make_step_time):
    """Four tokens of 1 s each; the worker stands still from 2.5 s for 10 s."""
    workload = make_workload([0.0], 4, 4)
    step_time = make_step_time(1, constant=1.0, prefill=(0.0, 0.0))
    for kind, factor, ends in (("hang", 1.0, 14.0), ("slow", 3.0, 6.0)):
        cluster = make_cluster(workload, step_time=step_time, max_num_seqs=1)
        cluster.faults = FaultPlan((Fault(kind, "decode", 0, 2.5, 10.0, factor),))
        record = cluster.run()
        assert record.requests["finish_s"].tolist() == [ends]


def test_prompts_that_a_hanging_worker_has_not_begun_go_elsewhere(
    make_cluster, make_workload, make_step_time
):
    """In turn on two workers of one place: prompts take no time, three more tokens 1 s each."""
    workload = make_workload([0.0, 0.0, 0.5, 0.5], 4, 4)
    step_time = make_step_time(1, constant=1.0, prefill=(0.0, 0.0))
    for resend, ends in ((False, [13.0, 3.0, 16.0, 6.0]), (True, [13.0, 3.0, 9.0, 6.0])):
        fault = Fault("hang", "decode", 0, 2.5, 10.0, resend=resend)
        cluster = make_cluster(workload, step_time=step_time, max_num_seqs=1, n_decode=2,
                               n_prefill=0)  # fmt: skip
        cluster.faults = FaultPlan((fault,), health_delay_s=1.0)
        record = cluster.run()
        assert record.requests["finish_s"].tolist() == ends
        assert record.retries.tolist() == [0, 0, int(resend), 0]


def test_a_dead_workers_request_begins_anew_or_goes_on(make_cluster, make_workload, make_step_time):
    """Tokens of 1 s; the worker dies in its third step, and another prefill takes no time."""
    workload = make_workload([0.0], 4, 5)
    step_time = make_step_time(1, constant=1.0, prefill=(0.0, 0.0))
    fault = Fault("fail", "decode", 0, 2.5)
    for retry, tokens, finish in (("migrate", 5, 5.5), ("before_first_token", 2, 2.5)):
        cluster = make_cluster(workload, step_time=step_time, max_num_seqs=1, n_decode=2)
        cluster.faults = FaultPlan((fault,), None, 0.0, retry)
        record = cluster.run()
        assert record.completed.all() == (retry == "migrate")
        assert record.requests["finish_s"].tolist() == [finish]
        assert record.decode_steps["outputs"].sum() == tokens
        assert record.gaps.tolist() == ([(2.0, 3.5)] if retry == "migrate" else [])


@pytest.mark.parametrize("pool", [0, 1])
def test_a_slower_link_of_either_worker_slows_a_transfer(make_cluster, make_workload, pool):
    """Eight tokens of a byte at 10 bytes/s, and at a tenth of it."""
    took = []
    for faults in ((), (Fault("link", ("prefill", "decode")[pool], 0, 0.0, np.inf, 0.1),)):
        cluster = make_cluster(
            make_workload([1.0], 8, 2), transfer=TransferModel(0.0, 0.0, 10.0, "test")
        )
        cluster.faults = FaultPlan(faults) if faults else None
        (request,) = cluster.run().requests
        took.append(request["transfer_end_s"] - request["transfer_start_s"])
    assert took == pytest.approx([0.8, 8.0])


def test_one_that_waits_to_go_on_leaves_with_all_its_tokens(
    make_cluster, make_workload, make_step_time
):
    """It has five tokens when its worker dies, waits at the other one, and gives up."""
    cluster = make_cluster(
        make_workload([0.0, 0.0], 4, 30), step_time=make_step_time(1, constant=1.0),
        max_num_seqs=1, n_prefill=0, n_decode=2,
    )  # fmt: skip
    gives_up = np.array([7.0, np.inf])
    cluster.faults = FaultPlan((Fault("fail", "decode", 0, 5.5),), gives_up, 0.0, "migrate")
    record = cluster.run()
    assert record.requests["outcome"].tolist() == [state.CANCELLED, state.COMPLETED]
    assert record.requests["generated"][0] > 0
    assert record.retries.tolist() == [1, 0]
    assert not any(free_of(cluster))


@pytest.mark.parametrize(("blocks", "completes"), [(3, True), (2, False)])
def test_a_context_that_no_prefill_worker_can_hold_is_not_sent_again(
    make_cluster, make_workload, make_step_time, blocks, completes
):
    """Blocks of 4 tokens: the prompt takes one, with the five tokens that are there three."""
    cluster = make_cluster(
        make_workload([0.0], 4, 9), step_time=make_step_time(1, constant=1.0), max_num_seqs=1,
        n_decode=2, prefill={"n_blocks": blocks},
    )  # fmt: skip
    cluster.faults = FaultPlan((Fault("fail", "decode", 0, 5.5),), None, 0.0, "migrate")
    record = cluster.run()
    assert record.completed.all() == completes
    assert record.retries.tolist() == [completes]
    assert (record.requests["outcome"] == state.WORKER_LOST).all() != completes


@pytest.mark.parametrize("n_prefill", [0, 1])
def test_the_times_of_a_request_are_those_of_the_try_with_its_first_token(
    make_cluster, make_workload, make_step_time, n_prefill
):
    """Tokens of 1 s; the first worker dies when two are there, and the other three come later."""
    step_time = make_step_time(1, constant=1.0, prefill=(1.0, 0.0))
    cluster = make_cluster(
        make_workload([0.0], 4, 5), step_time=step_time, max_num_seqs=1, n_prefill=n_prefill,
        n_decode=2,
    )  # fmt: skip
    cluster.faults = FaultPlan((Fault("fail", "decode", 0, 3.5),), None, 0.0, "migrate")
    record = cluster.run()
    assert_ordered(record)
    (request,) = record.requests
    assert record.completed.all()
    assert record.retries.tolist() == [1]
    assert request["decode_worker"] == 0
    assert request["prefill_start_s"] == 0.0
    first = 2.0 if n_prefill else 1.0
    assert request["first_token_s"] == first
    assert request["prefill_end_s"] == 1.0
    assert request["finish_s"] > 3.5
