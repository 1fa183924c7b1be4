"""The fields of a run's configuration, in groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import LONGEST
from eldr_sim.kernel_profiles.parallel import Backend, MoEBackend, Padding
from eldr_sim.policies.choice import per_pool
from eldr_sim.simulator.setup.config import field_types
from eldr_sim.simulator.setup.config.option import Option
from eldr_sim.simulator.setup.config.pools import (
    Engine,
    EngineVersion,
    Fields,
    GPUName,
    PathText,
    Pool,
    StartUp,
    Topology,
    policy_word,
    pools_of,
)
from eldr_sim.simulator.setup.config.requests import RoutingConfig, WorkloadConfig
from eldr_sim.simulator.setup.config.speculative import Speculative

#: Marks a field of the engine that the compiled loop reads as it is: by its name, of its pool.
LOOP = "read by the loop"


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


def parse_slo(texts: Iterable[str], field: str = "slo") -> ServiceLevel:
    """Parse bounds such as ``ttft:500,tpot:30``, ms; raises InputError, naming ``field``."""
    bounds: dict[str, str] = {}
    for text in (part.strip() for given in texts for part in str(given).split(",")):
        name, colon, bound = text.partition(":")
        if not colon or name in bounds:
            problem = "is given twice" if colon else "is not a bound"
            raise InputError(field, f"{text!r} {problem}", "METRIC:MS such as ttft:500,tpot:30")
        bounds[name] = bound
    try:
        return ServiceLevel.model_validate(bounds)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{first['input']!r}: {first['msg'].lower()}"
        if first["type"] == "extra_forbidden":
            problem = "no such field"
        allowed = "ttft, tpot and e2el in ms"
        raise InputError(field, f"{first['loc'][0]}: {problem}", allowed) from None


def _bounds(value: Any, about: ValidationInfo) -> Any:
    texts = (value,) if isinstance(value, str) else value
    return parse_slo(texts, about.field_name or "") if isinstance(texts, tuple | list) else value


class PolicyConfig(Fields):
    """Which worker serves a request, in which order, and where experts live."""

    policy: Annotated[str, policy_word("decode"), Option(common=True)] = "round_robin"
    """Decode policy: chooses the decode (or co-located) worker of a request. Parameters follow the
    name: ``eldr:tau=0.2``; ``eldr-sim policies`` lists them."""
    prefill_policy: Annotated[str, policy_word("prefill"), Option(common=True)] = "prefix_hash"
    """Prefill policy: chooses the prefill worker of a request."""
    queue_order: Annotated[str, policy_word("queue")] = "fcfs"
    """Order in which an engine admits waiting requests: first come, shortest prompt, or the
    priority in a request log (lowest number first)."""
    expert_placement: Annotated[str, policy_word("placement")] = "linear"
    """Expert placement under expert parallelism, on the GPUs of a decode (or co-located) worker: by
    number, by load, by activation, or by co-selection."""
    replica_choice: Annotated[str, policy_word("replica")] = "hash"
    """Rule that chooses among the replicas of an expert for each token: vLLM's hash of the token's
    position, or one that saves bytes, balances load or activates few experts."""


class ClusterConfig(Fields):
    """The workers, their GPUs, and the links between them."""

    topology: Annotated[Topology, Option(common=True)] = "8P16D"
    """Workers of the cluster, each of ``data_parallel_size`` engines. ``xPyD``: x prefill and y
    decode workers; ``xC``: x co-located workers, which compute prompts in chunks beside their
    decode batch; ``xP``: x prefill workers alone, where a request ends with its prompt;
    ``xPyAzF``: a decode worker of y engines with their experts on z separate GPUs
    (docs/parallelism.md); or a file of pools."""
    gpu: Annotated[GPUName, Option(common=True)] = "H100"
    """A known GPU or a gpu.json."""
    tensor_parallel_size: Annotated[
        int, Option(common=True, unit="GPUs", aliases=("-tp", "--tp"))
    ] = Field(default=1, ge=1, le=1024)
    """GPUs per engine (tensor parallelism). They split attention heads and layers, and every expert
    unless ``enable_expert_parallel``."""
    enable_expert_parallel: Annotated[bool, Option(common=True)] = False
    """Place whole experts on a worker's GPUs instead of splitting each; layers wait for the busiest
    GPU."""
    data_parallel_size: Annotated[
        int, Option(common=True, unit="engines", aliases=("-dp", "--dp"))
    ] = Field(default=1, ge=1, le=1024)
    """Engines per worker (data parallelism), each with its own queue, KV cache and batch. They
    share experts and so step together; routers choose the engine."""
    enable_elastic_ep: bool = False
    """Let engines that share experts start and stop one by one (docs/elastic.md); experts are
    placed again on the remaining GPUs."""
    micro_batches: int = Field(default=2, ge=1, le=16)
    """Number of micro-batches in a step of ``xPyAzF``: one is computed while others are sent."""
    pipeline_parallel_size: Annotated[int, Option(unit="stages")] = Field(default=1, ge=1, le=1024)
    """Pipeline stages per worker, each with a part of the layers; prefill workers only."""
    num_redundant_experts: Annotated[int, Option(unit="experts")] = Field(default=0, ge=0)
    """Number of expert replicas beyond one of each expert."""
    gpus_per_node: Annotated[int, Option(unit="GPUs")] = Field(default=8, ge=1)
    """GPUs per node, for the all-to-all."""
    all2all_backend: Backend = "allgather_reducescatter"
    """All-to-all backend that sends tokens to experts shared by engines."""
    prefill: Pool = Pool()
    """Overrides for the prefill workers."""
    decode: Pool = Pool()
    """Overrides for the decode (or co-located) workers."""
    conditional_disagg: Annotated[field_types.Conditional, Option(metavar="RULE")] = None
    """When a decode worker computes a prompt itself: few tokens are not cached there
    (``isl_bounding:2048,0.7``, Dynamo's rule, or ``noncached:512``, llm-d's), prefill workers
    are busy (``prefill_load:0.9``), ``either``, or it takes fewer ``seconds``. Default: never."""
    kv_reserve: Literal["arrival", "prompt_end"] | None = None
    """When a decode worker reserves KV blocks for a request: ``arrival``, before the prefill begins
    (SGLang's default where the policy needs no signature), or ``prompt_end`` (vLLM's)."""
    kv_transfer: Literal["ideal", "observed"] = "observed"
    """Bandwidth of KV transfers: what NIXL's benchmark reaches, or what serving logs show."""
    load_report_delay_ms: field_types.Milliseconds = 0.0
    """Delay until routers learn that a request completed, ms."""
    signal_interval_ms: field_types.Milliseconds = 0.0
    """Interval at which engines publish waiting and running requests, tokens, KV usage and cached
    blocks to the routers, ms (vLLM's coordinator: 100); 0: always current."""
    price_per_gpu_hour: Annotated[field_types.Price | None, Option(metavar="$", unit="$/h")] = None
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

    kv_tier: Annotated[field_types.Tiers, Option(repeated=True, metavar="NAME:BYTES,load=...")] = ()
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
    """How a prefill worker gets the KV of earlier answers in a conversation: recompute it, or pull
    it from the worker that decoded the previous turn."""
    kv_signal: Annotated[field_types.Signal, Option(metavar="exact|approx:...")] = "exact"
    """What routers know about prefix caches: ``exact``, the blocks that engines hold as of the last
    signal, or ``approx:ttl=120,tokens=500000,routers=1``, the prompts that each router has
    recently sent to a worker."""


class EngineConfig(Fields):
    """The engine of a worker, mostly in vLLM's terms."""

    engine: Annotated[Engine, Option(common=True, metavar="vllm|sglang|trtllm[==VERSION]")] = "vllm"
    """Engine to model: its scheduler rules and defaults. A version may follow: ``vllm==0.24``,
    ``sglang==0.5.8``, ``trtllm==1.2`` (docs/engines.md)."""
    engine_version: Annotated[EngineVersion | None, Option(metavar="VERSION")] = None
    """Version of the engine, which selects rules, memory, kernels and padding of CUDA graphs.
    Default: the newest, without padding."""
    model: Annotated[
        PathText,
        Option(
            common=True,
            metavar="NAME|PATH",
            names="kernel_profiles.models:list_models",
            path="file",
        ),
    ] = "Qwen3-30B-A3B"
    """A known model, or a Hugging Face ``config.json`` (or its folder)."""
    max_model_len: Annotated[int | None, Option(unit="tokens")] = Field(
        default=None, ge=1, le=LONGEST
    )
    """Maximum tokens of a request, prompt and output. Default: the model's limit; more is simulated
    with a warning."""
    max_num_seqs: Annotated[int | None, Option(unit="requests")] = Field(
        default=None, ge=1, le=65536
    )
    """Maximum number of running requests of an engine. Default: the engine's."""
    max_num_batched_tokens: Annotated[int | None, Option(unit="tokens")] = Field(
        default=None, ge=1, le=2**20
    )
    """Maximum tokens computed in one step (SGLang: of prompts). Default: the engine's."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    """Data type of the KV cache: ``bfloat16``, or ``fp8`` (half the size); ``auto``: the
    checkpoint's, bfloat16 if it states none."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """Keep full contexts in sliding-window layers, too (vLLM's option). Default: only for KV
    transfers of vLLM before 0.22 and of other engines."""
    block_size: Annotated[int, Option(unit="tokens")] = Field(default=16, ge=1)
    """Size of a KV block, tokens."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks for prompts with a common prefix."""
    async_scheduling: Annotated[bool, LOOP] = True
    """Schedule a decode step while the previous one runs (vLLM since 0.14); a request that arrives
    during a step joins the one after the next."""
    prefill_schedule_interval: Annotated[int, LOOP, Option(unit="steps")] = Field(default=1, ge=1)
    """Run prefill only every Nth step while decoding, for engines that share experts (vLLM's
    option)."""
    long_prefill_token_threshold: Annotated[int | None, LOOP, Option(unit="tokens")] = Field(
        default=None, ge=0
    )
    """Maximum tokens of one prompt in a step, unless the engine has no other request (vLLM's
    option). Default: the room left in the step."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1, allow_inf_nan=False)
    """Share of the GPU's memory that an engine may use. SGLang: weights and KV cache only;
    TensorRT-LLM: KV cache, of what the weights leave. Defaults differ by engine."""
    num_gpu_blocks_override: Annotated[int | None, Option(unit="blocks")] = Field(
        default=None, ge=2, le=2**31 - 1
    )
    """Number of KV blocks of an engine, instead of as many as fit in memory (vLLM's option; one is
    the null block)."""
    kv_cache_memory_bytes: Annotated[int | None, Option(unit="bytes")] = Field(default=None, ge=1)
    """Memory of each GPU for the KV cache, bytes, instead of what ``gpu_memory_utilization`` leaves
    (vLLM's option)."""


class SchedulerConfig(Fields):
    """Options of SGLang's and TensorRT-LLM's schedulers (docs/engines.md)."""

    engine_args: Annotated[str | None, Option(metavar="OPTIONS")] = None
    """Launch line of the engine, read as options: ``"--chunked-prefill-size 16384"``. Arguments
    that are not simulated are listed."""
    extra_llm_api_options: Annotated[PathText | None, Option(metavar="FILE", path="file")] = None
    """TensorRT-LLM's YAML file of options, read as options of a run."""
    enable_mixed_chunk: bool | None = None
    """SGLang: mix decoding sequences with prompt chunks in one step."""
    scheduler_recv_interval: Annotated[int | None, Option(unit="steps")] = Field(default=None, ge=1)
    """SGLang: number of decode steps between polls for new requests; it also polls after each
    prefill step."""
    schedule_conservativeness: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """SGLang: factor on the default reservation for tokens still to be generated."""
    enable_chunked_prefill: bool | None = None
    """TensorRT-LLM: compute prompts in chunks instead of whole."""
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] | None = None
    """TensorRT-LLM: reserve KV blocks up to a request's end, or preempt when they run out."""
    batch_wait_timeout_iters: Annotated[int | None, Option(unit="steps")] = Field(
        default=None, ge=0
    )
    """TensorRT-LLM: maximum number of steps that a prompt waits for others to be batched with."""
    batch_wait_max_tokens_ratio: float | None = Field(default=None, ge=0, le=1)
    """TensorRT-LLM: prompts stop waiting when their tokens reach this share of the step's
    budget."""
    attention_dp_balance: bool | None = None
    """TensorRT-LLM: with attention data parallelism, hold prompts back until every engine has
    one."""
    attention_dp_timeout_iters: Annotated[int | None, Option(unit="steps")] = Field(
        default=None, ge=1
    )
    """TensorRT-LLM: maximum number of steps that ``attention_dp_balance`` holds prompts back.
    Default: 50."""
    attention_dp_batching_wait_iters: Annotated[int | None, Option(unit="steps")] = Field(
        default=None, ge=0
    )
    """TensorRT-LLM: steps that ``attention_dp_balance`` waits for more prompts once every engine
    has one. Default: 10."""
    piecewise_cuda_graph: bool | None = None
    """Run prefill steps as piecewise CUDA graphs, which do not wait for the host. Default: off in
    TensorRT-LLM; in SGLang off before 0.5.10 and where its own rules turn them off (AMD GPUs,
    drafts, prefill and decode apart, data-parallel attention, ...); on in vLLM."""
    max_cudagraph_capture_size: Annotated[int | None, Option(unit="tokens")] = Field(
        default=None, ge=1
    )
    """Most tokens of a step that vLLM runs as a CUDA graph; the host launches the kernels of
    larger ones one by one. Default: 512, on B200 and B300 1,024 since 0.25, or less where fewer
    sequences run."""
    shared_experts_fusion: bool | None = None
    """SGLang: compute the shared expert as one more routed expert. Default: as SGLang does for the
    model, GPU and parallelism."""


class StepConfig(Fields):
    """Step times: kernels, CUDA graphs, the host; and speculative decoding."""

    host_gap_ms: field_types.Milliseconds | None = None
    """Host time between steps that no kernel accounts for, ms. Default: the profile's."""
    cudagraph_padding: Padding | None = None
    """Padding rows of CUDA graphs: ``none``, ``dense`` (padding rows choose no experts, vLLM since
    0.32), or ``experts`` (they do, vLLM before). Default: those of ``engine_version``; without a
    version, none."""
    enforce_eager: bool = False
    """Run without CUDA graphs (vLLM's option): a step takes at least the time that the host needs
    to launch its kernels, where that is known."""
    moe_backend: MoEBackend = "auto"
    """Kernel that computes the experts (vLLM's option). ``auto``: the newest with measurements on
    the GPU; Triton's on MI300X."""
    tables: Annotated[PathText | None, Option(metavar="DIR", path="dir")] = None
    """Folder of latency tables, which take precedence over the embedded ones."""
    calibration: Annotated[PathText | None, Option(metavar="FILE", path="file")] = None
    """File of ``eldr-sim calibrate``: constants fitted to your own runs, of the model and GPU that
    it names (docs/live.md)."""
    moe_dp_chunk_size: Annotated[int | None, Option(unit="tokens")] = Field(
        default=None, ge=1, le=2**20
    )
    """Maximum tokens of an engine that MoE layers dispatch, compute and combine at once when
    engines share experts (vLLM's VLLM_MOE_DP_CHUNK_SIZE). Default: 256 with pplx, else the whole
    step."""
    two_batch_overlap: bool = False
    """Split each step of engines that share experts into two halves, one of which computes while
    the other is dispatched or combined (SGLang's enable-two-batch-overlap; vLLM's enable-dbo, for
    steps of at least 32 tokens of an engine, or 512 with prompts)."""
    speculative_config: Annotated[Speculative, Option(common=True)] = None
    """Speculative decoding, in vLLM's JSON: ``{"method": "mtp", "num_speculative_tokens": 3}``
    (docs/speculative.md); SGLang's and TensorRT-LLM's method names work, too."""
    acceptance: Annotated[PathText | None, Option(metavar="NAME|FILE", path="file")] = None
    """Acceptance of drafts, which overrides ``speculative_config``: the name of a published one, or
    a file from your engine (the text of its metrics endpoint, or a benchmark's result)."""


class FrontEndConfig(Fields):
    """Work of the hosts: API servers parse and tokenise requests, and engines hand them over."""

    frontend: Annotated[
        PathText,
        Option(
            metavar="none|CPU|FILE",
            names="kernel_profiles.kernels.front_end:list_front_ends",
            path="file",
        ),
    ] = "xeon-emerald-rapids"
    """CPU of the API servers, or a table that ``eldr-sim profile --frontend`` wrote. ``none``:
    requests reach the router as token ids, at no cost."""
    tokenizer_mode: Literal["microbatch_sequential", "microbatch_parallel", "thread_pool"] = (
        "thread_pool"
    )
    """Tokenisation in the API server: in batches across CPU cores (vLLM 0.10 to 0.14), in batches
    one prompt after the other (until May 2026), or in a pool of threads (since then)."""
    tokenizer_threads: int = Field(default=1, ge=1, le=1024)
    """Threads of the tokenizer pool (vLLM's renderer_num_workers), or CPU cores that share a
    batch."""
    api_servers: int | None = Field(default=None, ge=1, le=1024)
    """Number of API servers, which take requests in turn. Default: one per worker that receives
    requests, of vLLM since 0.15 one per data-parallel engine."""
    cpu_slowdown: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Factor on the table's times, for a slower API server CPU."""
    handover: Literal["none", "vllm_nixl"] = "none"
    """Overhead of handing a request to a decode worker, in addition to the transfer: ``none`` (a
    lower bound), or ``vllm_nixl``: as vLLM of August 2026 took with NixlConnector (110 ms)."""


class ExpertsConfig(Fields):
    """Experts that move during a run (EPLB), or are streamed to prefill workers by layer
    (AsyncEP)."""

    eplb_interval: Annotated[int | None, Option(unit="steps")] = Field(default=None, ge=1)
    """Rebalance a worker's experts every N steps by their recent load (vLLM's step_interval, 3000
    there). Default: never."""
    eplb_window: Annotated[int, Option(unit="steps")] = Field(default=1000, ge=1)
    """Number of recent steps that count as load when experts are rebalanced (vLLM's
    window_size)."""
    eplb_async: bool = False
    """Keep stepping while experts move (vLLM's use_async); otherwise the worker pauses."""
    eplb_overhead_ms: field_types.Milliseconds = 0.0
    """Overhead of rebalancing experts, in addition to moving the weights, ms."""
    expert_gather: Literal["collective", "one_sided", "needed"] | None = None
    """Gather experts instead of dispatching tokens, in prefill workers with one GPU per
    engine: while a layer computes, the next layer's experts are gathered from all GPUs, by
    ``collective`` operations or ``one_sided`` reads; ``needed`` waits for a
    layer's gate and reads only the experts that it chose. Default: tokens are dispatched."""
    offload_window: Annotated[int | None, Option(unit="layers")] = Field(default=None, ge=1)
    """Number of MoE layers, beyond the first, that keep their experts on the GPUs of a prefill
    worker; the others are copied from host memory in time. Default: all layers."""
    gather_interference: float = Field(default=0.0, ge=0, le=1)
    """Slowdown of a layer by a concurrent gather: seconds lost per second of gathering."""
    kv_cache_free: bool = False
    """Keep no KV cache: prompts are computed whole, and the token budget limits the activations
    instead. Prefill workers only."""


class FaultConfig(Fields):
    """Faults, and how routers respond to them."""

    fail: Annotated[field_types.Faults, Option(repeated=True, metavar="POOL:N@S[+S]")] = ()
    """A worker that dies: ``decode:3@60s+30s`` (of 8C: ``worker:3@60s+30s``) fails at 60 s, and
    a replacement serves 30 s later (never, if not given). Times count from the start of the
    warm-up. Repeat the option or separate by commas for more."""
    events: Annotated[PathText | None, Option(metavar="FILE", path="file")] = None
    """File of faults (docs/faults.md)."""
    health_delay_ms: field_types.Milliseconds = 0.0
    """Delay of health information, ms: from a worker's failure, freeze or return until routers
    learn of it."""
    retry: Literal["migrate", "before_first_token", "never"] = "before_first_token"
    """Retry policy for requests of a failed worker: ``migrate`` (all continue elsewhere with their
    tokens, as in Dynamo), ``before_first_token`` (only those without a token start over, as
    gateways do), or ``never``."""
    max_retries: int = Field(default=5, ge=0)
    """Maximum number of retries of a request."""
    user_retry_s: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
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
    min_workers: Annotated[Counts, Option(metavar="N[,N]", unit="workers")] = (1,)
    """Minimum number of workers in every pool, or in each: ``1,2``."""
    initial_workers: Annotated[Counts, Option(metavar="N[,N]", unit="workers")] = ()
    """Number of workers at the start. Default: the topology's."""
    gpu_budget: Annotated[int | None, Option(unit="GPUs")] = Field(default=None, ge=1)
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
    switch_time: Annotated[
        Annotated[field_types.Seconds, Field(ge=0)] | Literal["graphs"],
        Option(metavar="S|graphs", unit="s"),
    ] = 10.0
    """Time to move an idle worker to another pool, s: 0 if it keeps the CUDA graphs of both,
    ``graphs`` if it captures the other pool's (``start_up``)."""

    @property
    def scales(self) -> bool:
        """Whether anything is to be done about the number of workers."""
        return self.autoscale != "none"

    def least_workers(self, pools: Iterable[Any]) -> dict[str, int]:
        """Return the minimum number of workers, or of an elastic worker's engines, by pool."""
        return per_pool("min_workers", self.min_workers or (1,), [pool.name for pool in pools])

    def first_workers(self, pools: Iterable[Any]) -> dict[str, int]:
        """Return the number of workers at the start by pool; {}: those of the topology."""
        return per_pool("initial_workers", self.initial_workers, [pool.name for pool in pools])


class OutputConfig(Fields):
    """Objectives that a result is judged by."""

    goodput: Annotated[
        ServiceLevel,
        BeforeValidator(_bounds),
        Option(common=True, repeated=True, metavar="METRIC:MS,...", unit="ms"),
    ] = ServiceLevel()
    """Service-level objective of a good request, ms: ``ttft:500,tpot:30`` (also ``e2el``). A list,
    or repeat the option."""
    confidence: Annotated[int | None, Option(metavar="80", unit="%")] = Field(
        default=None, ge=80, le=80
    )
    """Judge requests against the objective at the unfavourable end of the 80% error band
    (docs/validity.md). Default: as predicted."""


#: The groups of a configuration, by the attribute that holds each.
GROUPS: dict[str, type[Fields]] = {
    "policies": PolicyConfig, "requests": WorkloadConfig, "routing": RoutingConfig,
    "cluster": ClusterConfig, "engine": EngineConfig, "kv": KVTierConfig,
    "scheduler": SchedulerConfig, "steps": StepConfig, "front_end": FrontEndConfig,
    "experts": ExpertsConfig, "faults": FaultConfig, "scaling": ScalingConfig,
    "output": OutputConfig,
}  # fmt: skip
#: The group of every field. A field has one name in all groups, which is what users type.
GROUP_OF = {name: title for title, group in GROUPS.items() for name in group.model_fields}
#: Every field of a configuration.
RUN_FIELDS = {name: GROUPS[title].model_fields[name] for name, title in GROUP_OF.items()}
