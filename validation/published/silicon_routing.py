"""Routing of the measured runs' random prompts, which nobody recorded: uniform, or as a model's."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np

from eldr_sim.traces.routing.synthetic.drawn import Shape, nearest_preset
from eldr_sim.traces.routing.synthetic.presets import preset_model
from eldr_sim.traces.routing.synthetic.synthesize import synthesize
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation.published.silicon_rows import MeasuredModel

Routing = Literal["uniform", "drawn"]

#: Requests of a routing trace, and tokens of each that are replayed.
REQUESTS, PROMPT, OUTPUT = 32, 128, 96
#: Prompt tokens of drawn requests: a chunk of a long prompt has more kinds of tokens than 128.
_DRAWN_PROMPT = 1024


def make_routing(folder: Path, routing: Routing, target: MeasuredModel) -> Path:
    """Write a routing trace of a model, ``uniform`` or ``drawn``; returns its folder."""
    return (uniform_trace if routing == "uniform" else drawn_trace)(folder, target=target)


def uniform_trace(folder: Path, seed: int = 0, *, target: MeasuredModel) -> Path:
    """Write a routing trace whose tokens choose experts uniformly at random."""
    model = target.dims()
    rng = np.random.default_rng(seed)
    shape = (PROMPT + OUTPUT, model.n_moe_layers, model.n_experts)
    experts = [
        np.argpartition(rng.random(shape, dtype=np.float32), model.top_k)[..., : model.top_k]
        for _ in range(REQUESTS)
    ]
    write_trace(
        folder,
        experts=np.concatenate(experts),
        request_id=[str(i) for i in range(REQUESTS)],
        domain=["random"] * REQUESTS,
        prompt_len=np.full(REQUESTS, PROMPT),
        output_len=np.full(REQUESTS, OUTPUT),
        is_calibration=np.zeros(REQUESTS, bool),
        model=model.name,
        n_experts=model.n_experts,
        domains=["random"],
        captured_by="drawn uniformly, no model",
        source_data="none",
        tool_versions={},
        provenance="synthetic",
    )
    return folder


def drawn_trace(folder: Path, seed: int = 0, *, target: MeasuredModel) -> Path:
    """Write a routing trace drawn for the model, from the fit to recorded tokens nearest to it. The
    requests are of all domains in turn. Recorded tokens were not random ones: that gates are as
    uneven for these is an assumption."""
    model = target.dims()
    shape = Shape(model.n_moe_layers, model.n_experts, model.top_k)
    preset = nearest_preset(target.shipped or model.name, shape)
    synthesize(
        preset_model(preset, **asdict(shape)),
        folder,
        requests=REQUESTS,
        calibration=0,
        prompt_len=(_DRAWN_PROMPT, _DRAWN_PROMPT),
        output_len=(OUTPUT, OUTPUT),
        seed=seed,
    )
    return folder
