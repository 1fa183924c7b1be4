"""The workload that a routing trace serves unless one is given."""

import os
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.requests import WorkloadConfig
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.manifest import folder_of, read_manifest


def with_workload(values: dict[str, Any]) -> dict[str, Any]:
    """Return field values with the workload ``trace`` if their routing trace lacks a domain of the
    default workload. A trace that cannot be read is refused where it is opened."""
    if not isinstance(values["trace"], str | os.PathLike):
        return values
    default = WorkloadConfig.model_fields["workload"].default
    try:
        domains = read_manifest(folder_of(values["trace"]) / "manifest.json").domains
    except InputError:
        return values
    return values if set(DOMAIN_MIXES[default]) <= set(domains) else values | {"workload": "trace"}
