"""Whole clusters: every request ends once, in order, and nothing is left behind."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.policies.base import Needs, RouterPolicy
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.setup.transfer import TransferModel

LIFE = (
    "arrival_s",
    "sent_s",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "decode_start_s",
    "first_token_s",
    "finish_s",
)
COLOCATED_LIFE = (*LIFE[:3], "first_token_s", "finish_s")


def in_flight(requests, at):
    """Requests sent and not finished just after a time."""
    served = requests[requests["decode_worker"] >= 0]
    return int(((served["sent_s"] <= at) & (served["finish_s"] > at)).sum())


def free_blocks(cluster):
    """KV blocks of each worker that nobody holds, prefill workers first."""
    workers = cluster.arrays.engines.workers
    return (workers["n_blank"] + workers["n_idle"]).tolist()


def loads(cluster):
    return cluster.arrays.routers[0].loads.tolist()


# -- conservation ------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 40),
    topology=st.tuples(st.integers(0, 3), st.integers(1, 4)),
    gap_s=st.sampled_from([0.0, 1e-4, 2e-3, 5e-2]),
    max_num_seqs=st.integers(1, 8),
    max_concurrency=st.none() | st.integers(1, 10),
    load_report_delay_s=st.sampled_from([0.0, 1e-3, 10.0]),
    n_blocks=st.integers(10, 60),
    max_model_len=st.sampled_from([40, 1000]),
    decode_policy=st.sampled_from(["jsq", "random", "round_robin", "p2c"]),
    bandwidth=st.sampled_from([1e30, 1e4]),
    async_scheduling=st.booleans(),
)
def test_every_request_ends_once_and_leaves_nothing(
    make_cluster, make_workload, run_to_rest, seed, n, topology, gap_s, max_num_seqs,
    max_concurrency, load_report_delay_s, n_blocks, max_model_len, decode_policy, bandwidth,
    async_scheduling,
):  # fmt: skip
    """INV-1, INV-2."""
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(1, 40, n), rng.integers(1, 30, n)
    arrival = np.round(np.cumsum(gap_s * rng.exponential(size=n)), 9)
    workload = make_workload(arrival, prompts, outputs, seed=seed % 1000)
    n_prefill, n_decode = topology
    cluster = make_cluster(
        workload, n_prefill=n_prefill, n_decode=n_decode, max_num_seqs=max_num_seqs,
        max_concurrency=max_concurrency, load_report_delay_s=load_report_delay_s,
        n_blocks=n_blocks, max_model_len=max_model_len, decode_policy=decode_policy, seed=seed,
        transfer=TransferModel(1e-4, 1e-6, bandwidth, "test"), max_num_batched_tokens=32,
        async_scheduling=async_scheduling,
    )  # fmt: skip
    record = run_to_rest(cluster)
    requests, clock = record.requests, cluster.arrays.clock[0]
    assert len(requests) == n
    # Counted down at every end: with an outcome each, every request has ended exactly once.
    assert (requests["outcome"] != state.OPEN).all()
    assert clock["open_measured"] == 0

    tokens = prompts + outputs
    expected = np.where(tokens > n_blocks * 4, state.NO_KV_ROOM, state.COMPLETED)
    expected[tokens > max_model_len] = state.TOO_LONG
    assert requests["outcome"].tolist() == expected.tolist()
    done, refused = requests[record.completed], requests[~record.completed]
    life = LIFE if n_prefill else COLOCATED_LIFE
    times = np.array([done[name] for name in life])
    assert (times[0] >= 0.0).all()
    assert (np.diff(times, axis=0) >= 0.0).all()
    for name in ("prefill_worker", "decode_worker", "finish_s", "first_token_s"):
        assert (refused[name] == -1).all()

    assert loads(cluster) == [0] * (n_prefill + n_decode)
    assert free_blocks(cluster) == [n_blocks] * (n_prefill + n_decode)
    workers = cluster.arrays.engines.workers
    for name in ("batch", "tokens", "prefilling", "context", "chunk_tokens", "joined", "filled"):
        assert (workers[name] == 0).all()
    for name in ("new_head", "arrived_head", "preempted_head", "late_head"):
        assert (workers[name] == -1).all()
    for name in ("in_flight", "n_events", "n_flows", "pending_head", "pending_tail"):
        assert clock[name] == 0

    steps = record.decode_steps
    assert steps["outputs"].sum() == done["output_len"].sum()
    # A request that is preempted joins again, unless it had not got that far.
    again = done["preemptions"].sum()
    assert len(done) <= steps["joined"].sum() <= len(done) + again
    assert len(record.gaps) == steps["joined"].sum() - len(done)
    of_pools = (n_prefill, record.prefill_steps), (n_decode, steps)
    for mine in (all_[all_["worker"] == w] for n, all_ in of_pools for w in range(n)):
        assert (mine["start"][1:] >= mine["end"][:-1]).all()
        assert (mine["sequences"] + mine["chunks"] <= max_num_seqs + mine["joined"]).all()
        assert (mine["sequences"] <= max_num_seqs).all()
        assert (mine["chunks"] <= max_num_seqs).all()
        assert (mine["tokens"] + mine["chunk_tokens"] <= 32).all()
    if n_prefill:
        assert record.prefill_steps["chunk_tokens"].sum() == done["prompt_len"].sum()
        assert (record.prefill_steps["sequences"] == 0).all()
    else:  # the last token of a prompt is decoded; what is preempted is computed again
        computed = steps["chunk_tokens"].sum()
        assert computed >= (done["prompt_len"] - 1).sum()
        assert computed == (done["prompt_len"] - 1).sum() or again > 0
    if max_concurrency is not None:
        assert max((in_flight(done, at) for at in done["sent_s"]), default=0) <= max_concurrency
    assert (np.diff(requests["sent_s"]) >= 0).all()  # the client sends in order of arrival


# -- one life by hand --------------------------------------------------------------------------


def test_the_life_of_a_request(make_cluster, make_workload, make_step_time):
    """Two requests: 10 and 6 prompt tokens in chunks of 8, blocks of 4, 100 bytes a token."""
    workload = make_workload([1.0, 1.5], [10, 6], [3, 1])
    step_time = make_step_time(4, constant=0.25, prefill=(1.0, 0.0))
    cluster = make_cluster(
        workload,
        step_time=step_time,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        transfer=TransferModel(0.5, 0.125, 1600.0, "test"),
        kv_bytes_per_token=100,
    )
    record = cluster.run()
    a, b = record.requests
    # Prefill: 8 of a from 1, then its last 2 with all 6 of b from 2.
    assert record.prefill_steps[["start", "end", "chunks", "chunk_tokens"]].tolist() == [
        (1.0, 2.0, 1, 8), (2.0, 3.0, 2, 8)
    ]  # fmt: skip
    assert (a["prefill_start_s"], b["prefill_start_s"]) == (1.0, 2.0)
    assert (a["prefill_end_s"], b["prefill_end_s"]) == (3.0, 3.0)
    # Transfers: 3 and 2 blocks of 400 bytes, K and V of each a descriptor. b's bytes flow from
    # 3 + 0.5 + 4 / 8 = 4, a's from 4.25, when 400 of b's 800 are left. At 800 B/s each b ends
    # 0.5 s later; a then has 800 left at full rate.
    assert (a["transfer_start_s"], b["transfer_start_s"]) == (3.0, 3.0)
    assert b["transfer_end_s"] == pytest.approx(4.75)
    assert a["transfer_end_s"] == pytest.approx(4.75 + 0.5)
    # Decode: b alone from 4.75 for a step; a from 5.25 for three.
    assert record.decode_steps["start"] == pytest.approx([4.75, 5.25, 5.5, 5.75])
    assert record.decode_steps["context"].tolist() == [6, 10, 11, 12]
    assert record.requests["first_token_s"] == pytest.approx([5.5, 5.0])
    assert (a["finish_s"], b["finish_s"]) == (pytest.approx(6.0), pytest.approx(5.0))
    assert record.end_s == a["finish_s"]


def test_mla_moves_one_tensor_a_layer(make_cluster, make_workload):
    workload = make_workload([0.0], [8], [1])
    cluster = make_cluster(workload, transfer=TransferModel(0.0, 1.0, 1e30, "test"), n_kv_tensors=1)
    (request,) = cluster.run().requests
    assert request["transfer_end_s"] - request["transfer_start_s"] == pytest.approx(2.0)


# -- what the routers see ----------------------------------------------------------------------


class Spy(RouterPolicy):
    """Takes the workers in turn and keeps what it was shown."""

    name = "spy"
    needs = Needs(signature="count")

    def __init__(self, n_workers):
        self.n, self.cluster, self.seen = n_workers, None, []

    def select(self, request, workers):
        now = float(self.cluster.arrays.clock["now"][0])
        self.seen.append((now, request, workers.loads.copy()))
        return (len(self.seen) - 1) % self.n


def spied_on(make_cluster, workload, n_prefill=1, n_decode=1, **rest):
    """A cluster and the spies in the place of its two routers."""
    spies = Spy(n_prefill), Spy(n_decode)
    cluster = make_cluster(
        workload, n_prefill=n_prefill, n_decode=n_decode, prefill_policy=spies[0],
        decode_policy=spies[1], **rest,
    )  # fmt: skip
    for spy in spies:
        spy.cluster = cluster
    return cluster, *spies


@pytest.mark.parametrize("delay", [0.0, 0.004, 0.1])
def test_loads_are_as_old_as_the_reports(make_cluster, make_workload, run_to_rest, delay):
    rng = np.random.default_rng(4)
    n = 80
    workload = make_workload(
        np.cumsum(rng.exponential(0.002, n)), rng.integers(1, 30, n), rng.integers(1, 20, n)
    )
    cluster, prefill, decode = spied_on(
        make_cluster, workload, n_prefill=2, n_decode=3, load_report_delay_s=delay
    )
    requests = run_to_rest(cluster).requests
    lives = (
        (prefill, "prefill_worker", "sent_s", "prefill_end_s"),
        (decode, "decode_worker", "prefill_end_s", "finish_s"),
    )
    for spy, worker, begin, end in lives:
        assert len(spy.seen) == n
        chosen = []
        for now, info, loads in spy.seen:
            known = [0] * spy.n
            for r in chosen:
                known[r[worker]] += r[end] + delay > now
            assert loads.tolist() == known
            r = requests[info.request_id]
            assert r[begin] == now
            chosen.append(r)


def test_routers_see_the_prompt_and_then_its_signature(make_cluster, make_workload):
    workload = make_workload([0.0, 0.1, 0.2], [3, 4, 5], [1, 1, 1])
    cluster, prefill, decode = spied_on(make_cluster, workload)
    cluster.run()
    assert [info.request_id for _, info, _ in prefill.seen] == [0, 1, 2]
    for _, info, _ in prefill.seen:
        assert info.signature is None
        assert info.prompt_len == 3 + info.request_id
    assert [info.request_id for _, info, _ in decode.seen] == [0, 1, 2]
    for _, info, _ in decode.seen:
        trace_request = int(workload.text[info.request_id])
        rows = ((trace_request, 0, info.prompt_len),)
        assert info.signature is cluster.inputs.signatures(rows)[1]
        assert info.signature_id == trace_request


def test_prefix_hashes_are_the_requests_own(make_cluster, make_workload):
    workload = make_workload([0.0, 0.1, 0.2], [3, 4, 5], [1, 1, 1])
    object.__setattr__(workload, "prefix_hash", np.arange(10, 16, dtype=np.uint64))
    object.__setattr__(workload, "prefix_indptr", np.array([0, 2, 2, 6]))
    cluster, prefill, _ = spied_on(make_cluster, workload)
    cluster.run()
    seen = [list(info.prefix_hash) for _, info, _ in prefill.seen]
    assert seen == [[10, 11], [], [12, 13, 14, 15]]


@pytest.mark.parametrize("pool", ["prefill_policy", "decode_policy"])
@pytest.mark.parametrize("worker", [-1, 2])
def test_a_worker_that_does_not_exist_is_an_error(make_cluster, make_workload, pool, worker):
    class Wrong(RouterPolicy):
        name = "wrong"

        def select(self, request, workers):
            return worker

    workload = make_workload([0.0], 4, 1)
    cluster = make_cluster(workload, n_prefill=2, n_decode=2, **{pool: Wrong(None)})
    with pytest.raises(ValueError, match=f"^policy 'wrong' chose worker {worker}"):
        cluster.run()


# -- the client --------------------------------------------------------------------------------


def test_closed_loop_sends_when_one_ends(make_cluster, make_workload, make_step_time):
    workload = make_workload(np.zeros(5), 4, [1, 3, 1, 1, 1])
    step_time = make_step_time(4, constant=1.0, prefill=(0.0, 0.0))
    cluster = make_cluster(workload, step_time=step_time, max_num_seqs=4, max_concurrency=2)
    requests = cluster.run().requests
    assert requests["sent_s"].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert requests["finish_s"].tolist() == [1.0, 3.0, 2.0, 3.0, 4.0]


def test_a_refused_request_takes_no_place_in_the_closed_loop(make_cluster, make_workload):
    workload = make_workload(np.zeros(4), [4, 400, 4, 90], [2, 2, 2, 20])
    cluster = make_cluster(workload, max_concurrency=1, max_model_len=300, n_blocks=25)
    record = cluster.run()
    assert record.outcomes() == [
        "completed", "exceeds_max_model_len", "completed", "exceeds_kv_cache"
    ]  # fmt: skip
    requests = record.requests
    assert requests["sent_s"][2] == requests["finish_s"][0] == requests["sent_s"][1]


def test_limits_are_inclusive(make_cluster, make_workload):
    workload = make_workload(np.zeros(4), [60, 61, 80, 81], [20, 20, 20, 20])
    fits = {"max_model_len": 80}, {"n_blocks": 25}
    for limit, expected in zip(fits, (state.TOO_LONG, state.NO_KV_ROOM), strict=True):
        cluster = make_cluster(workload, **limit)
        got = cluster.run().requests["outcome"].tolist()
        ok = state.COMPLETED
        assert got == ([ok] + [expected] * 3 if "max_model_len" in limit else [ok] * 3 + [expected])


# -- the window and the end --------------------------------------------------------------------


def test_only_arrivals_in_the_window_are_measured_and_end_the_run(
    make_cluster, make_workload, make_step_time
):
    workload = make_workload([0.0, 1.0, 1.5, 2.0, 2.5, 9.0], 4, [6, 1, 4, 1, 50, 1])
    step_time = make_step_time(8, constant=0.5, prefill=(0.0, 0.0))
    cluster = make_cluster(workload, step_time=step_time, window=(1.0, 2.0))
    record = cluster.run()
    assert record.requests["measured"].tolist() == [False, True, True, False, False]
    assert record.outcomes() == [*["completed"] * 4, "run_ended_after_window"]
    assert record.end_s == record.requests["finish_s"][1:3].max() == 3.5


def test_a_run_gives_up_at_its_time_limit(make_cluster, make_workload, make_step_time):
    n = 200
    workload = make_workload(np.arange(n) * 0.1, 4, 10)
    step_time = make_step_time(1, constant=0.1, prefill=(0.0, 0.0))
    cluster = make_cluster(workload, step_time=step_time, max_num_seqs=1, time_limit_s=12.05)
    record = cluster.run()
    assert record.completed.sum() == 12
    assert set(record.outcomes()[12:]) == {"unserved_at_time_limit"}
    assert len(record.requests) == 121
    assert cluster.arrays.clock["open_measured"] == n - 12


def test_nothing_measured_is_nothing_run(make_cluster, make_workload):
    record = make_cluster(make_workload([5.0], 4, 1), window=(0.0, 1.0)).run()
    assert len(record.requests) == 0
    assert len(record.decode_steps) == 0


def test_progress_rises_to_one(make_cluster, make_workload):
    rng = np.random.default_rng(0)
    n = 80_000
    workload = make_workload(np.cumsum(rng.exponential(0.01, n)), 4, 5)
    told = []
    make_cluster(workload).run(told.append)
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == 1.0


@pytest.mark.parametrize("policy", ["random", "p2c", "jsq"])
def test_equal_seeds_give_equal_runs(make_cluster, make_workload, policy):
    rng = np.random.default_rng(8)
    n = 60
    workload = make_workload(
        np.cumsum(rng.exponential(0.002, n)), rng.integers(1, 30, n), rng.integers(1, 30, n)
    )
    one, two = (
        make_cluster(workload, n_prefill=2, n_decode=4, decode_policy=policy, n_blocks=40).run()
        for _ in range(2)
    )
    assert one.requests.tobytes() == two.requests.tobytes()
    assert one.prefill_steps.tobytes() == two.prefill_steps.tobytes()
    assert one.decode_steps.tobytes() == two.decode_steps.tobytes()
