"""Users' SimPy processes on both backends: the same calls, the same answers."""

import random

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.simulation import Simulation

RUN = {
    "topology": "2P3D", "policy": "jsq", "num_requests": 40, "warmup": 0, "output_len": 20,
    "trace": "reference-moe", "health_delay_ms": 50, "retry": "migrate",
}  # fmt: skip


def users_and_operators(backend, **changes):
    """Return what processes see, and the result: users, an operator, a worker that dies."""
    sim = Simulation(make_config(RUN | changes), arrivals=False, backend=backend)
    seen, decode = [], sim.cluster.pool("decode")

    def user(draws):
        while True:
            yield sim.env.timeout(draws.expovariate(2.0))
            lengths = {"prompt_len": draws.randrange(20, 200)} if draws.random() < 0.5 else {}
            ended = yield sim.cluster.request(**lengths)
            seen.append((ended.number, ended.outcome, ended.ttft_s, ended.finish_s))

    def operator():
        yield sim.env.timeout(2.0)
        sim.cluster.drain(decode[0])
        yield sim.env.timeout(1.0)
        sim.cluster.fail(decode[1])
        seen.append([worker.number for worker in decode.serving])
        yield sim.env.timeout(1.0)
        seen.append((yield sim.cluster.start(decode[0])))
        sim.cluster.link(decode[2], 0.25)
        sim.cluster.stop(decode[2])
        yield sim.cluster.start(decode[1])
        while True:
            yield sim.env.timeout(0.5)
            seen.append((decode.waiting, decode.running, decode.loads))

    for number in range(12):
        sim.env.process(user(random.Random(number)))
    sim.env.process(operator())
    first = sim.run(until=4.0)
    return seen, first, sim.run(until=8.0)


def assert_equal(one, other):
    for mine, its in zip(one, other, strict=True):
        if isinstance(mine, tuple) and len(mine) == 4 and isinstance(mine[1], str):
            assert mine[:2] == its[:2]
            np.testing.assert_allclose(mine[2:], its[2:], rtol=1e-12)
        else:
            assert mine == its


@pytest.mark.parametrize("changes", [{}, {"topology": "3C"}, {"prefill_policy": "least_loaded"}])
def test_processes_see_the_same_on_both_backends(changes):
    compiled, reference = (users_and_operators(name, **changes) for name in ("compiled", "simpy"))
    assert len(compiled[0]) > 40
    assert_equal(compiled[0], reference[0])
    for one, other in zip(compiled[1:], reference[1:], strict=True):
        assert one.record.outcomes() == other.record.outcomes()
        times = [result.record.requests["finish_s"] for result in (one, other)]
        np.testing.assert_allclose(*times, rtol=1e-12)
        assert one.summary["completed"] == other.summary["completed"]


def test_arrivals_and_processes_share_a_run():
    results = []
    for backend in ("compiled", "simpy"):
        sim = Simulation(make_config(RUN | {"request_rate": 20}), backend=backend)
        sim.env.process(iter_once(sim))
        results.append(sim.run())
    assert results[0].summary == results[1].summary


def iter_once(sim):
    yield sim.env.timeout(0.5)
    yield sim.cluster.request()


def test_what_the_reference_does_not_model_is_refused_by_name():
    for field, changes in (
        ("kv_tiers", {"kv_tier": ["dram:64GB,load=50GB/s"]}),
        ("workload", {"workload": "chat", "request_rate": 1, "topology": "2C"}),
        ("topology", {"engine": "sglang"}),
        ("autoscale", {"autoscale": "hpa"}),
    ):
        from eldr_sim.simulator.run import simulate

        try:
            config = make_config(RUN | changes)
        except InputError:
            continue
        with pytest.raises(InputError) as error:
            simulate(config, backend="simpy")
        assert error.value.field == field


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_client_that_leaves_as_another_s_end_lets_its_request_join(async_scheduling):
    """Between the plan of a step that a request joins and its start: it never stood in a batch."""
    fields = RUN | {
        "topology": "1P1D", "prefill_policy": "least_loaded", "num_requests": 3,
        "decode": {"max_num_seqs": 2}, "async_scheduling": async_scheduling,
    }  # fmt: skip

    def leaves(backend):
        sim, seen = Simulation(make_config(fields), arrivals=False, backend=backend), []

        def client():
            short = sim.cluster.request(prompt_len=50, output_len=10)
            long = sim.cluster.request(prompt_len=50, output_len=60)
            third = sim.cluster.submit(50, 30)
            yield short
            sim.cluster.cancel(third)
            ended = yield long
            seen.extend([ended.ttft_s, ended.finish_s])

        sim.env.process(client())
        result = sim.run(until=30.0)
        return [*seen, *result.record.gaps["resumed_s"].tolist()]

    compiled, reference = map(leaves, ("compiled", "simpy"))
    assert compiled == pytest.approx(reference, rel=1e-9)
