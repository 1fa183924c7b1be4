"""The time of a step, which both backends share, against the same sums in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s

from .random_clusters import LONGEST, random_cost
from .slow_step_cost import step_seconds


@given(
    seed=st.integers(0, 2**32), batch=st.integers(0, 8), n_chunks=st.integers(0, 4),
    own_experts=st.booleans(), launches=st.booleans(),
)  # fmt: skip
def test_a_step_takes_the_sum_of_its_parts(seed, batch, n_chunks, own_experts, launches):
    rng = np.random.default_rng(seed)
    n_experts, n_layers = 16, int(rng.integers(1, 4))
    cost = random_cost(rng, 40, 60, n_experts, n_layers, 0, launches)
    per_sequence = int(rng.integers(1, 5)) if batch else 0
    chunks = [(int(rng.integers(LONGEST // 2)), int(rng.integers(1, 8))) for _ in range(n_chunks)]
    if not batch and not chunks:
        return
    decoded, context = batch * per_sequence, int(batch * rng.integers(1, LONGEST))
    rows = min(40, decoded + int(rng.integers(n_chunks + 1)))
    activated = rng.integers(n_experts + 1, size=n_layers)
    first, count = (np.array(column, np.int64) for column in zip(*chunks, strict=True)) if (
        chunks
    ) else (np.zeros(0, np.int64),) * 2  # fmt: skip
    parts = step_parts(
        cost, batch, decoded, context, first, count, rows, activated, not own_experts
    )
    expected = step_seconds(cost, own_experts, batch, context, decoded, chunks, rows, activated)
    assert total_s(parts) == pytest.approx(expected, rel=1e-12)
