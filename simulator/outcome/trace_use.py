"""What a run made of its trace: copies of one request that met in a batch, and what to warn of."""

import numpy as np
from numpy.typing import NDArray

from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.traces.routing.copies import WARN_ABOVE, copy_share, expected_copy_share
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.manifest import one_phase
from eldr_sim.traces.workload import Workload


def copies_met(
    trace: RoutingTrace, workload: Workload, record: RunRecord, steps: NDArray[np.void]
) -> dict[str, float]:
    """Return how often copies of a trace request met in a batch, and how often to expect it.

    Measured: the share of decode time in the window that requests spent beside a copy. Expected:
    if the mean batch of a request were drawn at random, by the mix.
    """
    begin, end = record.window[0], min(record.window[1], record.end_s)
    joined = np.flatnonzero(record.requests["decode_start_s"] >= 0)
    decoded = record.requests[joined]
    finish = np.where(decoded["finish_s"] >= 0, decoded["finish_s"], end)
    start = np.clip(decoded["decode_start_s"], begin, end)
    beside = copy_share(
        decoded["decode_worker"].astype(np.int64),
        start,
        np.maximum(np.clip(finish, begin, end), start),
        workload.decode_request[record.numbers[joined]].astype(np.int64),
    )
    sizes = np.bincount(steps["sequences"])  # steps of each batch
    batch = np.arange(len(sizes))
    shares = workload.description["domain_mix"]
    pools = {name: len(trace.requests_of([name], calibration=False)) for name in shares}
    # A request finds itself in a batch of this size: each batch counts once a member.
    members = int(sizes @ batch)
    seen_by_a_request = int(sizes @ batch**2) / members if members else 1.0
    expected, _ = expected_copy_share(pools, shares, max(seen_by_a_request, 1.0))
    return {"copies_share": round(beside, 6), "copies_share_expected": round(expected, 6)}


def trace_warnings(trace: RoutingTrace, copies: dict[str, float], trace_replay: str) -> list[str]:
    """Say what the trace cannot stand for, a line each."""
    warnings = []
    if not trace.has_prompts:
        warnings.append(
            "the routing trace is decode-only: prompts are priced at uniform routing, first tokens "
            "replay the experts of the token after them, and nothing here says how policies with "
            "signatures would do"
        )
    if (stands := one_phase(trace.manifest)) is not None:
        warnings.append(stands)
    if copies["copies_share"] > WARN_ABOVE:
        warnings.append(
            f"the routing trace is small for this run: {100 * copies['copies_share']:.0f}% of "
            "decode time was spent beside a copy of the same trace request (batches drawn at "
            f"random: {100 * copies['copies_share_expected']:.0f}%), so unions are too small"
            + (
                " and gains of locality too large; --trace-replay same_domain shows by how much"
                if trace_replay == "own"
                else ""
            )
        )
    return warnings
