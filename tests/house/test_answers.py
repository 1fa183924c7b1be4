"""Every recorded answer is the one of today, or the change says so; see `answers`."""

import answers
import asked
import pytest


@pytest.mark.long
@pytest.mark.parametrize("part", asked.PARTS)
def test_answers_are_the_recorded_ones(part):
    recorded = answers.read((answers.RECORD / f"{part}.txt").read_text())
    moved = answers.moved(recorded, answers.answers(part))
    shown = "\n".join(moved[:20])
    assert not moved, (
        f"{len(moved)} figures moved:\n{shown}\nrecord: python tests/house/answers.py {part}"
    )


def test_what_moved_is_named_from_what_to_what():
    before = {"a": {"x": "1", "y": "3*2"}, "b": {"z": "s"}}
    after = {"a": {"x": "1.000000001", "y": "3*2.1"}, "c": {}}
    assert answers.moved(before, answers.read(answers.written(before))) == []
    told = ["a: y 3*2 -> 3*2.1", "b: no longer asked", "c: not recorded"]
    assert answers.moved(before, after) == told
