"""What goes wrong in a policy of another package: one line that names package, call and request."""

import functools
import operator
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.policies.base import Policy, RequestInfo
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.queue.orders import Waiting
from eldr_sim.policies.scaling.base import Fleet, Switch, Target

_OURS = "eldr_sim"


def guarded(policy: type[Policy], origin: str, field: str) -> type[Policy]:
    """Return a subclass that raises InputError for its errors and for invalid answers, naming
    ``origin``, its package or file, and ``field`` of the configuration. What it inherits from ours
    stays (`base.gives_rules`)."""
    whose = f"{policy.name!r} of {origin}"
    asked = next(
        (set(vars(c)) for c in policy.__mro__ if {"select", "rules"} & set(vars(c))), set()
    )
    methods: dict[str, Any] = {"__module__": policy.__module__, "__doc__": policy.__doc__}
    for name, answer in _ANSWERS.items():
        owner = next((c for c in policy.__mro__ if name in vars(c)), object)
        foreign = owner is not object and owner.__module__.partition(".")[0] != _OURS
        if foreign and (name not in ("select", "rules") or name in asked):
            methods[name] = _guard(vars(owner)[name], name, answer, whose, field)
    return type(policy.__name__, (policy,), methods)


def _guard(
    call: Callable[..., Any],
    name: str,
    answer: Callable[[Any, Any], str] | None,
    whose: str,
    field: str,
) -> Callable[..., Any]:
    @functools.wraps(call)
    def guard(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            found = call(self, *arguments, **named)
        except InputError:
            raise
        except Exception as error:
            problem = f"raises {type(error).__name__}: {' '.join(str(error).split())}"
            problem += f" ({_place_of(error, call)})"
            raise InputError(field, f"{whose}: {_spell(name, arguments)} {problem}") from error
        if answer is not None and (wanted := answer(arguments, found)):
            problem = f"returns {' '.join(repr(found).split())[:60]}"
            raise InputError(field, f"{whose}: {_spell(name, arguments)} {problem}", wanted)
        return found

    return guard


def _place_of(error: Exception, call: Callable[..., Any]) -> str:
    """Say where an error comes from: the deepest line of the policy's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(call, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}"


def _spell(name: str, arguments: tuple[Any, ...]) -> str:
    """Say what was asked, and of which request or engines."""
    match arguments:
        case (RequestInfo() as request, *_):
            return f"{name} of request {request.request_id}"
        case (ExpertGroup() as group, *_):
            return f"{name} for engines {group.engines[0]} to {group.engines[-1]}"
        case (_, _, Placement(), int() as layer, *_) | (_, Placement(), int() as layer, *_):
            return f"{name} in layer {layer}"
        case (Fleet() as fleet, *_):
            return f"{name} at {fleet.now_s:g} s"
        case _:
            return "its constructor" if name == "__init__" else name


def _worker(arguments: Any, found: Any) -> str:
    n = len(arguments[1].loads)
    try:
        fits = found is None or 0 <= operator.index(found) < n
    except TypeError:
        fits = False
    return "" if fits else f"the index of a worker, 0 to {n - 1}, or None to hold the request"


def _keys(arguments: Any, found: Any) -> str:
    waiting: Waiting = arguments[0]
    try:
        keys = np.asarray(found, np.float64)
        fits = keys.shape == waiting.prompt_len.shape and not np.isnan(keys).any()
    except (TypeError, ValueError):
        fits = False
    return "" if fits else f"{len(waiting.prompt_len)} numbers, one a request"


def _placement(arguments: Any, found: Any) -> str:
    group: ExpertGroup = arguments[0]
    fits = isinstance(found, Placement) and found.n_ranks == group.n_ranks
    if fits:
        shape = np.shape(found.expert)
        fits = shape == np.shape(found.rank) and len(shape) == 2 and shape[0] == group.n_layers
    try:
        fits = fits and bool(found.has_expert(group.n_experts).any(axis=1).all())
    except (IndexError, TypeError, ValueError):
        fits = False
    wanted = f"{group.n_experts} experts in {group.n_layers} layers on {group.n_ranks} ranks"
    return "" if fits else f"a Placement of {wanted}"


def _slots(arguments: Any, found: Any) -> str:
    _, experts, placement, layer, *_ = arguments
    try:
        fits = np.array_equal(placement.expert[layer][np.asarray(found)], experts)
    except (IndexError, TypeError):
        fits = False
    return "" if fits else f"slots of the tokens' experts, shape {experts.shape}"


def _targets(arguments: Any, found: Any) -> str:
    fleet: Fleet = arguments[0]
    names = {pool.name for pool in fleet.pools}
    try:
        fits = all(
            isinstance(each, Target | Switch)
            and operator.index(each.workers) >= 0
            and names >= ({each.pool} if isinstance(each, Target) else {each.source, each.target})
            for each in found
        )
    except TypeError:
        fits = False
    return "" if fits else f"Target and Switch of {', '.join(sorted(names))}, workers from 0 on"


def _moved(arguments: Any, found: Any) -> str:
    return "" if found is None else _placement(arguments, found)


#: What foreign code is asked, and what says that its answer is none.
_ANSWERS: dict[str, Callable[[Any, Any], str] | None] = {
    "__init__": None, "select": _worker, "rules": None, "on_complete": None, "on_blocks": None,
    "on_tokens": None, "keys": _keys, "place": _placement, "update": _moved, "choose": _slots,
    "instances": None, "begin": None, "decide": _targets,
}  # fmt: skip
