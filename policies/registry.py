"""Policies by name: the built-in ones and those of other packages.

A package adds a policy by an entry point of the group ``eldr_sim.policies`` that resolves to a
class with

- ``name``: the name that users type;
- ``decision``: ``"decode"`` or ``"prefill"``;
- a constructor that takes a :class:`~eldr_sim.policies.base.PolicyContext`;
- ``select(request, loads) -> int`` (see ``base``);
- for a decode policy, ``on_complete(request_id, worker)`` if it wants to hear of completions.

The entry point's own key is free. Built-in names cannot be taken over. Other packages are loaded
only when a name is not built in, or when all names are listed.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol, cast

from eldr_sim.errors import InputError
from eldr_sim.policies.base import DecodePolicy, PolicyContext, PrefillPolicy
from eldr_sim.policies.decode import (
    DomainPolicy,
    JoinShortestQueuePolicy,
    PowerOfTwoChoicesPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from eldr_sim.policies.eldr import EldrPolicy
from eldr_sim.policies.marginal_cost import MarginalCostPolicy, OraclePolicy
from eldr_sim.policies.prefill import (
    LeastLoadedPolicy,
    PrefillRoundRobinPolicy,
    PrefixHashPolicy,
)

GROUP = "eldr_sim.policies"
"""The entry-point group that other packages add policies to."""

DECISIONS = ("decode", "prefill")
"""The decisions that a policy can make."""


class PolicyClass(Protocol):
    """A class that the registry accepts: it is called with the context to build the policy."""

    name: str
    decision: str

    def __call__(self, context: PolicyContext) -> DecodePolicy | PrefillPolicy:
        """Build the policy."""
        ...


_BUILT_IN = cast(
    "tuple[PolicyClass, ...]",
    (
        RandomPolicy,
        RoundRobinPolicy,
        JoinShortestQueuePolicy,
        PowerOfTwoChoicesPolicy,
        DomainPolicy,
        EldrPolicy,
        MarginalCostPolicy,
        OraclePolicy,
        PrefillRoundRobinPolicy,
        LeastLoadedPolicy,
        PrefixHashPolicy,
    ),
)


def names(decision: str) -> list[str]:
    """Return the names of the policies for a decision, the built-in ones first.

    Parameters
    ----------
    decision
        ``"decode"`` or ``"prefill"``.

    Raises
    ------
    InputError
        For another decision, or if an installed package offers a broken policy.
    """
    if decision not in DECISIONS:
        raise InputError("decision", f"unknown decision {decision!r}", ", ".join(DECISIONS))
    return [*_built_in(decision), *sorted(_external(decision))]


def decode_policy(name: str, context: PolicyContext) -> DecodePolicy:
    """Build the decode policy called ``name``; ``InputError`` lists the names if there is none."""
    return _find("decode", name)(context)


def prefill_policy(name: str, context: PolicyContext) -> PrefillPolicy:
    """Build the prefill policy called ``name``; ``InputError`` lists the names if there is none."""
    return _find("prefill", name)(context)


def _find(decision: str, name: str) -> PolicyClass:
    built_in = _built_in(decision)
    if name in built_in:
        return built_in[name]
    external = _external(decision)
    if name in external:
        return external[name]
    allowed = ", ".join([*built_in, *sorted(external)])
    raise InputError(f"{decision} policy", f"unknown policy {name!r}", allowed)


def _built_in(decision: str) -> dict[str, PolicyClass]:
    return {policy.name: policy for policy in _BUILT_IN if policy.decision == decision}


def _external(decision: str) -> dict[str, PolicyClass]:
    found: dict[str, PolicyClass] = {}
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else "an unnamed package"
        origin = f"entry point {point.name!r} of {package}"
        try:
            policy = point.load()
        except Exception as error:  # whatever a foreign module may raise on import
            raise InputError(GROUP, f"{origin} does not load: {error!r}") from error
        problem = _flaw(policy)
        if problem:
            raise InputError(GROUP, f"{origin} {problem}")
        if policy.name in _built_in(policy.decision):
            raise InputError(GROUP, f"{origin} takes the built-in name {policy.name!r}")
        if policy.decision != decision:
            continue
        if policy.name in found:
            raise InputError(GROUP, f"{origin} offers {policy.name!r}, which another one has")
        found[policy.name] = policy
    return found


def _flaw(policy: object) -> str:
    """Say what keeps ``policy`` from being a policy class; empty if nothing does."""
    name = getattr(policy, "name", None)
    decision = getattr(policy, "decision", None)
    if not callable(policy):
        return f"is no class but {policy!r}"
    if not isinstance(name, str) or not name:
        return f"has no name (name={name!r})"
    if decision not in DECISIONS:
        return f"has decision={decision!r}, not one of {', '.join(DECISIONS)}"
    if not callable(getattr(policy, "select", None)):
        return "has no method select(request, loads)"
    return ""
