"""The router before engines that die, freeze, come back, and clients that leave."""

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies.base import RouterPolicy
from eldr_sim.serving.bodies import parse_body
from eldr_sim.serving.router.config import make_config
from eldr_sim.serving.router.engine import Engine
from eldr_sim.validation.live.engines.servers import free_port
from eldr_sim.validation.live.engines.setups import existing_setup, start_proxy

aiohttp = pytest.importorskip("aiohttp", reason="pip install 'eldr-sim[live]'")
pytest.importorskip("prometheus_client", reason="pip install 'eldr-sim[live]'")

from aiohttp.test_utils import TestServer  # noqa: E402

from ..on_each import on_each  # noqa: E402
from ..waiting import until  # noqa: E402
from .fake_engine import FakeEngine, fail, fail_in_stream, hang, refuse, reset  # noqa: E402
from .router_scene import Scene, process, running  # noqa: E402

NOWHERE = "http://127.0.0.1:1"
JSON = {"Content-Type": "application/json"}


# --- what passes through ---


def test_answers_pass_as_they_are(tmp_path):
    """Text and chat, streamed and not, models, and the API key, which is written nowhere."""

    log = tmp_path / "log.jsonl"

    async def scene():
        engine = FakeEngine("e")
        async with running([engine], log=str(log)) as at:
            key = {"Authorization": "Bearer sk-secret", "X-Request-Id": "mine", **JSON}
            for path, prompt in (
                ("/v1/completions", {"prompt": "text"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                body = {"max_tokens": 3, "n": 2, "unknown": {"to": "the router"}} | prompt
                for streamed in (False, True):
                    asked = json.dumps(body | {"stream": streamed}).encode() + b"  "
                    answers = []
                    for url in (engine.url, at.url):
                        async with at.session.post(url + path, data=asked, headers=key) as answer:
                            answers.append(
                                (answer.status, answer.content_type, await answer.read())
                            )
                    assert answers[0] == answers[1]
                    assert answer.headers["X-Request-Id"] == "mine"
                    assert engine.seen[-1] == engine.seen[-2]
                    assert engine.headers[-1]["Authorization"] == "Bearer sk-secret"
                    assert engine.headers[-1]["X-Request-Id"] == "mine"
            for value, status in (("Bearer sk-secret", 200), ("Bearer wrong", 401)):
                async with at.session.get(
                    at.url + "/v1/models", headers={"Authorization": value}
                ) as answer:
                    assert answer.status == status
            async with at.session.get(at.url + "/metrics") as answer:
                text = await answer.text()
            assert await at.outcomes() == {"ok": 4}
            assert "sk-secret" not in text + log.read_text() + "".join(at.said)
            assert log.read_text().count('"mine"') == 4

    asyncio.run(scene())


def test_tokens_pass_as_they_come():
    """The engine goes on only when the client has its last token."""

    async def scene():
        from aiohttp import web

        got = asyncio.Event()

        async def in_step(request):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for token in range(20):
                got.clear()
                await response.write(f"data: {token}\n\n".encode())
                await got.wait()
            return response

        engine = FakeEngine()
        engine.trouble = lambda body: in_step
        async with running([engine]) as at:
            body = {"prompt": "a", "stream": True}
            async with at.session.post(at.url + "/v1/completions", json=body) as answer:
                for token in range(20):
                    part = await asyncio.wait_for(answer.content.readany(), 50)
                    assert part == f"data: {token}\n\n".encode()
                    got.set()
                assert await answer.read() == b""
            await at.is_at_rest()

    asyncio.run(scene())


# --- engines that fail ---


@pytest.mark.parametrize("trouble", [fail, reset, fail_in_stream, None])
def test_a_dead_engine_costs_no_request(trouble):
    """With jsq it is the least loaded one. It does not answer, or fails all that it gets."""

    async def scene():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        bad.trouble = lambda body: trouble
        async with running([bad if trouble else NOWHERE, good]) as at:
            for _ in range(20):
                status, body = await at.ask(stream=True)
                assert status == 200
                assert body.endswith(b"data: [DONE]\n\n")
            assert await at.outcomes() == {"ok": 20}
            assert len(good.seen) == 20
            # It is ejected after three failures in a row, although it answers /health.
            assert len(bad.seen) == await at.counted("retries") == (3 if trouble else 0)
            assert await at.counted("engine_up") == 1
            await at.is_at_rest()

    asyncio.run(scene())


def test_an_engine_that_fails_in_the_middle_of_streams_is_ejected():
    """The error is in the middle: bytes before it, and an end as of other streams."""

    async def scene():
        bad, good = FakeEngine("bad"), FakeEngine("good")
        first = b'data: {"choices": [{"text": "x"}]}\n\n'
        bad.trouble = lambda body: partial(fail_in_stream, first=first)
        async with running([bad, good]) as at:
            for _ in range(6):
                status, body = await at.ask(stream=True)
                assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
            assert len(bad.seen) == 3
            assert await at.counted("engine_up") == 1

    asyncio.run(scene())


def test_health_is_that_of_the_engines():
    async def scene():
        engine, prefill = FakeEngine(), FakeEngine()
        async with running([engine, NOWHERE], [prefill]) as at:

            async def status(path="/health"):
                async with at.session.get(at.url + path) as answer:
                    return answer.status

            await until(status, 200)
            for one in (engine, prefill):
                one.healthy = False
                await until(status, 503)
                code, body = await at.ask()
                assert (code, json.loads(body)["error"]["code"]) == (503, 503)
                assert not prefill.seen  # no prompt is computed in vain
                one.healthy = True
                await until(status, 200)
            assert (await at.ask())[0] == 200
            assert await status("/nowhere") == 404
            assert await at.outcomes() == {"unavailable": 2, "ok": 1}
            told = [line for line in at.said if "/health answers 503" in line]
            assert len(told) == 2

    asyncio.run(scene())


def test_retries_are_bounded_and_go_elsewhere():
    async def scene():
        engines = [FakeEngine(str(i)) for i in range(4)]
        for engine in engines:
            engine.trouble = lambda body: fail
        async with running(engines, retries=2) as at:
            status, body = await at.ask()
            assert (status, json.loads(body)["error"]["message"]) == (500, "EngineCore")
            assert sorted(len(engine.seen) for engine in engines) == [0, 1, 1, 1]
            assert await at.outcomes() == {"failed": 1}
            for _ in range(20):  # a bad request must not take the last engine from all others
                assert (await at.ask())[0] == 500
            assert await at.counted("engine_up") == 1
        refusing = [FakeEngine(), FakeEngine()]
        for engine in refusing:
            engine.trouble = lambda body: refuse
        async with running(refusing) as at:  # what is wrong with a request is wrong everywhere
            assert (await at.ask())[0] == 400
            assert sum(len(engine.seen) for engine in refusing) == 1
            assert await at.outcomes() == {"refused": 1}

    asyncio.run(scene())


@pytest.mark.long
def test_an_engine_that_dies_mid_stream_and_comes_back():
    """Only the streams that it had begun end, and say so; all others are served."""

    async def scene():
        ports = free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        # The engine that dies ends nothing before: a second token takes it ten minutes.
        with process(ports[1], 0.02, 0.001), process(ports[0], 600, 0.001) as dying:
            async with running(urls) as at:
                streams, with_tokens = {"stream": True, "max_tokens": 100}, []
                begun = [
                    asyncio.create_task(at.ask(begun=with_tokens, **streams)) for _ in range(10)
                ]
                held = [asyncio.create_task(at.ask()) for _ in range(10)]
                await until(lambda: len(with_tokens), 10)
                dying.kill()
                later = [asyncio.create_task(at.ask(stream=True)) for _ in range(20)]
                ends = await asyncio.wait_for(asyncio.gather(*begun, *held, *later), 60)
                statuses = [status for status, _ in ends]
                assert sorted(statuses[:10]) == [0] * 5 + [200] * 5
                assert statuses[10:] == [200] * 30  # not streamed: no token was out
                assert await at.outcomes() == {"ok": 35, "broken_off": 5}
                await at.is_at_rest()
                with process(ports[0]):
                    await until(lambda: at.counted("engine_up"), 2)
                    assert [(await at.ask())[0] for _ in range(4)] == [200] * 4
                    async with at.session.get(urls[0] + "/state") as answer:
                        assert (await answer.json())["seen"] == 2

    asyncio.run(scene())


@pytest.mark.long
def test_a_frozen_engine_holds_nobody():
    """Who waits for a first token goes elsewhere when it is ejected; streams end in time."""

    async def scene():
        ports = free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        with process(ports[0], 0.2) as frozen, process(ports[1], 0.03):
            # Longer than one of these processes may stand still on a busy machine.
            async with running(urls, health_timeout_s=1.0, token_timeout_s=4.0) as at:
                streams, with_tokens = {"stream": True, "max_tokens": 60}, []
                begun = [
                    asyncio.create_task(at.ask(begun=with_tokens, **streams)) for _ in range(4)
                ]
                await until(lambda: len(with_tokens), 4)
                frozen.send_signal(signal.SIGSTOP)
                more = [
                    asyncio.create_task(at.ask(stream=streamed))
                    for streamed in (True, False)
                    for _ in range(4)
                ]
                ends = await asyncio.gather(*more)
                assert [status for status, _ in ends] == [200] * 8
                ends = await asyncio.gather(*begun)
                assert sorted(status for status, _ in ends) == [0, 0, 200, 200]
                assert await at.counted("engine_up") == 1
                assert any("no answer to /health in 1 s" in line for line in at.said)
                frozen.send_signal(signal.SIGCONT)
                await until(lambda: at.counted("engine_up"), 2)
                await at.is_at_rest()
                async with at.session.get(urls[0] + "/state") as answer:
                    assert (await answer.json())["in_flight"] == 0
                assert await at.outcomes() == {"ok": 10, "broken_off": 2}

    asyncio.run(scene())


def test_time_is_up():
    """Nothing comes though /health answers: 504, and the engine stays away, since it is silent."""

    async def scene():
        engine = FakeEngine()
        engine.trouble = lambda body: hang
        limits = {"first_token_timeout_s": 0.2, "answer_timeout_s": 0.3}
        for streamed in (True, False):
            async with running([engine], **limits) as at:
                status, _ = await at.ask(stream=streamed)
                assert status == 504
                assert await at.outcomes() == {"timed_out": 1}
                assert await at.counted("engine_up") == 0
                await until(lambda: engine.in_flight, 0)
                assert (await at.ask(stream=True))[0] == 503

    asyncio.run(scene())


@pytest.mark.long
def test_a_slow_engine_is_not_ejected():
    """One request waits too long while others get their tokens: a long queue, no dead engine."""

    async def scene():
        engine = FakeEngine(pace_s=0.02)
        engine.trouble = lambda body: hang if body["prompt"] == "late" else None
        async with running([engine], first_token_timeout_s=3.0) as at:
            quick = asyncio.create_task(at.ask(stream=True, max_tokens=200))
            assert (await at.ask(stream=True, prompt="late"))[0] == 504
            assert await at.counted("engine_up") == 1
            assert (await quick)[0] == 200

    asyncio.run(scene())


def test_an_ejected_engine_stays_away_longer_each_time(monkeypatch):
    """10, 20, 40 s and at most 300 s; a request that is served makes it 10 s again."""

    async def scene():
        now = [1000.0]
        monkeypatch.setattr("eldr_sim.serving.router.engine._now_s", lambda: now[0])
        fake = FakeEngine()
        server = TestServer(fake.app)
        await server.start_server()
        engine = Engine(str(server.make_url("/")).rstrip("/"), "e", lambda engine: None)
        async with aiohttp.ClientSession() as session:

            async def away_s():
                begun = now[0]
                while not engine.up:
                    now[0] += 1.0
                    await engine.probe(session, 1.0)
                return now[0] - begun

            await engine.probe(session, 1.0, first=True)
            for strike in range(3):
                assert engine.up, strike
                engine.failed("answers 500")
            times = [await away_s()]
            for _ in range(6):
                engine.failed("answers 500")  # once is enough now
                times.append(await away_s())
            assert times == [10, 20, 40, 80, 160, 300, 300]
            engine.served()
            for _ in range(3):
                engine.failed("answers 500")
            assert await away_s() == 10
        await server.close()

    asyncio.run(scene())


# --- prefill and decode ---


def test_hand_overs_that_fail():
    """A cache that may have been fetched is freed and computed again; another one is kept."""

    async def scene():
        caches = {}
        prefill = FakeEngine("p", caches=caches)
        bad, good = (FakeEngine(name, caches=caches) for name in ("bad", "good"))
        bad.trouble = lambda body: fail
        async with running([bad, good], [prefill]) as at:
            assert (await at.ask())[0] == 200
            assert len(prefill.seen) == 2
            await until(lambda: at.counted("kv_releases", outcome="freed"), 1)
            assert not caches
            assert [body["max_tokens"] for body in good.seen] in ([1, 4], [4, 1])
            assert all(not engine.stale for engine in (bad, good))
        port = free_port()
        prefill.seen.clear()
        with process(port) as dying:
            async with running(
                [f"http://127.0.0.1:{port}", good], [prefill], health_interval_s=30
            ) as at:
                dying.kill()
                dying.wait()
                assert (await at.ask())[0] == 200  # refused: the cache is as it was
                assert len(prefill.seen) == 1
                assert await at.counted("retries") == 1
                assert await at.counted("kv_releases") == 0
                assert not caches

    asyncio.run(scene())


def test_a_cache_that_no_engine_takes_is_left_to_its_lease():
    """The request for one token that would fetch it is refused."""

    async def scene():
        caches = {}
        prefill, bad = FakeEngine("p", caches=caches), FakeEngine("bad", caches=caches)
        good = FakeEngine("good", caches=caches)
        bad.trouble = lambda body: fail
        good.trouble = lambda body: refuse if body["max_tokens"] == 1 else None
        async with running([bad, good], [prefill]) as at:
            assert (await at.ask())[0] == 200
            await until(lambda: at.counted("kv_releases", outcome="left"), 1)
            assert await at.counted("kv_releases", outcome="freed") == 0
            assert len(caches) == 1

    asyncio.run(scene())


def test_a_client_that_leaves_frees_the_engines():
    """At every stage: prefill, hand-over, decode, streamed and not."""

    async def scene():
        caches = {}
        prefill, decode = FakeEngine("p", caches=caches), FakeEngine("d", caches=caches)
        held = []

        class Holding(RouterPolicy):
            name = "holding"

            def select(self, request, workers):
                return None if held else 0

        async with running([decode], [prefill], policy=Holding(None)) as at:
            stages = (
                ("prefill", (30, 0), True),
                ("held", (0, 0), True),
                ("decode", (0, 30), False),
                ("decode", (0, 0.03), True),
            )
            for left, (stage, pace_s, streamed) in enumerate(stages, 1):
                prefill.pace_s, decode.pace_s = pace_s
                held[:] = [True] if stage == "held" else []
                seen = len(decode.seen)
                task = asyncio.create_task(at.ask(stream=streamed, max_tokens=1000))
                if stage == "held":
                    await until(lambda: at.counted("held_requests"), 1)
                else:
                    engine = prefill if stage == "prefill" else decode
                    await until(lambda engine=engine: engine.in_flight, 1)
                    await asyncio.sleep(0.05)
                task.cancel()
                await until(lambda: prefill.in_flight + decode.in_flight, 0)
                await until(at.outcomes, {"client_left": left})
                await at.is_at_rest()
                if stage == "held":  # nobody will fetch its cache: it is freed
                    await until(lambda: at.counted("kv_releases", outcome="freed"), 1)
                    assert decode.seen[seen]["max_tokens"] == 1
                assert not caches

    asyncio.run(scene())


def test_what_a_decode_engine_would_refuse_is_refused_before_the_prefill():
    async def scene():
        prefill, decode = FakeEngine(), FakeEngine()
        async with running([decode], [prefill]) as at:
            for wrong in (
                {"max_tokens": 0},
                {"max_tokens": -1},
                {"max_tokens": "many"},
                {"max_tokens": True},
                {"max_tokens": 1.5},
                {"max_completion_tokens": 0},
                {"min_tokens": 9},
                {"n": 2},
                {"prompt": ["a", "b"]},
                {"prompt": []},
                {"messages": []},
                {"stream": "yes"},
                {"stream_options": {"include_usage": True}},
            ):
                status, body = await at.ask(**wrong)
                assert (status, list(wrong)) == (400, list(wrong))
                assert next(iter(wrong)) in json.loads(body)["error"]["message"]
            address = at.url + "/v1/completions"
            for raw in (
                b"", b"{", b"[]", b"\xff", b"[" * 10**5, b'{"a":' * 10**5, b'{"prompt": NaN}',
                b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
                b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
            ):  # fmt: skip
                async with at.session.post(address, data=raw, headers=JSON) as answer:
                    assert answer.status in (400, 200), raw[:20]
                    assert "Traceback" not in await answer.text()
            with suppress(aiohttp.ClientOSError):  # it may stop to listen before all is sent
                long = b" " * (65 << 20)
                async with at.session.post(address, data=long, headers=JSON) as answer:
                    assert answer.status == 413
            assert len(prefill.seen) <= 1
            outcomes = await at.outcomes()
            assert sum(outcomes.values()) == 13 + 9 + 1
            assert set(outcomes) <= {"refused", "ok"}
            packed = {"Content-Encoding": "gzip", **JSON}
            async with at.session.post(address, data=b"no gzip", headers=packed) as answer:
                assert answer.status == 400

    asyncio.run(scene())


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": ["a", "b"], "n": 2, "best_of": "many"}',
        '{"prompt": [[1, 2], [3]]}',
        '{"prompt": "a", "echo": true, "max_tokens": 0}',
        '{"prompt_embeds": "x", "max_tokens": null}',
        '{"messages": [], "max_completion_tokens": 3}',
    ],
)
def test_plain_engines_judge_what_policies_do_not_read(body):
    asked = parse_body(body.encode(), handed_over=False)
    assert (asked.prompt_len, asked.streamed) == (0, False)


@on_each("wrong", [
        '"max_tokens": "a"', '"max_tokens": NaN', '"max_tokens": -1', '"max_tokens": 1e400',
        '"max_tokens": 2.5', '"max_tokens": true', '"max_completion_tokens": []', '"prompt": {}',
        '"prompt": 7', '"prompt": ["a", 1]', '"prompt": [[1], "a"]', '"prompt": [1.5]',
        '"stream": "yes"', '"messages": {}',
    ])  # fmt: skip
def test_no_request_is_refused_before_plain_engines_too(wrong):
    with pytest.raises(ValueError, match=r"allowed: .*\)$") as caught:
        parse_body(b"{%s}" % wrong.encode(), handed_over=False)
    assert str(caught.value).startswith(wrong[1:].partition('"')[0])


# --- conservation ---


@pytest.mark.long
@pytest.mark.parametrize("disaggregated", [False, True])
def test_nothing_is_lost_in_chaos(disaggregated):
    """Engines fail at random and clients leave at random.

    Every request ends once, no load and no connection remains, every cache is fetched, freed or
    counted as left, and no answer comes from a cache that was fetched before.
    """

    async def scene(seed):
        rng, caches, n = random.Random(seed), {}, 120
        kinds = [fail, reset, fail_in_stream, refuse, None, None, None, None]
        decode = [FakeEngine(f"d{i}", caches=caches, pace_s=0.002) for i in range(3)]
        prefill = [FakeEngine(f"p{i}", caches=caches) for i in range(2)] if disaggregated else []
        for engine in (*decode, *prefill):
            engine.trouble = lambda body: rng.choice(kinds)
        prefill_kinds = [kind for kind in kinds if kind is not fail_in_stream]
        for engine in prefill:
            engine.trouble = lambda body: rng.choice(prefill_kinds)
        async with running(decode, prefill, retries=2) as at:

            async def client():
                await asyncio.sleep(rng.uniform(0, 0.5))
                asked = at.ask(stream=rng.random() < 0.5, max_tokens=rng.randint(2, 30))
                if rng.random() < 0.7:
                    return (await asked)[0]
                with suppress(TimeoutError):
                    await asyncio.wait_for(asked, rng.uniform(0.0, 0.05))
                return None

            ends = await asyncio.wait_for(asyncio.gather(*(client() for _ in range(n))), 50)
            await at.is_at_rest()
            engines = (*decode, *prefill)
            await until(lambda: sum(engine.in_flight for engine in engines), 0)
            outcomes = await at.outcomes()
            arrived = sum(outcomes.values())
            assert n - sum(end is None for end in ends) <= arrived <= n
            assert outcomes["ok"] >= sum(end == 200 for end in ends)
            assert ends.count(0) <= outcomes.get("broken_off", 0)
            sent = await at.counted("engine_requests")
            releases = await at.counted("kv_releases")
            # A client may leave before the engine sees its request.
            least = sent - ends.count(None)
            await until(lambda: sum(len(engine.seen) for engine in engines) >= least)
            assert sum(len(engine.seen) for engine in engines) <= sent + releases
            assert not any(engine.stale for engine in decode)
            if disaggregated:
                left = await at.counted("kv_releases", outcome="left")
                # A cache is lost where a decode engine or a prefill engine's answer is cut off.
                lost = outcomes.get("client_left", 0) + outcomes.get("refused", 0)
                assert len(caches) <= left + lost

    for seed in range(2):
        asyncio.run(scene(seed))


# --- configuration ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode_urls": []}, "decode_urls"),
        ({"decode_urls": ["ftp://a"]}, "not a base URL"),
        ({"decode_urls": ["http://user:secret@a"]}, "user or a password"),
        ({"decode_urls": ["http://a", "http://a/"]}, "named twice"),
        ({"decode_urls": ["http://a:99999"]}, "decode_urls.0"),
        ({"token_timeout_s": 0}, "token_timeout_s"),
        ({"first_token_timeout_s": float("nan")}, "first_token_timeout_s"),
    ],
)
def test_configurations_that_are_refused(fields, message):
    with pytest.raises(InputError, match=message) as caught:
        make_config(**({"port": 1, "decode_urls": ["http://a"]} | fields))
    assert "secret" not in str(caught.value)


def test_the_command():
    """It says where it listens, routes, and goes when it is told to."""
    port = free_port()
    command = [sys.executable, "-m", "eldr_sim.cli.main", "router"]
    with process(port):
        decode = ["--decode", f"http://127.0.0.1:{port}"]
        with subprocess.Popen(
            [*command, *decode, "--port", "0"], stderr=subprocess.PIPE, text=True
        ) as child:
            lines = [child.stderr.readline() for _ in range(2)]
            url = next(
                re.search(r"http://127\.0\.0\.1:\d+$", line)[0]
                for line in lines
                if "Routing" in line
            )

            async def scene():
                async with aiohttp.ClientSession() as session:
                    return await Scene(url, session, []).ask()

            assert asyncio.run(scene())[0] == 200
            child.send_signal(signal.SIGTERM)
            assert child.wait(50) == 0


@pytest.mark.long
def test_clients_that_do_not_send_and_that_send_no_http():
    """They are answered and let go within the time limit, and fill no log."""
    port = free_port()
    decode = ["--decode", f"http://127.0.0.1:{port}", "--port", "0", "--request-timeout", "1.5"]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n"
    head += b"Content-Type: application/json\r\n"
    waits = [b"", b"POST /v1/com", head, head + b"\r\n", head + b"\r\n{"]
    wrong = [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n", head + b"a\x00: b\r\n\r\n",
             head + b"Transfer-Encoding: chunked\r\n\r\n",
             head.replace(b"50", b"-5") + b"\r\n"]  # fmt: skip
    command = [sys.executable, "-m", "eldr_sim.cli.main", "router", *decode]
    with (
        process(port),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child,
        ExitStack() as stack,
    ):
        stack.callback(child.kill)
        address = ""
        while "Routing" not in address:
            address = child.stderr.readline()
        where = ("127.0.0.1", int(address.strip().rpartition(":")[2]))
        clients = []
        for sent in (text for text in (*waits, *wrong) for _ in range(20)):
            clients.append(socket.create_connection(where, 50))
            clients[-1].sendall(sent)  # at once: a connection without a request is let go, too
        answers = []
        for client in clients:
            with client, suppress(ConnectionResetError):
                answers.append(client.recv(12))
                while client.recv(4096):
                    pass
        assert answers[:60] == [b""] * 60  # no request was there to be answered
        assert [answer[-3:] for answer in answers[60:]] == [b"408"] * 40 + [b"400"] * 100
        child.send_signal(signal.SIGTERM)
        assert "Traceback" not in child.stderr.read()


def test_validate_runs_the_same_router(serve_app, tmp_path):
    urls = [(serve_app(FakeEngine(str(i)).app), tmp_path) for i in range(3)]
    log = tmp_path / "proxy.jsonl"
    with start_proxy(existing_setup(tmp_path, urls[:1], urls[1:]), "jsq", log) as url:

        async def scene():
            async with aiohttp.ClientSession() as session:
                return await Scene(url, session, []).ask(headers={"X-Request-Id": "one"})

        assert asyncio.run(scene())[0] == 200
    entry = json.loads(log.read_text())
    assert entry["request_id"] == "one"
    assert entry["prefilled_s"] <= entry["routed_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "nonsense"], "unknown policy"),
        (["--policy", "eldr:artifact=none.npz"], "none.npz"),
        (["--decode", "http://a:b@c"], "user or a password"),
        (["--host", "300.1.1.1"], "300.1.1.1:8080"),
        (["--log", "/nowhere/log"], "/nowhere/log"),
    ],
)
def test_bad_options_are_one_line(run_cli, options, message):
    code, _, error = run_cli("router", "--decode", NOWHERE, "--health-timeout", "0.1", *options)
    assert code == 2
    assert message in error
    assert error.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in error
