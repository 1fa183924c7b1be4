"""How large the house is, and how well its rooms keep to themselves::

    python -m tests.house.house_figures

prints lines by room, the modules that name `RunConfig`, and the circles of imports."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from ..paths import ROOT

ROOMS = (
    "_eldr_sim", "cli", "kernel_profiles", "planning", "policies", "reports", "serving",
    "simulator", "traces", "validation",
)  # fmt: skip


def sources(rooms: tuple[str, ...] = (*ROOMS, "studies", "docs", ".ci")) -> list[Path]:
    """Return the Python files of some folders."""
    return sorted(file for room in rooms for file in (ROOT / room).rglob("*.py"))


def lines_by_room() -> Counter[str]:
    """Return the lines outside tests, by folder."""
    lines = Counter[str]()
    for file in [*sources(), ROOT / "setup.py"]:
        lines[file.relative_to(ROOT).parts[0]] += len(file.read_text().splitlines())
    return lines


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def naming(word: str) -> list[str]:
    """Return the modules in whose code, not texts, a name stands."""
    found = []
    for file in sources():
        nodes = ast.walk(_tree(file))
        names = (getattr(n, "id", getattr(n, "attr", getattr(n, "name", ""))) for n in nodes)
        if word in names:
            found.append(str(file.relative_to(ROOT)))
    return found


def _module(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(["eldr_sim", *(parts[1:] if parts[0] == "_eldr_sim" else parts)])


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run or are typed when a module is read; none inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(child)


@cache
def circles() -> tuple[frozenset[str], ...]:
    """Return the groups of modules that import each other, type-checking imports included."""
    modules = {_module(file): file for file in sources(ROOMS)}
    del modules["eldr_sim"]
    graph = defaultdict[str, set[str]](set)
    for module, file in modules.items():
        for one in _imports(_tree(file)):
            if isinstance(one, ast.ImportFrom) and one.module:
                inside = {f"{one.module}.{name.name}" for name in one.names}
                graph[module] |= {one.module, *inside} & modules.keys()

    number = {module: n for n, module in enumerate(modules)}
    ends = [(number[module], number[to]) for module in modules for to in graph[module]]
    rows, columns = zip(*ends, strict=True)
    matrix = csr_matrix((np.ones(len(ends)), (rows, columns)), (len(modules), len(modules)))
    _, labels = connected_components(matrix, connection="strong")
    groups = defaultdict[int, set[str]](set)
    for module, label in zip(modules, labels.tolist(), strict=True):
        groups[label].add(module)
    return tuple(frozenset(group) for group in groups.values() if len(group) > 1)


if __name__ == "__main__":
    rooms = lines_by_room()
    for room, n in sorted(rooms.items()):
        print(f"{n:7,} {room}")
    print(f"{rooms.total():7,} outside tests")
    modules = naming("RunConfig")
    print(f"{len(modules)} modules name RunConfig:", *modules, sep="\n  ")
    for group in circles():
        print(f"circle of {len(group)}:", ", ".join(sorted(group)))
