"""What a routing policy is, what it may see, and what it is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.policies import choice
from eldr_sim.policies.rule import Rule, RuleBy, StickyRule
from eldr_sim.policies.seen import COLUMNS, LOADS, NOTHING, RequestInfo, Workers

if TYPE_CHECKING:
    from eldr_sim.kernel_profiles.kernels.all_to_all import AllToAll
    from eldr_sim.kernel_profiles.kernels.flops import PrefillWork
    from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE, StepCost
    from eldr_sim.policies.compiled import CompiledDecisions
    from eldr_sim.policies.eldr.artifact import RoutingArtifact
    from eldr_sim.policies.eldr.signature import FitOptions
    from eldr_sim.policies.placement.expert_placement import Placement
    from eldr_sim.policies.scaling.facts import ScalingContext
    from eldr_sim.traces.routing.calibration import CalibrationSet
    from eldr_sim.traces.routing.gate_scores import PromptScore

__all__ = [
    "LOADS", "NOTHING", "Needs", "Policy", "PolicyContext", "RequestInfo", "RouterPolicy",
    "Workers", "decisions_of", "gives_rules", "overridden_methods",
]  # fmt: skip

T = TypeVar("T")
#: Methods that a subclass may override and that compiled code does not have.
_ASKED = frozenset({"select", "on_complete", "near", "usage"})
_COSTS = ("step_times", "rank_moe", "prefill_work", "all_to_all", "placements")


class Needs(NamedTuple):
    """What a policy needs besides the request: declared on its class, checked by the registry.

    It gets nothing else of the run. Where parameters decide, its constructor replaces it."""

    experts: bool = False
    """Calibration requests or a fit to them: what the experts of the model do."""
    signature: PromptScore | None = None
    """Decode: the expert signature of each request, of counts or of the gate's scores. Prefill
    workers record it, and the run pays for that (ELDR Table 1)."""
    future: bool = False
    """The experts to come, which no real router has."""
    costs: bool = False
    """Times of steps, MoE layers and transfers, the work of prompts, and where experts lie."""
    columns: frozenset[str] = COLUMNS
    """Columns of `Workers` that decide, other than ``healthy``."""
    ends: bool = False
    """Decode: calls when requests complete, ``on_complete``."""
    blocks: bool = False
    """Prefill: calls for cached blocks and computed tokens, ``on_blocks`` and ``on_tokens``."""
    matched: bool = False
    """To know of each request how much of its prompt each worker's prefix cache holds."""
    session_signature: bool = False
    """Co-located workers: the signature of a session's turn before, for its next one."""
    in_order: bool = False
    """Prefill: requests in the order of arrival; it is not asked for those behind one it holds."""
    longest_first: bool = False
    """With ``in_order``: those held in the order of their prompts' lengths, the longest first."""
    counts: bool = False
    """Placement: the tokens that have chosen each expert of late, ``update``, to move experts."""
    gathers: bool = False
    """Replica choice: the tokens of all ranks, so that the backend gathers them before the gate."""
    rank_loads: bool = False
    """Replica choice: the load that the placement predicts for each rank."""

    @property
    def routing(self) -> bool:
        """Whether the model must have experts, and a routing trace."""
        return self.experts or self.future or self.signature is not None

    @property
    def signals(self) -> bool:
        """Whether what engines publish decides."""
        return bool(self.columns - {"loads"})


class Policy:
    """What makes a decision: the base of all policies, those of other packages too."""

    name: ClassVar[str]  #: what users type
    decision: ClassVar[str]  #: which decision it makes, one of ``choice.FIELDS``,
    also: ClassVar[str] = ""  #: and another that it can make as well
    needs: Needs = Needs()  #: what it needs
    #: What it may be told: the constructor's second argument, where it is a class of its own.
    Parameters: ClassVar[type[choice.Parameters]] = choice.Parameters

    def __init__(self, context: PolicyContext, parameters: choice.Parameters | None = None) -> None:
        pass


class RouterPolicy(Policy):
    """Chooses the worker of a request: the prefill worker at its arrival, or the decode worker.

    That one is chosen when the prefill has ended."""

    artifact: RoutingArtifact | None = None
    """The fit that the policy uses; a placement of the same run may rest on it."""
    rule_by: RuleBy | None = None
    """What decides on the rule of a request, if ``rules`` gives one; None: ``select`` is called for
    each request."""
    prefix_blocks: int = 0
    """Blocks of a prompt's start that make its key, where ``rule_by`` is ``prefix``."""

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the index of the worker; None to hold the request: ``select`` is called again, in
        the order of arrival among those held, when the router receives a completion or new
        signals."""
        return self.rules([request])[0].pick(workers)

    def rules(self, requests: Sequence[RequestInfo]) -> Sequence[Rule | StickyRule]:
        """Return the rule of each request; the same object for equal requests.

        Unless ``rule_by`` is None, the simulator calls it once for all requests that the policy
        treats alike and applies the rules itself, compiled."""
        raise NotImplementedError

    def compiled(self, workers: Workers, n_kinds: int) -> CompiledDecisions | None:
        """Return compiled code that decides as ``select`` does, of a policy that reads signatures,
        on these workers (their columns change with time) and on ``n_kinds`` kinds of requests, each
        of one signature; None: ``select`` is called."""
        return None

    def on_complete(self, request_id: int, worker: int) -> None:
        """Take note, as SGLang's ``on_request_complete``, that a request has left the worker that
        ``select`` chose for it, when the router learns of it: once for every request placed, unless
        the run ends before."""
        raise NotImplementedError

    def on_blocks(self, worker: int, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """Take note of the prompt blocks that a worker's prefix cache has got and lost, as vLLM's
        KV cache events.

        Hashes as in ``RequestInfo.prefix_hash``, full blocks only; one in both has come and gone.
        This and ``on_tokens`` are called before the policy decides next, in the order in which they
        happened; where engines publish signals now and then, after each publication."""
        raise NotImplementedError

    def on_tokens(self, worker: int, tokens: int) -> None:
        """Take note that a worker has computed this many prompt tokens."""
        raise NotImplementedError


def gives_rules(policy: RouterPolicy | None) -> bool:
    """Whether a policy gives rules, and no subclass has given it another ``select``."""
    if policy is None or policy.rule_by is None:
        return False
    return "rules" in overridden_methods(policy, {"select", "rules"})


def overridden_methods(policy: RouterPolicy, methods: Set[str]) -> Set[str]:
    """Return which of some methods are the policy's own, or of the first class that has any."""
    owners = (policy, *type(policy).__mro__)
    return next((own for owner in owners if (own := methods & vars(owner).keys())), set())


def decisions_of(policy: RouterPolicy, workers: Workers, n: int) -> CompiledDecisions | None:
    """Return a policy's compiled decisions on ``n`` kinds of requests; None where ``select`` has to
    be called: it has none, or a subclass decides in another way."""
    if "compiled" not in overridden_methods(policy, _ASKED | {"compiled"}):
        return None
    return policy.compiled(workers, n)


@dataclass(frozen=True)
class PolicyContext:
    """All that a policy may be built from; a policy takes what it needs.

    Raises InputError if ``n_workers``, ``group_size`` or ``prefix_block_tokens`` is out of
    range."""

    n_workers: int  #: workers to choose from, at least 1
    rng: np.random.Generator  #: random stream of the policy; a deterministic policy leaves it alone
    #: The calibration requests, or a function, called only by policies that need them.
    calibration: CalibrationSet | Callable[[], CalibrationSet] | None = None
    #: ELDR's offline fit, or a function of options and clusters, called where it is needed.
    artifact: RoutingArtifact | Callable[[FitOptions, int], RoutingArtifact] | None = None
    token_budget: int = 8192  #: tokens that a step of a worker computes at most
    kv_token_s: float = 0.0  #: seconds that a token's KV cache takes to a worker, alone on its link
    #: Tokens covered by one entry of ``RequestInfo.prefix_hash``; vLLM's KV block by default.
    prefix_block_tokens: int = 16
    #: Step times of the model on a decode worker, before CUDA graphs pad them.
    step_times: StepCost | None = None
    #: Times of a MoE layer on a GPU that shares experts with others.
    rank_moe: RankMoE | None = None
    #: Function: what prompts cost a prefill worker and the work it needs at once; where needed.
    prefill_work: Callable[[], PrefillWork] | None = None
    all_to_all: AllToAll | None = None  #: times of dispatch and combine between such GPUs
    #: Function: where the experts of decode groups lie; None where every GPU holds all.
    placements: Callable[[], Sequence[Placement]] | None = None
    #: Function of ``request_id``, for oracles only: the share of decode steps to come that select
    #: each expert, float64 [MoE layers, E].
    future: Callable[[int], NDArray[np.float64]] | None = None
    #: Neighbouring workers that share experts, and so one union: a divisor of ``n_workers``.
    group_size: int = 1
    #: Whether the workers compute prompts beside their decode batches (co-located ones).
    computes_prompts: bool = False
    #: Tokens of a request in a decode step: one, and the drafts that it verifies.
    tokens_per_step: int = 1
    scaling: ScalingContext | None = None  #: what is known of the pools of an autoscaler

    def __post_init__(self) -> None:
        if self.n_workers < 1:
            raise InputError("n_workers", f"{self.n_workers} workers", "1 or more")
        if self.group_size < 1 or self.n_workers % self.group_size:
            problem = f"{self.n_workers} workers in groups of {self.group_size}"
            raise InputError("group_size", problem, "a divisor of the workers")
        if self.prefix_block_tokens < 1:
            raise InputError("prefix_block_tokens", f"{self.prefix_block_tokens}", "1 or more")

    @property
    def n_groups(self) -> int:
        """Groups of workers that share experts; as many as workers where none do."""
        return self.n_workers // self.group_size

    def members(self, groups: Iterable[int]) -> list[int]:
        """Return the workers of some groups, group by group."""
        size = self.group_size
        return [worker for group in groups for worker in range(group * size, (group + 1) * size)]

    def require_calibration(self, policy: Policy) -> CalibrationSet:
        """Return the calibration set; raises InputError if there is none."""
        found = self.calibration() if callable(self.calibration) else self.calibration
        return _given(found, policy, "calibration requests")

    def require_step_times(self, policy: Policy) -> StepCost:
        """Return the step times; raises InputError if there are none."""
        return _given(self.step_times, policy, "decode step times")

    def require_prefill_work(self, policy: Policy) -> PrefillWork:
        """Return what prompts cost; raises InputError if that is not known."""
        return _given(self.prefill_work, policy, "the work of prompts")()

    def require_future(self, policy: Policy) -> Callable[[int], NDArray[np.float64]]:
        """Return the future; raises InputError if there is none."""
        return _given(self.future, policy, "the future experts")

    def require_scaling(self, policy: Policy) -> ScalingContext:
        """Return what is known of the pools; raises InputError if nothing is."""
        return _given(self.scaling, policy, "the pools of a cluster")

    def of(self, needs: Needs) -> PolicyContext:
        """Return what a policy of such needs may be built from."""
        hidden: dict[str, None] = {}
        if not needs.experts:
            hidden |= dict.fromkeys(("calibration", "artifact"))
        if not needs.costs:
            hidden |= dict.fromkeys(_COSTS)
        if not needs.future:
            hidden["future"] = None
        return replace(self, **hidden)  # type: ignore[arg-type]


def _given(value: T | None, policy: Policy, what: str) -> T:
    """Return what a policy needs; raises InputError, naming its field, where it is not given."""
    if value is None:
        field, problem = choice.FIELDS[policy.decision], f"{policy.name!r} needs {what}"
        raise InputError(field, f"{problem}, and none were given")
    return value
