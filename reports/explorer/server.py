"""The explorer's page, and the stream of points that it asks for, line by line (JSON): the state's
point, its run's pictures, the curve over the rate, the plane of P and D, by warm processes. A page
that asks again closes its last stream; points that no stream waits for are dropped."""

import asyncio
import json
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib.resources import files
from typing import Any, get_args

from eldr_sim import __version__
from eldr_sim.errors import InputError, needed
from eldr_sim.guard import Guard, middleware, shown_url
from eldr_sim.kernel_profiles.gpus import list_gpus, load_gpu
from eldr_sim.kernel_profiles.models import list_models
from eldr_sim.policies.choice import BUILT_IN
from eldr_sim.reports.explorer.points import FIELDS, around, command_of, config_of, plane
from eldr_sim.reports.explorer.processes import PointLimits, PointLost, Processes
from eldr_sim.simulator.setup.config.pools import Engine
from eldr_sim.simulator.setup.config.run_config import WORKLOADS, RunConfig

_LOG = logging.getLogger(__name__)
#: Results that are kept.
_KEPT = 4096
_MAX_BODY = 64 << 10
#: Streams at a time, and how long a point that no stream waits for may go on, s: a slider that is
#: moved leaves points that take a fraction of a second, and ending a process costs more.
_STREAMS, _LEFT_S = 64, 2.0
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Explorer:
    """The page of one base configuration. ``base``: what states leave out; ``read_only``: whether
    it shows the base alone; ``jobs``: processes; ``limits``: of a point; ``guard``: which requests
    are accepted."""

    def __init__(
        self,
        base: RunConfig,
        *,
        read_only: bool = False,
        jobs: int = 2,
        limits: PointLimits | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._base, self._read_only, self._jobs = base, read_only, jobs
        self._limits, self._guard = limits or PointLimits(), guard or Guard()
        self._start = _state_of(base)
        self._first = self._config(self._start)  # what is wrong from the start is said there
        self._processes: Processes | None = None
        self._known: OrderedDict[tuple[str, bool], dict[str, Any]] = OrderedDict()
        self._running: dict[tuple[str, bool], _Point] = {}
        self._streams = 0
        #: Points that have been given to the processes.
        self.n_run = 0

    def _config(self, state: dict[str, str]) -> RunConfig:
        return config_of(state, self._base, self._limits.requests)

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

        def refuse(status: int, text: str) -> Any:
            return web.Response(status=status, text=text)

        checked = middleware(self._guard, refuse)
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[checked])
        for path in texts:
            app.router.add_get(path, text)
        app.router.add_post("/points", self._points)
        app.cleanup_ctx.append(self._run)
        return app

    async def _run(self, _app: Any) -> AsyncIterator[None]:
        self._processes = Processes(self._jobs, self._limits)
        first = self._first  # for all processes, so that they are warm
        tasks = [asyncio.ensure_future(self._result(first, pictures=p)) for p in (False, True)]
        yield
        for task in (*tasks, *(point.task for point in self._running.values())):
            task.cancel()
        self._processes.close()

    def _page(self) -> str:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        loader = PackageLoader("eldr_sim.reports")
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
        choices: dict[str, Iterable[str]] = {"model": list_models(), "gpu": list_gpus()}
        choices |= {"policy": BUILT_IN["decode"], "workload": WORKLOADS, "engine": get_args(Engine)}
        return environment.get_template("explore.html").render(
            version=__version__,
            start=self._start,
            rents=_rents(),
            read_only=self._read_only,
            choices={k: list(dict.fromkeys([*v, self._start[k]])) for k, v in choices.items()},
        )

    async def _points(self, request: Any) -> Any:
        from aiohttp import web

        if self._streams >= _STREAMS:
            return web.Response(status=503, text=f"{_STREAMS} pages are being computed")
        try:
            asked = json.loads(await request.read())
            if not isinstance(asked, dict):
                raise ValueError
            state = {str(key): str(value) for key, value in asked.items()}
        except (ValueError, RecursionError, web.RequestPayloadError):
            return web.Response(status=400, text="no JSON object")
        parts = state.pop("parts", "point pictures curve plane").split()
        if self._read_only and state != self._start:
            return web.Response(status=403, text="this page is read-only")
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        self._streams += 1
        try:
            await answer.prepare(request)
            await self._stream(answer, state, parts)
        except ConnectionError:  # the client has left
            request.transport.abort() if request.transport is not None else None
        finally:
            self._streams -= 1
        return answer

    async def _stream(self, answer: Any, state: dict[str, str], parts: list[str]) -> None:
        async def say(kind: str, **more: Any) -> None:
            await answer.write(json.dumps({"kind": kind} | more).encode() + b"\n")

        try:
            config = self._config(state)
            if "point" in parts:
                await say("command", command=command_of(config), cost=config.price_per_hour)
                found = await self._result(config, pictures=False)
                await say("point", **found)
                if "error" in found:
                    return
            many = [("pictures", config, True)] if "pictures" in parts else []
            for part, of in (("curve", around), ("plane", plane)):
                many += [(part, own, False) for own in of(config)] if part in parts else []
            await self._all(many, say)
            await say("end")
        except InputError as error:
            await say("error", error=str(error))
        except ConnectionError:
            raise
        except Exception as error:  # of any kind: the page goes on
            _LOG.exception("a state of the page: %r", state)
            await say("error", error=f"{type(error).__name__}: {' '.join(str(error).split())}")

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
        """Return a point's figures: known ones, or from the next process that is free. If this is
        cancelled, and no other stream waits for the point, it is dropped."""
        key = (config.model_dump_json(), pictures)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        point = self._running.get(key)
        if point is None:
            point = self._running[key] = _Point()
            point.task = asyncio.ensure_future(self._compute(key, point.begun))
            point.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        point.waiting += 1
        try:
            return await asyncio.shield(point.task)
        except PointLost as lost:
            return {"error": f"this point {lost}"}
        finally:
            point.waiting -= 1
            if not point.waiting and not point.task.done():
                wait_s = _LEFT_S if point.begun.is_set() else 0.0
                asyncio.get_running_loop().call_later(wait_s, self._drop, key, point)

    async def _compute(self, key: tuple[str, bool], begun: asyncio.Event) -> dict[str, Any]:
        assert self._processes is not None
        limited = key[0] != self._first.model_dump_json()  # compiling may take minutes
        try:
            found: dict[str, Any] = await self._processes.run(key, begun, limited=limited)
        finally:
            self._running.pop(key, None)
            self.n_run += begun.is_set()
        self._known[key] = found
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def _drop(self, key: tuple[str, bool], point: "_Point") -> None:
        if not point.waiting and not point.task.done():
            self._running.pop(key, None)
            point.task.cancel()


class _Point:
    """A point that is computed, or waits for a process. ``waiting``: streams that want it."""

    def __init__(self) -> None:
        self.begun, self.waiting = asyncio.Event(), 0
        self.task: asyncio.Future[dict[str, Any]]


def _state_of(base: RunConfig) -> dict[str, str]:
    """Return the state that gives the base."""
    level = base.output.goodput.model_dump(exclude_none=True) if base.output.goodput else {}
    values = {name: base.value(name) for name in FIELDS}
    if base.requests.request_rate is not None:
        values["request_rate"] = f"{base.requests.request_rate:g}"
    values["kv_tier"] = " ".join(base.kv.kv_tier)
    values["goodput"] = ",".join(f"{key}:{bound:g}" for key, bound in level.items())
    state = {name: "" if v is None else str(v) for name, v in values.items()} | {"more": ""}
    if not state["price_per_gpu_hour"]:
        state["price_per_gpu_hour"] = _rents().get(state["gpu"], "")
    return state


def _rents() -> dict[str, str]:
    """Return the middle of each GPU's published rents, $ a GPU-hour."""
    rents = {name: load_gpu(name).rent_usd for name in list_gpus()}
    return {name: f"{sum(rent) / 2:.3g}" for name, rent in rents.items() if rent is not None}


def explore(
    base: RunConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    read_only: bool = False,
    allowed_host: Sequence[str] = (),
    limits: PointLimits | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until told to stop; InputError without aiohttp, address or a right base."""
    web = needed("aiohttp.web", "explore")
    jobs = max(1, min(4, os.cpu_count() or 1))

    guard = Guard(host, allowed_host)

    async def run() -> Any:
        explorer = Explorer(base, read_only=read_only, jobs=jobs, limits=limits, guard=guard)
        app = explorer.app()
        app.on_startup.append(said)
        return app

    async def said(_app: Any) -> None:
        announce(f"Exploring at {shown_url(host, port)} (Ctrl-C ends it)")

    how = {"print": None, "access_log": None, "handler_cancellation": True}
    try:
        web.run_app(run(), host=host, port=port, shutdown_timeout=0.5, **how)
    except OSError as error:
        raise InputError("port", f"{host}:{port}: {error.strerror or error}") from None
