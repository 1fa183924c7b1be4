"""Counts bindings whose name does not say what they hold.

``python -m tests.house.bindings`` lists the files with the most of them."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..paths import ROOT

#: Names that say where a value came from, not what it is.
EMPTY = frozenset({
    "found", "own", "each", "known", "most", "made", "said", "told", "asked", "given", "what",
    "left", "taken", "least", "here", "whole", "more", "others", "kept", "seen",
})  # fmt: skip
#: The five of them that the issue of plain English counted.
WORST = frozenset({"found", "own", "each", "known", "most"})
ROOMS = (
    "_eldr_sim", "cli", "kernel_profiles", "planning", "policies", "reports", "serving",
    "simulator", "traces", "validation", "studies",
)  # fmt: skip


def sources() -> Iterator[Path]:
    """Yield the Python files outside tests."""
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each binding: assignments, loops, arguments, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def counts() -> dict[Path, Counter[str]]:
    """Return the bindings of every source file by name."""
    return {path: Counter(bindings(ast.parse(path.read_text("utf-8")))) for path in sources()}


def share(by_file: dict[Path, Counter[str]], words: frozenset[str]) -> float:
    """Return the share of bindings that are called one of ``words``."""
    total = sum(sum(names.values()) for names in by_file.values())
    return sum(names[word] for names in by_file.values() for word in words) / total


if __name__ == "__main__":
    table = counts()
    print(f"worst five {share(table, WORST):.2%}, all {share(table, EMPTY):.2%}")
    print(sum((Counter({w: c[w] for w in EMPTY}) for c in table.values()), Counter()).most_common())
    for path, names in sorted(table.items(), key=lambda x: -sum(x[1][w] for w in EMPTY))[:30]:
        print(path.relative_to(ROOT), {word: names[word] for word in EMPTY if names[word]})
