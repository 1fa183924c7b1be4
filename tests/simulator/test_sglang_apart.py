"""Our rules of SGLang's workers that hand KV caches over against SGLang's own, step by step.

`sglang_apart.py` runs the loops of ``disaggregation/prefill.py`` and ``decode.py`` of sglang 0.5.9
on a virtual clock; ``sglang_prefill_steps.json`` and ``sglang_decode_steps.json`` have what they
did, with KV that suffices or does not, with and without the radix cache, and with transfers that
take longer than a step or no time. ``SGLANG_PYTHON`` lets them do so again (``VLLM_RECORD=1``
records it). Of decode workers only the scheduler of `sglang_decoder` has the rules so far.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.engine_rules import rules_of
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.transfer import TransferModel

from ..on_each import on_each
from .sglang_decoder import SglangDecoder
from .test_engine_by_hand import by_hand
from .test_engines import CHUNK_STEP_S, STEP_S, TOKEN_S, options, request
from .test_sglang_scheduler import as_sglang_does, needs_sglang
from .test_vllm_scheduler import check_recorded, with_paths, with_tokens

_PREFILL = Path(__file__).parent / "sglang_prefill_steps.json"
_DECODE = Path(__file__).parent / "sglang_decode_steps.json"
_SLOWER = 1.0003  #: prompts, so that no KV cache comes just as a step ends
_N_LOADS = 48
_SHARED = 4


def prompts(seed):
    """Prompts, and the settings of a prefill worker, as the script takes them: every other load has
    scarce KV, every other two share prefixes, and two of three have transfers that take time."""
    rng, scarce, cache = np.random.default_rng([91, seed]), seed % 2, seed // 2 % 2
    n, chunk = int(rng.integers(4, 30)), int(rng.choice([24, 40, 64]))
    at = np.cumsum(rng.exponential(float(rng.choice([0.5, 2.0, 4.0])), n)) + 1e-4
    requests = [request(float(a), int(rng.integers(2, 90)), 1) for a in at]
    wanted = {"worker": "prefill", "seats": int(rng.choice([4, 32])), "chunk": chunk}
    wanted |= {"tokens": int(rng.choice([100, 160, 256])) if scarce else 4096}
    wanted |= {"recv_interval": int(rng.choice([1, 4])), "mixed": False}
    if cache:
        wanted |= {"cache": True, "block_size": _SHARED}
        for r in requests:
            share = rng.choice([0.05, 0.3])
            r["path"] = (rng.random((r["prompt"] - 1) // _SHARED) < share).astype(int).tolist()
    costs = {"token": TOKEN_S, "chunk_step": CHUNK_STEP_S}
    costs["transfer"] = float([0.0, 0.37, 3.1][seed % 3])
    return {"requests": requests, "settings": wanted, "costs": costs}


@pytest.fixture(scope="module")
def recorded():
    return json.loads(_PREFILL.read_text())


@on_each("seed", range(_N_LOADS))
def test_prefill_workers_equal_sglangs_loop(make_cluster, make_workload, recorded, seed):
    given, theirs = prompts(seed), recorded[seed]
    record = ours(make_cluster, make_workload, given).run()
    steps = record.prefill_steps
    found = np.column_stack([steps[name] for name in ("start", "end", "chunk_tokens", "chunks")])
    np.testing.assert_allclose(found, theirs["steps"], rtol=1e-9)
    assert record.requests["cached_tokens"].tolist() == theirs["cached"]


def test_sglangs_decode_workers_cache_no_prefixes(make_cluster, make_workload):
    """vLLM's find the prompt that came before; SGLang forces a cache without prefixes."""
    twice = [request(at, 21, 2) | {"path": [1] * 5} for at in (0.1, 50.1)]
    workload = with_paths(make_workload([0.1, 50.1], [21, 21], [2, 2]), twice, _SHARED)
    found = {}
    for engine in ("vllm", "sglang"):
        told = {"rules": rules_of(engine, options(), 64, 1)}
        cluster = make_cluster(workload, prefill=told, decode=told, block_size=1)
        found[engine] = cluster.run().requests["decode_cached_tokens"].tolist()
    assert found == {"vllm": [0, 20], "sglang": [0, 0]}


def ours(make_cluster, make_workload, given):
    """Return a prefill worker, and where a transfer takes time, decode workers for each request."""
    wanted, requests = given["settings"], given["requests"]
    told = options(scheduler_recv_interval=wanted["recv_interval"])
    columns = ([r[name] for r in requests] for name in ("at", "prompt", "output"))
    shared, transfer = wanted.get("cache", False), given["costs"]["transfer"]
    engine = {
        "step_time": by_hand(STEP_S, TOKEN_S, CHUNK_STEP_S, seqs=wanted["seats"]),
        "max_num_seqs": wanted["seats"], "max_num_batched_tokens": wanted["chunk"],
        "rules": rules_of("sglang", told, wanted["chunk"], 1),
    }  # fmt: skip
    return make_cluster(
        with_paths(make_workload(*columns), requests, _SHARED * shared),
        n_decode=len(requests) if transfer else 0,
        prefill=engine | {"n_blocks": wanted["tokens"]},
        decode=engine,
        transfer=TransferModel(transfer, transfer / 1000, 1e30, "test"),
        block_size=1,
        n_kv_tensors=1,
        async_scheduling=True,
        enable_prefix_caching=shared,
        prompts=False,
    )  # fmt: skip


def outputs(seed):
    """Requests, and the settings of a decode worker: every other load has scarce KV."""
    rng, scarce = np.random.default_rng([92, seed]), seed % 2
    n = int(rng.integers(4, 25))
    at = np.cumsum(rng.exponential(float(rng.choice([0.5, 2.0, 6.0])), n)) + 1e-4
    requests = [request(float(a), int(rng.integers(2, 90)), int(rng.integers(1, 40))) for a in at]
    wanted = {"worker": "decode", "chunk": 300, "mixed": False}
    wanted |= {"seats": int(rng.choice([4, 33])) if scarce else 33}
    wanted |= {"tokens": int(rng.choice([160, 256, 400])) if scarce else 1 << 15}
    wanted |= {"recv_interval": int(rng.choice([1, 4]))}
    wanted |= {"reserved": int(rng.choice([2, 16])) if scarce else 512}
    costs = {"step": STEP_S, "token": _SLOWER * TOKEN_S, "chunk_step": _SLOWER * CHUNK_STEP_S}
    return {"requests": requests, "settings": wanted, "costs": costs | {"riders": 1}}


@on_each("seed", range(_N_LOADS))
def test_the_readable_decode_worker_equals_sglangs_loop(make_cluster, make_workload, seed):
    """A prefill worker for each request; so KV caches come as long after there is room for them."""
    given, theirs = outputs(seed), json.loads(_DECODE.read_text())[seed]
    wanted, requests, costs = given["settings"], given["requests"], given["costs"]
    told = options(scheduler_recv_interval=wanted["recv_interval"])
    columns = ([r[name] for r in requests] for name in ("at", "prompt", "output"))
    engine = {"max_num_seqs": wanted["seats"], "max_num_batched_tokens": wanted["chunk"]}
    engine["rules"] = rules_of("sglang", told, wanted["chunk"], 1)
    prompt = by_hand(STEP_S, costs["token"], costs["chunk_step"], seqs=wanted["seats"])
    cluster = make_cluster(
        make_workload(*columns), n_prefill=len(requests),
        prefill=engine | {"step_time": prompt, "n_blocks": 200},
        decode=engine | {"step_time": by_hand(STEP_S, seqs=wanted["seats"]),
                         "n_blocks": wanted["tokens"]},
        block_size=1, async_scheduling=True, enable_prefix_caching=False, prompts=False,
        reserves_early=True,
    )  # fmt: skip
    worker = type("Worker", (SglangDecoder,), {"reserved_tokens": wanted["reserved"]})
    record = ReferenceCluster(cluster.inputs, workers={"decode": worker}).run()
    steps = record.decode_steps
    found = np.column_stack([steps[name] for name in ("start", "end", "tokens")])
    np.testing.assert_allclose(found[: len(theirs["steps"])], theirs["steps"], rtol=1e-9)
    np.testing.assert_allclose(record.requests["first_token_s"], theirs["first"], rtol=1e-9)
    np.testing.assert_allclose(record.requests["finish_s"], theirs["finish"], rtol=1e-9)
    assert record.requests["preemptions"].tolist() == theirs["retracted"]


def as_decoded(done):
    """Steps until the last end, begin, end and sequences, and what happened to requests."""
    told = {name: [r[name] for r in done["requests"]] for name in ("first", "finish", "retracted")}
    steps = [
        [s["start"], s["end"], len(s["decodes"])]
        for s in done["steps"]
        if s["start"] < max(told["finish"])
    ]
    return {"steps": steps} | told


def as_recorded(done):
    """Steps, begin, end, prompt tokens and prompts, and cached tokens of requests."""
    steps = [
        [s["start"], s["end"], sum(s["prompts"].values()), len(s["prompts"])] for s in done["steps"]
    ]
    return {"steps": steps, "cached": [r["cached"] for r in done["requests"]]}


def as_theirs(cases):
    """Return what SGLang's loops do with cases."""
    given = [with_tokens(case) if "cache" in case["settings"] else case for case in cases]
    return as_sglang_does(given, "sglang_apart.py")


@needs_sglang
def test_sglang_does_what_was_recorded_of_prefill_workers():
    done = as_theirs([prompts(seed) for seed in range(_N_LOADS)])
    check_recorded(_PREFILL.name, list(map(as_recorded, done)))


@needs_sglang
def test_sglang_does_what_was_recorded_of_decode_workers():
    done = as_theirs([outputs(seed) for seed in range(_N_LOADS)])
    check_recorded(_DECODE.name, list(map(as_decoded, done)))


def test_a_fetched_context_is_free_where_only_others_of_its_group_step():
    """Three places, which wait for their KV caches to be fetched: no run stalls."""
    config = make_config({
        "trace": "reference-moe", "num_requests": 24, "output_len": 6, "request_rate": 2000,
        "max_num_seqs": 3, "topology": "1P2D", "data_parallel_size": 2, "engine": "sglang",
        "enable_expert_parallel": True, "policy": "jsq", "frontend": "none",
        "prefill": {"tensor_parallel_size": 2},
    })  # fmt: skip
    assert simulate(config).summary["completed"] == 24
