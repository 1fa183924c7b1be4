"""No accuracy changes in silence: watched rows are predicted again, and moved cells are named."""

import csv
import json

import pytest

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.validation.published import judge, runs
from eldr_sim.validation.published.judge import Cell

from ..paths import ROOT


@pytest.mark.long
@pytest.mark.usefixtures("drawn_routing")
def test_watched_rows_err_as_they_did():
    """Else: `python tests/judge.py --update`, and CHANGELOG.md names the cells that it prints."""
    every = {run.name: run for run in runs.read_runs()}
    watched = [every[name] for name in judge.WATCHED]
    before = judge.predictions(judge.kept())
    after = {run.name: runs.predict(run) for run in watched}
    kept = {run.name: before[run.name] for run in watched}
    assert judge.moved(judge.cells(watched, kept), judge.cells(watched, after)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_routing")
def test_all_kept_rows_err_as_they_did():
    before = judge.predictions(judge.kept())
    kept = [run for run in runs.read_runs() if run.name in before]
    after = {run.name: runs.predict(run) for run in kept}
    assert judge.moved(judge.cells(kept, before), judge.cells(kept, after)) == []


def test_watched_rows_are_of_all_engines_dense_and_with_experts():
    every = {run.name: run for run in runs.read_runs()}
    watched = [every[name] for name in judge.WATCHED]
    engines = {run.row["engine"].partition("==")[0] for run in watched}
    assert engines == {"vllm", "sglang", "trtllm"}
    assert len({load_model(run.row["model"]).is_dense for run in watched}) == 2
    assert all(run.measured for run in watched)


def test_the_page_shows_the_kept_predictions():
    path = ROOT / "docs" / "data" / "accuracy_cells.csv"
    content = judge.kept()
    head, *lines = csv.reader(path.read_text().splitlines())
    assert content["date"] in head[0]
    found = judge.cells(runs.read_runs(), judge.predictions(content)).values()
    shown = [["" if each is None else f"{each:.0f}" for each in cell[2:]] for cell in found]
    assert [line[0] for line in lines] == [cell.name for cell in found]
    assert [line[2:] for line in lines] == shown


@pytest.mark.parametrize(
    ("old", "new", "moves"),
    [
        (10.0, 11.9, False), (10.0, 12.1, True), (10.0, 7.9, True),
        (40.0, 43.9, False), (40.0, 44.1, True), (1.0, 2.9, False), (None, 5.0, False),
    ],
)  # fmt: skip
def test_a_cell_moves_by_more_than_2_points_and_10_percent(old, new, moves):
    before, after = ({"a": Cell("a", 3, value, None)} for value in (old, new))
    assert bool(judge.moved(before, after)) == moves


def test_a_moved_cell_passes_only_where_the_changelog_names_it():
    cell = Cell("vllm, H100, M", 3, 10.0, 10.0)
    lines = judge.moved({cell.name: cell}, {cell.name: cell._replace(tpot=20.0)})
    assert judge.unsaid(lines, "Accuracy of vllm, H100, M: 20% for 10%") == []
    assert judge.unsaid(lines, "nothing") == lines
    assert judge.moved({cell.name: cell}, {}) == ["vllm, H100, M: no longer predicted"]


def test_predictions_that_were_changed_by_hand_are_seen(tmp_path):
    content = judge.kept()
    name = next(iter(content["rows"]))
    content["rows"][name]["prediction"] = {"tpot": 1.0}
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(content))
    with pytest.raises(AssertionError, match="by hand"):
        judge.kept(path)
