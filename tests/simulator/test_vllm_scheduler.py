"""Our engine against vLLM's own scheduler, step by step, on random loads.

`vllm_scheduler.py` runs the scheduler and KV manager of vLLM 0.32 on a virtual clock. What it did
with 92 loads is recorded in ``vllm_steps.json``. ``VLLM_PYTHON``, a Python that has vLLM
(docs/capture.md, "vLLM on a CPU"), lets it do these again, and ``VLLM_LOADS`` more (2,000).
``vllm_steps_old.json`` holds loads of older versions with rules that have changed since;
``VLLM_PYTHONS`` (``0.30=PYTHON 0.24=PYTHON``) has these, and compares any other version.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.kernel_profiles.acceptance import Acceptance
from eldr_sim.kernel_profiles.steps.drafts import Draft
from eldr_sim.simulator.setup.config.engine_rules import rules_of
from eldr_sim.simulator.setup.config.groups import SchedulerConfig
from eldr_sim.simulator.setup.config.speculative import SpeculativeConfig
from eldr_sim.simulator.setup.memory import WindowBlocks
from eldr_sim.simulator.setup.speculation import Speculation
from eldr_sim.simulator.setup.transfer import TransferModel
from eldr_sim.traces.requests.logs.log_columns import chain_blocks

from ..on_each import on_each
from .test_engine_by_hand import by_hand

_HERE = Path(__file__).parent
_COSTS = {"step": 1.0, "token": 0.03125}
_LONGEST = 4096
#: Rules, and the settings of loads that put them to work.
FEATURES = {
    "chunked prefill": {},
    "prefix caching": {"shared": True},
    "preemption": {"tight": True},
    "preemption, prefix caching": {"tight": True, "shared": True},
    "preemption without prefix caching": {"tight": True, "prefix_caching": False},
    "prompts of whole blocks": {"shared": True, "whole": True},
    "asynchronous scheduling": {"async": True},
    "asynchronous scheduling, prefix caching": {"async": True, "shared": True},
    "asynchronous scheduling, all seats taken": {"async": True, "few_seats": True},
    "asynchronous scheduling, preemption": {"async": True, "tight": True, "shared": True},
    "long_prefill_token_threshold": {"threshold": True, "shared": True},
    "priorities": {"priority": True, "shared": True},
    "speculative decoding": {"drafts": True},
    "speculative decoding, prefix caching": {"drafts": True, "shared": True},
    "speculative decoding, asynchronous": {"drafts": True, "async": True},
    "speculative decoding, preemption": {"drafts": True, "tight": True, "shared": True},
    "priorities, preemption": {"priority": True, "tight": True, "shared": True},
    "speculative decoding, asynchronous, preemption": {
        "drafts": True, "async": True, "tight": True, "shared": True,
    },
    "priorities, asynchronous, preemption": {
        "priority": True, "async": True, "tight": True, "shared": True,
    },
    "long_prefill_token_threshold, preemption": {"threshold": True, "tight": True, "shared": True},
    "long_prefill_token_threshold, asynchronous, preemption": {
        "threshold": True, "async": True, "tight": True, "shared": True,
    },
    "priorities, speculative decoding, preemption": {
        "priority": True, "drafts": True, "tight": True, "shared": True,
    },
    "priorities, speculative decoding, asynchronous, preemption": {
        "priority": True, "drafts": True, "async": True, "tight": True, "shared": True,
    },
    "long_prefill_token_threshold, speculative decoding": {
        "threshold": True, "drafts": True, "shared": True,
    },
    "long_prefill_token_threshold, speculative decoding, asynchronous": {
        "threshold": True, "drafts": True, "async": True, "shared": True,
    },
    "long_prefill_token_threshold, speculative decoding, preemption": {
        "threshold": True, "drafts": True, "tight": True, "shared": True,
    },
    "long_prefill_token_threshold, priorities, speculative decoding, asynchronous, preemption": {
        "threshold": True, "priority": True, "drafts": True, "async": True, "tight": True,
        "shared": True,
    },
    "states, preemption": {"states": 2, "tight": True, "prefix_caching": False},
    "states, asynchronous, preemption": {
        "states": 3, "async": True, "tight": True, "prefix_caching": False,
    },
    "states, speculative decoding, asynchronous, preemption": {
        "states": 2, "drafts": True, "async": True, "tight": True, "prefix_caching": False,
    },
    "sliding windows": {"windows": [8, 8]},
    "KV connector": {"remote": True, "shared": True},
    "KV connector, asynchronous": {"remote": True, "async": True, "shared": True},
    "KV connector, preemption": {"remote": True, "tight": True, "shared": True},
    "KV connector, asynchronous, preemption": {
        "remote": True, "async": True, "tight": True, "shared": True,
    },
    "KV connector, speculative decoding, asynchronous": {
        "remote": True, "drafts": True, "async": True, "shared": True,
    },
    "KV connector, priorities, preemption": {
        "remote": True, "priority": True, "tight": True, "shared": True,
    },
    "sliding windows, prefix caching": {"windows": [8, 8], "shared": True},
    "sliding windows, preemption without prefix caching": {
        "windows": [8, 8], "tight": True, "prefix_caching": False,
    },
    "sliding windows, asynchronous, preemption": {
        "windows": [8], "async": True, "tight": True, "shared": True,
    },
    "sliding windows, speculative decoding, asynchronous, preemption": {
        "windows": [12, 12, 12], "drafts": True, "async": True, "tight": True, "shared": True,
    },
    "sliding windows, threshold, priorities, preemption": {
        "windows": [9], "threshold": True, "priority": True, "tight": True, "shared": True,
    },
    "sliding windows, preemption": {"windows": [7, 7], "tight": True, "shared": True},
    "sliding windows, KV connector, preemption": {
        "windows": [8, 8], "remote": True, "tight": True, "shared": True,
    },
    "sliding windows kept everywhere, preemption": {
        "windows": [8, 8], "tight": True, "shared": True, "dense": True,
    },
    "sliding windows kept everywhere, asynchronous, preemption": {
        "windows": [8, 8], "async": True, "tight": True, "shared": True, "dense": True,
    },
}  # fmt: skip
_N_RECORDED = 92
#: Features with rules that a version does not share with the newest: of 0.30 the threshold, which
#: also cut the prompt of a lone request, of 0.24 placeholder drafts as well, which it did not have.
OLD = {
    "0.30": [n for n, about in FEATURES.items() if "threshold" in n and not about.get("windows")],
    "0.24": [
        name
        for name, about in FEATURES.items()
        if about.get("drafts")
        and about.get("shared")
        and not (about.get("remote") or about.get("windows"))
    ],
}


def case(feature, seed):
    """Return a random load and its settings, as the script takes them."""
    traits = FEATURES[feature]
    rng = np.random.default_rng([71, list(FEATURES).index(feature), seed])
    n, size = int(rng.integers(2, 30)), int(rng.choice([2, 4, 8]))
    budget, seats = int(rng.choice([16, 24, 48])), int(rng.integers(5, 12))
    if traits.get("few_seats"):
        seats = int(rng.integers(1, 4))
    at = np.cumsum(rng.exponential(float(rng.choice([0.5, 1.5, 4.0])), n)) + 1e-4
    requests = []
    for arrival in at.tolist():
        blocks, rest = int(rng.integers(0, 8)), int(rng.integers(1, size + 1))
        if traits.get("whole") and rng.random() < 0.7:
            blocks, rest = blocks + 1, 0
        prompt = blocks * size + rest
        r = {"at": arrival, "prompt": prompt, "output": int(rng.integers(1, 40))}
        if traits.get("shared"):  # a path in a tree of blocks, which may end before the prompt does
            shared = int(rng.integers(0, blocks + 1)) if rng.random() < 0.5 else blocks
            r["path"] = np.minimum(rng.integers(3, size=shared), 1).tolist()
        if traits.get("priority"):
            r["priority"] = int(rng.integers(3))
        requests.append(r)
    most = max(-(-(r["prompt"] + r["output"]) // size) for r in requests)
    blocks = most + int(rng.choice([0, 1, 3, 8])) if traits.get("tight") else 2000
    settings = {"block_size": size, "seats": seats, "budget": budget, "blocks": blocks,
                "max_model_len": _LONGEST}  # fmt: skip
    names = ("async", "priority", "prefix_caching", "states", "windows", "dense")
    settings |= {k: traits[k] for k in names if k in traits}
    settings["blocks"] += traits.get("states", 0)
    if traits.get("windows"):
        settings["blocks"] += sum(min(most, held_blocks(settings, w)) for w in traits["windows"])
    if traits.get("remote"):
        settings["remote"] = float(rng.choice([0.0078125, 0.75, 5.0]))
    if traits.get("threshold"):
        settings["threshold"] = int(rng.choice([3, 6, 12]))
    if traits.get("drafts"):
        k = int(rng.integers(1, 4))
        rates = np.sort(rng.choice([0.0, 0.3, 0.8, 1.0], k))[::-1].tolist()
        settings |= {"drafts": k, "lookahead": k, "rates": rates}
        settings["key"] = int(rng.integers(2**63))
        settings["budget"] = max(settings["budget"], seats * (1 + k))
        settings["blocks"] += 2 * k * (1 + len(traits.get("windows", ())))
        if traits.get("threshold"):  # vLLM 0.32 asserts that a padded request is not cut
            settings["threshold"] = max(settings["threshold"], 1 + k)
    return {"settings": settings, "requests": requests, "costs": _COSTS}


def held_blocks(settings, window):
    """Return the most blocks that a request has in a group of sliding layers."""
    in_flight = settings["budget"] * (1 + bool(settings.get("async")))
    return -(-(window - 1 + in_flight) // settings["block_size"]) + 1


def with_tokens(given):
    """Return a case with the token ids that paths stand for."""
    size, requests = given["settings"]["block_size"], []
    for i, r in enumerate(given["requests"]):
        tokens = [(1 << 40) + (i << 20) + k for k in range(r["prompt"])]
        for number, block in enumerate(r.get("path", ())):
            tokens[number * size : (number + 1) * size] = [10 + block] * size
        requests.append(r | {"tokens": tokens})
    return given | {"requests": requests}


def with_paths(workload, requests, size):
    """Return a workload with the prefixes that paths stand for, of blocks of ``size`` tokens."""
    paths = [r.get("path", []) for r in requests]
    if not any(paths):
        return workload
    indptr = np.cumsum([0, *map(len, paths)])
    ids = np.array([block for path in paths for block in path], np.uint64)
    return replace(
        workload, prefix_hash=chain_blocks(ids, indptr), prefix_indptr=indptr,
        prefix_text=np.zeros(len(ids), np.int32), prefix_block_tokens=size,
    )  # fmt: skip


def windows_of(settings):
    """Return what windows and states take: a block for each group."""
    windows, size = settings.get("windows", ()), settings["block_size"]
    if not windows:
        return WindowBlocks(state=settings.get("states", 0))
    most = -(-(windows[0] - 1) // size) + 1
    return WindowBlocks(len(windows), most, groups=len(windows), window=windows[0])


@pytest.fixture
def ours(make_cluster, make_workload):
    """Serve a case; returns the record."""

    def run(given, version=None, backend=None):
        settings, requests = given["settings"], given["requests"]
        seats, size, drafts = settings["seats"], settings["block_size"], settings.get("drafts", 0)
        tokens = max(400, settings["budget"])
        made = by_hand(seqs=seats * (1 + drafts), tokens=tokens)
        dense = _COSTS["step"] + _COSTS["token"] * np.arange(tokens + 1.0)
        cost = made.cost._replace(dense_s=dense, prompt_share_s=np.zeros(tokens + 1))
        rules = rules_of("vllm", SchedulerConfig(), settings["budget"], 1, version)
        engine = {
            "step_time": SimpleNamespace(cost=cost, n_moe_layers=2, n_experts=70),
            "max_num_seqs": seats, "max_num_batched_tokens": settings["budget"],
            "n_blocks": settings["blocks"],
            "rules": replace(rules, keeps_ends=rules.keeps_ends and not settings.get("dense")),
        }  # fmt: skip
        if drafts:
            config = SpeculativeConfig(method="mtp", num_speculative_tokens=drafts)
            steps = SimpleNamespace(cost=by_hand(seqs=seats * (1 + drafts), tokens=tokens).cost)
            accepted = {"": Acceptance(tuple(settings["rates"]), "test")}
            engine["speculation"] = Speculation(
                config, accepted, Draft(steps, 0.0, 2, 1), False, settings["key"]
            )
        of = {name: [r[name] for r in requests] for name in ("at", "prompt", "output")}
        workload = make_workload(of["at"], of["prompt"], of["output"])
        workload = with_paths(workload, requests, size)
        keys = None
        if settings.get("priority"):
            keys = np.array([float(r["priority"]) for r in requests])
        remote = {"n_prefill": 0}
        if "remote" in settings:  # prompts take no time
            about = {"step_time": by_hand(seqs=64, tokens=_LONGEST), "max_num_seqs": 64,
                     "max_num_batched_tokens": _LONGEST, "n_blocks": 1 << 20}  # fmt: skip
            latency = TransferModel(settings["remote"], 0.0, 1e30, "test")
            remote = {"prefill": about, "transfer": latency}
        cluster = make_cluster(
            workload, **remote, decode=engine, block_size=size, max_num_seqs=seats,
            max_num_batched_tokens=settings["budget"], n_blocks=settings["blocks"],
            max_model_len=settings["max_model_len"], prompts=False, queue_keys=keys,
            preempt_by_key=keys is not None, async_scheduling=bool(settings.get("async")),
            threshold=settings.get("threshold"), windows=windows_of(settings),
            enable_prefix_caching=settings.get("prefix_caching", True),
        )  # fmt: skip
        return cluster.run() if backend is None else backend(cluster.inputs).run()

    return run


def told(record):
    """Return steps (start, end, sequences that get tokens, tokens) and requests of a record."""
    steps = record.decode_steps
    columns = [steps["start"], steps["end"], steps["sequences"], steps["tokens"]]
    columns[3] = columns[3] + steps["chunk_tokens"]
    names = ("first_token_s", "finish_s", "preemptions")
    requests = {name: record.requests[name].tolist() for name in names}
    transferred = (record.requests["transfer_end_s"] >= 0).any()
    cached = "decode_cached_tokens" if transferred else "cached_tokens"
    requests["cached_tokens"] = record.requests[cached].tolist()
    return np.column_stack(columns), requests


def of_vllm(done):
    """Return the same of what the script says."""
    requests = {
        "first_token_s": [r["token_s"][0] for r in done["requests"]],
        "finish_s": [r["token_s"][-1] for r in done["requests"]],
        "cached_tokens": [r["cached"] for r in done["requests"]],
        "preemptions": [r["preemptions"] for r in done["requests"]],
    }
    steps = np.array(done["steps"], float).reshape(-1, 4)
    # A step that was scheduled ahead may run when all requests have ended; our runs end with these.
    return steps[steps[:, 0] < max(requests["finish_s"])], requests


def n_differing(found, expected):
    """Return how many steps of one differ from those of the other."""
    both = min(len(found), len(expected))
    return int((found[:both] != expected[:both]).any(axis=1).sum()) + abs(
        len(found) - len(expected)
    )


def ask_vllm(cases):
    """Return what vLLM's own scheduler does with cases."""
    command = [os.environ["VLLM_PYTHON"], str(_HERE / "vllm_scheduler.py")]
    given = json.dumps([with_tokens(each) for each in cases])
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


needs_vllm = pytest.mark.skipif(
    "VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python that has vLLM"
)


def loads(n, names):
    """Return so many pairs of a feature and a seed, the features in turn."""
    return [(names[i % len(names)], i // len(names)) for i in range(n)]


def compact(done):
    """Return what is recorded of a load: starts of steps, sequences that get a token, tokens."""
    steps, requests = of_vllm(done)
    return {"steps": steps[:, [0, 2, 3]].tolist(), "requests": requests}


def check_recorded(name, found):
    """Compare what vLLM did with what is recorded; ``VLLM_RECORD`` records it."""
    path = _HERE / name
    if "VLLM_RECORD" in os.environ:
        path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    assert found == json.loads(path.read_text())


@pytest.fixture(scope="module")
def recorded():
    return json.loads((_HERE / "vllm_steps.json").read_text())


@on_each("number", range(_N_RECORDED))
def test_our_engine_equals_vllms_scheduler_step_by_step(ours, recorded, number):
    feature, seed = loads(_N_RECORDED, list(FEATURES))[number]
    steps, requests = told(ours(case(feature, seed)))
    assert steps[:, [0, 2, 3]].tolist() == recorded[number]["steps"]
    assert requests == recorded[number]["requests"]


def test_the_recorded_loads_hold_what_may_differ(recorded):
    """Cache hits, preemptions, and requests that find blocks of their own."""
    names = [feature for feature, _ in loads(_N_RECORDED, list(FEATURES))]
    hits, preempted = Counter(), Counter()
    for feature, each in zip(names, recorded, strict=True):
        hits[feature] += sum(each["requests"]["cached_tokens"])
        preempted[feature] += sum(each["requests"]["preemptions"])
    assert all(hits[name] > 0 for name, about in FEATURES.items() if about.get("shared"))
    assert all(preempted[name] > 0 for name, about in FEATURES.items() if about.get("tight"))


def old_loads(version):
    """Return three loads of each feature that has another rule in a version."""
    return [(feature, 100 + i) for feature in OLD[version] for i in range(3)]


@on_each("version", OLD)
def test_the_rules_of_an_older_version_equal_its_scheduler(ours, version):
    recorded = json.loads((_HERE / "vllm_steps_old.json").read_text())[version]
    for of, expected in zip(old_loads(version), recorded, strict=True):
        steps, requests = told(ours(case(*of), version=version))
        assert steps[:, [0, 2, 3]].tolist() == expected["steps"], of
        assert requests == expected["requests"], of


def versions():
    """Return the Pythons of versions of vLLM."""
    return dict(each.split("=", 1) for each in os.environ.get("VLLM_PYTHONS", "").split())


needs_versions = pytest.mark.skipif(not versions(), reason="VLLM_PYTHONS names no Python")


@needs_versions
@pytest.mark.live
def test_older_versions_do_what_was_recorded(monkeypatch):
    found = {}
    for version in OLD:
        monkeypatch.setenv("VLLM_PYTHON", versions()[version])
        cases = [case(*of) for of in old_loads(version)]
        found[version] = [compact(done) for done in ask_vllm(cases)]
    check_recorded("vllm_steps_old.json", found)


@needs_versions
@pytest.mark.live
def test_the_rules_of_each_version_equal_its_scheduler(ours, recorded, monkeypatch):
    """Prints, by rule and version, the steps in which our rules of that version differ, and those
    in which the newest would (`.ci/vllm_versions` installs the last three)."""
    of_load = loads(_N_RECORDED, list(FEATURES))
    failed = []
    for version, python in versions().items():
        monkeypatch.setenv("VLLM_PYTHON", python)
        counts = {feature: np.zeros(3, int) for feature in FEATURES}
        done = ask_vllm([case(*of) for of in of_load])
        for (feature, seed), newest, one in zip(of_load, recorded, done, strict=True):
            if "stalls" in one:
                print(f"{version} | {feature} | stalls by itself")
                continue
            expected = of_vllm(one)[0][:, [0, 2, 3]]
            ruled = told(ours(case(feature, seed), version))[0][:, [0, 2, 3]]
            ours_differ = n_differing(ruled, expected)
            newest_differ = n_differing(np.array(newest["steps"]), expected)
            counts[feature] += len(expected), ours_differ, newest_differ
        for feature, (steps, differ, moved) in counts.items():
            print(f"{version} | {feature} | {steps} | {differ} | {moved}")
            failed += [(version, feature)] if differ else []
    assert not failed


@needs_vllm
@pytest.mark.live
def test_vllm_does_what_was_recorded():
    cases = [case(*of) for of in loads(_N_RECORDED, list(FEATURES))]
    found = [compact(done) for done in ask_vllm(cases)]
    check_recorded("vllm_steps.json", found)


@needs_vllm
@pytest.mark.live
@pytest.mark.slow  # no limit of its time
def test_2000_loads_equal_vllms_own_scheduler(ours):
    """Prints, by feature, the steps compared and those that differ."""
    each = loads(int(os.environ.get("VLLM_LOADS", "2000")), list(FEATURES))
    cases = [case(*of) for of in each]
    steps, differing, wrong_loads = Counter(), Counter(), Counter()
    for (feature, _), given, done in zip(each, cases, ask_vllm(cases), strict=True):
        found, expected = told(ours(given)), of_vllm(done)
        wrong = n_differing(found[0], expected[0])
        steps[feature] += len(expected[0])
        differing[feature] += wrong
        wrong_loads[feature] += bool(wrong or found[1] != expected[1])
    for feature in FEATURES:
        print(f"{feature}: {steps[feature]} steps, {differing[feature]} differ, in "
              f"{wrong_loads[feature]} loads")  # fmt: skip
    assert not any(wrong_loads.values())
