"""What grouping could gain: unions and best groupings by brute force, planted families."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest

from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation.grouping_gain import group_unions, grouping_gain, oracle, rho_by_prompt


def test_a_groups_union_is_the_mean_over_all_its_steps():
    """Three requests of 2, 3 and 4 steps: all 24 steps at which they may meet."""
    rng = np.random.default_rng(0)
    steps = [rng.random((n, 10)) < 0.3 for n in (2, 3, 4)]
    met = [np.logical_or.reduce(rows).sum() for rows in product(*steps)]
    idle = 1 - np.stack([own.mean(axis=0) for own in steps])
    assert group_unions(idle, np.zeros(3, int), 1) == pytest.approx([np.mean(met)])


def partitions(n, size):
    """All ways to put n requests into groups of a size, as labels."""
    if n == 0:
        yield np.empty(0, int)
        return
    for rest in combinations(range(1, n), size - 1):
        first = (0, *rest)
        others = [i for i in range(n) if i not in first]
        for labels in partitions(n - size, size):
            whole = np.zeros(n, int)
            whole[others] = labels + 1
            yield whole


@pytest.mark.parametrize(("n", "size"), [(6, 3), (8, 4), (9, 3), (8, 2)])
def test_the_oracle_finds_what_brute_force_finds(n, size):
    """From some starts it ends at the best grouping; from none at one that an exchange betters."""
    rng = np.random.default_rng(n * size)
    groups, hit = n // size, 0
    for _ in range(6):
        idle = 1 - 0.95 * rng.random((n, 12)) ** 3
        best = min(group_unions(idle, labels, groups).sum() for labels in partitions(n, size))
        ends = []
        for _ in range(6):
            labels = oracle(idle, rng.permutation(np.arange(n) % groups), groups)
            assert np.bincount(labels).tolist() == [size] * groups
            own = group_unions(idle, labels, groups).sum()
            assert own >= best - 1e-9
            for i, j in combinations(range(n), 2):
                other = labels.copy()
                other[[i, j]] = labels[[j, i]]
                assert group_unions(idle, other, groups).sum() >= own - 1e-8
            ends.append(own)
        hit += min(ends) < best + 1e-9
    assert hit == 6


def families(folder, domain, early=0, n=64, prompt=64, output=64):
    """Requests of four families with experts of their own, after some tokens that tell nothing."""
    rng = np.random.default_rng(3)
    family = np.arange(n) % 4
    total = prompt + output
    weight = np.where(np.arange(32) // 8 == family[:, None], 1.0, 1e-9)
    weight = np.repeat(weight[:, None], total, axis=1)
    weight[:, :early] = 1.0
    times = rng.exponential(1 / weight[:, :, None], (n, total, 2, 32))
    return write_trace(
        folder,
        experts=np.argsort(times, axis=-1)[..., :4].reshape(n * total, 2, 4),
        request_id=[f"r{i}" for i in range(n)],
        domain=[("a", "b")[d] for d in domain(family)],
        prompt_len=[prompt] * n,
        output_len=[output] * n,
        is_calibration=np.arange(n) < n // 2,
        model="families",
        n_experts=32,
        domains=["a", "b"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
    )


def test_planted_families_are_found_by_oracle_and_signature_but_not_by_a_label(tmp_path):
    trace = families(tmp_path / "t", lambda family: np.arange(len(family)) // 4 % 2)
    found = grouping_gain(trace, (4, 16))
    # An expert of a family is idle in each of its n requests with chance 1/2; a random group has n
    # of 16, one of a family 16, one of two families some 8.
    among = sum(comb(16, k) * comb(48, 16 - k) / 2**k for k in range(17)) / comb(64, 16)
    two = sum(comb(16, k) * comb(16, 16 - k) / 2**k for k in range(17)) / comb(32, 16)
    assert found.random == pytest.approx(32 * (1 - among), rel=0.02)
    assert found.oracle.saved == pytest.approx(1 - 8 / found.random, abs=0.002)
    assert found.signature.saved == pytest.approx(1 - 8 / found.random, abs=0.002)
    assert found.oracle.busiest == pytest.approx(1, abs=0.002)
    assert abs(found.label.saved) < 0.04
    # Two families a domain.
    found = grouping_gain(families(tmp_path / "u", lambda family: family // 2), (4, 16))
    assert found.label.saved == pytest.approx(1 - 16 * (1 - two) / found.random, abs=0.01)


def test_rho_rises_with_what_the_prompt_tells(tmp_path):
    trace = families(tmp_path / "t", lambda family: family // 2, early=24)
    requests, rho = rho_by_prompt(trace)
    assert requests == 64
    assert abs(rho[16]) < 0.1  # nothing yet
    assert rho[32] > 0.5
    assert rho[64] >= rho[32]


def test_too_few_requests_have_none(tmp_path):
    trace = open_trace("qwen3-30b-a3b")
    assert grouping_gain(trace, (8, 8)) is None
    found = grouping_gain(trace)
    assert (found.workers, found.batch) == (4, 4)
    # The same trace gives the same figures.
    assert grouping_gain(trace) == found
