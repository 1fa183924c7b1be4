"""Clusters whose KV caches hardly hold the largest request: nothing gets stuck or lost."""

import numpy as np
from hypothesis import strategies as st

from eldr_sim.simulator.setup.transfer import TransferModel

from ..properties import examples
from ..watching import free_blocks


@examples(
    40, 400,
    seed=st.integers(0, 2**32),
    n=st.integers(1, 30),
    n_prefill=st.integers(0, 1),
    seqs=st.integers(1, 8),
    budget=st.integers(1, 64),
    block_size=st.sampled_from([1, 2, 16]),
    slack=st.integers(0, 6),
    latency_s=st.sampled_from([0.0, 1e-3, 0.5]),
    burst=st.booleans(),
    async_scheduling=st.booleans(),
)  # fmt: skip
def test_tiny_caches_end_and_give_every_block_back(
    make_cluster, make_workload, run_watched, run_to_rest, seed, n, n_prefill, seqs, budget,
    block_size, slack, latency_s, burst, async_scheduling,
):  # fmt: skip
    """Equal arrivals, free transfers, caches that hold hardly more than the largest request."""
    rng = np.random.default_rng(seed)
    arrival = np.zeros(n) if burst else np.round(np.cumsum(rng.exponential(0.01, n)), 2)
    prompts, outputs = rng.integers(1, 40, n), rng.integers(1, 60, n)
    n_blocks = slack + int((-(-(prompts + outputs) // block_size)).max())
    cluster = make_cluster(
        make_workload(arrival, prompts, outputs), n_prefill=n_prefill, max_num_seqs=seqs,
        max_num_batched_tokens=budget, block_size=block_size, n_blocks=n_blocks, seed=seed,
        transfer=TransferModel(latency_s, 0.0, 1e30, "test"), async_scheduling=async_scheduling,
    )  # fmt: skip

    def watch():
        workers = cluster.arrays.engines.workers
        assert (workers["n_blank"] >= 0).all()
        assert (workers["n_blank"] <= n_blocks).all()
        assert (workers["batch"] + workers["prefilling"] <= seqs).all()

    run_watched(cluster, watch)
    record = run_to_rest(cluster)
    assert record.completed.all()
    assert free_blocks(cluster) == [n_blocks] * (n_prefill + 1)
    assert cluster.arrays.engines.workers["context"].tolist() == [0] * (n_prefill + 1)
    steps = record.decode_steps
    assert steps["outputs"].sum() == outputs.sum()  # preemption loses time, never a token
    assert (steps["start"][1:] >= steps["end"][:-1]).all()  # one step at a time
    assert (steps["sequences"] <= seqs).all()
    assert (steps["tokens"] + steps["chunk_tokens"] <= budget).all()
    if n_prefill:  # each prompt token once
        assert record.prefill_steps["chunk_tokens"].sum() == prompts.sum()
        assert (record.prefill_steps["chunk_tokens"] <= budget).all()


def test_a_cluster_with_a_tiny_cache_ends(make_cluster, make_workload, run_to_rest):
    rng = np.random.default_rng(5)
    workload = make_workload(
        np.zeros(120), rng.integers(1, 50, 120), rng.integers(1, 60, 120), seed=5
    )
    cluster = make_cluster(workload, n_prefill=2, n_decode=2, n_blocks=28, max_num_seqs=16)
    record = run_to_rest(cluster)
    assert record.completed.all()
    assert record.requests["preemptions"].sum() > 20
    assert free_blocks(cluster) == [28] * 4
