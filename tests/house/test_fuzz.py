"""No input breaks it: see `fuzz`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.parametrize(
    ("cases", "seed"), [(120, 20), pytest.param(10_000, 21, marks=pytest.mark.slow)]
)
def test_hostile_input_is_refused_in_a_line(cases, seed):
    """A process of its own: cases are forked, and this one has threads."""
    done = subprocess.run(
        [sys.executable, str(FUZZ), str(cases), str(seed)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
