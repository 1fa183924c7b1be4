"""Benchmark clients that others have built against the simulated server; `-m live`, where they are.

Each is a command on the path, or named by an environment variable: ``VLLM``,
``GUIDELLM``, ``AIPERF`` or ``INFERENCE_PERF``. What a client counts is what the server has served.
"""

import json
import os
import shutil
import subprocess

import pytest

from eldr_sim.serving.simulated.server import Service
from eldr_sim.simulator.setup.config.run_config import RunConfig

from .test_simulated import in_background

pytestmark = pytest.mark.live
N, PROMPT_LEN, OUTPUT_LEN, RATE = 24, 60, 16, 8
MODEL = "Llama-3.1-8B"
CONFIG = RunConfig(
    model=MODEL, topology="1P1D", policy="jsq", warmup=0, num_requests=64, frontend="none",
)  # fmt: skip


def command_of(name):
    found = os.environ.get(name.upper()) or shutil.which(name.replace("_", "-"))
    if found is None:
        pytest.skip(f"no {name}: install it, or name it by {name.upper()}")
    return found


def tokenizer_folder(folder):
    """Write a tokenizer whose tokens are words, as Hugging Face's AutoTokenizer reads it."""
    vocab = {"[UNK]": 0, "[EOS]": 1} | {f"w{k}": k + 2 for k in range(998)}
    vocab |= {word: len(vocab) + k for k, word in enumerate(("tok", "and"))}
    splits = {"type": "WhitespaceSplit"}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": splits, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    about |= {"eos_token": "[EOS]", "model_max_length": 131072}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1002}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vllm(command, url, folder):
    """Return the requests and the output tokens that ``vllm bench serve`` counts."""
    arguments = f"""bench serve --backend openai --base-url {url} --endpoint /v1/completions
        --model {MODEL} --tokenizer {folder} --dataset-name random --random-input-len {PROMPT_LEN}
        --random-output-len {OUTPUT_LEN} --num-prompts {N} --request-rate {RATE} --ignore-eos
        --save-result --result-dir {folder} --result-filename vllm.json"""
    run([command, *arguments.split()], folder)
    result = json.loads((folder / "vllm.json").read_text())
    return result["completed"], result["total_output_tokens"]


def guidellm(command, url, folder):
    """Return what GuideLLM counts."""
    arguments = f"""run --backend kind=openai_http,target={url},model={MODEL}
        --profile kind=constant,rate={RATE} --constraint kind=max_requests,count={N}
        --tokenizer kind=hf_auto,model={folder} --output kind=json,path={folder}/out.json
        --data kind=synthetic_text,prompt_tokens={PROMPT_LEN},output_tokens={OUTPUT_LEN}
        --disable-console"""
    run([command, *arguments.split()], folder)
    (benchmark,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    done = benchmark["requests"]["successful"]
    return len(done), sum(request["output_tokens"] for request in done)


def aiperf(command, url, folder):
    """Return what AIPerf counts; it looks for tokenizers in Hugging Face's cache alone."""
    cache, version = folder / "hub" / "models--local--words", "0" * 40
    shutil.copytree(folder, cache / "snapshots" / version, ignore=shutil.ignore_patterns("hub"))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(version)
    arguments = f"""profile --model {MODEL} --url {url} --endpoint-type completions --streaming
        --tokenizer local/words --synthetic-input-tokens-mean {PROMPT_LEN} --ui none
        --output-tokens-mean {OUTPUT_LEN} --extra-inputs ignore_eos:true --request-count {N}
        --request-rate {RATE} --artifact-dir {folder}/out"""
    run([command, *arguments.split()], folder)
    (file,) = (folder / "out").rglob("profile_export_aiperf.json")
    result = json.loads(file.read_text())
    count = result["request_count"]["avg"]
    return count, round(count * result["output_sequence_length"]["avg"])


def inference_perf(command, url, folder):
    """Return what inference-perf counts: a constant rate for three seconds."""
    length = {"type": "fixed", "std_dev": 0, "total_count": N}
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {
            "type": "random",
            "input_distribution": length | dict.fromkeys(("min", "max", "mean"), PROMPT_LEN),
            "output_distribution": length | dict.fromkeys(("min", "max", "mean"), OUTPUT_LEN),
        },
        "load": {"type": "constant", "stages": [{"rate": RATE, "duration": N // RATE}]},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": f"{folder}"},
        "storage": {"local_storage": {"path": f"{folder}/out"}},
    }
    (folder / "config.json").write_text(json.dumps(config))  # JSON is YAML
    run([command, "--config_file", f"{folder}/config.json"], folder)
    (file,) = (folder / "out").rglob("summary_lifecycle_metrics.json")
    done = json.loads(file.read_text())["successes"]
    return done["count"], round(done["count"] * done["output_len"]["mean"])


def run(command, folder):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": f"{folder}"}
    env |= {"HF_HOME": f"{folder}"}
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=env, cwd=folder, check=False
    )
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]


@pytest.mark.parametrize("client", [vllm, guidellm, aiperf, inference_perf])
def test_a_client_counts_what_was_served(client, tmp_path):
    command = command_of(client.__name__)
    folder = tokenizer_folder(tmp_path)
    service = Service(CONFIG)
    with in_background(service) as (url,):
        requests, tokens = client(command, url, folder)
    assert requests == N
    assert tokens == N * OUTPUT_LEN
    served = service.core.cluster.requests
    assert (served["outcome"] == 1).sum() >= N  # clients may send one of their own before
