"""Random streams split by purpose: every random decision of a run draws from a separate one. Two
policies under one seed therefore see the same requests, and a change in one decision shifts no
other."""

import zlib
from numbers import Integral

import numpy as np

from eldr_sim.errors import InputError


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return the random generator of one purpose under a seed.

    Args:
        seed: a non-negative integer.
        purpose: name of what the numbers are for; the CRC-32 of its UTF-8 bytes selects the stream.

    Returns:
        A generator that is independent of those of other purposes.

    Raises:
        InputError: ``seed`` is not a non-negative integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise InputError("seed", f"got {seed!r}", "an integer >= 0")
    entropy = np.random.SeedSequence([int(seed), zlib.crc32(purpose.encode())])
    return np.random.Generator(np.random.PCG64(entropy))
