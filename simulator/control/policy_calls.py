"""What routers decide and receive: the part of a run that policies see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from eldr_sim.arrays import Bools, Ints
from eldr_sim.policies.base import RequestInfo, RouterPolicy
from eldr_sim.simulator.control.arrays import padded
from eldr_sim.simulator.control.known_blocks import PublishedBlocks, SentBlocks, matched_tokens
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.plane import choose, loop
from eldr_sim.simulator.plane.kv.kv_cache import match
from eldr_sim.simulator.plane.kv.kv_loads import match_tiers
from eldr_sim.simulator.plane.router import PolicyRouter
from eldr_sim.simulator.setup.config.field_types import parse_kv_signal
from eldr_sim.traces.requests.prefixes import Ranges, clip_ranges, join_ranges

if TYPE_CHECKING:
    from eldr_sim.simulator.control.compiled_cluster import CompiledCluster


_NONE, _NOTHING = np.zeros(0, np.int64), np.zeros(0)


class PolicyCalls:
    """Calls the routers of a cluster, and passes them what they may know of ``arrays``."""

    def __init__(
        self, inputs: RunInputs, routers: Sequence[PolicyRouter], arrays: loop.Run
    ) -> None:
        spec, clock, pools = inputs.spec, arrays.clock, arrays.engines.pools
        prefix_tokens, stale = inputs.workload.prefix_block_tokens, spec.signal_interval_s > 0
        self._routers, self._signatures, self._heard = routers, inputs.signatures, 0
        hear = [router for router in routers if router.decisions is None]
        self._listens = any(router.arrays.record["hears_ends"][0] for router in hear)
        takes_over = pools["then"].tolist()
        self._reads_signatures = frozenset(
            number
            for number, router in enumerate(routers)
            if number in takes_over and (router.needs.signature or router.needs.future)
        )
        #: What routers know of prefix caches, where they do not see them as they are.
        self._known: PublishedBlocks | SentBlocks | None = None
        published: list[Callable[[int, Sequence[int], Sequence[int]], None]] = []
        kv_signal = parse_kv_signal(spec.kv_signal)
        if prefix_tokens and any(router.needs.matched for router in routers):
            if kv_signal.approximate:
                self._known = SentBlocks(spec.n_workers, kv_signal, prefix_tokens)
            elif stale:
                self._known = PublishedBlocks(spec.n_workers)
                published.append(self._known.on_blocks)
        if inputs.on_blocks is not None:
            published.append(inputs.on_blocks)
        self.reports: PrefillReports | None = None
        if arrays.engines.kv.listened:  # noted by the engines, so the router must read it
            entry = len(spec.routers[0])
            self.reports = PrefillReports(inputs.policies[0], arrays, entry, stale, published)
        # Views of fields that each decision reads: to make one takes a microsecond.
        self._n_reported, self._now, self._signals_s = (
            clock[name] for name in ("n_reported", "now", "signals_s")
        )

    def hear(self, *, at_once: bool = False) -> None:
        """Report the blocks and tokens that engines have published; all, if ``at_once``."""
        if self.reports is not None:
            self.reports.tell(at_once=at_once)

    def tell_ends(self, arrays: loop.Run) -> None:
        """Let policies know of the completions that were reported since the last time."""
        if not self._listens:
            return
        reported, engines = int(self._n_reported[0]), arrays.engines
        router_of = engines.pools["router"][engines.pool_of]
        for index, worker in arrays.reported[self._heard : reported].tolist():
            router = self._routers[router_of[worker]]
            if router.decisions is None:
                router.policy.on_complete(index, worker - router.own.start)
        self._heard = reported

    def ask(self, cluster: CompiledCluster, number: int, request: int) -> int:
        """Ask a router for a worker, or for the rule of requests like this one."""
        router, workload = self._routers[number], cluster.workload
        self.tell_ends(cluster.arrays)
        self.hear()
        if router.decisions is not None or router.tells_rules:
            members = router.unknown(request)
            infos = [self._info(cluster, number, member) for member in members]
            known = router.arrays
            router.prepare(members, infos, self._now.item())
            if router.arrays is known:
                return int(choose.LOOK)
            arrays = padded([router.arrays for router in self._routers])
            cluster.arrays = cluster.arrays._replace(routers=arrays)
            return int(choose.RETURN)
        now_s, own, seen = self._now.item(), router.own, self._known
        matched = reachable = _NONE
        load_s = _NOTHING
        if router.needs.matched:
            matched = reachable = np.zeros(len(own), np.int64)
            load_s = np.zeros(len(own))
            engines = cluster.arrays.engines
            caches = engines.pools["prefix_caching"][engines.pool_of[own.start]]
            if caches and workload.prefix_block_tokens:
                tokens = int(workload.prompt_len[request])
                if seen is None:
                    match(engines.kv, own.start, request, tokens, matched)
                else:
                    size = workload.prefix_block_tokens, cluster.spec.block_size
                    found = seen.match(request, workload.blocks(request).tolist(), own, now_s)
                    matched = reachable = matched_tokens(found, tokens, *size)
                if len(engines.kv.tiers.loads) and not isinstance(seen, SentBlocks):
                    reachable = np.zeros(len(own), np.int64)
                    match_tiers(engines.kv, own.start, request, tokens, matched, reachable, load_s)
        workers = router.workers(now_s, self._signals_s.item(), matched, reachable, load_s)
        chosen = router.select(self._info(cluster, number, request), workers)
        if seen is not None and router.needs.matched and chosen >= 0:
            seen.sent(request, workload.blocks(request).tolist(), chosen, now_s)
        return chosen

    def _info(self, cluster: CompiledCluster, router: int, request: int) -> RequestInfo:
        """Return a request as a router sees it: with its signature if the prompt is computed."""
        workload, signature, which, hashes = cluster.workload, None, None, list[int]()
        first = cluster.spec.conditional.entry or cluster.spec.reserves_early
        here = first and cluster.requests["prefill_end_s"][request] < 0.0
        if router in self._reads_signatures and not here:  # else nobody has computed the prompt yet
            which, signature = self._signatures(_signature_rows(cluster, request))
        elif self._routers[router].needs.session_signature and workload.parent is not None:
            before = int(workload.parent[request])  # it has been served: what is known of it
            if before >= 0:
                which, signature = self._signatures(_signature_rows(cluster, before))
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
            cluster.spec.max_tokens,
        )


def _signature_rows(cluster: CompiledCluster, request: int) -> Ranges:
    """Return the trace rows that a prompt's signature is the sum of; blocks found in the prefix
    cache carry that of the prompt that was computed into them."""
    workload, engines = cluster.workload, cluster.arrays.engines
    size, n_tokens = cluster.spec.block_size, int(workload.prompt_len[request])
    first, end = engines.kv.first_listed[request : request + 2].tolist()
    found = min(int(engines.tables["found"][request, 0]), end - first)
    if found == 0:
        if workload.prefix_block_tokens == 0:
            return ((int(workload.text[request]), 0, n_tokens),)
        return workload.prompt_ranges(request)
    blocks = engines.kv.listed[0, first : first + found]
    worker = int(cluster.requests["worker"][request])
    parts: list[tuple[int, int, int]] = []
    start = 0
    for writer, group in groupby(engines.kv.blocks["writer"][worker, blocks].tolist()):
        stop = start + size * sum(1 for _ in group)
        parts += clip_ranges(workload.prompt_ranges(writer, answer=True), start, stop)
        start = stop
    parts += clip_ranges(workload.prompt_ranges(request), start, n_tokens)
    return join_ranges(parts)


class PrefillReports:
    """Reports of engines not yet delivered to routers, for a ``listener``, the policy of a
    prefill router, and ``on_blocks``. ``arrays``: of the cluster; ``stale``: whether they arrive
    only with signals."""

    def __init__(
        self, listener: RouterPolicy, arrays: loop.Run, n_workers: int, stale: bool,
        on_blocks: Sequence[Callable[[int, Sequence[int], Sequence[int]], None]] = (),
    ) -> None:  # fmt: skip
        self.listener, self._on_blocks = listener, on_blocks
        self._listens = listener.needs.blocks
        self.kv, self._stale = arrays.engines.kv, stale
        self._computed = arrays.engines.workers["computed_tokens"][:n_workers]
        self._published_s = arrays.clock["signals_s"]
        self._told_s = -1.0
        self._tokens_told = np.zeros(n_workers, np.int64)
        self._blocks: list[Ints] = []

    def collect(self) -> None:
        """Take over what engines have noted of their blocks, so that they have room for more."""
        kv = self.kv
        if kv.n_events[0]:
            self._blocks.append(kv.events[: int(kv.n_events[0])].copy())
            kv.n_events[0] = 0

    def tell(self, *, at_once: bool = False) -> None:
        """Tell what has been published since the last time; all there is, if ``at_once``."""
        self.collect()
        kv, listener = self.kv, self.listener
        if self._stale and not at_once and self._published_s[0] == self._told_s:
            return
        self._told_s = float(self._published_s[0])
        if self._blocks:
            events = np.concatenate(self._blocks)
            self._blocks.clear()
            for worker in np.unique(events[:, 0]).tolist():
                own = events[events[:, 0] == worker]
                hashes = kv.prefix_hash[own[:, 1]].tolist()
                self._tell_blocks(worker, hashes, own[:, 2] > 0)
        if not self._listens:
            return
        for worker in np.flatnonzero(self._computed > self._tokens_told).tolist():
            listener.on_tokens(worker, int(self._computed[worker] - self._tokens_told[worker]))
        self._tokens_told[:] = self._computed

    def _tell_blocks(self, worker: int, hashes: list[int], stored: Bools) -> None:
        """Tell what came and what went, in the order in which it did."""
        at = 0
        for came, run in groupby(stored.tolist()):
            part = hashes[at : (at := at + sum(1 for _ in run))]
            told = worker, part if came else (), () if came else part
            if self._listens and worker < len(self._computed):
                self.listener.on_blocks(*told)
            for hear in self._on_blocks:
                hear(*told)
