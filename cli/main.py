"""The ``eldr-sim`` command."""

from __future__ import annotations

import click

from eldr_sim import __version__
from eldr_sim.cli.capture import capture
from eldr_sim.cli.compare import compare
from eldr_sim.cli.fit import fit
from eldr_sim.cli.listing import gpus, models, tables
from eldr_sim.cli.plan import plan
from eldr_sim.cli.profile import profile
from eldr_sim.cli.report import report
from eldr_sim.cli.reproduce import reproduce
from eldr_sim.cli.run import run
from eldr_sim.cli.sweep import sweep
from eldr_sim.cli.synthetic import fit_synthetic, synthesize
from eldr_sim.cli.trace import trace
from eldr_sim.cli.validate import validate
from eldr_sim.cli.what_if import what_if
from eldr_sim.command import run_command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="eldr-sim")
def cli() -> None:
    """Simulate clusters that serve mixture-of-experts models, on real expert routing."""


for command in (
    run, compare, sweep, plan, what_if, report, reproduce, validate, fit, profile, trace, gpus,
    models, tables,
):  # fmt: skip
    cli.add_command(command)
trace.add_command(capture)
trace.add_command(fit_synthetic)
trace.add_command(synthesize)


def main() -> None:
    """Run the command line."""
    run_command(cli)


if __name__ == "__main__":
    main()
