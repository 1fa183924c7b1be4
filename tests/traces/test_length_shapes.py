"""Requests drawn by prompt length: the shapes' densities, and what a request keeps."""

import json

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import chisquare

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.length_shapes import LENGTH_SHAPES, draw_by_length, shaped_log
from eldr_sim.traces.requests.logs.request_logs import read_request_log

DENSITY = {
    "central": lambda x: 2 - abs(4 * x - 2),
    "descending": lambda x: 2 - 2 * x,
    "two_end": lambda x: abs(4 * x - 2),
    "average": lambda x: 1.0,
}


@pytest.mark.parametrize("shape", LENGTH_SHAPES)
def test_lengths_have_the_shape(shape):
    """Chi-square over ten parts of x, of 2,000 among 200,000 long-tailed lengths."""
    lengths = np.ceil(np.random.default_rng(0).lognormal(6.5, 1.0, 200_000)).astype(int)
    chosen = draw_by_length(lengths, shape, 2000, 3)
    assert len(np.unique(chosen)) == 2000
    assert (np.diff(chosen) > 0).all()
    longest = np.quantile(lengths, 0.976)
    edges = 1 + (longest - 1) * np.linspace(0, 1, 11)
    if shape == "random":
        assert lengths[chosen].max() > longest
        edges = np.quantile(lengths, np.linspace(0, 1, 11)) + np.linspace(-1e-9, 1e-9, 11)
        expected = np.histogram(lengths, edges)[0] / len(lengths)
    else:
        assert lengths[chosen].max() <= longest
        expected = [quad(DENSITY[shape], k / 10, k / 10 + 0.1)[0] for k in range(10)]
    counts = np.histogram(lengths[chosen], edges)[0]
    assert counts.sum() == 2000
    assert chisquare(counts, 2000 * np.asarray(expected)).pvalue > 0.001


def log(tmp_path, n=300):
    lines = [
        json.dumps(
            {"timestamp": 50 * i, "input_length": 16 * (1 + i % 40), "output_length": 1 + i}
            | {"hash_ids": list(range(i, i + 1 + i % 40)), "session_id": f"s{i}"}
        )
        for i in range(n)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    return tmp_path / "log.jsonl"


def test_a_request_keeps_what_it_is(tmp_path):
    whole = read_request_log(log(tmp_path))
    drawn = shaped_log(whole, "central", 60, 1)
    index = drawn.output_len - 1  # as the log above counts
    np.testing.assert_array_equal(drawn.prompt_len, whole.prompt_len[index])
    np.testing.assert_array_equal(drawn.session, whole.session[index])
    np.testing.assert_allclose(np.diff(drawn.arrival_s), np.diff(index) * 0.05)
    for place, i in enumerate(index.tolist()):
        own = slice(*drawn.prefix_indptr[place : place + 2].tolist())
        theirs = slice(*whole.prefix_indptr[i : i + 2].tolist())
        np.testing.assert_array_equal(drawn.prefix_hash[own], whole.prefix_hash[theirs])


def test_a_run_says_its_shape(tmp_path):
    values = {"workload": str(log(tmp_path)), "num_requests": 30, "topology": "1C"}
    base = make_config(values | {"request_rate": 50})
    lengths = {}
    for shape in (None, "two_end", "central"):
        result = simulate(base.replace(length_shape=shape))
        assert result.summary["trace"].get("length_shape") == shape
        lengths[shape] = result.record.requests["prompt_len"]
    middle = [np.abs(lengths[shape] - 320).mean() for shape in ("central", "two_end")]
    assert middle[0] < middle[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"length_shape": "central"}, "length_shape: without a request log"),
        ({"length_shape": "round"}, "length_shape: 'round'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(values, message):
    with pytest.raises(InputError, match=message):
        simulate(make_config(values | {"num_requests": 5}))


def test_a_log_that_is_too_short_is_refused(tmp_path):
    whole = read_request_log(log(tmp_path, 40))
    for shape in ("two_end", "random"):
        with pytest.raises(InputError, match="num_requests: the shape takes"):
            shaped_log(whole, shape, 41, 0)
