"""A server whose latencies come from a simulated cluster: its answers, its log, its metrics."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from eldr_sim.errors import InputError
from eldr_sim.serving.router.config import make_config as make_router
from eldr_sim.serving.router.proxy import make_app
from eldr_sim.serving.simulated.core import Core, replay
from eldr_sim.serving.simulated.server import Service
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config
from eldr_sim.validation.live.engines.client import send_load
from eldr_sim.validation.live.engines.load import Load, LoadRequest

from ..on_each import on_each
from ..waiting import until

CONFIG = RunConfig(
    trace="reference-moe", topology="1P2D", policy="jsq", num_requests=64, warmup=0, output_len=40,
)  # fmt: skip
SPEED = 20.0
JSON = {"Content-Type": "application/json"}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@asynccontextmanager
async def served(app):
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def against(service, talk):
    """Return what ``talk(session, url)`` returns of a service that serves."""

    async def run():
        async with served(service.app()) as url, aiohttp.ClientSession(base_url=url) as session:
            return await talk(session, url)

    return asyncio.run(run())


@contextmanager
def in_background(*services):
    """Serve from a thread; yields the URLs."""
    urls, ready, stop = [], threading.Event(), None

    async def run():
        nonlocal stop
        stop = asyncio.Event()
        async with contextlib_stack(services) as found:
            urls.extend(found)
            ready.set()
            await stop.wait()

    @asynccontextmanager
    async def contextlib_stack(services):
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(served(s.app())) for s in services]

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    ready.wait(20)
    try:
        yield urls
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


async def events(response):
    """Return the events of a stream, the last one ``[DONE]``."""
    text = (await response.read()).decode()
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def test_answers_are_openai_s():
    async def talk(session, _url):
        whole = await (await session.post(TEXT, json={"prompt": "a" * 40, "max_tokens": 7})).json()
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        spoken = await (await session.post(CHAT, json=chat)).json()
        parts = [{"type": "text", "text": "12345678"}]
        listed = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        listed = await (await session.post(CHAT, json=listed)).json()
        more = {"stream": True, "stream_options": {"include_usage": True}}
        ids = {"prompt": [1] * 30, "max_tokens": 9, "ignore_eos": True}
        streamed = await events(await session.post(TEXT, json=ids | more))
        told = await events(await session.post(CHAT, json=chat | more))
        models = await (await session.get("/v1/models")).json()
        health = (await session.get("/health")).status
        return whole, spoken, listed, streamed, told, models, health

    whole, spoken, listed, streamed, told, models, health = against(
        Service(CONFIG, speed=SPEED), talk
    )
    assert whole["object"] == "text_completion"
    tokens = {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}
    assert whole["usage"] == tokens | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert whole["choices"][0]["text"].split() == ["tok"] * 7
    assert whole["choices"][0]["finish_reason"] == "length"
    assert spoken["choices"][0]["message"]["role"] == "assistant"
    assert spoken["usage"]["completion_tokens"] == 5
    assert listed["usage"]["prompt_tokens"] == 2
    *pieces, usage = streamed
    assert "".join(p["choices"][0]["text"] for p in pieces).split() == ["tok"] * 9
    assert [p["choices"][0]["finish_reason"] for p in pieces][-1] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 9)
    assert told[0]["choices"][0]["delta"]["role"] == "assistant"
    assert told[0]["object"] == "chat.completion.chunk"
    said = "".join(p["choices"][0]["delta"]["content"] for p in told[:-1])
    assert said.split() == ["tok"] * 5
    assert (models["data"][0]["id"], health) == ("Qwen3-30B-A3B", 200)


def test_prompts_that_begin_alike_are_found_in_the_prefix_cache():
    """Ids, texts and chats, by whole blocks of 16 tokens, 64 letters; a second engine has none."""
    prompts = {
        TEXT: [{"prompt": list(range(100))}, {"prompt": [*range(80), *range(500, 540)]},
               {"prompt": "once upon a time, " * 20},
               {"prompt": "once upon a time, " * 15 + "x" * 70}],
        CHAT: [{"messages": [{"role": "user", "content": "tell me " * n}]} for n in (40, 60)],
    }  # fmt: skip

    async def talk(session, _url):
        cached = []
        for path, bodies in prompts.items():
            for body in bodies:
                answer = await (await session.post(path, json=body | {"max_tokens": 2})).json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return cached, await (await session.get("/metrics")).text()

    config = CONFIG.replace(topology="1P1D")
    cached, metrics = against(Service(config, speed=SPEED), talk)
    assert cached == [0, 80, 0, 64, 0, 80]
    counts = {f.name: f.samples[0].value for f in text_string_to_metric_families(metrics)}
    assert counts["vllm:prefix_cache_hits"] == sum(cached)
    assert counts["vllm:prefix_cache_queries"] == counts["vllm:prompt_tokens"]
    off, _ = against(Service(config.replace(enable_prefix_caching=False), speed=SPEED), talk)
    assert off == [0] * 6


def test_a_turn_that_quotes_the_answer_finds_its_blocks():
    """100 letters and 40 tokens, of which the last one is never computed: 4 blocks of 16 tokens."""

    async def talk(session, _url):
        first = {"role": "user", "content": "x" * 100}
        body = {"messages": [first], "max_tokens": 40, "ignore_eos": True}
        said = (await (await session.post(CHAT, json=body)).json())["choices"][0]["message"]
        cached = []
        for quoted in (said, said | {"content": said["content"].replace("tok", "tic")}):
            body["messages"] = [first, quoted, {"role": "user", "content": "and then? " * 20}]
            usage = (await (await session.post(CHAT, json=body)).json())["usage"]
            assert usage["prompt_tokens"] == 115
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        return cached

    assert against(Service(CONFIG.replace(topology="1C"), speed=SPEED), talk) == [64, 16]


def test_without_ignore_eos_an_answer_may_stop_as_the_workload_s_do():
    async def talk(session, _url):
        body = {"prompt": [1] * 9}
        free = await (await session.post(TEXT, json=body)).json()
        bounded = await (await session.post(TEXT, json=body | {"max_tokens": 90})).json()
        full = body | {"max_tokens": 60, "ignore_eos": True}
        full = await (await session.post(TEXT, json=full)).json()
        least = body | {"min_tokens": 50, "max_tokens": 90}
        least = await (await session.post(TEXT, json=least)).json()
        return free, bounded, full, least

    answers = against(Service(CONFIG, speed=SPEED), talk)
    ends = [(a["usage"]["completion_tokens"], a["choices"][0]["finish_reason"]) for a in answers]
    assert ends == [(40, "stop"), (40, "stop"), (60, "length"), (50, "stop")]


@on_each(
    "path, body, status, said",
    [
        (TEXT, b"{", 400, "not valid JSON"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 10**7}, 400, "context length"),
        (TEXT, {"prompt": [1] * 10**6}, 400, "context length"),
        (TEXT, {"prompt": ""}, 400, "prompt: missing"),
        (TEXT, {"prompt": "x", "n": 0}, 400, "n: 0"),
        (TEXT, {"prompt": "x", "model": "gpt-4"}, 400, "model: 'gpt-4' is not served"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "role"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "not text"),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)
def test_bad_requests_are_answered(path, body, status, said):
    service = Service(CONFIG, speed=SPEED)

    async def talk(session, _url):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await session.post(path, data=data, headers=JSON)
        return answer.status, await answer.json()

    found, answer = against(service, talk)
    assert found == status
    assert said in answer["error"]["message"]
    assert not service.core.open


def test_the_log_replayed_gives_the_same_times(tmp_path):
    service = Service(CONFIG, speed=5.0, log=tmp_path / "log.jsonl")
    streams = []
    submit = service.core.submit
    service.core.submit = lambda *a: streams.append(submit(*a)) or streams[-1]

    async def talk(session, _url):
        async def one(n):
            await asyncio.sleep(0.01 * n)
            body = {"prompt": [1] * (50 + 20 * n), "max_tokens": 10 + n, "ignore_eos": True}
            if n % 6 == 5:  # gives up
                body["max_tokens"] = 5000
                timeout = aiohttp.ClientTimeout(total=0.1)
                with pytest.raises(asyncio.TimeoutError):
                    await session.post(TEXT, json=body, timeout=timeout)
            else:
                answer = await session.post(TEXT, json=body | {"stream": True})
                assert len(await events(answer)) > 0

        await asyncio.gather(*(one(n) for n in range(30)))
        await until(lambda: len(service.core.open), 0)  # who gives up leaves at a step's end

    against(service, talk)
    result = replay(tmp_path / "log.jsonl")
    again, was = result.record.requests, service.core.cluster.requests[: len(streams)]
    assert len(again) == len(streams) >= 25  # a client may give up before it is heard
    names = ("arrival_s", "prompt_len", "output_len", "cached_tokens", "first_token_s", "finish_s")
    assert was["cached_tokens"].max() > 100  # all prompts begin alike
    done = was["outcome"] == 1
    assert done.sum() >= 25  # one that gives up may be late on a busy machine
    for name in names:
        assert again[name][done].tolist() == was[name][done].tolist(), name
    assert again["outcome"].tolist() == was["outcome"].tolist()
    # What clients were given, and when, is what the replay says.
    for stream in streams:
        record = again[stream.number]
        if record["outcome"] == 1:
            assert sum(n for n, _ in stream.times_s) == record["output_len"]
            assert stream.times_s[-1][1] == record["finish_s"]
            if stream.times_s[0][0] == 1:
                assert stream.times_s[0][1] == record["first_token_s"]
    head, bad = (tmp_path / "log.jsonl").read_text().splitlines()[0], tmp_path / "bad.jsonl"
    for text, said in ((head + '\n{"cancel": 3}\n', "line 2: 't'"), ("{}\n", "is not a log")):
        bad.write_text(text)
        with pytest.raises(InputError, match=said):
            replay(bad)


@on_each("topology", ["2C", "2P1D"])
def test_hits_where_blocks_are_scarce_are_those_of_a_run(tmp_path, topology):
    rng, size = np.random.default_rng(71), 512
    arrivals = np.cumsum(rng.exponential(0.05, 80)).round(3)
    arrivals -= arrivals[0]  # a log begins at 0
    lines = []
    for at in arrivals.tolist():  # a group of prompts has blocks in common
        group, n = int(rng.integers(9)), int(rng.integers(1, 5))
        blocks = [100 * group + k for k in range(n)] + [10_000 + len(lines)]
        prompt = n * size + int(rng.integers(1, size))
        lines.append({
            "timestamp": round(1e3 * at), "input_length": prompt, "output_length": 30,
            "hash_ids": blocks,
        })  # fmt: skip
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    fields = {
        "model": "Llama-3.1-8B", "topology": topology, "policy": "round_robin", "warmup": 0,
        "prefill_policy": "round_robin", "block_size": size, "num_gpu_blocks_override": 16,
        "frontend": "none",
    }  # fmt: skip
    ran = simulate(make_config(fields | {"workload": str(log)})).requests
    head = make_config(fields | {"num_requests": 80}).model_dump(mode="json")
    asked = [
        {"t": line["timestamp"] / 1e3, "prompt_len": line["input_length"], "output_len": 30,
         "prefix": line["hash_ids"][: line["input_length"] // size]}
        for line in lines
    ]  # fmt: skip
    served = tmp_path / "served.jsonl"
    served.write_text("\n".join(map(json.dumps, [{"config": head, "speed": 1.0}, *asked])))
    found = replay(served).record.requests
    hits = ran["cached_tokens"].to_numpy()
    roomy = make_config(fields | {"workload": str(log), "num_gpu_blocks_override": 4000})
    assert 0 < hits.sum() < 0.9 * sum(simulate(roomy).requests["cached_tokens"].to_pylist())
    assert found["cached_tokens"].tolist() == hits.tolist()
    assert found["prefill_start_s"].tolist() == ran["prefill_start_s"].to_pylist()


def test_clients_that_leave_free_their_places():
    service = Service(CONFIG, speed=2.0)

    async def talk(session, _url):
        body = {"prompt": [1] * 400, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        answers = await asyncio.gather(*(session.post(TEXT, json=body) for _ in range(20)))
        for answer in answers:
            await answer.content.readline()
        running = sum(n for n, _, _ in service.core.cluster.engines())
        for answer in answers:
            answer.close()
        await until(lambda: len(service.core.open), 0)
        await until(lambda: any(n for n, _, _ in service.core.cluster.engines()), False)
        return running

    assert against(service, talk) == 20
    assert service.core.cluster.engines() == [(0, 0, 0.0)] * 3
    outcomes = service.core.cluster.requests["outcome"][:20]
    assert set(outcomes.tolist()) == {8}  # cancelled


def test_a_full_queue_is_429_and_a_cold_start_503():
    one = CONFIG.replace(topology="1C", max_num_seqs=1)
    service = Service(one, speed=1.0, max_queue=2)

    async def talk(session, _url):
        body = {"prompt": [1] * 100, "max_tokens": 5000, "ignore_eos": True}

        async def ask():
            async with session.post(TEXT, json=body) as answer:
                return answer.status, answer.headers.get("Retry-After")

        asked = []
        for places in ((1, 0), (1, 1), (1, 2)):  # running and waiting
            asked.append(asyncio.create_task(ask()))
            await until(lambda: service.core.cluster.engines()[0][:2], places)
        refused = [await ask() for _ in range(2)]
        for task in asked:
            task.cancel()
        return refused

    assert against(service, talk) == [(429, "1")] * 2
    cold = Service(CONFIG, speed=SPEED, ready_after_s=3600.0)

    async def wait(session, _url):
        before = (await session.get("/health")).status
        refused = (await session.post(TEXT, json={"prompt": "x"})).status
        cold._ready_after_s = 0.0
        return before, refused, (await session.get("/health")).status

    assert against(cold, wait) == (503, 503, 200)


def test_metrics_are_those_of_clients_and_quiet_at_the_end():
    service = Service(CONFIG, speed=SPEED)

    async def talk(session, _url):
        bodies = [{"prompt": [1] * n, "max_tokens": n, "ignore_eos": True} for n in range(5, 25)]
        answers = await asyncio.gather(*(session.post(TEXT, json=body) for body in bodies))
        usages = [(await answer.json())["usage"] for answer in answers]
        return usages, await (await session.get("/metrics")).text()

    usages, text = against(service, talk)
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for k, v in sorted(sample.labels.items()) if k in ("engine", "le")]
            samples[sample.name, *labels] = sample.value
    for name in ("prompt_tokens", "generation_tokens"):
        key = name.replace("generation", "completion")
        assert samples[f"vllm:{name}_total", "0"] == sum(usage[key] for usage in usages)
    assert samples["vllm:time_to_first_token_seconds_count", "0"] == 20
    assert samples["vllm:inter_token_latency_seconds_count", "0"] == sum(range(4, 24))
    assert samples["vllm:num_preemptions_total", "0"] == 0
    records = service.core.cluster.requests[:20]
    per_token = (records["finish_s"] - records["first_token_s"]) / (records["output_len"] - 1)
    name = "vllm:request_time_per_output_token_seconds_sum"
    assert samples[name, "0"] == pytest.approx(per_token.sum())
    ttft = (records["first_token_s"] - records["arrival_s"]).sum()
    assert samples["vllm:time_to_first_token_seconds_sum", "0"] == pytest.approx(ttft)
    queue, prefill, decode, inference = (
        samples[f"vllm:request_{part}_time_seconds_sum", "0"]
        for part in ("queue", "prefill", "decode", "inference")
    )
    assert min(queue, prefill, decode) >= 0.0
    assert queue + prefill == pytest.approx(ttft)
    assert prefill + decode == pytest.approx(inference)
    assert queue + inference == pytest.approx(samples["vllm:e2e_request_latency_seconds_sum", "0"])
    for engine in "012":
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert samples[f"vllm:{name}", engine] == 0
    assert samples[("eldr_sim_lag_seconds_count",)] > 0


def test_ends_are_counted_by_the_reason_that_clients_get():
    service = Service(CONFIG, speed=SPEED)

    async def talk(session, _url):
        bodies = [{"prompt": [1] * 9, "max_tokens": n} for n in (2, 3, 900)]
        answers = await asyncio.gather(*(session.post(TEXT, json=body) for body in bodies))
        reasons = [(await answer.json())["choices"][0]["finish_reason"] for answer in answers]
        return reasons, await (await session.get("/metrics")).text()

    reasons, text = against(service, talk)
    assert reasons == ["length", "length", "stop"]
    ends = {
        sample.labels["finished_reason"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }
    assert ends == {"length": 2, "stop": 1}


def test_our_client_gets_every_token_through_our_router_from_engine_ports():
    one = CONFIG.replace(topology="1C")
    services = [Service(one.replace(seed=n), speed=SPEED) for n in range(2)]
    with in_background(*services) as urls:
        router = make_router(decode_urls=urls, policy="round_robin", port=0)

        class Front:
            def app(self):
                return make_app(router)

        with in_background(Front()) as (front,):
            requests = [
                LoadRequest(f"r{n}", "all", [1] * 60, output_len=12, send_s=0.01 * n)
                for n in range(16)
            ]
            table = send_load(Load(None, tuple(requests)), front, model="Qwen3-30B-A3B")
    assert table.num_rows == 16
    arrived = [int((s.core.cluster.requests["outcome"] == 1).sum()) for s in services]
    assert arrived == [8, 8]


def test_what_cannot_serve_is_refused():
    with pytest.raises(InputError, match="topology: 2P generates nothing"):
        Core(CONFIG.replace(topology="2P", output_len=None))


@pytest.mark.long
def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    command = "serve --topology 1C --policy jsq --trace reference-moe --port 0 --speed 20"
    process = subprocess.Popen(
        [sys.executable, "-m", "eldr_sim.cli.main", *command.split(), "--log", tmp_path / "log"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    url = next(line for line in process.stderr if "http" in line).split(" at ")[1].strip()
    body = json.dumps({"prompt": "hello", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{url}{TEXT}", body, JSON)
    with urllib.request.urlopen(request, timeout=50) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(50) == 0
    assert replay(tmp_path / "log").summary["completed"] == 1


def test_time_goes_on_from_where_it_is_at_another_speed():
    service = Service(CONFIG, speed=SPEED)

    async def talk(_session, _url):
        core, loop = service.core, asyncio.get_running_loop()
        await asyncio.sleep(0.05)
        stands, loop.time = loop.time(), lambda: stands
        before = core.now_s
        core.set_speed(7 * SPEED)
        after = core.now_s
        del loop.time
        return before, after

    before, after = against(service, talk)
    assert after == pytest.approx(before, rel=1e-9)
    assert before > 0.0
