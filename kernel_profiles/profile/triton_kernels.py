"""Triton kernels of a fused MoE layer, and of the norms around it. Nothing here is CUDA-only. In
Triton's interpreter ``tl.dot`` returns garbage on bfloat16 operands, so tiles are widened to
float32 there (``UPCAST``); sums are float32 everywhere."""

# mypy: ignore-errors
import triton
import triton.language as tl

# DECODE: how weights are stored. 0 bfloat16; 1 FP8 by the hardware's conversion; 2 FP8 by its bits;
# 3 MXFP4.


@triton.jit
def top_k_kernel(
    logits, ids, weights, n_experts,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """One token a program: its largest logits, and their softmax."""
    token = tl.program_id(0)
    experts = tl.arange(0, E_PAD)
    slots = tl.arange(0, K_PAD)
    row = logits + token * n_experts
    score = tl.load(row + experts, mask=experts < n_experts, other=float("-inf")).to(tl.float32)
    best = tl.full([K_PAD], float("-inf"), tl.float32)
    chosen = tl.zeros([K_PAD], tl.int32)
    for j in tl.static_range(TOP_K):
        index = tl.argmax(score, axis=0)
        best = tl.where(slots == j, tl.max(score, axis=0), best)
        chosen = tl.where(slots == j, index, chosen)
        score = tl.where(experts == index, float("-inf"), score)
    share = tl.exp(best - tl.max(best, axis=0))
    share = share / tl.sum(share, axis=0)
    tl.store(ids + token * TOP_K + slots, chosen, mask=slots < TOP_K)
    tl.store(weights + token * TOP_K + slots, share, mask=slots < TOP_K)


@triton.jit(do_not_specialize=["n_pairs"])
def align_kernel(
    ids, slots, block_expert, n_blocks, n_pairs, n_local,
    BLOCK_M: tl.constexpr, E_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One expert a program: sort its token-expert pairs into blocks of ``BLOCK_M`` slots. Each
    counts all experts, to know where its blocks begin; empty slots get ``n_pairs``; pairs of
    experts from ``n_local`` on belong to other ranks and get no slot."""
    expert = tl.program_id(0)
    experts = tl.arange(0, E_PAD)
    counts = tl.zeros([E_PAD], tl.int32)
    for start in range(0, n_pairs, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        who = tl.load(ids + pairs, mask=pairs < n_pairs, other=n_local)
        counts += tl.histogram(tl.minimum(who, n_local), E_PAD)
    blocks = tl.where(experts < n_local, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    own = tl.sum(tl.where(experts == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(n_blocks, tl.sum(blocks, axis=0))
    for block in range(own):
        tl.store(block_expert + first + block, expert)
    filled = 0
    for start in range(0, n_pairs, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        who = tl.load(ids + pairs, mask=pairs < n_pairs, other=n_local)
        hit = (who == expert).to(tl.int32)
        place = first * BLOCK_M + filled + tl.cumsum(hit, axis=0) - 1
        tl.store(slots + place, pairs, mask=hit > 0)
        filled += tl.sum(hit, axis=0)
    rest = filled + tl.arange(0, BLOCK_M)
    tl.store(slots + first * BLOCK_M + rest, n_pairs, mask=rest < own * BLOCK_M)


@triton.jit
def _dot(a, w, acc, UPCAST: tl.constexpr):
    if UPCAST:
        acc += tl.dot(a.to(tl.float32), w.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(a, w, acc)
    return acc


@triton.jit
def _fp8_bits(raw):
    """Widen E4M3 bytes to bfloat16, exactly, without FP8 hardware."""
    bits = raw.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)  # as float32, 2**120 times too small
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.bfloat16)


@triton.jit
def _e2m1(nibble, exponent):
    """Widen E2M1 nibbles times ``2 ** (exponent - 127)`` to bfloat16, exactly."""
    bits = nibble.to(tl.int32)
    bits = ((bits & 8) << 28) | ((bits & 7) << 22)  # as float32, 2**126 times too small
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale).to(tl.bfloat16)


@triton.jit
def _widen(scale, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Repeat each of the scales [BLOCK_K / 32, BLOCK_N] for the 32 columns of its group."""
    wide = tl.broadcast_to(scale[:, None, :], (BLOCK_K // 32, 32, BLOCK_N))
    return tl.reshape(wide, (BLOCK_K, BLOCK_N))


@triton.jit
def _accumulate(
    a_row, a_mask, w, s, rows, row_mask, k0, K, acc,
    DECODE: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_COLUMNS, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add to acc[m, n] what columns k0 .. of the matrix rows ``rows`` contribute.

    ``w`` points at the expert's matrix, K columns wide, ``s`` at its scales. MXFP4 byte j of a
    row holds column j in its low and column j + K / 2 in its high nibble, so that activations are
    read in runs; k0 then counts bytes."""
    k = k0 + tl.arange(0, BLOCK_K)
    if DECODE == 3:
        half = K // 2
        k_mask = k < half
        mask = k_mask[:, None] & row_mask[None, :]
        packed = tl.load(w + rows[None, :] * half + k[:, None], mask=mask, other=0)
        group = k0 // 32 + tl.arange(0, BLOCK_K // 32)
        s_tile = s + rows[None, :] * SCALE_COLUMNS + group[:, None]
        s_mask = (group < half // 32)[:, None] & row_mask[None, :]
        low = _widen(tl.load(s_tile, mask=s_mask, other=0), BLOCK_K, rows.shape[0])
        high = _widen(tl.load(s_tile + half // 32, mask=s_mask, other=0), BLOCK_K, rows.shape[0])
        both = a_mask[:, None] & k_mask[None, :]
        a = tl.load(a_row[:, None] + k[None, :], mask=both, other=0.0)
        acc = _dot(a, _e2m1(packed & 15, low), acc, UPCAST)
        a = tl.load(a_row[:, None] + half + k[None, :], mask=both, other=0.0)
        acc = _dot(a, _e2m1(packed >> 4, high), acc, UPCAST)
    else:
        k_mask = k < K
        a = tl.load(a_row[:, None] + k[None, :], mask=a_mask[:, None] & k_mask[None, :], other=0.0)
        mask = k_mask[:, None] & row_mask[None, :]
        nothing = 0 if DECODE == 2 else 0.0  # neither casts to the other's type
        tile = tl.load(w + rows[None, :] * K + k[:, None], mask=mask, other=nothing)
        if DECODE == 0:
            acc = _dot(a, tile, acc, UPCAST)
        else:
            weight = tile.to(tl.bfloat16) if DECODE == 1 else _fp8_bits(tile)
            blocks = s + (rows // 128) * SCALE_COLUMNS + k0 // 128
            scale = tl.load(blocks, mask=row_mask, other=0.0)
            acc += _dot(a, weight, tl.zeros_like(acc), UPCAST) * scale[None, :]
    return acc


@triton.jit(do_not_specialize=["n_pairs", "max_blocks"])
def expert_kernel(
    a, w, s, out, slots, block_expert, n_blocks, pair_weight,
    n_pairs, max_blocks, N, K, matrix_stride, scale_stride, scale_columns,
    TOP_K: tl.constexpr, GATED: tl.constexpr, DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A block of slots of one expert, times ``BLOCK_N`` rows of its matrix.

    ``GATED``: silu(x W_gate) * (x W_up) of tokens, one row a slot; the matrix holds N gate rows
    and then N up rows. Otherwise: rows of slots times W_down, weighted, one row a pair.
    Blocks of one expert are neighbours in launch order, so they share the weights in the cache."""
    pid = tl.program_id(0)
    block = pid % max_blocks
    if block >= tl.load(n_blocks):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = block * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(slots + slot)
    filled = pair < n_pairs
    rows = (pid // max_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    w += expert * matrix_stride
    s += expert * scale_stride
    columns = K // 2 if DECODE == 3 else K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATED:
        a_row = a + (pair // TOP_K).to(tl.int64) * K
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, columns, BLOCK_K):
            acc = _accumulate(
                a_row, filled, w, s, rows, row_mask, k0, K, acc, DECODE, BLOCK_K, scale_columns,
                UPCAST,
            )  # fmt: skip
            up = _accumulate(
                a_row, filled, w, s, N + rows, row_mask, k0, K, up, DECODE, BLOCK_K,
                scale_columns, UPCAST,
            )  # fmt: skip
        acc = acc * tl.sigmoid(acc) * up
        place = slot.to(tl.int64)
    else:
        a_row = a + slot.to(tl.int64) * K
        for k0 in range(0, columns, BLOCK_K):
            acc = _accumulate(
                a_row, filled, w, s, rows, row_mask, k0, K, acc, DECODE, BLOCK_K, scale_columns,
                UPCAST,
            )  # fmt: skip
        acc *= tl.load(pair_weight + pair, mask=filled, other=0.0)[:, None]
        place = pair.to(tl.int64)
    mask = filled[:, None] & row_mask[None, :]
    tl.store(out + place[:, None] * N + rows[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(
    pairs, ids, out, hidden, n_local, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[token] = sum of the token's pairs with an expert of this rank."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + j)
        mask = (column < hidden) & (tl.zeros_like(column) + expert < n_local)
        row = pairs + (token * TOP_K + j) * hidden
        acc += tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, acc.to(out.dtype.element_ty), mask=column < hidden)


@triton.jit
def add_rms_norm_kernel(x, residual, weight, hidden, eps, BLOCK: tl.constexpr):
    """residual += x; x = rms_norm(residual) * weight. One row a program."""
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    total = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + row + column, total.to(residual.dtype.element_ty), mask=mask)
    norm = total * tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps)
    norm *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row + column, norm.to(x.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    qkv, cache, cos, sin, norm, position, heads, q_heads, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head of one token: norm (optional) and rotary embedding of queries and keys, in place.
    Keys, and values as they are, go to the KV cache ``[token, heads - q_heads, DIM]``."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, HALF)
    mask = column < DIM // 2
    base = qkv + (token * heads + head) * DIM + column
    low = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(base + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    kv_heads = (heads - q_heads) // 2
    if head < q_heads + kv_heads:
        if NORM:
            scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / DIM + eps)
            low *= scale * tl.load(norm + column, mask=mask, other=0.0).to(tl.float32)
            high *= scale * tl.load(norm + DIM // 2 + column, mask=mask, other=0.0).to(tl.float32)
        turn = tl.load(position + token) * (DIM // 2) + column
        c = tl.load(cos + turn, mask=mask, other=0.0)
        s = tl.load(sin + turn, mask=mask, other=0.0)
        low, high = low * c - high * s, high * c + low * s
    if head < q_heads:
        target = base
    else:
        target = cache + (token * 2 * kv_heads + head - q_heads) * DIM + column
    tl.store(target, low.to(qkv.dtype.element_ty), mask=mask)
    tl.store(target + DIM // 2, high.to(qkv.dtype.element_ty), mask=mask)
