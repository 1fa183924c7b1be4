"""The router before a real vLLM on a CPU: engines killed, frozen and restarted mid-stream.

Run with ``pytest -m live tests/serving/test_live_router.py``. About three minutes on two
cores.
"""

import asyncio
import importlib.util
import json
import random
import re
import shutil
import signal
import time
from collections import Counter

import pytest

from eldr_sim.serving.router.decisions import build_decode_policy
from eldr_sim.validation.live.engines.load import domain_slices, write_model
from eldr_sim.validation.live.engines.servers import EngineOptions, EngineProcess

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("needs vLLM and NIXL, see docs/live.md", allow_module_level=True)

from ..waiting import until
from .router_scene import running

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    model = tmp_path_factory.mktemp("model") / "model"
    write_model(model, num_hidden_layers=2, hidden_size=256, num_experts=16, num_experts_per_tok=4)
    return EngineOptions(str(model), 1024, 16, 256)


@pytest.fixture
def started(options, tmp_path):
    """Start engines at the same time, by role; all are stopped in the end."""
    engines = []

    def start(*roles):
        for i, role in enumerate(roles):
            name = f"{role}{len(engines)}"
            engines.append(EngineProcess(options, name, role, tmp_path / name, i % 2))
            engines[-1].start()
        for engine in engines[-len(roles) :]:
            engine.wait()
        return engines[-len(roles) :]

    yield start
    for engine in engines:
        if engine._process is not None:
            engine.send_signal(signal.SIGCONT)
        engine.stop()


async def metric(at, engine, name):
    async with at.session.get(engine.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"vllm:{name}\b", line))


ASKED = {"model": "model", "ignore_eos": True, "prompt": list(range(10, 40))}


def test_plain_engines(started):
    """Streams that an engine had begun end with it, and say so; nothing else is lost."""
    first, second = started("colocated", "colocated")

    async def scene():
        about = {"health_interval_s": 0.5, "health_timeout_s": 1.0, "token_timeout_s": 5.0}
        async with running([first.url, second.url], **about) as at:

            def ask(n, streamed=True):
                return asyncio.create_task(at.ask(**ASKED, max_tokens=n, stream=streamed))

            # Frozen, and thawed.
            begun = [ask(800) for _ in range(4)]
            await until(lambda: metric(at, first, "num_requests_running"), 2, 30)
            first.send_signal(signal.SIGSTOP)
            begun_s = time.monotonic()
            more = await asyncio.gather(*(ask(8, i % 2) for i in range(8)))
            assert [status for status, _ in more] == [200] * 8
            assert time.monotonic() - begun_s < 10
            ends = await asyncio.gather(*begun)
            assert sorted(status for status, _ in ends) == [0, 0, 200, 200]
            first.send_signal(signal.SIGCONT)
            await until(lambda: at.counted("engine_up"), 2, 30)
            # Killed.
            begun = [ask(800, i < 2) for i in range(4)]
            await until(lambda: metric(at, first, "num_requests_running"), 2, 30)
            first.send_signal(signal.SIGKILL)
            more = await asyncio.gather(*(ask(8) for _ in range(8)))
            assert [status for status, _ in more] == [200] * 8
            ends = [status for status, _ in await asyncio.gather(*begun)]
            assert sorted(ends[:2]) == [0, 200]
            assert ends[2:] == [200, 200]  # not streamed: asked again elsewhere
            # A client that leaves.
            for streamed in (True, False):
                leaving = ask(900, streamed)
                await until(lambda: metric(at, second, "num_requests_running"), 1, 30)
                leaving.cancel()
                await until(lambda: metric(at, second, "num_requests_running"), 0, 3)
            await at.is_at_rest()
            assert (await at.outcomes())["broken_off"] == 3

    asyncio.run(scene())


def test_hand_overs(started):
    """What dies or leaves costs no cache of the prefill engine, whose lease is half an hour."""
    prefill, first, second = started("prefill", "decode", "decode")

    async def scene():
        about = {"health_interval_s": 0.5, "health_timeout_s": 3.0}
        async with running([first.url, second.url], [prefill.url], **about) as at:
            asked = ASKED | {"max_tokens": 8, "stream": True}
            assert [(await at.ask(**asked))[0] for _ in range(4)] == [200] * 4
            computed = await metric(at, prefill, "prompt_tokens_total")
            for wrong in ({"max_tokens": 0}, {"max_tokens": "a"}, {"n": 2}):
                assert (await at.ask(**(asked | wrong)))[0] == 400
            assert await metric(at, prefill, "prompt_tokens_total") == computed
            for delay_s in (0.0, 0.01, 0.02, 0.05, 0.1, 0.3):  # clients that leave
                task = asyncio.create_task(at.ask(**(asked | {"max_tokens": 500})))
                await asyncio.sleep(delay_s)
                task.cancel()
            tasks = [asyncio.create_task(at.ask(**asked)) for _ in range(8)]
            await asyncio.sleep(0.1)
            first.send_signal(signal.SIGKILL)
            tasks += [asyncio.create_task(at.ask(**asked)) for _ in range(8)]
            ends = [status for status, _ in await asyncio.gather(*tasks)]
            assert set(ends) <= {200, 0}
            assert ends[8:] == [200] * 8
            await at.is_at_rest()
            await until(lambda: metric(at, prefill, "kv_cache_usage_perc"), 0, 20)

    asyncio.run(scene())


def test_signatures(started, tmp_path, run_cli):
    """ELDR, as docs/router.md says: engines log, a fit to what they logged, a domain an engine."""
    prefill, first, second = started("prefill", "decode", "decode")
    slices = domain_slices(2048)
    rng = random.Random(0)
    urls = [first.url, second.url], [prefill.url]

    async def send_requests(at, prefix):
        domains = {f"{prefix}-{i}": rng.choice(("code", "legal")) for i in range(40)}
        for name, domain in domains.items():
            prompt = rng.choices(range(*slices[domain]), k=24)
            asked = {"model": "model", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
            assert (await at.ask(**asked, headers={"X-Request-Id": name}))[0] == 200
        return domains

    async def scene(prefix, policy=None, **about):
        async with running(*urls, policy, health_timeout_s=3.0, **about) as at:
            return await send_requests(at, prefix)

    domains = asyncio.run(scene("a"))
    requests, joint = tmp_path / "requests.jsonl", tmp_path / "joint"
    joint.mkdir()
    for engine in (prefill, first, second):
        for file in engine.log.glob("steps-*"):
            shutil.copy(file, joint)
    lines = [json.dumps({"request_id": name, "domain": d}) for name, d in domains.items()]
    requests.write_text("\n".join(lines))
    trace, fit = tmp_path / "trace", tmp_path / "fit.npz"
    for command in (
        ["trace", "capture", "collect", joint, "--requests", requests, "--out", trace],
        ["fit", "--trace", trace, "--workload", "trace", "--decoders", 2, "--out", fit],
    ):
        code, _, error = run_cli(*command)
        assert code == 0, error

    routed = tmp_path / "routed.jsonl"
    policy = build_decode_policy(f"eldr:artifact={fit}", 2, seed=0)
    domains = asyncio.run(scene("b", policy, capture=[str(prefill.log)], log=str(routed)))
    lines = [json.loads(line) for line in routed.read_text().splitlines()]
    pairs = Counter((domains[line["request_id"]], line["engine"]) for line in lines)
    assert pairs.total() == 40
    assert sum(n for _, n in pairs.most_common(2)) >= 38
    assert {engine for (_, engine), _ in pairs.most_common(2)} == {0, 1}
