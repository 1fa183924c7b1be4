"""What reports are made of: cells, pictures, and colours that are told apart."""

import itertools
import math
import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.reports.cells import interval, measured, number, table
from eldr_sim.reports.pictures import (
    N_COLOURS,
    Colours,
    Series,
    curves,
    intervals,
    pareto,
    stacked_bars,
)

from ..on_each import on_each
from .pages import marks


def test_cells_keep_the_full_value_and_mark_what_is_missing():
    drawn = table("t", ["name", "x"], [["b", 1234.5678], ["a", None], ["c", math.nan]])
    assert drawn.numeric == [False, True]
    assert [row[1].value for row in drawn.rows] == ["1234.5678", "", ""]
    assert [row[1].text for row in drawn.rows] == ["1,235", "–", "–"]
    assert [row[0].value for row in drawn.rows] == [None, None, None]
    assert measured(math.nan, "?").value == ""


@on_each(
    "value, text",
    [
        (0.0, "0.00"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (123.45, "123.5"),
        (1.0, "1.00"),
        (-0.5, "−0.5000"),
        (0.00012, "0.00012"),
        (math.inf, "∞"),
        (True, "yes"),
        (None, "–"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_intervals_share_their_decimals():
    assert interval(1.0, 0.5, 2.0) == "1.00 [0.50, 2.00]"
    assert interval(-120.0, -130.0, 2.0, signs=True) == "−120.0 [−130.0, +2.0]"
    assert interval(1.0, math.nan, math.nan) == "1.00"


def test_points_that_are_not_finite_are_left_out():
    series = [Series("a", [1.0, math.nan, 3.0], [1.0, 2.0, math.inf], [0.5, 0, 0], [2.0, 0, 0])]
    picture = curves("t", "x, s", "y, ms", series)
    said = "<br>95% interval: 0.5000 to 2.00"
    assert marks(picture.spec) == [("a", 1.0, 1.0, said)]
    assert picture.spec["data"][0]["error_y"]["array"] == [1.0]
    assert curves("t", "x", "y", [Series("a", [1.0], [math.nan])]).spec["data"] == []
    rows = [("a", math.nan, math.nan, math.nan, 0), ("b", 1.0, 0.5, 2.0, 1)]
    assert marks(intervals("t", "x, %", rows).spec) == [("b", 1.0, "b", [0.5, 2.0])]


def test_bars_say_their_share_and_total():
    picture = stacked_bars("t", "x", "y, ms", ["0", "1"], [("a", [0, 1], 0), ("b", [0, 3], 1)])
    assert marks(picture.spec) == [
        ("a", "0", 0, [0.0, 0.0]),
        ("a", "1", 1, [25.0, 4.0]),
        ("b", "0", 0, [0.0, 0.0]),
        ("b", "1", 3, [75.0, 4.0]),
    ]


def test_no_interval_below_zero_of_what_is_never_below_zero():
    def band(y):
        series = Series("a", [1.0, 2.0], y, [v - 2.0 for v in y], [v + 2.0 for v in y])
        return curves("t", "x", "y", [series]).spec["data"][0]["y"]

    assert band([1.0, 3.0]) == [3.0, 5.0, 1.0, 0.0]
    assert band([-1.0, 3.0]) == [1.0, 5.0, 1.0, -3.0]


def test_dots_are_hollow_where_the_interval_holds_zero():
    rows = [("a", 1.0, 0.5, 2.0, 0), ("b", 1.0, -0.5, 2.0, 1), ("c", 1.0, math.nan, math.nan, 2)]
    for differences, hollow in ((True, [False, True, True]), (False, [False] * 3)):
        drawn = intervals("t", "x", rows, differences=differences).spec["data"]
        assert [t["marker"].get("symbol") == "circle-open" for t in drawn] == hollow


def test_names_keep_their_colours():
    colours = Colours()
    assert [colours("policy", name) for name in ("a", "b", "a")] == [0, 1, 0]
    assert colours("domain", "b") == 0
    many = [colours("run", str(i)) for i in range(N_COLOURS + 1)]
    drawn = [Series(str(i), [0, 1], [0, 1], colour=i, style=i // N_COLOURS) for i in many]
    lines = [trace["line"] for trace in curves("t", "x", "y", drawn).spec["data"]]
    assert lines[0]["color"] == lines[-1]["color"]
    assert lines[0]["dash"] != lines[-1]["dash"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_pareto_front_is_what_no_point_beats(points):
    floats = [(float(x), float(y)) for x, y in points] + [(math.nan, 100.0)]

    def beaten(p):
        return any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in floats[:-1])

    front = [floats[i] for i in pareto(floats)]
    assert front == sorted({p for p in floats[:-1] if not beaten(p)})


# Colours ------------------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes 2009: protanopia, deuteranopia, tritanopia at full severity.
SIGHT = [
    np.eye(3),
    np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
]
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear_rgb(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """WCAG 2.2 contrast ratio."""
    light = sorted((XYZ @ linear_rgb(a))[1] for a in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(rgb):
    ratio = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1)
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_are_legible_and_told_apart_by_the_colour_blind(mode):
    css = (files("eldr_sim.reports") / "assets" / "report.css").read_text()
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colours = {name: values[mode] for name, *values in pairs}
    for name in ("text", "soft", "accent"):
        for ground in ("page", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5
    for name in ("warn", "good", "weak"):
        assert contrast(colours[name], colours[f"{name}-page"]) >= 4.5
    series = [colours[f"c{i}"] for i in range(8)]
    assert min(contrast(colour, colours["card"]) for colour in series) >= 3.0
    for matrix in SIGHT:
        seen = [lab(matrix @ linear_rgb(colour)) for colour in series]
        distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
        assert min(distances) >= 20.0
