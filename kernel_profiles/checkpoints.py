"""Checkpoints that are known by their Hugging Face id as a shipped model with some fields changed:
those of ``data/checkpoints.json`` (other precisions and sizes, from their ``config.json``), and
``NAME-FP8`` of any shipped model in bfloat16."""

from collections.abc import Callable, Mapping
from typing import Any

from eldr_sim.kernel_profiles.model_names import matching

_UNPUBLISHED = {
    "published_total_params": 0, "published_active_params": 0, "published_source": "",
}  # fmt: skip


def fields_of(
    name: str, known: Mapping[str, Any], shipped: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Return the fields of a checkpoint's dimensions; None for other names. ``known``: the content
    of ``data/checkpoints.json``; ``shipped``: returns the fields of a model that ships, by any of
    its names."""
    entries: dict[str, dict[str, Any]] = {each["id"]: each for each in known["checkpoints"]}
    found = matching(name, {repository: (repository,) for repository in entries})
    if found is not None:
        own = {"name": found.rpartition("/")[2], "hf_id": found, "source": known["source"]}
        like = shipped(entries[found]["like"]) or {}
        return {**like, **_UNPUBLISHED, **entries[found]["fields"], **own}
    base, dash, word = name.rstrip("/").rpartition("-")
    dims = shipped(base) if dash and word.lower() == "fp8" else None
    if dims is None or {dims["linear_dtype"], dims["expert_dtype"]} != {"bfloat16"}:
        return None
    # Blocks of 128 x 128 in linear layers and experts, not in gates, embedding and lm_head.
    return dims | {
        "name": f"{dims['name']}-FP8",
        "hf_id": f"{dims['hf_id']}-FP8" if dims["hf_id"] else "",
        "linear_dtype": "fp8_block",
        "expert_dtype": "fp8_block" if dims["n_experts"] else "bfloat16",
        "source": f"{dims['source']}; weights in FP8 as Qwen3-32B-FP8's config.json stores them",
    }
