"""Gateways that others have built beside ours: the tables of ``README.md``.

``python -m tests.serving.gateway_tables rules|faults [GATEWAY ...]``. ``sglang-router`` and
``vllm-router`` are found on the path, ``DYNAMO_PYTHON`` is the Python of ``ai-dynamo``. *rules*:
the same load through a gateway in front of four simulated engines and through our rule of the same
name in ``run``. *faults*: one script of faults, by the admin port, under the same load, with checks
of ``/health`` each second wherever that is an option.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np

from eldr_sim import RunConfig
from eldr_sim.simulator.run import simulate
from eldr_sim.validation.live.engines.servers import free_port

from .test_live_gateways import (
    GATEWAYS,
    MODEL,
    OUTPUT_LEN,
    N,
    dynamo_commands,
    dynamo_environment,
    four_letters,
    prompts,
    workload,
)

#: Gateway, its rule, and ours.
RULES = [("vllm", "round_robin", "round_robin"), ("vllm", "power_of_two", "p2c"),
         ("vllm", "cache_aware", "cache_aware"), ("sglang", "round_robin", "round_robin"),
         ("sglang", "power_of_two", "p2c"), ("sglang", "cache_aware", "cache_aware"),
         ("ours", "round_robin", "round_robin"), ("ours", "jsq", "jsq"),
         ("ours", "p2c", "p2c"), ("dynamo", "round-robin", "round_robin"),
         ("dynamo", "kv", "dynamo_kv")]  # fmt: skip
OURS = [f"{Path(sys.executable).with_name('eldr-sim')}"]
#: Seconds at which a fault begins and ends; the worker; what it does and what ends it.
FAULTS = [
    ("slow, 8 times", 4, 12, 1, "slow", {"factor": 8}, {"factor": 1}),
    ("hang", 18, 26, 2, "hang", {"on": True}, {"on": False}),
    ("kill", 34, 42, 3, "kill", {"on": True}, {"on": False}),
    ("drain", 48, 54, 0, "drain", {"on": True}, {"on": False}),
    ("no KV events", 58, 62, 1, "drop_kv_events", {"on": True}, {"on": False}),
    ("/metrics 5 s late", 62, 67, 1, "delay_metrics", {"seconds": 5}, {"seconds": 0}),
]
END_S, RATE, LATE_S, GIVE_UP_S = 72.0, 8.0, 1.0, 10.0
#: Output tokens under faults, and how long such a stream lasts, s: some three are in flight in each
#: engine.
STREAM_LEN, STREAM_S = 200, 2.0


def gateway_command(name, policy, port, metrics, urls):
    """Return the command of a gateway before engines."""
    if name == "ours":
        decode = [word for url in urls for word in ("--decode", url)]
        return [*OURS, "router", *decode, "--policy", policy, "--port", f"{port}"]
    found = [*GATEWAYS[name], "--policy", policy, "--host", "127.0.0.1", "--port", f"{port}"]
    found += ["--prometheus-port", f"{metrics}", "--health-check-interval-secs", "1"]
    found += ["--health-check-timeout-secs", "3", "--health-failure-threshold", "2"]
    return [*found, "--worker-urls", *urls]


@contextmanager
def fleet(name, policy):
    """Run engines and a gateway; yield its URL, that of its metrics, the engines' and the admin's.

    Engines listen at consecutive ports.
    """
    first, admin, port, metrics = random.randrange(20000, 30000, 16), *(free_port() for _ in "123")
    serve = ["serve", "--model", MODEL, "--topology", f"{N}C", "--engine-ports", f"{first}"]
    urls = [f"http://127.0.0.1:{first + k}" for k in range(N)]
    commands = [[*OURS, *serve, "--admin-port", f"{admin}"]]
    at = [port, port if name == "ours" else metrics, admin]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if name == "dynamo":
            python = os.environ["DYNAMO_PYTHON"]
            commands += dynamo_commands(python, policy, port, urls, folder)
        else:
            commands += [gateway_command(name, policy, port, metrics, urls)]
        for command in commands:
            env = os.environ | dynamo_environment(folder)
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
            stack.callback(child.wait)
            stack.callback(child.kill)
            if command is commands[0]:
                asyncio.run(is_up(urls[-1] + "/health"))
        path, text = ("/v1/models", MODEL) if name == "dynamo" else ("/health", "")
        asyncio.run(is_up(f"http://127.0.0.1:{port}{path}", text))
        time.sleep(2.0)  # it looks at its engines first
        yield *(f"http://127.0.0.1:{number}" for number in at), urls


async def is_up(url, text=""):
    """Wait until a server answers 200 with a text."""
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            try:
                async with session.get(url) as answer:
                    if answer.status == 200 and text in await answer.text():
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(url)


async def ask(session, url, text, at_s, begun_s, output_len):
    """Send a streamed request at a moment; return when it was sent, what came of it and its TTFT.

    What came of it is ``ok``, a status, ``broken`` or ``no token``.
    """
    await asyncio.sleep(max(0.0, begun_s + at_s - time.monotonic()))
    body = {"model": MODEL, "prompt": text, "max_tokens": output_len, "ignore_eos": True}
    sent_s, first_s = time.monotonic(), None
    try:
        async with asyncio.timeout(GIVE_UP_S):
            async with session.post(
                url + "/v1/completions", json=body | {"stream": True}
            ) as answer:
                if answer.status != 200:
                    return at_s, f"{answer.status}", None
                whole = b""
                async for part in answer.content.iter_any():
                    first_s, whole = first_s or time.monotonic(), whole + part
        came = "ok" if b"[DONE]" in whole else "broken"
    except aiohttp.ClientError:
        came = "broken"
    except TimeoutError:
        came = "no token"
    return at_s, came, None if first_s is None else first_s - sent_s


async def counts(urls):
    """Return the requests, prompt tokens queried and found, and sums of TTFT of each engine."""
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total",
             "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count")  # fmt: skip
    found = []
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            found.append([
                sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))
                for name in names
            ])  # fmt: skip
    return found


async def loaded(url, texts, moments, script=(), output_len=OUTPUT_LEN):
    """Send requests through a gateway, and run coroutine functions at their moments."""
    begun_s = time.monotonic()

    async def act(at_s, work):
        await asyncio.sleep(begun_s + at_s - time.monotonic())
        await work()

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = [asyncio.create_task(act(*step)) for step in script]
        asked = (ask(session, url, *each, begun_s, output_len)
                 for each in zip(texts, moments, strict=True))  # fmt: skip
        answers = await asyncio.gather(*asked)
        await asyncio.gather(*tasks)
    return answers


def rules():
    """Print the table of rules."""
    print("| gateway | its rule; ours | hits, % | most of an engine, % | mean TTFT, ms |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    asked = sys.argv[2:] or [name for name, *_ in RULES]
    for name, policy, rule in (row for row in RULES if row[0] in asked):
        with fleet(name, policy) as (url, _, _, urls):
            answers = asyncio.run(loaded(url, *prompts()))
            assert {came for _, came, _ in answers} == {"ok"}, Counter(a[1] for a in answers)
            found = asyncio.run(counts(urls))
        queries, hits, ttft_s, n = map(sum, zip(*found, strict=True))
        live = 100 * hits / queries, 100 * max(row[3] for row in found) / n, 1e3 * ttft_s / n
        with tempfile.TemporaryDirectory() as folder:
            tokens = str.split if name == "dynamo" else four_letters
            config = workload(Path(folder) / "log.jsonl", tokens) | {"policy": rule}
            result = simulate(RunConfig(**config))
        engines = Counter(result.requests.column("decode_worker").to_pylist())
        own = [100 * result.summary["prefix_cache_hit_rate"]]
        own += [100 * max(engines.values()) / sum(engines.values())]
        ends, begins = (np.array(result.requests.column(name))
                        for name in ("first_token_s", "tokenized_s"))  # fmt: skip
        own += [1e3 * float(np.mean(ends - begins))]  # in the engine, as engines report it
        cells = " | ".join(f"{a:.1f}; {b:.1f}" for a, b in zip(live, own, strict=True))
        print(f"| {name} | `{policy}`; `{rule}` | {cells} |", flush=True)


async def do(admin, worker, action, body):
    """Have a fault begin or end."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{admin}/workers/{worker}/{action}", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def retried(url):
    """Return how many retries a gateway counts."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines
               if "retries" in line and "_total" in line and line[0] != "#"
               and "exhausted" not in line)  # fmt: skip


def faults():
    """Print the table of faults."""
    rng, moments, at_s = random.Random(1), [], 0.0
    while (at_s := at_s + rng.expovariate(RATE)) < END_S:
        moments.append(at_s)
    texts = [f"question {k} {rng.random()} " * 20 for k in range(len(moments))]
    print("| gateway | fault | requests | failed | TTFT p50, p99, ms | bad until, s |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in sys.argv[2:] or ("vllm", "sglang", "ours"):
        with fleet(name, "round_robin") as (url, metrics, admin, _):
            script = []
            for _, begins, ends, worker, action, on, off in FAULTS:
                script.append((begins, lambda w=worker, a=action, b=on: do(admin, w, a, b)))
                script.append((ends, lambda w=worker, a=action, b=off: do(admin, w, a, b)))
            answers = asyncio.run(loaded(url, texts, moments, script, STREAM_LEN))
            retries = asyncio.run(retried(metrics))
        nexts = [fault[1] for fault in FAULTS[1:]] + [END_S]
        for (label, begins, *_), until in zip(FAULTS, nexts, strict=True):
            # Those in flight when it begins are its own.
            part = [answer for answer in answers
                    if begins - STREAM_S <= answer[0] < until - STREAM_S]  # fmt: skip
            bad = [(at, came) for at, came, ttft in part
                   if came != "ok" or ttft > LATE_S]  # fmt: skip
            failed = Counter(came for _, came, _ in part if came != "ok")
            said = ", ".join(f"{n} {came}" for came, n in failed.items()) or "0"
            ttft = sorted(1e3 * t for _, _, t in part if t is not None)
            late = f"{ttft[int(0.99 * len(ttft))]:.0f}"
            ended = f"{max(at for at, _ in bad) - begins:.1f}" if bad else "-"
            row = f"| {name} | {label} | {len(part)} | {said} | {median(ttft):.0f}, {late}"
            print(f"{row} | {ended} |", flush=True)
        print(f"{name}: {retries:.0f} retries of {len(answers)} requests", flush=True)


if __name__ == "__main__":
    {"rules": rules, "faults": faults}[sys.argv[1]]()
