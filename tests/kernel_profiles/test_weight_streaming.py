"""Streamed weights: closed forms, and a twin of processes that wait for each other."""

from itertools import pairwise

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.flops import PrefillWork
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.weight_streaming import (
    Stream,
    plan_stream,
    streamed_ends,
    with_saturation,
)

from ..on_each import on_each

QWEN, QWEN_FP8 = load_model("Qwen3-235B-A22B"), load_model("Qwen3-235B-A22B-FP8")


def ends(starts, layers_s, stream, loaded):
    """One step of ranks that gather together."""
    end = np.zeros(len(starts))
    layers_s = np.atleast_2d(layers_s)
    streamed_ends(
        np.asarray(starts, float), layers_s, 0, len(starts), layers_s.shape[1], stream, loaded, end
    )
    return end


def steady_s(stream, compute_s, n_layers, window, n_steps=40):
    """Seconds a step of equal layers, back to back, once the window has settled."""
    loaded, end, found = np.zeros((1, window)), np.zeros(1), []
    for _ in range(n_steps):
        found.append(end[0])
        streamed_ends(end, np.array([[compute_s]]), 0, 1, n_layers, stream, loaded, end)
    return (found[-1] - found[-11]) / 10


NONE = np.zeros((1, 0))


@given(st.lists(st.floats(0.5, 9), min_size=1, max_size=20), st.floats(0, 0.5), st.floats(0, 100))
def test_gathers_hide_behind_layers_that_are_longer(layers_s, gather_s, start):
    got = ends([start], layers_s, Stream(gather_s, 0.0, 0.0, False), NONE)
    assert got[0] == pytest.approx(start + sum(layers_s), rel=1e-12)


@given(st.integers(1, 100), st.floats(0, 9), st.floats(0, 9), st.floats(0, 1))
def test_equal_layers(n_layers, compute_s, gather_s, interference):
    """``c' + (L - 1) max(c', g)``, of which ``(L - 1) g`` is left for c = 0; the last layer has no
    gather beside it."""
    got = ends(
        [0.0], np.full(n_layers, compute_s), Stream(gather_s, 0.0, interference, False), NONE
    )
    slowed = compute_s + interference * min(compute_s, gather_s)
    if n_layers == 1:
        assert got[0] == compute_s
    else:
        expected = (n_layers - 1) * max(slowed, gather_s) + compute_s
        assert got[0] == pytest.approx(expected, rel=1e-12)


@on_each("window", [1, 2, 5, 9])
@on_each("c, g, h", [(3.0, 2.0, 1.0), (2.0, 3.0, 1.0), (1.0, 2.0, 3.0)])
def test_with_offloading_the_slowest_channel_sets_the_pace(window, c, g, h):
    """``L max(c, g, h)``, but for the first layer, whose experts never move."""
    n = 11
    got = steady_s(Stream(g, h, 0.0, False), c, n, window)
    if window == 1:  # its slot is gathered and filled again in turn
        assert (n - 1) * max(c, g + h) <= got <= (n - 1) * max(c, g + h) + c
    elif max(c, h) < g:  # no gather runs beside the last layer
        assert got == pytest.approx((n - 1) * g + c)
    else:
        assert got == pytest.approx(max(n * c, (n - 1) * h))


def test_a_gpu_alone_computes_from_the_slot_it_copies_to():
    """With one slot copies and layers take turns; with two the longer of them counts."""
    alone = Stream(0.0, 3.0, 0.0, True)
    assert steady_s(alone, 2.0, 11, 1) == pytest.approx(10 * (3.0 + 2.0))
    assert steady_s(alone, 2.0, 11, 2) == pytest.approx(10 * 3.0)
    assert steady_s(alone, 4.0, 11, 2) == pytest.approx(11 * 4.0)


def test_an_idle_engine_is_primed():
    """What its window holds when it starts waits for nothing."""
    stream, loaded = Stream(0.0, 50.0, 0.0, True), np.zeros((1, 3))
    first = ends([0.0], np.ones(4), stream, loaded.copy())
    assert first[0] == 4.0
    ends([0.0], np.ones(9), stream, loaded)
    late = loaded.max() + 1
    assert ends([late], np.ones(4), stream, loaded)[0] == late + 4.0


def twin(starts, layers_s, stream, window):
    """Ends of the steps of ranks that gather together: processes, one for each channel.

    ``starts [steps]`` are the earliest starts, ``layers_s [steps, ranks, layers]``.
    """
    env = simpy.Environment()
    n_steps, n_ranks, n_layers = layers_s.shape
    streamed = n_layers - 1
    total = n_steps * streamed
    began = [[[env.event() for _ in range(n_layers)] for _ in range(n_ranks)] for _ in starts]
    gathered, loaded, free = ([env.event() for _ in range(total)] for _ in range(3))
    ended = np.zeros((n_steps, n_ranks))

    def host():
        for j in range(total):
            if window and j >= window:
                yield free[j - window]
                yield env.timeout(stream.host_s)
            loaded[j].succeed()

    def gatherer():
        for j in range(total):
            step, layer = divmod(j, streamed)
            yield env.all_of([began[step][rank][layer] for rank in range(n_ranks)])
            yield loaded[j]
            yield env.timeout(stream.gather_s)
            gathered[j].succeed()
            if not stream.alone:
                free[j].succeed()

    def compute(rank):
        for step in range(n_steps):
            yield env.timeout(max(0.0, starts[step] - env.now))
            for layer in range(n_layers):
                j = step * streamed + layer - 1
                if layer:
                    yield gathered[j]
                began[step][rank][layer].succeed()
                seconds = layers_s[step, rank, layer]
                if layer < n_layers - 1:
                    seconds += stream.interference * min(seconds, stream.gather_s)
                yield env.timeout(seconds)
                if layer and stream.alone:
                    free[j].succeed()
            ended[step, rank] = env.now

    env.process(host())
    env.process(gatherer())
    for rank in range(n_ranks):
        env.process(compute(rank))
    env.run()
    return ended


seconds = st.sampled_from([0.0, 0.3, 1.0, 1.7, 4.0])


@st.composite
def runs(draw):
    n_layers = draw(st.integers(2, 8))
    window = draw(st.integers(0, n_layers - 2))
    alone = draw(st.booleans())
    n_ranks = 1 if alone else draw(st.integers(1, 3))
    shape = draw(st.integers(1, 4)), n_ranks, n_layers
    layers_s = np.reshape(
        draw(st.lists(seconds, min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))), shape
    )
    gather_s, host_s = 0.0 if alone else draw(seconds), draw(seconds)
    stream = Stream(gather_s, host_s, draw(st.sampled_from([0.0, 0.5])), alone)
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 9.0]), min_size=shape[0], max_size=shape[0]))
    return stream, window, layers_s, np.cumsum(gaps)


@settings(deadline=None)
@given(runs())
def test_processes_that_wait_for_each_other_end_at_the_same_times(run):
    stream, window, layers_s, starts = run
    expected = twin(starts, layers_s, stream, window)
    loaded, own = np.zeros((layers_s.shape[1], window)), np.zeros(layers_s.shape[1])
    for step, layers in enumerate(layers_s):
        own = ends(np.maximum(own, starts[step]), layers, stream, loaded)
        assert own == pytest.approx(expected[step], rel=1e-12, abs=1e-12)


@given(st.lists(seconds, min_size=6, max_size=6), st.lists(seconds, min_size=6, max_size=6))
def test_gathering_together_costs_nothing_between_equal_ranks(one, other):
    """Otherwise no rank is faster than by itself, nor a group slower than its slowest layers."""
    stream = Stream(1.0, 0.0, 0.0, False)
    alone = [ends([0.0], layers, stream, NONE)[0] for layers in (one, other)]
    both = ends([0.0, 0.0], [one, other], stream, np.zeros((2, 0)))
    assert (both >= np.array(alone) - 1e-12).all()
    slowest = ends([0.0], np.maximum(one, other), stream, NONE)[0]
    assert both.max() <= slowest + 1e-12
    equal = ends([0.0, 0.0], [one, one], stream, np.zeros((2, 0)))
    assert equal.tolist() == [alone[0], alone[0]]


# -- where the seconds come from ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpu", "milliseconds"),
    [(QWEN, "A100", 19.4), (QWEN, "H100", 12.2), (QWEN_FP8, "H100", 6.1), (QWEN_FP8, "H200", 6.1)],
)
def test_gathers_of_qwen_between_8_gpus(model, gpu, milliseconds):
    """4.83 GB a layer in bfloat16 over NCCL's measured 220 to 350 GB/s."""
    plan = plan_stream(model, load_gpu(gpu), 8)
    assert plan.stream.gather_s * 1e3 == pytest.approx(milliseconds, abs=0.06)
    assert plan.window == plan.stream.host_s == 0
    assert plan.provenance["weight_gather"]["label"] == "derived"  # beyond the largest message
    bandwidth = plan.layer_bytes * 7 / 8 / plan.stream.gather_s
    assert bandwidth < load_gpu(gpu).intra_node_bandwidth


def test_shards_from_the_host():
    h100 = load_gpu("H100")
    for n_gpus, milliseconds in ((1, 48.3), (2, 24.2), (8, 6.0)):
        plan = plan_stream(QWEN_FP8, h100, n_gpus, offload_window=4)
        assert plan.stream.host_s * 1e3 == pytest.approx(milliseconds, rel=0.01)
        assert plan.layer_bytes == 128 * QWEN_FP8.bytes_per_expert
        assert plan.window == 4
        assert plan.provenance["host_copy"]["label"] == "derived"
    assert (
        plan_stream(QWEN, load_gpu("A100"), 1, offload_window=4).provenance["host_copy"]["label"]
        == "published"
    )
    for window in (93, 94, None):  # the first layer is there in any case
        assert plan_stream(QWEN, h100, 8, offload_window=window).window == 0


def test_one_gpu_with_all_experts_streams_nothing():
    plan = plan_stream(QWEN, load_gpu("B300"), 1)
    assert plan.stream == Stream(0.0, 0.0, 0.0, True)
    assert plan.provenance == {}
    assert ends([1.0], [2.0, 3.0, 4.0], plan.stream, NONE)[0] == 10.0


def test_gpus_without_tables_gather_by_their_links():
    plan = plan_stream(QWEN, load_gpu("MI300X"), 8)
    assert plan.provenance["weight_gather"]["label"] == "roofline"
    assert "MI300X" in plan.warnings[0]


@pytest.mark.parametrize(
    ("gpu", "n_gpus", "options", "field"),
    [
        ("H100", 3, {}, "n_gpus"),
        ("H100", 16, {}, "n_gpus"),
        ("H100", 8, {"offload_window": 0}, "offload_window"),
        ("H100", 8, {"interference": 1.5}, "interference"),
        ("B300", 1, {"offload_window": 2}, "offload_window"),
    ],
)
def test_bad_plans_are_refused(gpu, n_gpus, options, field):
    with pytest.raises(InputError, match=field):
        plan_stream(QWEN, load_gpu(gpu), n_gpus, **options)


def test_thresholds_by_hand():
    """H100 with FP8: 94 layers of 6.1 ms at 1,978 TFLOP/s are 27,000 tokens' linear FLOPs."""
    work, stream = PrefillWork(41.9e9, 0.0), Stream(6.1e-3, 0.0, 0.0, False)
    options = {"n_layers": 94, "peak_flops": 1978e12, "batch_flops": 8192 * 41.9e9}
    short = with_saturation(work, stream, layer_s=3.05e-3, **options)
    assert short.saturation_eq1 == pytest.approx(94 * 6.1e-3 * 1978e12)
    assert short.saturation_eq1 / 41.9e9 == pytest.approx(27_070, rel=0.01)
    assert short.saturation_eq3 == pytest.approx(2 * 8192 * 41.9e9)
    long = with_saturation(work, stream, layer_s=12e-3, **options)
    assert long.saturation_eq3 == pytest.approx(8192 * 41.9e9)
    assert all(a < b for a, b in pairwise([0.0, long.saturation_eq3, short.saturation_eq3]))
    offloaded = with_saturation(work, stream._replace(host_s=12.2e-3), layer_s=3.05e-3, **options)
    assert offloaded.saturation_eq1 == pytest.approx(2 * short.saturation_eq1)
