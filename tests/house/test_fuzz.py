"""No input breaks it (`fuzz`), and no field of a config file is ignored without a word."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from fuzz_cases import BASES, VALUES, base_of, may_be_quiet, with_field

from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import Pool

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("cases", "seed"), [(20, 20), pytest.param(10_000, 21, marks=pytest.mark.slow)]
)
def test_hostile_input_is_refused_in_a_line(cases, seed, n_cases):
    """A process of its own: cases are forked, and this one has threads."""
    done = subprocess.run(
        [sys.executable, str(FUZZ), str(n_cases(cases)), str(seed)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_field_of_a_config_file_has_values_to_try():
    pools = {f"{role}.{name}" for role in ("prefill", "decode") for name in Pool.model_fields}
    fields = set(RUN_FIELDS) - {"prefill", "decode"} | pools
    assert fields - set(VALUES) == {"calibration", "events", "tables"}  # files
    assert set(VALUES) <= fields


def figures(folder):
    """Return the columns of a result, and its summary without what repeats options or is a word."""
    tables = [pq.read_table(folder / f"{name}.parquet") for name in ("requests", "steps")]
    rows = [{name: table[name] for name in table.column_names} for table in tables]
    summary = json.loads((folder / "summary.json").read_text())
    numbers = {key: value for key, value in summary.items() if not isinstance(value, str | list)}
    return rows, numbers


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "most"),
    [("disaggregated", 1)] + [pytest.param(kind, None, marks=pytest.mark.slow) for kind in BASES],
)
def test_a_field_of_a_config_file_shows_or_is_refused_or_named(kind, most, run_cli, tmp_path):
    """With each field of its own, a run is refused, differs, or names the field as without effect.

    What is named has none: the rows of requests and steps are those of the run without it. The
    default suite tries one value of each field in one kind of run.
    """
    base, given, out = base_of(kind), tmp_path / "given.yaml", tmp_path / "out"

    def run(fields):
        given.write_text(yaml.safe_dump(fields))
        code, _, err = run_cli("run", "--config", given, "--out", out, "--force")
        return code, err

    assert run(base)[0] == 0
    plain, silent, wrongly = figures(out), [], []
    for name, values in VALUES.items():
        for value in values[:most]:
            code, err = run(with_field(base, name, value))
            assert code in (0, 1, 2), (name, value, err)
            if code == 2:
                assert re.fullmatch(r"Error: .*", err.splitlines()[-1]), (name, value, err)
                continue
            named = re.search(rf"Warning: {re.escape(name)}\b.* has no effect: ", err)
            rows, numbers = figures(out)
            if named is None and (rows, numbers) == plain:
                if not may_be_quiet(kind, base, name, value):
                    silent.append((name, value))
            elif named is not None and any(
                new.get(column) != values
                for new, old in zip(rows, plain[0], strict=True)
                for column, values in old.items()
            ):
                wrongly.append((name, value))
    assert silent == []
    assert wrongly == []
