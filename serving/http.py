"""Access to aiohttp, which only live runs need, and what our servers share."""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from eldr_sim.errors import InputError, needed
from eldr_sim.guard import Guard, shown_url

_MIB = 1 << 20


@cache
def import_aiohttp() -> Any:
    """Return the module ``aiohttp``, with ``aiohttp.web``; raises InputError if it is not
    installed."""
    needed("aiohttp.web", "live run")
    return needed("aiohttp", "live run")


class Registry:
    """What a server counts, for Prometheus; InputError, named ``field``, without its client."""

    def __init__(self, field: str) -> None:
        self.library: Any = needed("prometheus_client", field)
        self.registry = self.library.CollectorRegistry()

    def text(self) -> bytes:
        """Return all of it, in Prometheus' text format."""
        found: bytes = self.library.generate_latest(self.registry)
        return found

    async def answer(self, _request: Any) -> Any:
        """Answer with it."""
        from aiohttp import web

        headers = {"Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=self.text(), headers=headers)


class Limits(NamedTuple):
    """What a server accepts at a time."""

    max_concurrent_requests: int = 4096  #: requests in progress; beyond it the answer is 429
    max_body_mib: float = 64.0  #: largest body; a prompt of a million token ids is about 7 MB
    #: Bodies and unstreamed answers in memory, in all; beyond it the answer is 503.
    max_buffered_mib: float = 1024.0


class Refused(Exception):
    """A request that is not served: status and message of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Intake:
    """Requests in progress, and the bytes of them that are held in memory. ``draining``: whether
    the server is shutting down; ``stopping``: whether the grace period is over."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.n_bytes = 0
        self._held: dict[int, int] = {}
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self.draining = self.stopping = False

    @property
    def n_requests(self) -> int:
        """Requests in progress."""
        return len(self._held)

    def admit(self, request: Any) -> None:
        """Count the request of this task until `release`; raises Refused beyond the limit."""
        max_concurrent_requests = self.limits.max_concurrent_requests
        if self.n_requests >= max_concurrent_requests:
            raise Refused(
                429,
                f"{max_concurrent_requests} requests are in progress (--max-concurrent-requests)",
            )
        task = asyncio.current_task()
        assert task is not None
        self._held[id(request)] = 0
        self._tasks[id(request)] = task

    def release(self, request: Any) -> None:
        """Count an admitted request and its bytes no longer."""
        self.n_bytes -= self._held.pop(id(request))
        del self._tasks[id(request)]

    def stop(self) -> None:
        """Cancel what is in progress; its handlers may still say so to their clients."""
        self.draining = self.stopping = True
        for task in self._tasks.values():
            task.cancel()

    def hold(self, request: Any, n_bytes: int) -> None:
        """Count bytes that are held until a request ends; raises Refused beyond the limit."""
        if self.n_bytes + n_bytes > self.limits.max_buffered_mib * _MIB:
            raise Refused(503, "too many bytes are in progress (--max-buffered-mib)")
        self.n_bytes += n_bytes
        self._held[id(request)] += n_bytes

    async def body(self, request: Any, limit_s: float | None = None) -> bytes:
        """Return a request's body; raises Refused beyond the limits, TimeoutError after
        ``limit_s``."""
        most, content = self.limits.max_body_mib * _MIB, request.content
        parts, total = [], request.content_length or 0
        if total <= most:
            if content.is_eof():  # it came with the headers
                parts.append(content.read_nowait())
                total = len(parts[0])
                self.hold(request, total)
            else:
                async with asyncio.timeout(limit_s):
                    total = 0
                    async for part in content.iter_any():
                        total += len(part)
                        if total > most:
                            break
                        self.hold(request, len(part))
                        parts.append(part)
        if total > most:
            raise Refused(413, f"body: more than {self.limits.max_body_mib:g} MiB (--max-body-mib)")
        return b"".join(parts)


def application(
    run: Callable[[Any], Any],
    intake: Intake,
    guard: Guard,
    posts: Mapping[str, Any],
    gets: Mapping[str, Any],
) -> Any:
    """Return an ``aiohttp.web.Application``; ``handler_cancellation=True`` of its runner lets a
    client that leaves cancel its request. ``run``: an async generator that lasts as long as the
    application; ``posts``, ``gets``: handlers by path."""
    from aiohttp import web

    logging.getLogger("aiohttp.server").addFilter(is_our_error)
    app = web.Application(middlewares=[web.middleware(partial(in_json, guard, intake))])
    app.cleanup_ctx.append(run)
    for path, answer in posts.items():
        app.router.add_post(path, answer)
    for path, answer in gets.items():
        app.router.add_get(path, answer)
    return app


class Site(NamedTuple):
    """An application at a socket; ``said``: announced when it listens."""

    app: Any
    listener: socket.socket
    intake: Intake
    said: str


async def serve_sites(
    sites: Sequence[Site],
    announce: Callable[[str], None],
    *,
    grace_s: float,
    idle_s: float = 75.0,
    failures: Sequence[asyncio.Future[None]] = (),
) -> None:
    """Serve until SIGTERM or Ctrl-C. Then ``Intake.draining`` is set and requests in progress have
    ``grace_s`` to end; a second signal ends them at once. ``idle_s``: time that a connection is
    kept open between requests; ``failures``: futures that end it too, with their exception."""
    from aiohttp import web

    loop, told, at_once = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (at_once if told.is_set() else told).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    runners = []
    how = {"handler_cancellation": True, "access_log": None, "shutdown_timeout": 1.0}
    try:
        for site in sites:
            runners.append(web.AppRunner(site.app, keepalive_timeout=idle_s, **how))
            await runners[-1].setup()
            await web.SockSite(runners[-1], site.listener).start()
            announce(site.said)
        waits: list[asyncio.Future[Any]] = [*failures, asyncio.ensure_future(told.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for site in sites:
            site.intake.draining = True
        busy = sum(site.intake.n_requests for site in sites)
        if told.is_set() and busy:
            text = "a second signal ends them at once"
            announce(f"Stopping: {busy} requests have {grace_s:g} s to end; {text}")
            await _at_rest(sites, grace_s, at_once)
    finally:
        for site in sites:
            site.intake.stop()
        await _at_rest(sites, 1.0, asyncio.Event())
        for runner in runners:
            await runner.cleanup()
    for failure in failures:
        if failure.done():
            failure.result()


def open_session(timeout_s: float | None = None, connect_timeout_s: float = 10.0) -> Any:
    """Return an ``aiohttp.ClientSession`` for an engine's completions, connections not limited.
    Idle ones are closed before uvicorn closes them (5 s, in vLLM too). ``timeout_s``: of one
    request; ``connect_timeout_s``: until an engine accepts a connection."""
    aiohttp = import_aiohttp()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_timeout_s),
        headers={"Content-Type": "application/json"},
    )


async def _at_rest(sites: Sequence[Site], limit_s: float, at_once: asyncio.Event) -> None:
    """Wait until no request is in progress, for ``limit_s`` at most, or until ``at_once``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while any(site.intake.n_requests for site in sites) and not at_once.is_set():
                await asyncio.sleep(0.02)


async def in_json(guard: Guard, intake: Intake, request: Any, handler: Any) -> Any:
    """Answer what the guard and, of requests with a body, the intake let through; all errors in one
    format, those of unknown paths and methods too."""
    try:
        problem = guard.problem(request.method, request.headers)
        if problem is not None:
            return error_answer(*problem)
        if request.method != "POST":
            return await handler(request)
        intake.admit(request)
        try:
            return await handler(request)
        finally:
            intake.release(request)
    except Refused as refused:
        retry = {"Retry-After": "1"} if refused.status in (429, 503) else None
        return error_answer(refused.status, str(refused), retry)
    except import_aiohttp().web.HTTPException as error:
        return error_answer(error.status, f"{request.method} {request.path}: {error.reason}")
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        # The client has left; aiohttp would log a traceback.
        return import_aiohttp().web.Response(status=499)


def is_our_error(record: logging.LogRecord) -> bool:
    """Whether a line of aiohttp's log is about this server. Clients that send malformed HTTP (they
    are answered 400) or leave would fill a disk with tracebacks."""
    from aiohttp.client_exceptions import ClientPayloadError
    from aiohttp.http import HttpProcessingError
    from aiohttp.web import RequestPayloadError

    clients = (HttpProcessingError, RequestPayloadError, ClientPayloadError, ConnectionError)
    return not (record.exc_info and isinstance(record.exc_info[1], clients))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises InputError where the address is taken."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise InputError("port", f"{host}:{port}: {error.strerror}") from None


def url_of(listener: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    return shown_url(*listener.getsockname()[:2])


def allow_files() -> None:
    """Raise the limit on open files: a request takes two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def error_answer(status: int, message: str, headers: Mapping[str, str] | None = None) -> Any:
    """Return an error as OpenAI's and vLLM's servers word it."""
    from aiohttp import web

    return web.json_response(error_body(status, message), status=status, headers=headers)


def error_body(status: int, message: str) -> dict[str, dict[str, Any]]:
    """Return the body of an error."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
