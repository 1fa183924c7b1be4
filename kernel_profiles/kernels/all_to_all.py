"""Dispatch and combine: what expert-parallel GPUs send each other around a MoE layer.

A token is dispatched from the GPU that computed its attention to those that hold its experts, and
their outputs are combined back. What a copy of a token is sent for depends on the backend
(``--all2all-backend`` of vLLM):

===========================  ======================================================================
``allgather_reducescatter``  every token to every rank, whatever its experts; between nodes once a
                             node, spread over the node's NICs (NCCL's rings)
``nccl_alltoall``            a copy for each (token, rank) that holds one of its experts or more
``allgather_alltoall``       in steps without prompts every token to every rank before the gate, and
                             back a copy for each (token, rank); else as ``nccl_alltoall`` (METRO,
                             arXiv 2512.09277, Sec. IV-C)
``pplx``                     a copy for each (token, expert)
``deepep_ll``                a copy for each (token, expert), straight to its GPU
``deepep_ht``                between nodes a copy for each (token, node), to the GPU of the same
                             place there, which forwards one for each (token, rank) of its node
===========================  ======================================================================

Combining sends the same copies the other way. A GPU's own experts cost no copy. Sources: vLLM's
``vllm/distributed/device_communicators/all2all.py``, the README and kernels of deepseek-ai/DeepEP
(``internode.cu``, ``internode_ll.cu``) and of ppl-ai/pplx-kernels.

The time of a phase depends on the busiest GPU's copies *inside* its node and *between* nodes, each
the larger of sent and received: ``t = max(t_node(inside * bytes), t_network(between * bytes))``.

``t_node`` comes from tables inside a node, read at the bytes that a GPU of the measured run sent to
the others of its node; without a table from the links (roofline). ``t_network`` likewise from rows
of 2 nodes or more, of which DeepEP has some on H100 and H200. Everywhere else it is derived::

    t_network = t_node(0) + latency + between * bytes / bandwidth

with the line rate of a GPU's NIC. ``docs/tables.md`` has its error on the rows between nodes:
nothing is fitted to them.

DeepEP's kernels have two tables that differ 3 to 9 times at small batches: its own benchmarks (run
beside SGLang), and calls as vLLM makes them. The first are the default: they time the kernels,
which is what CUDA graphs replay in decode steps; the second hold time of launches and, in
``deepep_ht``, of a wait for the host, which prefill steps without graphs do pay."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels import kernel_latency, roofline
from eldr_sim.kernel_profiles.kernels.moe_latency import interpolate, monotone_fit
from eldr_sim.kernel_profiles.kernels.sibling_tables import gpu_table
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Backend
from eldr_sim.kernel_profiles.rounding import each
from eldr_sim.kernel_profiles.tables.format import LatencyTable, Provenance, provenance_of, weakest

BACKENDS: tuple[Backend, ...] = get_args(Backend)

Library = Literal["sglang", "vllm"]  #: who measured DeepEP's kernels

#: What a copy of a token is sent for; of ``allgather_alltoall``, where it does not gather.
COPY_PER: dict[Backend, Literal["all", "rank", "expert", "node"]] = {
    "allgather_reducescatter": "all", "nccl_alltoall": "rank", "allgather_alltoall": "rank",
    "pplx": "expert", "deepep_ll": "expert", "deepep_ht": "node",
}  # fmt: skip

#: Backends by which every rank knows all tokens of steps without prompts before it chooses.
GATHERING: tuple[Backend, ...] = ("allgather_reducescatter", "allgather_alltoall")

#: Of a NIC's line rate: nixlbench, 42.6 GB/s over 400 Gb/s (H200, ConnectX-7).
NETWORK_EFFICIENCY = 42.6 / 50.0
NETWORK_LATENCY_S = 5e-6  #: typical for InfiniBand (aiconfigurator-core 0.12.0 systems/gb300.yaml)

_FP8_BYTES = 1 + 4 / 128  # a value and its share of an fp32 scale per 128
_OPERATIONS = {
    "allgather_reducescatter": ("all_gather", "reduce_scatter"),
    "nccl_alltoall": ("alltoall", "alltoall"),
    "allgather_alltoall": ("alltoall", "alltoall"),
}
_PHASES = ("dispatch", "combine")
_FAR_BYTES = 1e9  # second knot of a straight line


class AllToAllCost(NamedTuple):
    """Dispatch and combine of one MoE layer, as compiled code takes them; times are seconds. See
    :mod:`~eldr_sim.kernel_profiles.kernels.all_to_all_cost` for the formula."""

    dispatch_bytes: float  #: of one copy of a token
    combine_bytes: float  #: likewise
    dispatch_knots: Floats  #: bytes that a GPU sends to others of its node, ascending from 0
    dispatch_s: Floats  #: non-decreasing
    combine_knots: Floats
    combine_s: Floats
    dispatch_far_knots: Floats  #: bytes that a GPU sends to other nodes
    dispatch_far_s: Floats
    combine_far_knots: Floats
    combine_far_s: Floats


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Dispatch and combine between the ranks of an expert-parallel group."""

    backend: Backend  #: one of :data:`BACKENDS`
    #: ``n_ranks``, ``gpus_per_node``: GPUs of the group, and of them in one node.
    n_ranks: int
    gpus_per_node: int
    cost: AllToAllCost = field(repr=False)  #: what compiled code takes
    #: The same for steps without prompts, where ``allgather_alltoall`` gathers; else ``cost``.
    gathered: AllToAllCost = field(repr=False)
    #: By component (``all_to_all``; ``network`` between nodes): label, origin, kernel_source.
    provenance: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]  #: what a reader of results must know, one line each

    @property
    def label(self) -> Provenance:
        """The weakest provenance of any component."""
        return weakest(entry["label"] for entry in self.provenance.values())

    def dispatch_s(self, inside: float, between: float) -> float:
        """Return the seconds of one layer's dispatch. ``inside``, ``between``: copies of tokens
        that the busiest GPU sends or receives inside its node and between nodes."""
        cost = self.cost
        sent = cost.dispatch_bytes * inside, cost.dispatch_bytes * between
        near = float(interpolate(sent[0], cost.dispatch_knots, cost.dispatch_s))
        far = float(interpolate(sent[1], cost.dispatch_far_knots, cost.dispatch_far_s))
        return max(near, far) if between > 0 else near

    def combine_s(self, inside: float, between: float) -> float:
        """Return the seconds of one layer's combine; see :meth:`dispatch_s`."""
        cost = self.cost
        sent = cost.combine_bytes * inside, cost.combine_bytes * between
        near = float(interpolate(sent[0], cost.combine_knots, cost.combine_s))
        far = float(interpolate(sent[1], cost.combine_far_knots, cost.combine_far_s))
        return max(near, far) if between > 0 else near

    def uniform_copies(self, model: ModelDims) -> tuple[float, float]:
        """Copies of tokens, inside and between, a token of every rank, under uniform routing."""
        return uniform_copies(
            self.backend, model.n_experts, model.top_k, self.n_ranks, self.gpus_per_node
        )


def reached(n_experts: int, top_k: int, parts: int) -> float:
    """Chance that a token with ``top_k`` random experts has one or more in one of equal parts."""
    missing = math.comb(n_experts - n_experts // parts, top_k) / math.comb(n_experts, top_k)
    return 1.0 - missing


def uniform_copies(
    backend: Backend, n_experts: int, top_k: int, n_ranks: int, gpus_per_node: int
) -> tuple[float, float]:
    """Copies that a GPU sends (and receives) if every rank has a token with random experts. Returns
    ``inside``, ``between``: to GPUs of its node and of other nodes."""
    node = min(gpus_per_node, n_ranks)
    n_nodes = -(-n_ranks // node)
    match COPY_PER[backend]:
        case "all":
            return n_ranks - 1.0, (n_ranks - node) / node
        case "expert":
            each = top_k / n_ranks
            return (node - 1) * each, (n_ranks - node) * each
        case "rank":
            each = reached(n_experts, top_k, n_ranks)
            return (node - 1) * each, (n_ranks - node) * each
        case "node":
            forwarded = n_nodes * (node - 1) * reached(n_experts, top_k, n_ranks)
            return forwarded, (n_nodes - 1) * reached(n_experts, top_k, n_nodes)


def build_all_to_all(
    model: ModelDims,
    gpu: GPU,
    backend: Backend,
    n_ranks: int,
    *,
    gpus_per_node: int = 8,
    library: Library = "sglang",
    tables: tuple[LatencyTable, ...] = (),
) -> AllToAll:
    """Time of dispatch and combine between the GPUs of an expert-parallel group. Raises InputError:
    no such backend or library, or ranks that do not fill their nodes.

    ``backend``: see the module; ``n_ranks``: a whole number of nodes or a part of one; ``library``:
    the library that measured DeepEP's kernels; ``tables``: the user's own, before the shipped
    ones."""
    if backend not in BACKENDS:
        raise InputError("all2all_backend", f"{backend!r}", ", ".join(BACKENDS))
    if library not in get_args(Library):
        raise InputError("library", f"{library!r}", ", ".join(get_args(Library)))
    if n_ranks < 2 or (n_ranks > gpus_per_node and n_ranks % gpus_per_node):
        problem = f"{n_ranks} ranks on nodes of {gpus_per_node} GPUs"
        raise InputError("expert_parallel_size", problem, "2 or more in a node, or whole nodes")
    node = min(n_ranks, gpus_per_node)
    fp8 = backend.startswith("deepep") and model.expert_dtype in ("fp8", "fp8_block")
    # Latent experts: what is dispatched is projected already.
    combine_bytes = 2.0 * model.expert_width
    dispatch_bytes = _FP8_BYTES * model.expert_width if fp8 else combine_bytes
    curves = _Curves(gpu, node, tables)
    if backend in _OPERATIONS:
        near = [curves.collective(operation) for operation in _OPERATIONS[backend]]
    elif backend == "pplx":
        near = [curves.links("pplx")] * 2
    else:
        near = [curves.deepep(model, backend, phase, library) for phase in _PHASES]
    near = [_no_less(curve, gpu.peer_bandwidth(max(node, 2))) for curve in near]
    far = [curves.line_rate(curve) for curve in near]
    n_nodes = n_ranks // node
    if n_nodes > 1 and backend.startswith("deepep"):
        far = [
            curves.deepep_between(model, backend, phase, library, n_nodes) or line
            for phase, line in zip(_PHASES, far, strict=True)
        ]
        far = [_no_less(curve, gpu.nic_bandwidth) for curve in far]
    cost = AllToAllCost(dispatch_bytes, combine_bytes, *near[0], *near[1], *far[0], *far[1])
    gathered = cost
    if backend == "allgather_alltoall":
        gather = _no_less(curves.collective("all_gather"), gpu.peer_bandwidth(max(node, 2)))
        line = curves.line_rate(gather)
        gathered = AllToAllCost(combine_bytes, combine_bytes, *gather, *near[1], *line, *far[1])
    if n_nodes == 1:
        del curves.provenance["network"]
    return AllToAll(
        backend, n_ranks, gpus_per_node, cost, gathered, curves.provenance, tuple(curves.warnings)
    )


class _Curves:
    """Time of a phase inside a node by bytes that a GPU sends to the others, and its source."""

    def __init__(self, gpu: GPU, node: int, tables: tuple[LatencyTable, ...]) -> None:
        self.gpu, self.node, self.tables = gpu, node, tables
        self.provenance: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []

    def _record(self, component: str, table: LatencyTable, exact: bool) -> None:
        said = table.source
        if not exact:
            said["label"] = weakest([said["label"], "derived"])
            said["origin"] += "; another shape's rows, read at equal bytes"
        self.provenance[component] = said

    def _warn(self, warnings: list[str]) -> None:
        self.warnings += [warning for warning in warnings if warning not in self.warnings]

    def links(self, what: str) -> tuple[Floats, Floats]:
        """A straight line from the links of a node."""
        efficiency = roofline.efficiency_of(self.gpu)
        bandwidth = efficiency.link_bandwidth * self.gpu.peer_bandwidth(max(self.node, 2))
        self.provenance["all_to_all"] = provenance_of("roofline", efficiency.source)
        self._warn([f"all-to-all: no table of {what} on {self.gpu.name}, times are from its links"])
        knots = np.array([0.0, _FAR_BYTES])
        return knots, efficiency.collective_floor_s + knots / bandwidth

    def collective(self, operation: str) -> tuple[Floats, Floats]:
        """A NCCL collective; its message is what all GPUs of the node have together."""
        table = gpu_table("collective", self.gpu, dtype="float16", extra=self.tables)
        if table is None:
            return self.links(operation)
        latency = kernel_latency.CollectiveLatency.from_table(table)
        curves = latency.curves
        sizes = sorted(n for name, n in curves if name == operation)
        if not sizes:
            return self.links(operation)
        n_gpus = next((n for n in sizes if n >= self.node), sizes[-1])
        message, seconds = curves[operation, n_gpus]
        self._warn(latency.warnings[operation, n_gpus])
        if table.source["label"] == "imported":
            self._warn(kernel_latency.say_behind(self.gpu.name, operation, n_gpus))
        self._record("all_to_all", table, n_gpus == self.node)
        return _from_zero(message * (n_gpus - 1) / n_gpus, seconds)

    def deepep(
        self, model: ModelDims, backend: Backend, phase: str, library: Library
    ) -> tuple[Floats, Floats]:
        """A kernel of DeepEP, from the rows of the shape next to the model's."""
        table = gpu_table("all_to_all", self.gpu, shape={}, library=library, extra=self.tables)
        if table is None:
            return self.links(f"DeepEP ({library})")
        rows = _rows(table, model, backend, phase)
        self._record("all_to_all", table, rows.exact and rows.n_gpus == self.node)
        self._warn(rows.warnings)
        return _from_zero(rows.inside, rows.seconds)

    def line_rate(self, near: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """A straight line from the line rate of a GPU's NIC."""
        bandwidth = NETWORK_EFFICIENCY * self.gpu.nic_bandwidth
        origin = f"line rate of the NIC of {self.gpu.name} x {NETWORK_EFFICIENCY:.3f}, "
        origin += f"{NETWORK_LATENCY_S * 1e6:g} us"
        self.provenance["network"] = provenance_of("derived", origin)
        knots = np.array([0.0, _FAR_BYTES])
        return knots, near[1][0] + NETWORK_LATENCY_S + knots / bandwidth

    def deepep_between(
        self, model: ModelDims, backend: Backend, phase: str, library: Library, n_nodes: int
    ) -> tuple[Floats, Floats] | None:
        """A kernel of DeepEP between nodes: of as many nodes, or the next fewer measured."""
        for nodes in range(n_nodes, 1, -1):
            table = gpu_table(
                "all_to_all", self.gpu, shape={"n_nodes": nodes}, library=library, extra=self.tables
            )
            if table is None or not (table.columns["backend"] == backend).any():
                continue
            rows = _rows(table, model, backend, phase)
            self._record("network", table, rows.exact and nodes == n_nodes)
            self._warn(rows.warnings)
            return _from_zero(rows.between, rows.seconds)
        return None


class _Rows(NamedTuple):
    """Rows of one shape, by tokens."""

    inside: Floats  #: bytes that a GPU sends to the others of its node
    between: Floats  #: and to other nodes
    seconds: Floats
    n_gpus: int
    exact: bool  #: the shape is the model's
    warnings: list[str]  #: rows that are left out


def chunk_tokens(backend: Backend, size: int | None) -> int:
    """Tokens of an engine that MoE layers send and compute at once; 0: all of a step. vLLM chunks
    pplx by ``VLLM_MOE_DP_CHUNK_SIZE``, 256 (``fused_moe/layer.py``, ``forward_impl_chunked``,
    v0.9.1), its buffers' size. ``size``: another number, for any backend."""
    return size if size is not None else 256 if backend == "pplx" else 0


def _rows(table: LatencyTable, model: ModelDims, backend: Backend, phase: str) -> _Rows:
    """Rows of a phase, of the measured shape next to the model's: by hidden size, then the rest."""
    columns = table.columns
    rows = np.flatnonzero((columns["backend"] == backend) & (columns["phase"] == phase))
    shape = np.array((model.expert_width, model.top_k, model.n_experts))
    measured = np.stack([columns[n][rows] for n in ("hidden_size", "top_k", "n_experts")], axis=1)
    off = np.abs(each(math.log, measured / shape.astype(np.float64)))
    near = measured[np.lexsort((off[:, 2], off[:, 1], off[:, 0]))[0]]
    rows = rows[(measured == near).all(axis=1)]
    rows = rows[np.argsort(columns["tokens"][rows])]
    n_gpus, n_nodes = int(columns["n_gpus"][rows[0]]), table.metadata.shape.get("n_nodes", 1)
    hidden, top_k, n_experts = near.tolist()
    inside, between = uniform_copies(backend, n_experts, top_k, n_gpus, n_gpus // n_nodes)
    fp8 = phase == "dispatch" and table.metadata.dtype == "fp8"
    sent = columns["tokens"][rows] * (hidden * (_FP8_BYTES if fp8 else 2.0))
    measured_s, what = columns["latency_s"][rows], f"{backend} {phase} on {table.metadata.gpu}"
    kept = ~kernel_latency.spikes(measured_s)
    return _Rows(
        (inside * sent)[kept],
        (between * sent)[kept],
        monotone_fit(measured_s[kept]),
        n_gpus,
        bool((near == shape).all()),
        kernel_latency.say(what, measured_s, columns["tokens"][rows], "tokens"),
    )


def _no_less(curve: tuple[Floats, Floats], rate: float) -> tuple[Floats, Floats]:
    """Raise a curve to the time of its bytes at the peak ``rate`` of the links, bytes/s."""
    knots, seconds = curve
    last = max(2 * knots[-1], _FAR_BYTES)
    far = np.maximum(interpolate(last, knots, seconds), last / rate)
    knots, seconds = np.append(knots, last), np.append(seconds, far)
    return knots, np.maximum(seconds, knots / rate)


def _from_zero(knots: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Let the smallest measured call's time stand from 0 bytes on."""
    return np.concatenate([[0.0], knots]), np.concatenate([seconds[:1], seconds])
