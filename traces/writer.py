"""Writing a routing trace: a whole and valid folder of format v1, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError

from eldr_sim.errors import InputError
from eldr_sim.traces import gate_scores as gate_scores_file
from eldr_sim.traces.format import (
    COLUMNS,
    SPLITS,
    Manifest,
    Provenance,
    RoutingTrace,
    manifest_error,
    open_trace,
    sha256,
)
from eldr_sim.traces.gate_scores import GateScores

__all__ = ["write_trace"]


def write_trace(
    out: str | os.PathLike[str],
    *,
    experts: NDArray[Any],
    request_id: Sequence[str],
    domain: Sequence[str],
    prompt_len: ArrayLike,
    output_len: ArrayLike,
    is_calibration: ArrayLike,
    model: str,
    n_experts: int,
    domains: Sequence[str],
    captured_by: str,
    source_data: str,
    tool_versions: Mapping[str, str],
    provenance: Provenance,
    notes: str = "",
    session: ArrayLike | None = None,
    gate_scores: GateScores | None = None,
    force: bool = False,
) -> RoutingTrace:
    """Write a routing trace: a whole and valid folder, or nothing.

    Parameters
    ----------
    out
        Folder to make.
    experts
        Expert ids ``[tokens, layers, top_k]``, the requests' rows one after the other.
    request_id, domain, prompt_len, output_len, is_calibration
        One entry a request, see `RoutingTrace`; ``domain`` by name.
    model, n_experts, domains, captured_by, source_data, tool_versions, provenance, notes
        See `Manifest`.
    session
        Conversation number of each request; by default each request is its own.
    gate_scores
        The gate's scores summed over the prompts of some requests.
    force
        Replace ``out`` if it is there.

    Returns
    -------
    RoutingTrace
        The trace as read back from ``out``.

    Raises
    ------
    InputError
        If ``out`` exists and ``force`` is false, or if the trace would not be valid.
    """
    target = Path(out)
    if target.exists() and not force:
        raise InputError("out", f"{target} exists", "a new folder, or force")
    if target.exists() and any(target.iterdir()) and not (target / "manifest.json").exists():
        raise InputError("out", f"{target} exists and is no trace", "a new folder, or a trace")
    ids = np.asarray(experts)
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            "experts", f"got {ids.dtype} {list(ids.shape)}", "integers [tokens, layers, top_k]"
        )
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= n_experts):
        raise InputError(
            "experts", f"ids span {int(ids.min())}..{int(ids.max())}", f"0..{n_experts - 1}"
        )
    ids = np.ascontiguousarray(ids, dtype=np.uint8 if n_experts <= 256 else np.uint16)
    n = len(request_id)
    columns: dict[str, Any] = {
        "request_id": list(request_id),
        "domain": list(domain),
        "prompt_len": np.asarray(prompt_len, dtype=np.int64),
        "output_len": np.asarray(output_len, dtype=np.int64),
        "session": np.arange(n) if session is None else np.asarray(session),
        "split": [SPLITS[0] if c else SPLITS[1] for c in np.asarray(is_calibration, bool)],
    }
    wrong = [name for name, column in columns.items() if len(column) != n]
    if wrong:
        raise InputError(wrong[0], f"has {len(columns[wrong[0]])} entries for {n} requests")
    rows = columns["prompt_len"] + columns["output_len"]
    columns["first_row"] = np.cumsum(rows) - rows

    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        np.save(temporary / "experts.npy", ids)
        arrays = [pa.array(columns[name], type=kind) for name, kind in COLUMNS.items()]
        pq.write_table(
            pa.table(arrays, names=list(COLUMNS)),
            temporary / "requests.parquet",
            compression="zstd",
        )
        scores_path = temporary / gate_scores_file.FILE_NAME
        if gate_scores is not None:
            gate_scores_file.write(scores_path, gate_scores)
        try:
            manifest = Manifest(
                model=model,
                n_layers=ids.shape[1],
                n_experts=n_experts,
                top_k=ids.shape[2],
                domains=list(domains),
                captured_by=captured_by,
                source_data=source_data,
                tool_versions=dict(tool_versions),
                notes=notes,
                provenance=provenance,
                checksum=sha256(temporary / "experts.npy"),
                requests_checksum=sha256(temporary / "requests.parquet"),
                gate_scores_checksum=None if gate_scores is None else sha256(scores_path),
                n_requests=n,
                n_tokens=ids.shape[0],
            )
        except ValidationError as error:
            raise manifest_error("manifest", error) from None
        fields = manifest.model_dump(exclude_none=True)
        text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
        (temporary / "manifest.json").write_text(text, encoding="utf-8")
        open_trace(temporary)
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, old / target.name)
            os.replace(temporary, target)
            shutil.rmtree(old)
        else:
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return open_trace(target)
