"""What a KV transfer costs: the presets against the measurements they come from."""

import re

import numpy as np
import pytest

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.tables.format import weakest
from eldr_sim.simulator.outcome.metrics import warnings_of
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.transfer import PRESETS, Pull, TransferModel, pull_between


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


RUN = {"topology": "1P1D", "num_requests": 4, "output_len": 4, "request_rate": 0.5}


def test_a_hand_over_adds_its_time_to_a_lone_request_and_is_named():
    plain, handed = (
        simulate(make_config(RUN | {"handover": name})) for name in ("none", "vllm_nixl")
    )
    ttft = [np.array(result.requests["ttft_ms"]) for result in (plain, handed)]
    np.testing.assert_allclose(ttft[1], ttft[0] + 110.0, rtol=1e-9)  # 197 - 29 - 58
    assert handed.summary["handover"].startswith("vllm_nixl: derived: vLLM of August 2026")
    assert plain.summary["handover"].startswith("none: ")
    assert handed.summary["provenance"]["handover"]["label"] == "derived"
    assert "handover" not in plain.summary["provenance"]


@pytest.mark.parametrize(("preset", "label"), [("ideal", "published"), ("observed", "derived")])
def test_transfers_are_part_of_what_a_result_rests_on(preset, label):
    summary = simulate(make_config(RUN | {"kv_transfer": preset})).summary
    assert summary["provenance"]["kv_transfer"]["label"] == label
    labels = {entry["label"] for entry in summary["provenance"].values()}
    assert summary["weakest_provenance"] == weakest(labels)
    alone = simulate(make_config(RUN | {"topology": "1C"})).summary
    assert {"kv_transfer", "handover"}.isdisjoint(alone["provenance"])
    assert "handover" not in alone


def test_transfers_beyond_what_was_measured_are_counted():
    """Qwen3-30B-A3B has 96 KV tensors: 18 blocks are 1,728 descriptors, 19 are 1,824."""

    def said(block_size):
        summary = simulate(make_config(RUN | {"block_size": block_size})).summary
        assert warnings_of(summary) == []  # long prompts have so many: nobody could mend it
        return summary["latency_notes"]

    assert said(4096) == []
    (line,) = said(1)
    assert line.startswith("100% of the KV transfers have more descriptors than the 1785")
    longest = int(re.search(r"up to (\d+)", line)[1])
    assert longest % 96 == 0


@pytest.mark.parametrize(
    ("heads", "prefill", "decode", "pull"),
    [
        (4, 8, 2, (2, 4, 2)),  # 8 GPUs hold 4 heads twice: each of two pulls two heads, from two
        (4, 8, 4, (4, 4, 1)),
        (8, 8, 2, (2, 8, 4)),
        (8, 2, 8, (8, 2, 1)),
    ],
)
def test_a_gpu_pulls_each_of_its_heads_once(heads, prefill, decode, pull):
    model = load_model("Qwen3-30B-A3B").model_copy(update={"n_kv_heads": heads})
    assert pull_between(model, Parallelism(prefill), Parallelism(decode)) == pull


def test_all_senders_nics_together_serve_all_receivers():
    """Four GPUs send over 5 GB/s each, two receive: 10 GB/s each, what one could send to one."""
    model = TransferModel(0.0, 1e-6, 100e9, "test")
    over = model.over(5e9, 50e9, Pull(receivers=2, senders=4, sources=2))
    assert (over.bandwidth, over.ingress, over.descriptor_s) == (10e9, 50e9, 2e-6)
