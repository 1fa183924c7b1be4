"""The prefix cache against a block-by-block twin of vLLM's; signatures against cold prefills."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator.clock import Clock
from eldr_sim.simulator.prefill import PrefillWorker
from eldr_sim.simulator.prefix_cache import PrefixCache, Prompt
from eldr_sim.simulator.request import Request
from eldr_sim.traces.prompts import (
    PromptSignatures,
    assign_blocks,
    chain_blocks,
    clip_ranges,
    count_experts,
)
from eldr_sim.traces.writer import write_trace


class SlowPool:
    """vLLM's block pool, one block at a time: a queue of ids, a hash and a count a block."""

    def __init__(self, n_blocks, size):
        self.size = size
        self.queue = list(range(n_blocks))
        self.hash = [None] * n_blocks
        self.held = [0] * n_blocks
        self.by_hash = {}  # hash -> ids, the oldest first

    def allocate(self, prompt):
        found = []
        for h in prompt.block_hashes[: (prompt.n_tokens - 1) // self.size]:
            if h not in self.by_hash:
                break
            found.append(self.by_hash[h][0])
        new = -(-prompt.n_tokens // self.size) - len(found)
        if new + sum(self.held[b] == 0 for b in found) > len(self.queue):
            return None
        for b in found:
            if self.held[b] == 0:
                self.queue.remove(b)
            self.held[b] += 1
        table = list(found)
        for _ in range(new):
            b = self.queue.pop(0)
            if self.hash[b] is not None:
                self.by_hash[self.hash[b]].remove(b)
                if not self.by_hash[self.hash[b]]:
                    del self.by_hash[self.hash[b]]
                self.hash[b] = None
            self.held[b] = 1
            table.append(b)
        return table, len(found) * self.size

    def publish(self, prompt, table, n_tokens):
        for h, b in zip(prompt.block_hashes[: n_tokens // self.size], table, strict=False):
            if self.hash[b] is None:
                self.hash[b] = h
                self.by_hash.setdefault(h, []).append(b)

    def free(self, table):
        hashed, blank = [], []
        for b in reversed(table):
            self.held[b] -= 1
            if self.held[b] == 0:
                (blank if self.hash[b] is None else hashed).append(b)
        self.queue = blank + self.queue + hashed


def assert_same_state(cache, pool):
    assert cache.n_free == len(pool.queue)
    evictable = [b for b in pool.queue if pool.hash[b] is not None]
    assert [block.block_hash for block in cache._evictable] == [pool.hash[b] for b in evictable]
    assert all(block.n_held == 0 for block in cache._evictable)
    assert set(cache._by_hash) == set(pool.by_hash)
    for h, ids in pool.by_hash.items():
        mine = [cache._by_hash[h], *cache._copies.get(h, ())]
        assert [block.n_held for block in mine] == [pool.held[b] for b in ids]
        assert len(set(mine)) == len(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), n_blocks=st.integers(1, 14), size=st.integers(1, 5))
def test_cache_equals_vllms_pool(data, n_blocks, size):
    """Prompts of a tree (a block continues with one of two), allocated, chunked, freed at will."""
    cache, pool = PrefixCache(n_blocks, size), SlowPool(n_blocks, size)
    held = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from("aapf"))
        if action == "a" or not held:
            n_tokens = data.draw(st.integers(1, 5 * size))
            path = data.draw(st.lists(st.booleans(), min_size=5, max_size=5))
            code, hashes = 1, []
            for turn in path[: n_tokens // size]:
                code = 2 * code + turn
                hashes.append(code)
            # Now and then the end of a prompt has no hash.
            hashes = hashes[: data.draw(st.sampled_from([5, 5, 1]))]
            prompt = Prompt(n_tokens, hashes)
            mine, twin = cache.allocate(prompt), pool.allocate(prompt)
            assert (mine is None) == (twin is None)
            if mine is not None:
                assert mine.n_cached == twin[1] < n_tokens
                assert len(mine.blocks) + mine.n_private == len(twin[0])
                held.append([mine, twin[0], twin[1]])
        elif action == "p":
            entry = data.draw(st.sampled_from(held))
            n = data.draw(st.integers(entry[2], entry[0].prompt.n_tokens))
            entry[2] = n
            cache.publish(entry[0], n)
            pool.publish(entry[0].prompt, entry[1], n)
        else:
            entry = held.pop(data.draw(st.integers(0, len(held) - 1)))
            cache.free(entry[0])
            pool.free(entry[1])
        assert_same_state(cache, pool)
    for table, twin, _ in held:
        cache.free(table)
        pool.free(twin)
    assert cache.n_free == n_blocks
    assert_same_state(cache, pool)


def test_tails_are_evicted_before_heads():
    cache = PrefixCache(4, 4)
    first = cache.allocate(Prompt(16, [1, 2, 3, 4]))
    cache.publish(first, 16)
    cache.free(first)
    other = cache.allocate(Prompt(8, [5, 6]))  # takes the place of 4 and 3
    cache.free(other)
    assert cache.allocate(Prompt(17, [1, 2, 3, 4])) is None
    assert cache.allocate(Prompt(16, [1, 2, 3, 4])).n_cached == 8


def test_a_hit_leaves_the_last_token_to_compute():
    cache = PrefixCache(10, 4)
    for n_tokens, hit in ((8, 0), (8, 4), (9, 8), (7, 4), (4, 0), (5, 4)):
        table = cache.allocate(Prompt(n_tokens, [1, 2][: n_tokens // 4]))
        assert table.n_cached == hit
        cache.publish(table, n_tokens)
        cache.free(table)


def test_shared_blocks_count_once():
    cache = PrefixCache(5, 4)
    tables = []
    for _ in range(3):  # two shared blocks, one of its own each
        tables.append(cache.allocate(Prompt(9, [1, 2])))
        cache.publish(tables[-1], 9)
    assert cache.n_free == 0
    assert cache.allocate(Prompt(1)) is None
    cache.free(tables[0])
    assert cache.n_free == 1  # the others still hold the two
    for table in tables[1:]:
        cache.free(table)
    assert cache.n_free == 5


# --- signatures -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Requests of different lengths whose tokens choose at random."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, 30, 12)
    experts = np.argsort(rng.random((int((prompt + 1).sum()), 2, 8)), axis=-1)[..., :3]
    return write_trace(
        tmp_path_factory.mktemp("traces") / "tiny",
        experts=experts,
        request_id=[str(i) for i in range(12)],
        domain=["x"] * 12,
        prompt_len=prompt,
        output_len=np.ones(12, int),
        is_calibration=[False] * 12,
        model="m",
        n_experts=8,
        domains=["x"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )


def cold_counts(trace, workload, request):
    """Prefill a prompt from nothing, token by token."""
    counts = np.zeros((trace.n_layers, trace.n_experts), int)
    begin, end = workload.prefix_indptr[request : request + 2]
    for token in range(workload.prompt_len[request]):
        block = begin + token // max(1, workload.prefix_block_tokens)
        source = workload.trace_request[request]
        if block < end:
            source = workload.prefix_trace_request[block]
        row = trace.first_row[source] + token % trace.prompt_len[source]
        for layer in range(trace.n_layers):
            counts[layer, trace.experts[row, layer]] += 1
    return counts


def tree_workload(make_workload, rng, n, n_trace, hash_tokens):
    """Prompts that begin alike: random walks down a tree of blocks, cut anywhere."""
    lengths, ids, indptr = [], [], [0]
    for _ in range(n):
        path = rng.integers(2, size=6)
        length = int(rng.integers(1, 6 * hash_tokens))
        blocks = -(-length // hash_tokens) if rng.random() < 0.7 else length // hash_tokens
        if length % hash_tokens and blocks > length // hash_tokens:
            path[blocks - 1] = 2 + length  # the id of a partial block stands for its length too
        ids += path[:blocks].tolist()
        lengths.append(length)
        indptr.append(len(ids))
    indptr = np.array(indptr)
    chained = chain_blocks(np.array(ids, np.uint64), indptr)
    source, request, _ = assign_blocks(chained, indptr, rng.integers(n_trace, size=n))
    return dataclasses.replace(
        make_workload(np.zeros(n), lengths, 1),
        trace_request=request.astype(np.int32),
        prefix_hash=chained,
        prefix_indptr=indptr,
        prefix_trace_request=source.astype(np.int32),
        prefix_block_tokens=hash_tokens,
    )


def serve(trace, workload, rng, *, n_workers, n_blocks, block_size, budget):
    """Prefill a workload, requests in order, pulled at random times; check each signature.

    Returns how often each thing happened.
    """
    env, workers, happened = Clock(), [], dict.fromkeys(("miss", "partial", "full", "evicted"), 0)
    signature = PromptSignatures(trace)
    by_id = {}

    def prompt_of(request):
        i = request.index
        return Prompt(
            request.prompt_len, workload.block_hashes(i, block_size), workload.prompt_ranges(i)
        )

    def prefilled(request):
        table, worker = request.block_table, workers[request.prefill_worker]
        cold = cold_counts(trace, workload, request.index)
        number, counts = signature(table.ranges(block_size))
        np.testing.assert_array_equal(counts, cold)
        assert by_id.setdefault(number, counts) is counts
        # The same, row by row: the block's writer at the block's place, then the private blocks.
        rows = [
            count_experts(
                trace, tuple(clip_ranges(b.writer.ranges, i * block_size, (i + 1) * block_size))
            )
            for i, b in enumerate(table.blocks)
        ]
        rest = len(rows) * block_size, request.prompt_len
        rows.append(count_experts(trace, tuple(clip_ranges(request.prompt.ranges, *rest))))
        np.testing.assert_array_equal(sum(rows), cold)
        hit, most = request.cached_tokens, (request.prompt_len - 1) // block_size * block_size
        happened["miss" if hit == 0 else "full" if hit == most else "partial"] += 1
        pulled = float(rng.exponential(0.02))
        env.at(env.now + pulled, lambda _: worker.release(request))

    step_time = dataclasses.make_dataclass("Time", ["prefill_s"])(lambda t, c: 1e-3 * sum(t))
    for index in range(n_workers):
        worker = PrefillWorker(
            env,
            index,
            step_time=step_time,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            block_size=block_size,
            n_blocks=n_blocks,
            on_prefilled=prefilled,
            prompt_of=prompt_of,
        )
        evict = worker.cache._evict

        def counted(n, evict=evict):
            happened["evicted"] += n
            evict(n)

        worker.cache._evict = counted
        workers.append(worker)
    n = len(workload.prompt_len)
    requests = [
        Request(i, float(0.005 * i), int(workload.prompt_len[i]), 1, 0, 0, 0, 1, 0, True)
        for i in range(n)
    ]
    for request in requests:
        worker = workers[int(rng.integers(n_workers))]
        env.at(request.arrival_s, lambda _, r=request, w=worker: w.enqueue(r))
    while env.peek() < np.inf:
        env.step()
    assert sum(happened[k] for k in ("miss", "partial", "full")) == n
    for worker in workers:
        assert worker.free_blocks == n_blocks
        assert len(worker.cache._by_hash) <= n_blocks
    computed = sum(tokens for worker in workers for *_, tokens in worker.steps)
    assert computed == sum(r.prompt_len - r.cached_tokens for r in requests)
    return happened


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_workers=st.integers(1, 3),
    hash_tokens=st.sampled_from([4, 16]),
    block_size=st.sampled_from([1, 3, 4, 8, 32]),
    slack=st.integers(0, 30),
    budget=st.sampled_from([7, 64]),
)
def test_signature_equals_a_cold_prefills(
    trace, make_workload, seed, n_workers, hash_tokens, block_size, slack, budget
):
    rng = np.random.default_rng(seed)
    workload = tree_workload(make_workload, rng, 30, trace.n_requests, hash_tokens)
    n_blocks = slack + -(-int(workload.prompt_len.max()) // block_size)
    serve(
        trace,
        workload,
        rng,
        n_workers=n_workers,
        n_blocks=n_blocks,
        block_size=block_size,
        budget=budget,
    )


def test_a_long_run_sees_every_kind_of_hit(trace, make_workload):
    """The property test above would be empty if nothing were shared or evicted."""
    rng = np.random.default_rng(7)
    workload = tree_workload(make_workload, rng, 400, trace.n_requests, 16)
    happened = serve(trace, workload, rng, n_workers=2, n_blocks=40, block_size=4, budget=64)
    assert min(happened.values()) >= 30, happened


def test_false_sharing_is_noticed(trace, make_workload):
    """The tests above can fail: here every prompt's blocks pass for those of all others."""

    class Confused:
        def __init__(self, workload):
            self.__dict__.update(vars(workload))
            self.prompt_ranges = workload.prompt_ranges

        def block_hashes(self, request, block_size):
            return list(range(self.prompt_len[request] // block_size))

    rng = np.random.default_rng(7)
    workload = Confused(tree_workload(make_workload, rng, 40, trace.n_requests, 16))
    with pytest.raises(AssertionError, match="not equal"):
        serve(trace, workload, rng, n_workers=2, n_blocks=40, block_size=4, budget=64)
