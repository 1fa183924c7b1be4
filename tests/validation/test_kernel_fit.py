"""The constants of MI300X's published tables come out of the cells that they were fitted to."""

import numpy as np
import pytest

from eldr_sim.kernel_profiles.sources.mi300x import PUBLISHED
from studies.eldr_measured.kernel_fit import fit_layer, round_robin_cells


def _layer_s(fitted, tokens, distinct):
    """Seconds of a layer whose experts fill a block each."""
    expert_s = max(tile for tile in fitted.tiles if tile[0] <= tokens)[1]
    return fitted.floor_s + distinct * expert_s + tokens * fitted.token_s


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_published_constants_are_those_of_the_fit(drawn_routing, name):
    """Batches are drawn and constants trade with each other: the layers' times must agree."""
    assert len(round_robin_cells(name)) == 10
    found, kept = fit_layer(name), PUBLISHED[name]
    assert [first for first, _ in found.tiles] == [first for first, _ in kept.tiles]
    for tokens, distinct in ((8, 40), (24, 65), (56, 80), (80, 88), (176, 105)):
        both = [_layer_s(fitted, tokens, distinct) for fitted in (found, kept)]
        assert both[0] == pytest.approx(both[1], rel=0.02)
    assert found.error == pytest.approx(kept.error, abs=0.006)
    assert np.isclose(kept.token_s, 0.0) == (len(kept.tiles) > 1)
