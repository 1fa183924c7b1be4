"""The whole public record: every row of the package's file, predicted or refused with a reason.
Rows of one configuration are simulated once, on processes; what has ended stands in a journal, so
that a run that was cut goes on. Nothing that was measured reaches a prediction."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from eldr_sim.charts import write_picture
from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kinds import Progress, no_progress
from eldr_sim.outputs import markdown_table, whole_file
from eldr_sim.simulator.outcome.error_band import Kind, kind_of
from eldr_sim.validation.published import advice, silicon_rows
from eldr_sim.validation.published.journal import OF_RECORD, predicted
from eldr_sim.validation.published.runs import sampled
from eldr_sim.validation.published.silicon import Form, case_tables, load_of, predict_load
from eldr_sim.validation.published.silicon_rows import (
    GPUS,
    MEASURED_MODELS,
    MeasuredRun,
    is_plain,
    marked,
    package_folder,
    read_record,
    target_of,
)

_METRICS = ("tpot", "ttft")


@dataclass(frozen=True)
class Row:
    """A row of the file."""

    row: int  #: of the file, from 0
    labels: dict[str, Any]  #: ``engine``, ``mode``, ``gpu``, ``model``, ``precision``
    measured: dict[str, float]  #: ``tpot``, ``ttft``, ms
    target: str = ""  #: of `MEASURED_MODELS`
    run: MeasuredRun | None = None  #: None where it cannot be predicted
    refused: str = ""  #: and why

    @property
    def key(self) -> str:
        """What rows share that one simulation predicts."""
        assert self.run is not None
        load = load_of(self.run, MEASURED_MODELS[self.target])
        version = filter(None, [load.engine_version])
        return " ".join([self.target, load.tokenizer_mode, *version, str(load.case)])


def read(path: Path | None = None) -> list[Row]:
    """Return all rows of the file (the package's when None), the doubtful ones marked."""
    file_path = path or package_folder() / "systems" / "silicon_sample.csv"
    models = {name: target.dims() for name, target in MEASURED_MODELS.items()}
    rows = []
    with file_path.open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
        known = {_run(record): record for record in records if is_plain(record)}
        for number, record in enumerate(records):
            labels = {
                "engine": record["backend"],
                "mode": record["mode"],
                "gpu": GPUS.get(record["system"], record["system"]),
                "model": record["model_path"].split("/")[-1],
                "precision": record["precision"],
            }
            measured = {name: float(record[f"silicon_{name}_ms"]) for name in _METRICS}
            record = known.get(_run(record), record)
            target = target_of(record)
            row = Row(number, labels, measured, target)
            if not target:
                rows.append(replace(row, refused="this checkpoint is not modelled on this engine"))
                continue
            found = read_record(record, models[target], record["backend"])
            if isinstance(found, str):
                rows.append(replace(row, refused=found))
            else:
                rows.append(replace(row, run=found))
    for name in MEASURED_MODELS:
        own = [i for i, row in enumerate(rows) if row.target == name and row.run is not None]
        for i, run in zip(
            own, marked([r for j in own if (r := rows[j].run)], MEASURED_MODELS[name]), strict=True
        ):
            rows[i] = replace(rows[i], run=run)
    return rows


def _run(record: dict[str, str]) -> tuple[object, ...]:
    """Return what tells a run of DeepSeek, which stands in the file under two names."""
    labels = ("backend", "mode", "system", "precision", "isl", "osl")
    figures = (round(float(record[f"silicon_{name}_ms"]), 2) for name in _METRICS)
    deepseek = "DeepSeek" in record["model_path"]
    return deepseek, *(record[name] for name in labels), *figures


def sample(rows: Sequence[Row], every: int) -> list[Row]:
    """Return every Nth row of each engine, mode, card and model, the first of them first."""
    labels = ("engine", "mode", "gpu")
    return sampled(rows, every, lambda row: (*map(row.labels.get, labels), row.target))


def predict_record(
    rows: Sequence[Row], folder: Path, jobs: int | None = None, progress: Progress = no_progress
) -> dict[str, dict[str, float] | str]:
    """Predict all rows that can be, those of few tokens first; return figures, ms, or why not, by
    `Row.key`. ``folder``: of journal, gone on with, tables and traces."""
    todo = {row.key: row for row in rows if row.run is not None}
    order = sorted(todo.values(), key=_size)
    tasks = {row.key: partial(_figures, row, str(folder)) for row in order}
    return predicted(tasks, folder / OF_RECORD, jobs, progress)


def _size(row: Row) -> tuple[bool, int]:
    """Return what orders rows: dense models first, then by the tokens of the loop."""
    assert row.run is not None
    case = row.run.case
    return "llama" not in row.target, case.concurrency * (case.input_len + 8 * case.output_len)


def _figures(row: Row, folder: str) -> dict[str, float] | str:
    """Return the figures of a row's configuration, or why there are none."""
    assert row.run is not None
    target, form, case = MEASURED_MODELS[row.target], Form(), row.run.case
    layout = vars(case.parallelism).values()
    of_script = case.script.moe_runner, *filter(None, [case.script.kv_dtype])
    pool = "-".join(map(str, (case.gpu, *layout, case.prefill, *of_script)))
    own = Path(folder) / "work" / row.target
    try:
        with _once(own / "trace") as trace:
            if not trace.exists() and not target.dims().is_dense:
                silicon_rows.make_routing(trace, form.routing, target)
        with _once(own / pool) as tables:
            if not tables.exists():
                made = tables.with_name(f"{tables.name}.part")
                made.mkdir(parents=True, exist_ok=True)
                case_tables(made, [case], target.moe_kernels[0], target, form)
                made.rename(tables)  # only whole: what is refused is refused each time
        load = load_of(row.run, target)
        has_tables = any(tables.iterdir())
        of_experts = None if target.dims().is_dense else trace
        return predict_load(load, target, form, tables if has_tables else None, of_experts)
    except InputError as error:
        return f"{error.field}: {error.problem}"


@contextmanager
def _once(path: Path) -> Iterator[Path]:
    """Hold a path while one process makes it."""
    import fcntl  # POSIX alone

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def read_others(path: Path | None) -> dict[int, dict[str, float]]:
    """Return another estimator's predictions by row, ms, of a CSV of ``row``, ``ttft_ms`` and
    ``tpot_ms``, empty where it has none. Raises InputError if the file is not one."""
    reader = csv.DictReader(io.StringIO("" if path is None else read_text(path, "others")))
    names = [f"{name}_ms" for name in _METRICS]
    try:
        return {
            int(line["row"]): {name: float(line[name]) for name in names if line[name] != ""}
            for line in reader
        }
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{path}: line {reader.line_num}: {error}"
        columns = "the columns row, a whole number, and ttft_ms, tpot_ms, numbers or empty"
        raise InputError("others", problem, columns) from None


def table_of(
    rows: Sequence[Row],
    found: dict[str, dict[str, float] | str],
    others: dict[int, dict[str, float]] | None = None,
) -> pa.Table:
    """Return a line a row: labels, measured and predicted figures, errors in %, and reasons.
    ``others``: of `read_others`."""
    lines = []
    for row in rows:
        what = found.get(row.key, "not simulated yet") if row.run is not None else row.refused
        line: dict[str, Any] = {"row": row.row, **row.labels, "target": row.target}
        line["refused"] = what if isinstance(what, str) else ""
        line["excluded"] = row.run.excluded if row.run is not None else ""
        if row.run is not None:
            case = row.run.case
            line |= {"gpus": case.parallelism.n_gpus, "input_len": case.input_len}
            line |= {"output_len": case.output_len, "concurrency": case.concurrency}
            rule = row.run.assumed
            line |= {"kind": case.kind, "date": row.run.date}
            line["launch"] = f"assumed: {rule}" if rule else "known"
        for name in _METRICS:
            measured = row.measured[name]
            line[f"{name}_ms"] = measured
            if not isinstance(what, str):
                line[f"{name}_predicted_ms"] = what[name]
                line[f"{name}_error"] = 100.0 * (what[name] / measured - 1.0)
            if said := (others or {}).get(row.row, {}).get(f"{name}_ms"):
                line[f"{name}_other"] = 100.0 * (said / measured - 1.0)
        lines.append(line)
    columns = dict.fromkeys(name for line in lines for name in line)
    columns |= dict.fromkeys(f"{name}_other" for name in _METRICS)  # there may be no other's
    return pa.Table.from_pylist([dict.fromkeys(columns) | line for line in lines])


def kind_of_row(row: Row) -> Kind:
    """Return what kind of run a row with a configuration is."""
    assert row.run is not None
    target, case = MEASURED_MODELS[row.target], row.run.case
    apart = case.prefill.count > 0
    in_flight = case.concurrency / (case.decode_workers if apart else 1)
    return kind_of(target.backend, case.gpu, target.dims(), apart=apart, in_flight=in_flight)


def publisher_of(row: Row) -> str:
    """Return the publisher of a row's run."""
    return "InferenceX" if MEASURED_MODELS[row.target].inferencex else "AIConfigurator"


def cells(table: pa.Table, by: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the errors of each group of rows: median, 90th percentile, signed median, %. Of all
    rows that are predicted, and (``kept``) of those that are not marked; ``other``'s are of the
    kept rows that both predict, and so are ``beside``, ours."""
    frame = table.to_pandas()
    for name in [f"{n}_{what}" for n in _METRICS for what in ("error", "other")]:
        frame[name] = pd.to_numeric(frame.get(name), errors="coerce")
    groups = frame.groupby(list(by), sort=True) if by else [((), frame)]
    for key, every in groups:
        names = key if isinstance(key, tuple) else (key,)
        predicted = every[every.refused == ""]
        kept = predicted[predicted.excluded == ""]
        cell: dict[str, Any] = dict(zip(by, names, strict=True))
        cell |= {"rows": len(every), "predicted": len(predicted), "kept": len(kept)}
        for name in _METRICS:
            both = kept[kept[f"{name}_other"].notna()] if len(kept) else kept
            cell[f"{name}_all"] = _errors(predicted[f"{name}_error"])
            cell[f"{name}_kept"] = _errors(kept[f"{name}_error"])
            cell[f"{name}_beside"] = _errors(both[f"{name}_error"])
            cell[f"{name}_other"] = _errors(both[f"{name}_other"])
        cell["both"] = int((kept["tpot_other"].notna()).sum())
        yield cell


def _errors(errors: Any) -> tuple[float, float, float] | None:
    """Return median and 90th percentile of the sizes, and the signed median."""
    if not len(errors):
        return None
    size = np.abs(np.asarray(errors, float))
    return float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(errors))


def write_page(table: pa.Table, path: Path, command: str, date: str) -> None:
    """Write the page of the record: cells, refusals, the worst rows, and the command and its date.
    ``path``: of the Markdown file; a picture of predicted over measured figures stands beside
    it."""
    lines = ["# The public record", "", f"`{command}`, {date}.", ""]
    for title, by in (
        ("Engines", ("engine", "mode")),
        ("Cards", ("engine", "mode", "gpu")),
        ("Models", ("engine", "mode", "model", "precision")),
        ("Launches", ("launch",)),
    ):
        lines += [f"## {title}", "", *cell_lines(list(cells(table, by)), by), ""]
    if rows := advice.rows_of(table):
        said_lines = [list(row.values()) for row in rows]
        lines += ["## Advice", "", *markdown_table(list(rows[0]), said_lines), ""]
    frame = table.to_pandas()
    refused = frame[frame.refused != ""].groupby(["engine", "mode", "model", "refused"]).size()
    reasons = [[n, *why] for why, n in refused.sort_values(ascending=False).items()]
    columns = ["rows", "engine", "mode", "model", "why"]
    lines += ["## Not predicted", "", *markdown_table(columns, reasons), ""]
    kept = frame[(frame.refused == "") & (frame.excluded == "")]
    columns = ["row", "engine", "model", "GPU", "GPUs", "in", "out", "streams"]
    columns += ["TPOT, ms", "predicted", "TTFT, ms", "predicted", "why"]
    worst_lines = list[list[Any]]()
    if len(kept):
        worst = kept.reindex(kept.tpot_error.abs().sort_values(ascending=False).index)[:20]
        for line in worst.itertuples():
            figures = [line.tpot_ms, line.tpot_predicted_ms, line.ttft_ms, line.ttft_predicted_ms]
            said = [line.row, line.engine, line.model, line.gpu, int(line.gpus)]
            said += [int(line.input_len), int(line.output_len), int(line.concurrency)]
            said += [f"{figure:.4g}" for figure in figures]
            worst_lines.append([*said, why(line)])
    lines += ["## The worst twenty in TPOT", "", *markdown_table(columns, worst_lines), ""]
    lines += [f"![Predicted over measured figures]({path.stem}.png)", ""]
    write_picture(path.with_suffix(".png"), lambda figure: _scatter(figure, kept), (9.0, 4.5))
    with whole_file(path) as page:
        page.write_text("\n".join(lines), encoding="utf-8")


def why(row: Any) -> str:
    """Return what, by its labels alone, makes the error of a line of `table_of` large, or
    nothing."""
    target = MEASURED_MODELS[row.target]
    if row.launch != "known":
        return f"its launch is {row.launch}"
    if row.target == "llama-8b-fp8":
        return "prompts were found in the prefix cache, it seems"
    if not target.inferencex:
        return "a run of NVIDIA's own: its load is known by two lengths alone"
    if "drafts" in row.kind:
        return "how many drafts were accepted is not known"
    if row.mode == "disagg":
        return "its front end and how it hands KV caches over are assumed"
    if row.date.startswith("2025"):
        return "of 2025; the tables are of 2026"
    return ""


def _scatter(figure: Any, kept: pd.DataFrame) -> None:
    """Draw predicted over measured figures, a point a row, a colour an engine."""
    for place, name in enumerate(_METRICS, 1):
        axes = figure.add_subplot(1, 2, place)
        for engine, of in kept.groupby("engine"):
            measured, predicted = of[f"{name}_ms"], of[f"{name}_predicted_ms"]
            axes.scatter(measured, predicted, s=4, alpha=0.4, label=str(engine))
        if len(kept):
            ends = [kept[f"{name}_ms"].min(), kept[f"{name}_ms"].max()]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            axes.set(xscale="log", yscale="log")
        axes.set(xlabel=f"measured {name.upper()}, ms", ylabel="predicted, ms")


def cell_lines(found: Sequence[dict[str, Any]], by: Sequence[str]) -> list[str]:
    """Return cells as a Markdown table."""

    def said(errors: tuple[float, float, float] | None) -> str:
        return "" if errors is None else "{:.1f} / {:.1f} / {:+.1f}".format(*errors)

    columns = [*by, "rows", "predicted", "after the filters", "TPOT", "TTFT", "TPOT, all",
               "TTFT, all", "other's TPOT", "other's TTFT", "ahead"]  # fmt: skip
    rows = list[list[str]]()
    for cell in found:
        values = [*(str(cell[name]) for name in by), *map(str, (cell["rows"], cell["predicted"]))]
        values += [str(cell["kept"]), said(cell["tpot_kept"]), said(cell["ttft_kept"])]
        values += [said(cell["tpot_all"]), said(cell["ttft_all"])]
        values += [said(cell["tpot_other"]), said(cell["ttft_other"])]
        values.append(_ahead(cell))
        rows.append(values)
    return markdown_table(columns, rows)


def _ahead(cell: dict[str, Any]) -> str:
    """Say in which medians our errors are smaller than the other's on the rows of both."""
    if cell["tpot_other"] is None:
        return ""
    names = [n.upper() for n in _METRICS if cell[f"{n}_beside"][0] <= cell[f"{n}_other"][0]]
    return ", ".join(names) or "none"
