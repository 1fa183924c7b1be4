"""The load of a live run, and the client that sends it, against servers of this process."""

import asyncio
import itertools
import json
import math
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.arrivals import draw_arrivals
from eldr_sim.validation.live.engines import client
from eldr_sim.validation.live.engines.client import send_load
from eldr_sim.validation.live.engines.load import make_load
from eldr_sim.validation.live.live_run import REQUESTS, LoadInfo

from ...on_each import on_each
from ...waiting import until

DOMAINS = {"code": (4, 100), "math": (100, 250)}
LIMITS = {"prompt_range": (4, 512), "output_range": (2, 64)}


def info(**changes):
    about = {
        "name": "test",
        "request_rate": 20.0,
        "burstiness": 1.0,
        "lengths": "fixed",
        "num_requests": 8,
        "seed": 3,
    }
    return LoadInfo(**(about | changes))


def load(prompt_len=6, output_len=5, domain_mix=None, **changes):
    lengths = {"prompt_len": prompt_len, "output_len": output_len}
    return make_load(info(**changes), DOMAINS, **lengths, **LIMITS, domain_mix=domain_mix)


# --- the load ---


def test_fixed_load():
    made = load(num_requests=300)
    assert [r.request_id for r in made.requests] == [f"request-{i}" for i in range(300)]
    assert {len(r.prompt) for r in made.requests} == {6}
    assert {r.output_len for r in made.requests} == {5}
    for request in made.requests:
        low, high = DOMAINS[request.domain]
        assert all(low <= token < high for token in request.prompt)
    share = np.mean([r.domain == "code" for r in made.requests])
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / 300)
    # Every token id of a slice occurs, the last one too.
    seen = {token for r in made.requests for token in r.prompt if r.domain == "code"}
    assert len(seen) > 90
    assert 99 in seen
    times = [r.send_s for r in made.requests]
    np.testing.assert_array_equal(times, draw_arrivals(20.0, 1.0, None, 300, 3))


def test_domains_by_weight():
    names = [r.domain for r in load(num_requests=400, domain_mix={"code": 3, "math": 1}).requests]
    assert abs(names.count("code") / 400 - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 400)
    assert {r.domain for r in load(num_requests=50, domain_mix={"math": 2}).requests} == {"math"}
    for mix, problem in (({"poetry": 1}, "unknown domain"), ({"code": 0}, "all weights are 0")):
        with pytest.raises(InputError, match=problem):
            load(domain_mix=mix)


def test_longer_load_begins_with_the_shorter_and_rates_change_arrivals_alone():
    few, many = load(lengths="recorded"), load(lengths="recorded", num_requests=20)
    assert many.requests[:8] == few.requests
    fast = load(lengths="recorded", request_rate=40.0, burstiness=0.5)
    for a, b in zip(few.requests, fast.requests, strict=True):
        assert (a.prompt, a.output_len) == (b.prompt, b.output_len)
    assert load(seed=4).requests[0].prompt != load().requests[0].prompt


def test_recorded_lengths_have_the_means_and_the_skew_of_the_azure_trace():
    """Published: prompt mean 1155, median 1020; output mean 211, median 129 (Splitwise, Fig. 3)."""
    made = make_load(
        info(lengths="recorded", num_requests=4000),
        {"one": (0, 5)},
        prompt_len=115,
        output_len=21,
        prompt_range=(1, 10_000),
        output_range=(1, 10_000),
    )
    prompt = np.array([len(r.prompt) for r in made.requests])
    output = np.array([r.output_len for r in made.requests])
    assert np.mean(prompt) == pytest.approx(115, rel=0.06)
    assert np.median(prompt) == pytest.approx(102, rel=0.03)
    assert np.mean(output) == pytest.approx(21.1, rel=0.06)
    assert np.median(output) == pytest.approx(12.9, rel=0.08)
    clipped = load(prompt_len=115, output_len=21, lengths="recorded", num_requests=4000)
    np.testing.assert_array_equal(
        [len(r.prompt) for r in clipped.requests], np.clip(prompt, 4, 512)
    )
    np.testing.assert_array_equal([r.output_len for r in clipped.requests], np.clip(output, 2, 64))


def test_lengths_of_a_request_log_stay_pairs(tmp_path):
    log = tmp_path / "log.csv"
    pairs = [(100, 10), (300, 40), (200, 10)]
    rows = [f"2024-05-10 00:00:0{i}.0,{p},{o}" for i, (p, o) in enumerate(pairs)]
    log.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    made = make_load(
        info(lengths="recorded", num_requests=100),
        DOMAINS,
        prompt_len=20,  # a tenth of the log's mean
        output_len=10,  # half of it
        workload=log,
        **LIMITS,
    )
    seen = {(len(r.prompt), r.output_len) for r in made.requests}
    assert seen == {(10, 5), (30, 20), (20, 5)}


@on_each(
    "changes, options, message",
    [
        ({"request_rate": 0.0}, {}, "request_rate: got 0"),
        ({"request_rate": math.inf}, {}, "request_rate: got inf"),
        ({"burstiness": -1.0}, {}, "burstiness"),
        ({"num_requests": 0}, {}, "num_requests"),
        ({}, {"prompt_len": 513}, r"prompt_len: got 513 \(allowed: 4 to 512\)"),
        ({}, {"output_range": (5, 2)}, "output_range"),
        ({}, {"workload": "x.csv"}, "workload: a request log, but lengths are fixed"),
        ({}, {"domains": {}}, "domains: got none"),
        ({}, {"domains": {"a": (5, 5)}}, "domains: a: token ids 5 to 5"),
    ],
)
def test_bad_loads(changes, options, message):
    arguments = {"domains": DOMAINS, "prompt_len": 6, "output_len": 5, **LIMITS, **options}
    with pytest.raises(InputError, match=message):
        make_load(info(**changes), arguments.pop("domains"), **arguments)


# --- the client ---


def event(tokens, text=""):
    chunk = {"choices": [{"index": 0, "text": text}], "usage": {"completion_tokens": tokens}}
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()


def engine(answer, seen=None):
    """Return an application whose completions are streamed by ``answer(body, write)``."""
    web = pytest.importorskip("aiohttp.web", reason="pip install 'eldr-sim[live]'")

    async def complete(request):
        body = await request.json()
        if seen is not None:
            seen.append((time.monotonic(), request.headers["X-Request-Id"], body))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await answer(body, response.write)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    return app


async def one_by_one(body, write):
    for token in range(1, body["max_tokens"] + 1):
        await write(event(token, "t"))
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("order", ["fcfs", "sjf"])
def test_every_request_is_sent_as_it_is_and_every_token_has_its_time(serve_app, order):
    seen, made, shares = [], load(queue_order=order), []
    start = time.monotonic() + 0.1
    table = send_load(
        made,
        serve_app(engine(one_by_one, seen)) + "/",
        model="tiny",
        temperature=0.5,
        start_s=start,
        progress=shares.append,
    )
    assert table.schema == REQUESTS
    rows = table.to_pylist()
    by_name = {name: (at, body) for at, name, body in seen}
    assert len(by_name) == len(seen) == len(rows) == 8
    for request, row in zip(made.requests, rows, strict=True):
        at, body = by_name[request.request_id]
        assert body["prompt"] == request.prompt
        assert body["max_tokens"] == request.output_len
        assert (body["model"], body["temperature"]) == ("tiny", 0.5)
        assert body["stream"] is True
        assert body["ignore_eos"] is True
        assert body.get("priority") == (6 if order == "sjf" else None)
        assert (row["request_id"], row["domain"]) == (request.request_id, request.domain)
        assert (row["prompt_len"], row["output_len"]) == (6, 5)
        assert (row["prefilled_s"], row["routed_s"], row["engine"]) == (None, None, 0)
        assert row["sent_s"] >= start + request.send_s - 1e-6
        moments = [row["sent_s"], at, *row["token_s"]]
        assert moments == sorted(moments)
        assert len(row["token_s"]) == 5
    assert shares == pytest.approx(np.arange(1, 9) / 8)


def test_load_is_open_loop(serve_app):
    """All requests are sent though none is answered until the last one is there."""
    seen = []

    async def answer(body, write):
        while len(seen) < 8:
            await asyncio.sleep(0.001)
        await one_by_one(body, write)

    table = send_load(load(), serve_app(engine(answer, seen)), model="m", timeout_s=50)
    rows = table.to_pylist()
    assert min(row["token_s"][0] for row in rows) > max(row["sent_s"] for row in rows)


def test_several_tokens_in_one_chunk_chunks_in_pieces_and_tokens_without_text(
    serve_app, monkeypatch
):
    """The client's clock counts how often it is read: once for what comes together."""
    reads = itertools.count(1)
    now = [0]

    def read():
        now[0] = next(reads)
        return float(now[0])

    third, fourth = event(3, '"completion_tokens":77'), event(4)  # the text is quoted: no count
    pieces = [(third + fourth)[place : place + 7] for place in range(0, len(third + fourth), 7)]
    last = event(5) + b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'

    async def answer(body, write):
        for part in (event(2), *pieces, last):  # at first two tokens, no text
            before = now[0]
            await write(part)
            await until(lambda before=before: now[0] > before)

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=read))
    table = send_load(load(num_requests=1), serve_app(engine(answer)), model="m")
    (tokens,) = table["token_s"].to_pylist()
    ends = [1, 1, 1 + -(-len(third) // 7), 1 + len(pieces), 2 + len(pieces)]
    assert (np.array(tokens) - tokens[0] + 1).tolist() == ends


def status(code, text):
    web = pytest.importorskip("aiohttp.web", reason="pip install 'eldr-sim[live]'")

    async def complete(_request):
        return web.Response(status=code, text=text)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    return app


async def too_few(body, write):
    await write(event(1) + event(3) + b'data: {"error":{"message":"out of memory"}}\n\n')


async def without_count(body, write):
    await write(b'data: {"choices":[{"text":"a"}]}\n\n')


async def cut_off(body, write):
    await write(event(1))
    raise ConnectionResetError


async def silent(body, write):
    while True:
        await asyncio.sleep(0.02)
        await write(b": no event, until nobody hears it\n\n")


@pytest.mark.parametrize(
    ("answer", "timeout_s", "message"),
    [
        (too_few, 50, "ended after 3 of 5 tokens: .*out of memory"),
        (without_count, 50, "ended after 0 of 5 tokens"),
        (cut_off, 50, "request request-0: http.*"),
        (silent, 0.3, "no answer within the time limit"),
    ],
)
def test_a_request_that_fails_ends_the_run_in_one_line(serve_app, answer, timeout_s, message):
    with pytest.raises(InputError, match=message) as caught:
        send_load(load(num_requests=1), serve_app(engine(answer)), model="m", timeout_s=timeout_s)
    assert "\n" not in str(caught.value)


def test_the_others_are_given_up_and_errors_of_the_server_are_told(serve_app):
    with pytest.raises(InputError, match=r"request-0: .*: HTTP 500: no\s+room"):
        send_load(load(num_requests=3), serve_app(status(500, "no\nroom")), model="m")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        made = load(num_requests=2)
        first, second = made.requests
        due_tomorrow = replace(made, requests=(first, replace(second, send_s=86400.0)))
        with pytest.raises(InputError, match=r"request-0: .*Cannot connect"):
            send_load(due_tomorrow, url, model="m")


def test_aiohttp_is_optional():
    """The modules import without it; using them says in one line what to install."""
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from eldr_sim.validation.live.engines import client\n"
        "from eldr_sim.serving.router import config, proxy\n"
        "from eldr_sim.errors import InputError\n"
        "config = config.make_config(port=1, decode_urls=['http://x'])\n"
        "try:\n    proxy.make_app(config)\n"
        "except InputError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("(allowed: pip install 'eldr-sim[live]')")
