"""KV tiers against one cache of their sum, by hand, by a list-by-list twin, and as laws."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.plane.state import CANCELLED
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.groups import KVTierConfig
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.fault_plan import Fault, FaultPlan
from eldr_sim.simulator.setup.kv_tiers import parse_tier, tiers_of
from eldr_sim.simulator.setup.transfer import TransferModel
from eldr_sim.traces.requests.caches.session_lists import GHOSTS
from eldr_sim.traces.requests.logs.log_columns import chain_blocks

from ..arc import Arc
from ..on_each import on_each
from ..session_cache import SessionCache

BLOCK, BYTES = 4, 8  # tokens of a block, bytes of its KV cache: two a token
FOREVER = 1e3


def tree(make_workload, n, seed, gap_s, deep=6, branches=3, output=1):
    """Requests that walk down a tree of blocks; ``gap_s`` apart."""
    rng = np.random.default_rng(seed)
    n_blocks = rng.integers(1, deep + 1, n)
    # What a block stands for is its own and all before it: chained below.
    ids = np.concatenate([np.minimum(rng.geometric(0.45, k), branches) for k in n_blocks])
    indptr = np.concatenate([[0], np.cumsum(n_blocks)])
    # No prompt ends with a block: its last token is computed again, and the block is there twice.
    length = n_blocks * BLOCK + rng.integers(1, BLOCK, n)
    work = make_workload(gap_s * np.arange(n), length, output)
    hashes = chain_blocks(ids.astype(np.uint64), indptr)
    return dataclasses.replace(
        work, prefix_hash=hashes, prefix_indptr=indptr, prefix_block_tokens=BLOCK,
        prefix_text=np.zeros(len(hashes), np.int32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(make_cluster, make_step_time):
    def run(work, tiers=(), n_blocks=40, step_s=0.01, prefill=(0.001, 0.0), **rest):
        config = {name: rest.pop(name) for name in list(rest) if name.startswith("kv_")}
        faults = rest.pop("faults", None)
        longest = int((work.prompt_len + work.output_len).max())
        step_time = make_step_time(
            8, 1, 8, constant=step_s, prefill=prefill, max_context=longest + 1, max_tokens=256
        )
        cluster = make_cluster(
            work, step_time=step_time, n_blocks=n_blocks, kv_bytes_per_token=BYTES // BLOCK,
            n_prefill=0, prompts=False, tiers=tuple(map(parse_tier, tiers)),
            kv_tiers=KVTierConfig(**config), **rest,
        )  # fmt: skip
        cluster.faults = faults
        record = cluster.run()
        assert record.completed.all()
        return record, cluster

    return run


def tier(blocks, load="1TB/s", **words):
    """Spell a tier of so many blocks."""
    more = "".join(f",{key}={value}" for key, value in words.items())
    return f"host:{blocks * BYTES}B,load={load}{more}"


def cached(record):
    return record.requests["cached_tokens"].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_an_inclusive_tier_no_larger_than_the_cache_adds_nothing(make_workload, run, seed):
    work = tree(make_workload, 300, seed, FOREVER)  # one at a time
    alone, _ = run(work, n_blocks=20)
    for blocks in (3, 12, 19):  # a request has a block that nobody can find
        both, _ = run(work, [tier(blocks)], n_blocks=20)
        assert both.tiers.hits.sum() == 0
        assert cached(both) == cached(alone)
    larger, _ = run(work, [tier(60)], n_blocks=20)
    assert larger.tiers.hits.sum() > 0


@pytest.mark.parametrize("seed", range(4))
def test_two_exclusive_tiers_are_one_cache_of_their_sum(make_workload, run, seed):
    work = tree(make_workload, 400, seed, FOREVER)
    words = {"write": "back", "exclusive": "yes"}
    for small, more in ((14, 9), (20, 31)):
        one, _ = run(work, n_blocks=small + more)
        two, _ = run(work, [tier(more, **words)], n_blocks=small)
        assert cached(two) == cached(one)
        assert two.tiers.hits.sum() > 0
    three, _ = run(work, [tier(10, **words), "ssd:168B,load=1TB/s,write=back,exclusive=yes"])
    one, _ = run(work, n_blocks=40 + 10 + 21)
    assert cached(three) == cached(one)


@pytest.mark.parametrize("gap_s", [0.004, 0.03])
def test_an_endless_tier_without_cost_is_an_endless_cache(make_workload, run, gap_s):
    work = tree(make_workload, 400, 1, gap_s, output=3)
    small, _ = run(work, ["host:inf,load=inf"], n_blocks=80)
    large, _ = run(work, n_blocks=1 << 14)
    assert small.tiers.hits.sum() > 0
    for name in small.requests.dtype.names:
        assert (small.requests[name] == large.requests[name]).all(), name


def test_no_room_and_no_bandwidth_are_no_tier(make_workload, run):
    work = tree(make_workload, 300, 2, 0.01)
    none, _ = run(work, n_blocks=30)
    for tiers, config in ((tier(0), {}), (tier(500, load="1B/s"), {"kv_load": "cheaper"})):
        record, _ = run(work, [tiers], n_blocks=30, **config)
        assert record.requests.tobytes() == none.requests.tobytes()


def test_bytes_are_conserved(make_workload, run):
    work = tree(make_workload, 500, 3, 0.005, output=3)
    kinds = {}, {"write": "back"}, {"write": "selective"}, {"evict": "fifo"}, {"evict": "arc"}
    for words in (*kinds, {"write": "back", "evict": "arc"}, {"evict": "session"}):
        record, cluster = run(work, [tier(35, load="5KB/s", **words)], n_blocks=30)
        tiers, kv = record.tiers, cluster.arrays.engines.kv.tiers
        resident = int(kv.stores["n_idle"][0])
        assert tiers.stored[0] == resident + tiers.evicted[0]
        arc, sessions = kv.arc.lists.sizes, kv.by_session.lists.sizes
        remembered = int(arc[0, 3:].sum())
        if words.get("evict") == "session":
            remembered = int(sessions[0, GHOSTS])
            assert sessions[0, GHOSTS + 1 :].sum() == resident
            assert remembered <= 35
        assert (kv.slots[0] > 0).sum() == resident + remembered
        assert resident <= 35
        assert arc[0, 1:3].sum() == (resident if "arc" in words.values() else 0)
        assert (remembered > 0) == (words.get("evict") in ("arc", "session"))
        assert kv.stores["n_blank"][0] + resident == 35
        assert tiers.loaded[0] * BLOCK == tiers.hits.sum() > 0
        assert (record.requests["cached_tokens"] >= tiers.hits.sum(axis=1)).all()


def chain(make_workload, at, blocks):
    """Requests of one chain of blocks: ``blocks[i]`` of it, and a token more."""
    blocks = np.array(blocks)
    indptr = np.concatenate([[0], np.cumsum(blocks)])
    ids = np.concatenate([np.arange(k) for k in blocks]).astype(np.uint64)
    return dataclasses.replace(
        make_workload(np.array(at, float), blocks * BLOCK + 1, 1),
        prefix_hash=chain_blocks(ids, indptr), prefix_indptr=indptr, prefix_block_tokens=BLOCK,
        prefix_text=np.zeros(int(indptr[-1]), np.int32),
    )  # fmt: skip


def flushed(make_workload, at, blocks):
    """The first of a chain's requests, others that evict it, and the rest of the chain's."""
    n, own = 12, [np.arange(k) for k in blocks]
    others = [7_000 + 15 * i + np.arange(15) for i in range(n)]
    ids = [own[0], *others, *own[1:]]
    indptr = np.concatenate([[0], np.cumsum([len(each) for each in ids])])
    length = [blocks[0] * BLOCK + 1, *[60] * n, *(k * BLOCK + 1 for k in blocks[1:])]
    return dataclasses.replace(
        make_workload(np.array([0.0, *(10.0 + np.arange(n)), *at]), np.array(length), 1),
        prefix_hash=chain_blocks(np.concatenate(ids).astype(np.uint64), indptr),
        prefix_indptr=indptr, prefix_block_tokens=BLOCK,
        prefix_text=np.zeros(int(indptr[-1]), np.int32),
    )  # fmt: skip


def test_the_last_token_of_a_prompt_is_computed(make_workload, run):
    """A tier holds all blocks of a prompt of whole blocks: the last one is computed again."""
    work = flushed(make_workload, [100.0], [3, 3])
    whole = work.prompt_len.copy()
    whole[-1] = 3 * BLOCK
    record, _ = run(dataclasses.replace(work, prompt_len=whole), [tier(300)])
    assert cached(record)[-1] == 2 * BLOCK == record.tiers.hits[-1].sum()


def test_loads_take_their_latency_and_bytes_one_after_the_other(make_workload, run):
    work = flushed(make_workload, [100.0, 100.0], [8, 8, 8])
    words = {"load": "16B/s", "store": "inf", "latency": "0.25"}
    record, _ = run(work, [tier(999, **words)], n_blocks=18, kv_in_flight="duplicate")
    one, two = record.requests[-2:]
    seconds = 8 * BYTES / 16
    assert record.tiers.hits[-2:, 0].tolist() == [8 * BLOCK] * 2
    assert one["prefill_start_s"] - 100.0 == pytest.approx(0.25 + seconds, abs=1e-9)
    assert two["prefill_start_s"] - 100.0 == pytest.approx(0.25 + 2 * seconds, abs=1e-9)
    # Who joins waits for the one load; a step that overlaps with it lasts as long.
    record, _ = run(work, [tier(999, **words)], n_blocks=18)
    assert record.tiers.hits[-2:, 0].tolist() == [8 * BLOCK, 0]
    assert (record.requests["prefill_start_s"][-2:] == 100.0 + 0.25 + seconds).all()
    record, _ = run(
        work, [tier(999, **words)], n_blocks=18, kv_overlap="layers", n_layers=4, prefill=(0, 0)
    )
    step, load = 0.01, 0.25 + seconds
    assert record.requests["finish_s"][-1] - 100.0 == pytest.approx(load + step / 4, abs=1e-9)


def test_a_convoy_waits_longer_than_who_joins(make_workload, run):
    """vLLM #44294: who wants a block that is in flight does nothing until it is here."""
    blocks = [2, 6, 10, 14]
    first = flushed(make_workload, [100.0] * 4, [14, *blocks])
    ends = {}
    for rule in ("join", "delay"):
        record, _ = run(
            first,
            [tier(999, load="16B/s", store="inf", latency="0.25")],
            n_blocks=60,
            kv_in_flight=rule,
        )
        assert record.requests["cached_tokens"][-4:].tolist() == [k * BLOCK for k in blocks]
        ends[rule] = record.requests["finish_s"][-4:] - 100.0
    assert (ends["join"] <= ends["delay"] + 1e-9).all()
    assert ends["delay"][-1] == pytest.approx(ends["join"][-1] + 3 * 0.25, abs=0.1)


class Stored(list):
    """A store of the most recently used, or of the last that came."""

    def __init__(self, size, renews):
        super().__init__()
        self.size, self.renews = size, renews

    def store(self, key):
        if key in self:
            self.touch(key, None)
            return
        if len(self) == self.size:
            self.pop(0)
        self.append(key)

    def touch(self, key, _user):
        if key in self and self.renews:
            self.remove(key)
            self.append(key)


class ArcStored(Arc):
    """A store that evicts as ARC does; a block is used again when another user comes."""

    def __init__(self, size):
        super().__init__(size)
        self.last, self.longest = {}, 0.0

    def store(self, key):
        if key not in self:
            self.use(key)
            self.last[key] = None
            self.longest = max(self.longest, self.target)

    def touch(self, key, user):
        if key not in self:
            return
        own = self.t1 if key in self.t1 else self.t2
        if self.last[key] in (None, user):
            own.remove(key)
            own.append(key)
        else:
            self.use(key)
        self.last[key] = user


class SessionStored(SessionCache):
    """A store that evicts by session, and remembers as many blocks as it has."""

    def __init__(self, size):
        super().__init__(size, size)


class Twin:
    """A cache of the most recently used blocks and a store: lists of keys, one user at a time."""

    def __init__(self, hbm, host):
        self.hbm, self.host, self.room, self.user = [], host, hbm, 0

    def serve(self, keys, findable, private):
        """Return the tokens found: a run in the cache, and behind it one in the tier."""
        n = 0
        while n < findable and keys[n] in self.hbm:
            n += 1
        more = n
        while more < findable and keys[more] in self.host:
            more += 1
        self.user += 1
        by_session = isinstance(self.host, SessionStored)
        if by_session:
            goes_on = self.host.session_of(keys[more - 1]) if more > n else None
            self.host.come(keys)
            self.host.store(keys, 0, goes_on)
        for key in [] if by_session else reversed(keys[n:more]):
            self.host.touch(key, self.user)
        held = keys[:n]
        free = [key for key in self.hbm if key not in held]
        while len(free) > self.room - len(keys) - private:
            free.pop(0)
        for key in [] if by_session else keys:  # stored when computed
            self.host.store(key)
        self.hbm = [key for key in free if key not in keys] + keys[::-1]
        for key in [] if by_session else reversed(keys):
            self.host.touch(key, self.user)
        return n * BLOCK, (more - n) * BLOCK


@on_each("evict", ["lru", "fifo", "arc", "session"])
@on_each("seed", range(3))
def test_a_twin_finds_the_same(make_workload, run, seed, evict):
    work = tree(make_workload, 300, 10 + seed, FOREVER, deep=5)
    record, _ = run(work, [tier(30, evict=evict)], n_blocks=16)
    stores = {"arc": ArcStored, "session": SessionStored}
    store = stores[evict](30) if evict in stores else Stored(30, evict == "lru")
    twin, found = Twin(16, store), []
    for i in range(len(work)):
        keys = [(k, int(h)) for k, h in enumerate(work.blocks(i).tolist())]
        context = int(work.prompt_len[i])  # and no token of the answer
        keys = keys[: context // BLOCK]
        findable = min(len(keys), (context - 1) // BLOCK)
        found.append(twin.serve(keys, findable, -(-(context + 0) // BLOCK) - len(keys)))
    assert record.tiers.hits[:, 0].tolist() == [more for _, more in found]
    assert cached(record) == [sum(both) for both in found]
    assert record.tiers.evicted[0] > 50
    if evict == "arc":
        assert store.longest > 0
        assert all((store.t2, store.b1, store.b2))
    if evict == "session":
        assert record.tiers.evicted[0] == store.evicted
        assert min(store.declined, len(store.absent)) > 5, (store.declined, len(store.absent))


def test_a_shared_store_has_what_any_worker_computed(make_workload, run):
    work = chain(make_workload, [0.0, 100.0], [9, 9])
    words = {"decode_policy": "round_robin", "n_decode": 2}
    record, _ = run(work, [tier(99, scope="cluster")], **words)
    assert cached(record) == [0, 9 * BLOCK]
    assert record.tiers.hits.ravel().tolist() == [0, 9 * BLOCK]
    alone, _ = run(work, [tier(99)], **words)
    assert cached(alone) == [0, 0]
    record, _ = run(work, [tier(99, scope="cluster", store="0.5B/s")], **words)
    assert record.tiers.hits[1, 0] == 100 // 16 * BLOCK  # stored by then, 16 s each


@on_each("evict", ["lru", "arc", "session"])
@on_each("scope", ["worker", "node", "cluster"])
@on_each("n", [1, 2])
def test_a_dead_worker_takes_its_own_store_along_and_no_other(make_workload, run, scope, n, evict):
    work = chain(make_workload, [0.0, 100.0], [9, 9])

    def hits(tier):
        faults = FaultPlan(tuple(Fault("fail", "decode", w, 50.0, 1.0) for w in range(n)))
        config = {"decode_policy": "round_robin", "n_decode": n, "faults": faults}
        record, cluster = run(work, [tier], **config)
        kv = cluster.arrays.engines.kv.tiers
        assert ((kv.slots > 0).sum(axis=1) == kv.stores["n_idle"]).all()
        return record.tiers.hits[1, 0] // BLOCK

    assert hits(tier(99, scope=scope, evict=evict)) == (0 if scope == "worker" else 9)
    # 16 s a block: what it had not stored whole is lost with it.
    late = {"worker": 0, "node": 50 // 16, "cluster": 50 // 16}[scope]
    assert hits(tier(99, scope=scope, store="0.5B/s", evict=evict)) == late


def test_arc_keeps_what_is_used_again_through_a_scan(make_workload, run):
    """Megiddo and Modha 2003: blocks that come once do not push out those that come again."""
    loop, scan = [1, 2, 3, 4], range(100, 160)
    pages = np.array(2 * loop + [page for k in scan for page in (k, loop[k % 4])], np.uint64)
    n = len(pages)
    work = dataclasses.replace(
        make_workload(FOREVER * np.arange(n), BLOCK + 1, 1),
        prefix_hash=chain_blocks(pages, np.arange(n + 1)), prefix_indptr=np.arange(n + 1),
        prefix_block_tokens=BLOCK, prefix_text=np.zeros(n, np.int32),
    )  # fmt: skip
    for evict, hits in (("lru", 5), ("arc", n - 4 - len(scan))):  # 1 is there once more
        record, _ = run(work, [tier(5, evict=evict)], n_blocks=2)
        assert (record.tiers.hits > 0).sum() == hits


def _known(kv, evict):
    """Return the blocks that stores know, and those that they have."""
    if evict == "session":
        sizes = kv.by_session.lists.sizes
        return sizes.sum(axis=1), sizes[:, GHOSTS + 1 :].sum(axis=1)
    return kv.arc.lists.sizes.sum(axis=1), kv.arc.lists.sizes[:, 1:3].sum(axis=1)


@pytest.mark.parametrize("evict", ["arc", "session"])
def test_lists_are_those_of_dead_and_shared_stores(make_workload, run, evict):
    """A store of the cluster that loses what was not stored whole goes on, and forgets nothing."""
    work = tree(make_workload, 400, 5, 3.0, output=3)
    faults = FaultPlan(tuple(Fault("fail", "decode", 0, at, 20.0) for at in (300.0, 600.0, 900.0)))
    for scope in ("worker", "cluster"):
        words = {"scope": scope, "evict": evict, "store": "4B/s"}
        config = {"decode_policy": "round_robin", "n_decode": 2, "faults": faults}
        record, cluster = run(work, [tier(20, **words)], n_blocks=12, **config)
        kv = cluster.arrays.engines.kv.tiers
        assert record.tiers.hits.sum() > 0
        known, there = _known(kv, evict)
        assert (there == kv.stores["n_idle"]).all()
        assert ((kv.slots > 0).sum(axis=1) == known).all()
        assert (kv.stores["n_blank"] + kv.stores["n_idle"] == 20).all()
        assert (known <= 40).all()


def test_fifo_misses_as_belady_says(make_workload, run):
    """Belady, Nelson and Shedler 1969: 9 misses with 3 frames and 10 with 4."""
    pages = np.array([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5], np.uint64)
    n = len(pages)
    work = dataclasses.replace(
        make_workload(FOREVER * np.arange(n), BLOCK + 1, 1),
        prefix_hash=chain_blocks(pages, np.arange(n + 1)), prefix_indptr=np.arange(n + 1),
        prefix_block_tokens=BLOCK, prefix_text=np.zeros(n, np.int32),
    )  # fmt: skip
    for frames, misses in ((3, 9), (4, 10)):
        record, _ = run(work, [tier(frames, evict="fifo")], n_blocks=2)
        assert (record.tiers.hits == 0).sum() == misses


def test_hit_rates_follow_ches_approximation(make_workload, run):
    """Independent references of Zipf weights (Che, Tung and Wang 2002)."""
    items, n, size = 400, 12_000, 100
    weights = 1.0 / np.arange(1, items + 1)
    weights /= weights.sum()
    pages = np.random.default_rng(0).choice(items, n, p=weights).astype(np.uint64)
    work = dataclasses.replace(
        make_workload(FOREVER * np.arange(n), BLOCK + 1, 1),
        prefix_hash=chain_blocks(pages, np.arange(n + 1)), prefix_indptr=np.arange(n + 1),
        prefix_block_tokens=BLOCK, prefix_text=np.zeros(n, np.int32),
    )  # fmt: skip
    record, _ = run(work, [tier(size)], n_blocks=2)
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        filled = (1 - np.exp(-weights * middle)).sum()
        low, high = (middle, high) if filled < size else (low, middle)
    expected = (weights * (1 - np.exp(-weights * low))).sum()
    assert (record.requests["cached_tokens"][2000:] > 0).mean() == pytest.approx(
        expected, abs=0.012
    )


#: A prompt of 10 tokens and its answer of 9 have 4 whole blocks, the prompt alone 2.
SLOW = TransferModel(0.5, 0.125, 4.0, "test")  # bytes/s
PULL_S = 0.5 + 2 * 2 * 0.125 + 2 * BYTES / 4.0  # two blocks of two tensors


@pytest.fixture(scope="module")
def turns(make_workload, make_cluster, make_step_time):
    """A turn of 10 tokens, answered with 9, and 10 s later one of 26; of one prefill worker."""

    def run(answer_kv="pull", transfer=SLOW, n_decode=1, prepare=lambda cluster: None, **rest):
        config = KVTierConfig(answer_kv=answer_kv, **rest)
        indptr = np.array([0, 7, 14])
        work = dataclasses.replace(
            make_workload(np.zeros(2), np.array([10, 26]), np.array([9, 2])),
            prefix_hash=chain_blocks(np.tile(np.arange(7, dtype=np.uint64), 2), indptr),
            prefix_indptr=indptr, prefix_block_tokens=BLOCK,
            prefix_text=np.zeros(14, np.int32), parent=np.array([-1, 0], np.int32),
            gap_s=np.array([0.0, 10.0]), session=np.zeros(2, np.int32), answered=np.ones(2, bool),
        )  # fmt: skip
        cluster = make_cluster(
            work, n_blocks=20, n_decode=n_decode, transfer=transfer, kv_tiers=config,
            kv_bytes_per_token=BYTES // BLOCK, tiers=tiers_of(config),
            step_time=make_step_time(8, 1, 8, constant=0.25, prefill=(0.0, 0.125)),
        )  # fmt: skip
        prepare(cluster)
        record = cluster.run()
        workers = cluster.arrays.engines.workers
        assert (workers["n_blank"] + workers["n_idle"] == 20).all()
        assert cluster.arrays.clock["n_flows"][0] == 0
        return record

    return run


def test_a_prefill_worker_pulls_the_answer_over_the_links_of_kv_transfers(turns):
    two = turns().requests[1]
    assert two["cached_tokens"] == 16
    assert two["prefill_start_s"] - two["arrival_s"] == PULL_S
    # It computes 10 tokens and hands over what the decode worker lacks: 3 of 7 blocks.
    assert two["transfer_start_s"] - two["prefill_start_s"] == 10 * 0.125
    assert two["transfer_end_s"] - two["transfer_start_s"] == 0.5 + 3 * 0.25 + 3 * BYTES / 4.0
    record = turns()
    assert record.tiers.hits.tolist() == [[0], [8]]
    assert record.tiers.loaded.tolist() == [2]
    assert record.tiers.loads["saved_s"].tolist() == [0.0, 8 * 0.125]


def test_answers_are_computed_again_where_that_is_faster_or_nothing_is_pulled(turns):
    plain = turns("recompute")
    assert plain.requests["cached_tokens"].tolist() == [0, 8]
    assert plain.requests["prefill_start_s"][1] == plain.requests["arrival_s"][1]
    cheaper = turns(kv_load="cheaper")  # 8 tokens take a second
    assert cheaper.requests.tobytes() == plain.requests.tobytes()
    fast = turns(kv_load="cheaper", transfer=TransferModel(0.0, 0.0, 17.0, "test"))
    assert fast.requests["cached_tokens"].tolist() == [0, 16]


@pytest.mark.parametrize("while_s", [0.25, 0.9])  # descriptors are posted; bytes flow
@pytest.mark.parametrize("what", ["decode", "prefill", "cancel"])
def test_nothing_is_left_of_a_pull_that_is_cut(turns, what, while_s):
    at = float(turns().requests["arrival_s"][1]) + while_s
    if what == "cancel":
        plan = FaultPlan((), cancel_s=np.array([np.inf, while_s]))
    else:
        plan = FaultPlan((Fault("fail", what, 0, at, 5.0),))
    record = turns(prepare=lambda cluster: setattr(cluster, "faults", plan))
    two = record.requests[1]
    if what == "cancel":
        assert two["outcome"] == CANCELLED
        return
    assert record.completed.all()
    assert record.retries.tolist() == [0, 1]
    # What a dead decode worker had is lost; a dead prefill worker pulls all again.
    assert two["cached_tokens"] == {"decode": 8, "prefill": 16}[what]


@on_each("text", ["host", "host:1GB", "host:1GB,load=1GB", "host:1GB/s,load=1GB/s",
     "host:1GB,load=0GB/s",
     "host:1GB,load=1GB/s,write=never", "host:1GB,load=1GB/s,color=red", "H:1GB,load=1GB/s",
     "host:1GB,load=1GB/s,exclusive=yes", "host:1GB,load=1GB/s,evict=mru",
     "host:1GB,load=1GB/s,exclusive=yes,write=back,evict=arc", "host:1GB,load=1GB/s,load=2GB/s",
     "host:1GB,load=1GB/s,write=back,evict=session"])  # fmt: skip
def test_bad_spellings_are_refused(text):
    with pytest.raises(InputError) as refused:
        parse_tier(text)
    assert refused.value.field == "kv_tier"


def test_spelling():
    assert SimpleNamespace(**parse_tier("host:126GB,load=20GB/s")._asdict()) == SimpleNamespace(
        name="host", n_bytes=126e9, load=20e9, store=20e9, total=np.inf, latency_s=0.0,
        scope="worker", write="through", exclusive=False, evict="lru",
    )  # fmt: skip
    assert parse_tier("a:1GiB,load=1MB/s,latency=1s,scope=node").total == 1e6


def test_a_store_moves_no_more_than_its_bandwidth():
    """Blocks of four GPUs go over a store's link whole; each GPU's part over its own."""
    for scope, total in (("worker", ",total=2GB/s"), ("cluster", ",total=2GB/s"), ("node", "")):
        config = make_config({
            "trace": "reference-moe", "topology": "1C", "tensor_parallel_size": 4,
            "workload": "chat", "sessions": 20, "turns": "3", "think_time": "0", "output_len": 20,
            "prefix_len": 2000, "num_prefixes": 4, "num_gpu_blocks_override": 300,
            "kv_tier": (f"host:9GB,load=2GB/s,scope={scope}{total}",),
        })  # fmt: skip
        result = simulate(config)
        moved = result.summary["kv_tiers"]["tiers"]["host"]["loaded_gb"]
        loads = result.record.tiers.loads
        assert moved > 0.1
        assert loads["waited_s"].sum() >= moved / 2 - 1e-9, scope


def test_sessions_under_pressure_find_less_than_in_a_tier_without_bounds():
    """Each eviction evicts and finds something, one after the other finds no more than all."""
    found = {}
    for size, evict in ((9e12, "lru"), (6e8, "lru"), (6e8, "arc"), (6e8, "session")):
        config = make_config({
            "trace": "reference-moe", "topology": "1C", "workload": "chat", "sessions": 60,
            "turns": "4", "think_time": "exponential:20", "request_rate": 3, "output_len": 20,
            "prefix_len": 512, "num_gpu_blocks_override": 300,
            "kv_tier": (f"host:{size:.0f}B,load=20GB/s,evict={evict}",),
        })  # fmt: skip
        tiers = simulate(config).record.tiers
        found[size, evict] = int(tiers.hits.sum())
        assert (tiers.evicted[0] > 0) == (size == 6e8)
    most = found.pop((9e12, "lru"))
    assert all(0 < hits < most for hits in found.values()), (most, found)
