"""The result folder: whole or absent, and identical bytes for identical runs."""

import json
import math
import os
import subprocess
import sys

import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.results import check_output, result_folder, write_json

FILES = ("summary.json", "config.json", "requests.parquet", "steps.parquet")


def test_nothing_is_left_when_writing_fails(tmp_path):
    out = tmp_path / "result"

    def write_half():
        with result_folder(out, force=False) as folder:
            (folder / "summary.json").write_text("half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_keeps_the_old_result(tmp_path):
    out = tmp_path / "result"
    with result_folder(out, force=False) as folder:
        (folder / "summary.json").write_text("old")

    def replace():
        with result_folder(out, force=True) as folder:
            (folder / "summary.json").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace()
    assert (out / "summary.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_force_replaces_all_of_the_old_result(tmp_path):
    out = tmp_path / "result"
    for name in ("summary.json", "old.png"):
        with result_folder(out, force=out.exists()) as folder:
            (folder / "summary.json").write_text(name)
            (folder / name).write_text(name)
    with result_folder(out, force=True) as folder:
        (folder / "summary.json").write_text("new")
    assert [path.name for path in out.iterdir()] == ["summary.json"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_is_no_result(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for force in (False, True):
        with pytest.raises(InputError, match="out: "):
            check_output(path, force)


def test_force_replaces_results_of_its_kind_only(tmp_path):
    """The caller says which file tells one: a plan is no run, and stays."""
    for marker, other in (("plan.json", "summary.json"), ("summary.json", "plan.json")):
        out = tmp_path / marker
        out.mkdir()
        check_output(out, force=True)  # an empty folder holds nothing to lose
        (out / marker).write_text("{}")
        check_output(out, True, marker)
        with pytest.raises(InputError, match=f"is not a result with a {other}"):
            check_output(out, True, other)


def test_unwritable_place_is_told(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with (
        pytest.raises(InputError, match="out: cannot write"),
        result_folder(blocker / "out", False),
    ):
        pass


def test_json_has_no_infinities(tmp_path):
    write_json(tmp_path / "a.json", {"rate": math.inf, "list": [1.0, -math.inf], "none": None})
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "rate": "inf",
        "list": [1.0, "-inf"],
        "none": None,
    }
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "b.json", {"x": math.nan})


@pytest.mark.long
def test_two_processes_write_identical_bytes(run_cli, tmp_path):
    """INV-10: One configuration, this process and one whose hashes of strings differ."""
    here, there = tmp_path / "here", tmp_path / "there"
    options = [
        "--policy", "eldr", "--topology", "2P4D", "--duration", "3", "--warmup", "1",
        "--output-len", "64", "--trace", "reference-moe", "--out",
    ]  # fmt: skip
    assert run_cli("run", *options, here)[0] == 0
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    subprocess.run(
        [sys.executable, "-m", "eldr_sim.cli.main", "run", *options, str(there)],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
    )
    for name in FILES:
        assert (here / name).read_bytes() == (there / name).read_bytes()
