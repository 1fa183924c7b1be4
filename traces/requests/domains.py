"""Domain mixes of the named workloads, with their sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.errors import InputError

if TYPE_CHECKING:
    from eldr_sim.traces.routing.format import RoutingTrace

__all__ = ["DOMAIN_MIXES", "MIX_SOURCES", "NAMED_WORKLOADS", "resolve_domain_mix"]

DOMAIN_MIXES: dict[str, dict[str, float]] = {
    "task": {"code": 2779, "math": 2744, "medical": 2545, "legal": 3600},
    "language": {"en": 60.2, "zh": 14.8, "ru": 9.45, "fr": 3.15},
}
"""Weight of each domain in the named workloads; see `MIX_SOURCES`."""

MIX_SOURCES: dict[str, str] = {
    "task": "prompts per domain in ELDR Sec. 6, Datasets",
    "language": "derived: ELDR gives English + Chinese as about 75% of WildChat and the four "
    "languages as 87.6% (Fig. 5, Sec. 6); the first two are split 53:13 as WildChat-1M's turns "
    "are; Russian to French 3:1 is an assumption",
}
"""Source of each mix."""

NAMED_WORKLOADS = (*DOMAIN_MIXES, "trace")
"""Workloads without a file; ``trace`` has the domains of the routing trace, as its serving requests
have them."""


def resolve_domain_mix(
    trace: RoutingTrace,
    workload: str,
    domain_mix: Mapping[str, float] | None = None,
    field: str = "domain_mix",
) -> tuple[dict[str, float], str]:
    """Return the share of each domain in a workload, and where the shares come from.

    Parameters
    ----------
    trace
        The routing trace that serves the workload.
    workload
        ``task``, ``language``; or ``trace`` or the name of a request log, which says nothing about
        domains: requests have the domains of the trace's serving split.
    domain_mix
        Weights that replace the default, by domain name: any of the trace's. A domain left out
        gets none.
    field
        What errors call it.

    Returns
    -------
    shares, source
        Positive shares that sum to 1, in the order of the trace's domains; and a phrase for
        the result.

    Raises
    ------
    InputError
        If a weight is not a finite number of at least 0, all are 0, or the trace lacks a domain.
    """
    if domain_mix is None:
        missing = [name for name in DOMAIN_MIXES.get(workload, {}) if name not in trace.domains]
        if missing:
            raise InputError(
                "workload",
                f"{workload} needs domain {missing[0]!r}, which trace {trace.path.name} lacks",
                f"--workload trace, or a domain mix of {', '.join(trace.domains)}",
            )
        if workload in DOMAIN_MIXES:
            weights, source = DOMAIN_MIXES[workload], MIX_SOURCES[workload]
        else:
            serving = np.bincount(trace.domain[~trace.is_calibration], minlength=len(trace.domains))
            weights = dict(zip(trace.domains, serving.tolist(), strict=True))
            source = "shares of the trace's serving split"
    else:
        weights, source = dict(domain_mix), "given"
    for name, weight in weights.items():
        if name not in trace.domains:
            raise InputError(
                field,
                f"{name!r} is not a domain of trace {trace.path.name}",
                ", ".join(trace.domains),
            )
        if not math.isfinite(weight) or weight < 0:
            raise InputError(field, f"weight of {name} is {weight}", "a finite number >= 0")
    total = sum(weights.values())
    if total <= 0:
        raise InputError(field, "no domain has a positive weight")
    if not math.isfinite(total):
        raise InputError(field, "the weights sum to more than a float holds", "smaller weights")
    total = math.fsum(weights.values())
    return (
        {name: weights[name] / total for name in trace.domains if weights.get(name, 0) > 0},
        source,
    )
