"""GRACE-MoE's evaluation: what it ran on, and what stands for it here.

Recorded routing of three models takes the place of the paper's: the embedded trace (a trained small
model of Qwen3-30B-A3B's width, 10 layers), Qwen3-30B-A3B itself (4,010 prompt tokens) and
gpt-oss-20b. Neither OLMoE's nor DeepSeek-V2-Lite's routing has been published token by token.

RTX 4090 (48 GB) and 3090 are the presets as rooflines; a node's 25 Gb/s Ethernet is shared by
its GPUs."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAll, build_all_to_all
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.phases import report_phase
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.replicas.base import ReplicaChoice
from eldr_sim.traces.routing.calibration import CalibrationSet
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from studies import expert_traffic

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

#: The routing traces, and the model whose shape prices each.
TRACES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gpt-oss-20b": "GPT-OSS-20B",
    "reference-moe": "Qwen3-30B-A3B",
}
_ETHERNET = 25e9 / 8  # bytes per second, a node


class Cluster(NamedTuple):
    """Nodes of equal GPUs."""

    n_nodes: int
    gpus_per_node: int

    @property
    def n_ranks(self) -> int:
        """GPUs of all nodes."""
        return self.n_nodes * self.gpus_per_node

    @property
    def node_of_rank(self) -> Ints:
        """The node of each GPU."""
        return np.arange(self.n_ranks) // self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.n_nodes}x{self.gpus_per_node}"


def gpu_of(cluster: Cluster) -> GPU:
    """Return the paper's GPU: RTX 4090 in several nodes, RTX 3090 in one."""
    several = cluster.n_nodes > 1
    gpu = load_gpu("RTX 4090" if several else "RTX 3090")
    own = {"name": "RTX 4090 48GB", "memory_bytes": 48 * 2**30} if several else {}
    # PCIe 4.0 x16 between cards of 48 GB, PCIe 1.0 x16 between RTX 3090 (Sec. 5.1). No table of
    # either is measured; a roofline stands for both.
    peers = {"intra_node_bandwidth": 31.5e9 if several else 4e9, "sibling": ""}
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    nic = {"nic_bandwidth": _ETHERNET / cluster.gpus_per_node}
    return gpu.model_copy(update=own | peers | limits | nic)


def write_gpu(path: Path, cluster: Cluster, **changes: float) -> str:
    """Write the paper's GPU, with some fields changed, for ``gpu``; returns the path."""
    path.write_text(gpu_of(cluster).model_copy(update=changes).model_dump_json())
    return str(path)


class Scheme(NamedTuple):
    """A step of the paper's ablation."""

    label: str
    placement: str
    choice: str = "source"  #: says nothing without copies


VANILLA = Scheme("Vanilla", "linear")
HG = Scheme("HG", "grace:replication=none")
FR_WRR = Scheme("HG + FR + WRR", "grace:replication=fixed", "weighted")
DR_WRR = Scheme("HG + DR + WRR", "grace", "weighted")
DR_TAR = Scheme("HG + DR + TAR", "grace", "local_first")
AFFINITY = Scheme("affinity", "affinity")
SCHEMES = (VANILLA, HG, FR_WRR, DR_WRR, DR_TAR, AFFINITY)


#: Tokens of a step over all GPUs, and steps: 128 requests, prompts of 64 tokens (Sec. 5.1).
STEP_TOKENS: dict[Phase, tuple[int, int]] = {"prefill": (8192, 1), "decode": (128, 8)}


class Source(NamedTuple):
    """What a placement is fitted on and judged on."""

    label: str
    trace: str
    fitted_on: tuple[str, ...] = ()  #: domains; all where none is named
    judged_on: str | None = None  #: a domain; all where none is named

    split: bool = True
    """Whether calibration requests are fitted on and serving ones judged on; else all of both."""


#: The paper fits and judges on one data set: here on some requests of a file and on its others.
QWEN = tuple(
    Source(f"Qwen3-30B-A3B, {label}", "qwen3-30b-a3b", (domain,), domain)
    for label, domain in (("ShareGPT", "sharegpt"), ("random", "random"))
)
#: The paper does not say that the requests are others: here they are the same.
SAME = tuple(
    source._replace(label=f"{source.label}, the requests it was fitted on", split=False)
    for source in QWEN
)
OTHERS = (Source("gpt-oss-20b", "gpt-oss-20b"), Source("reference-moe", "reference-moe"))
ACROSS = (
    Source("Qwen3-30B-A3B, ShareGPT -> random", "qwen3-30b-a3b", ("sharegpt",), "random", False),
    Source("Qwen3-30B-A3B, random -> ShareGPT", "qwen3-30b-a3b", ("random",), "sharegpt", False),
)
SOURCES = (*QWEN, *ACROSS, *OTHERS)


class Evaluation:
    """Placements fitted on some requests of a trace and counted on others, each once. ``seeds``:
    seeds of the clustering; figures are means over them; ``sources``: what figures show."""

    def __init__(self, seeds: range, sources: Sequence[Source] = SOURCES) -> None:
        self.seeds, self.sources = seeds, sources
        self.trace = cache(open_trace)
        self.calibration = cache(self._calibration)
        self.placements = cache(self._placements)
        self.measured = cache(self._measured)
        self.timed = cache(self._timed)

    def _calibration(self, source: Source) -> CalibrationSet:
        """Return the requests that a source's placements are fitted on."""
        trace = self.trace(source.trace)
        requests = [
            requests_of(trace, True if source.split else None, domain)
            for domain in source.fitted_on or (None,)
        ]
        return calibration_of(trace, np.concatenate(requests))

    def batches(self, source: Source, cluster: Cluster, phase: Phase) -> list[expert_traffic.Batch]:
        """Return the steps that a source's placements are judged on."""
        trace, (tokens, steps) = self.trace(source.trace), STEP_TOKENS[phase]
        requests = requests_of(trace, False if source.split else None, source.judged_on)
        make = (
            expert_traffic.prompt_batches if phase == "prefill" else expert_traffic.decode_batches
        )
        return make(trace, requests, cluster.n_ranks, tokens // cluster.n_ranks, steps)

    def _placements(self, source: Source, placement: str, cluster: Cluster) -> list[Placement]:
        """Return a placement for each seed; one where it draws nothing."""
        trace, calibration = self.trace(source.trace), self.calibration(source)
        report_phase(f"placing the experts of {source.label} by {placement}")
        seeds = self.seeds if placement != "linear" else self.seeds[:1]
        return [place(trace, calibration, placement, cluster, seed) for seed in seeds]

    def _measured(
        self, source: Source, scheme: Scheme, cluster: Cluster, phase: Phase
    ) -> tuple[expert_traffic.Traffic, ...]:
        """Count a scheme, one `Traffic` a seed."""
        batches = self.batches(source, cluster, phase)
        choice = replica_choice(scheme.choice)
        return tuple(
            expert_traffic.measure(batches, placement, choice, cluster.node_of_rank)
            for placement in self.placements(source, scheme.placement, cluster)
        )

    def _timed(
        self, source: Source, scheme: Scheme, cluster: Cluster, phase: Phase
    ) -> tuple[expert_traffic.LayerTimes, ...]:
        """Price a scheme on the paper's GPUs, seed by seed."""
        moe, all_to_all = hardware(TRACES[source.trace], cluster)
        return tuple(
            expert_traffic.layer_times(traffic, moe, all_to_all, prompts=phase == "prefill")
            for traffic in self.measured(source, scheme, cluster, phase)
        )


def requests_of(trace: RoutingTrace, calibration: bool | None, domain: str | None) -> Ints:
    """Return a trace's requests of one split (None: of both) and domain."""
    mine = np.ones(trace.n_requests, np.bool_)
    if calibration is not None:
        mine &= trace.is_calibration == calibration
    if domain is not None:
        mine &= trace.domain == trace.domains.index(domain)
    return np.flatnonzero(mine)


def replica_choice(word: str) -> ReplicaChoice:
    """Return a replica choice by name."""
    return registry.replica_choice(word, PolicyContext(1, np.random.default_rng(0)))


def calibration_of(trace: RoutingTrace, requests: Ints) -> CalibrationSet:
    """Return any requests of a trace as those that a placement is fitted on."""
    return CalibrationSet(
        counts=None,
        decode_activation=trace.decode_activation(requests),
        domain=trace.domain[requests],
        domains=trace.domains,
        requests=requests,
        trace_checksum=trace.manifest.checksum,
        trace=trace,
    )


def place(
    trace: RoutingTrace,
    calibration: CalibrationSet,
    word: str,
    cluster: Cluster,
    seed: int,
    moe: RankMoE | None = None,
    all_to_all: AllToAll | None = None,
) -> Placement:
    """Place the experts of all layers of a trace on a cluster; the last two are their times."""
    rng = np.random.default_rng(seed)
    context = PolicyContext(1, rng, calibration, rank_moe=moe, all_to_all=all_to_all)
    size = trace.n_layers, trace.n_experts, cluster.n_ranks
    group = ExpertGroup((0,), *size, n_nodes=cluster.n_nodes)
    return registry.placement_policy(word, context).place(group)


@cache
def hardware(model: str, cluster: Cluster) -> tuple[RankMoE, AllToAll]:
    """Return the MoE table of one GPU and the all-to-all of the paper's cluster."""
    gpu = gpu_of(cluster)
    step_time = build_step_time_model(
        model,
        gpu,
        max_num_seqs=256,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        parallelism=Parallelism(1, True, cluster.n_ranks),
    )
    moe = step_time.rank_moe(step_time.n_experts, 8192 * step_time.model.top_k)
    all_to_all = build_all_to_all(
        step_time.model, gpu, "deepep_ht", cluster.n_ranks, gpus_per_node=cluster.gpus_per_node
    )
    return moe, all_to_all
