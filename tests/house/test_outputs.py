"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import stat

import pytest

from eldr_sim.errors import InputError
from eldr_sim.outputs import whole_file, whole_folder


@pytest.mark.parametrize("kind", [whole_file, whole_folder])
def test_an_interrupted_output_leaves_what_was_there(tmp_path, kind):
    out = tmp_path / "new" / "out"

    def put(path, text):
        (path if kind is whole_file else path / "part").write_text(text)

    def interrupted():
        with kind(out) as temporary:
            put(temporary, "half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(out.parent.iterdir()) == []
    with kind(out) as temporary:
        put(temporary, "whole")
        assert not out.exists()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out if kind is whole_file else out / "part").read_text() == "whole"
    readable = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
    assert out.stat().st_mode & readable == readable


@pytest.mark.parametrize("kind", [whole_file, whole_folder])
def test_where_nothing_can_be_written_is_one_line(tmp_path, kind):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    with pytest.raises(InputError, match=r"^table: cannot write"), kind(out, "table"):
        pass
