"""The arrays of a run as it begins."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from eldr_sim.arrays import Floats, Int32s, Records
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.control.tier_arrays import make_tiers, prompt_table
from eldr_sim.simulator.plane import loop, state
from eldr_sim.simulator.plane.front_end import most_at_once
from eldr_sim.simulator.plane.kv.kv_cache import make_kv_cache
from eldr_sim.simulator.plane.kv.kv_manager import Engines
from eldr_sim.simulator.plane.network import make_network
from eldr_sim.simulator.plane.router import PolicyRouter
from eldr_sim.simulator.plane.scheduler.engine import make_workers
from eldr_sim.simulator.plane.sessions import Sessions, make_sessions
from eldr_sim.simulator.plane.steps import group_state
from eldr_sim.simulator.plane.steps.executor import make_scratch
from eldr_sim.simulator.plane.steps.expert_loads import make_expert_loads
from eldr_sim.simulator.plane.steps.expert_union import no_prompts
from eldr_sim.simulator.plane.steps.verify import Drafts, no_drafts
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec
from eldr_sim.simulator.setup.config.field_types import parse_kv_signal
from eldr_sim.simulator.setup.config.groups import LOOP, EngineConfig
from eldr_sim.traces.workload import Workload

_T = TypeVar("_T")
_TYPES: dict[Any, type] = {bool: np.bool_, int: np.int64, float: np.float64, int | None: np.int64}
#: `state.POOL`, and what the engine's configuration marks for the loop.
POOL = np.dtype(
    [(name, state.POOL[name]) for name in state.POOL.names or ()]
    + [
        (name, _TYPES[field.annotation])
        for name, field in EngineConfig.model_fields.items()
        if LOOP in field.metadata
    ],
    align=True,
)


def with_joins(sessions: Sessions, joins: Int32s | None) -> Sessions:
    """Return sessions with requests that also wait for others; ``joins``: int32 ``[k, 2]``."""
    if joins is None:
        return sessions
    n = len(sessions.waits)
    parents = np.repeat(np.arange(n), np.diff(sessions.first))
    edges = np.concatenate([np.stack([sessions.children, parents], axis=1), joins])
    edges = edges[np.argsort(edges[:, 1], kind="stable")]
    return sessions._replace(
        children=edges[:, 0].astype(np.int32),
        first=np.searchsorted(edges[:, 1], np.arange(n + 1)),
        waits=np.bincount(edges[:, 0], minlength=n).astype(np.int32),
    )


def make_requests(inputs: RunInputs, workload: Workload) -> Records:
    """Return the requests of a workload before they arrive: ``REQUEST [requests]``."""
    spec, replay, window = inputs.spec, inputs.replay, inputs.window
    requests = np.zeros(len(workload), state.REQUEST)
    for name in state.REQUEST.names or ():
        if name.endswith("_s"):
            requests[name] = -1.0
    for name in ("worker", "source", "reserved", "cached_tokens", "decode_cached_tokens"):
        requests[name] = -1
    roots = np.arange(len(workload))
    requests["parent"] = -1 if workload.parent is None else workload.parent
    if workload.parent is not None:
        roots = np.flatnonzero(workload.parent < 0)
    requests["next"] = -1
    requests["next"][roots[:-1]] = roots[1:]
    tokens = workload.prompt_len.astype(np.int64) + workload.output_len
    requests["window_blocks"] = spec.windows.of(tokens, spec.block_size)
    for name in ("arrival_s", "prompt_len", "output_len", "domain"):
        requests[name] = getattr(workload, name)
    requests["trace_request"] = workload.text
    requests["window_row"] = replay.first_row[workload.decode_request]
    requests["window_len"] = replay.length[workload.decode_request]
    requests["window_offset"] = workload.replay_offset
    requests["measured"] = (workload.arrival_s >= window[0]) & (workload.arrival_s < window[1])
    if workload.parent is not None:  # with the end of the window it is known who came in it
        requests["measured"][workload.parent >= 0] = np.isinf(window[1])
    if workload.n_warming:
        requests["measured"] = False
    return requests


def check_tables(engine: EngineSpec, longest: int) -> None:
    """Raise ValueError unless step times cover an engine's steps: compiled code reads on."""
    cost, places = engine.step_time.cost, engine.most_decoded
    budget = engine.max_num_batched_tokens
    needed = dict.fromkeys(("moe_s", "head_s", "attention_s"), places)
    needed |= dict.fromkeys(("mixed_moe_s", "uniform_moe_s"), budget)
    needed |= dict.fromkeys(("dense_s", "collectives_s"), max(places, budget))
    needed |= dict.fromkeys(("prompt_alone_s", "prompt_share_s"), longest)
    for name, last in needed.items():
        if len(getattr(cost, name)) <= last:
            raise ValueError(
                f"step times: {name} has {len(getattr(cost, name))} entries, not {last + 1}"
            )


def make_run(
    inputs: RunInputs, requests: Records, routers: Sequence[PolicyRouter], decide: int
) -> loop.Run:
    """Return all that the loop works on; ``decide`` is the address of the callback."""
    spec, workload, n_workers = inputs.spec, inputs.workload, inputs.spec.n_workers
    tokens, n_requests = requests["prompt_len"] + requests["output_len"], len(requests)
    longest, engines = int(tokens.max(initial=0)), [pool.engine for pool in spec.pools]
    for engine in engines:
        check_tables(engine, min(longest, spec.max_model_len))
    pools = make_pools(spec, inputs.shards, inputs.prompts is not None)
    pools["reports"] = routers[0].needs.blocks & (pools["router"] == 0)
    reporting = (pools["first_worker"] + pools["n_workers"])[pools["reports"]].max(initial=0)
    matches = workload.prefix_block_tokens and any(router.needs.matched for router in routers)
    published = spec.signal_interval_s > 0 and not parse_kv_signal(spec.kv_signal).approximate
    if (matches and published) or inputs.on_blocks is not None:
        reporting = n_workers
    caching = bool(pools["prefix_caching"].any())
    pool_of = np.repeat(np.arange(len(pools)), pools["n_workers"])
    sessions = make_sessions(workload, inputs.window, spec.max_active_sessions)
    sessions = with_joins(sessions, workload.joins)
    clock, events = _first_events(requests, n_workers, sessions, inputs.window[1])
    # Behind its places an engine has those of sequences that sit out or ride on, and one to move
    # another.
    most_seqs = max(engine.max_num_seqs for engine in engines)
    rides = (pools["rides_from"] == 1) | ((pools["rides_from"] > 1) & (pools["drafts"] > 0))
    apart = (~pools["mixed_steps"] | rides).any()
    places = most_seqs * (2 if apart else 1)
    moves = (pools["long_prefill_token_threshold"] > 0) | pools["token_with_kv"]
    moves |= pools["preempt_by_key"]
    places += int(moves.any())
    most_pending = most_seqs + most_at_once(spec.front_end) + 1
    if spec.reserves_early:  # perhaps for all at once
        most_pending += n_requests
    tiers = None
    if spec.tiers and caching and workload.prefix_block_tokens:
        n_listed = int((tokens // spec.block_size).sum())
        if workload.prefixes_to_come:
            n_listed = np.iinfo(np.int64).max
        rates = link_rates(spec)
        tiers = make_tiers(spec, inputs.shards, clock, n_listed, n_requests, rates)
    masks = np.zeros((n_workers, 1, 0), np.uint64)
    if inputs.expert_masks is not None:
        masks = np.ascontiguousarray(inputs.expert_masks)
    return loop.Run(
        clock=clock,
        events=events,
        engines=Engines(
            settings=_make_settings(inputs, routers, decide),
            pools=pools,
            pool_of=pool_of,
            workers=make_workers(pools, pool_of),
            sequences=np.zeros((n_workers, places), state.SEQUENCE),
            requests=requests,
            tables=np.zeros((n_requests, 2), state.BLOCK_TABLE),
            kv=make_kv_cache(
                workload,
                spec.block_size,
                max(engine.n_blocks for engine in engines),
                n_workers if caching else 0,
                int(reporting),
                tiers,
                spec.windows.groups,
                spec.windows.window,
                tree=bool(pools["fewest_first"].all()) and not spec.tiers,
            ),
            pending=np.zeros((most_pending, 2), np.int64),
            sessions=sessions,
            prompt_s=prompt_table(spec, longest),
        ),
        routers=padded([router.arrays for router in routers]),
        net=make_network(n_requests, link_rates(spec)),
        reported=np.zeros((n_requests * len(routers), 2), np.int32),
        bits=inputs.replay.bits,
        masks=masks,
        prompts=no_prompts() if inputs.prompts is None else inputs.prompts,
        costs=padded([engine.step_time.cost for engine in engines]),
        drafts=padded([make_drafts(engine) for engine in engines]),
        scratch=make_scratch(
            n_workers,
            most_seqs,
            max(engine.most_decoded for engine in engines),
            spec.decode.step_time.n_moe_layers,
            inputs.replay.bits.shape[1],
        ),
    )


def _first_events(
    requests: Records, n_workers: int, sessions: Sessions, end_s: float
) -> tuple[Records, Records]:
    """Return the clock and the events of a run of which nothing has happened."""
    clock = np.zeros(1, state.CLOCK)
    clock["open_measured"] = int(requests["measured"].sum())
    # At most one event a worker and kind, and what a request and its transfer schedule.
    events = np.zeros(6 * len(requests) + 4 * n_workers + 64, state.EVENT)
    if len(requests):
        events[0] = float(requests["arrival_s"][0]), 0, state.ARRIVAL, 0
        clock["n_events"] = 1
    if sessions.record["n_warming"][0]:  # its end is known when it has begun
        clock["open_measured"] = 1
    elif len(sessions.waits) and np.isfinite(end_s):  # who comes in the window may not be known
        events[1], clock["n_events"] = (end_s, 0, state.ARRIVAL, -1), 2
        events[:2].sort(order=("time", "order"))
        clock["open_measured"] += 1
    return clock, events


def make_pools(spec: ClusterSpec, shards: Sequence[ModelDims], own_experts: bool) -> Records:
    """Return the settings of the pools: ``POOL [pools]``."""
    pools, engines = np.zeros(len(spec.pools), POOL), [pool.engine for pool in spec.pools]
    pools["first_worker"] = [spec.workers_of(name).start for name in spec.names]
    pools["n_workers"] = [pool.n for pool in spec.pools]
    for name in ("then", "router"):
        pools[name] = [getattr(pool, name) for pool in spec.pools]
    _fill(pools, spec.scheduler)
    _fill(pools, spec)
    for number, engine in enumerate(engines):
        _fill(pools[number : number + 1], engine)
        _fill(pools[number : number + 1], engine.rules)
    pools["group_size"] = [engine.group_size for engine in engines]
    in_flight = pools["max_num_batched_tokens"] * (1 + spec.scheduler.async_scheduling)
    pools["window_cap"] = [
        spec.windows.cap(spec.block_size, tokens, spec.max_model_len) for tokens in in_flight
    ]
    whole = np.array([e.layout is not None and e.layout.whole_prompts for e in engines])
    pools["prefix_caching"] = spec.enable_prefix_caching & ~whole
    pools["whole_prompts"] |= whole
    takes_over = np.isin(pools["router"], pools["then"])  # who fetches KV caches
    decodes = pools["then"] == state.HERE
    pools["whole_prompts"] &= ~takes_over
    pools["mixed_steps"] |= takes_over
    pools["poll_steps"][takes_over | ~decodes], pools["wait_steps"][takes_over] = 1, 0
    pools["balance_steps"][takes_over | ~decodes | (pools["group_size"] == 1)] = 0
    sglang = pools["fewest_first"].copy()
    pools["reserve"][~decodes & ~sglang] = state.OF_PROMPT
    pools["mixed_steps"] &= decodes | ~sglang
    pools["prefix_caching"] &= ~(takes_over & sglang)  # `_handle_pd_disaggregation`
    pools["own_experts"] = own_experts
    pools["capture_s"][[pool.decodes for pool in spec.pools]] = 0.0
    pools["prefill_schedule_interval"][[engine.group is None for engine in engines]] = 1
    pools["long_prefill_token_threshold"][whole | [e.engine != "vllm" for e in engines]] = 0
    heads = np.array([e.speculation is not None and e.speculation.has_head for e in engines])
    pools["drops_block"] &= heads & bool((pools["then"] >= 0).any())
    pools["allocates_chunks"] &= ~pools["whole_prompts"] & (not spec.tiers)
    # SGLang drafts without overlap, and takes over by another loop, which is not followed here.
    drafting = np.array([e.speculation is not None for e in engines])
    other = sglang & takes_over
    pools["fills_up"] &= ~other
    ahead = pools["async_scheduling"] & ~other & ~(sglang & drafting)
    pools["frees_late"] &= ahead
    pools["rides_from"][~ahead] = 0
    pools["always_pads"] = [engine.engine != "vllm" for engine in engines]
    for number, (pool, shard) in enumerate(zip(spec.pools, shards, strict=True)):
        n_bytes, n_tensors = shard.kv_bytes_per_token, shard.n_kv_tensors
        speculation = pool.engine.speculation
        if pool.decodes and speculation is not None:
            pools["drafts"][number] = speculation.k
            pools["lookahead"][number] = pools["placeholders"][number] = speculation.lookahead
            if pool.engine.engine == "vllm":
                pads = pool.engine.rules.pads_drafts
                pools["placeholders"][number] = speculation.placeholders if pads else 0
            n_bytes += speculation.draft.kv_bytes_per_token
            n_tensors += speculation.draft.n_kv_tensors
        pools["kv_bytes_per_token"][number] = n_bytes * pool.kv_weight
        pools["kv_state_bytes"][number] = shard.state_bytes * pool.kv_weight
        pools["n_kv_tensors"][number] = n_tensors
        pools["descriptor_s"][number] = (pool.transfer or spec.transfer).descriptor_s
    return pools


def _make_settings(inputs: RunInputs, routers: Sequence[PolicyRouter], decide: int) -> Records:
    """Return the constants of a run: ``SETTINGS [1]``."""
    spec, settings = inputs.spec, np.zeros(1, state.SETTINGS)
    _fill(settings, spec)
    _fill(settings, spec.transfer)
    settings["routing_s"] += spec.handover_s
    for name, value in spec.conditional._asdict().items():
        settings[name] = value
    settings["front_end"] = spec.front_end is not None
    settings["prefix_block_tokens"] = inputs.workload.prefix_block_tokens
    settings["period"], settings["decide"] = inputs.replay.period, decide
    settings["n_routers"] = len(routers)
    if not any(r.policy is not None and (r.needs.signals or not r.tells_rules) for r in routers):
        settings["signal_interval_s"] = -1.0
    return settings


def _fill(records: Records, spec: Any) -> None:
    """Fill the fields that a specification has by the same name; what is None is negative."""
    for name in vars(spec).keys() & set(records.dtype.names or ()):
        value = vars(spec)[name]
        records[name] = -1 if value is None else value


def make_drafts(engine: EngineSpec) -> Drafts:
    """Return what the engines of a pool draft."""
    cost = engine.step_time.cost
    if engine.speculation is None:
        return no_drafts(cost)
    return engine.speculation.drafts(engine.max_num_seqs, cost)


def link_rates(spec: ClusterSpec) -> Floats:
    """Return the bytes/s of each link, see `plane.network`."""
    own = [(pool.transfer or spec.transfer, pool.n) for pool in spec.pools]
    rates = [transfer.ingress for transfer, _ in own], [transfer.bandwidth for transfer, _ in own]
    return np.concatenate([np.repeat(rate, [n for _, n in own]) for rate in rates])


def padded(items: Sequence[_T]) -> tuple[_T, ...]:
    """Return what each pool or router has, for as many as there may be."""
    return (*items, *(items[0] for _ in range(state.MAX_POOLS - len(items))))


def make_groups(inputs: RunInputs, arrays: loop.Run) -> group_state.Groups | None:
    """Return what engines share; None where none do."""
    engines = [pool.engine for pool in inputs.spec.pools]
    groups = [engine.group for engine in engines if engine.group is not None]
    if not groups:
        return None
    n_workers, ranks, width = arrays.masks.shape
    shared, relocations = inputs.replicas or group_state.no_replicas(), inputs.relocations
    if inputs.replica_policy is not None:  # it chooses instances in Python
        tokens_per_rank = max(
            -(-max(e.most_decoded, e.max_num_batched_tokens) // e.group.ranks_per_engine)
            for e in engines
            if e.group is not None
        )
        instances = max(shared.rank.shape[3] - 1, 0)
        shared = shared._replace(
            asked=np.zeros((instances, ranks, tokens_per_rank, width), np.uint64)
        )
    nodes = max(-(-ranks // group.gpus_per_node) for group in groups)
    step_time, instances = inputs.spec.decode.step_time, shared.rank.shape[3]
    n_layers, n_experts = step_time.n_moe_layers, step_time.cost.n_experts
    batches = max(group.micro_batches if group.ffn_ranks else 0 for group in groups)
    places = arrays.engines.sequences.shape[1]
    return group_state.Groups(
        padded([group_state.make_costs(e.group or group_state.no_group()) for e in engines]),
        shared,
        group_state.make_group_scratch(
            n_layers, width, ranks, n_experts, instances, nodes, n_workers
        ),
        make_expert_loads(n_workers, 0) if relocations is None else relocations.loads,
        group_state.make_micro_batches(n_workers if batches else 0, places, batches, n_layers),
    )
