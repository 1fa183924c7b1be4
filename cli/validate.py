"""``eldr-sim validate``: the simulator against measured serving runs."""

from __future__ import annotations

from pathlib import Path

import click
from pyarrow import csv

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.simulator.results import check_output, result_folder, write_json
from eldr_sim.validation.silicon import (
    AICONFIGURATOR,
    REPEATABILITY,
    Errors,
    growth_error,
    predict_rows,
    read_rows,
    silicon_errors,
    worst_rows,
)


@click.group(short_help="Compare the simulator with measured runs.")
def validate() -> None:
    """Compare the simulator with measured serving runs."""


@validate.command()
@click.option(
    "--gpu",
    multiple=True,
    type=click.Choice(["H100", "H200", "B200"]),
    default=("H100", "H200"),
    show_default=True,
    help="Cards whose rows are predicted; repeat for more.",
)
@click.option(
    "--moe-kernel",
    type=click.Choice(["marlin", "newest"]),
    default="marlin",
    show_default=True,
    help="MoE kernel on H100 and H200: what those runs used (derived), or the newest table.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write tables here.")
@click.option("--force", is_flag=True, help="Replace the report in --out.")
def silicon(gpu: tuple[str, ...], moe_kernel: str, out: Path | None, force: bool) -> None:
    """Predict TTFT and TPOT of published runs of GPT-OSS-120B on vLLM.

    The runs come with `pip install eldr-sim[aiconfigurator]`. Nothing is fitted on them.
    """
    if out is not None:
        check_output(out, force)
    rows = [row for row in read_rows() if row.case.gpu in gpu]
    with progress_bar("silicon") as update:
        table = predict_rows(rows, moe_kernel=moe_kernel, progress=update)
    found = silicon_errors(table)
    columns = ["rows", "metric", "n", "ours", "bias", "all n", "all rows", "AIConfigurator"]
    print_table("Absolute error, %: median | 90th percentile", columns, [_error(e) for e in found])
    noise = ", ".join(f"{name.upper()} {a} | {b}" for name, (a, b) in REPEATABILITY.items())
    click.echo(f"Runs repeated on another date differ by (%): {noise}")
    for metric in ("tpot", "ttft"):
        grown = growth_error(table, metric)
        click.echo(f"Growth of {metric.upper()} with concurrency: mean error {grown:.1f}%")
    click.echo()
    worst = worst_rows(table).to_pylist()
    print_table("Worst TPOT", list(worst[0]), [[_cell(v) for v in row.values()] for row in worst])
    if out is not None:
        with result_folder(out, force) as folder:
            csv.write_csv(table, folder / "rows.csv")
            write_json(
                folder / "summary.json",
                {"moe_kernel": moe_kernel, "errors": [vars(error) for error in found]},
            )
        click.echo(f"Wrote {out}")


def _error(error: Errors) -> list[str]:
    other = AICONFIGURATOR.get(error.group.removeprefix("gpu "), {}).get(error.metric)
    return [
        error.group,
        error.metric.upper(),
        str(error.rows),
        f"{error.median:.1f} | {error.p90:.1f}",
        f"{error.bias:+.1f}",
        str(error.all_rows),
        f"{error.all_median:.1f} | {error.all_p90:.1f}",
        "" if other is None else f"{other[0]} | {other[1]}",
    ]


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
