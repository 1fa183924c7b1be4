"""The rule that most routers end in: of some workers the one of the smallest weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from eldr_sim.policies.seen import Workers

#: What a rule may weigh: columns of `seen.Workers`, and requests ``sent`` since engines published.
COLUMNS = (
    "loads", "sent", "waiting", "running", "waiting_tokens", "running_tokens", "kv_usage",
)  # fmt: skip
#: What of a request decides on its rule; ``prefix``: the key of its first ``prefix_blocks`` blocks.
RuleBy = Literal["nothing", "domain", "prefix", "signature"]


class Rule:
    """Picks the one of ``workers`` with the smallest sum of weighted columns.

    Ties go to the first tied worker behind the one picked last, as nginx's ``least_conn``: the
    lowest index would pile an idle cluster's requests on worker 0. ``weights``: of `COLUMNS`;
    ``in_turn`` false: to the first of ``workers``; ``rng``: draws among equals; ``rule_by`` must
    then be None."""

    __slots__ = (
        "_known", "_seen_s", "_sent", "in_turn", "rng", "signals", "turn", "weights", "workers",
    )  # fmt: skip

    def __init__(
        self,
        workers: Sequence[int],
        weights: Mapping[str, float] | None = None,
        *,
        in_turn: bool = True,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.workers: tuple[int, ...] = tuple(workers)
        if not self.workers:
            raise ValueError("a rule without workers")
        given = {"loads": 1.0} if weights is None else weights
        if unknown := given.keys() - set(COLUMNS):
            raise ValueError(f"no columns {', '.join(sorted(unknown))}: of {', '.join(COLUMNS)}")
        self.weights = tuple(float(given.get(name, 0.0)) for name in COLUMNS)
        #: Whether it weighs what engines publish, or what they do not know yet.
        self.signals = any(self.weights[1:])
        self.in_turn, self.rng = in_turn, rng
        self.turn: int = 0
        self._seen_s = -np.inf
        self._known: NDArray[np.float64] = np.zeros(0)
        self._sent: NDArray[np.float64] = np.zeros(0)

    def pick(self, workers: Workers) -> int | None:
        """Return the chosen worker's index, the least loaded healthy one of the pool where none of
        the rule's is, else None. ``workers``: their signals are read when they have changed."""
        order: list[int] = [*range(self.turn, len(self.workers)), *range(self.turn)]
        if not workers.healthy.all():
            healthy = workers.healthy.tolist()
            order = [place for place in order if healthy[self.workers[place]]]
        if not order:
            loads: list[int] = workers.loads.tolist()
            usable = workers.usable()
            return min(usable, key=lambda worker: (loads[worker], worker), default=None)
        place: int = order[0]
        if any(self.weights) or self.rng is not None:
            of_pool = self._scores(workers)
            scores = [of_pool[self.workers[i]] for i in order]
            least = min(scores)
            place = order[scores.index(least)]
            if self.rng is not None:
                tied = [i for i, score in zip(order, scores, strict=True) if score == least]
                place = tied[int(self.rng.integers(len(tied)))]
        if self.in_turn:
            self.turn = (place + 1) % len(self.workers)
        if self.signals:
            self._sent[self.workers[place]] += 1.0
        return self.workers[place]

    def _scores(self, workers: Workers) -> list[float]:
        """Return the sum of each worker of the pool."""
        if not self.signals:
            return [self.weights[0] * load for load in workers.loads.tolist()]
        if workers.signals_s != self._seen_s:
            self._seen_s, self._sent = workers.signals_s, np.zeros(len(workers.loads))
            parts = zip(self.weights[2:], COLUMNS[2:], strict=True)
            columns = workers._asdict()
            self._known = sum(
                (weight * columns[name] for weight, name in parts), np.zeros(len(self._sent))
            )
        score = self.weights[0] * workers.loads + self.weights[1] * self._sent + self._known
        scores: list[float] = score.tolist()
        return scores


class StickyRule(NamedTuple):
    """A worker that keeps a request while it is not overloaded, and the rule for when it is."""

    worker: int
    rule: Rule
    factor: float  #: its most load, times the mean of all workers with the request at hand

    def pick(self, workers: Workers) -> int | None:
        """Return the chosen worker's index; see `Rule.pick`."""
        most = self.factor * (int(workers.loads.sum()) + 1) / len(workers.loads)
        if workers.healthy[self.worker] and workers.loads[self.worker] <= most:
            return self.worker
        return self.rule.pick(workers)
