"""Write docs/data/eldr_measured_*.csv from folders of ``eldr-sim reproduce eldr --measured``.

``python studies/eldr_measured_data.py DIR [MORE ...] && python docs/render.py``: the first folder
has all figures but 13 to 16; each further one adds its errors, or these figures."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from eldr_sim.outputs import write_rows

DATA = Path(__file__).parents[1] / "docs" / "data"
SHORT = {"Qwen3-30B-A3B": "Qwen3", "GPT-OSS-120B": "GPT-OSS", "Gemma-4-26B-A4B": "Gemma"}
Rows = list[dict[str, str]]

#: How rows are told, by column.
_ERROR = "{{{0}_median:.1f}}, {{{0}_90th:.1f}} ({{{0}_bias:+.1f}})"
ERRORS = {"kernels": "{kernels}", "load, model": "{of}"} | {
    name: _ERROR.format(name.lower().replace(" ", "_"))
    for name in ("TPOT p50", "TPOT p95", "TPOT p99", "TTFT p50")
}
GAINS = {
    "load, model": "{dataset}, {model}",
    "rate": "{rate:g}",
    "batch of rr": "{rr.batch:.0f} / {rr.batch_measured:.0f}",
    "rr p50, ms": "{rr.tpot_p50_ms:.1f} / {rr.tpot_p50_measured_ms:.1f}",
    "eldr p50, ms": "{eldr.tpot_p50_ms:.1f} / {eldr.tpot_p50_measured_ms:.1f}",
    "eldr TTFT, ms": "{eldr.ttft_p50_ms:.1f} / {eldr.ttft_p50_measured_ms:.1f}",
    "eldr p50, %": "{eldr.tpot_p50_gain:+.1f} / {eldr.tpot_p50_gain_measured:+.1f}",
    "eldr p99, %": "{eldr.tpot_p99_gain:+.1f} / {eldr.tpot_p99_gain_measured:+.1f}",
    "domain p50, %": "{domain.tpot_p50_gain:+.1f} / {domain.tpot_p50_gain_measured:+.1f}",
}
SLOPE = {
    "model": "{model}",
    "rows of the batch": "{rows}",
    "pairs of cells": "{pairs}",
    "us an expert and layer": "{us_per_expert:.2f} ± {standard_error_us:.2f}",
    "its bytes at 5.3 TB/s, us": "{bytes_at_peak_us:.2f}",
    "times that": "{times_peak:.1f}",
}
LOCALITY = {
    "cells": "{cells}",
    "batches of rr, eldr": "{batches}",
    "measured gain, %": "{gain_measured_percent:+.1f}",
    "locality, points": "{of_locality_points:+.1f}",
    "the rest, points": "{of_the_rest_points:+.1f}{scatter}",
}
VARIANT = "{tpot_p50_gain:+.1f} / {tpot_p50_gain_measured:+.1f}, "
VARIANT += "{tpot_p99_gain:+.1f} / {tpot_p99_gain_measured:+.1f}"


def told(form: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Return the rows of a table in words."""
    return [{name: text.format(**row) for name, text in form.items()} for row in rows]


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows by column name."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def errors(folders: list[Path]) -> Rows:
    """Return the errors by load and model of each folder that has them."""
    rows = []
    for folder in folders:
        made = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        kernels = made["paper"].partition("(")[2].rstrip(")") + ", --quick" * made["quick"]
        own = pd.read_csv(folder / "errors.csv").query("by == 'model, dataset' or by == 'all'")
        for row in records(own):
            if row["of"] != "all":
                model, _, dataset = row["of"].partition(", ")
                row["of"] = f"{dataset}, {SHORT[model]}"
            if not made["quick"] or row["of"] == "all":
                rows.append(row | {"kernels": kernels})
    return told(ERRORS, rows)


def gains(folder: Path) -> Rows:
    """Return rr, eldr and the gain of each load, model and rate, ours and measured."""
    every = pd.concat([pd.read_csv(folder / f"figure_{n}.csv") for n in (10, 11)])
    groups: Any = every.groupby(["dataset", "model", "rate"], sort=False)
    return told(GAINS, (
        {"dataset": dataset, "model": SHORT[model], "rate": rate}
        | {row.policy: row for row in own.itertuples()}
        for (dataset, model, rate), own in groups
    ))  # fmt: skip


def slope(folder: Path) -> Rows:
    """Return the time of a distinct expert by model and tile."""
    rows = pd.read_csv(folder / "slope.csv").replace({"model": SHORT})
    return told(SLOPE, records(rows))


def locality(folder: Path) -> Rows:
    """Return the split of the gain by model, load and rate, for cells whose tiles differ."""
    every = pd.read_csv(folder / "locality.csv").replace({"model": SHORT})
    rows: list[dict[str, Any]] = []
    for model, own in every[~every.tiles_differ].groupby("model", sort=False):
        scatter = f" (±{own.of_the_rest_points.std():.1f})"
        rows.append({str(name): mean for name, mean in own.mean(numeric_only=True).items()}
                    | {"cells": f"{model}, {len(own)} cells in one tile, mean", "batches": "",
                       "scatter": scatter})  # fmt: skip
    for row in records(every[every.tiles_differ]):
        cells = "{dataset}, {model}, {rate:g}/s".format(**row)
        batches = "{batch_rr:.0f}, {batch_eldr:.0f}".format(**row)
        rows.append(row | {"cells": cells, "batches": batches, "scatter": ""})
    return told(LOCALITY, rows)


def variants(folders: list[Path]) -> Rows:
    """Return the gains of Figures 13 to 16, as far as a folder has them."""
    rows = []
    found = ((n, f / f"figure_{n}.csv") for n in (13, 14, 15, 16) for f in folders)
    for figure, path in ((n, path) for n, path in found if path.exists()):
        own = pd.read_csv(path).query("policy == 'eldr'").replace({"model": SHORT})
        for (variant, rate), of in own.groupby(["variant", "rate"], sort=False):
            row = {"figure": str(figure), "variant": f"{variant}, {rate:g}/s"}
            row |= {f"{load}, {m}": "-" for load in ("Task", "Language") for m in SHORT.values()}
            for record in records(of):
                place = f"{record['dataset'].capitalize()}, {record['model']}"
                row[place] = VARIANT.format(**record)
            rows.append(row)
    return rows


def main() -> None:
    """Write every table that the folders have."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    made = {
        "errors": errors([folder for folder in folders if (folder / "errors.csv").exists()]),
        "gains": gains(folders[0]),
        "slope": slope(folders[0]),
        "locality": locality(folders[0]),
        "variants": variants(folders),
    }
    for name, rows in made.items():
        if rows:
            write_rows(DATA / f"eldr_measured_{name}.csv", rows)


if __name__ == "__main__":
    main()
