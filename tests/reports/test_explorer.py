"""The explorer: its points are those of the printed command, and it does only what it should."""

import asyncio
import json
import shlex
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import aiohttp
import pytest
from aiohttp import web

from eldr_sim.cli.main import cli
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.errors import InputError
from eldr_sim.reports.explorer.points import around, command_of, config_of, plane
from eldr_sim.reports.explorer.server import Explorer
from eldr_sim.simulator.outcome.result_parts import headline_of, parts_of
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import RunConfig

from ..on_each import on_each
from ..waiting import until

BASE = RunConfig(
    trace="reference-moe", topology="1P2D", request_rate=20, output_len=20,
    goodput={"ttft": 500, "tpot": 30}, price_per_gpu_hour=2.0,
)  # fmt: skip


@contextmanager
def serving(**options):
    """Serve an explorer from a thread; yields it and its URL."""
    ready, found, loop = threading.Event(), [], asyncio.new_event_loop()

    async def start():
        explorer = Explorer(BASE, jobs=1, **options)
        runner = web.AppRunner(explorer.app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.extend([explorer, f"http://127.0.0.1:{runner.addresses[0][1]}", runner])
        ready.set()

    def run():
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(found[2].cleanup())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield found[:2]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


@pytest.fixture(scope="module")
def site():
    with serving() as found:
        yield found


def asked(url, state, headers=None, parts=None):
    """Return status and lines of a state's stream."""
    body = json.dumps(state | ({"parts": parts} if parts else {})).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    request = urllib.request.Request(f"{url}/points", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, [json.loads(line) for line in answer]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def from_command(text):
    """Return the configuration of a printed command."""
    words = shlex.split(text)
    assert words[:2] == ["eldr-sim", "run"]
    command = cli.get_command(None, "run")
    options = command.make_context("run", words[2:]).params
    for name in ("out", "force", "plot", "timeline", "backend", "verbose"):
        options.pop(name)
    return config_from_options(options)


@on_each(
    "state",
    [
        {},
        {"topology": "4C", "gpu": "H200", "policy": "jsq", "request_rate": "33.3"},
        {"more": "decode.gpu=h200 policy=eldr policy.tau=0.25 prefill.max_num_seqs=8"},
        {"goodput": "ttft:300", "more": "enable_expert_parallel=true tensor_parallel_size=2"},
        {"price_per_gpu_hour": "3.5", "more": "fail=[decode:1@3+2] domain_mix.code=2"},
        {
            "engine": "sglang",
            "topology": "2C",
            "kv_tier": "host:9GB,load=2GB/s store:1TB,load=1GB/s",
        },
        {
            "more": "speculative_config.method=mtp speculative_config.num_speculative_tokens=2 "
            "acceptance=glm-5.2"
        },
        {
            "more": "decode.speculative_config.method=mtp acceptance=glm-5.2 "
            "decode.speculative_config.num_speculative_tokens=2"
        },
    ],
)
def test_the_command_is_the_state(state):
    config = config_of(state, BASE)
    assert from_command(command_of(config)) == config
    assert {own.requests.request_rate for own in around(config)} >= {config.requests.request_rate}
    for own in around(config):
        assert from_command(command_of(own)) == own
    assert (config in plane(config)) == (config.cluster.n_prefill > 0)


@pytest.mark.long
def test_a_state_s_stream_is_its_run(site):
    _, url = site
    status, lines = asked(url, {"topology": "2P2D", "policy": "jsq"})
    kinds = [line["kind"] for line in lines]
    assert (status, kinds[:2], kinds[-1]) == (200, ["command", "point"], "end")
    assert (kinds.count("curve"), kinds.count("plane"), kinds.count("pictures")) == (8, 16, 1)
    summary = simulate(from_command(lines[0]["command"])).summary
    point = lines[1]
    for name in ("p50_ttft_ms", "p50_tpot_ms", "request_goodput", "slo_attainment",
                 "cost_per_million_output_tokens", "completed"):  # fmt: skip
        assert point[name] == summary[name]
    assert point["p50_ttft_ms"] == pytest.approx(summary["median_ttft_ms"])
    assert point["p99_tpot_ms"] == pytest.approx(summary["p99_tpot_ms"])
    same = next(line for line in lines if line["kind"] == "curve" and line["rate"] == 20)
    assert same["p99_ttft_ms"] == point["p99_ttft_ms"]
    headline = [figure.label for figure in headline_of(summary)]
    assert [label for label, _ in point["headline"]] == headline
    (parts,) = (line["parts"] for line in lines if line["kind"] == "pictures")
    assert [title for title, _ in parts] == [part.title for part in parts_of(summary)]
    (pictures,) = (line["pictures"] for line in lines if line["kind"] == "pictures")
    of_tpot = next(picture for picture in pictures if picture["title"] == "Parts of TPOT")
    whole = sum(trace["y"][0] for trace in of_tpot["data"])
    # Parts below 0, of unequal lengths, have no bar.
    assert summary["mean_tpot_ms"] <= whole * (1 + 1e-9) < 1.01 * summary["mean_tpot_ms"]


def test_known_points_are_not_run_again(site):
    explorer, url = site
    asked(url, {"request_rate": "9"}, parts="point")
    before = explorer.n_run
    asked(url, {"request_rate": "9"}, parts="point")
    assert explorer.n_run == before


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"topology": "7Q"}, "topology: '7Q'"),
        ({"request_rate": "-3"}, "request_rate"),
        ({"output_len": "x"}, "output_len"),
        ({"goodput": "fast"}, "goodput"),
        ({"more": "nothing=3"}, "nothing"),
        ({"workload": "/etc/passwd"}, "explore: '/etc/passwd' is a path"),
        ({"model": "../x"}, "is a path"),
        ({"more": "queue_order=./evil.py:A"}, "is a path"),
        ({"policy": "evil.py:A"}, "is a path"),
        ({"more": "policy.artifact=/x"}, "is a path"),
    ],
)
def test_what_is_wrong_is_one_line(site, state, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit(9)")
    status, lines = asked(site[1], state)
    assert status == 200
    assert [line["kind"] for line in lines] == ["error"]
    assert said in lines[0]["error"]
    assert "\n" not in lines[0]["error"]


def test_other_sites_are_refused(site):
    _, url = site
    assert asked(url, {}, {"Origin": "http://evil.example"})[0] == 403
    assert asked(url, {}, {"Host": "evil.example"})[0] == 403
    assert asked(url, {}, {"Content-Type": "text/plain"})[0] == 415
    port = url.rpartition(":")[2]
    assert asked(url, {}, {"Origin": f"http://localhost:{port}"}, parts="point")[0] == 200
    with urllib.request.urlopen(url) as answer:
        page = answer.read().decode()
        assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_who_asks_anew_leaves_what_has_not_begun(site):
    explorer, url = site

    async def drag():
        begun = explorer.n_run
        async with aiohttp.ClientSession() as session:
            for n in range(20):
                answer = await session.post(f"{url}/points", json={"request_rate": f"{30 + n}"})
                await answer.content.readline()
                answer.close()
                await asyncio.sleep(0.01)
            await until(lambda: len(explorer._running) <= 1)
            last = await session.post(f"{url}/points", json={"request_rate": "77"})
            lines = (await last.text()).splitlines()
        return explorer.n_run - begun, len(lines)

    n_run, n_lines = asyncio.run(drag())
    assert n_lines == 2 + 1 + 8 + 12 + 1
    # Of the twenty streams of 21 points few but the last one's have been run.
    assert n_run < 21 + 200


def test_read_only_shows_its_own_state_alone():
    with serving(read_only=True) as (explorer, url):
        assert asked(url, explorer._start, parts="point")[0] == 200
        assert asked(url, explorer._start | {"request_rate": "21"}) == (
            403, "this page is read-only",
        )  # fmt: skip
        with urllib.request.urlopen(url) as answer:
            assert "<fieldset disabled>" in answer.read().decode()


def test_what_the_page_begins_with_must_be_right():
    with pytest.raises(InputError, match="request_rate"):
        Explorer(BASE.replace(request_rate=None))


def test_a_page_too_many_is_refused_for_now(site, monkeypatch):
    monkeypatch.setattr("eldr_sim.reports.explorer.server._STREAMS", 0)
    assert asked(site[1], {}) == (503, "0 pages are being computed")
