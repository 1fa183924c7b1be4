"""MoE-Prefill Sec. 4, before any queue: bytes (Table 1), chunks (Figure 3), load (Figure 4)."""

from itertools import product

import numpy as np

from eldr_sim.charts import lines
from eldr_sim.kernel_profiles.kernels.communication import (
    STRATEGIES,
    break_even_tokens,
    layer_bytes,
)
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.search.prefill import BACKENDS, BUDGETS
from eldr_sim.traces.routing.bitsets import count_rows
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.validation.reproduce.moe_prefill.settings import CELLS
from eldr_sim.validation.reproduce.moe_prefill.steps import Strategy, rate
from eldr_sim.validation.reproduce.reproduction import Claim, Reproduction, row_of

_MODELS = {"BF16": "Qwen3-235B-A22B", "FP8": "Qwen3-235B-A22B-FP8"}
_TOKENS = (2048, 8192, 16_384, 36_864, 65_536)
_CONTEXTS = (512, 2048, 8192, 32_768)
_RECORDED = "qwen3-30b-a3b"


def table_1() -> Reproduction:
    """Bytes that a GPU sends for a layer, by strategy and tokens."""
    rows = [
        {
            "strategy": strategy,
            "precision": precision,
            "gpus": n_gpus,
            "tokens_a_gpu": tokens,
            "MB": layer_bytes(strategy, load_model(model), n_gpus, n_gpus * tokens) / 1e6,
            "MB_copy_per_rank": layer_bytes(
                strategy, load_model(model), n_gpus, n_gpus * tokens, copy_per_rank=True
            ) / 1e6,
        }
        for precision, model in _MODELS.items()
        for strategy in STRATEGIES
        for n_gpus in (4, 8)
        for tokens in _TOKENS
    ]  # fmt: skip

    def sent(strategy: str, tokens: int) -> float:
        which = {"strategy": strategy, "precision": "BF16", "gpus": 8, "tokens_a_gpu": tokens}
        return float(row_of(rows, **which)["MB"])

    even = {
        (precision, once): break_even_tokens(load_model(model), 8, copy_per_rank=once)
        for precision, model in _MODELS.items() for once in (False, True)
    }  # fmt: skip
    said = (
        f"as many at {even['BF16', False]:,.0f} tokens a GPU (BF16; FP8 {even['FP8', False]:,.0f};"
        f" one copy a rank {even['BF16', True]:,.0f} and {even['FP8', True]:,.0f}): below, AsyncEP "
        "sends more, and wins by hiding"
    )
    dispatch = sent("dp_ep", 8192)
    claims = [
        Claim("bytes of AsyncEP (Low) over DP+EP (High), BF16, 8,192 tokens a GPU", 0, 1,
              sent("dp_async", 8192) / dispatch, "x", 0.0, said, stated=False),
        Claim("bytes of DP+EP (High) over DP+TP (Medium), more than", 1.01, 8,
              dispatch / sent("dp_tp", 8192), "x", 0.0,
              "k (N - 1) / N copies of n / N tokens are as many as N - 1 of N shards for k = N",
              stated=False),
        Claim("bytes of TP+EP (High) over TP+TP (Medium), more than", 1.01, 8,
              sent("tp_ep", 8192) / sent("tp_tp", 8192), "x", 0.0, "likewise", stated=False),
        Claim("bytes of PP+PP (Medium) over DP+EP (High)", 0, 1,
              sent("pp_pp", 8192) / dispatch, "x", 0.0, stated=False),
    ]  # fmt: skip

    shown = [row for row in rows if row["gpus"] == 8 and row["strategy"] != STRATEGIES[0]]
    log = {"xscale": "log", "yscale": "log"}
    draw = lines(shown, "tokens_a_gpu", "MB", "strategy", "precision", **log)
    title = "bytes that a GPU sends for a layer, Qwen3-235B-A22B"
    return Reproduction("table_1", title, rows, claims, draw)


def figure_3() -> Reproduction:
    """MFU by tokens of a step and context, for each strategy on 8 GPUs in closed form."""
    strategies = [Strategy("async_ep"), *(Strategy("dp_ep", backend) for backend in BACKENDS),
                  Strategy("tp_ep"), Strategy("pp")]  # fmt: skip
    rows = []
    for cell, strategy, context, budget in product(CELLS, strategies, _CONTEXTS, BUDGETS):
        made = rate(strategy, cell.model, cell.gpu, 8, budget, context)
        rows.append(
            {"cell": cell.name, "strategy": strategy.label, "context": context, "budget": budget}
            | {"mfu_%": 100 * made.mfu, "tokens_per_s": made.tokens_per_s}
        )

    def share(cell: str, strategy: str, context: int, budget: int) -> float:
        which = {"cell": cell, "strategy": strategy, "context": context, "budget": budget}
        return float(row_of(rows, **which)["mfu_%"])

    claims = []
    for cell in CELLS:
        small, large = (share(cell.name, "PP+PP", 512, b) for b in (2048, 16_384))
        hidden = [share(cell.name, "AsyncEP", 512, b) for b in (2048, 8192, 16_384)]
        claims.append(
            Claim(f"{cell.name}: MFU of chunks of 2K over 16K tokens, experts in place (PP+PP)",
                  0, 1, small / large, "x", 0.0,
                  f"{small:.1f} and {large:.1f}%; AsyncEP at 2K, 8K, 16K: "
                  f"{', '.join(f'{h:.1f}' for h in hidden)}%", stated=False)
        )  # fmt: skip
    longer = [share(cell.name, "PP+PP", 32_768, 16_384) / share(cell.name, "PP+PP", 512, 16_384)
              for cell in CELLS]  # fmt: skip
    claims.append(
        Claim("longer contexts raise MFU: 32K over 512 tokens, least of the cells", 1, 2,
              min(longer), "x", 0.0, ", ".join(f"{v:.2f}" for v in longer), stated=False)
    )  # fmt: skip

    shown = [row for row in rows if row["context"] == 512]
    draw = lines(shown, "budget", "mfu_%", "strategy", "cell", xscale="log")
    title = "MFU by tokens of a step, 8 GPUs in closed form"
    return Reproduction("figure_3", title, rows, claims, draw)


def figure_4() -> Reproduction:
    """Load of the experts of Qwen3-30B-A3B, recorded, over all layers and in each."""
    trace = open_trace(_RECORDED)
    counts = count_rows(trace.bits, trace.n_experts).astype(np.int64)
    total = counts.sum(axis=0)
    over_mean = counts.max(axis=1) / counts.mean(axis=1)
    idle = (counts == 0).sum(axis=1)
    least = np.where(counts.min(axis=1) > 0, counts.max(axis=1) / np.maximum(counts.min(axis=1), 1),
                     np.inf)  # fmt: skip
    rows = [
        {"layer": layer, "max_over_mean": float(over_mean[layer]), "idle_experts": int(idle[layer]),
         "max_over_min": float(least[layer]) if np.isfinite(least[layer]) else None}
        for layer in range(len(counts))
    ]  # fmt: skip
    ranks = counts.reshape(len(counts), 8, -1).sum(axis=2)
    straggler = ranks.max(axis=1) / ranks.mean(axis=1)
    claims = [
        Claim("all 48 layers together: most over fewest tokens of an expert", 1, 10,
              float(total.max() / total.min()), "x", 0.0,
              "the paper's ratio is lost in its text; 4,010 recorded prompt and output tokens",
              stated=False, neutral=None),
        Claim("single layers are more skewed: median of most over mean, against all layers'", 1, 10,
              float(np.median(over_mean) / (total.max() / total.mean())), "x", 0.0,
              stated=False),
        Claim("the heaviest of 8 GPUs over the mean, experts in order: mean of the layers", 1, 8,
              float(straggler.mean()), "x", 0.0,
              f"most {straggler.max():.2f}; {int((idle > 0).sum())} layers have idle experts",
              stated=False, neutral=None),
    ]  # fmt: skip

    draw = lines(rows, "layer", "max_over_mean")
    return Reproduction("figure_4", "load of Qwen3-30B-A3B's experts, recorded", rows, claims, draw)
