"""Draw the picture of the README, the same requests under two routers, and write its figures beside
it. From the root of a checkout, the README's first command once for each policy, then the picture:

    eldr-sim run --policy jsq --topology 8P16D --out results/jsq
    eldr-sim run --policy eldr --topology 8P16D --out results/eldr
    python studies/one_picture.py results/jsq results/eldr docs/images/same_requests.png

``tests/house/test_picture.py`` compares the figures with what the command prints."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

import eldr_sim
from eldr_sim.charts import PALETTE

COLORS = PALETTE[:4]
POLICY_COLORS = (PALETTE[7], PALETTE[4])


def load_of_workers(axes: Axes, requests: pd.DataFrame) -> None:
    """Draw the share of each domain among the requests that a decode worker served."""
    counts = pd.crosstab(requests["decode_worker"], requests["domain"], normalize="index")
    bottom = np.zeros(len(counts))
    for domain, color in zip(counts.columns, COLORS, strict=True):
        axes.bar(counts.index, counts[domain], bottom=bottom, color=color, label=domain)
        bottom += counts[domain].to_numpy()
    axes.set(xticks=[], yticks=[], ylim=(0, 1), xlim=(-0.5, len(counts) - 0.5))


#: The figures of ``summary.json`` that are kept beside the picture.
FIGURES = ["completed", "median_tpot_ms", "mean_decode_batch", "mean_active_experts_per_step"]


def main(folders: list[Path], out: Path) -> None:
    """Read two results and draw what the router changed, and its effect on TPOT."""
    figures = {}
    figure = plt.figure(figsize=(10.0, 3.4), layout="constrained")
    parts: Any = figure.subfigures(1, 3, width_ratios=[1.15, 1, 1])
    left, middle, right = parts
    bars = left.subplots(2, 1)
    experts, tpot = middle.subplots(), right.subplots()
    for folder, axes, color in zip(folders, bars, POLICY_COLORS, strict=True):
        summary = json.loads((folder / "summary.json").read_text())
        requests = pd.read_parquet(folder / "requests.parquet").query("measured")
        steps = pd.read_parquet(folder / "steps.parquet").query("role == 'decode' and batch > 0")
        name = summary["policy"]
        figures[name] = {figure: round(summary[figure], 2) for figure in FIGURES}
        load_of_workers(axes, requests)
        axes.set_ylabel(name, fontsize=11)
        mean = steps.groupby("batch")["active_experts"].agg(["mean", "size"])
        mean = mean[mean["size"] >= 50]
        experts.plot(mean.index, mean["mean"], color=color, label=name, linewidth=2)
        values = np.sort(requests["tpot_ms"].dropna())
        label = f"{name}: median {figures[name]['median_tpot_ms']:.1f}"
        tpot.plot(values, np.linspace(0, 1, len(values)), color=color, label=label, linewidth=2)
    bars[0].set_title("share of each domain, by decode worker", fontsize=9)
    bars[1].legend(
        ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0.0), fontsize=8, frameon=False
    )
    experts.set_title("distinct experts of a step, per layer", fontsize=9)
    experts.set(xlabel="batch, requests", ylim=(0, None))
    tpot.set_title("TPOT of the requests, ms", fontsize=9)
    tpot.set(ylabel="share of requests", ylim=(0, 1))
    for axes in (experts, tpot):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    about = {"Software": f"eldr-sim {eldr_sim.__version__}", "Description": json.dumps(figures)}
    figure.savefig(out, dpi=130, metadata=about)
    out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:3]], Path(sys.argv[3]))
