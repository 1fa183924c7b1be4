"""Errors of tables on rows that their readers were not given."""

import numpy as np
import pytest

from eldr_sim.kernel_profiles.kernels import table_errors
from eldr_sim.kernel_profiles.kernels.table_errors import (
    errors_of_moe_tables,
    errors_page,
    left_out_errors,
)
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata
from eldr_sim.kernel_profiles.tables.library import shipped_tables

from ..paths import ROOT


def _table(kind, columns):
    metadata = TableMetadata(
        kind=kind,
        gpu="H100",
        shape={},
        dtype="bfloat16",
        kernel_source="test",
        framework="test 1",
        provenance="measured",
        origin="a test",
        device="none",
    )
    return LatencyTable(metadata, {name: np.array(values) for name, values in columns.items()})


def test_a_line_has_no_error_and_a_bend_has_its_own():
    line = _table(
        "gemm", {"m": [1, 2, 4], "n": [8] * 3, "k": [8] * 3, "latency_s": [2.0, 3.0, 5.0]}
    )
    assert left_out_errors(line) == {"leave_one_out_mean": 0.0, "leave_one_out_max": 0.0}
    bend = _table(
        "gemm", {"m": [4, 1, 2], "n": [8] * 3, "k": [8] * 3, "latency_s": [5.0, 2.0, 4.0]}
    )
    assert left_out_errors(bend) == {"leave_one_out_mean": 0.25, "leave_one_out_max": 0.25}


def test_curves_are_not_mixed():
    """Two operations whose times differ a thousandfold, each a line."""
    columns = {
        "operation": np.array(["all_gather"] * 3 + ["all_reduce"] * 3, dtype=object),
        "n_gpus": [2] * 6,
        "message_bytes": [1, 2, 3] * 2,
        "latency_s": [1.0, 2.0, 3.0, 1000.0, 2000.0, 3000.0],
    }
    assert left_out_errors(_table("collective", columns))["leave_one_out_max"] == 0.0


def test_nothing_to_leave_out():
    two = _table(
        "attention_prefill", {"batch": [1, 1], "new_tokens": [1, 2], "latency_s": [1.0, 2]}
    )
    assert left_out_errors(two) == {}


@pytest.mark.parametrize("kind", ["moe", "gemm", "attention_decode", "collective", "all_to_all"])
def test_every_imported_table_keeps_its_errors(kind):
    of_kind = [one for one in shipped_tables() if one.kind == kind]
    tables = [(one, one.metadata) for one in of_kind if one.metadata.provenance == "imported"]
    assert len(tables) > 10
    for one, metadata in tables[:: max(1, len(tables) // 12)]:
        assert metadata.fit_error == pytest.approx(left_out_errors(one.load()), abs=2e-6)
    # Where caches hold all but the largest counts (L40S), MoE tables have none to leave out.
    lacking = [one.name for one, m in tables if "leave_one_out_mean" not in m.fit_error]
    assert len(lacking) <= len(tables) / 100
    assert all(metadata.fit_error for _, metadata in tables)


def test_the_page_and_its_data_have_the_errors_of_the_tables_that_ship(tmp_path, monkeypatch):
    docs = ROOT / "docs"
    assert errors_page() in (docs / "tables.md").read_text(encoding="utf-8")
    assert errors_of_moe_tables() == (docs / "data" / "table_errors.csv").read_text("utf-8")
    (tmp_path / "data").mkdir()
    page = tmp_path / "tables.md"
    page.write_text("a\n<!-- errors: begin -->\nold\n<!-- errors: end -->\nb\n")
    monkeypatch.setattr(table_errors, "errors_page", lambda: "new")
    monkeypatch.setattr(table_errors, "errors_of_moe_tables", lambda: "rows\n")
    table_errors.main(tmp_path)
    assert page.read_text() == "a\n<!-- errors: begin -->\nnew\n<!-- errors: end -->\nb\n"
    assert (tmp_path / "data" / "table_errors.csv").read_text() == "rows\n"
