"""Report of a campaign: live runs, simulations, errors (``validation/live/README.md``)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kinds import Progress, Row, no_progress
from eldr_sim.outputs import write_rows
from eldr_sim.reports.cells import six_digits
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.validation.live.calibration.engine_calibration import (
    EngineCalibration,
    read_calibration,
)
from eldr_sim.validation.live.live_run import LiveRun, LoadInfo, read_live_run
from eldr_sim.validation.live.report.comparison import LiveComparison, compare_runs
from eldr_sim.validation.live.report.figures import (
    POLICIES,
    SETUPS,
    foretold_unions,
    report_document,
)
from eldr_sim.validation.live.report.pictures import draw_pictures
from eldr_sim.validation.live.report.text import markdown
from eldr_sim.validation.live.simulated.simulated_run import SimulatedRun, simulate_run


def write_report(
    campaign: Path, out: Path, *, force: bool = False, progress: Progress = no_progress
) -> Row:
    """Simulate the runs of a campaign again, compare, and write the report; returns
    ``comparison.json``. Raises InputError if the campaign is incomplete, its runs differ in model,
    build or machine, or ``out`` cannot be written. ``campaign``: folder of ``runs/*/`` and
    ``calibration/SETUP/``."""
    with result_folder(out, force, "comparison.json") as folder:
        runs, calibrated = read_campaign(campaign)
        compared = _compared(campaign, runs, calibrated, progress)
        steady = {name: own.without_drift() for name, own in calibrated.items()}
        plain = compared
        if any(own.info.drift is not None for own in calibrated.values()):
            plain = _compared(campaign, runs, steady, lambda _share: None)
        document: Row = _significant(report_document(runs, calibrated, compared, plain))
        document["unions"] = _significant(_unions(campaign, runs))
        document["pictures"] = draw_pictures(folder, runs, calibrated, compared)
        write_json(folder / "comparison.json", document)
        tables = document | document["comparison"]
        for name in ("paired", "steps", "components", "policies", "orders"):
            if tables[name]:
                write_rows(folder / f"{name}.csv", tables[name])
        (folder / "README.md").write_text(markdown(document), encoding="utf-8")
        progress(1.0)
    return document


def read_campaign(campaign: Path) -> tuple[list[LiveRun], dict[str, EngineCalibration]]:
    """Return the runs of a campaign, in the order of the report, and the set-ups' calibrations.
    Raises InputError if the campaign is incomplete, or its runs differ in model, build or
    machine."""
    folders = sorted(path.parent for path in campaign.glob("runs/*/run.json"))
    if not folders:
        raise InputError("campaign", f"{campaign} holds no runs/*/run.json", "a live campaign")
    runs = sorted((read_live_run(folder) for folder in folders), key=_place)
    _check(runs)
    setups = dict.fromkeys(run.info.setup for run in runs)
    return runs, {name: read_calibration(campaign / "calibration" / name) for name in setups}


def _compared(
    campaign: Path,
    runs: Sequence[LiveRun],
    calibrated: Mapping[str, EngineCalibration],
    progress: Progress,
) -> LiveComparison:
    """Simulate and compare the runs, each set-up with its own calibration."""
    done = 0

    def pairs(setup: str) -> Iterator[tuple[LiveRun, SimulatedRun]]:
        nonlocal done
        artifact = campaign / "calibration" / setup / "artifact.npz"
        for run in runs:
            if run.info.setup == setup:
                yield run, simulate_run(run, calibrated[setup], artifact)
                done += 1
                progress(0.9 * done / len(runs))

    found = [compare_runs(pairs(setup), own) for setup, own in calibrated.items()]
    keys = ("runs", "steps", "distinct", "requests", "components")
    summary: Row = {key: [row for each in found for row in each.summary[key]] for key in keys}
    summary["steps"] = [row for row in summary["steps"] if row["setup"] is not None]
    tables = (
        pa.concat_tables([getattr(each, name) for each in found], promote_options="permissive")
        for name in ("steps", "requests", "gaps")
    )
    return LiveComparison(summary, *tables)


def _unions(campaign: Path, runs: Sequence[LiveRun]) -> list[Row]:
    """Return `foretold_unions` of the runs whose set-up has ELDR's offline fit."""
    unions = []
    for run in runs:
        trace = campaign / "calibration" / run.info.setup / "trace"
        if trace.exists():
            name = {key: getattr(run.info, key) for key in ("setup", "policy", "repeat")}
            name["load"] = run.info.load.name
            unions.append(name | foretold_unions(run, open_trace(trace)))
    return unions


def _place(run: LiveRun) -> tuple[Any, ...]:
    """Return the sort key of a run: known set-ups and policies first, loads by rate."""
    info, load = run.info, run.info.load

    def rank(name: str, known: tuple[str, ...]) -> tuple[int, str]:
        return (known.index(name) if name in known else len(known), name)

    offered = (load.request_rate, load.lengths, load.name)
    return (rank(info.setup, SETUPS), rank(info.policy, POLICIES), offered, info.repeat)


def _check(runs: Sequence[LiveRun]) -> None:
    """Raise InputError unless the runs belong to one campaign."""
    first = runs[0].info
    loads: dict[tuple[str, str], LoadInfo] = {}
    engines: Row = {}
    versions: dict[str, str] = {}
    labels: set[str] = set()
    for run in runs:
        info = run.info
        if run.label in labels:
            raise InputError("campaign", f"two runs are {run.label}", "one run a repeat")
        labels.add(run.label)
        load = (info.setup, info.load.name)
        for what, same in (
            ("model", info.model == first.model),
            ("longest request", info.max_model_len == first.max_model_len),
            ("machine", info.machine == first.machine),
            ("load of that name", loads.setdefault(load, info.load) == info.load),
            ("set of engines", engines.setdefault(info.setup, info.engines) == info.engines),
            ("build", all(versions.setdefault(k, v) == v for k, v in info.versions.items())),
        ):
            if not same:
                raise InputError("campaign", f"{run.label} has another {what}", "one campaign")


def _significant(value: Any) -> Any:
    """Round every float to six significant digits; what is not finite becomes None."""
    if isinstance(value, dict):
        return {key: _significant(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_significant(item) for item in value]
    if isinstance(value, float):
        return six_digits(value) if math.isfinite(value) else None
    return value
