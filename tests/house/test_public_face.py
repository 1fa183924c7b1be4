"""Semantic versioning: a change of the public face is recorded, also in CHANGELOG.md."""

from itertools import pairwise

from ..paths import ROOT
from .public_face import face, read, recorded, version

RECORD = read()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def sections():
    """Return the text of CHANGELOG.md by version."""
    parts = CHANGELOG.split("\n## ")[1:]
    return {part.split()[0]: part for part in parts}


def broken(before, after, removed):
    """Whether a version that removed names is no major one."""
    return bool(removed) and int(after.split(".")[0]) <= int(before.split(".")[0])


def test_the_face_is_the_recorded_one():
    """After a change: ``python -m tests.house.public_face --record``; a line in CHANGELOG.md."""
    assert sorted(face() ^ recorded(RECORD)) == []


def test_every_recorded_version_is_in_the_changelog():
    assert set(RECORD) <= set(sections())
    assert version() in sections()


def test_what_a_version_changed_is_in_its_section():
    """Of each added or removed name the last word, such as an option or a key."""
    changed = list(RECORD.items())[1:]  # the first version is all new
    absent = [
        (number, line)
        for number, changes in changed
        for line in changes["added"] + changes["removed"]
        if line.split()[-1] not in sections()[number]
    ]
    assert absent == []


def test_a_removed_name_is_a_major_version():
    pairs = pairwise(RECORD)
    assert not any(broken(old, new, RECORD[new]["removed"]) for old, new in pairs)
    assert broken("1.2.0", "1.3.0", ["python run"])
    assert not broken("1.2.0", "2.0.0", ["python run"])
