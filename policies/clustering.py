"""K-means on the unit sphere (ELDR Sec. 4.3.1): Hungarian-balanced (Malinen and Franti 2014), and
vanilla, whose clusters may be of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.policies.signature import Floats, Ints, unit_rows

Method = Literal["balanced", "vanilla"]
"""How calibration requests are clustered."""

METHODS: tuple[Method, ...] = get_args(Method)
"""All methods, ELDR's own first."""

RESTARTS = 8
"""Independent seedings; the clustering of the smallest total distance is kept."""

MAX_ITERATIONS = 100
"""Bound on the assign-and-update rounds of one restart; they stop as soon as nothing improves."""


@dataclass(frozen=True, eq=False)
class Clustering:
    """Points assigned to clusters.

    Attributes
    ----------
    centroids
        Shape [K, d]: unit centroids, ordered by the first point that each holds (those that hold
        none last).
    labels
        Shape [n]: cluster of each point.
    cost
        Total cosine distance between the points and their centroids.
    """

    centroids: Floats
    labels: Ints
    cost: float


def kmeans(
    points: Floats,
    n_clusters: int,
    rng: np.random.Generator,
    method: Method = "balanced",
    restarts: int = RESTARTS,
) -> Clustering:
    """Cluster unit vectors, minimising their total cosine distance from their centroids.

    Rounds of assignment (:func:`assign_balanced` or :func:`assign_nearest`) and centroid update
    (the members' sum scaled to unit length) go on until the total distance no longer falls.
    Seeding is k-means++: a point is drawn with a probability in proportion to its cosine distance
    from the nearest seed, which on the unit sphere is half the squared Euclidean distance. Both
    methods draw the same seeds from the same ``rng``.

    Parameters
    ----------
    points
        Shape [n, d]: rows of :func:`~eldr_sim.policies.signature.unit_rows`. A row of zeros may
        fall to any cluster and moves no centroid.
    n_clusters
        K, from 1 to n.
    rng
        Draws the seeds.
    method
        ``balanced``: no cluster holds more than ceil(n / K) points. ``vanilla``: every point is
        with its nearest centroid; a cluster that loses all its points keeps its centroid.
    restarts
        Independent seedings, at least 1.

    Raises
    ------
    InputError
        If K is not in 1..n, if all points are zero, or if there is no such method.
    """
    n = len(points)
    if method not in METHODS:
        raise InputError("clustering", f"unknown method {method!r}", ", ".join(METHODS))
    if not 1 <= n_clusters <= n:
        raise InputError("clusters", f"{n_clusters} clusters of {n} points", f"1 to {n}")
    if not points.any():
        raise InputError("signatures", "all are zero: no expert distinguishes the requests")
    assign = assign_balanced if method == "balanced" else assign_nearest
    runs = [_lloyd(points, _seeds(points, n_clusters, rng), assign) for _ in range(restarts)]
    best = min(runs, key=lambda run: run.cost)
    return _ordered(best)


def assign_balanced(points: Floats, centroids: Floats) -> tuple[Ints, float]:
    """Assign points to centroids at the least total cosine distance, at most ceil(n / K) to each.

    Each centroid offers ceil(n / K) places, filled by the Hungarian method.

    Returns
    -------
    labels, cost
        Shape [n]: the centroid of each point; and the total distance.
    """
    from scipy.optimize import linear_sum_assignment  # takes long to import

    capacity = -(-len(points) // len(centroids))
    distance = _distance(points, centroids)
    _, place = linear_sum_assignment(np.repeat(distance, capacity, axis=1))
    return _priced(distance, np.asarray(place // capacity, dtype=np.int64))


def assign_nearest(points: Floats, centroids: Floats) -> tuple[Ints, float]:
    """Assign every point to its nearest centroid, the first of them on a tie.

    No assignment to the same centroids costs less. Returns what :func:`assign_balanced` does.
    """
    distance = _distance(points, centroids)
    return _priced(distance, np.argmin(distance, axis=1))


def _distance(points: Floats, centroids: Floats) -> Floats:
    """Cosine distances in whole numbers of 1e-9: their sums and comparisons are exact."""
    return np.rint((1.0 - points @ centroids.T) * 1e9)


def _priced(distance: Floats, labels: Ints) -> tuple[Ints, float]:
    return labels, float(distance[np.arange(len(labels)), labels].sum()) / 1e9


def _seeds(points: Floats, k: int, rng: np.random.Generator) -> Floats:
    usable = points.any(axis=1)
    nearest = np.where(usable, 2.0, 0.0)  # the distance of opposite vectors: none is larger
    chosen: list[int] = []
    for _ in range(k):
        weight = np.cumsum(nearest if nearest.any() else usable.astype(np.float64))
        draw = int(np.searchsorted(weight, rng.random() * weight[-1], side="right"))
        chosen.append(draw)
        distance = np.round(1.0 - points @ points[draw], 9)
        nearest = np.where(usable, np.clip(distance, 0.0, nearest), 0.0)
    return points[chosen]


def _lloyd(
    points: Floats, centroids: Floats, assign: Callable[[Floats, Floats], tuple[Ints, float]]
) -> Clustering:
    labels, cost = assign(points, centroids)
    for _ in range(MAX_ITERATIONS):
        moved = _centroids(points, labels, centroids)
        new_labels, new_cost = assign(points, moved)
        if new_cost >= cost:
            break
        centroids, labels, cost = moved, new_labels, new_cost
    return Clustering(centroids, labels, cost)


def _centroids(points: Floats, labels: Ints, previous: Floats) -> Floats:
    """Unit sums of the members; a cluster without any (or only zeros) stays where it was."""
    sums = np.stack([points[labels == cluster].sum(axis=0) for cluster in range(len(previous))])
    return np.where(sums.any(axis=1, keepdims=True), unit_rows(sums), previous)


def _ordered(run: Clustering) -> Clustering:
    """Number the clusters by their first point, so that equal partitions read the same."""
    n, k = len(run.labels), len(run.centroids)
    first = np.full(k, n)
    np.minimum.at(first, run.labels, np.arange(n))
    order = np.argsort(first, kind="stable")
    rank = np.empty(k, dtype=np.int64)
    rank[order] = np.arange(k)
    return Clustering(run.centroids[order], rank[run.labels], run.cost)
