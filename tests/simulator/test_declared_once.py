"""A field of the engine is one line of its group: from there it is an option and in the loop."""

import subprocess
import sys

from ..paths import ROOT

PROGRAM = """
import sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("eldr_sim.simulator.setup.config.groups", sys.argv[1])
groups = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(groups)

from eldr_sim.simulator.run import build_cluster, offered_load, prepare
from eldr_sim.simulator.setup.config.run_config import make_config

for told, seen in (({}, 7), ({"scratch": 9}, 9)):
    fields = {"topology": "1P2D", "policy": "jsq", "trace": "reference-moe", "num_requests": 2}
    config = make_config(fields | told)
    setting = prepare(config)
    cluster = build_cluster(config, setting, *offered_load(config, setting.trace))
    assert cluster.arrays.engines.pools["scratch"].tolist() == [seen, seen]

from eldr_sim.cli.main import main

sys.argv[1:] = ["options", "scratch"]
main()
"""
FIELD = "    async_scheduling: Annotated[bool, LOOP] = True\n"


def test_a_new_field_of_the_engine_is_one_line_and_its_use(tmp_path):
    """It needs no other file: an option, and a field of the record of each pool's engines."""
    source = (ROOT / "simulator" / "setup" / "config" / "groups.py").read_text()
    assert source.count(FIELD) == 1
    added = tmp_path / "config_groups.py"
    added.write_text(
        source.replace(FIELD, f'    scratch: Annotated[int, LOOP] = 7\n    """A."""\n{FIELD}')
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(added)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--scratch" in done.stdout
