"""Tables of a page: which metrics it shows, text and sort key of each cell."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eldr_sim.simulator.outcome.catalogue import HEADLINE, label

#: Names of the latencies; their tags are ``{statistic}_{latency}_ms``.
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
STATISTICS = ("mean", "p50", "p90", "p99")
#: Headings of comparisons and sweeps by tag.
METRICS = {tag: label(tag) for tag in HEADLINE}
#: Headings of metrics that only some results have.
MORE_METRICS = {
    tag: label(tag)
    for tag in (
        "slo_attainment", "request_goodput", "kv_blocks_per_worker",
        "cost_per_million_output_tokens", "gpu_hours_per_million_output_tokens",
    )
}  # fmt: skip
#: Headings of a plan's clusters by key, in the order of its tables.
PLAN_COLUMNS = {
    "policy": "policy",
    "gpu": "GPU",
    "name": "cluster",
    "chunks": "tokens a step",
    "gpus": label("gpus"),
    "price_per_hour": "$/hour",
    "cost_per_million_output_tokens": "$ per M tokens",
    "price_per_million_prompt_tokens": "$ per M prompt tokens",
    "kv_blocks_per_worker": label("kv_blocks_per_worker"),
    "figure": "",
    "by_seed": "seed by seed",
    "slo_attainment": "SLO attainment, %",
    "seeds": "seeds",
    **{
        tag: label(tag)
        for tag in (
            "p99_ttft_ms", "p99_tpot_ms", "tokens_per_s_per_user", "tokens_per_s_per_gpu",
            "prefill_throughput", "prefill_mfu", "mean_active_experts_per_step",
            "mean_active_experts_per_token",
        )
    },
    "weakest_provenance": "step times",
    "verdict": "verdict",
}  # fmt: skip
_PARAMETER_UNITS = {
    "request_rate": "requests/s", "output_len": "tokens", "max_num_batched_tokens": "tokens",
    "max_num_seqs": "requests", "max_concurrency": "requests", "num_requests": "requests",
    "duration": "s", "warmup": "s",
}  # fmt: skip


def parameter_label(path: str) -> str:
    """Return a parameter's dot path with its unit, if any."""
    name = path.rpartition(".")[2]
    in_ms = name.endswith("_ms") or path.startswith("goodput.")
    unit = "ms" if in_ms else _PARAMETER_UNITS.get(name)
    return path if unit is None else f"{path}, {unit}"


def without_unit(heading: str) -> str:
    """Return a heading without its unit, as the title of a picture."""
    return heading.removesuffix(" (ms)")


def bounds_in_words(bounds_ms: dict[str, float | None]) -> list[str]:
    """Return bounds of latencies as text, such as ``TTFT ≤ 500 ms``."""
    return [f"{LATENCIES[k]} ≤ {v:g} ms" for k, v in bounds_ms.items() if v is not None]


MISSING = "–"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str  #: text shown
    #: Full value as the sort key, empty if missing; None sorts by the text.
    value: str | None = None


#: Value of a cell; see :func:`cell`.
Value = Cell | str | int | float | None


@dataclass(frozen=True)
class Table:
    """A sortable table."""

    caption: str
    columns: Sequence[str]  #: headings
    rows: Sequence[Sequence[Cell]]  #: cells of each row, one per column
    numeric: Sequence[bool]  #: whether each column holds numbers
    note: str | None = None  #: line under the table


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[Value]], note: str | None = None
) -> Table:
    """Return a table of values; see :class:`Table`."""
    cells = [[cell(value) for value in row] for row in rows]
    numeric = [any(row[i].value is not None for row in cells) for i in range(len(columns))]
    return Table(caption, columns, cells, numeric, note)


def cell(value: Value) -> Cell:
    """Return the cell of a value: a rounded number, or text unchanged."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, str):
        return Cell(value)
    return Cell(number(value)) if isinstance(value, bool) else measured(value, number(value))


def measured(value: float | None, text: str) -> Cell:
    """Return a cell that shows ``text`` and sorts by ``value``."""
    return Cell(text, "" if value is None or math.isnan(value) else repr(value))


def six_digits(value: float) -> float:
    """Return a value rounded to six significant digits."""
    return float(f"{value:.6g}")


def number(value: float | int | None) -> str:
    """Return a number with about four significant digits and thousands separators."""
    if value is None or math.isnan(value):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if 0 < size < 0.001:
        return f"{value:.2g}".replace("-", "−")
    return f"{value:,.{decimals(size)}f}".replace("-", "−")


def decimals(largest: float) -> int:
    """Return the number of decimals for values of a size."""
    if largest >= 100:
        return 0 if largest >= 1000 else 1
    return 2 if largest >= 1 or not largest else 4


def interval(mean: float, low: float, high: float, *, signs: bool = False) -> str:
    """Return a value with its interval, with equal decimals; NaN ends are left out."""
    known = [abs(value) for value in (mean, low, high) if math.isfinite(value)]
    if not known or math.isnan(mean):
        return MISSING
    form = f"{'+' if signs else ''},.{decimals(max(known))}f"
    text = f"{mean:{form}}"
    if math.isfinite(low) and math.isfinite(high):
        text += f" [{low:{form}}, {high:{form}}]"
    return text.replace("-", "−")


def difference(percent: float, low: float, high: float) -> Cell:
    """Return a difference with its interval as a cell that sorts by the difference."""
    return measured(percent, interval(percent, low, high, signs=True))


def mean_cell(mean: float | None, low: float | None, high: float | None) -> Value:
    """Return a mean with half the width of its (symmetric) interval, sorting by the mean."""
    if mean is None or low is None or high is None:
        return mean
    form = f",.{decimals(abs(mean))}f"
    return measured(mean, f"{mean:{form}} ± {(high - low) / 2:{form}}".replace("-", "−"))


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return MISSING if share is None else f"{100 * share:.2f}%".replace(".00%", "%")


def nan(value: float | None) -> float:
    """Return a value, or NaN for None."""
    return math.nan if value is None else value


def plain(value: Any) -> str:
    """Return a configuration value as a user would type it."""
    if value is None:
        return "not given"
    if isinstance(value, dict):
        return ", ".join(f"{k} {plain(v)}" for k, v in value.items() if v is not None) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
