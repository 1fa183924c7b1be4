"""Fits in the user's cache: equal to new ones, made anew when what they rest on changes."""

import numpy as np
import pytest

from eldr_sim import cache
from eldr_sim.policies.eldr import artifact as fit_cache
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.policies.eldr.signature import FitOptions
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import open_trace


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def trace():
    return open_trace()


@pytest.fixture
def fitted(trace):
    """Fit, and say how often the calibration requests were asked for."""
    asked = []

    def run(n_decoders=3, seed=0, workload="task", domain_mix=None, **options):
        def calibration():
            asked.append(workload)
            return calibration_set(trace, workload=workload, domain_mix=domain_mix)

        artifact = fit_cache.cached_fit(
            trace, workload, domain_mix, calibration, n_decoders, seed, FitOptions(**options)
        )
        return artifact, len(asked)

    return run


def same(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("idf", "rho", "layer_order", "centroids", "cluster_domains")
    ) and (one.summary() == other.summary())


def test_the_second_fit_is_the_first(trace, fitted):
    expected = fit(calibration_set(trace, workload="task"), 3, 0)
    first, asked = fitted()
    second, asked_again = fitted()
    assert (asked, asked_again) == (1, 1)
    assert same(first, expected)
    assert same(second, expected)
    assert [file.part for file in cache.files()].count(cache.FITS) == 1


def test_what_a_fit_rests_on_makes_another(fitted, monkeypatch):
    fitted()
    for n, changed in enumerate(
        (
            {"n_decoders": 4},
            {"seed": 1},
            {"workload": "language"},
            {"layer_mask": "all"},
            {"layer_mask": (0, 3)},
            {"transform": "sqrt"},
            {"clustering": "vanilla"},
            {"seedings": 2},
            {"rounds": 7},
            {"mask_pairs": 50},
        )
    ):
        assert fitted(**changed)[1] == n + 2, changed
        assert fitted(**changed)[1] == n + 2, changed
    monkeypatch.setattr(fit_cache, "_SOURCES", ("policies.eldr.signature",))
    assert fitted()[1] == 12


@pytest.mark.parametrize("damage", ["garbage", "another's"])
def test_a_damaged_file_is_made_anew(fitted, damage):
    good, _ = fitted()
    (file,) = cache.files()
    if damage == "garbage":
        file.path.write_bytes(b"PK not a fit")
    else:
        other, _ = fitted(seed=5)
        other.save(file.path)
    asked = fitted(seed=7)[1]
    again, asked_again = fitted()
    assert asked_again == asked + 1
    assert same(again, good)
    assert same(fitted()[0], good)


def test_fits_count_towards_the_size_of_the_cache(fitted, monkeypatch):
    fitted()
    monkeypatch.setenv(cache.SIZE_VARIABLE, "1")
    fitted(seed=1)
    assert len(cache.files()) == 1
