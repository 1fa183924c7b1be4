"""What the reference model does not model, refused by the name of its option."""

from collections.abc import Mapping
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.setup.config.engine_rules import EngineRules


def refuse(inputs: RunInputs, chosen: Mapping[str, type[Any]]) -> None:
    """Raise InputError for what only the compiled plane runs. ``chosen``: other workers than
    the model's own by pool, which may handle streamed layers or follow another engine."""
    spec, workload = inputs.spec, inputs.workload
    engines = [pool.engine for pool in spec.pools]
    drafts = [engine.speculation.config for engine in engines if engine.speculation is not None]
    follows = {pool.name: getattr(chosen.get(pool.name), "follows", "") for pool in spec.pools}
    handed_to = {pool.then for pool in spec.pools}
    others = [pool.engine for pool in spec.pools
              if not (follows[pool.name] or pool.engine.rules.fills_up)]  # fmt: skip
    fills_up = [pool for pool in spec.pools if pool.engine.rules.fills_up]
    plain = EngineRules()
    ruled = ("mixed_steps", "whole_prompts", "poll_steps", "wait_steps", "reserve", "fewest_first",
             "token_with_kv")  # fmt: skip
    policies = [policy for policy in inputs.policies if policy is not None]
    stale = workload.prefix_block_tokens and (
        spec.kv_signal != "exact" or spec.signal_interval_s > 0.0
    )
    refused = {
        "engine": any(getattr(engine.rules, name) != getattr(plain, name)
                      for engine in others for name in ruled)
        or any(follows[p.name] not in ("", p.engine.engine) for p in spec.pools),
        "topology": len(spec.routers) > 2
        or any(pool.router in handed_to for pool in fills_up
               if getattr(chosen.get(pool.name), "scheduler_class", None) is None),
        "workload": workload.parent is not None or workload.n_warming > 0,
        "max_active_sessions": spec.max_active_sessions is not None,
        "kv_tiers": bool(spec.tiers),
        "conditional_disagg": bool(spec.conditional.entry),
        "trace_replay": inputs.replay.period > 0,
        "enable_elastic_ep": bool(inputs.elastic),
        "speculative_config.rejected_experts": any(c.rejected_experts != "next" for c in drafts),
        "speculative_config.eagle_topk": any(c.depth != c.num_speculative_tokens for c in drafts),
        "prefill_policy": any(policy.needs.blocks for policy in policies),
        "on_blocks": inputs.on_blocks is not None,
        "kv_signal": any(policy.needs.matched for policy in policies) and bool(stale),
        "policy": any(policy.needs.session_signature for policy in policies),
        "prefill.experts": any(pool.engine.layout is not None and pool.name not in chosen
                               and pool.engine.layout.has_steps_of_its_own for pool in spec.pools),
        "speculative_config": any(
            engine.speculation is not None and (engine.group is not None or engine.rules.fills_up)
            for engine in engines
        ),
        "replica_choice": inputs.replica_policy is not None,
        "eplb_interval": inputs.relocations is not None,
    }  # fmt: skip
    for field, unknown in refused.items():
        if unknown:
            raise InputError(field, "the SimPy backend does not model it", "--backend compiled")
