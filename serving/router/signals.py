"""What live engines publish of themselves: vLLM's ``/metrics``, as a router sees them."""

import asyncio
from collections.abc import Sequence
from math import prod
from typing import Any

from eldr_sim.errors import InputError, needed
from eldr_sim.serving.http import import_aiohttp
from eldr_sim.serving.router.decisions import EngineSignals, Router


def parse_metrics(text: str) -> EngineSignals:
    """Return what an engine says in Prometheus' text format.

    The engines of one server (data parallel) are added up; their KV usage is the mean. Raises
    InputError if a metric is missing, or prometheus-client is not installed.
    """
    parser = needed("prometheus_client.parser", "live run")
    values: dict[str, list[float]] = {}
    n_tokens = 0
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == "vllm:cache_config_info":
                said = [sample.labels.get(name, "0") for name in ("num_gpu_blocks", "block_size")]
                n_tokens += prod(map(int, said)) if all(map(str.isdigit, said)) else 0
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    try:
        waiting, running, usage = (values[f"vllm:{name}"] for name in names)
    except KeyError as missing:
        raise InputError("metrics", f"{missing} is not there", "those of a vLLM engine") from None
    share = sum(usage) / len(usage)
    return EngineSignals(int(sum(waiting)), int(sum(running)), share, round(share * n_tokens))


async def watch_engines(
    session: Any, urls: Sequence[str], router: Router, interval_s: float
) -> None:
    """Tell a router what its engines publish, every ``interval_s`` seconds, until cancelled.

    Of an engine that does not answer within the interval (a second at least) what it said before
    stands; whether it is healthy is told by others.

    ``session``: an ``aiohttp.ClientSession``; ``urls``: the engines, in the router's order.
    """
    while True:
        found = await asyncio.gather(*(_ask(session, url, max(1.0, interval_s)) for url in urls))
        router.publish(found)
        await asyncio.sleep(interval_s)


async def _ask(session: Any, url: str, timeout_s: float) -> EngineSignals | None:
    """Return what an engine publishes; None if it does not answer as one."""
    aiohttp = import_aiohttp()
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(url.rstrip("/") + "/metrics", timeout=limit) as response:
            return parse_metrics(await response.text()) if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, OSError, InputError):
        return None
