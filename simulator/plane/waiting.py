"""When prompts wait though there is room: for more prompts, for other engines, for an interval."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.admission import budget_left
from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv_cache import blocks_of, n_free
from eldr_sim.simulator.plane.kv_manager import Engines
from eldr_sim.simulator.plane.state import TO_THE_END

_NONE = np.int64(0)


@compiled()
def defers_prompts(engines: Engines, w: int) -> Any:
    """Whether an engine leaves prompts alone in this step: others decode meanwhile."""
    pool, worker = engines.pools[engines.pool_of[w]], engines.workers[w]
    if worker.batch + worker.riding == 0:
        return False
    if pool.wait_steps > 0:
        return _waits_for_others(engines, w)
    if pool.prefill_schedule_interval == 1:
        return False
    return engines.workers[worker.leader].n_group_steps % pool.prefill_schedule_interval != 0


@compiled()
def _waits_for_others(engines: Engines, w: int) -> Any:
    """Whether prompts wait for more to compute with (TensorRT-LLM's batch_wait_timeout_iters).

    They do so for as many steps, until the step's tokens reach the share of its budget.
    """
    pool, worker, requests = engines.pools[engines.pool_of[w]], engines.workers[w], engines.requests
    budget, places = budget_left(engines, w), pool.max_num_seqs - worker.batch - worker.prefilling
    tokens, request = _NONE, worker.oldest
    for i in range(worker.batch, worker.batch + worker.prefilling):
        tokens += min(engines.sequences[w, i].todo, budget - tokens)
    size, free = engines.settings[0].block_size, n_free(engines.workers, w)
    while request >= 0 and places > 0 and tokens + requests[request].prompt_len <= budget:
        held = requests[request].prompt_len
        if pool.reserve == TO_THE_END:
            held += requests[request].output_len
        free -= blocks_of(held, size)
        if free < 0:
            break
        tokens += requests[request].prompt_len
        request, places = requests[request].newer, places - 1
    if tokens == 0:
        return False
    if worker.waited < pool.wait_steps and worker.tokens + tokens < pool.wait_tokens:
        worker.waited += 1
        return True
    worker.waited = 0
    return False


@compiled()
def waits_for_engines(engines: Engines, w: int) -> Any:
    """Whether prompts wait until all engines of the group have some and a place for them.

    They do so for ``balance_steps`` steps at most, counting the one that goes on, and for
    ``batching_steps`` once all have some, unless an engine decodes nothing (TensorRT-LLM's
    ``_balance_adp_requests``, `pyexecutor/py_executor.py`). The first engine that comes to the
    group's next step decides for all, when none of them has taken anybody in.
    """
    pool, workers = engines.pools[engines.pool_of[w]], engines.workers
    leader = workers[workers[w].leader]
    if leader.balanced_step == leader.n_group_steps:
        return leader.balances
    leader.balanced_step = leader.n_group_steps
    all_have, all_decode = True, True
    for member in range(workers[w].leader, workers[w].leader + leader.width):
        worker, decoding = workers[member], _NONE
        for i in range(worker.batch):
            decoding += engines.sequences[member, i].tokens_left > 0
        has = worker.prefilling > 0 or max(worker.new_head, worker.preempted_head) >= 0
        all_have = all_have and has and decoding < pool.max_num_seqs
        all_decode = all_decode and bool(decoding > 0)
    leader.balances = False
    if not all_have:
        leader.waited += 1
        leader.balances = all_decode and leader.waited < pool.balance_steps
    elif all_decode:
        leader.balances = leader.batched < pool.batching_steps
        leader.batched = leader.batched + 1 if leader.balances else 0
    if all_have or not leader.balances:
        leader.waited = 0
    return leader.balances
