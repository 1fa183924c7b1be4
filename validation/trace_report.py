"""Report on a routing trace, ELDR's figures 1, 3 and 4 among them; see ``docs/formats.md``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.charts import Draw, bars, field, lines, write_picture
from eldr_sim.kinds import Progress, Row, no_progress
from eldr_sim.outputs import write_rows
from eldr_sim.policies.eldr.artifact import calibration_pairs
from eldr_sim.policies.eldr.signature import idf_weights, select_layers, transformed
from eldr_sim.policies.placement.grace import equal_groups
from eldr_sim.policies.placement.grouping import utilization
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.coactivation import affinity_of, coactivation
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.overlap import Overlap, request_overlap
from eldr_sim.traces.routing.spectrum import RequestSpectrum, request_spectrum
from eldr_sim.traces.routing.statistics import TraceStatistics, domain_groups, trace_statistics
from eldr_sim.traces.streams import stream
from eldr_sim.validation.grouping_gain import GroupingGain, grouping_gain, rho_by_prompt

#: A folder with this file holds a report, which ``force`` replaces.
MARKER = "statistics.json"
#: Groups that co-activation is measured in, as GPUs of one node would be.
N_GROUPS = 4


@dataclass(frozen=True, eq=False)
class TraceReport:
    """Measurements of a routing trace."""

    trace: RoutingTrace  #: the trace
    statistics: TraceStatistics  #: its statistics
    overlap: Overlap  #: how alike its tokens and requests choose
    #: Spearman's rho of ``count-idf`` signatures on all layers (ELDR Eq. 1) over the calibration
    #: requests of each group of domains; absent for a group with fewer than 3, or without prompts.
    rho: dict[str, float]
    #: By layer, for ``neighbours`` and ``affinity``; empty without equal groups or a split.
    coactivation: dict[str, list[float]]
    #: What requests differ by, and what grouping could gain; None for too few requests.
    spectrum: RequestSpectrum | None
    grouping: GroupingGain | None
    #: Requests of 128 tokens or more, and rho of their first 16, 32, 64 (`grouping_gain`).
    rho_by_prompt: tuple[int, dict[int, float]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "manifest": self.trace.manifest.model_dump(),
            **self.statistics.as_dict(),
            "overlap": asdict(self.overlap),
            "rho": self.rho,
            "coactivation": self.coactivation,
            "request_spectrum": None if self.spectrum is None else asdict(self.spectrum),
            "grouping": None if self.grouping is None else asdict(self.grouping),
            "rho_by_prompt": {"requests": self.rho_by_prompt[0], "rho": self.rho_by_prompt[1]},
        }


def inspect_trace(trace: RoutingTrace, progress: Progress = no_progress) -> TraceReport:
    """Measure a trace; ``progress`` receives the share done."""
    measures: tuple[Callable[[RoutingTrace], Any], ...] = (
        trace_statistics, request_overlap, _rho, _coactivation, request_spectrum, grouping_gain,
        rho_by_prompt,
    )  # fmt: skip
    found = []
    for measure in measures:
        found.append(measure(trace))
        progress(len(found) / len(measures))
    return TraceReport(trace, *found)


def _coactivation(trace: RoutingTrace) -> dict[str, list[float]]:
    fitted, judged = np.flatnonzero(trace.is_calibration), np.flatnonzero(~trace.is_calibration)
    if trace.n_experts % N_GROUPS or not len(fitted) or not len(judged):
        return {}
    rng = stream(0, "trace inspect")
    neighbours = np.arange(trace.n_experts) * N_GROUPS // trace.n_experts
    shares: dict[str, list[float]] = {"neighbours": [], "affinity": []}
    both = (affinity_of(coactivation(trace, requests)) for requests in (fitted, judged))
    for pairs, seen in zip(*both, strict=True):
        groups = equal_groups(pairs, N_GROUPS, 1, rng, resolution=0.0)
        shares["neighbours"].append(utilization(seen, neighbours))
        shares["affinity"].append(utilization(seen, groups))
    return shares


def _rho(trace: RoutingTrace) -> dict[str, float]:
    rho_by_name: dict[str, float] = {}
    if not trace.has_prompts:
        return rho_by_name
    for group, names in domain_groups(trace).items():
        shares = None if group != "all" else dict.fromkeys(names, 1.0)
        if any(not len(trace.requests_of([name], calibration=True)) for name in names):
            continue
        calibration = calibration_set(trace, workload=group, domain_mix=shares)
        if len(calibration.requests) < 3:
            continue
        counts = calibration.scores("count")
        features = transformed(counts, "count-idf", idf_weights(counts))
        rho = select_layers(features, calibration_pairs(calibration, seed=0), "all").rho
        rho_by_name[group] = float(rho[-1])
    return rho_by_name


def write_trace_report(
    report: TraceReport, out: Path, *, plot: bool = True, force: bool = False
) -> None:
    """Write the report of a trace, with ``plot`` its pictures; InputError if ``out`` cannot be."""
    trace, statistics = report.trace, report.statistics
    groups = domain_groups(trace)
    use, copies = _Use.of(trace), [asdict(each) for each in statistics.copies]
    busiest, unused = statistics.load_max_over_mean, statistics.unused_experts
    every, groups_of = range(trace.n_layers), report.coactivation
    load = _rows_of(layer=every, busiest_over_mean=busiest, unused_experts=unused)
    together = _rows_of(layer=every, **groups_of) if groups_of else []
    distinct, layers = _distinct_rows(statistics), _layer_rows(statistics)
    curves = lines(distinct, "batch", "distinct_experts", "batches_of", "group", xscale="log")
    divergence = _js_rows(statistics)
    js = field(divergence, "other", "domain", "js_bits", spell="{:.3f}")
    of_layers = ("entropy_bits", "given_layer_before_bits")
    parts: dict[str, tuple[list[Row], Draw]] = {
        "expert_heatmap": (use.heat_rows(groups), lambda f: _draw_heat(f, use, groups)),
        "load_skew": (load, bars(load, "layer", "busiest_over_mean")),
        "distinct_experts": (distinct, curves),
        "copies": (copies, lines(copies, "batch", ("mixed", "one_domain"), "group")),
        "coactivation": (together, lines(together, "layer", tuple(report.coactivation))),
        "next_layer": (layers, lines(layers, "layer", of_layers, "of", ylim=(0, None))),
        "domain_divergence": (divergence, js),
    }
    if use.prompt is not None:
        phases, r = use.phase_rows(), statistics.prefill_decode_pearson
        named = [row | {"domain": f"{row['domain']}, r = {r[row['domain']]:.2f}"} for row in phases]
        parts["prefill_decode"] = phases, lines(named, "prompt", "decode", "domain", mark=".")
    with result_folder(out, force, MARKER) as folder:
        for name, (rows, draw) in parts.items():
            if not rows:
                continue
            shown = [
                {k: round(float(v), 6) if isinstance(v, float) else v for k, v in row.items()}
                for row in rows
            ]
            write_rows(folder / f"{name}.csv", shown)
            if plot:
                write_picture(folder / f"{name}.png", draw)
        write_json(folder / MARKER, report.as_dict())


@dataclass(frozen=True, eq=False)
class _Use:
    """Mean share of tokens that choose each expert, by domain, ``[domains, layers, experts]``."""

    names: list[str]
    decode: Floats
    prompt: Floats | None

    @classmethod
    def of(cls, trace: RoutingTrace) -> "_Use":
        present = np.unique(trace.domain)
        members = [np.flatnonzero(trace.domain == d) for d in present]
        decode = [trace.decode_activation(q).mean(axis=0, dtype=float) for q in members]
        prompt = None
        if trace.has_prompts:
            shares = (trace.prompt_counts(q) / trace.prompt_len[q][:, None, None] for q in members)
            prompt = np.stack([share.mean(axis=0) for share in shares])
        return cls([trace.domains[d] for d in present], np.stack(decode), prompt)

    def over_mean(self, names: list[str]) -> Floats:
        """Return decode shares over their mean of some domains; 0 if none uses the expert."""
        mine = self.decode[[self.names.index(name) for name in names]]
        mean = mine.mean(axis=0)
        ratio: Floats = mine / np.where(mean > 0, mean, np.inf)
        return ratio

    def heat_rows(self, groups: dict[str, list[str]]) -> list[Row]:
        return [
            {"group": group, "domain": names[d], "layer": layer, "expert": expert}
            | {"share": self.decode[self.names.index(names[d]), layer, expert], "over_mean": value}
            for group, names in groups.items()
            for (d, layer, expert), value in np.ndenumerate(self.over_mean(names))
        ]

    def phase_rows(self) -> list[Row]:
        assert self.prompt is not None
        return [
            {"domain": self.names[d], "layer": layer, "expert": expert, "prompt": value}
            | {"decode": self.decode[d, layer, expert]}
            for (d, layer, expert), value in np.ndenumerate(self.prompt)
        ]


def _rows_of(**columns: Sequence[Any]) -> list[Row]:
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, values, strict=True)) for values in rows]


def _distinct_rows(statistics: TraceStatistics) -> list[Row]:
    return [
        {
            "group": distinct_expert.group,
            "batch": distinct_expert.batch,
            "batches_of": kind,
            "distinct_experts": value,
        }
        for distinct_expert in statistics.distinct_experts
        for kind, value in (
            {"uniform": distinct_expert.uniform, "mixed": distinct_expert.mixed}
            | distinct_expert.same_domain
        ).items()
    ]


def _layer_rows(statistics: TraceStatistics) -> list[Row]:
    return [
        {"of": each.of, "layer": layer, "entropy_bits": alone, "given_layer_before_bits": given}
        for each in statistics.next_layer
        for layer, (alone, given) in enumerate(zip(each.entropy, each.conditional, strict=True), 1)
    ]


def _js_rows(statistics: TraceStatistics) -> list[Row]:
    domain_divergence = statistics.domain_divergence
    return [
        {"domain": a, "other": b}
        | {"js_bits": domain_divergence.split_half.get(a, float("nan")) if a == b else value}
        for a, row in domain_divergence.between.items()
        for b, value in row.items()
    ]


def _draw_heat(figure: Any, use: _Use, groups: dict[str, list[str]]) -> None:
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, (group, names) in zip(panels, groups.items(), strict=True):
        ratio = use.over_mean(names)
        layer = int(ratio.var(axis=0).mean(axis=-1).argmax())
        at = ratio[:, layer]
        # Experts in blocks of the domain that uses them most, the strongest first.
        order = np.lexsort((-at.max(axis=0), at.argmax(axis=0)))
        image = axes.imshow(at[:, order], aspect="auto", cmap="Blues", vmin=1, vmax=3)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel=f"experts of layer {layer}, reordered", title=f"{group}: use over the mean")
        figure.colorbar(image, ax=axes, extend="max")
