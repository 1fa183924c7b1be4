"""Routing trace format v2: what is written is read back, and every defect is told in one line."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.format import builtin_traces, open_trace
from eldr_sim.traces.routing.writer import write_trace

from ..on_each import on_each
from ..paths import ROOT


def draw_experts(rng, tokens, layers, n_experts, top_k):
    """Distinct experts per token and layer, in random order."""
    scores = rng.random((tokens, layers, n_experts))
    return np.argsort(scores, axis=-1)[..., :top_k]


def small_trace(
    out,
    *,
    seed=0,
    lengths=((3, 2), (1, 4), (5, 1)),
    layers=2,
    n_experts=10,
    top_k=3,
    force=False,
    **changes,
):
    rng = np.random.default_rng(seed)
    n = len(lengths)
    arguments = {
        "experts": draw_experts(rng, sum(map(sum, lengths)), layers, n_experts, top_k),
        "request_id": [f"r{i}" for i in range(n)],
        "domain": [("a", "b")[i % 2] for i in range(n)],
        "prompt_len": [p for p, _ in lengths],
        "output_len": [o for _, o in lengths],
        "is_calibration": [i % 3 == 0 for i in range(n)],
        "model": "m",
        "n_experts": n_experts,
        "domains": ["a", "b"],
        "captured_by": "test",
        "source_data": "drawn",
        "tool_versions": {},
        "provenance": "synthetic",
    } | changes
    return write_trace(out, force=force, **arguments)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6),
    layers=st.integers(1, 3),
    n_experts=st.sampled_from([1, 7, 64, 256, 257, 300]),
    top_k=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_round_trip_and_counts(tmp_path_factory, lengths, layers, n_experts, top_k, seed):
    top_k = min(top_k, n_experts)
    folder = tmp_path_factory.mktemp("trace")
    written = small_trace(
        folder / "t", seed=seed, lengths=lengths, layers=layers, n_experts=n_experts, top_k=top_k
    )
    trace = open_trace(folder / "t")
    experts = draw_experts(
        np.random.default_rng(seed), sum(map(sum, lengths)), layers, n_experts, top_k
    )
    assert trace.experts.dtype == (np.uint8 if n_experts <= 256 else np.uint16)
    assert isinstance(trace.experts, np.memmap)
    np.testing.assert_array_equal(trace.experts, experts)
    assert written.manifest == trace.manifest
    assert trace.prompt_len.tolist() == [p for p, _ in lengths]

    # Counts against plain loops over the rows.
    requests = np.arange(len(lengths))[::-1]
    counts = trace.prompt_counts(requests)
    activation = trace.decode_activation(requests)
    first, window = trace.decode_window(requests)
    for i, q in enumerate(requests):
        row = sum(map(sum, lengths[:q]))
        prompt, output = lengths[q]
        want = np.zeros((layers, n_experts))
        chosen = np.zeros((layers, n_experts))
        for layer in range(layers):
            for r in range(row, row + prompt):
                want[layer, experts[r, layer]] += 1
            for r in range(row + prompt, row + prompt + output):
                chosen[layer, experts[r, layer]] += 1
        np.testing.assert_array_equal(counts[i], want)
        np.testing.assert_allclose(activation[i], chosen / output, rtol=1e-6)
        assert first[i] == row + prompt - 1
        assert window[i] == output + 1
    assert counts.dtype == np.uint16
    assert activation.dtype == np.float32


def test_long_prompts_count_in_32_bits(tmp_path):
    trace = small_trace(tmp_path / "t", lengths=[(70_000, 1)], layers=1, n_experts=1, top_k=1)
    counts = trace.prompt_counts([0])
    assert counts.dtype == np.uint32
    assert counts[0, 0, 0] == 70_000


def test_requests_of(tmp_path):
    trace = small_trace(tmp_path / "t", lengths=[(1, 1)] * 8)
    assert trace.requests_of(["a"], calibration=True).tolist() == [0, 6]
    assert trace.requests_of(["b", "a"], calibration=False).tolist() == [1, 2, 4, 5, 7]
    with pytest.raises(InputError, match="'c' is not in trace"):
        trace.requests_of(["c"], calibration=True)


# --- defects: each makes one thing wrong in an otherwise valid folder -------------------------


def edit_manifest(folder, **changes):
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.update(changes)
    file.write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))


def edit_requests(folder, **columns):
    """Replace columns and keep the checksum right, so that the next check has to speak."""
    file = folder / "requests.parquet"
    table = pq.read_table(file)
    for name, values in columns.items():
        at = table.column_names.index(name)
        if values is None:
            table = table.remove_column(at)
        else:
            kind = table.schema.field(name).type
            values = values if isinstance(values, pa.Array) else pa.array(values, type=kind)
            table = table.set_column(at, name, values)
    pq.write_table(table, file)
    edit_manifest(folder, requests_checksum=hashlib.sha256(file.read_bytes()).hexdigest())


def edit_experts(folder, change):
    file = folder / "experts.npy"
    np.save(file, change(np.load(file)))
    edit_manifest(folder, checksum=hashlib.sha256(file.read_bytes()).hexdigest())


def put(index, value):
    def change(experts):
        experts[index] = value
        return experts

    return change


def truncate(folder, name, keep):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * keep)])


def flip_last_byte(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)


# small_trace: rows 0-4 of r0, 5-9 of r1, 10-15 of r2
DEFECTS = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: No such file"),
    "no requests": (lambda f: (f / "requests.parquet").unlink(), "requests.parquet: No such file"),
    "no experts": (lambda f: (f / "experts.npy").unlink(), "experts.npy: No such file"),
    "bad json": (lambda f: (f / "manifest.json").write_text("{"), "not valid JSON"),
    "bad utf-8": (lambda f: (f / "manifest.json").write_bytes(b"\xff"), "is not UTF-8 text"),
    "json list": (lambda f: (f / "manifest.json").write_text("[]"), "holds a JSON list"),
    "format version": (
        lambda f: edit_manifest(f, format_version=3),
        r"format_version 3 \(allowed: 1, 2\)",
    ),
    "format version missing": (
        lambda f: edit_manifest(f, format_version=None),
        "format_version None",
    ),
    "unknown field": (lambda f: edit_manifest(f, extra=1), "extra: Extra inputs"),
    "field missing": (lambda f: edit_manifest(f, model=None), "model: Field required"),
    "bad provenance": (lambda f: edit_manifest(f, provenance="guess"), "provenance: "),
    "bad n_experts": (lambda f: edit_manifest(f, n_experts=0), "n_experts: "),
    "top_k": (lambda f: edit_manifest(f, n_experts=2), "top_k 3 exceeds n_experts 2"),
    "domain twice": (lambda f: edit_manifest(f, domains=["a", "b", "a"]), "domains are not unique"),
    "encoding": (lambda f: edit_manifest(f, encoding="zip"), "encoding: "),
    "no packed experts": (lambda f: edit_manifest(f, encoding="xz"), "npy.xz: No such file"),
    "rank groups": (lambda f: edit_manifest(f, rank_groups=[2, 2]), r"rank groups \[2, 2\]"),
    "rank group of none": (lambda f: edit_manifest(f, rank_groups=[3, 0]), r"rank groups \[3, 0\]"),
    "no prompt rows": (lambda f: edit_manifest(f, prompt_rows=False), "rows 2 to 4 before request"),
    "wrong checksum": (lambda f: flip_last_byte(f, "experts.npy"), r"experts.npy: checksum \w{12}"),
    "wrong requests checksum": (
        lambda f: flip_last_byte(f, "requests.parquet"),
        r"requests.parquet: checksum \w{12}",
    ),
    "truncated experts": (lambda f: truncate(f, "experts.npy", 0.9), "truncated or not a .npy"),
    "empty experts": (lambda f: truncate(f, "experts.npy", 0), "truncated or not a .npy"),
    "shape": (
        lambda f: edit_experts(f, lambda e: e[:, :1]),
        r"shape \[16, 1, 3\] \(allowed: "
        r"\[16, 2, 3\]",
    ),
    "rows": (lambda f: edit_experts(f, lambda e: e[:-1]), r"shape \[15, 2, 3\]"),
    "dtype": (lambda f: edit_experts(f, lambda e: e.astype(np.int64)), "dtype int64"),
    "fortran": (lambda f: edit_experts(f, np.asfortranarray), "Fortran order"),
    "expert out of range": (
        lambda f: edit_experts(f, put((7, 1, 0), 10)),
        "expert 10 at row 7 layer 1",
    ),
    "expert twice": (
        lambda f: edit_experts(f, put((9, 0, slice(None)), [4, 2, 4])),
        "expert 4 twice at row 9 layer 0",
    ),
    "column missing": (lambda f: edit_requests(f, session=None), "column session is missing"),
    "column type": (
        lambda f: edit_requests(f, first_row=pa.array([0.0, 5.0, 10.0])),
        "column first_row is double",
    ),
    "null": (lambda f: edit_requests(f, prompt_len=[3, None, 5]), "with 1 nulls"),
    "request count": (lambda f: edit_manifest(f, n_requests=4), "3 requests .allowed: 4"),
    "unknown domain": (
        lambda f: edit_requests(f, domain=["a", "c", "a"]),
        r"unknown domain 'c' \(allowed: a, b\)",
    ),
    "unknown split": (
        lambda f: edit_requests(f, split=["serving", "x", "serving"]),
        "unknown split 'x'",
    ),
    "id twice": (lambda f: edit_requests(f, request_id=["r0", "r1", "r0"]), "not unique"),
    "zero prompt": (
        lambda f: edit_requests(f, prompt_len=[3, 0, 5]),
        "prompt_len of request r1 is 0",
    ),
    "negative output": (
        lambda f: edit_requests(f, output_len=[2, 4, -1]),
        "output_len of request r2 is -1",
    ),
    "overlap": (
        lambda f: edit_requests(f, first_row=[0, 4, 10]),
        "request r1 start at 4, before row 5",
    ),
    "gap": (lambda f: edit_requests(f, output_len=[1, 4, 1]), "rows 4 to 4 before request r1"),
    "negative row": (lambda f: edit_requests(f, first_row=[-1, 5, 10]), "start at -1, before row"),
    "beyond the end": (lambda f: edit_requests(f, output_len=[2, 4, 2]), "end at 17"),
    "before the end": (lambda f: edit_requests(f, prompt_len=[3, 1, 4]), "end at 15"),
}


@on_each("name", DEFECTS)
def test_defect_is_told_in_one_line(tmp_path, name):
    breaks, message = DEFECTS[name]
    small_trace(tmp_path / "t")
    breaks(tmp_path / "t")
    with pytest.raises(InputError, match=message) as caught:
        open_trace(tmp_path / "t")
    assert "\n" not in str(caught.value)


def test_requests_file_that_is_not_parquet(tmp_path):
    small_trace(tmp_path / "t")
    file = tmp_path / "t" / "requests.parquet"
    file.write_bytes(b"no parquet here")
    edit_manifest(tmp_path / "t", requests_checksum=hashlib.sha256(file.read_bytes()).hexdigest())
    with pytest.raises(InputError, match=r"requests\.parquet: ") as caught:
        open_trace(tmp_path / "t")
    assert "\n" not in str(caught.value)


def test_verify_checksum_off_skips_the_content_checks_only(tmp_path):
    small_trace(tmp_path / "t")
    flip_last_byte(tmp_path / "t", "experts.npy")
    open_trace(tmp_path / "t", verify_checksum=False)
    edit_manifest(tmp_path / "t", n_tokens=17)
    with pytest.raises(InputError, match="shape"):
        open_trace(tmp_path / "t", verify_checksum=False)


def test_unknown_name_lists_the_builtin_ones(tmp_path):
    with pytest.raises(InputError, match=r"neither an embedded trace nor a folder.*reference-moe"):
        open_trace(tmp_path / "absent")


# --- writing: whole or not at all -------------------------------------------------------------


def test_write_refuses_and_replaces(tmp_path):
    small_trace(tmp_path / "t", seed=1)
    with pytest.raises(InputError, match="exists"):
        small_trace(tmp_path / "t", seed=2)
    replaced = small_trace(tmp_path / "t", seed=2, force=True)
    np.testing.assert_array_equal(
        replaced.experts, draw_experts(np.random.default_rng(2), 16, 2, 10, 3)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "experts.npy",
        "manifest.json",
        "requests.parquet",
    ]


@on_each(
    "changes, message",
    [
        ({"experts": np.full((16, 2, 3), 10)}, "experts: ids span 10..10"),
        ({"experts": np.full((16, 2, 3), -1)}, "experts: ids span -1..-1"),
        ({"experts": np.zeros((16, 2))}, "experts: got float64"),
        ({"experts": np.zeros((16, 2, 3), int)}, "expert 0 twice at row 0 layer 0"),
        ({"experts": np.zeros((0, 2, 3), int)}, "n_tokens"),
        ({"domain": ["a", "b", "z"]}, "unknown domain 'z'"),
        ({"prompt_len": [3, 1]}, "prompt_len: has 2 entries for 3 requests"),
        ({"prompt_len": [3, 1, 6]}, "end at 17"),
        ({"is_calibration": [True]}, "split: has 1 entries for 3 requests"),
        ({"model": ""}, "model"),
    ],
)
def test_invalid_trace_leaves_nothing_behind(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        small_trace(tmp_path / "t", **changes)
    assert list(tmp_path.iterdir()) == []


def test_failed_replacement_keeps_the_old_trace(tmp_path):
    small_trace(tmp_path / "t", seed=1)
    with pytest.raises(InputError):
        small_trace(tmp_path / "t", seed=2, force=True, domain=["a", "b", "z"])
    experts = open_trace(tmp_path / "t").experts
    np.testing.assert_array_equal(experts, draw_experts(np.random.default_rng(1), 16, 2, 10, 3))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_crash_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    def full_disk(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("pyarrow.parquet.write_table", full_disk)
    with pytest.raises(InputError, match="disk full"):
        small_trace(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_sessions_are_kept(tmp_path):
    assert small_trace(tmp_path / "own").session.tolist() == [0, 1, 2]
    assert small_trace(tmp_path / "given", session=[7, 7, 8]).session.tolist() == [7, 7, 8]


# --- the embedded trace -----------------------------------------------------------------------


def test_embedded_trace():
    assert builtin_traces() == ["gpt-oss-20b", "qwen3-30b-a3b", "reference-moe"]
    trace = open_trace()
    assert (trace.n_requests, trace.n_layers, trace.n_experts, trace.top_k) == (2300, 10, 128, 8)
    for name in trace.domains:
        assert len(trace.requests_of([name], calibration=True)) in (131, 132)
        assert len(trace.requests_of([name], calibration=False)) in (156, 157)
    scored = trace.gate_scores.requests
    assert scored.tolist() == list(range(256))
    assert trace.is_calibration[scored].all()
    assert np.bincount(trace.domain[scored]).tolist() == [32] * 8
    # What a wheel carries: 20.2 MB of experts, 2.6 MB of gate scores.
    assert sum(p.stat().st_size for p in trace.path.iterdir()) < 25e6


def test_embedded_trace_is_packaged():
    """The build configuration names every file that the trace needs."""
    text = (ROOT / "pyproject.toml").read_text()
    for pattern in ("manifest.json", "requests.parquet", "experts.npy*", "gate_scores.npz"):
        assert f'"data/*/{pattern}"' in text
        assert len(list((ROOT / "traces" / "data" / "reference_moe").glob(pattern))) == 1


def test_force_spares_a_folder_that_is_no_trace(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="is not a trace"):
        write_trace(
            tmp_path,
            experts=np.zeros((2, 1, 1), np.uint8),
            request_id=["a"],
            domain=["d"],
            prompt_len=[1],
            output_len=[1],
            is_calibration=[False],
            model="m",
            n_experts=2,
            domains=["d"],
            captured_by="test",
            source_data="test",
            tool_versions={},
            provenance="synthetic",
            force=True,
        )
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
