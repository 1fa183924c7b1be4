"""Admission, KV blocks and preemption of decode workers, against an engine written out in full."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator.clock import Clock
from eldr_sim.simulator.decode import DecodePool
from eldr_sim.simulator.request import COMPLETED, Request

# -- a pool without a cluster around it --------------------------------------------------------


def make_requests(arrival_s, prompt_len, output_len):
    return [
        Request(i, float(at), int(prompt), int(output), 0, 0, 0, 4, 0, True)
        for i, (at, prompt, output) in enumerate(
            zip(arrival_s, prompt_len, output_len, strict=True)
        )
    ]


def run_pool(
    step_time, requests, *, latency_s=0.0, max_num_seqs=8, budget=64, block_size=4, n_blocks=1000,
    watch=lambda pool: None, colocated=False, async_scheduling=False,
    hops=0,
):  # fmt: skip
    """Run requests through one worker; each comes ``hops`` events later than the one before it.

    A decode worker's transfers take ``latency_s`` each. All tokens choose the same experts, 0 and
    64; prompts that a co-located worker computes choose two more.
    """
    env, finished = Clock(), []

    def prompt_experts(request, start, stop):
        assert 0 <= start < stop < request.prompt_len + request.output_len
        return np.full(step_time.n_moe_layers * 2, 3, np.uint64)  # experts 0, 1, 64 and 65

    def start_transfer(request):
        request.transfer_start_s = env.now
        env.at(env.now + latency_s, lambda _: pool.workers[0].kv_arrived(request))

    pool = DecodePool(
        env,
        n_workers=1,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        n_blocks=n_blocks,
        max_num_batched_tokens=budget,
        step_time=step_time,
        bits=np.ones((4, step_time.n_moe_layers * 2), np.uint64),
        n_requests=len(requests),
        start_transfer=start_transfer,
        on_finish=finished.append,
        async_scheduling=async_scheduling,
        prompt_experts=prompt_experts if colocated else None,
    )
    pool.requests = requests

    def arrive(request, events):
        if events > 0:
            env.at(env.now, lambda _: arrive(request, events - 1))
        else:
            pool.workers[0].enqueue(request)

    for i, request in enumerate(requests):
        env.at(request.arrival_s, lambda _, r=request, events=hops * i: arrive(r, events))
    bound = 50 * sum(r.output_len + r.prompt_len for r in requests) + 1000
    for _ in range(bound):
        if env.peek() > pool.next_start:
            pool.advance(env.peek())
        if env.peek() == np.inf:
            break
        env.step()
        watch(pool)
    else:
        pytest.fail(f"no end after {bound} events: {len(finished)} of {len(requests)} finished")
    assert sorted(r.index for r in finished) == list(range(len(requests)))
    assert pool.state["free_blocks"].tolist() == [n_blocks]
    assert pool.state["context"].tolist() == [0]
    return pool, finished


# -- the same engine, written as one loop over steps -------------------------------------------


@dataclass
class Twin:
    """A request in the engine below; ``cached`` of its ``prompt + generated`` tokens have KV."""

    index: int
    arrival_s: float
    prompt: int
    output: int
    generated: int = 0
    cached: int = 0
    blocks: int = 0
    preemptions: int = 0
    joined_s: float = -1.0
    finish_s: float = -1.0

    @property
    def known(self):
        return self.prompt + self.generated


def engine(
    step_time, requests, latency_s, max_num_seqs, budget, block_size, n_blocks, colocated=False,
    async_scheduling=False,
):  # fmt: skip
    """Run vLLM's rules step by step; return the twins and (start, end, batch, joined, chunks).

    Running requests are served in the order in which they began; one that is being recomputed
    has not begun. See ``vllm/v1/core/sched/scheduler.py``, ``Scheduler.schedule``.
    """
    twins = [Twin(r.index, r.arrival_s, r.prompt_len, r.output_len) for r in requests]
    coming = deque(sorted(twins, key=lambda t: t.arrival_s))
    flying: deque[tuple[float, Twin]] = deque()
    new, here, preempted = deque(), deque(), deque()
    late: list[tuple[deque, Twin]] = []  # came when the next step had been scheduled
    decoding: list[Twin] = []
    recomputing: list[Twin] = []
    chunks: list[tuple[int, int]] = []  # tokens and cached tokens, this step's
    free, now, left, joined, steps = n_blocks, 0.0, 0, 0, []

    def missing(twin):
        return -(-twin.known // block_size) - twin.blocks

    def take(twin, keep):
        nonlocal free
        more = missing(twin)
        if more + keep > free:
            return False
        free -= more
        twin.blocks += more
        return True

    def wanted():
        return sum(missing(twin) for twin in decoding)

    def is_open():
        return len(decoding) + len(recomputing) < max_num_seqs and left > 0

    def begin(twin):
        nonlocal left, joined
        decoding.append(twin)
        left, joined = left - 1, joined + 1

    def recompute():
        """All but the last token, which is decoded if the step has a token left for it."""
        nonlocal left
        while recomputing and left > 0:
            twin = recomputing[0]
            n = min(twin.known - 1 - twin.cached, left)
            if n > 0:
                chunks.append((n, twin.cached))
            twin.cached += n
            left -= n
            if left == 0:
                return
            begin(recomputing.pop(0))

    while any(t.finish_s < 0 for t in twins):
        assert len(steps) < 50 * sum(t.prompt + t.output for t in twins)
        seen, late = late, []
        while coming and coming[0].arrival_s <= now:
            late.append((new, coming.popleft()))
        while flying and flying[0][0] <= now:
            late.append((here, flying.popleft()[1]))
        if not (async_scheduling and (decoding or recomputing)):
            seen, late = seen + late, []
        for queue, twin in seen:
            queue.append(twin)
        chunks.clear()
        joined = victims = 0
        while wanted() > free:  # running requests get their blocks first; the last one gives way
            twin = (recomputing or decoding).pop()
            free += twin.blocks
            twin.blocks = twin.cached = 0
            twin.preemptions += 1
            preempted.appendleft(twin)
            victims += 1
        left = budget - len(decoding)
        recompute()
        if not victims or not (decoding or chunks):
            while here and is_open():
                here[0].joined_s = now
                begin(here.popleft())
            while preempted and is_open() and take(preempted[0], wanted()):
                recomputing.append(preempted.popleft())
                recompute()
            while not preempted and new and is_open() and take(new[0], wanted()):
                if colocated:
                    recomputing.append(new.popleft())
                    recompute()
                    continue
                new[0].cached = new[0].prompt - 1
                flying.append((now + latency_s, new.popleft()))
        if not decoding and not chunks and late:
            for queue, twin in late:
                queue.append(twin)
            late = []
            continue
        if not decoding and not chunks:
            now = min([t.arrival_s for t in coming] + [at for at, _ in flying])
            continue
        for twin in decoding:
            assert take(twin, 0)
        duration = step_time.fixed_s[len(decoding)] if decoding else 0.0
        news, cached = [n for n, _ in chunks], [cached for _, cached in chunks]
        layer_s = step_time.moe_s[len(decoding), 2]
        if chunks and colocated:
            duration += step_time.mixed_extra_s(len(decoding), news, cached)
            layer_s = step_time.mixed_moe_s[len(decoding) + sum(news), 4]
        elif chunks:
            duration += step_time.prefill_s(news, cached)
        duration += step_time.n_moe_layers * layer_s
        steps.append((now, now + duration, len(decoding), joined, sum(news)))
        now += duration
        for twin in decoding:
            twin.generated += 1
            twin.cached += 1
            if twin.generated == twin.output:
                twin.finish_s = now
                free += twin.blocks
        decoding[:] = [t for t in decoding if t.finish_s < 0]
    assert free == n_blocks
    return twins, steps


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 15),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    block_size=st.sampled_from([1, 3, 4, 16]),
    slack=st.integers(0, 20),
    gap_s=st.sampled_from([1e-4, 1e-3, 1e-2]),
    colocated=st.booleans(),
    async_scheduling=st.booleans(),
)
def test_worker_equals_the_engine_written_out(
    make_step_time, seed, n, max_num_seqs, budget, block_size, slack, gap_s, colocated,
    async_scheduling,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    step_time = make_step_time(max_num_seqs, seed=seed)
    step_time.moe_s[0] = step_time.fixed_s[0] = step_time.attention_s[:] = 0.0
    requests = make_requests(
        np.cumsum(rng.exponential(gap_s, n)), rng.integers(1, 30, n), rng.integers(1, 40, n)
    )
    n_blocks = slack + max(-(-(r.prompt_len + r.output_len) // block_size) for r in requests)
    latency_s = float(rng.uniform(1e-4, 3e-3))
    pool, _ = run_pool(
        step_time, requests, latency_s=latency_s, max_num_seqs=max_num_seqs, budget=budget,
        block_size=block_size, n_blocks=n_blocks, colocated=colocated,
        async_scheduling=async_scheduling,
    )  # fmt: skip
    twins, expected = engine(
        step_time, requests, latency_s, max_num_seqs, budget, block_size, n_blocks, colocated,
        async_scheduling,
    )  # fmt: skip
    steps = pool.steps()
    got = [steps[name].tolist() for name in ("batch", "joined", "chunked")]
    assert list(zip(*got, strict=True)) == [step[2:] for step in expected]
    np.testing.assert_allclose(steps["start"], [s[0] for s in expected], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(steps["end"], [s[1] for s in expected], rtol=1e-12)
    assert [r.preemptions for r in requests] == [t.preemptions for t in twins]
    for field, name in (("finish_s", "finish_s"), ("decode_start_s", "joined_s")):
        if colocated and name == "joined_s":
            continue  # there is no queue between prefill and decode
        np.testing.assert_allclose(
            [getattr(r, field) for r in requests], [getattr(t, name) for t in twins], rtol=1e-12
        )
    assert (steps["batch"] <= max_num_seqs).all()
    assert (steps["batch"] + steps["chunked"] <= budget).all()
    tokens = sum(r.output_len for r in requests)
    assert steps["batch"].sum() == tokens  # preemption loses time, never a token


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(2, 6),
    hops=st.integers(0, 3),
    budget=st.sampled_from([5, 40, 1000]),
    colocated=st.booleans(),
)
def test_requests_of_one_time_share_a_step_whatever_the_order_of_events(
    make_step_time, seed, n, hops, budget, colocated
):
    """The engine may wake several times before a step begins: what it has scheduled stays."""
    rng = np.random.default_rng(seed)
    step_time = make_step_time(8, seed=seed)
    step_time.moe_s[0] = step_time.fixed_s[0] = step_time.attention_s[:] = 0.0
    step_time.mixed_moe_s = np.cumsum(rng.random((1001, 71)), 1) * 1e-5
    requests = make_requests(np.zeros(n), rng.integers(2, 30, n), rng.integers(1, 9, n))
    latency_s = float(rng.uniform(1e-4, 3e-3))
    pool, _ = run_pool(
        step_time, requests, latency_s=latency_s, budget=budget, colocated=colocated, hops=hops
    )
    _, expected = engine(step_time, requests, latency_s, 8, budget, 4, 1000, colocated)
    steps = pool.steps()
    got = [steps[name].tolist() for name in ("batch", "joined", "chunked")]
    assert list(zip(*got, strict=True)) == [step[2:] for step in expected]
    np.testing.assert_allclose(steps["end"], [s[1] for s in expected], rtol=1e-12)


# -- by hand -----------------------------------------------------------------------------------


def constant(make_step_time, **rest):
    return make_step_time(
        4, constant=1.0, prefill_s=lambda tokens, contexts: 0.5 * sum(tokens), **rest
    )


def test_first_come_first_served_by_seats(make_step_time):
    requests = make_requests([0.0, 0.1, 0.2, 0.3], [4, 4, 4, 4], [3, 1, 2, 1])
    _, finished = run_pool(constant(make_step_time), requests, max_num_seqs=2)
    # Seat 1: request 0 over steps 0-3. Seat 2: request 1 joins at 1, 2 at 2, 3 at 3 (seat 1).
    assert [r.decode_start_s for r in requests] == [0.0, 1.0, 2.0, 3.0]
    assert [r.finish_s for r in requests] == [3.0, 2.0, 4.0, 4.0]
    assert [r.index for r in finished] == [1, 0, 2, 3]


def test_a_large_request_at_the_head_holds_the_small_ones_back(make_step_time):
    """10 blocks of 4: request 0 holds 6, so 1 (5 blocks) waits, and 2 (1 block) behind it."""
    requests = make_requests([0.0, 0.1, 0.2], [21, 17, 1], [3, 1, 1])
    _, finished = run_pool(constant(make_step_time), requests, n_blocks=10)
    assert [r.decode_start_s for r in requests] == [0.0, 3.0, 3.0]
    assert [r.index for r in finished] == [0, 1, 2]


def test_blocks_are_reserved_before_the_transfer(make_step_time):
    requests = make_requests([0.0], [9], [4])
    held = set()
    run_pool(
        constant(make_step_time), requests, latency_s=2.5, n_blocks=10,
        watch=lambda pool: held.add((pool.env.now, 10 - int(pool.state["free_blocks"][0]))),
    )  # fmt: skip
    # 3 blocks while the transfer flies, and still at 12 tokens; all free at the end.
    assert held == {(0.0, 0), (0.0, 3), (2.5, 3), (6.5, 0)}


def test_preemption_by_hand(make_step_time):
    """Blocks of 4 tokens, 4 blocks, prompts of 4 (context 3 when they join) and 6 outputs.

    Both grow to 2 blocks in their second step and want a third in their sixth. Request 1, which
    joined last, gives way at 5: 5 of its tokens are out. Request 0 ends at 6, and request 1
    recomputes 3 + 5 tokens, 0.5 s each, in the step that decodes its last token.
    """
    requests = make_requests([0.0, 0.0], [4, 4], [6, 6])
    pool, _ = run_pool(constant(make_step_time), requests, n_blocks=4)
    assert [r.preemptions for r in requests] == [0, 1]
    assert pool.steps()["batch"].tolist() == [2, 2, 2, 2, 2, 1, 1]
    assert pool.steps()["chunked"].tolist() == [0, 0, 0, 0, 0, 0, 8]
    assert pool.steps()["joined"].tolist() == [2, 0, 0, 0, 0, 0, 1]
    assert [r.finish_s for r in requests] == [6.0, 6.0 + 1.0 + 4.0]
    assert pool.preempted_gaps == [(5.0, 11.0)]  # from its fifth token at 5 to its sixth at 11


def test_recomputation_is_chunked_to_the_token_budget(make_step_time):
    """As above with 4 tokens a step: chunks of 4, 4 and 0 beside the token that is decoded."""
    requests = make_requests([0.0, 0.0], [4, 4], [6, 6])
    pool, _ = run_pool(constant(make_step_time), requests, n_blocks=4, budget=4)
    assert pool.steps()["chunked"].tolist() == [0, 0, 0, 0, 0, 0, 4, 4, 0]
    assert pool.steps()["batch"].tolist() == [2, 2, 2, 2, 2, 1, 0, 0, 1]
    assert requests[1].finish_s == 6.0 + 2.0 + 2.0 + 1.0


def test_blocks_of_the_next_step_are_not_given_away(make_step_time):
    """Request 0 wants its last block at 2, when request 1 could have had it."""
    requests = make_requests([0.0, 0.5], [7, 3], [4, 1])
    _, finished = run_pool(constant(make_step_time), requests, n_blocks=3)
    assert [r.preemptions for r in requests] == [0, 0]
    assert [r.index for r in finished] == [1, 0]
    requests = make_requests([0.0, 1.5], [7, 3], [4, 1])
    _, finished = run_pool(constant(make_step_time), requests, n_blocks=3)
    assert [r.preemptions for r in requests] == [0, 0]
    assert [r.index for r in finished] == [0, 1]


# -- nothing gets stuck ------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 30),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 64),
    block_size=st.sampled_from([1, 2, 16]),
    slack=st.integers(0, 6),
    latency_s=st.sampled_from([0.0, 1e-3, 0.5]),
    burst=st.booleans(),
)
def test_tiny_caches_end_and_give_every_block_back(
    make_step_time, seed, n, max_num_seqs, budget, block_size, slack, latency_s, burst
):
    """Equal arrivals, free transfers, caches that hold hardly more than the largest request."""
    rng = np.random.default_rng(seed)
    arrival = np.zeros(n) if burst else np.round(np.cumsum(rng.exponential(0.01, n)), 2)
    requests = make_requests(arrival, rng.integers(1, 40, n), rng.integers(1, 60, n))
    n_blocks = slack + max(-(-(r.prompt_len + r.output_len) // block_size) for r in requests)

    def watch(pool):
        (state,) = pool.state
        worker = pool.workers[0]
        held = sum(r.decode_blocks for r, _ in worker._recompute)
        held += sum(r.decode_blocks for r in worker.arrived)
        assert 0 <= state["free_blocks"] <= n_blocks - held
        assert state["batch"] + len(worker._recompute) <= max_num_seqs

    pool, _ = run_pool(
        make_step_time(max_num_seqs, seed=seed), requests, latency_s=latency_s,
        max_num_seqs=max_num_seqs, budget=budget, block_size=block_size, n_blocks=n_blocks,
        watch=watch,
    )  # fmt: skip
    steps = pool.steps()
    assert steps["batch"].sum() == sum(r.output_len for r in requests)
    assert (steps["start"][1:] >= steps["end"][:-1]).all()  # one step at a time
    assert (steps["batch"] + steps["chunked"] <= budget).all()
    assert (pool.token_times["first"] > 0).all()


def test_a_cluster_with_a_tiny_cache_ends(make_cluster, make_workload, run_to_rest):
    rng = np.random.default_rng(5)
    workload = make_workload(
        np.zeros(120), rng.integers(1, 50, 120), rng.integers(1, 60, 120), seed=5
    )
    cluster = make_cluster(workload, n_prefill=2, n_decode=2, n_blocks=28, max_num_seqs=16)
    record = run_to_rest(cluster)
    assert {r.outcome for r in record.requests} == {COMPLETED}
    assert sum(r.preemptions for r in record.requests) > 20
    assert cluster.pool.state["free_blocks"].tolist() == [28, 28]
    assert [worker.free_blocks for worker in cluster.prefill_workers] == [28, 28]
