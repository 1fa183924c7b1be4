"""What engines publish at ``/metrics``, under vLLM's names, and its readers."""

import asyncio
import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from eldr_sim.errors import InputError, needed
from eldr_sim.serving.http import import_aiohttp
from eldr_sim.serving.router.decisions import EngineSignals, Router

_NAMES = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
_CACHE = "vllm:cache_config_info"
_FIRST = (*(f"vllm:{name}" for name in _NAMES), _CACHE)
#: Largest text that is read, bytes; a vLLM engine's has some 100 KB.
_MOST_BYTES = 4 << 20
#: Largest numbers of requests, and of tokens of a KV cache, that are believed.
_MOST, _MOST_TOKENS = 1 << 31, 1 << 44
#: Metrics older than this and ten intervals do not count: the router's own counts stand in, s.
_STALE_S = 3.0


def parse_metrics(text: str) -> EngineSignals:
    """Return what an engine says in Prometheus' format, data-parallel ones added up (KV usage:
    mean). Other metrics are not looked at. Raises InputError if a metric or prometheus-client is
    missing, or a value is not possible."""
    parser = needed("prometheus_client.parser", "live run")
    values: dict[str, list[float]] = {}
    n_tokens = 0
    lines = [line for line in text.split("\n") if line.startswith(_FIRST)]
    try:
        for family in parser.text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                values.setdefault(sample.name, []).append(sample.value)
                if sample.name == _CACHE:
                    sizes = [_count(sample.labels, n) for n in ("num_gpu_blocks", "block_size")]
                    n_tokens += prod(sizes)
    except InputError:
        raise
    except Exception as error:  # the parser raises ValueError, IndexError, KeyError and others
        raise InputError("metrics", f"not Prometheus' format: {error}"[:200]) from None
    try:
        gauges = [values[f"vllm:{name}"] for name in _NAMES]
    except KeyError as missing:
        raise InputError("metrics", f"{missing} is missing", "those of a vLLM engine") from None
    for name, each, most in zip(_NAMES, gauges, (_MOST, _MOST, 1.001), strict=True):
        for value in each:
            if not 0 <= value <= most:  # neither where it is NaN
                raise InputError("metrics", f"{name} is {str(value)[:20]}", f"0 to {most:g}")
    waiting, running, usage = gauges
    share = min(1.0, sum(usage) / len(usage))
    n_tokens = n_tokens if n_tokens <= _MOST_TOKENS else 0
    return EngineSignals(int(sum(waiting)), int(sum(running)), share, round(share * n_tokens))


def _count(labels: dict[str, str], name: str) -> int:
    """Return a label that is a number; 0 for others, such as ``None`` before it is known."""
    text = labels.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


class SignalWatch:
    """The metrics of the engines of a pool, read from each every ``interval_s``. ``problem``:
    called with an engine's index and what was wrong, None when it is right again."""

    def __init__(
        self,
        router: Router,
        urls: Sequence[str],
        interval_s: float,
        problem: Callable[[int, str | None], None],
    ) -> None:
        self._router, self._urls, self._interval_s = router, urls, interval_s
        self._problem = problem
        self._latest: list[EngineSignals | None] = [None] * len(urls)
        self._read_s = [-math.inf] * len(urls)

    async def read(self, session: Any, engine: int) -> None:
        """Read an engine's metrics until cancelled; another that is slow does not delay it."""
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            try:
                self._latest[engine] = await self._ask(session, engine)
                self._read_s[engine] = loop.time()
                self._problem(engine, None)
            except (InputError, UnicodeError) as error:
                self._latest[engine] = None
                self._problem(engine, str(error))
            await asyncio.sleep(max(0.0, self._interval_s - (loop.time() - begun_s)))

    async def publish(self) -> None:
        """Tell the router what was read, every interval, until cancelled. What an engine said
        before stands for a while if it does not answer; then the requests that the router has sent
        there count as running."""
        stale_s = max(_STALE_S, 10 * self._interval_s)
        while True:
            now_s = asyncio.get_running_loop().time()
            told = []
            for engine, signals in enumerate(self._latest):
                if signals is None and now_s - self._read_s[engine] > stale_s:
                    load = int(self._router.workers.loads[engine])
                    signals = EngineSignals(0, load, 0.0, 0)
                told.append(signals)
            self._router.publish(told)
            self._latest = [None] * len(self._urls)
            await asyncio.sleep(self._interval_s)

    async def _ask(self, session: Any, engine: int) -> EngineSignals:
        """Return what an engine publishes; raises InputError if it does not answer as one."""
        aiohttp = import_aiohttp()
        limit = aiohttp.ClientTimeout(total=max(1.0, self._interval_s))
        try:
            address = self._urls[engine].rstrip("/") + "/metrics"
            async with session.get(address, timeout=limit, allow_redirects=False) as response:
                if response.status != 200:
                    raise InputError("metrics", f"status {response.status}", "200")
                text = bytearray()
                async for part in response.content.iter_any():
                    text += part
                    if len(text) > _MOST_BYTES:
                        raise InputError("metrics", f"more than {_MOST_BYTES >> 20} MiB")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise InputError("metrics", type(error).__name__) from None
        return parse_metrics(text.decode("utf-8", errors="replace"))
