"""METRO section VI-C: decode throughput against latency, over batches and layouts (Fig. 12, 13).

Decode steps alone, as the paper has them, need no queues: a step of so many sequences at the mean
context is attention, dense layers and head of an engine's share, MoE layers of drawn batches, and
what the all-to-all takes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.charts import Draw, bars, lines
from eldr_sim.kernel_profiles.gpus import GPU, load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all, uniform_copies
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import NODE_GPUS, Backend, Parallelism
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel, build_step_time_model
from eldr_sim.planning.slo import Interval, paired_percent
from eldr_sim.planning.studies.figures import Claim, Reproduction, percent, spread
from eldr_sim.policies.replicas.metro import MetroParameters
from studies.metro.results import ASSUMED, CHARGED, Case, Setup
from studies.metro.routing import Routing, route

#: 1K in and 2K out: the mean over a request's decode steps.
CONTEXT = 2048
RATIOS = (1.0, 1.125, 1.5)
#: Of the paper's Table II.
BATCHES = {"Qwen3-235B-A22B": (64, 128, 256, 512, 1024), "DeepSeek-V3": (128, 256, 512, 1024)}


class Point(NamedTuple):
    """One configuration of decode GPUs."""

    case: str
    ratio: float
    choice: str  #: none, EPLB, METRO (its kernel free), or METRO with its 26 us
    layout: str
    batch: int
    tpot_ms: float
    tokens_s_gpu: float


def _layouts(n_gpus: int) -> list[Parallelism]:
    """Return data-parallel attention with experts over all GPUs, and one full-TP engine."""
    sizes = [size for size in (1, 2, 4, 8) if size < n_gpus]
    shared = [Parallelism(size, True, n_gpus // size) for size in sizes]
    return shared + ([Parallelism(n_gpus)] if n_gpus <= NODE_GPUS else [])


def points(setup: Setup, routing: Routing, n_batches: int) -> list[Point]:
    """Return every configuration of a set-up: batch, layout, ratio and choice."""
    made_points = []
    for layout in _layouts(setup.n_gpus):
        step_time = steps_of(setup.model, load_gpu(setup.gpu), layout)
        for batch in BATCHES[setup.model]:
            if batch < layout.data_parallel_size:
                continue
            for ratio in RATIOS if layout.data_parallel_size > 1 else RATIOS[:1]:
                for choice in ("none",) if ratio == 1.0 else ASSUMED:
                    drawn = routing.batches(batch, n_batches)
                    seconds = step_s(routing, step_time, drawn, ratio, choice)
                    case = f"{setup.model}, {routing.domain}", ratio, choice, _named(layout), batch
                    rate = batch / seconds / layout.n_gpus
                    made_points.append(Point(*case, 1e3 * seconds, rate))
    return made_points


def _named(layout: Parallelism) -> str:
    if layout.data_parallel_size == 1:
        return f"TP{layout.tensor_parallel_size}"
    return f"TP{layout.tensor_parallel_size} x DP{layout.data_parallel_size}, EP{layout.n_gpus}"


def steps_of(model: str, gpu: GPU, layout: Parallelism) -> StepTimeModel:
    """Return the step times of a layout."""
    return build_step_time_model(
        load_model(model), gpu, max_num_seqs=1024, max_model_len=2 * CONTEXT, parallelism=layout
    )


def step_s(
    routing: Routing,
    step_time: StepTimeModel,
    batches: Ints,
    ratio: float,
    choice: str,
    *,
    gathers: bool = True,
    moe_scale: float = 1.0,
    context: int = CONTEXT,
    alone: bool = False,
) -> float:
    """Return the time of a decode step, s, mean over ``batches``, ``[steps, tokens]``. ``gathers``:
    whether METRO's tokens are gathered before the gate, or its dispatch costs what an all-to-all's
    does; ``moe_scale``: how many times its table the MoE layer takes; ``context``: tokens of a
    sequence; ``alone``: MoE layers, dispatch and combine without the rest of the step."""
    layout, model, layers = step_time.parallelism, step_time.model, step_time.n_moe_layers
    n, batch = layout.n_gpus, batches.shape[1]
    each = -(-batch // layout.data_parallel_size)
    if layout.data_parallel_size == 1:
        active = route(routing, routing.placement(1.0), "even", batches).active
        return step_time.decode_s([active] * layers, batch, context)
    parts = step_time.parts(each, each * context, activated=[0.0] * layers)
    own = 0.0 if alone else sum(parts) - parts.moe
    placement, metro = routing.placement(ratio), choice.startswith("METRO")
    moe = step_time.rank_moe(placement.expert.shape[1] // n, batch * model.top_k)
    number = ("metro_sorted" if choice == SORTED else "metro") if metro else "even"
    layer = moe_scale * 1e-6 * route(routing, placement, number, batches, moe).moe_us
    backend: Backend = "allgather_alltoall" if metro and gathers else "nccl_alltoall"
    curve = build_all_to_all(model, step_time.gpu, backend, n, gpus_per_node=n).gathered
    tokens = -(-batch // n)
    copies = tokens * uniform_copies("nccl_alltoall", model.n_experts, model.top_k, n, n)[0]
    gathered = tokens * (n - 1.0) if metro and gathers else copies
    dispatch_bytes, combine_bytes = curve.dispatch_bytes * gathered, curve.combine_bytes * copies
    dispatch = np.interp(dispatch_bytes, curve.dispatch_knots, curve.dispatch_s)
    combine = np.interp(combine_bytes, curve.combine_knots, curve.combine_s)
    charged = 1e-6 * MetroParameters().overhead_us if choice == CHARGED else 0.0
    return own + layers * (layer + float(dispatch) + float(combine) + charged)


SORTED = "METRO, experts of one copy first"


class Form(NamedTuple):
    """A reading of what the paper does not tell of its simulator."""

    name: str
    gathers: bool = False  #: whether tokens are gathered, as METRO's text has it
    roofline: bool = True  #: whether times are a roofline's instead of the imported tables'
    metro: str = "METRO"
    context: int = CONTEXT
    alone: bool = False  #: whether MoE layers are all of a step


_LIKE = "rooflines alone, dispatched as by an all-to-all"
FORMS = (
    Form("imported tables, tokens gathered", True, False),
    Form("imported tables, dispatched as by an all-to-all (Sec. IV-C)", False, False),
    Form(_LIKE),
    Form(f"{_LIKE}; experts of one copy first", metro=SORTED),
    Form(f"{_LIKE}; contexts of 1,024 tokens", context=1024),
    Form(f"{_LIKE}; both", metro=SORTED, context=1024),
    Form(f"{_LIKE}; MoE layers without the rest of the step", alone=True),
)
#: The MoE layer of 8 A100 at 1.5 copies: the paper's Figure 6 has 281 to 370 us.
PAPER_LAYER_US = 325.5


def forms(cases: Sequence[tuple[Setup, Routing]], measured: Case, n_batches: int) -> Reproduction:
    """Decode steps at 1.5 copies under each reading of what the paper does not tell. Changes are
    METRO's against EPLB's split, paired over five draws of batches."""
    rows: list[dict[str, Any]] = []

    def compare(
        setup: Setup, routing: Routing, name: str, metro: str, gpu: GPU, **told: Any
    ) -> Interval:
        layout = Parallelism(1, True, setup.n_gpus)
        step_time = steps_of(setup.model, gpu, layout)
        times: dict[str, list[float]] = {"EPLB": [], metro: [], "none": []}
        for seed in range(5):
            drawn = routing.batches(setup.in_flight, n_batches, seed)
            for choice, own in times.items():
                ratio = 1.0 if choice == "none" else 1.5
                own.append(step_s(routing, step_time, drawn, ratio, choice, **told))
        difference = paired_percent(times[metro], times["EPLB"])
        split = paired_percent(times["EPLB"], times["none"])
        rows.append(
            {"model": setup.model, "gpus": f"{setup.n_gpus} {setup.gpu}", "routing": routing.name}
            | {"form": name, **spread("METRO against EPLB, %", difference)}
            | spread("EPLB against no copies, %", split)
        )
        return difference

    claims = []
    for form in FORMS:
        found = []
        for setup, routing in cases:
            gpu = load_gpu(setup.gpu)
            if form.roofline:  # no table is of such a GPU
                gpu = gpu.model_copy(update={"name": f"{gpu.name}, roofline"})
            told = {"gathers": form.gathers, "context": form.context, "alone": form.alone}
            found.append(compare(setup, routing, form.name, form.metro, gpu, **told))
        best = min(found)
        said = ", ".join(f"{f.mean:+.1f}" for f in found)
        claims.append(
            Claim(f"TPOT of a decode step at 1.5x falls by up to, {form.name}", -21.8, -21.8,
                  best.mean, reason=f"by case: {said}", interval=best[1:])
        )  # fmt: skip
    setup, routing, gpu = measured.setup, measured.routing, load_gpu(measured.setup.gpu)
    step_time = steps_of(setup.model, gpu, Parallelism(1, True, setup.n_gpus))
    placement = routing.placement(1.5)
    moe = step_time.rank_moe(placement.expert.shape[1] // setup.n_gpus,
                             setup.in_flight * step_time.model.top_k)  # fmt: skip
    drawn = routing.batches(setup.in_flight, n_batches)
    ours = route(routing, placement, "even", drawn, moe).moe_us
    for name, scale in (("our MoE table", 1.0), ("MoE layers at the paper's time", PAPER_LAYER_US)):
        times = scale if scale == 1.0 else scale / ours
        found_ = compare(setup, routing, name, CHARGED, gpu, moe_scale=times)
        claims.append(
            Claim(f"8 A100: TPOT of a decode step at 1.5x falls by, {name}", -12.9, -12.9,
                  found_.mean, interval=found_[1:],
                  reason=f"EPLB's MoE layer takes {ours * times:.0f} us")
        )  # fmt: skip
    draw = bars(rows, ("model", "routing"), "METRO against EPLB, %", "form",
                ends=("METRO against EPLB, %_low", "METRO against EPLB, %_high"))  # fmt: skip
    return Reproduction("forms", "METRO under each reading of its simulator", rows, claims, draw)


def frontier(own: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both throughput and TPOT, the fastest first."""
    best: list[Point] = []
    for point in sorted(own, key=lambda p: (p.tpot_ms, -p.tokens_s_gpu)):
        if not best or point.tokens_s_gpu > best[-1].tokens_s_gpu:
            best.append(point)
    return best


def at_tpot(own: Sequence[Point], tpot_ms: float, steps: bool) -> float:
    """Return the throughput of a frontier at a TPOT; 0 where none is as fast. The paper reads its
    frontier in ``steps``: the best batch of the grid. Between batches of a server that may run any,
    the line between two points is nearer to the truth."""
    line = frontier(own)
    if tpot_ms < line[0].tpot_ms:
        return 0.0
    if steps:
        return max(p.tokens_s_gpu for p in line if p.tpot_ms <= tpot_ms)
    return float(np.interp(tpot_ms, [p.tpot_ms for p in line], [p.tokens_s_gpu for p in line]))


def _gain(
    found: Sequence[Point], ratio: float, steps: bool, choice: str = "METRO", base: str = "EPLB"
) -> tuple[float, float]:
    """Return the least and most throughput of METRO over EPLB's, or over none's, at equal TPOT."""
    at = 1.0 if base == "none" else ratio
    other = [p for p in found if p.ratio == at and p.choice == base]
    metro = [p for p in found if p.ratio == ratio and p.choice == choice]
    tpots = [p.tpot_ms for p in frontier(metro) if p.tpot_ms >= frontier(other)[0].tpot_ms]
    gains = [at_tpot(metro, t, steps) / at_tpot(other, t, steps) for t in tpots]
    return (min(gains), max(gains)) if gains else (float("nan"), float("nan"))


def _against_none(
    found: Sequence[Point], ratio: float, choice: str = "METRO"
) -> tuple[float, float]:
    """Return the least and most gain of METRO over no replication at equal TPOT, %."""
    low, high = _gain(found, ratio, False, choice, "none")
    return percent(low, 1.0), percent(high, 1.0)


def figure_12(cases: Sequence[tuple[Setup, Routing]], n_batches: int) -> Reproduction:
    """Throughput a GPU against TPOT: EPLB's split, METRO and no replication."""
    made = [points(setup, routing, n_batches) for setup, routing in cases]
    by_case = {found[0].case: found for found in made}
    stepped = [_gain(found, 1.5, True)[1] for found in by_case.values()]
    smooth = {case: _gain(found, 1.5, False) for case, found in by_case.items()}
    said = "; ".join(f"{case}: {low:.2f} to {high:.2f}" for case, (low, high) in smooth.items())
    claims = [
        Claim("throughput at equal TPOT over EPLB's, 1.5x, least of the cases (steps of the grid)",
              1.98, 1.98, min(stepped), "x", 0.3, f"between the grid's batches: {said}"),
        Claim("throughput at equal TPOT over EPLB's, 1.5x, most (steps of the grid)", 4.11, 4.11,
              max(stepped), "x", 0.4, f"a step of the grid doubles the batch; between its batches: "
              f"{said}"),
    ]  # fmt: skip
    for ratio, paper in ((1.125, 4.3), (1.5, 5.0)):
        gains = {case: _against_none(found, ratio) for case, found in by_case.items()}
        charged = [_against_none(found, ratio, CHARGED)[1] for found in by_case.values()]
        claims.append(
            Claim(f"METRO at {ratio}x over no replication at equal TPOT, up to", paper, paper,
                  max(high for _, high in gains.values()), "%", 1.5,
                  "; ".join(f"{case}: {low:+.1f} to {high:+.1f}%"
                            for case, (low, high) in gains.items())
                  + f"; with the kernel's 26 us at most {max(charged):+.1f}%")
        )  # fmt: skip
    rows = [point._asdict() for found in by_case.values() for point in found]

    draw = _frontiers(list(by_case.values()))
    return Reproduction("figure_12", "decode throughput against latency", rows, claims, draw)


def _frontiers(cases: Sequence[Sequence[Point]]) -> Draw:
    """Draw the frontier of each choice and ratio, tokens/s a GPU by tokens/s of a user."""
    rows: list[dict[str, Any]] = []
    for found in cases:
        for key in dict.fromkeys((p.choice, p.ratio) for p in found):
            line = frontier([p for p in found if (p.choice, p.ratio) == key])
            rows += [p._asdict() | {"tokens_s_user": 1e3 / p.tpot_ms} for p in line]
    return lines(rows, "tokens_s_user", "tokens_s_gpu", ("choice", "ratio"), "case")


def figure_13(setup: Setup, routing: Routing, n_batches: int) -> Reproduction:
    """Which layout wins along the frontier: full tensor parallelism at the lowest latency."""
    found = points(setup, routing, n_batches)
    line = frontier(found)
    fast = [p for p in line if line[0].tpot_ms / p.tpot_ms > 0.9]
    claims = [
        Claim(
            "at 1/TPOT above 0.9 of the most, full tensor parallelism wins (share of the points)",
            100, 100, 100 * float(np.mean([p.layout.startswith("TP") and "DP" not in p.layout
                                           for p in fast])),
            "%", 1.0, "; ".join(f"{p.layout} at batch {p.batch}" for p in fast), neutral=50.0,
        ),
        Claim("the largest batch there is at most", 64, 64, max(p.batch for p in fast), "sequences",
              0.5, "; ".join(f"{p.layout} at batch {p.batch}: {p.tpot_ms:.2f} ms" for p in fast)),
    ]  # fmt: skip

    return Reproduction(
        "figure_13", f"layouts along the frontier: {setup.model}",
        [p._asdict() for p in line], claims, _frontiers([found]),
    )  # fmt: skip
