"""Constants fitted to runs: hidden ones are found again, and runs left out are not looked at."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.calibration import Calibration, load_calibration
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.validation.published.calibration import (
    Predictions,
    as_yaml,
    calibration_of,
    fit,
    freed,
    held_out,
    next_run,
    of_config,
    serving_run,
)

DENSE = {"model": "Llama-3.1-8B", "gpu": "H100", "topology": "1C", "engine": "vllm"}
#: Loads that tell the constants apart.
LOADS = (
    {"max_concurrency": 1, "num_requests": 3, "input_len": 6000, "output_len": 24},
    {"max_concurrency": 1, "num_requests": 3, "input_len": 64, "output_len": 64},
    {"max_concurrency": 48, "num_requests": 96, "input_len": 1000, "output_len": 64},
)
HIDDEN = Calibration(decode_kernels=1.2, prefill_kernels=0.8, host_gap_ms=0.5, front_end=1.5)


def configs():
    return [make_config(DENSE | load | {"request_rate": "inf"}) for load in LOADS]


@pytest.fixture
def hidden_runs(tmp_path):
    """Runs as measured on an engine with hidden constants."""
    path = tmp_path / "hidden.yaml"
    path.write_text(HIDDEN.model_dump_json())
    runs = []
    for number, config in enumerate(configs()):
        summary = simulate_summary(config.replace(calibration=str(path)))
        measured = {name: summary[f"mean_{name}_ms"] for name in ("tpot", "ttft")}
        runs.append(serving_run(f"run {number}", config, measured))
    return runs


def built(calibration=None, **more):
    return build_step_time_model(
        "Qwen3-30B-A3B", "H100", max_num_seqs=64, max_model_len=4096,
        max_num_batched_tokens=4096, calibration=calibration, **more,
    )  # fmt: skip


def test_equal_factors_scale_every_kernel_and_nothing_else():
    base, scaled = built(), built(Calibration(decode_kernels=1.3, prefill_kernels=1.3))
    experts = [40.0] * base.n_moe_layers
    for asked in (
        {"batch": 8, "context": 8000.0, "activated": experts},
        {"chunks": [(0, 3000), (100, 50)]},
        {"chunks": [(3000, 1)]},  # reads a cached prompt
        {"batch": 4, "context": 900.0, "chunks": [(0, 700)]},
    ):
        one, other = base.parts(**asked), scaled.parts(**asked)
        assert other.host == one.host
        assert other[:5] == pytest.approx([1.3 * seconds for seconds in one[:5]])
    rank, rank_scaled = base.rank_moe(8, 512), scaled.rank_moe(8, 512)
    assert rank_scaled.decode_s == pytest.approx(1.3 * rank.decode_s)


def test_steps_between_small_and_large_lie_between_the_factors():
    found = Calibration(decode_kernels=2.0, prefill_kernels=0.5).at(np.arange(1, 5000))
    assert (np.diff(found) <= 0).all()
    assert found[:256] == pytest.approx(2.0)
    assert found[2047:] == pytest.approx(0.5)
    assert found[723] == pytest.approx(1.0, abs=0.01)  # the middle of 256 and 2,048


def test_one_changes_no_byte(tmp_path):
    path = tmp_path / "none.yaml"
    path.write_text("{}\n")
    config = configs()[0]
    one, other = (
        simulate_summary(each) for each in (config, config.replace(calibration=str(path)))
    )
    assert other["provenance"].pop("calibration")["label"] == "fitted"
    other["weakest_provenance"] = one["weakest_provenance"]
    assert one == other


def test_the_hosts_gap_is_no_less_than_nothing():
    gaps = [built(Calibration(host_gap_ms=gap), host_gap_s=1e-3).host_gap_s for gap in (-5, 0, 2)]
    assert gaps == pytest.approx([0.0, 1e-3, 3e-3])


def test_hidden_constants_are_found_again(hidden_runs, tmp_path):
    predictions = Predictions(tmp_path)
    found = fit(hidden_runs, predictions, [True] * 4)
    constants = calibration_of(found.values)
    assert constants.decode_kernels == pytest.approx(1.2, rel=0.04)
    assert constants.prefill_kernels == pytest.approx(0.8, rel=0.04)
    for run in hidden_runs:
        predicted = predictions.of(run, found.values)
        for name, value in run.measured.items():
            noise = 0.03 if name == "tpot" else 0.1  # figures are not believed beyond these
            assert predicted[name] == pytest.approx(value, rel=noise), (run.name, name)
    assert all(0 < share < 1 for share in found.spread.values())


def test_a_run_left_out_decides_nothing_about_itself(hidden_runs, tmp_path):
    predictions = Predictions(tmp_path)
    wrong = replace(hidden_runs[0], measured={"tpot": 1.0, "ttft": 1e4})
    free = [True, True, False, False]
    first = {
        each.name: each.after
        for runs in (hidden_runs, [wrong, *hidden_runs[1:]])
        for each in held_out(runs, predictions, free)
        if each.name == wrong.name and each.metric == "tpot"
    }
    again = held_out([wrong, *hidden_runs[1:]], predictions, free)
    assert first[wrong.name] == next(e.after for e in again if e.metric == "tpot")


def test_without_a_measurement_nothing_is_learned(tmp_path):
    found = fit([serving_run("none", configs()[0], {})], Predictions(tmp_path), [True] * 4)
    assert list(found.values) == [0.0] * 4
    assert all(share == pytest.approx(1.0) for share in found.spread.values())


def test_the_next_run_teaches_what_is_not_known(hidden_runs, tmp_path):
    """After a run of one short prompt at a time a long one is asked for, and it lowers the spread
    of every constant or leaves it."""
    predictions = Predictions(tmp_path)
    found = fit([hidden_runs[1]], predictions, [True] * 4)
    following = next_run(hidden_runs[1].config, found, predictions, [True] * 4)
    assert "1,000" in following.load or "8,000" in following.load
    assert all(following.spread[name] <= share for name, share in found.spread.items())
    assert following.spread["prefill_kernels"] < 0.8 * found.spread["prefill_kernels"]


def test_a_file_says_what_it_is_of_and_is_read_again(hidden_runs, tmp_path):
    config = hidden_runs[0].config
    found = fit([hidden_runs[1]], Predictions(tmp_path), [True, False, False, False])
    path = tmp_path / "own.yaml"
    path.write_text(as_yaml(found, of_config(config), ["a.json"]))
    read = load_calibration(str(path))
    assert (read.of.model, read.of.gpu, read.of.engine) == ("Llama-3.1-8B", "H100", "vllm")
    assert "a.json" in read.made
    assert read.prefill_kernels == 1.0
    summary = simulate_summary(config.replace(calibration=str(path), gpu="H200"))
    assert any("calibration: of Llama-3.1-8B on H100" in w for w in summary["latency_warnings"])
    assert summary["mean_tpot_ms"] == simulate_summary(config.replace(gpu="H200"))["mean_tpot_ms"]


@pytest.mark.parametrize(
    "text", ["decode_kernels: 0", "decode_kernels: fast", "kernels: 2", "[1]", "of: {model: x}"]
)
def test_what_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="calibration"):
        simulate_summary(configs()[0].replace(calibration=str(path)))


def test_without_api_servers_no_front_end_is_fitted():
    config = configs()[0]
    assert freed(config) == [True] * 4
    assert freed(config.replace(frontend="none")) == [True, True, True, False]


def test_factors_reach_engines_that_share_experts(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("decode_kernels: 1.5\nprefill_kernels: 1.5\n")
    config = make_config(
        {"topology": "1C", "data_parallel_size": 2, "enable_expert_parallel": True,
         "trace": "reference-moe", "num_requests": 3, "output_len": 4, "frontend": "none",
         "request_rate": "inf", "max_concurrency": 1}
    )  # fmt: skip
    one, other = (
        simulate_summary(each) for each in (config, config.replace(calibration=str(path)))
    )
    assert 1.2 < other["mean_tpot_ms"] / one["mean_tpot_ms"] <= 1.5


def test_the_command_fits_and_judges(hidden_runs, tmp_path, run_cli):
    names = []
    for number, run in enumerate(hidden_runs[:2]):
        load = run.config.requests
        names.append(str(tmp_path / f"bench{number}.json"))
        n = load.num_requests
        result = {
            "request_rate": "inf", "max_concurrency": load.max_concurrency, "completed": n,
            "num_prompts": n, "input_lens": [load.input_len] * n,
            "output_lens": [load.output_len] * n,
            "model_id": "meta-llama/Llama-3.1-8B",
            **{f"mean_{name}_ms": value for name, value in run.measured.items()},
        }  # fmt: skip
        (tmp_path / f"bench{number}.json").write_text(json.dumps(result))
    out = tmp_path / "own.yaml"
    words = [*names, "--launch", "vllm serve meta-llama/Llama-3.1-8B", "--gpu", "H100"]
    code, said, err = run_cli("calibrate", *words, "--no-next", "--out", str(out))
    assert code == 0, err
    assert "Predicted from the other runs" in said
    found = yaml.safe_load(out.read_text())
    assert found["of"] == {"model": "Llama-3.1-8B", "gpu": "H100", "engine": "vllm"}
    assert found["decode_kernels"] == pytest.approx(1.2, rel=0.1)
    assert run_cli("calibrate", *words, "--out", str(out))[0] == 2  # it exists
    code, said, err = run_cli("validate", "bench", *names, "--calibration", str(out), *words[-2:])
    assert code == 0, err
