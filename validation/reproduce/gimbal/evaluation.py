"""Gimbal's evaluation: all its figures by name, and what they leave open."""

from collections.abc import Callable
from functools import cache

from eldr_sim.traces.routing.format import REFERENCE_TRACE
from eldr_sim.validation.reproduce.gimbal import experts, latency, studies
from eldr_sim.validation.reproduce.gimbal.latency import paired_figure
from eldr_sim.validation.reproduce.gimbal.prefix import figure_11, figure_12
from eldr_sim.validation.reproduce.gimbal.settings import FULL, QUICK, TPOT, TTFT, Experiment
from eldr_sim.validation.reproduce.reproduction import Reproduction, Runner


def figures(
    runner: Runner, quick: bool, log: str | None = None
) -> dict[str, Callable[[], Reproduction]]:
    """Return the functions that reproduce each figure; lengths are a log's, if one is given."""
    made = Experiment(runner, QUICK if quick else FULL, log)
    rows, runs = cache(lambda: latency.ablations(made)), cache(lambda: latency.main_runs(made))
    return {
        "figure_3": experts.figure_3,
        "figure_4": experts.figure_4,
        "figure_6": lambda: latency.by_rate("figure_6", made, rows(), TTFT),
        "figure_7": lambda: paired_figure("figure_7", made, runs(), TTFT, latency.TTFT_CUT),
        "figure_8": lambda: latency.by_rate("figure_8", made, rows(), TPOT),
        "figure_9": lambda: paired_figure("figure_9", made, runs(), TPOT, latency.TPOT_CUT),
        "figure_10": lambda: latency.figure_10(made, runs()),
        "figure_11": lambda: figure_11(made),
        "figure_12": lambda: figure_12(made),
        "few_blocks": lambda: latency.few_blocks(made),
        "crossings": lambda: experts.crossings(quick),
        "sjf_sign": lambda: studies.sjf_sign(made),
        "old_signals": lambda: studies.old_signals(made),
        "colocated": lambda: studies.colocated(made),
        "placements": lambda: studies.placements(made),
    }


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner of the evaluation; ``quick`` is a matter of `Scale`. Its routing is the one
    of docs/gimbal.md, not the default, which has been another since."""
    return Runner({"trace": REFERENCE_TRACE}, progress=progress)
