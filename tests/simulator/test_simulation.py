"""Clusters under the hand of SimPy processes."""

import dataclasses
import re
import signal

import numpy as np
import pytest

from eldr_sim import RunConfig
from eldr_sim.errors import InputError, ProcessError
from eldr_sim.simulator.plane import loop
from eldr_sim.simulator.run import build_cluster, offered_load, simulate
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.simulation import Simulation

from ..paths import ROOT

CONFIG = RunConfig(
    trace="reference-moe", topology="2P3D", policy="jsq", num_requests=60, request_rate=40,
    warmup=0, output_len=40,
)  # fmt: skip


STAGED = CONFIG.replace(
    topology="2P", policy="round_robin", pipeline_parallel_size=2, output_len=None
)


def user(sim, draws, log=None):
    """Think, ask, wait, and again."""
    while True:
        yield sim.env.timeout(float(draws.exponential(0.3)))
        ended = yield sim.cluster.request()
        if log is not None:
            log.append(ended)


def closed_loop(config, n_users, until):
    sim, log = Simulation(config, arrivals=False), []
    for number in range(n_users):
        sim.env.process(user(sim, np.random.default_rng(number), log))
    return sim.run(until=until), log


@pytest.mark.parametrize(
    "changes",
    [{}, {"topology": "3C", "max_num_seqs": 6}, {"policy": "eldr", "prefix_len": 64},
     {"frontend": "xeon-emerald-rapids", "policy": "p2c", "load_report_delay_ms": 3},
     {"topology": "2P", "policy": "round_robin", "output_len": None, "pipeline_parallel_size": 2},
     {"topology": "1P2D", "data_parallel_size": 2, "enable_expert_parallel": True}],
)  # fmt: skip
def test_without_processes_it_is_simulate(changes):
    config = CONFIG.replace(**changes)
    result, same = Simulation(config).run(), simulate(config)
    assert result.requests.equals(same.requests)
    assert result.steps.equals(same.steps)
    assert result.summary == same.summary


@pytest.mark.parametrize("changes", [{}, {"prefix_len": 64, "num_prefixes": 3},
                                     {"frontend": "xeon-emerald-rapids"}])  # fmt: skip
def test_a_closed_loop_ends_as_the_open_load_of_its_arrivals(changes):
    """The oracle: what users do is a list of arrivals. 20 requests are there, many are sent."""
    config = CONFIG.replace(num_requests=20, **changes)
    result, log = closed_loop(config, 30, until=8.0)
    sent = result.record.requests
    assert len(sent) > 100
    assert len(log) == result.record.completed.sum() > len(sent) - 31
    prepared = prepare(config)
    workload, _ = offered_load(config, prepared.trace)
    n = len(sent)
    whole = workload.repeated(-(-n // len(workload)))
    names = ("prompt_len", "output_len", "text", "decode_request", "replay_offset",
             "domain", "session")  # fmt: skip
    load = dataclasses.replace(
        whole, arrival_s=sent["arrival_s"].copy(), prefix_indptr=whole.prefix_indptr[: n + 1],
        **{name: getattr(whole, name)[:n] for name in names},
    )  # fmt: skip
    cluster = build_cluster(config, prepared, load, (0.0, np.inf))
    cluster.time_limit_s = 8.0
    replayed = cluster.run().requests
    for name in sent.dtype.names:
        if name not in ("watched", "ticket", "measured") and not name.startswith("window_"):
            np.testing.assert_array_equal(sent[name], replayed[name], err_msg=name)


def test_ten_thousand_users_and_arrays_that_grow():
    sim, ended = Simulation(CONFIG.replace(topology="8C"), arrivals=False), []

    def once(number):
        yield sim.env.timeout(number * 1e-3)
        ended.append((yield sim.cluster.request(output_len=1)))

    for number in range(10_000):
        sim.env.process(once(number))
    result = sim.run()
    assert result.record.completed.sum() == len(ended) == 10_000
    assert sorted(one.number for one in ended) == list(range(10_000))
    assert all(one.outcome == "completed" for one in ended)
    assert all(one.sent_s < one.first_token_s == one.finish_s for one in ended)


def test_runs_are_equal_and_go_on_where_they_stopped():
    whole, _ = closed_loop(CONFIG, 12, until=4.0)
    sim = Simulation(CONFIG, arrivals=False)
    for number in range(12):
        sim.env.process(user(sim, np.random.default_rng(number)))
    assert sim.run(until=1.7).record.end_s == sim.env.now == 1.7
    parts = sim.run(until=4.0)
    assert parts.requests.equals(whole.requests)
    assert parts.steps.equals(whole.steps)
    with pytest.raises(InputError, match="above 4 s"):
        sim.run(until=3)


def test_requests_of_ones_own_lengths_and_refusals():
    sim, said = Simulation(CONFIG, arrivals=False), []

    def one():
        said.append((yield sim.cluster.request(prompt_len=100, output_len=7)))
        said.append((yield sim.cluster.request(prompt_len=10**9)))

    sim.env.process(one())
    sim.run()
    assert (said[0].prompt_len, said[0].output_len, said[0].outcome) == (100, 7, "completed")
    assert said[0].ttft_s > 0
    assert said[1].outcome == "exceeds_max_model_len"
    assert np.isnan(said[1].ttft_s)
    with pytest.raises(InputError, match="1 or more"):
        sim.cluster.request(output_len=0)
    for changes, why in (({"prefix_len": 64}, "share prefixes"), ({"queue_order": "sjf"}, "order")):
        other = Simulation(CONFIG.replace(**changes), arrivals=False)
        with pytest.raises(InputError, match=why):
            other.cluster.request(prompt_len=5)


def test_an_operator_drains_starts_kills_and_throttles():
    sim = Simulation(
        CONFIG.replace(num_requests=400, retry="migrate", health_delay_ms=200), absent=["decode:2"]
    )
    decode = sim.cluster.pool("decode")
    assert [str(worker) for worker in decode.serving] == ["decode:0", "decode:1"]

    def operator():
        yield sim.env.timeout(2)
        sim.cluster.drain(decode[0])
        yield sim.env.timeout(2)
        assert [worker.number for worker in decode.serving] == [1]
        sim.cluster.start(decode[2])
        sim.cluster.link(decode[2], 0.5)
        yield sim.env.timeout(2)
        sim.cluster.fail(decode[1])
        assert [worker.number for worker in decode.serving] == [1, 2]  # the router hears later
        yield sim.env.timeout(0.5)
        assert [worker.number for worker in decode.serving] == [2]
        sim.cluster.start(decode[1])
        sim.cluster.start(decode[0])
        with pytest.raises(InputError, match="is serving"):
            sim.cluster.start(decode[0])

    sim.env.process(operator())
    result = sim.run()
    requests, steps = result.record.requests, result.record.decode_steps
    assert result.record.completed.all()
    assert result.record.retries.sum() > 0
    chosen = requests["transfer_start_s"]
    assert steps["start"][steps["worker"] == 2].min() > 4.0
    own = requests["decode_worker"] == 0
    assert not (own & (chosen > 2.1) & (chosen < 6.5)).any()
    assert (own & (chosen > 6.5)).any()
    for wrong, why in (
        (lambda: sim.cluster.pool("middle"), "prefill, decode"),
        (lambda: sim.cluster.link(decode[0], 0.0), "above 0"),
        (lambda: sim.cluster.drain(decode[0]._replace(number=9)), "topology"),
        (lambda: Simulation(CONFIG, absent=["decode"]), "decode:4"),
        (lambda: Simulation(CONFIG, absent=["decode:3"]), "topology"),
        (lambda: Simulation(STAGED, absent=["prefill:1"]), "have stages"),
    ):
        with pytest.raises(InputError, match=why):
            wrong()


def to_rest(sim):
    """Let all that is still under way end; returns the cluster."""
    cluster = sim._cluster
    while cluster.arrays.clock["n_events"][0] > 0:
        assert cluster.advance(cluster.arrays.clock["now"][0] + 1.0) != loop.ENDED
    return cluster


@pytest.mark.parametrize(
    ("changes", "worker", "pool"),
    [({}, "decode:0", "prefill"), ({}, "prefill:1", "decode"),
     ({"prefix_len": 64, "num_prefixes": 3}, "prefill:1", "decode"),
     ({"data_parallel_size": 2, "enable_expert_parallel": True}, "decode:0", "prefill")],
)  # fmt: skip
def test_a_worker_drains_and_serves_in_the_other_pool(changes, worker, pool):
    """Conservation: every request ends once, and nobody holds anything then."""
    config = CONFIG.replace(num_requests=300, topology="3P3D", **changes)
    sim = Simulation(config, absent=["prefill:2", "decode:2"])
    own, number = worker.split(":")
    leaves, told = sim.cluster.pool(own)[int(number)], []

    def operator():
        yield sim.env.timeout(2.0)
        place = yield sim.cluster.switch(leaves, pool, 1.5)
        told.append((sim.env.now, place))
        with pytest.raises(InputError, match="does not serve"):
            sim.cluster.drain(leaves)

    sim.env.process(operator())
    record = sim.run().record
    assert record.completed.all()
    assert record.retries.sum() == 0
    ((came, place),) = told
    assert str(place) == f"{pool}:2"
    assert place in sim.cluster.pool(pool).serving
    assert leaves not in sim.cluster.pool(own).serving
    size = 2 if "data_parallel_size" in changes else 1
    logs = {"prefill": record.prefill_steps, "decode": record.decode_steps}
    of = {name: steps["worker"] // size for name, steps in logs.items()}
    last = logs[own]["end"][of[own] == leaves.number].max()
    first = logs[pool]["start"][of[pool] == 2].min()
    assert came >= max(2.0, last) + 1.5
    assert first >= came
    sent = "sent_s" if own == "prefill" else "prefill_end_s"
    late = record.requests[sent] > 2.0
    assert (record.requests[f"{own}_worker"][late] // size != leaves.number).all()
    engines = to_rest(sim).arrays.engines
    free = engines.workers["n_blank"] + engines.workers["n_idle"]
    assert (free == engines.pools["n_blocks"][engines.pool_of]).all()
    assert not sim._cluster.arrays.routers[0].loads.any()


def test_a_worker_that_has_switched_is_one_that_has_always_been_there():
    """The oracle: an idle worker changes its pool before the load comes."""
    config, results = CONFIG.replace(topology="3P2D"), []
    for absent, switches in (("decode:1", True), ("prefill:2", False)):
        sim = Simulation(config, arrivals=False, absent=[absent])

        def load(sim=sim):
            yield sim.env.timeout(1.0)
            for _ in range(60):
                sim.cluster.submit()
                yield sim.env.timeout(0.02)

        if switches:
            sim.cluster.switch(sim.cluster.pool("prefill")[2], "decode", 0.5)
        sim.env.process(load())
        results.append(sim.run())
    one, other = results
    assert set(one.record.requests["decode_worker"]) == {0, 1}
    assert one.requests.drop("retries").equals(other.requests.drop("retries"))
    assert one.steps.equals(other.steps)


def test_a_worker_that_dies_on_its_way_goes_nowhere():
    sim, told = Simulation(CONFIG.replace(num_requests=200), absent=["prefill:1"]), []
    decode = sim.cluster.pool("decode")

    def operator():
        yield sim.env.timeout(1.0)
        coming = sim.cluster.switch(decode[0], "prefill", 1.0)
        with pytest.raises(InputError, match="part of a switch"):
            sim.cluster.start(decode[0])
        for wrong, why in (
            (lambda: sim.cluster.switch(decode[1], "prefill"), "no free place"),
            (lambda: sim.cluster.switch(decode[1], "decode"), "another pool"),
            (lambda: sim.cluster.switch(decode[1], "prefill", -1.0), "0 s or more"),
        ):
            with pytest.raises(InputError, match=why):
                wrong()
        yield sim.env.timeout(0.05)
        sim.cluster.fail(decode[0])
        told.append((yield coming))
        told.append(str((yield sim.cluster.switch(decode[1], "prefill"))))

    sim.env.process(operator())
    assert sim.run().record.completed.sum() > 100
    assert told == [None, "prefill:1"]
    with pytest.raises(InputError, match=r"pool: 'decode' \(allowed: prefill\)"):
        Simulation(STAGED).cluster.switch(Simulation(STAGED).cluster.pool("prefill")[0], "decode")


def test_an_error_that_simpy_cannot_copy_is_told_too():
    sim = Simulation(CONFIG)

    def hasty():
        yield sim.env.timeout(0.5)
        sim.cluster.start(sim.cluster.pool("decode")[0])

    sim.env.process(hasty())
    with pytest.raises(
        ProcessError, match=r"'hasty' failed at 0.5 s .*InputError: start: decode:0"
    ):
        sim.run()


def test_a_process_that_fails_is_named_and_ctrl_c_comes_through():
    sim = Simulation(CONFIG)

    def clumsy():
        yield sim.env.timeout(0.5)
        raise ValueError("no such thing")

    sim.env.process(clumsy())
    with pytest.raises(ProcessError) as error:
        sim.run()
    assert str(error.value) == (
        "process 'clumsy' failed at 0.5 s of simulated time: ValueError: no such thing"
    )
    sim = Simulation(CONFIG)

    def impatient():
        yield sim.env.timeout(0.5)
        signal.raise_signal(signal.SIGINT)
        yield sim.env.timeout(0.5)

    sim.env.process(impatient())
    with pytest.raises(KeyboardInterrupt):
        sim.run()
    with pytest.raises(RuntimeError, match="call run of the simulation"):
        sim.env.run()


PAGE = (ROOT / "docs" / "python.md").read_text()


CODES = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "Simulation(" in code]


@pytest.mark.parametrize("code", CODES)
def test_the_examples_of_the_page_run(code, capsys):
    assert len([line for line in code.splitlines() if line.strip()]) < 30
    exec(compile(code, "docs/python.md", "exec"), {})
    assert capsys.readouterr().out


def test_clients_of_processes_give_up_so_long_after_their_requests_are_sent(tmp_path):
    events = tmp_path / "events.yaml"
    events.write_text("- {cancel: 0.5, after_s: 0.3}\n")
    config = CONFIG.replace(num_requests=20, events=str(events))
    result, log = closed_loop(config, 30, until=6.0)
    outcomes = [ended.outcome for ended in log]
    assert outcomes.count("cancelled") > 20 < outcomes.count("completed")
    gives_up = dict.fromkeys(range(20), False)
    for ended in log:
        gives_up[ended.number % 20] |= ended.outcome == "cancelled"
        if ended.outcome == "cancelled":  # a running one ends with the step in progress
            assert 0.3 <= ended.finish_s - ended.sent_s < 0.4
    for ended in log:  # as many of the workload again: the same clients
        if ended.outcome == "completed" and ended.finish_s - ended.sent_s > 0.4:
            assert not gives_up[ended.number % 20]
    rows = result.record.requests
    assert len(log) > len(rows) - 31  # each ends once; a user has one in flight
    assert len({ended.number for ended in log}) == len(log)
