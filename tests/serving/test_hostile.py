"""No input from the network stops what serves the others, or fills a log."""

import asyncio
import json
import logging
import math
import os
import random
import signal
from contextlib import suppress

import aiohttp
import msgspec
import pytest
import zmq
from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

from eldr_sim.errors import InputError
from eldr_sim.guard import Guard
from eldr_sim.serving.http import Intake, Limits, Refused, Site, listen, serve_sites
from eldr_sim.serving.router import tasks as tasks_module
from eldr_sim.serving.router.config import make_config
from eldr_sim.serving.router.decisions import build_decode_policy
from eldr_sim.serving.router.kv_events import CachedPrefixes, EventWatch, MalformedEvent
from eldr_sim.serving.router.proxy import _Proxy, make_app
from eldr_sim.serving.router.signals import parse_metrics
from eldr_sim.serving.router.tasks import Supervisor
from eldr_sim.serving.simulated.server import Service
from eldr_sim.simulator.setup.config.run_config import RunConfig

from ..on_each import on_each
from ..waiting import until
from . import hostile
from .fake_engine import FakeEngine, hang
from .router_scene import running

GOOD = (
    "vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\n"
    "vllm:kv_cache_usage_perc 0.1\n"
    'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="16"}} 1\n'
)


# --- texts and messages ---


def test_any_metrics_text_is_signals_or_an_input_error(n_cases):
    rng, good, n = random.Random(1), 0, n_cases(2000)
    for _ in range(n):
        text = hostile.metrics_text(rng).decode("utf-8", errors="replace")
        with suppress(InputError):
            found = parse_metrics(text)
            assert all(type(n) is int and 0 <= n < 2**62 for n in (found[0], found[1], found[3]))
            assert math.isfinite(found.kv_usage)
            assert 0.0 <= found.kv_usage <= 1.0
            good += 1
    assert 0.01 * n < good < 0.99 * n  # both kinds are there


def test_any_message_of_events_is_applied_or_forgotten(n_cases):
    rng, n = random.Random(2), n_cases(3000)
    prefixes, problems = CachedPrefixes(2), []
    watch = EventWatch(prefixes, 0, "tcp://127.0.0.1:1", problems.append)
    prefixes.hear(1, [0.0, [{"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
                             "token_ids": [1, 2], "block_size": 2}]])  # fmt: skip
    malformed = 0
    for _ in range(n):
        try:
            watch._apply(hostile.kv_message(rng))
        except MalformedEvent:
            prefixes.cleared(0)
            malformed += 1
        assert 0 <= prefixes.blocks_of(0) <= 9 + 40
        assert prefixes.blocks_of(1) == 1
        assert prefixes.matched(prefixes.keys([1, 2, 3]), 3).shape == (2,)
    assert 0.1 * n < malformed < 0.97 * n
    assert len(problems) == n - malformed


# --- the watch of engines ---


class Odd(FakeEngine):
    """An engine with metrics of its own, changed by the test."""

    text: object = GOOD.format(waiting=0, running=0, blocks=100).encode()
    asked = 0

    @property
    def app(self):
        app = super().app
        app.router.add_get("/metrics", self.metrics)
        return app

    async def metrics(self, request):
        self.asked += 1
        if callable(self.text):
            return await self.text(request)
        return web.Response(body=self.text, headers={"Content-Type": "text/plain; charset=x"})


async def endless(request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"vllm:x 1\n" * 10_000)


@on_each(
    "odd",
    [
        b"vllm:num_requests_waiting {{{ oops\n",
        b"\xff\xfe\x00garbage{{{ nan\n",
        GOOD.format(waiting="NaN", running=0, blocks=1).encode(),
        GOOD.format(waiting="+Inf", running=0, blocks=1).encode(),
        GOOD.format(waiting=0, running=0, blocks="²").encode(),
        b"",
        hang,
        endless,
    ],
)
def test_odd_metrics_of_one_engine_do_not_stop_the_watch_of_another(odd):
    """The first engine says that it has 12 requests, after the second's metrics went wrong."""

    async def scene():
        engines = [Odd("loaded"), Odd("idle")]
        policy = build_decode_policy("vllm_dp", 2, computes_prompts=True)
        async with running(engines, policy=policy, signal_interval_ms=10.0) as at:
            engines[1].text = odd
            before = engines[1].asked
            await until(lambda: engines[1].asked > before + (odd not in (hang, endless)), True)
            engines[0].text = GOOD.format(waiting=4, running=12, blocks=100).encode()
            before = engines[0].asked
            await until(lambda: engines[0].asked > before + 2, True)
            for _ in range(10):
                assert (await at.ask(max_tokens=1))[0] == 200
            assert len(engines[0].seen) == 0
            assert await at.counted("task_failures") == 0
            if callable(odd) or "²".encode() not in odd:  # an odd block size is no block size
                wrong = {"source": "metrics", "engine": engines[1].url}
                await until(lambda: counts(at, wrong), True)

    asyncio.run(scene())


async def counts(at, labels):
    return await at.counted("watch_errors", **labels) > 0


def stored(number, tokens):
    return {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": None,
            "token_ids": tokens, "block_size": 2, "lora_id": None, "medium": "GPU"}  # fmt: skip


def test_malformed_events_do_not_stop_the_watch_of_any_engine(n_cases):
    rng, n_batches = random.Random(5), n_cases(500) // 20
    with zmq.Context() as context:
        sockets, ports = [context.socket(zmq.PUB) for _ in range(2)], []
        for one in sockets:
            ports.append(one.bind_to_random_port("tcp://127.0.0.1"))
        counts = [0, 0]

        def publish(engine, *events):
            batch = msgspec.msgpack.encode([0.0, list(events), None])
            sockets[engine].send_multipart([b"", counts[engine].to_bytes(8, "big"), batch])
            counts[engine] += 1

        async def hears(at, engine, number):
            """Publish until the router has one more block of an engine."""
            for _ in range(500):
                publish(engine, stored(number, [number, number]))
                await asyncio.sleep(0.02)
                if await at.counted("engine_cached_blocks", engine=at.engines[engine].url):
                    return
            raise AssertionError

        async def scene():
            policy = build_decode_policy("cache_aware", 2, computes_prompts=True)
            engines = [FakeEngine("a"), FakeEngine("b")]
            where = [f"tcp://127.0.0.1:{port}" for port in ports]
            async with running(engines, policy=policy, kv_events=where) as at:
                at.engines = engines
                await hears(at, 0, 1)
                await hears(at, 1, 1)
                for number in range(n_batches):
                    for _ in range(20):
                        sockets[0].send_multipart(hostile.kv_message(rng))
                    await asyncio.sleep(0.01)
                    publish(1, stored(100 + number, [number, number + 1]))
                sockets[0].send_multipart([b"x"])
                await hears(at, 0, 2)
                await until(
                    lambda: at.counted("engine_cached_blocks", engine=engines[1].url), n_batches + 1
                )
                assert await at.counted("watch_errors", source="kv_events") > 0
                assert await at.counted("task_failures") == 0
                assert (await at.ask())[0] == 200

        asyncio.run(scene())
        for one in sockets:
            one.close(0)


def test_a_task_that_ends_is_logged_counted_and_started_again():
    async def scene():
        ended, said, runs = [], [], []
        tasks = Supervisor(ended.append, said.append)

        async def fails():
            runs.append(len(runs))
            if len(runs) == 1:
                raise ValueError("odd")
            if len(runs) == 2:
                raise asyncio.CancelledError  # by a library
            if len(runs) == 3:
                return
            await asyncio.sleep(3600)

        tasks.keep("test", fails)
        await until(lambda: len(runs), 4)
        assert ended == ["test"] * 3
        assert "ValueError: odd" in said[0]
        await tasks.close()
        assert len(runs) == 4

    asyncio.run(scene())


@pytest.mark.parametrize("stable_s", [60.0, -1.0])
def test_a_task_that_fails_for_ever_is_tried_at_least_every_half_minute(monkeypatch, stable_s):
    """The waits double from 0.1 s up to 30 s; at 0.1 s a broken task would fill the log. After a
    task that has run for ``stable_s`` they begin anew."""
    monkeypatch.setattr(tasks_module, "_STABLE_S", stable_s)
    waits = []

    async def slept(seconds):
        waits.append(seconds)
        if len(waits) == 12:
            raise asyncio.CancelledError

    async def fails():
        raise ValueError("odd")

    async def scene():
        tasks = Supervisor(lambda _name: None, lambda _line: None)
        with pytest.raises(asyncio.CancelledError):
            await tasks._keep("test", fails)

    monkeypatch.setattr(tasks_module.asyncio, "sleep", slept)
    asyncio.run(scene())
    if stable_s < 0:
        assert waits == [0.1] * 12
        return
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert waits[-2:] == [30.0, 30.0]


class Unruly:
    """A policy of a user's, with a mistake."""

    def __new__(cls):
        policy = build_decode_policy("jsq", 1)
        policy.select = lambda request, workers: 1 // 0
        return policy


def test_a_policy_that_fails_costs_its_own_requests_alone():
    async def scene():
        async with running([FakeEngine("a")], policy=Unruly()) as at:
            status, body = await at.ask()
            assert status == 502
            assert b"ZeroDivisionError" in body
            assert await at.counted("task_failures") == 0

    asyncio.run(scene())


# --- limits ---


def test_limits_of_requests_and_bytes():
    async def scene():
        engine = FakeEngine("a")
        engine.trouble = lambda body: hang if body.get("wait") else None
        limits = {"max_concurrent_requests": 3, "max_body_mib": 0.5, "max_buffered_mib": 1.0}
        async with running([engine], **limits) as at:
            waits = [asyncio.ensure_future(at.ask(wait=True)) for _ in range(3)]
            await until(lambda: engine.in_flight, 3)
            assert (await at.ask())[0] == 429
            for wait in waits:
                wait.cancel()
            await until(lambda: engine.in_flight, 0)
            await until(lambda: ok(at), True)
            assert (await at.ask(x="a" * (1 << 19)))[0] == 413
            waits = [asyncio.ensure_future(at.ask(wait=True, x="a" * 400_000)) for _ in range(2)]
            await until(lambda: engine.in_flight, 2)
            assert (await at.ask(x="a" * 400_000))[0] == 503
            assert (await at.ask())[0] == 200
            for wait in waits:
                wait.cancel()

    async def ok(at):
        return (await at.ask())[0] == 200

    asyncio.run(scene())


def test_what_is_held_is_given_back():
    async def scene():
        intake, request = Intake(Limits(2, 1.0, 1.0)), object()
        for _ in range(10):
            intake.admit(request)
            intake.hold(request, 600_000)
            intake.release(request)
        intake.admit(request)
        intake.hold(request, 600_000)
        with pytest.raises(Refused):
            intake.hold(request, 600_000)
        intake.release(request)
        assert (intake.n_bytes, intake.n_requests, intake._held) == (0, 0, {})

    asyncio.run(scene())


async def body_flood(request):
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b"x" * 100_000)


def test_an_unstreamed_answer_without_end_is_bounded():
    async def scene():
        engine = FakeEngine("a")
        engine.trouble = lambda body: body_flood
        policy, engines = build_decode_policy("round_robin", 2), [engine, FakeEngine("b")]
        async with running(engines, policy=policy, max_answer_mib=2.0) as at:
            answers = [await at.ask() for _ in range(2)]
            assert sorted(status for status, _ in answers) == [200, 502]
            assert any(b"more than 2 MiB" in body for _, body in answers)
            await until(lambda: engine.in_flight, 0)

    asyncio.run(scene())


ODD_ANSWERS = (
    b"", b"{", b"[" * 50_000, b"[]", b"null", b"{}", b'{"tokens": 3}', b'{"tokens": [1e999]}',
    b'{"tokens": ["a"]}', b'{"tokens": [NaN]}', b'{"tokens": [' + b"9" * 5000 + b"]}", b"\xff\xfe",
    b'{"kv_transfer_params": {}, "usage": {"prompt_tokens": 1e999}}',
    b'{"kv_transfer_params": {}, "usage": {"prompt_tokens": -5}}',
    b'{"kv_transfer_params": {}, "usage": {"prompt_tokens": "3"}}',
    b'{"kv_transfer_params": [], "usage": {"prompt_tokens": 3}}', b'{"kv_transfer_params": {}}',
    b'data: {"error":' + b"[" * 50_000, b'data: {"error": {"code": "x"}}', b'data: {"error": NaN}',
)  # fmt: skip


class Tokenizing(FakeEngine):
    """An engine whose /tokenize answers what the test says."""

    asked = 0

    @property
    def app(self):
        app = super().app
        app.router.add_post("/tokenize", self.tokenize)
        return app

    async def tokenize(self, request):
        self.asked += 1
        return await self.answer(request)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "x", ""])
def test_odd_answers_of_engines(kind, tracebacks):
    """Whatever an engine answers, clients get an answer, and the router goes on."""

    async def scene():
        engine, prefill = Tokenizing("a"), FakeEngine("p")
        sent = [b""]

        async def odd(request):
            headers = {"Content-Type": kind} if kind else {}
            return web.Response(body=sent[0], headers=headers)

        with zmq.Context() as context, context.socket(zmq.PUB) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            policy = build_decode_policy("cache_aware", 1, computes_prompts=True)
            where = [f"tcp://127.0.0.1:{port}"]
            async with (
                running([engine], policy=policy, kv_events=where) as one,
                running([engine], prefill=[prefill]) as apart,
            ):
                for answer in ODD_ANSWERS:
                    sent[0] = answer
                    engine.trouble = lambda body: odd
                    engine.answer = odd
                    status, _ = await one.ask(prompt="text", stream=True)
                    assert status in (0, 200, 500, 502)
                    engine.trouble = lambda body: None
                    prefill.trouble = lambda body: odd
                    status, _ = await apart.ask()
                    assert status in (500, 502)
                    prefill.trouble = lambda body: None
                assert await one.counted("task_failures") == 0
                assert engine.asked >= len(ODD_ANSWERS)
                await until(lambda: ok(one), True)

    async def ok(at):
        return (await at.ask())[0] == 200

    asyncio.run(scene())
    assert not tracebacks


# --- the end ---


def test_streams_finish_after_sigterm_and_health_says_so_first():
    async def scene(grace_s, pace_s):
        engine = FakeEngine("a", pace_s=pace_s, first_s=0.01)
        server = TestServer(engine.app)
        await server.start_server()
        url = str(server.make_url("/")).rstrip("/")
        proxy = _Proxy(make_config(port=0, decode_urls=[url]), None, lambda line: None)
        listener, ready = listen("127.0.0.1", 0), asyncio.Event()
        site = Site(proxy.app(), listener, proxy.intake, "Routing")
        serving = asyncio.create_task(
            serve_sites([site], lambda line: ready.set(), grace_s=grace_s)
        )
        await ready.wait()
        own = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            asked = {"prompt": "a", "max_tokens": 30, "stream": True}
            answer = await session.post(own + "/v1/completions", json=asked)
            await answer.content.readany()
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: proxy.intake.draining, True)
            statuses = ()
            if grace_s > 1.0:  # it listens for so long
                health = await session.get(own + "/health")
                refused = await session.post(own + "/v1/completions", json=asked)
                statuses = health.status, refused.status
            with suppress(aiohttp.ClientError):
                rest = b""
                async for part in answer.content.iter_any():
                    rest += part
            await serving
        await server.close()
        return statuses, rest

    statuses, rest = asyncio.run(scene(30.0, 0.02))
    assert statuses == (503, 503)
    assert b"[DONE]" in rest
    _, rest = asyncio.run(scene(0.3, 30.0))
    assert b"[DONE]" not in rest
    assert b'"error"' in rest


# --- requests ---


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if record.exc_info:
            self.found.append(record)


@pytest.fixture
def tracebacks():
    handler = _Records()
    logging.getLogger("aiohttp").addHandler(handler)
    yield handler.found
    logging.getLogger("aiohttp").removeHandler(handler)


async def _send(port, data, leaves):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        if data in hostile.RAW:  # a server waits for the rest of a request
            writer.write_eof()
        if leaves:
            return b""
        async with asyncio.timeout(20):
            return await reader.read(1 << 16)
    except (ConnectionError, TimeoutError) as error:
        return b"" if isinstance(error, ConnectionError) else b"HTTP/1.1 599"
    finally:
        writer.close()


async def attacked(app, n, seed):
    """Send ``n`` requests, a fifth of which leave; return the statuses, and that of a good one."""
    rng = random.Random(seed)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    statuses = {}
    for _ in range(n // 20):
        batch = [(hostile.http_request(rng, port), rng.random() < 0.2) for _ in range(20)]
        sent = [data + b"\r\n\r\n" if leaves else data for data, leaves in batch]
        answers = await asyncio.gather(
            *(_send(port, data, leaves) for data, (_, leaves) in zip(sent, batch, strict=True))
        )
        for answer, (data, _) in zip(answers, batch, strict=True):
            status = int(answer[9:12] or 0)
            statuses.setdefault(status, data)
    good = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(good)}\r\n\r\n"
    answer = await _send(port, head.encode() + good, False)
    await runner.cleanup()
    return statuses, int(answer[9:12])


async def at_once(_request):
    return web.json_response({"choices": [{"text": "x"}]})


def test_hostile_requests_to_the_router(tracebacks, serve_app, n_cases):
    engine = FakeEngine("a")
    engine.trouble = lambda body: at_once
    url = serve_app(engine.app)

    async def scene():
        app = make_app(make_config(port=0, decode_urls=[url], request_timeout_s=1.0))
        return await attacked(app, n_cases(400), 1)

    statuses, good = asyncio.run(scene())
    assert good == 200
    assert not {500, 502, 599} & set(statuses), {s: statuses[s] for s in statuses if s >= 500}
    assert {200, 400, 403, 415} <= set(statuses)
    assert not tracebacks


def test_hostile_requests_to_the_simulated_server(tracebacks, n_cases):
    config = RunConfig(
        trace="reference-moe", topology="1C", policy="jsq", num_requests=64, warmup=0, output_len=4
    )
    service = Service(config, speed=50.0)
    statuses, good = asyncio.run(attacked(service.app(), n_cases(400), 2))
    assert good == 200
    assert not {500, 502, 599} & set(statuses), {s: statuses[s] for s in statuses if s >= 500}
    assert {200, 400, 403, 415} <= set(statuses)
    assert not tracebacks
    assert service.intake.n_requests == 0


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_headers_that_cannot_be_sent_on_are_refused(tracebacks, serve_app, path):
    url = serve_app(FakeEngine("a").app)

    async def scene():
        app = make_app(make_config(port=0, decode_urls=[url]))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        head = b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += b"Content-Length: 14\r\nAuthorization: Bearer \xff\r\n\r\n" + b'{"prompt":"a"}'
        method = b"GET " if path == "/v1/models" else b"POST "
        port = runner.addresses[0][1]
        answer = await _send(port, method + path.encode() + b" HTTP/1.1\r\n" + head, False)
        await runner.cleanup()
        return int(answer[9:12])

    assert asyncio.run(scene()) == 400
    assert not tracebacks


@on_each(
    "method, headers, status",
    [
        ("POST", {"Host": "evil.example"}, 403),
        ("POST", {"Host": "localhost.evil.example"}, 403),
        ("POST", {"Host": "gpu7:9000"}, None),
        ("POST", {"Host": "GPU7"}, None),
        ("POST", {"Host": "a.cluster.local:1"}, None),
        ("POST", {"Host": "cluster.local.evil"}, 403),
        ("POST", {"Host": "notcluster.local"}, 403),
        ("POST", {"Host": "user@localhost"}, 403),
        ("POST", {"Host": "localhost:x"}, 403),
        ("POST", {"Host": "127.0.0.1:9000"}, None),
        ("POST", {"Host": "192.0.2.7"}, None),
        ("POST", {"Host": "[::1]:8000"}, None),
        ("POST", {"Host": "0.0.0.0:8050"}, None),
        ("GET", {"Host": "evil.example"}, 403),
        ("POST", {"Host": "localhost:8", "Origin": "http://localhost:8"}, None),
        ("POST", {"Host": "127.0.0.1:8", "Origin": "http://localhost:8"}, None),
        ("POST", {"Host": "127.0.0.1:8", "Origin": "http://localhost:9"}, 403),
        ("POST", {"Host": "127.0.0.1:8", "Origin": "http://evil.example"}, 403),
        ("POST", {"Host": "127.0.0.1:8", "Origin": "null"}, 403),
        ("POST", {"Host": "127.0.0.1:8", "Origin": "https://gpu7"}, None),
        ("GET", {"Host": "127.0.0.1:8", "Origin": "http://evil.example"}, 403),
        ("POST", {"Content-Type": "text/plain"}, 415),
        ("POST", {"Content-Type": ""}, 415),
        ("POST", {"Content-Type": "text/plain; application/json"}, 415),
        ("POST", {"Content-Type": "Application/JSON; charset=utf-8"}, None),
    ],
)
def test_hosts_origins_and_types(method, headers, status):
    guard = Guard("0.0.0.0", ["gpu7", ".cluster.local"])
    sent = CIMultiDict({"Host": "localhost", "Content-Type": "application/json"} | headers)
    found = guard.problem(method, sent)
    assert (found and found[0]) == status


@pytest.mark.parametrize("name", ["http://gpu7", "gpu7:80", "a b", "", "a/b", "."])
def test_names_that_are_none(name):
    with pytest.raises(InputError, match="allowed_host"):
        Guard("127.0.0.1", [name])
