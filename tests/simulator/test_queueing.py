"""The simulator's own parts as queues whose mean wait is known.

Every figure is the mean over 25 seeds, each trimmed of its warm-up, with a 99% confidence interval
(Student's t over the seeds). Theory must lie inside, and the interval must be narrow enough to
tell: below 10% of the wait to either side, 3% in the slow runs with ten times the requests. Nothing
is compared with the simulator's own output.
"""

import math

import numpy as np
import pytest
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.transfer import TransferModel

from .. import queueing

SEEDS = range(25)
WARM_UP = 200


@pytest.fixture(
    scope="module", params=[1, pytest.param(10, marks=pytest.mark.slow)], ids=["short", "long"]
)
def scale(request):
    """How many times the default number of requests a seed."""
    return request.param


def agrees(waits, theory, scale):
    """Check that ``theory`` lies in the confidence interval of one mean a seed; print both."""
    assert len(waits) == len(SEEDS)
    mean, error = np.mean(waits), stats.sem(waits) * stats.t.ppf(0.995, len(waits) - 1)
    print(f"theory {theory:.5f}, simulated {mean:.5f} +- {error:.5f}")
    assert error < 0.1 * theory / math.sqrt(scale)
    assert abs(mean - theory) <= error


# -- the formulas ------------------------------------------------------------------------------


def test_published_values():
    # Erlang C tables: 2 servers at 1 erlang wait with 1/3, 10 at 8 with 0.4092.
    assert queueing.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert queueing.erlang_c(10, 8.0) == pytest.approx(0.4092, abs=5e-5)
    assert queueing.erlang_c(1, 0.3) == pytest.approx(0.3)
    assert queueing.mm1_wait(0.8, 1.0) == pytest.approx(4.0)
    assert queueing.md1_wait(0.8, 1.0) == pytest.approx(2.0)
    assert queueing.mg1_wait(0.8, 1.0, 2.0) == pytest.approx(queueing.mm1_wait(0.8, 1.0))
    assert queueing.processor_sharing_sojourn(0.8, 1.0) == pytest.approx(5.0)


@pytest.mark.parametrize("servers", [1, 3, 8])
def test_mmc_equals_its_birth_death_chain(servers):
    rate, mean_s, states = 0.8 * servers / 2.0, 2.0, np.arange(400)
    ratio = rate * mean_s / np.minimum(np.maximum(states[1:], 1), servers)
    share = np.concatenate([[1.0], np.cumprod(ratio)])
    queue = np.maximum(states - servers, 0) @ share / share.sum()
    assert queueing.mmc_wait(rate, mean_s, servers) == pytest.approx(queue / rate)


def test_mdc_is_md1_of_one_server_and_about_half_of_mmc_of_many():
    for load in (0.3, 0.8, 0.95):
        one = queueing.mdc_wait(load / 2.0, 2.0, 1)
        assert one == pytest.approx(queueing.md1_wait(load / 2.0, 2.0), rel=1e-6)
    # Heavy traffic halves it (GSTH 6.2.1); waits of few are a little more than half.
    ratio = queueing.mdc_wait(4.9, 1.0, 5) / queueing.mmc_wait(4.9, 1.0, 5)
    assert 0.5 < ratio < 0.52


def test_steps_tend_to_their_limits():
    # One seat: exactly M/G/1 with a geometric service time, however coarse the steps.
    for mean_steps in (1.0, 1.5, 4.0, 100.0):
        moments = queueing.geometric_moments(1.0 / mean_steps, mean_steps)
        assert queueing.stepwise_wait(0.7, 1.0 / mean_steps, mean_steps, 1) == pytest.approx(
            queueing.mg1_wait(0.7, *moments), rel=1e-9
        )
    # Fine steps: M/M/c, with a remainder of the first order in the step.
    limit = queueing.mmc_wait(2.8, 1.0, 4)
    off = [queueing.stepwise_wait(2.8, 1.0 / n, n, 4) / limit - 1.0 for n in (100, 200, 400)]
    assert abs(off[2]) < 0.004
    assert off[1] / off[2] == pytest.approx(2.0, rel=0.05)
    assert off[0] / off[1] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: queueing.mm1_wait(1.0, 1.0), "rate"),
        (lambda: queueing.mmc_wait(4.0, 1.0, 4), "rate"),
        (lambda: queueing.md1_wait(-1.0, 1.0), "rate"),
        (lambda: queueing.mg1_wait(0.5, 1.0, 0.0), "second_moment_s2"),
        (lambda: queueing.processor_sharing_sojourn(0.5, math.nan), "mean_s"),
        (lambda: queueing.stepwise_wait(0.5, 1.0, 0.5, 1), "mean_steps"),
        (lambda: queueing.mmc_wait(1.0, 1.0, 0), "servers"),
    ],
)
def test_no_wait_without_a_steady_state(call, field):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.field == field


# -- a decode worker ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decode_waits_of(make_cluster, make_workload, make_step_time):
    """Times from arrival to joining the batch of one decode worker, s, one a request.

    Prefill and transfer are free, so a request is at the decode worker when it arrives.
    """

    def waits(step_s, arrivals, outputs, seats):
        step_time = make_step_time(
            seats, 1, 8, constant=step_s, prefill=(0.0, 0.0), max_context=int(outputs.max()) + 1
        )
        cluster = make_cluster(
            make_workload(arrivals, 1, outputs), step_time=step_time, max_num_seqs=seats
        )
        record = cluster.run()
        assert record.completed.all()
        return record.requests["decode_start_s"] - arrivals

    return waits


@pytest.fixture(scope="module")
def decode_waits(decode_waits_of, scale):
    """Mean wait of one decode worker, s, one a seed."""

    def means(rate, mean_steps, outputs, seats, n=2000):
        n *= scale
        found = []
        for seed in SEEDS:
            rng = np.random.default_rng([seed, 11])
            arrivals, steps = np.cumsum(rng.exponential(1.0 / rate, n)), outputs(rng, n)
            waits = decode_waits_of(1.0 / mean_steps, arrivals, steps, seats)
            found.append(float(np.mean(waits[WARM_UP:])))
        return found

    return means


def test_decode_worker_of_one_seat_is_mm1(decode_waits, scale):
    """Geometric outputs of 100 steps on average: M/M/1 but for a factor of 1 - 1/200."""
    waits = decode_waits(0.5, 100, lambda rng, n: rng.geometric(1 / 100, n), 1)
    agrees(waits, queueing.mg1_wait(0.5, *queueing.geometric_moments(1.0 / 100, 100)), scale)
    agrees(waits, queueing.mm1_wait(0.5, 1.0), scale)


def test_decode_worker_of_one_seat_is_md1(decode_waits, scale):
    waits = decode_waits(0.6, 50, lambda rng, n: np.full(n, 50), 1)
    agrees(waits, queueing.md1_wait(0.6, 1.0), scale)


def test_decode_worker_of_two_seats_is_mmc(decode_waits, scale):
    """Steps of 1/50 of a service move the wait by 0.09% from Erlang's, see ``stepwise_wait``."""
    waits = decode_waits(1.2, 50, lambda rng, n: rng.geometric(1 / 50, n), 2, n=5000)
    agrees(waits, queueing.stepwise_wait(1.2, 1.0 / 50, 50, 2), scale)
    agrees(waits, queueing.mmc_wait(1.2, 1.0, 2), scale)


def test_decode_worker_with_coarse_steps(decode_waits, scale):
    """3 steps a request: much of the wait is for the step in progress, and Erlang's C is off."""
    waits = decode_waits(2.0, 3, lambda rng, n: rng.geometric(1 / 3, n), 4)
    theory = queueing.stepwise_wait(2.0, 1 / 3, 3.0, 4)
    agrees(waits, theory, scale)
    assert theory > 2.0 * queueing.mmc_wait(2.0, 1.0, 4)


def test_a_whole_cluster_is_its_decode_queue(make_cluster, make_workload, make_step_time, scale):
    """With free prefill and transfer; the wait is counted from arrival to the decode batch."""
    rate, steps, seats, n = 1.0, 5, 2, 1500 * scale
    step_time = make_step_time(seats, 1, 8, constant=1.0 / steps, prefill=(0.0, 0.0))
    waits = []
    for seed in SEEDS:
        rng = np.random.default_rng([seed, 14])
        arrivals = np.cumsum(rng.exponential(1.0 / rate, n))
        workload = make_workload(arrivals, 1, rng.geometric(1 / steps, n))
        requests = make_cluster(workload, step_time=step_time, max_num_seqs=seats).run().requests
        waits.append(np.mean((requests["decode_start_s"] - requests["arrival_s"])[WARM_UP:]))
    agrees(waits, queueing.stepwise_wait(rate, 1.0 / steps, steps, seats), scale)


def test_every_wait_of_one_seat_obeys_lindley(decode_waits_of):
    """W' = max(0, W + S - A): with equal draws each wait is known, whatever the distribution."""
    rng = np.random.default_rng(15)
    arrivals = np.cumsum(rng.gamma(0.4, 1.0 / 0.4 / 0.8, 3000))
    steps = np.where(rng.random(3000) < 0.1, 400, 60)
    wait, expected = 0.0, []
    for gap, service in zip(np.diff(arrivals, append=np.inf), steps / 100, strict=True):
        expected.append(wait)
        wait = max(0.0, wait + service - gap)
    got = decode_waits_of(1.0 / 100, arrivals, steps, 1)
    np.testing.assert_allclose(got, expected, atol=1e-8)
    assert max(expected) > 10.0


# -- a prefill worker --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefill_waits(make_cluster, make_workload, make_step_time):
    """Mean time from arrival to the first chunk, s, one a seed; a step takes a millisecond a token.

    Transfer and decode are free.
    """

    def means(rate, prompts, max_num_batched_tokens, n):
        found = []
        for seed in SEEDS:
            rng = np.random.default_rng([seed, 12])
            arrivals, prompt_len = np.cumsum(rng.exponential(1.0 / rate, n)), prompts(rng, n)
            step_time = make_step_time(
                1, 1, 8, constant=0.0, prefill=(0.0, 1e-3), max_tokens=max_num_batched_tokens,
                max_context=int(prompt_len.max()) + 1,
            )  # fmt: skip
            record = make_cluster(
                make_workload(arrivals, prompt_len, 1), step_time=step_time, max_num_seqs=1,
                max_num_batched_tokens=max_num_batched_tokens, block_size=16,
            ).run()  # fmt: skip
            assert record.completed.all()
            waits = record.requests["prefill_start_s"] - arrivals
            found.append(float(np.mean(waits[WARM_UP:])))
        return found

    return means


def test_prefill_worker_with_equal_prompts_is_md1(prefill_waits, scale):
    waits = prefill_waits(0.6, lambda rng, n: np.full(n, 1000), 1000, 2000 * scale)
    agrees(waits, queueing.md1_wait(0.6, 1.0), scale)


def test_prefill_worker_with_geometric_prompts_is_mm1(prefill_waits, scale):
    """Chunks of 512 tokens do not change the wait: a begun prompt goes on first."""
    waits = prefill_waits(0.5, lambda rng, n: rng.geometric(1e-3, n), 512, 2000 * scale)
    agrees(waits, queueing.mm1_wait(0.5, 1.0), scale)


# -- a link ------------------------------------------------------------------------------------


#: A mean transfer is one of so many tokens.
TOKENS = 10_000


@pytest.fixture(scope="module")
def link_sojourns(make_cluster, make_workload, make_step_time):
    """Mean time of a transfer over one link, s, one a seed, whose mean size takes a second alone.

    A prefill worker that computes in no time; all KV caches leave by its link. The decode worker's
    link is never a limit.
    """
    longest = 20 * TOKENS
    step_time = make_step_time(
        1, 1, 8, constant=0.0, prefill=(0.0, 0.0), max_tokens=longest, max_context=longest
    )

    def means(rate, sizes, n):
        found = []
        for seed in SEEDS:
            rng = np.random.default_rng([seed, 13])
            begin = np.cumsum(rng.exponential(1.0 / rate, n))
            cluster = make_cluster(
                make_workload(begin, np.ceil(TOKENS * sizes(rng, n)), 1), step_time=step_time,
                max_num_seqs=1, max_num_batched_tokens=longest, block_size=1, n_blocks=1 << 40,
                transfer=TransferModel(0.0, 0.0, 1e9, "test", 1e30),
                kv_bytes_per_token=1e9 / TOKENS,
            )  # fmt: skip
            requests = cluster.run().requests
            assert (requests["transfer_start_s"] == begin).all()
            found.append(float(np.mean((requests["transfer_end_s"] - begin)[WARM_UP:])))
        return found

    return means


@pytest.mark.parametrize(
    "sizes",
    [lambda rng, n: np.ones(n), lambda rng, n: rng.exponential(1.0, n)],
    ids=["constant", "exponential"],
)
def test_a_shared_link_is_a_processor_sharing_queue(link_sojourns, sizes, scale):
    """One egress link; rounding sizes up to whole tokens makes them longer by 1/20,000."""
    agrees(
        link_sojourns(0.6, sizes, 1500 * scale), queueing.processor_sharing_sojourn(0.6, 1.0), scale
    )
