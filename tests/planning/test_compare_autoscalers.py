"""Autoscalers side by side: the best fixed fleet is the one that trying all finds."""

import json

import pytest

from eldr_sim import RunConfig
from eldr_sim.errors import InputError
from eldr_sim.planning.compare.autoscalers import compare_autoscalers
from eldr_sim.reports.folders import contents_of, open_folders
from eldr_sim.reports.pictures import Colours
from eldr_sim.reports.run_pictures import run_pictures
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import simulate

CONFIG = RunConfig(
    trace="reference-moe", topology="3C", policy="jsq", load="ladder:20,90,20@6", input_len=1000,
    output_len=16, goodput={"ttft": 300}, start_up="1", max_num_seqs=16,
    max_cudagraph_capture_size=8192,
)  # fmt: skip


def test_rules_stand_beside_the_best_fixed_fleet_and_a_timetable(tmp_path):
    found = compare_autoscalers(CONFIG, ["seconds:interval=0.5"], 1, jobs=1)
    fleets = {n: simulate(CONFIG.replace(autoscale=f"none:n={n}")).summary for n in (1, 2, 3)}
    served = [n for n, summary in fleets.items() if summary["slo_attainment"] >= 0.95]
    assert found.fixed == f"none:n={min(served)}"
    assert list(found.rules) == ["seconds:interval=0.5", "timetable", found.fixed]
    best = fleets[min(served)]["scaling"]["gpu_hours"]
    ours = found.rules["seconds:interval=0.5"]
    assert ours["percent"] == pytest.approx(100 * (ours["gpu_hours"] / best - 1))
    assert found.rules[found.fixed]["percent"] == 0
    assert ours["low"] is None
    found.write(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["best_fixed"] == found.fixed
    with pytest.raises(InputError, match="twice"):
        compare_autoscalers(CONFIG, ["hpa", "hpa:target=16"], 1)


def test_a_report_shows_workers_over_time(tmp_path):
    write_result(simulate(CONFIG.replace(autoscale="seconds:interval=0.5")), tmp_path / "run")
    folders = open_folders([tmp_path / "run"])
    with contents_of(*folders):
        pictures = run_pictures(folders, Colours())
    shown = {picture.title: picture for picture in pictures}
    names = [series["name"] for series in shown["Workers over time"].spec["data"]]
    assert "decode ready" in names
    assert shown["Arrivals over time"].spec["data"]
