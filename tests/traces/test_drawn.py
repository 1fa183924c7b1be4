"""The routing of a run that names no trace: of which preset, for which domains, drawn once."""

import json

import numpy as np
import pytest

from eldr_sim import cache
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.traces.requests.texts import DOMAIN_MIXES, wanted_domains
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.synthetic import drawn
from eldr_sim.traces.routing.synthetic.drawn import Shape, drawn_trace, nearest_preset
from eldr_sim.traces.routing.synthetic.presets import PRESETS, preset_model
from eldr_sim.traces.routing.synthetic.sampler import sample_experts

SHORT = [
    "--topology", "1P2D", "--request-rate", "10", "--duration", "2", "--warmup", "1",
    "--output-len", "10",
]  # fmt: skip
SMALL = Shape(2, 32, 4)


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Draw few requests, into a cache of the test's own."""
    monkeypatch.setenv("ELDR_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(drawn, "SERVING", 40)
    monkeypatch.setattr(drawn, "CALIBRATION", 12)
    return tmp_path / "cache"


def test_the_cache_holds_drawn_routing_once(few):
    """As ids: their bit sets, two to five times as large, are packed by each process."""
    trace = drawn_trace("Qwen3-30B-A3B", Shape(2, 128, 8), (("code", 1.0),))
    assert trace.bits.size
    kept = [file for file in cache.files() if file.part != cache.NUMBA]
    assert not any(file.path.suffix == ".bits" for file in kept)
    assert any(file.part == cache.TRACES for file in kept)
    assert sum(file.size for file in kept) < 1.5 * trace.experts.nbytes < trace.bits.nbytes


def test_windows_have_the_bit_sets_of_the_whole(few):
    """A few windows are packed alone, many with all rows: the experts are the same."""
    preset = "Qwen3-30B-A3B", Shape(2, 128, 8), (("code", 1.0),)
    whole = drawn_trace(*preset).bits
    rng = np.random.default_rng(3)
    for n in (1, 2, 5, 40):
        trace = drawn_trace(*preset)
        first, length = trace.decode_window(rng.permutation(trace.n_requests)[:n])
        bits, begins = trace.bits_of(first, length)
        assert (len(bits) < len(whole)) == (4 * length.sum() < len(whole))
        for row, begin, rows in zip(first, begins, length, strict=True):
            assert np.array_equal(bits[begin : begin + rows], whole[row : row + rows])


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        ("Qwen3-30B-A3B-FP8", "Qwen3-30B-A3B"),
        ("DeepSeek-R1", "DeepSeek-V3"),
        ("Kimi-K2", "DeepSeek-V3"),
        ("OLMoE-1B-7B", "DeepSeek-V2-Lite"),
        ("Mixtral-8x22B", "Mixtral-8x7B"),
        ("Llama-4-Maverick", "GPT-OSS-120B"),
    ],
)
def test_a_model_without_a_preset_has_the_nearest(model, preset):
    dims = load_model(model)
    assert nearest_preset(model, Shape(dims.n_moe_layers, dims.n_experts, dims.top_k)) == preset


def test_presets_are_the_models_own():
    for name in PRESETS:
        dims = load_model(name)
        assert nearest_preset(name, Shape(1, 2, 1)) == name
        own = PRESETS[name]
        assert (own.n_layers, own.n_experts, own.top_k) == (
            dims.n_moe_layers,
            dims.n_experts,
            dims.top_k,
        )
    assert len(list_models()) > len(PRESETS)


def test_mixtrals_load_varies_as_counted():
    """By counts of three layers and five domains (allenai/OLMoE)."""
    model = preset_model("Mixtral-8x7B")
    domain = np.arange(64) % 8
    prompts, outputs = np.full(64, 256), np.full(64, 64)
    experts = sample_experts(model, domain, prompts, outputs, 0).reshape(64, 320, 32, 2)

    def variation(some):
        counts = np.stack([np.bincount(some[:, :, i].ravel(), minlength=8) for i in range(32)])
        return float(np.mean(counts.std(axis=1) / counts.mean(axis=1)))

    assert variation(experts) == pytest.approx(0.10, abs=0.02)
    own = [variation(experts[domain == d]) for d in range(8)]
    assert np.mean(own) == pytest.approx(0.14, abs=0.03)


def test_a_workload_has_its_domains_and_a_mix_those_it_names():
    assert dict(wanted_domains("language", None)) == DOMAIN_MIXES["language"]
    every = [name for mix in DOMAIN_MIXES.values() for name in mix]
    assert [name for name, _ in wanted_domains("log.csv", None, None)] == every
    mixed = wanted_domains("task", {"zh": 0.2, "code": 0.8}, {"fr": 1.0})
    assert mixed == (("zh", 1.0), ("code", 1.0), ("fr", 1.0))
    with pytest.raises(InputError, match="domain_mix: 'sports' is not a domain"):
        wanted_domains("task", {"sports": 1.0})


def test_a_trace_is_drawn_once_and_again_when_a_part_is_gone(few, monkeypatch):
    domains = wanted_domains("language", None)
    made = drawn_trace("Some-Model", SMALL, domains)
    assert (made.n_layers, made.n_experts, made.top_k) == (2, 32, 4)
    assert made.path.parent == few / "traces"
    assert len(list((few / "traces").iterdir())) == 1, "calibration requests that nobody asked for"
    for split, n in ((made, 40), (made.for_calibration, 12)):
        counts = np.bincount(split.domain, minlength=4)
        assert (split.is_calibration == (n == 12)).all()
        exact = n * np.array(list(DOMAIN_MIXES["language"].values())) / 87.6
        assert counts.sum() == n
        assert (np.abs(counts - exact) < 1).all()
    assert "changed by hand, tuned to nothing" in made.manifest.notes
    assert open_trace(made.path).manifest.checksum == made.manifest.checksum

    with monkeypatch.context() as patch:
        patch.setattr(drawn, "_draw", lambda *_: pytest.fail("drawn again"))
        again = drawn_trace("Some-Model", SMALL, domains)
    assert again.manifest == made.manifest
    for part in ("experts.npy", "manifest.json"):
        (made.path / part).unlink()
        whole = drawn_trace("Some-Model", SMALL, domains)
        assert whole.manifest.checksum == made.manifest.checksum
        assert (made.path / part).exists()


def test_splits_that_are_drawn_apart_are_those_of_the_trace_of_both(few, tmp_path):
    domains = wanted_domains("task", None)
    preset = drawn.nearest_preset("Some-Model", SMALL)
    drawn._draw(preset, "middle", SMALL, domains, "both", tmp_path / "both")
    both = open_trace(tmp_path / "both")
    apart = drawn_trace("Some-Model", SMALL, domains).with_top_k(3)
    assert both.for_calibration is both
    for calibration, split in ((False, apart), (True, apart.for_calibration)):
        mine = np.flatnonzero(both.is_calibration == calibration)
        assert split.top_k == 3
        assert split.domains == both.domains
        assert split.request_id == [both.request_id[i] for i in mine]
        first, n = both.recorded_rows(mine)
        rows = np.concatenate([np.arange(f, f + k) for f, k in zip(first, n, strict=True)])
        np.testing.assert_array_equal(split.experts, both.experts[rows, :, :3])
    known = calibration_set(both.with_top_k(3), workload="task")
    found = calibration_set(apart, workload="task")
    np.testing.assert_array_equal(found.counts, known.counts)
    np.testing.assert_array_equal(found.coactivation(), known.coactivation())
    assert found.trace_checksum == apart.for_calibration.manifest.checksum


def test_what_another_process_clears_meanwhile_is_drawn_for_this_one(few, monkeypatch):
    """`cache clear` takes the files of a folder one by one, before a reader has opened them."""
    keep = cache.keep_folder

    def cleared(part, name, write, doing):
        made = keep(part, name, write, doing)
        (made / "requests.parquet").unlink()
        return made

    monkeypatch.setattr(cache, "keep_folder", cleared)
    made = drawn_trace("Some-Model", SMALL, wanted_domains("task", None))
    assert made.n_requests == 40
    assert few not in made.path.parents


def test_without_a_cache_a_process_draws_for_itself(few, monkeypatch):
    few.write_text("a file, no folder")
    monkeypatch.setattr(cache, "_warned", True)
    made = drawn_trace("Some-Model", SMALL, wanted_domains("task", None))
    assert made.n_requests == 40
    assert few not in made.path.parents


@pytest.mark.parametrize(
    ("options", "rests_on", "domains"),
    [
        (
            ["--model", "GPT-OSS-20B", "--workload", "language"],
            "preset GPT-OSS-20B: fitted to 62,418 recorded tokens of gpt-oss-20b",
            {"en", "zh", "ru", "fr"},
        ),
        (
            ["--model", "Qwen1.5-MoE-A2.7B"],
            "preset DeepSeek-V2-Lite: fitted to 62,418 recorded tokens of gpt-oss-20b",
            {"code", "math", "medical", "legal"},
        ),
    ],
)
def test_a_run_replays_all_layers_of_its_model_and_says_what_they_rest_on(
    few, drawn_routing, run_cli, tmp_path, options, rests_on, domains
):
    code, out, err = run_cli("run", *SHORT, *options, "--verbose", "--out", tmp_path / "run")
    assert code == 0, err
    trace = json.loads((tmp_path / "run" / "summary.json").read_text())["trace"]
    layers = load_model(options[1]).n_moe_layers
    assert (trace["name"], trace["provenance"]) == ("drawn", "synthetic")
    assert trace["layers"] == f"{layers} layers"
    assert trace["rests_on"].startswith(rests_on)
    assert trace["rests_on"].endswith(f"recorded of {options[1]}") == ("Qwen1.5" in options[1])
    assert set(trace["domain_mix"]) <= domains
    assert "".join(trace["rests_on"].split()) in "".join(out.split())  # in lines of its width
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["trace"] is None
    # The record of a result runs it again.
    code, _, err = run_cli(
        "run", "--config", tmp_path / "run" / "config.json", "--out", tmp_path / "again"
    )
    assert code == 0, err
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["trace"] == trace


def test_a_band_is_drawn_apart_and_refused_beside_a_trace(few, drawn_routing, run_cli, tmp_path):
    rests_on = []
    for band in ("low", "high"):
        options = ["--model", "GPT-OSS-20B", "--routing-band", band, "--out", tmp_path / band]
        code, _, err = run_cli("run", *SHORT, *options)
        assert code == 0, err
        summary = json.loads((tmp_path / band / "summary.json").read_text())
        rests_on.append(summary["trace"]["rests_on"])
        assert f"--routing-band {band}" in rests_on[-1]
    assert rests_on[0] != rests_on[1]
    code, _, err = run_cli("run", *SHORT, "--trace", "gpt-oss-20b", "--routing-band", "low")
    assert code == 2
    assert err.startswith("Error: routing_band: a routing band has no effect with a recorded trace")


def test_other_domains_than_can_be_drawn_are_one_line(few, drawn_routing, run_cli, tmp_path):
    config = tmp_path / "mix.yaml"
    config.write_text("domain_mix: {sports: 1.0}\n")
    code, _, err = run_cli("run", *SHORT, "--config", config)
    assert code == 2
    assert err.splitlines() == [
        "Error: domain_mix: 'sports' is not a domain that can be drawn (a recorded trace "
        "has its own domains) (allowed: code, math, medical, legal, en, zh, ru, fr)"
    ]
