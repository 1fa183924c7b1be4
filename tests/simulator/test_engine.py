"""The compiled plane against the reference model, SimPy processes.

Both run random small clusters: KV caches that hardly hold the largest request, requests that come
together, prompts that begin alike. Every step, time and outcome must be the same.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.policies.base import Needs
from eldr_sim.simulator.control import compiled_cluster as cluster_module
from eldr_sim.simulator.plane import loop, state

from ..properties import examples
from .random_clusters import (
    LONGEST,
    POLICIES,
    RANDOM_CLUSTER,
    Books,
    cluster_of,
    policies_of,
    random_cluster,
    random_workload,
    reference_of,
    with_engines,
)


def make_pair(arguments, prefill="least_loaded", decode="jsq"):
    """Return functions that make the compiled cluster, and the same as SimPy processes."""

    def policies():
        prefix = arguments["workload"].prefix_block_tokens
        first, second = policies_of(arguments["spec"], prefill, decode, prefix)
        return {"prefill_policy": first, "decode_policy": second}

    return (
        lambda: cluster_of(**arguments, **policies()),
        lambda: reference_of(**arguments, **policies()),
    )


TIMES = (
    "sent_s", "tokenized_s", "prefill_start_s", "prefill_end_s", "transfer_start_s",
    "transfer_end_s", "decode_start_s", "first_token_s", "finish_s",
)  # fmt: skip
NUMBERS = (
    "prefill_worker", "decode_worker", "preemptions", "cached_tokens", "decode_cached_tokens",
)  # fmt: skip
COUNTS = (
    "worker", "sequences", "tokens", "outputs", "joined", "chunks", "chunk_tokens", "active",
    "busiest", "context", "plain",
)  # fmt: skip


def assert_same(record, reference):
    """Compare the records of a run on both backends, step by step and request by request."""
    close = {"rtol": 1e-12, "atol": 1e-15}
    for name in ("prefill_steps", "decode_steps"):
        steps, others = getattr(record, name), getattr(reference, name)
        assert steps[list(COUNTS)].tolist() == others[list(COUNTS)].tolist()
        for column in ("start", "end", "draft_s"):
            np.testing.assert_allclose(steps[column], others[column], **close)
    if record.drafted is not None and not record.faults:
        assert record.drafted.tolist() == reference.drafted.tolist()
    assert record.outcomes() == reference.outcomes()
    for name in NUMBERS:
        assert record.requests[name].tolist() == reference.requests[name].tolist(), name
    for name in TIMES:
        times, others = record.requests[name], reference.requests[name]
        np.testing.assert_allclose(times, others, **close, err_msg=name)
    for name in ("last_token_s", "resumed_s"):
        np.testing.assert_allclose(record.gaps[name], reference.gaps[name], **close)
    if "no_worker_left" in record.outcomes():
        return  # the last events, which change nothing, may go on for longer
    np.testing.assert_allclose(record.end_s, reference.end_s, **close)


#: One that has ended is preempted for a prompt, which is then alone: what the threshold leaves it
#: was decided when the plan began.
ALONE_BY_PREEMPTION = {
    "prefill": "holds", "decode": "holds", "seed": 3215502465, "topology": (1, 0), "prefix": 2,
    "grid": 1024, "n_ranks": 1, "own_experts": False, "async_scheduling": True,
    "slow_transfers": True, "signal_intervals": 0, "preempt_by_key": True, "n_queue_keys": 50,
    "aging": 0, "windows": None, "front_end": "thread_pool", "drafts": 5, "threshold": 9,
    "early": True, "sglang": None,
}  # fmt: skip


@examples(60, 3000, ALONE_BY_PREEMPTION, early=st.booleans(), **POLICIES, **RANDOM_CLUSTER)
def test_the_plane_equals_the_reference(prefill, decode, **drawn):
    """INV-5."""
    make, make_reference = make_pair(random_cluster(**drawn), prefill, decode)
    cluster, reference = make(), make_reference()
    assert_same(cluster.run(), reference.run())
    for router, policy in zip(cluster.routers, reference.inputs.policies, strict=True):
        for name in ("placed", "seen"):  # what Books and Holds have been told
            assert getattr(router.policy, name, None) == getattr(policy, name, None)


def test_a_long_run_sees_every_kind_of_hit():
    """The property above would be empty if nothing were shared, evicted or preempted."""
    arguments = random_cluster(3, (2, 2), 4, 0, 2, False, True, True)
    rng, spec = np.random.default_rng(7), arguments["spec"]
    arguments["workload"] = random_workload(rng, 400, 0.01, 4, 40, 25)
    few = {"n_blocks": 22, "max_num_seqs": 4}
    arguments["spec"] = with_engines(
        spec,
        block_size=3,
        prefill=dataclasses.replace(spec.prefill, **few),
        decode=dataclasses.replace(spec.decode, **few),
        max_concurrency=None,
        max_model_len=LONGEST,
        enable_prefix_caching=True,
    )
    arguments |= {"window": (0.0, np.inf), "time_limit_s": np.inf}
    make, make_reference = make_pair(arguments)
    record, reference = make().run(), make_reference()
    assert_same(record, reference.run())
    prompts, hit = record.requests["prompt_len"], record.requests["cached_tokens"]
    assert record.prefill_steps["chunk_tokens"].sum() == (prompts - hit).sum()
    most = (prompts - 1) // 3 * 3
    happened = {
        "miss": np.sum(hit == 0),
        "partial": np.sum((hit > 0) & (hit < most)),
        "full": np.sum((hit > 0) & (hit == most)),
        "evicted": sum(
            worker.scheduler.kv.pool.evictions for worker in reference.workers[: spec.n_prefill]
        ),
        "preempted": record.requests["preemptions"].sum(),
    }
    assert min(happened.values()) >= 30, happened


# -- many steps a call, or one -----------------------------------------------------------------


@examples(9, 200, **POLICIES, **RANDOM_CLUSTER, cut_s=st.sampled_from([0.001, 0.02, 1 / 256]))
def test_macro_steps_equal_single_steps(prefill, decode, cut_s, **drawn):
    """INV-6: However often the loop comes back to Python, the bytes are the same."""
    make, _ = make_pair(random_cluster(**drawn), prefill, decode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_module, "_EVENTS_A_CALL", 1)
        by_event = make().run()
    short_log = make()
    short_log.log = np.zeros(1, state.STEP)
    short_log.gaps = np.zeros(1, state.GAP)
    by_time, until = make(), 0.0
    while until < min(0.5, by_time.time_limit_s) and by_time.advance(until) == loop.UNTIL:
        until += cut_s
    whole = make().run()
    for other in (by_event, short_log.run(), by_time.run()):
        for name in ("requests", "prefill_steps", "decode_steps", "gaps"):
            assert getattr(other, name).tobytes() == getattr(whole, name).tobytes()
        assert other.end_s == whole.end_s


# -- signatures --------------------------------------------------------------------------------


def expand(ranges):
    """Return (trace request, token) of every token of ranges."""
    return [(request, token) for request, start, stop in ranges for token in range(start, stop)]


def prompt_sources(workload, request):
    """Return (trace request, token) of each prompt token: what it replays."""
    first, end = workload.prefix_indptr[request : request + 2]
    blocks = workload.prefix_text[first:end].tolist()
    own, size = int(workload.text[request]), workload.prefix_block_tokens
    return [
        (blocks[token // size] if size and token // size < len(blocks) else own, token)
        for token in range(int(workload.prompt_len[request]))
    ]


class Reader(Books):
    """Sees to it that a prompt's signature is that of a prefill from nothing."""

    needs = Needs(signature="count", ends=True)

    def __init__(self, n_workers, workload):
        super().__init__(n_workers)
        self.workload = workload

    def select(self, request, workers):
        assert expand(request.signature) == prompt_sources(self.workload, request.request_id)
        return super().select(request, workers)


def run_and_read_signatures(arguments, told=None):
    """Run a cluster whose router reads the signatures; ``told`` stands for the workload there."""
    arguments = arguments | {"window": (0.0, np.inf), "time_limit_s": np.inf}
    spec, workload = arguments["spec"], arguments["workload"]
    first, _ = policies_of(spec, "round_robin", "jsq", workload.prefix_block_tokens)
    reader = Reader(spec.n_decode, told or workload)
    return cluster_of(
        **arguments, prefill_policy=first, decode_policy=reader,
        signatures=lambda ranges: (0, ranges),
    ).run()  # fmt: skip


PAIRS = st.sampled_from([(1, 1), (2, 1), (3, 3)])


@given(**RANDOM_CLUSTER | {"topology": PAIRS, "prefix": st.sampled_from([2, 4, 16])})
def test_signatures_equal_those_of_cold_prefills(**drawn):
    """A cached block brings the rows of the prompt that was computed into it."""
    run_and_read_signatures(random_cluster(**drawn))


def test_false_sharing_is_noticed():
    """The test above can fail: here every prompt's blocks pass for those of all others."""
    arguments = random_cluster(5, (1, 1), 4, 0, 1, False, False, False)
    workload = random_workload(np.random.default_rng(3), 40, 0.01, 4, 40, 5)
    spec = dataclasses.replace(
        arguments["spec"], block_size=2, enable_prefix_caching=True, max_model_len=LONGEST
    )
    spec = with_engines(spec, dataclasses.replace(spec.prefill, n_blocks=1000))
    place = np.arange(len(workload.prefix_hash)) - np.repeat(
        workload.prefix_indptr[:-1], np.diff(workload.prefix_indptr)
    )
    arguments |= {"spec": spec, "workload": workload}
    run_and_read_signatures(arguments)
    arguments["workload"] = dataclasses.replace(workload, prefix_hash=place.astype(np.uint64))
    with pytest.raises(AssertionError):
        run_and_read_signatures(arguments, told=workload)
