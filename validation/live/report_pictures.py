"""Pictures of a report, from the tables of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from eldr_sim.validation.live.calibrated import Calibrated, model_of
from eldr_sim.validation.live.compare import Comparison
from eldr_sim.validation.live.plots import (
    BatchCurve,
    CdfPanel,
    ComponentBars,
    StepScatter,
    draw_cdfs,
    draw_components,
    draw_distinct,
    draw_steps,
    save_picture,
)
from eldr_sim.validation.live.recording import LiveRun
from eldr_sim.validation.live.report_figures import mean

__all__ = ["draw_pictures"]

Row = dict[str, Any]

_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_MOST_CURVES, _FEWEST_STEPS = 4, 30


def draw_pictures(
    folder: Path,
    runs: Sequence[LiveRun],
    calibrated: Mapping[str, Calibrated],
    compared: Comparison,
) -> list[Row]:
    """Draw all pictures into a folder.

    Parameters
    ----------
    folder
        Where the PNG files go.
    runs, calibrated, compared
        The runs of a campaign, their set-ups' calibrations, and what was made of them.

    Returns
    -------
    list of dict
        Of each picture its ``file``, ``kind`` (``cdf``, ``components``, ``steps`` or ``distinct``),
        ``setup``, and ``of``, the set-up with the policy where there are several.
    """
    drawn: list[Row] = []

    def picture(
        kind: str, setup: str, of: str, size: tuple[float, float], draw: Callable[[Any], None]
    ) -> None:
        file = f"{kind}_{of.replace(' ', '_')}.png"
        save_picture(folder / file, size, draw)
        drawn.append({"file": file, "kind": kind, "setup": setup, "of": of})

    for setup in dict.fromkeys(run.info.setup for run in runs):
        mine = [run for run in runs if run.info.setup == setup]
        policies = list(dict.fromkeys(run.info.policy for run in mine))
        for policy in policies:
            of = setup if len(policies) == 1 else f"{setup} {policy}"
            panels = _cdf_panels(_where(compared.requests, setup=setup, policy=policy))
            if panels:
                height = 0.5 + 1.75 * len(panels)
                picture("cdf", setup, of, (9.0, height), partial(draw_cdfs, panels=panels))
            bars = _component_bars(compared.summary, setup, policy)
            picture("components", setup, of, (9.0, 3.0), partial(draw_components, bars=bars))
        kinds = _scatters(_where(compared.steps, setup=setup))
        picture("steps", setup, setup, (4.6 * len(kinds), 5.0), partial(draw_steps, kinds=kinds))
        curves = _curves(mine, calibrated[setup], compared.steps)
        if curves:
            picture("distinct", setup, setup, (9.0, 4.0), partial(draw_distinct, curves=curves))
    return drawn


def _where(table: pa.Table, **values: Any) -> pa.Table:
    for name, value in values.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def _cdf_panels(of: pa.Table) -> list[CdfPanel]:
    panels = []
    for load in dict.fromkeys(of["load"].to_pylist()):
        repeats = [
            _where(of, load=load, repeat=repeat)
            for repeat in dict.fromkeys(_where(of, load=load)["repeat"].to_pylist())
        ]
        sides = [
            {
                name: [r[f"{side}_{metric}_ms"].drop_null().to_numpy() for r in repeats]
                for metric, name in _METRICS.items()
            }
            for side in ("live", "simulated")
        ]
        panels.append(CdfPanel(load, *sides))
    return panels


def _component_bars(summary: Row, setup: str, policy: str) -> list[ComponentBars]:
    """Differences of each load; noise is the mean distance of two live repeats, where there are."""
    rows = [
        row
        for row in summary["components"]
        if row["setup"] == setup and row["policy"] == policy and row["of"] == "e2el"
    ]
    bars = []
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = [row for row in rows if row["load"] == load and row["difference_ms"] is not None]
        error = {
            r["component"]: r["difference_ms"]
            for r in mine
            if r["repeat"] is None and (r["live_ms"] or r["simulated_ms"])
        }
        noise = {}
        for name in error:
            live = [
                r["live_ms"] for r in mine if r["component"] == name and r["repeat"] is not None
            ]
            distance = mean(abs(a - b) for a, b in combinations(live, 2))
            if distance is not None:
                noise[name] = distance
        bars.append(ComponentBars(load, error, noise))
    return bars


def _scatters(steps: pa.Table) -> list[StepScatter]:
    kinds = []
    decode = pc.equal(steps["kind"], "decode")
    for title, mine, size, size_name in (
        ("Decode only", steps.filter(decode), "batch", "requests"),
        ("With prompts", steps.filter(pc.invert(decode)), "tokens", "tokens"),
    ):
        if mine.num_rows:
            kinds.append(
                StepScatter(
                    title,
                    mine["live_ms"].to_numpy() / 1e3,
                    mine["predicted_ms"].to_numpy() / 1e3,
                    mine[size].to_numpy().astype(float),
                    size_name,
                )
            )
    return kinds


def _curves(runs: Sequence[LiveRun], calibrated: Calibrated, steps: pa.Table) -> list[BatchCurve]:
    """Live decode-only steps by batch, with the calibrated step time over distinct experts."""
    info = runs[0].info
    engine = next(e for e in info.engines if e.role != "prefill")
    model = model_of(info.model)
    step_time = calibrated.step_time(model, engine, info.max_model_len)
    parts = [_decode_only(run, steps) for run in runs]
    batch, distinct, context, seconds = np.concatenate(parts).T
    curves = []
    for size in _telling_batches(batch):
        at = batch == size
        most = min(model.n_experts, size * model.top_k)
        counts = np.arange(model.top_k, most + 1.0)
        middle = float(np.median(context[at]))
        curve = [step_time.decode_s([d] * model.n_moe_layers, size, middle) for d in counts]
        curves.append(BatchCurve(size, distinct[at], seconds[at], counts, np.array(curve)))
    return curves


def _decode_only(run: LiveRun, steps: pa.Table) -> NDArray[np.float64]:
    """Batch, mean distinct experts, mean context, seconds: a row a step that decodes only."""
    info = run.info
    names = {"setup": info.setup, "policy": info.policy, "load": info.load.name}
    mine = _where(steps, **names, repeat=info.repeat)  # in the order of the recording
    logged = run.steps["distinct"].to_pylist()
    decode = np.flatnonzero(pc.equal(mine["kind"], "decode").to_numpy(zero_copy_only=False))
    batch, context, milli = (mine[name].to_numpy() for name in ("batch", "context", "live_ms"))
    rows = [(batch[i], np.mean(logged[i]), context[i] / batch[i], milli[i] / 1e3) for i in decode]
    return np.array(rows, np.float64).reshape(-1, 4)


def _telling_batches(batch: NDArray[np.float64]) -> list[int]:
    """Batches to show: powers of two with steps enough, the largest ones, spread out."""
    sizes, counts = np.unique(batch, return_counts=True)
    often = [int(s) for s, n in zip(sizes, counts, strict=True) if n >= _FEWEST_STEPS]
    powers = [size for size in often if size > 1 and size & (size - 1) == 0]
    return powers[-_MOST_CURVES:] or often[-_MOST_CURVES:]
