"""Which requests a local HTTP server accepts. A web page of another site can send requests to
servers on the user's machine, and read the answers if its name resolves to them (DNS rebinding). So
a name in ``Host`` must be known, ``Origin`` be the server itself, and a body be declared as JSON,
which browsers send to other sites only if these agree."""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from eldr_sim.errors import InputError

_NAME = re.compile(r"\.?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_SEEN = 1024  #: names of which the answer is kept
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """Checks the headers of requests.

    Always accepted in ``Host``: IP addresses, which no foreign name can stand for, ``localhost``,
    the name that the server listens at, and the machine's name; with any port, so that port
    mappings and tunnels work. ``host``: where the server listens; ``allowed``: more names,
    ``.example.com`` for all names below one, ``*`` for any. Raises InputError for what is no name.
    """

    def __init__(self, host: str = "127.0.0.1", allowed: Sequence[str] = ()) -> None:
        self._any = "*" in allowed
        self._extra = {_checked(name) for name in allowed if name != "*"}
        self._seen: dict[str, bool] = {}
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}

    def problem(self, method: str, headers: Any) -> tuple[int, str] | None:
        """Return status and message for a request that is refused; None for others. ``headers``: a
        multi-dictionary of ``aiohttp``."""
        hosts, origins = headers.getall("Host", []), headers.getall("Origin", [])
        if len(hosts) > 1 or len(origins) > 1:
            return 400, "Host or Origin is given twice"
        host = hosts[0].lower() if hosts else None
        if host is not None and not self._knows(host):
            return 403, f"host {host[:100]!r} is not allowed (--allowed-host NAME adds one)"
        if origins and not self._is_own(origins[0].lower(), host):
            return 403, f"origin {origins[0][:100]!r} is not allowed (--allowed-host NAME adds one)"
        if method in ("POST", "PUT", "PATCH"):
            kinds = headers.getall("Content-Type", [])
            if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
                return 415, "Content-Type must be application/json"
        return None

    def _knows(self, netloc: str) -> bool:
        seen = self._seen.get(netloc)
        if seen is None:
            name = _name_of(netloc)
            seen = name is not None and (
                self._any or _is_address(name) or name in self._names or self._is_extra(name)
            )
            if len(self._seen) < _SEEN:
                self._seen[netloc] = seen
        return seen

    def _is_extra(self, name: str) -> bool:
        return name in self._extra or any(
            known.startswith(".") and (name.endswith(known) or name == known[1:])
            for known in self._extra
        )

    def _is_own(self, origin: str, host: str | None) -> bool:
        """Whether an origin is the server: the host of the request, or another loopback name of
        the same port; or a name that was allowed."""
        scheme, _, netloc = origin.partition("://")
        name = _name_of(netloc)
        if scheme not in ("http", "https") or name is None:
            return False
        if netloc == host or self._any or self._is_extra(name):
            return True
        own = _name_of(host) if host else None
        same_port = host is not None and _port_of(netloc) == _port_of(host)
        return name in _LOOPBACK and own in _LOOPBACK and same_port


def middleware(guard: Guard, refuse: Callable[[int, str], Any]) -> Any:
    """Return a middleware of ``aiohttp.web`` which answers refused requests with ``refuse``."""
    from aiohttp import web

    async def checked(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        problem = guard.problem(request.method, request.headers)
        return await handler(request) if problem is None else refuse(*problem)

    return web.middleware(checked)


def shown_url(host: str, port: int) -> str:
    """Return a URL of a server that a browser on this machine can open."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _checked(name: str) -> str:
    lowered = name.lower()
    if _name_of(lowered.removeprefix(".")) is None or _port_of(lowered):
        allowed = "a host name such as gpu7 or .example.com, without scheme and port, or *"
        raise InputError("allowed_host", repr(name), allowed)
    return lowered


def _name_of(netloc: str) -> str | None:
    """Return the host of ``host:port`` in small letters; None if it is not one."""
    try:
        parts = urlsplit(f"//{netloc}")
        host, _port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or parts.netloc != netloc or "@" in netloc:
        return None
    name = f"[{host}]" if ":" in host else host
    good = _is_address(name) or _NAME.fullmatch(name.removesuffix("."))
    return name if good else None


def _port_of(netloc: str) -> int | None:
    try:
        return urlsplit(f"//{netloc}").port
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
