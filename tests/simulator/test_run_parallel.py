"""Whole runs of workers of several GPUs on the embedded trace."""

import sys

import numpy as np
import pytest

from eldr_sim.cli.main import main
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator import run as run_module
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import build_cluster, offered_load, prepare, simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.transfer import Pull, TransferModel, pull_between

from ..on_each import on_each
from ..step_times import fixed_s

LARGE = {
    "model": "Qwen3-235B-A22B",
    "gpu": "H200",
    "topology": "2P8D",
    "tensor_parallel_size": 4,
    "enable_expert_parallel": True,
    "request_rate": 24,
    "duration": 8,
    "warmup": 6,
    "output_len": 96,
    "max_num_seqs": 128,
}


def run(**values):
    return simulate(make_config(LARGE | values))


def decode_steps(result):
    steps = result.steps.to_pandas()
    return steps[steps.role == "decode"]


def test_forty_gpus_serve_and_are_paid_for():
    result = run(price_per_gpu_hour=2.0)
    summary = result.summary
    assert summary["completed"] == summary["num_prompts"] > 100
    assert summary["gpus"] == 40
    assert "40 GPUs" in summary["topology"]
    hours = 40 * summary["duration"] / 3600
    tokens = summary["output_throughput"] * summary["duration"]
    assert summary["gpu_hours_per_million_output_tokens"] == pytest.approx(hours / tokens * 1e6)
    assert summary["cost_per_million_output_tokens"] == pytest.approx(2 * hours / tokens * 1e6)
    assert summary["trace"]["layers"].startswith("10 recorded layers tiled over 94")


def test_the_busiest_gpu_reads_between_its_share_and_all():
    steps = decode_steps(run())
    assert (steps.busiest_rank_experts >= steps.active_experts / 4).all()
    assert (steps.busiest_rank_experts <= np.minimum(steps.active_experts, 32)).all()
    assert (steps.busiest_rank_experts < steps.active_experts).any()
    sharded = decode_steps(run(enable_expert_parallel=False))
    assert (sharded.busiest_rank_experts == sharded.active_experts).all()


def test_step_times_follow_the_busiest_gpu():
    """The sum over layers of a time convex or concave in the count is bounded by its ends."""
    model = prepare(make_config(LARGE)).step_time
    for step in decode_steps(run()).head(300).itertuples():
        counts = np.arange(model.cost.moe_s.shape[1])
        line = np.interp(step.busiest_rank_experts, counts, model.cost.moe_s[step.batch])
        knots = np.arange(model.cost.attention_s.shape[1]) * model.cost.context_stride
        attention = np.interp(
            step.context_tokens / step.batch, knots, model.cost.attention_s[step.batch]
        )
        expected = model.n_moe_layers * line + attention + fixed_s(model)[step.batch]
        assert step.end_s - step.start_s == pytest.approx(expected, rel=0.03)


def test_eldr_placement_relieves_the_busiest_gpu_on_the_embedded_trace():
    """ELDR Sec. 5: clusters concentrate their hot experts, the placement parts them."""
    linear = run(policy="eldr", workload="language").summary
    eldr = run(policy="eldr", workload="language", expert_placement="eldr").summary
    key = "mean_busiest_rank_experts_per_step"
    assert eldr[key] < 0.985 * linear[key]
    assert eldr["median_tpot_ms"] < linear["median_tpot_ms"]


def test_eplb_relieves_the_busiest_gpu_on_the_embedded_trace():
    """By the load of all requests, whose experts differ less than those of one cluster."""
    linear, eplb = (
        run(policy="jsq", workload="language", expert_placement=placement).summary
        for placement in ("linear", "eplb")
    )
    key = "mean_busiest_rank_experts_per_step"
    assert eplb["expert_placement"] == "eplb"
    assert eplb[key] < linear[key]


def test_one_rank_through_masks_gives_the_same_bytes(tmp_path, monkeypatch):
    """A second rank without experts changes nothing: the two ways of counting agree."""
    config = make_config({"topology": "2P4D", "duration": 8, "warmup": 2, "output_len": 128})

    def everything_on_rank_zero(prepared, *_):
        one = Placement.of_ranks(np.zeros((1, prepared.model.n_experts), int), 2)
        return [one] * (config.cluster.n_prefill + config.cluster.n_decode), []

    write_result(simulate(config), tmp_path / "plain")
    monkeypatch.setattr(run_module.placing, "placements_of", everything_on_rank_zero)
    write_result(simulate(config), tmp_path / "masks")
    for name in ("summary.json", "requests.parquet", "steps.parquet", "config.json"):
        plain, masked = ((tmp_path / which / name).read_bytes() for which in ("plain", "masks"))
        assert plain == masked


def test_every_gpu_sends_its_part_of_the_kv_cache():
    """One request: set-up, a descriptor a block and tensor, then a quarter of the bytes."""
    setting = prepare(make_config(LARGE))
    requests = run(num_requests=1, warmup=0).requests.to_pandas()
    prompt = requests.prompt_len[0]
    blocks = -(-prompt // 16)
    transfer = setting.spec.transfer
    expected = transfer.setup_s + blocks * 2 * 94 * transfer.descriptor_s
    expected += blocks * 16 * setting.model.kv_bytes_per_token / 4 / transfer.bandwidth
    took = requests.transfer_end_s[0] - requests.transfer_start_s[0]
    assert took == pytest.approx(expected, rel=1e-6)


def test_masks_of_eldr_differ_between_workers():
    config = make_config(LARGE | {"policy": "eldr", "expert_placement": "eldr"})
    setting = prepare(config)
    masks = build_cluster(config, setting, *offered_load(config, setting.trace)).arrays.masks
    n = config.cluster.n_prefill
    assert masks.shape == (n + 8, 4, 94 * 2)
    assert (masks[:n] == masks[0]).all()  # linear
    assert (masks[n] != masks[n + 1]).any()
    assert (np.bitwise_or.reduce(masks, axis=1) == ~np.uint64(0)).all()
    assert (np.unpackbits(masks.view(np.uint8), axis=2).sum(axis=2) == 94 * 32).all()


@on_each(
    "values, message",
    [
        (
            {"expert_placement": "eldr", "policy": "jsq"},
            "expert_placement: .*the decode policy has no clusters",
        ),
        (
            {"expert_placement": "eldr", "enable_expert_parallel": False},
            "expert_placement: .*--enable-expert-parallel",
        ),
        (
            {"expert_placement": "eldr", "tensor_parallel_size": 1, "model": "Qwen3-30B-A3B"},
            "expert_placement: .*2 or more",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: 3 does not divide the 64"),
        ({"tensor_parallel_size": 12}, "tensor_parallel_size: 12"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0"),
        ({"expert_placement": "metro"}, "expert_placement: unknown policy 'metro'"),
        ({"gpu": "H100"}, "gpu: H100 holds .* more GPUs per worker"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_line(values, message):
    with pytest.raises(InputError, match=message) as caught:
        run(**values)
    assert "\n" not in str(caught.value)


def test_the_flag_pair_overrides_a_file(tmp_path, capsys, monkeypatch):
    file = tmp_path / "run.yaml"
    file.write_text("tensor_parallel_size: 4\nenable_expert_parallel: true\n")
    common = ["eldr-sim", "run", "--config", str(file), "--num-requests", "20"]
    common += ["--topology", "1P2D", "--output-len", "8"]

    def output(*flags):
        monkeypatch.setattr(sys, "argv", [*common, *flags])
        main()
        return capsys.readouterr().out

    spread, sharded = output(), output("--no-enable-expert-parallel")
    assert "1 prefill + 2 decode workers of 4 GPUs: 12 GPUs" in spread
    assert "busiest GPU" in spread
    assert "1 prefill + 2 decode workers of 4 GPUs: 12 GPUs" in sharded
    assert "busiest GPU" not in sharded


# -- pools of unequal workers -------------------------------------------------------------------


def test_pools_have_their_own_parallelism():
    """Prefill workers of 4 GPUs with sharded experts, decode workers of 8 that spread them."""
    result = run(
        topology="2P2D",
        num_requests=20,
        warmup=0,
        enable_expert_parallel=False,
        decode={"tensor_parallel_size": 8, "enable_expert_parallel": True},
    )
    summary = result.summary
    assert (summary["tensor_parallel_size"], summary["expert_parallel_size"]) == (8, 8)
    prefill = summary["prefill_workers"]
    assert (prefill["tensor_parallel_size"], prefill["expert_parallel_size"]) == (4, 1)
    assert summary["gpus"] == 2 * 4 + 2 * 8
    assert summary["topology"] == "2 prefill of 4 GPUs + 2 decode of 8 GPUs: 24 GPUs"
    assert summary["completed"] == 20
    busiest = result.record.decode_steps["busiest"] / result.record.decode_steps["active"]
    assert (busiest < 0.5).all()
    steps = result.record.prefill_steps
    assert (steps["busiest"] == steps["active"]).all()


def test_a_pools_own_size_is_the_runs_size():
    """Both pools' own sizes are the size of all workers: the same bytes."""
    whole = run(num_requests=20, warmup=0)
    pools = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    own = run(num_requests=20, warmup=0, tensor_parallel_size=1, enable_expert_parallel=False,
              prefill=pools, decode=pools)  # fmt: skip
    for name in ("requests", "prefill_steps", "decode_steps"):
        assert getattr(own.record, name).tobytes() == getattr(whole.record, name).tobytes()


def held_heads(rank, size, heads):
    """The KV heads of a GPU: shared out while there are enough of them, else copies of one."""
    if heads >= size:
        return set(range(rank * heads // size, (rank + 1) * heads // size))
    return {rank * heads // size}


@on_each("heads", [1, 2, 4, 8])
@on_each("receivers", [1, 2, 4, 8])
@on_each("senders", [1, 2, 4, 8])
def test_who_pulls_from_whom(senders, receivers, heads):
    """Head by head: a GPU asks one holder of each of its heads, its own counterpart if it can."""
    asked = []
    for rank in range(receivers):
        first = rank * senders // receivers
        near = [*range(first, senders), *range(first)]
        holders = set()
        for head in held_heads(rank, receivers, heads):
            holds = [other for other in near if head in held_heads(other, senders, heads)]
            holders.add(next((other for other in holds if other in holders), holds[0]))
        asked.append(holders)
    model = load_model("Qwen3-30B-A3B").model_copy(update={"n_kv_heads": heads})
    pull = pull_between(model, Parallelism(senders), Parallelism(receivers))
    assert pull.receivers == receivers
    assert {pull.sources} == {len(holders) for holders in asked}
    assert pull.senders == len(set().union(*asked))


def test_a_narrow_prefill_worker_sends_at_the_speed_of_its_nics():
    """One GPU sends to four that pull at once: each gets a quarter of its NIC."""
    model = TransferModel(1e-3, 1e-6, 10e9, "test")
    wide = model.over(8e9, 8e9, Pull(receivers=4, senders=1, sources=1))
    assert (wide.bandwidth, wide.ingress, wide.descriptor_s) == (2e9, 8e9, 1e-6)
    narrow = model.over(8e9, 8e9, Pull(receivers=1, senders=4, sources=4))
    assert (narrow.bandwidth, narrow.ingress, narrow.descriptor_s) == (10e9, 8e9, 4e-6)
    slow = TransferModel(1e-3, 1e-6, 1e9, "test").over(8e9, 8e9, Pull(4, 1, 1))
    assert slow.bandwidth == 1e9  # the NIC does not limit it
    with pytest.raises(InputError, match="sizes where one divides the other"):
        pull_between(load_model("Qwen3-30B-A3B"), Parallelism(3), Parallelism(4))


# -- FP8 KV caches -------------------------------------------------------------------------------


def test_an_fp8_kv_cache_is_half_as_large():
    base = {"topology": "1P1D", "num_requests": 8, "output_len": 20, "warmup": 0}
    plain, fp8 = (simulate(make_config(base | {"kv_cache_dtype": d})) for d in ("auto", "fp8"))
    blocks = [result.summary["kv_blocks_per_worker"] for result in (plain, fp8)]
    assert blocks[1] == pytest.approx(2 * blocks[0], abs=1)
    transfer = prepare(make_config(base)).spec.transfer
    took = [
        result.record.requests["transfer_end_s"] - result.record.requests["transfer_start_s"]
        for result in (plain, fp8)
    ]
    n_blocks = -(-plain.record.requests["prompt_len"] // 16)
    model = load_model("Qwen3-30B-A3B")
    spared = n_blocks * 16 * model.kv_bytes_per_token / 2 / transfer.bandwidth
    first = plain.record.requests["transfer_start_s"].argmin()
    assert took[0][first] - took[1][first] == pytest.approx(spared[first], rel=1e-6)
    assert not fp8.summary["latency_warnings"]
    assert (plain.summary["kv_cache_dtype"], fp8.summary["kv_cache_dtype"]) == ("bfloat16", "fp8")


def test_attention_over_an_fp8_cache_has_its_own_rows():
    dims = load_model("Qwen3-30B-A3B")
    fp8 = dims.model_copy(update={"kv_cache_dtype": "fp8"})
    limits = {"max_num_seqs": 64, "max_model_len": 8192, "max_num_batched_tokens": 2048}
    times = [
        build_step_time_model(model, "H100", **limits).parts(64, 64 * 4000, activated=[64] * 48)
        for model in (dims, fp8)
    ]
    assert times[1].attention < 0.8 * times[0].attention
    assert times[1].moe == times[0].moe
    no_rows = build_step_time_model(fp8, "A100", **limits)
    assert any("no table of an FP8 KV cache on A100" in line for line in no_rows.warnings)
