"""MoE layers to time behind the gate (top-k, sort, both GEMMs, weighted sum): our Triton kernel,
torch on the CPU, vLLM's ``fused_experts``. The gate is measured as a GEMM."""

from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from typing import Any, Protocol

import numpy as np

from eldr_sim.errors import InputError, needed
from eldr_sim.kernel_profiles.profile.device import Device
from eldr_sim.kernel_profiles.profile.grid import MoEPoint, forced_logits, forced_routing
from eldr_sim.kernel_profiles.profile.timing import Call, Mode, Timing, require_torch, rotation
from eldr_sim.kernel_profiles.profile.weights import ExpertWeights, MoEShape, reference_moe

SEEDS = 3  #: draws of routing, weights and activations that a figure is the median over

ERROR_BOUND = {"bfloat16": 0.01, "fp8_block": 0.015, "mxfp4": 0.015}
"""Largest relative error (norm of the difference over the norm) against float64, by dtype.

Activations are rounded to bfloat16 three times (between the GEMMs, by pair, at the end), each
time by up to 2 ** -8; stored weights are widened exactly."""


class MoEKernel:
    """A fused MoE layer of one shape on one device, with nothing to choose."""

    kernel_source: str
    framework: str

    def tune(self, bench: "MoEBench") -> dict[str, Any]:
        """Choose block sizes and the like; returns what was chosen, as plain values."""
        return {}

    def restore(self, tuned: dict[str, Any]) -> None:
        """Choose what :meth:`tune` returned earlier."""

    def layer(self, batch: int) -> "Layer":
        """The layer for a batch."""
        raise NotImplementedError


class Layer(Protocol):
    """A layer for one batch; results are overwritten by the next run."""

    def poison(self) -> None:
        """Spoil what a run must write, where anything is kept between runs."""
        return

    def __call__(self, x: Any, logits: Any, weights: ExpertWeights) -> Any:
        """Run."""


class TorchLayer(Layer):
    """A loop over the experts that are chosen, as vLLM's CPU back end runs a MoE layer in torch."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape

    def __call__(self, x: Any, logits: Any, weights: ExpertWeights) -> Any:
        """Sort pairs by expert, run each expert's tokens together, add up by weight."""
        torch = require_torch()
        shape = self.shape
        best, ids = logits.topk(shape.top_k, dim=1)
        share = best.softmax(dim=1)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=shape.n_experts)[: shape.owned].tolist()
        rows = x[order[: sum(counts)] // shape.top_k]
        results = torch.zeros((len(flat), shape.hidden), dtype=x.dtype, device=x.device)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                both = torch.nn.functional.linear(
                    rows[start : start + count], weights.up.stored[expert]
                )
                gate, value = both.chunk(2, dim=1)
                inner = torch.nn.functional.silu(gate).mul_(value)
                results[order[start : start + count]] = torch.nn.functional.linear(
                    inner, weights.down.stored[expert]
                )
                start += count
        pairs = results.view(len(x), shape.top_k, shape.hidden)
        return torch.einsum("bkh,bk->bh", pairs, share.to(x.dtype))


class TorchMoE(MoEKernel):
    """torch's kernels, expert after expert."""

    kernel_source = "torch_expert_loop"

    def __init__(self, shape: MoEShape, device: Device) -> None:
        if shape.dtype != "bfloat16":
            raise InputError("moe", f"{shape.dtype} experts in torch", "bfloat16")
        self.shape = shape
        self.framework = f"torch {require_torch().__version__.split('+')[0]}"

    def layer(self, batch: int) -> Layer:
        """The layer for a batch."""
        return TorchLayer(self.shape)


class TritonKernel(MoEKernel):
    """The layer of :mod:`~eldr_sim.kernel_profiles.profile.triton_moe`."""

    def __init__(self, shape: MoEShape, device: Device) -> None:
        require_torch()
        triton = needed("triton", "moe", "pip install 'eldr-sim[profile]'")
        from eldr_sim.kernel_profiles.profile import triton_moe

        self._module = triton_moe
        self.shape, self.device = shape, device
        self.kernel_source = triton_moe.KERNEL_SOURCE
        self.framework = f"triton {triton.__version__}"
        self.tiles = {
            "decode": (triton_moe.DECODE_TILES[0],) * 2,
            "prefill": (triton_moe.PREFILL_TILES[0],) * 2,
        }

    def layer(self, batch: int) -> Layer:
        """The layer for a batch, with the tiles of its class."""
        tiles = self.tiles[self._module.tile_class(batch, self.shape)]
        layer: Layer = self._module.TritonMoE(
            self.shape, batch, self.device.torch_device, tiles[0], tiles[1]
        )
        return layer

    def restore(self, tuned: dict[str, Any]) -> None:
        """Take the tiles that :meth:`tune` returned earlier."""
        for name, (up, down) in tuned.items():
            self.tiles[name] = (self._module.Tile(*up), self._module.Tile(*down))

    def tune(self, bench: "MoEBench") -> dict[str, Any]:
        """Time every tile at one point a class (half of the experts at 64 tokens, all at 4096),
        GEMM by GEMM, by the whole layer's time; refused ones are left out."""
        for name, tiles, batch, share in (
            ("decode", self._module.DECODE_TILES, 64, 2),
            ("prefill", self._module.PREFILL_TILES, 4096, 1),
        ):
            distinct = min(max(self.shape.owned // share, self.shape.top_k), batch)
            point = MoEPoint(batch, distinct)
            best = self.tiles[name]
            for gemm in (0, 1):
                times = {}
                for tile in tiles:
                    pair = (tile, best[1]) if gemm == 0 else (best[0], tile)
                    if pair[0].block_m != pair[1].block_m:
                        if gemm == 1:
                            continue
                        pair = (tile, tile)
                    self.tiles[name] = pair
                    try:
                        times[pair] = bench.time(point, "graph", seeds=1).median_s
                    except Exception as error:
                        if type(error).__name__ != "OutOfResources":
                            raise
                if times:
                    best = min(times, key=times.__getitem__)
            self.tiles[name] = best
        return {name: [list(astuple(tile)) for tile in pair] for name, pair in self.tiles.items()}


class _VllmLayer(Layer):
    def __init__(self, shape: MoEShape) -> None:
        from vllm.model_executor.layers.fused_moe import fused_experts, fused_topk

        self.shape, self._experts, self._topk = shape, fused_experts, fused_topk

    def __call__(self, x: Any, logits: Any, weights: ExpertWeights) -> Any:
        weight, ids = self._topk(x, logits, self.shape.top_k, True)[:2]
        return self._experts(x, weights.up.stored, weights.down.stored, weight, ids)


class VllmMoE(MoEKernel):
    """vLLM's ``fused_experts``, with the tuned configuration that vLLM finds for the device."""

    kernel_source = "vllm_fused_experts"

    def __init__(self, shape: MoEShape, device: Device) -> None:
        vllm = needed("vllm", "moe-vllm", "pip install vllm")
        if device.is_cpu:
            raise InputError("moe-vllm", "fused_experts is a Triton kernel", "--device cuda")
        if shape.dtype != "bfloat16" or shape.n_ranks > 1:
            raise InputError("moe-vllm", "measured with bfloat16 experts on one rank only")
        self.shape, self.framework = shape, f"vllm {vllm.__version__}"

    def layer(self, batch: int) -> Layer:
        """The layer for a batch."""
        return _VllmLayer(self.shape)


class MoEBench:
    """One MoE layer's weights on one device, and how to time a kernel on them."""

    def __init__(self, shape: MoEShape, device: Device, kernel: MoEKernel) -> None:
        self.shape, self.device, self.kernel = shape, device, kernel
        layer_bytes = shape.owned * shape.expert_bytes
        _, copies = rotation(1.0, layer_bytes, device.cache_bytes)
        self.weights = [
            ExpertWeights.random(shape, device.torch_device, seed) for seed in range(copies)
        ]

    def rounds(
        self, point: MoEPoint, seeds: int = SEEDS, rotate: bool = True
    ) -> Sequence[Sequence[Call]]:
        """Calls at a point, a round a seed, which walks through copies and experts so that each
        comes back late; without ``rotate`` the same experts."""
        torch = require_torch()
        shape, device = self.shape, self.device.torch_device
        touched = point.distinct * shape.expert_bytes
        calls, _ = rotation(touched, shape.owned * shape.expert_bytes, self.device.cache_bytes)
        layer = self.kernel.layer(point.batch)
        rounds = []
        for seed in range(seeds):
            rng = np.random.default_rng([seed, point.batch, point.distinct])
            order = rng.permutation(shape.owned)
            first = np.arange(shape.owned)
            ids = forced_routing(
                point, shape.n_experts, shape.top_k, rng, n_ranks=shape.n_ranks, experts=first
            )
            values = rng.standard_normal((point.batch, shape.hidden), dtype=np.float32)
            x = torch.from_numpy(values).to(device, torch.bfloat16)  # fresh from the layer before
            named = np.arange(shape.n_experts)
            made: list[Call] = []
            for index in range(calls if rotate else 1):
                named[: shape.owned] = np.roll(
                    order, -(index // len(self.weights)) * point.distinct
                )
                logits = forced_logits(named[ids].astype(np.int32), shape.n_experts, rng)
                copy = self.weights[index % len(self.weights)]
                made.append(partial(layer, x, torch.from_numpy(logits).to(device), copy))
            rounds.append(made if rotate else made * calls)
        return rounds

    def time(self, point: MoEPoint, mode: Mode, seeds: int = SEEDS, rotate: bool = True) -> Timing:
        """Time the layer at a point."""
        return self.device.timer.time(self.rounds(point, seeds, rotate), mode)

    def error(self, point: MoEPoint) -> float:
        """Relative error against float64 at a point, after spoiling what the run must write. Raises
        InputError: the error exceeds :data:`ERROR_BOUND`: the kernel is wrong on this device."""
        torch = require_torch()
        rng = np.random.default_rng([point.batch, point.distinct, 77])
        shape, device = self.shape, self.device.torch_device
        ids = forced_routing(point, shape.n_experts, shape.top_k, rng, n_ranks=shape.n_ranks)
        logits = torch.from_numpy(forced_logits(ids, shape.n_experts, rng)).to(device)
        values = rng.standard_normal((point.batch, shape.hidden), dtype=np.float32)
        x = torch.from_numpy(values).to(device, torch.bfloat16)
        layer = self.kernel.layer(point.batch)
        layer.poison()
        out = layer(x, logits, self.weights[0]).double()
        expected = reference_moe(x, logits, self.weights[0], shape)
        error = float((out - expected).norm() / expected.norm())
        if not error <= ERROR_BOUND[shape.dtype]:
            problem = f"{self.kernel.kernel_source} errs by {error:.3g} at {point} in {shape.dtype}"
            raise InputError("moe", problem, f"{ERROR_BOUND[shape.dtype]} at most")
        return error
