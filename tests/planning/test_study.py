"""Studies: a YAML file's figures are the runs that it says, and its expressions run no code."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.charts import write_picture
from eldr_sim.errors import InputError
from eldr_sim.planning.slo import paired_percent
from eldr_sim.planning.studies.expressions import evaluate, parse
from eldr_sim.planning.studies.figures import Runner
from eldr_sim.planning.studies.study import Study, read_study
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each
from ..paths import ROOT

BASE = {"topology": "1P2D", "trace": "reference-moe", "num_requests": 12, "output_len": 8}
FIGURE = {
    "title": "TPOT",
    "runs": {"request_rate": [10, 40], "policy": {"jsq": "jsq", "first": {"policy": "random"}}},
    "show": ["P50"],
    "claims": [
        {
            "says": "median TPOT",
            "paper": [-90, 90],
            "value": "gain(P50, 'first', 'jsq')",
            "why": "from {min(gains(P50, 'first', 'jsq')):.3f}",
        }
    ],
}


def study_of(**changes):
    """Return a study of one figure, with changes of it."""
    document = {"title": "Test", "base": BASE, "names": {"P50": "median_tpot_ms"}}
    return Study.model_validate(document | {"figures": {"one": FIGURE | changes}})


def make(study):
    return study.known(Runner(study.base, 1))["one"]()


def tpot(policy, rate, seed=0):
    case = BASE | {"policy": policy, "request_rate": rate, "seed": seed}
    return simulate(make_config(case)).summary["median_tpot_ms"]


def test_a_claim_is_the_mean_over_rates_of_paired_runs():
    made = make(study_of())
    each = [100 * (tpot("random", rate) / tpot("jsq", rate) - 1) for rate in (10, 40)]
    (claim,) = made.claims
    assert claim.ours == pytest.approx(sum(each) / 2)
    assert claim.interval is None
    assert claim.reason == f"from {min(each):.3f}"
    assert made.table.column_names == ["request_rate", "policy", "median_tpot_ms"]
    assert made.table.num_rows == 4


def test_seeds_give_an_interval():
    study = study_of(runs={"policy": ["jsq", "random"]}, claims=[
        {"says": "median TPOT", "paper": 0, "value": "gain(P50, 'random', 'jsq')"}
    ])  # fmt: skip
    study = study.model_copy(update={"seeds": 3, "base": BASE | {"request_rate": 20}})
    (claim,) = make(study).claims
    ours, theirs = ([tpot(p, 20, seed) for seed in range(3)] for p in ("random", "jsq"))
    paired = paired_percent(ours, theirs)
    assert (claim.ours, *claim.interval) == pytest.approx(tuple(paired))


def test_the_best_of_several_is_that_of_the_lowest_figure():
    value = "gain('p99_tpot_ms', 'random', ['jsq', 'random'], P50)"
    runs = {"request_rate": [40], "policy": ["jsq", "random"]}
    (claim,) = make(study_of(runs=runs, claims=[{"says": "x", "paper": 0, "value": value}])).claims
    if tpot("random", 40) <= tpot("jsq", 40):
        assert claim.ours == 0
    else:
        assert claim.ours != 0


def test_a_claim_for_each_value_has_its_own_range():
    claim = {
        "each": ["topology"],
        "says": "{topology}",
        "paper": {"1P2D": 1, "1P3D": [2, 3]},
        "value": "mean('completed', 'jsq')",
        "unit": "requests",
    }
    runs = {"topology": ["1P2D", "1P3D"], "policy": ["jsq"]}
    found = make(study_of(runs=runs, claims=[claim])).claims
    assert [(c.statement, c.low, c.high, c.ours) for c in found] == [
        ("1P2D", 1, 1, 12), ("1P3D", 2, 3, 12),
    ]  # fmt: skip


NUMBERS = st.floats(-1e3, 1e3).map(lambda value: f"({value!r})")
ARITHMETIC = st.recursive(
    NUMBERS, lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner)
)


@given(ARITHMETIC)
def test_arithmetic_is_pythons(text):
    assert evaluate(parse(text, "value", set()), {}) == eval(text)


@on_each("text", [
        "__import__('os').system('true')", "().__class__", "P50.upper()", "(lambda: 1)()",
        "[x for x in P50]", "open('x')", "P50 if P50 else 0", "f'{P50}'", "1 +", "P50 := 1",
        "gain(*P50)", "gain(a=1)", "2 ** 9 ** 9 ** 9", "gain(P50, 'jsq')(1)", "\0",
    ])  # fmt: skip
def test_an_expression_runs_no_code(text):
    with pytest.raises(InputError):
        parse(text, "value", {"P50", "gain"})


def claiming(value, **more):
    return {"claims": [{"says": "x", "paper": 0, "value": value} | more]}


@pytest.mark.parametrize(
    "picture",
    [
        {"lines": "P50", "y": ["P50"], "by": "policy"},
        {"bars": "policy", "y": ["P50"], "by": ["P50"]},
        {"bars": "P50", "y": ["P50"], "panel": "P50"},
    ],
)
def test_a_name_stands_for_its_column_in_every_field_of_a_picture(picture, tmp_path):
    made = make(study_of(show=["P50"], picture=picture))
    write_picture(tmp_path / "drawn.png", made.draw)
    assert (tmp_path / "drawn.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compare": "gpu"}, "one.compare: no axis 'gpu'"),
        ({"runs": {"policy": "routers"}}, "one.runs.policy: 'routers' is not a name"),
        ({"runs": {"policy": []}}, "one.runs.policy"),
        (claiming("gain(P99, 'first', 'jsq')"), "one.claims.value: unknown name 'P99'"),
        (claiming("1", why="{P50:"), "one.claims.why"),
        (claiming("1", says="{policy}"), "one.claims.says: unknown name 'policy'"),
        (claiming("1", each=["gpu"]), "one.claims.each: no axis 'gpu'"),
        ({"picture": {"lines": "gpu", "y": ["P50"]}}, "one.picture.lines: no column 'gpu'"),
        ({"picture": {"bars": "policy", "y": ["P50"], "by": ["x"]}}, "one.picture.by: no column"),
        (
            {
                "gains": ["P50"],
                "against": "jsq",
                "picture": {"lines": "request_rate", "y": ["P50"]},
            },
            "one.picture.lines: no column 'request_rate' (allowed: policy",
        ),
    ],
)
def test_what_is_wrong_is_said_before_any_run(changes, said):
    study = study_of(**changes)
    with pytest.raises(InputError) as error:
        study.known(Runner(study.base, 1))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (claiming("gain('nothing', 'first', 'jsq')"), "no figure 'nothing'"),
        (claiming("gain(P50, 'first', 'eldr')"), "one.policy: no value 'eldr'"),
        (claiming("1", each=["policy"], paper={"jsq": 1}), "no range for first"),
        (claiming("gain(P50)"), "one.claims.value"),
        (claiming("gain(P50, 'first', 'jsq')['x']"), "one.claims.value"),
        (claiming("'a'"), "one.claims.value"),
    ],
)
def test_what_only_the_results_show_is_said_in_a_line(changes, said):
    with pytest.raises(InputError) as error:
        make(study_of(**changes))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title: x\n", "figures"),
        ("title: x\nfigures: {}\n", "figures"),
        ("title: x\nfigure: 1\nfigures: {a: {title: x, runs: {policy: [jsq]}}}\n", "figure"),
        ("- 1\n", "study"),
        ("title: x\nfigures: {a: {title: x, runs: {policy: [jsq]}, claim: []}}", "figures.a.claim"),
    ],
)
def test_a_file_is_checked(tmp_path, run_cli, text, said):
    (tmp_path / "study.yaml").write_text(text)
    code, _, error = run_cli("study", "run", tmp_path / "study.yaml", "--out", tmp_path / "out")
    assert (code, error.count("\n")) == (2, 1)
    assert said in error
    assert not (tmp_path / "out").exists()


def test_the_command_writes_each_figure_and_the_claims(tmp_path, run_cli):
    document = study_of().model_dump()
    (tmp_path / "study.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    code, printed, error = run_cli("study", "run", tmp_path / "study.yaml", "--out", out)
    assert code == 0, error
    assert "median TPOT" in printed
    assert sorted(p.name for p in out.iterdir()) == [
        "claims.csv", "one.csv", "one.png", "summary.json",
    ]  # fmt: skip
    (row,) = csv.DictReader((out / "claims.csv").open())
    assert float(row["ours"]) == pytest.approx(make(study_of()).claims[0].ours)
    assert json.loads((out / "summary.json").read_text())["figures"] == ["one"]


def test_quick_runs_are_those_of_the_study():
    study = read_study(ROOT / "studies/eldr/study.yaml")
    assert study.shortened(False) is study
    short = study.shortened(True)
    assert short.base["duration"] == 20
    assert short.names["rates"] == [40, 80]
    assert short.names["models"] == study.names["models"]
