"""A server's log on a full disk ends after a whole line, is named, and ends nothing else."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from eldr_sim.errors import InputError
from eldr_sim.serving.log import RequestLog


@contextmanager
def files_up_to(n_bytes):
    """No file of this process grows beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 1, 19, 20, 21, 39, 40, 99])
def test_it_ends_after_a_whole_line(tmp_path, room):
    path, said = tmp_path / "log.jsonl", []
    path.write_text('{"earlier": "start"}\n')
    before = path.stat().st_size
    log = RequestLog(path, said.append)
    entry = {"at": "0123456789"}
    line = len(json.dumps(entry)) + 1
    with files_up_to(before + room):
        for _ in range(5):
            log.write(entry)
    lines = path.read_text().splitlines(keepends=True)
    assert all(json.loads(each) for each in lines)
    assert lines[-1].endswith("\n")
    assert len(lines) == 1 + min(5, room // line)
    assert len(said) == (room < 5 * line)
    assert all(each.startswith(f"log: {path}: ") for each in said)
    log.close()
    log.close()
    log.write(entry)  # what ends after the log has ended


def test_a_device_that_is_full_is_said_once():
    said = []
    log = RequestLog(Path("/dev/full"), said.append)
    for _ in range(3):
        log.write({})
    assert said == ["log: /dev/full: No space left on device; nothing more is written"]
    log.close()


def test_where_nothing_can_be_opened_is_bad_input(tmp_path):
    with pytest.raises(InputError, match=r"log: .*: Is a directory"):
        RequestLog(tmp_path, print)
