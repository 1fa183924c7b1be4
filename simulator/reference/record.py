"""What has happened, as the record that results are made of."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from eldr_sim.arrays import Records
from eldr_sim.simulator.control.record import RunRecord, by_role, with_columns
from eldr_sim.simulator.control.relocation import RELOCATION
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.reference.requests import Request

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster


def record_of(cluster: ReferenceCluster, end_s: float) -> RunRecord:
    """Return what has happened up to ``end_s``, s; what is open remains unserved."""
    still = "unserved_at_time_limit" if cluster.open_measured else "run_ended_after_window"
    requests = requests_of(cluster, cluster.arrived, still)
    prefill, decode = by_role(cluster.spec, rows_of(cluster.steps, state.STEP), "worker")
    groups = by_role(cluster.spec, rows_of(cluster.group_steps, state.GROUP_STEP), "leader")
    drafted = [np.array(speculation.counts) for speculation in cluster.speculations.values()]
    most = max(map(len, drafted), default=0)  # accepted drafts, and last the drafts verified
    wide = [np.insert(of, len(of) - 1, np.zeros(most - len(of), int)) for of in drafted]
    return RunRecord(
        requests=with_columns(requests, cluster.spec),
        numbers=np.array([request.number for request in cluster.arrived], np.int32),
        prefill_steps=prefill[prefill["end"] <= end_s],
        decode_steps=decode,
        prefill_group_steps=groups[0][groups[0]["end"] <= end_s],
        decode_group_steps=groups[1],
        gaps=np.array(cluster.gaps, state.GAP),
        relocations=np.zeros(0, RELOCATION),
        window=cluster.window,
        end_s=end_s,
        drafted=np.sum(wide, axis=0) if drafted else None,
    )


def rows_of(steps: list[Any], dtype: Any) -> Records:
    """Return the records of steps; columns that they lack are 0."""
    rows = np.zeros(len(steps), dtype)
    if steps:
        names = [field.name for field in fields(steps[0])]
        for name in names:
            rows[name] = [getattr(step, name) for step in steps]
    return rows


def requests_of(cluster: ReferenceCluster, requests: list[Request], still: str) -> Records:
    """Return requests as ``state.REQUEST``; those that are open end as ``still``."""
    rows = np.zeros(len(requests), state.REQUEST)
    first = {} if cluster.acts is None else cluster.acts.first_try
    for name in state.REQUEST.names or ():
        if requests and name in vars(requests[0]) and name != "outcome":
            rows[name] = [first.get(r, {}).get(name, getattr(r, name)) for r in requests]
    numbers = [request.number for request in requests]
    rows["trace_request"] = cluster.workload.text[numbers]
    rows["parent"] = -1
    rows["outcome"] = [state.OUTCOMES.index(request.outcome or still) for request in requests]
    # Who stays where its prompt was computed notes that with its last token.
    stays = (rows["source"] < 0) & (rows["first_token_s"] >= 0.0)
    for name in ("prefill_end_s", "decode_start_s"):
        which = stays & (rows[name] < 0.0) & (rows["outcome"] != state.COMPLETED)
        rows[name][which] = rows["first_token_s"][which]
    return rows
