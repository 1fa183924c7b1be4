"""METRO's choices on batches of recorded or synthetic tokens, without queues: Figures 5d and 8."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.charts import bars
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAllCost
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.planning.studies.figures import Claim, Reproduction, percent
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.placement.eplb import balance
from eldr_sim.simulator.plane.steps import group_state
from eldr_sim.simulator.plane.steps.group_step import route_tokens
from eldr_sim.simulator.setup.replay import make_replicas, rank_masks
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.coactivation import ranges
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.streams import stream

RATIOS = (1.125, 1.25, 1.5)


@dataclass(frozen=True)
class Routing:
    """Tokens of one domain of a trace, for a model served on so many GPUs."""

    name: str
    model: str
    n_ranks: int
    trace: RoutingTrace
    domain: str

    @cached_property
    def rows(self) -> Ints:
        """Rows of the trace that decode steps of serving requests feed."""
        return ranges(*self.trace.decode_window(self._serving))

    @property
    def _serving(self) -> Ints:
        mine = self.trace.domain == self.trace.domains.index(self.domain)
        return np.flatnonzero(mine & ~self.trace.is_calibration)

    @cached_property
    def load(self) -> Floats:
        """Load of every expert, ``[layers, experts]``, from calibration requests."""
        mix = {self.domain: 1.0}
        calibration = calibration_set(self.trace, workload="trace", domain_mix=mix)
        return np.asarray(calibration.decode_activation.mean(axis=0, dtype=np.float64))

    @cached_property
    def served(self) -> Floats:
        """Load of every expert in what is served, ``[layers, experts]``."""
        chosen = self.trace.decode_activation(self._serving)
        return np.asarray(chosen.mean(axis=0, dtype=np.float64))

    def placement(self, ratio: float, load: Floats | None = None) -> Placement:
        """EPLB's placement with so many instances an expert, by calibration's load or another."""
        n_layers, n_experts = self.load.shape
        redundant = round((ratio - 1) * n_experts)
        group = ExpertGroup((), n_layers, n_experts, self.n_ranks, redundant)
        return balance(self.load if load is None else load, group)

    def batches(self, batch: int, n: int, seed: int = 0) -> Ints:
        """Draw ``n`` batches of tokens of any requests, shape [n, batch]."""
        rng = stream(seed, f"metro batches {self.name} {batch}")
        return self.rows[rng.integers(len(self.rows), size=(n, batch))]


@dataclass(frozen=True)
class Steps:
    """What the MoE layers of steps take, means over the steps and layers."""

    busiest: float  #: activated experts of the GPU that has most
    active: float  #: of all GPUs
    pairs: float  #: token-expert pairs of the GPU that has most, over the mean
    moe_us: float  #: of a layer


def route(
    routing: Routing, placement: Placement, choice: str, batches: Ints, moe: RankMoE | None = None
) -> Steps:
    """Return what a choice makes of batches of tokens, ``[steps, tokens]`` rows of the trace."""
    n_layers, n_experts = routing.load.shape
    replicas = make_replicas([placement], n_experts, n_layers) or group_state.no_replicas()
    knots = np.arange(2.0), np.zeros(2)
    free = AllToAllCost(0.0, 0.0, *knots * 4)
    if moe is None:
        table = np.zeros((2, n_experts + 1))
        moe = RankMoE(1, np.arange(2.0), table, table)
    number, n_ranks = group_state.REPLICA_CHOICES[choice], placement.n_ranks
    group = group_state.GroupCost(
        group_state.ALL, False, number, 0.0, 1, n_ranks, moe, free, free, 0
    )
    bits = routing.trace.bits.reshape(len(routing.trace.bits), -1)
    work = group_state.make_group_scratch(
        n_layers, bits.shape[1], n_ranks, n_experts, replicas.rank.shape[3]
    )
    masks = rank_masks([placement], n_experts, n_layers)
    counting = group_state.Counting(masks, replicas, group, work, 0, n_ranks, number, False)
    made = [route_tokens(bits, rows, counting) for rows in batches]

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)) / n_layers)

    return Steps(
        mean(step.busiest for step in made),
        mean(step.active for step in made),
        sum(step.busiest_pairs for step in made) * n_ranks / sum(step.pairs for step in made),
        1e6 * mean(step.moe_s for step in made),
    )


@lru_cache(maxsize=8)
def rank_times(model: str, gpu: str, n_ranks: int, slots: int, tokens: int) -> RankMoE:
    """Return the times of a MoE layer on one of ``n_ranks`` GPUs."""
    dims = load_model(model)
    step_time = build_step_time_model(
        dims, load_gpu(gpu), max_num_seqs=8, max_model_len=1024,
        parallelism=Parallelism(1, True, n_ranks),
    )  # fmt: skip
    return step_time.rank_moe(slots, tokens * dims.top_k)


def figure_8(routings: Sequence[Routing], n_batches: int) -> Reproduction:
    """Activated experts of the busiest GPU, 32 tokens: EPLB's split, the optimum and METRO."""
    rows: list[dict[str, Any]] = []
    for routing in routings:
        for batch in (32, 32 * routing.n_ranks):
            batches = routing.batches(batch, n_batches)
            for ratio in RATIOS:
                placement = routing.placement(ratio)
                rows += [
                    {"routing": routing.name, "gpus": routing.n_ranks, "tokens": batch}
                    | {"ratio": ratio, "choice": choice}
                    | {"busiest_experts": route(routing, placement, choice, batches).busiest}
                    for choice in ("even", "metro", "metro_sorted", "optimal")
                ]
    cells = _cells(rows, "busiest_experts")
    small = {key: cell for key, cell in cells.items() if key[1] == 32}
    over = {key: percent(cell["metro"], cell["optimal"]) for key, cell in small.items()}
    under = {key: percent(cell["metro"], cell["even"]) for key, cell in small.items()}
    percents = [
        percent(cell["metro"], cell["optimal"]) for key, cell in cells.items() if key[1] != 32
    ]
    claims = [
        Claim(
            "excess of experts that METRO activates on the busiest GPU over the optimum",
            10.9, 10.9, max(over.values()), "%", 2.0,
            f"{min(over.values()):.1f} to {max(over.values()):.1f}% over the cells, most for "
            f"{_named(max(over, key=lambda key: over[key]))}; with 32 tokens a GPU "
            f"{min(percents):.1f} to {max(percents):.1f}%", neutral=None,
        ),
        Claim(
            "METRO activates fewer than EPLB's split by up to", -42.3, -42.3,
            min(under.values()), "%", 3.0,
            f"{min(under.values()):.1f} to {max(under.values()):.1f}% over the cells, most for "
            f"{_named(min(under, key=lambda key: under[key]))}",
        ),
    ]  # fmt: skip

    shown = [row for row in rows if row["tokens"] == 32]
    draw = bars(shown, "routing", "busiest_experts", "choice", "ratio")
    title = "activated experts of the busiest GPU, 32 tokens"
    return Reproduction("figure_8", title, rows, claims, draw)


def _cells(rows: Sequence[dict[str, Any]], figure: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return the figure of each choice by (routing, tokens, ratio)."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = row["routing"], row["tokens"], row["ratio"]
        cells.setdefault(key, {})[row["choice"]] = row[figure]
    return cells


def _named(key: tuple[Any, ...]) -> str:
    routing, tokens, ratio = key
    return f"{routing}, {tokens} tokens, {ratio}x"
