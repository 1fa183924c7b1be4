"""The public record: which rows count, what is refused, and errors by hand."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.simulator.setup.config.engine_rules import HOST_WAIT_MS
from eldr_sim.validation.published import launch_scripts, record, silicon_rows
from eldr_sim.validation.published.journal import OF_RECORD
from eldr_sim.validation.published.launch_scripts import Script
from eldr_sim.validation.published.silicon import ACCEPTANCE, Form, case_fields, launch_options
from eldr_sim.validation.published.silicon_rows import MEASURED_MODELS, Case, Workers

from ..on_each import on_each
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
        return {"tpot": 11.0, "ttft": 10.0}

    monkeypatch.setattr(record, "_figures", predict)
    first = {"key": rows[0].key, "found": {"tpot": 12.0, "ttft": 30.0}}
    (tmp_path / OF_RECORD).write_text(json.dumps(first) + "\n" + '{"key": "llama')
    found = record.predict_record(rows, tmp_path, jobs=1)
    assert asked == [1]
    assert found[rows[0].key]["tpot"] == 12.0
    assert record.predict_record(rows, tmp_path, jobs=1) == found
    assert asked == [1]


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--every", "2"), ("--engine", "vllm")])
def test_the_command_predicts_and_writes_its_page(make_file, tmp_path, monkeypatch, run_cli, more):
    """``validate published --out DIR``, whole, without and with another estimator's figures."""
    rows = record.read(make_file({}, {"isl": 128}, {"isl": 256, "backend": "sglang"}))
    monkeypatch.setattr(record, "read", lambda: rows)
    out = tmp_path / "record"
    code, said, error = run_cli(
        "validate", "published", "--of", "aiconfigurator", "--out", out, "--jobs", 1, *more
    )
    assert code == 0, error
    assert f"Wrote {out / 'record.md'}" in said
    assert {"record.md", "record.png", "rows.csv"} <= {path.name for path in out.iterdir()}
    with (out / "rows.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == {(): 3, ("--every", "2"): 1, ("--engine", "vllm"): 2}[more]
    assert all(row["tpot_ms"] for row in table)
    predicted = [float(row["tpot_predicted_ms"]) for row in table if row["tpot_predicted_ms"]]
    assert predicted
    assert min(predicted) > 0


def test_errors_are_those_of_the_rows(make_file, tmp_path):
    rows = record.read(make_file({}, {"isl": 128}, {"isl": 256, "backend": "sglang"}))
    found = {rows[0].key: {"tpot": 12.0, "ttft": 30.0}, rows[1].key: {"tpot": 9.0, "ttft": 20.0}}
    others = tmp_path / "others.csv"
    others.write_text("row,ttft_ms,tpot_ms\n0,20,10\n1,,\n")
    table = record.table_of(rows, found, record.read_others(others))
    assert table.column("tpot_error").to_pylist() == pytest.approx([20.0, -10.0, None])
    (cell,) = (c for c in record.cells(table, ("engine",)) if c["engine"] == "vllm")
    assert (cell["rows"], cell["predicted"], cell["both"]) == (2, 2, 1)
    assert cell["tpot_all"] == pytest.approx((15.0, 19.0, 5.0))
    assert cell["tpot_other"] == pytest.approx((0.0, 0.0, 0.0))
    assert record.cell_lines([cell], ("engine",))[-1].endswith("| none |")
    record.write_page(table, tmp_path / "record.md", "eldr-sim", "today")
    page = (tmp_path / "record.md").read_text()
    assert "this checkpoint is not modelled" in page
    assert "![Predicted over measured figures](record.png)" in page
    assert (tmp_path / "record.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(table, pa.Table)


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", "row,ttft_ms\n0,1\n", "row,ttft_ms,tpot_ms\n0,1x,2\n",
             "row,ttft_ms,tpot_ms\n0.5,1,2\n", "row,ttft_ms,tpot_ms\n0,1\n"]
)  # fmt: skip
def test_predictions_of_others_are_checked(tmp_path, text):
    """Which is before any run."""
    (tmp_path / "others.csv").write_text(text)
    with pytest.raises(InputError, match=r"others.*line 2"):
        record.read_others(tmp_path / "others.csv")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"launch": "assumed: listed"}, "its launch is assumed: listed"),
        ({"target": "qwen3-32b"}, "NVIDIA's own"),
        ({"kind": "experts cut, 3 drafts"}, "drafts"),
        ({"mode": "disagg"}, "KV caches"),
        ({"date": "2025-11-02"}, "of 2025"),
        ({}, ""),
    ],
)
def test_the_worst_rows_say_what_is_known_of_them(changes, said):
    row = {"target": "llama-70b-fp8", "launch": "known", "kind": "experts cut", "mode": "agg",
           "date": "2026-03-27"}  # fmt: skip
    assert said in record.why(SimpleNamespace(**row | changes))
    assert bool(record.why(SimpleNamespace(**row | changes))) == bool(said)


@pytest.mark.parametrize(
    ("target", "case", "told"),
    [
        ("deepseek-v3-sglang", Case("B200", 8, 1024, 1024, 64), {"scheduler_recv_interval": 30}),
        ("deepseek-v3-sglang", Case("B200", 4, 1024, 1024, 64), {"scheduler_recv_interval": 10}),
        ("deepseek-v3-sglang", Case("H200", 8, 1024, 1024, 64), {"scheduler_recv_interval": None}),
        ("deepseek-v3-sglang", Case("H200", 8, 1024, 1024, 64), {"max_num_batched_tokens": 32768}),
        (
            "deepseek-v3-sglang",
            Case("B200", 1, 1024, 1024, 64, True, 8),
            {"max_num_batched_tokens": 4096, "scheduler_recv_interval": None},
        ),
        (
            "deepseek-v3-sglang",  # a chunk bounds prompts, not the sequences that decode
            Case("B200", 1, 1024, 1024, 6144, True, 32, drafts=2),
            {"max_num_batched_tokens": 18432},
        ),
        ("llama-70b-fp8-trtllm", Case("H200", 4, 1024, 1024, 4), {"batch_wait_timeout_iters": 20}),
        ("llama-70b-fp8-trtllm", Case("H200", 8, 1024, 1024, 4), {"max_num_batched_tokens": 8192}),
        ("llama-70b-fp8-trtllm", Case("H200", 8, 8192, 1024, 4), {"max_num_batched_tokens": 8320}),
        ("gpt-oss-120b-trtllm", Case("H200", 8, 1024, 1024, 4), {"max_num_batched_tokens": 20000}),
        (
            "deepseek-v3-trtllm",  # (64 + 1024 + 64 + 63) / 64 * 64
            Case("H200", 8, 1024, 1024, 64, script=Script(least_tokens=0)),
            {"max_num_batched_tokens": 1152, "gpu_memory_utilization": 0.75},
        ),
        (
            "deepseek-v3-trtllm",
            Case("B200", 8, 1024, 1024, 64, script=Script("TRTLLM", True, True)),
            {"piecewise_cuda_graph": True, "batch_wait_timeout_iters": 40},
        ),
        ("deepseek-v3-trtllm", Case("B200", 8, 1024, 1024, 64), {"piecewise_cuda_graph": None}),
        (
            "deepseek-v3-trtllm",
            Case("B200", 1, 1024, 1024, 256, True, 8),
            {"attention_dp_balance": True, "attention_dp_timeout_iters": 60},
        ),
        ("deepseek-v3-sglang", Case("B200", 8, 1024, 1024, 64), {"piecewise_cuda_graph": False}),
        ("llama-70b-fp8", Case("H200", 8, 1024, 1024, 4), {"max_num_batched_tokens": 8192}),
        # NVIDIA's own, by AIConfigurator's generator: a prompt, 1,500 tokens, and the batch
        ("llama-8b-trtllm", Case("H100", 1, 2048, 128, 64), {"max_num_batched_tokens": 3612}),
        (
            "llama-8b-fp8-sglang",
            Case("H200", 1, 4000, 500, 112),
            {"max_num_batched_tokens": 5500, "enable_mixed_chunk": True},
        ),
        ("llama-8b-fp8-sglang", Case("H200", 1, 8000, 500, 56), {"max_num_batched_tokens": 8192}),
        (
            "qwen3-32b",
            Case("H100", 2, 1024, 128, 8),
            {
                "async_scheduling": False,
                "host_gap_ms": HOST_WAIT_MS,
                "max_num_batched_tokens": 2532,
            },
        ),
        ("qwen3-32b-sglang", Case("H100", 2, 1024, 128, 8), {"enable_mixed_chunk": None}),
    ],
)
def test_launch_options_are_the_scripts(monkeypatch, target, case, told):
    model = MEASURED_MODELS[target]
    dims = {
        "gpt-oss-120b-trtllm": "GPT-OSS-120B", "deepseek-v3-sglang": "DeepSeek-V3",
        "deepseek-v3-trtllm": "DeepSeek-V3",
    }.get(target)  # fmt: skip
    if dims is not None:  # the package's configurations are not at hand here
        from eldr_sim.kernel_profiles.models import load_model

        found = load_model(dims).model_copy(update={"name": dims.lower()})
        monkeypatch.setattr(type(model), "dims", lambda _self: found)
    options = launch_options(case, model)
    assert {name: options.get(name) for name in told} == told


DEEPSEEK = {"model_path": "deepseek-ai/DeepSeek-R1", "backend": "trtllm", "tp_size": 8}
DUMP = DEEPSEEK | {
    "model_path": "deepseek-ai/DeepSeek-V3", "moe_tp_size": 8, "moe_ep_size": 1,
    "silicon_data_source": "db-dump/2026-04-27; silicon_concurrency=16; measured=2026-03-27T08:01",
}  # fmt: skip


@pytest.fixture
def deepseek(monkeypatch):
    """Read without the package's copy of the model's configuration."""
    target = replace(MEASURED_MODELS["deepseek-v3-trtllm"], shipped="DeepSeek-V3")
    for module in (record, silicon_rows):
        monkeypatch.setattr(module, "MEASURED_MODELS", {"deepseek": target})


def test_a_run_under_two_names_is_what_the_dump_says(make_file, deepseek):
    """The same figures under R1 are the dump's run, its labels and all; others are not told."""
    path = make_file(DEEPSEEK, DUMP, DEEPSEEK | {"silicon_tpot_ms": 7.0})
    deepseek_rows = record.read(path)
    assert deepseek_rows[0].run == deepseek_rows[1].run
    assert deepseek_rows[0].run.case.concurrency == 16  # the dump's, not the row's own
    assert [row.labels["model"] for row in deepseek_rows[:2]] == ["DeepSeek-R1", "DeepSeek-V3"]
    assert "no configuration" in deepseek_rows[2].refused


def test_launches_of_deepseek_say_workers_and_drafts(make_file, deepseek):
    """One recipe read by hand: ctx1_gen3_dep8_batch384_eplb0_mtp3_1184 on B200."""
    launched = DEEPSEEK | {
        "mode": "disagg", "system": "b200_sxm", "isl": 1024, "osl": 1024, "decode_tp_size": 8,
        "decode_attention_dp_size": 1, "decode_moe_ep_size": 8,
        "silicon_data_source": "x; silicon_concurrency=1184; measured=2026-02-12T08:01",
    }  # fmt: skip
    (row,) = record.read(make_file(launched))
    case = row.run.case
    assert case.drafts == 3
    assert case.prefill == Workers(1, 1, True, 8)
    assert (case.decode_workers, case.parallelism) == (3, Parallelism(1, True, 8))
    fields = case_fields(case, record.MEASURED_MODELS["deepseek"], Form())
    config = fields["speculative_config"]
    assert config["num_speculative_tokens"] == 3
    assert config["synthetic_acceptance_rates"] == pytest.approx(
        [ACCEPTANCE["trtllm"] ** i for i in (1, 2, 3)]
    )


def test_assumed_launches_are_marked_and_stand_apart(make_file, deepseek, monkeypatch):
    """No measurement reaches the rule: it is a table of labels, days and concurrencies."""
    launches = silicon_rows._launches()
    assumed = {key: found for key, found in launches.items() if found[3]}
    assert len(assumed) > 200
    key = next(k for k in assumed if k[:6] == ("dsr1", "trtllm", "agg", "b200_sxm", "fp8", "1024"))
    run = DEEPSEEK | {
        "system": key[3], "isl": key[5], "osl": key[6], "tp_size": key[9],
        "attention_dp_size": key[10], "moe_ep_size": key[11],
        "silicon_data_source": f"x; silicon_concurrency={key[7]}; measured={key[8]}T08:01",
    }  # fmt: skip
    rows = record.read(make_file(run, DUMP))
    assert [row.run.assumed for row in rows] == [assumed[key][3], ""]
    found = {row.key: {"tpot": 12.0, "ttft": 30.0} for row in rows}
    table = record.table_of(rows, found)
    assert table.column("launch").to_pylist() == [f"assumed: {assumed[key][3]}", "known"]
    assert [cell["predicted"] for cell in record.cells(table, ("launch",))] == [1, 1]


def test_ranks_that_do_not_divide_the_experts_hold_the_copies_of_the_recipes():
    case = Case("GB200", 1, 1024, 1024, 1024, True, 48, 1, Workers(3, 1, True, 8))
    target = replace(MEASURED_MODELS["deepseek-v3-sglang"], shipped="DeepSeek-V3")
    fields = case_fields(case, target, Form())
    assert (fields["num_redundant_experts"], fields["gpu_memory_utilization"]) == (32, 0.82)
    assert fields["prefill"]["num_redundant_experts"] == 0
    assert (
        case_fields(replace(case, data_parallel_size=32), target, Form())["num_redundant_experts"]
        == 0
    )


def test_a_prefill_worker_has_a_step_of_its_own():
    case = Case("B200", 1, 1024, 1024, 6144, True, 32, 1, Workers(2, 1, True, 8))
    target = replace(MEASURED_MODELS["deepseek-v3-sglang"], shipped="DeepSeek-V3")
    fields = case_fields(case, target, Form())
    assert fields["max_num_batched_tokens"] == 6144
    assert fields["prefill"]["max_num_batched_tokens"] == 32768 // 8
    assert fields["prefill"]["max_num_seqs"] == 4096
    assert fields["kv_cache_dtype"] == "fp8"
    assert case_fields(replace(case, gpu="H200"), target, Form())["kv_cache_dtype"] == "auto"


ONE_K, LONG = (1024, 1024), (8192, 1024)


@on_each(
    "gpu, precision, date, lengths, streams, layout, drafts, said",
    [
        ("B200", "fp8", "2025-12-15", ONE_K, 64, Parallelism(8, True), 0, ("DEEPGEMM", 0, 0)),
        ("B200", "fp8", "2026-01-29", ONE_K, 32, Parallelism(8), 0, ("TRTLLM", 0, 0)),
        ("B200", "fp8", "2026-01-29", ONE_K, 64, Parallelism(8), 0, ("TRTLLM", 1, 1)),
        ("B200", "fp8", "2026-01-29", LONG, 64, Parallelism(8), 0, ("TRTLLM", 1, 0)),
        ("B200", "fp8", "2026-01-29", (1024, 8192), 64, Parallelism(8), 0, ("TRTLLM", 0, 0)),
        ("B200", "fp8", "2026-01-29", (1024, 8192), 128, Parallelism(8), 0, ("TRTLLM", 1, 0)),
        ("B200", "fp8", "2026-01-29", (1024, 8192), 256, Parallelism(8), 0, ("TRTLLM", 0, 0)),
        ("B200", "fp8", "2026-02-05", ONE_K, 4, Parallelism(8), 3, ("DEEPGEMM", 0, 0)),
        ("B200", "fp8", "2026-02-05", ONE_K, 64, Parallelism(8), 3, ("DEEPGEMM", 1, 0)),
        ("B200", "fp8", "2026-02-05", ONE_K, 64, Parallelism(1, True, 8), 1, ("DEEPGEMM", 0, 0)),
        ("B200", "fp4", "2026-02-03", ONE_K, 64, Parallelism(8), 0, ("TRTLLM", 0, 0)),
        ("B200", "fp4", "2026-02-03", ONE_K, 64, Parallelism(8, True), 0, ("TRTLLM", 1, 0)),
        ("B200", "fp4", "2025-12-15", ONE_K, 64, Parallelism(8, True), 0, ("TRTLLM", 0, 0)),
        ("B200", "fp4", "2026-02-06", ONE_K, 32, Parallelism(8), 3, ("TRTLLM", 1, 0)),
        ("B200", "fp4", "2026-02-06", ONE_K, 128, Parallelism(1, True, 8), 1, ("CUTLASS", 0, 0)),
        ("H200", "fp8", "2026-01-29", ONE_K, 64, Parallelism(8), 0, ("", 0, 0)),
    ],
)
def test_scripts_of_the_day(gpu, precision, date, lengths, streams, layout, drafts, said):
    """The kernel of the experts, graphs in pieces, and whether prompts wait for each other."""
    prompt, output = map(str, lengths)
    record = DEEPSEEK | {"precision": precision, "mode": "agg", "isl": prompt, "osl": output}
    script = launch_scripts.script_of(record, gpu, date, streams, layout, drafts)
    assert (script.moe_runner, script.piecewise_graphs, script.waits) == said
    assert script.least_tokens == (0 if date < "2026-01-21" else 8192)
    apart = launch_scripts.script_of(record | {"mode": "disagg"}, gpu, date, 64, layout, drafts)
    assert (apart.piecewise_graphs, apart.waits) == (False, False)
    other = record | {"backend": "sglang"}
    assert launch_scripts.script_of(other, gpu, date, 64, layout, 0) == Script()


SPREAD, CUT, SHARED = Parallelism(8, True), Parallelism(8), Parallelism(1, True, 8)


@on_each(
    "model, precision, gpu, lengths, streams, layout",
    [
        ("deepseek-ai/DeepSeek-V3", "fp8", "H200", ONE_K, 64, SPREAD),
        ("deepseek-ai/DeepSeek-V3", "fp8", "H200", LONG, 64, SHARED),
        ("deepseek-ai/DeepSeek-R1", "fp8", "B200", ONE_K, 64, SHARED),
        ("deepseek-ai/DeepSeek-R1", "fp8", "B200", (1024, 8192), 64, SPREAD),
        ("deepseek-ai/DeepSeek-V3", "fp4", "B200", ONE_K, 8, CUT),
        ("deepseek-ai/DeepSeek-V3", "fp4", "B200", ONE_K, 16, SPREAD),
        ("deepseek-ai/DeepSeek-V3", "fp4", "B200", (1024, 8192), 16, CUT),
        ("deepseek-ai/DeepSeek-V3", "fp4", "B200", ONE_K, 256, SHARED),
        ("openai/gpt-oss-120b", "fp4", "H200", ONE_K, 4, SPREAD),
        ("openai/gpt-oss-120b", "fp4", "B200", ONE_K, 128, CUT),
        ("openai/gpt-oss-120b", "fp4", "B200", ONE_K, 256, SHARED),
        ("meta-llama/Llama-3.1-70B", "fp8", "H200", ONE_K, 64, None),
    ],
)
def test_scripts_chose_the_layout_until_november_2025(
    model, precision, gpu, lengths, streams, layout
):
    prompt, output = map(str, lengths)
    record = {"model_path": model, "backend": "trtllm", "precision": precision, "tp_size": "8",
              "isl": prompt, "osl": output}  # fmt: skip
    assert launch_scripts.chosen_layout(record, gpu, "2025-11-02", streams) == layout
    assert launch_scripts.chosen_layout(record, gpu, "2025-11-03", streams) is None
    assert launch_scripts.chosen_layout(record | {"backend": "vllm"}, gpu, "2025-11-02", 4) is None


def test_rows_that_constants_are_fitted_to_are_not_judged(make_file, deepseek):
    source = "db-dump/2026-04-27; silicon_concurrency={}; measured=2025-12-15"
    runs = [
        DUMP | {"isl": 1024, "osl": 1024, "moe_tp_size": 1, "moe_ep_size": 8,
                "silicon_data_source": source.format(streams), "silicon_tpot_ms": 5.0 + streams}
        for streams in (4, 8)
    ]  # fmt: skip
    rows = record.read(make_file(*runs))
    assert [row.run.excluded for row in rows] == [
        "", "the launch on H200's hosts is fitted to it"
    ]  # fmt: skip


def test_every_launch_is_of_known_sizes():
    for key, (prefill, decode, drafts, rule) in silicon_rows._launches().items():
        assert key[1] in ("sglang", "trtllm")
        assert rule in ("", "listed", "nearest", "labels")
        assert (prefill.count > 0) == (key[2] == "disagg") or rule  # labels of GB200 count both
        assert decode.count >= 1
        assert 0 <= drafts <= 3


def test_runs_of_other_moe_runners_have_other_tables(make_file, deepseek, tmp_path, monkeypatch):
    """InferenceX changed ``MOE_BACKEND`` from one day to another; the rest is the same."""
    days = ("2025-12-15", "2026-01-29")
    source = "db-dump/2026-04-27; silicon_concurrency=16; measured="
    same = DUMP | {"system": "b200_sxm"}
    runs = [same | {"silicon_data_source": source + day} for day in days]
    runs[1]["silicon_tpot_ms"] = 8.0
    rows = record.read(make_file(*runs))
    assert [row.run.case.script.moe_runner for row in rows] == ["DEEPGEMM", "TRTLLM"]
    assert rows[0].key != rows[1].key
    made = []

    def tables(folder, cases, *_args):
        (case,) = cases
        (folder / case.script.moe_runner).touch()

    def predict(load, _target, _form, folder, _trace):
        made.append((load.case.script.moe_runner, sorted(path.name for path in folder.iterdir())))
        return {}

    monkeypatch.setattr(record, "case_tables", tables)
    monkeypatch.setattr(record, "predict_load", predict)
    monkeypatch.setattr(record.silicon_rows, "make_routing", lambda path, *_: path.touch())
    for row in rows:
        record._figures(row, str(tmp_path))
    assert made == [("DEEPGEMM", ["DEEPGEMM"]), ("TRTLLM", ["TRTLLM"])]


def test_tables_that_are_refused_are_refused_again(make_file, tmp_path, monkeypatch):
    """Tables that miss a kernel leave no folder that a later row would take for whole."""
    rows = record.read(make_file({}, {"isl": 128}))

    def refuse(*_args):
        raise InputError("silicon", "no MoE table")

    monkeypatch.setattr(record, "case_tables", refuse)
    said = [record._figures(row, str(tmp_path)) for row in rows]
    assert said == ["silicon: no MoE table"] * 2
