"""The fields of a run's configuration, in groups."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from eldr_sim.errors import InputError
from eldr_sim.inputs import seconds
from eldr_sim.kernel_profiles.models import LONGEST
from eldr_sim.kernel_profiles.parallel import Backend, MoEBackend, Padding
from eldr_sim.simulator.setup.pools import Fields, PathText, Pool, Topology, policy_word
from eldr_sim.simulator.setup.speculative_config import Speculative
from eldr_sim.traces.requests.length_shapes import LengthShape

#: The named workloads; any other is a file.
WORKLOADS = ("task", "language", "trace")


def _number_or_inf(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() in {"inf", "infinity", ".inf"}:
        return math.inf
    return value


def _fail(value: Any) -> Any:
    from eldr_sim.simulator.setup.fault_spellings import spelled  # most runs have none

    return spelled(value) if value else ()


def parse_mix(text: str, field: str = "domain_mix") -> dict[str, float]:
    """Return the weights of ``NAME=WEIGHT,...``; raises InputError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = (word.strip() for word in part.partition("="))
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not name or math.isnan(number) or name in weights:
            raise InputError(field, repr(text), "NAME=WEIGHT,... such as code=2,math=1, each once")
        weights[name] = number
    return weights


def _seconds(value: Any, about: ValidationInfo) -> Any:
    return seconds(value, about.field_name or "") if isinstance(value, str) else value


def _mix(value: Any) -> Any:
    return parse_mix(value) if isinstance(value, str) else value


#: Weights by domain, as a mapping or spelled ``code=2,math=1``.
Mix = Annotated[dict[str, float] | None, BeforeValidator(_mix)]
Rate = Annotated[float, BeforeValidator(_number_or_inf), Field(gt=0)]
#: Seconds, or a time such as ``90s``, ``10m`` or ``2h``; 31 years are longer than any run.
Seconds = Annotated[float, BeforeValidator(_seconds), Field(le=1e9, allow_inf_nan=False)]


class ServiceLevel(BaseModel):
    """Upper bounds that a good request keeps, as ``vllm bench serve --goodput`` has them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ttft: float | None = Field(default=None, gt=0)
    """Time to first token, ms."""
    tpot: float | None = Field(default=None, gt=0)
    """Time per output token after the first, ms."""
    e2el: float | None = Field(default=None, gt=0)
    """End-to-end latency, ms."""


class PolicyConfig(Fields):
    """Who serves a request, in which order, and where experts live."""

    policy: Annotated[str, policy_word("decode")] = "round_robin"
    """Decode policy: which decode worker gets a request after its prefill, or which co-located
    worker when it arrives. Parameters follow the name: ``eldr:tau=0.2,layer_mask=all``; ``eldr-sim
    policies`` lists them."""
    prefill_policy: Annotated[str, policy_word("prefill")] = "prefix_hash"
    """Prefill policy: which prefill worker gets a request when it arrives."""
    queue_order: Annotated[str, policy_word("queue")] = "fcfs"
    """Which waiting request an engine admits next: the first, the shortest, or a request log's
    lowest priority."""
    expert_placement: Annotated[str, policy_word("placement")] = "linear"
    """Which GPU of a decode (or co-located) worker holds which experts under expert parallelism:
    neighbours together, an even load or activation, or experts that tokens choose together."""
    replica_choice: Annotated[str, policy_word("replica")] = "hash"
    """Which instance of an expert computes a token where there are redundant experts: vLLM's hash
    of the token's position, or one that spares bytes, evens the load or keeps the activated experts
    of the busiest GPU few."""


class WorkloadConfig(Fields):
    """The requests: how many there are, and when they come."""

    workload: PathText = "task"
    """``task``, ``language``, ``trace`` (domains and lengths of the trace's own requests), or a log
    (Azure, Mooncake, BurstGPT, ``vllm bench serve``, AIPerf, or any table with ``columns``)."""
    columns: str | None = None
    """Of a table: ``time_s=start,input=prompts,output=outputs``; also ``time``, ``time_ms``,
    ``session``, ``priority``."""
    arrivals: Literal["recorded", "poisson"] | None = None
    """Of a log: ``recorded``, stretched evenly to a rate, or drawn at that rate."""
    request_rate: Rate | None = None
    """Mean requests per second; ``inf``: all at once. 60, or as a log has them."""
    burstiness: float = Field(default=1.0, ge=0.001, allow_inf_nan=False)
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """At most this many requests in flight; the others wait at the client."""
    log_from: Annotated[Seconds, Field(ge=0)] | None = None
    """Measure a log from this time on, after its first request: 90s, 10m, 2h."""
    log_to: Annotated[Seconds, Field(gt=0)] | None = None
    """Measure a log up to this time."""
    busiest: Annotated[Seconds, Field(gt=0)] | None = None
    """Measure the part of a log, so long, that has most requests."""
    duration: Annotated[Seconds, Field(gt=0)] | None = None
    """Length of the measured window, whose requests make the statistics: 120 s, or all of a
    log."""
    warmup: Annotated[Seconds, Field(ge=0)] | None = None
    """Time before it: 30 s, or 0 with ``num_requests`` or a whole log."""
    num_requests: int | None = Field(default=None, ge=1)
    """Send so many requests instead."""
    prompts: Literal["unique", "shared"] = "unique"
    """Whether requests that replay the same trace request have one prompt (``shared``, which prefix
    caches find) or one each. A log says itself which share a prefix."""
    seed: int = Field(default=0, ge=0)
    """Seed of every random stream."""

    @property
    def warmup_s(self) -> float:
        """Time before the measured window, s."""
        if self.warmup is not None:
            return self.warmup
        return 0.0 if self.num_requests is not None or self.measures_whole_log else 30.0

    @property
    def duration_s(self) -> float | None:
        """Length of the measured window, s; None where a log or a number of requests says it."""
        if self.num_requests is not None or self.chooses_part or self.measures_whole_log:
            return None
        return 120.0 if self.duration is None else self.duration

    @property
    def replays_log(self) -> bool:
        """Whether requests come when a file says."""
        return self.from_file and self.arrivals != "poisson"

    @property
    def chooses_part(self) -> bool:
        """Whether a part of a log is named."""
        return any(at is not None for at in (self.log_from, self.log_to, self.busiest))

    @property
    def measures_whole_log(self) -> bool:
        """Whether all requests of a log are measured, but for a warm-up that is asked for."""
        asked = self.num_requests is None and self.duration is None
        return self.replays_log and asked and not self.chooses_part

    @property
    def effective_rate(self) -> float | None:
        """Mean requests per second; None where a file's timestamps rule."""
        if self.request_rate is not None or self.from_file:
            return self.request_rate
        return 60.0

    @property
    def from_file(self) -> bool:
        """Whether the workload is a file of recorded requests."""
        return self.workload not in WORKLOADS


#: Fields of a run that measures no part of a log.
NO_PART = dict.fromkeys(("log_from", "log_to", "busiest"))


class RoutingConfig(Fields):
    """Whose tokens the requests replay, and so which experts they choose."""

    trace: PathText | None = None
    """Name of an embedded routing trace or a trace folder; drawn for the model and the workload's
    domains when not given (docs/synthetic.md)."""
    routing_band: Literal["low", "middle", "high"] = "middle"
    """Where in its preset's band routing is drawn: the domains' part in it as recorded of
    all labels, of those of the task workload (``middle``), or as published (docs/synthetic.md)."""
    trace_replay: Literal["own", "same_domain"] = "own"
    """Whose generated tokens a request replays: its own, or those of another request of its domain
    (then no two requests with equal signatures replay equal tokens)."""
    domain_mix: Mix = None
    """Weights of the trace's domains, ``code=2,math=1``; the workload's own when not given."""
    domain_mix_end: Mix = None
    """Weights towards which they move while the run lasts; fits know those at its start."""


class LengthConfig(Fields):
    """How long the requests are, where not as recorded."""

    input_len: int | None = Field(default=None, ge=1, le=LONGEST)
    """Prompt tokens of every request, beside a prefix; those of the routing
    trace, or of the file, when not given. Longer ones replay its tokens more than once."""
    prompt_lengths: Literal["trace", "data_sets"] = "trace"
    """Whether a named workload's prompts are as long as in the routing trace, or as those of ELDR's
    data sets, as its authors served them (4 to 1,024 tokens)."""
    output_len: Annotated[int, Field(ge=1)] | Literal["recorded"] | None = None
    """Output tokens of every request, ignoring end-of-sequence, or ``recorded``. 512 for the task
    and language workloads, ``recorded`` for ``trace`` and a file."""
    random_range_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Draw input and output lengths that are given evenly from length * (1 - ratio) to length * (1
    + ratio), as ``vllm bench serve`` does."""
    prefix_len: int = Field(default=0, ge=0, le=LONGEST)
    """Tokens with which all prompts begin alike, before the input length: prefix caches find
    them."""
    num_prefixes: int = Field(default=1, ge=1, le=2**20)
    """Number of different prefixes, as many requests of each on average."""
    length_shape: LengthShape | None = None
    """Draw a file's requests by prompt length, in one of Gimbal's shapes."""


class ClusterConfig(Fields):
    """The workers, their GPUs, and what connects them."""

    topology: Topology = "8P16D"
    """``xPyD``: x prefill and y decode WORKERS of ``data_parallel_size`` engines each; ``xC``: x
    co-located workers, which compute prompts in chunks beside their decode batch; ``xP``: x prefill
    workers alone, where a request ends with its prompt; or a file of pools."""
    gpu: PathText = "H100"
    """A known GPU or a gpu.json."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """GPUs of every engine, which share attention heads and layers, and every expert unless
    ``enable_expert_parallel``."""
    enable_expert_parallel: bool = False
    """Spread whole experts over a worker's GPUs; layers wait for the busiest."""
    data_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Engines of every worker, each with its own queue, KV cache and batch. They share experts and
    so step together; routers choose the engine."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Stages of every worker, each with a part of the layers; for prefill workers alone."""
    num_redundant_experts: int = Field(default=0, ge=0)
    """Instances of experts beyond one of each."""
    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs of a node, for the all-to-all."""
    all2all_backend: Backend = "allgather_reducescatter"
    """How tokens reach the experts that engines share."""
    prefill: Pool = Pool()
    """What the prefill workers have of their own."""
    decode: Pool = Pool()
    """What the decode workers (or the co-located ones) have of their own."""
    kv_transfer: Literal["ideal", "observed"] = "observed"
    """Cost of KV transfers: what NIXL's benchmark reaches, or what serving logs show."""
    load_report_delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Age of the completions that routers have heard of, ms."""
    signal_interval_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How often engines publish their waiting and running requests, tokens, KV usage and cached
    blocks to the routers, ms (vLLM's coordinator: 100); 0: as of each decision."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Dollars a GPU-hour, for costs per token."""


class EngineConfig(Fields):
    """The engine of a worker, in vLLM's terms."""

    model: PathText = "Qwen3-30B-A3B"
    """A known model, or a Hugging Face ``config.json`` (or its folder)."""
    max_model_len: int | None = Field(default=None, ge=1, le=LONGEST)
    """Most tokens of a request, prompt and output; the model's limit when not given. More is
    simulated with a warning."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    """Running requests of a worker; vLLM's server default for the GPU when not given."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """Tokens computed in one step; vLLM's server default for the GPU when not given."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: bfloat16 (``auto``), or ``fp8``, half as large."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Keep whole contexts in sliding-window layers, too; by default where there are KV connectors
    (vLLM's option)."""
    block_size: int = Field(default=16, ge=1)
    """Tokens of a KV block."""
    enable_prefix_caching: bool = True
    """Whether prefill workers keep KV blocks for prompts that begin alike."""
    async_scheduling: bool = True
    """Whether decoding workers schedule a step ahead (vLLM since 0.14): who comes during one joins
    the one after the next."""
    speculative_config: Speculative = None
    """Drafts that decoding workers verify, in vLLM's names: ``{"method": "mtp",
    "num_speculative_tokens": 3}`` (docs/speculative.md)."""
    prefill_schedule_interval: int = Field(default=1, ge=1)
    """Engines that share experts compute prompts in every so-manieth step, where they decode
    (vLLM's option)."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1, allow_inf_nan=False)
    """Share of the GPU's memory that an engine may use."""
    num_gpu_blocks_override: int | None = Field(default=None, ge=2, le=2**31 - 1)
    """KV blocks of an engine, whatever its memory (vLLM's option; one is the null block)."""


class StepConfig(Fields):
    """What a step takes: kernels, graphs, the host."""

    host_gap_ms: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Time of a step that no kernel accounts for, ms; the profile's when not given."""
    cudagraph_padding: Padding = "none"
    """Rows that CUDA graphs add: none, without experts (vLLM since July 2026), with."""
    enforce_eager: bool = False
    """Run without CUDA graphs: a step takes no less than the host needs to launch its kernels,
    where that is known (vLLM's option)."""
    moe_backend: MoEBackend = "auto"
    """Whose kernel computes the experts (vLLM's option): the newest that was measured on the GPU;
    on MI300X Triton's, unless ``aiter``."""
    tables: PathText | None = None
    """Folder of latency tables that take precedence over the embedded ones."""


class FrontEndConfig(Fields):
    """What hosts do: API servers read and tokenise a request, and engines hand it over."""

    frontend: PathText | None = None
    """CPU of the API servers, or a table that ``eldr-sim profile --frontend`` wrote. Prompts come
    as token ids, and cost nothing before the router, when not given."""
    tokenizer_mode: Literal["microbatch_sequential", "microbatch_parallel", "thread_pool"] = (
        "thread_pool"
    )
    """How an API server tokenises: vLLM 0.10 to 0.14 in batches over CPU cores, then until May 2026
    in batches one prompt after the other, since then in a pool of threads."""
    tokenizer_threads: int = Field(default=1, ge=1)
    """Threads of the pool (vLLM's renderer_num_workers), or CPU cores that take a batch."""
    api_servers: int | None = Field(default=None, ge=1)
    """API servers, which take requests in turn; one for each worker that requests come to when not
    given."""
    cpu_slowdown: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How many times as long as the table says the API servers' CPU takes."""
    handover: Literal["none", "vllm_nixl"] = "none"
    """What handing a request to a decode worker takes beside the transfer: nothing, a bound, or
    what a vLLM of August 2026 with its NixlConnector took (110 ms)."""


class RelocationConfig(Fields):
    """Experts that move while a run lasts: EPLB at run time."""

    eplb_interval: int | None = Field(default=None, ge=1)
    """Steps of a worker after which its experts are placed again, by those that its tokens chose
    (vLLM's step_interval, 3000 there); never when not given."""
    eplb_window: int = Field(default=1000, ge=1)
    """Steps before that whose tokens count (vLLM's window_size)."""
    eplb_async: bool = False
    """Whether steps go on while the experts move (vLLM's use_async); else the worker waits."""
    eplb_overhead_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What it takes beside moving the weights, ms."""


class StreamingConfig(Fields):
    """Weights of experts that reach prefill workers while they compute: MoE-Prefill's AsyncEP."""

    expert_gather: Literal["collective", "one_sided", "needed"] | None = None
    """The engines of a prefill worker, of one GPU each, compute their own prompts: while a layer
    computes, the experts of the next one are gathered from all GPUs, by collectives that wait for
    each other or by one-sided reads; ``needed`` reads those that a layer's gate has chosen, when it
    has. Tokens are dispatched to the experts when not given."""
    offload_window: int | None = Field(default=None, ge=1)
    """MoE layers whose experts lie on the GPUs of a prefill worker beside the first one; the others
    are copied from host memory in time. All of them when not given."""
    gather_interference: float = Field(default=0.0, ge=0, le=1)
    """Time that a layer loses for each second of a gather beside it."""
    kv_cache_free: bool = False
    """Keep no KV cache: prompts are computed whole, and the token budget bounds the activations
    instead. For prefill workers alone."""


class FaultConfig(Fields):
    """What goes wrong, and what routers do about it."""

    fail: Annotated[tuple[str, ...], BeforeValidator(_fail)] = ()
    """A worker that dies, ``decode:3@60s+30s``: when, and how long it takes until a new one serves
    in its place (never when not given). Times are those of the run, the warm-up included. Repeat
    for more, or separate by commas."""
    events: PathText | None = None
    """File of all that goes wrong (docs/faults.md)."""
    health_delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How long after a worker has died, hangs or is back the routers know it, ms."""
    retry: Literal["migrate", "before_first_token", "never"] = "before_first_token"
    """What becomes of a dead worker's requests: all go on elsewhere with their tokens (Dynamo's
    migration), only those without a token begin anew (a gateway's retries), or none."""
    max_retries: int = Field(default=5, ge=0)
    """How often a request is sent again."""


class OutputConfig(Fields):
    """What a result says beside the figures that every one has."""

    goodput: ServiceLevel = ServiceLevel()
    """Service-level objective of good requests."""


#: The groups, by the names that files may give them.
GROUPS: dict[str, type[BaseModel]] = {
    "policies": PolicyConfig,
    "workload": WorkloadConfig,
    "routing": RoutingConfig,
    "lengths": LengthConfig,
    "cluster": ClusterConfig,
    "engine": EngineConfig,
    "steps": StepConfig,
    "front_end": FrontEndConfig,
    "relocation": RelocationConfig,
    "streaming": StreamingConfig,
    "faults": FaultConfig,
    "output": OutputConfig,
}
