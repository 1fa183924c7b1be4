"""Tables of a steady machine are trusted; those of one that changed its speed are not."""

import numpy as np
import pytest

from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata, moe_shape
from eldr_sim.validation.live.calibration.calibrate import doubts, quality


def table(factor_of, spread=0.05):
    points = [(b, d) for b in (1, 2, 4, 8, 16, 32) for d in (8, 16, 32, 64) if d <= 8 * b]
    batch, distinct = (np.array(column) for column in zip(*points, strict=True))
    seconds = (1e-4 * distinct + 1e-5 * batch) * np.array([factor_of(b) for b in batch])
    metadata = TableMetadata(
        kind="moe", gpu="cpu", shape=moe_shape(64, 32, 64, 8), dtype="bfloat16",
        kernel_source="test", framework="test", provenance="measured", origin="a formula",
        device="CPU",
    )  # fmt: skip
    columns = {
        "batch": batch, "distinct_experts": distinct.astype(float),
        "routing": np.array(["forced"] * len(batch)), "latency_s": seconds,
        "latency_q1_s": seconds * (1 - spread / 2), "latency_q3_s": seconds * (1 + spread / 2),
    }  # fmt: skip
    return LatencyTable(metadata, columns)


def test_a_steady_machine_is_trusted():
    figures = quality([table(lambda b: 1.0)])
    assert figures["moe"]["out_of_order"] == 0.0
    assert figures["moe"]["spread_median"] == pytest.approx(0.05)
    assert doubts(figures) == []


def test_a_batch_that_met_the_slow_machine_alone_is_found():
    (line,) = doubts(quality([table(lambda b: 2.0 if b in (4, 8) else 1.0)]))
    assert "take longer than rows with more work" in line


def test_a_wide_spread_of_equal_steps_is_found():
    (line,) = doubts(quality([table(lambda b: 1.0, spread=0.8)]))
    assert "80%" in line
