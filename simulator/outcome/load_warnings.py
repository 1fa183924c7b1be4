"""Warnings of loads under which published runs differ from simulated ones, for known reasons."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from eldr_sim.kernel_profiles.tables.library import before
from eldr_sim.simulator.outcome.error_band import LOADS
from eldr_sim.simulator.setup.config.groups import ServiceLevel
from eldr_sim.simulator.setup.config.requests import WorkloadConfig
from eldr_sim.traces.workload import Workload

#: The oldest versions whose published runs are behind the error bands
#: (``validation/published/rows/runs.csv``); tables are of newer ones.
_OLDEST: Mapping[str, tuple[int, ...]] = {"vllm": (0, 9), "sglang": (0, 4, 6), "trtllm": (1, 2)}


def load_warnings(
    requests: WorkloadConfig,
    workload: Workload,
    band: Mapping[str, Any],
    level: ServiceLevel,
    version: str | None,
) -> Iterator[str]:
    """Yield a line for more requests in flight than engines were compared with, and for requests
    that are all alike; for a ``version`` of the engine that is older than all compared ones; and
    for a bound of ``level`` on TPOT that bounds nothing."""
    engine = band["kind"]["engine"]
    if before(version, *_OLDEST[engine]):
        yield (
            f"{engine} {version} is older than all runs behind the error band "
            f"({'.'.join(map(str, _OLDEST[engine]))}) and all tables: engines of February 2025 "
            "took 1.6 to 4 times the predicted TPOT with DeepSeek-R1, and 2 to 8 times the TTFT"
        )
    if level.tpot is not None and workload.output_len.max() == 1:
        yield (
            f"every answer is one token and has no TPOT: the bound of {level.tpot:g} ms is met by "
            "all of them and decides nothing; bound ttft or e2el"
        )
    if band["kind"]["load"] == LOADS[-1][1]:
        cells = [f"{name.upper()} {band[name]['low']:.2g} to {band[name]['high']:.2g} times"
                 for name in ("ttft", "tpot")]  # fmt: skip
        yield (
            f"more than {LOADS[-2][0]} requests in flight on a worker: API server and client then "
            "set the pace of published runs, and are simulated as one core a server; 80% of the "
            f"{band['tpot']['rows']} such runs measured {', '.join(cells)} the predicted"
        )
    together = requests.max_concurrency or 1
    at_once = requests.effective_rate is not None and math.isinf(requests.effective_rate)
    prompts, outputs = workload.prompt_len, workload.output_len
    if (
        at_once
        and 1 < together < len(workload)
        and prompts.min() == prompts.max()
        and outputs.min() == outputs.max()
    ):
        yield (
            f"all requests have {int(prompts[0])} prompt and {int(outputs[0])} output tokens and "
            "begin together: they run in waves, and milliseconds decide how latency divides into "
            "TTFT and TPOT, so compare E2EL or throughput; where these are means, give "
            "--random-range-ratio or a log of their lengths"
        )
