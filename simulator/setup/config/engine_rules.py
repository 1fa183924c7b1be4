"""The engines that are known: vLLM's, SGLang's and TensorRT-LLM's rules as values of one engine.

Sources, read in November 2026: SGLang 0.5.9 and 0.5.23 (``srt/managers``, ``server_args.py``),
TensorRT-LLM at 002f3cc (``_torch/pyexecutor/scheduler/scheduler.py``, ``llmapi/llm_args.py``), vLLM
0.33 (``v1/core/sched/scheduler.py``)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Padding, Parallelism
from eldr_sim.kernel_profiles.tables.library import before
from eldr_sim.simulator.plane.state import OF_PROMPT, OF_SHARE, TO_THE_END
from eldr_sim.simulator.setup.config.groups import EngineConfig, SchedulerConfig, StepConfig
from eldr_sim.simulator.setup.config.pools import Engine, Pool

#: Options that not all engines know, and who does: fields of `groups.EngineConfig` and
#: `groups.SchedulerConfig`.
OPTIONS: dict[str, tuple[Engine, ...]] = {
    "long_prefill_token_threshold": ("vllm",),
    "enable_mixed_chunk": ("sglang",),
    "scheduler_recv_interval": ("sglang",),
    "schedule_conservativeness": ("sglang",),
    "enable_chunked_prefill": ("trtllm",),
    "capacity_scheduler_policy": ("trtllm",),
    "batch_wait_timeout_iters": ("trtllm",),
    "batch_wait_max_tokens_ratio": ("trtllm",),
    "attention_dp_balance": ("trtllm",),
    "attention_dp_timeout_iters": ("trtllm",),
    "attention_dp_batching_wait_iters": ("trtllm",),
    "max_cudagraph_capture_size": ("vllm",),
    "shared_experts_fusion": ("sglang",),
}
#: Step time that no kernel hides where vLLM schedules a step when the last one has ended, ms: of
#: Qwen3-8B on H100 with vLLM 0.11 0.5 to 0.8 at four batch sizes (TPOT less kernels), of
#: GPT-OSS-120B on A100 0.6 (TPOT less that with --async-scheduling); both are GPUStack's runs.
HOST_WAIT_MS = 0.7
#: The same of vLLM before 0.11, whose attention stands outside CUDA graphs, on A100: 3.0 to 3.2 of
#: Qwen3-30B-A3B with vLLM 0.9 at seven lengths (tenstorrent's runs). Hosts of H100 wait no longer.
OLD_A100_WAIT_MS = 3.1
#: What vLLM 0.11.0 computes for a request with messages, beside what other versions do: it
#: compiles the chat template (``resolve_chat_template_kwargs`` of ``entrypoints/chat_utils.py``;
#: 0.11.1 keeps the result). CPU time of jinja2 3.1.6 on a quiet core of EPYC Milan, 19 to 21 ms
#: with the templates of Qwen3 and GLM-4.6.
CHAT_TEMPLATE_S = 0.020
#: Activation memory that vLLM before 0.17 holds beside later versions': 5.64 and 2.23 GiB of
#: Qwen3-14B on H100 (0.15 and 0.16, 0.17 to 0.19: jgchn/llm-d-planner,
#: accuracy/blog-gpu-capacity.md); other models' differs.
OLD_ACTIVATION_BYTES = int((5.64 - 2.23) * 2**30)
#: SGLang's ``new_token_ratio`` at first, the share of it that is left at last, steps until then.
FIRST_SHARE, _LEAST, _STEPS = 0.7, 0.14, 600
_MIB = 2**20


@dataclass(frozen=True)
class EngineRules:
    """What an engine decides otherwise than vLLM; the defaults are vLLM's."""

    mixed_steps: bool = True  #: sequences decode beside prompts, and count against the budget
    whole_prompts: bool = False  #: no chunks: a prompt waits until the step has room for all of it
    poll_steps: int = 1  #: steps of decoding after which the engine looks for requests
    wait_steps: int = 0  #: steps at most that prompts wait for more of them,
    wait_tokens: int = 0  #: until a step has this many tokens
    balance_steps: int = 0  #: steps at most that prompts wait for all engines of a group,
    batching_steps: int = 0  #: and more once all have some
    reserve: int = int(OF_PROMPT)  #: `state.OF_PROMPT`, ``OF_SHARE`` or ``TO_THE_END``
    first_share: float = 0.0  #: of tokens still to come that ``OF_SHARE`` reserves at first,
    least_share: float = 0.0  #: at last,
    share_step: float = 0.0  #: and how much less each step of decoding
    fewest_first: bool = False  #: the sequence with the fewest outputs is preempted first
    #: Who has ended stays in the batch until a step of decoding is planned, and where a request
    #: found no room, none is admitted before one has left it (SGLang's ``batch_is_full``).
    fills_up: bool = False
    #: A prompt takes the KV blocks of a chunk when it is scheduled, else all when it is admitted.
    allocates_chunks: bool = True
    #: What is computed is found in the cache when its output has been processed: not by the step
    #: that is planned ahead; and never what a preempted sequence has generated.
    caches_late: bool = False
    token_with_kv: bool = False  #: the first token comes with a KV cache that is handed over
    #: Where it schedules ahead, a sequence that ends with this many tokens of a step or more rides
    #: in the next one that decodes (vLLM's ended sooner than it had to, by drafts); 0: none does.
    rides_from: int = 2
    #: Where it schedules ahead, a completed sequence keeps its place and its KV blocks until its
    #: output has been processed, which is after the next step has been planned.
    frees_late: bool = True
    #: Where KV caches are handed over, an EAGLE or MTP head computes the last cached block again.
    drops_block: bool = True
    #: Sliding windows can be found at the ends of prompts and of prefixes that others have shared
    #: alone (``prefix_cache_retention_interval`` 0), else everywhere.
    keeps_ends: bool = True
    cuts_alone: bool = False  #: long_prefill_token_threshold also cuts the prompt of a lone request
    #: A new sequence with one token to compute is padded to the size of a verify step.
    pads_drafts: bool = True
    pads_beside: bool = False  #: but only where others are running, though its context is cached
    #: Most tokens of a step without prompts, and with, that runs as a CUDA graph; None: any number.
    graph_tokens: int | None = None
    prompt_graph_tokens: int | None = None


def rules_of(
    engine: Engine,
    options: SchedulerConfig,
    budget: int,
    engines_of_worker: int,
    version: str | None = None,
) -> EngineRules:
    """Return an engine's rules by :data:`OPTIONS`; ``budget``: tokens of a step; ``version``: None
    for the newest."""
    if engine == "sglang":
        # `_handle_data_parallelism` of server_args.py
        conservative = options.schedule_conservativeness or 1.0
        conservative *= 0.3 if engines_of_worker > 1 else 1.0
        first = min(FIRST_SHARE * conservative, 1.0)
        return EngineRules(
            mixed_steps=bool(options.enable_mixed_chunk),
            poll_steps=options.scheduler_recv_interval or 1,
            reserve=int(OF_SHARE),
            first_share=first,
            least_share=_LEAST * first,
            share_step=(1.0 - _LEAST) * first / _STEPS,
            fewest_first=True,
            fills_up=True,
            caches_late=True,  # `cache_unfinished_req` comes with a step's output
            token_with_kv=True,
            rides_from=1,  # `Scheduler.event_loop_overlap`
            allocates_chunks=False,
            drops_block=False,
            prompt_graph_tokens=0 if options.piecewise_cuda_graph is False else None,
        )
    if engine == "trtllm":
        evicts = options.capacity_scheduler_policy == "MAX_UTILIZATION"
        ratio = options.batch_wait_max_tokens_ratio or 0.0
        waits = ratio > 0.0 and engines_of_worker == 1
        balances = options.attention_dp_balance and engines_of_worker > 1
        batching = options.attention_dp_batching_wait_iters
        return EngineRules(
            whole_prompts=not options.enable_chunked_prefill,
            wait_steps=(options.batch_wait_timeout_iters or 0) if waits else 0,
            wait_tokens=math.ceil(ratio * budget),
            balance_steps=(options.attention_dp_timeout_iters or 50) if balances else 0,
            batching_steps=10 if batching is None else batching,
            reserve=int(OF_PROMPT if evicts else TO_THE_END),
            token_with_kv=True,
            rides_from=0,
            frees_late=False,
            allocates_chunks=False,
            drops_block=False,
            prompt_graph_tokens=None if options.piecewise_cuda_graph else 0,
        )
    return EngineRules(
        cuts_alone=before(version, 0, 31), pads_drafts=not before(version, 0, 25),
        pads_beside=before(version, 0, 30),
        keeps_ends=not before(version, 0, 27),  # vllm-project/vllm pull request 52216
    )  # fmt: skip


def prompt_graphs(
    model: ModelDims, gpu: GPU, parallelism: Parallelism, *, drafts: bool, apart: bool
) -> dict[str, Any]:
    """Return the rules of steps with prompts where SGLang decides on their graphs.

    ``_handle_piecewise_cuda_graph`` of ``server_args.py`` (0.5.10, and as a table 0.5.14) captures
    none on AMD GPUs, for sparse and linear attention, drafts, data-parallel attention, prompts of
    other workers (``apart``), and beside TensorRT-LLM's MoE kernels, which MLA and Qwen models with
    FP8 or NVFP4 experts take on Blackwell; of MLA it captures up to 2,048 tokens."""
    sparse = model.index_topk > 0 or model.n_linear_layers > 0
    shared = parallelism.data_parallel_size > 1
    trtllm = _runs_trtllm_experts(model, gpu)
    if gpu.name.startswith("MI") or sparse or drafts or apart or shared or trtllm:
        return {"prompt_graph_tokens": 0}
    return {"prompt_graph_tokens": 2048} if model.attention == "mla" else {}


def _runs_trtllm_experts(model: ModelDims, gpu: GPU) -> bool:
    """Whether SGLang takes TensorRT-LLM's kernels of experts by itself."""
    kinds = model.attention == "mla" or model.name.startswith("Qwen")
    low = model.expert_dtype in ("fp8", "fp8_block", "nvfp4")
    return gpu.fp4_flops > 0 and kinds and low and not model.is_dense


def fuses_shared_expert(
    engine: Engine,
    model: ModelDims,
    gpu: GPU,
    parallelism: Parallelism,
    steps: StepConfig,
    fusion: bool | None = None,
) -> bool:
    """Whether SGLang makes the shared expert one more routed expert.

    ``determine_num_fused_shared_experts`` of ``deepseek_v2.py`` and ``glm4_moe.py`` (0.5.3, 0.5.9,
    0.5.12) fuses GLM-4.x on NVIDIA GPUs, and DeepSeek-V3 and GLM-5 with 256 experts (DeepSeek-V3.2
    has another architecture's name). It does not with expert parallelism (except on AMD GPUs), with
    TensorRT-LLM's kernels (``server_args.py``) or with two-batch overlap. ``fusion``: its option;
    None: its own choice.

    Elsewhere SGLang's decode graphs, TensorRT-LLM and vLLM since 0.11.1 run shared experts on a
    second stream. Here they follow the routed experts: in published runs on Blackwell (Kimi-K2.5
    under vLLM, DeepSeek-R1 under SGLang and TensorRT-LLM, 1 to 16 in flight) a layer takes 0 to 6
    us more than that, and 16 to 23 us more than with all of them hidden."""
    if engine != "sglang" or not model.shared_intermediate_size:
        return False
    if fusion is not None:
        return fusion
    glm, amd = "glm" in model.name.lower(), gpu.name.startswith("MI")
    fp4_glm = glm and gpu.fp4_flops > 0 and model.expert_dtype == "nvfp4"
    auto = steps.moe_backend == "auto" and (_runs_trtllm_experts(model, gpu) or fp4_glm)
    if auto or steps.moe_backend == "flashinfer_trtllm" or steps.two_batch_overlap:
        return False
    if model.attention == "gqa":
        return glm and not amd and parallelism.n_expert_ranks == 1
    one = model.shared_intermediate_size == model.expert_intermediate_size
    special = model.n_linear_layers or model.compressed_layers or (model.index_topk and not glm)
    fits = model.n_experts == 256 and one and not special
    return fits and (amd or parallelism.n_expert_ranks == 1)


def captured_steps(
    options: SchedulerConfig, gpu: GPU, version: str | None, decode_tokens: int
) -> dict[str, Any]:
    """Return the rules of vLLM's CUDA graphs: larger steps are launched kernel by kernel.

    ``_set_cudagraph_sizes`` of ``config/vllm.py``: ``max_cudagraph_capture_size``, or twice the
    tokens of the largest decode step (``decode_tokens``), at most 512; on B200, B300 and their
    superchips 1,024 since pull request 49390 (in 0.32, not yet in 0.24). ``FULL_DECODE_ONLY``
    (``piecewise_cuda_graph`` false) captures no prompts.
    """
    most = options.max_cudagraph_capture_size
    if most is None:
        wide = gpu.name.startswith(("B", "GB")) and not before(version, 0, 25)
        most = min(2 * decode_tokens, 1024 if wide else 512)
    prompts = 0 if options.piecewise_cuda_graph is False else most
    return {"graph_tokens": most, "prompt_graph_tokens": prompts}


def default_budget(
    engine: Engine, gpu: GPU, engines_of_worker: int = 1, version: str | None = None
) -> int:
    """Return the most tokens of a step where nothing is said.

    vLLM's goes by the GPU (``get_batch_defaults`` of ``arg_utils.py``): 16,384 from 160 GiB of
    memory on in 0.28.0 and later, not yet in 0.24.0; versions between were not looked at. SGLang's
    goes by the card's memory (``_handle_gpu_memory_settings``), shared by the engines of
    data-parallel attention; TensorRT-LLM's ``max_num_tokens`` is 8,192."""
    if engine == "sglang":
        mib = gpu.memory_bytes / _MIB
        chunk = 4096 if mib < 60e3 else 8192 if mib < 160e3 else 16384
        return max(1, chunk // engines_of_worker)
    if engine == "vllm" and gpu.memory_bytes >= 160 << 30 and not before(version, 0, 28):
        return 16384
    return 8192 if engine == "trtllm" else gpu.max_num_batched_tokens


def default_seats(
    engine: Engine, gpu: GPU, engines_of_worker: int = 1, *, drafts: bool = False
) -> int:
    """Return the running requests of an engine where nothing is said: 2,048 of TensorRT-LLM
    (``max_batch_size``) and, at least, of a worker of SGLang's, but 48 where that speculates
    (``_handle_eagle_family`` and ``_handle_ngram``)."""
    if engine == "sglang":
        return max(1, (48 if drafts else 2048) // engines_of_worker)
    return 2048 if engine == "trtllm" else gpu.max_num_seqs


def activation_bytes(engine: Engine, version: str | None) -> int:
    """Return the memory that an engine of this version holds beyond the GPU's usual reserve."""
    return OLD_ACTIVATION_BYTES if engine == "vllm" and before(version, 0, 17) else 0


def chat_template_s(engine: Engine, version: str | None, model: ModelDims) -> float:
    """Return how long an API server compiles the chat template of a request, s. Messages of GPT-OSS
    need no template (vLLM's ``use_harmony``, ``serving_chat.py``): 0."""
    compiles = engine == "vllm" and not before(version, 0, 11) and before(version, 0, 11, 1)
    return CHAT_TEMPLATE_S if compiles and not model.name.lower().startswith("gpt-oss") else 0.0


def api_servers(engine: Engine | None, version: str | None, n_engines: int) -> int:
    """Return the API servers of a worker of ``n_engines``: in vLLM one for each of them since 0.15
    (vllm-project/vllm pull request 32525), else one."""
    return n_engines if engine == "vllm" and not before(version, 0, 15) else 1


def version_fields(engine: str, version: str | None) -> dict[str, Any]:
    """Return the fields that a version of an engine has other defaults of; none without a version.

    vLLM schedules ahead since 0.14, tokenises prompts one after the other since 0.15 and in a pool
    of threads since 0.24 (`simulator.plane.front_end`). SGLang's steps with prompts are graphs in
    pieces since 0.5.10 (``server_args.py``)."""
    if not version:
        return {}
    if engine == "sglang":
        return {"piecewise_cuda_graph": False} if before(version, 0, 5, 10) else {}
    if engine != "vllm":
        return {}
    fields: dict[str, Any] = {}
    if before(version, 0, 24):
        fields["tokenizer_mode"] = "microbatch_sequential"
    if before(version, 0, 15):
        fields["tokenizer_mode"] = "microbatch_parallel"
    if before(version, 0, 14):
        fields["async_scheduling"] = False
    return fields


def _host_wait_ms(gpu: GPU, version: str) -> float:
    """Return what a step of vLLM waits for its host without asynchronous scheduling."""
    old = before(version, 0, 11) and "A100" in (gpu.name, gpu.sibling)
    return OLD_A100_WAIT_MS if old else HOST_WAIT_MS


def padding_of(engine: Engine, version: str | None, n_engines: int) -> Padding:
    """Return what the padding rows of CUDA graphs do by default in workers of ``n_engines``.

    vLLM's choose no experts since 0.32 (vllm-project/vllm pull request 46428). An engine without a
    version has the rules of the newest one but for this: the published runs by which errors are
    known were predicted without padding. Engines that share experts pad to the widest of them,
    which is not simulated."""
    if engine != "vllm" or not version or n_engines > 1:
        return "none"
    return "experts" if before(version, 0, 32) else "dense"


def default_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run that an engine, or its version, has other defaults of.

    SGLang's share of memory is ``mem_fraction_static`` (``server_args.py``), TensorRT-LLM's
    ``free_gpu_memory_fraction``. SGLang's blocks stay at 16 tokens: its pages of one hold at most
    15 tokens a sequence less."""
    engine = values.get("engine") or "vllm"
    fields = version_fields(engine, values.get("engine_version"))
    if engine == "trtllm":
        return fields | {"gpu_memory_utilization": 0.9, "block_size": 32}
    version = values.get("engine_version")
    waits = version and not (fields | dict(values)).get("async_scheduling", True)
    if engine != "sglang" and not waits:
        return fields
    try:
        gpu = load_gpu(values.get("gpu", "H100"))
        if engine != "sglang":
            return fields | {"host_gap_ms": _host_wait_ms(gpu, str(version))}
        width, engines = (
            int(values.get("tensor_parallel_size", 1)),
            int(values.get("data_parallel_size", 1)),
        )
    except (TypeError, ValueError):
        return fields  # the field itself says what is wrong
    chunk = values.get("max_num_batched_tokens") or default_budget("sglang", gpu, engines)
    return fields | {"gpu_memory_utilization": _static_share(gpu, width, engines, int(chunk))}


def memory_share(value: Callable[[str], Any], engine: Engine, pool: Pool) -> float:
    """Return ``gpu_memory_utilization`` of a pool's engines: the run's, or their engine's default
    on their GPUs where none was given. ``value``: returns a field of the run by its name."""
    name, given = "gpu_memory_utilization", value("gpu_memory_utilization")
    usual = EngineConfig.model_fields[name].default
    run = {field: value(field) for field in _SHARE}
    if given != default_fields(run).get(name, usual):
        return float(given)
    own = run | {f: v for f in _SHARE if (v := getattr(pool, f, None)) is not None}
    return float(default_fields(own | {"engine": engine}).get(name, usual))


#: What the default share of an engine depends on.
_SHARE = ("engine", "gpu", "tensor_parallel_size", "data_parallel_size", "max_num_batched_tokens")


def _static_share(gpu: GPU, width: int, engines: int, chunk: int) -> float:
    """Return SGLang's mem_fraction_static: what activations and CUDA graphs leave, all in MiB; a
    thousandth where they leave nothing, in which no model fits, as whoever loads it is told."""
    mib = gpu.memory_bytes / _MIB
    graphs = 512 if mib >= 160e3 or width * engines >= 4 else 256
    held = 512 + 1.5 * max(chunk * engines, 2048) + 2 * graphs + width * engines * 128
    if engines > 1:
        held += graphs * engines * (4.5 if graphs > 300 else 3)
    return max(0.001, round((mib - max(held, 10240)) / mib, 3))
