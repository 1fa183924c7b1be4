"""What prefill routers are told: blocks that come and go, tokens that are computed; and order."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.policies.base import Needs, RouterPolicy

from .random_clusters import cluster_of, random_cluster, random_workload, reference_of, with_engines


class Mirror(RouterPolicy):
    """Keeps the prefix caches of the workers as it is told of them, and compares."""

    name = "mirror"
    needs = Needs(blocks=True, in_order=True)

    def __init__(self, n_workers):
        self.held = [set() for _ in range(n_workers)]
        self.tokens = [0] * n_workers
        self.chosen, self.asked, self.cluster = [], [], None

    def on_blocks(self, worker, stored, evicted):
        assert not self.held[worker] & set(stored)
        self.held[worker] |= set(stored)
        assert set(evicted) <= self.held[worker]
        self.held[worker] -= set(evicted)

    def on_tokens(self, worker, tokens):
        assert tokens > 0
        self.tokens[worker] += tokens

    def select(self, request, workers):
        self.compare()
        self.asked.append(request.request_id)
        if workers.loads.min() > 1 and workers.loads.sum() % 3:
            return None
        self.chosen.append(request.request_id)
        return int(np.argmin(workers.loads))

    def compare(self):
        kv = self.cluster.arrays.engines.kv
        prefix, size = self.cluster.workload.prefix_block_tokens, self.cluster.spec.block_size
        if not prefix:
            return
        for worker, told in enumerate(self.held):
            found = set()
            for slot in kv.hash_slots[worker].tolist() if len(kv.hash_slots) else ():
                if slot == 0 or kv.blocks["run"][worker, slot - 1]:  # no block of a shared prompt
                    continue
                key = int(kv.blocks["block_hash"][worker, slot - 1])
                end = ((key & 0xFFFFFFFF) + 1) * size
                if end % prefix == 0:
                    writer = int(kv.blocks["writer"][worker, slot - 1])
                    first = kv.prefix_indptr[writer]
                    found.add(int(kv.prefix_hash[first + end // prefix - 1]))
            assert told == found


@given(
    seed=st.integers(0, 2**32),
    topology=st.sampled_from([(1, 0), (3, 0), (2, 2)]),
    prefix=st.sampled_from([0, 4, 2]),
)
def test_the_router_knows_the_prefix_caches_and_the_work_done(seed, topology, prefix):
    arguments = random_cluster(seed, topology, prefix, 0, 1, False, True, False)
    rng, spec = np.random.default_rng(seed), arguments["spec"]
    arguments["workload"] = random_workload(rng, 60, 0.003, prefix, 40, 5)
    arguments["queue_keys"] = None
    few = {"n_blocks": 24}
    arguments["spec"] = with_engines(
        spec,
        block_size=2,
        prefill=dataclasses.replace(spec.prefill, **few),
        decode=dataclasses.replace(spec.decode, **few),
        max_concurrency=None,
        load_report_delay_s=0.0,
        max_model_len=300,
    )
    arguments |= {"window": (0.0, np.inf), "time_limit_s": np.inf}
    mirror = Mirror(topology[0])
    decode = None
    if topology[1]:
        from eldr_sim.policies import registry
        from eldr_sim.policies.base import PolicyContext

        decode = registry.decode_policy("jsq", PolicyContext(topology[1], rng))
    cluster = cluster_of(
        **arguments, prefill_policy=mirror, decode_policy=decode,
        signatures=lambda ranges: (0, None),
    )  # fmt: skip
    mirror.cluster = cluster
    record = cluster.run()
    assert (record.outcomes().count("completed")) == 60
    # In order: whom it holds is asked about until it is placed, and nobody else meanwhile.
    assert mirror.chosen == list(range(60))
    assert mirror.asked == sorted(mirror.asked)
    cluster.policy_calls.hear()
    mirror.compare()
    assert sum(mirror.tokens) <= record.prefill_steps["chunk_tokens"].sum()
    done = record.requests["prompt_len"] - np.maximum(record.requests["cached_tokens"], 0)
    assert sum(mirror.tokens) == done.sum()


class Longest(RouterPolicy):
    """Holds at will, and notes whom it is asked about, and when."""

    name = "longest"
    needs = Needs(in_order=True, longest_first=True)

    def __init__(self):
        self.asked, self.taken = [], []

    def select(self, request, workers):
        self.asked.append((request.request_id, workers.now_s, tuple(self.taken)))
        if workers.loads.min() > 0 and workers.loads.sum() % 3:
            return None
        self.taken.append(request.request_id)
        return int(np.argmin(workers.loads))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_the_longest_of_those_held_is_asked_about_first(seed):
    """Against all that have arrived and are not placed, the first of equals first."""
    arguments = random_cluster(seed, (2, 0), 0, 0, 1, False, True, False)
    arguments["workload"] = random_workload(np.random.default_rng(seed), 60, 0.003, 0, 40, 5)
    arguments["queue_keys"] = None
    spec = arguments["spec"]
    arguments["spec"] = with_engines(
        spec,
        prefill=dataclasses.replace(spec.prefill, n_blocks=10_000),  # room for everybody
        max_concurrency=None,
        load_report_delay_s=0.0,
        max_model_len=300,
    )
    arguments |= {"window": (0.0, np.inf), "time_limit_s": np.inf}
    policy = Longest()
    cluster = cluster_of(
        **arguments, prefill_policy=policy, decode_policy=None, signatures=lambda ranges: (0, None)
    )
    record = cluster.run()
    assert record.outcomes().count("completed") == 60
    other = Longest()
    reference_of(
        **arguments, prefill_policy=other, decode_policy=None, signatures=lambda ranges: (0, None)
    ).run()
    assert [each[0] for each in other.asked] == [each[0] for each in policy.asked]
    arrival, length = record.requests["arrival_s"], record.requests["prompt_len"]
    held_longer = 0
    for request, now, taken in policy.asked:
        here = [r for r in range(60) if (arrival[r] < now and r not in taken) or r == request]
        assert request == max(here, key=lambda r: (length[r], -r))
        held_longer += request != min(here)
    assert held_longer  # it was not the order of arrival


class Told(RouterPolicy):
    """Notes when it is told of tokens, and when the engines had published."""

    name = "told"
    needs = Needs(blocks=True)

    def __init__(self):
        self.tokens, self.since, self.at = 0, 0, []

    def on_blocks(self, worker, stored, evicted):
        self.since += 1

    def on_tokens(self, worker, tokens):
        self.tokens += tokens
        self.since += 1

    def select(self, request, workers):
        self.at.append((workers.signals_s, self.since))
        self.since = 0
        return int(np.argmin(workers.loads))


def test_blocks_and_tokens_are_as_old_as_the_signals():
    arguments = random_cluster(7, (2, 0), 4, 0, 1, False, True, False)
    arguments["workload"] = random_workload(np.random.default_rng(7), 200, 0.002, 4, 40, 1)
    arguments |= {"window": (0.0, np.inf), "time_limit_s": np.inf, "queue_keys": None}
    arguments["spec"] = dataclasses.replace(
        arguments["spec"], signal_interval_s=0.03, max_concurrency=None, max_model_len=300
    )
    policy = Told()
    cluster = cluster_of(
        **arguments, prefill_policy=policy, decode_policy=None, signatures=lambda r: (0, None)
    )
    cluster.run()
    told = [(at, n) for at, n in policy.at if n]
    assert len(told) > 5
    assert len({at for at, _ in told}) == len(told)  # at most once a publication
    assert policy.tokens > 0
