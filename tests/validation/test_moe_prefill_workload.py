"""MoE-Prefill's workloads: Table 2's totals, prefixes that are shared as told, logs that read."""

from collections import Counter

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.logs.request_logs import read_request_log
from studies.moe_prefill.workload import (
    BLOCK_TOKENS,
    DATASETS,
    lengths,
    real_world,
    regime,
    write_log,
)


def shareable_tokens(prompts):
    """Return the tokens, in whole blocks but the last, that a cache without limit would spare."""
    held = set()
    shareable = 0
    for prompt in prompts:
        for block in prompt.blocks[: (prompt.tokens - 1) // BLOCK_TOKENS]:
            if block not in held:
                break
            shareable += BLOCK_TOKENS
        held.update(prompt.blocks)
    return shareable


def test_table_2():
    """The paper: 73.8K requests and 37.9M tokens, of 50 to 128K each."""
    assert sum(data.requests for data in DATASETS) == 73_800
    assert sum(data.tokens for data in DATASETS) == 37_900_000
    for data in DATASETS:
        for scale, tolerance in ((1, 0.001), (20, 0.02)):
            drawn = lengths(data, data.requests // data.siblings // scale)
            assert drawn.mean() == pytest.approx(data.tokens / data.requests, rel=tolerance)
            assert data.shortest <= drawn.min()
            assert drawn.max() <= data.longest
            assert (np.diff(drawn) >= 0).all()


@pytest.mark.parametrize("scale", [0.01, 0.1])
def test_counts_and_tokens_of_a_part(scale):
    prompts = real_world(scale=scale)
    counts = Counter(prompt.dataset for prompt in prompts)
    for data in DATASETS:
        assert counts[data.name] == pytest.approx(scale * data.requests, abs=data.siblings)
    total = sum(prompt.tokens for prompt in prompts)
    assert total == pytest.approx(scale * 37.9e6, rel=0.06 if scale == 0.01 else 0.01)
    assert all(len(prompt.blocks) == prompt.tokens // BLOCK_TOKENS for prompt in prompts)


def expected_share(data, sharing):
    """What a dataset's prompts find, in blocks of 16, but for the first of each prefix."""
    found, drawn = 0, lengths(data, round(0.05 * data.requests / data.siblings))
    for tokens in drawn.tolist():
        header = int(sharing * data.header) // 16 * 16
        document = int(sharing * (data.header + data.document_share * (tokens - data.header)))
        found += header + (data.siblings - 1) * max(header, document // 16 * 16)
    return (found - int(sharing * data.header) // 16 * 16) / (data.siblings * drawn.sum())


@pytest.mark.parametrize("sharing", [0.0, 0.3, 1.0])
def test_a_cache_without_limit_saves_what_is_shared(sharing):
    prompts = real_world(sharing, scale=0.05, seed=3)
    for data in DATASETS:
        own = [prompt for prompt in prompts if prompt.dataset == data.name]
        share = shareable_tokens(own) / sum(prompt.tokens for prompt in own)
        assert share == pytest.approx(expected_share(data, sharing), abs=1e-12)
        if sharing == 1:
            low, high = {"low": (0, 0.2), "medium": (0.3, 0.6), "high": (0.5, 0.95)}[
                data.prefix_share
            ]
            assert low < share < high
    assert shareable_tokens(prompts) == sum(
        shareable_tokens([p for p in prompts if p.dataset == data.name]) for data in DATASETS
    )


def test_sharing_is_one_dial():
    saved = [shareable_tokens(real_world(s, scale=0.02)) for s in np.linspace(0, 1, 6)]
    assert saved == sorted(saved)
    assert saved[0] == 0
    tokens = [sum(p.tokens for p in real_world(s, scale=0.02)) for s in (0, 1)]
    assert tokens[0] == tokens[1]  # lengths do not depend on it


def test_siblings_come_together_and_orders_follow_the_seed():
    prompts = real_world(scale=0.02, seed=1)
    quality = [p for p in prompts if p.dataset == "QuALITY"]
    for i in range(0, len(quality), 10):
        assert len({(p.tokens, p.blocks[:20]) for p in quality[i : i + 10]}) == 1
        first = prompts.index(quality[i])
        assert prompts[first : first + 10] == quality[i : i + 10]
    assert prompts == real_world(scale=0.02, seed=1)
    other = real_world(scale=0.02, seed=2)
    assert prompts != other
    assert Counter(prompts) == Counter(other)


@pytest.mark.parametrize(
    ("name", "n", "length"),
    [
        ("short", 9766, 1024),
        ("medium", 1221, 8192),
        ("long", 305, 32_768),
        ("ultra-long", 76, 2**17),
    ],
)
def test_regimes_share_nothing(name, n, length):
    prompts = regime(name)
    assert len(prompts) == n
    assert {prompt.tokens for prompt in prompts} == {length}
    assert n * length == pytest.approx(10e6, rel=0.01)
    assert shareable_tokens(prompts) == 0


def test_logs_read_as_they_were_written(tmp_path):
    prompts = real_world(scale=0.005)
    path = tmp_path / "table2.jsonl"
    write_log(prompts, path)
    log = read_request_log(path)
    assert log.prefix_block_tokens == BLOCK_TOKENS
    assert log.prompt_len.tolist() == [prompt.tokens for prompt in prompts]
    assert (log.output_len == 1).all()
    assert (log.arrival_s == 0).all()
    for i, prompt in enumerate(prompts):
        begin, end = log.prefix_indptr[i : i + 2]
        assert tuple(log.prefix_hash[begin:end].tolist()) == prompt.blocks


def test_bad_arguments_are_refused():
    for options in ({"sharing": 1.1}, {"sharing": -0.1}, {"scale": 0.0}, {"scale": 2.0}):
        with pytest.raises(InputError, match=next(iter(options))):
            real_world(**options)
    with pytest.raises(InputError, match="ultra-long"):
        regime("longest")
