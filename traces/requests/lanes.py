"""Lanes of agents, as AgentX runs them: clients that go on from the middle of recorded sessions.

Each client begins in a session of which a share, from a quarter to three quarters, is
history. Before the window each sends the prompts that its session goes on with, and ten more of
them in turn, for one token each: caches are warm then. When the last lane has done so all go on; a
lane takes the next session when its own ends, from its first turn. Sources: AgentX's methodology
(inferencex.semianalysis.com/agentx/methodology), SemiAnalysisAI/InferenceX at 4552491d,
``docs/agentic-warmup.md`` and ``docs/agentic-profile.md`` of ai-dynamo/aisimulate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.arrays import Bools, Int32s, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.traces.streams import stream

if TYPE_CHECKING:
    from eldr_sim.traces.requests.columns import Requests

_HISTORY, _WARM_UPS = (0.25, 0.75), 10  #: share of a session; requests of a lane
#: Seconds of a gap that a session lasts at least, of one of many lanes or of few
#: (`plane.sessions`).
_GAP_S, _GAP_OF_ALL_S, _MANY = 300.0, 10.0, 8
_LEAST_S = 0.1  #: that a request is taken to last, to know how many sessions are needed


def as_lanes(requests: Requests, lanes: int, duration_s: float, seed: int) -> Requests:
    """Return what lanes send: first what warms caches (`Requests.n_warming`), then their sessions,
    in a drawn order, until they last for ``duration_s``, again as others where there are too few.

    What goes on with history waits for all that warms, then for as long as it came after the first
    such of its session. Raises InputError if there are fewer sessions than lanes."""
    assert requests.parent is not None
    assert requests.gap_s is not None
    sizes = np.bincount(requests.session)
    members = np.split(np.argsort(requests.session, kind="stable"), np.cumsum(sizes)[:-1])
    if len(members) < lanes:
        problem = f"got {lanes}, but the log has {len(members)} sessions"
        raise InputError("max_active_sessions", problem, f"1..{len(members)}")
    rng = stream(seed, "lanes")
    deck = [members[session].tolist() for session in rng.permutation(len(members))]
    begins = [
        int(share * len(deck[lane])) for lane, share in enumerate(rng.uniform(*_HISTORY, lanes))
    ]
    rows = _Rows(requests, _GAP_S if lanes >= _MANY else _GAP_OF_ALL_S)
    barrier = [rows.warm_up(lane, deck[lane], begin) for lane, begin in enumerate(begins)]
    n_warming, lasts_s, play = len(rows.source), 0.0, 0
    while play < lanes or lasts_s < lanes * duration_s:
        own = deck[play % len(deck)]
        if play < lanes:
            rows.go_on(play, own[begins[play] :], barrier)
        else:
            lasts_s += rows.go_on(play, own, [])
        play += 1
    source, play_of = np.array(rows.source), np.array(rows.play)
    warming = np.arange(len(source)) < n_warming
    blocks, texts, indptr = _prefixes(requests, source, warming, play_of // len(deck))
    output = np.where(warming, 1, requests.output_len[source]).astype(np.int32)
    answered = requests.answered
    same = ("prompt_len", "text", "domain") + (() if requests.priority is None else ("priority",))
    return replace(
        requests,
        arrival_s=np.zeros(len(source)),
        output_len=output,
        session=play_of.astype(np.int32),
        prefix_hash=blocks,
        prefix_indptr=indptr,
        prefix_text=texts,
        parent=np.array(rows.parent, np.int32),
        gap_s=np.rint(np.array(rows.gap_s) * 1e9) / 1e9,
        joins=np.array(rows.joins, np.int32).reshape(-1, 2),
        answered=None if answered is None else answered[source] & ~warming,
        n_warming=n_warming,
        description=requests.description
        | {"n_requests": len(source), "lanes": lanes, "warming_requests": n_warming},
        **{name: getattr(requests, name)[source] for name in same},
    )


class _Rows:
    """The requests that lanes send, one after the other."""

    def __init__(self, requests: Requests, counted_s: float) -> None:
        assert requests.parent is not None
        assert requests.gap_s is not None
        self._came_s, self._before = requests.arrival_s.tolist(), requests.parent.tolist()
        self._gap_s, self._counted_s = requests.gap_s.tolist(), counted_s
        self._others: dict[int, list[int]] = {}
        for request, other in [] if requests.joins is None else requests.joins.tolist():
            self._others.setdefault(request, []).append(other)
        #: Of each: the recorded request, the session, whom it goes on with, and how long after.
        self.source, self.play, self.parent = list[int](), list[int](), list[int]()
        self.gap_s, self.joins = list[float](), list[tuple[int, int]]()

    def _add(self, source: int, play: int, parent: int, gap_s: float) -> int:
        self.source.append(source)
        self.play.append(play)
        self.parent.append(parent)
        self.gap_s.append(gap_s)
        return len(self.source) - 1

    def warm_up(self, lane: int, own: list[int], begin: int) -> int:
        """Add what warms the caches of a lane that starts its session at turn ``begin``; returns
        the last."""
        history, last = set(own[:begin]), -1
        live = sorted({self._before[i] for i in own[begin:]} & history) or own[:1]
        for prompt in live + [live[turn % len(live)] for turn in range(_WARM_UPS)]:
            last = self._add(prompt, lane, last, 0.0)
        return last

    def go_on(self, play: int, own: list[int], barrier: list[int]) -> float:
        """Add what is left of a session, behind ``barrier``; return the least seconds it lasts."""
        number: dict[int, int] = {}
        ends_s: dict[int, float] = {}
        for i in own:
            before, gap_s = self._before[i], self._gap_s[i]
            joins = [number[other] for other in self._others.get(i, ()) if other in number]
            at_s = max([ends_s.get(other, 0.0) for other in (before, *self._others.get(i, ()))])
            parent = number.get(before, -1)
            if parent < 0 and barrier:
                parent, joins = barrier[play], joins + barrier
                gap_s = self._came_s[i] - self._came_s[own[0]]
            number[i] = self._add(i, play, parent, gap_s)
            ends_s[i] = at_s + min(gap_s, self._counted_s) + _LEAST_S
            self.joins += [(number[i], other) for other in joins if other != parent]
        return max(ends_s.values())


def _prefixes(
    requests: Requests, source: Ints, warming: Bools, again: Ints
) -> tuple[Words, Int32s, Ints]:
    """Return the blocks of requests, the texts of these, and where each request's begin.
    ``warming``: those that have a prompt alone; ``again``: how often each session came before."""
    first, end = requests.prefix_indptr[source], requests.prefix_indptr[source + 1]
    if requests.prefix_block_tokens:
        full = first + requests.prompt_len[source] // requests.prefix_block_tokens
        end = np.where(warming, np.minimum(end, full), end)
    indptr = np.concatenate([[0], np.cumsum(end - first)]).astype(np.int64)
    place = np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], end - first)
    others = np.uint64(requests.prefix_hash.max(initial=0)) + np.uint64(1)
    blocks = requests.prefix_hash[place] + others * np.repeat(again, end - first).astype(np.uint64)
    return blocks, requests.prefix_text[place], indptr
