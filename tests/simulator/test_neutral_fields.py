"""Every field of a run has a value that changes no byte, or a reason why it has none.

A new field fails here until it has an entry in one of the tables. Values of one engine run
together, so that the file takes seconds; where that run differs, each value is tried alone.
"""

import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each
from .test_neutral_values import BASE, SGLANG, _outcome

TRTLLM = {"engine": "trtllm"}
#: Values that change nothing of `BASE`: limits that are not reached, settings of what is not there,
#: what the field stands for when it is not given, and the field's own default.
NEUTRAL = {
    "policy": "jsq", "recorded_ttft_ms": 50.0, "recorded_tpot_ms": 5.0, "think_time": "5",
    "tool_time": "5", "turns": "4", "calls_per_turn": "2", "new_tokens": "100",
    "history": "reset:100", "sessions": 5, "max_concurrency": 100_000, "burstiness": 1.0,
    "workload": "task", "request_rate": 80.0, "num_requests": 40, "warmup": 0.0, "seed": 0,
    "columns": None, "arrivals": None, "sessions_file": None, "load": None, "duration": None,
    "log_from": None, "log_to": None, "busiest": None, "trace": "reference-moe",
    "routing": "real", "trace_replay": "own", "domain_mix": None, "domain_mix_end": None,
    "input_len": 200, "output_len": 20, "prompt_lengths": "trace", "random_range_ratio": 0.0,
    "prefix_len": 0, "length_shape": None, "gpu": "h100", "model": "qwen3-30b-a3b",
    "micro_batches": 4, "gpus_per_node": 4, "all2all_backend": "pplx",
    "enable_expert_parallel": True, "tensor_parallel_size": 1, "data_parallel_size": 1,
    "pipeline_parallel_size": 1, "num_redundant_experts": 0, "enable_elastic_ep": False,
    "prefill": {}, "decode": {}, "conditional_disagg": "noncached:0", "kv_reserve": "prompt_end",
    "kv_transfer": "observed", "load_report_delay_ms": 0.0, "signal_interval_ms": 50.0,
    "price_per_gpu_hour": 3.0, "start_up": "120", "kv_tier": ("host:100GB,load=20GB/s,write=back",),
    "kv_load": "cheaper", "kv_overlap": "layers", "kv_in_flight": "duplicate", "answer_kv": "pull",
    "kv_signal": "approx:ttl=120", "engine": "vllm", "max_model_len": 32768, "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192, "kv_cache_dtype": "bfloat16", "block_size": 16,
    "disable_hybrid_kv_cache_manager": True, "async_scheduling": True, "engine_args": None,
    "prefill_schedule_interval": 4, "long_prefill_token_threshold": 4096,
    "gpu_memory_utilization": 0.92, "extra_llm_api_options": None, "cudagraph_padding": "none",
    "enforce_eager": False, "max_cudagraph_capture_size": 512, "moe_backend": "triton",
    "tables": None, "moe_dp_chunk_size": 256,
    "calibration": None, "two_batch_overlap": True, "acceptance": None, "handover": "none",
    "frontend": "xeon-emerald-rapids", "tokenizer_mode": "thread_pool", "tokenizer_threads": 1,
    "api_servers": 1, "cpu_slowdown": 1.0,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 0},
    "expert_gather": None, "kv_cache_free": False, "events": None,
    "fail": ("decode:0@100000s+1s",), "health_delay_ms": 50.0, "retry": "migrate",
    "max_retries": 2, "user_retry_s": 5.0, "autoscale": "none", "min_workers": (1,),
    "initial_workers": (), "gpu_budget": 3, "demand": "exit", "metric_delay": 5.0,
    "drain_timeout": 5.0, "width_pause": 5.0, "switch_time": 3.0, "goodput": {"e2el": 1e9},
}  # fmt: skip
#: The same of options of one engine, beside it.
OF_ENGINE = [
    (SGLANG, {"enable_mixed_chunk": False, "scheduler_recv_interval": 1,
              "schedule_conservativeness": 1.0, "piecewise_cuda_graph": False,
              "shared_experts_fusion": False}),
    (TRTLLM, {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "batch_wait_timeout_iters": 0,
              "batch_wait_max_tokens_ratio": 0.0, "attention_dp_balance": False,
              "piecewise_cuda_graph": False}),
]  # fmt: skip
#: Values that `BASE` refuses, as it lacks what they are settings of.
REFUSED = {
    "queue_order": "priority", "time_unit": "s", "routing_band": "high", "num_prefixes": 3,
    "eplb_interval": 1_000_000, "eplb_window": 100, "eplb_async": True,
    "eplb_overhead_ms": 3.0, "gather_interference": 0.5, "attention_dp_timeout_iters": 10,
    "attention_dp_batching_wait_iters": 1, "confidence": 80,
}  # fmt: skip
#: Why a field has no such value.
NONE = {
    "prefill_policy": "the result names it",
    "expert_placement": "the result names it",
    "replica_choice": "the result names it",
    "prompts": "shared prompts change the shares of the trace that prefixes cover",
    "max_active_sessions": "a number of sessions at a time changes arrivals",
    "topology": "the result's label spells it as it was given",
    "host_gap_ms": "the result says that it was given",
    "num_gpu_blocks_override": "the result says that it was given",
    "kv_cache_memory_bytes": "the result says that it was given",
    "enable_prefix_caching": "the result counts no queries without a cache",
    "engine_version": "the newest pads CUDA graphs; without a version none are padded",
    "offload_window": "experts are streamed as soon as it is given",
    "enable_chunked_prefill": "either value is a rule of TensorRT-LLM",
}


def test_every_field_has_an_entry():
    of_engine = [name for _, values in OF_ENGINE for name in values]
    assert {*NEUTRAL, *of_engine, *REFUSED, *NONE} == RUN_FIELDS.keys()
    for one, other in [(NEUTRAL, REFUSED), (NEUTRAL, NONE), (REFUSED, NONE)]:
        assert not one.keys() & other.keys()


def _equal(beside, neutral):
    requests, *rest = _outcome(beside)
    others, *other_rest = _outcome(beside | neutral)
    return requests == others.select(requests.column_names) and rest == other_rest


@pytest.mark.parametrize(
    ("beside", "neutral"), [({}, NEUTRAL), *OF_ENGINE], ids=["vllm", "sglang", "trtllm"]
)
def test_neutral_values_together_change_nothing(beside, neutral, n_cases):
    n_cases(len(neutral), fixed=True)
    if not _equal(beside, neutral):
        alone = {name for name in neutral if not _equal(beside, {name: neutral[name]})}
        pytest.fail(f"changes a result: {alone or 'none alone'}")


@on_each("name", REFUSED)
def test_settings_of_what_is_not_there_are_refused(name):
    with pytest.raises(InputError) as refused:
        simulate(make_config(BASE | {name: REFUSED[name]}))
    assert name in str(refused.value)
