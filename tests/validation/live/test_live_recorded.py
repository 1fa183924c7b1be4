"""A recorded run of a real vLLM: what its logs held is what is compared and drawn.

``data/live_vllm`` is one run of ``test_live_vllm.py`` (1P1D over NIXL on two CPU cores, vLLM 0.32,
two layers of 16 experts): its campaign, and the engines' logs cut down to its steps.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.serving.router.request_handler import SignatureReader
from eldr_sim.validation.live.engine_log import read_engine_log
from eldr_sim.validation.live.engines.run_writer import steps_table
from eldr_sim.validation.live.live_run import read_live_run
from eldr_sim.validation.live.report.live_report import write_report

DATA = Path(__file__).parent / "data" / "live_vllm"


@pytest.fixture(scope="module")
def run():
    (folder,) = (DATA / "campaign" / "runs").iterdir()
    return read_live_run(folder)


@pytest.fixture(scope="module")
def logs():
    return {e: read_engine_log(DATA / "log" / e) for e in ("prefill0", "decode0")}


def test_the_logs_hold_the_steps_of_the_run(run, logs):
    rows = {name: row for row, name in enumerate(run.requests["request_id"].to_pylist())}
    table = steps_table(logs, rows, 0.0)
    assert table.num_rows == run.steps.num_rows
    for name in ("engine", "request", "position", "tokens", "distinct"):
        assert table[name].to_pylist() == run.steps[name].to_pylist()
    start = table["start_s"].to_numpy() - run.steps["start_s"].to_numpy()
    np.testing.assert_allclose(start, start[0], atol=1e-6)


def test_every_token_was_computed_once(run):
    done = {}
    for step in run.steps.to_pylist():
        role = "prefill" if step["engine"].startswith("prefill") else "decode"
        for request, position, tokens in zip(
            step["request"], step["position"], step["tokens"], strict=True
        ):
            done.setdefault((request, role), []).extend(range(position, position + tokens))
    lengths = (run.requests[f"{kind}_len"].to_pylist() for kind in ("prompt", "output"))
    for row, (prompt, output) in enumerate(zip(*lengths, strict=True)):
        assert done[row, "prefill"] == list(range(prompt))
        assert done[row, "decode"] == list(range(prompt - 1, prompt - 1 + output))


def test_moments_follow_one_another(run, logs):
    for engine, log in logs.items():
        for step, following in zip(log.steps, log.steps[1:], strict=False):
            assert step.start_s < step.forward_start_s < step.forward_end_s < step.end_s
            assert step.end_s <= following.start_s, engine
            inside = step.moe_s + step.attention_s
            assert 0 < inside < step.forward_end_s - step.forward_start_s
    assert len(logs["decode0"].pulled_s) == run.requests.num_rows
    for request in run.requests.to_pylist():
        moments = [request["sent_s"], request["prefilled_s"], request["routed_s"]]
        moments += request["token_s"]
        assert moments == sorted(moments)


def test_signatures_count_the_prompts(run):
    reader = SignatureReader([DATA / "log" / "prefill0"])
    trace = run.trace
    for row, name in enumerate(run.requests["request_id"].to_pylist()):
        counts = reader.counts(name)
        first, n = int(trace.first_row[row]), int(trace.prompt_len[row])
        experts = trace.experts[first : first + n]
        for layer in range(trace.n_layers):
            own = np.bincount(experts[:, layer].ravel(), minlength=trace.n_experts)
            np.testing.assert_array_equal(counts[layer], own)


def test_report_of_the_recorded_run(run, tmp_path):
    document = write_report(DATA / "campaign", tmp_path / "report")
    (distinct,) = document["comparison"]["distinct"]
    assert distinct["wrong_layers"] == distinct["matched_wrong"] == 0
    assert distinct["layers"] == run.steps.num_rows * run.trace.n_layers
    assert document["setups"].keys() == {"1P1D"}
    (at,) = document["comparison"]["runs"]
    assert at["incomplete"] == 0
    text = (tmp_path / "report" / "README.md").read_text()
    assert "vllm 0.32" in text
    assert json.loads((tmp_path / "report" / "comparison.json").read_text())["versions"]
    for picture in document["pictures"]:
        assert (tmp_path / "report" / picture["file"]).stat().st_size > 1000
