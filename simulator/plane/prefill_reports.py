"""What engines report to routers that listen: blocks, and tokens of prompts computed."""

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from eldr_sim.policies.base import RouterPolicy
from eldr_sim.simulator.plane import loop


class PrefillReports:
    """Reports of engines that routers have yet to hear of.

    ``listener``: the policy of a prefill router that listens, if it does; ``arrays``: of the
    cluster, whose first ``n_workers`` engines compute prompts; ``stale``: whether engines publish
    now and then: a router hears of blocks and tokens when it hears of signals; ``on_blocks``: is
    told of the blocks of all engines that are noted, if given.
    """

    def __init__(
        self, listener: RouterPolicy, arrays: loop.Run, n_workers: int, stale: bool,
        on_blocks: Callable[[int, Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:  # fmt: skip
        self.listener, self._on_blocks = listener, on_blocks
        self._listens = listener.needs.blocks
        self.kv, self._stale = arrays.engines.kv, stale
        self._computed = arrays.engines.workers["computed_tokens"][:n_workers]
        self._published_s = arrays.clock["signals_s"]
        self._told_s = -1.0
        self._tokens_told = np.zeros(n_workers, np.int64)
        self._blocks: list[NDArray[np.int64]] = []

    def tell(self, *, at_once: bool = False) -> None:
        """Tell what has been published since the last time; all there is, if ``at_once``."""
        kv, listener = self.kv, self.listener
        if kv.n_events[0]:
            self._blocks.append(kv.events[: int(kv.n_events[0])].copy())
            kv.n_events[0] = 0
        if self._stale and not at_once and self._published_s[0] == self._told_s:
            return
        self._told_s = float(self._published_s[0])
        if self._blocks:
            events = np.concatenate(self._blocks)
            self._blocks.clear()
            for worker in np.unique(events[:, 0]).tolist():
                own = events[events[:, 0] == worker]
                hashes = kv.prefix_hash[own[:, 1]].tolist()
                self._tell_blocks(worker, hashes, own[:, 2] > 0)
        if not self._listens:
            return
        for worker in np.flatnonzero(self._computed > self._tokens_told).tolist():
            listener.on_tokens(worker, int(self._computed[worker] - self._tokens_told[worker]))
        self._tokens_told[:] = self._computed

    def _tell_blocks(self, worker: int, hashes: list[int], stored: NDArray[np.bool_]) -> None:
        """Tell what came and what went, in the order in which it did."""
        at = 0
        for came, run in groupby(stored.tolist()):
            part = hashes[at : (at := at + sum(1 for _ in run))]
            told = worker, part if came else (), () if came else part
            if self._listens and worker < len(self._computed):
                self.listener.on_blocks(*told)
            if self._on_blocks is not None:
                self._on_blocks(*told)
