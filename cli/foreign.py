"""Options that users know from engines and benchmarks: which of ours says the same, or where it
comes from."""

from eldr_sim.simulator.setup.config.launch import fields_named
from eldr_sim.simulator.setup.config.launch_options import (
    BENCH_OPTIONS,
    EARLIER,
    NAMES,
    OPTIONS,
    WITHOUT_EFFECT,
)
from eldr_sim.simulator.setup.config.spellings import spellings

_PRECISION = ("the precision comes with the model: --model NAME-FP8 or -NVFP4 (`eldr-sim models`), "
              "or the config.json of a quantized checkpoint")  # fmt: skip
_NOTHING = "nothing that is simulated depends on it: leave it out"
#: By option without dashes, underscores between words: what to write, or why there is none.
_SAID = {
    "quantization": _PRECISION,
    "quantize": _PRECISION,
    "dtype": f"{_PRECISION}; that of the KV cache is --kv-cache-dtype",
    "compute_dtype": _PRECISION,
    "gpu_type": "--gpu",
    "gpu_name": "--gpu",
    "device": "--gpu",
    "num_gpus": "--topology and --tensor-parallel-size",
    "n_gpus": "--topology and --tensor-parallel-size",
    "nnodes": "--topology and --tensor-parallel-size",
    "num_replicas": "--topology, such as 4C for four workers",
    "replicas": "--topology, such as 4C for four workers",
    "num_workers": "--topology, such as 4C for four workers",
    "backend": "--engine",
    "framework": "--engine",
    "dataset_name": "--workload",
    "dataset_path": "--workload FILE",
    "dataset": "--workload",
    "trace_file": "--workload FILE",
    "isl": "--input-len",
    "osl": "--output-len",
    "prompt_len": "--input-len",
    "prompt_tokens": "--input-len",
    "max_tokens": "--output-len",
    "output_tokens": "--output-len",
    "concurrency": "--max-concurrency",
    "rate": "--request-rate",
    "qps": "--request-rate",
    "rps": "--request-rate",
    "swap_space": "preempted requests are computed again, as vLLM does since 0.8; --kv-tier keeps "
    "KV blocks in the memory of the host",
    "cpu_offload_gb": "--kv-tier",
    "kv_transfer_config": "--kv-transfer",
    "num_speculative_tokens": "--speculative-config",
    "speculative_model": "--speculative-config",
    "speculative_algorithm": "--speculative-config",
    "enable_chunked_prefill": "prompts are always computed in chunks; --max-num-batched-tokens is "
    "their budget",
    "model_path": "--model",
    "rope_scaling": "--max-model-len",
    "hf_overrides": "--model, with a config.json that says so",
    "ttft_slo": "--goodput ttft:MS",
    "slo": "--goodput, such as ttft:500,tpot:50",
    "attention_backend": "the fastest kernels that were measured are taken; --tables takes yours",
    "compilation_config": "CUDA graphs are on; --enforce-eager turns them off",
}


def instead_of(name: str) -> str:
    """Return what to write in place of an option that a command has not; empty: unknown.
    ``name``: without dashes in front, underscores between words."""
    if name in _SAID:
        return _SAID[name]
    if "." in (path := spellings().get(name, "")):
        return f"--set {path}=VALUE"
    named = [f"--{field.replace('_', '-')}" for field in fields_named(name)]
    if not named and path:
        return f"it is an option of `eldr-sim run`, --{path.replace('_', '-')}"
    if named:
        return " or ".join(named)
    if name in WITHOUT_EFFECT:
        return _NOTHING
    engines = [own for own in OPTIONS if name in OPTIONS[own] | BENCH_OPTIONS[own]]
    if not engines and name not in EARLIER:
        return ""
    if read := [own for own in engines if name in NAMES[own]]:
        return f"--engine {read[0]} --engine-args='--{name.replace('_', '-')} ...'"
    return f"{' and '.join(engines) or 'an earlier vllm or sglang'} has it, and it is not simulated"
