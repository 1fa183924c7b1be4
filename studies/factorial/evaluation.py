"""A full factorial of four decisions that papers make, on two models, two GPUs and two loads.

Router (ELDR or the fewest requests), replica choice (METRO, charged what its kernel took or free,
or vLLM's hash), placement (linear, EPLB's or GRACE-MoE's) and queue (Gimbal's shortest prompt first
with ageing, or first come). Every cell serves the same requests under a seed, so that effects are
differences of equal draws. GRACE decides itself how many copies there are; the other two have an
eighth of the experts twice."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.charts import bars
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.slo import t_interval
from eldr_sim.planning.studies.figures import Claim, Reproduction, Runner, change, grouped, spread

METRICS = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
#: What the methods are judged by.
BEST = METRICS[-1]
ROUTERS = {"jsq": "jsq", "ELDR": "eldr"}
CHOICES = {"hash": "hash", "METRO": "metro", "METRO free": "metro:overhead_us=0"}
PLACEMENTS = {"linear": "linear", "EPLB": "eplb", "GRACE": "grace"}
QUEUES = {"FCFS": "fcfs", "Gimbal": "sjf_aging"}
_FACTORS = ("router", "replicas", "placement", "queue")


class Cell(NamedTuple):
    """A level of each factor."""

    router: str
    replicas: str
    placement: str
    queue: str

    @property
    def changed(self) -> tuple[str, ...]:
        """The factors that are not as in the plain cluster."""
        return tuple(f for f in _FACTORS if getattr(self, f) != getattr(PLAIN, f))

    def __str__(self) -> str:
        return " + ".join(getattr(self, f) for f in self.changed) or "plain"


CELLS = tuple(Cell(*levels) for levels in product(ROUTERS, CHOICES, PLACEMENTS, QUEUES))
PLAIN = Cell("jsq", "hash", "linear", "FCFS")


class Setting(NamedTuple):
    """What serves which requests, how fast they come."""

    model: str
    trace: str
    gpu: str
    rate: float

    def __str__(self) -> str:
        return f"{self.model}, {self.gpu}, {self.rate:g}/s"

    def fields(self, cell: Cell) -> dict[str, Any]:
        """Return the fields of a run."""
        redundant = {"Qwen3-30B-A3B": 16, "GPT-OSS-20B": 4}[self.model]
        return {
            "model": self.model, "trace": self.trace, "gpu": self.gpu, "request_rate": self.rate,
            "workload": "task" if self.trace == "reference-moe" else "trace",
            "policy": ROUTERS[cell.router], "replica_choice": CHOICES[cell.replicas],
            "queue_order": QUEUES[cell.queue],
            "decode": {
                "data_parallel_size": 4, "enable_expert_parallel": True,
                "expert_placement": PLACEMENTS[cell.placement],
                "num_redundant_experts": 0 if cell.placement == "GRACE" else redundant,
            },
        }  # fmt: skip


#: Rates at about six and nine tenths of what the prefill workers can do.
SETTINGS = tuple(
    Setting(model, trace, gpu, rate)
    for model, trace, gpu, rates in (
        ("Qwen3-30B-A3B", "reference-moe", "H100", (24.0, 36.0)),
        ("Qwen3-30B-A3B", "reference-moe", "A100-80GB", (10.0, 15.0)),
        ("GPT-OSS-20B", "gpt-oss-20b", "H100", (45.0, 70.0)),
        ("GPT-OSS-20B", "gpt-oss-20b", "A100-80GB", (18.0, 27.0)),
    )
    for rate in rates
)
_BASE: dict[str, Any] = {
    "frontend": "none",
    "topology": "2P2D", "input_len": 2000, "output_len": 400, "random_range_ratio": 0.9,
    "all2all_backend": "allgather_alltoall",
}  # fmt: skip


def make_runner(quick: bool, progress: Callable[[float], None]) -> Runner:
    """Return the runner of the evaluation."""
    return Runner(_BASE | {"num_requests": 60 if quick else 150}, progress=progress)


def figures(runner: Runner, quick: bool) -> dict[str, Callable[[], Reproduction]]:
    """Return the one figure."""
    settings, seeds = (SETTINGS[::4], range(2)) if quick else (SETTINGS, range(3))
    return {"factorial": lambda: factorial(runner, settings, seeds)}


RunCache = Mapping[tuple[Setting, Cell], Sequence[Summary]]


def factorial(runner: Runner, settings: Sequence[Setting], seeds: Sequence[int]) -> Reproduction:
    """Return every cell against the plain one, and the effects, by setting and over all."""
    cases = {(s, cell): s.fields(cell) for s in settings for cell in CELLS}
    runs = runner.paired(cases, seeds)
    rows: list[dict[str, Any]] = []
    for (setting, cell), own in runs.items():
        row: dict[str, Any] = {"kind": "cell", "what": str(cell), "setting": str(setting)}
        for metric in METRICS:
            row |= spread(f"{metric}_%", change(own, runs[setting, PLAIN], metric))
        rows.append(row)
    for name, contrast in contrasts().items():
        for setting in settings:
            rows.append(_effect(name, contrast, runs, [setting]))
        rows.append(_effect(name, contrast, runs, settings))
    best, why = joint_search(runs, settings)
    alone = [cell for cell in CELLS if len(cell.changed) == 1]
    single = min(alone, key=lambda cell: score(runs, settings, cell))
    both = [_logs(runs, s, best, BEST) - _logs(runs, s, single, BEST) for s in settings]
    gain = t_interval(_percent(np.concatenate(both)))
    claims = [
        Claim(f"the best combination ({best}) over the best method alone ({single}), mean "
              "end-to-end time", -100.0, -0.1, gain.mean, tolerance=0.0, reason=why,
              stated=False, interval=gain[1:])
    ]  # fmt: skip
    claims += [
        Claim(f"{row['what']}, mean end-to-end time over all settings", -100.0, -0.1,
              row[f"{BEST}_%"], tolerance=0.0, stated=False,
              interval=(row[f"{BEST}_%_low"], row[f"{BEST}_%_high"]))
        for row in rows if row["kind"] == "effect" and row["setting"] == "all"
    ]  # fmt: skip
    shown = [row for row in rows if row["kind"] == "effect" and row["setting"] != "all"]
    ends = f"{BEST}_%_low", f"{BEST}_%_high"
    draw = bars(shown, "what", f"{BEST}_%", "setting", ends=ends)
    title = "main effects and interactions of four methods (not in the papers)"
    return Reproduction("factorial", title, rows, claims, draw)


def contrasts() -> dict[str, dict[Cell, float]]:
    """Return the weights of cells in each main effect (method less baseline, mean over the others'
    levels) and interaction (both less the sum of the two alone). In logarithms a method that saves
    its share whatever the others do has none."""
    methods = [("router", "ELDR"), ("replicas", "METRO"), ("replicas", "METRO free"),
               ("placement", "EPLB"), ("placement", "GRACE"), ("queue", "Gimbal")]  # fmt: skip
    found = {level: _weights({factor: level}) for factor, level in methods}
    for (one, a), (other, b) in combinations(methods, 2):
        if one != other:
            found[f"{a} x {b}"] = _weights({one: a, other: b})
    return found


def _weights(levels: Mapping[str, str]) -> dict[Cell, float]:
    """Return the weights of an effect of one factor's level, or of two factors'."""
    weights = {}
    for cell in CELLS:
        weight = 1.0
        for factor, level in levels.items():
            own, base = getattr(cell, factor), getattr(PLAIN, factor)
            weight *= {level: 1.0, base: -1.0}.get(own, 0.0)
        if weight:
            weights[cell] = weight
    scale = len(weights) / 2 ** len(levels)
    return {cell: weight / scale for cell, weight in weights.items()}


def _effect(
    name: str, contrast: Mapping[Cell, float], runs: RunCache, settings: Iterable[Setting]
) -> dict[str, Any]:
    """Return an effect, %, with its interval over seeds, and settings where there are several."""
    several = list(settings)
    label = str(several[0]) if len(several) == 1 else "all"
    row: dict[str, Any] = {"kind": "effect", "what": name, "setting": label}
    for metric in METRICS:
        each = [
            np.sum([w * _logs(runs, s, cell, metric) for cell, w in contrast.items()], axis=0)
            for s in several
        ]
        row |= spread(f"{metric}_%", t_interval(_percent(np.concatenate(each))))
    return row


def joint_search(runs: RunCache, settings: Sequence[Setting]) -> tuple[Cell, str]:
    """Return the cell of the least mean end-to-end time over all settings, and how many it wins."""
    best = min(CELLS, key=lambda cell: score(runs, settings, cell))
    own = [min(CELLS, key=lambda cell: score(runs, [s], cell)) for s in settings]
    counts = grouped(map(str, own), lambda name: name)
    said = ", ".join(f"{name} ({len(each)})" for name, each in counts.items())
    charged = [cell for cell in CELLS if cell.replicas != "METRO free"]
    known = min(charged, key=lambda cell: score(runs, settings, cell))
    return best, f"by setting: {said}; of those with METRO at its published cost: {known}"


def score(runs: RunCache, settings: Sequence[Setting], cell: Cell) -> float:
    """Return the mean logarithm of a cell's end-to-end time over settings and seeds."""
    return float(np.mean([_logs(runs, s, cell, BEST) for s in settings]))


def _logs(runs: RunCache, setting: Setting, cell: Cell, metric: str) -> np.ndarray[Any, Any]:
    return np.log([float(run[metric]) for run in runs[setting, cell]])


def _percent(logs: np.ndarray[Any, Any]) -> list[float]:
    """Return differences of logarithms as changes, %."""
    return [100.0 * float(value) for value in np.expm1(logs)]
