"""Many runs at once: points on processes of this machine, or on a Ray cluster.

A point is a configuration with a key. All processes of a machine map the same bit sets to replay,
read-only, and share nothing else: the outcome of a point depends on its configuration alone, not on
the number of processes or their order.
"""

import contextlib
import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, Literal, get_args

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.parallel import NODE_GPUS
from eldr_sim.planning.runs.points import Outcome, Point, run_point
from eldr_sim.simulator.setup.config.groups import NO_PART
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.setup.shared_replay import SharedReplay, share, use

Backend = Literal["joblib", "ray"]

_GUESS_S = 120.0  # of a log
_KILLED = "its process was killed twice, the second time alone: out of memory?"


def run_points(
    points: Iterable[Point],
    jobs: int | None = None,
    *,
    backend: Backend = "joblib",
    address: str | None = None,
    started: bool = False,
) -> Generator[Outcome, None, None]:
    """Run points and yield their outcomes in the order in which they end.

    A point that fails does not stop the others. Where a process is killed, for instance by the
    kernel when memory runs out, the points that were running are run once more, each of them alone;
    a point whose process is killed again has failed. Closing the generator, as an exception in its
    consumer or Ctrl-C does, stops the processes.

    Raises InputError if there are no jobs, or no such cluster.

    ``points``: points to run, begun in this order; long ones first keep the last processes busy;
    ``jobs``: processes, by default the CPUs that this process may use; 1 runs in this process,
    which does not survive a kill; on Ray: points in flight, by default the cluster's CPUs;
    ``backend``: ``joblib`` for processes of this machine, ``ray`` for a cluster; ``address``:
    address of the Ray cluster: ``auto`` (the one that runs here; the default), ``local`` (a cluster
    of this machine alone, for the time of the sweep) or ``HOST:PORT``; ``started``: whether
    `start_processes` has started the processes: they are good for a single point, too.
    """
    check_backend(jobs, backend, address)
    todo = list(points)
    if backend == "ray":
        from eldr_sim.planning.runs.ray_backend import run_on_ray

        yield from run_on_ray(todo, jobs, address or "auto")
        return
    jobs = _processes(jobs)
    if not started:
        jobs = min(jobs, len(todo))
    if jobs <= 1:
        yield from map(run_point, todo)
    elif todo:
        yield from _run_on_processes(todo, jobs, _share_replays(todo))


def _processes(jobs: int | None) -> int:
    if jobs is not None:
        return jobs
    from joblib import cpu_count  # takes long to import, here and below

    return int(cpu_count())


def start_processes(config: RunConfig, jobs: int | None = None) -> Generator[None, None, None]:
    """Start the processes of runs like this one while the caller does something else.

    They import and load what runs need, by a run of one request on workers that hold any model.
    The generator yields once, when they begin, and ends when they have; closing it stops them.
    `run_points` with ``started`` then finds them.
    """
    n = _processes(jobs)
    if n <= 1:
        yield
        return
    one = config.model_copy(
        update=NO_PART
        | {
            "topology": "1P1D" if config.generates else "1P",
            "tensor_parallel_size": NODE_GPUS,
            "policy": "jsq",
            "num_requests": 1,
            "request_rate": 1.0,
            "warmup": 0.0,
        }
    )
    with _closing(_parallel(n, n, iter([_call(Point("", one), ())] * n))) as outcomes:
        yield
        with contextlib.suppress(Exception):  # the runs themselves will report it
            for _ in outcomes:
                pass


def check_backend(
    jobs: int | None, backend: Backend = "joblib", address: str | None = None
) -> None:
    """Raise InputError if `run_points` does not accept these arguments."""
    if jobs is not None and jobs < 1:
        raise InputError("jobs", str(jobs), "1 or more")
    if backend not in get_args(Backend):
        raise InputError("backend", repr(backend), ", ".join(get_args(Backend)))
    if backend != "ray" and address is not None:
        raise InputError("address", f"{address!r} without a cluster", "--backend ray beside it")


def _run_on_processes(
    todo: Sequence[Point], jobs: int, shared: Sequence[SharedReplay]
) -> Iterator[Outcome]:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    queue = list(todo)
    while queue:
        begun: dict[str, Point] = {}

        def feed(queue: list[Point] = queue, begun: dict[str, Point] = begun) -> Iterator[Any]:
            while queue:
                point = queue.pop(0)
                begun[point.key] = point
                yield _call(point, shared)

        try:
            with _closing(_parallel(jobs, jobs, feed())) as outcomes:
                for outcome in outcomes:
                    del begun[outcome.key]
                    yield outcome
        except TerminatedWorkerError:
            for point in list(begun.values()):
                yield _run_alone(point, shared)


@contextlib.contextmanager
def _closing(outcomes: Generator[Outcome, None, None]) -> Iterator[Generator[Outcome, None, None]]:
    """Close joblib's generator at the end, without its warning that this stops its tasks."""
    try:
        yield outcomes
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes.close()


def _run_alone(point: Point, shared: Sequence[SharedReplay]) -> Outcome:
    """Run a point while no other runs, so that a killed process tells which point killed it."""
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    start = time.perf_counter()
    try:
        # Two jobs, because joblib would run a single one in this process; the second stays idle.
        return next(iter(_parallel(2, 1, iter([_call(point, shared)]))))
    except TerminatedWorkerError:
        return Outcome(point.key, None, _KILLED, time.perf_counter() - start, killed=True)


def _parallel(jobs: int, in_flight: int, calls: Iterator[Any]) -> Generator[Outcome, None, None]:
    from joblib import Parallel, parallel_config

    # One thread a process: the points run side by side.
    with parallel_config(backend="loky", inner_max_num_threads=1), _without_interrupts():
        outcomes: Generator[Outcome, None, None] = Parallel(
            n_jobs=jobs, return_as="generator_unordered", pre_dispatch=in_flight, batch_size=1
        )(calls)
    return outcomes


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back while processes start: they inherit that, and leave Ctrl-C to this one.

    Until they ignore it (`_follow`) they import, and each would print a traceback.
    """
    resource_tracker.ensure_running()  # loky would start it, which lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(point: Point, shared: Sequence[SharedReplay]) -> Any:
    from joblib import delayed

    return delayed(_run_in_worker)(point, shared, os.getpid())


def _run_in_worker(point: Point, shared: Sequence[SharedReplay], parent: int) -> Outcome:
    _follow(parent)
    for replay in shared:
        use(replay)
    return run_point(point)


_parents: set[int] = set()


def _follow(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it, also after its kill -9."""
    if parent in _parents:
        return
    _parents.add(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _share_replays(points: Iterable[Point]) -> list[SharedReplay]:
    """Lay out what the workers replay, once for every trace and model."""
    configs = {_routing_key(point.config): point.config for point in points}
    shared = []
    for config in configs.values():
        with contextlib.suppress(Exception):  # the point itself will report it
            setting = prepare(config)
            if setting.trace is not None:
                layers = setting.step_time.n_moe_layers
                shared.append(share(setting.trace, setting.model.top_k, layers))
    return [replay for replay in shared if replay is not None]


def _routing_key(config: RunConfig) -> tuple[str | None, ...]:
    """Return what tells the routing of one configuration from that of another."""
    if config.trace is not None:
        return config.trace, config.model
    mixes = json.dumps([config.domain_mix, config.domain_mix_end])
    return None, config.model, config.workload, mixes


def expected_tokens(config: RunConfig) -> float:
    """Estimate the output tokens that a run simulates, which determine most of its time.

    Recorded loads and lengths are not looked up: there, the estimate is a guess that is the same
    for every point of the same file.
    """
    rate, length = config.effective_rate, config.effective_output_len
    rate = 60.0 if rate is None or math.isinf(rate) else rate
    requests = config.num_requests or rate * (config.warmup_s + (config.duration_s or _GUESS_S))
    return requests * (512 if length == "recorded" else length)
