"""Formats that `import_trace` reads (docs/formats.md): chosen experts, as other tools record them.

A request's rows are contiguous, the prompt first. Engines return no row for the token generated
last: no forward pass has read it. Recordings that name no requests or domains are read in
`dumps`."""

import base64
import csv
import re
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eldr_sim import inputs
from eldr_sim.arrays import Array, Ints
from eldr_sim.errors import InputError
from eldr_sim.parquet import read_table
from eldr_sim.traces.routing.gate_scores import GateScores
from eldr_sim.traces.routing.imports import dumps

_NPZ_KEYS = (
    "topk", "request_id", "domain", "domain_names", "is_decode", "prompt_len", "output_len", "E",
)  # fmt: skip
_NPZ_OPTIONAL = ("gate_requests", "gate_prob", "gate_logit")
_FINGERPRINT = ("req_id", "domain", "prompt_tokens", "routed_tokens", "token_offset")


def detect_format(path: Path) -> str:
    """Return the format of a file or folder, by its content; raises InputError if it has none."""
    if path.is_dir():
        if (path / "requests.csv").exists():
            return "fingerprint"
        if any(path.glob("*.pt")):
            return "sglang"
        if (kind := dumps.csv_format(path)) is not None:
            return kind
        problem = "a folder without requests.csv, .pt files or CSV files of a known format"
        raise InputError(str(path), problem, "a file, or experts.npz with requests.csv")
    with inputs.reading(str(path)), inputs.regular_file(path, str(path)).open("rb") as file:
        head = file.read(64)
    if head[:4] == b"PAR1":
        return "parquet"
    if head.lstrip()[:1] == b"{":
        return "routed_experts"
    if head[:2] == b"PK":
        return "sglang" if dumps.is_torch_file(path) else "npz"
    if (kind := dumps.csv_format(path)) is not None:
        return kind
    problem = "not a .npz archive, Parquet file, JSON lines, or CSV or .pt file of a known format"
    raise InputError(str(path), problem, ", ".join(READERS))


# --- npz --------------------------------------------------------------------------------------


def _read_npz(path: Path) -> dumps.ImportedRouting:
    bad, data = partial(InputError, str(path)), _load_npz(path, *_NPZ_KEYS)
    names = [str(name) for name in _listed(path, data, "domain_names", "OSU")]
    domain, prompt, output = (
        _listed(path, data, key, "iu").astype(np.int64)
        for key in ("domain", "prompt_len", "output_len")
    )
    if data["E"].shape or data["E"].dtype.kind not in "iu":
        raise bad(f"E is {data['E'].dtype} {list(data['E'].shape)}", "an integer")
    if data["topk"].ndim != 3 or data["topk"].dtype.kind not in "iu":
        found = f"{data['topk'].dtype} {list(data['topk'].shape)}"
        raise bad(f"topk is {found}", "integers [tokens, layers, top_k]")
    n = len(prompt)
    if len(domain) != n or len(output) != n:
        found = f"{len(domain)}, {n}, {len(output)}"
        raise bad(f"domain, prompt_len, output_len have {found} entries", "one a request")
    if n == 0 or domain.min() < 0 or domain.max() >= len(names):
        raise bad("domain is empty or outside domain_names", f"0..{len(names) - 1}")
    lengths = np.stack([prompt, output], axis=1).ravel()
    if lengths.min() < 1:
        raise bad(f"a length is {lengths.min()}", "at least 1")
    # Summed as floats: a length may be whatever 64 bits hold.
    recorded = lengths.sum(dtype=np.float64) == len(data["topk"])
    rows = np.repeat(np.arange(2 * n), lengths if recorded else 0)
    if not (
        np.array_equal(data["request_id"], rows // 2)
        and np.array_equal(data["is_decode"].astype(bool), rows % 2 == 1)
        and recorded
    ):
        raise bad(
            "request_id, is_decode and topk do not follow prompt_len and output_len",
            "per request, its prompt rows, then its decode rows",
        )
    return dumps.ImportedRouting(
        experts=data["topk"],
        request_id=[f"{names[d]}-{i:04d}" for i, d in enumerate(domain.tolist())],
        domain=[names[d] for d in domain.tolist()],
        prompt_len=prompt,
        output_len=output,
        domains=names,
        n_experts=int(data["E"]),
        gate_scores=_gate_scores(data, n),
    )


def _listed(path: Path, data: Mapping[str, Array], key: str, kinds: str) -> Array:
    """Return an array of one dimension, whose kind of numbers numpy names by one of ``kinds``."""
    values = data[key]
    if values.ndim != 1 or values.dtype.kind not in kinds:
        wanted = "integers" if kinds == "iu" else "texts"
        raise InputError(str(path), f"{key} is {values.dtype} {list(values.shape)}", wanted)
    return values


def _gate_scores(data: Mapping[str, Array], n_requests: int) -> GateScores | None:
    given = [key for key in _NPZ_OPTIONAL if key in data]
    if not given:
        return None
    for key in given:
        if data[key].dtype.kind not in "iuf":
            raise InputError(key, f"holds {data[key].dtype}", "numbers")
    sums = {key[5:]: data[key].astype(np.float32) for key in given if key != "gate_requests"}
    requests = data.get("gate_requests", np.arange(n_requests)).astype(np.int64)
    return GateScores(requests, **sums)


def _load_npz(path: Path, *keys: str) -> dict[str, Array]:
    """Return arrays of an archive, which has those of ``keys``."""
    arrays = inputs.load_arrays(path)
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise InputError(str(path), f"array {missing[0]} is missing", ", ".join(keys))
    return arrays


# --- parquet ----------------------------------------------------------------------------------


def _read_parquet(path: Path) -> dumps.ImportedRouting:
    bad = partial(InputError, str(path))
    try:
        table = read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise bad(f"{error}".splitlines()[0], "a Parquet file") from None
    layers = sorted(
        (name for name in table.column_names if re.fullmatch(r"layer_\d+", name)),
        key=lambda name: int(name[6:]),
    )
    wanted = ["request_id", "domain", "prompt_len", "position", "layer_0"]
    missing = [name for name in wanted if name not in table.column_names]
    if missing or layers != [f"layer_{i}" for i in range(len(layers))]:
        found = f"column {missing[0]} is missing" if missing else f"layers {', '.join(layers)}"
        raise bad(found, "request_id, domain, prompt_len, position, layer_0, layer_1, ...")
    nulls = [name for name in (*wanted, *layers) if table.column(name).null_count]
    if nulls or not table.num_rows:
        raise bad(f"column {nulls[0]} has nulls" if nulls else "no rows", "values, no nulls")
    name = np.array([str(value) for value in table.column("request_id").to_pylist()])
    begin = np.flatnonzero(np.concatenate([[True], name[1:] != name[:-1]]))
    rows = np.diff(np.append(begin, len(name)))
    if len(set(name[begin].tolist())) != len(begin):
        raise bad("rows of a request are not contiguous")
    prompt, position = (_integers(path, table, key) for key in ("prompt_len", "position"))
    domain = table.column("domain").to_pylist()
    first = position[begin]
    prompt_rows = bool((first == 0).all())
    if not prompt_rows and not (first == prompt[begin]).all():
        allowed = "each at position 0, or each at position prompt_len (decode-only)"
        raise bad("requests begin at different places", allowed)
    start = np.repeat(begin, rows)
    wrong = np.flatnonzero(
        (position - first.repeat(rows) != np.arange(len(name)) - start)
        | (prompt != prompt[start])
        | np.array([a != domain[b] for a, b in zip(domain, start.tolist(), strict=True)])
    )
    if wrong.size:
        problem = f"row {wrong[0]} of request {name[wrong[0]]} breaks its order"
        raise bad(problem, "positions one by one; one prompt_len and domain a request")
    domains = [str(domain[i]) for i in begin.tolist()]
    return dumps.ImportedRouting(
        experts=np.stack([_lists(path, table, layer) for layer in layers], axis=1),
        request_id=name[begin].tolist(),
        domain=domains,
        prompt_len=prompt[begin],
        output_len=rows - prompt[begin] if prompt_rows else rows,
        domains=list(dict.fromkeys(domains)),
        phase="both" if prompt_rows else "generated",
    )


def _integers(path: Path, table: pa.Table, name: str) -> Ints:
    column = table.column(name)
    if not pa.types.is_integer(column.type):
        raise InputError(str(path), f"column {name} is {column.type}", "integers")
    values: Ints = column.to_numpy().astype(np.int64)
    return values


def _lists(path: Path, table: pa.Table, name: str) -> Array:
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
    ids: Array = flat.to_numpy().reshape(-1, top_k)
    return ids


# --- routed_experts of vLLM and SGLang ---------------------------------------------------------


def _read_routed_experts(path: Path) -> dumps.ImportedRouting:
    ids: list[Array] = []
    names: list[str] = []
    domains: list[str] = []
    prompts: list[int] = []
    lines = inputs.read_text(path, str(path), inputs.array_limit()).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        bad = partial(InputError, where := f"{path}:{number}")
        entry = inputs.parse_json(line, where)
        if not isinstance(entry, dict) or not isinstance(entry.get("domain"), str):
            raise bad("no domain", "an object with domain and routed_experts")
        rows, prompt = _of_prompt_and_answer(entry, where, path.parent)
        if type(prompt) is not int or not 1 <= prompt < len(rows):
            found = f"prompt_len {prompt!r} of {len(rows)} recorded tokens"
            raise bad(found, "1 or more, fewer")
        if ids and rows.shape[1:] != ids[0].shape[1:]:
            raise bad(f"{list(rows.shape[1:])} layers and top_k", f"{list(ids[0].shape[1:])}")
        ids.append(rows)
        prompts.append(prompt)
        domains.append(entry["domain"])
        names.append(str(entry.get("request_id", f"{entry['domain']}-{len(names):04d}")))
    if not ids:
        raise InputError(str(path), "no requests")
    prompt_len = np.array(prompts, np.int64)
    return dumps.ImportedRouting(
        experts=np.concatenate(ids),
        request_id=names,
        domain=domains,
        prompt_len=prompt_len,
        output_len=np.array([len(rows) for rows in ids], np.int64) - prompt_len,
        domains=list(dict.fromkeys(domains)),
    )


def _of_prompt_and_answer(entry: dict[str, Any], where: str, folder: Path) -> tuple[Array, Any]:
    """Return the rows of a request, and how many of them are of its prompt."""
    rows = _routed_rows(entry, "routed_experts", where, folder)
    for key, first, then in (
        ("prefill_routed_experts", "prefill", "decode"),
        ("prompt_routed_experts", "prompt", "generated"),
    ):
        if key in entry:
            before = _routed_rows(entry, key, where, folder)
            if before.shape[1:] != rows.shape[1:]:
                problem = f"{first} {list(before.shape)}, {then} {list(rows.shape)}"
                raise InputError(where, problem)
            after = rows[len(before) :] if first == "prefill" else rows
            return np.concatenate([before, after]), len(before)
    return rows, entry.get("prompt_len", 0)


def _routed_rows(entry: dict[str, Any], key: str, where: str, folder: Path) -> Array:
    value = entry.get(key)
    try:
        if isinstance(value, list):
            rows = np.array(value)
        elif isinstance(value, str) and value.endswith((".npy", ".npz")):
            loaded = np.load(inputs.check_arrays(folder / value, where), allow_pickle=False)
            rows = loaded if isinstance(loaded, np.ndarray) else loaded[loaded.files[0]]
        elif isinstance(value, str):
            data = base64.b64decode(value, validate=True)
            if data.startswith(b"\x93NUMPY"):
                rows = inputs.parse_array(data, Path(where), where)
            else:
                rows = np.frombuffer(data, "<i4").reshape(
                    -1, int(entry["n_layers"]), int(entry["top_k"])
                )
        else:
            raise InputError(where, f"no {key}", "a nested list, a file name or base64")
    except InputError:
        raise
    except KeyError as error:
        problem = f"{key} is plain base64 without {error}"
        raise InputError(where, problem, "n_layers, top_k") from None
    except OSError as error:
        raise InputError(where, f"{key} {value}: {error.strerror or error}") from None
    except (ValueError, TypeError, EOFError, IndexError, zipfile.BadZipFile) as error:
        raise InputError(where, f"{key} cannot be read: {f'{error}'.splitlines()[0]}") from None
    if rows.ndim != 3 or not np.issubdtype(rows.dtype, np.integer) or 0 in rows.shape:
        found = f"{key} is {rows.dtype} {list(rows.shape)}"
        raise InputError(where, found, "integers [tokens, layers, top_k]")
    return rows


# --- GPT-OSS expert fingerprints -----------------------------------------------------------------


def _read_fingerprint(path: Path) -> dumps.ImportedRouting:
    ids = _load_npz(path / "experts.npz", "experts")["experts"]
    file = path / "requests.csv"
    bad = partial(InputError, str(file))
    try:
        with inputs.regular_file(file, str(file)).open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise bad(f"cannot be read: {error}") from None
    missing = [name for name in _FINGERPRINT if not rows or name not in rows[0]]
    if missing:
        raise bad(f"column {missing[0]} is missing", ", ".join(_FINGERPRINT))
    try:
        prompt, output, offset = (
            np.array([int(row[name]) for row in rows], np.int64) for name in _FINGERPRINT[2:]
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise bad(f"not a number: {error}") from None
    if not np.array_equal(offset, np.cumsum(output) - output) or output.sum() != len(ids):
        covered = f"the {len(ids)} rows of experts.npz"
        problem = f"routed_tokens and token_offset do not cover {covered}"
        raise bad(problem, "one request after the other")
    domain = [row["domain"] for row in rows]
    cut = sum(row.get("finished") == "0" for row in rows)
    loops = sum(row.get("has_repetition") == "1" for row in rows)
    return dumps.ImportedRouting(
        experts=ids,
        request_id=[row["req_id"] for row in rows],
        domain=domain,
        prompt_len=prompt,
        output_len=output,
        domains=list(dict.fromkeys(domain)),
        phase="generated",
        ranked=True,
        notes=f"{cut} of {len(rows)} answers were cut off and {loops} repeat themselves: take no "
        "length statistics from it."
        if cut or loops
        else "",
    )


READERS: dict[str, Callable[[Path], dumps.ImportedRouting]] = {
    "npz": _read_npz, "parquet": _read_parquet, "routed_experts": _read_routed_experts,
    "fingerprint": _read_fingerprint, "sglang": dumps.read_sglang,
    "moe_trace": dumps.read_moe_trace, "moe_beyond": dumps.read_moe_beyond,
}  # fmt: skip
"""Reader of each format; each raises InputError if what it reads is not of it."""
