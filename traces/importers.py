"""Importers: routing traces out of what other tools have recorded."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim import __version__
from eldr_sim.errors import InputError
from eldr_sim.traces.format import Provenance, RoutingTrace
from eldr_sim.traces.gate_scores import GateScores
from eldr_sim.traces.writer import write_trace

__all__ = ["import_npz"]

_KEYS = (
    "topk",
    "request_id",
    "domain",
    "domain_names",
    "is_decode",
    "prompt_len",
    "output_len",
    "E",
)
_OPTIONAL = ("gate_requests", "gate_prob", "gate_logit")


def import_npz(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: str,
    captured_by: str,
    source_data: str,
    tool_versions: Mapping[str, str],
    provenance: Provenance = "imported",
    notes: str = "",
    calibration_fraction: float = 0.5,
    force: bool = False,
) -> RoutingTrace:
    """Import a NumPy archive of chosen experts as a routing trace.

    The archive holds ``topk`` (integers ``[tokens, layers, top_k]``), ``request_id`` and
    ``is_decode`` (one entry a token: index of its request, and whether the row is the forward
    pass of a generated token), ``domain``, ``prompt_len`` and ``output_len`` (one entry a
    request), ``domain_names`` and ``E`` (experts per layer). A request's rows are contiguous,
    the prompt first, and requests follow each other in order.

    It may hold ``gate_prob`` and ``gate_logit`` too (numbers ``[m, layers, E]``: the gate's scores
    summed over prompts, see ``gate_scores``), and ``gate_requests`` (the m requests that they
    belong to, ascending; all requests where it is left out).

    Parameters
    ----------
    path
        The ``.npz`` file.
    out
        Trace folder to make.
    model, captured_by, source_data, tool_versions, provenance, notes
        See `Manifest`.
    calibration_fraction
        Share of each domain's requests that becomes the calibration split: its first ones in
        file order, so that neighbours, which may be cut from one document, mostly fall on
        one side. Each split keeps at least one request of a domain that has two.
    force
        Replace ``out`` if it is there.

    Raises
    ------
    InputError
        If the archive is not of this layout, the fraction is not within (0, 1), or ``out``
        exists and ``force`` is false.
    """
    if not 0 < calibration_fraction < 1:
        raise InputError(
            "calibration_fraction", f"got {calibration_fraction}", "a number between 0 and 1"
        )
    data = _load(Path(path))
    names = [str(name) for name in data["domain_names"]]
    domain = data["domain"].astype(np.int64)
    prompt = data["prompt_len"].astype(np.int64)
    output = data["output_len"].astype(np.int64)
    n = len(prompt)
    if len(domain) != n or len(output) != n:
        raise InputError(
            str(path),
            f"domain, prompt_len, output_len have {len(domain)}, {n}, {len(output)} entries",
            "one a request",
        )
    if n == 0 or domain.min() < 0 or domain.max() >= len(names):
        raise InputError(
            str(path), "domain is empty or outside domain_names", f"0..{len(names) - 1}"
        )
    lengths = np.stack([prompt, output], axis=1).ravel()
    if lengths.min() < 1:
        raise InputError(str(path), f"a length is {lengths.min()}", "at least 1")
    rows = np.repeat(np.arange(2 * n), lengths)
    if not (
        np.array_equal(data["request_id"], rows // 2)
        and np.array_equal(data["is_decode"].astype(bool), rows % 2 == 1)
        and len(data["topk"]) == len(rows)
    ):
        raise InputError(
            str(path),
            "request_id, is_decode and topk do not follow prompt_len and output_len",
            "per request, its prompt rows, then its decode rows",
        )

    calibration = np.zeros(n, dtype=bool)
    for d in range(len(names)):
        mine = np.flatnonzero(domain == d)
        take = int(len(mine) * calibration_fraction + 0.5)
        if len(mine) > 1:
            take = min(max(take, 1), len(mine) - 1)
        calibration[mine[:take]] = True
    return write_trace(
        out,
        experts=data["topk"],
        request_id=[f"{names[d]}-{i:04d}" for i, d in enumerate(domain.tolist())],
        domain=[names[d] for d in domain.tolist()],
        prompt_len=prompt,
        output_len=output,
        is_calibration=calibration,
        model=model,
        n_experts=int(data["E"]),
        domains=names,
        captured_by=captured_by,
        source_data=source_data,
        tool_versions={**tool_versions, "eldr-sim": __version__, "numpy": np.__version__},
        provenance=provenance,
        notes=notes,
        gate_scores=_gate_scores(data, n),
        force=force,
    )


def _gate_scores(data: Mapping[str, NDArray[Any]], n_requests: int) -> GateScores | None:
    given = [key for key in _OPTIONAL if key in data]
    if not given:
        return None
    for key in given:
        if data[key].dtype.kind not in "iuf":
            raise InputError(key, f"holds {data[key].dtype}", "numbers")
    return GateScores(
        requests=data.get("gate_requests", np.arange(n_requests)).astype(np.int64),
        **{
            kind: data[f"gate_{kind}"].astype(np.float32)
            for kind in ("prob", "logit")
            if f"gate_{kind}" in data
        },
    )


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in _KEYS if key not in archive.files]
            if missing:
                raise InputError(str(path), f"array {missing[0]} is missing", ", ".join(_KEYS))
            return {key: archive[key] for key in (*_KEYS, *_OPTIONAL) if key in archive.files}
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(str(path), f"not a .npz archive of plain arrays: {error}") from None
