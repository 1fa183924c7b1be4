"""Report on ELDR's offline fit: figures 7, 8 and 9 of the paper on this trace, with CSV files.

A folder of ``rho_by_transform``, ``rho_by_layers`` and ``signature_pca``, each as PNG and CSV, and
``summary.json`` (the fits in plain numbers), written whole or not at all. Numbers in the CSV files
are rounded to 1e-6."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.charts import bars, lines, write_picture
from eldr_sim.errors import InputError
from eldr_sim.outputs import write_rows
from eldr_sim.policies.eldr.artifact import RoutingArtifact, fit_like
from eldr_sim.policies.eldr.signature import TRANSFORMS, score_of
from eldr_sim.policies.eldr.signature_quality import SignatureQuality, signature_quality
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.format import RoutingTrace

#: Colours of workloads and domains, in order; those of the paper's first two are blue and orange.
_COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "C7")

Row = dict[str, str | int | float]


def measured_fits(
    trace: RoutingTrace, workload: str, calibration: CalibrationSet, artifact: RoutingArtifact
) -> dict[str, SignatureQuality]:
    """Measure a fit, and fits with its options for the other named workloads with domains that the
    trace has in enough calibration requests. Transforms are compared on requests with gate scores,
    if 3 or more."""
    compared = _with_gate_scores(trace, workload, calibration)
    fits = {workload: signature_quality(calibration, artifact, compared)}
    for name, mix in DOMAIN_MIXES.items():
        if name == workload or not mix.keys() <= set(trace.domains):
            continue
        other = calibration_set(trace, workload=name, score=score_of(artifact.transform))
        if len(other.requests) >= max(3, artifact.n_decoders):
            compared = _with_gate_scores(trace, name, other)
            fits[name] = signature_quality(other, fit_like(artifact, other), compared)
    return fits


def _with_gate_scores(
    trace: RoutingTrace, workload: str, calibration: CalibrationSet
) -> CalibrationSet:
    """Return the calibration requests with gate scores, or ``calibration`` if too few have them."""
    if trace.gate_scores is None:
        return calibration
    try:
        found = calibration_set(trace, workload=workload, score=trace.gate_scores.kinds[0])
    except InputError:  # a domain of the workload has none
        return calibration
    return found if len(found.requests) >= 3 else calibration


@contextmanager
def signature_report(
    out: Path, fits: Mapping[str, SignatureQuality], *, force: bool = False
) -> Iterator[None]:
    """Write the report of fits, whole or not at all; raises InputError if ``out`` cannot be."""
    with result_folder(out, force) as folder:
        parts: dict[str, tuple[list[Row], int, Callable[[Any], None]]] = {
            "rho_by_transform": (transform_rows(fits), 1, lambda f: draw_transforms(f, fits)),
            "rho_by_layers": (layer_rows(fits), 1, lambda f: draw_layers(f, fits)),
            "signature_pca": (pca_rows(fits), len(fits), lambda f: draw_pca(f, fits)),
        }
        for name, (rows, panels, draw) in parts.items():
            write_rows(folder / f"{name}.csv", rows)
            write_picture(folder / f"{name}.png", draw, (6.5 * panels, 4.5))
        summary = {name: fit.artifact.summary() for name, fit in fits.items()}
        write_json(folder / "summary.json", summary)
        yield


def transform_rows(fits: Mapping[str, SignatureQuality]) -> list[Row]:
    """Return rho of every transform on all layers (Fig. 7), a row per workload and transform."""
    return [
        {
            "workload": workload,
            "transform": transform,
            "rho": round(rho, 6),
            "layers": len(fit.greedy.order),
            "requests": len(fit.compared.requests),
            "pairs": fit.compared_pairs,
        }
        for workload, fit in fits.items()
        for transform, rho in fit.rho_by_transform.items()
    ]


def layer_rows(fits: Mapping[str, SignatureQuality]) -> list[Row]:
    """Return rho by layers kept by the greedy selection (Fig. 8), a row per workload and layer."""
    rows: list[Row] = []
    for workload, fit in fits.items():
        own: Row = {"workload": workload, "transform": fit.artifact.transform}
        added = zip(fit.greedy.order.tolist(), fit.greedy.rho.tolist(), strict=True)
        rows += [
            own
            | {"layers_kept": kept, "layer_added": layer, "rho": round(rho, 6)}
            | {"peak": int(kept == fit.greedy.n_kept)}
            for kept, (layer, rho) in enumerate(added, 1)
        ]
    return rows


def pca_rows(fits: Mapping[str, SignatureQuality]) -> list[Row]:
    """Return signatures and centroids in a plane (Fig. 9), a row per request or centroid. ``index``
    is the request's row in the trace or the decode worker of the centroid; ``domain`` is empty for
    centroids; ``explained_1`` and ``explained_2`` are the shares of the variance."""
    rows: list[Row] = []
    for workload, fit in fits.items():
        calibration, plane = fit.calibration, fit.projection
        domains = [calibration.domains[d] for d in calibration.domain.tolist()]
        k = len(plane.centroids)
        kinds = (
            ("request", calibration.requests.tolist(), domains, plane.points),
            ("centroid", list(range(k)), [""] * k, plane.centroids),
        )
        shares = {f"explained_{i + 1}": float(plane.explained[i]) for i in range(2)}
        rows += [
            {"workload": workload, "kind": kind, "index": i, "domain": name, "pc1": x, "pc2": y}
            | shares
            for kind, index, names, coordinates in kinds
            for i, name, (x, y) in zip(index, names, coordinates.tolist(), strict=True)
        ]
    return rows


def draw_transforms(figure: Any, fits: Mapping[str, SignatureQuality]) -> None:
    """Draw a bar of rho for each transform and workload (Fig. 7)."""
    known = {t for fit in fits.values() for t in fit.rho_by_transform}
    missing = [transform for transform in TRANSFORMS if transform not in known]
    note = f" (the trace has no scores for {' and '.join(missing)})" if missing else ""
    rows = [row | {"of": f"{row['workload']} ({row['requests']} requests)"}
            for row in transform_rows(fits)]  # fmt: skip
    title = f"Signature quality by transform, all layers{note}"
    bars(rows, "transform", "rho", "of", title=title)(figure)


def draw_layers(figure: Any, fits: Mapping[str, SignatureQuality]) -> None:
    """Draw rho against the layers kept, a star at N* (Fig. 8)."""
    transform = next(iter(fits.values())).artifact.transform
    labels = {"xlabel": "layers kept by the greedy selection",
              "title": f"Signature quality by layers kept, {transform}"}  # fmt: skip
    lines(layer_rows(fits), "layers_kept", "rho", "workload", **labels)(figure)
    (axes,) = figure.axes
    for i, (workload, fit) in enumerate(fits.items()):
        peak = fit.greedy.n_kept, fit.greedy.rho[fit.greedy.n_kept - 1]
        axes.plot(*peak, "*", markersize=15, color=f"C{i}")
        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"N* = {fit.greedy.n_kept}", peak, fontsize=8, **place)
        artifact = fit.artifact
        if artifact.mask_rule != "greedy":
            label = f"{workload}: mask {artifact.mask_rule}"
            axes.plot(
                artifact.n_kept, artifact.rho[artifact.n_kept - 1], "x", color=f"C{i}", label=label
            )
    axes.margins(y=0.15)
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_pca(figure: Any, fits: Mapping[str, SignatureQuality]) -> None:
    """Draw signatures by domain and the centroids, a panel per workload (Fig. 9)."""
    panels = figure.subplots(1, len(fits), squeeze=False)[0]
    for axes, (workload, fit) in zip(panels, fits.items(), strict=True):
        plane, calibration = fit.projection, fit.calibration
        for i, domain in enumerate(np.unique(calibration.domain).tolist()):
            mine, name = plane.points[calibration.domain == domain], calibration.domains[domain]
            axes.plot(*mine.T, ".", color=_COLOURS[i % len(_COLOURS)], alpha=0.7, label=name)
        axes.plot(*plane.centroids.T, "kX", markersize=9, markeredgecolor="white", label="centroid")
        shares = [f"PC {i + 1} ({100 * share:.1f}%)" for i, share in enumerate(plane.explained)]
        axes.set(xlabel=shares[0], ylabel=shares[1])
        artifact = fit.artifact
        how = f"K = {artifact.n_decoders}, {artifact.transform}, {artifact.clustering}"
        axes.set_title(f"{workload}: {artifact.n_calibration} requests, {how}", fontsize=9)
