"""What routers see of workers and requests, and requests that they hold.

That every column equals the engines' own state is the twin's business (`test_engine`).
"""

from dataclasses import replace

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import BUILT_IN
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.simulation import Simulation

from .random_clusters import Holds, cluster_of, policies_of, random_cluster


class Watcher(RouterPolicy):
    """Sends everything to worker 0 and keeps what it was shown."""

    name = "watcher"

    def __init__(self):
        self.seen = []

    def select(self, request, workers):
        columns = {name: np.copy(value) for name, value in workers._asdict().items()}
        self.seen.append((request, columns))
        return 0


def watch(make_cluster, make_workload, **spec):
    """Decode requests of 8 prompt tokens, one after 0.1 s, on two workers with one place each."""
    n = 6
    watcher = Watcher()
    workload = make_workload(0.1 * np.arange(n), 8, 40)
    cluster = make_cluster(
        workload, n_decode=2, decode_policy=watcher, max_num_seqs=1, n_blocks=100, **spec
    )
    cluster.run()
    return watcher.seen


def test_a_view_is_of_the_decision_or_of_the_last_interval(make_cluster, make_workload):
    now = watch(make_cluster, make_workload)
    assert [float(seen["signals_s"]) for _, seen in now] == [
        float(seen["now_s"]) for _, seen in now
    ]
    old = watch(make_cluster, make_workload, signal_interval_s=0.25)
    for _, seen in old:
        assert float(seen["signals_s"]) == pytest.approx(float(seen["now_s"]) // 0.25 * 0.25)
    by_time = {float(seen["signals_s"]): seen["waiting"][0] for _, seen in old}
    assert len(by_time) > 1
    for _, seen in old:  # nothing changes in between
        assert seen["waiting"][0] == by_time[float(seen["signals_s"])]


def test_a_view_shows_who_waits_and_who_runs(make_cluster, make_workload, make_step_time):
    slow = make_step_time(1, constant=10.0, prefill=(0.0, 0.0))
    seen = watch(make_cluster, make_workload, step_time=slow)
    for index, (request, columns) in enumerate(seen):
        assert request.request_id == request.session == index
        assert columns["loads"].tolist() == [index, 0]
        assert (columns["running"] + columns["waiting"]).tolist() == [index, 0]
        assert columns["waiting_tokens"].tolist() == [8 * columns["waiting"][0], 0]
        assert columns["healthy"].all()
    last = seen[-1][1]
    assert last["running"].tolist() == [1, 0]
    assert last["running_tokens"][0] >= 8
    assert 0 < last["kv_usage"][0] <= 1
    assert last["kv_usage"][1] == 0


def test_a_view_counts_prompts_that_are_computed_and_no_blocks_that_are_only_cached(
    make_cluster, make_workload, make_step_time
):
    """Prompts of 33 tokens, 8 a second; the second comes during the first one, the third later."""
    watcher, workload = Watcher(), make_workload([0.0, 2.5, 900.0], 33, 2)
    workload = replace(
        workload, prefix_block_tokens=4, prefix_hash=np.arange(24, dtype=np.uint64) + 1,
        prefix_indptr=np.array([0, 8, 16, 24]), prefix_text=np.zeros(24, np.int32),
    )  # fmt: skip
    cluster = make_cluster(
        workload, n_prefill=0, n_decode=1, decode_policy=watcher, max_num_batched_tokens=8,
        step_time=make_step_time(8, constant=1.0, prefill=(1.0, 0.0)), n_blocks=100,
    )  # fmt: skip
    cluster.run()
    first, second, third = (columns for _, columns in watcher.seen)
    assert first["kv_usage"].tolist() == third["kv_usage"].tolist() == [0.0]
    # The whole context but the last prompt token, which is decoded; blocks of 4 tokens
    # for the chunks that are computed or scheduled.
    assert second["running_tokens"].tolist() == [32]
    assert second["kv_usage"] == pytest.approx([0.06])
    assert third["running_tokens"].tolist() == [0]


def test_output_limits_are_seen_where_clients_set_them(make_cluster, make_workload):
    for limit in (None, 40):
        assert {r.max_tokens for r, _ in watch(make_cluster, make_workload, max_tokens=limit)} == {
            limit
        }


# -- held requests -------------------------------------------------------------------------------


class OneAtATime(RouterPolicy):
    """Holds a request until the one before has ended."""

    name = "one_at_a_time"

    def __init__(self):
        self.asked = []

    def select(self, request, workers):
        self.asked.append(request.request_id)
        return None if workers.loads.any() else 1


@pytest.mark.parametrize("pool", ["prefill_policy", "decode_policy"])
def test_held_requests_go_on_in_their_order(make_cluster, make_workload, pool):
    workload = make_workload(np.zeros(5), 8, [9, 2, 5, 3, 1])
    policy = OneAtATime()
    cluster = make_cluster(workload, n_prefill=2, n_decode=2, **{pool: policy})
    record = cluster.run()
    assert record.completed.all()
    came, begin, end, worker = {
        "prefill_policy": ("sent_s", "prefill_start_s", "prefill_end_s", "prefill_worker"),
        "decode_policy": ("prefill_end_s", "transfer_start_s", "finish_s", "decode_worker"),
    }[pool]
    order = np.argsort(record.requests[came], kind="stable")
    requests = record.requests[order]
    assert requests[worker].tolist() == [1] * 5
    assert (requests[begin][1:] >= requests[end][:-1]).all()
    a, b, c, d, e = order.tolist()
    assert [number for number in policy.asked if number != a][-10:] == [
        b,
        c,
        d,
        e,
        c,
        d,
        e,
        d,
        e,
        e,
    ]


def test_a_request_that_is_held_for_ever_is_an_error(make_cluster, make_workload):
    class Never(RouterPolicy):
        name = "never"

        def select(self, request, workers):
            return None

    for interval in (0.0, 0.1):
        cluster = make_cluster(
            make_workload(np.zeros(3), 8, 4), decode_policy=Never(None), signal_interval_s=interval
        )
        with pytest.raises(InputError, match=r"^policy: 'never' holds 3 requests"):
            cluster.run()


def test_the_twins_clusters_do_hold_requests():
    """The property in `test_engine` would be empty if nothing were held or stale."""
    held = stale = 0
    for seed in range(30):
        arguments = random_cluster(seed, (2, 2), 0, 0, 1, False, True, False, signal_intervals=7)
        policies = policies_of(arguments["spec"], "holds", "holds", 0)
        cluster = cluster_of(**arguments, prefill_policy=policies[0], decode_policy=policies[1],
                          signatures=lambda ranges: (0, None))  # fmt: skip
        cluster.run()
        for policy in policies:
            assert isinstance(policy, Holds)
            held += len(policy.seen) - len({seen[0] for seen in policy.seen})
            stale += sum(seen[-1] < seen[-2] for seen in policy.seen)
    assert min(held, stale) > 30


# -- health --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", "round_robin", "jsq", "p2c"])
def test_nobody_sends_to_a_worker_that_does_not_answer(name):
    policy = registry.decode_policy(name, PolicyContext(4, np.random.default_rng(0)))
    healthy = np.array([True, False, True, False])
    workers = Workers.idle([9, 0, 8, 0])._replace(healthy=healthy)
    assert name in BUILT_IN["decode"]
    assert {policy.select(RequestInfo(i, 10, 0), workers) for i in range(50)} == {0, 2} - (
        {0} if name in ("jsq", "p2c") else set()
    )
    nobody = workers._replace(healthy=np.zeros(4, np.bool_))
    assert policy.select(RequestInfo(0, 10, 0), nobody) is None


def test_prefix_hash_leaves_a_worker_that_does_not_answer():
    policy = registry.prefill_policy("prefix_hash", PolicyContext(4, np.random.default_rng(0)))
    request = RequestInfo(0, 64, 0, prefix_hash=(5, 6, 7, 8))
    workers = Workers.idle(np.zeros(4))
    home = policy.select(request, workers)
    workers.healthy[home] = False
    assert policy.select(request, workers) != home


@pytest.mark.parametrize("topology", ["1P2D", "2C"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_nothing_waits_when_all_requests_have_ended(engine, topology):
    config = make_config({
        "trace": "reference-moe", "topology": topology, "engine": engine, "policy": "jsq",
        "num_requests": 40, "warmup": 0, "output_len": 6, "request_rate": 400,
        "max_num_seqs": 2,
    })  # fmt: skip
    simulation = Simulation(config)
    assert simulation.run().record.completed.all()
    workers = simulation.cluster.cluster.arrays.engines.workers
    for name in ("n_waiting", "waiting_tokens", "batch", "prefilling", "tokens", "context"):
        assert not workers[name].any(), name
