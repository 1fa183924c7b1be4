"""ELDR's measured figures by name."""

from collections.abc import Callable
from functools import partial

from eldr_sim.validation.reproduce.eldr_measured.cells import FIGURES, Kernels
from eldr_sim.validation.reproduce.eldr_measured.figures import errors, figure, warm_up
from eldr_sim.validation.reproduce.eldr_measured.slope import locality, slope
from eldr_sim.validation.reproduce.reproduction import Reproduction, Runner


def figures(runner: Runner, quick: bool, kernels: Kernels) -> dict[str, Callable[[], Reproduction]]:
    """Return the functions that reproduce each figure, as ELDR's authors number them."""
    known: dict[str, Callable[[], Reproduction]] = {
        f"figure_{name}": partial(figure, runner, name, kernels, quick) for name in FIGURES
    }
    of_all = {"errors": errors, "slope": slope, "locality": locality, "warm_up": warm_up}
    return known | {name: partial(made, runner, kernels, quick) for name, made in of_all.items()}


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner; every case is whole (`presets.preset_fields`)."""
    return Runner({}, progress=progress)
