"""Conditional disaggregation as it is configured: ``isl_bounding:2048,0.7``."""

import math
from typing import NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.simulator.plane import entry

#: Words, what they mean, and the values that follow with their defaults: those of Dynamo (2026) and
#: llm-d.
_RULES = {
    "isl_bounding": (entry.SHORT, {"entry_tokens": 2048.0, "entry_share": 0.7}),
    "noncached": (entry.SHORT, {"entry_tokens": 512.0}),
    "prefill_load": (entry.BUSY, {"entry_load": 0.9}),
    "either": (
        entry.EITHER, {"entry_tokens": 2048.0, "entry_share": 0.7, "entry_load": 0.9},
    ),
    "seconds": (entry.SECONDS, {}),
}  # fmt: skip
_ALLOWED = "isl_bounding:TOKENS,SHARE, noncached:TOKENS, prefill_load:SHARE, " \
    "either:TOKENS,SHARE,SHARE or seconds"  # fmt: skip


class Conditional(NamedTuple):
    """When a decode worker computes a prompt; the names are those of ``state.SETTINGS``."""

    entry: int = int(entry.NEVER)
    entry_tokens: float = math.inf  #: fewer are not cached,
    entry_share: float = 1.0  #: and at most this share of the prompt
    entry_load: float = math.inf  #: more steps' budgets of tokens wait at every prefill worker


NEVER = Conditional()  #: decode workers compute no prompts of others


def parse_conditional(text: str | None) -> Conditional:
    """Read a rule's spelling; raises InputError."""
    if text is None:
        return NEVER
    word, _, rest = (part.strip() for part in text.partition(":"))
    if word not in _RULES:
        raise InputError("conditional_disagg", repr(text), _ALLOWED)
    rule, values = _RULES[word]
    given = [part for part in rest.split(",") if part.strip()]
    try:
        numbers = [float(part) for part in given]
    except ValueError:
        numbers = [math.nan]
    if len(numbers) > len(values) or not all(number >= 0.0 for number in numbers):
        raise InputError("conditional_disagg", repr(text), _ALLOWED)
    fields = values | dict(zip(values, numbers, strict=False))
    if fields.get("entry_tokens") == 0.0:  # no prompt lacks fewer than none
        if rule == entry.SHORT:
            return NEVER
        rule = entry.BUSY
        fields = {"entry_load": fields["entry_load"]}
    return Conditional(int(rule), **fields)
