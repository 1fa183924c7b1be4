"""Access to aiohttp, which only live runs need."""

from __future__ import annotations

from typing import Any

from eldr_sim.errors import InputError

__all__ = ["import_aiohttp", "open_session"]


def import_aiohttp() -> Any:
    """Return the module ``aiohttp``.

    Raises
    ------
    InputError
        If it is not installed.
    """
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise InputError(
            "live run", "aiohttp is not installed", "pip install 'eldr-sim[live]'"
        ) from None
    return aiohttp


def open_session(timeout_s: float | None = None) -> Any:
    """Return an ``aiohttp.ClientSession`` for an engine's completions.

    The number of connections is not limited. Idle ones are closed before uvicorn closes them (after
    5 s, in vLLM too), so that no request is posted on a closing connection.

    Parameters
    ----------
    timeout_s
        Longest time of one request, s; None for no limit.
    """
    aiohttp = import_aiohttp()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
        headers={"Content-Type": "application/json"},
    )
