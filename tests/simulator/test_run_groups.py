"""Whole runs of engines that share experts, on the embedded trace."""

import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.steps.parts import MOE_KERNELS
from eldr_sim.policies import registry
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import build_cluster, offered_load, simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.routing.writer import write_trace

from ..on_each import on_each

GROUP = {
    "topology": "1P2D",
    "data_parallel_size": 4,
    "enable_expert_parallel": True,
    "request_rate": 60,
    "num_requests": 80,
    "output_len": 40,
    "policy": "jsq",
}
MODEL = load_model("Qwen3-30B-A3B")


def run(**values):
    return simulate(make_config(GROUP | values))


def test_an_override_of_kv_blocks_is_what_engines_have():
    """Too few blocks for all: requests are preempted, and the result says how many there were."""
    few = run(num_gpu_blocks_override=18, request_rate="inf", policy="gimbal:reading=prose")
    assert few.summary["num_gpu_blocks_override"] == 18
    assert few.summary["kv_blocks_per_worker"] == 17  # but for vLLM's null block
    assert few.record.requests["preemptions"].sum() > 0
    assert "num_gpu_blocks_override" not in run(num_requests=10).summary


def test_routers_choose_engines_and_groups_step_together():
    result = run(warmup=0)
    summary, record = result.summary, result.record
    assert summary["completed"] == 80
    assert summary["gpus"] == 4 + 2 * 4
    assert summary["topology"] == "1 prefill + 2 decode workers of 4 engines of 1 GPU: 12 GPUs"
    assert set(record.requests["decode_worker"]) == set(range(8))
    assert set(record.requests["prefill_worker"]) == set(range(4))
    steps = record.decode_steps
    for group in (0, 1):
        mine = steps[steps["worker"] // 4 == group]
        starts, ends = np.unique(mine["start"]), np.unique(mine["end"])
        assert len(starts) == len(ends)
        assert (starts[1:] >= ends[:-1]).all()  # one step of the group at a time
    assert summary["group"]["data_parallel_size"] == 4
    assert summary["prefill_workers"]["group"]["steps"] > 0


def test_engines_may_cut_the_experts_that_they_share():
    """Each GPU has a part of every expert for the tokens of all, as a tensor-parallel worker's."""
    config = make_config(GROUP | {"enable_expert_parallel": False})
    engine = prepare(config).spec.decode
    one = {"data_parallel_size": 1, "tensor_parallel_size": 4, "enable_expert_parallel": False}
    alone = prepare(make_config(GROUP | one)).spec.decode.step_time
    moe = alone.rank_moe(128, int(engine.group.moe.rows[-1] * MODEL.top_k))
    assert (engine.group.moe.decode_s == moe.decode_s).all()
    whole = prepare(make_config(GROUP)).spec.decode
    assert engine.n_blocks == pytest.approx(whole.n_blocks, abs=1)  # a quarter of the bytes each
    record = simulate(config).record
    steps, groups = record.decode_steps, record.decode_group_steps
    tokens = steps["tokens"].sum() + steps["chunk_tokens"].sum()
    assert groups["pairs"].sum() == tokens * MODEL.top_k * MODEL.n_moe_layers
    assert (groups["busiest_pairs"] == groups["pairs"]).all()
    spread = run().record.decode_steps
    assert steps["active"].mean() == pytest.approx(spread["active"].mean(), rel=0.1)
    assert (steps["busiest"] == steps["active"]).all()  # no GPU has more experts than another


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "deepep_ht"])
def test_pairs_are_tokens_times_experts(backend):
    record = run(all2all_backend=backend).record
    for steps, groups in (
        (record.prefill_steps, record.prefill_group_steps),
        (record.decode_steps, record.decode_group_steps),
    ):
        tokens = steps["tokens"].sum() + steps["chunk_tokens"].sum()
        assert groups["pairs"].sum() == tokens * MODEL.top_k * MODEL.n_moe_layers
        assert groups["n_busy"].sum() == len(steps)


def test_the_parts_of_a_step_are_in_its_table():
    result = run()
    steps = result.steps.to_pandas()
    parts = steps[["moe_ms", "dispatch_ms", "combine_ms"]]
    assert (parts > 0).all().all()
    assert (parts.sum(axis=1) < 1e3 * (steps.end_s - steps.start_s)).all()
    assert (steps.idle_ms >= 0).all()
    assert (steps.between_bytes == 0).all()
    together = steps[steps.role == "decode"].groupby(["start_s", steps.worker // 4])
    assert (together.moe_ms.nunique() == 1).all()
    assert (
        "moe_ms"
        not in simulate(
            make_config({"topology": "1P1D", "num_requests": 5, "output_len": 5})
        ).steps.column_names
    )


def test_without_redundant_experts_every_choice_gives_the_same_bytes(tmp_path):
    choices = registry.names("replica")
    for choice in choices:
        write_result(run(replica_choice=choice), tmp_path / choice)
    for name in ("requests.parquet", "steps.parquet"):
        one, *others = ((tmp_path / choice / name).read_bytes() for choice in choices)
        assert all(other == one for other in others)


def test_redundant_experts_cost_memory_and_activate_more():
    plain, eplb = (
        run(
            expert_placement=placement, num_redundant_experts=redundant, all2all_backend="deepep_ll"
        )
        for placement, redundant in (("linear", 0), ("eplb", 32))
    )
    activated = [result.record.decode_steps["active"].mean() for result in (plain, eplb)]
    assert activated[1] > activated[0]  # an expert's tokens are split over its instances
    block = 16 * MODEL.kv_bytes_per_token
    fewer = plain.summary["kv_blocks_per_worker"] - eplb.summary["kv_blocks_per_worker"]
    expert_bytes = 8 * MODEL.n_moe_layers * MODEL.bytes_per_expert  # 32 more on 4 ranks
    assert fewer == pytest.approx(expert_bytes / block, abs=1)
    for result in (plain, eplb):
        groups = result.record.decode_group_steps
        steps = result.record.decode_steps
        tokens = steps["tokens"].sum() + steps["chunk_tokens"].sum()
        assert groups["pairs"].sum() == tokens * MODEL.top_k * MODEL.n_moe_layers


EPLB = {"expert_placement": "eplb", "num_redundant_experts": 64}
METRO = EPLB | {"replica_choice": "metro", "all2all_backend": "allgather_alltoall"}


def test_metro_activates_fewer_experts_and_is_charged_for_it():
    """Metro in decode steps, with the published cost in each layer; prompts keep the even split."""
    runs = {
        choice: run(**METRO | {"replica_choice": choice})
        for choice in ("even", "metro", "metro:overhead_us=0", "optimal:overhead_us=0")
    }
    decoded = {
        choice: result.steps.to_pandas().query("role == 'decode'")
        for choice, result in runs.items()
    }
    busiest = {choice: steps.busiest_rank_experts.mean() for choice, steps in decoded.items()}
    assert busiest["metro"] < busiest["even"]
    layers = MODEL.n_moe_layers
    assert decoded["metro"].replica_choice_ms.unique() == pytest.approx([26e-3 * layers])
    for choice in ("even", "metro:overhead_us=0"):
        assert not decoded[choice].replica_choice_ms.any()
    prompts = runs["metro"].steps.to_pandas().query("role == 'prefill'")
    assert not prompts.replica_choice_ms.any()
    assert runs["metro"].summary["provenance"]["replica_choice"]["label"] == "published"
    assert "replica_choice" not in runs["metro:overhead_us=0"].summary["provenance"]
    given = run(**METRO | {"replica_choice": "metro:overhead_us=5"}).summary["provenance"]
    assert given["replica_choice"]["label"] == "derived"


def test_metros_dispatch_gathers_in_decode_steps_only():
    """What it moves is the twin's to check; prompts go all-to-all."""
    values = EPLB | {"replica_choice": "even", "num_requests": 20}
    gathered, direct = (
        run(**values | {"all2all_backend": backend}).steps.to_pandas()
        for backend in ("allgather_alltoall", "nccl_alltoall")
    )
    for role, alike in (("prefill", True), ("decode", False)):
        one, other = (steps[steps.role == role].dispatch_ms.mean() for steps in (gathered, direct))
        assert bool(one == other) is alike


def test_unequal_ranks_leave_the_kv_blocks_of_the_fullest():
    equal, grace = (run(expert_placement=name, gpus_per_node=2) for name in ("affinity", "grace"))
    config = make_config(GROUP | {"expert_placement": "grace", "gpus_per_node": 2})
    prepared = prepare(config)
    cluster = build_cluster(config, prepared, *offered_load(config, prepared.trace))
    slots = np.zeros(4, np.int64)
    experts = range(MODEL.n_experts)
    masks = cluster.arrays.masks[4]  # of a decode engine, by rank: experts of one instance
    for rank, of_rank in enumerate(masks):
        slots[rank] = sum(int(word).bit_count() for word in of_rank)
    replicas = cluster.groups.replicas
    for layer in range(MODEL.n_moe_layers):
        at = layer % replicas.n_instances.shape[1]
        for expert in experts:
            n = replicas.n_instances[4, at, expert]
            if n > 1:
                slots[replicas.rank[4, at, expert, :n]] += 1
    block = 16 * MODEL.kv_bytes_per_token
    fewer = equal.summary["kv_blocks_per_worker"] - grace.summary["kv_blocks_per_worker"]
    more = slots.max() - 32 * MODEL.n_moe_layers
    assert more > 0
    assert fewer == pytest.approx(more * MODEL.bytes_per_expert / block, abs=1)
    groups, steps = grace.record.decode_group_steps, grace.record.decode_steps
    tokens = steps["tokens"].sum() + steps["chunk_tokens"].sum()
    assert groups["pairs"].sum() == tokens * MODEL.top_k * MODEL.n_moe_layers


def test_copies_need_engines_that_share_experts():
    fields = {"data_parallel_size": 1, "tensor_parallel_size": 4, "expert_placement": "grace"}
    with pytest.raises(InputError, match="expert_placement: copies of experts need engines"):
        run(**fields)
    summary = run(**fields | {"expert_placement": "grace:replication=none"}).summary
    assert summary["completed"] == 80


def test_every_expert_everywhere_near_the_source_sends_nothing():
    values = {"model": "Qwen3-30B-A3B", "gpu": "H200", "data_parallel_size": 2, "max_num_seqs": 16}
    for backend in ("deepep_ll", "deepep_ht", "nccl_alltoall"):
        record = run(
            num_redundant_experts=MODEL.n_experts, replica_choice="source",
            all2all_backend=backend, **values,
        ).record  # fmt: skip
        groups = record.decode_group_steps
        assert not groups["inside_bytes"].any()
        assert not groups["between_bytes"].any()


def test_nodes_part_the_bytes():
    near, far = (run(all2all_backend="deepep_ll", gpus_per_node=n).record for n in (4, 2))
    assert not near.decode_group_steps["between_bytes"].any()
    assert far.decode_group_steps["between_bytes"].any()
    mean = [r.decode_group_steps["dispatch_s"].mean() for r in (near, far)]
    assert mean[1] > mean[0]


def test_pools_may_have_groups_of_their_own(tmp_path):
    config = make_config(
        GROUP
        | {"data_parallel_size": 1, "enable_expert_parallel": False}
        | {"decode": {"data_parallel_size": 4, "enable_expert_parallel": True}}
        | {"prefill": {"tensor_parallel_size": 2}}
    )
    result = simulate(config)
    assert result.summary["gpus"] == 2 + 8
    assert "group" in result.summary
    assert "group" not in result.summary["prefill_workers"]
    assert result.summary["topology"] == (
        "1 prefill of 2 GPUs + 2 decode of 4 engines of 1 GPU: 10 GPUs"
    )
    write_result(result, tmp_path / "out")
    json.loads((tmp_path / "out" / "summary.json").read_text())


@pytest.mark.parametrize("policy", ["eldr", "round_robin", "marginal_cost", "gimbal", "vllm_dp"])
def test_policies_route_to_engines(policy):
    record = run(policy=policy, num_requests=30).record
    assert record.completed.all()
    assert record.requests["decode_worker"].max() > 3


FREE_ELDR = "eldr:capture_overhead_ms=0,routing_overhead_ms=0"


def test_eldr_on_one_group_is_the_shortest_queue():
    one, other = (run(topology="1P1D", policy=policy).record for policy in (FREE_ELDR, "jsq"))
    assert one.requests.tobytes() == other.requests.tobytes()
    assert one.decode_steps.tobytes() == other.decode_steps.tobytes()


@pytest.mark.parametrize("placement", ["eldr", "eplb:load=cluster"])
def test_eldr_sends_requests_to_the_group_of_their_cluster(placement):
    """At tau = 0 there is one admissible group: the nearest centroid's."""
    config = make_config(
        GROUP | {"policy": f"{FREE_ELDR},tau=0", "decode": {"expert_placement": placement}}
    )
    prepared = prepare(config)
    workload, window = offered_load(config, prepared.trace)
    cluster = build_cluster(config, prepared, workload, window)
    policy = cluster.routers[1].policy
    assert policy.artifact.n_decoders == 2
    requests = cluster.run().requests
    assert len(set(requests["decode_worker"].tolist())) == 8
    for i in np.flatnonzero(requests["decode_worker"] >= 0):
        rows = ((int(workload.text[i]), 0, int(workload.prompt_len[i])),)
        _, signature = cluster.inputs.signatures(rows)
        (band,) = policy.bands(signature[None])
        assert band == [requests["decode_worker"][i] // 4]


def test_without_graphs_each_chunk_launches_its_moe_kernels_again():
    """Steps that wait for the host do so longer by a multiple of a chunk's launches."""
    common = {"enforce_eager": True, "all2all_backend": "pplx", "num_requests": 30}
    steps = [
        run(topology="2C", moe_dp_chunk_size=size, **common).record.decode_group_steps
        for size in (64, 2)
    ]
    seconds = [float(np.median(own["end"] - own["start"])) for own in steps]
    again_s = 48 * (MOE_KERNELS + 2) * load_gpu("H100").launch_s
    assert 0.9 * again_s < seconds[1] - seconds[0] < 64 * again_s


def test_colocated_engines_share_experts():
    result = run(topology="2C", num_requests=30)
    assert result.summary["completed"] == 30
    assert "prefill_workers" not in result.summary
    assert result.summary["topology"].startswith("2 co-located workers of 4 engines")


@on_each(
    "values, message",
    [
        (
            {"enable_expert_parallel": False, "all2all_backend": "pplx"},
            "all2all_backend: pplx sends tokens .*allgather_reducescatter",
        ),
        (
            {"enable_expert_parallel": False, "num_redundant_experts": 4},
            "num_redundant_experts: redundant experts .*--enable-expert-parallel",
        ),
        ({"data_parallel_size": 3}, "data_parallel_size: 3 does not divide the 128 experts"),
        ({"num_redundant_experts": 6}, "num_redundant_experts: 4 ranks cannot hold 128 experts"),
        ({"data_parallel_size": 1, "num_redundant_experts": 8}, "num_redundant_experts: redundant"),
        ({"gpus_per_node": 3}, "expert_parallel_size: 4 ranks on nodes of 3 GPUs"),
        ({"replica_choice": "nearest"}, "replica_choice: unknown policy 'nearest'"),
        (
            {"replica_choice": "metro", "all2all_backend": "deepep_ll"},
            "replica_choice: 'metro' needs the tokens of all ranks.*--all2all-backend allgather_",
        ),
        ({"replica_choice": "metro:overhead_us=-1"}, "replica_choice.overhead_us: '-1'"),
        (
            {"num_redundant_experts": 8, "expert_placement": "eldr", "policy": "eldr"},
            "num_redundant_experts: 'eldr' places one instance",
        ),
        ({"prefill": {"expert_placement": "eldr"}, "policy": "eldr"}, "expert_placement: .*eldr"),
        ({"data_parallel_size": 0}, "data_parallel_size: 0"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_line(values, message):
    with pytest.raises(InputError, match=message) as caught:
        run(**values)
    assert "\n" not in str(caught.value)


def test_redundant_experts_that_do_not_fit_are_refused():
    """1.125x on Qwen3-235B over 4 H200: the weights alone leave no room."""
    values = {"model": "Qwen3-235B-A22B", "gpu": "H200", "data_parallel_size": 4}
    prepare(make_config(GROUP | values))
    with pytest.raises(InputError, match="H200 holds"):
        prepare(make_config(GROUP | values | {"num_redundant_experts": 16}))


def test_decode_only_traces_are_refused(tmp_path):
    rng, out = np.random.default_rng(0), tmp_path / "decoded"
    write_trace(
        out, experts=np.argsort(rng.random((8, 2, 128)), axis=-1)[..., :8], request_id=["a", "b"],
        domain=["x", "x"], prompt_len=[3, 3], output_len=[4, 4], is_calibration=[True, False],
        model="m", n_experts=128, domains=["x"], captured_by="test", source_data="drawn",
        tool_versions={}, provenance="synthetic", prompt_rows=False,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"trace: decoded is decode-only: .*share experts"):
        prepare(make_config(GROUP | {"trace": str(out)}))


def test_experts_at_the_home_of_their_requests_are_reached_with_fewer_bytes():
    values = {"gpus_per_node": 2, "all2all_backend": "pplx", "policy": "eldr:unit=engine,tau=0"}
    linear, home = (
        run(**values | {"expert_placement": name}).summary["group"] for name in ("linear", "home")
    )
    assert home["mean_between_bytes"] < 0.95 * linear["mean_between_bytes"]
    with pytest.raises(InputError, match="expert_placement: experts placed by home need"):
        run(**values | {"expert_placement": "home", "policy": "jsq"})
    alone = {"data_parallel_size": 1, "tensor_parallel_size": 4}
    with pytest.raises(InputError, match="expert_placement: 'time_aware' needs the times of GPUs"):
        run(**alone | {"expert_placement": "time_aware"})


def test_padded_graphs_of_engines_that_share_experts_are_refused():
    """They pad to the widest of them."""
    config = make_config(
        {"topology": "1C", "trace": "reference-moe", "enable_expert_parallel": True}
        | {"data_parallel_size": 2, "cudagraph_padding": "dense"}
    )
    with pytest.raises(InputError, match="cudagraph_padding: padding to the widest"):
        prepare(config)
