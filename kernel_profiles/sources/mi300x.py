"""MI300X tables, derived from what is published about it: no public tables cover AMD GPUs.

The table of one Qwen3-30B-A3B layer rests on two sources.

- ELDR (Sec. 3.1, Figure 2): on one MI300X at batch 64, going from 16 to 128 distinct experts
  raises the layer's time 4.7 times.
- ROCm/aiter (MIT, e404860): tuned fused-MoE times on MI300X (304 CUs), bf16, 128 experts, top 8,
  hidden 4096, intermediate 384: an expert of the same bytes and FLOPs. Top-k, sort and reduce
  are not in them.

AITER's rows fit ``13.7 + 2.495 d + 0.155 b`` us, 3.78 TB/s. ELDR's ratio ties the fixed time to
the cost of an expert, ``a + 128 e = 4.7 (a + 16 e)``, hence ``a = 14.27 e``: 35.6 us, of which
AITER shows 13.7. More tokens slow the layer in proportion, by what AITER's rows gain with all
experts. At batch 64 this gives 77.6 us for 16 experts and 365 for 128; AITER's kernels alone take
338.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.tables import (
    MOE_DTYPES,
    LatencyTable,
    TableMetadata,
    moe_shape,
    table_name,
)

EXPERT_S = 2.495e-6
"""Reading one expert of 9.437 MB (fit to AITER's rows): 3.78 TB/s."""
FLOOR_S = 14.27 * EXPERT_S
"""The layer's fixed time (ELDR's ratio)."""
TOKEN_S = 0.155e-6
"""One more token with all experts read, up to batch 128 (fit to AITER's rows)."""

AITER_US = {
    1: 34.0571,
    2: 52.6583,
    4: 84.4321,
    8: 147.9434,
    16: 218.2396,
    32: 302.339,
    64: 338.2867,
    128: 351.8764,
    256: 356.6064,
    512: 412.152,
    1024: 525.1645,
    2048: 719.6576,
    4096: 1277.8145,
    8192: 2220.8408,
    16384: 4216.914,
    32768: 7767.4427,
}
"""AITER's tuned fused-MoE microseconds by tokens, MI300X, both stages."""


def layer_s(batch: int, distinct: float) -> float:
    """Seconds of one Qwen3-30B-A3B MoE layer on MI300X."""
    tokens = TOKEN_S * min(batch, 128)
    if batch > 128:
        tokens += float(np.interp(batch, list(AITER_US), list(AITER_US.values()))) * 1e-6
        tokens -= AITER_US[128] * 1e-6
    return (FLOOR_S + EXPERT_S * distinct) * (1 + tokens / (FLOOR_S + EXPERT_S * 128))


def aiter_deviation() -> dict[str, float]:
    """How far above AITER's decode rows (random routing, fewer kernels) the formula lies."""
    batches = [batch for batch in AITER_US if batch <= 128]
    distinct = uniform_distinct(batches, 128, 8)
    above = [
        layer_s(batch, float(d)) / (AITER_US[batch] * 1e-6) - 1
        for batch, d in zip(batches, distinct, strict=True)
    ]
    return {"above_aiter_mean": float(np.mean(above)), "above_aiter_max": float(np.max(above))}


def moe_table() -> LatencyTable:
    """The derived table: AITER's batches on the balanced diagonal, and ELDR's two points."""
    model = load_model("Qwen3-30B-A3B")
    points = [(batch, min(model.n_experts, model.top_k * batch)) for batch in AITER_US]
    points.append((64, 16))
    return LatencyTable(
        TableMetadata(
            kind="moe",
            gpu="MI300X",
            shape=moe_shape(
                model.hidden_size, model.expert_intermediate_size, model.n_experts, model.top_k
            ),
            dtype=MOE_DTYPES[model.expert_dtype],
            kernel_source="AITER fused MoE with ELDR's fixed time",
            framework="derived 1",
            provenance="derived",
            origin=(
                "ELDR Sec. 3.1 (16 to 128 experts: 4.7x at batch 64) and ROCm/aiter e404860 tuned "
                "fused-MoE rows (cu_num 304, bf16, 4096 x 384, E 128, top 8)"
            ),
            device="AMD Instinct MI300X",
            fit_error=aiter_deviation(),
            notes="(a + e * distinct) * (1 + c(batch)); see sources/mi300x.py",
        ),
        {
            "batch": np.array([batch for batch, _ in points], dtype=np.int32),
            "distinct_experts": np.array([float(distinct) for _, distinct in points]),
            "routing": np.array(["derived"] * len(points), dtype=object),
            "latency_s": np.array([layer_s(*point) for point in points]),
        },
    )


def write_tables(out_dir: Path) -> list[Path]:
    """Write the derived MI300X tables to a folder; the names of the files written."""
    table = moe_table()
    path = out_dir / table_name(table.metadata)
    table.save(path)
    return [path]
