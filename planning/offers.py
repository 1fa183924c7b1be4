"""Candidates of a plan: policies, GPUs, and workers of one or more GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.parallel import NODE_GPUS
from eldr_sim.planning.bounds import Bounds, bounds
from eldr_sim.planning.search import Space
from eldr_sim.planning.slo import Objective
from eldr_sim.policies.choice import parse
from eldr_sim.policies.registry import canonical
from eldr_sim.simulator.config import Pool, RunConfig

#: Fields whose InputError says that a model does not fit workers of a size, once the GPU is known.
_SIZE_FIELDS = ("gpu", "tensor_parallel_size", "block_size")


@dataclass(frozen=True)
class Offer:
    """Workers of one kind under one policy, as many as there may be.

    Attributes
    ----------
    config
        Everything but the topology.
    bounds
        What arithmetic says about the numbers of workers.
    max_gpus
        GPUs of all workers together.
    """

    config: RunConfig
    bounds: Bounds
    max_gpus: int

    @property
    def max_workers(self) -> int:
        """Most workers."""
        return self.max_gpus // self.config.tensor_parallel_size

    def at(self, x: int, y: int) -> RunConfig:
        """Return the cluster of x prefill and y decode workers."""
        return self.config.model_copy(update={"topology": f"{x}P{y}D"})

    def cost(self, x: int, y: int) -> float:
        """Return the price of x prefill and y decode workers an hour; without prices their GPUs."""
        return cost(self.at(x, y))

    def space(self, below: float) -> Space:
        """Return the clusters that cost less than ``below``."""
        return Space(
            self.bounds.n_prefill, self.bounds.n_decode, self.max_workers, self.cost, below
        )


@dataclass(frozen=True)
class Candidate:
    """A policy on a GPU (or one for each pool), with every size of worker that can hold the model.

    ``reasons`` says of the others why they cannot. ``larger_if_needed`` says that a larger worker
    is tried only where the smaller ones do not do.
    """

    gpu: str
    policy: str
    offers: tuple[Offer, ...]
    reasons: tuple[str, ...]
    larger_if_needed: bool


def cost(config: RunConfig) -> float:
    """Return what a plan makes small: the price of a cluster an hour, without prices its GPUs."""
    return config.n_gpus if config.price_per_hour is None else config.price_per_hour


def gpu_label(config: RunConfig) -> str:
    """Name the GPU of both pools, or those of each."""
    prefill, decode = (load_gpu(config.pool(role).gpu or "").name for role in ("prefill", "decode"))
    return decode if prefill == decode else f"{prefill} + {decode}"


def clusters_to_plan(
    config: RunConfig,
    policies: Sequence[str],
    gpus: Sequence[str],
    prices: Mapping[str, float],
) -> list[RunConfig]:
    """Return a configuration for each policy on each GPU, with prices.

    Parameters
    ----------
    config
        What they share. A pool whose GPU it names keeps it.
    policies
        Decode policies; those of the configuration when empty.
    gpus
        GPUs; that of the configuration when empty.
    prices
        Price of a GPU-hour by GPU; before the configuration's own.

    Raises
    ------
    InputError
        If a policy or GPU is unknown or listed twice, if some GPUs have a price and others have
        none, or if the configuration cannot be planned with.
    """
    for policy in policies or [config.policy]:
        if "artifact" in parse(policy, "policy").given:
            problem = f"{policy!r}: an artifact is fitted for one number of decode workers"
            raise InputError("policy.artifact", problem, "none")
    if config.max_concurrency is not None:
        raise InputError("max_concurrency", "a plan is for an open load", "none")
    policies = [canonical("decode", policy) for policy in policies]
    by_gpu = {load_gpu(name).name: price for name, price in prices.items()}
    chosen = [load_gpu(name).name for name in gpus or [config.gpu]]
    for field, listed in (("policy", list(policies)), ("gpu", chosen)):
        if len(set(listed)) < len(listed):
            raise InputError(field, f"{', '.join(listed)} names one twice")
    made: dict[tuple[str, str], RunConfig] = {}
    for gpu in chosen:
        for policy in policies or [config.policy]:
            base = config.model_copy(update={"gpu": gpu, "policy": policy})
            pools = {}
            for role in ("prefill", "decode"):
                pool = base.pool(role)
                price = by_gpu.get(load_gpu(pool.gpu or "").name, pool.price_per_gpu_hour)
                own: Pool = getattr(base, role)
                pools[role] = own.model_copy(update={"price_per_gpu_hour": price})
            base = base.model_copy(update=pools)
            made.setdefault((gpu_label(base), policy), base)
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


def candidate(
    config: RunConfig, objective: Objective, max_gpus: int, sizes: Sequence[int]
) -> Candidate:
    """Return the sizes of worker that can serve a configuration's model.

    Parameters
    ----------
    config
        Policy, GPUs, load.
    objective
        What is to be met.
    max_gpus
        Most GPUs of a cluster.
    sizes
        GPUs of a worker to try; when empty, powers of two up to a node, as many as it takes.
    """
    offers, reasons = [], []
    for size in sizes or [2**n for n in range(NODE_GPUS.bit_length())]:
        if 2 * size > max_gpus:
            reasons.append(f"two workers of {size} GPUs are more than {max_gpus} GPUs")
            break
        ways = [config.enable_expert_parallel]
        if size > 1 and not ways[0]:
            ways.append(True)  # where the experts cannot be split over their width
        for expert_parallel in ways:
            offered = config.model_copy(
                update={"tensor_parallel_size": size, "enable_expert_parallel": expert_parallel}
            )
            try:
                found = bounds(offered, objective)
            except InputError as error:
                if error.field not in _SIZE_FIELDS:
                    raise
                if expert_parallel == ways[0]:
                    reasons.append(f"{size} GPU{'s' if size > 1 else ''} a worker: {error.problem}")
                if error.field == "tensor_parallel_size":
                    continue
            else:
                offers.append(Offer(offered, found, max_gpus))
            break
    return Candidate(gpu_label(config), config.policy, tuple(offers), tuple(reasons), not sizes)
