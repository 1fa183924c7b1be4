"""SGLang's own scheduler on a virtual clock, without a GPU: what it does with given requests.

Run by a Python that has sglang 0.5.9 and torch. Standard input holds cases, JSON: ``requests``
(``at``, ``prompt``, ``output``), ``settings`` and ``costs``; what happened is written as JSON. The
loop (`event_loop_overlap`), batches, admission and KV pool are SGLang's; the forward pass, the
clock and what comes over sockets are not.
"""

import contextlib
import importlib.util
import json
import logging
import sys
from pathlib import Path

#: This Python need not have the package: what loads SGLang is read from its file.
_LOADER = Path(__file__).parents[2] / "simulator" / "engine_code" / "sglang_config.py"


def load_config():
    """Return the module that loads SGLang."""
    spec = importlib.util.spec_from_file_location("sglang_config", _LOADER)
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    return config


config = load_config()
sglang = config.load_sglang()


class EndedError(Exception):
    """All requests have been served."""


class VirtualScheduler(sglang.Engine):
    """SGLang's scheduler; a step takes what ``costs`` say."""

    def __init__(self, requests, settings, costs):
        super().__init__(settings)
        self.costs = costs
        self.given = dict(enumerate(sorted(requests, key=lambda r: r["at"])))
        self.todo = [str(i) for i in self.given]
        self.now = self.busy = 0.0
        self.steps, self.seen = [], {rid: {"retracted": 0} for rid in self.todo}

    def recv_requests(self):
        if not self.looks():
            return []
        here = [rid for rid in self.todo if self.given[int(rid)]["at"] <= self.now]
        self.todo = self.todo[len(here) :]
        return here

    def process_input_requests(self, recv_reqs):
        for rid in recv_reqs:
            r = self.given[int(rid)]
            tokens = r.get("tokens") or [1] * r["prompt"]
            req = self.request(rid, tokens, r["output"])
            req.sampling_params.ignore_eos = False  # else it looks ahead (`add_one_req_ignore_eos`)
            self._add_request_to_queue(req)

    def _add_request_to_queue(self, req, is_retracted=False):
        self.seen[req.rid]["retracted"] += is_retracted
        super()._add_request_to_queue(req, is_retracted)

    def run_batch(self, batch, pp_proxy_tensors=None):
        """Let a step begin when the one before has ended; it is known at once when it ends."""
        decoding = list(batch.decoding_reqs or ()) if batch.forward_mode.is_extend() else batch.reqs
        prompts = [(r, r.extend_input_len) for r in batch.reqs if r not in decoding]
        ends = [r for r, _ in prompts if r is not batch.chunked_req]
        tokens = sum(n for _, n in prompts) - len(ends)
        # Who has its last token in a step that is under way rides in this one; alone, for nothing
        # where ``riders`` cost nothing.
        due = {r.rid for r in self.result_queue[-1][0].reqs} if self.result_queue else set()
        riders = [
            r
            for r in decoding
            if len(r.output_ids) + (r.rid in due) >= r.sampling_params.max_new_tokens
        ]
        busy = ends or (decoding if self.costs["riders"] else len(decoding) > len(riders))
        took = (self.costs["chunk_step"] + self.costs["token"] * tokens) * (tokens > 0)
        took += self.costs["step"] * bool(busy)
        start = max(self.busy, self.now)
        self.busy = start + took
        self.forward_ct += 1
        step = {"start": start, "end": self.busy, "prompts": {r.rid: n for r, n in prompts}}
        self.steps.append(step | {"decodes": sorted(int(r.rid) for r in decoding)})
        own = [(int(r.rid) + 1 << 20) + len(r.output_ids) for r in batch.reqs]  # no two alike
        result = self.result(batch, own)
        batch.output_ids, result.end = result.next_token_ids.clone(), self.busy
        return result

    def process_batch_result(self, batch, result):
        self.now = max(self.now, result.end)
        super().process_batch_result(batch, result)
        for req in batch.reqs:
            seen = self.seen[req.rid]
            seen.setdefault("cached", req.cached_tokens)
            if req.output_ids:
                seen.setdefault("first", self.now)
            if req.finished():
                seen.setdefault("finish", self.now)

    def self_check_during_idle(self):
        self.new_token_ratio = self.init_new_token_ratio
        if self.waiting_queue:
            raise RuntimeError("a request waits that never fits")
        if not self.todo:
            raise EndedError
        self.now = max(self.now, self.given[int(self.todo[0])]["at"])


def serve(case):
    """Return what happened to a case's requests, in the order given, and its steps."""
    for i, r in enumerate(case["requests"]):
        r["place"] = i
    scheduler = VirtualScheduler(case["requests"], case["settings"], case["costs"])
    with contextlib.suppress(EndedError):
        scheduler.event_loop_overlap()
    order = {scheduler.given[int(rid)]["place"]: seen for rid, seen in scheduler.seen.items()}
    return {"requests": [order[i] for i in sorted(order)], "steps": scheduler.steps}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    json.dump([serve(case) for case in json.load(sys.stdin)], sys.stdout)
