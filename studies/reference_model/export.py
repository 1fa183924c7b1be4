"""Checkpoints of the reference model in the layout of Hugging Face's Qwen3-MoE. A checkpoint folder
holds ``config.json``, ``model.safetensors`` and the tokenizer, and loads in transformers
(``AutoModelForCausalLM``) and in engines that read its checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from eldr_sim.errors import InputError
from studies.reference_model.data import SEPARATOR
from studies.reference_model.model import ModelConfig, Qwen3Moe

DESCRIPTION_FILE = "training.json"
"""File with a checkpoint's training: its documents, their split, and its figures."""

_FIELDS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim",
    "num_experts": "n_experts", "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_size", "max_position_embeddings": "context",
    "rope_theta": "rope_theta", "rms_norm_eps": "norm_eps",
}  # fmt: skip


def save_checkpoint(model: Qwen3Moe, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint in float32; each of its files appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{theirs: getattr(model.config, ours) for theirs, ours in _FIELDS.items()},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "intermediate_size": model.config.expert_size * model.config.top_k,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_sliding_window": False,
    }
    weights = {name: w.float().contiguous() for name, w in _to_hub(model.state_dict()).items()}
    save_file(weights, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "model.safetensors.tmp").replace(folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": SEPARATOR,
                "model_max_length": model.config.context,
            },
        ),
        ("generation_config.json", {"do_sample": True, "temperature": 0.8, "eos_token_id": 0}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def load_checkpoint(folder: Path) -> tuple[Qwen3Moe, Tokenizer]:
    """Read a checkpoint that `save_checkpoint` wrote. Returns ``model``, ``tokenizer``: the model
    in float32. Raises InputError if a file is missing, broken, or does not fit the others."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InputError("checkpoint", f"{folder} has no {name}", "a folder made by train")
    try:
        stored = json.loads((folder / "config.json").read_text())
        config = ModelConfig(**{ours: stored[theirs] for theirs, ours in _FIELDS.items()})
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(str(folder / "config.json"), f"cannot be used: {error}") from None
    try:
        weights = load_file(folder / "model.safetensors")
        model = Qwen3Moe(config)
        model.load_state_dict(_from_hub(weights, config))
    except (SafetensorError, KeyError, RuntimeError) as error:
        problem = f"{error}".splitlines()[0]
        raise InputError(str(folder / "model.safetensors"), f"cannot be used: {problem}") from None
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def read_description(folder: Path) -> dict[str, Any]:
    """Return what `train` noted in a checkpoint; raises InputError if it has no such file."""
    path = folder / DESCRIPTION_FILE
    try:
        described: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except ValueError as error:
        raise InputError(str(path), f"not JSON: {error}") from None
    missing = [key for key in ("documents", "figures") if key not in described]
    if missing:
        raise InputError(str(path), f"has no {missing[0]}", "the file as train wrote it")
    return described


def _to_hub(state: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, w in state.items():
        if name.endswith("mlp.gate_up"):
            prefix = f"model.{name.removesuffix('gate_up')}experts"
            for e, (gate, up) in enumerate(zip(*w.transpose(1, 2).chunk(2, 1), strict=True)):
                out[f"{prefix}.{e}.gate_proj.weight"] = gate
                out[f"{prefix}.{e}.up_proj.weight"] = up
        elif name.endswith("mlp.down"):
            prefix = f"model.{name.removesuffix('down')}experts"
            for e, down in enumerate(w.transpose(1, 2)):
                out[f"{prefix}.{e}.down_proj.weight"] = down
        else:
            out[f"model.{name}"] = w
    return out


def _from_hub(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    out = {
        name.removeprefix("model."): w.float()
        for name, w in weights.items()
        if ".experts." not in name
    }
    for i in range(config.n_layers):
        prefix = f"layers.{i}.mlp"

        def stack(part: str, prefix: str = prefix) -> Tensor:
            names = [f"model.{prefix}.experts.{e}.{part}.weight" for e in range(config.n_experts)]
            return torch.stack([weights[name].float() for name in names]).transpose(1, 2)

        out[f"{prefix}.gate_up"] = torch.cat([stack("gate_proj"), stack("up_proj")], 2)
        out[f"{prefix}.down"] = stack("down_proj")
    return out
