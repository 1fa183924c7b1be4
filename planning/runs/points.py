"""Points: configurations with a key, each run once, and what became of them."""

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.run_config import RunConfig


@dataclass(frozen=True)
class Point:
    """A configuration to run; ``key`` is the caller's name for it."""

    key: str
    config: RunConfig


@dataclass(frozen=True)
class Outcome:
    """Outcome of a point: its summary, or why it failed."""

    key: str  #: the point's
    summary: dict[str, Any] | None  #: ``summary.json`` of the run; None where it failed
    reason: str  #: why it failed, in one line; empty where it did not
    seconds: float  #: wall time of the run, which differs from run to run
    #: Whether it failed because its processes were killed, which says little about the point.
    killed: bool = False


def run_point(point: Point) -> Outcome:
    """Run one point in this process."""
    start = time.perf_counter()
    summary, reason = None, ""
    try:
        summary = simulate_summary(point.config)
    except InputError as error:
        reason = str(error)
    except Exception as error:  # of any kind: the other points go on
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Outcome(point.key, summary, reason, time.perf_counter() - start)


def with_seed(config: RunConfig, index: int) -> RunConfig:
    """Return the run of seed number ``index``, counted from the configuration's own."""
    return config.model_copy(update={"seed": config.seed + index})


def config_key(config: RunConfig) -> str:
    """Return a key that two configurations share only if they are equal."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
