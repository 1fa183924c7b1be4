"""The simulated server: paths of OpenAI's API, and of vLLM's and SGLang's servers, of tokens that a
simulated cluster generates."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

from eldr_sim import __version__
from eldr_sim.guard import Guard
from eldr_sim.serving import http
from eldr_sim.serving.log import RequestLog
from eldr_sim.serving.simulated.answers import Answer
from eldr_sim.serving.simulated.asked import Parser, Prompt, blocks_of, stopped
from eldr_sim.serving.simulated.core import Core, Stream
from eldr_sim.serving.simulated.handover import Role
from eldr_sim.serving.simulated.kv_events import KVEventsConfig, Publisher
from eldr_sim.serving.simulated.metrics import Metrics
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.tokenizer import open_tokenizer

_KINDS = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "response",
}


class Service:
    """A cluster behind OpenAI's paths. ``speed``: simulated seconds a second; ``max_queue``: beyond
    this many waiting requests the answer is 429; ``ready_after_s``: not healthy for this long;
    ``tokenizer``: a ``tokenizer.json``, else four characters per token; ``log``: see
    `core.replay`; ``adapters``: names of LoRA adapters; ``kv_events``: what its engines publish,
    the first of them as ``rank``; ``role``: of the one worker of a 1P1D cluster that it stands for,
    see `handover`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        speed: float = 1.0,
        max_queue: int | None = None,
        ready_after_s: float = 0.0,
        tokenizer: Path | None = None,
        log: Path | None = None,
        adapters: Sequence[str] = (),
        kv_events: KVEventsConfig | None = None,
        rank: int = 0,
        role: Role | None = None,
        limits: http.Limits | None = None,
        intake: http.Intake | None = None,
        guard: Guard | None = None,
    ) -> None:
        http.import_aiohttp()
        self._guard = guard or Guard()
        self.intake = intake or http.Intake(limits or http.Limits())
        self.model, self._adapters = str(config.engine.model), adapters
        self.metrics = Metrics(self.model, config.engine.engine, adapters)
        self._files = ExitStack()
        file = None
        if log is not None:
            file = self._files.enter_context(
                closing(RequestLog(log, logging.getLogger(__name__).error))
            )
        self.publishers: list[Publisher] = []
        hear = self._tell if kv_events is not None else None
        self.role, self._rank = role, rank
        self.core = Core(
            config, speed=speed, log=file, lag=self.metrics.lag, on_blocks=hear, role=role
        )
        self.metrics.watch(self.core)
        if kv_events is not None:
            size = self.core.config.engine.block_size
            for worker in range(len(self.core.numbers)):
                publisher = Publisher(kv_events, rank + worker, size)
                self.publishers.append(publisher)
                self._files.callback(publisher.close)
        self._max_queue, self._ready_after_s = max_queue, ready_after_s
        known = None if tokenizer is None else open_tokenizer(tokenizer, "tokenizer")
        self._tokenizer = known
        longest = self.core.simulation.max_model_len
        self._parser = Parser(self.model, adapters, known, longest, role)
        self._begun = math.inf
        #: Set unless the server is to hang.
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.dead = False  #: whether every connection is broken off
        self.draining = False  #: whether new requests are refused; those in progress go on
        self._transports: set[Any] = set()
        self.metrics_delay_s = 0.0

    def routes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the handlers of POST and GET requests by path."""
        posts: dict[str, Any] = dict.fromkeys(_KINDS, self._complete)
        posts |= {"/tokenize": self._tokenize, "/detokenize": self._detokenize}
        gets = {
            "/v1/models": self._models, "/health": self._health, "/ping": self._health,
            "/health_generate": self._health, "/metrics": self._metrics, "/load": self._load,
            "/version": self._version, "/get_model_info": self._model_info,
            "/model_info": self._model_info, "/get_server_info": self._server_info,
            "/server_info": self._server_info, "/get_load": self._loads,
        }  # fmt: skip
        return tuple({path: partial(self._alive, handler) for path, handler in some.items()}
                     for some in (posts, gets))  # type: ignore[return-value] # fmt: skip

    def app(self) -> Any:
        """Return the ``aiohttp.web.Application``; its runner needs ``handler_cancellation``."""
        return http.application(self.run, self.intake, self._guard, *self.routes())

    async def run(self, _app: Any) -> AsyncIterator[None]:
        """Let time pass while the application runs."""
        self._begun = time.monotonic()
        self.core.start()
        loop = asyncio.get_running_loop()
        files = [p.replay_file for p in self.publishers if p.replay_file is not None]
        for file in files:
            loop.add_reader(file, self._answer_replays)
        with self._files:
            yield
            for file in files:
                loop.remove_reader(file)

    @property
    def healthy(self) -> bool:
        """Whether it has started up and is not told to stop."""
        told = self.draining or self.intake.draining
        return not told and time.monotonic() >= self._begun + self._ready_after_s

    async def _alive(self, handler: Any, request: Any) -> Any:
        """Answer unless the server is to hang or to look dead."""
        await self.thawed.wait()
        if self.dead:
            from aiohttp import web

            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)
        self._transports.add(request.transport)
        try:
            return await handler(request)
        finally:
            self._transports.discard(request.transport)

    def die(self) -> None:
        """Break off every connection, those to come too, as a process that is killed; what the
        caches hold is lost."""
        self.dead = True
        for transport in self._transports:
            if transport is not None:
                transport.abort()
        for stream in list(self.core.open.values()):
            self.core.cancel(stream)

    def revive(self) -> None:
        """Serve again, with empty caches, after the time that starting up takes."""
        if self.dead:
            self.core.forget()
            for publisher in self.publishers:
                publisher.clear()
            self.dead, self._begun = False, time.monotonic()

    async def _health(self, _request: Any) -> Any:
        from aiohttp import web

        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, request: Any) -> Any:
        if self.metrics_delay_s:
            await asyncio.sleep(self.metrics_delay_s)
        return await self.metrics.answer(request)

    async def _models(self, _request: Any) -> Any:
        from aiohttp import web

        about = {"object": "model", "created": int(time.time()), "owned_by": "eldr-sim"}
        longest = self.core.simulation.max_model_len
        models = [{"id": self.model, "root": self.model, "parent": None} | about]
        models[0]["max_model_len"] = longest
        models += [{"id": name, "root": name, "parent": self.model} | about
                   for name in self._adapters]  # fmt: skip
        return web.json_response({"object": "list", "data": models})

    async def _version(self, _request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"version": __version__, "server": "eldr-sim serve"})

    async def _load(self, _request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"server_load": len(self.core.open)})

    async def _loads(self, _request: Any) -> Any:
        """Answer with the load of each engine, as SGLang."""
        from aiohttp import web

        size, blocks = self.core.config.engine.block_size, self.core.kv_blocks()
        return web.json_response([
            {
                "dp_rank": rank, "num_reqs": running + waiting, "num_waiting_reqs": waiting,
                "num_tokens": round(usage * n) * size,
            }
            for rank, ((running, waiting, usage), n) in enumerate(
                zip(self.core.engines(), blocks, strict=True)
            )
        ])  # fmt: skip

    async def _model_info(self, _request: Any) -> Any:
        from aiohttp import web

        about = {"model_path": self.model, "tokenizer_path": self.model, "is_generation": True}
        return web.json_response(about)

    async def _server_info(self, _request: Any) -> Any:
        from aiohttp import web

        about = {"model_path": self.model, "served_model_name": self.model, "dp_size": 1}
        about["version"] = __version__
        about["max_total_num_tokens"] = (
            sum(self.core.kv_blocks()) * self.core.config.engine.block_size
        )
        return web.json_response(about)

    async def _tokenize(self, request: Any) -> Any:
        from aiohttp import web

        try:
            tokens = self._parser.tokenize(await self.intake.body(request))
        except (ValueError, web.RequestPayloadError) as error:
            return http.error_answer(400, str(error))
        found = {"count": len(tokens), "max_model_len": self._parser.longest, "tokens": tokens}
        return web.json_response(found | {"token_strs": None})

    async def _detokenize(self, request: Any) -> Any:
        from aiohttp import web

        from eldr_sim.inputs import parse_json

        try:
            body = parse_json(await self.intake.body(request), "body")
            tokens = body.get("tokens") if isinstance(body, dict) else None
            if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
                raise ValueError("tokens: no list of token ids")
            if self._tokenizer is None:
                raise ValueError("tokens: there is no tokenizer (--tokenizer FILE)")
            text = self._tokenizer.decode(tokens)
        except (ValueError, OverflowError, web.RequestPayloadError) as error:
            return http.error_answer(400, str(error))
        return web.json_response({"prompt": text})

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        if not self.healthy:
            return http.error_answer(503, "starts up or stops", {"Retry-After": "1"})
        kind = _KINDS[request.path]
        try:
            asked = self._parser.read(await self.intake.body(request), kind)
            if kind == "response" and asked.n > 1:
                raise ValueError("n: a response has one answer")
        except (ValueError, web.RequestPayloadError) as error:
            return http.error_answer(400, str(error))
        if self._max_queue is not None and self.core.waiting >= self._max_queue:
            return http.error_answer(
                429, f"{self.core.waiting} requests wait", {"Retry-After": "1"}
            )
        streams: list[Stream] = []
        try:
            for prompt in asked.prompts:
                for _ in range(asked.n):
                    streams.append(self._submit(asked, prompt))
            model, cached = asked.adapter or self.model, self.core.cached_tokens
            answer = Answer(kind, model, asked, streams, cached, self.thawed)
            if self.role == "prefill":
                size = self.core.config.engine.block_size
                answer.hand_over(self._rank, size)
            return await (answer.stream(request) if asked.streamed else answer.whole())
        finally:
            for stream in streams:
                self.core.cancel(stream)

    def _submit(self, asked: Any, prompt: Prompt) -> Stream:
        """Let a request arrive, and let publishers know what its blocks hold."""
        tokens: list[int] = []

        def prefix(output_len: int) -> list[bytes]:
            salt = asked.body.get("cache_salt"), asked.adapter
            size = self.core.config.engine.block_size
            names, ids = blocks_of(prompt, output_len, size, salt if any(salt) else None)
            tokens.extend(ids)
            return names

        most = self._parser.most_of(asked, prompt)
        cut = partial(stopped, stops=asked.stops)
        stream = self.core.submit(len(prompt.ids), asked.least, most, prefix, cut)
        stream.adapter = asked.adapter
        for publisher in self.publishers:
            publisher.learn(stream.blocks, tokens, asked.adapter)
        return stream

    def _tell(self, worker: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        own = worker - self.core.numbers[0]
        if 0 <= own < len(self.publishers):
            self.publishers[own].tell(stored, removed)

    def _answer_replays(self) -> None:
        for publisher in self.publishers:
            publisher.answer_replays()


def by_header(services: Sequence[Service], name: str, guard: Guard) -> Any:
    """Return one application for a fleet; its workers share an `http.Intake`: a header, such as
    ``X-Worker: 3``, names the worker of each request."""
    routes = [service.routes() for service in services]

    async def run(app: Any) -> AsyncIterator[None]:
        async with _all_of(services, app):
            yield

    def handler(method: int, path: str) -> Any:
        async def handle(request: Any) -> Any:
            text = request.headers.get(name, "")
            if not (text.isascii() and text.isdecimal() and int(text[:6]) < len(services)):
                problem = f"header {name}: {text[:40]!r} (allowed: 0 to {len(services) - 1})"
                return http.error_answer(400, problem)
            return await routes[int(text)][method][path](request)

        return handle

    posts, gets = ({path: handler(m, path) for path in routes[0][m]} for m in (0, 1))
    return http.application(run, services[0].intake, guard, posts, gets)


@asynccontextmanager
async def _all_of(services: Sequence[Service], app: Any) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for service in services:
            await stack.enter_async_context(asynccontextmanager(service.run)(app))
        yield


def serve(
    services: Sequence[Service],
    host: str,
    ports: Sequence[int],
    announce: Callable[[str], None],
    grace_s: float = 180.0,
    *,
    header: str | None = None,
    guard: Guard | None = None,
    beside: Callable[[], Any] | None = None,
) -> None:
    """Serve until told to stop, requests in flight or not; InputError if an address is taken.
    ``ports``: one of each service, or one of all where a ``header`` names the service; ``guard``:
    of that one; ``beside``: an async context that is open meanwhile."""
    http.allow_files()
    sockets = [http.listen(host, port) for port in ports]
    apps = [service.app() for service in services]
    if header is not None:
        apps = [by_header(services, header, guard or Guard())]
    asyncio.run(_serve(services, apps, sockets, announce, grace_s, beside))


async def _serve(
    services: Sequence[Service],
    apps: Sequence[Any],
    sockets: Sequence[Any],
    announce: Callable[[str], None],
    grace_s: float,
    beside: Callable[[], Any] | None,
) -> None:
    sites, loop = [], asyncio.get_running_loop()
    for app, service, listener in zip(apps, services, sockets, strict=False):
        cluster = service.core.config.cluster.topology
        if service.role is not None:
            cluster = f"a {service.role} worker"
        if len(apps) < len(services):
            cluster = f"{len(services)} workers"
        said = f"Serving {service.model}, {cluster}, at {http.url_of(listener)}"
        sites.append(http.Site(app, listener, service.intake, said))
    for service in services:
        service.core.failure = loop.create_future()
    failures = [service.core.failure for service in services if service.core.failure is not None]
    async with AsyncExitStack() as stack:
        if beside is not None:
            await stack.enter_async_context(beside())
        await http.serve_sites(sites, announce, grace_s=grace_s, failures=failures)
