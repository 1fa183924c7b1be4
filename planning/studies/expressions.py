"""Expressions of a study: arithmetic over figures of its runs, and texts that quote them.

An expression may use numbers, texts, names, ``+ - * /``, comparisons, subscripts and calls of the
functions that it is given; nothing else of Python, so that a study from elsewhere runs no code."""

import ast
import operator
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

import pandas as pd

from eldr_sim.errors import InputError

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_ALLOWED = "numbers, names, + - * /, [...] and calls of the functions of a study"


def parse(text: str, field: str, names: set[str]) -> ast.expr:
    """Return an expression, checked; raises InputError, also of a name that is not in ``names``."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise InputError(field, f"{text!r} is not an expression", _ALLOWED) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in names:
            raise InputError(field, f"unknown name {node.id!r}", ", ".join(sorted(names)))
        if not isinstance(node, _NODES) or (
            isinstance(node, ast.Call) and not isinstance(node.func, ast.Name)
        ):
            raise InputError(field, f"{text!r} has {type(node).__name__}", _ALLOWED)
    return tree


_NODES = (
    ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript, ast.Constant, ast.Name, ast.List, ast.Load,
    *(kind for kind in _OPERATORS),
)  # fmt: skip


def evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Return the value of an expression that `parse` has checked."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return scope[name]
        case ast.List(items):
            return [evaluate(item, scope) for item in items]
        case ast.BinOp(left, kind, right):
            return _OPERATORS[type(kind)](evaluate(left, scope), evaluate(right, scope))
        case ast.UnaryOp(kind, operand):
            return _OPERATORS[type(kind)](evaluate(operand, scope))
        case ast.Subscript(value, key):
            return evaluate(value, scope)[evaluate(key, scope)]
        case ast.Call(ast.Name(name), arguments):
            return scope[name](*(evaluate(argument, scope) for argument in arguments))
    raise AssertionError(ast.dump(node))


def fields(template: str, field: str) -> list[tuple[str, str, str]]:
    """Return the parts of a text: what stands before each expression, the expression and its format
    (``{gain('tpot', 'eldr'):+.1f}``); the last has no expression."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise InputError(field, f"{template!r}: {error}", "{expression:format}") from None
    return [(before, inner or "", spec or "") for before, inner, spec, _ in parts]


def text(value: Any, spec: str) -> str:
    """Return a value as a text; several values are separated by commas."""
    if isinstance(value, pd.Series):
        return ", ".join(format(each, spec) for each in value)
    return format(value, spec)
