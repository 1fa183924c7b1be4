"""Distinct experts of live decode steps, beside those that the requests' prompts foretell.

A router knows a request's prompt, not the experts of its answer. What it can say of a step is the
expected union of the activations that it predicts (`policies.routing.activation`), fitted here on
the calibration requests of ELDR's offline fit, which no load contains.
"""

from typing import Any

import numpy as np
import pandas as pd

from eldr_sim.policies.routing.activation import cached_activation
from eldr_sim.policies.routing.unions import log_idle, on_grid
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.validation.live.live_run import LiveRun
from eldr_sim.validation.live.setup_calibration import calibrated_requests
from eldr_sim.validation.live.steps import compositions_of

Row = dict[str, Any]


def foretold_unions(run: LiveRun, calibration: RoutingTrace) -> Row:
    """Return the mean distinct experts of a layer in steps that decode two requests or more.

    ``live``: as the engine counted them; ``by_prompts``, ``by_mean``: as the prompts foretell them,
    and as the mean of the calibration requests does, each with its mean absolute error, %;
    ``explained_percent``: how much of the variance between live steps of a batch size the prompts
    explain (below 0: less than the mean of these steps does). Figures are None without such steps.
    """
    model = cached_activation(calibrated_requests(calibration))
    counts = run.trace.prompt_counts(np.arange(run.trace.n_requests))
    log = np.array([log_idle(on_grid(model.predict(each))) for each in counts])
    mean, n_layers = log_idle(on_grid(model.mean_activation)), run.trace.n_layers
    done = compositions_of(run, run.steps)
    records = [
        (
            len(step.running),
            sum(logged) / n_layers,
            float((1 - np.exp(log[[request for request, _ in step.running]].sum(0))).sum()),
            float((1 - np.exp(len(step.running) * mean)).sum()),
        )
        for step, logged in zip(done, run.steps["distinct"].to_pylist(), strict=True)
        if len(step.running) > 1 and not step.chunks
    ]
    steps = pd.DataFrame(records, columns=["batch", "live", "by_prompts", "by_mean"])
    steps[["by_prompts", "by_mean"]] /= n_layers
    found: Row = {"steps": len(steps)}
    for name in ("live", "by_prompts", "by_mean"):
        found[name] = float(steps[name].mean()) if len(steps) else None
    for name in ("by_prompts", "by_mean"):
        error = (steps[name] / steps.live - 1).abs().mean()
        found[f"{name}_error_percent"] = 100 * float(error) if len(steps) else None
    away = steps - steps.groupby("batch")[steps.columns.tolist()].transform("mean")
    spread = float((away.live**2).sum())
    left = float(((away.live - away.by_prompts) ** 2).sum())
    found["explained_percent"] = 100 * (1 - left / spread) if spread else None
    return found
