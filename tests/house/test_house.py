"""The house: who may know a whole run, and that modules import each other one way."""

from . import bindings
from .house_figures import ROOMS, circles, lines_by_room, naming, sources

#: Folders and modules that run, compare or write whole configurations. All others take the groups
#: that they read.
MAY_NAME_RUN_CONFIG = (
    "_eldr_sim/__init__.py", "cli/", "planning/", "reports/explorer/", "serving/simulated/",
    "simulator/run.py", "simulator/simulation.py", "simulator/outcome/summary.py",
    "simulator/outcome/unused_options.py", "simulator/setup/config/run_config.py",
    "simulator/setup/engine_specs.py", "simulator/setup/prepare.py", "validation/",
    "studies/joint_optimum.py",
)  # fmt: skip
#: Objects of one running cluster, which know each other.
RUNNING = ("eldr_sim.simulator.control.", "eldr_sim.simulator.reference.")


def test_functions_take_the_groups_that_they_read():
    others = [name for name in naming("RunConfig") if not name.startswith(MAY_NAME_RUN_CONFIG)]
    assert others == []


def test_no_circle_of_imports_even_for_types():
    others = [
        sorted(group)
        for group in circles()
        if not any(all(name.startswith(room) for name in group) for room in RUNNING)
    ]
    assert others == []


def test_files_have_one_purpose():
    long = {
        file.name: n for file in sources(ROOMS) if (n := len(file.read_text().splitlines())) > 620
    }
    assert long == {}
    assert lines_by_room().total() > 0


def test_locals_are_called_by_what_they_hold():
    """Lower the ceilings when the shares have fallen; see ``python -m tests.house.bindings``."""
    by_file = bindings.counts()
    assert bindings.share(by_file, bindings.WORST) < 0.028
    assert bindings.share(by_file, bindings.EMPTY) < 0.047


def test_no_two_modules_beside_each_other_differ_by_an_ending():
    """No ``option.py`` beside ``options.py``, and no module named as its folder."""
    alike = []
    for path in bindings.sources():
        stem = path.stem
        alike += [f"{path.parent.name}/{stem}"] * (stem == path.parent.name)
        alike += [f"{path} {stem}s"] * path.with_name(f"{stem}s.py").exists()
    assert alike == []
