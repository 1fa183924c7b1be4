"""Routing trace format v2: a folder that records which experts a model chose, token by token.

``manifest.json`` (`Manifest`); ``requests.parquet``, a row a request: `COLUMNS`, lengths in tokens,
``split`` ``calibration`` or ``serving``; ``experts.npy`` or ``experts.npy.xz``, ids ``[token,
layer, top_k]``: from ``first_row`` on a row for each prompt token (none in a decode-only trace,
``prompt_rows`` false), then one for each generated token with a recorded forward pass
(``output_len``), without gap or overlap; ``gate_scores.npz``, optional.

A decode worker computes a request's last prompt token first, which yields the first generated token
(vLLM's KV connectors leave it one short of the prompt): a decode replays ``1 + output_len`` rows
from the last prompt row on; of a decode-only trace, the ``output_len`` that there are. Version 1 is
the same without ``experts.npy.xz``, rank groups and decode-only traces."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.cache import BITSETS
from eldr_sim.errors import InputError
from eldr_sim.inputs import reading
from eldr_sim.parquet import numbers, read_table
from eldr_sim.remade import remade
from eldr_sim.traces.requests.texts import PromptSource
from eldr_sim.traces.routing import gate_scores as gate_scores_file
from eldr_sim.traces.routing.bitsets import check_ids, count_rows, kept_bits, pack_bits
from eldr_sim.traces.routing.gate_scores import GateScores, PromptScore
from eldr_sim.traces.routing.manifest import (
    BUILTIN,
    REFERENCE_TRACE,
    Manifest,
    Provenance,
    builtin_traces,
    folder_of,
    load_ids,
    read_manifest,
)

__all__ = [
    "REFERENCE_TRACE", "Manifest", "Provenance", "RoutingTrace", "builtin_traces", "open_trace",
]  # fmt: skip

SPLITS = ("calibration", "serving")
COLUMNS = {
    "request_id": "string",
    "domain": "string",
    "prompt_len": "int32",
    "output_len": "int32",
    "first_row": "int64",
    "session": "int32",
    "split": "string",
}


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """A validated routing trace. Its expert ids and bit sets are read when first asked for."""

    path: Path  #: the trace folder
    manifest: Manifest  #: what the trace is
    request_id: list[str]  #: names of the requests, unique, length ``n_requests``
    domain: NDArray[np.int16]  #: int16 ``[n_requests]``, index into ``manifest.domains``
    #: ``prompt_len``, ``output_len``: int32 ``[n_requests]``, tokens, each at least 1.
    prompt_len: NDArray[np.int32]
    output_len: NDArray[np.int32]
    #: int64 ``[n_requests]``, first row in `experts`: of the prompt, or, decode-only, of the
    #: decode.
    first_row: NDArray[np.int64]
    #: int32 ``[n_requests]``; requests of one conversation share a number.
    session: NDArray[np.int32]
    #: bool ``[n_requests]``: for fitting policies only, never served.
    is_calibration: NDArray[np.bool_]
    #: The gate's scores summed over prompts, or None where the trace carries none.
    gate_scores: GateScores | None = None
    #: Of each token's experts, take this many that the gate ranked first (`with_top_k`); None: all.
    kept_top_k: int | None = None
    #: Opens the trace of the calibration split, where that lies in a folder of its own.
    calibration_apart: Callable[[], "RoutingTrace"] | None = field(default=None, repr=False)
    #: Rows after which rows come again where a token's place in its step decides (`forced`), or 0.
    period: int = 0

    @cached_property
    def experts(self) -> NDArray[np.uint8] | NDArray[np.uint16]:
        """Expert ids, uint8 or uint16 ``[n_tokens, n_layers, top_k]``: memory-mapped if they are
        stored plain, else decompressed and checked when first asked for; runs need the bit sets
        only."""
        return _read_experts(self.path, self.manifest)[..., : self.top_k]

    @cached_property
    def bits(self) -> NDArray[np.uint64]:
        """The ids as bit sets, uint64 ``[n_tokens, n_layers, ceil(n_experts / 64)]``."""
        return bit_sets(self)

    def bits_of(
        self, first: NDArray[np.int64], length: NDArray[Any]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return bit sets that contain some windows of rows, and where each window begins in them:
        all of the trace, or, of drawn routing, the windows alone where they are a small part.

        Args:
            first, length: int ``[n]``, first row and number of rows of each window."""
        small = 4 * int(length.sum()) < self.manifest.n_tokens
        if "bits" in self.__dict__ or not small or _keeps_bits(self):
            return self.bits, first
        windows = zip(first.tolist(), length.tolist(), strict=True)
        ids = np.concatenate([self.experts[row : row + n] for row, n in windows])
        bits, ends = pack_bits(ids, self.n_experts, str(self.path)), np.cumsum(length, dtype=int)
        bits.flags.writeable = False
        return bits, ends - length

    @cached_property
    def for_calibration(self) -> "RoutingTrace":
        """The trace that holds the calibration split: this one, or one opened when asked for."""
        if self.calibration_apart is None:
            return self
        return replace(self.calibration_apart(), kept_top_k=self.kept_top_k)

    @property
    def texts(self) -> PromptSource:
        """What requests are dealt from: the trace's own, without their experts."""
        lengths = self.prompt_len, self.output_len
        return PromptSource(
            self.path.name, self.domains, self.domain, *lengths, ~self.is_calibration,
            self.has_prompts,
        )  # fmt: skip

    @property
    def has_prompts(self) -> bool:
        """Whether prompt tokens have rows; false for a decode-only trace."""
        return self.manifest.prompt_rows

    @property
    def n_requests(self) -> int:
        """Number of requests."""
        return self.manifest.n_requests

    @property
    def n_layers(self) -> int:
        """Number of MoE layers recorded."""
        return self.manifest.n_layers

    @property
    def n_experts(self) -> int:
        """Number of routed experts per layer."""
        return self.manifest.n_experts

    @property
    def top_k(self) -> int:
        """Experts chosen per token and layer."""
        return self.kept_top_k or self.manifest.top_k

    def with_top_k(self, top_k: int) -> "RoutingTrace":
        """Return the trace with a smaller top-k: of each token's experts in a layer those that the
        gate ranked first. Raises InputError if the trace does not tell those from the others."""
        known = list(accumulate(self.manifest.rank_groups or [self.manifest.top_k]))
        if top_k not in known:
            problem = (
                f"of the {self.manifest.top_k} experts a token chose, {self.path.name} does not "
                f"say which {top_k} came first"
            )
            raise InputError("trace", problem, f"top-{', top-'.join(map(str, known))}")
        return replace(self, kept_top_k=top_k)

    @property
    def domains(self) -> list[str]:
        """Domain names, in the order of the indices in `domain`."""
        return self.manifest.domains

    def decode_window(self, requests: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the recorded decode of requests lies: ``first``, ``length``, int64 ``[n]``:
        from the last prompt token on, ``1 + output_len`` rows; without prompt rows those of the
        generated tokens."""
        q = np.asarray(requests, dtype=np.int64)
        if not self.has_prompts:
            return self.first_row[q], self.output_len[q].astype(np.int64)
        first = self.first_row[q] + self.prompt_len[q] - 1
        return first, self.output_len[q].astype(np.int64) + 1

    def recorded_rows(self, requests: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first row of requests and how many rows they have, int64 ``[n]`` each."""
        q = np.asarray(requests, dtype=np.int64)
        length = self.output_len[q].astype(np.int64)
        return self.first_row[q], (length + self.prompt_len[q] if self.has_prompts else length)

    def require_prompts(self, what: str) -> None:
        """Raise InputError, which says that ``what`` needs them, if there are no prompt rows."""
        if not self.has_prompts:
            raise InputError(
                "trace",
                f"{self.path.name} is decode-only: no experts of prompt tokens, which {what} need",
                "a trace with prompt rows",
            )

    def prompt_counts(self, requests: ArrayLike) -> NDArray[np.uint16] | NDArray[np.uint32]:
        """Count how often each request's prompt tokens chose each expert, ``[n, n_layers,
        n_experts]``.

        ``c_r(l, e)`` of ELDR Sec. 4.2: uint16, or uint32 beyond 65,535 tokens. Raises InputError if
        decode-only."""
        self.require_prompts("expert signatures")
        q = np.asarray(requests, dtype=np.int64)
        longest = int(self.prompt_len[q].max(initial=0))
        kind = np.uint16 if longest <= np.iinfo(np.uint16).max else np.uint32
        return self._counts(self.first_row[q], self.prompt_len[q], kind)

    def prompt_scores(self, requests: ArrayLike, kind: PromptScore) -> NDArray[Any]:
        """Return `prompt_counts`, or gate scores (float32); raises InputError if some lack."""
        if kind == "count":
            return self.prompt_counts(requests)
        return gate_scores_file.select(self.gate_scores, requests, kind)

    def decode_activation(self, requests: ArrayLike) -> NDArray[np.float32]:
        """Return the fraction of decode steps in which each request chose each expert: ``p_i(l,
        e)`` of ELDR Sec. 4.2.1, float32 ``[n, n_layers, n_experts]``; each layer sums to
        ``top_k``."""
        q = np.asarray(requests, dtype=np.int64)
        first, _ = self.decode_window(q)
        counts = self._counts(first + self.has_prompts, self.output_len[q], np.uint32)
        return (counts / self.output_len[q][:, None, None]).astype(np.float32)

    def requests_of(self, domains: Sequence[str], calibration: bool) -> NDArray[np.int64]:
        """Return one split's requests in some domains, in order; raises InputError."""
        unknown = [name for name in domains if name not in self.domains]
        if unknown:
            problem = f"{unknown[0]!r} is not in trace {self.path.name}"
            raise InputError("domain", problem, ", ".join(self.domains))
        wanted = [self.domains.index(name) for name in domains]
        hit = np.isin(self.domain, wanted) & (self.is_calibration == calibration)
        return np.flatnonzero(hit).astype(np.int64)

    def _counts(self, first: NDArray[Any], length: NDArray[Any], kind: Any) -> NDArray[Any]:
        out = np.empty((len(first), self.n_layers, self.n_experts), dtype=kind)
        bits, begins = self.bits_of(first, length)
        for i, (row, n) in enumerate(zip(begins.tolist(), length.tolist(), strict=True)):
            out[i] = count_rows(bits[row : row + n], self.n_experts)
        return out


def bit_sets(trace: RoutingTrace) -> NDArray[np.uint64]:
    """Return a trace's bit sets, see `bitsets.kept_bits`. Those of drawn routing stay in memory:
    the cache has its ids, a half to a quarter as large, and packing them takes 0.1 s."""
    manifest, shape = trace.manifest, (trace.manifest.n_tokens, trace.n_layers, trace.n_experts)
    source = str(trace.path / manifest.experts_file)
    return kept_bits(
        manifest.checksum,
        shape,
        trace.top_k,
        lambda: trace.experts,
        source,
        keep=_keeps_bits(trace),
    )


def _keeps_bits(trace: RoutingTrace) -> bool:
    """Whether the cache holds a trace's bit sets: not those of drawn routing."""
    return trace.calibration_apart is None and not trace.is_calibration.all()


def open_trace(
    path_or_name: str | os.PathLike[str] = REFERENCE_TRACE, *, verify_checksum: bool = True
) -> RoutingTrace:
    """Open and validate a routing trace.

    Args:
        path_or_name: an embedded trace (`builtin_traces`), which takes precedence, or a folder.
        verify_checksum: verify checksums and, of an uncompressed file, every id; pass False for a
            trace that was verified before.

    Returns:
        The trace; its arrays are read when they are used.

    Raises:
        InputError: anything about the trace is invalid.
    """
    path = folder_of(path_or_name)
    manifest = read_manifest(path / "manifest.json")
    scores_path = path / gate_scores_file.FILE_NAME
    if manifest.gate_scores_checksum is None and scores_path.exists():
        problem = "the manifest knows no such file"
        raise InputError(str(scores_path), problem, "gate_scores_checksum in it")
    if verify_checksum and path.parent != BUILTIN:  # a test verifies what ships
        checksums = [
            (manifest.experts_file, manifest.checksum),
            ("requests.parquet", manifest.requests_checksum),
        ]
        if manifest.gate_scores_checksum is not None:
            checksums.append((scores_path.name, manifest.gate_scores_checksum))
        for name, want in checksums:
            got = sha256(path / name)
            if got != want:
                if name == manifest.experts_file:  # that it is truncated says more, where it is
                    load_ids(path / name, manifest.encoding)
                problem = f"checksum {got[:12]}... differs from the manifest's {want[:12]}..."
                raise InputError(str(path / name), problem, "the file as it was written")
    trace = _requests(path, manifest)
    if manifest.encoding == "npy":
        experts = trace.experts
    _check_rows(trace)
    if manifest.gate_scores_checksum is not None:
        scores = gate_scores_file.read(scores_path)
        gate_scores_file.check(
            scores, str(scores_path), trace.prompt_len, trace.n_layers, trace.n_experts
        )
        trace = replace(trace, gate_scores=scores)
    if verify_checksum and manifest.encoding == "npy":
        check_ids(experts, manifest.n_experts, str(path / manifest.experts_file))
    return trace


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file; InputError names it if it cannot be read."""
    with reading(str(path)), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_experts(folder: Path, manifest: Manifest) -> NDArray[Any]:
    path = folder / manifest.experts_file
    bad, experts = partial(InputError, str(path)), load_ids(path, manifest.encoding)
    want = (manifest.n_tokens, manifest.n_layers, manifest.top_k)
    if experts.shape != want:
        raise bad(f"shape {list(experts.shape)}", f"{list(want)} as the manifest says")
    if experts.dtype not in (np.dtype(np.uint8), np.dtype("<u2")):
        raise bad(f"dtype {experts.dtype}", "uint8, uint16")
    if not experts.flags.c_contiguous:
        raise bad("Fortran order", "C order")
    if manifest.encoding != "npy":
        check_ids(experts, manifest.n_experts, str(path))
    return experts


def _requests(path: Path, manifest: Manifest) -> RoutingTrace:
    """Return a trace with its requests: kept, for the manifest has their checksum, or read."""
    read = partial(_read_requests, path, manifest)
    try:
        size = (path / "requests.parquet").stat().st_size
    except OSError:
        return RoutingTrace(path, manifest, **read())
    kept = remade(BITSETS, repr((manifest.model_dump(), size)), read)
    return RoutingTrace(path, manifest, **kept)


def _read_requests(path: Path, manifest: Manifest) -> dict[str, Any]:
    file = path / "requests.parquet"
    bad = partial(InputError, str(file))
    import pyarrow as pa  # takes long to import

    try:
        table = read_table(file)
    except OSError as error:
        raise bad(error.strerror or f"{error}".splitlines()[0]) from None
    except pa.ArrowException as error:
        raise bad(f"{error}".splitlines()[0], "a Parquet file") from None
    columns: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        if name not in table.column_names:
            raise bad(f"column {name} is missing", ", ".join(COLUMNS))
        column = table.column(name)
        if str(column.type) != kind or column.null_count:
            found = f"column {name} is {column.type} with {column.null_count} nulls"
            raise bad(found, f"{kind}, no nulls")
        columns[name] = column.to_pylist() if kind == "string" else numbers(column)
    if table.num_rows != manifest.n_requests:
        raise bad(f"{table.num_rows} requests", f"{manifest.n_requests} as the manifest says")
    for name, allowed in (("domain", manifest.domains), ("split", list(SPLITS))):
        unknown = sorted(set(columns[name]) - set(allowed))
        if unknown:
            raise bad(f"unknown {name} {unknown[0]!r}", ", ".join(allowed))
    if len(set(columns["request_id"])) != table.num_rows:
        raise bad("request_id values are not unique")
    index = {name: i for i, name in enumerate(manifest.domains)}
    domain = np.array([index[name] for name in columns.pop("domain")], dtype=np.int16)
    held = np.array([split == SPLITS[0] for split in columns.pop("split")], dtype=bool)
    return {"domain": domain, "is_calibration": held} | columns


def _check_rows(trace: RoutingTrace) -> None:
    bad = partial(InputError, str(trace.path / "requests.parquet"))
    for name, lengths in (("prompt_len", trace.prompt_len), ("output_len", trace.output_len)):
        if lengths.min() < 1:
            at = int(lengths.argmin())
            raise bad(f"{name} of request {trace.request_id[at]} is {lengths[at]}", "at least 1")
    order = np.argsort(trace.first_row, kind="stable")
    first, length = trace.recorded_rows(order)
    end = first + length
    expected = np.concatenate([[0], end[:-1]])
    for wrong in np.flatnonzero(first != expected)[:1]:
        name, begins, ends = trace.request_id[order[wrong]], first[wrong], expected[wrong]
        if begins < ends:
            before = f"before row {ends} where the request before it ends"
            raise bad(f"rows of request {name} start at {begins}, {before}")
        raise bad(f"rows {ends} to {begins - 1} before request {name} belong to no request")
    if end[-1] != trace.manifest.n_tokens:
        rows = f"{trace.manifest.n_tokens}, the rows of {trace.manifest.experts_file}"
        raise bad(f"the requests' rows end at {end[-1]}", rows)
