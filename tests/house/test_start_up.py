"""Commands import what they need and no more, and their lines of help stand true."""

import itertools
import subprocess
import sys

import click
import pytest

from eldr_sim.cli import main, trace
from eldr_sim.cli.lazy import LazyGroup

from ..on_each import on_each

SHORT = "--topology 1P2D --request-rate 10 --duration 2 --warmup 1 --output-len 10"
PLOTS = {"matplotlib", "plotly", "jinja2"}
COMPILER = PLOTS | {"numba", "simpy", "joblib"}
ARROW = {"pandas", "pyarrow.compute"}
TABLES = COMPILER | ARROW | {"scipy.optimize"}
FIGURES = TABLES | {"numpy", "scipy", "pyarrow"}
#: What no run loads that finds its code, kernels and routing in the cache, and shows figures alone.
NOT_IN_A_RUN = TABLES - {"simpy"} | {
    "pyarrow", "scipy", "ssl", "eldr_sim.policies.eldr.artifact",
    "eldr_sim.simulator.reference.reference_cluster",
    "eldr_sim.simulator.setup.config.presets", "eldr_sim.traces.routing.synthetic.synthesize",
    "eldr_sim.traces.requests.logs.request_logs", "eldr_sim.kernel_profiles.hf_config.fields",
}  # fmt: skip
EVERYTHING = FIGURES | {"pydantic", "rich", "yaml"}


@pytest.mark.long
@on_each(
    "commands",
    [
        # In one process: what one of them may not import, none before it may.
        {
            "--help": EVERYTHING,
            "--version": EVERYTHING,
            "cache info": FIGURES | {"pydantic"},
            "models": FIGURES,
            "tables --help": FIGURES,
            "run --help": FIGURES,
            "tables list": TABLES,
            f"run --policy jsq {SHORT}": PLOTS | ARROW | {"scipy.optimize", "joblib"},
            f"run --policy domain {SHORT}": PLOTS,
        },
        # The one before has filled the cache; results are read without pandas.
        {
            f"run --policy jsq {SHORT}": NOT_IN_A_RUN,
            f"run --policy domain {SHORT}": {"numba", "pandas", "scipy"},
            f"compare --policy jsq --seeds 2 --jobs 1 {SHORT} --out FOLDER/of": {
                "numba",
                "pandas",
                "scipy",
            },
            f"run --policy jsq {SHORT} --out FOLDER/run": {"pandas"},
            "explain FOLDER/run": {"pandas"},
        },
        {"plan --help": PLOTS | {"joblib", "pandas", "scipy.special", "scipy.optimize"}},
        {"explain --help": COMPILER | ARROW | {"pydantic", "llvmlite"}, "gpus": COMPILER},
    ],
)
def test_a_command_imports_no_more_than_it_needs(commands, tmp_path):
    commands = {line.replace("FOLDER", str(tmp_path)): names for line, names in commands.items()}
    unwanted = list(commands.values())
    assert all(later <= before for before, later in itertools.pairwise(unwanted))
    code = (
        "import sys; from eldr_sim.cli.main import cli\n"
        f"for command, unwanted in {commands!r}.items():\n"
        "    try: cli.main(command.split(), standalone_mode=False)\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "    found = unwanted & set(sys.modules); assert not found, (command, found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_the_python_api_imports_no_more_than_the_command():
    short = "topology='1P2D', request_rate=10, duration=2, warmup=1, output_len=10, policy='jsq'"
    code = (
        f"import sys, gc, os, eldr_sim as es; es.run({short})\n"
        f"found = {NOT_IN_A_RUN!r} & set(sys.modules); assert not found, found\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 10_000\n"
        "assert not {'PYDANTIC_DISABLE_PLUGINS', 'OPENBLAS_THREAD_TIMEOUT'} & set(os.environ)"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, capture_output=True)  # fills the cache
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_trace_is_written_without_pandas(tmp_path):
    """As a run draws one, where its routing lies in no cache yet."""
    code = (
        "import sys, numpy as np; from eldr_sim.traces.routing.writer import write_trace\n"
        f"write_trace({str(tmp_path / 'trace')!r}, experts=np.zeros((4, 1, 1), int),\n"
        "    request_id=['a'], domain=['en'], domains=['en'], prompt_len=np.array([2]),\n"
        "    output_len=np.array([2]), is_calibration=[True], model='m', n_experts=2,\n"
        "    provenance='synthetic', captured_by='nobody', source_data='none', tool_versions={})\n"
        f"assert not {ARROW!r} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.long
def test_the_compiler_imports_blas_for_who_needs_it():
    code = (
        "import eldr_sim.compiler, sys, numba, numpy as np\n"
        "numba.njit(lambda a: a.sum() + a[0])(np.ones(3))\n"
        "assert 'scipy.linalg' not in sys.modules\n"
        "product = numba.njit(lambda a, b: np.dot(a, b))\n"
        "assert product(np.eye(3), np.full((3, 3), 2.0)).sum() == 18.0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_interrupt_while_importing_is_one_line():
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from eldr_sim.start import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "Interrupted: nothing was written.\n")


@pytest.mark.parametrize("home", [main, trace], ids=["eldr-sim", "trace"])
def test_the_help_of_a_group_is_what_its_commands_say(home):
    lazy = home._COMMANDS
    group = LazyGroup("group", lazy=lazy)
    listed = group.get_help(click.Context(group))
    commands = {name: group.get_command(click.Context(group), name) for name in lazy}
    assert {name: command.name for name, command in commands.items()} == {n: n for n in lazy}
    said = {name: command.get_short_help_str() for name, command in commands.items()}
    assert said == {name: short_help for name, (_, short_help) in lazy.items()}
    plain = click.Group("group", commands=commands)
    assert plain.get_help(click.Context(plain)) == listed


def test_a_misspelt_command_is_told_the_right_one(run_cli):
    code, _, err = run_cli("trace", "synthesise")
    assert code == 2
    assert "synthesize" in err
    code, _, err = run_cli("compair")
    assert code == 2
    assert "compare" in err


def test_a_terminal_hears_within_a_second_that_there_is_work():
    """Before anything is imported; what is shown later writes over it, and a pipe gets nothing."""
    code = (
        "import sys, time, eldr_sim.start as start\n"
        "sys.stderr.isatty = lambda: {}\n"
        "class Slow:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name != 'eldr_sim.cli.main': return\n"
        "        start._working.join() if start._working else time.sleep(1.5)\n"
        "        sys.exit(0)\n"
        "sys.meta_path.insert(0, Slow()); assert start._SILENT_S <= 1.0; start.main()"
    )
    begun = [
        subprocess.Popen([sys.executable, "-c", code.format(terminal)], stderr=subprocess.PIPE)
        for terminal in (True, False)
    ]
    for process, said in zip(begun, (b"working...\r", b""), strict=True):
        assert process.communicate(timeout=60)[1] == said
        assert process.returncode == 0
