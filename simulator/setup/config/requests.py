"""The fields of a run's configuration that describe its requests and their routing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from eldr_sim.kernel_profiles.models import LONGEST
from eldr_sim.simulator.setup.config import field_types
from eldr_sim.simulator.setup.config.option import Option
from eldr_sim.simulator.setup.config.pools import Fields, PathText
from eldr_sim.traces.requests.length_shapes import LengthShape
from eldr_sim.traces.requests.session_shape import LANES_S, check_history
from eldr_sim.traces.requests.session_shape import PRESETS as SESSIONS

if TYPE_CHECKING:
    from eldr_sim.traces.requests.load_shapes import LoadShape

#: The named workloads; any other is a file.
WORKLOADS = ("task", "language", "trace", *SESSIONS)


class WorkloadConfig(Fields):
    """The requests: how many, when they arrive, which continue a session, and their lengths."""

    workload: Annotated[
        PathText,
        Option(
            common=True,
            metavar="task|language|trace|FILE",
            names="simulator.setup.config.requests:WORKLOADS",
            path="file",
        ),
    ] = "task"
    """Requests to send: ``task``, ``language``, ``trace`` (domains and lengths of the trace's own
    requests), ``chat`` or ``agent`` (sessions, docs/conversations.md), or a log (Azure,
    Mooncake, ``vllm bench serve``, AIPerf and others that ``eldr-sim trace formats`` lists, or
    any table with ``columns``). A routing trace that lacks a domain of ``task`` serves ``trace``
    by default."""
    columns: Annotated[str | None, Option(metavar="KEY=COLUMN,...")] = None
    """Columns of a table that is read as a log: ``time_s=start,input=prompts,output=outputs``;
    also ``time``, ``time_ms``, ``session``, ``priority``."""
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of the times in a log that does not state it."""
    arrivals: Literal["recorded", "poisson", "closed", "agentx"] | None = None
    """Arrivals of a log: ``recorded``, stretched evenly to a rate, or drawn at that rate;
    ``closed``: each turn its recorded gap after the turn before has ended; ``agentx``: from the
    middle of sessions, with warm caches, in ``max_active_sessions`` lanes."""
    request_rate: Annotated[field_types.Rate | None, Option(common=True, unit="requests/s")] = None
    """Mean requests per second (``chat``, ``agent``: sessions per second); ``inf``: all at once.
    Default: 60 (sessions: 1), or the log's own rate."""
    burstiness: float = Field(default=1.0, ge=0.001, allow_inf_nan=False)
    """Shape of the gamma distribution of the gaps between arrivals: 1 is Poisson, less is
    burstier."""
    load: Annotated[PathText | None, Option(metavar="sine:|ladder:|FILE", path="file")] = None
    """A rate that changes over time: ``sine:1,24,period=900``, ``ladder:15,2,10@150``, a file of
    ``t_s,rate``, a usage export, a Prometheus range export, or a log, counted per minute. It runs
    once unless a duration is given; ``request_rate`` scales its mean."""
    max_concurrency: Annotated[int | None, Option(common=True, unit="requests")] = Field(
        default=None, ge=1
    )
    """Maximum number of requests in flight; the others wait at the client."""
    log_from: Annotated[
        Annotated[field_types.Seconds, Field(ge=0)] | None, Option(aliases=("--from",))
    ] = None
    """Start of the measured part of a log, after its first request: 90s, 10m, 2h."""
    log_to: Annotated[
        Annotated[field_types.Seconds, Field(gt=0)] | None, Option(aliases=("--to",))
    ] = None
    """End of the measured part of a log."""
    busiest: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """Measure the busiest window of this length in a log: 10m."""
    duration: Annotated[Annotated[field_types.Seconds, Field(gt=0)] | None, Option(common=True)] = (
        None
    )
    """Length of the measured window, s; the statistics are of the requests that arrive in it.
    Default: 120 s, a whole log, or an hour for ``agentx``."""
    warmup: Annotated[field_types.Seconds, Field(ge=0)] | None = None
    """Warm-up before the measured window, s. Default: 30 s, or 0 with ``num_requests`` or a whole
    log."""
    num_requests: Annotated[
        int | None, Option(common=True, unit="requests", aliases=("--num-prompts",))
    ] = Field(default=None, ge=1)
    """Number of requests (``chat``, ``agent``: sessions) to send, instead of a duration."""
    prompts: Literal["unique", "shared"] = "unique"
    """Give requests that replay the same trace request the same prompt (``shared``; prefix caches
    find it) or unique prompts. In logs, the recorded prefixes decide."""
    seed: Annotated[int, Option(common=True)] = Field(default=0, ge=0)
    """Seed of every random stream."""
    sessions: Annotated[int | None, Option(unit="sessions")] = Field(default=None, ge=1)
    """Number of sessions of ``chat`` and ``agent``. Default: 500, unless a duration is given."""
    max_active_sessions: Annotated[int | None, Option(unit="sessions")] = Field(default=None, ge=1)
    """Maximum number of sessions at a time (vLLM's max-active-conversations). When one ends, the
    next begins; at once if no rate is given."""
    turns: Annotated[field_types.Counted, Option(metavar="N|DRAWN")] = None
    """Number of turns in a session: ``4``, ``4,sd=2``, ``uniform:1,8``, ``exponential:4`` or
    ``lognormal:median=3,p95=12``."""
    calls_per_turn: Annotated[field_types.Counted, Option(metavar="N|DRAWN")] = None
    """Number of requests in a turn; tools answer all but the last."""
    think_time: Annotated[field_types.Drawn, Option(metavar="S|DRAWN", unit="s")] = None
    """Time between an answer and the user's next turn, s."""
    tool_time: Annotated[field_types.Drawn, Option(metavar="S|DRAWN", unit="s")] = None
    """Time between an answer and the tool's result, s."""
    new_tokens: Annotated[field_types.Counted, Option(metavar="N|DRAWN", unit="tokens")] = None
    """New tokens in the prompt of a turn, beyond the history."""
    history: Annotated[str, AfterValidator(check_history), Option(metavar="all|RULE:VALUE")] = "all"
    """History that the next turn keeps: ``all``, ``last:TOKENS`` (the middle is cut),
    ``no_reasoning:SHARE`` (that share of each answer is dropped) or ``reset:TOKENS`` (the
    context starts over at that length)."""
    sessions_file: Annotated[PathText | None, Option(metavar="FILE", path="file")] = None
    """CSV of the sessions in a log, ``request,parent,gap_s``: the request that each one
    continues."""
    recorded_ttft_ms: field_types.Milliseconds = 0.0
    """TTFT of the system that recorded a log, ms. With ``--arrivals closed`` it is subtracted from
    the gaps between arrivals, which contain it."""
    recorded_tpot_ms: field_types.Milliseconds = 0.0
    """TPOT of the system that recorded a log, ms. With ``--arrivals closed`` it is subtracted from
    the gaps between arrivals, which contain it."""
    input_len: Annotated[
        int | None, Option(common=True, unit="tokens", aliases=("--random-input-len",))
    ] = Field(default=None, ge=1, le=LONGEST)
    """Prompt tokens of every request, without a shared prefix. Default: as in the routing trace or
    the file. Prompts longer than the trace's repeat its tokens."""
    prompt_lengths: Literal["trace", "data_sets"] = "trace"
    """Prompt lengths of a named workload: as in the routing trace, or as in ELDR's data sets as its
    authors served them (4 to 1,024 tokens)."""
    output_len: Annotated[
        Annotated[int, Field(ge=1)] | Literal["recorded"] | None,
        Option(common=True, metavar="N|recorded", unit="tokens", aliases=("--random-output-len",)),
    ] = None
    """Output tokens of every request, ignoring end-of-sequence, or ``recorded``. Default: 512 for
    the task and language workloads, ``recorded`` for ``trace`` and files."""
    random_range_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Draw given input and output lengths uniformly between length * (1 - ratio) and length * (1 +
    ratio), as ``vllm bench serve`` does. SGLang's bench_serving draws between length * ratio and
    length; ``engine_args`` accepts its command line."""
    prefix_len: Annotated[
        int,
        Option(unit="tokens", aliases=("--random-prefix-len", "--prefix-repetition-prefix-len")),
    ] = Field(default=0, ge=0, le=LONGEST)
    """Length of a shared prefix of all prompts, tokens, in addition to the input length; prefix
    caches find it."""
    num_prefixes: Annotated[int, Option(aliases=("--prefix-repetition-num-prefixes",))] = Field(
        default=1, ge=1, le=2**20
    )
    """Number of different shared prefixes; each request draws one."""
    length_shape: LengthShape | None = None
    """Resample a file's requests by prompt length, to one of Gimbal's distributions."""

    @property
    def replays_log(self) -> bool:
        """Whether requests come when a file says."""
        drawn = self.arrivals in ("poisson", "agentx") or self.load is not None
        return self.from_file and not drawn

    @property
    def chooses_part(self) -> bool:
        """Whether a part of a log is named."""
        return any(at is not None for at in (self.log_from, self.log_to, self.busiest))

    @property
    def measures_whole_log(self) -> bool:
        """Whether all requests of a log are measured, except a requested warm-up."""
        asked = self.num_requests is None and self.duration is None
        return self.replays_log and asked and not self.chooses_part

    @property
    def from_file(self) -> bool:
        """Whether the workload is a file of recorded requests."""
        return self.workload not in WORKLOADS

    @property
    def warmup_s(self) -> float:
        """Time before the measured window, s."""
        if self.warmup is not None:
            return self.warmup
        all_count = self.num_requests is not None or self.measures_whole_log or bool(self.load)
        all_count = all_count or self.arrivals == "agentx"
        return 0.0 if all_count or self.n_sessions is not None else 30.0

    @property
    def duration_s(self) -> float | None:
        """Length of the measured window, s; None where a log or a number of requests says it."""
        if self.num_requests is not None or self.chooses_part or self.measures_whole_log:
            return None
        if self.duration is None and self.arrivals == "agentx":
            return LANES_S
        if self.duration is None and self.load is not None:
            return self._shape(self.load).span_s
        if self.n_sessions is not None:
            return None
        return 120.0 if self.duration is None else self.duration

    @property
    def effective_rate(self) -> float | None:
        """Mean requests per second; None where a file's timestamps rule."""
        if self.request_rate is None and self.load is not None:
            return self._shape(self.load).mean
        if self.request_rate is not None or self.from_file:
            return self.request_rate
        if self.workload not in SESSIONS:
            return 60.0
        return 1.0 if self.max_active_sessions is None else math.inf

    @property
    def n_sessions(self) -> int | None:
        """Sessions that are drawn, all of which are measured; None where there are none such."""
        if self.workload not in SESSIONS or self.duration is not None or self.load is not None:
            return None
        return self.num_requests or self.sessions or 500

    def _shape(self, load: str) -> LoadShape:
        from eldr_sim.traces.requests.load_shapes import load_shape  # NumPy: --help does without

        return load_shape(load, self.time_unit, None if self.from_file else self.columns)


#: Fields of a run that measures no part of a log.
NO_PART = dict.fromkeys(("log_from", "log_to", "busiest"))


class RoutingConfig(Fields):
    """The tokens that requests replay: which experts they choose."""

    trace: Annotated[
        PathText | None,
        Option(
            common=True,
            metavar="NAME|DIR",
            names="traces.routing.manifest:builtin_traces",
            path="dir",
        ),
    ] = None
    """Name of an embedded routing trace, or a trace folder. Default: drawn for the model and the
    workload's domains (docs/sources.md)."""
    routing_band: Literal["low", "middle", "high"] = "middle"
    """How much of the variance between requests their domain explains in drawn routing: the low,
    middle or high end of what recordings and papers show (docs/sources.md)."""
    routing: Literal["real", "uniform", "balanced", "round_robin", "dummy-weights"] = "real"
    """Source of the chosen experts: the trace (``real``), or a forced choice as in benchmarks of
    engines (docs/sources.md)."""
    trace_replay: Literal["own", "same_domain"] = "own"
    """Generated tokens that a request replays: its own, or those of another request in its domain,
    so that no two requests with equal signatures replay equal tokens."""
    domain_mix: field_types.Mix = None
    """Weights of the trace's domains: ``code=2,math=1``. Default: the workload's."""
    domain_mix_end: field_types.Mix = None
    """Weights of the domains at the end of the run; they drift from ``domain_mix``. Policies are
    fitted to the weights at the start."""
