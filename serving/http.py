"""Access to aiohttp, which only live runs need, and what our servers share."""

import logging
import resource
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from eldr_sim.errors import InputError, needed

#: A prompt of a million token ids is about 7 MB.
MAX_BODY = 64 << 20


def import_aiohttp() -> Any:
    """Return the module ``aiohttp``; raises InputError if it is not installed."""
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


def application(run: Callable[[Any], Any], complete: Any, **asked: Any) -> Any:
    """Return an ``aiohttp.web.Application`` behind OpenAI's paths; ``handler_cancellation=True``
    lets a client that leaves cancel its request. ``run``: an async generator as long as it;
    ``complete``, ``asked``: answer completions, and ``/health``, ``/metrics`` and
    ``/v1/models``."""
    from aiohttp import web

    logging.getLogger("aiohttp.server").addFilter(is_our_error)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[web.middleware(in_json)])
    app.cleanup_ctx.append(run)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, complete)
    for path, answer in asked.items():
        app.router.add_get(f"/{'v1/' * (path == 'models')}{path}", answer)
    return app


def open_session(timeout_s: float | None = None) -> Any:
    """Return an ``aiohttp.ClientSession`` for an engine's completions, connections not limited.
    Idle ones are closed before uvicorn closes them (5 s, in vLLM too). ``timeout_s``: of one
    request."""
    aiohttp = import_aiohttp()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
        headers={"Content-Type": "application/json"},
    )


async def in_json(request: Any, handler: Any) -> Any:
    """Word all errors alike, those of unknown paths and methods too."""
    from aiohttp import web

    try:
        return await handler(request)
    except web.HTTPException as error:
        return error_answer(error.status, f"{request.method} {request.path}: {error.reason}")


def is_our_error(record: logging.LogRecord) -> bool:
    """Whether a line of aiohttp's log is of something else than HTTP that a client gets wrong. Such
    a client has its answer, 400; a line with a traceback for each would fill a disk."""
    from aiohttp.http import HttpProcessingError

    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises InputError where the address is taken."""
    kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise InputError("port", f"{host}:{port}: {error.strerror}") from None


def url_of(listening: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def open_log(path: Path) -> IO[str]:
    """Open a file for what arrives; raises InputError where it cannot be written."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError("log", f"{path}: {error.strerror}") from None


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
