"""Shapes of clusters that a plan chooses from, and an estimate of what each takes.

A shape says how many GPUs an engine of each pool has, whether experts are whole (expert
parallelism), and whether prefill and decode are apart (xPyD) or together (xC); the numbers of
workers are open. The estimate orders the shapes, so that the first one searched is likely the
cheapest, and says where a search begins; it decides no verdict.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.planning.slo import Objective
from eldr_sim.policies import registry
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config import Pool, RunConfig
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.workload import Workload

#: Share of its time that a worker can compute before requests wait too long, by experience.
BUSY = 0.85
#: Requests differ: the mean time per token must stay below the bound by this factor.
_BELOW = 0.93
_ROWS = 2048


def shapes(config: RunConfig, sizes: Sequence[int]) -> Iterator[RunConfig]:
    """Return a configuration for each shape, of one worker of each kind.

    Parameters
    ----------
    config
        Policy, GPUs and load. Engines that share experts (``data_parallel_size``) are searched in
        pools of one size only.
    sizes
        GPUs of an engine to choose from.
    """
    together = _may_be_colocated(config)
    grouped = config.data_parallel_size > 1
    dense = load_model(config.model).is_dense
    for decode in sizes:
        ways = [config.enable_expert_parallel]
        if decode > 1 and not (ways[0] or grouped or dense):
            ways.append(True)
        for whole in ways:
            sized = config.model_copy(
                update={"tensor_parallel_size": decode, "enable_expert_parallel": whole}
            )
            yield sized.model_copy(update={"topology": "1P1D"})
            if together:
                yield sized.model_copy(update={"topology": "1C", "prefill": Pool()})
        for prefill in sizes:
            if prefill != decode and not grouped:
                pool = config.prefill.model_copy(update={"tensor_parallel_size": prefill})
                yield config.model_copy(
                    update={"tensor_parallel_size": decode, "prefill": pool, "topology": "1P1D"}
                )


def _may_be_colocated(config: RunConfig) -> bool:
    """Whether co-located workers could serve the configuration."""
    own = config.prefill.model_copy(update={"price_per_gpu_hour": None})
    return own == Pool() and registry.needs("policy", config.policy).signature is None


def estimate(each: tuple[float, float], rate: float, *, colocated: bool) -> tuple[int, int]:
    """Estimate the workers that a rate takes, (prefill, decode) or (0, co-located).

    ``each`` is what a worker of either kind serves, see `capacity`.
    """
    prefill, decode = each
    x = 0 if colocated else max(1, math.ceil(rate / prefill))
    return x, max(1, math.ceil(rate / decode))


def capacity(config: RunConfig, objective: Objective, workload: Workload) -> tuple[float, float]:
    """Estimate the requests per second of a prefill and of a decode (or co-located) worker.

    - A prefill worker computes steps full of mean prompts for 85% of its time.
    - A decode worker runs the batch with the most tokens per second that keeps the TPOT bound and
      has KV blocks for mean contexts. A step activates as many experts as so many random tokens
      of the trace.
    - A co-located worker spends what prompts take, and its decode steps are longer by that share:
      with prompts of e seconds, n output tokens and steps of s(b) seconds, it serves a rate r where
      r n s(b) <= b (1 - r e) and s(b) <= (1 - r e) TPOT for some batch b.

    Workers whose engines share experts are not estimated: infinity. Less than a request in an hour
    counts as one. ``workload`` is the load.
    """
    prepared = prepare(config)
    prompt, output = float(workload.prompt_len.mean()), float(workload.output_len.mean())
    prefill, decode = prepared.spec.prefill, prepared.spec.decode
    if prefill.group is not None or decode.group is not None:
        return math.inf, math.inf
    prompt_s = _prompt_s(prefill, max(1, int(prompt)))
    bound_s = math.inf if objective.level.tpot is None else objective.level.tpot / 1e3 * _BELOW
    context = prompt + output / 2
    room = decode.n_blocks * config.block_size / max(context, 1.0)
    largest = max(1, min(decode.max_num_seqs, int(room)))
    batch, step_s = _decode_steps(
        decode.step_time, decode.n_expert_ranks, prepared.trace, largest, context
    )
    if config.n_prefill == 0:
        served = batch / (output * step_s + batch * prompt_s)
        in_time = np.maximum(1.0 - step_s / bound_s, 0.0) / prompt_s
        best = np.minimum(np.minimum(served, in_time), BUSY / prompt_s).max()
    else:
        best = np.where(step_s <= bound_s, batch / step_s, 0.0).max() * _BELOW / output
    return BUSY / prompt_s, max(float(best), 1.0 / 3600.0)


def _prompt_s(engine: EngineSpec, length: int) -> float:
    """Return the time of a prompt in full steps, s."""
    n = min(engine.max_num_batched_tokens // length, engine.max_num_seqs)
    if n <= 1:
        return engine.step_time.prompt_s(length)
    return engine.step_time.prefill_s([length] * n, [0] * n) / n


@lru_cache(maxsize=16)
def _decode_steps(
    step_time: StepTimeModel, ranks: int, trace: RoutingTrace | None, largest: int, context: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return batches up to the largest and the time of a decode step of each, s."""
    batch = np.unique(np.geomspace(1, largest, 48).astype(np.int64))
    experts = np.zeros(len(batch))
    if trace is not None:
        experts = np.maximum(_expected_experts(trace, batch), step_time.model.top_k) / ranks
    step_s = [
        step_time.decode_s([active] * step_time.n_moe_layers, n, context)
        for n, active in zip(batch.tolist(), experts.tolist(), strict=True)
    ]
    return batch.astype(float), np.array(step_s)


def _expected_experts(trace: RoutingTrace, batch: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how many experts of a layer a batch of random tokens activates, mean over layers."""
    missed = 1.0 - _expert_shares(trace)
    return np.array([float((1.0 - missed**n).sum() / len(missed)) for n in batch.tolist()])


@lru_cache(maxsize=4)
def _expert_shares(trace: RoutingTrace) -> NDArray[np.float64]:
    """Return the share of tokens that choose each expert, ``[layers, experts]``."""
    rows = np.linspace(0, len(trace.bits) - 1, min(_ROWS, len(trace.bits))).astype(np.int64)
    words = np.ascontiguousarray(trace.bits[rows])
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    shares: NDArray[np.float64] = bits[..., : trace.n_experts].mean(axis=0)
    return shares
