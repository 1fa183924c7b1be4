"""The front end: what a request waits for before a router sees it.

The twin of test_engine.py has it, too, in random clusters.
"""

import dataclasses

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.front_end import FrontEndLatency, list_front_ends
from eldr_sim.simulator.plane.front_end import FrontEndSpec
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from .random_clusters import cluster_of, policies_of, random_cluster

TOKEN_S, LOOP_S, HTTP_S = 1e-4, 3e-4, 7e-4


def run_with(mode, arrivals=None, **options):
    """Run a small cluster behind a front end; returns its requests."""
    arguments = random_cluster(5, (0, 2), 0, 0, 1, True, True, False)
    workload = arguments["workload"]
    if arrivals is not None:
        workload.arrival_s[:] = arrivals(len(workload))
    knots = np.array([0.0, 1000.0])
    seconds = {
        "tokenize": TOKEN_S * knots,
        "event_loop": np.full(2, LOOP_S),
        "http": np.full(2, HTTP_S),
    }
    front = FrontEndSpec(
        FrontEndLatency({part: (knots, of) for part, of in seconds.items()}, None),
        mode,
        **{"n_servers": 1} | options,
    )
    arguments["spec"] = dataclasses.replace(
        arguments["spec"], front_end=front, max_concurrency=None, max_model_len=300
    )
    arguments |= {"window": (0.0, np.inf), "time_limit_s": np.inf}
    first, second = policies_of(arguments["spec"], "round_robin", "jsq", 0)
    cluster = cluster_of(
        **arguments, prefill_policy=first, decode_policy=second, signatures=lambda _: (0, None)
    )
    return cluster.run().requests


def read_at(sent):
    """When the event loop has read requests and HTTP has brought them: one after the other."""
    free, read = 0.0, []
    for at in sent:
        free = max(at, free) + LOOP_S
        read.append(free + HTTP_S)
    return read


def test_a_pool_of_one_thread_is_a_queue_of_one_server():
    """Lindley's recursion, twice."""
    requests = run_with("thread_pool")
    free, expected = 0.0, []
    for read, tokens in zip(read_at(requests["sent_s"]), requests["prompt_len"], strict=True):
        free = max(read, free) + TOKEN_S * tokens
        expected.append(free)
    np.testing.assert_allclose(requests["tokenized_s"], expected, rtol=1e-12)
    assert len(requests) > 5


def test_the_timer_of_a_batch_that_was_full_before_it_starts_no_other():
    def arrivals(n):  # two fill a batch; the third comes before their timer ends
        return np.array([0.0, 0.0, 0.5, *(10.0 * (1 + i) for i in range(n - 3))])

    requests = run_with("microbatch_sequential", arrivals, most=2, wait_s=1.0)
    expected = read_at([0.0, 0.0, 0.5])[2] + 1.0 + TOKEN_S * requests["prompt_len"][2]
    assert requests["tokenized_s"][2] == pytest.approx(expected, rel=1e-12)


def test_threads_and_servers_share_the_work():
    """Without a queue at the loop, two servers of two threads are four threads at least."""
    slow = run_with("thread_pool", np.zeros)
    wide = run_with("thread_pool", np.zeros, n_servers=2, threads=2)
    assert wide["tokenized_s"].max() < slow["tokenized_s"].max()
    own = HTTP_S + LOOP_S + TOKEN_S * wide["prompt_len"]
    assert (wide["tokenized_s"] - wide["sent_s"] >= own - 1e-12).all()


@pytest.mark.parametrize("mode", ["microbatch_sequential", "microbatch_parallel"])
def test_a_burst_is_tokenised_in_batches_that_end_together(mode):
    requests = run_with(mode, np.zeros, most=4, threads=3, wait_s=0.002)
    read, work = read_at(requests["sent_s"]), TOKEN_S * requests["prompt_len"]

    def seconds(batch):
        if mode == "microbatch_sequential":
            return batch.sum()
        return max(batch.max(), batch.sum() / 3)

    n, at, free, expected = len(requests), 0, 0.0, []
    while at < n:
        opened = max(read[at], free)  # the batch gets its first prompt
        batch = [i for i in range(at, n) if read[i] <= opened + 0.002][:4]
        begin = max(opened, read[batch[-1]]) if len(batch) == 4 else opened + 0.002
        free = begin + seconds(work[batch])
        expected += [free] * len(batch)
        at = batch[-1] + 1
    np.testing.assert_allclose(requests["tokenized_s"], expected, rtol=1e-12)
    assert len(set(expected)) > 1


RUN = {"num_requests": 6, "output_len": 8, "request_rate": 0.5, "seed": 3}


@pytest.mark.parametrize("topology", ["1P1D", "1C"])
def test_a_lone_request_waits_for_its_front_end_and_nothing_else_changes(topology):
    """The parts of TTFT add up; without a front end a result has nothing of it."""
    (cpu,) = list_front_ends()
    plain = simulate(make_config(RUN | {"topology": topology, "frontend": "none"}))
    fronted = simulate(make_config(RUN | {"topology": topology}))
    requests = fronted.record.requests
    ahead = 1e3 * (requests["tokenized_s"] - requests["sent_s"])
    ttft = [np.array(result.requests["ttft_ms"]) for result in (plain, fronted)]
    np.testing.assert_allclose(ttft[1], ttft[0] + ahead, rtol=1e-9)
    assert (ahead > 1.0).all()
    summary = fronted.summary
    assert summary["front_end"]["cpu"] == cpu  # is there by default
    assert summary["front_end"]["mean_ms"] == pytest.approx(ahead.mean())
    assert summary["provenance"]["front_end"]["label"] == "measured"
    assert "tokenized_s" in fronted.requests.column_names
    assert "tokenized_s" not in plain.requests.column_names
    assert "front_end" not in plain.summary


def test_a_slower_cpu_takes_longer_by_as_much():
    (cpu,) = list_front_ends()
    config = make_config(RUN | {"topology": "1C", "frontend": cpu})
    means = [
        simulate(config.replace(cpu_slowdown=factor)).summary["front_end"]["mean_ms"]
        for factor in (1.0, 2.0)
    ]
    assert means[1] == pytest.approx(2 * means[0])


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"frontend": "abacus"}, "frontend: no front end 'abacus'"),
        (
            {"frontend": "None", "tokenizer_threads": 2},
            "tokenizer_threads: there are no API servers",
        ),
        ({"cpu_slowdown": 0.0, "frontend": "x"}, "cpu_slowdown"),
    ],
)
def test_what_cannot_be_is_refused(fields, what):
    with pytest.raises(InputError, match=what):
        simulate(make_config(RUN | fields))


def test_requests_of_a_dead_worker_are_not_tokenised_again(tmp_path):
    (cpu,) = list_front_ends()
    config = make_config(
        RUN
        | {"topology": "2C", "frontend": cpu, "num_requests": 20, "request_rate": 20.0}
        | {"output_len": 60, "fail": ["decode:0@0.5s+1s"], "retry": "migrate"}
    )
    found = simulate(config)
    requests, retried = found.record.requests, found.record.retries > 0
    assert found.summary["completed"] == 20
    assert retried.any()
    assert (requests["tokenized_s"][retried] < 0.5).all()


def test_clients_give_up_while_servers_tokenise(tmp_path):
    """Servers finish what they hold, and no worker ever computes it."""
    events = tmp_path / "events.yaml"
    events.write_text("- {cancel: 1.0, after_s: 0.05}")
    run = RUN | {"topology": "2C", "num_requests": 40, "request_rate": 200.0, "input_len": 2000}
    config = make_config(run | {"cpu_slowdown": 20.0, "events": str(events)})
    found = simulate(config)
    requests = found.record.requests
    assert found.summary["faults"]["cancelled"] == 40
    assert (requests["tokenized_s"] < 0.0).all()
    assert len(found.steps) == 0


def test_a_version_that_tokenises_otherwise_runs_without_servers():
    summary = simulate(make_config(RUN | {"engine_version": "0.18", "frontend": "none"})).summary
    assert "front_end" not in summary
