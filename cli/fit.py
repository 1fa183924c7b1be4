"""``eldr-sim fit``: ELDR's offline fit and its report."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from eldr_sim.cli.completion import complete, models, traces, workloads
from eldr_sim.errors import InputError
from eldr_sim.policies.eldr.signature import (
    METHODS,
    TRANSFORMS,
    FitOptions,
    parse_layer_mask,
    score_of,
)


@click.command(short_help="Fit ELDR's routing artifact.")
@click.option(
    "--trace",
    metavar="NAME|DIR",
    shell_complete=complete(traces, "dir"),
    help="Routing trace; without it requests are drawn for the model, as for a run.",
)
@click.option(
    "--model",
    default="Qwen3-30B-A3B",
    metavar="NAME|PATH",
    shell_complete=complete(models, "file"),
    help="Model whose routing is drawn.",
)
@click.option(
    "--workload",
    default="task",
    metavar="task|language|trace|FILE",
    shell_complete=complete(workloads, "file"),
    help="Workload whose domain mix the calibration requests have.",
)
@click.option("--decoders", type=int, required=True, help="Decode workers, one centroid each.")
@click.option(
    "--signature",
    default="count-idf",
    metavar="NAME",
    help=f"Transform of a prompt's experts: {', '.join(TRANSFORMS)}. The last two "
    "are fitted on the calibration requests that have gate scores.",
)
@click.option(
    "--layer-mask",
    default="greedy",
    metavar="greedy|all|N,N,...",
    help="Layers of the signature: chosen greedily by rho, all, or the ones given.",
)
@click.option(
    "--clustering",
    default="balanced",
    metavar="|".join(METHODS),
    help="Hungarian-balanced or vanilla K-means.",
)
@click.option(
    "--seedings",
    type=click.IntRange(1, 1000),
    default=FitOptions().seedings,
    help="Starts of the clustering, of which the best is kept.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 10_000),
    default=FitOptions().rounds,
    help="Most rounds of the clustering.",
)
@click.option(
    "--mask-pairs",
    type=click.IntRange(3, 10_000_000),
    default=FitOptions().mask_pairs,
    help="Pairs of requests, drawn with replacement, that rho is measured on.",
)
@click.option("--seed", type=int, default=0)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE.npz", help="Artifact."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Draw rho by transform, rho by layers kept and the signatures' principal components, "
    "with CSV files, for this workload and the named ones that the trace can serve.",
)
@click.option("--force", is_flag=True, help="Replace the file and the report.")
def fit(
    trace: str | None,
    model: str,
    workload: str,
    decoders: int,
    seed: int,
    out: Path,
    report: Path | None,
    force: bool,
    **options: Any,
) -> None:
    """Fit ELDR's routing artifact: IDF weights, layer mask and one centroid a decode worker."""
    # Imported here because of the compiler, which --help and completion do not need.
    from eldr_sim.kernel_profiles.models import load_model
    from eldr_sim.policies.eldr.artifact import fit as fit_artifact
    from eldr_sim.simulator.results import check_output
    from eldr_sim.simulator.setup.config import RunConfig
    from eldr_sim.simulator.setup.prepare import routing_of
    from eldr_sim.traces.routing.calibration import calibration_set
    from eldr_sim.traces.routing.format import open_trace
    from eldr_sim.validation.signature_report import measured_fits, signature_report

    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new file, or --force")
    if report is not None:
        check_output(report, force)
        if report.resolve() in (out.resolve(), *out.resolve().parents):
            raise InputError("report", f"{report} would hold {out}", "a folder beside the artifact")
    choices = FitOptions(
        options["signature"],
        parse_layer_mask(options["layer_mask"]),
        options["clustering"],
        options["seedings"],
        options["rounds"],
        options["mask_pairs"],
    )
    if trace is None:
        opened = routing_of(RunConfig(workload=workload, model=model), load_model(model))
    else:
        opened = open_trace(trace)
    score = score_of(choices.transform)
    calibration = calibration_set(opened, workload=workload, score=score)
    start = time.perf_counter()
    artifact = fit_artifact(calibration, decoders, seed, choices)
    seconds = time.perf_counter() - start
    with ExitStack() as stack:
        if report is not None:
            fits = measured_fits(opened, workload, calibration, artifact)
            stack.enter_context(signature_report(report, fits, force=force))
        artifact.save(out)
    facts = artifact.summary()
    click.echo(
        f"Fitted {facts['n_decoders']} centroids on {facts['n_calibration']} calibration requests "
        f"{'' if score == 'count' else 'with gate scores '}in {seconds:.2f} s: "
        f"{artifact.transform} signatures, {artifact.clustering} K-means"
    )
    click.echo(
        f"Layers kept: {facts['n_layers_kept']} of {facts['n_layers']} {facts['layers_kept']}, "
        f"rho {facts['rho']:.4f} (all layers {facts['rho_all_layers']:.4f})"
    )
    click.echo(f"Cluster sizes: {facts['cluster_sizes']}")
    click.echo(f"Wrote {out}")
    if report is not None:
        click.echo(f"Wrote {report}: report of {', '.join(fits)}")
