"""Timing kernels: medians and quartiles of calls with data outside the cache.

A measurement is given several *rounds*, one a seed; a round is a list of calls that touch
different memory, in all more than three times the last-level cache, so that no call finds its
weights there. On a GPU a round is captured as one graph, and its replays are timed by events;
enough follow each other between two events that launching the first, some microseconds, does not
count. The eager figure is the same calls launched one by one. On a CPU every call is timed by
itself."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import needed

Call = Callable[[], Any]
Mode = Literal["graph", "eager"]
CACHE_MULTIPLE = 3  #: memory that a round touches, in last-level caches
MAX_CALLS = 320  #: calls of a round at most
LEAST_S = 200e-6  #: of replays between two events: 40 times what launching a graph takes
MAX_REPLAYS = 200  #: of a graph between two events


def require_torch() -> Any:
    """Import torch; raises InputError with the command that installs it."""
    return needed("torch", "profile", "pip install 'eldr-sim[profile]'")


def randn(device: str, *size: int) -> Any:
    """Draw a bfloat16 tensor."""
    torch = require_torch()
    return torch.randn(*size, dtype=torch.bfloat16, device=device)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and quartiles over ``repeats`` samples."""

    median_s: float
    q1_s: float
    q3_s: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """Summarise samples, seconds."""
        q1, median, q3 = np.quantile(samples, (0.25, 0.5, 0.75))
        return cls(float(median), float(q1), float(q3), len(samples))

    @staticmethod
    def columns(timings: Sequence["Timing"]) -> dict[str, NDArray[Any]]:
        """Return the columns of a latency table that hold them."""
        return {
            "latency_s": np.array([t.median_s for t in timings]),
            "latency_q1_s": np.array([t.q1_s for t in timings]),
            "latency_q3_s": np.array([t.q3_s for t in timings]),
            "repeats": np.array([t.repeats for t in timings], dtype=np.int32),
        }


class Timer(Protocol):
    """Times rounds of calls on one device."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Ways to launch calls; the first is the one that a run's tables hold."""

    def time(self, rounds: Sequence[Sequence[Call]], mode: Mode) -> Timing:
        """Time one call, over all rounds."""


def rotation(touched_bytes: float, copy_bytes: float, cache_bytes: int) -> tuple[int, int]:
    """Calls of a round, and copies of the data that they read, to get past the cache: together they
    touch ``CACHE_MULTIPLE`` caches in at most ``MAX_CALLS`` calls, and no copy is read twice.

    ``touched_bytes``: that one call reads; ``copy_bytes``: of all the data that calls choose from;
    ``cache_bytes``: of the last-level cache."""
    wanted = CACHE_MULTIPLE * cache_bytes
    calls = min(max(2, math.ceil(wanted / max(touched_bytes, 1.0))), MAX_CALLS)
    return calls, max(1, math.ceil(wanted / max(copy_bytes, 1.0)))


@dataclass(frozen=True)
class CpuTimer:
    """Times calls on the CPU, each by itself."""

    target_s: float = 0.2  #: time to spend on a measurement
    #: ``min_repeats``, ``max_repeats``: bounds of the number of samples.
    min_repeats: int = 6
    max_repeats: int = 400
    #: Seconds: of the wall, or of the calling thread alone.
    clock: Callable[[], float] = time.perf_counter
    modes: tuple[Mode, ...] = ("eager",)

    def time(self, rounds: Sequence[Sequence[Call]], mode: Mode = "eager") -> Timing:
        """Time calls after one warm-up call; the rounds take turns."""
        calls = [call for states in zip(*rounds, strict=True) for call in states]
        calls[-1]()  # imports, thread pools, lazily made buffers
        samples: list[float] = []
        begin = self.clock()
        while len(samples) < self.max_repeats:
            call = calls[len(samples) % len(calls)]
            start = self.clock()
            call()
            end = self.clock()
            samples.append(end - start)
            if len(samples) >= self.min_repeats and end - begin > self.target_s:
                break
        return Timing.of(samples)


@dataclass(frozen=True)
class CudaTimer:
    """Times rounds on a CUDA or ROCm device by events."""

    target_s: float = 0.05  #: time to spend on a measurement's replays
    modes: tuple[Mode, ...] = ("graph", "eager")

    def time(self, rounds: Sequence[Sequence[Call]], mode: Mode) -> Timing:
        """Time rounds as replays of a graph, or as calls launched one by one."""
        torch = require_torch()
        samples: list[float] = []
        for calls in rounds:
            run = self._graph(torch, calls) if mode == "graph" else _all(calls)
            run()
            torch.cuda.synchronize()
            first = self._sample(torch, run, 1)
            replays = 1
            if mode == "graph":  # eager calls are to count their launches
                replays = int(np.clip(math.ceil(LEAST_S / max(first, 1e-6)), 1, MAX_REPLAYS))
            sample_s = max(first, 1e-6) * replays
            repeats = int(np.clip(self.target_s / len(rounds) / sample_s, 4, 100))
            each = replays * len(calls)
            samples += [self._sample(torch, run, replays) / each for _ in range(repeats)]
        return Timing.of(samples)

    @staticmethod
    def _graph(torch: Any, calls: Sequence[Call]) -> Call:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and lets libraries allocate their workspaces
            _all(calls)()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _all(calls)()
        replay: Call = graph.replay
        return replay

    @staticmethod
    def _sample(torch: Any, run: Call, replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _all(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run
