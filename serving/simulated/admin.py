"""Faults of simulated engines on demand, for tests of gateways: a separate application, which
listens on the loopback address only."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.guard import Guard
from eldr_sim.inputs import parse_json
from eldr_sim.serving import http
from eldr_sim.serving.simulated.server import Service

_MOST_BYTES = 4096


class Admin:
    """``GET /workers`` and ``POST /workers/N/ACTION`` for the workers of a fleet."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services
        self._speeds = [service.core.speed for service in services]
        self._actions: dict[str, tuple[Callable[..., None], str, float, float]] = {
            "slow": (self._slow, "factor", 1e-3, 1e6),
            "hang": (self._hang, "on", 0, 1),
            "kill": (self._kill, "on", 0, 1),
            "drain": (self._drain, "on", 0, 1),
            "drop_kv_events": (self._drop, "on", 0, 1),
            "delay_metrics": (self._delay, "seconds", 0, 3600),
        }

    def app(self) -> Any:
        """Return the ``aiohttp.web.Application``."""
        from aiohttp import web

        checked = web.middleware(partial(http.in_json, Guard(), http.Intake(http.Limits())))
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[checked])
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers/{number}/{action}", self._act)
        return app

    async def _list(self, _request: Any) -> Any:
        from aiohttp import web

        return web.json_response([self._state(number) for number in range(len(self._services))])

    async def _act(self, request: Any) -> Any:
        from aiohttp import web

        text, name = request.match_info["number"], request.match_info["action"]
        if not (text.isascii() and text.isdecimal() and int(text[:6]) < len(self._services)):
            last = len(self._services) - 1
            return http.error_answer(404, f"worker {text[:20]!r} (allowed: 0 to {last})")
        if name not in self._actions:
            return http.error_answer(404, f"{name[:40]!r} (allowed: {', '.join(self._actions)})")
        act, field, least, most = self._actions[name]
        try:
            body = parse_json(await request.read(), "body")
            value = body.get(field) if isinstance(body, dict) and set(body) == {field} else None
            good = isinstance(value, bool) if field == "on" else type(value) in (int, float)
            if not (good and value is not None and least <= value <= most):
                span = "true, false" if field == "on" else f"{least:g} to {most:g}"
                raise InputError(field, "missing, or out of range", f'{{"{field}": {span}}}')
            act(int(text), value)
        except InputError as error:
            return http.error_answer(400, str(error))
        return web.json_response(self._state(int(text)))

    def _state(self, number: int) -> dict[str, Any]:
        service = self._services[number]
        return {
            "worker": number,
            "slow": self._speeds[number] / service.core.speed,
            "hang": not service.thawed.is_set(),
            "kill": service.dead,
            "drain": service.draining,
            "drop_kv_events": any(publisher.dropping for publisher in service.publishers),
            "delay_metrics": service.metrics_delay_s,
            "requests": len(service.core.open),
        }

    def _slow(self, number: int, factor: float) -> None:
        self._services[number].core.set_speed(self._speeds[number] / factor)

    def _hang(self, number: int, on: bool) -> None:
        thawed = self._services[number].thawed
        thawed.clear() if on else thawed.set()

    def _kill(self, number: int, on: bool) -> None:
        self._services[number].die() if on else self._services[number].revive()

    def _drain(self, number: int, on: bool) -> None:
        self._services[number].draining = on

    def _drop(self, number: int, on: bool) -> None:
        for publisher in self._services[number].publishers:
            publisher.dropping = on

    def _delay(self, number: int, seconds: float) -> None:
        self._services[number].metrics_delay_s = float(seconds)


@asynccontextmanager
async def serving(admin: Admin, listener: Any) -> AsyncIterator[None]:
    """Serve while the block runs."""
    from aiohttp import web

    runner = web.AppRunner(admin.app(), access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()
