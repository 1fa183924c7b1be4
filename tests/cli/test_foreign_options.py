"""Options of engines and benchmarks lead to ours, or say where the answer comes from."""

from eldr_sim.cli.foreign import _SAID, instead_of
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.launch_options import BENCH_OPTIONS, OPTIONS

from ..on_each import on_each


@on_each(
    "option, says",
    [
        ("--quantization", "comes with the model"),
        ("--dtype", "--kv-cache-dtype"),
        ("--tp-size", "--tensor-parallel-size"),
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        ("--isl", "--input-len"),
        ("--dataset-path", "--workload FILE"),
        ("--trust-remote-code", "leave it out"),
        ("--max-model-lenn", "--max-model-len"),
        ("--enable-eplb", "--engine-args='--enable-eplb"),
        ("--performance-mode", "--engine-args='--performance-mode"),
    ],
)
def test_a_run_says_which_option_is_meant(run_cli, option, says):
    code, _, err = run_cli("run", option, "4")
    assert (code, err.count("\n")) == (2, 4)
    assert says in err.splitlines()[-1]


@on_each("name", sorted(set().union(*OPTIONS.values(), *BENCH_OPTIONS.values())))
def test_every_option_of_an_engine_or_its_benchmark_has_an_answer(name):
    assert name in RUN_FIELDS or instead_of(name)


def test_other_commands_say_whose_option_it_is(run_cli):
    code, _, err = run_cli("gpus", "--max-num-batched-tokens", "4")
    assert code == 2
    assert "an option of `eldr-sim run`" in err


def test_every_option_that_is_named_exists():
    for name in _SAID:
        for word in instead_of(name).replace(",", " ").replace(";", " ").split():
            field = word.lstrip("-").replace("-", "_")
            if word.startswith("--") and word != "--tables":
                assert field in RUN_FIELDS, (name, word)


def test_support_is_printed_by_engine_gpu_and_precision(run_cli):
    code, out, _ = run_cli("support", "Qwen/Qwen3-30B-A3B-Instruct-2507", "--gpu", "H100")
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        ["Qwen3-30B-A3B", "bfloat16", "H100"], ["Qwen3-30B-A3B-FP8", "fp8_block", "H100"],
    ]  # fmt: skip
    assert set(rows[0][4:]) <= {"measured", "derived", "roofline"}
