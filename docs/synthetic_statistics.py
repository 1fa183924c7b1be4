"""Write docs/data/synthetic_*.csv: statistics of recordings, of what is fitted to them, of presets.
``python docs/synthetic_statistics.py [statistics | held_out] && python docs/render.py`` from the
root; fits to halves take minutes. Numbers of twins are means over four seeds."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eldr_sim.outputs import write_rows
from eldr_sim.traces.requests.texts import DOMAIN_MIXES
from eldr_sim.traces.routing.format import RoutingTrace, open_trace
from eldr_sim.traces.routing.overlap import MIXED, ONE_REQUEST, QUANTILES, request_overlap
from eldr_sim.traces.routing.synthetic.drawn import Shape, drawn_trace
from eldr_sim.traces.routing.synthetic.model import RoutingModel
from eldr_sim.traces.routing.synthetic.model_fit import fit_routing_model
from eldr_sim.traces.routing.synthetic.presets import fitted_model
from eldr_sim.traces.routing.synthetic.synthesize import synthesize_like
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation.synthetic_twin import (
    STEP_BATCH,
    prompt_decode_rho,
    reuse_by_lag,
    step_spread,
)

DATA = Path(__file__).with_name("data")
SEEDS = (0, 1, 2, 3)
LAGS = (1, 4, 16, 64)


@dataclass
class Room:
    """Where traces are written."""

    path: Path
    made: int = 0

    def next(self) -> Path:
        """Return a folder that is not there yet."""
        self.made += 1
        self.path.mkdir(exist_ok=True)
        return self.path / f"{self.made}"

    def part(self, trace: RoutingTrace, requests: NDArray[np.intp]) -> RoutingTrace:
        """Write some requests of a trace, as one domain."""
        first, n = trace.recorded_rows(requests)
        rows = [trace.experts[f : f + k] for f, k in zip(first.tolist(), n.tolist(), strict=True)]
        about = trace.manifest
        return write_trace(
            self.next(),
            experts=np.concatenate(rows),
            request_id=[trace.request_id[i] for i in requests.tolist()],
            domain=["all"] * len(requests),
            prompt_len=trace.prompt_len[requests],
            output_len=trace.output_len[requests],
            is_calibration=np.arange(len(requests)) % 2 == 0,
            model=about.model,
            n_experts=about.n_experts,
            domains=["all"],
            captured_by=about.captured_by,
            source_data=about.source_data,
            tool_versions=about.tool_versions,
            provenance="imported",
        )

    def twins(self, model: RoutingModel, trace: RoutingTrace) -> list[RoutingTrace]:
        """Draw traces of the same requests."""
        return [synthesize_like(model, trace, self.next(), seed=seed) for seed in SEEDS]


Figures = dict[str, list[float]]


def figures(trace: RoutingTrace) -> Figures:
    """Measure a trace: some numbers a row of the table, NaN where it is too small for one."""
    overlap = request_overlap(trace)
    load, reuse = overlap.load_max_over_mean, reuse_by_lag(trace)
    few = [b for b in MIXED if b in (4, 8, 16)]
    many = [b for b in MIXED if b >= 32]
    short, long = ONE_REQUEST[:3], ONE_REQUEST[3:]

    def of(known: dict[int, float], keys: Sequence[int]) -> list[float]:
        return [known.get(key, np.nan) for key in keys]

    def words(keys: Sequence[int]) -> str:
        return " / ".join(map(str, keys))

    spread = step_spread(trace)[1] if trace.n_requests >= STEP_BATCH else np.nan
    return {
        f"distinct experts a layer, a token of each of {words(few)} requests": of(
            overlap.mixed, few
        ),
        f"of {words(many)}": of(overlap.mixed, many),
        f"of {words(short)} consecutive tokens of a request": of(overlap.one_request, short),
        f"of {words(long)}": of(overlap.one_request, long),
        "load of the busiest expert / mean, over layers; least, most": [
            float(np.mean(load)),
            min(load),
            max(load),
        ],
        "coefficient of variation of the load": [float(np.mean(overlap.load_cv))],
        f"cosine of two requests' counts, {words(QUANTILES)}%": of(
            overlap.cosine_between, QUANTILES
        ),
        "to the nearest request; of a request's halves": [
            overlap.cosine_nearest,
            overlap.cosine_within,
        ],
        f"reuse at lag {words(LAGS)}": of(reuse, LAGS),
        f"standard deviation of distinct experts over steps of batch {STEP_BATCH}": [spread],
        "rho of count-idf signatures, all layers (ELDR, Eq. 1)": [
            prompt_decode_rho(trace.for_calibration, trace.domains)
        ],
    }


def mean(traces: Sequence[RoutingTrace]) -> Figures:
    """Return the means of the figures of several traces."""
    each = [figures(trace) for trace in traces]
    return {name: np.mean([one[name] for one in each], axis=0).tolist() for name in each[0]}


def table(columns: dict[str, Figures]) -> list[dict[str, str]]:
    """Return columns of figures as rows of a table."""
    rows = []
    for name in next(iter(columns.values())):
        digits: Callable[[float], str] = "{:.1f}".format
        if not name.startswith(("distinct", "of ", "load")):
            digits = "{:.2f}".format
        cells = {
            column: " / ".join("-" if np.isnan(x) else digits(x) for x in own[name])
            for column, own in columns.items()
        }
        rows.append({"statistic": name} | cells)
    return rows


def whole(room: Room) -> list[dict[str, str]]:
    """Recordings beside what is drawn from all of them."""
    qwen, gpt = open_trace("qwen3-30b-a3b"), open_trace("gpt-oss-20b")
    task = tuple(DOMAIN_MIXES["task"].items())
    shape = Shape(qwen.n_layers, qwen.n_experts, qwen.top_k)
    return table(
        {
            "Qwen3 real": figures(qwen),
            "fitted, same lengths": mean(room.twins(fitted_model("qwen3-30b-a3b"), qwen)),
            "preset, task (the default)": figures(drawn_trace("Qwen3-30B-A3B", shape, task)),
            "reference-moe": figures(open_trace("reference-moe")),
            "gpt-oss-20b real": figures(gpt),
            "gpt-oss-20b fitted, same lengths": mean(room.twins(fitted_model("gpt-oss-20b"), gpt)),
        }
    )


def held_out(room: Room) -> list[dict[str, str]]:
    """Requests beside what is drawn from a fit to others of the recording."""
    columns: dict[str, Figures] = {}
    qwen, gpt = open_trace("qwen3-30b-a3b"), open_trace("gpt-oss-20b")
    first = qwen.domain == 0
    halves = [
        ("Qwen3 file a", "Qwen3, fitted to b", qwen, first),
        ("file b", "fitted to a", qwen, ~first),
        ("gpt-oss-20b serving", "fitted to the calibration split", gpt, ~gpt.is_calibration),
    ]
    for name, of_other, trace, judged in halves:
        part = room.part(trace, np.flatnonzero(judged))
        model = fit_routing_model(room.part(trace, np.flatnonzero(~judged)))
        columns |= {name: figures(part), of_other: mean(room.twins(model, part))}
    return table(columns)


def main() -> None:
    """Write the tables that are named, or both."""
    with tempfile.TemporaryDirectory() as folder:
        made = {"statistics": whole, "held_out": held_out}
        for name in sys.argv[1:] or made:
            write_rows(DATA / f"synthetic_{name}.csv", made[name](Room(Path(folder) / name)))


if __name__ == "__main__":
    main()
