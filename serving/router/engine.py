"""What the router knows of one engine: whether it answers, and since when it has been silent."""

import asyncio
import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from eldr_sim.serving.http import import_aiohttp

#: Questions for its health that fail in a row until an engine is ejected.
_PROBES = 2
#: Requests that fail in a row until an engine is ejected although it answers ``/health``.
_STRIKES = 3
#: How long it then stays away, s: twice as long each time, as Envoy's outlier detection does.
_AWAY_S, _MOST_AWAY_S = 10.0, 300.0
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


class Engine:
    """An engine, ``up`` while it answers; ``problem``: why not.

    It is ejected when it refuses a connection, answers ``/health`` with 500 or more, or not twice
    in a row, until it answers again; and when three requests in a row fail, or one gets no answer
    while no other does, although it answers ``/health``: for 10 s, then 20, at most 300.
    ``changed``: called when it is ejected and returns; ``is_last``: no other is up: then failed
    requests do not eject it, lest one client's bad requests take all engines."""

    def __init__(
        self,
        url: str,
        name: str,
        changed: Callable[["Engine"], None],
        is_last: Callable[[], bool] = lambda: False,
    ) -> None:
        self.url, self.name, self.up, self.problem = url, name, False, "not asked yet"
        self._changed, self._is_last = changed, is_last
        #: Limits of requests without an answer yet; they expire when it falls silent.
        self.waiting: set[asyncio.Timeout] = set()
        self._heard_s = self._back_s = 0.0
        self._probes = self._strikes = self._relapses = 0
        self._look = asyncio.Event()

    def heard(self) -> None:
        """Take note that something of an answer has come."""
        self._heard_s = _now_s()

    def served(self) -> None:
        """Take note that a request has got what it asked for."""
        self.heard()
        self._strikes = self._relapses = 0

    def refused(self, problem: str) -> None:
        """Take note that no connection was accepted: nothing is there."""
        self._is_down(problem, silent_since_s=_now_s())

    def failed(self, problem: str, *, lately_heard_s: float | None = None) -> None:
        """Note that a request has failed, and ask for health at once. ``lately_heard_s``: limit of
        a request without an answer; it counts only if no other request got one meanwhile, since
        a long queue is only slow."""
        if lately_heard_s is not None and _now_s() - self._heard_s < lately_heard_s:
            return
        self._look.set()
        if not self.up:
            return
        self._strikes += 1
        if lately_heard_s is not None or (self._strikes >= _STRIKES and not self._is_last()):
            away_s = min(_AWAY_S * 2**self._relapses, _MOST_AWAY_S)
            self._relapses += 1
            self._strikes = _STRIKES - 1  # the next failure ejects it again
            self._back_s = _now_s() + away_s
            self._eject(problem, silent_since_s=_now_s() - (lately_heard_s or 0.0))

    async def watch(self, session: Any, interval_s: float, timeout_s: float) -> None:
        """Ask for the engine's health until cancelled, at once after a request has failed."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._look.wait()
                await asyncio.sleep(min(interval_s, 0.1))  # a process that dies takes a while
            self._look.clear()
            await self.probe(session, timeout_s)

    async def probe(self, session: Any, timeout_s: float, *, first: bool = False) -> None:
        """Ask for the engine's health once."""
        aiohttp = import_aiohttp()
        asked_s = _now_s()
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with session.get(self.url + "/health", timeout=limit) as response:
                status = response.status
        except (TimeoutError, aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
            self._probes += 1
            if self._probes >= _PROBES or first:
                silent = isinstance(error, TimeoutError)
                problem = f"no answer to /health in {timeout_s:g} s" if silent else "breaks off"
                self._is_down(problem, silent_since_s=asked_s - (self._probes - 1) * timeout_s)
            return
        except (aiohttp.ClientError, OSError) as error:
            if not out_of_files(error):
                self.refused(what(error))
            return
        self._probes = 0
        if status >= 500:
            self._is_down(f"/health answers {status}", silent_since_s=_now_s())
        elif not self.up and _now_s() >= self._back_s:
            self.up, self.problem = True, ""
            self._changed(self)

    def _is_down(self, problem: str, silent_since_s: float) -> None:
        """Eject it until it answers: that explains what has failed before."""
        self._strikes, self._back_s = 0, 0.0
        self._eject(problem, silent_since_s)

    def _eject(self, problem: str, silent_since_s: float) -> None:
        """Give it no more requests; those that wait for an answer it does not give go elsewhere."""
        before, self.problem = (self.up, self.problem), problem
        self.up = False
        if before != (self.up, problem):
            self._changed(self)
        if self._heard_s <= silent_since_s:
            loop = asyncio.get_running_loop()
            for scope in self.waiting:
                if not scope.expired():
                    scope.reschedule(loop.time())


def what(error: BaseException) -> str:
    """Say in a few words what happened to a connection, without addresses."""
    cause = getattr(error, "os_error", None) or error
    number = getattr(cause, "errno", None)
    return os.strerror(number) if number else type(cause).__name__


def out_of_files(error: BaseException) -> bool:
    """Whether this process may open no more connections, which is no engine's fault."""
    cause = getattr(error, "os_error", None) or error
    return getattr(cause, "errno", None) in _OUT_OF_FILES


_now_s = time.monotonic  # the clock of asyncio's loops
