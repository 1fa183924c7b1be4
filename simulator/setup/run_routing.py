"""The routing trace that a run replays, and what a dense model does not support."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.policies import registry
from eldr_sim.simulator.setup.config.requests import RoutingConfig
from eldr_sim.simulator.setup.replay import fit_trace
from eldr_sim.traces.requests.texts import PromptSource, draw_texts, wanted_domains
from eldr_sim.traces.routing.forced import forced
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from eldr_sim.traces.routing.synthetic.drawn import Shape, drawn_trace
from eldr_sim.traces.routing.synthetic.presets import Band


def texts_of(workload: str, routing: RoutingConfig, trace: RoutingTrace | None) -> PromptSource:
    """Return the texts that a run's requests are dealt, the trace's or drawn ones."""
    return draw_texts(_domains(workload, routing)) if trace is None else trace.texts


def routing_of(workload: str, routing: RoutingConfig, model: ModelDims) -> RoutingTrace:
    """Open a run's trace as a model replays it; not done again unless the folder has changed."""
    if model.is_dense:
        raise InputError("model", f"{model.name} is dense: no experts to route", "a MoE model")
    trace = _recorded(workload, routing, model)
    return trace if routing.routing == "real" else _forced(trace, routing.routing)


def servable(name: str, policies: Sequence[str]) -> list[str]:
    """Return the decode policies that a model can have; raises InputError if none is left."""
    model = load_model(name)
    needy = [word for word in policies if registry.needs("policy", word).routing]
    if needy and len(needy) == len(policies) and model.is_dense:
        check_need("policy", needy[0], model)
    return [word for word in policies if not (model.is_dense and word in needy)]


def check_need(field: str, word: str, model: ModelDims) -> None:
    """Raise InputError where a dense model's run names a policy that needs routing."""
    if registry.needs(field, word).routing:
        problem = f"{word!r} needs experts, and {model.name} is dense"
        raise InputError(field, problem, "a policy that needs none (eldr-sim policies)")


def _recorded(workload: str, routing: RoutingConfig, model: ModelDims) -> RoutingTrace:
    if routing.trace is None:
        return _drawn(model, _domains(workload, routing), routing.routing_band)
    if routing.routing_band != "middle":
        raise InputError(
            "routing_band", "a routing band has no effect with a recorded trace", "one of the two"
        )
    manifest = Path(routing.trace) / "manifest.json"
    stamp = os.stat(manifest).st_mtime if manifest.exists() else 0.0
    return _fitted(routing.trace, stamp, model)


def _domains(workload: str, routing: RoutingConfig) -> tuple[tuple[str, float], ...]:
    return wanted_domains(workload, routing.domain_mix, routing.domain_mix_end)


@lru_cache(maxsize=4)
def _opened(path: str, stamp: float) -> RoutingTrace:
    return open_trace(path)


@lru_cache(maxsize=4)
def _fitted(path: str, stamp: float, model: ModelDims) -> RoutingTrace:
    return fit_trace(_opened(path, stamp), model)


@lru_cache(maxsize=4)
def _drawn(model: ModelDims, domains: tuple[tuple[str, float], ...], band: Band) -> RoutingTrace:
    shape = Shape(model.n_moe_layers, model.n_experts, model.top_k)
    return fit_trace(drawn_trace(model.name, shape, domains, band=band), model)


_forced = lru_cache(maxsize=2)(forced)
