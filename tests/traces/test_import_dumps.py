"""Imports of dumps that name no requests or domains."""

import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fuzz_binary import Tensor, good_dump, pickled
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim import inputs
from eldr_sim.errors import InputError
from eldr_sim.traces.routing.imports import dumps as import_dumps
from eldr_sim.traces.routing.imports.dumps import load_tensors, read_sglang
from eldr_sim.traces.routing.imports.formats import detect_format
from eldr_sim.traces.routing.imports.importers import import_trace

ABOUT = {"model": "m", "captured_by": "test", "source_data": "drawn", "tool_versions": {}}
DUMP = Path(__file__).parent / "data" / "expert_distribution_recorder_1700000000_0.pt"


def ids_of(rng, tokens, layers, top_k, experts):
    return np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :top_k]


# --- SGLang -------------------------------------------------------------------------------------


def test_sglang_dump_of_torch(tmp_path):
    """A file that torch 2.13 saved: two prompts, one in two chunks, and three decode passes.

    4 layers, of which 0 is dense; 8 slots, of which 2 are used; ids are ``position + layer`` and
    the next, modulo 6; physical expert p is logical expert 5 - p.
    """
    assert detect_format(DUMP) == "sglang"
    trace = import_trace(DUMP, tmp_path / "t", domain="chat", **ABOUT)
    assert (trace.n_layers, trace.top_k, trace.n_experts) == (3, 2, 6)
    assert trace.domains == ["chat"]
    assert trace.prompt_len.tolist() == [3, 5]
    assert trace.output_len.tolist() == [1, 3]
    position = np.concatenate([np.arange(4), np.arange(8)])[:, None, None]
    physical = (position + np.arange(1, 4)[:, None] + np.arange(2)) % 6
    assert np.array_equal(trace.experts, 5 - physical)
    assert "the positions of their tokens separate them" in trace.manifest.notes


@st.composite
def schedules(draw):
    """Prompts and outputs, and how many requests join before each pass."""
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)
    )
    return lengths, draw(st.integers(1, 3)), draw(st.integers(2, 4))


@given(schedules())
def test_sglang_passes_are_dealt_to_requests(schedule):
    """Against a scheduler that knows which request each token is of; ambiguous ones are skipped."""
    lengths, joins, chunk = schedule
    records, truth = [], {}
    waiting = list(range(len(lengths)))
    running: list[list[int]] = []  # request, computed
    row = 0
    ambiguous, ended = False, set()
    while waiting or running:
        joined = waiting[:joins]
        waiting = waiting[joins:]
        for request in joined:
            prompt = lengths[request][0]
            for begin in range(0, prompt, chunk):
                n = min(chunk, prompt - begin)
                truth.setdefault(request, []).extend(range(row, row + n))
                records.append((1, [*range(begin, begin + n)], [n], row))
                row += n
            running.append([request, prompt])
        positions = [computed for _, computed in running]
        ambiguous |= not ended.isdisjoint(positions)  # one that has ended might go on there
        for request, _ in running:
            truth[request].append(row + [r for r, _ in running].index(request))
        records.append((2, positions, None, row))
        row += len(running)
        after = [[r, c + 1] for r, c in running]
        running = [[r, c] for r, c in after if c < sum(lengths[r])]
        gone = [c for r, c in after if c >= sum(lengths[r])]
        ended.update(gone)
        ambiguous |= any(c in [x for _, x in running] for c in gone)
        ambiguous |= len({c for _, c in after}) < len(after) and bool(gone)
    if ambiguous:
        return
    passes = import_dumps._Passes()
    for mode, positions, chunks, first in records:
        rows = np.arange(first, first + len(positions))
        ids = np.broadcast_to(rows[None, :, None], (2, len(positions), 1))
        passes.add(
            {
                "topk_ids_of_layer": ids,
                "positions": positions,
                "forward_mode": mode,
                "extend_seq_lens": chunks,
            },
            "here",
        )
    assert len(passes.requests) == len(lengths)
    for request, tracked in zip(sorted(truth), passes.requests, strict=True):
        got = np.concatenate(tracked.rows, axis=1)[0, :, 0].tolist()
        assert got == truth[request]
        assert tracked.is_whole
        assert tracked.prompt == lengths[request][0]


def test_sglang_leaves_out_what_began_before(monkeypatch, tmp_path):
    """A request known from its third token on, and a prompt whose first tokens were cached."""

    def record(mode, positions, lengths=None):
        ids = np.tile(np.array([1, 2])[None, None], (2, len(positions), 1))
        return {
            "topk_ids_of_layer": ids,
            "positions": positions,
            "forward_mode": mode,
            "extend_seq_lens": lengths,
        }

    data = {
        "records": [
            record(2, [2]),
            record(1, [16, 17], [2]),
            record(1, [0, 1], [2]),
            record(2, [3, 18, 2]),
            record(4, []),
        ][:4]
    }
    monkeypatch.setattr(import_dumps, "load_tensors", lambda path: data)
    found = import_dumps.read_sglang(tmp_path / "x.pt")
    assert found.prompt_len.tolist() == [2]
    assert found.output_len.tolist() == [1]
    assert "2 requests are left out" in found.notes
    data["records"] = data["records"][:2]
    with pytest.raises(InputError, match="no request with its whole prompt"):
        import_dumps.read_sglang(tmp_path / "x.pt")
    data["records"] = [record(3, [0])]
    with pytest.raises(InputError, match="forward_mode 3"):
        import_dumps.read_sglang(tmp_path / "x.pt")
    data["records"] = [{"logical_count": 1}]
    with pytest.raises(InputError, match="a dump of the mode per_token"):
        import_dumps.read_sglang(tmp_path / "x.pt")


def test_torch_file_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("never",))

    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(Evil()))
    with pytest.raises(InputError, match=r"holds builtins\.print"):
        load_tensors(tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(InputError, match=r"not a file of torch\.save"):
        load_tensors(tmp_path / "y.pt")


# --- llama.cpp and moe-beyond -------------------------------------------------------------------


def computed(ids, prompt, ubatch):
    """Yield (first token, tokens) as llama.cpp computes them: ubatches, then one by one."""
    for begin in range(0, prompt, ubatch):
        yield begin, min(ubatch, prompt - begin)
    for token in range(prompt, len(ids)):
        yield token, 1


@pytest.mark.parametrize("header", ["layer,expert\n", ""])
@pytest.mark.parametrize("all_of_last", [True, False])
def test_moe_trace_in_order_of_computation(tmp_path, header, all_of_last):
    rng = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    wanted = []
    for i, (prompt, output) in enumerate([(7, 3), (6, 6)]):
        ids = ids_of(rng, prompt + output, 4, 3, 10)
        lines = []
        for begin, n in computed(ids, prompt, 4):
            for layer in range(4):
                # The last layer of a prompt sees the token whose output is asked for only.
                first = begin if all_of_last or layer < 3 or n == 1 else begin + n - 1
                for token in range(first, begin + n):
                    lines += [f"{layer},{e}" for e in ids[token, layer]]
        (folder / f"r{i}.csv").write_text(header + "\n".join(lines) + "\n")
        wanted.append(ids if all_of_last else ids[:, :3])
    trace = import_trace(folder, tmp_path / "t", n_experts=10, **ABOUT)
    assert trace.request_id == ["r0", "r1"]
    assert (trace.prompt_len.tolist(), trace.output_len.tolist()) == ([7, 6], [3, 6])
    assert np.array_equal(trace.experts, np.concatenate(wanted))
    assert trace.manifest.rank_groups == [1, 1, 1]


def test_moe_trace_with_token_numbers(tmp_path):
    ids = ids_of(np.random.default_rng(1), 9, 2, 3, 10)
    rows = [
        f"{'prefill' if t < 6 else 'decode'},{t},{layer},{rank},{ids[t, layer, rank]}"
        for layer in range(2)
        for t in range(9)
        for rank in range(3)
    ]
    path = tmp_path / "r.csv"
    path.write_text("phase,token,layer,rank,expert\n" + "\n".join(rows) + "\n")
    trace = import_trace(path, tmp_path / "t", n_experts=10, **ABOUT)
    assert (trace.prompt_len.tolist(), trace.output_len.tolist()) == ([6], [3])
    assert np.array_equal(trace.experts, ids)
    path.write_text("phase,token,layer,rank,expert\nboth,0,0,0,1\n")
    with pytest.raises(InputError, match=r"r\.csv:2: got 'both,0,0,0,1'"):
        import_trace(path, tmp_path / "u", n_experts=10, **ABOUT)


def test_moe_beyond_are_prompts(tmp_path):
    rng = np.random.default_rng(2)
    folder = tmp_path / "in"
    folder.mkdir()
    every = []
    for i, n in enumerate([8, 12]):
        ids = ids_of(rng, n, 3, 6, 64)
        text = "Layer ID,Batch Number,Token,Activated Expert IDs\n"
        for layer in range(3):
            for t in range(n):
                text += f'{layer + 1},0,"Ġw,{t}","{json.dumps(ids[t, layer].tolist())}"\n'
        (folder / f"prompt_{i}_data.csv").write_text(text, encoding="utf-8")
        every.append(ids)
    assert detect_format(folder) == "moe_beyond"
    with pytest.raises(InputError, match=r"prompt_share: .* has prompt tokens only"):
        import_trace(folder, tmp_path / "t", n_experts=64, **ABOUT)
    trace = import_trace(folder, tmp_path / "t", n_experts=64, prompt_share=0.5, **ABOUT)
    assert (trace.prompt_len.tolist(), trace.output_len.tolist()) == ([4, 6], [4, 6])
    assert np.array_equal(trace.experts, np.concatenate(every))
    assert trace.manifest.recorded_phase == "prompt"
    (folder / "prompt_1_data.csv").write_text("1,0,x,6\n")
    with pytest.raises(InputError, match="got '1,0,x,6'"):
        import_trace(folder, tmp_path / "u", n_experts=64, prompt_share=0.5, **ABOUT)


def test_vllm_prefill_and_decode_are_spliced(tmp_path):
    ids = ids_of(np.random.default_rng(3), 9, 2, 2, 8)
    void = np.zeros_like(ids[:5])
    line = {
        "domain": "chat",
        "prefill_routed_experts": ids[:5].tolist(),
        "routed_experts": np.concatenate([void, ids[5:]]).tolist(),
    }
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(line) + "\n")
    trace = import_trace(path, tmp_path / "t", n_experts=8, **ABOUT)
    assert (trace.prompt_len.tolist(), trace.output_len.tolist()) == ([5], [4])
    assert np.array_equal(trace.experts, ids)
    path.write_text(json.dumps({**line, "routed_experts": ids[:5].tolist()}) + "\n")
    with pytest.raises(InputError, match="prompt_len 5 of 5 recorded tokens"):
        import_trace(path, tmp_path / "u", n_experts=8, **ABOUT)


# --- Files of torch.save that are not what they say ----------------------------------------------


def torch_file(path, data, storages):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + pickled(data) + b".")
        for key, raw in storages.items():
            archive.writestr(f"a/data/{key}", raw)
    return path


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    stride=st.lists(st.integers(-6, 12), min_size=3, max_size=3),
    offset=st.integers(-2, 20),
)
def test_a_tensor_reads_its_storage_and_nothing_else(tmp_path_factory, shape, stride, offset):
    tensor = Tensor(shape, "0")
    tensor.stride, tensor.offset, tensor.numel = stride[: len(shape)], offset, 24
    path = torch_file(
        tmp_path_factory.mktemp("t") / "t.pt", {"t": tensor}, {"0": STORAGE.tobytes()}
    )
    places = [
        offset + sum(i * s for i, s in zip(at, stride, strict=False)) for at in np.ndindex(*shape)
    ]
    inside = all(0 <= place < 24 for place in places) and len(places) <= 24
    if offset < 0 or min(stride[: len(shape)]) < 0 or not inside:
        with pytest.raises(InputError, match="a tensor"):
            load_tensors(path)
    else:
        read = load_tensors(path)["t"]
        assert (read.shape, read.ravel().tolist()) == (tuple(shape), STORAGE[places].tolist())


STORAGE = np.arange(100, 124)


def test_a_small_file_may_not_take_a_large_memory(tmp_path, monkeypatch):
    repeated = Tensor((4, 10**9, 2), "0")
    repeated.stride, repeated.numel = [0, 0, 0], 24
    with pytest.raises(InputError, match="reaches beyond its storage"):
        load_tensors(torch_file(tmp_path / "a.pt", {"t": repeated}, {"0": STORAGE.tobytes()}))
    monkeypatch.setattr(import_dumps, "array_limit", lambda: 1000)
    many = [Tensor((24,), "0") for _ in range(6)]
    with pytest.raises(InputError, match="tensors of over 1,000 bytes"):
        load_tensors(torch_file(tmp_path / "b.pt", {"t": many}, {"0": STORAGE.tobytes()}))
    monkeypatch.setattr(inputs, "array_limit", lambda: 10_000)
    with pytest.raises(InputError, match="unpacks to"):
        load_tensors(torch_file(tmp_path / "c.pt", {}, {"0": bytes(1 << 20)}))


def test_a_record_without_a_field_is_named(tmp_path):
    for name in ("topk_ids_of_layer", "positions", "forward_mode", "extend_seq_lens"):
        data, storages = good_dump()
        assert read_sglang(torch_file(tmp_path / "good.pt", data, storages)).prompt_len == [3]
        del data["records"][0][name]
        with pytest.raises(InputError, match=rf"bad\.pt: record 0: no {name} "):
            read_sglang(torch_file(tmp_path / "bad.pt", data, storages))
    with pytest.raises(InputError, match=r"bad\.pt: no records"):
        read_sglang(torch_file(tmp_path / "bad.pt", {"records": {}}, {}))
    with pytest.raises(InputError, match="record 0: is a int"):
        read_sglang(torch_file(tmp_path / "bad.pt", {"records": [1]}, {}))
