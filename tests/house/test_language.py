"""Help, errors, pages and docstrings are plain English: they have no idiom of the word list."""

import re

import pytest

from . import language


@pytest.mark.parametrize("kind", ["help", "messages", "strings", "pages", "docstrings"])
def test_no_idiom_is_read(kind):
    """``python -m tests.house.language KIND`` prints each with its place."""
    found = [(place, hit) for place, text in language.KINDS[kind]() for hit in language.hits(text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "as if so many workers fit", "a so-manieth step", "worker that waits for whom",
        "nobody has measured it", "a folder of its own", "it is told to stop",
        "the router hears of it",
    ],
)  # fmt: skip
def test_the_list_finds_idioms(text):
    assert language.hits(text)


@pytest.mark.parametrize(
    "text", ["as many workers as fit", "your own log", "unless told otherwise", "the whole of it"]
)
def test_the_list_leaves_plain_english_alone(text):
    assert language.hits(text) == []


#: Words that continue another option's sentence.
CONTINUES = re.compile(
    r"(and|or|until|but|then|which|its|their|likewise|the same|for as many|also)\b", re.I
)


def test_every_option_has_a_help_that_stands_alone():
    """A sentence or noun phrase of its own: it begins with a capital, a name or a value, ends with
    a full stop, and continues no other option's."""
    options = [
        (name, " ".join(text.split())) for name, text in language.help_texts() if " -" in name
    ]
    bad = {
        name: text
        for name, text in options
        if not re.match(r"[A-Z0-9`'\"(\[]", text)
        or not re.search(r"[.)\]]$", text)
        or CONTINUES.match(text)
    }
    assert len(options) > 1000
    assert bad == {}
