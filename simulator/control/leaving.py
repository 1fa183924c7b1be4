"""What it takes that a worker leaves: the worker whose sessions and experts others can take best.

All in seconds of a worker:

- it serves on until its requests have ended: what waits is computed, the longest output decoded;
- the blocks of its prefix cache that no other worker has are computed again;
- experts that only its requests activate are activated elsewhere in as many steps as its longest
  output still has.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eldr_sim.policies.scaling.base import PoolFacts
from eldr_sim.simulator.control.actions import Actions
from eldr_sim.simulator.setup.cluster_spec import EngineSpec

_PROMPT = 4096  #: tokens of a prompt whose seconds a token count


def leaving_s(
    acts: Actions, facts: PoolFacts, engine: EngineSpec, workers: Sequence[int]
) -> list[float]:
    """Return the seconds that the leaving of each of a pool's workers takes.

    ``facts``, ``engine``: of the pool; ``workers``: those that serve.
    """
    engines = [acts.engines(facts.name, number) for number in workers]
    cached = [_cached(acts, own) for own in engines]
    unions = [_union(acts, own) for own in engines]
    token_s = facts.prompt_s(_PROMPT) / _PROMPT / facts.engines
    seconds = []
    for at, own in enumerate(engines):
        told = acts.workers[own.start : own.stop]
        waits = float(told["waiting_tokens"].sum()) * token_s if facts.computes else 0.0
        left, n, context = _longest(acts, own)
        step_s = facts.step_s(n, context) if left else 0.0
        alone = _alone(cached, at)
        again = len(alone) * acts.cluster.spec.block_size * token_s if facts.computes else 0.0
        others = np.bitwise_or.reduce([u for i, u in enumerate(unions) if i != at] or [unions[at]])
        experts = int(np.bitwise_count(unions[at] & ~others).sum())
        seconds.append(waits + left * (step_s + experts * _expert_s(engine, n, context)) + again)
    return seconds


def _cached(acts: Actions, engines: range) -> NDArray[np.int64]:
    """Return the hashes of the blocks that can be found in a worker's prefix caches."""
    kv = acts.cluster.arrays.engines.kv
    found = [np.zeros(0, np.int64)]
    for w in engines:
        if w < len(kv.hash_slots):
            blocks = kv.hash_slots[w][kv.hash_slots[w] > 0] - 1
            found.append(kv.blocks["block_hash"][w][blocks])
    return np.unique(np.concatenate(found))


def _alone(cached: Sequence[NDArray[np.int64]], at: int) -> NDArray[np.int64]:
    """Return what is cached by one of several workers alone."""
    others = [hashes for i, hashes in enumerate(cached) if i != at]
    return np.setdiff1d(cached[at], np.concatenate(others) if others else [], assume_unique=False)


def _union(acts: Actions, engines: range) -> NDArray[np.uint64]:
    """Return the experts that a worker's running sequences activate next, a bit each."""
    arrays = acts.cluster.arrays
    rows = [arrays.engines.sequences[w]["row"][: int(acts.workers["batch"][w])] for w in engines]
    return np.asarray(np.bitwise_or.reduce(arrays.bits[np.concatenate(rows)], axis=0))


def _longest(acts: Actions, engines: range) -> tuple[int, int, float]:
    """Return the most output tokens left of a sequence, its engine's batch and mean context."""
    found = (0, 1, 1.0)
    for w in engines:
        n = int(acts.workers["batch"][w])
        if n:
            left = int(acts.cluster.arrays.engines.sequences[w]["tokens_left"][:n].max())
            found = max(found, (left, n, float(acts.workers["context"][w]) / n))
    return found


def _expert_s(engine: EngineSpec, batch: int, context: float) -> float:
    """Return the seconds by which an expert more in one layer makes a step longer."""
    layers = engine.step_time.n_moe_layers
    if not layers or batch < 1:
        return 0.0
    some, more = ([float(n)] * layers for n in (1, 2))
    steps = [engine.step_time.decode_s(each, batch, context) for each in (some, more)]
    return (steps[1] - steps[0]) / layers
