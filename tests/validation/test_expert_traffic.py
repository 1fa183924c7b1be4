"""Traffic of steps: closed forms, conservation, a twin token by token, and what sends nothing."""

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.policies.placement.base import Placement
from eldr_sim.traces.routing.format import open_trace
from studies.expert_traffic import Batch, decode_batches, layer_times, measure, prompt_batches

from ..simulator.traffic import Traffic as Twin

NODES = np.array([0, 0, 1, 1])


def choice(name):
    return registry.replica_choice(name, PolicyContext(1, np.random.default_rng(0)))


def uniform(rng, tokens, layers, n_experts, top_k, n_ranks):
    """Tokens that choose among all experts alike, at homes that know nothing of it."""
    experts = np.argsort(rng.random((tokens, layers, n_experts)), axis=2)[..., :top_k]
    return Batch(experts, np.sort(rng.integers(n_ranks, size=tokens)))


def linear(layers, n_experts, n_ranks):
    ranks = np.broadcast_to(np.arange(n_experts) * n_ranks // n_experts, (layers, n_experts))
    return Placement.of_ranks(ranks, n_ranks)


def test_uniform_routing_is_the_closed_form():
    """A token reaches D [1 - C(E - E/D, k) / C(E, k)] of D equal parts."""
    n_experts, top_k, n_ranks = 128, 8, 4
    rng = np.random.default_rng(0)
    found = measure(
        [uniform(rng, 20_000, 1, n_experts, top_k, n_ranks)],
        linear(1, n_experts, n_ranks), choice("source"), NODES,
    )  # fmt: skip

    def reached(parts):
        return 1 - comb(n_experts - n_experts // parts, top_k) / comb(n_experts, top_k)

    assert found.per_token(found.between) == pytest.approx(reached(2), abs=2e-3)
    assert found.per_token(found.inside) == pytest.approx(2 * reached(4), abs=1e-2)
    assert 4 * reached(4) == pytest.approx(3.629, abs=1e-3)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_copies_for_each_expert_know_no_placement(seed):
    """k (D - 1) / D of them cross GPUs without copies, if homes are independent of experts."""
    rng, n_ranks, top_k = np.random.default_rng(seed), 4, 4
    batch = uniform(rng, 4000, 1, 16, top_k, n_ranks)
    ranks = rng.integers(n_ranks, size=(1, 16))
    found = measure([batch], Placement.of_ranks(ranks, n_ranks), choice("source"), NODES)
    crossing = found.per_token(found.between_pairs) + found.per_token(found.inside_pairs)
    assert crossing == pytest.approx(top_k * (n_ranks - 1) / n_ranks, abs=0.1)


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gpus, n_nodes, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2
    n_ranks, n_experts = gpus * n_nodes, draw(st.integers(2, 9))
    batches = [
        uniform(rng, int(rng.integers(1, 30)), layers, n_experts, 2, n_ranks) for _ in range(2)
    ]
    expert = rng.integers(n_experts, size=(layers, n_experts + draw(st.integers(0, 6))))
    expert[:, :n_experts] = np.arange(n_experts)
    rank = rng.integers(n_ranks, size=expert.shape)
    load = rng.gamma(1.0, size=(layers, n_ranks))
    name = draw(st.sampled_from(["even", "hash", "source", "weighted", "local_first"]))
    return batches, Placement(expert, rank, n_ranks, load), name, np.arange(n_ranks) // gpus


@given(cases())
def test_counts_are_those_of_a_token_by_token_twin(case):
    batches, placement, name, node = case
    found = measure(batches, placement, choice(name), node)
    gpus = int((node == 0).sum())
    for step, (experts, home) in enumerate(batches):
        for layer in range(2):
            slots = choice(name).choose(home, experts[:, layer], placement, layer, node)
            ranks = placement.rank[layer][slots]
            twin, activated = Twin(placement.n_ranks, gpus, "node"), set()
            for own, row, slot in zip(home, ranks.tolist(), slots.tolist(), strict=True):
                twin.token(own, row)
                activated |= set(zip(row, slot, strict=True))  # each with weights of its own
            far = [a // gpus != b // gpus for a, b in twin.sends]
            assert found.between[step, layer] == sum(far)
            assert found.inside[step, layer] == len(far) - sum(far)
            busiest = found.busiest_inside[step, layer], found.busiest_between[step, layer]
            assert busiest == twin.busiest()
            pairs = np.bincount(ranks.ravel(), minlength=placement.n_ranks)
            assert found.pairs[step, layer].tolist() == pairs.tolist()
            assert pairs.sum() == 2 * len(home)
            counts = np.bincount([r for r, _ in activated], minlength=placement.n_ranks)
            assert found.activated[step, layer].tolist() == counts.tolist()
            away = [(h, r) for h, row in zip(home, ranks.tolist(), strict=True) for r in row]
            crossing = sum(node[h] != node[r] for h, r in away)
            assert found.between_pairs[step, layer] == crossing
            assert found.inside_pairs[step, layer] == sum(h != r for h, r in away) - crossing


@given(cases())
def test_names_of_experts_do_not_matter(case):
    batches, placement, _, node = case
    rename = np.random.default_rng(0).permutation(int(placement.expert.max()) + 1)
    renamed = Placement(rename[placement.expert], placement.rank, placement.n_ranks, placement.load)
    others = [Batch(rename[experts], home) for experts, home in batches]
    one = measure(batches, placement, choice("source"), node)
    other = measure(others, renamed, choice("source"), node)
    for name in ("between", "inside", "pairs", "busiest_inside"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_what_is_everywhere_sends_nothing_and_one_node_nothing_between():
    rng = np.random.default_rng(1)
    batch = uniform(rng, 200, 2, 8, 3, 4)
    expert = np.tile(np.arange(8), (2, 4))
    rank = np.broadcast_to(np.arange(4).repeat(8), expert.shape)
    everywhere = Placement(expert, rank, 4, np.ones((2, 4)))
    for name in ("source", "local_first"):
        found = measure([batch], everywhere, choice(name), NODES)
        assert not found.between.any()
        assert not found.inside.any()
    one_node = measure([batch], linear(2, 8, 4), choice("source"), np.zeros(4, np.int64))
    assert not one_node.between.any()
    assert one_node.inside.any()
    alone = measure(
        [Batch(batch.experts, np.zeros(200, np.int64))],
        linear(2, 8, 1), choice("source"), np.zeros(1, np.int64),
    )  # fmt: skip
    assert not alone.inside.any()
    assert (alone.pairs == 600).all()


def test_times_are_the_tables_of_the_slowest():
    model, gpu = load_model("Qwen3-30B-A3B"), load_gpu("H100")
    step_time = build_step_time_model(
        model, gpu, max_num_seqs=64, max_model_len=256, max_num_batched_tokens=256,
        parallelism=Parallelism(1, True, 4),
    )  # fmt: skip
    moe = step_time.rank_moe(128, 4096)
    all_to_all = build_all_to_all(model, gpu, "deepep_ht", 4, gpus_per_node=2)
    trace = open_trace("reference-moe")
    requests = np.flatnonzero(~trace.is_calibration)[:40]
    batches = decode_batches(trace, requests, 4, 16, 2)
    assert [len(batch.home) for batch in batches] == [64, 64]
    traffic = measure(batches, linear(10, 128, 4), choice("source"), NODES)
    times = layer_times(traffic, moe, all_to_all, prompts=False)
    slowest = np.mean(traffic.pairs.max(axis=2))  # more pairs, more time: near the busiest GPU
    near = moe.decode_s[round(slowest / 8), round(traffic.busiest_experts)]
    assert times.moe_s == pytest.approx(near, rel=0.1)
    far, inside = traffic.busiest_between.mean(), traffic.busiest_inside.mean()
    moving = all_to_all.dispatch_s(inside, far) + all_to_all.combine_s(inside, far)
    assert times.all_to_all_s == pytest.approx(moving, rel=0.05)
    assert 0 <= times.idle_s < times.moe_s
    prompts = prompt_batches(trace, requests, 4, 64, 2)
    assert prompts[0].experts.shape == (256, 10, 8)
