"""Policies by name: the built-in ones and those of other packages.

A package adds a policy by an entry point of the group ``eldr_sim.policies`` that resolves to a
class with

- ``name``: the name that users type;
- ``decision``: one of `DECISIONS`;
- a constructor that takes a :class:`~eldr_sim.policies.base.PolicyContext`, and after it the
  parameters if the class has any: a subclass of :class:`~eldr_sim.policies.choice.Parameters` as
  its attribute ``Parameters``;
- ``select(request, workers) -> int | None`` (see ``base``), for a queue order
  ``keys(requests)`` (see ``queue_order``), for a placement ``place(group)`` (see ``placement``),
  and ``update(group, load, current)`` if it may move experts, for a choice of replicas
  ``choose(...)`` (see ``replicas``);
- for a decode policy, ``on_complete(request_id, worker)`` if it wants to hear of completions; for
  a prefill policy, ``on_blocks`` and ``on_tokens`` if it wants to hear of the engines' progress.

``./mine.py:Class`` is such a class in a file; it needs neither entry point, name nor decision.
The entry point's own key is free. Built-in names cannot be taken over. Other packages are loaded
only when a name is not built in, or when all names are listed. What goes wrong in them is an
InputError that names the package, the call and the request (`plugins`).
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol, cast

from eldr_sim.errors import InputError
from eldr_sim.inputs import regular_file
from eldr_sim.policies.base import DecodePolicy, PolicyContext, PrefillPolicy
from eldr_sim.policies.choice import FIELDS, Parameters, parameters_of, parse, spell
from eldr_sim.policies.eldr.router import EldrPolicy
from eldr_sim.policies.placement.base import EldrPlacement, LinearPlacement, PlacementPolicy
from eldr_sim.policies.placement.eplb import EplbPlacement
from eldr_sim.policies.placement.gimbal import GimbalPlacement
from eldr_sim.policies.placement.grace import AffinityPlacement, GracePlacement
from eldr_sim.policies.placement.home import HomePlacement
from eldr_sim.policies.placement.time_aware import TimeAwarePlacement
from eldr_sim.policies.plugins import guarded
from eldr_sim.policies.queue.orders import (
    AgingShortestJobFirst,
    FirstComeFirstServed,
    OracleOrder,
    PriorityOrder,
    QueueOrder,
    ShortestJobFirst,
    ShortestResidenceFirst,
)
from eldr_sim.policies.replicas.base import EvenSplit, HashedPosition, NearSource, ReplicaChoice
from eldr_sim.policies.replicas.metro import Metro, MetroSorted, Optimal, TimeAware
from eldr_sim.policies.replicas.weighted import LocalFirst, WeightedInstances
from eldr_sim.policies.routing.decode import (
    DomainPolicy,
    JoinShortestQueuePolicy,
    PowerOfTwoChoicesPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from eldr_sim.policies.routing.engine_balance import (
    GimbalPolicy,
    PrefillGimbalPolicy,
    PrefillVllmDpKvPolicy,
    PrefillVllmDpPolicy,
    VllmDpKvPolicy,
    VllmDpPolicy,
)
from eldr_sim.policies.routing.marginal_cost import MarginalCostPolicy, OraclePolicy
from eldr_sim.policies.routing.prefill import (
    HashRingPolicy,
    LeastLoadedPolicy,
    PrefillRoundRobinPolicy,
    PrefixHashPolicy,
)
from eldr_sim.policies.routing.saturation import SaturationPolicy

GROUP = "eldr_sim.policies"
"""The entry-point group that other packages add policies to."""

DECISIONS = tuple(FIELDS)
"""The decisions that a policy can make."""


Policy = DecodePolicy | PrefillPolicy | QueueOrder | PlacementPolicy | ReplicaChoice
"""What the registry builds."""


class PolicyClass(Protocol):
    """A class that the registry accepts: it is called with the context to build the policy."""

    name: str
    decision: str

    def __call__(self, context: PolicyContext, *parameters: Any) -> Policy:
        """Build the policy."""
        ...


#: What a policy is asked, other than a router.
_METHOD = {
    "queue": "keys(requests)",
    "placement": "place(group)",
    "replica": "choose(tokens_home, experts, placement, layer, node_of_rank)",
}

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
        GimbalPolicy,
        VllmDpPolicy,
        VllmDpKvPolicy,
        PrefillRoundRobinPolicy,
        LeastLoadedPolicy,
        PrefixHashPolicy,
        HashRingPolicy,
        SaturationPolicy,
        PrefillGimbalPolicy,
        PrefillVllmDpPolicy,
        PrefillVllmDpKvPolicy,
        FirstComeFirstServed,
        ShortestJobFirst,
        AgingShortestJobFirst,
        ShortestResidenceFirst,
        OracleOrder,
        PriorityOrder,
        LinearPlacement,
        EldrPlacement,
        EplbPlacement,
        GracePlacement,
        AffinityPlacement,
        TimeAwarePlacement,
        HomePlacement,
        GimbalPlacement,
        EvenSplit,
        HashedPosition,
        NearSource,
        WeightedInstances,
        LocalFirst,
        Metro,
        MetroSorted,
        Optimal,
        TimeAware,
    ),
)


def names(decision: str) -> list[str]:
    """Return the names of the policies for a decision, the built-in ones first.

    Parameters
    ----------
    decision
        One of `DECISIONS`.

    Raises
    ------
    InputError
        For another decision, or if an installed package offers a broken policy.
    """
    if decision not in DECISIONS:
        raise InputError("decision", f"unknown decision {decision!r}", ", ".join(DECISIONS))
    return [*_built_in(decision), *sorted(_external(decision))]


def decode_policy(choice: object, context: PolicyContext) -> DecodePolicy:
    """Build a decode policy from a `choice`, such as ``jsq`` or ``eldr:tau=0.2``.

    Raises
    ------
    InputError
        If there is no such policy or parameter, or if the policy needs what the context lacks.
    """
    return cast("DecodePolicy", _build("decode", choice, context))


def prefill_policy(choice: object, context: PolicyContext) -> PrefillPolicy:
    """Build a prefill policy from a `choice`; see `decode_policy`."""
    return cast("PrefillPolicy", _build("prefill", choice, context))


def queue_order(choice: object, context: PolicyContext) -> QueueOrder:
    """Build a queue order from a `choice`; see `decode_policy`."""
    return cast("QueueOrder", _build("queue", choice, context))


def placement_policy(choice: object, context: PolicyContext) -> PlacementPolicy:
    """Build a placement policy from a `choice`; see `decode_policy`."""
    return cast("PlacementPolicy", _build("placement", choice, context))


def replica_choice(choice: object, context: PolicyContext) -> ReplicaChoice:
    """Build a choice of replicas from a `choice`; see `decode_policy`."""
    return cast("ReplicaChoice", _build("replica", choice, context))


def canonical(decision: str, choice: object) -> str:
    """Return the one word for a `choice`; raises InputError as building the policy would."""
    found, own = _resolve(decision, choice)
    return spell(found.name, own)


def parameters(decision: str, choice: object) -> Parameters:
    """Return all parameters of a `choice`; raises InputError as building the policy would."""
    return _resolve(decision, choice)[1]


def _resolve(decision: str, choice: object) -> tuple[PolicyClass, Parameters]:
    """Return the class and the parameters of a `choice`."""
    name, given = parse(choice, FIELDS[decision])
    found = find(decision, name)
    return found, parameters_of(found, given, FIELDS[decision])


def _build(decision: str, choice: object, context: PolicyContext) -> Policy:
    found, own = _resolve(decision, choice)
    return found(context, own) if hasattr(found, "Parameters") else found(context)


def find(decision: str, name: str) -> PolicyClass:
    """Return a policy's class; names are known in any case of letters, or ``./mine.py:Class``.

    Raises
    ------
    InputError
        If there is none, with the names that there are.
    """
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        file = regular_file(path, FIELDS[decision])
        return _in_file(decision, name, file.resolve(), attribute, file.stat().st_mtime_ns)
    built_in = _built_in(decision)
    for known in (name, name.lower()):
        if known in built_in:
            return built_in[known]
    external = _external(decision)
    for known in (name, name.lower()):
        if known in external:
            return external[known]
    allowed = ", ".join([*built_in, *sorted(external)])
    raise InputError(FIELDS[decision], f"unknown policy {name!r}", allowed)


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
        found[policy.name] = guarded(policy, f"package {package}", FIELDS[decision])
    return found


@lru_cache(maxsize=64)
def _in_file(decision: str, name: str, path: Path, attribute: str, _changed: int) -> PolicyClass:
    """Return a class of a file; its name is how users spell it, and its decision the one asked."""
    field, spec = FIELDS[decision], spec_from_file_location(f"eldr_sim_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a foreign module may raise
        raise InputError(field, f"{path.name} does not load: {error!r}") from error
    policy: Any = getattr(module, attribute, None)
    if not isinstance(policy, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise InputError(field, f"{path.name} has no class {attribute!r}", ", ".join(classes))
    if (decides := getattr(policy, "decision", decision)) != decision:
        raise InputError(field, f"{name} decides {decides!r}", decision)
    about: dict[str, Any] = {"name": name, "decision": decision}
    if "__init__" not in {key for c in policy.__mro__[:-1] for key in vars(c)}:
        about["__init__"] = lambda self, context: None
    own = type(attribute, (policy,), about)
    own.__module__, own.__doc__ = module.__name__, policy.__doc__
    if problem := _flaw(own):
        raise InputError(field, f"{name} {problem}")
    return cast("PolicyClass", guarded(own, path.name, field))


def _flaw(policy: object) -> str:
    """Say what keeps ``policy`` from being a policy class; empty if nothing does."""
    name = getattr(policy, "name", None)
    decision = getattr(policy, "decision", None)
    if not isinstance(policy, type):
        return f"is no class but {policy!r}"
    if not isinstance(name, str) or not name:
        return f"has no name (name={name!r})"
    if decision not in DECISIONS:
        return f"has decision={decision!r}, not one of {', '.join(DECISIONS)}"
    method = _METHOD.get(decision, "select(request, workers)")
    if not callable(getattr(policy, method.partition("(")[0], None)):
        return f"has no method {method}"
    return ""
