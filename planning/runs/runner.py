"""Many runs at once: points on processes of this machine, or on a Ray cluster.

Processes map the same bit sets to replay, read-only, and share nothing else: the outcome of a
point, a configuration with a key, depends neither on their number nor on their order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from eldr_sim.errors import InputError
from eldr_sim.jit import is_cold
from eldr_sim.planning.runs.processes import can_fork, on_processes
from eldr_sim.simulator.run import prepare_run, simulate_summary
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.replay import SharedReplay, share, use
from eldr_sim.traces.routing.format import sha256


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
    """Return a key that two configurations share only if they are equal.

    A folder of routing or of latency tables counts by what it holds, wherever it lies: a command
    that is resumed may have written it again elsewhere."""
    values = config.model_dump(mode="json")
    values |= {name: _held(values[name]) for name in ("trace", "tables") if values.get(name)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def _held(name: str) -> str:
    """Return a digest of a folder's files, of a trace's manifest, which has their checksums."""
    folder = Path(name)
    if not folder.is_dir():
        return name
    manifest = folder / "manifest.json"
    files = [manifest] if manifest.is_file() else sorted(p for p in folder.iterdir() if p.is_file())
    parts = [_file_digest(file, file.stat().st_mtime_ns) + file.name for file in files]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _file_digest(file: Path, _modified_ns: int) -> str:
    """Return a file's digest, which is read again only when the file has changed."""
    return sha256(file)


Backend = Literal["joblib", "ray"]

_GUESS_S = 120.0  # of a log
#: How often Ray begins a point at most: a node may die under any, but not always the same one.
_ATTEMPTS = 3
#: CPU seconds of the remaining runs from which processes pay: forked ones start in some 0.05 s and
#: copy pages, others import and load for 2 to 3 s each.
_FORKED_S, _SPAWNED_S = 1.5, 10.0
#: A first run longer than this is more than loading, or has compiled.
_LOADING_S = 3.0
#: Output tokens of a run that takes seconds whatever its loop, some 20 to 1,000 ns a token.
_LONG_TOKENS = 3e7


def run_points(
    points: Iterable[Point],
    jobs: int | None = None,
    *,
    backend: Backend = "joblib",
    address: str | None = None,
) -> Generator[Outcome, None, None]:
    """Run points and yield their outcomes in the order in which they end.

    Short points run in this process: the time of the first ones decides (`_Pace`). A point that
    fails does not stop the others. Where a process is killed, as for lack of memory, the points
    that were running run once more, each alone. Closing the generator stops the processes.

    Raises InputError if there are no jobs, or no such cluster. ``points``: begun in this order;
    long ones first keep the last processes busy; ``jobs``: processes at most, by default the CPUs
    that this process may use; 1 runs in this one; on Ray: points in flight, by default the
    cluster's CPUs; ``address``: of Ray: ``auto``, ``local`` or ``HOST:PORT``."""
    check_backend(jobs, backend, address)
    queue = deque(points)
    if backend == "ray":
        yield from _run_on_ray(queue, jobs, address or "auto")
        return
    if jobs is None and len(queue) > 1:
        from joblib import cpu_count  # takes long to import

        jobs = int(cpu_count())
    while queue and (min(jobs or 1, len(queue)) <= 1 or not _pace.is_long(queue)):
        point, start = queue.popleft(), time.process_time()
        outcome = run_point(point)
        if outcome.summary is not None:
            _pace.learn(point.config, time.process_time() - start)
        yield outcome
    if queue:
        shared = _share_replays(queue)
        for ended in on_processes(partial(_run_in_worker, shared), queue, jobs or 1):
            yield ended if isinstance(ended, Outcome) else _killed(*ended)


class _Pace:
    """How long runs take in this process, and whether more processes pay.

    The first run loads or compiles what runs need, so the second one counts, unless the first is
    much longer than loading."""

    def __init__(self) -> None:
        self._loaded = False
        self._token_s: float | None = None

    def learn(self, config: RunConfig, seconds: float) -> None:
        """Note the CPU seconds of a run."""
        if self._loaded or seconds > _LOADING_S:
            self._token_s = seconds / expected_tokens(config)
        self._loaded = True

    def is_long(self, queue: Sequence[Point]) -> bool:
        """Return whether points take long enough to start processes for them."""
        if self._token_s is None:
            return expected_tokens(queue[0].config) > _LONG_TOKENS and not is_cold()
        tokens = math.fsum(expected_tokens(point.config) for point in queue)
        return tokens * self._token_s > (_FORKED_S if can_fork() else _SPAWNED_S)


_pace = _Pace()


def check_backend(
    jobs: int | None, backend: Backend = "joblib", address: str | None = None
) -> None:
    """Raise InputError if `run_points` does not accept these arguments."""
    if jobs is not None and jobs < 1:
        raise InputError("jobs", str(jobs), "1 or more")
    if backend not in get_args(Backend):
        raise InputError("backend", repr(backend), ", ".join(get_args(Backend)))
    if backend != "ray" and address is not None:
        raise InputError("address", f"{address!r} without a cluster", "together with --backend ray")


def _killed(point: Point, seconds: float) -> Outcome:
    reason = "its process was killed twice, the second time with no other running: out of memory?"
    return Outcome(point.key, None, reason, seconds, killed=True)


def _run_in_worker(shared: Sequence[SharedReplay], point: Point) -> Outcome:
    for replay in shared:
        use(replay)
    return run_point(point)


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


def _run_on_ray(points: Iterable[Point], jobs: int | None, address: str) -> Iterator[Outcome]:
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
