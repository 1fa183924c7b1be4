"""``eldr-sim fit``: ELDR's offline fit."""

from __future__ import annotations

import time
from pathlib import Path

import click

from eldr_sim.errors import InputError
from eldr_sim.policies.artifact import fit as fit_artifact
from eldr_sim.traces.calibration import calibration_set
from eldr_sim.traces.format import DEFAULT_TRACE, open_trace


@click.command(short_help="Fit ELDR's routing artifact.")
@click.option("--trace", default=DEFAULT_TRACE, show_default=True, metavar="NAME|DIR")
@click.option(
    "--workload",
    default="task",
    show_default=True,
    metavar="task|language|FILE",
    help="Whose domain mix the calibration requests follow.",
)
@click.option("--decoders", type=int, required=True, help="Decode workers, one centroid each.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="FILE.npz", help="Artifact."
)
@click.option("--force", is_flag=True, help="Replace the file.")
def fit(trace: str, workload: str, decoders: int, seed: int, out: Path, force: bool) -> None:
    """Fit ELDR's routing artifact: IDF weights, layer mask and one centroid a decode worker."""
    if out.exists() and not force:
        raise InputError("out", f"{out} exists", "a new file, or --force")
    calibration = calibration_set(open_trace(trace), workload=workload)
    start = time.perf_counter()
    artifact = fit_artifact(calibration, decoders, seed)
    seconds = time.perf_counter() - start
    artifact.save(out)
    facts = artifact.summary()
    click.echo(
        f"Fitted {facts['n_decoders']} centroids on {facts['n_calibration']} calibration requests "
        f"in {seconds:.2f} s"
    )
    click.echo(
        f"Layers kept: {facts['n_layers_kept']} of {facts['n_layers']} {facts['layers_kept']}, "
        f"rho {facts['rho']:.4f} (all layers {facts['rho_all_layers']:.4f})"
    )
    click.echo(f"Cluster sizes: {facts['cluster_sizes']}")
    click.echo(f"Wrote {out}")
