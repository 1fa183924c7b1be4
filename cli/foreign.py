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
#: What to write, or why there is nothing to write, and the options in whose place: without dashes,
#: underscores between words.
_WAYS = {
    _PRECISION: "quantization quantize compute_dtype",
    f"{_PRECISION}; that of the KV cache is --kv-cache-dtype": "dtype",
    "--gpu": "gpu_type gpu_name device",
    "--topology and --tensor-parallel-size": "num_gpus n_gpus nnodes",
    "--topology, such as 4C for four workers": "num_replicas replicas num_workers",
    "--engine": "backend framework",
    "--workload": "dataset_name dataset",
    "--workload FILE": "dataset_path trace_file",
    "--input-len": "isl prompt_len prompt_tokens",
    "--output-len": "osl max_tokens output_tokens",
    "--max-concurrency": "concurrency",
    "--request-rate": "rate qps rps",
    "preempted requests are computed again, as vLLM does since 0.8; --kv-tier keeps KV blocks in "
    "the memory of the host": "swap_space",
    "--kv-tier": "cpu_offload_gb",
    "--kv-transfer": "kv_transfer_config",
    "--speculative-config": "num_speculative_tokens speculative_model speculative_algorithm",
    "prompts are always computed in chunks; --max-num-batched-tokens is their budget":
        "enable_chunked_prefill",
    "--model": "model_path",
    "--max-model-len": "rope_scaling",
    "--model, with a config.json that says so": "hf_overrides",
    "--goodput ttft:MS": "ttft_slo",
    "--goodput, such as ttft:500,tpot:50": "slo",
    "the fastest kernels that were measured are taken; --tables takes yours": "attention_backend",
    "CUDA graphs are on; --enforce-eager turns them off": "compilation_config",
}  # fmt: skip
_SAID = {name: way for way, names in _WAYS.items() for name in names.split()}


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
