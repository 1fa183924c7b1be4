"""``fit`` with its variants and report, and runs that use them: files, figures, one-line errors."""

import csv
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from eldr_sim.policies.eldr.artifact import RoutingArtifact, fit
from eldr_sim.policies.eldr.signature import TRANSFORMS, FitOptions, unit_rows
from eldr_sim.policies.eldr.signature_quality import project, signature_quality
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.gate_scores import GateScores
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation import signature_report as report_module

FILES = {
    f"{name}.{kind}"
    for name in ("rho_by_transform", "rho_by_layers", "signature_pca")
    for kind in ("png", "csv")
} | {"summary.json"}
SHORT = ["--topology", "1P4D", "--request-rate", "10", "--duration", "3", "--warmup", "1"]
SHORT += ["--output-len", "20", "--policy", "eldr"]


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A small synthetic trace of the task domains: prob is counts / 8, logit is noise."""
    r = np.random.default_rng(0)
    n, prompt, output = 48, 24, 12
    domain = np.arange(n) % 4
    taste = r.gamma(0.5, 1.0, (4, 2, 128))[domain][:, None]
    keys = np.log(r.random((n, prompt + output, 2, 128))) / (taste + 1e-3)
    experts = np.argsort(-keys, axis=-1)[..., :8].reshape(-1, 2, 8)
    counts = np.zeros((n, 2, 128), np.float32)
    noise = r.normal(size=counts.shape).astype(np.float32)
    for q, rows in enumerate(np.split(experts, n)):
        for layer in range(2):
            counts[q, layer] = np.bincount(rows[:prompt, layer].ravel(), minlength=128)
    names = ["code", "math", "medical", "legal"]
    folder = tmp_path_factory.mktemp("gated")

    def make(name, requests):
        gate = GateScores(requests, prob=counts[requests] / 8, logit=noise[requests])
        return write_trace(
            folder / name,
            experts=experts,
            request_id=[f"r{i}" for i in range(n)],
            domain=[names[d] for d in domain],
            prompt_len=np.full(n, prompt),
            output_len=np.full(n, output),
            is_calibration=np.arange(n) < 32,
            model="drawn",
            n_experts=128,
            domains=names,
            captured_by="test",
            source_data="drawn",
            tool_versions={},
            provenance="synthetic",
            gate_scores=gate,
        ).path

    return {"all": make("all", np.arange(n)), "calibration": make("calibration", np.arange(32))}


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- projection --------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
def test_projection_is_that_of_the_singular_vectors(signed):
    r = np.random.default_rng(3)
    rows = r.gamma(0.4, 1.0, (30, 50)) * np.repeat([1, 3], 25)
    rows[:10, :20] += 2
    points = unit_rows(rows - signed)
    centroids = unit_rows(points[:6].reshape(3, 2, 50).sum(axis=1))
    plane = project(points, centroids)
    mean = points.mean(axis=0)
    _, values, directions = np.linalg.svd(points - mean, full_matrices=False)
    expected = (points - mean) @ directions[:2].T
    sign = np.sign(expected[np.abs(expected).argmax(axis=0), [0, 1]])
    np.testing.assert_allclose(plane.points, expected * sign, atol=2e-6)
    centred = (centroids - mean) @ directions[:2].T
    np.testing.assert_allclose(plane.centroids, centred * sign, atol=2e-6)
    np.testing.assert_allclose(plane.explained, values[:2] ** 2 / (values**2).sum(), atol=2e-6)


def test_projection_without_variance_is_zero():
    same = unit_rows(np.ones((5, 7)))
    plane = project(same, same[:2])
    for values in (plane.points, plane.centroids, plane.explained):
        assert not values.any()
    # Along one direction only.
    line = project(unit_rows(np.repeat(np.eye(2), 3, axis=0)), np.eye(2))
    assert line.explained.tolist() == [1.0, 0.0]
    assert not line.points[:, 1].any()


# -- report ------------------------------------------------------------------------------------


def test_quality_is_that_of_the_fits():
    calibration = calibration_set(open_trace(), workload="language")
    own = fit(calibration, 4, 3, FitOptions(layer_mask="all"))
    quality = signature_quality(calibration, own)
    assert list(quality.rho_by_transform) == ["count-idf", "count", "sqrt", "binary"]
    for transform, rho in quality.rho_by_transform.items():
        other = fit(calibration, 4, 3, FitOptions(transform=transform))
        assert rho == other.rho[-1]
        if transform == "count-idf":
            assert (quality.greedy.order == other.layer_order).all()
            assert (quality.greedy.rho == other.rho).all()
            assert quality.greedy.n_kept == other.n_kept


@pytest.mark.long
def test_fit_writes_its_report(run_cli, tmp_path):
    out, report = tmp_path / "fit.npz", tmp_path / "deep" / "report"
    code, text, _ = run_cli("fit", "--decoders", 8, "--out", out, "--report", report)
    assert code == 0
    assert f"Wrote {report}: report of task, language" in text
    assert {path.name for path in report.iterdir()} == FILES
    assert [path.name for path in report.parent.iterdir()] == ["report"]
    for name in FILES:
        if name.endswith(".png"):
            assert (report / name).read_bytes().startswith(b"\x89PNG")
    artifact = RoutingArtifact.load(out)
    language = fit(calibration_set(open_trace(), workload="language"), 8, 0)
    fits = {"task": artifact, "language": language}
    assert json.loads((report / "summary.json").read_text())["task"] == artifact.summary()

    bars = rows_of(report / "rho_by_transform.csv")
    assert [(row["workload"], row["transform"]) for row in bars] == [
        (workload, transform) for workload in fits for transform in TRANSFORMS
    ]
    layers = rows_of(report / "rho_by_layers.csv")
    points = rows_of(report / "signature_pca.csv")
    for workload, made in fits.items():
        bar = [row for row in bars if row["workload"] == workload]
        # All transforms on the same requests: those of which the trace has the gate's scores.
        scored = calibration_set(open_trace(), workload=workload, score="prob")
        assert {row["requests"] for row in bar} == {str(len(scored.requests))}
        for row in bar:
            alone = fit(scored, 8, 0, FitOptions(transform=row["transform"], layer_mask="all"))
            assert float(row["rho"]) == pytest.approx(alone.rho[-1], abs=1e-6)
            assert row["pairs"] == str(alone.n_pairs)
        curve = [row for row in layers if row["workload"] == workload]
        assert [int(row["layer_added"]) for row in curve] == made.layer_order.tolist()
        assert [float(row["rho"]) for row in curve] == pytest.approx(made.rho, abs=1e-6)
        assert [int(row["peak"]) for row in curve].index(1) == made.n_kept - 1
        mine = [row for row in points if row["workload"] == workload]
        assert sum(row["kind"] == "centroid" for row in mine) == 8
        domains = [row["domain"] for row in mine if row["kind"] == "request"]
        assert [domains.count(name) for name in made.domains] == made.cluster_domains.sum(
            axis=0
        ).tolist()
        assert -1 <= min(float(row["pc1"]) for row in mine) < 0

    # Nothing is overwritten unless asked; then the same fit gives the same bytes.
    before = {name: (report / name).read_bytes() for name in FILES}
    other = tmp_path / "other.npz"
    code, _, err = run_cli("fit", "--decoders", 8, "--out", other, "--report", report)
    assert (code, err.count("\n"), other.exists()) == (2, 1, False)
    arguments = ("fit", "--decoders", 8, "--out", out, "--report", report, "--force")
    assert run_cli(*arguments)[0] == 0
    assert {name: (report / name).read_bytes() for name in FILES} == before


def test_report_covers_the_workloads_that_the_trace_can_serve(run_cli, tmp_path, gated):
    # 191 decoders: language has 190 calibration requests.
    arguments = ("--out", tmp_path / "a.npz", "--report", tmp_path / "a", "--layer-mask", "2")
    code, text, _ = run_cli("fit", "--decoders", 191, *arguments)
    assert (code, "report of task\n" in text) == (0, True)
    arguments = ("--out", tmp_path / "b.npz", "--report", tmp_path / "b", "--trace", gated["all"])
    code, text, _ = run_cli("fit", "--decoders", 4, *arguments, "--signature", "gate-logit")
    assert (code, "report of task\n" in text) == (0, True)
    bars = rows_of(tmp_path / "b" / "rho_by_transform.csv")
    assert [row["transform"] for row in bars] == list(TRANSFORMS)
    by_name = {row["transform"]: row["rho"] for row in bars}
    assert by_name["gate-prob"] == by_name["count"]  # this trace's probabilities are counts / 8
    assert by_name["gate-logit"] != by_name["count"]


def test_gate_signatures_are_fitted_on_the_requests_that_have_scores(run_cli, tmp_path):
    out = tmp_path / "a.npz"
    code, text, _ = run_cli("fit", "--decoders", 4, "--out", out, "--signature", "gate-prob")
    assert code == 0
    assert text.startswith("Fitted 4 centroids on 103 calibration requests with gate scores in ")
    calibration = calibration_set(open_trace(), workload="task", score="prob")
    made, own = RoutingArtifact.load(out), fit(calibration, 4, 0, FitOptions(transform="gate-prob"))
    assert (made.centroids == own.centroids).all()
    assert made.n_calibration == len(calibration.requests) == 103


def test_transforms_are_compared_on_the_fit_where_a_domain_has_no_gate_scores():
    trace = open_trace()
    calibration = calibration_set(trace, workload="task")
    known = trace.gate_scores.requests
    # Domain 1 is math: none of the task workload has scores in its mix.
    gate = GateScores(known[trace.domain[known] != 1], trace.gate_scores.prob[:224])
    lacking = replace(trace, gate_scores=gate)
    own = fit(calibration, 4, 0)
    task = report_module.measured_fits(lacking, "task", calibration, own)["task"]
    assert task.compared is calibration
    assert list(task.rho_by_transform) == list(TRANSFORMS[:4])
    assert task.rho_by_transform["count-idf"] == own.rho[-1]


@pytest.mark.parametrize("broken", ["draw_pca", "save"])
def test_a_failure_leaves_neither_report_nor_artifact(
    run_cli, tmp_path, monkeypatch, gated, broken
):
    def fail(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(RoutingArtifact if broken == "save" else report_module, broken, fail)
    arguments = ("--out", tmp_path / "a.npz", "--report", tmp_path / "report")
    code, _, err = run_cli("fit", "--trace", gated["all"], "--decoders", 4, *arguments)
    assert (code, err.strip()) == (130, "Interrupted: nothing was written.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--signature", "tfidf"], "signature: unknown transform 'tfidf' (allowed: count-idf, "),
        (["--signature", "gate-foo"], "signature: unknown transform 'gate-foo' (allowed: count-"),
        (
            ["--layer-mask", "0,10"],
            "layer_mask: no layer 10 (allowed: greedy, all, or numbers from",
        ),
        (["--layer-mask", "none"], "layer_mask: 'none' (allowed: greedy, all, or layer numbers"),
        (["--clustering", "random"], "clustering: unknown method 'random' (allowed: balanced, "),
        (["--decoders", "500"], "calibration: 424 requests cannot make 500 clusters"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(run_cli, tmp_path, arguments, message):
    code, text, err = run_cli(
        *("fit", "--decoders", 4, "--out", tmp_path / "a.npz", "--report", tmp_path / "r"),
        *arguments,
    )
    assert (code, text) == (2, "")
    assert err.startswith(f"Error: {message}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_report_must_not_swallow_the_artifact(run_cli, tmp_path):
    report = tmp_path / "r"
    for out in (report, report / "a.npz", report / "deep" / "a.npz"):
        code, _, err = run_cli("fit", "--decoders", 4, "--out", out, "--report", report)
        assert (code, err.startswith(f"Error: report: {report} would hold {out}")) == (2, True)
    assert list(tmp_path.iterdir()) == []


# -- runs --------------------------------------------------------------------------------------


def test_run_takes_the_same_fit_from_options_and_from_an_artifact(run_cli, tmp_path):
    artifact = tmp_path / "a.npz"
    options = ("--signature", "sqrt", "--layer-mask", "4,1", "--clustering", "vanilla")
    assert run_cli("fit", "--decoders", 4, "--out", artifact, *options)[0] == 0
    chosen = "signature=sqrt,layer_mask=4,1,clustering=vanilla"
    variants = {
        "default": (),
        "options": ("--policy", f"eldr:{chosen}"),
        "artifact": ("--policy", f"eldr:artifact={artifact}"),
        "both": ("--policy", f"eldr:{chosen},artifact={artifact}"),
    }
    tables = {}
    for name, extra in variants.items():
        assert run_cli("run", *SHORT, *extra, "--out", tmp_path / name)[0] == 0
        tables[name] = (tmp_path / name / "requests.parquet").read_bytes()
    assert tables["options"] == tables["artifact"] == tables["both"]
    assert tables["options"] != tables["default"]
    config = tmp_path / "options" / "config.json"
    said = json.loads(config.read_text())["config"]["policy"]
    assert said == "eldr:signature=sqrt,layer_mask=1,4,clustering=vanilla"
    assert run_cli("run", "--config", config, "--out", tmp_path / "again")[0] == 0
    assert (tmp_path / "again" / "requests.parquet").read_bytes() == tables["options"]

    for option, value, message in (
        ("signature", "count", "signature: count, but the artifact holds sqrt"),
        ("layer_mask", "all", "layer_mask: all, but the artifact holds [1, 4]"),
        ("clustering", "balanced", "clustering: balanced, but the artifact is vanilla"),
    ):
        policy = f"eldr:artifact={artifact},{option}={value}"
        code, _, err = run_cli("run", *SHORT, "--policy", policy)
        assert (code, err) == (2, f"Error: {message}\n")


def test_compare_takes_the_options(run_cli, tmp_path):
    short = [x for x in SHORT if x not in ("--policy", "eldr")]
    policy = "eldr:signature=binary,layer_mask=all,clustering=vanilla"
    jobs = ("--seeds", 1, "--jobs", 1)  # in this process: others import and compile anew
    arguments = ("--policy", f"eldr,{policy}", *jobs, *short, "--out", tmp_path / "c")
    assert run_cli("compare", *arguments)[0] == 0
    runs = pq.read_table(tmp_path / "c" / "runs.parquet").to_pylist()
    assert [run["policy"] for run in runs] == ["round_robin", "eldr", policy]


def test_gate_scores_are_served_where_the_trace_has_them(run_cli, tmp_path, gated):
    """Probabilities that are counts / 8 must route every request as plain counts do."""
    for name in ("gate-prob", "count", "gate-logit"):
        policy = f"eldr:signature={name},tau=0"
        arguments = ("--trace", gated["all"], "--policy", policy)
        assert run_cli("run", *SHORT, *arguments, "--out", tmp_path / name)[0] == 0
    tables = {p.name: (p / "requests.parquet").read_bytes() for p in tmp_path.iterdir()}
    assert tables["gate-prob"] == tables["count"]
    assert tables["gate-logit"] != tables["count"]
    policy = "eldr:signature=gate-prob"
    code, _, err = run_cli("run", *SHORT, "--trace", gated["calibration"], "--policy", policy)
    assert code == 2
    assert err.startswith("Error: signature: gate-prob needs the gate's scores of 16 requests")
    assert err.count("\n") == 1
    # The embedded trace has scores of calibration requests only.
    code, _, err = run_cli("run", *SHORT, "--policy", "eldr:signature=gate-logit")
    assert code == 2
    assert err.startswith("Error: signature: gate-logit needs the gate's scores of ")
    assert "the routing trace lacks those of " in err
    assert err.count("\n") == 1


def test_inspect_tells_of_gate_scores(run_cli, gated):
    code, text, _ = run_cli("trace", "inspect", gated["calibration"])
    assert code == 0
    assert "Gate:       summed prob and logit of 32 prompts\n" in text


def test_signature_of_another_kind_is_not_mistaken(gated):
    calibration = calibration_set(open_trace(gated["all"]), workload="task")
    counts = fit(calibration, 4, 0, FitOptions(transform="count"))
    prob = fit(calibration, 4, 0, FitOptions(transform="gate-prob"))
    assert (counts.centroids == prob.centroids).all()
    other = replace(calibration, counts=calibration.counts[:, ::-1].copy())
    assert (fit(other, 4, 0, FitOptions(transform="gate-prob")).centroids == prob.centroids).all()
