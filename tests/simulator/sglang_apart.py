"""SGLang's own loops of workers that hand KV caches over, on a virtual clock: what they do.

Run by a Python that has sglang 0.5.9 and torch, with cases as `sglang_scheduler.py` takes them.
``settings`` also hold ``worker``: ``prefill``, the loop of ``disaggregation/prefill.py``. A KV
cache takes ``costs["transfer"]`` s to be transferred, and a thousandth more for each token.
"""

import contextlib
import importlib
import json
import logging
import sys

from sglang_scheduler import EndedError, VirtualScheduler, config, sglang

with config._missing_modules():
    prefill = importlib.import_module("sglang.srt.disaggregation.prefill")
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


def serve(case):
    """Return what happened to a case's requests, in the order given, and its steps."""
    for i, r in enumerate(case["requests"]):
        r["place"] = i
    worker = Prefill(case["requests"], case["settings"], case["costs"])
    with contextlib.suppress(EndedError):
        worker.event_loop_overlap_disagg_prefill()
    order = {worker.given[int(rid)]["place"]: seen for rid, seen in worker.seen.items()}
    return {"requests": [order[i] for i in sorted(order)], "steps": worker.steps}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    json.dump([serve(case) for case in json.load(sys.stdin)], sys.stdout)
