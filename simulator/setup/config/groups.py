"""The fields of a run's configuration, in groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import LONGEST
from eldr_sim.kernel_profiles.parallel import Backend, MoEBackend, Padding
from eldr_sim.simulator.setup.config import field_types
from eldr_sim.simulator.setup.config.pools import (
    Engine,
    EngineVersion,
    Fields,
    PathText,
    Pool,
    StartUp,
    Topology,
    policy_word,
    pools_of,
)
from eldr_sim.simulator.setup.config.speculative import Speculative
from eldr_sim.traces.requests.length_shapes import LengthShape
from eldr_sim.traces.requests.session_shape import LANES_S, check_history
from eldr_sim.traces.requests.session_shape import PRESETS as SESSIONS

if TYPE_CHECKING:
    from eldr_sim.traces.requests.load_shapes import LoadShape

#: Marks a field of the engine that the compiled loop reads as it is: by its name, of its pool.
LOOP = "read by the loop"
#: The named workloads; any other is a file.
WORKLOADS = ("task", "language", "trace", *SESSIONS)


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
    """Decode policy: the decode worker of a request after its prefill, or its co-located worker.
    Parameters follow the name: ``eldr:tau=0.2``; ``eldr-sim policies`` lists them."""
    prefill_policy: Annotated[str, policy_word("prefill")] = "prefix_hash"
    """Prefill policy: the prefill worker of a request."""
    queue_order: Annotated[str, policy_word("queue")] = "fcfs"
    """Which waiting request an engine admits next: the first, the shortest, or a request log's
    lowest priority."""
    expert_placement: Annotated[str, policy_word("placement")] = "linear"
    """Which GPU of a decode (or co-located) worker holds which experts under expert parallelism:
    neighbours together, an even load or activation, or experts that tokens choose together."""
    replica_choice: Annotated[str, policy_word("replica")] = "hash"
    """Which instance of a redundant expert computes a token: by vLLM's hash of its position, or to
    spare bytes, even the load or activate few experts."""


class WorkloadConfig(Fields):
    """The requests: how many there are, when they come, and which go on with which."""

    workload: PathText = "task"
    """``task``, ``language``, ``trace`` (domains and lengths of the trace's own requests), ``chat``
    or ``agent`` (sessions, docs/conversations.md), or a log (Azure, Mooncake, ``vllm bench serve``,
    AIPerf and others that ``eldr-sim trace formats`` lists, or any table with ``columns``)."""
    columns: str | None = None
    """Of a table: ``time_s=start,input=prompts,output=outputs``; also ``time``, ``time_ms``,
    ``session``, ``priority``."""
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of a log's times, where they are numbers and nothing in the file says it."""
    arrivals: Literal["recorded", "poisson", "closed", "agentx"] | None = None
    """Of a log: ``recorded``, stretched evenly to a rate, or drawn at that rate; ``closed``: turns
    come a gap after the turn before has ended; ``agentx``: from the middle of sessions, with warm
    caches, in ``max_active_sessions`` lanes."""
    request_rate: field_types.Rate | None = None
    """Mean requests (of ``chat`` and ``agent``: sessions) per second; ``inf``: all at once. 60 (of
    sessions 1), or as a log has them."""
    burstiness: float = Field(default=1.0, ge=0.001, allow_inf_nan=False)
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier."""
    load: PathText | None = None
    """How the rate changes: ``sine:1,24,period=900``, ``ladder:15,2,10@150``, a file of
    ``t_s,rate``, a usage export, a range of Prometheus's, or a log, counted by minutes; once over
    when no duration is given. ``request_rate`` is then its mean, its own when not given."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """At most this many requests in flight; the others wait at the client."""
    log_from: Annotated[field_types.Seconds, Field(ge=0)] | None = None
    """Measure a log from this time on, after its first request: 90s, 10m, 2h."""
    log_to: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """Measure a log up to this time."""
    busiest: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """Measure the part of a log, so long, that has most requests."""
    duration: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """Length of the measured window, whose requests make the statistics: 120 s, all of a log, or
    of ``agentx`` an hour."""
    warmup: Annotated[field_types.Seconds, Field(ge=0)] | None = None
    """Time before it: 30 s, or 0 with ``num_requests`` or a whole log."""
    num_requests: int | None = Field(default=None, ge=1)
    """Send so many requests instead; of ``chat`` and ``agent`` so many sessions."""
    prompts: Literal["unique", "shared"] = "unique"
    """Whether requests that replay the same trace request have one prompt (``shared``, which prefix
    caches find) or one each. A log says itself which share a prefix."""
    seed: int = Field(default=0, ge=0)
    """Seed of every random stream."""
    sessions: int | None = Field(default=None, ge=1)
    """Sessions of ``chat`` and ``agent``: 500 when neither this nor a duration is given."""
    max_active_sessions: int | None = Field(default=None, ge=1)
    """At most this many sessions at a time (vLLM's max-active-conversations): when one ends, the
    next begins, at once where no rate is given."""
    turns: field_types.Counted = None
    """Turns of a session: ``4``, ``4,sd=2``, ``uniform:1,8``, ``exponential:4`` or
    ``lognormal:median=3,p95=12``."""
    calls_per_turn: field_types.Counted = None
    """Requests of a turn: tools answer all but the last."""
    think_time: field_types.Drawn = None
    """Seconds from an answer to the user's next turn."""
    tool_time: field_types.Drawn = None
    """Seconds from an answer to that of a tool."""
    new_tokens: field_types.Counted = None
    """Tokens of a prompt beyond what has been said before."""
    history: Annotated[str, AfterValidator(check_history)] = "all"
    """What of a context the next turn has: ``all``, ``last:TOKENS`` (the middle is cut),
    ``no_reasoning:SHARE`` (of each answer is dropped) or ``reset:TOKENS`` (then it begins anew)."""
    sessions_file: PathText | None = None
    """CSV that says which requests of a log go on with which: ``request,parent,gap_s``."""
    recorded_ttft_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """TTFT of the system that recorded a log, ms, which the gaps between its arrivals contain;"""
    recorded_tpot_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """and its TPOT, ms: with ``--arrivals closed`` both are taken from the gaps."""

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
        """Whether all requests of a log are measured, but for a warm-up that is asked for."""
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
            return _shape_of(self.load).span_s
        if self.n_sessions is not None:
            return None
        return 120.0 if self.duration is None else self.duration

    @property
    def effective_rate(self) -> float | None:
        """Mean requests per second; None where a file's timestamps rule."""
        if self.request_rate is None and self.load is not None:
            return _shape_of(self.load).mean
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


def _shape_of(load: str) -> LoadShape:
    from eldr_sim.traces.requests.load_shapes import load_shape  # NumPy: --help does without

    return load_shape(load)


#: Fields of a run that measures no part of a log.
NO_PART = dict.fromkeys(("log_from", "log_to", "busiest"))


class RoutingConfig(Fields):
    """Whose tokens the requests replay, so which experts they choose, and how many they are."""

    trace: PathText | None = None
    """Name of an embedded routing trace or a trace folder; drawn for the model and the workload's
    domains when not given (docs/synthetic.md)."""
    routing_band: Literal["low", "middle", "high"] = "middle"
    """Where in its preset's band routing is drawn: the domains' part in it as recorded of
    all labels, of those of the task workload (``middle``), or as published (docs/synthetic.md)."""
    routing: Literal["real", "uniform", "balanced", "round_robin", "dummy-weights"] = "real"
    """Whether tokens choose experts as in the trace, or as benchmarks of engines force them
    (docs/routing_evidence.md); ``what-if routing=balanced`` says what that hides."""
    trace_replay: Literal["own", "same_domain"] = "own"
    """Whose generated tokens a request replays: its own, or those of another request of its domain
    (then no two requests with equal signatures replay equal tokens)."""
    domain_mix: field_types.Mix = None
    """Weights of the trace's domains, ``code=2,math=1``; the workload's own when not given."""
    domain_mix_end: field_types.Mix = None
    """Weights towards which they move while the run lasts; fits know those at its start."""
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
    workers alone, where a request ends with its prompt; ``xPyAzF``: a decode worker of y engines
    whose experts lie on z GPUs of their own (docs/afd.md); or a file of pools."""
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
    enable_elastic_ep: bool = False
    """Let the engines of a worker that share experts start and stop one by one, as its workers
    do (docs/elastic.md): experts are placed anew, on as many GPUs as there are."""
    micro_batches: int = Field(default=2, ge=1, le=16)
    """Micro-batches of a step of ``xPyAzF``, computed on one side while others are sent."""
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
    conditional_disagg: field_types.Conditional = None
    """When a prompt is computed where it is decoded: few tokens not cached there
    (``isl_bounding:2048,0.7``, Dynamo's, or ``noncached:512``, llm-d's), prefill workers with much
    to do (``prefill_load:0.9``), ``either`` or fewer ``seconds``. Never when not given."""
    kv_reserve: Literal["arrival", "prompt_end"] | None = None
    """When a decode worker reserves KV blocks for a request: before its prompt goes to a prefill
    worker, which waits for that (SGLang's, where the policy needs no signature), or when the prompt
    is computed (vLLM's)."""
    kv_transfer: Literal["ideal", "observed"] = "observed"
    """Cost of KV transfers: what NIXL's benchmark reaches, or what serving logs show."""
    load_report_delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Age of the completions that routers have heard of, ms."""
    signal_interval_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How often engines publish their waiting and running requests, tokens, KV usage and cached
    blocks to the routers, ms (vLLM's coordinator: 100); 0: as of each decision."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Dollars a GPU-hour, for costs per token."""
    start_up: StartUp = None
    """How long a new worker takes to serve: ``120``, or in parts as measured, ``vllm`` or
    ``vllm:node=90,gb_s=2`` (docs/elastic.md); 0 when not given."""

    @property
    def n_prefill(self) -> int:
        """Number of workers that compute prompts alone; 0 where all workers are co-located."""
        pools = pools_of(self.topology).root.values()
        return sum(pool.workers for pool in pools if pool.then is not None)

    @property
    def n_decode(self) -> int:
        """Number of decode or co-located workers; 0 where requests end with their prompts."""
        return sum(pool.workers for pool in pools_of(self.topology).root.values()) - self.n_prefill

    @property
    def generates(self) -> bool:
        """Whether requests go on when their prompts are computed, and do not end."""
        return self.n_decode > 0

    @property
    def hands_over(self) -> bool:
        """Whether other workers than those that computed their prompts may decode requests."""
        return self.generates and self.n_prefill > 0


class KVTierConfig(Fields):
    """Where KV blocks are kept beside the workers' own caches."""

    kv_tier: field_types.Tiers = ()
    """A tier, ``host:126GB,load=20GB/s,write=through``: bytes of each store, bandwidth of a GPU's
    link, when a block comes to it (``through``: when computed, ``selective``: when used again,
    ``back``: when evicted). Also ``store``, ``total``, ``latency``, ``scope=worker|node|cluster``,
    ``exclusive=yes``, ``evict=lru|fifo|arc|session``. Repeat for more."""
    kv_load: Literal["always", "cheaper"] = "always"
    """Whether blocks in tiers are loaded always, or only where computing them takes longer."""
    kv_overlap: Literal["none", "layers"] = "none"
    """Whether a request waits for its blocks outside the batch, as in vLLM, or joins it and layers
    wait for theirs, as in SGLang."""
    kv_in_flight: Literal["join", "delay", "duplicate"] = "join"
    """Who wants a block that is on its way to the worker for another request waits for that one and
    loads its others meanwhile, waits before it does anything (vLLM), or loads it again."""
    answer_kv: Literal["recompute", "pull"] = "recompute"
    """Whether a prefill worker computes the answers in a turn's history, or pulls their KV blocks
    from the worker that decoded the turn before."""
    kv_signal: field_types.Signal = "exact"
    """What routers know of prefix caches: ``exact``, what engines hold, as of the last signals, or
    ``approx:ttl=120,tokens=500000,routers=1``: the prompts that each of so many routers has itself
    sent to a worker of late."""


class EngineConfig(Fields):
    """The engine of a worker, mostly in vLLM's terms."""

    engine: Engine = "vllm"
    """Whose rules the workers' engines follow, and whose defaults they have. A version may stand
    behind: ``vllm==0.24``, ``sglang==0.5.8``, ``trtllm==1.2`` (docs/engines.md)."""
    engine_version: EngineVersion | None = None
    """Version of the engine, whose rules, memory and kernels hold where they changed; the newest
    when not given."""
    model: PathText = "Qwen3-30B-A3B"
    """A known model, or a Hugging Face ``config.json`` (or its folder)."""
    max_model_len: int | None = Field(default=None, ge=1, le=LONGEST)
    """Most tokens of a request, prompt and output; the model's limit when not given. More is
    simulated with a warning."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    """Running requests of a worker; the engine's default when not given."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """Tokens computed in one step, SGLang: of prompts; the engine's default when not given."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: bfloat16 (``auto``), or ``fp8``, half as large."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Keep whole contexts in sliding-window layers, too; by default where there are KV connectors
    (vLLM's option)."""
    block_size: int = Field(default=16, ge=1)
    """Tokens of a KV block."""
    enable_prefix_caching: bool = True
    """Whether prefill workers keep KV blocks for prompts that begin alike."""
    async_scheduling: Annotated[bool, LOOP] = True
    """Whether decoding workers schedule a step ahead (vLLM since 0.14): who comes during one joins
    the one after the next."""
    prefill_schedule_interval: Annotated[int, LOOP] = Field(default=1, ge=1)
    """Engines that share experts compute prompts in every so-manieth step, where they decode
    (vLLM's option)."""
    long_prefill_token_threshold: Annotated[int | None, LOOP] = Field(default=None, ge=0)
    """Tokens that a step computes of one prompt at most, unless the engine has no other request
    (vLLM's option); as many as the step has room for when not given."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1, allow_inf_nan=False)
    """Share of the GPU's memory that an engine may use; SGLang: weights and KV cache alone,
    TensorRT-LLM: KV cache, of what the weights leave. Their defaults differ."""
    num_gpu_blocks_override: int | None = Field(default=None, ge=2, le=2**31 - 1)
    """KV blocks of an engine, whatever its memory (vLLM's option; one is the null block)."""


class SchedulerConfig(Fields):
    """What SGLang's and TensorRT-LLM's schedulers are told (docs/engines.md)."""

    engine_args: str | None = None
    """A launch line of the engine, read as options: ``"--chunked-prefill-size 16384"``. What is not
    simulated of it is said."""
    extra_llm_api_options: PathText | None = None
    """TensorRT-LLM's YAML file of options, read likewise."""
    enable_mixed_chunk: bool | None = None
    """SGLang: sequences decode beside the chunks of prompts."""
    scheduler_recv_interval: int | None = Field(default=None, ge=1)
    """SGLang: look for requests every so many steps of decoding, and after each step of prompts."""
    schedule_conservativeness: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """SGLang: how much is reserved for tokens to come, times the default."""
    enable_chunked_prefill: bool | None = None
    """TensorRT-LLM: prompts are computed in chunks, not whole."""
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] | None = None
    """TensorRT-LLM: reserve KV blocks to a request's end, or preempt."""
    batch_wait_timeout_iters: int | None = Field(default=None, ge=0)
    """TensorRT-LLM: steps that prompts wait at most for others to be computed with,"""
    batch_wait_max_tokens_ratio: float | None = Field(default=None, ge=0, le=1)
    """until their tokens reach this share of the step's."""
    attention_dp_balance: bool | None = None
    """TensorRT-LLM: engines of data-parallel attention let prompts wait until each has some,"""
    attention_dp_timeout_iters: int | None = Field(default=None, ge=1)
    """for as many steps at most (50),"""
    attention_dp_batching_wait_iters: int | None = Field(default=None, ge=0)
    """and for as many more once all have (10)."""
    piecewise_cuda_graph: bool | None = None
    """SGLang, TensorRT-LLM: steps with prompts run as CUDA graphs in pieces and do not wait for the
    host; SGLang's default, not TensorRT-LLM's."""


class StepConfig(Fields):
    """What a step takes: kernels, graphs, the host; and the drafts that it verifies."""

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
    moe_dp_chunk_size: int | None = Field(default=None, ge=1, le=2**20)
    """Tokens of an engine that MoE layers dispatch, compute and combine at once where engines share
    experts (vLLM's VLLM_MOE_DP_CHUNK_SIZE); by default 256 with pplx, else all of a step."""
    speculative_config: Speculative = None
    """What drafts, and how many tokens, in vLLM's names: ``{"method": "mtp",
    "num_speculative_tokens": 3}`` (docs/speculative.md); SGLang's and TensorRT-LLM's are known."""
    acceptance: PathText | None = None
    """How many drafts are accepted, whatever ``speculative_config`` says: a published acceptance,
    or a file of your engine's: the text of its metrics endpoint, or a benchmark's result."""


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


class ExpertsConfig(Fields):
    """Experts that move while a run lasts (EPLB), or reach prefill workers by layers (AsyncEP)."""

    eplb_interval: int | None = Field(default=None, ge=1)
    """Steps of a worker after which its experts are placed again, by those that its tokens chose
    (vLLM's step_interval, 3000 there); never when not given."""
    eplb_window: int = Field(default=1000, ge=1)
    """Steps before that whose tokens count (vLLM's window_size)."""
    eplb_async: bool = False
    """Whether steps go on while the experts move (vLLM's use_async); else the worker waits."""
    eplb_overhead_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What it takes beside moving the weights, ms."""
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

    fail: field_types.Faults = ()
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
    user_retry_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds after which users send a request again that has failed with its worker; when not
    given it is lost, and with it the rest of its session."""


def _counts(value: Any, about: ValidationInfo) -> Any:
    if isinstance(value, str):
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            problem, allowed = repr(value), "a number of workers, or one a pool: 1,2"
            raise InputError(about.field_name or "", problem, allowed) from None
    return (value,) if isinstance(value, int) else value


#: Workers of every pool, or of each.
Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_counts)]


class ScalingConfig(Fields):
    """How many of the topology's workers there are, and who decides it."""

    autoscale: Annotated[str, policy_word("scaling")] = "none"
    """Autoscaler: how many of the topology's workers serve, of which there are at most so many."""
    min_workers: Counts = (1,)
    """Fewest workers of every pool, or of each: ``1,2``."""
    initial_workers: Counts = ()
    """Workers at the beginning; those of the topology when not given."""
    gpu_budget: int | None = Field(default=None, ge=1)
    """Most GPUs of all pools together."""
    demand: Literal["entry", "exit"] = "entry"
    """Where an autoscaler counts requests: when they come, or when they are done, as planners do
    that read engines' metrics."""
    metric_delay: Annotated[field_types.Seconds, Field(ge=0)] = 0.0
    """Age of what an autoscaler sees, s."""
    drain_timeout: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """A worker that is to go leaves after so long even if it has requests (``retry``), s; when
    they have ended when not given."""
    width_pause: Annotated[field_types.Seconds, Field(ge=0)] | None = None
    """How long the engines of ``enable_elastic_ep`` stand still when one comes or goes, s; as long
    as CUDA graphs (``start_up``) and the moved experts take when not given."""
    switch_time: Annotated[field_types.Seconds, Field(ge=0)] | Literal["graphs"] = 10.0
    """From when a worker has nothing left to when it serves in another pool, s: 0 where it keeps
    the CUDA graphs of both; ``graphs``: it captures the other pool's (``start_up``)."""

    @property
    def scales(self) -> bool:
        """Whether anything is to be done about the number of workers."""
        return self.autoscale != "none"


class OutputConfig(Fields):
    """What a result says beside the figures that every one has."""

    goodput: ServiceLevel = ServiceLevel()
    """Service-level objective of good requests."""


#: The groups of a configuration, by the attribute of `RunConfig` that holds each.
GROUPS: dict[str, type[Fields]] = {
    "policies": PolicyConfig,
    "requests": WorkloadConfig,
    "routing": RoutingConfig,
    "cluster": ClusterConfig,
    "engine": EngineConfig,
    "kv": KVTierConfig,
    "scheduler": SchedulerConfig,
    "steps": StepConfig,
    "front_end": FrontEndConfig,
    "experts": ExpertsConfig,
    "faults": FaultConfig,
    "scaling": ScalingConfig,
    "output": OutputConfig,
}
#: The group of every field. A field has one name in all groups, which is what users type.
GROUP_OF = {name: title for title, group in GROUPS.items() for name in group.model_fields}
#: Every field of a configuration.
RUN_FIELDS = {name: GROUPS[title].model_fields[name] for name, title in GROUP_OF.items()}
