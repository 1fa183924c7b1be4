"""Reproductions of a paper: claims judged rightly, runs made once, files whole."""

import csv
import sys
from importlib import import_module

import pytest

from eldr_sim.cli.main import main
from eldr_sim.cli.study import run_figures
from eldr_sim.errors import InputError
from eldr_sim.planning.slo import Interval
from eldr_sim.planning.studies.figures import (
    Claim,
    Reproduction,
    Runner,
    choose,
    write_reproduction,
)
from eldr_sim.traces.routing.synthetic import drawn
from studies.eldr import evaluation as eldr_evaluation
from studies.eldr.map import placed
from studies.eldr.results import mean_difference, run_grid
from studies.eldr_measured import cells
from studies.eldr_measured import evaluation as measured
from studies.grace import evaluation as grace_evaluation

from ..on_each import on_each
from ..paths import ROOT

TINY = {"topology": "1P2D", "duration": 2, "warmup": 1, "output_len": 16}


@on_each(
    "low, high, ours, unit, direction, size",
    [
        (-13.9, -7.0, -10.0, "%", "agrees", "agrees"),
        (-13.9, -7.0, -14.5, "%", "agrees", "agrees"),  # within the tolerance of 1
        (-13.9, -7.0, -15.0, "%", "agrees", "differs"),
        (-13.9, -7.0, -2.0, "%", "agrees", "differs"),
        (-13.9, -7.0, 3.0, "%", "contradicts", "differs"),
        (-13.9, -7.0, -0.7, "%", "no effect", "differs"),  # a tenth of 7
        (-13.9, -7.0, 0.7, "%", "no effect", "differs"),
        (0.5, 0.5, -0.4, "points", "contradicts", "agrees"),  # a size that agrees, the other way
        (4.7, 4.7, 5.4, "x", "agrees", "agrees"),
        (4.7, 4.7, 0.5, "x", "contradicts", "differs"),  # a ratio lies above or below 1, not 0
        (4.7, 4.7, 1.2, "x", "no effect", "differs"),
        (0.0, 1.0, 4.5, "x", "contradicts", "differs"),  # METRO's and MoE-Prefill's "fewer bytes"
        (1.0, 2.0, 0.99, "x", "contradicts", "agrees"),
        (1.01, 8.0, 1.0, "x", "no effect", "agrees"),
        (-3.0, 3.0, 2.0, "%", "-", "agrees"),  # the paper claims no effect
        (-3.0, 3.0, -14.0, "%", "-", "differs"),
        (0.0, 0.0, 4.0, "%", "-", "differs"),
        (26.0, 26.0, 99.0, "us", "-", "differs"),  # a time, a count: no direction
        (1.0, 1.0, 4.0, "GPUs", "-", "differs"),
        (4.7, 4.7, None, "x", "-", "-"),
    ],
)
def test_verdicts_of_a_claim(low, high, ours, unit, direction, size):
    claim = Claim("statement", low, high, ours, unit)
    assert claim.direction == direction
    assert claim.size == size


@pytest.mark.parametrize(
    ("changes", "rate", "said"),
    [
        ((-4.0, -1.0, 1.0), 20.0, "pays below"),
        ((4.0, -4.0, -5.0), 7.07, "pays above"),
        ((-1.0, -2.0, -3.0), None, "pays at all rates"),
        ((1.0, 2.0, 3.0), None, "costs at all rates"),
    ],
)
def test_where_a_gain_ends(changes, rate, said):
    """Half-way between two rates, in logarithms, where the means are equally far from nothing."""
    found = placed((5.0, 10.0, 40.0), [Interval(c, c - 1.0, c + 1.0) for c in changes])
    assert found == (rate and pytest.approx(rate, rel=1e-3), said)


def test_a_neutral_value_of_its_own_and_an_input():
    saved = Claim("a layer gets shorter", -81, -81, 55.0, "us", neutral=0.0)
    assert saved.direction == "contradicts"
    wins = Claim("share of the cases that it wins", 100, 100, 0.0, "%", neutral=50.0)
    assert wins.direction == "contradicts"
    assert Claim("MFU", 30, 30, 12.0, "%", neutral=None).direction == "-"
    charged = Claim("charged", 26, 26, 25.7, "us", given=True)
    assert (charged.direction, charged.size) == ("input", "input")


@pytest.mark.parametrize("paper", ["gimbal", "grace", "metro"])
def test_the_routing_of_a_command_is_that_of_its_page(paper):
    evaluation = import_module(f"studies.{paper}.evaluation")
    trace = evaluation.make_runner(False, lambda _share: None).base["trace"]
    assert trace in (ROOT / f"studies/{paper}/README.md").read_text()


@pytest.mark.parametrize("jobs", [1, 2])
def test_runner_makes_each_run_once_and_keeps_the_order(jobs):
    runner = Runner(TINY | {"trace": "reference-moe"}, jobs)
    cases = [{"policy": "jsq"}, {"policy": "random"}, {"policy": "jsq"}]
    first = runner.run(cases)
    assert [summary["policy"] for summary in first] == ["jsq", "random", "jsq"]
    assert first[0] is first[2]
    again = runner.run([{"policy": "random"}])
    assert again[0] is first[1]


def test_mean_difference_is_the_mean_over_rates_of_paired_runs():
    runner = Runner(TINY, 1)
    runs = run_grid(runner, ("random", "round_robin", "jsq", "p2c", "eldr"), (5.0, 20.0))
    metric = "median_tpot_ms"
    each = [
        100 * (runs["eldr", rate][metric] / runs["round_robin", rate][metric] - 1)
        for rate in (5.0, 20.0)
    ]
    assert mean_difference(runs, "eldr", "round_robin", metric) == pytest.approx(sum(each) / 2)
    best = [
        100
        * (
            runs["eldr", rate][metric]
            / min(runs[p, rate][metric] for p in ("random", "round_robin", "jsq", "p2c"))
            - 1
        )
        for rate in (5.0, 20.0)
    ]
    assert mean_difference(runs, "eldr", "best", metric) == pytest.approx(sum(best) / 2)


NAMES = (
    *(f"figure_{n}" for n in (2, 3, 4, 7, 8, 9, *range(11, 19))),
    "table_1",
    "table_2",
    "table_2_recorded",
    "figure_18_recorded",
    "map",
)
#: Those that the default suite makes.
QUICK = tuple(name for name in NAMES[:-1:2] if "recorded" not in name)


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """ELDR's figures, of short runs of one model in this process, which fits once for all runs."""
    shorter = {"gpu": "MI300X", "duration": 1, "warmup": 0.5, "output_len": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eldr_evaluation, "MODELS", eldr_evaluation.MODELS[:1])
        # Routing is drawn: few requests, kept out of the user's cache.
        patch.setenv("ELDR_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(drawn, "SERVING", 16)
        patch.setattr(drawn, "CALIBRATION", 16)
        patch.setattr(cells, "OUTPUT_LEN", 64)
        cells.long_routing.cache_clear()
        yield eldr_evaluation.figures(Runner(TINY | shorter, 1), quick=True)
        cells.long_routing.cache_clear()


def test_every_figure_and_table_of_the_paper_is_there(figures):
    assert tuple(figures) == NAMES


@pytest.mark.long
@pytest.mark.parametrize("names", [QUICK, pytest.param(NAMES, marks=pytest.mark.slow)])
def test_every_claim_has_a_value_or_a_reason_and_every_figure_a_picture(figures, names, tmp_path):
    for name in names:
        has_values_and_a_picture(figures, name, tmp_path)


def has_values_and_a_picture(figures, name, tmp_path):
    reproduction = figures[name]()
    assert reproduction.name == name
    assert reproduction.table.num_rows > 0
    for claim in reproduction.claims:
        assert claim.ours is not None or claim.reason, claim.statement
    write_reproduction(tmp_path, reproduction)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_figures():
    known = {"figure_2": None, "table_2": None}
    assert choose((), known) == ["figure_2", "table_2"]
    assert choose(("2", "table-2"), known) == ["figure_2", "table_2"]
    with pytest.raises(InputError, match="figure: '99'"):
        choose(("99",), known)
    parts = {"figure_1a": None, "figure_1b": None, "figure_11": None}
    assert choose(("1",), parts) == ["figure_1a", "figure_1b"]


def test_a_figure_of_parts_is_chosen_on_the_command_line(run_cli, monkeypatch):
    """``reproduce grace 1 --quick`` makes Figures 1a and 1b of the paper, and no other."""
    made = []

    def figures(runner, quick):
        assert quick
        return {
            name: lambda name=name: made.append(name) or Reproduction(name, name, [{}], [], print)
            for name in real(runner, quick)
        }

    real = grace_evaluation.figures
    monkeypatch.setattr(grace_evaluation, "figures", figures)
    code, _, error = run_cli("reproduce", "grace", "1", "--quick")
    assert code == 0, error
    assert made == ["figure_1a", "figure_1b"]


@pytest.mark.long
def test_reproduce_writes_a_picture_and_a_table_a_figure(tmp_path, monkeypatch, capsys):
    out = tmp_path / "eldr"
    monkeypatch.setattr(
        sys, "argv", ["eldr-sim", "reproduce", "eldr", "2", "3", "4", "--out", str(out)]
    )
    main()
    printed = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        *(f"figure_{n}.{kind}" for n in (2, 3, 4) for kind in ("png", "csv")),
        "claims.csv",
        "summary.json",
    }
    with (out / "claims.csv").open() as file:
        claims = list(csv.DictReader(file))
    assert len(claims) == 5
    assert [claim["direction"] for claim in claims] == ["agrees", "-", "agrees", "agrees", "agrees"]
    assert all(claim["claim"].split(",")[0][:20] in printed for claim in claims)


@pytest.mark.parametrize(
    ("paper", "figure", "title", "unknown", "known"),
    [
        ("moe-prefill", "4", "recorded", "5", "figure_12"),
        ("metro", "3", "operational intensity", "4", "figure_3"),
    ],
)
def test_the_command_writes_a_figure_whole(paper, figure, title, unknown, known, tmp_path, run_cli):
    out = tmp_path / paper
    code, printed, _ = run_cli("reproduce", paper, figure, "--quick", "--out", out)
    assert code == 0
    assert title in printed
    assert sorted(p.name for p in out.iterdir()) == [
        "claims.csv", f"figure_{figure}.csv", f"figure_{figure}.png", "summary.json",
    ]  # fmt: skip
    with (out / "claims.csv").open() as file:
        assert {row["figure"] for row in csv.DictReader(file)} == {f"figure_{figure}"}
    code, _, problem = run_cli("reproduce", paper, unknown)
    assert code == 2
    assert known in problem


def test_an_interrupted_reproduction_keeps_figures_and_runs_and_goes_on(tmp_path, capsys):
    """Figures are written as they are made; --resume simulates only what has not ended."""
    out, kept, ran = tmp_path / "out", tmp_path / "out.unfinished", []

    def reproduced(fail, **how):
        def known(progress):
            runner = Runner(TINY | {"trace": "reference-moe"}, 1, progress)

            def figure(name, seed):
                (run,) = runner.run([{"seed": seed}])
                claims = [Claim(name, 0, 1, run["median_tpot_ms"], "ms")]
                return Reproduction(name, name, [{"seed": seed}], claims, lambda figure: None)

            def second():
                if fail:
                    raise KeyboardInterrupt
                return figure("figure_2", 1)

            return runner, {"figure_1": lambda: figure("figure_1", 0), "figure_2": second}

        run_figures("paper", known, (), out, False, {"paper": "paper"}, **how)

    with pytest.raises(KeyboardInterrupt) as ended:
        reproduced(True)
    assert ended.value.__notes__ == [f"{kept} keeps 1 ended run; --resume continues."]
    assert {path.name for path in kept.iterdir()} == {
        "runs.jsonl", "figure_1.csv", "figure_1.png", "claims.csv",
    }  # fmt: skip
    assert "figure_1" in capsys.readouterr().out
    assert not out.exists()
    with pytest.raises(InputError, match="resume"):
        reproduced(False)
    lines = len((kept / "runs.jsonl").read_text().splitlines())
    assert lines == 2  # the header and the run of the first figure
    reproduced(False, resume=True, expected=lambda names: ran.extend(names) or 2)
    assert ran == ["figure_1", "figure_2"]
    assert not kept.exists()
    assert {path.name for path in out.iterdir()} >= {"figure_1.csv", "figure_2.csv", "claims.csv"}


def test_the_measured_cells_know_how_many_runs_figures_take():
    def count(*names):
        return measured.expected_runs(names, False, "fitted")

    assert count("figure_10") == 90
    assert count("figure_10", "figure_11", "errors", "slope", "locality") == count("errors") == 180
    assert count("errors", "seeds") == 180 + 36  # seed 0 is that of the cells
    assert count("errors", "warm_up") == 180 + 18
