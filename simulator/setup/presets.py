"""Clusters that somebody ran, as fields of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eldr_sim.errors import InputError


@dataclass(frozen=True)
class Preset:
    """A cluster, its engines and its load."""

    #: ``title``, ``source``: what it is, and where it is described.
    title: str
    source: str
    fields: Mapping[str, Any]  #: fields of :class:`~eldr_sim.simulator.setup.config.RunConfig`
    #: Its models, the first by default, and what they have of their own.
    models: Mapping[str, Mapping[str, Any]]
    seconds: int  #: requests are sent for so long: ``num_requests`` is this times the rate
    notes: tuple[str, ...] = ()  #: what of it the fields cannot say


PRESETS: dict[str, Preset] = {
    "eldr-artifact": Preset(
        title="the cluster on which ELDR's authors measured it",
        source="casys-kaist/ELDR, artifact of the paper (Apache-2.0), October 2026",
        fields={
            "topology": "8P16D",
            "gpu": "MI300X",
            "tensor_parallel_size": 1,
            "max_model_len": 4096,
            "enable_prefix_caching": True,
            "disable_hybrid_kv_cache_manager": True,
            "async_scheduling": True,
            "cudagraph_padding": "experts",
            "moe_backend": "triton",
            "prefill": {"enforce_eager": True},
            "prefill_policy": "hash_ring",
            "workload": "task",
            "prompts": "unique",
            "prompt_lengths": "data_sets",
            "output_len": 512,
            "request_rate": 60.0,
            "burstiness": 1.0,
            "warmup": 0.0,
        },
        models={
            "Qwen3-30B-A3B": {"block_size": 16},
            "GPT-OSS-120B": {"block_size": 64},
            "Gemma-4-26B-A4B": {"block_size": 16},
        },
        seconds=120,
        notes=(
            "vLLM 0.21.0rc1; ROCm 7.2.2; VLLM_ROCM_USE_AITER off, so that experts and attention "
            "are Triton's",
            "prompts are not chunked there; none of at most 1,024 tokens ever fills a step here",
            "a drawn request of the 1,000 to serve is met 7 times at 60/s; theirs come once, and "
            "at 100/s on task 11% twice",
            "3,840 requests warm their policies up, which is drained before a cell begins; here "
            "centroids begin as fitted",
        ),
    ),
}
"""By name."""


def preset_fields(text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``NAME`` or ``NAME:MODEL``, and those given, which override them.

    Raises InputError if there is no such preset, or it has no such model.
    """
    name, _, model = text.partition(":")
    preset = PRESETS.get(name)
    if preset is None:
        raise InputError("preset", f"no preset {name!r}", ", ".join(PRESETS))
    known = {one.lower(): one for one in preset.models}
    if model.lower() not in known and model:
        raise InputError("preset", f"{name} has no model {model!r}", ", ".join(preset.models))
    chosen = known.get(model.lower()) or str(given.get("model") or next(iter(preset.models)))
    found = {**preset.fields, "model": chosen, **preset.models.get(chosen, {}), **given}
    rate = found["request_rate"]
    if "num_requests" not in given and "duration" not in given and isinstance(rate, int | float):
        found["num_requests"] = max(1, round(preset.seconds * rate))
    return found
