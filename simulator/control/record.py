"""What happened in a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.plane import state
from eldr_sim.simulator.plane.choose import Router
from eldr_sim.simulator.plane.engine import Engines
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


@dataclass(frozen=True)
class RunRecord:
    """What happened."""

    requests: NDArray[np.void]  #: `REQUEST`, every request that arrived, in order of arrival
    #: ``prefill_steps``, ``decode_steps``: ``state.STEP``, in the order in which they began: the
    #: steps of prefill workers that ended, and those of decode (or co-located) workers.
    prefill_steps: NDArray[np.void]
    decode_steps: NDArray[np.void]
    #: ``prefill_group_steps``, ``decode_group_steps``: ``state.GROUP_STEP``: the steps of engines
    #: that share experts. ``n_busy`` records of ``prefill_steps`` or ``decode_steps`` belong to
    #: each, in order.
    prefill_group_steps: NDArray[np.void]
    decode_group_steps: NDArray[np.void]
    gaps: NDArray[np.void]  #: ``state.GAP``, where preemption came between two tokens
    relocations: NDArray[np.void]  #: ``relocation.RELOCATION``: whenever experts moved
    window: tuple[float, float]  #: the measured window, s
    end_s: float  #: when the run ended
    #: ``streamed_s``, ``stall_s``: seconds that steps took which streamed weights, and of which
    #: they waited for these.
    streamed_s: float = 0.0
    stall_s: float = 0.0
    #: ``[k + 2]``: verify steps of sequences by the drafts accepted, and all drafts verified; None
    #: where nothing was drafted.
    drafted: NDArray[np.int64] | None = None
    #: ``retries``, ``faults``: how often each request was sent again, None where nothing went
    #: wrong; what did.
    retries: NDArray[np.int32] | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def completed(self) -> NDArray[np.bool_]:
        """Which requests generated all their tokens."""
        return np.asarray(self.requests["outcome"] == state.COMPLETED)

    def outcomes(self) -> list[str]:
        """Return how each request ended, see `state.OUTCOMES`."""
        return [state.OUTCOMES[code] for code in self.requests["outcome"].tolist()]


def with_columns(
    requests: NDArray[np.void], engines: Engines, routers: tuple[Router, ...]
) -> NDArray[np.void]:
    """Return requests, changed in place, as results have them, by their routers' numbers.

    ``prefill_worker`` has computed the prompt, or was to; ``decode_worker`` has decoded it, or was
    to; -1: none.
    """
    first = np.array([int(router.record["first_worker"][0]) for router in routers])
    pools, pool_of = engines.pools, np.append(engines.pool_of, 0)
    own = np.append(first[pools["router"]][engines.pool_of], 0)
    worker, source = requests["worker"].copy(), requests["source"].copy()
    here = (worker >= 0) & (pools["then"][pool_of[worker]] == state.HERE)
    computed = np.where(here & (source < 0) & (requests["prefill_start_s"] < 0.0), -1, worker)
    computed = np.where(source >= 0, source, computed)
    requests["worker"] = np.where(here, worker - own[worker], -1)
    requests["source"] = np.where(computed >= 0, computed - own[computed], -1)
    return requests.view(REQUEST)
