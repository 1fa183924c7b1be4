"""Trace format v2: compressed ids, rank groups, a smaller top-k, and traces without prompts."""

import hashlib
import json
import lzma
import subprocess
from io import BytesIO
from itertools import accumulate, pairwise
from shutil import which

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.simulator.replay import fit_trace, make_replay
from eldr_sim.traces.bitsets import bit_sets, pack_bits
from eldr_sim.traces.calibration import calibration_set
from eldr_sim.traces.encoding import FILE_NAMES, load_ids, regroup, save_ids
from eldr_sim.traces.format import open_trace
from eldr_sim.traces.prompts import PromptSignatures
from eldr_sim.traces.writer import pack_trace, write_trace


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


@given(
    cuts=st.sets(st.integers(1, 7)),
    keep=st.data(),
    seed=st.integers(0, 2**31),
)
def test_regroup_keeps_what_it_promises(cuts, keep, seed):
    """Each wanted group holds the ids of the gate's order at its places, ascending."""
    ranked = draw_ids(np.random.default_rng(seed), 5, 2, 30, 8)
    have = [b - a for a, b in pairwise([0, *sorted(cuts), 8])]
    kept = keep.draw(st.sets(st.sampled_from(sorted(cuts)))) if cuts else set()
    want = [b - a for a, b in pairwise([0, *sorted(kept), 8])]
    out = regroup(regroup(ranked, [1] * 8, have), have, want)
    for start, stop in pairwise([0, *accumulate(want)]):
        np.testing.assert_array_equal(out[..., start:stop], np.sort(ranked[..., start:stop]))


@pytest.mark.parametrize(
    ("have", "want"), [(None, [4, 4]), ([4, 4], [2, 6]), ([4, 4], [1] * 8), ([4, 4], [4, 5])]
)
def test_regroup_cannot_invent_an_order(have, want):
    with pytest.raises(InputError, match="rank_groups"):
        regroup(np.arange(8).reshape(1, 1, 8), have, want)


# --- packed traces ----------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path):
    return make_trace(tmp_path / "plain")


def test_pack_keeps_everything(plain, tmp_path):
    packed = pack_trace(plain, tmp_path / "packed")
    assert sorted(p.name for p in packed.path.iterdir()) == [
        "experts.npy.xz",
        "manifest.json",
        "requests.parquet",
    ]
    np.testing.assert_array_equal(packed.experts, plain.experts)
    same = {"checksum", "encoding"}
    assert packed.manifest.model_dump(exclude=same) == plain.manifest.model_dump(exclude=same)
    every = np.arange(3)
    np.testing.assert_array_equal(packed.prompt_counts(every), plain.prompt_counts(every))
    np.testing.assert_array_equal(packed.decode_activation(every), plain.decode_activation(every))
    np.testing.assert_array_equal(packed.bits, pack_bits(plain.experts, 70))


def test_pack_with_less_rank(plain, tmp_path):
    halves = pack_trace(plain, tmp_path / "halves", rank_groups=[2, 2])
    assert halves.manifest.rank_groups == [2, 2]
    np.testing.assert_array_equal(halves.experts, regroup(plain.experts, [1] * 4, [2, 2]))
    none = pack_trace(halves, tmp_path / "none", rank_groups=[4])
    assert none.manifest.rank_groups is None
    np.testing.assert_array_equal(none.experts, np.sort(plain.experts))
    with pytest.raises(InputError, match=r"rank_groups: \[1, 3\] of ids ranked \[2, 2\]"):
        pack_trace(halves, tmp_path / "finer", rank_groups=[1, 3])
    assert not (tmp_path / "finer").exists()


def test_pack_puts_the_rows_in_the_order_of_the_requests(plain, tmp_path):
    """Only the rows of a request are contiguous; the requests may lie in any order."""
    file = plain.path / "requests.parquet"
    pq.write_table(pq.read_table(file).take([2, 0, 1]), file)
    manifest = json.loads((plain.path / "manifest.json").read_text())
    manifest["requests_checksum"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (plain.path / "manifest.json").write_text(json.dumps(manifest))
    shuffled = open_trace(plain.path)
    packed = pack_trace(shuffled, tmp_path / "packed")
    assert packed.request_id == ["r2", "r0", "r1"]
    for q in range(3):
        first, n = (int(x[0]) for x in shuffled.recorded_rows([q]))
        row = int(packed.first_row[q])
        np.testing.assert_array_equal(
            packed.experts[row : row + n], shuffled.experts[first : first + n]
        )


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


def write_packed(folder, data, **changes):
    (folder / "experts.npy.xz").write_bytes(data)
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text()) | {"checksum": hashlib.sha256(data).hexdigest()}
    file.write_text(json.dumps(manifest | changes))


def npy(ids):
    file = BytesIO()
    np.save(file, ids)
    return file.getvalue()


@pytest.mark.parametrize(
    ("damage", "message"),
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
def test_damaged_packed_ids_are_told_in_one_line(plain, tmp_path, damage, message, monkeypatch):
    """Told by whatever needs the ids first: also the bit sets, where no cache is there."""
    packed = pack_trace(plain, tmp_path / "packed")
    data = (packed.path / "experts.npy.xz").read_bytes()
    write_packed(packed.path, damage(data, np.array(plain.experts)))
    for need in (lambda trace: trace.experts, bit_sets):
        with pytest.raises(InputError, match=message) as caught:
            need(open_trace(packed.path))
        assert "\n" not in str(caught.value)


def test_changed_packed_ids_are_told_when_opened(plain, tmp_path):
    packed = pack_trace(plain, tmp_path / "packed")
    file = packed.path / "experts.npy.xz"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InputError, match="truncated or not"):
        open_trace(packed.path)
    file.write_bytes(lzma.compress(npy(np.array(plain.experts))))
    with pytest.raises(InputError, match=r"checksum \w{12}"):
        open_trace(packed.path)


def test_cached_bit_sets_spare_the_ids(plain, tmp_path, monkeypatch):
    packed = pack_trace(plain, tmp_path / "packed")
    want = np.array(packed.bits)
    monkeypatch.setattr("eldr_sim.traces.format.load_ids", None)
    again = open_trace(packed.path)
    np.testing.assert_array_equal(again.bits, want)
    np.testing.assert_array_equal(again.prompt_counts([0, 1, 2]), plain.prompt_counts([0, 1, 2]))


# --- a smaller top-k --------------------------------------------------------------------------


def test_smaller_top_k_takes_the_experts_ranked_first(plain, tmp_path):
    halves = pack_trace(plain, tmp_path / "halves", rank_groups=[2, 2])
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
    none = pack_trace(plain, tmp_path / "none", rank_groups=[4])
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
    with pytest.raises(InputError, match="decode-only: no experts of prompt tokens"):
        calibration.scores("count")
    number, counts = PromptSignatures(decode_only)(((0, 0, 3),))
    assert (number, counts) == (0, None)


def test_decode_only_trace_is_packed(decode_only, tmp_path):
    packed = pack_trace(decode_only, tmp_path / "packed")
    assert not packed.has_prompts
    np.testing.assert_array_equal(packed.experts, decode_only.experts)
