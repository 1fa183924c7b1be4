"""vLLM plug-in that times every step of an engine if ``ELDR_SIM_TIMING`` names a folder.

vLLM loads it in each of its processes through the entry-point group ``vllm.general_plugins``.
Without the variable `register` returns at once and imports nothing.
``validation/live/README.md`` describes the two files that it writes.

Steps with a request named ``forced-...`` are for calibration: their routing is
replaced by random choices from a set of experts; its size cycles through :data:`FORCED_LEVELS`
counts from top-k to all, one per step; ``forced-level3-`` keeps the count of level 3.

On a CPU it also works around disturbances in vLLM 0.32: the NIXL connector pins the compute threads
of all engines to the last core, NIXL's progress thread takes most of a core, engines wait for their
workers in a busy loop, and a prefill engine with unfetched KV cache polls its worker a thousand
times a second."""

import functools
import inspect
import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

TIMING_VARIABLE = "ELDR_SIM_TIMING"
FORCED_PREFIX = "forced-"
FORCED_LEVELS = 8
_LEVEL = re.compile(rf"{FORCED_PREFIX}level(\d)-")

_NIXL_PROGRESS_US = 1000
_POLL_S, _IDLE_POLL_S, _IDLE_POLLS = 1e-4, 1e-3, 100
_ENGINE_BUSY_S, _WORKER_BUSY_S = 1.0, 0.02  # poll fast for this long after a message
_log: IO[str] | None = None
_forced: dict[str, Any] = {"on": False, "step": 0, "level": None, "ids": {}}
_process: dict[str, bool] = {"worker": False}


def register() -> None:
    """Start timing in this process if the environment asks for it."""
    folder = os.environ.get(TIMING_VARIABLE)
    if not folder:
        return
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if "_eldr_sim_timing" in vars(EngineCore):
        return
    EngineCore._eldr_sim_timing = True
    _time_engine(EngineCore, EngineCoreProc, folder)
    _time_worker(GPUModelRunner, folder)
    _time_transfers(folder)
    _force_routing()
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _time_worker(CPUModelRunner, folder)
        _spare_the_cores(EngineCoreProc)


def _write(folder: str, kind: str, line: dict[str, Any]) -> None:
    global _log
    if _log is None:
        base = Path(folder)
        base.mkdir(parents=True, exist_ok=True)
        _log = (base / f"{kind}-{os.getpid()}.jsonl").open("w", encoding="utf-8")
    _log.write(json.dumps(line, separators=(",", ":")) + "\n")
    _log.flush()


def _time_engine(core: Any, process: Any, folder: str) -> None:
    """Log the steps of the engine's loop and the arrivals of requests."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, step, received = (
        Scheduler.schedule,
        process._process_engine_step,
        core.preprocess_add_request,
    )

    @functools.wraps(schedule)
    def schedule_and_keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        self._eldr_sim_scheduled = output.num_scheduled_tokens
        return output

    @functools.wraps(step)
    def step_and_log(self: Any) -> Any:
        start = time.monotonic()
        executed = step(self)
        tokens = getattr(self.scheduler, "_eldr_sim_scheduled", None)
        if executed and tokens:
            if _log is None:
                _write(folder, "engine", {"engine": _describe(self)})
            line = {"start": start, "end": time.monotonic(), "tokens": tokens}
            _write(folder, "engine", line)
        return executed

    @functools.wraps(received)
    def receive_and_log(self: Any, request: Any) -> Any:
        if _log is None:
            _write(folder, "engine", {"engine": _describe(self)})
        _write(folder, "engine", {"received": request.request_id, "at": time.monotonic()})
        return received(self, request)

    Scheduler.schedule = schedule_and_keep
    process._process_engine_step = step_and_log
    core.preprocess_add_request = receive_and_log


def _describe(engine: Any) -> dict[str, int]:
    config = engine.vllm_config
    return {
        "max_num_seqs": int(config.scheduler_config.max_num_seqs),
        "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "block_size": int(config.cache_config.block_size),
        "n_blocks": int(config.cache_config.num_gpu_blocks or 0),
        "max_model_len": int(config.model_config.max_model_len),
    }


class _Stopwatch:
    """Timer of the calls in a step, in order, by the host's clock or by CUDA events."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._spans: list[tuple[Any, Any]] = []

    def wrap(self, module: Any) -> None:
        """Time every forward call of a module."""
        forward = module.forward

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = forward(*args, **kwargs)
            self._spans.append((start, self._now()))
            return result

        module.forward = timed

    def take(self) -> list[float]:
        """Return the spans of the step and forget them."""
        spans, self._spans = self._spans, []
        if self._cuda:
            return [start.elapsed_time(end) / 1e3 for start, end in spans]
        return [end - start for start, end in spans]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _time_worker(runner: Any, folder: str) -> None:
    """Log the forward passes of the model, with MoE and attention timed separately."""
    if "load_model" in vars(runner):
        load_model = runner.load_model

        @functools.wraps(load_model)
        def load_and_wrap(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = load_model(self, *args, **kwargs)
            _process["worker"] = True
            drafts = self.speculative_config
            synthetic = drafts is not None and drafts.rejection_sample_method == "synthetic"
            if synthetic and self.device.type == "cpu":
                prescribe_acceptance()
            if not hasattr(self, "_eldr_sim_watches"):
                self._eldr_sim_watches = _watch(self)
            return result

        runner.load_model = load_and_wrap
    if "execute_model" in vars(runner):
        execute_model = runner.execute_model

        @functools.wraps(execute_model)
        def execute_and_log(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            moe, attention, probe = self._eldr_sim_watches
            moe.take()
            attention.take()  # calls of warm-up runs
            names = scheduled.num_scheduled_tokens
            _forced["on"] = any(FORCED_PREFIX in name for name in names)
            _forced["level"] = _level(names) if _forced["on"] else None
            # Before the forward pass, whose routing is what capturing has to see last.
            probed = probe() if probe is not None and scheduled.total_num_scheduled_tokens else None
            start = time.monotonic()
            result = execute_model(self, scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                if self.device.type == "cuda":
                    import torch

                    torch.cuda.synchronize()
                end = time.monotonic()
                _forced["step"] += 1
                line = {
                    "start": start,
                    "end": end,
                    "moe": moe.take(),
                    "attention": attention.take(),
                    "probe": probed,
                }
                _write(folder, "worker", line)
            return result

        runner.execute_model = execute_and_log


class _Probe:
    """One token through the first MoE layer, timed before every step: how fast the core is then. A
    virtual machine's cores change speed with what other machines on the host do, by a factor of two
    within seconds."""

    def __init__(self, runner: Any, layers: list[Any]) -> None:
        import torch

        # vLLM's MoE kernel uses AMX, for which a process must ask Linux first. Others do that for
        # it, in engines with a KV connector only in the first step, which comes after a probe.
        torch.cpu._init_amx()
        self._layer = layers[0].forward  # not yet timed
        hidden = runner.model_config.get_hidden_size()
        self._token = torch.ones(1, hidden, dtype=runner.dtype)
        self._scores = torch.zeros(1, layers[0].router.global_num_experts, dtype=runner.dtype)
        self._config = runner.vllm_config

    def __call__(self) -> float:
        """Return the seconds it took."""
        from vllm.forward_context import set_forward_context

        start = time.perf_counter()
        with set_forward_context(None, self._config):
            self._layer(self._token, self._scores)
        return time.perf_counter() - start


def _watch(runner: Any) -> tuple[_Stopwatch, _Stopwatch, _Probe | None]:
    """Time the MoE layers and the attention of a loaded model, and on a CPU the core."""
    from vllm.model_executor.layers.attention.attention import Attention

    cuda = runner.device.type == "cuda"
    moe, attention = _Stopwatch(cuda), _Stopwatch(cuda)
    modules = list(runner.get_model().modules())
    layers = [m for m in modules if hasattr(getattr(m, "router", None), "_compute_routing")]
    probe = None if cuda or not layers else _Probe(runner, layers)
    for module in modules:
        if module in layers:
            moe.wrap(module)
        elif isinstance(module, Attention):
            attention.wrap(module)
    return moe, attention, probe


def _time_transfers(folder: str) -> None:
    """Log every KV transfer that a decode engine pulls over NIXL."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
            NixlBaseConnectorWorker,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
            NixlPullConnectorWorker,
        )
    except ImportError:
        return
    begun: dict[str, float] = {}
    load, done = (
        NixlPullConnectorWorker.start_load_kv,
        NixlBaseConnectorWorker.get_transfer_results,
    )

    @functools.wraps(load)
    def load_and_note(self: Any, metadata: Any) -> Any:
        now = time.monotonic()
        begun.update((name, now) for name in metadata.reqs_to_recv)
        return load(self, metadata)

    @functools.wraps(done)
    def done_and_log(self: Any) -> Any:
        result = done(self)
        for name in result.finished_recving or ():
            if name in begun:
                span = {"pulled": name, "start": begun.pop(name), "end": time.monotonic()}
                _write(folder, "worker", span)
        return result

    NixlPullConnectorWorker.start_load_kv = load_and_note
    NixlBaseConnectorWorker.get_transfer_results = done_and_log


def _force_routing() -> None:
    """Wrap the choice of every MoE gate."""
    from vllm.model_executor.layers.fused_moe import layer  # noqa: F401  (imports all routers)
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    pending = [BaseRouter]
    while pending:
        router = pending.pop()
        pending += router.__subclasses__()
        if "_compute_routing" in vars(router):
            _force(router)


def _force(router: Any) -> None:
    compute = router._compute_routing

    @functools.wraps(compute)
    def forced(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = compute(self, *args, **kwargs)
        if not _forced["on"]:
            return weights, ids
        level = _forced["level"]
        if level is None:
            level = _forced["step"] % FORCED_LEVELS
        key = (*ids.shape, level)
        if key not in _forced["ids"]:
            _forced["ids"][key] = _spread(ids, level, self.global_num_experts)
        return weights, _forced["ids"][key]

    router._compute_routing = forced


def _level(names: Iterable[str]) -> int | None:
    """Return the level that the first of these names asks for."""
    found = next(filter(None, map(_LEVEL.search, names)), None)
    return None if found is None else int(found[1]) % FORCED_LEVELS


def _spread(ids: Any, level: int, n_experts: int) -> Any:
    """Return random choices, as gates vary, among a set of experts that grows with the level."""
    import torch

    tokens, top_k = ids.shape
    size = round(top_k + (n_experts - top_k) * level / (FORCED_LEVELS - 1))
    generator = torch.Generator().manual_seed(FORCED_LEVELS * tokens + level)
    experts = torch.randperm(n_experts, generator=generator)[:size]
    places = torch.rand(tokens, size, generator=generator).argsort(dim=1)[:, :top_k]
    return experts[places].to(ids)


def _spare_the_cores(process: Any) -> None:
    """Keep the threads of engines on a CPU from disturbing each other (vLLM 0.32)."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        # A worker gets its next step at once, or the engine has none.
        busy_s = _WORKER_BUSY_S if _process["worker"] else _ENGINE_BUSY_S
        recent = time.monotonic() <= self.last_read + busy_s
        time.sleep(_POLL_S if recent else _IDLE_POLL_S)

    shm_broadcast.SpinCondition.wait = wait
    step = process._process_engine_step

    @functools.wraps(step)
    def step_or_rest(self: Any) -> Any:
        executed = step(self)
        if not executed and not self.scheduler.has_unfinished_requests():
            for _ in range(_IDLE_POLLS):
                if not (self.scheduler.has_requests() and self.input_queue.empty()):
                    break
                time.sleep(_IDLE_POLL_S)
        return executed

    process._process_engine_step = step_or_rest
    try:
        from nixl import _api
    except ImportError:
        return
    base = _api.nixlBind.nixlAgentConfig

    class Config(base):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _NIXL_PROGRESS_US if name == "pthrDelay" else value)

    _api.nixlBind.nixlAgentConfig = Config


_KERNEL = "vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel"


def prescribe_acceptance() -> None:
    """Let vLLM's sampler on a CPU take ``synthetic_acceptance_rates``."""
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    sample = cpu_triton_utils._rejection_random_sample_kernel_impl
    signature = inspect.signature(sample)

    @functools.wraps(sample)
    def sample_or_prescribe(*given: Any, **named: Any) -> None:
        told = signature.bind(*given, **named).arguments
        if told.get("SYNTHETIC_MODE"):
            told["target_probs"], told["uniform_probs"] = accepting(
                told["cu_num_draft_tokens"], told["draft_token_ids"], told["uniform_probs"],
                told["synthetic_conditional_rates"], told["vocab_size"],
            )  # fmt: skip
            told |= {"draft_probs": None, "NO_DRAFT_PROBS": True, "SYNTHETIC_MODE": False}
        sample(**told)

    register_kernels({_KERNEL: sample_or_prescribe})


def accepting(ends: Any, drafts: Any, uniform: Any, rates: Any, vocab_size: int) -> tuple[Any, Any]:
    """Return probabilities of tokens and draws with which a draft is accepted at its rate: if its
    probability is not below the draw. ``ends``: drafts up to each request's last, int
    ``[requests]``; ``drafts``, ``uniform``: ``[drafts]``; ``rates``: conditional, by place."""
    import torch

    counts = torch.diff(ends.to(torch.int64), prepend=torch.zeros(1, dtype=torch.int64))
    starts = torch.repeat_interleave(ends.to(torch.int64) - counts, counts)
    place = torch.arange(len(drafts)) - starts
    target = torch.zeros(len(drafts), vocab_size)
    tokens = drafts.to(torch.int64)
    accepted = (uniform < rates[place]) & (tokens >= 0)  # places without a draft hold -1
    target[torch.arange(len(drafts)), tokens.clamp(min=0)] = accepted.to(torch.float32)
    return target, torch.full_like(uniform, 0.5)
