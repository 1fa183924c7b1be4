"""What each choice adds, against searches over what it leaves."""

import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search.axes import Space, value_of
from eldr_sim.planning.search.goals import HighestRate, find
from eldr_sim.planning.search.knobs import ALL, APART, BASE, SIZES
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config

pytestmark = pytest.mark.long

OBJECTIVE = Objective(parse_slo(["ttft:200,tpot:10"]), 0.9, (3,))
CONFIG = make_config({"trace": "reference-moe", "duration": 6, "warmup": 2, "output_len": 24})
CHOSEN = {"tensor_parallel_sizes": [1, 2], "policies": ["round_robin"],
          "axes": {"max_num_seqs": [4, 1024]}}  # fmt: skip
SEATS = "max_num_seqs"


@pytest.fixture(scope="module")
def answer():
    return find(Space(CONFIG, **CHOSEN), HighestRate(OBJECTIVE, 4, knobs=True), RunCache(1))


@pytest.fixture(scope="module")
def rows(answer):
    return {row.policy: row for row in answer.rows}


def test_the_base_is_where_a_guide_begins(rows):
    assert str(rows[BASE].config.cluster.topology) == "4C"
    assert value_of(rows[BASE].config, SEATS) == 4
    assert rows[BASE].config.cluster.tensor_parallel_size == 1
    for name in (SIZES, APART):
        assert value_of(rows[name].config, SEATS) == 4
    assert str(rows[SEATS].config.cluster.topology) == "4C"


def test_all_together_is_the_best_split_and_none_alone_is_better(rows):
    chosen = CHOSEN | {"axes": {SEATS: [4, 1024]}}
    split = find(Space(CONFIG, **chosen), HighestRate(OBJECTIVE, 4), RunCache(1))
    best = rows[ALL].figure.mean
    assert best == pytest.approx(split.best.figure.mean, rel=0.05)
    for name, row in rows.items():
        assert row.figure.mean <= 1.03 * best, name  # one seed decides


def test_a_choice_that_is_set_back_is_that_of_the_base(rows):
    every = rows[ALL].config
    assert value_of(every, SEATS) == 1024  # four seats bind
    back = rows[f"all but {SEATS}"].config
    assert value_of(back, SEATS) == 4
    assert [pool.parallelism for pool in back.pools] == [pool.parallelism for pool in every.pools]
    small = rows[f"all but {SIZES}"].config
    assert {pool.parallelism.n_gpus for pool in small.pools} == {1}
    assert (small.cluster.n_prefill > 0) == (every.cluster.n_prefill > 0)
    assert (f"all but {APART}" in rows) == (every.cluster.n_prefill > 0)


def test_gains_are_paired_with_the_base(answer, rows):
    for gain in answer.gains:
        row = rows[gain.policy]
        assert gain.reference == BASE
        pairs = zip(row.by_seed, rows[BASE].by_seed, strict=True)
        percent = [100.0 * (ours / theirs - 1.0) for ours, theirs in pairs]
        assert gain.gain.mean == pytest.approx(sum(percent) / len(percent))


def test_it_is_asked_of_given_gpus():
    with pytest.raises(InputError, match="gpus"):
        find(Space(CONFIG), HighestRate(OBJECTIVE, 0, knobs=True), RunCache(1))
