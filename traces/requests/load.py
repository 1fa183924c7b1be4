"""Which requests arrive: a named workload (``task``: code, math, medical, legal;
``language``: en, zh, ru, fr; ``trace``: all served texts), dealt by a domain mix, or the path of a
log (`request_logs`), which gives arrivals and lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.arrivals import MAX_REQUESTS, MOST_BURSTINESS, Arrivals
from eldr_sim.traces.requests.length_shapes import LengthShape
from eldr_sim.traces.requests.lengths import check_lengths
from eldr_sim.traces.requests.logs.log_window import LogPart
from eldr_sim.traces.requests.session_shape import LANES_S, SessionShape
from eldr_sim.traces.requests.texts import NAMED_WORKLOADS

if TYPE_CHECKING:
    from eldr_sim.traces.requests.logs.request_logs import RequestLog


@dataclass(frozen=True)
class Load:
    """Which requests arrive."""

    workload: str = "task"  #: ``task``, ``language``, ``trace`` or the path of a request log
    #: Mean requests per second, positive; ``inf``: all at 0. Named workloads need it; a log without
    #: it keeps its arrivals, and with it has them stretched evenly.
    request_rate: float | None = None
    #: Shape of the gamma-distributed gaps of drawn arrivals, as in ``vllm bench serve`` (which then
    #: rescales them to end at n / rate): 1 is Poisson, below 1 is burstier.
    burstiness: float = 1.0
    #: How the rate changes while the run lasts (`load_shapes`), with ``request_rate`` as its mean.
    load: str | None = None
    horizon_s: float | None = None  #: take the requests that arrive before this time, s
    #: Take this many requests. A named workload needs one of the two; a log none or one.
    num_requests: int | None = None
    #: Tokens that every request generates, or ``recorded``: as the text, or the log, has it.
    output_len: int | Literal["recorded"] = "recorded"
    seed: int = 0  #: non-negative integer
    #: Weights of the domains, in place of `texts.DOMAIN_MIXES` or the served texts' own shares.
    domain_mix: Mapping[str, float] | None = None
    #: Weights towards which these move evenly, in this many seconds, or else to the last request.
    domain_mix_end: Mapping[str, float] | None = None
    drift_s: float | None = None
    #: Of a named workload: a prompt for each request, or one for each text (``shared``).
    prompts: Literal["unique", "shared"] = "unique"
    #: Draw ``num_requests`` of a log by their prompt lengths, see `length_shapes`.
    length_shape: LengthShape | None = None
    columns: str | None = None  #: names of a log's columns, see `table_columns`
    time_unit: str | None = None  #: of a log's times, where nothing in it says it
    #: ``recorded`` (default), stretched; ``poisson``: drawn at ``request_rate``, a short log begins
    #: again; ``closed``: turns come a gap after the turn before; ``agentx``:
    #: ``max_active_sessions`` lanes go on from the middle of sessions, for ``lanes_s`` (`lanes`).
    arrivals: Arrivals | None = None
    max_active_sessions: int | None = None
    lanes_s: float = LANES_S
    #: Prompt tokens of every request, beside a prefix; as recorded when None, or repeated.
    input_len: int | None = None
    #: ``data_sets``: prompts as long as those that ELDR's authors served (`prompt_lengths`).
    prompt_lengths: Literal["trace", "data_sets"] = "trace"
    #: Draw the lengths given from a range of this half-width, as a share (`lengths`).
    range_ratios: tuple[float, float] = (0.0, 0.0)
    #: Every prompt begins with this many tokens more, of a random one of the prefixes.
    prefix_len: int = 0
    num_prefixes: int = 1
    #: Replay this part of a log instead of taking ``horizon_s`` or ``num_requests`` of it.
    part: LogPart | None = None
    #: Of ``chat`` and ``agent``, whose ``num_requests`` and ``request_rate`` are of sessions.
    session: SessionShape | None = None
    sessions_file: str | None = None  #: which requests of a log go on with which, see `log_rows`
    #: What a log's own system took, which the gaps between its arrivals contain.
    recorded_ttft_ms: float = 0.0
    recorded_tpot_ms: float = 0.0

    @property
    def is_named(self) -> bool:
        """Whether the workload is no log."""
        return self.workload in NAMED_WORKLOADS

    @property
    def draws_arrivals(self) -> bool:
        """Whether arrivals are drawn, not recorded."""
        return self.is_named or self.arrivals == "poisson" or self.load is not None

    def check(self) -> None:
        """Raise InputError if a value is not valid, or contradicts another."""
        self._check_arrivals()
        if self.output_len != "recorded" and not (
            isinstance(self.output_len, int | np.integer)
            and not isinstance(self.output_len, bool)
            and 1 <= self.output_len < 2**31
        ):
            raise InputError("output_len", f"got {self.output_len!r}", "an integer >= 1, recorded")
        if self.prompts not in ("unique", "shared"):
            raise InputError("prompts", f"got {self.prompts!r}", "unique, shared")
        if self.prompts == "shared" and self.session is not None:
            problem = "got 'shared', but prompts of sessions share their history"
            raise InputError("prompts", problem, "unique")
        if self.prompts == "shared" and not self.is_named:
            problem = "got 'shared', but the blocks of a request log decide"
            raise InputError("prompts", problem, "unique")
        check_lengths(
            self.input_len,
            self.prefix_len,
            self.num_prefixes,
            self.range_ratios,
            self.output_len != "recorded",
        )

    def _check_arrivals(self) -> None:
        rate, drawn, count = self.request_rate, self.draws_arrivals, self.num_requests
        if rate is None and drawn:
            problem = "missing, and drawn arrivals need it"
            if self.is_named:
                problem = f"missing, workload {self.workload} needs it"
            raise InputError("request_rate", problem, "a number > 0, inf")
        if rate is not None and not rate > 0:
            raise InputError("request_rate", f"got {rate}", "a number > 0, inf")
        if not 0 < self.burstiness <= MOST_BURSTINESS:
            allowed = f"above 0, at most {MOST_BURSTINESS:g}"
            raise InputError("burstiness", f"got {self.burstiness}", allowed)
        if not drawn and self.burstiness != 1:
            problem = f"got {self.burstiness}, but a request log's arrivals are recorded"
            raise InputError("burstiness", problem, "1, or --arrivals poisson")
        if self.load is not None and (rate == math.inf or self.arrivals not in (None, "poisson")):
            field = "request_rate" if rate == math.inf else "arrivals"
            problem = f"got {getattr(self, field)!r} beside load, which draws arrivals"
            raise InputError(field, problem, "a finite rate, arrivals poisson")
        if self.horizon_s is not None and count is not None:
            raise InputError("horizon_s", "given together with num_requests", "one of the two")
        if drawn and self.horizon_s is None and count is None:
            raise InputError("horizon_s", "missing", "horizon_s or num_requests")
        if self.horizon_s is not None:
            if not (self.horizon_s > 0 and math.isfinite(self.horizon_s)):
                raise InputError("horizon_s", f"got {self.horizon_s}", "a finite number > 0")
            if rate == math.inf:
                problem = "does not bound an infinite request_rate"
                raise InputError("horizon_s", problem, "num_requests")
        if count is not None and not 1 <= count <= MAX_REQUESTS:
            raise InputError("num_requests", f"got {count}", f"1..{MAX_REQUESTS}")

    def log(self) -> RequestLog | None:
        """Return the log that the workload names, None for a named workload; raises InputError."""
        log = None
        if not self.is_named:
            log = named_log(
                self.workload, self.columns, self.sessions_file, self.output_len, self.time_unit
            )
        if self.arrivals not in (None, *get_args(Arrivals)):
            raise InputError("arrivals", f"got {self.arrivals!r}", ", ".join(get_args(Arrivals)))
        if self.arrivals in ("closed", "agentx") and (log is None or log.parent is None):
            problem = f"no request of {Path(self.workload).name} continues another"
            raise InputError("arrivals", problem, "a log with sessions, or --sessions-file")
        if log is None:
            if self.sessions_file is not None:
                raise InputError("sessions_file", f"workload {self.workload} is not a log", "none")
            for name in ("columns", "time_unit"):
                if getattr(self, name) is not None and self.load is None:
                    problem = f"workload {self.workload} has no priorities"
                    raise InputError(name, problem, "the path of a request log")
            if self.arrivals == "recorded":
                problem = f"workload {self.workload} has no recorded ones"
                raise InputError("arrivals", problem, "poisson")
            if self.prefix_len and self.prompts == "shared":
                raise InputError("prefix_len", "whole prompts are shared", "--prompts unique")
        elif log.prefix_block_tokens and (self.input_len is not None or self.prefix_len):
            field = "prefix_len" if self.input_len is None else "input_len"
            problem = f"the blocks of {log.path.name} say how long prompts are and what they share"
            raise InputError(field, problem, "a log without hash_ids")
        if log is not None and not log.timed and self.request_rate is None:
            problem = f"missing: {log.path.name} does not say when requests come"
            raise InputError("request_rate", problem, "a number > 0, inf")
        if self.length_shape is not None and (log is None or self.num_requests is None):
            problem = "without a request log" if log is None else "without num_requests"
            raise InputError("length_shape", problem, "a request log and num_requests")
        return log


def named_log(
    name: str,
    columns: str | None,
    sessions: str | None = None,
    output_len: int | Literal["recorded"] = "recorded",
    time_unit: str | None = None,
) -> RequestLog:
    """Return the log that a workload names; raises InputError where it names none."""
    from eldr_sim.traces.requests.logs.request_logs import known_log  # few runs have one

    if not Path(name).is_file():
        allowed = ", ".join([*NAMED_WORKLOADS, "path of a request log"])
        raise InputError("workload", f"{name!r} is neither a named workload nor a file", allowed)
    # Where requests end with their prompts it is 1, which says nothing of answers in a history.
    answers = None if output_len == "recorded" or output_len == 1 else int(output_len)
    return known_log(name, columns, sessions, answers, time_unit)
