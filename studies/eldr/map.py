"""Where ELDR pays and where it costs: over load, batch, ranks, skew, links and prompt lengths.

Qwen3-30B-A3B on H100, 256 output tokens, one thing changed at a time, each at every load: ``eldr``
against ``jsq`` on the same requests. So many prefill workers that prompts hardly wait for them.
What ELDR's capture and decision take is charged, so that it can cost more than it saves.

``python -m studies.eldr.map PICTURE`` draws the kept cells, ``docs/data/eldr_map.csv``, again.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from eldr_sim.charts import Draw, field, write_picture
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.planning.slo import Interval
from eldr_sim.planning.studies.figures import (
    Claim,
    Reproduction,
    Runner,
    change,
    grouped,
    mean,
    spread,
)

_TITLE = "ELDR against jsq, mean end-to-end time, %; black: break-even"
RATES = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
E2E, TPOT, TTFT = "mean_e2el_ms", "mean_tpot_ms", "mean_ttft_ms"
_BASE: dict[str, Any] = {
    "frontend": "none",
    "gpu": "H100", "topology": "4P8D", "workload": "task", "output_len": 256
}  # fmt: skip
_WINDOW = {"duration": 12.0, "warmup": 8.0}


def _decode(workers: int, ranks: int) -> dict[str, Any]:
    own = {"data_parallel_size": ranks, "enable_expert_parallel": True}
    return {"topology": f"4P{workers}D", "decode": own} if ranks > 1 else {}


#: What is changed, and the fields of each value; the first of each is the base.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "decode workers (batch)": {f"{n}": {"topology": f"4P{n}D"} for n in (8, 4, 16, 32)},
    "ranks that share experts": {f"{n}": _decode(8 // n, n) for n in (1, 2, 4)},
    "skew of routing": {
        "middle": {}, "low": {"routing_band": "low"}, "high": {"routing_band": "high"},
        "none": {"routing": "uniform"},
    },
    "NIC, GB/s": {"50": {}, "12.5": {"nic": 12.5e9}, "3": {"nic": 3e9}},
    "model and routing": {
        "Qwen3 preset": {}, "reference-moe": {"trace": "reference-moe"},
        "GPT-OSS-120B preset": {"model": "GPT-OSS-120B"},
        "gpt-oss-20b, recorded": {
            "model": "GPT-OSS-20B", "trace": "gpt-oss-20b", "workload": "trace"
        },
    },
    "prompt tokens": {
        "64": {}, "1024": {"input_len": 1024, "topology": "16P8D"},
        "4096": {"input_len": 4096, "topology": "64P8D"},
    },
}  # fmt: skip


def placed(rates: Sequence[float], changes: Sequence[Interval]) -> tuple[float | None, str]:
    """Return the rate at which a gain ends, and what there is to say on either side of it.

    Rates rise, changes are of a time. The rate is where the line between two means, over the
    logarithm of the rate, crosses nothing; None where all have one sign, or intervals hold zero.
    """
    for one, other, a, b in zip(rates, rates[1:], changes, changes[1:], strict=False):
        if (a.mean < 0.0) != (b.mean < 0.0):
            share = a.mean / (a.mean - b.mean)
            rate = float(np.exp(np.log(one) + share * np.log(other / one)))
            return rate, "pays above" if b.mean < 0.0 else "pays below"
    return None, "pays at all rates" if changes[0].mean < 0.0 else "costs at all rates"


def eldr_map(runner: Runner, quick: bool) -> Reproduction:
    """Return the change of each cell, and of each line of cells where it breaks even."""
    rates, seeds = (RATES[::4], range(2)) if quick else (RATES, range(3))
    axes = dict(list(AXES.items())[1:3]) if quick else AXES
    base = _BASE if quick else _BASE | _WINDOW
    with TemporaryDirectory(prefix="eldr-sim-map-") as folder:
        cases = {
            (axis, value, rate, policy): base | _on_disk(fields, Path(folder))
            | {"request_rate": rate, "policy": policy}
            for axis, values in axes.items() for value, fields in values.items()
            for rate in rates for policy in ("jsq", "eldr")
        }  # fmt: skip
        runs = runner.paired(cases, seeds)
    rows: list[dict[str, Any]] = []
    claims = []
    for axis, values in axes.items():
        for value in values:
            cells = []
            for rate in rates:
                ours, theirs = (runs[axis, value, rate, p] for p in ("eldr", "jsq"))
                each = {metric: change(ours, theirs, metric) for metric in (E2E, TPOT, TTFT)}
                cells.append(each[E2E])
                row: dict[str, Any] = {"axis": axis, "value": value, "rate": rate}
                row |= {"batch": mean(theirs, "mean_decode_batch")}
                row |= {"experts_a_step": mean(theirs, "mean_active_experts_per_step")}
                for metric, interval in each.items():
                    row |= spread(f"{metric.removesuffix('_ms')}_%", interval)
                rows.append(row)
            even, said = placed(rates, cells)
            for row in rows[-len(rates) :]:
                row["break_even_rate"], row["pays"] = even, said
            best = min(range(len(rates)), key=lambda i: cells[i].mean)
            spelled = f"{said} {even:.0f}/s" if even is not None else said
            claims.append(
                Claim(f"{axis} {value}: mean end-to-end time falls, at the best of the rates",
                      -100.0, -0.1, cells[best].mean, tolerance=0.0, stated=False,
                      reason=f"at {rates[best]:g}/s; {spelled}", interval=cells[best][1:])
            )  # fmt: skip
    return Reproduction("map", f"{_TITLE} (not in the paper)", rows, claims, _drawn(rows))


def _on_disk(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return fields of a run; a GPU with another NIC is a file."""
    own = dict(fields)
    if "nic" in own:
        path = folder / f"h100-{own['nic']:g}.json"
        gpu = load_gpu("H100").model_copy(update={"nic_bandwidth": own.pop("nic")})
        path.write_text(gpu.model_dump_json())
        own["gpu"] = str(path)
    return own


def _drawn(rows: Sequence[dict[str, Any]]) -> Draw:
    """Draw all lines of cells, with the rate at which nothing is gained."""
    shown = [row | {"line": f"{row['axis']}: {row['value']}"} for row in rows]
    cells = field(shown, "rate", "line", "mean_e2el_%", spell="{:+.1f}")

    def draw(figure: Any) -> None:
        cells(figure)
        axes = figure.axes[0]
        axes.images[0].set_clim(-20, 20)
        axes.set(xlabel="requests/s", ylabel="")
        figure.axes[1].set_ylabel("change of mean end-to-end time, %")
        at = list(dict.fromkeys(row["rate"] for row in rows))
        for y, line in enumerate(grouped(shown, lambda row: row["line"]).values()):
            even = line[0]["break_even_rate"]
            if even is not None:
                x = float(np.interp(np.log(even), np.log(at), range(len(at))))
                axes.plot([x, x], [y - 0.5, y + 0.5], color="black", lw=2)

    return draw


def draw_kept(to: Path) -> None:
    """Draw the cells of ``docs/data/eldr_map.csv``."""
    path = Path(__file__).parents[2] / "docs" / "data" / "eldr_map.csv"
    with path.open(encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = []
        for row in csv.DictReader(lines):
            even = row["break-even, requests/s"]
            rows.append(
                {
                    "axis": row["what is changed"],
                    "value": row["to"],
                    "rate": float(row["requests/s"]),
                    "mean_e2el_%": float(row["end-to-end time, %"].split()[0]),
                    "break_even_rate": None if even == "-" else float(even),
                }
            )
    write_picture(to, _drawn(rows), size=(9, 7), title=_TITLE)


if __name__ == "__main__":
    draw_kept(Path(sys.argv[1]))
