"""The faults of a run as SimPy processes: what `Actions` do, and when."""

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
import simpy

from eldr_sim.simulator.plane import state
from eldr_sim.simulator.setup.fault_plan import Fault

#: `control.actions.Actions`, or `reference.faults.Faults`, its like.
Acts = Any
#: When something happens, s, and what.
_Deed = tuple[float, Callable[[], None]]


def start_faults(acts: Acts) -> None:
    """Start a process for each fault of a plan, and one for each client that gives up."""
    plan = acts.plan
    for fault in plan.faults:
        _begin(acts, list(_DEEDS[fault.kind](acts, fault, _engines(acts, fault))))
    if plan.cancel_s is not None:
        after_s = plan.cancel_s - acts.cluster.workload.arrival_s
        for request in np.flatnonzero(np.isfinite(plan.cancel_s)).tolist():
            give_up = partial(leave, acts, request, request)
            if acts.of_sessions:
                give_up = partial(_give_up, acts, request, float(after_s[request]))
            _begin(acts, [(float(plan.cancel_s[request]), give_up)])


def _begin(acts: Acts, deeds: list[_Deed]) -> None:
    """Start a process that does things when their time comes, those of one time in order."""
    wakes = [(time, acts.env.at(time), act) for time, act in deeds if np.isfinite(time)]

    def fault() -> Generator[simpy.Event, Any, None]:
        for _, wake, act in sorted(wakes, key=lambda deed: deed[0]):
            yield wake
            act()

    acts.env.process(fault())


def _give_up(acts: Acts, request: int, after_s: float) -> None:
    """Let a client give up ``after_s`` behind its request's arrival, or 10 ms at least."""
    if acts.requests["outcome"][request] != state.OPEN:
        return
    at_s = acts.now + max(after_s, 0.01)
    if request in acts.came("arrived"):
        at_s = float(acts.requests["arrival_s"][request]) + after_s
    if at_s > acts.now:
        acts.env.at(at_s, lambda _event: _give_up(acts, request, after_s))
    else:
        leave(acts, request, request)


def leave(acts: Acts, request: int, client: int) -> None:
    """Let a client of a plan leave now, unless it only waits for a first token that it has."""
    patient, first_s = acts.plan.patient, acts.first_token_s(request)
    if patient is None or not patient[client] or not 0.0 <= first_s <= acts.now:
        acts.cancel(request)


def _engines(acts: Acts, fault: Fault) -> range:
    engines: range = acts.engines(fault.pool, fault.worker)
    return engines


def _fail(acts: Acts, fault: Fault, engines: range) -> Iterator[_Deed]:
    delay = acts.plan.health_delay_s
    yield fault.at_s, partial(acts.die, engines)
    yield fault.at_s + delay, partial(acts.hear_of_death, engines)
    yield fault.end_s, partial(acts.start, engines)
    yield fault.end_s + delay, partial(acts.avoid, engines, -1)


def _join(acts: Acts, fault: Fault, engines: range) -> Iterator[_Deed]:
    acts.remove(engines)
    yield fault.end_s, partial(acts.start, engines)
    yield fault.end_s + acts.plan.health_delay_s, partial(acts.avoid, engines, -1)


def _hang(acts: Acts, fault: Fault, engines: range) -> Iterator[_Deed]:
    delay = acts.plan.health_delay_s
    yield fault.at_s, partial(acts.hang, engines, fault.for_s)
    if delay < fault.for_s:  # else it is over before anybody has noticed
        yield fault.at_s + delay, partial(acts.hear_of_hang, engines, fault.resend)
        yield fault.end_s + delay, partial(acts.avoid, engines, -1)


def _drain(acts: Acts, fault: Fault, engines: range) -> Iterator[_Deed]:
    yield fault.at_s, partial(acts.avoid, engines, 1)
    yield fault.end_s, partial(acts.avoid, engines, -1)


def _slow(acts: Acts, fault: Fault, engines: range) -> Iterator[_Deed]:
    yield fault.at_s, partial(acts.slow, engines, fault.factor)
    yield fault.end_s, partial(acts.slow, engines, 1.0)


def _link(acts: Acts, fault: Fault, engines: range) -> Iterator[_Deed]:
    yield fault.at_s, partial(acts.scale, engines, fault.factor)
    yield fault.end_s, partial(acts.scale, engines, 1.0)


_DEEDS = {
    "fail": _fail, "join": _join, "hang": _hang, "drain": _drain, "slow": _slow, "link": _link,
}  # fmt: skip
