"""Pictures of a run as PNG: latency CDFs, TPOT over time, activated experts, decode load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eldr_sim.pictures import write_picture

PLOTS = ("ttft_tpot_cdf", "tpot_over_time", "active_experts", "decoder_load")


def plot_writers(
    requests: pa.Table, steps: pa.Table, summary: dict[str, Any]
) -> dict[str, Callable[[Path], None]]:
    """Return functions that write each picture, by file name."""
    draw = {
        "ttft_tpot_cdf": lambda figure: _cdfs(figure, requests),
        "tpot_over_time": lambda figure: _tpot_over_time(figure, requests),
        "active_experts": lambda figure: _active_experts(figure, steps),
        "decoder_load": lambda figure: _decoder_load(figure, requests, steps),
    }

    def writer(name: str) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            title = f"{summary['label']} (weakest provenance: {summary['weakest_provenance']})"
            write_picture(path, draw[name], (8.0, 4.0), title=title)

        return write

    return {f"{name}.png": writer(name) for name in PLOTS}


def _completed(requests: pa.Table) -> pa.Table:
    return requests.filter(pc.and_(requests["measured"], pc.is_valid(requests["finish_s"])))


def _values(table: pa.Table, column: str) -> np.ndarray:
    values: np.ndarray = table[column].drop_null().to_numpy()
    return values


def _cdfs(figure: Any, requests: pa.Table) -> None:
    done = _completed(requests)
    for axes, (column, name) in zip(
        figure.subplots(1, 2, sharey=True),
        (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")),
        strict=True,
    ):
        values = np.sort(_values(done, column))
        axes.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)))
        for q in (50, 99):
            if len(values):
                at = float(np.percentile(values, q))
                axes.axvline(at, linestyle=":", color="grey")
                axes.annotate(
                    f"p{q} {at:.1f} ms",
                    (at, 0.03),
                    xytext=(-9, 0),
                    textcoords="offset points",
                    rotation=90,
                    fontsize=8,
                )
        axes.set(xlabel=f"{name}, ms", ylim=(0, 1))
    figure.axes[0].set_ylabel("share of requests")


def _tpot_over_time(figure: Any, requests: pa.Table) -> None:
    done = requests.filter(pc.is_valid(requests["tpot_ms"]))
    finish, tpot = _values(done, "finish_s"), _values(done, "tpot_ms")
    axes = figure.subplots()
    axes.plot(finish, tpot, ".", markersize=2, alpha=0.4, label="request")
    if len(finish):
        edges = np.linspace(finish.min(), finish.max() + 1e-9, 41)
        bins = np.digitize(finish, edges) - 1
        middle = [(edges[b] + edges[b + 1]) / 2 for b in np.unique(bins)]
        for q, style in ((50, "-"), (99, "--")):
            line = [np.percentile(tpot[bins == b], q) for b in np.unique(bins)]
            axes.plot(middle, line, style, color="black", label=f"p{q}")
    axes.set(xlabel="finish time, s", ylabel="TPOT, ms")


def _active_experts(figure: Any, steps: pa.Table) -> None:
    decode = steps.filter(pc.and_(pc.equal(steps["role"], "decode"), pc.greater(steps["batch"], 0)))
    batch, active = _values(decode, "batch"), _values(decode, "active_experts")
    axes = figure.subplots()
    axes.plot(batch, active, ".", markersize=2, alpha=0.1, label="step")
    sizes = np.unique(batch)
    axes.plot(sizes, [active[batch == b].mean() for b in sizes], color="black", label="mean")
    axes.set(xlabel="batch, requests", ylabel="distinct experts a MoE layer")


def _decoder_load(figure: Any, requests: pa.Table, steps: pa.Table) -> None:
    decode = steps.filter(pc.equal(steps["role"], "decode"))
    worker = _values(decode, "worker")
    seconds = _values(decode, "end_s") - _values(decode, "start_s")
    batch = _values(decode, "batch")
    axes = figure.subplots()
    workers = np.unique(worker)
    mean = np.array([np.average(batch[worker == w], weights=seconds[worker == w]) for w in workers])
    done = _completed(requests)
    served, labels = _values(done, "decode_worker"), np.array(done["domain"].to_pylist())
    bottom = np.zeros(len(workers))
    for domain in sorted(set(labels.tolist())):
        share = np.array(
            [np.mean(labels[served == w] == domain) if (served == w).any() else 0 for w in workers]
        )
        axes.bar(workers, share * mean, bottom=bottom, label=domain)
        bottom += share * mean
    axes.set(xlabel="decode worker", ylabel="mean batch, requests, by share of domain")
    if len(bottom):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
