"""The public face: what semantic versioning covers, as one line a name.

``python -m tests.house.public_face`` prints what differs from ``tests/golden/public_face.json``;
``--record`` adds the difference to the version of ``pyproject.toml``. The file has the whole face
of the first version, and what later versions added and removed."""

import inspect
import json
import sys
import tempfile
import tomllib
from pathlib import Path

import click
import pyarrow.parquet as pq

import eldr_sim
from eldr_sim.cli.main import cli
from eldr_sim.simulator.outcome.catalogue import METRICS

from ..paths import GOLDEN, ROOT

RECORD = GOLDEN / "public_face.json"
#: A short run whose folder has all that every result folder has.
RUN = {"trace": "reference-moe", "topology": "1P1D", "num_requests": 20, "request_rate": 20}


def python_names() -> set[str]:
    """Return the names of ``eldr_sim.__all__``, each with its parameters."""
    lines = set()
    for name in eldr_sim.__all__:
        lines.add(f"python {name}")
        what = getattr(eldr_sim, name)
        if inspect.isfunction(what):
            lines |= {
                f"python {name}({parameter})" for parameter in inspect.signature(what).parameters
            }
        elif name == "Simulation":
            public = (attribute for attribute in vars(what) if not attribute.startswith("_"))
            lines |= {f"python {name}.{attribute}" for attribute in public}
    return lines


def commands() -> set[str]:
    """Return every command, and every spelling of its options."""

    def walk(command: click.Command, path: str) -> set[str]:
        lines = {path}
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                lines.add(f"{path} {option}")
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                lines |= walk(inner, f"{path} {name}")
        return lines

    return walk(cli, "eldr-sim")


def result_folder() -> set[str]:
    """Return the files of a result folder, and the keys or columns of each."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "result"
        eldr_sim.run(**RUN, backend="simpy").write(folder)
        lines = {path.name for path in folder.iterdir()}
        for name in ("summary.json", "config.json"):
            document = json.loads((folder / name).read_text(encoding="utf-8"))
            lines |= {f"{name} {key}" for key in document}
            if name == "config.json":
                lines |= {f"{name} config.{key}" for key in document["config"]}
        for name in ("requests.parquet", "steps.parquet"):
            lines |= {f"{name} {column}" for column in pq.read_schema(folder / name).names}
    return lines


def face() -> set[str]:
    """Return today's public face."""
    return python_names() | commands() | result_folder() | {f"figure {tag}" for tag in METRICS}


def recorded(record: dict[str, dict[str, list[str]]]) -> set[str]:
    """Return the face that a record says, its versions in order."""
    lines: set[str] = set()
    for changes in record.values():
        lines = lines - set(changes["removed"]) | set(changes["added"])
    return lines


def read() -> dict[str, dict[str, list[str]]]:
    """Return the record; empty before the first one."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def version() -> str:
    """Return the version of ``pyproject.toml``."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


if __name__ == "__main__":
    record, today = read(), face()
    before = recorded({key: value for key, value in record.items() if key != version()})
    print(*(f"+ {line}" for line in sorted(today - recorded(record))), sep="\n")
    print(*(f"- {line}" for line in sorted(recorded(record) - today)), sep="\n")
    if "--record" in sys.argv:
        record[version()] = {"added": sorted(today - before), "removed": sorted(before - today)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
