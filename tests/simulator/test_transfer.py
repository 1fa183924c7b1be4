"""What a KV transfer costs: the presets against the measurements they come from."""

from __future__ import annotations

import pytest

from eldr_sim.simulator.transfer import PRESETS, TransferModel


def test_the_observed_preset_meets_the_log_lines_it_comes_from():
    """Two transfers of vLLM's NIXL log: bytes, descriptors, seconds."""
    model = PRESETS["observed"]
    for n_bytes, descriptors, seconds in ((70e6, 56, 9.9e-3), (167e6, 1785, 38.7e-3)):
        predicted = model.setup_s + descriptors * model.descriptor_s + n_bytes / model.bandwidth
        assert predicted == pytest.approx(seconds, rel=0.2)
    assert 1785 * model.descriptor_s == pytest.approx(6.7e-3)  # of which so much posting


def test_the_ideal_preset_is_nixlbench():
    model = PRESETS["ideal"]
    assert model.setup_s + 4096 / model.bandwidth == pytest.approx(20.9e-6, rel=0.01)
    assert model.bandwidth == 42.6e9
    assert model.descriptor_s == 0.0


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_says_where_it_comes_from(name):
    assert PRESETS[name].source.startswith(("published: ", "derived: "))


def test_a_link_is_as_fast_as_the_slower_of_transfer_and_nic():
    model = TransferModel(1e-3, 1e-6, 10e9, "test")
    assert model.ingress == 10e9
    over = model.over(egress_nic=4e9, ingress_nic=6e9)
    assert (over.bandwidth, over.ingress) == (4e9, 6e9)
    assert model.over(20e9, 30e9).ingress == model.over(20e9, 30e9).bandwidth == 10e9
    assert (over.setup_s, over.descriptor_s, over.source) == (1e-3, 1e-6, "test")
    both = TransferModel(0.0, 0.0, 10e9, "test", ingress_bandwidth=3e9).over(5e9, 5e9)
    assert (both.bandwidth, both.ingress) == (5e9, 3e9)
