"""Gate scores of a trace: read back as written, refused when they do not fit, used by fits."""

import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.gate_scores import FILE_NAME, GateScores
from eldr_sim.traces.routing.imports.importers import import_trace
from eldr_sim.traces.routing.writer import write_trace

from ..on_each import on_each

N, LAYERS, EXPERTS = 12, 2, 10


def scores(requests=range(N), seed=0, kinds=("prob", "logit")):
    r = np.random.default_rng(seed)
    requests = np.array(list(requests), np.int64)
    shape = (len(requests), LAYERS, EXPERTS)
    made = {
        "prob": (3 * r.random(shape)).astype(np.float32),
        "logit": r.normal(0, 9, shape).astype(np.float32),
    }
    return GateScores(requests, **{kind: made[kind] for kind in kinds})


def trace_with(out, gate, force=False):
    r = np.random.default_rng(1)
    prompt, output = np.full(N, 4), np.full(N, 3)
    experts = np.argsort(r.random((7 * N, LAYERS, EXPERTS)), axis=-1)[..., :3]
    return write_trace(
        out,
        experts=experts,
        request_id=[f"r{i}" for i in range(N)],
        domain=["a", "b"] * (N // 2),
        prompt_len=prompt,
        output_len=output,
        is_calibration=np.arange(N) < N // 2,
        model="m",
        n_experts=EXPERTS,
        domains=["a", "b"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
        gate_scores=gate,
        force=force,
    )


@pytest.mark.parametrize("kinds", [("prob", "logit"), ("prob",), ("logit",)])
def test_round_trip(tmp_path, kinds):
    gate = scores([1, 2, 5, 11], kinds=kinds)
    trace_with(tmp_path / "t", gate)
    trace = open_trace(tmp_path / "t")
    assert trace.gate_scores.requests.tolist() == [1, 2, 5, 11]
    assert trace.gate_scores.kinds == list(kinds)
    for kind in kinds:
        got = trace.prompt_scores([11, 1, 11], kind)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, getattr(gate, kind)[[3, 0, 3]])
    for kind in {"prob", "logit"} - set(kinds):
        with pytest.raises(InputError, match=f"signature: gate-{kind} needs .* no {kind}"):
            trace.prompt_scores([1], kind)
    for uncovered in ([0, 1], [3], [1, 6, 10]):
        with pytest.raises(InputError, match=r"trace lacks those of [12]"):
            trace.prompt_scores(uncovered, kinds[0])
    np.testing.assert_array_equal(trace.prompt_scores([3, 4], "count"), trace.prompt_counts([3, 4]))


def test_equal_scores_are_equal_files(tmp_path):
    for name in "ab":
        trace_with(tmp_path / name, scores())
    first, second = (tmp_path / name / FILE_NAME for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_trace_without_gate_scores_says_so(tmp_path):
    trace = trace_with(tmp_path / "t", None)
    assert trace.gate_scores is None
    assert "gate_scores_checksum" not in json.loads((tmp_path / "t" / "manifest.json").read_text())
    with pytest.raises(InputError, match=r"carries no prob in gate_scores\.npz") as caught:
        trace.prompt_scores([0], "prob")
    assert "\n" not in str(caught.value)


def test_calibration_sets_pass_them_on(tmp_path):
    gate = scores(range(N // 2))
    picked = calibration_set(trace_with(tmp_path / "t", gate), workload="log.csv")
    assert picked.requests.tolist() == list(range(6))
    assert picked.scores("count") is picked.counts
    np.testing.assert_array_equal(picked.scores("prob"), gate.prob)
    np.testing.assert_array_equal(picked.scores("logit"), gate.logit)


def broken(**changes):
    gate = scores([0, 3, 4])
    fields = {"requests": gate.requests, "prob": gate.prob, "logit": gate.logit}
    fields |= {name: change(fields[name]) if change else None for name, change in changes.items()}
    return GateScores(**fields)


def put(value):
    def change(array):
        array = array.copy()
        array[1, 1, 7] = value
        return array

    return change


@on_each(
    "changes, message",
    [
        ({"requests": lambda a: a[::-1].copy()}, "requests are not ascending"),
        ({"requests": lambda a: a + 8}, r"requests are not ascending .*0\.\.11, each once"),
        ({"requests": lambda a: a - 1}, "requests are not ascending"),
        ({"requests": lambda a: a * 0}, "requests are not ascending"),
        ({"requests": lambda a: a[:0]}, r"requests is int64 \[0\]"),
        ({"requests": lambda a: a[:2]}, r"prob is float32 \[3, 2, 10\] .*\[2, 2, 10\]"),
        ({"prob": None, "logit": None}, "holds neither prob nor logit"),
        ({"prob": lambda a: a[..., 1:]}, r"prob is float32 \[3, 2, 9\]"),
        ({"logit": lambda a: a[:, :1]}, r"logit is float32 \[3, 1, 10\]"),
        ({"prob": put(-0.5)}, "prob of request 3 layer 1 expert 7 is -0.5 .*0 to its 4 prompt"),
        ({"prob": put(4.5)}, "prob of request 3 layer 1 expert 7 is 4.5"),
        ({"prob": put(np.nan)}, "prob holds NaN"),
        ({"logit": put(-np.inf)}, "logit holds NaN or infinity"),
    ],
)
def test_scores_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        trace_with(tmp_path / "t", broken(**changes))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_refused(tmp_path):
    folder = tmp_path / "t"
    trace_with(folder, scores())
    path = folder / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(InputError, match=r"gate_scores\.npz: checksum"):
        open_trace(folder)
    with pytest.raises(InputError, match=r"not a \.npz archive"):
        open_trace(folder, verify_checksum=False)
    path.unlink()
    with pytest.raises(InputError, match=r"gate_scores\.npz: No such file"):
        open_trace(folder)
    np.savez(path, requests=np.arange(2), weights=np.zeros(3))
    with pytest.raises(InputError, match="unknown array weights"):
        open_trace(folder, verify_checksum=False)
    np.savez(path, prob=np.zeros(3))
    with pytest.raises(InputError, match="array requests is missing"):
        open_trace(folder, verify_checksum=False)
    # Beside a manifest that does not speak of it, the file would go unverified.
    trace_with(folder, None, force=True)
    path.write_bytes(whole)
    with pytest.raises(InputError, match="the manifest knows no such file"):
        open_trace(folder)


@pytest.mark.parametrize("covered", [None, [0, 2, 7]])
def test_importer_takes_gate_scores_where_present(tmp_path, covered):
    r = np.random.default_rng(2)
    m = N if covered is None else len(covered)
    arrays = {
        "topk": np.argsort(r.random((5 * N, LAYERS, EXPERTS)), axis=-1)[..., :3].astype(np.uint8),
        "request_id": np.repeat(np.arange(N), 5),
        "is_decode": np.tile([False, False, False, True, True], N),
        "prompt_len": np.full(N, 3),
        "output_len": np.full(N, 2),
        "domain": np.zeros(N, np.uint8),
        "domain_names": np.array(["p"]),
        "E": np.int64(EXPERTS),
        "gate_prob": r.random((m, LAYERS, EXPERTS)),
    }
    if covered is not None:
        arrays["gate_requests"] = np.array(covered, np.uint16)
    np.savez(tmp_path / "a.npz", **arrays)
    about = {"model": "m", "captured_by": "t", "source_data": "d", "tool_versions": {}}
    trace = import_trace(tmp_path / "a.npz", tmp_path / "t", **about)
    assert trace.gate_scores.requests.tolist() == (covered or list(range(N)))
    np.testing.assert_array_equal(trace.gate_scores.prob, arrays["gate_prob"].astype(np.float32))
    assert trace.gate_scores.logit is None

    arrays["gate_prob"] = arrays["gate_prob"][:, :1]
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(InputError, match=r"prob is float32"):
        import_trace(tmp_path / "b.npz", tmp_path / "u", **about)
    assert not (tmp_path / "u").exists()
    np.savez(tmp_path / "c.npz", **(arrays | {"gate_prob": np.array(["x"])}))
    with pytest.raises(InputError, match="gate_prob"):
        import_trace(tmp_path / "c.npz", tmp_path / "u", **about)
