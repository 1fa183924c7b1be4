"""Rows of a measured curve that a disturbance made slow: left out of it, and named.

A kernel's time may step up where its input grows, when another protocol or tile takes over, and
the next rows stay up: NCCL's all-gather between 8 B200 takes 44, 104 and 114 us at the sizes about
16 MiB, and between 8 B300 as long. A row that takes half as long again as *both* of its neighbours
is no such step but a disturbance of the measurement: of DeepEP's dispatch between 4 GB200 the
imported rows say 445, 17,858 and 550 us at 256, 512 and 1,024 tokens.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPIKE = 1.5  #: a spike takes so many times as long as the slower of its two neighbours
#: Rows that stay, and are named where results rest on their curve: of all shipped collectives of
#: 1 MiB and more, those that take `SPIKE` times as long as on a GPU of slower links: the GPU, the
#: operation and its GPUs; bytes, us, that other GPU, and its us. `behind_siblings` finds them.
BEHIND = {
    ("B200", "all_gather", 8): (2**24, 103.9, "H200", 66.9),
    ("B300", "all_gather", 8): (2**24, 100.4, "H200", 66.9),
}


def spikes(seconds: ArrayLike) -> NDArray[np.bool_]:
    """Return which rows of a curve are spikes. ``seconds``: shape [rows], by growing input. The
    smallest and the largest input have one neighbour each, and are never judged."""
    times = np.asarray(seconds, np.float64)
    found = np.zeros(len(times), np.bool_)
    found[1:-1] = times[1:-1] > SPIKE * np.maximum(times[:-2], times[2:])
    return found


def behind_siblings(
    sizes: NDArray[np.float64],
    seconds: NDArray[np.float64],
    slower: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> NDArray[np.bool_]:
    """Return which rows take `SPIKE` times as long as a sibling of slower links, from 1 MiB on.
    ``sizes``, ``seconds``: shape [rows]: bytes and times; ``slower``: the same of the sibling."""
    theirs = np.interp(sizes, slower[0], slower[1])
    return np.asarray((sizes >= 2**20) & (seconds > SPIKE * theirs))


def say_behind(gpu: str, operation: str, n_gpus: int) -> list[str]:
    """Return a warning where a shipped curve has a row in `BEHIND`."""
    if (gpu, operation, n_gpus) not in BEHIND:
        return []
    size, us, sibling, theirs = BEHIND[gpu, operation, n_gpus]
    return [
        f"{operation} on {n_gpus} {gpu}: the row of {size:,} bytes takes {us:g} us, on {sibling}, "
        f"whose links are slower, {theirs:g}"
    ]


def say(what: str, seconds: ArrayLike, sizes: ArrayLike, unit: str) -> list[str]:
    """Return a warning for each spike of a curve, to stand in the results that rest on it.
    ``what``: the kernel and the GPU; ``sizes``: shape [rows], the inputs, in ``unit``."""
    times, inputs = 1e6 * np.asarray(seconds, np.float64), np.asarray(sizes)
    return [
        f"{what}: the row of {inputs[at]:,.0f} {unit} is left out: {times[at]:,.1f} us between "
        f"{times[at - 1]:,.1f} and {times[at + 1]:,.1f}"
        for at in np.flatnonzero(spikes(times)).tolist()
    ]
