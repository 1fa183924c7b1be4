"""What vLLM's ``/metrics`` says, of simulated engines, under its names."""

from collections.abc import Iterator
from typing import Any

from eldr_sim.serving.http import Registry
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


class Metrics(Registry):
    """Counters and histograms of what a core has served, and gauges of its engines as they are.

    Times are simulated; ``eldr_sim_lag_seconds`` is what tokens left late, of the wall clock.
    Raises InputError if prometheus-client is not installed.
    """

    def __init__(self, model: str) -> None:
        super().__init__("serve")
        self._model = model
        self._core: Core | None = None

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = self.library.Histogram(
                f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
            )
            return made.labels(model).observe

        def counter(name: str, text: str, *labels: str) -> Any:
            known = ["model_name", *labels]
            return self.library.Counter(f"vllm:{name}", text, known, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", _TTFT_S)
        tpot = "request_time_per_output_token_seconds"
        self._tpot = histogram(tpot, "Time an output token of a request.", _ITL_S)
        self._itl = histogram("inter_token_latency_seconds", "Between tokens.", _ITL_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Of whole requests.", _E2E_S)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self._output = histogram("request_generation_tokens", "Output tokens.", _TOKENS)
        self._prompts = counter("prompt_tokens", "Prompt tokens.").labels(model)
        self._outputs = counter("generation_tokens", "Output tokens.").labels(model)
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up.").labels(model)
        self._hits = counter("prefix_cache_hits", "Prompt tokens found.").labels(model)
        self._success = counter("request_success", "Requests by their end.", "finished_reason")
        self.lag = self.library.Histogram(
            "eldr_sim_lag_seconds", "What tokens left late.", registry=self.registry,
            buckets=_LAG_S,
        ).observe  # fmt: skip

    def watch(self, core: Core) -> None:
        """Count what a core serves, and look at its engines whenever somebody asks."""
        self._core = core
        core.ended = self._ended
        self.registry.register(self)

    def _ended(self, stream: Stream, outcome: str) -> None:
        assert self._core is not None
        record = self._core.cluster.requests[stream.number]
        self._outputs.inc(stream.given)
        if outcome != "completed":
            self._success.labels(self._model, "abort").inc()
            return
        self._success.labels(self._model, stream.reason).inc()
        self._prompts.inc(stream.prompt_len)
        if self._core.config.enable_prefix_caching:
            self._queries.inc(stream.prompt_len)
            self._hits.inc(self._core.cached_tokens(stream))
        self._prompt(stream.prompt_len)
        self._output(stream.output_len)
        moments = (record[name] for name in ("arrival_s", "first_token_s", "finish_s"))
        arrival, first, last = map(float, moments)
        self._ttft(first - arrival)
        self._e2e(last - arrival)
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
        labels = ["model_name", "engine"]
        gauges = [
            GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
            for name, text in (
                ("num_requests_running", "Requests that run."),
                ("num_requests_waiting", "Requests that wait."),
                ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all."),
            )
        ]
        labels = ["engine", "block_size", "num_gpu_blocks"]
        cache = GaugeMetricFamily("vllm:cache_config_info", "Of the KV cache.", labels=labels)
        size = str(self._core.config.block_size)
        told = zip(self._core.cluster.engines(), self._core.cluster.kv_blocks(), strict=True)
        for number, (figures, blocks) in enumerate(told):
            for gauge, figure in zip(gauges, figures, strict=True):
                gauge.add_metric([self._model, str(number)], figure)
            cache.add_metric([str(number), size, str(blocks)], 1.0)
        yield from (*gauges, cache)
