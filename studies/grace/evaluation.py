"""GRACE-MoE's evaluation: all its figures by name, and what they leave open."""

from collections.abc import Callable

from eldr_sim.planning.studies.figures import Reproduction, Runner
from studies.grace import figures as grace_figures
from studies.grace import homes as grace_homes
from studies.grace import latency as grace_latency
from studies.grace import map as grace_map
from studies.grace import serving as grace_serving
from studies.grace.settings import SOURCES, Evaluation

SEEDS, QUICK_SEEDS = range(3), range(1)
QUICK_SOURCES = SOURCES[-1:]  #: the smallest, which comes with the package


def figures(runner: Runner, quick: bool) -> dict[str, Callable[[], Reproduction]]:
    """Return the functions that reproduce each figure, in the order of the paper."""
    evaluation = Evaluation(QUICK_SEEDS, QUICK_SOURCES) if quick else Evaluation(SEEDS)
    return {
        "figure_1a": lambda: grace_figures.figure_1a(evaluation),
        "figure_1b": lambda: grace_figures.figure_1b(evaluation),
        "figure_3": lambda: grace_figures.figure_3(evaluation),
        "figure_4": lambda: grace_latency.figure_4(evaluation, runner),
        "figure_5": lambda: grace_figures.figure_5(evaluation),
        "copies": lambda: grace_figures.copies_and_locality(evaluation),
        "figure_6": lambda: grace_figures.figure_6(evaluation),
        "pools": lambda: grace_latency.pools(evaluation, runner),
        "map": lambda: grace_map.placement_map(evaluation),
        "bottleneck": lambda: grace_map.bottleneck(evaluation),
        "homes": lambda: grace_homes.homes(evaluation.seeds, quick),
        "replicas": lambda: grace_serving.replicas(runner, evaluation.seeds, quick),
        "shared_nic": lambda: grace_serving.shared_nic(evaluation.seeds),
        "relocation": lambda: grace_serving.relocation(runner, evaluation.seeds, quick),
    }


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner of the evaluation; ``quick`` is a matter of seeds."""
    base = {"frontend": "none", "model": "Qwen3-30B-A3B", "trace": "reference-moe"}
    return Runner(base, progress=progress)
