"""How many KV blocks a worker has."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.tables.library import before
from eldr_sim.simulator.setup.config.groups import EngineConfig
from eldr_sim.simulator.setup.config.pools import Engine, WorkerPool
from eldr_sim.simulator.setup.speculation import Speculation


class StreamedExperts(NamedTuple):
    """What of a model's experts a GPU holds that streams them."""

    instances: int  #: over all MoE layers, gather buffers included
    activation_bytes: int  #: of a step of the token budget, beyond what the engine reserves


def streamed_experts(
    model: ModelDims, gpu: GPU, n_gpus: int, window: int, max_num_batched_tokens: int
) -> StreamedExperts:
    """Return what a GPU holds of experts that ``n_gpus`` GPUs share and gather layer by layer.

    The first MoE layer whole, its part of ``window`` others (0: of all), and two buffers of a
    layer; a GPU alone computes from its window. A token's activations are the two largest buffers
    of a fused MoE layer (MoE-Prefill Sec. 4.1), ``top_k`` times the gate and up projections and the
    outputs, bfloat16; the engine's reserve holds those of the default budget."""
    resident = window or model.n_moe_layers - 1
    buffers = 2 if n_gpus > 1 else 0
    instances = (1 + buffers) * model.n_experts + resident * model.n_experts // n_gpus
    token = 2 * model.top_k * (2 * model.expert_intermediate_size + model.expert_width)
    beyond = max(max_num_batched_tokens - gpu.max_num_batched_tokens, 0)
    return StreamedExperts(instances, token * beyond)


class SmallBlocks(NamedTuple):
    """Groups of layers with a window, in smaller blocks than contexts."""

    groups: int
    window: int  #: tokens
    block_size: int  #: tokens

    def most(self, tokens: Ints) -> Ints:
        """Return the blocks that windows of requests of these lengths reach into."""
        reach = -(-(self.window - 1) // self.block_size) + 1
        return self.groups * np.minimum(-(-tokens // self.block_size), reach)


class WindowBlocks(NamedTuple):
    """What a request's windows and states take, in KV blocks of the layers with full attention.

    vLLM's hybrid KV cache manager (``vllm/v1/core/kv_cache_utils.py``, ``get_kv_cache_groups``;
    ``SlidingWindowManager``) gives all groups of layers blocks of one pool, and takes those back
    that no window reaches."""

    share: float = 0.0  #: bytes of a block in the sliding layers over those in the others
    most: int = 0  #: blocks that a window reaches into
    state: int = 0  #: and blocks that the states of linear attention take, however long it is
    #: Groups of sliding layers that take and free blocks one by one as windows move, of ``window``
    #: tokens; 0: a request takes the blocks of its windows at once, and keeps them.
    groups: int = 0
    window: int = 0
    small: tuple[SmallBlocks, ...] = ()  #: of compressed attention

    def of(self, tokens: Ints, block_size: int) -> Ints:
        """Return the blocks that requests that grow to these lengths take at once."""
        return self.reached(tokens, block_size) * (self.groups == 0) + self.state

    def reached(self, tokens: Ints, block_size: int) -> Ints:
        """Return the blocks that the windows of requests of these lengths reach into."""
        reached = np.minimum(-(-tokens // block_size), self.most)
        reached = np.ceil((self.groups or self.share) * reached).astype(np.int64)
        return sum((small.most(tokens) for small in self.small), start=reached)

    def cap(self, block_size: int, in_flight: int, max_model_len: int) -> int:
        """Return the most blocks of a request in a group, ``in_flight`` tokens of which are
        scheduled (``SlidingWindowSpec.max_admission_blocks_per_request``)."""
        return -(-min(self.window - 1 + in_flight, max_model_len) // block_size) + 1


#: Of models without such layers, and of engines that keep whole contexts in them.
NO_WINDOWS = WindowBlocks()


def window_blocks(model: ModelDims, block_size: int) -> WindowBlocks:
    """Return what the sliding windows of a request take; nothing where no other layers are."""
    full = model.cached_bytes_per_token(False)
    if not model.n_sliding_layers or not full:
        return NO_WINDOWS
    sliding = model.cached_bytes_per_token(True)
    most = -(-(model.sliding_window - 1) // block_size) + 1
    groups = math.ceil(sliding / full) if sliding >= full else 0
    return WindowBlocks(sliding / full, most, groups=groups, window=model.sliding_window)


#: DeepSeek-V4 in vLLM 0.32 (``vllm/models/deepseek_v4``): tokens of a block of contexts and of
#: windows; of each ratio, the window that its compressors see and the tokens of a block of them.
_CONTEXTS, _WINDOWS, _COMPRESSORS = 256, 64, {4: (8, 4), 128: (128, 8)}


def _layers_of_group(model: ModelDims) -> int:
    """Return how many layers with windows, or of compressors, stand in a group: of the numbers from
    that of the indexers on the one that leaves the fewest places empty (``_approximate_gcd``)."""
    counts = [model.n_layers, *(layers for _, layers in model.compressed_layers)]
    sizes = range(model.n_indexers, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def compressed_blocks(model: ModelDims) -> WindowBlocks:
    """Return what windows and compressors of compressed attention take."""
    size = _layers_of_group(model)
    windows = SmallBlocks(-(-model.n_layers // size), model.local_window, _WINDOWS)
    compressors = (
        SmallBlocks(-(-layers // size), *_COMPRESSORS[ratio])
        for ratio, layers in model.compressed_layers
    )
    return WindowBlocks(small=(windows, *compressors))


def _compressed_block_bytes(shard: ModelDims, block_size: int) -> int:
    """Return the bytes of a block of compressed attention: of the entries and index keys of all
    layers, or of a group of windows, each layer's rounded up."""
    unit = 576 if shard.kv_cache_dtype == "fp8" else 512

    def page(n: int, n_bytes: int) -> int:
        return -(-n * n_bytes // unit) * unit

    entries = sum(
        layers * page(block_size // ratio, shard.latent_bytes)
        for ratio, layers in shard.compressed_layers
    )
    ratio, layers = min(shard.compressed_layers)
    contexts = entries + layers * page(block_size // ratio, shard.index_key_bytes)
    return max(contexts, _layers_of_group(shard) * page(_WINDOWS, shard.latent_bytes))


def check_experts_fit(model: ModelDims, gpu: GPU, utilization: float, instances: int) -> None:
    """Raise InputError unless a GPU that holds nothing else holds this number of expert
    instances."""
    needed, left = instances * model.bytes_per_expert, int(gpu.memory_bytes * utilization)
    left -= gpu.engine_reserved_bytes
    if needed > left:
        problem = f"experts of {needed / 1e9:.1f} GB on a {gpu.name} that has {left / 1e9:.1f} GB"
        raise InputError("ffn_ranks", problem, "more FFN GPUs")


#: Tokens by which vLLM enlarges blocks of models that keep states: the kernels of MLA need 128.
_PAGES = {"gqa": 16, "mla": 128}


def least_block_size(shard: ModelDims, block_size: int) -> int:
    """Return the tokens of a KV block of a GPU. With layers of linear attention that keep a state,
    enough that a layer's block is at least as large as a layer's state, because both come from one
    pool, and prefixes are reused at ends of blocks alone (vLLM's ``vllm/platforms/interface.py``,
    ``update_block_size_for_backend``; 528 tokens of Qwen3.5-4B, vllm#40696). With compressed
    attention, those that its kernels need."""
    if shard.compressed_layers:
        return max(block_size, _CONTEXTS)
    if not shard.n_linear_layers:
        return block_size
    token = shard.kv_bytes_per_token_layer() - shard.index_bytes_per_token
    page = _PAGES[shard.attention]
    return max(block_size, page * math.ceil(shard.layer_state_bytes / (page * token)))


def state_blocks(shard: ModelDims, block_size: int) -> int:
    """Return the KV blocks of a GPU that the states of a request's linear attention take.

    Where a layer's block is as large as its state, states stand in groups of as many layers as
    have full attention, one block a group (vLLM's ``_get_kv_cache_groups_uniform_page_size``)."""
    if shard.n_linear_layers and block_size >= least_block_size(shard, 1):
        return -(-shard.n_linear_layers // shard.n_full_layers)
    return -(-shard.state_bytes // (block_size * shard.kv_bytes_per_token))


class OtherMemory(NamedTuple):
    """What a GPU holds beside weights and KV cache."""

    held_bytes: int = 0  #: on top of what the engine reserves
    token_bytes: int = 0  #: of each token, beside the KV cache of the model


NO_MORE = OtherMemory()


def block_bytes(
    model: ModelDims,
    block_size: int,
    parallelism: Parallelism = SINGLE_GPU,
    windows: WindowBlocks = NO_WINDOWS,
) -> int:
    """Return the bytes of a KV block on a GPU. With ``windows`` blocks are those of layers with
    full attention; without, sliding windows are charged for the whole context."""
    if windows.small:
        whole = _compressed_block_bytes(parallelism.shard(model), block_size)
        return parallelism.of_stage(model, whole)
    token_bytes = parallelism.kv_bytes_per_token(model)
    if windows.most:
        token_bytes = math.ceil(token_bytes / (1.0 + windows.share))
    return block_size * token_bytes


def kv_blocks(
    model: ModelDims,
    gpu: GPU,
    utilization: float,
    block_size: int,
    parallelism: Parallelism = SINGLE_GPU,
    instances: int | None = None,
    engine: Engine = "vllm",
    windows: WindowBlocks = NO_WINDOWS,
    more: OtherMemory = NO_MORE,
    given: int | None = None,
) -> int:
    """Return the KV blocks of ``block_size`` tokens that fit beside the weights of a worker, as
    vLLM sizes its cache (``vllm/v1/worker/gpu_worker.py``, ``determine_available_memory``).

    Every GPU holds its heads' part of every block, so one decides. ``instances``: of experts on it,
    an equal share when not given; ``utilization``: of all memory for ``engine`` vLLM, of what
    weights and KV cache may take for SGLang, of what is free for TensorRT-LLM. ``windows``: as of
    `block_bytes`; with them requests take more blocks. ``given``: bytes for the cache instead of
    ``utilization``. Raises InputError if there is no room for a block, or for ``given``."""
    weights = parallelism.weight_bytes(model, instances)
    held = weights + more.held_bytes
    if engine == "sglang":
        held -= gpu.engine_reserved_bytes
    free = gpu.kv_cache_bytes(held, 1.0 if engine == "trtllm" else utilization)
    if engine == "trtllm":
        free = int(free * utilization)
    if given is not None:
        if given > (most := gpu.kv_cache_bytes(held, 1.0)):
            problem = f"{given}, and weights leave {most} bytes on {gpu.name}"
            raise InputError("kv_cache_memory_bytes", problem, f"at most {most}")
        free = given
    each = block_bytes(model, block_size, parallelism, windows) + block_size * more.token_bytes
    blocks = free // each
    if blocks < 1:
        problem = (
            f"a block of {block_size} tokens takes {each} bytes, "
            f"{model.name} leaves {free} on {gpu.name}"
        )
        raise InputError("block_size", problem, "a smaller block")
    return blocks


def windows_of(
    settings: EngineConfig, pools: Sequence[WorkerPool], handed_over: bool, model: ModelDims
) -> WindowBlocks:
    """Return the blocks that a request's sliding windows take; nothing where window layers keep the
    whole context. ``handed_over``: KV caches are, from prefill to decode workers.

    vLLM keeps windows apart (its hybrid KV cache manager), with KV connectors only since 0.22,
    where NIXL's supports it (vllm-project/vllm pull request 41847; read in 0.21.0 and 0.22.0,
    ``vllm/config/vllm.py``). Workers that hand KV caches over share one layout, so one pool with an
    older version, or with another engine, decides for all."""
    whole = settings.disable_hybrid_kv_cache_manager
    others = any((pool.engine or settings.engine) != "vllm" for pool in pools)
    if whole and (model.n_linear_layers or model.compressed_layers):
        problem = f"true, and {model.name} keeps states beside its contexts"
        raise InputError("disable_hybrid_kv_cache_manager", problem, "false")
    if model.compressed_layers and not others:
        return compressed_blocks(model)
    if whole is None:
        older = any(before(pool.engine_version, 0, 22) for pool in pools)
        whole = handed_over and (others or older)
    windows = NO_WINDOWS if whole else window_blocks(model, settings.block_size)
    if others or model.n_linear_layers:
        return windows._replace(groups=0)
    return windows


def pool_blocks(
    settings: EngineConfig,
    windows: WindowBlocks,
    engine: Engine,
    share: float,
    model: ModelDims,
    gpu: GPU,
    parallelism: Parallelism,
    instances: int,
    activation_bytes: int = 0,
    speculation: Speculation | None = None,
) -> int:
    """Return the KV blocks of a pool's engine with this number of expert instances on its GPUs.
    ``share``: as of `kv_blocks`; ``activation_bytes``: beyond the engine's reserve."""
    if parallelism.ffn_ranks:
        check_experts_fit(model, gpu, 1.0 if engine == "trtllm" else share, instances)
        instances = 0
    override = settings.num_gpu_blocks_override
    if override is not None and engine == "vllm":
        return override - 1  # one is the null block (block_pool.py)
    more = OtherMemory(activation_bytes)
    if speculation is not None:
        draft = speculation.draft
        # Layers of DeepSeek-V4 that draft have a window alone, and fill up its groups.
        own = 0 if windows.small else draft.kv_bytes_per_token
        more = OtherMemory(activation_bytes + draft.weight_bytes, own)
    blocks = kv_blocks(
        model, gpu, share, settings.block_size, parallelism, instances, engine, windows, more,
        settings.kv_cache_memory_bytes,
    )  # fmt: skip
    return blocks if override is None else min(blocks, override - 1)  # max_total_tokens: a bound
