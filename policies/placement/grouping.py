"""Groups of experts that tokens choose together: few copies of a token are sent then.

The affinity of two experts is how many tokens choose both, a whole number; eigenvectors are
rounded, so that no last bit decides. `spectral_groups`: clusters of the normalised graph Laplacian
(Ng, Jordan and Weiss, 2001); `bounded_groups`: sizes between bounds (GRACE-MoE's Algorithm 2);
`swap_experts`: pairs change places; `utilization`, `size_deviation`: U and S of GRACE-MoE's Eq. 1.
"""

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.policies.eldr.clustering import kmeans
from eldr_sim.policies.eldr.signature import unit_rows


def spectral_groups(affinity: Floats, n_groups: int, rng: np.random.Generator) -> Ints:
    """Cluster experts by affinity, [E, E] symmetric whole numbers with 0 on the diagonal, into
    ``n_groups`` of any size, also 0; return the group of each, [E]: neighbours where no two are
    chosen together."""
    n_experts = len(affinity)
    if not 1 <= n_groups <= n_experts:
        raise InputError("n_groups", f"{n_groups} groups of {n_experts} experts", "1 or more each")
    if n_groups == 1 or not affinity.any():
        return np.arange(n_experts) * n_groups // n_experts
    degree = affinity.sum(axis=1)
    scale = 1.0 / np.sqrt(np.where(degree > 0, degree, np.inf))
    _, vectors = np.linalg.eigh(scale[:, None] * affinity * scale)
    embedding = np.round(vectors[:, -n_groups:], 9)
    peak = embedding[np.abs(embedding).argmax(axis=0), np.arange(n_groups)]
    embedding *= np.where(peak < 0, -1.0, 1.0)
    points = unit_rows(np.where(degree[:, None] > 0, embedding, 0.0))
    return kmeans(points, n_groups, rng, method="vanilla").labels


def bounded_groups(affinity: Floats, groups: Ints, n_groups: int, low: int, high: int) -> Ints:
    """Bring the sizes of groups between two bounds (GRACE-MoE, Algorithm 2, lines 6 to 21).

    A group above ``high`` keeps the experts of most affinity to its own; the others join, the one
    of most affinity first, the group below ``high`` where that is largest. Then groups below
    ``low`` get experts of the least affinity to groups that can spare them. The printed score is
    the affinity inside the whole united group, which prefers large ones; here it is what the expert
    adds. Raises InputError where no sizes within the bounds add up to E."""
    n_experts = len(affinity)
    if not (0 <= low <= high and low * n_groups <= n_experts <= high * n_groups):
        problem = f"{n_groups} groups of {low} to {high} for {n_experts} experts"
        raise InputError("group sizes", problem, "bounds that the experts can keep")
    moved = groups.copy()
    sizes = np.bincount(moved, minlength=n_groups)
    within = _within(affinity, moved, n_groups)
    spare = []
    for d in np.flatnonzero(sizes > high):
        mine = np.flatnonzero(moved == d)
        order = mine[np.argsort(-within[mine, d], kind="stable")]
        spare += [(-float(within[e, d]), int(e)) for e in order[high:]]
    for _, expert in spare:
        within[:, moved[expert]] -= affinity[:, expert]
        sizes[moved[expert]] -= 1
    for _, expert in sorted(spare):
        to = int(np.argmax(np.where(sizes < high, within[expert], -np.inf)))
        moved[expert] = to
        sizes[to] += 1
        within[:, to] += affinity[:, expert]
    while (sizes < low).any():
        own = within[np.arange(n_experts), moved]
        expert = int(np.argmin(np.where(sizes[moved] > low, own, np.inf)))
        to = int(np.argmax(np.where(sizes < low, within[expert], -np.inf)))
        within[:, moved[expert]] -= affinity[:, expert]
        within[:, to] += affinity[:, expert]
        sizes[moved[expert]] -= 1
        sizes[to] += 1
        moved[expert] = to
    return moved


def swap_experts(affinity: Floats, groups: Ints, n_groups: int) -> Ints:
    """Let pairs of experts change places, the best first, while that raises what groups hold; sizes
    stay. ``affinity`` may be negative; its sum inside groups rises by a whole number each time, so
    this ends."""
    swapped = groups.copy()
    affinity = affinity - np.diag(affinity.diagonal())
    within = _within(affinity, swapped, n_groups)
    every = np.arange(len(swapped))
    while True:
        gain = within[:, swapped]  # of i in the group of j; less its own group below
        gain = gain - within[every, swapped][:, None]
        gain = gain + gain.T - 2.0 * affinity
        gain[swapped[:, None] == swapped] = 0.0
        i, j = divmod(int(np.argmax(gain)), len(swapped))
        if gain[i, j] <= 0:
            return swapped
        a, b = int(swapped[i]), int(swapped[j])
        moved = affinity[:, j] - affinity[:, i]
        within[:, a] += moved
        within[:, b] -= moved
        swapped[i], swapped[j] = b, a


def _within(affinity: Floats, groups: Ints, n_groups: int) -> Floats:
    """Return the affinity of each expert to each group, [E, D]."""
    # Not `matmul`, whose threads cost more than so small a product.
    return np.asarray(np.einsum("ij,jd->id", affinity, np.eye(n_groups)[groups]))


def utilization(affinity: Floats, groups: Ints) -> float:
    """Return the share of the affinity that lies inside groups: U of GRACE-MoE's Eq. 1."""
    total = float(affinity.sum())
    return float(affinity[groups[:, None] == groups].sum()) / total if total else 1.0


def size_deviation(groups: Ints, n_groups: int) -> float:
    """Return how far the sizes of groups lie from equal ones: S of GRACE-MoE's Eq. 1."""
    return float(np.bincount(groups, minlength=n_groups).std())
