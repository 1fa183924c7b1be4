"""Plans over analytic clusters, whose every figure is known, and one over simulated ones."""

from __future__ import annotations

import itertools
import json
import math
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.optimize import brentq

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning import plan_files
from eldr_sim.planning.bounds import bounds
from eldr_sim.planning.candidates import ClusterTemplate
from eldr_sim.planning.plan import per_gpu, per_user, plan
from eldr_sim.planning.rates import plan_rate
from eldr_sim.planning.slo import Objective, Verdict, parse_slo
from eldr_sim.simulator.config import make_config, parse_topology
from eldr_sim.simulator.run import simulate_summary

from ..paths import GOLDEN
from ..queueing import erlang_c

LEVEL = parse_slo(["ttft:500,tpot:30"])
BASE = {"request_rate": 20, "duration": 60, "warmup": 5, "output_len": 64}
#: Requests per second of a decode worker: GPUs differ, and locality makes one faster.
SPEED = {"H100": 3.0, "MI300X": 4.0}
LOCALITY = {"jsq": 1.0, "eldr": 1.25}


def attained(config, luck=0.0):
    """Two pools in which requests wait as in M/M/c; nobody may wait longer than his bound."""
    x, y = parse_topology(config.topology)
    rate = config.request_rate
    speed = 6.0 * config.tensor_parallel_size
    ttft = _in_time(rate, x, speed, config.goodput.ttft / 1e3)
    speed = SPEED[config.gpu] * LOCALITY[config.policy] * config.tensor_parallel_size**0.5
    tpot = _in_time(rate * (1 + luck), y, speed, config.goodput.tpot / 1e3)
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
        luck = self.spread * np.random.default_rng([config.seed, 5]).normal()
        ttft, tpot = attained(config, luck)
        busy = config.request_rate / (config.n_decode * SPEED[config.gpu])
        tokens = 64 * config.request_rate
        price = config.price_per_hour
        return {
            "gpu": config.gpu,
            "num_prompts": 100_000,
            "slo_attainment": ttft * tpot,
            "slo_attainment_by_metric": {"ttft": ttft, "tpot": tpot},
            "median_ttft_ms": 100.0,
            "p99_ttft_ms": 200.0,
            "median_tpot_ms": 10.0 * (1 + busy) / LOCALITY[config.policy],
            "p99_tpot_ms": 12.0 * (1 + busy),
            "output_throughput": tokens,
            "mean_decode_batch": 8.0,
            "mean_active_experts_per_step": 80.0,
            "cost_per_million_output_tokens": price and price / 3600 / tokens * 1e6,
            "weakest_provenance": "measured",
            "provenance": {},
            "lookups_outside_tables": {"moe_batch": 0},
            "decode_steps": 1000,
            "latency_warnings": ["nothing here was simulated"],
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
    return mock.patch("eldr_sim.planning.runner.simulate_summary", evaluate)


def ask(evaluate=None, *, attainment=0.9, looks=(3, 5), **arguments):
    arguments = {"policies": ["jsq", "eldr"], "gpus": ["h100", "mi300x"]} | arguments
    arguments = {"tensor_parallel_sizes": [1], "max_gpus": 32} | arguments
    config = make_config(BASE | arguments.pop("config", {}))
    objective = Objective(LEVEL, attainment, looks)
    with simulated_by(evaluate or Analytic()):
        return plan(config, objective, jobs=1, **arguments)


def brute_force(gpu, policy, cost, target=0.9, size=1, max_gpus=32):
    """The lowest cost over every cluster."""
    workers = max_gpus // size
    config = make_config(BASE | {"gpu": gpu, "policy": policy, "tensor_parallel_size": size})
    config = config.model_copy(update={"goodput": LEVEL})
    costs = [
        cost(x * size, y * size)
        for x, y in itertools.product(range(1, workers), repeat=2)
        if x + y <= workers
        and math.prod(attained(config.model_copy(update={"topology": f"{x}P{y}D"}))) >= target
    ]
    return min(costs, default=None)


def test_the_cheapest_cluster_is_that_of_the_whole_grid():
    found = ask()
    assert {(a.gpu, a.policy) for a in found.candidates} == {
        (gpu, policy) for gpu in SPEED for policy in LOCALITY
    }
    for answer in found.candidates:
        least = brute_force(answer.gpu, answer.policy, lambda x, y: x + y)
        assert answer.trial.config.n_gpus == answer.cost == least
        assert not answer.notes
    assert [a.cost for a in found.candidates] == sorted(a.cost for a in found.candidates)
    assert (found.best.gpu, found.best.policy) == ("MI300X", "eldr")
    assert found.runner_up.config.gpu == "MI300X" or found.runner_up.config.policy == "eldr"


def test_prices_decide_where_there_are_some():
    """H100 at half of MI300X's price: more GPUs, less money."""
    found = ask(prices={"h100": 1.0, "MI300X": 2.0})
    assert found.has_prices
    assert found.best.gpu == "H100"
    for answer in found.candidates:
        price = {"H100": 1.0, "MI300X": 2.0}[answer.gpu]
        least = brute_force(answer.gpu, answer.policy, lambda x, y, p=price: p * (x + y))
        assert answer.cost == pytest.approx(least)


def test_a_pool_may_keep_its_gpu_and_its_price():
    evaluate = Analytic()
    prices = {"h100": 1.0, "mi300x": 2.0, "a100": 0.5}
    found = ask(evaluate, prices=prices, config={"prefill": {"gpu": "a100"}})
    assert [answer.gpu for answer in found.candidates[:2]] == ["A100 + H100", "A100 + H100"]
    config = found.best.trial.config
    assert config.price_per_hour == config.n_prefill * 0.5 + config.n_decode * 1.0
    # Both pools fixed: what --gpu lists makes no difference, and one candidate a policy is left.
    found = ask(config={"prefill": {"gpu": "h100"}, "decode": {"gpu": "h100"}})
    assert len(found.candidates) == 2


def test_larger_workers_are_taken_where_they_are_cheaper_or_needed():
    """Half the gain of a second GPU is lost on decode workers, so one GPU each is best here."""
    alone, both = ask(), ask(tensor_parallel_sizes=[1, 2])
    for one, any_size in zip(alone.candidates, both.candidates, strict=True):
        assert any_size.cost == one.cost
        sizes = {trial.config.tensor_parallel_size for trial in any_size.trials}
        assert sizes == {1, 2}
    two = ask(tensor_parallel_sizes=[2], gpus=["h100"])
    for answer in two.candidates:
        assert answer.cost == brute_force(answer.gpu, answer.policy, lambda x, y: x + y, size=2)

    class Slow(Analytic):
        """Workers of one GPU never do."""

        def summary(self, config):
            share = {} if config.tensor_parallel_size > 1 else {"slo_attainment": 0.0}
            return super().summary(config) | share

    for evaluate, sizes in ((Analytic(), {1}), (Slow(), {1, 2})):
        found = ask(evaluate, tensor_parallel_sizes=[], gpus=["h100"])
        for answer in found.candidates:
            assert {trial.config.tensor_parallel_size for trial in answer.trials} == sizes
            assert answer.trial.config.tensor_parallel_size == max(sizes)


def test_hopeless_clusters_take_one_short_run_and_clear_ones_the_fewest_seeds():
    evaluate = Analytic()
    found = ask(evaluate, policies=["jsq"], gpus=["h100"])
    tried = {t.config.topology: t for t in found.best.trials}
    hopeless = [t for t in tried.values() if t.hopeless]
    assert hopeless
    for trial in hopeless:
        runs = [c for c in evaluate.configs if c.topology == trial.config.topology]
        assert [(c.duration, c.request_rate) for c in runs] == [(15.0, 20.0)]
    assert all(len(t.summaries) == 3 for t in tried.values() if t.verdict is Verdict.MEETS)
    # Every run is made once.
    assert len({c.model_dump_json() for c in evaluate.configs}) == len(evaluate.configs)
    assert len(found.runs) == len(evaluate.configs)
    assert len(tried) < 30


def test_margin_is_the_rate_at_which_the_target_is_just_attained():
    found = ask(policies=["eldr"], gpus=["h100"])
    config = found.best.trial.config

    def above(rate):
        return math.prod(attained(config.model_copy(update={"request_rate": rate}))) - 0.9

    exact = brentq(above, 20.0, 80.0)
    assert found.margin.rate.mean == pytest.approx(exact, rel=0.01)
    assert found.margin.rate.mean <= exact
    assert found.margin.percent.mean == pytest.approx(100 * (found.margin.rate.mean / 20 - 1))
    lost = found.margin.lost_decode
    assert lost.config.n_decode == config.n_decode - 1
    assert lost.attainment.mean == pytest.approx(math.prod(attained(lost.config)))
    assert lost.verdict is Verdict.MISSES


def test_savings_are_paired_over_seeds():
    found = ask(Analytic(0.04), gpus=["h100"], looks=(3, 5))
    (saving,) = found.savings
    assert (saving.policy, saving.reference) == ("eldr", "jsq")
    assert len(saving.by_seed) == 5
    differences = np.subtract(saving.reference_by_seed, saving.by_seed)
    assert saving.gpus.mean == pytest.approx(differences.mean())
    assert saving.gpus.low <= saving.gpus.mean <= saving.gpus.high
    for seed, gpus in enumerate(saving.by_seed):
        luck = 0.04 * np.random.default_rng([seed, 5]).normal()
        least = min(
            x + y
            for x, y in itertools.product(range(1, 32), repeat=2)
            if math.prod(
                attained(
                    found.best.trial.config.model_copy(
                        update={"topology": f"{x}P{y}D", "policy": "eldr"}
                    ),
                    luck,
                )
            )
            >= 0.9
        )
        assert gpus == least


def test_the_front_holds_what_no_other_cluster_beats():
    found = ask()
    good = [
        t for a in found.candidates for t in a.trials
        if t.verdict is Verdict.MEETS and t.config.n_gpus <= 32
    ]  # fmt: skip
    assert found.front
    for trial in good:
        assert any(
            per_user(f) >= per_user(trial) - 1e-9 and per_gpu(f) >= per_gpu(trial) - 1e-9
            for f in found.front
        )
    speeds = [(per_user(f), per_gpu(f)) for f in found.front]
    assert speeds == sorted(speeds, key=lambda s: (-s[0], s[1]))
    assert found.best.trial.config.n_gpus == min(f.config.n_gpus for f in found.front)


def test_no_cluster_is_large_enough():
    found = ask(max_gpus=8, gpus=["h100"])
    assert found.best is None
    assert found.margin is None
    assert found.runner_up is None
    for answer in found.candidates:
        assert (
            "needs 5 prefill and" in answer.reasons[0] or "even 7P7D attains" in answer.reasons[0]
        )
    json.dumps(plan_files.plan_record(found), allow_nan=False)


def test_arithmetic_alone_rules_out_what_it_can():
    evaluate = Analytic()
    with simulated_by(evaluate):
        found = plan(
            make_config(BASE), Objective(parse_slo(["tpot:2"]), 0.9), gpus=["h100"],
            tensor_parallel_sizes=[1], jobs=1,
        )  # fmt: skip
    assert found.best is None
    assert "more than the TPOT bound of 2 ms" in found.candidates[0].reasons[0]
    with simulated_by(evaluate):
        found = plan(
            make_config(BASE), Objective(parse_slo(["ttft:1"]), 0.9), gpus=["h100"], jobs=1
        )
    assert "takes longer than the TTFT bound of 1 ms" in found.candidates[0].reasons[0]
    found = ask(evaluate, config={"request_rate": 2_000}, max_gpus=4)
    assert "at full speed, more than 4 GPUs" in found.candidates[0].reasons[0]
    found = ask(evaluate, config={"model": "Qwen3-235B-A22B"}, tensor_parallel_sizes=[1, 2])
    reasons = [reason.split(":")[0] for reason in found.candidates[0].reasons]
    assert reasons == ["1 GPU a worker", "2 GPUs a worker"]
    assert evaluate.configs == []


def test_a_model_takes_the_workers_that_hold_it():
    """Qwen3-235B-A22B in bfloat16 does not fit on four H100, see docs/parallelism.md."""
    found = ask(config={"model": "Qwen3-235B-A22B"}, tensor_parallel_sizes=[], gpus=["H100"])
    assert {t.config.tensor_parallel_size for a in found.candidates for t in a.trials} == {8}


def test_bounds_hold_in_simulations():
    """With one worker less than the bound asks for, the objective is missed by far."""
    config = make_config(
        {"request_rate": 60, "duration": 8, "warmup": 2, "output_len": 16, "gpu": "A100"}
        | {"goodput": {"ttft": 1000, "tpot": 12}}
    )
    objective = Objective(config.goodput, 0.95)
    found = bounds(config.model_copy(update={"request_rate": 400}), objective)
    assert found.n_prefill > 1
    short = config.model_copy(
        update={"request_rate": 400, "topology": f"{found.n_prefill - 1}P16D", "duration": 4}
    )
    assert simulate_summary(short)["slo_attainment"] < 0.95
    found = bounds(config.model_copy(update={"output_len": 256}), objective)
    assert found.n_decode > 1
    short = config.model_copy(update={"output_len": 256, "topology": f"8P{found.n_decode - 1}D"})
    assert simulate_summary(short)["slo_attainment"] < 0.95


# -- the highest rate ----------------------------------------------------------------------------


def test_the_highest_rate_of_a_cluster():
    config = make_config(BASE | {"topology": "6P10D"})
    objective = Objective(LEVEL, 0.9, (3, 5))
    with simulated_by(Analytic(0.03)):
        found = plan_rate(
            config, objective, policies=["jsq", "eldr"], gpus=["h100", "mi300x"], jobs=1
        )
    assert len(found.rates) == 4
    for each in found.rates:
        for seed, rate in enumerate(each.by_seed):
            luck = 0.03 * np.random.default_rng([seed, 5]).normal()

            def above(r, each=each, luck=luck):
                at = each.config.model_copy(update={"request_rate": r})
                return math.prod(attained(at, luck)) - 0.9

            assert rate == pytest.approx(brentq(above, 1.7, 200.0), rel=0.011)
        assert each.rate.low < each.rate.mean < each.rate.high
    assert [(g.gpu, g.policy, g.reference) for g in found.gains] == [
        ("H100", "eldr", "jsq"),
        ("MI300X", "eldr", "jsq"),
    ]
    ours, theirs = (
        np.array(r.by_seed)
        for policy in ("eldr", "jsq")
        for r in found.rates
        if (r.gpu, r.config.policy) == ("H100", policy)
    )
    assert found.gains[0].percent.mean == pytest.approx(100 * np.mean(ours / theirs - 1))


def test_a_cluster_that_carries_nothing():
    objective = Objective(parse_slo(["tpot:2"]), 0.9)
    with simulated_by(Analytic()):
        found = plan_rate(make_config(BASE | {"topology": "1P1D"}), objective, jobs=1)
    assert found.rates[0].rate is None
    assert "more than the TPOT bound" in found.rates[0].reason
    json.dumps(plan_files.rate_record(found), allow_nan=False)


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": ["h1000"]}, "gpu: unknown GPU 'h1000'"),
        ({"gpus": ["h100", "H100"]}, "gpu: H100, H100 names one twice"),
        ({"policies": ["best"]}, "policy: unknown policy 'best'"),
        ({"policies": ["jsq", "jsq"]}, "policy: jsq, jsq names one twice"),
        ({"prices": {"h100": 2.0}}, "price: none of MI300X"),
        ({"prices": {"h1000": 2.0}}, "gpu: unknown GPU 'h1000'"),
        ({"max_gpus": 1}, "max_gpus: 1"),
        ({"config": {"request_rate": math.inf, "num_requests": 500}}, "request_rate: inf"),
        ({"config": {"duration": 3}}, "duration: about 60 requests in the measured window"),
        ({"policies": ["eldr:artifact=a.npz"]}, "policy.artifact: "),
        ({"config": {"max_concurrency": 8}}, "max_concurrency: "),
        ({"config": {"trace": "no/such/trace"}}, "trace: "),
    ],
)
def test_bad_plan(arguments, message):
    evaluate = Analytic()
    with pytest.raises(InputError) as error:
        ask(evaluate, **arguments)
    assert str(error.value).startswith(message)
    assert evaluate.configs == []


# -- the command line ----------------------------------------------------------------------------


def check_golden(name, text):
    """Compare with ``golden/name``; to renew it, delete the file and run twice."""
    path = GOLDEN / name
    lines = "".join(line.rstrip() + "\n" for line in text.splitlines())
    if not path.exists():
        path.write_text(lines)
        pytest.fail(f"{path} was missing: written anew, read it before you commit it")
    assert lines == path.read_text()


@pytest.fixture
def analytic_cli(run_cli, monkeypatch):
    """The command line over analytic clusters."""

    def run(*arguments):
        monkeypatch.setattr("eldr_sim.planning.runner.simulate_summary", Analytic(0.02))
        return run_cli(
            "plan", "--slo", "ttft:500,tpot:30", "--attainment", "0.9", "--policy", "jsq,eldr",
            "--duration", "60", "--output-len", "64", "--seeds", "5", "--jobs", "1", *arguments,
        )  # fmt: skip

    return run


def test_plan_is_golden(analytic_cli):
    code, out, err = analytic_cli(
        "--request-rate", 20, "--gpu", "h100,mi300x", "--max-gpus", 32, "--price",
        "h100=2.5,mi300x=2.0", "--tensor-parallel-size", 1,
    )  # fmt: skip
    assert code == 0
    assert err == "Warning: nothing here was simulated\n"
    check_golden("plan.txt", out)


def test_plan_of_a_rate_is_golden(analytic_cli):
    code, out, _ = analytic_cli("--topology", "6P10D", "--gpu", "h100,mi300x")
    assert code == 0
    check_golden("plan_rate.txt", out)


def test_no_cluster_is_exit_code_1_and_still_written(analytic_cli, tmp_path):
    code, out, _ = analytic_cli(
        "--request-rate", 20, "--max-gpus", 4, "--out", tmp_path / "plan", "--gpu", "h100"
    )
    assert code == 1
    assert "No cluster meets the objective." in out
    record = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert record["answer"] is None
    assert record["candidates"][0]["reasons"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "20", "--price", "h100"], "price: 'h100' (allowed: GPU=PRICE"),
        (["--request-rate", "20", "--price", "h100=-1"], "price: 'h100=-1'"),
        (["--request-rate", "20", "--price", "h100=x"], "price: 'h100=x'"),
        (["--request-rate", "20", "--gpu", "h1000"], "gpu: unknown GPU 'h1000'"),
        (["--request-rate", "20", "--attainment", "1"], "attainment: 1"),
        (["--request-rate", "20", "--slo", "itl:3"], "slo: itl: no such field"),
        (["--request-rate", "20", "--tensor-parallel-size", "two"], "tensor_parallel_size: 'two'"),
        (
            ["--request-rate", "20", "--topology", "1P1D"],
            "topology: together with --request-rate",
        ),
        (["--topology", "1P"], "output_len: 64"),
        (["--topology", "1P", "--prefill-only"], "prefill_only: together"),
        (["--request-rate", "20", "--jobs", "0"], "jobs: 0"),
        (["--request-rate", "20", "--seeds", "1"], "seeds: 1"),
        ([], "request_rate: none"),
    ],
)
def test_bad_arguments(analytic_cli, arguments, message):
    code, out, err = analytic_cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: {message}")
    assert err.count("\n") == 1


def test_a_simulated_plan_is_the_same_however_many_processes(run_cli, tmp_path):
    arguments = [
        "plan", "--slo", "ttft:200,tpot:12", "--attainment", "0.9", "--request-rate", "60",
        "--policy", "p2c", "--max-gpus", "3", "--tensor-parallel-size", "1", "--duration", "2",
        "--warmup", "1", "--output-len", "16", "--seeds", "2", "--trace", "reference-moe",
    ]  # fmt: skip
    texts = []
    for jobs in ("1", "2"):
        code, out, _ = run_cli(*arguments, "--jobs", jobs, "--out", tmp_path / jobs)
        assert code == 0
        texts.append(out.replace(str(tmp_path / jobs), ""))
    assert texts[0] == texts[1]
    for name in ("plan.json", "points.parquet"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    record = json.loads((tmp_path / "1" / "plan.json").read_text())
    points = pq.read_table(tmp_path / "1" / "points.parquet").to_pandas()
    assert len(points) == record["simulated_runs"]
    answer = record["answer"]
    mine = points[
        (points.topology == answer["topology"])
        & (points.policy == answer["policy"])
        & (points.duration == 2.0)
        & (points.request_rate == 60)
        & (points.seed < answer["seeds"])
    ]
    assert mine.slo_attainment.mean() == pytest.approx(answer["slo_attainment"]["mean"])
    assert answer["slo_attainment"]["low"] >= 0.9


def test_interrupt_leaves_nothing(analytic_cli, tmp_path, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("eldr_sim.planning.plan.plan", interrupted)
    code, _, err = analytic_cli("--request-rate", 20, "--out", tmp_path / "plan")
    assert (code, err.strip()) == (130, "Interrupted: nothing was written.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"data_parallel_size": 2}}, r"decode\.data_parallel_size: a plan"),
        ({"decode": {"tensor_parallel_size": 2}}, r"decode\.tensor_parallel_size: a plan searches"),
    ],
)
def test_workers_that_a_plan_cannot_size_are_refused(values, message):
    objective = Objective(LEVEL)
    with pytest.raises(InputError, match=message):
        plan(make_config(values), objective, max_gpus=4)


# -- engines that share experts ------------------------------------------------------------------


GROUPS = {
    "request_rate": 20,
    "duration": 5,
    "warmup": 1,
    "output_len": 16,
    "policy": "jsq",
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "expert_placement": "eplb",
}


def test_a_plan_chooses_redundant_experts():
    """Workers of two engines; each redundant expert is paid for in KV blocks of every GPU."""
    objective = Objective(parse_slo(["ttft:2000,tpot:100"]), attainment=0.9, looks=(2,))
    found = plan(
        make_config(GROUPS), objective, max_gpus=8, redundant_experts=(0, 32), jobs=1,
        tensor_parallel_sizes=(1,),
    )  # fmt: skip
    trials = {each.policy: each.trial for each in found.candidates}
    assert set(trials) == {"jsq", "jsq, 32 redundant experts"}
    for trial in trials.values():
        assert trial.config.topology == "1P1D"
        assert trial.config.n_gpus == 4
    blocks = [t.summaries[0]["kv_blocks_per_worker"] for t in trials.values()]
    model = load_model("Qwen3-30B-A3B")
    paid = 16 * model.n_moe_layers * model.bytes_per_expert  # 32 more instances on 2 GPUs
    assert blocks[0] - blocks[1] == pytest.approx(paid / (16 * model.kv_bytes_per_token), abs=1)


def test_groups_have_no_bound_and_fill_their_gpus():
    config = make_config(GROUPS | {"tensor_parallel_size": 2, "goodput": {"tpot": 1.0}})
    found = bounds(config, Objective(config.goodput))
    assert (found.n_prefill, found.n_decode, found.impossible) == (1, 1, "")
    template = ClusterTemplate(config, found, max_gpus=17)
    assert template.max_workers == 4
    assert template.at(1, 2).n_gpus == 12


def test_redundant_experts_need_engines_that_share_experts():
    with pytest.raises(InputError, match=r"num_redundant_experts: .*--data-parallel-size 2"):
        plan(make_config(BASE), Objective(LEVEL), max_gpus=4, redundant_experts=(0, 16))
    with pytest.raises(InputError, match=r"num_redundant_experts: 16, 16 names one twice"):
        plan(make_config(GROUPS), Objective(LEVEL), max_gpus=4, redundant_experts=(16, 16))
