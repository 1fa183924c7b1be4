"""K-means on the unit sphere (ELDR Sec. 4.3.1): Hungarian-balanced (Malinen and Franti 2014), and
vanilla, whose clusters may be of any size."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.policies.eldr.signature import METHODS, Floats, Ints, Method, unit_rows

RESTARTS = 8  #: independent seedings; the clustering of the smallest total distance is kept

#: Bound on the assign-and-update rounds of one restart; they stop as soon as nothing improves.
ROUNDS = 100

#: Dot products are rounded to its inverse, so that sums over a cluster are exact in any order.
_GRID = float(1 << 32)

Members = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Clustering:
    """Points assigned to clusters."""

    #: Shape [K, d]: unit centroids, ordered by the first point that each holds (those that hold
    #: none last).
    centroids: Floats
    labels: Ints  #: shape [n]: cluster of each point
    cost: float  #: total cosine distance between the points and their centroids


def kmeans(
    points: Floats,
    n_clusters: int,
    rng: np.random.Generator,
    method: Method = "balanced",
    restarts: int = RESTARTS,
    rounds: int = ROUNDS,
) -> Clustering:
    """Cluster unit vectors, minimising their total cosine distance from their centroids.

    Rounds of assignment (:func:`assign`) and centroid update (the members' sum scaled to unit
    length) go on until the total distance no longer falls. Seeding is k-means++: a point is drawn
    with a probability in proportion to its cosine distance from the nearest seed, on the unit
    sphere half the squared Euclidean distance. Both methods draw the same seeds from the same
    ``rng``.

    Raises InputError if K is not in 1..n, if all points are zero, or if there is no such method.

    ``points``: shape [n, d]: rows of `unit_rows`; one of zeros may fall to any cluster and moves no
    centroid; ``method``: ``balanced``: no cluster holds more than ceil(n / K) points; ``vanilla``:
    every point is with its nearest centroid; a cluster that loses all its points keeps its
    centroid; ``restarts``: independent seedings; ``rounds``: most of each.
    """
    n = len(points)
    if method not in METHODS:
        raise InputError("clustering", f"unknown method {method!r}", ", ".join(METHODS))
    if not 1 <= n_clusters <= n:
        raise InputError("clusters", f"{n_clusters} clusters of {n} points", f"1 to {n}")
    if not points.any():
        raise InputError("signatures", "all are zero: no expert distinguishes the requests")
    between = points @ points.T
    seeds = [_seeds(between, n_clusters, rng) for _ in range(restarts)]
    between, balanced, all_ = rounded(between), method == "balanced", np.arange(n)

    def run(chosen: list[int]) -> tuple[Members, Floats, float]:
        member = np.zeros((n, n_clusters), np.bool_)
        member[chosen, np.arange(n_clusters)] = True
        similar = np.ascontiguousarray(between[:, chosen])
        found: tuple[Members, Floats, float] = _lloyd(
            between, all_, member, similar, balanced, rounds
        )
        return found

    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as threads:
        runs = list(threads.map(run, seeds))
    member, _, _ = min(runs, key=lambda run: run[2])
    centroids = unit_rows(_sums(points, all_, member))
    return _ordered(Clustering(centroids, *assign(points, centroids, balanced)))


def refit(
    points: Floats,
    rows: Ints,
    between: Floats,
    similar: Floats,
    centroids: Floats,
    method: Method,
    rounds: int,
) -> tuple[Floats, Floats]:
    """Move centroids to other points: rounds as in `kmeans`, from where they are.

    A new centroid takes the place of the one before that it is like: all of them at the least total
    cosine distance. Returns the centroids moved, and the dot products of the same points with them
    but for rounding.

    ``points``, ``rows``: shapes [N, d] and [n]: unit rows, and those of them that are clustered;
    ``between``: shape [N, N]: dot products of all rows, `rounded`; ``similar``: shape [n, K]: of
    those that are clustered with the centroids; ``centroids``: shape [K, d]; one without points
    stays.
    """
    member = np.zeros(similar.shape, np.bool_)
    balanced = method == "balanced"
    member, similar, _ = _lloyd(between, rows, member, similar, balanced, rounds)
    moved = unit_rows(_sums(points, rows, member))
    alone = ~moved.any(axis=1)
    moved[alone] = centroids[alone]
    alike = np.einsum("kd,jd->kj", moved, centroids)
    order = np.argsort(_assigned(alike, True)[0])
    return moved[order], similar[:, order]


def rounded(products: Floats) -> Floats:
    """Return dot products in whole numbers of 2^-32."""
    return np.rint(products * _GRID) / _GRID


def assign(points: Floats, centroids: Floats, balanced: bool) -> tuple[Ints, float]:
    """Assign points to centroids: the centroid of each, shape [n], and the total cosine distance.

    Each to its nearest, the first of them on a tie: no assignment costs less. ``balanced``: at most
    ceil(n / K) to each, the optimum that the Hungarian method finds with so many places a centroid,
    as a flow of least cost between the clusters: every point starts at its nearest centroid, and
    one point too many after the other leaves along the shortest path to a cluster with room.
    """
    labels, cost = _assigned(np.ascontiguousarray(points @ centroids.T), balanced)
    return labels, cost


@njit(nogil=True)
def _assigned(similar: Floats, balanced: bool) -> tuple[Ints, float]:
    """Return the centroid of each point, and their total distance.

    Cosine distances are in whole numbers of 1e-9: their sums and comparisons are exact.
    """
    n, k = similar.shape
    distance = np.rint((1.0 - similar) * 1e9)
    labels, size = np.empty(n, np.int64), np.zeros(k, np.int64)
    for p in range(n):
        labels[p] = np.argmin(distance[p])
        size[labels[p]] += 1
    capacity, too_many = -(-n // k), 0
    for c in range(k):
        too_many += max(size[c] - capacity, 0)
    if balanced and too_many:
        _relieve(distance, labels, size, capacity, too_many)
    cost = 0.0
    for p in range(n):
        cost += distance[p, labels[p]]
    return labels, cost / 1e9


@njit(nogil=True)
def _relieve(distance: Floats, labels: Ints, size: Ints, capacity: int, too_many: int) -> None:
    """Move points out of clusters beyond their capacity, at the least cost.

    Successive shortest paths (Ahuja, Magnanti and Orlin 1993, Network Flows, 9.7), which keep the
    assignment the best one for its cluster sizes: no circle of moves saves anything. ``move`` is
    what the cheapest move from a cluster to another costs, ``mover`` the point that makes it,
    ``changed`` which clusters have changed, ``before`` each cluster's predecessor on its path.
    """
    n, k = distance.shape
    move, mover, path = np.empty((k, k)), np.empty((k, k), np.int64), np.empty(k)
    changed, before = np.ones(k, np.int64), np.empty(k, np.int64)
    for _ in range(too_many):
        for a in range(k):
            for b in range(k):
                if changed[a]:
                    move[a, b] = np.inf
        for p in range(n):
            a = labels[p]
            if changed[a]:
                for b in range(k):
                    cost = distance[p, b] - distance[p, a]
                    if cost < move[a, b] and a != b:
                        move[a, b], mover[a, b] = cost, p
        for a in range(k):
            path[a] = 0.0 if size[a] > capacity else np.inf
            before[a] = -1
            changed[a] = 0
        shorter = True
        while shorter:  # Bellman and Ford
            shorter = False
            for a in range(k):
                for b in range(k):
                    if path[a] + move[a, b] < path[b]:
                        path[b], before[b] = path[a] + move[a, b], a
                        shorter = True
        end = -1
        for a in range(k):
            if size[a] < capacity and (end < 0 or path[a] < path[end]):
                end = a
        size[end] += 1
        changed[end] = 1
        while before[end] >= 0:
            labels[mover[before[end], end]] = end
            end = before[end]
            changed[end] = 1
        size[end] -= 1


def _seeds(between: Floats, k: int, rng: np.random.Generator) -> list[int]:
    """Draw k points, whose dot products are ``between [n, n]``."""
    usable = between.diagonal() > 0
    nearest = np.where(usable, 2.0, 0.0)  # the distance of opposite vectors: none is larger
    chosen: list[int] = []
    for _ in range(k):
        weight = np.cumsum(nearest if nearest.any() else usable.astype(np.float64))
        draw = int(np.searchsorted(weight, rng.random() * weight[-1], side="right"))
        chosen.append(draw)
        distance = np.round(1.0 - between[draw], 9)
        nearest = np.where(usable, np.clip(distance, 0.0, nearest), 0.0)
    return chosen


@njit(nogil=True)
def _lloyd(
    between: Floats, rows: Ints, member: Members, similar: Floats, balanced: bool, rounds: int
) -> tuple[Members, Floats, float]:
    """Return whose sum each centroid is, ``[n, K]``.

    And the points' dot products with them, ``[n, K]``, and the total distance from them. Begins
    with the centroids that have the products ``similar``; ``member`` is returned for those that no
    point ever joins. Sums of points are never made: their dot products are sums of ``between``,
    exact in any order, so that a round counts only who has moved.
    """
    n, k = similar.shape
    labels, cost = _assigned(similar, balanced)
    summed, sums = np.full(n, -1), np.zeros((k, n))
    for _ in range(rounds):
        for j in range(n):
            old, new = summed[j], labels[j]
            if old != new:
                for i in range(n):
                    sums[new, i] += between[rows[j], rows[i]]
                if old >= 0:
                    for i in range(n):
                        sums[old, i] -= between[rows[j], rows[i]]
        summed, square = labels, np.zeros(k)
        for i in range(n):
            square[labels[i]] += sums[labels[i], i]
        moved, moved_similar = member.copy(), similar.copy()
        for i in range(n):
            for c in range(k):
                if square[c] > 0.0:  # else a cluster without any point, or only zeros: it stays
                    moved[i, c] = labels[i] == c
                    moved_similar[i, c] = sums[c, i] / np.sqrt(square[c])
        labels, new_cost = _assigned(moved_similar, balanced)
        if new_cost >= cost:
            break
        member, similar, cost = moved, moved_similar, new_cost
    return member, similar, cost


@njit(nogil=True)
def _sums(points: Floats, rows: Ints, member: Members) -> Floats:
    """Return the sums of each cluster's points, ``[K, d]``."""
    n, k = member.shape
    sums = np.zeros((k, points.shape[1]))
    for i in range(n):
        for cluster in range(k):
            if member[i, cluster]:
                for d in range(points.shape[1]):
                    sums[cluster, d] += points[rows[i], d]
    return sums


def _ordered(run: Clustering) -> Clustering:
    """Number the clusters by their first point, so that equal partitions read the same."""
    n, k = len(run.labels), len(run.centroids)
    first = np.full(k, n)
    np.minimum.at(first, run.labels, np.arange(n))
    order = np.argsort(first, kind="stable")
    rank = np.empty(k, dtype=np.int64)
    rank[order] = np.arange(k)
    return Clustering(run.centroids[order], rank[run.labels], run.cost)
