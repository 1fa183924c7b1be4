"""The Triton kernels in Triton's interpreter against a float64 reference; on a GPU where one is."""

import os
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.profile.dense import EPSILON
from eldr_sim.kernel_profiles.profile.grid import MoEPoint, forced_logits, forced_routing
from eldr_sim.kernel_profiles.profile.moe import ERROR_BOUND
from eldr_sim.kernel_profiles.profile.weights import (
    ExpertWeights,
    MoEShape,
    random_matrices,
    reference_moe,
)

if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
missing = "the profile extra is not installed"
torch = pytest.importorskip("torch", reason=missing)
pytest.importorskip("triton", reason=missing)
triton_kernels = pytest.importorskip("eldr_sim.kernel_profiles.profile.triton_kernels")
triton_moe = pytest.importorskip("eldr_sim.kernel_profiles.profile.triton_moe")
Tile, TritonMoE = triton_moe.Tile, triton_moe.TritonMoE

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TILE = Tile(16, 32, 64, 4, 3)

# (shape, batch, distinct experts, skew): odd in one thing each.
BFLOAT16 = {
    "one token": (MoEShape(64, 32, 12, 3), 1, 3, 0.0),
    "one expert of all": (MoEShape(64, 48, 6, 1), 19, 1, 0.0),
    "a layer of one expert": (MoEShape(48, 32, 1, 1), 5, 1, 0.0),
    "all experts": (MoEShape(64, 32, 12, 3), 4, 12, 0.0),
    "empty experts, skewed, several blocks": (MoEShape(64, 32, 12, 3), 50, 5, 1.2),
    "sizes that are no powers of two": (MoEShape(100, 72, 7, 3), 6, 5, 0.0),
    "more columns than a tile": (MoEShape(200, 136, 5, 2), 3, 4, 0.0),
    "one rank of two": (MoEShape(64, 32, 12, 3, 2), 17, 5, 0.0),
}
QUANTIZED = {
    "one token": (128, 64, 8, 2, 1, 2),
    "sizes that are no powers of two": (192, 320, 5, 2, 3, 4),
}


def draw(shape, batch, distinct, skew, seed=0):
    rng = np.random.default_rng([seed, batch, distinct])
    point = MoEPoint(batch, distinct, skew)
    ids = forced_routing(point, shape.n_experts, shape.top_k, rng, n_ranks=shape.n_ranks)
    logits = torch.from_numpy(forced_logits(ids, shape.n_experts, rng)).to(DEVICE)
    values = rng.standard_normal((batch, shape.hidden), dtype=np.float32)
    x = torch.from_numpy(values).to(DEVICE, torch.bfloat16)
    return ids, logits, x, ExpertWeights.random(shape, DEVICE, seed)


def error_of(shape, batch, distinct, skew=0.0, tile=TILE):
    """Relative error after every buffer was spoiled, and the ids that were forced and found."""
    ids, logits, x, weights = draw(shape, batch, distinct, skew)
    layer = TritonMoE(shape, batch, DEVICE, tile, tile)
    layer.poison()
    out = layer(x, logits, weights).double()
    expected = reference_moe(x, logits, weights, shape)
    assert out.shape == expected.shape
    return float((out - expected).norm() / expected.norm()), ids, layer


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_layers_agree_with_float64(name):
    shape, batch, distinct, skew = BFLOAT16[name]
    error, ids, layer = error_of(shape, batch, distinct, skew)
    assert error < ERROR_BOUND["bfloat16"]
    found = layer.ids.cpu().numpy()
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(ids, axis=1))


@pytest.mark.parametrize("dtype", ["fp8_block", "mxfp4"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_layers_agree_with_float64(name, dtype):
    hidden, intermediate, experts, top_k, batch, distinct = QUANTIZED[name]
    shape = MoEShape(hidden, intermediate, experts, top_k, 1, dtype)
    error, _, _ = error_of(shape, batch, distinct)
    assert error < ERROR_BOUND[dtype]


def test_a_wrong_weight_is_seen():
    shape = MoEShape(64, 32, 4, 2)
    _, logits, x, weights = draw(shape, 3, 4, 0.0)
    layer = TritonMoE(shape, 3, DEVICE, TILE, TILE)
    expected = reference_moe(x, logits, weights, shape)
    weights.down.stored[1, 5] += 1.0
    error = float((layer(x, logits, weights).double() - expected).norm() / expected.norm())
    assert error > ERROR_BOUND["bfloat16"]


@pytest.mark.parametrize("tile", [triton_moe.DECODE_TILES[2], triton_moe.PREFILL_TILES[0]])
def test_other_tiles_give_the_same(tile):
    error, _, _ = error_of(MoEShape(96, 64, 4, 2), 40, 4, tile=tile)
    assert error < ERROR_BOUND["bfloat16"]


def test_every_pair_is_sorted_into_one_slot_of_its_expert():
    shape = MoEShape(16, 16, 9, 4, 3)
    _, logits, _, _ = draw(shape, 70, 3, 0.6)
    layer = TritonMoE(shape, 70, DEVICE, TILE, TILE)
    layer.poison()
    layer.route(logits)
    n_blocks = int(layer.n_blocks)
    slots = layer.slots.cpu().numpy()[: 16 * n_blocks]
    experts = np.repeat(layer.block_expert.cpu().numpy()[:n_blocks], 16)
    ids = layer.ids.cpu().numpy().ravel()
    filled = slots < layer.n_pairs
    assert (slots[~filled] == layer.n_pairs).all()
    assert sorted(slots[filled]) == np.flatnonzero(ids < shape.owned).tolist()
    np.testing.assert_array_equal(ids[slots[filled]], experts[filled])
    assert n_blocks <= layer.max_blocks


def test_pair_weights_are_the_softmax_of_the_chosen_logits():
    shape = MoEShape(16, 16, 10, 3)
    _, logits, _, _ = draw(shape, 5, 8, 0.0)
    layer = TritonMoE(shape, 5, DEVICE, TILE, TILE)
    layer.route(logits)
    best, ids = logits.topk(3, dim=1)
    assert torch.equal(layer.ids.long(), ids)
    torch.testing.assert_close(layer.pair_weight, best.softmax(dim=1))


def test_every_e4m3_byte_but_nan_widens_exactly():
    shape = MoEShape(128, 128, 1, 1, 1, "fp8_block")
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    matrices = random_matrices(1, 128, 128, "fp8_block", DEVICE, generator)
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    matrices.stored[0] = (
        torch.tensor(codes + codes[:2], dtype=torch.uint8).repeat(64).view(128, 128)
    )
    matrices.scales.fill_(1.0)
    layer = TritonMoE(shape, 1, DEVICE, Tile(16, 32, 128, 4, 2), Tile(16, 32, 128, 4, 2))
    layer._native_fp8 = False
    _, logits, _, _ = draw(MoEShape(128, 128, 1, 1), 1, 1, 0.0)
    layer.route(logits)
    layer.activated.zero_()
    layer.activated[:, 3] = 1.0  # picks column 3
    layer.experts_down(ExpertWeights(matrices, matrices))
    expected = matrices.dequantized(0)[:, 3]
    torch.testing.assert_close(layer.pairs[0].double(), expected, rtol=0, atol=0)


def test_mxfp4_needs_whole_groups_in_both_halves():
    with pytest.raises(InputError, match="96 columns"):
        ExpertWeights.random(MoEShape(96, 64, 2, 1, 1, "mxfp4"), DEVICE, 0)


def test_residual_norm_agrees_with_float64():
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(3, 100, generator=generator).bfloat16().to(DEVICE) for _ in "ab")
    weight = torch.randn(100, generator=generator).bfloat16().to(DEVICE)
    total = x.double() + residual.double()
    expected = total * (total.pow(2).mean(1, keepdim=True) + EPSILON).rsqrt() * weight.double()
    triton_kernels.add_rms_norm_kernel[(3,)](x, residual, weight, 100, EPSILON, BLOCK=128)
    torch.testing.assert_close(x.double(), expected, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(residual.double(), total, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("norm", [False, True])
def test_rotary_turns_queries_and_keys_and_stores_keys_and_values(norm):
    tokens, q_heads, kv_heads, dim = 2, 4, 2, 16
    heads = q_heads + 2 * kv_heads
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(tokens, heads, dim, generator=generator).bfloat16().to(DEVICE)
    weight = torch.randn(dim, generator=generator).bfloat16().to(DEVICE)
    angle = torch.rand(50, dim // 2, generator=generator).to(DEVICE)
    position = torch.tensor([7, 31], device=DEVICE)
    cache = torch.full((tokens, 2 * kv_heads, dim), float("nan")).bfloat16().to(DEVICE)
    turned = qkv[:, : q_heads + kv_heads].double()
    if norm:
        turned = turned * (turned.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()
    pair = torch.complex(*turned.chunk(2, dim=-1))
    pair = pair * torch.exp(1j * angle[position].double())[:, None]
    expected = torch.cat([pair.real, pair.imag], dim=-1)
    values = qkv[:, q_heads + kv_heads :].clone()
    triton_kernels.rotary_kernel[(tokens, heads)](
        qkv, cache, angle.cos(), angle.sin(), weight, position, heads, q_heads, EPSILON,
        DIM=dim, HALF=dim // 2, NORM=norm,
    )  # fmt: skip
    close = {"rtol": 2**-6, "atol": 2e-2}
    torch.testing.assert_close(qkv[:, :q_heads].double(), expected[:, :q_heads], **close)
    torch.testing.assert_close(cache[:, :kv_heads].double(), expected[:, q_heads:], **close)
    torch.testing.assert_close(cache[:, kv_heads:], values)
