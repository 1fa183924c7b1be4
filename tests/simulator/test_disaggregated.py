"""Attention and experts on GPUs of their own, on both backends and against closed forms."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.jit import njit
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.simulator.plane.steps.disaggregated import ping_pong_s
from eldr_sim.simulator.plane.steps.group_state import RANK, make_micro_batches
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare

from ..on_each import on_each
from .test_groups import GROUPED, assert_equal_steps, grouped_cluster, run_pair

AFD = GROUPED | {
    "apart": st.tuples(st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from([1, 2, 3, 4, 7])),
    "topology": st.sampled_from([(1, 1), (2, 1), (1, 2), (0, 1)]),
    "size": st.sampled_from([2, 3, 4]),
}


@given(decode=st.sampled_from(["jsq", "round_robin", "holds"]), **AFD)
def test_steps_equal_the_reference(decode, **drawn):
    assert_equal_steps(*run_pair(grouped_cluster(**drawn), decode=decode))


PLAIN = {"prefix": 0, "async_scheduling": False, "slow_transfers": False}


def test_micro_batches_overlap_preempt_and_compute_prompts():
    """The property would be empty if nothing overlapped."""
    overlapped = preempted = prompts = 0
    for seed in range(20):
        record, _ = run_pair(grouped_cluster(seed, (1, 1), 2, 1, 1, RANK, apart=(3, 2), **PLAIN))
        steps = record.decode_group_steps
        parts = sum(steps[f"{part}_s"] for part in ("own", "moe", "dispatch", "combine", "choice"))
        overlapped += (parts > steps["end"] - steps["start"]).sum()
        preempted += record.requests["preemptions"].sum()
        prompts += (record.decode_steps["chunks"] > 0).sum()
    assert overlapped > 20
    assert min(preempted, prompts) > 0


@njit()
def _ping_pong(micro, n, layers):
    return ping_pong_s(micro, n, layers)


def seconds_of(stages):
    """What the plane says of stage times ``[4, micro-batches, layers]``."""
    micro = make_micro_batches(1, 1, stages.shape[1], stages.shape[2])
    micro.seconds[:] = stages
    return _ping_pong(micro, stages.shape[1], stages.shape[2])


@given(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4), st.integers(1, 6), st.integers(1, 12))
def test_equal_layers_take_what_the_closed_form_says(times, m, n_layers):
    """MegaScale-Infer's T_total (arXiv 2504.02263, Sec. 4) where the slowest stage never waits."""
    stages = np.broadcast_to(np.array(times)[:, None, None], (4, m, n_layers))
    longest, once = max(times), sum(times)
    if m * longest >= once:
        expected = once + (m * n_layers - 1) * longest
    else:
        expected = n_layers * once + (m - 1) * longest
    assert seconds_of(stages) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_ideal_ping_pong_computes_on_both_sides_at_once():
    stages = np.zeros((4, 2, 10))
    stages[[0, 2]] = 1.0
    assert seconds_of(stages) == 2 * 10 + 1  # 2 x 2 x 10 one after the other
    assert seconds_of(stages[:, :1]) == 2 * 10


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 8))
def test_no_step_is_shorter_than_its_stages_or_longer_than_all_in_turn(seed, m, n_layers):
    """Whatever the stages take, and a stage that takes longer never makes the step shorter."""
    rng = np.random.default_rng(seed)
    stages = rng.exponential(size=(4, m, n_layers))
    took = seconds_of(stages)
    alone = max(seconds_of(stages[:, j : j + 1]) for j in range(m))
    assert max(alone, stages.sum(axis=(1, 2)).max()) <= took * (1 + 1e-12)
    assert took <= stages.sum() * (1 + 1e-12)
    more = stages.copy()
    more[rng.integers(4), rng.integers(m), rng.integers(n_layers)] += 0.5
    assert seconds_of(more) >= took * (1 - 1e-12)


# -- beside engines that have the experts on their own GPUs --------------------------------------


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6])
def test_one_micro_batch_steps_as_engines_that_share_experts(seed):
    """As many GPUs on both sides, dispatch and combine of a time that no traffic changes; no step
    is computed as two halves, which `grouped_cluster` draws for engines that share experts alone
    (beside micro-batches it is refused)."""
    runs = []
    for ffn_ranks in (0, 3):
        arguments = grouped_cluster(seed, (1, 1), 3, 1, 8, RANK, apart=(ffn_ranks, 1), **PLAIN)
        spec = arguments["spec"]
        pools = []
        for pool in spec.pools:
            group = pool.engine.group
            table = group.all_to_all
            still = [seconds * 0 + seconds[0] for seconds in table[3::2]]
            even = table._replace(**dict(zip(table._fields[3::2], still, strict=True)))
            group = group._replace(all_to_all=even, gathered=even, split_decode=0, split_prompts=0)
            pools.append(pool._replace(engine=dataclasses.replace(pool.engine, group=group)))
        arguments["spec"] = dataclasses.replace(spec, pools=tuple(pools))
        record, _ = run_pair(arguments)
        runs.append(record)
    shared, apart = runs
    for name in ("first_token_s", "finish_s"):
        np.testing.assert_allclose(apart.requests[name], shared.requests[name], rtol=1e-9)
    for name in ("active", "busiest", "sequences", "context"):
        assert apart.decode_steps[name].tolist() == shared.decode_steps[name].tolist()
    for name in ("start", "end", "own_s", "moe_s", "dispatch_s", "combine_s", "choice_s", "wait_s"):
        mine, other = apart.decode_group_steps[name], shared.decode_group_steps[name]
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-12, err_msg=name)
    assert len(apart.decode_group_steps) > 3


RUN = {
    "trace": "reference-moe",
    "topology": "2P4A4F",
    "request_rate": 60,
    "num_requests": 80,
    "output_len": 40,
    "policy": "jsq",
    "all2all_backend": "deepep_ll",
}
MODEL = load_model("Qwen3-30B-A3B")


def run(**values):
    return simulate(make_config(RUN | values))


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_every_token_is_computed_once_and_both_sides_are_busy_or_idle(micro_batches):
    result = run(micro_batches=micro_batches, warmup=0)
    summary, record = result.summary, result.record
    assert (summary["completed"], summary["gpus"]) == (80, 2 + 4 + 4)
    said = "2 prefill of 1 GPU + 1 decode of 4 engines of 1 GPU and 4 FFN GPUs: 10 GPUs"
    assert summary["topology"] == said
    steps, groups = record.decode_steps, record.decode_group_steps
    tokens = steps["tokens"].sum() + steps["chunk_tokens"].sum()
    assert groups["pairs"].sum() == tokens * MODEL.top_k * MODEL.n_moe_layers
    # Each token has up to top_k copies, each of a hidden state in bfloat16, out and back.
    sent = groups["inside_bytes"] + groups["between_bytes"]
    assert (sent * 4 >= groups["pairs"] * 2 * MODEL.hidden_size * 2 * (1 - 1e-12)).all()
    group = summary["group"]
    assert (group["ffn_ranks"], group["micro_batches"]) == (4, micro_batches)
    seconds = groups["end"] - groups["start"]
    idle = [seconds - groups["own_s"], seconds - groups["moe_s"] - groups["choice_s"]]
    assert min(side.min() for side in idle) >= 0
    for side, name in zip(idle, ("attention", "ffn"), strict=True):
        assert group[f"mean_{name}_idle_ms"] == pytest.approx(1e3 * side.mean())
    parts = sum(groups[f"{part}_s"] for part in ("own", "moe", "dispatch", "combine"))
    host = prepare(make_config(RUN)).spec.decode.step_time.host_gap_s
    if micro_batches == 1:
        np.testing.assert_allclose(parts + host, seconds, rtol=1e-9)
    else:
        assert (parts + host > seconds * (1 + 1e-9)).any()


def test_gpus_of_both_sides_cost_money():
    own = run(price_per_gpu_hour=2.0).summary
    assert own["cost_per_million_output_tokens"] == pytest.approx(
        2.0 * own["gpu_hours_per_million_output_tokens"]
    )
    assert make_config(RUN | {"price_per_gpu_hour": 2.0}).price_per_hour == 20.0


def test_attention_gpus_have_the_memory_that_experts_leave():
    """A GPU of attention holds what a GPU of experts alone does not, and the other way round."""
    wide = {"topology": "2P1D", "data_parallel_size": 4, "enable_expert_parallel": True}
    shares, apart = (prepare(make_config(RUN | values)).spec.decode for values in (wide, {}))
    tokens = 16 * (apart.n_blocks - shares.n_blocks)
    freed = MODEL.n_moe_layers * (MODEL.n_experts // 4) * MODEL.bytes_per_expert
    assert tokens * MODEL.kv_bytes_per_token == pytest.approx(freed, rel=1e-4)
    layout = apart.parallelism
    assert layout.weight_bytes(MODEL) + MODEL.n_moe_layers * MODEL.n_experts * (
        MODEL.bytes_per_expert
    ) == pytest.approx(MODEL.weight_bytes)


def test_several_decode_workers_are_spelled():
    two = {"workers": 2, "data_parallel_size": 4, "ffn_ranks": 2, "enable_expert_parallel": True}
    named = {"prefill": {"workers": 3, "then": "decode"}, "decode": two}
    spelled, filed = (make_config(RUN | {"topology": each}) for each in ("3P2x4A2F", named))
    assert spelled.pools == filed.pools
    assert spelled.n_gpus == 3 + 2 * 6
    assert (spelled.cluster.n_prefill, spelled.cluster.n_decode) == (3, 2)


@on_each("values, says", [
        ({"topology": "2P4A3F"}, "ffn_ranks: 3 does not divide the 128 experts"),
        ({"topology": "2P1A4F"}, "topology.decode.ffn_ranks: there is only one attention engine"),
        ({"topology": "2P4A"}, "topology: '2P4A'"),
        ({"topology": "4A4F"}, "topology: '4A4F'"),
        ({"topology": "2P4A8F"}, "12 ranks on nodes of 8 GPUs"),
        ({"eplb_interval": 10}, "eplb_interval: experts on separate FFN GPUs do not move"),
        ({"decode": {"data_parallel_size": 2}}, "decode.data_parallel_size: 2 engines beside"),
        ({"micro_batches": 0}, "micro_batches"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config: drafts are not simulated",
        ),
        (
            {"topology": {"all": {"workers": 1, "data_parallel_size": 2, "ffn_ranks": 2,
                                  "enable_expert_parallel": True}}},
            "topology.all.ffn_ranks: all workers compute prompts",
        ),
        ({"model": "Qwen3-235B-A22B", "trace": None, "gpu": "H200", "topology": "2P6A2F",
          "prefill": {"tensor_parallel_size": 8}}, "ffn_ranks: experts of 227"),
        ({"model": "Qwen3-32B", "trace": None}, "is dense"),
    ])  # fmt: skip
def test_what_is_not_simulated_is_refused(values, says):
    with pytest.raises(InputError) as error:
        run(**values)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pool_of_a_file_may_have_several_such_workers(tmp_path):
    """The spelling's pools, written out; and a worker that dies comes back whole."""
    pools = {
        "prefill": {"workers": 2, "then": "decode"},
        "decode": {
            "workers": 1, "data_parallel_size": 4, "enable_expert_parallel": True, "ffn_ranks": 4,
        },
    }  # fmt: skip
    assert run(topology=pools).summary["median_tpot_ms"] == run().summary["median_tpot_ms"]
    pools["decode"]["workers"] = 2
    result = run(topology=pools, fail=("decode:0@0.5s+1s",), retry="migrate", warmup=0)
    assert result.summary["gpus"] == 2 + 2 * 8
    assert result.summary["completed"] == 80


def test_micro_batches_without_such_workers_have_no_effect():
    assert "micro_batches" in str(run(topology="2P2D", micro_batches=3).summary["without_effect"])
