"""Step times of one worker that serves one model: the tables that its steps are priced with.

The formula is in `steps.step_cost`. A worker of several GPUs takes the time of one of them, which
computes its part of every layer, plus collectives: two all-reduces a layer, one after the sharded
embedding, an all-gather of the logits. Under expert parallelism a MoE layer takes the activated
experts of its busiest GPU. All that does not depend on a step's tokens is tabulated once."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.kept import kept
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.kernels.kernel_latency import DecodeAttention, PrefillAttention
from eldr_sim.kernel_profiles.models import ModelDims, list_models, load_model
from eldr_sim.kernel_profiles.parallel import SINGLE_GPU, MoEBackend, Padding, Parallelism
from eldr_sim.kernel_profiles.rounding import rounded
from eldr_sim.kernel_profiles.steps.calibration import Calibration
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE, StepCost
from eldr_sim.kernel_profiles.steps.cuda_graphs import pad, padded_sizes
from eldr_sim.kernel_profiles.steps.parts import MoELayer, Parts
from eldr_sim.kernel_profiles.steps.step_cost import StepParts, StepPricer
from eldr_sim.kernel_profiles.tables.format import LatencyTable, Provenance, provenance_of, weakest
from eldr_sim.kernel_profiles.tables.library import Engine, shipped_tables

_DENSE_ROWS = 1024  # of a rank's MoE table; beyond, each is 2% more than the one before


@dataclass(frozen=True, eq=False)
class StepTimeModel:
    """Step times of one worker serving one model."""

    #: ``model``, ``gpu``, ``parallelism``: what serves where, and on how many GPUs.
    model: ModelDims
    gpu: GPU
    parallelism: Parallelism
    #: Extent of the tables: sequences in a decode step, tokens of one sequence.
    max_num_seqs: int
    max_model_len: int
    #: ``n_moe_layers``, ``n_experts``: of the model, 0 where it is dense.
    n_moe_layers: int
    n_experts: int
    #: Largest measured points; beyond them the tables extrapolate.
    moe_batch_max: int
    attention_batch_max: int
    context_max: int
    attention_tokens_max: int  #: largest measured batch * context of attention
    host_gap_s: float  #: engine time per step
    #: By component (moe, attention, gemm, norms, host_gap, and collectives between several GPUs;
    #: engine_step in the place of the last four): label, origin, kernel_source, and the fit errors
    #: of the MoE layer and of engine steps.
    provenance: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]  #: what a reader of results must know, one line each
    cost: StepCost = field(repr=False)  #: the tables of its step times
    #: The same before CUDA graphs pad steps: what policies decide by. Padding makes a step's time
    #: flat within a graph's size, where the marginal time of a request would vanish.
    unpadded: StepCost = field(repr=False)
    layer: MoELayer = field(repr=False)  #: the MoE layer that was measured, for :meth:`rank_moe`
    missing: tuple[str, ...] = ()  #: components that no table was found of
    calibration: Calibration | None = None  #: that these times have, see :meth:`rank_moe`

    @property
    def label(self) -> Provenance:
        """The weakest provenance of any component."""
        return weakest(component["label"] for component in self.provenance.values())

    def parts(
        self,
        batch: int = 0,
        context: float = 0.0,
        chunks: Sequence[tuple[int, int]] = (),
        activated: Sequence[float] | None = None,
        rows: int | None = None,
    ) -> StepParts:
        """Return the time of one step by component, see :mod:`.step_cost`; InputError: not in the
        tables.

        ``batch``, ``context``: sequences that decode, and the tokens that they attend to,
        themselves included; ``chunks``: (cached tokens, new ones) of contexts computed;
        ``activated``: experts of each MoE layer on its busiest rank; None, for steps with chunks:
        uniform routing; ``rows``: of lm_head, one for each sequence and chunk when not given."""
        sizes = np.array(chunks, np.int64).reshape(-1, 2)
        tokens = batch + int(sizes[:, 1].sum())
        rows = batch + len(sizes) if rows is None else rows
        largest = len(self.cost.mixed_moe_s) - 1 if len(sizes) else self.max_num_seqs
        if not 0 <= batch <= self.max_num_seqs:
            raise InputError("batch", f"{batch}", f"0 to {self.max_num_seqs}")
        if not 0 <= rows <= self.max_num_seqs:
            raise InputError("rows", f"{rows}", f"0 to {self.max_num_seqs}")
        if tokens > largest:
            raise InputError("tokens", f"{tokens} in a step", f"{largest} or fewer")
        if (sizes[:, 1] < 1).any() or (sizes.sum(axis=1) > self.max_model_len).any():
            raise InputError("chunks", f"{list(chunks)}", f"up to {self.max_model_len} tokens")
        if activated is None and not len(sizes) and self.n_moe_layers:
            raise InputError(
                "activated", "there are none for a decode step", "one number per MoE layer"
            )
        if activated is not None and len(activated) != self.n_moe_layers:
            raise InputError("activated", f"{len(activated)} layers", str(self.n_moe_layers))
        return _pricer(self).parts(batch, context, sizes, rows, activated)

    def rank_moe(self, slots: int, max_pairs: int) -> RankMoE:
        """Return the time of one MoE layer on a rank that tokens are dispatched to: one GPU that
        computes ``pairs / top_k`` tokens on the experts that it activates. ``slots``: of the
        fullest rank; ``max_pairs``: more go on with the last slope. Raises InputError if sizes are
        out of range."""
        if not 1 <= slots <= self.n_experts:
            raise InputError("slots", f"{slots} a rank", f"1 to the {self.n_experts} experts")
        if max_pairs < 1:
            raise InputError("max_pairs", f"{max_pairs}", "1 or more")
        top_k = self.model.top_k
        last = max(2.0, np.ceil(max_pairs / top_k))
        dense = np.arange(min(last, _DENSE_ROWS) + 1.0)
        n_steps = 1 + int(32 * np.log2(max(last / _DENSE_ROWS, 1)))
        steps = rounded(np.geomspace(_DENSE_ROWS, last, n_steps))
        rows = np.unique(np.concatenate([dense, steps[steps > dense[-1]], [last]]))
        tokens = rows * self.layer.tokens_per_row
        factors = 1.0 if self.calibration is None else self.calibration.at(rows)[:, None]
        grids = (self.layer.latency.rank_grid_s(tokens, slots, mixed) for mixed in (False, True))
        return RankMoE(top_k, rows, *(factors * grid for grid in grids))

    def decode_s(self, activated: Sequence[float], batch: int, mean_context: float) -> float:
        """Return the seconds of one decode step of a batch at its mean context; see `parts`."""
        return math.fsum(self.parts(batch, batch * mean_context, activated=activated))

    def decodes_s(self, activated: Sequence[float], mean_context: float) -> Floats:
        """Return `decode_s` of every batch up to ``max_num_seqs``, from 1 on."""
        parts = _pricer(self).decodes(self.max_num_seqs, mean_context, activated)
        return np.array([math.fsum(step) for step in parts.tolist()])

    def prefill_s(
        self,
        tokens: Sequence[int],
        contexts: Sequence[int],
        activated: Sequence[float] | None = None,
    ) -> float:
        """Return the seconds of one prefill step: new and cached tokens of each prompt; `parts`."""
        chunks = list(zip(contexts, tokens, strict=True))
        return math.fsum(self.parts(chunks=chunks, activated=activated)) if chunks else 0.0

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds in which a prompt is computed alone, in chunks of the token budget."""
        budget = len(self.cost.mixed_moe_s) - 1
        starts = range(0, tokens, budget)
        return math.fsum(self.prefill_s([min(budget, tokens - at)], [at]) for at in starts)


@lru_cache(maxsize=16)
def _pricer(times: StepTimeModel) -> StepPricer:
    return StepPricer(times.cost, times.max_num_seqs)


def build_step_time_model(
    model: ModelDims | str,
    gpu: GPU | str,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int = 16384,
    parallelism: Parallelism = SINGLE_GPU,
    host_gap_s: float | None = None,
    cudagraph_padding: Padding = "none",
    enforce_eager: bool = False,
    graph_tokens: int | None = None,
    prompt_graph_tokens: int | None = None,
    moe_backend: MoEBackend = "auto",
    engine: Engine = Engine(),  # noqa: B008
    tables: Sequence[LatencyTable] = (),
    linears: Sequence[tuple[int, int]] = (),
    tokens_per_sequence: int = 1,
    shared_experts_fused: bool = False,
    share_missing: bool = True,
    named: str = "",
    import_helps: bool = True,
    calibration: Calibration | None = None,
) -> StepTimeModel:
    """Tabulate the step times of one worker that serves one model.

    Args:
        model: dimensions, or a name for :func:`load_model`.
        gpu: description, or a name for :func:`load_gpu`.
        max_num_seqs: sequences of a decode step.
        max_model_len: tokens of a sequence, prompt and output.
        max_num_batched_tokens: prefill steps up to this number of tokens are tabulated; larger ones
            continue with the slope of the upper half.
        parallelism: how the model is spread over the worker's GPUs.
        host_gap_s: engine time of a step, s; None takes
            :data:`~eldr_sim.kernel_profiles.steps.parts.HOST_GAP_S`.
        cudagraph_padding: what the padding rows of CUDA graphs compute, see
            :mod:`~eldr_sim.kernel_profiles.steps.cuda_graphs`.
        enforce_eager: run without graphs: a step takes no less than the host needs to launch its
            kernels, and nothing is padded.
        graph_tokens: most tokens of a step without prompts that runs as a graph, where the time of
            launching kernels is known of hosts of this GPU; None: any number.
        prompt_graph_tokens: the same of steps with prompts.
        moe_backend: kernel that computes the experts; ``auto``: the newest measured one.
        engine: engine and version that measured kernels must come from.
        tables: the user's tables, which take precedence over the shipped ones. One of kind
            ``engine_step`` stands for GEMMs, norms, collectives, lm_head and host gap together.
        linears: (out, in features) of matrices that a step's tokens pass besides the model's.
        tokens_per_sequence: most tokens that a step computes for a decoding sequence; more than one
            where it verifies drafts.
        shared_experts_fused: shared experts are one more routed expert, and do not follow these.
        share_missing: warn of parts without a table, with their share of a step and the command
            that brings one.
        named: name of the model in that command.
        import_helps: False where the packages of tables were searched already.
        calibration: factors from a user's own runs.

    Returns:
        The times, with the provenance of each part.

    Raises:
        InputError: a name is unknown, a size is out of range, or the model cannot be spread so.
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

    parts = _parts(
        dims, device, parallelism, tuple(tables), max_model_len, moe_backend, engine,
        shared_experts_fused,
    )  # fmt: skip
    gap, own_provenance = parts.host_gap(host_gap_s)
    if calibration is not None:
        gap = max(0.0, gap + calibration.host_gap_ms / 1e3)
        own_provenance = own_provenance | {"calibration": calibration.provenance()}
    if cudagraph_padding != "none" and parts.engine_step is not None:
        problem = "an engine_step table contains what its engine padded"
        raise InputError("cudagraph_padding", problem, "none")
    rows = max_num_seqs * tokens_per_sequence
    cost = _tabulate(parts, gap, rows, max_model_len, max_num_batched_tokens)
    if parts.states is not None:
        cost = _with_states(cost, *parts.states, tokens_per_sequence)
    if linears:
        tokens = np.arange(len(cost.dense_s), dtype=np.float64)
        more = sum(parts.linear_s(n, k, tokens) for n, k in linears)
        cost = cost._replace(dense_s=cost.dense_s + more)
    if calibration is not None:
        cost = calibration.applied(cost)
    if enforce_eager:
        launch_s, cudagraph_padding = parts.launches_s(), "none"
        cost = cost._replace(launch_s=launch_s, prompt_launch_s=launch_s)
    elif device.launch_s is not None:
        launch_s = parts.launches_s(compiled=engine.name == "vllm")
        if graph_tokens is not None:
            cost = cost._replace(launch_s=launch_s, graph_tokens=graph_tokens)
        if prompt_graph_tokens is not None:
            cost = cost._replace(prompt_launch_s=launch_s, prompt_graph_tokens=prompt_graph_tokens)
    lines: list[str] = []
    if share_missing and parts.missing:
        lines = _missing(parts, cost, _better(parts, named or dims.name, import_helps))
    measured = [decode for _, decode, _ in parts.attention]
    return StepTimeModel(
        cost=pad(
            cost,
            cudagraph_padding,
            padded_sizes(max_num_seqs, max_num_batched_tokens, tokens_per_sequence),
        ),
        unpadded=cost,
        model=dims,
        gpu=device,
        parallelism=parallelism,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        n_moe_layers=dims.n_moe_layers,
        n_experts=dims.n_experts,
        moe_batch_max=parts.moe.batch_max,
        attention_batch_max=int(min(decode.batch[-1] for decode in measured)),
        context_max=int(min(decode.context[-1] for decode in measured)),
        attention_tokens_max=min(decode.tokens_max for decode in measured),
        host_gap_s=gap,
        provenance=parts.provenance | own_provenance,
        warnings=(*lines, *parts.warnings),
        layer=parts.layer,
        missing=tuple(parts.missing),
        calibration=calibration,
    )


@lru_cache(maxsize=16)
def _parts(
    dims: ModelDims, gpu: GPU, layout: Parallelism, tables: tuple[LatencyTable, ...], *more: Any
) -> Parts:
    """Return a worker's kernels; those of workers that differ in batch or budget are the same."""

    def make() -> Parts:
        return Parts(dims, gpu, layout, tables, *more)

    return make() if tables else kept((dims, gpu, layout, more), make)


def _tabulate(
    parts: Parts, host_gap_s: float, sequences: int, max_model_len: int, budget: int
) -> StepCost:
    """Tabulate a worker's kernels up to so many sequences, tokens of one and tokens of a step."""
    rows = np.arange(sequences + 1.0)
    stride = 16
    while stride * 512 < max_model_len:
        stride *= 2
    context = stride * np.arange(-(-max_model_len // stride) + 1, dtype=np.float64)
    tokens = np.arange(max(sequences, budget) + 1.0)
    return StepCost(
        n_moe_layers=parts.whole.n_moe_layers,
        n_experts=parts.whole.n_experts,
        moe_s=parts.moe.grid_s(sequences),
        mixed_moe_s=parts.moe.mixed_grid_s(budget),
        uniform_moe_s=parts.moe.prefill_s(tokens),
        dense_s=parts.dense_part_s(tokens),
        collectives_s=parts.collectives_s(tokens),
        host_s=host_gap_s,
        head_s=parts.sequence_part_s(rows),
        attention_s=np.sum(
            [n * part.time_s(rows, context) for n, part, _ in parts.attention], axis=0
        ),
        context_stride=stride,
        prompt_alone_s=np.sum([n * part.alone_s for n, _, part in parts.attention], axis=0),
        prompt_share_s=np.sum([n * part.share_s for n, _, part in parts.attention], axis=0),
        prompt_floor_s=float(sum(n * p.floor_s for n, _, p in parts.attention)),
        prompt_token_s=float(sum(n * p.token_s for n, p in parts.rereads)),
    )


#: Parts of a step that a component's times are in.
_OF_STEP = {
    "moe": ("moe",), "attention": ("attention",), "linear_attention": ("attention",),
    "gemm": ("dense", "head"), "collectives": ("collectives",),
}  # fmt: skip
_TYPICAL = 16  #: sequences of the decode step whose shares are named


def _missing(parts: Parts, cost: StepCost, command: str) -> list[str]:
    """Return a warning for each component without a table: its share of a decode step, and the
    command that brings one."""
    whole, gpu = parts.whole, parts.gpu
    batch = min(_TYPICAL, len(cost.attention_s) - 1)
    context = min(4096, cost.context_stride * (cost.attention_s.shape[1] - 1))
    ranks = parts.parallelism.n_expert_ranks
    experts = np.full(max(whole.n_moe_layers, 1), min(whole.n_experts / ranks, batch * whole.top_k))
    none = np.zeros((0, 2), np.int64)
    seconds = StepPricer(cost, 0).parts(batch, batch * context, none, batch, experts)
    shares = seconds._asdict()
    lines = []
    for component in parts.missing:
        of = parts.provenance[component]
        source = "the nearest measured shape" if "framework" in of else "bytes and FLOPs"
        part = sum(shares[name] for name in _OF_STEP.get(component, ())) / sum(seconds)
        lines.append(
            f"{component}: no table of {whole.name} on {gpu.name}, times are {of['label']} from "
            f"{source}: {part:.0%} of a decode step of {batch} sequences of {context} tokens. To "
            f"do better: {command}"
        )
    return lines


def _better(parts: Parts, named: str, import_helps: bool) -> str:
    """Return the command that brings measured tables. All that can be imported of the known models
    ships; of others, NVIDIA's packages may have tables for GPUs that they have measured."""
    layout, name = parts.parallelism, parts.gpu.name
    size, engines = layout.tensor_parallel_size, layout.data_parallel_size
    words = ["--model", named]
    words += ["-tp", str(size)] if size > 1 else []
    words += ["--enable-expert-parallel"] if layout.expert_parallel else []
    imported = {one.gpu for one in shipped_tables() if "imported" in one.document}
    measured = next((gpu for gpu in (name, parts.gpu.sibling) if gpu in imported), None)
    if import_helps and measured is not None and parts.whole.name not in list_models():
        words += ["--data-parallel-size", str(engines)] if engines > 1 else []
        words = ["import", "--gpu", measured, *words, "--engine", parts.engine.name]
        command = shlex.join(["eldr-sim", "tables", *words, "--out", "tables"])
        return f"{command}, then --tables tables"
    command = shlex.join(["eldr-sim", "profile", *words, "--out", "tables"])
    return f"{command} on that GPU, then --tables tables"


def _with_states(
    cost: StepCost, layers: int, decode: DecodeAttention, prefill: PrefillAttention, tokens: int
) -> StepCost:
    """Return tables with the layers of linear attention: a state is read once and written for each
    of a sequence's ``tokens``, so that drafts can be taken back."""
    rows = np.arange(len(cost.attention_s)) * (1 + tokens) / 2
    seconds = layers * decode.time_s(rows, decode.context[:1])
    return cost._replace(
        attention_s=cost.attention_s + seconds,
        prompt_alone_s=cost.prompt_alone_s + layers * prefill.alone_s,
        prompt_share_s=cost.prompt_share_s + layers * prefill.share_s,
        prompt_floor_s=cost.prompt_floor_s + layers * prefill.floor_s,
    )


@dataclass(frozen=True)
class PipelinePlan:
    """Stages, and how long hidden states take from one to the next."""

    shares: tuple[float, ...]  #: part of the layers that each stage has; their sum is 1
    #: ``send_s``, ``send_token_s``: seconds of a send whatever it holds, and for each token.
    send_s: float
    send_token_s: float
    provenance: dict[str, dict[str, Any]]  #: of the sends: label and origin


def stage_layers(n_layers: int, n_stages: int) -> list[int]:
    """Return the layers of each stage; what is left over goes to the stages before the last."""
    each, left = divmod(n_layers, n_stages)
    last = n_stages - 1
    return [each + (last - left <= stage < last) for stage in range(n_stages)]


def plan_pipeline(model: ModelDims, gpu: GPU, n_stages: int) -> PipelinePlan:
    """Cut a model into stages on GPUs of one node."""
    layers = stage_layers(model.n_layers, n_stages)
    efficiency = roofline.efficiency_of(gpu)
    bandwidth = efficiency.link_bandwidth * gpu.peer_bandwidth(2)
    return PipelinePlan(
        tuple(count / model.n_layers for count in layers),
        efficiency.collective_floor_s,
        2 * 2 * model.hidden_size / bandwidth,  # hidden states and residual, bfloat16
        {"stage_sends": provenance_of("roofline", efficiency.source)},
    )
