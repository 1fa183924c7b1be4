"""Importers keep every row, split evenly and refuse what is broken."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.imports.importers import DECODE_ONLY, import_trace
from eldr_sim.traces.routing.manifest import one_phase

from ..on_each import on_each

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
    trace = import_trace(tmp_path / "a.npz", tmp_path / "t", notes="hello", **ABOUT)
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
    [(0.5, [0, 1, 2, 3, 7, 8]), (0.01, [0, 7]), (0.99, [0, 1, 2, 3, 4, 5, 7, 8])],
)
def test_split_is_stratified(tmp_path, fraction, calibration):
    archive(tmp_path / "a.npz")
    trace = import_trace(tmp_path / "a.npz", tmp_path / "t", calibration_fraction=fraction, **ABOUT)
    assert np.flatnonzero(trace.is_calibration).tolist() == calibration


def test_import_replaces_only_when_forced(tmp_path):
    archive(tmp_path / "a.npz")
    import_trace(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    with pytest.raises(InputError, match="exists"):
        import_trace(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    import_trace(tmp_path / "a.npz", tmp_path / "t", force=True, **ABOUT)


@on_each(
    "changes, message",
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
        import_trace(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists()


def test_not_an_archive(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(InputError, match=r"not a \.npz archive"):
        import_trace(tmp_path / "a.npz", tmp_path / "t", **ABOUT)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"not a \.npz archive"):
        import_trace(tmp_path / "b.npy", tmp_path / "t", **ABOUT)
    with pytest.raises(InputError, match="No such file"):
        import_trace(tmp_path / "absent.npz", tmp_path / "t", **ABOUT)


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_bad_fraction(tmp_path, fraction):
    with pytest.raises(InputError, match="calibration_fraction"):
        import_trace(tmp_path / "a.npz", tmp_path / "t", calibration_fraction=fraction, **ABOUT)


def test_a_recorded_archive_is_imported_whole(earlier_recording):
    written, source = earlier_recording
    trace = open_trace(written.path)
    with np.load(source) as data:
        np.testing.assert_array_equal(trace.experts, data["topk"])
        np.testing.assert_array_equal(trace.prompt_len, data["prompt_len"])
        np.testing.assert_array_equal(trace.domain, data["domain"])
    assert np.bincount(trace.domain[trace.is_calibration]).tolist() == [64] * 8


# --- other formats: each written in every way that its tools write it, read back as one -------


def draw(n=6, layers=2, n_experts=12, top_k=3):
    rng = np.random.default_rng(5)
    prompt, output = rng.integers(1, 5, (2, n))
    ids = np.argsort(rng.random((int((prompt + output).sum()), layers, n_experts)), axis=-1)
    return prompt, output, ids[..., :top_k]


DOMAINS = ["q", "p", "q", "p", "q", "q"]


def check(trace, prompt, output, ids, *, domains=("q", "p")):
    np.testing.assert_array_equal(trace.experts, ids)
    assert trace.prompt_len.tolist() == prompt.tolist()
    assert trace.output_len.tolist() == output.tolist()
    assert [trace.domains[d] for d in trace.domain] == DOMAINS
    assert trace.domains == list(domains)


def write_parquet(file, prompt, output, ids, *, decode_only=False, fixed=False, **changes):
    length = prompt + output
    position = np.concatenate([np.arange(n) for n in length])
    columns = {
        "request_id": np.repeat([f"r{i}" for i in range(6)], length),
        "domain": np.repeat(DOMAINS, length),
        "prompt_len": np.repeat(prompt, length),
        "position": position,
    }
    for layer in range(ids.shape[1]):
        kind = pa.list_(pa.int16(), 3) if fixed else pa.list_(pa.int64())
        columns[f"layer_{layer}"] = pa.array(ids[:, layer].tolist(), kind)
    table = pa.table(columns)
    for name, change in changes.items():
        table = table.set_column(table.column_names.index(name), name, change(table.column(name)))
    if decode_only:
        table = table.filter(pa.array(position >= np.repeat(prompt, length)))
    pq.write_table(table, file, row_group_size=7)


@pytest.mark.parametrize("fixed", [False, True])
def test_parquet(tmp_path, fixed):
    prompt, output, ids = draw()
    write_parquet(tmp_path / "a", prompt, output, ids, fixed=fixed)
    trace = import_trace(tmp_path / "a", tmp_path / "t", n_experts=12, ranked=True, **ABOUT)
    check(trace, prompt, output, ids)
    assert trace.request_id == [f"r{i}" for i in range(6)]
    assert trace.manifest.rank_groups == [1, 1, 1]


def test_parquet_of_decodes_only(tmp_path):
    prompt, output, ids = draw()
    write_parquet(tmp_path / "a", prompt, output, ids, decode_only=True)
    trace = import_trace(tmp_path / "a", tmp_path / "t", n_experts=12, **ABOUT)
    decoded = np.concatenate([np.arange(p + o) >= p for p, o in zip(prompt, output, strict=True)])
    check(trace, prompt, output, ids[decoded])
    assert not trace.has_prompts
    assert trace.manifest.rank_groups is None


@on_each(
    "changes, message",
    [
        ({"position": lambda c: pa.array(np.array(c) + 1)}, "requests begin at different places"),
        ({"position": lambda c: pa.array(np.zeros(len(c), int))}, "breaks its order"),
        ({"prompt_len": lambda c: pa.array(np.arange(len(c)))}, "breaks its order"),
        ({"prompt_len": lambda c: pa.array(np.array(c) * 1.0)}, "prompt_len is double"),
        ({"request_id": lambda c: pa.array(["x", "y"] * 50)[: len(c)]}, "not contiguous"),
        ({"domain": lambda c: pa.array(np.arange(len(c)).astype(str))}, "breaks its order"),
        ({"layer_1": lambda c: pa.array([[1]] + [[1, 2, 3]] * (len(c) - 1))}, "differ in length"),
        ({"layer_1": lambda c: pa.array([1] * len(c))}, "layer_1 is int64"),
        ({"layer_0": lambda c: pa.array([None] * len(c), pa.list_(pa.int8()))}, "has nulls"),
        ({"layer_0": lambda c: pa.array([[1, 2, 12]] * len(c))}, "ids span"),
    ],
)
def test_bad_parquet_leaves_nothing(tmp_path, changes, message):
    write_parquet(tmp_path / "a", *draw(), **changes)
    refused(tmp_path, message)


def refused(tmp_path, message, **options):
    with pytest.raises(InputError, match=message) as caught:
        import_trace(tmp_path / "a", tmp_path / "t", **{"n_experts": 12} | ABOUT | options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists()


def npy_bytes(ids):
    file = io.BytesIO()
    np.save(file, ids)
    return file.getvalue()


def as_list(folder, name, ids):
    return {name: ids.tolist()}


def as_npy(folder, name, ids):
    file = f"{name}-{len(list(folder.iterdir()))}.npy"
    np.save(folder / file, ids.astype(np.int16))
    return {name: file}


def as_npz(folder, name, ids):
    file = f"{name}-{len(list(folder.iterdir()))}.npz"
    np.savez(folder / file, ids)
    return {name: file}


def as_base64_npy(folder, name, ids):
    return {name: base64.b64encode(npy_bytes(ids.astype(np.uint8))).decode()}


def as_base64(folder, name, ids):
    plain = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    return {name: plain, "n_layers": 2, "top_k": 3}


@on_each("prompt_apart", [False, True])
@on_each("encode", [as_list, as_npy, as_npz, as_base64_npy, as_base64])
def test_routed_experts(tmp_path, encode, prompt_apart):
    prompt, output, ids = draw()
    lines, row = [], 0
    for i, (p, o) in enumerate(zip(prompt.tolist(), output.tolist(), strict=True)):
        mine = ids[row : row + p + o]
        row += p + o
        entry = {"domain": DOMAINS[i], "request_id": f"r{i}"}
        if prompt_apart:
            entry |= encode(tmp_path, "prompt_routed_experts", mine[:p])
            entry |= encode(tmp_path, "routed_experts", mine[p:])
        else:
            entry |= {"prompt_len": p} | encode(tmp_path, "routed_experts", mine)
        lines.append(json.dumps(entry))
    (tmp_path / "a").write_text("\n".join(lines) + "\n\n")
    trace = import_trace(tmp_path / "a", tmp_path / "t", n_experts=12, **ABOUT)
    check(trace, prompt, output, ids)
    assert trace.request_id == [f"r{i}" for i in range(6)]


ROWS = [[[1, 2]], [[3, 4]]]


@on_each(
    "entry, message",
    [
        ("{", "is not valid JSON"),
        ({"routed_experts": ROWS}, ":2: no domain"),
        ({"domain": "p"}, "no routed_experts"),
        ({"domain": "p", "routed_experts": ROWS}, "prompt_len 0 of 2"),
        ({"domain": "p", "routed_experts": ROWS, "prompt_len": 2}, "prompt_len 2 of 2"),
        ({"domain": "p", "routed_experts": ROWS, "prompt_len": "1"}, "prompt_len '1'"),
        ({"domain": "p", "routed_experts": [[[1], [2]]] * 2, "prompt_len": 1}, "layers and top_k"),
        ({"domain": "p", "routed_experts": [[[1.5]]], "prompt_len": 1}, "is float64"),
        ({"domain": "p", "routed_experts": [[[1]], [[1, 2]]]}, "cannot be read"),
        ({"domain": "p", "routed_experts": "absent.npy", "prompt_len": 1}, "No such file"),
        ({"domain": "p", "routed_experts": "?", "prompt_len": 1}, "cannot be read"),
        ({"domain": "p", "routed_experts": "AAAAAA==", "prompt_len": 1}, "without 'n_"),
        (
            {"domain": "p", "routed_experts": "AAAA", "prompt_len": 1, "n_layers": 1, "top_k": 1},
            "cannot be read",
        ),
        (
            {"domain": "p", "routed_experts": ROWS, "prompt_routed_experts": [[[1]]]},
            "prompt .1, 1, 1., generated",
        ),
    ],
)
def test_bad_routed_experts_leave_nothing(tmp_path, entry, message):
    good = json.dumps({"domain": "p", "routed_experts": ROWS, "prompt_len": 1})
    bad = entry if isinstance(entry, str) else json.dumps(entry)
    (tmp_path / "a").write_text(f"{good}\n{bad}\n")
    refused(tmp_path, message)


def write_fingerprint(folder, prompt, output, ids, **changes):
    folder.mkdir()
    np.savez(folder / "experts.npz", experts=ids.astype(np.uint8))
    columns = {
        "req_id": [str(i) for i in range(6)],
        "domain": DOMAINS,
        "finished": [1, 0, 1, 1, 0, 1],
        "has_repetition": [0, 1, 0, 0, 0, 0],
        "prompt_tokens": prompt.tolist(),
        "routed_tokens": output.tolist(),
        "token_offset": (np.cumsum(output) - output).tolist(),
    } | changes
    columns = {name: values for name, values in columns.items() if values is not None}
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (folder / "requests.csv").write_text(text)


def test_fingerprint_is_decode_only_and_ranked(tmp_path):
    prompt, output, ids = draw()
    ids = ids[: output.sum()]
    write_fingerprint(tmp_path / "a", prompt, output, ids)
    trace = import_trace(tmp_path / "a", tmp_path / "t", n_experts=12, **ABOUT)
    check(trace, prompt, output, ids)
    assert not trace.has_prompts
    assert trace.manifest.rank_groups == [1, 1, 1]
    assert trace.manifest.notes.startswith("2 of 6 answers were cut off and 1 repeat themselves")


def test_first_share_of_a_generation_stands_for_the_prompt(tmp_path):
    prompt, output, ids = draw()
    output[2] = 1
    long = output > 1  # the others are too short to be both
    ids = ids[: output.sum()]
    write_fingerprint(tmp_path / "a", prompt, output, ids)
    trace = import_trace(
        tmp_path / "a", tmp_path / "t", n_experts=12, prompt_share=0.25, encoding="xz", **ABOUT
    )
    rows = output[long]
    assert (trace.prompt_len + trace.output_len).tolist() == rows.tolist()
    assert trace.prompt_len.tolist() == np.maximum((rows * 0.25 + 0.5).astype(int), 1).tolist()
    assert np.array_equal(trace.experts, ids[np.repeat(long, output)])
    manifest = trace.manifest
    assert (manifest.recorded_phase, manifest.prompt_share) == ("generated", 0.25)
    assert trace.has_prompts
    assert manifest.notes.endswith(f"{(~long).sum()} requests of a single token are left out.")
    assert "recorded as generated tokens: the first 25%" in one_phase(manifest)


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_bad_share_for_the_prompt_leaves_nothing(tmp_path, share):
    prompt, output, ids = draw()
    write_fingerprint(tmp_path / "a", prompt, output, ids[: output.sum()])
    refused(tmp_path, "a number between 0 and 1", prompt_share=share)


def test_a_share_for_the_prompt_needs_a_recording_of_one_phase(tmp_path):
    write_parquet(tmp_path / "a", *draw())
    refused(tmp_path, "prompts and generated tokens", prompt_share=0.5, n_experts=12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_offset": [0] * 6}, "do not cover the"),
        ({"prompt_tokens": None}, "column prompt_tokens is missing"),
        ({"prompt_tokens": ["x"] * 6}, "not a number"),
        ({"prompt_tokens": [0] * 6}, "prompt_len of request 0 is 0"),
    ],
)
def test_bad_fingerprint_leaves_nothing(tmp_path, changes, message):
    prompt, output, ids = draw()
    write_fingerprint(tmp_path / "a", prompt, output, ids[: output.sum()], **changes)
    refused(tmp_path, message)


def test_format_is_told_by_content(tmp_path):
    (tmp_path / "a").write_bytes(b"what is this")
    refused(tmp_path, "not a .npz archive, Parquet file, JSON lines")
    refused(tmp_path, "'zip'", format="zip")
    refused(tmp_path, "a Parquet file", format="parquet")
    (tmp_path / "a").unlink()
    refused(tmp_path, "No such file")
    (tmp_path / "a").mkdir()
    refused(tmp_path, "a folder without requests.csv")
    write_parquet(tmp_path / "b", *draw())
    with pytest.raises(InputError, match="does not say how many experts"):
        import_trace(tmp_path / "b", tmp_path / "t", **ABOUT)


def test_command_says_what_a_decode_only_trace_rules_out(tmp_path, run_cli):
    prompt, output, ids = draw()
    write_fingerprint(tmp_path / "a", prompt, output, ids[: output.sum()])
    about = ["--model", "m", "--captured-by", "test", "--source-data", "drawn"]
    code, out, _ = run_cli(
        "trace", "import", tmp_path / "a", "--out", tmp_path / "t", "--experts", 12, *about
    )
    assert code == 0
    assert DECODE_ONLY in out
    code, _, err = run_cli(
        "fit", "--trace", tmp_path / "t", "--decoders", 1, "--out", tmp_path / "f.npz",
        "--workload", "task",
    )  # fmt: skip
    assert code == 2
    assert err.count("\n") == 1
