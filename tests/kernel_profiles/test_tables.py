"""Latency table format v1: what is written is read back, and what breaks the rules is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.tables import format as tables
from eldr_sim.kernel_profiles.tables import library as table_library
from eldr_sim.kernel_profiles.tables.format import (
    PROVENANCES,
    LatencyTable,
    TableMetadata,
    load_table,
    moe_shape,
    table_name,
    weakest,
)
from eldr_sim.kernel_profiles.tables.library import find_table, shipped_tables

from ..on_each import on_each
from ..paths import ROOT

SHAPE = moe_shape(2048, 768, 128, 8)


def _metadata(**changes):
    base = {
        "kind": "moe",
        "gpu": "H100",
        "shape": SHAPE,
        "dtype": "bfloat16",
        "kernel_source": "test kernel",
        "framework": "test 1.0",
        "provenance": "measured",
        "origin": "a test",
        "device": "none",
    }
    return TableMetadata(**(base | changes))


def _columns(**changes):
    base = {
        "batch": np.array([1, 2, 4], dtype=np.int32),
        "distinct_experts": np.array([8.0, 16.0, 32.0]),
        "routing": np.array(["balanced"] * 3, dtype=object),
        "latency_s": np.array([1e-5, 2e-5, 3e-5]),
    }
    return {name: value for name, value in (base | changes).items() if value is not None}


def test_a_table_survives_the_disk(tmp_path):
    columns = _columns(
        latency_q1_s=np.array([0.9e-5, 1.9e-5, 2.9e-5]),
        latency_q3_s=np.array([1.1e-5, 2.1e-5, 3.1e-5]),
        repeats=np.array([30, 30, 30]),
    )
    written = LatencyTable(_metadata(fit_error={"rows_mean": 0.01}, notes="one\ntwo"), columns)
    written.save(tmp_path / "deep" / "table.parquet")
    read = load_table(tmp_path / "deep" / "table.parquet")
    assert read.metadata == written.metadata
    assert read.columns.keys() == columns.keys()
    for name, values in columns.items():
        np.testing.assert_array_equal(read.columns[name], values)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["table.parquet"]


def test_a_failed_write_leaves_the_old_table_alone(tmp_path, monkeypatch):
    path = tmp_path / "table.parquet"
    LatencyTable(_metadata(), _columns()).save(path)
    before = path.read_bytes()

    def fail(table, where, **options):
        with open(where, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tables.pq, "write_table", fail)
    with pytest.raises(InputError, match="disk full"):
        LatencyTable(_metadata(notes="new"), _columns()).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@on_each(
    "changes, message",
    [
        ({"batch": None}, "missing batch"),
        ({"extra": np.array([1.0, 2.0, 3.0])}, "unknown extra"),
        ({"batch": np.array([1, 2], dtype=np.int32)}, "lengths"),
        ({"batch": np.array([1.0, 2.0, 4.0])}, "integers"),
        ({"latency_s": np.array([1, 2, 3])}, "floats"),
        ({"latency_s": np.array([1e-5, np.nan, 3e-5])}, "row 1"),
        ({"latency_s": np.array([1e-5, 2e-5, 0.0])}, "row 2"),
        ({"latency_s": np.array([np.inf, 2e-5, 1e-5])}, "row 0"),
        ({"batch": np.array([1, -2, 4], dtype=np.int32)}, "row 1"),
        ({"routing": np.array([1, 2, 3])}, "text"),
        (
            {
                "batch": np.array([1, 1, 4], dtype=np.int32),
                "distinct_experts": np.array([8.0, 8.0, 9.0]),
            },
            "same point",
        ),
    ],
)
def test_broken_columns_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        LatencyTable(_metadata(), _columns(**changes))


def test_empty_tables_are_refused():
    with pytest.raises(InputError, match="not zero"):
        LatencyTable(_metadata(), {name: values[:0] for name, values in _columns().items()})


def _rewrite(path, document):
    table = pa.table({name: pa.array(values) for name, values in _columns().items()})
    if document is not None:
        table = table.replace_schema_metadata({b"eldr_sim.latency_table": document})
    pq.write_table(table, path)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "not a latency table"),
        (b"{", "bad metadata"),
        (b"[]", "bad metadata"),
        (b"{}", "format version None"),
        (b'{"format_version": 2}', "format version 2"),
        (b'{"format_version": 1, "kind": "moe"}', "bad metadata"),
    ],
)
def test_broken_metadata_is_refused_in_one_line(tmp_path, document, message):
    path = tmp_path / "table.parquet"
    _rewrite(path, document)
    with pytest.raises(InputError) as caught:
        load_table(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_table(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(InputError, match="cannot read"):
        load_table(tmp_path / "text.parquet")


def test_nulls_are_refused(tmp_path):
    path = tmp_path / "table.parquet"
    columns = {name: pa.array(values) for name, values in _columns().items()}
    columns["latency_s"] = pa.array([1e-5, None, 3e-5])
    document = _metadata().model_dump_json().encode()
    table = pa.table(columns).replace_schema_metadata({b"eldr_sim.latency_table": document})
    pq.write_table(table, path)
    with pytest.raises(InputError, match="nulls"):
        load_table(path)


@given(st.lists(st.sampled_from(PROVENANCES), min_size=1))
def test_the_weakest_label_is_the_last_in_the_order_of_trust(labels):
    order = ["measured", "imported", "published", "fitted", "derived", "roofline"]
    assert weakest(labels) == order[max(order.index(label) for label in labels)]


def test_weakest_refuses_what_it_does_not_know():
    with pytest.raises(InputError, match="guessed"):
        weakest(["measured", "guessed"])
    with pytest.raises(InputError, match="no label"):
        weakest([])


def test_every_shipped_table_is_valid_named_after_its_content_and_sourced():
    shipped = shipped_tables()
    assert len(shipped) > 60
    for one in shipped:
        table, metadata = one.load(), one.metadata
        assert table_name(metadata) == f"{one.name}.parquet"
        measured = metadata.kind == "front_end"  # of a CPU that we have
        foreign = ("imported", "fitted", "derived")
        assert metadata.provenance in (("measured",) if measured else foreign)
        assert metadata.origin
        assert metadata.kernel_source
        assert table.columns["latency_s"].max() < 1.1  # a GiB over PCIe
    files = list((ROOT / "kernel_profiles" / "data" / "tables").glob("*.parquet"))
    assert len(files) == 8
    assert sum(path.stat().st_size for path in files) < 4_200_000


#: Turns MXFP4 into bfloat16, which it reads.
REREADS = "sglang_fused_moe_triton"


@on_each(
    "one", [t for t in shipped_tables() if t.kind == "moe" and t.metadata.provenance == "imported"]
)
def test_a_layer_of_many_experts_takes_what_reading_them_takes(one):
    """Rows of another width, or of a kernel that was not tuned, are 4 to 8 times slower."""
    metadata, columns = one.metadata, one.load().columns
    bits = {"bfloat16": 16, "fp8": 8, "fp8_block": 8}.get(metadata.dtype, 4.25)
    shape = metadata.shape
    inner = shape["hidden_size"] * shape["expert_intermediate_size"]
    expert = shape.get("matrices", 3) * inner * bits / 8
    odd = shape["expert_intermediate_size"] % 64
    if odd or metadata.kernel_source.startswith(REREADS):
        pytest.skip("odd experts, or read more than once")
    experts = shape["n_experts"] // shape.get("expert_parallel_size", 1)
    few = columns["batch"] * shape["top_k"] <= 8 * shape["n_experts"]
    full = columns["latency_s"][few & (columns["distinct_experts"] > 0.95 * experts)]
    if not len(full):
        pytest.skip("no such rows")
    more = experts - columns["distinct_experts"].min()
    read_s = more * expert / load_gpu(metadata.gpu).memory_bandwidth
    assert full.min() - columns["latency_s"].min() < 4.7 * read_s


def test_find_prefers_own_tables_then_the_newest_kernel():
    newest = find_table("moe", "H200", shape=SHAPE, dtype="bfloat16")
    assert newest is not None
    assert newest.metadata.framework == "vllm 0.24.0"
    same = [m for one in shipped_tables() if (m := one.metadata).gpu == "H200" and m.shape == SHAPE]
    frameworks = [metadata.framework for metadata in same]
    assert "vllm 0.19.0" in frameworks  # there is an older one to prefer it to
    own = LatencyTable(_metadata(gpu="H200", kernel_source="mine"), _columns())
    assert find_table("moe", "H200", shape=SHAPE, extra=[own]) is own
    assert find_table("moe", "H100", shape=SHAPE, extra=[own]) is not own
    assert find_table("moe", "H200", shape=SHAPE, dtype="int4") is None
    assert find_table("moe", "H200", shape={**SHAPE, "top_k": 7}) is None


def test_a_library_gives_back_its_tables(tmp_path, monkeypatch):
    """Of two kinds and two GPUs; of two tables with one name the last stays."""
    old = LatencyTable(_metadata(gpu="H100"), _columns())
    slow = {**_columns(), "latency_s": 2 * _columns()["latency_s"]}
    written = [
        old,
        LatencyTable(_metadata(gpu="A100"), slow),
        LatencyTable(_metadata(gpu="H100"), slow),
    ]
    collective = next(one for one in shipped_tables() if one.kind == "collective").load()
    assert table_library.write_library([*written, collective], tmp_path) == 3
    monkeypatch.setattr(table_library, "_folder", lambda: tmp_path)
    found = table_library._read_index(tmp_path)
    assert [one.name for one in found] == sorted(one.name for one in found)
    for table in (*written[1:], collective):
        name = table_name(table.metadata).removesuffix(".parquet")
        again = table_library.ShippedTable.load(next(one for one in found if one.name == name))
        assert again.metadata == table.metadata
        assert list(again.columns) == list(table.columns)
        for column, values in table.columns.items():
            assert again.columns[column].tolist() == values.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "collective.parquet",
        "index.parquet",
        "moe.parquet",
    ]
