"""Gateways that others have built before simulated engines; `-m live`, where one is at hand.

``pip install sglang-router vllm-router``, in any environment on the path; ``DYNAMO_PYTHON`` is the
python of one with ``ai-dynamo``, whose workers are `dynamo_worker`. Oracle: our own rule of the
same name on the same requests finds as much of the prompts in prefix caches.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from eldr_sim import RunConfig
from eldr_sim.serving.simulated.server import Service
from eldr_sim.simulator.run import simulate
from eldr_sim.validation.live.engines.servers import free_port

aiohttp = pytest.importorskip("aiohttp", reason="pip install 'eldr-sim[live]'")

from ..waiting import until  # noqa: E402
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


def four_letters(text):
    return [text[k : k + 4] for k in range(0, len(text), 4)]


def workload(path, tokens=four_letters):
    """Write the prompts, in blocks of 16 tokens, and return the fields of a run that serves them
    by co-located engines."""
    numbers, rows = {}, []
    for text, at in zip(*prompts(), strict=True):
        parts = tokens(text)
        blocks = [tuple(parts[k : k + 16]) for k in range(0, len(parts), 16)]
        ids = [numbers.setdefault(block, len(numbers)) for block in blocks]
        row = {"input_length": len(parts), "output_length": OUTPUT_LEN}
        rows.append(json.dumps({"timestamp": round(1e3 * at, 3), "hash_ids": ids} | row))
    path.write_text("\n".join(rows))
    config = {"model": MODEL, "topology": f"{N}C", "workload": f"{path}", "warmup": 0}
    return config | {"num_requests": None, "request_rate": None, "time_unit": "ms"}


def simulated_hit_rate(path, policy, tokens=four_letters):
    """Return what co-located engines find under one of our policies."""
    config = RunConfig(**workload(path, tokens), policy=policy)
    return simulate(config).summary["prefix_cache_hit_rate"]


def gateway_commands(gateway, policy, port, urls):
    """Return the one command of SGLang's or vLLM's gateway."""
    command = [*GATEWAYS[gateway], "--policy", policy, "--host", "127.0.0.1", "--port", f"{port}"]
    return [[*command, "--prometheus-port", f"{free_port()}", "--worker-urls", *urls]]


def dynamo_commands(python, policy, port, urls, folder):
    """Return Dynamo's frontend and a worker for each engine; words are tokens."""
    words = {"[UNK]": 0, "[EOS]": 1}
    for word in " ".join(prompts()[0]).split():
        words.setdefault(word, len(words))
    splits = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": splits}))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": len(words)}
    config |= {"max_position_embeddings": 131072, "eos_token_id": 1, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    frontend = [python, "-m", "dynamo.frontend", "--router-mode", policy, "--no-router-kv-events"]
    worker = [python, f"{Path(__file__).with_name('dynamo_worker.py')}"]
    asked = [[*worker, url, MODEL, f"{folder}"] for url in urls]
    return [[*frontend, "--http-host", "127.0.0.1", "--http-port", f"{port}"], *asked]


def dynamo_environment(folder):
    """Return what Dynamo needs to run without etcd and NATS."""
    planes = {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    return planes | {"DYN_FILE_KV": f"{folder}", "DYN_DISCOVERY_BACKEND": "file"}


class SlowToTokenize(Service):
    """An engine that takes 1.5 s to answer ``/tokenize``."""

    async def _tokenize(self, request):
        await asyncio.sleep(1.5)
        return await super()._tokenize(request)


def hit_rate(commands, folder, ready=("/health", ""), first=Service):
    """Return what the engines find behind a gateway; all requests must be answered.

    It is ready where a path answers 200 with a text in it. ``first``: class of the first engine.
    """
    config = RunConfig(model=MODEL, topology="1C", policy="jsq", num_requests=64, warmup=0)
    port = free_port()
    services = [kind(config) for kind in (first, *[Service] * (N - 1))]

    async def scene():
        async with aiohttp.ClientSession(base_url=f"http://127.0.0.1:{port}") as session:

            async def is_ready():
                try:
                    async with session.get(ready[0]) as answer:
                        return answer.status == 200 and ready[1] in await answer.text()
                except aiohttp.ClientError:
                    return False

            async def ask(text, at):
                await asyncio.sleep(at)
                body = {"model": MODEL, "prompt": text, "max_tokens": OUTPUT_LEN}
                async with session.post(
                    "/v1/completions", json=body | {"ignore_eos": True}
                ) as answer:
                    assert answer.status == 200, await answer.text()

            await until(is_ready, True, 60.0)
            await asyncio.sleep(2.0)  # it looks at its engines first
            await asyncio.gather(*map(ask, *prompts()))

    env = os.environ | dynamo_environment(folder)
    with in_background(*services) as urls, ExitStack() as stack:
        for command in commands(port, urls):
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
            stack.callback(child.wait)
            stack.callback(child.kill)
        asyncio.run(scene())
        return asyncio.run(found_in_caches(urls))


async def found_in_caches(urls):
    """Return the share of prompt tokens that all engines found, by their metrics."""
    counts = {"queries": 0.0, "hits": 0.0}
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(f"{url}/metrics") as answer:
                for line in (await answer.text()).splitlines():
                    for name in counts:
                        if line.startswith(f"vllm:prefix_cache_{name}_total"):
                            counts[name] += float(line.split()[-1])
    return counts["hits"] / counts["queries"]


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_a_gateway_serves_and_engines_find_what_its_rule_lets_them(gateway, tmp_path):
    if shutil.which(GATEWAYS[gateway][0]) is None:
        pytest.skip(f"{GATEWAYS[gateway][0]} is not installed")

    def behind(policy, **about):
        return hit_rate(lambda *to: gateway_commands(gateway, policy, *to), tmp_path, **about)

    in_turn = simulated_hit_rate(tmp_path / "log.jsonl", "round_robin")
    assert behind("round_robin") == pytest.approx(in_turn, abs=0.02)
    by_rule = simulated_hit_rate(tmp_path / "log.jsonl", "cache_aware")
    assert by_rule > in_turn + 0.1
    assert behind("cache_aware") == pytest.approx(by_rule, abs=0.03)
    if gateway == "vllm":  # it asks all engines for tokens, and looks at loads alone after a second
        by_load = simulated_hit_rate(tmp_path / "log.jsonl", "jsq")
        assert behind("cache_aware", first=SlowToTokenize) == pytest.approx(by_load, abs=0.03)


def test_dynamos_frontend_serves_and_engines_find_what_its_rule_lets_them(tmp_path):
    python = os.environ.get("DYNAMO_PYTHON") or pytest.skip("DYNAMO_PYTHON is not set")

    def behind(policy):
        folder = tmp_path / policy
        folder.mkdir()
        ready = ("/v1/models", MODEL)
        return hit_rate(lambda *to: dynamo_commands(python, policy, *to, folder), folder, ready)

    in_turn = simulated_hit_rate(tmp_path / "log.jsonl", "round_robin", str.split)
    assert behind("round-robin") == pytest.approx(in_turn, abs=0.02)
    by_rule = simulated_hit_rate(tmp_path / "log.jsonl", "dynamo_kv", str.split)
    assert by_rule > in_turn + 0.1
    assert behind("kv") == pytest.approx(by_rule, abs=0.03)
