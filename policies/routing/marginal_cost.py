"""Decode routing by the predicted step time: what would this request cost on each worker?

For every worker the time ``t`` of a decode step now and with the request (``t'``) is predicted from
the expected expert unions (`unions`) and the batch, through the latency tables. The cost of a
worker with ``b`` requests is ``b t^2``, so the request goes where ``(b + 1) t'^2 - b t^2`` is
smallest: the classic online balancing in an L_p norm (Awerbuch et al., FOCS 1995). The growth
``t' - t`` alone is smallest on the *fullest* worker, where the union has all experts; ``b t`` has a
trace of that near saturation (``studies/marginal_cost``). On several GPUs: `marginal_ranks`.

Of what an answer will choose beyond its prompt, requests with like prompts have something in
common, which ELDR's centroids know: the growth gets dearer by ``affinity (s* - s)`` of its size,
with ``s`` the cosine similarity to the worker's centroid and ``s*`` the highest."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eldr_sim.arrays import Array, Bools, Floats, Ints, with_more
from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.policies.base import LOADS, Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.choice import SignatureParameters
from eldr_sim.policies.compiled import HOLD, UNPREPARED, CompiledDecisions
from eldr_sim.policies.routing.activation import cached_activation, independent_tokens, of_tokens
from eldr_sim.policies.routing.marginal_ranks import GreedyOnRanks
from eldr_sim.policies.routing.unions import (
    ExpertUnions,
    Query,
    compared,
    enter,
    growth,
    log_idle,
    on_grid,
    shift,
)

if TYPE_CHECKING:
    from eldr_sim.policies.eldr.router import EldrPolicy

_Usage = tuple[NDArray[np.float32], NDArray[np.float32]]
"""A request's activation on the grid of ``unions``, and its ``log_idle``, both [L, E]."""


_NO_CHUNKS = np.zeros(0, np.int64)
#: Signatures whose activation is remembered; a request log has a new one for every request.
_REMEMBERED = 1024
#: Signatures that are predicted at once: as much as the weights of a layer.
_AT_ONCE = 64


class _State(NamedTuple):
    """What is on each of K workers, for the compiled decision."""

    #: Of `ExpertUnions`.
    log_idle: Floats
    idle: NDArray[np.float32]
    activated: Floats
    prompt_tokens: Ints  #: ``[K]``
    cost: Floats  #: ``[K]``: what its requests cost now, s^2,
    cost_load: Ints  #: ``[K]``: at this load; -1: not known
    growth: Floats  #: ``[K]``: what the request at hand would add, s^2
    then: Floats  #: ``[L]``: working memory
    each: int  #: tokens of a request in a step


class Greedy:
    """Sends a request where the cost grows least; what it knows of requests is up to others.

    ``step_times``: of a worker; ``n_layers``: of activations; ``each``: tokens of a request in a
    step. ``dearer``, [K], which others may write: by how much more, as a part, a growth on each
    worker counts."""

    def __init__(self, step_times: StepCost, n_workers: int, n_layers: int, each: int = 1) -> None:
        self.step_times = step_times
        self._unions = ExpertUnions(n_workers, n_layers, step_times.n_experts)
        self.books = _State(
            self._unions.log_idle,
            self._unions.idle,
            self._unions.activated,
            np.zeros(n_workers, np.int64),
            np.zeros(n_workers),
            np.full(n_workers, -1),
            np.zeros(n_workers),
            np.zeros(n_layers),
            each,
        )
        self._resident: dict[tuple[int, int], tuple[int, NDArray[np.float32]]] = {}
        self._next, self._nothing = 0, np.zeros(n_workers)
        self.dearer = np.zeros(n_workers)

    def place(
        self,
        request: RequestInfo,
        usage: _Usage,
        workers: Workers,
        seconds: tuple[float, Floats] | None = None,
    ) -> int | None:
        """Return the healthy worker with the least growth of cost, or None, and enter it in
        the books. ``seconds``: ``tokens`` and ``beside`` of :func:`place`; else the cost is of
        second power."""
        tokens, beside = seconds or (0.0, self._nothing)
        own = workers.loads, workers.healthy, self._next, self.dearer
        asked = Query(*own, request.prompt_len, *usage)
        worker: int = place(self.step_times, self.books, asked, tokens, beside)
        if worker < 0:
            return None
        self._next = (worker + 1) % len(workers.loads)
        self._resident[request.request_id, worker] = (request.prompt_len, usage[1])
        return worker

    def remove(self, request_id: int, worker: int) -> None:
        """Forget a request that was placed on ``worker``; KeyError if there is none."""
        prompt_len, log = self._resident.pop((request_id, worker))
        self._unions.remove(worker, log)
        self.books.prompt_tokens[worker] -= prompt_len
        self.books.cost_load[worker] = -1


class MarginalCostParameters(SignatureParameters):
    """Parameters of `MarginalCostPolicy`."""

    affinity: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How much dearer a worker is, as a part of the cost, by each unit of cosine similarity that
    its centroid of ELDR lacks to the most similar one; 0: no centroids."""
    experts: bool = True
    """Whether each request counts with its own experts, not those of the mean one: without them
    the batch alone decides, through the steps of the kernels."""


class MarginalCostPolicy(RouterPolicy):
    """The worker on which the request makes the predicted cost of all requests grow least.

    It knows what ELDR's router knows: prefill counts (through `activation.ActivationModel`), prompt
    lengths, and completions as reported. A context counts as long as its prompt; where no signature
    is known, every request as the mean of the calibration requests, and waiting prompts in a
    group's step. Where steps verify drafts, a request activates what that number of consecutive
    tokens do (`independent_tokens`); drafting is left out, as are drafts' tokens where engines
    share experts.

    A decision and a completion take 20 us for 16 workers and 0.12 ms for 256 with 10 layers of 128
    experts, 65 us and 0.47 ms with 48, a signature not seen before 0.27 ms more
    (``tests/benchmarks/test_marginal_cost_benchmark.py``)."""

    name = "marginal_cost"
    decision = "decode"
    needs = Needs(experts=True, costs=True, ends=True, columns=LOADS)
    Parameters: ClassVar[type[SignatureParameters]] = MarginalCostParameters

    def __init__(
        self, context: PolicyContext, parameters: SignatureParameters | None = None
    ) -> None:
        # Nothing has computed a prompt yet that comes to co-located engines.
        if not context.computes_prompts:
            self.needs = self.needs._replace(signature="count")
        self._check(context)
        step_times = context.require_step_times(self)
        calibration = context.require_calibration(self)
        self._model = cached_activation(calibration)
        self._tokens = independent_tokens(calibration, context.tokens_per_step)
        n_layers, n_experts = self._model.mean_share.shape
        if n_experts != step_times.n_experts:
            problem = f"{n_experts} experts, but the model has {step_times.n_experts}"
            raise InputError("calibration", problem)
        self._greedy = _greedy(context, step_times, n_layers)
        self._usages: dict[int, _Usage] = {}
        own = parameters if isinstance(parameters, MarginalCostParameters) else None
        self._affinity = own.affinity if own else 0.0
        self._alike = own is not None and not own.experts
        if self._affinity and context.computes_prompts:
            problem = "affinity reads expert signatures, which co-located workers do not have"
            raise InputError("policy", problem, "a topology such as 8P16D")
        self._eldr: EldrPolicy | None = None
        if self._affinity:
            from eldr_sim.policies.eldr import router  # which other runs do without

            self._eldr = router.EldrPolicy(context)

    def _check(self, context: PolicyContext) -> None:
        """Raise InputError where no worker has what the policy reads."""
        if context.computes_prompts and context.rank_moe is None:
            problem = (
                f"{self.name!r} reads expert signatures, or steps of engines that share experts"
            )
            allowed = "--data-parallel-size 2 or more, or a topology such as 8P16D"
            raise InputError("policy", f"{problem}; co-located workers have neither", allowed)

    def usage(self, request: RequestInfo) -> _Usage:
        """Return the request's predicted activation, or the calibration mean; remembered."""
        if self._alike or request.signature is None:
            return _usage(of_tokens(self._model.mean_activation, self._tokens))
        signature_id = request.signature_id
        if signature_id is not None and signature_id in self._usages:
            return self._usages[signature_id]
        usage = _usage(of_tokens(self._model.predict(request.signature), self._tokens))
        if signature_id is not None:
            if len(self._usages) == _REMEMBERED:
                del self._usages[next(iter(self._usages))]  # the oldest
            self._usages[signature_id] = usage
        return usage

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the worker with the least growth of cost, and count the request there."""
        if self._eldr is not None:
            similar = self._eldr.near(request, workers.now_s)
            away = np.zeros(1) if similar is None else similar.max() - similar
            each = len(self._greedy.dearer) // len(away)
            self._greedy.dearer[:] = np.repeat(self._affinity * away, each)
        return self._greedy.place(request, self.usage(request), workers)

    def on_complete(self, request_id: int, worker: int) -> None:
        """Forget a completed request."""
        self._greedy.remove(request_id, worker)

    def compiled(self, workers: Workers, n_kinds: int) -> CompiledDecisions | None:
        """Return compiled code that does what `select` and `on_complete` do, where experts lie on
        one GPU and centroids say nothing."""
        if self._eldr is not None or not isinstance(self._greedy, Greedy):
            return None
        return _Compiled(self._greedy, self._predicted, workers, n_kinds)

    def _predicted(self, counts: Array) -> Floats:
        """Return the predicted activation of several requests' ``counts``, [n, L, E]."""
        if self._alike:
            mean = of_tokens(self._model.mean_activation, self._tokens)
            return np.repeat(mean[None], len(counts), axis=0)
        return of_tokens(self._model.predict_all(counts), self._tokens)


class OraclePolicy(RouterPolicy):
    """ORACLE, a reference and no router: ``marginal_cost`` given the future experts.

    Each request's true activation, the mean over its decode steps (``PolicyContext.future``), in
    every MoE layer. Greedy, it knows neither future arrivals nor which experts meet in one step: no
    proven bound."""

    name = "oracle"
    decision = "decode"
    needs = Needs(future=True, costs=True, ends=True, columns=LOADS)

    def __init__(self, context: PolicyContext) -> None:
        step_times = context.require_step_times(self)
        self._future = context.require_future(self)
        self._greedy = _greedy(context, step_times, step_times.n_moe_layers)

    def select(self, request: RequestInfo, workers: Workers) -> int | None:
        """Return the worker with the least growth of cost, and count the request there."""
        usage = _usage(self._future(request.request_id))
        return self._greedy.place(request, usage, workers)

    def on_complete(self, request_id: int, worker: int) -> None:
        """Forget a completed request."""
        self._greedy.remove(request_id, worker)


def _greedy(context: PolicyContext, step_times: StepCost, n_layers: int) -> Greedy | GreedyOnRanks:
    """Return the rule for workers as the context has them."""
    if context.placements is None:
        return Greedy(step_times, context.n_workers, n_layers, context.tokens_per_step)
    placements = context.placements()
    prompts = context.computes_prompts and context.rank_moe is not None
    return GreedyOnRanks(
        step_times, context.rank_moe, placements, context.n_workers, n_layers, prompts
    )


def _usage(activation: Floats) -> _Usage:
    rounded = on_grid(activation)
    return rounded.astype(np.float32), log_idle(rounded)


class _Decisions(NamedTuple):
    """What the compiled decisions work on, S signatures among them."""

    step_times: StepCost
    own: _State
    loads: Ints
    healthy: Bools
    first: Ints  #: ``[1]``: the worker that is preferred among equals
    even: Floats  #: ``[K]``: zeros: no growth is dearer
    slot_of: Ints  #: ``[kinds]``: where their signatures are; -1: nowhere
    activation: NDArray[np.float32]  #: ``[S, L, E]``: on the grid of `unions`,
    log: NDArray[np.float32]  #: and its `log_idle`
    resident: Ints  #: ``[S]``: requests of the signature that are on workers


class _Compiled:
    """The policy as `CompiledDecisions`."""

    def __init__(
        self, greedy: Greedy, predicted: Callable[[Array], Floats], workers: Workers, n_kinds: int
    ) -> None:
        self._predicted, books = predicted, greedy.books
        self._free: list[int] = []
        self._kind_of = np.zeros(0, np.int64)
        self.books = _Decisions(
            greedy.step_times,
            books,
            workers.loads,
            workers.healthy,
            first=np.zeros(1, np.int64),
            even=np.zeros(len(workers.loads)),
            slot_of=np.full(n_kinds, -1),
            activation=np.zeros((0, *books.log_idle.shape[1:]), np.float32),
            log=np.zeros((0, *books.log_idle.shape[1:]), np.float32),
            resident=np.zeros(0, np.int64),
        )
        self.choose, self.forget = _choose, _forget

    def prepare(self, kinds: Sequence[int], requests: Sequence[RequestInfo], _now_s: float) -> None:
        """Predict what the requests will activate, where that is not known."""
        new = [i for i, kind in enumerate(kinds) if self.books.slot_of[kind] < 0]
        if len(self._free) < len(new):
            self._make_room(len(new))
        books = self.books
        for begin in range(0, len(new), _AT_ONCE):
            some = new[begin : begin + _AT_ONCE]
            counts = np.stack([cast("Array", requests[i].signature) for i in some])
            for i, activation in zip(some, self._predicted(counts), strict=True):
                slot = self._free.pop()
                enter(activation, books.activation[slot], books.log[slot])
                books.slot_of[kinds[i]], self._kind_of[slot] = slot, kinds[i]

    def _make_room(self, n: int) -> None:
        """Forget the signatures of nobody if there are many others, and have room for ``n``."""
        books, size = self.books, len(self._kind_of)
        if size >= _REMEMBERED:
            taken = np.setdiff1d(np.arange(size), self._free)
            idle = taken[books.resident[taken] == 0]
            books.slot_of[self._kind_of[idle]] = -1
            self._free += idle.tolist()
        more = max(n - len(self._free), 0)
        if more == 0:
            return
        more = max(more, size)
        self._free += range(size, size + more)
        self._kind_of = np.append(self._kind_of, np.zeros(more, np.int64))
        self.books = books._replace(
            activation=with_more(books.activation, more),
            log=with_more(books.log, more),
            resident=with_more(books.resident, more),
        )


@njit()
def _choose(books: _Decisions, kind: int, tokens: int, _now_s: float) -> int:
    """Return the worker that `MarginalCostPolicy.select` does."""
    slot, first = books.slot_of[kind], books.first[0]
    if slot < 0:
        return UNPREPARED
    seen = books.loads, books.healthy, first, books.even, tokens
    asked = Query(*seen, books.activation[slot], books.log[slot])
    worker = place(books.step_times, books.own, asked, 0.0, books.even)
    if worker < 0:
        return HOLD
    books.first[0] = (worker + 1) % books.loads.shape[0]
    books.resident[slot] += 1
    return int(worker)


@njit()
def _forget(books: _Decisions, kind: int, tokens: int, worker: int) -> int:
    """Do what `MarginalCostPolicy.on_complete` does."""
    own, slot = books.own, books.slot_of[kind]
    shift(own.log_idle, own.idle, own.activated, worker, books.log[slot], -1.0)
    own.prompt_tokens[worker] -= tokens
    own.cost_load[worker] = -1
    books.resident[slot] -= 1
    return 0


@njit()
def expected_step_s(
    step_times: StepCost, load: int, context: int, activated: Any, each: int = 1
) -> float:
    """Return the expected time of a worker's decode step, s; on several GPUs each holds an equal
    share of the union. Requests beyond the places of a batch take turns (``load / places``).

    ``context``: tokens, summed; ``activated``: [L]: expected experts of evenly spread layers;
    ``each``: tokens of a request."""
    if load <= 0:
        return 0.0
    places = (step_times.head_s.shape[0] - 1) // each
    batch = min(load, places)
    share = (step_times.moe_s.shape[1] - 1) / step_times.n_experts
    parts = step_parts(
        step_times,
        batch,
        batch * each,
        context / load * batch,
        _NO_CHUNKS,
        _NO_CHUNKS,
        batch * each,
        activated if share == 1.0 else activated * share,
        False,
    )
    return float(total_s(parts) * max(1.0, load / places))


@njit()
def place(step_times: StepCost, books: Any, asked: Query, tokens: float, beside: Any) -> int:
    """Return the worker with the least growth of cost, and enter the request in the books; -1 where
    none is healthy. ``tokens``, ``beside``: 0: the cost is ``b t^2``; else it is ``tokens * b t``,
    s, and what each worker's requests cost beside, s, shape [K]."""
    n_workers, idle, activated = asked.loads.shape[0], books.idle, books.activated
    best, least = -1, 0.0
    for i in range(n_workers):
        w = (asked.first + i) % n_workers
        if not asked.healthy[w]:
            continue
        load, context = asked.loads[w], books.prompt_tokens[w]
        if books.cost_load[w] != load:
            now = expected_step_s(step_times, load, context, activated[w], books.each)
            books.cost[w] = load * now if tokens > 0.0 else load * now**2
            books.cost_load[w] = load
        growth(idle, w, asked.activation, books.then)
        for layer in range(books.then.shape[0]):
            books.then[layer] += activated[w, layer]
        then = expected_step_s(
            step_times, load + 1, context + asked.prompt_len, books.then, books.each
        )
        if tokens > 0.0:
            books.growth[w] = tokens * ((load + 1) * then - books.cost[w]) + beside[w]
        else:
            books.growth[w] = (load + 1) * then**2 - books.cost[w]
        rounded = compared(books.growth[w], asked.dearer[w])
        if best < 0 or rounded < least:
            best, least = w, rounded
    if best < 0:
        return best
    shift(books.log_idle, idle, activated, best, asked.log, 1.0)
    books.prompt_tokens[best] += asked.prompt_len
    books.cost_load[best] = -1
    return best
