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


def test_the_public_classes_are_documented():
    """Their arguments, and every public method and property; inherited ones of ours, too."""
    kinds = [kind for name in eldr_sim.__all__ if inspect.isclass(kind := getattr(eldr_sim, name))]
    assert {kind.__name__ for kind in kinds} == {"RunConfig", "Simulation"}
    lacking = {}
    for kind in kinds:
        lines = inspect.getdoc(kind).splitlines()
        assert {"Args:", "Raises:", "Examples"} <= set(lines), kind.__name__
        if kind.__name__ == "Simulation":
            parameters = list(inspect.signature(kind).parameters)
            lacking |= {n: kind for n in parameters if not any(f"    {n}: " in t for t in lines)}
        for owner in kind.__mro__:
            if not owner.__module__.startswith("eldr_sim"):
                continue
            (node,) = ast.parse(inspect.getsource(owner)).body
            for method in node.body:
                if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                    continue
                if found := problems(method):
                    lacking[f"{owner.__name__}.{method.name}"] = found
    assert lacking == {}


def test_a_bad_docstring_is_found():
    (node,) = ast.parse('def load(name: str) -> int:\n    """Load. Or not."""').body
    assert isinstance(node, ast.FunctionDef)
    assert problems(node) == ["name", "one sentence first", "Args", "Returns"]
