"""Hold every shipped recording against the preset that a run of its model draws from.

``python -m studies.presets_beside_recordings [NAME ...]`` from the root of a checkout writes
``docs/data/presets_beside_recordings.csv``, of all recordings or the named ones. A preset draws the
recording's own requests (domains, lengths, splits), so that all figures but chance are comparable;
it does so with `SEEDS` seeds, which also choose the topics of domains."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from eldr_sim.outputs import write_rows
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
#: The preset of each recording; `reference-moe` has none, so that of the most similar shape.
PRESET_OF = {
    "gpt-oss-20b": "GPT-OSS-20B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "reference-moe": "Qwen3-30B-A3B",
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


def drawn(trace: RoutingTrace, preset: str, seed: int) -> Figures:
    """Measure the preset's draw of a recording's requests."""
    model = preset_model(
        preset,
        n_layers=trace.n_layers,
        n_experts=trace.n_experts,
        top_k=trace.top_k,
        domains=trace.domains,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        return figures(synthesize_like(model, trace, Path(folder) / "drawn", seed=seed))


def beside(name: str) -> list[dict[str, str]]:
    """Return a recording's rows: each figure as recorded, and as its preset draws it."""
    trace, preset = open_trace(name), PRESET_OF[name]
    recorded = figures(trace)
    draws = list(map(partial(drawn, trace, preset), range(SEEDS)))
    rows = []
    for figure, value in recorded.items():
        values = [draw[figure] for draw in draws]
        ratio = fmean(values) / value
        rows.append(
            {
                "recording": name,
                "figure": figure,
                "recorded": f"{value:.3g}",
                "preset": preset,
                "drawn": f"{fmean(values):.3g} ± {stdev(values):.2g}",
                "drawn / recorded": f"{ratio:.2f}",
            }
        )
    return rows


def main(names: list[str]) -> None:
    """Write the table, row by row of what is known so far."""
    rows: list[dict[str, str]] = []
    for name in names or builtin_traces():
        rows += beside(name)
        write_rows(OUT, rows)
        print(f"{name}: done")


if __name__ == "__main__":
    main(sys.argv[1:])
