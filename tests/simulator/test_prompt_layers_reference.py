"""Engines that stream experts, or whose layers lie in stages, on both backends."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import PipelinePlan
from eldr_sim.kernel_profiles.steps.weight_streaming import Stream, StreamPlan
from eldr_sim.simulator.setup.memory import StreamedExperts
from eldr_sim.simulator.setup.streaming import PromptLayout

from .prompt_layers import LayeredPrefiller
from .random_clusters import (
    Holds,
    cluster_of,
    policies_of,
    random_cluster,
    reference_of,
    with_engines,
)
from .test_engine import assert_same


def random_layout(rng, kind, size, n_layers, whole):
    """Transfers or stages about as long as the layers of `random_cost`, 0.2 to 2 ms."""
    if kind == "stages":
        shares = tuple(rng.dirichlet(np.ones(size)))
        sends = rng.random(2) * (1e-3, 1e-4) * rng.integers(2)
        plan = PipelinePlan(shares, *map(float, sends), {})
        return PromptLayout(None, None, False, plan, whole)
    gather_s, host_s = 3e-3 * rng.random(2) * rng.integers(0, 3, 2)
    window = int(rng.integers(max(1, n_layers - 1)))
    interference = float(rng.choice([0.0, 0.3, 1.0]))
    if kind == "needed":
        window = interference = 0
    if size == 1:
        gather_s = interference = 0.0
    stream = Stream(
        float(gather_s), float(host_s) if window else 0.0, float(interference), size == 1
    )
    plan = StreamPlan(stream, window, 1, {}, ())
    held = StreamedExperts(1, 0)
    return PromptLayout(plan, held, kind == "collective", None, whole, kind == "needed")


def layered_cluster(seed, kind, topology, size, whole, **drawn):
    """Return the arguments of a random cluster whose prefill workers have such layers."""
    engines = 1 if kind == "stages" else size
    first, last = topology
    alone = {"launches": max(topology) == 1}
    arguments = random_cluster(seed, (first * engines, last), grid=0, n_ranks=1, **drawn, **alone)
    spec, rng = arguments["spec"], np.random.default_rng([seed, 7])
    n_layers = spec.prefill.step_time.n_moe_layers
    prefill = dataclasses.replace(
        spec.prefill,
        parallelism=Parallelism(1, engines > 1, engines),
        layout=random_layout(rng, kind, size, n_layers, whole and last == 0),
    )
    arguments["spec"] = with_engines(spec, prefill)
    return arguments


LAYERED = {
    "seed": st.integers(0, 2**32),
    "kind": st.sampled_from(["stages", "one_sided", "collective", "needed"]),
    "topology": st.sampled_from([(1, 0), (2, 0), (1, 1), (2, 1)]),
    "size": st.integers(1, 4),
    "whole": st.booleans(),
    "prefix": st.sampled_from([0, 4, 7]),
    "own_experts": st.booleans(),
    "async_scheduling": st.booleans(),
    "slow_transfers": st.booleans(),
    "n_queue_keys": st.sampled_from([1, 3]),
    "aging": st.sampled_from([None, None, 3]),
    "signal_intervals": st.sampled_from([0, 0, 7]),
}


def run_pair(arguments, prefill="least_loaded"):
    """Return the record of the plane, the reference model, and its record."""

    def policies():
        prefix = arguments["workload"].prefix_block_tokens
        first, second = policies_of(arguments["spec"], prefill, "jsq", prefix)
        return {"prefill_policy": first, "decode_policy": second}

    workers = {}
    if arguments["spec"].prefill.layout.has_steps_of_its_own:
        workers = {"prefill": LayeredPrefiller}
    reference = reference_of(**arguments, **policies(), workers=workers)
    return cluster_of(**arguments, **policies()).run(), reference, reference.run()


@given(prefill=st.sampled_from(["least_loaded", "round_robin", "holds"]), **LAYERED)
def test_layers_that_stream_or_lie_in_stages_are_equal(prefill, **drawn):
    record, _, other = run_pair(layered_cluster(**drawn), prefill=prefill)
    assert_same(record, other)


def test_the_random_clusters_wait_for_weights_and_fill_their_stages():
    """The property above would be empty if transfers always hid, or stages held one step."""
    stalls, overlaps = 0, 0
    for seed in range(12):
        common = {"prefix": 0, "own_experts": True, "async_scheduling": True, "size": 3}
        common |= {"slow_transfers": False, "topology": (1, 0), "whole": False}
        record, _, _ = run_pair(layered_cluster(seed, "collective", **common))
        stalls += record.stall_s > 0.01 * record.streamed_s > 0
        record, reference, _ = run_pair(layered_cluster(seed, "stages", **common))
        stages = reference.workers[0].group.layers
        ends = record.prefill_steps["end"]
        overlaps += any(exit_s > end for exit_s, end in zip(stages.exits, ends, strict=False))
    assert min(stalls, overlaps) >= 4


def test_policies_see_the_same_of_prompts_in_later_stages():
    """These hold their blocks, and count as running."""
    common = {"prefix": 0, "own_experts": True, "async_scheduling": True, "size": 4}
    common |= {"slow_transfers": False, "topology": (2, 0), "whole": False}
    for seed in range(8):
        arguments, seen = layered_cluster(seed, "stages", **common), []
        for make, more in (
            (cluster_of, {}),
            (reference_of, {"workers": {"prefill": LayeredPrefiller}}),
        ):
            policy = Holds()
            make(**arguments, **more, prefill_policy=policy, decode_policy=None).run()
            seen.append(policy.seen)
        assert seen[0] == seen[1]
