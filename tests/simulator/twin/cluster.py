"""The cluster: arrivals, routers, hand-offs and transfers."""

import math
from bisect import insort
from collections import Counter
from functools import partial

import numpy as np

from eldr_sim.policies.base import RequestInfo, Workers

from .engine import COLOCATED, DECODE, PREFILL, PREFILL_ONLY, Pool, Worker
from .experts import TraceSets, expert_set, prompt_sources, prompt_token_experts
from .faults import TwinFaults
from .front_end import FrontEnd
from .links import Links
from .prompt_layers import make_layers
from .requests import Request


class Twin:
    """Takes what `Cluster` takes; `run` fills ``requests``, ``steps`` and ``gaps``."""

    def __init__(
        self, spec, model, workload, replay, prefill_policy, decode_policy, window, time_limit_s,
        expert_masks=None, replicas=None, prompts=None, queue_keys=None, placements=None,
        relocations=None, faults=None,
    ):  # fmt: skip
        self.spec, self.model, self.time_limit_s = spec, model, time_limit_s
        self.placements = placements  # of each worker, where engines share experts
        self.relocations = relocations
        self.n_layers = spec.decode.step_time.n_moe_layers
        self.now, self.order, self.events, self.todo = 0.0, 0, [], []
        self.accepted = Counter()  # verify steps of sequences by the drafts accepted
        self.steps, self.group_steps, self.gaps, self.reservations = [], [], [], 0
        self.arrived = self.sent = self.in_flight = 0
        self.requests = self.make_requests(workload, replay, window, prompts)
        if queue_keys is not None:
            for request, key in zip(self.requests, queue_keys, strict=True):
                request.queue_key = key
        self.open_measured = sum(request.measured for request in self.requests)
        self.ranks = expert_masks is not None and [
            [expert_set(rank, self.n_layers) for rank in worker] for worker in expert_masks
        ]
        self.pools = self.make_pools(workload, prompts is not None)
        self.workers = [
            [Worker(self, pool, pool.first + i) for i in range(pool.size)] for pool in self.pools
        ]
        for pool, workers in zip(self.pools, self.workers, strict=True):
            size = pool.spec.group_size
            for worker in workers:
                first = (worker.number - pool.first) // size * size
                worker.group = workers[first : first + size]
        self.layers = make_layers(spec.prefill, spec.n_prefill, self.n_layers)
        self.policies = prefill_policy, decode_policy
        self.loads = [np.zeros(pool.size, np.int64) for pool in self.pools]
        self.held, self.to_ask = ([], []), [0, 0]
        self.views = [Workers.idle(loads) for loads in self.loads]
        self.publish_due = False
        self.links = Links(self)
        self.healthy = [np.ones(pool.size, bool) for pool in self.pools]
        self.faults = faults and TwinFaults(self, faults)
        self.front_end = spec.front_end and FrontEnd(self, spec.front_end, workload.prompt_len)
        if self.requests:
            self.schedule(self.requests[0].arrival_s, lambda: self.arrive(0))

    def make_pools(self, workload, own_experts):
        spec = self.spec
        colocated = spec.n_prefill == 0
        caching = spec.enable_prefix_caching
        whole = spec.prefill.layout is not None and spec.prefill.layout.whole_prompts
        prefill = Pool(
            PREFILL if spec.n_decode else PREFILL_ONLY, 0, spec.n_prefill, spec.prefill,
            prefix_caching=caching and not whole, own_experts=own_experts,
            async_scheduling=spec.scheduler.async_scheduling, capture_s=spec.capture_s,
        )  # fmt: skip
        decode = Pool(
            COLOCATED if colocated else DECODE, spec.n_prefill, spec.n_decode, spec.decode,
            prefix_caching=caching, own_experts=own_experts,
            async_scheduling=spec.scheduler.async_scheduling, capture_s=0.0,
        )  # fmt: skip
        return prefill, decode

    def make_requests(self, workload, replay, window, prompts):
        windows = [expert_set(row, self.n_layers) for row in replay.bits]
        trace = None
        if prompts is not None:
            trace_layers = len(prompts.bits[0]) * self.n_layers // len(replay.bits[0])
            rows = [expert_set(row, trace_layers) for row in prompts.bits]
            trace = TraceSets(rows, trace_layers)
        made = []
        for i in range(len(workload)):
            prompt, blocks = int(workload.prompt_len[i]), workload.blocks(i).tolist()
            replayed = int(workload.decode_request[i])
            first, span = int(replay.first_row[replayed]), int(replay.length[replayed])
            offset = int(workload.replay_offset[i])
            arrival = float(workload.arrival_s[i])
            request = Request(
                number=i,
                arrival_s=arrival,
                prompt=prompt,
                output=int(workload.output_len[i]),
                measured=window[0] <= arrival < window[1],
                token_experts=[],
                window=[windows[first + (offset + k) % span] for k in range(span)],
                block_keys=self.block_keys(workload, i, blocks),
                info=RequestInfo(
                    i,
                    prompt,
                    int(workload.domain[i]),
                    tuple(blocks),
                    session=int(workload.session[i]),
                ),
            )
            reached = min(
                -(-(prompt + request.output) // self.spec.block_size), self.spec.windows.most
            )
            kept = self.spec.windows
            request.window_blocks = math.ceil(kept.share * reached) + kept.state
            if trace is not None:
                request.token_experts = [
                    prompt_token_experts(prompts, trace, source, token, self.n_layers)
                    for token, (source, _) in enumerate(prompt_sources(workload, i))
                ]
            made.append(request)
        return made

    def block_keys(self, workload, i, prefix_blocks):
        """A full KV block is told by its number and the prefix block its last token lies in.

        Those of an answer that another request goes on with have keys, too.
        """
        size, prefix = self.spec.block_size, workload.prefix_block_tokens
        context = int(workload.prompt_len[i])
        if workload.answered is not None and workload.answered[i]:
            context += int(workload.output_len[i]) - 1
        keys = []
        for number in range(context // size):
            last = (number + 1) * size - 1
            if prefix == 0 or last // prefix >= len(prefix_blocks):
                break
            keys.append((number, prefix_blocks[last // prefix]))
        return keys

    # --- events ---

    def schedule(self, time, act, order=None):
        """Events of one time happen in the order in which they were scheduled."""
        if order is None:
            self.order += 1
            order = self.order
        insort(self.events, (time, order, act), key=lambda event: event[:2])

    def run(self):
        """Run until all measured requests have ended, or to the time limit."""
        while self.open_measured and self.events and self.events[0][0] < self.time_limit_s:
            if self.spec.signal_interval_s > 0 and not self.publish_due and self.events[0][1] > 0:
                self.publish_due = True
                self.schedule(self.now + self.spec.signal_interval_s, self.publish)
            self.now, _, act = self.events.pop(0)
            act()
            self.settle()
        if self.faults and not self.events and self.time_limit_s == np.inf:
            self.faults.nobody_left()
        if self.faults:
            self.faults.show_first_tries()
        for request in self.requests[: self.arrived]:
            if not request.outcome:
                request.outcome = (
                    "unserved_at_time_limit" if self.open_measured else "run_ended_after_window"
                )
        return self

    def arrive(self, number):
        self.arrived = number + 1
        if self.arrived < len(self.requests):
            at = self.requests[self.arrived].arrival_s
            self.schedule(at, lambda: self.arrive(number + 1))

    def settle(self):
        """Send whom the client may send, then do the next thing that the event has brought."""
        while True:
            if not self.front_end:
                self.send_all()
            if not self.todo:
                self.ask_held()
                self.send_all()  # API servers hear of it when all else is done
                return
            act, request = self.todo.pop(0)
            act(request)

    def send_all(self):
        limit = self.spec.max_concurrency
        while self.sent < self.arrived and (limit is None or self.in_flight < limit):
            self.send(self.requests[self.sent])

    def send(self, request):
        self.sent += 1
        if request.outcome:
            return  # its client has not waited for so long
        request.sent_s = self.now
        reason = self.refusal(request)
        if reason:
            self.end(request, reason)
            return
        self.in_flight += 1
        if self.front_end:
            self.front_end.send(request)
        else:
            self.route(request)

    def route(self, request):
        """Ask the first router."""
        early = self.spec.reserves_early
        self.dispatch(request, 0 if self.spec.n_prefill and not early else 1)

    def refusal(self, request):
        """Say why a request can never be served."""
        size, tokens = self.spec.block_size, request.prompt + request.output
        windows = request.window_blocks * size
        if tokens > self.spec.max_model_len:
            return "exceeds_max_model_len"
        layout = self.spec.prefill.layout
        whole = self.spec.n_prefill and layout is not None and layout.whole_prompts
        if whole and request.prompt > self.spec.prefill.max_num_batched_tokens:
            return "exceeds_token_budget"
        slots, drafting = tokens, self.spec.decode.speculation
        if drafting is not None:
            slots = min(tokens + drafting.k + drafting.lookahead, self.spec.max_model_len)
        if (
            request.prompt > self.spec.prefill.n_blocks * size - windows
            or slots > self.spec.decode.n_blocks * size - windows
        ):
            return "exceeds_kv_cache"
        return ""

    def dispatch(self, request, pool):
        """Let a router pick the worker, or hold the request."""
        if self.spec.signal_interval_s == 0:
            self.publish_pool(pool)
        healthy = self.healthy[pool]
        view = self.views[pool]._replace(
            loads=self.loads[pool], now_s=self.now, healthy=healthy.copy()
        )
        worker = self.policies[pool].select(request.info, view) if healthy.any() else None
        if worker is None:
            self.held[pool].append(request)
            return
        if not healthy[worker]:
            worker = min(np.flatnonzero(healthy), key=lambda w: (self.loads[pool][w], w))
        self.loads[pool][worker] += 1
        if pool == 0:
            request.prefill_worker = worker
        else:
            request.decode_worker = worker
        self.workers[pool][worker].take(request)

    def hand_over(self, request):
        """Its prompt is computed: tell the router, which takes its time to pick a decode worker."""
        self.report(request, 0)
        spec = self.spec
        delay = spec.routing_s + spec.handover_s + spec.routing_token_s * request.prompt
        if delay == 0:
            self.decode(request)
        else:
            self.schedule(self.now + delay, partial(self.ask_for_decode, request))

    def ask_for_decode(self, request):
        self.todo.append((self.decode, request))

    def decode(self, request):
        """Let a router pick who decodes it, or fetch its KV cache into blocks reserved early."""
        if self.spec.reserves_early:
            self.fetch(request)
        else:
            self.dispatch(request, 1)

    def complete(self, request):
        self.report(request, 1 if self.spec.n_decode else 0)
        self.in_flight -= 1
        self.end(request, "completed")

    def end(self, request, outcome):
        request.outcome = outcome
        self.open_measured -= request.measured

    def report(self, request, pool):
        if self.spec.load_report_delay_s == 0:
            self.hear(request, pool)
        else:
            at = self.now + self.spec.load_report_delay_s
            self.schedule(at, partial(self.hear, request, pool))

    def publish(self):
        """All engines publish; the routers are asked again about what they hold."""
        self.publish_due = False
        for pool in range(2):
            self.publish_pool(pool)
            self.to_ask[pool] = len(self.held[pool])

    def publish_pool(self, pool):
        if not self.workers[pool]:
            return
        columns = zip(*(worker.signals() for worker in self.workers[pool]), strict=True)
        names = "waiting", "running", "waiting_tokens", "running_tokens", "kv_usage"
        columns = dict(zip(names, map(np.array, columns), strict=False))
        self.views[pool] = self.views[pool]._replace(signals_s=self.now, **columns)

    def ask_held(self):
        for pool in range(2):
            asked, self.held[pool][:] = list(self.held[pool]), []
            again, self.to_ask[pool] = self.to_ask[pool], 0
            for request in asked[:again]:
                self.dispatch(request, pool)
            self.held[pool][:0] = asked[again:]

    def hear(self, request, pool):
        worker = request.decode_worker if pool else request.prefill_worker
        self.loads[pool][worker] -= 1
        self.to_ask[pool] = len(self.held[pool])
        if pool and self.policies[1].needs.ends:
            self.policies[1].on_complete(request.number, worker)

    # --- transfers ---

    def transfer_blocks(self, request):
        """How many KV blocks a decode worker fetches: those of the prompt that it lacks."""
        fetched = request.prompt + request.generated - request.decode_cached_tokens
        return -(-fetched // self.spec.block_size)

    def fetch(self, request):
        """Post the descriptors, one a block and KV tensor; then the bytes flow."""
        request.transfer_start_s = self.now
        self.reservations += 1
        request.reserved = self.reservations
        transfer, blocks = self.spec.transfer, self.transfer_blocks(request)
        drafting = self.spec.decode.speculation
        own = (
            (drafting.draft.n_kv_tensors, drafting.draft.kv_bytes_per_token) if drafting else (0, 0)
        )
        tensors = self.model.n_kv_tensors + own[0]
        latency = transfer.setup_s + blocks * tensors * transfer.descriptor_s
        n_bytes = blocks * self.spec.block_size * (self.model.kv_bytes_per_token + own[1])
        n_bytes += self.model.state_bytes
        self.schedule(self.now + latency, partial(self.links.begin, request, n_bytes))

    def transferred(self, request):
        """The prefill worker's blocks are free, and the request can decode."""
        request.transfer_end_s = self.now
        source = self.workers[0][request.prefill_worker]
        source.release(request)
        if source.new:
            source.wake()
        request.kv_here = True
        target = self.workers[1][request.decode_worker]
        target.publish(request, request.prompt)
        target.take(request)
