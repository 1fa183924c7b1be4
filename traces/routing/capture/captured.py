"""The routing that a capture yields, and the trace folder written from it."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.calibration import check_fraction, split_calibration
from eldr_sim.traces.routing.capture.prompts import Prompt
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import GateScores
from eldr_sim.traces.routing.writer import check_target, write_trace


@dataclass
class CapturedRouting:
    """Experts that a model chose for a list of requests, request by request."""

    #: Integers ``[prompt_len + output_len, n_layers, top_k]`` a request, its prompt's rows first.
    experts: list[NDArray[Any]]
    prompt_len: list[int]  #: prompt tokens of each request
    layers: list[int]  #: the decoder layers that have a gate, ascending
    n_decoder_layers: int  #: decoder layers of the model
    n_experts: int  #: routed experts per layer
    captured_by: str  #: how the experts were captured, for the manifest
    tool_versions: dict[str, str]  #: versions of the engine and its libraries
    ranked: bool = True  #: whether the ids of a row are ranked, the highest gate weight first
    #: float32 ``[requests, n_layers, n_experts]``: gate scores summed over prompts, or None.
    prob: NDArray[np.float32] | None = None
    logit: NDArray[np.float32] | None = None
    notes: list[str] = field(default_factory=list)  #: what a reader of the trace should know

    def layer_note(self) -> str:
        """Say which decoder layers the trace's layers are."""
        return f"MoE layers: decoder layers {_ranges(self.layers)} of 0-{self.n_decoder_layers - 1}"


def write_captured(
    out: str | os.PathLike[str],
    captured: CapturedRouting,
    prompts: Sequence[Prompt],
    *,
    calibration_fraction: float = 0.5,
    notes: str = "",
    force: bool = False,
    **about: Any,
) -> RoutingTrace:
    """Write captured routing, one entry a prompt, as a trace; raises InputError as `check_options`,
    or if it would not be valid. ``about``: ``model`` and ``source_data``, see `Manifest`."""
    check_options(out, force, calibration_fraction)
    rows = np.array([len(request) for request in captured.experts])
    prompt_len = np.array(captured.prompt_len)
    scores = None
    if captured.prob is not None or captured.logit is not None:
        scores = GateScores(np.arange(len(prompts)), captured.prob, captured.logit)
    return write_trace(
        out,
        experts=np.concatenate(captured.experts),
        request_id=[prompt.request_id for prompt in prompts],
        domain=[prompt.domain for prompt in prompts],
        prompt_len=prompt_len,
        output_len=rows - prompt_len,
        is_calibration=calibration_split(prompts, calibration_fraction),
        n_experts=captured.n_experts,
        domains=list(dict.fromkeys(prompt.domain for prompt in prompts)),
        captured_by=captured.captured_by,
        tool_versions=captured.tool_versions,
        provenance="recorded",
        notes="; ".join(filter(None, [captured.layer_note(), *captured.notes, notes])),
        gate_scores=scores,
        rank_groups=[1] * captured.experts[0].shape[-1] if captured.ranked else None,
        force=force,
        **about,
    )


def calibration_split(prompts: Sequence[Prompt], fraction: float) -> NDArray[np.bool_]:
    """Return which requests are for calibration, bool ``[n]``; a prompt's own ``split`` wins."""
    calibration = np.array([prompt.split == "calibration" for prompt in prompts])
    free = np.flatnonzero([prompt.split is None for prompt in prompts])
    calibration[free] = split_calibration([prompts[i].domain for i in free.tolist()], fraction)
    return calibration


def check_options(out: str | os.PathLike[str], force: bool, calibration_fraction: float) -> None:
    """Raise InputError for what `write_captured` would refuse after a long capture."""
    check_target(out, force)
    check_fraction(calibration_fraction)


def describe_prompts(path: str | os.PathLike[str]) -> str:
    """Return name and SHA-256 of a file of prompts, for a manifest's ``source_data``."""
    file = Path(path)
    return f"{file.name} (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]})"


def describe_generation(
    max_new_tokens: int, temperature: float, seed: int, ignore_eos: bool
) -> str:
    """Return how tokens were generated, for a trace's notes; raises InputError."""
    if max_new_tokens < 1:
        raise InputError("max_new_tokens", f"got {max_new_tokens}", "at least 1")
    if temperature < 0:
        raise InputError("temperature", f"got {temperature}", "0 or above")
    return (
        f"up to {max_new_tokens} generated tokens, "
        + (f"sampled at temperature {temperature:g}, seed {seed}" if temperature else "greedy")
        + (", end of sequence ignored" if ignore_eos else "")
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: 1-3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(str(end) for end in part) for part in parts)
