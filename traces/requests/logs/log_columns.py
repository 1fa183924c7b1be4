"""The requests of a log as columns, and how those of one conversation are linked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Array, Bools, Ints, Words

if TYPE_CHECKING:
    from eldr_sim.traces.requests.logs.log_rows import Row, Sessions

NO_PRIORITY = -(2**62)  #: of a row without a priority


class Link(NamedTuple):
    """How a request is linked with others, where a format names requests."""

    session: str = ""
    after_s: float | None = None
    name: str = ""
    parent: str = ""
    joins: Sequence[str] = ()


@dataclass(eq=False)
class Columns:
    """Requests in the order of their file, one array entry each."""

    when_ns: Ints
    prompt: Ints
    output: Ints  #: 0: the request failed
    hashes: Words  #: of all requests, one after the other
    blocks: Ints  #: number of hashes of each request
    sessions: tuple[Ints, list[str]] | None = None  #: codes (-1: none) and the names they stand for
    priority: Ints | None = None  #: `NO_PRIORITY` where a row has none
    links: list[Link] | None = None  #: in place of ``sessions``, where requests have names
    failed: Bools | None = None  #: whether the file says that a request failed
    models: set[str] = field(default_factory=set)  #: names of models in the file

    def __len__(self) -> int:
        return len(self.when_ns)

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> Columns:
        """Return the columns of rows; raises OverflowError for numbers beyond 64 bits."""
        kept = list(rows)
        linked = any(row.session or row.name or row.parent for row in kept)
        ranked = any(row.priority is not None for row in kept)
        priorities = [NO_PRIORITY if row.priority is None else row.priority for row in kept]
        blocks = np.array([len(row.hashes) for row in kept], np.int64)
        return cls(
            when_ns=np.array([row.when_ns for row in kept], np.int64),
            prompt=np.array([row.prompt for row in kept], np.int64),
            output=np.array([row.output for row in kept], np.int64),
            hashes=np.fromiter((h for row in kept for h in row.hashes), np.uint64, blocks.sum()),
            blocks=blocks,
            priority=np.array(priorities, np.int64) if ranked else None,
            links=[Link(row.session, *row[6:]) for row in kept] if linked else None,
        )

    def taken(self, which: Array) -> Columns:
        """Return some requests, by their numbers, in that order."""
        begins = np.concatenate([[0], np.cumsum(self.blocks)])
        hashes = self.hashes
        if len(hashes):
            length = self.blocks[which]
            ends = np.cumsum(length)
            place = np.arange(int(ends[-1]) if len(ends) else 0)
            hashes = hashes[place + np.repeat(begins[:-1][which] - ends + length, length)]
        return Columns(
            self.when_ns[which],
            self.prompt[which],
            self.output[which],
            hashes,
            self.blocks[which],
            None if self.sessions is None else (self.sessions[0][which], self.sessions[1]),
            None if self.priority is None else self.priority[which],
            None if self.links is None else [self.links[i] for i in which.tolist()],
            None if self.failed is None else self.failed[which],
            self.models,
        )


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the requests of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    names: dict[str, int] = {}
    codes: list[Ints] = []
    if any(part.sessions is not None for part in parts):
        for part in parts:
            own, known = part.sessions or (np.full(len(part), -1, np.int64), [])
            numbers = [names.setdefault(name, len(names)) for name in known]
            codes.append(np.array([*numbers, -1], np.int64)[own])
    ranked = any(part.priority is not None for part in parts)
    linked = any(part.links is not None for part in parts)
    failing = any(part.failed is not None for part in parts)
    priorities = [_filled(part.priority, len(part), NO_PRIORITY) for part in parts]
    failures = [_filled(part.failed, len(part), False) for part in parts]
    return Columns(
        when_ns=np.concatenate([part.when_ns for part in parts]),
        prompt=np.concatenate([part.prompt for part in parts]),
        output=np.concatenate([part.output for part in parts]),
        hashes=np.concatenate([part.hashes for part in parts]),
        blocks=np.concatenate([part.blocks for part in parts]),
        sessions=(np.concatenate(codes), list(names)) if codes else None,
        priority=np.concatenate(priorities) if ranked else None,
        links=[link for part in parts for link in _links_of(part)] if linked else None,
        failed=np.concatenate(failures) if failing else None,
        models=set().union(*(part.models for part in parts)),
    )


def _filled(values: Any, n: int, missing: Any) -> Any:
    return np.full(n, missing) if values is None else values


def _links_of(part: Columns) -> list[Link]:
    if part.links is not None:
        return part.links
    codes, names = part.sessions or (np.full(len(part), -1, np.int64), [])
    return [Link() if code < 0 else Link(names[code]) for code in codes.tolist()]


def sessions_of(columns: Columns) -> Sessions:
    """Return the sessions of requests in order of arrival: one goes on with the request that it
    names, or else with the one before it of its session."""
    n = len(columns)
    if columns.links is not None:
        return _linked(columns.when_ns, columns.links)
    if columns.sessions is None:
        return {"session": np.arange(n, dtype=np.int32)}
    codes = columns.sessions[0]
    key = np.where(codes < 0, len(columns.sessions[1]) + np.arange(n), codes)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int32)
    number[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    order = np.argsort(key, kind="stable")
    parent = np.full(n, -1, np.int32)
    same = key[order[1:]] == key[order[:-1]]
    parent[order[1:][same]] = order[:-1][same]
    sessions = {"session": number[inverse]}
    if not same.any():
        return sessions
    gaps = np.where(parent >= 0, columns.when_ns - columns.when_ns[parent], 0) / 1e9
    return sessions | {"parent": parent, "gap_s": gaps, "after_end": np.zeros(n, np.bool_)}


def _linked(when_ns: Ints, links: Sequence[Link]) -> Sessions:
    numbers: dict[str | int, int] = {}
    last: dict[str, int] = {}
    session: list[int] = []
    parent, gap_s, after = [], [], []
    joins: list[tuple[int, int]] = []
    times = when_ns.tolist()
    for i, link in enumerate(links):
        before = last.get(link.parent or link.session, -1) if link.parent or link.session else -1
        others = {last[name] for name in link.joins if name in last}
        if before < 0 and others:
            before = max(others)
        joins += [(i, other) for other in sorted(others - {before})]
        if before >= 0 and not link.session:
            session.append(session[before])
        else:
            session.append(numbers.setdefault(link.session or i, len(numbers)))
        parent.append(before)
        since = (times[i] - times[before]) / 1e9 if before >= 0 else 0.0
        gap_s.append(since if link.after_s is None else link.after_s)
        after.append(link.after_s is not None)
        last.update(dict.fromkeys(filter(None, (link.session, link.name)), i))
    columns = {"session": np.array(session, np.int32)}
    if max(parent, default=-1) < 0:
        return columns
    more = {"parent": np.array(parent, np.int32), "gap_s": np.array(gap_s)}
    if joins:
        more["joins"] = np.array(joins, np.int32)
    return columns | more | {"after_end": np.array(after)}


def others_each_round(numbers: Array, rounds: int) -> Array:
    """Return numbers once for every round, in each of them others than before."""
    signed = numbers.astype(np.int64)
    begins = np.arange(rounds)[:, None] * (int(signed.max(initial=-1)) + 1)
    return (signed + begins).ravel().astype(numbers.dtype)


def chain_blocks(hash_ids: Words, indptr: Ints) -> Words:
    """Number prefix blocks so that equal numbers mean equal tokens from the prompt's start, by a
    block's id and the number of the one before; uint64 ``[n]``. Request ``i`` has
    ``hash_ids[indptr[i]:indptr[i + 1]]``."""
    numbers: dict[tuple[int, int], int] = {}
    chained: list[int] = []
    ids, edges = hash_ids.tolist(), indptr.tolist()
    for start, stop in pairwise(edges):
        number = -1
        for block in ids[start:stop]:
            number = numbers.setdefault((number, block), len(numbers))
            chained.append(number)
    return np.array(chained, np.uint64)
