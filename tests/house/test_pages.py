"""The tree of the pages: 33 pages, 27,000 words, one task a how-to page, few figures in prose."""

import re
import tomllib

from ..on_each import on_each
from ..paths import ROOT

SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
SECTIONS = {
    title: [page for entry in pages for page in entry.values()]
    for section in SITE["nav"]
    for title, pages in section.items()
}
#: Pages of a section, and the most words of each.
TREE = {
    "Start": (4, 1100),
    "How to": (16, 600),
    "How it works": (4, 1000),
    "Can I believe it?": (2, 1000),
    "Reference": (6, 1500),
}
OF_PAGE = [(title, page) for title, pages in SECTIONS.items() for page in pages]
#: Numbers with a unit of what was measured or predicted.
FIGURE = re.compile(
    r"(?<![\w.])\d[\d,]*\.?\d*\s?"
    r"(?:%|(?:ms|us|s|GB|MB|TB|kB|KB|GiB|MiB|points?|times|CPU-s|CPU-seconds|tokens/s|req/s"
    r"|requests/s|GB/s|TFLOP/s|minutes?|seconds?|hours?)\b)"
)


def text_of(page):
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def prose(text):
    """Return a page without code, tables, generated blocks, links' targets and spans of code."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!-- \w+: .*?<!-- (?:end of \w+|\w+: end) -->", "", text, flags=re.S)
    text = re.sub(r"^ *\|.*$|^ {4,}\S.*$", "", text, flags=re.M)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", text)


def test_the_tree_is_that_of_the_plan():
    assert {title: len(pages) for title, pages in SECTIONS.items()} == {
        title: count for title, (count, _) in TREE.items()
    }


@on_each("section, page", OF_PAGE)
def test_a_page_is_short(section, page):
    text = text_of(page)
    by_hand = re.sub(r"<!-- \w+: .*?<!-- (?:end of \w+|\w+: end) -->", "", text, flags=re.S)
    assert len(by_hand.split()) <= TREE[section][1]


def test_all_pages_together():
    words = {page: len(text_of(page).split()) for _, page in OF_PAGE}
    readme = len((ROOT / "README.md").read_text().split())
    assert readme <= 500
    assert sum(words.values()) + readme <= 27_000


@on_each("page", ["../README.md", *(page for _, page in OF_PAGE)])
def test_a_page_has_few_figures_in_prose(page):
    found = FIGURE.findall(prose(text_of(page)))
    assert len(found) <= 10, found


@on_each("page", SECTIONS["How to"])
def test_a_how_to_page_has_its_parts(page):
    """A question, a command, how to read the output, and what can mislead."""
    text = text_of(page)
    assert text.count("\n**Question:** ") == 1
    assert "```sh\n" in text or "```console\n" in text
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert "What can mislead" in headings
    assert any(heading.startswith("How to read") for heading in headings)
