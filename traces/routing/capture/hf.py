"""Capture from Hugging Face transformers: hooks on every gate while the model generates."""

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.captured import CapturedRouting, describe_generation
from eldr_sim.traces.routing.capture.gates import Gate, find_gates, probabilities, read_gate
from eldr_sim.traces.routing.capture.prompts import first_line

_INSTALL = "pip install 'eldr-sim[capture]'"


def load_model(model: str, *, device: str = "cpu", dtype: str = "auto") -> Any:
    """Load a causal language model of a folder or hub name for `capture_transformers`. ``device``:
    ``cpu`` or ``cuda``; ``dtype``: ``auto``, ``float32``, ``bfloat16`` or ``float16``. Raises
    InputError if something is missing."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise InputError("capture", f"{error.name} is not installed", _INSTALL) from None
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "cuda is not available to torch", "cpu")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError("model", f"cannot load {model}: {first_line(error)}") from None
    return loaded.to(device).eval()


def capture_transformers(
    model: Any,
    token_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    ignore_eos: bool = False,
    gate_scores: bool = False,
    progress: Callable[[float], None] | None = None,
) -> CapturedRouting:
    """Generate from prompts and record the experts that every gate chooses, ranked by weight.

    Prompts of similar length share a batch, padded on the left. The token at which a request stops
    has no forward pass in an engine and no row here; none stops before its first. The same seed,
    batch size and prompts give the same tokens.

    Raises InputError if a gate is not among `gates.GATES`, layers differ in their experts, or a
    prompt does not fit the model. ``temperature``: over the whole vocabulary; 0 is greedy;
    ``ignore_eos``: generate ``max_new_tokens`` in any case; ``gate_scores``: also sum probabilities
    and raw scores over each prompt."""
    import torch
    import transformers

    generation = describe_generation(max_new_tokens, temperature, seed, ignore_eos)
    if batch_size < 1:
        raise InputError("batch_size", f"got {batch_size}", "at least 1")
    gates = find_gates(model)
    config = model.config.get_text_config()
    _check_prompts(token_ids, config, max_new_tokens)
    hooks = _GateHooks(gates, gate_scores)
    device = next(model.parameters()).device
    order = sorted(range(len(token_ids)), key=lambda q: -len(token_ids[q]))
    experts: dict[int, NDArray[Any]] = {}
    scores: dict[str, dict[int, NDArray[np.float32]]] = {"prob": {}, "logit": {}}
    torch.manual_seed(seed)
    with (
        torch.inference_mode(),
        _generation(model, max_new_tokens, temperature, ignore_eos) as stops,
        hooks.hooked(),
    ):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            ids, mask = _left_padded([token_ids[q] for q in batch], device)
            hooks.begin(mask)
            tokens = model.generate(input_ids=ids, attention_mask=mask)[:, ids.shape[1] :]
            lengths = [_output_len(row, stops, max_new_tokens) for row in tokens.cpu().numpy()]
            experts.update(zip(batch, hooks.rows(lengths), strict=True))
            for kind, values in hooks.score_sums().items():
                scores[kind].update(zip(batch, values, strict=True))
            if progress is not None:
                progress((start + len(batch)) / len(order))
    classes = sorted({type(gate.module).__name__ for gate in gates})
    return CapturedRouting(
        experts=_in_order(experts),
        prompt_len=[len(prompt) for prompt in token_ids],
        layers=[gate.layer for gate in gates],
        n_decoder_layers=int(config.num_hidden_layers),
        n_experts=hooks.n_experts,
        captured_by=f"transformers {transformers.__version__}, hooks on {', '.join(classes)}, "
        f"{str(model.dtype).removeprefix('torch.')} on {device.type}, batches of {batch_size}",
        tool_versions={
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        prob=np.stack(_in_order(scores["prob"])) if scores["prob"] else None,
        logit=np.stack(_in_order(scores["logit"])) if scores["logit"] else None,
        notes=[generation],
    )


def _left_padded(prompts: Sequence[Sequence[int]], device: Any) -> tuple[Any, Any]:
    """Return token ids and attention mask of a batch, each ``[batch, longest prompt]``."""
    import torch

    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _in_order(values: dict[int, NDArray[Any]]) -> list[NDArray[Any]]:
    return [values[request] for request in range(len(values))]


class _GateHooks:
    """Hooks that keep what the gates choose, on the model's device until a batch is done."""

    def __init__(self, gates: Sequence[Gate], gate_scores: bool) -> None:
        self.gates = gates
        self.n_experts = 0
        self._gate_scores = gate_scores
        self._mask: Any = None
        self._ids: list[list[Any]] = []
        self._sums: list[dict[str, Any]] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [
            gate.module.register_forward_hook(self._hook(number))
            for number, gate in enumerate(self.gates)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, mask: Any) -> None:
        """Start a batch of prompts with this attention mask ``[batch, tokens]``."""
        self._mask = mask
        self._ids = [[] for _ in self.gates]
        self._sums = [{} for _ in self.gates]

    def _hook(self, number: int) -> Callable[[Any, Any, Any], None]:
        kind = self.gates[number].scores

        def hook(module: Any, _: Any, output: Any) -> None:
            ids, scores = read_gate(output, module)
            first = not self._ids[number]
            self._ids[number].append(ids.int())
            if not first:
                return
            n_experts = int(scores.shape[-1])
            if self.n_experts not in (0, n_experts):
                problem = (
                    f"layer {self.gates[number].layer} has {n_experts} experts, others "
                    f"{self.n_experts}"
                )
                raise InputError("model", problem, "the same number in every MoE layer")
            self.n_experts = n_experts
            if self._gate_scores:
                batch, width = self._mask.shape
                weight = self._mask.unsqueeze(-1).float()
                by_token = scores.reshape(batch, width, n_experts)
                prob = probabilities(by_token, kind)
                self._sums[number]["prob"] = (prob * weight).sum(dim=1)
                if kind != "probability":
                    self._sums[number]["logit"] = (by_token.float() * weight).sum(dim=1)

        return hook

    def rows(self, output_len: Sequence[int]) -> list[NDArray[Any]]:
        """Return each request's rows ``[token, layer, top_k]``: prompt, then generated tokens."""
        import torch

        batch, width = self._mask.shape
        dtype = np.uint8 if self.n_experts <= 256 else np.uint16
        top_k = {ids[0].shape[-1] for ids in self._ids}
        if len(top_k) > 1:
            problem = f"its layers choose {sorted(top_k)} experts"
            raise InputError("model", problem, "the same top-k everywhere")
        layers = [torch.cat(ids).cpu().numpy().astype(dtype) for ids in self._ids]
        ids = np.stack(layers, axis=1)
        # The first pass computed the padded prompts, each later one a token of every request.
        prompts = ids[: batch * width].reshape(batch, width, *ids.shape[1:])
        passes = ids[batch * width :].reshape(-1, batch, *ids.shape[1:])
        padding = width - self._mask.sum(dim=1).cpu().numpy()
        return [
            np.concatenate([prompts[row, padding[row] :], passes[:count, row]])
            for row, count in enumerate(output_len)
        ]

    def score_sums(self) -> dict[str, NDArray[np.float32]]:
        """Return the sums that every gate has, each ``[batch, layer, expert]``."""
        kinds = set.intersection(*(set(sums) for sums in self._sums))
        return {
            kind: np.stack([sums[kind].cpu().numpy() for sums in self._sums], axis=1)
            for kind in kinds
        }


@contextmanager
def _generation(
    model: Any, max_new_tokens: int, temperature: float, ignore_eos: bool
) -> Iterator[set[int]]:
    """Replace the model's sampling settings by plain ones, and yield the stop tokens. It generates
    one token more than asked for, whose forward pass never runs."""
    from transformers import GenerationConfig

    generation_config = model.generation_config
    eos = (
        generation_config.eos_token_id
        if generation_config.eos_token_id is not None
        else model.config.eos_token_id
    )
    stops: set[int] = set()
    if eos is not None and not ignore_eos:
        stops = set(eos) if isinstance(eos, list | tuple) else {int(eos)}
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens + 1,
        min_new_tokens=1,
        do_sample=bool(temperature),
        eos_token_id=sorted(stops) or None,
        pad_token_id=0,
        use_cache=True,
        **sampling,
    )
    try:
        yield stops
    finally:
        model.generation_config = generation_config


def _output_len(tokens: NDArray[Any], stops: set[int], max_new_tokens: int) -> int:
    """Count the generated tokens before the first stop token, at most ``max_new_tokens``."""
    stop = np.flatnonzero(np.isin(tokens, sorted(stops)))
    return min(int(stop[0]) if len(stop) else max_new_tokens, max_new_tokens)


def _check_prompts(token_ids: Sequence[Sequence[int]], config: Any, max_new_tokens: int) -> None:
    longest = max(len(prompt) for prompt in token_ids)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest + max_new_tokens > limit:
        problem = (
            f"{longest} tokens and {max_new_tokens} generated ones exceed the model's {limit} "
            "positions"
        )
        raise InputError("prompt", problem, "fewer max_new_tokens, or max_prompt_tokens")
    highest = max(max(prompt) for prompt in token_ids)
    if highest >= config.vocab_size:
        problem = f"token id {highest} is not in the vocabulary"
        raise InputError("prompt", problem, f"0..{config.vocab_size - 1}")
