"""Whole clusters: every request ends once, in order, and nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator import request as outcomes
from eldr_sim.simulator.transfer import TransferModel

LIFE = (
    "arrival_s",
    "sent_s",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "decode_start_s",
    "finish_s",
)


def in_flight(requests, at):
    """Requests sent and not finished just after a time."""
    return sum(0 <= r.sent_s <= at and r.finish_s > at for r in requests if r.prefill_worker >= 0)


# -- conservation ------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 40),
    topology=st.tuples(st.integers(1, 3), st.integers(1, 4)),
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
    ended = []
    end = cluster._end

    def noted(request, outcome):
        assert not request.outcome
        ended.append(request.index)
        end(request, outcome)

    cluster._end = noted
    record = run_to_rest(cluster)
    assert sorted(ended) == list(range(n))
    assert [r.index for r in record.requests] == list(range(n))

    for r in record.requests:
        tokens = r.prompt_len + r.output_len
        if tokens > max_model_len:
            assert r.outcome == outcomes.TOO_LONG
        elif tokens > n_blocks * 4:
            assert r.outcome == outcomes.NO_KV_ROOM
        else:
            assert r.outcome == outcomes.COMPLETED
        if r.outcome == outcomes.COMPLETED:
            times = [getattr(r, name) for name in LIFE]
            times.insert(-1, record.first_token_s[r.index])
            assert times == sorted(times)
            assert times[0] >= 0.0
        else:
            assert (r.prefill_worker, r.decode_worker, r.finish_s) == (-1, -1, -1.0)
            assert record.first_token_s[r.index] < 0

    assert cluster.prefill_loads.tolist() == [0] * n_prefill
    assert cluster.decode_loads.tolist() == [0] * n_decode
    assert [w.free_blocks for w in cluster.prefill_workers] == [n_blocks] * n_prefill
    assert cluster.pool.state["free_blocks"].tolist() == [n_blocks] * n_decode
    assert cluster.pool.state["context"].tolist() == [0] * n_decode

    done = [r for r in record.requests if r.outcome == outcomes.COMPLETED]
    steps = record.decode_steps
    assert steps["batch"].sum() == sum(r.output_len for r in done)
    # A request that is preempted joins again, unless it had not got that far.
    again = sum(r.preemptions for r in done)
    assert len(done) <= steps["joined"].sum() <= len(done) + again
    for w in range(n_decode):
        mine = steps[steps["worker"] == w]
        assert (mine["start"][1:] >= mine["end"][:-1]).all()
        assert (mine["batch"] <= max_num_seqs).all()
        assert (mine["batch"] + mine["chunked"] <= 32).all()
    assert sum(tokens for worker in record.prefill_steps for *_, tokens in worker) == sum(
        r.prompt_len for r in done
    )
    if max_concurrency is not None:
        assert max((in_flight(done, r.sent_s) for r in done), default=0) <= max_concurrency
    sent = [r.sent_s for r in record.requests]
    assert sent == sorted(sent)  # the client sends in order of arrival


# -- one life by hand --------------------------------------------------------------------------


def test_the_life_of_a_request(make_cluster, make_workload, make_step_time):
    """Two requests: 10 and 6 prompt tokens in chunks of 8, blocks of 4, 100 bytes a token."""
    workload = make_workload([1.0, 1.5], [10, 6], [3, 1])
    step_time = make_step_time(4, constant=0.25, prefill_s=lambda tokens, contexts: 1.0)
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
    assert record.prefill_steps == [[(1.0, 2.0, 1, 8), (2.0, 3.0, 2, 8)]]
    assert (a.prefill_start_s, b.prefill_start_s) == (1.0, 2.0)
    assert (a.prefill_end_s, b.prefill_end_s) == (3.0, 3.0)
    # Transfers: 3 and 2 blocks of 400 bytes, K and V of each a descriptor. b's bytes flow from
    # 3 + 0.5 + 4 / 8 = 4, a's from 4.25, when 400 of b's 800 are left. At 800 B/s each b ends
    # 0.5 s later; a then has 800 left at full rate.
    assert (a.transfer_start_s, b.transfer_start_s) == (3.0, 3.0)
    assert b.transfer_end_s == pytest.approx(4.75)
    assert a.transfer_end_s == pytest.approx(4.75 + 0.5)
    # Decode: b alone from 4.75 for a step; a from 5.25 for three.
    assert record.decode_steps["start"] == pytest.approx([4.75, 5.25, 5.5, 5.75])
    assert record.decode_steps["context"].tolist() == [6, 10, 11, 12]
    assert record.first_token_s == pytest.approx([5.5, 5.0])
    assert (a.finish_s, b.finish_s) == (pytest.approx(6.0), pytest.approx(5.0))
    assert record.end_s == a.finish_s


def test_mla_moves_one_tensor_a_layer(make_cluster, make_workload):
    workload = make_workload([0.0], [8], [1])
    cluster = make_cluster(workload, transfer=TransferModel(0.0, 1.0, 1e30, "test"))
    cluster.model.n_kv_tensors = 1
    (request,) = cluster.run().requests
    assert request.transfer_end_s - request.transfer_start_s == pytest.approx(2.0)


# -- what the routers see ----------------------------------------------------------------------


class Spy:
    """Takes the workers in turn and keeps what it was shown."""

    name = "spy"

    def __init__(self, n_workers, clock=lambda: 0.0):
        self.n, self.clock, self.seen = n_workers, clock, []

    def select(self, request, loads):
        self.seen.append((self.clock(), request, loads.copy()))
        return (len(self.seen) - 1) % self.n


@pytest.mark.parametrize("delay", [0.0, 0.004, 0.1])
def test_loads_are_as_old_as_the_reports(make_cluster, make_workload, run_to_rest, delay):
    rng = np.random.default_rng(4)
    n = 80
    workload = make_workload(
        np.cumsum(rng.exponential(0.002, n)), rng.integers(1, 30, n), rng.integers(1, 20, n)
    )
    cluster = make_cluster(workload, n_prefill=2, n_decode=3, load_report_delay_s=delay)
    spies = []
    for name, workers in (("prefill_policy", 2), ("decode_policy", 3)):
        spies.append(Spy(workers, lambda: cluster.env.now))
        setattr(cluster, name, spies[-1])
    requests = run_to_rest(cluster).requests
    lives = (
        (spies[0], "prefill_worker", "sent_s", "prefill_end_s"),
        (spies[1], "decode_worker", "prefill_end_s", "finish_s"),
    )
    for spy, worker, begin, end in lives:
        assert len(spy.seen) == n
        chosen = []
        for now, info, loads in spy.seen:
            known = [0] * spy.n
            for r in chosen:
                known[getattr(r, worker)] += getattr(r, end) + delay > now
            assert loads.tolist() == known
            r = requests[info.request_id]
            assert getattr(r, begin) == now
            chosen.append(r)


def test_routers_see_the_prompt_and_then_its_signature(make_cluster, make_workload):
    workload = make_workload([0.0, 0.1, 0.2], [3, 4, 5], [1, 1, 1])
    cluster = make_cluster(workload)
    cluster.prefill_policy, cluster.decode_policy = Spy(1), Spy(1)
    cluster.run()
    for _, info, _ in cluster.prefill_policy.seen:
        assert info.signature is None
        assert info.prompt_len == 3 + info.request_id
    for _, info, _ in cluster.decode_policy.seen:
        trace_request = int(workload.trace_request[info.request_id])
        assert info.signature is cluster.signatures(((trace_request, 0, info.prompt_len),))[1]
        assert info.signature_id == trace_request


def test_prefix_hashes_are_the_requests_own(make_cluster, make_workload):
    workload = make_workload([0.0, 0.1, 0.2], [3, 4, 5], [1, 1, 1])
    object.__setattr__(workload, "prefix_hash", np.arange(10, 16, dtype=np.uint64))
    object.__setattr__(workload, "prefix_indptr", np.array([0, 2, 2, 6]))
    cluster = make_cluster(workload)
    cluster.prefill_policy = Spy(1)
    cluster.run()
    seen = [list(info.prefix_hash) for _, info, _ in cluster.prefill_policy.seen]
    assert seen == [[10, 11], [], [12, 13, 14, 15]]


# -- the client --------------------------------------------------------------------------------


def test_closed_loop_sends_when_one_ends(make_cluster, make_workload, make_step_time):
    workload = make_workload(np.zeros(5), 4, [1, 3, 1, 1, 1])
    step_time = make_step_time(4, constant=1.0, prefill_s=lambda tokens, contexts: 0.0)
    cluster = make_cluster(workload, step_time=step_time, max_num_seqs=4, max_concurrency=2)
    requests = cluster.run().requests
    assert [r.sent_s for r in requests] == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert [r.finish_s for r in requests] == [1.0, 3.0, 2.0, 3.0, 4.0]


def test_a_refused_request_takes_no_place_in_the_closed_loop(make_cluster, make_workload):
    workload = make_workload(np.zeros(4), [4, 400, 4, 90], [2, 2, 2, 20])
    cluster = make_cluster(workload, max_concurrency=1, max_model_len=300, n_blocks=25)
    requests = cluster.run().requests
    assert [r.outcome for r in requests] == [
        outcomes.COMPLETED, outcomes.TOO_LONG, outcomes.COMPLETED, outcomes.NO_KV_ROOM
    ]  # fmt: skip
    assert requests[2].sent_s == requests[0].finish_s == requests[1].sent_s


def test_limits_are_inclusive(make_cluster, make_workload):
    workload = make_workload(np.zeros(4), [60, 61, 80, 81], [20, 20, 20, 20])
    fits = {"max_model_len": 80}, {"n_blocks": 25}
    for limit, expected in zip(fits, (outcomes.TOO_LONG, outcomes.NO_KV_ROOM), strict=True):
        cluster = make_cluster(workload, **limit)
        got = [r.outcome for r in cluster.run().requests]
        ok = outcomes.COMPLETED
        assert got == ([ok] + [expected] * 3 if "max_model_len" in limit else [ok] * 3 + [expected])


# -- the window and the end --------------------------------------------------------------------


def test_only_arrivals_in_the_window_are_measured_and_end_the_run(
    make_cluster, make_workload, make_step_time
):
    workload = make_workload([0.0, 1.0, 1.5, 2.0, 2.5, 9.0], 4, [6, 1, 4, 1, 50, 1])
    step_time = make_step_time(8, constant=0.5, prefill_s=lambda tokens, contexts: 0.0)
    cluster = make_cluster(workload, step_time=step_time, window=(1.0, 2.0))
    record = cluster.run()
    assert [r.measured for r in record.requests] == [False, True, True, False, False]
    assert [r.outcome for r in record.requests] == [
        *[outcomes.COMPLETED] * 4, outcomes.AFTER_WINDOW
    ]  # fmt: skip
    assert record.end_s == max(r.finish_s for r in record.requests[1:3]) == 3.5


def test_a_run_gives_up_at_its_time_limit(make_cluster, make_workload, make_step_time):
    n = 200
    workload = make_workload(np.arange(n) * 0.1, 4, 10)
    step_time = make_step_time(1, constant=0.1, prefill_s=lambda tokens, contexts: 0.0)
    cluster = make_cluster(workload, step_time=step_time, max_num_seqs=1, time_limit_s=12.05)
    record = cluster.run()
    done = [r for r in record.requests if r.outcome == outcomes.COMPLETED]
    assert len(done) == 12
    assert {r.outcome for r in record.requests[12:]} == {outcomes.OVERLOADED}
    assert len(record.requests) == 121
    assert cluster.open_measured == n - 12


def test_nothing_measured_is_nothing_run(make_cluster, make_workload):
    record = make_cluster(make_workload([5.0], 4, 1), window=(0.0, 1.0)).run()
    assert record.requests == []
    assert len(record.decode_steps) == 0


def test_progress_rises_to_one(make_cluster, make_workload):
    rng = np.random.default_rng(0)
    n = 2000
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
    assert one.requests == two.requests
    assert one.decode_steps.tobytes() == two.decode_steps.tobytes()
    assert one.prefill_steps == two.prefill_steps
