"""Pictures of a report as PNG: live runs and their simulations. Blue is live, orange simulated;
batches and loads are shades of ``cividis``, which is readable with any colour vision."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from eldr_sim.charts import write_picture
from eldr_sim.kinds import Row
from eldr_sim.planning.slo import mean_known
from eldr_sim.validation.live.calibration.engine_calibration import EngineCalibration, model_of
from eldr_sim.validation.live.live_run import LiveRun
from eldr_sim.validation.live.report.comparison import LiveComparison

_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_SIDES = {"live": ("C0", "-"), "simulated": ("C1", "--")}
_MOST_CURVES, _FEWEST_STEPS = 4, 30
_MOST_POINTS = 1500  # of a scatter; more hide each other


def draw_pictures(
    folder: Path,
    runs: Sequence[LiveRun],
    calibrated: Mapping[str, EngineCalibration],
    compared: LiveComparison,
) -> list[Row]:
    """Draw a campaign's pictures into a folder; returns ``file``, ``kind`` (``cdf``,
    ``components``, ``steps``, ``distinct``), ``setup`` and ``of`` (with the policy) of each."""
    drawn: list[Row] = []

    def picture(
        kind: str, setup: str, of: str, size: tuple[float, float], draw: Callable[[Any], None]
    ) -> None:
        file = f"{kind}_{of.replace(' ', '_')}.png"
        write_picture(folder / file, draw, size, dpi=100)
        drawn.append({"file": file, "kind": kind, "setup": setup, "of": of})

    all_requests, all_steps = compared.requests.to_pandas(), compared.steps.to_pandas()
    for setup in dict.fromkeys(run.info.setup for run in runs):
        mine = [run for run in runs if run.info.setup == setup]
        policies = list(dict.fromkeys(run.info.policy for run in mine))
        for policy in policies:
            of = setup if len(policies) == 1 else f"{setup} {policy}"
            at = (all_requests["setup"] == setup) & (all_requests["policy"] == policy)
            loads = list(all_requests[at].groupby("load", sort=False))
            if loads:
                size = (9.0, 0.5 + 1.75 * len(loads))
                picture("cdf", setup, of, size, partial(_cdfs, loads=loads))
            rows = [
                row
                for row in compared.summary["components"]
                if (row["setup"], row["policy"], row["of"]) == (setup, policy, "e2el")
            ]
            picture("components", setup, of, (9.0, 3.0), partial(_components, rows=rows))
        steps = all_steps[all_steps["setup"] == setup]
        decode = steps["kind"] == "decode"
        kinds = [
            ("Decode only", steps[decode], "batch", "requests"),
            ("With prompts", steps[~decode], "tokens", "tokens"),
        ]
        kinds = [kind for kind in kinds if len(kind[1])]
        picture("steps", setup, setup, (4.6 * len(kinds), 5.0), partial(_steps, kinds=kinds))
        batches = _batches(mine, steps)
        if batches:
            curves = partial(_distinct, batches=batches, run=mine[0], calibrated=calibrated[setup])
            picture("distinct", setup, setup, (9.0, 4.0), curves)
    return drawn


def _cdfs(figure: Any, loads: Sequence[tuple[str, pd.DataFrame]]) -> None:
    """Draw CDFs of latencies: a row per load, a column per metric."""
    grid = figure.subplots(len(loads), len(_METRICS), squeeze=False, sharey=True)
    for row, (load, requests) in zip(grid, loads, strict=True):
        for axes, metric in zip(row, _METRICS, strict=True):
            for side, (colour, style) in _SIDES.items():
                column = f"{side}_{metric}_ms"
                for i, (_, repeat) in enumerate(requests.groupby("repeat", sort=False)):
                    values = np.sort(repeat[column].dropna())
                    share = np.arange(1, len(values) + 1) / max(1, len(values))
                    look = {"color": colour, "linewidth": 1.0, "label": None if i else side}
                    axes.plot(values, share, style, **look)
            both = requests[[f"{side}_{metric}_ms" for side in _SIDES]].to_numpy(np.float64)
            positive = both[both > 0]
            if len(positive) and np.ptp(np.log10(np.percentile(positive, [1, 99]))) > 1.2:
                axes.set_xscale("log")
                _plain_numbers(axes.xaxis, float(np.ptp(positive) / positive.min()))
            axes.set_ylim(0, 1)
            axes.tick_params(labelsize=8)
        row[0].set_ylabel("share of requests", fontsize=8)
        row[len(_METRICS) // 2].set_title(load, fontsize=9)
    for axes, name in zip(grid[-1], _METRICS.values(), strict=True):
        axes.set_xlabel(f"{name}, ms")
    grid[0, 0].legend(fontsize=8, loc="lower right")


def _steps(figure: Any, kinds: Sequence[tuple[str, pd.DataFrame, str, str]]) -> None:
    """Draw predicted against measured step time, and the error below; a column per kind of step. A
    kind is (title, steps, column of the colour, label of the colour)."""
    grid = figure.subplots(2, len(kinds), squeeze=False, height_ratios=(3, 2), sharex="col")
    for (above, below), (title, steps, size, size_name) in zip(grid.T, kinds, strict=True):
        error = 100 * (steps["predicted_ms"] / steps["live_ms"] - 1).to_numpy()
        shown = _thinned(len(error))
        names = ["live_ms", "predicted_ms", size]
        live, predicted, colour = steps[names].to_numpy(np.float64)[shown].T
        points = {"c": colour, "cmap": "cividis", "s": 5, "linewidths": 0}
        low = min(live.min(), predicted.min()) / 1.1
        high = max(live.max(), predicted.max()) * 1.1
        dots = above.scatter(live, predicted, **points)
        below.scatter(live, error[shown], **points)
        for percent, style in ((0, "-"), (5, "--"), (10, ":")):
            for sign in (1, -1) if percent else (1,):
                factor = 1 + sign * percent / 100
                line = {"color": "black", "linewidth": 0.8, "linestyle": style}
                above.plot([low, high], [factor * low, factor * high], **line)
                below.axhline(sign * percent, **line)
        above.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        median, most, worst = np.percentile(np.abs(error), [50, 90, 99])
        bound = max(15.0, min(60.0, worst))
        below.set(ylim=(-bound, bound), xlabel="measured step, ms")
        said = f"error: median {median:.1f}%, p90 {most:.1f}%"
        above.set_title(f"{title}: {len(error):,} steps\n{said}", fontsize=9)
        figure.colorbar(dots, ax=[above, below], label=size_name)
        for axis in (above.xaxis, above.yaxis):
            _plain_numbers(axis, high / low)
    grid[0, 0].set_ylabel("predicted step, ms")
    grid[1, 0].set_ylabel("error, %\n(lines: ±5, ±10)")


def _components(figure: Any, rows: Sequence[Row]) -> None:
    """Draw the error of each component, a bar per load; a bar whose whisker, the mean distance of
    live repeats, reaches zero is within noise."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    rows = [row for row in rows if row["difference_ms"] is not None]
    means = [r for r in rows if r["repeat"] is None and (r["live_ms"] or r["simulated_ms"])]
    components = list(dict.fromkeys(row["component"] for row in means))
    grid = figure.subplots(1, len(components), squeeze=False)
    panels = dict(zip(components, grid[0], strict=True))
    shades = _shades(len(loads))
    for row in means:
        axes, i = panels[row["component"]], loads.index(row["load"])
        axes.bar(i, row["difference_ms"], color=shades[i])
        live = [
            r["live_ms"]
            for r in rows
            if (r["load"], r["component"]) == (row["load"], row["component"])
            and r["repeat"] is not None
        ]
        noise = mean_known(abs(a - b) for a, b in combinations(live, 2))
        if noise is not None:
            axes.errorbar(i, row["difference_ms"], yerr=noise, color="C1", capsize=3)
    for name, axes in panels.items():
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(loads)), [str(i + 1) for i in range(len(loads))], fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_title("E2E" if name == "sum" else name, fontsize=9)
    panels[components[0]].set_ylabel("simulated less live, ms a request", fontsize=8)
    names = ",  ".join(f"{i}: {load}" for i, load in enumerate(loads, 1))
    figure.supxlabel(textwrap.fill(names, 150), fontsize=8)


def _batches(runs: Sequence[LiveRun], steps: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    """Return the largest power-of-two batches with enough decode-only steps, with those steps."""
    parts = []
    for run in runs:
        info = run.info
        mine = steps[(steps["policy"] == info.policy) & (steps["load"] == info.load.name)]
        mine = mine[mine["repeat"] == info.repeat]  # in the order of the recording
        logged = run.steps["distinct"].to_pylist()
        mean_of_layers = [np.mean(layers) if layers else np.nan for layers in logged]
        parts.append(mine.assign(distinct=mean_of_layers))
    found = pd.concat(parts)
    found = found[found["kind"] == "decode"]
    sizes = sorted(set(found["batch"].tolist()))
    of_batch = {size: found[found["batch"] == size] for size in sizes}
    often = [batch for batch, own in of_batch.items() if len(own) >= _FEWEST_STEPS]
    powers = [batch for batch in often if batch > 1 and batch & (batch - 1) == 0]
    return [(batch, of_batch[batch]) for batch in (powers or often)[-_MOST_CURVES:]]


def _distinct(
    figure: Any,
    batches: Sequence[tuple[int, pd.DataFrame]],
    run: LiveRun,
    calibrated: EngineCalibration,
) -> None:
    """Draw decode step time against distinct experts: live points over calibrated curves."""
    model = model_of(run.info.model)
    engine = next(e for e in run.info.engines if e.role != "prefill")
    step_time = calibrated.step_time(model, engine, run.info.max_model_len)
    axes = figure.subplots()
    for shade, (batch, steps) in zip(_shades(len(batches)), batches, strict=True):
        shown = steps.iloc[_thinned(len(steps), _MOST_POINTS // len(batches))]
        dots = {"color": shade, "markersize": 3, "alpha": 0.4}
        axes.plot(shown["distinct"], shown["live_ms"], ".", **dots)
        counts = np.arange(model.top_k, min(model.n_experts, batch * model.top_k) + 1.0)
        context = float(np.median(steps["context"] / batch))
        curve = [step_time.decode_s([d] * model.n_moe_layers, batch, context) for d in counts]
        label = f"batch {batch}: {len(steps):,} steps"
        axes.plot(counts, 1e3 * np.array(curve), color=shade, label=label)
    axes.set(
        xlabel="distinct experts of a MoE layer, mean over the layers",
        ylabel="decode step, ms",
        title="Points: live steps. Lines: calibrated tables, at the points' median context",
        ylim=(0, 1.05 * axes.get_ylim()[1]),
    )
    axes.title.set_fontsize(9)


def _plain_numbers(axis: Any, ratio: float) -> None:
    """Label a logarithmic axis 1, 2, 5, 10 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if ratio < 6 else (1, 2, 5) if ratio < 200 else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


def _thinned(count: int, most: int = _MOST_POINTS) -> NDArray[np.intp]:
    """Return at most ``most`` of ``count`` indices, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.intp))


def _shades(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["cividis"](x) for x in np.linspace(0.0, 0.85, count)]
