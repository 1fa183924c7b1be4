"""Which decode batches to avoid: those that a larger batch beats, by model and kernels.

``python -m studies.route_by_time.batches`` prints, for each, the batches whose step takes longer
than that of a larger batch, and by how much at most. A batch activates what independent requests
of the calibration set do in the mean; 1,024 tokens of context; CUDA graphs not padded."""

import numpy as np

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import MoEBackend
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.simulator.setup.config.requests import RoutingConfig
from eldr_sim.simulator.setup.run_routing import routing_of
from eldr_sim.traces.routing.calibration import calibration_set

MODELS = ("Qwen3-30B-A3B", "Gemma-4-26B-A4B", "GPT-OSS-120B")
KERNELS: dict[str, tuple[str, MoEBackend]] = {
    "MI300X, Triton's default tiles": ("MI300X", "triton"),
    "MI300X, AITER": ("MI300X", "aiter"),
    "H100": ("H100", "auto"),
    "B200": ("B200", "auto"),
}
MOST, CONTEXT = 160, 1024


def slow_batches(model: str, gpu: str, backend: MoEBackend) -> list[tuple[int, int, float]]:
    """Return runs of batches that a larger one beats: first, last, and by how much at most, %.

    Raises InputError where there are no rows of the kernel."""
    dims = load_model(model)
    calibration = calibration_set(routing_of("trace", RoutingConfig(), dims), workload="task")
    chosen = np.asarray(calibration.decode_activation, np.float64).mean(axis=0)
    step_time = build_step_time_model(
        dims, load_gpu(gpu), max_num_seqs=MOST, max_model_len=2 * CONTEXT, moe_backend=backend,
    )  # fmt: skip
    layers = step_time.n_moe_layers
    seconds = []
    for batch in range(1, MOST + 1):
        union = (1.0 - (1.0 - chosen) ** batch).sum(axis=1)
        activated = np.resize(union, layers)
        seconds.append(step_time.decode_s(activated.tolist(), batch, CONTEXT))
    least = np.minimum.accumulate(seconds[::-1])[::-1]
    over = 100.0 * (np.array(seconds) / least - 1.0)
    slow = np.flatnonzero(over > 1.0)
    runs = np.split(slow, np.flatnonzero(np.diff(slow) > 1) + 1) if len(slow) else []
    return [(int(run[0]) + 1, int(run[-1]) + 1, float(over[run].max())) for run in runs]


if __name__ == "__main__":
    from eldr_sim.errors import InputError

    for model in MODELS:
        for name, (gpu, backend) in KERNELS.items():
            try:
                found = slow_batches(model, gpu, backend)
            except InputError as error:
                print(f"{model}, {name}: {error}")
                continue
            said = ", ".join(f"{a} to {b} ({most:.0f}%)" for a, b, most in found)
            print(f"{model}, {name}: {said or 'none'}")
