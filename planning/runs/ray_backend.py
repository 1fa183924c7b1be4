"""Points on a Ray cluster, for sweeps that outgrow one machine.

Every node needs eldr-sim installed, and the files that the configurations name under the same
paths. The driver alone keeps track of what is done: a point whose worker or node dies is submitted
again, and yields one outcome however often it was begun.

Why not joblib's Ray backend (``ray.util.joblib``; tried with Ray 2.60 and joblib 1.6): it refuses
``return_as="generator_unordered"``, so no outcome comes before the last, and one killed worker or
lost node ends the whole call with ``ActorDiedError`` or ``ActorUnavailableError`` and no outcome.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eldr_sim.errors import InputError

if TYPE_CHECKING:
    from eldr_sim.planning.runs.points import Outcome, Point

#: How often a point is begun at most: a node may die under any point, but not always the same one.
_ATTEMPTS = 3


def run_on_ray(points: Sequence[Point], jobs: int | None, address: str) -> Iterator[Outcome]:
    """Run points on a cluster and yield their outcomes in the order in which they end.

    ``points``: points to run, begun in this order; ``jobs``: points in flight; by default as many
    as the cluster has CPUs, nodes that join later included; ``address``: ``auto``, ``local`` or
    ``HOST:PORT``, as `ray.init` reads it. Raises InputError if Ray is not installed or there is no
    cluster at the address.
    """
    from eldr_sim.planning.runs.points import Outcome, run_point

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
