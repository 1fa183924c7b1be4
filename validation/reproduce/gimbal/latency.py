"""Gimbal's Figures 6 to 10: TTFT, TPOT and throughput of its parts, and where its parts act."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eldr_sim.planning.intervals import Interval
from eldr_sim.planning.runs.shared_runs import Summary
from eldr_sim.traces.requests.length_shapes import LengthShape
from eldr_sim.validation.reproduce.gimbal.settings import (
    P99,
    SHARES,
    SYSTEMS,
    THROUGHPUT,
    TPOT,
    TTFT,
    VLLM,
    Experiment,
    System,
    change,
    mean,
    paired_claim,
    spelled,
)
from eldr_sim.validation.reproduce.reproduction import Claim, Reproduction

#: The paper's reductions at 1.4 requests/s, %: Figures 7 and 9.
TTFT_CUT: dict[LengthShape, float] = {
    "random": -17.6, "central": -18.7, "descending": -16.4, "two_end": -17.8, "average": -18.3,
}  # fmt: skip
TPOT_CUT: dict[LengthShape, float] = {
    "random": -13.5, "central": -17.6, "descending": -7.9, "two_end": -12.6, "average": -15.1,
}  # fmt: skip
_METRICS = (TTFT, P99, TPOT, THROUGHPUT)
#: Why a part alone changes what it does.
_WHY = {
    "DPLB": "printed, it decides nothing below a KV usage of 0.9: the runs are round robin's",
    "SJFS": "few prompts wait for others: each step's token budget admits several",
    "EDR": "no placement changes the bytes, the load is even already, and moving experts stops all",
}
Key = tuple[LengthShape, float, str]
#: KV blocks of an engine for the runs in which KV usage passes Algorithm 1's threshold.
FEW_BLOCKS = 1300


def _row(runs: Sequence[Summary], reference: Sequence[Summary]) -> dict[str, Any]:
    """Return means over seeds, changes against the reference, and what the engines waited."""
    values: dict[str, Any] = {metric: mean(runs, metric) for metric in _METRICS}
    for metric in _METRICS:
        found = change(runs, reference, metric)
        values |= {f"{metric}_%": found.mean, f"{metric}_low": found.low}
        values[f"{metric}_high"] = found.high
    groups = [run["group"] for run in runs]
    values["idle_ms"] = float(np.mean([group["mean_idle_ms"] for group in groups]))
    values["step_ms"] = float(np.mean([group["mean_step_ms"] for group in groups]))
    values["preemptions"] = mean(runs, "preemptions")
    values["relocations"] = mean(runs, "relocations")
    return values


def ablations(experiment: Experiment) -> list[dict[str, Any]]:
    """Run every system on every shape at every share of its knee; a row each."""
    scale = experiment.scale
    keys: list[Key] = [
        (shape, share, name) for shape in scale.shapes for share in SHARES for name in SYSTEMS
    ]
    runs = experiment.run(
        {key: experiment.cases(SYSTEMS[key[2]], key[0], key[1], scale.few) for key in keys}
    )
    return [
        {"shape": shape, "share": share, "system": name, "rate": experiment.knee(shape) * share}
        | _row(runs[shape, share, name], runs[shape, share, "vLLM"])
        for shape, share, name in keys
    ]


def main_runs(experiment: Experiment) -> dict[tuple[LengthShape, str], list[Summary]]:
    """Run vLLM's and Gimbal's system at the knee of every shape under all seeds."""
    names, scale = ("vLLM", "Gimbal", "Gimbal, prose"), experiment.scale
    return experiment.run(
        {
            (shape, name): experiment.cases(SYSTEMS[name], shape, 1.0, scale.seeds)
            for shape in scale.shapes
            for name in names
        }
    )


def figure_6(experiment: Experiment, rows: list[dict[str, Any]]) -> Reproduction:
    """TTFT by rate: Gimbal below each part, each part below vLLM, the balancer most."""
    return _by_rate(
        "figure_6", "TTFT by rate", experiment, rows, TTFT,
    )  # fmt: skip


def figure_8(experiment: Experiment, rows: list[dict[str, Any]]) -> Reproduction:
    """TPOT by rate."""
    return _by_rate(
        "figure_8", "TPOT by rate", experiment, rows, TPOT,
    )  # fmt: skip


def _by_rate(
    name: str, title: str, experiment: Experiment, rows: list[dict[str, Any]], metric: str
) -> Reproduction:
    best, parts = {}, ("DPLB", "SJFS", "EDR")
    at_knee = [row for row in rows if row["share"] == SHARES[-1]]
    for reading in ("Gimbal", "Gimbal, prose"):
        own = [row for row in at_knee if row["system"] == reading]
        best[reading] = float(np.mean([row[f"{metric}_%"] for row in own]))
    alone = {
        part: float(np.mean([r[f"{metric}_%"] for r in at_knee if r["system"] == part]))
        for part in (*parts, "DPLB, prose")
    }
    said = ", ".join(f"{part} {value:+.1f}" for part, value in alone.items())
    claims = [same_decisions(experiment)] if metric == TTFT else []
    claims += [
        Claim(f"each part alone lowers {metric[5:9].upper()} at the knee: {part}", -20.0, -0.5,
              alone[part], tolerance=0.0, reason=_WHY[part], stated=False)
        for part in parts
    ]  # fmt: skip
    claims += [
        Claim("Gimbal as printed, mean over shapes at the knee", -20.0, -0.5, best["Gimbal"],
              tolerance=0.0, reason=said, stated=False),
        Claim("Gimbal as its text has it, the same", -20.0, -0.5, best["Gimbal, prose"],
              tolerance=0.0, reason=said, stated=False),
    ]  # fmt: skip
    if metric == TTFT:
        largest = min(alone, key=lambda part: alone[part])
        claims.append(
            Claim("the balancer gives most of the gain: its share of the largest part's", 0.5, 1.0,
                  alone["DPLB"] / alone[largest] if alone[largest] < 0 else None, "", 0.0,
                  f"the largest is {largest}; {said}", stated=False, neutral=0.5)
        )  # fmt: skip

    def draw(figure: Any) -> None:
        for axes, shape in zip(
            np.atleast_1d(figure.subplots(1, len(experiment.scale.shapes), sharey=True)),
            experiment.scale.shapes,
            strict=True,
        ):
            for system in SYSTEMS:
                own = [r for r in rows if r["shape"] == shape and r["system"] == system]
                axes.plot([r["share"] for r in own], [r[metric] for r in own], ".-", label=system)
            axes.set(title=shape, xlabel="share of the knee")
        figure.axes[0].set_ylabel(f"{metric}, ms")

    heading = f"{title}; {experiment.source}"
    return Reproduction(name, heading, rows, claims, draw)


def paired_figure(
    name: str,
    title: str,
    experiment: Experiment,
    runs: dict[tuple[LengthShape, str], list[Summary]],
    metric: str,
    paper: dict[LengthShape, float],
) -> Reproduction:
    """Return a figure of paired changes at the knee, shape by shape, with their intervals."""
    rows: list[dict[str, Any]] = []
    claims, printed = [], []
    for shape in experiment.scale.shapes:
        found: dict[str, Interval] = {}
        for system in ("Gimbal", "Gimbal, prose"):
            ours, theirs = runs[shape, system], runs[shape, "vLLM"]
            found[system] = change(ours, theirs, metric)
            tail = change(ours, theirs, P99)
            rows.append(
                {"shape": shape, "system": system, "rate": experiment.knee(shape)}
                | {"vllm": mean(theirs, metric), "ours": mean(ours, metric)}
                | {"change_%": found[system].mean, "low": found[system].low}
                | {"high": found[system].high, "p99_ttft_%": tail.mean}
                | {"p99_ttft_low": tail.low, "p99_ttft_high": tail.high}
            )
        printed.append(found["Gimbal"].mean)
        prose = found["Gimbal, prose"]
        claims.append(
            paired_claim(
                f"{shape}: Gimbal against vLLM", paper[shape], paper[shape], found["Gimbal"],
                f"{len(runs[shape, 'vLLM'])} paired seeds; as its text has it {prose.mean:+.1f} "
                f"({spelled(prose)})",
            )
        )  # fmt: skip
    known = [paper[shape] for shape in experiment.scale.shapes]
    claims.append(
        Claim("mean over the shapes", float(np.mean(known)), float(np.mean(known)),
              float(np.mean(printed)), reason="as above")
    )  # fmt: skip

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, system in enumerate(("Gimbal", "Gimbal, prose")):
            own = [row for row in rows if row["system"] == system]
            x = np.arange(len(own)) + 0.25 * i
            error = [[r["change_%"] - r["low"], r["high"] - r["change_%"]] for r in own]
            axes.bar(x, [r["change_%"] for r in own], 0.24, yerr=np.transpose(error), label=system)
        axes.plot(np.arange(len(known)) + 0.12, known, "k_", markersize=20, label="paper")
        axes.set_xticks(np.arange(len(known)), list(experiment.scale.shapes))
        axes.set_ylabel("change against vLLM, %")

    return Reproduction(name, title, rows, claims, draw)


def figure_10(
    experiment: Experiment, runs: dict[tuple[LengthShape, str], list[Summary]]
) -> Reproduction:
    """Throughput at the knee: equal."""
    rows, claims = [], []
    for shape in experiment.scale.shapes:
        found = change(runs[shape, "Gimbal"], runs[shape, "vLLM"], THROUGHPUT)
        tokens = mean(runs[shape, "vLLM"], THROUGHPUT)
        rows.append(
            {"shape": shape, "vllm_tokens_s": tokens, "change_%": found.mean}
            | {"low": found.low, "high": found.high}
        )
        claims.append(paired_claim(f"{shape}: comparable throughput", -2.0, 2.0, found,
                                   tolerance=0.0, stated=False))  # fmt: skip

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.bar([r["shape"] for r in rows], [r["change_%"] for r in rows])
        axes.set_ylabel("output tokens/s against vLLM, %")

    return Reproduction("figure_10", "Throughput", rows, claims, draw)


def few_blocks(experiment: Experiment) -> Reproduction:
    """Return all systems again with so few KV blocks that Algorithm 1 acts as printed."""
    scale, more = experiment.scale, {"num_gpu_blocks_override": FEW_BLOCKS}
    seeds = scale.seeds
    systems = {
        **SYSTEMS,
        "vllm_dp": System(policy="vllm_dp"),
        "vllm_dp_kv": System(policy="vllm_dp_kv"),
    }
    rate = experiment.knee("random")
    runs = experiment.run(
        {
            name: [
                case | {"request_rate": rate} | more
                for case in experiment.cases(system, "random", 1.0, seeds)
            ]
            for name, system in systems.items()
        }
    )
    rows = [{"system": name} | _row(runs[name], runs["vLLM"]) for name in systems]

    def draw(figure: Any) -> None:
        for axes, metric in zip(figure.subplots(1, 3), (TTFT, P99, TPOT), strict=True):
            axes.barh([row["system"] for row in rows], [row[f"{metric}_%"] for row in rows])
            axes.set_xlabel(f"{metric}, % against vLLM")

    return Reproduction(
        "few_blocks", f"All systems with {FEW_BLOCKS} KV blocks an engine",
        rows, [], draw,
    )  # fmt: skip


def same_decisions(experiment: Experiment) -> Claim:
    """Return how far Algorithm 1 as printed is from round robin where KV is not short."""
    shape = experiment.scale.shapes[0]
    case = experiment.cases(VLLM, shape, 1.0, 1)[0]
    found = experiment.runner.run([case, case | {"policy": "gimbal"}])
    off = max(abs(found[0][m] - found[1][m]) for m in _METRICS)
    return Claim("printed Algorithm 1 against round robin: largest difference of any figure", 0.0,
                 0.0, off, "", 0.0, stated=False)  # fmt: skip
