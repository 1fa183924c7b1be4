"""Engine steps: measured duration, and the duration that the simulator predicts for the same step.

A step is described by its composition: the tokens of each request that it computed. Its distinct
experts and its predicted time follow from the composition by the simulator's own code and tables.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.arrays import Floats, Ints
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.plane.steps.expert_union import add_prompt, count_experts, union_rows
from eldr_sim.simulator.setup.replay import make_replay, prompt_rows
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.validation.live.calibration.engine_calibration import DriftModel
from eldr_sim.validation.live.live_run import LiveRun


@dataclass(frozen=True)
class Composition:
    """Tokens that a step computed."""

    #: (request, context) of sequences that sample; tokens attended to, the sampled included.
    running: tuple[tuple[int, int], ...]
    chunks: tuple[tuple[int, int, int], ...]  #: (request, start, stop) of all other tokens
    #: {(request, first token, tokens)}; equal for equal steps.
    members: frozenset[tuple[int, int, int]]

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return len(self.running) + sum(stop - start for _, start, stop in self.chunks)

    @property
    def context(self) -> int:
        """Context tokens of all sampling sequences."""
        return sum(context for _, context in self.running)


def compositions(
    steps: Iterable[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    prompt_len: NDArray[np.integer],
    prefills: Iterable[bool],
) -> list[Composition]:
    """Return the compositions of steps. ``steps``: requests, first tokens and numbers of tokens of
    each step; ``prompt_len``: prompt tokens of all requests; ``prefills``: whether a prefill engine
    ran the step: there all tokens count as chunks."""
    batches = []
    lengths = prompt_len.tolist()
    for (requests, positions, tokens), all_prompts in zip(steps, prefills, strict=True):
        running, chunks, members = [], [], []
        for request, start, n in zip(requests, positions, tokens, strict=True):
            stop = start + n
            members.append((request, start, n))
            if stop >= lengths[request] and not all_prompts:
                running.append((request, stop))
                stop -= 1
            if stop > start:
                chunks.append((request, start, stop))
        batches.append(Composition(tuple(running), tuple(chunks), frozenset(members)))
    return batches


def compositions_of(run: LiveRun, steps: pa.Table) -> list[Composition]:
    """Return the compositions of a run's steps, live or simulated (columns of ``STEPS``)."""
    prefill = {engine.name for engine in run.info.engines if engine.role == "prefill"}
    columns = (steps[name].to_pylist() for name in ("request", "position", "tokens"))
    return compositions(
        zip(*columns, strict=True),
        run.requests["prompt_len"].to_numpy(),
        [name in prefill for name in steps["engine"].to_pylist()],
    )


class StepUnions:
    """Counter of steps' distinct experts from the rows of the run's own trace, as simulated."""

    def __init__(self, trace: RoutingTrace) -> None:
        everyone = np.arange(trace.n_requests)
        self._activated = np.zeros(trace.n_layers, np.int64)
        self._one_rank = np.zeros((1, 0), np.uint64)
        self._prompt_len = trace.prompt_len.tolist()
        self._decodes = make_replay(trace, trace.n_layers, everyone)
        self._prompts = prompt_rows(trace)
        self._union = np.zeros(self._decodes.bits.shape[1], np.uint64)

    def distinct(self, step: Composition) -> Ints:
        """Return the distinct experts of each MoE layer of a step."""
        first, union = self._decodes.first_row, self._union
        rows = [first[request] + n - self._prompt_len[request] for request, n in step.running]
        for request, start, stop in step.chunks:
            again = range(max(start, self._prompt_len[request]), stop)  # generated tokens
            rows += [first[request] + at - self._prompt_len[request] + 1 for at in again]
        union_rows(self._decodes.bits, np.array(rows, np.int64), 0, len(rows), union)
        for request, start, stop in step.chunks:
            end = min(stop, self._prompt_len[request])
            add_prompt(self._prompts, request, request, start, end, union)
        count_experts(union, self._one_rank, self._activated)
        return self._activated.copy()


@dataclass(frozen=True)
class Prediction:
    """Predicted time of the parts of a step, s."""

    moe_s: float
    attention_s: float
    rest_s: float

    @property
    def step_s(self) -> float:
        """Time of the whole step."""
        return self.moe_s + self.attention_s + self.rest_s

    def slower(self, factor: float, drift: DriftModel | None) -> "Prediction":
        """Return the prediction where a probe takes ``factor`` times as long."""
        if drift is None:
            return self
        return Prediction(
            self.moe_s * factor**drift.moe,
            self.attention_s * factor**drift.attention,
            self.rest_s * factor**drift.rest,
        )


def predict(
    step_time: StepTimeModel, step: Composition, distinct: NDArray[np.integer]
) -> Prediction:
    """Predict a step's time from its composition and ``distinct``, experts per MoE layer."""
    chunks = [(start, stop - start) for _, start, stop in step.chunks]
    batch, sampled = len(step.running), {request for request, _ in step.running}
    rows = batch + sum(request not in sampled for request, _, _ in step.chunks)
    parts = step_time.parts(batch, step.context, chunks, distinct.tolist(), rows)
    rest_s = parts.dense + parts.head + parts.collectives + parts.host
    return Prediction(parts.moe, parts.attention, rest_s)


def durations(run: LiveRun, steps: Sequence[Composition], queued_s: Floats) -> Floats:
    """Return the duration of each step of a recording, s.

    Until the engine's next step if it continued at once (a request of the step has tokens left
    there, or a new one of the next step was in its queue, ``queued_s``, before the end), else until
    its own end. The arrival of a KV cache at a decode engine is not observed and does not count."""
    prompt_len = run.requests["prompt_len"].to_numpy()
    total = prompt_len + run.requests["output_len"].to_numpy() - 1
    start, end = run.steps["start_s"].to_numpy(), run.steps["end_s"].to_numpy()
    taken = np.asarray(end - start, np.float64)
    engines = run.steps["engine"].to_pylist()
    for each in run.info.engines:
        own = [i for i, engine in enumerate(engines) if engine == each.name]
        last = prompt_len if each.role == "prefill" else total
        for i, following in pairwise(own):
            goes_on = any(position + n < last[r] for r, position, n in steps[i].members)
            if not goes_on and each.role != "decode":
                new = (r for r, position, _ in steps[following].members if position == 0)
                goes_on = any(queued_s[r] <= end[i] for r in new)
            if goes_on:
                taken[i] = start[following] - start[i]
    return taken
