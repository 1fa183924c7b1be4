"""Methods that act inside a step, priced on recorded tokens without queues: micro-batches grouped
by their experts (arXiv 2604.23150), and copies of experts sent while attention runs (PROBE, arXiv
2602.00509; FreeBalance, 2608.14205), by a perfect forecast of each layer.

``python -m studies.next_methods.steps`` prints both tables: Qwen3-30B-A3B, H100, `reference-moe`.
"""

import numpy as np

from eldr_sim.arrays import Floats, Ints
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.all_to_all import build_all_to_all
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import RankMoE
from eldr_sim.kernel_profiles.steps.step_cost import rank_moe_s
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel, build_step_time_model
from eldr_sim.policies.placement.base import ExpertGroup, Placement
from eldr_sim.policies.placement.eplb import balance
from eldr_sim.simulator.control.relocation import expert_links
from eldr_sim.traces.routing.format import REFERENCE_TRACE, RoutingTrace, open_trace
from studies.expert_traffic import Batch, decode_batches, layer_times, measure, prompt_batches
from studies.grace.settings import replica_choice

MODEL, GPU, STEPS, CONTEXT = "Qwen3-30B-A3B", "H100", 8, 1024


def step_times(n_ranks: int) -> StepTimeModel:
    """Return the times of engines with a GPU each, which share experts."""
    return build_step_time_model(
        load_model(MODEL), load_gpu(GPU), max_num_seqs=1024, max_model_len=4096,
        parallelism=Parallelism(1, True, n_ranks),
    )  # fmt: skip


def linear(trace: RoutingTrace, n_ranks: int) -> Placement:
    """Return experts in order."""
    own = np.arange(trace.n_experts) * n_ranks // trace.n_experts
    return Placement.of_ranks(np.broadcast_to(own, (trace.n_layers, trace.n_experts)), n_ranks)


def by_activation(steps: list[Batch], trace: RoutingTrace, n_ranks: int) -> Placement:
    """Return each expert on the GPU whose tokens choose it most and that has room, greedily."""
    room, ranks = trace.n_experts // n_ranks, np.zeros((trace.n_layers, trace.n_experts), np.int64)
    for layer in range(trace.n_layers):
        uses = np.zeros((trace.n_experts, n_ranks))
        for experts, home in steps:
            np.add.at(uses, (experts[:, layer].astype(int), home[:, None]), 1)
        left, placed = np.full(n_ranks, room), np.zeros(trace.n_experts, bool)
        for at in np.argsort(-uses, axis=None, kind="stable"):
            expert, rank = divmod(int(at), n_ranks)
            if not placed[expert] and left[rank]:
                ranks[layer, expert], placed[expert] = rank, True
                left[rank] -= 1
    return Placement.of_ranks(ranks, n_ranks)


def micro_batches(trace: RoutingTrace, n_ranks: int = 16, each: int = 32) -> None:
    """Print what one batch and two micro-batches take on two nodes, by how requests are grouped."""
    rng, model, gpu = np.random.default_rng(0), load_model(MODEL), load_gpu(GPU)
    times, node = step_times(n_ranks), np.arange(n_ranks) * 2 // n_ranks
    network = build_all_to_all(model, gpu, "deepep_ht", n_ranks, gpus_per_node=n_ranks // 2)
    moe = times.rank_moe(trace.n_experts // n_ranks, n_ranks * each * model.top_k)
    serving = np.flatnonzero(~trace.is_calibration)
    first, length = trace.decode_window(serving)
    drawn = [rng.choice(len(serving), n_ranks * each) for _ in range(2 * STEPS)]
    home = np.arange(n_ranks).repeat(each)

    def step(which: Ints) -> Batch:
        rows = first[which] + rng.integers(length[which])
        return Batch(np.asarray(trace.experts[rows]), home)

    def sort(which: Ints) -> Ints:
        return np.asarray(which[np.argsort(trace.domain[serving[which]], kind="stable")])

    apart = [step(sort(which)) for which in drawn]
    own, plain = by_activation(apart[:STEPS], trace, n_ranks), linear(trace, n_ranks)
    spread = [step(which) for which in drawn[STEPS:]]
    by_domain = [  # on each GPU, requests of like domains first
        step(sort(which).reshape(each, n_ranks).T.ravel()) for which in drawn[STEPS:]
    ]
    cases = {
        "one batch": (spread, plain, 1),
        "two micro-batches, as requests come": (spread, plain, 2),
        "two micro-batches, by domain": (by_domain, plain, 2),
        "one batch, requests and experts together": (apart[STEPS:], own, 1),
        "two micro-batches, requests and experts together": (apart[STEPS:], own, 2),
    }
    print("case: copies to other nodes and GPUs a token; MoE and all-to-all of a layer, us")
    for name, (steps, placement, parts) in cases.items():
        turn = np.arange(n_ranks * each) % each * parts // each
        halves = [[Batch(s.experts[turn == p], s.home[turn == p]) for s in steps]
                  for p in range(parts)]  # fmt: skip
        found = [measure(half, placement, replica_choice("source"), node) for half in halves]
        taken = [layer_times(one, moe, network, prompts=False) for one in found]
        far, near = (np.mean([one.per_token(getattr(one, of)) for one in found])
                     for of in ("between", "inside"))  # fmt: skip
        sums = [1e6 * sum(getattr(t, of) for t in taken) for of in ("moe_s", "all_to_all_s")]
        print(f"{name}: {far:.3f}, {near:.3f}; {sums[0]:.1f}, {sums[1]:.1f}")


def relocated(load: Floats, ranks: Ints, moe: RankMoE, copies: int, prompts: bool) -> Floats:
    """Return a layer's time with experts as placed and with up to ``copies`` sent to each GPU, s:
    the slowest GPU's heaviest expert goes to the fastest GPU with half of what they differ by,
    while that shortens the layer. ``load``: [experts], pairs; ``ranks``: [experts]."""
    n = int(ranks.max()) + 1
    held = [dict(zip(*(a.tolist() for a in (np.flatnonzero((ranks == r) & (load > 0)),
                                            load[(ranks == r) & (load > 0)])), strict=True))
            for r in range(n)]  # fmt: skip

    def seconds(r: int) -> float:
        return rank_moe_s(moe, sum(held[r].values()), len(held[r]), prompts) if held[r] else 0.0

    taken, received = [seconds(r) for r in range(n)], [0] * n
    before = max(taken)
    while True:
        slow = int(np.argmax(taken))
        open_to = [r for r in range(n) if received[r] < copies and r != slow]
        if not open_to or not held[slow]:
            break
        fast = min(open_to, key=taken.__getitem__)
        expert = max(held[slow], key=held[slow].__getitem__)
        differ = (sum(held[slow].values()) - sum(held[fast].values())) / 2
        moved = min(held[slow][expert], differ)
        old = dict(held[slow]), dict(held[fast])
        held[fast][expert] = held[fast].get(expert, 0.0) + moved
        held[slow][expert] -= moved
        if held[slow][expert] <= 0:
            del held[slow][expert]
        new = seconds(slow), seconds(fast)
        if moved <= 0 or max(new) >= taken[slow]:
            held[slow], held[fast] = old
            break
        taken[slow], taken[fast], received[fast] = *new, received[fast] + 1
    return np.array([before, max(taken)])


def under_attention(trace: RoutingTrace, n_ranks: int = 8) -> None:
    """Print what copies sent while a layer's attention runs save, by step and placement."""
    gpu, model, times = load_gpu(GPU), load_model(MODEL), step_times(n_ranks)
    links = expert_links(gpu, model.bytes_per_expert, n_ranks, n_ranks)
    load = trace.decode_activation(np.flatnonzero(trace.is_calibration)).mean(axis=0)
    placements = {"experts in order": linear(trace, n_ranks), "EPLB": balance(
        load, ExpertGroup((), trace.n_layers, trace.n_experts, n_ranks, 0))}  # fmt: skip
    serving = np.flatnonzero(~trace.is_calibration)
    print("step, placement: window us, copies a GPU; MoE of a layer us, before and after; step")
    for each, prompts in ((32, False), (128, False), (2048, True)):
        batches = prompt_batches if prompts else decode_batches
        steps = batches(trace, serving, n_ranks, each, STEPS)
        told = {"chunks": [(0, each)]} if prompts else {"batch": each, "context": each * CONTEXT}
        parts = times.parts(**told, activated=[0.0] * times.n_moe_layers)
        window = (parts.attention + parts.dense) / model.n_layers
        copies = int(window * links.inside / links.expert_bytes)
        slots = min(trace.n_experts, trace.n_experts // n_ranks + copies)
        moe = times.rank_moe(slots, n_ranks * each * model.top_k)
        for name, placement in placements.items():
            of = placement.rank[:, np.argsort(placement.expert[0])] if name != "EPLB" else np.array(
                [rank[np.argsort(expert)] for rank, expert in
                 zip(placement.rank, placement.expert, strict=True)])  # fmt: skip
            found = np.mean([
                relocated(np.bincount(s.experts[:, layer].ravel(), minlength=trace.n_experts)
                          .astype(float), of[layer], moe, copies, prompts)
                for s in steps for layer in range(trace.n_layers)
            ], axis=0)  # fmt: skip
            whole = sum(parts) - parts.moe + found[0] * times.n_moe_layers
            less = (found[0] - found[1]) * times.n_moe_layers / whole
            print(f"{'prompts' if prompts else 'decode'} of {each} a GPU, {name}: "
                  f"{1e6 * window:.0f}, {copies}; {1e6 * found[0]:.1f}, {1e6 * found[1]:.1f} "
                  f"({100 * (found[1] / found[0] - 1):+.1f}%); {-100 * less:+.1f}%")  # fmt: skip


if __name__ == "__main__":
    tokens = open_trace(REFERENCE_TRACE)
    micro_batches(tokens)
    under_attention(tokens)
