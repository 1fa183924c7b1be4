"""Objects that are kept in the cache, and made again where they are not there or damaged."""

import hashlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from eldr_sim.cache import find, keep

T = TypeVar("T")
_DIGEST = hashlib.sha256().digest_size


def remade(part: str, asked: str, make: Callable[[], T]) -> T:
    """Return an object from the cache, or make it and keep it there.

    Args:
        part: kind of the object: bit sets or kernels.
        asked: all that the object depends on.
        make: makes it.

    Returns:
        The object, equal to one that is made.
    """
    name = f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.pickle"
    path = find(part, name)
    if path is not None:
        with suppress(OSError):
            kept = path.read_bytes()
            checksum, text = kept[:_DIGEST], kept[_DIGEST:]
            if checksum == hashlib.sha256(text).digest():
                found: T = pickle.loads(text)
                return found
    made = make()
    text = pickle.dumps(made, pickle.HIGHEST_PROTOCOL)
    keep(part, name, lambda file: file.writelines((hashlib.sha256(text).digest(), text)))
    return made
