"""Pictures come from today's code or carry a date; the README's shows what its command prints."""

import json
import re

import pytest

from eldr_sim.charts import PALETTE

from ..on_each import on_each
from ..paths import ROOT

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


@pytest.mark.slow
@pytest.mark.parametrize("policy", FIGURES)
def test_first_command_prints_the_figures_of_the_picture(policy, run_cli, drawn_routing):
    words = [policy if word == "eldr" else word for word in first_command()]
    code, out, err = run_cli(*words)
    assert code == 0, err
    printed = dict(re.findall(r"^(.*?): +([\d.]+)$", out, re.M))
    for figure, value in FIGURES[policy].items():
        assert float(printed[PRINTED[figure]]) == pytest.approx(value, abs=0.0051), figure


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


def test_no_label_is_small():
    """Of what draws pictures, in points."""
    small = []
    for folder in ("_eldr_sim", "reports", "validation", "studies", "docs", "simulator"):
        for path in (ROOT / folder).rglob("*.py"):
            for size in re.findall(r"(?:font|label)_?size=(\d+)", path.read_text()):
                if int(size) < 8:
                    small.append(f"{path.relative_to(ROOT)}: {size}")
    assert small == []


def test_pictures_and_reports_have_one_palette():
    style = (ROOT / "reports" / "assets" / "report.css").read_text()
    assert tuple(re.findall(r"--c\d: light-dark\((#\w+),", style)) == PALETTE
