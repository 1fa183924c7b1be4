"""One run of a cluster: its arrays, the compiled loop over them
(:mod:`~eldr_sim.simulator.plane.loop` tells a request's life), and the routers' decisions. The
control plane's clock is a SimPy environment, a guest of that loop."""

import operator
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np

from eldr_sim.arrays import Int32s, Ints, Records
from eldr_sim.errors import EldrSimWarning, InputError, StalledError
from eldr_sim.references import Reference
from eldr_sim.simulator.control.actions import Actions
from eldr_sim.simulator.control.arrays import make_groups, make_requests, make_run
from eldr_sim.simulator.control.clock import Clock
from eldr_sim.simulator.control.fault_processes import start_faults
from eldr_sim.simulator.control.policy_calls import PolicyCalls
from eldr_sim.simulator.control.progress import Progress, left_open
from eldr_sim.simulator.control.record import RunRecord, TierRecord, by_role, with_columns
from eldr_sim.simulator.control.relocation import RELOCATION
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.control.sent_prefixes import SentPrefixes
from eldr_sim.simulator.plane import choose, loop, state
from eldr_sim.simulator.plane.compiled import Callback
from eldr_sim.simulator.plane.front_end import make_front_end, no_front_end
from eldr_sim.simulator.plane.router import PolicyRouter, grown, make_fleet, with_room
from eldr_sim.simulator.plane.steps import disaggregated, group_step, plain, streamed
from eldr_sim.simulator.plane.steps.group_state import CHOOSE, no_groups
from eldr_sim.simulator.setup.fault_plan import FaultPlan
from eldr_sim.simulator.setup.streaming import make_prompt_layers

#: The most events after which the loop comes back for progress and Ctrl-C, and the first time.
_EVENTS_A_CALL, _FIRST_CALL = 1 << 17, 1 << 12


class CompiledCluster:
    """One run of a cluster over a workload: ``inputs``."""

    def __init__(self, inputs: RunInputs) -> None:
        self.inputs, self.spec, self.workload = inputs, inputs.spec, inputs.workload
        self.window, self.time_limit_s = inputs.window, inputs.time_limit_s
        self.requests = make_requests(inputs, inputs.workload)
        if inputs.queue_keys is not None:
            self.requests["queue_key"] = inputs.queue_keys
        fleet = make_fleet(self.spec.n_workers)
        early = self.spec.conditional.entry or self.spec.reserves_early
        take_over = {pool.then for pool in self.spec.pools} if not early else set()
        self.routers = [
            PolicyRouter(policy, fleet, workers, inputs.workload, number in take_over)
            for number, (policy, workers) in enumerate(
                zip(inputs.policies, self.spec.routers, strict=True)
            )
        ]
        #: The prefixes that come with requests; None where the workload knows them all.
        self.sent: SentPrefixes | None = None
        #: The control plane's environment, and what it is told of requests that it watches.
        self.env = Clock()
        self.on_end: Callable[[int], None] | None = None
        # A weak reference: the callback must not keep the cluster, and its arrays, alive.
        self._callback = Callback(partial(_decided, weakref.ref(self)), int(choose.FAIL))
        self.arrays = make_run(inputs, self.requests, self.routers, self._callback.address)
        self.policy_calls = PolicyCalls(inputs, self.routers, self.arrays)
        self.faults, self.relocations = inputs.faults, inputs.relocations
        self.elastic = {self.spec.names[group.pool]: group for group in inputs.elastic}
        if self.relocations is not None:
            self.relocations.bind(self.arrays.masks, inputs.replicas)
        self.groups = make_groups(inputs, self.arrays)
        layout, steps, self.layers = self.spec.prefill.layout, self.spec.prefill.step_time, None
        if layout is not None and layout.has_steps_of_its_own:
            n, n_experts = len(self.spec.routers[0]), steps.cost.n_experts
            self.layers = make_prompt_layers(layout, steps.n_moe_layers, n, n_experts)
        self.log = np.zeros(1 << 16, state.STEP)
        self.group_log = np.zeros(1 << (0 if self.groups is None else 12), state.GROUP_STEP)
        self.gaps = np.zeros(1 << 12, state.GAP)
        self.front_end = make_front_end(self.spec.front_end, self.requests["prompt_len"])
        self._nothing = no_groups(), streamed.no_prompt_layers(), no_front_end()
        self._world: Reference | None = None
        #: Events after which the loop comes back; fewer where they take longer than ``call_s``, s.
        self.events_a_call, self.call_s, self._progress = _FIRST_CALL, 0.25, Progress()
        # Views of fields that each decision reads: to make one takes a microsecond.
        self._now, self._guest_s = self.arrays.clock["now"], self.arrays.clock["guest_s"]

    def run(
        self, progress: Callable[[float], None] | None = None, acts: Actions | None = None
    ) -> RunRecord:
        """Run until every measured request has ended, or the time limit. ``progress``: called with
        the share of these; ``acts``: what processes that have begun do to it."""
        clock = self.arrays.clock
        total = max(1, int(clock["open_measured"][0]))
        if acts is None and self.faults is not None:
            acts = Actions(self.faults, self)
            start_faults(acts)
        while (why := self.advance(self.time_limit_s)) == loop.PAUSED:
            if progress is not None:
                progress(1.0 - int(clock["open_measured"][0]) / total)
        end_s = float(clock["now"][0])
        if why == loop.UNTIL:
            end_s = self.time_limit_s
            if end_s == np.inf:
                self.check_left(acts)
                end_s = float(clock["now"][0])
        if progress is not None:
            progress(1.0)
        record = self.record(end_s, acts)
        return record if acts is None else acts.recorded(record)

    @property
    def open_measured(self) -> int:
        """Measured requests that have not ended."""
        return int(self.arrays.clock["open_measured"][0])

    @open_measured.setter
    def open_measured(self, n: int) -> None:
        self.arrays.clock["open_measured"] = n

    @property
    def next_s(self) -> float:
        """When the next thing happens, s; infinite where nothing is left."""
        due = float(self.arrays.events[0]["time"]) if self.arrays.clock["n_events"][0] else np.inf
        return min(due, float(self.env.peek()))

    def make_acts(self, plan: FaultPlan) -> Actions:
        """Return what processes do to the cluster."""
        return Actions(plan, self)

    def advance_to(self, until: float) -> None:
        """Let happen what happens before ``until``, s."""
        try:
            while self.advance(until) == loop.PAUSED:
                pass
        finally:
            self.env.move(float(self._now[0]))

    def move(self, time_s: float) -> None:
        """Let it be as late, nothing having happened."""
        self.arrays.clock["now"] = time_s
        self.env.move(time_s)

    def check_left(self, acts: Actions | None) -> None:
        """End what no worker is left to serve; raise if requests are open that nothing will end."""
        if acts is not None and acts.end_unserved():
            return
        self._check_held()
        raise StalledError(f"no event left at {left_open(self)}")

    def advance(self, until: float) -> int:
        """Let happen what happens before ``until``, s; returns `loop.ENDED`, UNTIL or PAUSED.
        Raises StalledError where requests are open and nothing gets further."""
        self._callback.failure.clear()
        if not self.arrays.engines.pools["executor"][0]:
            self._choose_executors()
        self._guest_s[0] = self.env.peek()
        while True:
            n_events, began = min(self.events_a_call, _EVENTS_A_CALL), time.perf_counter()
            with self._callback.interruptible():
                why: int = loop.advance(self.world(), until, n_events)
            if why == loop.FAILED:
                raise self._callback.failure[0]
            if why in (loop.ENDED, loop.UNTIL):
                return why
            self._progress.check(self, n_events, until)
            if why == loop.PAUSED:
                faster = time.perf_counter() - began < self.call_s
                self.events_a_call = n_events * 2 if faster else max(1, n_events // 2)
                return why
            if why == loop.LOG_FULL:
                self.policy_calls.hear()
                self._grow_logs()

    def world(self) -> Reference:
        """Return all that compiled functions work on, as it is now."""
        groups, layers, front = self._nothing
        now = loop.World(
            self.arrays, self.groups or groups, self.layers or layers, self.front_end or front,
            self.log, self.group_log, self.gaps,
        )  # fmt: skip
        if self._world is None or any(map(operator.is_not, now, self._world.whole)):
            self._world = Reference(now)
        return self._world

    def _choose_executors(self) -> None:
        """Note what the steps of each pool do."""
        world, pools = self.world(), self.arrays.engines.pools
        for number, pool in enumerate(self.spec.pools):
            layout = pool.engine.layout
            group = pool.engine.group
            executor = plain if group is None else disaggregated if group.ffn_ranks else group_step
            if layout is not None and layout.has_steps_of_its_own:
                executor = streamed
            pools["executor"][number] = executor.execute.address(world)

    def _check_held(self) -> None:
        """Raise InputError if a router holds requests that nothing will make it ask for again."""
        for router in self.routers:
            if n := int(router.arrays.record["n"][0]):
                problem = f"{router.policy.name!r} holds {n} requests, and none is in flight"
                raise InputError("policy", problem, "a policy that also places the last requests")

    def _grow_logs(self) -> None:
        """Make room where there is none: for steps of engines or groups, or for gaps."""
        clock, engines = self.arrays.clock[0], self.arrays.engines
        size, places = int(engines.pools["group_size"].max()), engines.sequences.shape[1]
        room = len(self.log)
        if room < int(clock["n_steps"]) + size:
            # A copy takes memory once more, and zeros take none before they are written: as many as
            # there are tokens and prompts, if that is near.
            most = int(self.workload.output_len.sum()) + len(self.workload)
            self.log = grown(self.log, most if room < most <= 16 * room else 8 * room)
        self.group_log = with_room(self.group_log, int(clock["n_group_steps"]) + 1)
        self.gaps = with_room(self.gaps, int(clock["n_gaps"]) + size * places)

    def _lanes_window(self, arrived: Records) -> tuple[float, float]:
        """Return the window that lanes opened; raises InputError if they could not."""
        own = self.arrays.engines.sessions.record[0]
        if own["short"]:
            told = "lanes had no session any more before the window ended: they waited for less"
            warnings.warn(EldrSimWarning(told), stacklevel=2)
        if np.isfinite(own["end"]):
            return float(own["start"]), float(own["end"])
        known = int(state.COMPLETED), int(state.AFTER_WINDOW)
        ends = {state.OUTCOMES[end] for end in arrived["outcome"].tolist() if end not in known}
        why = ", ".join(sorted(ends)) or "they last too long"
        problem = f"the prompts that warm caches do not complete: {why}"
        raise InputError("workload", problem, "sessions that the engines can serve")

    def record(self, end_s: float, acts: Actions | None = None) -> RunRecord:
        """Return what has happened up to ``end_s`` seconds; what is open remains unserved. ``acts``
        know of requests that were sent again."""
        self.policy_calls.tell_ends(self.arrays)
        clock = self.arrays.clock[0]
        # Copied as bytes, those between the fields included: equal runs have equal records.
        rows = self.requests.view(np.uint8).reshape(len(self.requests), -1)
        if acts is not None and acts.first_try:
            rows = rows.copy()
            acts.restore(rows.ravel().view(state.REQUEST))
        numbers = self.arrays.engines.sessions.order[: int(clock["arrived"])]
        arrived = rows[numbers].ravel().view(state.REQUEST)
        reason = state.OVERLOADED if clock["open_measured"] > 0 else state.AFTER_WINDOW
        still = arrived["outcome"] == state.OPEN
        arrived["outcome"][still] = reason
        if self.workload.n_warming:
            self.window = self._lanes_window(arrived)
            arrived["outcome"][still & arrived["measured"]] = state.CANCELLED
        # Who stays where its prompt was computed notes that with its last token.
        begun = (arrived["source"] < 0) & (arrived["first_token_s"] >= 0.0)
        begun &= arrived["outcome"] != state.COMPLETED
        for name in ("prefill_end_s", "decode_start_s"):
            stays = begun & (arrived[name] < 0.0)
            arrived[name][stays] = arrived["first_token_s"][stays]
        moved = [group.log() for group in self.elastic.values()]
        moved += [] if self.relocations is None else [self.relocations.log()]
        pools = self.arrays.engines.pools
        prefill, decode = by_role(self.spec, self.log[: int(clock["n_steps"])], "worker")
        groups = by_role(self.spec, self.group_log[: int(clock["n_group_steps"])], "leader")
        return RunRecord(
            requests=with_columns(arrived, self.spec),
            numbers=numbers,
            prefill_steps=prefill[prefill["end"] <= end_s],
            decode_steps=decode,
            prefill_group_steps=groups[0][groups[0]["end"] <= end_s],
            decode_group_steps=groups[1],
            gaps=self.gaps[: int(clock["n_gaps"])],
            relocations=np.concatenate([np.zeros(0, RELOCATION), *moved]),
            window=self.window,
            end_s=end_s,
            streamed_s=float(pools["streamed_s"][0]),
            stall_s=float(pools["stall_s"][0]),
            drafted=self._drafted(),
            tiers=self._of_tiers(numbers),
        )

    def _of_tiers(self, numbers: Int32s) -> TierRecord | None:
        """Return what requests took from KV tiers; None where there are none."""
        tiers = self.arrays.engines.kv.tiers
        if not len(tiers.loads):
            return None
        own = [tiers.links["store"][:, t] for t in range(len(tiers.rules))]
        mine = [np.unique(stores[stores >= 0]) for stores in own]
        return TierRecord(
            tiers.hits[numbers],
            tiers.loads[numbers],
            tiers.links["loaded"].sum(axis=0),
            tiers.links["stored"].sum(axis=0),
            np.array([tiers.stores["evicted"][stores].sum() for stores in mine]),
            [len(stores) for stores in mine],
            [int((tiers.stores["n_blank"] + tiers.stores["n_idle"])[of[:1]].sum()) for of in mine],
        )

    def _drafted(self) -> Ints | None:
        """Return what became of drafts, of all pools; None where there are none."""
        pools = zip(self.spec.pools, self.arrays.drafts, strict=False)
        counts = [drafts.counts for pool, drafts in pools if pool.engine.speculation is not None]
        if not counts:
            return None
        most = max(map(len, counts))  # accepted drafts, and last the drafts verified
        wide = [np.insert(of, len(of) - 1, np.zeros(most - len(of))) for of in counts]
        return np.asarray(np.sum(wide, axis=0), np.int64)

    # --- decisions ---

    def decide(self, asked: int, request: int) -> int:
        """Return what a router decides, for the compiled loop; see `loop.advance`."""
        if asked >= 0:
            return self.policy_calls.ask(self, asked, request)
        if asked == loop.WAKE:
            return self._wake()
        if asked == loop.TELL:
            self.tell_end(request)
        elif asked == CHOOSE:
            assert self.inputs.replica_policy is not None
            assert self.groups is not None
            self.inputs.replica_policy.answer(request, self.arrays, self.groups)
        else:
            assert self.relocations is not None
            self.relocations.answer(asked, request, float(self._now[0]))
        return 0

    def _wake(self) -> int:
        """Let the control plane do the next thing."""
        before = self.arrays, self.front_end, self.groups
        self.env.step()
        self._guest_s[0] = self.env.peek()
        same = not any(map(operator.is_not, before, (self.arrays, self.front_end, self.groups)))
        return 0 if same else int(choose.RETURN)

    def tell_end(self, request: int) -> None:
        """Let the process that watches a request know that it has ended."""
        if self.on_end is not None:
            self.env.move(float(self._now[0]))
            self.on_end(request)
            self._guest_s[0] = self.env.peek()


def _decided(cluster: weakref.ref[CompiledCluster], asked: int, request: int) -> int:
    alive = cluster()
    assert alive is not None, "a cluster lives while it advances"
    return alive.decide(asked, request)
