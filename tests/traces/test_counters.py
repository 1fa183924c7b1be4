"""Counters of experts: each format gives the same loads, and what is wrong is named."""

import json
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.imports.counters import read_counters

DUMPS = Path(__file__).parent / "data" / "counters"
COUNTS = np.arange(24, dtype=float).reshape(2, 3, 4)  # windows, layers, experts


def dumps(folder):
    """Return the files of each format that hold COUNTS."""
    folder.mkdir(exist_ok=True)
    cumulative = np.cumsum(np.concatenate([np.full((1, 3, 4), 5.0), COUNTS]), axis=0)
    each = list(np.ndindex(3, 4))
    head = '# HELP of the counter\nup{job="a"} 1\n'
    text = {
        f"{at}.prom": head + "\n".join(
            f'moe_tokens_total{{layer="{a}",expert="{e}",model="x"}} {values[a, e]}'
            for a, e in each
        )
        for at, values in enumerate(cumulative)
    }  # fmt: skip
    result = [
        {"metric": {"__name__": "moe_tokens_total", "layer_id": str(a), "expert_id": str(e)},
         "values": [[60 * at, str(values[a, e])] for at, values in enumerate(cumulative)]}
        for a, e in each
    ]  # fmt: skip
    rows = [f"{w},{a},{e},{COUNTS[w, a, e]}" for w, a, e in np.ndindex(COUNTS.shape)]
    known = {
        "sglang": {"x.json": json.dumps({"rank": 0, "logical_count": COUNTS.tolist()})},
        "windows": {
            f"{i}.json": json.dumps({"logical_count": own.tolist()}) for i, own in enumerate(COUNTS)
        },
        "scrapes": text,
        "range": {"r.json": json.dumps({"status": "success", "data": {"result": result}})},
        "csv": {"x.csv": "\n".join(["window,layer,expert,count", *rows])},
    }
    for files in known.values():
        for name, content in files.items():
            (folder / name).write_text(content)
    return {kind: [folder / name for name in files] for kind, files in known.items()}


@pytest.mark.parametrize("kind", ["sglang", "windows", "scrapes", "range", "csv"])
def test_every_format_gives_the_same_loads(tmp_path, kind):
    found = read_counters(dumps(tmp_path)[kind])
    assert found.of == "experts"
    np.testing.assert_array_equal(found.counts, COUNTS)


@pytest.mark.parametrize("files", [["stat"], ["per_pass_0", "per_pass_1"]])
def test_dumps_that_torch_saved_give_the_same_loads(files):
    """Of torch 2.13, with the fields of SGLang's recorder: a buffer of 5 steps, 2 of them served, a
    dense layer 0, copies of experts 0 and 1, and half of a pass's tokens a rank."""
    found = read_counters([DUMPS / f"{name}.pt" for name in files])
    assert (found.of, found.source) == ("experts", "SGLang's recorder")
    np.testing.assert_array_equal(found.counts, COUNTS)


def test_a_counter_that_fell_began_again(tmp_path):
    for name, value in (("a", 10), ("b", 4)):
        lines = f'c{{layer="0",rank="0"}} {value}\nc{{layer="0",rank="1"}} {2 * value}'
        (tmp_path / name).write_text(lines)
    found = read_counters([tmp_path / "a", tmp_path / "b"])
    assert found.of == "ranks"
    assert found.counts.tolist() == [[[4, 8]]]


def test_buckets_of_sglang_are_ranks(tmp_path):
    name = "sglang:eplb_gpu_physical_count_bucket"
    ends = ((0, 3), (1, 8), (2, 9), ("+Inf", 9))
    lines = [f'{name}{{layer="5",le="{end}"}} {value}' for end, value in ends]
    (tmp_path / "x").write_text("\n".join(lines))
    found = read_counters([tmp_path / "x"])
    assert (found.of, found.counts.tolist()) == ("ranks", [[[3, 5, 1]]])


def test_logs_have_the_balance(tmp_path):
    (tmp_path / "vllm.log").write_text(
        "INFO start\n(EngineCore_DP0 pid=9) INFO 11-29 10:00:00 [eplb_state.py:626] EPLB step: 6 "
        "for model m: avg_tokens=100.00, max_tokens=200, balancedness=0.5000, steps until the next "
        "rearrangement: 94\nEPLB step: 7 for model m: avg_tokens=0.00, max_tokens=0, "
        "balancedness=0.0000, steps until the next rearrangement: 93\n"
        "Rearranging experts sync mode ...\n"
    )
    (tmp_path / "sglang.log").write_text(
        "[Expert Balancedness] forward_pass_id=3 current_pass_balancedness=0.800 "
        "last_10_average_balancedness=0.750 last_100_average_balancedness=0.700 "
        "gpu_physical_count_sum=4096\n"
    )
    assert read_counters([tmp_path / "vllm.log"]).balancedness.tolist() == [0.5]
    assert read_counters([tmp_path / "sglang.log"]).balancedness.tolist() == [0.8]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no counters of experts"),
        ("hello", "no counters of experts"),
        ('c{layer="0",expert="a"} 1', "not numbers"),
        ('c{layer="0",expert="0"} many', "line 1: not a sample"),
        ('c{layer="0",expert="0"} -1', "negative"),
        ('c{layer="0",expert="0"} NaN', "not finite"),
        ('c{layer="0",expert="0"} 0', "no token was counted"),
        ('a{layer="0",expert="0"} 1\nb{layer="0",expert="0"} 1', "several metrics"),
        ('{"logical_count": [[1, "x"]]}', "not a whole array"),
        ('{"logical_count": [1, 2]}', "counts of shape"),
        ('{"data": {"result": []}}', "no series"),
        ('{"data": 3}', "not an answer of Prometheus"),
        ("layer,expert,count\n0,0,1\n0,x,1", "line 3: not numbers"),
        ("layer,count\n0,1", "columns layer, count"),
        ("ok\nEPLB step: what now", "line 2: no balancedness"),
        (
            "EPLB step: 1 for model a: avg_tokens=1.0, max_tokens=2\n"
            "EPLB step: 1 for model b: avg_tokens=1.0, max_tokens=2",
            "lines of several models: a, b",
        ),
        ('{"records": [{"forward_pass_id": 1}], "last_physical_to_logical_map": [[0]]}', "records"),
        ('{"records": [], "last_physical_to_logical_map": [[0]]}', "no passes"),
        ("EPLB step: avg_tokens=3.0, max_tokens=2", "above max_tokens"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, said):
    (tmp_path / "x").write_text(content)
    with pytest.raises(InputError, match=said):
        read_counters([tmp_path / "x"])


def test_files_of_two_engines_do_not_fit(tmp_path):
    files = dumps(tmp_path)
    with pytest.raises(InputError, match="several formats or sizes"):
        read_counters([*files["csv"], *files["range"]])
