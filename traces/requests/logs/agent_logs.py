"""Recorded sessions of coding agents, in the format of Weka's KV cache tester (AgentX).

A JSON object a session: ``requests`` in order, with ``t`` (s since the session's begin), ``in`` and
``out`` (tokens), ``hash_ids`` of blocks of ``block_size`` tokens, and optionally ``api_time`` (s
that it took) and ``think_time`` (s before it). An entry of ``type`` ``subagent`` has nested
``requests``, from the session's begin or from its own: these go on with the turn before it, one
after the other, and the next turn waits for the last. Hash ids are a session's unless
``hash_id_scope`` says otherwise (docs.nvidia.com/aiperf, Replaying Agentic Coding Sessions with
Weka Traces)."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_rows import Row, scaled_ns

_SCOPE, _UNSHARED = 1 << 40, 1 << 63  # ids of a session; ids of blocks that have none


def is_agent_session(record: Any) -> bool:
    """Whether a JSON value is a session in Weka's format, judged by what its first request has."""
    if not isinstance(record, dict) or not isinstance(record.get("requests"), list):
        return False
    first = next(iter(record["requests"]), None)
    own = isinstance(first, dict) and ({"in", "hash_ids"} & first.keys() or "t" in first)
    return bool(own) or "block_size" in record or "hash_id_scope" in record


def agent_rows(file: Path, records: Iterable[Any]) -> Iterator[Row]:
    """Return the requests of sessions, no sub-agents' before any turn; raises InputError."""
    blank = count(_UNSHARED)
    for number, record in enumerate(records):
        try:
            yield from _Session(number, record, blank).rows(record["requests"], 0.0, "")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            allowed = "requests with t, in, out, hash_ids, as in Weka's traces"
            raise InputError(
                f"{file} session {number + 1}", "has an unexpected form", allowed
            ) from None


class _Session:
    """Reads one session."""

    def __init__(self, number: int, record: Mapping[str, Any], blank: Iterator[int]) -> None:
        self._name, self._blank = str(number), blank
        self._size, self._count = int(record.get("block_size", 64)), count()
        self._scope = 0 if record.get("hash_id_scope") == "global" else (number + 1) * _SCOPE
        self._ends: dict[str, float] = {}  # of requests, s, where known

    def rows(self, entries: Iterable[Any], begin: float, before: str) -> Iterator[Row]:
        """Return the requests of an agent; ``before``: the one that its first goes on with."""
        joins: list[str] = []
        for entry in entries:
            if entry.get("type") == "subagent":
                inner = entry["requests"]
                if inner and before:
                    own = float(entry["t"])
                    since = own if float(inner[0]["t"]) < own else 0.0
                    last = before
                    for row in self.rows(inner, begin + since, before):
                        yield row
                        last = row.name
                    joins.append(last)
                continue
            row = self._row(entry, begin, before, tuple(joins))
            joins.clear()
            before = row.name
            yield row

    def _row(self, entry: Any, begin: float, before: str, joins: tuple[str, ...]) -> Row:
        at, prompt = begin + float(entry["t"]), int(entry["in"])
        name = f"{self._name}.{next(self._count)}"
        if "api_time" in entry:
            self._ends[name] = at + float(entry["api_time"])
        waits_for = [self._ends.get(each) for each in filter(None, (before, *joins))]
        known = [end for end in waits_for if end is not None]
        after = None
        if before and len(known) == len(waits_for):
            after = max(0.0, at - max(known))
        elif before and not joins and "think_time" in entry:
            after = max(0.0, float(entry["think_time"]))
        ids, n = entry.get("hash_ids", []), -(-prompt // self._size)
        hashes = [self._scope + int(block) for block in ids[:n]]
        if hashes:
            hashes += [next(self._blank) for _ in range(n - len(hashes))]
        return Row(
            scaled_ns(at, 1e9), prompt, int(entry["out"]), hashes, self._name,
            after_s=after, name=name, parent=before, joins=joins,
        )  # fmt: skip
