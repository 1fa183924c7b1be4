"""Comparison of recorded live runs with their simulations: errors per step, request and component.

``validation/live/README.md`` says what :class:`LiveComparison` holds: errors are ``100 *
(simulated / live - 1)``, in %; a missing figure is None. Of its tables ``requests`` has the row of
``requests.parquet`` as ``request`` and a null TPOT where a request has one token, ``gaps`` those
between tokens, pooled."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.arrays import Floats
from eldr_sim.kinds import Row
from eldr_sim.planning.slo import mean_known
from eldr_sim.validation.live.calibration.engine_calibration import EngineCalibration
from eldr_sim.validation.live.live_run import LiveRun
from eldr_sim.validation.live.simulated.simulated_run import SimulatedRun, check_run, run_clock
from eldr_sim.validation.live.simulated.steps import StepUnions, compositions_of, durations, predict
from eldr_sim.validation.live.simulated.timestamps import (
    COMPONENTS,
    RequestTimestamps,
    live_timestamps,
)

METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "p50", "p90", "p99")
_LOAD = ["setup", "policy", "load"]
_ALIKE = 8  # fewest steps of a group that has a median
_HEADLINE = (("tpot", "p50"), ("tpot", "p99"), ("ttft", "p50"), ("e2el", "p50"))


@dataclass(frozen=True)
class LiveComparison:
    """Live runs compared with their simulations; see the module's docstring."""

    summary: dict[str, Any]
    steps: pa.Table
    requests: pa.Table
    gaps: pa.Table


def compare_runs(
    pairs: Iterable[tuple[LiveRun, SimulatedRun]], calibrated: EngineCalibration
) -> LiveComparison:
    """Compare runs with simulations that used this calibration; runs of one load are repeats."""
    parts: dict[str, list[pd.DataFrame]] = defaultdict(list)
    rows: dict[str, list[Row]] = defaultdict(list)
    for run, replayed in pairs:
        info = run.info
        name: Row = {"setup": info.setup, "policy": info.policy, "load": info.load.name}
        name["repeat"] = info.repeat
        live = live_timestamps(run, calibrated.info)
        whole = np.flatnonzero(np.isfinite(live.e2el_s))
        steps, distinct = _steps(run, replayed, calibrated, live)
        requests = _requests(run, replayed, live, whole)
        sides = {"live_ms": live, "simulated_ms": replayed.timestamps}
        gaps = pd.DataFrame({side: 1e3 * times.gaps_s(whole) for side, times in sides.items()})
        for kind, frame in (("steps", steps), ("requests", requests), ("gaps", gaps)):
            for place, (key, value) in enumerate(name.items()):
                frame.insert(place, key, value)
            parts[kind].append(frame)
        rows["distinct"].append(name | distinct)
        drift = {"drift": run_clock(run, calibrated).mean}
        rows["runs"].append(name | _run_row(run, replayed, live, whole, steps) | drift)
        rows["requests"] += [name | row | drift for row in _statistics(requests, gaps)]
        rows["components"] += [name | row for row in _components(live, replayed, whole)]
    # In the order of LiveComparison: steps, requests, gaps.
    tables = {kind: pd.concat(frames, ignore_index=True) for kind, frames in parts.items()}
    requests_rows = _with_repeats(rows["requests"])
    step_rows, components = _step_rows(tables["steps"]), rows["components"]
    repeats = grouped(components, *_LOAD, "of", "component")
    summary = {
        "runs": rows["runs"],
        "steps": step_rows,
        "distinct": rows["distinct"],
        "requests": requests_rows,
        "components": components + [_mean_row(same, {"repeat": None}) for _, same in repeats],
        "headline": _headline(step_rows, requests_rows, rows["distinct"]),
    }
    kinds = (pa.Table.from_pandas(frame, preserve_index=False) for frame in tables.values())
    return LiveComparison(summary, *kinds)


def noise_floor(values: Sequence[float]) -> float | None:
    """Return the mean of ``|a - b|`` over all pairs of repeats, in % of their mean, if any."""
    if len(values) < 2:
        return None
    pairs = [abs(a - b) for a, b in itertools.combinations(values, 2)]
    return 100.0 * float(np.mean(pairs)) / float(np.mean(values))


# --- steps ---


def _steps(
    run: LiveRun, replayed: SimulatedRun, calibrated: EngineCalibration, live: RequestTimestamps
) -> tuple[pd.DataFrame, Row]:
    """Predict every live step, and count layers whose distinct experts differ from the trace's."""
    model = check_run(run)
    engines = {engine.name: engine for engine in run.info.engines}
    step_times = {
        kind: calibrated.step_time(model, kind, run.info.max_model_len)
        for kind in {engine.unnamed for engine in engines.values()}
    }
    unions = StepUnions(run.trace)
    ingress = calibrated.info.ingress_s.of(run.requests["prompt_len"].to_numpy())
    start, moe, attention = (  # an engine without these timers has nulls: NaN
        run.steps[name].to_numpy() for name in ("start_s", "moe_s", "attention_s")
    )
    logs = run.steps["distinct"].to_pylist()
    of = [engines[name] for name in run.steps["engine"].to_pylist()]
    done = compositions_of(run, run.steps)
    taken = durations(run, done, run.requests["sent_s"].to_numpy() + ingress)
    factors = _factors(run, calibrated)
    records, wrong_layers, wrong_steps = [], 0, 0
    live_sums: dict[frozenset[tuple[int, int, int]], int] = {}
    for i, (engine, step) in enumerate(zip(of, done, strict=True)):
        counted, logged = unions.distinct(step), np.array(logs[i])
        wrong = len(counted) if len(counted) != len(logged) else int((counted != logged).sum())
        wrong_layers += wrong
        wrong_steps += wrong > 0
        live_sums[step.members] = int(logged.sum())
        time = predict(step_times[engine.unnamed], step, counted)
        steady_s, time = time.step_s, time.slower(factors[i], calibrated.info.drift)
        parts = {"moe": moe[i], "attention": attention[i]}
        parts["rest"] = taken[i] - parts["moe"] - parts["attention"]
        kind = "prefill" if not step.running else "mixed" if step.chunks else "decode"
        records.append(
            {"engine": engine.name, "role": engine.role, "kind": kind, "start_s": start[i]}
            | {"batch": len(step.running), "tokens": step.tokens, "context": step.context}
            | {"active": int(counted.sum()), "layers": len(counted), "live_ms": 1e3 * taken[i]}
            | {"predicted_ms": 1e3 * time.step_s, "drift": time.step_s / steady_s}
            | {f"live_{part}_ms": 1e3 * seconds for part, seconds in parts.items()}
            | {f"predicted_{part}_ms": 1e3 * getattr(time, f"{part}_s") for part in parts}
        )
    matched = matched_wrong = 0
    active = replayed.steps["active"].to_pylist()
    for step, simulated in zip(compositions_of(run, replayed.steps), active, strict=True):
        if step.members in live_sums:
            matched += 1
            total = int(unions.distinct(step).sum()) if simulated is None else simulated
            matched_wrong += total != live_sums[step.members]
    return pd.DataFrame(records), {
        "steps": len(done),
        "layers": len(done) * model.n_moe_layers,
        "wrong_steps": wrong_steps,
        "wrong_layers": wrong_layers,
        "simulated_steps": len(active),
        "matched_steps": matched,
        "matched_wrong": matched_wrong,
    }


def _factors(run: LiveRun, calibrated: EngineCalibration) -> Floats:
    """Return how much longer the probe took at each step than at the speed of the tables."""
    name = np.array(run.steps["engine"].to_pylist())
    at, probe = run.steps["start_s"].to_numpy(), run.steps["probe_s"].to_numpy()
    factors = np.ones(len(at))
    for engine in set(name.tolist()):
        own = name == engine
        factors[own] = calibrated.drift(at[own], probe[own]).factor(at[own])
    return factors


def _step_rows(steps: pd.DataFrame) -> list[Row]:
    """Return the errors of the steps by set-up, role, kind and batch."""
    decode = steps.kind == "decode"
    groups = {"all": steps.kind != "", "decode only": decode, "with prompts": ~decode}
    size = 1
    while size <= steps.batch[decode].max():
        name = "batch 1" if size == 1 else f"batch {size}-{2 * size - 1}"
        groups[name] = decode & (steps.batch >= size) & (steps.batch < 2 * size)
        size *= 2
    roles = steps[["setup", "role"]].drop_duplicates().itertuples(index=False, name=None)
    places: list[tuple[Any, Any]] = [
        (None, None),
        *((setup, None) for setup in steps.setup.unique()),
        *roles,
    ]
    rows = []
    for setup, role in places:
        here = (steps.setup == (setup or steps.setup)) & (steps.role == (role or steps.role))
        for group, inside in groups.items():
            some = steps[here & inside]
            if len(some):
                place = {"setup": setup, "role": role, "group": group}
                rows += [place | row for row in _step_errors(some)]
    return rows


def _step_errors(steps: pd.DataFrame) -> list[Row]:
    rows = []
    for component in ("step", "moe", "attention", "rest"):
        suffix = "ms" if component == "step" else f"{component}_ms"
        live, predicted = steps[f"live_{suffix}"], steps[f"predicted_{suffix}"]
        known = live > 0
        errors = 100.0 * (predicted[known] / live[known] - 1.0)
        size = errors.abs()
        rows.append(
            {
                "component": component,
                "steps": int(known.sum()),
                "live_ms": _figure(live.mean()),
                "predicted_ms": _figure(predicted.mean()),
                "median_percent": _figure(size.median()),
                "p90_percent": _figure(size.quantile(0.9)),
                "bias_percent": _figure(errors.mean()),
                "median_of_step_percent": _figure(
                    (100.0 * (predicted - live).abs() / steps.live_ms).median()
                ),
                **_step_noise(steps[known & (steps.kind == "decode")], f"live_{suffix}"),
            }
        )
    return rows


def _step_noise(steps: pd.DataFrame, column: str) -> Row:
    """Return the spread of steps that are alike; figures are None where too few are."""
    distinct = (steps.active / steps.layers).round()
    steady = steps[column] / steps.drift
    alike = steady.groupby([steps.setup, steps.role, steps.batch, distinct])
    enough = alike.transform("size") >= _ALIKE
    size = (100.0 * (steady / alike.transform("median") - 1.0).abs())[enough]
    return {
        "noise_median_percent": _figure(size.median()),
        "noise_p90_percent": _figure(size.quantile(0.9)),
    }


# --- requests ---


def _requests(
    run: LiveRun, replayed: SimulatedRun, live: RequestTimestamps, whole: NDArray[np.intp]
) -> pd.DataFrame:
    columns: dict[str, Any] = {
        "request": whole,
        "prompt_len": run.requests["prompt_len"].to_numpy()[whole],
        "output_len": run.requests["output_len"].to_numpy()[whole],
    }
    for metric in ("ttft", "tpot", "e2el"):
        for side, times in (("live", live), ("simulated", replayed.timestamps)):
            columns[f"{side}_{metric}_ms"] = 1e3 * getattr(times, f"{metric}_s")[whole]
    return pd.DataFrame(columns)


def _run_row(
    run: LiveRun,
    replayed: SimulatedRun,
    live: RequestTimestamps,
    whole: NDArray[np.intp],
    steps: pd.DataFrame,
) -> Row:
    load, n = run.info.load, run.requests.num_rows
    sent = run.requests["sent_s"].to_numpy()
    duration = float(live.last_token_s[whole].max() - sent.min()) if len(whole) else None
    output = int(run.requests["output_len"].to_numpy()[whole].sum())
    same = run.requests["engine"].to_numpy()[whole] == replayed.engine[whole]
    batches = replayed.steps["batch"].drop_null().to_pylist()
    decoding = steps.batch[steps.batch > 0]
    return {
        "request_rate": load.request_rate,
        "burstiness": load.burstiness,
        "lengths": load.lengths,
        "num_requests": load.num_requests,
        "incomplete": n - len(whole),
        "duration_s": duration,
        "simulated_duration_s": float(replayed.timestamps.last_token_s.max() - sent.min()),
        "output_tokens_per_s": output / duration if duration else None,
        "steps": len(steps),
        "mean_batch": _figure(decoding.mean()),
        "max_batch": int(decoding.max()) if len(decoding) else 0,
        "simulated_mean_batch": float(np.mean([b for b in batches if b])),
        "same_engine_percent": 100.0 * float(same.mean()) if len(same) else None,
    }


def _statistics(requests: pd.DataFrame, gaps: pd.DataFrame) -> list[Row]:
    """Return mean and percentiles of each metric of one run, live and simulated."""
    rows = []
    for metric in METRICS:
        figures = []
        for side in ("live", "simulated"):
            column = gaps[f"{side}_ms"] if metric == "itl" else requests[f"{side}_{metric}_ms"]
            values = column.dropna()
            figures.append([values.mean(), *values.quantile([0.5, 0.9, 0.99])])
        for statistic, live, simulated in zip(STATISTICS, *figures, strict=True):
            error = _figure(100.0 * (simulated / live - 1.0))
            rows.append(
                {"metric": metric, "statistic": statistic, "live_ms": _figure(live)}
                | {"simulated_ms": _figure(simulated), "error_percent": error}
                | {"abs_error_percent": None if error is None else abs(error)}
            )
    return rows


def _with_repeats(rows: list[Row]) -> list[Row]:
    """Add each load's noise floor, and the means over repeats and over loads."""
    means: list[Row] = []
    for _, repeats in grouped(rows, *_LOAD, "metric", "statistic"):
        live = [row["live_ms"] / row["drift"] for row in repeats if row["live_ms"] is not None]
        noise, spread = noise_floor(live), None
        if noise is not None:
            spread = 100.0 * (max(live) - min(live)) / float(np.mean(live))
        for row in repeats:
            row |= {"noise_percent": noise, "range_percent": spread}
        means.append(_mean_row(repeats, {"repeat": None}))
    nothing = {"load": None, "live_ms": None, "simulated_ms": None}
    setups = grouped(means, "setup", "policy", "metric", "statistic")
    return rows + means + [_mean_row(loads, nothing) for _, loads in setups]


def grouped(rows: Iterable[Row], *keys: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Return the values of some keys, each with its rows, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.items())


def _mean_row(rows: Sequence[Row], fixed: Row) -> Row:
    """Return the mean of figures over rows that share their names."""
    merged = dict(rows[0])
    for key, value in rows[0].items():
        if isinstance(value, float) or value is None:
            merged[key] = mean_known(row[key] for row in rows)
    return merged | fixed


def _components(
    live: RequestTimestamps, replayed: SimulatedRun, whole: NDArray[np.intp]
) -> list[Row]:
    rows = []
    for of in ("e2el", "ttft"):
        both = [times.components(of) for times in (live, replayed.timestamps)]
        means = [{c: float(parts[c][whole].mean()) for c in COMPONENTS} for parts in both]
        for part in means:
            part["sum"] = sum(part.values())
        for component in (*COMPONENTS, "sum"):
            measured, simulated = (1e3 * part[component] for part in means)
            difference = simulated - measured
            rows.append(
                {"of": of, "component": component, "live_ms": measured}
                | {"simulated_ms": simulated, "difference_ms": difference}
                | {"percent": 100.0 * difference / (1e3 * means[0]["sum"])}
            )
    return rows


def _headline(steps: list[Row], requests: list[Row], distinct: list[Row]) -> Row:
    errors: tuple[str, ...] = ("steps", "median_percent", "p90_percent", "bias_percent")
    errors += ("noise_median_percent", "noise_p90_percent")
    chosen: Row = {"decode_step": dict.fromkeys(errors)}
    for row in steps:
        everywhere = row["setup"] is None and row["role"] is None
        if everywhere and row["group"] == "decode only" and row["component"] == "step":
            chosen["decode_step"] = {key: row[key] for key in errors}
    for metric, statistic in _HEADLINE:
        loads = [
            row
            for row in requests
            if (row["metric"], row["statistic"]) == (metric, statistic)
            and row["load"] is not None
            and row["repeat"] is None
        ]
        chosen[f"{metric}_{statistic}"] = {
            key: mean_known(row[key] for row in loads)
            for key in ("abs_error_percent", "noise_percent")
        }
    chosen["distinct"] = {
        key: sum(row[key] for row in distinct)
        for key in ("layers", "wrong_layers", "matched_steps", "matched_wrong")
    }
    return chosen


def _figure(value: float | np.floating[Any]) -> float | None:
    return float(value) if np.isfinite(value) else None
