"""Bit sets of random experts, and the recorded prompts that hold them."""

import numpy as np

from eldr_sim.simulator.plane.steps.expert_union import make_prompt_rows


def random_rows(rng, n, n_layers, n_experts):
    """``n`` bit sets of three (or all) random experts a layer."""
    words = -(-n_experts // 64)
    bits = np.zeros((n, n_layers * words), np.uint64)
    for row in bits.reshape(n * n_layers, words):
        for expert in rng.choice(n_experts, min(3, n_experts), replace=False):
            row[expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
    return bits


def random_prompts(rng, workload, n_requests, n_layers, n_experts):
    """Recorded prompts of 1 to 11 random rows, which longer ones replay again and again.

    ``n_requests`` is that of the trace, of which the workload's requests are.
    """
    length = rng.integers(1, 12, size=n_requests)
    bits = random_rows(rng, int(length.sum()), n_layers, n_experts)
    bits.flags.writeable = False
    return make_prompt_rows(
        bits,
        np.cumsum(length) - length,
        length.astype(np.int32),
        workload.prefix_indptr,
        workload.prefix_text,
        workload.prefix_block_tokens,
    )
