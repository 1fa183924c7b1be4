"""Where requests wait, what is full, and when a load is more than the cluster serves."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.reports.explanation import explain_run, open_run
from eldr_sim.simulator.outcome.bottleneck import (
    PHASES,
    is_overload,
    limits_of,
    load_growth,
    phases_of,
)
from eldr_sim.simulator.plane.state import COMPLETED, OPEN
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import simulate, simulate_summary
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config
from eldr_sim.simulator.setup.memory import WindowBlocks
from eldr_sim.simulator.simulation import Simulation

NAMES = [name for name, _ in PHASES.values()]


@given(
    st.lists(st.floats(0.0, 9.0), min_size=10, max_size=10),
    st.lists(st.booleans(), min_size=10, max_size=10),
    st.floats(0.0, 5.0),
)
def test_phases_are_the_gaps_between_known_times(gaps, known, longer):
    """A twin by hand of one request, which ended or is somewhere on its way."""
    stamps = np.cumsum(gaps)
    until = float(stamps[-1]) + longer
    times = {
        key: np.array([at if seen else np.nan])
        for key, at, seen in zip(PHASES, stamps, known, strict=True)
    }
    times["arrival_s"] = np.zeros(1)
    expected, here, place = dict.fromkeys(NAMES, 0.0), 0.0, 0
    for i, (at, seen) in enumerate(zip(stamps, known, strict=True)):
        if seen:
            expected[NAMES[i]], here, place = at - here, at, i + 1
    if not known[-1]:
        expected[NAMES[min(place, len(NAMES) - 1)]] += until - here
    spent = phases_of(times, until)
    assert {name: float(values[0]) for name, values in spent.items()} == pytest.approx(expected)
    total = sum(float(values[0]) for values in spent.values())
    assert total == pytest.approx(stamps[-1] if known[-1] else until)


def test_a_place_that_a_run_has_not_takes_no_time():
    times = {"arrival_s": np.array([1.0]), "finish_s": np.array([4.0])}
    spent = phases_of(times, 9.0)
    assert spent.pop("decode") == [3.0]
    assert all((values == 0.0).all() for values in spent.values())


@pytest.mark.parametrize("topology", ["1P1D", "1C", "2P"])
def test_what_is_open_at_the_end_waits_where_it_is(topology, tmp_path):
    """By hand, from when each request came how far; there is no front end, and no tier."""
    load = {"request_rate": 150.0, "duration": "3", "warmup": "0", "frontend": "none"}
    sim = Simulation(RunConfig(topology=topology, **load))
    result = sim.run(until=1.0)
    write_result(result, tmp_path / "run")
    rows = result.requests.to_pylist()
    spent = dict.fromkeys(("prefill queue", "prefill"), 0.0)
    for row in rows:
        begun, first = row["prefill_start_s"], row["first_token_s"]
        computed = first if topology == "1C" else row["prefill_end_s"]
        spent["prefill queue"] += (1.0 if begun is None else begun) - row["sent_s"]
        if begun is not None:
            spent["prefill"] += (1.0 if computed is None else computed) - begun
    found = result.summary["limits"]["mean_phase_ms"]
    assert sum(row["prefill_start_s"] is None for row in rows) >= 1
    assert "front end" not in found
    for name, seconds in spent.items():
        assert found[name] == pytest.approx(1e3 * seconds / len(rows), rel=1e-9), name
    if topology == "1C":
        assert set(found) == {*spent, "decode"}
    said = {row[0] for row in explain_run(open_run(str(tmp_path / "run"))).rows}
    assert said == {*found, "all"}


def test_waits_for_kv_tiers_are_loads():
    config = make_config({
        "topology": "1C", "workload": "chat", "sessions": 12, "turns": "4", "think_time": "1",
        "frontend": "none",
        "new_tokens": "800", "num_gpu_blocks_override": 400, "max_num_seqs": 8,
        "kv_tier": ("host:50GB,load=0.2GB/s,store=20GB/s",),
    })  # fmt: skip
    result = simulate(config)
    waited = result.record.tiers.loads["waited_s"]
    rows = result.requests.to_pylist()
    loads = [row["prefill_start_s"] - row["load_start_s"] for row in rows]
    assert (
        0.0
        < sum(loads)
        == pytest.approx(
            sum(w for w, row in zip(waited, rows, strict=True) if row["preemptions"] == 0), rel=0.2
        )
    )
    limits = result.summary["limits"]
    assert limits["mean_phase_ms"]["KV load"] == pytest.approx(1e3 * sum(loads) / len(rows))
    queued = sum(row["load_start_s"] - row["sent_s"] for row in rows)
    assert limits["mean_phase_ms"]["prefill queue"] == pytest.approx(1e3 * queued / len(rows))


def test_a_cluster_that_fills_is_not_overloaded():
    """Requests come every second and live for 30: as many end as come once 30 s have passed."""
    arrival = np.arange(100.0)
    growth = load_growth(arrival, arrival + 30.0, (0.0, 100.0))
    assert growth == {"from_s": 30.0, "to_s": 99.0, "arrived": 69, "ended": 69}
    assert not is_overload(growth)
    assert load_growth(arrival, arrival + 200.0, (0.0, 100.0)) is None
    assert not is_overload(load_growth(arrival, np.full(100, np.nan), (0.0, 100.0)))


def test_a_queue_that_grows_is():
    """Of two that come a second one ends, as at a server of half the rate."""
    arrival = np.arange(0.0, 500.0, 0.5)
    finish = 1.0 + np.arange(1000.0)
    growth = load_growth(arrival, np.where(finish < 500.0, finish, np.nan), (0.0, 500.0))
    assert growth["arrived"] == pytest.approx(2 * growth["ended"], abs=4)
    assert is_overload(growth)


def test_one_that_was_refused_waits_for_nothing(tmp_path):
    """One of 250 requests is too long for the model: once it waited in the front end for ever."""
    lines = [{"timestamp": 20 * i, "input_length": 200, "output_length": 10} for i in range(250)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig(
        trace="reference-moe", topology="2P4D", workload=log, duration=8, warmup=0, frontend="none"
    )
    before = simulate(config)
    lines[3]["input_length"] = 50_000
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = simulate(config)
    assert after.summary["failed_reasons"] == {"exceeds_max_model_len": 1}
    assert after.summary["limits"]["bottleneck"] == before.summary["limits"]["bottleneck"]
    assert "front end" not in after.summary["limits"]["mean_phase_ms"]
    write_result(after, tmp_path / "result")
    explained = explain_run(open_run(tmp_path / "result"))
    phases = {row[0]: row[1] for row in explained.rows}
    assert "front end" not in phases
    assert phases["all"] == pytest.approx(after.summary["mean_e2el_ms"])
    assert any("1 more" in line for line in explained.lines)


BASE = {"trace": "reference-moe", "num_requests": 150, "policy": "jsq", "output_len": 20}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("no queue", {"topology": "2P4D", "request_rate": 5}),
        (
            "token budget",
            {
                "topology": "1P8D",
                "request_rate": 400,
                "prefill": {"max_num_batched_tokens": 128, "max_num_seqs": 8},
            },
        ),
        ("prompt computation", {"topology": "1P8D", "request_rate": 400, "input_len": 4000}),
        ("decode batch", {"topology": "4P1D", "request_rate": 300, "max_num_seqs": 4}),
        ("decode KV", {"topology": "4P1D", "request_rate": 300, "num_gpu_blocks_override": 60}),
        ("client", {"topology": "2P4D", "request_rate": 100, "max_concurrency": 2}),
    ],
)
def test_the_bottleneck_is_what_was_made_scarce(name, changes):
    limits = simulate_summary(RunConfig(**BASE | changes))["limits"]
    assert limits["bottleneck"] == name, limits
    assert (limits["waits_in"] is None) == (name == "no queue")
    assert all(0.0 <= share <= 1.0 for share in limits["utilisation"].values())
    if name == "decode KV":
        assert limits["utilisation"]["decode_kv"] > 0.7  # the last block of each is half empty
    if name == "decode batch":
        assert limits["utilisation"]["decode_seats"] > 0.8


def test_blocks_that_slow_transfers_hold_are_the_links_limit():
    """More KV blocks made the TTFT longer, and were named all the same."""
    fields = BASE | {
        "topology": "4P1D", "num_requests": 60, "request_rate": 200, "input_len": 8000,
        "output_len": 2, "warmup": 0,
    }  # fmt: skip
    slow = simulate_summary(RunConfig(**fields))
    more = simulate_summary(RunConfig(**fields | {"num_gpu_blocks_override": 20_000}))
    fast = simulate_summary(RunConfig(**fields | {"kv_transfer": "ideal"}))
    assert slow["limits"]["bottleneck"] == "link", slow["limits"]
    assert fast["mean_ttft_ms"] < 0.8 * slow["mean_ttft_ms"] <= more["mean_ttft_ms"]


def test_enough_is_not_called_too_little():
    """No warm-up, and requests that live as long as the window: a false warning of old."""
    summary = simulate_summary(
        RunConfig(**BASE | {"topology": "2P8D", "request_rate": 30, "output_len": 256})
    )
    assert not is_overload(summary["load_growth"])


def test_the_first_to_live_long_say_when_a_cluster_is_full():
    """Eight of ten live for 10 s, two for 40: the 90th percentile is the latter."""
    arrival = np.arange(100.0)
    finish = arrival + np.where(np.arange(100) % 5 == 4, 40.0, 10.0)
    assert load_growth(arrival, finish, (0.0, 100.0))["from_s"] == 40.0


def test_utilisation_by_hand():
    """A window from 10 to 20 s of a run of 30: what lies outside does not count."""
    times = ("arrival_s", "transfer_start_s", "transfer_end_s", "finish_s")
    request = [("measured", bool), ("outcome", int), ("output_len", int), ("prompt_len", int)]
    request += [(name, float) for name in times]
    step = [("start", float), ("end", float), ("sequences", int), ("context", int)]
    step += [(name, int) for name in ("worker", "waiting", "stopped", "chunks")]
    record = SimpleNamespace(
        # One transfer began before the window, one has not ended, one has not begun.
        requests=np.array([(True, COMPLETED, 90, 9, 0.0, 5.0, 15.0, 16.0),
                           (True, OPEN, 90, 9, 0.0, 18.0, -1.0, -1.0),
                           (True, OPEN, 90, 9, 0.0, -1.0, -1.0, -1.0)], request),
        window=(10.0, 20.0), end_s=30.0, states=None, load_start_s=np.full(3, -1.0),
        prefill_steps=np.array([], step),
        decode_steps=np.array([(8.0, 12.0, 2, 100, 0, 0, 0, 0)], step),
    )  # fmt: skip
    shard = SimpleNamespace(n_kv_tensors=1, kv_bytes_per_token=1)
    engine = SimpleNamespace(
        max_num_seqs=4,
        n_blocks=50,
        worker_size=1,
        step_time=SimpleNamespace(model=None),
        parallelism=SimpleNamespace(shard=lambda _model: shard),
    )
    pools = [SimpleNamespace(n=1, decodes=decodes, engine=engine) for decodes in (False, True)]
    spec = SimpleNamespace(
        pools=pools,
        n_decode=1,
        of_decoders=lambda of: np.array([of(engine)]),
        windows=WindowBlocks(1.0, 3),
        block_size=16,
        transfer=SimpleNamespace(bandwidth=1e9, ingress=1e9, setup_s=0.0, descriptor_s=0.0),
        front_end=None,
        handover_s=0.0,
        reserves_early=False,
    )
    limits = limits_of(record, spec)
    assert limits["utilisation"] == pytest.approx(
        {"prefill_busy": 0.0, "decode_busy": 0.2, "decode_seats": 0.2 * 2 / 4,
         "decode_kv": 0.2 * (100 + 2 * 3 * 16) / (50 * 16)}
    )  # fmt: skip
    assert limits["kv_transfers_per_worker"] == pytest.approx((5 + 2) / 10)
    record.decode_steps["context"] = 9000  # of requests that share blocks: no more than there are
    assert limits_of(record, spec)["utilisation"]["decode_kv"] == pytest.approx(0.2)
