"""Where the experts of engines that share them lie, and what moves them while a run lasts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import ExpertGroup, Placement, PlacementPolicy
from eldr_sim.policies.registry import needs, placement_policy
from eldr_sim.simulator.control import relocation
from eldr_sim.simulator.control.elastic import ElasticGroup, Shape
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec, PoolSpec
from eldr_sim.simulator.setup.config.groups import ExpertsConfig, ScalingConfig
from eldr_sim.simulator.setup.prepare import PreparedRun, RoutingNeeded
from eldr_sim.traces.routing.calibration import CalibrationSet
from eldr_sim.traces.streams import stream

if TYPE_CHECKING:
    from eldr_sim.policies.eldr.artifact import RoutingArtifact


def placements_of(
    prepared: PreparedRun,
    seed: int,
    fitted: RoutingArtifact | None,
    calibration: Callable[[], CalibrationSet],
) -> tuple[list[Placement] | None, list[relocation.MovableGroup]]:
    """Return where the experts of each worker lie, and the groups with experts that can move; None
    where every GPU holds all experts and no engines share them. ELDR's clusters are those of decode
    workers."""
    spec = prepared.spec
    engines = [pool.engine for pool in spec.pools]
    if all(engine.n_expert_ranks == 1 and engine.group is None for engine in engines):
        return None, []
    placements: list[Placement] = []
    movable = []
    for at, pool in enumerate(spec.pools):
        engine, artifact = pool.engine, fitted if pool.decodes else None
        size, ranks = engine.parallelism.data_parallel_size, engine.n_expert_ranks
        for nth, placed in enumerate(place_pool(prepared, seed, pool.name, artifact, calibration)):
            if engine.group is not None and placed.policy.needs.counts:
                gpu, n_bytes = engine.step_time.gpu, prepared.model.bytes_per_expert
                movable.append(
                    relocation.MovableGroup(
                        len(placements),
                        size,
                        at,
                        nth,
                        placed.group,
                        placed.policy,
                        placed.placement,
                        relocation.expert_links(gpu, n_bytes, ranks, spec.gpus_per_node),
                        placed.group.slots_per_rank,
                    )
                )
            placements += [
                placed.placement.with_rank_offset(engine.parallelism.first_expert_rank)
            ] * size
    return placements, movable


def check_placements(prepared: PreparedRun, seed: int, clusters: bool) -> None:
    """Raise InputError where no routing is needed to see that a placement policy lacks something.
    ``clusters``: whether the decode policy has, or may have, clusters of requests."""

    def calibration() -> CalibrationSet:
        raise RoutingNeeded

    for pool in prepared.spec.pools:
        engine = pool.engine
        if (engine.n_expert_ranks == 1 and engine.group is None) or (pool.decodes and clusters):
            continue
        size, word = engine.parallelism.data_parallel_size, engine.own.expert_placement
        with suppress(RoutingNeeded):
            _policy_of(pool, seed, word, None, calibration, (pool.n, size))


def _policy_of(
    pool: PoolSpec,
    seed: int,
    word: str | None,
    fitted: RoutingArtifact | None,
    calibration: Callable[[], CalibrationSet],
    engines: tuple[int, int],
) -> PlacementPolicy:
    """Build a pool's placement policy; ``engines``: those of the pool, and of a group."""
    engine, (n, size) = pool.engine, engines
    context = PolicyContext(
        n,
        stream(seed, "placement"),
        calibration,
        artifact=fitted,
        group_size=size,
        rank_moe=None if engine.group is None else engine.group.moe,
        all_to_all=engine.all_to_all,
    )
    return placement_policy(word, context)


class GroupPlacement(NamedTuple):
    """The experts of one group, and the policy that placed them."""

    policy: PlacementPolicy
    group: ExpertGroup
    placement: Placement


def place_pool(
    prepared: PreparedRun,
    seed: int,
    name: str,
    fitted: RoutingArtifact | None,
    calibration: Callable[[], CalibrationSet],
    width: int | None = None,
    word: str | None = None,
) -> list[GroupPlacement]:
    """Return where the experts of each group of a pool lie.

    ``width``: engines of its only group, with as many instances on each rank; None: all; ``word``:
    the placement policy, in place of the pool's own."""
    spec = prepared.spec
    pool = spec.pools[spec.names.index(name)]
    engine = pool.engine
    size, ranks = engine.parallelism.data_parallel_size, engine.n_expert_ranks
    n, n_experts = pool.n, prepared.model.n_experts
    n_redundant = engine.n_redundant
    if width is not None:
        slots = (n_experts + n_redundant) // ranks
        n, size, ranks = width, width, ranks // size * width
        n_redundant = slots * ranks - n_experts
    word = word or engine.own.expert_placement
    policy = _policy_of(pool, seed, word, fitted, calibration, (n, size))
    assert prepared.trace is not None, "dense models place no experts"
    layers = prepared.trace.manifest.n_layers
    n_nodes = max(1, ranks // spec.gpus_per_node)
    groups = (
        ExpertGroup(members, layers, n_experts, ranks, n_redundant, n_nodes)
        for members in (range(first, first + size) for first in range(0, n, size))
    )
    placed = [GroupPlacement(policy, group, policy.place(group)) for group in groups]
    if engine.group is None or engine.parallelism.expert_parallel:
        return placed
    # Each of the ranks has a part of every expert: what one computes all do, and the first counts.
    n_ranks = engine.parallelism.n_ranks
    return [each._replace(placement=replace(each.placement, n_ranks=n_ranks)) for each in placed]


def elastic_groups(
    prepared: PreparedRun,
    seed: int,
    scaling: ScalingConfig,
    share: Callable[[EngineSpec], EngineSpec],
    fitted: RoutingArtifact | None,
    calibration: Callable[[], CalibrationSet],
) -> list[ElasticGroup]:
    """Return the groups of engines that come and go, with where experts lie at every width.

    ``share``: returns engines with what they share, `sharing`. Raises InputError where ranks are
    not filled evenly: KV caches would change."""
    groups, model, spec = [], prepared.model, prepared.spec
    for number, pool in enumerate(spec.pools):
        engine, shapes = pool.engine, {}
        if not engine.elastic:
            continue
        for width in range(scaling.least_workers(spec.pools)[pool.name], pool.n + 1):
            of = fitted if pool.decodes else None
            placed = place_pool(prepared, seed, pool.name, of, calibration, width)[0]
            if (placed.placement.slots() != placed.group.slots_per_rank).any():
                problem = f"{engine.own.expert_placement!r} fills ranks unevenly"
                raise InputError("expert_placement", problem, "linear or eplb, with elastic EP")
            priced = _whole_nodes(
                width, engine.parallelism.tensor_parallel_size, spec.gpus_per_node
            )
            layout = replace(engine.parallelism, data_parallel_size=priced)
            slots = placed.group.slots_per_rank
            n_redundant = slots * layout.n_expert_ranks - model.n_experts
            own = replace(engine, parallelism=layout, n_redundant=n_redundant)
            shared = share(own).group
            assert shared is not None
            shapes[width] = Shape(placed.placement, shared)
        gpu, n_bytes = engine.step_time.gpu, model.bytes_per_expert
        links = relocation.expert_links(gpu, n_bytes, engine.n_expert_ranks, spec.gpus_per_node)
        first = prepared.spec.workers_of(pool.name).start
        experts = model.n_experts, model.n_moe_layers
        pauses = engine.graphs_s, scaling.width_pause
        groups.append(ElasticGroup(number, first, shapes, experts, links, *pauses))
    return groups


def _whole_nodes(width: int, engine_gpus: int, node: int) -> int:
    """Return the engines of a group that fills its nodes, which all-to-alls are known of."""
    ranks = width * engine_gpus
    return width if ranks <= node else -(-ranks // node) * node // engine_gpus


def check_relocations(experts: ExpertsConfig, spec: ClusterSpec) -> None:
    """Raise InputError for settings of moving experts where none moves."""
    if experts.eplb_interval is None:
        for name in ("eplb_window", "eplb_async", "eplb_overhead_ms"):
            if getattr(experts, name) != ExpertsConfig.model_fields[name].default:
                raise InputError(name, "without eplb_interval no expert moves", "--eplb-interval")
    elif not any(
        pool.engine.group is not None
        and needs("expert_placement", pool.engine.own.expert_placement or "linear").counts
        for pool in spec.pools
    ):
        raise InputError(
            "eplb_interval",
            "no engines share experts that a placement policy could move",
            "--data-parallel-size 2 or more with --expert-placement eplb",
        )


def relocations_of(
    experts: ExpertsConfig,
    replica_choice: str,
    prepared: PreparedRun,
    movable: list[relocation.MovableGroup],
) -> relocation.Relocations | None:
    """Return what moves the experts of groups while they run; None where nothing does."""
    if experts.eplb_interval is None:
        return None
    rule = relocation.RelocationRule(
        experts.eplb_interval,
        experts.eplb_window,
        experts.eplb_async,
        experts.eplb_overhead_ms / 1e3,
    )
    spec, model = prepared.spec, prepared.model
    weighs = needs("replica_choice", replica_choice).rank_loads
    return relocation.Relocations(
        rule, movable, spec.n_workers, model.n_moe_layers, model.n_experts, weighs
    )
