"""Engines that share experts: where instances lie, what exchanging tokens and choosing costs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.all_to_all import (
    COPY_PER,
    GATHERING,
    AllToAll,
    build_all_to_all,
    chunk_tokens,
)
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.parts import MOE_KERNELS
from eldr_sim.kernel_profiles.tables.format import load_tables, weakest
from eldr_sim.policies import registry
from eldr_sim.policies.choice import parse
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.replicas.base import ChoiceParameters
from eldr_sim.policies.replicas.weighted import rank_weights
from eldr_sim.simulator.plane.steps import group_state
from eldr_sim.simulator.setup.cluster_spec import EngineSpec
from eldr_sim.simulator.setup.config.groups import ClusterConfig, EngineConfig, StepConfig
from eldr_sim.simulator.setup.config.pools import Pool, WorkerPool
from eldr_sim.simulator.setup.memory import WindowBlocks, pool_blocks


def check_experts(pool: Pool, role: str) -> None:
    """Raise InputError where a pool's engines cannot have their experts as it says."""
    parallelism, placement = pool.parallelism, pool.expert_placement
    spread = parallelism.data_parallel_size > 1 and parallelism.expert_parallel
    if pool.num_redundant_experts and not spread:
        problem = "redundant experts need engines that share whole experts"
        allowed = "together with --data-parallel-size 2 or more and --enable-expert-parallel"
        raise InputError("num_redundant_experts", problem, allowed)
    if placement != "linear" and parallelism.n_expert_ranks == 1:
        raise InputError(
            "expert_placement",
            f"{placement!r} places the experts of expert-parallel GPUs, and every GPU of the "
            f"{role} workers holds all",
            "--enable-expert-parallel with --tensor-parallel-size 2 or more",
        )


def check_disaggregated(
    pool: WorkerPool, pools: Sequence[WorkerPool], cluster: ClusterConfig, *, moves: bool
) -> None:
    """Raise InputError where a pool's experts cannot lie on separate GPUs; ``moves``: whether
    experts move during the run."""
    field = f"topology.{pool.name}.ffn_ranks"
    if not any(pool.name in other.takes_over for other in pools):
        problem = f"{pool.name} workers compute prompts, which is not simulated with FFN GPUs"
        raise InputError(field, problem, "a pool that others hand over to, as in 4P8A16F")
    if (pool.data_parallel_size or 1) < 2:
        raise InputError(field, "there is only one attention engine", "2 or more, as in 4P2A1F")
    if pool.speculative_config is not None and pool.speculative_config.num_speculative_tokens:
        problem = "drafts are not simulated with separate FFN GPUs"
        raise InputError("speculative_config", problem, "not given")
    if pool.enforce_eager:
        problem = "steps with separate FFN GPUs are simulated under graphs alone"
        raise InputError("enforce_eager", problem, "not given")
    if moves:
        problem = "experts on separate FFN GPUs do not move"
        raise InputError("eplb_interval", problem, "not given")
    topology, engines = cluster.topology, cluster.decode.data_parallel_size
    if isinstance(topology, str) and engines is not None:
        problem = f"{engines} engines beside those of {topology}"
        raise InputError("decode.data_parallel_size", problem, "one of the two")


def sharing(
    cluster: ClusterConfig,
    steps: StepConfig,
    replica_choice: str,
    model: ModelDims,
    engine: EngineSpec,
) -> EngineSpec:
    """Return engines with what they share where they share experts, ``n_redundant`` among them."""
    pool = engine.own
    if steps.cudagraph_padding not in (None, "none"):
        problem = "padding to the widest of several engines is not simulated"
        raise InputError("cudagraph_padding", problem, "none")
    parallelism, redundant = engine.parallelism, engine.n_redundant
    backend = pool.all2all_backend or cluster.all2all_backend
    if not parallelism.expert_parallel and COPY_PER[backend] != "all":
        problem = f"{backend} sends tokens to the GPUs of their experts, which are cut over all"
        raise InputError("all2all_backend", problem, "allgather_reducescatter")
    slots = (model.n_experts + redundant) // parallelism.n_expert_ranks
    all_to_all = build_all_to_all(
        model,
        engine.step_time.gpu,
        backend,
        parallelism.n_gpus,
        gpus_per_node=cluster.gpus_per_node,
        tables=load_tables(steps.tables),
    )
    if parallelism.ffn_ranks:  # the tables are of ranks that all send and receive
        derived = {
            part: said
            | {"label": weakest([said["label"], "derived"])}
            | {"origin": f"{said['origin']}; read at the bytes between attention and FFN GPUs"}
            for part, said in all_to_all.provenance.items()
        }
        all_to_all = replace(all_to_all, provenance=derived)
    choice = _replica_choice(replica_choice, all_to_all, redundant > 0)
    launch_s = engine.step_time.gpu.launch_s or 0.0
    if (parallelism.ffn_ranks or engine.elastic) and choice.number == group_state.ASKED:
        what = "groups that change their width" if engine.elastic else "micro-batches"
        problem = f"{replica_choice!r} chooses in Python, not for {what}"
        raise InputError("replica_choice", problem, "a choice that is compiled, such as hash")
    pairs = _most_pairs(model, parallelism, engine.max_num_seqs, engine.max_num_batched_tokens)
    group = group_state.GroupCost(
        {
            "all": group_state.ALL,
            "expert": group_state.EXPERT,
            "rank": group_state.RANK,
            "node": group_state.NODE,
        }[COPY_PER[all_to_all.backend]],
        all_to_all.gathered is not all_to_all.cost,
        choice.number,
        choice.seconds,
        parallelism.tensor_parallel_size,
        cluster.gpus_per_node,
        engine.step_time.rank_moe(slots, pairs),
        all_to_all.cost,
        all_to_all.gathered,
        chunk_tokens(all_to_all.backend, steps.moe_dp_chunk_size),
        parallelism.ffn_ranks,
        cluster.micro_batches,
        *_split(steps.two_batch_overlap, engine, all_to_all),
        # Each chunk launches the MoE kernels again, with its dispatch and combine.
        chunk_launch_s=model.n_moe_layers * (MOE_KERNELS + 2) * launch_s,
    )
    return replace(engine, group=group, all_to_all=all_to_all, choice_provenance=choice.provenance)


#: Tokens of an engine from which vLLM splits a step, of decoding and with prompts
#: (``dbo_decode_token_threshold``, ``dbo_prefill_token_threshold``); SGLang splits any two.
_SPLIT_FROM = {"vllm": (32, 512)}
#: SMs of an H100, and those that DeepEP's high-throughput kernels take (`all_to_all`'s rows).
_SMS, _SENDING_SMS = 132, 20


def _split(overlap: bool, engine: EngineSpec, all_to_all: AllToAll) -> tuple[int, int, float]:
    """Return from how many tokens on a step is computed as two halves, and what that costs."""
    if not overlap:
        return 0, 0, 1.0
    if engine.parallelism.ffn_ranks:
        problem = "separate FFN GPUs compute micro-batches"
        raise InputError("two_batch_overlap", problem, "--micro-batches")
    slower = _SMS / (_SMS - _SENDING_SMS) if all_to_all.backend == "deepep_ht" else 1.0
    return *_SPLIT_FROM.get(engine.engine, (2, 2)), slower


def hold_instances(
    replica_choice: str,
    settings: EngineConfig,
    windows: WindowBlocks,
    model: ModelDims,
    engine: EngineSpec,
    placements: Sequence[Placement],
) -> EngineSpec:
    """Return engines with GPUs that hold the instances of their workers' placements, with the KV
    blocks that the fullest GPU leaves.

    Raises InputError if an expert has copies where engines share none, the weights leave no room,
    or the choice of replicas reads a load that the placement does not tell."""
    if not placements:
        return engine
    layout, most, total, copies = engine.parallelism, 0, 0, False
    for placement in placements:
        slots = placement.slots()
        replayed = slots[np.arange(model.n_moe_layers) % len(slots)]
        most, total = max(most, int(slots.max())), max(total, int(replayed.sum(axis=0).max()))
        if slots.sum() > slots.shape[0] * model.n_experts:
            copies = True
            _check_copies(replica_choice, engine, placement)
    share = ExpertGroup(
        (), 1, model.n_experts, engine.n_expert_ranks, engine.n_redundant
    ).slots_per_rank
    if copies and not engine.n_redundant:  # the placement's own
        assert engine.group is not None
        assert engine.all_to_all is not None
        choice = _replica_choice(replica_choice, engine.all_to_all, copies)
        engine = replace(
            engine,
            group=engine.group._replace(choice_s=choice.seconds),
            choice_provenance=choice.provenance,
        )
    if (most, total) == (share, share * model.n_moe_layers):
        return engine
    n_blocks = pool_blocks(
        settings, windows, engine.engine, engine.memory_share, model, engine.step_time.gpu,
        layout, total, speculation=engine.speculation,
    )  # fmt: skip
    group = engine.group
    if group is not None:
        pairs = _most_pairs(model, layout, engine.max_num_seqs, engine.max_num_batched_tokens)
        group = group._replace(moe=engine.step_time.rank_moe(min(most, model.n_experts), pairs))
    return replace(engine, n_blocks=n_blocks, group=group)


def _check_copies(replica_choice: str, engine: EngineSpec, placement: Placement) -> None:
    """Raise InputError where a placement's copies of experts cannot be served."""
    if engine.group is None:
        problem = "copies of experts need engines that share experts"
        allowed = "--data-parallel-size 2 or more, or a placement without copies"
        raise InputError("expert_placement", problem, allowed)
    if registry.needs("replica_choice", replica_choice).rank_loads:
        rank_weights(placement)


def _most_pairs(model: ModelDims, parallelism: Parallelism, max_num_seqs: int, budget: int) -> int:
    """Return the most token-expert pairs of a step of a group."""
    return parallelism.data_parallel_size * max(max_num_seqs, budget) * model.top_k


class _Choice(NamedTuple):
    """A replica choice as groups know it."""

    number: int
    seconds: float  #: in each MoE layer
    provenance: dict[str, dict[str, Any]]  #: of the seconds


def _replica_choice(word: str, all_to_all: AllToAll, copies: bool) -> _Choice:
    """Return what groups know of a replica choice; without copies of experts it costs nothing."""
    choice = registry.find("replica", parse(word, "replica_choice").name)
    if choice.needs.gathers and all_to_all.backend not in GATHERING:
        problem = (
            f"{choice.name!r} needs the tokens of all ranks, which {all_to_all.backend} does not "
            "gather"
        )
        raise InputError("replica_choice", problem, f"--all2all-backend {' or '.join(GATHERING)}")
    number, parameters = (
        group_state.REPLICA_CHOICES.get(choice.name, group_state.ASKED),
        registry.parameters("replica", word),
    )
    if not copies or not isinstance(parameters, ChoiceParameters) or not parameters.overhead_us:
        return _Choice(number, 0.0, {})
    overhead_us, default = parameters.overhead_us, parameters == type(parameters)()
    label, origin = parameters.source if default else ChoiceParameters.source
    said = {"label": label, "origin": f"{overhead_us:g} us a layer: {origin}", "kernel_source": ""}
    return _Choice(number, overhead_us * 1e-6, {"replica_choice": said})
