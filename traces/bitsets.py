"""Expert ids as bit sets: the form in which the hot loop takes the union of a batch.

Bit ``e % 64`` of word ``e // 64`` is set if expert ``e`` was chosen, so the distinct experts
of a batch in a layer are the population count of the OR of its tokens' words.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from eldr_sim.errors import InputError

if TYPE_CHECKING:
    from eldr_sim.traces.format import RoutingTrace

__all__ = ["bit_sets", "check_ids", "count_rows", "pack_bits"]

_CHUNK_ROWS = 1 << 13
_SPOT_ROWS = 256


def pack_bits(experts: NDArray[Any], n_experts: int, where: str = "experts") -> NDArray[np.uint64]:
    """Pack expert ids into bit sets.

    Parameters
    ----------
    experts
        Integer ids ``[tokens, layers, top_k]``.
    n_experts
        Experts per layer.
    where
        What an error names.

    Returns
    -------
    bits
        uint64 ``[tokens, layers, ceil(n_experts / 64)]``.

    Raises
    ------
    InputError
        If an id is no expert, or a token chose one twice in a layer.
    """
    bits = np.zeros((*experts.shape[:2], -(-n_experts // 64)), dtype=np.uint64)
    for start in range(0, len(experts), _CHUNK_ROWS):
        _pack_chunk(experts, start, n_experts, bits[start : start + _CHUNK_ROWS], where)
    return bits


def check_ids(experts: NDArray[Any], n_experts: int, where: str) -> None:
    """Raise the error that `pack_bits` would, without keeping the bit sets."""
    bits = np.empty((_CHUNK_ROWS, experts.shape[1], -(-n_experts // 64)), dtype=np.uint64)
    for start in range(0, len(experts), _CHUNK_ROWS):
        bits[:] = 0
        _pack_chunk(experts, start, n_experts, bits, where)


def _pack_chunk(
    experts: NDArray[Any], start: int, n_experts: int, bits: NDArray[np.uint64], where: str
) -> None:
    # A copy: maps are read-only, which numba would compile for anew.
    chunk = np.array(experts[start : start + _CHUNK_ROWS])
    bad = _pack(chunk, n_experts, bits)
    if bad < 0:
        return
    row, layer = divmod(int(bad), chunk.shape[1])
    ids = np.sort(chunk[row, layer])
    place = f"at row {start + row} layer {layer}"
    if ids[-1] >= n_experts:
        raise InputError(where, f"expert {ids[-1]} {place}", f"0..{n_experts - 1}")
    twice = ids[1:][ids[1:] == ids[:-1]][0]
    raise InputError(where, f"expert {twice} twice {place}", "distinct experts")


@njit(cache=True)
def _pack(ids: Any, n_experts: int, bits: Any) -> Any:
    """Set the bits of ``ids``; return the first ``row * layers + layer`` that is bad, else -1."""
    tokens, layers, top_k = ids.shape
    for t in range(tokens):
        for layer in range(layers):
            for slot in range(top_k):
                expert = np.int64(ids[t, layer, slot])
                if expert < 0 or expert >= n_experts:
                    return t * layers + layer
                bit = np.uint64(1) << np.uint64(expert & 63)
                if bits[t, layer, expert >> 6] & bit:
                    return t * layers + layer
                bits[t, layer, expert >> 6] |= bit
    return -1


def count_rows(bits: NDArray[np.uint64], n_experts: int) -> NDArray[np.uint32]:
    """Count in how many rows each expert is set.

    Parameters
    ----------
    bits
        uint64 ``[rows, layers, words]``.
    n_experts
        Experts per layer.

    Returns
    -------
    counts
        uint32 ``[layers, n_experts]``.
    """
    rows, layers, words = bits.shape
    counts = np.zeros((layers, 64 * words), np.uint32)
    for start in range(0, rows, _CHUNK_ROWS):
        chunk = np.ascontiguousarray(bits[start : start + _CHUNK_ROWS], dtype="<u8")
        single = np.unpackbits(chunk.view(np.uint8), axis=-1, bitorder="little")
        counts += single.sum(axis=0, dtype=np.uint16)  # _CHUNK_ROWS fit
    return counts[:, :n_experts]


def bit_sets(trace: RoutingTrace) -> NDArray[np.uint64]:
    """Return a trace's bit sets, memory-mapped from a cache that is built on first use.

    The cache is ``bitsets-<first 12 digits of the checksum>.npy`` beside the trace (``-top4``
    after the checksum if only 4 experts a token are taken); where that cannot be written, in
    ``$XDG_CACHE_HOME/eldr-sim`` or ``~/.cache/eldr-sim``; and where neither can, the bit sets stay
    in memory. A cache that does not fit the trace is rebuilt.

    Returns
    -------
    bits
        uint64 ``[n_tokens, n_layers, ceil(n_experts / 64)]``, read-only.
    """
    part = "" if trace.top_k == trace.manifest.top_k else f"-top{trace.top_k}"
    name = f"bitsets-{trace.manifest.checksum[:12]}{part}.npy"
    places = [trace.path]
    with contextlib.suppress(RuntimeError):  # no home folder
        cache = os.environ.get("XDG_CACHE_HOME")
        places.append((Path(cache) if cache else Path.home() / ".cache") / "eldr-sim")
    for place in places:
        bits = _load(place / name, trace)
        if bits is not None:
            return bits
    bits = pack_bits(trace.experts, trace.n_experts, str(trace.path / trace.manifest.experts_file))
    for place in places:
        with contextlib.suppress(OSError):
            _save(place / name, bits)
            mapped = _load(place / name, trace)
            if mapped is not None:
                return mapped
    bits.flags.writeable = False
    return bits


def _load(path: Path, trace: RoutingTrace) -> NDArray[np.uint64] | None:
    """Map a cache; none if it is absent, truncated, or a set has not ``top_k`` experts."""
    try:
        bits: NDArray[np.uint64] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    shape = (trace.manifest.n_tokens, trace.n_layers, -(-trace.n_experts // 64))
    if bits.shape != shape or bits.dtype != np.dtype("<u8") or not bits.flags.c_contiguous:
        return None
    rows = np.linspace(0, shape[0] - 1, min(shape[0], _SPOT_ROWS)).astype(np.int64)
    sizes = np.unpackbits(np.asarray(bits[rows]).view(np.uint8), axis=-1).sum(axis=-1)
    return bits if (sizes == trace.top_k).all() else None


def _save(path: Path, bits: NDArray[np.uint64]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, bits)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
