"""Write docs/data/eldr_measured_*.csv from folders of `eldr-sim reproduce eldr --measured`.

    python docs/eldr_measured_data.py DIR [MORE ...] && python docs/render.py

The first has all but Figures 13 to 16; each further one adds its errors, or these figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd

from eldr_sim.outputs import write_rows

DATA = Path(__file__).with_name("data")
SHORT = {"Qwen3-30B-A3B": "Qwen3", "GPT-OSS-120B": "GPT-OSS", "Gemma-4-26B-A4B": "Gemma"}


def table(columns: list[str], rows: list[list[str]]) -> list[dict[str, str]]:
    """Return the rows of a table, without the marks of a page."""
    plain = [[cell.replace("`", "").replace("**", "") for cell in row] for row in [columns, *rows]]
    return [dict(zip(plain[0], row, strict=True)) for row in plain[1:]]


def cells(folder: Path) -> pd.DataFrame:
    """Return Figures 10 and 11."""
    return pd.concat([pd.read_csv(folder / f"figure_{n}.csv") for n in (10, 11)])


def errors(folders: list[Path]) -> list[dict[str, str]]:
    """Return the errors by load and model of each folder that has them."""
    rows = []
    for folder in folders:
        made = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        kernels = made["paper"].partition("(")[2].rstrip(")") + ", `--quick`" * made["quick"]
        own = pd.read_csv(folder / "errors.csv").query("by == 'model, dataset' or by == 'all'")
        for row in own.itertuples():
            each = [
                f"{getattr(row, f'{m}_median'):.1f}, {getattr(row, f'{m}_90th'):.1f} "
                f"({getattr(row, f'{m}_bias'):+.1f})"
                for m in ("tpot_p50", "tpot_p95", "tpot_p99", "ttft_p50")
            ]
            model, _, dataset = row.of.partition(", ")
            name = "**all**" if row.of == "all" else f"{dataset}, {SHORT[model]}"
            if not made["quick"] or row.of == "all":
                rows.append([kernels, name, *each])
    names = ["TPOT p50", "TPOT p95", "TPOT p99", "TTFT p50"]
    return table(["kernels", "load, model", *names], rows)


def gains(folder: Path) -> list[dict[str, str]]:
    """Return rr, eldr and the gain of each load, model and rate, ours and measured."""
    every, rows = cells(folder), []
    for (dataset, model, rate), own in every.groupby(["dataset", "model", "rate"], sort=False):
        by = own.set_index("policy")
        rr, eldr = by.loc["rr"], by.loc["eldr"]

        def both(row: pd.Series, name: str) -> str:
            return f"{row[f'{name}_ms']:.1f} / {row[f'{name}_measured_ms']:.1f}"

        def gain(row: pd.Series, name: str) -> str:
            return f"{row[f'{name}_gain']:+.1f} / {row[f'{name}_gain_measured']:+.1f}"

        rows.append(
            [
                f"{dataset}, {SHORT[model]}",
                f"{rate:g}",
                f"{rr.batch:.0f} / {rr.batch_measured:.0f}",
                both(rr, "tpot_p50"),
                both(eldr, "tpot_p50"),
                both(eldr, "ttft_p50"),
                gain(eldr, "tpot_p50"),
                gain(eldr, "tpot_p99"),
                gain(by.loc["domain"], "tpot_p50"),
            ]
        )
    columns = ["load, model", "rate", "batch of `rr`", "`rr` p50, ms", "`eldr` p50, ms",
               "`eldr` TTFT, ms", "`eldr` p50, %", "`eldr` p99, %", "`domain` p50, %"]  # fmt: skip
    return table(columns, rows)


def slope(folder: Path) -> list[dict[str, str]]:
    """Return the time of a distinct expert by model and tile."""
    rows = [
        [
            SHORT[row.model], row.rows, str(row.pairs),
            f"{row.us_per_expert:.2f} ± {row.standard_error_us:.2f}",
            f"{row.bytes_at_peak_us:.2f}", f"{row.times_peak:.1f}",
        ]
        for row in pd.read_csv(folder / "slope.csv").itertuples()
    ]  # fmt: skip
    columns = ["model", "rows of the batch", "pairs of cells", "us an expert and layer",
               "its bytes at 5.3 TB/s, us", "times that"]  # fmt: skip
    return table(columns, rows)


def locality(folder: Path) -> list[dict[str, str]]:
    """Return the split of the gain by model, load and rate, for cells whose tiles differ."""
    every = pd.read_csv(folder / "locality.csv")
    rows = []
    for differ, own in every.groupby("tiles_differ"):
        for row in own.itertuples() if differ else ():
            rows.append(
                [
                    f"{row.dataset}, {SHORT[row.model]}, {row.rate:g}/s",
                    f"{row.batch_rr:.0f}, {row.batch_eldr:.0f}",
                    f"{row.gain_measured_percent:+.1f}",
                    f"{row.of_locality_points:+.1f}",
                    f"{row.of_the_rest_points:+.1f}",
                ]
            )
        if not differ:
            for model, of in own.groupby("model", sort=False):
                rest = of.of_the_rest_points
                rows.append(
                    [
                        f"{SHORT[model]}, {len(of)} cells in one tile, mean",
                        "",
                        f"{of.gain_measured_percent.mean():+.1f}",
                        f"{of.of_locality_points.mean():+.1f}",
                        f"{rest.mean():+.1f} (±{rest.std():.1f})",
                    ]
                )
    columns = ["cells", "batches of `rr`, `eldr`", "measured gain, %", "locality, points",
               "the rest, points"]  # fmt: skip
    return table(columns, rows)


def variants(folders: list[Path]) -> list[dict[str, str]]:
    """Return the gains of Figures 13 to 16, as far as a folder has them."""
    rows = []
    found = ((n, f / f"figure_{n}.csv") for n in (13, 14, 15, 16) for f in folders)
    for figure, path in ((n, path) for n, path in found if path.exists()):
        own = pd.read_csv(path).query("policy == 'eldr'")
        for (variant, rate), of in own.groupby(["variant", "rate"], sort=False):
            by = {
                (row.dataset, row.model): f"{row.tpot_p50_gain:+.1f} / "
                f"{row.tpot_p50_gain_measured:+.1f}, {row.tpot_p99_gain:+.1f} / "
                f"{row.tpot_p99_gain_measured:+.1f}"
                for row in of.itertuples()
            }
            each = [by.get((load, model), "-") for load in ("task", "language") for model in SHORT]
            rows.append([str(figure), f"{variant}, {rate:g}/s", *each])
    names = [f"{load}, {model}" for load in ("Task", "Language") for model in SHORT.values()]
    return table(["figure", "variant", *names], rows)


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
