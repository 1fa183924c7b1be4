"""The report of a campaign as Markdown, made from ``comparison.json`` and nothing else."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from eldr_sim.validation.live.milestones import COMPONENTS

__all__ = ["markdown"]

Row = dict[str, Any]

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
#: What the table of a set-up shows; the rest is in ``paired.csv``.
_SHOWN = (("ttft", "p50"), ("tpot", "p50"), ("tpot", "p99"), ("e2el", "p50"))
_OF_POLICIES = (("tpot", "p50"), ("tpot", "p99"), ("ttft", "p50"))
_COMPONENTS = (*COMPONENTS, "sum")
_CAPTIONS = {
    "cdf": "Requests up to a latency: live (a line a repeat) and simulated.",
    "steps": "Predicted against measured step time, each step from its own composition.",
    "components": "Components of E2E, simulated less live; whiskers: noise floor.",
    "distinct": "Decode step time against distinct experts at fixed batches: live steps over what "
    "the calibration says.",
}


def markdown(document: Row) -> str:
    """Return the text of a report.

    Parameters
    ----------
    document
        What ``comparison.json`` holds (:mod:`~.report`).
    """
    blocks = ["# A live vLLM beside its simulation", _introduction(document)]
    blocks += ["## Goals", _headline(document["headline"]), _JUDGED, *_missed(document["missed"])]
    blocks += _distinct(document["comparison"]["distinct"])
    for setup in _setups(document):
        blocks += [f"## {setup}", *_setup(document, setup)]
    blocks += ["## Decode policies", *_policies(document)]
    blocks += ["## What was run", *_configuration(document)]
    blocks += ["## Calibration", *_calibration(document["calibration"])]
    blocks += ["## What was not run", _not_run(document["not_run"]), "## Terms", _TERMS]
    return "\n\n".join(blocks) + "\n"


_JUDGED = (
    "The load with the largest error decides; the error of a load is the mean over its repeats of "
    "the absolute error. A latency that misses its goal is *within the noise floor* where live "
    "repeats of that load differ from each other by as much. Steps are predicted one by one, all "
    "loads together."
)
_TERMS = """\
- Error: 100 * (simulated / live - 1). Tables of a set-up: live mean of the repeats, simulated mean,
  mean of the repeats' errors with their sign, ± noise floor; **bold** where the goal is missed.
- Noise floor: mean over all pairs of live repeats of the absolute difference, relative to their
  mean.
- Host: outside the engines. Queue: until the first step of the prompt. Prefill: to the end of the
  step that completes it. Transfer: from the decode engine's queue to the first step there. Decode:
  the rest."""


def _setups(document: Row) -> list[str]:
    missing = [line.split(":")[0] for line in document["not_run"] if line.endswith(": not run.")]
    return [*document["setups"], *missing]


def _introduction(document: Row) -> str:
    runs = document["comparison"]["runs"]
    versions = ", ".join(f"{name} {v}" for name, v in document["versions"].items())
    incomplete = sum(run["incomplete"] for run in runs)
    text = (
        f"{len(runs)} runs of {versions}, {sum(run['num_requests'] for run in runs)} requests, "
        "each run simulated again with the same arrivals, lengths and routing, and with tables "
        "that were calibrated on the same machine by other runs. "
        "All figures of this page are in [comparison.json](comparison.json)."
    )
    if incomplete:
        text += f" {incomplete} requests did not get all their tokens and are in no figure."
    return text


def _headline(rows: Sequence[Row]) -> str:
    table = []
    for row in rows:
        where = row["worst_load"]
        worst = "" if where is None else f"{_percent(row['worst_percent'])} ({_cell(row)})"
        loads = "" if row["loads"] is None else f"{row['loads_met']} of {row['loads']}"
        table.append(
            [
                row["setup"],
                _figure(row["figure"]),
                _percent(row["error_percent"]),
                worst,
                _percent(row["noise_percent"]),
                f"{row['goal_percent']:g}%",
                loads,
                f"**{row['verdict']}**" if row["verdict"] == "missed" else row["verdict"],
            ]
        )
    columns = ["set-up", "figure", "error, mean of the loads", "worst load", "its noise floor"]
    return _table([*columns, "goal", "loads at or under it", "verdict"], table)


def _cell(row: Row) -> str:
    return f"{row['worst_load']}, {row['worst_policy']}"


def _figure(name: str) -> str:
    first, _, rest = name.partition(" ")
    return f"{_NAMES.get(first, first)} {rest}"


def _missed(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["No goal is missed."]
    return ["What missed, and the component that differs most:", "\n".join(map(_miss, rows))]


def _miss(row: Row) -> str:
    if row["load"] is None:
        text = f"- {row['setup']}: {row['figure']} {_percent(row['error_percent'])}"
        text += f" (goal {row['goal_percent']:g}%)"
        if row["component"] is not None:
            text += (
                f": {row['component']}, live {row['live_ms']:.3f} ms, predicted "
                f"{row['predicted_ms']:.3f} ms a step; its median difference is "
                f"{_percent(row['of_step_percent'])} of a step"
            )
        return text + "."
    noise = "no repeats" if row["noise_percent"] is None else _percent(row["noise_percent"])
    text = (
        f"- {row['setup']}, {row['load']}, {row['policy']}: {_figure(row['figure'])} "
        f"{_signed(row['error_percent'])} (goal {row['goal_percent']:g}%, noise floor {noise})"
    )
    if "component" in row:
        text += (
            f": {row['component']}, live {row['live_ms']:.2f} ms, simulated "
            f"{row['simulated_ms']:.2f} ms a request"
        )
    if "mean_batch" in row:
        text += f"; mean decode batch {_number(row['mean_batch'], 2)} live, "
        text += f"{_number(row['simulated_mean_batch'], 2)} simulated"
    biases = [
        f"{name} {_signed(row[key])}"
        for key, name in (
            ("decode_step_bias_percent", "decode-only steps"),
            ("mixed_step_bias_percent", "steps with prompts"),
        )
        if row.get(key) is not None
    ]
    if biases:
        text += f"; bias of step times at the live composition: {', '.join(biases)}"
    return text + "."


def _distinct(rows: Sequence[Row]) -> list[str]:
    layers, wrong, matched, differ = (
        sum(row[key] for row in rows)
        for key in ("layers", "wrong_layers", "matched_steps", "matched_wrong")
    )
    return [
        "Distinct experts: of the live steps' MoE layers, "
        f"{wrong} of {layers} differ between the engine's log and the union that the simulator "
        "computes; of the simulated steps with the composition of a live one, "
        f"{differ} of {matched}."
    ]


def _setup(document: Row, setup: str) -> list[str]:
    if setup not in document["setups"]:
        return ["Not run."]
    several = len(document["policies_run"][setup]) > 1
    paired = [row for row in document["paired"] if row["setup"] == setup]
    runs = [row for row in document["comparison"]["runs"] if row["setup"] == setup]
    parts = [row for row in document["comparison"]["components"] if row["setup"] == setup]
    cells = list(dict.fromkeys((row["load"], row["policy"]) for row in paired))
    latencies, components = [], []
    present = [c for c in _COMPONENTS if any(r["component"] == c and r["live_ms"] for r in parts)]
    for load, policy in cells:
        head = [load, policy] if several else [load]
        mine = [run for run in runs if (run["load"], run["policy"]) == (load, policy)]
        batch = sum(run["mean_batch"] for run in mine) / len(mine)
        row = [*head, str(len(mine)), f"{batch:.1f}, {max(run['max_batch'] for run in mine)}"]
        at = {
            (r["metric"], r["statistic"]): r
            for r in paired
            if (r["load"], r["policy"]) == (load, policy)
        }
        latencies.append(row + [_pair(at[key]) for key in _SHOWN if key in at])
        by = {
            r["component"]: r
            for r in parts
            if (r["load"], r["policy"], r["repeat"], r["of"]) == (load, policy, None, "e2el")
        }
        components.append(head + [_difference(by.get(name)) for name in present])
    names = ["load", "policy"] if several else ["load"]
    shown = [f"{_NAMES[metric]} {statistic}, ms" for metric, statistic in _SHOWN]
    columns = [*names, "repeats", "decode batch: mean, max", *shown]
    blocks = [_table(columns, latencies)]
    blocks += ["Steps, each predicted from its own composition:", _steps(document, setup)]
    blocks += ["Components of E2E, ms a request: live, simulated (difference):"]
    blocks += [_table([*names, *("E2E" if c == "sum" else c for c in present)], components)]
    blocks += [
        f"![{_CAPTIONS[p['kind']]}]({p['file']})\n\n*{p['of']}. {_CAPTIONS[p['kind']]}*"
        for p in document["pictures"]
        if p["setup"] == setup
    ]
    return blocks


def _pair(row: Row) -> str:
    noise = "" if row["noise_percent"] is None else f" ± {_percent(row['noise_percent'])}"
    text = f"{_number(row['live_ms'], 1)}, {_number(row['simulated_ms'], 1)}: "
    text += f"{_signed(row['error_percent'])}{noise}"
    return f"**{text}**" if row["verdict"] == "missed" else text


def _difference(row: Row | None) -> str:
    if row is None or row["live_ms"] is None:
        return "-"
    values = f"{row['live_ms']:.1f}, {row['simulated_ms']:.1f}"
    return f"{values} ({row['difference_ms']:+.1f})"


def _steps(document: Row, setup: str) -> str:
    rows = [
        [
            row["role"],
            row["group"],
            row["component"],
            str(row["steps"]),
            _number(row["live_ms"], 2),
            _number(row["predicted_ms"], 2),
            f"{_percent(row['median_percent'])}, {_percent(row['p90_percent'])}",
            _signed(row["bias_percent"]),
        ]
        for row in document["comparison"]["steps"]
        if row["setup"] == setup
        and row["role"] is not None
        and row["steps"]
        and (row["component"] == "step" or row["group"] in ("decode only", "with prompts"))
        and row["group"] != "all"
    ]
    columns = ["engine", "steps", "part", "number", "live, ms", "predicted, ms"]
    return _table([*columns, "error: median, p90", "bias"], rows)


def _policies(document: Row) -> list[str]:
    rows = document["policies"]
    if not rows:
        return ["Not compared: no set-up ran several policies, `round_robin` among them."]
    table = []
    for setup, load, policy in dict.fromkeys((r["setup"], r["load"], r["policy"]) for r in rows):
        cells = []
        for metric, statistic in _OF_POLICIES:
            key = (setup, load, policy, metric, statistic)
            names = ("setup", "load", "policy", "metric", "statistic")
            row = next(r for r in rows if tuple(r[n] for n in names) == key)
            noise = "" if row["noise_percent"] is None else f" (± {_percent(row['noise_percent'])})"
            both = f"{_signed(row['live_percent'])}, {_signed(row['simulated_percent'])}"
            cells.append(both + noise)
        table.append([setup, load, policy, *cells])
    columns = [f"{_NAMES[metric]} {statistic}" for metric, statistic in _OF_POLICIES]
    return [
        f"Difference from `{rows[0]['against']}`: live, simulated (noise floor, the larger one of "
        "the two policies).",
        _table(["set-up", "load", "policy", *columns], table),
    ]


def _configuration(document: Row) -> list[str]:
    engines = [
        [
            setup,
            e["name"],
            e["role"],
            *(
                str(e[key])
                for key in ("max_num_seqs", "max_num_batched_tokens", "block_size", "n_blocks")
            ),
        ]
        for setup, of in document["setups"].items()
        for e in of
    ]
    runs = document["comparison"]["runs"]
    loads = [
        [
            load["name"],
            f"{load['request_rate']:g}",
            f"{load['burstiness']:g}",
            load["lengths"],
            str(load["num_requests"]),
            str(load["seed"]),
            ", ".join(dict.fromkeys(r["setup"] for r in runs if r["load"] == load["name"])),
        ]
        for load in document["loads"]
    ]
    facts = [
        f"- Machine: {', '.join(f'{k} {v}' for k, v in document['machine'].items())}",
        f"- Versions: {', '.join(f'{k} {v}' for k, v in document['versions'].items())}",
        f"- `max_model_len`: {document['max_model_len']}",
        "- Model (`config.json`):",
    ]
    model = textwrap.fill(json.dumps(document["model"]), 118, break_on_hyphens=False)
    arguments = ["max_num_seqs", "max_num_batched_tokens", "block_size", "blocks"]
    columns = ["load", "requests/s", "burstiness", "lengths", "requests", "seed", "set-ups"]
    return [
        "\n".join(facts) + f"\n\n```json\n{model}\n```",
        _table(["set-up", "engine", "role", *(f"`{a}`" for a in arguments[:3]), "blocks"], engines),
        _table(columns, loads),
    ]


def _calibration(found: Row) -> list[str]:
    ingress, handoff = found["ingress_s"], found["handoff_s"]
    transfer = found["transfer"]
    times = [
        f"- Took {found['seconds']:.0f} s.",
        f"- Ingress (post to engine queue): {_delay(ingress)}. "
        f"Egress (end of step to client): {1e3 * found['egress_s']:.3f} ms.",
        f"- Handoff (end of prefill to decode queue): {_delay(handoff)}.",
        "- KV transfer: " + ", ".join(f"{k} {_plain(v)}" for k, v in transfer.items()) + ".",
    ]
    tables = [
        [
            table["kind"],
            str(table["rows"]),
            table["provenance"],
            table["kernel_source"],
            ", ".join(f"{k} {v:.1f}%" for k, v in table["fit_error_percent"].items()) or "-",
        ]
        for table in found["tables"]
    ]
    columns = ["table", "rows", "provenance", "kernel", "fit error"]
    return ["\n".join(times), _table(columns, tables)]


def _delay(delay: Row) -> str:
    base, slope = 1e3 * delay["base_s"], 1e6 * delay["per_token_s"]
    return f"{base:.3f} ms and {slope:.3f} us a token of the prompt"


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _not_run(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) if lines else "Nothing that was planned."


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}%"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
