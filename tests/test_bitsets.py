"""Bit sets: packing against Python sets, and a cache that is never trusted blindly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.traces import bitsets
from eldr_sim.traces.bitsets import bit_sets, pack_bits
from eldr_sim.traces.writer import write_trace


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


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(3)
    experts = np.argsort(rng.random((12, 2, 100)), axis=-1)[..., :4]
    return write_trace(
        tmp_path / "t",
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


def cache_beside(trace):
    return trace.path / f"bitsets-{trace.manifest.checksum[:12]}.npy"


def test_cache_is_made_beside_the_trace_and_used(trace, monkeypatch):
    want = pack_bits(trace.experts, 100)
    np.testing.assert_array_equal(bit_sets(trace), want)
    made = cache_beside(trace)
    stamp = made.stat().st_mtime_ns
    again = bit_sets(trace)
    assert isinstance(again, np.memmap)
    assert not again.flags.writeable
    assert made.stat().st_mtime_ns == stamp
    np.testing.assert_array_equal(again, want)
    assert [p for p in trace.path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("damage", ["truncated", "garbage", "shape", "dtype", "other trace"])
def test_damaged_cache_is_rebuilt(trace, damage):
    want = pack_bits(trace.experts, 100)
    made = cache_beside(trace)
    if damage == "truncated":
        bit_sets(trace)
        made.write_bytes(made.read_bytes()[:-8])
    elif damage == "garbage":
        made.write_bytes(b"garbage")
    elif damage == "shape":
        np.save(made, want[:-1])
    elif damage == "dtype":
        np.save(made, want.astype(np.int64))
    else:
        np.save(made, want ^ np.uint64(1))
    np.testing.assert_array_equal(bit_sets(trace), want)
    np.testing.assert_array_equal(np.load(made), want)


def refuse_beside(trace, monkeypatch, everywhere=False):
    """Make writing fail as in a read-only place; file modes do not stop the superuser."""
    save = bitsets._save

    def guarded(path, bits):
        if everywhere or path.parent == trace.path:
            raise PermissionError(path)
        save(path, bits)

    monkeypatch.setattr(bitsets, "_save", guarded)


def test_read_only_trace_uses_the_cache_folder(trace, tmp_path, monkeypatch):
    refuse_beside(trace, monkeypatch)
    bits = bit_sets(trace)
    assert not cache_beside(trace).exists()
    assert (tmp_path / "cache" / "eldr-sim" / cache_beside(trace).name).is_file()
    assert isinstance(bits, np.memmap)
    np.testing.assert_array_equal(bit_sets(trace), pack_bits(trace.experts, 100))


def test_without_any_writable_place_they_stay_in_memory(trace, tmp_path, monkeypatch):
    refuse_beside(trace, monkeypatch, everywhere=True)
    bits = bit_sets(trace)
    assert not isinstance(bits, np.memmap)
    assert not bits.flags.writeable
    np.testing.assert_array_equal(bits, pack_bits(trace.experts, 100))
    assert not (tmp_path / "cache").exists()


def test_failed_write_leaves_no_file(trace, tmp_path, monkeypatch):
    def full_disk(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(bitsets.np, "save", full_disk)
    before = sorted(trace.path.iterdir())
    bit_sets(trace)
    assert sorted(trace.path.iterdir()) == before
    assert list((tmp_path / "cache" / "eldr-sim").iterdir()) == []
