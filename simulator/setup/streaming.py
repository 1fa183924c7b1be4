"""Where the layers of prefill workers are: streamed, in stages, or as usual (None)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps import weight_streaming
from eldr_sim.kernel_profiles.steps.step_time import PipelinePlan, plan_pipeline
from eldr_sim.kernel_profiles.tables.format import load_tables
from eldr_sim.simulator.plane.steps.streamed import PromptLayers
from eldr_sim.simulator.setup.config.groups import ClusterConfig, ExpertsConfig
from eldr_sim.simulator.setup.config.pools import Pool, WorkerPool
from eldr_sim.simulator.setup.memory import StreamedExperts, streamed_experts

NOTHING_STREAMED = weight_streaming.Stream(0.0, 0.0, 0.0, True)
_STREAMING = ("expert_gather", "offload_window", "gather_interference", "kv_cache_free")


@dataclass(frozen=True)
class PromptLayout:
    """How a prefill worker has its layers."""

    #: ``stream``, ``experts``: what its GPUs stream, and what of the experts they hold; None where
    #: they stream nothing.
    stream: weight_streaming.StreamPlan | None
    experts: StreamedExperts | None
    together: bool  #: whether engines that gather wait for each other
    pipeline: PipelinePlan | None  #: its stages; None where there is one
    whole_prompts: bool  #: whether it keeps no KV cache
    #: Whether a layer's experts are gathered when its gate has chosen them, and no others.
    on_demand: bool = False

    @property
    def provenance(self) -> dict[str, dict[str, Any]]:
        """What its transfers rest on."""
        plans = (self.stream, self.pipeline)
        return {part: said for plan in plans if plan for part, said in plan.provenance.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of results must know, one line each."""
        return () if self.stream is None else self.stream.warnings

    @property
    def has_steps_of_its_own(self) -> bool:
        """Whether its steps are `steps.streamed`'s."""
        return self.stream is not None or self.pipeline is not None


def prompt_layout(
    settings: ExpertsConfig,
    cluster: ClusterConfig,
    tables: str | None,
    pool: WorkerPool,
    model: ModelDims,
    gpu: GPU,
    parallelism: Parallelism,
    budget: int,
) -> PromptLayout | None:
    """Return the layout of a pool's workers, or None; raises InputError."""
    stages = parallelism.pipeline_parallel_size
    if stages > 1 and cluster.generates:
        problem = f"stages of {pool.name} workers in {cluster.topology} are not simulated"
        allowed = "1, or prefill workers alone, such as 8P"
        raise InputError("pipeline_parallel_size", problem, allowed)
    if not cluster.n_prefill:
        for name in _STREAMING:
            if getattr(settings, name):
                raise InputError(name, "co-located workers do not stream weights", "xPyD or xP")
    if pool.decodes:
        return None
    if settings.kv_cache_free and cluster.generates:
        problem = f"{cluster.topology} hands KV caches over"
        raise InputError("kv_cache_free", problem, "xP, such as 8P")
    streams = settings.expert_gather is not None or settings.offload_window is not None
    if settings.gather_interference and settings.expert_gather is None:
        raise InputError(
            "gather_interference", "no experts are gathered", "together with --expert-gather"
        )
    stream = experts = pipeline = None
    if streams:
        _check_stream(settings, pool, parallelism)
        n_gpus = parallelism.data_parallel_size
        stream = weight_streaming.plan_stream(
            model,
            gpu,
            n_gpus,
            offload_window=settings.offload_window,
            interference=settings.gather_interference,
            tables=load_tables(tables),
        )
        experts = streamed_experts(model, gpu, n_gpus, stream.window, budget)
    if stages > 1:
        pipeline = plan_pipeline(model, gpu, stages)
    if not (streams or pipeline or settings.kv_cache_free):
        return None
    return PromptLayout(
        stream,
        experts,
        settings.expert_gather == "collective",
        pipeline,
        settings.kv_cache_free,
        settings.expert_gather == "needed",
    )


def _check_stream(settings: ExpertsConfig, pool: Pool, parallelism: Parallelism) -> None:
    """Raise InputError where a prefill worker's GPUs cannot stream experts."""
    name = "offload_window" if settings.expert_gather is None else "expert_gather"
    engines = parallelism.data_parallel_size
    if parallelism.tensor_parallel_size > 1 or parallelism.pipeline_parallel_size > 1:
        raise InputError(name, "engines that stream experts have one GPU each", "TP 1, no stages")
    if settings.expert_gather is None and engines > 1:
        problem = f"{engines} engines that dispatch their tokens copy no experts from the host"
        raise InputError(name, problem, "--expert-gather beside it, or one engine a worker")
    if settings.expert_gather is not None and engines == 1:
        raise InputError(
            name, "there are no other GPUs to gather from", "--data-parallel-size 2 to 8"
        )
    if engines > 1 and not parallelism.expert_parallel:
        raise InputError(name, "gathered experts must be whole", "--enable-expert-parallel")
    if settings.expert_gather == "needed":
        # The host's copies are of whole layers, and no gather runs beside one that computes.
        for other in ("offload_window", "gather_interference"):
            if getattr(settings, other):
                raise InputError(other, "experts are gathered after the gate's choice", "none")
    if pool.num_redundant_experts:
        raise InputError("num_redundant_experts", "every layer is gathered completely", "0")
    if pool.expert_placement != "linear":
        problem = "every GPU computes with all experts, wherever they lie"
        raise InputError("expert_placement", problem, "linear, where experts are gathered")


def blocks_of_whole_prompts(budget: int, max_num_seqs: int, block_size: int, stages: int) -> int:
    """Return as many blocks as the steps on the way can fill: no KV cache bounds them."""
    return stages * (-(-budget // block_size) + max_num_seqs)


def make_prompt_layers(
    layout: PromptLayout, n_moe_layers: int, n_workers: int, n_experts: int
) -> PromptLayers:
    """Return the arrays of ``n_workers`` prefill workers; a dense model's layers are one."""
    shares = () if layout.pipeline is None else layout.pipeline.shares
    stream, window, expert_s = NOTHING_STREAMED, 0, 0.0
    if layout.stream is not None:
        stream, window = layout.stream.stream, layout.stream.window
    if layout.on_demand:
        expert_s, stream = stream.gather_s / n_experts, stream._replace(gather_s=0.0)
    return PromptLayers(
        stream=stream,
        expert_s=expert_s,
        loaded=np.zeros((n_workers, window)),
        layers_s=np.zeros((n_workers, n_moe_layers or 1)),
        start=np.zeros(n_workers),
        end=np.zeros(n_workers),
        stage_share=np.array(shares),
        send_s=0.0 if layout.pipeline is None else layout.pipeline.send_s,
        send_token_s=0.0 if layout.pipeline is None else layout.pipeline.send_token_s,
        stage_end=np.zeros((n_workers, len(shares))),
        exits=np.zeros((n_workers, len(shares))),
    )
