"""Simulation of a recorded live run: the same requests, arrival times and routing.

The engines are those of the recording, with calibrated step times. Request ``i`` replays request
``i`` of the run's own trace from its first row, so every token selects the experts that it selected
live. Delays outside the engines are calibrated: a request enters the engine's queue ``ingress_s``
after its post and the decode engine's queue ``handoff_s`` after its prefill, and the client and the
router learn of a token ``egress_s`` after its step.

Where the engines timed a probe, the simulation runs on a clock on which the machine always has the
speed of the tables (`engine_calibration.Drift`): arrivals are read on it, and simulated times back.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.registry import prefill_policy
from eldr_sim.serving.router.decisions import build_decode_policy
from eldr_sim.simulator.control.compiled_cluster import CompiledCluster
from eldr_sim.simulator.control.record import RunRecord
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec, make_pools
from eldr_sim.simulator.setup.config.groups import EngineConfig
from eldr_sim.simulator.setup.replay import fit_trace, make_replay, prompt_rows
from eldr_sim.traces.prompts import PromptSignatures
from eldr_sim.traces.streams import stream
from eldr_sim.traces.workload import Workload
from eldr_sim.validation.live.calibration.engine_calibration import (
    Clock,
    EngineCalibration,
    model_of,
)
from eldr_sim.validation.live.live_run import EngineInfo, LiveRun
from eldr_sim.validation.live.simulated.timestamps import RequestTimestamps

SIMULATED_STEPS = pa.schema(
    [
        ("engine", pa.string()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("request", pa.list_(pa.int32())),
        ("position", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("active", pa.int32()),  # distinct experts, summed over layers; null for prefill engines
        ("batch", pa.int32()),  # sequences that got a token; null for prefill engines
    ]
)
"""``request``, ``position`` and ``tokens`` are empty where requests were preempted: which tokens a
step computed again is not recorded."""


@dataclass(frozen=True)
class SimulatedRun:
    """Simulation of a recorded run."""

    #: Timestamps of its requests, in the rows of ``requests.parquet``.
    timestamps: RequestTimestamps
    engine: NDArray[np.int16]  #: int16, shape [requests]: index of the decode or co-located engine
    steps: pa.Table  #: :data:`SIMULATED_STEPS`, in order of their start


def run_clock(run: LiveRun, calibrated: EngineCalibration) -> Clock:
    """Return the clock of a run's decode or co-located engines; of several, by their mean drift."""
    prefills = {engine.name for engine in run.info.engines if engine.role == "prefill"}
    return _clock(run, calibrated, {e.name for e in run.info.engines} - prefills)


def _clock(run: LiveRun, calibrated: EngineCalibration, engines: set[str]) -> Clock:
    drift = calibrated.info.drift
    if drift is None:
        return Clock(np.empty(0), np.empty(0))
    name = np.array(run.steps["engine"].to_pylist())
    at, probe = run.steps["start_s"].to_numpy(), run.steps["probe_s"].to_numpy()
    moments = np.unique(at[np.isin(name, sorted(engines)) & np.isfinite(probe)])
    of = [name == engine for engine in sorted(engines)]
    factors = [calibrated.drift(at[own], probe[own]).factor(moments) for own in of]
    logs = [drift.step * np.log(factor) for factor in factors]
    return Clock(moments, np.exp(np.mean(logs, axis=0)) if len(moments) else moments)


def simulate_run(
    run: LiveRun, calibrated: EngineCalibration, artifact: Path | None = None
) -> SimulatedRun:
    """Simulate a recorded run; ``artifact``: ELDR's fit. Raises InputError if recording and trace
    do not match, tables do not cover the model, or the simulation fails."""
    model = check_run(run)
    info, requests, trace = run.info, run.requests, run.trace
    clock = run_clock(run, calibrated)
    spec = _cluster_spec(run, model, calibrated, clock)
    sent = requests["sent_s"].to_numpy()
    queued = sent + calibrated.info.ingress_s.of(requests["prompt_len"].to_numpy())
    order = np.argsort(queued, kind="stable")
    everyone, rows = np.arange(len(order)), order.astype(np.int32)
    lengths = [requests[name].to_numpy()[order] for name in ("prompt_len", "output_len")]
    domain = trace.domain[order]
    # Their priorities, 0 where they were sent none.
    sjf = info.load.queue_order == "sjf"
    policy = build_decode_policy(  # as the proxy builds it
        f"eldr:artifact={artifact}" if info.policy == "eldr" else info.policy,
        spec.n_decode,
        seed=info.load.seed,
    )
    policies = [policy]
    if spec.n_prefill:
        context = PolicyContext(spec.n_prefill, stream(info.load.seed, "prefill policy"))
        policies.insert(0, prefill_policy("round_robin", context))
    inputs = RunInputs(
        spec,
        [model] * len(spec.pools),
        Workload.plain(clock.own_s(queued)[order], lengths, rows, domain=domain, session=rows),
        make_replay(trace, model.n_moe_layers, everyone),
        PromptSignatures(trace, policy.needs.signature or "count", everyone),
        policies,
        (0.0, np.inf),
        time_limit_s=np.inf,
        prompts=prompt_rows(trace),
        queue_keys=lengths[0].astype(np.float64) if sjf else np.zeros(len(order)),
    )
    record = CompiledCluster(inputs).run()
    for outcome in record.outcomes():
        if outcome != "completed":
            raise InputError("run", f"the simulation ends a request with {outcome!r}")
    _read_back(record, clock)
    return _in_rows(run, spec, record, order, sent, calibrated.info.egress_s)


def _read_back(record: RunRecord, clock: Clock) -> None:
    """Turn the times of a record into the wall's."""
    for times in ("sent_s", "prefill_start_s", "prefill_end_s", "decode_start_s", "first_token_s",
                  "finish_s"):  # fmt: skip
        record.requests[times] = clock.wall_s(record.requests[times])
    for steps in (record.prefill_steps, record.decode_steps):
        for times in ("start", "end"):
            steps[times] = clock.wall_s(steps[times])


def _cluster_spec(
    run: LiveRun, model: ModelDims, calibrated: EngineCalibration, clock: Clock
) -> ClusterSpec:
    """Return the cluster of the recording, with calibrated step times and delays."""
    info, calibration = run.info, calibrated.info

    def spec_of(engine: EngineInfo) -> EngineSpec:
        step_time = calibrated.step_time(model, engine, info.max_model_len)
        blocks = engine.n_blocks - 1  # one is vLLM's null block (vllm/v1/core/block_pool.py)
        return EngineSpec(step_time, engine.max_num_seqs, engine.max_num_batched_tokens, blocks)

    prefills = [engine for engine in info.engines if engine.role == "prefill"]
    decode = _common([engine for engine in info.engines if engine.role != "prefill"])
    decode_spec = spec_of(decode)
    prefill_spec = decode_spec
    if prefills:
        # Prompts computed before the run take no time; else by how much slower their cores were.
        own = _clock(run, calibrated, {engine.name for engine in prefills}).mean / clock.mean
        prefill_spec = _slower(spec_of(_common(prefills)), 0.0 if info.prefilled else own)
    n = len(prefills), len(info.engines) - len(prefills)
    return ClusterSpec(
        pools=make_pools(*n, prefill_spec, decode_spec),
        max_model_len=info.max_model_len,
        block_size=decode.block_size,
        transfer=calibration.transfer,
        load_report_delay_s=calibration.egress_s,
        max_concurrency=None,
        enable_prefix_caching=False,
        scheduler=EngineConfig(async_scheduling=False),
        preempt_by_key=info.load.queue_order == "sjf",
        routing_s=0.0 if info.prefilled else calibration.handoff_s.base_s,
        routing_token_s=0.0 if info.prefilled else calibration.handoff_s.per_token_s,
    )


def check_run(run: LiveRun) -> ModelDims:
    """Return the model of a run; raises InputError if its trace is not of its requests."""
    model, trace, requests = model_of(run.info.model), run.trace, run.requests
    fit_trace(trace, model)
    if trace.n_layers != model.n_moe_layers:
        raise InputError("run", f"its trace has {trace.n_layers} layers", f"{model.n_moe_layers}")
    trace.require_prompts("recorded runs")
    output_len = requests["output_len"].to_numpy()
    # The last token is never fed, so the trace may lack it.
    short = trace.output_len < output_len - 1
    short |= trace.prompt_len != requests["prompt_len"].to_numpy()
    if short.any():
        row = int(np.argmax(short))
        raise InputError(
            "run",
            f"request {row} has {requests['prompt_len'][row]} + {output_len[row]} tokens, the "
            f"trace {trace.prompt_len[row]} + {trace.output_len[row]}",
            "the same prompt, and a row for every token but the last",
        )
    return model


def _slower(engine: EngineSpec, factor: float) -> EngineSpec:
    """Return an engine whose steps take so many times as long."""
    cost = engine.step_time.cost
    times = [name for name in cost._fields if name.endswith("_s")]
    scaled = cost._replace(**{name: getattr(cost, name) * factor for name in times})
    return replace(engine, step_time=replace(engine.step_time, cost=scaled))


def _common(engines: list[EngineInfo]) -> EngineInfo:
    """Return the description shared by all engines of a role."""
    kinds = {engine.unnamed for engine in engines}
    if len(kinds) != 1:
        raise InputError("run", f"{len(kinds)} kinds of engines in a role", "one")
    return engines[0]


def _in_rows(
    run: LiveRun,
    spec: ClusterSpec,
    record: RunRecord,
    order: NDArray[np.intp],
    sent: NDArray[np.float64],
    egress_s: float,
) -> SimulatedRun:
    """Convert a record to client times and to the rows of the recording."""
    requests, colocated = record.requests, spec.n_prefill == 0
    output_len, preempted = requests["output_len"], requests["preemptions"] > 0
    steps: list[dict[str, Any]] = []
    ends: dict[int, NDArray[np.float64]] = {}  # step ends of each request's output tokens
    for worker, engine in enumerate(run.info.engines):
        prefills = worker < spec.n_prefill
        log = record.prefill_steps if prefills else record.decode_steps
        number = worker if prefills else worker - spec.n_prefill
        log = log[log["worker"] == number]
        own = np.flatnonzero(requests["prefill_worker" if prefills else "decode_worker"] == number)
        for r in () if prefills else own.tolist():
            if preempted[r]:  # only its first and last tokens are recorded
                ends[r] = np.full(output_len[r], np.nan)
                ends[r][[0, -1]] = requests["first_token_s"][r], requests["finish_s"][r]
                continue
            begin = int(np.searchsorted(log["end"], requests["first_token_s"][r]))
            ends[r] = log["end"][begin : begin + output_len[r]]
            assert ends[r][-1] == requests["finish_s"][r], "no step is skipped while decoding"
        members: list[_Members] = [{} for _ in log]
        if not preempted.any():
            members = _members(requests, log, own, prefills, colocated)
        for row, held in zip(log, members, strict=True):
            step = {"engine": engine.name, "start_s": float(row["start"])}
            step |= {"end_s": float(row["end"]), "request": [int(order[i]) for i in held]}
            step |= {"position": [position for position, _ in held.values()]}
            step |= {"tokens": [tokens for _, tokens in held.values()]}
            if not prefills:
                step |= {"active": int(row["active"]), "batch": int(row["sequences"])}
            steps.append(step)
    steps.sort(key=lambda step: (step["start_s"], step["engine"]))

    back = np.argsort(order)

    def at(field: str) -> NDArray[np.float64]:
        return requests[field][back].astype(np.float64)

    prefill_end = at("prefill_end_s")
    handed, decode_start = prefill_end, prefill_end
    if not colocated:
        lengths = run.requests["prompt_len"].to_numpy()
        handed = prefill_end + (spec.routing_s + spec.routing_token_s * lengths)
        decode_start = at("decode_start_s")
    tokens = [ends[i] + egress_s for i in back]
    moments = (sent, at("sent_s"), at("prefill_start_s"), prefill_end, handed, decode_start)
    return SimulatedRun(
        RequestTimestamps(*moments, at("first_token_s"), at("finish_s"), tokens),
        at("decode_worker").astype(np.int16),
        pa.Table.from_pylist(steps, schema=SIMULATED_STEPS),
    )


_Members = dict[int, tuple[int, int]]  # first token and tokens of each request in a step


def _members(
    requests: Any, log: Any, own: NDArray[np.intp], prefills: bool, colocated: bool
) -> list[_Members]:
    """Return what each step of an engine computed of its requests, none of them preempted."""
    prompt_len, output_len = requests["prompt_len"].tolist(), requests["output_len"].tolist()
    chunks = log["chunk_tokens"].tolist()
    if prefills:  # first come, first served
        return _assigned([(r, prompt_len[r]) for r in own.tolist()], chunks)
    begun = own[np.argsort(requests["prefill_start_s"][own], kind="stable")].tolist()
    members = _assigned([(r, prompt_len[r] - 1) for r in begun if colocated], chunks)
    for r in own.tolist():
        begin = int(np.searchsorted(log["end"], requests["first_token_s"][r]))
        for k in range(output_len[r]):
            start, tokens = members[begin + k].get(r, (prompt_len[r] - 1 + k, 0))
            members[begin + k][r] = (start, tokens + 1)
    return members


def _assigned(prompts: list[tuple[int, int]], tokens: list[int]) -> list[_Members]:
    """Assign prompt tokens, first come first served, to steps: (first, tokens) of each request."""
    queue, done = iter([p for p in prompts if p[1] > 0]), 0
    request, length = next(queue, (-1, 0))
    assigned: list[_Members] = []
    for unassigned in tokens:
        members: _Members = {}
        while unassigned > 0:
            n = min(unassigned, length - done)
            assert n > 0, "every computed token belongs to a request"
            members[request] = (done, n)
            done, unassigned = done + n, unassigned - n
            if done == length:
                (request, length), done = next(queue, (-1, 0)), 0
        assigned.append(members)
    return assigned
