"""Pictures of runs, side by side in the colours of their policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from eldr_sim.reports.folders import Folder
from eldr_sim.reports.pictures import N_COLOURS, Colours, Picture, Series, curves, stacked_bars
from eldr_sim.simulator.config import RunConfig

Values = NDArray[np.float64]

#: Phases of a request by the times that bound them, as in the timeline.
_PHASES = (
    ("prefill queue", "sent_s", "prefill_start_s"),
    ("prefill", "prefill_start_s", "prefill_end_s"),
    ("handoff", "prefill_end_s", "transfer_start_s"),
    ("KV transfer", "transfer_start_s", "transfer_end_s"),
    ("decode queue", "transfer_end_s", "decode_start_s"),
    ("first decode step", "decode_start_s", "first_token_s"),
)
_DECODING = ("decoding", "decode_start_s", "finish_s")
_BINS = 60


def run_pictures(folders: Sequence[Folder], colours: Colours) -> list[Picture]:
    """Return the pictures of one run, or of several side by side.

    A run has the colour of its policy, and runs of one policy differ in their dashes; where all
    runs have the same policy, each has a colour of its own.
    """
    policies = [str(folder.documents["summary"]["policy"]) for folder in folders]
    by_policy = len(set(policies)) > 1 or len(folders) == 1
    runs = []
    for i, folder in enumerate(folders):
        named = ("policy", policies[i]) if by_policy else ("run", folder.name)
        style = policies[:i].count(policies[i]) if by_policy else 0
        runs.append(_Run(folder, colours(*named), style))
    domains = sorted({name for run in runs for name in set(run.done["domain"].to_pylist())})
    return [
        *_cdfs(runs),
        _activated_experts(runs),
        _phases(runs, colours),
        *_requests_in_phases(runs),
        _tpot_over_time(runs),
        *(_decode_workers(run, len(runs) > 1, domains, colours) for run in runs),
    ]


class _Run:
    """A run: its tables, its colour and dash, and the end of its warm-up period."""

    def __init__(self, folder: Folder, colour: int, style: int) -> None:
        self.name = folder.name
        self._colour, self._style = colour, style + colour // N_COLOURS
        self.requests = folder.tables["requests"]
        self.decode_steps = folder.tables["steps"].filter(
            pc.equal(folder.tables["steps"]["role"], "decode")
        )
        finished = pc.is_valid(self.requests["finish_s"])
        self.done = self.requests.filter(pc.and_(self.requests["measured"], finished))
        config = folder.documents["config"]["config"]
        fields = {name: config.get(name) for name in ("warmup", "num_requests")}
        self.warmup_s = RunConfig.model_construct(**fields).warmup_s

    def series(
        self,
        x: Values,
        y: Values,
        low: Values | None = None,
        high: Values | None = None,
        tips: Sequence[str] | None = None,
    ) -> Series:
        """Return a curve in the run's colour."""
        return Series(
            self.name,
            x.tolist(),
            y.tolist(),
            None if low is None else low.tolist(),
            None if high is None else high.tolist(),
            colour=self._colour,
            style=self._style,
            tips=tips,
        )


def _column(rows: pa.Table, name: str) -> Values:
    """Return a column as floats, NaN where it is null."""
    return np.asarray(rows[name].to_numpy(), np.float64)


def _cdfs(runs: Sequence[_Run]) -> list[Picture]:
    pictures = []
    for column, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2el_ms", "E2E latency")):
        series = []
        for run in runs:
            values = _column(run.done, column)
            values = values[np.isfinite(values)]
            share = np.linspace(0, 1, 101) if len(values) else np.zeros(0)
            series.append(run.series(np.quantile(values, share) if len(values) else share, share))
        title = f"Distribution of {name}"
        pictures.append(curves(title, f"{name}, ms", "share of requests at or below", series))
    return pictures


def _activated_experts(runs: Sequence[_Run]) -> Picture:
    series = []
    for run in runs:
        # Steps that also compute prompt tokens activate more experts than their batch explains.
        steps = run.decode_steps
        steps = steps.filter(pc.equal(steps["tokens"], steps["batch"]))
        steps = steps.filter(pc.greater(steps["batch"], 0))
        sizes, of_size, counts = np.unique(
            _column(steps, "batch"), return_inverse=True, return_counts=True
        )
        order = np.argsort(of_size, kind="stable")
        of_steps = _column(steps, "active_experts")[order]
        groups = np.split(of_steps, np.cumsum(counts)[:-1]) if len(sizes) else []
        mean = np.array([group.mean() for group in groups])
        low, high = (
            np.array([np.percentile(group, q) if len(group) >= 5 else np.nan for group in groups])
            for q in (10, 90)
        )
        tips = [f"{count:,} steps" for count in counts]
        series.append(run.series(sizes, mean, low, high, tips))
    return curves(
        "Activated experts against batch",
        "batch of a decode step, requests",
        "activated experts a MoE layer, mean",
        series,
        interval="p10 to p90",
        note="Steps that decode only. Band: p10 to p90 over the steps of that batch.",
    )


def _phases(runs: Sequence[_Run], colours: Colours) -> Picture:
    def mean_ms(rows: pa.Table, start: str, end: str) -> float:
        spans = _column(rows, end) - _column(rows, start)
        return 1e3 * float(np.nanmean(spans)) if np.isfinite(spans).any() else 0.0

    parts = [
        (name, [mean_ms(run.done, start, end) for run in runs], colours("phase", name))
        for name, start, end in _PHASES
    ]
    names = [run.name for run in runs]
    title = "Where the time to first token goes"
    return stacked_bars(title, "run", "mean time in the phase, ms", names, parts)


def _requests_in_phases(runs: Sequence[_Run]) -> list[Picture]:
    """Draw how many requests are in a phase over time, exactly: the mean over each interval."""
    pictures = []
    for title, phases in (
        ("Requests waiting for prefill", (_PHASES[0],)),
        ("Requests between prefill and decode", _PHASES[2:5]),
        ("Requests decoding", (_DECODING,)),
    ):
        series = []
        for run in runs:
            edges = _edges(run.requests)
            level = np.zeros(_BINS)
            for _, start, end in phases:
                times = _column(run.requests, start), _column(run.requests, end)
                level += mean_in_phase(*times, edges)
            series.append(run.series((edges[1:] + edges[:-1]) / 2, level))
        labels = ("simulated time, s", "requests, mean of the interval")
        pictures.append(curves(title, *labels, series, warmups_s=[r.warmup_s for r in runs]))
    return pictures


def _edges(requests: pa.Table) -> Values:
    finish = _column(requests, "finish_s")
    arrival = _column(requests, "arrival_s")
    last = float(np.nanmax(np.concatenate([finish, arrival, [0.0]])))
    return np.linspace(0.0, last or 1.0, _BINS + 1)


def mean_in_phase(start_s: Values, end_s: Values, edges_s: Values) -> Values:
    """Return the mean number of requests in a phase, for each interval of time.

    Parameters
    ----------
    start_s, end_s
        When each request entered and left the phase, s, shape [n]; NaN start: never entered;
        NaN end: still there at the last edge.
    edges_s
        Edges of the intervals, shape [m + 1].

    Returns
    -------
    ndarray
        Shape [m]. The integral of the number in the phase up to a time is the sum of
        ``min(end, t) - min(start, t)`` over requests.
    """
    entered = np.isfinite(start_s)
    start = np.sort(start_s[entered])
    end = np.sort(np.nan_to_num(end_s[entered], nan=np.inf))

    def clipped(values: Values) -> Values:
        below = np.searchsorted(values, edges_s, side="right")
        sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(values), values, 0.0))])
        return sums[below] + edges_s * (len(values) - below)

    mean: Values = np.diff(clipped(end) - clipped(start)) / np.diff(edges_s)
    return np.maximum(mean, 0.0)  # rounding of the sums


def _tpot_over_time(runs: Sequence[_Run]) -> Picture:
    series = []
    for run in runs:
        finish, tpot = _column(run.requests, "finish_s"), _column(run.requests, "tpot_ms")
        known = np.isfinite(tpot)
        finish, tpot = finish[known], tpot[known]
        edges = np.linspace(finish.min(), finish.max() + 1e-9, 41) if len(finish) else np.zeros(2)
        bins = np.digitize(finish, edges) - 1
        used = np.unique(bins)
        median, low, high = (
            np.array([np.percentile(tpot[bins == b], q) for b in used]) for q in (50, 10, 90)
        )
        series.append(run.series((edges[used] + edges[used + 1]) / 2, median, low, high))
    return curves(
        "TPOT over time",
        "finish time, simulated s",
        "TPOT, ms, median",
        series,
        interval="p10 to p90",
        warmups_s=[run.warmup_s for run in runs],
        note="Band: p10 to p90 of the requests that finish in the interval.",
    )


def _decode_workers(run: _Run, named: bool, domains: Sequence[str], colours: Colours) -> Picture:
    worker = _column(run.decode_steps, "worker").astype(int)
    seconds = _column(run.decode_steps, "end_s") - _column(run.decode_steps, "start_s")
    workers = np.unique(worker)
    weight = np.bincount(worker, seconds)
    load = np.bincount(worker, seconds * _column(run.decode_steps, "batch"))
    mean = load[workers] / np.maximum(weight[workers], 1e-12)
    served = _column(run.done, "decode_worker")
    of_domain = np.array(run.done["domain"].to_pylist(), object)
    parts = []
    for name in domains:
        own = of_domain == name
        share = [float(own[served == w].mean()) if (served == w).any() else 0.0 for w in workers]
        if own.any():
            parts.append((name, (np.array(share) * mean).tolist(), colours("domain", name)))
    return stacked_bars(
        "Mean batch of each decode worker by domain" + (f": {run.name}" if named else ""),
        "decode worker",
        "mean batch, requests, by share of domain",
        [str(w) for w in workers],
        parts,
    )
