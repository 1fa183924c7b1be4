"""Synthetic traces: requests of a `RoutingModel` as a folder of the trace format."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from eldr_sim.arrays import Array, Ints
from eldr_sim.errors import InputError
from eldr_sim.inputs import array_limit, within
from eldr_sim.kinds import Progress, no_progress
from eldr_sim.traces.requests.prompt_lengths import draw_prompt_lengths
from eldr_sim.traces.requests.texts import take_turns
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.gate_scores import GateScores
from eldr_sim.traces.routing.manifest import SYNTHETIC
from eldr_sim.traces.routing.synthetic.model import RoutingModel
from eldr_sim.traces.routing.synthetic.sampler import sample_experts
from eldr_sim.traces.routing.writer import check_target, write_trace
from eldr_sim.traces.streams import stream

_MOST_REQUESTS = 1_000_000
_LONGEST = 2**31 - 1
Lengths = tuple[int, int]


def synthesize(
    model: RoutingModel,
    out: str | os.PathLike[str],
    *,
    requests: int,
    calibration: int,
    prompt_len: Lengths | None,
    output_len: Lengths,
    shares: Sequence[float] | None = None,
    split: Literal["both", "calibration", "serving"] = "both",
    **drawing: Any,
) -> RoutingTrace:
    """Write a trace of requests that take turns between the model's domains; raises InputError.

    ``requests``, ``calibration``: of each split; ``prompt_len``, ``output_len``: range of tokens,
    drawn uniformly; without ``prompt_len`` as of the domains' data sets (`prompt_lengths`);
    ``shares``: of the domains, alike by default; ``split``: which requests to draw, the same as in
    the trace of both; ``drawing``: ``seed``, ``gate_scores`` (draw the gate's probabilities, too),
    ``force``, ``progress``."""
    if requests < 0 or calibration < 0 or requests + calibration < 1:
        raise InputError("requests", f"got {requests} and {calibration}", "at least 1 in all")
    n, seed = requests + calibration, drawing["seed"]
    within("requests", n, _MOST_REQUESTS)
    if shares is None:
        domain = np.arange(n) % len(model.domains)
    else:
        domain = np.concatenate([take_turns(shares, count) for count in (calibration, requests)])
    if prompt_len is None:
        prompt = draw_prompt_lengths([model.domains[d] for d in domain], seed)
    else:
        prompt = _uniform("prompt_len", prompt_len, n, seed)
    output = _uniform("output_len", output_len, n, seed)
    columns = domain, prompt, output, np.arange(n) < calibration
    spans = {"calibration": (0, calibration), "serving": (calibration, n)}
    return _write(model, out, columns, spans.get(split), **drawing)


def _uniform(name: str, span: Lengths, n: int, seed: int) -> Ints:
    low, high = span
    if not 1 <= low <= high:
        raise InputError(name, f"got {low}:{high}", "1 or more, the lesser first")
    within(name, high, _LONGEST, " tokens")
    return stream(seed, f"synthetic-{name}").integers(low, high, n, endpoint=True)


def synthesize_like(
    model: RoutingModel, trace: RoutingTrace, out: str | os.PathLike[str], **drawing: Any
) -> RoutingTrace:
    """Write a trace with the domains, lengths and split of another; raises InputError."""
    missing = [name for name in trace.domains if name not in model.domains]
    if missing:
        problem = f"the model has no domain {missing[0]!r}"
        raise InputError("like", problem, ", ".join(model.domains))
    order = np.argsort(trace.first_row, kind="stable")
    domain = np.array([model.domains.index(name) for name in trace.domains])[trace.domain]
    columns = domain, trace.prompt_len, trace.output_len, trace.is_calibration
    return _write(model, out, [column[order] for column in columns], **drawing)


def _write(
    model: RoutingModel,
    out: str | os.PathLike[str],
    columns: Sequence[Array],
    span: tuple[int, int] | None = None,
    *,
    seed: int,
    gate_scores: bool = False,
    force: bool = False,
    progress: Progress = no_progress,
) -> RoutingTrace:
    """Write requests of these domains, prompt and output tokens and splits, or a span of them."""
    check_target(out, force)
    used = [name for d, name in enumerate(model.domains) if (columns[0] == d).any()]
    first, last = span or (0, len(columns[0]))
    domain, prompt_len, output_len, is_calibration = (column[first:last] for column in columns)
    tokens = float(prompt_len.sum(dtype=np.float64) + output_len.sum(dtype=np.float64))
    ids = tokens * model.n_layers * model.top_k
    within("requests", 2 * ids, array_limit(), " bytes of expert ids")
    n = len(domain)
    prob = np.empty((n, model.n_layers, model.n_experts), np.float32) if gate_scores else None
    experts = sample_experts(model, domain, prompt_len, output_len, seed, progress, prob, first)
    return write_trace(
        out,
        experts=experts,
        request_id=[f"{model.domains[d]}-{i:05d}" for i, d in enumerate(domain.tolist(), first)],
        domain=[model.domains[d] for d in domain.tolist()],
        prompt_len=prompt_len,
        output_len=output_len,
        is_calibration=is_calibration,
        model=str(model.facts["model"]),
        n_experts=model.n_experts,
        domains=used,
        captured_by=f"drawn by eldr-sim trace synthesize, seed {seed}",
        source_data="none: no text, no model",
        tool_versions={},
        provenance="synthetic",
        notes=f"{SYNTHETIC}{model.facts['source']}.",
        gate_scores=None if prob is None else GateScores(np.arange(n), prob),
        rank_groups=[1] * experts.shape[-1],  # in the order in which they were drawn
        force=force,
    )
