"""Expert ids as bit sets: the form in which the hot loop takes the union of a batch.

Bit ``e % 64`` of word ``e // 64`` is set if expert ``e`` was chosen, so the distinct experts
of a batch in a layer are the population count of the OR of its tokens' words."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim import cache
from eldr_sim.arrays import Array, Words
from eldr_sim.errors import InputError
from eldr_sim.jit import Entry, lowest
from eldr_sim.references import Reference

_CHUNK_ROWS = 1 << 13
FORMAT_VERSION = 1  #: version of the files in the cache
#: Header of a file: what it is, version, experts a token, the trace's checksum, shape.
_OWNER = struct.Struct("<8sII64s3Q")
_CRC = struct.Struct("<I")
_HEADER_BYTES = 128


def pack_bits(experts: Array, n_experts: int, where: str = "experts") -> Words:
    """Pack expert ids ``[tokens, layers, top_k]`` into uint64 ``[tokens, layers, words]``.

    Raises InputError, which names ``where``, if an id is no expert, or chosen twice by a token in a
    layer."""
    bits = np.zeros((*experts.shape[:2], -(-n_experts // 64)), dtype=np.uint64)
    for start in range(0, len(experts), _CHUNK_ROWS):
        _pack_chunk(experts, start, n_experts, bits[start : start + _CHUNK_ROWS], where)
    return bits


def check_ids(experts: Array, n_experts: int, where: str) -> None:
    """Raise the error that `pack_bits` would, without keeping the bit sets."""
    bits = np.empty((_CHUNK_ROWS, experts.shape[1], -(-n_experts // 64)), dtype=np.uint64)
    for start in range(0, len(experts), _CHUNK_ROWS):
        bits[:] = 0
        _pack_chunk(experts, start, n_experts, bits, where)


def _pack_chunk(experts: Array, start: int, n_experts: int, bits: Words, where: str) -> None:
    # A copy: other code would be compiled for read-only arrays such as maps.
    chunk = np.array(experts[start : start + _CHUNK_ROWS])
    bad = _pack(Reference(_Chunk(chunk, bits)), n_experts)
    if bad < 0:
        return
    row, layer = divmod(int(bad), chunk.shape[1])
    ids = np.sort(chunk[row, layer])
    place = f"at row {start + row} layer {layer}"
    if ids[-1] >= n_experts:
        raise InputError(where, f"expert {ids[-1]} {place}", f"0..{n_experts - 1}")
    twice = ids[1:][ids[1:] == ids[:-1]][0]
    raise InputError(where, f"expert {twice} twice {place}", "distinct experts")


class _Chunk(NamedTuple):
    ids: Any  #: ``[tokens, layers, top_k]``
    bits: Any  #: uint64 ``[tokens, layers, words]``


@Entry
def _pack(chunk: Any, n_experts: int) -> int:
    """Set the bits of the ids; return the first ``row * layers + layer`` that is bad, else -1."""
    ids, bits = chunk.ids, chunk.bits
    tokens, layers, top_k = ids.shape
    for t in range(tokens):
        for layer in range(layers):
            for slot in range(top_k):
                expert = np.int64(ids[t, layer, slot])
                if expert < 0 or expert >= n_experts:
                    return int(t * layers + layer)
                bit = np.uint64(1) << np.uint64(expert & 63)
                if bits[t, layer, expert >> 6] & bit:
                    return int(t * layers + layer)
                bits[t, layer, expert >> 6] |= bit
    return -1


def count_rows(bits: Words, n_experts: int) -> NDArray[np.uint32]:
    """Count experts over uint64 ``[rows, layers, words]``: uint32 ``[layers, n_experts]``."""
    _, layers, words = bits.shape
    counts = np.zeros((layers, 64 * words), np.uint32)
    add_counts(bits, 0, len(bits), counts)
    return counts[:, :n_experts]


def add_counts(bits: Words, first: int, end: int, counts: NDArray[np.uint32]) -> None:
    """Add rows ``first`` to ``end`` to ``counts``, uint32 ``[layers, 64 * words]``."""
    _add_counts(Reference(_Counted(bits, counts)), first, end)


class _Counted(NamedTuple):
    bits: Any
    counts: Any


@Entry
def _add_counts(of: Any, first: int, end: int) -> int:
    bits, counts = of.bits, of.counts
    for row in range(first, end):
        for layer in range(bits.shape[1]):
            for w in range(bits.shape[2]):
                word = bits[row, layer, w]
                while word != 0:
                    counts[layer, 64 * w + lowest(word)] += 1
                    word &= word - np.uint64(1)
    return 0


def kept_bits(
    checksum: str,
    shape: tuple[int, int, int],
    top_k: int,
    experts: Callable[[], Array],
    source: str,
    *,
    keep: bool = True,
) -> Words:
    """Return a trace's bit sets, read-only, memory-mapped from `eldr_sim.cache`: a header
    (`_OWNER`, a CRC-32), then the sets. A damaged file is built again; without a cache they stay in
    memory.

    ``shape``: tokens, layers and experts; ``experts``: returns the ids, of the file ``source``;
    ``keep``: whether sets that are built are kept."""
    n_tokens, n_layers, n_experts = shape
    words = (n_tokens, n_layers, -(-n_experts // 64))
    owner = _OWNER.pack(b"eldrbits", FORMAT_VERSION, top_k, checksum.encode(), *words)
    name = f"{checksum[:16]}-top{top_k}-v{FORMAT_VERSION}.bits"
    found = _load(cache.find(cache.BITSETS, name), owner, words)
    if found is not None:
        return found
    bits = pack_bits(experts(), n_experts, source)
    bits.flags.writeable = False
    if not keep:
        return bits
    header = _header(owner, bits)
    kept = cache.keep(cache.BITSETS, name, lambda file: file.writelines((header, bits.data)))
    mapped = _load(kept, owner, words)
    return bits if mapped is None else mapped


def _load(path: Path | None, owner: bytes, shape: tuple[int, ...]) -> Words | None:
    """Map a file; None if it is absent, truncated, damaged or of another trace."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            bits = np.asarray(np.memmap(file, "<u8", "r", _HEADER_BYTES, shape))
            whole = file.seek(0, os.SEEK_END) == _HEADER_BYTES + bits.nbytes
    except (OSError, ValueError):  # absent, or shorter than its shape
        return None
    return bits if whole and header == _header(owner, bits) else None


def _header(owner: bytes, bits: Words) -> bytes:
    return (owner + _CRC.pack(zlib.crc32(bits.data))).ljust(_HEADER_BYTES, b"\0")
