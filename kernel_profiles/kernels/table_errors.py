"""How far tables are off where they were not measured: each row held against a fit without it.

A MoE table is fitted without one count of distinct experts at a time; of the others each inner
point is held against the line between its neighbours, which lie twice as far apart as in use.

``python -m eldr_sim.kernel_profiles.kernels.table_errors docs`` writes the errors of the shipped
tables by kernel into ``docs/tables.md``, and those of each MoE table into ``docs/data``."""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency, mean_and_max
from eldr_sim.kernel_profiles.tables.format import Kind, LatencyTable
from eldr_sim.kernel_profiles.tables.library import shipped_tables

_AXES: dict[Kind, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention_decode": ("context", "batch"),
    "attention_prefill": ("new_tokens",),
    "collective": ("message_bytes",),
    "all_to_all": ("tokens",),
}
_NAMES: dict[str, str] = {
    "moe": "MoE layer", "gemm": "GEMM", "attention_decode": "attention, decode",
    "attention_prefill": "attention, prefill", "collective": "collectives",
    "all_to_all": "dispatch and combine",
}  # fmt: skip
_START, _END = "<!-- errors: begin -->", "<!-- errors: end -->"


def left_out_errors(table: LatencyTable) -> dict[str, float]:
    """Relative errors of a table's reader on rows not given to it (``leave_one_out_mean``,
    ``leave_one_out_max``, what else a MoE fit reports); empty where none can be left out."""
    if table.metadata.kind == "moe":
        return {name: round(value, 6) for name, value in fit_moe_latency(table).fit_error.items()}
    errors = [_along(table, axis) for axis in _AXES.get(table.metadata.kind, ())]
    found = mean_and_max("leave_one_out", np.concatenate([np.empty(0), *errors]))
    return {name: round(value, 6) for name, value in found.items()}


def _along(table: LatencyTable, axis: str) -> Floats:
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
    """Markdown table of the shipped tables' errors: means and the worst table by kernel and GPU."""
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    for table in shipped_tables():
        error = table.metadata.fit_error.get("leave_one_out_mean")
        if error is not None:
            means[table.kind, table.gpu].append(100 * error)
    by_kind: dict[str, dict[str, str]] = defaultdict(dict)
    for (kind, gpu), own in sorted(means.items()):
        by_kind[kind][gpu] = f"{np.mean(own):.1f} / {max(own):.1f}"
    gpus = sorted({gpu for cells in by_kind.values() for gpu in cells})
    lines = [f"| kernel | {' | '.join(gpus)} |", "|---" * (len(gpus) + 1) + "|"]
    for kind, cells in by_kind.items():
        lines.append(f"| {_NAMES[kind]} | {' | '.join(cells.get(gpu, '-') for gpu in gpus)} |")
    return "\n".join(lines)


def errors_of_moe_tables() -> str:
    """CSV of the shipped MoE tables' errors, %."""
    lines = ["table,kernel,left out mean %,left out max %,power-law rows mean %"]
    for table in shipped_tables():
        error = table.metadata.fit_error
        if table.kind == "moe" and "leave_one_out_mean" in error:
            name = table.name.replace("_moe_", " ")
            kernel = (table.metadata.kernel_source or "").split("_")[-1]
            keys = ("leave_one_out_mean", "leave_one_out_max", "power_law_mean")
            cells = [f"{100 * error[key]:.1f}" if key in error else "" for key in keys]
            lines.append(",".join([name, kernel, *cells]))
    return "\n".join(lines) + "\n"


def main(docs: Path) -> None:
    """Write the errors between the page's markers, and the CSV file."""
    page = docs / "tables.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(_START)
    after = rest.split(_END)[1]
    page.write_text(f"{before}{_START}\n{errors_page()}\n{_END}{after}", encoding="utf-8")
    (docs / "data" / "table_errors.csv").write_text(errors_of_moe_tables(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
