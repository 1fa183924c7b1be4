"""Groups of commands that are imported only when they are called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class _StandIn(click.Command):
    """A command's name and line of help, until it is imported from ``home``."""

    def __init__(self, name: str, home: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self.home = home


class LazyGroup(click.Group):
    """A group with commands imported when called. ``lazy``: by name: ``module:attribute`` of
    ``eldr_sim.cli``, and the line in the group's help."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        for name, (home, short_help) in lazy.items():
            self.add_command(_StandIn(name, home, short_help))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported; None if there is no such command."""
        command = super().get_command(ctx, cmd_name)
        if isinstance(command, _StandIn):
            module, _, attribute = command.home.partition(":")
            command = getattr(import_module(f"eldr_sim.cli.{module}"), attribute)
            self.add_command(command, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; options of engines and benchmarks are refused with ours."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from eldr_sim.cli.foreign import instead_of

            hint = instead_of(error.option_name.lstrip("-").replace("-", "_"))
            if not hint:
                raise
            raise click.UsageError(
                f"No such option {error.option_name!r}: {hint}", error.ctx
            ) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the commands' names, and options, without a call of `get_command` above."""
        from click.shell_completion import CompletionItem

        completion_items = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in sorted(self.commands.items())
            if name.startswith(incomplete) and not command.hidden
        ]
        return [*completion_items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands; a plain group does so without a call of `get_command` above."""
        click.Group(commands=self.commands).format_commands(ctx, formatter)
