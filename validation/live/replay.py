"""A recorded live run, simulated again: the same requests at the same times, the same routing.

The engines are those of the recording, their step times those of a calibration. Request ``i``
replays request ``i`` of the run's own trace from its first row on, so every token selects the
experts that it selected live. Its way outside the engines takes the calibrated times: it is in the
engine's queue ``ingress_s`` after it was posted, in the decode engine's queue ``handoff_s`` after
its prefill, and the client has a token ``egress_s`` after its step. The router hears of an end as
late as the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.step_time import StepTimeModel
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.registry import prefill_policy
from eldr_sim.simulator.cluster import Cluster, ClusterSpec, EngineSpec, RunRecord
from eldr_sim.simulator.replay import fit_trace, make_prompt_replay, make_replay
from eldr_sim.simulator.request import COMPLETED
from eldr_sim.traces.prompts import PromptSignatures
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.live.calibrated import Calibrated, model_of
from eldr_sim.validation.live.milestones import Milestones
from eldr_sim.validation.live.recording import EngineInfo, LiveRun
from eldr_sim.validation.live.router import build_decode_policy

__all__ = ["SIMULATED_STEPS", "Replayed", "check_run", "replay_run"]

SIMULATED_STEPS = pa.schema(
    [
        ("engine", pa.string()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("request", pa.list_(pa.int32())),
        ("position", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("active", pa.int32()),  # distinct experts, summed over layers; null: a prefill engine
    ]
)


@dataclass(frozen=True)
class Replayed:
    """A simulation of a recorded run.

    Attributes
    ----------
    milestones
        The moments of its requests, in the rows of ``requests.parquet``.
    engine
        int16: index of the decode or co-located engine of each request.
    steps
        :data:`SIMULATED_STEPS`, in the order of their start.
    """

    milestones: Milestones
    engine: NDArray[np.int16]
    steps: pa.Table


def replay_run(run: LiveRun, calibrated: Calibrated, artifact: Path | None = None) -> Replayed:
    """Simulate a recorded run.

    Parameters
    ----------
    run, calibrated
        The recording, and the calibration of its engines.
    artifact
        ELDR's offline fit that the proxy's policy had, where it needs one.

    Raises
    ------
    InputError
        The recording and its trace do not fit together, the tables do not cover the model, or the
        simulation does not serve all requests without preemption.
    """
    model = check_run(run)
    info, calibration, requests = run.info, calibrated.info, run.requests
    prefills = [e for e in info.engines if e.role == "prefill"]
    prefill = _common(prefills) if prefills else None
    decode = _common([e for e in info.engines if e.role != "prefill"])
    prompt_len = requests["prompt_len"].to_numpy()
    sent = requests["sent_s"].to_numpy()
    queued = sent + calibration.ingress_s.of(prompt_len)
    order = np.argsort(queued, kind="stable")
    rows = order.astype(np.int32)

    def spec_of(engine: EngineInfo) -> EngineSpec:
        step_time = calibrated.step_time(model, engine, info.max_model_len)
        return EngineSpec(
            step_time, engine.max_num_seqs, engine.max_num_batched_tokens, engine.n_blocks
        )

    decode_spec = spec_of(decode)
    spec = ClusterSpec(
        n_prefill=len(prefills),
        n_decode=len(info.engines) - len(prefills),
        prefill=decode_spec
        if prefill is None
        else _ahead(spec_of(prefill))
        if info.prefilled
        else spec_of(prefill),
        decode=decode_spec,
        max_model_len=info.max_model_len,
        block_size=decode.block_size,
        transfer=calibration.transfer,
        load_report_delay_s=calibration.egress_s,
        max_concurrency=None,
        enable_prefix_caching=False,
        async_scheduling=False,
        routing_s=0.0 if info.prefilled else calibration.handoff_s.base_s,
        routing_token_s=0.0 if info.prefilled else calibration.handoff_s.per_token_s,
    )
    trace, n_layers = run.trace, model.n_moe_layers
    everyone = np.arange(len(order))
    policy = build_decode_policy(  # as the proxy builds it
        info.policy,
        spec.n_decode,
        artifact=None if artifact is None else str(artifact),
        seed=info.load.seed,
    )
    cluster = Cluster(
        spec,
        model,
        Workload(
            arrival_s=queued[order],
            prompt_len=prompt_len[order],
            output_len=requests["output_len"].to_numpy()[order],
            trace_request=rows,
            decode_request=rows,
            replay_offset=np.zeros(len(order), np.int32),
            domain=trace.domain[order],
            session=rows,
            prefix_hash=np.empty(0, np.uint64),
            prefix_indptr=np.zeros(len(order) + 1, np.int64),
            prefix_trace_request=np.empty(0, np.int32),
            prefix_block_tokens=0,
            description={},
        ),
        make_replay(trace, n_layers, everyone),
        PromptSignatures(trace, getattr(policy, "signature_score", "count"), everyone),
        None
        if prefill is None
        else prefill_policy(
            "round_robin", PolicyContext(spec.n_prefill, stream(info.load.seed, "prefill policy"))
        ),
        policy,
        (0.0, np.inf),
        time_limit_s=np.inf,
        prompt_replay=make_prompt_replay(trace, n_layers, everyone),
    )
    record = cluster.run()
    _check_record(record)
    return _in_rows(run, spec, record, order, sent, calibration.egress_s)


def check_run(run: LiveRun) -> ModelDims:
    """Return the model of a run, once its trace is known to be that of its requests.

    Raises
    ------
    InputError
        It is not: lengths or layers differ, or rows are missing.
    """
    model, trace, requests = model_of(run.info.model), run.trace, run.requests
    fit_trace(trace, model)
    if trace.n_layers != model.n_moe_layers:
        raise InputError("run", f"its trace has {trace.n_layers} layers", f"{model.n_moe_layers}")
    trace.require_prompts("recorded runs")
    output_len = requests["output_len"].to_numpy()
    # The last token is never fed, so its experts need not be there.
    short = (trace.prompt_len != requests["prompt_len"].to_numpy()) | (
        trace.output_len < output_len - 1
    )
    if short.any():
        row = int(np.argmax(short))
        raise InputError(
            "run",
            f"request {row} has {requests['prompt_len'][row]} + {output_len[row]} tokens, the "
            f"trace {trace.prompt_len[row]} + {trace.output_len[row]}",
            "the same prompt, and a row for every token but the last",
        )
    return model


def _ahead(engine: EngineSpec) -> EngineSpec:
    """Return a prefill engine whose prompts are computed already: its steps take no time."""
    free = _NoTime(**{f.name: getattr(engine.step_time, f.name) for f in fields(StepTimeModel)})
    return replace(engine, step_time=free)


class _NoTime(StepTimeModel):
    def prefill_s(
        self, tokens: Sequence[int], contexts: Sequence[int], moe_s: float | None = None
    ) -> float:
        return 0.0


def _common(engines: list[EngineInfo]) -> EngineInfo:
    """Return what the engines of a role all are."""
    kinds = {engine.model_copy(update={"name": ""}) for engine in engines}
    if len(kinds) != 1:
        raise InputError("run", f"{len(kinds)} kinds of engines in a role", "one")
    return engines[0]


def _check_record(record: RunRecord) -> None:
    for request in record.requests:
        if request.outcome != COMPLETED:
            raise InputError("run", f"the simulation ends a request with {request.outcome!r}")
        if request.preemptions:
            raise InputError(
                "run", "the simulation preempts requests", "KV blocks for all that run together"
            )


def _in_rows(
    run: LiveRun,
    spec: ClusterSpec,
    record: RunRecord,
    order: NDArray[np.intp],
    sent: NDArray[np.float64],
    egress_s: float,
) -> Replayed:
    """Put a record into the client's terms and the recording's rows."""
    requests, colocated = record.requests, spec.n_prefill == 0
    names = [e.name for e in run.info.engines]
    steps: list[tuple[str, float, float, dict[int, tuple[int, int]], int | None]] = []
    for worker, log in enumerate(record.prefill_steps):
        own = [r for r in requests if r.prefill_worker == worker]  # first come, first served
        chunks = _dealt([(r.index, r.prompt_len) for r in own], [n for *_, n in log])
        steps += [
            (names[worker], start, end, members, None)
            for (start, end, _, _), members in zip(log, chunks, strict=True)
        ]
    ends: dict[int, NDArray[np.float64]] = {}  # of the steps that yield each request's tokens
    for worker in range(spec.n_decode):
        rows = record.decode_steps[record.decode_steps["worker"] == worker]
        own = [r for r in requests if r.decode_worker == worker]
        begun = sorted(own, key=lambda r: (r.prefill_start_s, r.index)) if colocated else []
        members = _dealt([(r.index, r.prompt_len - 1) for r in begun], rows["chunked"].tolist())
        for r in own:
            begin = int(np.searchsorted(rows["end"], record.first_token_s[r.index]))
            ends[r.index] = rows["end"][begin : begin + r.output_len]
            assert ends[r.index][-1] == r.finish_s, "a request skips no step once it decodes"
            for k in range(r.output_len):
                position = r.prompt_len - 1 + k
                start, tokens = members[begin + k].get(r.index, (position, 0))
                members[begin + k][r.index] = (start, tokens + 1)
        steps += [
            (names[spec.n_prefill + worker], float(row["start"]), float(row["end"]), m, int(a))
            for row, m, a in zip(rows, members, rows["active"], strict=True)
        ]
    steps.sort(key=lambda step: (step[1], step[0]))

    back = np.argsort(order)

    def at(field: str) -> NDArray[np.float64]:
        return np.array([getattr(requests[i], field) for i in back], np.float64)

    prefill_end = at("prefill_end_s")
    first = record.first_token_s[back]
    handed, decode_start = prefill_end, prefill_end
    if not colocated:
        prompt_len = run.requests["prompt_len"].to_numpy()
        handed = prefill_end + (spec.routing_s + spec.routing_token_s * prompt_len)
        decode_start = at("decode_start_s")
    return Replayed(
        Milestones(
            sent,
            at("sent_s"),
            at("prefill_start_s"),
            prefill_end,
            handed,
            decode_start,
            first,
            at("finish_s"),
            [ends[i] + egress_s for i in back],
        ),
        at("decode_worker").astype(np.int16),
        pa.table(
            [
                [step[0] for step in steps],
                [step[1] for step in steps],
                [step[2] for step in steps],
                [[int(order[i]) for i in step[3]] for step in steps],
                [[position for position, _ in step[3].values()] for step in steps],
                [[tokens for _, tokens in step[3].values()] for step in steps],
                [step[4] for step in steps],
            ],
            schema=SIMULATED_STEPS,
        ),
    )


def _dealt(prompts: list[tuple[int, int]], tokens: list[int]) -> list[dict[int, tuple[int, int]]]:
    """Deal the tokens of prompts, first come first served, to the steps that computed so many.

    Returns the (first token, tokens) of each request in each step.
    """
    queue, done = iter([p for p in prompts if p[1] > 0]), 0
    request, length = next(queue, (-1, 0))
    dealt: list[dict[int, tuple[int, int]]] = []
    for left in tokens:
        members: dict[int, tuple[int, int]] = {}
        while left > 0:
            n = min(left, length - done)
            assert n > 0, "steps compute no tokens that nobody has"
            members[request] = (done, n)
            done, left = done + n, left - n
            if done == length:
                (request, length), done = next(queue, (-1, 0)), 0
        dealt.append(members)
    return dealt
