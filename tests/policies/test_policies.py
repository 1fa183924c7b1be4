"""The load-balancing policies and the registry, against closed forms and brute force."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.flops import PrefillWork
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RequestInfo, RouterPolicy, Workers, gives_rules
from eldr_sim.policies.routing.decode import split_workers
from eldr_sim.policies.routing.prefill import HashRingPolicy, PrefixHashPolicy
from eldr_sim.traces.routing.calibration import CalibrationSet

REQUEST = RequestInfo(request_id=0, prompt_len=10, domain=0)


def context(n_workers, seed=0, **rest):
    return PolicyContext(n_workers, np.random.default_rng(seed), **rest)


def calibration(domain, n_domains):
    n = len(domain)
    return CalibrationSet(
        counts=np.ones((n, 1, 2), np.uint16),
        decode_activation=np.ones((n, 1, 2), np.float32),
        domain=np.array(domain, np.int16),
        domains=[f"d{index}" for index in range(n_domains)],
        requests=np.arange(n),
        trace_checksum="0",
    )


loads_lists = st.lists(st.integers(0, 5), min_size=1, max_size=12)


# -- load balancing ----------------------------------------------------------------------------


def test_random_is_uniform_and_follows_its_stream():
    policy = registry.decode_policy("random", context(7, seed=3))
    picks = [policy.select(REQUEST, Workers.idle(np.zeros(7))) for _ in range(7000)]
    assert chisquare(np.bincount(picks, minlength=7)).pvalue > 0.001
    again = registry.decode_policy("random", context(7, seed=3))
    assert picks == [again.select(REQUEST, Workers.idle(np.zeros(7))) for _ in range(7000)]


@pytest.mark.parametrize("build", [registry.decode_policy, registry.prefill_policy])
def test_round_robin_takes_turns_whatever_the_load(build):
    policy = build("round_robin", context(3))
    assert [policy.select(REQUEST, Workers.idle([9, 0, 4])) for _ in range(7)] == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
    ]


@pytest.mark.parametrize(
    ("build", "name"), [(registry.decode_policy, "jsq"), (registry.prefill_policy, "least_loaded")]
)
@given(
    history=st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), max_size=20)
    )
)
def test_shortest_queue_is_a_minimum(build, name, history):
    policy = build(name, context(len(history[0]) if history else 1))
    for loads in history:
        assert loads[policy.select(REQUEST, Workers.idle(loads))] == min(loads)


def test_shortest_queue_shares_ties_evenly():
    policy = registry.decode_policy("jsq", context(5))
    loads = np.array([2, 1, 1, 3, 1])
    assert Counter(policy.select(REQUEST, Workers.idle(loads)) for _ in range(300)) == {
        1: 100,
        2: 100,
        4: 100,
    }


def test_shortest_queue_fills_workers_evenly():
    policy = registry.decode_policy("jsq", context(6))
    loads = np.zeros(6, np.int64)
    for _ in range(6 * 50):
        loads[policy.select(REQUEST, Workers.idle(loads))] += 1
    assert loads.tolist() == [50] * 6


def test_two_choices_has_the_distribution_of_the_minimum_of_two():
    n, draws = 6, 30_000
    loads = np.array([60, 10, 50, 20, 40, 30])
    policy = registry.decode_policy("p2c", context(n))
    picks = np.bincount(
        [policy.select(REQUEST, Workers.idle(loads)) for _ in range(draws)], minlength=n
    )
    rank = loads.argsort().argsort()
    # Chosen if drawn (2/n) with one of the n - 1 - rank more loaded workers as the other.
    expected = 2 * (n - 1 - rank) / (n * (n - 1)) * draws
    assert picks[0] == 0
    busy = expected > 0
    assert chisquare(picks[busy], expected[busy]).pvalue > 0.001


def test_two_choices_is_uniform_on_ties_and_works_alone():
    policy = registry.decode_policy("p2c", context(5))
    picks = [policy.select(REQUEST, Workers.idle(np.ones(5))) for _ in range(10_000)]
    assert chisquare(np.bincount(picks, minlength=5)).pvalue > 0.001
    assert registry.decode_policy("p2c", context(1)).select(REQUEST, Workers.idle([4])) == 0


# -- domain ------------------------------------------------------------------------------------


def test_split_of_the_papers_task_mix():
    # Legal, code, math, medical of ELDR Sec. 6 on 16 decoders: quotas 4.94, 3.81, 3.76, 3.49.
    split = split_workers(np.array([3600, 2779, 2744, 2545]), 16)
    assert [len(workers) for workers in split] == [5, 4, 4, 3]


def hamilton(counts, seats):
    """Largest remainder by its textbook rule, floats and all, lower index on a tie."""
    quota = seats * np.array(counts) / sum(counts)
    given_ = np.floor(quota + 1e-9).astype(int)
    order = sorted(range(len(counts)), key=lambda d: (-round(quota[d] - given_[d], 9), d))
    for domain in order[: seats - given_.sum()]:
        given_[domain] += 1
    return given_


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 40))
def test_split_is_a_fair_partition(counts, n_workers):
    split = split_workers(np.array(counts), n_workers)
    large = [d for d, count in enumerate(counts) if count and count * n_workers >= sum(counts)]
    small = [d for d in range(len(counts)) if d not in large]
    left = sum(counts[d] for d in small)
    parts = [counts[d] for d in large] + [left] * (left > 0)
    if not parts:
        assert split == [list(range(n_workers))] * len(counts)
        return
    for d in small:
        assert split[d] == (split[small[0]] if left else list(range(n_workers)))
    owned = [split[d] for d in large] + ([split[small[0]]] if left else [])
    assert sorted(w for workers in owned for w in workers) == list(range(n_workers))
    assert all(owned)
    plain = hamilton(parts, n_workers)
    if (plain > 0).all():
        assert [len(workers) for workers in owned] == plain.tolist()


def test_small_domains_share_a_pool():
    assert split_workers(np.array([970, 10, 10, 10]), 4) == [[0, 1, 2], [3], [3], [3]]
    assert split_workers(np.array([25, 60, 30, 4]), 2) == [[1], [0], [1], [1]]
    # One of no calibration request at all is small, too.
    assert split_workers(np.array([7, 0, 1]), 4) == [[0, 1, 2], [3], [3]]


def test_domains_split_groups_of_workers():
    made = calibration([0] * 30 + [1] * 10, n_domains=2)
    policy = registry.decode_policy("domain", context(8, calibration=made, group_size=2))
    loads = Workers.idle([5, 5, 5, 4, 5, 5, 3, 2])
    picks = [policy.select(RequestInfo(0, 10, domain), loads) for domain in (0, 1)]
    assert picks == [3, 7]  # three groups and one


def test_domain_policy_joins_the_shortest_queue_of_its_domain():
    made = calibration([0] * 30 + [2] * 10, n_domains=3)
    policy = registry.decode_policy("domain", context(4, calibration=lambda: made))
    loads = np.array([5, 4, 6, 9])

    def pick(domain):
        return policy.select(RequestInfo(0, 10, domain), Workers.idle(loads))

    assert pick(0) == 1
    assert pick(2) == 3
    loads[:] = [5, 5, 6, 1]
    assert pick(1) == 3  # nothing known of this domain: the shortest queue of all
    with pytest.raises(InputError, match="index 3"):
        pick(3)


@pytest.mark.parametrize("name", ["jsq", "domain"])
def test_ties_may_be_drawn(name):
    made = calibration([0] * 10, n_domains=1)
    policy = registry.decode_policy(f"{name}:ties=random", context(5, calibration=made))
    assert not gives_rules(policy)
    loads = Workers.idle([2, 1, 1, 3, 1])
    picks = np.bincount([policy.select(REQUEST, loads) for _ in range(3000)], minlength=5)
    assert picks[[0, 3]].tolist() == [0, 0]
    assert chisquare(picks[[1, 2, 4]]).pvalue > 0.001
    assert gives_rules(registry.decode_policy(name, context(5, calibration=made)))


# -- hash ring ---------------------------------------------------------------------------------


def test_hash_ring_spreads_keys_by_its_arcs_and_moves_few_of_them():
    ring, more = HashRingPolicy(context(8)), HashRingPolicy(context(9))
    homes = np.array([ring.home(key) for key in range(20_000)])
    moved = np.array([more.home(key) for key in range(20_000)])
    assert ((moved == homes) | (moved == 8)).all()  # consistent hashing
    # An arc is about exponential, so that 160 of them spread by 1 / sqrt(160), 8%.
    share = np.bincount(homes, minlength=8) / 20_000
    assert abs(share * 8 - 1).max() < 0.3
    assert abs((moved == 8).mean() * 9 - 1) < 0.3


@given(loads=loads_lists, key=st.integers(0, 2**64 - 1))
def test_hash_ring_leaves_an_overloaded_worker_for_the_first_of_the_least_loaded(loads, key):
    policy = HashRingPolicy(context(len(loads)))
    home = policy.home(key)
    kept = loads[home] <= 1.25 * (sum(loads) + 1) / len(loads)
    expected = home if kept else loads.index(min(loads))
    assert policy.select(prefix_request(key), Workers.idle(loads)) == expected


def test_hash_ring_keys_on_the_first_256_tokens_or_the_request():
    policy = HashRingPolicy(context(8, prefix_block_tokens=64))
    idle = Workers.idle(np.zeros(8))
    picks = {policy.select(prefix_request(1, 2, 3, 4, *rest), idle) for rest in ([], [5], [6, 7])}
    assert len(picks) == 1
    alone = {policy.select(REQUEST._replace(request_id=number), idle) for number in range(100)}
    assert alone == set(range(8))


# -- prefix hash -------------------------------------------------------------------------------


def prefix_request(*hashes):
    return RequestInfo(0, 10, 0, prefix_hash=hashes)


def test_prefix_hash_keys_on_the_first_256_tokens():
    policy = PrefixHashPolicy(context(8, prefix_block_tokens=64))
    idle = np.zeros(8, np.int64)
    key = [
        policy.select(prefix_request(1, 2, 3, 4, *rest), Workers.idle(idle))
        for rest in ([], [5], [6, 7, 8])
    ]
    assert len(set(key)) == 1
    others = {
        policy.select(prefix_request(1, 2, 3, last), Workers.idle(idle)) for last in range(100, 200)
    }
    assert len(others) == 8
    # A prompt shorter than the key is keyed on what it has.
    assert policy.select(prefix_request(1, 2), Workers.idle(idle)) == policy.home(2)


def test_prefix_hash_spreads_keys_evenly_even_if_they_are_small_numbers():
    policy = PrefixHashPolicy(context(8))
    homes = np.bincount([policy.home(key) for key in range(8000)], minlength=8)
    assert chisquare(homes).pvalue > 0.001


def test_prefix_hash_moves_keys_only_to_a_new_worker():
    before, after = PrefixHashPolicy(context(7)), PrefixHashPolicy(context(8))
    moved = [(before.home(key), after.home(key)) for key in range(4000)]
    assert all(new in (old, 7) for old, new in moved)
    assert 0.08 < np.mean([new == 7 for _, new in moved]) < 0.17


@given(loads=loads_lists, key=st.integers(0, 2**64 - 1))
def test_prefix_hash_leaves_an_overloaded_worker(loads, key):
    policy = PrefixHashPolicy(context(len(loads)))
    chosen = policy.select(prefix_request(key), Workers.idle(loads))
    home = policy.home(key)
    if loads[home] <= 1.25 * (sum(loads) + 1) / len(loads):
        assert chosen == home
    else:
        assert loads[chosen] == min(loads)


def test_prefix_hash_without_a_block_balances_load():
    policy = PrefixHashPolicy(context(3))
    assert policy.select(REQUEST, Workers.idle([2, 1, 5])) == 1


# -- registry and context ----------------------------------------------------------------------


def test_every_built_in_policy_builds_and_selects(make_step_time):
    made, step_times = calibration([0, 1], n_domains=2), make_step_time(4).cost
    for name in ["random", "round_robin", "jsq", "p2c", "domain"]:
        policy = registry.decode_policy(name, context(3, calibration=made))
        assert isinstance(policy, RouterPolicy)
        assert policy.name == name
        assert policy.select(REQUEST, Workers.idle([1, 2, 3])) in range(3)
    for name in registry.names("prefill"):
        prefill = registry.prefill_policy(
            name, context(3, prefill_work=lambda: PrefillWork(1.0, 1.0), step_times=step_times)
        )
        assert isinstance(prefill, RouterPolicy)
        assert prefill.name == name


def test_names():
    known = {"random", "round_robin", "jsq", "p2c", "domain", "eldr", "marginal_cost", "oracle"}
    assert known < set(registry.names("decode"))
    assert {"round_robin", "least_loaded", "prefix_hash"} < set(registry.names("prefill"))
    assert {"fcfs", "sjf"} < set(registry.names("queue"))
    for decision in registry.DECISIONS:
        assert registry.names(decision) == sorted(registry.names(decision))
    with pytest.raises(InputError, match="lunch"):
        registry.names("lunch")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=r"unknown policy 'sjf'.*eldr.*random"):
        registry.decode_policy("sjf", context(2))
    with pytest.raises(InputError, match=r"unknown policy 'jsq'.*prefix_hash"):
        registry.prefill_policy("jsq", context(2))


@pytest.mark.parametrize("name", ["domain", "eldr"])
def test_a_policy_says_what_it_needs(name):
    with pytest.raises(InputError, match=f"^policy: '{name}' needs"):
        registry.decode_policy(name, context(2))


def test_calibration_is_made_only_for_a_policy_that_needs_it():
    def fail(*_options):
        raise AssertionError("called")

    registry.decode_policy("jsq", context(2, calibration=fail, artifact=fail))
    with pytest.raises(AssertionError, match="called"):
        registry.decode_policy("domain", context(2, calibration=fail))


@pytest.mark.parametrize(
    "bad", [{"n_workers": 0}, {"prefix_block_tokens": 0}, {"group_size": 0}, {"group_size": 3}]
)
def test_context_refuses(bad):
    field = next(iter(bad))
    with pytest.raises(InputError, match=f"^{field}:"):
        PolicyContext(**{"n_workers": 2, "rng": np.random.default_rng(0), **bad})


def test_two_choices_keep_the_first_drawn_of_a_tie():
    class Drawn:
        """The second of three workers, then the first of the two others."""

        def __init__(self):
            self.values = iter((1, 0))

        def integers(self, n):
            return next(self.values)

    policy = registry.decode_policy("p2c", PolicyContext(3, Drawn()))
    assert policy.select(REQUEST, Workers.idle([4, 4, 0])) == 1
