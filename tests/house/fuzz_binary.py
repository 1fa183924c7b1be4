"""Hostile binary files for `fuzz`: small ones that promise much, point elsewhere, or lack parts.

Each is read correctly or refused in a line, before memory is taken for what it promises: running
out of memory (`fuzz.MEMORY`) counts as a failure here.
"""

import json
import lzma
import struct
import zipfile
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_spoil import good_routing, odd_value, spoil_bytes, spoil_value

#: Lengths, strides and offsets.
_SIZES = [0, 1, 2, 3, 8, -1, -2, 10**6, 10**9, -(10**9), 2**31, 2**40, 2**62, 2**63, 2**64 + 1]
_IMPORT = ["--model", "m", "--captured-by", "x", "--source-data", "y"]


def _one(rng: Any, values: Any) -> Any:
    return values[rng.integers(len(values))]


def _import(path: Path, folder: Path) -> list[str]:
    return ["trace", "import", str(path), "--out", str(folder / "out"), *_IMPORT]


# --- torch.save ----------------------------------------------------------------------------------


class Tensor:
    """What a pickle of ``torch.save`` says of a tensor; by hand, since torch is not installed."""

    def __init__(self, shape: Any, key: str, dtype: str = "Long", numel: int | None = None) -> None:
        self.shape, self.key, self.dtype = list(shape), key, dtype
        self.stride = [int(np.prod(self.shape[i + 1 :], dtype=object)) for i in range(len(shape))]
        self.offset, self.numel = 0, numel


def pickled(value: Any) -> bytes:
    """Return the pickle of plain values and tensors, without its frame."""
    if isinstance(value, Tensor):
        numel = int(np.prod(value.shape)) if value.numel is None else value.numel
        kind = b"ctorch\n" + value.dtype.encode() + b"Storage\n"
        storage = b"(" + pickled("storage") + kind + pickled(value.key) + pickled("cpu")
        storage += pickled(numel) + b"tQ"
        sides = b"".join(
            b"(" + b"".join(map(pickled, s)) + b"t" for s in (value.shape, value.stride)
        )
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            + storage + pickled(value.offset) + sides + b"\x89}tR"
        )  # fmt: skip
    if isinstance(value, dict):
        items = b"".join(pickled(k) + pickled(v) for k, v in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, (list, tuple)):
        return b"](" + b"".join(map(pickled, value)) + b"e"
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8b" + struct.pack("<i", len(data)) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    data = str(value).encode("utf-8", "replace")
    return b"X" + struct.pack("<I", len(data)) + data


def good_dump() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a dump of SGLang's recorder, a prompt and two decoded tokens, and its storages."""
    records, storages, position = [], {}, 0
    for number, n in enumerate((3, 1, 1)):
        ids = (np.arange(2 * n * 2).reshape(2, n, 2) + number) % 7 + 1
        storages[f"{2 * number}"] = ids.astype("<i8").tobytes()
        storages[f"{2 * number + 1}"] = np.arange(position, position + n).astype("<i8").tobytes()
        record = {
            "forward_pass_id": number, "topk_ids_of_layer": Tensor((2, n, 2), f"{2 * number}"),
            "positions": Tensor((n,), f"{2 * number + 1}"), "forward_mode": 2 if number else 1,
        }  # fmt: skip
        records.append(record if number else record | {"extend_seq_lens": [n]})
        position += n
    return {"records": records}, storages


def torch_files(rng: Any, folder: Path) -> list[str]:
    """A dump whose tensors, fields, storages or pickle are odd."""
    data, storages = good_dump()
    for _ in range(int(rng.integers(0, 3))):
        record = _one(rng, data["records"])
        tensor = record.get("topk_ids_of_layer")
        way = rng.integers(7)
        if way == 0 and isinstance(tensor, Tensor):
            tensor.stride[rng.integers(3)] = _one(rng, _SIZES)
        elif way == 1 and isinstance(tensor, Tensor):
            tensor.shape[rng.integers(3)] = _one(rng, _SIZES)
        elif way == 2 and isinstance(tensor, Tensor):
            tensor.offset, tensor.numel = _one(rng, _SIZES), _one(rng, [None, *_SIZES])
        elif way == 3 and isinstance(tensor, Tensor):
            tensor.shape, tensor.stride = [4, _one(rng, _SIZES), 2], [0, 0, 0]
        elif way == 4:
            record.pop(_one(rng, list(record)))
        elif way == 5:
            record[_one(rng, list(record) or ["a"])] = odd_value(rng)
        elif isinstance(tensor, Tensor):
            tensor.dtype = _one(rng, ["Byte", "Half", "Double", "Bool", "Nosuch", "Float"])
    if rng.random() < 0.15:
        data = spoil_value(data, rng)
    if rng.random() < 0.1 and isinstance(data, dict):
        data["last_physical_to_logical_map"] = odd_value(rng)
    body = b"\x80\x02" + pickled(data) + b"."
    if rng.random() < 0.15:
        body = spoil_bytes(body, rng)
    elif rng.random() < 0.1:
        promise = _one(rng, [2**31, 2**40, 2**62])
        body = b"\x80\x05" + _one(rng, [b"\x96", b"\x8e", b"\x8d"]) + struct.pack("<Q", promise)
    for key in list(storages):
        if rng.random() < 0.05:
            storages[key] = _one(rng, [b"", b"x", bytes(64 << 20)])
    path = folder / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", body)
        for key, raw in storages.items():
            archive.writestr(f"a/data/{key}", raw)
    return [*_import(path, folder), "--experts", "9"]


# --- numpy ---------------------------------------------------------------------------------------


def _npy(array: np.ndarray[Any, Any], rng: Any) -> bytes:
    """Return the bytes of a .npy file, whose header may say something else."""
    file = BytesIO()
    np.save(file, array)
    if rng.random() < 0.4:
        return file.getvalue()
    shape: list[Any] = list(array.shape) or [1]
    way = rng.integers(6)
    descr = array.dtype.str
    if way == 0:
        shape[rng.integers(len(shape))] = _one(rng, _SIZES)
    elif way == 1:
        descr = _one(rng, ["|O", "<U1000000000", "|S2147483647", "|V99999999999", "<c16", "<M8[s]",
                           "<f2", ">i8", "", "nosuch", "[('a', '<i8')]"])  # fmt: skip
    elif way == 2:
        shape = [*shape, _one(rng, _SIZES)]
    elif way == 3:
        shape = [0, _one(rng, _SIZES)]
    head = (
        f"{{'descr': {descr!r}, 'fortran_order': {way == 4}, 'shape': {tuple(shape)}, }}\n".encode()
    )
    length = _one(rng, [len(head), 0, 65535]) if way == 5 else len(head)
    version = bytes([_one(rng, [1, 1, 1, 2, 3, 9]), 0])
    size = struct.pack("<H" if version[0] == 1 else "<I", length)
    return b"\x93NUMPY" + version + size + head + array.tobytes()


def archives(rng: Any, folder: Path) -> list[str]:
    """An .npz whose members are odd, many, or promise more than they hold."""
    data, path = good_routing(rng), folder / "a.npz"
    spoilt = _one(rng, list(data))
    if rng.random() < 0.1:
        data[spoilt] = np.zeros(48 << 20, np.uint8)  # 48 kB of a file
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in data.items():
            if name == spoilt and rng.random() < 0.1:
                continue
            raw = _npy(np.asarray(array), rng if name == spoilt else np.random.default_rng(3))
            archive.writestr(f"{name}.npy" if rng.random() < 0.98 else f"../{name}", raw)
    if rng.random() < 0.15:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
    return _import(path, folder)


def rows_in_lines(rng: Any, folder: Path) -> list[str]:
    """JSON lines whose expert ids are base64 of a .npy, or in a file beside it."""
    ids = np.tile(np.arange(2), (5, 3, 1)).astype(np.int32)
    raw = _npy(ids, rng)
    entry: dict[str, Any] = {"domain": "a", "prompt_len": 2}
    if rng.random() < 0.5:
        entry["routed_experts"] = b64encode(raw).decode()
    else:
        (folder / "ids.npy").write_bytes(raw)
        entry["routed_experts"] = "ids.npy"
    if rng.random() < 0.2:
        entry = {
            "domain": "a",
            "prompt_len": 2,
            "routed_experts": b64encode(ids.tobytes()).decode(),
        }
        entry |= {"n_layers": _one(rng, _SIZES), "top_k": _one(rng, _SIZES)}
    (folder / "a.jsonl").write_text(json.dumps(entry))
    return [*_import(folder / "a.jsonl", folder), "--experts", "8"]


def expert_ids(rng: Any, folder: Path) -> list[str]:
    """A trace whose expert ids promise much: mapped or compressed."""
    from eldr_sim.traces.routing.imports.importers import import_trace

    np.savez(folder / "a.npz", **good_routing(rng))
    made = {"model": "m", "captured_by": "x", "source_data": "y", "tool_versions": {}}
    import_trace(folder / "a.npz", folder / "trace", **made)
    trace = folder / "trace"
    manifest = json.loads((trace / "manifest.json").read_text())
    if rng.random() < 0.5:
        (trace / "experts.npy").write_bytes(_npy(good_routing(rng)["topk"], rng))
    else:
        (trace / "experts.npy").unlink()
        manifest["encoding"] = "xz"
        raw = _npy(good_routing(rng)["topk"], rng) + bytes(_one(rng, [0, 64 << 20]))
        (trace / "experts.npy.xz").write_bytes(spoil_bytes(lzma.compress(raw), rng))
    (trace / "manifest.json").write_text(json.dumps(manifest))
    return ["trace", "inspect", str(trace)]


# --- Parquet -------------------------------------------------------------------------------------


def parquets(rng: Any, folder: Path) -> list[str]:
    """A Parquet file whose columns are of odd types, nested, empty, or unpack to far more."""
    n = int(_one(rng, [11, 11, 11, 1000]))
    columns: dict[str, Any] = {
        "request_id": pa.array(np.arange(n) // 6), "domain": pa.array(["a"] * n),
        "prompt_len": pa.array([3] * n), "position": pa.array(np.arange(n) % 6),
        "layer_0": pa.array([[1, 2]] * n), "layer_1": pa.array([[3, 4]] * n),
    }  # fmt: skip
    name, way = _one(rng, list(columns)), rng.integers(9)
    if way == 0:  # one text, in every row: a small file
        n = 20_000
        columns = {key: pa.array([0] * n) for key in columns}
        columns["domain"] = pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(n, np.int32)), pa.array(["x" * 1_000_000])
        )
    elif way == 1:
        n = 200
        columns = {key: pa.array([0] * n) for key in columns}
        columns["layer_0"] = pa.array([np.zeros(200_000, np.int64)] * n)
    elif way == 2:
        columns[name] = pa.nulls(n)
    elif way == 3:
        columns[name] = pa.array([{"a": [{"b": 1}]}] * n)
    elif way == 4:
        columns[name] = pa.array([_one(rng, [b"\xff\xfe", b"", None])] * n)
    elif way == 5:
        columns[name] = pa.array([_one(rng, [float("nan"), 1e300, -1.0, None])] * n)
    elif way == 6:
        del columns[name]
    elif way == 7:
        columns = {key: column[:0] for key, column in columns.items()}
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, compression=_one(rng, ["zstd", "snappy", "none"]))
    if rng.random() < 0.25:
        path.write_bytes(spoil_bytes(path.read_bytes(), rng))
    return [*_import(path, folder), "--experts", "8"]


SURFACES = {
    "torch file": torch_files, "npz": archives, "npy in lines": rows_in_lines,
    "expert ids": expert_ids, "parquet": parquets,
}  # fmt: skip
