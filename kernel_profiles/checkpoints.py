"""Checkpoints that are known by their Hugging Face id as a shipped model with some fields changed:
those of ``data/checkpoints.json`` (other precisions and sizes, from their ``config.json``), and
names that say how the weights of a known model are stored, such as ``NAME-FP8``."""

from collections.abc import Callable, Mapping
from typing import Any

from eldr_sim.kernel_profiles.model_names import matching

_UNPUBLISHED = {
    "published_total_params": 0, "published_active_params": 0, "published_source": "",
}  # fmt: skip
_FP8 = {"linear_dtype": "fp8", "expert_dtype": "fp8"}
_INT4 = (
    {"linear_dtype": "int4_g128", "expert_dtype": "int4_g128"},
    "as AWQ and GPTQ: 4 bits, a scale for 128 of them",
)
_INT8 = {"linear_dtype": "int8", "expert_dtype": "int8"}, "as llm-compressor's W8A8"
#: How linear layers, experts and KV cache are stored, by the end of a name, and what says so.
_STORED: dict[str, tuple[dict[str, str], str]] = {
    "-fp8-dynamic": (_FP8, "a scale a channel, as llm-compressor's FP8_DYNAMIC"),
    "-fp8-kv": (_FP8 | {"kv_cache_dtype": "fp8"}, "a scale a tensor, as AMD's Quark"),
    "-fp8": (
        {"linear_dtype": "fp8_block", "expert_dtype": "fp8_block"},
        "as Qwen3-32B-FP8's config.json stores them",
    ),
    "-nvfp4": (
        {"linear_dtype": "nvfp4", "expert_dtype": "nvfp4"},
        "as Qwen3-235B-A22B-NVFP4's hf_quant_config.json stores them",
    ),
    "-mxfp4": ({"expert_dtype": "mxfp4"}, "experts alone, as GPT-OSS"),
    **dict.fromkeys(("-awq", "-gptq-int4", "-quantized.w4a16"), _INT4),
    **dict.fromkeys(("-quantized.w8a8", "-w8a8"), _INT8),
    "-gptq-int8": (
        {"linear_dtype": "int8_wo", "expert_dtype": "int8_wo"},
        "as GPTQ of 8 bits: weights alone",
    ),
}
_OF_COMPRESSOR = (_FP8, "a scale a tensor or channel, as llm-compressor's FP8")
#: What ``-FP8`` means in the names of publishers that quantize others' models.
_PUBLISHERS = {
    "nvidia": (_FP8 | {"kv_cache_dtype": "fp8"}, "a scale a tensor, as NVIDIA's ModelOpt"),
    "redhatai": _OF_COMPRESSOR,
    "neuralmagic": _OF_COMPRESSOR,
}


def _publisher(name: str) -> str:
    return name.partition("/")[0].lower()


def requantized(name: str, hf_id: str) -> bool:
    """Return whether a name ends in ``-FP8`` and its publisher quantized the model of ``hf_id``,
    which another one published."""
    by = _publisher(name)
    is_fp8 = name.rstrip("/").lower().endswith("-fp8")
    return is_fp8 and by in _PUBLISHERS and by != _publisher(hf_id)


def fields_of(
    name: str, known: Mapping[str, Any], shipped: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Return the fields of a checkpoint's dimensions; None for other names. ``known``: the content
    of ``data/checkpoints.json``; ``shipped``: returns the fields of a model that ships, by any of
    its names."""
    entries: dict[str, dict[str, Any]] = {each["id"]: each for each in known["checkpoints"]}

    def listed(wanted: str) -> dict[str, Any] | None:
        found = matching(wanted, {repository: (repository,) for repository in entries})
        if found is None:
            return None
        entry = entries[found]
        source = entry.get("source", known["source"])
        own = {"name": found.rpartition("/")[2], "hf_id": found, "source": source}
        return {**(shipped(entry["like"]) or {}), **_UNPUBLISHED, **entry["fields"], **own}

    if (own := listed(name)) is not None:
        return own
    name = name.rstrip("/")
    if name.lower().endswith("-fp4"):
        name = f"{name[:-4]}-NVFP4"
    end = next((end for end in _STORED if name.lower().endswith(end)), "")
    base = name[: -len(end)]
    dims = listed(base) or shipped(base) if end else None
    whole = {"bfloat16", "fp8_block"} if end == "-mxfp4" else {"bfloat16"}
    if dims is None or not {dims["linear_dtype"], dims["expert_dtype"]} <= whole:
        return None
    experts = bool(dims["n_experts"])
    if end == "-mxfp4" and not experts:
        return None
    stored, how = _STORED[end]
    if end == "-fp8":
        of_base = _PUBLISHERS.get(_publisher(dims["hf_id"]), (stored, how))
        stored, how = _PUBLISHERS.get(_publisher(name), of_base)
    own_id = _publisher(name) in _PUBLISHERS
    # Not gates, embedding and lm_head.
    words = name[-len(end) :].upper()
    return (
        dims
        | stored
        | ({} if experts else {"expert_dtype": "bfloat16"})
        | {
            "name": f"{dims['name']}{words}",
            "hf_id": name if own_id else f"{dims['hf_id']}{words}" if dims["hf_id"] else "",
            "source": f"{dims['source']}; weights stored {how}",
        }
    )
