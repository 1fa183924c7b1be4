"""The two tables of a result: one row a request, one row a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.arrays import Array, Floats, Records
from eldr_sim.lazy import Lazy
from eldr_sim.parquet import column, texts
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.outcome.metrics import request_times
from eldr_sim.simulator.plane.state import OUTCOMES

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = Lazy("pyarrow")

ROWS = 1 << 20  #: steps of a table, as many as a row group of Parquet has


def requests_table(record: RunRecord, domains: list[str]) -> pa.Table:
    """Return every request that arrived, in order of arrival; ``_s``: seconds of simulated time,
    null like ``cached_tokens`` where it never came so far; ``measured``: makes the statistics.
    Where a run has them: ``tokenized_s`` (left the front end), ``loaded_tokens`` (from KV tiers)
    and ``load_start_s``."""
    requests = record.requests
    front_end = (requests["tokenized_s"] >= 0.0).any()
    times = request_times(record)

    def plain(*names: str, kind: str = "int32") -> dict[str, pa.Array]:
        return {name: column(requests[name], kind) for name in names}

    def known(*names: str) -> dict[str, pa.Array]:
        return {name: _known(requests[name]) for name in names}

    return pa.table(
        {
            "request_id": column(record.numbers, "int32"),
            "domain": texts(domains, requests["domain"]),
            **plain("measured", kind="bool"),
            "outcome": texts(OUTCOMES, requests["outcome"]),
            **plain("prompt_len", "output_len", "trace_request"),
            **known("cached_tokens"),
            **({} if record.tiers is None else {"loaded_tokens": column(record.tiers.hits.sum(1))}),
            **known("decode_cached_tokens"),
            **plain("prefill_worker", "decode_worker", kind="int16"),
            **plain("preemptions"),
            **({} if record.retries is None else {"retries": column(record.retries)}),
            **known("arrival_s", "sent_s", *(["tokenized_s"] if front_end else [])),
            **({} if record.tiers is None else {"load_start_s": _known(record.load_start_s)}),
            **known("prefill_start_s", "prefill_end_s", "transfer_start_s", "transfer_end_s"),
            **known("decode_start_s", "first_token_s"),
            "finish_s": _known(np.where(record.completed, requests["finish_s"], -1.0)),
            **{f"{name}_ms": _figures(1e3 * times[name]) for name in ("ttft", "tpot", "e2el")},
        }
    )


def step_tables(record: RunRecord, n_moe_layers: int) -> Iterator[pa.Table]:
    """Yield every step of every worker, prefill workers first, each kind in order of start, up to
    `ROWS` a table.

    ``tokens``: computed; ``active_experts``: mean of the MoE layers, ``busiest_rank_experts`` of
    their busiest GPU; null for dense models and where prompts are at uniform routing. Decode steps
    also have ``context_tokens`` that attention read and requests new in the batch (``joined``).

    Where engines share experts these are the group's, and parts are beside them: ``moe_ms`` of the
    slowest rank of each layer, ``dispatch_ms``, ``combine_ms``, ``replica_choice_ms``, ``idle_ms``
    (mean wait for the slowest engine's attention and dense layers), the bytes that the busiest GPU
    sends or receives in its node and between nodes, and token-expert pairs of the busiest rank and
    of all, summed over MoE layers."""
    prefill = record.prefill_steps
    order = np.lexsort((prefill["worker"], prefill["start"]))
    kinds = [record.prefill_group_steps, record.decode_group_steps]
    grouped = [_group_columns(groups) for groups in kinds] if any(map(len, kinds)) else []
    owners = [np.repeat(np.arange(len(groups)), groups["n_busy"]) for groups in kinds]
    owners[0] = owners[0][order] if len(owners[0]) else owners[0]
    n = len(prefill)
    for at in range(0, max(1, n + len(record.decode_steps)), ROWS):
        mine = [slice(at, at + ROWS), slice(max(0, at - n), max(0, at + ROWS - n))]
        steps = prefill[order[mine[0]]], record.decode_steps[mine[1]]
        columns = _columns(*steps, n_moe_layers)
        for name in grouped[0] if grouped else ():
            parts = zip(kinds, grouped, owners, mine, steps, strict=True)
            columns[name] = _figures(
                np.concatenate(
                    [
                        own[name][owner[rows]] if len(groups) else np.full(len(of), np.nan)
                        for groups, own, owner, rows, of in parts
                    ]
                )
            )
        yield pa.table(columns)


def _columns(prefill: Records, decode: Records, n_moe_layers: int) -> dict[str, pa.Array]:
    """Return the columns of steps of prefill workers and of those that decode, in this order."""
    n_prefill, n_decode = len(prefill), len(decode)

    def both(first: Array, second: Array, kind: str) -> pa.Array:
        return column(np.concatenate([first, second]), kind)

    def decode_only(values: Array, kind: str) -> pa.Array:
        whole = np.concatenate([np.zeros(n_prefill, values.dtype), values])
        return column(whole, kind, np.arange(len(whole)) < n_prefill)

    def experts(name: str) -> pa.Array:
        counts = np.concatenate([prefill[name], decode[name]])
        return column(counts / (n_moe_layers or 1), null=counts == 0)

    roles = column(np.repeat([0, 1], [n_prefill, n_decode]), "int8")
    role = pa.DictionaryArray.from_arrays(roles, texts(("prefill", "decode"), np.arange(2)))
    return {
        "role": role,
        "worker": both(prefill["worker"], decode["worker"], "int16"),
        "start_s": both(prefill["start"], decode["start"], "float64"),
        "end_s": both(prefill["end"], decode["end"], "float64"),
        "batch": both(prefill["chunks"], decode["sequences"], "int32"),
        "tokens": both(prefill["chunk_tokens"], decode["tokens"] + decode["chunk_tokens"], "int32"),
        "joined": decode_only(decode["joined"], "int32"),
        "context_tokens": decode_only(decode["context"], "int64"),
        "active_experts": experts("active"),
        "busiest_rank_experts": experts("busiest"),
    }


def _group_columns(groups: Records) -> dict[str, Floats]:
    """Return what the groups' steps add to each of their engines' steps."""
    return {
        **{f"{part}_ms": 1e3 * groups[f"{part}_s"] for part in ("moe", "dispatch", "combine")},
        "replica_choice_ms": 1e3 * groups["choice_s"],
        "idle_ms": 1e3 * groups["wait_s"] / np.maximum(1, groups["n_busy"]),
        **{name: groups[name] for name in ("inside_bytes", "between_bytes")},
        "busiest_rank_pairs": groups["busiest_pairs"].astype(np.float64),
        "pairs": groups["pairs"].astype(np.float64),
    }


def _known(values: Array) -> pa.Array:
    return column(values, null=values < 0.0)


def _figures(values: Array) -> pa.Array:
    return column(values, null=np.isnan(values))
