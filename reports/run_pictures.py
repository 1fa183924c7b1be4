"""Pictures of one run, or of several side by side in the colours of their policies; and a run as a
Chrome trace, for ui.perfetto.dev and chrome://tracing: a track per worker with its steps, counters
of batch and activated experts, slices per request, an arrow for each KV transfer; times in us."""

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from eldr_sim.arrays import Floats
from eldr_sim.kinds import AnyPath, Row
from eldr_sim.reports.folders import Folder
from eldr_sim.reports.pictures import N_COLOURS, Colours, Picture, Series, curves, stacked_bars
from eldr_sim.simulator.outcome.bottleneck import IN_LINE, WITHOUT

_ROLES = {"prefill": 1, "decode": 2}
_REQUESTS = 3


def timeline_events(requests: pa.Table, steps: pa.Table) -> list[Row]:
    """Return the events of a run's tables (see :mod:`eldr_sim.simulator.outcome.tables`)."""
    events = [_meta("process_name", pid, 0, f"{role} workers") for role, pid in _ROLES.items()]
    events.append(_meta("process_name", _REQUESTS, 0, "requests"))
    named: set[tuple[int, int]] = set()
    for step in steps.to_pylist():
        pid, tid = _ROLES[step["role"]], step["worker"]
        if (pid, tid) not in named:
            named.add((pid, tid))
            events.append(_meta("thread_name", pid, tid, f"{step['role']} {tid}"))
        at = {"ts": _us(step["start_s"]), "pid": pid}
        args = {"batch": step["batch"], "tokens": step["tokens"]}
        if step["role"] == "decode":
            counters = {"batch": step["batch"]}
            if step["active_experts"] is not None:  # a dense model's
                counters["active_experts"] = round(step["active_experts"], 2)
            args |= {"context_tokens": step["context_tokens"]} | counters
            events.append({"name": f"decode {tid}", "ph": "C", **at, "args": counters})
        took = {"dur": _us(step["end_s"] - step["start_s"]), "tid": tid, "args": args}
        events.append({"name": "step", "cat": step["role"], "ph": "X", **at, **took})
    for request in requests.to_pylist():
        events.extend(_request_events(request))
    return events


def write_timeline(path: AnyPath, requests: pa.Table, steps: pa.Table) -> None:
    """Write the Chrome trace JSON of a run."""
    document = {"traceEvents": timeline_events(requests, steps), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


#: What a request does until it decodes, by the times that bound it.
PHASES = (
    ("front end", "sent_s", "tokenized_s"),
    ("prefill queue", "tokenized_s", "load_start_s"),
    ("KV load", "load_start_s", "prefill_start_s"),
    ("prefill", "prefill_start_s", "prefill_end_s"),
    ("handoff", "prefill_end_s", "transfer_start_s"),
    ("KV transfer", "transfer_start_s", "transfer_end_s"),
    ("decode queue", "transfer_end_s", "decode_start_s"),
)
DECODE = ("decode_start_s", "finish_s")


def phases_in(columns: Container[str]) -> list[tuple[str, str, str]]:
    """Return the `PHASES` of a run with these columns of requests."""

    def own(key: str) -> str:
        return key if key in columns else WITHOUT.get(key, key)

    return [phase for phase in PHASES if own(phase[1]) != own(phase[2])]


def _request_events(request: dict[str, Any]) -> list[Row]:
    name, ident = f"request {request['request_id']}", request["request_id"]
    events: list[Row] = []
    phases = phases_in(request)
    request = {key: request[own] for key, own in WITHOUT.items()} | request
    for phase, start, end in (*phases, ("decode", *DECODE)):
        if request[start] is None or request[end] is None:
            continue
        common = {"cat": "request", "id": ident, "pid": _REQUESTS, "tid": 0, "name": phase}
        args = {"request": name, "domain": request["domain"], "tokens": request["output_len"]}
        events.append({**common, "ph": "b", "ts": _us(request[start]), "args": args})
        events.append({**common, "ph": "e", "ts": _us(request[end])})
        if phase == "KV transfer":
            flow = {"cat": "KV transfer", "id": ident, "name": "KV transfer"}
            source, target = request["prefill_worker"], request["decode_worker"]
            events.append({**flow, "ph": "s", "ts": _us(request[start]), "pid": 1, "tid": source})
            ends = {"ph": "f", "bp": "e", "ts": _us(request[end]), "pid": 2, "tid": target}
            events.append(flow | ends)
    return events


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


_FIRST_STEP = "first decode step", "decode_start_s", "first_token_s"
_BINS = 60


def run_pictures(folders: Sequence[Folder], colours: Colours) -> list[Picture]:
    """Return the pictures of runs, in their policy's colour, of one policy by dashes; where all
    have the same, each has its own."""
    policies = [str(folder.documents["summary"]["policy"]) for folder in folders]
    by_policy = len(set(policies)) > 1 or len(folders) == 1
    runs = []
    for i, folder in enumerate(folders):
        named = ("policy", policies[i]) if by_policy else ("run", folder.name)
        style = policies[:i].count(policies[i]) if by_policy else 0
        runs.append(_Run(folder, colours(*named), style))
    return [
        *_cdfs(runs),
        _activated_experts(runs),
        _phases(runs, colours),
        *_requests_in_phases(runs),
        _tpot_over_time(runs),
        *(picture for run in runs for picture in _over_time(run, len(runs) > 1)),
        *(_decode_workers(run, len(runs) > 1, colours) for run in runs),
    ]


class _Run:
    """A run: its tables, its colour and dash, and the end of its warm-up period."""

    def __init__(self, folder: Folder, colour: int, style: int) -> None:
        self.name = folder.name
        self.requests = folder.tables["requests"].to_pandas()
        self.phases = [*phases_in(self.requests), _FIRST_STEP]  # their sum is TTFT
        for key, own in WITHOUT.items():
            if key not in self.requests:
                self.requests[key] = self.requests[own]
        self.done = self.requests[self.requests["measured"] & self.requests["finish_s"].notna()]
        steps = folder.tables["steps"].to_pandas()
        decodes = steps["role"] == "decode"
        self.decode_steps = steps[decodes]
        self.worker = "worker" if decodes.all() else "decode worker"  # of ``xC``: no other steps
        self.warmup_s = folder.documents["summary"]["window_start_s"]
        self.scaling = folder.documents["summary"].get("scaling")
        self._colour, self._style = colour, style + colour // N_COLOURS

    def series(
        self, x: ArrayLike, y: ArrayLike, *ends: ArrayLike, tips: Sequence[str] | None = None
    ) -> Series:
        """Return a curve in the run's colour; ``ends`` are low and high ends of an interval."""
        xs, ys, *lists = (np.asarray(values, np.float64).tolist() for values in (x, y, *ends))
        low, high = lists or (None, None)
        look = self._colour, self._style, tips
        return Series(self.name, xs, ys, low, high, True, *look)


def _cdfs(runs: Sequence[_Run]) -> list[Picture]:
    share = np.linspace(0, 1, 101)
    return [
        curves(
            f"Distribution of {name}",
            f"{name}, ms",
            "share of requests at or below",
            [run.series(run.done[column].quantile(share), share) for run in runs],
        )
        for column, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2el_ms", "E2E latency"))
    ]


def _activated_experts(runs: Sequence[_Run]) -> Picture:
    series = []
    for run in runs:
        # Steps that also compute prompt tokens activate more experts than their batch explains.
        steps = run.decode_steps
        steps = steps[(steps["tokens"] == steps["batch"]) & (steps["batch"] > 0)]
        of_batch = steps.groupby("batch")["active_experts"]
        mean, count = of_batch.mean(), of_batch.size()
        low, high = (of_batch.quantile(q).where(count >= 5) for q in (0.1, 0.9))
        tips = [f"{n:,} steps" for n in count]
        series.append(run.series(mean.index, mean, low, high, tips=tips))
    labels = "batch of a decode step, requests", "activated experts a MoE layer, mean"
    note = "Steps that decode only. Band: p10 to p90 over the steps of that batch."
    title = "Activated experts against batch"
    return curves(title, *labels, series, interval="p10 to p90", note=note)


def _phases(runs: Sequence[_Run], colours: Colours) -> Picture:
    parts = []
    for phase in (*PHASES, _FIRST_STEP):
        if not any(phase in run.phases for run in runs):
            continue
        name, start, end = phase
        # Who passes no such place spends no time there.
        mean_ms = [1e3 * (run.done[end] - run.done[start]).fillna(0.0).mean() for run in runs]
        parts.append((name, np.nan_to_num(mean_ms).tolist(), colours("phase", name)))
    names = [run.name for run in runs]
    title = "Components of TTFT"
    return stacked_bars(title, "run", "mean time in the phase, ms", names, parts)


def _requests_in_phases(runs: Sequence[_Run]) -> list[Picture]:
    """Draw the exact mean number of requests in phases, of those that `IN_LINE` says."""
    pictures = []
    for title, start, end in (
        ("Requests waiting for prefill", "tokenized_s", "prefill_start_s"),
        ("Requests between prefill and decode", "prefill_end_s", "decode_start_s"),
        ("Requests decoding", *DECODE),
    ):
        series = []
        for run in runs:
            last = run.requests[["finish_s", "arrival_s"]].max().max()
            edges = np.linspace(0.0, last or 1.0, _BINS + 1)
            # Others were refused, gave up or lost their worker: they wait for nothing.
            times = run.requests[run.requests["outcome"].isin(IN_LINE)].copy()
            times["decode_start_s"] = times["decode_start_s"].fillna(times["finish_s"])
            begun, over = (times[name].to_numpy(float, na_value=np.nan) for name in (start, end))
            level = mean_in_phase(begun, over, edges)
            series.append(run.series((edges[1:] + edges[:-1]) / 2, level))
        labels = ("simulated time, s", "requests, mean of the interval")
        pictures.append(curves(title, *labels, series, warmups_s=[r.warmup_s for r in runs]))
    return pictures


def mean_in_phase(start_s: Floats, end_s: Floats, edges_s: Floats) -> Floats:
    """Return the mean number of requests in a phase, for each of m intervals of time, by the sum of
    ``min(end, t) - min(start, t)``. ``start_s``, ``end_s``: s, [n]; a NaN start means never, a NaN
    end after the last edge; ``edges_s``: [m + 1]."""
    entered = np.isfinite(start_s)
    start = np.sort(start_s[entered])
    end = np.sort(np.nan_to_num(end_s[entered], nan=np.inf))

    def clipped(values: Floats) -> Floats:
        below = np.searchsorted(values, edges_s, side="right")
        sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(values), values, 0.0))])
        return sums[below] + edges_s * (len(values) - below)

    mean: Floats = np.diff(clipped(end) - clipped(start)) / np.diff(edges_s)
    return np.maximum(mean, 0.0)  # rounding of the sums


def _over_time(run: _Run, named: bool) -> list[Picture]:
    """Return the rate of arrivals, the workers by state and the TTFT over time, where they change.
    A request that was never served has no TTFT; the share of those in time counts it."""
    scaling = run.scaling
    if scaling is None:
        return []
    of = f": {run.name}" if named else ""
    axis, minutes = "simulated time, s", scaling["by_minute"]
    at = [minute["from_s"] + 30.0 for minute in minutes]
    rate = Series("rate", at, [minute["requests"] / 60.0 for minute in minutes])
    shares = [minute["attainment"] for minute in minutes]  # None without an SLO
    title = f"SLO attainment by minute of arrival{of}"
    good = []
    if None not in shares:
        good = [curves(title, axis, "share of requests", [Series("in time", at, shares)])]
    arrived = run.requests.groupby(run.requests["arrival_s"] // 60.0)["ttft_ms"]
    ttft = [
        Series(name, [60.0 * x + 30.0 for x in found.index], found.tolist(), colour=colour)
        for colour, (name, q) in enumerate((("median", 0.5), ("p99", 0.99)))
        for found in [arrived.quantile(q)]
    ]
    workers = [
        Series(f"{pool} {state}", *_stairs(table["at_s"], table[state], at[-1]), colour=colour)
        for pool, table in scaling["replicas"].items()
        for colour, state in enumerate(("ready", "starting", "draining"))
        if table["at_s"]
    ]
    return [
        curves(f"Arrivals over time{of}", axis, "requests per second", [rate]),
        curves(f"Workers over time{of}", axis, "workers", workers),
        curves(f"TTFT by arrival{of}", axis, "TTFT, ms", ttft),
        *good,
    ]


def _stairs(
    at_s: Sequence[float], counts: Sequence[float], end_s: float
) -> tuple[list[float], list[float]]:
    """Return x and y of the corners of a number that stays as it is until it changes."""
    ends = [*at_s[1:], max(end_s, at_s[-1])]
    x = [at for both in zip(at_s, ends, strict=True) for at in both]
    return x, [count for count in counts for _ in range(2)]


def _tpot_over_time(runs: Sequence[_Run]) -> Picture:
    series = []
    for run in runs:
        known = run.requests.dropna(subset="tpot_ms")
        edges = np.linspace(known["finish_s"].min(), known["finish_s"].max() + 1e-9, 41)
        of_time = known.groupby(np.digitize(known["finish_s"], edges) - 1)["tpot_ms"]
        median, low, high = (of_time.quantile(q) for q in (0.5, 0.1, 0.9))
        middle = (edges[median.index] + edges[median.index + 1]) / 2
        series.append(run.series(middle, median, low, high))
    labels, warmups = ("finish time, simulated s", "TPOT, ms, median"), [r.warmup_s for r in runs]
    title, band = "TPOT over time", "p10 to p90"
    note = f"Band: {band} of the requests that finish in the interval."
    return curves(title, *labels, series, interval=band, warmups_s=warmups, note=note)


def _decode_workers(run: _Run, named: bool, colours: Colours) -> Picture:
    import pandas as pd

    steps, done = run.decode_steps, run.done
    seconds = steps["end_s"] - steps["start_s"]
    weight, load = (x.groupby(steps["worker"]).sum() for x in (seconds, seconds * steps["batch"]))
    mean = load / weight.clip(lower=1e-12)
    share = pd.crosstab(done["domain"], done["decode_worker"], normalize="columns")
    share = share.reindex(columns=mean.index, fill_value=0.0)
    domains = [str(name) for name in share.index]
    return stacked_bars(
        f"Mean batch of each {run.worker} by domain" + (f": {run.name}" if named else ""),
        run.worker,
        "mean batch, requests, by share of domain",
        [str(worker) for worker in mean.index],
        [(name, (share.loc[name] * mean).tolist(), colours("domain", name)) for name in domains],
    )
