"""The optional packages that hold measured kernel tables, and what is in them.

Both are NVIDIA's (Apache-2.0) and have one layout, Parquet under
``systems/data/<gpu>/<part>/<engine>/<version>``: ``aisimulate``, of which PyPI has development
wheels only, and ``aiconfigurator-core``, which ended at 0.12.0. Where both are installed, the newer
comes first. A version's folder may hold some operations only: those of an older version stand for
the others (the package's own rule, ``systems/query_versions.yaml``)."""

from functools import lru_cache
from importlib import metadata as package_metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.tables.library import version_numbers

SYSTEMS = {
    "H100": "h100_sxm", "H200": "h200_sxm", "A100": "a100_sxm", "B200": "b200_sxm",
    "B300": "b300_sxm", "GB200": "gb200", "GB300": "gb300", "L40S": "l40s",
    "RTX PRO 6000": "rtx_pro_6000_server",
}  # fmt: skip
"""GPUs that can be imported, and their folder in the packages."""

#: Modules that hold tables, and their distributions; the first comes first.
PACKAGES = {"aisimulate_core": "aisimulate", "aiconfigurator_core": "aiconfigurator-core"}
#: How to install one, the newer of which has more.
INSTALL = (
    "pip install --no-deps aisimulate==0.13.0.dev202610270000000085, or "
    "pip install 'eldr-sim[aiconfigurator]'"
)


class Package(NamedTuple):
    """An installed package."""

    name: str  #: of its distribution
    version: str
    folder: Path  #: ``systems/data``


def packages() -> list[Package]:
    """Return the packages that are installed, the newer first."""
    installed = []
    for module, name in PACKAGES.items():
        spec = find_spec(module)  # importing them loads their compiled simulators
        for place in (spec and spec.submodule_search_locations) or ():
            folder = Path(place) / "systems" / "data"
            installed.append(Package(name, package_metadata.version(name), folder))
    return installed


class Source(NamedTuple):
    """A file of a package: what one version of one engine took on a GPU."""

    gpu: str
    part: str  #: ``moe``, ``attention``, ``mla``, ``gemm`` or ``comm``
    engine: str
    version: str
    file: str  #: empty for all files of the version
    package: Package

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.package.folder / self.where

    @property
    def where(self) -> str:
        """Its place in the package."""
        parts = (SYSTEMS[self.gpu], self.part, self.engine, self.version, self.file)
        return "/".join(filter(None, parts))

    @property
    def origin(self) -> str:
        """What a table's metadata says of it."""
        return f"{self.package.name} {self.package.version}: {self.where}"

    @property
    def rows(self) -> pd.DataFrame:
        """Its rows, none if it is missing; not to be changed."""
        return _rows(self.path)

    def chosen(self, **wanted: Any) -> pd.DataFrame:
        """Return its rows with these values; a version without such a column has 0 in it."""
        frame = self.rows
        if not frame.empty:
            frame = frame.assign(**{name: 0 for name in wanted if name not in frame})
            frame = frame[(frame[list(wanted)] == list(wanted.values())).all(axis=1)]
        return frame


@lru_cache(maxsize=16)
def _rows(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path) if path.is_file() else pd.DataFrame()


def sources(gpu: str, part: str, engine: str, file: str = "", version: str = "") -> list[Source]:
    """Return a file in all versions that there are, newest first, builds of a day last. Raises
    InputError: no package, or a GPU of which none has tables.

    ``version``: versions up to this one come before newer ones, of which the oldest is first."""
    if gpu not in SYSTEMS:
        raise InputError("gpu", f"no tables to import for {gpu!r}", ", ".join(SYSTEMS))
    installed = packages()
    if not installed:
        names = " nor ".join(PACKAGES.values())
        raise InputError("aiconfigurator", f"neither {names} is installed", INSTALL)
    by_name: dict[str, Source] = {}
    for package in installed:
        folder = package.folder / SYSTEMS[gpu] / part / engine
        for path in folder.iterdir() if folder.is_dir() else ():
            one = Source(gpu, part, engine, path.name, file, package)
            if one.path.exists():
                by_name.setdefault(path.name, one)
    limit = version_numbers(version)

    def rank(name: str) -> tuple[bool, bool, list[int]]:
        released, own = not name.startswith("dev"), version_numbers(name)
        within = not limit or own[: len(limit)] <= limit
        return released, within, own if within else [-number for number in own]

    return [by_name[name] for name in sorted(by_name, key=rank, reverse=True)]


def first_rows(
    gpu: str, part: str, engine: str, file: str, version: str = "", **wanted: Any
) -> tuple[Source, pd.DataFrame] | None:
    """Return the first of `sources` that has rows with these values, and these rows."""
    for source in sources(gpu, part, engine, file, version):
        rows = source.chosen(**wanted)
        if not rows.empty:
            return source, rows
    return None
