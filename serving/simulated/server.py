"""HTTP: OpenAI's completions and chat, of tokens that a simulated cluster generates. ``/metrics``
says of its engines what vLLM's does, under the same names."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from eldr_sim.kernel_profiles.profile.front_end import open_tokenizer
from eldr_sim.serving import http
from eldr_sim.serving.router.bodies import Ask, parse_body
from eldr_sim.serving.simulated.core import Core, Stream
from eldr_sim.simulator.setup.config.run_config import RunConfig

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


class Metrics(http.Registry):
    """Counters, histograms and gauges of a core, in simulated time; ``eldr_sim_lag_seconds``:
    tokens' delay on the wall clock. Raises InputError without prometheus-client."""

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
        if self._core.config.engine.enable_prefix_caching:
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
        size = str(self._core.config.engine.block_size)
        told = zip(self._core.cluster.engines(), self._core.cluster.kv_blocks(), strict=True)
        for number, (figures, blocks) in enumerate(told):
            for gauge, figure in zip(gauges, figures, strict=True):
                gauge.add_metric([self._model, str(number)], figure)
            cache.add_metric([str(number), size, str(blocks)], 1.0)
        yield from (*gauges, cache)


#: Letters of a text that are taken for a token where there is no tokenizer, as of each of ours.
_LETTERS = 4
_WORD = " tok"
#: Seconds that requests in flight have after SIGTERM.
_DRAIN_S = 30.0


class Service:
    """One port: a cluster behind OpenAI's paths. ``speed``: simulated seconds a second;
    ``max_queue``: beyond so many that wait the answer is 429; ``start_up_s``: not healthy so long;
    ``tokenizer``: a ``tokenizer.json``, else four characters are a token; ``log``: see
    `core.replay`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        speed: float = 1.0,
        max_queue: int | None = None,
        start_up_s: float = 0.0,
        tokenizer: Path | None = None,
        log: Path | None = None,
    ) -> None:
        http.import_aiohttp()
        self.model = str(config.engine.model)
        self.metrics = Metrics(self.model)
        self._files = ExitStack()
        file = None if log is None else self._files.enter_context(http.open_log(log))
        self.core = Core(config, speed=speed, log=file, lag=self.metrics.lag)
        self.metrics.watch(self.core)
        self._max_queue, self._start_up_s = max_queue, start_up_s
        self._tokenizer = None if tokenizer is None else open_tokenizer(tokenizer, "tokenizer")
        self._begun, self.draining = math.inf, False

    def app(self) -> Any:
        """Return the ``aiohttp.web.Application``; its runner needs ``handler_cancellation``."""
        asked = {"models": self._models, "health": self._health, "metrics": self.metrics.answer}
        return http.application(self._run, self._complete, **asked)

    async def _run(self, _app: Any) -> AsyncIterator[None]:
        self._begun = time.monotonic()
        self.core.start()
        with self._files:
            yield

    @property
    def healthy(self) -> bool:
        """Whether it has started up and is not told to stop."""
        return not self.draining and time.monotonic() >= self._begun + self._start_up_s

    async def _health(self, _request: Any) -> Any:
        from aiohttp import web

        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _request: Any) -> Any:
        from aiohttp import web

        longest = self.core.simulation.max_model_len
        one = {"id": self.model, "object": "model", "created": int(time.time())}
        one |= {"owned_by": "eldr-sim", "root": self.model, "max_model_len": longest}
        return web.json_response({"object": "list", "data": [one]})

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        if not self.healthy:
            return http.error_answer(503, "starts up or stops", {"Retry-After": "1"})
        try:
            asked = parse_body(await request.read(), handed_over=True)
            prompt = self._prompt(asked)
            prompt_len = self._tokens(prompt)
            least, most = self._limits(asked, prompt_len)
        except (ValueError, web.RequestPayloadError) as error:
            return http.error_answer(400, str(error))
        if self._max_queue is not None and self.core.waiting >= self._max_queue:
            return http.error_answer(
                429, f"{self.core.waiting} requests wait", {"Retry-After": "1"}
            )
        stream = self.core.submit(prompt_len, least, most, partial(self._prefix, prompt))
        chat = request.path.endswith("chat/completions")
        answer = _Answer(chat, self.model, asked, stream, self.core.cached_tokens)
        try:
            if asked.streamed:
                return await answer.stream(request)
            return await answer.whole()
        finally:
            self.core.cancel(stream)

    def _prompt(self, asked: Ask) -> str | list[int]:
        """Return a prompt: its token ids, or its text where there is no tokenizer."""
        prompt: Any = asked.body.get("prompt")
        if asked.prompt_len:
            return list(prompt)
        text = "".join(map(_text_of, asked.body["messages"])) if prompt is None else str(prompt)
        return text if self._tokenizer is None else list(self._tokenizer.encode(text).ids)

    def _tokens(self, prompt: str | list[int]) -> int:
        return max(1, math.ceil(len(prompt) / (_LETTERS if isinstance(prompt, str) else 1)))

    def _prefix(self, prompt: str | list[int], output_len: int) -> list[bytes]:
        """Return a digest of each whole block of a prompt and, if it is text, of its answer."""
        size = self.core.config.engine.block_size
        if isinstance(prompt, str):
            prompt, size = prompt + _WORD * output_len, _LETTERS * size
        parts = (prompt[at : at + size] for at in range(0, len(prompt) - size + 1, size))
        return [hashlib.blake2b(repr(part).encode(), digest_size=16).digest() for part in parts]

    def _limits(self, asked: Ask, prompt_len: int) -> tuple[int, int]:
        """Return the fewest and the most tokens of an answer."""
        body, longest = asked.body, self.core.simulation.max_model_len
        if body.get("model") not in (None, self.model):
            raise ValueError(f"model: {body['model']!r} is not served (allowed: {self.model})")
        most = longest - prompt_len if asked.max_tokens is None else asked.max_tokens
        if most < 1 or prompt_len + most > longest:
            wanted = "" if asked.max_tokens is None else f" and {most} output tokens"
            raise ValueError(f"context length {longest}: {prompt_len} prompt tokens{wanted}")
        least = most if body.get("ignore_eos") and asked.max_tokens else body.get("min_tokens") or 1
        return least, most


class _Answer:
    """The words of one answer."""

    def __init__(
        self, chat: bool, model: str, asked: Ask, stream: Stream, cached: Callable[[Stream], int]
    ) -> None:
        self._chat, self._asked, self._stream, self._cached = chat, asked, stream, cached
        self._kind = "chat.completion" if chat else "text_completion"
        prefix = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{prefix}-{stream.number}", "created": int(time.time())}
        self._head |= {"model": model}

    async def whole(self) -> Any:
        """Wait for the end, and answer with everything."""
        from aiohttp import web

        while not isinstance(outcome := await self._stream.tokens.get(), str):
            pass
        if outcome != "completed":
            return http.error_answer(*_failed(outcome))
        text = _WORD * self._stream.output_len
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self._stream.reason,
            "logprobs": None,
        }
        message = {"role": "assistant", "content": text}
        choice |= {"message": message} if self._chat else {"text": text}
        body = self._head | {"object": self._kind, "choices": [choice], "usage": self._usage()}
        return web.json_response(body)

    async def stream(self, request: Any) -> Any:
        """Answer token by token."""
        from aiohttp import web

        options = self._asked.body.get("stream_options") or {}
        each = bool(options.get("continuous_usage_stats"))
        first = await self._stream.tokens.get()
        if isinstance(first, str):
            return http.error_answer(*_failed(first))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        part: int | str = first
        n, role = 0, {"role": "assistant"} if self._chat else {}
        usual = _event(self._piece(_WORD))
        while not isinstance(part, str):
            n += part
            last = n == self._stream.output_len
            if last or each or role or part > 1:
                piece = self._piece(_WORD * part, self._stream.reason if last else None, role)
                if each:
                    piece["usage"] = self._usage(n)
                await response.write(_event(piece))
            else:
                await response.write(usual)
            role, part = {}, await self._stream.tokens.get()
        if part != "completed":
            await response.write(_event(http.error_body(*_failed(part))))
        elif options.get("include_usage"):
            usage = self._piece() | {"choices": [], "usage": self._usage()}
            await response.write(_event(usage))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _piece(
        self, text: str = "", reason: str | None = None, role: dict[str, str] | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"delta": {**(role or {}), "content": text}} if self._chat else {"text": text}
        kind = f"{self._kind}.chunk" if self._chat else self._kind
        return self._head | {"object": kind, "choices": [choice]}

    def _usage(self, n: int | None = None) -> dict[str, Any]:
        prompt, output = self._stream.prompt_len, self._stream.output_len if n is None else n
        tokens = {"prompt_tokens": prompt, "completion_tokens": output}
        details = {"cached_tokens": self._cached(self._stream)}
        return tokens | {"total_tokens": prompt + output, "prompt_tokens_details": details}


def _event(piece: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(piece).encode() + b"\n\n"


def _failed(outcome: str) -> tuple[int, str]:
    """Return status and message of a request that has not completed."""
    return 400 if outcome.startswith("exceeds") else 503, outcome.replace("_", " ")


def _text_of(message: Any) -> str:
    """Return the text of a chat message; ValueError where it is none."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if content is not None and not isinstance(content, str):
        raise ValueError("messages: content is no text")
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError("messages: each is an object with role and content")
    return content or ""


def serve(
    services: Sequence[Service], host: str, ports: Sequence[int], announce: Callable[[str], None]
) -> None:
    """Serve until told to stop, requests in flight or not; InputError if an address is taken."""
    http.allow_files()
    asyncio.run(_serve(services, [http.listen(host, port) for port in ports], announce))


async def _serve(
    services: Sequence[Service], sockets: Sequence[Any], announce: Callable[[str], None]
) -> None:
    import signal

    from aiohttp import web

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runners, how = [], {"handler_cancellation": True, "access_log": None, "shutdown_timeout": 1.0}
    for service, listening in zip(services, sockets, strict=True):
        runners.append(web.AppRunner(service.app(), **how))
        await runners[-1].setup()
        await web.SockSite(runners[-1], listening).start()
        cluster = f"{service.model}, {service.core.config.cluster.topology}"
        announce(f"Serving {cluster}, at {http.url_of(listening)}")
    failures = [service.core.failure for service in services]
    waits: list[Any] = [*failures, asyncio.ensure_future(stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for service in services:
        service.draining = True
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while stop.is_set() and any(service.core.open for service in services):
                await asyncio.sleep(0.02)
    for runner in runners:
        await runner.cleanup()
    for failure in failures:
        if failure is not None and failure.done():
            failure.result()
