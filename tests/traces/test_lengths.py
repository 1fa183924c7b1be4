"""Lengths that are asked for, common prefixes, and arrivals drawn for a log's requests."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.arrivals import draw_arrivals
from eldr_sim.traces.requests.lengths import draw_lengths
from eldr_sim.traces.routing.format import open_trace

from ..workloads import make_workload


@pytest.fixture(scope="module")
def trace():
    return open_trace()


def made(trace, **arguments):
    return make_workload(
        trace, **({"request_rate": 10.0, "num_requests": 200, "output_len": 8} | arguments)
    )


@given(st.integers(1, 10_000), st.floats(0, 0.999), st.integers(0, 5))
def test_lengths_lie_in_the_range_of_vllm(length, ratio, seed):
    drawn = draw_lengths(length, ratio, 50, seed, "input-length")
    assert drawn.min() >= max(1, math.floor(length * (1 - ratio)))
    assert drawn.max() <= math.ceil(length * (1 + ratio))
    assert (draw_lengths(length, ratio, 20, seed, "input-length") == drawn[:20]).all()


def test_all_lengths_are_equally_likely():
    drawn = draw_lengths(10, 0.5, 11_000, 0, "input-length")
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == list(range(5, 16))
    assert stats.chisquare(counts).pvalue > 1e-3


def test_input_and_output_lengths_are_those_asked_for(trace):
    plain = made(trace, seed=3)
    fixed = made(trace, seed=3, input_len=2000)
    assert set(fixed.prompt_len.tolist()) == {2000}
    assert (fixed.text == plain.text).all()
    assert (fixed.arrival_s == plain.arrival_s).all()
    recorded = trace.prompt_len[fixed.text]
    share = fixed.description["prompt_tokens_beyond_recorded_share"]
    assert share == pytest.approx(1 - recorded.mean() / 2000, abs=1e-6)
    assert plain.description["prompt_tokens_beyond_recorded_share"] == 0.0
    assert fixed.description["isl"] == {"mean": 2000.0, "p50": 2000.0, "p99": 2000.0}
    both = made(trace, seed=3, input_len=2000, output_len=100, range_ratios=(0.1, 0.5))
    assert both.prompt_len.min() >= 1800
    assert both.prompt_len.max() <= 2200
    assert 50 <= both.output_len.min() < both.output_len.max() <= 150


def test_prompts_of_one_prefix_begin_alike(trace):
    found = made(trace, input_len=100, prefix_len=300, num_prefixes=3)
    assert set(found.prompt_len.tolist()) == {400}
    assert set(found.prefix_hash.tolist()) == {0, 1, 2}
    for number in range(3):
        alike = np.flatnonzero(found.prefix_hash == number)
        first = {found.prompt_ranges(i)[0] for i in alike.tolist()}
        assert len({(request, min(stop, 300)) for request, _, stop in first}) == 1


def test_all_but_the_first_prompt_find_the_prefix_in_the_cache(embedded_routing):
    """One prefill worker, prompts one by one: full KV blocks of the prefix are computed once."""
    config = make_config(
        {"topology": "1P1D", "policy": "jsq", "request_rate": 1, "num_requests": 12,
         "input_len": 50, "prefix_len": 200, "output_len": 2}
    )  # fmt: skip
    cached = simulate(config).requests["cached_tokens"].to_pylist()
    assert cached == [0, *[200 // 16 * 16] * 11]
    alone = simulate(config.replace(enable_prefix_caching=False)).requests
    assert set(alone["cached_tokens"].to_pylist()) == {0}


@pytest.fixture
def log(tmp_path):
    """Five requests at once; three of them begin alike."""
    lines = [
        {"timestamp": 0, "input_length": 512 + i, "output_length": 3 + i, "session_id": f"s{i % 2}"}
        | {"hash_ids": [min(i, 2), 10 + i]}
        for i in range(5)
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_arrivals_are_drawn_for_the_requests_of_a_log(trace, log):
    found = [
        made(trace, workload=log, arrivals="poisson", output_len="recorded", seed=seed)
        for seed in (0, 1)
    ]
    for seed, each in enumerate(found):
        assert (each.arrival_s == draw_arrivals(10.0, 1.0, None, 200, seed)).all()
        assert each.prompt_len.tolist() == [512, 513, 514, 515, 516] * 40
        assert each.output_len.tolist() == [3, 4, 5, 6, 7] * 40
        assert each.description["log_repeats"] == 40
        assert each.description["arrivals"] == "Poisson, lengths recorded (mooncake)"
    blocks = [set(found[0].blocks(i).tolist()) for i in range(200)]
    assert blocks[2] & blocks[3]  # one prefix, within a round
    for first in range(5):  # what begins again is another request
        assert all(blocks[first].isdisjoint(other) for other in blocks[5:])
    assert len(set(found[0].session.tolist())) == 2 * 40
    short = made(trace, workload=log, arrivals="poisson", num_requests=3, burstiness=0.5)
    assert (short.arrival_s == draw_arrivals(10.0, 0.5, None, 3, 0)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_len": 0}, "input_len: got 0"),
        ({"range_ratios": (1.0, 0.0)}, "random_range_ratio: got 1"),
        ({"range_ratios": (0.5, 0.5), "output_len": "recorded"}, "random_range_ratio: the lengths"),
        ({"num_prefixes": 2}, "num_prefixes: "),
        ({"prefix_len": 16, "prompts": "shared"}, "prefix_len: whole prompts"),
        ({"arrivals": "recorded"}, "arrivals: workload task"),
        ({"columns": "input=a,output=b"}, "columns: workload task"),
    ],
)
def test_bad_lengths(trace, arguments, message):
    with pytest.raises(InputError) as error:
        made(trace, **arguments)
    assert str(error.value).startswith(message)


def test_a_log_with_blocks_says_its_lengths_itself(trace, log):
    for field in ("input_len", "prefix_len"):
        with pytest.raises(InputError, match=f"{field}: the blocks of log"):
            made(trace, workload=log, request_rate=None, num_requests=None, **{field: 64})
    with pytest.raises(InputError, match="request_rate: missing, and drawn arrivals need it"):
        made(trace, workload=log, request_rate=None, arrivals="poisson")
