"""Step times of one worker that serves one model: the sum of its kernels.

A decode step costs::

    fixed_s[batch] + attention_s[batch, context] + sum over MoE layers of moe_s[batch, distinct]

A worker of several GPUs (:mod:`~eldr_sim.kernel_profiles.parallel`) takes the time of one of them,
which computes its part of every layer, plus collectives: two all-reduces a layer (after attention
and after the MLP or experts), one after the sharded embedding, and an all-gather of the logits.
Under expert parallelism ``distinct`` counts the experts of the layer's busiest GPU: the others
wait for it in the all-reduce.

Everything that does not depend on what the step's tokens are is tabulated once, so that a
simulator's inner loop only looks up and adds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, Parallelism
from eldr_sim.kernel_profiles.parts import Parts
from eldr_sim.kernel_profiles.tables import LatencyTable, Provenance, weakest

FloatArray = NDArray[np.float64]


class StepCost(NamedTuple):
    """The tables of a step's time, as compiled code takes them; all times are seconds.

    See :mod:`~eldr_sim.kernel_profiles.step_cost` for the formula.
    """

    n_moe_layers: int
    n_experts: int  #: of a layer, on all ranks
    moe_s: FloatArray  #: ``[sequences + 1, experts + 1]`` one MoE layer of a decode step
    mixed_moe_s: FloatArray  #: ``[tokens + 1, experts + 1]`` where contexts are computed, too
    uniform_moe_s: FloatArray  #: ``[tokens + 1]`` likewise, under uniform routing
    dense_s: FloatArray  #: ``[tokens + 1]`` all layers but experts and attention, embedding
    collectives_s: FloatArray  #: ``[tokens + 1]``
    host_s: float
    head_s: FloatArray  #: ``[sequences + 1]`` lm_head
    attention_s: FloatArray  #: ``[sequences + 1, knots]`` of all layers, decode, by mean context
    context_stride: int  #: tokens between two knots
    prompt_alone_s: FloatArray  #: ``[context + 1]`` of all layers, a prompt by its length
    prompt_share_s: FloatArray  #: ``[context + 1]`` likewise, beside others
    prompt_floor_s: float
    prompt_token_s: float  #: of reading one cached token


@dataclass(frozen=True, eq=False)
class StepTimeModel:
    """Step times of one worker serving one model.

    Attributes
    ----------
    model, gpu, parallelism
        What serves where, and on how many GPUs.
    max_num_seqs, max_model_len
        Extent of the tables: sequences in a decode step, tokens of one sequence.
    moe_s
        float64 [max_num_seqs + 1, n_experts / ranks + 1]: seconds of ONE MoE layer by batch and
        distinct experts of the busiest expert-parallel rank (of all experts where there is one
        rank), non-decreasing in the latter. Row 0 and column 0 are zero.
    fixed_s
        float64 [max_num_seqs + 1]: seconds of a decode step but MoE experts and attention: GEMMs
        of all layers, gates, shared experts, dense layers, norms, embedding, lm_head, collectives,
        host gap.
        ``fixed_s[0]`` is zero.
    attention_s
        float64 [max_num_seqs + 1, knots]: seconds of all layers' attention in a decode step at
        mean context ``knot * context_stride``; linear in between.
    context_stride
        Tokens between the knots of ``attention_s``.
    mixed_moe_s
        float64 [max_num_batched_tokens + 1, n_experts / ranks + 1]: as ``moe_s``, by the tokens of
        a step that holds prompts too; one row of zeros unless asked for.
    n_moe_layers, n_experts
        Of the model.
    moe_batch_max, attention_batch_max, context_max
        Largest measured points; beyond them the tables extrapolate.
    attention_tokens_max
        Largest measured batch * context of attention.
    host_gap_s
        Engine time per step, contained in ``fixed_s``.
    provenance
        By component (moe, attention, gemm, norms, host_gap, and collectives between several
        GPUs; engine_step in the place of the last four): label, origin, kernel_source, and the
        fit errors of the MoE layer and of engine steps.
    warnings
        What a reader of results must know, one line each.
    """

    model: ModelDims
    gpu: GPU
    parallelism: Parallelism
    max_num_seqs: int
    max_model_len: int
    moe_s: FloatArray
    mixed_moe_s: FloatArray
    fixed_s: FloatArray
    attention_s: FloatArray
    context_stride: int
    n_moe_layers: int
    n_experts: int
    moe_batch_max: int
    attention_batch_max: int
    context_max: int
    attention_tokens_max: int
    host_gap_s: float
    provenance: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]
    cost: StepCost = field(repr=False)
    _prefill_base_s: array[float] = field(repr=False)
    _prefill_head_s: array[float] = field(repr=False)
    _mixed_base_s: array[float] = field(repr=False)
    _attention_alone_s: array[float] = field(repr=False)
    _attention_share_s: array[float] = field(repr=False)
    _attention_floor_s: float = field(repr=False)
    _attention_token_s: float = field(repr=False)

    @property
    def label(self) -> Provenance:
        """The weakest provenance of any component."""
        return weakest(component["label"] for component in self.provenance.values())

    def decode_s(self, distinct: Sequence[float], batch: int, mean_context: float) -> float:
        """Seconds of one decode step.

        Parameters
        ----------
        distinct
            Distinct experts of each MoE layer, on its busiest rank; fractions are interpolated.
        batch
            Sequences in the step, at most ``max_num_seqs``.
        mean_context
            Mean tokens that a sequence attends to, its new token included.
        """
        if not 0 <= batch <= self.max_num_seqs:
            raise InputError("batch", f"{batch}", f"0 to {self.max_num_seqs}")
        if len(distinct) != self.n_moe_layers:
            raise InputError("distinct", f"{len(distinct)} layers", str(self.n_moe_layers))
        knots = np.arange(self.attention_s.shape[1]) * self.context_stride
        attention = np.interp(mean_context, knots, self.attention_s[batch])
        moe = np.interp(distinct, np.arange(self.moe_s.shape[1]), self.moe_s[batch]).sum()
        return float(self.fixed_s[batch] + attention + moe)

    def prefill_s(
        self, tokens: Sequence[int], contexts: Sequence[int], moe_s: float | None = None
    ) -> float:
        """Seconds of one prefill step.

        Request i computes ``tokens[i]`` new tokens after ``contexts[i]`` tokens that are cached.
        Attention pays for the pairs under the causal mask, which for a chunk is the cost of the
        whole prompt less the cost of its cached part; but no less than reading the cached KV, and
        no less than the slowest request alone. Every request pays for a row of lm_head. A decode
        beside the prefill is a request with one new token.

        Parameters
        ----------
        tokens
            New tokens of each request, at least 1 each.
        contexts
            Cached tokens of each request; ``tokens[i] + contexts[i] <= max_model_len``.
        moe_s
            Seconds of the step's MoE layers, where their experts are known; None expects uniform
            routing.
        """
        if not tokens:
            return 0.0
        rows = len(tokens)
        if moe_s is None:
            base = _prolonged(self._prefill_base_s, sum(tokens))
        else:
            base = _prolonged(self._mixed_base_s, sum(tokens)) + moe_s
        head_s = self._prefill_head_s
        last = len(head_s) - 1
        head = head_s[rows] if rows <= last else head_s[last] * (rows / last)
        return base + head + self.prompt_attention_s(tokens, contexts)

    def mixed_extra_s(self, batch: int, tokens: Sequence[int], contexts: Sequence[int]) -> float:
        """Seconds that chunks of prompts add to a decode step, but for its MoE layers.

        The layers' GEMMs, norms and collectives take the step's tokens together; decode attention
        and that of the chunks follow each other. With the MoE layers of all tokens
        (``mixed_moe_s``), decode attention and ``fixed_s[batch]`` this makes the step.

        Parameters
        ----------
        batch
            Tokens that decode in the step.
        tokens, contexts
            Of each chunk the new tokens, at least 1, and those cached before; with the batch at
            most ``max_num_batched_tokens``.
        """
        base = _prolonged(self._mixed_base_s, batch + sum(tokens))
        head = self._prefill_head_s[min(batch + 1, self.max_num_seqs)]
        chunks = self.prompt_attention_s(tokens, contexts)
        return max(0.0, base + head + chunks - float(self.fixed_s[batch]))

    def prompt_attention_s(self, tokens: Sequence[int], contexts: Sequence[int]) -> float:
        """Seconds of all layers' attention over chunks of prompts, see :meth:`prefill_s`."""
        alone_s, share_s = self._attention_alone_s, self._attention_share_s
        floor_s, token_s = self._attention_floor_s, self._attention_token_s
        longest = together = floor_s
        for new, cached in zip(tokens, contexts, strict=True):
            end = new + cached
            read = token_s * end
            cost = share_s[end] - share_s[cached]
            together += cost if cost > read else read
            alone = floor_s + alone_s[end] - alone_s[cached]
            if alone > longest:
                longest = alone
        return together if together > longest else longest


def _prolonged(curve: array[float], x: int) -> float:
    """Return ``curve[x]``; beyond its end it goes on with the slope of its upper half."""
    last = len(curve) - 1
    if x <= last:
        return curve[x]
    half = last // 2
    return curve[last] + (x - last) * (curve[last] - curve[half]) / (last - half)


def build_step_time_model(
    model: ModelDims | str,
    gpu: GPU | str,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int = 16384,
    parallelism: Parallelism = SINGLE_GPU,
    host_gap_s: float | None = None,
    kernel_source: str | None = None,
    tables: Sequence[LatencyTable] = (),
) -> StepTimeModel:
    """Tabulate the step times of one worker that serves one model.

    Parameters
    ----------
    model, gpu
        Dimensions, or names for :func:`load_model` and :func:`load_gpu`.
    max_num_seqs
        Most sequences in one decode step.
    max_model_len
        Most tokens of one sequence, prompt and output.
    max_num_batched_tokens
        Prefill steps up to this many tokens are tabulated; larger ones go on with the slope of
        the upper half.
    parallelism
        GPUs of the worker, and how the model is spread over them.
    host_gap_s
        Engine time per step in seconds; None takes
        :data:`~eldr_sim.kernel_profiles.parts.HOST_GAP_S`.
    kernel_source
        Use only MoE tables of this kernel; None takes the newest.
    tables
        Tables of the user's own; they take precedence over the shipped ones. One of kind
        ``engine_step`` stands for GEMMs, norms, collectives, lm_head and host gap together.

    Raises
    ------
    InputError
        Unknown names, sizes out of range, a model that cannot be spread so, or no MoE table of
        the kernel asked for.
    """
    dims = load_model(model) if isinstance(model, str) else model
    device = load_gpu(gpu) if isinstance(gpu, str) else gpu
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_model_len", max_model_len),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise InputError(name, f"{value}", "1 or more")
    if host_gap_s is not None and not (np.isfinite(host_gap_s) and host_gap_s >= 0):
        raise InputError("host_gap_s", f"{host_gap_s!r}", "0 or more seconds")

    parts = Parts(dims, device, parallelism, tables, max_model_len, kernel_source)
    gap = parts.host_gap_s(host_gap_s)
    rows = np.arange(max_num_seqs + 1.0)
    head = parts.sequence_part_s(rows)
    fixed = parts.token_part_s(rows, gap) + head
    fixed[0] = 0.0
    stride = 16
    while stride * 512 < max_model_len:
        stride *= 2
    context = stride * np.arange(-(-max_model_len // stride) + 1, dtype=np.float64)
    layers = np.array([float(count) for count, _, _ in parts.attention])
    decode = np.stack([part.time_s(rows, context) for _, part, _ in parts.attention])
    alone = np.stack([part.alone_s for _, _, part in parts.attention])
    share = np.stack([part.share_s for _, _, part in parts.attention])
    chunk = np.arange(max_num_batched_tokens + 1.0)
    mixed = parts.token_part_s(chunk, gap)
    base = dims.n_moe_layers * parts.moe.prefill_s(chunk) + mixed
    tokens = np.arange(max(max_num_seqs, max_num_batched_tokens) + 1.0)
    windowless = [part for part in parts.attention if part[1] is not parts.sliding]
    measured = [decode for _, decode, _ in parts.attention]
    cost = StepCost(
        n_moe_layers=dims.n_moe_layers,
        n_experts=dims.n_experts,
        moe_s=parts.moe.grid_s(max_num_seqs),
        mixed_moe_s=parts.moe.mixed_grid_s(max_num_batched_tokens),
        uniform_moe_s=parts.moe.prefill_s(tokens),
        dense_s=parts.dense_part_s(tokens),
        collectives_s=parts.collectives_s(tokens),
        host_s=gap,
        head_s=head,
        attention_s=np.tensordot(layers, decode, 1),
        context_stride=stride,
        prompt_alone_s=layers @ alone,
        prompt_share_s=layers @ share,
        prompt_floor_s=float(sum(n * p.floor_s for n, _, p in parts.attention)),
        prompt_token_s=float(sum(n * p.token_s for n, _, p in windowless)),
    )
    return StepTimeModel(
        cost=cost,
        model=dims,
        gpu=device,
        parallelism=parallelism,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        moe_s=parts.moe.grid_s(max_num_seqs),
        mixed_moe_s=parts.moe.mixed_grid_s(max_num_batched_tokens),
        fixed_s=fixed,
        attention_s=np.tensordot(layers, decode, 1),
        context_stride=stride,
        n_moe_layers=dims.n_moe_layers,
        n_experts=dims.n_experts,
        moe_batch_max=parts.moe.batch_max,
        attention_batch_max=int(min(decode.batch[-1] for decode in measured)),
        context_max=int(min(decode.context[-1] for decode in measured)),
        attention_tokens_max=min(decode.tokens_max for decode in measured),
        host_gap_s=gap,
        provenance=parts.provenance,
        warnings=tuple(parts.warnings),
        _prefill_base_s=array("d", base),
        _prefill_head_s=array("d", head),
        _mixed_base_s=array("d", mixed),
        _attention_alone_s=array("d", layers @ alone),
        _attention_share_s=array("d", layers @ share),
        _attention_floor_s=sum(n * p.floor_s for n, _, p in parts.attention),
        _attention_token_s=sum(n * p.token_s for n, _, p in windowless),
    )
