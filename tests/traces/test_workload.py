"""Workloads: arrivals, choice of trace requests and replay windows against their definitions."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload

from ..on_each import on_each
from ..workloads import make_workload

ARRAYS = [
    f.name
    for f in dataclasses.fields(Workload)
    if f.name not in ("description", "prefix_block_tokens", "n_warming")
]


@pytest.fixture(scope="module")
def trace():
    return open_trace()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two domains, recorded decodes of different lengths, calibration requests between."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 9, 24)
    output = rng.integers(1, 9, 24)
    experts = np.argsort(rng.random((int((prompt + output).sum()), 1, 8)), axis=-1)[..., :2]
    return write_trace(
        tmp_path_factory.mktemp("traces") / "tiny",
        experts=experts,
        request_id=[str(i) for i in range(24)],
        domain=[("x", "y")[i % 2] for i in range(24)],
        prompt_len=prompt,
        output_len=output,
        is_calibration=[i % 3 == 0 for i in range(24)],
        model="m",
        n_experts=8,
        domains=["x", "y"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )


@pytest.fixture
def log(tmp_path):
    """Write ten requests, 2 s apart at first and 1 s later."""
    when = [0, 2, 4, 6, 7, 8, 9, 10, 11, 12]
    lines = [
        {
            "timestamp": 1000 * t,
            "input_length": 600 + i,
            "output_length": 3 + i,
            "hash_ids": [0, i + 1],
            "session_id": f"s{i % 4}",
        }
        for i, t in enumerate(when)
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def assert_same(a, b, names=ARRAYS, first=None):
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        if x is None:
            assert y is None
            continue
        if first is not None:
            x, y = x[:first], y[:first]
        np.testing.assert_array_equal(x, y, err_msg=name)


# --- determinism and independent streams ------------------------------------------------------


def test_same_arguments_same_bits(trace):
    make = lambda seed: make_workload(trace, request_rate=50, num_requests=300, seed=seed)  # noqa: E731
    assert_same(make(3), make(3))
    assert make(3).description == make(3).description
    assert (make(3).arrival_s != make(4).arrival_s).all()
    assert (make(3).text != make(4).text).any()


def test_frozen_values(trace):
    """The first requests of seed 0, frozen: a change of any stream changes published runs."""
    w = make_workload(trace, request_rate=10, num_requests=3, output_len=300, seed=0)
    assert w.arrival_s.tolist() == [0.197640312, 0.286759037, 0.319775342]
    assert w.text.tolist() == [2100, 1420, 1858]
    assert w.replay_offset.tolist() == [176, 92, 26]


def test_longer_runs_start_with_the_shorter_ones_requests(trace):
    short = make_workload(trace, request_rate=80, horizon_s=3, output_len=500, seed=1)
    long = make_workload(trace, request_rate=80, horizon_s=20, output_len=500, seed=1)
    by_number = make_workload(trace, request_rate=80, num_requests=999, output_len=500, seed=1)
    assert len(short) < len(long)
    names = [n for n in ARRAYS if not n.startswith(("prefix", "priority"))]
    assert_same(short, long, names, first=len(short))
    assert_same(by_number, long, names, first=999)
    assert short.arrival_s[-1] < 3 <= long.arrival_s[len(short)]


def test_one_decision_does_not_shift_another(trace):
    base = make_workload(trace, request_rate=80, num_requests=400, output_len=500, seed=1)
    faster = make_workload(trace, request_rate=160, num_requests=400, output_len=500, seed=1)
    other = make_workload(
        trace,
        request_rate=80,
        num_requests=400,
        output_len=100,
        seed=1,
        burstiness=0.3,
        trace_replay="same_domain",
    )
    assert_same(base, faster, ["text", "replay_offset"])
    np.testing.assert_allclose(base.arrival_s, 2 * faster.arrival_s, atol=1e-6)
    assert_same(base, other, ["text", "domain", "prompt_len"])


def test_streams():
    a = stream(1, "arrivals").random(5)
    np.testing.assert_array_equal(a, stream(np.int64(1), "arrivals").random(5))
    assert (a != stream(1, "lengths").random(5)).all()
    assert (a != stream(2, "arrivals").random(5)).all()
    for seed in (-1, 1.0, True, "1", None):
        with pytest.raises(InputError, match="seed: got"):
            stream(seed, "arrivals")


# --- arrivals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_follow_the_gamma_distribution(trace, burstiness):
    w = make_workload(trace, request_rate=40, num_requests=4000, burstiness=burstiness, seed=5)
    gaps = np.diff(w.arrival_s, prepend=0)
    law = stats.gamma(burstiness, scale=1 / (40 * burstiness))
    assert stats.kstest(gaps, law.cdf).pvalue > 0.01
    wrong = stats.gamma(burstiness * 1.3, scale=1 / (40 * burstiness * 1.3))
    assert stats.kstest(gaps, wrong.cdf).pvalue < 0.01  # the test can tell
    nanoseconds = w.arrival_s * 1e9
    np.testing.assert_allclose(nanoseconds, np.rint(nanoseconds), atol=1e-4)


def test_infinite_rate(trace):
    w = make_workload(trace, request_rate=math.inf, num_requests=7)
    assert w.arrival_s.tolist() == [0.0] * 7
    assert w.description["request_rate"] == "inf"


# --- requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["task", "language"])
def test_default_mix_and_splits(trace, workload):
    w = make_workload(trace, workload=workload, request_rate=100, num_requests=8000, seed=2)
    weights = DOMAIN_MIXES[workload]
    names = [d for d in trace.domains if d in weights]
    share = np.array([weights[d] for d in names]) / sum(weights.values())
    counts = np.array([(w.domain == trace.domains.index(d)).sum() for d in names])
    assert counts.sum() == 8000
    assert stats.chisquare(counts, 8000 * share).pvalue > 0.01
    assert not trace.is_calibration[w.text].any()
    np.testing.assert_array_equal(w.domain, trace.domain[w.text])
    np.testing.assert_array_equal(w.prompt_len, trace.prompt_len[w.text])
    np.testing.assert_array_equal(w.output_len, trace.output_len[w.text])
    assert w.prefix_hash.size == 0
    assert w.prefix_indptr.tolist() == [0] * 8001


def test_published_shares():
    assert sum(DOMAIN_MIXES["task"].values()) == 11_668  # ELDR Sec. 6
    language = DOMAIN_MIXES["language"]
    assert sum(language.values()) == pytest.approx(87.6)  # ELDR Sec. 6
    assert language["en"] + language["zh"] == pytest.approx(75)  # ELDR Fig. 5
    assert language["en"] / language["zh"] == pytest.approx(53 / 13, rel=0.01)


def test_decks_use_every_request_before_any_twice(trace):
    w = make_workload(trace, request_rate=100, num_requests=2000, seed=2)
    for d in range(4):
        mine = w.text[w.domain == d]
        pool = len(trace.requests_of([trace.domains[d]], calibration=False))
        for start in range(0, len(mine) - pool + 1, pool):
            assert len(set(mine[start : start + pool].tolist())) == pool
    uses = np.bincount(w.text)
    assert w.description["trace_request_uses_max"] == uses.max()
    assert w.description["trace_request_uses_mean"] == pytest.approx(2000 / 626, abs=1e-3)
    assert w.description["trace_requests_replayed"] == (uses > 0).sum() == 626


def test_given_mix(trace):
    w = make_workload(
        trace, request_rate=9, num_requests=400, domain_mix={"math": 3, "code": 1, "legal": 0}
    )
    assert set(w.domain.tolist()) == {0, 1}
    assert w.description["domain_mix"] == {"code": 0.25, "math": 0.75}
    realised = w.description["domain_mix_realised"]
    assert realised["math"] == (w.domain == 1).mean()


def test_named_workload_takes_any_domains_of_the_trace(tiny):
    mixed = make_workload(tiny, request_rate=9, num_requests=40, domain_mix={"x": 1, "y": 3})
    assert mixed.description["domain_mix"] == {"x": 0.25, "y": 0.75}
    with pytest.raises(
        InputError, match=r"task needs domain 'code'.*trace, or a domain mix of x, y"
    ):
        make_workload(tiny, request_rate=9, num_requests=40)


def test_workload_trace_has_the_serving_shares(tiny):
    w = make_workload(tiny, workload="trace", request_rate=9, num_requests=2000)
    serving = tiny.domain[~tiny.is_calibration]
    for d, name in enumerate(tiny.domains):
        share = float((serving == d).mean())
        assert w.description["domain_mix"].get(name, 0) == pytest.approx(share, abs=1e-6)
    assert w.output_len.tolist() == tiny.output_len[w.text].tolist()
    with pytest.raises(InputError, match="request_rate: missing"):
        make_workload(tiny, workload="trace", num_requests=5)


def test_same_domain_replay(trace):
    w = make_workload(trace, request_rate=9, num_requests=600, trace_replay="same_domain")
    assert (w.decode_request != w.text).all()
    np.testing.assert_array_equal(trace.domain[w.decode_request], w.domain)
    assert not trace.is_calibration[w.decode_request].any()
    own = make_workload(trace, request_rate=9, num_requests=600)
    np.testing.assert_array_equal(own.decode_request, own.text)


# --- replay windows ---------------------------------------------------------------------------


@given(
    output_len=st.integers(1, 14),
    seed=st.integers(0, 10**6),
    replay=st.sampled_from(["own", "same_domain"]),
)
@settings(max_examples=40, deadline=None)
def test_offsets(tiny, log_path, output_len, seed, replay):
    w = make_workload(
        tiny,
        workload=log_path,
        num_requests=10,
        output_len=output_len,
        seed=seed,
        trace_replay=replay,
    )
    window = tiny.output_len[w.decode_request] + 1
    beyond = output_len > window
    assert (w.replay_offset[~beyond] == 0).all()
    assert (w.replay_offset[beyond] < window[beyond]).all()
    assert (w.replay_offset >= 0).all()
    extra = sum(max(0, output_len - int(length)) for length in window)
    assert w.description["output_tokens_beyond_recorded"] == extra
    assert w.description["output_tokens"] == 10 * output_len


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    file = tmp_path_factory.mktemp("logs") / "log.csv"
    rows = [f"{t},10,5" for t in range(10)]
    file.write_text("Timestamp,Request tokens,Response tokens\n" + "\n".join(rows))
    return file


def test_offsets_are_spread_over_the_window(trace):
    w = make_workload(trace, request_rate=9, num_requests=4000, output_len=512)
    counts = np.bincount(w.replay_offset, minlength=193)
    assert len(counts) == 193
    assert stats.chisquare(counts).pvalue > 0.01


def test_recorded_window_is_replayed_from_its_start(trace):
    for length in (192, 193):
        assert not make_workload(
            trace, request_rate=9, num_requests=50, output_len=length
        ).replay_offset.any()
    assert make_workload(trace, request_rate=9, num_requests=50, output_len=194).replay_offset.any()


# --- request logs -----------------------------------------------------------------------------


def test_log_as_recorded(tiny, log):
    w = make_workload(tiny, workload=log, seed=4)
    assert w.arrival_s.tolist() == [0, 2, 4, 6, 7, 8, 9, 10, 11, 12]
    assert w.prompt_len.tolist() == list(range(600, 610))
    assert w.output_len.tolist() == list(range(3, 13))
    assert w.session.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    # A request that another one goes on with has that one's blocks as far as its context reaches.
    assert [w.blocks(i).tolist() for i in range(10)] == [
        [0, i + 5 if i < 6 else i + 1] for i in range(10)
    ]
    assert w.prefix_block_tokens == 512
    assert not tiny.is_calibration[w.text].any()
    assert w.description["arrivals"] == "recorded (mooncake)"
    json.dumps(w.description, allow_nan=False)


def test_log_cut(tiny, log):
    w = make_workload(tiny, workload=str(log), horizon_s=6)
    assert w.arrival_s.tolist() == [0, 2, 4]
    assert w.prefix_hash.tolist() == [0, 1, 0, 2, 0, 3]
    assert w.prefix_indptr.tolist() == [0, 2, 4, 6]
    assert len(make_workload(tiny, workload=log, num_requests=7)) == 7


def test_log_at_another_rate(tiny, log):
    w = make_workload(tiny, workload=log, request_rate=3.0)
    gaps = np.diff(w.arrival_s)
    assert gaps.mean() == pytest.approx(1 / 3)
    np.testing.assert_allclose(gaps / gaps[-1], [2, 2, 2, 1, 1, 1, 1, 1, 1], rtol=1e-6)
    first = make_workload(tiny, workload=log, request_rate=3.0, num_requests=4)
    assert np.diff(first.arrival_s).mean() == pytest.approx(1 / 3)
    assert make_workload(tiny, workload=log, request_rate=math.inf).arrival_s.tolist() == [0.0] * 10


def test_log_with_fixed_output_and_mix(tiny, log):
    w = make_workload(tiny, workload=log, output_len=17, domain_mix={"y": 1})
    assert w.output_len.tolist() == [17] * 10
    assert set(w.domain.tolist()) == {1}


# --- bad arguments ----------------------------------------------------------------------------


@on_each(
    "changes, message",
    [
        ({"request_rate": 0}, "request_rate: got 0"),
        ({"request_rate": -1}, "request_rate: got -1"),
        ({"request_rate": math.nan}, "request_rate: got nan"),
        ({"request_rate": None}, "request_rate: missing"),
        ({"request_rate": 1e-300}, "request_rate: got 1e-300"),
        ({"burstiness": 1e308}, r"burstiness: got 1e\+308"),
        ({"request_rate": 1e12}, r"request_rate: got 1e\+12: gaps would be below a nanosecond"),
        ({"burstiness": 0}, "burstiness: got 0"),
        ({"burstiness": math.nan}, "burstiness: got nan"),
        ({"burstiness": math.inf}, "burstiness: got inf"),
        ({"num_requests": 0}, "num_requests: got 0"),
        ({"num_requests": None}, "horizon_s: missing"),
        ({"horizon_s": 5}, "horizon_s: given together"),
        ({"num_requests": None, "horizon_s": 0}, "horizon_s: got 0"),
        ({"num_requests": None, "horizon_s": math.nan}, "horizon_s: got nan"),
        ({"num_requests": None, "horizon_s": math.inf}, "horizon_s: got inf"),
        (
            {"num_requests": None, "horizon_s": 1e12},
            "horizon_s: 1,000,000,000,000 s in all at 10 req",
        ),
        ({"num_requests": None, "horizon_s": 5, "request_rate": math.inf}, "does not bound"),
        ({"num_requests": None, "horizon_s": 1e-9}, "horizon_s: no request arrives"),
        ({"output_len": 0}, "output_len: got 0"),
        ({"output_len": 2.5}, "output_len: got 2.5"),
        ({"output_len": True}, "output_len: got True"),
        ({"output_len": "long"}, "output_len: got 'long'"),
        ({"seed": -1}, "seed: got -1"),
        ({"trace_replay": "other"}, "trace_replay: got 'other'"),
        ({"workload": "no/such/file"}, "neither a named workload nor a file"),
        ({"domain_mix": {"poetry": 1}}, "'poetry' is not a domain of trace"),
        ({"domain_mix": {"code": -1}}, "weight of code is -1"),
        ({"domain_mix": {"code": math.nan}}, "weight of code is nan"),
        ({"domain_mix": {"code": 0}}, "all weights are 0"),
        ({"domain_mix": {}}, "all weights are 0"),
        ({"domain_mix": {"code": 1e308, "math": 1e308}}, "the weights sum to more than a float"),
    ],
)
def test_bad_argument_is_told_in_one_line(trace, changes, message):
    arguments = {"workload": "task", "request_rate": 10, "num_requests": 5} | changes
    with pytest.raises(InputError, match=message) as caught:
        make_workload(trace, **arguments)
    assert "\n" not in str(caught.value)


def test_bad_log_arguments(tiny, log):
    with pytest.raises(InputError, match=r"num_requests: got 11 .*1\.\.10"):
        make_workload(tiny, workload=log, num_requests=11)
    with pytest.raises(InputError, match=r"burstiness: got 0\.5"):
        make_workload(tiny, workload=log, burstiness=0.5)
    log.write_text('{"timestamp": 5, "input_length": 1, "output_length": 1}\n' * 2)
    with pytest.raises(InputError, match="arrive at once"):
        make_workload(tiny, workload=log, request_rate=1)


def test_trace_without_the_domains(tiny):
    with pytest.raises(InputError, match="task needs domain 'code', which trace tiny lacks"):
        make_workload(tiny, request_rate=1, num_requests=1)


# -- a domain mix that drifts --------------------------------------------------------------------


def test_a_mix_that_stays_is_no_drift(tiny):
    common = {"workload": "trace", "request_rate": 50, "num_requests": 300, "seed": 3}
    still = make_workload(tiny, domain_mix={"x": 1, "y": 3}, **common)
    moved = make_workload(
        tiny, domain_mix={"x": 1, "y": 3}, domain_mix_end={"x": 1, "y": 3}, **common
    )
    for name in ("domain", "text", "arrival_s"):
        np.testing.assert_array_equal(getattr(still, name), getattr(moved, name))


@pytest.mark.parametrize("drift_s", [None, 40.0])
def test_the_shares_move_evenly(tiny, drift_s):
    """From all x to all y: the chance of y grows from 0 to 1, in 40 s or over all requests."""
    made = make_workload(
        tiny, workload="trace", request_rate=100, num_requests=8000, seed=1,
        domain_mix={"x": 1}, domain_mix_end={"y": 1}, drift_s=drift_s,
    )  # fmt: skip
    y = made.domain == tiny.domains.index("y")
    chance = np.arange(8000) / 7999 if drift_s is None else np.minimum(made.arrival_s / 40, 1)
    for part in np.array_split(np.arange(8000), 8):
        assert y[part].mean() == pytest.approx(chance[part].mean(), abs=0.06)
    assert made.description["domain_mix_end"] == {"y": 1.0}
    if drift_s is not None:
        assert y[made.arrival_s > 40].all()


def test_bad_ends_of_a_drift_are_named(tiny):
    with pytest.raises(InputError, match="domain_mix_end: 'z' is not a domain"):
        make_workload(
            tiny, workload="trace", request_rate=1, num_requests=3, domain_mix_end={"z": 1}
        )
