"""Report on a routing trace: statistics and pictures, among them figures 1, 3 and 4 of ELDR.

A folder, written whole or not at all: ``statistics.json`` (manifest, all of
`traces.routing.statistics.trace_statistics`, rho) and a CSV of each picture:

``expert_heatmap``
    Share of generated tokens that choose each expert, by domain, over the mean of the group's
    domains (Fig. 1); the picture shows the layer that tells domains apart best.
``load_skew``
    Busiest expert of each layer over the mean, and experts that no token chose.
``distinct_experts``
    Distinct experts of a decode step against its batch: one domain, mixed, uniform (Fig. 4).
``copies``
    Expected share of a batch's requests that have a copy of themselves in it.
``prefill_decode``
    Share of prompt tokens and of generated tokens that choose each expert, by domain (Fig. 3);
    absent for a decode-only trace.
``coactivation``
    Share of the pairs of a token's experts that lie in one of 4 equal groups: of neighbours, and of
    groups by affinity (GRACE-MoE's U; fitted on calibration requests, counted on serving ones).
``next_layer``
    Entropy of a layer's expert, alone and given that of the layer before.
``domain_divergence``
    Jensen-Shannon divergence of each pair of domains; on the diagonal that of a domain's halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.outputs import write_rows
from eldr_sim.pictures import write_picture
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

__all__ = ["TraceReport", "inspect_trace", "write_trace_report"]

Row = dict[str, Any]
#: A folder with this file holds a report, which ``force`` replaces.
MARKER = "statistics.json"
#: Groups that co-activation is measured in, as GPUs of one node would be.
N_GROUPS = 4


@dataclass(frozen=True, eq=False)
class TraceReport:
    """Measurements of a routing trace.

    Attributes
    ----------
    trace
        The trace.
    statistics
        Its statistics.
    overlap
        How alike its tokens and requests choose.
    rho
        Spearman's rho of ``count-idf`` signatures on all layers (ELDR Eq. 1) over the calibration
        requests of each group of domains; absent for a group with fewer than 3, or without prompts.
    coactivation
        By layer, for groups of ``neighbours`` and by ``affinity``: see the module. Empty where the
        experts do not divide, or a split has no requests.
    spectrum, grouping
        What requests differ by, and what grouping them could gain; None for too few requests.
    rho_by_prompt
        Requests of 128 tokens or more, and rho of signatures of their first 16, 32 and 64 tokens
        (none for fewer than 3), see `grouping_gain`.
    """

    trace: RoutingTrace
    statistics: TraceStatistics
    overlap: Overlap
    rho: dict[str, float]
    coactivation: dict[str, list[float]]
    spectrum: RequestSpectrum | None
    grouping: GroupingGain | None
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


def inspect_trace(trace: RoutingTrace) -> TraceReport:
    """Measure a trace."""
    return TraceReport(
        trace,
        trace_statistics(trace),
        request_overlap(trace),
        _rho(trace),
        _coactivation(trace),
        request_spectrum(trace),
        grouping_gain(trace),
        rho_by_prompt(trace),
    )


def _coactivation(trace: RoutingTrace) -> dict[str, list[float]]:
    fitted, judged = np.flatnonzero(trace.is_calibration), np.flatnonzero(~trace.is_calibration)
    if trace.n_experts % N_GROUPS or not len(fitted) or not len(judged):
        return {}
    rng = stream(0, "trace inspect")
    neighbours = np.arange(trace.n_experts) * N_GROUPS // trace.n_experts
    found: dict[str, list[float]] = {"neighbours": [], "affinity": []}
    for pairs, seen in zip(
        affinity_of(coactivation(trace, fitted)),
        affinity_of(coactivation(trace, judged)),
        strict=True,
    ):
        groups = equal_groups(pairs, N_GROUPS, 1, rng, resolution=0.0)
        found["neighbours"].append(utilization(seen, neighbours))
        found["affinity"].append(utilization(seen, groups))
    return found


def _rho(trace: RoutingTrace) -> dict[str, float]:
    found: dict[str, float] = {}
    if not trace.has_prompts:
        return found
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
        found[group] = float(rho[-1])
    return found


def write_trace_report(
    report: TraceReport, out: Path, *, plot: bool = True, force: bool = False
) -> None:
    """Write the report of a trace.

    Parameters
    ----------
    report
        Measurements of the trace.
    out
        Folder to make.
    plot
        Also draw the pictures.
    force
        Replace an earlier report.

    Raises
    ------
    InputError
        If ``out`` exists and may not be replaced, or cannot be written.
    """
    trace, statistics = report.trace, report.statistics
    groups = domain_groups(trace)
    use, copies = _Use.of(trace), [asdict(each) for each in statistics.copies]
    parts: dict[str, tuple[list[Row], Callable[[Any], None]]] = {
        "expert_heatmap": (use.heat_rows(groups), lambda f: _draw_heat(f, use, groups)),
        "load_skew": (_load_rows(statistics), lambda f: _draw_load(f, statistics)),
        "distinct_experts": (_distinct_rows(statistics), lambda f: _draw_distinct(f, statistics)),
        "copies": (copies, lambda f: _draw_copies(f, statistics)),
        "coactivation": (
            _coactivation_rows(report.coactivation),
            lambda f: _draw_coactivation(f, report.coactivation),
        ),
        "next_layer": (_layer_rows(statistics), lambda f: _draw_layers(f, statistics)),
        "domain_divergence": (_js_rows(statistics), lambda f: _draw_js(f, statistics)),
    }
    if use.prompt is not None:
        parts["prefill_decode"] = (
            use.phase_rows(),
            lambda f: _draw_phases(f, use, statistics.prefill_decode_pearson),
        )
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
    decode: NDArray[np.float64]
    prompt: NDArray[np.float64] | None

    @classmethod
    def of(cls, trace: RoutingTrace) -> _Use:
        present = np.unique(trace.domain)
        members = [np.flatnonzero(trace.domain == d) for d in present]
        decode = [trace.decode_activation(q).mean(axis=0, dtype=float) for q in members]
        prompt = None
        if trace.has_prompts:
            prompt = np.stack(
                [
                    (trace.prompt_counts(q) / trace.prompt_len[q][:, None, None]).mean(axis=0)
                    for q in members
                ]
            )
        return cls([trace.domains[d] for d in present], np.stack(decode), prompt)

    def over_mean(self, names: list[str]) -> NDArray[np.float64]:
        """Return decode shares over their mean of some domains; 0 if none uses the expert."""
        mine = self.decode[[self.names.index(name) for name in names]]
        mean = mine.mean(axis=0)
        ratio: NDArray[np.float64] = mine / np.where(mean > 0, mean, np.inf)
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
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _coactivation_rows(found: dict[str, list[float]]) -> list[Row]:
    return _rows_of(layer=range(len(found["affinity"])), **found) if found else []


def _draw_coactivation(figure: Any, found: dict[str, list[float]]) -> None:
    axes = figure.subplots()
    for name, values in found.items():
        axes.plot(values, ".-", label=name)
    axes.set(xlabel="layer", ylabel=f"pairs inside {N_GROUPS} equal groups", ylim=(0, 1))
    axes.set_title("Pairs of a token's experts in one group")


def _load_rows(statistics: TraceStatistics) -> list[Row]:
    load, unused = statistics.load_max_over_mean, statistics.unused_experts
    return _rows_of(layer=range(len(load)), busiest_over_mean=load, unused_experts=unused)


def _distinct_rows(statistics: TraceStatistics) -> list[Row]:
    return [
        {"group": entry.group, "batch": entry.batch, "batches_of": kind, "distinct_experts": value}
        for entry in statistics.distinct_experts
        for kind, value in {
            "uniform": entry.uniform,
            "mixed": entry.mixed,
            **entry.same_domain,
        }.items()
    ]


def _layer_rows(statistics: TraceStatistics) -> list[Row]:
    return [
        {"of": found.of} | row
        for found in statistics.next_layer
        for row in _rows_of(
            layer=range(1, len(found.entropy) + 1),
            entropy_bits=found.entropy,
            given_layer_before_bits=found.conditional,
        )
    ]


def _js_rows(statistics: TraceStatistics) -> list[Row]:
    pairs = _js(statistics).items()
    return [{"domain": a, "other": b, "js_bits": value} for (a, b), value in pairs]


def _js(statistics: TraceStatistics) -> dict[tuple[str, str], float]:
    found = statistics.domain_divergence
    return {
        (a, b): found.split_half.get(a, float("nan")) if a == b else value
        for a, row in found.between.items()
        for b, value in row.items()
    }


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


def _draw_load(figure: Any, statistics: TraceStatistics) -> None:
    axes = figure.subplots()
    load = statistics.load_max_over_mean
    axes.bar(range(len(load)), load)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="MoE layer", ylabel="busiest expert over the mean", title="Load skew")


def _draw_distinct(figure: Any, statistics: TraceStatistics) -> None:
    groups = list(dict.fromkeys(entry.group for entry in statistics.distinct_experts))
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, group in zip(panels, groups, strict=True):
        mine = [entry for entry in statistics.distinct_experts if entry.group == group]
        batch = [entry.batch for entry in mine]
        axes.plot(batch, [e.uniform for e in mine], "k:", label="uniform")
        axes.plot(batch, [e.mixed for e in mine], "C1o-", label="mixed")
        same = [np.mean(list(e.same_domain.values())) for e in mine]
        axes.plot(batch, same, "C0o-", label="one domain, mean")
        for name in mine[0].same_domain:
            own = [e.same_domain.get(name, np.nan) for e in mine]
            axes.plot(batch, own, "C0-", alpha=0.25)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batch, [str(b) for b in batch])
        axes.set(xlabel="batch", title=group)
    panels[0].set_ylabel("distinct experts of a layer")


def _draw_copies(figure: Any, statistics: TraceStatistics) -> None:
    axes = figure.subplots()
    groups = list(dict.fromkeys(entry.group for entry in statistics.copies))
    for i, group in enumerate(groups):
        mine = [entry for entry in statistics.copies if entry.group == group]
        batch = [entry.batch for entry in mine]
        axes.plot(batch, [e.mixed for e in mine], f"C{i}o-", label=f"{group}, mixed")
        axes.plot(batch, [e.one_domain for e in mine], f"C{i}s--", label=f"{group}, one domain")
    axes.set(
        xlabel="batch", ylabel="requests beside a copy", title="Copies of a request in a batch"
    )


def _draw_layers(figure: Any, statistics: TraceStatistics) -> None:
    axes = figure.subplots()
    for i, found in enumerate(statistics.next_layer):
        layers = range(1, len(found.entropy) + 1)
        axes.plot(layers, found.entropy, f"C{i}o:", label=f"{found.of} expert")
        label = f"{found.of} expert, given the layer before's"
        axes.plot(layers, found.conditional, f"C{i}o-", label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="MoE layer", ylabel="entropy, bits", ylim=(0, None), title="Next layer")


def _draw_js(figure: Any, statistics: TraceStatistics) -> None:
    axes = figure.subplots()
    names = list(statistics.domain_divergence.between)
    values = np.array(list(_js(statistics).values())).reshape(len(names), len(names))
    image = axes.imshow(values, cmap="viridis", vmin=0)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    for (i, j), value in np.ndenumerate(values):
        axes.text(j, i, f"{value:.3f}", ha="center", va="center", color="white", fontsize=7)
    axes.set_title("Jensen-Shannon divergence, bits (diagonal: halves of a domain)")
    figure.colorbar(image, ax=axes)


def _draw_phases(figure: Any, use: _Use, pearson: dict[str, float]) -> None:
    assert use.prompt is not None
    axes = figure.subplots()
    for i, name in enumerate(use.names):
        label = f"{name}, r = {pearson[name]:.2f}"
        points = use.prompt[i].ravel(), use.decode[i].ravel()
        axes.plot(*points, ".", markersize=3, alpha=0.5, label=label)
    axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
    axes.set(xlabel="share of prompt tokens", ylabel="share of generated tokens")
    axes.set_title("Prefill against decode (an untrained model is high here too)")
