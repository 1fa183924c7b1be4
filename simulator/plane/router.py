"""The routers of a run: policies, and the rules that the compiled loop knows of them."""

import operator
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Array, Bools, Floats, Int32s, Ints, Records
from eldr_sim.policies.base import (
    Needs,
    RequestInfo,
    RouterPolicy,
    Workers,
    decisions_of,
    gives_rules,
)
from eldr_sim.policies.compiled import CompiledDecisions
from eldr_sim.policies.rule import COLUMNS, Rule, StickyRule
from eldr_sim.references import Reference
from eldr_sim.simulator.plane import choose, state
from eldr_sim.simulator.plane.compiled import decision_address
from eldr_sim.traces.workload import Workload

_NOBODY, _NOTHING = np.zeros(0, np.int64), np.zeros(0)
#: Classes of requests whose rules a policy is asked for in one call.
_ASKED_AT_ONCE = 512


class Fleet(NamedTuple):
    """What routers know of the workers of all pools."""

    loads: Ints  #: ``[workers]``: requests in flight
    signals: Records  #: ``SIGNALS [workers]``
    healthy: Bools  #: ``[workers]``: may be chosen


def make_fleet(n_workers: int) -> Fleet:
    """Return idle workers, all of which may be chosen."""
    return Fleet(
        np.zeros(n_workers, np.int64),
        np.zeros(n_workers, state.SIGNALS),
        np.ones(n_workers, np.bool_),
    )


class PolicyRouter:
    """A policy that routes requests (None: co-located), and what the compiled loop knows of it: of
    all workers (``fleet``), and those to choose from. ``signed``: every request comes with its
    prompt's signature."""

    def __init__(
        self, policy: RouterPolicy | None, fleet: Fleet, workers: range, workload: Workload,
        signed: bool = False,
    ) -> None:  # fmt: skip
        self.policy: Any = policy
        self.needs = Needs() if policy is None else policy.needs
        self.own = workers
        self.tells_rules = gives_rules(policy)
        kind, self._first = np.full(len(workload), -1, np.int32), _NOBODY
        signed = signed and bool(self.needs.signature) and not self.tells_rules
        if self.tells_rules or signed:
            kind, self._first = _classes(policy, workload, signed)
        self._kind = kind.copy()
        if policy is not None and policy.rule_by == "prefix" and workload.prefix_block_tokens:
            self._kind[:] = -1  # requests that come to be have prefixes of their own
        self._upcoming = np.sort(self._first)  # the first requests of classes, as they arrive
        self._position = 0
        self._known: dict[Any, int] = {}
        self._class_of: dict[tuple[int, int, float], int] = {}
        self._kept: list[Rule] = []  # an id is good for as long as its object lives
        mine = slice(workers.start, workers.stop)
        columns = [fleet.signals[name][mine] for name in state.SIGNALS.names or ()]
        record = np.zeros(1, state.ROUTER)
        record["first_worker"], record["n_workers"] = workers.start, len(workers)
        record["hears_ends"], record["in_order"] = self.needs.ends, self.needs.in_order
        record["longest_first"] = self.needs.longest_first
        self._columns = fleet.loads[mine], *columns, fleet.healthy[mine]
        self._healthy: Any = fleet.healthy[mine].data
        self.arrays = choose.Router(
            loads=fleet.loads,
            signals=fleet.signals,
            healthy=fleet.healthy,
            record=record,
            class_of=kind,
            rule_of=np.full(len(self._first), -1, np.int32),
            home_of=np.full(len(self._first), -1, np.int32),
            factor_of=np.zeros(len(self._first)),
            rules=np.zeros(4, state.RULE),
            members=np.zeros((4, len(workers)), np.int32),
            weights=np.zeros((4, len(COLUMNS))),
            sent=np.zeros((4, len(fleet.loads)), np.int64),
        )
        #: The policy's compiled decisions, if it has any for such requests.
        self.decisions: CompiledDecisions | None = None
        self._books: Reference | None = None
        if signed and policy is not None and len(self._first):
            self.decisions = decisions_of(policy, self.workers(0.0, 0.0), len(self._first))
        if self.decisions is not None:
            self._bind(self.decisions)

    def workers(
        self,
        now_s: float,
        signals_s: float,
        matched: Ints = _NOBODY,
        reachable: Ints = _NOBODY,
        load_s: Floats = _NOTHING,
    ) -> Workers:
        """Return the workers as the router sees them now; the columns change with time."""
        return Workers._make((*self._columns, now_s, signals_s, matched, reachable, load_s))

    def _bind(self, decisions: CompiledDecisions) -> None:
        """Let the loop work on a policy's books as they are."""
        books, record = decisions.books, self.arrays.record[0]
        if self._books is None or any(map(operator.is_not, books, self._books.whole)):
            self._books = Reference(books)
            record["books"] = self._books.address
        if record["choose"] == 0:
            record["choose"] = decision_address(decisions.choose, self._books, "float64")
            if decisions.forget is not None:
                record["forget"] = decision_address(decisions.forget, self._books, "int64")

    def prepare(self, members: list[int], infos: list[RequestInfo], now_s: float) -> None:
        """Let the policy get ready to decide on requests, or tell their rules."""
        if self.decisions is None:
            for member, rule in zip(members, self.policy.rules(infos), strict=True):
                self.learn(member, rule)
            return
        kinds = self.arrays.class_of[members].tolist()
        self.decisions.prepare(kinds, infos, now_s)
        self.arrays.rule_of[kinds] = 0  # known
        self._bind(self.decisions)

    def check(self, worker: int) -> None:
        """Raise ValueError if there is no such worker: compiled code would not notice."""
        if not 0 <= worker < len(self.own):
            raise ValueError(f"policy {self.policy.name!r} chose worker {worker}")

    def select(self, request: RequestInfo, workers: Workers) -> int:
        """Return the policy's choice, by its number among all workers, or HOLD; the least loaded
        that answers stands in for one that does not."""
        if not any(self._healthy):  # the first of them is most often
            return int(choose.HOLD)
        worker = self.policy.select(request, workers)
        if worker is None:
            return int(choose.HOLD)
        self.check(worker)
        if self._healthy[worker]:
            return int(self.own[worker])
        usable = workers.usable()
        least: int = usable[int(np.argmin(workers.loads[usable]))]
        return self.own[least]

    def grow(self, n: int) -> None:
        """Know ``n`` requests: those beyond the ones so far are like them, in turn."""
        known = self.arrays.class_of
        more = np.resize(self._kind, n)[len(known) :]
        self.arrays = self.arrays._replace(class_of=np.concatenate([known, more]))

    def unknown(self, request: int) -> list[int]:
        """Return a request, and one of each of the next classes without a known rule."""
        own = self.arrays.class_of[request]
        if own < 0 or self.arrays.rule_of[own] >= 0:
            return [request]
        begin, self._position = self._position, self._position + _ASKED_AT_ONCE
        ahead = self._upcoming[begin : self._position]
        unknown = self.arrays.rule_of[self.arrays.class_of[ahead]] < 0
        return [request, *ahead[unknown & (ahead != self._first[own])].tolist()]

    def learn(self, request: int, rule: Rule | StickyRule) -> None:
        """Note the rule of a request's class."""
        home, factor = -1, 0.0
        if isinstance(rule, StickyRule):
            self.check(rule.worker)
            home, factor, rule = self.own[rule.worker], rule.factor, rule.rule
        number, arrays = self._number(rule), self.arrays
        kind = int(arrays.class_of[request])
        if kind < 0:
            key = number, home, factor
            if key not in self._class_of:
                self._class_of[key] = len(arrays.rule_of)
                self.arrays = arrays = arrays._replace(
                    rule_of=np.append(arrays.rule_of, np.int32(number)),
                    home_of=np.append(arrays.home_of, np.int32(home)),
                    factor_of=np.append(arrays.factor_of, factor),
                )
            arrays.class_of[request] = self._class_of[key]
            return
        arrays.home_of[kind], arrays.factor_of[kind] = home, factor
        arrays.rule_of[kind] = number

    def _number(self, rule: Rule) -> int:
        """Return the number of a rule; those that remember nothing are equal by contents."""
        remembers = rule.in_turn or rule.signals
        key = id(rule) if remembers else (rule.workers, rule.weights)
        if key in self._known:
            return self._known[key]
        number, arrays = len(self._known), self.arrays
        if number == len(arrays.rules):
            self.arrays = arrays = arrays._replace(
                rules=grown(arrays.rules),
                members=grown(arrays.members),
                weights=grown(arrays.weights),
                sent=grown(arrays.sent),
            )
        for worker in rule.workers:
            self.check(worker)
        arrays.members[number, : len(rule.workers)] = np.add(rule.workers, self.own.start)
        size = len(rule.workers)
        arrays.rules[number] = size, rule.in_turn, rule.turn, rule.signals, -np.inf
        arrays.weights[number] = rule.weights
        self._known[key] = number
        self._kept.append(rule)
        return number


def _classes(policy: Any, workload: Workload, signed: bool) -> tuple[Int32s, Ints]:
    """Return each request's class, by signature if ``signed``, -1 if unknown beforehand, and the
    classes' first ones."""
    rule_by = "signature" if signed else policy.rule_by
    if rule_by == "domain":
        alike = workload.domain.astype(np.int64)
    elif rule_by == "signature":
        if workload.prefix_block_tokens:  # what the prefix cache holds decides, too
            return np.full(len(workload), -1, np.int32), _NOBODY
        alike = workload.text.astype(np.int64) << 32 | workload.prompt_len
    elif rule_by == "prefix" and workload.prefix_block_tokens:
        begin, n = workload.prefix_indptr[:-1], workload.n_prompt_blocks
        keyed = np.flatnonzero(n)
        keys = workload.prefix_hash[(begin + np.minimum(n, policy.prefix_blocks) - 1)[keyed]]
        alike = np.zeros(len(workload), np.int64)
        alike[keyed] = np.unique(keys, return_inverse=True)[1] + 1
    else:
        alike = np.zeros(len(workload), np.int64)
    _, first, kind = np.unique(alike, return_index=True, return_inverse=True)
    return kind.astype(np.int32), first


def grown(array: Array, length: int | None = None) -> Array:
    """Return an array of a greater length, twice when None, zeros at its end."""
    grown = np.zeros((length or 2 * len(array), *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def with_room(log: Records, needed: int) -> Records:
    """Return a log for ``n`` records; the same one if it has room."""
    return log if len(log) >= needed else with_room(grown(log), needed)
