"""The explorer's page, and the stream of points that it asks for, line by line (JSON): the state's
point, its run's pictures, the curve over the rate, the plane of P and D, by two warm processes.
Asked anew, a page closes its last stream; what that has not begun is dropped."""

import asyncio
import json
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from typing import Any, get_args

from eldr_sim import __version__
from eldr_sim.errors import InputError, needed
from eldr_sim.kernel_profiles.gpus import list_gpus
from eldr_sim.kernel_profiles.models import list_models
from eldr_sim.policies.choice import BUILT_IN
from eldr_sim.reports.explorer.points import FIELDS, around, command_of, config_of, plane, run_point
from eldr_sim.simulator.setup.config.pools import Engine
from eldr_sim.simulator.setup.config.run_config import WORKLOADS, RunConfig

#: Results that are kept.
_KEPT = 4096
_MAX_BODY = 64 << 10
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Explorer:
    """The page of one base configuration. ``base``: what states leave out; ``read_only``: whether
    it shows the base alone; ``jobs``: processes."""

    def __init__(self, base: RunConfig, *, read_only: bool = False, jobs: int = 2) -> None:
        self._base, self._read_only = base, read_only
        self._start = _state_of(base)
        config_of(self._start, base)  # what is wrong from the start is said there
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, spawn, initializer=_quiet)
        self._free = asyncio.Semaphore(jobs)
        self._known: OrderedDict[tuple[str, bool], dict[str, Any]] = OrderedDict()
        self._running: dict[tuple[str, bool], asyncio.Future[dict[str, Any]]] = {}
        #: Points that have been given to the processes.
        self.n_run = 0

    def app(self) -> Any:
        """Return the ``aiohttp.web.Application``; its runner needs ``handler_cancellation``."""
        from aiohttp import web

        get_plotlyjs = needed("plotly.offline", "explore").get_plotlyjs
        assets = files("eldr_sim.reports") / "assets"
        styles = [(assets / f"{name}.css").read_text() for name in ("report", "explore")]
        texts = {
            "/": ("text/html", self._page()),
            "/explore.css": ("text/css", "\n".join(styles)),
            "/explore.js": ("text/javascript", (assets / "explore.js").read_text(encoding="utf-8")),
            "/plotly.js": ("text/javascript", get_plotlyjs()),
        }

        async def text(request: Any) -> Any:
            kind, body = texts[request.path]
            headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
            return web.Response(text=body, content_type=kind, charset="utf-8", headers=headers)

        app = web.Application(client_max_size=_MAX_BODY, middlewares=[web.middleware(_own_host)])
        for path in texts:
            app.router.add_get(path, text)
        app.router.add_post("/points", self._points)
        app.cleanup_ctx.append(self._run)
        return app

    async def _run(self, _app: Any) -> AsyncIterator[None]:
        first = config_of(self._start, self._base)  # for both processes, so that they are warm
        tasks = [asyncio.ensure_future(self._result(first, pictures=p)) for p in (False, True)]
        yield
        for task in tasks:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _page(self) -> str:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        loader = PackageLoader("eldr_sim.reports")
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
        known: dict[str, Iterable[str]] = {"model": list_models(), "gpu": list_gpus()}
        known |= {"policy": BUILT_IN["decode"], "workload": WORKLOADS, "engine": get_args(Engine)}
        return environment.get_template("explore.html").render(
            version=__version__,
            start=self._start,
            read_only=self._read_only,
            choices={k: list(dict.fromkeys([*v, self._start[k]])) for k, v in known.items()},
        )

    async def _points(self, request: Any) -> Any:
        from aiohttp import web

        try:
            asked = await request.json()
            if request.content_type != "application/json" or not isinstance(asked, dict):
                raise ValueError
            state = {str(key): str(value) for key, value in asked.items()}
        except ValueError:
            return web.Response(status=400, text="no JSON object of type application/json")
        parts = state.pop("parts", "point pictures curve plane").split()
        if self._read_only and state != self._start:
            return web.Response(status=403, text="this page is read-only")
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)

        async def say(kind: str, **more: Any) -> None:
            await answer.write(json.dumps({"kind": kind} | more).encode() + b"\n")

        try:
            config = config_of(state, self._base)
            if "point" in parts:
                await say("command", command=command_of(config), cost=config.price_per_hour)
                found = await self._result(config, pictures=False)
                await say("point", **found)
                if "error" in found:
                    return answer
            many = [("pictures", config, True)] if "pictures" in parts else []
            for part, of in (("curve", around), ("plane", plane)):
                many += [(part, own, False) for own in of(config)] if part in parts else []
            await self._all(many, say)
            await say("end")
        except InputError as error:
            await say("error", error=str(error))
        return answer

    async def _all(self, many: list[tuple[str, RunConfig, bool]], say: Callable[..., Any]) -> None:
        """Say the results of several points in the order in which they come."""

        async def one(kind: str, config: RunConfig, pictures: bool) -> tuple[str, Any]:
            where = {"p": config.cluster.n_prefill, "d": config.cluster.n_decode}
            return kind, where | await self._result(config, pictures=pictures)

        tasks = [asyncio.ensure_future(one(*each)) for each in many]
        try:
            for done in asyncio.as_completed(tasks):
                kind, found = await done
                await say(kind, **found)
        finally:
            for task in tasks:
                task.cancel()

    async def _result(self, config: RunConfig, *, pictures: bool) -> dict[str, Any]:
        """Return a point's figures: known ones, or from the next process that is free. Who is
        cancelled while it waits leaves its place; what runs goes on, and is kept."""
        key = (config.model_dump_json(), pictures)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if key not in self._running:
            await self._free.acquire()
            if key in self._known or key in self._running:  # while it waited
                self._free.release()
                return await self._result(config, pictures=pictures)
            self.n_run += 1
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._pool, run_point, *key)
            self._running[key] = future
            future.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(self._running[key])

    def _keep(self, key: tuple[str, bool], done: asyncio.Future[dict[str, Any]]) -> None:
        self._free.release()
        self._running.pop(key, None)
        if not done.cancelled() and done.exception() is None:
            self._known[key] = done.result()
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)


def _state_of(base: RunConfig) -> dict[str, str]:
    """Return the state that gives the base."""
    level = base.output.goodput.model_dump(exclude_none=True) if base.output.goodput else {}
    values = {name: base.value(name) for name in FIELDS}
    if base.requests.request_rate is not None:
        values["request_rate"] = f"{base.requests.request_rate:g}"
    values["kv_tier"] = " ".join(base.kv.kv_tier)
    values["goodput"] = ",".join(f"{key}:{bound:g}" for key, bound in level.items())
    return {name: "" if v is None else str(v) for name, v in values.items()} | {"more": ""}


def _quiet() -> None:
    """Let a process of the pool end with the explorer and not by Ctrl-C."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def _own_host(request: Any, handler: Any) -> Any:
    """Refuse what another site's page may send: its name is not that of this server."""
    from aiohttp import web

    address, port = request.transport.get_extra_info("sockname")[:2]
    names = {"localhost", f"[{address}]" if ":" in address else address}
    own = {f"{name}:{port}" for name in names} | (names if port == 80 else set())
    origin = request.headers.get("Origin")
    if request.host not in own or (origin and origin.partition("//")[2] not in own):
        return web.Response(status=403, text=f"host {request.host!r} is not {sorted(own)[0]}")
    return await handler(request)


def explore(
    base: RunConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    read_only: bool = False,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until told to stop; InputError without aiohttp, address or a right base."""
    web = needed("aiohttp.web", "explore")
    jobs = max(1, min(4, os.cpu_count() or 1))

    async def run() -> Any:
        app = Explorer(base, read_only=read_only, jobs=jobs).app()
        app.on_startup.append(said)
        return app

    async def said(_app: Any) -> None:
        announce(f"Exploring at http://{host}:{port} (Ctrl-C ends it)")

    how = {"print": None, "access_log": None, "handler_cancellation": True}
    try:
        web.run_app(run(), host=host, port=port, shutdown_timeout=0.5, **how)
    except OSError as error:
        raise InputError("port", f"{host}:{port}: {error.strerror or error}") from None
