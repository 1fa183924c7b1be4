"""The compiled cluster against its brute-force twin, and engines by hand.

The twin (`twin.Twin`) is given random small clusters: KV caches that hardly hold the largest
request, requests that come together, prompts that begin alike. Every step, time and outcome must be
the same.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.step_time import StepCost
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.simulator import cluster as cluster_module
from eldr_sim.simulator import loop, state
from eldr_sim.simulator.cluster import Cluster, ClusterSpec, EngineSpec
from eldr_sim.simulator.expert_union import PromptRows
from eldr_sim.simulator.replay import Replay, rank_masks
from eldr_sim.simulator.transfer import TransferModel
from eldr_sim.traces.prompts import assign_blocks, chain_blocks
from eldr_sim.traces.workload import Workload

from .twin.engine import Twin, prompt_sources

# -- random clusters ---------------------------------------------------------------------------

LONGEST = 300  # tokens of a context that the tables know
N_TRACE = 6  # requests of the trace


def random_cost(rng, seqs, budget, n_experts, n_layers, grid):
    """Step times that are all random; with a ``grid`` all are whole parts of a second.

    Sums of those are exact, so steps of several workers end together and at arrivals.
    """

    def draw(*shape):
        if grid:
            return rng.integers(1, 9, shape) / grid
        return (0.1 + rng.random(shape)) * 1e-3

    tokens = max(seqs, budget) + 1
    attention = draw(seqs + 1, 4)
    if grid:
        attention[:] = attention[:, :1]  # the mean context is no whole number
    return StepCost(
        n_moe_layers=n_layers,
        n_experts=n_experts,
        moe_s=draw(seqs + 1, n_experts + 1),
        mixed_moe_s=draw(budget + 1, n_experts + 1),
        uniform_moe_s=draw(tokens),
        dense_s=draw(tokens),
        collectives_s=draw(tokens),
        host_s=float(draw()),
        head_s=draw(seqs + 1),
        attention_s=attention,
        context_stride=16,
        prompt_alone_s=np.cumsum(draw(LONGEST)),
        prompt_share_s=np.cumsum(draw(LONGEST)),
        prompt_floor_s=float(draw()),
        prompt_token_s=float(draw()),
    )


def random_bits(rng, rows, n_layers, n_experts, top_k=3):
    words = -(-n_experts // 64)
    bits = np.zeros((rows, n_layers, words), np.uint64)
    for row in bits.reshape(-1, words):
        for expert in rng.choice(n_experts, top_k, replace=False).tolist():
            row[expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
    return bits.reshape(rows, -1)


def random_workload(rng, n, gap_s, prefix, longest_prompt, longest_output, rounded=0.0):
    """Return requests of which many come at once, and whose prompts may begin alike.

    With ``prefix`` tokens a block, prompts are walks down a tree of blocks, cut anywhere.
    """
    arrival = np.cumsum(gap_s * rng.exponential(size=n))
    if rounded:
        arrival = np.round(arrival / rounded) * rounded
    together = rng.random(n) < 0.3  # with the one before
    arrival = arrival[np.maximum.accumulate(np.where(together, 0, np.arange(n)))]
    lengths, ids, indptr = rng.integers(1, longest_prompt + 1, n), [], [0]
    if prefix:
        for length in lengths.tolist():
            path = np.minimum(rng.integers(3, size=-(-length // prefix)), 1)
            full = length // prefix
            blocks = -(-length // prefix) if rng.random() < 0.7 else int(rng.integers(full + 1))
            if blocks > full:
                path[full] = 2 + length  # a partial block's id stands for its length too
            ids += path[:blocks].tolist()
            indptr.append(len(ids))
    indptr = np.array(indptr if prefix else [0] * (n + 1))
    hashes = chain_blocks(np.array(ids, np.uint64), indptr)
    source, request, _ = assign_blocks(hashes, indptr, rng.integers(N_TRACE, size=n))
    return Workload(
        arrival_s=arrival,
        prompt_len=lengths.astype(np.int32),
        output_len=rng.integers(1, longest_output + 1, n).astype(np.int32),
        trace_request=request.astype(np.int32),
        decode_request=rng.integers(N_TRACE, size=n).astype(np.int32),
        replay_offset=rng.integers(9, size=n).astype(np.int32),
        domain=np.zeros(n, np.int16),
        session=np.arange(n, dtype=np.int32),
        prefix_hash=hashes,
        prefix_indptr=indptr.astype(np.int64),
        prefix_trace_request=source.astype(np.int32),
        prefix_block_tokens=prefix,
        description={},
    )


class Books:
    """A policy that keeps its own books of who is where: it hears of completions."""

    name = "books"

    def __init__(self, n_workers):
        self.placed = [set() for _ in range(n_workers)]

    def select(self, request, loads):
        assert loads.tolist() == [len(placed) for placed in self.placed]
        lengths = [len(placed) for placed in self.placed]
        worker = lengths.index(min(lengths))
        self.placed[worker].add(request.request_id)
        return worker

    def on_complete(self, request_id, worker):
        self.placed[worker].remove(request_id)


def policies_of(spec, prefill, decode, prefix):
    """Return new policies: the compiled cluster and its twin get their own."""

    def context(n, stream):
        return PolicyContext(
            n_workers=n, rng=np.random.default_rng(stream), prefix_block_tokens=prefix or 16
        )

    first = registry.prefill_policy(prefill, context(spec.n_prefill, 1)) if spec.n_prefill else None
    if decode == "books":
        return first, Books(spec.n_decode)
    return first, registry.decode_policy(decode, context(spec.n_decode, 2))


def make_pair(arguments, prefill="least_loaded", decode="jsq"):
    """Return functions that make the compiled cluster and its twin."""

    def policies():
        prefix = arguments["workload"].prefix_block_tokens
        first, second = policies_of(arguments["spec"], prefill, decode, prefix)
        return {"prefill_policy": first, "decode_policy": second}

    return (
        lambda: Cluster(**arguments, **policies(), signatures=lambda ranges: (0, None)),
        lambda: Twin(**arguments, **policies()),
    )


TIMES = (
    "sent_s", "prefill_start_s", "prefill_end_s", "transfer_start_s", "transfer_end_s",
    "decode_start_s", "first_token_s", "finish_s",
)  # fmt: skip
NUMBERS = (
    "prefill_worker", "decode_worker", "preemptions", "cached_tokens", "decode_cached_tokens",
)  # fmt: skip
COUNTS = ("worker", "batch", "joined", "chunks", "chunk_tokens", "active", "busiest", "context")


def assert_same(record, twin):
    """Compare a run with its twin's, step by step and request by request."""
    n_prefill, close = twin.spec.n_prefill, {"rtol": 1e-12, "atol": 1e-15}
    of_pool = [], []
    for step in twin.steps:
        if step["worker"] >= n_prefill:
            of_pool[1].append(step | {"worker": step["worker"] - n_prefill})
        elif step["end"] <= record.end_s:
            of_pool[0].append(step)
    for steps, twins in zip((record.prefill_steps, record.decode_steps), of_pool, strict=True):
        got = [dict(zip(COUNTS, row, strict=True)) for row in steps[list(COUNTS)].tolist()]
        assert got == [{name: step[name] for name in COUNTS} for step in twins]
        for name in ("start", "end"):
            np.testing.assert_allclose(steps[name], [step[name] for step in twins], **close)
    requests = twin.requests[: twin.arrived]
    assert record.outcomes() == [r.outcome for r in requests]
    for name in NUMBERS:
        assert record.requests[name].tolist() == [getattr(r, name) for r in requests], name
    done = record.completed if n_prefill == 0 else slice(None)
    for name in TIMES:
        # Co-located workers note the end of a prompt when the request ends.
        which = done if name in ("prefill_end_s", "decode_start_s") else slice(None)
        mine = np.array([getattr(r, name) for r in requests])
        np.testing.assert_allclose(record.requests[name][which], mine[which], **close, err_msg=name)
    gaps = np.array(twin.gaps).reshape(-1, 2)
    np.testing.assert_allclose(record.gaps["last_token_s"], gaps[:, 0], **close)
    np.testing.assert_allclose(record.gaps["resumed_s"], gaps[:, 1], **close)
    ended = twin.now if twin.open_measured == 0 else twin.time_limit_s
    np.testing.assert_allclose(record.end_s, ended, **close)


RANDOM_CLUSTER = {
    "seed": st.integers(0, 2**32),
    "topology": st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 3), (0, 1), (0, 1), (0, 2), (0, 3)]),
    "prefix": st.sampled_from([0, 4, 2, 7]),
    "grid": st.sampled_from([0, 1024]),
    "n_ranks": st.sampled_from([1, 2, 3]),
    "own_experts": st.booleans(),
    "async_scheduling": st.booleans(),
    "slow_transfers": st.booleans(),
}


def random_cluster(
    seed, topology, prefix, grid, n_ranks, own_experts, async_scheduling, slow_transfers
):
    """Return the arguments of a random cluster, but for its policies.

    Most have KV blocks for hardly more than the largest request, and requests that come faster
    than they are served.
    """
    rng = np.random.default_rng(seed)

    def some(*values):
        return values[rng.integers(len(values))]

    n_layers, n_experts = int(rng.integers(1, 5)), some(5, 64, 70)
    trace_layers = int(rng.integers(1, n_layers + 1))
    gap_s = some(0.0, 0.003, 0.01, 0.03)
    workload = random_workload(
        rng, int(rng.integers(1, 21)), gap_s, prefix, some(8, 40), some(4, 25, 25),
        1 / 256 if grid else 0.0,
    )  # fmt: skip
    block_size, seqs = some(1, 2, 3, 4, 8), some(1, 2, 3, 4, 5, 6, 7)
    need = int((workload.prompt_len + workload.output_len).max())
    n_blocks = -(-need // block_size) + some(-1, 0, 0, 0, 1, 2, 3, 30)
    engines = []
    for budget in (some(1, 2, 3, 5, 8, 13, 30, 60), some(2, 7, 30)):
        cost = random_cost(rng, seqs, budget, n_experts, n_layers, grid)
        step_time = SimpleNamespace(cost=cost, n_moe_layers=n_layers)
        engines.append(EngineSpec(step_time, seqs, budget, max(1, n_blocks)))
        seqs = int(rng.integers(1, 7))
    decode, prefill = engines
    unit = 1 / grid if grid else 7.7e-4
    transfer = TransferModel(unit * some(0, 1, 2), 0.0, 1e30, "test")
    if slow_transfers:
        egress, ingress = 1e4 * (1 + rng.random(2))
        transfer = TransferModel(
            3 * unit, unit / 7, float(egress), "test", some(None, float(ingress))
        )
    spec = ClusterSpec(
        n_prefill=topology[0],
        n_decode=topology[1],
        prefill=prefill if topology[0] else decode,
        decode=decode,
        max_model_len=some(LONGEST, LONGEST, LONGEST, 45),
        block_size=block_size,
        transfer=transfer,
        load_report_delay_s=some(0.0, 0.0, 5 * unit, 1.0),
        max_concurrency=some(None, None, None, 1, 3, 6),
        enable_prefix_caching=rng.random() < 0.9,
        async_scheduling=async_scheduling,
        capture_s=some(0.0, unit),
        routing_s=some(0.0, 0.0, 2 * unit),
        routing_token_s=some(0.0, 0.0, unit),
    )
    length = rng.integers(1, 9, N_TRACE)
    bits = random_bits(rng, int(length.sum()), n_layers, n_experts)
    prompts, masks = None, None
    if topology[0] == 0 or own_experts:
        prompts = prompt_rows_of(rng, trace_layers, n_experts, workload)
    if n_ranks > 1:
        ranks = rng.integers(n_ranks, size=(sum(topology), trace_layers, n_experts))
        masks = rank_masks(ranks, n_ranks, n_layers)
    last = float(workload.arrival_s[-1])
    return {
        "spec": spec,
        "model": SimpleNamespace(n_kv_tensors=some(1, 2), kv_bytes_per_token=3),
        "workload": workload,
        "replay": Replay(bits, np.cumsum(length) - length, length),
        "window": some((0.0, np.inf), (0.0, np.inf), (last * rng.random() / 2, last)),
        "time_limit_s": some(np.inf, np.inf, np.inf, 3 * float(rng.random())),
        "expert_masks": masks,
        "prompts": prompts,
    }


def prompt_rows_of(rng, trace_layers, n_experts, workload):
    length = rng.integers(1, 12, N_TRACE)
    bits = random_bits(rng, int(length.sum()), trace_layers, n_experts)
    bits.flags.writeable = False
    return PromptRows(
        bits,
        np.cumsum(length) - length,
        length.astype(np.int32),
        workload.prefix_indptr,
        workload.prefix_trace_request,
        workload.prefix_block_tokens,
        np.zeros(bits.shape[1], np.uint64),
    )


POLICIES = {
    "prefill": st.sampled_from(["least_loaded", "round_robin", "prefix_hash"]),
    "decode": st.sampled_from(["jsq", "round_robin", "p2c", "books"]),
}


@settings(max_examples=350)
@given(**POLICIES, **RANDOM_CLUSTER)
def test_cluster_equals_its_twin(prefill, decode, **drawn):
    make, make_twin = make_pair(random_cluster(**drawn), prefill, decode)
    cluster, twin = make(), make_twin()
    assert_same(cluster.run(), twin.run())
    if decode == "books":
        assert cluster.routers[1].policy.placed == twin.policies[1].placed


def test_a_long_run_sees_every_kind_of_hit():
    """The property above would be empty if nothing were shared, evicted or preempted."""
    arguments = random_cluster(3, (2, 2), 4, 0, 2, False, True, True)
    rng, spec = np.random.default_rng(7), arguments["spec"]
    arguments["workload"] = random_workload(rng, 400, 0.01, 4, 40, 25)
    few = {"n_blocks": 22, "max_num_seqs": 4}
    arguments["spec"] = dataclasses.replace(
        spec,
        block_size=3,
        prefill=dataclasses.replace(spec.prefill, **few),
        decode=dataclasses.replace(spec.decode, **few),
        max_concurrency=None,
        max_model_len=LONGEST,
        enable_prefix_caching=True,
    )
    arguments |= {"window": (0.0, np.inf), "time_limit_s": np.inf}
    make, make_twin = make_pair(arguments)
    record, twin = make().run(), make_twin().run()
    assert_same(record, twin)
    prompts, hit = record.requests["prompt_len"], record.requests["cached_tokens"]
    assert record.prefill_steps["chunk_tokens"].sum() == (prompts - hit).sum()
    most = (prompts - 1) // 3 * 3
    happened = {
        "miss": np.sum(hit == 0),
        "partial": np.sum((hit > 0) & (hit < most)),
        "full": np.sum((hit > 0) & (hit == most)),
        "evicted": sum(worker.blocks.evictions for worker in twin.workers[0]),
        "preempted": record.requests["preemptions"].sum(),
    }
    assert min(happened.values()) >= 30, happened


# -- many steps a call, or one -----------------------------------------------------------------


@settings(max_examples=60)
@given(**POLICIES, **RANDOM_CLUSTER, cut_s=st.sampled_from([0.001, 0.02, 1 / 256]))
def test_macro_steps_equal_single_steps(prefill, decode, cut_s, **drawn):
    """However often the loop comes back to Python, the bytes are the same."""
    make, _ = make_pair(random_cluster(**drawn), prefill, decode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_module, "_EVENTS_A_CALL", 1)
        by_event = make().run()
    short_log = make()
    short_log.logs = np.zeros(1, state.STEP), np.zeros(1, state.STEP)
    short_log.gaps = np.zeros(1, state.GAP)
    by_time, until = make(), 0.0
    while until < min(0.5, by_time.time_limit_s) and by_time.advance(until) == loop.UNTIL:
        until += cut_s
    whole = make().run()
    for other in (by_event, short_log.run(), by_time.run()):
        for name in ("requests", "prefill_steps", "decode_steps", "gaps"):
            assert getattr(other, name).tobytes() == getattr(whole, name).tobytes()
        assert other.end_s == whole.end_s


# -- signatures --------------------------------------------------------------------------------


def expand(ranges):
    """Return (trace request, token) of every token of ranges."""
    return [(request, token) for request, start, stop in ranges for token in range(start, stop)]


class Reader(Books):
    """Sees to it that a prompt's signature is that of a prefill from nothing."""

    def __init__(self, n_workers, workload):
        super().__init__(n_workers)
        self.workload = workload

    def select(self, request, loads):
        assert expand(request.signature) == prompt_sources(self.workload, request.request_id)
        return super().select(request, loads)


def run_and_read_signatures(arguments, told=None):
    """Run a cluster whose router reads the signatures; ``told`` stands for the workload there."""
    arguments = arguments | {"window": (0.0, np.inf), "time_limit_s": np.inf}
    spec, workload = arguments["spec"], arguments["workload"]
    first, _ = policies_of(spec, "round_robin", "jsq", workload.prefix_block_tokens)
    reader = Reader(spec.n_decode, told or workload)
    return Cluster(
        **arguments, prefill_policy=first, decode_policy=reader,
        signatures=lambda ranges: (0, ranges),
    ).run()  # fmt: skip


PAIRS = st.sampled_from([(1, 1), (2, 1), (3, 3)])


@settings(max_examples=60)
@given(
    **RANDOM_CLUSTER | {"topology": PAIRS, "prefix": st.sampled_from([2, 4, 16])},
)
def test_signatures_equal_those_of_cold_prefills(**drawn):
    """A cached block brings the rows of the prompt that was computed into it."""
    run_and_read_signatures(random_cluster(**drawn))


def test_false_sharing_is_noticed():
    """The test above can fail: here every prompt's blocks pass for those of all others."""
    arguments = random_cluster(5, (1, 1), 4, 0, 1, False, False, False)
    workload = random_workload(np.random.default_rng(3), 40, 0.01, 4, 40, 5)
    spec = dataclasses.replace(
        arguments["spec"], block_size=2, enable_prefix_caching=True, max_model_len=LONGEST
    )
    spec = dataclasses.replace(spec, prefill=dataclasses.replace(spec.prefill, n_blocks=1000))
    place = np.arange(len(workload.prefix_hash)) - np.repeat(
        workload.prefix_indptr[:-1], np.diff(workload.prefix_indptr)
    )
    arguments |= {"spec": spec, "workload": workload}
    run_and_read_signatures(arguments)
    arguments["workload"] = dataclasses.replace(workload, prefix_hash=place.astype(np.uint64))
    with pytest.raises(AssertionError):
        run_and_read_signatures(arguments, told=workload)


# -- by hand -----------------------------------------------------------------------------------


def by_hand(step_s=0.0, token_s=0.0, chunk_step_s=0.0, seqs=8, tokens=300):
    """Step times of which a test can think.

    ``step_s`` seconds where a step decodes, and where it computes contexts ``chunk_step_s`` and
    ``token_s`` a token of them.
    """
    cost = StepCost(
        n_moe_layers=2,
        n_experts=70,
        moe_s=np.zeros((seqs + 1, 71)),
        mixed_moe_s=np.zeros((tokens + 1, 71)),
        uniform_moe_s=np.zeros(tokens + 1),
        dense_s=np.zeros(tokens + 1),
        collectives_s=np.zeros(tokens + 1),
        host_s=0.0,
        head_s=np.zeros(seqs + 1),
        attention_s=np.full((seqs + 1, 2), float(step_s)),
        context_stride=16,
        prompt_alone_s=np.zeros(tokens + 1),
        prompt_share_s=token_s * np.arange(tokens + 1.0),
        prompt_floor_s=float(chunk_step_s),
        prompt_token_s=0.0,
    )
    return SimpleNamespace(cost=cost, n_moe_layers=2, n_experts=70)


@pytest.fixture
def one_decode_worker(make_cluster, make_workload):
    """Run requests whose prompts take no time; a decode step takes 1 s, a recomputed token 0.5."""

    def run(arrival_s, prompt_len, output_len, *, latency_s=0.0, watch=None, **engine):
        cluster = make_cluster(
            make_workload(arrival_s, prompt_len, output_len),
            prefill={"step_time": by_hand()},
            decode={"step_time": by_hand(1.0, 0.5), **engine},
            transfer=TransferModel(latency_s, 0.0, 1e30, "test"),
            decode_policy=Books(1),
        )
        record = cluster.run() if watch is None else run_watched(cluster, watch)
        assert record.completed.all()
        return record, cluster.arrays.reported.tolist()

    return run


def run_watched(cluster, watch):
    """Run a cluster event by event; ``watch`` is called with it after each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_module, "_EVENTS_A_CALL", 1)
        return cluster.run(lambda _: watch(cluster))


def free_blocks(cluster):
    workers = cluster.arrays.engines.workers
    return (workers["n_blank"] + workers["n_idle"]).tolist()


def columns(record, *names):
    return [record.decode_steps[name].tolist() for name in names]


def test_first_come_first_served_by_places(one_decode_worker):
    record, order = one_decode_worker([0.0, 0.1, 0.2, 0.3], 4, [3, 1, 2, 1], max_num_seqs=2)
    # Place 1: request 0 in steps 0-3. Place 2: request 1 joins at 1, 2 at 2, 3 at 3 (place 1).
    assert record.requests["decode_start_s"] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert record.requests["finish_s"].tolist() == [3.0, 2.0, 4.0, 4.0]
    assert order == [1, 0, 2, 3]


def test_a_large_request_at_the_head_holds_the_small_ones_back(one_decode_worker):
    """10 blocks of 4: request 0 holds 6, so 1 (5 blocks) waits, and 2 (1 block) behind it."""
    record, order = one_decode_worker([0.0, 0.1, 0.2], [21, 17, 1], [3, 1, 1], n_blocks=10)
    assert record.requests["decode_start_s"] == pytest.approx([0.0, 3.0, 3.0])
    assert order == [0, 1, 2]


def test_blocks_are_reserved_before_the_transfer(one_decode_worker):
    held = []

    def watch(cluster):
        now = (float(cluster.arrays.clock["now"][0]), 10 - free_blocks(cluster)[1])
        if not held or now != held[-1]:
            held.append(now)

    one_decode_worker([0.0], [9], [4], latency_s=2.5, n_blocks=10, watch=watch)
    # 3 blocks while the transfer flies, and still at 12 tokens; all free at the end.
    steps = [(3.5, 3), (4.5, 3), (5.5, 3)]
    assert held == [(0.0, 0), (0.0, 3), (2.5, 3), *steps, (6.5, 0)]


def test_preemption_by_hand(one_decode_worker):
    """Blocks of 4 tokens, 4 blocks, prompts of 4 (context 3 when they join) and 6 outputs.

    Both grow to 2 blocks in their second step and want a third in their sixth. Request 1, which
    joined last, gives way at 5: 5 of its tokens are out. Request 0 ends at 6, and request 1
    recomputes 3 + 5 tokens, 0.5 s each, in the step that decodes its last token.
    """
    record, _ = one_decode_worker([0.0, 0.0], 4, 6, n_blocks=4)
    assert record.requests["preemptions"].tolist() == [0, 1]
    assert columns(record, "batch", "chunk_tokens", "joined", "chunks") == [
        [2, 2, 2, 2, 2, 1, 1], [0, 0, 0, 0, 0, 0, 8], [2, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1]
    ]  # fmt: skip
    assert record.requests["finish_s"].tolist() == [6.0, 6.0 + 1.0 + 4.0]
    assert record.gaps.tolist() == [(5.0, 11.0)]  # from its fifth token at 5 to its sixth at 11


def test_recomputation_is_chunked_to_the_token_budget(one_decode_worker):
    """As above with 4 tokens a step: chunks of 4, 4 and 0 beside the token that is decoded."""
    record, _ = one_decode_worker([0.0, 0.0], 4, 6, n_blocks=4, max_num_batched_tokens=4)
    assert columns(record, "batch", "chunk_tokens") == [
        [2, 2, 2, 2, 2, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 4, 4, 0]
    ]  # fmt: skip
    assert record.requests["finish_s"][1] == 6.0 + 2.0 + 2.0 + 1.0


def test_blocks_of_the_next_step_are_not_given_away(one_decode_worker):
    """Request 0 wants its last block at 2, when request 1 could have had it."""
    record, order = one_decode_worker([0.0, 0.5], [7, 3], [4, 1], n_blocks=3)
    assert record.requests["preemptions"].tolist() == [0, 0]
    assert order == [1, 0]
    record, order = one_decode_worker([0.0, 1.5], [7, 3], [4, 1], n_blocks=3)
    assert record.requests["preemptions"].tolist() == [0, 0]
    assert order == [0, 1]


def test_a_window_goes_around_and_a_block_lasts(make_cluster, make_workload):
    """Three tokens of one request: 2 + 1 + 2 distinct experts, at 32, 33 and 34 tokens."""
    workload = make_workload([1.0], [32], [3])
    workload.replay_offset[:] = 1
    step_time = by_hand()
    step_time.n_moe_layers, step_time.n_experts = 1, 3
    step_time.cost = step_time.cost._replace(
        n_moe_layers=1,
        moe_s=np.tile([0.0, 1.0, 2.0, 3.0], (9, 1)),
        host_s=0.5,
        attention_s=np.tile([0.0, 16.0, 32.0], (9, 1)),  # 1 s a token, beyond the last knot too
    )
    cluster = make_cluster(
        workload, step_time=step_time, prefill={"step_time": by_hand()}, decode={"n_blocks": 9}
    )
    window = cluster.requests["window_row"][0]
    cluster.requests["window_len"] = 2
    cluster.arrays.bits[window : window + 2] = [[0b1], [0b110]]
    record = cluster.run()
    # 0.5 on the host, 1 s an expert, 1 s a token of context.
    assert record.decode_steps["end"].tolist() == [35.5, 70.0, 106.5]
    assert columns(record, "active", "busiest", "context") == [[2, 1, 2]] * 2 + [[32, 33, 34]]
    assert record.requests["first_token_s"].tolist() == [35.5]
    assert free_blocks(cluster)[1] == 9


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(2, 6),
    n_prefill=st.integers(0, 2),
    prefill_budget=st.sampled_from([1, 3, 100]),
)
def test_requests_of_one_time_share_a_step_whatever_the_order_of_events(
    make_cluster, make_workload, seed, n, n_prefill, prefill_budget
):
    """The engine may wake several times before a step begins: what it has scheduled stays.

    Prompts take no time, but with few tokens a step so many events that the decode worker wakes
    for each of them.
    """
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(2, 30, n), rng.integers(1, 9, n)
    cluster = make_cluster(
        make_workload(np.full(n, 0.25), prompts, outputs),
        n_prefill=n_prefill,
        prefill={"step_time": by_hand(), "max_num_batched_tokens": prefill_budget},
        decode={"step_time": by_hand(1.0), "max_num_batched_tokens": 300},
    )
    record = cluster.run()
    alive = [int((outputs > step).sum()) for step in range(outputs.max())]
    assert columns(record, "batch", "joined") == [alive, [n] + [0] * (len(alive) - 1)]
    assert columns(record, "start", "end") == [
        [0.25 + step + later for step in range(len(alive))] for later in (0.0, 1.0)
    ]


@pytest.mark.parametrize(("async_scheduling", "joins_at"), [(False, 1.0), (True, 2.0)])
@pytest.mark.parametrize("comes_at", [0.5, 1.0])
def test_async_scheduling_has_planned_the_next_step_already(
    make_cluster, make_workload, async_scheduling, joins_at, comes_at
):
    """Request 1 comes in the first step of 1 s, or as it ends."""
    cluster = make_cluster(
        make_workload([0.0, comes_at], 4, [5, 2]),
        n_prefill=0,
        step_time=by_hand(1.0),
        async_scheduling=async_scheduling,
    )
    requests = cluster.run().requests
    assert requests["prefill_start_s"].tolist() == [0.0, joins_at]
    assert requests["finish_s"].tolist() == [5.0, joins_at + 2.0]


# -- prefill workers by hand -------------------------------------------------------------------


@pytest.fixture
def one_prefill_worker(make_cluster, make_workload):
    """Run prompts; a step takes 1 s, and each cache is pulled ``pull_s`` after its prompt's end."""

    def run(arrival_s, prompt_len, *, pull_s=0.0, **engine):
        cluster = make_cluster(
            make_workload(arrival_s, prompt_len, 1),
            prefill={"step_time": by_hand(chunk_step_s=1.0), **engine},
            decode={"step_time": by_hand(2.0**-10)},
            transfer=TransferModel(pull_s, 0.0, 1e30, "test"),
        )
        record = cluster.run()
        assert record.completed.all()
        names = ["start", "end", "chunks", "chunk_tokens"]
        return record.requests, record.prefill_steps[names].tolist()

    return run


def test_chunks_fill_the_budget_and_begun_prompts_go_first(one_prefill_worker):
    requests, steps = one_prefill_worker([0.0, 0.0, 0.5], [5, 17, 4], max_num_batched_tokens=10)
    # Request 1 begins beside 0, fills a step alone, and leaves room for all of 2 at its end.
    assert steps == [(0.0, 1.0, 2, 10), (1.0, 2.0, 1, 10), (2.0, 3.0, 2, 6)]
    assert requests["prefill_start_s"].tolist() == [0.0, 0.0, 2.0]
    assert requests["prefill_end_s"].tolist() == [1.0, 3.0, 3.0]
    assert requests["prefill_worker"].tolist() == [0, 0, 0]


def test_places_bound_the_prompts_of_a_step(one_prefill_worker):
    requests, steps = one_prefill_worker([0.0] * 5, 2, max_num_seqs=2)
    assert [step[2:] for step in steps] == [(2, 4), (2, 4), (1, 2)]
    assert requests["prefill_end_s"].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_prompt_without_blocks_waits_and_nobody_overtakes_it(one_prefill_worker):
    """Blocks of 4, 5 blocks: request 0 holds 3 until pulled at 3.5, so 1 (3 blocks) waits."""
    requests, steps = one_prefill_worker([0.0, 0.1, 0.2], [9, 12, 1], n_blocks=5, pull_s=2.5)
    assert steps == [(0.0, 1.0, 1, 9), (3.5, 4.5, 2, 13)]
    assert requests["prefill_start_s"].tolist() == [0.0, 3.5, 3.5]


def test_an_idle_worker_starts_at_once_and_a_busy_one_at_its_next_step(one_prefill_worker):
    requests, _ = one_prefill_worker([0.25, 0.5, 7.0], 4)
    assert requests["prefill_start_s"].tolist() == [0.25, 1.25, 7.0]


# -- nothing gets stuck ------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 30),
    n_prefill=st.integers(0, 1),
    seqs=st.integers(1, 8),
    budget=st.integers(1, 64),
    block_size=st.sampled_from([1, 2, 16]),
    slack=st.integers(0, 6),
    latency_s=st.sampled_from([0.0, 1e-3, 0.5]),
    burst=st.booleans(),
    async_scheduling=st.booleans(),
)
def test_tiny_caches_end_and_give_every_block_back(
    make_cluster, make_workload, run_to_rest, seed, n, n_prefill, seqs, budget, block_size, slack,
    latency_s, burst, async_scheduling,
):  # fmt: skip
    """Equal arrivals, free transfers, caches that hold hardly more than the largest request."""
    rng = np.random.default_rng(seed)
    arrival = np.zeros(n) if burst else np.round(np.cumsum(rng.exponential(0.01, n)), 2)
    prompts, outputs = rng.integers(1, 40, n), rng.integers(1, 60, n)
    n_blocks = slack + int((-(-(prompts + outputs) // block_size)).max())
    cluster = make_cluster(
        make_workload(arrival, prompts, outputs), n_prefill=n_prefill, max_num_seqs=seqs,
        max_num_batched_tokens=budget, block_size=block_size, n_blocks=n_blocks, seed=seed,
        transfer=TransferModel(latency_s, 0.0, 1e30, "test"), async_scheduling=async_scheduling,
    )  # fmt: skip

    def watch(cluster):
        workers = cluster.arrays.engines.workers
        assert (workers["n_blank"] >= 0).all()
        assert (workers["n_blank"] <= n_blocks).all()
        assert (workers["batch"] + workers["prefilling"] <= seqs).all()

    run_watched(cluster, watch)
    record = run_to_rest(cluster)
    assert record.completed.all()
    assert free_blocks(cluster) == [n_blocks] * (n_prefill + 1)
    assert cluster.arrays.engines.workers["context"].tolist() == [0] * (n_prefill + 1)
    steps = record.decode_steps
    assert steps["batch"].sum() == outputs.sum()  # preemption loses time, never a token
    assert (steps["start"][1:] >= steps["end"][:-1]).all()  # one step at a time
    assert (steps["batch"] <= seqs).all()
    assert (steps["batch"] + steps["chunk_tokens"] <= budget).all()
    if n_prefill:  # each prompt token once
        assert record.prefill_steps["chunk_tokens"].sum() == prompts.sum()
        assert (record.prefill_steps["chunk_tokens"] <= budget).all()


def test_a_cluster_with_a_tiny_cache_ends(make_cluster, make_workload, run_to_rest):
    rng = np.random.default_rng(5)
    workload = make_workload(
        np.zeros(120), rng.integers(1, 50, 120), rng.integers(1, 60, 120), seed=5
    )
    cluster = make_cluster(workload, n_prefill=2, n_decode=2, n_blocks=28, max_num_seqs=16)
    record = run_to_rest(cluster)
    assert record.completed.all()
    assert record.requests["preemptions"].sum() > 20
    assert free_blocks(cluster) == [28] * 4
