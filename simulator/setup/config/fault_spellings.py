"""How configurations say what goes wrong: ``--fail decode:3@60s+30s``, and files of events."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import TIME, parse_yaml, read_text, seconds, within
from eldr_sim.simulator.setup.fault_plan import KINDS, Fault, FaultPlan, Kind, check_overlaps
from eldr_sim.traces.streams import stream

if TYPE_CHECKING:
    from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, PoolSpec
    from eldr_sim.simulator.setup.config.groups import FaultConfig
    from eldr_sim.simulator.setup.config.pools import WorkerPool
    from eldr_sim.traces.workload import Workload

_WORKER = re.compile(r"([a-z][a-z0-9_-]*):(\d{1,9})", re.IGNORECASE)
_FAIL = re.compile(rf"([a-z][a-z0-9_-]*:\d+)@({TIME})(?:\+({TIME}))?", re.IGNORECASE)
_ALLOWED = (
    "POOL:NUMBER@SECONDS, +SECONDS until a new one serves, such as decode:3@60s+30s; a worker of "
    "8C is worker:3"
)
_LATEST_S = 1e9
#: What an event has beside its kind and ``at_s``: the field that is not ``for_s``, and its bounds.
_FACTOR = {"slow": ("factor", 1.0, 1e6), "link": ("bandwidth", 1e-6, 1.0)}


class Cancel(NamedTuple):
    """Clients that give up: the share of the requests, and s after their arrival."""

    share: float
    after_s: float
    patient: bool = False  #: who has a first token by then stays


def _worker(field: str, text: object) -> tuple[str, int]:
    match = _WORKER.fullmatch(str(text))
    if match is None:
        raise InputError(
            field, f"{text!r} is not a worker", "POOL:NUMBER, from 0, such as decode:3"
        )
    return match[1].lower(), int(match[2])


def parse_fail(text: str) -> Fault:
    """Read the short spelling of a worker's death; raises InputError."""
    match = _FAIL.fullmatch(text.strip())
    if match is None:
        raise InputError("fail", repr(text), _ALLOWED)
    pool, worker = _worker("fail", match[1])
    at = seconds(match[2], "fail")
    lasts = math.inf if match[3] is None else seconds(match[3], "fail")
    within("fail", at, _LATEST_S, " s")
    if match[3] is not None:
        within("fail", lasts, _LATEST_S, " s")
    return Fault("fail", pool, worker, at, lasts)


def spelled(value: Any) -> Any:
    """Return a list of deaths from whatever spelling; `InputError` names a bad one."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError("fail", repr(value), _ALLOWED)
    parts = tuple(part.strip() for part in ",".join(texts).split(",") if part.strip())
    for part in parts:
        parse_fail(part)
    return parts


def read_events(path: str) -> tuple[list[Fault], list[Cancel]]:
    """Read a list of events, YAML or JSON (docs/faults.md); raises InputError."""
    events = parse_yaml(read_text(path, "events"), "events", path)
    if not isinstance(events, list):
        raise InputError("events", f"{path} does not hold a list", "- fail: decode:3 lines")
    faults, cancels = [], []
    for number, event in enumerate(events):
        where = f"events[{number}]"
        if not isinstance(event, Mapping):
            raise InputError(where, repr(event), "a mapping such as {fail: decode:3, at_s: 60}")
        made = _event(where, event)
        if isinstance(made, Cancel):
            cancels.append(made)
        else:
            faults.append(made)
    return faults, cancels


def _event(where: str, event: Mapping[Any, Any]) -> Fault | Cancel:
    kinds = [kind for kind in (*KINDS, "cancel") if kind in event]
    if len(kinds) != 1:
        raise InputError(where, f"{dict(event)} is not one of them", ", ".join((*KINDS, "cancel")))
    kind, left = kinds[0], {str(key): value for key, value in event.items() if key != kinds[0]}

    def number(name: str, low: float, high: float, default: float | None = None) -> float:
        value = left.pop(name, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= float(value) <= high:
            raise InputError(f"{where}.{name}", repr(value), f"a number from {low:g} to {high:g}")
        return float(value)

    if kind == "cancel":
        share = event["cancel"]
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InputError(f"{where}.cancel", repr(share), "a share of the requests, 0 to 1")
        patient = "patience_s" in left
        after_s = number("patience_s" if patient else "after_s", 1e-6, _LATEST_S)
        made: Fault | Cancel = Cancel(float(share), after_s, patient)
    else:
        pool, worker = _worker(f"{where}.{kind}", event[kind])
        at, factor = number("at_s", 0.0, _LATEST_S), 1.0
        name, lasts = "start_up_s" if kind == "join" else "for_s", math.inf
        if name in left or kind in ("hang", "join"):  # who hangs for good has died
            lasts = number(name, 1e-9, _LATEST_S)
        if kind in _FACTOR:
            name, low, high = _FACTOR[kind]
            factor = number(name, low, high)
        resend = left.pop("resend", False) if kind == "hang" else False
        if not isinstance(resend, bool):
            raise InputError(f"{where}.resend", repr(resend), "true or false")
        made = Fault(cast("Kind", kind), pool, worker, at, lasts, factor, resend)
    if left:
        raise InputError(f"{where}.{next(iter(left))}", f"no such field of {kind!r}")
    return made


def check_fits(faults: Sequence[Fault], workers: Mapping[str, int], hands_over: bool) -> None:
    """Raise InputError where a fault's worker does not exist, or two faults do not mix."""
    for fault in faults:
        n = workers.get(fault.pool, 0)
        if fault.worker >= n:
            known = {fault.pool: n} if n else workers
            allowed = ", ".join(
                f"{replace(fault, pool=pool, worker=0).where}" + (f" to {of - 1}" if of > 1 else "")
                for pool, of in known.items()
            )
            raise InputError("events", f"{fault}: there is no such worker", allowed)
        if fault.kind == "link" and not hands_over:
            raise InputError("events", f"{fault}: this cluster sends no KV caches over links")
    check_overlaps(tuple(faults))


def in_cluster(fault: Fault, pools: Sequence[PoolSpec] | Sequence[WorkerPool]) -> Fault:
    """Return a fault with the name of its pool: the workers of ``xC`` are ``worker:N``, and
    ``decode:N`` says the same."""
    if [pool.name for pool in pools if pool.decodes] != ["decode"] or len(pools) > 1:
        return fault
    pool = "decode" if fault.pool == "worker" else fault.pool
    return replace(fault, pool=pool, colocated=True)


def planned(
    asked: FaultConfig, seed: int, spec: ClusterSpec, workload: Workload, *, moves: bool
) -> FaultPlan | None:
    """Return what goes wrong; None where nothing does. ``moves``: whether experts move."""
    if not asked.fail and asked.events is None:
        return None
    faults: list[Fault] = []
    cancels: list[Cancel] = []
    if asked.events is not None:
        faults, cancels = read_events(asked.events)
    faults += [parse_fail(text) for text in asked.fail]
    faults = [in_cluster(fault, spec.pools) for fault in faults]
    engines = {pool.name: pool.engine for pool in spec.pools}
    workers = {
        pool.name: pool.n // pool.engine.parallelism.data_parallel_size for pool in spec.pools
    }
    check_fits(faults, workers, any(pool.then >= 0 for pool in spec.pools))
    for fault in faults:
        layout = engines[fault.pool].layout
        own = layout is not None and layout.has_steps_of_its_own
        if own and fault.kind not in ("drain", "link"):
            problem = "workers that stream weights or have stages are not simulated"
            raise InputError("events", f"{fault}: faults of {problem}")
        if moves and fault.kind in ("fail", "join"):
            problem = "with moving experts (eplb_interval) are not simulated"
            raise InputError("events", f"{fault}: dead workers {problem}")
    rng, cancel_s = stream(seed, "cancel"), np.full(len(workload), np.inf)
    patient = np.zeros(len(workload), np.bool_)
    for cancel in cancels:
        gives_up = rng.random(len(workload)) < cancel.share
        gives_up &= workload.arrival_s + cancel.after_s < cancel_s
        cancel_s[gives_up] = (workload.arrival_s + cancel.after_s)[gives_up]
        patient[gives_up] = cancel.patient
    return FaultPlan(
        tuple(faults),
        cancel_s if cancels else None,
        asked.health_delay_ms / 1e3,
        asked.retry,
        asked.max_retries,
        patient if cancels else None,
        asked.user_retry_s,
    )
