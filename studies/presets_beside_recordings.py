"""Hold every shipped recording against the preset that a run of its model draws from.

``python -m studies.presets_beside_recordings [NAME ...]`` from the root of a checkout writes
``docs/data/presets_beside_recordings.csv``, of all recordings or the named ones; ``FOLDER=PRESET``
is a recording that does not ship. A preset draws the recording's own requests (domains, lengths,
splits) with the share that the recording's domains explain, so that all figures but chance are
comparable; it does so with `SEEDS` seeds, which also choose the topics of domains. Gains are of
`POLICIES` against round robin over `SEEDS` seeds of the arrivals."""

import csv
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

import eldr_sim as es
from eldr_sim.outputs import write_rows
from eldr_sim.planning.compare.policies import Comparison
from eldr_sim.policies.eldr.signature import decode_overlap, idf_weights, select_layers, transformed
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from eldr_sim.traces.routing.manifest import builtin_traces
from eldr_sim.traces.routing.overlap import request_overlap
from eldr_sim.traces.routing.spectrum import request_spectrum
from eldr_sim.traces.routing.statistics import distinct_experts
from eldr_sim.traces.routing.synthetic.presets import preset_model
from eldr_sim.traces.routing.synthetic.synthesize import synthesize_like
from eldr_sim.validation.synthetic_twin import reuse_by_lag

OUT = Path(__file__).parents[1] / "docs" / "data" / "presets_beside_recordings.csv"
SEEDS = 3
BATCH = 8
LAGS = (1, 16, 64)
REQUESTS = 400  #: most requests whose rho is taken, evenly
POLICIES = ("eldr", "domain", "marginal_cost", "oracle")
#: The cluster of the gains: 8P16D on H100, answers longer than recorded ones go round.
CLUSTER: dict[str, Any] = {
    "topology": "8P16D", "request_rate": 100, "duration": 20, "warmup": 8, "output_len": 256,
    "workload": "trace", "seeds": SEEDS,
}  # fmt: skip
#: The preset of each recording; `reference-moe` has none, so that of the most similar shape.
PRESET_OF = {
    "gpt-oss-20b": "GPT-OSS-20B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "reference-moe": "Qwen3-30B-A3B",
}
#: Standard deviation, as a share, of figures of recordings of few requests: of sets of 12 passages
#: of Qwen3's lengths, cut from gpt-oss-20b.
SCATTER = {
    ("qwen3-30b-a3b", "variance between requests"): 0.17,
    ("qwen3-30b-a3b", "dimensions"): 0.19,
}
Figures = dict[str, float]


def figures(trace: RoutingTrace) -> Figures:
    """Measure a trace; a figure for which it has too few requests or tokens is left out."""
    found: Figures = {}
    overlap = request_overlap(trace)
    found["distinct experts, 32 tokens of a request"] = overlap.one_request[32]
    rows = [row for row in distinct_experts(trace, [BATCH]) if row.batch == BATCH]
    if rows:
        one = fmean(x for row in rows for x in row.same_domain.values())
        mixed = fmean(row.mixed for row in rows)
        found[f"distinct experts, {BATCH} requests of a domain"] = one
        found[f"distinct experts, {BATCH} requests across domains"] = mixed
    if (spectrum := request_spectrum(trace)) is not None:
        found["variance between requests"] = spectrum.variance
        found["dimensions"] = spectrum.dimensions
        if spectrum.label is not None:
            found["share that the domain explains"] = spectrum.label
    found["load of the busiest expert / mean"] = fmean(overlap.load_max_over_mean)
    reuse = reuse_by_lag(trace)
    found |= {f"overlap of tokens at lag {lag}": reuse[lag] for lag in LAGS}
    every = np.arange(trace.n_requests)
    if len(every) > REQUESTS:
        every = np.linspace(0, len(every) - 1, REQUESTS).astype(np.int64)
    counts = trace.prompt_counts(every)
    pairs = decode_overlap(trace.decode_activation(every), np.random.default_rng(0))
    for kind in ("count", "count-idf"):
        scores = transformed(counts, kind, idf_weights(counts))
        found[f"rho, {kind}"] = float(select_layers(scores, pairs, "all").rho[-1])
    return found


def draw(trace: RoutingTrace, preset: str, seed: int, out: Path) -> RoutingTrace:
    """Draw a recording's requests by a preset, its domains explaining as much as recorded."""
    spectrum = request_spectrum(trace)
    label = None if spectrum is None else spectrum.label
    part = min(max(label or 0.0, 0.0), 1.0)
    model = preset_model(
        preset,
        n_layers=trace.n_layers,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        domains=trace.domains,
        settings=dict.fromkeys(("task", "language"), part),
        seed=seed,
    )
    return synthesize_like(model, trace, out, seed=seed)


def gains(trace: RoutingTrace, model: str) -> dict[str, str]:
    """Return the change of median TPOT against round robin, % with its 95% interval, by policy."""
    policies = [p for p in POLICIES if p != "domain" or len(trace.domains) > 1]
    found = es.compare(
        policy=["round_robin", *policies], model=model, trace=str(trace.path), **CLUSTER
    )
    assert isinstance(found, Comparison)
    return {
        f"{d.name}, median TPOT, %": f"{d.percent:+.1f} [{d.low:.1f}, {d.high:.1f}]"
        for d in found.differences
        if (d.metric, d.reference) == ("median_tpot_ms", "round_robin")
    }


def beside(name: str) -> list[dict[str, str]]:
    """Return a recording's rows: each figure as recorded, and as its preset draws it."""
    name, _, preset = name.partition("=")
    trace, preset = open_trace(name), preset or PRESET_OF[name]
    recorded = figures(trace)
    rows = []

    def row(figure: str, recorded: str, drawn: str, ratio: str) -> None:
        about = {
            "recording": Path(name).name,
            "figure": figure,
            "recorded": recorded,
            "preset": preset,
        }
        rows.append(about | {"drawn": drawn, "drawn / recorded": ratio})

    with tempfile.TemporaryDirectory() as folder:
        draws = [draw(trace, preset, seed, Path(folder) / f"{seed}") for seed in range(SEEDS)]
        each = list(map(figures, draws))
        for figure, value in recorded.items():
            values = [of[figure] for of in each]
            spread = f"{fmean(values):.3g} ± {stdev(values):.2g}"
            ratio, scatter = fmean(values) / value, SCATTER.get((name, figure))
            far = f" ({abs(ratio - 1) / scatter:.1f} deviations of 12 passages)" if scatter else ""
            row(figure, f"{value:.3g}", spread, f"{ratio:.2f}{far}")
        ours = gains(draws[0], preset)
        for figure, gain in gains(trace, preset).items():
            row(figure, gain, ours[figure], "")
    return rows


def main(names: list[str]) -> None:
    """Replace the rows of recordings, one after the other."""
    for name in names or builtin_traces():
        with OUT.open(encoding="utf-8", newline="") as file:
            kept = list(csv.DictReader(file))
        rows = beside(name)
        known = [row["recording"] for row in kept] + [rows[0]["recording"]]
        at = known.index(rows[0]["recording"])
        others = [row for row in kept if row["recording"] != rows[0]["recording"]]
        write_rows(OUT, others[:at] + rows + others[at:])
        print(f"{name}: done")


if __name__ == "__main__":
    main(sys.argv[1:])
