"""The router before a real vLLM on a CPU: engines killed, frozen and restarted mid-stream.

Run with ``pytest -m live tests/validation/live/test_live_router.py``. About three minutes on two
cores.
"""

import asyncio
import importlib.util
import json
import os
import re
import signal
import time

import pytest

from eldr_sim.validation.live.random_model import domain_slices, write_model
from eldr_sim.validation.live.router.decisions import build_decode_policy
from eldr_sim.validation.live.servers import EngineOptions, EngineProcess

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("needs vLLM and NIXL, see docs/live.md", allow_module_level=True)

from .router_scene import running, until

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
            send(engine, signal.SIGCONT)
        engine.stop()


def send(engine, what):
    """Send a signal to all processes of an engine."""
    os.killpg(engine._process.pid, what)


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
            send(first, signal.SIGSTOP)
            begun_s = time.monotonic()
            more = await asyncio.gather(*(ask(8, i % 2) for i in range(8)))
            assert [status for status, _ in more] == [200] * 8
            assert time.monotonic() - begun_s < 10
            ends = await asyncio.gather(*begun)
            assert sorted(status for status, _ in ends) == [0, 0, 200, 200]
            send(first, signal.SIGCONT)
            await until(lambda: at.counted("engine_up"), 2, 30)
            # Killed.
            begun = [ask(800, i < 2) for i in range(4)]
            await until(lambda: metric(at, first, "num_requests_running"), 2, 30)
            send(first, signal.SIGKILL)
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
            send(first, signal.SIGKILL)
            tasks += [asyncio.create_task(at.ask(**asked)) for _ in range(8)]
            ends = [status for status, _ in await asyncio.gather(*tasks)]
            assert set(ends) <= {200, 0}
            assert ends[8:] == [200] * 8
            await at.is_at_rest()
            await until(lambda: metric(at, prefill, "kv_cache_usage_perc"), 0, 20)

    asyncio.run(scene())


def test_eldr_sends_a_domain_to_the_engine_of_its_experts(started, tmp_path, run_cli):
    """From the log of the prefill engine over the fit to decisions, by the commands of the docs."""
    prefill, first, second = started("prefill", "decode", "decode")
    slices = list(domain_slices(2048).items())[:2]

    def prompt(i):
        start, stop = slices[i % 2][1]
        return [start + (37 * i + 11 * j) % (stop - start) for j in range(48)]

    async def ask_all(numbers, policy, **about):
        """Return the decode engine of each request, 0 or 1, one request after the other."""
        served = []
        about |= {"health_interval_s": 0.5, "health_timeout_s": 3.0}
        made = build_decode_policy(policy, 2, seed=0)
        async with running([first.url, second.url], [prefill.url], made, **about) as at:
            for i in numbers:
                before = await metric(at, first, "request_success_total")
                asked = ASKED | {"prompt": prompt(i), "max_tokens": 4}
                status, said = await at.ask(**asked, headers={"X-Request-Id": f"r-{i}"})
                assert status == 200, said
                served.append(int(await metric(at, first, "request_success_total") == before))
        return served

    assert set(asyncio.run(ask_all(range(40), "round_robin"))) == {0, 1}
    requests = tmp_path / "requests.jsonl"
    lines = [{"request_id": f"r-{i}", "domain": slices[i % 2][0]} for i in range(40)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace, fit = tmp_path / "trace", tmp_path / "fit.npz"
    for command in (
        f"trace capture collect {prefill.log} --requests {requests} --out {trace}",
        f"fit --trace {trace} --workload trace --decoders 2 --out {fit}",
    ):
        code, _, err = run_cli(*command.split())
        assert code == 0, err
    policy = f"eldr:artifact={fit}"
    served = asyncio.run(ask_all(range(100, 130), policy, capture=[str(prefill.log)]))
    homes = served[0], served[1]
    assert set(homes) == {0, 1}
    assert served == [homes[i % 2] for i in range(30)]
