"""Formats that `import_trace` reads: chosen experts, as other tools record them.

``npz``
    One NumPy archive: ``topk`` (integers ``[tokens, layers, top_k]``), ``request_id`` and
    ``is_decode`` (one entry a token: index of its request, and whether the row is the forward pass
    of a generated token), ``domain``, ``prompt_len`` and ``output_len`` (one entry a request),
    ``domain_names`` and ``E`` (experts per layer). A request's rows are contiguous, the prompt
    first, and requests follow each other in order. It may hold ``gate_prob`` and ``gate_logit``
    too (numbers ``[m, layers, E]``: the gate's scores summed over prompts, see ``gate_scores``)
    and ``gate_requests`` (the m requests that they belong to, ascending; all where left out).
``parquet``
    One row a token: ``request_id`` and ``domain`` (strings), ``prompt_len`` and ``position``
    (integers; position 0 is the first prompt token) and ``layer_0``, ``layer_1``, ... (lists of
    ``top_k`` integers). A request's rows are contiguous and in order. Where every request begins at
    position ``prompt_len`` the trace is decode-only.
``routed_experts``
    JSON lines, one a request, with ``domain``, optionally ``request_id``, and what engines return:

    - ``routed_experts`` ``[tokens, layers, top_k]`` of prompt and generated tokens, with
      ``prompt_len`` (SGLang's ``return_routed_experts``, the ``routed_experts`` of vLLM before
      0.21); or of generated tokens, beside ``prompt_routed_experts`` (vLLM 0.21,
      docs.vllm.ai/en/v0.21.0/training/routed_experts_replay).
    - Under prefill-decode disaggregation the rows of the prompt in the decode engine's response
      are void, so ``prefill_routed_experts``, those of the prefill engine's response, replace
      them (as vllm-project/router#184 splices them).
    - Each is a nested list, the name of a ``.npy`` file or of a ``.npz`` file of one array
      (relative to the JSON lines), base64 of a ``.npy`` file, or base64 of plain little-endian
      int32 as SGLang sends them; ``n_layers`` and ``top_k`` must then stand beside it.

    Engines return no row for the token generated last: no forward pass has read it.
``fingerprint``
    A folder with ``experts.npz`` (``experts``: integers ``[tokens, layers, top_k]`` in the gate's
    order, generated tokens only) and ``requests.csv`` (``req_id, domain, prompt_tokens,
    routed_tokens, token_offset``; ``finished`` and ``has_repetition`` if known): a two-file form of
    the routing in AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, which publishes JSON files by
    category. It makes a decode-only trace.

Those without names of requests or domains are in `import_dumps`.
"""

import base64
import binascii
import csv
import re
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.inputs import ARRAY_LIMIT, check_arrays, parse_json, read_text, regular_file
from eldr_sim.parquet import read_table
from eldr_sim.traces.routing.gate_scores import GateScores
from eldr_sim.traces.routing.imports.dumps import (
    csv_format,
    read_moe_beyond,
    read_moe_trace,
    read_sglang,
)
from eldr_sim.traces.routing.imports.imported import ImportedRouting
from eldr_sim.traces.routing.imports.torch_file import is_torch_file

_NPZ_KEYS = (
    "topk",
    "request_id",
    "domain",
    "domain_names",
    "is_decode",
    "prompt_len",
    "output_len",
    "E",
)
_NPZ_OPTIONAL = ("gate_requests", "gate_prob", "gate_logit")
_FINGERPRINT = ("req_id", "domain", "prompt_tokens", "routed_tokens", "token_offset")


def detect_format(path: Path) -> str:
    """Return the format of a file or folder, by its content.

    Raises InputError if it is in none of them or cannot be read.
    """
    if path.is_dir():
        if (path / "requests.csv").exists():
            return "fingerprint"
        if any(path.glob("*.pt")):
            return "sglang"
        if (kind := csv_format(path)) is not None:
            return kind
        raise InputError(
            str(path),
            "a folder without requests.csv, .pt files or CSV files of a known format",
            "a file, or experts.npz with requests.csv",
        )
    try:
        with regular_file(path, str(path)).open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    if head[:4] == b"PAR1":
        return "parquet"
    if head.lstrip()[:1] == b"{":
        return "routed_experts"
    if head[:2] == b"PK":
        return "sglang" if is_torch_file(path) else "npz"
    if (kind := csv_format(path)) is not None:
        return kind
    raise InputError(
        str(path),
        "not a .npz archive, Parquet file, JSON lines, or CSV or .pt file of a known format",
        ", ".join(READERS),
    )


def _first_seen(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


# --- npz --------------------------------------------------------------------------------------


def _read_npz(path: Path) -> ImportedRouting:
    data = _load_npz(path, _NPZ_KEYS, _NPZ_OPTIONAL)
    names = [str(name) for name in _listed(path, data, "domain_names", "OSU")]
    domain, prompt, output = (
        _listed(path, data, key, "iu").astype(np.int64)
        for key in ("domain", "prompt_len", "output_len")
    )
    if data["E"].shape or data["E"].dtype.kind not in "iu":
        raise InputError(str(path), f"E is {data['E'].dtype} {list(data['E'].shape)}", "an integer")
    if data["topk"].ndim != 3 or data["topk"].dtype.kind not in "iu":
        found = f"{data['topk'].dtype} {list(data['topk'].shape)}"
        raise InputError(str(path), f"topk is {found}", "integers [tokens, layers, top_k]")
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
    # Summed as floats: a length may be whatever 64 bits hold.
    recorded = lengths.sum(dtype=np.float64) == len(data["topk"])
    rows = np.repeat(np.arange(2 * n), lengths if recorded else 0)
    if not (
        np.array_equal(data["request_id"], rows // 2)
        and np.array_equal(data["is_decode"].astype(bool), rows % 2 == 1)
        and recorded
    ):
        raise InputError(
            str(path),
            "request_id, is_decode and topk do not follow prompt_len and output_len",
            "per request, its prompt rows, then its decode rows",
        )
    return ImportedRouting(
        experts=data["topk"],
        request_id=[f"{names[d]}-{i:04d}" for i, d in enumerate(domain.tolist())],
        domain=[names[d] for d in domain.tolist()],
        prompt_len=prompt,
        output_len=output,
        domains=names,
        n_experts=int(data["E"]),
        gate_scores=_gate_scores(data, n),
    )


def _listed(path: Path, data: Mapping[str, NDArray[Any]], key: str, kinds: str) -> NDArray[Any]:
    """Return an array of one dimension, whose kind of numbers numpy names by one of ``kinds``."""
    values = data[key]
    if values.ndim != 1 or values.dtype.kind not in kinds:
        wanted = "integers" if kinds == "iu" else "texts"
        raise InputError(str(path), f"{key} is {values.dtype} {list(values.shape)}", wanted)
    return values


def _gate_scores(data: Mapping[str, NDArray[Any]], n_requests: int) -> GateScores | None:
    given = [key for key in _NPZ_OPTIONAL if key in data]
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


def _load_npz(
    path: Path, keys: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, NDArray[Any]]:
    try:
        with np.load(check_arrays(path, str(path)), allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive.files]
            if missing:
                raise InputError(str(path), f"array {missing[0]} is missing", ", ".join(keys))
            return {key: archive[key] for key in (*keys, *optional) if key in archive.files}
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(str(path), f"not a .npz archive of plain arrays: {error}") from None


# --- parquet ----------------------------------------------------------------------------------


def _read_parquet(path: Path) -> ImportedRouting:
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError(str(path), f"{error}".splitlines()[0], "a Parquet file") from None
    layers = sorted(
        (name for name in table.column_names if re.fullmatch(r"layer_\d+", name)),
        key=lambda name: int(name[6:]),
    )
    wanted = ["request_id", "domain", "prompt_len", "position", "layer_0"]
    missing = [name for name in wanted if name not in table.column_names]
    if missing or layers != [f"layer_{i}" for i in range(len(layers))]:
        raise InputError(
            str(path),
            f"column {missing[0]} is missing" if missing else f"layers {', '.join(layers)}",
            "request_id, domain, prompt_len, position, layer_0, layer_1, ...",
        )
    nulls = [name for name in (*wanted, *layers) if table.column(name).null_count]
    if nulls or not table.num_rows:
        raise InputError(
            str(path), f"column {nulls[0]} has nulls" if nulls else "no rows", "values, no nulls"
        )
    name = np.array([str(value) for value in table.column("request_id").to_pylist()])
    begin = np.flatnonzero(np.concatenate([[True], name[1:] != name[:-1]]))
    rows = np.diff(np.append(begin, len(name)))
    if len(set(name[begin].tolist())) != len(begin):
        raise InputError(str(path), "rows of a request are not contiguous")
    prompt, position = (_integers(path, table, key) for key in ("prompt_len", "position"))
    domain = table.column("domain").to_pylist()
    first = position[begin]
    prompt_rows = bool((first == 0).all())
    if not prompt_rows and not (first == prompt[begin]).all():
        raise InputError(
            str(path),
            "requests begin at different places",
            "each at position 0, or each at position prompt_len (decode-only)",
        )
    start = np.repeat(begin, rows)
    wrong = np.flatnonzero(
        (position - first.repeat(rows) != np.arange(len(name)) - start)
        | (prompt != prompt[start])
        | np.array([a != domain[b] for a, b in zip(domain, start.tolist(), strict=True)])
    )
    if wrong.size:
        raise InputError(
            str(path),
            f"row {wrong[0]} of request {name[wrong[0]]} breaks its order",
            "positions one by one; one prompt_len and domain a request",
        )
    domains = [str(domain[i]) for i in begin.tolist()]
    return ImportedRouting(
        experts=np.stack([_lists(path, table, layer) for layer in layers], axis=1),
        request_id=name[begin].tolist(),
        domain=domains,
        prompt_len=prompt[begin],
        output_len=rows - prompt[begin] if prompt_rows else rows,
        domains=_first_seen(domains),
        phase="both" if prompt_rows else "generated",
    )


def _integers(path: Path, table: pa.Table, name: str) -> NDArray[np.int64]:
    column = table.column(name)
    if not pa.types.is_integer(column.type):
        raise InputError(str(path), f"column {name} is {column.type}", "integers")
    values: NDArray[np.int64] = column.to_numpy().astype(np.int64)
    return values


def _lists(path: Path, table: pa.Table, name: str) -> NDArray[Any]:
    column = table.column(name).combine_chunks()
    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
    if not (listed and pa.types.is_integer(kind.value_type)):
        raise InputError(str(path), f"column {name} is {kind}", "lists of integers")
    flat = column.flatten()
    top_k = len(flat) // len(column)
    lengths = {kind.list_size} if pa.types.is_fixed_size_list(kind) else None
    if lengths is None:
        lengths = set(column.value_lengths().unique().to_pylist())
    if lengths != {top_k} or flat.null_count or not top_k:
        raise InputError(str(path), f"lists of column {name} differ in length or have nulls")
    ids: NDArray[Any] = flat.to_numpy().reshape(-1, top_k)
    return ids


# --- routed_experts of vLLM and SGLang ---------------------------------------------------------


def _read_routed_experts(path: Path) -> ImportedRouting:
    ids: list[NDArray[Any]] = []
    names: list[str] = []
    domains: list[str] = []
    prompts: list[int] = []
    lines = read_text(path, str(path), ARRAY_LIMIT).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        entry = parse_json(line, where)
        if not isinstance(entry, dict) or not isinstance(entry.get("domain"), str):
            raise InputError(where, "no domain", "an object with domain and routed_experts")
        rows = _routed_rows(entry, "routed_experts", where, path.parent)
        if "prefill_routed_experts" in entry:
            before = _routed_rows(entry, "prefill_routed_experts", where, path.parent)
            if before.shape[1:] != rows.shape[1:]:
                raise InputError(where, f"prefill {list(before.shape)}, decode {list(rows.shape)}")
            prompt = len(before)
            rows = np.concatenate([before, rows[prompt:]])
        elif "prompt_routed_experts" in entry:
            before = _routed_rows(entry, "prompt_routed_experts", where, path.parent)
            if before.shape[1:] != rows.shape[1:]:
                raise InputError(
                    where, f"prompt {list(before.shape)}, generated {list(rows.shape)}"
                )
            prompt = len(before)
            rows = np.concatenate([before, rows])
        else:
            prompt = entry.get("prompt_len", 0)
        if type(prompt) is not int or not 1 <= prompt < len(rows):
            raise InputError(
                where, f"prompt_len {prompt!r} of {len(rows)} recorded tokens", "1 or more, fewer"
            )
        if ids and rows.shape[1:] != ids[0].shape[1:]:
            raise InputError(
                where, f"{list(rows.shape[1:])} layers and top_k", f"{list(ids[0].shape[1:])}"
            )
        ids.append(rows)
        prompts.append(prompt)
        domains.append(entry["domain"])
        names.append(str(entry.get("request_id", f"{entry['domain']}-{len(names):04d}")))
    if not ids:
        raise InputError(str(path), "no requests")
    prompt_len = np.array(prompts, np.int64)
    return ImportedRouting(
        experts=np.concatenate(ids),
        request_id=names,
        domain=domains,
        prompt_len=prompt_len,
        output_len=np.array([len(rows) for rows in ids], np.int64) - prompt_len,
        domains=_first_seen(domains),
    )


def _routed_rows(entry: dict[str, Any], key: str, where: str, folder: Path) -> NDArray[Any]:
    value = entry.get(key)
    try:
        if isinstance(value, list):
            rows = np.array(value)
        elif isinstance(value, str) and value.endswith((".npy", ".npz")):
            loaded = np.load(check_arrays(folder / value, where), allow_pickle=False)
            rows = loaded if isinstance(loaded, np.ndarray) else loaded[loaded.files[0]]
        elif isinstance(value, str):
            data = base64.b64decode(value, validate=True)
            if data.startswith(b"\x93NUMPY"):
                rows = np.load(BytesIO(data), allow_pickle=False)
            else:
                rows = np.frombuffer(data, "<i4").reshape(
                    -1, int(entry["n_layers"]), int(entry["top_k"])
                )
        else:
            raise InputError(where, f"no {key}", "a nested list, a file name or base64")
    except KeyError as error:
        raise InputError(
            where, f"{key} is plain base64 without {error}", "n_layers, top_k"
        ) from None
    except OSError as error:
        raise InputError(where, f"{key} {value}: {error.strerror or error}") from None
    except (
        ValueError,
        TypeError,
        EOFError,
        IndexError,
        binascii.Error,
        zipfile.BadZipFile,
    ) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(where, f"{key} cannot be read: {f'{error}'.splitlines()[0]}") from None
    if rows.ndim != 3 or not np.issubdtype(rows.dtype, np.integer) or 0 in rows.shape:
        raise InputError(
            where, f"{key} is {rows.dtype} {list(rows.shape)}", "integers [tokens, layers, top_k]"
        )
    return rows


# --- GPT-OSS expert fingerprints -----------------------------------------------------------------


def _read_fingerprint(path: Path) -> ImportedRouting:
    ids = _load_npz(path / "experts.npz", ("experts",))["experts"]
    file = path / "requests.csv"
    try:
        with regular_file(file, str(file)).open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(file), f"cannot be read: {error}") from None
    missing = [name for name in _FINGERPRINT if not rows or name not in rows[0]]
    if missing:
        raise InputError(str(file), f"column {missing[0]} is missing", ", ".join(_FINGERPRINT))
    try:
        prompt, output, offset = (
            np.array([int(row[name]) for row in rows], np.int64) for name in _FINGERPRINT[2:]
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(str(file), f"not a number: {error}") from None
    if not np.array_equal(offset, np.cumsum(output) - output) or output.sum() != len(ids):
        raise InputError(
            str(file),
            f"routed_tokens and token_offset do not cover the {len(ids)} rows of experts.npz",
            "one request after the other",
        )
    domain = [row["domain"] for row in rows]
    cut = sum(row.get("finished") == "0" for row in rows)
    loops = sum(row.get("has_repetition") == "1" for row in rows)
    return ImportedRouting(
        experts=ids,
        request_id=[row["req_id"] for row in rows],
        domain=domain,
        prompt_len=prompt,
        output_len=output,
        domains=_first_seen(domain),
        phase="generated",
        ranked=True,
        notes=f"{cut} of {len(rows)} answers were cut off and {loops} repeat themselves: take no "
        "length statistics from it."
        if cut or loops
        else "",
    )


READERS: dict[str, Callable[[Path], ImportedRouting]] = {
    "npz": _read_npz,
    "parquet": _read_parquet,
    "routed_experts": _read_routed_experts,
    "fingerprint": _read_fingerprint,
    "sglang": read_sglang,
    "moe_trace": read_moe_trace,
    "moe_beyond": read_moe_beyond,
}
"""Reader of each format; each raises InputError if what it reads is not of it."""
