"""The file of expert ids in a trace folder: ``[token, layer, top_k]``, plain or compressed.

``experts.npy`` is uint8 (uint16 beyond 256 experts) in C order, to be memory-mapped;
``experts.npy.xz`` the same in an ``.xz`` container. Routing repeats whole choices of a token, often
over several layers, so LZMA's literal and position contexts are aligned to the ``top_k`` ids of a
layer: the embedded trace (50.0 MB plain) takes 20.2 MB; LZMA's defaults give 21.9 MB, zstd-22 24.1
MB.

Rank groups say how much of the gate's order the ids keep: ``[1] * top_k`` all of it, ``[4, 4]``
which four of eight came first, None nothing. Within a group the order means nothing. A model of a
smaller top-k can be served where a group ends there, and ids that ascend within few groups compress
best.
"""

import lzma
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.inputs import ARRAY_LIMIT, check_arrays

Encoding = Literal["npy", "xz"]

FILE_NAMES: dict[Encoding, str] = {"npy": "experts.npy", "xz": "experts.npy.xz"}

_DICTIONARY = 1 << 26  #: LZMA looks back this far, bytes; a reader needs as much memory


def check_groups(groups: Sequence[int] | None, top_k: int, field: str) -> list[int] | None:
    """Return rank groups in a manifest's form; raise InputError if they do not sum to ``top_k``.

    ``groups``: sizes, which sum to ``top_k``, or None; ``field``: what the error names.
    """
    if groups is None:
        return None
    sizes = [int(size) for size in groups]
    if not sizes or min(sizes) < 1 or sum(sizes) != top_k:
        raise InputError(field, f"rank groups {sizes}", f"positive sizes that sum to top_k {top_k}")
    return None if len(sizes) == 1 else sizes


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

    Raises InputError if the file cannot be read, is truncated or is not of its format.
    """
    try:
        ids: NDArray[Any]
        check_arrays(path, str(path))
        if encoding == "npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            unpacked = lzma.LZMADecompressor().decompress(path.read_bytes(), ARRAY_LIMIT)
            ids = np.load(BytesIO(unpacked), allow_pickle=False)
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except (lzma.LZMAError, ValueError, EOFError) as error:
        kind = FILE_NAMES[encoding].removeprefix("experts")
        raise InputError(
            str(path), f"truncated or not a {kind} file: {f'{error}'.splitlines()[0]}"
        ) from None
    return ids
