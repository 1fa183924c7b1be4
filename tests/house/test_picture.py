"""Pictures come from today's code or carry a date; the README's shows what its command prints."""

import json
import re

import pytest
from matplotlib.figure import Figure

from eldr_sim import charts
from eldr_sim.charts import PALETTE
from studies import one_picture
from studies.eldr.map import draw_kept

from ..on_each import on_each
from ..paths import ROOT
from .drawn import drawings, faults
from .test_claims import render

PICTURE = ROOT / "docs" / "images" / "same_requests.png"
FIGURES = json.loads(PICTURE.with_suffix(".json").read_text())
PAGES = ["README.md", "docs/index.md", "docs/concepts.md"]
#: What `eldr-sim run` prints each figure as.
PRINTED = {
    "completed": "Successful requests",
    "median_tpot_ms": "Median TPOT (ms)",
    "mean_decode_batch": "Mean batch (requests)",
    "mean_active_experts_per_step": "Mean activated experts per step",
}


def first_command():
    """Return the words of the README's first command, after ``eldr-sim``."""
    (words,) = re.findall(
        r"ci: run -->\n```sh\n.*bin/eldr-sim (.*)\n", (ROOT / "README.md").read_text()
    )
    return words.split()


def test_picture_and_figures_are_of_one_drawing():
    image = pytest.importorskip("PIL.Image")
    with image.open(PICTURE) as picture:
        assert json.loads(picture.text["Description"]) == FIGURES


def test_picture_is_of_the_first_command():
    said = (ROOT / "studies" / "one_picture.py").read_text()
    words = first_command()
    for policy in FIGURES:
        line = " ".join(policy if word == "eldr" else word for word in words)
        assert f"eldr-sim {line} --out results/{policy}\n" in said


@pytest.mark.parametrize("page", PAGES)
def test_pages_state_the_figures_of_the_picture(page):
    text = (ROOT / page).read_text()
    stated = [text[at.start() - 200 : at.end() + 400] for at in re.finditer(r"7,188", text)]
    assert stated, page
    for figures in FIGURES.values():
        assert f"{figures['median_tpot_ms']:.1f}" in stated[0]
        assert f"{figures['completed']:,} requests" in stated[0]


def example(page):
    """Return the lines that a page shows of the output of its command."""
    (block,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    return block.splitlines()


def printed(lines):
    """Return the figures of output lines by their headings."""
    return dict(re.findall(r"^(.*?): +([\d.]+)$", "\n".join(lines), re.M))


def test_the_first_page_shows_the_figures_of_the_picture():
    shown = printed(example("index.md"))
    for figure in ("completed", "median_tpot_ms"):
        assert float(shown[PRINTED[figure]]) == FIGURES["eldr"][figure]


@pytest.mark.slow
@pytest.mark.parametrize("policy", FIGURES)
def test_first_command_prints_the_figures_of_the_pages(policy, run_cli, drawn_routing, tmp_path):
    words = [policy if word == "eldr" else word for word in first_command()]
    code, out, err = run_cli(*words, "--out", tmp_path / "b")
    assert code == 0, err
    figures = printed(out.splitlines())
    for figure, value in FIGURES[policy].items():
        assert float(figures[PRINTED[figure]]) == pytest.approx(value, abs=0.0051), figure
    if policy == "eldr":
        assert set(example("index.md")) <= set(out.splitlines())
        code, out, err = run_cli("explain", tmp_path / "b")
        assert set(example("explain.md")) <= set(out.splitlines())


IMAGES = ROOT / "docs" / "images"


@on_each("path", sorted(IMAGES.glob("*.png")))
def test_a_picture_has_a_command_or_a_date(path):
    """Its metadata have the version, or its captions have version and month."""
    image = pytest.importorskip("PIL.Image")
    with image.open(path) as picture:
        if re.match(r"eldr-sim \d+\.\d+\.\d+", picture.text.get("Software", "")):
            return
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "studies").glob("*/*.md")]
    captions = [
        caption
        for page in pages
        for caption in re.findall(rf"!\[([^\]]*)\]\([^)]*{path.name}\)", page.read_text())
    ]
    assert captions
    for caption in captions:
        assert re.search(r"version \d+\.\d+\.\d+", caption), caption
        assert re.search(r"20\d\d", caption), caption


SMALL = ("--trace", "reference-moe", "--topology", "1P2D", "--num-requests", "60", "--warmup", "1",
         "--request-rate", "40", "--output-len", "40")  # fmt: skip


def faults_of(made):
    found = {f"{n}: {figure.get_suptitle()}": faults(figure) for n, figure in enumerate(made)}
    return {name: bad for name, bad in found.items() if bad}


@pytest.mark.slow
def test_pictures_of_runs_can_be_read(run_cli, monkeypatch, tmp_path):
    """Pictures of the pages, drawn by their code at a small size: no label below 8 points, the
    colours of one palette, and a legend, colour bar or label that explains them."""
    with drawings(monkeypatch) as made:
        for policy, more in (("jsq", ["--fail", "decode:1@1s+1s", "--plot"]), ("eldr", [])):
            code, _, err = run_cli(
                "run", *SMALL, "--policy", policy, *more, "--out", tmp_path / policy
            )
            assert code == 0, err
        runs = len(made)
        assert (
            run_cli("trace", "inspect", "reference-moe", "--plot", "--out", tmp_path / "i")[0] == 0
        )
        assert 3 < runs < len(made)
        one_picture.main([tmp_path / "jsq", tmp_path / "eldr"], tmp_path / "same.png")
    assert faults_of(made) == {}


@pytest.mark.long
def test_pictures_of_claims_can_be_read(monkeypatch, tmp_path):
    rows = render.read()
    monkeypatch.setattr(render, "DOCS", tmp_path)
    with drawings(monkeypatch) as made:
        for page in {row["page"] for row in rows}:
            render.picture(page, rows)
    assert len(made) >= 9
    assert faults_of(made) == {}


def test_the_map_of_eldr_can_be_read(monkeypatch, tmp_path):
    with drawings(monkeypatch) as made:
        draw_kept(tmp_path / "map.png")
    assert faults_of(made) == {}


ROWS = [
    {"x": x, "y": y, "tpot": 10.0 * x + y, "best": ("jsq", "eldr")[(x + y) % 2], "policy": policy}
    for x in range(3) for y in range(3) for policy in ("jsq", "eldr")
]  # fmt: skip


@pytest.mark.parametrize(
    "draw",
    [
        charts.lines(ROWS, "x", "tpot", by="policy", panel="y"),
        charts.bars(ROWS, "x", "tpot", by="policy"),
        charts.field(ROWS[::2], "x", "y", "tpot"),
        charts.field(ROWS[::2], "x", "y", "best", spell="{}"),
    ],
)
def test_studies_draw_pictures_that_can_be_read(draw, monkeypatch, tmp_path):
    with drawings(monkeypatch) as made:
        charts.write_picture(tmp_path / "a.png", draw)
    assert faults(made[0]) == []


@pytest.mark.parametrize(
    ("draw", "fault"),
    [
        (lambda axes: axes.set_xlabel("batch", fontsize=7), "7 points"),
        (lambda axes: axes.plot([1, 2], color="#00ff00"), "not of the palette"),
        (lambda axes: [axes.plot([1, n], color=PALETTE[n]) for n in (1, 2)], "no legend"),
        (lambda axes: axes.imshow([[1.0, 2.0]], cmap="Blues"), "no colour bar"),
        (lambda axes: axes.imshow([[1.0, 2.0]], cmap="jet"), "colour map"),
    ],
)
def test_a_bad_picture_is_found(draw, fault):
    figure = Figure()
    draw(figure.subplots())
    assert any(fault in text for text in faults(figure))


def test_pictures_and_reports_have_one_palette():
    style = (ROOT / "reports" / "assets" / "report.css").read_text()
    assert tuple(re.findall(r"--c\d: light-dark\((#\w+),", style)) == PALETTE
