"""Who leaves: the worker whose requests, sessions and experts others can take best, by hand."""

import numpy as np
import pytest

from eldr_sim import RunConfig
from eldr_sim.simulator.control.autoscaling import leaving_s
from eldr_sim.simulator.setup.expected_step import scaling_facts
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.simulation import Simulation

CONFIG = RunConfig(
    trace="reference-moe", topology="3C", policy="jsq", request_rate=1, num_requests=1, warmup=0,
    input_len=320, prefix_len=1600, output_len=8,
)  # fmt: skip


class Scene:
    """Three workers that serve, whose batches and caches are set by hand."""

    def __init__(self):
        self.sim = Simulation(CONFIG)
        self.acts = self.sim.cluster.acts
        self.arrays = self.acts.cluster.arrays
        spec = self.acts.cluster.spec
        self.engine = spec.pools[0].engine
        self.facts = scaling_facts(
            CONFIG.pools,
            0.0,
            prepare(CONFIG),
            self.acts.cluster.workload,
            [{}] * len(CONFIG.pools),
            {},
        ).of("decode")

    def runs(self, w, rows, left=10, context=1000):
        told, sequences = self.acts.workers, self.arrays.engines.sequences[w]
        told["batch"][w], told["context"][w] = len(rows), context * len(rows)
        sequences["row"][: len(rows)], sequences["tokens_left"][: len(rows)] = rows, left

    def caches(self, w, hashes):
        kv = self.arrays.engines.kv
        kv.blocks["block_hash"][w][: len(hashes)] = hashes
        kv.hash_slots[w][: len(hashes)] = np.arange(len(hashes)) + 1

    def costs(self):
        return leaving_s(self.acts, self.facts, self.engine, [0, 1, 2])


@pytest.fixture
def scene():
    return Scene()


def test_an_idle_worker_leaves_for_nothing(scene):
    assert scene.costs() == [0.0, 0.0, 0.0]


def test_the_longest_output_is_what_a_worker_waits_for(scene):
    for w, left in enumerate((30, 10, 20)):
        scene.runs(w, [0, 1], left)
    costs = scene.costs()
    assert costs[0] > costs[2] > costs[1]
    assert costs[1] == pytest.approx(10 * scene.facts.step_s(2, 1000.0))


def test_what_others_have_cached_is_not_lost(scene):
    """Blocks 1 to 20 are on two workers, 30 to 35 on the third alone."""
    scene.caches(0, range(1, 21))
    scene.caches(1, range(1, 21))
    scene.caches(2, range(30, 36))
    token_s = scene.facts.prompt_s(4096) / 4096
    assert scene.costs() == pytest.approx([0.0, 0.0, 6 * 16 * token_s])


def test_experts_that_others_activate_are_not_lost(scene):
    """Two workers run the same tokens, the third runs others."""
    for w, rows in enumerate(([0, 1], [0, 1], [40, 41])):
        scene.runs(w, rows)
    bits = scene.arrays.bits
    mine, theirs = (np.bitwise_or(bits[a], bits[b]) for a, b in ((40, 41), (0, 1)))
    alone = sum(int(word).bit_count() for word in (mine & ~theirs))
    layers = scene.engine.step_time.n_moe_layers
    decode = scene.engine.step_time.decode_s
    an_expert = (decode([2.0] * layers, 2, 1000.0) - decode([1.0] * layers, 2, 1000.0)) / layers
    step = scene.facts.step_s(2, 1000.0)
    assert alone > 100
    assert scene.costs() == pytest.approx([10 * step, 10 * step, 10 * (step + alone * an_expert)])
