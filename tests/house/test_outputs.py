"""Files and folders that appear whole or not at all."""

import ast
import errno
import os
import stat

import pytest

from eldr_sim import outputs
from eldr_sim.errors import InputError
from eldr_sim.outputs import whole_file, whole_folder

from ..paths import ROOT


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


@pytest.mark.parametrize("kind", [whole_file, whole_folder])
def test_a_full_disk_is_told_of_the_file_that_was_asked_for(tmp_path, kind):
    """What the disk refuses has no name, or that of a temporary file."""
    out = tmp_path / "out"

    def fill(names):
        with kind(out) as temporary:
            part = temporary if kind is whole_file else temporary / "part"
            raise OSError(errno.ENOSPC, "No space left on device", *([str(part)] if names else []))

    for names in (False, True):
        with pytest.raises(InputError) as caught:
            fill(names)
        assert str(caught.value) == f"out: cannot write {out}: No space left on device"
    with pytest.raises(FileNotFoundError, match="no_input"), kind(out):  # of another file
        (tmp_path / "no_input").read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_nothing_is_refused_before_anything_runs(tmp_path, run_cli):
    out = tmp_path / "results"
    out.symlink_to(tmp_path / "gone" / "results")
    code, _, error = run_cli("run", "--out", out)
    assert (code, error) == (
        2,
        f"Error: out: {out} is a link to {tmp_path / 'gone' / 'results'}, which does not exist "
        "(allowed: a new folder)\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_folder_that_its_successor_cannot_replace_stays(tmp_path, monkeypatch, error):
    out, real, calls = tmp_path / "out", os.replace, []
    out.mkdir()
    (out / "old").touch()

    def replace(source, target):
        calls.append(target)
        if len(calls) == 2:  # the old one is aside
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((error, InputError)), whole_folder(out) as temporary:
        (temporary / "new").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["old"]


def test_what_goes_with_the_process_is_not_output(tmp_path):
    """An interrupted command names what it leaves, and no routing that it drew for itself."""
    outputs.forget_written()
    for place in (tmp_path / "trace", outputs.process_folder("routing") / "trace"):
        with whole_folder(place) as folder:
            (folder / "part").touch()
        assert place.exists()
    assert outputs.written() == [tmp_path / "trace"]


@pytest.mark.long
def test_temporary_folders_go_with_a_block_or_are_named_to_outputs():
    """One that an object holds is still there when an interrupted command says what it leaves."""
    held = []
    for path in sorted(ROOT.glob("[!.]*/**/*.py")):
        if path.parts[len(ROOT.parts)] in ("tests", "build") or path.name == "outputs.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        blocks = {id(at.context_expr) for at in ast.walk(tree) if isinstance(at, ast.withitem)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and "TemporaryDirectory" in ast.unparse(node.func):
                held += [] if id(node) in blocks else [f"{path.relative_to(ROOT)}:{node.lineno}"]
    assert held == []
