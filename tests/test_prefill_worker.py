"""Chunked prefill: budget, order and KV blocks, by hand and against a loop over steps."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator.clock import Clock
from eldr_sim.simulator.prefill import PrefillWorker
from eldr_sim.simulator.request import Request


def run_worker(
    step_time, arrival_s, prompt_len, *, budget=64, max_num_seqs=8, block_size=4, n_blocks=1000,
    pull_s=0.0,
):  # fmt: skip
    """Run prompts through one worker; each cache is pulled ``pull_s`` after its prefill.

    Returns the worker, its requests, the order in which they ended and every call of
    ``prefill_s``.
    """
    env, done, calls = Clock(), [], []
    requests = [
        Request(i, float(at), int(prompt), 1, 0, 0, 0, 1, 0, True)
        for i, (at, prompt) in enumerate(zip(arrival_s, prompt_len, strict=True))
    ]

    class Recorder:
        def prefill_s(self, tokens, contexts):
            calls.append((env.now, tuple(tokens), tuple(contexts)))
            return step_time.prefill_s(tokens, contexts)

    def prefilled(request):
        done.append(request)
        env.at(env.now + pull_s, lambda _: worker.release(request))

    worker = PrefillWorker(
        env,
        3,
        step_time=Recorder(),
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        n_blocks=n_blocks,
        on_prefilled=prefilled,
    )
    for request in requests:
        env.at(request.arrival_s, lambda _, r=request: worker.enqueue(r))
    for _ in range(20 * sum(prompt_len) + 100):
        if env.peek() == np.inf:
            break
        env.step()
        assert 0 <= worker.free_blocks <= n_blocks
        assert len(worker.running) <= max_num_seqs
    else:
        raise AssertionError(f"no end: {len(done)} of {len(requests)}")
    assert sorted(r.index for r in done) == list(range(len(requests)))
    assert worker.free_blocks == n_blocks
    return worker, requests, [r.index for r in done], calls


def a_second_a_step(make_step_time):
    return make_step_time(prefill_s=lambda tokens, contexts: 1.0)


def test_chunks_fill_the_budget_and_begun_prompts_go_first(make_step_time):
    worker, requests, order, calls = run_worker(
        a_second_a_step(make_step_time), [0.0, 0.0, 0.5], [5, 17, 4], budget=10
    )
    # Request 1 begins beside 0, fills a step alone, and leaves room for all of 2 at its end.
    assert calls == [
        (0.0, (5, 5), (0, 0)),
        (1.0, (10,), (5,)),
        (2.0, (2, 4), (15, 0)),
    ]
    assert order == [0, 1, 2]
    assert [r.prefill_start_s for r in requests] == [0.0, 0.0, 2.0]
    assert [r.prefill_end_s for r in requests] == [1.0, 3.0, 3.0]
    assert worker.steps == [(0.0, 1.0, 2, 10), (1.0, 2.0, 1, 10), (2.0, 3.0, 2, 6)]
    assert {r.prefill_worker for r in requests} == {3}


def test_seats_bound_the_prompts_of_a_step(make_step_time):
    _, _, order, calls = run_worker(
        a_second_a_step(make_step_time), [0.0] * 5, [2] * 5, max_num_seqs=2
    )
    assert [tokens for _, tokens, _ in calls] == [(2, 2), (2, 2), (2,)]
    assert order == [0, 1, 2, 3, 4]


def test_a_prompt_without_blocks_waits_and_nobody_overtakes_it(make_step_time):
    """Blocks of 4, 5 blocks: request 0 holds 3 until pulled at 3.5, so 1 (3 blocks) waits."""
    _, requests, order, calls = run_worker(
        a_second_a_step(make_step_time), [0.0, 0.1, 0.2], [9, 12, 1], n_blocks=5, pull_s=2.5
    )
    assert calls == [(0.0, (9,), (0,)), (3.5, (12, 1), (0, 0))]
    assert order == [0, 1, 2]
    assert [r.prefill_start_s for r in requests] == [0.0, 3.5, 3.5]


def test_an_idle_worker_starts_at_once_and_a_busy_one_at_its_next_step(make_step_time):
    _, requests, _, _ = run_worker(a_second_a_step(make_step_time), [0.25, 0.5, 7.0], [4, 4, 4])
    assert [r.prefill_start_s for r in requests] == [0.25, 1.25, 7.0]


def slow_prefill(step_time, arrival_s, prompt_len, budget, max_num_seqs, block_size, blocks, pull):
    """Do what a prefill engine does, as one loop over steps; return the calls and ends."""
    coming = deque(sorted(range(len(arrival_s)), key=lambda i: arrival_s[i]))
    left, ends, begun = dict(enumerate(prompt_len)), {}, []
    waiting, pulls, now, calls = deque(), [], 0.0, []

    def size(i):
        return -(-prompt_len[i] // block_size)

    while len(ends) < len(arrival_s):
        while coming and arrival_s[coming[0]] <= now:
            waiting.append(coming.popleft())
        blocks += sum(size(i) for at, i in pulls if at <= now)
        pulls = [(at, i) for at, i in pulls if at > now]
        rest = budget
        step = []
        for i in [i for i in begun if i not in ends]:
            n = min(rest, left[i])
            step += [(i, n)] if n else []
            rest -= n
        seats = max_num_seqs - sum(i not in ends for i in begun)
        while waiting and rest > 0 and seats > 0 and size(waiting[0]) <= blocks:
            i = waiting.popleft()
            begun.append(i)
            seats -= 1
            blocks -= size(i)
            step.append((i, min(rest, left[i])))
            rest -= step[-1][1]
        if not step:
            now = min([arrival_s[i] for i in coming] + [at for at, _ in pulls])
            continue
        tokens = tuple(n for _, n in step)
        contexts = tuple(prompt_len[i] - left[i] for i, _ in step)
        calls.append((now, tokens, contexts))
        now += step_time.prefill_s(tokens, contexts)
        for i, n in step:
            left[i] -= n
            if left[i] == 0:
                ends[i] = now
                pulls.append((now + pull, i))
    return calls, ends


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 20),
    budget=st.integers(1, 50),
    max_num_seqs=st.integers(1, 5),
    block_size=st.sampled_from([1, 4, 16]),
    slack=st.integers(0, 30),
    pull_s=st.floats(1e-4, 0.05),
)
def test_worker_equals_a_loop_over_steps(
    make_step_time, seed, n, budget, max_num_seqs, block_size, slack, pull_s
):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.003, n)).tolist()
    prompts = rng.integers(1, 60, n).tolist()
    n_blocks = slack + max(-(-p // block_size) for p in prompts)
    step_time = make_step_time()
    _, requests, _, calls = run_worker(
        step_time, arrival, prompts, budget=budget, max_num_seqs=max_num_seqs,
        block_size=block_size, n_blocks=n_blocks, pull_s=pull_s,
    )  # fmt: skip
    expected, ends = slow_prefill(
        step_time, arrival, prompts, budget, max_num_seqs, block_size, n_blocks, pull_s
    )
    assert [call[1:] for call in calls] == [call[1:] for call in expected]
    np.testing.assert_allclose([c[0] for c in calls], [c[0] for c in expected], rtol=1e-12)
    np.testing.assert_allclose(
        [r.prefill_end_s for r in requests], [ends[i] for i in range(n)], rtol=1e-12
    )
    assert all(sum(tokens) <= budget for _, tokens, _ in calls)
    assert sum(sum(tokens) for _, tokens, _ in calls) == sum(prompts)  # each token once
