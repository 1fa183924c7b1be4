"""Plans of prefill workers alone: strategy, token budget, workers."""

import itertools
import json
import math
from unittest import mock

import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.search.goals import Cheapest, Fastest, HighestRate, find
from eldr_sim.planning.search.prefill import prefill_candidates
from eldr_sim.planning.search.prefill_strategy import KINDS, PrefillStrategy, strategy_of
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config

from ..queueing import erlang_c

BASE = {"topology": "1P", "trace": "reference-moe", "request_rate": 40, "duration": 30, "warmup": 3}
LEVEL = parse_slo(["ttft:400"])
SPEED = {"async_ep": 1.5, "dp_ep": 1.3, "tp": 1.0, "tp_ep": 0.9, "pp": 1.4}


def speed(config):
    """Requests/s of a worker: strategies differ, each has a best budget, sizes scale badly."""
    size = config.pool("prefill").parallelism.n_gpus
    budget = config.engine.max_num_batched_tokens
    best = 32_768 if config.experts.expert_gather or config.experts.offload_window else 8192
    fit = 1 - 0.1 * abs(math.log2(budget / best))
    return 12 * size**0.9 * SPEED[strategy_of(config).kind] * fit


def attained(config):
    """M/M/c: nobody may wait longer than the bound."""
    rate, each, servers = config.requests.request_rate, speed(config), config.cluster.n_prefill
    if rate >= each * servers:
        return 0.0
    wait = erlang_c(servers, rate / each) * math.exp(-(each * servers - rate) * 0.4)
    return 1 - wait


def evaluate(config):
    share = attained(config) if math.isfinite(config.requests.request_rate) else 1.0
    tokens = 100 * speed(config) * config.cluster.n_prefill * (1 + 0.01 * config.requests.seed)
    at_once = (config.requests.num_requests or 10) / (speed(config) * config.cluster.n_prefill)
    return {
        "gpu": config.cluster.gpu, "num_prompts": 100_000, "slo_attainment": share,
        "completed": config.requests.num_requests or 10, "makespan_s": at_once,
        "slo_attainment_by_metric": {"ttft": share}, "failed": 0, "prefill_throughput": tokens,
        "computed_prompt_throughput": tokens, "prefill_mfu": tokens / 1e6, "p99_ttft_ms": 300.0,
        "median_ttft_ms": 100.0, "median_tpot_ms": None, "p99_tpot_ms": None,
        "output_throughput": 0.0, "mean_decode_batch": None, "mean_active_experts_per_step": None,
        "mean_active_experts_per_token": None,
        "cost_per_million_output_tokens": None, "kv_blocks_per_worker": 9,
        "weakest_provenance": "measured",
        "provenance": {}, "lookups_outside_tables": {}, "decode_steps": 0, "latency_warnings": [],
        "latency_notes": [],
        "failed_reasons": {}, "kv_transfer": "none", "trace": {},
    }  # fmt: skip


def analytic():
    return mock.patch("eldr_sim.planning.runs.runner.simulate_summary", evaluate)


def every_cluster(max_gpus, sizes, budgets):
    """All configurations that the question allows, by brute force."""
    for kind, size, budget in itertools.product(KINDS, sizes, budgets):
        if size == 1 and kind not in ("tp", "async_ep"):
            continue
        strategy = PrefillStrategy(kind, window=4 if size == 1 and kind == "async_ep" else 0)
        for workers in range(1, max_gpus // size + 1):
            fields = strategy.fields(size) | {"topology": f"{workers}P"}
            fields |= {"max_num_batched_tokens": budget}
            yield kind, size, make_config(BASE | {"goodput": {"ttft": 400}} | fields)


BUDGETS = (2048, 4096, 8192, 16_384, 32_768, 65_536)


@pytest.mark.long
def test_the_cheapest_cluster_is_that_of_the_whole_grid(tmp_path):
    with analytic():
        found = find(
            Space(make_config(BASE), max_gpus=8, tensor_parallel_sizes=[1, 4]),
            Cheapest(Objective(LEVEL, 0.9, (3,))),
            RunCache(1),
        )
    least = {}
    for kind, _, config in every_cluster(8, (1, 4), BUDGETS):
        if attained(config) >= 0.9:
            least[kind] = min(config.n_gpus, least.get(kind, math.inf))
    mine = {strategy_of(each.trial.config).kind: each.cost for each in found.rows if each.trial}
    assert mine == least
    assert found.best.cost == min(least.values())
    assert list(found.rows) == sorted(found.rows, key=lambda each: each.cost)
    assert found.margin.lost_prefill is None or found.margin.lost_prefill.attainment.mean < 0.9
    assert found.margin.rate.mean >= 40 * 0.99
    assert (found.front, found.gains) == ((), ())
    with analytic():
        priced = find(
            Space(
                make_config(BASE),
                max_gpus=8,
                tensor_parallel_sizes=[4],
                strategies=["tp"],
                prices={"h100": 2.5},
            ),
            Cheapest(Objective(LEVEL, 0.9, (3,))),
            RunCache(1),
        )
    assert priced.best.cost == 2.5 * priced.best.trial.config.n_gpus
    found.write(tmp_path / "plan")
    written = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert written["answer"]["max_num_batched_tokens"] in BUDGETS
    assert "P99 TTFT" in repr(found)


@pytest.mark.long
def test_the_fastest_is_that_of_the_whole_grid():
    config = make_config(BASE | {"num_requests": 150, "warmup": None})
    with analytic():
        found = find(
            Space(config, max_gpus=4, tensor_parallel_sizes=[2, 4]), Fastest(seeds=3), RunCache(1)
        )
    best = {}
    for kind, size, each in every_cluster(4, (2, 4), BUDGETS):
        if each.n_gpus == 4:
            best[kind, size] = max(
                best.get((kind, size), 0.0), 101 * speed(each) * each.cluster.n_prefill
            )
    assert [each.figure.mean for each in found.rows] == pytest.approx(
        sorted(best.values(), reverse=True)
    )
    assert found.best.config.engine.max_num_batched_tokens == 32_768
    assert found.best.policy == "AsyncEP on 2 GPUs"


def test_what_has_no_memory_is_refused_and_other_ways_are_found():
    """The paper's cells: FP8 needs 4 GPUs of 80 GB unless experts come from the host."""
    config = make_config(BASE | {"model": "Qwen3-235B-A22B-FP8", "max_num_batched_tokens": 8192})
    objective = Objective(parse_slo(["ttft:60000"]), 0.9, (3,))
    made = prefill_candidates(config, objective, 8, [1, 2, 4], ["tp", "async_ep", "pp", "dp_ep"])
    fits = {each.policy: len(each.templates) for each in made}
    assert fits == {
        "AsyncEP, window 4": 1, "AsyncEP, window 4 on 2 GPUs": 1, "AsyncEP on 4 GPUs": 1,
        "one GPU": 0, "TP+TP on 2 GPUs": 0, "TP+TP on 4 GPUs": 1, "PP+PP on 2 GPUs": 0,
        "PP+PP on 4 GPUs": 1, "DP+EP, deepep_ht on 2 GPUs": 0,
        "DP+EP, deepep_ht on 4 GPUs": 1,
    }  # fmt: skip
    for each in made:
        assert bool(each.templates) != any("weights need" in reason for reason in each.reasons)


def test_prompts_are_whole_where_no_kv_cache_has_room():
    """4 GB of the GPU are not enough for the KV of a prompt; without a cache they need none."""
    fields = {"num_gpu_blocks_override": 2, "max_num_batched_tokens": 8192}
    objective = Objective(LEVEL, 0.9, (3,))
    (made,) = prefill_candidates(make_config(BASE | fields), objective, 1, [1], ["tp"])
    assert [template.config.experts.kv_cache_free for template in made.templates] == [True]


@pytest.mark.parametrize(
    ("fields", "rate"), [({"topology": "1P"}, 4000), ({"pipeline_parallel_size": 2}, 8000),
                         ({"data_parallel_size": 2, "enable_expert_parallel": True,
                           "expert_gather": "one_sided"}, 8000)],
)  # fmt: skip
def test_lower_bounds_on_workers_are_such(fields, rate):
    """As many workers as the bound says but one cannot keep up, by a run."""
    config = make_config(
        BASE | {"request_rate": rate, "num_requests": 1500, "duration": 30, "warmup": 0} | fields
    )
    least = bounds(config, Objective(LEVEL, 0.9, (3,)))
    assert least.n_decode == 0
    assert least.n_prefill > 1
    few = config.model_copy(
        update={"topology": f"{least.n_prefill - 1}P", "prefill_policy": "least_loaded"}
    )
    span = 1500 / rate
    assert simulate(few).summary["makespan_s"] > 1.02 * span


@pytest.mark.parametrize(
    ("fields", "arguments", "field"),
    [
        ({"data_parallel_size": 2}, {}, "data_parallel_size"),
        ({}, {"strategies": ["ep"]}, "strategy"),
        ({}, {"max_gpus": 0}, "max_gpus"),
        ({}, {"max_gpus": 1, "strategies": ["pp"]}, "max_gpus"),
        ({}, {"policies": ["eldr"]}, "policy"),
        ({"topology": "1P1D"}, {"strategies": ["tp"]}, "strategy"),
    ],
)
def test_refusals(fields, arguments, field):
    with pytest.raises(InputError) as caught:
        find(Space(make_config(BASE | fields), **arguments), Cheapest(Objective(LEVEL)))
    assert caught.value.field == field
    with pytest.raises(InputError, match="slo"):
        find(Space(make_config(BASE)), Cheapest(Objective(parse_slo(["ttft:1,tpot:1"]))))
    with pytest.raises(InputError, match="num_requests"):
        find(Space(make_config(BASE)), Fastest())


def test_the_command(run_cli, tmp_path):
    asked = ["plan", "--prefill-only", "--trace", "reference-moe", "--max-gpus", "1"]
    asked += [
        "--max-num-batched-tokens",
        "8192",
        "--jobs",
        "1",
        "--gpu",
        "H100",
        "--strategy",
        "tp",
    ]
    slo = ["--slo", "ttft:500", "--attainment", "0.9", "--seeds", "3"]
    code, out, _ = run_cli(*asked, *slo, "--request-rate", "20", "--num-requests", "120",
                           "--out", tmp_path / "slo")  # fmt: skip
    assert code == 0
    assert "1P on H100 under one GPU, 8192 tokens a step, 1 GPU" in out
    code, out, _ = run_cli(*asked, "--num-requests", "100", "--out", tmp_path / "fast")
    assert code == 0
    assert "1P on H100 under one GPU, 8192 tokens a step, 1 GPU" in out
    code, _, err = run_cli(*asked, "--num-requests", "100", "--model", "Qwen3-235B-A22B")
    assert (code, err) == (1, "")
    code, _, err = run_cli("plan", "--request-rate", "9")
    assert code == 2
    assert err.startswith("Error: slo: none")
    for folder in ("slo", "fast"):
        code, _, _ = run_cli("report", tmp_path / folder, "--out", tmp_path / f"{folder}.html")
        assert code == 0
        page = (tmp_path / f"{folder}.html").read_text()
        assert "one GPU" in page
        assert "decode worker lost" not in page


@pytest.mark.parametrize("topology", ["1P", "4P"])
def test_the_highest_rate_of_prefill_workers(topology):
    config = make_config(BASE | {"topology": topology, "max_num_batched_tokens": 8192})
    config = config.model_copy(update={"goodput": LEVEL})
    with analytic():
        (found,) = find(Space(config), HighestRate(Objective(LEVEL, 0.9, (2,))), RunCache(1)).rows
    at, above = (
        attained(config.model_copy(update={"request_rate": share * found.figure.mean}))
        for share in (1.0, 1.011)
    )
    assert at >= 0.9 > above
