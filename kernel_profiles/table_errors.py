"""How far tables are off where they were not measured: each row held against one fitted without it.

A MoE table is fitted without one count of distinct experts at a time
(:func:`~eldr_sim.kernel_profiles.moe_latency.fit_moe_latency`). The others are read linearly
between their points: each inner point of a curve is held against the line between its neighbours,
along every axis that a reader interpolates. Neighbours there lie twice as far apart as in use.

``python -m eldr_sim.kernel_profiles.table_errors docs/tables.md`` writes the errors of the shipped
tables into that page.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.moe_latency import fit_moe_latency
from eldr_sim.kernel_profiles.table_library import shipped_tables
from eldr_sim.kernel_profiles.tables import Kind, LatencyTable, TableMetadata

_AXES: dict[Kind, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention_decode": ("context", "batch"),
    "attention_prefill": ("new_tokens",),
    "collective": ("message_bytes",),
    "all_to_all": ("tokens",),
}
_NAMES: dict[str, str] = {
    "moe": "MoE layer",
    "gemm": "GEMM",
    "attention_decode": "attention, decode",
    "attention_prefill": "attention, prefill",
    "collective": "collectives",
    "all_to_all": "dispatch and combine",
}
_START, _END = "<!-- errors: begin -->", "<!-- errors: end -->"


def left_out_errors(table: LatencyTable) -> dict[str, float]:
    """Relative errors of a table's reader on rows that it was not given.

    Returns
    -------
    dict
        ``leave_one_out_mean`` and ``leave_one_out_max``, and what else the fit of a MoE table
        reports; empty where nothing can be left out.
    """
    if table.metadata.kind == "moe":
        return {name: round(value, 6) for name, value in fit_moe_latency(table).fit_error.items()}
    errors = [_along(table, axis) for axis in _AXES.get(table.metadata.kind, ())]
    pooled = np.concatenate(errors) if errors else np.empty(0)
    if not len(pooled):
        return {}
    return {
        "leave_one_out_mean": round(float(pooled.mean()), 6),
        "leave_one_out_max": round(float(pooled.max()), 6),
    }


def _along(table: LatencyTable, axis: str) -> NDArray[np.float64]:
    """Errors of the line between the neighbours of each inner point along one axis."""
    latency = table.columns["latency_s"].astype(np.float64)
    measured = ("latency_s", "latency_q1_s", "latency_q3_s", "repeats", axis)
    fixed = [name for name in table.columns if name not in measured]
    curve = np.zeros(len(table), np.int64)
    for name in fixed:
        _, code = np.unique(table.columns[name].astype(str), return_inverse=True)
        _, curve = np.unique(np.stack([curve, code]), axis=1, return_inverse=True)
    order = np.lexsort((table.columns[axis], curve))
    x, y, curve = table.columns[axis][order].astype(np.float64), latency[order], curve[order]
    inner = np.flatnonzero(curve[2:] == curve[:-2]) + 1
    share = (x[inner] - x[inner - 1]) / (x[inner + 1] - x[inner - 1])
    line = y[inner - 1] + share * (y[inner + 1] - y[inner - 1])
    return np.abs(line / y[inner] - 1)


def errors_page() -> str:
    """Markdown tables of the shipped tables' errors: by kind and GPU, and of each MoE table."""
    by_kind: dict[tuple[str, str], list[TableMetadata]] = defaultdict(list)
    for table in shipped_tables():
        by_kind[table.kind, table.gpu].append(table.metadata)
    lines = ["| kernel | GPU | tables | mean, % | worst table, % | worst row, % |"]
    lines.append("|---|---|---|---|---|---|")
    for (kind, gpu), tables in sorted(by_kind.items()):
        known = [t.fit_error for t in tables if "leave_one_out_mean" in t.fit_error]
        if known:
            means = [error["leave_one_out_mean"] for error in known]
            worst = max(error["leave_one_out_max"] for error in known)
            figures = f"{100 * np.mean(means):.1f} | {100 * max(means):.1f} | {100 * worst:.0f}"
            lines.append(f"| {_NAMES[kind]} | {gpu} | {len(tables)} | {figures} |")
    lines += ["", "| MoE table | kernel | left out, mean / max, % | power-law rows, mean, % |"]
    lines.append("|---|---|---|---|")
    for table in shipped_tables():
        metadata = table.metadata
        error = metadata.fit_error
        if metadata.kind == "moe" and "leave_one_out_mean" in error:
            name = table.name.replace("_moe_", " ")
            kernel = metadata.kernel_source.split("_")[-1]
            left = (
                f"{100 * error['leave_one_out_mean']:.1f} / {100 * error['leave_one_out_max']:.1f}"
            )
            skew = f"{100 * error['power_law_mean']:.1f}" if "power_law_mean" in error else "-"
            lines.append(f"| {name} | {kernel} | {left} | {skew} |")
    return "\n".join(lines)


def main(page: Path) -> None:
    """Write the errors between the page's markers."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(_START)
    after = rest.split(_END)[1]
    page.write_text(f"{before}{_START}\n{errors_page()}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
