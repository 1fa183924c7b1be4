"""The formats of request logs: how each is recognised, what its columns are, and a line of it.

One table, from which files are read, ``eldr-sim trace formats`` prints and ``docs/formats.md`` is
written. Units are those of each format's own documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class LogFormat:
    """A format of request logs or of rates."""

    name: str  #: as results call it
    about: str  #: what writes it, and what it holds
    example: str  #: the first lines of such a file
    #: What it is good for: ``workload``, ``load``, or neither: then ``way`` is the way out.
    use: Literal["workload", "load", ""] = "workload"
    way: str = ""  #: where it is not read: what to do instead
    #: Columns that tell a table; none: another module reads the format.
    needs: tuple[str, ...] = ()
    #: Columns that the fields of `table_columns.TableColumns` are in, the first that is there;
    #: ``time`` with its unit.
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    succeeded: tuple[Any, ...] = ()  #: what the column ``status`` says of requests with answers
    strict: bool = False  #: whether lengths are JSON integers
    ambiguous: str = ""  #: column of a time whose unit is a custom that not all writers keep
    longest_s: float = 31 * 86400.0  #: a longer log is doubted where the unit is ambiguous


_OUTPUT = ("output_tokens", "completion_tokens")
_MODEL = ("model", "Model", "model_id", "model_name")

#: Formats that are read, tables first, those that more columns tell before others.
FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        "azure", "Azure's LLM inference traces of 2023 and 2024 (CSV)",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44",
        needs=("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        columns={"time": ("TIMESTAMP",), "input": ("ContextTokens",),
                 "output": ("GeneratedTokens",), "priority": ("priority",)},
    ),
    LogFormat(
        "burstgpt", "BurstGPT (CSV); times are seconds",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log",
        needs=("Timestamp", "Request tokens", "Response tokens"),
        columns={"time_s": ("Timestamp",), "input": ("Request tokens",),
                 "output": ("Response tokens",), "session": ("Session ID",),
                 "priority": ("priority",), "model": _MODEL},
        ambiguous="Timestamp", longest_s=400 * 86400.0,
    ),
    LogFormat(
        "bailian", "Bailian's traces of Qwen (JSON lines); times are seconds",
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, '
        '"output_length": 132, "type": "text", "turn": 1, "hash_ids": [1, 2]}',
        needs=("chat_id", "parent_chat_id", "timestamp", "input_length"),
        columns={"time_s": ("timestamp",), "input": ("input_length",),
                 "output": ("output_length",), "hashes": ("hash_ids",), "name": ("chat_id",),
                 "parent": ("parent_chat_id",), "priority": ("priority",)},
        strict=True, ambiguous="timestamp",
    ),
    LogFormat(
        "dynamo replay", "Requests of Dynamo's replay (--report-jsonl)",
        '{"session_id": "s0", "turn_index": 0, "arrival_time_ms": 67.3, "ttft_ms": 50.0, '
        '"input_length": 261, "output_length": 222}',
        needs=("arrival_time_ms", "input_length", "output_length"),
        columns={"time_ms": ("arrival_time_ms",), "input": ("input_length",),
                 "output": ("output_length",), "session": ("session_id",), "model": _MODEL},
    ),
    LogFormat(
        "splitwise", "Splitwise's traces (CSV); times are seconds",
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,"
        "token_size\n0,2,0,1,1,4096,32",
        needs=("arrival_timestamp", "prompt_size", "token_size"),
        columns={"time_s": ("arrival_timestamp",), "input": ("prompt_size",),
                 "output": ("token_size",)},
        ambiguous="arrival_timestamp",
    ),
    LogFormat(
        "bedrock", "Amazon Bedrock's logs of model invocations (JSON lines)",
        '{"schemaType": "ModelInvocationLog", "timestamp": "2026-01-01T00:00:03Z", "modelId": "m", '
        '"input": {"inputTokenCount": 261}, "output": {"outputTokenCount": 222}}',
        needs=("timestamp", "input.inputTokenCount", "output.outputTokenCount"),
        columns={"time": ("timestamp",), "input": ("input.inputTokenCount",),
                 "output": ("output.outputTokenCount",), "model": ("modelId",),
                 "status": ("errorCode",)},
        succeeded=(None, ""),
    ),
    LogFormat(
        "mooncake", "Mooncake's traces, Dynamo's, AIPerf's mooncake_trace and vLLM's timed_trace "
        "(JSON lines); times are milliseconds (timed_trace may have others: --time-unit); only "
        "input_length or text_input is needed",
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, '
        '"hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 2353, 2354]}',
        needs=("input_length",),
        columns={"time_ms": ("timestamp", "timestamp_ms"), "input": ("input_length",),
                 "output": ("output_length",), "hashes": ("hash_ids",), "session": ("session_id",),
                 "priority": ("priority",), "after_ms": ("delay",), "name": ("request_id",),
                 "joins": ("wait_for",), "text": ("text_input",), "model": _MODEL},
        strict=True, ambiguous="timestamp",
    ),
    LogFormat(
        "mooncake", "", "", needs=("text_input",),
        columns={"time_ms": ("timestamp", "timestamp_ms"), "text": ("text_input",),
                 "output": ("output_length",), "session": ("session_id",), "after_ms": ("delay",),
                 "priority": ("priority",), "name": ("request_id",), "model": _MODEL},
        strict=True, ambiguous="timestamp",
    ),
    LogFormat(
        "frontier sessions", "Frontier's sessions (CSV): a first turn's time, then think times",
        "session_id,session_turn_index,session_start_at,think_time,num_prefill_tokens,"
        "num_decode_tokens\n0,0,0.067,0,261,222\n0,1,,3,234,54",
        needs=("session_id", "session_start_at", "think_time", "num_prefill_tokens"),
    ),
    LogFormat(
        "vidur", "Vidur's traces (CSV); a file of lengths alone needs --request-rate",
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0673,261,222",
        needs=("num_prefill_tokens", "num_decode_tokens"),
        columns={"time_s": ("arrived_at",), "input": ("num_prefill_tokens",),
                 "output": ("num_decode_tokens",)},
    ),
    LogFormat(
        "llmservingsim", "LLMServingSim's traces (JSON lines)",
        '{"arrival_time_ns": 67312609, "input_toks": 261, "output_toks": 222}',
        needs=("arrival_time_ns", "input_toks", "output_toks"),
        columns={"time_ns": ("arrival_time_ns",), "input": ("input_toks",),
                 "output": ("output_toks",), "session": ("session_id",)},
    ),
    LogFormat(
        "llmservingsim sessions", "LLMServingSim's agentic traces (JSON lines)",
        '{"session_id": "s0", "arrival_time_ns": 67312609, "sub_requests": [{"input_toks": 261, '
        '"output_toks": 222, "tool_duration_ns": 1000000000}, {"input_toks": 583, '
        '"output_toks": 222, "tool_duration_ns": 0}]}',
        needs=("arrival_time_ns", "sub_requests"),
    ),
    LogFormat(
        "tracev2", "TraceV2 of inference-sim (BLIS) (CSV)",
        "request_id,session_id,input_tokens,output_tokens,arrival_time_us,status\n"
        "0,s0,261,222,67312,ok",
        needs=("arrival_time_us", "input_tokens", "output_tokens"),
        columns={"time_us": ("arrival_time_us",), "input": ("input_tokens",),
                 "output": ("output_tokens",), "session": ("session_id",), "model": _MODEL,
                 "status": ("status",)},
        succeeded=("ok", "success", "completed", ""),
    ),
    LogFormat(
        "inference-perf", "inference-perf's per_request_lifecycle_metrics.json",
        '[{"start_time": 1000.067, "end_time": 1002.337, "request": "{}", "response": "y", '
        '"info": {"input_tokens": 261, "output_tokens": 222}, "error": null}]',
        needs=("start_time", "info.input_tokens", "info.output_tokens"),
        columns={"time_s": ("start_time",), "input": ("info.input_tokens",),
                 "output": ("info.output_tokens",), "status": ("error",)},
        succeeded=(None, ""),
    ),
    LogFormat(
        "llmperf", "llmperf's individual responses (JSON); has no times: --request-rate",
        '[{"error_code": null, "ttft_s": 0.1, "end_to_end_latency_s": 2.0, '
        '"number_input_tokens": 261, "number_output_tokens": 222}]',
        needs=("number_input_tokens", "number_output_tokens"),
        columns={"input": ("number_input_tokens",), "output": ("number_output_tokens",),
                 "status": ("error_code",)},
        succeeded=(None, ""),
    ),
    LogFormat(
        "litellm", "LiteLLM's spend logs (CSV, JSON)",
        "request_id,call_type,spend,prompt_tokens,completion_tokens,startTime,endTime,model\n"
        "r0,acompletion,0.01,261,222,2026-01-01 00:00:00.067+00:00,2026-01-01 00:00:02+00:00,m",
        needs=("startTime", "prompt_tokens", "completion_tokens"),
        columns={"time": ("startTime",), "input": ("prompt_tokens",),
                 "output": ("completion_tokens",), "session": ("session_id",), "model": _MODEL,
                 "status": ("status",)},
        succeeded=(None, "", "success"),
    ),
    *(
        LogFormat(
            "langfuse", about,
            example, needs=("startTime", prompt),
            columns={"time": ("startTime",), "input": (prompt,), "output": (answer,),
                     "session": ("sessionId",), "model": _MODEL},
        )
        for about, example, prompt, answer in (
            ("Langfuse's observations (CSV, JSON); those without token counts are left out",
             '{"data": [{"id": "o0", "traceId": "t0", "type": "GENERATION", "model": "m", '
             '"startTime": "2026-01-01T00:00:00.067Z", "usage": {"input": 261, "output": 222}}]}',
             "usage.input", "usage.output"),
            ("", "", "usageDetails.input", "usageDetails.output"),
            ("", "", "promptTokens", "completionTokens"),
            ("", "", "inputUsage", "outputUsage"),
            ("", "", "inputTokens", "outputTokens"),
        )
    ),
    LogFormat(
        "sharegpt", "ShareGPT, LMSYS and WildChat (JSON): the first question and answer of each, "
        "four bytes a token, left out as vllm bench serve does; has no times: --request-rate",
        '[{"id": "c0", "conversations": [{"from": "human", "value": "What is a mixture of '
        'experts?"}, {"from": "gpt", "value": "A layer of many networks, of which each token '
        'takes a few."}]}]',
    ),
    LogFormat(
        "vllm bench", "vllm bench serve --save-result --save-detailed; SGLang's bench_serving "
        "--output-file --output-details. Without times of requests at the file's own rate",
        '{"backend": "vllm", "model_id": "m", "request_rate": 4.0, "max_concurrency": null, '
        '"completed": 2, "total_input_tokens": 300, "input_lens": [100, 200], '
        '"output_lens": [7, 9], "start_times": [50.5, 50.75]}',
    ),
    LogFormat(
        "aiperf", "AIPerf's profile_export.jsonl",
        '{"metadata": {"request_start_ns": 2000000000, "benchmark_phase": "profiling"}, '
        '"metrics": {"input_sequence_length": {"value": 550, "unit": "tokens"}, '
        '"output_sequence_length": {"value": 62, "unit": "tokens"}}, "error": null}',
    ),
    LogFormat(
        "aiperf multi_turn", "AIPerf's multi_turn data sets (JSON lines)",
        '{"session_id": "a", "turns": [{"text": "What is a mixture of experts?", '
        '"output_length": 20}, {"text": "And a router?", "delay": 1500, "output_length": 30}]}',
    ),
    LogFormat(
        "guidellm", "GuideLLM's report of one rate (JSON)",
        '{"benchmarks": [{"requests": {"successful": [{"request_start_time": 1.5, '
        '"prompt_tokens": 261, "output_tokens": 222}]}}]}',
    ),
    LogFormat(
        "weka", "Sessions of coding agents in Weka's format (JSON)",
        '{"id": "a", "block_size": 64, "requests": [{"t": 0.0, "in": 261, "out": 22, '
        '"hash_ids": [1, 2, 3, 4, 5]}]}',
    ),
    LogFormat(
        "vllm conversations", "generate_multi_turn.json of vLLM's multi-turn benchmark",
        '{"filetype": "generate_conversations", "num_conversations": 2, "prompt_input": '
        '{"num_turns": {"distribution": "constant", "value": 4}, "num_tokens": {"distribution": '
        '"constant", "value": 90}, "prefix_num_tokens": {"distribution": "constant", "value": '
        '200}}, "prompt_output": {"num_tokens": {"distribution": "constant", "value": 80}}}',
    ),
    LogFormat(
        "rates", "Rates over time (CSV): each to the next line's time",
        "t_s,rate\n0,2\n60,15", use="load",
    ),
    LogFormat(
        "openai usage", "OpenAI's and LiteLLM's usage exports: counts of requests by hour or day "
        "(JSON, CSV)",
        "start_time,end_time,num_model_requests,input_tokens,output_tokens\n"
        "1715299200,1715302800,200,180000,30000\n1715302800,1715306400,250,225000,37500",
        use="load",
    ),
    LogFormat(
        "prometheus", "The answer of Prometheus to query_range: a counter of requests, or their "
        "rate (JSON)",
        '{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}, '
        '"values": [[1715299200, "2.5"], [1715299260, "4"]]}]}}',
        use="load",
    ),
    LogFormat(
        "prometheus metrics", "The text of an engine's /metrics: totals since its start",
        "# TYPE vllm:request_success_total counter\n"
        'vllm:request_success_total{finished_reason="stop"} 400.0',
        use="", way="query_range of rate(vllm:request_success_total[1m]) as --load",
    ),
    LogFormat(
        "aiperf summary", "Summaries of AIPerf and GenAI-Perf (profile_export_aiperf.json, "
        ".csv): means",
        '{"request_throughput": {"avg": 4.0}, "time_to_first_token": {"avg": 80.0}, '
        '"input_sequence_length": {"avg": 907.0}}',
        use="", way="profile_export.jsonl as --workload, or validate bench with this file",
    ),
    LogFormat(
        "genai-perf", "GenAI-Perf's profile_export.json: times of responses, no lengths",
        '{"service_kind": "openai", "experiments": [{"experiment": {}, "requests": []}]}',
        use="", way="profile_export.jsonl of AIPerf, its successor",
    ),
    LogFormat(
        "aiperf inputs", "AIPerf's and GenAI-Perf's inputs.json: the prompts that were sent",
        '{"data": [{"session_id": "s0", "payloads": [{"model": "m", "messages": []}]}]}',
        use="", way="the profile_export.jsonl next to it",
    ),
    LogFormat(
        "vllm bench totals", "vllm bench throughput and latency (--output-json): totals",
        '{"elapsed_time": 10.0, "num_requests": 100, "total_num_tokens": 60000, '
        '"requests_per_second": 10.0, "tokens_per_second": 6000.0}',
        use="", way="vllm bench serve --save-result --save-detailed",
    ),
    LogFormat(
        "inference-perf summary", "inference-perf's summary and stage files: means",
        '{"load_summary": {"count": 400}, "successes": {"count": 400, "latency": {}}}',
        use="", way="per_request_lifecycle_metrics.json",
    ),
    LogFormat(
        "inference-perf config",
        "inference-perf's configuration (YAML): a load to send, no requests",
        "load:\n  type: constant\n  stages:\n  - rate: 4\n    duration: 60",
        use="", way="a stage's rate as --request-rate, its lengths as --input-len and "
        "--output-len; of a run, per_request_lifecycle_metrics.json",
    ),
    LogFormat(
        "llmperf summary", "llmperf's summary: means",
        '{"version": "2023-08-31", "num_concurrent_requests": 8, '
        '"results_number_input_tokens_mean": 907.0}',
        use="", way="the individual_responses.json next to it",
    ),
    LogFormat(
        "access log", "Access logs of Envoy, Istio or nginx (text, JSON lines): times, no tokens",
        '[2026-01-01T00:00:00.067Z] "POST /v1/completions HTTP/1.1" 200 - 1200 3000 900',
        use="", way="requests a minute as --load, with --input-len and --output-len",
    ),
    LogFormat(
        "engine log", "What vLLM or SGLang print as they serve: no lengths of answers",
        "INFO 01-01 00:00:00 [logger.py:43] Received request cmpl-0: prompt: 'x', params: ...",
        use="", way="the log of a gateway or a benchmark, with the tokens of each request",
    ),
    LogFormat(
        "opentelemetry", "OpenTelemetry's spans (OTLP, JSON)",
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1", "attributes": '
        '[{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "261"}}]}]}]}]}',
        use="", way="a table of startTimeUnixNano, gen_ai.usage.input_tokens and "
        "gen_ai.usage.output_tokens with --columns time_ns=...,input=...,output=...",
    ),
    LogFormat(
        "freeinference", "FreeInference's sessions of agents (JSON, Parquet): a row a session",
        '{"session_id": "a", "start_ms": 1, "requests": [{"start_ms": 1, "provider_tokens": '
        '{"prompt": 261, "completion": 22}}]}',
        use="", way="a row a request with --columns time_ms=start_ms,"
        "input=provider_tokens.prompt,output=provider_tokens.completion,session=session_id",
    ),
)  # fmt: skip


#: First line of such a configuration: the heading of a section.
_SECTION = re.compile("(?:load|api|data|server|storage|report|metrics|tokenizer|circuit_breakers):")
#: A line of a text log, of an access log and of an engine.
_ACCESS = re.compile(r'"(?:GET|POST) \S+ HTTP/[\d.]+"')
_ENGINE = re.compile(
    r"(?:\(\w+ pid=\d+\) )?(?:INFO|WARNING|DEBUG|ERROR) \d\d-\d\d \d\d:|\[[\d\- :]{19}[^\]]*\] \w"
)


def table_format(names: Iterable[str]) -> LogFormat | None:
    """Return the format of a table with such columns; None where it is not known."""
    there = set(names)
    for known in FORMATS:
        if known.needs and there.issuperset(known.needs):
            return known
    return None


def named_format(name: str) -> LogFormat:
    """Return a format by its name."""
    return next(known for known in FORMATS if known.name == name)


def known_formats() -> list[LogFormat]:
    """Return the formats, each once."""
    return [known for known in FORMATS if known.example]


def _first_has(entries: Any, *names: str) -> bool:
    """Whether a list of objects begins with one that has a field of ``names``."""
    first = entries[0] if isinstance(entries, list) and entries else None
    return isinstance(first, Mapping) and any(name in first for name in names)


def refused_format(text: str, record: Any) -> LogFormat | None:
    """Return the format of a file that is not read; None where it is none of those known.

    ``text``: how the file begins; ``record``: its JSON value, where it is JSON."""
    if text.lstrip().startswith(("# HELP ", "# TYPE ")):
        return named_format("prometheus metrics")
    if text.startswith("Metric,avg,min,max"):
        return named_format("aiperf summary")
    if _SECTION.fullmatch(text.rstrip()):
        return named_format("inference-perf config")
    if _ACCESS.search(text):
        return named_format("access log")
    if _ENGINE.match(text):
        return named_format("engine log")
    if not isinstance(record, Mapping):
        return None
    if "response_flags" in record or {"path", "response_code"} <= record.keys():
        return named_format("access log")
    if "resourceSpans" in record or "scopeSpans" in record:
        return named_format("opentelemetry")
    if _first_has(record.get("requests"), "provider_tokens"):
        return named_format("freeinference")
    if _first_has(record.get("experiments"), "experiment", "requests"):
        return named_format("genai-perf")
    if _first_has(record.get("data"), "payload", "payloads"):
        return named_format("aiperf inputs")
    if "avg_latency" in record or {"elapsed_time", "num_requests"} <= record.keys():
        return named_format("vllm bench totals")
    if "load_summary" in record or ("successes" in record and "failures" in record):
        return named_format("inference-perf summary")
    if any(str(name).startswith("results_number_") for name in record):
        return named_format("llmperf summary")
    metrics = ("time_to_first_token", "request_latency", "input_sequence_length")
    if any(isinstance(record.get(name), Mapping) and "avg" in record[name] for name in metrics):
        return named_format("aiperf summary")
    return None
