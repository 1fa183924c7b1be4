"""Rules: applied by the compiled loop they decide as the policy does when it is asked."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RequestInfo, RouterPolicy, Workers, gives_rules
from eldr_sim.policies.registry import decode_policy
from eldr_sim.policies.routing.decode import JoinShortestQueuePolicy
from eldr_sim.policies.rule import COLUMNS, Rule, StickyRule
from eldr_sim.simulator.plane import router
from eldr_sim.traces.routing.calibration import CalibrationSet

from ..random_artifact import random_artifact

LAYERS, EXPERTS, DOMAINS, WINDOWS = 2, 10, 3, 6
WEIGHTED = (
    "weighted:loads=0.3,sent=1.7,waiting=1.1,running=0.7,waiting_tokens=0.013,"
    "running_tokens=0.0071,kv_usage=3.3"
)


@pytest.mark.parametrize("by_load", [True, False])
@pytest.mark.parametrize("in_turn", [True, False])
@given(
    workers=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    history=st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), max_size=12),
)
def test_a_rule_by_its_words(by_load, in_turn, workers, history):
    """From the worker behind the last one picked round the list: the first, or least loaded."""
    rule, begin = Rule(workers, None if by_load else {}, in_turn=in_turn), 0
    for loads in history:
        turn = workers[begin:] + workers[:begin]
        best = turn[0]
        for worker in turn:
            if by_load and loads[worker] < loads[best]:
                best = worker
        assert rule.pick(Workers.idle(loads)) == best
        if in_turn:
            begin = (workers.index(best) + 1) % len(workers)


class Query(RouterPolicy):
    """A policy of which the simulator knows nothing but ``select``."""

    def __init__(self, policy):
        self.policy, self.name, self.decisions = policy, policy.name, 0
        self.needs = policy.needs

    def select(self, request, workers):
        self.decisions += 1
        return self.policy.select(request, workers)


def make_policy(build, name, n_workers, group_size=1):
    artifact = random_artifact(n_workers // group_size, LAYERS, EXPERTS, seed=7)
    calibration = CalibrationSet(
        counts=np.ones((5, LAYERS, EXPERTS), np.uint16),
        decode_activation=np.ones((5, LAYERS, EXPERTS), np.float32),
        domain=np.array([0, 0, 0, 2, 2], np.int16),  # of one domain nothing is known
        domains=[f"d{index}" for index in range(DOMAINS)],
        requests=np.arange(5),
        trace_checksum="",
    )
    context = PolicyContext(
        n_workers,
        np.random.default_rng(7),
        calibration=calibration,
        artifact=artifact,
        prefix_block_tokens=8,
        group_size=group_size,
    )
    return build("eldr:tau=0.4,refit_s=0" if name == "eldr" else name, context)


def make_signatures(seed):
    """Counts of a prompt's rows, a number for each content."""
    mix = np.random.default_rng(seed).poisson(2.0, (WINDOWS, LAYERS, EXPERTS))
    numbers = {}

    def signatures(ranges):
        number = numbers.setdefault(tuple(ranges), len(numbers))
        return number, sum((stop - start) * mix[which] for which, start, stop in ranges)

    return signatures


def share_prefixes(workload, rng):
    """Prompts that begin as one of a few others, in blocks of 8 tokens."""
    blocks = -(-workload.prompt_len // 8)
    indptr = np.concatenate([[0], np.cumsum(blocks)])
    branch = rng.integers(3, size=len(workload))
    depth = np.arange(indptr[-1]) - np.repeat(indptr[:-1], blocks)
    path = 100 * np.repeat(branch, blocks) + depth
    return dataclasses.replace(
        workload,
        prefix_hash=path.astype(np.uint64),
        prefix_indptr=indptr,
        prefix_text=(path % WINDOWS).astype(np.int32),
        prefix_block_tokens=8,
    )


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 60),
    topology=st.tuples(st.integers(0, 3), st.integers(1, 5)),
    group_size=st.integers(1, 3),
    gap_s=st.sampled_from([0.0, 1e-4, 2e-3]),
    policies=st.tuples(
        st.sampled_from(["round_robin", "least_loaded", "prefix_hash", "vllm_dp", WEIGHTED]),
        st.sampled_from(["round_robin", "jsq", "domain", "eldr", "vllm_dp", WEIGHTED]),
    ),
    signal_interval_s=st.sampled_from([0.0, 1e-3, 1e-2]),
    prefixes=st.booleans(),
    load_report_delay_s=st.sampled_from([0.0, 1e-3, 10.0]),
    max_concurrency=st.none() | st.integers(1, 20),
    n_blocks=st.sampled_from([40, 1000]),
)
def test_compiled_routers_decide_as_the_policies(
    make_cluster, make_workload, run_to_rest, seed, n, topology, group_size, gap_s, policies,
    prefixes, load_report_delay_s, max_concurrency, n_blocks, signal_interval_s,
):  # fmt: skip
    """Engines of a group are routed to as such; that they step together is no matter here."""
    rng = np.random.default_rng(seed)
    n_prefill, n_decode = topology[0], topology[1] * group_size
    workload = make_workload(
        np.cumsum(gap_s * rng.exponential(size=n)),
        rng.choice([4, 9, 30], n),
        rng.integers(1, 30, n),
        windows=WINDOWS,
        seed=seed % 1000,
    )
    workload = dataclasses.replace(workload, domain=rng.integers(DOMAINS, size=n).astype(np.int16))
    if prefixes:
        workload = share_prefixes(workload, rng)

    def run(wrap):
        prefill = decode = None
        if n_prefill:
            prefill = wrap(make_policy(registry.prefill_policy, policies[0], n_prefill))
        decode = wrap(make_policy(registry.decode_policy, policies[1], n_decode, group_size))
        cluster = make_cluster(
            workload, n_prefill=n_prefill, n_decode=n_decode, prefill_policy=prefill,
            decode_policy=decode, signatures=make_signatures(seed), n_blocks=n_blocks, seed=seed,
            load_report_delay_s=load_report_delay_s, max_concurrency=max_concurrency,
            enable_prefix_caching=n_prefill > 0, signal_interval_s=signal_interval_s,
        )  # fmt: skip
        return run_to_rest(cluster), prefill, decode

    asked, *routers = run(Query)
    assert asked.completed.all()
    assert all(router.decisions == n for router in routers if router is not None)
    compiled, *_ = run(lambda policy: policy)
    for record in (asked, compiled):
        record.requests["ticket"] = 0  # publications are events too, where policies are asked
    assert compiled.requests.tobytes() == asked.requests.tobytes()
    assert compiled.prefill_steps.tobytes() == asked.prefill_steps.tobytes()
    assert compiled.decode_steps.tobytes() == asked.decode_steps.tobytes()


@pytest.mark.parametrize("at_once", [512, 2])
def test_a_policy_is_asked_once_for_requests_that_it_treats_alike(
    make_cluster, make_workload, monkeypatch, at_once
):
    monkeypatch.setattr(router, "_ASKED_AT_ONCE", at_once)
    n = 50
    workload = dataclasses.replace(
        make_workload(np.arange(n) * 1e-3, 10, 5, windows=WINDOWS),
        domain=np.arange(n, dtype=np.int16) % DOMAINS,
    )
    classes = {"round_robin": 1, "jsq": 1, "domain": DOMAINS, "eldr": WINDOWS}
    for name, expected in classes.items():
        policy, infos = make_policy(registry.decode_policy, name, 3), []
        rules = policy.rules
        policy.rules = lambda asked, infos=infos, rules=rules: infos.extend(asked) or rules(asked)
        policy.select = None  # not called
        make_cluster(
            workload, n_decode=3, decode_policy=policy, signatures=make_signatures(1)
        ).run()
        assert len(infos) == expected


def test_prefixes_are_routed_by_rules(make_cluster, make_workload):
    """Once a key; the blocks that make one are the first 32 here, of 8 tokens."""
    workload = make_workload(np.arange(50) * 1e-3, 30, 5, windows=WINDOWS)
    workload = share_prefixes(workload, np.random.default_rng(2))
    policy, infos = make_policy(registry.prefill_policy, "prefix_hash", 3), []
    rules = policy.rules
    policy.rules = lambda asked: infos.extend(asked) or rules(asked)
    policy.select = None  # not called
    decode = make_policy(registry.decode_policy, "jsq", 2)
    make_cluster(workload, n_prefill=3, n_decode=2, prefill_policy=policy, decode_policy=decode,
                 signatures=make_signatures(1)).run()  # fmt: skip
    assert len(infos) == len({tuple(workload.blocks(i)) for i in range(50)}) == 3


def test_the_rule_of_a_kept_request_is_for_an_overload():
    kept, loads = StickyRule(2, Rule(range(3)), 1.25), np.array([1, 2, 3])
    assert kept.pick(Workers.idle(loads)) == 0  # 3 > 1.25 x 7 / 3
    assert kept.pick(Workers.idle([2, 2, 2])) == 2
    down = Workers.idle([2, 2, 2])
    down.healthy[2] = False
    assert kept.pick(down) == 1  # the rule's turn has come to it


def test_what_a_rule_is_made_of():
    with pytest.raises(ValueError, match="without workers"):
        Rule([])
    with pytest.raises(ValueError, match="no columns load: of loads, sent, waiting"):
        Rule([0], {"load": 1.0})
    assert set(COLUMNS) - {"sent"} == set(Workers._fields[:6])


class Fixed(JoinShortestQueuePolicy):
    """A built-in policy with another rule."""

    def select(self, request: RequestInfo, workers):
        return 2


def test_a_subclass_with_a_rule_of_its_own_is_asked(make_cluster, make_workload):
    policy = Fixed(PolicyContext(3, np.random.default_rng(0)))
    assert not gives_rules(policy)
    workload = make_workload(np.zeros(6), 4, 3)
    requests = make_cluster(workload, n_decode=3, decode_policy=policy).run().requests
    assert requests["decode_worker"].tolist() == [2] * 6


def test_a_subclass_with_rules_of_its_own_is_asked_for_them():
    class Two(JoinShortestQueuePolicy):
        def rules(self, requests):
            return [Rule([2]) for _ in requests]

    class Other(Two):
        def select(self, request, workers):
            return 1

    context = PolicyContext(3, np.random.default_rng(0))
    assert gives_rules(Two(context))
    assert not gives_rules(Other(context))
    plain = JoinShortestQueuePolicy(context)
    assert gives_rules(plain)
    assert not gives_rules(Query(plain))
    plain.select = lambda request, workers: 0
    assert not gives_rules(plain)


@pytest.mark.parametrize("worker", [-1, 3])
def test_a_rule_of_workers_that_do_not_exist_is_an_error(make_cluster, make_workload, worker):
    class Wrong(JoinShortestQueuePolicy):
        name = "wrong"

        def rules(self, requests):
            return [Rule([0, worker]) for _ in requests]

    policy = Wrong(PolicyContext(3, np.random.default_rng(0)))
    cluster = make_cluster(make_workload([0.0], 4, 1), n_decode=3, decode_policy=policy)
    with pytest.raises(ValueError, match=f"^policy 'wrong' chose worker {worker}"):
        cluster.run()


def test_what_is_sent_counts_until_engines_publish():
    """So its policy asks for what engines publish, and not for a column of that name."""
    policy = decode_policy("weighted:sent=1", PolicyContext(2, np.random.default_rng(0)))
    assert policy.needs.columns == {"waiting"}
