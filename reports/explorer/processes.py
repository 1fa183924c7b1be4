"""Processes that compute the explorer's points, each within limits of time and memory. A point that
no client waits for is ended with its process, and a process that has ended is replaced."""

import asyncio
import json
import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from eldr_sim.reports.explorer.points import run_point


class PointLimits(NamedTuple):
    """What a point may take. ``timeout_s``: of the wall clock; ``memory_gib``: of a process;
    ``requests``: warm-up included."""

    timeout_s: float = 120.0
    memory_gib: float = 4.0
    requests: int = 20_000


class PointLost(Exception):
    """A point has exceeded its limits, or its process has ended: says which."""


class Processes:
    """``jobs`` processes. `close` ends them."""

    def __init__(self, jobs: int, limits: PointLimits) -> None:
        self._limits, self._closed = limits, False
        self._idle = [_Worker(limits.memory_gib) for _ in range(jobs)]
        self._free = asyncio.Semaphore(jobs)
        self._busy: set[_Worker] = set()

    async def run(self, key: tuple[str, bool], begun: asyncio.Event, *, limited: bool) -> Any:
        """Return what `run_point` gives for ``key`` (values, pictures) as soon as a process is
        free; raises PointLost. ``begun``: set when one has it; ``limited``: whether its time is.
        If this is cancelled, the process is ended and replaced."""
        async with self._free:
            begun.set()
            worker = self._idle.pop()
            if not worker.process.is_alive():
                worker = self._replaced(worker)
            self._busy.add(worker)
            good = False
            try:
                async with asyncio.timeout(self._limits.timeout_s if limited else None):
                    loop = asyncio.get_running_loop()
                    answer = await loop.run_in_executor(None, worker.ask, key)
                good = True
                return json.loads(answer)
            except TimeoutError:
                text = f"takes more than {self._limits.timeout_s:g} s (--point-timeout)"
                raise PointLost(text) from None
            except (EOFError, OSError):
                worker.process.join(1.0)
                text = f"its process ended (exit code {worker.process.exitcode}: out of memory?)"
                raise PointLost(text) from None
            finally:
                self._busy.discard(worker)
                self._idle.append(worker if good or self._closed else self._replaced(worker))

    def _replaced(self, worker: "_Worker") -> "_Worker":
        worker.kill()
        return _Worker(self._limits.memory_gib)

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        for worker in (*self._idle, *self._busy):
            worker.kill()


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, memory_gib: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, memory_gib), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, key: tuple[str, bool]) -> bytes:
        """Return the answer to a point, JSON; blocks. Raises EOFError or OSError if the process
        ends before."""
        self.pipe.send_bytes(json.dumps(key).encode())
        return self.pipe.recv_bytes()

    def kill(self) -> None:
        """End the process, and so a thread that waits for it."""
        self.process.kill()
        self.process.join(5.0)


def _serve(pipe: Connection, memory_gib: float) -> None:
    """Compute points until the pipe is closed; Ctrl-C is for the explorer."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most = int(memory_gib * 2**30)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with suppress(EOFError, OSError):
        while True:
            values, pictures = json.loads(pipe.recv_bytes())
            try:
                found = run_point(values, pictures)
            except MemoryError:
                found = {"error": f"takes more than {memory_gib:g} GiB (--point-memory-gib)"}
            pipe.send_bytes(json.dumps(found).encode())
