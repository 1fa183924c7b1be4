"""Gimbal's MILP (Eqs. 3 to 12) beside its heuristic (Algorithm 3): how far is it from the optimum?

The MILP has one assignment of experts for all layers. On two GPUs a pair of experts is cut where
one is on each, so Eq. 10's products become ``y >= x_j - x_k`` and ``y >= x_k - x_j``, and swapping
the GPUs is excluded by fixing one expert. HiGHS closes it where W holds the most frequent pairs
alone, as the paper's M does; its bound says how far off the best found may be."""

import numpy as np

from eldr_sim.arrays import Array, Floats, Ints
from eldr_sim.charts import bars
from eldr_sim.kinds import Row
from eldr_sim.planning.studies.figures import Claim, Reproduction
from eldr_sim.policies.placement.base import greedy_placement

_PAIRS = (0, 64, 128)  #: pairs of experts that W keeps
_GPUS = 2


def imbalance(load: Floats, on: Ints) -> float:
    """Return D (Eqs. 5 to 9): the farthest a GPU's load of a layer is from its even share, in
    points of the layer's load. ``load``: [layers, experts]; ``on``: [experts], 0 or 1."""
    share = 100.0 * load / load.sum(axis=1, keepdims=True)
    return float(np.abs(share @ (np.asarray(on) == 1) - 50.0).max())


def cut(weights: Floats, on: Ints) -> float:
    """Return the weight between GPUs (Eq. 11), % of all."""
    apart = np.asarray(on)[:, None] != np.asarray(on)[None, :]
    return float(100.0 * weights[apart].sum() / max(weights.sum(), 1e-30))


def dependencies(transitions: Array, pairs: int) -> Floats:
    """Return W, symmetric [experts, experts]: tokens that choose one expert and then the other in
    the next layer, summed over the layers, of the most frequent ``pairs``."""
    total = np.asarray(transitions, np.float64).sum(axis=0)
    both = np.triu(total + total.T, 1)
    kept = np.argsort(-both.ravel(), kind="stable")[:pairs]
    found = np.zeros(both.size)
    found[kept] = both.ravel()[kept]
    half = found.reshape(both.shape)
    return np.asarray(half + half.T)


def heuristic(load: Floats, weights: Floats) -> Ints:
    """Return Algorithm 3 with one assignment for all layers: linked experts on GPU 0, the most
    strongly linked first, the others by load."""
    linked = weights.max(axis=1)
    order = np.argsort(-linked, kind="stable")[: len(linked) // _GPUS]
    placed = np.full((1, len(linked)), -1)
    placed[0, order[linked[order] > 0]] = 0
    share = (load / load.sum(axis=1, keepdims=True)).sum(axis=0)
    return np.asarray(greedy_placement(share[None], _GPUS, placed)[0])


def optimum(load: Floats, weights: Floats, beta: float, seconds: float) -> tuple[Ints, float]:
    """Solve the MILP on two GPUs: minimise ``D + beta * cut``, both in points.

    Args:
        load: [layers, experts].
        weights: W, [experts, experts].
        beta: weight of the cut.
        seconds: that the solver may take.

    Returns:
        The GPU of each expert, and the solver's lower bound of the objective."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack, vstack

    n_layers, n = load.shape
    j, k = np.nonzero(np.triu(weights, 1))
    edges, own = len(j), 2.0 * weights[j, k] / max(weights.sum(), 1e-30)
    cost = np.concatenate([np.zeros(n), [1.0], 100.0 * beta * own])
    share = 100.0 * load / load.sum(axis=1, keepdims=True)
    ones, rows = np.ones((n_layers, 1)), np.arange(edges)
    none = csr_array((n_layers, edges))
    differ = csr_array((np.r_[np.ones(edges), -np.ones(edges)], (np.r_[rows, rows], np.r_[j, k])),
                       shape=(edges, n))  # fmt: skip
    column = csr_array((edges, 1))
    identity = csr_array((np.ones(edges), (rows, rows)), shape=(edges, edges))
    below = hstack([csr_array(share), csr_array(-ones), none])
    above = hstack([csr_array(-share), csr_array(-ones), none])
    constraints = [
        LinearConstraint(vstack([below, above]), -np.inf, np.r_[np.full(n_layers, 50.0),
                                                                np.full(n_layers, -50.0)]),
        LinearConstraint(np.concatenate([np.ones(n), np.zeros(1 + edges)]), n // 2, n // 2),
    ]  # fmt: skip
    if edges:
        constraints += [
            LinearConstraint(hstack([sign * differ, column, -identity]), -np.inf, 0.0)
            for sign in (1.0, -1.0)
        ]
    upper = np.concatenate([np.ones(n), [np.inf], np.ones(edges)])
    upper[int(np.argmax(load.sum(axis=0)))] = 0.0  # the GPUs are alike
    whole = np.concatenate([np.ones(n), np.zeros(1 + edges)])
    found = milp(cost, integrality=whole, bounds=Bounds(0.0, upper), constraints=constraints,
                 options={"time_limit": seconds})  # fmt: skip
    assert found.x is not None
    return np.rint(found.x[:n]).astype(np.int64), float(found.mip_dual_bound)


def gap(load: Floats, transitions: Array, seconds: float) -> Reproduction:
    """Hold Algorithm 3 against the MILP by pairs of M: imbalance, cut, objective."""
    rows: list[Row] = []
    beta = 0.1
    for pairs in _PAIRS:
        weights = dependencies(transitions, pairs)
        best, bound = optimum(load, weights, beta, seconds)
        for name, on in (("linear", np.arange(load.shape[1]) * _GPUS // load.shape[1]),
                         ("Algorithm 3", heuristic(load, weights)), ("MILP", best)):  # fmt: skip
            of = imbalance(load, on), cut(weights, on) if pairs else 0.0
            rows.append(
                {"pairs": pairs, "placement": name, "imbalance": of[0], "cut_%": of[1]}
                | {"objective": of[0] + beta * of[1], "bound": bound}
            )
    claims = []
    for pairs in _PAIRS:
        own = {row["placement"]: row for row in rows if row["pairs"] == pairs}
        near, far = own["MILP"], own["Algorithm 3"]
        claims.append(
            Claim(f"Algorithm 3's imbalance above the MILP's, {pairs} pairs",
                  0.0, 2.0, far["imbalance"] - near["imbalance"], "points", 0.0, stated=False,
                  neutral=None, reason=f"{far['imbalance']:.1f}, {near['imbalance']:.1f} points; "
                  f"cut {far['cut_%']:.0f} and {near['cut_%']:.0f}%; the optimum is at least "
                  f"{near['bound']:.1f} of the MILP's {near['objective']:.1f}")
        )  # fmt: skip
    draw = bars(rows, "pairs", ("imbalance", "cut_%"), "placement")
    return Reproduction("milp", "Algorithm 3 beside the MILP, 128 experts on 2 GPUs", rows, claims,
                        draw)  # fmt: skip
