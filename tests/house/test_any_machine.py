"""The same configuration and seed give the same bytes on any machine.

NumPy and BLAS choose their code by what the processor can do, and what they return then differs in
the last bit: on a processor with AVX-512 ``np.exp`` is another function than on one without.
"""

import os
import subprocess
import sys

import pytest

from ..paths import ROOT

#: Runs every configuration of the digest while each function below is off by one unit in the last
#: place, up or down, and compares with the digest that is kept.
_PROGRAM = """
import sys
from numba.core.registry import cpu_target
cpu_target.target_context.refresh()  # numba looks up NumPy's functions by itself
import numpy as np
sys.path.insert(0, {tests!r})
import digest

{first}  # what is not in the cache is compiled with NumPy's own functions
changed = 0

def off(function):
    def other(*args, **keywords):
        global changed
        values = function(*args, **keywords)
        if not isinstance(values, np.ndarray) or values.dtype != np.float64:
            return values
        changed += 1
        to = np.where(np.arange(values.size).reshape(values.shape) % 2, np.inf, -np.inf)
        fine = np.isfinite(values) & (values != 0)
        return np.where(fine, np.nextafter(values, to), values)
    return other

for name in "exp expm1 log log1p log2 power geomspace".split():
    setattr(np, name, off(getattr(np, name)))
code = digest.main([])
assert changed > 0, changed
sys.exit(code)
"""

#: Draws some requests of a preset, so disturbed or not, and prints what they choose.
_DRAW = """
from hashlib import sha256
from eldr_sim.traces.routing.synthetic.presets import preset_model
from eldr_sim.traces.routing.synthetic.sampler import sample_experts
drawn = sample_experts(preset_model("GPT-OSS-20B", n_layers=6), [0, 5] * 8, [60] * 16, [40] * 16, 0)
print(drawn.size, sha256(drawn.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_the_last_bits_of_numpys_functions_change_no_result():
    program = _PROGRAM.format(tests=str(ROOT / "tests"), first="digest.main([])")
    # Another BLAS kernel than this processor's own.
    other = {"OPENBLAS_CORETYPE": "Prescott"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | other, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.long
def test_the_last_bits_of_numpys_functions_change_no_drawn_expert(capsys):
    exec(_DRAW, {})
    plain = capsys.readouterr().out
    assert plain.startswith(f"{16 * 100 * 6 * 4} ")
    disturbed = _PROGRAM.format(tests=str(ROOT / "tests"), first="").split("code = ")[0] + _DRAW
    other = os.environ | {"OPENBLAS_CORETYPE": "Prescott"}
    done = subprocess.run(
        [sys.executable, "-c", disturbed], env=other, capture_output=True, text=True
    )
    assert done.stdout == plain, done.stderr[-2000:]
