"""What drafting costs: the layers that draft, their passes, and the host between them.

A verify step of ``k`` drafts a sequence is followed by ``k`` passes of what drafts, one after the
other (``vllm/v1/spec_decode/llm_base_proposer.py``): the first over all tokens of the step, prompt
chunks and rejected drafts among them, the others over one token a sequence. Each pass samples, and
is launched by the host. Drafts that are looked up (n-gram, suffix) take no pass but one look-up.

- ``mtp``: one layer of the served model with its own MoE layer, the projection of the embedding
  beside the hidden state, and the model's lm_head. Its gate's choices are not recorded; they count
  as those of the last recorded layer.
- ``eagle``, ``eagle3``: one dense layer with the served model's attention, unless its config.json
  is given. EAGLE-3 has a separate vocabulary of 32,000 tokens and reads three hidden states. Its
  MLP is taken to be four times as wide as the hidden state, which the published heads vary about.
- ``draft_model``: a dense model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.kernel_profiles.tables.format import provenance_of

DRAFT_HOST_S = 0.66e-3
"""Host, launches and sampling of a draft pass.

Derived from gpt-oss-120b with an EAGLE-3 head of 3 passes on one H100 under SGLang (SpecDrift's
model card): 2.41 tokens a step at 285 tokens/s make a step of 8.46 ms, 5.85 ms of it the verify
step (1.24 plain ones, each 1 / 212 s), and 0.20 ms a pass are the head's own kernels."""

_EAGLE3_TOKENS = 32000


@dataclass(frozen=True)
class Draft:
    """What drafts for one worker; nothing of it computes where drafts are looked up."""

    #: Step times of a pass, host included; None where drafts are looked up.
    step_time: StepTimeModel | None
    host_s: float  #: of each pass, or of the look-up
    #: On one GPU of the worker, beside the served model's.
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    n_kv_tensors: int = 0
    #: ``provenance``, ``warnings``: as of a `StepTimeModel`.
    provenance: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = ()


def build_draft(
    method: str,
    target: ModelDims,
    parallelism: Parallelism,
    build: Callable[..., StepTimeModel],
    *,
    model: str | None = None,
    host_s: float | None = None,
) -> Draft:
    """Return what drafts for a worker. Raises InputError if the served model has no layer to draft
    with, or the draft cannot be spread over an engine's GPUs. ``build``: makes a pass's step times
    of ``(dims, parallelism, host_gap_s, linears)``; ``host_s``: by default :data:`DRAFT_HOST_S`."""
    host = DRAFT_HOST_S if host_s is None else host_s
    origin = (
        "given" if host_s is not None else "gpt-oss-120b, EAGLE-3, one H100 (step less kernels)"
    )
    label = "derived" if host_s is None else "measured"
    provenance = {"draft_host": provenance_of(label, origin)}
    if method in ("ngram", "suffix"):
        note = (
            f"speculative_config: a look-up of {method} is taken to cost a draft pass's host time"
        )
        return Draft(None, host, provenance=provenance, warnings=(note,) if host_s is None else ())
    dims, linears, shared = _dims(method, target, model)
    layout = Parallelism(parallelism.tensor_parallel_size)
    if dims.n_experts:
        layout = parallelism
    steps = build(dims, layout, host, linears)
    weights = layout.weight_bytes(dims) + sum(2 * n * k for n, k in linears)
    weights -= 2 * shared // layout.tensor_parallel_size
    shard = layout.shard(dims)
    origin = {"mtp": "a layer of the model", "draft_model": dims.name}.get(method, "a dense layer")
    provenance["draft"] = provenance_of(steps.label, origin)
    if method != "draft_model" and model is None:
        provenance["draft"]["label"] = "roofline" if steps.label == "roofline" else "derived"
    return Draft(
        steps, host, weights, layout.kv_bytes_per_token(dims), shard.n_kv_tensors, provenance,
        tuple(f"draft: {warning}" for warning in steps.warnings),
    )  # fmt: skip


def _dims(
    method: str, target: ModelDims, model: str | None
) -> tuple[ModelDims, list[tuple[int, int]], int]:
    """Return the layers of what drafts, its matrices beside them, and parameters it shares."""
    hidden = target.hidden_size
    if method == "draft_model" or model is not None:
        assert model is not None
        dims = load_model(model)
        if not dims.is_dense:
            problem = f"{dims.name} has experts, and none are recorded for its drafts"
            raise InputError("speculative_config.model", problem, "a dense model")
        if method == "draft_model":
            return dims, [], 0
        return dims, [(hidden, (3 if method == "eagle3" else 2) * hidden)], dims.embedding_params
    counts = ("n_sliding_layers", "sliding_window", "n_linear_layers", "linear_key_heads",
              "linear_value_heads", "linear_head_dim", "linear_value_head_dim", "n_bare_layers",
              "n_sparse_layers", "n_index_layers")  # fmt: skip
    one = dict.fromkeys(counts, 0) | {"n_layers": 1}
    if method == "mtp":
        if target.is_dense:
            problem = f"{target.name} has no multi-token-prediction layer"
            raise InputError("speculative_config.method", problem, "eagle3, draft_model, ngram")
        compressed = tuple((ratio, 1) for ratio, _ in target.compressed_layers[:1])
        own = {"name": f"{target.name} MTP", "n_dense_layers": 0, "compressed_layers": compressed}
        dims = _changed(target, one | own)
        return dims, [(hidden, 2 * hidden)], 2 * target.embedding_params
    experts = ("n_experts", "top_k", "expert_intermediate_size", "expert_hidden_size")
    none = dict.fromkeys(experts, 0)
    head = one | none | {
        "name": f"{target.name} {method} head",
        "n_dense_layers": 1,
        "dense_intermediate_size": 4 * hidden,
        "shared_intermediate_size": 0,
        "compressed_layers": tuple((ratio, 1) for ratio, _ in target.compressed_layers[:1]),
        "shared_expert_gate": False,
        "expert_bias": False,
        "expert_dtype": "bfloat16",
        "linear_dtype": "bfloat16",
        "mlp_dtype": None,
    }  # fmt: skip
    if method == "eagle3":
        head["vocab_size"] = _EAGLE3_TOKENS
        return _changed(target, head), [(hidden, 3 * hidden)], _EAGLE3_TOKENS * hidden
    return _changed(target, head), [(hidden, 2 * hidden)], 2 * target.embedding_params


def _changed(model: ModelDims, values: dict[str, Any]) -> ModelDims:
    return ModelDims(**model.model_dump() | values | {"hf_id": ""})
