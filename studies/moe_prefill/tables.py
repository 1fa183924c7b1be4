"""MoE-Prefill Sec. 4, before any queue: bytes (Table 1), chunks (Figure 3), load (Figure 4).

Bytes that a GPU sends for one layer under each parallel strategy (:func:`layer_bytes`), Table 1:
its formulas are lost in the text of arXiv 2605.02960; these are derived from the operations
that it names, with collectives in rings. N GPUs serve n tokens a step together, of hidden size m at
2 bytes; ``s = 2 m n``, and ``r = (N - 1) / N``:

============  ================================================  ===================================
strategy      operations of one layer                           bytes that a GPU sends
============  ================================================  ===================================
``dp_dp``     none                                              0
``dp_tp``     all-gather and reduce-scatter                     2 r s
``dp_ep``     dispatch and combine of n / N tokens              2 c s / N
``tp_tp``     2 all-reduces                                     4 r s
``tp_ep``     all-reduce; dispatch and combine of n / N tokens  2 r s + 2 c s / N
``pp_pp``     hidden state and residual, once a stage           2 s (N - 1) / L
``sp_tp``     all-gather of keys and values; as ``dp_tp``       r kv n + 2 r s
``sp_ep``     all-gather of keys and values; as ``dp_ep``       r kv n + 2 c s / N
``dp_async``  all-gather of one layer's experts                 r E (bytes of an expert)
============  ================================================  ===================================

c is the number of copies of a token that leave its GPU under uniform routing: ``k r`` where each
expert gets one, and r times the ranks that a token reaches where each rank does (5.34 of 8 with 8
of 128 experts; `kernel_profiles.kernels.all_to_all.uniform_copies`). kv are the bytes of a
token's keys and values. The mean over GPUs and layers is meant: in a pipeline of L layers the last
stage sends nothing and each other one sends once, two tensors, as vLLM does.

``dp_async`` alone sends the same bytes for any number of tokens. With weights and hidden states of
equal width it sends as many as ``dp_ep`` at ``3 E m_e / (2 k)`` tokens a GPU, m_e being the width
of an expert; below, it sends more, and hides them."""

from itertools import product
from typing import Literal, get_args

import numpy as np

from eldr_sim.charts import lines
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.all_to_all import uniform_copies
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import Backend
from eldr_sim.planning.search.prefill import BACKENDS, BUDGETS
from eldr_sim.planning.studies.figures import Claim, Reproduction, row_of
from eldr_sim.traces.routing.bitsets import count_rows
from eldr_sim.traces.routing.format import open_trace
from studies.moe_prefill.settings import CELLS
from studies.moe_prefill.steps import Strategy, rate

Layout = Literal["dp_dp", "dp_tp", "dp_ep", "tp_tp", "tp_ep", "pp_pp", "sp_tp", "sp_ep", "dp_async"]
"""Parallelism of attention, then of the experts; in the order of the table."""

STRATEGIES: tuple[Layout, ...] = get_args(Layout)

_VALUE_BYTES = 2  # of hidden states: bfloat16
_TO_EXPERTS: Backend = "pplx"  # a copy for each expert
_TO_RANKS: Backend = "nccl_alltoall"  # a copy for each rank


def layer_bytes(
    strategy: Layout, model: ModelDims, n_gpus: int, tokens: float, *, copy_per_rank: bool = False
) -> float:
    """Return the bytes that a GPU sends for one layer with experts, the mean over GPUs and layers.
    Raises InputError if the GPUs do not divide the experts. ``tokens``: of a step, of all GPUs of a
    node; ``copy_per_rank``: once to each rank with experts of a token, not once for each of
    these."""
    if strategy not in STRATEGIES:
        raise InputError("strategy", f"{strategy!r}", ", ".join(STRATEGIES))
    if n_gpus < 1 or model.n_experts % n_gpus:
        problem = f"{n_gpus} GPUs for {model.n_experts} experts"
        raise InputError("n_gpus", problem, "a divisor of the experts")
    ring = (n_gpus - 1) / n_gpus
    if strategy == "dp_async":
        return ring * model.n_experts * model.bytes_per_expert
    hidden = _VALUE_BYTES * model.hidden_size * tokens
    if strategy == "pp_pp":
        return 2 * hidden * (n_gpus - 1) / model.n_layers
    attention, _, experts = strategy.partition("_")
    total = 0.0
    if attention == "tp":
        total += 2 * ring * hidden
    elif attention == "sp":
        total += ring * tokens * model.kv_bytes_per_token_layer()
    if experts == "tp":  # an all-reduce is a reduce-scatter and an all-gather
        total += 2 * ring * hidden
    elif experts == "ep":
        backend = _TO_RANKS if copy_per_rank else _TO_EXPERTS
        copies, _ = uniform_copies(backend, model.n_experts, model.top_k, n_gpus, n_gpus)
        total += 2 * copies * hidden / n_gpus
    return total


def break_even_tokens(model: ModelDims, n_gpus: int, *, copy_per_rank: bool = False) -> float:
    """Return the tokens of a GPU at which ``dp_async`` sends as many bytes as ``dp_ep``. Raises
    InputError as :func:`layer_bytes`, or if there is one GPU, which sends nothing."""
    if n_gpus < 2:
        raise InputError("n_gpus", f"{n_gpus}", "2 or more")
    own = layer_bytes("dp_ep", model, n_gpus, n_gpus, copy_per_rank=copy_per_rank)
    return layer_bytes("dp_async", model, n_gpus, 0) / own


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
