"""Autoscalers, each against what its makers say of it."""

import math

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.registry import autoscaler
from eldr_sim.policies.scaling.base import (
    Fleet,
    Offered,
    PoolFacts,
    PoolView,
    ScalingContext,
    Switch,
    Target,
)
from eldr_sim.policies.scaling.llmd import queue_latency
from eldr_sim.policies.scaling.work import Forecast, Trend, late_work, queues

NAN = math.nan


def facts(name="decode", **changes):
    """A pool whose worker takes a second for 1,000 prompt tokens, and 10 ms a step of any batch."""
    known = {
        "computes": True, "decodes": True, "engines": 1, "gpus": 1, "max_num_seqs": 10,
        "kv_tokens": 10**9, "start_up_s": 60.0, "switch_s": 5.0, "prompt_s": lambda n: n / 1000,
        "step_s": lambda batch, context: 0.01,
    } | changes  # fmt: skip
    return PoolFacts(name=name, **known)


def make(word, *pools, known=lambda begin, end: Offered(0, 0, 0)):
    context = ScalingContext(pools or (facts(),), known)
    return autoscaler(word, PolicyContext(1, np.random.default_rng(0), scaling=context))


def view(ready, *, name="decode", waiting=0, running=0, kv=0.0, **changes):
    """A pool whose requests are spread evenly."""

    def even(total):
        return np.diff(np.round(np.linspace(0, total, ready + 1))).astype(int)

    told = {
        "starting": 0, "draining": 0, "minimum": 1, "maximum": 100, "arrived": 0, "completed": 0,
        "prompt_tokens": NAN, "output_tokens": NAN, "cached_tokens": NAN, "ttft_s": NAN,
        "itl_s": NAN, "waiting_tokens": np.zeros(ready, int),
        "running_tokens": np.zeros(ready, int),
    } | changes  # fmt: skip
    return PoolView(name, ready, waiting=even(waiting), running=even(running),
                    kv_usage=np.full(ready, kv), **told)  # fmt: skip


def wish(rule, now, *pools, interval=15.0):
    """What a rule says of the (first) pool: workers, None where it says nothing."""
    said = {each.pool: each.workers for each in rule.decide(Fleet(now, interval, pools))}
    return said.get(pools[0].name)


def test_none_has_a_number_for_each_pool():
    pools = facts("prefill"), facts("decode")
    assert make("none", *pools).begin() == {}
    assert make("none:n=3", *pools).begin() == {"prefill": 3, "decode": 3}
    assert make("none:n=2,4", *pools).begin() == {"prefill": 2, "decode": 4}
    with pytest.raises(InputError, match="2 pools"):
        make("none:n=1,2,3", *pools).begin()


def test_hpa_goes_by_the_ratio_to_the_target():
    for load in range(1, 200):
        n, target = 5, 16
        rule, ratio = make("hpa:down_s=0"), load / (5 * 16)
        expected = n if abs(ratio - 1) <= 0.1 else math.ceil(load / target)
        assert wish(rule, 0, view(n, running=load)) == min(max(expected, 1), 10), load


def test_hpa_doubles_or_adds_four():
    rule, n, path = make("hpa"), 1, [1]
    for step in range(4):
        n = wish(rule, 15 * step, view(n, waiting=100_000))
        path.append(n)
    assert path == [1, 5, 10, 20, 40]


def test_hpa_goes_down_when_a_wish_has_lasted_300_s():
    rule = make("hpa")
    assert wish(rule, 0, view(8, running=128)) == 8
    path = [wish(rule, at, view(8, running=32)) for at in range(15, 316, 15)]
    assert path == [8] * 19 + [2] * 2  # at 300 s the wish for 8 is 300 s old


def test_keda_takes_the_larger_and_counts_who_starts():
    assert wish(make("keda"), 0, view(2, waiting=7, running=3)) == 7
    assert wish(make("keda"), 0, view(2, waiting=0, running=65)) == 5
    assert wish(make("keda"), 0, view(2, waiting=7, starting=4)) == 6  # 7 less those that start
    assert wish(make("keda"), 0, view(2, waiting=12, starting=4)) == 8
    # Those that start are not taken for fewer wishes, either when the first wish is forgotten.
    assert wish(make("keda"), 400, view(2, waiting=7, starting=4)) == 6
    rule = make("keda")
    assert wish(rule, 0, view(6, running=96)) == 6
    assert wish(rule, 290, view(6)) == 6
    assert wish(rule, 301, view(6)) == 1


def test_knative_panics_and_never_goes_down_then():
    rule, n = make("knative:target=10,utilisation=1"), 2
    for at in range(0, 60, 2):
        n = wish(rule, at, view(n, running=20))
        assert n == 2
    seen = []
    for at in range(60, 72, 2):  # a step to three times the load
        n = wish(rule, at, view(2, running=60, starting=n - 2))
        seen.append(n)
    assert max(seen) == seen[-1] == 6
    assert seen[2] == 6  # the short window is a tenth, three looks
    assert rule.in_panic_window("decode", 72)
    for at in range(72, 120, 2):  # nobody is left, and it stays in panic
        assert wish(rule, at, view(6)) == 6
    later = [wish(rule, at, view(6)) for at in range(120, 200, 2)]
    assert later[-1] == 1


def test_saturation_adds_one_where_little_is_spare():
    rule = make("llmd_saturation")
    assert wish(rule, 0, view(4, kv=0.5)) == 3  # .5 * 4/3 leaves .13 of .8
    assert wish(rule, 0, view(4, kv=0.6)) == 4
    assert wish(rule, 0, view(4, kv=0.71)) == 5
    assert wish(rule, 0, view(4, kv=0.9)) == 5
    assert wish(rule, 0, view(4, kv=0.2, waiting=12)) == 5
    assert wish(rule, 0, view(1, kv=0.0)) == 1
    assert wish(rule, 0, view(4, kv=0.9, starting=1)) is None


def test_tokens_are_held_against_the_room_of_workers():
    """A worker has room for 800 of 1,000 tokens; demand is what runs and waits."""
    rule = make("llmd_tokens", facts(kv_tokens=1000))

    def of(n, demand, **told):
        return view(n, running_tokens=np.full(n, demand // n), **told)

    for n in (1, 2, 3, 5, 9):
        for demand in range(0, 8000, 90):
            total = demand // n * n
            want = math.ceil(total / 0.85 / 800)
            if want <= n:
                want = max(1, n - math.floor(max(0, 800 * n - total / 0.7) / 800))
            assert wish(rule, 0, of(n, demand)) == want, (n, demand)
    assert wish(rule, 0, of(2, 1500, starting=1)) == 3  # starting workers are not requested again
    assert wish(rule, 0, of(2, 700, starting=1)) == 3  # nor is their room spare
    # Budget of 8,192: 10 sequences of 100 + 100 / 2 tokens are less than the cache.
    steady = make("llmd_tokens")
    told = {"prompt_tokens": 100.0, "output_tokens": 100.0}
    assert wish(steady, 0, of(1, 1275, **told)) == 1
    assert wish(steady, 0, of(1, 1290, **told)) == 2
    # Five wait, so what is in use is what a worker can do; and so it is remembered.
    full = view(1, waiting=5, running_tokens=np.array([400]), waiting_tokens=np.array([500]))
    assert wish(steady, 0, full) == math.ceil(900 / 0.85 / 400)
    assert wish(steady, 0, of(1, 350, **told)) == 2


def test_a_queue_with_batches_of_one_is_mm1k():
    """k = 11: one is served, ten wait."""
    for load in (0.2, 0.7, 0.95):
        steps, leaves = np.array([0.1]), np.array([2.0])  # half a second each
        ttft, itl = queue_latency(2.0 * load, leaves, np.array([0.1]), steps)
        chance = load ** np.arange(12) * (1 - load) / (1 - load**12)
        number, served = chance @ np.arange(12), 2.0 * load * (1 - chance[-1])
        assert ttft == pytest.approx(number / served - 0.5 + 0.1)
        assert itl == pytest.approx(0.1)


def test_a_batch_of_prompts_takes_as_long_as_they_do_one_by_one():
    """Prompts alone, whatever the batch: an M/M/1/k queue of their seconds."""
    own = facts(decodes=False, max_num_seqs=4, prompt_s=lambda n: 0.5)
    best = make("llmd_latency:ttft=1e6", own).highest_rate(own, 100.0, 1.0)
    assert best == pytest.approx(2.0, rel=1e-6)  # the queue is finite, and so is its wait


def test_the_queue_model_asks_for_the_rate_over_the_highest_within_targets():
    own = facts(max_num_seqs=1, prompt_s=lambda n: 0.1, step_s=lambda batch, context: 0.01)
    rule = make("llmd_latency:ttft=600,itl=50", own)
    told = {"prompt_tokens": 100.0, "output_tokens": 40.0}  # half a second each
    best = rule.highest_rate(own, 100.0, 40.0)
    ttft, _ = queue_latency(best, np.array([2.0]), np.array([0.1]), np.array([0.01]))
    assert ttft == pytest.approx(0.6, rel=1e-6)
    assert wish(rule, 0, view(1, arrived=100, **told), interval=10.0) == math.ceil(10 / best)
    slow = make("llmd_latency:ttft=600,itl=9", own)  # no rate keeps it
    assert slow.highest_rate(own, 100.0, 40.0) == pytest.approx(0.02)
    assert wish(rule, 0, view(1)) is None


@pytest.mark.parametrize("word", ["llmd_saturation", "llmd_tokens", "llmd_latency"])
def test_llmd_goes_to_zero_and_comes_back(word):
    rule = make(word)
    idle = {"minimum": 0, "prompt_tokens": 10.0, "output_tokens": 10.0}
    assert wish(rule, 0, view(2, arrived=1, **idle)) != 0
    assert wish(rule, 570, view(1, **idle)) == 1
    assert wish(rule, 600, view(1, **idle)) == 0
    assert wish(rule, 630, view(0, **idle)) == 0
    assert wish(rule, 660, view(0, arrived=1, **idle)) == 1
    assert wish(make(word), 9999, view(1, **idle | {"minimum": 1})) != 0


def test_dynamos_load_rule_waits_until_all_workers_miss():
    told = {"prompt_tokens": 100.0}
    rule = make("dynamo_load:ttft=1000")
    some, every = np.array([2000, 0, 2000]), np.full(3, 950)
    assert wish(rule, 0, view(3, waiting_tokens=some, **told)) == 3
    assert wish(rule, 0, view(3, waiting_tokens=every, **told)) == 4
    assert wish(rule, 0, view(3, waiting_tokens=every, starting=1, **told)) is None
    # .8 * (1 - .1) = .72 s of queue may be left when two do the work of three
    assert wish(rule, 0, view(3, waiting_tokens=np.full(3, 470), **told)) == 2
    assert wish(rule, 0, view(3, waiting_tokens=np.full(3, 490), **told)) == 3
    slow = make("dynamo_load:ttft=1000,itl=5")
    assert wish(slow, 0, view(2, running=4, **told)) == 3


def test_throughput_is_the_rate_over_what_a_worker_serves():
    told = {"prompt_tokens": 500.0, "output_tokens": 100.0, "cached_tokens": 0.0}
    # a request takes .5 s of prompt and 100 steps of .01 s shared by 10
    rule = make("dynamo_throughput:forecast=constant")
    assert wish(rule, 180, view(1, arrived=1800, **told), interval=180.0) == 6
    half = told | {"cached_tokens": 250.0}
    assert wish(rule, 360, view(6, arrived=1800, **half), interval=180.0) == 4
    assert wish(rule, 540, view(6), interval=180.0) is None
    with pytest.raises(InputError, match="forecast"):
        make("dynamo_throughput:forecast=prophecy")


@pytest.mark.parametrize("kind", ["constant", "trend", "kalman"])
def test_forecasts_of_what_does_not_change_and_of_a_line(kind):
    steady, line = Forecast(kind), Forecast(kind)
    assert [steady.next(7.0) for _ in range(50)][-1] == pytest.approx(7.0, abs=1e-3)
    last = [line.next(3.0 * n) for n in range(100)][-1]
    assert last == pytest.approx(3.0 * (99 if kind == "constant" else 100), rel=1e-3)


def test_a_timetable_begins_a_line_one_start_up_early():
    def known(begin, end):
        return Offered(1800.0 * (4 if begin >= 1800 else 1), 1000.0, 0.0)

    rule = make("timetable:utilisation=0.5,interval=10", known=known)
    assert rule.begin() == {"decode": 2}
    path = [wish(rule, at, view(2), interval=10.0) for at in (1700, 1720, 1740, 1800, 3000)]
    assert path == [2, 2, 8, 8, 8]


def test_an_oracle_knows_bursts_as_long_as_its_period():
    def known(begin, end):
        return Offered(60.0 if begin == 120.0 else 0.0, 1000.0, 0.0)

    rule = make("oracle:utilisation=1", known=known)
    assert [wish(rule, at, view(2), interval=5.0) for at in (40, 60, 145, 155)] == [1, 2, 2, 1]


def test_seconds_keeps_the_queue_that_the_target_allows():
    """A second each: M/M/c waits of at most 4 s beside the own second, but for one in twenty."""
    told = {"prompt_tokens": 1000.0, "output_tokens": 0.0, "cached_tokens": 0.0}
    found = {}
    for rate in (0.3, 0.4, 0.5, 0.6, 4.0, 25.0):
        rule = make("seconds:ttft=5000,interval=10")
        for step in range(40):
            seen = view(1, arrived=round(10 * rate), **told)
            found[rate] = wish(rule, 10 * step, seen, interval=10.0)
    # M/M/1: .3 exp(-2.8) = .018, .4 exp(-2.4) = .036, .5 exp(-2) = .068
    assert found == {0.3: 1, 0.4: 1, 0.5: 2, 0.6: 2, 4.0: 5, 25.0: 26}
    rising = make("seconds:ttft=1e6,interval=10")
    for step in range(60):  # a tenth more a second
        n = wish(rising, 10 * step, view(1, arrived=10 * step, **told), interval=10.0)
    assert n == pytest.approx(59 + 6.5, abs=2)  # what comes when one started now serves


def test_who_waits_in_a_queue_of_several_servers():
    """Erlang's C: 1/3 of two servers half busy; Gross & Harris's table has 0.4092 of 8 by 10."""
    assert queues(2, 1.0, 0.0) == pytest.approx(1 / 3)
    assert queues(10, 8.0, 0.0) == pytest.approx(0.4092, abs=5e-5)
    assert queues(1, 0.6, 5.0) == pytest.approx(0.6 * math.exp(-2.0))  # M/M/1


@pytest.mark.parametrize(("load", "n", "more"), [(1.5, 1, 2), (3.2, 2, 5), (7.0, 6, 8)])
def test_the_work_that_comes_late_is_that_of_a_fluid(load, n, more):
    """What waits grows by load - n until the others serve, then shrinks."""
    serves_s, rest_s = 64.0, 2.0
    begins = n * rest_s / (load - n)
    ends = serves_s + ((load - n) * serves_s - more * rest_s) / (more - load)
    late = late_work((load, 0.0, 0.0), (n, more), rest_s, serves_s)
    assert late == pytest.approx(load * (ends - begins), rel=0.1)
    assert late_work((0.9 * n, 0.0, 0.0), (n, more), rest_s, serves_s) == 0.0
    slope = (load - n) / serves_s  # from n to the load
    rising = late_work((n, slope, 0.0), (n, more), rest_s, serves_s)
    assert 0.0 < rising < late


def test_a_start_waits_while_it_leaves_few_enough_late():
    """A worker serves a request a second; the second one starts in 60 s."""
    known = {"prompt_tokens": 1000.0, "output_tokens": 0.0, "cached_tokens": 0.0}

    def asks(rule, minutes):
        """When it asks for a second worker, s, of a rate that rises by .01/s a minute."""
        for n in range(6 * minutes):
            rate = 0.5 + 0.01 * n / 6.0
            waiting = max(0, round(60 * (rate - 1.0)))
            pool = view(1, arrived=round(10 * rate), waiting=waiting, **known)
            if wish(rule, 10.0 * n, pool, interval=10.0) > 1:
                return 10 * n
        return math.inf

    prompts = facts(decodes=False)
    soon, late = (make(f"seconds:ttft=3000{more}", prompts) for more in ("", ",spend=true"))
    at = asks(soon, 120), asks(late, 120)
    assert at[0] < at[1] < math.inf


def test_a_timetable_that_switches_waits_for_those_that_the_night_sets_free():
    def known(begin, end):  # by day 4 s of prompts a second and 4 of decoding; by night 6 and 1
        return Offered(1800.0, 6000.0, 1000.0) if begin >= 1800 else Offered(7200.0, 1000.0, 1000.0)

    pools = facts("prefill", decodes=False), facts("decode", computes=False)
    rule = make("timetable:utilisation=1,interval=10,switch=true", *pools, known=known)
    always = make("timetable:utilisation=1,interval=10", *pools, known=known)
    day = view(4, name="prefill"), view(4, name="decode")
    by_day = [Target("prefill", 4), Target("decode", 4)]
    assert rule.decide(Fleet(1735.0, 10.0, day)) == by_day  # who comes soon need not be started
    assert Target("prefill", 6) in always.decide(Fleet(1735.0, 10.0, day))
    by_night = [Switch("decode", "prefill", 2), Target("prefill", 6), Target("decode", 1)]
    assert rule.decide(Fleet(1800.0, 10.0, day)) == by_night
    few = view(4, name="prefill"), view(2, name="decode")  # one comes, one is to be started
    assert rule.decide(Fleet(1735.0, 10.0, few))[0] == Target("prefill", 5)


def test_seconds_survives_the_end_of_a_load():
    told = {"prompt_tokens": 1000.0, "output_tokens": 0.0, "cached_tokens": 0.0}
    rule = make("seconds")
    path = [
        wish(rule, 10 * step, view(9, arrived=max(0, 300 - 30 * step), **told), interval=10.0)
        for step in range(100)
    ]
    assert path[-1] == 1


def test_seconds_switches_roles_where_that_is_faster():
    pools = facts("prefill", decodes=False), facts("decode", computes=False)
    told = {"prompt_tokens": 1000.0, "output_tokens": 1000.0, "cached_tokens": 0.0}

    def said(rule, ready):
        for step in range(60):
            fleet = Fleet(10.0 * step, 10.0, (
                view(2, name="prefill", arrived=40, **told),
                view(ready, name="decode", arrived=40, **told),
            ))  # fmt: skip
            answer = rule.decide(fleet)
        return answer

    # 4 s of prompts a second, and 4 of decoding. A prompt alone takes longer than the TTFT: C(9, 4)
    # = .024 wait, C(8, 4) = .059. For a seat: C(7, 4) exp(-1.5) = .030, C(6, 4) exp(-1) = .105.
    told_twice = said(make("seconds", *pools), 9)
    assert told_twice[0] == Switch("decode", "prefill", 2)
    assert told_twice[1:] == [Target("prefill", 9), Target("decode", 7)]
    slow = tuple(pool._replace(switch_s=100.0) for pool in pools)
    assert not any(isinstance(each, Switch) for each in said(make("seconds", *slow), 9))


def test_a_worker_goes_when_it_has_cost_what_its_coming_back_would():
    told = {"prompt_tokens": 1000.0, "output_tokens": 0.0, "cached_tokens": 0.0}

    def path(**fields):
        rule = make("seconds:ttft=1e6", facts()._replace(**fields))
        seen = view(4, arrived=19, **told)
        return [wish(rule, at, seen, interval=10.0) for at in range(0, 200, 10)]

    assert path(start_up_s=50.0) == [4] * 5 + [2] * 15
    # Two that go pause all four for 6 s, there and back: 24 s of each of the two.
    pauses = {n: facts() for n in range(1, 9)}
    slow = path(start_up_s=50.0, widths=pauses, pause_s=lambda before, after: 6.0)
    assert slow == [4] * 8 + [2] * 12


def test_the_fewest_that_do_are_found_by_what_each_number_can_do():
    """Each of two takes half a second, of three a whole one: their all-to-alls leave the node."""
    widths = {n: facts()._replace(engines=engines) for n, engines in ((2, 2), (3, 1), (4, 4))}
    own = facts()._replace(widths=widths)
    for work, fewest in ((4.0, 2), (4.2, 4), (3.0, 2), (16.0, 4), (99.0, 4)):
        assert own.fewest(lambda of, n, w=work: w * of.work_s(1000.0, 0.0) <= n) == fewest


def test_what_is_foreseen_takes_no_group_to_a_width_that_is_dearer():
    """Up to eight engines a request takes a second, beyond 1.3: eight serve the rate there is."""
    widths = {n: facts() for n in range(4, 9)}
    widths |= {n: facts(prompt_s=lambda tokens: 1.3 * tokens / 1000) for n in range(9, 17)}
    rule = make("seconds:ttft=1e6", facts()._replace(widths=widths))
    told = {"prompt_tokens": 1000.0, "output_tokens": 0.0, "cached_tokens": 0.0}

    def said(step, arrived):
        return wish(rule, 10.0 * step, view(8, arrived=arrived, **told), interval=10.0)

    rising = [said(step, 5 * step) for step in range(1, 16)]  # to 7.5 a second, by .5 every 10 s
    assert rising[-1] == 8
    assert max(rising) == 8
    more = [said(step, 90) for step in range(16, 40)]  # 9 a second are more than eight can do
    assert more[-1] >= math.ceil(9 * 1.3)


def test_a_co_located_step_has_room_for_the_prompts_that_come_with_it():
    """Steps of 10 ms for any batch; prompts of .5 s, one each 100 steps: 8 sequences in 50 ms."""
    own = facts()._replace(prompt_s=lambda n: 0.5, step_s=lambda n, c: 0.01, max_num_seqs=64)
    assert own.work_s(500.0, 100.0, itl_s=0.05) == pytest.approx(0.5 + 100 * 0.01 / 8)
    assert own.work_s(500.0, 100.0, itl_s=0.05, mixed=False) == pytest.approx(0.5 + 1.0 / 64)


@pytest.mark.parametrize("rate", [0.5, 8.0, 200.0])
def test_a_trend_of_poisson_counts_finds_their_rate_and_its_change(rate):
    rng = np.random.default_rng(0)
    steady, rising = Trend(), Trend()
    for step in range(1, 301):
        found = steady.next(int(rng.poisson(10 * rate)), 10.0, 60.0)
        ahead = rising.next(int(rng.poisson(10 * rate * step / 100)), 10.0, 60.0)
    noise = math.sqrt(rate / 10.0)  # of one count
    assert found == pytest.approx(rate, abs=noise)
    assert ahead == pytest.approx(3.06 * rate, abs=2.0 * math.sqrt(3.0) * noise)


def test_a_rounding_error_takes_no_worker():
    from eldr_sim.policies.scaling.base import whole_workers

    assert [whole_workers(x) for x in (3 * 0.1 / 0.1, 3.01, 0.0, -1.0)] == [3, 4, 0, 0]


@pytest.mark.parametrize("memory", [1.0, 120.0, 1e4])
def test_the_mean_request_forgets_old_ones_with_the_time_constant_asked_for(memory):
    rule = make(f"seconds:memory={memory}")
    for tokens, expected in ((100.0, 100.0), (300.0, 300.0 - 200.0 * math.exp(-15.0 / memory))):
        pool = view(2, prompt_tokens=tokens, output_tokens=tokens, cached_tokens=tokens)
        assert rule._means(pool, 15.0) == pytest.approx((expected,) * 3)
