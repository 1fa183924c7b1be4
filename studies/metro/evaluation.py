"""METRO's evaluation: all its figures by name."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from eldr_sim.charts import bars, lines
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.flops import activation_share, decode_intensity, gpu_intensity
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.outputs import process_folder
from eldr_sim.planning.studies.figures import Claim, Reproduction, Runner
from eldr_sim.traces.routing.format import REFERENCE_TRACE, RoutingTrace, open_trace
from eldr_sim.traces.routing.synthetic.presets import preset_model
from eldr_sim.traces.routing.synthetic.synthesize import synthesize
from studies.metro import pareto, results, routing
from studies.metro.choices import choices, drift, migration
from studies.metro.locality import locality
from studies.metro.results import Case, Dataset, Setup
from studies.metro.routing import Routing
from studies.metro.tiles import tiles

_REAL_TRACE = "qwen3-30b-a3b"


class _Traces:
    """Routing traces of the set-ups; synthetic ones are made when asked for, in a folder."""

    def __init__(self, quick: bool) -> None:
        self.path = process_folder("metro")
        self._requests = (48, 32) if quick else (192, 96)

    @cache  # noqa: B019 - as long as the command lives
    def preset(self, model: str, domain: str) -> RoutingTrace:
        """Draw a trace of a preset with one domain."""
        drawn = preset_model(model, domains=[domain])
        return self._draw(drawn, f"{model}-{domain}")

    @cache  # noqa: B019
    def skewed(self, skew: float) -> RoutingTrace:
        """Draw a trace of Qwen3-30B's preset, the experts' shares of the load to such a power."""
        own = {"popularity": skew}
        drawn = preset_model("Qwen3-30B-A3B", domains=["code"], n_layers=16, settings=own)
        return self._draw(drawn, f"skew-{skew:g}")

    def _draw(self, model: Any, name: str) -> RoutingTrace:
        serving, calibration = self._requests
        return synthesize(
            model, self.path / name, requests=serving, calibration=calibration,
            prompt_len=(64, 64), output_len=(128, 128), seed=0,
        )  # fmt: skip

    def of(self, setup: Setup, dataset: Dataset) -> list[Routing]:
        """Return every routing that stands for a dataset on a model."""
        domain, model, n = dataset.domain, setup.model, setup.n_gpus
        preset = self.preset(model, domain)
        routings = [Routing(f"preset {model}, {domain}", model, n, preset, domain)]
        if load_model(model).n_experts == 128 and load_model(model).top_k == 8:
            embedded = open_trace(REFERENCE_TRACE)
            routings.append(Routing(f"embedded, {domain}", model, n, embedded, domain))
        if model == "Qwen3-30B-A3B":
            served = open_trace(_REAL_TRACE)
            routings.append(Routing("recorded Qwen3-30B", model, n, served, "sharegpt"))
        return routings

    def case(self, setup: Setup, dataset: Dataset, own: Routing, shrink: int) -> Case:
        """Return a case with the log of its requests."""
        log = results.write_log(dataset, setup.waves * setup.in_flight, shrink, self.path)
        return Case(setup, dataset, own, log)


def figures(runner: Runner, quick: bool) -> dict[str, Callable[[], Reproduction]]:
    """Return the functions that reproduce each figure, and what the paper does not show."""
    traces = _Traces(quick)
    shrink, n_batches = (8, 10) if quick else (1, 40)
    ratios = (1.0, 1.5) if quick else results.RATIOS
    real = results.REAL

    def every(setup: Setup) -> list[Routing]:
        found = [own for dataset in setup.datasets for own in traces.of(setup, dataset)]
        return list({own.name: own for own in found}.values())

    def cases(setup: Setup, all_routings: bool) -> list[Case]:
        return [
            traces.case(setup, dataset, own, shrink)
            for dataset in setup.datasets
            for own in traces.of(setup, dataset)[: None if all_routings else 1]
        ]

    @cache
    def figure_9() -> Reproduction:
        return results.figure_9(runner, cases(real, True), ratios)

    @cache
    def figure_10() -> Reproduction:
        chosen = [case for setup in results.SIMULATED for case in cases(setup, False)]
        return results.figure_10(runner, chosen, (1.0, 1.125, 1.5) if not quick else ratios)

    def recorded() -> Case:
        return traces.case(real, real.datasets[0], traces.of(real, real.datasets[0])[-1], shrink)

    def simulated() -> list[tuple[Setup, Routing]]:
        return [(s, traces.of(s, d)[0]) for s in results.SIMULATED for d in s.datasets]

    deepseek = results.SIMULATED[1]

    def five() -> list[Routing]:
        skewed = Routing("experts' shares squared", real.model, 8, traces.skewed(2.0), "code")
        return [*traces.of(real, real.datasets[0])[1:], traces.of(real, real.datasets[1])[1],
                traces.of(deepseek, deepseek.datasets[0])[0], skewed]  # fmt: skip

    return {
        "figure_1": lambda: results.figure_1([figure_9(), figure_10()]),
        "figure_3": figure_3,
        "figure_5": lambda: results.figure_5(runner, recorded(), (8, 16, 32)),
        "figure_6": lambda: figure_6(traces.of(real, real.datasets[0]), n_batches),
        "figure_8": lambda: routing.figure_8([*every(real), *every(deepseek)], n_batches),
        "figure_9": figure_9,
        "figure_10": figure_10,
        "figure_11": lambda: results.figure_11(runner, recorded(), ratios),
        "figure_12": lambda: pareto.figure_12(simulated(), n_batches),
        "figure_13": lambda: pareto.figure_13(
            results.SIMULATED[0],
            traces.of(results.SIMULATED[0], results.SIMULATED[0].datasets[0])[0], n_batches,
        ),
        "forms": lambda: pareto.forms(simulated(), recorded(), n_batches),
        "tiles": lambda: tiles(recorded(), n_batches),
        "choices": lambda: choices(
            five(), ((32, False), (256, False), (1024, False), (4096, True))
        ),
        "migration": lambda: migration(five(), (32, 256)),
        "drift": lambda: drift(runner, range(2 if quick else 5), 1 if quick else 4),
        "locality": lambda: locality(runner, quick),
    }  # fmt: skip


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner of the evaluation."""
    return Runner({"frontend": "none", "trace": REFERENCE_TRACE}, progress=progress)


def figure_3() -> Reproduction:
    """FLOPs a byte of decode steps in closed form against those of the GPUs."""
    batches = [2**i for i in range(11)]
    models = [load_model(name) for name in ("Qwen3-30B-A3B", "DeepSeek-V3")]
    gpus = {name: load_gpu(name) for name in ("H100", "B200")}
    rows: list[dict[str, Any]] = [
        {"model": model.name, "batch": batch}
        | {"flops_a_byte": float(decode_intensity(model, batch))}
        | {"activation_share_%": 100 * float(activation_share(model, batch))}
        for model in models
        for batch in batches
    ]
    last = [row for row in rows if row["batch"] == batches[-1]]
    above = [gpu_intensity(gpu) / row["flops_a_byte"] for gpu in gpus.values() for row in last]
    least = min(gpu_intensity(gpu) for gpu in gpus.values())
    small = max(row["flops_a_byte"] for row in rows if row["batch"] == 2)
    share = max(row["activation_share_%"] for row in last)
    why = (
        "whole models with expected experts of uniform routing, weights alone, BF16 FLOPs; the "
        "paper's own calculation is not given"
    )
    claims = [
        Claim("batch 1,024: the GPUs' FLOPs/byte over the models', least", 1.47, 1.47, min(above),
              "x", 0.1, why),
        Claim("batch 1,024: the same, most", 3.0, 3.0, max(above), "x", 0.2, why),
        Claim("small batches: two orders of magnitude (ours: batch 2, least)", 100, 1000,
              least / small, "x", 10.0, why),
        Claim("activations' share of the experts' bytes at batch 1,024, below", 0.0, 0.6, share,
              "%", 0.02, "a token's hidden state is read and written once in BF16", neutral=None),
    ]  # fmt: skip

    said = ", ".join(f"{name} {gpu_intensity(gpu):.0f}" for name, gpu in gpus.items())
    draw = lines(
        rows, "batch", "flops_a_byte", "model", xscale="log", yscale="log", title=f"GPUs: {said}"
    )
    title = "operational intensity of decode steps"
    return Reproduction("figure_3", title, rows, claims, draw)


def figure_6(routings: list[Routing], n_batches: int) -> Reproduction:
    """What an optimal choice takes against its layer: the paper's by maximum flow, ours exact on
    one core, along paths of ranks, beside METRO's greedy one."""
    rows: list[dict[str, Any]] = []
    for own in routings:
        moe = routing.rank_times(own.model, "A100-40GB", own.n_ranks, 24, 1024)
        for ratio in routing.RATIOS:
            placement, batches = own.placement(ratio), own.batches(256, n_batches)
            layer_us = routing.route(own, placement, "even", batches, moe).moe_us
            count_us = _microseconds(own, 1.0, "even", batches)
            for choice in ("metro", "metro_sorted", "optimal"):
                ours = _microseconds(own, ratio, choice, batches) - count_us
                rows.append(
                    {"routing": own.name, "ratio": ratio, "choice": choice, "layer_us": layer_us}
                    | {"this_machine_us": max(ours, 0.0)}
                )
    layers = [row["layer_us"] for row in rows]
    best = [row["this_machine_us"] for row in rows if row["choice"] == "optimal"]
    greedy = [row["this_machine_us"] for row in rows if row["choice"] == "metro"]
    claims = [
        Claim("maximum flow on a CPU (116.3 us) against our layer, least", 31.4, 31.4,
              100 * 116.3 / max(layers), "%", 5.0, f"layers of {min(layers):.0f} to "
              f"{max(layers):.0f} us; the paper's are 281 to 370", neutral=None),
        Claim("maximum flow on a GPU (290 us) against our layer, least", 86.4, 86.4,
              100 * 290.0 / max(layers), "%", 10.0, "as above", neutral=None),
        Claim("the exact choice on one core of this machine, a layer, most (paper: maximum flow)",
              116.3, 128.8, max(best), "us", 1.0,
              f"{min(best):.1f} to {max(best):.1f} us, the greedy one {min(greedy):.1f} to "
              f"{max(greedy):.1f}: what is prohibitive is maximum flow, not the optimum"),
    ]  # fmt: skip

    draw = bars(rows, ("routing", "ratio"), "this_machine_us", "choice", scale="log")
    return Reproduction("figure_6", "what an optimal choice takes", rows, claims, draw)


def _microseconds(own: Routing, ratio: float, choice: str, batches: Any) -> float:
    """Time counting and choosing on this machine, us a layer, the fastest of five passes."""
    placement, seconds = own.placement(ratio), []
    for _ in range(5):
        start = time.perf_counter()
        routing.route(own, placement, choice, batches)
        seconds.append(time.perf_counter() - start)
    return 1e6 * float(np.min(seconds)) / (len(batches) * len(own.load))
