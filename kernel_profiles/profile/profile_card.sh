#!/usr/bin/env bash
# A whole profiling session on one H100, H200 or other card, in under 25 minutes:
#   kernel_profiles/profile/profile_card.sh OUT
# Needs: pip install '.[profile]' pytest (and, for KV transfers, pip install nixl; for a second kernel, vllm).
# One folder takes it all, so the GEMM table covers every model. Run it again to go on where it stopped.
set -euo pipefail
out=${1:?usage: profile_card.sh OUT}
root=$(cd "$(dirname "$0")/../.." && pwd)

nvidia-smi 2>/dev/null || rocm-smi 2>/dev/null || true
# 1. The kernels are right on this card before any of them is timed (1 to 2 minutes, compiling).
(cd "$root" && python -m pytest -q -p no:cacheprovider tests/kernel_profiles/test_triton_moe.py)
# 2. Three models that fit on one card, coarse over all kernels first: 14 minutes.
eldr-sim profile --device cuda --out "$out" --resume --budget 14m \
  --model Qwen3-30B-A3B,GPT-OSS-120B,Gemma-4-26B-A4B
# 3. One GPU's part of Qwen3-235B-A22B on four: experts cut (TP4), then whole experts spread (EP4).
eldr-sim profile --device cuda --out "$out" --resume --budget 4m \
  --model Qwen3-235B-A22B --tensor-parallel-size 4
eldr-sim profile --device cuda --out "$out" --resume --budget 3m --plot --only moe \
  --model Qwen3-235B-A22B --tensor-parallel-size 4 --enable-expert-parallel
echo "Fits, effects, bandwidth and every difference over 10% from the shipped tables: $out/profile.json"
