"""The compiled cluster against its brute-force twin.

The twin (`twin`) is given random small clusters: KV caches that hardly hold the largest request,
requests that come together, prompts that begin alike. Every step, time and outcome must be the
same.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.policies.base import Needs
from eldr_sim.simulator.control import cluster as cluster_module
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
    with_engines,
)
from .twin.cluster import Twin
from .twin.experts import prompt_sources


def make_pair(arguments, prefill="least_loaded", decode="jsq"):
    """Return functions that make the compiled cluster and its twin."""

    def policies():
        prefix = arguments["workload"].prefix_block_tokens
        first, second = policies_of(arguments["spec"], prefill, decode, prefix)
        return {"prefill_policy": first, "decode_policy": second}

    return (
        lambda: cluster_of(**arguments, **policies(), signatures=lambda ranges: (0, None)),
        lambda: Twin(**arguments, **policies()),
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


def assert_same(record, twin):
    """Compare a run with its twin's, step by step and request by request."""
    n_prefill, close = twin.spec.n_prefill, {"rtol": 1e-12, "atol": 1e-15}
    of_pool = [], []
    for step in twin.steps:
        if step["worker"] >= n_prefill:
            of_pool[1].append(step | {"worker": step["worker"] - n_prefill})
        elif step["end"] <= record.end_s * (1 + 1e-12):
            of_pool[0].append(step)
    for steps, twins in zip((record.prefill_steps, record.decode_steps), of_pool, strict=True):
        got = [dict(zip(COUNTS, row, strict=True)) for row in steps[list(COUNTS)].tolist()]
        assert got == [{name: step[name] for name in COUNTS} for step in twins]
        for name in ("start", "end"):
            np.testing.assert_allclose(steps[name], [step[name] for step in twins], **close)
    if record.drafted is not None and not twin.faults:
        accepted = [twin.accepted[n] for n in range(len(record.drafted) - 1)]
        assert record.drafted[:-1].tolist() == accepted
    requests = twin.requests[: twin.arrived]
    assert record.outcomes() == [r.outcome for r in requests]
    for name in NUMBERS:
        assert record.requests[name].tolist() == [getattr(r, name) for r in requests], name
    done = record.completed if n_prefill == 0 else slice(None)
    for name in TIMES:
        # Co-located workers note the end of a prompt when the request ends.
        which = done if name in ("prefill_end_s", "decode_start_s") else slice(None)
        mine = np.array([getattr(r, name) for r in requests])
        np.testing.assert_allclose(record.requests[name][which], mine[which], **close, err_msg=name)
    gaps = np.array(twin.gaps).reshape(-1, 2)
    np.testing.assert_allclose(record.gaps["last_token_s"], gaps[:, 0], **close)
    np.testing.assert_allclose(record.gaps["resumed_s"], gaps[:, 1], **close)
    if "no_worker_left" in record.outcomes():
        return  # how long the last events go on which change nothing is nobody's business
    ended = twin.now if twin.open_measured == 0 else twin.time_limit_s
    np.testing.assert_allclose(record.end_s, ended, **close)


@examples(70, 1000, early=st.booleans(), **POLICIES, **RANDOM_CLUSTER)
def test_cluster_equals_its_twin(prefill, decode, **drawn):
    make, make_twin = make_pair(random_cluster(**drawn), prefill, decode)
    cluster, twin = make(), make_twin()
    assert_same(cluster.run(), twin.run())
    policies = [policy for policy in twin.policies if policy is not None]
    for router, policy in zip(cluster.routers, policies, strict=True):
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
    make, make_twin = make_pair(arguments)
    record, twin = make().run(), make_twin().run()
    assert_same(record, twin)
    prompts, hit = record.requests["prompt_len"], record.requests["cached_tokens"]
    assert record.prefill_steps["chunk_tokens"].sum() == (prompts - hit).sum()
    most = (prompts - 1) // 3 * 3
    happened = {
        "miss": np.sum(hit == 0),
        "partial": np.sum((hit > 0) & (hit < most)),
        "full": np.sum((hit > 0) & (hit == most)),
        "evicted": sum(worker.blocks.evictions for worker in twin.workers[0]),
        "preempted": record.requests["preemptions"].sum(),
    }
    assert min(happened.values()) >= 30, happened


# -- many steps a call, or one -----------------------------------------------------------------


@examples(9, 200, **POLICIES, **RANDOM_CLUSTER, cut_s=st.sampled_from([0.001, 0.02, 1 / 256]))
def test_macro_steps_equal_single_steps(prefill, decode, cut_s, **drawn):
    """However often the loop comes back to Python, the bytes are the same."""
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


@settings(max_examples=60)
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
