"""``eldr-sim run``: simulate one cluster."""

import sys
from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.console import print_summary, progress_bar
from eldr_sim.cli.decorators import OUTPUT, option, output
from eldr_sim.cli.run_options import (
    GroupedCommand,
    check_out,
    config_from_options,
    plot_extras,
    run_options,
)
from eldr_sim.errors import InputError

_BACKENDS = (
    "Implementation of the model: compiled code; simpy, the same model as SimPy processes that "
    "can be read and changed; vllm or sglang, these processes with the scheduler and KV manager of "
    "the installed engine, slower (docs/engines.md)."
)


@click.command(cls=GroupedCommand, short_help="Simulate one cluster.")
@run_options()
@option("--from-manifest", Path, "Read engines, flags, replicas and pools from a deployment file: "
    "values of vLLM's production stack or llm-d's modelservice, a DynamoGraphDeployment, or "
    "docker compose. Options override it.", metavar="FILE", section=OUTPUT)  # fmt: skip
@output("Folder for the result.", "the result in --out", plot=True)
@option("--timeline", bool, "Write timeline.json, a Chrome trace, into --out.", section=OUTPUT)
@option("--verbose", bool, "Print all sources of the result's times and routing.", section=OUTPUT)
@option("--backend", ["compiled", "simpy", "vllm", "sglang"], _BACKENDS, default="compiled",
        section=OUTPUT)  # fmt: skip
def run(
    out: Path | None,
    force: bool,
    plot: bool,
    timeline: bool,
    verbose: bool,
    backend: Any,
    from_manifest: Path | None,
    **options: Any,
) -> None:
    """Simulate one cluster and print its latencies as `vllm bench serve` does."""
    # The simulator takes long to import: --help does without.
    from eldr_sim.simulator.results import write_result
    from eldr_sim.simulator.run import simulate

    if from_manifest is not None:
        from eldr_sim.planning.launch.manifest import read_manifest

        if options.get("config_file") is not None:
            raise InputError("from_manifest", "given together with --config", "one of them")
        manifest = read_manifest(from_manifest)
        for line in manifest.lines():
            click.echo(line, err=True)
        options["config_file"] = manifest.values
    config = config_from_options(options)
    if timeline and out is None:
        raise InputError("timeline", "--timeline without --out", "together with --out DIR")
    check_out(out, force)
    extras = plot_extras(plot, out, f"{config.policies.policy} on {config.cluster.topology}")
    with progress_bar(f"{config.policies.policy} on {config.cluster.topology}") as update:
        result = simulate(config, update, backend=backend)
    if out is not None:
        if timeline:
            from eldr_sim.reports.run_pictures import write_timeline

            tables = result.requests, result.steps
            extras.append(lambda folder: write_timeline(folder / "timeline.json", *tables))
        write_result(result, out, force=force, extras=extras)
    print_summary(result.summary, verbose=verbose)
    if out is not None:
        click.echo(f"Wrote {out}")
    if result.summary["completed"] == 0:
        reasons = ", ".join(f"{n} {why}" for why, n in result.summary["failed_reasons"].items())
        click.echo(f"No request completed: {reasons}", err=True)
        sys.exit(1)
