"""Domain mixes of the named workloads, with their sources."""

from collections.abc import Mapping

from eldr_sim.errors import InputError

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

NAMED_WORKLOADS = (*DOMAIN_MIXES, "trace", "chat", "agent")
"""Workloads without a file; all but the first two have the domains of the routing trace, as its
serving requests have them. The last two are sessions."""


def wanted_domains(
    workload: str, *mixes: Mapping[str, float] | None
) -> tuple[tuple[str, float], ...]:
    """Return the domains to draw for a workload, with their weights.

    Those of the mixes that are given, evenly; else the workload's own mix; else all, evenly.

    Raises InputError if a mix names another domain than those of the named workloads.
    """
    known = [name for mix in DOMAIN_MIXES.values() for name in mix]
    named = dict.fromkeys(name for mix in mixes if mix is not None for name in mix)
    for name in named:
        if name not in known:
            raise InputError(
                "domain_mix",
                f"{name!r} is none of the domains that can be drawn; a trace of your own has its",
                ", ".join(known),
            )
    weights = dict.fromkeys(named, 1.0) or DOMAIN_MIXES.get(workload) or dict.fromkeys(known, 1.0)
    return tuple(weights.items())
