"""``eldr-sim validate published`` and ``bands``: published runs and how wrong predictions are."""

import datetime
import json
import math
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click import IntRange

from eldr_sim.cli.console import print_table, progress_bar
from eldr_sim.cli.decorators import option, writes
from eldr_sim.errors import InputError
from eldr_sim.outputs import keeping, whole_file
from eldr_sim.validation.published.silicon_rows import MEASURED_MODELS

_FILE = click.Path(path_type=Path, dir_okay=False)
_READ = click.Path(path_type=Path, dir_okay=False, exists=True)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%d %B %Y")


@click.command()
@writes("--out", Path, "Folder of the predictions; those already in it are kept.")
@option("--of parts", ["launches", "aiconfigurator"], "Set of rows: those with launch lines, or "
    "those of aiconfigurator-core. Default: both, if it is installed.", multiple=True)  # fmt: skip
@option("--rows", _READ, "CSV of other rows with launch lines, with the columns of "
    "validation/published/rows/runs.csv; measured columns may be empty.",
        metavar="FILE.csv")  # fmt: skip
@writes("--freeze", _FILE, "Write the predictions of rows with launch lines, before their "
        "measurements are read.", metavar="FILE.json")  # fmt: skip
@option("--compare", _READ, "Compare frozen predictions with the current measurements of the rows.",
        metavar="FILE.json")  # fmt: skip
@option("--model models", list(MEASURED_MODELS), "Rows of aiconfigurator-core to predict; repeat "
        "for more. All by default.", multiple=True)  # fmt: skip
@option("--engine", ["vllm", "sglang", "trtllm"], "Rows of this engine only.")
@option("--most", IntRange(1), "Maximum number of requests in flight of a row.", metavar="N")
@option("--every", IntRange(1), "Use every N-th row of each engine, GPU and model, in the file's "
    "order.", metavar="N", default=1)  # fmt: skip
@option("--others", _READ, "CSV of another estimator's predictions of aiconfigurator-core's rows: "
    "row, ttft_ms, tpot_ms.", metavar="FILE.csv")  # fmt: skip
@option("--jobs", int, "Number of runs at a time.  [default: number of CPUs]", metavar="N")
def published(
    out: Path | None,
    parts: tuple[str, ...],
    rows: Path | None,
    freeze: Path | None,
    compare: Path | None,
    engine: str | None,
    most: int | None,
    every: int,
    jobs: int | None,
    **old: Any,
) -> None:
    """Predict published runs and write a page; runs that cannot be predicted have a reason.

    Runs with their launch lines, which come with this package, and runs of vLLM, SGLang and
    TensorRT-LLM that come with `pip install eldr-sim[aiconfigurator]`. Completed runs are kept:
    after Ctrl-C the same command continues."""
    if sum(way is not None for way in (out, freeze, compare)) != 1:
        raise InputError("out", "one of --out, --freeze and --compare is required", "one of them")
    from eldr_sim.validation.published import runs as launched
    from eldr_sim.validation.published.journal import JOURNALS, kept

    every_run = launched.read_runs(rows)
    if compare is not None:
        _compare(compare, every_run)
        return
    wanted = [
        run
        for run in every_run
        if engine in (None, run.row["engine"].partition("==")[0])
        and float(run.row.get("max_concurrency") or run.row.get("requests") or 0)
        <= (most or math.inf)
    ]
    wanted = launched.sample_runs(wanted, every)
    if freeze is not None:
        _freeze(freeze, wanted, jobs)
        return
    assert out is not None
    default = ("launches", "aiconfigurator") if find_spec("aiconfigurator_core") else ("launches",)
    parts = parts or (default if rows is None else ("launches",))
    with keeping(lambda: kept(out, *JOURNALS)):
        if "launches" in parts:
            from eldr_sim.validation.published import runs_page

            with progress_bar("runs") as update:
                found = launched.predict_runs(wanted, out, jobs, update)
            runs_page.write(wanted, found, out, "eldr-sim validate published", _today())
            for line in runs_page.headline(wanted, found):
                click.echo(line)
            click.echo(f"Wrote {out / 'runs.md'}")
        if "aiconfigurator" in parts:
            _aiconfigurator(out, engine, most, every, jobs, **old)


def _aiconfigurator(
    out: Path,
    engine: str | None,
    most: int | None,
    every: int,
    jobs: int | None,
    models: tuple[str, ...],
    others: Path | None,
) -> None:
    from pyarrow import csv

    from eldr_sim.validation.published import record

    predictions = record.read_others(others)
    wanted = [
        row
        for row in record.read()
        if row.run is not None
        and (not models or row.target in models)
        and engine in (None, row.labels["engine"])
        and row.run.case.concurrency <= (most or math.inf)
    ]
    wanted = record.sample(wanted, every)
    with progress_bar("rows") as update:
        found = record.predict_record(wanted, out, jobs, update)
    rows = record.read() if every == 1 and not models and engine is None else wanted
    table = record.table_of(rows, found, predictions)
    with whole_file(out / "rows.csv") as file:
        csv.write_csv(table, file)
    record.write_page(table, out / "record.md", "eldr-sim validate published", _today())
    by = ("engine", "mode")
    for line in record.cell_lines(list(record.cells(table, by)), by):
        click.echo(line)
    click.echo(f"Wrote {out / 'record.md'}")


def _freeze(path: Path, runs: list[Any], jobs: int | None) -> None:
    from eldr_sim.validation.published import freeze
    from eldr_sim.validation.published.runs import predict_runs

    if path.exists():
        raise InputError("freeze", f"{path} exists", "a new file")
    with progress_bar("runs") as update:
        found = predict_runs(runs, None, jobs, update)
    checksum = freeze.freeze(path, runs, found, version("eldr-sim"), _today())
    predicted = sum(isinstance(what, dict) for what in found.values())
    known = sum(any(run.measured) for run in runs)
    if known:
        click.echo(f"Warning: {known} rows have measurements already, and cannot be compared.",
                   err=True)  # fmt: skip
    click.echo(f"Froze {predicted} predictions of {len(runs)} rows: {path}, {checksum[:12]}")


def _compare(path: Path, runs: list[Any]) -> None:
    from eldr_sim.validation.published import freeze
    from eldr_sim.validation.published.runs_page import sizes

    content, compared = freeze.compare(path, runs)
    cells = [
        [each.run.name, each.metric, f"{each.measured:.4g}", f"{each.predicted:.4g}",
         f"{each.error:+.1f}"]
        for each in compared
    ]  # fmt: skip
    print_table("Frozen predictions", ["row", "figure", "measured", "predicted", "error, %"], cells)
    for metric in dict.fromkeys(each.metric for each in compared):
        errors = [each.error for each in compared if each.metric == metric]
        click.echo(f"{metric}: {sizes(errors)} % (median, 90th percentile, signed median) of "
                   f"{len(errors)} rows")  # fmt: skip
    click.echo(f"Frozen with eldr-sim {content['version']} on {content['date']}")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@writes("--out", _FILE, "File for the bands; the package's own are "
    "simulator/outcome/error_bands.json.", metavar="FILE.json")  # fmt: skip
def bands(folder: Path, out: Path | None) -> None:
    """Make error bands from predictions of published runs, and print how well they cover runs of
    left-out publishers. FOLDER is the --out of `eldr-sim validate published`."""
    from eldr_sim.simulator.outcome.error_band import LOADS
    from eldr_sim.validation.published import bands as making
    from eldr_sim.validation.published.compared import compared_rows

    rows = compared_rows(folder)
    residuals = making.residuals_of(row[:4] for row in rows)
    few = [row for row in rows if row.kind.load != LOADS[-1][1]]
    pairs = making.pairs_of((r.publisher, r.common, r.own, r.measured, r.predicted) for r in few)
    cells = []
    for metric, values in residuals.items():
        within, more = making.by_crowd(values)
        for load, part, *others in (("up to 256", within), ("more", more, within)):
            of = making.coverage(part, *others)
            cells.append([metric, load, str(of.rows), str(len(of.by_publisher)),
                          f"{100 * of.covered:.0f}", f"{of.width:.2f}",
                          f"{of.one_width:.2f}"])  # fmt: skip
    columns = [
        "figure",
        "in flight",
        "rows",
        "publishers",
        "covered, %",
        "high / low",
        "one band for all",
    ]
    print_table("Bands of 80%, of publishers that were left out", columns, cells)
    lines = [
        [metric, *map(str, cell.values())]
        for metric, each in pairs.items()
        if (cell := making.relative(each)) is not None
    ]
    title = "80% of ratios of two runs, launched otherwise, lie within this factor"
    print_table(title, ["figure", "factor", "pairs", "publishers"], lines)
    if out is not None:
        made = {"version": version("eldr-sim"), "date": _today(), "rows": len(rows)}
        text = json.dumps(making.bands(residuals, made, pairs), indent=1) + "\n"
        with whole_file(out, "out") as file:
            file.write_text(text, encoding="utf-8")
        click.echo(f"Wrote {out}")
