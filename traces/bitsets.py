"""Expert ids as bit sets: the form in which the hot loop takes the union of a batch.

Bit ``e % 64`` of word ``e // 64`` is set if expert ``e`` was chosen, so the distinct experts
of a batch in a layer are the population count of the OR of its tokens' words.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.traces.format import RoutingTrace

__all__ = ["bit_sets", "pack_bits"]

_CHUNK_ROWS = 1 << 13
_SPOT_ROWS = 256


def pack_bits(experts: NDArray[Any], n_experts: int) -> NDArray[np.uint64]:
    """Pack expert ids into bit sets.

    Parameters
    ----------
    experts
        Integer ids ``[tokens, layers, top_k]``, each below ``n_experts``.
    n_experts
        Experts per layer.

    Returns
    -------
    bits
        uint64 ``[tokens, layers, ceil(n_experts / 64)]``.
    """
    words = -(-n_experts // 64)
    table = np.zeros((n_experts, words), dtype=np.uint64)
    ids = np.arange(n_experts)
    table[ids, ids // 64] = np.uint64(1) << (ids % 64).astype(np.uint64)
    bits = np.empty((*experts.shape[:2], words), dtype=np.uint64)
    for start in range(0, len(experts), _CHUNK_ROWS):  # chunks that stay in the CPU's cache
        chunk = experts[start : start + _CHUNK_ROWS]
        out = bits[start : start + _CHUNK_ROWS]
        out[:] = table[chunk[:, :, 0]]
        for slot in range(1, experts.shape[2]):
            out |= table[chunk[:, :, slot]]
    return bits


def bit_sets(trace: RoutingTrace) -> NDArray[np.uint64]:
    """Return a trace's bit sets, memory-mapped from a cache that is built on first use.

    The cache is ``bitsets-<first 12 digits of the checksum>.npy`` beside the trace; where that
    cannot be written, in ``$XDG_CACHE_HOME/eldr-sim`` or ``~/.cache/eldr-sim``; and where
    neither can, the bit sets stay in memory. A cache that does not fit the trace is rebuilt.

    Returns
    -------
    bits
        uint64 ``[n_tokens, n_layers, ceil(n_experts / 64)]``, read-only.
    """
    name = f"bitsets-{trace.manifest.checksum[:12]}.npy"
    places = [trace.path]
    with contextlib.suppress(RuntimeError):  # no home folder
        cache = os.environ.get("XDG_CACHE_HOME")
        places.append((Path(cache) if cache else Path.home() / ".cache") / "eldr-sim")
    for place in places:
        bits = _load(place / name, trace)
        if bits is not None:
            return bits
    bits = pack_bits(trace.experts, trace.n_experts)
    for place in places:
        with contextlib.suppress(OSError):
            _save(place / name, bits)
            mapped = _load(place / name, trace)
            if mapped is not None:
                return mapped
    bits.flags.writeable = False
    return bits


def _load(path: Path, trace: RoutingTrace) -> NDArray[np.uint64] | None:
    """Map a cache; none if it is absent, truncated, or disagrees with rows of the trace."""
    try:
        bits: NDArray[np.uint64] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    shape = (trace.manifest.n_tokens, trace.n_layers, -(-trace.n_experts // 64))
    if bits.shape != shape or bits.dtype != np.dtype("<u8") or not bits.flags.c_contiguous:
        return None
    rows = np.linspace(0, shape[0] - 1, min(shape[0], _SPOT_ROWS)).astype(np.int64)
    fits = np.array_equal(bits[rows], pack_bits(trace.experts[rows], trace.n_experts))
    return bits if fits else None


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
