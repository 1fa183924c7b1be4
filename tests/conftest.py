"""Small synthetic models, workloads and clusters, so that the simulator is tested without tables.

The fixtures are factories of session scope: hypothesis may call them many times within a test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from eldr_sim.cli.main import main
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.simulator.cluster import Cluster, ClusterSpec
from eldr_sim.simulator.replay import Replay
from eldr_sim.simulator.transfer import TransferModel
from eldr_sim.traces.workload import Workload

# The same examples on every run and every machine, however slow; look for new ones with
# ``pytest --hypothesis-profile explore``.
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile("default")

#: A transfer that takes no time: set-up and posting cost nothing, the link is never a limit.
FREE_TRANSFER = TransferModel(0.0, 0.0, 1e30, "test")


@dataclass
class FakeStepTime:
    """What the simulator reads of a ``StepTimeModel``; every entry is set by the test."""

    moe_s: np.ndarray
    fixed_s: np.ndarray
    attention_s: np.ndarray
    context_stride: int
    n_moe_layers: int
    n_experts: int
    prefill_s: Callable[[list[int], list[int]], float]
    mixed_moe_s: np.ndarray
    mixed_extra_s: Callable[[int, list[int], list[int]], float] = lambda batch, tokens, contexts: (
        1e-5 * batch + 1e-4 * sum(tokens) + 1e-6 * sum(contexts)
    )
    moe_batch_max: int = 1 << 30
    attention_batch_max: int = 1 << 30
    context_max: int = 1 << 30
    provenance: dict[str, Any] = field(default_factory=dict)
    label: str = "measured"


@pytest.fixture(scope="session")
def make_step_time():
    """Step times: all random, or ``constant`` seconds a decode step whatever its batch."""

    def make(
        max_num_seqs=8,
        n_layers=2,
        n_experts=70,
        *,
        seed=0,
        constant=None,
        prefill_s=lambda tokens, contexts: 1e-3 + 1e-4 * sum(tokens) + 1e-6 * sum(contexts),
        stride=16,
        knots=8,
    ):
        rng = np.random.default_rng(seed)
        shape = max_num_seqs + 1, n_experts + 1
        if constant is None:
            moe = np.cumsum(rng.random(shape), 1) * 1e-5
            fixed = rng.random(shape[0]) * 1e-3 + 1e-4
            attention = np.cumsum(rng.random((shape[0], knots)), 1) * 1e-5
        else:
            moe, fixed = np.zeros(shape), np.full(shape[0], constant)
            attention = np.zeros((shape[0], knots))
        mixed = np.cumsum(rng.random((129, n_experts + 1)), 1) * 1e-5
        return FakeStepTime(moe, fixed, attention, stride, n_layers, n_experts, prefill_s, mixed)

    return make


@pytest.fixture(scope="session")
def make_workload():
    """A workload of given arrivals and lengths over ``windows`` trace requests."""

    def make(arrival_s, prompt_len, output_len, *, windows=5, seed=0):
        n = len(arrival_s)
        rng = np.random.default_rng(seed)
        which = rng.integers(windows, size=n).astype(np.int32)
        return Workload(
            arrival_s=np.asarray(arrival_s, float),
            prompt_len=np.broadcast_to(prompt_len, n).astype(np.int32),
            output_len=np.broadcast_to(output_len, n).astype(np.int32),
            trace_request=which,
            decode_request=which,
            replay_offset=rng.integers(3, size=n).astype(np.int32),
            domain=np.zeros(n, np.int16),
            session=np.arange(n, dtype=np.int32),
            prefix_hash=np.empty(0, np.uint64),
            prefix_indptr=np.zeros(n + 1, np.int64),
            prefix_trace_request=np.empty(0, np.int32),
            prefix_block_tokens=0,
            description={},
        )

    return make


@pytest.fixture(scope="session")
def make_cluster(make_step_time):
    """A cluster over a workload; every engine setting can be given."""

    def make(
        workload,
        *,
        step_time=None,
        n_prefill=1,
        n_decode=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1 << 20,
        block_size=4,
        n_blocks=1 << 20,
        transfer=FREE_TRANSFER,
        load_report_delay_s=0.0,
        async_scheduling=False,
        max_concurrency=None,
        decode_policy="jsq",
        prefill_policy="least_loaded",
        window=(0.0, np.inf),
        time_limit_s=np.inf,
        kv_bytes_per_token=1,
        seed=0,
    ):
        if step_time is None:
            step_time = make_step_time(max_num_seqs, seed=seed)
        rng = np.random.default_rng([seed, 1])
        windows = int(workload.trace_request.max(initial=0)) + 1
        length = rng.integers(3, 9, size=windows)
        first = np.cumsum(length) - length
        words = -(-step_time.n_experts // 64)
        shape = int(length.sum()), step_time.n_moe_layers * words
        bits = np.zeros(shape, np.uint64)
        for row in bits.reshape(-1, words):  # three experts a layer
            for expert in rng.choice(step_time.n_experts, 3, replace=False):
                row[expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
        spec = ClusterSpec(
            n_prefill=n_prefill,
            n_decode=n_decode,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            n_blocks=n_blocks,
            transfer=transfer,
            load_report_delay_s=load_report_delay_s,
            async_scheduling=async_scheduling,
            max_concurrency=max_concurrency,
        )
        counts = {q: np.zeros((1, 1), np.int64) for q in range(windows)}
        model = SimpleNamespace(n_layers=1, attention="gqa", kv_bytes_per_token=kv_bytes_per_token)
        return Cluster(
            spec,
            model,
            step_time,
            workload,
            Replay(bits, first, length),
            lambda ranges: (ranges[0][0], counts[ranges[0][0]]),
            registry.prefill_policy(
                prefill_policy, PolicyContext(n_prefill, np.random.default_rng([seed, 2]))
            ),
            registry.decode_policy(
                decode_policy, PolicyContext(n_decode, np.random.default_rng([seed, 3]))
            ),
            window,
            time_limit_s,
        )

    return make


@pytest.fixture(scope="session")
def run_to_rest():
    """Run a cluster and then its leftovers: requests not measured, load reports on their way."""

    def run(cluster, max_events=200_000):
        env = cluster.env
        step, events = env.step, 0

        def counted():
            nonlocal events
            events += 1
            assert events <= max_events, f"no end in sight at {env.now} s"
            step()

        env.step = counted
        record = cluster.run()
        while env.peek() < np.inf or cluster.pool.next_start < np.inf:
            if env.peek() > cluster.pool.next_start:
                cluster.pool.advance(env.peek())
            if env.peek() < np.inf:
                env.step()
        return record

    return run


@pytest.fixture
def run_cli(capsys, monkeypatch):
    """Run the command line in this process; returns exit code, standard output and error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["eldr-sim", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
