"""Hungarian-balanced K-means on the unit sphere (ELDR Sec. 4.3.1; Malinen and Franti 2014)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from eldr_sim.errors import InputError
from eldr_sim.policies.signature import Floats, Ints, unit_rows

RESTARTS = 8
"""Independent seedings; the clustering of the smallest total distance is kept."""

MAX_ITERATIONS = 100
"""Bound on the assign-and-update rounds of one restart; they stop as soon as nothing improves."""


@dataclass(frozen=True, eq=False)
class Clustering:
    """Points assigned to clusters of bounded size.

    Attributes
    ----------
    centroids
        Shape [K, d]: unit centroids, ordered by the first point that each holds.
    labels
        Shape [n]: cluster of each point; no cluster holds more than ceil(n / K).
    cost
        Total cosine distance between the points and their centroids.
    """

    centroids: Floats
    labels: Ints
    cost: float


def balanced_kmeans(
    points: Floats, n_clusters: int, rng: np.random.Generator, restarts: int = RESTARTS
) -> Clustering:
    """Cluster unit vectors into groups of at most ceil(n / K), minimising total cosine distance.

    Rounds of optimal assignment (each centroid offers ceil(n / K) places, filled by the Hungarian
    method) and centroid update (the members' sum scaled to unit length) go on until the total
    distance no longer falls. Seeding is k-means++: a point is drawn with a probability in
    proportion to its cosine distance from the nearest seed, which on the unit sphere is half the
    squared Euclidean distance.

    Parameters
    ----------
    points
        Shape [n, d]: rows of :func:`~eldr_sim.policies.signature.unit_rows`. A row of zeros may
        fall to any cluster and moves no centroid.
    n_clusters
        K, from 1 to n.
    rng
        Draws the seeds.
    restarts
        Independent seedings, at least 1.

    Raises
    ------
    InputError
        If K is not in 1..n, or if all points are zero.
    """
    n = len(points)
    if not 1 <= n_clusters <= n:
        raise InputError("clusters", f"{n_clusters} clusters of {n} points", f"1 to {n}")
    if not points.any():
        raise InputError("signatures", "all are zero: no expert distinguishes the requests")
    runs = [_lloyd(points, _seeds(points, n_clusters, rng)) for _ in range(restarts)]
    best = min(runs, key=lambda run: run.cost)
    return _ordered(best)


def assign(points: Floats, centroids: Floats) -> tuple[Ints, float]:
    """Assign points to centroids at the least total cosine distance, at most ceil(n / K) to each.

    Returns
    -------
    labels, cost
        Shape [n]: the centroid of each point; and the total distance.
    """
    n, k = len(points), len(centroids)
    capacity = -(-n // k)
    # Whole numbers of 1e-9, so that the solver's sums and comparisons are exact.
    distance = np.rint((1.0 - points @ centroids.T) * 1e9)
    _, place = linear_sum_assignment(np.repeat(distance, capacity, axis=1))
    labels = place // capacity
    return labels, float(distance[np.arange(n), labels].sum()) / 1e9


def _seeds(points: Floats, k: int, rng: np.random.Generator) -> Floats:
    usable = points.any(axis=1)
    nearest = np.where(usable, 1.0, 0.0)
    chosen: list[int] = []
    for _ in range(k):
        weight = np.cumsum(nearest if nearest.any() else usable.astype(np.float64))
        draw = int(np.searchsorted(weight, rng.random() * weight[-1], side="right"))
        chosen.append(draw)
        distance = np.round(1.0 - points @ points[draw], 9)
        nearest = np.where(usable, np.clip(distance, 0.0, nearest), 0.0)
    return points[chosen]


def _lloyd(points: Floats, centroids: Floats) -> Clustering:
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
