"""MoE-Prefill's router, before engines small enough to check by eye."""

from collections import OrderedDict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.flops import PrefillWork
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RequestInfo, RouterPolicy, Workers

BLOCK = 16
WORK = PrefillWork(
    token_flops=1000.0, pair_flops=2.0, saturation_eq1=4e5, saturation_eq3=2e5
)  # a prompt of 1,000 tokens is half attention


HASHES: dict[tuple, int] = {}


def router(n_workers, choice="saturation", work=WORK):
    context = PolicyContext(
        n_workers,
        np.random.default_rng(0),
        prefix_block_tokens=BLOCK,
        prefill_work=None if work is None else lambda: work,
    )
    return registry.prefill_policy(choice, context)


def prompt(number, length, *path):
    """A request whose prompt begins by ``path``, (name, blocks) pairs, and goes on alone."""
    names = [(name, i) for name, blocks in path for i in range(blocks)]
    names += [(number, i) for i in range(-(-length // BLOCK))]
    hashes, before = [], ()
    for name in names[: -(-length // BLOCK)]:
        before = (*before, name)
        hashes.append(HASHES.setdefault(before, len(HASHES)))
    return RequestInfo(number, length, 0, prefix_hash=tuple(hashes))


class Engine:
    """Computes its requests one after the other, ``budget`` tokens a step, and caches LRU."""

    def __init__(self, budget, capacity):
        self.budget, self.capacity = budget, capacity
        self.cache, self.waiting, self.done, self.computed = OrderedDict(), deque(), 0, 0

    def step(self):
        """Return the blocks stored and evicted, the tokens computed, and the requests ended."""
        before, touched, ended, left = set(self.cache), set(), [], self.budget
        while left and self.waiting:
            request = self.waiting[0]
            full = request.prefix_hash[: request.prompt_len // BLOCK]
            if self.done == 0:
                usable = full[: (request.prompt_len - 1) // BLOCK]
                found = next((i for i, b in enumerate(usable) if b not in self.cache), len(usable))
                self.done = found * BLOCK
            new = min(left, request.prompt_len - self.done)
            self.done, left, self.computed = self.done + new, left - new, self.computed + new
            for block in reversed(full[: self.done // BLOCK]):
                touched.add(block)
                self.cache[block] = None
                self.cache.move_to_end(block)
            while len(self.cache) > self.capacity:
                self.cache.popitem(last=False)
            if self.done == request.prompt_len:
                ended.append(self.waiting.popleft())
                self.done = 0
        gone = (before | touched) - set(self.cache)
        return sorted(touched - before), sorted(gone), self.budget - left, ended


def serve(policy, requests, engines, turns, check=lambda *_: None):
    """Drive the engines until all requests have ended; returns who served them, by number.

    ``turns`` says which busy engine steps next; ``check(policy, engines, loads)`` looks on.
    """
    queue, loads, served = deque(requests), np.zeros(len(engines), np.int64), {}
    while queue or loads.any():
        while queue:
            chosen = policy.select(queue[0], Workers.idle(loads))
            check(policy, engines, loads, queue[0], chosen)
            if chosen is None:
                break
            request = queue.popleft()
            engines[chosen].waiting.append(request)
            loads[chosen] += 1
            served[request.request_id] = chosen
        busy = np.flatnonzero(loads)
        assert len(busy), "the router holds while all engines are idle"
        g = int(busy[next(turns) % len(busy)])
        stored, evicted, tokens, ended = engines[g].step()
        policy.on_blocks(g, stored, evicted)
        policy.on_tokens(g, tokens)
        loads[g] -= len(ended)
    return served


def forever(*turns):
    while True:
        yield from turns


@st.composite
def workloads(draw):
    """Requests with prefixes of a two-level tree."""
    requests = []
    for number in range(draw(st.integers(1, 25))):
        path = []
        if draw(st.booleans()):
            path.append((f"header {draw(st.integers(0, 2))}", draw(st.integers(1, 4))))
            if draw(st.booleans()):
                path.append((f"document {draw(st.integers(0, 2))}", draw(st.integers(1, 20))))
        requests.append(prompt(number, draw(st.integers(1, 700)), *path))
    return requests


turn_lists = st.lists(st.integers(0, 3), min_size=1, max_size=9)
units = st.sampled_from(["flops", "tokens"])


def flops(request, unit, cached=0):
    work = WORK if unit == "flops" else WORK._replace(pair_flops=0.0)
    return work.flops(request.prompt_len - cached, cached)


@given(workloads(), turn_lists, units, st.sampled_from([0.0, 1.0, 3e4, 3e5]), st.integers(1, 4))
def test_load_ends_between_the_threshold_and_one_request_more(
    requests, turns, unit, threshold, n_workers
):
    """Every request is served, in order; a held one finds every worker saturated or busy; and
    nothing is left of the load at the end."""
    most = max(flops(request, unit) for request in requests)
    order = []

    def check(policy, engines, loads, request, chosen):
        assert all(load < threshold + most + 1e-6 for load in policy.load)
        if chosen is None:
            assert all(load >= threshold for load in policy.load)
            assert loads.all()
        else:
            order.append(request.request_id)

    policy = router(n_workers, f"saturation:threshold={threshold},unit={unit}")
    engines = [Engine(budget=64, capacity=10_000) for _ in range(n_workers)]
    served = serve(policy, requests, engines, forever(*turns), check)
    assert order == [request.request_id for request in requests]
    assert len(served) == len(requests)
    assert policy.load == [0.0] * n_workers
    assert policy._pending == {}


@given(workloads(), turn_lists, units)
def test_predicted_tokens_are_those_computed(requests, turns, unit):
    """Where nothing is evicted: what the router adds is what the engines work, request by request,
    and its tables are what they hold."""
    added = [0.0, 0.0]

    def check(policy, engines, loads, request, chosen):
        for g, engine in enumerate(engines):
            held = {block for block, mask in policy._committed.items() if mask >> g & 1}
            assert held == set(engine.cache)
        if chosen is not None:
            added[chosen] += policy._queues[chosen][-1].end - policy._queues[chosen][-1].done

    policy = router(2, f"saturation:threshold=1e5,unit={unit}")
    engines = [Engine(budget=100, capacity=10_000) for _ in range(2)]
    serve(policy, requests, engines, forever(*turns), check)
    assert added == [engine.computed for engine in engines]


@settings(max_examples=40)
@given(workloads(), turn_lists, st.integers(0, 40))
def test_evictions_cost_no_request_its_turn(requests, turns, capacity):
    """Small caches make the prediction wrong; the tables stay right and everyone is served."""

    def check(policy, engines, loads, request, chosen):
        for g, engine in enumerate(engines):
            held = {block for block, mask in policy._committed.items() if mask >> g & 1}
            assert held == set(engine.cache)
        assert min(policy.load) >= 0

    policy = router(2, "saturation:threshold=1e5")
    engines = [Engine(budget=100, capacity=capacity) for _ in range(2)]
    assert len(serve(policy, requests, engines, forever(*turns), check)) == len(requests)
    policy.select(prompt(999, 5), Workers.idle([0, 0]))
    assert sorted(policy.load) == [0.0, WORK.flops(5)]


@pytest.mark.parametrize("unit", ["flops", "tokens"])
def test_ten_siblings_cost_one_prefix_and_ten_suffixes(unit):
    """Sec. 7.3, while nothing has been computed yet."""
    policy = router(3, f"saturation:threshold=1e9,unit={unit}")
    siblings = [prompt(n, 640 + 48, ("user", 40)) for n in range(10)]
    loads = np.zeros(3, np.int64)
    for request in siblings:
        chosen = policy.select(request, Workers.idle(loads))
        assert chosen == 0
        loads[chosen] += 1
    work = WORK if unit == "flops" else WORK._replace(pair_flops=0.0)
    assert policy.load[0] == pytest.approx(work.flops(640) + 10 * work.flops(48, 640), rel=1e-14)
    assert policy.load[1:] == [0.0, 0.0]


def test_the_last_token_of_a_prompt_is_always_computed():
    """As engines do: a prompt that is cached as a whole computes its last block."""
    policy, engine = router(1, "saturation:threshold=1e9"), Engine(budget=1000, capacity=1000)
    twice = [prompt(0, 160, ("all", 10)), prompt(1, 160, ("all", 10))]
    for number, request in enumerate(twice):
        policy.select(request, Workers.idle([number]))
    assert policy.load == [WORK.flops(160) + WORK.flops(16, 144)]
    serve(router(1), twice, [engine], forever(0))
    assert engine.computed == 160 + 16


@given(st.lists(st.integers(1, 900), max_size=30), st.integers(1, 5))
def test_without_prefixes_the_least_loaded_worker_is_chosen(lengths, n_workers):
    policy = router(n_workers, "saturation:threshold=1e12")
    expected, loads = np.zeros(n_workers), np.zeros(n_workers, np.int64)
    for number, length in enumerate(lengths):
        request = RequestInfo(number, length, 0)
        chosen = policy.select(request, Workers.idle(loads))
        assert chosen == expected.argmin()
        expected[chosen] += WORK.flops(length)
        loads[chosen] += 1


def test_the_longest_prefix_counts_and_not_the_load():
    policy = router(3, "saturation:threshold=1e12")
    policy.on_blocks(1, prompt(0, 160, ("a", 10)).prefix_hash, [])
    policy.on_blocks(2, prompt(0, 96, ("a", 10)).prefix_hash, [])
    busy = Workers.idle([0, 7, 2])
    request = prompt(1, 400, ("a", 10))
    assert policy.matches(request) == [0, 10, 6]
    assert policy.select(request, busy) == 1
    assert policy.select(request, busy._replace(healthy=np.array([True, False, True]))) == 2
    policy.on_blocks(1, [], request.prefix_hash[4:5])  # a hole ends the prefix
    assert policy.matches(prompt(2, 400, ("a", 10)))[1] == 4


def test_a_popular_prefix_spills_to_the_next_worker():
    """Sec. 7.4: saturation, not a rule for copies, spreads it."""
    policy = router(2, "saturation:threshold=4e5")
    loads = np.zeros(2, np.int64)
    chosen = []
    for number in range(12):
        worker = policy.select(prompt(number, 180, ("user", 8)), Workers.idle(loads))
        chosen.append(worker)
        if worker is not None:
            loads[worker] += 1
    assert chosen == sorted(chosen, key=lambda g: (g is None, g))
    assert set(chosen) == {0, 1, None}


def test_an_idle_worker_takes_a_request_whatever_the_threshold():
    """No transfers, no threshold (T_EP = 0): one request at a time, not none."""
    policy = router(2, work=PrefillWork(1000.0, 2.0))
    assert policy.threshold == 0.0
    assert policy.select(prompt(0, 100), Workers.idle([0, 0])) == 0
    assert policy.select(prompt(1, 100), Workers.idle([1, 0])) == 1
    assert policy.select(prompt(2, 100), Workers.idle([1, 1])) is None


def test_thresholds_and_their_margin():
    assert router(1).threshold == pytest.approx(1.1 * 2e5)
    assert router(1, "saturation:threshold=eq1,margin=0.5").threshold == pytest.approx(6e5)
    assert router(1, "saturation:threshold=7e5,margin=0.5").threshold == 7e5
    one_constant = router(1, "saturation:unit=tokens,threshold=1e6")
    true = router(1, "saturation:threshold=1e6")
    for policy in (one_constant, true):
        policy.select(prompt(0, 1000), Workers.idle([0]))
    assert one_constant.load == [1e6]
    assert true.load == [1e6 + 2.0 * 1000 * 1001 / 2]


def test_protocols_and_what_is_refused():
    policy = router(1)
    assert isinstance(policy, RouterPolicy)
    assert policy.needs.blocks
    assert policy.needs.in_order
    with pytest.raises(InputError, match="work of prompts"):
        router(1, work=None)
    for choice in ("margin=-1", "unit=seconds", "threshold=eq2", "threshold=nan"):
        with pytest.raises(InputError, match=r"prefill_policy\."):
            router(1, f"saturation:{choice}")


def test_a_worker_that_has_reached_the_threshold_is_full():
    policy = router(1, "saturation:threshold=1")
    assert policy.select(prompt(0, 64), Workers.idle(np.zeros(1))) == 0
    policy.threshold = policy.load[0]
    assert policy.select(prompt(1, 64), Workers.idle(np.ones(1))) is None
    policy.threshold = np.nextafter(policy.load[0], np.inf)
    assert policy.select(prompt(1, 64), Workers.idle(np.ones(1))) == 0


def test_a_chunk_takes_its_own_work_from_the_load():
    """Later tokens of a prompt attend to more: what is left is the work of those that are left."""
    policy = router(1)
    policy.select(prompt(0, 1000), Workers.idle([0]))
    for done in (400, 700, 999):
        policy.on_tokens(0, done - policy._queues[0][0].done)
        assert policy.load[0] == pytest.approx(WORK.flops(1000 - done, done))
    policy.on_tokens(0, 1)
    assert policy.load == [0.0]


def test_what_an_idle_worker_never_computed_is_no_longer_promised():
    policy = router(2, "saturation:threshold=1e9")
    lost = prompt(0, 160, ("lost", 10))
    worker = policy.select(lost, Workers.idle([0, 0]))
    assert policy.matches(lost)[worker] == 10
    policy.select(prompt(1, 160), Workers.idle([0, 0]))
    assert policy.matches(lost) == [0, 0]
