"""Find the packages: `_eldr_sim/` is the root, each room at the top level `eldr_sim.<room>`."""

from pathlib import Path

from setuptools import find_packages, setup

#: Top-level folders that are no part of the distribution.
APART = ("_eldr_sim", "docs", "studies", "tests")
rooms = [path.parent.name for path in Path().glob("*/__init__.py")]
patterns = [pattern for room in rooms if room not in APART for pattern in (room, f"{room}.*")]
folders = {f"eldr_sim.{name}": name.replace(".", "/") for name in find_packages(include=patterns)}
folders["eldr_sim"] = "_eldr_sim"
setup(packages=sorted(folders), package_dir=folders)
