"""``eldr-sim reproduce``: a paper's evaluation, run again."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import eldr_sim
from eldr_sim.cli.decorators import Decorator, option, output, together
from eldr_sim.cli.study import RESUME, Known, run_figures
from eldr_sim.errors import InputError
from eldr_sim.kinds import Progress
from eldr_sim.planning.studies.figures import Runner


@click.group(short_help="Rerun a paper's evaluation.")
def reproduce() -> None:
    """Rerun a paper's evaluation and hold its claims against ours."""


#: What every reproduction can be told.
_options = together(
    click.argument("figure", nargs=-1),
    output("Folder for the figures.", "the reproduction in --out"),
    option("--resume", bool, RESUME),
    option("--quick", bool, "Fewer and shorter runs."),
)


@reproduce.command()
@_options
@option("--measured", bool, "The cells that the authors measured on 24 MI300X and their Figures "
        "10, 11 and 13 to 16, as they number them; also errors and slope.")  # fmt: skip
@option("--kernels", ["fitted", "derived"], "With --measured: MoE tables fitted to its round-robin "
        "cells, or from public kernel figures alone.  [default: fitted]")  # fmt: skip
def eldr(measured: bool, kernels: str | None, **options: Any) -> None:
    """ELDR: FIGURE is a number or a name such as table_2; all of them where none is given.

    Prints a line for each claim. With --out, each figure is a picture and a CSV."""
    if measured:
        kernels = kernels or "fitted"
        _reproduce(f"ELDR, measured ({kernels})", "eldr_measured", kernels=kernels, **options)
    elif kernels is not None:
        raise InputError("kernels", "without --measured", "together with --measured")
    else:
        _reproduce("ELDR", "eldr", **options)


def _command(name: str, module: str, paper: str, example: str, *options: Decorator) -> None:
    """Add the command of a paper that is told no more than figures, and these ``options``."""

    def run(**told: Any) -> None:
        _reproduce(paper, module, **told)

    run.__doc__ = (
        f"{paper}: FIGURE is a number or a name such as {example}; all of them where none is "
        "given.\n\nPrints a line for each claim. With --out, each figure is a picture and a CSV."
    )
    reproduce.command(name)(together(_options, *options)(run))


_command("metro", "metro", "METRO", "choices")
_command("grace", "grace", "GRACE-MoE", "map")
_command("factorial", "factorial", "The papers' methods together", "factorial")
_LOG = "Take lengths from a request log (BurstGPT, Azure, Mooncake)."
_command("gimbal", "gimbal", "Gimbal", "sjf_sign", option("--log", None, _LOG, metavar="FILE"))
_command("moe-prefill", "moe_prefill", "MoE-Prefill", "table_1")


def _reproduce(
    paper: str,
    module: str,
    figure: tuple[str, ...],
    out: Path | None,
    force: bool,
    resume: bool,
    quick: bool,
    **own: Any,
) -> None:
    """Reproduce figures of a paper, by its folder in ``studies/``. ``own``: the options of this
    paper's command alone."""
    evaluation = _evaluation(module)

    def figures(progress: Progress) -> tuple[Runner, Known]:
        runner = evaluation.make_runner(quick, progress)
        return runner, evaluation.figures(runner, quick, **own)

    about, count = {"paper": paper, "quick": quick}, getattr(evaluation, "expected_runs", None)
    expected = count and (lambda names: count(names, quick, **own))
    run_figures(paper, figures, figure, out, force, about, resume=resume, expected=expected)


def _evaluation(module: str) -> Any:
    """Import a paper's evaluation from the checkout that is run, or in which the command runs."""
    for folder in (Path(eldr_sim.__file__).parents[1], Path.cwd()):
        if (folder / "studies" / module / "evaluation.py").is_file():
            sys.path[:0] = [] if str(folder) in sys.path else [str(folder)]
            break
    if find_spec("studies") is None:
        problem = "the papers' evaluations are not in the installed package"
        raise InputError("reproduce", problem, "run it in a checkout, which has the folder studies")
    return import_module(f"studies.{module}.evaluation")
