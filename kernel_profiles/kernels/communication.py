"""Bytes that a GPU sends for one layer under each parallel strategy: MoE-Prefill's Table 1.

The table's formulas are lost in the text of arXiv 2605.02960; these are derived from the operations
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
of an expert; below, it sends more, and hides them.
"""

from typing import Literal, get_args

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.all_to_all import uniform_copies
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Backend

Strategy = Literal[
    "dp_dp", "dp_tp", "dp_ep", "tp_tp", "tp_ep", "pp_pp", "sp_tp", "sp_ep", "dp_async"
]
"""Parallelism of attention, then of the experts; in the order of the table."""

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_VALUE_BYTES = 2  # of hidden states: bfloat16
_TO_EXPERTS: Backend = "pplx"  # a copy for each expert
_TO_RANKS: Backend = "nccl_alltoall"  # a copy for each rank


def layer_bytes(
    strategy: Strategy, model: ModelDims, n_gpus: int, tokens: float, *, copy_per_rank: bool = False
) -> float:
    """Return the bytes that a GPU sends for one layer, the mean over GPUs and layers.

    Raises InputError if there is no such strategy, or the GPUs do not divide the experts.

    ``strategy``: one of :data:`STRATEGIES`; ``n_gpus``: of one node; ``tokens``: of a step, of all
    GPUs together; ``copy_per_rank``: whether a token goes once to each rank that holds any of its
    experts, and not once for each of these. Layers with experts are meant.
    """
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
