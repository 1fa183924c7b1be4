"""Random small clusters, and what is drawn for them.

KV caches that hardly hold the largest request, requests that come together, prompts that begin
alike.
"""

import dataclasses
from types import SimpleNamespace
from typing import get_args

import numpy as np
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.acceptance import Acceptance
from eldr_sim.kernel_profiles.kernels.front_end import PARTS, FrontEndLatency
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.drafts import Draft
from eldr_sim.policies import registry
from eldr_sim.policies.base import Needs, PolicyContext, RouterPolicy
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.control.compiled_cluster import CompiledCluster
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.plane.front_end import FrontEndSpec, Mode
from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec, make_pools
from eldr_sim.simulator.setup.config.engine_rules import rules_of
from eldr_sim.simulator.setup.config.groups import EngineConfig, SchedulerConfig
from eldr_sim.simulator.setup.config.speculative import SpeculativeConfig
from eldr_sim.simulator.setup.memory import WindowBlocks
from eldr_sim.simulator.setup.replay import Replay, rank_masks
from eldr_sim.simulator.setup.speculation import Speculation
from eldr_sim.simulator.setup.transfer import TransferModel
from eldr_sim.traces.requests.logs.log_columns import chain_blocks
from eldr_sim.traces.requests.prefixes import assign_blocks
from eldr_sim.traces.workload import Workload

from ..random_rows import random_prompts, random_rows

LONGEST = 300  # tokens of a context that the tables know
N_TRACE = 6  # requests of the trace


def random_cost(rng, seqs, budget, n_experts, n_layers, grid, launches=False):
    """Step times that are all random; with a ``grid`` all are whole parts of a second.

    Sums of those are exact, so steps of several workers end together and at arrivals. Steps may
    wait for their launches there, or with ``launches``, where no two workers can end together but
    for the last bit.
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
        launch_s=(launches or grid > 0) * float(draw()) * rng.integers(3) * n_layers,
        prompt_launch_s=(launches or grid > 0) * float(draw()) * rng.integers(3) * n_layers * 4,
        graph_tokens=seqs // 3,
        prompt_graph_tokens=budget // 3,
    )


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
        text=request.astype(np.int32),
        decode_request=rng.integers(N_TRACE, size=n).astype(np.int32),
        replay_offset=rng.integers(9, size=n).astype(np.int32),
        domain=np.zeros(n, np.int16),
        session=np.arange(n, dtype=np.int32),
        prefix_hash=hashes,
        prefix_indptr=indptr.astype(np.int64),
        prefix_text=source.astype(np.int32),
        prefix_block_tokens=prefix,
        description={},
    )


class Books(RouterPolicy):
    """A policy that keeps its own books of who is where: it hears of completions."""

    name = "books"
    needs = Needs(ends=True)

    def __init__(self, n_workers):
        self.placed = [set() for _ in range(n_workers)]

    def select(self, request, workers):
        assert workers.loads.tolist() == [len(placed) for placed in self.placed]
        lengths = [len(placed) for placed in self.placed]
        worker = lengths.index(min(lengths))
        self.placed[worker].add(request.request_id)
        return worker

    def on_complete(self, request_id, worker):
        self.placed[worker].remove(request_id)


class Holds(RouterPolicy):
    """Joins the worker of the fewest tokens and holds requests while all are busy.

    It keeps what it was shown.
    """

    name = "holds"

    def __init__(self):
        self.seen = []

    def select(self, request, workers):
        columns = [column.tolist() for column in workers[:7]]
        clock = round(float(workers.now_s), 12), round(float(workers.signals_s), 12)
        self.seen.append((request.request_id, request.session, *columns, *clock))
        if workers.loads.min() > 1 and request.request_id % 4:
            return None
        tokens = workers.waiting_tokens + workers.running_tokens
        return int(np.lexsort((workers.waiting, workers.kv_usage, tokens))[0])


def policies_of(spec, prefill, decode, prefix):
    """Return new policies: each backend gets its own."""

    def context(n, stream):
        return PolicyContext(
            n_workers=n, rng=np.random.default_rng(stream), prefix_block_tokens=prefix or 16
        )

    first = None
    if spec.n_prefill:
        first = (
            Holds()
            if prefill == "holds"
            else registry.prefill_policy(prefill, context(spec.n_prefill, 1))
        )
    if spec.n_decode == 0:
        return first, None
    if decode == "holds":
        return first, Holds()
    if decode == "books":
        return first, Books(spec.n_decode)
    return first, registry.decode_policy(decode, context(spec.n_decode, 2))


def random_front_end(rng, mode, unit):
    """Return API servers whose times are whole units, so that events meet."""
    knots = np.array([0.0, 40.0])
    curves = {part: (knots, unit * rng.integers(0, 5, 2).cumsum()) for part in PARTS}
    return FrontEndSpec(
        FrontEndLatency(curves, None),
        mode,
        n_servers=int(rng.integers(1, 4)),
        threads=int(rng.integers(1, 3)),
        most=int(rng.integers(1, 5)),
        wait_s=unit * int(rng.integers(0, 4)),
    )


def random_speculation(rng, k, cost, method):
    """Return drafts whose passes take what ``cost`` says, and acceptances from none to all."""
    rates = np.sort(rng.choice([0.0, 0.3, 0.8, 1.0], k))[::-1]
    steps = None if method == "ngram" else SimpleNamespace(cost=cost)
    by_batch = None
    if rng.random() < 0.3:
        by_batch = ((1, 2, k), (3, 4, int(rng.integers(k + 1))), (5, 9, 0))
    config = SpeculativeConfig(
        method=method, num_speculative_tokens=k, num_speculative_tokens_per_batch_size=by_batch,
        lookup_hit_rate=float(rng.choice([1.0, 0.5])) if method == "ngram" else 1.0,
    )  # fmt: skip
    draft = Draft(steps, float(cost.host_s), kv_bytes_per_token=2, n_kv_tensors=1)
    by_row, key = bool(rng.random() < 0.3), int(rng.integers(2**63))
    return Speculation(config, {"": Acceptance(tuple(rates), "test")}, draft, by_row, key)


RANDOM_CLUSTER = {
    "seed": st.integers(0, 2**32),
    "topology": st.sampled_from(
        [(1, 1), (2, 1), (1, 2), (3, 3), (0, 1), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)]
    ),
    "prefix": st.sampled_from([0, 4, 2, 7]),
    "grid": st.sampled_from([0, 1024]),
    "n_ranks": st.sampled_from([1, 2, 3]),
    "own_experts": st.booleans(),
    "async_scheduling": st.booleans(),
    "slow_transfers": st.booleans(),
    "signal_intervals": st.sampled_from([0, 0, 1, 7]),
    "preempt_by_key": st.booleans(),
    "n_queue_keys": st.sampled_from([1, 1, 3, 50]),
    "aging": st.sampled_from([None, None, 0, 3, 30, 300]),
    "windows": st.sampled_from([None, None, WindowBlocks(2.5, 3, 1), (1, 5), (2, 9), (3, 2)]),
    "front_end": st.sampled_from([None, None, *get_args(Mode)]),
    "drafts": st.sampled_from([0, 0, 1, 2, 3, 5]),
    "threshold": st.sampled_from([None, None, 1, 4, 9]),
    "sglang": st.sampled_from([
        None, None, {}, {"scheduler_recv_interval": 3}, {"enable_mixed_chunk": True},
        {"schedule_conservativeness": 0.1},
        {"enable_mixed_chunk": True, "schedule_conservativeness": 0.3},
    ]),
}  # fmt: skip


def with_engines(spec, prefill, decode=None, **changes):
    """Return a cluster whose pools have other engines, and what else is given."""
    engines = {"prefill": prefill, "decode": decode or spec.decode}
    pools = tuple(pool._replace(engine=engines[pool.name]) for pool in spec.pools)
    return dataclasses.replace(spec, pools=pools, **changes)


def inputs_of(*, spec, model, prefill_policy, decode_policy, **arguments):
    """Return what a cluster runs, of a random one's arguments and policies."""
    policies = [prefill_policy] if spec.n_prefill else []
    policies += [decode_policy] if spec.n_decode else []
    shards = [model] * len(spec.pools)
    arguments = {"signatures": lambda ranges: (0, None)} | arguments
    return RunInputs(spec=spec, shards=shards, policies=policies, **arguments)


def cluster_of(**arguments):
    """Return the compiled cluster of a random one's arguments and policies."""
    return CompiledCluster(inputs_of(**arguments))


def reference_of(workers=None, **arguments):
    """Return the same as SimPy processes."""
    return ReferenceCluster(inputs_of(**arguments), workers)


def random_cluster(
    seed,
    topology,
    prefix,
    grid,
    n_ranks,
    own_experts,
    async_scheduling,
    slow_transfers,
    n_queue_keys=1,
    signal_intervals=0,
    preempt_by_key=False,
    aging=None,
    launches=False,
    windows=None,
    front_end=None,
    drafts=0,
    early=False,
    threshold=None,
    sglang=None,
):
    """Return the arguments of a random cluster, but for its policies.

    ``sglang``: options of SGLang's scheduler, whose rules engines have that hand nothing over.

    Most have KV blocks for hardly more than the largest request, and requests that come faster
    than they are served.
    """
    rng = np.random.default_rng(seed)
    drafts = drafts if topology[1] else 0  # who only computes prompts drafts nothing
    if sglang is not None and 0 in topology:
        drafts, windows = 0, None

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
    if isinstance(windows, tuple) and len(windows) == 2:
        groups, window = windows
        most = -(-(window - 1) // block_size) + 1
        windows = WindowBlocks(groups, most, groups=groups, window=window)
    windows = windows or WindowBlocks()
    beside = int(windows.of(np.array([need]), block_size)[0])
    if windows.groups:
        beside += windows.groups * some(windows.most, -(-need // block_size))
    n_blocks = beside - (-need // block_size) + some(-1, 0, 0, 0, 1, 2, 3, 30)
    engines = []
    for budget in (some(1, 2, 3, 5, 8, 13, 30, 60), some(2, 7, 30)):
        if drafts:
            budget, n_blocks = max(budget, seqs * (1 + drafts)), n_blocks + some(0, 2 * drafts)
        cost = random_cost(rng, seqs * (1 + drafts), budget, n_experts, n_layers, grid, launches)
        step_time = SimpleNamespace(cost=cost, n_moe_layers=n_layers)
        speculation = None
        if drafts:
            pass_cost = random_cost(
                rng, seqs * (1 + drafts), budget, n_experts, some(0, 1), grid
            )  # fmt: skip
            speculation = random_speculation(rng, drafts, pass_cost, some("mtp", "mtp", "ngram"))
        engine = EngineSpec(step_time, seqs, budget, max(1, n_blocks), speculation=speculation)
        if sglang is not None and 0 in topology:
            rules = rules_of("sglang", SchedulerConfig(**sglang), budget, 1)
            engine = dataclasses.replace(engine, rules=rules, engine="sglang")
        engines.append(engine)
        seqs = int(rng.integers(1, 7))
    decode, prefill = engines if topology[1] else (engines[1], engines[1])
    unit = 1 / grid if grid else 7.7e-4
    transfer = TransferModel(unit * some(0, 1, 2), 0.0, 1e30, "test")
    if slow_transfers:
        egress, ingress = 1e4 * (1 + rng.random(2))
        transfer = TransferModel(
            3 * unit, unit / 7, float(egress), "test", some(None, float(ingress))
        )
    spec = ClusterSpec(
        pools=make_pools(*topology, prefill, decode),
        max_model_len=some(LONGEST, LONGEST, LONGEST, 45),
        block_size=block_size,
        transfer=transfer,
        load_report_delay_s=some(0.0, 0.0, 5 * unit, 1.0),
        max_concurrency=some(None, None, None, 1, 3, 6),
        signal_interval_s=signal_intervals * unit,
        enable_prefix_caching=rng.random() < 0.9,
        scheduler=EngineConfig(
            async_scheduling=async_scheduling,
            long_prefill_token_threshold=threshold and max(threshold, 1 + drafts),
        ),
        preempt_by_key=preempt_by_key and aging is None,
        aging_s=np.inf if aging is None else aging * unit,
        capture_s=some(0.0, unit),
        routing_s=some(0.0, 0.0, 2 * unit),
        routing_token_s=some(0.0, 0.0, unit),
        windows=windows,
        handover_s=some(0.0, 0.0, unit),
        front_end=None if front_end is None else random_front_end(rng, front_end, unit),
        reserves_early=early and min(topology) > 0,
    )
    length = rng.integers(1, 9, N_TRACE)
    bits = random_rows(rng, int(length.sum()), n_layers, n_experts)
    prompts, masks = None, None
    if topology[0] == 0 or own_experts:
        prompts = random_prompts(rng, workload, N_TRACE, trace_layers, n_experts)
    if n_ranks > 1:
        ranks = rng.integers(n_ranks, size=(sum(topology), trace_layers, n_experts))
        masks = rank_masks(
            [Placement.of_ranks(of_worker, n_ranks) for of_worker in ranks], n_experts, n_layers
        )
    last = float(workload.arrival_s[-1])
    return {
        "spec": spec,
        "model": SimpleNamespace(
            n_kv_tensors=some(1, 2), kv_bytes_per_token=3, state_bytes=seed % 3
        ),
        "workload": workload,
        "replay": Replay(bits, np.cumsum(length) - length, length),
        "window": some((0.0, np.inf), (0.0, np.inf), (last * rng.random() / 2, last)),
        "time_limit_s": some(np.inf, np.inf, np.inf, 3 * float(rng.random())),
        "expert_masks": masks,
        "prompts": prompts,
        "queue_keys": None
        if n_queue_keys == 1
        else rng.integers(n_queue_keys, size=len(workload)).astype(float),
    }


POLICIES = {
    "prefill": st.sampled_from(["least_loaded", "round_robin", "prefix_hash", "holds"]),
    "decode": st.sampled_from(["jsq", "round_robin", "p2c", "books", "holds"]),
}
