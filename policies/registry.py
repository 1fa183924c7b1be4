"""Policies by name: the built-in ones and those of other packages.

A package adds a policy by an entry point of the group ``eldr_sim.policies``: a class with a
``name``, a ``decision`` and its ``needs``, which are checked here, a subclass of `RouterPolicy`,
`QueueOrder`, `PlacementPolicy`, `ReplicaChoice` or `Autoscaler`, or made one. Its constructor takes
a `PolicyContext`, and its parameters, if it has any, as ``Parameters``
(``docs/policies.md``). ``./mine.py:Class`` is such a class in a file, without entry point, name or
decision. Built-in names (`choice.BUILT_IN`) cannot be taken over. What goes wrong in other packages
is an InputError that names the package, the call and the request (`plugins`)."""

from collections.abc import Iterable
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast, get_args

from eldr_sim.errors import InputError
from eldr_sim.inputs import regular_file
from eldr_sim.policies.base import Needs, Policy, PolicyContext, RouterPolicy
from eldr_sim.policies.choice import (
    BUILT_IN,
    DECISION_OF,
    FIELDS,
    Parameters,
    parameters_of,
    parse,
    spell,
)
from eldr_sim.policies.placement.base import PlacementPolicy
from eldr_sim.policies.plugins import guarded
from eldr_sim.policies.queue.orders import QueueOrder
from eldr_sim.policies.replicas.base import ReplicaChoice
from eldr_sim.policies.scaling.base import Autoscaler
from eldr_sim.traces.routing.gate_scores import PromptScore

GROUP = "eldr_sim.policies"  #: the entry-point group that other packages add policies to

DECISIONS = tuple(FIELDS)  #: the decisions that a policy can make


#: What a policy must be, and what it is asked.
_KINDS: dict[str, tuple[type[Policy], str]] = {
    "decode": (RouterPolicy, "select(request, workers)"),
    "prefill": (RouterPolicy, "select(request, workers)"),
    "queue": (QueueOrder, "keys(requests)"),
    "placement": (PlacementPolicy, "place(group)"),
    "replica": (ReplicaChoice, "choose(tokens_home, experts, placement, layer, ...)"),
    "scaling": (Autoscaler, "decide(fleet)"),
}
#: What it is told or asked besides, if its needs say so.
_BESIDES = {"on_complete": "ends", "on_blocks": "blocks", "on_tokens": "blocks", "update": "counts"}


def names(decision: str) -> list[str]:
    """Return the policies' names for a decision, ours first; raises InputError."""
    if decision not in DECISIONS:
        raise InputError("decision", f"unknown decision {decision!r}", ", ".join(DECISIONS))
    return [*BUILT_IN[decision], *sorted(_external(decision))]


def decode_policy(choice: object, context: PolicyContext) -> RouterPolicy:
    """Build a decode policy from a `choice` such as ``eldr:tau=0.2``; raises InputError."""
    return cast("RouterPolicy", _build("decode", choice, context))


def prefill_policy(choice: object, context: PolicyContext) -> RouterPolicy:
    """Build a prefill policy from a `choice`; see `decode_policy`."""
    return cast("RouterPolicy", _build("prefill", choice, context))


def queue_order(choice: object, context: PolicyContext) -> QueueOrder:
    """Build a queue order from a `choice`; see `decode_policy`."""
    return cast("QueueOrder", _build("queue", choice, context))


def placement_policy(choice: object, context: PolicyContext) -> PlacementPolicy:
    """Build a placement policy from a `choice`; see `decode_policy`."""
    return cast("PlacementPolicy", _build("placement", choice, context))


def replica_choice(choice: object, context: PolicyContext) -> ReplicaChoice:
    """Build a choice of replicas from a `choice`; see `decode_policy`."""
    return cast("ReplicaChoice", _build("replica", choice, context))


def autoscaler(choice: object, context: PolicyContext) -> Autoscaler:
    """Build an autoscaler from a `choice`; see `decode_policy`."""
    return cast("Autoscaler", _build("scaling", choice, context))


def canonical(decision: str, choice: object) -> str:
    """Return the canonical word for a policy and its parameters.

    Args:
        decision: what the policy decides, such as ``router``.
        choice: a policy in any spelling (`choice.parse`).

    Returns:
        Such as ``eldr:tau=0.2``.

    Raises:
        InputError: the policy cannot be built from ``choice``.
    """
    found, own = _resolve(decision, choice)
    return spell(found.name, own)


def parameters(decision: str, choice: object) -> Parameters:
    """Return all parameters of a policy.

    Args:
        decision: what the policy decides, such as ``router``.
        choice: a policy in any spelling (`choice.parse`).

    Returns:
        The given parameters and the defaults of the others.

    Raises:
        InputError: the policy cannot be built from ``choice``.
    """
    return _resolve(decision, choice)[1]


def is_built_in(decision: str, choice: object) -> bool:
    """Return whether a `choice` is a policy of this package."""
    return parse(choice, FIELDS[decision])[0].lower() in BUILT_IN[decision]


def begins_as_configured(choice: object) -> bool:
    """Return whether an autoscaler leaves the workers at time 0 to the configuration."""
    return _resolve("scaling", choice)[0].begin is Autoscaler.begin  # type: ignore[attr-defined]


def _resolve(decision: str, choice: object) -> tuple[type[Policy], Parameters]:
    """Return the class and the parameters of a `choice`."""
    name, given = parse(choice, FIELDS[decision])
    found = find(decision, name)
    return found, parameters_of(found.name, found.Parameters, given, FIELDS[decision])


def _build(decision: str, choice: object, context: PolicyContext) -> Policy:
    found, own = _resolve(decision, choice)
    context = context.of(found.needs)
    return found(context) if found.Parameters is Parameters else found(context, own)


def needs(field: str, choice: object) -> Needs:
    """Return what a policy needs from the simulator.

    Args:
        field: field of the configuration, such as ``policy``.
        choice: its value.

    Returns:
        The needs that the policy's class declares.

    Raises:
        InputError: no such policy exists, or its parameters are invalid.
    """
    return find(DECISION_OF[field], parse(choice, field).name).needs


def find(decision: str, name: str) -> type[Policy]:
    """Return a policy's class, in any case of letters, or ``./mine.py:Class``; raises
    InputError."""
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        file = regular_file(path, FIELDS[decision])
        return _in_file(decision, name, file.resolve(), attribute, file.stat().st_mtime_ns)
    built_in = BUILT_IN[decision]
    for known in (name, name.lower()):
        if known in built_in:
            return _load(built_in[known], decision)
    external = _external(decision)
    for known in (name, name.lower()):
        if known in external:
            return external[known]
    allowed = ", ".join([*built_in, *sorted(external)])
    raise InputError(FIELDS[decision], f"unknown policy {name!r}", allowed)


@cache
def _load(place: str, decision: str) -> type[Policy]:
    """Return a class of ours for a decision; modules are imported when their policies are."""
    module, _, name = place.partition(":")
    found: type[Policy] = vars(import_module(f"eldr_sim.policies.{module}"))[name]
    if found.decision == decision:
        return found
    about = {"decision": decision, "__doc__": found.__doc__, "__module__": found.__module__}
    return type(name, (found,), about)


def _external(decision: str) -> dict[str, type[Policy]]:
    policies: dict[str, type[Policy]] = {}
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else "an unnamed package"
        origin = f"entry point {point.name!r} of {package}"
        try:
            policy = point.load()
        except Exception as error:  # whatever a foreign module may raise on import
            raise InputError(GROUP, f"{origin} does not load: {error!r}") from error
        if isinstance(policy, type):
            policy = _based(policy, _said(policy).get("decision"))
        problem = _flaw(policy)
        if problem:
            raise InputError(GROUP, f"{origin} {problem}")
        if policy.name in BUILT_IN[policy.decision]:
            raise InputError(GROUP, f"{origin} takes the built-in name {policy.name!r}")
        if policy.decision != decision:
            continue
        if policy.name in policies:
            raise InputError(GROUP, f"{origin} offers {policy.name!r}, which another package has")
        policies[policy.name] = guarded(policy, f"package {package}", FIELDS[decision])
    return policies


@lru_cache(maxsize=64)
def _in_file(decision: str, name: str, path: Path, attribute: str, _changed: int) -> type[Policy]:
    """Return a class of a file; its name is how users spell it, and its decision the one asked."""
    field, spec = FIELDS[decision], spec_from_file_location(f"eldr_sim_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a foreign module may raise
        raise InputError(field, f"{path.name} does not load: {error!r}") from error
    policy: Any = vars(module).get(attribute)
    if not isinstance(policy, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise InputError(field, f"{path.name} has no class {attribute!r}", ", ".join(classes))
    if (decides := _said(policy).get("decision", decision)) != decision:
        raise InputError(field, f"{name} decides {decides!r}", decision)
    own = _based(policy, decision, {"name": name, "decision": decision, "__doc__": policy.__doc__})
    if problem := _flaw(own):
        raise InputError(field, f"{name} {problem}")
    return guarded(own, path.name, field)


def _based(policy: type, decision: object, about: dict[str, Any] | None = None) -> type:
    """Return a class as a subclass of what policies of its decision are, if it is none of ours."""
    kind = _KINDS[decision][0] if isinstance(decision, str) and decision in _KINDS else Policy
    above = (policy,) if issubclass(policy, Policy) else (policy, kind)
    return type(policy.__name__, above, (about or {}) | {"__module__": policy.__module__})


def _said(policy: type) -> dict[str, Any]:
    """Return all that a class and those above it define."""
    return {name: value for c in reversed(policy.__mro__) for name, value in vars(c).items()}


def _flaw(policy: object) -> str:
    """Say what keeps ``policy`` from being a policy class; empty if nothing does."""
    if not isinstance(policy, type):
        return f"is not a class but {policy!r}"
    said = _said(policy)
    name, decision, own = (said.get(key) for key in ("name", "decision", "needs"))
    if not isinstance(name, str) or not name:
        return f"has no name (name={name!r})"
    if not isinstance(decision, str) or decision not in _KINDS:
        return f"has decision={decision!r}, not one of {', '.join(DECISIONS)}"
    kind, method = _KINDS[decision]
    if not issubclass(policy, kind):  # but of another decision's
        return f"makes decision {decision!r} and is not a {kind.__name__}"
    if not any(_has(policy, kind, each) for each in (method.partition("(")[0], "rules")):
        return f"has no method {method}"
    if not isinstance(own, Needs):
        return f"has needs={own!r}, not Needs(...)"
    return _odd_need(policy, kind, own)


def _odd_need(policy: type[Policy], kind: type[Policy], own: Needs) -> str:
    """Say which need there is not, or does not go with the methods; empty if none."""
    if unknown := own.columns - Needs().columns:
        return f"needs columns {', '.join(sorted(unknown))}, not of {', '.join(Needs().columns)}"
    if own.signature not in (None, *get_args(PromptScore)):
        return f"needs signature={own.signature!r}, not of {', '.join(get_args(PromptScore))}"
    for method, need in _BESIDES.items():
        has, needed = _has(policy, kind, method), bool(own._asdict()[need])
        if has != needed and (has or method in vars(kind)):
            return f"{'has' if has else 'has no'} method {method}, and needs.{need} is {needed}"
    return ""


def _has(policy: type[Policy], kind: type[Policy], method: str) -> bool:
    """Whether a policy defines a method that its kind leaves open."""
    above: Iterable[type] = policy.__mro__[: policy.__mro__.index(kind)]
    return any(method in vars(each) for each in above)
