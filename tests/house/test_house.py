"""The house: who may know a whole run, and that modules import each other one way."""

from . import bindings
from .house_figures import ROOMS, circles, lines_by_room, naming, sources

#: Folders and modules that may know a whole run, and why. All others take the groups that they
#: read.
MAY_NAME_RUN_CONFIG = {
    "_eldr_sim/__init__.py": "the public face exports it",
    "cli/": "makes it of options",
    "planning/": "runs and compares whole runs",
    "reports/explorer/": "makes a run of each state of the page",
    "serving/simulated/": "a server is one run, and each of its workers alone another",
    "simulator/run.py": "composes the rooms",
    "simulator/simulation.py": "the public face of a run with guests",
    "simulator/outcome/summary.py": "composes figures of all rooms",
    "simulator/outcome/unused_options.py": "compares all fields with what the run did",
    "simulator/setup/config/run_config.py": "declares it",
    "simulator/setup/engine_specs.py": "composes a worker of eight groups",
    "simulator/setup/prepare.py": "composes the specification of a run",
    "studies/peers/": "hands a whole run to another simulator",
    "validation/published/bench.py": "runs the load of a measured benchmark",
    "validation/published/calibration.py": "fits to measured runs, each a whole one",
}
#: Objects of one running cluster, which know each other.
RUNNING = ("eldr_sim.simulator.control.", "eldr_sim.simulator.reference.")


def test_functions_take_the_groups_that_they_read():
    names = naming("RunConfig")
    assert [name for name in names if not name.startswith(tuple(MAY_NAME_RUN_CONFIG))] == []
    unused = [w for w in MAY_NAME_RUN_CONFIG if not any(name.startswith(w) for name in names)]
    assert unused == []


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
