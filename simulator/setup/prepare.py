"""What a run reads: model, GPUs, tables and trace, loaded and checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from eldr_sim.errors import InputError
from eldr_sim.inputs import within
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.front_end import NO_FRONT_END, load_front_end
from eldr_sim.kernel_profiles.models import ModelDims, load_model
from eldr_sim.kernel_profiles.steps.calibration import load_calibration
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.kernel_profiles.tables.format import load_tables
from eldr_sim.kernel_profiles.tables.library import track_table_use
from eldr_sim.policies import registry
from eldr_sim.simulator.plane.front_end import FrontEndSpec
from eldr_sim.simulator.plane.state import HERE, NO_POOL
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec, PoolSpec
from eldr_sim.simulator.setup.config.conditional import Conditional, parse_conditional
from eldr_sim.simulator.setup.config.engine_rules import (
    OPTIONS,
    api_servers,
    chat_template_s,
    version_fields,
)
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS, FrontEndConfig
from eldr_sim.simulator.setup.config.log_part import check_window
from eldr_sim.simulator.setup.config.pools import WorkerPool, pools_of
from eldr_sim.simulator.setup.config.run_config import Pool, RunConfig
from eldr_sim.simulator.setup.config.speculative import LOOKING_UP
from eldr_sim.simulator.setup.engine_specs import make_engine_spec
from eldr_sim.simulator.setup.kv_tiers import tiers_of
from eldr_sim.simulator.setup.memory import least_block_size, state_blocks, windows_of
from eldr_sim.simulator.setup.run_routing import check_need, routing_of
from eldr_sim.simulator.setup.transfer import HAND_OVERS, PRESETS, TransferModel, pull_between
from eldr_sim.traces.routing.format import RoutingTrace

_MOST_PLACES = 2**26  # 5 GB of their state


@dataclass(frozen=True)
class PreparedRun:
    """Everything that a run reads, loaded and checked; a dense model replays no trace."""

    model: ModelDims
    trace: RoutingTrace | None
    spec: ClusterSpec
    tables_used: frozenset[str] = frozenset()

    @property
    def step_time(self) -> StepTimeModel:
        """Step times of a decode worker; of a prefill worker where there is none."""
        return self.spec.decode.step_time


class RoutingNeeded(Exception):
    """A request that needs routing, which has not been drawn yet. ``fits``: clusters of
    requests, which are fitted to it."""

    def __init__(self, fits: bool = False) -> None:
        super().__init__()
        self.fits = fits


def prepare(
    config: RunConfig, check: Callable[[PreparedRun], None] = lambda _prepared: None
) -> PreparedRun:
    """Load model, GPU, tables and trace of a run, and check that they fit.

    Args:
        config: the run.
        check: called with everything except the trace, before routing is drawn, which takes long.

    Returns:
        What the run needs, kept for later runs with the same inputs.

    Raises:
        InputError: a file or name does not exist, or the parts do not fit together.
    """
    check_window(config.requests)
    model = load_model(config.engine.model)
    if config.engine.kv_cache_dtype != "auto":
        model = model.model_copy(update={"kv_cache_dtype": config.engine.kv_cache_dtype})
    size = _block_size(config.engine.block_size, config.pools, model)
    if size != config.engine.block_size:
        config = config.replace(block_size=size)
    if not config.cluster.n_prefill and config.cluster.prefill != Pool():
        raise InputError("prefill", "co-located workers form one pool", "decode, or none")
    if not config.cluster.generates and config.cluster.decode != Pool():
        raise InputError("decode", "requests end with their prompts", "prefill, or none")
    if not config.cluster.generates and config.requests.output_len not in (None, 1):
        length, topology = config.requests.output_len, config.cluster.topology
        problem = f"{length}: a request of {topology} ends with its prompt"
        raise InputError("output_len", problem, "1, or none")
    _check_tables(config)
    for name, owners in OPTIONS.items():
        if config.value(name) is not None and not any(
            pool.engine in owners for pool in config.pools
        ):
            problem = f"is {' and '.join(owners)}'s, and the engine is {config.engine.engine}"
            raise InputError(name, problem, f"--engine {' or '.join(owners)}")
    if config.cluster.enable_elastic_ep and not any(pool.is_elastic for pool in config.pools):
        problem = "no worker has several engines"
        raise InputError(
            "enable_elastic_ep", problem, "together with --data-parallel-size 2 or more"
        )
    windows = windows_of(config.engine, config.pools, config.cluster.n_prefill > 0, model)
    with track_table_use() as used:
        # The last pool first: of two mistakes the one of its workers is told.
        engines = [
            make_engine_spec(config, pool, model, windows) for pool in reversed(config.pools)
        ]
    engines.reverse()
    if any(engine.layout != engines[0].layout for engine in engines if engine.layout):
        raise InputError("topology", "only one of the pools streams weights", "one such pool")
    pools, transfer = _pools(config, engines, model)
    places = sum(pool.n * pool.engine.max_num_seqs for pool in pools)
    within("topology", places, _MOST_PLACES, " running requests of all engines")
    output_len = config.effective_output_len
    drafting = [pool.speculative_config for pool in config.pools if pool.decodes]
    if config.steps.acceptance is not None and not any(drafting):
        raise InputError(
            "acceptance", "there is no speculative decoding", "together with --speculative-config"
        )
    # What looks drafts up needs the last step's tokens first.
    ahead = not any(
        drafts and drafts.num_speculative_tokens and drafts.method in LOOKING_UP
        for drafts in drafting
    )
    same = {field.name for field in fields(ClusterSpec)} & RUN_FIELDS.keys()
    same -= {"prefill", "decode", "max_model_len"}
    longest = config.engine.max_model_len or model.max_position_embeddings
    settled = {"max_model_len": longest} | ({} if ahead else {"async_scheduling": False})
    spec = ClusterSpec(
        pools=pools,
        max_model_len=longest,
        transfer=transfer,
        load_report_delay_s=config.cluster.load_report_delay_ms / 1e3,
        signal_interval_s=config.cluster.signal_interval_ms / 1e3,
        max_tokens=output_len
        if isinstance(output_len, int) and not config.requests.random_range_ratio
        else None,
        scheduler=config.engine.model_copy(update=settled),
        windows=windows._replace(
            state=0 if windows.small else _state_blocks(config, model, pools),
            groups=0 if tiers_of(config.kv) else windows.groups,
        ),
        handover_s=HAND_OVERS[config.front_end.handover].seconds,
        front_end=_front_end(config, model),
        tiers=tiers_of(config.kv),
        conditional=_conditional(config),
        reserves_early=_reserves_early(config),
        kv_tiers=config.kv,
        n_layers=model.n_layers,
        **{name: config.value(name) for name in same},
    )
    if config.routing.trace is None and not model.is_dense:
        check(PreparedRun(model, None, spec))
    trace = trace_of(config, model)  # last: routing may have to be drawn
    if trace is not None and any(p.parallelism.data_parallel_size > 1 for p in config.pools):
        trace.require_prompts("the pairs of engines that share experts")
    return PreparedRun(model, trace, spec, frozenset(used))


def trace_of(config: RunConfig, model: ModelDims) -> RoutingTrace | None:
    """Return the trace that a run replays; None for a dense model; raises InputError."""
    if not model.is_dense:
        return routing_of(config.requests.workload, config.routing, model)
    _check_dense(config, model)
    return None


def _check_dense(config: RunConfig, model: ModelDims) -> None:
    """Raise InputError where a configuration asks for something of a dense model's experts."""
    for name in (
        "trace", "routing_band", "routing", "moe_backend", "expert_gather", "offload_window",
    ):  # fmt: skip
        if config.value(name) != RUN_FIELDS[name].default:
            raise InputError(name, f"{model.name} is dense: it has no experts", "not given")
    for pool in config.pools:
        if pool.num_redundant_experts:
            problem = f"{model.name} is dense: it has no experts"
            raise InputError("num_redundant_experts", problem, "not given")
        check_need("expert_placement", pool.expert_placement or "linear", model)
    check_need("queue_order", config.policies.queue_order, model)
    if config.cluster.generates:
        check_need("policy", config.policies.policy, model)
    if config.cluster.n_prefill:
        check_need("prefill_policy", config.policies.prefill_policy, model)


def _pools(
    config: RunConfig, engines: Sequence[EngineSpec], model: ModelDims
) -> tuple[tuple[PoolSpec, ...], TransferModel]:
    """Return the pools, and what a KV transfer between the first two that make one costs.

    A sender's link has the rate at which the first pool that takes over fetches; where another
    fetches slower, as many more bytes flow: their ratio is to be the same for all senders."""
    names = pools_of(config.cluster.topology).routers
    router = {name: number for number, mine in enumerate(names) for name in mine}
    base = PRESETS[config.cluster.kv_transfer]

    def between(source: int, target: int) -> TransferModel:
        one, other = engines[source], engines[target]
        return base.over(
            one.step_time.gpu.nic_bandwidth,
            other.step_time.gpu.nic_bandwidth,
            pull_between(model, one.parallelism, other.parallelism),
        )

    number = {pool.name: at for at, pool in enumerate(config.pools)}
    weights, made = [1.0] * len(engines), list[TransferModel | None]([None] * len(engines))
    for target, pool in enumerate(config.pools):
        sources = [at for at, other in enumerate(config.pools) if pool.name in other.takes_over]
        for source in sources:
            own = between(source, target)
            sends = between(source, number[names[router[pool.name]][0]])
            weight = sends.bandwidth / own.bandwidth
            fetches = replace(own, ingress_bandwidth=own.ingress * weight)
            if source != sources[0] and (
                fetches.descriptor_s != (made[target] or own).descriptor_s
                or weight != weights[target]
            ):
                senders = ", ".join(config.pools[at].name for at in sources)
                problem = f"fetches KV caches from pools of other GPUs or sizes: {senders}"
                raise InputError(
                    f"topology.{pool.name}", problem, "senders of the same GPU and size"
                )
            made[source], made[target], weights[target] = sends, fetches, weight
    pools = []
    for at, (pool, engine) in enumerate(zip(config.pools, engines, strict=True)):
        then = router[pool.takes_over[0]] if pool.takes_over else int(HERE)
        n = pool.workers * engine.parallelism.data_parallel_size
        pools.append(
            PoolSpec(
                pool.name,
                n,
                engine,
                then if config.cluster.generates else int(NO_POOL),
                router[pool.name],
                made[at],
                weights[at],
            )
        )
    first = next((sent for sent in made if sent is not None), None)
    return tuple(pools), first or between(0, -1)


def _check_tables(config: RunConfig) -> None:
    """Raise InputError where the user's tables are all of devices that the run does not have."""
    gpus = [load_gpu(pool.gpu or "") for pool in config.pools]
    known = {name for gpu in gpus for name in (gpu.name, gpu.sibling)}
    measured = sorted({table.metadata.gpu for table in load_tables(config.steps.tables)})
    if measured and not known.intersection(measured):
        problem = f"{config.steps.tables} is of {', '.join(measured)}, the run of {gpus[0].name}"
        allowed = "--gpu with the gpu.json of these tables, or tables of that GPU"
        raise InputError("tables", problem, allowed)


def _conditional(config: RunConfig) -> Conditional:
    """Return when decode workers compute prompts; raises InputError where that cannot be."""
    rule = parse_conditional(config.cluster.conditional_disagg)
    if rule.entry:
        if not config.cluster.hands_over:
            problem = f"{config.cluster.topology} does not hand over prompts"
            raise InputError("conditional_disagg", problem, "prefill and decode workers")
        if registry.needs("policy", config.policies.policy).signature is not None:
            problem = (
                f"{config.policies.policy!r} places by signatures, which prompts to compute lack"
            )
            raise InputError("policy", problem, "a policy without signatures, or seconds")
    return rule


def _reserves_early(config: RunConfig) -> bool:
    """Return whether decode workers reserve KV blocks early; raises InputError."""
    if not config.cluster.hands_over or config.cluster.kv_reserve == "prompt_end":
        return False
    why = _why_late(config)
    if config.cluster.kv_reserve is None:
        return _all_sglang(config) and not why
    if why:
        raise InputError("kv_reserve", f"arrival: {why}", "prompt_end")
    return True


def _all_sglang(config: RunConfig) -> bool:
    engines = {pool.engine or config.engine.engine for pool in config.pools if pool.decodes}
    return engines == {"sglang"}


def late_reservation(config: RunConfig) -> str:
    """Return a warning where SGLang's decode workers cannot reserve KV blocks as it does."""
    if not config.cluster.hands_over or config.cluster.kv_reserve or not _all_sglang(config):
        return ""
    why = _why_late(config)
    late = "KV blocks are reserved when prompts end (--kv-reserve prompt_end)"
    return f"{why}: {late}, not before them as SGLang does" if why else ""


def _why_late(config: RunConfig) -> str:
    """Return why decode workers cannot reserve KV blocks before prompts are computed."""
    needs = registry.needs("policy", config.policies.policy)
    why = ""
    if needs.signature is not None or needs.future:
        why = f"{config.policies.policy!r} places by signatures, which only computed prompts have"
    elif parse_conditional(config.cluster.conditional_disagg).entry:
        why = "decode workers compute prompts, too (--conditional-disagg)"
    elif len(pools_of(config.cluster.topology).routers) != 2:
        why = "prompts are handed over more than once"
    return why


def _front_end(config: RunConfig, model: ModelDims) -> FrontEndSpec | None:
    """Return the API servers; None where prompts come as token ids."""
    if config.front_end.frontend.lower() == NO_FRONT_END:
        of_version = version_fields(config.engine.engine, config.engine.engine_version)
        for name, field in FrontEndConfig.model_fields.items():
            unset = field.default, of_version.get(name)
            if name not in ("frontend", "handover") and config.value(name) not in unset:
                problem = f"there are no API servers (--frontend {NO_FRONT_END})"
                raise InputError(name, problem, "together with a front end")
        return None
    entry = pools_of(config.cluster.topology).routers[0]
    calibration = load_calibration(config.steps.calibration)
    slowdown = config.front_end.cpu_slowdown * (calibration.front_end if calibration else 1.0)
    template_s = chat_template_s(config.engine.engine, config.engine.engine_version, model)
    return FrontEndSpec(
        load_front_end(config.front_end.frontend).compiling(template_s).slower(slowdown),
        config.front_end.tokenizer_mode,
        config.front_end.api_servers
        or sum(
            p.workers * api_servers(p.engine, p.engine_version, p.parallelism.data_parallel_size)
            for p in config.pools
            if p.name in entry
        ),
        config.front_end.tokenizer_threads,
    )


def _block_size(size: int, pools: Sequence[WorkerPool], model: ModelDims) -> int:
    """Return the tokens of a KV block, as large as vLLM makes it for such a model."""
    shards = (pool.parallelism.shard(model) for pool in pools if pool.engine == "vllm")
    return max((least_block_size(shard, size) for shard in shards), default=size)


def _state_blocks(config: RunConfig, model: ModelDims, pools: Sequence[PoolSpec]) -> int:
    """Return the KV blocks of a request's states, of the pool where they are most."""
    shards = [pool.engine.parallelism.shard(model) for pool in pools]
    return max(state_blocks(shard, config.engine.block_size) for shard in shards)
