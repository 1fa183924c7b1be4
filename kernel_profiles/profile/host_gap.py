"""The host gap: a whole decode step of a stack of layers against the sum of its kernels.

Two stacks of different depth are timed whole, and each of their kernels alone. What a step takes
beyond its kernels is a cost per step plus one per layer; the depth of the model is put in. The
engine's own work (scheduling, sampling, detokenisation) is not in it: an engine tells that."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eldr_sim.kernel_profiles.kernels.moe_latency import uniform_distinct
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.profile import attention, dense
from eldr_sim.kernel_profiles.profile.device import Device
from eldr_sim.kernel_profiles.profile.grid import MoEPoint, forced_logits, forced_routing
from eldr_sim.kernel_profiles.profile.moe import MoEBench, MoEKernel
from eldr_sim.kernel_profiles.profile.timing import Timing, require_torch
from eldr_sim.kernel_profiles.profile.weights import ExpertWeights, MoEShape
from eldr_sim.kernel_profiles.tables.format import attention_shape

BATCHES = (1, 8, 32)
CONTEXT = 512
_LEAST_S = 1e-9  # a table's times are positive: where the parts are slower than the whole


@dataclass(frozen=True)
class Gap:
    """The gap of a model's decode step."""

    #: Intercept and slope over the depth of the stack; may be negative.
    per_step_s: float
    per_layer_s: float
    n_layers: int  #: depth of the model
    #: ``steps_s``, ``parts_s``: by depth: whole step, and the sum of its kernels.
    steps_s: dict[int, float]
    parts_s: dict[int, float]
    repeats: int

    @property
    def gap_s(self) -> float:
        """At the model's depth; may be negative."""
        return self.per_step_s + self.n_layers * self.per_layer_s

    @property
    def timing(self) -> Timing:
        """As a table's row: no less than a nanosecond."""
        gap = max(self.gap_s, _LEAST_S)
        return Timing(gap, gap, gap, self.repeats)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"gap_s": self.gap_s}


def expected_point(batch: int, shape: MoEShape) -> MoEPoint:
    """Return the point of a batch of tokens that pick uniformly."""
    distinct = round(float(uniform_distinct(batch, shape.n_experts, shape.top_k)))
    return MoEPoint(batch, max(distinct, shape.top_k))


class DecodeStack:
    """A decode step of some layers: embedding, layers with full attention, lm_head. ``shape``: of
    the MoE layer; ``batch``, ``context``: sequences, and tokens that each attends to."""

    def __init__(
        self,
        model: ModelDims,
        shape: MoEShape,
        n_layers: int,
        batch: int,
        context: int,
        device: Device,
        kernel: MoEKernel,
    ) -> None:
        torch = require_torch()
        self.model, self.shape, self.torch = model, shape, torch
        where = device.torch_device

        def tensor(*size: int) -> Any:
            return torch.randn(*size, dtype=torch.bfloat16, device=where).mul_(0.02)

        hidden, dim = model.hidden_size, model.head_dim
        heads = model.n_heads + 2 * model.n_kv_heads
        self.tokens = torch.randint(model.vocab_size, (batch,), device=where)
        self.embedding = tensor(model.vocab_size, hidden)
        self.head = tensor(model.vocab_size, hidden)
        self.elementwise = dense.Elementwise(model, batch, device)
        self.moe = kernel.layer(batch)
        point = expected_point(batch, shape)
        self.layers = []
        for index in range(n_layers):
            rng = np.random.default_rng([index, batch])
            ids = forced_routing(point, shape.n_experts, shape.top_k, rng)
            self.layers.append(
                {
                    "qkv": tensor(heads * dim, hidden),
                    "out": tensor(hidden, model.n_heads * dim),
                    "gate": tensor(shape.n_experts, hidden),
                    "forced": torch.from_numpy(forced_logits(ids, shape.n_experts, rng)).to(
                        where, torch.bfloat16
                    ),
                    "key": tensor(batch, model.n_kv_heads, context, dim),
                    "value": tensor(batch, model.n_kv_heads, context, dim),
                    "experts": ExpertWeights.random(shape, where, index),
                }
            )

    def __call__(self) -> Any:
        """Run a step; the gate is computed, and its outcome overruled by the forced logits."""
        torch, model, part = self.torch, self.model, self.elementwise
        linear = torch.nn.functional.linear
        batch = len(self.tokens)
        part.residual.zero_()
        part.x = self.embedding[self.tokens]
        for layer in self.layers:
            part.qkv = linear(part.norm(), layer["qkv"]).view(batch, part.heads, model.head_dim)
            query = part.rotate()[:, : model.n_heads]
            query = query.reshape(batch, model.n_kv_heads, -1, model.head_dim)
            out = attention.attend(query, layer["key"], layer["value"])
            part.x = linear(out.reshape(batch, -1), layer["out"])
            x = part.norm()
            logits = torch.addmm(layer["forced"], x, layer["gate"].T, alpha=1e-6)
            part.x = self.moe(x, logits, layer["experts"])
        x = torch.nn.functional.rms_norm(part.x, (model.hidden_size,), part.weight, dense.EPSILON)
        return linear(x, self.head)


def measure_host_gap(
    model: ModelDims, shape: MoEShape, device: Device, kernel: MoEKernel
) -> dict[int, Gap]:
    """Time stacks of two depths whole and in parts, by batch."""
    mode = device.timer.modes[0]
    depths = (1, 2) if model.n_layers < 4 else (2, min(8, model.n_layers))
    heads = model.n_heads + 2 * model.n_kv_heads
    dim, hidden = model.head_dim, model.hidden_size
    bench = MoEBench(shape, device, kernel)
    shape_of = attention_shape(model.n_heads, model.n_kv_heads, dim, 0)
    gaps = {}
    for batch in BATCHES:
        point = expected_point(batch, shape)
        layer_rounds = [
            dense.gemm_rounds(batch, heads * dim, hidden, device),
            dense.gemm_rounds(batch, hidden, model.n_heads * dim, device),
            dense.gemm_rounds(batch, shape.n_experts, hidden, device),
            dense.elementwise_rounds(model, batch, device),
            attention.decode_rounds(shape_of, batch, CONTEXT, device),
            bench.rounds(point),
        ]
        per_layer = sum(device.timer.time(rounds, mode).median_s for rounds in layer_rounds)
        head = dense.gemm_rounds(batch, model.vocab_size, hidden, device)
        once = device.timer.time(head, mode).median_s
        steps, parts, repeats = {}, {}, 0
        for depth in depths:
            stack = DecodeStack(model, shape, depth, batch, CONTEXT, device, kernel)
            timing = device.timer.time([[stack]], mode)
            steps[depth], repeats = timing.median_s, timing.repeats
            parts[depth] = once + depth * per_layer
        low, high = depths
        slope = ((steps[high] - parts[high]) - (steps[low] - parts[low])) / (high - low)
        start = steps[low] - parts[low] - low * slope
        gaps[batch] = Gap(start, slope, model.n_layers, steps, parts, repeats)
    return gaps
