"""No call that only Linux has on the way of run, compare, plan and report: without such modules and
functions they work. The platforms themselves have not been tried."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

#: Takes away what Windows or macOS lack, then runs commands in one process.
_PROGRAM = """
import os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for module, names in (
    (os, "memfd_create sched_getaffinity getuid geteuid sysconf fork register_at_fork".split()),
    (signal, ["pthread_sigmask", "SIGKILL", "SIGALRM", "setitimer"]),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
from pathlib import Path
from eldr_sim.cli.main import cli
small = ["--trace", "reference-moe", "--duration", "2", "--warmup", "1", "--output-len", "10"]
load = [*small, "--request-rate", "10"]
for words in (
    ["run", "--topology", "1P1D", *load, "--out", "run"],
    ["compare", "--policy", "jsq", "--topology", "1P1D", "--seeds", "1", "--jobs", "1", *load,
     "--out", "policies"],
    ["plan", "--slo", "ttft:2000,tpot:500", "--attainment", "0.8", "--policy", "jsq",
     "--max-gpus", "2", "--seeds", "3",
     "--tensor-parallel-size", "1", "--jobs", "1", *load, "--duration", "12", "--out", "plan"],
    ["report", "run", "policies", "plan", "--out", "report.html"],
):
    try:
        cli(words, standalone_mode=False)
    except SystemExit as end:
        assert not end.code, (words, end.code)
assert Path("report.html").stat().st_size > 1_000_000
print("ALL DONE")
"""


@pytest.mark.long
def test_commands_need_nothing_that_only_linux_has(tmp_path):
    pytest.importorskip("plotly", reason="report needs [plot]")
    run = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("ALL DONE\n")


def test_the_limits_and_the_package_name_the_same_versions_of_python():
    """Those that the page says were run are those of the package, and no others are."""
    limits = (_ROOT / "docs" / "limits.md").read_text()
    said = next(line for line in limits.splitlines() if line.startswith("Python 3."))
    run, untested = said.split(" are untested")[0].rsplit(". ", 1)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    kinds = "\n".join(project["classifiers"])
    versions = set(re.findall(r"Python :: (3\.\d+)", kinds))
    assert set(re.findall(r"\b3\.\d\d", run)) == versions
    assert versions.isdisjoint(re.findall(r"\b3\.\d\d", untested))
    assert [name for name in ("Linux", "MacOS", "Windows") if name in kinds] == ["Linux"]
    assert "macOS" in untested
    assert "Windows" in untested
