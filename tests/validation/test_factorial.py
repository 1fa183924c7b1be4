"""The factorial: effects recovered from made-up times, and cells that are served."""

import numpy as np
import pytest

from eldr_sim.simulator.setup.config.run_config import make_config
from studies.factorial.evaluation import (
    BEST,
    CELLS,
    METRICS,
    PLAIN,
    SETTINGS,
    contrasts,
    factorial,
    make_runner,
)

#: Factors by which methods change a time, and what two of them do together.
ALONE = {"ELDR": 0.9, "METRO": 1.2, "METRO free": 0.95, "EPLB": 0.97, "GRACE": 1.1, "Gimbal": 1.0}
TOGETHER = {("ELDR", "EPLB"): 0.8}


def made_up(cell):
    """Return a time that is a product of the cell's methods."""
    levels = tuple(cell)
    found = np.prod([ALONE.get(level, 1.0) for level in levels])
    return found * np.prod([f for pair, f in TOGETHER.items() if set(pair) <= set(levels)])


class Made:
    """A runner that makes times up."""

    def paired(self, cases, seeds):
        return {
            key: [dict.fromkeys(METRICS, 100.0 * (1 + seed) * made_up(key[1])) for seed in seeds]
            for key in cases
        }


def test_effects_are_those_that_made_the_times():
    rows = factorial(Made(), SETTINGS[:2], range(3)).rows
    found = {
        r["what"]: r[f"{BEST}_%"] for r in rows if (r["kind"], r["setting"]) == ("effect", "all")
    }
    assert found["METRO"] == pytest.approx(20.0)
    assert found["METRO free"] == pytest.approx(-5.0)
    assert found["Gimbal"] == pytest.approx(0.0)
    assert found["ELDR x EPLB"] == pytest.approx(-20.0)
    assert found["ELDR x METRO"] == pytest.approx(0.0)
    # Of ELDR's cells a third have EPLB's placement, too.
    assert found["ELDR"] == pytest.approx(100 * (0.9 * 0.8 ** (1 / 3) - 1))


def test_the_joint_search_finds_the_least_time():
    claim = factorial(Made(), SETTINGS[:1], range(2)).claims[0]
    best = min(CELLS, key=made_up)
    alone = min((c for c in CELLS if len(c.changed) == 1), key=made_up)
    assert f"({best})" in claim.statement
    assert f"({alone})" in claim.statement
    assert claim.ours == pytest.approx(100 * (made_up(best) / made_up(alone) - 1))


def test_contrasts_weigh_methods_against_their_baselines():
    for name, weights in contrasts().items():
        levels = 2 if " x " in name else 1
        assert sum(weights.values()) == pytest.approx(0.0), name
        assert sum(abs(w) for w in weights.values()) == pytest.approx(2**levels), name


def test_every_cell_is_a_run():
    base = make_runner(True, lambda share: None).base
    words = {str(make_config(base | s.fields(c))) for s in SETTINGS for c in CELLS}
    assert len(words) == len(SETTINGS) * len(CELLS)
    assert str(PLAIN) == "plain"
