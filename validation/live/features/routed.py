"""Two engines behind the router: live, and simulated.

The router goes by what the engines say of their KV caches; or a quarter of a steady load in, the
first engine is killed and started again, or stands still for a while. The simulation receives when
that was, when the router knew, and when it knew that the engine was back. Which requests are lost,
which are sent again, how long the others wait and when the load is served as before is for the
simulation to say."""

import json
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from eldr_sim.arrays import Bools, Floats
from eldr_sim.errors import InputError
from eldr_sim.kinds import Row
from eldr_sim.simulator.outcome.fault_metrics import time_to_recover
from eldr_sim.validation.live.calibration.engine_calibration import EngineCalibration
from eldr_sim.validation.live.engines.load import Load
from eldr_sim.validation.live.engines.servers import EngineProcess
from eldr_sim.validation.live.engines.setups import Setup, start_proxy
from eldr_sim.validation.live.features.feature_setups import (
    Sent,
    figures,
    live_times,
    read_metrics,
    replay,
    serve,
)

_STRUCK_AT = 0.25  #: share of the load's arrivals before it happens
_FREEZE_S = 10.0
_ROUTER: Row = {"retries": 1, "health_interval_s": 0.5, "health_timeout_s": 1.0}
_LIMIT_S = 300.0  #: longest time until the router knows
_POLL_S = 0.05
_LEAD_S = 0.5  #: from here to the first request
_MANY_TIMES = 2.0  #: the median end-to-end latency: longer is not good


class Moments(NamedTuple):
    """When an engine was struck, the router knew it, and that it was back: `time.monotonic`."""

    struck_s: float
    known_s: float
    back_s: float


class Outcome(NamedTuple):
    """What became of a load."""

    figures: Row  #: of requests that got all their tokens
    #: Prompt tokens that were cached; or lost, sent again, slowest TTFT and time to recover, s.
    counted: dict[str, float | None]


def serve_routed(
    load: Load,
    setup: Setup,
    calibrated: EngineCalibration,
    fields: Mapping[str, Any],
    kind: Literal["death", "freeze"] | None,
    trace: Path,
    about: Mapping[str, Any],
) -> tuple[Outcome, Outcome]:
    """Send a load through the router to two engines; return what became of it, live and simulated.
    ``fields``: of the run, with ``policy``; ``kind``: what befalls the first engine; ``trace``,
    ``about``: as of `features.replay`. Raises InputError if the router does not notice."""
    log = setup.folder / f"router-{time.time_ns():x}.jsonl"
    told = _ROUTER | {"kv_events": [engine.events for engine in setup.engines if engine.events]}
    caches = bool(fields.get("enable_prefix_caching"))
    cached = _cached(setup) if caches else 0.0
    with start_proxy(setup, fields["policy"], log, **told) as url, ThreadPoolExecutor(1) as beside:
        start_s = time.monotonic() + _LEAD_S
        at_s = start_s + _STRUCK_AT * load.requests[-1].send_s
        striking = kind and beside.submit(_strike, kind, setup.engines[0], url, at_s)
        survivor = replace(setup.endpoints[1], url=url)
        sent = serve(load, survivor, calibrated, None, start_s=start_s, tolerant=kind is not None)
        moments = striking.result() if striking else None
    live, ours = _live(sent, moments), _simulated(sent, fields, moments, kind, trace, about)
    if caches:
        live.counted["prompt tokens cached"] = _cached(setup) - cached
    return live, ours


def _cached(setup: Setup) -> float:
    """Return the prompt tokens that the engines have found in their caches so far."""
    return sum(read_metrics(e.url).get("prefix_cache_hits", 0.0) for e in setup.endpoints)


def _strike(kind: str, engine: EngineProcess, router: str, at_s: float) -> Moments:
    """Kill an engine and start it again, or let it stand still, and watch the router."""
    time.sleep(max(0.0, at_s - time.monotonic()))
    struck_s = time.monotonic()
    engine.send_signal(signal.SIGKILL if kind == "death" else signal.SIGSTOP)
    known_s = _when_up(router, 1)
    if kind == "death":
        engine.stop()
        engine.start()
        engine.wait()
    else:
        time.sleep(max(0.0, struck_s + _FREEZE_S - time.monotonic()))
        engine.send_signal(signal.SIGCONT)
    return Moments(struck_s, known_s, _when_up(router, 2))


def _when_up(router: str, engines: int) -> float:
    """Wait until the router takes so many engines for healthy; return when it does."""
    deadline = time.monotonic() + _LIMIT_S
    while read_metrics(router).get("eldr_router_engine_up") != engines:
        if time.monotonic() > deadline:
            raise InputError("features", f"the router knew no {engines} engines in {_LIMIT_S:g} s")
        time.sleep(_POLL_S)
    return time.monotonic()


def _live(sent: Sent, moments: Moments | None) -> Outcome:
    """Return what became of a load, by its client and the router."""
    tokens = sent.requests["token_s"].to_pylist()
    whole = np.array([len(t) for t in tokens]) == sent.requests["output_len"].to_numpy()
    times = live_times(sent.requests.filter(whole))
    first = float(np.min(sent.requests["sent_s"].to_numpy()))
    # Nobody says when an answer broke off: with its last token, or at once.
    sent_s = sent.requests["sent_s"].to_pylist()
    ends = [came[-1] if came else at for came, at in zip(tokens, sent_s, strict=True)]
    counted: dict[str, float | None] = {}
    if moments is not None:
        own = Moments(*(at - first for at in moments))
        again = sent.counted.get("eldr_router_retries", 0.0)
        counted = _consequences(np.array(ends) - first, whole, times, again, own)
    return Outcome(figures(times), counted)


def _simulated(
    sent: Sent,
    fields: Mapping[str, Any],
    moments: Moments | None,
    kind: str | None,
    trace: Path,
    about: Mapping[str, Any],
) -> Outcome:
    """Return what becomes of the same load, simulated."""
    fields = dict(fields) | {"topology": "2C"}
    first = float(np.min(sent.requests["sent_s"].to_numpy()))
    if moments is not None:
        # A connection that is refused tells at once that an engine has died; one that hangs, late.
        dies = kind == "death"
        over_s = moments.back_s if dies else moments.struck_s + _FREEZE_S
        at = sent.clock.own_s(np.array([first, moments.struck_s, moments.known_s, over_s]))
        struck, known, over = (at[1:] - at[0]).tolist()
        event: Row = {
            "fail" if dies else "hang": "decode:0",
            "at_s": struck,
            "for_s": over - struck,
        }
        if not dies:  # whom the router gives up on it sends elsewhere
            event["resend"] = True
            fields |= {"health_delay_ms": 1e3 * (known - struck)}
        events = trace.with_name(f"{trace.name}-{kind}.yaml")
        events.write_text(json.dumps([event]), encoding="utf-8")
        fields |= {"events": str(events), "max_retries": _ROUTER["retries"]}
    again = replay(sent, fields, trace=trace, **about)
    whole = again.record.completed[again.rows]
    times = {name: seconds[whole] for name, seconds in again.times.items()}
    counted: dict[str, float | None] = {}
    if moments is not None:
        ends, retries = again.record.requests["finish_s"][again.rows], again.record.retries
        resent = 0.0 if retries is None else float(retries.sum())
        own = Moments(*(at - first for at in moments))
        counted = _consequences(ends, whole, times, resent, own)
    if fields.get("enable_prefix_caching"):
        summary = again.figures
        counted["prompt tokens cached"] = float(summary["prefix_cache_hits"])
    return Outcome(figures(times), counted)


def _consequences(
    ends: Floats, whole: Bools, times: Row, again: float, moments: Moments
) -> dict[str, float | None]:
    return {
        "requests lost": float((~whole).sum()),
        "sent again": again,
        "slowest TTFT, s": float(times["ttft"].max()),
        "time to recover, s": _recovered(ends, whole, times, moments),
    }


def _recovered(ends: Floats, whole: Bools, times: Row, moments: Moments) -> float | None:
    """Return the seconds until as many requests are good as before, see `time_to_recover`. Good are
    those with all their tokens, within twice the median of those that ended before."""
    took = np.full(len(whole), np.inf)
    took[whole] = times["e2el"]
    before = took[whole & (ends < moments.struck_s)]
    good = took <= _MANY_TIMES * np.median(before) if len(before) else whole
    return time_to_recover(ends, good, 0.0, moments.struck_s, moments.back_s, float(ends.max()))
