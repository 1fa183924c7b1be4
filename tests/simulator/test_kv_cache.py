"""The compiled prefix cache against the reference model's pool, block by block."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.jit import njit
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.kv import block_lists, kv_cache
from eldr_sim.simulator.reference.kv_blocks import BlockPool
from eldr_sim.traces.requests.logs.log_columns import chain_blocks

from ..kv_hashes import block_hashes


@njit()
def find(kv, w, request, parent, tokens, size, prefix):
    return kv_cache.find(kv, w, 0, request, parent, tokens, size, prefix)


@njit()
def hold(kv, tables, workers, w, request, found, new):
    tables[request, 0].found = found
    kv_cache.hold(kv, tables, workers, w, 0, request, new)


@njit()
def publish(kv, tables, workers, w, request, tokens, size, prefix):
    kv_cache.publish(kv, tables, workers, w, 0, request, tokens, size, prefix)


@njit()
def release(kv, tables, workers, w, request):
    kv_cache.release(kv, tables, workers, w, 0, request)


@njit()
def take_blank(kv, workers, w, n):
    kv_cache.take_blank(kv, workers, w, n)


@njit()
def block_at(kv, w, key):
    """Return the block that the hash table has for a key, -1 if none."""
    return kv.hash_slots[w, block_lists.slot_of(kv.hash_slots, kv.blocks, w, key)] - 1


@njit()
def block_hash(kv, request, number, size, prefix):
    return kv_cache.block_hash(kv, request, number, size, prefix)


def own_key(request, number):
    """Return the hash of a full block whose tokens no other request shares."""
    return (-1 - request) << 32 | number


W = 1  # the worker that is tested; nothing may happen to the others


class Cache:
    """One worker's compiled cache, and the prompts that it serves."""

    def __init__(self, n_blocks, size, prompt_len, paths=None, prefix=None):
        """``paths`` holds the ids of each prompt's prefix blocks of ``prefix`` tokens."""
        n = len(prompt_len)
        paths = [()] * n if paths is None else paths
        indptr = np.concatenate([[0], np.cumsum([len(path) for path in paths])])
        ids = np.array([block for path in paths for block in path], np.uint64)
        self.prefix = prefix or size
        self.workload = SimpleNamespace(
            prompt_len=np.array(prompt_len, np.int32),
            answered=None,
            prefix_hash=chain_blocks(ids, indptr),
            prefix_indptr=indptr,
            prefix_block_tokens=self.prefix,
            prefixes_to_come=False,
        )
        self.n_blocks, self.size, self.lengths = n_blocks, size, prompt_len
        self.kv = kv_cache.make_kv_cache(self.workload, size, n_blocks, 3)
        self.workers = np.zeros(3, state.WORKER)
        self.workers["n_blank"] = n_blocks
        for name in ("spare", "idle_head", "idle_tail"):
            self.workers[name] = -1
        self.tables = np.zeros((n, 1), state.BLOCK_TABLE)
        self.keys = [block_hashes(self.workload, i, size) for i in range(n)]
        self.tokens = {}  # of the contexts that are held
        self.last = -1  # whose blocks are looked at first, whatever has become of them

    @property
    def worker(self):
        return self.workers[W]

    @property
    def n_free(self):
        return int(self.worker["n_blank"] + self.worker["n_idle"])

    def allocate(self, request, tokens=None):
        """Take the blocks of a context as the engine does; return cached tokens, None: no room."""
        tokens = self.lengths[request] if tokens is None else tokens
        found, idle = find(self.kv, W, request, self.last, tokens, self.size, self.prefix)
        self.last = request
        new = -(-tokens // self.size) - found
        if new + idle > self.n_free:
            return None
        hold(self.kv, self.tables, self.workers, W, request, found, new)
        self.tokens[request] = tokens
        return found * self.size

    def publish(self, request, tokens):
        publish(self.kv, self.tables, self.workers, W, request, tokens, self.size, self.prefix)

    def grow(self, request):
        """Take one more block for the tokens that a sequence generates."""
        take_blank(self.kv, self.workers, W, 1)
        self.tables[request, 0]["private"] += 1

    def release(self, request):
        release(self.kv, self.tables, self.workers, W, request)
        del self.tokens[request]

    def idle(self):
        """Return the hashes of the blocks that nobody holds, the next to be evicted first."""
        hashes, before, block = [], -1, int(self.worker["idle_head"])
        while block >= 0:
            record = self.kv.blocks[W, block]
            assert record["n_held"] == 0
            assert record["before"] == before
            if record["run"]:
                numbers = range(int(record["start"]), int(record["start"] + record["run"]))
                hashes += [own_key(int(record["writer"]), n) for n in reversed(numbers)]
            else:
                hashes.append(int(record["block_hash"]))
            before, block = block, int(record["behind"])
        assert before == self.worker["idle_tail"]
        assert len(hashes) == self.worker["n_idle"]
        return hashes

    def copies(self, key):
        """Return (holders, writer) of the blocks that have a key, the oldest first."""
        blocks, block = [], int(block_at(self.kv, W, key))
        while block >= 0:
            record = self.kv.blocks[W, block]
            assert record["block_hash"] == key
            blocks.append((int(record["n_held"]), int(record["writer"])))
            block = int(record["copy"])
        return blocks


class SlowCache:
    """The same with the reference model's blocks."""

    def __init__(self, cache):
        self.cache, self.blocks, self.tables = cache, BlockPool(cache.n_blocks), {}

    def allocate(self, request, tokens=None):
        cache, found = self.cache, []
        tokens = cache.lengths[request] if tokens is None else tokens
        for key in self.keys(request, tokens - 1):
            block = self.blocks.find(key)
            if block is None:
                break
            found.append(block)
        new = -(-tokens // cache.size) - len(found)
        if new + sum(block.holders == 0 for block in found) > len(self.blocks.free):
            return None
        for block in found:
            self.blocks.touch(block)
        self.tables[request] = found + [self.blocks.take() for _ in range(new)]
        return len(found) * cache.size

    def publish(self, request, tokens):
        for key, block in zip(self.keys(request, tokens), self.tables[request], strict=False):
            self.blocks.publish(block, key, request)

    def keys(self, request, tokens):
        n, shared = tokens // self.cache.size, self.cache.keys[request]
        return (shared + [own_key(request, number) for number in range(len(shared), n)])[:n]

    def grow(self, request):
        self.tables[request].append(self.blocks.take())

    def release(self, request):
        self.blocks.give_back(self.tables.pop(request))


def assert_same_state(cache, slow):
    assert cache.n_free == len(slow.blocks.free)
    assert cache.idle() == [block.key for block in slow.blocks.free if block.key is not None]
    for key in {key for keys in cache.keys for key in keys}:
        expected = [(b.holders, b.writer) for b in slow.blocks.cached.get(key, [])]
        assert cache.copies(key) == expected
    in_use = cache.kv.hash_slots[W][cache.kv.hash_slots[W] > 0] - 1
    alone = cache.kv.blocks["run"][W, in_use] == 0
    assert alone.sum() == sum(key >= 0 for key in slow.blocks.cached)
    assert not cache.kv.hash_slots[[0, 2]].any()


@given(
    seed=st.integers(0, 2**32),
    n_blocks=st.integers(1, 20),
    size=st.integers(1, 5),
    prefix=st.sampled_from([None, 1, 3, 8]),
)
def test_cache_equals_vllms_pool(seed, n_blocks, size, prefix):
    """Prompts of a tree (a block continues with one of two), allocated, chunked, freed at will."""
    rng = np.random.default_rng(seed)
    n, prefix = 25, prefix or size
    lengths = rng.integers(1, 6 * size + 1, n).tolist()
    # Now and then the end of a prompt is shared with nobody.
    paths = [
        rng.integers(2, size=min(-(-tokens // prefix), rng.choice([99, 99, 1]))).tolist()
        for tokens in lengths
    ]
    cache = Cache(n_blocks, size, lengths, paths, prefix)
    slow, waiting, published, back = SlowCache(cache), list(range(n)), {}, set()
    for _ in range(60):
        action = rng.choice(["allocate", "allocate", "publish", "grow", "release"])
        if action == "allocate" and waiting:
            request = waiting[0]
            # A context that comes back is longer by the tokens that were generated, one at least.
            tokens = lengths[request] + rng.choice([0, 0, 0, 1, 2 * size])
            tokens = lengths[request] = int(tokens + (request in back))
            cached = cache.allocate(request, tokens)
            assert cached == slow.allocate(request, tokens)
            if cached is not None:
                assert cached < tokens
                waiting.pop(0)
                published[request] = cached
            else:
                waiting.append(waiting.pop(0))
        elif action == "publish" and published:
            request = int(rng.choice(list(published)))
            published[request] = int(rng.integers(published[request], lengths[request] + 1))
            cache.publish(request, published[request])
            slow.publish(request, published[request])
        elif action == "grow" and published and cache.n_free:
            request = int(rng.choice(list(published)))
            cache.grow(request)
            slow.grow(request)
        elif action == "release" and published:
            request = int(rng.choice(list(published)))
            del published[request]
            waiting.append(request)  # it may come again
            back.add(request)
            cache.release(request)
            slow.release(request)
        assert_same_state(cache, slow)
    for request in published:
        cache.release(request)
        slow.release(request)
    assert_same_state(cache, slow)
    assert cache.n_free == n_blocks


@given(seed=st.integers(0, 2**32), n_blocks=st.integers(6, 30), size=st.integers(1, 3))
def test_contexts_of_any_length_find_their_own_blocks_in_several_runs(seed, n_blocks, size):
    """A request that comes back with a shorter context leaves the blocks behind it to a run of
    their own, and has a younger run when it is released again."""
    rng = np.random.default_rng(seed)
    cache = Cache(n_blocks, size, [8 * size] * 3, [()] * 3)
    slow, held = SlowCache(cache), set()
    for request in rng.integers(3, size=60).tolist():
        if request in held:
            held.remove(request)
            for each in (cache, slow):
                each.release(request)
        else:
            tokens = int(rng.integers(1, 8 * size))
            cached = cache.allocate(request, tokens)
            assert cached == slow.allocate(request, tokens)
            if cached is not None:
                held.add(request)
                computed = int(rng.integers(cached, tokens + 1))
                for each in (cache, slow):
                    each.publish(request, computed)
        assert_same_state(cache, slow)


@pytest.mark.parametrize("seed", range(3))
def test_the_hash_table_forgets_nothing_but_what_is_evicted(seed):
    """INV-8: 40 prompts of a block each pass through 8 blocks: slots fill, move and empty."""
    rng = np.random.default_rng(seed)
    cache = Cache(8, 1, [2] * 40, [[i] for i in rng.permutation(40)], 1)
    slow = SlowCache(cache)
    for request in rng.integers(40, size=150).tolist():
        assert cache.allocate(request) == slow.allocate(request)
        for each in (cache, slow):
            each.publish(request, 2)
            each.release(request)
        assert_same_state(cache, slow)


# -- by hand -----------------------------------------------------------------------------------


def test_tails_are_evicted_before_heads():
    same = [1, 2, 3, 4]
    cache = Cache(4, 4, [16, 8, 17, 16], [same, [5, 6], [*same, 7], same])
    assert cache.allocate(0) == 0
    cache.publish(0, 16)
    cache.release(0)
    assert cache.allocate(1) == 0  # takes the place of 4 and 3
    cache.release(1)
    assert cache.allocate(2) is None
    assert cache.allocate(3) == 8


def test_the_least_recently_freed_goes_first_and_blank_blocks_before_it():
    cache = Cache(5, 4, [5, 5, 9], [[1], [2], [3, 4]])
    for request in (1, 0):
        assert cache.allocate(request) == 0
        cache.publish(request, 5)
    cache.release(0)
    cache.release(1)  # freed last, and published first
    first, second = cache.keys[0][0], cache.keys[1][0]
    assert cache.idle() == [first, second]
    assert cache.allocate(2) == 0  # three blank ones are enough
    assert cache.idle() == [first, second]
    cache.grow(2)
    assert cache.idle() == [second]


def test_a_hit_leaves_the_last_token_to_compute():
    lengths = [8, 8, 9, 7, 4, 5]
    cache = Cache(10, 4, lengths, [[1, 2][: tokens // 4] for tokens in lengths])
    for request, hit in enumerate((0, 4, 8, 4, 0, 4)):
        assert cache.allocate(request) == hit
        cache.publish(request, lengths[request])
        cache.release(request)


def test_shared_blocks_count_once():
    cache = Cache(5, 4, [9, 9, 9, 1], [[1, 2], [1, 2], [1, 2], []])
    for request in range(3):  # two shared blocks, one of its own each
        assert cache.allocate(request) is not None
        cache.publish(request, 9)
    assert cache.n_free == 0
    assert cache.allocate(3) is None
    cache.release(0)
    assert cache.n_free == 1  # the others still hold the two
    cache.release(1)
    cache.release(2)
    assert cache.n_free == 5


def test_a_block_that_is_computed_twice_is_there_twice():
    """Both prompts began before either was published; the older copy is found first."""
    cache = Cache(7, 4, [8, 8, 9, 17], [[1, 2]] * 3 + [[8, 9, 10, 11]])
    for request in (0, 1):
        assert cache.allocate(request) == 0
    for request in (1, 0):
        cache.publish(request, 4)
    key = cache.keys[0][0]
    assert cache.copies(key) == [(1, 1), (1, 0)]
    assert cache.allocate(2) == 4
    assert cache.copies(key) == [(2, 1), (1, 0)]
    for request in (2, 1, 0):
        cache.release(request)
    assert cache.idle() == [key, key]
    assert cache.allocate(3) == 0  # needs five of seven blocks, which are blank
    cache.grow(3)
    assert cache.copies(key) == [(0, 0)]  # the other copy takes over
    cache.grow(3)
    assert cache.copies(key) == []


def test_blocks_across_prefix_blocks_are_shared_to_the_last_whole_one():
    """KV blocks of 4 tokens, prefix blocks of 6: the second KV block ends in the second one."""
    cache = Cache(20, 4, [12, 12, 12], [[1, 2], [1, 3], [1, 2]], 6)
    for request, hit in enumerate((0, 4, 8)):
        assert cache.allocate(request) == hit
        cache.publish(request, 12)


@given(
    prompt_len=st.integers(1, 60),
    blocks=st.integers(0, 8),
    size=st.integers(1, 9),
    prefix=st.integers(1, 9),
)
def test_hashes_equal_those_of_the_workload(prompt_len, blocks, size, prefix):
    path = list(range(min(blocks, -(-prompt_len // prefix))))
    cache = Cache(4, size, [3, prompt_len], [[], path], prefix)
    first, end = cache.kv.first_listed[1:3]
    hashes = [block_hash(cache.kv, 1, i, size, prefix) for i in range(end - first)]
    assert hashes == cache.keys[1]
