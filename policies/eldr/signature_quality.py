"""How good are the signatures of a fit? Figures 7, 8 and 9 of ELDR, as numbers: rho of transforms
on all layers, rho by layers kept, and signatures and centroids on two principal components, of the
calibration requests and pairs of the fit. Where the trace has gate scores of a part of them, all
transforms are compared on that part."""

from dataclasses import dataclass

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.policies.eldr import signature
from eldr_sim.policies.eldr.artifact import RoutingArtifact, calibration_pairs
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
    #: Rho on all layers of the requests ``compared``, by transforms that the trace has scores of.
    rho_by_transform: dict[signature.Transform, float]
    #: The requests of ``rho_by_transform`` and the number of their pairs.
    compared: CalibrationSet
    compared_pairs: int
    #: Greedy selection of layers under the artifact's transform, whatever its mask rule.
    greedy: signature.LayerSelection
    projection: Projection  #: the artifact's signatures and centroids in a plane


def signature_quality(
    calibration: CalibrationSet, artifact: RoutingArtifact, compared: CalibrationSet | None = None
) -> SignatureQuality:
    """Measure the signatures of a fit of ``calibration``; ``compared``: other requests to compare
    the transforms on, with a separate IDF table."""
    compared = calibration if compared is None else compared
    pairs = calibration_pairs(calibration, artifact.seed)
    compared_pairs = calibration_pairs(compared, artifact.seed)
    if artifact.mask_rule == "greedy":
        greedy = signature.LayerSelection(
            artifact.layer_order, artifact.rho, artifact.n_kept, artifact.n_pairs
        )
    else:
        greedy = signature.select_layers(
            _features(calibration, artifact.idf, artifact.transform), pairs
        )
    scores = calibration.scores(signature.score_of(artifact.transform))
    return SignatureQuality(
        calibration=calibration,
        artifact=artifact,
        rho_by_transform=_rho_by_transform(compared, compared_pairs),
        compared=compared,
        compared_pairs=len(compared_pairs.i),
        greedy=greedy,
        projection=project(artifact.signatures(scores), artifact.centroids),
    )


def _features(calibration: CalibrationSet, idf: Floats, transform: signature.Transform) -> Floats:
    return signature.transformed(calibration.scores(signature.score_of(transform)), transform, idf)


def _rho_by_transform(
    calibration: CalibrationSet, pairs: signature.DecodeOverlap
) -> dict[signature.Transform, float]:
    idf = signature.idf_weights(calibration.scores("count"))
    rho: dict[signature.Transform, float] = {}
    for transform in signature.TRANSFORMS:
        try:
            features = _features(calibration, idf, transform)
        except InputError:  # the trace carries no such gate score
            continue
        rho[transform] = float(signature.select_layers(features, pairs, "all").rho[-1])
    return rho


def project(points: Floats, centroids: Floats) -> Projection:
    """Project unit vectors, [n, d], and centroids, [K, d], on two principal components, zero
    without variance, by the n x n dot products, exact for `unit_rows`.

    Largest coordinates are positive; rounded to 1e-6, for eigenvectors differ in the last bits
    between machines."""
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
