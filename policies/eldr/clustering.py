"""K-means on the unit sphere (ELDR Sec. 4.3.1): Hungarian-balanced (Malinen and Franti 2014), and
vanilla, with clusters of any size."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Bools, Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.policies.eldr.signature import METHODS, Method, unit_rows

RESTARTS = 8  #: independent seedings; the clustering of the smallest total distance is kept

#: Bound on the assign-and-update rounds of one restart; they stop as soon as nothing improves.
ROUNDS = 100

#: Dot products are rounded to its inverse, so that sums over a cluster are exact in any order.
_GRID = float(1 << 32)
_POINTS = float(1 << 21)  #: more than there are; a cost below 2^32 times as much is exact

Members = Bools
Points = NDArray[np.floating[Any]]


class Recent(NamedTuple):
    """The n points that are clustered."""

    rows: Ints  #: shape [n]: which of all
    similar: Floats  #: shape [n, K]: their dot products with the centroids
    summed: Ints  #: shape [n]: the cluster in whose sum each stands already; -1: in none


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

    Rounds of :func:`assign` and centroid update (the members' sum at unit length) go on until that
    no longer falls. Seeding is k-means++ by cosine distance, half the squared Euclidean one on the
    unit sphere; both methods draw the same seeds. Raises InputError if K is not in 1..n, all points
    are zero, or there is no such method.

    ``points``: [n, d], rows of `unit_rows`; zero rows move no centroid; ``method``: ``balanced``:
    at most ceil(n / K) points a cluster; ``vanilla``: every point is with its nearest centroid; a
    cluster without points keeps its own; ``restarts``: independent seedings; ``rounds``: most of
    each."""
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
        recent, sums = Recent(all_, similar, np.full(n, -1)), np.zeros((n_clusters, n))
        found: tuple[Members, Floats, float] = _lloyd(
            between, sums, recent, member, balanced, rounds
        )
        return found

    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as threads:
        runs = list(threads.map(run, seeds))
    member, _, _ = min(runs, key=lambda run: run[2])
    centroids = unit_rows(_sums(points, all_, member))
    return _ordered(Clustering(centroids, *assign(points, centroids, balanced)))


def refit(
    points: Points, between: Floats, sums: Floats, recent: Recent, fit: tuple[Points, Method, int]
) -> tuple[Floats, Floats]:
    """Move centroids to other points: rounds as in `kmeans`, from where they are.

    A new centroid takes the place of the one before that it is like, at the least total cosine
    distance. Returns the centroids, and the points' dot products with them but for rounding.
    ``points`` [N, d]: unit rows; ``between`` [N, N]: their dot products, `rounded`; ``sums`` [K,
    N]: those of each cluster's points, added up as ``recent`` says, then and on return; ``fit``:
    centroids [K, d], of which one without points stays; the method; most rounds."""
    centroids, method, rounds = fit
    rows, similar, summed = recent
    member = np.zeros(similar.shape, np.bool_)
    member, similar, _ = _lloyd(between, sums, recent, member, method == "balanced", rounds)
    moved = unit_rows(_sums(points, rows, member))
    alone = ~moved.any(axis=1)
    moved[alone] = centroids[alone]
    alike = moved @ centroids.T
    order = np.argsort(_assigned(alike, True)[0])
    if (order == np.arange(len(order))).all():  # as is most often
        return moved, similar
    sums[:], summed[:] = sums[order], np.append(np.argsort(order), -1)[summed]
    return moved[order], similar[:, order]


@njit()
def add_columns(between: Floats, sums: Floats, recent: Recent, begin: int, end: int) -> None:
    """Add up the products of the rows from ``begin`` to ``end``, which are new; see `refit`."""
    for i in range(begin, end):
        sums[:, i] = 0.0
        for j in range(len(recent.rows)):
            if recent.summed[j] >= 0:
                sums[recent.summed[j], i] += between[i, recent.rows[j]]


@njit()
def take_away(between: Floats, sums: Floats, recent: Recent, gone: int) -> None:
    """Take the first points of ``recent`` from the sums that they stand in; see `refit`."""
    for j in range(gone):
        if recent.summed[j] >= 0:
            _add(sums[recent.summed[j]], between[recent.rows[j]], -1.0)


def rounded(products: Floats) -> Floats:
    """Return dot products in whole numbers of 2^-32."""
    return np.rint(products * _GRID) / _GRID


# Exact, as all sums of products of unit rows: no BLAS, whose threads wait for each other.
@njit(fastmath={"reassoc", "contract"})
def multiply(points: Points, begin: int, end: int, between: Floats) -> None:
    """Write the `rounded` dot products of the unit rows ``begin`` to ``end`` with all before it.

    Four are multiplied with two at once. ``points``: shape [N, d]; ``between``: shape [N, N]."""
    four, eight = np.zeros((4, points.shape[1])), np.empty((2, 4))
    for first in range(begin, end, 4):
        last = min(first + 4, end)
        four[: last - first] = points[first:last]
        a, b, c, d = four
        for j in range(0, last, 2):
            two = points[j], points[min(j + 1, last - 1)]
            p, q, r, s, t, u, v, w = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for e in range(points.shape[1]):
                x, y = np.float64(two[0][e]), np.float64(two[1][e])
                p, q, r, s = p + x * a[e], q + x * b[e], r + x * c[e], s + x * d[e]
                t, u, v, w = t + y * a[e], u + y * b[e], v + y * c[e], w + y * d[e]
            eight[0], eight[1] = (p, q, r, s), (t, u, v, w)
            for k in range(j, min(j + 2, last)):
                for i in range(first, last):
                    product = np.rint(eight[k - j, i - first] * _GRID) / _GRID
                    between[i, k] = between[k, i] = product


def assign(points: Floats, centroids: Floats, balanced: bool) -> tuple[Ints, float]:
    """Return the centroid of each point, shape [n], and the total cosine distance.

    Each to its nearest, the first of them on a tie. ``balanced``: at most ceil(n / K) to each, the
    optimum of the Hungarian method, as a flow of least cost between the clusters: one point too
    many after the other leaves along the shortest path to a cluster with room."""
    labels, cost = _assigned(np.ascontiguousarray(points @ centroids.T), balanced)
    return labels, cost


@njit(nogil=True)
def _assigned(similar: Floats, balanced: bool) -> tuple[Ints, float]:
    """Return the centroid of each point, and their total distance.

    Cosine distances are in whole numbers of 1e-9: their sums and comparisons are exact."""
    n, k = similar.shape
    distance = np.empty((n, k))
    labels, size = np.empty(n, np.int64), np.zeros(k, np.int64)
    for p in range(n):
        nearest, label = np.inf, 0
        for c in range(k):
            distance[p, c] = np.rint((1.0 - similar[p, c]) * 1e9)
        for c in range(k):
            if distance[p, c] < nearest:
                nearest, label = distance[p, c], c
        labels[p] = label
        size[label] += 1
    capacity, too_many = -(-n // k), 0
    for c in range(k):
        too_many += max(size[c] - capacity, 0)
    if balanced and too_many:
        _relieve(distance, labels, size, capacity, too_many)
    cost = 0.0
    for p in range(n):
        cost += distance[p, labels[p]]
    return labels, cost / 1e9


@njit(inlined=True, restrict=True)
def _cheaper(distance: Floats, own: float, point: float, least: Floats) -> None:
    """Write what it costs to move a point to each cluster where that is the least so far."""
    for b in range(least.shape[0]):
        cost = (distance[b] - own) * _POINTS + point
        least[b] = cost if cost < least[b] else least[b]


@njit(inlined=True, restrict=True)
def _further(path: Floats, move: Floats, a: int, before: Floats) -> bool:
    """Lengthen a path to cluster ``a`` by a move to each other where that is shorter."""
    begin, improved = path[a], False
    for b in range(move.shape[0]):
        longer = begin + move[b]
        shorter = longer < path[b]
        path[b] = longer if shorter else path[b]
        before[b] = a if shorter else before[b]
        improved |= shorter
    return improved


@njit(nogil=True)
def _relieve(distance: Floats, labels: Ints, size: Ints, capacity: int, too_many: int) -> None:
    """Move points out of clusters beyond their capacity, at the least cost.

    Successive shortest paths (Ahuja, Magnanti and Orlin 1993, Network Flows, 9.7) keep the
    assignment the best one for its cluster sizes. ``move``: the cheapest move from a cluster to
    another, ``mover`` its point, the first of equals, both found as one whole number; ``changed``:
    which clusters have; ``before``: each cluster's predecessor on its path."""
    n, k = distance.shape
    move, mover, path = np.empty((k, k)), np.empty((k, k), np.int64), np.empty(k)
    changed, before, least = np.ones(k, np.bool_), np.empty(k), np.empty(k)
    members, place = np.empty((k, max(capacity, size.max()) + 1), np.int64), np.empty(n, np.int64)
    held = np.zeros(k, np.int64)
    for p in range(n):
        a = labels[p]
        members[a, held[a]], place[p] = p, held[a]
        held[a] += 1
    for _ in range(too_many):
        for a in range(k):
            if changed[a]:
                least[:] = np.inf
                for i in range(held[a]):
                    p = members[a, i]
                    _cheaper(distance[p], distance[p, a], float(p), least)
                least[a] = np.inf
                for b in range(k):
                    move[a, b] = np.floor(least[b] * (1.0 / _POINTS))
                    if least[b] < np.inf:
                        mover[a, b] = np.int64(least[b] - move[a, b] * _POINTS)
            path[a] = 0.0 if held[a] > capacity else np.inf
            before[a] = -1.0
            changed[a] = False
        shorter = True
        while shorter:  # Bellman and Ford
            shorter = False
            for a in range(k):
                if path[a] < np.inf:
                    shorter |= _further(path, move[a], a, before)
        end = np.int64(-1)
        for a in range(k):
            if held[a] < capacity and (end < 0 or path[a] < path[end]):
                end = np.int64(a)
        changed[end] = True
        while before[end] >= 0:
            start = np.int64(before[end])
            p = mover[start, end]
            held[start] -= 1
            last = members[start, held[start]]
            members[start, place[p]], place[last] = last, place[p]
            members[end, held[end]], place[p] = p, held[end]
            held[end] += 1
            labels[p], end = end, start
            changed[end] = True


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


@njit(inlined=True, restrict=True)
def _add(sums: Floats, row: Points, sign: float) -> None:
    for i in range(sums.shape[0]):
        sums[i] += sign * row[i]


@njit(inlined=True, restrict=True)
def _add_two(sums: Floats, one: Points, other: Points) -> None:
    for i in range(sums.shape[0]):
        sums[i] += np.float64(one[i]) + np.float64(other[i])


@njit(nogil=True)
def _lloyd(
    between: Floats, sums: Floats, recent: Recent, member: Members, balanced: bool, rounds: int
) -> tuple[Members, Floats, float]:
    """Return whose sum each centroid is, the points' dot products with them, both ``[n, K]``, and
    the total distance, from the products ``similar``; ``member`` is of centroids that no point
    joins.

    Products of sums are sums of ``between``, exact in any order: a round counts only who has
    moved."""
    rows, similar, summed = recent
    n, k = similar.shape
    labels, cost = _assigned(similar, balanced)
    for _ in range(rounds):
        for j in range(n):
            old, new = summed[j], labels[j]
            if old != new:
                _add(sums[new], between[rows[j]], 1.0)
                if old >= 0:
                    _add(sums[old], between[rows[j]], -1.0)
                summed[j] = new
        square = np.zeros(k)
        for i in range(n):
            square[labels[i]] += sums[labels[i], rows[i]]
        moved, moved_similar = member.copy(), similar.copy()
        for c in range(k):
            if square[c] > 0.0:  # else a cluster without any point, or only zeros: it stays
                length = np.sqrt(square[c])
                for i in range(n):
                    moved[i, c] = labels[i] == c
                    moved_similar[i, c] = sums[c, rows[i]] / length
        labels, new_cost = _assigned(moved_similar, balanced)
        if new_cost >= cost:
            break
        member, similar, cost = moved, moved_similar, new_cost
    return member, similar, cost


@njit(nogil=True)
def _sums(points: Points, rows: Ints, member: Members) -> Floats:
    """Return the sums of each cluster's points, ``[K, d]``."""
    n, k = member.shape
    sums = np.zeros((k, points.shape[1]))
    for cluster in range(k):
        one = -1
        for i in range(n):
            if member[i, cluster] and one < 0:
                one = rows[i]
            elif member[i, cluster]:
                _add_two(sums[cluster], points[one], points[rows[i]])
                one = -1
        if one >= 0:
            _add(sums[cluster], points[one], 1.0)
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
