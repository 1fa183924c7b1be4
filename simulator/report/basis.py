"""What figures rest on, and what their reader must be warned of: at the head of every section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree as ET

from eldr_sim.kernel_profiles.tables import PROVENANCES, weakest
from eldr_sim.simulator.metrics import warnings_of
from eldr_sim.simulator.report.markup import add, bullets, el, folded, number, table

#: Says lines about a summary.
Tell = Callable[[Mapping[str, Any]], list[str]]
_PARTS = {"moe": "MoE layer", "gemm": "dense GEMMs", "host_gap": "host gap"}


def basis(summaries: Mapping[str, Mapping[str, Any]]) -> list[ET.Element]:
    """Return warnings, the weakest provenance and the sources of some summaries.

    Parameters
    ----------
    summaries
        Summaries of runs by the name to use where they differ.
    """
    told = warning_box(_told(summaries, warnings_of))
    label = weakest([s["weakest_provenance"] for s in summaries.values()])
    facts = el(
        "p",
        "Weakest provenance of a step time: ",
        el("b", label, class_=f"badge p-{label}"),
    )
    lines = _told(summaries, trace_facts)
    box = el("section", el("h3", "What the figures rest on"), facts, bullets(lines), class_="basis")
    rows = list(
        dict.fromkeys(
            (_PARTS.get(part, part.replace("_", " ")), source["label"], source["origin"])
            for summary in summaries.values()
            for part, source in summary["provenance"].items()
        )
    )
    rows += list(
        dict.fromkeys(
            ("KV transfer", *_split(str(s["kv_transfer"])))
            for s in summaries.values()
            if "kv_transfer" in s
        )
    )
    sources = table("Sources of the step times", ["part", "provenance", "origin"], rows)
    add(box, folded("Sources, part by part", sources))
    return [*([told] if told is not None else []), box]


def warning_box(lines: list[str]) -> ET.Element | None:
    """Return a box of warnings; None where there is none."""
    if not lines:
        return None
    heading = "Warning" if len(lines) == 1 else f"{len(lines)} warnings"
    return el("section", el("h3", heading), bullets(lines), class_="warnings", role="note")


def trace_facts(summary: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know of the routing trace: origin, tiling, reuse."""
    trace = summary["trace"]
    lines = [f"Routing trace {trace['name']} ({trace['provenance']}), of {trace['model']}."]
    if trace.get("layers"):
        lines.append(f"Layers: {trace['layers']}.")
    replayed = trace.get("trace_requests_replayed")
    if replayed:
        lines.append(
            f"Reuse: {number(replayed)} recorded requests serve {number(trace['n_requests'])}; "
            f"each is replayed {trace['trace_request_uses_mean']:.1f} times in the mean, "
            f"{number(trace['trace_request_uses_max'])} times at most."
        )
    beyond = trace.get("output_tokens_beyond_recorded_share")
    if beyond:
        lines.append(
            f"{100 * beyond:.1f}% of the output tokens lie beyond what was recorded of their "
            "request and replay it again."
        )
    return lines


def _told(summaries: Mapping[str, Mapping[str, Any]], tell: Tell) -> list[str]:
    """Return lines about the summaries; one that not all share says whose it is."""
    who: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        for line in tell(summary):
            who.setdefault(line, []).append(name)
    return [
        line if len(names) == len(summaries) else f"{', '.join(names)}: {line}"
        for line, names in who.items()
    ]


def _split(kv_transfer: str) -> tuple[str, str]:
    """Split ``observed: derived: words`` into label and origin."""
    preset, _, rest = kv_transfer.partition(": ")
    label, colon, origin = rest.partition(": ")
    if not colon or label not in PROVENANCES:
        return preset, rest
    return label, f"{preset}: {origin}"
