"""Workloads: requests that arrive at some time, joined with a routing trace.

The named workloads ``task`` (code, math, medical, legal) and ``language`` (en, zh, ru, fr)
draw requests from a trace's serving split by a domain mix; ``trace`` draws them from all of it. Any
other name is the path of a request log (`request_logs`), which gives arrivals and lengths, and
whose requests take the routing of trace requests. `prompts` says which trace row a prompt's token
replays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.prompts import Ranges, assign_blocks, join_ranges
from eldr_sim.traces.requests.arrivals import (
    MAX_REQUESTS,
    MOST_BURSTINESS,
    Arrivals,
    describe_arrivals,
    draw_arrivals,
    recorded_arrivals,
    repeated,
)
from eldr_sim.traces.requests.domains import NAMED_WORKLOADS, resolve_domain_mix
from eldr_sim.traces.requests.length_shapes import LengthShape, shaped_log
from eldr_sim.traces.requests.lengths import (
    check_lengths,
    describe_lengths,
    draw_lengths,
    share_prefixes,
)
from eldr_sim.traces.requests.log_window import LogPart
from eldr_sim.traces.requests.request_logs import RequestLog, chain_blocks, known_log
from eldr_sim.traces.requests.served_lengths import served_prompt_lengths
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.streams import stream

__all__ = ["Workload", "make_workload", "named_log"]


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival, one array entry each.

    Attributes
    ----------
    arrival_s
        float64 ``[n]``, seconds, ascending, whole nanoseconds.
    prompt_len, output_len
        int32 ``[n]``, tokens to prefill and to generate, each at least 1.
    trace_request
        int32 ``[n]``: trace request whose prompt rows the prompt replays; where prefix blocks
        replay others, that of the last block.
    decode_request
        int32 ``[n]``: trace request whose decode rows are replayed; `trace_request` unless
        made with ``trace_replay="same_domain"``.
    replay_offset
        int32 ``[n]``: row of `decode_request`'s decode window (`RoutingTrace.decode_window`)
        that the first decode step replays; each later step takes the next row, around the end
        to row 0. 0 wherever the window is as long as the output.
    domain
        int16 ``[n]``, index into the trace's domains.
    session
        int32 ``[n]``; requests of one conversation share a number.
    prefix_hash, prefix_indptr
        Request ``i``'s prompt blocks are ``prefix_hash[prefix_indptr[i]:prefix_indptr[i + 1]]``
        (uint64): equal numbers stand for equal tokens from the prompt's start to the block's end
        (`request_logs.chain_blocks`). A prompt without blocks, or what follows its last, is shared
        with no other.
    prefix_trace_request
        int32, as long as `prefix_hash`: trace request that the block's tokens replay.
    prefix_block_tokens
        Tokens of a prefix block, 0 where there are no blocks. The last block of a prompt may
        be partial: only ``prompt_len // prefix_block_tokens`` blocks are full.
    description
        What the workload was made of, for the result: plain values, ready for JSON.
    priority
        int32 ``[n]``: the lowest is served first, as in vLLM; None where requests have none.
    """

    arrival_s: NDArray[np.float64]
    prompt_len: NDArray[np.int32]
    output_len: NDArray[np.int32]
    trace_request: NDArray[np.int32]
    decode_request: NDArray[np.int32]
    replay_offset: NDArray[np.int32]
    domain: NDArray[np.int16]
    session: NDArray[np.int32]
    prefix_hash: NDArray[np.uint64]
    prefix_indptr: NDArray[np.int64]
    prefix_trace_request: NDArray[np.int32]
    prefix_block_tokens: int
    description: dict[str, Any]
    priority: NDArray[np.int32] | None = None

    @property
    def n_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def blocks(self, request: int) -> NDArray[np.uint64]:
        """Return the prefix block hashes of one request, uint64 ``[n_blocks]``."""
        return self.prefix_hash[self.prefix_indptr[request] : self.prefix_indptr[request + 1]]

    def repeated(self, rounds: int) -> Workload:
        """Return so many rounds of these requests, each with sessions and prefixes of its own."""

        def others(numbers: NDArray[Any]) -> NDArray[Any]:
            signed = numbers.astype(np.int64)
            nth = np.arange(rounds)[:, None] * (int(signed.max(initial=-1)) + 1)
            return (signed + nth).ravel().astype(numbers.dtype)

        n_blocks = int(self.prefix_indptr[-1])
        begins = self.prefix_indptr[:-1] + np.arange(rounds)[:, None] * n_blocks
        same: dict[str, Any] = {
            name: np.tile(getattr(self, name), rounds)
            for name in (
                "arrival_s", "prompt_len", "output_len", "trace_request", "decode_request",
                "replay_offset", "domain", "prefix_trace_request",
            )
        }  # fmt: skip
        return replace(
            self,
            **same,
            session=others(self.session),
            prefix_hash=others(self.prefix_hash),
            prefix_indptr=np.append(begins.ravel(), rounds * n_blocks),
            priority=None if self.priority is None else np.tile(self.priority, rounds),
        )

    def prompt_ranges(self, request: int) -> Ranges:
        """Return which trace request each token of a prompt replays, see `prompts`."""
        own, length = int(self.trace_request[request]), int(self.prompt_len[request])
        begin, end = self.prefix_indptr[request : request + 2].tolist()
        size = self.prefix_block_tokens
        parts = [
            (source, i * size, min((i + 1) * size, length))
            for i, source in enumerate(self.prefix_trace_request[begin:end].tolist())
        ]
        covered = parts[-1][2] if parts else 0
        return join_ranges([*parts, (own, covered, length)] if covered < length else parts)


def make_workload(
    trace: RoutingTrace,
    *,
    workload: str | os.PathLike[str] = "task",
    request_rate: float | None = None,
    burstiness: float = 1.0,
    horizon_s: float | None = None,
    num_requests: int | None = None,
    output_len: int | Literal["recorded"] = "recorded",
    seed: int = 0,
    domain_mix: Mapping[str, float] | None = None,
    domain_mix_end: Mapping[str, float] | None = None,
    drift_s: float | None = None,
    trace_replay: Literal["own", "same_domain"] = "own",
    prompts: Literal["unique", "shared"] = "unique",
    length_shape: LengthShape | None = None,
    columns: str | None = None,
    arrivals: Arrivals | None = None,
    input_len: int | None = None,
    prompt_lengths: Literal["trace", "data_sets"] = "trace",
    range_ratios: tuple[float, float] = (0.0, 0.0),
    prefix_len: int = 0,
    num_prefixes: int = 1,
    part: LogPart | None = None,
) -> Workload:
    """Make a workload. The same arguments give the same bits on every machine.

    Each decision draws from a stream of its own (`streams.stream`), so a longer run starts
    with the requests of a shorter one, and a change of rate, output length or replay leaves
    the choice of requests as it was.

    Parameters
    ----------
    trace
        Routing trace; only its serving split is used.
    workload
        ``task``, ``language``, ``trace`` or the path of a request log.
    request_rate
        Mean requests per second, positive; ``inf`` lets all arrive at 0. Named workloads need
        it. A request log without it keeps its recorded arrivals, and with it has them
        stretched evenly to this mean rate (over the requests taken by ``num_requests``, or
        over the whole log where ``horizon_s`` cuts it).
    burstiness
        Shape of the gamma-distributed times between arrivals, as in ``vllm bench serve``:
        1 is Poisson, below 1 is burstier, above 1 more even. (vLLM then rescales the drawn
        times so that the last arrival is at n / rate; here they stay as drawn.) Not for
        request logs, whose arrivals are recorded.
    horizon_s
        Take the requests that arrive before this time, s.
    num_requests
        Take this many requests. A named workload needs one of the two; a log may take none
        (all of it), and at most one may be given.
    output_len
        Tokens that every request generates, or ``recorded``: as the trace, or the log, has it.
    seed
        Non-negative integer.
    domain_mix
        Weights of the domains by name, in place of `domains.DOMAIN_MIXES` or, for a log, of
        the serving split's own shares.
    domain_mix_end, drift_s
        Weights at the end, towards which the shares move evenly: in so many seconds, or else from
        the first request to the last.
    trace_replay
        ``own`` replays the decode of the request that gave the signature; ``same_domain``
        that of another request of its domain, so that a router gains nothing from copies of
        one request meeting in one batch.
    prompts
        ``unique``: every request of a named workload has a prompt of its own. ``shared``:
        requests that replay the same trace request have the same prompt, token by token. In a
        log, the blocks say so.
    length_shape
        Draw ``num_requests`` of a log by their prompt lengths, see `length_shapes`.
    columns
        Names of a log's columns, see `column_logs`.
    arrivals
        ``poisson`` draws the arrivals of a log's requests at ``request_rate``, as those of a named
        workload are; a log that is too short begins again, with sessions and prefixes of its own.
        ``recorded``, the default, keeps or stretches those of the log.
    input_len
        Prompt tokens of every request, beside a prefix; as recorded when None. A prompt that is
        longer than that of its trace request replays this once more (`prompts`).
    prompt_lengths
        ``data_sets``: a prompt of a named workload is as long as one of its domain's data sets, as
        ELDR's authors served them (`served_lengths`), not as recorded.
    range_ratios
        Draw the input and output lengths given from a range of this half-width, as a share
        (`lengths`).
    prefix_len, num_prefixes
        Every prompt begins with so many tokens more, of one of so many prefixes by chance.
    part
        Replay this part of a log, as it is stretched, instead of taking ``horizon_s`` or
        ``num_requests`` of it.

    Returns
    -------
    Workload
        The requests, in order of arrival.

    Raises
    ------
    InputError
        If an argument is not valid, or no request remains.

    Notes
    -----
    Trace requests are dealt from a shuffled deck per domain, reshuffled when it runs out, so
    that copies of one request lie as far apart as the size of the trace allows. A log's requests
    are dealt one each as well; `prompts.assign_blocks` says which of them go on with the prompt
    of an earlier request instead.
    """
    name = os.fspath(workload)
    _check_arguments(
        name, request_rate, burstiness, horizon_s, num_requests, output_len, trace_replay, prompts,
        drawn := arrivals == "poisson",
    )  # fmt: skip
    check_lengths(input_len, prefix_len, num_prefixes, range_ratios, output_len != "recorded")
    log = None if name in NAMED_WORKLOADS else named_log(name, columns)
    _check_log(name, log, arrivals, columns, input_len, prefix_len, prompts)
    if length_shape is not None:
        if log is None or num_requests is None:
            problem = "without a request log" if log is None else "without num_requests"
            raise InputError("length_shape", problem, "a request log and num_requests")
        log = shaped_log(log, length_shape, num_requests, seed)
    if part is not None:
        assert log is not None
        log = part.cut(log)
    log_requests = None if log is None else len(log.arrival_s)
    if log is None or drawn:
        rate = request_rate or math.nan
        arrival_s = draw_arrivals(rate, burstiness, horizon_s, num_requests, seed)
        log = log and repeated(log, len(arrival_s))
    elif part is not None:
        arrival_s = log.arrival_s
    else:
        arrival_s = recorded_arrivals(log, request_rate, horizon_s, num_requests)
    n = len(arrival_s)
    if not n:
        raise InputError(
            "horizon_s",
            f"no request arrives before {horizon_s} s",
            "a longer horizon or a higher rate",
        )

    shares, mix_source = resolve_domain_mix(trace, name, domain_mix)
    drift = None
    if domain_mix_end is not None:
        end, _ = resolve_domain_mix(trace, name, domain_mix_end, field="domain_mix_end")
        shares = shares | {domain: 0.0 for domain in end if domain not in shares}
        drift = end, _progress(arrival_s, drift_s)
    trace_request = _deal_requests(trace, shares, n, seed, drift)
    blocks, indptr, block_tokens = _prefix_blocks(trace, trace_request, log, prompts)
    sharing: dict[str, Any] = {"prompts": prompts}
    if prefix_len:
        blocks, indptr, source = share_prefixes(trace_request, num_prefixes, seed)
        block_tokens = prefix_len
        sharing |= {"prefix_len": prefix_len, "num_prefixes": num_prefixes}
    elif log is None:
        source = trace_request[: len(blocks)]
    else:
        source, trace_request, sharing = assign_blocks(blocks, indptr, trace_request)
    decode_request = trace_request
    if trace_replay == "same_domain":
        decode_request = _others_of_domain(trace, shares, trace_request, seed)
    prompt = trace.prompt_len[trace_request] if log is None else log.prompt_len[:n]
    if input_len is not None:
        prompt = draw_lengths(input_len, range_ratios[0], n, seed, "input-length")
    if prompt_lengths == "data_sets":
        if log is not None or input_len is not None or prompts == "shared":
            problem = "a named workload has them, whose prompts are unique and no --input-len"
            raise InputError("prompt_lengths", problem, "trace")
        # One length for each request of the trace, so that signatures repeat as they do.
        names = [trace.domains[which] for which in trace.domain.tolist()]
        prompt = served_prompt_lengths(names, seed).astype(np.int32)[trace_request]
    prompt = prompt.astype(np.int32) + np.int32(prefix_len)
    if output_len != "recorded":
        output = draw_lengths(output_len, range_ratios[1], n, seed, "output-length")
    else:
        output = trace.output_len[trace_request] if log is None else log.output_len[:n]
    _, window = trace.decode_window(decode_request)

    described = {
        "workload": name if log is None else Path(name).name,
        "arrivals": describe_arrivals(log, request_rate, burstiness, drawn),
        "request_rate": _json_rate(request_rate),
        "burstiness": burstiness if log is None or drawn else None,
        "seed": seed,
        "n_requests": n,
        "log_checksum": None if log is None else log.checksum,
        **({} if length_shape is None else {"length_shape": length_shape}),
        "n_dropped_from_log": 0 if log is None else log.n_dropped,
        "last_arrival_s": float(arrival_s[-1]),
        **({"log_repeats": round(n / log_requests, 3)} if drawn and log_requests else {}),
        **({} if input_len is None else {"input_len": input_len}),
        **({} if prompt_lengths == "trace" else {"prompt_lengths": prompt_lengths}),
        "output_len": output_len,
        **({"random_range_ratios": list(range_ratios)} if any(range_ratios) else {}),
        **describe_lengths(trace, trace_request, prompt, output),
        "trace_replay": trace_replay,
        **sharing,
        "domain_mix": {k: round(v, 6) for k, v in shares.items()},
        "domain_mix_source": mix_source,
        **({} if drift is None else {"domain_mix_end": {k: round(v, 6) for k, v in end.items()}}),
        **_describe_replay(trace, trace_request, decode_request, output, window),
    }
    return Workload(
        arrival_s=arrival_s,
        prompt_len=prompt,
        output_len=output.astype(np.int32),
        trace_request=trace_request.astype(np.int32),
        decode_request=decode_request.astype(np.int32),
        replay_offset=_replay_offsets(output, window, seed),
        domain=trace.domain[trace_request],
        session=np.arange(n, dtype=np.int32) if log is None else log.session[:n],
        priority=None if log is None or log.priority is None else log.priority[:n],
        prefix_hash=blocks,
        prefix_indptr=indptr,
        prefix_trace_request=source.astype(np.int32),
        prefix_block_tokens=block_tokens,
        description=described,
    )


def _check_log(
    name: str,
    log: RequestLog | None,
    arrivals: Arrivals | None,
    columns: str | None,
    input_len: int | None,
    prefix_len: int,
    prompts: str,
) -> None:
    """Raise InputError where a named workload is treated as a log, or a log as none."""
    if arrivals not in (None, "recorded", "poisson"):
        raise InputError("arrivals", f"got {arrivals!r}", "recorded, poisson")
    if log is None:
        if columns is not None:
            raise InputError("columns", f"workload {name} has none", "the path of a request log")
        if arrivals == "recorded":
            raise InputError("arrivals", f"workload {name} has no recorded ones", "poisson")
        if prefix_len and prompts == "shared":
            raise InputError("prefix_len", "whole prompts are shared", "--prompts unique")
    elif log.prefix_block_tokens and (input_len is not None or prefix_len):
        field = "prefix_len" if input_len is None else "input_len"
        problem = f"the blocks of {log.path.name} say how long prompts are and what they share"
        raise InputError(field, problem, "a log without hash_ids")


def named_log(name: str, columns: str | None) -> RequestLog:
    """Return the log that a workload names; raises InputError where it names none."""
    if not Path(name).is_file():
        raise InputError(
            "workload",
            f"{name!r} is neither a named workload nor a file",
            ", ".join([*NAMED_WORKLOADS, "path of a request log"]),
        )
    return known_log(name, columns)


def _check_arguments(
    name: str,
    rate: float | None,
    burstiness: float,
    horizon_s: float | None,
    num_requests: int | None,
    output_len: object,
    trace_replay: str,
    prompts: str,
    drawn: bool,
) -> None:
    named = name in NAMED_WORKLOADS
    if rate is None and drawn and not named:
        problem = "missing: arrivals that are drawn need it"
        raise InputError("request_rate", problem, "a number > 0, inf")
    if rate is None and named:
        raise InputError("request_rate", f"missing, workload {name} needs it", "a number > 0, inf")
    if rate is not None and not rate > 0:
        raise InputError("request_rate", f"got {rate}", "a number > 0, inf")
    if not 0 < burstiness <= MOST_BURSTINESS:
        raise InputError("burstiness", f"got {burstiness}", f"above 0, at most {MOST_BURSTINESS:g}")
    if not (named or drawn) and burstiness != 1:
        problem = f"got {burstiness}, but a request log's arrivals are recorded"
        raise InputError("burstiness", problem, "1, or --arrivals poisson")
    if horizon_s is not None and num_requests is not None:
        raise InputError("horizon_s", "given together with num_requests", "one of the two")
    if (named or drawn) and horizon_s is None and num_requests is None:
        raise InputError("horizon_s", "missing", "horizon_s or num_requests")
    if horizon_s is not None and not (horizon_s > 0 and math.isfinite(horizon_s)):
        raise InputError("horizon_s", f"got {horizon_s}", "a finite number > 0")
    if horizon_s is not None and rate is not None and math.isinf(rate):
        raise InputError("horizon_s", "does not bound an infinite request_rate", "num_requests")
    if num_requests is not None and not 1 <= num_requests <= MAX_REQUESTS:
        raise InputError("num_requests", f"got {num_requests}", f"1..{MAX_REQUESTS}")
    if output_len != "recorded" and not (
        isinstance(output_len, int | np.integer)
        and not isinstance(output_len, bool)
        and 1 <= output_len < 2**31
    ):
        raise InputError("output_len", f"got {output_len!r}", "an integer >= 1, recorded")
    if trace_replay not in ("own", "same_domain"):
        raise InputError("trace_replay", f"got {trace_replay!r}", "own, same_domain")
    if prompts not in ("unique", "shared"):
        raise InputError("prompts", f"got {prompts!r}", "unique, shared")
    if prompts == "shared" and not named:
        raise InputError("prompts", "got 'shared', but a request log's blocks say it", "unique")


def _progress(arrival_s: NDArray[np.float64], drift_s: float | None) -> NDArray[np.float64]:
    """Return how far the domain mix has moved at each arrival, 0 to 1."""
    n = len(arrival_s)
    if drift_s is not None and math.isfinite(drift_s):
        return np.minimum(arrival_s / drift_s, 1.0)
    return np.arange(n) / max(n - 1, 1)


def _deal_requests(
    trace: RoutingTrace,
    shares: Mapping[str, float],
    n: int,
    seed: int,
    drift: tuple[Mapping[str, float], NDArray[np.float64]] | None = None,
) -> NDArray[np.int64]:
    """Deal each request a trace request of a domain drawn by ``shares``.

    With ``drift`` the shares move to others, so far at each request.
    """
    names = list(shares)
    edges = np.cumsum([shares[name] for name in names])
    edges[-1] = 1.0
    drawn = stream(seed, "domains").random(n)
    if drift is None:
        domain = np.searchsorted(edges, drawn, side="right")
    else:
        last = np.cumsum([drift[0].get(name, 0.0) for name in names])
        last[-1] = 1.0
        moved = edges + drift[1][:, None] * (last - edges)
        domain = (drawn[:, None] >= moved).sum(axis=1)
    request = np.empty(n, np.int64)
    for d, name in enumerate(names):
        pool = trace.requests_of([name], calibration=False)
        if not len(pool):
            raise InputError(
                "trace", f"{trace.path.name} has no serving request of domain {name!r}"
            )
        mine = np.flatnonzero(domain == d)
        rng = stream(seed, f"trace-request:{name}")
        decks = [rng.permutation(len(pool)) for _ in range(-(-len(mine) // len(pool)))]
        card = np.concatenate(decks)[: len(mine)] if decks else np.empty(0, np.int64)
        request[mine] = pool[card]
    return request


def _others_of_domain(
    trace: RoutingTrace, shares: Mapping[str, float], request: NDArray[np.int64], seed: int
) -> NDArray[np.int64]:
    """Draw for each request another one of its domain; itself where it is the only one."""
    other = request.copy()
    for name in shares:
        pool = trace.requests_of([name], calibration=False)
        mine = np.flatnonzero(np.isin(request, pool))
        if len(pool) > 1:
            step = 1 + (
                stream(seed, f"decode-request:{name}").random(len(mine)) * (len(pool) - 1)
            ).astype(np.int64)
            card = (np.searchsorted(pool, request[mine]) + step) % len(pool)
            other[mine] = pool[card]
    return other


def _replay_offsets(
    output: NDArray[np.int32], window: NDArray[np.int64], seed: int
) -> NDArray[np.int32]:
    """Draw where in their decode windows those requests start that are longer than them."""
    # One draw a request, used or not: offsets do not shift when lengths change.
    random = stream(seed, "replay-offset").random(len(output))
    return np.where(output > window, (random * window).astype(np.int32), 0).astype(np.int32)


def _prefix_blocks(
    trace: RoutingTrace, request: NDArray[np.int64], log: RequestLog | None, prompts: str
) -> tuple[NDArray[np.uint64], NDArray[np.int64], int]:
    """Return prefix block numbers, ``indptr`` and block size.

    A prompt that all copies of a trace request share is a single block, as long as the longest.
    """
    n = len(request)
    if log is not None:
        indptr = log.prefix_indptr[: n + 1]
        blocks = chain_blocks(log.prefix_hash[: indptr[-1]], indptr)
        return blocks, indptr, log.prefix_block_tokens
    if prompts == "shared":
        longest = int(trace.prompt_len[~trace.is_calibration].max())
        return request.astype(np.uint64), np.arange(n + 1, dtype=np.int64), longest
    return np.empty(0, np.uint64), np.zeros(n + 1, np.int64), 0


def _json_rate(rate: float | None) -> float | str | None:
    return "inf" if rate is not None and math.isinf(rate) else rate


def _describe_replay(
    trace: RoutingTrace,
    request: NDArray[np.int64],
    decode: NDArray[np.int64],
    output: NDArray[np.int32],
    window: NDArray[np.int64],
) -> dict[str, Any]:
    """Describe how far the trace was stretched, for every result."""
    n = len(request)
    uses = np.bincount(decode, minlength=trace.n_requests)
    used = uses[uses > 0]
    total = int(output.sum(dtype=np.int64))
    extra = int(np.maximum(output - window, 0).sum())
    drawn = np.bincount(trace.domain[request], minlength=len(trace.domains))
    return {
        "domain_mix_realised": {
            name: round(count / n, 6)
            for name, count in zip(trace.domains, drawn.tolist(), strict=True)
            if count
        },
        "trace_requests_replayed": len(used),
        "trace_request_uses_mean": round(n / len(used), 3),
        "trace_request_uses_max": int(used.max()),
        "output_tokens": total,
        "output_tokens_beyond_recorded": extra,
        "output_tokens_beyond_recorded_share": round(extra / total, 6),
    }
