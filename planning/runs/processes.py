"""Processes of this machine for many tasks, forked where the platform allows: they begin with what
this process has imported, loaded and compiled, and their pages are shared until written."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, Generic, TypeVar

from eldr_sim.phases import HARMLESS

T = TypeVar("T")
R = TypeVar("R")

_PR_SET_PDEATHSIG = 1  #: of Linux's prctl
#: One thread a process: tasks run side by side. For started processes; forked ones have loaded.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


def can_fork() -> bool:
    """Return whether processes may be forked now: on Linux, and with no thread of a notebook or
    another program, which might hold a lock for ever in the new process."""
    return sys.platform == "linux" and all(
        thread is threading.main_thread() or thread.name.startswith(HARMLESS)
        for thread in threading.enumerate()
    )


def on_processes(
    task: Callable[[T], R], arguments: Iterable[T], jobs: int
) -> Iterator[R | tuple[T, float]]:
    """Do a task for each argument, and yield results in the order in which they end.

    Where a process is killed, the tasks that were running are done once more, each alone; one
    that is killed again yields its argument and the seconds that it ran. Closing the iterator
    kills the processes."""
    queue = deque(arguments)
    while queue:
        with _pool(min(jobs, len(queue))) as pool:
            yield from pool.run(task, queue, jobs)
        for argument in pool.running():
            start = time.perf_counter()
            with _pool(1) as alone:
                yield from alone.run(task, deque([argument]), 1)
            if alone.running():
                yield argument, time.perf_counter() - start


class _Pool(Generic[T, R]):
    """Runs tasks on an executor until they are done or a process is killed."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self._begun: dict[Future[R], T] = {}

    def running(self) -> list[T]:
        """Return the arguments of tasks that have begun and not ended."""
        return list(self._begun.values())

    def run(self, task: Callable[[T], R], queue: deque[T], jobs: int) -> Iterator[R]:
        """Take arguments from the queue and yield results; ends early where a process dies."""
        with contextlib.suppress(BrokenProcessPool):
            while queue or self._begun:
                while queue and len(self._begun) < jobs:
                    with _without_interrupts():
                        begun = self.executor.submit(task, queue[0])
                    self._begun[begun] = queue.popleft()
                done, _ = wait(self._begun, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    del self._begun[future]
                    yield result


@contextlib.contextmanager
def _pool(jobs: int) -> Iterator[_Pool[Any, Any]]:
    """Yield a pool, whose processes are killed unless all that it began has ended."""
    start = _forked if can_fork() else _spawned
    with _without_interrupts():
        executor, end = start(jobs)
    pool: _Pool[Any, Any] = _Pool(executor)
    ended = False
    try:
        yield pool
        ended = not pool.running()
    finally:
        end(ended)


def _forked(jobs: int) -> tuple[Any, Callable[[bool], None]]:
    executor = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("fork"), _end_with, (os.getpid(),)
    )
    gc.freeze()  # the collector would write to every page that is shared

    def end(ended: bool) -> None:
        gc.unfreeze()
        for process in [] if ended else list((executor._processes or {}).values()):
            process.kill()
        executor.shutdown(cancel_futures=True)

    return executor, end


def _spawned(jobs: int) -> tuple[Any, Callable[[bool], None]]:
    from joblib.externals.loky import get_reusable_executor  # takes long to import

    executor = get_reusable_executor(
        jobs, timeout=300, initializer=_follow, initargs=(os.getpid(),), env=_ONE_THREAD
    )

    def end(ended: bool) -> None:
        if not ended:
            executor.shutdown(kill_workers=True)

    return executor, end


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back while processes start. Python drops what a handler raises in the
    hooks of a fork, and a new process inherits that Ctrl-C is blocked: it would print a traceback.
    Python warns of a fork beside threads; `can_fork` knows them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    handlers: dict[int, Any] = {}
    held: list[tuple[int, FrameType | None]] = []
    if threading.current_thread() is threading.main_thread():
        handlers = {
            number: handler
            for number in (signal.SIGINT, signal.SIGTERM)
            if callable(handler := signal.getsignal(number))
        }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        for number in handlers:
            signal.signal(number, lambda *received: held.append((received[0], received[1])))
        resource_tracker.ensure_running()  # loky would start it, which lets Ctrl-C through again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded")
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in held:
        handlers[number](number, frame)


def _end_with(parent: int) -> None:
    """Leave Ctrl-C to the parent that forked this process, and die with it: its files are open
    here, and with them a sweep's lock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)


def _follow(parent: int) -> None:
    """Leave Ctrl-C to the parent that started this process, and end with it, also after its kill
    -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
