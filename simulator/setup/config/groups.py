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
    """Upper bounds that a good request meets, as in ``vllm bench serve --goodput``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    ttft: float | None = Field(default=None, gt=0)
    """Time to first token, ms."""
    tpot: float | None = Field(default=None, gt=0)
    """Time per output token after the first, ms."""
    e2el: float | None = Field(default=None, gt=0)
    """End-to-end latency, ms."""

    @property
    def given(self) -> bool:
        """Whether there is any bound: without one nothing is good or missed."""
        return any(bound is not None for bound in (self.ttft, self.tpot, self.e2el))


class PolicyConfig(Fields):
    """Which worker serves a request, in which order, and where experts live."""

    policy: Annotated[str, policy_word("decode")] = "round_robin"
    """Decode policy: chooses the decode (or co-located) worker of a request. Parameters follow the
    name: ``eldr:tau=0.2``; ``eldr-sim policies`` lists them."""
    prefill_policy: Annotated[str, policy_word("prefill")] = "prefix_hash"
    """Prefill policy: chooses the prefill worker of a request."""
    queue_order: Annotated[str, policy_word("queue")] = "fcfs"
    """Order in which an engine admits waiting requests: first come, shortest prompt, or the
    priority in a request log (lowest number first)."""
    expert_placement: Annotated[str, policy_word("placement")] = "linear"
    """Expert placement under expert parallelism, on the GPUs of a decode (or co-located) worker:
    neighbours together, even load, even activation, or experts that are chosen together."""
    replica_choice: Annotated[str, policy_word("replica")] = "hash"
    """Choice among the replicas of an expert for each token: vLLM's hash of the token's position,
    or a rule that saves bytes, evens the load or activates few experts."""


class WorkloadConfig(Fields):
    """The requests: how many, when they arrive, and which continue a session."""

    workload: PathText = "task"
    """``task``, ``language``, ``trace`` (domains and lengths of the trace's own requests), ``chat``
    or ``agent`` (sessions, docs/conversations.md), or a log (Azure, Mooncake, ``vllm bench
    serve``, AIPerf and others that ``eldr-sim trace formats`` lists, or any table with
    ``columns``)."""
    columns: str | None = None
    """Of a table: ``time_s=start,input=prompts,output=outputs``; also ``time``, ``time_ms``,
    ``session``, ``priority``."""
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of a log's times, where they are numbers and nothing in the file says it."""
    arrivals: Literal["recorded", "poisson", "closed", "agentx"] | None = None
    """Of a log: ``recorded``, stretched evenly to a rate, or drawn at that rate; ``closed``: turns
    come a gap after the turn before has ended; ``agentx``: from the middle of sessions, with
    warm caches, in ``max_active_sessions`` lanes."""
    request_rate: field_types.Rate | None = None
    """Mean requests per second (``chat``, ``agent``: sessions per second); ``inf``: all at once.
    Default: 60 (sessions: 1), or the log's own rate."""
    burstiness: float = Field(default=1.0, ge=0.001, allow_inf_nan=False)
    """Shape of the gamma distribution of the gaps between arrivals: 1 is Poisson, less is
    burstier."""
    load: PathText | None = None
    """A rate that changes over time: ``sine:1,24,period=900``, ``ladder:15,2,10@150``, a file of
    ``t_s,rate``, a usage export, a Prometheus range export, or a log, counted by the minute. It
    runs through once unless a duration is given. ``request_rate`` scales it to that mean."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Maximum number of requests in flight; the others wait at the client."""
    log_from: Annotated[field_types.Seconds, Field(ge=0)] | None = None
    """Start of the measured part of a log, after its first request: 90s, 10m, 2h."""
    log_to: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """End of the measured part of a log."""
    busiest: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """Measure the busiest window of this length in a log: 10m."""
    duration: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """Length of the measured window, s; the statistics are of the requests that arrive in it.
    Default: 120 s, a whole log, or an hour for ``agentx``."""
    warmup: Annotated[field_types.Seconds, Field(ge=0)] | None = None
    """Warm-up before the measured window, s. Default: 30 s, or 0 with ``num_requests`` or a whole
    log."""
    num_requests: int | None = Field(default=None, ge=1)
    """Number of requests (``chat``, ``agent``: sessions) to send, instead of a duration."""
    prompts: Literal["unique", "shared"] = "unique"
    """Give requests that are replayed from one trace request the same prompt (``shared``, which
    prefix caches find) or unique prompts. Logs say themselves which requests share a prefix."""
    seed: int = Field(default=0, ge=0)
    """Seed of every random stream."""
    sessions: int | None = Field(default=None, ge=1)
    """Number of sessions of ``chat`` and ``agent``. Default: 500, unless a duration is given."""
    max_active_sessions: int | None = Field(default=None, ge=1)
    """Maximum number of sessions at a time (vLLM's max-active-conversations). When one ends, the
    next begins; at once if no rate is given."""
    turns: field_types.Counted = None
    """Number of turns in a session: ``4``, ``4,sd=2``, ``uniform:1,8``, ``exponential:4`` or
    ``lognormal:median=3,p95=12``."""
    calls_per_turn: field_types.Counted = None
    """Number of requests in a turn; tools answer all but the last."""
    think_time: field_types.Drawn = None
    """Seconds between an answer and the user's next turn."""
    tool_time: field_types.Drawn = None
    """Seconds between an answer and the tool's result."""
    new_tokens: field_types.Counted = None
    """New tokens in the prompt of a turn, beyond the history."""
    history: Annotated[str, AfterValidator(check_history)] = "all"
    """History that the next turn keeps: ``all``, ``last:TOKENS`` (the middle is cut),
    ``no_reasoning:SHARE`` (that share of each answer is dropped) or ``reset:TOKENS`` (the
    context starts over at that length)."""
    sessions_file: PathText | None = None
    """CSV of the sessions in a log, ``request,parent,gap_s``: the request that each one
    continues."""
    recorded_ttft_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """TTFT of the system that recorded a log, ms. With ``--arrivals closed`` it is subtracted from
    the gaps between arrivals, which contain it."""
    recorded_tpot_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """TPOT of the system that recorded a log, ms. With ``--arrivals closed`` it is subtracted from
    the gaps between arrivals, which contain it."""

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
            return _shape_of(self.load, self.time_unit).span_s
        if self.n_sessions is not None:
            return None
        return 120.0 if self.duration is None else self.duration

    @property
    def effective_rate(self) -> float | None:
        """Mean requests per second; None where a file's timestamps rule."""
        if self.request_rate is None and self.load is not None:
            return _shape_of(self.load, self.time_unit).mean
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


def _shape_of(load: str, time_unit: str | None) -> LoadShape:
    from eldr_sim.traces.requests.load_shapes import load_shape  # NumPy: --help does without

    return load_shape(load, time_unit)


#: Fields of a run that measures no part of a log.
NO_PART = dict.fromkeys(("log_from", "log_to", "busiest"))


class RoutingConfig(Fields):
    """The tokens that requests replay: which experts they choose, and the number of tokens."""

    trace: PathText | None = None
    """Name of an embedded routing trace, or a trace folder. Default: drawn for the model and the
    workload's domains (docs/synthetic.md)."""
    routing_band: Literal["low", "middle", "high"] = "middle"
    """How much of the variance between requests their domain explains in drawn routing: the low,
    middle or high end of what recordings and papers show (docs/synthetic.md)."""
    routing: Literal["real", "uniform", "balanced", "round_robin", "dummy-weights"] = "real"
    """Experts as in the trace (``real``), or as benchmarks of engines force them
    (docs/routing_evidence.md); ``what-if routing=balanced`` shows what that hides."""
    trace_replay: Literal["own", "same_domain"] = "own"
    """Generated tokens that a request replays: its own, or those of another request in its domain,
    so that no two requests with equal signatures replay equal tokens."""
    domain_mix: field_types.Mix = None
    """Weights of the trace's domains: ``code=2,math=1``. Default: the workload's."""
    domain_mix_end: field_types.Mix = None
    """Weights of the domains at the end of the run; they drift from ``domain_mix``. Policies are
    fitted to the weights at the start."""
    input_len: int | None = Field(default=None, ge=1, le=LONGEST)
    """Prompt tokens of every request, without a shared prefix. Default: as in the routing trace or
    the file. Prompts longer than the trace's replay its tokens more than once."""
    prompt_lengths: Literal["trace", "data_sets"] = "trace"
    """Prompt lengths of a named workload: as in the routing trace, or as in ELDR's data sets as its
    authors served them (4 to 1,024 tokens)."""
    output_len: Annotated[int, Field(ge=1)] | Literal["recorded"] | None = None
    """Output tokens of every request, ignoring end-of-sequence, or ``recorded``. Default: 512 for
    the task and language workloads, ``recorded`` for ``trace`` and files."""
    random_range_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Draw given input and output lengths uniformly between length * (1 - ratio) and length * (1 +
    ratio), as ``vllm bench serve`` does. SGLang's bench_serving draws between length * ratio and
    length; ``engine_args`` accepts its command line."""
    prefix_len: int = Field(default=0, ge=0, le=LONGEST)
    """Length of a shared prefix, tokens, which every prompt begins with in addition to its input
    length; prefix caches find it."""
    num_prefixes: int = Field(default=1, ge=1, le=2**20)
    """Number of different shared prefixes; each request draws one."""
    length_shape: LengthShape | None = None
    """Resample a file's requests by prompt length, to one of Gimbal's distributions."""


class ClusterConfig(Fields):
    """The workers, their GPUs, and the links between them."""

    topology: Topology = "8P16D"
    """``xPyD``: x prefill and y decode WORKERS of ``data_parallel_size`` engines each; ``xC``: x
    co-located workers, which compute prompts in chunks beside their decode batch; ``xP``: x
    prefill workers alone, where a request ends with its prompt; ``xPyAzF``: a decode worker of y
    engines whose experts lie on z GPUs of their own (docs/afd.md); or a file of pools."""
    gpu: PathText = "H100"
    """A known GPU or a gpu.json."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """GPUs per engine (tensor parallelism). They split attention heads and layers, and every expert
    unless ``enable_expert_parallel``."""
    enable_expert_parallel: bool = False
    """Place whole experts on a worker's GPUs instead of splitting each; layers wait for the busiest
    GPU."""
    data_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Engines per worker (data parallelism), each with its own queue, KV cache and batch. They
    share experts and so step together; routers choose the engine."""
    enable_elastic_ep: bool = False
    """Let engines that share experts start and stop one by one (docs/elastic.md); experts are
    placed anew on the GPUs that remain."""
    micro_batches: int = Field(default=2, ge=1, le=16)
    """Number of micro-batches in a step of ``xPyAzF``: one is computed while others are sent."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Pipeline stages per worker, each with a part of the layers; prefill workers only."""
    num_redundant_experts: int = Field(default=0, ge=0)
    """Number of expert replicas beyond one of each expert."""
    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs per node, for the all-to-all."""
    all2all_backend: Backend = "allgather_reducescatter"
    """Communication that takes tokens to the experts which engines share."""
    prefill: Pool = Pool()
    """Overrides for the prefill workers."""
    decode: Pool = Pool()
    """Overrides for the decode (or co-located) workers."""
    conditional_disagg: field_types.Conditional = None
    """When a decode worker computes a prompt itself: few tokens are not cached there
    (``isl_bounding:2048,0.7``, Dynamo's rule, or ``noncached:512``, llm-d's), prefill workers
    are busy (``prefill_load:0.9``), ``either``, or it takes fewer ``seconds``. Default: never."""
    kv_reserve: Literal["arrival", "prompt_end"] | None = None
    """When a decode worker reserves KV blocks for a request: ``arrival``, before the prefill begins
    (SGLang's default where the policy needs no signature), or ``prompt_end`` (vLLM's)."""
    kv_transfer: Literal["ideal", "observed"] = "observed"
    """Bandwidth of KV transfers: what NIXL's benchmark reaches, or what serving logs show."""
    load_report_delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Delay until routers learn that a request completed, ms."""
    signal_interval_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Interval at which engines publish waiting and running requests, tokens, KV usage and cached
    blocks to the routers, ms (vLLM's coordinator: 100); 0: always current."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a GPU-hour in dollars, for costs per token."""
    start_up: StartUp = None
    """Time until a new worker serves: seconds (``120``), or its measured parts (``vllm`` or
    ``vllm:node=90,gb_s=2``, docs/elastic.md). Default: 0."""

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
    """KV tiers: where blocks are kept in addition to the GPU caches of the workers."""

    kv_tier: field_types.Tiers = ()
    """A tier, ``host:126GB,load=20GB/s,write=through``: capacity of each store, bandwidth of a
    GPU's link, and when a block is written (``through``: when computed, ``selective``: when used
    again, ``back``: when evicted). Also ``store``, ``total``, ``latency``,
    ``scope=worker|node|cluster``, ``exclusive=yes``, ``evict=lru|fifo|arc|session``. Repeat for
    more."""
    kv_load: Literal["always", "cheaper"] = "always"
    """Load blocks from tiers always, or only if computing them would take longer."""
    kv_overlap: Literal["none", "layers"] = "none"
    """A request waits for its blocks outside the batch (``none``, vLLM), or joins it and each layer
    waits for its own blocks (``layers``, SGLang)."""
    kv_in_flight: Literal["join", "delay", "duplicate"] = "join"
    """When another request is already loading a block: ``join`` that load, ``delay`` until it is
    done (vLLM), or load a ``duplicate``."""
    answer_kv: Literal["recompute", "pull"] = "recompute"
    """KV of earlier answers in a turn's history: a prefill worker recomputes it, or pulls it from
    the worker that decoded the previous turn."""
    kv_signal: field_types.Signal = "exact"
    """What routers know about prefix caches: ``exact``, the blocks that engines hold as of the last
    signal, or ``approx:ttl=120,tokens=500000,routers=1``, the prompts that each router has
    recently sent to a worker."""


class EngineConfig(Fields):
    """The engine of a worker, mostly in vLLM's terms."""

    engine: Engine = "vllm"
    """Engine to model: its scheduler rules and defaults. A version may follow: ``vllm==0.24``,
    ``sglang==0.5.8``, ``trtllm==1.2`` (docs/engines.md)."""
    engine_version: EngineVersion | None = None
    """Version of the engine, which selects rules, memory and kernels. Default: the newest."""
    model: PathText = "Qwen3-30B-A3B"
    """A known model, or a Hugging Face ``config.json`` (or its folder)."""
    max_model_len: int | None = Field(default=None, ge=1, le=LONGEST)
    """Maximum tokens of a request, prompt and output. Default: the model's limit; more is simulated
    with a warning."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    """Maximum number of running requests of an engine. Default: the engine's."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """Maximum tokens computed in one step (SGLang: of prompts). Default: the engine's."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    """Data type of the KV cache: ``bfloat16``, or ``fp8``, half the size; ``auto``: as the
    checkpoint says, bfloat16 where it says nothing."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Keep full contexts in sliding-window layers, too (vLLM's option). Default: only with KV
    connectors."""
    block_size: int = Field(default=16, ge=1)
    """Tokens of a KV block."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks for prompts with a common prefix."""
    async_scheduling: Annotated[bool, LOOP] = True
    """Schedule a decode step while the previous one runs (vLLM since 0.14); a request that arrives
    during a step joins the one after the next."""
    prefill_schedule_interval: Annotated[int, LOOP] = Field(default=1, ge=1)
    """Run prefill only every Nth step while decoding, for engines that share experts (vLLM's
    option)."""
    long_prefill_token_threshold: Annotated[int | None, LOOP] = Field(default=None, ge=0)
    """Maximum tokens of one prompt in a step, unless the engine has no other request (vLLM's
    option). Default: the room left in the step."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1, allow_inf_nan=False)
    """Share of the GPU's memory that an engine may use. SGLang: weights and KV cache only;
    TensorRT-LLM: KV cache, of what the weights leave. Defaults differ by engine."""
    num_gpu_blocks_override: int | None = Field(default=None, ge=2, le=2**31 - 1)
    """Number of KV blocks of an engine, instead of the number that fits its memory (vLLM's option;
    one is the null block)."""


class SchedulerConfig(Fields):
    """Options of SGLang's and TensorRT-LLM's schedulers (docs/engines.md)."""

    engine_args: str | None = None
    """Launch line of the engine, read as options: ``"--chunked-prefill-size 16384"``. Arguments
    that are not simulated are listed."""
    extra_llm_api_options: PathText | None = None
    """TensorRT-LLM's YAML file of options, read as options of a run."""
    enable_mixed_chunk: bool | None = None
    """SGLang: mix decoding sequences with prompt chunks in one step."""
    scheduler_recv_interval: int | None = Field(default=None, ge=1)
    """SGLang: number of decode steps between polls for new requests; it also polls after each
    prefill step."""
    schedule_conservativeness: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """SGLang: factor on the default reservation for tokens still to be generated."""
    enable_chunked_prefill: bool | None = None
    """TensorRT-LLM: compute prompts in chunks instead of whole."""
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] | None = None
    """TensorRT-LLM: reserve KV blocks up to a request's end, or preempt when they run out."""
    batch_wait_timeout_iters: int | None = Field(default=None, ge=0)
    """TensorRT-LLM: maximum number of steps that a prompt waits for others to be batched with."""
    batch_wait_max_tokens_ratio: float | None = Field(default=None, ge=0, le=1)
    """TensorRT-LLM: prompts stop waiting when their tokens reach this share of the step's
    budget."""
    attention_dp_balance: bool | None = None
    """TensorRT-LLM: with attention data parallelism, hold prompts back until every engine has
    one."""
    attention_dp_timeout_iters: int | None = Field(default=None, ge=1)
    """TensorRT-LLM: maximum number of steps that ``attention_dp_balance`` holds prompts back.
    Default: 50."""
    attention_dp_batching_wait_iters: int | None = Field(default=None, ge=0)
    """TensorRT-LLM: steps that ``attention_dp_balance`` waits for more prompts once every engine
    has one. Default: 10."""
    piecewise_cuda_graph: bool | None = None
    """SGLang, TensorRT-LLM: run prefill steps as piecewise CUDA graphs, which do not wait for the
    host. Default: on in SGLang, off in TensorRT-LLM."""


class StepConfig(Fields):
    """Step times: kernels, CUDA graphs, the host; and speculative decoding."""

    host_gap_ms: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Time of a step that no kernel accounts for, ms. Default: the profile's."""
    cudagraph_padding: Padding = "none"
    """Padding rows of CUDA graphs: ``none``, ``dense`` (padding rows choose no experts, vLLM since
    July 2026), or ``experts`` (they do)."""
    enforce_eager: bool = False
    """Run without CUDA graphs (vLLM's option): a step takes at least the time that the host needs
    to launch its kernels, where that is known."""
    moe_backend: MoEBackend = "auto"
    """Kernel that computes the experts (vLLM's option). ``auto``: the newest with measurements on
    the GPU; Triton's on MI300X."""
    tables: PathText | None = None
    """Folder of latency tables, which take precedence over the embedded ones."""
    moe_dp_chunk_size: int | None = Field(default=None, ge=1, le=2**20)
    """Maximum tokens of an engine that MoE layers dispatch, compute and combine at once when
    engines share experts (vLLM's VLLM_MOE_DP_CHUNK_SIZE). Default: 256 with pplx, else the whole
    step."""
    two_batch_overlap: bool = False
    """Split each step of engines that share experts into two halves, one of which computes while
    the other is dispatched or combined (SGLang's enable-two-batch-overlap; vLLM's enable-dbo, for
    steps of at least 32 tokens of an engine, or 512 with prompts)."""
    speculative_config: Speculative = None
    """Speculative decoding, in vLLM's JSON: ``{"method": "mtp", "num_speculative_tokens": 3}``
    (docs/speculative.md); SGLang's and TensorRT-LLM's method names work, too."""
    acceptance: PathText | None = None
    """Acceptance of drafts, which overrides ``speculative_config``: the name of a published one, or
    a file from your engine (the text of its metrics endpoint, or a benchmark's result)."""


class FrontEndConfig(Fields):
    """Work of the hosts: API servers parse and tokenise requests, and engines hand them over."""

    frontend: PathText = "xeon-emerald-rapids"
    """CPU of the API servers, or a table that ``eldr-sim profile --frontend`` wrote. ``none``:
    requests reach the router as token ids, at no cost."""
    tokenizer_mode: Literal["microbatch_sequential", "microbatch_parallel", "thread_pool"] = (
        "thread_pool"
    )
    """Tokenisation in the API server: in batches across CPU cores (vLLM 0.10 to 0.14), in batches
    one prompt after the other (until May 2026), or in a pool of threads (since then)."""
    tokenizer_threads: int = Field(default=1, ge=1)
    """Threads of the tokenizer pool (vLLM's renderer_num_workers), or CPU cores that share a
    batch."""
    api_servers: int | None = Field(default=None, ge=1)
    """Number of API servers, which take requests in turn. Default: one per worker that receives
    requests."""
    cpu_slowdown: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the table's times, for a slower API server CPU."""
    handover: Literal["none", "vllm_nixl"] = "none"
    """Overhead of handing a request to a decode worker, in addition to the transfer: ``none`` (a
    lower bound), or what vLLM of August 2026 took with its NixlConnector (110 ms)."""


class ExpertsConfig(Fields):
    """Experts that move during a run (EPLB), or are streamed to prefill workers by layer
    (AsyncEP)."""

    eplb_interval: int | None = Field(default=None, ge=1)
    """Rebalance a worker's experts every N steps by their recent load (vLLM's step_interval, 3000
    there). Default: never."""
    eplb_window: int = Field(default=1000, ge=1)
    """Number of recent steps that count as load when experts are rebalanced (vLLM's
    window_size)."""
    eplb_async: bool = False
    """Keep stepping while experts move (vLLM's use_async); otherwise the worker pauses."""
    eplb_overhead_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Overhead of rebalancing experts, in addition to moving the weights, ms."""
    expert_gather: Literal["collective", "one_sided", "needed"] | None = None
    """Gather experts instead of dispatching tokens, in prefill workers whose engines have one GPU
    each: while a layer computes, the next layer's experts are gathered from all GPUs, by
    ``collective`` operations or ``one_sided`` reads; ``needed`` reads only the experts that a
    layer's gate has chosen, after it has. Default: tokens are dispatched."""
    offload_window: int | None = Field(default=None, ge=1)
    """Number of MoE layers, beyond the first, whose experts stay on the GPUs of a prefill worker;
    the others are copied from host memory in time. Default: all layers."""
    gather_interference: float = Field(default=0.0, ge=0, le=1)
    """Slowdown of a layer by a concurrent gather: seconds lost per second of gathering."""
    kv_cache_free: bool = False
    """Keep no KV cache: prompts are computed whole, and the token budget limits the activations
    instead. Prefill workers only."""


class FaultConfig(Fields):
    """Faults, and how routers respond to them."""

    fail: field_types.Faults = ()
    """A worker that dies: ``decode:3@60s+30s`` fails at 60 s, and a replacement serves 30 s later
    (never, if not given). Times count from the start of the warm-up. Repeat the option or
    separate by commas for more."""
    events: PathText | None = None
    """File of faults (docs/faults.md)."""
    health_delay_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Delay of health information, ms: from a worker's failure, freeze or return until routers
    learn of it."""
    retry: Literal["migrate", "before_first_token", "never"] = "before_first_token"
    """Retry policy for requests of a failed worker: ``migrate`` (all continue elsewhere with their
    tokens, as in Dynamo), ``before_first_token`` (only those without a token start over, as
    gateways do), or ``never``."""
    max_retries: int = Field(default=5, ge=0)
    """Maximum number of retries of a request."""
    user_retry_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds until a user resends a request that failed with its worker. Default: it is lost, and
    with it the rest of its session."""


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
    """Autoscaling: the number of the topology's workers that serve at a time."""

    autoscale: Annotated[str, policy_word("scaling")] = "none"
    """Autoscaler, which starts and stops workers; the topology is the maximum."""
    min_workers: Counts = (1,)
    """Minimum number of workers in every pool, or in each: ``1,2``."""
    initial_workers: Counts = ()
    """Number of workers at the start. Default: the topology's."""
    gpu_budget: int | None = Field(default=None, ge=1)
    """Maximum number of GPUs of all pools together."""
    demand: Literal["entry", "exit"] = "entry"
    """When an autoscaler counts a request: at ``entry``, or at ``exit``, as planners that read
    engine metrics do."""
    metric_delay: Annotated[field_types.Seconds, Field(ge=0)] = 0.0
    """Age of the metrics that an autoscaler reads, s."""
    drain_timeout: Annotated[field_types.Seconds, Field(gt=0)] | None = None
    """Maximum time that a stopping worker drains, s; requests left then are retried (``retry``).
    Default: until they have ended."""
    width_pause: Annotated[field_types.Seconds, Field(ge=0)] | None = None
    """Pause of the engines of ``enable_elastic_ep`` when one starts or stops, s. Default: the time
    of CUDA graph capture (``start_up``) and of moving the experts."""
    switch_time: Annotated[field_types.Seconds, Field(ge=0)] | Literal["graphs"] = 10.0
    """Time to move an idle worker to another pool, s: 0 if it keeps the CUDA graphs of both,
    ``graphs`` if it captures the other pool's (``start_up``)."""

    @property
    def scales(self) -> bool:
        """Whether anything is to be done about the number of workers."""
        return self.autoscale != "none"


class OutputConfig(Fields):
    """Objectives that a result is judged by."""

    goodput: ServiceLevel = ServiceLevel()
    """Service-level objective that defines a good request."""


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
