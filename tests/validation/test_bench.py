"""A user's benchmark beside predictions: what is read of it, and what is said of it."""

import json

import pytest

from eldr_sim.cli.calibrate import results_and_configs
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.arrivals import MOST_BURSTINESS
from eldr_sim.validation.published.bench import errors, predict_bench, with_model
from eldr_sim.validation.published.bench import read_bench as read_benches

from ..on_each import on_each

CONFIG = {"model": "Llama-3.1-8B", "gpu": "H100", "topology": "1C"}
RESULT = {
    "request_rate": "inf", "max_concurrency": 2, "completed": 6, "num_prompts": 6,
    "total_input_tokens": 600, "total_output_tokens": 60, "mean_ttft_ms": 20.0,
    "mean_tpot_ms": 8.0, "p99_ttft_ms": 40.0,
}  # fmt: skip


def read_bench(path):
    (found,) = read_benches(path)
    return found


@pytest.fixture
def result_file(tmp_path):
    def write(**changes):
        path = tmp_path / "result.json"
        path.write_text(json.dumps(RESULT | changes))
        return path

    return write


def test_a_result_of_vllm_bench_is_read(result_file):
    found = read_bench(result_file())
    assert found.load == {
        "num_requests": 6, "request_rate": "inf", "max_concurrency": 2, "input_len": 100,
        "output_len": 10,
    }  # fmt: skip
    assert found.figures == {"mean_ttft_ms": 20.0, "mean_tpot_ms": 8.0, "p99_ttft_ms": 40.0}
    detailed = read_bench(result_file(input_lens=[10, 20], output_lens=[3, 4]))
    assert detailed.lengths == ((10, 3), (20, 4))


@on_each(
    "field",
    ["completed", "num_prompts", "failed", "max_concurrency", "duration", "request_throughput",
     "mean_ttft_ms", "total_input_tokens", "burstiness", "request_rate", "input_lens"],
)  # fmt: skip
def test_switches_and_texts_are_no_numbers_of_a_result(field, tmp_path):
    """``completed: true`` was read as one request."""
    path = tmp_path / "result.json"
    for value in (True, False, "20"):
        of = [value] * 6 if field == "input_lens" else value
        changes = {"input_lens": [9] * 6, "output_lens": [9] * 6} if "lens" in field else {}
        path.write_text(json.dumps(RESULT | {"request_rate": 2.0} | changes | {field: of}))
        if (field, value) == ("request_rate", "20"):
            continue  # as "inf"
        with pytest.raises(InputError, match=field):
            read_bench(path)


def test_no_request_of_a_result_completed(result_file):
    with pytest.raises(InputError, match="no request completed"):
        read_bench(result_file(completed=0))
    with pytest.raises(InputError, match="whole number"):
        read_bench(result_file(completed=5.5))


def test_a_result_of_aiperf_is_read(tmp_path):
    path = tmp_path / "aiperf.json"
    statistics = {"unit": "ms", "avg": 12.0, "p50": 11.0, "p99": 30.0}
    path.write_text(
        json.dumps(
            {
                "time_to_first_token": statistics,
                "input_config": {"loadgen": {"concurrency": 4}},
                "request_count": {"avg": 20},
                "input_sequence_length": {"avg": 99.6},
                "output_sequence_length": {"avg": 10.0},
            }
        )
    )
    found = read_bench(path)
    assert found.figures == {"mean_ttft_ms": 12.0, "median_ttft_ms": 11.0, "p99_ttft_ms": 30.0}
    assert found.load["max_concurrency"] == 4
    assert (found.load["num_requests"], found.load["input_len"]) == (20, 100)


@pytest.mark.parametrize(
    ("loadgen", "burstiness"),
    [
        ({"request_rate": 4.0}, None),
        ({"request_rate": 4.0, "request_rate_mode": "constant"}, 1e9),
        ({"request_rate": 4.0, "arrival_pattern": "constant"}, 1e9),
        ({"request_rate": 4.0, "arrival_pattern": "gamma", "arrival_smoothness": 0.5}, 0.5),
        ({"concurrency": 4, "request_rate_mode": "constant"}, None),
    ],
)
def test_aiperfs_arrivals_are_those_of_its_pattern(tmp_path, loadgen, burstiness):
    path = tmp_path / "aiperf.json"
    lengths = {f"{name}_sequence_length": {"avg": 10} for name in ("input", "output")}
    told = {"input_config": {"loadgen": loadgen}, "request_count": {"avg": 20}}
    path.write_text(json.dumps({"time_to_first_token": {"avg": 1.0}} | lengths | told))
    assert read_bench(path).load.get("burstiness") == burstiness


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"mean_ttft_ms": 3, "completed": 0}'])
def test_what_is_no_result_is_refused(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match="bench"):
        read_bench(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mean_ttft_ms": 0.06, "mean_tpot_ms": 0.009}, "mean_ttft_ms is 0.06, .*in seconds"),
        ({"mean_ttft_ms": 1.5, "mean_tpot_ms": 0.05}, "mean_tpot_ms is 0.05, .*in seconds"),
        ({"mean_ttft_ms": -3}, "mean_ttft_ms is -3"),
        ({"p99_ttft_ms": float("nan")}, "p99_ttft_ms is nan"),
        ({"mean_tpot_ms": float("inf")}, "mean_tpot_ms is inf"),
    ],
)
def test_figures_that_no_server_has_are_refused(result_file, changes, said):
    """They were left out without a word, or judged as milliseconds: +55,704%."""
    with pytest.raises(InputError, match=said):
        read_bench(result_file(**changes))
    assert read_bench(result_file(mean_tpot_ms=0.0)).figures["mean_tpot_ms"] == 0.0


def test_what_is_predicted_has_no_error_against_itself(result_file, tmp_path):
    config = make_config(CONFIG)
    truth = predict_bench(read_bench(result_file()), config, tmp_path)
    measured = {n: truth[n] for n in ("mean_ttft_ms", "mean_tpot_ms")}
    again = errors(read_bench(result_file(**measured)), truth)
    assert [error for key, _, _, error in again if key in measured] == pytest.approx([0.0, 0.0])


def test_lengths_that_are_known_change_no_arrivals(result_file, tmp_path):
    """At a rate requests come at Poisson times, or burstier ones, whether their lengths are told
    one by one or in the mean."""
    load = {
        "request_rate": 20.0, "max_concurrency": None, "completed": 300, "num_prompts": 300,
        "total_input_tokens": 300 * 500, "total_output_tokens": 300 * 20,
    }  # fmt: skip
    lens = {"input_lens": [500] * 300, "output_lens": [20] * 300}
    for burstiness in (0.3, 1.0):
        both = [
            predict_bench(read_bench(result_file(**load, burstiness=burstiness, **more)),
                          make_config(CONFIG), tmp_path)
            for more in ({}, lens)
        ]  # fmt: skip
        mean, each = both
        assert each["mean_ttft_ms"] == pytest.approx(mean["mean_ttft_ms"], rel=0.1)
        assert each["p99_ttft_ms"] == pytest.approx(mean["p99_ttft_ms"], rel=0.2)
        assert not any(line.startswith("burstiness") for line in each["without_effect"])


@on_each("changes", [
        {"mean_ttft_ms": "soon"}, {"mean_ttft_ms": [1]}, {"completed": "all"},
        {"request_rate": "fast", "burstiness": 1.0}, {"total_input_tokens": None},
        {"input_lens": 5, "output_lens": 7}, {"input_lens": ["a"], "output_lens": ["b"]},
        {"time_to_first_token": 3}, {"time_to_first_token": {}, "input_config": None},
        {"time_to_first_token": {}, "request_count": 3},
    ])  # fmt: skip
def test_what_is_no_number_is_one_line(result_file, changes):
    with pytest.raises(InputError, match="bench"):
        read_bench(result_file(**changes))


@pytest.mark.parametrize(
    ("phase", "load"),
    [
        ({"type": "poisson", "rate": 10.0}, {"request_rate": 10.0}),
        (
            {"type": "constant", "rate": 10.0, "concurrency": 9},
            {"request_rate": 10.0, "burstiness": MOST_BURSTINESS, "max_concurrency": 9},
        ),
        ({"type": "gamma", "rate": 4, "smoothness": 2.5}, {"request_rate": 4, "burstiness": 2.5}),
        ({"type": "concurrency", "concurrency": 9}, {"request_rate": "inf", "max_concurrency": 9}),
    ],
)
def test_the_load_of_aiperf_is_its_profiling_phase(tmp_path, phase, load):
    """As aiperf 0.13 writes it; warm-up is another phase, and other arrivals are refused."""
    path = tmp_path / "aiperf.json"

    def write(**phase):
        warmup = {"kind": "warmup", "type": "poisson", "rate": 99.0}
        result = {
            "request_latency": {"avg": 600.0},
            "request_count": {"avg": 20},
            "input_sequence_length": {"avg": 100.0},
            "output_sequence_length": {"avg": 10.0},
            "input_config": {"phases": [warmup, phase] if phase else []},
        }
        path.write_text(json.dumps(result))

    write(kind="profiling", **phase)
    lengths = {"num_requests": 20, "input_len": 100, "output_len": 10}
    assert read_bench(path).load == load | lengths
    write(kind="profiling", type="fixed_schedule")
    with pytest.raises(InputError, match="arrivals of fixed_schedule"):
        read_bench(path)
    write()
    with pytest.raises(InputError, match="does not say its load"):
        read_bench(path)


def guidellm(strategy, *starts):
    """Return a benchmark of GuideLLM's of some requests of 30 and 4 tokens."""
    statistics = {"mean": 2.0, "median": 1.5, "percentiles": {"p50": 1.5, "p90": 3.0, "p99": 4.0}}
    request = {"prompt_tokens": 30, "output_tokens": 4}
    return {
        "config": {"strategy": {"max_concurrency": 512} | strategy},
        "metrics": {
            name: {"successful": statistics, "errored": None}
            for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
        },
        "requests": {"successful": [request | {"request_start_time": at} for at in starts]},
    }


def test_a_sweep_of_guidellm_is_a_result_each(tmp_path):
    """Requests at a rate are sent when they were; users that wait keep so many in flight."""
    path = tmp_path / "guide.json"
    runs = [
        guidellm({"type_": "poisson", "rate": 10.0}, 1e9 + 7, 1e9, 1e9 + 3),
        guidellm({"type_": "concurrent", "streams": 2}, 1e9, 1e9, 1e9 + 1),
        guidellm({"type_": "synchronous"}, 1e9, 1e9 + 1),
    ]
    path.write_text(json.dumps({"metadata": {"version": 2}, "benchmarks": runs}))
    poisson, two, one = read_benches(path)
    assert poisson.name == "guide.json, poisson at 10/s"
    assert poisson.figures == {
        f"{of}_{metric}_ms": factor * value
        for metric, factor in (("ttft", 1), ("tpot", 1), ("e2el", 1000))
        for of, value in (("mean", 2.0), ("median", 1.5), ("p90", 3.0), ("p99", 4.0))
    }
    assert (two.load["max_concurrency"], one.load["max_concurrency"]) == (2, 1)
    assert two.lengths == ((30, 4),) * 3
    config = make_config(CONFIG)
    summary = predict_bench(poisson, config, tmp_path)
    assert summary["completed"] == 3
    assert summary["trace"]["log_window"]["requests"] == 3
    assert predict_bench(two, config, tmp_path)["completed"] == 3


@pytest.mark.parametrize(
    "changes", [{"requests": {}}, {"config": {}}, {"requests": {"successful": []}}, {"metrics": 3}]
)
def test_a_report_of_guidellm_that_lacks_something_is_one_line(tmp_path, changes):
    path = tmp_path / "guide.json"
    benchmark = guidellm({"type_": "poisson", "rate": 10.0}, 1e9) | changes
    path.write_text(json.dumps({"benchmarks": [benchmark]}))
    with pytest.raises(InputError, match=r"guide\.json"):
        read_benches(path)


def test_the_engine_is_the_files_or_refused(result_file):
    """A result of SGLang's was held against vLLM's rules. ``vllm`` and ``openai`` are clients."""
    options = {"gpu": "H100", "topology": "1C"}

    def engine(backend, **more):
        file = result_file(model_id="Qwen/Qwen3-30B-A3B", backend=backend)
        given = options | more
        (made,) = results_and_configs([file], config_from_options(given), given)[1]
        return made.engine.engine, made.engine.gpu_memory_utilization

    usual, sglangs = (make_config(options | {"engine": e}).engine for e in ("vllm", "sglang"))
    for backend in ("vllm", "openai-chat", ""):
        assert engine(backend) == ("vllm", usual.gpu_memory_utilization)
    for backend in ("sglang", "sglang-native", "sglang-oai-chat"):
        assert engine(backend) == ("sglang", sglangs.gpu_memory_utilization)
    assert engine("tensorrt-llm")[0] == engine("trt")[0] == "trtllm"
    assert engine("openai", engine="sglang")[0] == "sglang"
    for more in ({"engine": "vllm"}, {"engine_args": "vllm serve Qwen/Qwen3-30B-A3B"}):
        with pytest.raises(InputError, match=r"engine: vllm, but result\.json is of sglang"):
            engine("sglang", **more)


def test_the_model_is_the_files_or_refused(result_file, tmp_path):
    config = make_config(CONFIG)
    (found,) = read_benches(result_file(model_id="openai/gpt-oss-120b", backend="vllm"))
    assert with_model(found, config, given=False).engine.model == "GPT-OSS-120B"
    with pytest.raises(
        InputError, match=r"model: got Llama-3\.1-8B, but result\.json is of openai"
    ):
        with_model(found, config, given=True)
    for name, said in (("", "names no model"), ("my-own", "no known model")):
        (other,) = read_benches(result_file(model_id=name))
        with pytest.raises(InputError, match=said):
            with_model(other, config, given=False)
        assert with_model(other, config, given=True) is config
    assert "openai/gpt-oss-120b on vllm: 6 requests" in found.in_words()


def test_means_alone_warn_where_requests_keep_in_step(result_file):
    (alone,) = read_benches(result_file())
    assert "waves" in alone.notes[0]
    (at_a_rate,) = read_benches(result_file(request_rate=4.0, max_concurrency=None))
    assert at_a_rate.notes == ()
    lens = {"dataset_name": "random", "random_input_len": 150, "random_output_len": 15,
            "random_range_ratio": 1 / 3}  # fmt: skip
    (drawn,) = read_benches(result_file(**lens))
    assert len(drawn.lengths) == 6
    assert all(50 <= a <= 150 and 5 <= b <= 15 for a, b in drawn.lengths)
    (others,) = read_benches(result_file(**lens | {"random_input_len": 500}))
    assert others.lengths == ()


def test_requests_of_inference_perf_are_measured_again(tmp_path):
    records = [
        {"start_time": 10.0 + i, "end_time": 11.0 + i, "error": None, "info": {
            "input_tokens": 30, "output_tokens": 3,
            "output_token_times": [10.1 + i, 10.15 + i, 10.2 + i]}}
        for i in range(4)
    ]  # fmt: skip
    records.append({"start_time": 15.0, "end_time": 15.5, "error": {"x": 1}, "info": {}})
    path = tmp_path / "per_request_lifecycle_metrics.json"
    path.write_text(json.dumps(records))
    found = read_bench(path)
    assert found.figures["mean_ttft_ms"] == pytest.approx(100.0)
    assert found.figures["mean_tpot_ms"] == pytest.approx(50.0)
    assert found.figures["p99_e2el_ms"] == pytest.approx(1000.0)
    assert (found.arrivals_s, found.sent) == ((10.0, 11.0, 12.0, 13.0), 5)


@pytest.mark.parametrize(("unit", "ms"), [("ms", 12.0), ("s", 12e3), ("us", 12e3), ("ns", 12e6)])
def test_aiperfs_times_are_in_the_unit_that_it_states(tmp_path, unit, ms):
    """The same number in another unit was read as milliseconds."""
    factor = {"ms": 1.0, "s": 1e3, "us": 1e-3, "ns": 1e-6}[unit]
    path = tmp_path / "aiperf.json"
    result = {
        "time_to_first_token": {"unit": unit, "avg": ms / factor},
        "benchmark_duration": {"unit": "sec", "avg": 30.0},
        "input_config": {"loadgen": {"concurrency": 4}}, "request_count": {"avg": 20},
        "input_sequence_length": {"avg": 99.6}, "output_sequence_length": {"avg": 10.0},
    }  # fmt: skip
    path.write_text(json.dumps(result))
    figures = read_bench(path).figures
    assert figures == pytest.approx({"mean_ttft_ms": ms, "duration": 30.0})
    result["time_to_first_token"]["unit"] = "fortnights"
    path.write_text(json.dumps(result))
    with pytest.raises(InputError, match="time_to_first_token in fortnights"):
        read_bench(path)


@pytest.mark.parametrize("text", ["{}\n{}\n", "[{}, {}]"])
def test_results_of_several_runs_in_a_file_are_several(tmp_path, text):
    """SGLang's bench_serving appends a line per run; scripts collect arrays."""
    path = tmp_path / "results.json"
    results = [json.dumps(RESULT | {"max_concurrency": most}) for most in (2, 4)]
    path.write_text(text.replace("{}", "%s") % tuple(results))
    found = read_benches(path)
    assert [each.load["max_concurrency"] for each in found] == [2, 4]
    assert len({each.name for each in found}) == 2


def test_what_a_result_lacks_or_contradicts_is_named(result_file):
    with pytest.raises(InputError, match="input_lens of 2 requests, output_lens of 1"):
        read_bench(result_file(input_lens=[10, 20], output_lens=[3]))
    path = result_file()
    path.write_text(json.dumps({k: v for k, v in RESULT.items() if not k.startswith("total")}))
    with pytest.raises(InputError, match="lacks total_input_tokens"):
        read_bench(path)
