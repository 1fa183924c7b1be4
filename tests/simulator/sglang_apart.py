"""SGLang's own loops of workers that hand KV caches over, on a virtual clock: what they do.

Run by a Python that has sglang 0.5.9 and torch, with cases as `sglang_scheduler.py` takes them.
``settings`` also hold ``worker``: ``prefill``, the loop of ``disaggregation/prefill.py``, where a
KV cache takes ``costs["transfer"]`` s to be transferred and a thousandth more for each token; or
``decode``, that of ``disaggregation/decode.py``, where it comes when its prompt has been computed
by a worker that has no other, and ``reserved`` tokens are kept for each request.
"""

import contextlib
import importlib
import json
import logging
import sys
from types import SimpleNamespace

from sglang_scheduler import EndedError, VirtualScheduler, config, sglang

with config._missing_modules():
    decode = importlib.import_module("sglang.srt.disaggregation.decode")
    prefill = importlib.import_module("sglang.srt.disaggregation.prefill")
decode.poll_and_all_reduce = lambda pollers, _group: [poller.poll() for poller in pollers]
release_kv_cache = importlib.import_module("sglang.srt.mem_cache.common").release_kv_cache
Mode = sglang.scheduler.DisaggregationMode


class BootstrapQueue:
    """Requests that know at once where their KV caches go."""

    def __init__(self):
        self.queue = []

    def add(self, request, _heads):
        request.sampling_params.max_new_tokens = 1  # `_process_req`
        self.queue.append(request)

    def pop_bootstrapped(self):
        queue, self.queue = self.queue, []
        return queue


class Prefill(VirtualScheduler):
    """A prefill worker; a step of prompts takes what ``costs`` say."""

    def __init__(self, requests, settings, costs):
        super().__init__(requests, settings, costs)
        self.disaggregation_mode = Mode.PREFILL
        self.disagg_prefill_bootstrap_queue = BootstrapQueue()
        self.disagg_prefill_inflight_queue = []
        self.model_config.num_key_value_heads = 1
        self.req_to_token_pool.size = settings["seats"]
        self.req_to_token_pool.free_slots = list(range(settings["seats"]))

    def send_kv_chunk(self, request, **more):
        """Note when a KV cache has been transferred."""
        if more.get("last_chunk"):
            took = self.costs["transfer"] * (1 + len(request.origin_input_ids) / 1000)
            self.seen[request.rid]["sent"] = self.now + took

    def run_batch(self, batch, pp_proxy_tensors=None):
        tokens = sum(r.extend_input_len for r in batch.reqs)
        start = max(self.busy, self.now)
        self.busy = start + self.costs["chunk_step"] + self.costs["token"] * tokens
        self.forward_ct += 1
        prompts = {r.rid: r.extend_input_len for r in batch.reqs}
        self.steps.append({"start": start, "end": self.busy, "prompts": prompts, "decodes": []})
        result = self.result(batch, [(int(r.rid) + 1) << 20 for r in batch.reqs])
        batch.output_ids, result.end = result.next_token_ids.clone(), self.busy
        return result

    def process_batch_result_disagg_prefill(self, batch, result):
        self.now = max(self.now, result.end)
        super().process_batch_result_disagg_prefill(batch, result)
        for request in batch.reqs:
            self.seen[request.rid].setdefault("cached", request.cached_tokens)

    def process_disagg_prefill_inflight_queue(self, rids_to_check=None):
        """Free what has been transferred."""
        queue, self.disagg_prefill_inflight_queue = self.disagg_prefill_inflight_queue, []
        for request in queue:
            if self.seen[request.rid]["sent"] > self.now:
                self.disagg_prefill_inflight_queue.append(request)
                continue
            release_kv_cache(request, self.tree_cache)
            self.seen[request.rid]["finish"] = self.now

    def self_check_during_idle(self):
        """Go on to what comes next."""
        due = [self.seen[r.rid]["sent"] for r in self.disagg_prefill_inflight_queue]
        due += [self.given[int(self.todo[0])]["at"]] if self.todo else []
        if not due:
            if self.waiting_queue:
                raise RuntimeError("a request waits that never fits")
            raise EndedError
        self.now = max(self.now, min(due))


class Receiver:
    """A KV cache that comes a while after there is room for it."""

    def __init__(self, worker, request):
        self.worker, self.request, self.due = worker, request, None

    def poll(self):
        if self.due is None:
            return decode.KVPoll.WaitingForInput
        here = self.due <= self.worker.now
        return decode.KVPoll.Success if here else decode.KVPoll.Transferring

    def init(self, *_pages):
        tokens = len(self.request.origin_input_ids)
        costs = self.worker.costs
        self.due = self.worker.now + costs["chunk_step"] + costs["token"] * tokens

    def clear(self):
        """Do nothing."""


class PreallocQueue(decode.DecodePreallocQueue):
    """SGLang's own, without a KV manager."""

    def __init__(self, worker, reserved):
        self.scheduler, self.tree_cache = worker, worker.tree_cache
        self.req_to_token_pool = worker.req_to_token_pool
        self.token_to_kv_pool_allocator = worker.token_to_kv_pool_allocator
        self.token_to_kv_pool = self.token_to_kv_pool_allocator.get_kvcache()
        self.req_to_metadata_buffer_idx_allocator = decode.ReqToMetadataIdxAllocator(1 << 12)
        self.transfer_queue, self.gloo_group = worker.disagg_decode_transfer_queue, None
        self.num_reserved_decode_tokens, self.queue, self.retracted_queue = reserved, [], []

    def add(self, req, is_retracted=False):
        if is_retracted:
            req.retraction_mb_id = None
            self.retracted_queue.append(req)
        else:
            self.queue.append(decode.DecodeRequest(req, Receiver(self.scheduler, req)))


class TransferQueue(decode.DecodeTransferQueue):
    """SGLang's own, without buffers."""

    def __init__(self, worker):
        self.queue, self.gloo_group = [], None
        self.scheduler, self.tree_cache = worker, worker.tree_cache
        self.req_to_metadata_buffer_idx_allocator = decode.ReqToMetadataIdxAllocator(1 << 12)

    def _commit_transfer_to_req(self, decode_req):
        decode_req.req.output_ids.append((int(decode_req.req.rid) + 1) << 20)
        return True


class Decode(VirtualScheduler):
    """A decode worker."""

    def __init__(self, requests, settings, costs):
        super().__init__(requests, settings, costs)
        seats = settings["seats"]
        self.disaggregation_mode = Mode.DECODE
        self.server_args.disaggregation_mode = "decode"
        self.server_args.disaggregation_decode_polling_interval = 1
        self.future_map = None
        self.req_to_token_pool = decode.DecodeReqToTokenPool(
            seats, 4096, "cpu", False, 2 * seats if seats <= 32 else 0
        )
        self.tree_cache.req_to_token_pool = self.req_to_token_pool
        self.disagg_decode_transfer_queue = TransferQueue(self)
        self.disagg_decode_prealloc_queue = PreallocQueue(self, settings["reserved"])

    def run_batch(self, batch, pp_proxy_tensors=None):
        if batch.forward_mode.is_prebuilt():
            return SimpleNamespace(end=0.0, copy_done=None)
        return super().run_batch(batch)

    def self_check_during_idle(self):
        """Go on to what comes next."""
        due = [r.kv_receiver.due for r in self.disagg_decode_transfer_queue.queue]
        due += [self.given[int(self.todo[0])]["at"]] if self.todo else []
        if not due:
            if self.disagg_decode_prealloc_queue.queue or self.waiting_queue:
                raise RuntimeError("a request waits that never fits")
            raise EndedError
        self.now = max(self.now, min(due))


def serve(case):
    """Return what happened to a case's requests, in the order given, and its steps."""
    for i, r in enumerate(case["requests"]):
        r["place"] = i
    made = Prefill if case["settings"]["worker"] == "prefill" else Decode
    worker = made(case["requests"], case["settings"], case["costs"])
    with contextlib.suppress(EndedError):
        if made is Prefill:
            worker.event_loop_overlap_disagg_prefill()
        else:
            worker.event_loop_overlap_disagg_decode()
    order = {worker.given[int(rid)]["place"]: seen for rid, seen in worker.seen.items()}
    return {"requests": [order[i] for i in sorted(order)], "steps": worker.steps}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    json.dump([serve(case) for case in json.load(sys.stdin)], sys.stdout)
