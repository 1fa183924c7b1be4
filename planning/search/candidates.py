"""Candidates of a plan: policies, GPUs, and workers of one or more GPUs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.parallel import NODE_GPUS
from eldr_sim.planning.search.axes import Axes
from eldr_sim.planning.search.bounds import Bounds, bounds
from eldr_sim.planning.search.monotone_search import SearchSpace
from eldr_sim.planning.search.prefill_strategy import chunk_label, prefill_label
from eldr_sim.planning.search.shapes import capacity, estimate, shapes
from eldr_sim.planning.slo import Objective
from eldr_sim.policies.choice import parse
from eldr_sim.simulator.run import load_of
from eldr_sim.simulator.setup.config.field_types import MOST_PRICE
from eldr_sim.simulator.setup.config.run_config import Pool, RunConfig

MOST_GPUS = 9999  #: most GPUs of a cluster that is planned: a pool has no more workers
#: Fields whose InputError says that a model does not fit workers of a size, once the GPU is known.
SIZE_FIELDS = (
    "gpu", "tensor_parallel_size", "data_parallel_size", "block_size", "num_redundant_experts",
    "ffn_ranks",
)  # fmt: skip


@dataclass(frozen=True)
class ClusterTemplate:
    """Clusters of equal workers under one policy; only the numbers of workers are open."""

    config: RunConfig  #: the configuration, apart from its topology
    bounds: Bounds  #: lower bounds on the numbers of workers
    max_gpus: int  #: most GPUs of the cluster
    #: Prefill and decode (or co-located) workers that it likely takes, see `shapes.estimate`.
    estimate: tuple[int, int] = (1, 1)
    #: Requests per second that a worker of either kind likely serves, see `shapes.capacity`.
    capacity: tuple[float, float] = (math.inf, math.inf)

    @cached_property
    def worker_sizes(self) -> tuple[int, int]:
        """GPUs of a prefill and of a decode worker."""
        prefill, decode = (self.config.pool(role).parallelism for role in ("prefill", "decode"))
        if self.config.cluster.generates:
            decode = self.config.pools[-1].parallelism  # with FFN GPUs, which a pool says
        return prefill.n_gpus, decode.n_gpus

    @cached_property
    def _prices(self) -> tuple[float | None, float | None]:
        """Price per GPU and hour of a prefill and of a decode worker."""
        prefill, decode = (self.config.pool(role) for role in ("prefill", "decode"))
        return prefill.price_per_gpu_hour, decode.price_per_gpu_hour

    @property
    def unit(self) -> int:
        """GPUs that `max_workers` counts as one worker: those of the smaller kind, or a part."""
        return math.gcd(*self.worker_sizes)

    @property
    def max_workers(self) -> int:
        """Most workers; where sizes differ, a larger one counts as several."""
        return self.max_gpus // self.unit

    def at(self, x: int, y: int) -> RunConfig:
        """Return the cluster of x prefill and y decode workers; y co-located ones if x is 0."""
        if not self.config.cluster.generates:
            return self.config.model_copy(update={"topology": f"{x}P"})
        last = self.config.pools[-1]
        decode = f"{y}D"
        if last.ffn_ranks:
            several = f"{y}x" if y > 1 else ""
            decode = f"{several}{last.data_parallel_size}A{last.ffn_ranks}F"
        return self.config.model_copy(update={"topology": f"{x}P{decode}" if x else f"{y}C"})

    def cost(self, x: int, y: int) -> float:
        """Return the price per hour of x prefill and y decode workers, or their GPUs."""
        workers = zip((x, y), self.worker_sizes, self._prices, strict=True)
        prices = [(n * gpus, price) for n, gpus, price in workers]
        if any(n and price is None for n, price in prices):
            return sum(n for n, _ in prices)
        return sum(n * (price or 0.0) for n, price in prices)

    @property
    def least_cost(self) -> float:
        """The least that a cluster costs, by arithmetic."""
        return self.cost(self.bounds.n_prefill, self.bounds.n_decode)

    @property
    def estimated_cost(self) -> float:
        """What the estimate costs."""
        return self.cost(*self.estimate)

    def search_space(self, below: float) -> SearchSpace:
        """Return the clusters that cost less than ``below``."""
        return SearchSpace(
            self.bounds.n_prefill,
            self.bounds.n_decode,
            self.max_workers,
            cache(self.cost),
            below,
            *(gpus // self.unit for gpus in self.worker_sizes),
        )


@dataclass(frozen=True)
class Candidate:
    """A policy on a GPU or a pair, its shapes that hold the model, and why others cannot."""

    gpu: str
    policy: str
    templates: tuple[ClusterTemplate, ...]
    reasons: tuple[str, ...]


def cost(config: RunConfig) -> float:
    """Return what a plan minimises: the price of a cluster per hour; without prices, its GPUs."""
    return config.n_gpus if config.price_per_hour is None else config.price_per_hour


def cluster_label(config: RunConfig) -> str:
    """Return the workers of a cluster: numbers (of a fleet that changes the fewest first), GPUs,
    and tokens a step of co-located ones. The GPUs of prefill workers alone are in their
    `prefill_label`."""
    pools = [pool.parallelism for pool in config.pools]
    sizes = list(dict.fromkeys(pool.n_gpus for pool in pools))
    groups = list(dict.fromkeys(pool.data_parallel_size for pool in pools))
    text = str(config.cluster.topology)
    if config.scaling.scales and parse(config.scaling.autoscale, "autoscale").name != "none":
        least = config.scaling.least_workers(config.pools)
        text = f"{'+'.join(map(str, least.values()))} to {text}"
    if max(sizes) > 1 and config.cluster.generates:
        engines = f"{' + '.join(map(str, groups))} engines, " if max(groups) > 1 else ""
        ranks = (
            f", EP {sizes[-1]}" if config.cluster.enable_expert_parallel and sizes[-1] > 1 else ""
        )
        text += f" of {engines}{' + '.join(map(str, sizes))} GPUs{ranks}"
    budget = config.engine.max_num_batched_tokens
    return text + (f", {budget} tokens a step" if config.cluster.n_prefill == 0 and budget else "")


def shape_label(config: RunConfig) -> str:
    """Return how many GPUs the workers of a cluster have, and whether prefill is apart; of prefill
    workers alone, how those share the model, and the tokens of a step."""
    if not config.cluster.generates:
        return f"{prefill_label(config)}, {chunk_label(config)} tokens a step"
    if config.cluster.n_prefill == 0:
        budget = config.engine.max_num_batched_tokens
        return f"xC {_kinds(config)}" + (f", {budget} tokens a step" if budget else "")
    return f"xPyD {_kinds(config)}"


def _kinds(config: RunConfig) -> str:
    """Return how the workers of each pool share the model; once where they are alike."""
    kinds = []
    for layout in (pool.parallelism for pool in config.pools):
        name = f"TP{layout.tensor_parallel_size}"
        name += " EP" if layout.expert_parallel and layout.n_gpus > 1 else ""
        name += f" x {engines} engines" if (engines := layout.data_parallel_size) > 1 else ""
        kinds.append(name + (f" and {layout.ffn_ranks} FFN GPUs" if layout.ffn_ranks else ""))
    return " + ".join(dict.fromkeys(kinds))


def gpu_label(config: RunConfig) -> str:
    """Return the GPUs of the pools."""
    return " + ".join(dict.fromkeys(load_gpu(pool.gpu or "").name for pool in config.pools))


def clusters_to_plan(
    config: RunConfig, axes: Axes, prices: Mapping[str, float] | None, *, given: bool = False
) -> list[RunConfig]:
    """Return a configuration for each combination of axes, with prices of a GPU-hour by GPU.

    Raises InputError as `Axes.configs`, if only some of the GPUs have a price, or the configuration
    does not suit a plan. ``given``: whether the topology is fixed, and not searched."""
    if not isinstance(config.cluster.topology, str):
        problem = "a file of pools, and plans choose the workers themselves"
        raise InputError("topology", problem, "xPyD, xC or xP")
    if config.requests.max_concurrency is not None:
        raise InputError("max_concurrency", "a plan needs an open load", "none")
    prices = prices or {}
    by_gpu = {load_gpu(name).name: price for name, price in prices.items()}
    if len(by_gpu) < len(prices):
        raise InputError("price", f"{', '.join(prices)} names one GPU twice")
    for dollars in by_gpu.values():
        within("price", dollars, MOST_PRICE, " an hour")
    made: dict[tuple[str, str], RunConfig] = {}
    for base in axes.configs(config):
        pools: dict[str, Pool] = {}
        for role in _roles(base, given):
            pool = base.pool(role)
            price = by_gpu.get(load_gpu(pool.gpu or "").name, pool.price_per_gpu_hour)
            settings: Pool = getattr(base.cluster, role)
            pools[role] = settings.model_copy(update={"price_per_gpu_hour": price})
        base = base.model_copy(update=pools)
        made.setdefault((gpu_label(base), axes.label(base)), base)
    _check_prices(made.values(), given)
    planned = {
        load_gpu(base.pool(role).gpu or "").name
        for base in made.values()
        for role in _roles(base, given)
    }
    for name in by_gpu.keys() - planned:
        raise InputError("price", f"{name} is not planned", ", ".join(sorted(planned)))
    return list(made.values())


def _roles(config: RunConfig, given: bool) -> tuple[Literal["prefill", "decode"], ...]:
    """Return the pools that have a price; co-located workers of a given topology are one."""
    if given and not config.cluster.n_prefill:
        return ("decode",)
    return ("prefill", "decode") if config.cluster.generates else ("prefill",)


def _check_prices(configs: Iterable[RunConfig], given: bool) -> None:
    prices = {
        load_gpu(pool.gpu or "").name: pool.price_per_gpu_hour
        for config in configs
        for pool in map(config.pool, _roles(config, given))
    }
    free = [name for name, price in prices.items() if price is None]
    if free and len(free) < len(prices):
        raise InputError("price", f"none of {', '.join(free)}", "a price of every GPU, or of none")
    for price in prices.values():
        if price == 0:
            raise InputError("price", "0", "a positive price")


def check_ffn_ranks(ffn_ranks: Sequence[int], engines: Sequence[int]) -> None:
    """Raise InputError for FFN GPUs that no decode worker of these engines can have."""
    for ranks in ffn_ranks:
        if ranks < 0:
            raise InputError("ffn_ranks", str(ranks), "0 or more")
        within("ffn_ranks", ranks, 1024)
    if any(ffn_ranks) and max(engines) == 1:
        problem = "separate FFN GPUs need engines that share experts"
        raise InputError("ffn_ranks", problem, "--data-parallel-size 2 or more")


def make_candidate(
    config: RunConfig,
    axes: Axes,
    objective: Objective,
    max_gpus: int,
    sizes: Sequence[int],
    engines: Sequence[int] = (),
    ffn_ranks: Sequence[int] = (),
) -> Candidate:
    """Return the shapes that can serve a configuration's model, the likely cheapest first.

    ``sizes``: GPUs per engine to try, powers of two up to a node if empty; ``engines``: per worker,
    the configuration's if empty; ``ffn_ranks``: as of `shapes`."""
    templates: list[ClusterTemplate] = []
    reasons: list[str] = []
    load = load_of(config)
    sizes = sizes or [2**n for n in range(NODE_GPUS.bit_length())]
    for shape in shapes(config, sizes, engines, ffn_ranks):
        label, least = shape_label(shape), shape.n_gpus
        if least > max_gpus:
            reasons.append(f"{label}: {least} GPUs are more than {max_gpus}")
            continue
        try:
            limits = bounds(shape, objective, load)
            per_worker = (math.inf, math.inf)
            if not limits.impossible:
                per_worker = capacity(shape, objective, load[0])
        except InputError as error:
            if error.field not in (*SIZE_FIELDS, *axes.values):
                raise
            reasons.append(f"{label}: {error.problem}")
            continue
        likely = estimate(per_worker, limits.rate, colocated=shape.cluster.n_prefill == 0)
        likely = max(likely[0], limits.n_prefill), max(likely[1], limits.n_decode)
        templates.append(ClusterTemplate(shape, limits, max_gpus, likely, per_worker))
    templates.sort(
        key=lambda t: (t.estimated_cost, t.worker_sizes, t.config.cluster.n_prefill == 0)
    )
    return Candidate(gpu_label(config), axes.label(config), tuple(templates), tuple(reasons))
