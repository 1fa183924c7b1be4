"""An autoscaler at work: it polls a cluster, and starts, stops and switches workers. The worker
that leaves is the one with the least loss, in seconds of a worker: for what waits, its longest
output, KV blocks that no other cache has, and experts that only its requests activate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import simpy

from eldr_sim.arrays import Array, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.policies.scaling import base
from eldr_sim.simulator.control.actions import Actions
from eldr_sim.simulator.control.compiled_cluster import CompiledCluster
from eldr_sim.simulator.control.control_api import Control, Worker
from eldr_sim.simulator.control.record import DRAINING, OFF, READY, RESERVED, STARTING
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.kv.radix_tree import shared_hashes
from eldr_sim.simulator.setup.cluster_spec import EngineSpec

_PROMPT = 4096  #: tokens of a prompt whose seconds a token count


def leaving_s(
    acts: Actions, facts: base.PoolFacts, engine: EngineSpec, workers: Sequence[int]
) -> list[float]:
    """Return the seconds that the leaving of each of a pool's ``workers`` that serve takes."""
    engines = [acts.engines(facts.name, number) for number in workers]
    cached = [_cached(acts, engine) for engine in engines]
    unions = [_union(acts, engine) for engine in engines]
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


def _cached(acts: Actions, engines: range) -> Ints:
    """Return the hashes of the blocks that can be found in a worker's prefix caches."""
    kv = acts.cluster.arrays.engines.kv
    found = [np.zeros(0, np.int64)]
    for w in engines:
        found.append(shared_hashes(kv, w))
        if w < len(kv.hash_slots):
            blocks = kv.blocks[w][kv.hash_slots[w][kv.hash_slots[w] > 0] - 1]
            found.append(blocks["block_hash"][blocks["run"] == 0])
    return np.unique(np.concatenate(found))


def _alone(cached: Sequence[Ints], at: int) -> Ints:
    """Return what is cached by one of several workers alone."""
    others = [hashes for i, hashes in enumerate(cached) if i != at]
    return np.setdiff1d(cached[at], np.concatenate(others) if others else [], assume_unique=False)


def _union(acts: Actions, engines: range) -> Words:
    """Return the experts that a worker's running sequences activate next, a bit each."""
    arrays = acts.cluster.arrays
    rows = [arrays.engines.sequences[w]["row"][: int(acts.workers["batch"][w])] for w in engines]
    return np.asarray(np.bitwise_or.reduce(arrays.bits[np.concatenate(rows)], axis=0))


def _longest(acts: Actions, engines: range) -> tuple[int, int, float]:
    """Return the most output tokens left of a sequence, its engine's batch and mean context."""
    longest = (0, 1, 1.0)
    for w in engines:
        n = int(acts.workers["batch"][w])
        if n:
            left = int(acts.cluster.arrays.engines.sequences[w]["tokens_left"][:n].max())
            longest = max(longest, (left, n, float(acts.workers["context"][w]) / n))
    return longest


def _expert_s(engine: EngineSpec, batch: int, context: float) -> float:
    """Return the seconds by which an expert more in one layer makes a step longer."""
    layers = engine.step_time.n_moe_layers
    if not layers or batch < 1:
        return 0.0
    some, more = ([float(n)] * layers for n in (1, 2))
    steps = [engine.step_time.decode_s(each, batch, context) for each in (some, more)]
    return (steps[1] - steps[0]) / layers


@dataclass(frozen=True)
class ScalingRule:
    """What bounds an autoscaler, and how it sees and acts; workers are by pool."""

    minimum: Mapping[str, int]
    initial: Mapping[str, int]
    gpu_budget: int | None = None
    at_exit: bool = False  #: requests are counted when they are done
    metric_delay_s: float = 0.0
    drain_timeout_s: float = math.inf


def check_budget(budget: int | None, used: int) -> None:
    """Raise InputError where the workers that there are at first use more GPUs than allowed."""
    if budget is not None and used > budget:
        problem = f"{budget} GPUs, and the initial workers use {used}"
        raise InputError("gpu_budget", problem, "more, or fewer initial_workers")


class Autoscaling:
    """Lets a policy decide how many workers there are, within ``rule`` and the topology. The one
    that starts last goes, or that of the fewest seconds (`leaving_s`); of an elastic group the
    last."""

    def __init__(
        self,
        control: Control,
        policy: base.Autoscaler,
        facts: base.ScalingContext,
        rule: ScalingRule,
    ) -> None:
        self.control, self.policy, self.rule = control, policy, rule
        self._cluster: CompiledCluster = control.cluster
        self._env = control.cluster.env
        self._facts = {pool.name: pool for pool in facts.pools}
        self._gpus = {pool.name: pool.gpus for pool in facts.pools}
        self._switch_s = {pool.name: pool.switch_s for pool in facts.pools}
        self._states, begin = control.states, policy.begin()
        self._seen = self._oldest = 0  # requests that have arrived, and the first that is open
        self._last_s = 0.0
        for name, states in self._states.items():
            wanted = begin.get(name, rule.initial.get(name, len(states)))
            fixed = begin.get(name, 0) if policy.name == "none" else 0
            told = {"min_workers": rule.minimum[name], "autoscale": fixed}
            for field, most in (told | {"initial_workers": rule.initial.get(name, 0)}).items():
                if most > len(states):
                    problem = f"{most} {name} workers"
                    raise InputError(field, problem, f"up to the topology's {len(states)}")
            n = min(max(wanted, rule.minimum[name]), len(states))
            for number in range(n, len(states)):
                control.absent(Worker(name, number))
        check_budget(rule.gpu_budget, self._used())
        control.acted = True
        if math.isfinite(policy.interval_s):
            self._env.at(policy.interval_s, self._look)

    def _look(self, event: simpy.Event) -> None:
        """Look now, and an interval later again; a process would hide whose mistake it is."""
        fleet, delay = self.fleet(), self.rule.metric_delay_s
        if delay:
            self._env.at(self._env.now + delay, partial(self._do, fleet))
        else:
            self._do(fleet, event)
        self._env.at(self._env.now + self.policy.interval_s, self._look)

    def _do(self, seen: base.Fleet, _event: simpy.Event) -> None:
        for said in self.policy.decide(seen):
            if isinstance(said, base.Switch):
                self._switch(said)
            else:
                self._aim(said.pool, int(said.workers))

    # --- what there is ---

    def _of(self, pool: str, *states: int) -> list[int]:
        return [number for number, what in enumerate(self._states[pool]) if what in states]

    def _used(self) -> int:
        """Return the GPUs that workers hold; a place that waits for one holds none."""
        return sum(
            self._gpus[pool] * sum(what not in (OFF, RESERVED) for what in states)
            for pool, states in self._states.items()
        )

    def fleet(self) -> base.Fleet:
        """Return what an autoscaler may see now."""
        now, last = float(self._env.now), self._last_s
        order = self._cluster.arrays.engines.sessions.order
        arrived = int(self._cluster.arrays.clock["arrived"][0])
        requests = self._cluster.requests[order[self._oldest : arrived]]
        ended = requests["outcome"] != state.OPEN
        at_s = requests["finish_s"]
        done = requests[(requests["outcome"] == state.COMPLETED) & (at_s > last) & (at_s <= now)]
        coming = done if self.rule.at_exit else self._cluster.requests[order[self._seen : arrived]]
        self._seen, self._last_s = arrived, now
        still = np.flatnonzero(~(ended & (at_s <= last)))
        self._oldest += int(still[0]) if len(still) else len(requests)
        several = done[done["output_len"] > 1]
        gaps = (several["finish_s"] - several["first_token_s"]) / (several["output_len"] - 1)
        figures = {
            "arrived": len(coming),
            "completed": len(done),
            "prompt_tokens": _mean(coming["prompt_len"]),
            "output_tokens": _mean(done["output_len"]),
            "cached_tokens": _mean(np.maximum(done["cached_tokens"], 0)),
            "ttft_s": _mean(done["first_token_s"] - done["sent_s"]),
            "itl_s": _mean(gaps),
        }
        pools = tuple(self._view(name, figures) for name in self._states)
        return base.Fleet(now, now - last, pools)

    def _view(self, pool: str, figures: dict[str, Any]) -> base.PoolView:
        ready = self._of(pool, READY)
        return base.PoolView(
            name=pool,
            ready=len(ready),
            starting=len(self._of(pool, STARTING, RESERVED)),
            draining=len(self._of(pool, DRAINING)),
            minimum=self.rule.minimum[pool],
            maximum=len(self._states[pool]),
            **figures,
            **self._signals(pool, ready),
        )

    def _signals(self, pool: str, workers: list[int]) -> dict[str, Any]:
        """Return the columns of some workers of a pool, all their engines together."""
        engines = self._cluster.arrays.engines
        mine = [self.control.acts.engines(pool, number) for number in workers]
        size = len(mine[0]) if mine else 1
        at = np.array([w for each in mine for w in each], np.int64)
        told, n_blocks = engines.workers[at], engines.pools["n_blocks"][engines.pool_of[at]]
        kv = 1.0 - (told["n_blank"] + told["n_idle"]) / np.maximum(n_blocks, 1)

        def each(values: Array) -> Array:
            return np.asarray(values.reshape(-1, size).sum(axis=1))

        return {
            "waiting": each(told["n_waiting"]),
            "running": each(told["batch"] + told["prefilling"] + told["leaving"]),
            "waiting_tokens": each(told["waiting_tokens"]),
            "running_tokens": each(told["context"] + told["leaving_tokens"]),
            "kv_usage": each(kv) / size,
        }

    # --- what is done ---

    def _aim(self, pool: str, wanted: int) -> None:
        """Let a pool have so many workers that serve or will, within the bounds."""
        states = self._states[pool]
        wanted = min(max(wanted, self.rule.minimum[pool]), len(states))
        more = wanted - len(self._of(pool, READY, STARTING, RESERVED))
        budget, each = self.rule.gpu_budget, self._gpus[pool]
        elastic = pool in self._cluster.elastic  # who drains would be in the way of who comes
        free = self._of(pool, OFF, *[DRAINING] * elastic)
        for number in free[: max(0, more)]:
            there = self._states[pool][number] == DRAINING
            if there or budget is None or self._used() + each <= budget:
                self.control.start(Worker(pool, number))
        if more < 0:
            for number in self._to_go(pool)[:-more]:
                self.control.stop(Worker(pool, number), self.rule.drain_timeout_s)

    def _to_go(self, pool: str) -> list[int]:
        """Return workers in the order in which they can be spared."""
        ready = self._of(pool, READY)
        starting = [n for n in self._of(pool, STARTING) if self.control.starts(Worker(pool, n))]
        if pool in self._cluster.elastic:
            return [*starting[::-1], *ready[::-1]]
        facts = self._facts[pool]
        spec = self._cluster.spec
        engine = spec.pools[spec.names.index(pool)].engine
        costs = leaving_s(self.control.acts, facts, engine, ready)
        least = sorted(zip(costs, [-number for number in ready], strict=True))
        return [*starting[::-1], *(-number for _, number in least)]

    def _switch(self, said: base.Switch) -> None:
        """Let workers change their pool, as many as may go and find a place."""
        source = said.source
        spare = len(self._of(source, READY)) - self.rule.minimum[source]
        n = min(said.workers, spare, len(self._of(said.target, OFF)))
        ready = set(self._of(source, READY))
        going = [number for number in self._to_go(source) if number in ready]
        for number in going[: max(0, n)]:
            seconds = self._switch_s[said.target]
            self.control.switch(Worker(source, number), said.target, seconds)


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else math.nan
