"""Queue orders beside each other: loads in order of arrival, and the shortest prompt first."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from eldr_sim.validation.live.comparison import LiveComparison, noise_floor
from eldr_sim.validation.live.live_run import LiveRun

Row = dict[str, Any]

FIGURES = ("mean wait", "mean TTFT", "p99 TTFT", "TTFT of the longest 5% of prompts")
"""What the orders are compared by."""
_LONGEST = 0.95


def queue_orders(runs: Sequence[LiveRun], compared: LiveComparison) -> list[Row]:
    """Return shortest first against first come, first served, a row a load and figure.

    Returns list of dict: ``setup``, ``load``, ``figure``; ``repeats`` of both orders;
    ``live_fcfs_ms``, ``live_sjf_ms``, ``simulated_fcfs_ms``, ``simulated_sjf_ms``: means over them;
    ``live_percent``, ``simulated_percent``: mean change, of repeats of the same number, which ran
    one after the other; ``noise_percent``: mean difference between the live changes of two repeats,
    in points; ``error_points``: simulated less live change.
    """
    orders = {(run.info.setup, run.info.load.name): run.info.load.queue_order for run in runs}
    values: dict[tuple[str, str, str], dict[tuple[str, int], tuple[float, float]]]
    values = defaultdict(dict)
    frame = compared.requests.to_pandas()
    waits = {
        (row["setup"], row["load"], row["repeat"]): (row["live_ms"], row["simulated_ms"])
        for row in compared.summary["components"]
        if (row["of"], row["component"]) == ("e2el", "queue") and row["repeat"] is not None
    }
    for (setup, load, repeat), own in frame.groupby(["setup", "load", "repeat"], sort=False):
        order = orders[setup, load]
        base = load.removesuffix(", sjf")
        pairs = [waits[setup, load, repeat], *_ttft(own)]
        for figure, pair in zip(FIGURES, pairs, strict=True):
            values[setup, base, figure][order, repeat] = pair
    rows = []
    for (setup, load, figure), found in values.items():
        both = [k for order, k in found if order == "sjf" and ("fcfs", k) in found]
        if not both:
            continue
        fcfs, sjf = (np.array([found[order, k] for k in both]) for order in ("fcfs", "sjf"))
        change = 100.0 * (sjf / fcfs - 1.0)
        live, simulated = change.mean(axis=0).tolist()
        noise = noise_floor((100.0 + change[:, 0]).tolist())
        rows.append(
            {
                "setup": setup,
                "load": load,
                "figure": figure,
                "repeats": len(both),
                "live_fcfs_ms": float(fcfs[:, 0].mean()),
                "live_sjf_ms": float(sjf[:, 0].mean()),
                "simulated_fcfs_ms": float(fcfs[:, 1].mean()),
                "simulated_sjf_ms": float(sjf[:, 1].mean()),
                "live_percent": live,
                "simulated_percent": simulated,
                "noise_percent": None if noise is None else noise * (100.0 + live) / 100.0,
                "error_points": simulated - live,
            }
        )
    return rows


def _ttft(requests: pd.DataFrame) -> list[tuple[float, float]]:
    """Return mean and p99 of TTFT, and its mean over the longest prompts: live, simulated."""
    columns = [requests["live_ttft_ms"], requests["simulated_ttft_ms"]]
    longest = requests["prompt_len"] >= requests["prompt_len"].quantile(_LONGEST)
    of: tuple[Callable[[Any], float], ...] = (
        lambda column: float(column.mean()),
        lambda column: float(column.quantile(0.99)),
        lambda column: float(column[longest].mean()),
    )
    return [(figure(columns[0]), figure(columns[1])) for figure in of]
