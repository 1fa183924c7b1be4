"""Workloads: requests joined with the routing that their tokens replay: rows of their text's prompt
in the trace (`prompts`), and of the decode of the same text or another of its domain."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from eldr_sim.arrays import Int32s, Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.columns import Requests
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.streams import stream


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload(Requests):
    """Requests with tokens that replay a routing trace; their texts are the trace's requests."""

    #: int32 ``[n]``: trace request whose decode rows are replayed; `text`, or another of its
    #: domain.
    decode_request: Int32s
    #: int32 ``[n]``: row of its decode window (`RoutingTrace.decode_window`) that the first decode
    #: step replays, the next ones go on from there, round; 0 where the window is as long as the
    #: output.
    replay_offset: Int32s

    @classmethod
    def plain(cls, arrival_s: Any, lengths: Iterable[Any], text: Any, **more: Any) -> Self:
        """Return requests of one domain that share no prefix and replay their own texts from row 0.
        ``lengths``: of prompts and outputs; ``more``: fields that differ from that."""
        n, (prompt_len, output_len) = len(arrival_s), lengths
        fields = {"domain": np.zeros(n, np.int16), "session": np.arange(n, dtype=np.int32),
                  "prefix_hash": np.empty(0, np.uint64), "prefix_indptr": np.zeros(n + 1, np.int64),
                  "prefix_text": np.empty(0, np.int32), "prefix_block_tokens": 0, "description": {},
                  "decode_request": text, "replay_offset": np.zeros(n, np.int32)}  # fmt: skip
        own = {"arrival_s": arrival_s, "prompt_len": prompt_len, "output_len": output_len}
        return cls(**(fields | own | {"text": text} | more))


def join_routing(
    requests: Requests,
    trace: RoutingTrace | None,
    *,
    trace_replay: Literal["own", "same_domain"] = "own",
    seed: int = 0,
) -> Workload:
    """Say which rows of a trace, None for a dense model, the tokens of requests replay.

    ``trace_replay``: ``own`` replays the decode of the request that gave the signature;
    ``same_domain`` of another request of its domain, so that no router gains from copies in one
    batch."""
    if trace_replay not in ("own", "same_domain"):
        raise InputError("trace_replay", f"got {trace_replay!r}", "own, same_domain")
    if trace is None:
        none = np.zeros(len(requests), np.int32)
        return Workload(**vars(requests), decode_request=none, replay_offset=none)
    decode_request = requests.text.astype(np.int64)
    if trace_replay == "same_domain":
        decode_request = _others_of_domain(trace, decode_request, seed)
    _, window = trace.decode_window(decode_request)
    uses = np.bincount(decode_request)
    used = uses[uses > 0]
    total = int(requests.output_len.sum(dtype=np.int64))
    extra = int(np.maximum(requests.output_len - window, 0).sum())
    described: dict[str, Any] = {
        "trace_replay": trace_replay,
        "trace_requests_replayed": len(used),
        "trace_request_uses_mean": round(len(requests) / len(used), 3),
        "trace_request_uses_max": int(used.max()),
        "output_tokens": total,
        "output_tokens_beyond_recorded": extra,
        "output_tokens_beyond_recorded_share": round(extra / total, 6),
    }
    return Workload(
        **(vars(requests) | {"description": requests.description | described}),
        decode_request=decode_request.astype(np.int32),
        replay_offset=_replay_offsets(requests.output_len, window, seed),
    )


def _others_of_domain(trace: RoutingTrace, request: Ints, seed: int) -> Ints:
    """Draw for each request another one of its domain; itself where it is the only one."""
    other = request.copy()
    for domain in np.unique(trace.domain[request]).tolist():
        name = trace.domains[domain]
        pool = trace.texts.of_domain(name)
        mine = np.flatnonzero(trace.domain[request] == domain)
        if len(pool) > 1:
            step = 1 + (
                stream(seed, f"decode-request:{name}").random(len(mine)) * (len(pool) - 1)
            ).astype(np.int64)
            card = (np.searchsorted(pool, request[mine]) + step) % len(pool)
            other[mine] = pool[card]
    return other


def _replay_offsets(output: Int32s, window: Ints, seed: int) -> Int32s:
    """Draw where in their decode windows those requests start that are longer than them."""
    # One draw a request, used or not: offsets do not shift when lengths change.
    random = stream(seed, "replay-offset").random(len(output))
    return np.where(output > window, (random * window).astype(np.int32), 0).astype(np.int32)
