"""The configuration of a result runs again from any folder, and moves with what it names."""

import json
import shutil

import pytest

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.simulator.setup.config.paths import portable, resolved
from eldr_sim.simulator.setup.config.run_config import make_config, read_config

LOG = "".join(
    json.dumps({"timestamp": 100 * i, "input_length": 64, "output_length": 16, "hash_ids": [i]})
    + "\n"
    for i in range(20)
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with files that a run may name, which is the current one."""
    here = tmp_path / "here"
    for folder in ("tables", "reference-moe", "deep"):
        (here / folder).mkdir(parents=True)
    (here / "log.jsonl").write_text(LOG)
    (here / "gpu.json").write_text(load_gpu("H100").model_dump_json())
    (here / "h100").write_text("names win over paths")
    monkeypatch.chdir(here)
    return here


def test_a_result_runs_again_elsewhere_and_moved(run_cli, place, tmp_path, monkeypatch):
    out = place / "deep" / "first"
    options = ["--workload", "log.jsonl", "--gpu", "gpu.json", "--topology", "1P2D"]
    options += ["--warmup", "0", "--trace", "reference-moe"]
    code, _, err = run_cli("run", *options, "--policy", "jsq", "--out", "deep/first")
    assert (code, err) == (0, "")
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["workload"], config["gpu"]) == ("../../log.jsonl", "../../gpu.json")
    assert (config["trace"], config["model"]) == ("reference-moe", "Qwen3-30B-A3B")
    monkeypatch.chdir(tmp_path)
    shutil.move(place, tmp_path / "there")
    again = tmp_path / "there" / "deep" / "again"
    code, _, err = run_cli("run", "--config", "there/deep/first/config.json", "--out", again)
    assert (code, err) == (0, "")
    first = tmp_path / "there" / "deep" / "first"
    for name in ("summary.json", "config.json", "requests.parquet", "steps.parquet"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


def test_every_field_that_may_be_a_path(place):
    values = {
        "workload": "log.jsonl",
        "tables": "tables",
        "trace": "./reference-moe",
        "model": str(place / "gpu.json"),
        "gpu": "h100",
        "decode": {"gpu": "gpu.json", "max_num_seqs": 4},
        "policy": "eldr:artifact=a,b.npz,tau=0.2",
        "seed": 3,
    }
    kept = portable({"config": values, "versions": {}}, place / "deep" / "out")
    assert kept == {
        "config": {
            "workload": "../../log.jsonl",
            "tables": "../../tables",
            "trace": "../../reference-moe",
            "model": "../../gpu.json",
            "gpu": "h100",
            "decode": {"gpu": "../../gpu.json", "max_num_seqs": 4},
            "policy": "eldr:artifact=../../a,b.npz,tau=0.2",
            "seed": 3,
        },
        "versions": {},
    }
    found = resolved(kept["config"], place / "deep" / "out")
    assert found["decode"]["gpu"] == found["model"] == str(place / "gpu.json")
    assert found["trace"] == str(place / "reference-moe")
    assert found["policy"] == f"eldr:artifact={place}/a,b.npz,tau=0.2"
    assert (found["gpu"], found["seed"]) == ("h100", 3)
    inside = portable({"config": {"tables": "deep/out/tables"}}, "deep/out")
    assert inside["config"]["tables"] == "./tables"


def test_names_stay_names(place):
    config = make_config({"gpu": "h100"}).model_dump(mode="json")
    assert portable({"config": config}, place)["config"] == config


def test_paths_in_yaml_lead_from_the_current_folder(place):
    (place / "deep" / "run.yaml").write_text("workload: ./log.jsonl\n")
    assert read_config("deep/run.yaml") == {"workload": "./log.jsonl"}
