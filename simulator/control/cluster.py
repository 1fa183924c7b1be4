"""One run of a cluster: its arrays, the compiled loop over them, and the routers' decisions.

What a request lives through is told in :mod:`~eldr_sim.simulator.plane.loop`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.base import RequestInfo, RouterPolicy
from eldr_sim.references import Reference
from eldr_sim.simulator.control.actions import Actions
from eldr_sim.simulator.control.arrays import (
    check_tables,
    link_rates,
    make_drafts,
    make_groups,
    make_pools,
    make_requests,
    make_settings,
    of_all,
    with_joins,
)
from eldr_sim.simulator.control.clock import Clock
from eldr_sim.simulator.control.elastic import ElasticGroup
from eldr_sim.simulator.control.fault_processes import start_faults
from eldr_sim.simulator.control.known_blocks import PublishedBlocks, SentBlocks, matched_tokens
from eldr_sim.simulator.control.record import RunRecord, TierRecord, by_role, with_columns
from eldr_sim.simulator.control.relocation import RELOCATION, Relocations
from eldr_sim.simulator.control.replica_policy import ReplicaPolicy
from eldr_sim.simulator.plane import choose, loop, state
from eldr_sim.simulator.plane.compiled import Callback, address_of
from eldr_sim.simulator.plane.engine import make_workers
from eldr_sim.simulator.plane.front_end import make_front_end, most_at_once, no_front_end
from eldr_sim.simulator.plane.kv_cache import make_kv_cache, match
from eldr_sim.simulator.plane.kv_loads import match_tiers
from eldr_sim.simulator.plane.kv_manager import Engines
from eldr_sim.simulator.plane.kv_tiers import Tiers
from eldr_sim.simulator.plane.network import make_network
from eldr_sim.simulator.plane.prefill_reports import PrefillReports
from eldr_sim.simulator.plane.router import PolicyRouter, make_fleet, with_more, with_room
from eldr_sim.simulator.plane.sessions import make_sessions
from eldr_sim.simulator.plane.steps import disaggregated, group_step, plain, streamed
from eldr_sim.simulator.plane.steps.executor import Scratch
from eldr_sim.simulator.plane.steps.expert_union import PromptRows, no_prompts
from eldr_sim.simulator.plane.steps.group_state import CHOOSE, Replicas, no_groups
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec
from eldr_sim.simulator.setup.fault_plan import FaultPlan
from eldr_sim.simulator.setup.kv_signal import parse_kv_signal
from eldr_sim.simulator.setup.kv_tiers import make_tiers, prompt_table
from eldr_sim.simulator.setup.replay import Replay
from eldr_sim.simulator.setup.streaming import make_prompt_layers
from eldr_sim.traces.requests.prefixes import Ranges, clip_ranges, join_ranges
from eldr_sim.traces.workload import Workload

#: Events after which the loop comes back for progress and Ctrl-C.
_EVENTS_A_CALL = 1 << 17
_NONE, _NOTHING = np.zeros(0, np.int64), np.zeros(0)


class Cluster:
    """One run of a cluster over a workload.

    Parameters
    ----------
    spec, shards
        The cluster, and the part of its model on one GPU of each pool's workers.
    workload, replay
        The requests, and the bit sets of the windows they replay.
    signatures
        Gives the prefill counts ``[layers, experts]`` of the trace rows that a prompt replays
        (summed gate scores where the decode policy asks for them), and a number that stands for
        them: the routers' view of a prompt.
    policies
        Those of the routers.
    window
        Requests that arrive in this window, s, are measured.
    time_limit_s
        Simulated time after which the run gives the rest up as unserved.
    expert_masks
        The experts on each expert-parallel GPU of each worker, prefill workers first, see
        `simulator.setup.replay.rank_masks`; None where every worker has one such rank.
    queue_keys
        What the queue order makes of each request, see `policies.queue.orders`; None is first come,
        first served.
    prompts
        The rows of the prompts' tokens, see `simulator.setup.replay.prompt_rows`: what
        the steps that compute them activate. None expects uniform routing there.
    replicas
        Experts with several instances, which ``expert_masks`` leave out; None where there are none.
    relocations
        What moves the experts of groups while they run; None leaves them where they are.
    faults
        What goes wrong; None: nothing.
    replica_policy
        Chooses among ``replicas`` in Python; None where compiled code does.
    elastic
        The groups whose engines come and go.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        shards: Sequence[ModelDims],
        workload: Workload,
        replay: Replay,
        signatures: Callable[[Ranges], tuple[int, NDArray[Any] | None]],
        policies: Sequence[RouterPolicy],
        window: tuple[float, float],
        time_limit_s: float,
        expert_masks: NDArray[np.uint64] | None = None,
        prompts: PromptRows | None = None,
        queue_keys: NDArray[np.float64] | None = None,
        replicas: Replicas | None = None,
        relocations: Relocations | None = None,
        faults: FaultPlan | None = None,
        replica_policy: ReplicaPolicy | None = None,
        elastic: Sequence[ElasticGroup] = (),
    ) -> None:
        self.spec = spec
        self.workload, self._replay = workload, replay
        self.signatures = signatures
        self.window = window
        self.time_limit_s = time_limit_s
        self.requests = make_requests(spec, workload, replay, window)
        self._has_queue_keys = queue_keys is not None and bool(queue_keys.any())
        if queue_keys is not None:
            self.requests["queue_key"] = queue_keys
        fleet = make_fleet(spec.n_workers)
        self.routers = [
            PolicyRouter(policy, fleet, workers, workload)
            for policy, workers in zip(policies, spec.routers, strict=True)
        ]
        self._listens = any(router.arrays.record["hears_ends"][0] for router in self.routers)
        self._match = workload.prefix_block_tokens and any(r.needs.matched for r in self.routers)
        self._heard = 0
        self._failure: BaseException | None = None
        #: The control plane's environment, and what it is told of requests that it watches.
        self.env = Clock()
        self.on_end: Callable[[int], None] | None = None
        # A weak reference: the callback must not keep the cluster, and its arrays, alive.
        self._callback = Callback(partial(_decided, weakref.ref(self)))
        grouped = any(pool.engine.group is not None for pool in spec.pools)
        self.log = np.zeros(1 << 16, state.STEP)
        self.group_log = np.zeros(1 << (12 if grouped else 0), state.GROUP_STEP)
        self.gaps = np.zeros(1 << 12, state.GAP)
        self.arrays = self._arrays(shards, replay, expert_masks, prompts)
        takes_over = self.arrays.engines.pools["then"].tolist()
        self._reads_signatures = frozenset(
            number
            for number, router in enumerate(self.routers)
            if number in takes_over and (router.needs.signature or router.needs.future)
        )
        self.prefill_reports: PrefillReports | None = None
        #: What routers know of prefix caches, where they do not see them as they are.
        self._known: PublishedBlocks | SentBlocks | None = None
        told = parse_kv_signal(spec.kv_signal)
        published: Callable[[int, Sequence[int], Sequence[int]], None] | None = None
        if self._match and told.approximate:
            self._known = SentBlocks(spec.n_workers, told, workload.prefix_block_tokens)
        elif self._match and spec.signal_interval_s > 0:
            self._known = PublishedBlocks(spec.n_workers)
            published = self._known.on_blocks
        if self.arrays.engines.pools["reports"].any() or published is not None:
            self.prefill_reports = PrefillReports(
                policies[0], self.arrays, len(spec.routers[0]), spec.signal_interval_s > 0,
                published,
            )  # fmt: skip
        self.faults, self.replica_policy = faults, replica_policy
        self.elastic = {spec.names[group.pool]: group for group in elastic}
        self.relocations = relocations
        if relocations is not None:
            relocations.bind(self.arrays.masks, replicas)
        self.groups = None
        if grouped:
            loads = None if relocations is None else relocations.loads
            asks = replica_policy is not None
            self.groups = make_groups(spec, self.arrays.masks, replicas, loads, asks, self._places)
        layout, steps, self.layers = spec.prefill.layout, spec.prefill.step_time, None
        if layout is not None and layout.has_steps_of_its_own:
            self.layers = make_prompt_layers(
                layout, steps.n_moe_layers, len(spec.routers[0]), steps.cost.n_experts
            )
        self.front_end = make_front_end(spec.front_end, self.requests["prompt_len"])
        self._nothing = no_groups(), streamed.no_prompt_layers(), no_front_end()
        self._world: Reference | None = None
        # Views of fields that each decision reads: to make one takes a microsecond.
        self._n_reported = self.arrays.clock["n_reported"]
        self._now, self._signals_s = self.arrays.clock["now"], self.arrays.clock["signals_s"]
        self._guest_s = self.arrays.clock["guest_s"]

    def _arrays(
        self,
        shards: Sequence[ModelDims],
        replay: Replay,
        expert_masks: NDArray[np.uint64] | None,
        prompts: PromptRows | None,
    ) -> loop.Run:
        spec, n_workers = self.spec, self.spec.n_workers
        longest = int((self.requests["prompt_len"] + self.requests["output_len"]).max(initial=0))
        engines = [pool.engine for pool in spec.pools]
        for engine in engines:
            check_tables(engine, min(longest, spec.max_model_len))
        n_requests, width = len(self.requests), replay.bits.shape[1]
        most_seqs = max(engine.max_num_seqs for engine in engines)
        # Behind its places an engine has those of sequences that sit out, and one to move another.
        self._places = most_seqs * (1 if all(e.rules.mixed_steps for e in engines) else 2)
        self._places += int(any(e.rules.token_with_kv for e in engines))
        pools = make_pools(spec, shards, self.workload, prompts is not None)
        pools["reports"] = self.routers[0].needs.blocks & (pools["router"] == 0)
        last = pools["first_worker"] + pools["n_workers"]
        pool_of = np.repeat(np.arange(len(pools)), pools["n_workers"])
        clock = np.zeros(1, state.CLOCK)
        clock["open_measured"] = int(self.requests["measured"].sum())
        sessions = make_sessions(self.workload, self.window, spec.max_active_sessions)
        sessions = with_joins(sessions, self.workload.joins)
        # At most one event a worker and kind, and what a request and its transfer schedule.
        events = np.zeros(6 * n_requests + 4 * n_workers + 64, state.EVENT)
        if n_requests:
            first = (float(self.requests["arrival_s"][0]), 0, state.ARRIVAL, 0)
            events[0], clock["n_events"] = first, 1
        if len(sessions.waits) and np.isfinite(self.window[1]):  # who comes in it may not be known
            events[1], clock["n_events"] = (self.window[1], 0, state.ARRIVAL, -1), 2
            events[:2].sort(order=("time", "order"))
            clock["open_measured"] += 1
        most_pending = most_seqs + most_at_once(spec.front_end) + 1
        if spec.reserves_early:  # perhaps for all at once
            most_pending += n_requests
        n_layers = spec.decode.step_time.n_moe_layers
        masks = np.zeros((n_workers, 1, 0), np.uint64)
        if expert_masks is not None:
            masks = np.ascontiguousarray(expert_masks)
        return loop.Run(
            clock=clock,
            events=events,
            engines=Engines(
                settings=self._settings(replay.period),
                pools=pools,
                pool_of=pool_of,
                workers=make_workers(pools, pool_of),
                sequences=np.zeros((n_workers, self._places), state.SEQUENCE),
                requests=self.requests,
                tables=np.zeros((n_requests, 2), state.BLOCK_TABLE),
                kv=make_kv_cache(
                    self.workload,
                    spec.block_size,
                    max(engine.n_blocks for engine in engines),
                    n_workers if pools["prefix_caching"].any() else 0,
                    n_workers
                    if self._match and spec.signal_interval_s > 0
                    else int(last[pools["reports"]].max(initial=0)),
                    self._tiers(shards, clock, bool(pools["prefix_caching"].any())),
                ),
                pending=np.zeros((most_pending, 2), np.int64),
                sessions=sessions,
                prompt_s=prompt_table(spec, longest),
            ),
            routers=of_all([router.arrays for router in self.routers]),
            net=make_network(n_requests, link_rates(spec)),
            reported=np.zeros((n_requests * len(self.routers), 2), np.int32),
            bits=replay.bits,
            masks=masks,
            prompts=no_prompts() if prompts is None else prompts,
            costs=of_all([engine.step_time.cost for engine in engines]),
            drafts=of_all([make_drafts(engine) for engine in engines]),
            scratch=Scratch(
                rows=np.zeros(max(engine.most_decoded for engine in engines), np.int64),
                cached=np.zeros(most_seqs, np.int64),
                new=np.zeros(most_seqs, np.int64),
                union=np.zeros(width, np.uint64),
                activated=np.zeros(n_layers or 1, np.int64),
                active=np.zeros(n_workers, np.int64),
                busiest=np.zeros(n_workers, np.int64),
                plain=np.zeros(n_workers, np.int64),
                later=np.zeros(1, np.int64),
                draft_s=np.zeros(n_workers),
                needed=np.zeros(n_workers, np.int64),
            ),
        )

    def _tiers(
        self, shards: Sequence[ModelDims], clock: NDArray[np.void], caching: bool
    ) -> Tiers | None:
        """Return where blocks are kept beside the workers' caches; None: nowhere."""
        if not (self.spec.tiers and caching):
            return None
        tokens = self.requests["prompt_len"] + self.requests["output_len"]
        n_listed = int((tokens // self.spec.block_size).sum())
        return make_tiers(
            self.spec, shards, clock, n_listed, len(self.requests), link_rates(self.spec)
        )

    def _settings(self, period: int) -> NDArray[np.void]:
        settings = make_settings(self.spec, self.workload)
        settings["period"] = period
        if not any(
            r.policy is not None and (r.needs.signals or not r.tells_rules) for r in self.routers
        ):
            settings["signal_interval_s"] = -1.0
        settings["n_routers"] = len(self.routers)
        settings["decide"] = self._callback.address
        return settings

    def run(
        self, progress: Callable[[float], None] | None = None, acts: Actions | None = None
    ) -> RunRecord:
        """Run until every measured request has ended, or the time limit.

        ``progress`` is called now and then with the share of measured requests that have ended;
        ``acts``: what processes that have begun do to it.
        """
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

    def check_left(self, acts: Actions | None) -> None:
        """End what nobody is left to serve; raise if requests are open that nothing will end."""
        if acts is not None and acts.nobody_left():
            return
        self._check_held()
        clock = self.arrays.clock[0]
        raise RuntimeError(
            f"no event left at {clock['now']:.3f} s with {clock['open_measured']} requests open"
        )

    def advance(self, until: float) -> int:
        """Let happen what happens before ``until`` seconds; returns why the loop stopped.

        One of `loop.ENDED`, `loop.UNTIL` and `loop.PAUSED`.
        """
        self._failure = None
        if not self.arrays.engines.pools["executor"][0]:
            self._choose_executors()
        self._guest_s[0] = self.env.peek()
        while True:
            why: int = loop.advance(self.world(), until, _EVENTS_A_CALL)
            if why == loop.FAILED:
                assert self._failure is not None
                raise self._failure
            if why == loop.FULL:
                if self.prefill_reports is not None:
                    self.prefill_reports.tell()
                self._grow_logs()
            elif why != loop.OTHERS:
                return why

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
            pools["executor"][number] = address_of(executor.execute, world)

    def _check_held(self) -> None:
        """Raise InputError if a router holds requests that nothing will make it ask for again."""
        for router in self.routers:
            if n := int(router.arrays.record["n"][0]):
                problem = f"{router.policy.name!r} holds {n} requests and no other is left to end"
                raise InputError("policy", problem, "a policy that places the last requests, too")

    def _grow_logs(self) -> None:
        """Make room where there is none: for steps of engines or groups, or for gaps."""
        clock, size = self.arrays.clock[0], int(self.arrays.engines.pools["group_size"].max())
        self.log = with_room(self.log, int(clock["n_steps"]) + size)
        self.group_log = with_room(self.group_log, int(clock["n_group_steps"]) + 1)
        self.gaps = with_room(self.gaps, int(clock["n_gaps"]) + size * self._places)

    def record(self, end_s: float, acts: Actions | None = None) -> RunRecord:
        """Return what has happened up to ``end_s`` seconds; what is open then remains unserved.

        ``acts``, if anything was done to the run, know of requests that were sent again.
        """
        self._tell_listeners()
        clock = self.arrays.clock[0]
        # Copied as bytes, those between the fields included: equal runs have equal records.
        rows = self.requests.view(np.uint8).reshape(len(self.requests), -1)
        if acts is not None and acts.first_try:
            rows = rows.copy()
            acts.restore(rows.ravel().view(state.REQUEST))
        numbers = self.arrays.engines.sessions.order[: int(clock["arrived"])]
        arrived = rows[numbers].ravel().view(state.REQUEST)
        reason = state.OVERLOADED if clock["open_measured"] > 0 else state.AFTER_WINDOW
        arrived["outcome"][arrived["outcome"] == state.OPEN] = reason
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

    def _of_tiers(self, numbers: NDArray[np.int32]) -> TierRecord | None:
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

    def _drafted(self) -> NDArray[np.int64] | None:
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
        try:
            if asked >= 0:
                return self._ask(asked, request)
            if asked == loop.WAKE:
                return self._wake()
            if asked == loop.TELL:
                self.tell_end(request)
                return 0
            if asked == CHOOSE:
                assert self.replica_policy is not None
                assert self.groups is not None
                self.replica_policy.answer(request, self.arrays, self.groups)
                return 0
            assert self.relocations is not None
            self.relocations.answer(asked, request, float(self._now[0]))
            return 0
        except BaseException as error:  # it cannot pass through compiled code
            self._failure = error
            return int(choose.FAIL)

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

    def grow(self) -> None:
        """Have room for twice as many requests: the workload's again, with prefixes of their own.

        They have not arrived.
        """
        workload = self.workload.repeated(2)
        arrays, old, new = self.arrays, len(self.requests), len(workload)
        engines, kv = arrays.engines, arrays.engines.kv
        requests = make_requests(self.spec, workload, self._replay, self.window)
        requests["queue_key"] = np.resize(self.requests["queue_key"], new)
        requests[:old] = self.requests
        self.workload, self.requests = workload, requests
        for router in self.routers:
            router.grow(new)
        fresh = make_kv_cache(workload, self.spec.block_size, 1, 0)
        listed = fresh.listed
        listed[:, : kv.listed.shape[1]] = kv.listed
        tiers = kv.tiers
        if len(tiers.loads):
            tiers = tiers._replace(
                loads=with_more(tiers.loads, new - old), hits=with_more(tiers.hits, new - old)
            )
        kv = kv._replace(
            tiers=tiers, listed=listed, first_listed=fresh.first_listed,
            prefix_hash=workload.prefix_hash, prefix_indptr=workload.prefix_indptr,
        )  # fmt: skip
        if self.prefill_reports is not None:
            self.prefill_reports.kv = kv
        prompts = arrays.prompts
        if prompts.prefix_block_tokens:
            prompts = prompts._replace(
                prefix_indptr=workload.prefix_indptr, prefix_trace_request=workload.prefix_text
            )
        more = 6 * (new - old)
        self.arrays = arrays._replace(
            events=with_more(arrays.events, more),
            engines=engines._replace(
                requests=requests,
                tables=with_more(engines.tables, new - old),
                pending=with_more(engines.pending, new - old),
                kv=kv,
                sessions=engines.sessions._replace(
                    order=with_more(engines.sessions.order, new - old)
                ),
            ),
            routers=of_all([router.arrays for router in self.routers]),
            net=arrays.net._replace(
                flows=with_more(arrays.net.flows, new - old),
                done=with_more(arrays.net.done, new - old),
            ),
            reported=with_more(arrays.reported, len(self.routers) * (new - old)),
            prompts=prompts,
        )
        servers = self.front_end
        if servers is not None:
            front = make_front_end(self.spec.front_end, requests["prompt_len"])
            assert front is not None
            self.front_end = front._replace(servers=servers.servers)

    def set_lengths(self, request: int, prompt_len: int | None, output_len: int | None) -> None:
        """Give a request that has not arrived other lengths than the workload's.

        Raises InputError if a length is below 1, or the workload's prefixes or the queue order hang
        on it.
        """
        lengths = {"prompt_len": prompt_len, "output_len": output_len}
        for name, tokens in lengths.items():
            if tokens is None:
                continue
            if tokens < 1:
                raise InputError(name, f"{tokens}", "1 or more tokens")
            if name == "prompt_len" and self.workload.prefix_block_tokens:
                raise InputError(name, "the workload's prompts share prefixes", "its own lengths")
            if self._has_queue_keys:
                raise InputError(name, "the queue order goes by the workload's lengths", "fcfs")
            getattr(self.workload, name)[request] = tokens
            self.requests[name][request] = tokens
        record = self.requests[request]
        tokens = record["prompt_len"] + record["output_len"]
        record["window_blocks"] = self.spec.windows.of(tokens, self.spec.block_size)
        for router in self.routers:
            router.arrays.class_of[request] = -1
        servers = self.front_end
        if servers is not None and self.spec.front_end is not None:
            own = make_front_end(self.spec.front_end, self.requests["prompt_len"][[request]])
            assert own is not None
            for times, one in zip(servers[2:], own[2:], strict=True):
                times[request] = one[0]

    def _ask(self, number: int, request: int) -> int:
        """Ask a router for a worker, or for the rule of requests like this one."""
        router = self.routers[number]
        self._tell_listeners()
        if self.prefill_reports is not None:
            self.prefill_reports.tell()
        if router.tells_rules:
            members = router.unknown(request)
            rules = router.policy.rules([self._info(number, member) for member in members])
            known = router.arrays
            for member, rule in zip(members, rules, strict=True):
                router.learn(member, rule)
            if router.arrays is known:
                return int(choose.LOOK)
            arrays = of_all([router.arrays for router in self.routers])
            self.arrays = self.arrays._replace(routers=arrays)
            return int(choose.RETURN)
        matched = reachable = _NONE
        load_s = _NOTHING
        if router.needs.matched:
            matched = reachable = np.zeros(len(router.own), np.int64)
            load_s = np.zeros(len(router.own))
            engines = self.arrays.engines
            caches = engines.pools["prefix_caching"][engines.pool_of[router.own.start]]
            if caches and self.workload.prefix_block_tokens:
                tokens = int(self.workload.prompt_len[request])
                if self._known is None:
                    match(engines.kv, router.own.start, request, tokens, matched)
                else:
                    size = self.workload.prefix_block_tokens, self.spec.block_size
                    blocks = self.workload.blocks(request).tolist()
                    found = self._known.match(request, blocks, router.own, self._now.item())
                    matched = reachable = matched_tokens(found, tokens, *size)
                if len(engines.kv.tiers.loads) and not isinstance(self._known, SentBlocks):
                    reachable = np.zeros(len(router.own), np.int64)
                    args = router.own.start, request, tokens, matched, reachable, load_s
                    match_tiers(engines.kv, *args)
        now_s, signals_s = self._now.item(), self._signals_s.item()
        workers = router.workers(now_s, signals_s, matched, reachable, load_s)
        chosen = router.select(self._info(number, request), workers)
        if self._known is not None and router.needs.matched and chosen >= 0:
            self._known.sent(request, self.workload.blocks(request).tolist(), chosen, now_s)
        return chosen

    def _info(self, router: int, request: int) -> RequestInfo:
        """Return a request as a router sees it: with its signature if the prompt is computed."""
        workload, signature, which, hashes = self.workload, None, None, list[int]()
        first = self.spec.conditional.entry or self.spec.reserves_early
        here = first and self.requests["prefill_end_s"][request] < 0.0
        if router in self._reads_signatures and not here:  # else nobody has computed the prompt yet
            which, signature = self.signatures(self._signature_rows(request))
        elif self.routers[router].needs.session_signature and workload.parent is not None:
            before = int(workload.parent[request])  # it has been served: what is known of it
            if before >= 0:
                which, signature = self.signatures(self._signature_rows(before))
        if len(workload.prefix_hash):
            hashes = workload.blocks(request).tolist()
        return RequestInfo(
            request,
            workload.prompt_len.item(request),
            workload.domain.item(request),
            hashes,
            signature,
            which,
            workload.session.item(request),
            self.spec.max_tokens,
        )

    def _tell_listeners(self) -> None:
        """Let policies know of the completions that were reported since the last time."""
        if not self._listens:
            return
        reported, engines = int(self._n_reported[0]), self.arrays.engines
        router_of = engines.pools["router"][engines.pool_of]
        for index, worker in self.arrays.reported[self._heard : reported].tolist():
            router = self.routers[router_of[worker]]
            router.policy.on_complete(index, worker - router.own.start)
        self._heard = reported

    def _signature_rows(self, request: int) -> Ranges:
        """Return the trace rows that a prompt's signature is the sum of.

        Blocks found in the prefix cache carry the signature of whichever prompt was computed into
        them.
        """
        workload, engines = self.workload, self.arrays.engines
        size, n_tokens = self.spec.block_size, int(workload.prompt_len[request])
        found = int(engines.tables["found"][request, 0])
        if found == 0:
            if workload.prefix_block_tokens == 0:
                return ((int(workload.text[request]), 0, n_tokens),)
            return workload.prompt_ranges(request)
        first = int(engines.kv.first_listed[request])
        blocks = engines.kv.listed[0, first : first + found]
        worker = int(self.requests["worker"][request])
        parts: list[tuple[int, int, int]] = []
        start = 0
        for writer, group in groupby(engines.kv.blocks["writer"][worker, blocks].tolist()):
            stop = start + size * sum(1 for _ in group)
            parts += clip_ranges(workload.prompt_ranges(writer, answer=True), start, stop)
            start = stop
        parts += clip_ranges(workload.prompt_ranges(request), start, n_tokens)
        return join_ranges(parts)


def _decided(cluster: weakref.ref[Cluster], asked: int, request: int) -> int:
    alive = cluster()
    assert alive is not None, "a cluster lives while it advances"
    return alive.decide(asked, request)
