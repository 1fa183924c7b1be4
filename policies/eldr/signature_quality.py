"""How good are the signatures of a fit? Figures 7, 8 and 9 of ELDR, as numbers.

rho of every transform on all layers, rho by layers kept, and signatures and centroids on two
principal components, of the calibration requests and pairs that the fit used. Only where the trace
has the gate scores of a part of them, the transforms are compared on that part, so that all bars of
Fig. 7 are of the same requests.
"""

from dataclasses import dataclass

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.policies.eldr.artifact import RoutingArtifact, calibration_pairs
from eldr_sim.policies.eldr.signature import (
    TRANSFORMS,
    DecodeOverlap,
    Floats,
    LayerSelection,
    Transform,
    idf_weights,
    score_of,
    select_layers,
    transformed,
)
from eldr_sim.traces.routing.calibration import CalibrationSet


@dataclass(frozen=True, eq=False)
class Projection:
    """Signatures and centroids on the two directions along which the signatures vary most."""

    points: Floats  #: shape [n, 2]: principal components of the signatures, about their mean
    centroids: Floats  #: shape [K, 2]: the centroids in the same plane
    explained: Floats  #: shape [2]: share of the signatures' variance along each direction


@dataclass(frozen=True, eq=False)
class SignatureQuality:
    """What the module computes for one fit."""

    #: ``calibration``, ``artifact``: the fit and what it was made from.
    calibration: CalibrationSet
    artifact: RoutingArtifact
    #: Rho on all layers of the requests ``compared``, for each transform that the trace has the
    #: scores of.
    rho_by_transform: dict[Transform, float]
    #: ``compared``, ``compared_pairs``: the requests of ``rho_by_transform`` and the number of
    #: their pairs.
    compared: CalibrationSet
    compared_pairs: int
    #: Greedy selection of layers under the artifact's transform, whatever its mask rule.
    greedy: LayerSelection
    projection: Projection  #: the artifact's signatures and centroids in a plane


def signature_quality(
    calibration: CalibrationSet, artifact: RoutingArtifact, compared: CalibrationSet | None = None
) -> SignatureQuality:
    """Measure the signatures of a fit.

    ``calibration``: what the fit used; ``compared``: requests to compare the transforms on, with an
    IDF table of their own; those of the fit where None.
    """
    compared = calibration if compared is None else compared
    pairs = calibration_pairs(calibration, artifact.seed)
    compared_pairs = calibration_pairs(compared, artifact.seed)
    if artifact.mask_rule == "greedy":
        greedy = LayerSelection(
            artifact.layer_order, artifact.rho, artifact.n_kept, artifact.n_pairs
        )
    else:
        greedy = select_layers(_features(calibration, artifact.idf, artifact.transform), pairs)
    scores = calibration.scores(score_of(artifact.transform))
    return SignatureQuality(
        calibration=calibration,
        artifact=artifact,
        rho_by_transform=_rho_by_transform(compared, compared_pairs),
        compared=compared,
        compared_pairs=len(compared_pairs.i),
        greedy=greedy,
        projection=project(artifact.signatures(scores), artifact.centroids),
    )


def _features(calibration: CalibrationSet, idf: Floats, transform: Transform) -> Floats:
    return transformed(calibration.scores(score_of(transform)), transform, idf)


def _rho_by_transform(calibration: CalibrationSet, pairs: DecodeOverlap) -> dict[Transform, float]:
    idf = idf_weights(calibration.scores("count"))
    rho: dict[Transform, float] = {}
    for transform in TRANSFORMS:
        try:
            features = _features(calibration, idf, transform)
        except InputError:  # the trace carries no such gate score
            continue
        rho[transform] = float(select_layers(features, pairs, "all").rho[-1])
    return rho


def project(points: Floats, centroids: Floats) -> Projection:
    """Project unit vectors, [n, d], and centroids, [K, d], on two principal components.

    The directions come from the n x n matrix of dot products, which is exact for rows of
    `unit_rows`. A component's sign is such that its largest coordinate is positive; coordinates are
    rounded to 1e-6, for eigenvectors differ in the last bits between machines. Without variance
    they are zero.
    """
    products = points @ points.T
    from_mean = products.mean(axis=1)
    mean_square = from_mean.mean()
    centred = products - from_mean[:, None] - from_mean + mean_square
    values, vectors = np.linalg.eigh(centred)
    values, vectors = np.maximum(values[:-3:-1], 0.0), vectors[:, :-3:-1]
    total = float(np.trace(centred))
    # Dividing by a vanishing variance would blow rounding noise up to coordinates.
    scale = np.sqrt(np.where(values > 1e-9 * max(total, 1e-9), values, np.inf))
    to_centroids = centroids @ points.T
    about = to_centroids - to_centroids.mean(axis=1, keepdims=True) - from_mean + mean_square
    mine = centred @ vectors / scale
    largest = mine[np.argmax(np.round(np.abs(mine), 6), axis=0), [0, 1]]
    sign = np.where(largest < 0, -1.0, 1.0)
    return Projection(
        points=np.round(mine * sign, 6) + 0.0,
        centroids=np.round(about @ vectors / scale * sign, 6) + 0.0,
        explained=np.round(values / total, 6) if total > 1e-9 else np.zeros(2),
    )
