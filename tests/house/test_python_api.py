"""The Python API: light to import, the commands' options as keywords, and its notebooks."""

import inspect
import json
import os
import subprocess
import sys

import pytest

import eldr_sim
import eldr_sim as es
from eldr_sim.cli import console
from eldr_sim.cli.run import run as run_command
from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
SHORT = {"topology": "1P2D", "request_rate": 10, "duration": 2, "warmup": 1, "output_len": 10}


#: Runs the code cells of a notebook, in order; counts the cells that end with something to show.
KERNEL = """
import ast, json, sys
document = json.load(open(sys.argv[1]))
names, shown = {"__name__": "__main__"}, 0
for cell in document["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell["id"], "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
        shown += value is not None and len(repr(value)) > 0
print(f"SHOWN {shown}")
"""


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook, tmp_path, monkeypatch, capsys):
    """Every code cell; what a cell ends with can be shown."""
    text = notebook.read_text()
    document = json.loads(text)
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert text == json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
        else:
            assert set(cell) == {"cell_type", "id", "metadata", "source"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["", str(notebook)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exec(KERNEL, {})
    shown = int(capsys.readouterr().out.rpartition("SHOWN ")[2].split()[0])
    assert shown >= 3 or notebook.stem == "own_policy"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_a_clean_kernel(notebook, tmp_path):
    """In a new process, which draws the routing that a reader's draws."""
    run = [sys.executable, "-c", KERNEL, str(notebook)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run(run, cwd=tmp_path, env=environment, check=True)


def test_notebooks_are_four():
    names = ["change_engine", "first_question", "own_policy", "own_processes"]
    assert [path.stem for path in NOTEBOOKS] == names


def test_every_name_is_there_and_is_the_documented_one():
    for name in eldr_sim.__all__:
        value = getattr(eldr_sim, name)
        assert name == "__version__" or value.__name__ == name
        assert name in dir(eldr_sim)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        eldr_sim.nothing  # noqa: B018


def test_import_is_light():
    code = (
        "import sys, eldr_sim; heavy = {'numpy', 'numba', 'pyarrow', 'pydantic'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "from eldr_sim import RunConfig; assert RunConfig().cluster.topology == '8P16D'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_run_takes_what_the_command_takes(tmp_path):
    fields = SHORT | {
        "decode": {"gpu": "H200"},
        "tensor_parallel_size": 2,
        "policy": "eldr:tau=0.2",
    }
    same = simulate(make_config({**fields, "goodput": {"ttft": 500, "tpot": 30}})).summary
    rest = {key: value for key, value in SHORT.items() if key != "output_len"}
    ours = es.run(
        rest, random_output_len=10, tp=2, decode={"gpu": "H200"}, goodput={"ttft": 500, "tpot": 30},
        policy={"name": "eldr", "tau": 0.2},
    )  # fmt: skip
    assert ours.summary == same
    config = make_config({**fields, "seed": 3})
    assert es.run(config, seed=0, goodput="ttft:500,tpot:30").summary == same
    (tmp_path / "c.yaml").write_text(json.dumps(fields))
    assert es.run(tmp_path / "c.yaml", goodput=["ttft:500", "tpot:30"]).summary == same
    assert len(ours.frame) == ours.requests.num_rows > 0
    assert len(ours.steps_frame) == ours.steps.num_rows > 0


def test_results_are_drawn_and_written(tmp_path):
    ours = es.run(**SHORT)
    assert "Distribution of TTFT" in ours.pictures
    figure = ours.plot("tpot over")
    assert figure.layout.title.text == "TPOT over time"
    assert "var(" not in figure.to_json()
    with pytest.raises(InputError, match=r"plot: no picture 'cost' \(allowed: Distribution of"):
        ours.plot("cost")
    ours.report(tmp_path / "page.html")
    assert "<!DOCTYPE html>" in (tmp_path / "page.html").read_text()[:100]
    compared = es.compare(SHORT, policy="jsq", seeds=2, jobs=1)
    assert set(compared.frame.policy) == {"jsq", "round_robin"}
    assert set(compared.differences_frame.metric) >= {"median_tpot_ms"}
    compared.write(tmp_path / "compared")
    assert compared.plot().data
    values = es.compare(SHORT, gpu=["H100", "H200"], seeds=2, jobs=1)
    assert values.base_name == "gpu=H100"
    assert "Median TPOT" in values.pictures
    assert values.plot().data
    planned = es.plan(SHORT | {"duration": 10}, slo="ttft:500,tpot:30", max_gpus=2)
    assert planned.plot().data
    for result in (ours, compared, values, planned):  # as a notebook shows it
        html = result._repr_html_()
        assert html.startswith("<table><caption>")
        assert 'src="data:image/png;base64,' in html
    assert list(ours.requests.to_pandas().columns) == list(ours.frame.columns)


def test_signatures_list_the_options():
    names = inspect.signature(es.run).parameters
    assert {"config", "progress", "policy", "request_rate", "goodput"} <= set(names)
    assert not {"out", "plot", "help"} & set(names)
    assert "slo" in inspect.signature(es.plan).parameters
    assert len(names) > len(run_command.params) - 10


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"topolgy": "1P2D"}, r"topolgy: no such option: did you mean topology"),
        ({"polcy": "jsq"}, r"polcy: no such option: did you mean policy"),
        ({"quantization": "fp8"}, r"quantization: .* comes with the model: model NAME-FP8"),
        ({"tp_size": 4}, r"tp_size: no such option: tensor_parallel_size$"),
        ({"topology": "x"}, "topology: "),
        ({"seed": "x"}, "seed: "),
    ],
)
def test_bad_options_are_one_line(given, said):
    with pytest.raises(InputError, match=said) as raised:
        es.run(**given)
    assert "\n" not in str(raised.value)


def test_a_notebook_shows_progress_in_one_line(monkeypatch):
    written = []

    class Handle:
        def update(self, data, raw):
            written.append(data["text/plain"])

    class IPython:
        class display:
            @staticmethod
            def display(data, raw, display_id):
                assert raw
                assert display_id
                return Handle()

        @staticmethod
        def get_ipython():
            return type("Shell", (), {"kernel": None})()

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert console.is_watched()
    with console.progress_bar("a run") as update:
        update(0.1)
        monkeypatch.setattr(console.time, "monotonic", lambda now=console.time.monotonic: now() + 9)
        update(0.5)
    assert written[0].startswith("a run: 50% done")
    assert written[-1] == ""
