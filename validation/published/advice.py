"""Which advice holds: what a planner that goes by predictions would choose among published runs.

A question is a card, a model, prompt and output lengths and a bound of TPOT. The published runs of
that card, model and lengths are the choices: engine, checkpoint, parallelism, prefill apart or not,
streams. A planner takes the one of most output tokens a second and GPU with a predicted TPOT within
the bound; what was measured says whether it does, and how much of the best such run's it serves."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

#: Bounds of TPOT, ms: 100, 67, 50, 33 and 20 tokens a second for a user.
LIMITS = (10.0, 15.0, 20.0, 30.0, 50.0)
#: Shares by which a planner stays below the bound.
MARGINS = (0.0, 0.1, 0.2)
#: What makes a question, beside the bound; of fewer choices than this none is asked.
_ASKED, _CHOICES = ["gpu", "model", "input_len", "output_len"], 6
_RESAMPLES = 2000


class Advice(NamedTuple):
    """What came of one estimator's choices, by question; nothing predicted within the bound: 0."""

    kept: NDArray[np.bool_]  #: whether the measured TPOT of the chosen run keeps the bound
    #: its measured output tokens/s a GPU, over the most of the runs that keep the bound
    served: NDArray[np.float64]
    over: NDArray[np.float64]  #: its measured TPOT over the bound
    group: NDArray[np.int64]  #: which questions are of one card, model and lengths

    @property
    def value(self) -> NDArray[np.float64]:
        """Return what is served within the bound: nothing where it is missed."""
        return np.where(self.kept, self.served, 0.0)


def _throughput(frame: Any, tpot_ms: Any, ttft_ms: Any) -> Any:
    """Return output tokens/s a GPU of a closed loop, by Little's law over a request's life."""
    life_s = (ttft_ms + tpot_ms * (frame.output_len - 1)) / 1e3
    return frame.concurrency * frame.output_len / life_s / frame.gpus


def choices_of(table: pa.Table) -> Any:
    """Return the runs of `record.table_of` that both estimators predict and no filter marks:
    figures by estimator."""
    frame = table.to_pandas()
    frame = frame[(frame.refused == "") & (frame.excluded == "")].copy()
    for who, error in (("ours", "error"), ("other", "other")):
        ms = [
            frame[f"{name}_ms"] * (1.0 + pd.to_numeric(frame[f"{name}_{error}"]) / 100.0)
            for name in ("tpot", "ttft")
        ]
        frame[f"{who}_tpot"], frame[f"{who}_rate"] = ms[0], _throughput(frame, *ms)
    frame["rate"] = _throughput(frame, frame.tpot_ms, frame.ttft_ms)
    return frame.dropna(subset=["ours_rate", "other_rate"])


def advise(choices: Any, who: str, margin: float = 0.0) -> Advice:
    """Choose for every question of six choices or more, of which some keep the bound, and judge by
    what was measured. ``choices``: of `choices_of`; ``who``: ``ours`` or ``other``; ``margin``:
    share by which a predicted TPOT must stay below the bound."""
    lines = list[tuple[bool, float, float, int]]()
    for group, (_, runs) in enumerate(choices.groupby(_ASKED)):
        for limit in LIMITS:
            good = runs[runs.tpot_ms <= limit]
            if len(runs) < _CHOICES or not 0 < len(good) < len(runs):
                continue
            open_to = runs[runs[f"{who}_tpot"] <= limit * (1.0 - margin)]
            if len(open_to) == 0:
                lines.append((False, 0.0, np.nan, group))
                continue
            chosen = open_to.iloc[int(open_to[f"{who}_rate"].argmax())]
            over = chosen.tpot_ms / limit
            lines.append((over <= 1.0, chosen.rate / good.rate.max(), over, group))
    kept, served, over, groups = zip(*lines, strict=True) if lines else ([],) * 4
    return Advice(*map(np.array, (kept, served, over, groups)))


def rows_of(table: pa.Table, names: Sequence[str] = ("eldr-sim", "other")) -> list[dict[str, str]]:
    """Return a row for each margin and estimator: what its choices keep and serve, with 95%
    intervals over resampled cards, models and lengths."""
    rows, choices = list[dict[str, str]](), choices_of(table)
    for margin in MARGINS:
        for who, name in zip(("ours", "other"), names, strict=True):
            advice = advise(choices, who, margin)
            if not len(advice.kept):
                return []
            missed = advice.over[~advice.kept & np.isfinite(advice.over)]
            rows.append({
                "margin": f"{margin:.0%}",
                "estimator": name,
                "questions": str(len(advice.kept)),
                "TPOT kept": _interval(advice.kept.astype(float), advice.group),
                "of the best throughput, where kept": f"{advice.served[advice.kept].mean():.0%}",
                "bound missed by, median": f"{np.median(missed) - 1.0:.0%}" if len(missed) else "",
                "of the best throughput, a miss is 0": _interval(advice.value, advice.group),
            })  # fmt: skip
    return rows


def _interval(values: NDArray[np.float64], group: NDArray[np.int64]) -> str:
    """Say a mean and its interval; groups are resampled whole."""
    rng = np.random.default_rng(0)
    _, of = np.unique(group, return_inverse=True)
    sums, sizes = np.bincount(of, values), np.bincount(of)
    drawn = rng.integers(len(sizes), size=(_RESAMPLES, len(sizes)))
    low, high = np.quantile(sums[drawn].sum(1) / sizes[drawn].sum(1), (0.025, 0.975))
    return f"{values.mean():.0%} [{low:.0%}, {high:.0%}]"
