"""What a run reads: model, GPUs, tables and trace, loaded and checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import (
    COPY_PER,
    GATHERING,
    AllToAll,
    build_all_to_all,
    chunk_tokens,
)
from eldr_sim.kernel_profiles.kernels.front_end import load_front_end
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel, build_step_time_model
from eldr_sim.kernel_profiles.tables.format import load_tables, weakest
from eldr_sim.kernel_profiles.tables.library import note_use, noting_use
from eldr_sim.policies import registry
from eldr_sim.policies.choice import parse
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.replicas.base import ChoiceParameters
from eldr_sim.policies.replicas.weighted import rank_weights
from eldr_sim.simulator.plane.front_end import FrontEndSpec
from eldr_sim.simulator.plane.state import HERE, NOBODY
from eldr_sim.simulator.plane.steps.group_state import (
    ALL,
    ASKED,
    EXPERT,
    NODE,
    RANK,
    REPLICA_CHOICES,
    GroupCost,
)
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec, PoolSpec
from eldr_sim.simulator.setup.conditional import Conditional, parse_conditional
from eldr_sim.simulator.setup.config import Pool, RunConfig
from eldr_sim.simulator.setup.config_groups import FrontEndConfig
from eldr_sim.simulator.setup.elastic import redundant_experts
from eldr_sim.simulator.setup.engines import (
    OPTIONS,
    default_budget,
    default_seats,
    memory_share,
    rules_of,
)
from eldr_sim.simulator.setup.kv_tiers import tiers_of
from eldr_sim.simulator.setup.log_part import check_window
from eldr_sim.simulator.setup.memory import (
    NO_WINDOWS,
    WindowBlocks,
    check_experts_fit,
    kv_blocks,
    state_blocks,
    window_blocks,
)
from eldr_sim.simulator.setup.pools import Engine, WorkerPool, pools_of
from eldr_sim.simulator.setup.replay import fit_trace
from eldr_sim.simulator.setup.speculation import Speculation, speculation_of
from eldr_sim.simulator.setup.speculative_config import LOOKING_UP
from eldr_sim.simulator.setup.start_up import start_up_parts
from eldr_sim.simulator.setup.streaming import blocks_of_whole_prompts, prompt_layout
from eldr_sim.simulator.setup.transfer import HAND_OVERS, PRESETS, TransferModel, pull_between
from eldr_sim.traces.requests.domains import wanted_domains
from eldr_sim.traces.requests.texts import Texts, draw_texts
from eldr_sim.traces.routing.forced import forced
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from eldr_sim.traces.routing.synthetic.drawn import Shape, drawn_trace
from eldr_sim.traces.routing.synthetic.presets import Band

_MOST_PLACES = 2**26  # 5 GB of their state


@dataclass(frozen=True)
class PreparedRun:
    """Everything that a run reads, loaded and checked; a dense model replays no trace."""

    model: ModelDims
    trace: RoutingTrace | None
    spec: ClusterSpec
    tables_used: frozenset[str] = frozenset()

    @property
    def step_time(self) -> StepTimeModel:
        """Step times of a decode worker; of a prefill worker where there is none."""
        return self.spec.decode.step_time


def prepare(config: RunConfig) -> PreparedRun:
    """Load model, GPU, tables and trace, and check that they fit together.

    Step times and traces are kept for the next run of this process.
    """
    check_window(config)
    model = load_model(config.model)
    if config.kv_cache_dtype == "fp8":
        model = model.model_copy(update={"kv_cache_dtype": "fp8"})
    trace = trace_of(config, model)
    if not config.n_prefill and config.prefill != Pool():
        raise InputError("prefill", "co-located workers are one pool", "decode, or none")
    if not config.generates and config.decode != Pool():
        raise InputError("decode", "requests end with their prompts", "prefill, or none")
    if not config.generates and config.output_len not in (None, 1):
        problem = f"{config.output_len}: a request of {config.topology} ends with its prompt"
        raise InputError("output_len", problem, "1, or none")
    _check_tables(config)
    for name, owners in OPTIONS.items():
        if getattr(config, name) is not None and not any(
            pool.own.engine in owners for pool in config.pools
        ):
            problem = f"is {' and '.join(owners)}'s, and the engine is {config.engine}"
            raise InputError(name, problem, f"--engine {' or '.join(owners)}")
    if trace is not None and any(p.own.parallelism.data_parallel_size > 1 for p in config.pools):
        trace.require_prompts("the pairs of engines that share experts")
    if config.enable_elastic_ep and not any(pool.is_elastic for pool in config.pools):
        problem = "no worker has several engines"
        raise InputError("enable_elastic_ep", problem, "--data-parallel-size 2 or more beside it")
    with noting_use() as used:
        # The last pool first: of two mistakes the one of its workers is told.
        engines = [_engine(config, pool, model) for pool in reversed(config.pools)][::-1]
    if any(engine.layout != engines[0].layout for engine in engines if engine.layout):
        raise InputError("topology", "pools that stream weights are all alike", "one such pool")
    pools, transfer = _pools(config, engines, model)
    places = sum(pool.n * pool.engine.max_num_seqs for pool in pools)
    within("topology", places, _MOST_PLACES, " running requests of all engines")
    output_len = config.effective_output_len
    drafting = [pool.own.speculative_config for pool in config.pools if pool.decodes]
    if config.acceptance is not None and not any(drafting):
        raise InputError("acceptance", "nothing is drafted", "--speculative-config beside it")
    ahead = all(drafts is None or drafts.method not in LOOKING_UP for drafts in drafting)
    same = {field.name for field in fields(ClusterSpec)} & RunConfig.model_fields.keys()
    same -= {"prefill", "decode", "max_model_len"}
    longest = _max_model_len(config, model)
    settled = config.model_copy(update={"max_model_len": longest})
    spec = ClusterSpec(
        pools=pools,
        max_model_len=longest,
        transfer=transfer,
        load_report_delay_s=config.load_report_delay_ms / 1e3,
        signal_interval_s=config.signal_interval_ms / 1e3,
        max_tokens=output_len
        if isinstance(output_len, int) and not config.random_range_ratio
        else None,
        scheduler=settled if ahead else settled.replace(async_scheduling=False),
        windows=_windows(config, model)._replace(state=_state_blocks(config, model, pools)),
        handover_s=HAND_OVERS[config.handover].seconds,
        front_end=_front_end(config),
        tiers=tiers_of(config),
        conditional=_conditional(config),
        reserves_early=_reserves_early(config),
        kv_tiers=settled,
        n_layers=model.n_layers,
        **{name: getattr(config, name) for name in same},
    )
    return PreparedRun(model, trace, spec, frozenset(used))


def _pools(
    config: RunConfig, engines: Sequence[EngineSpec], model: ModelDims
) -> tuple[tuple[PoolSpec, ...], TransferModel]:
    """Return the pools, and what a KV transfer between the first two that make one costs.

    A sender's link has the rate at which the first pool that takes over fetches from it. Where
    another one, with more GPUs a worker say, fetches slower, so many more bytes flow for it: their
    ratio is to be the same for all senders.
    """
    names = pools_of(config.topology).routers
    router = {name: number for number, mine in enumerate(names) for name in mine}
    base = PRESETS[config.kv_transfer]

    def between(source: int, target: int) -> TransferModel:
        one, other = engines[source], engines[target]
        return base.over(
            one.step_time.gpu.nic_bandwidth,
            other.step_time.gpu.nic_bandwidth,
            pull_between(model, one.parallelism, other.parallelism),
        )

    number = {pool.name: at for at, pool in enumerate(config.pools)}
    weights, made = [1.0] * len(engines), list[TransferModel | None]([None] * len(engines))
    for target, pool in enumerate(config.pools):
        sources = [at for at, other in enumerate(config.pools) if pool.name in other.takes_over]
        for source in sources:
            own = between(source, target)
            sends = between(source, number[names[router[pool.name]][0]])
            weight = sends.bandwidth / own.bandwidth
            fetches = replace(own, ingress_bandwidth=own.ingress * weight)
            if source != sources[0] and (
                fetches.descriptor_s != (made[target] or own).descriptor_s
                or weight != weights[target]
            ):
                senders = ", ".join(config.pools[at].name for at in sources)
                problem = f"fetches KV caches from pools of other GPUs or sizes: {senders}"
                raise InputError(f"topology.{pool.name}", problem, "senders that are alike")
            made[source], made[target], weights[target] = sends, fetches, weight
    pools = []
    for at, (pool, engine) in enumerate(zip(config.pools, engines, strict=True)):
        then = router[pool.takes_over[0]] if pool.takes_over else int(HERE)
        n = pool.workers * engine.parallelism.data_parallel_size
        pools.append(
            PoolSpec(
                pool.name,
                n,
                engine,
                then if config.generates else int(NOBODY),
                router[pool.name],
                made[at],
                weights[at],
            )
        )
    first = next((sent for sent in made if sent is not None), None)
    return tuple(pools), first or between(0, -1)


def _check_dense(config: RunConfig, model: ModelDims) -> None:
    """Raise InputError where a configuration asks for something of a dense model's experts."""
    for name in (
        "trace", "routing_band", "routing", "moe_backend", "expert_gather", "offload_window",
    ):  # fmt: skip
        if getattr(config, name) != RunConfig.model_fields[name].default:
            raise InputError(name, f"{model.name} is dense: it has no experts", "not given")
    for pool in (pool.own for pool in config.pools):
        if pool.num_redundant_experts:
            problem = f"{model.name} is dense: it has no experts"
            raise InputError("num_redundant_experts", problem, "not given")
        _check_need("expert_placement", pool.expert_placement or "linear", model)
    _check_need("queue_order", config.queue_order, model)
    if config.generates:
        _check_need("policy", config.policy, model)
    if config.n_prefill:
        _check_need("prefill_policy", config.prefill_policy, model)


def _check_need(field: str, word: str, model: ModelDims) -> None:
    """Raise InputError where a dense model's run names a policy that needs routing."""
    if registry.needs(field, word).routing:
        problem = f"{word!r} needs experts, and {model.name} is dense"
        raise InputError(field, problem, "a policy that needs none (eldr-sim policies)")


def servable(config: RunConfig, policies: Sequence[str]) -> list[str]:
    """Return the decode policies without those that need experts, where the model is dense.

    Raises InputError if none of several is left, or there is no such policy.
    """
    model = load_model(config.model)
    needy = [word for word in policies if registry.needs("policy", word).routing]
    if needy and len(needy) == len(policies) and model.is_dense:
        _check_need("policy", needy[0], model)
    return [word for word in policies if not (model.is_dense and word in needy)]


def _check_tables(config: RunConfig) -> None:
    """Raise InputError where the user's tables are all of devices that the run does not have."""
    gpus = [load_gpu(pool.own.gpu or "") for pool in config.pools]
    known = {name for gpu in gpus for name in (gpu.name, gpu.sibling)}
    measured = sorted({table.metadata.gpu for table in load_tables(config.tables)})
    if measured and not known.intersection(measured):
        problem = f"{config.tables} is of {', '.join(measured)}, the run of {gpus[0].name}"
        allowed = "--gpu with the gpu.json of these tables, or tables of that GPU"
        raise InputError("tables", problem, allowed)


def _conditional(config: RunConfig) -> Conditional:
    """Return when decode workers compute prompts; raises InputError where that cannot be."""
    rule = parse_conditional(config.conditional_disagg)
    if rule.entry:
        if not config.hands_over:
            problem = f"{config.topology} hands no prompts over"
            raise InputError("conditional_disagg", problem, "prefill and decode workers")
        if registry.needs("policy", config.policy).signature is not None:
            problem = f"{config.policy!r} places by signatures, which prompts to compute lack"
            raise InputError("policy", problem, "a policy without signatures, or seconds")
    return rule


def _reserves_early(config: RunConfig) -> bool:
    """Return whether decode workers reserve KV blocks before prompts are computed.

    Raises InputError where they are to and who decodes cannot be known then.
    """
    if not config.hands_over or config.kv_reserve == "prompt_end":
        return False
    needs = registry.needs("policy", config.policy)
    why = ""
    if needs.signature is not None or needs.future:
        why = f"{config.policy!r} places by signatures, which only computed prompts have"
    elif config.conditional_disagg is not None:
        why = "decode workers compute prompts, too (--conditional-disagg)"
    elif len(pools_of(config.topology).routers) != 2:
        why = "prompts are handed over more than once"
    if config.kv_reserve is None:
        engines = {pool.own.engine or config.engine for pool in config.pools if pool.decodes}
        return engines == {"sglang"} and not why
    if why:
        raise InputError("kv_reserve", f"arrival: {why}", "prompt_end")
    return True


def _front_end(config: RunConfig) -> FrontEndSpec | None:
    """Return the API servers; None where prompts come as token ids."""
    if config.frontend is None:
        for name, field in FrontEndConfig.model_fields.items():
            if name != "handover" and getattr(config, name) != field.default:
                raise InputError(name, "there are no API servers", "--frontend beside it")
        return None
    entry = pools_of(config.topology).routers[0]
    return FrontEndSpec(
        load_front_end(config.frontend).slower(config.cpu_slowdown),
        config.tokenizer_mode,
        config.api_servers or sum(p.workers for p in config.pools if p.name in entry),
        config.tokenizer_threads,
    )


def _engine(config: RunConfig, workers: WorkerPool, model: ModelDims) -> EngineSpec:
    """Return what every worker of a pool is: settings that are not given are its engine's."""
    pool = workers.own
    assert pool.gpu is not None
    gpu, parallelism = load_gpu(pool.gpu), pool.parallelism
    engine, n_engines = pool.engine or config.engine, parallelism.data_parallel_size
    budget = pool.max_num_batched_tokens or default_budget(engine, gpu, n_engines)
    rules = rules_of(engine, config, budget, n_engines)
    drafts = pool.speculative_config
    each = 1 + (0 if drafts is None else drafts.num_speculative_tokens)
    seats = default_seats(engine, gpu, n_engines)
    max_num_seqs = pool.max_num_seqs or max(1, min(seats, budget // each))
    if max_num_seqs * each > budget:
        tokens = "" if each == 1 else f" of {each} tokens each"
        problem = f"{budget} is below max_num_seqs {max_num_seqs}{tokens}"
        raise InputError("max_num_batched_tokens", problem, f"{max_num_seqs * each} or more")
    parallelism.check(model)
    if parallelism.ffn_ranks:
        _check_disaggregated(config, workers)
    ranks = parallelism.n_expert_ranks
    _check_experts(pool, workers.name)
    redundant = pool.num_redundant_experts or 0
    if workers.is_elastic:
        redundant = redundant_experts(config, workers, model)
    layout = prompt_layout(config, workers, model, gpu, parallelism, budget)
    experts = None if layout is None else layout.experts
    slots = ExpertGroup((), 1, model.n_experts, ranks, redundant).slots_per_rank

    def build(
        dims: ModelDims,
        of: Parallelism,
        host_s: float | None,
        linears: Sequence[tuple[int, int]] = (),
    ) -> StepTimeModel:
        if host_s is None and config.host_gap_ms is not None:
            host_s = config.host_gap_ms / 1e3
        built, used = _step_time(
            config.tables, model=dims, gpu=gpu, max_num_seqs=max_num_seqs,
            max_model_len=_max_model_len(config, model), max_num_batched_tokens=budget,
            parallelism=of, host_gap_s=host_s, cudagraph_padding=config.cudagraph_padding,
            enforce_eager=bool(pool.enforce_eager), eager_prompts=rules.eager_prompts,
            moe_backend=config.moe_backend,
            linears=tuple(linears), tokens_per_sequence=each,
        )  # fmt: skip
        note_use(used)
        return built

    speculation = speculation_of(
        config, drafts, model, parallelism, build,
        lambda: texts_of(config, trace_of(config, model)).domains,
    )  # fmt: skip
    if speculation is not None and layout is not None and layout.has_steps_of_its_own:
        problem = "drafts beside layers that stream or lie in stages are not simulated"
        raise InputError("speculative_config", problem, "not given")
    share = memory_share(config, engine, pool)
    if experts is None:
        instances = slots * model.n_moe_layers
        n_blocks = _kv_blocks(
            config, engine, share, model, gpu, parallelism, instances, speculation=speculation
        )
    else:
        n_blocks = _kv_blocks(config, engine, share, model, gpu, SINGLE_GPU, *experts)
    if layout is not None and layout.whole_prompts:
        stages = parallelism.pipeline_parallel_size
        n_blocks = blocks_of_whole_prompts(budget, max_num_seqs, config.block_size, stages)
    step_time = build(model, SINGLE_GPU if experts is not None else parallelism, None)
    starts = "0" if pool.start_up is None else pool.start_up
    spec = EngineSpec(
        step_time, max_num_seqs, budget, n_blocks, parallelism, layout=layout, rules=rules,
        speculation=speculation,
        start_up_s=sum(start_up_parts(starts, model.weight_bytes).values()),
        engine=engine, memory_share=share, n_redundant=redundant,
        elastic=workers.is_elastic,
    )  # fmt: skip
    if parallelism.data_parallel_size == 1 or experts is not None:
        return spec
    return sharing(config, pool, model, spec)


def sharing(config: RunConfig, pool: Pool, model: ModelDims, engine: EngineSpec) -> EngineSpec:
    """Return engines with what they share where they share experts, ``n_redundant`` among them."""
    if pool.enforce_eager:
        problem = "steps of engines that share experts are simulated under graphs alone"
        raise InputError("enforce_eager", problem, "not given")
    if config.cudagraph_padding != "none":
        problem = "engines that share experts pad to the widest of them, which is not simulated"
        raise InputError("cudagraph_padding", problem, "none")
    parallelism, redundant = engine.parallelism, engine.n_redundant
    slots = (model.n_experts + redundant) // parallelism.n_expert_ranks
    all_to_all = build_all_to_all(
        model,
        engine.step_time.gpu,
        pool.all2all_backend or config.all2all_backend,
        parallelism.n_gpus,
        gpus_per_node=config.gpus_per_node,
        tables=load_tables(config.tables),
    )
    if parallelism.ffn_ranks:  # the tables are of ranks that all send and receive
        derived = {
            part: said
            | {"label": weakest([said["label"], "derived"])}
            | {"origin": f"{said['origin']}; read at the bytes between attention and FFN GPUs"}
            for part, said in all_to_all.provenance.items()
        }
        all_to_all = replace(all_to_all, provenance=derived)
    choice = _replica_choice(config.replica_choice, all_to_all, redundant > 0)
    if (parallelism.ffn_ranks or engine.elastic) and choice.number == ASKED:
        what = "groups that change their width" if engine.elastic else "micro-batches"
        problem = f"{config.replica_choice!r} chooses in Python, not for {what}"
        raise InputError("replica_choice", problem, "a choice that is compiled, such as hash")
    pairs = _most_pairs(model, parallelism, engine.max_num_seqs, engine.max_num_batched_tokens)
    group = GroupCost(
        {"all": ALL, "expert": EXPERT, "rank": RANK, "node": NODE}[COPY_PER[all_to_all.backend]],
        all_to_all.gathered is not all_to_all.cost,
        choice.number,
        choice.seconds,
        parallelism.tensor_parallel_size,
        config.gpus_per_node,
        engine.step_time.rank_moe(slots, pairs),
        all_to_all.cost,
        all_to_all.gathered,
        chunk_tokens(all_to_all.backend, config.moe_dp_chunk_size),
        parallelism.ffn_ranks,
        config.micro_batches,
    )
    return replace(engine, group=group, all_to_all=all_to_all, choice_provenance=choice.provenance)


def _check_disaggregated(config: RunConfig, workers: WorkerPool) -> None:
    """Raise InputError where a pool's experts cannot lie on GPUs of their own."""
    pool, field = workers.own, f"topology.{workers.name}.ffn_ranks"
    if not any(workers.name in other.takes_over for other in config.pools):
        problem = f"{workers.name} workers compute prompts, which is not simulated with FFN GPUs"
        raise InputError(field, problem, "a pool that others hand over to, as in 4P8A16F")
    if (pool.data_parallel_size or 1) < 2:
        raise InputError(field, "one engine of attention", "2 or more, as in 4P2A1F")
    if pool.speculative_config is not None:
        problem = "drafts are not simulated where experts lie on GPUs of their own"
        raise InputError("speculative_config", problem, "not given")
    if config.eplb_interval is not None:
        problem = "experts on GPUs of their own do not move"
        raise InputError("eplb_interval", problem, "not given")
    if isinstance(config.topology, str) and config.decode.data_parallel_size is not None:
        problem = f"{config.decode.data_parallel_size} engines beside those of {config.topology}"
        raise InputError("decode.data_parallel_size", problem, "one of both")


def hold_instances(
    config: RunConfig, model: ModelDims, engine: EngineSpec, placements: Sequence[Placement]
) -> EngineSpec:
    """Return engines whose GPUs hold the instances that their workers' placements say.

    Each engine has the KV blocks that the GPU with the most instances over all layers leaves.

    Raises InputError if an expert has copies where engines share none, the weights leave no room,
    or the choice of replicas reads a load that the placement does not tell.
    """
    if not placements:
        return engine
    layout, most, total, copies = engine.parallelism, 0, 0, False
    for placement in placements:
        slots = placement.slots()
        replayed = slots[np.arange(model.n_moe_layers) % len(slots)]
        most, total = max(most, int(slots.max())), max(total, int(replayed.sum(axis=0).max()))
        if slots.sum() > slots.shape[0] * model.n_experts:
            copies = True
            _check_copies(config, engine, placement)
    share = ExpertGroup(
        (), 1, model.n_experts, engine.n_expert_ranks, engine.n_redundant
    ).slots_per_rank
    if copies and not engine.n_redundant:  # the placement's own
        assert engine.group is not None
        assert engine.all_to_all is not None
        choice = _replica_choice(config.replica_choice, engine.all_to_all, copies)
        engine = replace(
            engine,
            group=engine.group._replace(choice_s=choice.seconds),
            choice_provenance=choice.provenance,
        )
    if (most, total) == (share, share * model.n_moe_layers):
        return engine
    n_blocks = _kv_blocks(
        config, engine.engine, engine.memory_share, model, engine.step_time.gpu, layout, total,
        speculation=engine.speculation,
    )  # fmt: skip
    group = engine.group
    if group is not None:
        pairs = _most_pairs(model, layout, engine.max_num_seqs, engine.max_num_batched_tokens)
        group = group._replace(moe=engine.step_time.rank_moe(min(most, model.n_experts), pairs))
    return replace(engine, n_blocks=n_blocks, group=group)


def _check_copies(config: RunConfig, engine: EngineSpec, placement: Placement) -> None:
    """Raise InputError where a placement's copies of experts cannot be served."""
    if engine.group is None:
        problem = "copies of experts are simulated where engines share them"
        allowed = "--data-parallel-size 2 or more, or a placement without copies"
        raise InputError("expert_placement", problem, allowed)
    if registry.needs("replica_choice", config.replica_choice).rank_loads:
        rank_weights(placement)


def _kv_blocks(
    config: RunConfig,
    engine: Engine,
    share: float,
    model: ModelDims,
    gpu: GPU,
    parallelism: Parallelism,
    instances: int,
    activation_bytes: int = 0,
    speculation: Speculation | None = None,
) -> int:
    if parallelism.ffn_ranks:
        check_experts_fit(model, gpu, 1.0 if engine == "trtllm" else share, instances)
        instances = 0
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override - 1  # one is the null block (block_pool.py)
    return kv_blocks(
        model,
        gpu,
        share,
        config.block_size,
        parallelism,
        instances,
        engine,
        activation_bytes + (0 if speculation is None else speculation.draft.weight_bytes),
        _windows(config, model),
        0 if speculation is None else speculation.draft.kv_bytes_per_token,
    )


def _windows(config: RunConfig, model: ModelDims) -> WindowBlocks:
    """Return what the sliding windows of a request take; nothing where they keep all."""
    whole = config.disable_hybrid_kv_cache_manager
    if whole or (whole is None and config.n_prefill):
        return NO_WINDOWS
    return window_blocks(model, config.block_size)


def _state_blocks(config: RunConfig, model: ModelDims, pools: Sequence[PoolSpec]) -> int:
    """Return the KV blocks of a request's states, of the pool where they are most."""
    shards = [pool.engine.parallelism.shard(model) for pool in pools]
    return max(state_blocks(shard, config.block_size) for shard in shards)


def _most_pairs(model: ModelDims, parallelism: Parallelism, max_num_seqs: int, budget: int) -> int:
    """Return the most token-expert pairs of a step of a group."""
    return parallelism.data_parallel_size * max(max_num_seqs, budget) * model.top_k


def _check_experts(pool: Pool, role: str) -> None:
    """Raise InputError where a pool's engines cannot have their experts as it says."""
    parallelism, placement = pool.parallelism, pool.expert_placement
    if parallelism.data_parallel_size > 1 and not parallelism.expert_parallel:
        problem = "engines that share no experts are not simulated"
        raise InputError("data_parallel_size", problem, "--enable-expert-parallel beside it")
    if pool.num_redundant_experts and parallelism.data_parallel_size == 1:
        problem = "redundant experts are simulated where engines share them"
        allowed = "--data-parallel-size 2 or more beside it"
        raise InputError("num_redundant_experts", problem, allowed)
    if placement != "linear" and parallelism.n_expert_ranks == 1:
        raise InputError(
            "expert_placement",
            f"{placement!r} places the experts of expert-parallel GPUs, and every GPU of the "
            f"{role} workers holds all",
            "--enable-expert-parallel with --tensor-parallel-size 2 or more",
        )


class _Choice(NamedTuple):
    """A replica choice as groups know it."""

    number: int
    seconds: float  #: in each MoE layer
    provenance: dict[str, dict[str, Any]]  #: of the seconds


def _replica_choice(word: str, all_to_all: AllToAll, copies: bool) -> _Choice:
    """Return what groups know of a replica choice; without copies of experts it costs nothing."""
    found = registry.find("replica", parse(word, "replica_choice").name)
    if found.needs.gathers and all_to_all.backend not in GATHERING:
        problem = (
            f"{found.name!r} needs the tokens of all ranks, which {all_to_all.backend} does not "
            "gather"
        )
        raise InputError("replica_choice", problem, f"--all2all-backend {' or '.join(GATHERING)}")
    number, parameters = (
        REPLICA_CHOICES.get(found.name, ASKED),
        registry.parameters("replica", word),
    )
    if not copies or not isinstance(parameters, ChoiceParameters) or not parameters.overhead_us:
        return _Choice(number, 0.0, {})
    overhead_us, default = parameters.overhead_us, parameters == type(parameters)()
    label, origin = parameters.source if default else ChoiceParameters.source
    said = {"label": label, "origin": f"{overhead_us:g} us a layer: {origin}", "kernel_source": ""}
    return _Choice(number, overhead_us * 1e-6, {"replica_choice": said})


def _max_model_len(config: RunConfig, model: ModelDims) -> int:
    """Return the longest context of a worker: the model's positions when not given."""
    return config.max_model_len or model.max_position_embeddings


@lru_cache(maxsize=8)
def _step_time(tables: str | None, **about: Any) -> tuple[StepTimeModel, frozenset[str]]:
    """Return the step times, and the names of the user's tables that they come from.

    ``about`` is what `build_step_time_model` takes but for the tables.
    """
    with noting_use() as used:
        built = build_step_time_model(tables=load_tables(tables), **about)
    return built, frozenset(used)


@lru_cache(maxsize=4)
def _opened(path: str, stamp: float) -> RoutingTrace:
    return open_trace(path)


@lru_cache(maxsize=4)
def _fitted(path: str, stamp: float, model: ModelDims) -> RoutingTrace:
    return fit_trace(_opened(path, stamp), model)


def texts_of(config: RunConfig, trace: RoutingTrace | None) -> Texts:
    """Return what a run's requests are dealt from: the trace's, or drawn ones where there is none.

    These are the texts of the trace that would be drawn for a model with experts.
    """
    return draw_texts(_domains(config)) if trace is None else trace.texts


def trace_of(config: RunConfig, model: ModelDims) -> RoutingTrace | None:
    """Return `routing_of`; None for a dense model, of whose experts nothing may be asked."""
    if not model.is_dense:
        return routing_of(config, model)
    _check_dense(config, model)
    return None


def routing_of(config: RunConfig, model: ModelDims) -> RoutingTrace:
    """Open a run's trace as a model replays it; not done again unless the folder has changed."""
    if model.is_dense:
        raise InputError("model", f"{model.name} is dense: no experts to route", "a MoE model")
    trace = _recorded(config, model)
    return trace if config.routing == "real" else _forced(trace, config.routing)


_forced = lru_cache(maxsize=2)(forced)


def _recorded(config: RunConfig, model: ModelDims) -> RoutingTrace:
    if config.trace is None:
        return _drawn(model, _domains(config), config.routing_band)
    if config.routing_band != "middle":
        raise InputError("routing_band", "a band beside a trace", "one of both")
    manifest = Path(config.trace) / "manifest.json"
    stamp = os.stat(manifest).st_mtime if manifest.exists() else 0.0
    return _fitted(config.trace, stamp, model)


def _domains(config: RunConfig) -> tuple[tuple[str, float], ...]:
    return wanted_domains(config.workload, config.domain_mix, config.domain_mix_end)


@lru_cache(maxsize=4)
def _drawn(model: ModelDims, domains: tuple[tuple[str, float], ...], band: Band) -> RoutingTrace:
    shape = Shape(model.n_moe_layers, model.n_experts, model.top_k)
    return fit_trace(drawn_trace(model.name, shape, domains, band=band), model)
