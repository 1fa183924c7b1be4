"""What a simulated server counts, under the names of the engine that it stands for."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eldr_sim.serving import http
from eldr_sim.serving.simulated.core import Core, Stream

#: Buckets of vLLM's histograms (vllm/v1/metrics/loggers.py).
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_E2E_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class Dialect(NamedTuple):
    """How an engine names what it counts. ``names``: by vLLM's; those left out are not there."""

    prefix: str
    names: Mapping[str, str]
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]

    def name(self, vllm: str) -> str | None:
        """Return the whole name of what vLLM calls so; None where the engine has none."""
        own = self.names.get(vllm, vllm if self.prefix == "vllm:" else None)
        return None if own is None else self.prefix + own


#: SGLang's names and buckets: sglang/srt/metrics/collector.py.
_SGLANG = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_cache_hits": "cached_tokens",
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage",
}
_SGLANG_TTFT_S = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0,
    400.0,
)  # fmt: skip
_SGLANG_ITL_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2,
    0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
)  # fmt: skip
DIALECTS = {
    "vllm": Dialect("vllm:", {}, _TTFT_S, _ITL_S, _E2E_S),
    "sglang": Dialect("sglang:", _SGLANG, _SGLANG_TTFT_S, _SGLANG_ITL_S,
                      (*_SGLANG_TTFT_S, 600.0, 1200.0, 1800.0, 2400.0)),
}  # fmt: skip


class Metrics(http.Registry):
    """Counters, histograms and gauges of a core, in simulated time, under SGLang's names where it
    simulates SGLang and vLLM's otherwise; ``eldr_sim_lag_seconds``: tokens' delay on the wall
    clock. Raises InputError without prometheus-client.

    ``adapters``: names of LoRA adapters that are served."""

    def __init__(self, model: str, engine: str = "vllm", adapters: Sequence[str] = ()) -> None:
        super().__init__("serve")
        self._model, self._adapters = model, adapters
        self._dialect = dialect = DIALECTS.get(engine, DIALECTS["vllm"])
        self._core: Core | None = None
        #: What is collected besides: of KV events.
        self.more: Callable[[], Iterable[Any]] = tuple

        own = {"model_name": model} | ({"engine": "0"} if dialect.prefix == "vllm:" else {})
        self._own = tuple(own.values())

        def made(kind: Any, vllm: str, text: str, labels: list[str], **more: Any) -> Any:
            name = dialect.name(vllm)
            return None if name is None else kind(
                name, text, [*own, *labels], registry=self.registry, **more
            )  # fmt: skip

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Callable[[float], None]:
            found = made(self.library.Histogram, name, text, [], buckets=buckets)
            observe: Callable[[float], None] = _nothing if found is None else (
                found.labels(*self._own).observe
            )  # fmt: skip
            return observe

        def counter(name: str, text: str) -> Callable[[float], None]:
            found = made(self.library.Counter, name, text, [])
            return _nothing if found is None else found.labels(*self._own).inc

        self._ttft = histogram(
            "time_to_first_token_seconds", "Time to first token.", dialect.ttft_s
        )
        tpot = "request_time_per_output_token_seconds"
        self._tpot = histogram(tpot, "Time an output token of a request.", dialect.itl_s)
        self._itl = histogram("inter_token_latency_seconds", "Between tokens.", dialect.itl_s)
        self._e2e = histogram("e2e_request_latency_seconds", "Of whole requests.", dialect.e2e_s)
        self._queue, self._prefill, self._decode, self._inference = (
            histogram(f"request_{part}_time_seconds", f"Time in {part}.", dialect.e2e_s)
            for part in ("queue", "prefill", "decode", "inference")
        )
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self._output = histogram("request_generation_tokens", "Output tokens.", _TOKENS)
        self._prompts = counter("prompt_tokens", "Prompt tokens.")
        self._outputs = counter("generation_tokens", "Output tokens.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found.")
        self._preemptions = counter("num_preemptions", "Preemptions.")
        text, kind = "Requests by their end.", self.library.Counter
        self._success = made(kind, "request_success", text, ["finished_reason"])
        self._requests = self._aborted = _nothing
        if dialect.prefix == "sglang:":
            ends = [kind(f"sglang:num_{name}requests", text, ["model_name"], registry=self.registry)
                    for name in ("", "aborted_")]  # fmt: skip
            self._requests, self._aborted = (end.labels(model).inc for end in ends)
        self.lag = self.library.Histogram(
            "eldr_sim_lag_seconds", "What tokens left late.", registry=self.registry,
            buckets=_LAG_S,
        ).observe  # fmt: skip

    def watch(self, core: Core) -> None:
        """Count what a core serves, and look at its engines on each request."""
        self._core = core
        core.ended = self._ended
        self.registry.register(self)

    def _ended(self, stream: Stream, outcome: str) -> None:
        assert self._core is not None
        record = self._core.cluster.requests[stream.number]
        self._outputs(stream.given)
        self._preemptions(float(record["preemptions"]))
        completed = outcome == "completed"
        if self._success is not None:
            reason = stream.reason if completed else "abort"
            self._success.labels(*self._own, reason).inc()
        self._requests(1.0)
        if not completed:
            self._aborted(1.0)
            return
        self._prompts(stream.prompt_len)
        if self._core.config.engine.enable_prefix_caching:
            self._queries(stream.prompt_len)
            self._hits(self._core.cached_tokens(stream))
        self._prompt(stream.prompt_len)
        self._output(stream.output_len)
        begins = "decode_start_s" if self._core.role == "decode" else "prefill_start_s"
        moments = (record[name] for name in ("arrival_s", begins, "first_token_s", "finish_s"))
        arrival, begun, first, last = map(float, moments)
        self._ttft(first - arrival)
        self._e2e(last - arrival)
        self._queue(begun - arrival)
        self._prefill(first - begun)
        self._decode(last - first)
        self._inference(last - begun)
        if stream.output_len > 1:
            self._tpot((last - first) / (stream.output_len - 1))
        before = first
        for index, (tokens, at) in enumerate(stream.times_s):
            gaps = tokens - (index == 0)  # before the first token there is none
            for _ in range(gaps):
                self._itl((at - before) / gaps)
            before = at

    def collect(self) -> Iterator[Any]:
        """Yield the gauges, for the registry."""
        from prometheus_client.core import GaugeMetricFamily

        assert self._core is not None
        name_of, labels = self._dialect.name, ["model_name", "engine"]
        gauges = [
            GaugeMetricFamily(str(name_of(vllm)), text, labels=labels)
            for vllm, text in (
                ("num_requests_running", "Requests that run."),
                ("num_requests_waiting", "Requests that wait."),
                ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all."),
            )
        ]
        size, blocks = self._core.config.engine.block_size, self._core.kv_blocks()
        engines = self._core.engines()
        for number, figures in enumerate(engines):
            for gauge, figure in zip(gauges, figures, strict=True):
                gauge.add_metric([self._model, str(number)], figure)
        yield from gauges
        yield from self.more()
        if self._dialect.prefix == "sglang:":
            texts = {"num_used_tokens": "Tokens in KV blocks.", "max_total_num_tokens": "All."}
            used, room = (
                GaugeMetricFamily(f"sglang:{name}", text, labels=labels)
                for name, text in texts.items()
            )
            for number, (figures, n) in enumerate(zip(engines, blocks, strict=True)):
                used.add_metric([self._model, str(number)], round(figures[2] * n) * size)
                room.add_metric([self._model, str(number)], n * size)
            yield from (used, room)
            return
        known = ["engine", "block_size", "num_gpu_blocks"]
        cache = GaugeMetricFamily("vllm:cache_config_info", "Of the KV cache.", labels=known)
        for number, n in enumerate(blocks):
            cache.add_metric([str(number), str(size), str(n)], 1.0)
        yield cache
        if self._adapters:
            streams = list(self._core.open.values())
            running = ",".join(sorted({s.adapter for s in streams if s.adapter}))
            known = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
            lora = GaugeMetricFamily("vllm:lora_requests_info", "Of adapters.", labels=known)
            lora.add_metric([str(len(self._adapters)), running, ""], time.time())
            yield lora


def _nothing(_value: float) -> None:
    """Count nothing: the engine has no such metric."""
