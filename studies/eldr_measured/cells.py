"""The measured cells (casys-kaist/ELDR, October 2026), and the run of each.

A cell is one run of the authors' cluster: 120 s of requests from an empty system, all of them
measured, 512 tokens each; one run a cell. Repeated ones differ by 1 to 3%, so a gain is known to
about one point. Their figure numbers are one less than those of the paper's text.

What is fitted to cells: the `published` MoE tables of MI300X to the median TPOT of ``rr`` in
Figures 10 and 11, and the host's launch times to the TTFT of ``rr`` at 20 requests/s. Both went
into the simulator; every other figure is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import pyarrow as pa
from pyarrow import csv

from eldr_sim.kernel_profiles.sources.mi300x import write_tables
from eldr_sim.outputs import process_folder
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.studies.figures import Runner, grouped, percent
from eldr_sim.simulator.setup.config.presets import preset_fields
from eldr_sim.traces.requests.texts import wanted_domains
from eldr_sim.traces.routing.synthetic.drawn import draw_served
from eldr_sim.traces.routing.synthetic.presets import preset_model

Kernels = Literal["fitted", "derived"]
"""MoE tables fitted to the round-robin cells, or from public kernel figures alone."""

FIGURES = {
    "10": "main_task",
    "11": "main_language",
    "13": "fig13_signature",
    "14": "fig14_cluster_balance",
    "15": "fig15_locality_band",
    "16": "fig16_prefix_cache",
}
POLICIES = {
    "rr": "round_robin",
    "random": "random",
    "jsq": "jsq:ties=random",
    "p2c": "p2c",
    "domain": "domain:ties=random",
    "eldr": "eldr",
}
METRICS = {
    "tpot_p50": "median_tpot_ms",
    "tpot_p95": "p95_tpot_ms",
    "tpot_p99": "p99_tpot_ms",
    "ttft_p50": "median_ttft_ms",
}
"""What was measured, and what we call it (of `metrics.streamed_by_prefill`)."""

#: Ours of the variants of the design-validation figures. Which of them ran with online refits no
#: file of the authors says: their scripts, that Figure 14 did not; their page, that the others did.
_VARIANTS = {
    "count_idf": "eldr:signature=count-idf",
    "gate_prob_all": "eldr:signature=gate-prob",
    "balanced": "eldr:refit_s=0,clustering=balanced",
    "vanilla": "eldr:refit_s=0,clustering=vanilla",
    **{f"tau-{tau}": f"eldr:tau={tau}" for tau in ("0", "0.1", "0.2", "0.3")},
}
_VARYING = ("workload", "policy", "request_rate", "tables")  #: by cell, of the main figures
N_DECODE = 16  #: decode workers
OUTPUT_LEN = 512  #: tokens of an answer


@dataclass(frozen=True)
class Cell:
    """One measured run."""

    #: Which; ``figure`` as the authors number it.
    figure: str
    dataset: str
    model: str
    policy: str
    variant: str
    rate: float
    measured: dict[str, float]  #: milliseconds by the names of :data:`METRICS`
    fields: dict[str, Any]  #: the run of ours that stands beside it

    def fitted(self, metric: str) -> bool:
        """Whether this very figure went into the simulator's MI300X rows."""
        mine = self.policy == "rr" and self.figure in ("10", "11")
        return mine and (metric == "tpot_p50" or (metric == "ttft_p50" and self.rate == 20.0))

    def batch(self, tpot_ms: float) -> float:
        """Return the mean batch of a decode worker at this TPOT, by Little's law."""
        return self.rate * (OUTPUT_LEN - 1) * tpot_ms / 1e3 / N_DECODE


@cache
def tables_of(kernels: Kernels) -> str | None:
    """Return the folder of MI300X tables; None: those of the package, which are `published`."""
    if kernels == "fitted":
        return None
    folder = process_folder("mi300x")
    write_tables(folder, fitted_to_cells=False)
    return str(folder)


def warmed_up(cell: Cell) -> Cell:
    """Return the cell with the authors' warm-up before it: 3,840 requests at 64/s, drained."""
    own = {name: value for name, value in cell.fields.items() if name in _VARYING}
    fields = preset_fields(f"eldr-artifact:{cell.model}+warm-up", own)
    return replace(cell, fields=fields)


def cells_of(figure: str, kernels: Kernels, quick: bool) -> list[Cell]:
    """Return the cells of a figure; ``quick`` takes some rates and policies, and 45 s of each."""
    path = files(__package__).joinpath("cells", f"{FIGURES[figure]}.csv")
    with path.open("rb") as file:
        rows = csv.read_csv(file).to_pylist()
    cells = []
    for row in rows:
        rate, policy = float(row["rate"]), row["policy"]
        if quick and (rate not in (40.0, 60.0, 80.0) or policy not in ("rr", "domain", "eldr")):
            continue
        which = figure, row["dataset"], row["model"], policy, row["variant"], rate
        measured = {metric: float(row[f"{metric}_ms"]) for metric in METRICS}
        cells.append(Cell(*which, measured, _fields(row, kernels, quick)))
    return cells


def _fields(row: dict[str, Any], kernels: Kernels, quick: bool) -> dict[str, Any]:
    figure, policy, rate = str(row["figure"]), row["policy"], float(row["rate"])
    fields: dict[str, Any] = {
        "workload": row["dataset"],
        "policy": _VARIANTS.get(row["variant"], POLICIES[policy]),
        "request_rate": rate,
        "num_requests": round(45 * rate) if quick else int(row["requests"]),
        "tables": tables_of(kernels),
    }
    if figure == "16":  # one prefill worker, and prompts that come again
        fields |= {"topology": "1P16D", "prompts": "shared", "prompt_lengths": "trace"}
        fields["enable_prefix_caching"] = row["variant"] == "cache-on"
    return preset_fields(f"eldr-artifact:{row['model']}", fields)


@cache
def long_routing(model: str, workload: str, gate_scores: bool) -> str:
    """Return a folder with the default routing of a model and workload, for answers like theirs.
    That is, as long as theirs: a request of the default goes through 64 tokens again and again. The
    folder lasts as long as this process; ``gate_scores``, of the same experts, take longer."""
    weights, folder = dict(wanted_domains(workload)), process_folder("routing")
    draw_served(preset_model(model), weights, folder, OUTPUT_LEN, gate_scores=gate_scores)
    return str(folder)


Pair = tuple[Cell, Summary]


def run_cells(runner: Runner, cells: Sequence[Cell]) -> list[Pair]:
    """Run the cells, each beside its summary; those of one routing as soon as it is drawn, so that
    an interrupted command keeps them."""
    found: dict[int, Summary] = {}
    routings = grouped(enumerate(cells), lambda at: (at[1].model, at[1].dataset, at[1].figure))
    for (model, dataset, figure), own in routings.items():
        trace = long_routing(model, dataset, figure == "13")
        cases = [cell.fields | {"trace": trace} for _, cell in own]
        found |= zip([at for at, _ in own], runner.run(cases), strict=True)
    return [(cell, found[at]) for at, cell in enumerate(cells)]


def run_main(runner: Runner, kernels: Kernels, quick: bool) -> list[Pair]:
    """Run the cells of both main figures, each figure by itself."""
    return [p for name in ("10", "11") for p in run_cells(runner, cells_of(name, kernels, quick))]


def ours(summary: Summary, metric: str) -> float:
    """Return a figure of ours as the authors measure it, ms."""
    return float(summary["streamed_by_prefill"][METRICS[metric]])


def reference_of(cell: Cell, pairs: Sequence[Pair]) -> Pair:
    """Return the round-robin run beside a cell: Figures 13 and 16 have one for each variant."""

    def beside(other: Cell) -> bool:
        same = (other.dataset, other.model, other.rate) == (cell.dataset, cell.model, cell.rate)
        scored = f"rr@{cell.variant.removeprefix('rr@')}"
        own = {"13": scored, "16": cell.variant}.get(cell.figure, other.variant)
        return same and other.policy == "rr" and other.variant == own

    return next(pair for pair in pairs if beside(pair[0]))


def gains(cell: Cell, summary: Summary, pairs: Sequence[Pair], metric: str) -> tuple[float, float]:
    """Return a cell's difference from round-robin, %: ours and measured."""
    reference, base = reference_of(cell, pairs)
    return (
        percent(ours(summary, metric), ours(base, metric)),
        percent(cell.measured[metric], reference.measured[metric]),
    )


def table_of(pairs: Sequence[Pair], kernels: Kernels) -> pa.Table:
    """Return a row a cell: measured, ours, errors, gains over round-robin, and what was fitted."""
    rows = []
    for cell, summary in pairs:
        which = ("figure", "dataset", "model", "policy", "variant", "rate")
        row: dict[str, Any] = {name: getattr(cell, name) for name in which}
        row |= {"run_as": summary["policy"], "kernels": kernels}
        for metric in METRICS:
            mine, measured = ours(summary, metric), cell.measured[metric]
            row[f"{metric}_ms"], row[f"{metric}_measured_ms"] = mine, measured
            row[f"{metric}_error_percent"] = percent(mine, measured)
            row[f"{metric}_fitted"] = cell.fitted(metric)
        for metric in ("tpot_p50", "tpot_p99"):
            both = gains(cell, summary, pairs, metric)
            row[f"{metric}_gain"], row[f"{metric}_gain_measured"] = both
        row["batch"] = cell.batch(ours(summary, "tpot_p50"))
        row["batch_measured"] = cell.batch(cell.measured["tpot_p50"])
        row["distinct_experts"] = summary["mean_active_experts_per_token"]
        row["own_tpot_p50_ms"] = summary["median_tpot_ms"]  # by our own definitions
        row["own_ttft_p50_ms"] = summary["median_ttft_ms"]
        row["provenance"] = summary["weakest_provenance"]
        rows.append(row)
    return pa.Table.from_pylist(rows)
