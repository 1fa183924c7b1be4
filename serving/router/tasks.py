"""Background tasks of the router, none of which may end unnoticed; a limit on waiting."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

#: Time until a task that has ended is started again, s: doubled each time it ends within a minute.
_AGAIN_S, _MOST_AGAIN_S, _STABLE_S = 0.1, 30.0, 60.0


class Supervisor:
    """Starts tasks, and starts them again when they end. ``ended``: called with the name of a task
    that has ended and the reason; ``say``: called with a line for the log."""

    def __init__(self, ended: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._ended, self._say = ended, say
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run ``run()`` until `close`; when it ends or raises, log and count it and start anew."""
        self._start(self._keep(name, run))

    def once(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; log and count what it raises."""
        self._start(self._once(name, work))

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        loop, again_s = asyncio.get_running_loop(), _AGAIN_S
        while True:
            begun_s = loop.time()
            problem = await self._problem(run())
            if loop.time() - begun_s > _STABLE_S:
                again_s = _AGAIN_S
            self._ended(name)
            self._say(f"background task {name}: {problem}; starts again in {again_s:g} s")
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _MOST_AGAIN_S)

    async def _once(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        problem = await self._problem(work)
        if problem != _ENDED:
            self._ended(name)
            self._say(f"background task {name}: {problem}")

    async def _problem(self, work: Awaitable[None]) -> str:
        """Wait for the end and return the reason; raises CancelledError only if this task is
        cancelled, not if a library raises it."""
        try:
            await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return "cancelled by a library"
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return _ENDED


_ENDED = "ended"


def silent_if_broken(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``say`` without the errors of a log that cannot be written (a full disk, a closed
    pipe), which must not end what reports to it."""

    def careful(line: str) -> None:
        try:
            say(line)
        except (OSError, ValueError):  # ValueError: a closed file
            return

    return careful


class Patience:
    """Raises TimeoutError in its block ``limit_s`` after it began or was last renewed. Unlike
    ``asyncio.timeout``, renewing it costs no timer, so that each token of a stream may."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._loop = limit_s, asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._scope = asyncio.timeout(None)
        self._timer = self._loop.call_at(self._since_s + limit_s, self._look)

    async def __aenter__(self) -> "Patience":
        await self._scope.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        await self._scope.__aexit__(*error)

    def renew(self) -> None:
        """Begin to wait anew."""
        self._since_s = self._loop.time()

    def _look(self) -> None:
        ends_s = self._since_s + self._limit_s
        if ends_s <= self._loop.time():
            self._scope.reschedule(ends_s)
        else:
            self._timer = self._loop.call_at(ends_s, self._look)
