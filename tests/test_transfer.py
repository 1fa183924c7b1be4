"""KV transfers: max-min fair shares by their defining property, and transfers by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator.clock import Clock
from eldr_sim.simulator.transfer import PRESETS, TransferModel, TransferNetwork, max_min_rates

# -- rates -------------------------------------------------------------------------------------

flow_lists = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=25)


@settings(max_examples=300)
@given(flows=flow_lists, egress=st.integers(1, 20), ingress=st.integers(1, 20))
def test_every_flow_has_a_bottleneck(flows, egress, ingress):
    """Max-min fair is: feasible, and every flow is largest on some full link it crosses."""
    rates = max_min_rates(flows, float(egress), float(ingress))
    links = [
        [i for i, flow in enumerate(flows) if flow[side] == node]
        for side in (0, 1)
        for node in range(5)
    ]
    capacity = [egress] * 5 + [ingress] * 5
    bottlenecked = set()
    for users, limit in zip(links, capacity, strict=True):
        total = sum(rates[i] for i in users)
        assert total <= limit * (1 + 1e-12)
        if users and total >= limit * (1 - 1e-12):
            most = max(rates[i] for i in users)
            bottlenecked |= {i for i in users if rates[i] >= most * (1 - 1e-12)}
    assert bottlenecked == set(range(len(flows)))


@settings(max_examples=300)
@given(flows=flow_lists, egress=st.integers(1, 20), ingress=st.integers(1, 20))
def test_rates_equal_water_filling(flows, egress, ingress):
    """All flows rise together in exact arithmetic; who crosses a full link stops."""
    level = [Fraction(0)] * len(flows)
    rising = set(range(len(flows)))
    links = [(side, node) for side in (0, 1) for node in range(5)]
    while rising:
        steps = {}
        for side, node in links:
            users = [i for i, flow in enumerate(flows) if flow[side] == node]
            climbing = [i for i in users if i in rising]
            if climbing:
                spare = (egress, ingress)[side] - sum(level[i] for i in users)
                steps[side, node] = spare / len(climbing)
        step = min(steps.values())
        for i in rising:
            level[i] += step
        full = [link for link, room in steps.items() if room == step]
        rising -= {i for i in rising for side, node in full if flows[i][side] == node}
    np.testing.assert_allclose(
        max_min_rates(flows, float(egress), float(ingress)), [float(x) for x in level], rtol=1e-12
    )


def test_rates_of_a_textbook_case():
    """Links of 1: three flows leave worker 0, so the second flow into 10 gets the rest."""
    flows = [(0, 10), (0, 11), (0, 12), (1, 10)]
    assert max_min_rates(flows, 1.0, 1.0) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


# -- transfers ---------------------------------------------------------------------------------


def ends_of(transfers, model, start_at=0.0):
    """Run (start s, source, destination, bytes, descriptors); return the ends, s."""
    env = Clock(start_at)
    network = TransferNetwork(env, model)
    ends = [math.nan] * len(transfers)
    for i, (at, source, destination, n_bytes, descriptors) in enumerate(transfers):

        def done(i=i):
            assert math.isnan(ends[i])
            ends[i] = env.now

        def begin(_, args=(source, destination, n_bytes, descriptors), done=done):
            network.start(*args, done)

        env.at(start_at + at, begin)
    for _ in range(100 * len(transfers) + 100):
        if env.peek() == np.inf:
            break
        env.step()
    assert not network._flows, "a transfer never ended"
    return ends


LINK = TransferModel(0.0, 0.0, 10.0, "test")


def test_a_transfer_alone_pays_setup_descriptors_and_bytes():
    model = TransferModel(0.5, 0.25, 100.0, "test")
    assert ends_of([(1.0, 0, 0, 250.0, 4)], model) == pytest.approx([1.0 + 0.5 + 1.0 + 2.5])
    assert ends_of([(1.0, 0, 0, 0.0, 0)], model) == [1.5]


def test_two_transfers_over_one_link():
    # 100 bytes from 0 and 50 from 5, 10 B/s: together at 5 B/s from 5 s on, 50 left each.
    assert ends_of([(0, 0, 0, 100, 0), (5, 0, 1, 50, 0)], LINK) == pytest.approx([15.0, 15.0])
    # 20 bytes from 5: done at 9, and the first one gets the whole link back with 30 to go.
    assert ends_of([(0, 0, 0, 100, 0), (5, 0, 1, 20, 0)], LINK) == pytest.approx([12.0, 9.0])
    # The same into one decode worker.
    assert ends_of([(0, 0, 7, 100, 0), (5, 1, 7, 20, 0)], LINK) == pytest.approx([12.0, 9.0])
    # No link in common.
    assert ends_of([(0, 0, 0, 100, 0), (5, 1, 1, 20, 0)], LINK) == pytest.approx([10.0, 7.0])


def test_setup_does_not_hold_the_link():
    model = TransferModel(2.0, 0.0, 10.0, "test")
    # The second one's bytes begin at 6; before that the first flows alone.
    assert ends_of([(0, 0, 0, 100, 0), (4, 0, 1, 10, 0)], model) == pytest.approx([13.0, 8.0])


def fluid_ends(transfers, model):
    """Serve the transfers as fluids: rates by the tested function, time from end to end."""
    begin = [at + model.setup_s + d * model.descriptor_s for at, _, _, _, d in transfers]
    left = [float(n) for *_, n, _ in transfers]
    ends, now = {}, 0.0
    while len(ends) < len(transfers):
        on = [i for i in range(len(left)) if begin[i] <= now and i not in ends]
        flows = [transfers[i][1:3] for i in on]
        rate = dict(zip(on, max_min_rates(flows, model.bandwidth, model.bandwidth), strict=True))
        horizon = min([b - now for b in begin if b > now] + [left[i] / rate[i] for i in on])
        now += horizon
        for i in on:
            done = left[i] / rate[i] <= horizon * (1 + 1e-12)
            left[i] -= rate[i] * horizon
            if done:
                ends[i] = now
    return [ends[i] for i in range(len(transfers))]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 25), gap_s=st.sampled_from([0.0, 0.01, 1.0]))
def test_transfers_equal_fluids(seed, n, gap_s):
    rng = np.random.default_rng(seed)
    model = TransferModel(0.01 * rng.random(), 1e-3 * rng.random(), 50.0, "test")
    transfers = list(
        zip(
            np.cumsum(gap_s * rng.exponential(size=n)).tolist(),
            rng.integers(4, size=n).tolist(),
            rng.integers(4, size=n).tolist(),
            rng.integers(1, 100, size=n).tolist(),
            rng.integers(0, 20, size=n).tolist(),
            strict=True,
        )
    )
    ends = ends_of(transfers, model)
    np.testing.assert_allclose(ends, fluid_ends(transfers, model), rtol=1e-7)
    # No link carried more than its capacity allows between its first byte and its last.
    for side in (1, 2):
        for node in range(4):
            mine = [i for i, transfer in enumerate(transfers) if transfer[side] == node]
            if mine:
                seconds = max(ends[i] for i in mine) - min(transfers[i][0] for i in mine)
                assert sum(transfers[i][3] for i in mine) <= model.bandwidth * seconds * (1 + 1e-7)


@pytest.mark.parametrize("start_at", [0.0, 1e4, 1e7, 3e9])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_transfers_end_however_late_it_is(preset, start_at):
    """At 3e9 s two neighbouring floats are 0.5 us apart: still no transfer hangs."""
    rng = np.random.default_rng(7)
    transfers = [
        (float(at), int(s), int(d), float(size), int(size) // 100_000)
        for at, s, d, size in zip(
            rng.random(60) * 0.1,
            rng.integers(3, size=60),
            rng.integers(3, size=60),
            rng.integers(1, 3e7, size=60),
            strict=True,
        )
    ]
    ends = ends_of(transfers, PRESETS[preset], start_at)
    on_time = ends_of(transfers, PRESETS[preset])
    np.testing.assert_allclose(
        np.array(ends) - start_at, on_time, atol=60 * math.ulp(start_at) + 1e-9
    )
