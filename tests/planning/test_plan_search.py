"""The searches against brute force, and the intervals against draws whose truth is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from eldr_sim.errors import InputError
from eldr_sim.planning.search.monotone_search import SearchSpace, cheapest, highest_rate, smallest
from eldr_sim.planning.slo import (
    _T,
    Objective,
    Verdict,
    attainment_interval,
    block_interval,
    looks_up_to,
    t_interval,
)
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import ServiceLevel


def finish(search):
    """Run a search whose judges ask nobody."""
    while True:
        try:
            next(search)
        except StopIteration as end:
            return end.value


class Oracle:
    """Judges from a function and counts how often it is asked."""

    def __init__(self, good):
        self.good = good
        self.asked = []

    def __call__(self, *point):
        self.asked.append(point if len(point) > 1 else point[0])
        good = self.good(*point)
        return Verdict.MEETS if good is True else Verdict.MISSES if good is False else good
        yield  # a generator, as a judge is


def question(oracle):
    def meets(*point):
        return (yield from oracle(*point)) is Verdict.MEETS

    return meets


@given(
    low=st.integers(1, 20), span=st.integers(0, 200), border=st.integers(0, 240),
    start=st.none() | st.integers(0, 240),
)  # fmt: skip
def test_smallest_is_the_border(low, span, border, start):
    high = low + span
    oracle = Oracle(lambda n: n >= border)
    found = finish(smallest(low, high, question(oracle), start))
    assert found == (None if border > high else max(low, border))
    assert len(set(oracle.asked)) == len(oracle.asked) <= 2 * math.log2(span + 2) + 2


def test_nothing_to_choose_from():
    assert finish(smallest(3, 2, question(Oracle(lambda n: True)))) is None


@st.composite
def staircases(draw):
    """Fewest decode workers by prefill workers: falls with x, infinite where x does not do."""
    size = draw(st.integers(2, 24))
    steps = sorted(draw(st.lists(st.integers(1, 30), min_size=size, max_size=size)), reverse=True)
    blocked = draw(st.integers(0, size))
    fewest = [math.inf] * blocked + steps[blocked:]
    prices = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2.5, 2.0), (7, 1)]))
    return size, fewest, prices


@given(staircases(), st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_cheapest_is_that_of_the_whole_grid(staircase, hint):
    size, fewest, (prefill, decode) = staircase
    points = [(x, y) for x in range(1, size) for y in range(1, size - x + 1)]
    good = [(x, y) for x, y in points if y >= fewest[x - 1]]
    oracle = Oracle(lambda x, y: y >= fewest[x - 1])
    space = SearchSpace(1, 1, size, lambda x, y: prefill * x + decode * y)
    found = finish(cheapest(space, oracle, hint))
    if good:
        assert space.cost(*found.best) == min(space.cost(*point) for point in good)
        x, y = found.best
        assert found.verdicts[x, y] is Verdict.MEETS
        # Nothing with one worker less does: the search has looked.
        assert all(found.verdicts[p] is Verdict.MISSES for p in ((x - 1, y), (x, y - 1)) if min(p))
    else:
        assert found.best is None
    assert not found.contradictions()
    assert len(oracle.asked) == len(set(oracle.asked))


def test_few_questions_on_a_large_grid():
    """2,016 clusters of up to 64 workers; the border barely bends, as TTFT and TPOT have it."""
    oracle = Oracle(lambda x, y: x >= 5 and y >= 14 + (x == 5))
    found = finish(cheapest(SearchSpace(1, 1, 64, lambda x, y: x + y), oracle))
    assert found.best in {(5, 15), (6, 14)}
    assert len(oracle.asked) <= 24


def test_only_what_costs_less_is_of_interest():
    oracle = Oracle(lambda x, y: x >= 3 and y >= 4)

    def best(below):
        return finish(cheapest(SearchSpace(1, 1, 32, lambda x, y: x + y, below), oracle)).best

    assert best(8) == (3, 4)
    assert best(7) is None
    oracle.asked.clear()
    assert best(2) is None
    assert oracle.asked == []


def test_a_cheaper_cluster_behind_a_contradiction_is_taken():
    """With many prefill workers it takes 8 decode workers, with few of them 6 are enough."""
    oracle = Oracle(lambda x, y: x >= 2 and y >= (8 if x > 9 else 6))
    found = finish(cheapest(SearchSpace(1, 1, 32, lambda x, y: x + y), oracle))
    assert found.best == (2, 6)
    assert found.contradictions()


def test_undecided_is_not_good_enough_and_no_contradiction():
    oracle = Oracle(lambda x, y: Verdict.UNDECIDED if y == 7 else x >= 2 and y >= 6)
    found = finish(cheapest(SearchSpace(1, 1, 32, lambda x, y: x + y), oracle))
    assert found.verdicts[found.best] is Verdict.MEETS
    assert not found.contradictions()


@given(
    border=st.floats(0.5, 500), start=st.floats(0.1, 900), high=st.sampled_from([math.inf, 300.0]),
    at_once=st.integers(1, 3),
)  # fmt: skip
def test_highest_rate_is_just_below_the_border(border, start, high, at_once):
    oracle = Oracle(lambda rate: rate <= border)
    search = highest_rate(start, 1.0, question(oracle), tolerance=0.01, high=high, at_once=at_once)
    found = finish(search)
    if border < 1.0:
        assert found is None
    else:
        assert found.good <= min(border, high) * (1 + 1e-12)
        assert found.good * 1.01 >= min(border, high) * (1 - 1e-12)
        assert found.bad == math.inf if border >= high else found.bad > border
    assert len(oracle.asked) == len(set(oracle.asked)) < 30


def test_a_rate_that_is_beaten_is_not_narrowed_down():
    oracle = Oracle(lambda rate: rate <= 100)
    found = finish(highest_rate(80, 1.0, question(oracle), is_dominated=lambda bad: bad <= 170))
    assert (found.good, found.bad) == (80, 160)
    found = finish(highest_rate(110, 1.0, question(oracle), is_dominated=lambda bad: bad <= 170))
    assert (found.good, found.bad) == (0.0, 110)


# -- intervals ----------------------------------------------------------------------------------


def test_equal_seeds_leave_wilsons_interval():
    """All requests good in three seeds of 100: no seed differs, yet 0.99 is not shown."""
    interval = attainment_interval([1.0, 1.0, 1.0], 300)
    z = 1.959963984540054
    assert interval.low == pytest.approx(300 / (300 + z * z))  # Wilson at p = 1
    assert interval.high == 1.0
    assert Objective(ServiceLevel(tpot=30), 0.99, (3,)).verdict(interval) is Verdict.UNDECIDED
    assert attainment_interval([1.0] * 3, 30_000).low > 0.99


def shares(rng, truth, spread, seeds, requests):
    """Attainment of seeds whose requests share their luck: a beta mixture of binomials."""
    p = rng.beta(truth / spread, (1 - truth) / spread, seeds) if spread else np.full(seeds, truth)
    return (rng.binomial(requests, p) / requests).tolist()


def test_the_table_of_students_t_is_scipys():
    assert pytest.approx(_T, rel=1e-14) == stdtrit(np.arange(1, len(_T) + 1), 0.975)


@pytest.mark.parametrize(("truth", "spread"), [(0.9, 0.0), (0.9, 0.003), (0.7, 0.02)])
def test_interval_covers_the_truth(truth, spread):
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        interval = attainment_interval(shares(rng, truth, spread, 5, 400), 2000)
        hits += interval.low <= truth <= interval.high
    assert hits >= 950 - 3 * math.sqrt(1000 * 0.95 * 0.05)


@pytest.mark.parametrize("truth", [0.84, 0.8999, 0.9001, 0.95])
def test_looking_again_and_again_errs_no_more_often_than_promised(truth):
    """Adding seeds until the interval clears the target: wrong in at most 5% of the cases."""
    objective = Objective(ServiceLevel(tpot=30), 0.9, (3, 5, 8))
    wrong = Verdict.MEETS if truth < 0.9 else Verdict.MISSES
    rng = np.random.default_rng(1)
    errors = decide_winners = 0
    for _ in range(1000):
        drawn = shares(rng, truth, 0.003, 8, 400)
        verdict = Verdict.UNDECIDED
        for n in objective.looks:
            verdict = objective.verdict(objective.interval(drawn[:n], 400 * n))
            if verdict is not Verdict.UNDECIDED:
                break
        errors += verdict is wrong
        decide_winners += verdict is not Verdict.UNDECIDED
    assert errors <= 50 + 3 * math.sqrt(1000 * 0.05 * 0.95)
    if abs(truth - 0.9) > 0.01:
        assert decide_winners > 500


@given(
    st.lists(st.floats(0.8, 1.0), min_size=1, max_size=4),
    st.sampled_from([(2,), (3,), (3, 5), (3, 5, 8), (3, 5, 8, 13)]),
)
def test_out_of_reach_is_what_no_further_seeds_can_show(known, looks):
    """Against equal further seeds of every share, and some that differ."""
    objective, best = Objective(ServiceLevel(tpot=30), 0.9, looks), -math.inf
    rng, each = np.random.default_rng(2), 1 - 0.05 / len(looks)
    for n in (n for n in looks if n > len(known)):
        more = n - len(known)
        further = [[share] * more for share in np.linspace(0.7, 1.0, 301)]
        further += [rng.uniform(0.9, 1.0, more).tolist() for _ in range(50)]
        best = max(best, *(t_interval([*known, *own], each).low for own in further))
    if objective.is_out_of_reach(known):
        assert best < 0.9
    else:
        assert best > 0.9 - 0.002  # a grid misses the very best


@pytest.mark.parametrize(
    ("seeds", "looks"), [(2, (2,)), (3, (3,)), (4, (3, 4)), (8, (3, 5, 8)), (10, (3, 5, 8, 10))]
)
def test_looks(seeds, looks):
    assert looks_up_to(seeds) == looks


def test_slo_is_read():
    assert parse_slo(["ttft:500,tpot:30", " e2el:9000 "]) == ServiceLevel(
        ttft=500, tpot=30, e2el=9000
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["ttft=500"],
            "slo: 'ttft=500' is not a bound (allowed: METRIC:MS such as ttft:500,tpot:30)",
        ),
        (["ttft:500,"], "slo: '' is not a bound"),
        (["ttft:1,ttft:2"], "slo: 'ttft:2' is given twice"),
        (["itl:30"], "slo: itl: no such field (allowed: ttft, tpot and e2el in ms)"),
        (["tpot:-1"], "slo: tpot: '-1': input should be greater than 0"),
        (["tpot:nan"], "slo: tpot: 'nan'"),
    ],
)
def test_bad_slo(texts, message):
    with pytest.raises(InputError) as error:
        parse_slo(texts)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("attainment", [0.0, 1.0, 1.2, -1.0])
def test_bad_attainment(attainment):
    with pytest.raises(InputError, match="attainment"):
        Objective(ServiceLevel(tpot=30), attainment)
    with pytest.raises(InputError, match="slo: no bound"):
        Objective(ServiceLevel())
    with pytest.raises(InputError, match="seeds"):
        looks_up_to(1)


@pytest.mark.parametrize("looks", [(8,), (3, 8), (3, 5, 8)])
def test_every_look_takes_its_part_of_the_doubt(looks):
    """Bonferroni: over all looks the interval holds with the confidence asked for."""
    shares = [0.91, 0.95, 0.94]
    own = Objective(ServiceLevel(tpot=30), 0.9, looks).interval(shares, 400)
    assert own == attainment_interval(shares, 400, 1.0 - 0.05 / len(looks))


@pytest.mark.parametrize("shares", [(0.7, 0.6, 0.65), (0.7, 0.6, 0.65, 0.68, 0.5)])
def test_blocks_of_one_size_are_samples_of_shares(shares):
    """Then the ratio estimator's interval is Student's of the shares."""
    found = block_interval([[(round(1000 * share), 1000) for share in shares]])
    assert tuple(found) == pytest.approx(tuple(t_interval(shares)))
