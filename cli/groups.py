"""Long lists of options, printed in groups by what they are about."""

from __future__ import annotations

import click

from eldr_sim.simulator.setup.config_groups import GROUPS as CONFIG_GROUPS
from eldr_sim.simulator.setup.config_groups import Pool

#: The fields of a run's configuration by group, in the order of the help.
GROUPS = {
    title.replace("_", " ").capitalize(): tuple(group.model_fields)
    for title, group in CONFIG_GROUPS.items()
}
GROUPS[POOLS := "Prefill and decode workers, where they differ"] = ()
#: Options of every command that makes a result.
_OUTPUT = ("preset", "config", "out", "force", "plot", "timeline", "verbose", "help")
_GROUP_OF = {name: title for title, names in GROUPS.items() for name in names}
_GROUP_OF |= dict.fromkeys(_OUTPUT, "Output")
for _role in ("prefill", "decode"):
    _GROUP_OF |= {f"{_role}_{name}": POOLS for name in Pool.model_fields}


class GroupedCommand(click.Command):
    """A command whose help prints the options of a run by group, after its own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, by group."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS)}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups[_group(param)].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _group(param: click.Parameter) -> str:
    """Return the group of the field that an option is named after, or of a command's own."""
    names = (option.lstrip("-").replace("-", "_") for option in param.opts)
    return next((_GROUP_OF[name] for name in names if name in _GROUP_OF), "Options")
