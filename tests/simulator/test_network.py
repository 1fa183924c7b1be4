"""KV transfers in flight: max-min fair shares by their defining property, and transfers by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.jit import njit
from eldr_sim.simulator.plane import network, state
from eldr_sim.simulator.setup.transfer import PRESETS, TransferModel

from ..on_each import on_each

NODES = 5


@njit()
def begin(clock, events, net, source, target, n_bytes, request):
    network.begin(clock, events, net, source, target, n_bytes, request)


@njit()
def end(clock, events, net):
    return network.end(clock, events, net)


@njit()
def drop(clock, events, net, request):
    network.drop(clock, events, net, request)


@njit()
def share_links(net, n):
    network.spread(net, n)
    network.share_links(net, n)


# -- rates -------------------------------------------------------------------------------------

flow_lists = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), min_size=1, max_size=25
)


def rates_of(flows, egress, ingress):
    """Return the rates of (source, destination) pairs; ingress links have the lower numbers."""
    net = network.make_network(len(flows), np.repeat([float(ingress), float(egress)], NODES))
    for flow, (source, destination) in zip(net.flows, flows, strict=False):
        flow["egress"], flow["ingress"] = NODES + source, destination
    net.touched[:] = True
    share_links(net, len(flows))
    return net.flows["rate"][: len(flows)]


def water_filling(flows, egress, ingress):
    """All flows rise together in exact arithmetic; who crosses a full link stops."""
    level = [Fraction(0)] * len(flows)
    rising = set(range(len(flows)))
    links = [(side, node) for side in (0, 1) for node in range(NODES)]
    while rising:
        steps = {}
        for side, node in links:
            users = [i for i, flow in enumerate(flows) if flow[side] == node]
            climbing = [i for i in users if i in rising]
            if climbing:
                spare = (Fraction(egress), Fraction(ingress))[side] - sum(level[i] for i in users)
                steps[side, node] = spare / len(climbing)
        step = min(steps.values())
        for i in rising:
            level[i] += step
        full = [link for link, room in steps.items() if room == step]
        rising -= {i for i in rising for side, node in full if flows[i][side] == node}
    return [float(x) for x in level]


@given(flows=flow_lists, egress=st.integers(1, 20), ingress=st.integers(1, 20))
def test_every_flow_has_a_bottleneck(flows, egress, ingress):
    """INV-7: Max-min fair is: feasible, and every flow is largest on some full link it crosses."""
    rates = rates_of(flows, egress, ingress)
    links = [
        [i for i, flow in enumerate(flows) if flow[side] == node]
        for side in (0, 1)
        for node in range(NODES)
    ]
    capacity = [egress] * NODES + [ingress] * NODES
    bottlenecked = set()
    for users, limit in zip(links, capacity, strict=True):
        total = sum(rates[i] for i in users)
        assert total <= limit * (1 + 1e-12)
        if users and total >= limit * (1 - 1e-12):
            most = max(rates[i] for i in users)
            bottlenecked |= {i for i in users if rates[i] >= most * (1 - 1e-12)}
    assert bottlenecked == set(range(len(flows)))


@given(flows=flow_lists, egress=st.integers(1, 20), ingress=st.integers(1, 20))
def test_rates_equal_water_filling(flows, egress, ingress):
    expected = water_filling(flows, egress, ingress)
    np.testing.assert_allclose(rates_of(flows, egress, ingress), expected, rtol=1e-12)


def test_rates_of_a_textbook_case():
    """Links of 1: three flows leave worker 0, so the second flow into 0 gets the rest."""
    flows = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert rates_of(flows, 1, 1) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


# -- transfers ---------------------------------------------------------------------------------


class Transfers:
    """The compiled network, with as much of an event loop as it needs."""

    def __init__(self, n, model, now=0.0):
        self.clock = np.zeros(1, state.CLOCK)
        self.clock["now"] = self.clock["updated"] = now
        self.events = np.zeros(3 * n + 8, state.EVENT)
        self.net = network.make_network(n, np.repeat([model.ingress, model.bandwidth], NODES))

    def next_end(self):
        """Return when the next transfer ends; the events of earlier rates have no say."""
        waiting = self.events[: self.clock["n_events"][0]]
        assert (waiting["kind"] == state.TRANSFER_END).all()
        return waiting["time"][waiting["subject"] == self.clock["timer"][0]].min(initial=np.inf)

    def begin(self, now, source, destination, n_bytes, request):
        self.clock["now"] = now
        begin(self.clock, self.events, self.net, source, destination, float(n_bytes), request)

    def end(self, now):
        self.clock["now"] = now
        n_done = end(self.clock, self.events, self.net)
        return self.net.done[:n_done].tolist()

    @property
    def flows(self):
        return self.net.flows[: self.clock["n_flows"][0]]


def ends_of(transfers, model, start_at=0.0, watch=lambda net: None):
    """Run (start s, source, destination, bytes, descriptors); return the ends, s."""
    net = Transfers(len(transfers), model, start_at)
    coming = sorted(
        (start_at + at + (model.setup_s + descriptors * model.descriptor_s), i)
        for i, (at, *_, descriptors) in enumerate(transfers)
    )
    ends = [math.nan] * len(transfers)
    for _ in range(100 * len(transfers) + 100):
        at = net.next_end()
        if coming and coming[0][0] <= at:
            now, i = coming.pop(0)
            net.begin(now, *transfers[i][1:4], i)
        elif at < np.inf:
            for i in net.end(at):
                assert math.isnan(ends[i])
                ends[i] = at
        else:
            break
        watch(net)
    assert len(net.flows) == 0, "a transfer never ended"
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
    assert ends_of([(0, 0, 4, 100, 0), (5, 1, 4, 20, 0)], LINK) == pytest.approx([12.0, 9.0])
    # No link in common.
    assert ends_of([(0, 0, 0, 100, 0), (5, 1, 1, 20, 0)], LINK) == pytest.approx([10.0, 7.0])


def test_setup_does_not_hold_the_link():
    model = TransferModel(2.0, 0.0, 10.0, "test")
    # The second one's bytes begin at 6; before that the first flows alone.
    assert ends_of([(0, 0, 0, 100, 0), (4, 0, 1, 10, 0)], model) == pytest.approx([13.0, 8.0])


@pytest.mark.parametrize("side", ["egress", "ingress"])
def test_equal_shares_in_closed_form(side):
    """Transfers that begin together end by size: each has the rest of all larger ones beside it.

    The k-th of n ends when ``sum(min(size, size_k))`` bytes have crossed the link.
    """
    sizes = [30.0, 10.0, 80.0, 10.0, 25.0]
    places = [(0, i) if side == "egress" else (i, 0) for i in range(5)]
    transfers = [(0.0, *place, size, 0) for place, size in zip(places, sizes, strict=True)]
    expected = [sum(min(other, size) for other in sizes) / 10.0 for size in sizes]
    assert ends_of(transfers, LINK) == pytest.approx(expected)


def random_transfers(rng, n, gap_s, nodes=4):
    at = np.cumsum(gap_s * rng.exponential(size=n))
    return list(
        zip(
            at.tolist(),
            rng.integers(nodes, size=n).tolist(),
            rng.integers(nodes, size=n).tolist(),
            rng.integers(1, 100, size=n).tolist(),
            rng.integers(0, 20, size=n).tolist(),
            strict=True,
        )
    )


def fluid_ends(transfers, model):
    """Serve the transfers as fluids, all rates anew each time; time goes from end to end."""
    begin = [at + model.setup_s + d * model.descriptor_s for at, *_, d in transfers]
    left = [float(n) for *_, n, _ in transfers]
    ends, now = {}, 0.0
    while len(ends) < len(transfers):
        on = [i for i in range(len(left)) if begin[i] <= now and i not in ends]
        flows = [transfers[i][1:3] for i in on]
        rates = water_filling(flows, model.bandwidth, model.ingress) if on else []
        rate = dict(zip(on, rates, strict=True))
        horizon = min([b - now for b in begin if b > now] + [left[i] / rate[i] for i in on])
        now += horizon
        for i in on:
            done = left[i] / rate[i] <= horizon * (1 + 1e-12)
            left[i] -= rate[i] * horizon
            if done:
                ends[i] = now
    return [ends[i] for i in range(len(transfers))]


SPEEDS = st.sampled_from([(50.0, None), (50.0, 20.0), (20.0, 50.0)])


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 25),
    gap_s=st.sampled_from([0.0, 0.01, 1.0]),
    speeds=SPEEDS,
)
def test_transfers_equal_fluids(seed, n, gap_s, speeds):
    rng = np.random.default_rng(seed)
    model = TransferModel(
        0.01 * rng.random(), 1e-3 * rng.random(), speeds[0], "test", ingress_bandwidth=speeds[1]
    )
    transfers = random_transfers(rng, n, gap_s)
    ends = ends_of(transfers, model)
    np.testing.assert_allclose(ends, fluid_ends(transfers, model), rtol=1e-7)
    # No link carried more than its capacity allows between its first byte and its last.
    for side, bandwidth in ((1, model.bandwidth), (2, model.ingress)):
        for node in range(4):
            mine = [i for i, transfer in enumerate(transfers) if transfer[side] == node]
            if mine:
                seconds = max(ends[i] for i in mine) - min(transfers[i][0] for i in mine)
                assert sum(transfers[i][3] for i in mine) <= bandwidth * seconds * (1 + 1e-7)


@given(seed=st.integers(0, 2**32), n=st.integers(1, 25), speeds=SPEEDS)
def test_rates_of_what_shares_nothing_with_a_change_are_still_right(seed, n, speeds):
    """Only the links that a chain of transfers connects with a change are shared anew."""
    rng = np.random.default_rng(seed)
    model = TransferModel(0.0, 0.0, speeds[0], "test", ingress_bandwidth=speeds[1])

    def watch(net):
        pairs = [(flow["egress"] - NODES, flow["ingress"]) for flow in net.flows]
        if pairs:
            expected = water_filling(pairs, model.bandwidth, model.ingress)
            np.testing.assert_allclose(net.flows["rate"], expected, rtol=1e-12)

    ends_of(random_transfers(rng, n, 0.3, NODES), model, watch=watch)


@given(flows=flow_lists, egress=st.integers(1, 20), ingress=st.integers(1, 20), data=st.data())
def test_a_dropped_transfer_leaves_its_bandwidth_to_the_others(flows, egress, ingress, data):
    model = TransferModel(0.0, 0.0, float(egress), "test", ingress_bandwidth=float(ingress))
    net = Transfers(len(flows), model)
    for request, (source, target) in enumerate(flows):
        net.begin(0.0, source, target, 1e6, request)
    dropped = data.draw(st.integers(0, len(flows) - 1))
    drop(net.clock, net.events, net.net, dropped)
    assert dropped not in net.flows["request"]
    left = [pair for request, pair in enumerate(flows) if request != dropped]
    if left:
        expected = water_filling(left, egress, ingress)
        np.testing.assert_allclose(net.flows["rate"], expected, rtol=1e-12)


@on_each("start_at", [0.0, 1e4, 1e7, 3e9])
@on_each("preset", sorted(PRESETS))
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
