"""ELDR's evaluation: all its figures and tables by name."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.studies.figures import Reproduction, Runner
from eldr_sim.planning.studies.study import read_study
from eldr_sim.simulator.setup.config.requests import RoutingConfig
from eldr_sim.simulator.setup.run_routing import routing_of
from eldr_sim.traces.routing.format import REFERENCE_TRACE, RoutingTrace, open_trace
from studies.eldr import map as eldr_map
from studies.eldr import results, scaling, signature
from studies.eldr_measured.cells import long_routing

MODEL, GPU = "Qwen3-30B-A3B", "MI300X"
STUDY = read_study(Path(__file__).with_name("study.yaml"))
MODELS: tuple[str, ...] = tuple(STUDY.names["models"])
RATES: tuple[float, ...] = tuple(STUDY.names["rates"])
QUICK_RATES: tuple[float, ...] = tuple(STUDY.quick.names["rates"])
EP_RATES = (24.0, 40.0, 56.0)


def figures(runner: Runner, quick: bool) -> dict[str, Callable[[], Reproduction]]:
    """Return the functions that reproduce each figure and table, in the order of the paper."""
    rates = QUICK_RATES if quick else RATES
    ep_rates = EP_RATES[1:2] if quick else EP_RATES
    study = STUDY.shortened(quick).known(runner)

    @cache
    def trace(model: str = MODEL) -> RoutingTrace:
        """Routing of a model in all domains."""
        return routing_of("trace", RoutingConfig(), load_model(model))

    @cache
    def fits(model: str = MODEL) -> signature.Fits:
        return signature.fits_of(trace(model), n_decoders=8)  # as in the paper's figure 9

    def figure_7() -> Reproduction:
        # Only this trace has recorded gate scores.
        scored = signature.fits_of(open_trace(REFERENCE_TRACE), n_decoders=8)
        return signature.figure_7(scored, {model: fits(model) for model in MODELS})

    return {
        "figure_2": lambda: signature.figure_2(MODEL, GPU),
        "figure_3": lambda: signature.figure_3(trace()),
        "figure_4": lambda: signature.figure_4(trace()),
        "figure_7": figure_7,
        "figure_8": lambda: signature.figure_8(fits()),
        "figure_9": lambda: signature.figure_9(fits()),
        "figure_11": study["figure_11"],
        "figure_12": study["figure_12"],
        "figure_13": study["figure_13"],
        "figure_14": lambda: results.figure_14(
            runner, rates, MODELS, partial(long_routing, gate_scores=True)
        ),
        "figure_15": study["figure_15"],
        "figure_16": study["figure_16"],
        "figure_17": lambda: scaling.figure_17(runner),
        "figure_18": lambda: scaling.figure_18(runner, ep_rates),
        "table_1": lambda: scaling.table_1(runner, trace()),
        **{name: study[name] for name in ("table_2", "table_2_recorded", "figure_18_recorded")},
        "map": lambda: eldr_map.eldr_map(runner, quick),
    }


class _OfTheText(Runner):
    """Runs ``eldr`` as the paper's text has it: with the centroids of its fit."""

    def run(self, cases: Sequence[dict[str, Any]]) -> list[Summary]:
        """Return the summary of each case, in order."""
        return super().run([case | _static(case.get("policy")) for case in cases])


def _static(policy: str | None) -> dict[str, str]:
    name, colon, given = (policy or "").partition(":")
    if "refit_s" in given:
        return {}
    return {"policy": f"{name}:refit_s=0{colon and ','}{given}"} if name == "eldr" else {}


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner of the evaluation: the paper's set-up, shortened if ``quick``."""
    return _OfTheText(STUDY.shortened(quick).base, progress=progress)
