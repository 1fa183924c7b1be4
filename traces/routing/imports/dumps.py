"""Recordings that name no requests or domains: engines' dumps and logs by layer (docs/formats.md).

SGLang's recorder holds forward passes; which request a token belongs to follows from its position
(`_Passes`), and physical experts become logical ones by the file's map. llama.cpp's last layer is
left out where it has fewer tokens. Tensors in ``torch.save`` files (a zip of ``data.pkl`` and raw
storages) are read without torch; a pickle may name tensors, storages and plain containers only."""

import csv
import json
import math
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eldr_sim.arrays import Array, Ints
from eldr_sim.errors import InputError
from eldr_sim.inputs import DOCUMENT_LIMIT, array_limit, check_archive, regular_file, within
from eldr_sim.traces.routing.gate_scores import GateScores

_STORAGES = {
    "ByteStorage": np.uint8, "CharStorage": np.int8, "ShortStorage": np.int16,
    "IntStorage": np.int32, "LongStorage": np.int64, "HalfStorage": np.float16,
    "FloatStorage": np.float32, "DoubleStorage": np.float64, "BoolStorage": np.bool_,
}  # fmt: skip


_LONGEST = 1 << 32  # of a side of a tensor without values


def is_torch_file(path: Path) -> bool:
    """Say whether a zip archive is one of ``torch.save``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.split("/")[-1] == "data.pkl" for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError):
        return False


def load_tensors(path: Path) -> Any:
    """Return what ``torch.save`` wrote, tensors as arrays; raises InputError for other things."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.split("/")[-1] == "data.pkl"), None)
            if name is None:
                raise InputError(str(path), "no data.pkl in it", "a file of torch.save")
            check_archive(archive, path, str(path))
            size = archive.getinfo(name).file_size
            within(str(path), size, DOCUMENT_LIMIT, " bytes of data.pkl")
            with archive.open(name) as file:
                return _Unpickler(file, archive, name.removesuffix("data.pkl")).load()
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except InputError:
        raise
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        problem = f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
        raise InputError(str(path), f"not a file of torch.save: {problem}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(file)
        self._archive, self._folder = archive, folder
        self._storages: dict[str, Array] = {}
        self._left = array_limit()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if module == "torch" and name in _STORAGES:
            return name
        raise InputError("file", f"holds {module}.{name}", "tensors and plain values")

    def persistent_load(self, pid: Any) -> Array:
        _, kind, key, _, size = pid
        if key not in self._storages:
            raw = self._archive.read(f"{self._folder}data/{key}")
            self._storages[key] = np.frombuffer(raw, _STORAGES[kind], count=size)
        return self._storages[key]

    def _tensor(
        self, storage: Array, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> Array:
        """Return a tensor's values; ``stride`` counts elements. Each stands once in the storage:
        one that is repeated by a stride of 0 could take any memory."""
        shape, stride = tuple(map(index, shape)), tuple(map(index, stride))
        n_values = math.prod(shape)
        if min(shape, default=0) < 0 or min(stride, default=0) < 0 or offset < 0:
            raise ValueError("a tensor of negative sizes or strides")
        if n_values == 0:
            return np.zeros(shape if max(shape) < _LONGEST else 0, storage.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if last >= len(storage) or n_values > len(storage):
            raise ValueError("a tensor reaches beyond its storage")
        self._left -= n_values * storage.itemsize
        if self._left < 0:
            raise ValueError(f"tensors of over {array_limit():,} bytes")
        view = np.lib.stride_tricks.as_strided(
            storage[offset:], shape, [step * storage.itemsize for step in stride], writeable=False
        )
        return np.array(view)


Phase = Literal["both", "prompt", "generated"]  #: the phase of which a recording has tokens


@dataclass(frozen=True, eq=False)
class ImportedRouting:
    """Chosen experts as another tool recorded them."""

    #: Integers ``[tokens, layers, top_k]``, the requests' rows one after the other.
    experts: Array
    request_id: list[str]  #: strings, one a request
    domain: list[str] | None  #: strings, one a request; None where the file knows no domains
    #: ``prompt_len``, ``output_len``: int64, one a request.
    prompt_len: Ints
    output_len: Ints
    domains: list[str]  #: the domains' names in order
    #: The phase of which tokens have rows, or ``both``; lengths of the other are those recorded.
    phase: Phase = "both"
    ranked: bool = False  #: whether the ids of a token are known to stand in the gate's order
    n_experts: int | None = None  #: experts per layer; None where the file does not say
    gate_scores: GateScores | None = None  #: the gate's scores summed over prompts, if recorded
    notes: str = ""  #: what a reader of results must know


_MOE_BEYOND = ("Layer ID", "Batch Number", "Token", "Activated Expert IDs")
_MOE_TRACE = ("phase", "token", "layer", "rank", "expert")
_EXTEND, _DECODE = 1, 2  #: values of SGLang's ForwardMode

#: Expert ids ``[tokens, layers, top_k]`` and how many of the tokens are of the prompt.
Request = tuple[Array, int]


def _gathered(
    names: list[str], requests: list[Request], phase: Phase, **about: Any
) -> ImportedRouting:
    shapes = {ids.shape[1:] for ids, _ in requests}
    if len(shapes) > 1:
        found = ", ".join(f"{layers} x {k}" for layers, k in sorted(shapes))
        raise InputError("file", f"requests of unequal layers x top-k: {found}", "one model's")
    prompt = np.array([n for _, n in requests], np.int64)
    total = np.array([len(ids) for ids, _ in requests], np.int64)
    return ImportedRouting(
        experts=np.concatenate([ids for ids, _ in requests]),
        request_id=names,
        domain=None,
        prompt_len=prompt,
        output_len=total - prompt,
        domains=[],
        phase=phase,
        **about,
    )


def _files(path: Path, suffix: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{suffix}"))
    if not files:
        raise InputError(str(path), f"no {suffix} file in it")
    return files


# --- SGLang ------------------------------------------------------------------------------------


def read_sglang(path: Path) -> ImportedRouting:
    """Read dumps of SGLang's recorder."""
    names: list[str] = []
    requests: list[Request] = []
    left_out, experts = 0, 0
    for file in _files(path, ".pt"):
        data = load_tensors(file)
        records = data.get("records") if isinstance(data, dict) else None
        if not isinstance(records, list) or not records:
            raise InputError(str(file), "no records", "a dump of SGLang's recorder")
        for number, record in enumerate(records):
            _check_record(record, f"{file}: record {number}")
        passes = _Passes()
        for record in sorted(records, key=lambda r: int(r.get("forward_pass_id", 0))):
            passes.add(record, str(file))
        whole = [request for request in passes.requests if request.is_whole]
        left_out += len(passes.requests) - len(whole)
        logical = data.get("last_physical_to_logical_map")
        layers, top_k = _recorded(np.asarray(records[-1]["topk_ids_of_layer"]), str(file))
        for i, request in enumerate(whole):
            ids = np.concatenate(request.rows, axis=1)[layers][:, :, :top_k]
            if ids.min() < 0:
                raise InputError(str(file), "tokens without experts in a layer that has some")
            if logical is not None:
                table = np.asarray(logical)[layers]
                ids = np.take_along_axis(table, ids.reshape(len(ids), -1), 1).reshape(ids.shape)
            requests.append((ids.transpose(1, 0, 2), request.prompt))
            names.append(f"{file.stem}-{i:05d}")
        if logical is not None:
            experts = max(experts, int(np.asarray(logical).max()) + 1)
    if not requests:
        raise InputError(str(path), "no request with its whole prompt and generated tokens")
    notes = "The dump names no requests: the positions of their tokens separate them."
    if left_out:
        notes += f" {left_out} requests are left out: their prompt or all generated tokens lack."
    return _gathered(names, requests, "both", n_experts=experts or None, ranked=True, notes=notes)


_FIELDS = "topk_ids_of_layer", "positions", "forward_mode"


def _check_record(record: Any, where: str) -> None:
    """Raise InputError unless a record of a forward pass has all that is read of it."""
    if not isinstance(record, dict):
        raise InputError(where, f"is a {type(record).__name__}", "a dictionary of a forward pass")
    extends = np.array_equal(np.asarray(record.get("forward_mode")), _EXTEND)
    for name in (*_FIELDS, "extend_seq_lens") if extends else _FIELDS:
        if record.get(name) is None:
            raise InputError(where, f"no {name}", "a dump of the mode per_token")
    ids, positions = np.asarray(record["topk_ids_of_layer"]), np.asarray(record["positions"])
    for name, values, sides in (("topk_ids_of_layer", ids, 3), ("positions", positions, 1)):
        if values.ndim != sides or (values.size and values.dtype.kind not in "iu"):
            found = f"{name} is {values.dtype} {list(values.shape)}"
            raise InputError(where, found, f"integers of {sides} dimensions")


def _recorded(ids: Array, where: str) -> tuple[Ints, int]:
    """Return the MoE layers and top-k of a pass: other layers and slots were never written."""
    used = ids.max(axis=1) > 0  # [layers, slots]
    layers = np.flatnonzero(used.any(axis=1))
    if not len(layers):
        raise InputError(where, "no layer chose an expert")
    return layers, int(used[layers].any(axis=0).sum())


class _Tracked:
    """A request in a recording: its rows, and the position that its next token must have."""

    def __init__(self, start: int) -> None:
        self.start = self.next = start
        self.rows: list[Array] = []
        self.prompt = 0

    def extend(self, rows: Array, is_prompt: bool) -> None:
        self.rows.append(rows)
        self.next += rows.shape[1]
        self.prompt += rows.shape[1] if is_prompt else 0

    @property
    def decodes(self) -> bool:
        return self.prompt < self.next - self.start

    @property
    def is_whole(self) -> bool:
        """From the first prompt token on (none cached or unrecorded), with generated tokens."""
        return self.start == 0 and self.prompt > 0 and self.decodes


class _Passes:
    """Forward passes in order, their tokens dealt to requests.

    A batch keeps its order: requests leave it, and new ones join at its end. So the tokens of a
    decode pass belong to the running requests in order, each to the next one that waits for its
    position; requests passed over have finished. A prompt's chunk belongs to the request that waits
    for its first position, or to a new one."""

    def __init__(self) -> None:
        self.requests: list[_Tracked] = []
        self._running: list[_Tracked] = []

    def add(self, record: dict[str, Any], where: str) -> None:
        """Take a record of the dump."""
        ids = np.asarray(record["topk_ids_of_layer"])
        positions = [int(p) for p in record["positions"]]
        if ids.ndim != 3 or ids.shape[1] != len(positions):
            raise InputError(where, f"topk_ids {list(ids.shape)} of {len(positions)} positions")
        if record["forward_mode"] == _DECODE:
            self._decode(ids, positions)
        elif record["forward_mode"] == _EXTEND:
            lengths = [int(n) for n in record["extend_seq_lens"]]
            if sum(lengths) != len(positions):
                raise InputError(where, f"extend_seq_lens sum to {sum(lengths)}, not positions")
            self._extend(ids, positions, lengths)
        elif positions:  # mixed or speculative: which tokens are whose is not recorded
            allowed = f"{_EXTEND} (extend), {_DECODE} (decode)"
            raise InputError(where, f"forward_mode {record['forward_mode']}", allowed)

    def _extend(self, ids: Array, positions: list[int], lengths: list[int]) -> None:
        at = 0
        for n in lengths:
            begin = positions[at]
            known = [r for r in self._running if begin and r.next == begin and not r.decodes]
            request = known[-1] if known else self._new(begin)
            request.extend(ids[:, at : at + n], is_prompt=True)
            at += n

    def _decode(self, ids: Array, positions: list[int]) -> None:
        waiting = iter(self._running)
        still: list[_Tracked] = []
        for i, position in enumerate(positions):
            request = next((r for r in waiting if r.next == position), None)
            if request is None:  # it began before the recording did
                waiting = iter([])
                request = self._new(position)
                self._running.pop()
            request.extend(ids[:, i : i + 1], is_prompt=False)
            still.append(request)
        self._running = still

    def _new(self, start: int) -> _Tracked:
        request = _Tracked(start)
        self.requests.append(request)
        self._running.append(request)
        return request


# --- CSV files ----------------------------------------------------------------------------------


def csv_format(path: Path) -> str | None:
    """Return the format of a CSV file, or of the first in a folder; None of another file."""
    if path.is_dir():
        path = next(iter(sorted(path.glob("*.csv"))), path)
    try:
        with regular_file(path, str(path)).open(encoding="utf-8", newline="") as file:
            row = next(csv.reader(file), [])
    except (InputError, OSError, UnicodeDecodeError, csv.Error):
        return None
    if tuple(row) == _MOE_BEYOND:
        return "moe_beyond"
    plain = len(row) == 2 and (row == ["layer", "expert"] or all(x.isdecimal() for x in row))
    return "moe_trace" if plain or tuple(row) == _MOE_TRACE else None


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from enumerate(csv.reader(file), start=1)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), f"cannot be read: {error}") from None


def _read_files(
    path: Path, phase: Phase, read: Callable[[Path], Request], **about: Any
) -> ImportedRouting:
    files = _files(path, ".csv")
    return _gathered([file.stem for file in files], [read(f) for f in files], phase, **about)


def _stacked(path: Path, by_layer: dict[int, list[list[int]]]) -> Array:
    """Return ids ``[tokens, layers, top_k]`` of the lists of a layer's tokens."""
    last = max(by_layer, default=0)
    if len(by_layer) > 1 and len(by_layer[last]) < len(by_layer[min(by_layer)]):
        by_layer = {layer: lists for layer, lists in by_layer.items() if layer != last}
    tokens = {len(lists) for lists in by_layer.values()}
    top_k = {len(ids) for lists in by_layer.values() for ids in lists}
    if len(tokens) != 1 or len(top_k) != 1 or 0 in top_k:
        problem = "layers of unequal tokens, or tokens of unequal experts"
        raise InputError(str(path), problem, "one of each")
    return np.array([by_layer[layer] for layer in sorted(by_layer)]).transpose(1, 0, 2)


def read_moe_beyond(path: Path) -> ImportedRouting:
    """Read CSV files of moe-beyond: prompts."""

    def read(file: Path) -> Request:
        by_layer: dict[int, list[list[int]]] = defaultdict(list)
        for number, row in _rows(file):
            if number == 1 and tuple(row) == _MOE_BEYOND:
                continue
            try:
                layer, batch, _, listed = row
                if int(batch):
                    raise InputError(f"{file}:{number}", f"batch {batch}", "0: a prompt a file")
                by_layer[int(layer)].append([int(e) for e in json.loads(listed)])
            except (ValueError, TypeError, RecursionError):
                raise InputError(
                    f"{file}:{number}", f"got {','.join(row)!r:.60}", ", ".join(_MOE_BEYOND)
                ) from None
        ids = _stacked(file, by_layer)
        return ids, len(ids)

    return _read_files(path, "prompt", read)


def read_moe_trace(path: Path) -> ImportedRouting:
    """Read CSV files of llama.cpp's moe-trace: a prompt and its continuation."""
    return _read_files(path, "both", _moe_trace, ranked=True)


def _moe_trace(path: Path) -> Request:
    """Read one request.

    Without token numbers, a run of rows of one layer is a batch of tokens: the continuation's runs
    are of one token, ``top_k`` rows each, and the shortest there are; longer ones are the prompt's,
    whose last token counts as generated where it is a batch of its own."""
    rows = _rows(path)
    header = next(rows, (0, [""]))[1]
    numbered = tuple(header) == _MOE_TRACE
    values: list[tuple[int, ...]] = []
    prompts: set[int] = set()
    for number, row in rows if not header[0].isdecimal() else _rows(path):
        try:
            if numbered:
                phase, token, layer, rank, expert = row
                if phase not in ("prefill", "decode"):
                    raise ValueError
                values.append((int(layer), int(token), int(rank), int(expert)))
                if phase == "prefill":
                    prompts.add(int(token))
            else:
                layer, expert = row
                values.append((int(layer), int(expert)))
        except ValueError:
            allowed = ", ".join(_MOE_TRACE if numbered else ("layer", "expert"))
            raise InputError(f"{path}:{number}", f"got {','.join(row)!r:.60}", allowed) from None
    by_layer: dict[int, list[list[int]]] = defaultdict(list)
    if not values:
        raise InputError(str(path), "no rows")
    table = np.array(values)
    if numbered:
        table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0]))]
        cells = np.flatnonzero(np.any(np.diff(table[:, :2], axis=0, prepend=-1), axis=1))
        for cell in np.split(table, cells[1:]):
            by_layer[int(cell[0, 0])].append(cell[:, 3].tolist())
        return _stacked(path, by_layer), len(prompts)
    runs = np.split(table, np.flatnonzero(np.diff(table[:, 0])) + 1)
    top_k = min(len(run) for run in runs)
    prompt = 0
    for run in runs:
        if len(run) % top_k:
            raise InputError(str(path), f"{len(run)} rows of layer {run[0, 0]}, top-k {top_k}")
        by_layer[int(run[0, 0])] += run[:, 1].reshape(-1, top_k).tolist()
        if run[0, 0] == table[0, 0] and len(run) > top_k:  # the last layer may have one of each
            prompt += len(run) // top_k
    return _stacked(path, by_layer), prompt
