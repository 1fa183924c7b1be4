"""Capture from a running vLLM (0.32 on a CPU is enough) against the capture from transformers.

The same random weights in float32: routing may differ only where two experts nearly tie.
Run with ``pytest -m live tests/traces/test_capture_live.py`` where vLLM is installed
(docs/capture.md).
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.collect import collect
from eldr_sim.traces.routing.capture.hf import capture_transformers, load_model
from eldr_sim.traces.routing.capture.prompts import Prompt
from eldr_sim.traces.routing.capture.step_log import logged_rows
from eldr_sim.traces.routing.capture.vllm_engine import capture_vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, see docs/capture.md", allow_module_level=True)

pytestmark = pytest.mark.live
NEW = 16
#: Share of (token, layer) rows that must have the same experts in the same order.
AGREEMENT = 0.995


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random Qwen3-MoE without a tokenizer; decoder layer 1 is dense."""
    import torch
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny"
    transformers.Qwen3MoeForCausalLM(config).float().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(4, 512, size=n).tolist() for n in rng.integers(5, 90, size=20)]


@pytest.fixture(scope="module")
def reference(folder, prompts):
    model = load_model(folder, dtype="float32")
    return capture_transformers(model, prompts, max_new_tokens=NEW, temperature=0, ignore_eos=True)


def agreement(experts, reference):
    """Check the shapes; the share of rows with equal ranked experts."""
    assert [e.shape for e in experts] == [e.shape for e in reference.experts]
    same = [(a == b).all(-1) for a, b in zip(experts, reference.experts, strict=True)]
    share = float(np.concatenate(same).mean())
    print(f"{100 * share:.3f}% of {np.concatenate(same).size} rows equal")
    return share


def test_offline_vllm_equals_transformers(folder, prompts, reference):
    captured = capture_vllm(
        folder, prompts, max_new_tokens=NEW, temperature=0, ignore_eos=True, dtype="float32"
    )
    assert captured.layers == reference.layers == [0, 2, 3]
    assert captured.n_experts == 32
    assert agreement(captured.experts, reference) >= AGREEMENT


def test_vllm_says_why_it_fails_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such"}))
    with pytest.raises(InputError) as error:
        capture_vllm(str(tmp_path), [[1, 2]], max_new_tokens=2)
    assert "\n" not in str(error.value)
    assert "no such" in str(error.value)


class Server:
    """``vllm serve`` with the plug-in, as a user starts it."""

    def __init__(self, folder, log, *flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder]
        command += ["--port", port, "--enforce-eager", "--dtype", "float32", "--max-model-len"]
        command += ["256", "--skip-tokenizer-init", "--no-async-scheduling", *flags]
        environment = os.environ | {"ELDR_SIM_CAPTURE": str(log)}
        self.output = log.with_suffix(".txt")
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    def __enter__(self):
        deadline = time.monotonic() + 600
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    pytest.fail(self.output.read_text()[-3000:])
                time.sleep(1)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def send(self, model, prompt, name):
        body = {"model": model, "prompt": prompt, "max_tokens": NEW + 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | {"ignore_eos": True}).encode(),
            {"Content-Type": "application/json", "X-Request-Id": name},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)


def test_server_under_preemption_and_chunked_prefill(folder, prompts, reference, tmp_path):
    log = tmp_path / "log"
    flags = "--no-enable-prefix-caching --max-num-batched-tokens 48 --max-num-seqs 8"
    flags += " --block-size 32 --num-gpu-blocks-override 12"
    with Server(folder, log, *flags.split()) as server, ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda q: server.send(folder, prompts[q], f"r-{q}"), range(len(prompts))))
    requests = [Prompt(f"r-{q}", "d", None) for q in range(len(prompts))]
    collected = collect(log, requests)
    assert collected.prompts == requests
    assert collected.unlabelled == 0
    assert agreement(collected.captured.experts, reference) >= AGREEMENT
    computed = sum(len(e) for e in collected.captured.experts)
    print(f"{logged_rows(log)} rows logged, {computed} of them once")
    assert logged_rows(log) > computed  # some request was preempted and computed again


def test_prefix_cache_hits_are_told(folder, tmp_path):
    log = tmp_path / "log"
    prompt = list(range(4, 68))
    with Server(folder, log, "--enable-prefix-caching", "--block-size", "32") as server:
        for name in ("first", "second"):
            server.send(folder, prompt, name)
    assert len(collect(log, [Prompt("first", "d", None)]).prompts) == 1
    with pytest.raises(InputError, match=r"tokens of second were never computed.*no-enable-prefix"):
        collect(log, [Prompt("second", "d", None)])
