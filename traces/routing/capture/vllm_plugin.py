"""vLLM plug-in: log the experts of every step while ``ELDR_SIM_CAPTURE`` names a folder.

vLLM loads it in each of its processes (``vllm.general_plugins``); without the variable `register`
imports nothing. With it, the model runner logs after every step what each gate chose (`step_log`);
``eldr-sim trace capture collect`` makes a trace of it. For vLLM's model runner V1 in eager mode (a
replayed CUDA graph runs no Python), one pipeline stage and data-parallel rank, no speculative
decoding; anything else stops the engine at start with one line. Written against vLLM 0.32."""

import functools
import os
from typing import Any

ENVIRONMENT_VARIABLE = "ELDR_SIM_CAPTURE"
"""Environment variable that names the folder of the log; without it, capture is off."""


def register() -> None:
    """Start capturing in this process, if the environment asks for it."""
    folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if not folder:
        return
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _patch(GPUModelRunner, folder)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _patch(CPUModelRunner, folder)
    else:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as ModelRunnerV2

        ModelRunnerV2.load_model = _refuse


def _refuse(*_: Any, **__: Any) -> None:
    """Stand in for the model runner V2, whose steps this plug-in does not see."""
    raise ValueError(
        f"{ENVIRONMENT_VARIABLE}: capturing needs VLLM_USE_V2_MODEL_RUNNER=0 (or unset the "
        "variable and use --enable-return-routed-experts)"
    )


def _patch(runner: Any, folder: str) -> None:
    """Wrap the methods that a model runner class itself defines, once."""
    if "_eldr_sim_capture" in vars(runner):
        return
    runner._eldr_sim_capture = True
    if "load_model" in vars(runner):
        load_model = runner.load_model

        @functools.wraps(load_model)
        def load_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = load_model(self, *args, **kwargs)
            if not hasattr(self, "_eldr_sim_recorder"):
                self._eldr_sim_recorder = _attach(self, folder)
            return result

        runner.load_model = load_and_attach
    if "execute_model" in vars(runner):
        execute_model = runner.execute_model

        @functools.wraps(execute_model)
        def execute_and_log(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = execute_model(self, scheduler_output, *args, **kwargs)
            recorder = getattr(self, "_eldr_sim_recorder", None)
            if recorder is not None and scheduler_output.total_num_scheduled_tokens:
                recorder.step(self.input_batch.req_ids, scheduler_output)
            return result

        runner.execute_model = execute_and_log


def _attach(runner: Any, folder: str) -> "_Recorder | None":
    """Attach to the gates of a loaded model; None on ranks whose gates repeat those of rank 0."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.logger import init_logger

    parallel = runner.parallel_config
    problems = {
        "--enforce-eager": not runner.model_config.enforce_eager,
        "--pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
        "--data-parallel-size 1": parallel.data_parallel_size > 1,
        "no speculative decoding": runner.speculative_config is not None,
    }
    wanted = [name for name, problem in problems.items() if problem]
    if wanted:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: capturing needs {', '.join(wanted)}")
    if get_tensor_model_parallel_rank() != 0:
        return None
    if runner.cache_config.enable_prefix_caching:
        init_logger(__name__).warning(
            "%s: prompt tokens found in the prefix cache are never computed, so requests that "
            "share a prefix cannot be collected: start with --no-enable-prefix-caching",
            ENVIRONMENT_VARIABLE,
        )
    return _Recorder(runner, folder)


class _Recorder:
    """Recorder of what each gate chooses in a step, logged at the end of the step."""

    def __init__(self, runner: Any, folder: str) -> None:
        self._folder = folder
        self._runner = runner
        self._log: Any = None
        self._chosen: dict[int, Any] = {}
        self._n_experts = 0
        from eldr_sim.traces.routing.capture.gates import decoder_layer

        self._layers: list[int] = []
        for name, module in runner.get_model().named_modules():
            router = getattr(module, "router", None)
            layer = decoder_layer(name)
            if layer is not None and hasattr(router, "_compute_routing"):
                self._listen(router, layer)
        if not self._layers:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE}: {type(runner.get_model()).__name__} has no MoE layer "
                "with a router that this plug-in knows (a BaseRouter of vLLM 0.32)"
            )
        self._layers.sort()

    def _listen(self, router: Any, layer: int) -> None:
        compute = router._compute_routing

        @functools.wraps(compute)
        def compute_and_keep(*args: Any, **kwargs: Any) -> Any:
            weights, ids = compute(*args, **kwargs)
            # Kernels do not sort the chosen experts; rank them by weight.
            order = weights.argsort(dim=-1, descending=True, stable=True)
            self._chosen[layer] = ids.gather(-1, order)
            return weights, ids

        router._compute_routing = compute_and_keep
        self._layers.append(layer)
        self._n_experts = int(router.global_num_experts)

    def step(self, order: list[str], scheduled: Any) -> None:
        """Log the step that has just run: requests in the order of their rows."""
        import torch

        tokens = scheduled.num_scheduled_tokens
        cached = scheduled.scheduled_cached_reqs
        start = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prompts = {}
        for new in scheduled.scheduled_new_reqs:
            start[new.req_id] = new.num_computed_tokens
            prompts[new.req_id] = list(new.prompt_token_ids or [])
        rows = [(name, start[name], tokens[name]) for name in order if name in tokens]
        total = scheduled.total_num_scheduled_tokens
        short = [k for k in self._layers if k not in self._chosen or len(self._chosen[k]) < total]
        if short or sum(count for _, _, count in rows) != total:
            raise RuntimeError(
                f"{ENVIRONMENT_VARIABLE}: layers {short} did not show the experts of all {total} "
                "tokens of a step (a fused or sequence-parallel MoE kernel)"
            )
        experts = torch.stack([self._chosen[layer][:total] for layer in self._layers], dim=1)
        self._chosen.clear()
        if self._log is None:
            self._log = self._open(int(experts.shape[-1]))
        self._log.step(rows, experts.cpu().numpy(), prompts)

    def _open(self, top_k: int) -> Any:
        import torch
        import vllm

        from eldr_sim.traces.routing.capture.step_log import Header, StepLog

        config = self._runner.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        return StepLog(
            self._folder,
            Header(
                model=str(config.model),
                layers=self._layers,
                n_decoder_layers=int(config.hf_text_config.num_hidden_layers),
                n_experts=self._n_experts,
                top_k=top_k,
                engine=f"vLLM {vllm.__version__}, plug-in on its routers, {dtype} on "
                f"{self._runner.device.type}",
                tool_versions={"vllm": vllm.__version__, "torch": torch.__version__},
            ),
        )
