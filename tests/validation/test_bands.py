"""Error bands: cells, coverage of publishers that were left out, and the look-up of a run."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.simulator.outcome import error_band
from eldr_sim.simulator.outcome.error_band import LOADS, METRICS, Kind, band_of, kind_of
from eldr_sim.validation.published import bands
from eldr_sim.validation.published.bands import Residual

KIND = Kind(LOADS[0][1], "co-located", "GQA, MoE", "H100", "vllm", "4-bit weights")


def drawn(publishers, rows, between, within, kind=KIND, seed=0):
    """Return residuals of publishers that differ by ``between`` and scatter by ``within``."""
    rng = np.random.default_rng(seed)
    return [
        Residual(f"{kind.gpu} {name}", kind, float(own + rng.normal(0.0, within)))
        for name in range(publishers)
        for own in [rng.normal(0.0, between)]
        for _ in range(rows)
    ]


@pytest.mark.parametrize("between", [0.02, 0.3])
def test_bands_cover_publishers_that_were_left_out(between):
    covered = [bands.coverage(drawn(10, 20, between, 0.1, seed=seed)).covered for seed in range(5)]
    assert 0.7 <= np.mean(covered) <= 0.9


@pytest.mark.long
def test_cells_tell_good_kinds_from_bad_ones():
    other = KIND._replace(gpu="MI300X")
    rows = drawn(8, 30, 0.03, 0.03) + drawn(8, 30, 0.3, 0.3, other)
    found = bands.bands(dict.fromkeys(METRICS, rows), {"version": "0"})
    good, bad = (band_of(kind, found)["tpot"] for kind in (KIND, other))
    assert good["high"] / good["low"] < 0.5 * bad["high"] / bad["low"]
    assert bands.coverage(rows).width < bands.coverage(rows).one_width


@pytest.mark.long
@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1.5, 1.5)), min_size=1, max_size=30))
def test_every_cell_is_an_interval_around_the_rows_of_repeated_runs(rows):
    """No band is empty or narrower than runs repeated on another day."""
    residuals = [Residual(publisher, KIND, value) for publisher, value in rows]
    found = bands.bands(dict.fromkeys(METRICS, residuals), {})
    for metric in METRICS:
        for cell in found["metrics"][metric].values():
            assert 0.0 < cell["low"] <= 1.0 <= cell["high"]
            assert cell["low"] < cell["high"]
            assert cell["publishers"] <= cell["rows"] == len(rows)


def test_a_kind_that_was_never_compared_says_so():
    found = bands.bands(dict.fromkeys(METRICS, drawn(3, 10, 0.1, 0.1)), {})
    assert band_of(KIND, found)["compared"]
    unknown = band_of(KIND._replace(gpu="L4"), found)
    assert not unknown["compared"]
    assert "No run like this was ever compared" in error_band.in_words(unknown)[0]
    assert unknown["tpot"]["of"].startswith("GQA, MoE")


def test_a_cell_of_one_publisher_has_the_band_of_the_cell_around_it():
    """Its runs do not show how publishers differ, and a reader is told."""
    for publishers in (1, 3):
        near = drawn(publishers, 9, 0.01, 0.01)
        far = [
            each._replace(publisher=f"far {each.publisher}", kind=KIND._replace(gpu="L4"))
            for each in drawn(3, 9, 0.5, 0.1)
        ]
        cells = bands.cells_of([*near, *far])
        own, around = cells[tuple(KIND)], cells[tuple(KIND)[:3]]
        assert (own[:2] == around[:2]) == (publishers == 1)
        band = band_of(KIND, bands.bands({metric: [*near, *far] for metric in METRICS}, {}))
        for said in (error_band.one_line(band), " ".join(error_band.in_words(band))):
            assert f"{9 * publishers} runs by {publishers} publisher" in said
            assert ("wider cells decide" in said) == (publishers == 1)


def test_kinds_are_read_off_models():
    def kind(name, **more):
        how = {"apart": False, "in_flight": 10} | more
        return kind_of("vllm", "H100", load_model(name), **how)

    assert kind("DeepSeek-R1").family == "MLA, MoE"
    assert kind("DeepSeek-R1").precision == "8-bit weights"
    assert kind("GPT-OSS-120B").precision == "4-bit weights"
    assert kind("Llama-3.1-8B").family == "GQA, dense"
    assert kind("DeepSeek-V3.2").family == "sparse attention, MoE"
    assert kind("Qwen3-8B", in_flight=17).load == "17 to 256"
    assert kind("Qwen3-8B", apart=True).mode == "prefill and decode apart"


def test_the_shipped_bands_are_whole():
    found = error_band.shipped()
    assert found["made"]["rows"] > 200
    for metric in METRICS:
        cells = found["metrics"][metric]
        assert "" in cells
        for path in cells:  # the cell around each is there
            assert path.rpartition(" | ")[0] in cells
        assert all(cell["low"] <= 1.0 <= cell["high"] for cell in cells.values())


def test_a_residual_is_measured_over_predicted():
    rows = [("a", KIND, {"tpot": 12.0, "ttft": 0.0}, {"tpot": 10.0, "ttft": 5.0})]
    found = bands.residuals_of(rows)
    assert found["tpot"][0].value == pytest.approx(math.log(1.2))
    assert found["ttft"] == []


def test_a_calibrated_run_has_the_band_of_calibrated_runs():
    few = KIND._replace(load="up to 16")
    found = band_of(few, calibrated=True)
    assert found["compared"]
    assert "throughput" not in found
    for metric in ("ttft", "tpot"):
        own = bands.of_calibrated(bands.calibrated())[metric]
        assert found[metric] == own | {"of": found[metric]["of"]}
    plain, width = band_of(few)["tpot"], found["tpot"]["high"] / found["tpot"]["low"]
    assert width < plain["high"] / plain["low"]
    many = KIND._replace(load="more than 256")
    assert band_of(many, calibrated=True) == band_of(many)


def test_bands_beyond_256_in_flight_reach_as_far_as_those_of_fewer():
    few = [each._replace(kind=KIND._replace(load="17 to 256")) for each in drawn(4, 10, 0.5, 0.1)]
    many = [
        each._replace(kind=KIND._replace(load="more than 256")) for each in drawn(2, 10, 0.1, 0.1)
    ]
    within, beyond = bands.cells_within(few, bands.by_rows), bands.beyond(few, many)
    for path, cell in beyond.items():
        like = within[("17 to 256", *path[1:])] if path else within[()]
        assert cell.low <= like.low
        assert cell.high >= like.high
