"""MoE-Prefill's evaluation: all its figures by name, and what they leave open."""

from collections.abc import Callable

from eldr_sim.planning.studies.figures import Reproduction, Runner
from studies.moe_prefill import results, studies, tables
from studies.moe_prefill.settings import Workloads


def figures(runner: Runner, quick: bool) -> dict[str, Callable[[], Reproduction]]:
    """Return the functions that reproduce each figure, in the order of the paper."""
    logs, sizes = Workloads(), results.Sizes(quick)
    return {
        "table_1": tables.table_1,
        "figure_3": tables.figure_3,
        "figure_4": tables.figure_4,
        "figure_9": lambda: results.figure_9(runner, logs, sizes),
        "figure_10": lambda: results.figure_10(runner, logs, sizes),
        "figure_11": lambda: results.figure_11(runner, logs, sizes),
        "figure_12": lambda: results.figure_12(runner, logs, sizes),
        "thresholds": lambda: studies.thresholds(runner, logs, sizes),
        "routers": lambda: studies.routers(runner, logs, sizes),
        "gathers": lambda: studies.gathers(runner, logs, sizes),
        "map": studies.strategy_map,
        "needed": studies.needed,
        "pools": lambda: studies.pools(runner, logs, quick),
    }


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner of the evaluation; ``quick`` is a matter of sizes."""
    return Runner({"frontend": "none"}, progress=progress)
