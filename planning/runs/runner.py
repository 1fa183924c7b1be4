"""Many runs at once: points on processes of this machine, or on a Ray cluster.

Processes map the same bit sets to replay, read-only, and share nothing else: the outcome of a
point, a configuration with a key, depends neither on their number nor on their order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import resource_tracker
from typing import Any, Literal, get_args

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.parallel import NODE_GPUS
from eldr_sim.simulator.run import prepare_run, simulate_summary
from eldr_sim.simulator.setup.config.requests import NO_PART
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.replay import SharedReplay, share, use


@dataclass(frozen=True)
class Point:
    """A configuration to run; ``key`` is the caller's name for it."""

    key: str
    config: RunConfig


@dataclass(frozen=True)
class Outcome:
    """Outcome of a point: its summary, or why it failed."""

    key: str  #: the point's
    summary: dict[str, Any] | None  #: ``summary.json`` of the run; None where it failed
    reason: str  #: why it failed, in one line; empty where it did not
    seconds: float  #: wall time of the run, which differs from run to run
    #: Whether it failed because its processes were killed, which says little about the point.
    killed: bool = False


def run_point(point: Point) -> Outcome:
    """Run one point in this process."""
    start = time.perf_counter()
    summary, reason = None, ""
    try:
        summary = simulate_summary(point.config)
    except InputError as error:
        reason = str(error)
    except Exception as error:  # of any kind: the other points go on
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Outcome(point.key, summary, reason, time.perf_counter() - start)


def with_seed(config: RunConfig, index: int) -> RunConfig:
    """Return the run of seed number ``index``, counted from the configuration's own."""
    return config.model_copy(update={"seed": config.requests.seed + index})


def config_key(config: RunConfig) -> str:
    """Return a key that two configurations share only if they are equal."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


Backend = Literal["joblib", "ray"]

_GUESS_S = 120.0  # of a log
#: How often Ray begins a point at most: a node may die under any, but not always the same one.
_ATTEMPTS = 3
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

    A point that fails does not stop the others. Where a process is killed, as for lack of memory,
    the points that were running run once more, each alone. Closing the generator stops the
    processes.

    Raises InputError if there are no jobs, or no such cluster. ``points``: begun in this order;
    long ones first keep the last processes busy; ``jobs``: processes, by default the CPUs that this
    process may use; 1 runs in this one; on Ray: points in flight, by default the cluster's CPUs;
    ``address``: of Ray: ``auto``, ``local`` or ``HOST:PORT``; ``started``: whether
    `start_processes` has started them."""
    check_backend(jobs, backend, address)
    todo = list(points)
    if backend == "ray":
        yield from _run_on_ray(todo, jobs, address or "auto")
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

    They load what runs need, by a run of one request. The generator yields once, when they begin,
    and ends when they have; closing it stops them."""
    n = _processes(jobs)
    if n <= 1:
        yield
        return
    one = config.model_copy(
        update=NO_PART
        | {
            "topology": "1P1D" if config.cluster.generates else "1P",
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
    """Hold Ctrl-C back while processes start, which inherit that: each would print a traceback."""
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
            setting = prepare_run(config)
            if setting.trace is not None:
                layers = setting.step_time.n_moe_layers
                shared.append(share(setting.trace, setting.model.top_k, layers))
    return [replay for replay in shared if replay is not None]


def _routing_key(config: RunConfig) -> tuple[str | None, ...]:
    """Return what tells the routing of one configuration from that of another."""
    if config.routing.trace is not None:
        return config.routing.trace, config.engine.model
    mixes = json.dumps([config.routing.domain_mix, config.routing.domain_mix_end])
    return None, config.engine.model, config.requests.workload, mixes


def expected_tokens(config: RunConfig) -> float:
    """Estimate the output tokens of a run, most of its time; of recorded loads a guess."""
    rate, length = config.requests.effective_rate, config.effective_output_len
    rate = 60.0 if rate is None or math.isinf(rate) else rate
    requests = config.requests.num_requests or rate * (
        config.requests.warmup_s + (config.requests.duration_s or _GUESS_S)
    )
    return requests * (512 if length == "recorded" else length)


def _run_on_ray(points: Sequence[Point], jobs: int | None, address: str) -> Iterator[Outcome]:
    """Run points on a cluster, whose nodes have eldr-sim and the files that configurations name.

    A point whose worker or node dies is submitted again. Not by joblib's Ray backend, which has no
    unordered outcomes, and loses all of them with one worker (Ray 2.60, joblib 1.6)."""
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise InputError("backend", "Ray is not installed", "pip install 'eldr-sim[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    # Ray's own retries are off: they would hide a point that kills every worker.
    remote = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(run_point)
    queue = deque(points)
    begun: dict[Any, tuple[Point, float]] = {}
    attempts: Counter[str] = Counter()
    try:
        while queue or begun:
            room = (jobs or int(ray.cluster_resources().get("CPU", 1))) - len(begun)
            for _ in range(min(room, len(queue))):
                point = queue.popleft()
                begun[remote.remote(point)] = point, time.perf_counter()
            done, _ = ray.wait(list(begun), timeout=1.0)
            for reference in done:
                point, start = begun.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayTaskError as error:  # the worker could not begin
                    reason = f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())}"
                    yield Outcome(point.key, None, reason, time.perf_counter() - start)
                except ray.exceptions.RayError as error:  # its worker or its node is gone
                    attempts[point.key] += 1
                    if attempts[point.key] < _ATTEMPTS:
                        queue.append(point)
                        continue
                    seconds = time.perf_counter() - start
                    yield Outcome(point.key, None, _gone(error), seconds, killed=True)
    finally:
        for reference in begun:
            ray.cancel(reference, force=True)
        if ours:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:  # without a listener, Ray itself retries for minutes
            socket.create_connection((host, int(port)), timeout=5.0).close()
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level="error",
            **({"include_dashboard": False} if address == "local" else {}),
        )
    except (OSError, ValueError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0]
        raise InputError(
            "address", f"no Ray cluster at {address!r}: {line}", "auto, local or HOST:PORT"
        ) from None


def _gone(error: Exception) -> str:
    return f"its worker died {_ATTEMPTS} times, lastly of {type(error).__name__}: out of memory?"
