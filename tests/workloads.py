"""Workloads of a routing trace by keywords, for tests of several rooms."""

import os

from eldr_sim.traces.requests.load import Load
from eldr_sim.traces.requests.request_columns import make_requests
from eldr_sim.traces.workload import join_routing


def make_workload(trace, *, workload="task", trace_replay="own", **asked):
    """Requests of a load's fields, joined with the trace."""
    load = Load(os.fspath(workload), **asked)
    return join_routing(
        make_requests(trace.texts, load), trace, trace_replay=trace_replay, seed=load.seed
    )
