"""Small Qwen3-MoE with random weights whose text has domains.

Each domain has a slice of the vocabulary. Every token's embedding and its row of ``lm_head`` share
their domain's direction, so a prompt of one domain continues in that domain, and the random gates
choose experts by domain as well as by token. Nothing is trained: the model has the compute of a MoE
model, not its knowledge.
"""

import os
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.outputs import whole_folder

#: Dimensions of the model that the report was made with: 411 M parameters.
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 2048,
}
DOMAINS = ("code", "math", "medical", "legal")
_FIRST_TOKEN = 4  # the special tokens come before
_SCALE = 0.05
_DOMAIN_LOGIT = 14.0  # lead of tokens of the prompt's domain
_EMBEDDING = 8.0  # more than the layers add to the residual stream, so that a domain lasts


def domain_slices(vocab_size: int) -> dict[str, tuple[int, int]]:
    """Return the token ids ``[first, stop)`` of each domain."""
    width = (vocab_size - _FIRST_TOKEN) // len(DOMAINS)
    starts = (_FIRST_TOKEN + width * i for i in range(len(DOMAINS)))
    return {name: (start, start + width) for name, start in zip(DOMAINS, starts, strict=True)}


def write_model(folder: str | os.PathLike[str], seed: int = 0, **shape: int) -> dict[str, Any]:
    """Write the model in Hugging Face format, bfloat16, and return its configuration. ``folder``
    must not exist; ``shape`` overrides :data:`SHAPE`. Raises InputError if torch or transformers is
    not installed."""
    torch, transformers = _libraries()
    sizes = SHAPE | shape
    config = transformers.Qwen3MoeConfig(
        **sizes,
        intermediate_size=2 * sizes["moe_intermediate_size"],
        max_position_embeddings=8192,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=_SCALE,
    )
    torch.manual_seed(seed)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    with torch.no_grad():
        embedding = torch.randn(vocab, hidden)
        head = torch.randn(vocab, hidden) / hidden**0.5
        for first, stop in domain_slices(vocab).values():
            direction = torch.randn(hidden)
            embedding[first:stop] += direction
            # The last norm leaves a hidden state of length sqrt(hidden), about half of it along
            # the direction of its domain.
            head[first:stop] += _DOMAIN_LOGIT * direction / (0.7 * hidden)
        model.model.embed_tokens.weight.copy_(_EMBEDDING * embedding)
        model.lm_head.weight.copy_(head)
    with whole_folder(Path(folder)) as whole:
        model.save_pretrained(whole)
    return dict(config.to_dict())


def write_draft(folder: str | os.PathLike[str], vocab_size: int, seed: int = 0) -> None:
    """Write a dense random model of one layer, to draft for a model of this vocabulary. ``folder``
    must not exist. Raises InputError as `write_model` does."""
    torch, transformers = _libraries()
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    with whole_folder(Path(folder)) as whole:
        model.save_pretrained(whole)


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise InputError(
            str(error.name), "making a model needs torch and transformers", "vLLM's environment"
        ) from None
    return torch, transformers
