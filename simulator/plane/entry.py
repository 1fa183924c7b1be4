"""Conditional disaggregation: whether a prompt is computed where it will be decoded, compiled.

Such a request goes to the router of decode workers at once; nothing is transferred. What counts as
cached is the longest part of the prompt that one of those workers holds."""

from typing import Any

import numpy as np

from eldr_sim.simulator.plane.compiled import compiled
from eldr_sim.simulator.plane.kv.kv_cache import matched_tokens
from eldr_sim.simulator.plane.kv.kv_tiers import prompt_seconds

#: ``SETTINGS.entry``: never; where few tokens of the prompt are not cached (Dynamo's
#: ``isl_bounding`` and llm-d's rule); where prefill workers have much to do (Dynamo's
#: ``prefill_load``); where either holds; where it takes fewer seconds.
NEVER, SHORT, BUSY, EITHER, SECONDS = map(np.int64, range(5))


@compiled()
def _to_do(engines: Any, w: int) -> Any:
    """Return the tokens of contexts that a worker has, and of which no step has begun."""
    worker, tokens = engines.workers[w], engines.workers[w].waiting_tokens
    for i in range(worker.batch, worker.batch + worker.prefilling):
        tokens += engines.sequences[w, i].todo
    return tokens


@compiled()
def _best(engines: Any, router: Any, request: int) -> Any:
    """Return the healthy worker that has most of a prompt, of the least load, and the tokens."""
    own, best, most = router.record[0], np.int64(-1), np.int64(-1)
    for w in range(own.first_worker, own.first_worker + own.n_workers):
        if router.healthy[w]:
            tokens = matched_tokens(engines.kv, w, request, engines.requests[request].prompt_len)
            fewer = best >= 0 and tokens == most and router.loads[w] < router.loads[best]
            if tokens > most or fewer:
                best, most = np.int64(w), tokens
    return best, most


@compiled()
def _remote_s(engines: Any, router: Any, net: Any, request: int, target: int, held: int) -> Any:
    """Return the seconds to a request's first token by the fastest prefill worker; ``target``: the
    decode worker that holds ``held`` tokens of the prompt."""
    own, prompt = router.record[0], engines.requests[request].prompt_len
    table, least = engines.prompt_s, np.inf
    for w in range(own.first_worker, own.first_worker + own.n_workers):
        if router.healthy[w]:
            pool = engines.pool_of[w]
            mine = matched_tokens(engines.kv, w, request, prompt)
            seconds = prompt_seconds(table, pool, _to_do(engines, w))
            seconds += prompt_seconds(table, pool, prompt) - prompt_seconds(table, pool, mine)
            least = min(least, seconds)
    pool_of = engines.pools[engines.pool_of[target]]
    n_bytes = (prompt - held) * pool_of.kv_bytes_per_token + pool_of.kv_state_bytes
    settings = engines.settings[0]
    taken = settings.setup_s + settings.routing_s + settings.routing_token_s * prompt
    return least + taken + n_bytes / net.rate[target]


@compiled()
def stays(engines: Any, routers: Any, net: Any, request: int) -> Any:
    """Whether a request's prompt is to be computed by the worker that decodes it."""
    settings, prompt = engines.settings[0], engines.requests[request].prompt_len
    if settings.entry == NEVER:
        return False
    target, held = _best(engines, routers[1], request)
    if target < 0:
        return False
    left = prompt - held
    if settings.entry == SECONDS:
        pool, table = engines.pool_of[target], engines.prompt_s
        here = prompt_seconds(table, pool, prompt) - prompt_seconds(table, pool, held)
        here *= 1.0 + engines.workers[target].batch  # the others' next tokens wait, too
        here += prompt_seconds(table, pool, _to_do(engines, target))
        return here < _remote_s(engines, routers[0], net, request, target, held)
    short = left < settings.entry_tokens and left <= settings.entry_share * prompt
    if settings.entry == SHORT or (settings.entry == EITHER and short):
        return short
    own, least = routers[0].record[0], np.inf
    for w in range(own.first_worker, own.first_worker + own.n_workers):
        if routers[0].healthy[w]:
            budget = engines.pools[engines.pool_of[w]].max_num_batched_tokens
            least = min(least, _to_do(engines, w) / budget)
    return least > settings.entry_load
