"""What prompts are made of: rows, ranges, prefix blocks; each against its definition."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.traces.prompts import PromptSignatures, count_experts
from eldr_sim.traces.requests.logs.log_columns import chain_blocks
from eldr_sim.traces.requests.prefixes import assign_blocks, clip_ranges, join_ranges
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.gate_scores import GateScores

from ..kv_hashes import block_hashes
from ..paths import SHARED
from ..workloads import make_workload

REQUESTS = SHARED / "data" / "requests"


@pytest.fixture(scope="module")
def trace():
    return open_trace()


def write_log(path, rows):
    """Write (prompt tokens, hash ids) as a log in Mooncake's format."""
    lines = [
        {"timestamp": 1000 * i, "input_length": n, "output_length": 4, "hash_ids": ids}
        for i, (n, ids) in enumerate(rows)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 511), st.integers(1, 500)), min_size=1, max_size=4),
    start=st.integers(0, 300),
)
def test_counts_of_ranges_token_by_token(trace, parts, start):
    ranges, expected = [], np.zeros((trace.n_layers, trace.n_experts), int)
    layers = np.arange(trace.n_layers)[:, None]
    for request, n in parts:
        ranges.append((request, start, start + n))
        for token in range(start, start + n):
            row = trace.first_row[request] + token % trace.prompt_len[request]
            expected[layers, trace.experts[row]] += 1
        start += n
    np.testing.assert_array_equal(count_experts(trace, tuple(ranges)), expected)


def test_a_recorded_prompt_counts_as_recorded(trace):
    counts = PromptSignatures(trace)
    for request in (0, 7, 300):
        number, mine = counts(((request, 0, int(trace.prompt_len[request])),))
        np.testing.assert_array_equal(mine, trace.prompt_counts([request])[0])
        again, same = counts(((request, 0, int(trace.prompt_len[request])),))
        assert (again, same is mine) == (number, True)
        assert counts(((request, 0, 1),))[0] != number


def test_gate_scores_of_ranges(trace):
    """Exact for whole prompts and rounds; a part takes its share."""
    requests = np.arange(40, 50)
    rng = np.random.default_rng(0)
    prob = rng.random((10, trace.n_layers, trace.n_experts)).astype(np.float32)
    scored = dataclasses.replace(trace, gate_scores=GateScores(requests, prob=prob))
    n, m = int(trace.prompt_len[42]), int(trace.prompt_len[47])
    signature = PromptSignatures(scored, "prob", requests)
    number, whole = signature(((42, 0, n),))
    np.testing.assert_array_equal(whole, prob[2])
    _, mixed = signature(((42, 0, 2 * n), (47, 2 * n, 2 * n + 5)))
    np.testing.assert_allclose(mixed, 2 * prob[2] + 5 / m * prob[7], rtol=1e-6)
    assert signature(((42, 0, n),))[0] == number
    with pytest.raises(InputError, match="lacks those of 1"):
        PromptSignatures(scored, "prob", [42, 60])
    with pytest.raises(InputError, match="carries no logit"):
        PromptSignatures(scored, "logit", requests)


def test_ranges_clip_and_join():
    ranges = ((4, 0, 10), (5, 10, 12), (4, 12, 20))
    assert clip_ranges(ranges, 3, 11) == [(4, 3, 10), (5, 10, 11)]
    assert clip_ranges(ranges, 10, 12) == [(5, 10, 12)]
    assert join_ranges([(4, 0, 3), (4, 3, 9), (5, 9, 10), (5, 11, 12)]) == (
        (4, 0, 9),
        (5, 9, 10),
        (5, 11, 12),
    )


def test_blocks_are_told_by_all_before_them():
    """Ids of single blocks, not of prefixes: 7 after 1 and 7 after 2 are different blocks."""
    ids = np.array([1, 7, 2, 7, 1, 7, 7], np.uint64)
    assert chain_blocks(ids, np.array([0, 2, 4, 7])).tolist() == [0, 1, 2, 3, 0, 1, 4]


def test_who_goes_on_with_whom():
    """A common head leaves each request its own text; a longer common part is gone on with."""
    rows = [
        [0, 1, 2],  # new
        [0, 3, 4, 5],  # shares the head only
        [0, 1, 2, 6],  # the next turn of the first
        [0, 3, 4, 7, 8, 9],  # half of it is the second's
        [10],
        [],
    ]
    indptr = np.cumsum([0, *map(len, rows)])
    blocks = np.array([block for row in rows for block in row], np.uint64)
    source, request, described = assign_blocks(
        chain_blocks(blocks, indptr), indptr, np.arange(50, 56)
    )
    mine = [source[a:b].tolist() for a, b in itertools.pairwise(indptr)]
    assert mine == [
        [50, 50, 50],
        [50, 51, 51, 51],
        [50, 50, 50, 50],
        [50, 51, 51, 53, 53, 53],
        [54],
        [],
    ]
    assert request.tolist() == [50, 51, 50, 53, 54, 55]
    assert described["prefix_blocks"] == 18
    assert described["prefix_blocks_seen_before_share"] == round(7 / 18, 6)
    assert described["requests_going_on_share"] == round(1 / 6, 6)


def test_prompt_of_a_log(trace, tmp_path):
    """512-token blocks, the last partial; what follows the last block belongs to nobody else."""
    log = write_log(
        tmp_path / "log.jsonl", [(1100, [0, 1, 2]), (1100, [0, 3]), (1600, [0, 1, 4]), (90, [])]
    )
    w = make_workload(trace, workload=log, seed=3)
    a, b = int(w.text[0]), int(w.text[1])
    assert w.prompt_ranges(0) == ((a, 0, 1100),)
    assert w.prompt_ranges(1) == ((a, 0, 512), (b, 512, 1100))
    assert w.prompt_ranges(2) == ((a, 0, 1600),)  # two blocks of three are the first's
    assert a != b
    assert w.prompt_ranges(3) == ((int(w.text[3]), 0, 90),)
    hashes = [block_hashes(w, i, 16) for i in range(4)]
    assert [len(h) for h in hashes] == [68, 64, 96, 0]  # the second's last 76 tokens: no id
    shared = [sum(x == y for x, y in zip(hashes[0], h, strict=False)) for h in hashes]
    assert shared == [68, 32, 64, 0]
    assert len({h for hs in hashes for h in hs}) == 68 + 32 + 32


@pytest.mark.parametrize("block_size", [1, 7, 16, 512, 600, 5000])
def test_equal_hashes_mean_equal_tokens(trace, tmp_path, block_size):
    """Against token lists: a KV block is shared if and only if all tokens up to its end are."""
    rng = np.random.default_rng(block_size)
    rows, texts = [], []
    for _ in range(40):
        path = [0, *rng.integers([1, 3, 5], [3, 5, 7]).tolist()][: rng.integers(1, 5)]
        rows.append((512 * len(path), path))
        texts.append(np.repeat(path, 512))
    w = make_workload(trace, workload=write_log(tmp_path / "log.jsonl", rows))
    seen = {}
    for i, text in enumerate(texts):
        for k, h in enumerate(block_hashes(w, i, block_size)):
            block_end = -(-(k + 1) * block_size // 512) * 512  # ids tell whole blocks apart
            key = (k, tuple(text[:block_end:512]))
            assert seen.setdefault(h, key) == key
        assert len(block_hashes(w, i, block_size)) == len(text) // block_size
    assert len(seen) == len(set(seen.values()))


def test_longer_logs_start_alike(trace, tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        (512 * int(n), [0, *(100 * np.arange(1, n) + rng.integers(3, size=n - 1)).tolist()])
        for n in rng.integers(1, 6, 60)
    ]
    log = write_log(tmp_path / "log.jsonl", rows)
    long = make_workload(trace, workload=log, seed=2)
    short = make_workload(trace, workload=log, seed=2, num_requests=25)
    for i in range(25):
        assert short.prompt_ranges(i) == long.prompt_ranges(i)
        assert block_hashes(short, i, 16) == block_hashes(long, i, 16)
    np.testing.assert_array_equal(short.text, long.text[:25])
    other = make_workload(trace, workload=log, seed=2, trace_replay="same_domain")
    np.testing.assert_array_equal(other.text, long.text)
    assert (other.decode_request != long.text).all()
    np.testing.assert_array_equal(trace.domain[other.decode_request], long.domain)


def test_shared_prompts_of_a_named_workload(trace):
    unique, shared = (
        make_workload(trace, request_rate=50, num_requests=600, seed=1, prompts=prompts)
        for prompts in ("unique", "shared")
    )
    np.testing.assert_array_equal(unique.text, shared.text)
    assert shared.prefix_block_tokens >= shared.prompt_len.max()
    by_hash = {}
    for i, q in enumerate(shared.text.tolist()):
        assert block_hashes(unique, i, 16) == []
        assert shared.prompt_ranges(i) == unique.prompt_ranges(i) == ((q, 0, trace.prompt_len[q]),)
        hashes = block_hashes(shared, i, 16)
        assert len(hashes) == trace.prompt_len[q] // 16
        for h in hashes:
            assert by_hash.setdefault(h, q) == q
    with pytest.raises(InputError, match="prompts: got 'same'"):
        make_workload(trace, request_rate=50, num_requests=6, prompts="same")


def test_a_log_says_itself_what_is_shared(trace, tmp_path):
    log = write_log(tmp_path / "log.jsonl", [(512, [0])])
    with pytest.raises(InputError, match="prompts: got 'shared', but the blocks of a request log"):
        make_workload(trace, workload=log, prompts="shared")


@pytest.mark.skipif(not REQUESTS.exists(), reason="the recorded request logs are not here")
def test_mooncakes_blocks(trace):
    """The share of reused blocks, 36.6%, counted here with a set; and who goes on with whom."""
    file = REQUESTS / "mooncake_conversation.jsonl"
    seen, reused, total = set(), 0, 0
    for line in file.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        reused += sum(i in seen for i in ids)
        total += len(ids)
        seen.update(ids)
    described = make_workload(trace, workload=file).description
    assert described["prefix_blocks"] == total == 288_500
    assert described["prefix_blocks_seen_before_share"] == round(reused / total, 6)
    assert math.isclose(reused / total, 0.366, abs_tol=5e-4)
    mix = described["domain_mix_realised"]
    assert all(math.isclose(share, 1 / 8, abs_tol=0.04) for share in mix.values())
