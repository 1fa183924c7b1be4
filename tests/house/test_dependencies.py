"""What pip may install has no advisory known when the bound was set; the image is pinned."""

import re
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from ..on_each import on_each
from ..paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: The version that mends each, as its advisory says.
MENDED = {
    "aiohttp": ("3.14.3", "CVE-2026-69243 request smuggling; before it CVE-2025-69223, -53643"),
    "jinja2": ("3.1.6", "CVE-2025-27516 sandbox escape"),
    "pyarrow": ("23.0.1", "CVE-2026-25087 use after free"),
    "pytest": ("9.0.3", "CVE-2025-71176 temporary folders"),
    "ray": ("2.52.0", "CVE-2025-62593 code execution through a browser"),
    "setuptools": ("78.1.1", "CVE-2025-47273 path traversal"),
    "torch": ("2.10.0", "CVE-2026-24747, CVE-2025-32434: torch.load"),
    "wheel": ("0.46.2", "CVE-2026-24049 path traversal"),
}


def requirements():
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return [(group, Requirement(text)) for group, texts in groups.items() for text in texts]


@on_each("name", MENDED)
def test_lower_bounds_exclude_versions_with_advisories(name):
    mended, advisory = MENDED[name]
    found = [(group, need) for group, need in requirements() if need.name.lower() == name]
    assert found
    for group, need in found:
        lowest = [
            Version(bound.version) for bound in need.specifier if bound.operator in (">=", "==")
        ]
        assert lowest, f"{group}: {need}"
        assert min(lowest) >= Version(mended), f"{group}: {need}: {advisory}"


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line[:1] != "#"]
    return {pair[1].lower().replace("_", "-"): Version(pair[2]) for pair in pairs}


def test_the_image_installs_pinned_versions_that_the_bounds_allow():
    """All that the core and ``live`` name stands in constraints.txt, which the Dockerfile uses."""
    known = pins()
    for group, need in requirements():
        name = need.name.lower().replace("_", "-")
        if name in known:
            assert need.specifier.contains(known[name]), f"{need}: {known[name]}"
        assert group not in ("", "live") or name in known, need
    assert "-c /source/constraints.txt" in (ROOT / "Dockerfile").read_text()
    needed = {"constraints.txt", "pyproject.toml", "setup.py"}
    assert needed <= {line[1:] for line in (ROOT / ".dockerignore").read_text().split()}


def test_an_audit_without_a_database_is_skipped_and_says_so(tmp_path):
    """An advisory fails it; a mirror of packages alone, or no network, does not."""
    (tmp_path / "pip_audit.py").write_text(FAKE)
    for says, code, words in (
        ("offline", 0, "audit skipped: no answer from the database of advisories: no route"),
        ("unknown", 0, "audit skipped: none of 1 packages of constraints.txt"),
        ("clean", 0, "audit: 1 of 1 packages of oldest.txt, 0 advisories"),
        ("found", 1, "aiohttp 3.0: CVE-1, fixed in 3.1"),
    ):
        env = {"PYTHONPATH": str(tmp_path), "SAYS": says, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [ROOT / ".ci" / "audit", sys.executable], capture_output=True, text=True, env=env
        )
        assert (done.returncode, words in done.stdout) == (code, True), (says, done)


FAKE = """
import json, os, sys
says = os.environ["SAYS"]
if says == "offline":
    sys.exit("no route to host")
one = {"name": "aiohttp", "version": "3.0"}
one |= {"skip_reason": "not found"} if says == "unknown" else {"vulns": []}
if says == "found":
    one["vulns"] = [{"id": "CVE-1", "fix_versions": ["3.1"]}]
json.dump({"dependencies": [one]}, open(sys.argv[sys.argv.index("--output") + 1], "w"))
sys.exit(says == "found")
"""
