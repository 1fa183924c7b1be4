"""A first-come scheduler with vLLM's interface, and KV blocks for all: what the vllm backend calls.

It stands in for vLLM where that is not installed: it tests what the backend does around a scheduler
(clock, steps, KV transfers, ends), not the scheduler."""

from collections import deque
from types import SimpleNamespace


class Request:
    """A request; ``promised`` tokens are computed in steps whose output is still to come."""

    def __init__(self, *, request_id, prompt_token_ids, sampling_params, **_):
        self.request_id, self.num_prompt_tokens = request_id, len(prompt_token_ids)
        self.wanted, self.block_hashes, self.status = sampling_params.max_tokens, [], "waiting"
        self.num_output_tokens = self.promised = self.computed = 0
        self.is_prefill_chunk = False

    @property
    def num_tokens(self):
        return self.num_prompt_tokens + self.num_output_tokens

    def is_finished(self):
        return self.status in ("done", "aborted")


class Connector:
    """What `vllm_connector.SimulatedConnector` is to vLLM."""

    def __init__(self, hands_over):
        self.loading, self.held, self.hands_over = [], set(), hands_over

    fetches = staticmethod(lambda name, cached: False)


class Scheduler:
    """Running requests first, then waiting ones as they came, within seats and token budget."""

    def __init__(self, config, spec, pool, window):
        self.seats, self.budget = pool.engine.max_num_seqs, pool.engine.max_num_batched_tokens
        self.ahead = spec.scheduler.async_scheduling
        self.connector = Connector(pool.then >= 0) if config else None
        self.requests, self.running, self.waiting = {}, [], deque()
        self.kv_cache_manager = SimpleNamespace(usage=0.0)

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_unfinished_requests(self):
        return bool(self.running or self.waiting)

    def schedule(self, throttle_prefills=False):
        budget, seats, tokens = self.budget, self.seats, {}
        first, begun = [], [(r.request_id, r.computed) for r in self.running]
        for request in self.running:
            if request.num_output_tokens + request.promised < request.wanted:
                budget -= self.give(request, budget, tokens)
        for request in list(self.waiting):
            name = request.request_id
            if request.status == "loading":
                continue
            if request.status == "waiting" and self.connector and self.connector.fetches(name, 0):
                request.status = "loading"
                self.connector.loading.append(name)
                continue
            if len(self.running) == seats or not budget:
                break
            self.waiting.remove(request)
            first.append(SimpleNamespace(req_id=name, num_computed_tokens=request.computed))
            request.status = "running"
            self.running.append(request)
            budget -= self.give(request, budget, tokens)
        cached = SimpleNamespace(
            req_ids=[name for name, _ in begun], num_computed_tokens=[n for _, n in begun]
        )
        return SimpleNamespace(
            num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={}, preempted_req_ids=set(),
            scheduled_new_reqs=first, scheduled_cached_reqs=cached,
        )  # fmt: skip

    def give(self, request, budget, tokens):
        n = min(request.num_tokens + request.promised - request.computed, budget)
        if n <= 0:
            return 0
        tokens[request.request_id] = n
        request.computed += n
        request.is_prefill_chunk = request.computed < request.num_tokens + request.promised
        request.promised += not request.is_prefill_chunk
        return n

    def update_from_output(self, output, told):
        for name, sampled in zip(told.req_ids, told.sampled_token_ids, strict=True):
            request = self.requests.get(name)
            if request is None or request.is_finished() or not sampled:
                continue
            request.num_output_tokens += 1
            request.promised -= 1
            if request.num_output_tokens == request.wanted:
                request.status = "done"
                self.running.remove(request)
                if self.connector and self.connector.hands_over:
                    self.connector.held.add(name)
                else:
                    del self.requests[name]
        events = told.kv_connector_output
        for name in events.finished_recving if events else ():
            request = self.requests[name]
            request.status, request.computed = "here", request.num_tokens - 1
        for name in events.finished_sending if events else ():
            del self.requests[name]

    def finish_requests(self, name, status):
        request = self.requests[name]
        (self.running if request in self.running else self.waiting).remove(request)
        if request.status != "loading":
            del self.requests[name]
        request.status = "aborted"


class _Output(SimpleNamespace):
    def __init__(self, req_ids, places, sampled=(), kv_connector_output=None):
        super().__init__(
            req_ids=req_ids, sampled_token_ids=list(sampled),
            kv_connector_output=kv_connector_output,
        )  # fmt: skip


MODULE = SimpleNamespace(
    version="0", Request=Request, SamplingParams=SimpleNamespace, ModelRunnerOutput=_Output,
    KVConnectorOutput=SimpleNamespace, DraftTokenIds=None,
    RequestStatus=SimpleNamespace(WAITING_FOR_REMOTE_KVS="loading", FINISHED_ABORTED="aborted"),
)  # fmt: skip
