"""Training of the reference model from text, on a CPU or a GPU. Every batch holds all domains
equally; the load-balance loss is taken over the whole batch: per sequence it would forbid experts
that a domain prefers. It is judged by the held-out loss, and by whether domains prefer experts of
their own."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from studies.reference_model.data import Documents, encode, train_tokenizer
from studies.reference_model.export import DESCRIPTION_FILE, load_checkpoint, save_checkpoint
from studies.reference_model.model import ModelConfig, Qwen3Moe, Routing

_SEQUENCES, _TOKENS = 64, 64
_SKIP = 24  # early tokens of a document, whose experts say little about its domain yet


def evaluation_text(documents: Documents, tokenizer: Tokenizer, context: int) -> dict[str, Tensor]:
    """Return int64 ``[sequences, tokens + 1]`` by domain: the beginnings, 64 tokens or the context,
    of up to 64 held-out documents that are as long."""
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
    """Return the held-out loss and how the routing of domains differs; empty without held-out text.

    ``text``: int64 ``[sequences, tokens + 1]`` by domain, equally long. Figures: ``held_out_loss``
    by domain (nats a token), ``mean_loss``; ``dead`` experts over all layers (under a tenth of the
    mean); ``max_load`` over mean; ``distinct`` experts of a layer in a batch that mixes domains, at
    one position; ``reduction`` by domain: percent fewer in a batch of its own."""
    if not text:
        return {}
    loss: dict[str, float] = {}
    chosen: dict[str, Ints] = {}
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


def _counts(experts: Ints, n_experts: int) -> Ints:
    """Count choices: ``[tokens, layers, top_k]`` to ``[layers, n_experts]``."""
    layers = experts.shape[1]
    cells = experts + (np.arange(layers) * n_experts)[:, None]
    return np.bincount(cells.ravel(), minlength=layers * n_experts).reshape(layers, n_experts)


def _distinct(experts: Ints) -> float:
    """Return the mean over layers of the distinct experts of tokens ``[n, layers, top_k]``."""
    return float(np.mean([len(np.unique(experts[:, i])) for i in range(experts.shape[1])]))


STATE_FILE = "training_state.pt"
LOG_FILE = "train_log.jsonl"
_LOG_STEPS = 20


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training."""

    #: Sequences of ``context`` tokens in a batch, a multiple of the number of domains.
    sequences: int = 8
    steps: int | None = None  #: batches to train; give this or ``minutes``
    #: Time to train: the schedule follows the clock, so the weights are not reproducible.
    minutes: float | None = None
    learning_rate: float = 2e-3
    gate_rate: float = 0.3  #: learning rate of the gates, relative to that of the rest
    warmup_steps: int = 100
    decay_from: float = 0.65  #: progress from which the learning rate falls linearly to zero
    weight_decay: float = 0.1
    balance: float = 0.02  #: weight of the load-balance loss of each layer
    balance_end: float = 0.003  #: the same in the last third of the training
    save_minutes: float = 5.0  #: time between checkpoints, each with an evaluation on held-out text
    seed: int = 0
    device: str = "cpu"


#: Sizes: ``cpu`` for an hour or two of one core, ``gpu`` for one data-centre GPU, where it has not
#: been run. The latter has 620M parameters: 56 MB of text would not last it for long.
PRESETS = {
    "cpu": (ModelConfig(), TrainConfig()),
    "gpu": (
        ModelConfig(
            hidden_size=512,
            n_layers=16,
            n_heads=8,
            n_kv_heads=2,
            head_dim=64,
            expert_size=192,
            context=512,
        ),
        TrainConfig(sequences=128, device="cuda", learning_rate=1e-3),
    ),
}


def balance_loss(routing: list[Routing]) -> Tensor:
    """Return the load-balance loss summed over layers; each layer's is 1 at perfect balance.
    ``n_experts * sum_e f_e * P_e`` with ``f`` the share of choices and ``P`` the mean probability
    of each expert over the batch (Switch Transformer, arXiv 2101.03961, Eq. 4)."""
    total = torch.zeros((), device=routing[0].logits.device)
    for layer in routing:
        share = torch.bincount(layer.experts.reshape(-1), minlength=layer.logits.shape[1])
        share = share.float() / layer.experts.numel()
        total = total + layer.logits.shape[1] * (share * layer.probabilities.mean(0)).sum()
    return total


def train(
    documents: Documents,
    out: Path,
    model_config: ModelConfig,
    config: TrainConfig,
    *,
    resume: bool = False,
    log: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> Qwen3Moe:
    """Train a model and leave its checkpoint, its state and a log in ``out`` (see `export`). An
    interrupted training leaves what it saved last; ``resume`` continues, with its own dimensions.
    Raises InputError if a setting or the text does not allow training."""
    _check(documents, out, model_config, config, resume)
    torch.manual_seed(config.seed)
    run = _resume(out, config) if resume else _start(documents, model_config, config)
    model = run.model
    length = model.config.context + 1
    streams = _streams(documents.train, run.tokenizer, length)
    held_out = evaluation_text(documents, run.tokenizer, model.config.context)
    out.mkdir(parents=True, exist_ok=True)

    with (out / LOG_FILE).open("a" if resume else "w") as file:

        def write(entry: dict[str, Any]) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            log(entry)

        def evaluate_and_save() -> None:
            figures = run.progress() | evaluate(model, held_out, config.device)
            write(figures)
            described = {"documents": documents.description(), "figures": figures}
            run.save(out, described | {"config": asdict(config)})

        write(
            {
                "model": asdict(model.config),
                "train": asdict(config),
                "from_step": run.step,
                "parameters": sum(p.numel() for p in model.parameters()),
                "train_tokens": {domain: len(ids) for domain, ids in streams.items()},
            }
        )
        started = time.monotonic() - run.seconds
        saved = logged = run.seconds
        while (progress := _progress(config, run.step, run.seconds)) < 1:
            rate = _learning_rate(config, run.step, progress)
            for group in run.optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            batch = _batch(streams, config, run.step, length).to(config.device)
            weight = config.balance if progress < 2 / 3 else config.balance_end
            figures = _step(model, run.optimizer, batch, weight)
            tokens = batch.shape[0] * (batch.shape[1] - 1)
            run.step += 1
            run.tokens += tokens
            run.seconds = time.monotonic() - started
            if run.step % _LOG_STEPS == 0:
                speed = round(_LOG_STEPS * tokens / (run.seconds - logged))
                write(run.progress() | figures | {"lr": round(rate, 6), "tokens_per_s": speed})
                logged = run.seconds
            if run.seconds - saved >= 60 * config.save_minutes:
                evaluate_and_save()
                logged = saved = run.seconds = time.monotonic() - started
        evaluate_and_save()
    return model


@dataclass
class _Run:
    """A training under way: what its checkpoint and its state keep."""

    model: Qwen3Moe
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def progress(self) -> dict[str, float]:
        """Return how far the training is, for the log."""
        return {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}

    def save(self, out: Path, description: dict[str, Any]) -> None:
        """Write checkpoint, description and state into a folder."""
        save_checkpoint(self.model, self.tokenizer, out)
        (out / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")
        # Last, so that a state never is newer than its weights.
        state = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, out / f"{STATE_FILE}.tmp")
        (out / f"{STATE_FILE}.tmp").replace(out / STATE_FILE)


def _start(documents: Documents, model_config: ModelConfig, config: TrainConfig) -> _Run:
    tokenizer = train_tokenizer(documents.train, model_config.vocab_size)
    model = Qwen3Moe(model_config).to(config.device)
    return _Run(model, tokenizer, _optimizer(model, config))


def _resume(out: Path, config: TrainConfig) -> _Run:
    model, tokenizer = load_checkpoint(out)
    state = torch.load(out / STATE_FILE)
    optimizer = _optimizer(model.to(config.device), config)
    optimizer.load_state_dict(state.pop("optimizer"))
    return _Run(model, tokenizer, optimizer, **state)


def _check(
    documents: Documents, out: Path, model_config: ModelConfig, config: TrainConfig, resume: bool
) -> None:
    if (config.steps is None) == (config.minutes is None):
        raise InputError("steps", "give either steps or minutes")
    for name in ("steps", "minutes"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise InputError(name, f"got {value}", "more than 0")
    if config.sequences < 1 or config.sequences % len(documents.domains):
        raise InputError(
            "sequences",
            f"got {config.sequences}",
            f"a multiple of the {len(documents.domains)} domains",
        )
    if not 257 <= model_config.vocab_size <= 65536:
        raise InputError("vocab_size", f"got {model_config.vocab_size}", "257 to 65536")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "torch sees no CUDA device", "cpu")
    if resume and not (out / STATE_FILE).is_file():
        raise InputError("resume", f"{out} has no {STATE_FILE}", "a folder that train left")
    if not resume and (out / "config.json").exists():
        raise InputError("out", f"{out} holds a checkpoint", "a new folder, or resume")


def _progress(config: TrainConfig, step: int, seconds: float) -> float:
    if config.steps is not None:
        return step / config.steps
    assert config.minutes is not None  # _check saw to it
    return seconds / (60 * config.minutes)


def _step(
    model: Qwen3Moe, optimizer: torch.optim.Optimizer, batch: Tensor, balance_weight: float
) -> dict[str, float]:
    """Train on one batch, int64 ``[sequences, context + 1]``, and return its figures."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        hidden, routing = model(batch[:, :-1])
        loss = model.loss(hidden, batch[:, 1:])
    balance = balance_loss(routing)
    (loss + balance_weight * balance).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "loss": round(loss.item(), 4),
        "balance": round(balance.item() / len(routing), 4),
        "grad_norm": round(norm.item(), 3),
    }


def _optimizer(model: Qwen3Moe, config: TrainConfig) -> torch.optim.Optimizer:
    gates: list[Tensor] = []
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, p in model.named_parameters():
        (gates if name.endswith("gate.weight") else matrices if p.dim() > 1 else vectors).append(p)
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay, "scale": 1.0},
            {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
            {"params": gates, "weight_decay": 0.0, "scale": config.gate_rate},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def _learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    warm = min(1.0, (step + 1) / config.warmup_steps)
    decay = min(1.0, (1 - progress) / (1 - config.decay_from))
    return config.learning_rate * warm * decay


def _streams(
    texts: dict[str, list[str]], tokenizer: Tokenizer, least: int
) -> dict[str, NDArray[np.uint16]]:
    out = {}
    end = np.zeros(1, dtype=np.uint16)
    for domain, docs in texts.items():
        parts = [part for ids in encode(tokenizer, docs) for part in (ids, end)]
        out[domain] = np.concatenate(parts) if parts else end
        if len(out[domain]) <= least:
            raise InputError(
                f"{domain}.txt", f"{len(out[domain])} tokens to train on", f"more than {least}"
            )
    return out


def _batch(
    streams: dict[str, NDArray[np.uint16]], config: TrainConfig, step: int, length: int
) -> Tensor:
    """Return int64 ``[sequences, length]``: windows at random, the domains in turn."""
    rng = np.random.default_rng([config.seed, step])
    rows, domains = [], list(streams.values())
    for i in range(config.sequences):
        stream = domains[i % len(domains)]
        start = rng.integers(len(stream) - length)
        rows.append(stream[start : start + length].astype(np.int64))
    return torch.from_numpy(np.stack(rows))
