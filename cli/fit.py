"""``eldr-sim fit``: ELDR's offline fit and its report."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from click import IntRange

from eldr_sim.cli.decorators import complete, model_option, option, traces, workloads, writes
from eldr_sim.cli.run_options import check_file
from eldr_sim.policies.eldr.signature import (
    METHODS,
    TRANSFORMS,
    FitOptions,
    parse_layer_mask,
    score_of,
)


@click.command(short_help="Fit ELDR's routing artifact.")
@option("--trace", None, "Routing trace; without it requests are drawn for the model, as for a "
        "run.", metavar="NAME|DIR", shell_complete=complete(traces, "dir"))  # fmt: skip
@model_option("Model to draw the routing of, without --trace.")
@option("--workload", None, "Workload that gives the domain mix of the calibration requests.",
        default="task", metavar="task|language|trace|FILE",
        shell_complete=complete(workloads, "file"))  # fmt: skip
@option("--decoders", int, "Number of decode workers; each gets one centroid.", required=True)
@option("--signature", None, f"Transform of a prompt's experts: {', '.join(TRANSFORMS)}. The last "
        f"two are fitted on the calibration requests that have gate scores.", default="count-idf",
        metavar="NAME")  # fmt: skip
@option("--layer-mask", None, "Layers of the signature: chosen greedily by rho, all, or the ones "
        "given.", default="greedy", metavar="greedy|all|N,N,...")  # fmt: skip
@option("--clustering", None, "Clustering of the signatures: balanced (Hungarian) or vanilla "
        "K-means.", default="balanced", metavar="|".join(METHODS))  # fmt: skip
@option("--seedings", IntRange(1, 1000), "Number of starts of the clustering; the best result is "
        "kept.", default=FitOptions().seedings)  # fmt: skip
@option("--rounds", IntRange(1, 10_000), "Maximum number of rounds of the clustering.",
        default=FitOptions().rounds)  # fmt: skip
@option("--mask-pairs", IntRange(3, 10_000_000), "Pairs of requests, drawn with replacement, that "
        "rho is measured on.", default=FitOptions().mask_pairs)  # fmt: skip
@option("--seed", int, "Seed of the fit.", default=0)
@writes("--out", Path, "Routing artifact to write.", required=True, metavar="FILE.npz")
@writes("--report", Path, "Draw rho by transform, rho by layers kept and the signatures' principal "
        "components, with CSV files, for this workload and the named ones that the trace can "
        "serve.")  # fmt: skip
@option("--force", bool, "Replace the file and the report.")
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
    from eldr_sim.simulator.setup.config.requests import RoutingConfig
    from eldr_sim.simulator.setup.run_routing import routing_of
    from eldr_sim.traces.routing.calibration import calibration_set
    from eldr_sim.traces.routing.format import open_trace
    from eldr_sim.validation.signature_report import measured_fits, signature_report

    check_file(out, force, report, "artifact")
    mask = parse_layer_mask(options.pop("layer_mask"))
    choices = FitOptions(options.pop("signature"), mask, **options)
    if trace is None:
        opened = routing_of(workload, RoutingConfig(), load_model(model))
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
