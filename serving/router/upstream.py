"""One question to one engine: its answer as it comes, or why there is none."""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from eldr_sim.serving.http import import_aiohttp
from eldr_sim.serving.router.config import ProxyConfig
from eldr_sim.serving.router.engine import Engine, out_of_files, what

#: How an error begins in a stream of vLLM's and SGLang's; the text of a token cannot hold it.
ERROR_EVENT = b'data: {"error":'


#: Longest time to wait for the tokens of a prompt, and their largest text.
_TOKENIZED_S, _TOKENIZED_MIB = 1.0, 16.0


class EngineFailure(Exception):
    """An engine has not answered as a living one does. ``status``: the client's status, if no other
    engine answers; ``reached``: whether it may have seen the request; ``body``: its own words,
    JSON; ``final``: whether another engine is not to be tried."""

    def __init__(
        self,
        problem: str,
        status: int = 502,
        *,
        reached: bool = True,
        body: bytes | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(problem)
        self.status, self.reached, self.body, self.final = status, reached, body, final


class Reply:
    """An engine's answer of which the first token, or all, is there. ``status``, ``headers``: of
    HTTP, those that a client gets; ``first``: the body up to the first token; all of it where the
    answer is not streamed; ``broken``: whether the engine has said in its stream that something
    went wrong."""

    def __init__(self, engine: Engine, response: Any, first: bytes, *, streams: bool) -> None:
        kind = response.headers.get("Content-Type", "application/octet-stream")
        self.status, self.headers = response.status, {"Content-Type": kind}
        self.first = first
        self.streams = streams
        self.broken = False
        self._engine, self._response = engine, response

    async def more(self) -> bytes:
        """Return what has come since, nothing at the end; raises EngineFailure if it breaks."""
        engine = self._engine
        try:
            part: bytes = await self._response.content.readany()
        except (import_aiohttp().ClientError, OSError) as error:
            raise _breaks_off(engine, error) from None
        if part:
            engine.heard()
            self.broken = self.broken or ERROR_EVENT in part
        elif self.broken:
            engine.failed("says in a stream that something went wrong")
        else:
            engine.served()
        return part

    def silent(self, limit_s: float) -> EngineFailure:
        """Note that no token has come for ``limit_s``; return the failure."""
        problem = f"no token in {limit_s:g} s"
        self._engine.failed(problem, lately_heard_s=limit_s)
        return EngineFailure(f"{self._engine.name}: {problem}", 504)

    def close(self) -> None:
        """Leave; an engine that is not done stops computing."""
        self._response.close()


class Post(NamedTuple):
    """What is sent to an engine."""

    path: str
    data: bytes
    headers: Mapping[str, str]
    streamed: bool = False  #: whether the first token is sent before the last


async def tokenized(
    session: Any, url: str, headers: Mapping[str, str], asked: Mapping[str, Any]
) -> list[int]:
    """Return the tokens of a prompt that is text, as an engine says; none where it does not."""
    aiohttp = import_aiohttp()
    limit = aiohttp.ClientTimeout(total=_TOKENIZED_S)
    with suppress(
        TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, TooLong,
        RecursionError,
    ):  # fmt: skip
        async with session.post(
            url + "/tokenize", json=asked, headers=headers, timeout=limit
        ) as response:
            tokens = json.loads(await whole(response, _TOKENIZED_MIB))["tokens"]
            if isinstance(tokens, list) and set(map(type, tokens)) <= {int}:
                return tokens
    return []


async def ask(
    session: Any,
    engine: Engine,
    post: Post,
    limits: ProxyConfig,
    limit_s: float | None = None,
    hold: Callable[[int], None] = lambda _n: None,
) -> Reply:
    """Post a request; return the answer when its first token is there. Raises EngineFailure without
    one within ``limit_s`` (or ``limits``), or at a status of 500 or more. ``hold``: called with the
    bytes of an unstreamed answer as they come; what it raises ends the request."""
    aiohttp = import_aiohttp()
    if limit_s is None:
        limit_s = limits.first_token_timeout_s if post.streamed else limits.answer_timeout_s
    url, streams = engine.url + post.path, False
    response: Any = None
    try:
        async with asyncio.timeout(limit_s) as scope:
            engine.waiting.add(scope)
            try:
                response = await session.post(
                    url, data=post.data, headers=post.headers, allow_redirects=False
                )
                kind = response.headers.get("Content-Type", "")
                streams = response.status == 200 and kind.startswith("text/event-stream")
                if streams:
                    first = await response.content.readany()
                else:
                    first = await whole(response, limits.max_answer_mib, hold)
            finally:
                engine.waiting.discard(scope)
    except TooLong:
        response.close()
        problem = f"an unstreamed answer of more than {limits.max_answer_mib:g} MiB"
        engine.failed(problem)
        raise EngineFailure(f"{engine.name}: {problem}", final=True) from None
    except aiohttp.ConnectionTimeoutError:
        problem = f"no connection in {limits.connect_timeout_s:g} s"
        engine.failed(problem, lately_heard_s=limits.connect_timeout_s)
        raise EngineFailure(f"{engine.name}: {problem}", 504, reached=False) from None
    except TimeoutError:
        if response is not None:
            response.close()
        problem = f"no answer in {limit_s:g} s" if engine.up else engine.problem
        if engine.up:
            engine.failed(problem, lately_heard_s=limit_s)
        raise EngineFailure(f"{engine.name}: {problem}", 504) from None
    except aiohttp.ClientConnectorError as error:
        if out_of_files(error):
            problem = "too many open files in the router (ulimit -n)"
            raise EngineFailure(problem, 503, reached=False) from None
        engine.refused(what(error))
        raise EngineFailure(f"{engine.name}: {what(error)}", reached=False) from None
    except (aiohttp.ClientError, OSError) as error:
        raise _breaks_off(engine, error) from None
    except BaseException:  # the client has left
        if response is not None:
            response.close()
        raise
    reply = Reply(engine, response, first, streams=streams)
    status, body = _error_in(first) if streams else (response.status, first)
    if status >= 500:
        reply.close()
        engine.failed(f"answers {status}")
        raise EngineFailure(f"{engine.name}: answers {status}", status, body=body)
    if streams:
        engine.heard()
        reply.broken = status != 200
    else:
        engine.served()
    return reply


class TooLong(Exception):
    """An answer beyond the limit."""


async def whole(
    response: Any, most_mib: float, hold: Callable[[int], None] = lambda _n: None
) -> bytes:
    """Return a body; raises TooLong beyond ``most_mib``."""
    content = response.content
    parts, total = [], 0
    while not content.at_eof():
        part = content.read_nowait() if content.is_eof() else await content.readany()
        total += len(part)
        if total > most_mib * (1 << 20):
            raise TooLong
        hold(len(part))
        parts.append(part)
    return b"".join(parts)


def _breaks_off(engine: Engine, error: Exception) -> EngineFailure:
    engine.failed(what(error))
    return EngineFailure(f"{engine.name}: breaks off: {what(error)}")


def _error_in(event: bytes) -> tuple[int, bytes]:
    """Return status and body of an error at the beginning of a stream; 200 where there is none."""
    text = event.lstrip()
    if not text.startswith(ERROR_EVENT):
        return 200, b""
    body = text.removeprefix(b"data: ").partition(b"\n")[0]
    try:
        status = json.loads(body)["error"]["code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 500, body
    return (status if type(status) is int and 400 <= status <= 599 else 500), body
