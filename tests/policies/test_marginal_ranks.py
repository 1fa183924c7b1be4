"""`marginal_cost` on experts of several GPUs, against a plain numpy reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_cost import rank_moe_s
from eldr_sim.policies.base import RequestInfo, Workers
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.routing.marginal_cost import OraclePolicy
from eldr_sim.policies.routing.marginal_ranks import GreedyOnRanks, shares
from eldr_sim.policies.routing.unions import log_idle, on_grid

from .test_marginal_cost import MODEL_LAYERS, N_EXPERTS, SEATS, context, make_step_times

TRACE_LAYERS = 2


def random_placement(rng, n_ranks, redundant):
    """Every expert once, and some again on other ranks; ranks hold unequally many."""
    expert = np.tile(np.r_[np.arange(N_EXPERTS), rng.integers(N_EXPERTS, size=redundant)], (2, 1))
    rank = rng.integers(n_ranks, size=expert.shape)
    return Placement(expert, rank, n_ranks)


def rank_times(seed):
    r = np.random.default_rng(seed)
    table = (1e-4 * r.random((9, N_EXPERTS + 1))).cumsum(0).cumsum(1)
    return RankMoE(2, np.arange(9.0), table, table)


def reference_step_s(times, moe, placement, here, size):
    """Step time of a group from all (activation, prompt) on each of its engines."""
    loads = [len(own) for own in here]
    everyone = [activation for own in here for activation, _ in own]
    if not everyone:
        return 0.0
    batch = min(max(loads), SEATS)
    activated = 1 - np.prod([1 - a for a in everyone], axis=0)
    tokens = np.sum(everyone, axis=0) * min(1.0, SEATS * size / len(everyone))
    moe_s = 0.0
    for layer in range(MODEL_LAYERS):
        at = layer % TRACE_LAYERS
        experts, ranks = placement.expert[at], placement.rank[at]
        part = 1 / np.bincount(experts, minlength=N_EXPERTS)[experts]
        count = np.bincount(ranks, part * activated[layer][experts], placement.n_ranks)
        pairs = np.bincount(ranks, part * tokens[layer][experts], placement.n_ranks)
        if moe is None:
            columns = np.arange(times.moe_s.shape[1])
            moe_s += np.interp(count.max(), columns, times.moe_s[batch])
        else:
            moe_s += max(
                rank_moe_s(moe, p, c, False) if p > 0 else 0.0
                for p, c in zip(pairs, count, strict=True)
            )
    knots = times.context_stride * np.arange(times.attention_s.shape[1])
    attention = max(
        np.interp(
            sum(prompt for _, prompt in own) / len(own), knots, times.attention_s[min(n, SEATS)]
        )
        for own, n in zip(here, loads, strict=True)
        if n
    )
    fixed = times.dense_s[batch] + times.collectives_s[batch] + times.head_s[batch] + times.host_s
    return (fixed + attention + moe_s) * max(1.0, max(loads) / SEATS)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_groups=st.integers(1, 3),
    size=st.integers(1, 3),
    n_ranks=st.integers(1, 4),
    redundant=st.sampled_from([0, 3]),
)
def test_decisions_are_those_of_a_plain_reference(seed, n_groups, size, n_ranks, redundant):
    r = np.random.default_rng(seed)
    times, n, n_workers = make_step_times(seed), 25, n_groups * size
    moe = rank_times(seed) if size > 1 else None
    placements = [random_placement(r, n_ranks, redundant) for _ in range(n_groups)]
    truth = on_grid(r.beta(0.3, 1.0, (n, MODEL_LAYERS, N_EXPERTS)))
    policy = OraclePolicy(
        context(
            n_workers,
            step_times=times,
            future=lambda request: truth[request],
            rank_moe=moe,
            placements=lambda: placements,
            group_size=size,
        )
    )
    here = [{} for _ in range(n_workers)]
    for request in range(n):
        prompt = int(r.integers(1, 250))
        loads = np.array([len(own) for own in here])
        growths = []
        for w in range(n_workers):
            g = w // size
            own = [list(here[v].values()) for v in range(g * size, (g + 1) * size)]
            more = [list(x) for x in own]
            more[w - g * size].append((truth[request], prompt))
            before, then = (
                sum(map(len, x)) * reference_step_s(times, moe, placements[g], x, size) ** 2
                for x in (own, more)
            )
            growths.append(then - before)
        chosen = policy.select(RequestInfo(request, prompt, 0), Workers.idle(loads))
        np.testing.assert_allclose(policy._greedy._books.growth, growths, rtol=1e-4, atol=1e-11)
        assert growths[chosen] <= min(growths) + 1e-4 * abs(min(growths)) + 2e-12
        here[chosen][request] = truth[request], prompt
        for w in range(n_workers):
            for gone in [x for x in here[w] if r.random() < 0.15]:
                del here[w][gone]
                policy.on_complete(gone, w)
    for w in range(n_workers):
        for gone in here[w]:
            policy.on_complete(gone, w)
    books = policy._greedy._books
    assert not books.used.any()
    assert not books.prompt_tokens.any()
    assert (books.unions[1] == 1.0).all()


def test_one_rank_decides_as_a_plain_worker():
    times, r = make_step_times(3), np.random.default_rng(3)
    one = Placement.of_ranks(np.zeros((TRACE_LAYERS, N_EXPERTS), int), 1)
    truth = r.beta(0.3, 1.0, (60, MODEL_LAYERS, N_EXPERTS))
    plain, ranked = (
        OraclePolicy(
            context(4, step_times=times, future=lambda request: truth[request], placements=where)
        )
        for where in (None, lambda: [one] * 4)
    )
    assert isinstance(ranked._greedy, GreedyOnRanks)
    loads, live = np.zeros(4, np.int64), []
    for request in range(60):
        info = RequestInfo(request, int(r.integers(1, 250)), 0)
        chosen = plain.select(info, Workers.idle(loads))
        assert ranked.select(info, Workers.idle(loads)) == chosen
        loads[chosen] += 1
        live.append((request, chosen))
        if len(live) > 20:
            gone, worker = live.pop(int(r.integers(20)))
            loads[worker] -= 1
            plain.on_complete(gone, worker)
            ranked.on_complete(gone, worker)


def test_the_busiest_rank_decides_not_the_union():
    """Two workers with unions of one size: the request goes where its expert's rank is idle."""
    activation = np.zeros((2, 1, N_EXPERTS))
    activation[0, 0, :2] = 0.99  # the first rank's experts
    activation[1, 0, [0, 7]] = 0.99
    places = Placement.of_ranks(np.arange(N_EXPERTS)[None] // 2, 4)
    times = make_step_times()._replace(n_moe_layers=1)
    greedy = GreedyOnRanks(times, None, [places, places], 2, 1)
    loads = np.zeros(2, np.int64)
    for request, own in enumerate(activation):  # one on each worker
        usage = on_grid(own), log_idle(on_grid(own))
        healthy = np.arange(2) == request
        seen = Workers.idle(loads)._replace(healthy=healthy)
        assert greedy.place(RequestInfo(request, 10, 0), usage, seen) == request
        loads[request] += 1
    third = np.zeros((1, N_EXPERTS))
    third[0, 6] = (
        0.99  # beside expert 7: the second worker's busiest rank, an idle one of the first
    )
    usage = on_grid(third), log_idle(on_grid(third))
    assert greedy.place(RequestInfo(2, 10, 0), usage, Workers.idle(loads)) == 0


def test_shares_of_an_expert_add_up():
    r = np.random.default_rng(1)
    placements = [random_placement(r, 3, 4) for _ in range(2)]
    found = shares(placements, N_EXPERTS)
    for g, layer in np.ndindex(2, TRACE_LAYERS):
        total = np.bincount(found.expert[g, layer].ravel(), found.part[g, layer].ravel(), N_EXPERTS)
        assert total == pytest.approx(np.ones(N_EXPERTS))


def lock_step_s(times, moe, placement, waiting):
    """Seconds of prompts, a step after the other: the slowest engine's, and even experts."""
    budget = len(times.dense_s) - 1
    left, seconds = list(waiting), 0.0
    while any(left):
        chunks = [min(budget, tokens) for tokens in left]
        left = [tokens - chunk for tokens, chunk in zip(left, chunks, strict=True)]
        own = [times.dense_s[c] + times.collectives_s[c] + times.prompt_share_s[c] for c in chunks]
        seconds += max(t for t, c in zip(own, chunks, strict=True) if c)
    if any(waiting):
        pairs = sum(waiting) * moe.top_k / placement.n_ranks
        seconds += MODEL_LAYERS * rank_moe_s(moe, pairs, N_EXPERTS, True)
    return seconds


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_groups=st.integers(1, 3),
    size=st.integers(2, 3),
    fresh=st.booleans(),
)
def test_co_located_engines_are_those_whose_group_steps_grow_least(seed, n_groups, size, fresh):
    """Every engine tried, prompts computed step by step; signals are old, or as of now."""
    r = np.random.default_rng(seed)
    times, n_workers, moe = make_step_times(seed), n_groups * size, rank_times(seed)
    times = times._replace(prompt_share_s=np.cumsum(1e-4 * r.random(SEATS + 1)))
    placements = [random_placement(r, 2, 0) for _ in range(n_groups)]
    truth = on_grid(r.beta(0.3, 1.0, (MODEL_LAYERS, N_EXPERTS)))
    policy = OraclePolicy(
        context(
            n_workers, step_times=times, future=lambda _: truth, rank_moe=moe,
            placements=lambda: placements, group_size=size, computes_prompts=True,
        )
    )  # fmt: skip
    here = [[] for _ in range(n_workers)]
    waiting = r.integers(0, 40, n_workers)
    for request in range(15):
        prompt, loads = int(r.integers(1, 60)), np.array([len(own) for own in here])
        if fresh or request % 5 == 0:  # else what has been sent is added to what was published
            waiting = r.integers(0, 40, n_workers)
            seen = Workers.idle(loads)._replace(
                waiting_tokens=waiting.copy(), signals_s=float(request)
            )
        growths = []
        for w in range(n_workers):
            g = w // size
            of_group = range(g * size, (g + 1) * size)
            steps = []
            for more in (0, 1):
                own = [here[v] + [(truth, prompt)] * (more and v == w) for v in of_group]
                prompts = [int(waiting[v]) + prompt * (more and v == w) for v in of_group]
                step = reference_step_s(times, moe, placements[g], own, size)
                step += lock_step_s(times, moe, placements[g], prompts)
                steps.append(sum(map(len, own)) * step**2)
            growths.append(steps[1] - steps[0])
        chosen = policy.select(RequestInfo(request, prompt, 0), seen._replace(loads=loads))
        np.testing.assert_allclose(policy._greedy._books.growth, growths, rtol=1e-4, atol=1e-11)
        assert growths[chosen] <= min(growths) + 1e-4 * abs(min(growths)) + 2e-12
        here[chosen].append((truth, prompt))
        waiting[chosen] += prompt


def test_a_prompt_goes_where_the_group_has_time_to_spare():
    """The engine that waits for the other one computes it for nothing; decode batches are equal."""
    times, moe = make_step_times(1), rank_times(1)
    greedy = GreedyOnRanks(times, moe, [random_placement(np.random.default_rng(1), 2, 0)], 2, 1,
                           computes_prompts=True)  # fmt: skip
    usage = (np.zeros((1, N_EXPERTS)), log_idle(np.zeros((1, N_EXPERTS))))
    for busy in (0, 1):
        waiting = np.zeros(2, np.int64)
        waiting[busy] = 30
        seen = Workers.idle(np.array([3, 3]))._replace(
            waiting_tokens=waiting, signals_s=float(busy)
        )
        assert greedy.place(RequestInfo(busy, 12, 0), usage, seen) == 1 - busy
