"""Trace format v2: compressed ids, rank groups, a smaller top-k, and traces without prompts."""

import hashlib
import json
import lzma
import subprocess
from io import BytesIO
from shutil import which

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.simulator.setup.replay import fit_trace, make_replay
from eldr_sim.traces.prompts import PromptSignatures
from eldr_sim.traces.routing.bitsets import pack_bits
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.format import bit_sets, open_trace
from eldr_sim.traces.routing.manifest import FILE_NAMES, load_ids, save_ids
from eldr_sim.traces.routing.writer import write_trace

from ..on_each import on_each


def draw_ids(rng, tokens, layers, n_experts, top_k):
    """Ids in the order of drawn scores, the highest first."""
    return np.argsort(rng.random((tokens, layers, n_experts)), axis=-1)[..., :top_k]


def make_trace(out, *, seed=0, lengths=((3, 2), (1, 4), (5, 1)), prompt_rows=True, **changes):
    rng = np.random.default_rng(seed)
    n = len(lengths)
    rows = sum(prompt * prompt_rows + output for prompt, output in lengths)
    arguments = {
        "experts": draw_ids(rng, rows, 2, 70, 4),
        "request_id": [f"r{i}" for i in range(n)],
        "domain": [("a", "b")[i % 2] for i in range(n)],
        "prompt_len": [p for p, _ in lengths],
        "output_len": [o for _, o in lengths],
        "is_calibration": [i % 3 == 0 for i in range(n)],
        "model": "m",
        "n_experts": 70,
        "domains": ["a", "b"],
        "captured_by": "test",
        "source_data": "drawn",
        "tool_versions": {},
        "provenance": "synthetic",
        "rank_groups": [1] * 4,
        "prompt_rows": prompt_rows,
    } | changes
    return write_trace(out, **arguments)


# --- the file of ids --------------------------------------------------------------------------


@given(
    tokens=st.integers(1, 40),
    layers=st.integers(1, 4),
    n_experts=st.sampled_from([1, 8, 128, 256, 257, 1000]),
    top_k=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30)
def test_ids_survive_each_encoding(tmp_path_factory, tokens, layers, n_experts, top_k, seed):
    folder = tmp_path_factory.mktemp("ids")
    ids = draw_ids(np.random.default_rng(seed), tokens, layers, n_experts, min(top_k, n_experts))
    ids = ids.astype(np.uint8 if n_experts <= 256 else np.uint16)
    for encoding, name in FILE_NAMES.items():
        save_ids(folder / name, ids, encoding)
        back = load_ids(folder / name, encoding)
        assert back.dtype == ids.dtype
        np.testing.assert_array_equal(back, ids)


@pytest.mark.skipif(which("xz") is None, reason="no xz program here")
def test_xz_opens_the_file(tmp_path):
    ids = draw_ids(np.random.default_rng(0), 100, 3, 128, 8).astype(np.uint8)
    save_ids(tmp_path / "experts.npy.xz", ids, "xz")
    subprocess.run(["xz", "-d", tmp_path / "experts.npy.xz"], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "experts.npy"), ids)


# --- compressed traces -------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path):
    return make_trace(tmp_path / "plain")


@pytest.fixture
def compressed(tmp_path):
    return make_trace(tmp_path / "compressed", encoding="xz")


def halved(ids):
    """Ids that tell which two of four came first, and no more."""
    return np.concatenate([np.sort(ids[..., :2]), np.sort(ids[..., 2:])], axis=-1)


@pytest.mark.parametrize("prompt_rows", [True, False])
def test_compression_loses_nothing(tmp_path, prompt_rows):
    plain, compressed = (
        make_trace(tmp_path / encoding, encoding=encoding, prompt_rows=prompt_rows)
        for encoding in ("npy", "xz")
    )
    assert sorted(p.name for p in compressed.path.iterdir()) == [
        "experts.npy.xz",
        "manifest.json",
        "requests.parquet",
    ]
    np.testing.assert_array_equal(compressed.experts, plain.experts)
    same = {"checksum", "encoding"}
    assert compressed.manifest.model_dump(exclude=same) == plain.manifest.model_dump(exclude=same)
    every = np.arange(3)
    if prompt_rows:
        np.testing.assert_array_equal(compressed.prompt_counts(every), plain.prompt_counts(every))
    activation = compressed.decode_activation(every)
    np.testing.assert_array_equal(activation, plain.decode_activation(every))
    np.testing.assert_array_equal(compressed.bits, pack_bits(plain.experts, 70))


def test_requests_may_stand_in_another_order_than_their_rows(plain):
    """Only the rows of a request are contiguous."""
    file = plain.path / "requests.parquet"
    pq.write_table(pq.read_table(file).take([2, 0, 1]), file)
    manifest = json.loads((plain.path / "manifest.json").read_text())
    manifest["requests_checksum"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (plain.path / "manifest.json").write_text(json.dumps(manifest))
    shuffled = open_trace(plain.path)
    assert shuffled.request_id == ["r2", "r0", "r1"]
    assert shuffled.first_row.tolist() == [10, 0, 5]
    np.testing.assert_array_equal(shuffled.prompt_counts([0, 1, 2]), plain.prompt_counts([2, 0, 1]))


def test_version_1_is_read(plain):
    """A folder that an older eldr-sim wrote: no field of version 2 in its manifest."""
    file = plain.path / "manifest.json"
    manifest = json.loads(file.read_text())
    for name in ("encoding", "rank_groups", "prompt_rows"):
        del manifest[name]
    file.write_text(json.dumps(manifest | {"format_version": 1}))
    trace = open_trace(plain.path)
    assert trace.manifest.rank_groups is None
    assert trace.has_prompts
    np.testing.assert_array_equal(trace.experts, plain.experts)


def write_compressed(folder, data, **changes):
    (folder / "experts.npy.xz").write_bytes(data)
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text()) | {"checksum": hashlib.sha256(data).hexdigest()}
    file.write_text(json.dumps(manifest | changes))


def npy(ids):
    file = BytesIO()
    np.save(file, ids)
    return file.getvalue()


@on_each(
    "damage, message",
    [
        (lambda data, ids: data[:-40], r"truncated or not a \.npy\.xz file"),
        (lambda data, ids: b"no xz", r"truncated or not a \.npy\.xz file"),
        (lambda data, ids: b"", r"truncated or not a \.npy\.xz file"),
        (lambda data, ids: data[:200] + b"?" + data[201:], r"truncated or not a \.npy\.xz file"),
        (lambda data, ids: lzma.compress(b"no npy"), r"truncated or not a \.npy\.xz file"),
        (lambda data, ids: lzma.compress(npy(ids)[:-1]), r"truncated or not a \.npy\.xz file"),
        (lambda data, ids: lzma.compress(npy(ids[:-1])), r"shape \[15, 2, 4\]"),
        (lambda data, ids: lzma.compress(npy(ids.astype(int))), "dtype int64"),
        (lambda data, ids: lzma.compress(npy(ids + 60)), r"expert \d+ at row \d+ layer \d"),
        (lambda data, ids: lzma.compress(npy(ids * 0 + 5)), "expert 5 twice at row 0 layer 0"),
    ],
)
def test_damaged_compressed_ids_are_told_in_one_line(compressed, damage, message):
    """Told by whatever needs the ids first: also the bit sets, where no cache is there."""
    data = (compressed.path / "experts.npy.xz").read_bytes()
    write_compressed(compressed.path, damage(data, np.array(compressed.experts)))
    for need in (lambda trace: trace.experts, bit_sets):
        with pytest.raises(InputError, match=message) as caught:
            need(open_trace(compressed.path))
        assert "\n" not in str(caught.value)


def test_changed_compressed_ids_are_told_when_opened(compressed):
    file = compressed.path / "experts.npy.xz"
    ids = np.array(compressed.experts)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match="truncated or not"):
        open_trace(compressed.path)
    file.write_bytes(lzma.compress(npy(ids)))
    with pytest.raises(InputError, match=r"checksum \w{12}"):
        open_trace(compressed.path)


def test_cached_bit_sets_spare_the_ids(plain, compressed, monkeypatch):
    want = np.array(compressed.bits)
    monkeypatch.setattr("eldr_sim.traces.routing.format.load_ids", None)
    again = open_trace(compressed.path)
    np.testing.assert_array_equal(again.bits, want)
    np.testing.assert_array_equal(again.prompt_counts([0, 1, 2]), plain.prompt_counts([0, 1, 2]))


# --- a smaller top-k --------------------------------------------------------------------------


def test_smaller_top_k_takes_the_experts_ranked_first(plain, tmp_path):
    ids = halved(plain.experts)
    halves = make_trace(tmp_path / "halves", experts=ids, rank_groups=[2, 2])
    for trace in (plain, halves):
        two = trace.with_top_k(2)
        assert two.top_k == 2
        first = np.sort(plain.experts[..., :2])
        np.testing.assert_array_equal(np.sort(two.experts), first)
        np.testing.assert_array_equal(two.bits, pack_bits(first, 70))
        np.testing.assert_array_equal(trace.bits, pack_bits(plain.experts, 70))
        assert two.prompt_counts([0, 1, 2]).sum() == 9 * 2 * 2
    assert plain.with_top_k(3).top_k == 3
    with pytest.raises(InputError, match=r"does not say which 3 came first .allowed: top-2, top-4"):
        halves.with_top_k(3)
    none = make_trace(tmp_path / "none", rank_groups=[4])
    assert none.manifest.rank_groups is None
    with pytest.raises(InputError, match=r"does not say which 2 came first .allowed: top-4.$"):
        none.with_top_k(2)


def test_model_of_smaller_top_k_replays_the_first_experts(tmp_path):
    """Mixtral-8x7B takes two of eight experts; its replay unites just those two of each token."""
    model = load_model("Mixtral-8x7B")
    ids = draw_ids(np.random.default_rng(1), 16, 2, 8, 4)
    trace = make_trace(tmp_path / "t", experts=ids, n_experts=8)
    fitted = fit_trace(trace, model)
    replay = make_replay(fitted, 2, np.array([0]))
    # Two trace layers on two model layers: no tile, no rotation. Row 0 is the last prompt token.
    for step, row in enumerate(range(2, 5)):
        for layer in range(2):
            want = sum(1 << int(e) for e in ids[row, layer, :2])
            assert int(replay.bits[replay.first_row[0] + step, layer]) == want
    unranked = make_trace(tmp_path / "u", experts=ids, n_experts=8, rank_groups=None)
    with pytest.raises(InputError, match="does not say which 2 came first"):
        fit_trace(unranked, model)


# --- traces without prompts -------------------------------------------------------------------


@pytest.fixture
def decode_only(tmp_path):
    return make_trace(tmp_path / "decode", prompt_rows=False)


def test_decode_only_trace_has_its_decodes(decode_only):
    assert decode_only.manifest.n_tokens == 7
    assert decode_only.prompt_len.tolist() == [3, 1, 5]
    first, length = decode_only.decode_window([0, 1, 2])
    assert first.tolist() == [0, 2, 6]
    assert length.tolist() == [2, 4, 1]
    activation = decode_only.decode_activation([1])[0]
    for layer in range(2):
        want = np.bincount(decode_only.experts[2:6, layer].ravel(), minlength=70) / 4
        np.testing.assert_allclose(activation[layer], want)


def test_decode_only_trace_says_what_it_rules_out(decode_only):
    with pytest.raises(InputError, match="decode-only: no experts of prompt tokens"):
        decode_only.prompt_counts([0])
    calibration = calibration_set(decode_only, workload="a.log", domain_mix={"a": 1.0})
    assert calibration.domain.tolist() == [0]
    with pytest.raises(InputError, match="the trace has no experts of prompt tokens"):
        calibration.scores("count")
    number, counts = PromptSignatures(decode_only)(((0, 0, 3),))
    assert (number, counts) == (0, None)
