"""What routers know of prefix caches where they do not see them as they are: engines publish blocks
now and then (`PublishedBlocks`), or routers go by what they have sent (`SentBlocks`), as llm-d's
and Dynamo's approximate modes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.arrays import Ints

if TYPE_CHECKING:
    from eldr_sim.simulator.setup.config.field_types import KVSignal


class PublishedBlocks:
    """The prefix blocks of each worker, as of the last time that engines published."""

    def __init__(self, n_workers: int) -> None:
        self._held: list[set[int]] = [set() for _ in range(n_workers)]

    def on_blocks(self, worker: int, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Hear which blocks have come to a worker's cache, and which have gone."""
        self._held[worker].update(stored)
        self._held[worker].difference_update(evicted)

    def match(self, request: int, blocks: Sequence[int], own: range, now_s: float) -> list[int]:
        """Return how many of a prompt's first ``blocks`` each worker of ``own`` has."""
        return [_run(blocks, self._held[worker]) for worker in own]

    def sent(self, request: int, blocks: Sequence[int], worker: int, now_s: float) -> None:
        """Learn nothing of where a request goes."""


class SentBlocks:
    """The prefix blocks of the prompts that a router has sent to each worker of late. ``told``: for
    how long, and how many tokens of a worker at most, the last ones; and how many routers take
    turns."""

    def __init__(self, n_workers: int, told: KVSignal, block_tokens: int) -> None:
        self._ttl_s, self._routers = told.ttl, int(told.routers)
        self._limit = max(1, int(told.tokens) // max(1, block_tokens))
        self._since: list[list[OrderedDict[int, float]]] = [
            [OrderedDict() for _ in range(n_workers)] for _ in range(self._routers)
        ]

    def match(self, request: int, blocks: Sequence[int], own: range, now_s: float) -> list[int]:
        """Return how many of a prompt's first ``blocks`` a router believes each worker to have."""
        mine, match = self._since[request % self._routers], []
        for worker in own:
            known = mine[worker]
            while known and now_s - next(iter(known.values())) > self._ttl_s:
                known.popitem(last=False)
            match.append(_run(blocks, known))
        return match

    def sent(self, request: int, blocks: Sequence[int], worker: int, now_s: float) -> None:
        """Remember where a prompt goes; its last block is forgotten first."""
        known = self._since[request % self._routers][worker]
        for block in reversed(blocks):
            known[block] = now_s
            known.move_to_end(block)
        while len(known) > self._limit:
            known.popitem(last=False)


def _run(blocks: Sequence[int], known: set[int] | OrderedDict[int, float]) -> int:
    """Return how many blocks are known before the first one that is not."""
    return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))


def matched_tokens(blocks: Sequence[int], prompt: int, prefix_tokens: int, block_size: int) -> Ints:
    """Return the tokens of a prompt in its first ``blocks``, one number a worker."""
    tokens = np.minimum(np.asarray(blocks, np.int64) * prefix_tokens, prompt - 1)
    return tokens // block_size * block_size
