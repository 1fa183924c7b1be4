"""Command lines of vLLM, SGLang and TensorRT-LLM for the pools of a deployment.

Options are those of the versions named: they change between minor versions. Sources: vLLM 0.32
``engine/arg_utils.py``, ``config/{parallel,kv_transfer,speculative}.py``; SGLang 0.5.23
``arg_groups/fields``; TensorRT-LLM 1.3 ``llmapi/llm_args.py`` and ``examples/disaggregated``."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from eldr_sim.errors import InputError
from eldr_sim.planning.launch.deployment import REPLACE, Deployment, Role

VLLM, SGLANG, TRTLLM = "vLLM 0.32.0", "SGLang 0.5.23", "TensorRT-LLM 1.3.0rc"
#: Backends by the engines' names.
VLLM_BACKENDS = {
    "allgather_reducescatter": "allgather_reducescatter",
    "deepep_ll": "deepep_low_latency",
    "deepep_ht": "deepep_high_throughput",
}
_SGLANG_BACKENDS = {
    "allgather_reducescatter": ["none"],
    "deepep_ll": ["deepep", "--deepep-mode", "low_latency"],
    "deepep_ht": ["deepep", "--deepep-mode", "normal"],
    "pplx": ["pplx"],
}
_SGLANG_METHODS = {
    "mtp": "NEXTN", "eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE",
    "ngram": "NGRAM",
}  # fmt: skip
_SHELL = ('"$MODEL"', '"$HEAD"', '"$HEAD:5000"', '"$node"')  #: what is shell, not a word


def _refuse(target: str, what: str, value: object, known: Sequence[str]) -> InputError:
    return InputError("emit", f"{target} has no {what} {value}", ", ".join(known))


def vllm_arguments(role: Role, apart: bool, *, spread: bool = True) -> list[str]:
    """Return vLLM's options for a role; ``spread``: say which engines a node runs, which Dynamo's
    operator adds."""
    arguments = ["--tensor-parallel-size", str(role.layout.tensor_parallel_size)]
    if role.is_group:
        if role.backend not in VLLM_BACKENDS:
            raise _refuse(VLLM, "all-to-all backend", role.backend, list(VLLM_BACKENDS))
        arguments += ["--data-parallel-size", str(role.layout.data_parallel_size)]
        if role.nodes > 1 and spread:
            start = f"$(({role.local_engines}*node))"
            arguments += ["--data-parallel-size-local", str(role.local_engines)]
            arguments += ["--data-parallel-start-rank", start, "--data-parallel-hybrid-lb"]
            arguments += ["--data-parallel-address", '"$HEAD"', "--data-parallel-rpc-port", "29550"]
        arguments += ["--all2all-backend", VLLM_BACKENDS[role.backend]]
    if role.layout.expert_parallel and role.gpus > 1:
        arguments.append("--enable-expert-parallel")
    if role.spec.n_redundant or role.placement == "eplb":
        eplb = {"num_redundant_experts": role.spec.n_redundant}
        arguments += ["--enable-eplb", "--eplb-config", json.dumps(eplb)]
    arguments += ["--max-num-seqs", str(role.spec.max_num_seqs)]
    arguments += ["--max-num-batched-tokens", str(role.spec.max_num_batched_tokens)]
    arguments += ["--block-size", str(role.block_size)]
    if (share := role.share_of("vllm")) is not None:
        arguments += ["--gpu-memory-utilization", share]
    if role.config.engine.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", role.config.engine.kv_cache_dtype]
    if not role.config.engine.enable_prefix_caching:
        arguments.append("--no-enable-prefix-caching")
    if role.speculation is not None and role.speculation.num_speculative_tokens:
        drafting: dict[str, Any] = {
            "method": role.speculation.method,
            "num_speculative_tokens": role.speculation.num_speculative_tokens,
        }
        if role.speculation.method in ("draft_model", "eagle", "eagle3"):
            drafting["model"] = REPLACE
        arguments += ["--speculative-config", json.dumps(drafting)]
    if apart:
        side = "kv_producer" if role.name == "prefill" else "kv_consumer"
        transfer = {"kv_connector": "NixlConnector", "kv_role": side}
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    return arguments


def sglang_arguments(role: Role, apart: bool) -> list[str]:
    """Return SGLang's options for a role."""
    arguments = ["--tp-size", str(role.gpus)]
    if role.is_group:
        if role.backend not in _SGLANG_BACKENDS:
            raise _refuse(SGLANG, "all-to-all backend", role.backend, list(_SGLANG_BACKENDS))
        arguments += ["--attn-dp-size", str(role.layout.data_parallel_size)]
        arguments += ["--moe-a2a-backend", *_SGLANG_BACKENDS[role.backend]]
    if role.layout.expert_parallel and role.gpus > 1:
        arguments += ["--ep-size", str(role.gpus)]
    if role.nodes > 1:
        arguments += ["--nnodes", str(role.nodes), "--node-rank", '"$node"']
        arguments += ["--dist-init-addr", '"$HEAD:5000"']
    if role.spec.n_redundant:
        arguments += ["--ep-num-redundant-experts", str(role.spec.n_redundant)]
    if role.placement == "eplb":
        arguments.append("--enable-eplb")
    # The server's, which it divides by the engines.
    engines = role.layout.data_parallel_size
    arguments += ["--max-running-requests", str(role.spec.max_num_seqs * engines)]
    arguments += ["--chunked-prefill-size", str(role.spec.max_num_batched_tokens * engines)]
    arguments += ["--page-size", str(role.config.engine.block_size)]
    if (share := role.share_of("sglang")) is not None:
        arguments += ["--mem-fraction-static", share]
    if role.config.engine.kv_cache_dtype != "auto":
        kind = {"fp8": "fp8_e4m3"}.get(
            role.config.engine.kv_cache_dtype, role.config.engine.kv_cache_dtype
        )
        arguments += ["--kv-cache-dtype", kind]
    if not role.config.engine.enable_prefix_caching:
        arguments.append("--disable-radix-cache")
    if role.speculation is not None and (k := role.speculation.num_speculative_tokens):
        if role.speculation.method not in _SGLANG_METHODS:
            method = role.speculation.method
            raise _refuse(SGLANG, "speculative method", method, list(_SGLANG_METHODS))
        arguments += ["--speculative-algorithm", _SGLANG_METHODS[role.speculation.method]]
        arguments += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
        arguments += ["--speculative-num-draft-tokens", str(k + 1)]
    if apart:
        arguments += ["--disaggregation-mode", role.name]
        arguments += ["--disaggregation-transfer-backend", "nixl"]
    return arguments


def trtllm_config(role: Role, longest: int) -> dict[str, Any]:
    """Return the YAML of TensorRT-LLM's worker; ``longest``: tokens of a request at most."""
    if role.is_group and role.layout.tensor_parallel_size > 1:
        problem = (
            f"{role.layout.data_parallel_size} engines of {role.layout.tensor_parallel_size} GPUs"
        )
        raise InputError("emit", f"{TRTLLM} has no {problem}", "engines of one GPU")
    whole = role.layout.expert_parallel and role.gpus > 1
    options: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": role.gpus,
        "moe_expert_parallel_size": role.gpus if whole else 1,
        "moe_tensor_parallel_size": 1 if whole else role.gpus,
        "enable_attention_dp": role.is_group,
        "max_batch_size": role.spec.max_num_seqs,
        "max_num_tokens": role.spec.max_num_batched_tokens,
        "max_seq_len": longest,
        "enable_chunked_prefill": not role.spec.rules.whole_prompts,
        "kv_cache_config": {
            "dtype": role.config.engine.kv_cache_dtype,
            "tokens_per_block": role.config.engine.block_size,
            "enable_block_reuse": role.config.engine.enable_prefix_caching,
        },
    }
    if (share := role.share_of("trtllm")) is not None:
        options["kv_cache_config"]["free_gpu_memory_fraction"] = float(share)
    if role.name != "serve":
        options["cache_transceiver_config"] = {"backend": "NIXL", "max_tokens_in_buffer": longest}
    if role.name == "prefill":
        options["disable_overlap_scheduler"] = True
    if role.spec.n_redundant:
        options["moe_config"] = {
            "backend": "WIDEEP",
            "load_balancer": {"num_slots": role.experts + role.spec.n_redundant},
        }
    if role.speculation is not None and (k := role.speculation.num_speculative_tokens):
        if role.speculation.method != "mtp":
            raise _refuse(TRTLLM, "mapped speculative method", role.speculation.method, ["mtp"])
        options["speculative_config"] = {"decoding_type": "MTP", "num_nextn_predict_layers": k}
    return options


def _command(words: Sequence[str]) -> str:
    lines: list[str] = []
    for word in words:
        text = word if word in _SHELL or word.startswith("$((") else shlex.quote(word)
        if word.startswith("-") or not lines:
            lines.append(text)
        else:
            lines[-1] += f" {text}"
    return " \\\n    ".join(lines)


def script(deployment: Deployment, target: str) -> str:
    """Return a shell script that launches a worker's node: ``ROLE [NODE OF THE WORKER]``."""
    cases = []
    for role in deployment.roles:
        if target == VLLM:
            words = ["vllm", "serve", '"$MODEL"', "--port", str(role.port)]
            words += vllm_arguments(role, deployment.apart)
        else:
            words = ["python", "-m", "sglang.launch_server", "--model-path", '"$MODEL"']
            words += ["--port", str(role.port), *sglang_arguments(role, deployment.apart)]
        cases.append(f"{role.name})\n  exec {_command(words)}\n  ;;\n")
    usage = "|".join(role.name for role in deployment.roles)
    several = any(role.nodes > 1 for role in deployment.roles)
    needs = ': "${HEAD:?the address of the node 0 of this worker}"\n' if several else ""
    return (
        "#!/usr/bin/env bash\n"
        + deployment.comment(target)
        + f"# usage: MODEL=... {'HEAD=... ' if several else ''}{{0}} {usage} [node]\n"
        + 'set -euo pipefail\n: "${MODEL:?the path or name of '
        + f'{deployment.config.engine.model}}}"\n{needs}node=${{2:-0}}\ncase ${{1:?{usage}}} in\n'
        + "".join(cases)
        + f"*) echo 'one of {usage}' >&2; exit 2 ;;\nesac\n"
    ).replace("{0}", "this file,")


def trtllm_files(deployment: Deployment) -> dict[str, str]:
    """Return the files of TensorRT-LLM's workers and of the server in front of them."""
    files = {}
    for role in deployment.roles:
        text = yaml.safe_dump(trtllm_config(role, deployment.max_model_len), sort_keys=False)
        line = f"trtllm-serve {REPLACE} --port {role.port} --extra_llm_api_options {role.name}.yaml"
        files[f"trtllm/{role.name}.yaml"] = f"{deployment.comment(TRTLLM)}# {line}\n{text}"
    if deployment.apart:
        proxy: dict[str, Any] = {"hostname": "0.0.0.0", "port": 8000, "backend": "pytorch"}
        for role, name in zip(deployment.roles, ("context", "generation"), strict=True):
            urls = [f"{REPLACE}:{role.port}"] * role.pool.workers
            proxy[f"{name}_servers"] = {"num_instances": role.pool.workers, "urls": urls}
        text = yaml.safe_dump(proxy, sort_keys=False)
        line = "# trtllm-serve disaggregated -c disagg.yaml\n"
        files["trtllm/disagg.yaml"] = deployment.comment(TRTLLM) + line + text
    return files
