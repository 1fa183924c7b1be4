"""Synthetic traces: limits that theory gives, parameters that move what they claim, and the fit."""

from dataclasses import replace

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.traces.format import open_trace
from eldr_sim.traces.statistics import expected_distinct
from eldr_sim.traces.synthetic import model_fit as fitting
from eldr_sim.traces.synthetic.model import CLASSES, RoutingModel
from eldr_sim.traces.synthetic.model_fit import fit_routing_model, requests_of
from eldr_sim.traces.synthetic.moments import Requests, information, measure
from eldr_sim.traces.synthetic.presets import PRESETS, Parameters, preset_model, random_model
from eldr_sim.traces.synthetic.sampler import sample_experts
from eldr_sim.traces.synthetic.synthesize import synthesize, synthesize_like
from eldr_sim.validation.synthetic_twin import compare_with_twin

PLAIN = Parameters(
    skew=0.0,
    task=0.0,
    language=0.0,
    layer_spread=0.0,
    phase_shift=0.0,
    individuality=0.0,
    reuse=0.0,
    coupling=0.0,
)


def model_of(parameters=PLAIN, *, layers=2, experts=16, top_k=3, domains=("code",), seed=0):
    return random_model(
        parameters,
        n_layers=layers,
        n_experts=experts,
        top_k=top_k,
        domains=domains,
        seed=seed,
        facts={"model": "test", "source": "a test", "prompt_len": 32, "output_len": 64},
    )


def drawn(model, n=200, prompt=32, output=64, seed=1):
    domain = np.arange(n) % len(model.domains)
    requests = Requests(
        domain, np.arange(n) * (prompt + output), np.full(n, prompt), np.full(n, output)
    )
    experts = sample_experts(model, domain, requests.prompt_len, requests.output_len, seed)
    return experts, measure(experts, requests, len(model.domains), model.n_experts)


def test_without_any_term_choice_is_uniform():
    # 19,200 tokens: each expert's share k / E = 0.1875 has a standard error of 0.0028.
    model = model_of()
    experts, moments = drawn(model)
    share = moments.chosen.sum(axis=(0, 1)) / moments.tokens.sum()
    assert np.abs(share - 3 / 16).max() < 5 * 0.0028
    assert moments.reuse == pytest.approx(3 / 16, abs=0.006)
    assert np.nanmax(np.abs(moments.coupling_bits)) < 0.002
    assert np.nanmax(np.abs(moments.self_overlap)) < 0.01
    for batch in (4, 16):
        got = expected_distinct([moments.decode_share.astype(float)], [batch])
        assert got == pytest.approx(16 * (1 - (1 - 3 / 16) ** batch), rel=0.01)
    assert experts.dtype == np.uint8


def test_first_draw_follows_the_weights():
    """Plackett-Luce: the first expert's chance is its weight's share, the second's as renewed."""
    log_weight = np.log(np.array([4.0, 2.0, 1.0, 1.0]))
    model = replace(
        model_of(experts=4, top_k=2, layers=1),
        popularity=np.broadcast_to(log_weight, (2, 1, 1, 4)).copy(),
    )
    experts, _ = drawn(model, n=300)
    first, second = experts[:, 0, 0], experts[:, 0, 1]
    n = len(experts)
    error = 5 * 0.5 / np.sqrt(n)
    assert np.bincount(first, minlength=4) / n == pytest.approx(
        [0.5, 0.25, 0.125, 0.125], abs=error
    )
    after = np.bincount(second[first == 0], minlength=4)
    assert after[0] == 0
    assert after / after.sum() == pytest.approx([0, 0.5, 0.25, 0.25], abs=error * 1.5)


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "domains"),
    [(1, 7, 3, ["code"]), (3, 5, 5, ["a", "zh"]), (2, 1, 1, ["x"]), (2, 300, 2, ["code", "math"])],
)
def test_odd_shapes_are_valid_traces(tmp_path, layers, experts, top_k, domains):
    strong = Parameters(skew=3.0, task=3.0, language=3.0, coupling=4.0, reuse=6.0)
    model = model_of(strong, layers=layers, experts=experts, top_k=top_k, domains=domains)
    trace = synthesize(
        model,
        tmp_path / "t",
        requests=3,
        calibration=2,
        prompt_len=(1, 20),
        output_len=(1, 3),
        seed=0,
    )
    assert (trace.n_layers, trace.n_experts, trace.top_k) == (layers, experts, top_k)
    assert trace.manifest.provenance == "synthetic"
    assert trace.is_calibration.sum() == 2
    assert trace.domains == domains


def test_weights_out_of_range_still_end(tmp_path):
    model = replace(model_of(experts=6, top_k=6), coupling=np.full(2, 80.0), reuse=np.full(2, 90.0))
    experts, _ = drawn(model, n=3)
    assert (np.sort(experts, axis=-1) == np.arange(6)).all()


def test_the_same_seed_gives_the_same_bytes_and_requests_do_not_depend_on_later_ones(tmp_path):
    model = preset_model("Qwen3-30B-A3B", n_layers=2)
    shared = {"calibration": 4, "prompt_len": (4, 9), "output_len": (3, 7)}
    one = synthesize(model, tmp_path / "1", requests=6, seed=3, **shared)
    two = synthesize(model, tmp_path / "2", requests=6, seed=3, **shared)
    assert one.manifest == two.manifest
    other = synthesize(model, tmp_path / "3", requests=6, seed=4, **shared)
    assert one.manifest.checksum != other.manifest.checksum
    few, many = (
        sample_experts(model, np.zeros(n, int), np.full(n, 5), np.full(n, 5), 0) for n in (2, 5)
    )
    np.testing.assert_array_equal(few, many[:20])


def reduction(moments, domain, batch=8):
    activation = moments.decode_share.astype(float)
    groups = [activation[domain == d] for d in np.unique(domain)]
    same = np.mean([expected_distinct([group], [batch]).mean() for group in groups])
    mixed = expected_distinct(groups, [batch // len(groups)] * len(groups)).mean()
    return 1 - same / mixed


TOPIC = {"individuality": 0.8, "drift_tokens": 16.0}


@pytest.mark.parametrize(
    ("base", "name", "values", "statistic"),
    [
        ({}, "skew", (0.2, 1.0), lambda m, d: m.load_max_over_mean.mean()),
        ({}, "task", (0.3, 1.5), reduction),
        ({}, "reuse", (0.0, 1.5), lambda m, d: m.reuse.mean()),
        ({}, "coupling", (0.5, 2.0), lambda m, d: np.nanmean(m.coupling_bits[0])),
        ({"coupling": 2.0}, "persistence", (0.2, 0.9), lambda m, d: np.nanmean(m.coupling_bits[1])),
        ({}, "individuality", (0.2, 1.0), lambda m, d: np.nanmean(m.self_overlap[0])),
        (TOPIC, "steady", (0.1, 0.9), lambda m, d: np.nanmean(m.self_overlap[2])),
        ({"individuality": 0.8, "steady": 0.2}, "drift_tokens", (8.0, 200.0),
         lambda m, d: np.nanmean(m.self_overlap[0])),
        ({}, "phase_shift", (0.1, 1.0),
         lambda m, d: np.abs(m.prompt_share.mean(0) - m.decode_share.mean(0)).sum()),
    ],
)  # fmt: skip
def test_a_parameter_moves_its_statistic(base, name, values, statistic):
    low, high = values
    seen = []
    for value in values:
        model = model_of(replace(PLAIN, **{**base, name: value}), layers=4, domains=("a", "b"))
        _, moments = drawn(model, n=100)
        seen.append(statistic(moments, np.arange(100) % 2))
    assert low < high
    assert seen[1] > 1.15 * seen[0]


def test_language_domains_have_a_strength_of_their_own():
    strengths = replace(PLAIN, task=2.0, language=0.1)
    model = model_of(strengths, domains=("code", "math", "zh", "ru"))
    spread = model.popularity.std(axis=(0, 2, 3))
    assert spread[:2].min() > 5 * spread[2:].max()


def test_information_against_brute_force():
    joint = np.array([[4.0, 0.0], [1.0, 3.0]])
    p = joint / 8
    want = sum(
        p[i, j] * np.log2(p[i, j] / (p[i].sum() * p[:, j].sum()))
        for i in range(2)
        for j in range(2)
        if p[i, j]
    )
    assert information(joint) == pytest.approx(want)


def test_classes_couple_layers_as_much_as_a_token_class_can():
    """Layers that share a class at certainty share no more bits than the class has."""
    model = replace(model_of(layers=3, experts=32, top_k=1), persistence=1.0)
    model = replace(model, coupling=np.full(3, 12.0))
    _, moments = drawn(model, n=150)
    assert 1.0 < moments.coupling_bits[0, 0] <= np.log2(CLASSES) + 0.05
    _, apart = drawn(replace(model, persistence=0.0), n=150)
    assert abs(apart.coupling_bits[0, 0]) < 0.05  # of 3


def test_fit_recovers_the_moments_of_a_known_model(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "ROUNDS", 8)
    known = Parameters(skew=0.5, task=1.0, language=0.5, individuality=0.6, reuse=0.8, coupling=1.5)
    model = model_of(known, layers=3, experts=24, top_k=3, domains=("a", "b"), seed=5)
    shared = {"prompt_len": (48, 48), "output_len": (96, 96), "requests": 120, "calibration": 60}
    trace = synthesize(model, tmp_path / "real", seed=0, **shared)
    fitted = fit_routing_model(trace)
    twin = synthesize_like(fitted, trace, tmp_path / "twin", seed=77)
    rows = {row.name: row for row in compare_with_twin(trace, twin)}
    for name, tolerance in (
        ("load of the busiest expert / mean", 0.08),
        ("reuse at lag 1", 0.05),
        ("coupling to layer + 1, bits", 0.25),
        ("overlap of a request with itself 16 tokens on", 0.25),
        ("reuse at lag 8", 0.10),
        ("distinct experts, all, batch 16, mixed", 0.03),
        ("distinct experts, all, batch 16, one domain", 0.03),
        ("entropy of the next layer's first expert, bits", 0.05),
    ):
        assert rows[name].synthetic == pytest.approx(rows[name].real, rel=tolerance), name
    distance = rows["unigrams: distance to half of the real trace"]
    assert distance.synthetic < 1.4 * distance.real
    assert not rows["reuse at lag 8"].fitted
    assert rows["reuse at lag 1"].fitted


def test_the_model_file_gives_back_the_model(tmp_path):
    model = preset_model("GPT-OSS-120B", n_layers=2)
    model.save(tmp_path / "m.npz")
    back = RoutingModel.load(tmp_path / "m.npz")
    assert (back.domains, back.facts, back.top_k) == (model.domains, model.facts, model.top_k)
    np.testing.assert_array_equal(back.popularity, model.popularity)
    with pytest.raises(InputError, match="exists"):
        model.save(tmp_path / "m.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["m.npz"]


def test_stretched_layers_keep_their_statistics():
    model = model_of(replace(PLAIN, skew=0.8, reuse=1.0), layers=2, domains=("a", "b"))
    deep = model.with_layers(5)
    assert deep.n_layers == 5
    for layer, origin in enumerate((0, 0, 0, 1, 1)):
        np.testing.assert_array_equal(
            np.sort(deep.popularity[:, :, layer]), np.sort(model.popularity[:, :, origin])
        )
    assert not np.array_equal(deep.popularity[:, :, 0], deep.popularity[:, :, 1])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_shape_of_their_model(name):
    preset, model = PRESETS[name], load_model(name)
    assert (preset.n_experts, preset.top_k) == (model.n_experts, model.top_k)
    assert preset.n_layers == model.n_moe_layers


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "Qwen3-235B-A22B"])
def test_presets_save_what_the_paper_measured(name):
    """ELDR Fig. 4, widened for twelve layers; docs/synthetic.md has all layers."""
    model = preset_model(name, n_layers=12)
    n = 8 * 64
    domain = np.arange(n) % 8
    requests = Requests(domain, np.arange(n) * 25, np.full(n, 1), np.full(n, 24))
    experts = sample_experts(model, domain, requests.prompt_len, requests.output_len, 0)
    moments = measure(experts, requests, 8, model.n_experts)
    for group, low, high in ((slice(0, 4), 0.15, 0.23), (slice(4, 8), 0.03, 0.10)):
        mine = np.isin(domain, np.arange(8)[group])
        sub = replace(moments, decode_share=moments.decode_share[mine])
        assert low < reduction(sub, domain[mine], 64) < high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "GPT-5"], "preset: 'GPT-5' is none"),
        ([], "preset: give --preset or --from"),
        (["--preset", "GPT-OSS-120B", "--experts", "3"], "experts: got 3 with top_k 4"),
        (["--preset", "GPT-OSS-120B", "--layers", "0"], "layers: got 0"),
        (["--preset", "GPT-OSS-120B", "--set", "taste=1"], "set: 'taste' is no parameter"),
        (["--preset", "GPT-OSS-120B", "--set", "task"], "set: got 'task'"),
        (["--preset", "GPT-OSS-120B", "--set", "skew=-1"], "skew: got -1.0"),
        (["--preset", "GPT-OSS-120B", "--set", "steady=2"], "steady: got 2.0"),
        (["--preset", "GPT-OSS-120B", "--domains", "a,a"], "domains: got 'a, a'"),
        (["--preset", "GPT-OSS-120B", "--prompt-len", "9:3"], "prompt_len: got 9:3"),
        (["--preset", "GPT-OSS-120B", "--prompt-len", "long"], "prompt-len: got 'long'"),
        (["--preset", "GPT-OSS-120B", "--requests", "-1"], "requests: got -1"),
        (["--preset", "GPT-OSS-120B", "--like", "no-such"], "trace: 'no-such' is neither"),
        (["--preset", "GPT-OSS-120B", "--seed", "-1"], "seed: got -1"),
        (["--from", "README.md"], "is no routing model"),
        (["--from", "no-such.npz"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(run_cli, tmp_path, arguments, message):
    code, _, err = run_cli(
        "trace", "synthesize", "--layers", "1", *arguments, "--out", tmp_path / "t"
    )
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_commands_fit_and_draw_and_the_trace_runs(run_cli, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "ROUNDS", 2)
    small = tmp_path / "small"
    command = "--preset Qwen3-30B-A3B --layers 2 --requests 40 --calibration 40"
    command += " --prompt-len 8:12 --output-len 20 --out"
    code, out, err = run_cli("trace", "synthesize", *command.split(), small)
    assert (code, err) == (0, "")
    assert "80 requests" in out
    assert "Qwen3-30B-A3B, changed" in open_trace(small).manifest.model
    model, report = tmp_path / "model.npz", tmp_path / "report"
    code, out, err = run_cli("trace", "fit-synthetic", small, "--out", model, "--report", report)
    assert (code, err) == (0, "")
    assert "Checked: the model was not fitted to these" in out
    names = {"summary.json", "statistics.csv", "distinct_experts.png"}
    assert {path.name for path in report.iterdir()} == names
    twin = tmp_path / "twin"
    code, _, err = run_cli(
        "trace", "synthesize", "--from", model, "--layers", "3", "--like", small, "--out", twin
    )
    assert (code, err) == (0, "")
    real, like = requests_of(open_trace(small)), requests_of(open_trace(twin))
    np.testing.assert_array_equal(real.prompt_len, like.prompt_len)
    assert open_trace(twin).n_layers == 3
    command = "run --policy eldr --topology 1P2D --request-rate 10 --duration 3 --warmup 1"
    command += " --output-len 20 --trace"
    code, out, err = run_cli(*command.split(), twin)
    assert code == 0, err
    assert "synthetic" in out
    code, _, err = run_cli("trace", "fit-synthetic", small, "--out", model)
    assert code == 2
    assert "exists" in err
