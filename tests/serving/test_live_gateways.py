"""Gateways that others have built before simulated engines; `-m live`, where one is on the path.

``pip install sglang-router vllm-router``, in any environment. Oracle: our own rule of the same name
on the same requests finds as much of the prompts in prefix caches.
"""

import asyncio
import itertools
import json
import random
import shutil
import subprocess

import pytest

from eldr_sim import RunConfig
from eldr_sim.serving.simulated.server import Service
from eldr_sim.simulator.run import simulate
from eldr_sim.validation.live.servers import free_port

aiohttp = pytest.importorskip("aiohttp", reason="pip install 'eldr-sim[live]'")

from .router_scene import until  # noqa: E402
from .test_simulated import in_background  # noqa: E402

pytestmark = pytest.mark.live
MODEL, N, REQUESTS, OUTPUT_LEN = "Llama-3.1-8B", 4, 150, 40
GATEWAYS = {"sglang": ("sglang-router", "launch"), "vllm": ("vllm-router",)}


def prompts():
    """Twelve families of long prompts that begin alike, and when they are sent, s."""
    rng, texts = random.Random(0), []
    at = itertools.accumulate(rng.expovariate(8.0) for _ in range(REQUESTS))
    for number in range(REQUESTS):
        family = rng.randrange(12)
        head = (f"family {family} " + f"lorem ipsum {family} " * 600)[:6400]
        texts.append(f"{head} question {number} {rng.random()}")
    return texts, list(at)


def simulated_hit_rate(path, policy):
    """Return what co-located engines find under one of our policies, by blocks of 64 letters."""
    numbers, rows = {}, []
    for text, at in zip(*prompts(), strict=True):
        blocks = [text[k : k + 64] for k in range(0, len(text), 64)]
        ids = [numbers.setdefault(block, len(numbers)) for block in blocks]
        row = {"input_length": -(-len(text) // 4), "output_length": OUTPUT_LEN}
        rows.append(json.dumps({"timestamp": round(1e3 * at, 3), "hash_ids": ids} | row))
    path.write_text("\n".join(rows))
    config = {"model": MODEL, "topology": f"{N}C", "workload": f"{path}", "warmup": 0}
    config |= {"policy": policy, "num_requests": None, "request_rate": None}
    return simulate(RunConfig(**config)).summary["prefix_cache_hit_rate"]


def hit_rate(gateway, policy):
    """Return what the engines find behind a gateway; all requests must be answered."""
    config = RunConfig(model=MODEL, topology="1C", policy="jsq", num_requests=64, warmup=0)
    port = free_port()
    command = [*GATEWAYS[gateway], "--policy", policy, "--host", "127.0.0.1", "--port", f"{port}"]
    command += ["--prometheus-port", f"{free_port()}", "--worker-urls"]

    async def scene():
        async with aiohttp.ClientSession(base_url=f"http://127.0.0.1:{port}") as session:

            async def healthy():
                try:
                    async with session.get("/health") as answer:
                        return answer.status
                except aiohttp.ClientError:
                    return 0

            async def ask(text, at):
                await asyncio.sleep(at)
                body = {"model": MODEL, "prompt": text, "max_tokens": OUTPUT_LEN}
                async with session.post(
                    "/v1/completions", json=body | {"ignore_eos": True}
                ) as answer:
                    assert answer.status == 200, await answer.text()
                    return (await answer.json())["usage"]

            await until(healthy, 200, 60.0)
            await asyncio.sleep(2.0)  # it looks at its engines first
            return await asyncio.gather(*map(ask, *prompts()))

    with in_background(*(Service(config) for _ in range(N))) as urls:
        child = subprocess.Popen([*command, *urls], stdout=subprocess.DEVNULL)
        try:
            usage = asyncio.run(scene())
        finally:
            child.kill()
            child.wait()
    found = sum(used["prompt_tokens_details"]["cached_tokens"] for used in usage)
    return found / sum(used["prompt_tokens"] for used in usage)


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_a_gateway_serves_and_engines_find_what_its_rule_lets_them(gateway, tmp_path):
    if shutil.which(GATEWAYS[gateway][0]) is None:
        pytest.skip(f"{GATEWAYS[gateway][0]} is not installed")
    in_turn = simulated_hit_rate(tmp_path / "log.jsonl", "round_robin")
    assert hit_rate(gateway, "round_robin") == pytest.approx(in_turn, abs=0.02)
    if gateway == "sglang":
        by_rule = simulated_hit_rate(tmp_path / "log.jsonl", "cache_aware")
        assert by_rule > in_turn + 0.1
        assert hit_rate(gateway, "cache_aware") == pytest.approx(by_rule, abs=0.03)
