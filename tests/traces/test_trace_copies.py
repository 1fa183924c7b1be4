"""Copies of one trace request in a batch: against every draw, and against every moment."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.routing.copies import WARN_ABOVE, copy_share, expected_copy_share

from ..on_each import on_each


@on_each("batch", [1, 2, 3, 4])
@on_each("pools", [{"a": 1, "b": 3}, {"a": 2, "b": 1}, {"a": 4}])
def test_expected_share_against_every_draw(pools, batch):
    shares = dict(zip(pools, (0.25, 0.75) if len(pools) == 2 else (1.0,), strict=True))

    def enumerate_draws(chance):
        """Mean over all batches of the share of members that are there twice."""
        expected = 0.0
        for draw in itertools.product(chance, repeat=batch):
            twice = sum(draw.count(member) > 1 for member in draw) / batch
            expected += twice * float(np.prod([chance[member] for member in draw]))
        return expected

    mixed, one_domain = expected_copy_share(pools, shares, batch)
    everyone = {(d, i): shares[d] / n for d, n in pools.items() for i in range(n)}
    assert mixed == pytest.approx(enumerate_draws(everyone))
    alone = sum(
        share * enumerate_draws({(d, i): 1 / pools[d] for i in range(pools[d])})
        for d, share in shares.items()
    )
    assert one_domain == pytest.approx(alone)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 6), st.integers(0, 2)),
        max_size=12,
    )
)
def test_measured_share_against_every_moment(requests):
    """Whole seconds: a request is beside a copy in a second or is not."""
    worker, start, length, copied = np.array(requests, int).reshape(-1, 4).T
    beside = total = 0
    for i, (w, s, n, q) in enumerate(requests):
        for second in range(s, s + n):
            total += 1
            beside += any(
                (w, q) == (v, p) and t <= second < t + m
                for j, (v, t, m, p) in enumerate(requests)
                if j != i
            )
    found = copy_share(worker, start.astype(float), (start + length).astype(float), copied)
    assert found == pytest.approx(beside / total if total else 0)


SHORT = {"topology": "2P2D", "duration": 5, "warmup": 5, "output_len": 64}


def test_a_run_says_how_often_copies_met():
    """Batches far larger than the trace hold copies; a handful of requests, each once, do not."""
    few = simulate(make_config(SHORT | {"num_requests": 50, "request_rate": 20, "warmup": 0}))
    assert few.summary["trace"]["copies_share"] == 0
    assert few.summary["trace_warnings"] == []
    many = simulate(make_config(SHORT | {"request_rate": 400, "policy": "eldr"}))
    measured = many.summary["trace"]["copies_share"]
    assert measured > WARN_ABOVE
    assert 0 < many.summary["trace"]["copies_share_expected"] < measured
    assert f"{100 * measured:.0f}% of decode time" in many.summary["trace_warnings"][0]
    own = simulate(
        make_config(SHORT | {"request_rate": 400, "trace_replay": "same_domain"})
    ).summary["trace_warnings"]
    assert not any("--trace-replay" in line for line in own)
