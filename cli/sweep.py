"""``eldr-sim sweep``: many runs from one file."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, cast, get_args

import click
import pyarrow as pa

from eldr_sim.cli.console import print_table, sweep_bar
from eldr_sim.cli.decorators import option, writes
from eldr_sim.errors import InputError
from eldr_sim.planning.runs.runner import Backend, expected_tokens
from eldr_sim.planning.runs.sweep import COMPLETED, FAILED, SweepResult
from eldr_sim.planning.runs.sweep import sweep as run_sweep
from eldr_sim.planning.runs.sweep_spec import SweepSpec, read_spec
from eldr_sim.simulator.outcome.catalogue import HEADLINE, label
from eldr_sim.simulator.outcome.metrics import warnings_of

_FIGURES = (*HEADLINE, "slo_attainment")
#: What memory is traded for, and the memory: shown where that is not the same for all points.
_MEMORY = ("request_goodput", "kv_blocks_per_worker")
#: Rows of a table and lines of failures on the screen; the files hold them all.
_MOST_ROWS, _MOST_FAILURES = 60, 10


@click.command(short_help="Run a grid or any other set of runs.")
@click.argument("file", type=click.Path(path_type=Path), metavar="SWEEP.yaml")
@writes("--out", Path, "Folder for the runs and the data set.")
@option("--resume", bool, "Continue the sweep in --out.")
@option("--force", bool, "Replace the sweep in --out.")
@option("--dry-run", bool, "Print the points without running them.")
@option("--jobs", int, "Number of runs at a time.  [default: number of CPUs]", metavar="N")
@option("--backend", [*get_args(Backend)], "Where to run: processes of this machine, or a Ray "
        "cluster.", default="joblib")  # fmt: skip
@option("--address", None, "Address of the Ray cluster.  [default: auto, the one on this machine]",
        metavar="auto|local|HOST:PORT")  # fmt: skip
def sweep(
    file: Path,
    out: Path | None,
    resume: bool,
    force: bool,
    dry_run: bool,
    jobs: int | None,
    backend: str,
    address: str | None,
) -> None:
    """Run all points of SWEEP.yaml under their seeds, into one data set. Completed runs are kept:
    after Ctrl-C or a crash, --resume continues. A failed run becomes a row with its reason."""
    spec = read_spec(file)
    if dry_run:
        _print_points(spec)
        return
    if out is None:
        raise InputError("out", "the sweep has no folder", "--out DIR, or --dry-run")
    with sweep_bar(file.stem) as update:
        result = run_sweep(
            spec,
            out,
            resume=resume,
            force=force,
            jobs=jobs,
            backend=cast("Backend", backend),
            address=address,
            progress=update,
        )
    _print(result)
    click.echo(f"Wrote {out}")
    if COMPLETED not in result.points["status"].to_pylist():
        click.echo("No run completed", err=True)
        sys.exit(1)


def _print_points(spec: SweepSpec) -> None:
    paths = list(spec.points[0].parameters)
    rows = [
        [str(index), *(_cell(point.parameters[path]) for path in paths)]
        for index, point in enumerate(spec.points)
    ]
    configs = [config for point in spec.points for config in point.configs]
    tokens = sum(map(expected_tokens, configs)) / 1e6
    size = f"{_count(len(spec.points), 'point')}, {_count(len(configs), 'run')}"
    title = f"{size}, about {tokens:.1f} million output tokens to simulate"
    print_table(title, ["point", *paths], rows)


def _print(result: SweepResult) -> None:
    points = result.aggregate.to_pylist()
    columns = [n for n in _FIGURES if any(row.get(n) is not None for row in points)]
    if len({row.get(_MEMORY[1]) for row in points} - {None}) > 1:
        columns += [n for n in _MEMORY if any(row.get(n) is not None for row in points)]
    shown = ("point", *result.parameters, *columns, "runs_failed")
    rows = [[_cell(row[name]) for name in shown] for row in points[:_MOST_ROWS]]
    runs = result.points.num_rows // len(points)
    title = f"{_count(len(points), 'point')}, mean over {_count(runs, 'seed')}"
    if "weakest_provenance" in result.points.column_names:
        labels = result.points["weakest_provenance"].unique().drop_null().to_pylist()
        title += f", {' and '.join(sorted(labels))} tables"
    headings = [label(name) for name in columns]
    print_table(title, ["point", *result.parameters, *headings, "failed"], rows)
    if len(points) > len(rows):
        click.echo(f"... and {len(points) - len(rows)} more")
    _warn(result.points)


def _warn(table: pa.Table) -> None:
    """Print failed runs, and warnings about the others, on standard error."""
    rows = table.to_pylist()
    failed = [row for row in rows if row["status"] == FAILED]
    for row in failed[:_MOST_FAILURES]:
        where = f"point {row['point']} ({row['name']}), seed {row['seed']}"
        click.echo(f"Failed: {where}: {row['reason']}", err=True)
    if len(failed) > _MOST_FAILURES:
        click.echo(f"... and {len(failed) - _MOST_FAILURES} more", err=True)
    warned = defaultdict[str, dict[int, None]](dict)
    for row in rows:
        if row["status"] == COMPLETED:
            for warning in warnings_of({k: _nested(v) for k, v in row.items()}):
                warned[warning][row["point"]] = None
    for warning, points in list(warned.items())[:_MOST_FAILURES]:
        numbers = [str(point) for point in points]
        said = f"{', '.join(numbers[:20])}{', ...' * (len(numbers) > 20)}"
        click.echo(f"Warning: point{'s' * (len(points) != 1)} {said}: {warning}", err=True)
    if len(warned) > _MOST_FAILURES:
        click.echo(f"... and {len(warned) - _MOST_FAILURES} more warnings", err=True)


def _nested(value: Any) -> Any:
    """Undo the JSON text of a nested figure."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
