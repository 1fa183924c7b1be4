"""Clusters whose every figure is known: two pools in which requests wait as in M/M/c."""

import math
from unittest import mock

import numpy as np

from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import parse_topology

from ..queueing import erlang_c

LEVEL = parse_slo(["ttft:500,tpot:30"])
BASE = {"request_rate": 20, "duration": 60, "warmup": 5, "output_len": 64}
#: Requests per second of a decode worker: GPUs differ, and locality makes one faster.
SPEED = {"H100": 3.0, "MI300X": 4.0}
LOCALITY = {"jsq": 1.0, "eldr": 1.25}


def attained(config, luck=0.0):
    """Two pools in which requests wait as in M/M/c; nobody may wait longer than his bound.

    Engines that share experts lose some of their speed in prefill and gain some in decoding.
    """
    x, y = parse_topology(config.cluster.topology)
    rate = config.requests.request_rate
    prefill = config.pool("prefill")
    speed = 6.0 * prefill.tensor_parallel_size * prefill.data_parallel_size**0.9
    ttft = _in_time(rate, x, speed, config.output.goodput.ttft / 1e3)
    speed = (
        SPEED[config.cluster.gpu]
        * LOCALITY[config.policies.policy]
        * config.cluster.tensor_parallel_size**0.5
    )
    speed *= config.cluster.data_parallel_size**1.5
    tpot = _in_time(rate * (1 + luck), y, speed, config.output.goodput.tpot / 1e3)
    return ttft, tpot


def _in_time(rate, servers, speed, bound):
    load = rate / speed
    if load >= servers:
        return 0.0
    return 1.0 - erlang_c(servers, load) * math.exp(-(servers * speed - rate) * bound)


class Analytic:
    """An evaluator; under each seed a little more or less work is to be done."""

    def __init__(self, spread=0.0):
        self.spread = spread
        self.configs = []

    def __call__(self, config):
        self.configs.append(config)
        return self.summary(config)

    def summary(self, config):
        luck = self.spread * np.random.default_rng([config.requests.seed, 5]).normal()
        ttft, tpot = attained(config, luck)
        busy = config.requests.request_rate / (config.cluster.n_decode * SPEED[config.cluster.gpu])
        tokens = 64 * config.requests.request_rate
        price = config.price_per_hour
        return {
            "gpu": config.cluster.gpu,
            "num_prompts": 100_000,
            "slo_attainment": ttft * tpot,
            "slo_attainment_by_metric": {"ttft": ttft, "tpot": tpot},
            "median_ttft_ms": 100.0,
            "p99_ttft_ms": 200.0,
            "median_tpot_ms": 10.0 * (1 + busy) / LOCALITY[config.policies.policy],
            "p99_tpot_ms": 12.0 * (1 + busy),
            "output_throughput": tokens,
            "prefill_throughput": 100 * config.requests.request_rate,
            "mean_decode_batch": 8.0,
            "kv_blocks_per_worker": 1000.0,
            "mean_active_experts_per_step": 80.0,
            "mean_active_experts_per_token": 80.0,
            "cost_per_million_output_tokens": price and price / 3600 / tokens * 1e6,
            "weakest_provenance": "measured",
            "provenance": {},
            "lookups_outside_tables": {"moe_batch": 0},
            "decode_steps": 1000,
            "latency_warnings": ["nothing here was simulated"],
            "latency_notes": [],
            "kv_transfer": "none",
            "in_flight_at_window_start": 5,
            "in_flight_at_window_end": 5,
            "max_concurrency": None,
            "failed_reasons": {},
            "trace": {
                "name": "none",
                "provenance": "analytic",
                "layers": "0 recorded layers",
                "trace_request_uses_mean": 1.0,
                "output_tokens_beyond_recorded_share": 0.0,
            },
        }


def simulated_by(evaluate):
    """Have the runs of this process made by an evaluator."""
    return mock.patch("eldr_sim.planning.runs.runner.simulate_summary", evaluate)
