"""Summed gate scores of prompts: an optional part of a routing trace (ELDR Sec. 4.2.3).

``gate_scores.npz``: ``requests``, int64 ``[m]``, ascending rows of ``requests.parquet``, and
``prob`` or ``logit`` or both, float32 ``[m, n_layers, n_experts]``: probability (after softmax or
sigmoid) and raw score, summed over the prompt's tokens. Fitting needs the calibration split,
serving the served requests too."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.arrays import Array, Ints
from eldr_sim.errors import InputError
from eldr_sim.inputs import load_arrays

FILE_NAME = "gate_scores.npz"

PromptScore = Literal["count", "prob", "logit"]
"""What a prompt can be summed up by at each layer and expert: the tokens that chose the expert,
or a gate score of all tokens."""

_Kind = Literal["prob", "logit"]
_KINDS: tuple[_Kind, ...] = ("prob", "logit")


@dataclass(frozen=True, eq=False)
class GateScores:
    """Gate scores summed over the prompts of some requests; see the module."""

    requests: Ints  #: int64 ``[m]``, ascending indices of requests of the trace
    #: ``prob``, ``logit``: float32 ``[m, n_layers, n_experts]``, or None where it was not captured.
    prob: NDArray[np.float32] | None = None
    logit: NDArray[np.float32] | None = None

    @property
    def kinds(self) -> list[_Kind]:
        """The scores that are there: ``prob``, ``logit`` or both."""
        return [kind for kind in _KINDS if getattr(self, kind) is not None]


def of_kind(scores: GateScores | None, kind: _Kind) -> tuple[Ints, NDArray[np.float32]]:
    """Return the requests that have a score, ``[m]``, and the scores; raises InputError."""
    chosen: NDArray[np.float32] | None = None if scores is None else getattr(scores, kind)
    if scores is None or chosen is None:
        raise InputError(
            "signature",
            f"gate-{kind} needs the gate's scores, and the routing trace carries no {kind} "
            f"in {FILE_NAME}",
            "a transform of the counts, or a trace captured with gate scores",
        )
    return scores.requests, chosen


def select(scores: GateScores | None, requests: ArrayLike, kind: _Kind) -> NDArray[np.float32]:
    """Return gate scores, float32 ``[n, n_layers, n_experts]``; raises InputError if one lacks."""
    covered, chosen = of_kind(scores, kind)
    wanted = np.asarray(requests, dtype=np.int64)
    place = np.minimum(np.searchsorted(covered, wanted), len(covered) - 1)
    missing = int(np.count_nonzero(covered[place] != wanted))
    if missing:
        raise InputError(
            "signature",
            f"gate-{kind} needs the gate's scores of {len(wanted)} requests, and the routing "
            f"trace lacks those of {missing}",
            "a transform of the counts, or a trace with the gate scores of every request it needs",
        )
    return chosen[place]


def write(path: Path, scores: GateScores) -> None:
    """Write the file; equal scores are equal bytes."""
    arrays = {kind: np.asarray(getattr(scores, kind), np.float32) for kind in scores.kinds}
    with path.open("wb") as file:
        np.savez(file, requests=np.asarray(scores.requests, np.int64), **arrays)  # type: ignore[arg-type]


def read(path: Path) -> GateScores:
    """Read the file as it is; :func:`check` tells whether it fits its trace."""
    arrays = load_arrays(path)
    unknown = sorted(set(arrays) - {"requests", *_KINDS})
    if unknown or "requests" not in arrays:
        problem = f"unknown array {unknown[0]}" if unknown else "array requests is missing"
        raise InputError(str(path), problem, "requests, prob, logit")
    return GateScores(**arrays)


def check(scores: GateScores, where: str, prompt_len: Array, n_layers: int, n_experts: int) -> None:
    """Raise InputError, naming ``where``, if gate scores do not fit their trace: a shape or type is
    wrong, a request unknown or out of order, a score not finite, a probability negative or above
    the prompt's tokens."""
    bad = partial(InputError, where)
    requests, n = np.asarray(scores.requests), len(prompt_len)
    if requests.ndim != 1 or not len(requests) or requests.dtype != np.int64:
        found = f"requests is {requests.dtype} {list(requests.shape)}"
        raise bad(found, "int64 [m], m at least 1")
    if requests[0] < 0 or requests[-1] >= n or not (np.diff(requests) > 0).all():
        raise bad("requests are not ascending numbers", f"0..{n - 1}, each once")
    if not scores.kinds:
        raise bad("holds neither prob nor logit", "one of them at least")
    want = (len(requests), n_layers, n_experts)
    for kind in scores.kinds:
        values: Array = getattr(scores, kind)
        if values.dtype != np.float32 or values.shape != want:
            raise bad(f"{kind} is {values.dtype} {list(values.shape)}", f"float32 {list(want)}")
        if not bool(np.isfinite(values).all()):
            raise bad(f"{kind} holds NaN or infinity", "finite numbers")
    if scores.prob is not None:
        # Sums of float32 probabilities may exceed the number of tokens by their rounding.
        most = prompt_len[requests] * (1 + 1e-3)
        wrong = np.argwhere((scores.prob < 0) | (scores.prob > most[:, None, None]))
        if len(wrong):
            row, layer, expert = wrong[0].tolist()
            which = f"prob of request {requests[row]} layer {layer} expert {expert}"
            allowed = f"0 to its {int(prompt_len[requests[row]])} prompt tokens"
            raise bad(f"{which} is {scores.prob[row, layer, expert]:g}", allowed)
