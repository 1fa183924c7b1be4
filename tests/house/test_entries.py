"""Compiled functions that are called by address: `jit.Entry`."""

import hashlib
import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from eldr_sim.jit import Entry
from eldr_sim.references import Reference

MODULE = """
import sys
from typing import Any, NamedTuple
import numpy as np
from eldr_sim.jit import Entry
from eldr_sim.references import Reference

class Numbers(NamedTuple):
    values: Any

@Entry
def total(world: Any, scale: float, first: int) -> float:
    found = 0.0
    for i in range(first, world.values.shape[0]):
        found += {factor} * scale * world.values[i]
    return found

for kind in sys.argv[1:]:
    print(total(Reference(Numbers(np.arange(4, dtype=kind))), 0.5, 1), 'numba' in sys.modules)
"""


class Numbers(NamedTuple):
    values: Any


def checksum(text):
    return hashlib.sha256(text).digest()


@Entry
def _value(world: Any, scale: float, i: int) -> int:
    if i >= world.values.shape[0]:
        raise IndexError("behind the last")
    return int(scale * world.values[i])


def test_an_entry_returns_and_raises_as_its_text_says():
    whole = Reference(Numbers(np.array([2.0, 3.0])))
    assert (_value(whole, 2.0, 1), type(_value(whole, 2.0, 1))) == (6, int)
    with pytest.raises(IndexError, match="behind the last"):
        _value(whole, 2.0, 2)
    assert _value(Reference(Numbers(np.array([7, 8]))), 1.0, 0) == 7  # another type, other code


@pytest.mark.long
def test_kept_code_needs_no_numba_and_other_code_is_compiled(tmp_path):
    def run(*kinds, factor=1):
        (tmp_path / "module.py").write_text(MODULE.format(factor=factor))
        done = subprocess.run(
            [sys.executable, str(tmp_path / "module.py"), *kinds],
            env=os.environ | {"ELDR_SIM_CACHE": str(tmp_path / "cache")},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.split()

    assert run("f8") == ["3.0", "True"]
    assert run("f8") == ["3.0", "False"]
    assert run("f8", "i4") == ["3.0", "False", "3.0", "True"]
    assert run("f8", factor=3) == ["9.0", "True"]  # other sources
    (path, *_) = (tmp_path / "cache").rglob("total-*.o")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], whole[:-1] + bytes([whole[-1] ^ 1])):
        for file in (tmp_path / "cache").rglob("total-*.o"):
            file.write_bytes(damaged)
        assert run("f8", factor=3) == ["9.0", "True"]
    assert run("f8", factor=3) == ["9.0", "False"]

    for file in (tmp_path / "cache").rglob("total-*.o"):
        line, _, code = file.read_bytes()[len(checksum(b"")) :].partition(b"\n")
        text = line + b" NRT_of_a_process_with_numba\n" + code
        file.write_bytes(checksum(text) + text)
    assert run("f8", factor=3) == ["9.0", "True"]  # kept by a process that had more
    assert run("f8", factor=3) == ["9.0", "False"]


@pytest.mark.long
@pytest.mark.parametrize("given", ["", "trace='reference-moe', "])
def test_a_run_imports_no_compiler_where_its_code_is_kept(given):
    code = (
        "import sys, eldr_sim as es\n"
        f"es.run({given}topology='1P1D', num_requests=20)\n"
        "print('numba' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, capture_output=True)  # compiles, if nobody has yet
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"False\n"
