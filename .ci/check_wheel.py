"""Check that a wheel holds every Python module and data file of the rooms, and nothing else."""

import sys
import tomllib
import zipfile
from pathlib import Path

setuptools = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]
folders = {package: Path(folder) for package, folder in setuptools["package-dir"].items()}
expected = set()
for package, folder in folders.items():
    root = package.replace(".", "/")
    expected |= {f"{root}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
    for pattern in setuptools["package-data"].get(package, []):
        files = {f"{root}/{path.relative_to(folder)}" for path in folder.glob(pattern)}
        if not files:
            sys.exit(f"{package}: no file matches {pattern}")
        expected |= files
    for name in ("assets", "data", "templates"):
        unlisted = [path for path in (folder / name).rglob("*") if path.is_file()]
        expected |= {f"{root}/{path.relative_to(folder)}" for path in unlisted}

with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
missing, extra = sorted(expected - names), sorted(names - expected)
if missing or extra:
    sys.exit(f"wheel: missing {missing}, unexpected {extra}")
megabytes = Path(sys.argv[1]).stat().st_size / 1e6
print(f"{len(names)} files, {megabytes:.1f} MB")
