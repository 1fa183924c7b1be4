"""Why a result is as it is: where its requests' time went, and what makes two results differ."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eldr_sim.arrays import Bools, Floats
from eldr_sim.errors import InputError
from eldr_sim.kinds import AnyPath
from eldr_sim.parquet import filled, numbers
from eldr_sim.reports.folders import Folder, contents_of, open_folders
from eldr_sim.simulator.outcome.bottleneck import IN_LINE, PHASES, TTFT_PHASES, WITHOUT, phases_of
from eldr_sim.simulator.outcome.error_band import one_line

#: What explanations read of each table: numbers that each row has, numbers that it may lack, words.
_READ: dict[str, tuple[list[str], list[str], list[str]]] = {
    "requests": (
        ["request_id", "measured", "prompt_len", "output_len", "prefill_worker", "decode_worker",
         "arrival_s"],
        [name for name in PHASES if name not in WITHOUT],
        ["domain", "outcome"],
    ),
    "steps": (
        ["worker", "start_s", "end_s", "batch"],
        ["context_tokens", "active_experts", "busiest_rank_experts"],
        ["role"],
    ),
}  # fmt: skip
_WRITTEN = "a folder written by this version of eldr-sim"


@dataclass(frozen=True)
class Explanation:
    """A table, and what stands above it."""

    lines: Sequence[str]  #: what is to be said, a line each
    #: The table; cells are text or numbers, in ms where a column does not say otherwise.
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def open_run(path: AnyPath) -> Folder:
    """Open the folder of a run; raises InputError if it is of anything else, or damaged."""
    (folder,) = open_folders([Path(path)])
    if folder.kind != "run":
        raise InputError("RESULT", f"{path} is a {folder.kind}", "a folder of eldr-sim run --out")
    for name, (kind, times, words) in _READ.items():
        table, file = folder.tables[name], f"{name}.parquet of {folder.name}"
        if name == "requests" and not len(table):
            raise InputError("RESULT", f"{file} has no rows", "a run with requests")
        with contents_of(folder):
            columns = _columns(table)
        for column in (*kind, *times):
            if column not in columns:
                raise InputError("RESULT", f"{file} has no column {column!r} of numbers", _WRITTEN)
        for column in words:
            if column not in table.column_names or not _is_text(table.schema.field(column).type):
                raise InputError("RESULT", f"{file} has no column {column!r} of words", _WRITTEN)
        for column in (*kind, *words):
            if table.column(column).null_count:
                raise InputError("RESULT", f"{file} lacks values of {column!r}", _WRITTEN)
        if name == "requests":
            done = np.array(table.column("outcome").to_pylist()) == "completed"
            if np.isnan(columns["finish_s"][done]).any():
                problem = f"{file} has completed requests without finish_s"
                raise InputError("RESULT", problem, _WRITTEN)
        else:
            decode = np.array(table.column("role").to_pylist()) == "decode"
            if np.isnan(columns["context_tokens"][decode]).any():
                problem = f"{file} has decode steps without context_tokens"
                raise InputError("RESULT", problem, _WRITTEN)
    return folder


def explain_run(run: Folder) -> Explanation:
    """Say where the time of a run's requests went, phase by phase."""
    summary, requests = run.documents["summary"], _requests(run)
    spent, in_line = _spent(run, requests)
    measured = requests["measured"].astype(bool) & in_line
    if not measured.any():
        raise InputError(
            "RESULT", f"no request of {run.name} was served", "a run with served requests"
        )
    total = math.fsum(float(np.mean(values[measured])) for values in spent.values())
    rows = []
    for name, values in spent.items():
        own = 1e3 * values[measured]
        if own.any():
            middle, high = np.quantile(own, [0.5, 0.99])
            share = f"{own.mean() / (1e3 * total):.1%}"
            rows.append([name, float(own.mean()), float(middle), float(high), share])
    whole = 1e3 * np.sum([values[measured] for values in spent.values()], axis=0)
    rows.append(["all", 1e3 * total, *np.quantile(whole, [0.5, 0.99]).tolist(), "100%"])
    lines = [f"{summary['label']}, {int(measured.sum())} requests"]
    if left := int(requests["measured"].sum()) - int(measured.sum()):
        lines.append(f"{left} more were refused, cancelled or lost: they are not in this table")
    if limits := summary.get("limits"):
        lines.append(f"Bottleneck: {limits['bottleneck']}: {limits['because']}")
        use = {name.replace("_", " "): f"{of:.0%}" for name, of in limits["utilisation"].items()}
        if "prefill busy" not in use:  # co-located workers, whose steps decode and prefill
            use = {name.replace("decode", "workers"): of for name, of in use.items()}
        lines.append(f"Utilisation: {', '.join(map(' '.join, use.items()))}")
        if (transfers := limits.get("kv_transfers_per_worker")) is not None:
            lines.append(f"KV transfers in progress on a decode worker: {transfers:.2f}")
    if faults := summary.get("faults"):
        lines += _of_faults(faults, run.documents["config"]["config"], run.name)
    if band := summary.get("error_band"):
        lines.append(one_line(band))
    return Explanation(lines, ["phase", "mean", "median", "p99", "share"], rows)


def _of_faults(faults: Mapping[str, Any], config: Mapping[str, Any], name: str) -> list[str]:
    """Return a line for each event, and the command that tries what might have helped."""
    lines = []
    for event in faults["events"]:
        kind = "throughput" if event["goodput_before"] is None else "goodput"
        rates = ((when, event[f"{kind}_{when}"]) for when in ("before", "during", "after"))
        told = ", ".join(f"{rate:.2f} {when}" for when, rate in rates if rate is not None)
        recovery = event["time_to_recover_s"]
        after = "not recovered" if recovery is None else f"recovered after {recovery:.1f} s"
        lines.append(f"{event['event']}: {kind} {told} req/s; {after}")
    changes = []
    if config["retry"] != "migrate":
        changes.append("retry=migrate")
    if config["health_delay_ms"]:
        changes.append("health_delay_ms=0")
    if larger := _one_more(config["topology"]):
        changes.append(f"topology={larger}")
    if changes:
        asked = " ".join(f"--set {change}" for change in changes)
        lines.append(f"Remedies to try: eldr-sim what-if {name} {asked}")
    return lines


def _one_more(topology: object) -> str:
    """Return a cluster with one worker more in its last pool; empty where it has another form."""
    match = re.fullmatch(r"((?:\d+P)?)(\d+)([DC])", str(topology))
    return "" if match is None else f"{match[1]}{int(match[2]) + 1}{match[3]}"


def explain_request(run: Folder, number: int) -> Explanation:
    """Say where one request's time went beside the median of its like: of its domain and as long
    within a quarter, or all where those are under five. InputError: no such request."""
    requests = _requests(run)
    ids = requests["request_id"].astype(np.int64)  # of sessions: not in the order of arrival
    if number not in ids:
        one_by_one = len(ids) == ids.max() + 1
        allowed = f"0 to {ids.max()}" + ("" if one_by_one else ", those of requests.parquet")
        raise InputError("request", str(number), allowed)
    ident, number = number, int(np.flatnonzero(ids == number)[0])
    spent, in_line = _spent(run, requests)
    served = requests["measured"].astype(bool) & in_line
    domain = np.array(run.tables["requests"].column("domain").to_pylist())
    like = served & (domain == domain[number])
    for name in ("prompt_len", "output_len"):
        row = requests[name][number]
        like &= np.abs(requests[name] - row) <= 0.25 * row
    like[number] = False
    who = f"{int(like.sum())} requests of {domain[number]} as long within a quarter"
    if like.sum() < 5:
        like = served
        who = f"all {int(like.sum())} measured requests"
    rows = []
    for name, values in spent.items():
        if values[like].any() or values[number]:
            row, others = 1e3 * float(values[number]), 1e3 * float(np.median(values[like]))
            rows.append([name, row, others, row - others])
    steps = _steps_of(run)
    for name, column in (("batch", "batch"), ("activated experts a layer", "active_experts")):
        each = [_mean_in(steps, column, requests, i) for i in (number, *np.flatnonzero(like)[:500])]
        if not math.isnan(each[0]):
            others = float(np.nanmedian(each[1:]))
            rows.append([f"{name}, mean of its steps", each[0], others, each[0] - others])
    length = ", ".join(
        f"{int(requests[f'{what}_len'][number])} {what} tokens" for what in ("prompt", "output")
    )
    outcome = run.tables["requests"].column("outcome")[number].as_py()
    places = ", ".join(
        f"{role} worker {int(requests[f'{role}_worker'][number])}"
        for role in ("prefill", "decode")
        if requests[f"{role}_worker"][number] >= 0
    )
    lines = [
        f"Request {ident} of {domain[number]}, {length}, {places}: {outcome}",
        f"Beside the median of {who}",
    ]
    return Explanation(lines, ["phase", "this request", "its like", "difference"], rows)


def explain_difference(first: Folder, second: Folder) -> tuple[Explanation, Explanation]:
    """Split the differences of mean TTFT and TPOT of two runs into parts that sum to them.

    TTFT is the sum of the phases before the first token; TPOT the time of steps by token, and what
    a mean over requests differs from it by. Of the MoE layers' change half of that of experts at
    either batch is theirs, the rest the batch's."""
    a, b = _parts_of(first), _parts_of(second)
    rows = [[n, a[n], b[n], b[n] - a[n]] for n in TTFT_PHASES if a[n] or b[n]]
    whole = math.fsum(a.values()), math.fsum(b.values())
    rows.append(["TTFT", *whole, whole[1] - whole[0]])
    titles = [f"A: {first.name}: {first.documents['summary']['label']}"]
    titles.append(f"B: {second.name}: {second.documents['summary']['label']}")
    columns = ["part of mean TTFT", "A", "B", "B - A"]
    return Explanation(titles, columns, rows), _tpot_difference(first, second)


def _tpot_difference(first: Folder, second: Folder) -> Explanation:
    a, b = _StepMeans.of(first), _StepMeans.of(second)
    routed = a.n_moe_layers or b.n_moe_layers
    rows: list[list[Any]] = []
    if routed:
        at_a = a.moe_at(a.batch, b.active) - a.moe_at(a.batch, a.active)
        at_b = b.moe_at(b.batch, b.active) - b.moe_at(b.batch, a.active)
        experts = (at_a + at_b) / 2.0
        rows.append(["MoE: activated experts", None, None, experts])
        rows.append(["MoE: batch", None, None, b.parts["moe"] - a.parts["moe"] - experts])
    rows += [
        [name, a.parts[key], b.parts[key], b.parts[key] - a.parts[key]]
        for key, name in _STEP_PARTS.items()
        if key != "moe" and (a.parts[key] or b.parts[key])
    ]
    rows.append(["TPOT", a.tpot, b.tpot, b.tpot - a.tpot])
    lines = []
    for name, run in (("A", a), ("B", b)):
        moe = f"activated experts a layer, by token; MoE layers {run.parts['moe']:.3f} ms"
        experts_said = f", {run.active:.1f} {moe}" if routed else ""
        lines.append(f"{name}: batch {run.batch:.1f}{experts_said}")
    return Explanation(lines, ["part of mean TPOT", "A", "B", "B - A"], rows)


def step_parts(run: Folder) -> dict[str, float]:
    """Return the parts of a run's mean TPOT by name, ms; they sum to it."""
    parts = _StepMeans.of(run).parts
    return {name: parts[key] for key, name in _STEP_PARTS.items()}


#: Parts of a step's time, and of a TPOT beside it.
_STEP_PARTS = {
    "moe": "MoE",
    "attention": "attention",
    "dense": "dense layers and lm_head",
    "collectives": "collectives in an engine",
    "all_to_all": "dispatch and combine",
    "lock_step": "lock step",
    "host": "host",
    "rest": "prompts in the step, what engines share",
    "queue": "between steps: preemption, unequal lengths",
}


@dataclass(frozen=True)
class _StepMeans:
    """Means over the tokens that decode steps of the measured window made; times in ms."""

    batch: float
    active: float
    parts: Mapping[str, float]
    tpot: float
    moe_s: Floats
    n_moe_layers: int

    def moe_at(self, batch: float, active: float) -> float:
        """Return the MoE layers' time of a step, ms."""
        if not self.n_moe_layers:
            return 0.0
        layer_s = _at(self.moe_s, np.array([batch]), np.array([active]))[0]
        return 1e3 * self.n_moe_layers * float(layer_s)

    @classmethod
    def of(cls, run: Folder) -> "_StepMeans":
        """Read the steps of a run, and split their times with its step-time model."""
        from eldr_sim.simulator.setup.config.run_config import make_config
        from eldr_sim.simulator.setup.prepare import prepare

        summary = run.documents["summary"]
        if summary["mean_tpot_ms"] is None:
            raise InputError("RESULT", f"{run.name} has no TPOT", "a run that decodes")
        model = prepare(make_config(run.documents["config"]["config"])).spec.decode.step_time
        cost = model.cost
        steps = _columns(run.tables["steps"])
        keep = np.array(run.tables["steps"].column("role").to_pylist()) == "decode"
        requests = _requests(run)
        own = requests["measured"].astype(bool)
        keep &= (steps["start_s"] >= requests["arrival_s"][own].min()) & (steps["batch"] > 0)
        keep &= steps["end_s"] <= np.nanmax(requests["finish_s"][own])
        steps = {name: values[keep] for name, values in steps.items()}
        batch, weight = steps["batch"], steps["batch"] / steps["batch"].sum()
        active = np.nan_to_num(steps["busiest_rank_experts"])

        def mean(values: Floats) -> float:
            return math.fsum((values * weight).tolist())

        rows = batch.astype(np.int64)
        context = steps["context_tokens"] / batch / cost.context_stride
        if "moe_ms" in steps:
            moe_ms = mean(steps["moe_ms"])
        else:
            moe_ms = 1e3 * cost.n_moe_layers * mean(_at(cost.moe_s, batch, active))
        parts = {
            "moe": moe_ms,
            "attention": 1e3 * mean(_at(cost.attention_s, batch, context)),
            "dense": 1e3 * mean(cost.dense_s[rows] + cost.head_s[rows]),
            "collectives": 1e3 * mean(cost.collectives_s[rows]),
            "all_to_all": mean(_sum_of(steps, "dispatch_ms", "combine_ms")),
            "lock_step": mean(_sum_of(steps, "idle_ms")),
            "host": 1e3 * cost.host_s,
        }
        step_ms = 1e3 * mean(steps["end_s"] - steps["start_s"])
        parts["rest"] = step_ms - math.fsum(parts.values())
        tpot = summary["mean_tpot_ms"]
        parts["queue"] = tpot - step_ms
        return cls(mean(batch), mean(active), parts, tpot, cost.moe_s, cost.n_moe_layers)


def _sum_of(steps: Mapping[str, Floats], *names: str) -> Floats:
    """Return the sum of some columns, 0 where a run has none of them."""
    known = [np.nan_to_num(steps[name]) for name in names if name in steps]
    return np.sum(known, axis=0) if known else np.zeros(len(steps["batch"]))


def _at(table: Floats, row: Floats, column: Floats) -> Floats:
    """Read a table between its entries; beyond them the last."""
    r = np.clip(row, 0, len(table) - 1)
    c = np.clip(column, 0, table.shape[1] - 1)
    r0, c0 = np.floor(r).astype(np.int64), np.floor(c).astype(np.int64)
    r1, c1 = np.minimum(r0 + 1, len(table) - 1), np.minimum(c0 + 1, table.shape[1] - 1)
    above = table[r0, c0] + (c - c0) * (table[r0, c1] - table[r0, c0])
    below = table[r1, c0] + (c - c0) * (table[r1, c1] - table[r1, c0])
    return np.asarray(above + (r - r0) * (below - above))


def _parts_of(run: Folder) -> dict[str, float]:
    """Return the mean of each phase before the first token, ms, over requests that completed."""
    requests = _requests(run)
    done = np.array(run.tables["requests"].column("outcome").to_pylist()) == "completed"
    done &= requests["measured"].astype(bool)
    if not done.any():
        raise InputError(
            "RESULT", f"no request of {run.name} completed", "a run with served requests"
        )
    spent, _ = _spent(run, requests)
    return {name: 1e3 * float(np.mean(spent[name][done])) for name in TTFT_PHASES}


def _spent(run: Folder, requests: Mapping[str, Floats]) -> tuple[dict[str, Floats], Bools]:
    """Return how long each request was in each phase, s, and which were served or waited for it."""
    in_line = np.isin(run.tables["requests"].column("outcome").to_pylist(), IN_LINE)
    times = [requests[name] for name in (*PHASES, "arrival_s") if name in requests]
    end = float(max(np.nan_to_num(values).max(initial=0.0) for values in times))
    return phases_of(requests, end, in_line), in_line


def _requests(run: Folder) -> dict[str, Floats]:
    return _columns(run.tables["requests"])


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_dictionary(kind))


def _columns(table: pa.Table) -> dict[str, Floats]:
    """Return the columns of numbers as floats, NaN for null."""
    columns = {}
    for name in table.column_names:
        kind = table.schema.field(name).type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            column = table.column(name)
            column = column.cast("int8") if pa.types.is_boolean(kind) else column
            columns[name] = numbers(filled(column.cast("float64", safe=False), math.nan))
    return columns


def _steps_of(run: Folder) -> dict[str, Floats]:
    """Return the decode steps of a run, in order of worker and start."""
    steps = _columns(run.tables["steps"])
    keep = np.array(run.tables["steps"].column("role").to_pylist()) == "decode"
    order = np.lexsort((steps["start_s"][keep], steps["worker"][keep]))
    return {name: values[keep][order] for name, values in steps.items()}


def _mean_in(
    steps: Mapping[str, Floats], column: str, requests: Mapping[str, Floats], number: int
) -> float:
    """Return the mean of a column over the steps of a request's worker while it decodes."""
    start, end = requests["decode_start_s"][number], requests["finish_s"][number]
    worker = requests["decode_worker"][number]
    if math.isnan(start) or math.isnan(end):
        return math.nan
    inside = (steps["worker"] == worker) & (steps["start_s"] >= start) & (steps["end_s"] <= end)
    return float(np.nanmean(steps[column][inside])) if inside.any() else math.nan
