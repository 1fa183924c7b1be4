"""SGLang's own scheduler, admission and KV pool as the engines of the reference model (`driver`).

The loop is that of ``srt/managers/scheduler.py``: with overlap (`event_loop_overlap`) the next
batch is planned and launched when this one starts, when the result of the one before has been
processed; otherwise when this one has ended (`event_loop_normal`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from eldr_sim.errors import InputError
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.engine_code import sglang_config
from eldr_sim.simulator.engine_code.driver import (
    EngineBlocks,
    EngineScheduler,
    Part,
    Plan,
    block_key,
    has_queue_order,
    pool_workers,
)
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.reference.worker import Worker
from eldr_sim.simulator.setup.config.engine_rules import FIRST_SHARE


@cache
def load_sglang() -> SimpleNamespace:
    """Return what is used of SGLang; raises InputError if it is not installed or lacks a part."""
    try:
        return sglang_config.load_sglang()
    except ImportError as error:
        problem = f"SGLang's scheduler cannot be imported: {error}"
        package = f"sglang=={sglang_config.TESTED}"
        allowed = f"sglang {sglang_config.TESTED} and torch, pip install --no-deps {package} torch"
        raise InputError("backend", problem, allowed) from None


class SglangBlocks(EngineBlocks):
    """The KV pool and radix cache of SGLang. It holds single tokens: a block is here if its last
    token is, since tokens stand for all before them."""

    scheduler: SglangScheduler

    def find(self, key: Any) -> Any | None:
        """Return the last token of a cached block; None if it is not cached."""
        token = self.scheduler.first_tokens.get(key)
        if token is None:
            return None
        last = token + self.size - 1
        return last if last in self.scheduler.cached_tokens() else None

    @property
    def usage(self) -> float:
        """Share of the KV pool that requests hold."""
        engine = self.scheduler.sglang
        pool = engine.token_to_kv_pool_allocator
        free = pool.available_size() + engine.tree_cache.evictable_size()
        return float(1.0 - free / pool.size)


class SglangScheduler(EngineScheduler):
    """SGLang's scheduler."""

    engine = "sglang"

    def __init__(self, worker: Worker, *, only_prompts: bool) -> None:
        super().__init__(worker, only_prompts=only_prompts)
        spec, engine = worker.cluster.spec, worker.pool.engine
        rules = engine.rules
        self.sglang = load_sglang().Engine({
            "seats": engine.max_num_seqs, "tokens": engine.n_blocks * spec.block_size,
            "chunk": engine.max_num_batched_tokens, "longest": spec.max_model_len + 8,
            "recv_interval": rules.poll_steps, "mixed": rules.mixed_steps,
            "overlap": spec.scheduler.async_scheduling, "cache": spec.enable_prefix_caching,
            "conservativeness": rules.first_share / FIRST_SHARE,
        })  # fmt: skip
        self.kv = SglangBlocks(self, spec.block_size, spec.enable_prefix_caching)
        self.requests: dict[str, Any] = {}  #: SGLang's, of those that it has not finished
        self.left: dict[str, Sequence] = {}  #: that were taken out as they ran
        self.last: Any = None  #: the batch before the next one, where it does not overlap
        self.first_tokens: dict[Any, int] = {}  #: the number of a block's first token, by its key
        self._cached: set[int] | None = None

    def token(self, request: Request, place: int) -> int:
        """Return the number of a token of a request: its own, or that of all requests with the same
        tokens up to here."""
        block, within = divmod(place, self.kv.size)
        new = len(self.first_tokens) * self.kv.size
        start = self.first_tokens.setdefault(block_key(request, block), new)
        return start + within

    def cached_tokens(self) -> set[int]:
        """Return the numbers of the tokens in the radix cache."""
        if self._cached is None:
            found: set[int] = set()
            nodes = [self.sglang.tree_cache.root_node] if self.kv.caching else []
            while nodes:
                node = nodes.pop()
                found.update(node.key.token_ids)
                nodes += node.children.values()
            self._cached = found
        return self._cached

    # --- requests come and go ---

    def give(self, name: str, request: Request) -> None:
        """Give SGLang a new request."""
        tokens = [self.token(request, place) for place in range(request.tokens)]
        wanted = request.output_len - request.generated
        self.requests[name] = self.sglang.request(name, tokens, wanted)
        self.sglang.inbox.append(self.requests[name])

    def take_out(self, name: str) -> None:
        """Take a request out of SGLang, as it does when a client leaves (`abort_request`): one that
        runs computes one more token."""
        made = self.requests.get(name)
        if made is None:
            return
        for queue in (self.sglang.inbox, self.sglang.waiting_queue):
            if made in queue:
                queue.remove(made)
                del self.requests[name]
                return
        made.to_finish = load_sglang().schedule_batch.FINISH_ABORT()
        self.left[name] = self.sequences[name]

    # --- how things stand ---

    def names_running(self) -> list[str]:
        """Return the requests that have a place in the batch."""
        return list(self.sequences)

    def has(self, name: str) -> bool:
        """Whether SGLang has a request that it has not finished."""
        return name in self.requests

    def has_unfinished(self) -> bool:
        """Whether SGLang has any such request."""
        return bool(self.requests)

    # --- a step is planned ---

    def plan_one(self) -> None:
        """Go once round SGLang's loop, up to the launch of a batch."""
        self.give_arrived()
        batch = self._next_batch()
        # An idle engine goes round until it looks for requests.
        for _ in range(self.sglang.server_args.scheduler_recv_interval):
            if batch is None and self.sglang.inbox and not self.in_flight:
                batch = self._next_batch()
        if batch is None:
            return
        decoding = batch.reqs
        if batch.forward_mode.is_extend():
            decoding = batch.decoding_reqs or []
        parts, first = [], {}
        for made in batch.reqs:
            name, found = made.rid, len(made.prefix_indices)
            if name not in self.sequences and name in self.of:
                self.sequences[name] = Sequence(self.of[name], 0, 0, 0)
                if self.of[name].prefill_start_s < 0:
                    first[name] = found
            sequence = self.sequences[name] if name in self.of else self.left[name]
            prompt = made not in decoding
            tokens = made.extend_input_len if prompt else 1
            samples = not (prompt and made is batch.chunked_req)
            parts.append(Part(name, sequence, tokens, 0, samples, found))
        self.sglang.forward_ct += 1
        torch = load_sglang().torch
        batch.output_ids = torch.zeros(len(parts), dtype=torch.int64)
        self.plans.append(Plan((batch, batch.copy()), parts, first))

    def _next_batch(self) -> Any:
        engine = self.sglang
        if self.ahead:
            engine.last_batch = self.executing.output[0] if self.executing is not None else None
        else:
            engine.last_batch, self.last = self.last, None
        engine.process_input_requests(engine.recv_requests())
        waited = {made.rid for made in engine.waiting_queue}
        engine.cur_batch = engine.get_next_batch_to_run()
        self._cached = None
        for made in engine.waiting_queue:
            if made.rid not in waited:
                self.note_preemption(made.rid)
        if engine.cur_batch is None and not self.in_flight:
            self.rest()
        return engine.cur_batch

    def rest(self) -> None:
        """Do what an idle engine does (`self_check_during_idle`)."""
        self.sglang.new_token_ratio = self.sglang.init_new_token_ratio

    # --- a step has ended ---

    def deliver(self, plan: Plan, sampled: list[list[int]]) -> dict[str, tuple[int, bool]]:
        """Give SGLang the result of a batch."""
        self.last, batch = plan.output
        before = {made.rid: len(made.output_ids) for made in batch.reqs if made.rid in self.of}
        tokens = [
            self.token(part.sequence.request, len(made.origin_input_ids) + len(made.output_ids))
            for part, made in zip(plan.parts, batch.reqs, strict=True)
        ]
        self.sglang.process_batch_result(batch, self.sglang.result(batch, tokens))
        self._cached = None
        kept = {}
        for made in batch.reqs:
            if made.rid in before:
                n = len(made.output_ids) - before[made.rid]
                kept[made.rid] = n, bool(made.finished())
            if made.finished():
                self.requests.pop(made.rid, None)
                self.left.pop(made.rid, None)
        if not (self.requests or self.arrived or self.plans):
            self.rest()
        return kept


def refuse(inputs: RunInputs) -> None:
    """Raise InputError for what SGLang's scheduler is not given here."""
    spec = inputs.spec
    engines = [pool.engine for pool in spec.pools]
    refused = {
        "engine": any(engine.engine != "sglang" for engine in engines),
        "topology": any(pool.then >= 0 for pool in spec.pools),
        "enable_expert_parallel": any(engine.group is not None for engine in engines),
        "speculative_config": any(engine.speculation is not None for engine in engines),
        "queue_order": has_queue_order(inputs),
        "aging_s": spec.aging_s < math.inf,
        "model": spec.windows.state > 0 or spec.windows.most > 0,
    }
    for field, unknown in refused.items():
        if unknown:
            allowed = "--engine sglang" if field == "engine" else "--backend compiled"
            raise InputError(field, "the sglang backend does not support it", allowed)


def version() -> str:
    """Return the version of the SGLang that is installed."""
    return str(load_sglang().version)


def workers(inputs: RunInputs) -> Mapping[str, type[Worker]]:
    """Return the class of each pool's workers, with SGLang's scheduler.

    Raises InputError where SGLang is not installed, and for what it is not given here."""
    refuse(inputs)
    load_sglang()
    return pool_workers(inputs.spec, SglangScheduler, lambda pool, takes_over: {})
