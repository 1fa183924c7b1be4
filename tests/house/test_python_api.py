"""The Python API: light to import, whole, and as its walk-through says."""

import runpy
import subprocess
import sys

import pytest

import eldr_sim

from ..paths import ROOT

WALK = ROOT / "docs" / "python_api.py"


def test_walk_through_runs_and_says_its_figures(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    runpy.run_path(str(WALK))
    out = capsys.readouterr().out
    assert "median TPOT" in out
    assert "against round_robin" in out
    (page,) = tmp_path.glob("eldr-sim-*/report.html")
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_every_name_is_there_and_is_the_documented_one():
    for name in eldr_sim.__all__:
        value = getattr(eldr_sim, name)
        assert name == "__version__" or value.__name__ == name
        assert name in dir(eldr_sim)
    text = WALK.read_text()
    assert [name for name in eldr_sim.__all__ if name not in text] == ["__version__"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        eldr_sim.nothing  # noqa: B018


def test_import_is_light():
    code = (
        "import sys, eldr_sim; heavy = {'numpy', 'numba', 'pyarrow', 'pydantic'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "from eldr_sim import RunConfig; assert RunConfig().topology == '8P16D'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
