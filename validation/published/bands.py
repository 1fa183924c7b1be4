"""Error bands from published runs: the making of ``simulator/outcome/error_bands.json``.

A residual is the logarithm of measured over predicted. Cells are nested (`Kind`): a cell has the
10th and 90th percentile of its residuals, drawn towards those of the cell around it. New runs come
from new publishers, so one with n rows weighs n / (n + `_PRIOR`), at most 1. Runs of one publisher
do not show how publishers differ: with K publishers, (K - 1) / (K + 1) is the cell's own share
(`by_publishers`). Then both ends of all bands move outwards (or inwards) by one distance, at which
80% of the rows of publishers that were left out lie within (conformalised quantiles as in Romano,
Patterson and Candes, NeurIPS 2019, by groups as in Dunn, Wasserman and Ramdas, JASA 2023). The
coverage that is stated is of a second round: of publishers that neither the cells nor the distance
saw.

Few publishers have runs of more than 256 requests in flight: a cell of these reaches as far as its
own residuals and the band of runs that are like it but for the load (`beyond`); n / (n + `_PRIOR`)
is a cell's own share there, n at most `_MOST` rows a publisher (`by_rows`)."""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.simulator.outcome.error_band import CROWDS, LOADS, METRICS, Kind

LEVEL = 0.8
_MOST, _PRIOR = 12, 8
#: No band is narrower: runs repeated on another day differ by this much (`silicon.REPEATABILITY`).
_LEAST = {"ttft": 0.039, "tpot": 0.008, "throughput": 0.008}
_Cell = tuple[str, ...]
#: Weight of a cell's quantiles against those of the enclosing cell, from rows by publisher.
_Share = Callable[[Mapping[str, int]], float]


class Residual(NamedTuple):
    """A compared figure: ln(measured / predicted)."""

    publisher: str
    kind: Kind
    value: float


class Pair(NamedTuple):
    """Two runs of a publisher that differ in their launch alone: how far the logarithm of their
    measured ratio is from that of the predicted one, the larger for the smaller."""

    publisher: str
    value: float


class Cell(NamedTuple):
    """Ends of a band, as logarithms, and what they rest on."""

    low: float
    high: float
    rows: int
    publishers: int


def by_publishers(counts: Mapping[str, int]) -> float:
    """Return the weight of a cell by its number of publishers."""
    return (len(counts) - 1) / (len(counts) + 1)


def _row_weight(n_rows: int) -> float:
    """Return the weight of each row of a publisher."""
    return 1.0 / (n_rows + _PRIOR)


def by_rows(counts: Mapping[str, int]) -> float:
    """Return the weight of a cell by its number of rows."""
    n = sum(min(count, _MOST) for count in counts.values())
    return n / (n + _PRIOR)


def cells_of(residuals: Iterable[Residual], share: _Share = by_publishers) -> dict[_Cell, Cell]:
    """Return all cells of residuals by the first words of their kinds, the widest first."""
    groups = defaultdict[_Cell, list[Residual]](list)
    for residual in residuals:
        for depth in range(len(residual.kind) + 1):
            groups[residual.kind[:depth]].append(residual)
    cells: dict[_Cell, Cell] = {}
    for path in sorted(groups, key=len):
        rows = groups[path]
        counts = defaultdict[str, int](int)
        for row in rows:
            counts[row.publisher] += 1
        weights = [_row_weight(counts[row.publisher]) for row in rows]
        low, high = _quantiles([row.value for row in rows], weights)
        if path:
            around = cells[path[:-1]]
            own = share(counts)
            low = own * low + (1.0 - own) * around.low
            high = own * high + (1.0 - own) * around.high
        cells[path] = Cell(low, high, len(rows), len(counts))
    return cells


def _quantiles(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return the weighted percentiles at both ends of `LEVEL`."""
    order = np.argsort(values)
    ordered, share = np.asarray(values)[order], np.asarray(weights)[order]
    at = (np.cumsum(share) - share / 2.0) / share.sum()
    tail = (1.0 - LEVEL) / 2.0
    return float(np.interp(tail, at, ordered)), float(np.interp(1.0 - tail, at, ordered))


def cell_of(cells: Mapping[_Cell, Cell], kind: Kind) -> Cell:
    """Return the narrowest cell that holds a kind."""
    return next(cells[kind[:d]] for d in range(len(kind), -1, -1) if kind[:d] in cells)


def _outside(cells: Mapping[_Cell, Cell], rows: Sequence[Residual]) -> list[float]:
    """Return how far each row lies outside its band; negative inside."""
    found = []
    for row in rows:
        cell = cell_of(cells, row.kind)
        found.append(max(cell.low - row.value, row.value - cell.high))
    return found


def growth_of(residuals: Sequence[Residual], share: _Share) -> float:
    """Return by how much both ends of every band move outwards, so that `LEVEL` of the rows of
    publishers that are left out lie within; publishers weigh as in cells."""
    distances, weights = list[float](), list[float]()
    for _, left, others in _left_out(residuals):
        distances += _outside(cells_of(others, share), left)
        weights += [_row_weight(len(left))] * len(left)
    if not distances:
        return 0.0
    order = np.argsort(distances)
    total = np.cumsum(np.asarray(weights)[order])
    at = int(np.searchsorted(total, LEVEL * total[-1]))
    return float(np.asarray(distances)[order][min(at, len(distances) - 1)])


def _left_out(
    residuals: Sequence[Residual],
) -> Iterable[tuple[str, list[Residual], list[Residual]]]:
    """Yield each publisher, its rows and those of all others."""
    for name in sorted({residual.publisher for residual in residuals}):
        others = [residual for residual in residuals if residual.publisher != name]
        if others:
            yield name, [residual for residual in residuals if residual.publisher == name], others


class Coverage(NamedTuple):
    """How bands did on publishers that they had not seen."""

    rows: int
    covered: float  #: share of the rows, publishers weighing as in cells
    by_publisher: dict[str, tuple[int, float]]
    width: float  #: median of high / low
    one_width: float  #: the same of one band for all rows, of the same coverage rule


def cells_within(few: Sequence[Residual], share: _Share = by_publishers) -> dict[_Cell, Cell]:
    """Return the bands of runs of at most 256 requests in flight."""
    return _grown(cells_of(few, share), growth_of(few, share))


def beyond(few: Sequence[Residual], many: Sequence[Residual]) -> dict[_Cell, Cell]:
    """Return the bands of runs of more than 256 requests in flight: of each cell the hull of the
    cell's residuals and of the band of the narrowest cell of fewer requests that is like it."""
    within = cells_within(few, by_rows)
    cells = {}
    for path, cell in cells_of(many, by_rows).items():
        alike = (LOADS[-2][1], *path[1:]) if path else path
        other = next((within[alike[:d]] for d in range(len(alike), -1, -1) if alike[:d] in within),
                     cell)  # fmt: skip
        cells[path] = cell._replace(low=min(cell.low, other.low), high=max(cell.high, other.high))
    return cells


def coverage(judged: Sequence[Residual], few: Sequence[Residual] | None = None) -> Coverage:
    """Leave out one publisher at a time, make the bands of the others, and count its rows.
    ``few``: of at most 256 requests in flight, where ``judged`` has more."""
    widths, flat = list[float](), list[float]()
    by_publisher: dict[str, tuple[int, float]] = {}
    for name, left, others in _left_out(judged):
        if few is None:
            cells = cells_within(others)
        else:
            cells = beyond([each for each in few if each.publisher != name], others)
        alike = [each._replace(kind=_ALL) for each in others]
        whole = cell_of(cells_within(alike), _ALL)
        own = list[bool]()
        for each in left:
            cell = cell_of(cells, each.kind)
            own.append(cell.low <= each.value <= cell.high)
            widths.append(cell.high - cell.low)
            flat.append(whole.high - whole.low)
        by_publisher[name] = len(own), sum(own) / len(own)
    if not widths:
        return Coverage(0, math.nan, {}, math.nan, math.nan)
    medians = (math.exp(float(np.median(each))) for each in (widths, flat))
    weights = [n * _row_weight(n) for n, _ in by_publisher.values()]
    covered = float(np.average([share for _, share in by_publisher.values()], weights=weights))
    return Coverage(len(widths), covered, by_publisher, *medians)


_ALL = Kind(*[""] * len(Kind._fields))


def _grown(cells: Mapping[_Cell, Cell], growth: float) -> dict[_Cell, Cell]:
    found = {}
    for path, cell in cells.items():
        more = max(growth, (cell.low - cell.high) / 2.0)
        found[path] = cell._replace(low=cell.low - more, high=cell.high + more)
    return found


def by_crowd(residuals: Sequence[Residual]) -> tuple[list[Residual], list[Residual]]:
    """Return rows of at most 256 requests in flight on a worker, and the others, where servers set
    the pace: neither says anything about the other."""
    many = LOADS[-1][1]
    few = [residual for residual in residuals if residual.kind.load != many]
    return few, [residual for residual in residuals if residual.kind.load == many]


def pairs_of(
    rows: Iterable[tuple[str, tuple[str, ...], str, Mapping[str, float], Mapping[str, float]]],
) -> dict[str, list[Pair]]:
    """Return pairs by metric. ``rows``: publisher, what two runs of a pair have in common, what
    they differ in, measured and predicted figures."""
    groups = defaultdict[tuple[str, ...], list[Any]](list)
    for publisher, common, own, measured, predicted in rows:
        groups[publisher, *common].append((own, measured, predicted))
    pairs: dict[str, list[Pair]] = {metric: [] for metric in METRICS}
    for (publisher, *_), alike in groups.items():
        for (one, a, p), (other, b, q) in combinations(alike, 2):
            for metric in METRICS if one != other else ():
                values = [each.get(metric, 0.0) for each in (a, b, p, q)]
                if min(values) > 0.0:
                    off = math.log(values[0] / values[1]) - math.log(values[2] / values[3])
                    pairs[metric].append(Pair(publisher, abs(off)))
    return pairs


def relative(pairs: Sequence[Pair]) -> dict[str, float] | None:
    """Return the factor within which 80% of pairs lie; None without pairs. Publishers weigh as in
    cells."""
    if not pairs:
        return None
    counts = Counter(pair.publisher for pair in pairs)
    order = np.argsort([pair.value for pair in pairs])
    weights = np.array([_row_weight(counts[pair.publisher]) for pair in pairs])[order]
    at = int(np.searchsorted(np.cumsum(weights), LEVEL * weights.sum()))
    value = pairs[int(order[min(at, len(pairs) - 1)])].value
    return {"factor": round(math.exp(value), 3), "pairs": len(pairs), "publishers": len(counts)}


def bands(
    residuals: Mapping[str, Sequence[Residual]],
    made: Mapping[str, Any],
    pairs: Mapping[str, Sequence[Pair]] | None = None,
) -> dict[str, Any]:
    """Return the content of ``error_bands.json``. ``residuals``: by metric; ``made``: version, date
    and rows that it is of; ``pairs``: by metric, for comparisons."""
    metrics, held = {}, {}
    for metric in METRICS:
        few, many = by_crowd(residuals[metric])
        held[metric] = {
            name: round(coverage(part, *others).covered, 2)
            for name, part, *others in ((CROWDS[0], few), (CROWDS[1], many, few))
            if len({each.publisher for each in part}) > 1
        }
        grown = beyond(few, many) | cells_within(few)  # the last one's is the widest cell
        metrics[metric] = {
            " | ".join(path): _ends(metric, cell) for path, cell in sorted(grown.items())
        }
    of_pairs = {metric: relative(each) for metric, each in (pairs or {}).items()}
    return {
        "level": LEVEL, "made": dict(made), "held": held, "metrics": metrics,
        "calibrated": of_calibrated(calibrated()),
        "relative": {metric: cell for metric, cell in of_pairs.items() if cell is not None},
    }  # fmt: skip


def _ends(metric: str, cell: Cell) -> dict[str, float]:
    """Return the ends of a band as factors, and what it rests on."""
    return {
        "low": round(math.exp(min(cell.low, -_LEAST[metric])), 3),
        "high": round(math.exp(max(cell.high, _LEAST[metric])), 3),
        "rows": cell.rows,
        "publishers": cell.publishers,
    }


class CalibratedRow(NamedTuple):
    """A run that two others of its publisher's group calibrated (``rows/calibrated.csv``)."""

    group: str
    publisher: str
    metric: str
    value: float  #: ln(measured / predicted with the calibration)


def calibrated() -> list[CalibratedRow]:
    """Return the runs of the record of calibrations that were not calibrated on."""
    text = (files(__package__) / "rows" / "calibrated.csv").read_text(encoding="utf-8")
    return [
        CalibratedRow(row["group"], row["publisher"], row["figure"],
                      math.log(float(row["measured"]) / float(row["calibrated"])))
        for row in csv.DictReader(text.splitlines())
    ]  # fmt: skip


def of_calibrated(rows: Sequence[CalibratedRow]) -> dict[str, dict[str, float]]:
    """Return the bands of calibrated runs by metric: as those of publishers, but groups of runs
    that were calibrated together are left out instead."""
    found = {}
    for metric in dict.fromkeys(row.metric for row in rows):
        own = [row for row in rows if row.metric == metric]
        groups = [Residual(row.group, _ALL, row.value) for row in own]
        cell = cell_of(cells_within(groups), _ALL)
        cell = cell._replace(publishers=len({row.publisher for row in own}))
        found[metric] = _ends(metric, cell) | {"held": round(coverage(groups).covered, 2)}
    return found


def residuals_of(
    rows: Iterable[tuple[str, Kind, Mapping[str, float], Mapping[str, float]]],
) -> dict[str, list[Residual]]:
    """Return residuals by metric of publisher, kind, measured and predicted figures."""
    residuals: dict[str, list[Residual]] = {metric: [] for metric in METRICS}
    for publisher, kind, measured, predicted in rows:
        for metric in METRICS:
            a, b = measured.get(metric, 0.0), predicted.get(metric, 0.0)
            if a > 0.0 and b > 0.0:
                residuals[metric].append(Residual(publisher, kind, math.log(a / b)))
    return residuals
