"""Whether calibrated tables are to be trusted: spread of their samples, and their order.

More tokens, sequences, context or experts never take less time on a machine of constant speed. A
row that takes longer than one which computes as much or more was measured while the machine was
slow; a wide spread of equal steps says the same.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from eldr_sim.kernel_profiles.tables.format import LatencyTable

#: A row is out of order if one with as much work or more takes less than this share of its time.
_LESS = 0.90
#: Most of the rows that may be out of order; largest median spread (IQR / median) of the rows.
_OUT_OF_ORDER, _SPREAD = 0.10, 0.20
_AXES = {
    "moe": ("batch", "distinct_experts"),
    "attention_decode": ("batch", "context"),
    "attention_prefill": ("batch", "new_tokens"),
    "engine_step": ("tokens", "sequences"),
}
#: Attention is a small part of the steps of a small model, and its calls are short.
_DECISIVE = ("moe", "engine_step")


def quality(tables: Iterable[LatencyTable]) -> dict[str, Any]:
    """Return figures of the tables' quality, by kind. ``rows``; ``spread_median`` and
    ``spread_p90``, of IQR / median of a row's samples; ``out_of_order``, the share of the rows that
    take longer than a row with more work."""
    found: dict[str, Any] = {}
    for table in tables:
        columns = table.columns
        spread = (columns["latency_q3_s"] - columns["latency_q1_s"]) / columns["latency_s"]
        found[table.metadata.kind] = {
            "rows": len(table),
            "spread_median": float(np.median(spread)),
            "spread_p90": float(np.quantile(spread, 0.9)),
            "out_of_order": _out_of_order(table),
        }
    return found


def doubts(figures: dict[str, Any]) -> list[str]:
    """Return why tables with these figures are not to be trusted, a line each."""
    lines = []
    for kind in _DECISIVE:
        if kind not in figures:
            continue
        spread, out = (figures[kind][key] for key in ("spread_median", "out_of_order"))
        if spread > _SPREAD:
            said = f"equal steps spread by {spread:.0%} (IQR / median; {_SPREAD:.0%} at most)"
            lines.append(f"{kind}: {said}")
        if out > _OUT_OF_ORDER:
            said = f"{out:.0%} of the rows take longer than rows with more work"
            lines.append(f"{kind}: {said} ({_OUT_OF_ORDER:.0%} at most)")
    return lines


def _out_of_order(table: LatencyTable) -> float:
    """Return the share of the rows that take longer than one with as much work or more."""
    axes = [np.asarray(table.columns[name], np.float64) for name in _AXES[table.metadata.kind]]
    seconds = table.columns["latency_s"]
    more = np.ones((len(seconds), len(seconds)), bool)
    for axis in axes:
        more &= axis[:, None] <= axis[None, :]
    less = seconds[None, :] < _LESS * seconds[:, None]
    return float((more & less).any(axis=1).mean())
