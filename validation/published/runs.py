"""Published runs with their launch lines: the second record (``rows/runs.csv``).

A row says what was launched and which load it served, as fields of a run, so that ``eldr-sim run``
with `PublishedRun.command` makes the same prediction. Nothing that was measured reaches it."""

import csv
import shlex
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from eldr_sim.errors import EldrSimWarning, InputError
from eldr_sim.inputs import parse_yaml, read_text
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kinds import Progress, no_progress
from eldr_sim.simulator.outcome.error_band import Kind, kind_of
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.validation.published.journal import OF_RUNS, Found, predicted

T = TypeVar("T")
#: What a row has been used for: a constant was chosen on it; a cause that was mended was found on
#: it; neither.
Used = Literal["fit", "in_view", "never"]
#: Figures of a row, with the key of a summary that predicts each.
FIGURES = ("ttft", "tpot", "throughput")
MEASURED = ("ttft_ms", "tpot_ms", "output_tok_s")
_NEEDED = ("name", "publisher", "source", "licence", "used", "model", "gpu", "engine", "launch")
#: Columns that are fields of a run, by their names there.
_FIELDS = {
    "engine": "engine", "launch": "engine_args", "model": "model", "gpu": "gpu",
    "request_rate": "request_rate", "max_concurrency": "max_concurrency",
    "requests": "num_requests", "input_len": "input_len", "output_len": "output_len",
    "length_range": "random_range_ratio",
}  # fmt: skip
_ENGINES = ("vllm", "sglang", "trtllm")
#: Rows with more requests in flight on a worker are reported separately: there the server and the
#: client set the pace.
MANY = 256


@dataclass(frozen=True)
class PublishedRun:
    """A published run."""

    row: dict[str, str]  #: of the file, by column

    @property
    def name(self) -> str:
        """Its name, which no other row has."""
        return self.row["name"]

    @property
    def used(self) -> Used:
        """What it has been used for."""
        return cast(Used, self.row["used"])

    @property
    def cell(self) -> str:
        """Its engine, GPU and model."""
        engine = self.row["engine"].partition("==")[0]
        return f"{engine}, {self.row['gpu']}, {self.row['model'].rpartition('/')[2]}"

    @property
    def doubt(self) -> str:
        """Why its figures are not compared, or nothing."""
        return self.row.get("doubt", "")

    @property
    def measured(self) -> dict[str, float]:
        """What was measured: ``ttft`` and ``tpot``, ms, ``throughput``, output tokens/s; without
        those in doubt."""
        figures = {
            name: float(self.row[column])
            for name, column in zip(FIGURES, MEASURED, strict=True)
            if self.row.get(column)
        }
        if self.doubt:
            return {}
        if self.row.get("ttft_doubt"):
            figures.pop("ttft", None)
        return {name: value for name, value in figures.items() if value > 0.0}

    def fields(self) -> dict[str, Any]:
        """Return the fields of the run that predicts it; raises InputError where none does."""
        engine = self.row["engine"].partition("==")[0]
        if engine not in _ENGINES:
            said = repr(engine) if engine else "not published"
            raise InputError("engine", f"is {said}", ", ".join(_ENGINES))
        if not self.row["launch"]:
            raise InputError("launch", "is described in words only", "a launch line")
        found: dict[str, Any] = {"topology": "1C"}
        found |= {field: self.row[name] for name, field in _FIELDS.items() if self.row.get(name)}
        for pair in shlex.split(self.row.get("options", "")):
            name, _, value = pair.partition("=")
            found[name] = parse_yaml(value, "options", self.name)
        return found

    def command(self) -> str:
        """Return the command that makes the same prediction; raises InputError as `fields`."""
        words = ["eldr-sim", "run"]
        for name, value in self.fields().items():
            flag = name.replace("_", "-")
            switch = RUN_FIELDS[name].annotation in (bool, bool | None)
            if switch:
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:  # a launch line begins with a dash
                words.append(f"--{flag}={value}")
        return shlex.join(words)


class Line(NamedTuple):
    """A figure of a row beside its prediction."""

    run: PublishedRun
    metric: str
    measured: float
    predicted: float
    many: bool  #: whether more than `MANY` requests were in flight

    @property
    def error(self) -> float:
        """In %."""
        return 100.0 * (self.predicted / self.measured - 1.0)


def lines_of(runs: Sequence[PublishedRun], found: Mapping[str, Found]) -> Iterator[Line]:
    """Yield what was measured and is predicted."""
    for run in runs:
        what = found[run.name]
        if isinstance(what, dict):
            for metric, measured in run.measured.items():
                if what.get(metric):
                    many = what.get("in_flight", 0.0) > MANY
                    yield Line(run, metric, measured, what[metric], many)


def read_runs(path: Path | None = None) -> list[PublishedRun]:
    """Read rows (the package's when None); raises InputError for columns or values that are not
    those of ``rows/README.md``."""
    if path is None:
        text = (files(__package__) / "rows" / "runs.csv").read_text(encoding="utf-8")
    else:
        text = read_text(path, "rows")
    lines = list(csv.DictReader(text.splitlines()))
    missing = [name for name in _NEEDED if not lines or name not in lines[0]]
    if missing:
        raise InputError("rows", f"{path} lacks {', '.join(missing)}", ", ".join(_NEEDED))
    runs = [PublishedRun({k: (v or "").strip() for k, v in line.items() if k}) for line in lines]
    names = set[str]()
    for run in runs:
        if not run.name or run.name in names:
            raise InputError("rows", f"name {run.name!r} is empty or repeated", "a name a row")
        names.add(run.name)
        if run.used not in get_args(Used):
            problem = f"used of {run.name} is {run.used!r}"
            raise InputError("rows", problem, ", ".join(get_args(Used)))
        for column in MEASURED:
            try:
                float(run.row.get(column) or 0.0)
            except ValueError:
                problem = f"{column} of {run.name} is {run.row[column]!r}"
                raise InputError("rows", problem, "a number, or nothing") from None
    return runs


def predict(run: PublishedRun) -> dict[str, float] | str:
    """Return ``ttft`` and ``tpot``, ms, by the row's statistics, ``throughput``, output tokens/s,
    and ``in_flight``, the most requests in flight on a worker; or why there is no prediction."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EldrSimWarning)
            config = make_config(run.fields())
            summary = simulate_summary(config)
    except InputError as error:
        return f"{error.field}: {error.problem}"
    if not summary["completed"]:
        return "no request completed"
    figures = {"throughput": float(summary["output_throughput"])}
    for name in ("ttft", "tpot"):
        statistic = run.row.get(f"{name}_statistic") or "mean"
        value = summary[f"{statistic}_{name}_ms"]
        if value is not None:
            figures[name] = float(value)
    workers = sum(pool.workers for pool in config.pools if pool.decodes)
    figures["in_flight"] = summary["max_concurrent_requests"] / max(workers, 1)
    return figures


def predict_runs(
    runs: Iterable[PublishedRun],
    folder: Path | None,
    jobs: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, dict[str, float] | str]:
    """Predict rows, model by model (their routing is drawn once); returns predictions, or why there
    are none, by name. ``folder``: of a journal, which is continued; None keeps nothing."""
    order = sorted(runs, key=lambda run: run.row["model"])
    tasks = {run.name: partial(predict, run) for run in order}
    return predicted(tasks, None if folder is None else folder / OF_RUNS, jobs, progress)


def kind_of_run(run: PublishedRun, in_flight: float) -> Kind:
    """Return what kind of run a row is. ``in_flight``: of its prediction."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EldrSimWarning)
        config = make_config(run.fields())
    model, gpu = load_model(config.engine.model), load_gpu(config.cluster.gpu).name
    apart = config.cluster.hands_over
    return kind_of(config.engine.engine, gpu, model, apart=apart, in_flight=in_flight)


def sample_runs(runs: Iterable[PublishedRun], every: int) -> list[PublishedRun]:
    """Return every ``every``-th row of each publisher, GPU, engine and model, the first first."""
    return sampled(runs, every, lambda run: (run.row["publisher"], run.row["model"], run.cell))


def sampled(rows: Iterable[T], every: int, cell: Callable[[T], Hashable]) -> list[T]:
    """Return every ``every``-th row of each cell, the first of them first."""
    seen = defaultdict[Hashable, Iterator[int]](count)
    return [row for row in rows if next(seen[cell(row)]) % every == 0]
