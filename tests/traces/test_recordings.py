"""The embedded recordings of served models, held against the files that they were made of."""

import csv

import numpy as np
import pytest

from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.manifest import (
    ONE_PROCESS,
    SYNTHETIC,
    builtin_traces,
    in_short,
    rests_on,
)
from eldr_sim.traces.routing.synthetic.presets import PRESETS, preset_model
from studies.presets_beside_recordings import OUT as BESIDE
from studies.presets_beside_recordings import POLICIES, PRESET_OF, figures

from ..on_each import on_each
from ..paths import SHARED

ROUTING = SHARED / "data" / "routing"
NAMES = ("gpt-oss-20b", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", NAMES)
def test_recording_is_embedded_small_and_says_what_it_is(name):
    assert name in builtin_traces()
    trace = open_trace(name)
    manifest = trace.manifest
    assert (manifest.provenance, manifest.prompt_share) == ("imported", 0.25)
    assert manifest.recorded_phase == {"q": "prompt", "g": "generated"}[name[0]]
    assert "Apache-2.0" in manifest.source_data
    assert sum(path.stat().st_size for path in trace.path.iterdir()) < 3e6
    for domain in trace.domains:  # each can be fitted on and served
        assert len(trace.requests_of([domain], calibration=True))
        assert len(trace.requests_of([domain], calibration=False))


def test_qwen3_holds_the_source_token_by_token():
    if not (ROUTING / "qwen3_30b_a3b").is_dir():
        pytest.skip("no shared data")
    trace, row, request = open_trace("qwen3-30b-a3b"), 0, 0
    for file in "ab":
        with np.load(ROUTING / "qwen3_30b_a3b" / f"{file}.npz") as archive:
            rows, start = archive["prompt_experts"], archive["passage_start"]
        assert np.array_equal(trace.experts[row : row + len(rows)], np.sort(rows, axis=2))
        of_file = slice(request, request + len(start))
        assert trace.first_row[of_file].tolist() == (row + start).tolist()
        row, request = row + len(rows), request + len(start)
    assert (row, request) == (trace.manifest.n_tokens, trace.n_requests)


def test_gpt_oss_holds_the_source_token_by_token():
    source = ROUTING / "gptoss20b"
    if not source.is_dir():
        pytest.skip("no shared data")
    trace = open_trace("gpt-oss-20b")
    with np.load(source / "experts.npz") as archive:
        assert np.array_equal(trace.experts, np.sort(archive["experts"], axis=2))
    with (source / "requests.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    total = trace.prompt_len + trace.output_len
    assert total.tolist() == [int(row["routed_tokens"]) for row in rows]
    names = [trace.domains[d] for d in trace.domain.tolist()]
    assert names == [row["domain"].replace("code_cs", "code") for row in rows]
    assert np.abs(trace.prompt_len - 0.25 * total).max() <= 0.5


def test_a_run_on_a_recording_says_that_one_phase_stands_for_both():
    summary = simulate_summary(
        RunConfig(
            trace="gpt-oss-20b",
            model="GPT-OSS-20B",
            workload="trace",
            policy="eldr",
            topology="1P2D",
            num_requests=8,
            request_rate=20,
        )
    )
    assert summary["prompt_experts"] == "recorded"
    assert any("recorded as generated tokens" in line for line in summary["trace_warnings"])
    basis = summary["trace"]["rests_on"]
    assert basis == "150,714 recorded generated tokens of gpt-oss-20b"
    assert summary["trace"]["layers"] == "24 recorded layers"  # all of the model's: none tiled


@pytest.mark.parametrize(
    ("changes", "model", "want"),
    [
        ({}, "GPT-OSS-20B", "150,714 recorded generated tokens of gpt-oss-20b"),
        ({}, "X", "150,714 recorded generated tokens of gpt-oss-20b; nothing was recorded of X"),
        (
            {"provenance": "synthetic", "notes": "Synthetic routing, preset Y: fitted to Z."},
            "gpt-oss-20b",
            "preset Y: fitted to Z",
        ),
        ({"provenance": "synthetic"}, "gpt-oss-20b", "Domain code is the recording's code_cs"),
    ],
)
def test_what_routing_rests_on_is_said(changes, model, want):
    manifest = open_trace("gpt-oss-20b").manifest.model_copy(update=changes)
    assert rests_on(manifest, model).startswith(want)


@on_each("name", sorted(PRESETS)[::3])
def test_a_drawn_result_says_in_two_lines_what_docs_promise(name):
    """Prompts and answers by one process, and the tokens that were recorded, if of this model."""
    model = preset_model(name)
    assert model.domains == [domain for mix in DOMAIN_MIXES.values() for domain in mix]
    notes = f"{SYNTHETIC}{model.facts['source']}."
    changes = {"provenance": "synthetic", "notes": notes, "model": name}
    manifest = open_trace("gpt-oss-20b").manifest.model_copy(update=changes)
    said = in_short(manifest, name)
    assert ONE_PROCESS in rests_on(manifest, name)
    assert said.endswith("prompts, answers by one process")
    assert ("tokens" in said) == (name in ("Qwen3-30B-A3B", "GPT-OSS-20B"))
    assert len(f"Routing: {said}") <= 62


@pytest.mark.parametrize(
    ("name", "model", "want"),
    [
        ("gpt-oss-20b", "GPT-OSS-20B", "recorded, 150,714 generated tokens for prompts too"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B", "recorded, 4,010 prompt tokens for answers too"),
        ("reference-moe", "reference-moe-38m", "recorded, 625,472 tokens"),
        ("reference-moe", "Qwen3-30B-A3B", "recorded, 625,472 tokens of another model"),
    ],
)
def test_a_recorded_result_says_in_short_what_was_recorded(name, model, want):
    assert in_short(open_trace(name).manifest, model) == want


def test_a_run_prints_two_lines_on_what_it_rests_on(run_cli):
    options = ["--topology", "1P1D", "--num-requests", "4", "--trace", "gpt-oss-20b",
               "--model", "GPT-OSS-20B", "--workload", "trace"]  # fmt: skip
    tails = []
    for more in ([], ["--verbose"]):
        code, out, err = run_cli("run", *options, *more)
        assert code == 0, err
        _, _, tail = out.partition("Rests on")
        tails.append(tail.splitlines()[1:-1])
    assert len(tails[0]) == 2
    assert tails[0][1] == "  Routing: recorded, 150,714 generated tokens for prompts too"
    assert len(tails[1]) > 4


@pytest.mark.parametrize("name", builtin_traces())
def test_a_recording_serves_its_own_requests_where_it_lacks_the_default_domains(name):
    has = set(DOMAIN_MIXES["task"]) <= set(open_trace(name).domains)
    config = RunConfig(trace=name, policy="eldr")
    assert config.requests.workload == ("task" if has else "trace")
    assert RunConfig(trace=name, workload="language").requests.workload == "language"
    mix = RunConfig(trace=name, domain_mix={"random": 1.0}).requests
    assert mix.workload == "task"


def test_eldr_runs_on_the_recording_of_qwen3_with_one_flag(run_cli):
    code, out, err = run_cli("run", "--trace", "qwen3-30b-a3b", "--policy", "eldr",
                             "--num-requests", "20")  # fmt: skip
    assert code == 0, err
    assert "16 clusters were fitted to 8 calibration requests, each cut into pieces" in err
    assert "recorded, 4,010 prompt tokens for answers too" in out


def test_every_recording_stands_beside_a_preset():
    assert set(PRESET_OF) == set(builtin_traces())
    assert set(PRESET_OF.values()) <= set(PRESETS)
    with BESIDE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(r["recording"], r["preset"]) for r in rows} >= set(PRESET_OF.items())
    kept = {(r["recording"], r["figure"]) for r in rows if "[" in r["drawn"]}
    gains = {f"{policy}, median TPOT, %" for policy in POLICIES}
    assert kept >= {(name, gain) for name in PRESET_OF for gain in gains}


def test_figures_beside_a_preset_are_of_the_recording():
    """The table is of today's recording: a figure is measured again."""
    measured = figures(open_trace("qwen3-30b-a3b"))
    with BESIDE.open(encoding="utf-8", newline="") as file:
        kept = {
            r["figure"]: r["recorded"] for r in csv.DictReader(file) if "qwen" in r["recording"]
        }
    assert {name: f"{value:.3g}" for name, value in measured.items()}.items() <= kept.items()
