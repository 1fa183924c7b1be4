"""The grid of a MoE layer, and routing that is forced onto its points.

A point is (batch, distinct experts, skew). Every token picks ``top_k`` different experts, so
``top_k <= distinct <= min(E, top_k * batch)``; any such count can be forced, and so can how evenly
the tokens spread over the experts that are chosen. Under expert parallelism a point counts the
experts and the token-expert pairs of one rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError

#: Value of the column ``routing`` where the tokens spread evenly over the chosen experts.
FORCED = "forced"

SKEWS = (0.6, 1.2)  #: Zipf exponents of the tokens per expert on the third axis; 0 is even

_BATCHES = (
    (1, 4, 16, 64, 256),
    (2, 8, 32, 128, 512, 1024, 2048),
    (3, 6, 12, 24, 48, 96, 192, 384, 768, 1536),
)
_COARSE = (0.25, 0.5, 1.0)
_FINE = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)


@dataclass(frozen=True, order=True)
class MoEPoint:
    """One point of the grid: tokens, distinct experts, and the Zipf exponent of their load."""

    batch: int
    distinct: int
    skew: float = 0.0

    @property
    def routing(self) -> str:
        """Name in the column ``routing`` of a latency table."""
        return FORCED if self.skew == 0 else f"{FORCED}_zipf_{self.skew:g}"


def distinct_range(batch: int, n_experts: int, top_k: int, n_ranks: int = 1) -> tuple[int, int]:
    """Fewest and most distinct experts (of one rank) that a batch can touch; 1 at the fewest."""
    fewest = top_k if n_ranks == 1 else 1
    return fewest, min(n_experts // n_ranks, top_k * batch)


def moe_levels(
    n_experts: int, top_k: int, n_ranks: int = 1, prefill_tokens: Sequence[int] = ()
) -> list[list[MoEPoint]]:
    """Points of the grid, coarse to fine: each level refines those before it, and no point comes
    twice.

    Batches 1, 4, .. 256 with a quarter, a half and all of the experts; 1, 2, 4 .. 2,048 with ten
    counts; these with skewed loads; the batches between. ``n_ranks``: GPUs that the experts are
    spread over; ``prefill_tokens``: batches beyond 2,048, with all experts."""
    owned = n_experts // n_ranks

    def row(batch: int, shares: Iterable[float], skew: float = 0.0) -> list[MoEPoint]:
        low, high = distinct_range(batch, n_experts, top_k, n_ranks)
        counts = {low, high} | {min(max(round(owned * share), low), high) for share in shares}
        return [MoEPoint(batch, count, skew) for count in sorted(counts)]

    powers = sorted(_BATCHES[0] + _BATCHES[1])
    levels = [
        [p for b in _BATCHES[0] for p in row(b, _COARSE)],
        [p for b in powers for p in row(b, _FINE)],
        [
            point
            for b in powers
            for skew in SKEWS
            for point in row(b, _COARSE, skew)
            if point.distinct < b * top_k / n_ranks  # else every expert has one token
        ],
        [p for b in _BATCHES[2] for p in row(b, _FINE)],
    ]
    levels[0] += [MoEPoint(tokens, owned) for tokens in prefill_tokens[::2]]
    levels[1] += [MoEPoint(tokens, owned) for tokens in prefill_tokens[1::2]]
    seen: set[MoEPoint] = set()
    unique = []
    for level in levels:
        unique.append([p for p in dict.fromkeys(level) if p not in seen])
        seen.update(level)
    return unique


def held_out(points: Sequence[MoEPoint]) -> set[MoEPoint]:
    """A fifth of the evenly loaded points, none the end of its row, so that errors are of
    interpolation; chosen by the points alone."""
    even = sorted({point for point in points if point.skew == 0})
    ends = set()
    for batch in {point.batch for point in even}:
        row = [point for point in even if point.batch == batch]
        ends |= {row[0], row[-1]}
    inner = [point for point in even if point not in ends]
    order = np.random.default_rng(len(even)).permutation(len(inner))
    return {inner[i] for i in order[: min(len(even) // 5, len(inner) // 2)]}


def expert_loads(pairs: int, distinct: int, batch: int, skew: float = 0.0) -> NDArray[np.int64]:
    """Tokens of each of ``distinct`` experts, int64 [distinct], non-increasing: sum ``pairs``, each
    from 1 to ``batch``, proportional to ``rank ** -skew`` as far as these bounds allow. Raises
    InputError: no such loads exist."""
    if not distinct <= pairs <= distinct * batch:
        problem = f"{pairs} token-expert pairs over {distinct} experts at batch {batch}"
        raise InputError("distinct_experts", problem, f"{distinct} to {distinct * batch} pairs")
    weights = np.arange(1, distinct + 1, dtype=np.float64) ** -skew
    low, high = 0.0, float(pairs) / weights[-1] + 1
    for _ in range(200):  # the scale at which clipped loads sum up to the pairs
        middle = (low + high) / 2
        if np.clip(middle * weights, 1, batch).sum() < pairs:
            low = middle
        else:
            high = middle
    ideal = np.clip(high * weights, 1, batch)
    loads = np.floor(ideal + 1e-9).astype(np.int64)
    rest = pairs - int(loads.sum())
    order = np.argsort(loads - ideal, kind="stable")  # largest fractions first
    for expert in [*order, *order]:
        if rest > 0 and loads[expert] < batch:
            loads[expert] += 1
            rest -= 1
    return np.sort(loads)[::-1]


def forced_routing(
    point: MoEPoint,
    n_experts: int,
    top_k: int,
    rng: np.random.Generator,
    *,
    n_ranks: int = 1,
    experts: NDArray[np.int64] | None = None,
) -> NDArray[np.int32]:
    """Draw expert ids, int32 [batch, top_k], with exactly ``point.distinct`` distinct experts (of
    rank 0). Raises InputError: the count cannot be reached at this batch.

    Expert after expert takes the next tokens of a cycle as often as its load says, so that no token
    meets one twice; then tokens and picks are shuffled. ``n_ranks``: rank 0 gets its share of the
    pairs, ``batch * top_k / n_ranks``, or as near as the count allows, and the other picks go to
    other ranks' experts; ``experts``: ids of the distinct experts, else drawn."""
    batch, distinct = point.batch, point.distinct
    low, high = distinct_range(batch, n_experts, top_k, n_ranks)
    if not low <= distinct <= high:
        raise InputError("distinct_experts", f"{distinct} at batch {batch}", f"{low} to {high}")
    owned = n_experts // n_ranks
    share = round(batch * top_k / n_ranks)
    pairs = int(np.clip(share, distinct, min(batch * distinct, batch * top_k)))
    chosen = rng.permutation(owned)[:distinct] if experts is None else experts[:distinct]
    loads = expert_loads(pairs, distinct, batch, point.skew)
    ids = np.full((batch, top_k), -1, np.int32)
    token = np.arange(pairs) % batch
    ids[token, np.arange(pairs) // batch] = np.repeat(rng.permutation(chosen), loads)
    if n_ranks > 1:
        for row in ids:
            missing = int((row < 0).sum())
            row[row < 0] = owned + rng.permutation(n_experts - owned)[:missing]
    ids = ids[rng.permutation(batch)]
    return np.asarray(rng.permuted(ids, axis=1), dtype=np.int32)


def forced_logits(
    ids: NDArray[np.int32], n_experts: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Gate logits, float32 [batch, n_experts], 4 to 8 at the given ids, -8 to 0 elsewhere."""
    logits = rng.uniform(-8.0, 0.0, (len(ids), n_experts)).astype(np.float32)
    chosen = rng.uniform(4.0, 8.0, ids.shape).astype(np.float32)
    np.put_along_axis(logits, ids.astype(np.int64), chosen, axis=1)
    return logits
