"""Statistics of a run against token times that are noted one by one as the steps run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.simulator.control.record import REQUEST, RunRecord
from eldr_sim.simulator.control.relocation import RELOCATION
from eldr_sim.simulator.outcome.bottleneck import load_growth
from eldr_sim.simulator.outcome.metrics import describe, good_requests, request_times, warnings_of
from eldr_sim.simulator.outcome.summary import run_figures
from eldr_sim.simulator.outcome.sums import weighted_percentile
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.setup.config.run_config import ServiceLevel, make_config

from ..watching import new_steps

finite = st.floats(-1e6, 1e6)


# -- percentiles -------------------------------------------------------------------------------


@given(
    pairs=st.lists(st.tuples(finite, st.integers(0, 6)), min_size=1, max_size=30),
    q=st.lists(st.floats(0, 100), min_size=1, max_size=5),
)
def test_weighted_percentile_is_that_of_the_repeated_values(pairs, q):
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    if weights.sum() == 0:
        weights[0] = 1
    expected = np.percentile(np.repeat(values, weights), q)
    np.testing.assert_allclose(
        weighted_percentile(values, weights, q), expected, rtol=1e-9, atol=1e-9
    )


@given(st.lists(st.tuples(finite, st.integers(1, 5)), min_size=1, max_size=30))
def test_describe_against_numpy(pairs):
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    repeated = 1e3 * np.repeat(values, weights)
    figures = describe("x", values, weights)
    assert list(figures) == [f"{k}_x_ms" for k in ("mean", "median", "std", "p50", "p90", "p99")]
    expected = [repeated.mean(), np.median(repeated), repeated.std()]
    expected += np.percentile(repeated, [50, 90, 99]).tolist()
    scale = 1e-9 * max(1.0, np.abs(repeated).max())
    np.testing.assert_allclose(list(figures.values()), expected, rtol=1e-9, atol=scale)


def test_describe_nothing():
    assert set(describe("x", np.zeros(0)).values()) == {None}
    assert set(describe("x", np.ones(3), np.zeros(3, np.int64)).values()) == {None}


# -- a run, token by token ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_noting_tokens(run_watched):
    """Run a cluster event by event and note who got a token when: {request: times}."""

    def run(cluster):
        tokens = {index: [] for index in range(len(cluster.requests))}
        sequences, seen = cluster.arrays.engines.sequences, [0]

        def note():
            """A step has just begun; who is in its batch leaves with its end at the earliest."""
            for worker, step in new_steps(cluster, seen):
                for request in sequences["request"][worker, : step["sequences"]].tolist():
                    tokens[request].append(float(step["end"]))

        record = run_watched(cluster, note)
        assert seen == cluster.arrays.clock["n_steps"].tolist()
        return record, tokens

    return run


def in_ms(figures, name, values):
    """Compare the six figures of a metric with NumPy's over ``values``, s."""
    values = 1e3 * np.array(values)
    expected = {
        "mean": values.mean(),
        "median": np.median(values),
        "std": values.std(),
        **{f"p{q}": np.percentile(values, q) for q in (50, 90, 99)},
    }
    for key, value in expected.items():
        assert figures[f"{key}_{name}_ms"] == pytest.approx(value, rel=1e-7, abs=1e-9), (key, name)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_blocks=st.integers(14, 80),
    max_concurrency=st.none() | st.integers(1, 6),
)
def test_summary_against_every_token(
    make_cluster, make_workload, run_noting_tokens, seed, n_blocks, max_concurrency
):
    rng = np.random.default_rng(seed)
    n = 30
    workload = make_workload(
        np.cumsum(rng.exponential(0.003, n)), rng.integers(1, 20, n), rng.integers(1, 30, n)
    )
    cluster = make_cluster(
        workload, n_prefill=2, n_decode=2, n_blocks=n_blocks, seed=seed,
        max_concurrency=max_concurrency,
    )  # fmt: skip
    record, tokens = run_noting_tokens(cluster)
    config = make_config(
        {"topology": "2P2D", "num_requests": n, "goodput": {"ttft": 60.0, "tpot": 2.0}}
        | {"price_per_gpu_hour": 3.0}
    )
    figures = run_figures(record, config, 2)
    requests = record.requests
    assert [len(tokens[i]) for i in range(n)] == requests["output_len"].tolist()

    ttft = np.array([tokens[i][0] for i in range(n)]) - requests["sent_s"]
    e2el = np.array([tokens[i][-1] for i in range(n)]) - requests["sent_s"]
    long = [i for i in range(n) if len(tokens[i]) > 1]
    tpot = {i: (tokens[i][-1] - tokens[i][0]) / (len(tokens[i]) - 1) for i in long}
    in_ms(figures, "ttft", ttft)
    in_ms(figures, "e2el", e2el)
    in_ms(figures, "tpot", list(tpot.values()))
    in_ms(figures, "itl", np.concatenate([np.diff(times) for times in tokens.values()]))

    good = sum(ttft[i] <= 0.06 and tpot.get(i, 0.0) <= 2e-3 for i in range(n))
    seconds = max(times[-1] for times in tokens.values())
    produced, prompts = requests["output_len"].sum(), requests["prompt_len"].sum()
    sent, finish = requests["sent_s"], requests["finish_s"]
    expected = {
        "num_prompts": n,
        "completed": n,
        "failed": 0,
        "duration": seconds,
        "total_input_tokens": prompts,
        "total_output_tokens": produced,
        "request_throughput": n / seconds,
        "request_goodput": good / seconds,
        "slo_attainment": good / n,
        "output_throughput": produced / seconds,
        "total_token_throughput": (produced + prompts) / seconds,
        "gpu_hours_per_million_output_tokens": 4 * seconds / 3600 / produced * 1e6,
        "cost_per_million_output_tokens": 3.0 * 4 * seconds / 3600 / produced * 1e6,
        "preemptions": requests["preemptions"].sum(),
        "max_concurrent_requests": max(((sent <= at) & (at < finish)).sum() for at in sent),
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    ends = {at for times in tokens.values() for at in times}
    assert figures["decode_steps"] >= len(ends)
    assert figures["mean_decode_batch"] == pytest.approx(produced / figures["decode_steps"])


def test_a_window_counts_its_own_steps_and_its_own_requests(
    make_cluster, make_workload, run_noting_tokens
):
    rng = np.random.default_rng(2)
    n = 200
    workload = make_workload(
        np.cumsum(rng.exponential(0.003, n)), rng.integers(1, 20, n), rng.integers(1, 30, n)
    )
    start, end = 0.15, 0.35
    cluster = make_cluster(workload, n_prefill=2, n_decode=2, window=(start, end))
    record, tokens = run_noting_tokens(cluster)
    assert record.end_s > end
    figures = run_figures(record, make_config({"topology": "2P2D"}), 2)
    requests = record.requests
    measured = np.flatnonzero((start <= requests["arrival_s"]) & (requests["arrival_s"] < end))
    assert figures["completed"] == figures["num_prompts"] == len(measured)
    in_ms(figures, "ttft", [tokens[i][0] - requests["sent_s"][i] for i in measured])
    steps = record.decode_steps
    begin_of = {
        (w, at): begin
        for w, begin, at in zip(
            steps["worker"].tolist(), steps["start"].tolist(), steps["end"].tolist(), strict=True
        )
    }
    inside = [
        (i, r)
        for r, worker in enumerate(requests["decode_worker"].tolist())
        for i, at in enumerate(tokens[r])
        if start <= begin_of[worker, at] < end
    ]
    assert figures["output_throughput"] == pytest.approx(len(inside) / (end - start))
    in_ms(figures, "itl", [np.diff(tokens[r])[i - 1] for i, r in inside if i > 0])
    finished = ((start <= requests["finish_s"]) & (requests["finish_s"] < end)).sum()
    assert figures["request_throughput"] == pytest.approx(finished / (end - start))


@pytest.mark.parametrize("colocated", [False, True])
def test_a_window_counts_the_prompt_tokens_that_are_computed_in_it(
    make_cluster, make_workload, run_to_rest, colocated
):
    """Prompts are computed whole, in the step that begins when they are admitted."""
    rng = np.random.default_rng(3)
    n, start, end = 200, 0.15, 0.35
    workload = make_workload(
        np.cumsum(rng.exponential(0.003, n)), rng.integers(2, 20, n), rng.integers(1, 30, n)
    )
    cluster = make_cluster(
        workload, n_prefill=0 if colocated else 2, n_decode=2, max_num_seqs=64,
        max_num_batched_tokens=4096, window=(start, end),
    )  # fmt: skip
    record = run_to_rest(cluster)
    figures = run_figures(record, make_config({"topology": "2C" if colocated else "2P2D"}), 2)
    requests = record.requests
    begun, ended = requests["prefill_start_s"], requests["prefill_end_s"]
    # Co-located, a prompt's last token is computed as the first that is decoded.
    tokens = requests["prompt_len"] - colocated
    computed = tokens[(start <= begun) & (begun < end)].sum()
    assert 0 < computed < 0.6 * tokens.sum()
    assert figures["computed_prompt_throughput"] == pytest.approx(computed / (end - start))
    assert figures["total_token_throughput"] == pytest.approx(
        computed / (end - start) + figures["output_throughput"]
    )
    done = requests["prompt_len"][(start <= ended) & (ended <= end)].sum()
    assert figures["prefill_throughput"] == pytest.approx(done / (end - start))


# -- by hand -----------------------------------------------------------------------------------


def a_request(sent, finish, output_len=2, outcome="completed", measured=True):
    request = np.zeros((), REQUEST)
    for name in REQUEST.names:
        if name.endswith("_s"):
            request[name] = -1.0
    request["arrival_s"] = request["sent_s"] = sent
    request["finish_s"] = finish
    request["prompt_len"], request["output_len"] = 4, output_len
    request["outcome"] = state.OUTCOMES.index(outcome)
    request["measured"] = measured
    return request


def a_record(requests, first, window=(0.0, np.inf), end_s=10.0, steps=(), gaps=()):
    """A record of one prefill worker that did nothing and one decode worker, with its steps'
    (start, end, context, worker, batch, joined, active, busiest, tokens of contexts).
    """
    requests = np.array(requests, REQUEST)
    requests["first_token_s"] = first
    log = np.zeros(len(steps), state.STEP)
    names = ["start", "end", "context", "worker", "sequences", "joined", "active", "busiest"]
    names.append("chunk_tokens")
    for row, values in zip(log, steps, strict=True):
        for name, value in zip(names, values, strict=True):
            row[name] = value
        row["chunks"] = row["chunk_tokens"] > 0
        row["tokens"] = row["outputs"] = row["sequences"]
    nothing, gaps = np.zeros(0, state.STEP), np.array(list(gaps), state.GAP)
    groups = np.zeros(0, state.GROUP_STEP)
    moved = np.zeros(0, RELOCATION)
    numbers = np.arange(len(requests))
    return RunRecord(requests, numbers, nothing, log, groups, groups, gaps, moved, window, end_s)


def test_goodput_takes_every_bound_and_no_tpot_of_single_tokens():
    record = a_record(
        [
            a_request(0.0, 3.0, 3),  # TTFT 1, TPOT 1, E2EL 3
            a_request(1.0, 6.0, 2),  # TTFT 1, TPOT 4, E2EL 5
            a_request(2.0, 4.0, 1),  # TTFT 2, no TPOT, E2EL 2
            a_request(3.0, -1.0, 5, "unserved_at_time_limit"),  # TTFT 0.5 and never done
            a_request(4.0, -1.0, 5, "exceeds_max_model_len"),
        ],
        [1.0, 2.0, 4.0, 3.5, -1.0],
    )
    times = request_times(record)
    np.testing.assert_array_equal(times["ttft"], [1, 1, 2, 0.5, np.nan])
    np.testing.assert_array_equal(times["tpot"], [1, 4, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(times["e2el"], [3, 5, 2, np.nan, np.nan])

    def good(**bounds):
        return np.flatnonzero(good_requests(times, ServiceLevel(**bounds))).tolist()

    assert good() == [0, 1, 2]
    assert good(ttft=1000.0) == [0, 1]
    assert good(tpot=1000.0) == [0, 2]
    assert good(e2el=4000.0) == [0, 2]
    assert good(ttft=1000.0, tpot=1000.0) == [0]
    assert good(ttft=999.0) == []


def test_a_client_of_the_prefills_token_waits_for_the_transfer_in_tpot():
    """Sent at 0, prompts computed at 0.5 and 1, ends at 3 and 5, three tokens each."""
    record = a_record([a_request(0.0, 3.0, 3), a_request(0.0, 5.0, 3)], [1.5, 2.0])
    record.requests["prefill_end_s"] = 0.5, 1.0
    seen = run_figures(record, make_config({"topology": "1P1D"}), 2)["streamed_by_prefill"]
    assert (seen["median_ttft_ms"], seen["median_tpot_ms"]) == (750.0, 1625.0)
    assert seen["p95_tpot_ms"] == pytest.approx(1250 + 0.95 * 750)
    assert "streamed_by_prefill" not in run_figures(record, make_config({"topology": "2C"}), 2)


def test_failures_are_counted_by_their_reason():
    record = a_record(
        [
            a_request(0.0, 3.0),
            a_request(0.0, -1.0, outcome="exceeds_max_model_len"),
            a_request(0.0, -1.0, outcome="exceeds_kv_cache"),
            a_request(0.0, -1.0, outcome="exceeds_max_model_len"),
            a_request(0.0, -1.0, outcome="run_ended_after_window", measured=False),
        ],
        [1.0, -1.0, -1.0, -1.0, -1.0],
    )
    figures = run_figures(record, make_config({"topology": "1P1D", "goodput": {"ttft": 2000.0}}), 2)
    assert figures["failed_reasons"] == {"exceeds_kv_cache": 1, "exceeds_max_model_len": 2}
    assert (figures["num_prompts"], figures["completed"], figures["failed"]) == (4, 1, 3)
    assert figures["slo_attainment"] == 0.25
    assert figures["mean_ttft_ms"] == 1000.0
    assert figures["max_concurrent_requests"] == 2  # 0 and 4: refused requests never flew
    assert figures["in_flight_at_window_start"] == 2
    assert figures["in_flight_at_window_end"] == 1


def test_prefix_caches_are_judged_by_the_requests_that_are_measured():
    requests = [a_request(0.0, 3.0), a_request(0.0, 3.0, measured=False), a_request(0.0, 3.0)]
    for request, found in zip(requests, (2, 3, -1), strict=True):  # the last was never looked up
        request["cached_tokens"] = found
    figures = run_figures(a_record(requests, [1.0] * 3), make_config({}), 2)
    assert figures["prefix_cache_queries"] == 4
    assert figures["prefix_cache_hits"] == 2


@pytest.mark.parametrize(("max_concurrency", "warned"), [(None, True), (8, False)])
def test_a_client_that_holds_back_is_no_overload(max_concurrency, warned):
    summary = {
        "lookups_outside_tables": {}, "latency_warnings": [], "failed_reasons": {},
        "max_concurrency": max_concurrency, "num_prompts": 900,
        "load_growth": {"from_s": 1.0, "to_s": 9.0, "arrived": 900, "ended": 500},
    }  # fmt: skip
    assert any("more than the cluster serves" in line for line in warnings_of(summary)) == warned


def test_growth_ends_with_the_last_arrival():
    """100 requests in 10 s, of a second each; then the window is empty."""
    arrivals = np.arange(100) / 10
    growth = load_growth(arrivals, arrivals + 1.0, (0.0, 60.0))
    assert (growth["from_s"], growth["to_s"]) == pytest.approx((1.0, 9.9))
    assert abs(growth["arrived"] - growth["ended"]) <= 1


@pytest.mark.parametrize(
    ("window", "peak"), [((0.0, np.inf), 3), ((3.0, 9.0), 2), ((5.5, 5.6), 1), ((8.0, 9.0), 0)]
)
def test_peak_concurrency_counts_what_was_in_flight_at_the_start(window, peak):
    """In flight: 0-4, 1-6, 2-2.5 and 4-5 (which begins as the first ends)."""
    spans = [(0.0, 4.0), (1.0, 6.0), (2.0, 2.5), (4.0, 5.0)]
    record = a_record([a_request(*span) for span in spans], [3.0] * 4, window)
    figures = run_figures(record, make_config({"topology": "1P1D"}), 2)
    assert figures["max_concurrent_requests"] == peak


def test_the_request_that_ends_the_run_counts_in_its_throughput():
    record = a_record([a_request(0.0, 5.0), a_request(0.0, 10.0)], [1.0, 1.0])
    assert run_figures(record, make_config({}), 2)["request_throughput"] == pytest.approx(0.2)


def test_relocations_count_in_the_window_that_they_begin_in():
    moved = np.zeros(4, RELOCATION)
    moved["asked_s"] = 1.0, 2.0, 5.0, 8.0
    moved["inside_bytes"], moved["between_bytes"] = (1, 10, 100, 1000), (2, 20, 200, 2000)
    moved["stall_s"] = 0.1, 0.2, 0.4, 0.8
    record = replace(a_record([a_request(0.0, 9.0)], [1.0], (2.0, 8.0)), relocations=moved)
    figures = run_figures(record, make_config({}), 2)
    assert (figures["relocations"], figures["relocated_bytes"]) == (2, 330)
    assert figures["relocation_stall_s"] == pytest.approx(0.6)


def test_a_run_of_nothing_has_no_figures():
    figures = run_figures(a_record([], []), make_config({"goodput": {"tpot": 30}}), 2)
    for key, value in figures.items():
        if key.endswith("_ms") or "per_million" in key or "experts" in key:
            assert value is None, key
    assert figures["num_prompts"] == figures["completed"] == figures["failed"] == 0
    assert figures["output_throughput"] == 0.0
    assert figures["slo_attainment"] == 0.0


def test_a_run_of_single_tokens_has_no_gaps():
    steps = [(1.0, 2.0, 5, 0, 2, 2, 7, 3, 0)]
    record = a_record([a_request(0.0, 2.0, 1)] * 2, [2.0, 2.0], steps=steps)
    figures = run_figures(record, make_config({}), 2)
    assert figures["mean_itl_ms"] is None
    assert figures["mean_tpot_ms"] is None
    assert figures["mean_ttft_ms"] == 2000.0
    assert figures["mean_active_experts_per_step"] == 3.5
    assert figures["mean_busiest_rank_experts_per_step"] == 1.5


def test_activated_experts_by_token_count_a_step_as_often_as_its_batch():
    # start, end, context, joined, batch, tokens, active, busiest, recomputed; 2 MoE layers
    steps = [(1.0, 2.0, 5, 0, 1, 1, 4, 3, 0), (2.0, 3.0, 5, 0, 3, 3, 12, 3, 0)]
    record = a_record([a_request(0.0, 3.0)], [2.0], steps=steps)
    figures = run_figures(record, make_config({}), 2)
    assert figures["mean_active_experts_per_step"] == (2 + 6) / 2
    assert figures["mean_active_experts_per_token"] == (1 * 2 + 3 * 6) / 4


def test_recomputation_alone_is_no_decode_step():
    steps = [
        (1.0, 2.0, 5, 0, 1, 1, 6, 5, 0),
        (2.0, 5.0, 0, 0, 0, 0, 0, 0, 9),
        (5.0, 6.0, 6, 0, 1, 1, 4, 2, 0),
    ]
    gaps = [(2.0, 6.0), (-9.0, -1.0)]
    record = a_record([a_request(0.0, 6.0)], [2.0], steps=steps, gaps=gaps)
    figures = run_figures(record, make_config({}), 2)
    assert figures["decode_steps"] == 2
    assert figures["mean_decode_batch"] == 1.0
    assert figures["mean_active_experts_per_step"] == 2.5
    assert figures["mean_busiest_rank_experts_per_step"] == 1.75
    assert figures["mean_itl_ms"] == 4000.0
