"""Over random runs no share leaves [0, 1], and no sentinel stands in a summary."""

import json
import re

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.6, 0.4],
}  # fmt: skip
#: Options and what is drawn for each; None: not given.
CHOICES = {
    "topology": ["1P1D", "1P2D", "2P2D", "2C", "1C"],
    "policy": ["jsq", "eldr", "round_robin", "marginal_cost"],
    "engine": ["vllm", "sglang", "trtllm"],
    "num_requests": [1, 5, 40],
    "request_rate": [2.0, 80.0, 2000.0, float("inf")],
    "input_len": [1, 200, 3000],
    "output_len": [1, 2, 60],
    "prefix_len": [None, 128],
    "max_num_seqs": [None, 2],
    "max_num_batched_tokens": [None, 512],
    "num_gpu_blocks_override": [None, 300],
    "kv_tier": [None, ("host:1GB,load=20GB/s,write=through",)],
    "kv_transfer": ["ideal", "observed"],
    "fail": [None, ("decode:0@1s",), ("decode:0@0.1s+0.3s",)],
    "retry": ["never", "migrate", "before_first_token"],
    "goodput": [None, {"ttft": 20.0}, {"ttft": 1e-6, "tpot": 1e-6}, {"e2el": 1e9}],
    "speculative_config": [None, DRAFTS],
    "enable_prefix_caching": [True, False],
    "data_parallel_size": [1, 2],
    "autoscale": [None, "hpa:interval=0.5,target=4", "dynamo_load:interval=0.2"],
    "start_up": [None, "0.5"],
    "conditional_disagg": [None, "noncached:64"],
}
SHARE = re.compile(r"utili[sz]ation|share|attainment|hit_rate|acceptance_rate|mfu")


def numbers(value, path=""):
    """Yield the path and value of each number in a JSON document."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each, f"{path}[]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def draw(seed):
    rng = np.random.default_rng(seed)
    drawn = {name: of[rng.integers(len(of))] for name, of in CHOICES.items()}
    if drawn["topology"].endswith("C"):
        drawn["conditional_disagg"] = None  # it is for workers that hand prompts over
    if drawn["data_parallel_size"] > 1 and rng.random() < 0.7:  # experts move, perhaps to the end
        drawn |= {"policy": "jsq", "enable_expert_parallel": True, "eplb_interval": 5}
        drawn |= {"expert_placement": "eplb", "eplb_async": True}
        drawn["autoscale"] = None
    if drawn["autoscale"] or "eplb_interval" in drawn:
        drawn["fail"] = None  # dead workers beside them are not simulated
    return {name: value for name, value in drawn.items() if value is not None}


def wrong(summary):
    found = []
    for path, value in numbers(json.loads(json.dumps(summary))):
        if value in (-1, -1.0) or (SHARE.search(path) and not 0 <= value <= 1):
            found.append((path, value))
    return found


@pytest.mark.parametrize("first", [0, pytest.param(30, marks=pytest.mark.slow)])
def test_shares_are_shares_and_nothing_is_a_sentinel(first):
    ran = 0
    for seed in range(first, first + 30):
        fields = draw(seed)
        try:
            result = simulate(make_config({"trace": "reference-moe", "warmup": 0.0} | fields))
        except InputError:
            continue  # options that exclude one another
        ran += 1
        assert wrong(result.summary) == [], fields
    assert ran >= 12


def test_the_check_sees_shares_beyond_one_and_sentinels():
    summary = {"limits": {"utilisation": {"kv_transfers": 46.0}}, "events": [{"in_force_s": -1.0}]}
    assert [path for path, _ in wrong(summary)] == [
        ".limits.utilisation.kv_transfers", ".events[].in_force_s"
    ]  # fmt: skip
