"""Requests: arrivals, texts, lengths and what they share. Each decision draws from its
own `streams.stream`, so a longer run starts with the requests of a shorter one; texts are dealt
from a shuffled deck per domain, so that copies of one lie far apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Floats, Int32s, Ints, Words
from eldr_sim.errors import InputError
from eldr_sim.traces.requests import arrivals
from eldr_sim.traces.requests.columns import Requests
from eldr_sim.traces.requests.lanes import as_lanes
from eldr_sim.traces.requests.length_shapes import shaped_log
from eldr_sim.traces.requests.lengths import describe_lengths, draw_lengths
from eldr_sim.traces.requests.load import Load
from eldr_sim.traces.requests.load_shapes import load_shape
from eldr_sim.traces.requests.logs.log_columns import chain_blocks
from eldr_sim.traces.requests.prefixes import assign_blocks, share_prefixes
from eldr_sim.traces.requests.prompt_lengths import served_prompt_lengths
from eldr_sim.traces.requests.sessions import unfold, with_answers
from eldr_sim.traces.requests.texts import PromptSource, resolve_domain_mix
from eldr_sim.traces.streams import stream

if TYPE_CHECKING:
    from eldr_sim.traces.requests.logs.request_logs import RequestLog


def make_requests(texts: PromptSource, load: Load) -> Requests:
    """Make requests: the same bits on every machine. Raises InputError."""
    load.check()
    log = load.log()
    if log is not None and load.length_shape is not None:
        assert load.num_requests is not None
        log = shaped_log(log, load.length_shape, load.num_requests, load.seed)
    if load.part is not None:
        assert log is not None
        log = load.part.cut(log)
    arrival_s, described = _arrivals(load, log)
    n = len(arrival_s)
    if log is not None and load.draws_arrivals:
        log = arrivals.repeated(log, n)
    mix = _mix(texts, load, arrival_s)
    text, prefixes = _prefixes(texts, load, log, _deal(texts, mix, n, load.seed))
    prompt, output = _lengths(texts, load, log, text)
    parent, gap_s, joins, answered = None, None, None, None
    if log is not None and log.parent is not None and not load.draws_arrivals:
        before = log.parent[:n]
        if prefixes.block_tokens:
            parts = with_answers(*prefixes[:3], before, prompt, output, prefixes.block_tokens)
            prefixes = prefixes._replace(blocks=parts[0], indptr=parts[1], text=parts[2])
            answered = parts[3]
        if load.arrivals in ("closed", "agentx"):
            parent, gap_s = before, log.gaps(load.recorded_ttft_ms, load.recorded_tpot_ms)[:n]
            joins = None if log.joins is None else log.joins[(log.joins < n).all(axis=1)]
    drawn = np.bincount(texts.domain[text], minlength=len(texts.domains))
    described |= {
        **({} if load.input_len is None else {"input_len": load.input_len}),
        **({} if load.prompt_lengths == "trace" else {"prompt_lengths": load.prompt_lengths}),
        "output_len": load.output_len,
        **({"random_range_ratios": list(load.range_ratios)} if any(load.range_ratios) else {}),
        **describe_lengths(texts, text, prompt, output),
        **prefixes.description,
        **mix.description,
        "domain_mix_realised": {
            name: round(count / n, 6)
            for name, count in zip(texts.domains, drawn.tolist(), strict=True)
            if count
        },
    }
    requests = Requests(
        arrival_s=arrival_s,
        prompt_len=prompt,
        output_len=output,
        text=text.astype(np.int32),
        domain=texts.domain[text],
        session=np.arange(n, dtype=np.int32) if log is None else log.session[:n],
        prefix_hash=prefixes.blocks,
        prefix_indptr=prefixes.indptr,
        prefix_text=prefixes.text.astype(np.int32),
        prefix_block_tokens=prefixes.block_tokens,
        description=described,
        priority=None if log is None or log.priority is None else log.priority[:n],
        parent=parent,
        gap_s=gap_s,
        joins=joins,
        answered=answered,
    )
    if load.arrivals == "agentx":
        assert load.max_active_sessions is not None
        return as_lanes(requests, load.max_active_sessions, load.lanes_s, load.seed)
    return requests if load.session is None else unfold(requests, texts, load)


def _arrivals(load: Load, log: RequestLog | None) -> tuple[Floats, dict[str, Any]]:
    rate, drawn = load.request_rate, load.draws_arrivals
    how_many = load.horizon_s, load.num_requests
    if drawn:
        assert rate is not None
        drawing = (
            arrivals.draw_arrivals
            if load.load is None
            else load_shape(load.load, load.time_unit, load.columns if load.is_named else None).draw
        )
        arrival_s = drawing(rate, load.burstiness, *how_many, load.seed)
    else:
        assert log is not None
        arrival_s = log.arrival_s if load.part is not None else arrivals.recorded_arrivals(
            log, rate, *how_many
        )  # fmt: skip
    n = len(arrival_s)
    if not n:
        problem = f"no request arrives before {load.horizon_s} s"
        raise InputError("horizon_s", problem, "a longer horizon or a higher rate")
    repeats = {} if log is None or not drawn else {"log_repeats": round(n / len(log.arrival_s), 3)}
    return arrival_s, {
        "workload": load.workload if log is None else Path(load.workload).name,
        "arrivals": arrivals.describe_arrivals(log, rate, load.burstiness, drawn),
        "request_rate": "inf" if rate == math.inf else rate,
        **({} if load.load is None else {"load": Path(load.load).name}),
        "burstiness": load.burstiness if drawn else None,
        "seed": load.seed,
        "n_requests": n,
        "log_checksum": None if log is None else log.checksum,
        **({} if load.length_shape is None else {"length_shape": load.length_shape}),
        "n_dropped_from_log": 0 if log is None else log.n_dropped,
        **({} if log is None else {"log": log.header.as_dict()}),
        "last_arrival_s": float(arrival_s[-1]),
        **repeats,
    }


class _Mix(NamedTuple):
    """Domains of requests: their shares, towards what they move, and how far at each request."""

    shares: Mapping[str, float]
    end: Mapping[str, float]
    moved: Floats | None
    description: dict[str, Any]


def _mix(texts: PromptSource, load: Load, arrival_s: Floats) -> _Mix:
    """Return the shares of the domains, as they move."""
    shares, source = resolve_domain_mix(texts, load.workload, load.domain_mix)
    end: dict[str, float] = {}
    moved = None
    if load.domain_mix_end is not None:
        field = "domain_mix_end"
        end, _ = resolve_domain_mix(texts, load.workload, load.domain_mix_end, field=field)
        shares = shares | {domain: 0.0 for domain in end if domain not in shares}
        moved = np.arange(len(arrival_s)) / max(len(arrival_s) - 1, 1)
        if load.drift_s is not None and math.isfinite(load.drift_s):
            moved = np.minimum(arrival_s / load.drift_s, 1.0)
    described: dict[str, Any] = {
        "domain_mix": {k: round(v, 6) for k, v in shares.items()},
        "domain_mix_source": source,
        **({"domain_mix_end": {k: round(v, 6) for k, v in end.items()}} if end else {}),
    }
    return _Mix(shares, end, moved, described)


def _deal(texts: PromptSource, mix: _Mix, n: int, seed: int) -> Ints:
    """Deal each request a text of a domain drawn by the mix."""
    names = list(mix.shares)
    edges = np.cumsum([mix.shares[name] for name in names])
    edges[-1] = 1.0
    drawn = stream(seed, "domains").random(n)
    if mix.moved is None:
        domain = np.searchsorted(edges, drawn, side="right")
    else:
        last = np.cumsum([mix.end.get(name, 0.0) for name in names])
        last[-1] = 1.0
        moved = edges + mix.moved[:, None] * (last - edges)
        domain = (drawn[:, None] >= moved).sum(axis=1)
    text = np.empty(n, np.int64)
    for d, name in enumerate(names):
        deck = texts.of_domain(name)
        mine = np.flatnonzero(domain == d)
        rng = stream(seed, f"trace-request:{name}")
        decks = [rng.permutation(len(deck)) for _ in range(-(-len(mine) // len(deck)))]
        card = np.concatenate(decks)[: len(mine)] if decks else np.empty(0, np.int64)
        text[mine] = deck[card]
    return text


class _Prefixes(NamedTuple):
    """Blocks of all prompts, with what stands in the fields of `Requests`."""

    blocks: Words
    indptr: Ints
    text: Ints
    block_tokens: int
    description: dict[str, Any]


def _prefixes(
    texts: PromptSource, load: Load, log: RequestLog | None, text: Ints
) -> tuple[Ints, _Prefixes]:
    """Return the texts of requests, some of which go on with another's, and what prompts share. A
    prompt that all copies of a text share is a single block, as long as the longest."""
    n, one_each = len(text), np.arange(len(text) + 1, dtype=np.int64)
    described: dict[str, Any] = {"prompts": load.prompts}
    if load.prefix_len:
        blocks, indptr, source = share_prefixes(text, load.num_prefixes, load.seed)
        described |= {"prefix_len": load.prefix_len, "num_prefixes": load.num_prefixes}
        return text, _Prefixes(blocks, indptr, source, load.prefix_len, described)
    if log is not None:
        indptr = log.prefix_indptr[: n + 1]
        blocks = chain_blocks(log.prefix_hash[: indptr[-1]], indptr)
        source, text, described = assign_blocks(blocks, indptr, text)
        return text, _Prefixes(blocks, indptr, source, log.prefix_block_tokens, described)
    if load.prompts == "shared":
        longest = int(texts.prompt_len[texts.served].max())
        return text, _Prefixes(text.astype(np.uint64), one_each, text, longest, described)
    none = np.empty(0, np.uint64)
    return text, _Prefixes(none, 0 * one_each, text[:0], 0, described)


def _lengths(
    texts: PromptSource, load: Load, log: RequestLog | None, text: Ints
) -> tuple[Int32s, Int32s]:
    n = len(text)
    prompt = texts.prompt_len[text] if log is None else log.prompt_len[:n]
    if load.input_len is not None:
        prompt = draw_lengths(load.input_len, load.range_ratios[0], n, load.seed, "input-length")
    if load.prompt_lengths == "data_sets":
        if log is not None or load.input_len is not None or load.prompts == "shared":
            problem = "only a named workload with unique prompts and without --input-len has them"
            raise InputError("prompt_lengths", problem, "trace")
        # One length for each text, so that signatures repeat as they do.
        names = [texts.domains[which] for which in texts.domain.tolist()]
        prompt = served_prompt_lengths(names, load.seed).astype(np.int32)[text]
    if load.output_len != "recorded":
        ratio = load.range_ratios[1]
        output = draw_lengths(load.output_len, ratio, n, load.seed, "output-length")
    else:
        output = texts.output_len[text] if log is None else log.output_len[:n]
    return prompt.astype(np.int32) + np.int32(load.prefix_len), output.astype(np.int32)
