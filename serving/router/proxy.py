"""The HTTP server in front of real engines (URLs): OpenAI's completions, health and metrics.

``python -m eldr_sim.serving.router.proxy CONFIG.json`` is what ``validate vllm`` starts, ``eldr-sim
router`` the same with options (`ProxyConfig`). With prefill engines a request goes to one of them
first, with ``max_tokens`` 1 and ``kv_transfer_params`` of vLLM's ``NixlConnector``; what it says of
the KV cache goes on to a decode engine, which fetches it and answers."""

import asyncio
import gc
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.guard import Guard
from eldr_sim.policies.base import PolicyContext, RouterPolicy
from eldr_sim.policies.registry import prefill_policy
from eldr_sim.serving import http
from eldr_sim.serving.bodies import parse_body
from eldr_sim.serving.log import RequestLog
from eldr_sim.serving.router.config import ProxyConfig, read_config
from eldr_sim.serving.router.decisions import build_decode_policy
from eldr_sim.serving.router.fleet import Counters, Fleet
from eldr_sim.serving.router.request_handler import RequestHandler, Route, SignatureReader
from eldr_sim.serving.router.tasks import silent_if_broken
from eldr_sim.serving.router.upstream import TooLong, whole

#: Headers that engines get as clients send them, besides all that begin with ``x-``.
_PASSED_ON = ("authorization", "traceparent", "tracestate")
_LONGEST_NAME = 200


def make_app(
    config: ProxyConfig,
    policy: RouterPolicy | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> Any:
    """Return the router, an ``aiohttp.web.Application``; ``policy``: in place of ``config``'s;
    ``notify``: called with a line when an engine is ejected and returns. Raises InputError if
    aiohttp or prometheus-client is missing, or a policy cannot be used here."""
    return _Proxy(config, policy, notify).app()


def serve(config: ProxyConfig, *, announce: Callable[[str], None] = print) -> None:
    """Serve until told to stop. ``announce``: called with the URL, and when an engine is ejected or
    returns. Raises InputError: a policy of no use here, an address taken."""
    proxy = _Proxy(config, None, announce)
    http.allow_files()
    listener = http.listen(config.host, config.port)
    said = f"Routing at {http.url_of(listener)}"
    site = http.Site(proxy.app(), listener, proxy.intake, said)
    say, idle_s = silent_if_broken(announce), config.request_timeout_s
    gc.collect()
    gc.freeze()  # a full collection would look at all modules
    asyncio.run(http.serve_sites([site], say, grace_s=config.grace_period_s, idle_s=idle_s))


class _Proxy:
    """The requests that pass through."""

    def __init__(
        self, config: ProxyConfig, policy: RouterPolicy | None, notify: Callable[[str], None]
    ) -> None:
        http.import_aiohttp()
        self._config, self._notify = config, silent_if_broken(notify)
        self._guard = Guard(config.host, config.allowed_host)
        self.intake = http.Intake(
            http.Limits(
                config.max_concurrent_requests, config.max_body_mib, config.max_buffered_mib
            )
        )
        n_prefill, n_decode = len(config.prefill_urls), len(config.decode_urls)
        if policy is None:
            alone = not (n_prefill or config.prefilled)
            policy = build_decode_policy(
                config.policy, n_decode, seed=config.seed, computes_prompts=alone
            )
        first = None
        if n_prefill:
            context = PolicyContext(n_prefill, np.random.default_rng(config.seed))
            first = prefill_policy(config.prefill_policy, context)
        self._signatures = _signature_reader(config, policy)
        self.counters = Counters()
        self._ended = cache(self.counters.requests.labels)
        self._fleet = Fleet(config, policy, first, self.counters, notify)
        self._numbers, self._name = count(), uuid.uuid4().hex
        self._log: RequestLog | None = None

    def app(self) -> Any:
        """Return the ``aiohttp.web.Application``."""
        posts = dict.fromkeys(("/v1/completions", "/v1/chat/completions"), self.complete)
        gets = {"/v1/models": self.models, "/health": self.health}
        gets["/metrics"] = self.counters.answer
        return http.application(self.run, self.intake, self._guard, posts, gets)

    async def run(self, _app: Any) -> AsyncIterator[None]:
        """Hold the log and the connections open while the application runs."""
        with ExitStack() as stack:
            if self._config.log is not None:
                log = RequestLog(Path(self._config.log), self._notify)
                self._log = stack.enter_context(closing(log))
            connect_timeout_s = self._config.connect_timeout_s
            async with http.open_session(connect_timeout_s=connect_timeout_s) as session:
                async for _ in self._fleet.run(session):
                    yield

    async def health(self, _request: Any) -> Any:
        """Answer whether a request would be served: 200, or 503 also once the router is about to
        stop."""
        from aiohttp import web

        found = {
            pool.name: [{"url": e.url, "up": e.up, "problem": e.problem} for e in pool.engines]
            for pool in self._fleet.pools
        }
        good = self._fleet.serves and not self.intake.draining
        return web.json_response(found, status=200 if good else 503)

    async def models(self, request: Any) -> Any:
        """Answer with what an engine says that it serves."""
        aiohttp = http.import_aiohttp()
        from aiohttp import web

        limit = aiohttp.ClientTimeout(total=self._config.health_timeout_s)
        try:
            headers = _passed_on(request.headers, uuid.uuid4().hex)
        except ValueError as error:
            return http.error_answer(400, str(error))
        for index in self._fleet.decode.router.usable():
            address = self._fleet.decode.engines[index].url + "/v1/models"
            with suppress(TimeoutError, aiohttp.ClientError, OSError, TooLong):
                async with self._fleet.session.get(
                    address, headers=headers, timeout=limit, allow_redirects=False
                ) as response:
                    most_mib = self._config.max_answer_mib
                    body, kind = await whole(response, most_mib), response.content_type
                    if response.status < 500:
                        return web.Response(body=body, status=response.status, content_type=kind)
        return http.error_answer(503, "no decode engine is up", {"Retry-After": "1"})

    async def complete(self, request: Any) -> Any:
        """Serve one completion."""
        outcome = "failed"
        try:
            if self.intake.draining:
                outcome = "unavailable"
                raise http.Refused(503, "the router stops")
            answer, outcome = await self._complete(request)
        except http.Refused as refused:
            outcome = "unavailable" if refused.status == 503 else "refused"
            raise
        except asyncio.CancelledError:
            outcome = "client_left"
            raise
        finally:
            self._ended(request.path, outcome).inc()
        return answer

    async def _complete(self, request: Any) -> tuple[Any, str]:
        aiohttp = http.import_aiohttp()
        number, name = next(self._numbers), request.headers.get("X-Request-Id", "")
        if not (name.isascii() and name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
            name = f"{self._name}{number:x}"
        try:
            raw = await self.intake.body(request, self._config.request_timeout_s)
            body = parse_body(raw, handed_over=bool(self._config.prefill_urls))
            if self._config.prefilled and not body.body.get("kv_transfer_params"):
                raise ValueError("kv_transfer_params: missing")
            headers = _passed_on(request.headers, name)
        except TimeoutError:
            return await _hung_up(request), "client_left"
        except (ValueError, aiohttp.web.RequestPayloadError, aiohttp.ClientError) as error:
            return http.error_answer(400, str(error)), "refused"
        to = Route(request.path, headers, number, name)
        fleet, signatures = self._fleet, self._signatures
        write = self._log.write if self._log is not None else None
        handler = RequestHandler(fleet, signatures, write, body, to, self.intake)
        answer, outcome = await handler.run(request)
        if not answer.prepared:
            answer.headers["X-Request-Id"] = name
        return answer, outcome


def _signature_reader(config: ProxyConfig, policy: RouterPolicy) -> SignatureReader | None:
    """Return where signatures come from; None for a policy that reads none."""
    score = policy.needs.signature
    if score is None:
        return None
    if score != "count":
        problem = f"needs {score} scores; engines log counts"
        raise InputError("artifact", problem, "a count signature")
    problem = f"missing, policy {policy.name!r} reads expert signatures"
    if not (config.prefill_urls or config.prefilled):
        raise InputError("prefill", f"{problem} of computed prompts", "prefill engines")
    if not config.capture:
        allowed = "what ELDR_SIM_CAPTURE names in the prefill engines"
        raise InputError("capture", problem, allowed)
    return SignatureReader(config.capture)


def _passed_on(headers: Mapping[str, str], name: str) -> dict[str, str]:
    """Return what an engine gets of a client's headers; ValueError for what cannot be sent."""
    found = {}
    for key, value in headers.items():
        low = key.lower()
        if low[:2] != "x-" and low not in _PASSED_ON:
            continue
        if not value.isprintable():
            raise ValueError(f"header {key}: not printable")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"header {key}: no UTF-8") from None
        if low != "x-request-id":
            found[key] = value
    found["X-Request-Id"], found["Accept-Encoding"] = name, "identity"
    return found


async def _hung_up(request: Any) -> Any:
    """Answer a client that does not send its body, and close its connection at once."""
    answer = http.error_answer(408, "the body does not arrive")
    with suppress(ConnectionError):
        await answer.prepare(request)
        await answer.write_eof()
    if request.transport is not None:
        request.transport.close()
    return answer


def main() -> None:
    """Run the router; bad input is one line and exit code 2."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m eldr_sim.serving.router.proxy CONFIG.json")
    try:
        serve(read_config(sys.argv[1]))
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
