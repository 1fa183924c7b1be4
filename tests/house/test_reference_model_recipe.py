"""The reference model's recipe runs from a checkout and is no part of the installed package."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())


def run_recipe(*arguments):
    command = [sys.executable, "-m", "studies.reference_model", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("command", ["train", "record"])
def test_help_needs_no_torch(command):
    done = run_recipe(command, "--help")
    assert done.returncode == 0
    assert "--out" in done.stdout


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_what_is_missing_is_told_in_one_line(tmp_path):
    done = run_recipe("train", str(tmp_path), "--out", str(tmp_path / "checkpoint"))
    assert done.returncode == 2
    assert done.stderr == (
        "Error: reference model: needs torch (allowed: pip install '.[reference-model]')\n"
    )


def test_it_is_not_in_the_package():
    assert find_spec("studies").origin == str(ROOT / "studies" / "__init__.py")
    assert find_spec("eldr_sim.traces.reference_model") is None
