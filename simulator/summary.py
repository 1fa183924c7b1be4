"""The summary of a run: ``summary.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.kernel_profiles.tables import weakest
from eldr_sim.simulator.cluster import EngineSpec, RunRecord
from eldr_sim.simulator.config import RunConfig
from eldr_sim.simulator.metrics import summarise
from eldr_sim.simulator.prepare import PreparedRun
from eldr_sim.simulator.trace_use import copies_met, trace_warnings
from eldr_sim.traces.workload import Workload


def _topology(config: RunConfig) -> str:
    """State the workers, and the GPUs of each and of all."""
    pools = [("co-located" if config.colocated else "decode", config.n_decode, "decode")]
    if not config.colocated:
        pools.insert(0, ("prefill", config.n_prefill, "prefill"))
    sizes = [config.pool(role).tensor_parallel_size or 1 for *_, role in pools]
    gpus = ["1 GPU" if size == 1 else f"{size} GPUs" for size in sizes]
    alike = len(set(sizes)) == 1
    workers = " + ".join(
        f"{n} {kind}" if alike else f"{n} {kind} of {size}"
        for (kind, n, _), size in zip(pools, gpus, strict=True)
    )
    said = f"{workers} workers of {gpus[0]}" if alike else f"{workers}"
    return said if max(sizes) == 1 else f"{said}: {config.n_gpus} GPUs"


def _gpus(prepared: PreparedRun) -> str:
    """Name the GPU of the workers, or those of the two pools."""
    prefill, decode = (
        engine.step_time.gpu.name for engine in (prepared.spec.prefill, prepared.spec.decode)
    )
    return decode if prefill == decode else f"{prefill} (prefill) and {decode} (decode)"


def _workers(engine: EngineSpec) -> dict[str, int]:
    return {
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_blocks_per_worker": engine.n_blocks,
        "tensor_parallel_size": engine.parallelism.tensor_parallel_size,
        "expert_parallel_size": engine.parallelism.n_expert_ranks,
    }


def _provenance(prepared: PreparedRun) -> dict[str, dict[str, Any]]:
    """Return what each part of a step time rests on, pool by pool where that differs."""
    prefill, decode = prepared.spec.prefill.step_time, prepared.step_time
    if prefill.provenance == decode.provenance:
        return decode.provenance
    pools = {"prefill": prefill, "decode": decode}
    return {
        f"{role}.{part}": entry
        for role, step_time in pools.items()
        for part, entry in step_time.provenance.items()
    }


def summary_of(
    config: RunConfig, prepared: PreparedRun, workload: Workload, record: RunRecord
) -> dict[str, Any]:
    """Return what ``summary.json`` holds: the run, its figures, and what they rest on."""
    model, step_time, trace, spec = (
        prepared.model,
        prepared.step_time,
        prepared.trace,
        prepared.spec,
    )
    started, window = record.decode_steps["start"], record.window
    steps = record.decode_steps[(started >= window[0]) & (started < window[1])]
    outside = {
        "moe_batch": int((steps["batch"] > step_time.moe_batch_max).sum()),
        "attention_batch": int((steps["batch"] > step_time.attention_batch_max).sum()),
        "attention_context": int(
            (steps["context"] > step_time.context_max * np.maximum(steps["batch"], 1)).sum()
        ),
        "attention_tokens": int((steps["context"] > step_time.attention_tokens_max).sum()),
    }
    tiles = -(-model.n_moe_layers // trace.manifest.n_layers)
    copies = copies_met(trace, workload, record, steps)
    gpu, provenance = _gpus(prepared), _provenance(prepared)
    warnings = (*step_time.warnings, *spec.prefill.step_time.warnings)
    return {
        "label": f"{config.policy}, {config.topology} workers, {model.name} on {gpu}",
        "backend": "eldr-sim",
        "model_id": model.name,
        "gpu": gpu,
        "topology": _topology(config),
        "expert_placement": config.expert_placement,
        "policy": config.policy,
        "prefill_policy": None if config.colocated else config.prefill_policy,
        "queue_order": config.queue_order,
        "seed": config.seed,
        **summarise(record, config, model.n_moe_layers),
        **_workers(spec.decode),
        **({} if spec.prefill == spec.decode else {"prefill_workers": _workers(spec.prefill)}),
        "kv_transfer": "none: co-located workers"
        if config.colocated
        else f"{config.kv_transfer}: {spec.transfer.source}",
        "weakest_provenance": weakest(entry["label"] for entry in provenance.values()),
        "provenance": provenance,
        "lookups_outside_tables": outside,
        "latency_warnings": list(dict.fromkeys(warnings)),
        "prompt_experts": "recorded" if trace.has_prompts else "uniform",
        "trace": {
            "name": Path(config.trace).name,
            "model": trace.manifest.model,
            "provenance": trace.manifest.provenance,
            "checksum": trace.manifest.checksum,
            "layers": f"{trace.manifest.n_layers} recorded layers"
            + (
                ""
                if trace.kept_top_k is None
                else f", the first {trace.top_k} of {trace.manifest.top_k} experts a token,"
            )
            + (
                ""
                if tiles == 1
                else f" tiled over {model.n_moe_layers}, each tile rotated by another part of "
                "the request"
            ),
            **workload.description,
            **copies,
        },
        "trace_warnings": trace_warnings(trace, copies, config.trace_replay),
    }
