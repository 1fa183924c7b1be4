"""Evaluation: held-out loss, and whether domains prefer experts of their own."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from reference_model.data import Documents, encode
from reference_model.model import Qwen3Moe

_SEQUENCES, _TOKENS = 64, 64
_SKIP = 24  # early tokens of a document, whose experts say little about its domain yet


def evaluation_text(documents: Documents, tokenizer: Tokenizer, context: int) -> dict[str, Tensor]:
    """Return the beginnings of up to 64 held-out documents of each domain.

    Returns text: int64 ``[sequences, tokens + 1]`` by domain, for 64 tokens or the model's context
    if that is shorter; domains without a document so long are left out.
    """
    length, out = min(_TOKENS, context) + 1, {}
    for domain in documents.domains:
        held_out = documents.calibration[domain] + documents.serving[domain]
        rows = [ids[:length] for ids in encode(tokenizer, held_out) if len(ids) >= length]
        if rows:
            chosen = np.random.default_rng(0).permutation(len(rows))[:_SEQUENCES]
            out[domain] = torch.from_numpy(np.stack([rows[i] for i in chosen]).astype(np.int64))
    return out


@torch.no_grad()
def evaluate(model: Qwen3Moe, text: dict[str, Tensor], device: str) -> dict[str, Any]:
    """Return the held-out loss and how the routing of domains differs.

    ``text``: int64 ``[sequences, tokens + 1]`` by domain, equally long.

    Returns figures: ``held_out_loss`` by domain (nats a token) and its mean ``mean_loss``; ``dead``
    experts over all layers (chosen less than a tenth of the mean); ``max_load`` over mean load,
    mean over layers; ``distinct`` experts of a layer in a batch that mixes the domains, one token
    of each sequence at one position; and ``reduction`` by domain: by how many percent a batch of
    that domain alone has fewer. Empty where no text is held out.
    """
    if not text:
        return {}
    loss: dict[str, float] = {}
    chosen: dict[str, NDArray[np.int64]] = {}
    for domain, ids in text.items():
        batch = ids.to(device)
        with torch.autocast(device, torch.bfloat16):
            hidden, routing = model(batch[:, :-1])
            loss[domain] = round(model.loss(hidden, batch[:, 1:]).item(), 3)
        picked = torch.stack([layer.experts for layer in routing], 1).cpu().numpy()
        chosen[domain] = picked.reshape(*batch[:, :-1].shape, *picked.shape[1:])
    n_experts, size = model.config.n_experts, min(len(c) for c in chosen.values())
    loads = np.stack([_counts(c.reshape(-1, *c.shape[2:]), n_experts) for c in chosen.values()])
    share = (loads / loads.sum(-1, keepdims=True)).mean(0)
    names = list(chosen)
    rng = np.random.default_rng(1)
    mixed: list[float] = []
    own: dict[str, list[float]] = {name: [] for name in names}
    tokens = chosen[names[0]].shape[1]
    for t in range(min(_SKIP, tokens - 1), tokens, 2):
        picks = [(names[j % len(names)], rng.integers(size)) for j in range(size)]
        mixed.append(_distinct(np.stack([chosen[d][i, t] for d, i in picks])))
        for name in names:
            own[name].append(_distinct(chosen[name][:size, t]))
    mean = float(np.mean(mixed))
    return {
        "held_out_loss": loss,
        "mean_loss": round(math.fsum(loss.values()) / len(loss), 4),
        "dead": int((share < 0.1 / n_experts).sum()),
        "max_load": round(float(share.max(-1).mean()) * n_experts, 2),
        "distinct": round(mean, 1),
        "reduction": {d: round(100 * (1 - float(np.mean(own[d])) / mean), 1) for d in names},
    }


def _counts(experts: NDArray[np.int64], n_experts: int) -> NDArray[np.int64]:
    """Count choices: ``[tokens, layers, top_k]`` to ``[layers, n_experts]``."""
    layers = experts.shape[1]
    cells = experts + (np.arange(layers) * n_experts)[:, None]
    return np.bincount(cells.ravel(), minlength=layers * n_experts).reshape(layers, n_experts)


def _distinct(experts: NDArray[np.int64]) -> float:
    """Return the mean over layers of the distinct experts of tokens ``[n, layers, top_k]``."""
    return float(np.mean([len(np.unique(experts[:, i])) for i in range(experts.shape[1])]))
