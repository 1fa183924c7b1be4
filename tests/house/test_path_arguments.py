"""Paths are text or any path-like object wherever the API takes one."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from eldr_sim import RunConfig, sweep, write_report
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.compare.policies import compare
from eldr_sim.planning.compare.what_if import read_base, what_if
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config, read_config
from eldr_sim.traces.routing.format import open_trace

SHORT = RunConfig(topology="1P2D", request_rate=10, duration=2, warmup=1, output_len=10)


@dataclass
class Place:
    """A path-like object that is no `Path`."""

    path: Path

    def __fspath__(self):
        return os.fspath(self.path)


@pytest.mark.long
@pytest.mark.parametrize("kind", [str, Path, Place])
def test_written_and_read(kind, tmp_path):
    def at(*names):
        return kind(tmp_path.joinpath(*names))

    result = simulate(SHORT)
    write_result(result, at("run"))
    assert read_base(at("run")) == read_config(at("run", "config.json"))
    assert make_config(read_base(at("run"))) == make_config(result.config["config"])
    compare(SHORT, ["jsq"], 1, jobs=1).write(at("comparison"))
    what_if(SHORT, ["policy=jsq"], n_seeds=1, jobs=1).write(at("what_if"))
    (tmp_path / "sweep.yaml").write_text(
        "config: {topology: 1P2D, duration: 2, warmup: 1, output_len: 10}\n"
        "sweep: {type: grid, parameters: {policy: [jsq]}}\n"
    )
    sweep(at("sweep.yaml"), at("sweep"), jobs=1)
    write_report([at("run"), at("comparison"), at("sweep")], at("report.html"))
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    gpu = load_gpu("H100")
    (tmp_path / "gpu.json").write_text(gpu.model_dump_json())
    assert load_gpu(at("gpu.json")) == gpu
    config = RunConfig(gpu=at("gpu.json"), tables=at("none"), trace=at("x"), workload=at("log"))
    assert (config.cluster.gpu, config.routing.trace) == (
        str(tmp_path / "gpu.json"),
        str(tmp_path / "x"),
    )
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_names_may_be_path_like():
    assert load_model(Place(Path("Mixtral-8x7B"))) == load_model("Mixtral-8x7B")
    with pytest.raises(ValueError, match="neither an embedded trace nor a folder"):
        open_trace(Place(Path("nowhere")))
