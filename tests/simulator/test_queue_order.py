"""Queue orders: against theory, a queue that is sorted anew each time, and conservation of work."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.queue_order import Waiting
from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.run import simulate

from .. import queueing

SEEDS, WARM_UP = range(25), 200


def keys(name, prompt_len):
    context = PolicyContext(1, np.random.default_rng(0))
    return registry.queue_order(name, context).keys(Waiting(np.asarray(prompt_len)))


@pytest.fixture(scope="module")
def serve(make_cluster, make_workload, make_step_time):
    """Serve prompts on one prefill worker of one place, a millisecond a token."""

    def run(arrivals, prompts, queue_keys):
        longest = int(np.max(prompts)) + 1
        step_time = make_step_time(
            1, 1, 8, constant=0.0, prefill=(0.0, 1e-3), max_tokens=longest, max_context=longest
        )
        record = make_cluster(
            make_workload(arrivals, prompts, 1), step_time=step_time, max_num_seqs=1,
            max_num_batched_tokens=longest, block_size=16, queue_keys=queue_keys,
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
    """Pollaczek and Khinchine in order of arrival, Phipps by length; geometric prompts."""
    rate, mean, n = 0.7, 200, 3000
    lengths = np.arange(1, 40 * mean)
    probability = stats.geom.pmf(lengths, 1 / mean)
    seconds = lengths * 1e-3
    per_second = rate / (mean * 1e-3)
    theory = (
        queueing.mg1_wait(per_second, seconds @ probability, np.square(seconds) @ probability)
        if order == "fcfs"
        else queueing.shortest_job_first_wait(per_second, seconds, probability)
    )
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


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 60))
def test_unfinished_work_is_the_same_under_every_order(serve, seed, n):
    rng = np.random.default_rng(seed)
    arrivals, prompts = np.cumsum(rng.exponential(0.1, n)), rng.integers(1, 300, n)
    work = prompts * 1e-3
    left = []
    for queue_keys in (None, keys("sjf", prompts), -keys("sjf", prompts), rng.random(n)):
        requests = serve(arrivals, prompts, queue_keys)
        at = arrivals[:, None]
        served = np.clip(at - requests["prefill_start_s"][None], 0.0, work)
        left.append(np.where(arrivals[None] <= at, work - served, 0.0).sum(axis=1))
    for other in left[1:]:
        np.testing.assert_allclose(other, left[0], atol=1e-9)


# -- brute force -------------------------------------------------------------------------------


def sorted_anew(arrivals, prompts, queue_keys):
    """Start times of one server that sorts who waits before each service, by key and arrival."""
    starts, now = np.full(len(arrivals), math.nan), 0.0
    waiting = set(range(len(arrivals)))
    while waiting:
        here = [i for i in waiting if arrivals[i] <= now]
        if not here:
            now = min(arrivals[i] for i in waiting)
            continue
        chosen = min(here, key=lambda i: (queue_keys[i], i))
        waiting.remove(chosen)
        starts[chosen] = now
        now += prompts[chosen] * 1e-3
    return starts


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 80),
    n_keys=st.integers(1, 6),
    gap_s=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_the_heap_serves_as_a_sorted_queue(serve, seed, n, n_keys, gap_s):
    rng = np.random.default_rng(seed)
    # Service takes eighths of a second, so that none ends when another request comes.
    arrivals = np.sort(rng.integers(0, 1 + int(n * gap_s * 8), n)) / 8 + 1e-6 * np.arange(n)
    prompts, queue_keys = 125 * rng.integers(1, 4, n), rng.integers(0, n_keys, n).astype(float)
    got = serve(arrivals, prompts, queue_keys)["prefill_start_s"]
    np.testing.assert_allclose(got, sorted_anew(arrivals, prompts, queue_keys), atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), n_prefill=st.integers(0, 1))
def test_every_request_ends_once_whatever_the_order(
    make_cluster, make_workload, run_to_rest, seed, n_prefill
):
    """KV caches that hardly hold the largest context: preemption beside a queue by length."""
    rng = np.random.default_rng(seed)
    n = 40
    prompts, outputs = rng.integers(1, 30, n), rng.integers(1, 20, n)
    cluster = make_cluster(
        make_workload(np.sort(rng.random(n)) * 0.05, prompts, outputs), n_prefill=n_prefill,
        n_blocks=int((prompts + outputs).max() // 4 + 3), queue_keys=keys("sjf", prompts),
    )  # fmt: skip
    record = run_to_rest(cluster)
    assert record.completed.all()
    assert record.decode_steps["batch"].sum() == outputs.sum()
    workers = cluster.arrays.engines.workers
    assert (workers["new_head"] == -1).all()
    assert (workers["n_blank"] + workers["n_idle"] == cluster.arrays.engines.pools["n_blocks"][
        cluster.arrays.engines.pool_of
    ]).all()  # fmt: skip


# -- a run -------------------------------------------------------------------------------------


def test_short_prompts_pay_less_where_prefill_is_the_bottleneck():
    base = make_config(
        {
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
    message = r"queue_order: unknown policy 'lifo' \(allowed: fcfs, sjf\)"
    with pytest.raises(InputError, match=message):
        make_config({"queue_order": "lifo"})
