"""Writer of routing traces: a whole and valid folder of format v2, or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError

from eldr_sim import __version__
from eldr_sim.errors import InputError
from eldr_sim.lazy import Lazy
from eldr_sim.outputs import whole_folder
from eldr_sim.parquet import column, texts
from eldr_sim.traces.routing import gate_scores as gate_scores_file
from eldr_sim.traces.routing.format import COLUMNS, SPLITS, RoutingTrace, open_trace, sha256
from eldr_sim.traces.routing.gate_scores import GateScores
from eldr_sim.traces.routing.manifest import (
    FILE_NAMES,
    Encoding,
    Manifest,
    check_groups,
    manifest_error,
    save_ids,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = Lazy("pyarrow"), Lazy("pyarrow.parquet")


def write_trace(
    out: str | os.PathLike[str],
    *,
    experts: NDArray[Any],
    request_id: Sequence[str],
    domain: Sequence[str],
    prompt_len: ArrayLike,
    output_len: ArrayLike,
    is_calibration: ArrayLike,
    session: ArrayLike | None = None,
    gate_scores: GateScores | None = None,
    force: bool = False,
    **about: Any,
) -> RoutingTrace:
    """Write a routing trace: a whole and valid folder, or nothing; return it as read back.

    Raises InputError if ``out`` exists and ``force`` is false, or the trace would not be valid.
    ``experts``: ``[tokens, layers, top_k]``, the requests' rows one after the other, prompt tokens
    (unless ``prompt_rows`` is false) before generated ones; others: one entry a request, see
    `RoutingTrace`; ``domain`` by name; ``session``: each request its own by default; ``about``:
    fields of `Manifest` that do not follow from the rest."""
    target = Path(out)
    check_target(target, force)
    ids = _checked_ids(experts, about["n_experts"])
    encoding: Encoding = about.setdefault("encoding", "npy")
    about["rank_groups"] = check_groups(about.get("rank_groups"), ids.shape[2], "rank_groups")
    ours = {"eldr-sim": __version__, "numpy": np.__version__}
    about["tool_versions"] = about["tool_versions"] | ours
    n = len(request_id)
    requests = _requests_table(
        about.get("prompt_rows", True),
        request_id=list(request_id),
        domain=list(domain),
        prompt_len=np.asarray(prompt_len, dtype=np.int64),
        output_len=np.asarray(output_len, dtype=np.int64),
        session=np.arange(n) if session is None else np.asarray(session),
        split=[SPLITS[0] if c else SPLITS[1] for c in np.asarray(is_calibration, bool)],
    )
    with whole_folder(target) as temporary:
        save_ids(temporary / FILE_NAMES[encoding], ids, encoding)
        pq.write_table(requests, temporary / "requests.parquet", compression="zstd")
        scores_path = temporary / gate_scores_file.FILE_NAME
        if gate_scores is not None:
            gate_scores_file.write(scores_path, gate_scores)
        try:
            manifest = Manifest(
                **about,
                n_layers=ids.shape[1],
                top_k=ids.shape[2],
                checksum=sha256(temporary / FILE_NAMES[encoding]),
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
        open_trace(temporary).experts  # noqa: B018  reads and checks them
    return open_trace(target, verify_checksum=False)  # verified above


def check_target(out: str | os.PathLike[str], force: bool) -> None:
    """Raise InputError where `write_trace` would refuse its folder."""
    target = Path(out)
    if os.path.lexists(target) and not force:
        raise InputError("out", f"{target} exists", "a new folder, or --force")
    kept = not target.is_dir() or any(target.iterdir())
    if target.exists() and kept and not (target / "manifest.json").exists():
        raise InputError("out", f"{target} exists and is not a trace", "a new folder, or a trace")


def _checked_ids(experts: NDArray[Any], n_experts: int) -> NDArray[Any]:
    """Return expert ids in the type and order of the file."""
    bad, ids = partial(InputError, "experts"), np.asarray(experts)
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise bad(f"got {ids.dtype} {list(ids.shape)}", "integers [tokens, layers, top_k]")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= n_experts):
        raise bad(f"ids span {int(ids.min())}..{int(ids.max())}", f"0..{n_experts - 1}")
    return np.ascontiguousarray(ids, dtype=np.uint8 if n_experts <= 256 else np.uint16)


def _requests_table(prompt_rows: bool, **columns: Any) -> pa.Table:
    """Return the table of requests; their rows of expert ids follow each other."""
    n = len(columns["request_id"])
    wrong = [name for name, values in columns.items() if len(values) != n]
    if wrong:
        raise InputError(wrong[0], f"has {len(columns[wrong[0]])} entries for {n} requests")
    rows = columns["output_len"] + (columns["prompt_len"] if prompt_rows else 0)
    columns["first_row"] = np.cumsum(rows) - rows
    arrays = [
        texts(columns[name], np.arange(n))
        if kind == "string"
        else column(np.asarray(columns[name]), str(kind))
        for name, kind in COLUMNS.items()
    ]
    return pa.table(arrays, names=list(COLUMNS))
