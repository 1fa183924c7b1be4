"""An option that has no effect is refused, or a warning names it: a case for each option there is.

A new option fails here until it has a case, or a reason why it always has an effect. What a warning
calls without effect must be so: the figures are those of the run without it.
"""

import json
import re

import click
import numpy as np
import pytest

from eldr_sim.cli.main import cli
from eldr_sim.cli.run_options import config_from_options, run_options
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata, moe_shape
from eldr_sim.simulator.outcome.metrics import warnings_of
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.spellings import PATHS

from ..on_each import on_each

#: A quick run; a case's own options come after these.
BASE = "--trace reference-moe --num-requests 6 --output-len 3 --topology 2P2D"
GROUP = "--topology 1C -dp 2 --enable-expert-parallel"
STREAMS = "--topology 1P -dp 2 --enable-expert-parallel --expert-gather one_sided --output-len 1"

#: Options that always have an effect where a run is possible at all, and why.
ALWAYS = {
    name: why
    for why, names in {
        "what the run is": "workload request_rate num_requests seed trace routing topology model "
        "input_len output_len prefix_len domain_mix domain_mix_end block_size kv_cache_dtype "
        "host_gap_ms calibration confidence goodput config_file preset frontend expert_gather out "
        "price_per_gpu_hour speculative_config prefill.speculative_config "
        "decode.speculative_config",
        "the workers themselves": "engine prefill.engine decode.engine engine_args from_manifest "
        "extra_llm_api_options tensor_parallel_size prefill.tensor_parallel_size "
        "decode.tensor_parallel_size prefill.gpu decode.gpu moe_backend data_parallel_size "
        "prefill.data_parallel_size decode.data_parallel_size enforce_eager prefill.enforce_eager "
        "decode.enforce_eager",
        "the same events, by another program": "backend",
        "a bound, which a load reaches or not": "max_active_sessions max_concurrency max_model_len "
        "max_num_seqs "
        "max_num_batched_tokens kv_cache_free prefill.max_num_seqs prefill.max_num_batched_tokens "
        "decode.max_num_seqs decode.max_num_batched_tokens",
        "a rule for what a load brings or not": "queue_order events eplb_interval",
        "what is planned or compared": "load autoscalers slo gpus sizes seeds jobs "
        "drafts ffn_ranks emit axes resume sensitivity",
        "what is printed in place of a run": "help_all",
        "what other options are": "settings",
        "what is computed differently, which may be equal": "engine_version prefill.engine_version "
        "decode.engine_version prefill.all2all_backend decode.all2all_backend",
    }.items()
    for name in names.split()
}

#: By option: a run in which it has no effect, and, where it is refused, the field that is named.
CASES = {
    **{
        name: (f"--engine {other} --{name.replace('_', '-')} {value}".rstrip(), name)
        for name, other, value in (
            ("enable_mixed_chunk", "vllm", ""),
            ("scheduler_recv_interval", "vllm", "4"),
            ("schedule_conservativeness", "trtllm", "0.5"),
            ("enable_chunked_prefill", "sglang", ""),
            ("capacity_scheduler_policy", "sglang", "MAX_UTILIZATION"),
            ("batch_wait_timeout_iters", "vllm", "4"),
            ("batch_wait_max_tokens_ratio", "vllm", "0.5"),
            ("max_cudagraph_capture_size", "sglang", "64"),
            ("shared_experts_fusion", "vllm", ""),
            ("attention_dp_balance", "sglang", ""),
            ("attention_dp_timeout_iters", "vllm", "4"),
            ("attention_dp_batching_wait_iters", "vllm", "4"),
        )
    },
    "micro_batches": "--micro-batches 3",
    "moe_dp_chunk_size": "--moe-dp-chunk-size 64",
    "two_batch_overlap": "--two-batch-overlap",
    "policy": "--topology 2P1D --policy p2c",
    "prefill_policy": "--topology 2C --prefill-policy least_loaded",
    "expert_placement": ("--expert-placement eplb", "expert_placement"),
    "prefill.expert_placement": ("--set prefill.expert_placement=eplb", "expert_placement"),
    "decode.expert_placement": ("--set decode.expert_placement=eplb", "expert_placement"),
    "replica_choice": f"{GROUP} --replica-choice metro",
    "columns": ("--columns time_s=t,input=i,output=o", "columns"),
    "time_unit": ("--time-unit s", "time_unit"),
    "arrivals": "--arrivals poisson",
    "burstiness": "--request-rate inf --burstiness 2",
    "log_from": ("--from 3", "log_from"),
    "log_to": ("--to 3", "log_to"),
    "busiest": ("--busiest 3", "busiest"),
    "duration": "--duration 5",
    "warmup": "LOG --to 2 --warmup 1",
    "prompts": "--topology 2C --no-enable-prefix-caching --prompts shared",
    "trace_replay": "--topology 2P --output-len 1 --trace-replay same_domain",
    "routing_band": ("--routing-band low", "routing_band"),
    "prompt_lengths": ("--input-len 5 --prompt-lengths data_sets", "prompt_lengths"),
    "random_range_ratio": ("--workload trace --output-len recorded --random-range-ratio 0.5",
                           "random_range_ratio"),
    "num_prefixes": ("--num-prefixes 2", "num_prefixes"),
    "length_shape": ("--length-shape average", "length_shape"),
    "gpu": "--gpu H200 --set prefill.gpu=H100 --set decode.gpu=H100",
    "enable_expert_parallel": "--enable-expert-parallel",
    "prefill.enable_expert_parallel": "--set prefill.enable_expert_parallel=true",
    "decode.enable_expert_parallel": "--set decode.enable_expert_parallel=true",
    "pipeline_parallel_size": ("--pipeline-parallel-size 2", "pipeline_parallel_size"),
    "prefill.pipeline_parallel_size": ("--set prefill.pipeline_parallel_size=2",
                                       "pipeline_parallel_size"),
    "decode.pipeline_parallel_size": ("--set decode.pipeline_parallel_size=2",
                                      "pipeline_parallel_size"),
    "num_redundant_experts": ("--num-redundant-experts 2", "num_redundant_experts"),
    "prefill.num_redundant_experts": ("--set prefill.num_redundant_experts=2",
                                      "num_redundant_experts"),
    "decode.num_redundant_experts": ("--set decode.num_redundant_experts=2",
                                     "num_redundant_experts"),
    "gpus_per_node": f"{GROUP} --gpus-per-node 4",
    "all2all_backend": "--all2all-backend pplx",
    "kv_transfer": "--topology 2C --kv-transfer ideal",
    "handover": "--topology 2C --handover vllm_nixl",
    "load_report_delay_ms": "--policy round_robin --prefill-policy round_robin "
                            "--load-report-delay-ms 5",
    "signal_interval_ms": "--policy jsq --prefill-policy least_loaded --signal-interval-ms 5",
    "kv_signal": "--policy jsq --prefill-policy least_loaded --kv-signal approx",
    "prefill.price_per_gpu_hour": "--set prefill.price_per_gpu_hour=2",
    "decode.price_per_gpu_hour": "--set decode.price_per_gpu_hour=2",
    "disable_hybrid_kv_cache_manager": "--topology 2C --disable-hybrid-kv-cache-manager",
    "enable_prefix_caching": "--no-enable-prefix-caching",
    "async_scheduling": "--topology 2P --output-len 1 --no-async-scheduling",
    "acceptance": ("--acceptance glm-5.2", "acceptance"),
    "prefill_schedule_interval": "--prefill-schedule-interval 3",
    "long_prefill_token_threshold": "--long-prefill-token-threshold 20000",
    "gpu_memory_utilization": "--num-gpu-blocks-override 500 --gpu-memory-utilization 0.9",
    "kv_cache_memory_bytes": "--num-gpu-blocks-override 500 --kv-cache-memory-bytes 1000000000",
    "num_gpu_blocks_override": "--topology 2P --output-len 1 --kv-cache-free "
                               "--num-gpu-blocks-override 500",
    "cudagraph_padding": "--gpu MI300X --enforce-eager --cudagraph-padding dense",
    "piecewise_cuda_graph": "--piecewise-cuda-graph",
    "tables": "--tables TABLES",
    "tokenizer_mode": ("--frontend none --tokenizer-mode microbatch_parallel", "tokenizer_mode"),
    "tokenizer_threads": "--tokenizer-mode microbatch_sequential "
                         "--tokenizer-threads 4",
    "api_servers": ("--frontend none --api-servers 2", "api_servers"),
    "cpu_slowdown": ("--frontend none --cpu-slowdown 2", "cpu_slowdown"),
    "eplb_window": ("--eplb-window 50", "eplb_window"),
    "eplb_async": ("--eplb-async", "eplb_async"),
    "eplb_overhead_ms": ("--eplb-overhead-ms 2", "eplb_overhead_ms"),
    "offload_window": f"{STREAMS} --offload-window 100",
    "gather_interference": ("--gather-interference 0.5", "gather_interference"),
    "kv_tier": "--kv-tier host:1GB,load=20GB/s",
    "kv_load": "--kv-load cheaper",
    "conditional_disagg": ("--topology 2C --conditional-disagg seconds", "conditional_disagg"),
    "kv_overlap": "--kv-overlap layers",
    "kv_in_flight": "--kv-in-flight delay",
    "answer_kv": "--answer-kv pull",
    "kv_reserve": "--topology 2C --kv-reserve arrival",
    "sessions": "--sessions 9",
    "turns": "--turns 3",
    "calls_per_turn": "--calls-per-turn 2",
    "think_time": "--think-time 4",
    "tool_time": "--tool-time 4",
    "new_tokens": "--new-tokens 4",
    "history": "--history last:900",
    "sessions_file": ("--sessions-file TABLES", "sessions_file"),
    "recorded_ttft_ms": "--recorded-ttft-ms 5",
    "recorded_tpot_ms": "--recorded-tpot-ms 5",
    "fail": "--fail decode:0@60",
    "health_delay_ms": "--health-delay-ms 5",
    "retry": "--retry never",
    "max_retries": "--max-retries 2",
    "user_retry_s": "--user-retry-s 2",
    "start_up": "--start-up 60",
    "prefill.start_up": "--set prefill.start_up=60",
    "decode.start_up": "--set decode.start_up=vllm",
    "min_workers": "--min-workers 2",
    "initial_workers": "--initial-workers 2",
    "gpu_budget": "--gpu-budget 3",
    "demand": "--demand exit",
    "metric_delay": "--metric-delay 5",
    "drain_timeout": "--drain-timeout 5",
    "switch_time": "--topology 2C --autoscale none:n=2 --switch-time 5",
    "autoscale": "--topology 2C --autoscale hpa --min-workers 2",
    "width_pause": "--width-pause 5",
    "enable_elastic_ep": ("--enable-elastic-ep", "enable_elastic_ep"),
    "force": ("run --force", "force"),
    "plot": ("run --plot", "plot"),
    "timeline": ("run --timeline", "timeline"),
    # of compare and plan
    "policies": ("plan --prefill-only --num-requests 9 --policy jsq", "policy"),
    "concurrencies": ("compare --policy jsq --concurrencies 1,4", "concurrencies"),
    "attainment": ("plan --prefill-only --num-requests 9 --attainment 0.5", "attainment"),
    "max_gpus": ("plan --slo ttft:9 --topology 1P1D --max-gpus 4", "max_gpus"),
    "price": ("plan --slo ttft:9 --request-rate 9 --gpu h100 --price h100=1,h200=2", "price"),
    "strategies": ("plan --slo ttft:9 --request-rate 9 --strategy tp", "strategy"),
    "redundant": ("plan --slo ttft:9 --request-rate 9 --num-redundant-experts 4",
                  "num_redundant_experts"),
    "engines": ("plan --slo ttft:9 --request-rate 9 --prefill-only --data-parallel-size 4",
                "data_parallel_size"),
    "why_not": ("plan --slo ttft:9 --topology 1P1D --why-not 1C", "why_not"),
    "verbose": ("plan --slo ttft:9 --topology 1P1D --verbose", "verbose"),
    "n_gpus": ("plan --slo ttft:9 --topology 1P1D --gpus 4", "gpus"),
    "knobs": ("plan --slo ttft:9 --request-rate 9 --knobs", "knobs"),
    "prefill_only": ("plan --slo ttft:9 --topology 1P1D --prefill-only", "prefill_only"),
}  # fmt: skip


def options():
    """Return the names of all options of the commands that take a run's, and of its pools."""
    context = click.Context(cli)
    commands = (cli.get_command(context, name) for name in ("run", "compare", "plan"))
    named = {param.name for command in commands for param in command.params}
    return sorted(named | {path for path in PATHS if "." in path})


def test_every_option_has_a_case_or_a_reason():
    assert [name for name in options() if name in CASES and name in ALWAYS] == []
    assert set(CASES) | set(ALWAYS) == set(options())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What cases name: a request log, and a table of another model."""
    folder = tmp_path_factory.mktemp("files")
    log = folder / "log.jsonl"
    lines = [{"timestamp": 200 * i, "input_length": 50, "output_length": 3} for i in range(20)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metadata = TableMetadata(
        kind="moe", gpu="H100", shape=moe_shape(6144, 2560, 160, 8), dtype="bfloat16",
        kernel_source="mine", framework="vllm 0.24.0", provenance="measured", origin="mine",
        device="H100",
    )  # fmt: skip
    columns = {
        "batch": np.array([1, 8]), "distinct_experts": np.array([8.0, 60.0]),
        "routing": np.array(["uniform", "uniform"]), "latency_s": np.array([1e-5, 9e-5]),
    }  # fmt: skip
    LatencyTable(metadata, columns).save(folder / "tables" / "mine.parquet")
    return {"LOG": f"--workload {log} --topology 2C", "TABLES": str(folder / "tables")}


def summary(text):
    """Return the summary of a run with these options."""

    @click.command()
    @run_options()
    def command(**options):
        return config_from_options(options)

    return simulate_summary(command.main(text.split(), standalone_mode=False))


def left_out(text, name):
    """Return a command line without an option, and its value if it has one."""
    words, flag = text.split(), name.replace("_", "-")
    if "." in name:
        (place,) = (i for i, word in enumerate(words) if word.startswith(f"{name}="))
        return " ".join(words[: place - 1] + words[place + 1 :])
    (place,) = (i for i, word in enumerate(words) if word in (f"--{flag}", f"--no-{flag}"))
    has_value = not words[place].startswith("--no-") and words[place + 1 : place + 2]
    has_value = has_value and not words[place + 1].startswith("-")
    return " ".join(words[:place] + words[place + (2 if has_value else 1) :])


@pytest.mark.long
@on_each("name", CASES)
def test_an_option_without_effect_is_refused_or_named(name, files, run_cli):
    case, refused = CASES[name] if isinstance(CASES[name], tuple) else (CASES[name], None)
    if case.startswith(("run ", "compare ", "plan ")):
        code, _, err = run_cli(*case.split())
        assert (code, err.splitlines()[-1].startswith(f"Error: {refused}: ")) == (2, True), err
        return
    for word, path in files.items():
        case = case.replace(word, path)
    text = f"{BASE} {case}"
    if "--workload /" in text:
        text = text.replace("--num-requests 6 --output-len 3", "")
    if refused:
        with pytest.raises(InputError) as caught:
            summary(text)
        assert caught.value.field == refused
        return
    found = summary(text)
    about = rf"{re.escape(name)}\b.* has no effect: "
    said = [line for line in warnings_of(found) if re.match(about, line)]
    assert len(said) == 1, warnings_of(found)
    without = left_out(text, name)
    other = summary(without)
    for figure in ("mean_ttft_ms", "mean_tpot_ms", "p99_e2el_ms", "completed", "num_prompts",
                   "kv_blocks_per_worker", "cost_per_million_output_tokens"):  # fmt: skip
        assert found[figure] == other[figure], figure


def test_the_default_run_warns_of_nothing():
    assert warnings_of(summary("--trace reference-moe --num-requests 40")) == []


def test_what_failed_too_late_is_not_said_to_recover():
    """A run that ends at 4 s, and a worker that dies at 60 s."""
    found = summary(f"{BASE} --fail decode:0@60,decode:1@0.1")
    late, early = sorted(found["faults"]["events"], key=lambda event: -event["at_s"])
    assert late["time_to_recover_s"] is None
    assert late["goodput_after"] is None
    assert early["at_s"] == 0.1
    (said,) = [line for line in warnings_of(found) if "has no effect" in line]
    assert said.startswith("fail decode:0@60 has no effect: the run ends at ")


LADDER = "--topology 3C --load ladder:5,20@3 --output-len 9 --autoscale"
NAMELESS = {  # where an option that means something elsewhere means nothing
    "demand": f"{LADDER} hpa:interval=1 --demand exit",
    "switch_time": f"--topology 2P2D {LADDER[14:]} hpa:interval=1 --switch-time 3",
    "initial_workers": f"{LADDER} oracle:interval=1 --initial-workers 1",
    "metric_delay": f"{LADDER} none:n=2 --metric-delay 2",
    "drain_timeout": f"{LADDER} none:n=2 --drain-timeout 2",
    "tool_time": "--topology 2C --workload chat --sessions 3 --think-time 1 --tool-time 4",
    "batch_wait_timeout_iters": "--topology 2C --engine trtllm --batch-wait-timeout-iters 9",
    "batch_wait_max_tokens_ratio": "--topology 2C --engine trtllm "
                                   "--batch-wait-max-tokens-ratio .9",
}  # fmt: skip


@on_each("name", NAMELESS)
def test_an_option_of_what_this_rule_or_load_has_not_is_named(name):
    base = "--model Qwen3-8B --policy jsq --seed 3"
    base += " --num-requests 6" if name.startswith("batch") else ""
    found, other = (summary(f"{base} {text}") for text in (
        NAMELESS[name], left_out(NAMELESS[name], name)))  # fmt: skip
    said = [line for line in found.pop("without_effect") if line.startswith(f"{name} has no ")]
    assert len(said) == 1
    assert said[0] not in other.pop("without_effect")
    assert found == other
