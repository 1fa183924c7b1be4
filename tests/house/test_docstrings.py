"""Docstrings of what outsiders call have one sentence, then Args, Returns and Raises."""

import ast
import inspect

import eldr_sim

from ..paths import ROOT
from .callers import most_called, problems


def test_functions_that_other_rooms_call_most_are_documented():
    """``python -m tests.house.callers`` prints the sixty, and what each lacks."""
    lacking = {
        f"{path.relative_to(ROOT)}:{node.name}": found
        for _, path, node in most_called(60)
        if (found := problems(node))
    }
    assert lacking == {}


def test_the_public_functions_are_documented():
    functions = [getattr(eldr_sim, name) for name in eldr_sim.__all__]
    functions = [function for function in functions if inspect.isfunction(function)]
    assert len(functions) >= 6
    for function in functions:
        (node,) = ast.parse(inspect.getsource(function)).body
        assert isinstance(node, ast.FunctionDef)
        assert problems(node) == [], function.__name__


def test_a_bad_docstring_is_found():
    (node,) = ast.parse('def load(name: str) -> int:\n    """Load. Or not."""').body
    assert isinstance(node, ast.FunctionDef)
    assert problems(node) == ["name", "one sentence first", "Args", "Returns"]
