"""Calibration of a live engine: latency tables from its own steps, and delays outside them.

The loads (:func:`calibration_bursts`) are others than the runs to predict: bursts of equal requests
with routing forced through counts of distinct experts, prompts of many lengths, batches at several
contexts, single requests for the delays; in rounds that each cover all sizes, so that the machine's
speed meets all alike. A table entry is the median over steps with equal columns, at the reference
speed of the engine's probe (:class:`~.engine_calibration.Drift`)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.profile.links import fit_transfer
from eldr_sim.kernel_profiles.profile.timing import Timing
from eldr_sim.kernel_profiles.tables import format
from eldr_sim.simulator.setup.transfer import TransferModel
from eldr_sim.validation.live.calibration import engine_calibration
from eldr_sim.validation.live.engine_log import EngineLog, request_rows
from eldr_sim.validation.live.engines.plugin import FORCED_LEVELS, FORCED_PREFIX

_ROUNDS = 4
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_PROMPTS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
_CONTEXTS = (16, 160, 640)
_PROMPT_LEVELS = ((0, 5), (3, 7))  # of the prompts of even and of odd rounds
_CONTEXT_TOKENS = 4096  # most context tokens of a batch
_LEAST_STEPS = 2
_SMALL = 4


@dataclass(frozen=True)
class Burst:
    """Equal requests that are sent together."""

    name: str  #: prefix of their names
    #: ``requests``, ``prompt_len``, ``output_len``: number of requests, and their tokens.
    requests: int
    prompt_len: int
    output_len: int


def calibration_bursts(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    kv_tokens: int | None = None,
    block_size: int = 1,
    seed: int = 0,
) -> list[Burst]:
    """Return the bursts that cover the steps of an engine, in sending order. ``kv_tokens``,
    ``block_size``: tokens that its KV cache holds, and tokens of a block: no burst needs more.
    None: enough; ``seed``: of the order within each round."""
    rng = np.random.default_rng(seed)

    def fits(burst: Burst) -> bool:
        longest = burst.prompt_len + burst.output_len
        room = -(-longest // block_size) * block_size * burst.requests
        return longest <= max_model_len and (kv_tokens is None or room <= kv_tokens)

    # Warm-up, as engines are slower in their first seconds: not forced, so in no table.
    steps = 3 * FORCED_LEVELS
    bursts = [Burst(f"warm-up-{b}", b, _CONTEXTS[0], 2 * steps) for b in (1, min(8, max_num_seqs))]
    for number in range(_ROUNDS):
        of_round = [
            burst
            for burst in _round(number, max_num_seqs, max_num_batched_tokens, max_model_len)
            if fits(burst)
        ]
        bursts += [of_round[index] for index in rng.permutation(len(of_round))]
    return bursts


def _round(number: int, max_num_seqs: int, budget: int, max_model_len: int) -> list[Burst]:
    """Return the bursts of one round."""
    batches = sorted({*(b for b in _BATCHES if b < max_num_seqs), max_num_seqs})
    bursts = []

    def decode(batch: int, context: int, name: str) -> None:
        outputs = FORCED_LEVELS + batch // 4 + 2  # requests join within a few steps
        bursts.append(Burst(f"{FORCED_PREFIX}{name}-{context}-{batch}-{number}", batch, context,
                            outputs))  # fmt: skip

    for batch in batches:
        decode(batch, _CONTEXTS[0], "decode")
        if batch <= _SMALL:  # short steps are the most sensitive to short disturbances
            decode(batch, _CONTEXTS[0], "again")
    context = _CONTEXTS[1 + number % (len(_CONTEXTS) - 1)]
    for batch in batches[::2]:
        if batch * context <= _CONTEXT_TOKENS:
            decode(batch, context, "decode")
    for tokens in _PROMPTS:
        if tokens <= min(budget, max_model_len - 2):
            for level in _PROMPT_LEVELS[number % len(_PROMPT_LEVELS)]:
                name = f"{FORCED_PREFIX}level{level}-prompt-{tokens}-{number}"
                bursts.append(Burst(name, 1, tokens, 2))
        elif tokens < max_model_len and number % 2 == 0:  # in chunks
            bursts.append(Burst(f"{FORCED_PREFIX}prompt-{tokens}-{number}", 1, tokens, 2))
    for tokens in (32, 128):
        together = min(budget // tokens, max_num_seqs)
        if together > 1:
            name = f"{FORCED_PREFIX}prompts-{tokens}-{number}"
            bursts.append(Burst(name, together, tokens, 2))
    return bursts


def engine_tables(
    log: EngineLog, dims: ModelDims, device: str, framework: str, versions: Mapping[str, str]
) -> tuple[list[format.LatencyTable], engine_calibration.DriftModel | None]:
    """Make a model's latency tables, at the reference speed, of an engine's steps under
    :func:`calibration_bursts`; and how steps follow its probe, None without one. InputError: too
    few steps."""
    layers, moe_layers = dims.n_layers, dims.n_moe_layers
    starts = np.array([step.start_s for step in log.steps])
    speed = engine_calibration.Drift(starts, np.array([step.probe_s for step in log.steps]), None)
    factors = speed.factor(starts)
    moe, decode, prefill, rest, whole_steps = (_Samples() for _ in range(5))
    chunked: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for step, cycle, factor in zip(log.steps, log.cycles_s(), factors.tolist(), strict=True):
        prompts = [(start, count) for _, start, count in step.rows if count > 1]
        kinds = {count for _, _, count in step.rows}
        attention_s, distinct = step.attention_s / layers, float(step.distinct.mean())
        moe.add((step.tokens, distinct), step.moe_s / moe_layers, factor)
        if not prompts:
            context = np.mean([start + 1 for _, start, _ in step.rows])
            decode.add((len(step.rows), _round_context(float(context))), attention_s, factor)
        elif len(kinds) == 1 and all(start == 0 for start, _ in prompts):
            prefill.add((len(prompts), prompts[0][1]), attention_s, factor)
        if np.isfinite(cycle):
            others_s = cycle - step.moe_s - step.attention_s
            rest.add((step.tokens, len(step.rows)), others_s, factor)
            whole_steps.add((step.tokens, len(step.rows), distinct), float(cycle), factor)
        if len(step.rows) == 1 and prompts:
            name, start, count = step.rows[0]
            chunked[name].append((start + count, attention_s, factor))
    model = None
    if speed.reference_s is not None:
        model = engine_calibration.DriftModel(
            reference_s=speed.reference_s,
            moe=engine_calibration.exponent(moe.groups),
            attention=engine_calibration.exponent([*decode.groups, *prefill.groups]),
            rest=engine_calibration.exponent(rest.groups),
            step=engine_calibration.exponent(whole_steps.groups),
        )
        moe.normalise(model.moe)
        decode.normalise(model.attention)
        prefill.normalise(model.attention)
        rest.normalise(model.rest)
    _add_whole_prompts(prefill, chunked, 0.0 if model is None else model.attention)
    moe_samples = _well_covered(moe.seconds, dims.n_experts, dims.top_k)
    head = _head(device, framework, versions)
    attention = format.attention_shape(dims.n_heads, dims.n_kv_heads, dims.head_dim, 0)
    forced, experts = {"routing": "forced"}, format.moe_shape_of(dims)
    whole = format.engine_step_shape(dims.n_layers, dims.hidden_size, dims.vocab_size)
    tables = [
        _table(head, "moe", experts, ("batch", "distinct_experts"), moe_samples, forced),
        _table(head, "attention_decode", attention, ("batch", "context"), decode.seconds),
        _table(head, "attention_prefill", attention, ("batch", "new_tokens"), prefill.seconds),
        _table(head, "engine_step", whole, ("tokens", "sequences"), rest.seconds),
    ]
    return tables, model


def _head(device: str, framework: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return what the tables have in common."""
    return {
        "gpu": device,
        "kernel_source": "the engine's own",
        "framework": framework,
        "provenance": "measured",
        "origin": "eldr-sim validate vllm: medians over steps of a forced calibration load",
        "device": device,
        "versions": dict(versions),
        "date": datetime.now(UTC).date().isoformat(),
    }


class _Samples:
    """Times by point, with the drift factors of their steps."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        self.factors: dict[tuple[Any, ...], list[float]] = defaultdict(list)

    def add(self, point: tuple[Any, ...], seconds: float, factor: float) -> None:
        self.seconds[point].append(seconds)
        self.factors[point].append(factor)

    @property
    def groups(self) -> list[tuple[list[float], list[float]]]:
        """Times and factors of each point."""
        return [(values, self.factors[point]) for point, values in self.seconds.items()]

    def normalise(self, power: float) -> None:
        """Divide all times by the drift."""
        for point, values in self.seconds.items():
            pairs = zip(values, self.factors[point], strict=True)
            self.seconds[point] = [value / factor**power for value, factor in pairs]


def _add_whole_prompts(
    prefill: _Samples, chunked: Mapping[str, Sequence[tuple[int, float, float]]], power: float
) -> None:
    """Add prompts computed alone, in chunks, as whole ones: each chunk pays the smallest call."""
    floor_s = min((float(np.median(v)) for v in prefill.seconds.values()), default=0.0)
    for steps in chunked.values():
        if len(steps) > 1:
            seconds = sum(s / factor**power for _, s, factor in steps)
            end = max(end for end, _, _ in steps)
            prefill.add((1, end), seconds - (len(steps) - 1) * floor_s, 1.0)


def _well_covered(
    samples: Mapping[tuple[Any, ...], list[float]], n_experts: int, top_k: int
) -> dict[tuple[Any, ...], list[float]]:
    """Leave out batches with too few counts of experts to determine a slope."""
    levels = np.linspace(top_k, n_experts, FORCED_LEVELS)
    counts: dict[int, set[float]] = defaultdict(set)
    for (batch, distinct), values in samples.items():
        if len(values) >= _LEAST_STEPS:
            counts[batch].add(distinct)

    def covered(batch: int) -> bool:
        within_reach = np.unique(np.minimum(levels, batch * top_k))
        return 2 * len(counts[batch]) >= len(within_reach)

    return {point: values for point, values in samples.items() if covered(point[0])}


def _round_context(context: float) -> int:
    """Return the middle of the group of contexts that a context belongs to."""
    known = np.array(_CONTEXTS) + FORCED_LEVELS // 2
    return int(known[np.argmin(np.abs(known - context))])


def _table(
    head: dict[str, Any],
    kind: format.Kind,
    shape: dict[str, int],
    names: Sequence[str],
    samples: Mapping[tuple[Any, ...], list[float]],
    constants: Mapping[str, str] | None = None,
) -> format.LatencyTable:
    """Make a table of the medians of all points with enough samples."""
    points = sorted(point for point, values in samples.items() if len(values) >= _LEAST_STEPS)
    if len(points) < 4:
        raise InputError("calibration", f"{len(points)} points of {kind}", "4 or more")
    axes = map(np.array, zip(*points, strict=True))
    columns: dict[str, Any] = dict(zip(names, axes, strict=True))
    for name, text in (constants or {}).items():
        columns[name] = np.full(len(points), text, object)
    columns |= Timing.columns([Timing.of(samples[point]) for point in points])
    dtype = "none" if kind == "engine_step" else "bfloat16"
    return format.LatencyTable(
        format.TableMetadata(kind=kind, shape=shape, dtype=dtype, **head), columns
    )


def outside_times(
    requests: pa.Table,
    logs: Mapping[str, EngineLog],
    prefill: Sequence[str],
    prefilled: bool,
    dims: ModelDims,
    measure_link: Callable[[], tuple[Mapping[tuple[int, int], float], str]],
) -> engine_calibration.CalibrationInfo:
    """Measure the delays outside the engines' steps, from requests sent one at a time; the caller
    fills in ``seconds``. Raises InputError if a request is not in the logs.

    NIXL is timed by descriptors and bytes; a transfer's set-up is the remaining wait of a lone
    request between the decode engine's queue and its first step. ``requests``:
    ``live_run.REQUESTS``, times of ``CLOCK_MONOTONIC``; ``prefilled``: whether prefill engines had
    computed the prompts before; ``measure_link``: times by (bytes, descriptors), s, and their
    source, asked for with prefill engines."""
    rows = {name: row for row, name in enumerate(requests["request_id"].to_pylist())}
    lengths = requests["prompt_len"].to_numpy().astype(float)
    sent, tokens = requests["sent_s"].to_numpy(), requests["token_s"].to_pylist()
    logged = _logged_times(logs, prefill, rows, lengths)
    first = logged.received["decode" if prefilled or not prefill else "prefill"]
    for row in rows.values():
        if row not in first or len(logged.steps[row]) < len(tokens[row]):
            raise InputError("calibration", f"the engines did not log request {row}")
    order = sorted(rows.values())
    # In the simulator a step ends where the next one starts, shortly after its outputs were sent.
    egress = [
        token - following[0]
        for row in order
        for token, following in zip(tokens[row], logged.steps[row][1:], strict=False)
    ]
    quartiles_ms = [1e3 * float(np.quantile(egress, q)) for q in (0.25, 0.5, 0.75)]
    handoff, transfer = (
        engine_calibration.Delay(base_s=0, per_token_s=0),
        TransferModel(0, 0, 1e15, "none"),
    )
    notes: dict[str, Any] = {}
    if prefill:
        if not prefilled:
            gaps = [logged.received["decode"][row] - logged.prompt_end[row] for row in order]
            handoff = _delay(lengths, gaps)
        transfer, notes["nixl_fit"] = _transfer(logs, logged, lengths, dims, measure_link())
    notes["unloaded"] = {"requests": len(order), "egress_ms": quartiles_ms}
    return engine_calibration.CalibrationInfo(
        ingress_s=_delay(lengths, [first[row] - sent[row] for row in order]),
        egress_s=max(0.0, float(np.median(egress))),
        handoff_s=handoff,
        transfer=transfer,
        seconds=0.0,
        notes=notes,
    )


class _LoggedTimes(NamedTuple):
    """Times of requests in the engines' logs, by row of the request, s. ``received``: arrival at
    the engine, by role. ``prompt_end``: end of the prefill engine's last step. ``steps``: start and
    end of each step that generated a token."""

    received: dict[str, dict[int, float]]
    prompt_end: dict[int, float]
    steps: dict[int, list[tuple[float, float]]]


def _logged_times(
    logs: Mapping[str, EngineLog],
    prefill: Sequence[str],
    rows: Mapping[str, int],
    lengths: np.ndarray[Any, Any],
) -> _LoggedTimes:
    logged = _LoggedTimes({"prefill": {}, "decode": {}}, {}, defaultdict(list))
    for engine, log in logs.items():
        role = "prefill" if engine in prefill else "decode"
        names = request_rows(log.received_s, rows)
        logged.received[role].update({row: log.received_s[name] for name, row in names.items()})
        for step in log.steps:
            for name, start, count in step.rows:
                row = names.get(name, -1)
                if row < 0 or start + count < lengths[row]:
                    continue
                if role == "prefill":
                    logged.prompt_end[row] = step.end_s
                else:
                    logged.steps[row].append((step.start_s, step.end_s))
    return logged


def _transfer(
    logs: Mapping[str, EngineLog],
    logged: _LoggedTimes,
    lengths: np.ndarray[Any, Any],
    dims: ModelDims,
    measured: tuple[Mapping[tuple[int, int], float], str],
) -> tuple[TransferModel, dict[str, Any]]:
    """Return the model of KV transfers, with the fit of NIXL's times that it uses."""
    points, source = measured
    link = fit_transfer(points)
    block = next(iter(logs.values())).engine["block_size"]  # of all: they exchange blocks
    per_block = link.descriptor_s * dims.n_kv_tensors
    per_block += block * dims.kv_bytes_per_token / link.bandwidth
    waits = [
        logged.steps[row][0][0] - received - per_block * -(-lengths[row] // block)
        for row, received in logged.received["decode"].items()
    ]
    setup_s = max(0.0, float(np.median(waits)))
    source += f", mean error {link.mean_error:.0%}"
    return TransferModel(setup_s, link.descriptor_s, link.bandwidth, source), vars(link)


def _delay(lengths: np.ndarray[Any, Any], seconds: Sequence[float]) -> engine_calibration.Delay:
    """Fit a line with non-negative terms to the medians by prompt length."""
    from scipy.optimize import nnls  # takes long to import

    known = np.unique(lengths)
    medians = np.array([np.median(np.array(seconds)[lengths == n]) for n in known])
    (base, slope), _ = nnls(np.stack([np.ones(len(known)), known], axis=1), medians)
    return engine_calibration.Delay(base_s=float(base), per_token_s=float(slope))


#: A row is out of order if one with as much work or more takes less than this share of its time: it
#: was measured while the machine was slow, which a wide spread of equal steps says, too.
_LESS = 0.90
#: Most of the rows that may be out of order; largest median spread (IQR / median) of the rows.
_OUT_OF_ORDER, _SPREAD = 0.10, 0.20
_AXES = {
    "moe": ("batch", "distinct_experts"),
    "attention_decode": ("batch", "context"),
    "attention_prefill": ("batch", "new_tokens"),
    "engine_step": ("tokens", "sequences"),
}
#: Attention is a small part of the steps of a small model, and its calls are short.
_DECISIVE = ("moe", "engine_step")


def quality(tables: Iterable[format.LatencyTable]) -> dict[str, Any]:
    """Return ``rows``, ``spread_median``, ``spread_p90`` (IQR / median) and ``out_of_order``, the
    share of rows that take longer than one with more work, by kind."""
    report: dict[str, Any] = {}
    for table in tables:
        columns = table.columns
        spread = (columns["latency_q3_s"] - columns["latency_q1_s"]) / columns["latency_s"]
        report[table.metadata.kind] = {
            "rows": len(table),
            "spread_median": float(np.median(spread)),
            "spread_p90": float(np.quantile(spread, 0.9)),
            "out_of_order": _out_of_order(table),
        }
    return report


def doubts(figures: dict[str, Any]) -> list[str]:
    """Return why tables with these figures are not to be trusted, a line each."""
    lines = []
    for kind in _DECISIVE:
        if kind not in figures:
            continue
        spread, out = (figures[kind][key] for key in ("spread_median", "out_of_order"))
        if spread > _SPREAD:
            said = f"equal steps spread by {spread:.0%} (IQR / median; {_SPREAD:.0%} at most)"
            lines.append(f"{kind}: {said}")
        if out > _OUT_OF_ORDER:
            said = f"{out:.0%} of the rows take longer than rows with more work"
            lines.append(f"{kind}: {said} ({_OUT_OF_ORDER:.0%} at most)")
    return lines


def _out_of_order(table: format.LatencyTable) -> float:
    """Return the share of the rows that take longer than one with as much work or more."""
    axes = [np.asarray(table.columns[name], np.float64) for name in _AXES[table.metadata.kind]]
    seconds = table.columns["latency_s"]
    more = np.ones((len(seconds), len(seconds)), bool)
    for axis in axes:
        more &= axis[:, None] <= axis[None, :]
    less = seconds[None, :] < _LESS * seconds[:, None]
    return float((more & less).any(axis=1).mean())
