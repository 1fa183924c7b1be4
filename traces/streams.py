"""Random streams split by purpose.

Every random decision of a run draws from a stream of its own, made of the run's seed and the
decision's purpose. Two policies under one seed therefore see the same requests at the same
times, and a change in one decision shifts no other.
"""

import zlib
from numbers import Integral

import numpy as np

from eldr_sim.errors import InputError


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return the random generator of one purpose under a seed.

    Raises InputError if the seed is not a non-negative integer.

    ``seed``: the run's seed, a non-negative integer; ``purpose``: what is drawn, e.g.
    ``"arrivals"``; identified by the CRC-32 of its UTF-8 bytes, which is the same on every machine.
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise InputError("seed", f"got {seed!r}", "an integer >= 0")
    entropy = np.random.SeedSequence([int(seed), zlib.crc32(purpose.encode())])
    return np.random.Generator(np.random.PCG64(entropy))
