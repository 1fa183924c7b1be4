"""Conversations in the format of AIPerf's ``--custom-dataset-type multi_turn``.

A JSON object a session, one a line: ``session_id`` (lines of one id are one session) and ``turns``,
each with ``text`` or ``texts`` (strings, or objects with ``contents``), optionally
``output_length`` (tokens), ``delay`` (ms from the answer before) or ``timestamp`` (ms). A first
turn of ``role`` ``system`` without these stands before every prompt of its session, unless another
such follows (docs.nvidia.com/aiperf, Custom Dataset Guide). A prompt holds all that was said,
answers among it. Four bytes of UTF-8 stand for a token (OpenAI's rule of thumb for English), unless
a turn says ``input_length``; prompts share a prefix as far as their bytes are equal."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_rows import Row, scaled_ns, session_of

_TOKEN, _BLOCK = 4, 64  # bytes
_MOST_TOKENS = 1 << 24  # of a turn: each has bytes here
_TIMES = ("timestamp", "delay", "output_length")
_MEDIA = ("image", "images", "image_uuids", "audio", "audios", "video", "videos")


def is_multi_turn(record: Any) -> bool:
    """Whether a JSON value is a session in AIPerf's format."""
    if not isinstance(record, dict) or not isinstance(record.get("turns"), list):
        return False
    known = {"text", "texts", "input_length", "output_length", "delay", *_MEDIA}
    first: Any = next(iter(record["turns"]), {})
    if isinstance(first, str):  # questions, as MT-Bench has them
        return False
    return not isinstance(first, dict) or not first or not known.isdisjoint(first)


def multi_turn_rows(file: Path, records: Iterable[Any], output_len: int | None) -> Iterator[Row]:
    """Return the requests of sessions, ``output_len``: where turns have none; raises InputError."""
    sessions: dict[str, list[Any]] = {}
    for number, record in enumerate(records, start=1):
        try:
            name = session_of(record.get("session_id"))
            turns = [_Turn(turn) for turn in record["turns"]]
            sessions.setdefault(f"id {name}" if name else f"line {number}", []).extend(turns)
        except _Media as error:
            raise InputError(f"{file} session {number}", str(error), "turns of text") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            allowed = "turns with text and output_length, as in AIPerf's multi_turn"
            raise InputError(
                f"{file} session {number}", "has an unexpected form", allowed
            ) from None
    known: dict[bytes, int] = {}
    fillers = count()
    for number, (name, turns) in enumerate(sessions.items()):
        said = _Said(known, fillers)
        if len(turns) > 1 and turns[0].is_system and not turns[1].is_system:
            said.add(turns.pop(0))
        when = 0
        for turn, before in zip(turns, [None, *turns], strict=False):
            answer = output_len if turn.answer is None else turn.answer
            if answer is None:
                problem = f"session {name} has a turn without output_length"
                raise InputError(str(file), problem, "one for each turn, or --output-len above 1")
            after = None if turn.at_ns is not None else turn.delay_s
            at = when + scaled_ns(turn.delay_s, 1e9) if turn.at_ns is None else turn.at_ns
            if before is not None and at < when:
                raise InputError(str(file), f"timestamps of session {name} descend", "in order")
            when = at
            said.add(turn)
            yield Row(when, said.tokens, answer, said.blocks(), str(number), after_s=after)
            said.fill(answer)


class _Media(Exception):
    """A turn holds what is no text."""


class _Turn:
    """What a turn says and when; raises KeyError, TypeError, ValueError where it says neither."""

    def __init__(self, turn: Mapping[str, Any]) -> None:
        media = [name for name in _MEDIA if turn.get(name)]
        if media:
            raise _Media(f"a turn holds {media[0]}")
        texts = [turn["text"]] if turn.get("text") else turn.get("texts") or []
        self.pieces = [
            piece.encode()
            for text in texts
            for piece in ([text] if isinstance(text, str) else text["contents"])
        ]
        self.tokens = _whole(turn, "input_length")
        if self.tokens is None and not any(self.pieces):
            raise ValueError
        self.answer = _whole(turn, "output_length")
        given = turn.get("timestamp")
        self.at_ns = None if given is None else scaled_ns(float(given), 1e6)
        self.delay_s = float(turn.get("delay") or 0.0) / 1e3
        if self.delay_s < 0 or (self.at_ns is not None and self.delay_s):
            raise ValueError
        bare = all(turn.get(name) is None for name in _TIMES)
        self.is_system = turn.get("role") == "system" and bare


def _whole(turn: Mapping[str, Any], name: str) -> int | None:
    value = turn.get(name)
    if value is not None and (type(value) is not int or not 1 <= value <= _MOST_TOKENS):
        raise ValueError
    return value


class _Said:
    """All that was said in a session so far, in bytes, and its blocks."""

    def __init__(self, known: dict[bytes, int], fillers: Iterator[int]) -> None:
        self._bytes, self._ids = bytearray(), list[int]()
        self._known, self._fillers = known, fillers

    @property
    def tokens(self) -> int:
        return len(self._bytes) // _TOKEN

    def add(self, turn: _Turn) -> None:
        """Add what a turn says."""
        if turn.tokens is not None:
            self.fill(turn.tokens)
            return
        for piece in turn.pieces:
            self._bytes += piece + bytes(-len(piece) % _TOKEN)

    def fill(self, tokens: int) -> None:
        """Add tokens that no other session has: no UTF-8 holds the byte FF."""
        self._bytes += (b"\xff" + next(self._fillers).to_bytes(_TOKEN - 1, "big")) * tokens

    def blocks(self) -> list[int]:
        """Return an id for each block; equal ones have equal bytes, the last may be partial."""
        whole = len(self._bytes) // _BLOCK
        edges = range(len(self._ids) * _BLOCK, whole * _BLOCK + 1, _BLOCK)
        self._ids += [self._id(begin, end) for begin, end in pairwise(edges)]
        rest = self._bytes[whole * _BLOCK :]
        return self._ids + ([self._id(whole * _BLOCK, len(self._bytes))] if rest else [])

    def _id(self, begin: int, end: int) -> int:
        return self._known.setdefault(bytes(self._bytes[begin:end]), len(self._known))
