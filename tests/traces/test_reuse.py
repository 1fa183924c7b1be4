"""Prefix reuse against caches that forget the least recently used, simulated block by block."""

import json
from collections import OrderedDict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.caches.eviction import hit_rates
from eldr_sim.traces.requests.caches.reuse import reuse_of
from eldr_sim.traces.requests.columns import Requests

from ..arc import Arc
from ..session_cache import SessionCache

SIZE = 4


def made_of(chains, lengths):
    n = len(chains)
    none = np.zeros(n, np.int32)
    return Requests(
        arrival_s=np.arange(n, dtype=float),
        prompt_len=np.array([prompt for prompt, _ in lengths], np.int32),
        output_len=np.array([output for _, output in lengths], np.int32),
        text=none, domain=none.astype(np.int16), session=none,
        prefix_hash=np.array([b for chain in chains for b in chain], np.uint64),
        prefix_indptr=np.cumsum([0, *map(len, chains)]),
        prefix_text=np.zeros(sum(map(len, chains)), np.int32),
        prefix_block_tokens=SIZE, description={}, answered=np.ones(n, bool),
    )  # fmt: skip


@st.composite
def sessions(draw):
    """Chains that are prefixes of a few long ones, of prompts and answers."""
    chains, lengths = [], []
    for _ in range(draw(st.integers(1, 25))):
        family, prompt = draw(st.integers(0, 3)), draw(st.integers(1, 30))
        output = draw(st.integers(1, 12))
        chain = [0] + [100 * family + j for j in range(1, (prompt + output - 1) // SIZE)]
        chains.append(chain[: (prompt + output - 1) // SIZE])
        lengths.append((prompt, output))
    return chains, lengths


def found_in(cache, chain, prompt):
    """Tokens of a prompt but for its last that a cache has, block by block from the first."""
    hits = 0
    for j, block in enumerate(chain):
        if block not in cache or (j + 1) * SIZE > prompt - 1:
            if block in cache:
                hits += prompt - 1 - j * SIZE if j * SIZE < prompt - 1 else 0
            break
        hits += SIZE
    return hits


@given(sessions(), st.integers(1, 20))
def test_hit_rates_are_those_of_lru_caches(drawn, capacity):
    chains, lengths = drawn
    requests = made_of(chains, lengths)
    cache, hits = OrderedDict(), 0
    for chain, (prompt, _) in zip(chains, lengths, strict=True):
        hits += found_in(cache, chain, prompt)
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    found = reuse_of(requests)
    assert found.hit_rate(capacity) * found.n_tokens == pytest.approx(hits)
    assert found.hit_rate(10**9) == pytest.approx(found.ideal_hit_rate)
    assert (np.diff([found.hit_rate(c) for c in range(8)]) >= 0).all()


class Best:
    """The most blocks that can be found, by trying every set that could be kept."""

    def __init__(self, chains, lengths, size):
        self.uses = [(chain, -(-prompt // SIZE)) for (prompt, _), chain in
                     zip(lengths, chains, strict=True)]  # fmt: skip
        self.size, self.known = size, {}

    def of(self, i=0, held=frozenset()):
        if i == len(self.uses):
            return 0
        if (i, held) not in self.known:
            chain, n = self.uses[i]
            run = next((k for k, b in enumerate(chain[:n]) if b not in held), len(chain[:n]))
            could = held | set(chain)
            kept = combinations(sorted(could), min(self.size, len(could)))
            self.known[i, held] = run + max(self.of(i + 1, frozenset(k)) for k in kept)
        return self.known[i, held]


@given(sessions(), st.integers(1, 20))
def test_caches_are_those_of_lists_and_nobody_beats_belady(drawn, capacity):
    chains, lengths = drawn
    requests, cache, hits = made_of(chains, lengths), Arc(capacity), 0
    for chain, (prompt, _) in zip(chains, lengths, strict=True):
        hits += found_in(cache, chain, prompt)
        for block in reversed(chain):
            cache.use(block)
    total = int(requests.prompt_len.sum())
    arc, by_session, best = hit_rates(requests, capacity)
    assert arc * total == pytest.approx(hits)
    assert by_session * total == pytest.approx(found_by_session(drawn, capacity)[0])
    lru = reuse_of(requests)
    assert best <= lru.ideal_hit_rate + 1e-12
    # In blocks that count alike: a prompt ends with the first token behind one.
    whole = [((p - 1) // SIZE * SIZE + 1, p + o - (p - 1) // SIZE * SIZE - 1) for p, o in lengths]
    requests = made_of(chains, whole)
    *others, best = hit_rates(requests, capacity)
    assert max(*others, reuse_of(requests).hit_rate(capacity)) <= best + 1e-12
    requests = made_of(chains, lengths)
    assert hit_rates(requests, 10**6) == pytest.approx((lru.ideal_hit_rate,) * 3)


def found_by_session(drawn, capacity):
    """Return the tokens that a cache finds which evicts by session, and the cache."""
    cache, hits = SessionCache(capacity), 0
    for chain, (prompt, _) in zip(*drawn, strict=True):
        hits += found_in(cache, chain, prompt)
        asked = chain[: -(-prompt // SIZE)]
        n = next((k for k, block in enumerate(asked) if block not in cache), len(asked))
        goes_on = cache.session_of(asked[n - 1]) if n else None
        cache.come(asked)
        cache.store(chain, 0, goes_on)
    return hits, cache


def test_sessions_fade_and_are_declined_and_go_on():
    """More than 500 requests come; the property above has no such."""
    rng, chains, lengths = np.random.default_rng(5), [], []
    for _ in range(1300):
        prompt, output = int(rng.integers(1, 60)), int(rng.integers(1, 30))
        family = int(rng.zipf(1.4)) % 90
        n = (prompt + output - 1) // SIZE
        chains.append([100 * family + j for j in range(n)])
        lengths.append((prompt, output))
    requests = made_of(chains, lengths)
    hits, cache = found_by_session((chains, lengths), 150)
    assert hit_rates(requests, 150)[1] * int(requests.prompt_len.sum()) == pytest.approx(hits)
    assert min(cache.declined, cache.evicted, len(cache.sessions)) > 5


@settings(max_examples=30)
@given(st.data())
def test_the_bound_is_the_most_that_any_choice_finds(data):
    n = data.draw(st.integers(1, 6))
    whole = [(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))) for _ in range(n)]
    chains = [[0, *(10 * family + j for j in range(1, depth))] for family, depth in whole]
    lengths = [(SIZE * depth + 1, 1) for _, depth in whole]  # whole blocks, all of prompts
    capacity = data.draw(st.integers(1, 3))
    requests = made_of(chains, lengths)
    *_, best = hit_rates(requests, capacity)
    tokens = best * int(requests.prompt_len.sum())
    assert tokens == pytest.approx(SIZE * Best(chains, lengths, capacity).of())


def test_the_common_part_is_that_of_all():
    requests = made_of([[0, 1, 2], [0, 1], [0, 1, 5]], [(12, 1), (9, 1), (12, 1)])
    found = reuse_of(requests, granule=SIZE)
    assert found.common_tokens == 3 * 2 * SIZE
    assert found.ideal.tolist() == [0, 8, 8]


def test_who_is_not_served_neither_finds_nor_leaves_anything():
    chains, lengths = [[0, 1], [0, 1, 2], [0, 1, 2], [9]], [(9, 1), (12, 1), (13, 1), (4, 1)]
    served = np.array([True, False, True, False])
    found = reuse_of(made_of(chains, lengths), SIZE, served)
    alone = reuse_of(made_of(chains[::2], lengths[::2]), SIZE)
    assert found.ideal[served].tolist() == alone.ideal.tolist() == [0, 8]
    assert (
        (found.n_tokens, found.common_tokens) == (alone.n_tokens, alone.common_tokens) == (22, 16)
    )


def test_an_endless_cache_finds_of_a_log_what_is_ideal(tmp_path):
    """One engine, one request after the other; a log's answers are in no block of its hashes."""
    log = tmp_path / "log.jsonl"
    turns = [(700, [1, 2]), (1024, [1, 2]), (1500, [1, 2, 3]), (1000, [1, 2]), (1030, [1, 2, 4])]
    lines = [
        {"timestamp": 5000 * i, "input_length": n, "output_length": 300, "hash_ids": ids}
        for i, (n, ids) in enumerate(turns)
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"model": "Qwen3-8B", "topology": "1C", "workload": str(log)}
    summary = simulate(make_config(fields)).summary
    assert summary["prefix_cache_hits"] == (700 // 16 + 1024 // 16 + 999 // 16 + 1024 // 16) * 16
    ideal = summary["ideal_prefix_cache_hit_rate"]
    assert ideal == pytest.approx(summary["prefix_cache_hit_rate"], abs=1e-12)
