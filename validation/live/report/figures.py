"""Figures of a report: goals met and missed, causes, differences of policies and queue orders."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa

from eldr_sim.kinds import Row
from eldr_sim.planning.slo import mean_known
from eldr_sim.policies.routing.activation import cached_activation
from eldr_sim.policies.routing.unions import log_idle, on_grid
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.validation.live.calibration.engine_calibration import EngineCalibration
from eldr_sim.validation.live.calibration.setup_calibration import calibrated_requests
from eldr_sim.validation.live.live_run import LiveRun
from eldr_sim.validation.live.report.comparison import LiveComparison, noise_floor
from eldr_sim.validation.live.simulated.steps import compositions_of

SETUPS = ("colocated", "1P1D", "1P2D")  #: set-ups that a full campaign has
#: Decode policies of a full campaign on several decode engines.
POLICIES = ("round_robin", "jsq", "eldr")
#: Largest error of each figure, %; an error within the live noise floor also passes.
GOALS = {
    "decode step median": 5.0, "decode step p90": 10.0, "tpot p50": 5.0, "tpot p99": 5.0,
    "ttft p50": 10.0,
}  # fmt: skip
PARTS = ("moe", "attention", "rest")  #: parts of a step
#: What queue orders are compared by.
FIGURES = ("mean wait", "mean TTFT", "p99 TTFT", "TTFT of the longest 5% of prompts")
_LONGEST = 0.95
_LOADS, _REPEATS, _BATCH = 4, 3, 16  # of a full campaign: loads, repeats, decode batch reached
#: What a goal says of its worst load; a goal of steps has no loads.
_OF_WORST = (
    "worst_percent", "worst_load", "worst_policy", "worst_noise_percent", "loads", "loads_met",
)  # fmt: skip


def report_document(
    runs: Sequence[LiveRun],
    calibrated: Mapping[str, EngineCalibration],
    compared: LiveComparison,
    plain: LiveComparison,
) -> Row:
    """Return the content of ``comparison.json``, without pictures. ``runs``: in the order of the
    report; ``calibrated``, ``compared``: calibration and comparison of each set-up; ``plain``: the
    comparison without the drift of the machine's speed."""
    summary, infos, setups = compared.summary, [run.info for run in runs], list(calibrated)
    paired, raw = (
        # Loads alone, as means over their repeats.
        [_judged(r) for r in of["requests"] if r["load"] is not None and r["repeat"] is None]
        for of in (summary, plain.summary)
    )
    headline = [row for setup in setups for row in _headline(setup, paired, summary)]
    undrifted = [row for setup in setups for row in _headline(setup, raw, plain.summary)]
    for row, other in zip(headline, undrifted, strict=True):
        row["raw_percent"] = other["error_percent"]
    engines = {info.setup: info.engines for info in infos}
    loads = {(info.setup, info.load.name): info.load for info in infos}
    return {
        "goals_percent": GOALS,
        "headline": headline,
        "missed": [row for setup in setups for row in _missed(setup, paired, compared)],
        "paired": paired,
        "policies": _policies(paired),
        "orders": queue_orders(runs, compared),
        "comparison": summary,
        "setups": {name: [e.model_dump() for e in engines[name]] for name in setups},
        "prefilled": {info.setup: info.prefilled for info in infos},
        "policies_run": {
            name: list(dict.fromkeys(i.policy for i in infos if i.setup == name)) for name in setups
        },
        "loads": [{"setup": setup} | load.model_dump() for (setup, _), load in loads.items()],
        "model": infos[0].model,
        "max_model_len": infos[0].max_model_len,
        "versions": {k: v for info in infos for k, v in info.versions.items()},
        "machine": infos[0].machine,
        "calibration": {name: _calibration(of) for name, of in calibrated.items()},
        "not_run": _not_run(summary["runs"]),
    }


def _calibration(calibrated: EngineCalibration) -> Row:
    tables = [
        {
            "kind": table.metadata.kind,
            "rows": len(table),
            "provenance": table.metadata.provenance,
            "kernel_source": table.metadata.kernel_source,
            "shape": table.metadata.shape,
            "fit_error_percent": {k: 100 * v for k, v in table.metadata.fit_error.items()},
        }
        for table in calibrated.tables
    ]
    return calibrated.info.model_dump() | {"tables": tables}


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
    """Return the open-loop step errors of a set-up's decode or co-located engines."""
    wanted = {"setup": setup, "component": component, "group": group}.items()
    steps = (row for row in summary["steps"] if row["role"] in ("decode", "colocated"))
    return next((row for row in steps if wanted <= row.items()), None)


def _headline(setup: str, paired: Sequence[Row], summary: Row) -> list[Row]:
    """Return a row per goal; the worst load decides."""
    rows: list[Row] = []
    for figure, goal in GOALS.items():
        row: Row = {"setup": setup, "figure": figure, "goal_percent": goal}
        if figure.startswith("decode step"):
            steps = _decode_steps(setup, summary, "step", "decode only")
            if steps is None:
                continue
            error = steps[f"{figure.split()[-1]}_percent"]
            noise = steps[f"noise_{figure.split()[-1]}_percent"]
            row |= {"error_percent": error, "noise_percent": noise}
            row |= dict.fromkeys(_OF_WORST) | {"verdict": _verdict(error, noise, goal)}
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
            worst = max(mine, key=lambda r: (order.index(r["verdict"]), r["abs_error_percent"]))
            row |= {
                "error_percent": mean_known(each["abs_error_percent"] for each in mine),
                "noise_percent": mean_known(each["noise_percent"] for each in mine),
                "worst_percent": worst["abs_error_percent"],
                "worst_noise_percent": worst["noise_percent"],
                "worst_load": worst["load"],
                "worst_policy": worst["policy"],
                "loads": len(mine),
                "loads_met": sum(each["verdict"] != "missed" for each in mine),
                "verdict": worst["verdict"],
            }
        rows.append(row)
    return rows


def _missed(setup: str, paired: Sequence[Row], compared: LiveComparison) -> list[Row]:
    """Return the missed goals, with the component that differs most."""
    summary = compared.summary
    rows: list[Row] = []
    for row in _headline(setup, [], summary):
        if row["verdict"] == "missed":
            cause = _step_cause(compared.steps, setup, row["figure"].split()[-1])
            rows.append(row | {"policy": None, "load": None} | cause)
    for row in paired:
        if row["setup"] != setup or row["verdict"] != "missed":
            continue
        names = {key: row[key] for key in ("setup", "policy", "load")}
        missed = names | {"figure": f"{row['metric']} {row['statistic']}"}
        for key in ("error_percent", "abs_error_percent", "noise_percent", "goal_percent"):
            missed[key] = row[key]
        missed |= _largest(summary, names, row["metric"])
        if row["metric"] == "tpot":
            for group, key in (("decode only", "decode"), ("with prompts", "mixed")):
                steps = _decode_steps(setup, summary, "step", group)
                missed[f"{key}_step_bias_percent"] = steps and steps["bias_percent"]
            runs = [r for r in summary["runs"] if names.items() <= r.items()]
            for key in ("mean_batch", "simulated_mean_batch"):
                missed[key] = mean_known(run[key] for run in runs)
        rows.append(missed)
    return rows


def _step_cause(steps: pa.Table, setup: str, statistic: str) -> Row:
    """Return the part of decode-only steps that differs most, in all or the worst tenth (p90)."""
    frame = steps.to_pandas()
    frame = frame[(frame.setup == setup) & (frame.kind == "decode")]
    if statistic == "p90":
        error = (frame.predicted_ms / frame.live_ms - 1).abs()
        frame = frame[error >= error.quantile(0.9)]
    of_step = {}
    for part in PARTS:
        difference = (frame[f"predicted_{part}_ms"] - frame[f"live_{part}_ms"]).abs()
        of_step[part] = 100 * float((difference / frame.live_ms).median())
    known = {part: share for part, share in of_step.items() if not math.isnan(share)}
    if not known:  # the engine has no timers
        return dict.fromkeys(("component", "live_ms", "predicted_ms", "of_step_percent"))
    worst = max(known, key=lambda part: known[part])
    return {
        "component": worst,
        "live_ms": float(frame[f"live_{worst}_ms"].mean()),
        "predicted_ms": float(frame[f"predicted_{worst}_ms"].mean()),
        "of_step_percent": known[worst],
    }


def _largest(summary: Row, names: Row, metric: str) -> Row:
    """Return the component of TTFT, or of the later time, that differs most in a load."""
    parts: dict[str, dict[str, Row]] = {"ttft": {}, "e2el": {}}
    for row in summary["components"]:
        if names.items() <= row.items() and row["repeat"] is None and row["component"] != "sum":
            parts[row["of"]][row["component"]] = row
    rows: list[Row] = []
    for component, row in parts["ttft"].items():
        values = {key: row[key] for key in ("live_ms", "simulated_ms", "difference_ms")}
        if metric == "tpot":
            values = {key: parts["e2el"][component][key] - values[key] for key in values}
        rows.append({"component": component} | values)
    return max(rows, key=lambda each: abs(each["difference_ms"]))


def _policies(paired: Sequence[Row]) -> list[Row]:
    """Return policies' differences from round-robin by load and figure, noise the larger of
    both."""
    at = {(r["setup"], r["load"], r["metric"], r["statistic"], r["policy"]): r for r in paired}
    rows: list[Row] = []
    for (setup, load, metric, statistic, policy), row in at.items():
        base = at.get((setup, load, metric, statistic, POLICIES[0]))
        if base is None or policy == POLICIES[0]:
            continue
        live, simulated = (_change(row[key], base[key]) for key in ("live_ms", "simulated_ms"))
        noise = [x["noise_percent"] for x in (row, base) if x["noise_percent"] is not None]
        rows.append(
            {"setup": setup, "load": load, "policy": policy, "against": POLICIES[0]}
            | {"metric": metric, "statistic": statistic, "live_percent": live}
            | {"simulated_percent": simulated, "noise_percent": max(noise, default=None)}
        )
    return rows


def _change(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else 100 * (value / base - 1)


def _not_run(runs: Sequence[Row]) -> dict[str, list[str]]:
    """Return what this campaign lacks of a full one, by set-up."""
    lacking = {name: ["not run"] for name in SETUPS if all(run["setup"] != name for run in runs)}
    for setup in dict.fromkeys(run["setup"] for run in runs):
        mine = [run for run in runs if run["setup"] == setup]
        lines = []
        policies = {run["policy"] for run in mine}
        if setup == SETUPS[-1] and (absent := [p for p in POLICIES if p not in policies]):
            lines.append(f"no run of {' and '.join(absent)}")
        loads = {run["load"] for run in mine}
        if len(loads) < _LOADS:
            lines.append(f"{len(loads)} of {_LOADS} loads")
        repeats = Counter((run["policy"], run["load"]) for run in mine)
        if few := sum(count < _REPEATS for count in repeats.values()):
            lines.append(f"fewer than {_REPEATS} repeats of {few} of {len(repeats)} loads")
        if (largest := max(run["max_batch"] for run in mine)) < _BATCH:
            lines.append(f"no decode batch above {largest} (asked for: {_BATCH})")
        for lengths in ("fixed", "recorded"):
            if all(run["lengths"] != lengths for run in mine):
                lines.append(f"no load of {lengths} lengths")
        if all(run["burstiness"] >= 1 for run in mine):
            lines.append("no bursty load")
        if lines:
            lacking[setup] = lines
    return lacking


def queue_orders(runs: Sequence[LiveRun], compared: LiveComparison) -> list[Row]:
    """Return shortest first against first come, first served, a row a load and figure: means over
    ``repeats`` of both, ms; ``live_percent``, ``simulated_percent``: mean change of paired repeats;
    ``noise_percent``: mean difference of live changes, points; ``error_points``: simulated less
    live."""
    orders = {(run.info.setup, run.info.load.name): run.info.load.queue_order for run in runs}
    values: dict[tuple[str, str, str], dict[tuple[str, int], tuple[float, float]]]
    values = defaultdict(dict)
    frame = compared.requests.to_pandas()
    waits = {
        (row["setup"], row["load"], row["repeat"]): (row["live_ms"], row["simulated_ms"])
        for row in compared.summary["components"]
        if (row["of"], row["component"]) == ("e2el", "queue") and row["repeat"] is not None
    }
    for (setup, load, repeat), own in frame.groupby(["setup", "load", "repeat"], sort=False):
        order = orders[setup, load]
        base = load.removesuffix(", sjf")
        pairs = [waits[setup, load, repeat], *_ttft(own)]
        for figure, pair in zip(FIGURES, pairs, strict=True):
            values[setup, base, figure][order, repeat] = pair
    rows = []
    for (setup, load, figure), found in values.items():
        both = [k for order, k in found if order == "sjf" and ("fcfs", k) in found]
        if not both:
            continue
        fcfs, sjf = (np.array([found[order, k] for k in both]) for order in ("fcfs", "sjf"))
        change = 100.0 * (sjf / fcfs - 1.0)
        live, simulated = change.mean(axis=0).tolist()
        noise = noise_floor((100.0 + change[:, 0]).tolist())
        means = {
            f"{side}_{order}_ms": float(each[:, column].mean())
            for column, side in enumerate(("live", "simulated"))
            for order, each in (("fcfs", fcfs), ("sjf", sjf))
        }
        rows.append(
            {"setup": setup, "load": load, "figure": figure, "repeats": len(both)}
            | means
            | {"live_percent": live, "simulated_percent": simulated}
            | {"noise_percent": None if noise is None else noise * (100.0 + live) / 100.0}
            | {"error_points": simulated - live}
        )
    return rows


def _ttft(requests: pd.DataFrame) -> list[tuple[float, float]]:
    """Return mean and p99 of TTFT, and its mean over the longest prompts: live, simulated."""
    ttft = requests[["live_ttft_ms", "simulated_ttft_ms"]]
    longest = requests["prompt_len"] >= requests["prompt_len"].quantile(_LONGEST)
    figures = ttft.mean(), ttft.quantile(0.99), ttft[longest].mean()
    return [(float(live), float(simulated)) for live, simulated in figures]


def foretold_unions(run: LiveRun, calibration: RoutingTrace) -> Row:
    """Return the mean distinct experts of a layer in steps that decode two requests or more.

    A router knows a prompt, not its answer's experts: it can tell the expected union of activations
    (`policies.routing.activation`), fitted here on ELDR's calibration requests, which no load has.
    ``live``: as counted; ``by_prompts``, ``by_mean``: as prompts, or these requests' mean,
    foretell, with mean absolute errors, %; ``explained_percent``: of the variance between steps of
    one batch. None without such steps."""
    model = cached_activation(calibrated_requests(calibration))
    counts = run.trace.prompt_counts(np.arange(run.trace.n_requests))
    log = np.array([log_idle(on_grid(model.predict(count))) for count in counts])
    mean, n_layers = log_idle(on_grid(model.mean_activation)), run.trace.n_layers
    done = compositions_of(run, run.steps)
    records = [
        (
            len(step.running),
            sum(logged) / n_layers,
            float((1 - np.exp(log[[request for request, _ in step.running]].sum(0))).sum()),
            float((1 - np.exp(len(step.running) * mean)).sum()),
        )
        for step, logged in zip(done, run.steps["distinct"].to_pylist(), strict=True)
        if len(step.running) > 1 and not step.chunks
    ]
    steps = pd.DataFrame(records, columns=["batch", "live", "by_prompts", "by_mean"])
    steps[["by_prompts", "by_mean"]] /= n_layers
    row: Row = {"steps": len(steps)}
    for name in ("live", "by_prompts", "by_mean"):
        row[name] = float(steps[name].mean()) if len(steps) else None
    for name in ("by_prompts", "by_mean"):
        error = (steps[name] / steps.live - 1).abs().mean()
        row[f"{name}_error_percent"] = 100 * float(error) if len(steps) else None
    away = steps - steps.groupby("batch")[steps.columns.tolist()].transform("mean")
    spread = float((away.live**2).sum())
    left = float(((away.live - away.by_prompts) ** 2).sum())
    row["explained_percent"] = 100 * (1 - left / spread) if spread else None
    return row
