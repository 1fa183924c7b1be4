"""The committed report of a campaign: live runs, their simulations, the errors.

A folder written whole or not at all:

``README.md``
    What a reader needs (:mod:`~.report_text`), made from ``comparison.json`` alone.
``comparison.json``
    All figures. ``headline``: a row a set-up and goal. ``missed``: a row a set-up, load and goal
    that is missed, with what causes it. ``paired``: live, simulated, error and noise floor of every
    statistic. ``policies``: differences between decode policies, live and simulated.
    ``comparison``: the summary of :mod:`~.compare`. ``setups``, ``loads``, ``model``,
    ``max_model_len``, ``versions``, ``machine``, ``calibration``: what was run. ``not_run``: what
    was not.
``paired.csv``, ``steps.csv``, ``components.csv``, ``policies.csv``
    The tables.
``cdf_*.png``, ``steps_*.png``, ``components_*.png``, ``distinct_*.png``
    The pictures, a set-up each (and a policy, where a set-up ran several).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.validation.live.calibrated import Calibrated, model_of, read_calibration
from eldr_sim.validation.live.compare import Comparison, compare_runs
from eldr_sim.validation.live.plots import (
    BatchCurve,
    CdfPanel,
    ComponentBars,
    StepScatter,
    draw_cdfs,
    draw_components,
    draw_distinct,
    draw_steps,
    save_picture,
)
from eldr_sim.validation.live.recording import LiveRun, read_live_run
from eldr_sim.validation.live.replay import replay_run
from eldr_sim.validation.live.report_text import markdown

__all__ = ["GOALS", "POLICIES", "SETUPS", "report_document", "write_report"]

Row = dict[str, Any]

SETUPS = ("colocated", "1P1D", "1P2D")
"""Set-ups that a full campaign has."""
POLICIES = ("round_robin", "jsq", "eldr")
"""Decode policies that a full campaign runs where there are several decode engines."""
GOALS = {
    "decode step median": 5.0,
    "decode step p90": 10.0,
    "tpot p50": 5.0,
    "tpot p99": 5.0,
    "ttft p50": 10.0,
}
"""Largest error of each figure, %; latencies may also stay within the live noise floor."""
_LOADS, _REPEATS, _BATCH = 4, 3, 16  # of a full campaign: loads, repeats, decode batch reached
_METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_MOST_CURVES, _FEWEST_STEPS = 4, 30


@dataclass(frozen=True, eq=False)
class _Campaign:
    runs: list[LiveRun]
    calibrated: Calibrated
    compared: Comparison


def write_report(
    campaign: Path,
    out: Path,
    *,
    force: bool = False,
    progress: Callable[[float], None] = lambda _share: None,
) -> Row:
    """Simulate the runs of a campaign again, compare, and write the report.

    Parameters
    ----------
    campaign
        Folder of ``runs/*/`` (:mod:`~.recording`), ``calibration/`` (:mod:`~.calibrated`) and,
        where ELDR's policies ran, ``artifact.npz``, their offline fit.
    out
        Folder to make.
    force
        Replace an earlier report.
    progress
        Called with the share that is done.

    Returns
    -------
    dict
        What ``comparison.json`` holds.

    Raises
    ------
    InputError
        The campaign is not whole, its runs are not of one model, build and machine, or ``out``
        cannot be written.
    """
    with result_folder(out, force) as folder:
        found = _read(campaign, progress)
        document = report_document(found.runs, found.calibrated, found.compared.summary)
        pictures = _pictures(folder, found)
        document = _significant(document | {"pictures": pictures})
        write_json(folder / "comparison.json", document)
        comparison = document["comparison"]
        for name, rows in (
            ("paired", document["paired"]),
            ("steps", comparison["steps"]),
            ("components", comparison["components"]),
            ("policies", document["policies"]),
        ):
            _write_csv(folder / f"{name}.csv", rows)
        (folder / "README.md").write_text(markdown(document), encoding="utf-8")
        progress(1.0)
    return document


def _read(campaign: Path, progress: Callable[[float], None]) -> _Campaign:
    folders = sorted(path.parent for path in campaign.glob("runs/*/run.json"))
    if not folders:
        raise InputError("campaign", f"{campaign} holds no runs/*/run.json", "a live campaign")
    calibrated = read_calibration(campaign / "calibration")
    artifact = campaign / "artifact.npz"
    runs = sorted((read_live_run(folder) for folder in folders), key=_place)
    _check(runs)
    pairs = []
    for done, run in enumerate(runs, 1):
        pairs.append((run, replay_run(run, calibrated, artifact if artifact.exists() else None)))
        progress(0.8 * done / len(runs))
    return _Campaign(runs, calibrated, compare_runs(pairs, calibrated))


def _place(run: LiveRun) -> tuple[Any, ...]:
    """Where a run stands: known set-ups and policies first, loads by what they offer."""
    info, load = run.info, run.info.load

    def rank(name: str, known: tuple[str, ...]) -> tuple[int, str]:
        return (known.index(name) if name in known else len(known), name)

    offered = (load.lengths, -load.burstiness, load.request_rate, load.name)
    return (rank(info.setup, SETUPS), rank(info.policy, POLICIES), offered, info.repeat)


def _check(runs: Sequence[LiveRun]) -> None:
    """Raise InputError unless the runs are of one campaign."""
    first = runs[0].info
    loads: Row = {}
    engines: Row = {}
    versions: dict[str, str] = {}
    labels: set[str] = set()
    for run in runs:
        info = run.info
        if run.label in labels:
            raise InputError("campaign", f"two runs are {run.label}", "one run a repeat")
        labels.add(run.label)
        for what, same in (
            ("model", info.model == first.model),
            ("longest request", info.max_model_len == first.max_model_len),
            ("machine", info.machine == first.machine),
            ("load of that name", loads.setdefault(info.load.name, info.load) == info.load),
            ("set of engines", engines.setdefault(info.setup, info.engines) == info.engines),
            (
                "build",
                all(versions.setdefault(k, v) == v for k, v in info.versions.items()),
            ),
        ):
            if not same:
                raise InputError("campaign", f"{run.label} has another {what}", "one campaign")


def report_document(runs: Sequence[LiveRun], calibrated: Calibrated, summary: Row) -> Row:
    """Return what ``comparison.json`` holds, pictures apart.

    Parameters
    ----------
    runs
        The recorded runs, in the order of the report.
    calibrated
        What they were simulated with.
    summary
        Of :func:`~.compare.compare_runs` on them.
    """
    infos = [run.info for run in runs]
    paired = [_judged(row) for row in _of_loads(summary["requests"])]
    setups = list(dict.fromkeys(info.setup for info in infos))
    engines = {info.setup: info.engines for info in infos}
    loads = {info.load.name: info.load for info in infos}
    return {
        "goals_percent": GOALS,
        "headline": [row for setup in setups for row in _headline(setup, paired, summary)],
        "missed": [row for setup in setups for row in _missed(setup, paired, summary)],
        "paired": paired,
        "policies": _policies(paired),
        "comparison": summary,
        "setups": {name: [e.model_dump() for e in of] for name, of in engines.items()},
        "policies_run": {
            name: list(dict.fromkeys(i.policy for i in infos if i.setup == name)) for name in setups
        },
        "loads": [load.model_dump() for load in loads.values()],
        "model": infos[0].model,
        "max_model_len": infos[0].max_model_len,
        "versions": {k: v for info in infos for k, v in info.versions.items()},
        "machine": infos[0].machine,
        "calibration": calibrated.info.model_dump()
        | {
            "tables": [
                {
                    "kind": table.metadata.kind,
                    "rows": len(table),
                    "provenance": table.metadata.provenance,
                    "kernel_source": table.metadata.kernel_source,
                    "shape": table.metadata.shape,
                    "fit_error_percent": {
                        k: 100 * v for k, v in table.metadata.fit_error.items()
                    },
                }
                for table in calibrated.tables
            ]
        },
        "not_run": _not_run(summary["runs"]),
    }


def _of_loads(rows: Iterable[Row]) -> list[Row]:
    """Rows of a load, mean over its repeats."""
    return [row for row in rows if row["load"] is not None and row["repeat"] is None]


def _judged(row: Row) -> Row:
    """Add the goal, and whether it is met."""
    goal = GOALS.get(f"{row['metric']} {row['statistic']}")
    verdict = _verdict(row["abs_error_percent"], row["noise_percent"], goal)
    kept = {key: value for key, value in row.items() if key != "repeat"}
    return kept | {"goal_percent": goal, "verdict": verdict}


def _verdict(error: float | None, noise: float | None, goal: float | None) -> str | None:
    if goal is None or error is None:
        return None
    if error <= goal:
        return "met"
    return "within the noise floor" if noise is not None and error <= noise else "missed"


def _decode_steps(setup: str, summary: Row, component: str, group: str) -> Row | None:
    """Open-loop errors of the steps of a set-up's decode or co-located engines."""
    found = [
        row
        for row in summary["steps"]
        if (row["setup"], row["component"], row["group"]) == (setup, component, group)
        and row["role"] in ("decode", "colocated")
    ]
    return found[0] if found else None


def _headline(setup: str, paired: Sequence[Row], summary: Row) -> list[Row]:
    """A row a goal: the worst load decides."""
    rows: list[Row] = []
    for figure, goal in GOALS.items():
        row: Row = {"setup": setup, "figure": figure, "goal_percent": goal}
        if figure.startswith("decode step"):
            steps = _decode_steps(setup, summary, "step", "decode only")
            if steps is None:
                continue
            error = steps[f"{figure.split()[-1]}_percent"]
            row |= {"error_percent": error, "worst_percent": None, "worst_load": None}
            row |= {"worst_policy": None, "noise_percent": None, "loads": None, "loads_met": None}
            row["verdict"] = _verdict(error, None, goal)
        else:
            mine = [
                each
                for each in paired
                if each["setup"] == setup
                and f"{each['metric']} {each['statistic']}" == figure
                and each["abs_error_percent"] is not None
            ]
            if not mine:
                continue
            order = ("met", "within the noise floor", "missed")
            worst = max(
                mine, key=lambda each: (order.index(each["verdict"]), each["abs_error_percent"])
            )
            row |= {
                "error_percent": _mean(each["abs_error_percent"] for each in mine),
                "worst_percent": worst["abs_error_percent"],
                "worst_load": worst["load"],
                "worst_policy": worst["policy"],
                "noise_percent": worst["noise_percent"],
                "loads": len(mine),
                "loads_met": sum(each["verdict"] != "missed" for each in mine),
                "verdict": worst["verdict"],
            }
        rows.append(row)
    return rows


def _missed(setup: str, paired: Sequence[Row], summary: Row) -> list[Row]:
    """Goals that are missed, with the component that differs most."""
    rows: list[Row] = []
    for row in _headline(setup, [], summary):
        if row["verdict"] == "missed":
            parts = [
                _decode_steps(setup, summary, part, "decode only")
                for part in ("moe", "attention", "rest")
            ]
            known = [part for part in parts if part and part["median_of_step_percent"] is not None]
            cause = max(known, key=lambda p: p["median_of_step_percent"], default=None)
            rows.append(
                row
                | {"policy": None, "load": None, "component": cause and cause["component"]}
                | {key: cause and cause[key] for key in ("live_ms", "predicted_ms")}
                | {"of_step_percent": cause and cause["median_of_step_percent"]}
            )
    for row in paired:
        if row["setup"] != setup or row["verdict"] != "missed":
            continue
        names = {key: row[key] for key in ("setup", "policy", "load")}
        missed = names | {
            "figure": f"{row['metric']} {row['statistic']}",
            "error_percent": row["error_percent"],
            "abs_error_percent": row["abs_error_percent"],
            "noise_percent": row["noise_percent"],
            "goal_percent": row["goal_percent"],
        }
        cause = _largest(summary, names, "ttft" if row["metric"] == "ttft" else "e2el")
        if cause is not None:
            keys = ("component", "live_ms", "simulated_ms", "difference_ms")
            missed |= {key: cause[key] for key in keys}
        if row["metric"] == "tpot":
            for group, key in (("decode only", "decode"), ("with prompts", "mixed")):
                steps = _decode_steps(setup, summary, "step", group)
                missed[f"{key}_step_bias_percent"] = steps and steps["bias_percent"]
            runs = [r for r in summary["runs"] if names.items() <= r.items()]
            for key in ("mean_batch", "simulated_mean_batch"):
                missed[key] = _mean(run[key] for run in runs)
        rows.append(missed)
    return rows


def _largest(summary: Row, names: Row, of: str) -> Row | None:
    """Component of a load that differs most."""
    found = [
        row
        for row in summary["components"]
        if names.items() <= row.items()
        and row["repeat"] is None
        and row["of"] == of
        and row["component"] != "sum"
        and row["difference_ms"] is not None
    ]
    return max(found, key=lambda row: abs(row["difference_ms"]), default=None)


def _policies(paired: Sequence[Row]) -> list[Row]:
    """Difference of each policy from round-robin, live and simulated; a row a load and figure.

    The noise floor of a difference is the larger one of the two policies.
    """
    at = {(r["setup"], r["load"], r["metric"], r["statistic"], r["policy"]): r for r in paired}
    rows: list[Row] = []
    for (setup, load, metric, statistic, policy), row in at.items():
        base = at.get((setup, load, metric, statistic, POLICIES[0]))
        if base is None or policy == POLICIES[0]:
            continue
        live, simulated = (_change(row[key], base[key]) for key in ("live_ms", "simulated_ms"))
        noise = [x["noise_percent"] for x in (row, base) if x["noise_percent"] is not None]
        rows.append(
            {
                "setup": setup,
                "load": load,
                "policy": policy,
                "against": POLICIES[0],
                "metric": metric,
                "statistic": statistic,
                "live_percent": live,
                "simulated_percent": simulated,
                "noise_percent": max(noise, default=None),
            }
        )
    return rows


def _change(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else 100 * (value / base - 1)


def _not_run(runs: Sequence[Row]) -> list[str]:
    """What a full campaign has and this one lacks, a sentence each."""
    lines = [f"{name}: not run." for name in SETUPS if all(r["setup"] != name for r in runs)]
    for setup in dict.fromkeys(run["setup"] for run in runs):
        mine = [run for run in runs if run["setup"] == setup]
        policies = {run["policy"] for run in mine}
        if setup == SETUPS[-1] and (absent := [p for p in POLICIES if p not in policies]):
            lines.append(f"{setup}: no run of {', '.join(absent)}.")
        loads = {run["load"] for run in mine}
        if len(loads) < _LOADS:
            lines.append(f"{setup}: {len(loads)} of the {_LOADS} loads asked for.")
        cells: dict[tuple[str, str], int] = {}
        for run in mine:
            cells[run["policy"], run["load"]] = cells.get((run["policy"], run["load"]), 0) + 1
        if min(cells.values()) < _REPEATS:
            few = sum(count < _REPEATS for count in cells.values())
            lines.append(
                f"{setup}: fewer than {_REPEATS} repeats of {few} of {len(cells)} "
                "pairs of policy and load."
            )
        if (largest := max(run["max_batch"] for run in mine)) < _BATCH:
            lines.append(f"{setup}: no decode batch above {largest} (asked for: {_BATCH}).")
        if all(run["lengths"] != "recorded" for run in mine):
            lines.append(f"{setup}: no load of recorded lengths.")
        if all(run["lengths"] != "fixed" for run in mine):
            lines.append(f"{setup}: no load of fixed lengths.")
        if all(run["burstiness"] >= 1 for run in mine):
            lines.append(f"{setup}: no bursty load.")
    return lines


def _pictures(folder: Path, found: _Campaign) -> list[Row]:
    """Draw all pictures; a row each with file, set-up and what it shows."""
    drawn: list[Row] = []

    def picture(
        kind: str, setup: str, name: str, size: tuple[float, float], draw: Callable[[Any], None]
    ) -> None:
        file = f"{kind}_{name.replace(' ', '_')}.png"
        save_picture(folder / file, size, draw)
        drawn.append({"file": file, "kind": kind, "setup": setup, "of": name})

    infos = [run.info for run in found.runs]
    for setup in dict.fromkeys(info.setup for info in infos):
        policies = list(dict.fromkeys(i.policy for i in infos if i.setup == setup))
        for policy in policies:
            name = setup if len(policies) == 1 else f"{setup} {policy}"
            panels = _cdf_panels(found, setup, policy)
            size = (9.0, 0.5 + 1.75 * len(panels))
            picture("cdf", setup, name, size, lambda f, panels=panels: draw_cdfs(f, panels))
            bars = _component_bars(found.compared.summary, setup, policy)
            picture("components", setup, name, (9, 3), lambda f, bars=bars: draw_components(f, bars))
        kinds = _scatters(_where(found.compared.steps, setup=setup))
        if kinds:
            size = (4.6 * len(kinds), 5.0)
            picture("steps", setup, setup, size, lambda f, kinds=kinds: draw_steps(f, kinds))
        curves = _curves(found, setup)
        if curves:
            picture("distinct", setup, setup, (9, 4), lambda f, c=curves: draw_distinct(f, c))
    return drawn


def _where(table: pa.Table, **values: Any) -> pa.Table:
    for name, value in values.items():
        table = table.filter(pc.equal(table[name], value))
    return table


def _cdf_panels(found: _Campaign, setup: str, policy: str) -> list[CdfPanel]:
    of = _where(found.compared.requests, setup=setup, policy=policy)
    panels = []
    for load in dict.fromkeys(of["load"].to_pylist()):
        repeats = [
            _where(of, load=load, repeat=repeat)
            for repeat in dict.fromkeys(_where(of, load=load)["repeat"].to_pylist())
        ]
        sides = [
            {
                name: [r[f"{side}_{metric}_ms"].drop_null().to_numpy() for r in repeats]
                for metric, name in _METRICS.items()
            }
            for side in ("live", "simulated")
        ]
        panels.append(CdfPanel(load, *sides))
    return panels


def _component_bars(summary: Row, setup: str, policy: str) -> list[ComponentBars]:
    rows = [
        row
        for row in summary["components"]
        if row["setup"] == setup and row["policy"] == policy and row["of"] == "e2el"
    ]
    bars = []
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = [row for row in rows if row["load"] == load and row["difference_ms"] is not None]
        error = {r["component"]: r["difference_ms"] for r in mine if r["repeat"] is None}
        noise = {
            name: _pair_distance(
                [r["live_ms"] for r in mine if r["component"] == name and r["repeat"] is not None]
            )
            for name in error
        }
        bars.append(ComponentBars(load, error, noise))
    return bars


def _pair_distance(values: Sequence[float]) -> float:
    """Mean of ``|a - b|`` over all pairs, the noise floor of :mod:`~.compare`; 0 without pairs."""
    pairs = [abs(a - b) for i, a in enumerate(values) for b in values[:i]]
    return _mean(pairs) or 0.0


def _scatters(steps: pa.Table) -> list[StepScatter]:
    kinds = []
    decode = pc.equal(steps["kind"], "decode")
    for title, mine, size, size_name in (
        ("Decode only", steps.filter(decode), "batch", "requests"),
        ("With prompts", steps.filter(pc.invert(decode)), "tokens", "tokens"),
    ):
        if mine.num_rows:
            kinds.append(
                StepScatter(
                    title,
                    mine["live_ms"].to_numpy() / 1e3,
                    mine["predicted_ms"].to_numpy() / 1e3,
                    mine[size].to_numpy().astype(float),
                    size_name,
                )
            )
    return kinds


def _curves(found: _Campaign, setup: str) -> list[BatchCurve]:
    """Live decode-only steps by batch, with the calibrated step time over distinct experts."""
    runs = [run for run in found.runs if run.info.setup == setup]
    engine = next(e for e in runs[0].info.engines if e.role != "prefill")
    model = model_of(runs[0].info.model)
    step_time = found.calibrated.step_time(model, engine, runs[0].info.max_model_len)
    parts = [_decode_only(run) for run in runs]
    batch, distinct, context, seconds = (np.concatenate(column) for column in zip(*parts))
    curves = []
    for size in _telling_batches(batch):
        at = batch == size
        most = min(model.n_experts, int(size) * model.top_k)
        counts = np.arange(float(model.top_k), most + 1)
        middle = float(np.median(context[at]))
        curve = [step_time.decode_s([d] * model.n_moe_layers, int(size), middle) for d in counts]
        curves.append(BatchCurve(int(size), distinct[at], seconds[at], counts, np.array(curve)))
    return curves


def _decode_only(run: LiveRun) -> tuple[NDArray[Any], ...]:
    """Batch, mean distinct experts, mean context and seconds of the steps that decode only."""
    prompt_len = run.requests["prompt_len"].to_numpy()
    roles = {engine.name: engine.role for engine in run.info.engines}
    rows = []
    for step in run.steps.to_pylist():
        position = np.array(step["position"])
        # The decode engine of a pair computes the last prompt token again: that is a decode, too.
        floor = prompt_len[step["request"]] - (roles[step["engine"]] == "decode")
        if roles[step["engine"]] != "prefill" and (position >= floor).all() and len(position):
            seconds = step["end_s"] - step["start_s"]
            rows.append((len(position), np.mean(step["distinct"]), position.mean() + 1, seconds))
    return tuple(np.array(rows).reshape(-1, 4).T)


def _telling_batches(batch: NDArray[np.float64]) -> list[int]:
    """Batches to show: powers of two with steps enough, the largest ones, spread out."""
    sizes, counts = np.unique(batch, return_counts=True)
    often = [int(s) for s, n in zip(sizes, counts, strict=True) if n >= _FEWEST_STEPS]
    powers = [size for size in often if size > 1 and size & (size - 1) == 0]
    return powers[-_MOST_CURVES:] or often[-_MOST_CURVES:]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _significant(value: Any) -> Any:
    """Round every float to six significant digits; what is not finite becomes None."""
    if isinstance(value, dict):
        return {key: _significant(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_significant(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
