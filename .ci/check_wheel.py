"""Check that a wheel holds every Python module and data file of the rooms, and nothing else."""

import sys
import tomllib
import zipfile
from pathlib import Path

DATA = (".py", ".csv", ".json", ".npz", ".parquet", ".html", ".css", ".js", ".yaml", ".typed")
APART = {"_eldr_sim", "docs", "studies", "tests"}
rooms = {path.parent.name for path in Path().glob("*/__init__.py")} - APART
folders = {"eldr_sim": Path("_eldr_sim")} | {f"eldr_sim.{room}": Path(room) for room in rooms}
expected = set()
for package, folder in folders.items():
    root = package.replace(".", "/")
    files = {path for suffix in DATA for path in folder.rglob(f"*{suffix}")}
    for name in ("assets", "data", "templates"):
        files |= {path for found in folder.rglob(name) for path in found.rglob("*")}
    expected |= {f"{root}/{path.relative_to(folder)}" for path in files if path.is_file()}
patterns = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
for package, listed in patterns.items():
    root, room = package.replace(".", "/"), package.removeprefix("eldr_sim").lstrip(".")
    folder = Path(room.replace(".", "/") or "_eldr_sim")
    for pattern in listed:
        found = [path for path in folder.glob(pattern) if path.is_file()]
        if not found:
            sys.exit(f"{package}: no file matches {pattern}")
        expected |= {f"{root}/{path.relative_to(folder)}" for path in found}
expected = {name for name in expected if "__pycache__" not in name}

with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
missing, extra = sorted(expected - names), sorted(names - expected)
if missing or extra:
    sys.exit(f"wheel: missing {missing}, unexpected {extra}")
megabytes = Path(sys.argv[1]).stat().st_size / 1e6
print(f"{len(names)} files, {megabytes:.1f} MB")
