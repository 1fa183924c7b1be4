"""Our rules of SGLang against SGLang's own scheduler, step by step.

`sglang_scheduler.py` runs the scheduler of sglang 0.5.9 on a virtual clock, without a GPU; what it
did with the cases below is recorded in ``sglang_steps.json``. ``SGLANG_PYTHON``, a Python that has
sglang and torch for CPUs, lets it do them again (``VLLM_RECORD=1`` records it).

A sequence's end is found when the step after next is planned: it rides in the next step, and holds
its place and its KV cache for so long. ``sglang_scarce_steps.json`` has loads for which KV, and
perhaps places, do not suffice, without the radix cache, ``sglang_radix_steps.json`` with it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster
from eldr_sim.simulator.setup.config.engine_rules import rules_of

from ..on_each import on_each
from .test_engine import assert_same
from .test_engines import CHUNK_STEP_S, STEP_S, TOKEN_S, one_engine, options, request
from .test_vllm_scheduler import check_recorded, with_tokens

__all__ = ["one_engine"]

_HERE = Path(__file__).parent
_N_CASES, _SEATS, _TOKENS = 64, 32, 2048
_N_WITHOUT_CACHE = 40  #: the others share prefixes, in blocks of
_SHARED = 4  #: tokens; SGLang's radix cache and ours share them token by token
_N_SCARCE = 30
_N_RADIX = 30


def case(seed):
    """Requests and settings, as the script takes them."""
    rng = np.random.default_rng([36, seed])
    n, chunk = int(rng.integers(2, 25)), int(rng.choice([24, 40, 64]))
    at = np.cumsum(rng.exponential(float(rng.choice([0.5, 2.0, 6.0])), n)) + 1e-4
    requests = [request(float(a), int(rng.integers(2, 90)), int(rng.integers(2, 40))) for a in at]
    if seed >= _N_WITHOUT_CACHE:
        for r in requests:
            n = (r["prompt"] - 1) // _SHARED
            r["path"] = np.minimum(rng.integers(3, size=n), 1).tolist()
    wanted = {"seats": _SEATS, "chunk": chunk, "tokens": _TOKENS}
    wanted |= {"recv_interval": int(rng.choice([1, 4])), "mixed": bool(rng.random() < 0.3)}
    if seed >= _N_WITHOUT_CACHE:
        wanted |= {"mixed": False, "cache": True, "block_size": _SHARED}
    costs = {"step": STEP_S, "token": TOKEN_S, "chunk_step": CHUNK_STEP_S, "riders": 1}
    return {"requests": requests, "settings": wanted, "costs": costs}


def scarce_case(seed, cache=False):
    """The same where KV, and perhaps places, do not suffice; with the radix cache most prompts
    begin as others do."""
    rng = np.random.default_rng([78 if cache else 77, seed])
    n, chunk = int(rng.integers(4, 25)), int(rng.choice([24, 40, 64]))
    at = np.cumsum(rng.exponential(float(rng.choice([0.5, 2.0, 6.0])), n)) + 1e-4
    requests = [request(float(a), int(rng.integers(2, 90)), int(rng.integers(2, 40))) for a in at]
    wanted = {"seats": int(rng.choice([4, 32])), "chunk": chunk}
    wanted |= {"tokens": int(rng.choice([160, 256, 400]))}
    wanted |= {"recv_interval": int(rng.choice([1, 4])), "mixed": False}
    if cache:
        wanted |= {"cache": True, "block_size": _SHARED, "mixed": bool(rng.random() < 0.3)}
        for r in requests:
            n = (r["prompt"] - 1) // _SHARED
            r["path"] = (rng.random(n) < rng.choice([0.05, 0.3])).astype(int).tolist()
    costs = {"step": STEP_S, "token": TOKEN_S, "chunk_step": CHUNK_STEP_S, "riders": 1}
    return {"requests": requests, "settings": wanted, "costs": costs}


def as_recorded(done):
    """Steps until the last end: begin, end, prompt tokens, sequences that decode; ends of
    requests."""
    names = ("first", "finish", "cached")
    told = {name: [r[name] for r in done["requests"]] for name in names}
    steps = [
        [s["start"], s["end"], sum(s["prompts"].values()), len(s["decodes"])]
        for s in done["steps"]
        if s["start"] < max(told["finish"])
    ]
    return {"steps": steps} | told


@pytest.fixture(scope="module")
def recorded():
    return json.loads((_HERE / "sglang_steps.json").read_text())


@on_each("seed", range(_N_CASES))
def test_our_rules_equal_sglangs_scheduler_step_by_step(one_engine, recorded, seed):
    given, theirs = case(seed), recorded[seed]
    told = options(
        scheduler_recv_interval=given["settings"]["recv_interval"],
        enable_mixed_chunk=given["settings"]["mixed"],
    )
    chunk = given["settings"]["chunk"]
    rules = rules_of("sglang", told, chunk, 1)
    shared = _SHARED if seed >= _N_WITHOUT_CACHE else 0
    record = both(one_engine, given["requests"], rules, _SEATS, chunk, _TOKENS, 1, shared)
    assert record.requests["cached_tokens"].tolist() == theirs["cached"]
    for ours, name in (("first_token_s", "first"), ("finish_s", "finish")):
        np.testing.assert_allclose(record.requests[ours], theirs[name], rtol=1e-12)
    found = as_table(record.decode_steps, told.enable_mixed_chunk)
    np.testing.assert_allclose(found, theirs["steps"], rtol=1e-12)


def both(one_engine, *given):
    """Return the record of a load, which is the same on both backends."""
    record = one_engine(*given)
    assert_same(record, one_engine(*given, backend=ReferenceCluster))
    return record


def as_table(steps, mixed=False):
    """The columns of `as_recorded`; where prompts are computed alone, all tokens are of theirs,
    one of which may have been lost by a retraction."""
    alone = (steps["joined"] > 0) & (steps["sequences"] == steps["joined"]) & (not mixed)
    joined = np.where(alone, steps["tokens"], steps["joined"])
    prompts, decoding = steps["chunk_tokens"] + joined, steps["tokens"] - joined
    return np.column_stack([steps["start"], steps["end"], prompts, decoding])


@on_each("seed", range(_N_SCARCE))
def test_our_rules_equal_sglangs_scheduler_where_kv_is_scarce(one_engine, seed):
    theirs = json.loads((_HERE / "sglang_scarce_steps.json").read_text())[seed]
    record, _ = as_ours(one_engine, scarce_case(seed))
    np.testing.assert_allclose(as_table(record.decode_steps), theirs, rtol=1e-9)


@on_each("seed", range(_N_RADIX))
def test_whole_leaves_are_evicted_in_the_order_of_their_last_use(one_engine, seed):
    theirs = json.loads((_HERE / "sglang_radix_steps.json").read_text())[seed]
    record, mixed = as_ours(one_engine, scarce_case(seed, cache=True))
    np.testing.assert_allclose(as_table(record.decode_steps, mixed), theirs["steps"], rtol=1e-9)
    assert record.requests["cached_tokens"].tolist() == theirs["cached"]


def as_ours(one_engine, given):
    """Return the record of a case where KV is scarce, on both backends, and if steps are mixed."""
    wanted = given["settings"]
    told = options(
        scheduler_recv_interval=wanted["recv_interval"], enable_mixed_chunk=wanted["mixed"]
    )
    rules = rules_of("sglang", told, wanted["chunk"], 1)
    sizes = wanted["seats"], wanted["chunk"], wanted["tokens"], 1
    shared = _SHARED if "cache" in wanted else 0
    return both(one_engine, given["requests"], rules, *sizes, shared), wanted["mixed"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_loads_are_the_same_on_both_backends(one_engine, data):
    """Where KV and places are so scarce that many are retracted, of which no record has enough,
    with and without a radix cache, of blocks of several tokens, too."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, conservative = int(rng.integers(1, 25)), data.draw(st.sampled_from([0.1, 0.3, 1.0]))
    at = np.cumsum(rng.exponential(float(rng.choice([0.5, 2.0, 6.0])), n)) + 1e-4
    requests = [request(float(a), int(rng.integers(2, 60)), int(rng.integers(2, 40))) for a in at]
    shared, size = data.draw(st.sampled_from([0, 4, 5])), data.draw(st.sampled_from([1, 1, 4]))
    for r in requests if shared else ():
        r["path"] = (rng.random((r["prompt"] - 1) // shared) < rng.choice([0.05, 0.3])).tolist()
    most = max(-(-(r["prompt"] + r["output"]) // size) for r in requests)
    seats, chunk = int(rng.integers(1, 9)), int(rng.choice([24, 40, 64]))
    blocks = most + 2 + int(rng.choice([0, 3, 10, 60, 500]))
    told = options(
        scheduler_recv_interval=int(rng.choice([1, 4])), schedule_conservativeness=conservative,
        enable_mixed_chunk=data.draw(st.booleans()),
    )  # fmt: skip
    both(
        one_engine, requests, rules_of("sglang", told, chunk, 1), seats, chunk, blocks, size, shared
    )


def test_the_cases_hold_what_may_differ(recorded):
    """Chunks, steps that prompts keep others out of, and polls that let requests wait."""
    kinds = [case(seed)["settings"] for seed in range(_N_CASES)]
    assert {kind["recv_interval"] for kind in kinds} == {1, 4}
    assert {kind["mixed"] for kind in kinds} == {True, False}
    assert sum(sum(each["cached"]) for each in recorded) > 500
    longest = [max(step[2] for step in each["steps"]) for each in recorded]
    assert sum(n == kind["chunk"] for n, kind in zip(longest, kinds, strict=True)) > 10


needs_sglang = pytest.mark.skipif(
    "SGLANG_PYTHON" not in os.environ, reason="SGLANG_PYTHON names no Python that has sglang"
)


def as_sglang_does(cases, script="sglang_scheduler.py"):
    """Return what SGLang's own scheduler does with cases."""
    command = [os.environ["SGLANG_PYTHON"], str(_HERE / script)]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@needs_sglang
def test_sglang_does_what_was_recorded(recorded):
    cases = [with_tokens(case(seed)) for seed in range(_N_WITHOUT_CACHE, _N_CASES)]
    cases = [case(seed) for seed in range(_N_WITHOUT_CACHE)] + cases
    check_recorded("sglang_steps.json", list(map(as_recorded, as_sglang_does(cases))))


@needs_sglang
def test_sglang_does_what_was_recorded_where_kv_is_scarce():
    done = as_sglang_does([scarce_case(seed) for seed in range(_N_SCARCE)])
    steps = [as_recorded(each)["steps"] for each in done]
    check_recorded("sglang_scarce_steps.json", steps)
    cases = [with_tokens(scarce_case(seed, cache=True)) for seed in range(_N_RADIX)]
    told = [as_recorded(each) for each in as_sglang_does(cases)]
    kept = [{name: each[name] for name in ("steps", "cached")} for each in told]
    check_recorded("sglang_radix_steps.json", kept)
