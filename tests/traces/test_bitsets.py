"""Bit sets: packing against Python sets, and a cache that is never trusted blindly."""

import struct
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim import cache
from eldr_sim.errors import EldrSimWarning
from eldr_sim.traces.routing import bitsets
from eldr_sim.traces.routing.bitsets import pack_bits
from eldr_sim.traces.routing.format import bit_sets
from eldr_sim.traces.routing.writer import write_trace

from ..on_each import on_each


def unpack(words):
    return {64 * w + b for w, word in enumerate(words.tolist()) for b in range(64) if word >> b & 1}


@given(
    tokens=st.integers(1, 20),
    layers=st.integers(1, 3),
    n_experts=st.sampled_from([1, 63, 64, 65, 128, 256, 500]),
    top_k=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_pack_against_sets(tokens, layers, n_experts, top_k, seed):
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((tokens, layers, n_experts)), axis=-1)[..., :top_k]
    experts = experts.astype(np.uint8 if n_experts <= 256 else np.uint16)
    bits = pack_bits(experts, n_experts)
    assert bits.shape == (tokens, layers, -(-n_experts // 64))
    assert bits.dtype == np.uint64
    for t in range(tokens):
        for layer in range(layers):
            assert unpack(bits[t, layer]) == set(experts[t, layer].tolist())
    union = np.bitwise_or.reduce(bits, axis=0)
    for layer in range(layers):
        assert len(unpack(union[layer])) == len(set(experts[:, layer].ravel()))


def test_pack_across_chunks(monkeypatch):
    scores = np.random.default_rng(0).random((50, 2, 128))
    experts = np.argsort(scores, axis=-1)[..., :4].astype(np.uint8)
    whole = pack_bits(experts, 128)
    monkeypatch.setattr(bitsets, "_CHUNK_ROWS", 7)
    np.testing.assert_array_equal(pack_bits(experts, 128), whole)


def make_trace(folder, seed=3):
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((12, 2, 100)), axis=-1)[..., :4]
    return write_trace(
        folder,
        experts=experts,
        request_id=["a"],
        domain=["x"],
        prompt_len=[5],
        output_len=[7],
        is_calibration=[False],
        model="m",
        n_experts=100,
        domains=["x"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setenv("ELDR_SIM_CACHE", str(tmp_path / "cache"))
    return make_trace(tmp_path / "t")


def cached(trace):
    name = f"{trace.manifest.checksum[:16]}-top{trace.top_k}-v1.bits"
    return cache.folder() / "bitsets" / name


def test_bit_sets_are_kept_in_the_cache_folder_and_used(trace):
    before = sorted(trace.path.iterdir())
    want = pack_bits(trace.experts, 100)
    np.testing.assert_array_equal(bit_sets(trace), want)
    assert [*cache.folder().rglob("*.bits")] == [cached(trace)]
    assert sorted(trace.path.iterdir()) == before
    made = cached(trace).stat().st_ino
    again = bit_sets(trace)
    assert isinstance(again.base, np.memmap)
    assert not again.flags.writeable
    assert again.ctypes.data % again.itemsize == 0
    assert cached(trace).stat().st_ino == made
    np.testing.assert_array_equal(again, want)


def test_file_in_the_cache_is_mapped_and_not_made(trace, monkeypatch):
    want = np.array(bit_sets(trace))
    monkeypatch.setattr(bitsets, "pack_bits", None)
    np.testing.assert_array_equal(bit_sets(trace), want)


def other_expert(data):
    """Swap an expert of the first set for one that it has not."""
    words = np.frombuffer(data, np.uint64).copy()
    word = int(words[0])
    new = next(bit for bit in range(64) if not word >> bit & 1)
    words[0] = (word & (word - 1)) | 1 << new
    return words.tobytes()


def resized(trace, data):
    """The same bytes as sets of one layer of twice as many words."""
    checksum = trace.manifest.checksum.encode()
    header = struct.pack("<8sII64s3Q", b"eldrbits", 1, 4, checksum, 12, 1, 4)
    return header + data[len(header) :]


FORGERIES = {
    "empty": lambda trace, data: b"",
    "garbage": lambda trace, data: b"garbage",
    "truncated": lambda trace, data: data[:-8],
    "truncated in the header": lambda trace, data: data[:100],
    "longer": lambda trace, data: data + bytes(8),
    "without header": lambda trace, data: data[128:],
    "of another version": lambda trace, data: data[:8] + b"\x02" + data[9:],
    "of another top-k": lambda trace, data: data[:12] + b"\x05" + data[13:],
    "of another shape": resized,
    "zeros": lambda trace, data: data[:128] + bytes(len(data) - 128),
    # Right shape, and four experts in each set:
    "tokens in another order": lambda trace, data: data[:128] + data[-32:] + data[128:-32],
    "one other expert": lambda trace, data: data[:128] + other_expert(data[128:]),
}


@on_each("forge", FORGERIES.values())
def test_forged_file_is_built_anew(trace, forge):
    want = np.array(bit_sets(trace))
    data = cached(trace).read_bytes()
    forged = forge(trace, data)
    assert forged != data
    cached(trace).write_bytes(forged)
    np.testing.assert_array_equal(bit_sets(trace), want)
    assert cached(trace).read_bytes() == data


def test_file_of_another_trace_is_built_anew(trace, tmp_path):
    other = make_trace(tmp_path / "other", seed=4)
    bit_sets(other)
    cached(other).rename(cached(trace))
    np.testing.assert_array_equal(bit_sets(trace), pack_bits(trace.experts, 100))


def test_other_formats_are_left_alone(trace):
    want = pack_bits(trace.experts, 100)
    old = cached(trace).with_name(cached(trace).name.replace("v1", "v0"))
    old.parent.mkdir(parents=True, exist_ok=True)  # the trace's own bookkeeping is there
    old.write_bytes(b"what version 0 was")
    np.save(trace.path / f"bitsets-{trace.manifest.checksum[:12]}.npy", want ^ np.uint64(1))
    np.testing.assert_array_equal(bit_sets(trace), want)
    assert old.read_bytes() == b"what version 0 was"


def test_where_nothing_can_be_written_they_stay_in_memory(trace, tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # modes do not stop the superuser
    monkeypatch.setenv("ELDR_SIM_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    want = pack_bits(trace.experts, 100)
    with pytest.warns(EldrSimWarning, match=r"nothing can be kept .*Not a directory"):
        first = bit_sets(trace)
    with warnings.catch_warnings(action="error"):  # once is enough
        again = bit_sets(trace)
    for bits in (first, again):
        assert not isinstance(bits, np.memmap)
        assert not bits.flags.writeable
        np.testing.assert_array_equal(bits, want)
