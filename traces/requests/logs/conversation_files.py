"""Conversations as vLLM's multi-turn benchmark generates them (``generate_multi_turn.json``).

A JSON object with a ``filetype`` of ``generate_conversations``: ``num_conversations``;
``prompt_input`` with ``num_turns`` (two a request), ``num_tokens`` (of a user's turn),
``prefix_num_tokens`` (more in a conversation's first) and, if any, ``common_prefix_num_tokens``
(before those, of all); ``prompt_output`` with ``num_tokens``. Distributions are ``constant``
(value), ``uniform`` (min, max), ``zipf``, ``poisson`` (alpha) or ``lognormal`` (average and
median_ratio, .85 when not given, or mean and sigma), the last three cut at ``max``
(vllm-project/vllm, ``benchmarks/multi_turn/bench_dataset.py``). Drawn once, whatever the run's
seed; all conversations begin at once, and a turn when the one before has ended."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.log_rows import Row

_BLOCK = 16  # tokens
_SCOPE = 1 << 32  # ids of a conversation's own blocks
_ALLOWED = "num_conversations, prompt_input, prompt_output, as in vLLM's generate_multi_turn.json"


def is_conversations(record: Any) -> bool:
    """Whether a JSON value says how vLLM generates conversations."""
    return isinstance(record, dict) and record.get("filetype") == "generate_conversations"


def conversation_rows(file: Path, record: Mapping[str, Any]) -> Iterator[Row]:
    """Return the requests of conversations, one after the other; raises InputError."""
    rng = np.random.default_rng(0)
    try:
        prompt_input, n = record["prompt_input"], int(record["num_conversations"])
        turns = -(-np.maximum(_drawn(prompt_input["num_turns"], n, rng), 2) // 2)
        prefix = _drawn(prompt_input["prefix_num_tokens"], n, rng)
        common = 0
        if "common_prefix_num_tokens" in prompt_input:
            common = int(_drawn(prompt_input["common_prefix_num_tokens"], 1, rng)[0])
        total = int(turns.sum())
        users = np.maximum(_drawn(prompt_input["num_tokens"], total, rng), 1)
        answers = np.maximum(_drawn(record["prompt_output"]["num_tokens"], total, rng), 1)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError(str(file), "are not conversations to generate", _ALLOWED) from None
    last = np.cumsum(turns).tolist()
    for number, (end, own) in enumerate(zip(last, prefix.tolist(), strict=True)):
        context = common + own
        for i in range(end - int(turns[number]), end):
            context += int(users[i])
            blocks = range(-(-context // _BLOCK))
            ids = [j if (j + 1) * _BLOCK <= common else (number + 1) * _SCOPE + j for j in blocks]
            yield Row(0, context, int(answers[i]), ids, str(number), after_s=0.0)
            context += int(answers[i])


def _drawn(given: Mapping[str, Any], n: int, rng: np.random.Generator) -> Ints:
    """Draw ``n`` whole numbers from a distribution; raises KeyError or ValueError."""
    kind = given["distribution"]
    if kind == "constant":
        values = np.full(n, float(given["value"]))
    elif kind == "uniform":
        values = rng.integers(int(given["min"]), int(given["max"]) + 1, n).astype(float)
    elif kind == "zipf":
        values = rng.zipf(given["alpha"], n).astype(float)
    elif kind == "poisson":
        values = rng.poisson(given["alpha"], n).astype(float)
    elif kind == "lognormal" and "average" in given:
        ratio = given.get("median_ratio") or 0.85
        values = rng.lognormal(sigma=math.sqrt(-2.0 * math.log(ratio)), size=n)
        values *= given["average"] / values.mean()
    elif kind == "lognormal":
        values = rng.lognormal(given["mean"], given["sigma"], n)
    else:
        raise ValueError(kind)
    if kind not in ("constant", "uniform") and given.get("max"):
        values = np.minimum(values, given["max"])
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(values)
    return values.round().astype(np.int64)
