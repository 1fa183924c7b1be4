"""Reader of the step log that the plug-ins of one engine write."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.errors import InputError
from eldr_sim.kinds import AnyPath, Row
from eldr_sim.traces.routing.capture.step_log import LogReader, external_ids

_LIMIT_S = 10.0  # an engine writes a step within milliseconds
_POLL_S = 0.05


@dataclass(frozen=True)
class EngineStep:
    """One step that computed tokens. Times are seconds of ``CLOCK_MONOTONIC``."""

    #: ``start_s``, ``end_s``: start of scheduling; hand-over of the outputs to the front end.
    start_s: float
    end_s: float
    #: ``forward_start_s``, ``forward_end_s``: start and end of the forward pass.
    forward_start_s: float
    forward_end_s: float
    #: Time of all MoE layers (gates included), and of attention in all layers.
    moe_s: float
    attention_s: float
    #: (request, position of its first token, tokens) of every request in the step.
    rows: list[tuple[str, int, int]]
    distinct: Ints  #: int64 ``[layers]``: distinct experts of each MoE layer
    probe_s: float = math.nan  #: time of the plug-in's probe before the step; NaN without one

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(count for _, _, count in self.rows)


@dataclass(frozen=True)
class EngineLog:
    """The log of one engine."""

    #: Sizes, blocks and ``max_model_len`` as the engine runs with them.
    engine: dict[str, int]
    received_s: dict[str, float]  #: arrival of each request at the engine process
    steps: list[EngineStep]  #: steps in order
    #: Start and end of each KV transfer into this engine, by request.
    pulled_s: dict[str, tuple[float, float]]

    def cycles_s(self) -> Floats:
        """Return the time from each step's start to the next one's, s; NaN if no request is in
        both."""
        cycles = np.full(len(self.steps), np.nan)
        names = [{name for name, _, _ in step.rows} for step in self.steps]
        for i, (step, following) in enumerate(pairwise(self.steps)):
            if names[i] & names[i + 1]:
                cycles[i] = following.start_s - step.start_s
        return cycles


def read_engine_log(folder: AnyPath) -> EngineLog:
    """Read an engine's log folder; raises InputError if files are missing, damaged or disagree."""
    base = Path(folder)
    engine = _lines(base, "engine-*.jsonl")
    worker = _lines(base, "worker-*.jsonl")
    captured = sorted(base.glob("steps-*.jsonl"))
    if len(captured) != 1:
        raise InputError("log", f"{base} holds {len(captured)} steps-*.jsonl", "one")
    routed = list(LogReader(captured[0]).steps())
    outer = [line for line in engine if "tokens" in line]
    inner = [line for line in worker if "moe" in line]
    n = min(len(outer), len(inner), len(routed))  # the last step may have been cut off
    if max(len(outer), len(inner), len(routed)) > n + 1:
        counts = f"{len(outer)}, {len(inner)} and {len(routed)} steps"
        problem = f"{base}: engine, worker and capture logged {counts}"
        raise InputError("log", problem, "the same steps in all three")
    steps = []
    for a, b, (rows, _, ids) in zip(outer[:n], inner[:n], routed[:n], strict=True):
        if a["tokens"] != {name: count for name, _, count in rows}:
            raise InputError("log", f"{base}: engine and worker logged different steps")
        distinct = np.array([len(np.unique(ids[:, k])) for k in range(ids.shape[1])])
        times = a["start"], a["end"], b["start"], b["end"], sum(b["moe"]), sum(b["attention"])
        probe_s = math.nan if b.get("probe") is None else b["probe"]
        steps.append(EngineStep(*times, rows, distinct, probe_s))
    described = next((line["engine"] for line in engine if "engine" in line), None)
    if described is None:
        raise InputError("log", f"{base}: the engine did not describe itself")
    return EngineLog(
        described,
        {line["received"]: line["at"] for line in engine if "received" in line},
        steps,
        {line["pulled"]: (line["start"], line["end"]) for line in worker if "pulled" in line},
    )


def read_complete_log(
    folder: AnyPath, computed: Mapping[str, int], limit_s: float = _LIMIT_S
) -> EngineLog:
    """Read an engine's log once it holds the end of every request: clients have their last token
    first. Raises InputError if it does not within ``limit_s``. ``computed``: tokens that the engine
    has computed in the end, by the client's name: all but the last one, which is never fed."""
    deadline = time.monotonic() + limit_s
    while True:
        over = time.monotonic() > deadline
        try:
            log = read_engine_log(folder)
            if not (lacking := _lacking(log, computed)):
                return log
            raise InputError(
                "log",
                f"{folder}: {limit_s:g} s after the last token, {len(lacking)} of "
                f"{len(computed)} requests have no end here, such as {lacking[0]}",
                "a line of every step",
            )
        except InputError:  # its files are written one after the other
            if over:
                raise
        time.sleep(_POLL_S)


def _lacking(log: EngineLog, computed: Mapping[str, int]) -> list[str]:
    """Return the requests whose last tokens are in no step."""
    reached: dict[str, int] = {}
    for step in log.steps:
        for name, start, count in step.rows:
            reached[name] = max(reached.get(name, 0), start + count)
    known = list(computed)
    found = request_rows(reached, {name: row for row, name in enumerate(known)}).items()
    ended = {known[row] for name, row in found if reached[name] >= computed[known[row]]}
    return [name for name in known if name not in ended]


def request_rows(names: Iterable[str], rows: Mapping[str, int]) -> dict[str, int]:
    """Return the row of each engine-side request name with a known request."""
    found = {}
    for name in names:
        row = next((rows[known] for known in external_ids(name) if known in rows), None)
        if row is not None:
            found[name] = row
    return found


def _lines(base: Path, pattern: str) -> list[Row]:
    files = sorted(base.glob(pattern))
    if len(files) != 1:
        raise InputError("log", f"{base} holds {len(files)} {pattern}", "one: of one engine")
    lines: list[Row] = []
    for text in files[0].read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break  # the engine was stopped while it wrote its last line
    return lines
