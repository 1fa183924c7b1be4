"""Prefill steps of each parallel strategy in closed form, through the same tables as the engine's.

Every GPU of ``dp`` strategies computes so many tokens a step, the GPUs of others so many together;
routing is uniform, prompts are of one length, and steps follow each other without a pause. This
prices what queues and recorded routing leave out, finds the token budgets that a baseline is run
with, and draws the map of the fastest strategy. One layer of AsyncEP takes the longest of its
computation, its gather and its copy from the host (``weight_streaming``)."""

from dataclasses import dataclass
from functools import lru_cache

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.kernels.flops import mfu, peak_flops, prefill_flops
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.steps.step_cost import StepParts, rank_moe_s
from eldr_sim.kernel_profiles.steps.step_time import (
    StepTimeModel,
    build_step_time_model,
    plan_pipeline,
)
from eldr_sim.kernel_profiles.steps.weight_streaming import plan_stream
from eldr_sim.planning.search.prefill import BACKENDS, BUDGETS
from eldr_sim.planning.search.prefill_strategy import KINDS, PrefillStrategy

_MOST_SEQS = 2048  # prompts of a step
_LONGEST = 131_200  # tokens of a prompt


@dataclass(frozen=True)
class Strategy(PrefillStrategy):
    """A strategy on other links; ``links`` is the speed of all between GPUs over the tables'."""

    links: float = 1.0


@lru_cache(maxsize=32)
def _times(model: str, gpu: GPU, parallelism: Parallelism) -> StepTimeModel:
    return build_step_time_model(
        load_model(model), gpu, max_num_seqs=_MOST_SEQS, max_model_len=_LONGEST,
        max_num_batched_tokens=131_072, parallelism=parallelism,
    )  # fmt: skip


def chunks_of(budget: int, context: int) -> list[list[tuple[int, int]]]:
    """Return the steps, (first, tokens) each, of prompts of one length: many in one, or one in
    many."""
    if context <= budget:
        return [[(0, context)] * min(budget // context, _MOST_SEQS)]
    return [[(first, min(budget, context - first))] for first in range(0, context, budget)]


def _resident(parts: StepParts, links: float) -> float:
    return parts.attention + parts.dense + parts.collectives / links + parts.moe


def step_s(
    strategy: Strategy, model: str, gpu: str | GPU, n_gpus: int, chunks: list[tuple[int, int]]
) -> float:
    """Return how long a step of these chunks on every engine keeps the GPUs, s (the slowest stage
    of a pipeline). ``async_ep`` and ``dp_ep`` have an engine on each GPU, others one. Raises
    InputError."""
    dims, part = load_model(model), gpu if isinstance(gpu, GPU) else load_gpu(gpu)
    parallelism = SINGLE_GPU
    if strategy.kind in ("tp_ep", "tp"):
        parallelism = Parallelism(n_gpus, strategy.kind == "tp_ep")
    elif strategy.kind == "dp_ep":
        parallelism = Parallelism(1, True, n_gpus)
    parallelism.check(dims)
    times = _times(model, part, parallelism)
    if strategy.kind == "dp_ep":
        return _dispatched_s(strategy, times, n_gpus, chunks)
    parts = times.parts(chunks=chunks)
    layer_s = _resident(parts, strategy.links) / dims.n_moe_layers
    if strategy.kind == "async_ep":
        stream = plan_stream(
            dims, part, n_gpus, offload_window=strategy.window or None,
            interference=strategy.interference,
        ).stream  # fmt: skip
        gather_s = stream.gather_s / strategy.links
        computes = layer_s + stream.interference * min(layer_s, gather_s)
        # A window is full when a step ends, so that copies go on into the next.
        waits = max(computes, gather_s, stream.host_s)
        return parts.host + computes + (dims.n_moe_layers - 1) * waits + parts.head
    if strategy.kind == "pp":
        shares = plan_pipeline(dims, part, n_gpus).shares
        whole = _resident(parts, strategy.links)
        return max(parts.host + whole * shares[0], max(shares) * whole, whole * shares[-1])
    return parts.host + _resident(parts, strategy.links) + parts.head


def _dispatched_s(
    strategy: Strategy, times: StepTimeModel, n_gpus: int, chunks: list[tuple[int, int]]
) -> float:
    """Return a step of engines that dispatch their tokens to evenly loaded experts, s."""
    dims, part, tokens = times.model, times.gpu, sum(count for _, count in chunks)
    experts = dims.n_experts // n_gpus
    resident = times.parts(chunks=chunks)
    routed = build_all_to_all(dims, part, strategy.backend, n_gpus)
    inside, between = (tokens * copies for copies in routed.uniform_copies(dims))
    pairs = tokens * dims.top_k
    activated = experts * (1 - (1 - dims.top_k / dims.n_experts) ** (tokens * n_gpus))
    moe = rank_moe_s(times.rank_moe(experts, pairs), pairs, activated, True)
    sends = routed.dispatch_s(inside, between) + routed.combine_s(inside, between)
    others = resident.attention + resident.dense + resident.collectives
    layers = dims.n_moe_layers * (moe + sends / strategy.links)
    return float(resident.host + others + layers + resident.head)


@dataclass(frozen=True)
class Rate:
    """Prompts of one length, as fast as a strategy computes them."""

    budget: int
    tokens_per_s: float  #: of all GPUs
    mfu: float  #: share of their peak


def rate(
    strategy: Strategy, model: str, gpu: str | GPU, n_gpus: int, budget: int, context: int
) -> Rate:
    """Return how fast prompts of one length are computed with a token budget, or as `step_s`."""
    dims, part = load_model(model), gpu if isinstance(gpu, GPU) else load_gpu(gpu)
    steps = chunks_of(budget, context)
    engines = n_gpus if strategy.kind in ("async_ep", "dp_ep") else 1
    seconds = sum(step_s(strategy, model, part, n_gpus, chunks) for chunks in steps)
    tokens = engines * sum(count for chunks in steps for _, count in chunks)
    flops = engines * sum(prefill_flops(dims, n, first) for chunks in steps for first, n in chunks)
    share = mfu(flops, seconds, n_gpus * peak_flops(dims, part))
    return Rate(budget, tokens / seconds, share)


def best(strategy: Strategy, model: str, gpu: str | GPU, n_gpus: int, context: int) -> Rate:
    """Return the rate at the fastest budget of :data:`BUDGETS`; raises as :func:`step_s`."""
    rates = [rate(strategy, model, gpu, n_gpus, budget, context) for budget in BUDGETS]
    return max(rates, key=lambda one: one.tokens_per_s)


def best_backend(model: str, gpu: str | GPU, n_gpus: int, context: int) -> tuple[Strategy, Rate]:
    """Return ``dp_ep`` with the backend and the budget that are fastest."""
    strategies = [Strategy("dp_ep", backend) for backend in BACKENDS]
    made = [(strategy, best(strategy, model, gpu, n_gpus, context)) for strategy in strategies]
    return max(made, key=lambda one: one[1].tokens_per_s)


def each_rate(model: str, gpu: str, n_gpus: int, tokens: int, links: float) -> dict[str, float]:
    """Return the tokens a second of each strategy that can share the model, ``tokens`` a GPU and
    step (a pipeline's stage), prompts of 512."""
    rates: dict[str, float] = {}
    for kind in KINDS:
        for backend in BACKENDS if kind == "dp_ep" else BACKENDS[:1]:
            strategy = Strategy(kind, backend, links=links)
            budget = tokens * n_gpus if kind in ("tp_ep", "tp") else tokens
            try:
                made = rate(strategy, model, gpu, n_gpus, budget, min(512, tokens))
            except InputError:
                continue
            rates[kind] = max(rates.get(kind, 0.0), made.tokens_per_s)
    return rates
