"""What the GPUs of a worker send each other in a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats
from eldr_sim.kernel_profiles.gpus import GPU
from eldr_sim.kernel_profiles.kernels import bounds, roofline
from eldr_sim.kernel_profiles.kernels.all_reduce import (
    CUSTOM_ALL_REDUCE_BYTES,
    LEAST_BYTES,
    ONE_KERNEL,
    fused_tokens,
    norm_reduces,
)
from eldr_sim.kernel_profiles.kernels.all_to_all import NETWORK_EFFICIENCY, NETWORK_LATENCY_S
from eldr_sim.kernel_profiles.kernels.kernel_latency import CollectiveLatency
from eldr_sim.kernel_profiles.kernels.sibling_tables import gpu_table
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import NODE_GPUS, Parallelism
from eldr_sim.kernel_profiles.tables import format
from eldr_sim.kernel_profiles.tables.library import Engine


class Collectives:
    """All-reduces and gathers between the GPUs of a worker, in a node and between nodes."""

    def __init__(
        self,
        model: ModelDims,
        gpu: GPU,
        parallelism: Parallelism,
        tables: Sequence[format.LatencyTable],
        engine: Engine,
    ) -> None:
        """Find the tables. ``model``: the part of one GPU; ``tables``: the user's."""
        self.model, self.gpu = model, gpu
        self.n_gpus = parallelism.tensor_parallel_size
        self.shared = parallelism.data_parallel_size > 1
        self.norm_reduces = norm_reduces(engine)
        # SGLang pads the sums of norms since 0.5.9 (its pull request 16483), vLLM does not.
        self.least_bytes = LEAST_BYTES if engine.name == "vllm" or engine.before(0, 5, 9) else 0
        self.provenance: dict[str, dict[str, Any]] = {}
        self.warnings: list[str] = []
        self.tables: list[format.LatencyTable] = []  #: which are read
        self._in_a_node = min(self.n_gpus, NODE_GPUS)
        #: Most tokens of a step whose all-reduces are one kernel with the norms.
        self.fused_tokens = 0
        if 1 < self.n_gpus <= NODE_GPUS and not self.shared:
            self.fused_tokens = fused_tokens(model, gpu, self.n_gpus, engine)
        self._latency: dict[str, CollectiveLatency] = {}
        wanted = [("custom", "bfloat16", engine), ("nccl", "float16", engine)]  # 2-byte elements
        if self.fused_tokens:
            wanted.insert(0, ("fused", "bfloat16", ONE_KERNEL))
        for name, dtype, whose in wanted if self._in_a_node > 1 else ():
            table = gpu_table("collective", gpu, dtype=dtype, engine=whose, extra=tables)
            if table is not None:
                self._read(name, table)
        if "fused" not in self._latency:
            self.fused_tokens = 0
        others = self.n_gpus // NODE_GPUS - 1
        if others > 0:
            origin = f"NICs of {gpu.name}: line rate"
            self.provenance["network"] = format.provenance_of("derived", origin)

    @property
    def measured(self) -> bool:
        """Whether a table says what GPUs take to exchange large messages."""
        return self._in_a_node == 1 or "nccl" in self._latency

    def _read(self, name: str, table: format.LatencyTable) -> None:
        if name == "fused" and table.metadata.framework.split()[0] != ONE_KERNEL.name:
            return
        latency = CollectiveLatency.from_table(table)
        if ("all_reduce", self._in_a_node) in latency.curves:
            self._latency[name] = latency
            self.tables.append(table)
            self.warnings += latency.warnings["all_reduce", self._in_a_node]

    def step_s(self, rows: Floats) -> Floats:
        """Return what a step of ``rows`` tokens takes, s. All-reduces of hidden states: one after
        the embedding and two in every layer. Where engines share experts, the outputs of these are
        combined and then gathered in place of the second. Norms over the heads of all GPUs take
        one more (sgl-project/sglang pull request 14416, vllm-project/vllm 31493)."""
        if self.n_gpus == 1:
            return np.zeros_like(rows)
        model = self.model
        gathers = model.n_moe_layers if self.shared else 0
        message = 2 * model.hidden_size * rows
        reduces = 1 + 2 * model.n_layers - model.n_bare_layers - gathers
        total = reduces * self._all_reduce_s(message, rows <= self.fused_tokens)
        if model.qk_norm == "full_width":  # sums of squares of queries and keys, float32
            sums = self._all_reduce_s(8 / self.norm_reduces * rows)
            total = total + self.norm_reduces * model.n_full_layers * sums
        if gathers:
            total = total + gathers * self.gather_s(message)
        return np.where(rows > 0, total, 0.0)

    def gather_s(self, n_bytes: Floats) -> Floats:
        """Return what an all-gather of messages takes, s."""
        n_gpus = self._in_a_node
        if "nccl" in self._latency:
            seconds = self._latency["nccl"].time_s("all_gather", n_gpus, n_bytes)
        else:
            seconds = roofline.all_gather_s(self.gpu, n_gpus, n_bytes)
        least = bounds.message_s(self.gpu, n_gpus, n_bytes)
        return np.maximum(seconds, least) + self._between_nodes_s(n_bytes)

    def _all_reduce_s(self, n_bytes: Floats, fused: Any = False) -> Floats:
        """What an all-reduce takes. ``fused``: where the norm is in the same kernel."""
        n_gpus, between = self._in_a_node, 2 * self._between_nodes_s(n_bytes)
        if "nccl" in self._latency:
            seconds = self._latency["nccl"].time_s("all_reduce", n_gpus, n_bytes)
        else:
            seconds = roofline.all_reduce_s(self.gpu, n_gpus, n_bytes)
        if "custom" in self._latency:
            custom = self._latency["custom"].time_s("all_reduce", n_gpus, n_bytes)
            fits = (n_bytes >= self.least_bytes) & (n_bytes < CUSTOM_ALL_REDUCE_BYTES)
            seconds = np.where(fits, custom, seconds)
        if "fused" in self._latency:
            one = self._latency["fused"].time_s("all_reduce", n_gpus, n_bytes)
            seconds = np.where(fused, one, seconds)
        return np.maximum(seconds, bounds.message_s(self.gpu, n_gpus, n_bytes)) + between

    def _between_nodes_s(self, n_bytes: Floats) -> Floats:
        """What an engine of several nodes adds to a gather or a reduce-scatter inside them. GPUs of
        the same place exchange their parts of the message around a ring of the nodes, at the line
        rate of their NICs (`all_to_all.NETWORK_EFFICIENCY`)."""
        others = self.n_gpus // NODE_GPUS - 1
        if others < 1:
            return np.zeros_like(n_bytes)
        rate = NETWORK_EFFICIENCY * self.gpu.nic_bandwidth
        return np.asarray(others * (n_bytes / self.n_gpus / rate + NETWORK_LATENCY_S))
