"""What users read, and the idioms that it must not contain.

``python -m tests.house.language`` prints every hit; ``comments`` prints those of comments.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from eldr_sim.cli.main import cli

from ..paths import ROOT

#: Idioms that read as if translated, and words for persons that stand for machines.
IDIOMS = re.compile(
    r"\bso[ -](?:many|much|long|few|manieth)\b"
    r"|\b(?:who|whom|whose|nobody|somebody|everybody|anybody)\b"
    r"|\bof (?:its|their|his|one's|my) own\b"
    r"|\b(?:is|are|was|were|be|been|being|gets?) (?:told|asked|heard)\b"
    r"|\b(?:hears?|tells?|asks?) (?:of|nobody|it|them)\b",
    re.I,
)
#: Folders of the package.
ROOMS = (
    "_eldr_sim", "cli", "kernel_profiles", "planning", "policies", "reports", "serving",
    "simulator", "traces", "validation",
)  # fmt: skip


def hits(text: str) -> list[str]:
    """Return the idioms of a text, each with the words around it."""
    text = " ".join(text.split())
    return [text[max(0, m.start() - 50) : m.end() + 50] for m in IDIOMS.finditer(text)]


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each command and each option."""

    def walk(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
        yield path, f"{command.help or ''} {command.epilog or ''}"
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                record = parameter.get_help_record(click.Context(command))
                yield f"{path} {parameter.opts[0]}", record[1] if record else ""
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                yield from walk(inner, f"{path} {name}")

    yield from walk(cli, "eldr-sim")


def sources() -> list[Path]:
    """Return the Python files of the package."""
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


#: Calls whose strings users read.
MESSAGES = {"InputError", "echo", "warn", "UsageError", "BadParameter", "ClickException", "secho"}


def literals(node: ast.AST) -> str:
    """Return the literal text in an expression; what is filled in is ``...``."""
    parts = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            parts.append(inner.value)
    return " ".join(parts)


def messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of errors and of what commands print.

    A message may be put together in lines before the call: of a function that raises
    ``InputError``, all strings but the docstring count.
    """
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in MESSAGES:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", literals(node)


def strings() -> Iterator[tuple[str, str]]:
    """Yield the place and text of every string literal that is not a docstring."""
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in docs:
                continue
            if isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def docstrings(public: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the place and text of docstrings of public modules, classes, functions and fields."""
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            if public and getattr(node, "name", "").startswith("_"):
                continue
            for inner in node.body:
                if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
                    text = re.sub(r"``[^`]*``", "", str(inner.value.value))
                    yield f"{path.relative_to(ROOT)}:{inner.lineno}", text


def comments() -> Iterator[tuple[str, str]]:
    """Yield the place and text of comments."""
    for path in sources():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := re.search(r"(?:^|\s)#:? (.*)", line):
                yield f"{path.relative_to(ROOT)}:{number}", match[1]


def pages() -> Iterator[tuple[str, str]]:
    """Yield the place and text of each paragraph of the pages, without code."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    paths += [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("studies/**/*.md"))]
    paths += [path for room in ROOMS for path in sorted((ROOT / room).glob("*.md"))]
    paths += [ROOT / "tests" / "benchmarks" / "README.md"]
    for path in paths:
        text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        text = re.sub(r"`[^`\n]*`", "", text)
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


KINDS = {
    "help": help_texts, "messages": messages, "strings": strings, "pages": pages,
    "docstrings": docstrings, "comments": comments,
}  # fmt: skip


if __name__ == "__main__":
    for kind in sys.argv[1:] or ["help", "messages", "strings", "pages", "docstrings"]:
        found = [(place, hit) for place, text in KINDS[kind]() for hit in hits(text)]
        for place, hit in found:
            print(f"{place}: {hit}")
        print(f"--- {kind}: {len(found)}")
