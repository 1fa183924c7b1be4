"""Queue orders: against theory, a queue that is sorted anew each time, and conservation of work."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.queue.orders import Waiting
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.requests.logs.request_logs import read_request_log

from .. import queueing
from ..paths import SHARED

SEEDS, WARM_UP = range(25), 200
TIMES = [name for name in state.REQUEST.names if name.endswith("_s")]


def keys(name, prompt_len, priority=None, output_len=None, step_times=None):
    context = PolicyContext(1, np.random.default_rng(0), step_times=step_times)
    waiting = Waiting(np.asarray(prompt_len), priority, output_len)
    return registry.queue_order(name, context).keys(waiting)


@pytest.fixture(scope="module")
def serve(make_cluster, make_workload, make_step_time):
    """Serve prompts on one prefill worker of one place, a millisecond a token."""

    def run(arrivals, prompts, queue_keys, aging_s=math.inf, **rest):
        longest = int(np.max(prompts)) + 1
        step_time = make_step_time(
            1, 1, 8, constant=0.0, prefill=(0.0, 1e-3), max_tokens=longest, max_context=longest
        )
        record = make_cluster(
            make_workload(arrivals, prompts, 1), step_time=step_time, max_num_seqs=1,
            max_num_batched_tokens=longest, block_size=16, queue_keys=queue_keys,
            aging_s=aging_s, **rest,
        ).run()  # fmt: skip
        assert record.completed.all()
        return record.requests

    return run


# -- theory ------------------------------------------------------------------------------------


def test_published_values():
    """Exponential service of mean 1: 4.0 and 9.0 in order of arrival, less than half by length."""
    x = (np.arange(400_000) + 0.5) * 1e-4
    probability = np.diff(1.0 - np.exp(-np.arange(400_001) * 1e-4))
    probability /= probability.sum()
    for rate, wait in ((0.8, 1.8822), (0.9, 3.1969)):
        found = queueing.shortest_job_first_wait(rate, x, probability)
        assert found == pytest.approx(wait, abs=2e-4)
    assert queueing.shortest_job_first_wait(0.6, np.ones(1), np.ones(1)) == pytest.approx(
        queueing.md1_wait(0.6, 1.0)
    )
    with pytest.raises(InputError, match="load"):
        queueing.shortest_job_first_wait(1.1, np.ones(1), np.ones(1))


@pytest.mark.parametrize("order", ["fcfs", "sjf"])
def test_mean_wait_is_that_of_theory(serve, order):
    """M/M/1 at a load of 0.8: 4.000 services in order of arrival, 1.8822 by length."""
    rate, mean, n = 0.8, 1000, 10_000
    lengths = np.arange(1, 40 * mean)
    probability = stats.geom.pmf(lengths, 1 / mean)
    seconds = lengths * 1e-3
    per_second = rate / (mean * 1e-3)
    theory = (
        queueing.mg1_wait(per_second, seconds @ probability, np.square(seconds) @ probability)
        if order == "fcfs"
        else queueing.shortest_job_first_wait(per_second, seconds, probability)
    )
    assert theory / (mean * 1e-3) == pytest.approx({"fcfs": 4.0, "sjf": 1.8822}[order], rel=2e-3)
    waits = []
    for seed in SEEDS:
        rng = np.random.default_rng([seed, 31])
        arrivals = np.cumsum(rng.exponential(1.0 / per_second, n))
        prompts = rng.geometric(1 / mean, n)
        requests = serve(arrivals, prompts, keys(order, prompts))
        waits.append(np.mean((requests["prefill_start_s"] - arrivals)[WARM_UP:-WARM_UP]))
    error = stats.sem(waits) * stats.t.ppf(0.995, len(waits) - 1)
    print(f"theory {theory:.5f}, simulated {np.mean(waits):.5f} +- {error:.5f}")
    assert error < 0.12 * theory
    assert abs(np.mean(waits) - theory) <= error


def test_azures_prompts_by_length():
    """What shortest job first leaves of the mean wait where service is a prompt's tokens."""
    path = SHARED / "data" / "requests" / "azure2023_conv.csv"
    if not path.exists():
        pytest.skip("the Azure conversation log is not here")
    lengths, counts = np.unique(read_request_log(path).prompt_len, return_counts=True)
    seconds, probability = lengths.astype(float), counts / counts.sum()
    mean, square = seconds @ probability, np.square(seconds) @ probability
    for load, ratio in ((0.5, 0.728), (0.7, 0.581), (0.8, 0.492), (0.9, 0.383)):
        rate = load / mean
        shortest = queueing.shortest_job_first_wait(rate, seconds, probability)
        assert shortest / queueing.mg1_wait(rate, mean, square) == pytest.approx(ratio, abs=1e-3)


def test_waits_by_priority_are_cobhams(serve):
    """Two classes of the same prompts: W0 / ((1 - rho_before) (1 - rho_up_to)), each by itself."""
    rate, mean, n, share = 0.8, 200, 3000, 0.5  # share: of the urgent ones
    lengths = np.arange(1, 40 * mean)
    seconds, probability = lengths * 1e-3, stats.geom.pmf(lengths, 1 / mean)
    per_second = rate / (mean * 1e-3)
    residual = per_second * (np.square(seconds) @ probability) / 2
    urgent = rate * share
    theory = residual / (1 - urgent), residual / ((1 - urgent) * (1 - rate))
    waits = [], []
    for seed in SEEDS:
        rng = np.random.default_rng([seed, 37])
        arrivals = np.cumsum(rng.exponential(1.0 / per_second, n))
        prompts, priority = rng.geometric(1 / mean, n), rng.random(n) > share
        queue_keys = keys("priority", prompts, priority=priority.astype(int))
        waited = serve(arrivals, prompts, queue_keys)["prefill_start_s"] - arrivals
        inside = np.arange(n)[WARM_UP:-WARM_UP]
        for which, found in enumerate(waits):
            found.append(waited[inside][priority[inside] == which].mean())
    for expected, found in zip(theory, waits, strict=True):
        error = stats.sem(found) * stats.t.ppf(0.995, len(found) - 1)
        assert error < 0.15 * expected
        assert abs(np.mean(found) - expected) <= error


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 60))
def test_unfinished_work_is_the_same_under_every_order(serve, seed, n):
    rng = np.random.default_rng(seed)
    arrivals, prompts = np.cumsum(rng.exponential(0.1, n)), rng.integers(1, 300, n)
    work = prompts * 1e-3
    left = []
    by_length = keys("sjf", prompts)
    orders = (None, math.inf), (by_length, 0.3), (by_length, math.inf), (-by_length, math.inf)
    for order in (*orders, (rng.random(n), 1.0)):
        requests = serve(arrivals, prompts, *order)
        at = arrivals[:, None]
        served = np.clip(at - requests["prefill_start_s"][None], 0.0, work)
        left.append(np.where(arrivals[None] <= at, work - served, 0.0).sum(axis=1))
    for other in left[1:]:
        np.testing.assert_allclose(other, left[0], atol=1e-9)


# -- brute force -------------------------------------------------------------------------------


def sorted_anew(arrivals, prompts, queue_keys, aging_s):
    """Start times of one server that sorts who waits before each service.

    As Gimbal's Algorithm 2: the aged ones as they came, then the others by key and arrival.
    """
    starts, now = np.full(len(arrivals), math.nan), 0.0
    waiting = set(range(len(arrivals)))
    while waiting:
        here = [i for i in waiting if arrivals[i] <= now]
        if not here:
            now = min(arrivals[i] for i in waiting)
            continue
        aged = [i for i in here if now - arrivals[i] >= aging_s]
        chosen = min(aged) if aged else min(here, key=lambda i: (queue_keys[i], i))
        waiting.remove(chosen)
        starts[chosen] = now
        now += prompts[chosen] * 1e-3
    return starts


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 80),
    n_keys=st.integers(1, 6),
    gap_s=st.sampled_from([0.0, 0.02, 0.2]),
    aging_s=st.sampled_from([0.0, 0.19, 0.7, 2.3, math.inf]),
)
def test_the_heap_serves_as_a_sorted_queue(serve, seed, n, n_keys, gap_s, aging_s):
    rng = np.random.default_rng(seed)
    # Service takes eighths of a second, so that none ends when another request comes.
    arrivals = np.sort(rng.integers(0, 1 + int(n * gap_s * 8), n)) / 8 + 1e-6 * np.arange(n)
    prompts, queue_keys = 125 * rng.integers(1, 4, n), rng.integers(0, n_keys, n).astype(float)
    got = serve(arrivals, prompts, queue_keys, aging_s)["prefill_start_s"]
    expected = sorted_anew(arrivals, prompts, queue_keys, aging_s)
    np.testing.assert_allclose(got, expected, atol=1e-9)
    # Ageing's bound: who came after a request and begins before it does so before that has aged.
    overtaken = (arrivals[:, None] < arrivals) & (got[:, None] > got)
    assert (got < arrivals[:, None] + aging_s)[overtaken].all()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_prefill=st.integers(0, 1),
    aging_s=st.sampled_from([0.01, math.inf]),
)
def test_every_request_ends_once_whatever_the_order(
    make_cluster, make_workload, run_to_rest, seed, n_prefill, aging_s
):
    """KV caches that hardly hold the largest context: preemption beside a queue by length."""
    rng = np.random.default_rng(seed)
    n = 40
    prompts, outputs = rng.integers(1, 30, n), rng.integers(1, 20, n)
    cluster = make_cluster(
        make_workload(np.sort(rng.random(n)) * 0.05, prompts, outputs), n_prefill=n_prefill,
        n_blocks=int((prompts + outputs).max() // 4 + 3), queue_keys=keys("sjf", prompts),
        aging_s=aging_s,
    )  # fmt: skip
    record = run_to_rest(cluster)
    assert record.completed.all()
    assert record.decode_steps["outputs"].sum() == outputs.sum()
    workers = cluster.arrays.engines.workers
    for end in ("new_head", "oldest", "newest"):
        assert (workers[end] == -1).all()
    assert (workers["n_blank"] + workers["n_idle"] == cluster.arrays.engines.pools["n_blocks"][
        cluster.arrays.engines.pool_of
    ]).all()  # fmt: skip


@pytest.mark.parametrize("n_prefill", [0, 1])
def test_ageing_at_once_is_first_come_first_served(make_cluster, make_workload, n_prefill):
    """And ageing never is the order by key: byte for byte, preemptions among it."""
    rng = np.random.default_rng(5)
    n = 200
    arrivals = np.cumsum(rng.exponential(0.004, n))
    prompts, outputs = rng.integers(1, 60, n), rng.integers(1, 20, n)
    by_length = keys("sjf", prompts)

    def bytes_of(queue_keys, aging_s):
        record = make_cluster(
            make_workload(arrivals, prompts, outputs), n_prefill=n_prefill, n_blocks=24,
            queue_keys=queue_keys, aging_s=aging_s,
        ).run()  # fmt: skip
        assert record.requests["preemptions"].sum() > 10
        columns = [record.requests[name] for name in TIMES]
        return np.stack(columns).tobytes() + record.decode_steps.tobytes()

    in_order, shortest = bytes_of(None, math.inf), bytes_of(by_length, math.inf)
    assert bytes_of(by_length, 0.0) == in_order
    assert bytes_of(by_length, 1e9) == shortest
    assert len({in_order, shortest, bytes_of(by_length, 0.05)}) == 3


def test_who_ages_while_the_next_has_no_blocks_is_served_at_the_step_after(
    make_cluster, make_workload, make_step_time
):
    """The next by key needs more blocks than are free, the oldest does not, and nothing ends."""
    step_time = make_step_time(8, 1, 8, constant=1.0, prefill=(1.0, 0.0))
    requests = make_cluster(
        make_workload([0.0, 0.1, 0.2], [36, 4, 30], [28, 2, 2]), step_time=step_time, n_prefill=0,
        n_blocks=16, block_size=4, queue_keys=np.array([0.0, 2.0, 1.0]), aging_s=5.0,
        enable_prefix_caching=False,
    ).run().requests  # fmt: skip
    assert requests["prefill_start_s"][1] == 6.0  # 5.1 s, and to the end of the step
    assert requests["prefill_start_s"][2] >= 27.0


def test_a_request_ages_at_the_engine_and_not_at_the_client(serve):
    """Three in flight, a second each: the fourth is sent at 1 s and the fifth at 2 s."""
    prompts, queue_keys = np.full(5, 1000), np.array([0.0, 1.0, 2.0, 9.0, 3.0])
    requests = serve(np.zeros(5), prompts, queue_keys, 2.5, max_concurrency=3)
    assert requests["sent_s"].round(9).tolist() == [0, 0, 0, 1, 2]
    # At 3 s all came 3 s ago, but the fourth has waited for 2 s alone: the next by key goes first.
    assert requests["prefill_start_s"].round(9).tolist() == [0, 1, 2, 4, 3]


# -- residence ---------------------------------------------------------------------------------


def test_residence_is_prompt_work_and_steps(make_step_time):
    """A second a decode step; prompts of 1 ms a token in chunks of 100, each 10 ms."""
    cost = make_step_time(4, 1, 8, constant=1.0, prefill=(0.01, 1e-3), max_tokens=100).cost
    prompts, outputs = np.array([50, 250, 60]), np.array([3, 1, 9])
    found = keys("oracle", prompts, output_len=outputs, step_times=cost)
    np.testing.assert_allclose(found, [3 + 0.06, 1 + 0.28, 9 + 0.07])
    # 50 and 60 are of one kind, whose outputs are 6 on average; 250 is alone.
    found = keys("sjf_residence", prompts, output_len=outputs, step_times=cost)
    np.testing.assert_allclose(found, [6 + 0.06, 1 + 0.28, 6 + 0.07])


def test_a_later_chunk_attends_to_the_earlier_ones(make_step_time):
    """A long prompt's residence is the sum of its steps, each with what is cached by then."""
    cost = make_step_time(4, 1, 8, max_tokens=100).cost
    experts = np.full(1, float(cost.n_experts))
    none = np.zeros(1)
    found = keys("oracle", np.array([250]), output_len=none, step_times=cost)
    steps = [
        total_s(step_parts(cost, 0, 0, 0.0, np.array([at]), np.array([n]), 1, experts, True))
        for at, n in ((0, 100), (100, 100), (200, 50))
    ]
    np.testing.assert_allclose(found, [sum(steps)])


# -- a run -------------------------------------------------------------------------------------


def test_short_prompts_pay_less_where_prefill_is_the_bottleneck():
    base = make_config(
        {
            "frontend": "none",
            "topology": "1P2D",
            "policy": "jsq",
            "num_requests": 400,
            "output_len": 8,
            "request_rate": "inf",
            "workload": "language",
        }
    )
    first, shortest = (simulate(base.replace(queue_order=name)) for name in ("fcfs", "SJF"))
    assert shortest.summary["queue_order"] == "sjf"
    assert shortest.summary["mean_ttft_ms"] <= first.summary["mean_ttft_ms"]
    requests = shortest.requests.to_pandas()
    waited = requests[requests.prefill_start_s > 0.0]  # others came to an idle engine
    span = waited.groupby("prompt_len").prefill_start_s.agg(["min", "max"])
    assert len(span) > 1
    assert (span["max"].to_numpy()[:-1] <= span["min"].to_numpy()[1:]).all()


def test_unknown_order():
    message = r"queue_order: unknown policy 'lifo' \(allowed: fcfs, .*priority, sjf.*\)"
    with pytest.raises(InputError, match=message):
        make_config({"queue_order": "lifo"})


# -- priorities ----------------------------------------------------------------------------------


def log(tmp_path, priorities):
    lines = [
        json.dumps({"timestamp": 5 * i, "input_length": 64, "output_length": 150} | given)
        for i, given in enumerate(priorities)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_priorities_of_a_log_rule_queue_and_preemption(tmp_path):
    """Few KV blocks and many requests: urgent ones wait less and are never preempted first."""
    path = log(tmp_path, [{"priority": i % 2} for i in range(60)])
    config = make_config({
        "workload": str(path), "topology": "1C", "num_requests": 60, "max_num_seqs": 16,
        "time_unit": "ms", "queue_order": "priority", "gpu_memory_utilization": 0.766,
        "policy": "jsq",
    })  # fmt: skip
    result = simulate(config)
    assert result.summary["completed"] == 60
    assert result.summary["queue_order"] == "priority"
    requests = result.record.requests
    urgent = np.arange(60) % 2 == 0
    waits = requests["prefill_start_s"] - requests["arrival_s"]
    assert waits[urgent].mean() < 0.7 * waits[~urgent].mean()


def test_priority_needs_priorities(tmp_path):
    file = str(log(tmp_path, [{}] * 20))
    for fields in ({"workload": "task"}, {"workload": file, "time_unit": "ms"}):
        config = make_config({"queue_order": "priority", "num_requests": 5} | fields)
        with pytest.raises(InputError, match="queue_order: 'priority' needs priorities"):
            simulate(config)
