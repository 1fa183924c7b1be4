"""The file of expert ids in a trace folder: plain for memory-mapping, or compressed.

``experts.npy``
    uint8 (uint16 beyond 256 experts) ``[token, layer, top_k]``, C order, to be memory-mapped.
``experts.npy.xz``
    The same file in an ``.xz`` container, which ``xz -d`` opens. What repeats in routing is the
    whole choice of a token, often over several layers, at places that are whole tokens apart. So
    LZMA gets its literal and position contexts aligned to the ``top_k`` ids of a layer. Ids that
    are sorted within their rank groups compress best: see `regroup`.

Rank groups
    How much of the gate's order the ids keep: ``[1] * top_k`` all of it, ``[4, 4]`` which four of
    eight came first, None (the same as ``[top_k]``) nothing. The groups stand in the gate's order;
    within a group the order says nothing.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError

__all__ = ["FILE_NAMES", "Encoding", "check_groups", "load_ids", "regroup", "save_ids"]

Encoding = Literal["npy", "xz"]

FILE_NAMES: dict[Encoding, str] = {"npy": "experts.npy", "xz": "experts.npy.xz"}

_DICTIONARY = 1 << 26
"""LZMA looks back this far, bytes; a reader needs as much memory."""
_CHUNK_ROWS = 1 << 15


def check_groups(groups: Sequence[int] | None, top_k: int, field: str) -> list[int] | None:
    """Return rank groups in the form a manifest has them; raises InputError if they are none.

    Parameters
    ----------
    groups
        Sizes of the groups, or None.
    top_k
        What they must sum to.
    field
        What the error names.
    """
    if groups is None:
        return None
    sizes = [int(size) for size in groups]
    if not sizes or min(sizes) < 1 or sum(sizes) != top_k:
        raise InputError(field, f"rank groups {sizes}", f"positive sizes that sum to top_k {top_k}")
    return None if len(sizes) == 1 else sizes


def regroup(
    ids: NDArray[Any], groups: Sequence[int] | None, wanted: Sequence[int] | None
) -> NDArray[Any]:
    """Sort ids within wanted rank groups, forgetting the finer order.

    Parameters
    ----------
    ids
        Expert ids ``[tokens, layers, top_k]``.
    groups
        Rank groups of ``ids``; None if their order says nothing.
    wanted
        Groups to keep: those of ``ids``, or several of them taken together. None keeps no rank.

    Returns
    -------
    The ids in a new array, ascending within each wanted group.

    Raises
    ------
    InputError
        If ``wanted`` would need an order that ``groups`` do not keep.
    """
    top_k = ids.shape[2]
    have, want = list(groups or [top_k]), list(wanted or [top_k])
    if sum(want) != top_k or not set(accumulate(want)) <= set(accumulate(have)):
        raise InputError("rank_groups", f"{want} of ids ranked {have}", f"unions of {have}")
    out = np.empty_like(ids, order="C")
    edges = [0, *accumulate(want)]
    for start in range(0, len(ids), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        for low, high in pairwise(edges):
            out[chunk, :, low:high] = np.sort(ids[chunk, :, low:high], axis=-1)
    return out


def save_ids(path: Path, ids: NDArray[Any], encoding: Encoding) -> None:
    """Write a file of expert ids; compressing takes about a second per megabyte."""
    if encoding == "npy":
        np.save(path, ids)
        return
    row = ids.shape[2] * ids.itemsize
    aligned = min((row & -row).bit_length() - 1, 4)  # log2 of the bytes to align to, at most 16
    filters = [
        {
            "id": lzma.FILTER_LZMA2,
            "preset": 6,
            "dict_size": _DICTIONARY,
            "lc": 0,
            "lp": aligned,
            "pb": aligned,
        }
    ]
    with lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=filters) as file:
        np.save(file, ids)


def load_ids(path: Path, encoding: Encoding) -> NDArray[Any]:
    """Read a file of expert ids: memory-mapped if plain, into memory if compressed.

    Raises
    ------
    InputError
        If the file cannot be read, is truncated or is not of its format.
    """
    try:
        ids: NDArray[Any]
        if encoding == "npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            ids = np.load(BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False)
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except (lzma.LZMAError, ValueError, EOFError) as error:
        kind = FILE_NAMES[encoding].removeprefix("experts")
        raise InputError(
            str(path), f"truncated or not a {kind} file: {f'{error}'.splitlines()[0]}"
        ) from None
    return ids
