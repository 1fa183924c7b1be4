"""What every worker of a pool is.

The engines of expert-parallel workers may start and stop one by one (``--enable-elastic-ep``).
Every GPU holds as many instances, and the same KV cache, whatever the width: what a wider group has
room for are redundant experts, as in vLLM's ``ElasticEPScalingExecutor.switch_and_prepare``
(``vllm/distributed/elastic_ep/elastic_execute.py``, read in November 2026)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.steps.calibration import load_calibration
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel, build_step_time_model
from eldr_sim.kernel_profiles.tables.format import load_tables
from eldr_sim.kernel_profiles.tables.library import Engine, note_use, track_table_use
from eldr_sim.kernel_profiles.tables.providers import provided_tables
from eldr_sim.policies.placement.base import ExpertGroup
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config import engine_rules
from eldr_sim.simulator.setup.config.pools import WorkerPool
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.config.start_up import start_up_parts
from eldr_sim.simulator.setup.memory import WindowBlocks, pool_blocks
from eldr_sim.simulator.setup.run_routing import routing_of, texts_of
from eldr_sim.simulator.setup.shared_experts import check_disaggregated, check_experts, sharing
from eldr_sim.simulator.setup.speculation import speculation_of
from eldr_sim.simulator.setup.streaming import blocks_of_whole_prompts, prompt_layout


def redundant_experts(config: RunConfig, pool: WorkerPool, model: ModelDims) -> int:
    """Return the redundant experts of a whole worker, where the fewest engines (``min_workers``)
    hold all experts and ``num_redundant_experts`` more. Raises InputError where that cannot be."""
    parallelism, field = pool.parallelism, "enable_elastic_ep"
    least = config.scaling.least_workers(config.pools)[pool.name]
    problems = {
        f"{pool.workers} {pool.name} workers": pool.workers > 1,
        "experts are cut": not parallelism.expert_parallel,
        "experts lie on separate FFN GPUs": bool(parallelism.ffn_ranks),
        "experts move (eplb_interval)": config.experts.eplb_interval is not None,
        "workers fail (fail, events)": bool(config.faults.fail or config.faults.events),
    }
    for problem, is_so in problems.items():
        if is_so:
            allowed = "one worker, such as 1C with --data-parallel-size 16, and nothing else"
            raise InputError(field, problem, allowed)
    if not 2 <= least * parallelism.tensor_parallel_size <= parallelism.n_gpus:
        allowed = f"2 to the {parallelism.n_gpus} GPUs of a worker"
        raise InputError("min_workers", f"{least} {pool.name} engines", allowed)
    instances = model.n_experts + (pool.num_redundant_experts or 0)
    slots, rest = divmod(instances, least * parallelism.tensor_parallel_size)
    if rest:
        problem = f"{least} {pool.name} engines cannot hold {instances} expert instances equally"
        raise InputError("min_workers", problem, "a number of engines that can")
    return slots * parallelism.n_expert_ranks - model.n_experts


def make_engine_spec(
    config: RunConfig, pool: WorkerPool, model: ModelDims, windows: WindowBlocks
) -> EngineSpec:
    """Return what every worker of a pool is: settings that are not given are its engine's.

    ``windows``: the blocks that a request's sliding windows take, `memory.windows_of`."""
    assert pool.gpu is not None
    gpu, parallelism = load_gpu(pool.gpu), pool.parallelism
    engine, n_engines = pool.engine or config.engine.engine, parallelism.data_parallel_size
    version = pool.engine_version
    kernels = Engine(engine, version or "")
    padding = config.steps.cudagraph_padding or engine_rules.padding_of(engine, version, n_engines)
    budget = pool.max_num_batched_tokens
    budget = budget or engine_rules.default_budget(engine, gpu, n_engines, version)
    rules = engine_rules.rules_of(engine, config.scheduler, budget, n_engines, version)
    drafts = pool.speculative_config
    tokens_per_seq = 1 + (0 if drafts is None else drafts.num_speculative_tokens)
    if engine == "sglang" and config.scheduler.piecewise_cuda_graph is None:
        graphs = engine_rules.prompt_graphs(
            model, gpu, parallelism, drafts=tokens_per_seq > 1, apart=config.cluster.hands_over
        )
        rules = replace(rules, **graphs)
    longest = config.engine.max_model_len or model.max_position_embeddings
    threshold = config.engine.long_prefill_token_threshold
    if threshold and not tokens_per_seq <= threshold <= longest:
        problem = (
            f"{threshold} of at most {longest} tokens, and {tokens_per_seq} a step of decoding"
        )
        raise InputError(
            "long_prefill_token_threshold", problem, f"0 or {tokens_per_seq}..{longest}"
        )
    seats = engine_rules.default_seats(engine, gpu, n_engines, drafts=tokens_per_seq > 1)
    max_num_seqs = pool.max_num_seqs or max(1, min(seats, budget // tokens_per_seq))
    if max_num_seqs * tokens_per_seq > budget:
        tokens = "" if tokens_per_seq == 1 else f" of {tokens_per_seq} tokens each"
        problem = f"{budget} is below max_num_seqs {max_num_seqs}{tokens}"
        raise InputError(
            "max_num_batched_tokens", problem, f"{max_num_seqs * tokens_per_seq} or more"
        )
    if engine == "vllm":
        captured = max_num_seqs * tokens_per_seq
        rules = replace(
            rules, **engine_rules.captured_steps(config.scheduler, gpu, version, captured)
        )
    eager = bool(pool.enforce_eager)
    fused = engine_rules.fuses_shared_expert(
        engine, model, gpu, parallelism, config.steps, config.scheduler.shared_experts_fusion
    )
    redundant = pool.num_redundant_experts or 0
    parallelism.check(model, copies=redundant > 0)
    if parallelism.ffn_ranks:
        moves = config.experts.eplb_interval is not None
        check_disaggregated(pool, config.pools, config.cluster, moves=moves)
    ranks = parallelism.n_expert_ranks
    check_experts(pool, pool.name)
    if pool.is_elastic:
        redundant = redundant_experts(config, pool, model)
    layout = prompt_layout(
        config.experts, config.cluster, config.steps.tables, pool, model, gpu, parallelism, budget
    )
    experts = None if layout is None else layout.experts
    slots = ExpertGroup((), 1, model.n_experts, ranks, redundant).slots_per_rank

    calibration = load_calibration(config.steps.calibration)
    if calibration is not None and not calibration.fits(model.name, gpu.name):
        calibration = None

    def build(
        dims: ModelDims,
        of: Parallelism,
        host_s: float | None,
        linears: Sequence[tuple[int, int]] = (),
    ) -> StepTimeModel:
        if host_s is None and config.steps.host_gap_ms is not None:
            host_s = config.steps.host_gap_ms / 1e3
        built, used = _step_time(
            config.steps.tables, model=dims, gpu=gpu, max_num_seqs=max_num_seqs,
            max_model_len=longest, max_num_batched_tokens=budget,
            parallelism=of, host_gap_s=host_s, cudagraph_padding=padding,
            enforce_eager=eager, graph_tokens=rules.graph_tokens,
            prompt_graph_tokens=rules.prompt_graph_tokens, shared_experts_fused=fused,
            moe_backend=config.steps.moe_backend, engine=kernels,
            linears=tuple(linears), tokens_per_sequence=tokens_per_seq, calibration=calibration,
            named=config.engine.model,
        )  # fmt: skip
        note_use(used)
        return built

    def domains() -> Sequence[str]:
        load, routing = config.requests.workload, config.routing
        trace = None if model.is_dense else routing_of(load, routing, model)
        return texts_of(load, routing, trace).domains

    speculation = speculation_of(
        drafts, config.steps.acceptance, config.requests.seed, model, parallelism, build, domains
    )
    if speculation is not None and not config.cluster.generates:
        problem = "requests end with their prompts, so there is nothing to draft"
        raise InputError("speculative_config", problem, "not given")
    if speculation is not None and layout is not None and layout.has_steps_of_its_own:
        problem = "drafts beside layers that stream or lie in stages are not simulated"
        raise InputError("speculative_config", problem, "not given")
    share = engine_rules.memory_share(config.value, engine, pool)
    held = parallelism, slots * model.n_moe_layers, engine_rules.activation_bytes(engine, version)
    if experts is not None:
        held = SINGLE_GPU, *experts
    n_blocks = pool_blocks(config.engine, windows, engine, share, model, gpu, *held, speculation)
    if layout is not None and layout.whole_prompts:
        stages = parallelism.pipeline_parallel_size
        n_blocks = blocks_of_whole_prompts(budget, max_num_seqs, config.engine.block_size, stages)
    step_time = build(model, SINGLE_GPU if experts is not None else parallelism, None)
    starts = start_up_parts(pool.start_up or "0", model.weight_bytes)
    spec = EngineSpec(
        step_time, max_num_seqs, budget, n_blocks, parallelism, layout=layout, rules=rules,
        speculation=speculation,
        start_up_s=sum(starts.values()), graphs_s=starts.get("graphs", 0.0),
        engine=engine, memory_share=share, n_redundant=redundant,
        own=pool, elastic=pool.is_elastic,
    )  # fmt: skip
    if parallelism.data_parallel_size == 1 or experts is not None:
        return spec
    return sharing(config.cluster, config.steps, config.policies.replica_choice, model, spec)


@lru_cache(maxsize=8)
def _step_time(tables: str | None, **about: Any) -> tuple[StepTimeModel, frozenset[str]]:
    """Return the step times, and the user's ``tables`` that they come from."""
    own = load_tables(tables)
    with track_table_use() as used:
        built = build_step_time_model(tables=own, **about)
    if built.missing:
        of = about["gpu"], about["model"], about["parallelism"], about["engine"]
        provided = provided_tables(*of, built.missing)
        if provided is not None:
            about["import_helps"] = False
            built = build_step_time_model(tables=(*own, *provided), **about)
    return built, frozenset(used)
