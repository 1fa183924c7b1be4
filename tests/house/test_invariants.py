"""The page of invariants names code that is there, and tests that name the invariant."""

import ast
import re

from ..paths import ROOT

ROW = re.compile(r"^\| (INV-\d+) \| .+ \| `(\S+)` \| `(\S+)::(\w+)` \|$", re.MULTILINE)


def test_every_invariant_is_kept_and_held():
    page = (ROOT / "simulator/INVARIANTS.md").read_text()
    rows = ROW.findall(page)
    assert [number for number, *_ in rows] == [f"INV-{i + 1}" for i in range(page.count("| INV-"))]
    problems = []
    for number, kept, file, name in rows:
        if not (ROOT / kept).exists():
            problems.append(f"{number}: no {kept}")
        tests = {
            node.name: ast.get_docstring(node) or ""
            for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        if not re.search(rf"{number}\b", tests.get(name, "")):
            problems.append(f"{number}: {file}::{name} is not there or does not name it")
    assert not problems
