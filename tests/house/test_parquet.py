"""Columns that are made without `pyarrow.array`, which imports pandas."""

import math

import numpy as np
import pyarrow as pa

from eldr_sim.parquet import array_of, column, table_of, texts

from ..on_each import on_each


@on_each("kind", ["bool", "int8", "int16", "int32", "int64", "float64", None])
@on_each("n", [0, 1, 7, 8, 1000])
@on_each("nulls", [True, False])
def test_columns_are_pyarrow_s(kind, n, nulls):
    rng = np.random.default_rng(n)
    values = rng.integers(0, 2 if kind == "bool" else 100, n).astype(kind or "uint16")
    strided = np.repeat(values, 2)[::2]  # as a field of a record is
    null = rng.random(n) < 0.3 if nulls else None
    made = column(strided, kind, null)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind and kind.replace("float64", "double"), mask=null))
    assert made.null_count == (0 if null is None else null.sum())


def test_texts_are_those_that_codes_stand_for():
    names = ["", "prose", "Ünïcode", "x"]
    for codes in (np.array([], np.int16), np.array([1, 2, 2, 0, 3, 1], np.int16)):
        made = texts(names, codes)
        made.validate(full=True)
        assert made.to_pylist() == [names[code] for code in codes]


@on_each(
    "values",
    [[1, 2], [1.5, None, math.nan], [1, 2.5, None], [True, None], ["a", "é", None, ""], [None], []],
)
def test_a_column_of_values_is_pyarrows(values):
    made, known = array_of(values), pa.array(values)
    assert (made.type, made.null_count) == (known.type, known.null_count)
    assert repr(made.to_pylist()) == repr(known.to_pylist())


def test_a_table_of_rows_is_pyarrows():
    rows = [{"a": 1, "b": None}, {"a": 2.5, "b": "x", "c": [1]}]
    assert table_of(rows).equals(pa.Table.from_pylist(rows))
    assert table_of([]).equals(pa.Table.from_pylist([]))
