"""Recorded answers: some hundred small runs, functions and commands, and every figure they give.

``python tests/house/answers.py`` records what they answer now, ``answers.py serving`` that of a
part. `test_answers` compares, and says which figure of which answer
moved, from what to what. A recorded answer is not known to be right: it shows that a change moves
it. Runs replay the embedded trace and the figures have nine digits, so no
other package and no machine counts.
"""

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

from eldr_sim.errors import InputError

RECORD = Path(__file__).parents[1] / "golden" / "answers"
#: An answer by its name: its figures, by theirs.
Answers = dict[str, dict[str, str]]
#: What is asked: a name, what answers, and its arguments.
Asked = Iterator[tuple[Any, ...]]
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def figures(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Give every figure of a nested value by its path: many numbers, and a text, are one each."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif isinstance(value, BaseModel):
        value = dict(value)
    elif isinstance(value, pa.Table):
        value = {column: value[column].to_pylist() for column in value.column_names}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from figures(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, np.ndarray) or _is_numbers(value):
        array = np.asarray(value, np.float64).ravel()
        yield name, _said(float(array[0])) if array.size == 1 else _folded(array)
    elif isinstance(value, list | tuple) and len(value) <= 40:
        for index, inner in enumerate(value):
            yield from figures(inner, f"{name}[{index}]")
    else:
        yield name, _said(value)


def _is_numbers(value: Any) -> bool:
    kinds = (bool, int, float, np.number, np.bool_, type(None))
    return isinstance(value, list | tuple) and all(isinstance(each, kinds) for each in value)


def _folded(array: Any) -> str:
    """Return how many numbers there are, and a sum in which each has another weight."""
    fine = array[np.isfinite(array)]
    weights = 1.0 + np.arange(len(array)) * 0.6180339887498949 % 1.0
    total = math.fsum(fine * weights[np.isfinite(array)])
    lost = "" if len(fine) == len(array) else f"-{len(array) - len(fine)}"
    return f"{len(array)}{lost}*{total / max(1, len(fine)):.9g}"


def _said(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool | np.bool_ | None):
        return str(value)
    if isinstance(value, int | float | np.number):
        return f"{value:.9g}"
    text = value if isinstance(value, str) else type(value).__name__
    if re.fullmatch(r"[^\s=#]{1,24}", text):
        return text
    return "#" + hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()


def read(text: str) -> Answers:
    """Return recorded answers."""
    answers: Answers = {}
    figures: list[str] = []
    for line in text.splitlines():
        name, *words = line.split("\t")
        if name:
            answers[name] = dict(zip(figures, words, strict=True))
        else:
            figures = words
    return answers


def written(answers: Answers) -> str:
    """Return answers as they are recorded, a line each, below a line with the figures' names."""
    lines, figures = [], None
    for name, found in answers.items():
        if list(found) != figures:
            figures = list(found)
            lines.append("\t".join(["", *figures]))
        lines.append("\t".join([name, *found.values()]))
    return "\n".join(lines) + "\n"


def moved(before: Answers, after: Answers) -> list[str]:
    """Return what differs, a line each: the answer, its figure, from what, to what."""
    lines = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            lines.append(f"{name}: {'no longer asked' if new is None else 'not recorded'}")
            continue
        lines += [
            f"{name}: {figure} {old.get(figure)} -> {new.get(figure)}"
            for figure in {**old, **new}
            if not _same(old.get(figure), new.get(figure))
        ]
    return lines


def _same(one: str | None, other: str | None) -> bool:
    if one == other or one is None or other is None:
        return one == other
    try:
        (n, _, a), (m, _, b) = one.rpartition("*"), other.rpartition("*")
        return n == m and math.isclose(float(a), float(b), rel_tol=1e-8, abs_tol=1e-12)
    except ValueError:
        return False


def answers(part: str) -> Answers:
    """Return what a part answers now; a refusal is an answer: the field, or what it says."""
    import asked

    found: Answers = {}
    with _at_rest():
        for title, ask, *arguments in asked.PARTS[part]():
            name = " ".join(title.split()) or "-"
            try:
                found[name] = dict(figures(ask(*arguments)))
            except InputError as error:
                found[name] = {"refused": _said(error.field)}
            except ValueError as error:
                found[name] = {"refused": _said(str(error).partition(":")[0])}
    return found


@contextlib.contextmanager
def _at_rest() -> Iterator[None]:
    """Within it runs replay the embedded trace, warn of nothing, lie in an empty folder, and find
    no package of tables."""
    from eldr_sim.kernel_profiles.sources import packages
    from eldr_sim.simulator.setup import run_routing
    from eldr_sim.traces.routing.format import open_trace

    embedded, before = open_trace("reference-moe"), Path.cwd()
    drawn = mock.patch.object(run_routing, "drawn_trace", return_value=embedded)
    none = mock.patch.object(packages, "packages", return_value=())
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), drawn, none:
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def command(*argv: str) -> Any:
    """Return what a command says: the numbers of each line, and a figure for all its words."""
    from eldr_sim.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    named = mock.patch.object(sys, "argv", ["eldr-sim", *argv])
    with named, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return {"code": code, **numbers(out.getvalue())}


def numbers(text: str) -> dict[str, Any]:
    """Return the numbers of each line of a text, and a figure for all its words."""
    lines = [line for line in text.splitlines() if line.strip()]
    values = ([float(n.replace(",", "")) for n in _NUMBER.findall(line)] for line in lines)
    found: dict[str, Any] = {f"{n}": each for n, each in enumerate(values, 1) if each}
    return found | {"words": " ".join(_NUMBER.sub("0", text).split())}


def record(parts: Iterable[str]) -> None:
    """Record what parts answer now, and print what moved."""
    import asked

    RECORD.mkdir(exist_ok=True)
    for part in parts or asked.PARTS:
        path = RECORD / f"{part}.txt"
        before = read(path.read_text()) if path.exists() else {}
        after = answers(part)
        for line in moved(before, after)[:40] if before else ():
            print(line)
        path.write_text(written(after))


if __name__ == "__main__":
    record(sys.argv[1:])
