"""What holds where nothing is asked: every default and bound of a configuration, of a class with
fields, or of a command.

A change of one is a change for users: ``python -m tests.house.test_defaults`` records it, and
CHANGELOG.md says so.
"""

import importlib

import click
from annotated_types import BaseMetadata
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from eldr_sim.cli.main import cli

from ..paths import GOLDEN, ROOT

RECORD = GOLDEN / "defaults.txt"
#: What has such classes, in its own folder or below.
FOLDERS = (
    "policies", "planning", "serving/router", "serving/simulated", "simulator/setup",
    "simulator/outcome", "kernel_profiles/kernels", "kernel_profiles/steps", "traces/requests",
)  # fmt: skip


def classes():
    """Return the classes with fields."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(("eldr_sim", *parts)))
            for each in vars(module).values():
                own = getattr(each, "__module__", "").startswith("eldr_sim.")
                if own and isinstance(each, type):
                    yield each


def fields():
    """Return the default and bounds of each field of a class."""
    for owner in classes():
        if not issubclass(owner, BaseModel):
            known = getattr(owner, "_field_defaults", {}) | {
                name: field.default
                for name, field in getattr(owner, "__dataclass_fields__", {}).items()
            }
            for name, value in known.items():
                if isinstance(value, bool | int | float | str | tuple | None):
                    yield f"{owner.__name__}.{name} {value!r}"
            continue
        for name, field in owner.model_fields.items():
            default = field.get_default(call_default_factory=True, validated_data={})
            said = "needed" if default is PydanticUndefined else repr(default)
            if isinstance(default, BaseModel):  # its own fields have lines
                said = type(default).__name__
            bounds = [str(each) for each in field.metadata if isinstance(each, BaseMetadata)]
            yield " ".join((f"{owner.__name__}.{name}", said, *bounds))


def options(command=cli, path="eldr-sim"):
    """Return the defaults of the options of a command, and of those below it."""
    context = click.Context(command)
    for option in command.params:
        default = option.get_default(context)
        if isinstance(default, int | float | str | tuple) and default not in (False, (), ""):
            yield f"{path} {option.opts[0]} {default!r}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from options(command.get_command(context, name), f"{path} {name}")


def defaults():
    """Return a line a default."""
    return sorted({*fields(), *options()})


def test_defaults_are_the_recorded_ones():
    assert defaults() == RECORD.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    RECORD.write_text("\n".join(defaults()) + "\n", encoding="utf-8")
