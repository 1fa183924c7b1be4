"""``eldr-sim options``: the reference of all options of a run, which can be searched."""

from collections.abc import Iterator
from typing import NamedTuple

import click

from eldr_sim.cli.decorators import complete
from eldr_sim.cli.run_options import TITLES, default_of, described, is_switch, metavar_of, plain
from eldr_sim.docstrings import described_fields
from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.groups import GROUPS
from eldr_sim.simulator.setup.config.option import option_of
from eldr_sim.simulator.setup.config.pools import Pool
from eldr_sim.simulator.setup.config.spellings import GROUP_OF_POOLS, PATHS, POOLS, meant, spellings

#: Commands with options that their own help does not show.
_COMMANDS = ("plan",)


class Entry(NamedTuple):
    """An option of the reference."""

    section: str
    spelled: str  #: its flags with the value, or ``--set`` with its path
    text: str  #: what it means, with unit and default
    words: str  #: further words by which it is found


def entries() -> Iterator[Entry]:
    """Yield the options of a run by group, of its pools, and those that a command's help omits."""
    for group, kind in GROUPS.items():
        for name, field in kind.model_fields.items():
            if name in POOLS:
                continue
            mark, flag = option_of(name, field), name.replace("_", "-")
            value = f" {metavar_of(name, field)}"
            flags = [f"--{flag}", *mark.aliases]
            if is_switch(field):
                flags, value = [f"--{flag}", f"--no-{flag}"], ""
            about = f"  [{_facts(mark.unit, default_of(field))}]".replace("  []", "")
            text = described(name, field) + about
            section = f"{TITLES[group]} ({group})"
            yield Entry(section, ", ".join(flags) + value, text, f"{group}.{name}")
    pools = " and ".join(POOLS)
    for name, field in described_fields(Pool).items():
        for pool in POOLS:
            value = "true|false" if is_switch(field) else metavar_of(name, field)
            spelled = f"--set {pool}.{name}={value}"
            text = plain(field.description)
            section = f"Overrides of {pools} workers ({GROUP_OF_POOLS})"
            yield Entry(section, spelled, text, f"--{pool}-{name.replace('_', '-')}")
    for word in _COMMANDS:
        yield from _of_command(word)


def _of_command(word: str) -> Iterator[Entry]:
    from eldr_sim.cli.main import cli

    context = click.Context(cli)
    command = cli.get_command(context, word)
    assert command is not None
    for param in command.params:
        named = set(param.opts[0].lstrip("-").replace("-", "_").split())
        record = param.get_help_record(context)
        if record and not getattr(param, "common", True) and not named & set(PATHS):
            yield Entry(f"eldr-sim {word}", *record, "")


def _facts(unit: str, default: str) -> str:
    facts = (f"unit: {unit}" * bool(unit), f"default: {default}" * bool(default))
    return "; ".join(filter(None, facts))


@click.command(
    short_help="Search the options of a run.", context_settings={"ignore_unknown_options": True}
)
@click.argument("word", required=False, shell_complete=complete(lambda: PATHS))
def options(word: str | None) -> None:
    """List the options of a run by group, with units and defaults; with WORD, those
    with the word in their name, group or description.

    An option can be given in three ways: its flag, `--set FIELD=VALUE` (`--set max_num_seqs=64`,
    or within its group, `engine.max_num_seqs=64`), and a line `FIELD: VALUE` in the file of
    --config. Fields of a pool's workers have the last two."""
    wanted = (word or "").strip("-").lower().replace("-", "_")
    wanted = spellings().get(wanted, wanted)  # an alias, or a name within its group
    sections: dict[str, list[tuple[str, str]]] = {}
    for entry in entries():
        searched = " ".join(entry).lower()
        if wanted in searched or wanted in searched.replace("-", "_"):
            sections.setdefault(entry.section, []).append((entry.spelled, entry.text))
    if not sections:
        near = meant(wanted)
        hint = f"did you mean {' or '.join(near)}?" if near else "eldr-sim options lists all"
        raise InputError("word", f"no option about {word!r}: {hint}")
    formatter = click.HelpFormatter(max_width=100)
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl(rows)
    click.echo(formatter.getvalue().strip("\n"))
