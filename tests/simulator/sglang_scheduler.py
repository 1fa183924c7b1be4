"""SGLang's own scheduler on a virtual clock, without a GPU: what it does with given requests.

Run by a Python that has sglang 0.5.9 and torch. Standard input holds cases, JSON: ``requests``
(``at``, ``prompt``, ``output``), ``settings`` and ``costs``; what happened is written as JSON. The
loop (`event_loop_overlap`), batches, admission and KV pool are SGLang's; the forward pass, the
clock and what comes over sockets are not.
"""

import contextlib
import importlib.abc
import importlib.machinery
import json
import logging
import sys
import types
from types import SimpleNamespace
from unittest.mock import MagicMock

#: Packages that scheduling does not use, where they are not installed.
_OTHERS = """
    triton sgl_kernel flashinfer setproctitle pybase64 orjson torchao xgrammar llguidance outlines
    uvloop msgspec gguf decord decord2 compressed_tensors timm partial_json_parser soundfile av
    torch_memory_saver torchcodec openai_harmony anthropic py_spy dill datasets interegular
    modelscope cuda quack apache_tvm_ffi tvm_ffi nvidia_cutlass_dsl cutlass blobfile hf_transfer
    scipy IPython einops torchaudio torchvision smg_grpc_proto
"""
#: Of SGLang itself: kernels, models and the like.
_KERNELS = """
    layers models configs lora constrained multimodal model_loader utils.hf_transformers_utils
    managers.mm_utils connector
"""
_OFF = """
    enable_priority_scheduling schedule_low_priority_values_first enable_lora enable_pdmux
    enable_hierarchical_cache enable_hicache_storage enable_metrics require_mlp_sync is_hybrid_ssm
    abort_on_priority_when_disabled current_scheduler_metrics_enabled enable_lora_overlap_loading
    is_hybrid_swa
"""
_ARGUMENTS_OFF = """
    enable_dynamic_chunking enable_prefill_delayer enable_deterministic_inference enable_mixed_chunk
    enable_custom_logit_processor enable_dp_attention disaggregation_decode_enable_offload_kvcache
"""


class _Anything(type):
    """A class that has every attribute, and is what calling it returns."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args, **more):
        return cls

    def __getitem__(cls, key):
        return cls


class Anything(metaclass=_Anything):
    """What stands for all that is left out."""


class _LeftOut(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are left out."""

    def __init__(self, *, others):
        self.others = set(_OTHERS.split()) if others else set()
        self.kernels = () if others else tuple(f"sglang.srt.{n}" for n in _KERNELS.split())

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.others or name.startswith(self.kernels or "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__, module.__file__ = "99.0.0", "absent.py"
        module.__getattr__ = lambda name: getattr(Anything, name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _LeftOut(others=False))
sys.meta_path.append(_LeftOut(others=True))

import torch  # noqa: E402
from sglang.srt import server_args  # noqa: E402
from sglang.srt.managers import schedule_policy  # noqa: E402
from sglang.srt.managers import scheduler as managers  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.managers.scheduler_recv_skipper import SchedulerRecvSkipper  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.chunk_cache import ChunkCache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

schedule_policy.is_nsa_prefill_cp_in_seq_split = lambda: False  # a function of its kernels


class EndedError(Exception):
    """All requests have been served."""


class VirtualScheduler(managers.Scheduler):
    """SGLang's scheduler; a step takes what ``costs`` say."""

    def __init__(self, requests, settings, costs):
        args = arguments(settings)
        server_args.set_global_server_args_for_scheduler(args)
        self.server_args, self.costs = args, costs
        self.given = dict(enumerate(sorted(requests, key=lambda r: r["at"])))
        self.todo = [str(i) for i in self.given]
        self.now = self.busy = 0.0
        self.steps, self.seen = [], {rid: {"retracted": 0} for rid in self.todo}
        # What Scheduler.__init__ sets of what its steps read.
        for name in _OFF.split():
            setattr(self, name, False)
        self.schedule_policy, self.page_size, self.pp_size = "fcfs", 1, 1
        self.enable_overlap = self.is_generation = True
        self.dllm_config = self.max_queued_requests = self.truncation_align_size = None
        self.priority_scheduling_preemption_threshold = 0
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.disaggregation_mode = managers.DisaggregationMode.NULL
        self.max_prefill_tokens = args.max_prefill_tokens
        self.max_running_requests = settings["seats"]
        self.num_generated_tokens = self.forward_ct_decode = 0
        self.model_config = SimpleNamespace(
            vocab_size=8, is_encoder_decoder=False, is_matryoshka=False, hidden_size=8
        )
        self.req_to_token_pool = ReqToTokenPool(settings["seats"] + 64, 4096, "cpu", False)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(
            settings["tokens"], torch.float16, "cpu", MagicMock(), False
        )
        caches = settings.get("cache", False)
        self.tree_cache = (RadixCache if caches else ChunkCache)(
            CacheInitParams(not caches, self.req_to_token_pool, self.token_to_kv_pool_allocator, 1)
        )
        self.recv_skipper = SchedulerRecvSkipper.maybe_create(args)
        self.init_running_status()
        self.init_chunked_prefill()
        self.init_schedule_policy()

    def recv_requests(self):
        if self.recv_skipper is not None:
            last = self.last_batch.forward_mode if self.last_batch is not None else None
            if not self.recv_skipper.handle(last):
                return []
        here = [rid for rid in self.todo if self.given[int(rid)]["at"] <= self.now]
        self.todo = self.todo[len(here) :]
        return here

    def process_input_requests(self, recv_reqs):
        for rid in recv_reqs:
            r = self.given[int(rid)]
            sampling = SamplingParams(max_new_tokens=r["output"], temperature=0.0)
            sampling.normalize(None)
            req = Req(rid, "", r.get("tokens") or [1] * r["prompt"], sampling, vocab_size=1 << 62)
            req.tokenizer = None
            self._add_request_to_queue(req)

    def _add_request_to_queue(self, req, is_retracted=False):
        self.seen[req.rid]["retracted"] += is_retracted
        super()._add_request_to_queue(req, is_retracted)

    def get_new_batch_prefill(self):
        self.before = len(self.running_batch.reqs)  # what it takes off the budget of mixed steps
        return super().get_new_batch_prefill()

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
        step |= {"decodes": sorted(int(r.rid) for r in decoding), "riders": len(riders)}
        self.steps.append(step | {"room": self.before - len(decoding) + len(riders)})
        own = [(int(r.rid) + 1 << 20) + len(r.output_ids) for r in batch.reqs]  # no two alike
        batch.output_ids = torch.tensor(own, dtype=torch.int64)
        none = ("copy_done", "logits_output", "extend_input_len_per_req", "num_accepted_tokens")
        return SimpleNamespace(
            end=self.busy,
            next_token_ids=batch.output_ids.clone(),
            can_run_cuda_graph=False,
            extend_logprob_start_len_per_req=None,
            **dict.fromkeys(none),
        )

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

    def nothing(self, *args, **more):
        pass

    stream_output = log_prefill_stats = log_decode_stats = log_batch_result_stats = nothing
    log_decode_stats_every_iteration = _maybe_clear_mm_inputs = _prefetch_kvcache = nothing
    maybe_send_health_check_signal = launch_batch_sample_if_needed = nothing
    maybe_collect_routed_experts = maybe_collect_customized_info = nothing
    _mamba_prefix_cache_update = nothing


def arguments(settings):
    """Return what stands in for SGLang's ServerArgs."""
    told = dict.fromkeys(_ARGUMENTS_OFF.split(), False)
    told |= {"prefill_max_requests": None, "speculative_algorithm": None, "page_size": 1}
    told |= {"disaggregation_mode": "null", "attention_backend": "torch_native"}
    told |= {"pp_max_micro_batch_size": settings["seats"], "max_prefill_tokens": 1 << 30}
    told |= {"chunked_prefill_size": settings["chunk"], "decode_log_interval": 40}
    told |= {"scheduler_recv_interval": settings["recv_interval"]}
    told |= {"schedule_conservativeness": 1.0, "enable_mamba_extra_buffer": lambda: False}
    return SimpleNamespace(**told | {"enable_mixed_chunk": settings["mixed"]})


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
