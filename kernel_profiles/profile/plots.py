"""Pictures of a profile as PNG: latency, achieved bandwidth, roofline position, coverage."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.charts import write_picture
from eldr_sim.kernel_profiles.profile.grid import FORCED, MoEPoint, held_out
from eldr_sim.kernel_profiles.profile.table_fit import even_rows, expert_bytes
from eldr_sim.kernel_profiles.tables.format import LatencyTable, load_table

_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)


def plot_profile(out: Path, paths: Sequence[Path], summary: Mapping[str, Any]) -> list[Path]:
    """Draw a profile's MoE tables (``paths``) into its folder, named like them; returns the
    pictures. ``summary``: its ``profile.json``: copy bandwidth and GEMM throughput are the roof."""
    written = []
    for path in paths:
        table = load_table(path)
        if table.metadata.kind != "moe":
            continue
        meta, target = table.metadata, out / f"{path.stem}.png"
        shape = ", ".join(f"{name} {value}" for name, value in meta.shape.items())
        title = f"{meta.device}: {meta.kernel_source}, {meta.dtype}, {shape}"
        draw = partial(_draw, table=table, summary=summary)
        write_picture(target, draw, (12.0, 10.0), title=title, dpi=110)
        written.append(target)
    return written


def _draw(figure: Any, table: LatencyTable, summary: Mapping[str, Any]) -> None:
    axes = figure.subplots(3, 2)
    _by_experts(axes[0, 0], table)
    _by_batch(axes[0, 1], table)
    _bandwidth(axes[1, 0], table, summary["copy_bandwidth"])
    _roofline(axes[1, 1], table, summary["copy_bandwidth"], summary["gemm_flops"])
    _coverage(axes[2, 0], table)
    _skew(axes[2, 1], table)


def _curves(axes: Any, x: Floats, y: Floats, batch: Floats) -> None:
    for tokens in _BATCHES:
        at = np.flatnonzero(batch == tokens)
        if len(at) > 1:
            order = at[np.argsort(x[at])]
            axes.plot(x[order], y[order], ".-", label=f"batch {tokens}")


def _by_experts(axes: Any, table: LatencyTable) -> None:
    batch, distinct, latency = even_rows(table)
    _curves(axes, distinct, latency * 1e6, batch)
    axes.set(xlabel="Distinct experts", ylabel="MoE layer, µs", title="Latency and experts")


def _by_batch(axes: Any, table: LatencyTable) -> None:
    batch, distinct, latency = even_rows(table)
    counts, times = np.unique(distinct, return_counts=True)
    for count in counts[times > 2][::2]:
        at = (distinct == count) & (batch <= 512)
        order = np.argsort(batch[at])
        axes.plot(batch[at][order], latency[at][order] * 1e6, ".-", label=f"{count:g} experts")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="Batch, tokens", ylabel="MoE layer, µs", title="Latency and batch")


def _bandwidth(axes: Any, table: LatencyTable, roof: float) -> None:
    batch, distinct, latency = even_rows(table)
    _curves(axes, distinct, distinct * expert_bytes(table) / latency / 1e9, batch)
    axes.axhline(roof / 1e9, color="black", linewidth=0.8, label="copy bandwidth")
    axes.axhline(0.85 * roof / 1e9, color="black", linewidth=0.8, linestyle=":", label="85% of it")
    axes.set(xlabel="Distinct experts", ylabel="Weights read, GB/s", title="Achieved bandwidth")


def _roofline(axes: Any, table: LatencyTable, bandwidth: float, flops: float) -> None:
    batch, distinct, latency = even_rows(table)
    shape = table.metadata.shape
    pairs = batch * shape["top_k"] / shape.get("expert_parallel_size", 1)
    work = 6.0 * pairs * shape["hidden_size"] * shape["expert_intermediate_size"]
    intensity = work / (distinct * expert_bytes(table))
    points = axes.scatter(intensity, work / latency / 1e9, c=np.log2(batch), s=10, cmap="viridis")
    x = np.geomspace(intensity.min() / 2, intensity.max() * 2, 50)
    axes.plot(x, np.minimum(x * bandwidth, flops) / 1e9, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(
        xlabel="FLOP a byte of weights",
        ylabel="GFLOP/s",
        title="Roofline: copy bandwidth and large GEMM as measured",
    )
    axes.figure.colorbar(points, ax=axes, label="log2 batch")


def _coverage(axes: Any, table: LatencyTable) -> None:
    batch, distinct, _ = even_rows(table)
    points = [MoEPoint(int(b), int(d)) for b, d in zip(batch, distinct, strict=True)]
    hidden = held_out(points)
    out = np.array([point in hidden for point in points])
    skewed = np.asarray(table.columns["routing"]) != FORCED
    axes.scatter(batch[~out], distinct[~out], s=12, label="fitted")
    axes.scatter(batch[out], distinct[out], s=20, marker="s", label="held out")
    axes.scatter(
        np.asarray(table.columns["batch"])[skewed],
        np.asarray(table.columns["distinct_experts"])[skewed],
        s=40,
        facecolors="none",
        edgecolors="grey",
        linewidths=0.6,
        label="also skewed",
    )
    shape = table.metadata.shape
    owned = shape["n_experts"] // shape.get("expert_parallel_size", 1)
    reach = np.geomspace(1, max(batch.max(), 2), 100)
    axes.plot(reach, np.minimum(owned, shape["top_k"] * reach), color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="Batch, tokens", ylabel="Distinct experts", title="Coverage (line: reachable)")


def _skew(axes: Any, table: LatencyTable) -> None:
    rows = table.rows("batch", "distinct_experts", "routing", "latency_s")
    even = {(b, d): t for b, d, routing, t in rows if routing == FORCED}
    for routing in sorted({r for _, _, r, _ in rows if r != FORCED}):
        found = [(b, t / even[b, d]) for b, d, r, t in rows if r == routing and (b, d) in even]
        if found:
            axes.plot(*np.array(found).T, ".", label=routing.replace("forced_", ""))
    if not axes.has_data():
        axes.set_axis_off()
        axes.set_title("Skewed load: not measured")
        return
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="Batch, tokens", ylabel="Time over even load", title="Skewed load")
