"""The public record: which rows count, what is refused, and errors by hand."""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pytest

from eldr_sim.validation.published import record
from eldr_sim.validation.published.silicon import launch_options
from eldr_sim.validation.published.silicon_rows import MEASURED_MODELS, Case

from .test_silicon import COLUMNS, POOL


@pytest.fixture
def make_file(tmp_path, monkeypatch):
    """Write rows of the package's file; a row is what differs from one Llama-70B run."""
    wanted = ("llama-70b-fp8", "llama-70b-fp8-trtllm", "llama-8b-fp8")
    monkeypatch.setattr(record, "MEASURED_MODELS", {n: MEASURED_MODELS[n] for n in wanted})

    def make(*rows):
        path = tmp_path / "silicon.csv"
        common = {
            "silicon_data_source": "x; silicon_concurrency=4; measured=2026-03-27T08:01:51Z",
            "backend": "vllm", "backend_version": "0.18.0",
            "model_path": "meta-llama/Llama-3.1-70B", "system": "h200_sxm", "mode": "agg",
            "isl": 64, "osl": 8, "tp_size": 4, "attention_dp_size": 1, "moe_tp_size": 4,
            "moe_ep_size": 1, "precision": "fp8", "silicon_ttft_ms": 20.0, "silicon_tpot_ms": 10.0,
        }  # fmt: skip
        pools = [f"{pool}_{name}" for pool in ("prefill", "decode") for name in POOL]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS + pools)
            writer.writeheader()
            writer.writerows(dict.fromkeys(COLUMNS + pools, "") | common | row for row in rows)
        return path

    return make


def test_every_row_is_there_with_its_reason(make_file):
    rows = record.read(
        make_file({}, {"backend": "trtllm"}, {"model_path": "x/Unknown"}, {"backend": "sglang"})
    )
    assert [row.row for row in rows] == [0, 1, 2, 3]
    assert [row.target for row in rows] == ["llama-70b-fp8", "llama-70b-fp8-trtllm", "", ""]
    assert [bool(row.refused) for row in rows] == [False, False, True, True]
    assert rows[0].key != rows[1].key


def test_what_was_measured_does_not_reach_the_configuration(make_file):
    one, other = record.read(
        make_file({}, {"silicon_ttft_ms": 900.0, "silicon_tpot_ms": 1.0, "osl": 8})
    )
    assert one.key == other.key


def test_a_cut_run_goes_on(make_file, tmp_path, monkeypatch):
    """What the journal holds is not simulated again; a line that was cut is."""
    rows = record.read(make_file({}, {"isl": 128}))
    asked = []

    def predict(row, folder):
        asked.append(row.row)
        return row.key, {"tpot": 11.0, "ttft": 10.0}

    monkeypatch.setattr(record, "_predict", predict)
    first = {"key": rows[0].key, "found": {"tpot": 12.0, "ttft": 30.0}}
    (tmp_path / record.JOURNAL).write_text(json.dumps(first) + "\n" + '{"key": "llama')
    found = record.predict_record(rows, tmp_path, jobs=1)
    assert asked == [1]
    assert found[rows[0].key]["tpot"] == 12.0
    assert record.predict_record(rows, tmp_path, jobs=1) == found
    assert asked == [1]


def test_errors_are_those_of_the_rows(make_file, tmp_path):
    rows = record.read(make_file({}, {"isl": 128}, {"isl": 256, "backend": "sglang"}))
    found = {rows[0].key: {"tpot": 12.0, "ttft": 30.0}, rows[1].key: {"tpot": 9.0, "ttft": 20.0}}
    others = tmp_path / "others.csv"
    others.write_text("row,ttft_ms,tpot_ms\n0,20,10\n1,,\n")
    table = record.table_of(rows, found, others)
    assert table.column("tpot_error").to_pylist() == pytest.approx([20.0, -10.0, None])
    (cell,) = (c for c in record.cells(table, ("engine",)) if c["engine"] == "vllm")
    assert (cell["rows"], cell["predicted"], cell["both"]) == (2, 2, 1)
    assert cell["tpot_all"] == pytest.approx((15.0, 19.0, 5.0))
    assert cell["tpot_other"] == pytest.approx((0.0, 0.0, 0.0))
    assert record.cell_lines([cell], ("engine",))[-1].endswith("| none |")
    record.write_page(table, tmp_path / "record.md", "eldr-sim", "today")
    assert "this checkpoint is not modelled" in (tmp_path / "record.md").read_text()
    assert isinstance(table, pa.Table)


@pytest.mark.parametrize(
    ("target", "case", "told"),
    [
        ("deepseek-v3-sglang", Case("B200", 8, 1024, 1024, 64), {"scheduler_recv_interval": 30}),
        ("deepseek-v3-sglang", Case("B200", 4, 1024, 1024, 64), {"scheduler_recv_interval": 10}),
        ("deepseek-v3-sglang", Case("H200", 8, 1024, 1024, 64), {"scheduler_recv_interval": None}),
        ("llama-70b-fp8-trtllm", Case("H200", 4, 1024, 1024, 4), {"batch_wait_timeout_iters": 20}),
        ("llama-70b-fp8-trtllm", Case("H200", 8, 1024, 1024, 4), {"max_num_batched_tokens": 8192}),
        ("llama-70b-fp8-trtllm", Case("H200", 8, 8192, 1024, 4), {"max_num_batched_tokens": 8256}),
        ("gpt-oss-120b-trtllm", Case("H200", 8, 1024, 1024, 4), {"max_num_batched_tokens": 20000}),
        ("llama-70b-fp8", Case("H200", 8, 1024, 1024, 4), {"max_num_batched_tokens": 8192}),
    ],
)
def test_launch_options_are_the_scripts(monkeypatch, target, case, told):
    model = MEASURED_MODELS[target]
    dims = {
        "gpt-oss-120b-trtllm": "GPT-OSS-120B", "deepseek-v3-sglang": "DeepSeek-V3",
    }.get(target)  # fmt: skip
    if dims is not None:  # the package's configurations are not at hand here
        from eldr_sim.kernel_profiles.models import load_model

        found = load_model(dims).model_copy(update={"name": dims.lower()})
        monkeypatch.setattr(type(model), "dims", lambda _self: found)
    options = launch_options(case, model)
    assert {name: options.get(name) for name in told} == told
