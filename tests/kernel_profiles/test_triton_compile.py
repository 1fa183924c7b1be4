"""The Triton kernels compile for an H100 (to a cubin) and an MI300X (to a code object).

Triton's compilers need no GPU. What this cannot say is whether the code is right on the card or
fast: the first is `test_triton_moe.py` on a card, the second `eldr-sim profile`.
"""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="the profile extra is not installed")

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from eldr_sim.kernel_profiles.profile import triton_kernels as kernels
from eldr_sim.kernel_profiles.profile import triton_moe

target = GPUTarget("cuda", 90, 32) if sys.argv[1] == "H100" else GPUTarget("hip", "gfx942", 64)
B, F, I = "*bf16", "*fp32", "*i32"

def build(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    odd = ("n_pairs", "max_blocks", "batch", "scale_columns", "eps")
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
            if n not in constants and n not in odd}
    values = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(kernel, signature, values, even)
    made = triton.compile(source, target=target, options=options)
    print(json.dumps([kernel.__name__, constants, made.metadata.shared, list(made.asm)]))

def expert(decode, gated, tile):
    stored = {0: B, 1: "*fp8e4nv", 2: "*u8", 3: "*u8"}[decode]
    scales = {0: B, 3: "*u8"}.get(decode, F)
    types = dict(a=B, w=stored, s=scales, out=B, slots=I, block_expert=I, n_blocks=I, pair_weight=F)
    constants = dict(TOP_K=8, GATED=gated, DECODE=decode, BLOCK_M=tile.block_m,
                     BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, UPCAST=False)
    stages = tile.stages if sys.argv[1] == "H100" else min(tile.stages, 2)
    build(kernels.expert_kernel, types, constants, num_warps=tile.warps, num_stages=stages)

first = triton_moe.DECODE_TILES[2]
for decode in (0, 1, 2, 3) if sys.argv[1] == "H100" else (0, 2, 3):
    expert(decode, True, first)
expert(0, False, first)
if sys.argv[1] == "H100":
    for tile in (*triton_moe.DECODE_TILES, *triton_moe.PREFILL_TILES):
        expert(0, True, tile)
build(kernels.top_k_kernel, dict(logits=F, ids=I, weights=F), dict(TOP_K=8, K_PAD=8, E_PAD=128))
build(kernels.align_kernel, dict(ids=I, slots=I, block_expert=I, n_blocks=I),
      dict(BLOCK_M=16, E_PAD=256, CHUNK=1024))
build(kernels.sum_kernel, dict(pairs=B, ids=I, out=B), dict(TOP_K=8, BLOCK=1024))
build(kernels.add_rms_norm_kernel, dict(x=B, residual=B, weight=B, eps="fp32"), dict(BLOCK=2048))
types = dict(qkv=B, cache=B, cos=F, sin=F, norm=B, position="*i64", eps="fp32")
build(kernels.rotary_kernel, types, dict(DIM=128, HALF=64, NORM=True))
"""


@pytest.mark.parametrize(
    ("card", "binary", "shared"), [("H100", "cubin", 227 << 10), ("MI300X", "hsaco", 64 << 10)]
)
def test_every_kernel_compiles_and_fits_into_shared_memory(card, binary, shared, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, card],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({name for name, *_ in made}) == 7
    for name, constants, size, stages in made:
        assert binary in stages
        assert size <= shared, (name, constants)
