"""What happened in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eldr_sim.arrays import Array, Bools, Floats, Int32s, Ints, Records
from eldr_sim.simulator.plane import state

if TYPE_CHECKING:  # who reads results needs no cluster
    from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
    from eldr_sim.simulator.setup.fault_plan import Fault

#: ``state.REQUEST`` as results have it: `with_columns`.
REQUEST = np.dtype(
    {
        "names": [
            {"source": "prefill_worker", "worker": "decode_worker"}.get(name, name)
            for name in state.REQUEST.names or ()
        ],
        "formats": [field[0] for field in (state.REQUEST.fields or {}).values()],
        "offsets": [field[1] for field in (state.REQUEST.fields or {}).values()],
        "itemsize": state.REQUEST.itemsize,
    }
)


#: What a worker is: not there, or on its way, serving, finishing what it has, or a place that a
#: worker of another pool will take.
OFF, STARTING, READY, DRAINING, RESERVED = range(5)
#: That a worker of a pool is something else from a time on, s; all are READY before.
STATE = np.dtype([("at_s", np.float64), ("pool", np.int32), ("worker", np.int32),
                  ("state", np.int32)])  # fmt: skip


def within(log: Array, inside: Bools) -> Array:
    """Return ``log[inside]``: a view where these lie in a row, as a log in order of time has them.

    Its records are long, and a copy takes longer than what is read of it."""
    n, first = int(np.count_nonzero(inside)), int(np.argmax(inside)) if len(inside) else 0
    return log[first : first + n] if inside[first : first + n].all() else log[inside]


class TierRecord(NamedTuple):
    """What KV tiers did; columns of requests are those of `RunRecord.requests`."""

    hits: Int32s  #: ``[requests, tiers]``: tokens that prompts took from them
    loads: Records  #: ``kv_tiers.LOAD``
    #: ``[tiers]``: blocks ``loaded`` by workers and ``stored`` by them, and ``evicted``,
    loaded: Ints
    stored: Ints
    evicted: Ints
    stores: list[int]  #: stores of each,
    capacity: list[int]  #: and blocks of one


@dataclass(frozen=True)
class RunRecord:
    """What happened."""

    requests: Records  #: `REQUEST`, every request that arrived, in order of arrival,
    numbers: Int32s  #: and its number in the workload
    #: ``prefill_steps``, ``decode_steps``: ``state.STEP``, in the order in which they began: the
    #: steps of prefill workers that ended, and those of decode (or co-located) workers.
    prefill_steps: Records
    decode_steps: Records
    #: ``prefill_group_steps``, ``decode_group_steps``: ``state.GROUP_STEP``: the steps of engines
    #: that share experts. ``n_busy`` records of ``prefill_steps`` or ``decode_steps`` belong to
    #: each, in order.
    prefill_group_steps: Records
    decode_group_steps: Records
    gaps: Records  #: ``state.GAP``, where preemption came between two tokens
    relocations: Records  #: ``relocation.RELOCATION``: whenever experts moved
    window: tuple[float, float]  #: the measured window, s
    end_s: float  #: when the run ended
    #: ``streamed_s``, ``stall_s``: seconds that steps took which streamed weights, and of which
    #: they waited for these.
    streamed_s: float = 0.0
    stall_s: float = 0.0
    #: ``[k + 2]``: verify steps of sequences by the drafts accepted, and all drafts verified; None
    #: where nothing was drafted.
    drafted: Ints | None = None
    tiers: TierRecord | None = None  #: None where there are none
    #: ``retries``, ``faults``: how often each request was sent again, None where nothing went
    #: wrong; what did.
    retries: Int32s | None = None
    faults: tuple[Fault, ...] = ()
    #: `STATE`: what workers were and when, in order; None where nothing was done to them.
    states: Records | None = None

    @property
    def completed(self) -> Bools:
        """Which requests generated all their tokens."""
        return np.asarray(self.requests["outcome"] == state.COMPLETED)

    @property
    def load_start_s(self) -> Floats:
        """When requests began to wait for KV tiers, s; a request that did not wait began its prompt
        then."""
        began = self.requests["prefill_start_s"]
        if self.tiers is None:
            return began
        start = self.tiers.loads["start_s"]
        return np.where((start > 0.0) & ((began < 0.0) | (start < began)), start, began)

    def outcomes(self) -> list[str]:
        """Return how each request ended, see `state.OUTCOMES`."""
        return [state.OUTCOMES[code] for code in self.requests["outcome"].tolist()]


def _places(spec: ClusterSpec) -> tuple[Bools, Ints, Ints]:
    """Return which workers decode; their numbers there, and those at their routers, else."""
    decodes = np.repeat([pool.decodes for pool in spec.pools], [pool.n for pool in spec.pools])
    at_router = np.concatenate([np.arange(len(workers)) for workers in spec.routers])
    return decodes, np.where(decodes, np.cumsum(decodes) - 1, -1), at_router


def by_role(spec: ClusterSpec, log: Records, field: str) -> tuple[Records, Records]:
    """Return the records of workers that only compute prompts, and of those that decode."""
    decodes, own, at_router = _places(spec)
    if decodes.all():
        return log[:0], log
    mine = decodes.take(log[field])
    # Ten times as fast as to index records by masks.
    prefill, decode = log.take(np.flatnonzero(~mine)), log.take(np.flatnonzero(mine))
    prefill[field], decode[field] = at_router[prefill[field]], own[decode[field]]
    return prefill, decode


def with_columns(requests: Records, spec: ClusterSpec) -> Records:
    """Return requests, changed in place, with ``prefill_worker`` (computed the prompt, or was to,
    by its router's numbers) and ``decode_worker`` (decoded it, or was to), -1: none."""
    decodes, own, at_router = (np.append(column, -1) for column in _places(spec))
    worker, source = requests["worker"].copy(), requests["source"].copy()
    here = (worker >= 0) & (decodes[worker] == 1)
    computed = np.where(here & (source < 0) & (requests["prefill_start_s"] < 0.0), -1, worker)
    computed = np.where(source >= 0, source, computed)
    requests["worker"] = own[np.where(here, worker, requests["reserved"])]
    requests["source"] = at_router[computed]
    return requests.view(REQUEST)
