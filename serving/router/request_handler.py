"""One request's way through the router, from its body to the last token of its answer. Its expert
signature is read from the capture log as the engine writes it."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.kinds import AnyPath
from eldr_sim.policies.base import RequestInfo
from eldr_sim.serving.bodies import TOKENIZED, CompletionRequest, prefill_body
from eldr_sim.serving.http import Intake, error_answer, error_body, import_aiohttp
from eldr_sim.serving.router.decisions import NoEngine
from eldr_sim.serving.router.engine import Engine
from eldr_sim.serving.router.fleet import Fleet, Pool
from eldr_sim.serving.router.tasks import Patience
from eldr_sim.serving.router.upstream import ERROR_EVENT, EngineFailure, Post, Reply, ask, tokenized
from eldr_sim.traces.routing.capture.step_log import Gathered, LogReader, external_ids


class SignatureReader:
    """Reader of the prefill counts of requests that prefill engines have just computed, on disk
    before they answer (`capture.step_log`). ``folders``: ``ELDR_SIM_CAPTURE`` of the prefill
    engines, none of decode engines, which would keep their logs in memory."""

    def __init__(self, folders: Sequence[AnyPath]) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._workers: dict[Path, LogReader] = {}
        self._gathered = Gathered()

    def counts(self, request_id: str) -> NDArray[np.uint32]:
        """Return how often the tokens of a prompt chose each expert, and drop the prompt's rows.
        ``request_id``: the client's ``X-Request-Id``. Counts: uint32 ``[layers, experts]``, layers
        with a gate only. Raises InputError if the log lacks tokens of the prompt."""
        self._read_on()
        name = self._logged_name(request_id)
        logged = self._gathered.request(name)
        self._gathered.forget(name)
        header = self._gathered.header
        assert header is not None
        rows = logged.experts[: len(logged.prompt)]
        if logged.missing or not len(rows) or len(rows) < len(logged.prompt):
            problem = f"prompt tokens of {request_id} were never computed"
            allowed = "prefill engines started with --no-enable-prefix-caching"
            raise InputError("capture", problem, allowed)
        layers, experts = len(header.layers), header.n_experts
        cells = rows + np.arange(layers)[:, None] * experts
        counted = np.bincount(cells.ravel(), minlength=layers * experts)
        return counted.reshape(layers, experts).astype(np.uint32)

    def _read_on(self) -> None:
        for folder in self._folders:
            for file in folder.glob("steps-*.jsonl"):
                self._gathered.read(self._workers.setdefault(file, LogReader(file)))

    def _logged_name(self, request_id: str) -> str:
        for name in reversed(self._gathered.names):  # what has just been computed is last
            if request_id in external_ids(name):
                return name
        problem = f"request {request_id} is not in the log in {', '.join(map(str, self._folders))}"
        allowed = "the folder that ELDR_SIM_CAPTURE names in the prefill engines"
        raise InputError("capture", problem, allowed)


class Route(NamedTuple):
    """Where a request goes, and as what."""

    path: str
    headers: Mapping[str, str]  #: what engines are told besides its body
    number: int  #: in this router
    name: str  #: ``X-Request-Id``


class RequestHandler:
    """A request's way through the router.

    To a prefill engine, where there are any, and with its KV cache parameters to a decode engine;
    that answer is streamed on. An engine that fails before the first token is replaced,
    ``ProxyConfig.retries`` times. A cache that a decode engine may have fetched is not offered to
    the next, as its blocks may hold other tokens: the prompt is computed again, unless the client
    had that done itself. ``signatures``: None if the policy reads none; ``write``: a line of the
    log, None without one; ``intake``: counts the bytes that are held."""

    def __init__(
        self,
        fleet: Fleet,
        signatures: SignatureReader | None,
        write: Callable[[dict[str, Any]], None] | None,
        asked: CompletionRequest,
        route: Route,
        intake: Intake,
    ) -> None:
        self._intake = intake
        self._fleet, self._config, self._counters = fleet, fleet.config, fleet.counters
        self._signatures, self._write, self._asked = signatures, write, asked
        self._path, self._headers, number, self._name = route
        user, max_tokens = asked.body.get("user"), asked.max_tokens
        session = user if isinstance(user, str) else None
        self._info = RequestInfo(
            number, asked.prompt_len, -1, session=session, max_tokens=max_tokens
        )
        self._body = asked.body
        self._cached = False  # a prefill engine holds its KV cache, which nobody has fetched
        self._prefilled_s: float | None = None
        self._without: dict[str, set[int]] = {"prefill": set(), "decode": set()}
        self._begun_s = time.monotonic()
        self._elsewhere_s = 0.0  # with engines, or held
        self._answer: Any = None
        self._hold: Callable[[int], None]

    async def run(self, request: Any) -> tuple[Any, str]:
        """Serve the request; return the ``aiohttp.web`` response and its outcome, unless
        cancelled."""
        self._hold = partial(self._intake.hold, request)
        try:
            return await self._run(request)
        except asyncio.CancelledError:
            if self._intake.stopping and self._answer is not None:
                await self._break_off(request, "the router stops")
                return self._answer, "broken_off"
            raise
        finally:
            if self._cached:
                self._let_go()

    async def _run(self, request: Any) -> tuple[Any, str]:
        retries = self._config.retries
        while True:
            pool = self._fleet.decode
            try:
                if self._fleet.prefill and not pool.router.usable(self._without[pool.name]):
                    raise NoEngine  # before a prompt is computed in vain
                await self._know_prefix()
                if self._fleet.prefill is not None and not self._cached:
                    pool = self._fleet.prefill
                    refusal = await self._prefill(pool)
                    if refusal is not None:
                        return _whole(refusal), "refused"
                    pool = self._fleet.decode
                return await self._decode(request, pool)
            except NoEngine:
                message = f"no {pool.name} engine is up"
                return error_answer(503, message, {"Retry-After": "1"}), "unavailable"
            except RecursionError:
                return error_answer(400, "body: is nested too deeply"), "refused"
            except InputError as error:
                return error_answer(502, str(error)), "failed"
            except EngineFailure as failure:
                if self._answer is not None:
                    await self._break_off(request, str(failure))
                    return self._answer, "broken_off"
                spent = failure.reached and bool(self._asked.body.get("kv_transfer_params"))
                spent = spent or failure.final
                if retries == 0 or spent or not pool.router.usable(self._without[pool.name]):
                    timed_out = failure.status == 504 and failure.body is None
                    return _failure_answer(failure), "timed_out" if timed_out else "failed"
                retries -= 1
                self._counters.retries.labels(pool.name).inc()

    async def _know_prefix(self) -> None:
        """Note the prompt's blocks for a policy that reads caches, once. Of text an engine's
        ``/tokenize`` tells the tokens; where it does not, no prefix is known."""
        pool = self._fleet.prefill or self._fleet.decode
        prefixes, body = pool.router.prefixes, self._asked.body
        if prefixes is None or self._info.prefix_hash:
            return
        tokens = body.get("prompt") if self._asked.prompt_len else None
        engine = pool.least_loaded(())
        if tokens is None and engine is not None:
            asked = {key: body[key] for key in TOKENIZED if key in body}
            tokens = await tokenized(self._fleet.session, engine.url, self._headers, asked)
            self._info = self._info._replace(prompt_len=len(tokens))
        self._info = self._info._replace(prefix_hash=prefixes.keys(tokens or ()))

    async def _prefill(self, pool: Pool) -> Reply | None:
        """Let a prefill engine compute the prompt; return its answer if it refuses to."""
        data = _bytes(prefill_body(self._asked.body))
        limit_s = self._config.first_token_timeout_s
        index = await self._place(pool)
        try:
            reply = await self._ask(pool.engines[index], data, limit_s)
        except EngineFailure:
            self._without[pool.name].add(index)
            raise
        finally:
            pool.router.complete(self._info.request_id, index)
        if reply.status != 200:
            return reply
        self._prefilled_s = time.monotonic()
        try:
            answer = json.loads(reply.first)
            params = answer["kv_transfer_params"]
            prompt_len = answer["usage"]["prompt_tokens"]
        except RecursionError:
            raise _no_connector("its answer is nested too deeply") from None
        except (ValueError, KeyError, TypeError) as error:
            raise _no_connector(f"its answer lacks {error}") from None
        if not isinstance(params, dict):
            raise _no_connector("its answer has no kv_transfer_params")
        if type(prompt_len) is not int or not 0 <= prompt_len < 1 << 31:
            raise _no_connector("its answer has no number of prompt_tokens")
        self._body = self._asked.body | {"kv_transfer_params": params}
        self._cached = True
        self._info = self._info._replace(prompt_len=prompt_len)
        if self._signatures is not None:
            self._info = self._info._replace(signature=self._signatures.counts(self._name))
        return None

    async def _decode(self, request: Any, pool: Pool) -> tuple[Any, str]:
        """Let a decode engine answer, and pass that on as it comes."""
        if self._fleet.prefill is None:
            data = self._asked.raw
            if self._signatures is not None and self._info.signature is None:  # computed ahead
                counts = self._signatures.counts(self._name)
                self._info = self._info._replace(signature=counts)
        else:
            data = _bytes(self._body)
        index = await self._place(pool)
        try:
            if self._write is not None:
                moments = {"prefilled_s": self._prefilled_s, "routed_s": time.monotonic()}
                self._write({"request_id": self._name, **moments, "engine": index})
            cached, self._cached = self._cached, False  # the engine frees what it is told of
            try:
                streamed = self._asked.streamed
                reply = await self._ask(pool.engines[index], data, streamed=streamed)
            except EngineFailure as failure:
                # A decode engine that lives may suffer from a prefill engine that does not: it may
                # be asked again, if there is no other.
                if failure.body is None or not cached or pool.router.usable({index}):
                    self._without[pool.name].add(index)
                if cached and failure.reached:
                    self._let_go(index)
                self._cached = cached and not failure.reached
                raise
            try:
                return await self._pass_on(request, reply)
            finally:
                reply.close()
        finally:
            pool.router.complete(self._info.request_id, index)

    async def _pass_on(self, request: Any, reply: Reply) -> tuple[Any, str]:
        total_s = time.monotonic() - self._begun_s
        if reply.status == 200:
            self._counters.first_token_s(total_s)
            self._counters.added_s(max(0.0, total_s - self._elsewhere_s))
        if not reply.streams:
            return _whole(reply), "ok" if reply.status < 400 else "refused"
        reply.headers["X-Request-Id"] = self._name
        answer = import_aiohttp().web.StreamResponse(status=reply.status, headers=reply.headers)
        limit_s, part, at_engine = self._config.token_timeout_s, reply.first, False
        try:
            async with Patience(limit_s) as patience:
                await answer.prepare(request)
                self._answer = answer
                while part:
                    await answer.write(part)
                    patience.renew()
                    at_engine = True
                    part = await reply.more()
                    patience.renew()
                    at_engine = False
                await answer.write_eof()
        except (TimeoutError, ConnectionError) as error:
            if at_engine and isinstance(error, TimeoutError):
                raise reply.silent(limit_s) from None
            if request.transport is not None:  # the client does not take its answer, or has left
                request.transport.abort()
            return answer, "client_left"
        return answer, "broken_off" if reply.broken else "ok"

    async def _break_off(self, request: Any, problem: str) -> None:
        """Say in the stream what happened and close it without its end, lest it look whole."""
        event = ERROR_EVENT + b" " + _bytes(error_body(502, problem)["error"]) + b"}\n\n"
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(1.0):
                await self._answer.write(event)
        if request.transport is not None:
            request.transport.close()

    async def _place(self, pool: Pool) -> int:
        """Return the index of the engine; time that the policy holds the request is not ours."""
        begun_s = time.monotonic()
        index = await pool.place(self._info, self._without[pool.name])
        self._elsewhere_s += time.monotonic() - begun_s
        return index

    async def _ask(
        self, engine: Engine, data: bytes, limit_s: float | None = None, *, streamed: bool = False
    ) -> Reply:
        begun_s, post = time.monotonic(), Post(self._path, data, self._headers, streamed)
        try:
            session = self._fleet.session
            return await ask(session, engine, post, self._config, limit_s, self._hold)
        finally:
            self._elsewhere_s += time.monotonic() - begun_s

    def _let_go(self, failed: int | None = None) -> None:
        """Have the KV cache freed that nobody is going to fetch."""
        self._cached = False
        without = self._without["decode"] | ({failed} if failed is not None else set())
        self._fleet.release(self._path, self._body, self._headers, without)


def _failure_answer(failure: EngineFailure) -> Any:
    from aiohttp import web

    if not failure.body:
        return error_answer(failure.status, str(failure))
    return web.Response(body=failure.body, status=failure.status, content_type="application/json")


def _whole(reply: Reply) -> Any:
    response = import_aiohttp().web.Response
    return response(body=reply.first, status=reply.status, headers=reply.headers)


def _no_connector(problem: str) -> InputError:
    allowed = "an engine with a KV connector (--kv-transfer-config)"
    return InputError("prefill engine", problem, allowed)


def _bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
