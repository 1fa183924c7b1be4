"""What counters of experts say of a deployment: is it skewed, does that last, what would help?

No token is known, only how often each expert was chosen. Steps are drawn from that: each token of a
step chooses an expert with its share of the load, independently. Tokens of a real step choose
alike, so real steps activate fewer experts than drawn ones. Each step is placed and priced as the
simulator's are: EPLB's placement (`policies.placement.eplb`), the choice among copies
(`policies.replicas`), a rank's MoE layer by its token-expert pairs and activated experts
(`StepTimeModel.rank_moe`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.placement.eplb import balance
from eldr_sim.policies.replicas.base import ChoiceByCount
from eldr_sim.policies.replicas.metro import MetroParameters
from eldr_sim.traces.routing.counters import Counters

_DRAWN = 8  #: steps drawn of each layer
_LAYERS = 16  #: layers of which steps are drawn; the others are taken as these are
CHOICES = ("even", "metro")


@dataclass(frozen=True)
class Option:
    """A placement and a choice among copies, with what a step takes."""

    name: str
    redundant: int  #: instances of experts beyond one of each
    busiest: float  #: greatest load of a rank over the mean, mean of the layers
    busiest_experts: float  #: activated experts of the rank that has most in a step, mean
    moe_ms: float  #: MoE layers of a step
    step_ms: float  #: the step, without dispatch and combine


@dataclass(frozen=True)
class Balance:
    """How even the load of the ranks is, and how long it stays so."""

    windows: int
    #: [layers]: greatest load of a rank over the mean, experts in order; one entry where only the
    #: balance was logged.
    skew: Floats
    #: Share of EPLB's gain that the placement for one window has in the next; None: one window, or
    #: no counts of experts, or nothing to gain.
    kept: float | None
    correlation: float | None  #: of the experts' loads between windows that follow each other
    halves: tuple[float, float]  #: the mean skew in the first and the second half of the windows
    options: tuple[Option, ...]  #: the present placement first; empty without counts of experts


def rank_skew(load: Floats, placement: Placement) -> Floats:
    """Return the greatest load of a rank over the mean by layer, copies sharing equally. ``load``:
    [layers, experts]."""
    layers = np.arange(len(load))[:, None]
    instances = placement.instances(load.shape[1])
    each = np.where(placement.expert >= 0, (load / np.maximum(instances, 1))[
        layers, np.maximum(placement.expert, 0)], 0.0)  # fmt: skip
    ranks = np.zeros((len(load), placement.n_ranks))
    np.add.at(ranks, (np.broadcast_to(layers, placement.rank.shape), placement.rank), each)
    return np.asarray(ranks.max(axis=1) / np.maximum(ranks.mean(axis=1), 1e-30))


def _placed(load: Floats, n_ranks: int, redundant: int = 0, *, linear: bool = False) -> Placement:
    layers, n_experts = load.shape
    group = ExpertGroup((0,), layers, n_experts, n_ranks, redundant)
    if not linear:
        return balance(load, group)
    own = np.arange(n_experts) // group.slots_per_rank
    return Placement.of_ranks(np.broadcast_to(own, load.shape), n_ranks)


def redundancies(n_experts: int, n_ranks: int) -> list[int]:
    """Return numbers of redundant experts to try: one, two and four a rank, as far as they fit."""
    first = -n_experts % n_ranks or n_ranks
    return [n for n in (first, first + n_ranks, first + 3 * n_ranks) if n <= n_experts]


def examine(
    counters: Counters,
    step_time: StepTimeModel,
    n_ranks: int,
    tokens: int,
    context: int = 1024,
    redundant: Sequence[int] | None = None,
    *,
    prompts: bool = False,
    seed: int = 0,
) -> Balance:
    """Say what counters mean for engines that share experts.

    Args:
        counters: of one model's MoE layers.
        step_time: of a GPU that is one of ``n_ranks``.
        n_ranks: GPUs that share the experts, one token batch each.
        tokens: of a step, of all GPUs together.
        context: tokens that a sequence attends to, mean.
        redundant: numbers of redundant experts to try; None: `redundancies`.
        prompts: whether steps compute prompts; METRO then splits as EPLB does, and is left out.
        seed: of the drawn steps.

    Returns:
        Skew, persistence and options. Where there are several windows, placements are made for the
        first half and judged on the second.

    Raises:
        InputError: the counters are of another model or other ranks."""
    counts = counters.counts
    if counters.of == "ranks":
        return _of_ranks(counters, n_ranks)
    model = step_time.model
    if counts.shape[2] != model.n_experts:
        problem = f"{counts.shape[2]} experts a layer, {model.name} has {model.n_experts}"
        raise InputError("counters", problem, "counters of the model given as --model")
    if counts.shape[1] > model.n_moe_layers:
        problem = f"{counts.shape[1]} layers, {model.name} has {model.n_moe_layers} with experts"
        raise InputError("counters", problem, "counters of the model given as --model")
    half = max(1, len(counts) // 2)
    before, after = counts[:half].sum(axis=0), (counts[half:] if len(counts) > 1 else counts).sum(0)
    served = (before.sum(axis=1) > 0) & (after.sum(axis=1) > 0)
    if not served.any():
        raise InputError("counters", "no layer has tokens in both halves of the windows")
    before, after = before[served], after[served]
    own = redundancies(model.n_experts, n_ranks) if redundant is None else list(redundant)
    plans = [("experts in order", 0, "even", _placed(before, n_ranks, linear=True)),
             ("EPLB", 0, "even", _placed(before, n_ranks))]  # fmt: skip
    for n in own:
        placement = _placed(before, n_ranks, n)
        plans += [
            (f"EPLB, {choice}", n, choice, placement)
            for choice in (CHOICES[:1] if prompts else CHOICES)
        ]
    slots = max(int(plan[3].slots().max()) for plan in plans)
    moe = step_time.rank_moe(min(slots, model.n_experts), tokens * model.top_k)
    each = -(-tokens // n_ranks)
    decoding = {"batch": each, "context": each * context}
    of_step = {"chunks": [(0, each)]} if prompts else decoding
    parts = step_time.parts(**of_step, activated=[0.0] * model.n_moe_layers)
    rest_s = sum(parts) - parts.moe
    grid = moe.mixed_s if prompts else moe.decode_s
    drawn = _steps(after, tokens, model.top_k, seed)
    options = []
    for name, n, choice, placement in plans:
        layer_s, experts = _layer(drawn, placement, choice, moe.rows * moe.top_k, grid)
        layer_s += 1e-6 * MetroParameters().overhead_us * (choice == "metro")
        moe_s = layer_s * model.n_moe_layers
        busiest = float(rank_skew(after, placement).mean())
        options.append(Option(name, n, busiest, experts, 1e3 * moe_s, 1e3 * (rest_s + moe_s)))
    linear = plans[0][3]
    kept, correlation = _persistence(counts[:, served], n_ranks)
    halves = (float(rank_skew(before, linear).mean()), float(rank_skew(after, linear).mean()))
    skew = rank_skew(counts[:, served].sum(axis=0), linear)
    return Balance(len(counts), skew, kept, correlation, halves, tuple(options))


def _of_ranks(counters: Counters, n_ranks: int) -> Balance:
    counts = counters.counts
    if not len(counts):
        skew = 1.0 / np.maximum(counters.balancedness, 1e-9)
        return Balance(len(skew), np.array([skew.mean()]), None, None, _halves(skew), ())
    if counts.shape[2] != n_ranks:
        problem = f"{counts.shape[2]} ranks were counted, --ranks is {n_ranks}"
        raise InputError("ranks", problem, "the ranks that share experts")
    served = counts.sum(axis=(0, 2)) > 0
    by_window = counts[:, served].max(axis=2) / np.maximum(counts[:, served].mean(axis=2), 1e-30)
    total = counts[:, served].sum(axis=0)
    skew = total.max(axis=1) / total.mean(axis=1)
    halves = _halves(by_window.mean(axis=1))
    return Balance(len(counts), skew, None, _correlation(counts), halves, ())


def _halves(skew: Floats) -> tuple[float, float]:
    first, second = np.array_split(skew, 2) if len(skew) > 1 else (skew, skew)
    return float(first.mean()), float(second.mean())


def _correlation(counts: Floats) -> float | None:
    """Return the mean correlation of loads between windows, layer by layer."""
    found = []
    for first, second in pairwise(counts):
        for x, y in zip(first, second, strict=True):
            if x.std() > 0 and y.std() > 0:
                found.append(float(np.corrcoef(x, y)[0, 1]))
    return float(np.mean(found)) if found else None


def _persistence(counts: Floats, n_ranks: int) -> tuple[float | None, float | None]:
    """Return the share of a placement's gain that the next window keeps, and the correlation."""
    gained = possible = 0.0
    for first, second in pairwise(counts):
        linear, stale, own = (
            float(rank_skew(second, placement).mean())
            for placement in (
                _placed(second, n_ranks, linear=True), _placed(first, n_ranks),
                _placed(second, n_ranks),
            )
        )  # fmt: skip
        gained, possible = gained + linear - stale, possible + linear - own
    kept = gained / possible if possible > 1e-2 * max(len(counts) - 1, 1) else None
    return kept, _correlation(counts)


def _steps(load: Floats, tokens: int, top_k: int, seed: int) -> Ints:
    """Draw how many tokens choose each expert, [layers, steps, experts]."""
    rng = np.random.default_rng(seed)
    layers = np.unique(np.linspace(0, len(load) - 1, min(_LAYERS, len(load))).astype(int))
    share = load[layers] / load[layers].sum(axis=1, keepdims=True)
    chance = np.minimum(top_k * share, 1.0)[:, None, :]
    drawn = np.full((len(load), _DRAWN, load.shape[1]), -1, np.int64)
    drawn[layers] = rng.binomial(tokens, chance, (len(layers), _DRAWN, load.shape[1]))
    return drawn


def _layer(
    drawn: Ints, placement: Placement, choice: str, knots: Floats, grid: Floats
) -> tuple[float, float]:
    """Return the time of a layer, s, and the experts of its busiest rank, means over the steps.

    ``grid``: [knots, slots + 1] seconds of a rank by its pairs, ``knots``, and its experts."""
    chooser = registry.replica_choice(choice, PolicyContext(1, np.random.default_rng(0)))
    assert isinstance(chooser, ChoiceByCount)
    seconds, busiest = [], []
    for layer in np.flatnonzero(drawn[:, 0, 0] >= 0):
        for tokens in drawn[layer]:
            slots = chooser.instances(tokens, placement, int(layer))
            count = np.minimum((slots >= 0).sum(axis=1), np.maximum(tokens, 1))
            turn = np.arange(slots.shape[1])[None, :]
            # An expert's tokens take turns over its instances.
            more = turn < (tokens % np.maximum(count, 1))[:, None]
            pairs = np.where(
                turn < count[:, None], (tokens // np.maximum(count, 1))[:, None] + more, 0
            )
            used = pairs > 0
            rank = placement.rank[layer][slots[used]]
            own_pairs = np.bincount(rank, pairs[used], placement.n_ranks)
            active = np.bincount(rank, minlength=placement.n_ranks)
            at = np.minimum(active, grid.shape[1] - 1)
            times = [np.interp(p, knots, grid[:, a])
                     for p, a in zip(own_pairs, at, strict=True)]  # fmt: skip
            seconds.append(max(times))
            busiest.append(int(active.max()))
    return float(np.mean(seconds)), float(np.mean(busiest))
