"""The command line: golden listings, files that appear whole, and errors in one line."""

import json

import pyarrow.parquet as pq
import pytest
import yaml

from eldr_sim.cli.console import print_summary
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import open_trace

from ..golden_output import check_golden
from ..on_each import on_each

SHORT = ["--topology", "1P2D", "--request-rate", "10", "--duration", "3", "--warmup", "1"]
SHORT += ["--output-len", "20"]


INSPECT = pytest.param("trace inspect", marks=pytest.mark.slow)  # a tiny trace's is not


@pytest.mark.parametrize("command", ["models", "trace list", INSPECT, "--help"])
def test_listing_is_golden(run_cli, command):
    code, out, err = run_cli(*command.split())
    assert (code, err) == (0, "")
    check_golden(command.strip("-").replace(" ", "_") + ".txt", out)


def test_tables_are_listed_by_words_of_their_lines(run_cli):
    code, out, _ = run_cli("tables", "list", "H200", "msa", "vllm")
    lines = [line for line in out.splitlines()[2:] if line.startswith("h200_")]
    assert code == 0
    assert len(lines) == 6
    assert all("h200" in line and "msa" in out for line in lines)
    code, every, _ = run_cli("tables", "list")  # each on one line
    assert code == 0
    assert len(every.splitlines()) > 2000
    code, out, err = run_cli("tables", "list", "H2000")
    assert (code, out) == (2, "")
    assert "no table contains H2000" in err


def test_gpus_say_what_they_rest_on(run_cli):
    code, out, _ = run_cli("gpus")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()[2:] if line[:1].strip()}
    for name in ("H100", "H200", "A100", "B200"):
        assert "imported" in rows[name]
    assert "derived" in rows["MI300X"]
    assert "imported" in rows["L40S"]
    assert "imported" in rows["B300"]
    assert "roofline" in rows["MI355X"]  # no rows of this model ship


def test_help_and_the_reference_list_every_flag_of_the_readme(run_cli):
    code, out, _ = run_cli("options")
    assert code == 0
    out += run_cli("run", "--help")[1]
    flags = (
        "policy prefill-policy topology model gpu workload trace request-rate burstiness duration "
        "warmup num-requests max-concurrency output-len max-num-seqs max-num-batched-tokens "
        "block-size seed out force plot timeline config"
    )
    out = out.replace(",", " ")  # spellings of one option
    assert [flag for flag in flags.split() if f"--{flag} " not in out] == []


def test_summary_is_golden(capsys):
    figures = {
        f"{statistic}_{tag}_ms": 10.0 * i + j
        for i, tag in enumerate(("ttft", "tpot", "itl", "e2el"))
        for j, statistic in enumerate(("mean", "median", "p90", "p99"))
    }
    summary = {
        "policy": "eldr",
        "prefill_policy": "prefix_hash",
        "model_id": "Qwen3-30B-A3B",
        "gpu": "H100",
        "topology": "8 prefill + 16 decode workers of 1 GPU",
        "num_prompts": 100,
        "completed": 97,
        "failed": 3,
        "failed_reasons": {"exceeds_kv_cache": 1, "unserved_at_time_limit": 2},
        "request_rate": 60.0,
        "max_concurrency": None,
        "duration": 120.0,
        "total_input_tokens": 1000,
        "total_output_tokens": 51200,
        "request_throughput": 59.5,
        "request_goodput": 59.0,
        "slo_attainment": 0.97,
        "slo_attainment_by_metric": {"ttft": 0.97},
        "limits": {"bottleneck": "prefill queue", "because": "a request waits 80 ms on average"},
        "output_throughput": 30464.0,
        "total_token_throughput": 36176.0,
        "max_concurrent_requests": 600,
        "in_flight_at_window_start": 500,
        "in_flight_at_window_end": 560,
        "load_growth": {"from_s": 40.0, "to_s": 150.0, "arrived": 6600, "ended": 5500},
        "mean_decode_batch": 33.25,
        "decode_steps": 4000,
        "mean_active_experts_per_step": 87.5,
        "mean_active_experts_per_token": 92.5,
        "p99_active_experts_per_step": 101.0,
        "expert_parallel_size": 1,
        "preemptions": 0,
        "gpus": 24,
        "gpu_hours_per_million_output_tokens": 0.22,
        "cost_per_million_output_tokens": 0.55,
        "weakest_provenance": "imported",
        "lookups_outside_tables": {"moe_batch": 7, "attention_batch": 0},
        "latency_warnings": ["attention is a roofline"],
        "latency_notes": ["22% of the KV transfers have more descriptors than the 1785 measured"],
        "provenance": {
            **{
                f"{pool}.{part}": {"label": "imported"}
                for pool in ("prefill", "decode")
                for part in ("moe", "gemm")
            },
            "decode.host_gap": {"label": "derived"},
            "kv_transfer": {"label": "derived"},
        },
        "faults": {
            "events": [
                {
                    "event": "decode:3 dies at 60 s, back after 30 s",
                    **{f"goodput_{when}": 30.0 for when in ("before", "during", "after")},
                    **{f"attainment_{when}": 0.5 for when in ("before", "during", "after")},
                    "time_to_recover_s": None,
                }
            ],
            "retried": 3,
            "worker_lost": 29,
            "cancelled": 0,
        },
        "trace": {
            "name": "reference-moe",
            "provenance": "recorded",
            "rests_on": "625,472 recorded tokens of reference-moe-38m; nothing was "
            "recorded of Qwen3-30B-A3B",
            "in_short": "recorded, 625,472 tokens of another model",
            "layers": "6 tiled over 48",
        },
        **figures,
    }
    print_summary(summary)
    captured = capsys.readouterr()
    check_golden("summary.txt", captured.out)
    print_summary(summary, verbose=False)
    short = capsys.readouterr().out
    whole, _, _ = captured.out.partition("-Rests on-")
    assert short.startswith(whole.rstrip("-"))  # all else is the same
    assert short.splitlines()[-4:] == [
        "Rests on (in full: --verbose)".center(64, "-"),
        "  Step times: derived at worst (host gap)",
        "  Routing: recorded, 625,472 tokens of another model",
        "=" * 64,
    ]
    assert captured.err.splitlines() == [
        "Warning: 7 of 4000 decode steps lie outside the latency table (moe batch): extrapolated",
        "Warning: attention is a roofline",
        "Warning: the load is more than the cluster serves: from 40 to 150 s 6600 requests came "
        "and 5500 ended, so latencies grow with the window's length",
        "Warning: the cluster cannot serve this load: 2 of 100 requests had not ended at the time "
        "limit",
    ]


def test_run_writes_a_whole_result_and_replaces_it_only_when_forced(run_cli, tmp_path):
    out = tmp_path / "deep" / "result"
    code, text, _ = run_cli("run", *SHORT, "--out", out, "--plot", "--timeline")
    assert code == 0
    assert f"Wrote {out}" in text
    assert {path.name for path in out.iterdir() if path.suffix != ".png"} == {
        "summary.json",
        "config.json",
        "requests.parquet",
        "steps.parquet",
        "timeline.json",
    }
    drawn = {path.stem for path in out.glob("*.png")}
    assert {"distribution_of_ttft", "tpot_over_time", "components_of_ttft"} < drawn
    assert len(drawn) == 10
    assert [path.name for path in out.parent.iterdir()] == ["result"]  # no temporary left
    summary = json.loads((out / "summary.json").read_text())
    requests = pq.read_table(out / "requests.parquet").to_pandas()
    assert summary["completed"] == int(requests.measured.sum()) > 0

    before = (out / "summary.json").read_bytes()
    code, _, err = run_cli("run", *SHORT, "--seed", 1, "--out", out)
    assert (code, err) == (
        2,
        f"Error: out: {out} exists (allowed: a new folder, or --force to replace a result)\n",
    )
    assert (out / "summary.json").read_bytes() == before
    assert run_cli("run", *SHORT, "--seed", 1, "--out", out, "--force")[0] == 0
    assert (out / "summary.json").read_bytes() != before


def test_force_spares_a_folder_that_is_no_result(run_cli, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    code, _, err = run_cli("run", *SHORT, "--out", tmp_path, "--force")
    assert code == 2
    assert "is not a result" in err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_result_runs_again_from_its_config(run_cli, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    run_cli("run", *SHORT, "--policy", "p2c", "--goodput", "ttft:100", "--out", first)
    code, _, _ = run_cli("run", "--config", first / "config.json", "--out", second)
    assert code == 0
    for name in ("summary.json", "requests.parquet", "steps.parquet", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_options_override_the_config_file(run_cli, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"policy": "jsq", "topology": "1P1D", "duration": 2}))
    code, out, _ = run_cli("run", *SHORT, "--config", path)
    assert code == 0
    assert "jsq, prefix_hash" in out
    assert "1 prefill + 2 decode workers" in out


@on_each(
    "arguments, message",
    [
        (["--policy", "best"], "policy: unknown policy 'best'"),
        (["--prefill-policy", "best"], "prefill_policy: unknown policy 'best'"),
        (["--gpu", "H1000"], "gpu: unknown GPU 'H1000'"),
        (["--model", "Qwen9"], "model: "),
        (["--topology", "8P0D"], "topology: '8P0D'"),
        (["--topology", "P16"], "topology: 'P16'"),
        (["--request-rate", "-5"], "request_rate: '-5'"),
        (["--request-rate", "nan"], "request_rate: 'nan'"),
        (["--request-rate", "inf"], "duration: does not bound an infinite request_rate"),
        (["--duration", "1e308"], "duration: '1e308': input should be less than or equal to"),
        (["--request-rate", "1e6", "--duration", "1d"], "duration: 172,830 s in all at 1e+06"),
        (["--model", "Qwen3-235B-A22B"], "gpu: H100 holds "),
        (["--model", "Mixtral-8x7B", "--gpu", "H200"], "trace: "),
        (["--trace", "no/such/trace"], "trace: "),
        (["--tables", "no/such/folder"], "tables: "),
        (["--workload", "no/such/file"], "workload: "),
        (["--policy", "eldr:artifact=none.npz"], "artifact: cannot read none.npz"),
        (["--policy", "eldr:tau=2"], "policy.tau: '2': input should be less than or equal to 1"),
        (["--policy", "jsq:tau=0.2"], "policy.tau: 'jsq' has no such parameter"),
        (["--policy", "elder"], "policy: unknown policy 'elder'"),
        (["--max-num-batched-tokens", "8", "--max-num-seqs", "16"], "max_num_batched_tokens: 8"),
        (["--block-size", "100000000"], "block_size: a block of 100000000 tokens"),
        (["--goodput", "ttft=5"], "goodput: 'ttft=5'"),
        (["--plot"], "plot: --plot without --out"),
        (["--force"], "force: --force without --out"),
        (["--config", "none.yaml"], "config: cannot read none.yaml"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run_cli, tmp_path, arguments, message):
    out = tmp_path / "out"
    extra = [] if arguments[0] in ("--plot", "--force") else ["--out", out]
    code, text, err = run_cli("run", *arguments, *extra)
    assert (code, text) == (2, "")
    assert err.startswith(f"Error: {message}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


FILES = ("manifest.json", "requests.parquet", "experts.npy.xz", "gate_scores.npz")


def _damaged(tmp_path, damage):
    """Copy the embedded trace and damage the copy."""
    folder = tmp_path / "trace"
    folder.mkdir()
    for path in open_trace("reference-moe").path.iterdir():
        if path.name in FILES:
            (folder / path.name).write_bytes(path.read_bytes())
    damage(folder)
    return folder


def _cut(folder):
    path = folder / "experts.npy.xz"
    path.write_bytes(path.read_bytes()[:100_000])


def _flip(folder):
    path = folder / "experts.npy.xz"
    data = bytearray(path.read_bytes())
    data[100_000] ^= 1
    path.write_bytes(data)


def _flip_scores(folder):
    path = folder / "gate_scores.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _forget(folder):
    (folder / "requests.parquet").unlink()


@pytest.mark.parametrize("damage", [_cut, _flip, _flip_scores, _forget])
def test_damaged_trace_is_refused(run_cli, tmp_path, damage):
    folder = _damaged(tmp_path, damage)
    code, text, err = run_cli("run", *SHORT, "--trace", folder, "--out", tmp_path / "out")
    assert (code, text) == (2, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_more_decoders_than_calibration_requests(run_cli):
    code, _, err = run_cli("run", "--policy", "eldr", "--topology", "1P500D", "--duration", "1")
    assert code == 0
    assert "500 clusters were fitted to 424 calibration requests, each cut into pieces" in err


def test_a_load_that_can_never_be_served_ends_with_its_reason(run_cli):
    code, out, err = run_cli(
        "run", "--topology", "1P1D", "--num-requests", 7, "--output-len", 100_000
    )
    assert code == 1
    assert "exceeds_max_model_len" in out
    assert err == "No request completed: 7 exceeds_max_model_len\n"


def test_fit_and_run_with_the_artifact(run_cli, tmp_path):
    artifact = tmp_path / "artifact.npz"
    code, out, _ = run_cli("fit", "--decoders", 2, "--out", artifact)
    assert code == 0
    assert "2 centroids on 424 calibration requests" in out
    code, out, err = run_cli("fit", "--decoders", 2, "--out", artifact)
    assert (code, err.startswith("Error: out: ")) == (2, True)
    fitted, loaded = tmp_path / "fitted", tmp_path / "loaded"
    run_cli("run", *SHORT, "--policy", "eldr", "--out", fitted)
    run_cli("run", *SHORT, "--policy", f"eldr:artifact={artifact}", "--out", loaded)
    for name in ("requests.parquet", "steps.parquet"):
        assert (fitted / name).read_bytes() == (loaded / name).read_bytes()
    code, _, err = run_cli(
        "run", *SHORT, "--topology", "1P3D", "--policy", f"eldr:artifact={artifact}"
    )
    assert code == 2
    assert err.startswith("Error: artifact: ")


def test_compare_prints_intervals_and_writes_runs(run_cli, tmp_path):
    out = tmp_path / "comparison"
    arguments = ("--policies", "jsq,eldr", "--seeds", 2, "--jobs", 1, *SHORT)
    code, text, _ = run_cli("compare", *arguments, "--out", out)
    assert code == 0
    assert "Difference from round_robin" in text
    assert "best load balancer" in text
    runs = pq.read_table(out / "runs.parquet").to_pandas()
    assert sorted(zip(runs.policy, runs.seed, strict=True)) == sorted(
        (policy, seed) for policy in ("round_robin", "jsq", "eldr") for seed in (0, 1)
    )
    # Paired: every policy gets the same requests under one seed.
    assert runs.groupby("seed").num_prompts.nunique().eq(1).all()
    summary = json.loads((out / "summary.json").read_text())
    assert {entry["reference"] for entry in summary["differences"]} == {
        "round_robin",
        summary["best_load_balancer"],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "seeds: 0"),
        (["--policies", "jsq,jsq"], "policies: "),
        (["--policies", "jsq,best"], "policy: unknown policy 'best'"),
        (["--jobs", "0"], "jobs: 0"),
        (["--force"], "force: --force without --out"),
    ],
)
def test_bad_comparison(run_cli, arguments, message):
    code, _, err = run_cli("compare", *SHORT, *arguments)
    assert code == 2
    assert err.startswith(f"Error: {message}")


def test_interrupt_leaves_nothing(run_cli, tmp_path, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "eldr_sim.simulator.control.compiled_cluster.CompiledCluster.run", interrupted
    )
    code, _, err = run_cli("run", *SHORT, "--out", tmp_path / "out")
    assert (code, err.strip()) == (130, "Interrupted: nothing was written.")
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_of_a_file_was_fitted_elsewhere(run_cli, tmp_path):
    """A run that fits says that its few calibration requests were cut; one that reads does not."""
    few = calibration_set(open_trace("qwen3-30b-a3b"), workload="trace", at_least=16)
    fit(few, 16, seed=0).save(tmp_path / "sixteen.npz")
    run = ["run", "--trace", "qwen3-30b-a3b", "--workload", "trace", "--topology", "1P16D"]
    run += ["--num-requests", "20", "--output-len", "4"]
    said = "16 clusters were fitted to 8 calibration requests"
    for policy, says in (("eldr", True), (f"eldr:artifact={tmp_path / 'sixteen.npz'}", False)):
        code, _, err = run_cli(*run, "--policy", policy)
        assert code == 0
        assert (said in err) == says, err
