"""What autoscalers know of a run beforehand: its pools, and for some the load to come."""

from __future__ import annotations

from functools import partial

import numpy as np

from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.scaling.base import Offered, PoolFacts, ScalingContext, remembered
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config import RunConfig
from eldr_sim.simulator.setup.prepare import PreparedRun
from eldr_sim.traces.workload import Workload


def scaling_facts(config: RunConfig, prepared: PreparedRun, workload: Workload) -> ScalingContext:
    """Return what is known of the pools of a run, and of the requests of its workload."""
    spec, fetching = prepared.spec, {name for p in config.pools for name in p.takes_over}
    pools = [
        remembered(
            PoolFacts(
                name=pool.name,
                computes=pool.name not in fetching,
                decodes=pool.decodes,
                engines=pool.engine.worker_size,
                gpus=made.units[1],
                max_num_seqs=pool.engine.max_num_seqs,
                kv_tokens=pool.engine.n_blocks * config.block_size,
                start_up_s=pool.engine.start_up_s,
                switch_s=pool.engine.graphs_s
                if config.switch_time == "graphs"
                else config.switch_time,
                prompt_s=pool.engine.prompt_s,
                step_s=partial(_decode_s, prepared.model, pool.engine),
                token_budget=pool.engine.max_num_batched_tokens,
            )
        )
        for pool, made in zip(spec.pools, config.pools, strict=True)
    ]
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


def _decode_s(model: ModelDims, engine: EngineSpec, sequences: int, context: float) -> float:
    """Return the seconds of a decode step, with the experts that uniform routing activates."""
    share = model.top_k / model.n_experts if model.n_experts else 0.0
    union = model.n_experts * (1.0 - (1.0 - share) ** sequences)
    activated = [union / engine.n_expert_ranks] * engine.step_time.n_moe_layers
    return engine.step_time.decode_s(activated, sequences, context)
