"""The ``eldr-sim`` command."""

import click

from eldr_sim.cli.lazy import LazyGroup
from eldr_sim.command import run_command, show_tracebacks

_COMMANDS = {
    "balance": ("balance:balance", "Say whether EPLB would pay."),
    "cache": ("listing:cache", "Show or clear the cache folder."),
    "calibrate": ("calibrate:calibrate", "Fit constants to runs of your own."),
    "compare": ("compare:compare", "Compare policies on the same requests."),
    "curve": ("trace:curve", "Show what a cache of any size would find in a log."),
    "explain": ("report:explain", "Say where time went in a run, or why two runs differ."),
    "explore": ("explore:explore", "Explore clusters on a page in the browser."),
    "fit": ("fit:fit", "Fit ELDR's routing artifact."),
    "gpus": ("listing:gpus", "List the known GPUs."),
    "models": ("listing:models", "List the known models."),
    "options": ("reference:options", "Search the options of a run."),
    "plan": ("plan:plan", "Find the cheapest cluster that meets an SLO."),
    "policies": ("listing:policies", "List the policies and their parameters."),
    "presets": ("listing:presets", "List published cluster configurations."),
    "profile": ("profile:profile", "Measure the kernels of a GPU, or of the CPU."),
    "report": ("report:report", "Make one HTML page of results."),
    "reproduce": ("reproduce:reproduce", "Rerun a paper's evaluation."),
    "router": ("serve:router", "Route requests to real engines by a policy."),
    "run": ("run:run", "Simulate one cluster."),
    "schema": ("listing:schema", "Print the JSON schema of --config."),
    "serve": ("serve:serve", "Serve OpenAI's API from a simulated cluster."),
    "study": ("study:study", "Run a study: figures and claims from a YAML file."),
    "support": ("listing:support", "Show how well a model is known on each GPU."),
    "sweep": ("sweep:sweep", "Run a grid or any other set of runs."),
    "tables": ("listing:tables", "List and import latency tables."),
    "trace": ("trace:trace", "Inspect, list and import routing traces."),
    "validate": ("validate:validate", "Compare the simulator with measured runs."),
    "what-if": ("compare:what_if", "Change one thing at a time in a run."),
}


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings=_SETTINGS)
@click.version_option(package_name="eldr-sim")
@click.option("--debug", is_flag=True, expose_value=False,
        callback=lambda _context, _option, given: show_tracebacks() if given else None,
        help="Print the traceback of an error, too.")  # fmt: skip
def cli() -> None:
    """Simulate clusters that serve language models, on per-token expert routing.

    Routing is drawn from a model's recording by default, and recorded with --trace."""


def main() -> None:
    """Run the command line."""
    run_command(cli)


if __name__ == "__main__":
    main()
