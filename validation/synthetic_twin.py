"""Comparison of a routing trace with its synthetic twin: the same requests, routing of the fitted
model. Statistics of the fit show that it converged; the others validate."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.charts import lines, write_picture
from eldr_sim.outputs import write_rows
from eldr_sim.policies.eldr.signature import decode_overlap, idf_weights, select_layers, transformed
from eldr_sim.simulator.results import result_folder, write_json
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.overlap import request_overlap
from eldr_sim.traces.routing.statistics import BATCH_SIZES, TraceStatistics, trace_statistics
from eldr_sim.traces.routing.structure import nearest_neighbour_accuracy, next_layer_entropy
from eldr_sim.traces.routing.synthetic.model_fit import requests_of
from eldr_sim.traces.routing.synthetic.moments import BLOCK, LAGS, information, measure

REUSE_LAGS = (1, 2, 4, 8, 16, 32, 64)
_PAIR_TOKENS = 40_000
_STEPS, STEP_BATCH = 400, 32


@dataclass(frozen=True)
class TwinStatistic:
    """One statistic of both traces; ``fitted`` if it entered the fit."""

    fitted: bool
    name: str
    real: float
    synthetic: float


def compare_with_twin(trace: RoutingTrace, twin: RoutingTrace) -> list[TwinStatistic]:
    """Measure a trace and its twin, of the same requests (`synthesize_like`). Returns the fitted
    statistics first. Statistics that need longer or larger traces are left out, as are those that
    need ranks if a trace has none."""
    trace.require_prompts("synthetic twins")
    real, drawn = _facts(trace, twin), _facts(twin, trace)
    return [
        TwinStatistic(fitted, name, value, drawn[fitted, name])
        for (fitted, name), value in sorted(real.items(), key=lambda item: not item[0][0])
        if np.isfinite(value) and np.isfinite(drawn.get((fitted, name), np.nan))
    ]


def _facts(trace: RoutingTrace, other: RoutingTrace) -> dict[tuple[bool, str], float]:
    facts: dict[tuple[bool, str], float] = {}
    moments = measure(trace.experts, requests_of(trace), len(trace.domains), trace.n_experts)
    statistics = trace_statistics(trace)
    facts[True, "unigrams: distance to half of the real trace"] = _distance(trace, other)
    overlap = request_overlap(trace)
    load, cv = np.array(overlap.load_max_over_mean), np.array(overlap.load_cv)
    facts[True, "load of the busiest expert / mean"] = float(load.mean())
    facts[True, "the same, standard deviation over layers"] = float(load.std())
    facts[True, "coefficient of variation of the load"] = float(cv.mean())
    facts[False, "cosine of requests, nearest"] = overlap.cosine_nearest
    facts |= {(False, f"cosine of requests, {q}%"): x for q, x in overlap.cosine_between.items()}
    facts[False, "cosine of a request's halves"] = overlap.cosine_within
    for tokens, distinct in overlap.mixed.items():
        facts[False, f"distinct experts of {tokens} requests, a token each"] = distinct
    for tokens, distinct in overlap.one_request.items():
        facts[False, f"distinct experts of one request in {tokens} tokens"] = distinct
    reuse = reuse_by_lag(trace)
    facts[True, "reuse at lag 1"] = reuse[1]
    for i, bits in enumerate(moments.coupling_bits):
        if np.isfinite(bits).any():
            facts[False, f"coupling to layer + {i + 1}, bits"] = float(np.nanmean(bits))
    for lag, block in zip(LAGS, moments.self_overlap, strict=True):
        if np.isfinite(block).any():
            name = f"overlap of a request with itself {BLOCK * lag} tokens on"
            facts[False, name] = float(np.nanmean(block))
    for lag in REUSE_LAGS[1:]:
        facts[lag in (2, 16, 64), f"reuse at lag {lag}"] = reuse[lag]
    if trace.n_layers > 4:
        facts[False, "coupling to layer + 4, bits"] = _coupling_at(trace, 4)
    for layer in next_layer_entropy(trace):
        if layer.of == "top-1":
            facts[False, "entropy of the next layer's first expert, bits"] = fmean(layer.entropy)
            facts[False, "the same, given this layer's first"] = fmean(layer.conditional)
    for group, batch, name, value in _distinct(statistics):
        facts[False, f"distinct experts, {group}, batch {batch}, {name}"] = value
    mean, spread = step_spread(trace)
    facts[False, f"distinct experts in steps of batch {STEP_BATCH}"] = mean
    facts[False, "standard deviation of the same over steps"] = spread
    pearson = list(statistics.prefill_decode_pearson.values())
    facts[False, "prefill-decode Pearson, mean of domains"] = float(np.nanmean(pearson))
    for group, domains in _groups(trace).items():
        facts[False, f"rho, {group}"] = prompt_decode_rho(trace, domains)
    near = nearest_neighbour_accuracy(moments.prompt_share.astype(np.float64), trace.domain)
    facts[False, "nearest neighbour of the same domain, share"] = near or float("nan")
    return facts


def _groups(trace: RoutingTrace) -> dict[str, list[str]]:
    known = set(trace.domains)
    named = {name: list(mix) for name, mix in DOMAIN_MIXES.items() if set(mix) <= known}
    return named or {"all": list(trace.domains)}


def _distance(trace: RoutingTrace, other: RoutingTrace) -> float:
    """Return the total variation between this trace's odd requests and the real one's even ones.
    The real trace's own halves give the noise. Mean over phases, domains and layers."""
    real = trace if trace.manifest.provenance != "synthetic" else other
    apart = []
    for d in range(len(trace.domains)):
        mine = np.flatnonzero(trace.domain == d)[1::2]
        theirs = np.flatnonzero(real.domain == d)[::2]
        if not len(mine) or not len(theirs):
            continue
        for phase in (_prompt_share, RoutingTrace.decode_activation):
            gap = np.abs(phase(trace, mine).mean(axis=0) - phase(real, theirs).mean(axis=0))
            apart.append(gap.sum(axis=-1).mean() / 2 / trace.top_k)
    return float(np.mean(apart))


def _prompt_share(trace: RoutingTrace, q: Ints) -> Floats:
    return np.asarray(trace.prompt_counts(q) / trace.prompt_len[q][:, None, None])


def _decode_rows(trace: RoutingTrace, lag: int) -> Ints:
    """Return the rows of generated tokens that have ``lag`` generated tokens before them."""
    first = trace.first_row + trace.prompt_len
    spans = zip(first.tolist(), trace.output_len.tolist(), strict=True)
    rows = np.concatenate([np.arange(a + lag, a + n) for a, n in spans])
    return rows[:: max(1, len(rows) // _PAIR_TOKENS)]


def reuse_by_lag(trace: RoutingTrace) -> dict[int, float]:
    """Return the share of a token's experts that the token ``lag`` before it chose, by lag."""
    reuse = {}
    for lag in REUSE_LAGS:
        rows = _decode_rows(trace, lag)
        now, before = trace.experts[rows], trace.experts[rows - lag]
        shared = sum(int((now == before[..., slot, None]).sum()) for slot in range(trace.top_k))
        reuse[lag] = shared / now.size if now.size else float("nan")
    return reuse


def _coupling_at(trace: RoutingTrace, apart: int) -> float:
    """Return `Moments.coupling_bits` for layers further apart."""
    layers = np.arange(0, trace.n_layers - apart, max(1, (trace.n_layers - apart) // 4))
    every, output = np.arange(trace.n_requests), trace.output_len[:, None, None]
    total = trace.prompt_len + trace.output_len
    counts = trace.prompt_counts(every) + trace.decode_activation(every) * output
    bits = []
    for layer in layers.tolist():
        pairs = _pair_counts(trace, layer, layer + apart)
        shares = counts[:, layer] / total[:, None]
        independent = np.einsum("re,rf->ef", shares, counts[:, layer + apart])
        bits.append(float(information(pairs) - information(independent)))
    return float(np.mean(bits))


def _pair_counts(trace: RoutingTrace, layer: int, later: int) -> Floats:
    experts = trace.n_experts
    pairs = np.zeros(experts * experts, dtype=np.int64)
    for start in range(0, trace.manifest.n_tokens, 1 << 15):
        chunk = trace.experts[start : start + (1 << 15)]
        cells = chunk[:, layer, :, None].astype(np.int64) * experts + chunk[:, later, None]
        pairs += np.bincount(cells.ravel(), minlength=len(pairs))
    return pairs.reshape(experts, experts).astype(np.float64)


def _distinct(statistics: TraceStatistics) -> Iterator[tuple[str, int, str, float]]:
    for entry in statistics.distinct_experts:
        yield entry.group, entry.batch, "mixed", entry.mixed
        same = float(np.mean(list(entry.same_domain.values())))
        yield entry.group, entry.batch, "one domain", same
        yield entry.group, entry.batch, "saved, percent", 100 * entry.reduction


def step_spread(trace: RoutingTrace) -> tuple[float, float]:
    """Return mean and deviation, over random steps, of the distinct experts, mean over layers."""
    rng = np.random.default_rng(0)
    batch = min(STEP_BATCH, trace.n_requests)
    layers = np.arange(trace.n_layers)[None, :, None]
    distinct = np.empty(_STEPS)
    for step in range(_STEPS):
        q = rng.choice(trace.n_requests, batch, replace=False)
        at = (rng.random(batch) * trace.output_len[q]).astype(np.int64)
        hit = np.zeros((trace.n_layers, trace.n_experts), bool)
        hit[layers, trace.experts[trace.first_row[q] + trace.prompt_len[q] + at]] = True
        distinct[step] = hit.sum() / trace.n_layers
    return float(distinct.mean()), float(distinct.std(ddof=1))


def prompt_decode_rho(trace: RoutingTrace, domains: Sequence[str]) -> float:
    """Return Eq. 1 of ELDR for count-idf signatures on all layers, of calibration requests."""
    q = trace.requests_of(domains, calibration=True)
    if len(q) < 3:
        return float("nan")
    counts = trace.prompt_counts(q)
    pairs = decode_overlap(trace.decode_activation(q), np.random.default_rng(0))
    scores = transformed(counts, "count-idf", idf_weights(counts))
    return float(select_layers(scores, pairs, "all").rho[-1])


@contextmanager
def twin_report(
    out: Path, rows: Sequence[TwinStatistic], about: dict[str, Any], *, force: bool = False
) -> Iterator[None]:
    """Write the comparison, whole or not at all: ``summary.json``, ``statistics.csv`` and
    ``distinct_experts.png``, ELDR's Fig. 4 of both traces. Raises InputError if ``out`` cannot
    be."""
    with result_folder(out, force) as folder:
        write_json(folder / "summary.json", about)
        lines = [
            {"kind": "fitted" if row.fitted else "checked", "statistic": row.name}
            | {"real": f"{row.real:.6g}", "synthetic": f"{row.synthetic:.6g}"}
            for row in rows
        ]
        write_rows(folder / "statistics.csv", lines)
        _draw(folder / "distinct_experts.png", rows)
        yield


def _draw(path: Path, rows: Sequence[TwinStatistic]) -> None:
    values = {row.name: row for row in rows}
    points = [
        {"group": group, "batch": batch, "of": f"{name}, {which}", "distinct": getattr(row, which)}
        for group in (*DOMAIN_MIXES, "all")
        for name in ("mixed", "one domain")
        for which in ("real", "synthetic")
        for batch in BATCH_SIZES
        if (row := values.get(f"distinct experts, {group}, batch {batch}, {name}")) is not None
    ]
    if points:
        draw = lines(points, "batch", "distinct", "of", "group", xscale="log")
        write_picture(path, draw, (5.0 * len({point["group"] for point in points}), 4.0))
