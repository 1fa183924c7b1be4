"""Shapes of clusters that a plan chooses from: engines and GPUs of a worker, whole or shared
experts, prefill and decode apart (xPyD) or together (xC); and an estimate of what each takes, which
orders them and decides no verdict."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import NODE_GPUS
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.planning.slo import Objective
from eldr_sim.policies import registry
from eldr_sim.simulator.run import expected_step_of
from eldr_sim.simulator.setup.config.run_config import Pool, RunConfig
from eldr_sim.simulator.setup.expected_step import activated, expert_shares
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.workload import Workload

#: Share of its time that a worker can compute before requests wait too long, by experience.
BUSY = 0.85
#: Requests differ: the mean time per token must stay below the bound by this factor.
_BELOW = 0.93


def shapes(
    config: RunConfig,
    sizes: Sequence[int],
    engines: Sequence[int] = (),
    ffn_ranks: Sequence[int] = (),
) -> Iterator[RunConfig]:
    """Return a configuration for each shape, of one worker of each kind. ``sizes``: GPUs of an
    engine; ``engines``: of a worker, the configuration's if empty; ``ffn_ranks``: GPUs that hold
    the experts beside several engines of a decode worker; 0, or none, if not."""
    together = may_be_colocated(config)
    dense = load_model(config.engine.model).is_dense
    workers = list(product(engines or [config.cluster.data_parallel_size], sizes))
    apart = [n for n in ffn_ranks if n]
    for n, size in workers:
        for ranks in apart if n > 1 else ():
            sized = config.model_copy(
                update={"tensor_parallel_size": size, "data_parallel_size": n}
                | {"enable_expert_parallel": True, "topology": f"1P{n}A{ranks}F"}
            )
            yield from _beside(sized, workers)
        if apart and 0 not in ffn_ranks:
            continue
        ways = [config.cluster.enable_expert_parallel or n > 1]
        if size > 1 and not (ways[0] or dense):
            ways.append(True)
        for whole in ways:
            sized = config.model_copy(
                update={"tensor_parallel_size": size, "data_parallel_size": n}
                | {"enable_expert_parallel": whole, "topology": "1P1D"}
            )
            if together:
                yield sized.model_copy(update={"topology": "1C", "prefill": Pool()})
            yield from _beside(sized, workers if whole == ways[0] else ())


def usual_engines(config: RunConfig) -> list[int]:
    """Return the engines of a worker that people deploy a model with, for a search: of MLA and
    large MoE models also a node of data-parallel attention with expert parallelism, as the
    publishers' guides do for DeepSeek-R1 and V3 (vLLM's and SGLang's) and TensorRT-LLM's for
    Qwen3-235B-A22B. Large: a GPU holds no more than half of its weights."""
    one, model = config.cluster.data_parallel_size, load_model(config.engine.model)
    if one > 1 or model.is_dense or not config.cluster.generates:
        return [one]
    memory = min(load_gpu(pool.gpu or "").memory_bytes for pool in config.pools)
    large = model.weight_bytes > 2 * memory
    return [one, NODE_GPUS] if large or model.attention == "mla" else [one]


def _beside(config: RunConfig, workers: Sequence[tuple[int, int]]) -> Iterator[RunConfig]:
    """Return a shape with prefill workers like those of decode, and with each of ``workers``."""
    yield config
    n, size = config.cluster.data_parallel_size, config.cluster.tensor_parallel_size
    for of_prefill in workers:
        if of_prefill != (n, size):
            pool = config.cluster.prefill.model_copy(update=_own(config, n, *of_prefill))
            yield config.model_copy(update={"prefill": pool})


def _own(config: RunConfig, decode: int, engines: int, size: int) -> dict[str, Any]:
    """Return what a prefill pool has of its own beside decode workers of so many engines."""
    own: dict[str, Any] = {"tensor_parallel_size": size}
    if engines != decode:
        whole = config.cluster.enable_expert_parallel or engines > 1
        own |= {"data_parallel_size": engines, "enable_expert_parallel": whole}
    return own


def may_be_colocated(config: RunConfig) -> bool:
    """Whether co-located workers could serve the configuration."""
    own = config.cluster.prefill.model_copy(update={"price_per_gpu_hour": None})
    return own == Pool() and registry.needs("policy", config.policies.policy).signature is None


def estimate(each: tuple[float, float], rate: float, *, colocated: bool) -> tuple[int, int]:
    """Estimate the workers that a rate takes by `capacity`: (prefill, decode) or (0,
    co-located)."""
    prefill, decode = each
    x = 0 if colocated else max(1, math.ceil(rate / prefill))
    return x, max(1, math.ceil(rate / decode))


def capacity(config: RunConfig, objective: Objective, workload: Workload) -> tuple[float, float]:
    """Estimate the requests per second of a prefill and of a decode (or co-located) worker.

    A prefill worker computes full steps for 85% of its time; a decode worker the batch with the
    most tokens per second that keeps the TPOT bound and has KV blocks, with the experts of random
    tokens of the trace. A co-located one, with prompts of e seconds, n output tokens and steps of
    s(b) seconds, serves a rate r where r n s(b) <= b (1 - r e) and s(b) <= (1 - r e) TPOT for some
    batch b. A request an hour is the least."""
    prepared = prepare(config)
    prompt, output = float(workload.prompt_len.mean()), float(workload.output_len.mean())
    prefill, decode = prepared.spec.prefill, prepared.spec.decode
    length = max(1, int(prompt))
    if prefill.group is None:
        prompt_s = prefill.prompt_s(length)
    else:
        engines = prefill.parallelism.data_parallel_size
        prompt_s = expected_step_of(config, prepared, 0).prompt_s(length) / engines
    tokens = 1.0 if decode.speculation is None else decode.speculation.tokens_per_plain_step
    bound_s = math.inf if objective.level.tpot is None else objective.level.tpot / 1e3 * _BELOW
    context = prompt + output / 2
    room = decode.n_blocks * config.engine.block_size / max(context, 1.0)
    largest = max(1, min(decode.max_num_seqs, int(room)))
    if decode.group is None:
        batch, step_s = _decode_steps(
            decode.step_time, decode.n_expert_ranks, prepared.trace, largest, context
        )
    else:
        batches = _batches(largest)
        work = expected_step_of(config, prepared, -1)
        step_s = np.array([work.decode_s(n, context) for n in batches.tolist()])
        batch = batches.astype(float) * decode.parallelism.data_parallel_size
    step_s = step_s / tokens
    if config.cluster.n_prefill == 0:
        served = batch / (output * step_s + batch * prompt_s)
        in_time = np.maximum(1.0 - step_s / bound_s, 0.0) / prompt_s
        best = np.minimum(np.minimum(served, in_time), BUSY / prompt_s).max()
    else:
        best = np.where(step_s <= bound_s, batch / step_s, 0.0).max() * _BELOW / output
    return BUSY / prompt_s, max(float(best), 1.0 / 3600.0)


def _batches(largest: int) -> Ints:
    return np.unique(np.geomspace(1, largest, 48).astype(np.int64))


@lru_cache(maxsize=16)
def _decode_steps(
    step_time: StepTimeModel, ranks: int, trace: RoutingTrace | None, largest: int, context: float
) -> tuple[Floats, Floats]:
    """Return batches up to the largest and the time of a decode step of each, s."""
    batch = _batches(largest)
    experts = np.zeros(len(batch))
    if trace is not None:
        shares = expert_shares(trace)
        expected = [float(activated(shares, n).sum() / len(shares)) for n in batch.tolist()]
        experts = np.maximum(expected, step_time.model.top_k) / ranks
    step_s = [
        step_time.decode_s([active] * step_time.n_moe_layers, n, context)
        for n, active in zip(batch.tolist(), experts.tolist(), strict=True)
    ]
    return batch.astype(float), np.array(step_s)
