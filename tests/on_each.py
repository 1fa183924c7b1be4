"""One test for one property: it runs on every case and lists all failures."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest

PARAM = type(pytest.param())


def on_each(names: str, cases: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Run a test on every case, where ``parametrize`` would make a test of each.

    The cases share the fixtures of the test, except for ``tmp_path``, of which each has a folder. A
    case that skips is left out; the test skips where all of them do.

    Args:
        names: The arguments that a case fills, separated by commas.
        cases: Values, or tuples where there are several arguments; ``pytest.param`` names a case.
    """
    arguments, cases = names.replace(",", " ").split(), list(cases)

    def decorated(test: Callable) -> Callable:
        @wraps(test)
        def whole(**fixtures: Any) -> None:
            failures, skipped = [], []
            folder = fixtures.get("tmp_path")
            for number, case in enumerate(cases):
                if folder is not None:
                    fixtures["tmp_path"] = folder / str(number)
                    fixtures["tmp_path"].mkdir()
                if isinstance(case, PARAM):
                    values, label = case.values, case.id or repr(case.values)
                else:
                    values, label = case if len(arguments) > 1 else (case,), repr(case)
                try:
                    test(**dict(zip(arguments, values, strict=True)), **fixtures)
                except pytest.skip.Exception as reason:
                    skipped.append(str(reason))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((f"{label[:200]}: {type(error).__name__}: {error}", error))
            if failures:
                lines = "\n\n".join(line for line, _ in failures)
                text = f"{len(failures)} of {len(cases)} cases fail:\n\n{lines}"
                raise AssertionError(text) from failures[0][1]
            if len(skipped) == len(cases):
                pytest.skip(skipped[0] if skipped else "no cases")

        signature = inspect.signature(test)
        rest = [one for one in signature.parameters.values() if one.name not in arguments]
        whole.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return whole

    return decorated
