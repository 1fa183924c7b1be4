"""The NumPy importer: it keeps every row, splits evenly, and made the embedded trace."""

from pathlib import Path

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.format import open_trace
from eldr_sim.traces.importers import import_npz

ABOUT = {"model": "m", "captured_by": "test", "source_data": "drawn", "tool_versions": {"t": "1"}}


def archive(file, *, n=10, changes=None):
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, 5, n)
    output = rng.integers(1, 5, n)
    tokens = int((prompt + output).sum())
    data = {
        "topk": np.argsort(rng.random((tokens, 2, 12)), axis=-1)[..., :3].astype(np.uint8),
        "request_id": np.repeat(np.arange(n), prompt + output),
        "is_decode": np.concatenate(
            [[False] * p + [True] * o for p, o in zip(prompt, output, strict=True)]
        ),
        "prompt_len": prompt.astype(np.uint16),
        "output_len": output.astype(np.uint16),
        "domain": np.array([0] * 7 + [1] * (n - 7), np.uint8),
        "domain_names": np.array(["p", "q"]),
        "E": np.int64(12),
    } | (changes or {})
    np.savez(file, **{k: v for k, v in data.items() if v is not None})
    return data


def test_import_keeps_every_row(tmp_path):
    data = archive(tmp_path / "a.npz")
    trace = import_npz(tmp_path / "a.npz", tmp_path / "t", notes="hello", **ABOUT)
    np.testing.assert_array_equal(trace.experts, data["topk"])
    np.testing.assert_array_equal(trace.prompt_len, data["prompt_len"])
    np.testing.assert_array_equal(trace.output_len, data["output_len"])
    np.testing.assert_array_equal(trace.domain, data["domain"])
    for q in range(10):
        assert data["request_id"][trace.first_row[q]] == q
        first, _ = trace.decode_window([q])
        assert not data["is_decode"][first[0]]
        assert data["is_decode"][first[0] + 1]
    assert trace.domains == ["p", "q"]
    assert trace.manifest.provenance == "imported"
    assert trace.manifest.notes == "hello"
    assert trace.manifest.tool_versions["t"] == "1"
    assert trace.request_id[:2] == ["p-0000", "p-0001"]


@pytest.mark.parametrize(
    ("fraction", "calibration"),
    [
        (0.5, [0, 1, 2, 3, 7, 8]),
        (0.01, [0, 7]),
        (0.99, [0, 1, 2, 3, 4, 5, 7, 8]),
    ],
)
def test_split_is_stratified(tmp_path, fraction, calibration):
    archive(tmp_path / "a.npz")
    trace = import_npz(tmp_path / "a.npz", tmp_path / "t", calibration_fraction=fraction, **ABOUT)
    assert np.flatnonzero(trace.is_calibration).tolist() == calibration


def test_import_replaces_only_when_forced(tmp_path):
    archive(tmp_path / "a.npz")
    import_npz(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    with pytest.raises(InputError, match="exists"):
        import_npz(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    import_npz(tmp_path / "a.npz", tmp_path / "t", force=True, **ABOUT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": None}, "array topk is missing"),
        ({"E": None}, "array E is missing"),
        ({"E": np.int64(5)}, "ids span"),
        ({"domain": np.zeros(9, np.uint8)}, "have 9, 10, 10 entries"),
        ({"domain": np.full(10, 2, np.uint8)}, "outside domain_names"),
        ({"prompt_len": np.zeros(10, np.uint16)}, "a length is 0"),
        ({"output_len": np.full(10, 9, np.uint16)}, "do not follow prompt_len"),
        ({"is_decode": np.zeros(3, bool)}, "do not follow prompt_len"),
        ({"domain_names": np.array([None])}, "not a .npz archive of plain arrays"),
    ],
)
def test_bad_archive_leaves_nothing(tmp_path, changes, message):
    archive(tmp_path / "a.npz", changes=changes)
    with pytest.raises(InputError, match=message) as caught:
        import_npz(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_not_an_archive(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(InputError, match=r"not a \.npz archive"):
        import_npz(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"not a \.npz archive"):
        import_npz(tmp_path / "b.npy", tmp_path / "t", **ABOUT)
    with pytest.raises(InputError, match="No such file"):
        import_npz(tmp_path / "absent.npz", tmp_path / "t", **ABOUT)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_bad_fraction(tmp_path, fraction):
    with pytest.raises(InputError, match="calibration_fraction"):
        import_npz(tmp_path / "a.npz", tmp_path / "t", calibration_fraction=fraction, **ABOUT)


def test_embedded_trace_is_this_import_of_the_reference_model():
    source = (
        Path(__file__).parents[1].parent
        / "shared"
        / "data"
        / "routing"
        / "reference_moe"
        / "sampled.npz"
    )
    if not source.is_file():
        pytest.skip("the reference model's archive is not here")
    trace = open_trace("reference-moe")
    with np.load(source) as data:
        np.testing.assert_array_equal(trace.experts, data["topk"])
        np.testing.assert_array_equal(trace.prompt_len, data["prompt_len"])
        np.testing.assert_array_equal(trace.domain, data["domain"])
