"""A user's own engine steps beside the predicted time of the same steps.

Steps are read from lines of JSON, as Dynamo, SGLang (``--enable-forward-pass-metrics``) and vLLM
publish them (`ForwardPassMetrics`): ``wall_time``, s, and ``scheduled_requests``: how many prompts
and sequences a step had, their new tokens, and what the KV cache held of each. Single prompts are
not told apart: each has its share of both. Which experts were chosen is not said; uniform routing
is expected.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.prepare import prepare

_COUNTS = {
    "prompts": "num_prefill_requests",
    "prompt_tokens": "sum_prefill_tokens",
    "cached_tokens": "sum_prefill_kv_tokens",
    "sequences": "num_decode_requests",
    "context": "sum_decode_kv_tokens",
}


class Step(NamedTuple):
    """What a step computed, and the seconds that it took."""

    seconds: float
    prompts: int
    prompt_tokens: int  #: computed in the step, of all prompts
    cached_tokens: int  #: of the prompts, computed before
    sequences: int  #: that got their next token
    context: int  #: tokens of these, all together

    @property
    def kind(self) -> str:
        """What it held, in words."""
        both = (self.prompts > 0, self.sequences > 0)
        return {(True, True): "both", (True, False): "prompts"}.get(both, "decoding")


def read_steps(path: Path) -> list[Step]:
    """Read the steps of a file, idle ones left out; raises InputError where a line is none."""
    found = []
    for number, line in enumerate(read_text(path, "steps").splitlines(), 1):
        if not line.strip():
            continue
        try:
            known = json.loads(line)
            counts = known["scheduled_requests"]
            values = {ours: int(counts.get(theirs, 0)) for ours, theirs in _COUNTS.items()}
            step = Step(float(known["wall_time"]), **values)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            problem = f"line {number} of {path}: {type(error).__name__}: {error}"
            raise InputError("steps", problem, "wall_time and scheduled_requests") from None
        if min(step) < 0 or not np.isfinite(step.seconds):
            raise InputError("steps", f"line {number} of {path} has {min(step):g}", "0 or more")
        if step.seconds > 0.0 and (step.sequences or step.prompt_tokens >= step.prompts > 0):
            found.append(step)
    if not found:
        raise InputError("steps", f"{path} holds no step that computed anything", "one a line")
    return found


def predicted_s(step_time: StepTimeModel, step: Step) -> float:
    """Return what a step takes; raises InputError where it is larger than the engine allows."""
    spread = [(step.cached_tokens, step.prompt_tokens)] if step.prompts else []
    chunks = [
        ((first + i) // step.prompts, (tokens + i) // step.prompts)
        for first, tokens in spread
        for i in range(step.prompts)
    ]
    activated = None
    if not chunks and step_time.n_moe_layers:
        model = step_time.model
        missed = (1.0 - model.top_k / model.n_experts) ** step.sequences
        activated = [model.n_experts * (1.0 - missed)] * step_time.n_moe_layers
    return float(sum(step_time.parts(step.sequences, step.context, chunks, activated)))


def beside(steps: Sequence[Step], config: RunConfig) -> Iterator[tuple[str, int, list[float]]]:
    """Yield kinds of steps: how many, and the median ms measured and predicted, and of the errors.
    The errors are in %: the median of their sizes, and the signed one. ``config``: of the
    engine."""
    pools = prepare(config).spec.pools
    step_time = pools[-1].engine.step_time
    predicted = np.array([predicted_s(step_time, step) for step in steps])
    measured = np.array([step.seconds for step in steps])
    for kind in ("decoding", "prompts", "both"):
        of = np.array([step.kind == kind for step in steps])
        if of.any():
            errors = 100.0 * (predicted[of] / measured[of] - 1.0)
            figures = [1e3 * np.median(measured[of]), 1e3 * np.median(predicted[of])]
            figures += [np.median(np.abs(errors)), np.median(errors)]
            yield kind, int(of.sum()), [float(figure) for figure in figures]
