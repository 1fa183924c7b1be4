"""Policies of other packages: the worked example really installs, and broken ones are named."""

import importlib
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import DecodePolicy, PolicyContext, RequestInfo, Workers
from eldr_sim.simulator.config import make_config
from eldr_sim.simulator.run import simulate

from ..paths import ROOT

EXAMPLE = ROOT / "docs" / "example_policy"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example package, installed by pip into a folder of its own, without the network."""
    for tool, oldest in (("pip", 23), ("setuptools", 80)):
        try:
            found = int(version(tool).split(".")[0])
        except PackageNotFoundError:
            found = 0
        if found < oldest:
            pytest.skip(f"building the example needs {tool} {oldest} or later, here is {found}")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "example")
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--disable-pip-version-check",
            "--target",
            str(target),
            str(source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


def context(n_workers=6, seed=0):
    return PolicyContext(n_workers, np.random.default_rng(seed))


def test_the_example_package_is_found_by_name(installed, monkeypatch):
    with pytest.raises(InputError, match="unknown policy 'p3c'"):
        registry.decode_policy("p3c", context())
    monkeypatch.syspath_prepend(str(installed))
    assert "p3c" in registry.names("decode")
    assert "p3c" not in registry.names("prefill")
    policy = registry.decode_policy("p3c", context())
    assert isinstance(policy, DecodePolicy)
    loads = np.array([5, 4, 3, 2, 1, 0])
    picks = [policy.select(RequestInfo(0, 10, 0), Workers.idle(loads)) for _ in range(600)]
    # The best of three of six never takes one of the two most loaded.
    assert set(picks) == {2, 3, 4, 5}
    assert picks.count(5) == pytest.approx(300, abs=60)
    everyone = registry.decode_policy("P3C:choices=9", context())
    assert everyone.select(RequestInfo(0, 1, 0), Workers.idle([3, 2, 1, 0, 2, 3])) == 3
    with pytest.raises(InputError, match=r"policy\.choices: '0'"):
        registry.decode_policy("p3c:choices=0", context())
    assert make_config({"policy": {"name": "p3c", "choices": 2}}).policy == "p3c:choices=2"
    again = registry.decode_policy("p3c", context())
    assert [again.select(RequestInfo(0, 10, 0), Workers.idle(loads)) for _ in range(600)] == picks


def test_the_example_package_serves_a_run(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    config = make_config({"policy": "p3c", "topology": "1P4D", "num_requests": 40})
    result = simulate(config)
    assert result.summary["policy"] == "p3c"
    assert result.summary["completed"] == 40
    assert len(set(result.requests["decode_worker"].to_pylist())) > 1


BROKEN = {
    "imports": ("import nothing_of_that_name", "does not load"),
    "value": ("Policy = 3", "is no class"),
    "nameless": (
        "class Policy:\n decision = 'decode'\n def select(self, r, l): ...",
        "has no name",
    ),
    "undecided": (
        "class Policy:\n name = 'x'\n decision = 'lunch'\n def select(self, r, l): ...",
        "decision='lunch', not one of decode, prefill",
    ),
    "idle": ("class Policy:\n name = 'x'\n decision = 'decode'", "has no method select"),
    "usurper": (
        "class Policy:\n name = 'jsq'\n decision = 'decode'\n def select(self, r, l): ...",
        "takes the built-in name 'jsq'",
    ),
}


def package(folder, module, source, points):
    """Lay out an installed package by hand: a module and its .dist-info."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_is_named_and_leaves_the_built_ins_alone(kind, tmp_path, monkeypatch):
    source, problem = BROKEN[kind]
    module = f"eldr_broken_{kind}"
    package(tmp_path, module, source, {"mine": f"{module}:Policy"})
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=problem) as caught:
        registry.names("decode")
    assert module in str(caught.value)
    assert "'mine'" in str(caught.value)
    assert (
        registry.decode_policy("jsq", context()).select(
            RequestInfo(0, 1, 0), Workers.idle(np.ones(6))
        )
        == 0
    )


def test_two_packages_may_not_share_a_name(tmp_path, monkeypatch):
    source = "class Policy:\n name = 'twice'\n decision = 'prefill'\n def select(self, r, l): ..."
    for module in ("eldr_twin_a", "eldr_twin_b"):
        package(tmp_path, module, source, {"twice": f"{module}:Policy"})
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(InputError, match="offers 'twice', which another one has"):
        registry.names("prefill")


def test_one_package_may_offer_both_decisions(tmp_path, monkeypatch):
    source = (
        "class D:\n name = 'same'\n decision = 'decode'\n"
        " def __init__(self, c): self.c = c\n def select(self, r, l): return 0\n"
        "class P(D):\n decision = 'prefill'\n"
    )
    points = {"same_d": "eldr_both:D", "same_p": "eldr_both:P"}
    package(tmp_path, "eldr_both", source, points)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert type(registry.decode_policy("same", context())).__name__ == "D"
    assert type(registry.prefill_policy("same", context())).__name__ == "P"
