"""Many runs at once: points on processes of this machine, or on a Ray cluster.

A point is a configuration with a key. Points share nothing but files: every process maps the same
routing trace, so its pages are in memory once. What a point yields depends on its configuration
alone, never on how many processes there are or in which order they work.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import joblib
from joblib.externals.loky.process_executor import TerminatedWorkerError

from eldr_sim.errors import InputError
from eldr_sim.simulator.config import RunConfig
from eldr_sim.simulator.run import prepare, simulate_summary
from eldr_sim.traces.bitsets import bit_sets

Engine = Literal["joblib", "ray"]

#: Why a point has no summary although nothing is wrong with it: worth another try some day.
KILLED = "its process was killed twice, the second time alone: out of memory?"


@dataclass(frozen=True)
class Point:
    """One run to do; ``key`` is the caller's name for it."""

    key: str
    config: RunConfig


@dataclass(frozen=True)
class Outcome:
    """What became of a point.

    Parameters
    ----------
    key
        The point's.
    summary
        ``summary.json`` of the run; None where it failed.
    reason
        Why it failed, in one line; empty where it did not.
    seconds
        Wall time that the run took; not the same twice.
    """

    key: str
    summary: dict[str, Any] | None
    reason: str
    seconds: float


def run_points(
    points: Iterable[Point],
    jobs: int | None = None,
    *,
    engine: Engine = "joblib",
    address: str | None = None,
) -> Iterator[Outcome]:
    """Run points and yield their outcomes in the order in which they end.

    A point that fails does not stop the others. Where a process is killed, as the kernel does when
    memory runs out, the points that were under way are run once more, each of them alone; one that
    is killed again fails with the reason `KILLED`. Closing the generator, as an exception in its
    consumer or Ctrl-C does, stops the processes.

    Parameters
    ----------
    points
        What to run, begun in this order. Long points first make for a short end.
    jobs
        Processes; 1 runs in this one, where a kill is not survived. The CPUs that this process may
        use when not given. On Ray: points in flight, the cluster's CPUs when not given.
    engine
        ``joblib`` for processes of this machine, ``ray`` for a cluster.
    address
        Of the Ray cluster: ``auto`` (the one that runs here; the default), ``local`` (one of this
        machine alone, for as long as the sweep takes) or ``HOST:PORT``.

    Raises
    ------
    InputError
        If there are no jobs to do it with, or no such cluster.
    """
    if jobs is not None and jobs < 1:
        raise InputError("jobs", str(jobs), "1 or more")
    todo = list(points)
    if engine == "ray":
        from eldr_sim.simulator.planning.ray_engine import run_on_ray

        yield from run_on_ray(todo, jobs, address or "auto")
        return
    if address is not None:
        raise InputError("address", f"{address!r} without a cluster", "--engine ray beside it")
    jobs = min(jobs or joblib.cpu_count(), len(todo))
    if jobs <= 1:
        yield from map(run_point, todo)
        return
    _share_traces(todo)
    yield from _run_on_processes(todo, jobs)


def run_point(point: Point) -> Outcome:
    """Run one point in this process."""
    start = time.perf_counter()
    summary, reason = None, ""
    try:
        summary = simulate_summary(point.config)
    except InputError as error:
        reason = str(error)
    except Exception as error:  # whatever it is, the other points go on
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Outcome(point.key, summary, reason, time.perf_counter() - start)


def _run_on_processes(todo: Sequence[Point], jobs: int) -> Iterator[Outcome]:
    queue = list(todo)
    while queue:
        begun: dict[str, Point] = {}

        def feed(queue: list[Point] = queue, begun: dict[str, Point] = begun) -> Iterator[Any]:
            while queue:
                point = queue.pop(0)
                begun[point.key] = point
                yield _call(point)

        try:
            for outcome in _parallel(jobs, jobs, feed()):
                del begun[outcome.key]
                yield outcome
        except TerminatedWorkerError:
            for point in list(begun.values()):
                yield _run_alone(point)


def _run_alone(point: Point) -> Outcome:
    """Run a point while no other runs: now a killed process tells which point killed it."""
    start = time.perf_counter()
    try:
        # Two jobs, for joblib runs one in this process; the second has nothing to do.
        return next(iter(_parallel(2, 1, iter([_call(point)]))))
    except TerminatedWorkerError:
        return Outcome(point.key, None, KILLED, time.perf_counter() - start)


def _parallel(jobs: int, in_flight: int, calls: Iterator[Any]) -> Iterator[Outcome]:
    # Each process computes with one thread: the points are what runs side by side.
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
        outcomes: Iterator[Outcome] = joblib.Parallel(
            n_jobs=jobs,
            return_as="generator_unordered",
            pre_dispatch=in_flight,
            batch_size=1,
        )(calls)
    return outcomes


def _call(point: Point) -> Any:
    return joblib.delayed(_run_in_worker)(point, os.getpid())


def _run_in_worker(point: Point, parent: int) -> Outcome:
    _leave_with(parent)
    return run_point(point)


_watching: set[int] = set()


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone, be it by kill -9: nobody else would end it."""
    if parent in _watching:
        return
    _watching.add(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _share_traces(points: Iterable[Point]) -> None:
    """Have the bit sets of every trace on disk before many processes want to map them."""
    for config in {point.config.trace: point.config for point in points}.values():
        with contextlib.suppress(Exception):  # a point that cannot be prepared tells so itself
            bit_sets(prepare(config).trace)


def expected_tokens(config: RunConfig) -> float:
    """Estimate the output tokens that a run simulates, which is what most of its time goes into.

    Recorded loads and lengths are not looked up: for them it is a guess that is the same for every
    point of the same file.
    """
    rate = 60.0 if config.effective_rate is None else config.effective_rate
    seconds = config.warmup_s + config.duration
    requests = config.num_requests or rate * seconds
    length = config.effective_output_len
    return requests * (512 if length == "recorded" else length)
