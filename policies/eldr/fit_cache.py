"""Fits of ELDR's router kept in the user's cache: the same fit is made once on a machine."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from eldr_sim import cache
from eldr_sim.errors import InputError
from eldr_sim.policies.eldr.artifact import RoutingArtifact, fit
from eldr_sim.policies.eldr.signature import FitOptions
from eldr_sim.traces.routing.calibration import CalibrationSet
from eldr_sim.traces.routing.format import RoutingTrace

#: Modules of which a fit is made: when they change, it is made anew.
_SOURCES = (
    "policies.eldr.artifact", "policies.eldr.clustering", "policies.eldr.signature",
    "traces.routing.calibration", "traces.routing.gate_scores",
)  # fmt: skip


def cached_fit(
    trace: RoutingTrace,
    workload: str,
    domain_mix: dict[str, float] | None,
    calibration: Callable[[], CalibrationSet],
    n_decoders: int,
    seed: int,
    options: FitOptions,
) -> RoutingArtifact:
    """Return `fit` of the calibration requests of a trace, from the cache if it is there.

    ``trace``, ``workload``, ``domain_mix``: what ``calibration`` picks its requests by;
    ``calibration``: gives the calibration requests; called only where the fit is not in the cache;
    ``n_decoders``, ``seed``, ``options``: as for `fit`, which says what it raises.
    """
    manifest = trace.for_calibration.manifest
    files = [manifest.checksum, manifest.requests_checksum, manifest.gate_scores_checksum]
    mix = None if domain_mix is None else list(domain_mix.items())
    how: list[Any] = [n_decoders, seed, *options]
    key = [files, trace.top_k, workload, mix, how, cache.stamp(_SOURCES)]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
    name = f"{digest.hexdigest()[:32]}.npz"
    path = cache.find(cache.FITS, name)
    if path is not None and path.exists():
        try:
            found = RoutingArtifact.load(path)
        except InputError:  # it is made anew and replaced
            found = None
        if found is not None and (found.trace_checksum, found.n_decoders, found.seed) == (
            manifest.checksum,
            n_decoders,
            seed,
        ):
            return found
    made = fit(calibration(), n_decoders, seed, options)
    cache.keep(cache.FITS, name, made.write)
    return made
