"""Rows that a disturbance of the measurement made slow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.gpus import list_gpus, load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.kernels.kernel_latency import (
    BEHIND,
    CollectiveLatency,
    behind_siblings,
    say,
    spikes,
)
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.tables.library import find_table


def test_a_spike_stands_above_both_neighbours():
    assert spikes([1.0, 1.0, 1.6, 1.0]).tolist() == [False, False, True, False]
    assert not spikes([1.0, 1.0, 1.4, 1.0]).any()
    assert not spikes([1.0, 2.0, 2.1, 2.2]).any()  # a step
    assert not spikes([9.0, 1.0, 1.0, 9.0]).any()  # ends have one neighbour
    assert not spikes([]).any()
    assert say("gather", [1e-6, 9e-6, 2e-6], [8, 16, 32], "bytes") == [
        "gather: the row of 16 bytes is left out: 9.0 us between 1.0 and 2.0"
    ]


@given(
    st.lists(st.floats(1.0, 100.0), min_size=3, max_size=20).map(sorted), st.data()
)  # fmt: skip
def test_a_curve_that_rises_has_none_until_it_is_disturbed(curve, data):
    assert not spikes(curve).any()
    at = data.draw(st.integers(1, len(curve) - 2))
    curve[at] = 2 * curve[at + 1]
    assert np.flatnonzero(spikes(curve)).tolist() == [at]


def test_steps_of_all_siblings_stay_and_spikes_go():
    for gpu in ("B200", "B300"):
        table = find_table("collective", gpu, dtype="float16")
        sizes, seconds = CollectiveLatency.from_table(table).curves["all_gather", 8]
        at = int(np.flatnonzero(sizes == 2**24)[0])
        assert seconds[at] > 2 * seconds[at - 1]
    latency = CollectiveLatency.from_table(find_table("collective", "H100", dtype="float16"))
    assert 1024 not in latency.curves["alltoall", 4][0]
    assert latency.warnings["alltoall", 4][0].startswith(
        "alltoall between 4 H100: the row of 1,024"
    )


def test_a_disturbed_row_of_deepep_does_not_price_the_rows_around_it():
    """445, 17,858 and 550 us for 256, 512 and 1,024 tokens, as imported."""
    model = load_model("MiniMax-M2.5")
    made = build_all_to_all(
        model, load_gpu("GB200"), "deepep_ht", 4, gpus_per_node=4, library="vllm"
    )
    knots, seconds = made.cost.dispatch_knots, made.cost.dispatch_s
    tokens = knots / knots[-1] * 65_536  # the most that was measured
    assert 445e-6 < np.interp(512, tokens, seconds) < 551e-6
    assert any("512 tokens is left out: 17,857.7 us" in warning for warning in made.warnings)


def test_rows_slower_than_on_siblings_of_slower_links_are_those_that_are_named():
    gpus = [load_gpu(name) for name in list_gpus()]
    tables = {gpu.name: find_table("collective", gpu.name, dtype="float16") for gpu in gpus}
    curves = {n: CollectiveLatency.from_table(t).curves for n, t in tables.items() if t}
    links = {gpu.name: gpu.peer_bandwidth(8) for gpu in gpus}
    found = {}
    for name, own in curves.items():
        for key, (sizes, seconds) in own.items():
            for other in curves:
                if links[other] >= links[name] or key not in curves[other]:
                    continue
                theirs = curves[other][key]
                for at in np.flatnonzero(behind_siblings(sizes, seconds, theirs)):
                    slower = round(1e6 * float(np.interp(sizes[at], *theirs)), 1)
                    row = int(sizes[at]), round(1e6 * float(seconds[at]), 1), other, slower
                    known = found.setdefault((name, *key), row)
                    found[name, *key] = min(known, row, key=lambda r: r[3])
    assert found == BEHIND


def test_a_result_that_rests_on_such_a_row_names_it():
    model = load_model("Qwen3-30B-A3B")
    said = build_all_to_all(model, load_gpu("B200"), "allgather_alltoall", 8).warnings
    assert any("16,777,216 bytes takes 103.9 us; on H200" in warning for warning in said)
    assert not build_all_to_all(model, load_gpu("B200"), "nccl_alltoall", 8).warnings
    assert not build_all_to_all(model, load_gpu("H200"), "allgather_alltoall", 8).warnings
