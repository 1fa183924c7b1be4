"""Conversations and sessions that other tools keep: ShareGPT, Frontier, LLMServingSim.

ShareGPT's JSON (``conversations`` of ``from`` and ``value``; LMSYS's ``conversation`` and OpenAI's
``messages`` of ``role`` and ``content``): as ``vllm bench serve`` takes it, the first question and
its answer of each, without those of fewer than 4 tokens on either side, over 1,024 of a prompt or
2,048 of both (``vllm/benchmarks/datasets``, ``is_valid_sequence``). It has no times. Four bytes of
UTF-8 stand for a token.

Frontier's CSV: turns of a session in rows, ``session_start_at`` (s) of the first one, then
``think_time`` (s) from the end of the turn before. LLMServingSim's agentic JSON lines:
``arrival_time_ns`` of a session; its ``sub_requests`` come one after the other,
``tool_duration_ns`` after the end of the one before."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_rows import Row, scaled_ns, session_of
from eldr_sim.traces.requests.logs.table_columns import tokens_of, whole_number

_TALKS = ("conversations", "conversation", "messages")
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048  # tokens
UNFIT = "shorter or longer than vllm bench serve takes"  #: why a conversation is left out


def is_talk(record: Any) -> bool:
    """Whether a JSON value is a conversation as ShareGPT has them."""
    if not isinstance(record, Mapping):
        return False
    talks = [record[name] for name in _TALKS if isinstance(record.get(name), list)]
    turns = talks[0] if talks else []
    return bool(talks) and (
        not turns
        or (
            isinstance(turns[0], Mapping)
            and ("value" in turns[0] or "content" in turns[0])
            and ("from" in turns[0] or "role" in turns[0])
        )
    )


def talk_rows(file: Path, records: Iterable[Any], left_out: dict[str, int]) -> Iterator[Row]:
    """Return the first request of each conversation; counts those that do not fit in
    ``left_out``. Raises InputError."""
    for number, record in enumerate(records, start=1):
        try:
            turns = next(record[name] for name in _TALKS if isinstance(record.get(name), list))
            said = [_text(turn) for turn in turns if _role(turn) != "system"]
        except (KeyError, TypeError, AttributeError, StopIteration):
            allowed = "conversations of from and value, as in ShareGPT"
            raise InputError(
                f"{file} conversation {number}", "has an unexpected form", allowed
            ) from None
        if len(said) < 2:
            left_out["without an answer"] = left_out.get("without an answer", 0) + 1
            continue
        prompt, answer = tokens_of(said[0]), tokens_of(said[1])
        if (
            min(prompt, answer) < _SHORTEST
            or prompt > _LONGEST_PROMPT
            or prompt + answer > _LONGEST
        ):
            left_out[UNFIT] = left_out.get(UNFIT, 0) + 1
            continue
        yield Row(0, prompt, answer)


def _role(turn: Mapping[str, Any]) -> str:
    return str(turn.get("from", turn.get("role")))


def _text(turn: Mapping[str, Any]) -> str:
    text = turn["value"] if "value" in turn else turn["content"]
    if not isinstance(text, str):
        raise TypeError
    return text


def frontier_rows(file: Path, records: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Row]:
    """Return the turns of Frontier's sessions; ``records``: with their lines. Raises InputError."""
    last: dict[str, int] = {}
    for place, record in records:
        try:
            name = session_of(record["session_id"])
            start = record["session_start_at"]
            think = float(record["think_time"] or 0.0)
            prompt, output = (
                whole_number(record[f"num_{kind}_tokens"]) for kind in ("prefill", "decode")
            )
            if name in last:
                when = last[name] + scaled_ns(think, 1e9)
                row = Row(when, prompt, output, (), name, after_s=think)
            else:
                when = scaled_ns(float(start), 1e9)
                row = Row(when, prompt, output, (), name)
            if think < 0:
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            allowed = "session_id,session_start_at,think_time,num_prefill_tokens,num_decode_tokens"
            got = ",".join(str(value) for value in record.values())
            raise InputError(f"{file} {place}", f"got {got!r:.80}", allowed) from None
        last[name] = when
        yield row


def is_tool_session(record: Any) -> bool:
    """Whether a JSON value is an agentic session of LLMServingSim's."""
    return isinstance(record, Mapping) and isinstance(record.get("sub_requests"), list)


def tool_session_rows(file: Path, records: Iterable[Any]) -> Iterator[Row]:
    """Return the requests of LLMServingSim's sessions; raises InputError."""
    for number, record in enumerate(records, start=1):
        try:
            when = scaled_ns(int(record["arrival_time_ns"]), 1)
            name = session_of(record.get("session_id")) or f"line {number}"
            if "sub_requests" not in record:
                yield Row(when, int(record["input_toks"]), int(record["output_toks"]), (), name)
                continue
            after: float | None = None
            for entry in record["sub_requests"]:
                prompt, output = whole_number(entry["input_toks"]), whole_number(
                    entry["output_toks"]
                )  # fmt: skip
                yield Row(when, prompt, output, (), name, after_s=after)
                after = scaled_ns(int(entry.get("tool_duration_ns") or 0), 1) / 1e9
                if after < 0:
                    raise ValueError
                when += round(after * 1e9)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            allowed = "arrival_time_ns, sub_requests with input_toks, output_toks, tool_duration_ns"
            raise InputError(
                f"{file} session {number}", "has an unexpected form", allowed
            ) from None
