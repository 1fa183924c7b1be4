"""MoE gates of Hugging Face transformers, and what a hook on them sees.

Since version 5 gates are modules that return the scores of all experts ``[tokens, experts]``, and
the weights and ids of the chosen ones ``[tokens, top_k]``. They differ in what scores mean and in
whether the chosen experts are sorted (DeepSeek's are not). Shared experts do not appear."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from eldr_sim.errors import InputError

#: How scores become probabilities: by a softmax over experts, a sigmoid each, or they are.
Scores = Literal["softmax", "sigmoid", "probability"]

#: Kind of the scores, by the gate's class name in ``transformers.models``.
GATES: dict[str, Scores] = {
    "DeepseekV2TopkRouter": "softmax", "DeepseekV3TopkRouter": "sigmoid",
    "Gemma4TextRouter": "probability", "Glm4MoeTopkRouter": "sigmoid",
    "GptOssTopKRouter": "softmax", "GraniteMoeTopKRouter": "softmax",
    "MixtralTopKRouter": "softmax", "OlmoeTopKRouter": "softmax", "Qwen2MoeTopKRouter": "softmax",
    "Qwen3MoeTopKRouter": "softmax", "Qwen3NextTopKRouter": "softmax",
}  # fmt: skip

_SUPPORTED = "models with " + ", ".join(GATES)


@dataclass(frozen=True)
class Gate:
    """Gate of a model."""

    layer: int  #: decoder layer, counted from 0
    module: Any  #: the ``torch.nn.Module``
    scores: Scores  #: kind of its scores


def decoder_layer(name: str) -> int | None:
    """Return the number of the decoder layer in a module's dotted name, None if it has none."""
    match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None


def find_gates(model: Any) -> list[Gate]:
    """Return a model's gates by layer; raises InputError if it has none of `GATES`."""
    gates = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, own_name = name.rpartition(".")
        kind = type(module).__name__
        layer = decoder_layer(name)
        if kind in GATES and layer is not None:
            gates.append(Gate(layer, module, GATES[kind]))
        elif own_name in ("gate", "router") and f"{parent}.experts".lstrip(".") in modules:
            problem = f"the gate {kind} of {type(model).__name__} (module {name}) is not known"
            raise InputError("model", problem, _SUPPORTED)
    if not gates:
        raise InputError("model", f"{type(model).__name__} has no known MoE gate", _SUPPORTED)
    gates.sort(key=lambda gate: gate.layer)
    return gates


def read_gate(output: Any, module: Any) -> tuple[Any, Any]:
    """Return the chosen experts of a gate's output, the highest weight first, ``[tokens, top_k]``,
    and all scores, floats ``[tokens, experts]``.

    Older versions return them in another order: types and shapes tell. Raises InputError, which
    names ``module``, if the gate returned something else."""
    tensors = output if isinstance(output, tuple) and len(output) == 3 else ()
    ids = [t for t in tensors if not t.is_floating_point()]
    floats = [t for t in tensors if t.is_floating_point()]
    if len(ids) == 1 and floats[0].shape == ids[0].shape != floats[1].shape:
        floats.reverse()
    if len(ids) != 1 or floats[1].shape != ids[0].shape:
        problem = (
            f"{type(module).__name__} of the installed transformers does not return scores, "
            "weights and ids"
        )
        raise InputError("model", problem, "transformers 5.19 or later")
    scores, weights = floats
    order = weights.float().argsort(dim=-1, descending=True, stable=True)
    return ids[0].gather(-1, order), scores


def probabilities(scores: Any, kind: Scores) -> Any:
    """Return float32 probabilities ``[..., experts]`` from a gate's scores."""
    if kind == "softmax":
        return scores.float().softmax(dim=-1)
    if kind == "sigmoid":
        return scores.float().sigmoid()
    return scores.float()
