"""Balancers of engines: Gimbal's Algorithm 1 against its lines, vLLM's against its scores."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers

from ..on_each import on_each

BUILD = {"decode": registry.decode_policy, "prefill": registry.prefill_policy}


def build(word, n_workers, decision="decode"):
    return BUILD[decision](word, PolicyContext(n_workers, np.random.default_rng(0)))


def request(session=None):
    return RequestInfo(0, 10, 0, session=session)


def view(kv=(0.0, 0.0), load=None, now_s=0.0, **columns):
    n = len(kv)
    load = np.zeros(n, np.int64) if load is None else np.asarray(load)
    # Half of the load runs, half waits: Algorithm 1 knows their sum alone.
    columns = {"waiting_tokens": load // 2, "running_tokens": load - load // 2} | columns
    given = {name: np.asarray(column) for name, column in columns.items()}
    return Workers.idle(np.zeros(n))._replace(
        kv_usage=np.asarray(kv, float), now_s=now_s, signals_s=now_s, **given
    )


# -- Gimbal ------------------------------------------------------------------------------------


def algorithm_1(kv, load, in_turn, users_engine, reading):
    """The paper's lines, one by one; ``users_engine`` is None where unknown or expired."""
    chosen = in_turn  # 1
    highest, lowest = max(range(len(kv)), key=kv.__getitem__), kv.index(min(kv))  # 3, 4
    if kv[highest] >= 0.9:  # 5
        if kv[highest] - kv[lowest] >= 0.1:  # 6
            return lowest  # 7
        if max(load) - min(load) > 3000:  # 8 to 10
            return load.index(min(load))  # 11, 12
    else:
        if reading == "prose" and max(load) - min(load) > 3000:
            return load.index(min(load))
        if users_engine is not None:  # 15, 16
            chosen = users_engine  # 17
    return chosen


@on_each("n, decision", [(2, "decode"), (2, "prefill"), (3, "decode")])
@on_each("reading", ["printed", "prose"])
def test_algorithm_1_on_its_whole_truth_table(n, reading, decision):
    levels = (0.5, 0.79, 0.89, 0.9, 0.95) if n == 2 else (0.5, 0.79, 0.9, 0.95)
    seen = set()
    for kv in itertools.product(levels, repeat=n):
        for load in itertools.product((0, 3000, 3001), repeat=n):
            for user in ("unknown", "known", "expired", None):
                policy = build(f"gimbal:reading={reading}", n, decision)
                name = None if user is None else "ann"
                users_engine, turn = None, 0
                if user in ("known", "expired"):
                    # Her first request goes to the last engine, which is the least loaded one.
                    first = [0] * (n - 1) + [-4000]
                    before = view([0.95] * n, first)
                    assert policy.select(request("ann"), before) == n - 1
                    turn = 1
                    users_engine = n - 1 if user == "known" else None
                now_s = 601.0 if user == "expired" else 600.0
                expected = algorithm_1(list(kv), list(load), turn, users_engine, reading)
                got = policy.select(request(name), view(kv, load, now_s))
                assert got == expected, (kv, load, user)
                seen.add((expected, user))
    assert len(seen) > 3 * n


@given(
    kv=st.lists(st.lists(st.floats(0, 0.89), min_size=3, max_size=3), min_size=1, max_size=20),
    load=st.integers(0, 10**6),
)
def test_printed_without_users_and_saturation_is_round_robin(kv, load):
    gimbal, in_turn = build("gimbal", 3), build("round_robin", 3)
    for usage in kv:
        workers = view(usage, [load, 0, 2 * load])
        assert gimbal.select(request(), workers) == in_turn.select(request(), workers)


@given(kv=st.lists(st.sampled_from([0.0, 0.2, 0.6, 0.95]), min_size=2, max_size=6))
def test_without_thresholds_it_is_least_kv(kv):
    policy = build("gimbal:kv=0,kv_difference=0", len(kv))
    assert policy.select(request(1), view(kv)) == int(np.argmin(kv))


def test_infinite_thresholds_keep_users_where_they_are():
    policy = build("gimbal:kv=1,user_expiry=1e9", 3)
    homes = {}
    for i in range(60):
        user = f"user {i * 7 % 5}"
        chosen = policy.select(request(user), view([0.99, 0.2, 0.5], [9, 10**6, 3], now_s=i))
        assert homes.setdefault(user, chosen) == chosen
    assert len(set(homes.values())) == 3


def test_an_engine_that_does_not_answer_is_left_out():
    down = {"healthy": [False, True, True]}
    for reading in ("printed", "prose"):
        policy = build(f"gimbal:reading={reading}", 3)
        assert policy.select(request(), view([0.1, 0.95, 0.5], **down)) == 2
        assert policy.select(request("bob"), view([0.1, 0.2, 0.3], **down)) in (1, 2)
    for name in ("gimbal", "vllm_dp", "vllm_dp_kv", "vllm_dp_first"):
        assert build(name, 2).select(request(), view(healthy=[False, False])) is None


# -- vLLM --------------------------------------------------------------------------------------


def test_vllm_counts_its_own_requests_until_the_next_report():
    policy = build("vllm_dp", 3)
    workers = view([0.0] * 3, waiting=[1, 0, 2], running=[0, 5, 1])  # scores 4, 5, 9
    picks = [policy.select(request(), workers) for _ in range(5)]
    assert picks == [0, 1, 0, 1, 2]  # 8 5 9, 8 9 9, 12 9 9, 12 13 9
    later = workers._replace(signals_s=0.1)
    assert policy.select(request(), later) == 0


def test_the_load_of_queues_is_what_waits():
    """4,000 running tokens more are no imbalance, 3,001 waiting ones are."""
    policy = build("gimbal:reading=queues", 2)
    more = {"running_tokens": [4000, 0], "waiting_tokens": [0, 3000]}
    assert [policy.select(request(), view(**more)) for _ in range(3)] == [0, 1, 0]
    more["waiting_tokens"] = [0, 3001]
    assert [policy.select(request(), view(**more)) for _ in range(3)] == [0, 0, 0]


def test_vllms_first_balancer_takes_the_least_waiting_then_the_least_running():
    policy = build("vllm_dp_first", 3)
    workers = view([0.0] * 3, waiting=[1, 0, 0], running=[0, 5, 3])
    # 1 0, 0 5, 0 3: the third until it has 5 running, then in turn by the lower number.
    assert [policy.select(request(), workers) for _ in range(5)] == [2, 2, 1, 2, 1]
    waits = workers._replace(waiting=np.array([2, 1, 1]), signals_s=0.1)
    # 2 0, 1 5, 1 3: what is sent waits, until all have 2 and the first runs none.
    assert [policy.select(request(), waits) for _ in range(3)] == [2, 1, 0]


def test_vllm_weighs_waiting_requests_by_kv_usage():
    workers = view([0.5, 1.0], waiting=[3, 1], running=[0, 1])
    assert build("vllm_dp_kv", 2).select(request(), workers) == 0  # 3 against 2 + 3
    calm = view([0.5, 0.5], waiting=[3, 1], running=[0, 1])
    assert build("vllm_dp_kv", 2).select(request(), calm) == 1  # 3 against 2
    own = calm._replace(loads=np.array([0, 9]))  # more in flight than the report knows of
    assert build("vllm_dp_kv", 2).select(request(), own) == 0


def test_vllm_takes_equal_engines_in_turn_under_kv_and_the_first_before():
    workers = view([0.2] * 4)
    newer, older = build("vllm_dp_kv", 4, "prefill"), build("vllm_dp", 4, "prefill")
    reports = [workers._replace(signals_s=float(i)) for i in range(6)]
    assert [newer.select(request(), report) for report in reports] == [0, 1, 2, 3, 0, 1]
    assert [older.select(request(), report) for report in reports] == [0] * 6


def test_kv_usage_up_to_a_half_weighs_nothing():
    """At 0.5 and below 100 waiting requests are 100; by a hundredth more they are six more."""
    workers = view([0.49, 0.0], waiting=[100, 0], running=[0, 101])
    assert build("vllm_dp_kv", 2).select(request(), workers) == 0
    fuller = view([0.51, 0.0], waiting=[100, 0], running=[0, 101])
    assert build("vllm_dp_kv", 2).select(request(), fuller) == 1


def test_requests_that_the_report_knows_of_count_once():
    """Three in flight, all of them running, against four that others have sent."""
    workers = view([0.0, 0.0], waiting=[0, 0], running=[3, 4])
    workers = workers._replace(loads=np.array([3, 0]))
    assert build("vllm_dp_kv", 2).select(request(), workers) == 0


def test_what_is_sent_waits_until_the_next_report_under_kv():
    """One running against none: the second request finds the first one waiting."""
    policy, workers = build("vllm_dp_kv", 2), view([0.0, 0.0], waiting=[0, 0], running=[0, 1])
    assert [policy.select(request(), workers) for _ in range(2)] == [0, 1]
    assert policy.select(request(), workers._replace(signals_s=0.1)) == 0
