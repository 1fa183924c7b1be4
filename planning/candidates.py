"""Candidates of a plan: policies, GPUs, and workers of one or more GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.parallel import NODE_GPUS
from eldr_sim.planning.bounds import Bounds, bounds
from eldr_sim.planning.prefill_strategy import prefill_label
from eldr_sim.planning.search import SearchSpace
from eldr_sim.planning.slo import Objective
from eldr_sim.policies.choice import parse
from eldr_sim.policies.registry import canonical
from eldr_sim.simulator.config import Pool, RunConfig

#: Fields whose InputError says that a model does not fit workers of a size, once the GPU is known.
SIZE_FIELDS = ("gpu", "tensor_parallel_size", "block_size", "num_redundant_experts")


@dataclass(frozen=True)
class ClusterTemplate:
    """Clusters of equal workers under one policy; only the numbers of workers are open.

    Attributes
    ----------
    config
        The configuration, apart from its topology.
    bounds
        Lower bounds on the numbers of workers.
    max_gpus
        Most GPUs of the cluster.
    """

    config: RunConfig
    bounds: Bounds
    max_gpus: int

    @property
    def max_workers(self) -> int:
        """Most workers."""
        return self.max_gpus // worker_gpus(self.config)

    def at(self, x: int, y: int) -> RunConfig:
        """Return the cluster of x prefill and y decode workers; of prefill workers alone if 0."""
        return self.config.model_copy(update={"topology": f"{x}P{y}D" if y else f"{x}P"})

    def cost(self, x: int, y: int) -> float:
        """Return the price per hour of x prefill and y decode workers, or their GPUs."""
        return cost(self.at(x, y))

    def search_space(self, below: float) -> SearchSpace:
        """Return the clusters that cost less than ``below``."""
        return SearchSpace(
            self.bounds.n_prefill, self.bounds.n_decode, self.max_workers, self.cost, below
        )


@dataclass(frozen=True)
class Candidate:
    """A policy on a GPU (or a pair of GPUs), with every worker size that can hold the model.

    ``reasons`` says why other worker sizes cannot. With ``larger_if_needed`` a larger worker is
    tried only if no cluster of smaller ones meets the objective.
    """

    gpu: str
    policy: str
    templates: tuple[ClusterTemplate, ...]
    reasons: tuple[str, ...]
    larger_if_needed: bool


def cost(config: RunConfig) -> float:
    """Return what a plan minimises: the price of a cluster per hour; without prices, its GPUs."""
    return config.n_gpus if config.price_per_hour is None else config.price_per_hour


def worker_gpus(config: RunConfig) -> int:
    """Return the GPUs of a worker: those of all its engines and stages."""
    engines = config.data_parallel_size * config.pipeline_parallel_size
    return config.tensor_parallel_size * engines


def policy_label(config: RunConfig) -> str:
    """Return the policy, and what redundant experts its workers hold.

    Of prefill workers alone, how they share the model.
    """
    if config.prefill_only:
        return prefill_label(config)
    n = config.num_redundant_experts
    return f"{config.policy}, {n} redundant experts" if n else config.policy


def gpu_label(config: RunConfig) -> str:
    """Return the GPU of both pools, or both GPUs."""
    prefill, decode = (load_gpu(config.pool(role).gpu or "").name for role in ("prefill", "decode"))
    return decode if prefill == decode else f"{prefill} + {decode}"


def clusters_to_plan(
    config: RunConfig,
    policies: Sequence[str],
    gpus: Sequence[str],
    prices: Mapping[str, float],
    redundant_experts: Sequence[int] = (),
) -> list[RunConfig]:
    """Return a configuration for each policy, number of redundant experts and GPU, with prices.

    Parameters
    ----------
    config
        Fields that all share. A pool with a GPU of its own keeps it.
    policies
        Decode policies; that of the configuration if empty.
    gpus
        GPUs; that of the configuration if empty.
    prices
        Price of a GPU-hour by GPU; overrides the configuration's.
    redundant_experts
        Numbers of redundant experts; that of the configuration if empty.

    Raises
    ------
    InputError
        If a policy or GPU is unknown or listed twice, if only some GPUs have a price, or if the
        configuration does not suit a plan.
    """
    for policy in policies or [config.policy]:
        if "artifact" in parse(policy, "policy").given:
            problem = f"{policy!r}: an artifact is fitted for one number of decode workers"
            raise InputError("policy.artifact", problem, "none")
    if policies and config.prefill_only:
        raise InputError("policy", "prefill workers alone decode nothing", "--prefill-policy")
    if config.max_concurrency is not None:
        raise InputError("max_concurrency", "a plan is for an open load", "none")
    policies = [canonical("decode", policy) for policy in policies]
    by_gpu = {load_gpu(name).name: price for name, price in prices.items()}
    chosen = [load_gpu(name).name for name in gpus or [config.gpu]]
    several = list(map(str, redundant_experts))
    for field, listed in (
        ("policy", list(policies)), ("gpu", chosen), ("num_redundant_experts", several),
    ):  # fmt: skip
        if len(set(listed)) < len(listed):
            raise InputError(field, f"{', '.join(listed)} names one twice")
    if several and config.data_parallel_size == 1:
        problem = "redundant experts are simulated where engines share them"
        raise InputError("num_redundant_experts", problem, "--data-parallel-size 2 or more")
    made: dict[tuple[str, str, int], RunConfig] = {}
    for gpu in chosen:
        for policy, redundant in product(
            policies or [config.policy], redundant_experts or [config.num_redundant_experts]
        ):
            base = config.model_copy(
                update={"gpu": gpu, "policy": policy, "num_redundant_experts": redundant}
            )
            pools = {}
            for role in ("prefill", "decode"):
                pool = base.pool(role)
                price = by_gpu.get(load_gpu(pool.gpu or "").name, pool.price_per_gpu_hour)
                own: Pool = getattr(base, role)
                pools[role] = own.model_copy(update={"price_per_gpu_hour": price})
            base = base.model_copy(update=pools)
            made.setdefault((gpu_label(base), policy, redundant), base)
    _check_prices(made.values())
    return list(made.values())


def _check_prices(configs: Iterable[RunConfig]) -> None:
    prices = {
        load_gpu(pool.gpu or "").name: pool.price_per_gpu_hour
        for config in configs
        for pool in (config.pool("prefill"), config.pool("decode"))
    }
    free = [name for name, price in prices.items() if price is None]
    if free and len(free) < len(prices):
        raise InputError("price", f"none of {', '.join(free)}", "a price of every GPU, or of none")
    if any(price == 0 for price in prices.values()):
        raise InputError("price", "0", "a positive price")


def make_candidate(
    config: RunConfig, objective: Objective, max_gpus: int, sizes: Sequence[int]
) -> Candidate:
    """Return the worker sizes that can serve a configuration's model.

    Parameters
    ----------
    config
        Policy, GPUs and load.
    objective
        Service level and attainment.
    max_gpus
        Most GPUs of a cluster.
    sizes
        GPUs per engine to try; if empty, powers of two up to a node.
    """
    templates, reasons, engines = [], [], config.data_parallel_size
    for size in sizes or [2**n for n in range(NODE_GPUS.bit_length())]:
        gpus = size * engines
        if 2 * gpus > max_gpus:
            reasons.append(f"two workers of {gpus} GPUs are more than {max_gpus} GPUs")
            break
        ways = [config.enable_expert_parallel]
        if size > 1 and not ways[0]:
            ways.append(True)  # where the experts cannot be split over their width
        for expert_parallel in ways:
            sized = config.model_copy(
                update={"tensor_parallel_size": size, "enable_expert_parallel": expert_parallel}
            )
            try:
                found = bounds(sized, objective)
            except InputError as error:
                if error.field not in SIZE_FIELDS:
                    raise
                if expert_parallel == ways[0]:
                    reasons.append(f"{gpus} GPU{'s' if gpus > 1 else ''} a worker: {error.problem}")
                if error.field == "tensor_parallel_size":
                    continue
            else:
                templates.append(ClusterTemplate(sized, found, max_gpus))
            break
    return Candidate(
        gpu_label(config), policy_label(config), tuple(templates), tuple(reasons), not sizes
    )
