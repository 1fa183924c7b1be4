"""Lower bounds on the size of a cluster, by arithmetic: every step is full and activates as few
experts as it can, and no request waits for another."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.run import offered_load, prepare_run
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.traces.workload import Workload

#: Requests, and the window of those that are measured, s.
Load: TypeAlias = tuple[Workload, tuple[float, float]]
_SLACK = 0.9  #: a finite run may serve a little more than the cluster's steady state


@dataclass(frozen=True)
class Bounds:
    """Fewest workers that could serve a load (co-located ones: ``n_decode``) of ``rate`` requests
    per second, or why no number of them can (``impossible``)."""

    n_prefill: int
    n_decode: int
    rate: float
    impossible: str = ""


def bounds(config: RunConfig, objective: Objective, load: Load | None = None) -> Bounds:
    """Bound the workers that a load needs on the pools of a configuration; raises InputError as
    `prepare`.

    A prefill worker computes mean prompts, at best in full steps (no bound with prefix caching of
    shared blocks or `conditional_disagg`); a decode worker generates at best ``batch / step``
    tokens per second over batches within the TPOT bound, in steps that activate at least top-k
    experts (or their share per rank); a co-located worker does both; engines that share experts
    have no bound. Prompts with a prefill longer than the TTFT bound miss on any cluster, and any
    rejects a request longer than ``max_model_len``. ``load``: of `offered_load`, the same for all
    shapes."""
    prepared = prepare_run(config)
    workload, window = load or offered_load(config, prepared.trace)
    prefill, decode = prepared.spec.prefill, prepared.spec.decode
    rate = offered_rate(config, workload)
    level = objective.level
    spared = workload.prefix_block_tokens > 0 and config.engine.enable_prefix_caching
    spared |= config.cluster.conditional_disagg is not None
    n_decode = 1 if config.cluster.generates else 0

    lengths, outputs = workload.prompt_len.astype(np.int64), workload.output_len
    if config.requests.replays_log:  # what is replayed before and behind it may be of another kind
        inside = (workload.arrival_s >= window[0]) & (workload.arrival_s < window[1])
        lengths, outputs = lengths[inside], outputs[inside]
    longest = prepared.spec.max_model_len
    accepted = lengths + outputs <= longest
    if accepted.mean() < objective.attainment:
        share = f"{100 * (1.0 - accepted.mean()):.1f}% of the requests"
        why = f"{share} are longer than {longest} tokens (max_model_len)"
        return Bounds(1, n_decode, rate, why)
    lengths = lengths[accepted]
    n_prefill, prompts = min(1, config.cluster.n_prefill), 0.0
    if not spared and prefill.group is None:
        prompts = rate * _prompt_s(prefill, max(1, int(lengths.mean())))
        n_prefill = _workers(prompts) if config.cluster.n_prefill else 0
        late = _late(prefill, lengths, level.ttft)
        if 1.0 - late < objective.attainment:
            why = (
                f"the prefill alone of {100 * late:.1f}% of the prompts takes longer than the TTFT "
                f"bound of {level.ttft:g} ms on {prefill.step_time.gpu.name}"
            )
            return Bounds(n_prefill, n_decode, rate, why)
    if not config.cluster.generates:
        return Bounds(n_prefill, 0, rate)
    if decode.group is not None:
        return Bounds(n_prefill, 1, rate)
    step_s = _fastest_steps(
        decode.step_time,
        config.pool("decode").parallelism.n_expert_ranks,
        prepared.model.top_k,
        float(lengths.mean()),
    )
    if (drafting := decode.speculation) is not None:
        # No verify step is shorter than a plain one; a lucky request accepts all of its drafts.
        step_s = step_s / (1 + drafting.config.depth)
    most_s = math.inf if level.tpot is None else level.tpot / 1e3
    if step_s[0] > most_s:
        why = (
            f"a request alone takes {1e3 * step_s[0]:.1f} ms a token on "
            f"{decode.step_time.gpu.name}, more than the TPOT bound of {level.tpot:g} ms"
        )
        return Bounds(n_prefill, 1, rate, why)
    within, batch = step_s <= most_s, np.arange(1, len(step_s) + 1)
    tokens_per_s = float((batch[within] / step_s[within]).max())
    decodes = rate * float(outputs[accepted].mean()) / tokens_per_s
    return Bounds(
        n_prefill, _workers(decodes + (prompts if config.cluster.n_prefill == 0 else 0.0)), rate
    )


def offered_rate(config: RunConfig, workload: Workload) -> float:
    """Return the mean rate of the measured requests, per second."""
    part = workload.description.get("log_window")
    if config.requests.effective_rate is not None:
        return config.requests.effective_rate
    if part is not None and part["rate"] is not None:
        return float(part["rate"])
    span = float(workload.arrival_s[-1] - workload.arrival_s[0])
    return (len(workload) - 1) / max(span, 1e-9)


def _workers(load: float) -> int:
    return max(1, math.ceil(_SLACK * load))


def _prompt_s(engine: EngineSpec, tokens: int) -> float:
    """Return the time of a worker for each prompt; each of its stages computes another prompt."""
    return engine.prompt_s(tokens) / engine.parallelism.pipeline_parallel_size


def _late(engine: EngineSpec, lengths: Ints, bound_ms: float | None) -> float:
    """Return the share of prompts whose prefill alone takes longer than a bound."""
    if bound_ms is None or engine.parallelism.pipeline_parallel_size > 1:  # stages overlap chunks
        return 0.0
    values, counts = np.unique(lengths, return_counts=True)
    late = _prompts_s(engine.step_time, tuple(values.tolist())) > bound_ms / 1e3
    return float(counts[late].sum() / counts.sum())


@lru_cache(maxsize=16)
def _prompts_s(step_time: StepTimeModel, lengths: tuple[int, ...]) -> Floats:
    """Return the time of a prompt alone of each length, s."""
    return np.array([step_time.prompt_s(n) for n in lengths])


@lru_cache(maxsize=16)
def _fastest_steps(step_time: StepTimeModel, n_ranks: int, top_k: int, context: float) -> Floats:
    """Return a lower bound on the time of a decode step at batch 1, 2, ..., s."""
    activated = [-(-top_k // n_ranks)] * step_time.n_moe_layers
    return step_time.decodes_s(activated, context)
