"""Conversations: turns that come ``gap_s`` after the answer to their parent, with its context.
Drawn ones (`unfold`) depend on the seed alone; in a log the next prompt says what the answer was
(`with_answers`). The next turn can find the full blocks of all but the last token, which has no KV
cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eldr_sim.arrays import Array, Bools, Int32s, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.lengths import describe_lengths, draw_lengths
from eldr_sim.traces.requests.session_shape import SessionShape
from eldr_sim.traces.streams import stream

if TYPE_CHECKING:
    from eldr_sim.traces.requests.columns import Requests
    from eldr_sim.traces.requests.texts import PromptSource

_MOST_TURNS, _MOST_REQUESTS = 10_000, 20_000_000


def unfold(first: Requests, texts: PromptSource, load: Any) -> Requests:
    """Return all turns of sessions, one by one, which the requests ``first`` begin."""
    shape, seed, n = load.session, load.seed, len(first)
    turns = shape.turns.whole(stream(seed, "session-turns"), n, _MOST_TURNS)
    calls = shape.calls_per_turn.whole(stream(seed, "session-calls"), int(turns.sum()), 10_000)
    total = int(calls.sum())
    if total > _MOST_REQUESTS:
        raise InputError("sessions", f"{total} requests", f"at most {_MOST_REQUESTS}")
    begins_turn = np.zeros(total, bool)
    begins_turn[np.cumsum(calls) - calls] = True
    sizes = np.add.reduceat(calls, np.cumsum(turns) - turns)
    starts = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(n), sizes)
    gap_s = np.where(
        begins_turn,
        shape.think_time.draw(stream(seed, "think-time"), total),
        shape.tool_time.draw(stream(seed, "tool-time"), total),
    )
    parent = np.arange(-1, total - 1, dtype=np.int32)
    parent[starts], gap_s[starts] = -1, 0.0
    new = shape.new_tokens.whole(stream(seed, "new-tokens"), total)
    if load.output_len == "recorded":
        output = texts.output_len[first.text[owner]].astype(np.int64)
    else:
        ratio = load.range_ratios[1]
        output = draw_lengths(load.output_len, ratio, total, seed, "output-length").astype(np.int64)
    prompt, blocks, indptr = _chains(first, shape, starts, sizes, new, output, load.prefix_len)
    text = np.repeat(first.text[owner], np.diff(indptr))
    if load.prefix_len:
        shared = np.repeat(first.prefix_text[owner], np.diff(indptr))
        place = np.arange(len(blocks)) - np.repeat(indptr[:-1], np.diff(indptr))
        text = np.where(place < load.prefix_len // shape.block_tokens, shared, text)
    return replace(
        first,
        arrival_s=first.arrival_s[owner],
        prompt_len=prompt.astype(np.int32),
        output_len=output.astype(np.int32),
        text=first.text[owner],
        domain=first.domain[owner],
        session=owner.astype(np.int32),
        prefix_hash=blocks,
        prefix_indptr=indptr,
        prefix_text=text.astype(np.int32),
        prefix_block_tokens=shape.block_tokens,
        parent=parent,
        gap_s=np.rint(gap_s * 1e9) / 1e9,
        answered=np.ones(total, bool),
        description=first.description
        | {
            "n_requests": total,
            "sessions": n,
            "turns_mean": round(float(sizes.mean()), 3),
            "history": shape.history,
            **describe_lengths(texts, first.text[owner], prompt, output),
        },
    )


def _chains(
    first: Requests, shape: SessionShape, starts: Ints, sizes: Ints,
    new: Ints, output: Ints, prefix_len: int,
) -> tuple[Ints, Words, Ints]:  # fmt: skip
    """Return the prompt tokens of all turns, and the block numbers of their contexts."""
    size, (rule, _, text) = shape.block_tokens, shape.history.partition(":")
    shared, number = prefix_len // size, float(text or 0)
    fresh = shared * (1 + int(first.prefix_hash.max(initial=0)))
    prompt, lists = np.empty(len(new), np.int64), list[Ints]()
    for s, (start, turns) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        chain = np.arange(shared) + (shared * int(first.prefix_hash[s]) if shared else 0)
        tokens = int(first.prompt_len[s])
        for i in range(start, start + turns):
            prompt[i] = tokens
            answered = tokens + int(output[i])
            more = max(0, (answered - 1) // size - len(chain))
            chain = np.concatenate([chain, np.arange(fresh, fresh + more)])
            fresh += more
            lists.append(chain[: (answered - 1) // size])
            kept = answered
            if rule == "no_reasoning" and number:
                kept = tokens + round((1.0 - number) * int(output[i]))
                chain = chain[: tokens // size]
            elif rule == "last" and answered > number:
                kept, chain = int(number), chain[:shared]
            following = int(new[i + 1]) if i + 1 < start + turns else 0
            if rule == "reset" and kept + following > number:
                kept, chain = int(first.prompt_len[s]), chain[:shared]
            tokens = kept + following
    indptr = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    return prompt, np.concatenate(lists).astype(np.uint64), indptr


def with_answers(
    blocks: Words, indptr: Ints, text: Ints,
    parent: Int32s, prompt: Int32s, output: Int32s, size: int,
) -> tuple[Array, Ints, Ints, Bools]:  # fmt: skip
    """Return the blocks of contexts in place of those of prompts, of a recorded log, and the
    parents: a parent has those of the first request that begins with its full blocks and is as long
    as its context, but for a few tokens of a chat template. ``parent``: -1: none; ``size``: tokens
    of a block."""
    lists = [blocks[a:b] for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]
    texts = [text[a:b] for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]
    own, whole = list(lists), np.zeros(len(lists), bool)
    for child in np.flatnonzero(parent >= 0)[::-1].tolist():  # the first child last: it stays
        before = int(parent[child])
        full = int(prompt[before]) // size
        answered = int(prompt[before]) + int(output[before])
        reach = -(-(answered - 1) // size)
        goes_on = full and len(own[child]) >= len(own[before]) and prompt[child] >= answered - 16
        if goes_on and np.array_equal(own[child][:full], own[before][:full]):
            lists[before], texts[before] = own[child][:reach], texts[child][:reach]
            whole[before] = True
    joined = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    return np.concatenate(lists), joined.astype(np.int64), np.concatenate(texts), whole


def turn_numbers(parent: Sequence[int] | Int32s) -> Int32s:
    """Return the turn of each request, from 1; a parent stands before those that go on with it."""
    turns: list[int] = []
    for before in np.asarray(parent).tolist():
        turns.append(1 + (turns[before] if before >= 0 else 0))
    return np.array(turns, np.int32)
