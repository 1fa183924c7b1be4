"""SGLang's scheduler without a model, a GPU, kernels or an engine process.

``sglang.srt.managers`` imports the kernels, models and servers of SGLang and some forty packages;
scheduling uses none of them. `load_sglang` lets empty modules stand for what is missing while it
imports the scheduler. Needs ``sglang`` 0.5.9 (``pip install --no-deps sglang==0.5.9``) and torch;
this file needs nothing of the package, so that a test can use it in another Python."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

#: The version whose scheduler the tests compare; others may lack what is called here.
TESTED = "0.5.9"

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
#: Attributes of SGLang's ``Scheduler`` and of its ``ServerArgs`` that are False here.
_OFF = """
    enable_priority_scheduling schedule_low_priority_values_first enable_lora enable_pdmux
    enable_hierarchical_cache enable_hicache_storage enable_metrics require_mlp_sync is_hybrid_ssm
    abort_on_priority_when_disabled current_scheduler_metrics_enabled enable_lora_overlap_loading
    is_hybrid_swa
"""
_ARGUMENTS_OFF = """
    enable_dynamic_chunking enable_prefill_delayer enable_deterministic_inference
    enable_custom_logit_processor enable_dp_attention disaggregation_decode_enable_offload_kvcache
"""


class _Anything(type):
    """A class that has every attribute, and is what calling it returns."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **more: Any) -> Any:
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls


class _Missing(metaclass=_Anything):
    """The attribute of a missing module."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        """Let SGLang's models of HTTP requests have fields of this type."""
        return importlib.import_module("pydantic_core").core_schema.any_schema()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules. ``others``: those of other packages, else those of SGLang."""

    def __init__(self, *, others: bool) -> None:
        self.others = set(_OTHERS.split()) if others else set()
        self.kernels = () if others else tuple(f"sglang.srt.{n}" for n in _KERNELS.split())

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return what makes the module, None for a module that is not missing."""
        if name.split(".")[0] in self.others or (self.kernels and name.startswith(self.kernels)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return a module that has every attribute."""
        module = types.ModuleType(spec.name)
        about: dict[str, Any] = {"__version__": "99.0.0", "__file__": "missing.py"}
        about["__getattr__"] = lambda name: getattr(_Missing, name)
        module.__dict__.update(about)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


@contextlib.contextmanager
def _missing_modules() -> Iterator[None]:
    first, last = _Finder(others=False), _Finder(others=True)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)


@cache
def load_sglang() -> SimpleNamespace:
    """Return what is used of SGLang: its modules, and ``Engine``, its scheduler without an engine.

    Raises ImportError if it is not installed or lacks a part."""
    import torch

    with _missing_modules():
        names = ("server_args", "managers.schedule_policy", "managers.scheduler",
                 "managers.schedule_batch", "managers.scheduler_recv_skipper",
                 "mem_cache.allocator", "mem_cache.cache_init_params", "mem_cache.chunk_cache",
                 "mem_cache.memory_pool", "mem_cache.radix_cache", "sampling.sampling_params",
                 "speculative.spec_info")  # fmt: skip
        version = importlib.import_module("sglang.version").__version__
        srt: dict[str, Any] = {
            name.rpartition(".")[2]: importlib.import_module(f"sglang.srt.{name}") for name in names
        }
    srt["schedule_policy"].is_nsa_prefill_cp_in_seq_split = lambda: False  # one of its kernels
    logging.getLogger("sglang").setLevel(logging.ERROR)
    loaded = SimpleNamespace(version=version, torch=torch, **srt)
    loaded.Engine = _engine_class(loaded)
    return loaded


def server_args(settings: dict[str, Any]) -> SimpleNamespace:
    """Return what stands in for SGLang's ``ServerArgs``; ``settings``: see `_engine_class`."""
    return SimpleNamespace(
        **dict.fromkeys(_ARGUMENTS_OFF.split(), False),
        prefill_max_requests=None, speculative_algorithm=None, page_size=1,
        disaggregation_mode="null", attention_backend="torch_native",
        pp_max_micro_batch_size=settings["seats"], max_prefill_tokens=1 << 30,
        chunked_prefill_size=settings["chunk"], decode_log_interval=40,
        scheduler_recv_interval=settings["recv_interval"],
        schedule_conservativeness=settings.get("conservativeness", 1.0),
        enable_mamba_extra_buffer=lambda: False, enable_mixed_chunk=settings["mixed"],
    )  # fmt: skip


def _engine_class(sglang: SimpleNamespace) -> type[Any]:
    """Return SGLang's scheduler, to be driven from outside: `recv_requests` takes what is in
    ``inbox``, `run_batch` and the clock are the caller's.

    Settings: ``seats`` (running requests), ``tokens`` (of the KV pool), ``chunk``
    (``--chunked-prefill-size``), ``recv_interval``, ``mixed``, ``cache`` (radix cache), ``overlap``
    (overlap scheduling), ``longest`` (tokens of a request) and ``conservativeness``."""
    managers, radix = sglang.scheduler, sglang.radix_cache

    class Engine(managers.Scheduler):  # type: ignore[misc, name-defined]
        """SGLang's scheduler."""

        def __init__(self, settings: dict[str, Any]) -> None:
            args = server_args(settings)
            sglang.server_args.set_global_server_args_for_scheduler(args)
            self.server_args = args
            self.inbox: list[Any] = []
            # What Scheduler.__init__ sets of what its steps read.
            for name in _OFF.split():
                setattr(self, name, False)
            self.schedule_policy, self.page_size, self.pp_size = "fcfs", 1, 1
            self.enable_overlap, self.is_generation = settings.get("overlap", True), True
            self.dllm_config = self.max_queued_requests = self.truncation_align_size = None
            self.priority_scheduling_preemption_threshold = 0
            self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
            self.spec_algorithm = sglang.spec_info.SpeculativeAlgorithm.NONE
            self.disaggregation_mode = managers.DisaggregationMode.NULL
            self.max_prefill_tokens = args.max_prefill_tokens
            self.max_running_requests = settings["seats"]
            self.num_generated_tokens = self.forward_ct_decode = 0
            self.model_config = SimpleNamespace(
                vocab_size=8, is_encoder_decoder=False, is_matryoshka=False, hidden_size=8
            )
            self.req_to_token_pool = sglang.memory_pool.ReqToTokenPool(
                settings["seats"] + 64, settings.get("longest", 4096), "cpu", False
            )
            self.token_to_kv_pool_allocator = sglang.allocator.TokenToKVPoolAllocator(
                settings["tokens"], sglang.torch.float16, "cpu", MagicMock(), False
            )
            caches = settings.get("cache", False)
            self.tree_cache = (radix.RadixCache if caches else sglang.chunk_cache.ChunkCache)(
                sglang.cache_init_params.CacheInitParams(
                    not caches, self.req_to_token_pool, self.token_to_kv_pool_allocator, 1
                )
            )
            recv_skipper = sglang.scheduler_recv_skipper.SchedulerRecvSkipper
            self.recv_skipper = recv_skipper.maybe_create(args)
            self.init_running_status()
            self.init_chunked_prefill()
            self.init_schedule_policy()

        def request(self, name: str, tokens: list[int], output: int) -> Any:
            """Return a request for this number of ``output`` tokens."""
            sampling = sglang.sampling_params.SamplingParams(
                max_new_tokens=output, temperature=0.0, ignore_eos=True
            )
            sampling.normalize(None)
            made = sglang.schedule_batch.Req(name, "", tokens, sampling, vocab_size=1 << 62)
            made.tokenizer = None
            return made

        def looks(self) -> bool:
            """Whether it looks for requests before the next batch, as the loop asks once."""
            if self.recv_skipper is None:
                return True
            last = self.last_batch.forward_mode if self.last_batch is not None else None
            return bool(self.recv_skipper.handle(last))

        def recv_requests(self) -> list[Any]:
            """Return the requests in the inbox, where it looks for any."""
            if not self.looks():
                return []
            here, self.inbox = self.inbox, []
            return here

        def process_input_requests(self, recv_reqs: list[Any]) -> None:
            """Queue new requests."""
            for request in recv_reqs:
                self._add_request_to_queue(request)

        def result(self, batch: Any, tokens: list[int]) -> Any:
            """Return the result of a batch that yields a token for each of its requests."""
            none = ("copy_done", "logits_output", "extend_input_len_per_req",
                    "num_accepted_tokens", "extend_logprob_start_len_per_req")  # fmt: skip
            return SimpleNamespace(
                next_token_ids=sglang.torch.tensor(tokens, dtype=sglang.torch.int64),
                can_run_cuda_graph=False, **dict.fromkeys(none),
            )  # fmt: skip

        def nothing(self, *args: Any, **more: Any) -> None:
            """Do nothing."""

        stream_output = log_prefill_stats = log_decode_stats = log_batch_result_stats = nothing
        log_decode_stats_every_iteration = _maybe_clear_mm_inputs = _prefetch_kvcache = nothing
        maybe_send_health_check_signal = launch_batch_sample_if_needed = nothing
        maybe_collect_routed_experts = maybe_collect_customized_info = nothing
        _mamba_prefix_cache_update = nothing

    return Engine
