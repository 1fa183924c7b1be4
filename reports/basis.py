"""Head of a section: warnings, the weakest provenance and the routing traces of its figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eldr_sim.kernel_profiles.tables.format import PROVENANCES, weakest
from eldr_sim.reports.cells import Table, number, table
from eldr_sim.simulator.outcome.error_band import one_line
from eldr_sim.simulator.outcome.metrics import warnings_of
from eldr_sim.traces.requests.logs.log_header import header_in_words
from eldr_sim.traces.requests.logs.log_window import part_in_words

#: Most runs named in a line.
_MOST_NAMES = 4
_PARTS = {"moe": "MoE layer", "gemm": "dense GEMMs", "host_gap": "host gap"}


@dataclass(frozen=True)
class Basis:
    """The head of a section."""

    warnings: Sequence[str]  #: warnings, a line each
    label: str | None = None  #: weakest provenance of a step time; None without step times
    #: Descriptions of the routing traces, and what else the figures rest on, a line each.
    facts: Sequence[str] = ()
    sources: Table | None = None  #: sources of each part of a step, and of the KV transfer


def basis(
    summaries: Mapping[str, Mapping[str, Any]],
    warn: Callable[[Mapping[str, Any]], Sequence[str]] = warnings_of,
) -> Basis:
    """Return warnings, the weakest provenance and the sources of some summaries, by name."""
    warned = _merged({name: warn(summary) for name, summary in summaries.items()})
    if not summaries:
        return Basis(warned)
    rows = {
        (_PARTS.get(part, part.replace("_", " ")), source["label"], source["origin"])
        for summary in summaries.values()
        for part, source in summary["provenance"].items()
        if part not in ("kv_transfer", "handover")  # with their presets below
    }
    runs = summaries.values()
    rows |= {("Hand-over", *_split(str(s["handover"]))) for s in runs if "handover" in s}
    rows |= {("KV transfer", *_split(str(s["kv_transfer"]))) for s in runs}
    facts = trace_facts([summary["trace"] for summary in runs])
    facts += _merged({name: s.get("latency_notes", ()) for name, s in summaries.items()})
    bands = {n: [one_line(s["error_band"])] for n, s in summaries.items() if "error_band" in s}
    facts += _merged(bands)
    sources = table("Sources of the step times", ["part", "provenance", "origin"], sorted(rows))
    label = weakest([s["weakest_provenance"] for s in runs])
    return Basis(warned, label, facts, sources)


def trace_facts(traces: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return origin, tiling and reuse of the routing traces, a line each."""
    headers = (trace["log"] for trace in traces if trace.get("log"))
    parts = (trace["log_window"] for trace in traces if trace.get("log_window"))
    said = [f"Read: {header_in_words(header)}." for header in headers]
    lines = list(dict.fromkeys([*said, *(f"Measured: {part_in_words(part)}." for part in parts)]))
    by_trace: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for trace in traces:
        if trace.get("name") is None:  # a dense model's run
            continue
        key = tuple(trace.get(name) for name in ("name", "provenance", "rests_on", "layers"))
        by_trace.setdefault(key, []).append(trace)
    for (name, provenance, rests_on, layers), own in by_trace.items():
        lines.append(f"Routing trace {name} ({provenance}): {rests_on}.")
        if layers:
            lines.append(f"Layers: {layers}.")
        replayed = [trace for trace in own if trace.get("trace_requests_replayed")]
        if replayed:
            lines.append(
                f"Reuse: {_span(replayed, 'trace_requests_replayed')} recorded requests serve "
                f"{_span(replayed, 'n_requests')}; each is replayed "
                f"{_span(replayed, 'trace_request_uses_mean')} times in the mean, "
                f"{_span(replayed, 'trace_request_uses_max')} times at most."
            )
        beyond = [t for t in own if t.get("output_tokens_beyond_recorded_share")]
        if beyond:
            lines.append(
                f"{_span(beyond, 'output_tokens_beyond_recorded_share', 100.0)}% of the output "
                "tokens lie beyond what was recorded of their request and replay it again."
            )
    return lines


def _span(traces: Sequence[Mapping[str, Any]], key: str, factor: float | None = None) -> str:
    """Return the only value, or the range of values."""
    values = [trace[key] for trace in traces]
    ends = [v if factor is None else factor * v for v in dict.fromkeys((min(values), max(values)))]
    return " to ".join(number(end) if isinstance(end, int) else f"{end:.1f}" for end in ends)


def _merged(lines_of: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each line once, with the names of its summaries unless all share it."""
    who: dict[str, list[str]] = {}
    for name, lines in lines_of.items():
        for line in lines:
            who.setdefault(line, []).append(name)
    told = []
    for line, names in who.items():
        if len(names) == len(lines_of):
            told.append(line)
        elif len(names) <= _MOST_NAMES:
            told.append(f"{', '.join(names)}: {line}")
        else:
            told.append(f"{len(names)} of {len(lines_of)}: {line}")
    return told


def _split(kv_transfer: str) -> tuple[str, str]:
    """Split ``observed: derived: words`` into label and origin."""
    preset, _, rest = kv_transfer.partition(": ")
    label, colon, origin = rest.partition(": ")
    if not colon or label not in PROVENANCES:
        return preset, rest
    return label, f"{preset}: {origin}"
