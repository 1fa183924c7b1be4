"""Reader of tensors in ``torch.save`` files, without torch and without running what they hold.

A file of torch 1.6 or later is a zip archive of ``data.pkl`` and of one raw file a storage. The
pickle may name tensors, storages and plain containers only; anything else is refused.
"""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError

_STORAGES = {
    "ByteStorage": np.uint8,
    "CharStorage": np.int8,
    "ShortStorage": np.int16,
    "IntStorage": np.int32,
    "LongStorage": np.int64,
    "HalfStorage": np.float16,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "BoolStorage": np.bool_,
}


def is_torch_file(path: Path) -> bool:
    """Say whether a zip archive is one of ``torch.save``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.split("/")[-1] == "data.pkl" for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, NotImplementedError):
        return False


def load_tensors(path: Path) -> Any:
    """Return what ``torch.save`` wrote, tensors as arrays.

    Raises InputError if it cannot be read, is no such file, or holds other than tensors, numbers,
    strings and plain containers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.split("/")[-1] == "data.pkl"), None)
            if name is None:
                raise InputError(str(path), "no data.pkl in it", "a file of torch.save")
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

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _STORAGES:
            return name
        raise InputError("file", f"holds {module}.{name}", "tensors and plain values")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        _, kind, key, _, size = pid
        raw = self._archive.read(f"{self._folder}data/{key}")
        return np.frombuffer(raw, _STORAGES[kind], count=size)


def _tensor(
    storage: NDArray[Any], offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> NDArray[Any]:
    """Return a tensor's values; ``stride`` counts elements."""
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if min(shape, default=1) > 0 and not 0 <= offset <= last < len(storage):
        raise ValueError("a tensor reaches beyond its storage")
    view = np.lib.stride_tricks.as_strided(
        storage[offset:], shape, [step * storage.itemsize for step in stride], writeable=False
    )
    return np.array(view)
