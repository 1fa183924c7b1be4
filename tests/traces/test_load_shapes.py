"""Loads that change with time: counts, common random numbers, and inversion against thinning."""

import numpy as np
import pytest
from scipy.stats import ks_2samp, poisson

import eldr_sim as es
from eldr_sim.errors import InputError
from eldr_sim.traces.requests.load_shapes import load_shape


def drawn(text, *, rate=None, horizon=None, n=None, seed=0, burstiness=1.0):
    shape = load_shape(text)
    horizon = shape.span_s if horizon is None and n is None else horizon
    return shape.draw(shape.mean if rate is None else rate, burstiness, horizon, n, seed)


def test_counts_in_each_window_are_those_of_a_poisson_process():
    shape = load_shape("sine:1,24,period=900")
    assert shape.mean == pytest.approx(12.5)
    edges = np.arange(0.0, 2701.0, 20.0)
    counts = np.histogram(drawn("sine:1,24,period=900", horizon=2700.0), edges)[0]
    turn = 2 * np.pi * edges / 900
    mean = np.diff(12.5 * edges - 11.5 * 900 / (2 * np.pi) * np.sin(turn))
    assert np.diff(shape.expected(edges)) == pytest.approx(mean, rel=2e-3, abs=0.1)
    p = np.minimum(poisson.cdf(counts, mean), poisson.sf(counts - 1, mean))
    assert p.min() > 1e-5  # of 135 windows
    chi = ((counts - mean) ** 2 / mean).sum()
    assert 135 - 4 * np.sqrt(270) < chi < 135 + 4 * np.sqrt(270)


def test_inversion_is_thinning_in_distribution():
    rng, inverted, thinned = np.random.default_rng(1), [], []
    for seed in range(40):
        inverted.append(drawn("ladder:8,1,16@50", seed=seed))
        at = np.sort(rng.uniform(0, 150, rng.poisson(16 * 150)))
        rate = np.array([8, 1, 16])[(at // 50).astype(int)]
        thinned.append(at[rng.random(len(at)) < rate / 16])
    for some in (lambda a: a, np.diff):
        one, other = (np.concatenate([some(a) for a in runs]) for runs in (inverted, thinned))
        assert ks_2samp(one, other).pvalue > 1e-3


def test_rates_under_one_seed_have_the_same_requests():
    even, day = drawn("ladder:5@100", n=300), drawn("ladder:1,9@50", n=300)
    shape = load_shape("ladder:1,9@50")
    assert shape.expected(day) == pytest.approx(5 * even, abs=1e-6)
    assert drawn("ladder:1,9@50", rate=10, n=300) == pytest.approx(
        shape.when(2.5 * even), abs=1e-6
    )  # its mean of 5 doubled


def test_nobody_comes_while_the_rate_is_0_and_a_shape_begins_again():
    at = drawn("ladder:0,4,0@10", horizon=90.0)
    assert ((at % 30 >= 10) & (at % 30 <= 20)).all()
    assert len({*(at // 30)}) == 3


def test_a_log_as_load_is_read_by_its_columns(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("t,prompts,outputs\n" + "".join(f"{i},40,4\n" for i in range(120)))
    columns = "time_s=t,input=prompts,output=outputs"
    config = es.RunConfig(topology="1C", load=str(log), columns=columns)
    assert config.requests.effective_rate == pytest.approx(1.0)
    assert config.requests.duration_s == 120.0


def test_files_give_rates_and_logs_their_own(tmp_path):
    rates, log = tmp_path / "rates.csv", tmp_path / "log.csv"
    rates.write_text("t_s,rate\n0,2\n60,8\n")
    shape = load_shape(str(rates))
    assert (shape.span_s, shape.mean) == (120, 5)
    rates.write_text("t_s,rate\n0,2\n60,6\n")
    assert load_shape(str(rates)).mean == 4
    lines = [f"2023-11-16 18:0{t // 60}:{t % 60:02d}.0,100,10" for t in [*range(60), 60, 90, 120]]
    log.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    assert load_shape(str(log)).rates.tolist() == pytest.approx([1.0, 3 / 60])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sine:24,1", "sine:LOW,HIGH"),
        ("ladder:1,2", "seconds"),
        ("ladder:0@5", "not all 0"),
        ("ladder:1,x@5", "ladder:15,2,10@150"),
        ("ladder:1,nan@5", "numbers"),
        ("none.csv", "neither a shape nor a file"),
    ],
)
def test_a_shape_that_is_none_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        load_shape(text)


def test_policies_see_the_same_arrivals_and_the_load_ends_with_its_shape():
    runs = [
        es.run(topology="2C", policy=policy, load="ladder:20,2@5", output_len=8)
        for policy in ("jsq", "round_robin")
    ]
    one, other = (run.record.requests["arrival_s"] for run in runs)
    assert (one == other).all()
    assert one.max() < 10
    assert runs[0].summary["num_prompts"] == len(one) == runs[0].summary["completed"]
    assert runs[0].summary["request_rate"] == 11
    with pytest.raises(InputError, match="arrivals"):
        es.run(topology="2C", load="ladder:20,2@5", workload="x.csv", arrivals="recorded")
