"""The functions that other rooms call most, counted by imports and calls.

``python -m tests.house.callers`` prints them with their counts."""

import ast
from collections import Counter
from pathlib import Path

from ..paths import ROOT
from .language import ROOMS

Key = tuple[str, str]  #: module and function


def modules() -> dict[str, tuple[str, Path, ast.Module]]:
    """Return room, path and syntax tree of every module of the package."""
    trees = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("eldr_sim", *(parts[1:] if room == "_eldr_sim" else parts)))
            trees[name] = (room, path, ast.parse(path.read_text(encoding="utf-8")))
    return trees


def public_functions(
    trees: dict[str, tuple[str, Path, ast.Module]],
) -> dict[Key, tuple[str, Path, ast.FunctionDef]]:
    """Return the functions at the top of modules that have public names."""
    return {
        (module, node.name): (room, path, node)
        for module, (room, path, tree) in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def most_called(n: int) -> list[tuple[int, Path, ast.FunctionDef]]:
    """Return the ``n`` functions with the most calls from other rooms, with their calls."""
    trees = modules()
    functions, calls = public_functions(trees), Counter[Key]()
    for room, _, tree in trees.values():
        imported: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {a.asname or a.name: (node.module, a.name) for a in node.names}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            key: Key = ("", "")
            if isinstance(node.func, ast.Name):
                key = imported.get(node.func.id, key)
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                key = (".".join(imported.get(node.func.value.id, key)), node.func.attr)
            if key in functions and functions[key][0] != room:
                calls[key] += 1
    ranked = sorted(calls, key=lambda key: (-calls[key], key))[:n]
    return [(calls[key], *functions[key][1:]) for key in ranked]


def problems(node: ast.FunctionDef) -> list[str]:
    """Return what the docstring of a function lacks: Args, Returns or Yields, Raises."""
    text, lacking = ast.get_docstring(node) or "", []
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [a.arg for a in (*arguments, node.args.vararg, node.args.kwarg) if a is not None]
    names = [name for name in names if name not in ("self", "cls")]
    lacking += [name for name in names if f"\n    {name}: " not in text]
    first = text.split("\n\n")[0]
    if not first.endswith(".") or ". " in first:
        lacking.append("one sentence first")
    if names and "\nArgs:\n" not in text:
        lacking.append("Args")
    returns = "None" if node.returns is None else ast.unparse(node.returns)
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        returns = "None"  # a property is what its sentence names
    if returns.startswith("Iterator"):
        lacking += ["Yields"] * ("\nYields:\n" not in text)
    elif returns != "None":
        lacking += ["Returns"] * ("\nReturns:\n" not in text)
    raises = any(
        isinstance(inner, ast.Raise) and "InputError" in ast.unparse(inner)
        for inner in ast.walk(node)
    )
    lacking += ["Raises"] * (raises and "\nRaises:\n" not in text)
    return lacking


if __name__ == "__main__":
    for count, path, node in most_called(60):
        print(f"{count:4} {path.relative_to(ROOT)}:{node.name} {', '.join(problems(node))}")
