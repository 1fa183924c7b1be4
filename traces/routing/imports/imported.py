"""What a reader of another tool's recording returns."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eldr_sim.traces.routing.gate_scores import GateScores

Phase = Literal["both", "prompt", "generated"]  #: the phase of which a recording has tokens


@dataclass(frozen=True, eq=False)
class ImportedRouting:
    """Chosen experts as another tool recorded them."""

    #: Integers ``[tokens, layers, top_k]``, the requests' rows one after the other.
    experts: NDArray[Any]
    request_id: list[str]  #: strings, one a request
    domain: list[str] | None  #: strings, one a request; None where the file knows no domains
    #: ``prompt_len``, ``output_len``: int64, one a request.
    prompt_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    domains: list[str]  #: the domains' names in order
    #: The phase of which tokens have rows, or ``both``; lengths of the other are those recorded.
    phase: Phase = "both"
    ranked: bool = False  #: whether the ids of a token are known to stand in the gate's order
    n_experts: int | None = None  #: experts per layer; None where the file does not say
    gate_scores: GateScores | None = None  #: the gate's scores summed over prompts, if recorded
    notes: str = ""  #: what a reader of results must know
