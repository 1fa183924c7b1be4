"""Runs with a prefix cache: nothing is lost, signatures stay whole, prefills get shorter."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from eldr_sim.cli.main import cli
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.policies.base import Needs, RouterPolicy
from eldr_sim.simulator.run import build_cluster, offered_load, prepare, simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.transfer import PRESETS
from eldr_sim.traces.prompts import count_experts
from eldr_sim.traces.routing.format import open_trace

from ..paths import SHARED
from ..workloads import make_workload as workload_of

BASE = {"topology": "2P4D", "duration": 10, "warmup": 3, "output_len": 64, "request_rate": 40}
MOONCAKE = SHARED / "data" / "requests" / "mooncake_conversation.jsonl"


#: One domain's 157 requests come back within a run; the trace's 626 of the workload hardly do.
REPEATING = {"prompts": "shared", "domain_mix": {"math": 1}}


def run(**values):
    return simulate(make_config(BASE | values))


@pytest.mark.parametrize("prefill_policy", ["round_robin", "prefix_hash"])
@pytest.mark.parametrize("caching", [True, False])
def test_blocks_are_all_free_at_the_end(
    make_workload, make_cluster, run_to_rest, prefill_policy, caching
):
    """Few blocks, much sharing: hits, evictions and prompts that wait for blocks."""
    rng = np.random.default_rng(3)
    n, blocks_each = 300, 3
    which = rng.integers(9, size=n)
    path = np.stack([np.zeros(n), 1 + which % 3, 4 + which], 1).astype(np.uint64)
    workload = dataclasses.replace(
        make_workload(np.sort(rng.random(n)), 24 + rng.integers(4, size=n), 3),
        prefix_hash=path.ravel(),
        prefix_indptr=np.arange(n + 1) * blocks_each,
        prefix_text=path.ravel().astype(np.int32) % 5,
        prefix_block_tokens=8,
    )
    cluster = make_cluster(
        workload, n_prefill=2, n_decode=2, n_blocks=25, prefill_policy=prefill_policy,
        enable_prefix_caching=caching,
    )  # fmt: skip
    record = run_to_rest(cluster)
    assert record.outcomes() == ["completed"] * n
    engines = cluster.arrays.engines
    assert (engines.workers["n_blank"] + engines.workers["n_idle"] == 25).all()
    assert (engines.kv.blocks["n_held"] == 0).all()
    assert (engines.workers["n_idle"] > 0).tolist() == [caching] * 4
    # A hash in the index stands for one block and its copies: with the runs of full blocks that
    # are not shared they are those with contents.
    for w in range(len(engines.kv.hash_slots)):
        chain = engines.kv.hash_slots[w][engines.kv.hash_slots[w] > 0] - 1
        known = []
        while len(chain):
            known += chain.tolist()
            chain = engines.kv.blocks["copy"][w, chain]
            chain = chain[chain >= 0]
        runs = engines.kv.blocks["run"][w, known]
        assert len(set(known)) == len(known)
        assert np.maximum(runs, 1).sum() == engines.workers["n_idle"][w]
    cached = record.requests["cached_tokens"]
    assert (cached.sum() > 0) == caching
    not_fetched = record.requests["decode_cached_tokens"]
    assert (not_fetched.sum() > 0) == caching
    computed = record.prefill_steps["chunk_tokens"].sum()
    assert computed == workload.prompt_len.sum() - cached.sum()


def test_an_answer_that_nobody_goes_on_with_is_found_by_nobody(
    make_workload, make_cluster, run_to_rest
):
    """Equal prompts that end within a prefix block share that block, not their answers."""
    n, prompt, output = 6, 10, 20
    workload = dataclasses.replace(
        make_workload(np.zeros(n), np.full(n, prompt), output),
        prefix_hash=np.full(n, 7, np.uint64),
        prefix_indptr=np.arange(n + 1),
        prefix_text=np.zeros(n, np.int32),
        prefix_block_tokens=32,
    )
    cluster = make_cluster(workload, n_prefill=0, n_decode=1, block_size=2, n_blocks=40)
    record = run_to_rest(cluster)
    assert record.requests["preemptions"].sum() > 0
    kv = cluster.arrays.engines.kv
    blocks = kv.blocks[kv.blocks["run"] == 0]
    written = blocks["block_hash"][blocks["block_hash"] != 0]
    assert (written & 0xFFFFFFFF).max() == prompt // 2 - 1


def test_routers_see_cold_signatures():
    """Every signature handed over in a run, hits included, is that of a prefill from nothing."""
    config = make_config(BASE | REPEATING | {"policy": "eldr", "block_size": 7})
    setting = prepare(config)
    workload, window = offered_load(config, setting.trace)
    cluster = build_cluster(config, setting, workload, window)
    policy, hits = cluster.routers[1].policy, []
    select = policy.select

    def checked(info, workers):
        request = cluster.requests[info.request_id]
        expected = setting.trace.prompt_counts([request["trace_request"]])[0]
        np.testing.assert_array_equal(info.signature, expected)
        hits.append(request["cached_tokens"] > 0)
        return select(info, workers)

    policy.select = checked
    record = cluster.run()
    assert len(hits) == (record.requests["decode_worker"] >= 0).sum()
    assert 0.2 < np.mean(hits) < 1.0


def test_caching_shortens_prefills_and_leaves_decoding_alone():
    """ELDR Fig. 17: the cache collapses TTFT for every router and does not change TPOT."""
    for policy in ("round_robin", "eldr"):
        on, off = (
            run(
                **REPEATING,
                policy=policy,
                enable_prefix_caching=caching,
                workload="task",
                # Prefill is made scarce: at most one prompt a step.
                max_num_batched_tokens=64,
                max_num_seqs=64,
            )
            for caching in (True, False)
        )
        assert on.summary["mean_ttft_ms"] < 0.8 * off.summary["mean_ttft_ms"]
        assert on.summary["median_tpot_ms"] == pytest.approx(
            off.summary["median_tpot_ms"], rel=0.05
        )
        assert on.summary["prefix_cache_hit_rate"] > 0.5
        assert off.summary["prefix_cache_hit_rate"] is None
        assert off.summary["prefix_cache_queries"] == off.summary["prefix_cache_hits"] == 0


def test_figures_of_the_cache():
    result = run(**REPEATING, num_requests=300, warmup=0, duration=1)
    requests, steps = result.requests.to_pandas(), result.steps.to_pandas()
    assert (requests.cached_tokens < requests.prompt_len).all()
    assert (requests.cached_tokens % 16 == 0).all()
    summary = result.summary
    assert summary["prefix_cache_queries"] == requests.prompt_len.sum()
    assert summary["prefix_cache_hits"] == requests.cached_tokens.sum() > 0
    assert summary["prefix_cache_hit_rate"] == pytest.approx(
        requests.cached_tokens.sum() / requests.prompt_len.sum()
    )
    computed = steps[steps.role == "prefill"].tokens.sum()
    assert computed == (requests.prompt_len - requests.cached_tokens).sum()


def test_unique_prompts_find_nothing():
    on, off = (run(enable_prefix_caching=caching) for caching in (True, False))
    assert on.summary["prefix_cache_hits"] == 0
    assert on.requests.equals(off.requests)
    assert on.steps.equals(off.steps)


def test_flags_of_the_command_line(tmp_path):
    for flag, expected in (("--enable-", True), ("--no-enable-", False)):
        out = tmp_path / flag.strip("-")
        options = "--topology 1P1D --num-requests 3 --output-len 4 --prompts shared"
        done = CliRunner().invoke(
            cli, ["run", *options.split(), f"{flag}prefix-caching", "--out", str(out)]
        )
        assert done.exit_code == 0, done.output
        config = json.loads((out / "config.json").read_text())["config"]
        assert config["enable_prefix_caching"] is expected
        assert config["prompts"] == "shared"
    assert make_config({}).engine.enable_prefix_caching


# --- a recorded log ---------------------------------------------------------------------------


def endless_hits(n, block_size=16):
    """Prompt and hit tokens of Mooncake's first requests in an endless cache, from the file."""
    seen, hits = set(), []
    for line in MOONCAKE.read_text().splitlines()[:n]:
        record = json.loads(line)
        length, ids = record["input_length"], record["hash_ids"]
        # Mooncake's ids stand for all tokens up to a block's end.
        keys = [(ids[k * block_size // 512], k) for k in range(length // block_size)]
        found = 0
        while found < (length - 1) // block_size and keys[found] in seen:
            found += 1
        hits.append(found * block_size)
        seen.update(keys)
    return np.array(hits)


class Reader(RouterPolicy):
    """Sends all to the first worker; sees signatures."""

    name = "reader"
    needs = Needs(signature="count")

    def __init__(self):
        pass

    def select(self, request, workers):
        return 0


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the recorded request log is not here")
def test_an_endless_cache_finds_what_mooncake_shares(make_cluster, make_step_time):
    """One request after the other, each alone on the worker."""
    n = 700
    trace = open_trace()
    logged = workload_of(trace, workload=MOONCAKE, num_requests=n)
    workload = dataclasses.replace(
        logged, arrival_s=10.0 * np.arange(n), output_len=np.ones(n, np.int32)
    )
    longest = int(workload.prompt_len.max())
    step_time = make_step_time(
        n_layers=1, n_experts=8, constant=1.0, prefill=(1.0, 0.0), max_tokens=longest,
        max_context=longest + 1,
    )  # fmt: skip

    def hits(n_blocks):
        seen = []

        def signatures(ranges):
            i = len(seen)
            if i % 50 == 0:
                cold = count_experts(trace, workload.prompt_ranges(i))
                np.testing.assert_array_equal(count_experts(trace, ranges), cold)
            seen.append(i)
            return i, None

        cluster = make_cluster(
            workload, step_time=step_time, block_size=16, n_blocks=n_blocks,
            max_num_batched_tokens=longest, decode_policy=Reader(), signatures=signatures,
        )  # fmt: skip
        record = cluster.run()
        assert record.completed.all()
        assert len(seen) == n
        return record.requests["cached_tokens"]

    expected = endless_hits(n)
    assert hits(int((workload.prompt_len // 16 + 1).sum())).tolist() == expected.tolist()
    small = hits(10_000)
    assert 0 < small.sum() < expected.sum()
    assert (small <= expected).all()


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the recorded request log is not here")
def test_a_cluster_finds_no_more_than_an_endless_cache():
    n = 300
    values = {"workload": str(MOONCAKE), "topology": "2P4D", "gpu": "H200", "output_len": 8}
    # Balanced clustering of the thousand calibration requests of a log takes seconds.
    values |= {"num_requests": n, "policy": "eldr:clustering=vanilla"}
    result = simulate(make_config(values))
    requests = result.requests.to_pandas()
    served = requests[requests.outcome == "completed"]
    bound = endless_hits(n)[served.request_id]
    assert 0 < served.cached_tokens.sum() <= bound.sum()
    assert (served.cached_tokens <= bound).all()
    with_blocks = result.summary["trace"]
    assert with_blocks["prefix_blocks_seen_before_share"] > 0


def test_blocks_that_a_decode_worker_has_are_not_fetched():
    """Requests one at a time: set-up, then descriptors and bytes of the blocks it has not."""
    result = run(
        topology="1P1D", num_requests=12, output_len=2, request_rate=1, prefix_len=320,
        num_prefixes=2, kv_transfer="observed",
    )  # fmt: skip
    requests = result.requests.to_pandas()
    model, link = load_model("Qwen3-30B-A3B"), PRESETS["observed"]
    blocks = np.ceil((requests.prompt_len - requests.decode_cached_tokens) / 16)
    n_bytes = blocks * 16 * model.n_layers * 2 * model.n_kv_heads * model.head_dim * 2
    posting = blocks * 2 * model.n_layers * link.descriptor_s
    took = requests.transfer_end_s - requests.transfer_start_s
    np.testing.assert_allclose(took, link.setup_s + posting + n_bytes / link.bandwidth)
    assert requests.decode_cached_tokens.nunique() > 1
