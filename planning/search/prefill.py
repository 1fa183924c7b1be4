"""Plans of workers that compute prompts and nothing else: how GPUs share the model, the tokens of a
step, and whether prompts are computed in chunks or, without room in a KV cache, whole."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import NODE_GPUS, Backend
from eldr_sim.planning.runs.run_cache import RunCache, Search
from eldr_sim.planning.runs.runner import with_seed
from eldr_sim.planning.search.answer import Answer, Question, Row
from eldr_sim.planning.search.axes import Axes, Space
from eldr_sim.planning.search.bounds import Bounds, Load, bounds
from eldr_sim.planning.search.candidates import (
    MOST_GPUS,
    SIZE_FIELDS,
    Candidate,
    ClusterTemplate,
    clusters_to_plan,
    gpu_label,
)
from eldr_sim.planning.search.prefill_strategy import (
    KIND_LABELS,
    KINDS,
    Kind,
    PrefillStrategy,
    prefill_label,
)
from eldr_sim.planning.search.shapes import BUSY
from eldr_sim.planning.search.trial import found_by_seed
from eldr_sim.planning.slo import Objective, t_interval
from eldr_sim.simulator.run import load_of, offered_load
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.requests import NO_PART
from eldr_sim.simulator.setup.config.run_config import RunConfig
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.setup.run_routing import routing_of

BACKENDS: tuple[Backend, ...] = ("nccl_alltoall", "deepep_ht", "allgather_reducescatter")
BUDGETS = (2048, 4096, 8192, 16_384, 32_768, 65_536)  #: token budgets to choose from
WINDOW = 4  #: MoE layers on a GPU beside the first where experts are offloaded
_AT_ONCE = (32, 512)  #: fewest and most prompts by which a worker's speed is estimated
#: Strategies of one GPU: it holds all experts, or copies them from the host.
_ALONE = ("tp", "async_ep")
#: Fields that a plan chooses.
_CHOSEN = (
    "data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size",
    "enable_expert_parallel", "num_redundant_experts",
)  # fmt: skip


def _fastest_backend(config: RunConfig, n_gpus: int, tokens: int) -> Backend:
    """Return the backend asked for, or the fastest for a step's tokens, routed evenly."""
    if config.cluster.all2all_backend != RUN_FIELDS["all2all_backend"].default:
        return config.cluster.all2all_backend
    model, gpu = load_model(config.engine.model), load_gpu(config.pool("prefill").gpu or "")

    def seconds(backend: Backend) -> float:
        routed = build_all_to_all(
            model, gpu, backend, n_gpus, gpus_per_node=config.cluster.gpus_per_node
        )
        inside, between = (tokens * copies for copies in routed.uniform_copies(model))
        return float(routed.dispatch_s(inside, between) + routed.combine_s(inside, between))

    return min(BACKENDS, key=seconds)


def _ways(
    config: RunConfig, kind: Kind, n_gpus: int, budget: int
) -> Iterator[tuple[PrefillStrategy, bool]]:
    """Yield strategies of a kind, with prompts whole or not: the first that fits is taken."""
    strategies = [PrefillStrategy(kind)]
    if kind == "dp_ep":
        strategies = [PrefillStrategy(kind, _fastest_backend(config, n_gpus, budget))]
    elif kind == "async_ep":
        offload_window, interference = (
            config.experts.offload_window,
            config.experts.gather_interference,
        )
        windows = (offload_window,) if offload_window else (0, WINDOW)
        strategies = [
            PrefillStrategy(
                kind, window=window, interference=interference if n_gpus > 1 else 0.0,
                gather=config.experts.expert_gather or "one_sided",
            )
            for window in (windows if n_gpus > 1 else windows[-1:])
        ]  # fmt: skip
    for whole in (True,) if config.experts.kv_cache_free else (False, True):
        for strategy in strategies:
            yield strategy, whole


def check_prefill_only(config: RunConfig, objective: Objective | None) -> None:
    """Raise InputError for what a plan of prefill workers alone chooses or cannot keep."""
    for name in _CHOSEN:
        if config.value(name) != RUN_FIELDS[name].default:
            problem = "a plan of prefill workers alone chooses the parallelism"
            raise InputError(name, problem, "--strategy and --tensor-parallel-size (GPUs a worker)")
    if objective is not None and objective.level.tpot is not None:
        raise InputError("slo", "prefill workers alone have no TPOT", "ttft or e2el")


def prefill_candidates(
    config: RunConfig,
    objective: Objective | None,
    max_gpus: int,
    sizes: Sequence[int] = (),
    strategies: Sequence[str] = (),
    *,
    apart: bool = True,
) -> list[Candidate]:
    """Return a candidate for each strategy and worker size, with a template for each token budget
    that has memory; without one, ``reasons``.

    ``config``: its token budget, window, gather and backend are kept; ``objective``: None asks for
    no bounds; ``sizes``: GPUs of a worker, powers of two up to a node if empty; ``apart``: sizes
    are separate candidates. Raises InputError if the configuration does not suit a plan."""
    check_prefill_only(config, objective)
    for name in strategies:
        if name not in KINDS or list(strategies).count(name) > 1:
            raise InputError("strategy", f"{name!r}", f"{', '.join(KINDS)}, each once")
    within("max_gpus", max_gpus, MOST_GPUS)
    config = config.model_copy(update={"topology": "1P"})
    model = load_model(config.engine.model)
    routing = routing_of(config.requests.workload, config.routing, model)
    load = offered_load(config, routing)
    prompts = load[0].prompt_len
    accepted = prompts[prompts <= (config.engine.max_model_len or model.max_position_embeddings)]
    longest = int(accepted.max(initial=1))
    candidates = []
    for kind in (kind for kind in KINDS if kind in strategies or not strategies):
        sized = [
            _candidate(config, objective, max_gpus, size, kind, longest, load)
            for size in sizes or [2**n for n in range(NODE_GPUS.bit_length())]
            if size <= max_gpus and (size > 1 or kind in _ALONE)
        ]
        candidates += sized if apart or not sized else [_of_all_sizes(kind, sized)]
    if not candidates:
        problem = (
            f"no worker of {', '.join(strategies) or 'these GPUs'} has {max_gpus} GPUs at most"
        )
        raise InputError("max_gpus", problem, "2 or more, or the size of a worker")
    return candidates


def _of_all_sizes(kind: Kind, sized: Sequence[Candidate]) -> Candidate:
    """Return candidates of one strategy as one."""
    templates = [template for each in sized for template in each.templates]
    reasons = [f"{each.policy}, {reason}" for each in sized for reason in each.reasons]
    return Candidate(sized[0].gpu, KIND_LABELS[kind], tuple(templates), tuple(reasons))


def by_speed(templates: Sequence[ClusterTemplate]) -> Search[list[ClusterTemplate]]:
    """Estimate how many workers templates take, by runs; return the likely cheapest first.

    One worker of each computes some steps of prompts that come at once; workers keep up if busy for
    85% of the time."""
    possible = [template for template in templates if not template.bounds.impossible]
    config = templates[0].config
    workload, _ = load_of(config)
    mean = float(workload.prompt_len.mean())
    summaries = yield [_at_once(each.config, mean) for each in possible]
    ranked = [template for template in templates if template.bounds.impossible]
    for template, summary in zip(possible, summaries, strict=True):
        speed = (summary["completed"] or 0) / (summary["makespan_s"] or math.inf)
        workers = template.max_workers + 1
        if speed > 0.0:
            workers = math.ceil(template.bounds.rate / (BUSY * speed))
        estimate = max(workers, template.bounds.n_prefill), 0
        ranked.append(dataclasses.replace(template, estimate=estimate))
    return sorted(ranked, key=lambda each: (each.estimated_cost, each.worker_sizes))


def _at_once(config: RunConfig, mean_prompt: float) -> RunConfig:
    """Return a run of prompts that fill two steps of a worker."""
    tokens = (config.engine.max_num_batched_tokens or 0) * config.cluster.data_parallel_size
    n = min(max(math.ceil(2 * tokens / mean_prompt), _AT_ONCE[0]), _AT_ONCE[1])
    return with_seed(
        config.model_copy(
            update=NO_PART | {"request_rate": math.inf, "num_requests": n, "warmup": 0.0}
        ),
        0,
    )


def _candidate(
    config: RunConfig,
    objective: Objective | None,
    max_gpus: int,
    size: int,
    kind: Kind,
    longest: int,
    load: Load,
) -> Candidate:
    max_num_batched_tokens = config.pool("prefill").max_num_batched_tokens
    templates: list[ClusterTemplate] = []
    refused: dict[str, list[int]] = {}
    label = ""
    for budget in (max_num_batched_tokens,) if max_num_batched_tokens else BUDGETS:
        why = ""
        for strategy, whole in _ways(config, kind, size, budget):
            sized = config.model_copy(
                update=strategy.fields(size)
                | {"kv_cache_free": whole, "max_num_batched_tokens": budget}
            )
            label = label or prefill_label(sized)
            problem = _refusal(sized, longest)
            if not problem:
                known = Bounds(1, 0, math.nan)
                if objective is not None:
                    known = bounds(sized, objective, load)
                templates.append(ClusterTemplate(sized, known, max_gpus, (known.n_prefill, 0)))
                break
            why = why or problem
        else:
            refused.setdefault(why, []).append(budget)
    reasons = tuple(
        f"refused at {', '.join(map(str, budgets))} tokens a step: {problem}"
        for problem, budgets in refused.items()
    )
    if templates:
        label = prefill_label(templates[-1].config)
    return Candidate(gpu_label(config), label, tuple(templates), reasons)


def _refusal(config: RunConfig, longest: int) -> str:
    """Return why a worker cannot be, or cannot compute the longest prompt; empty if it can."""
    try:
        engine = prepare(config).spec.prefill
    except InputError as error:
        if error.field not in (*SIZE_FIELDS, *_CHOSEN, "offload_window", "expert_gather"):
            raise
        return error.problem
    room = engine.max_num_batched_tokens
    if not config.experts.kv_cache_free:
        room = engine.n_blocks * config.engine.block_size
    what = "a step" if config.experts.kv_cache_free else "the KV cache"
    return "" if longest <= room else f"{what} of {room} tokens holds no prompt of {longest}"


def fastest_prompts(space: Space, seeds: int, runs: RunCache) -> Answer:
    """Find how prefill workers alone compute ``num_requests`` prompts at once at the least cost.

    Every strategy on every GPU and worker size is run with each token budget, on as many workers as
    there are GPUs for, the fastest budget under further ``seeds``. Raises InputError if a value is
    not valid, or contradicts another. ``space``: its GPUs per engine are those of a worker, its
    strategies :data:`KINDS` if empty; without prices, tokens a second and GPU decide."""
    config, max_gpus = space.config, space.max_gpus
    if config.requests.num_requests is None:
        raise InputError("num_requests", "none", "how many prompts come at once")
    asked, config = config, config.model_copy(update={"topology": "1P", "request_rate": math.inf})
    axes = Axes({"gpu": space.gpus})
    candidates = [
        candidate
        for each in clusters_to_plan(config, axes, space.prices or {})
        for candidate in prefill_candidates(
            each, None, max_gpus, space.tensor_parallel_sizes, space.strategies
        )
    ]
    found = runs.together([_fastest(candidate, seeds) for candidate in candidates])
    found.sort(key=lambda row: row.cost / row.figure.mean if row.figure else math.inf)
    return Answer(Question("fastest", asked, None, max_gpus, axes=axes), tuple(found), runs)


def _fastest(candidate: Candidate, seeds: int) -> Search[Row]:
    """Find the fastest budget of a candidate; of those that compute the most prompts."""
    config, made = None, []
    if candidate.templates:
        tried = [template.at(template.max_workers, 0) for template in candidate.templates]
        summaries = yield [with_seed(each, 0) for each in tried]
        fewest = min(summary["failed"] for summary in summaries)
        _, index = max(
            (summary["prefill_throughput"] or 0.0, -i)
            for i, summary in enumerate(summaries)
            if summary["failed"] == fewest
        )
        config = tried[-index]
        made = [*(yield [with_seed(config, seed) for seed in range(seeds)])]
    throughputs = [summary["prefill_throughput"] for summary in made if summary["completed"]]
    if not throughputs:
        reasons = list(candidate.reasons) or ["no prompt can be computed"]
        return Row(candidate.gpu, candidate.policy, without="refused", reasons=reasons)
    assert config is not None
    return Row(
        candidate.gpu, prefill_label(config), found_by_seed(config, made), t_interval(throughputs),
        tuple(throughputs), reasons=list(candidate.reasons),
    )  # fmt: skip
