"""How configurations say what goes wrong: ``--fail decode:3@60s+30s``, and files of events."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from eldr_sim.errors import InputError
from eldr_sim.inputs import TIME, parse_yaml, read_text, seconds, within
from eldr_sim.simulator.setup.fault_plan import KINDS, POOLS, Fault, Kind, check_overlaps

_WORKER = re.compile(r"(prefill|decode):(\d{1,9})", re.IGNORECASE)
_FAIL = re.compile(rf"([a-z]+:\d+)@({TIME})(?:\+({TIME}))?", re.IGNORECASE)
_ALLOWED = "POOL:NUMBER@SECONDS, +SECONDS until a new one serves, such as decode:3@60s+30s"
_LATEST_S = 1e9
#: What an event has beside its kind and ``at_s``: the field that is not ``for_s``, and its bounds.
_FACTOR = {"slow": ("factor", 1.0, 1e6), "link": ("bandwidth", 1e-6, 1.0)}


class Cancel(NamedTuple):
    """Clients that give up: the share of the requests, and s after their arrival."""

    share: float
    after_s: float


def _worker(field: str, text: object) -> tuple[int, int]:
    match = _WORKER.fullmatch(str(text))
    if match is None:
        raise InputError(field, f"{text!r} is no worker", "prefill:NUMBER or decode:NUMBER, from 0")
    return POOLS.index(match[1].lower()), int(match[2])


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
    """Read a file of events, YAML or JSON: a list of mappings, see docs/faults.md.

    Raises InputError: names the first event that is none.
    """
    events = parse_yaml(read_text(path, "events"), "events", path)
    if not isinstance(events, list):
        raise InputError("events", f"{path} holds no list", "- fail: decode:3 lines")
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
        made: Fault | Cancel = Cancel(float(share), number("after_s", 1e-6, _LATEST_S))
    else:
        pool, worker = _worker(f"{where}.{kind}", event[kind])
        at, factor = number("at_s", 0.0, _LATEST_S), 1.0
        name, lasts = "start_up_s" if kind == "join" else "for_s", math.inf
        if name in left or kind in ("hang", "join"):  # who hangs for good has died
            lasts = number(name, 1e-9, _LATEST_S)
        if kind in _FACTOR:
            name, low, high = _FACTOR[kind]
            factor = number(name, low, high)
        made = Fault(cast("Kind", kind), pool, worker, at, lasts, factor)
    if left:
        raise InputError(f"{where}.{next(iter(left))}", f"no such field of {kind!r}")
    return made


def check_fits(faults: Sequence[Fault], topology: tuple[int, int]) -> None:
    """Raise InputError where a fault's worker does not exist, or two faults do not mix."""
    for fault in faults:
        n = topology[fault.pool]
        if fault.worker >= n:
            allowed = f"{POOLS[fault.pool]}:0 to {n - 1}" if n else POOLS[1 - fault.pool]
            raise InputError("events", f"{fault}: there is no such worker", allowed)
        if fault.kind == "link" and 0 in topology:
            raise InputError("events", f"{fault}: no KV cache is sent over a link here")
    check_overlaps(tuple(faults))
