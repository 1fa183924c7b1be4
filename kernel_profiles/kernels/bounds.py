"""The least time of a kernel on a GPU: its bytes at the peak bandwidth, its FLOPs at the peak.

`steps.parts` prices no kernel below these, whatever the table says: of the GPU, of its sibling, or
the user's. Small points of imported tables lie below them, because their matrices or caches stayed
in the L2 cache while they were timed; in a model each layer reads its own from memory. Counted is
what a kernel cannot avoid: every weight and cached value once, FLOPs of the fastest units that the
type allows, of a message the part that has to leave a GPU."""

from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels.flops import index_flops, pair_flops, state_flops
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.stored_weights import WeightDtype, stored_bytes
from eldr_sim.kernel_profiles.tables.format import LatencyTable


def linear_s(gpu: GPU, n: int, k: int, rows: ArrayLike, dtype: WeightDtype) -> Floats:
    """Return the least seconds of ``rows`` rows through an n x k matrix stored as ``dtype``."""
    m = np.asarray(rows, dtype=np.float64)
    memory = stored_bytes(n, k, dtype) / gpu.memory_bandwidth
    compute = 2.0 * n * k * m / gpu.most_flops(dtype)
    return np.where(m > 0, np.maximum(memory, compute), 0.0)


def expert_s(gpu: GPU, model: ModelDims) -> tuple[float, float]:
    """Return the least seconds to read one routed expert, and to compute one token on it."""
    flops = 2.0 * model.mlp_matrices * model.expert_width * model.expert_intermediate_size
    read_s = model.bytes_per_expert / gpu.memory_bandwidth
    return read_s, flops / gpu.most_flops(model.expert_dtype)


class AttentionBound(NamedTuple):
    """Least seconds of one layer's attention."""

    token_s: float = 0.0  #: of a decoding query and a cached token
    index_s: float = 0.0  #: likewise of its index key
    pair_s: float = 0.0  #: of a query of a prompt and a token that it attends to
    index_pair_s: float = 0.0  #: likewise of an index key
    limit: int = 0  #: tokens that a query attends to at most; 0: all

    def decode_s(self, batch: Floats, context: Floats) -> Floats:
        """Return the least seconds [batches, contexts] of a decode step."""
        read = np.minimum(context, self.limit) if self.limit else context
        return batch[:, None] * (self.token_s * read + self.index_s * context)[None, :]


#: Of tables that stand alone, without a GPU.
UNBOUNDED = AttentionBound()


def attention(gpu: GPU, model: ModelDims, sliding: bool) -> AttentionBound:
    """Return the bound of a layer that slides, or attends to everything or what it chooses."""
    fp8 = model.kv_cache_dtype == "fp8"
    flops = gpu.most_flops("fp8" if fp8 else "bfloat16")
    index_bytes = 0.0 if sliding else model.index_bytes_per_token
    cached = model.kv_bytes_per_token_layer(sliding) - index_bytes
    decode, prefill = (pair_flops(model, sliding, decode=kind) / flops for kind in (True, False))
    index_pair_s = 0.0 if sliding else index_flops(model) / gpu.most_flops("fp8")
    return AttentionBound(
        max(cached / gpu.memory_bandwidth, decode),
        max(index_bytes / gpu.memory_bandwidth, index_pair_s),
        prefill,
        index_pair_s,
        model.sliding_window if sliding else model.index_topk,
    )


def linear_attention(gpu: GPU, model: ModelDims) -> tuple[float, float]:
    """Return the least seconds of one layer's linear attention: of a decoding sequence, with its
    state read and written, and of a token of a prompt."""
    compute = state_flops(model) / gpu.bf16_flops
    moved = 2 * model.layer_state_bytes / gpu.memory_bandwidth
    return max(moved, compute), compute


def message_s(gpu: GPU, n_gpus: int, message_bytes: ArrayLike) -> Floats:
    """Return the least seconds in which GPUs of a node gather or sum a message: each sends, or
    receives, the part that it lacks."""
    moved = np.asarray(message_bytes, dtype=np.float64) * (n_gpus - 1) / n_gpus
    return np.asarray(moved / gpu.peer_bandwidth(n_gpus), dtype=np.float64)


def below(table: LatencyTable, gpu: GPU, model: ModelDims) -> float:
    """Return the share of a table's rows that are faster than the GPU can be; of kinds that have no
    bound, of MLA's modules among them, 0. ``model``: of the part that a GPU computes."""
    columns, shape = table.columns, table.metadata.shape
    kind, dtype = table.metadata.kind, table.metadata.dtype
    stored = next((one for one in get_args(WeightDtype) if one == dtype), None)
    if kind == "gemm" and stored is not None:
        rows = table.rows("n", "k", "m")
        least = np.array([float(linear_s(gpu, n, k, m, stored)) for n, k, m in rows])
    elif kind == "moe":
        read_s, pair_s = expert_s(gpu, model)
        top_k = shape["top_k"] / shape.get("expert_parallel_size", 1)
        computed = pair_s * top_k * columns["batch"]
        least = np.maximum(read_s * columns["distinct_experts"], computed)
    elif kind == "attention_decode" and "window" in shape:
        bound = attention(gpu, model, bool(shape["window"]))
        read = np.minimum(columns["context"], bound.limit or np.inf)
        least = bound.token_s * columns["batch"] * read
    elif kind == "attention_prefill" and "window" in shape:
        bound = attention(gpu, model, bool(shape["window"]))
        tokens = columns["new_tokens"].astype(np.float64)
        least = bound.pair_s * columns["batch"] * causal_pairs(tokens, bound.limit)
    else:
        return 0.0
    return float(np.mean(columns["latency_s"] < least))


def causal_pairs(tokens: Floats, window: int = 0) -> Floats:
    """Pairs of a query and a key under the causal mask of a whole prompt; window 0 means none."""
    pairs = tokens * (tokens + 1) / 2
    if window:
        past = np.maximum(tokens - window, 0.0)
        pairs -= past * (past + 1) / 2
    return pairs
