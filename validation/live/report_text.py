"""The report of a campaign as Markdown, made from ``comparison.json`` and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from eldr_sim.validation.live.milestones import COMPONENTS
from eldr_sim.validation.live.report_figures import PARTS

__all__ = ["headline_table", "markdown"]

Row = dict[str, Any]

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
#: What the table of a set-up shows; the rest is in ``paired.csv``.
_SHOWN = (("ttft", "p50"), ("tpot", "p50"), ("tpot", "p99"), ("e2el", "p50"))
_OF_POLICIES = (("tpot", "p50"), ("tpot", "p99"), ("ttft", "p50"))
_CAPTIONS = {
    "cdf": "requests up to a latency, live (a line a repeat) and simulated",
    "steps": "predicted against measured step time, each step from its own composition",
    "components": "components of E2E, simulated less live, with the noise floor",
    "distinct": "decode step time against distinct experts at fixed batches, live and calibrated",
}


def markdown(document: Row) -> str:
    """Return the text of a report.

    Parameters
    ----------
    document
        What ``comparison.json`` holds (:mod:`~.report`).
    """
    blocks = ["# A live vLLM beside its simulation", _introduction(document)]
    blocks += ["## Goals", _headline(document), _JUDGED, *_missed(document)]
    blocks += _distinct(document["comparison"]["distinct"])
    for setup in _setups(document):
        blocks += [f"## {setup}", *_setup(document, setup)]
    blocks += ["## Decode policies", *_policies(document)]
    blocks += ["## What was run", *_configuration(document)]
    blocks += ["## Calibration", *_calibration(document)]
    blocks += ["## What was not run", _not_run(document["not_run"]), "## Terms", _TERMS]
    return "\n\n".join(blocks) + "\n"


_JUDGED = (
    "The load with the largest error decides; the error of a load is the mean over its repeats of "
    "the absolute error. What misses its goal is *within the noise floor* where live repeats of "
    "that load, or steps that are alike, differ from each other by as much. Steps are predicted "
    "one by one, all loads together."
)
_AHEAD = (
    "The engines share the cores of this machine, so the prompts were computed before each run: a "
    "request begins with the transfer of its KV cache, and TTFT has no prefill in it."
)
_TERMS = """\
- Error: 100 * (simulated / live - 1). Tables of a set-up: live mean of the repeats, simulated mean:
  mean of the repeats' errors with their sign ± noise floor; **bold** where the goal is missed.
- Noise floor: mean over all pairs of live repeats of the absolute difference, over their mean. Of
  steps: how far they lie from the median of those with the same batch and distinct experts.
- Components of E2E: mean of a request, simulated less live, ms. Host: outside the engines. Queue:
  until the first step of the prompt. Prefill: to the end of the step that completes it. Transfer:
  from the decode engine's queue to the first step there. Decode: the rest.
- All rows: [paired.csv](paired.csv), [steps.csv](steps.csv), [components.csv](components.csv)."""


def _setups(document: Row) -> list[str]:
    return list(dict.fromkeys([*document["setups"], *document["not_run"]]))


def _introduction(document: Row) -> str:
    runs = document["comparison"]["runs"]
    text = (
        f"{len(runs)} runs, {sum(run['num_requests'] for run in runs)} requests. Each run is "
        "simulated again with the same arrivals, lengths and routing, and with tables that were "
        "calibrated on the same machine by other runs. All figures of this page are in "
        "[comparison.json](comparison.json)."
    )
    if incomplete := sum(run["incomplete"] for run in runs):
        text += f" {incomplete} requests did not get all their tokens and are in no figure."
    facts = [
        f"- {name}: " + ", ".join(f"{key} {value}" for key, value in document[of].items())
        for name, of in (("Machine", "machine"), ("Versions", "versions"))
        if document[of]
    ]
    return "\n".join([text, "", *facts])


def headline_table(document: Row) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the table of goals, as plain text.

    Parameters
    ----------
    document
        What ``comparison.json`` holds.
    """
    rows = []
    for row in document["headline"]:
        worst = ""
        if row["worst_load"] is not None:
            where = _place(document, row["setup"], row["worst_load"], row["worst_policy"])
            worst = f"{_percent(row['worst_percent'])} ({where})"
        rows.append(
            [
                row["setup"],
                _figure(row["figure"]),
                _percent(row["error_percent"]),
                worst,
                _percent(row["noise_percent"]),
                f"{row['goal_percent']:g}%",
                "" if row["loads"] is None else f"{row['loads_met']} of {row['loads']}",
                row["verdict"],
            ]
        )
    columns = ["set-up", "figure", "error, mean of the loads", "worst load", "noise floor"]
    return [*columns, "goal", "loads at or under it", "verdict"], rows


def _headline(document: Row) -> str:
    columns, rows = headline_table(document)
    bold = [[*row, f"**{verdict}**" if verdict == "missed" else verdict] for *row, verdict in rows]
    return _table(columns, bold)


def _place(document: Row, setup: str, load: str, policy: str) -> str:
    """Name a load, and the policy where the set-up ran several."""
    return f"{load}, {policy}" if len(document["policies_run"][setup]) > 1 else load


def _figure(name: str) -> str:
    first, _, rest = name.partition(" ")
    return f"{_NAMES.get(first, first)} {rest}"


def _missed(document: Row) -> list[str]:
    """A line a goal that is missed: what its worst load spends where."""
    if not document["missed"]:
        return ["No goal is missed."]
    lines = []
    for head in document["headline"]:
        names = {"setup": head["setup"], "figure": head["figure"]}
        rows = [row for row in document["missed"] if names.items() <= row.items()]
        worst = {"load": head["worst_load"], "policy": head["worst_policy"]}
        for row in rows:
            if worst.items() <= row.items():
                lines.append(_miss(document, row, rows))
    return ["What missed, and the component that differs most:", "\n".join(lines)]


def _miss(document: Row, row: Row, alike: Sequence[Row]) -> str:
    goal = f"goal {row['goal_percent']:g}%"
    text = f"- {row['setup']}, {_figure(row['figure'])}"
    if row["load"] is None:
        text += f" {_percent(row['error_percent'])} ({goal})"
        if row["component"] is not None:
            worst = " of the worst tenth" if row["figure"].endswith("p90") else ""
            text += (
                f": {row['component']}, live {_number(row['live_ms'], 3)} ms, predicted "
                f"{_number(row['predicted_ms'], 3)} ms a step{worst}; its median difference "
                f"is {_percent(row['of_step_percent'])} of a step"
            )
        return text + "."
    place = _place(document, row["setup"], row["load"], row["policy"])
    noise = "no repeats" if row["noise_percent"] is None else _percent(row["noise_percent"])
    text += f" at {place} {_signed(row['error_percent'])} ({goal}, noise floor {noise})"
    tpot = row["figure"].startswith("tpot")
    after = " after its first token" if tpot else ""
    text += f": {row['component']}, live {_number(row['live_ms'], 2)} ms, simulated "
    text += f"{_number(row['simulated_ms'], 2)} ms a request{after}"
    if tpot:
        text += f"; mean decode batch {_number(row['mean_batch'], 2)} live, "
        text += f"{_number(row['simulated_mean_batch'], 2)} simulated"
        biases = [
            f"{name} {_signed(row[key])}"
            for key, name in (
                ("decode_step_bias_percent", "decode-only steps"),
                ("mixed_step_bias_percent", "steps with prompts"),
            )
            if row[key] is not None
        ]
        text += f"; bias of step times at the live composition: {', '.join(biases) or '-'}"
    same = sum(other["component"] == row["component"] for other in alike)
    return text + f". {row['component'].capitalize()} in {same} of {len(alike)} loads that miss."


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
    parts = {
        (row["load"], row["policy"], row["component"]): row
        for row in document["comparison"]["components"]
        if (row["setup"], row["repeat"], row["of"]) == (setup, None, "e2el")
    }
    names = [c for c in COMPONENTS if any(r["live_ms"] for (*_, of), r in parts.items() if of == c)]
    rows = []
    for load, policy in dict.fromkeys((row["load"], row["policy"]) for row in paired):
        mine = [run for run in runs if (run["load"], run["policy"]) == (load, policy)]
        batch = sum(run["mean_batch"] for run in mine) / len(mine)
        at = {
            (row["metric"], row["statistic"]): row
            for row in paired
            if (row["load"], row["policy"]) == (load, policy)
        }
        rows.append(
            [
                *([load, policy] if several else [load]),
                str(len(mine)),
                f"{batch:.1f}, {max(run['max_batch'] for run in mine)}",
                *(_pair(at[key]) for key in _SHOWN),
                *(_signed_ms(parts[load, policy, name]["difference_ms"]) for name in names),
            ]
        )
    columns = ["load", "policy"] if several else ["load"]
    columns += ["repeats", "decode batch: mean, max"]
    columns += [f"{_NAMES[metric]} {statistic}, ms" for metric, statistic in _SHOWN]
    pictures = [picture for picture in document["pictures"] if picture["setup"] == setup]
    return [
        *([_AHEAD] if document["prefilled"][setup] else []),
        _table([*columns, *names], rows),
        "Steps, each predicted from its own composition; bias of the step and of its parts:",
        _steps(document, setup),
        *_batches(document, setup),
        "\n".join(f"![{p['of']}: {_CAPTIONS[p['kind']]}]({p['file']})" for p in pictures),
    ]


def _pair(row: Row) -> str:
    noise = "" if row["noise_percent"] is None else f" ± {_percent(row['noise_percent'])}"
    text = f"{_number(row['live_ms'], 1)}, {_number(row['simulated_ms'], 1)}: "
    text += f"{_signed(row['error_percent'])}{noise}"
    return f"**{text}**" if row["verdict"] == "missed" else text


def _steps(document: Row, setup: str) -> str:
    at = {
        (row["role"], row["group"], row["component"]): row
        for row in document["comparison"]["steps"]
        if row["setup"] == setup and row["role"] is not None
    }
    rows = []
    for (role, group, component), row in at.items():
        if component == "step" and group in ("decode only", "with prompts"):
            parts = [at[role, group, part]["bias_percent"] for part in PARTS]
            errors = f"{_percent(row['median_percent'])}, {_percent(row['p90_percent'])}"
            times = [_number(row[key], 2) for key in ("live_ms", "predicted_ms")]
            biases = map(_signed, [row["bias_percent"], *parts])
            rows.append([role, group, str(row["steps"]), *times, errors, *biases])
    columns = ["engine", "steps", "number", "live, ms", "predicted, ms", "error: median, p90"]
    return _table([*columns, "bias", *PARTS], rows)


def _batches(document: Row, setup: str) -> list[str]:
    """Errors of decode-only steps by batch, in a line."""
    found = [
        f"{row['group'].removeprefix('batch ')}: {_percent(row['median_percent'])}, "
        f"{_percent(row['p90_percent'])}"
        for row in document["comparison"]["steps"]
        if row["setup"] == setup
        and row["role"] in ("decode", "colocated")
        and row["component"] == "step"
        and row["group"].startswith("batch")
    ]
    return [f"Decode only, by batch (median, p90): {'; '.join(found)}."] if found else []


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
        "the two policies). All statistics are in [policies.csv](policies.csv).",
        _table(["set-up", "load", "policy", *columns], table),
    ]


def _configuration(document: Row) -> list[str]:
    keys = ("max_num_seqs", "max_num_batched_tokens", "block_size", "n_blocks")
    alike: dict[tuple[str, ...], list[str]] = {}  # names of a set-up's engines that are equal
    for setup, engines in document["setups"].items():
        for engine in engines:
            values = (setup, engine["role"], *(str(engine[key]) for key in keys))
            alike.setdefault(values, []).append(engine["name"])
    rows = [[setup, ", ".join(names), *rest] for (setup, *rest), names in alike.items()]
    offered: dict[tuple[str, ...], list[str]] = {}  # where, and how much of it
    for load in document["loads"]:
        values = (load["name"], f"{load['burstiness']:g}", load["lengths"], str(load["seed"]))
        rate = f"{load['setup']} {load['request_rate']:g} ({load['num_requests']})"
        offered.setdefault(values, []).append(rate)
    loads = [[*values, ", ".join(rates)] for values, rates in offered.items()]
    columns = ["load", "burstiness", "lengths", "seed", "requests/s (requests)"]
    return [
        f"Requests of up to {document['max_model_len']} tokens. The model's `config.json`:",
        f"```json\n{json.dumps(document['model'])}\n```",
        _table(["set-up", "engines", "role", *(f"`{key}`" for key in keys)], rows),
        _table(columns, loads),
    ]


def _calibration(document: Row) -> list[str]:
    """Times outside the steps, and tables; a column a set-up."""
    found = document["calibration"]
    roles = {name: {e["role"] for e in of} for name, of in document["setups"].items()}
    apart = {name: of if "prefill" in roles[name] else None for name, of in found.items()}
    rows = [
        ["wall time", *(f"{of['seconds']:.0f} s" for of in found.values())],
        [
            "from the post to the engine's queue",
            *(_delay(of["ingress_s"]) for of in found.values()),
        ],
        [
            "from the end of a step to the client",
            *(f"{1e3 * of['egress_s']:.3f} ms" for of in found.values()),
        ],
        [
            "from a prefill's end to the decode queue",
            *(_delay(of["handoff_s"]) if of else "-" for of in apart.values()),
        ],
        ["KV transfer", *(_transfer(of["transfer"]) if of else "-" for of in apart.values())],
    ]
    kinds = dict.fromkeys(table["kind"] for of in found.values() for table in of["tables"])
    rows += [[f"table `{kind}`", *(_fits(of, kind) for of in found.values())] for kind in kinds]
    return [_table(["", *found], rows), "Of a table: rows, provenance, fit errors."]


def _fits(found: Row, kind: str) -> str:
    """Describe the tables of a kind."""
    texts = []
    for table in found["tables"]:
        if table["kind"] == kind:
            errors = ", ".join(f"{k} {v:.1f}%" for k, v in table["fit_error_percent"].items())
            texts.append(f"{table['rows']}, {table['provenance']}" + (errors and f", {errors}"))
    return "; ".join(texts) or "-"


def _transfer(of: Row) -> str:
    return (
        f"{1e3 * of['setup_s']:.3f} ms, {1e6 * of['descriptor_s']:.3f} us a descriptor, "
        f"{of['bandwidth'] / 1e9:.4g} GB/s ({of['source']})"
    )


def _delay(delay: Row) -> str:
    base, slope = 1e3 * delay["base_s"], 1e6 * delay["per_token_s"]
    return f"{base:.3f} ms and {slope:.3f} us a prompt token"


def _not_run(lacking: dict[str, list[str]]) -> str:
    lines = [f"- {setup}: {', '.join(what)}." for setup, what in lacking.items()]
    return "\n".join(lines) or "Nothing that a full campaign has."


def _signed_ms(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 1) + 0.0:+.1f}%"  # no -0.0


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
