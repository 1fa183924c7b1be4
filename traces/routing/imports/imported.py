"""What a reader of another tool's recording returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eldr_sim.traces.routing.gate_scores import GateScores

__all__ = ["ImportedRouting", "Phase"]

Phase = Literal["both", "prompt", "generated"]
"""The phase of which a recording has tokens."""


@dataclass(frozen=True, eq=False)
class ImportedRouting:
    """Chosen experts as another tool recorded them.

    Attributes
    ----------
    experts
        Integers ``[tokens, layers, top_k]``, the requests' rows one after the other.
    request_id
        Strings, one a request.
    domain
        Strings, one a request; None where the file knows no domains.
    prompt_len, output_len
        int64, one a request.
    domains
        The domains' names in order.
    phase
        The phase of which tokens have rows, or ``both``; lengths of the other are those recorded.
    ranked
        Whether the ids of a token are known to stand in the gate's order.
    n_experts
        Experts per layer; None where the file does not say.
    gate_scores
        The gate's scores summed over prompts, if recorded.
    notes
        What a reader of results must know.
    """

    experts: NDArray[Any]
    request_id: list[str]
    domain: list[str] | None
    prompt_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    domains: list[str]
    phase: Phase = "both"
    ranked: bool = False
    n_experts: int | None = None
    gate_scores: GateScores | None = None
    notes: str = ""
