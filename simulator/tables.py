"""The two tables of a result: one row a request, one row a step."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from eldr_sim.simulator.cluster import RunRecord
from eldr_sim.simulator.metrics import request_times


def requests_table(record: RunRecord, domains: list[str]) -> pa.Table:
    """Return every request that arrived, in order of arrival.

    Times ending in ``_s`` are seconds of simulated time, and like ``cached_tokens`` null where the
    request never came so far; ``measured`` marks the requests that make the statistics.
    """
    requests = record.requests
    times = request_times(record)

    def at(field: str) -> pa.Array:
        return _known(np.array([getattr(r, field) for r in requests], float))

    def ints(field: str, kind: str = "int32") -> pa.Array:
        return pa.array([getattr(r, field) for r in requests], kind)

    first = record.first_token_s[: len(requests)]
    return pa.table(
        {
            "request_id": ints("index"),
            "domain": pa.array([domains[r.domain] for r in requests], "string"),
            "measured": pa.array([r.measured for r in requests], "bool"),
            "outcome": pa.array([r.outcome for r in requests], "string"),
            "prompt_len": ints("prompt_len"),
            "output_len": ints("output_len"),
            "trace_request": ints("trace_request"),
            "cached_tokens": _known(np.array([r.cached_tokens for r in requests], np.int32)),
            "prefill_worker": ints("prefill_worker", "int16"),
            "decode_worker": ints("decode_worker", "int16"),
            "preemptions": ints("preemptions"),
            "arrival_s": at("arrival_s"),
            "sent_s": at("sent_s"),
            "prefill_start_s": at("prefill_start_s"),
            "prefill_end_s": at("prefill_end_s"),
            "transfer_start_s": at("transfer_start_s"),
            "transfer_end_s": at("transfer_end_s"),
            "decode_start_s": at("decode_start_s"),
            "first_token_s": _known(first),
            "finish_s": at("finish_s"),
            "ttft_ms": _figures(1e3 * times["ttft"]),
            "tpot_ms": _figures(1e3 * times["tpot"]),
            "e2el_ms": _figures(1e3 * times["e2el"]),
        }
    )


def steps_table(record: RunRecord, n_moe_layers: int) -> pa.Table:
    """Return every step of every worker: prefill workers first, each kind in order of start.

    ``tokens`` counts the tokens that a step computed. Decode steps also have the KV tokens that
    attention read (``context_tokens``), the requests new in the batch (``joined``), the mean
    distinct experts of a MoE layer (``active_experts``), and the mean of those on the layer's
    busiest expert-parallel GPU (``busiest_rank_experts``; with one GPU the same).
    """
    prefill = sorted(
        (start, worker, end, requests, tokens)
        for worker, steps in enumerate(record.prefill_steps)
        for start, end, requests, tokens in steps
    )
    columns = [np.array(c) for c in zip(*prefill, strict=True)] or [np.zeros(0)] * 5
    decode = record.decode_steps
    n_prefill, n_decode = len(prefill), len(decode)

    def both(first: np.ndarray, second: np.ndarray, kind: str) -> pa.Array:
        return pa.array(np.concatenate([first, second]).astype(kind))

    def decode_only(values: np.ndarray, kind: str) -> pa.Array:
        nulls = pa.nulls(n_prefill, kind)
        return pa.concat_arrays([nulls, pa.array(values).cast(kind)])

    role = pa.DictionaryArray.from_arrays(
        pa.array(np.repeat([0, 1], [n_prefill, n_decode]), "int8"), ["prefill", "decode"]
    )
    return pa.table(
        {
            "role": role,
            "worker": both(columns[1], decode["worker"], "int16"),
            "start_s": both(columns[0], decode["start"], "float64"),
            "end_s": both(columns[2], decode["end"], "float64"),
            "batch": both(columns[3], decode["batch"], "int32"),
            "tokens": both(columns[4], decode["batch"] + decode["chunked"], "int32"),
            "joined": decode_only(decode["joined"], "int32"),
            "context_tokens": decode_only(decode["context"], "int64"),
            "active_experts": decode_only(decode["active"] / n_moe_layers, "float64"),
            "busiest_rank_experts": decode_only(decode["busiest"] / n_moe_layers, "float64"),
        }
    )


def _known(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=values < 0.0)


def _figures(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))
