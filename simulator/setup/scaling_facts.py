"""What autoscalers know of a run beforehand: its pools, and for some the load to come."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.scaling.base import Offered, PoolFacts, ScalingContext, remembered
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.mean_work import MeanWork
from eldr_sim.simulator.setup.prepare import PreparedRun
from eldr_sim.traces.workload import Workload


def scaling_facts(
    config: RunConfig,
    prepared: PreparedRun,
    workload: Workload,
    works: Sequence[Mapping[int, Callable[[], MeanWork]]],
    pauses: Mapping[str, Callable[[int, int], float]],
) -> ScalingContext:
    """Return what is known of the pools of a run, and of the requests of its workload.

    ``works``: of each pool, who tells the steps of engines that share experts, by how many there
    are, asked when an autoscaler asks; {} where they share none. ``pauses``: of pools whose engines
    come and go, see `PoolFacts.pause_s`.
    """
    spec, fetching = prepared.spec, {name for p in config.pools for name in p.takes_over}
    pools = []
    for pool, made, own in zip(spec.pools, config.pools, works, strict=True):
        facts = PoolFacts(
            name=pool.name,
            computes=pool.name not in fetching,
            decodes=pool.decodes,
            engines=pool.engine.worker_size,
            gpus=made.units[1],
            max_num_seqs=pool.engine.max_num_seqs,
            kv_tokens=pool.engine.n_blocks * config.block_size,
            start_up_s=pool.engine.start_up_s,
            switch_s=pool.engine.graphs_s if config.switch_time == "graphs" else config.switch_time,
            prompt_s=pool.engine.prompt_s,
            step_s=partial(_decode_s, prepared.model, pool.engine),
            token_budget=pool.engine.max_num_batched_tokens,
        )
        by_width = {
            n: remembered(
                facts._replace(prompt_s=_asked(work, "prompt_s"), step_s=_asked(work, "decode_s"))
            )
            for n, work in own.items()
        }
        facts = by_width[max(by_width)] if by_width else remembered(facts)
        if pool.name in pauses:
            pause_s = lru_cache(4096)(pauses[pool.name])
            facts = facts._replace(widths=by_width, pause_s=pause_s)
        pools.append(facts)
    arrival_s = workload.arrival_s
    prompts, outputs = (
        np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
        for tokens in (workload.prompt_len, workload.output_len)
    )

    def known(begin: float, end: float) -> Offered:
        first, last = np.searchsorted(arrival_s, (begin, end))
        n = max(1, int(last - first))
        sums = prompts[last] - prompts[first], outputs[last] - outputs[first]
        return Offered(float(last - first), float(sums[0]) / n, float(sums[1]) / n)

    return ScalingContext(tuple(pools), known)


def _asked(work: Callable[[], MeanWork], what: str) -> Callable[..., float]:
    """Return a question to mean work that is worked out with the first one."""
    return lambda *asked: float(getattr(work(), what)(*asked))


def _decode_s(model: ModelDims, engine: EngineSpec, sequences: int, context: float) -> float:
    """Return the seconds of a decode step, with the experts that uniform routing activates."""
    share = model.top_k / model.n_experts if model.n_experts else 0.0
    union = model.n_experts * (1.0 - (1.0 - share) ** sequences)
    activated = [union / engine.n_expert_ranks] * engine.step_time.n_moe_layers
    return engine.step_time.decode_s(activated, sequences, context)
