"""AsyncEP: expert weights that arrive while other layers compute (MoE-Prefill, arXiv 2605.02960).

Each of N GPUs keeps attention, dense layers, all experts of the first MoE layer and 1 / N of the
others'. While layer l computes, GPUs gather the experts of layer l + 1 (Sec. 6.2); no token leaves
its GPU. With an offload window a GPU holds its shards of the next W layers and copies the others
from host memory in order, on into the next step (Sec. 6.3). With c the time a layer computes, g to
gather one, h to copy a GPU's shard from the host::

    start[0]   = when the step starts
    gathered[l] = max(start[l-1], gathered[l-1], loaded[l]) + g
    start[l]   = max(start[l-1] + c[l-1], gathered[l])
    loaded[j]  = max(loaded[j-1], when the slot of load j - W is free) + h

A gather waits for the layer before to start, which frees its buffer: two do. A slot is free when
its shard has been gathered or, on a GPU alone, its layer has computed. Layers without experts count
to the one they follow. Gathers by collectives leave together, so GPUs slip by one layer at most;
one-sided ones go at their own pace and take no longer, as N readers load each source no more than
it can send."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.kernels.flops import PrefillWork
from eldr_sim.kernel_profiles.kernels.kernel_latency import CollectiveLatency
from eldr_sim.kernel_profiles.kernels.sibling_tables import gpu_table
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import NODE_GPUS
from eldr_sim.kernel_profiles.tables.format import LatencyTable, weakest


class Stream(NamedTuple):
    """Transfers of one layer's experts to a GPU, as compiled code takes them."""

    gather_s: float  #: from the other GPUs; 0 on a GPU alone
    host_s: float  #: of the GPU's own shard from host memory; 0 without offloading
    interference: float  #: time that a layer loses for each second of a gather beside it
    alone: bool  #: whether the GPU has no others to gather from


@dataclass(frozen=True)
class StreamPlan:
    """What a GPU streams, and how long it takes."""

    stream: Stream  #: seconds of one layer's transfers
    #: Layers whose shards a GPU holds, the first MoE layer left out; 0 where it holds all.
    window: int
    layer_bytes: int  #: experts of one layer
    #: By component (``weight_gather``, ``host_copy``): label and origin.
    provenance: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]  #: what a reader of results must know, one line each


def plan_stream(
    model: ModelDims,
    gpu: GPU,
    n_gpus: int,
    *,
    offload_window: int | None = None,
    interference: float = 0.0,
    tables: Sequence[LatencyTable] = (),
) -> StreamPlan:
    """Time the transfers of a model's experts to one of ``n_gpus`` GPUs of a node.

    Raises InputError: GPUs that do not divide the experts or exceed a node, sizes out of range, a
    host bandwidth not known. ``offload_window``: layers with a shard on the GPU, others wait in
    host memory; None: all; ``interference``: what a layer loses a second of a gather beside it, 0
    to 1, as NCCL's kernels take multiprocessors; ``tables``: the user's own, before the shipped
    ones."""
    if not 1 <= n_gpus <= NODE_GPUS or model.n_experts % n_gpus:
        problem = f"{n_gpus} GPUs for the {model.n_experts} experts of {model.name}"
        raise InputError("n_gpus", problem, f"a divisor of the experts, at most {NODE_GPUS}")
    if not 0 <= interference <= 1:
        raise InputError("interference", f"{interference!r}", "0 to 1")
    streamed = model.n_moe_layers - 1
    window = streamed if offload_window is None else offload_window
    if window < 1:
        raise InputError("offload_window", f"{window}", "1 or more layers")
    window = 0 if window >= streamed else window
    if window and not gpu.host_bandwidth:
        raise InputError("offload_window", f"the host bandwidth of {gpu.name} is not known")
    layer_bytes = model.n_experts * model.bytes_per_expert
    provenance: dict[str, dict[str, Any]] = {}
    warnings: tuple[str, ...] = ()
    gather_s = host_s = 0.0
    if n_gpus > 1:
        gather_s, provenance["weight_gather"] = _gather(gpu, n_gpus, layer_bytes, tables)
        if provenance["weight_gather"]["label"] == "roofline":
            warnings = (f"weight_gather: no table of all-gathers between {n_gpus} {gpu.name}",)
    if window:
        label, _, origin = gpu.host_bandwidth_source.partition(": ")
        provenance["host_copy"] = {"label": label, "origin": origin}
        host_s = layer_bytes / n_gpus / gpu.host_bandwidth
    stream = Stream(gather_s, host_s, float(interference), n_gpus == 1)
    return StreamPlan(stream, window, layer_bytes, provenance, warnings)


def _gather(
    gpu: GPU, n_gpus: int, n_bytes: int, tables: Sequence[LatencyTable]
) -> tuple[float, dict[str, Any]]:
    """Seconds until every GPU has all bytes, and where they come from."""
    table = gpu_table("collective", gpu, dtype="float16", extra=tables)
    latency = None if table is None else CollectiveLatency.from_table(table)
    if table is None or latency is None or ("all_gather", n_gpus) not in latency.curves:
        seconds = float(roofline.all_gather_s(gpu, n_gpus, n_bytes))
        return seconds, {"label": "roofline", "origin": roofline.efficiency_of(gpu).source}
    largest = latency.curves["all_gather", n_gpus][0][-1]
    label, origin = table.metadata.provenance, table.metadata.origin
    if n_bytes > largest:
        label = weakest([label, "derived"])
        origin += f"; beyond {largest / 1e6:.0f} MB by the last slope"
    seconds = float(latency.time_s("all_gather", n_gpus, n_bytes))
    return seconds, {"label": label, "origin": origin}


@njit()
def streamed_ends(
    start: Any, layers_s: Any, first: int, n_ranks: int, n_layers: int, stream: Stream,
    loaded: Any, end: Any,
) -> None:  # fmt: skip
    """Write when the ranks ``first .. first + n_ranks - 1``, which gather together, end a step.

    ``start``: float64 ``[ranks]``, s; ``layers_s``: float64 ``[ranks, n_layers]``, or ``[ranks,
    1]`` where layers are alike; ``stream``: transfers of one layer; ``loaded``: float64 ``[ranks,
    W]``, in and out, row ``first`` for all: when the shards of the next W layers to gather have
    come from the host; zeros at first, W = 0 without offloading, else below ``n_layers - 1``;
    ``end``: out. GPUs that gather on their own are groups of one rank, a call each."""
    window = loaded.shape[1]
    varies = layers_s.shape[1] > 1
    gather_s = stream.gather_s
    began = start[first]
    for rank in range(first, first + n_ranks):
        compute = layers_s[rank, 0]
        if n_layers > 1:
            compute += stream.interference * min(compute, gather_s)
        began = max(began, start[rank])
        end[rank] = start[rank] + compute
    gathered = began
    slot = 0
    for layer in range(1, n_layers):
        gathered = max(began, gathered)
        if window > 0:
            gathered = max(gathered, loaded[first, slot])
        gathered += gather_s
        began = gathered
        computed = gathered
        for rank in range(first, first + n_ranks):
            compute = layers_s[rank, layer if varies else 0]
            if layer < n_layers - 1:
                compute += stream.interference * min(compute, gather_s)
            own = max(end[rank], gathered)
            began = max(began, own)
            end[rank] = own + compute
            computed = max(computed, end[rank])
        if window > 0:
            before = loaded[first, slot - 1 if slot > 0 else window - 1]
            free = computed if stream.alone else gathered
            loaded[first, slot] = max(before, free) + stream.host_s
            slot = slot + 1 if slot + 1 < window else 0
    if slot > 0:  # the next load to be gathered comes first
        _reverse(loaded, first, 0, slot - 1)
        _reverse(loaded, first, slot, window - 1)
        _reverse(loaded, first, 0, window - 1)


@njit()
def _reverse(rows: Any, row: int, low: int, high: int) -> None:
    """Reverse a part of a row, both ends included."""
    while low < high:
        rows[row, low], rows[row, high] = rows[row, high], rows[row, low]
        low += 1
        high -= 1


def with_saturation(
    work: PrefillWork,
    stream: Stream,
    *,
    n_layers: int,
    peak_flops: float,
    layer_s: float,
    batch_flops: float,
) -> PrefillWork:
    """Return the work with the FLOPs at which a step hides its transfers, margins left out.

    Eq. 1: the transfers of all layers at the GPU's peak, ``L T_EP P_peak``. Eq. 3: a reference
    batch times the slowest layer over the first, which waits for nothing, ``max_l T_l / T_0
    FLOPs(b_max)``; hidden behind it, it is that batch. They differ by the share of the peak that is
    reached. ``layer_s``, ``batch_flops``: of the reference batch, the largest step."""
    transfer_s = max(stream.gather_s, stream.host_s)
    return work._replace(
        saturation_eq1=n_layers * transfer_s * peak_flops,
        saturation_eq3=max(layer_s, transfer_s) / layer_s * batch_flops,
    )
