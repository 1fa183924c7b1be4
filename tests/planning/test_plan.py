"""Plans over analytic clusters, whose every figure is known, and one over simulated ones."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from scipy.optimize import brentq

from eldr_sim.cli.plan import _with_window
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search import split
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.search.candidates import ClusterTemplate
from eldr_sim.planning.search.goals import Cheapest, HighestRate, find
from eldr_sim.planning.search.plan import CandidateRow
from eldr_sim.planning.search.rates import check_requests
from eldr_sim.planning.search.shapes import shapes
from eldr_sim.planning.search.trial import PAIRED_SEEDS, Trial
from eldr_sim.planning.slo import Interval, Objective, Verdict
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.groups import parse_slo
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each
from .analytic import BASE, LEVEL, LOCALITY, SPEED, Analytic, attained, simulated_by


def ask(evaluate=None, *, attainment=0.9, looks=(3, 5), why_not=(), **arguments):
    arguments = {"policies": ["jsq", "eldr"], "gpus": ["h100", "mi300x"]} | arguments
    arguments = {"tensor_parallel_sizes": [1], "max_gpus": 32} | arguments
    config = make_config(BASE | arguments.pop("config", {}))
    objective = Objective(LEVEL, attainment, looks)
    with simulated_by(evaluate or Analytic()):
        return find(Space(config, **arguments), Cheapest(objective, why_not), RunCache(1))


def brute_force(gpu, policy, cost, target=0.9, sizes=(1, 1), max_gpus=32):
    """The lowest cost over every cluster of prefill and decode workers of these sizes."""
    prefill, decode = sizes
    config = make_config(BASE | {"gpu": gpu, "policy": policy, "tensor_parallel_size": decode})
    config = config.replace(goodput=LEVEL, prefill={"tensor_parallel_size": prefill})
    costs = [
        cost(x * prefill, y * decode)
        for x, y in itertools.product(range(1, max_gpus), repeat=2)
        if x * prefill + y * decode <= max_gpus
        and math.prod(attained(config.model_copy(update={"topology": f"{x}P{y}D"}))) >= target
    ]
    return min(costs, default=None)


def test_the_cheapest_cluster_is_that_of_the_whole_grid():
    found = ask()
    assert {(a.gpu, a.policy) for a in found.rows} == {
        (gpu, policy) for gpu in SPEED for policy in LOCALITY
    }
    for answer in found.rows:
        least = brute_force(answer.gpu, answer.policy, lambda x, y: x + y)
        assert answer.trial.config.n_gpus == answer.cost == least
        assert not answer.notes
    assert [a.cost for a in found.rows] == sorted(a.cost for a in found.rows)
    assert (found.best.gpu, found.best.policy) == ("MI300X", "eldr")
    assert (
        found.runner_up.config.cluster.gpu == "MI300X"
        or found.runner_up.config.policies.policy == "eldr"
    )


def test_prices_decide_where_there_are_some():
    """H100 at half of MI300X's price: more GPUs, less money."""
    found = ask(prices={"h100": 1.0, "MI300X": 2.0})
    assert found.has_prices
    assert found.best.gpu == "H100"
    for answer in found.rows:
        price = {"H100": 1.0, "MI300X": 2.0}[answer.gpu]
        least = brute_force(answer.gpu, answer.policy, lambda x, y, p=price: p * (x + y))
        assert answer.cost == pytest.approx(least)


def test_a_pool_may_keep_its_gpu_and_its_price():
    evaluate = Analytic()
    prices = {"h100": 1.0, "mi300x": 2.0, "a100": 0.5}
    found = ask(evaluate, prices=prices, config={"prefill": {"gpu": "a100"}})
    assert [answer.gpu for answer in found.rows[:2]] == ["A100 + H100", "A100 + H100"]
    config = found.best.trial.config
    assert config.price_per_hour == config.cluster.n_prefill * 0.5 + config.cluster.n_decode * 1.0
    # Both pools fixed: what --gpu lists makes no difference, and one candidate a policy is left.
    found = ask(config={"prefill": {"gpu": "h100"}, "decode": {"gpu": "h100"}})
    assert len(found.rows) == 2


def test_the_sizes_of_both_pools_are_searched():
    """Half the gain of a second GPU is lost on decode workers, and none on prefill workers."""
    found = ask(tensor_parallel_sizes=[1, 2], gpus=["h100"], policies=["jsq"], max_gpus=16)
    pairs = list(itertools.product((1, 2), repeat=2))
    each = {
        sizes: brute_force("H100", "jsq", lambda x, y: x + y, sizes=sizes, max_gpus=16)
        for sizes in pairs
    }
    assert found.best.cost == min(cost for cost in each.values() if cost is not None)
    tried = {
        tuple(t.config.pool(role).tensor_parallel_size for role in ("prefill", "decode"))
        for t in found.best.trials
        if t.config.cluster.n_prefill > 0
    }
    assert tried == set(pairs)
    assert {s.shape for s in found.best.shapes} == {
        "xPyD TP1", "xPyD TP2", "xPyD TP2 EP", "xPyD TP1 + TP2", "xPyD TP2 + TP1",
        "xC TP1", "xC TP2", "xC TP2 EP",
    }  # fmt: skip


class Together(Analytic):
    """Co-located workers serve six requests a second, with a small token budget seven."""

    def summary(self, config):
        found = super().summary(config)
        if config.cluster.n_prefill == 0:
            budget = config.engine.max_num_batched_tokens
            speed = 7.0 if budget == 2048 else 6.0
            good = float(config.requests.request_rate <= config.cluster.n_decode * speed)
            found |= {"slo_attainment": good, "slo_attainment_by_metric": dict.fromkeys(
                ("ttft", "tpot"), good)}  # fmt: skip
        return found


def test_colocated_workers_and_their_token_budget_are_searched():
    found = ask(Together(), gpus=["h100"], config={"request_rate": 19}, policies=["jsq", "eldr"])
    by_policy = {each.policy: each for each in found.rows}
    best = by_policy["jsq"].trial.config  # eldr needs prefill workers, which make signatures
    assert (best.cluster.topology, best.engine.max_num_batched_tokens) == ("3C", 2048)
    assert by_policy["jsq"].beside(decode=-1).config.cluster.topology == "2C"
    assert all(t.config.cluster.n_prefill > 0 for t in by_policy["eldr"].trials)


def test_hopeless_clusters_take_one_run_and_clear_ones_the_fewest_seeds():
    evaluate = Analytic()
    found = ask(evaluate, policies=["jsq"], gpus=["h100"])
    tried = {t.config.cluster.topology: t for t in found.best.trials}
    hopeless = [t for t in tried.values() if t.hopeless]
    assert hopeless
    for trial in hopeless:
        runs = [c for c in evaluate.configs if c.cluster.topology == trial.config.cluster.topology]
        assert [c.requests.seed for c in runs] == [0]
    assert all(len(t.summaries) == 3 for t in tried.values() if t.verdict is Verdict.MEETS)
    # Every run is made once.
    assert len({c.model_dump_json() for c in evaluate.configs}) == len(evaluate.configs)
    assert len(found.runs) == len(evaluate.configs)
    assert len(tried) < 32


class Hole(Analytic):
    """One prefill worker more than the answer makes it worse."""

    def summary(self, config):
        found = super().summary(config)
        if config.cluster.topology == "6P11D":
            found |= {"slo_attainment": 0.2}
        return found


def test_a_hole_beside_the_answer_is_told():
    best = ask(policies=["jsq"], gpus=["h100"]).best.trial.config
    assert best.cluster.topology == "5P11D"
    found = ask(Hole(), policies=["jsq"], gpus=["h100"])
    assert found.best.trial.config == best
    told = "xPyD TP1: not monotone: 5P11D meets the objective and 6P11D does not"
    assert found.best.notes == [told]


class Borderline(Analytic):
    """Clusters of few GPUs attain the target under the first seed alone."""

    def summary(self, config):
        found = super().summary(config)
        if config.n_gpus < 17 and config.requests.seed == 0:
            found |= {"slo_attainment": 1.0}
        return found


def test_what_one_seed_says_on_the_way_is_no_answer():
    """Clusters that only the first seed favours are judged by more before they are the answer."""
    found = ask(Borderline(), policies=["jsq"], gpus=["h100"], max_gpus=32)
    assert found.best.trial.config.n_gpus >= 14
    assert math.prod(attained(found.best.trial.config)) >= 0.9
    assert len(found.best.trial.summaries) >= 3


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
    assert lost.config.cluster.n_decode == config.cluster.n_decode - 1
    assert lost.attainment.mean == pytest.approx(math.prod(attained(lost.config)))
    assert lost.verdict is Verdict.MISSES


def test_savings_are_paired_over_seeds():
    found = ask(Analytic(0.04), gpus=["h100"], looks=(3, 5))
    (saving,) = found.gains
    assert (saving.policy, saving.reference) == ("eldr", "jsq")
    assert len(saving.by_seed) == PAIRED_SEEDS
    differences = np.subtract(saving.reference_by_seed, saving.by_seed)
    assert saving.gain.mean == pytest.approx(differences.mean())
    assert saving.gain.low <= saving.gain.mean <= saving.gain.high
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
        t for a in found.rows for t in a.trials
        if t.verdict is Verdict.MEETS and t.config.n_gpus <= 32
    ]  # fmt: skip
    assert found.front
    for trial in good:
        assert any(
            f.per_user >= trial.per_user - 1e-9 and f.per_gpu >= trial.per_gpu - 1e-9
            for f in found.front
        )
    speeds = [(f.per_user, f.per_gpu) for f in found.front]
    assert speeds == sorted(speeds, key=lambda s: (-s[0], s[1]))
    assert found.best.trial.config.n_gpus == min(f.config.n_gpus for f in found.front)


def test_no_cluster_is_large_enough():
    found = ask(max_gpus=8, gpus=["h100"])
    assert found.best is None
    assert found.margin is None
    assert found.runner_up is None
    for answer in found.rows:
        assert any(
            "needs 5 prefill and" in reason or "even 7P7D attains" in reason
            for reason in answer.reasons
        )
    json.dumps(found.record(), allow_nan=False)


def test_arithmetic_alone_rules_out_what_it_can():
    evaluate = Analytic()
    with simulated_by(evaluate):
        found = find(
            Space(make_config(BASE), gpus=["h100"], tensor_parallel_sizes=[1]),
            Cheapest(Objective(parse_slo(["tpot:2"]), 0.9)),
            RunCache(1),
        )
    assert found.best is None
    assert "more than the TPOT bound of 2 ms" in found.rows[0].reasons[0]
    with simulated_by(evaluate):
        found = find(
            Space(make_config(BASE), gpus=["h100"]),
            Cheapest(Objective(parse_slo(["ttft:1"]), 0.9)),
            RunCache(1),
        )
    assert "takes longer than the TTFT bound of 1 ms" in found.rows[0].reasons[0]
    found = ask(evaluate, config={"request_rate": 2_000}, max_gpus=4)
    assert "at full speed, more than 4 GPUs" in found.rows[0].reasons[0]
    found = ask(
        evaluate, config={"model": "Qwen3-235B-A22B"}, tensor_parallel_sizes=[1, 2],
        data_parallel_sizes=[1],
    )  # fmt: skip
    reasons = [reason.split(":")[0] for reason in found.rows[0].reasons]
    assert {"xPyD TP1", "xPyD TP2", "xC TP1", "xC TP2"} <= set(reasons)
    assert evaluate.configs == []


def test_a_model_takes_the_workers_that_hold_it():
    """Qwen3-235B-A22B in bfloat16 does not fit on four H100, see docs/parallelism.md."""
    found = ask(
        config={"model": "Qwen3-235B-A22B"}, tensor_parallel_sizes=[], gpus=["H100"],
        data_parallel_sizes=[1],
    )  # fmt: skip
    assert {t.config.cluster.tensor_parallel_size for a in found.rows for t in a.trials} == {8}


def test_bounds_hold_in_simulations():
    """With one worker less than the bound asks for, the objective is missed by far."""
    config = make_config(
        {"request_rate": 60, "duration": 8, "warmup": 2, "output_len": 16, "gpu": "A100"}
        | {"goodput": {"ttft": 1000, "tpot": 12}}
    )
    objective = Objective(config.output.goodput, 0.95)
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


def test_prompts_that_decode_workers_compute_bound_no_prefill_workers():
    load = {"request_rate": 400, "duration": 8, "output_len": 16, "gpu": "A100"}
    config = make_config(load | {"goodput": {"ttft": 1000}, "topology": "1P16D"})
    objective = Objective(config.output.goodput, 0.95)
    assert bounds(config, objective).n_prefill > 1
    local = config.model_copy(update={"conditional_disagg": "noncached:4096"})
    assert bounds(local, objective).n_prefill == 1


def test_a_plan_of_sessions_measures_all_their_turns():
    config = make_config({"workload": "chat", "sessions": 60, "request_rate": 1, "topology": "1C"})
    objective = Objective(LEVEL)
    same = _with_window(config, objective, {"num_requests": None, "warmup": None})
    assert same == config
    assert (
        same.requests.n_sessions == 60
    )  # 30 s of sessions whose users think for a minute have one turn
    check_requests(config, 1.0)
    with pytest.raises(InputError, match="3 turns in the measured window are too few"):
        check_requests(config.replace(sessions=3, turns="1"), 1.0)


# -- the highest rate ----------------------------------------------------------------------------


def test_the_highest_rate_of_a_cluster():
    config = make_config(BASE | {"topology": "6P10D"})
    objective = Objective(LEVEL, 0.9, (3, 5))
    with simulated_by(Analytic(0.03)):
        found = find(
            Space(config, policies=["jsq", "eldr"], gpus=["h100", "mi300x"]),
            HighestRate(objective),
            RunCache(1),
        )
    assert len(found.rows) == 4
    for each in found.rows:
        for seed, rate in enumerate(each.by_seed):
            luck = 0.03 * np.random.default_rng([seed, 5]).normal()

            def above(r, each=each, luck=luck):
                at = each.config.model_copy(update={"request_rate": r})
                return math.prod(attained(at, luck)) - 0.9

            assert rate == pytest.approx(brentq(above, 1.7, 200.0), rel=0.011)
        assert each.figure.low < each.figure.mean < each.figure.high
    assert [(g.gpu, g.policy, g.reference) for g in found.gains] == [
        ("H100", "eldr", "jsq"),
        ("MI300X", "eldr", "jsq"),
    ]
    ours, theirs = (
        np.array(r.by_seed)
        for policy in ("eldr", "jsq")
        for r in found.rows
        if (r.gpu, r.policy) == ("H100", policy)
    )
    assert found.gains[0].gain.mean == pytest.approx(100 * np.mean(ours / theirs - 1))


def test_a_cluster_that_carries_nothing():
    objective = Objective(parse_slo(["tpot:2"]), 0.9)
    with simulated_by(Analytic()):
        found = find(
            Space(make_config(BASE | {"topology": "1P1D"})), HighestRate(objective), RunCache(1)
        )
    assert found.best is None
    assert "more than the TPOT bound" in found.rows[0].reasons[0]
    json.dumps(found.record(), allow_nan=False)


def test_the_best_split_is_that_of_all_splits():
    """Twelve GPUs; the estimate, which knows nothing of these clusters, begins somewhere."""
    config = make_config(BASE | {"policy": "jsq", "duration": 60})
    objective = Objective(LEVEL, 0.9, (3,))
    with simulated_by(Analytic()):
        found = find(
            Space(config, tensor_parallel_sizes=[1]), HighestRate(objective, 12), RunCache(1)
        )

    def highest(x):
        at = config.replace(goodput=LEVEL, topology=f"{x}P{12 - x}D")

        def above(rate):
            return math.prod(attained(at.model_copy(update={"request_rate": rate}))) - 0.9

        return brentq(above, 1e-6, 200.0)

    best = max(range(1, 12), key=highest)
    assert found.best.config.cluster.topology == f"{best}P{12 - best}D"
    assert found.best.figure.mean == pytest.approx(highest(best), rel=0.011)
    assert len(found.best.by_seed) == 3
    assert all(each.config.n_gpus <= 12 for each in found.rows)
    with pytest.raises(InputError, match="gpus: 1: xPyD TP1: 2 GPUs are more than 1"):
        find(
            Space(make_config(BASE | {"policy": "eldr"}), tensor_parallel_sizes=[1]),
            HighestRate(objective, 1),
        )


def test_the_splits_beside_the_best_are_simulated(monkeypatch):
    """Two are tried first, three and more workers off."""
    monkeypatch.setattr(split, "_TRIED", 2)
    monkeypatch.setattr(split, "ESTIMATED", 1.0)
    config = make_config(BASE | {"policy": "jsq", "duration": 60})
    with simulated_by(Analytic()):
        space = Space(config, tensor_parallel_sizes=[1])
        found = find(space, HighestRate(Objective(LEVEL, 0.9, (3,)), 24), RunCache(1))
    assert found.best.config.cluster.topology == "7P17D"
    tried = {row.config.cluster.topology for row in found.rows}
    assert {"8P16D", "6P18D"} <= tried


# -- bad input -----------------------------------------------------------------------------------


@on_each(
    "arguments, message",
    [
        ({"gpus": ["h1000"]}, "gpu: unknown GPU 'h1000'"),
        ({"gpus": ["h100", "H100"]}, "gpu: H100, H100 names a value twice"),
        ({"policies": ["best"]}, "policy: unknown policy 'best'"),
        ({"policies": ["jsq", "jsq"]}, "policy: jsq, jsq names a value twice"),
        ({"prices": {"h100": 2.0}}, "price: none of MI300X"),
        ({"prices": {"h1000": 2.0}}, "gpu: unknown GPU 'h1000'"),
        ({"max_gpus": 1}, "max_gpus: 1"),
        ({"max_gpus": 10**12}, "max_gpus: 1,000,000,000,000 is above the limit (allowed: at most"),
        ({"prices": {"h100": 1e308, "mi300x": 1}}, "price: 1e+308 an hour is above the limit"),
        ({"prices": {"h100": 2.0, "H100": 1.0}}, "price: h100, H100 names one GPU twice"),
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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"data_parallel_size": 2}}, r"decode\.data_parallel_size: a plan"),
        (
            {"decode": {"tensor_parallel_size": 2}},
            r"decode\.tensor_parallel_size: a plan gives all",
        ),
    ],
)
def test_workers_that_a_plan_cannot_size_are_refused(values, message):
    objective = Objective(LEVEL)
    with pytest.raises(InputError, match=message):
        find(Space(make_config(values), max_gpus=4), Cheapest(objective))


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
    found = find(
        Space(
            make_config(GROUPS),
            max_gpus=8,
            axes={"num_redundant_experts": (0, 32)},
            tensor_parallel_sizes=(1,),
        ),
        Cheapest(objective),
        RunCache(1),
    )
    trials = {each.policy: each.trial for each in found.rows}
    assert set(trials) == {f"jsq, num_redundant_experts={n}" for n in (0, 32)}
    assert (
        len({(trial.config.cluster.topology, trial.config.n_gpus) for trial in trials.values()})
        == 1
    )
    blocks = [t.summaries[0]["kv_blocks_per_worker"] for t in trials.values()]
    model = load_model("Qwen3-30B-A3B")
    paid = 16 * model.n_moe_layers * model.bytes_per_expert  # 32 more instances on 2 GPUs
    assert blocks[0] - blocks[1] == pytest.approx(paid / (16 * model.kv_bytes_per_token), abs=1)


def test_engines_of_a_worker_are_searched_in_each_pool():
    """Every pair of pools stands once; the cheapest is that of all clusters of all pairs."""
    sizes, engines = [1, 2], [1, 4]
    made = [
        tuple((own.tensor_parallel_size, own.data_parallel_size, own.expert_parallel)
              for own in (pool.parallelism for pool in shape.pools))
        for shape in shapes(make_config(BASE | {"policy": "eldr"}), sizes, engines)
    ]  # fmt: skip
    assert len(set(made)) == len(made)
    workers = list(itertools.product(sizes, engines))
    pairs = {tuple(worker[:2] for worker in pools) for pools in made}
    assert pairs == set(itertools.product(workers, workers))
    assert all(whole or n == 1 for pools in made for _, n, whole in pools)
    found = ask(
        policies=["eldr"], gpus=["h100"], data_parallel_sizes=engines, config={"request_rate": 40}
    )
    best = found.best.trial.config
    assert (best.pool("prefill").data_parallel_size, best.cluster.data_parallel_size) == (1, 4)
    costs = [
        x * p + y * d
        for p, d, x, y in itertools.product(engines, engines, range(1, 33), range(1, 33))
        if x * p + y * d <= 32
        and math.prod(
            attained(
                make_config(
                    BASE | {"policy": "eldr", "gpu": "H100", "topology": f"{x}P{y}D"}
                    | {"request_rate": 40, "goodput": LEVEL, "data_parallel_size": d}
                    | {"enable_expert_parallel": True, "prefill": {"data_parallel_size": p}}
                )
            )
        ) >= 0.9
    ]  # fmt: skip
    assert best.n_gpus == min(costs)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("3P2D:tp8", "its 40 GPUs are more than 32"),
        ("1P2D:tp3", "refused: tensor_parallel_size: 3 does not divide"),
        ("1P1D", "it attains 0.0% (TTFT "),
        ("4P8D:tp1", "it attains "),
        ("6P14D", " GPUs where the answer takes "),
    ],
)
def test_why_not_is_answered(cluster, said):
    found = ask(policies=["jsq"], gpus=["h100"], why_not=[cluster])
    assert found.best.trial is not None
    ((name, text),) = found.why_not
    assert name == cluster
    assert said in text


def test_why_not_compares_prices_where_there_are_some():
    found = ask(policies=["jsq"], gpus=["h100"], prices={"h100": 0.4}, why_not=["6P14D", "9P20D"])
    cost = found.best.cost
    for (_, text), gpus in zip(found.why_not, (20, 29), strict=True):
        told = f"takes {0.4 * gpus:g} $ an hour where the answer takes {cost:g}"
        assert text.endswith(told), text


def test_a_cluster_that_was_not_searched_may_be_cheaper():
    """Only workers of four GPUs are searched."""
    sizes = {"tensor_parallel_sizes": [4], "policies": ["jsq"], "gpus": ["h100"]}
    ((_, text),) = ask(**sizes, why_not=["6P14D"]).why_not
    assert re.search(r"at 20 GPUs, not searched, and cheaper than the answer's \d+$", text)


@pytest.mark.parametrize(
    "text", ["2", "1P2D:tp", "1P2D:xp2", "2C:tp1+tp2", "1P", "1P1D:tp1+tp1+tp1"]
)
def test_a_cluster_that_is_none_is_told(text):
    with pytest.raises(InputError, match="allowed: "):
        ask(policies=["jsq"], gpus=["h100"], why_not=[text])


def test_groups_have_no_bound_and_fill_their_gpus():
    config = make_config(GROUPS | {"tensor_parallel_size": 2, "goodput": {"tpot": 1.0}})
    found = bounds(config, Objective(config.output.goodput))
    assert (found.n_prefill, found.n_decode, found.impossible) == (1, 1, "")
    template = ClusterTemplate(config, found, max_gpus=17)
    assert template.max_workers == 4
    assert template.at(1, 2).n_gpus == 12


@pytest.mark.long
def test_experts_on_gpus_of_their_own_are_a_dimension():
    """AFD beside wide EP: each pool's workers, the GPUs of both sides, and what is simulated."""
    config = make_config({name: GROUPS[name] for name in GROUPS if name != "expert_placement"})
    made = list(shapes(config, [1], [1, 2], [0, 2]))
    both = {
        (str(shape.cluster.topology), shape.pool("prefill").parallelism.n_gpus) for shape in made
    }
    assert {("1P2A2F", 1), ("1P2A2F", 2), ("1P1D", 1), ("1P1D", 2), ("1C", 1)} <= both
    only = list(shapes(config, [1], [1, 2], [2]))
    assert {str(shape.cluster.topology) for shape in only} == {"1P2A2F"}
    objective = Objective(parse_slo(["ttft:2000,tpot:100"]), attainment=0.9, looks=(2,))
    template = ClusterTemplate(only[0], bounds(only[0], objective), max_gpus=16)
    assert template.worker_sizes == (2, 4)
    assert [str(template.at(3, y).cluster.topology) for y in (1, 2)] == ["3P2A2F", "3P2x2A2F"]
    assert template.at(3, 2).n_gpus == template.cost(3, 2) == 14
    found = find(
        Space(
            config, max_gpus=8, tensor_parallel_sizes=(1,), data_parallel_sizes=(2,), ffn_ranks=(2,)
        ),
        Cheapest(objective, why_not=["1P2A4F:tp1"]),
        RunCache(1),
    )
    best = found.best.trial
    assert best.config.cluster.topology == "1P2A2F"
    assert best.summaries[0]["group"]["ffn_ranks"] == 2
    assert "takes 7 GPUs where the answer takes 6" in found.why_not[0][1]
    short = make_config(config.model_dump(exclude_unset=True) | {"duration": 1.5, "warmup": 0.5})
    split = find(
        Space(short, tensor_parallel_sizes=(1,), data_parallel_sizes=(1, 2), ffn_ranks=(2,)),
        HighestRate(objective, 7),
        RunCache(1),
    )
    carried = split.best.trial.config
    assert carried.pools[-1].ffn_ranks == 2
    assert carried.n_gpus <= 7


@pytest.mark.parametrize(
    ("ranks", "engines", "says"),
    [
        ((2,), (1,), "ffn_ranks: .*--data-parallel-size 2 or more"),
        ((-1,), (2,), "ffn_ranks: -1"),
        ((1025,), (2,), "ffn_ranks: 1,025"),
    ],
)
def test_experts_on_gpus_of_their_own_need_engines(ranks, engines, says):
    with pytest.raises(InputError, match=says):
        find(
            Space(make_config(BASE), ffn_ranks=ranks, data_parallel_sizes=engines),
            Cheapest(Objective(LEVEL)),
            RunCache(1),
        )


def test_redundant_experts_need_engines_that_share_experts():
    with pytest.raises(InputError, match=r"num_redundant_experts: .*--data-parallel-size 2"):
        find(
            Space(make_config(BASE), axes={"num_redundant_experts": (0, 16)}),
            Cheapest(Objective(LEVEL)),
        )
    with pytest.raises(InputError, match=r"num_redundant_experts: 16, 16 names a value twice"):
        find(
            Space(make_config(GROUPS), axes={"num_redundant_experts": (16, 16)}),
            Cheapest(Objective(LEVEL)),
        )


@pytest.mark.parametrize("topology", ["1P1D", "1C", "1P"])
def test_a_pool_s_last_worker_cannot_be_lost(topology):
    config = make_config({"topology": topology, "request_rate": 1, "goodput": {"tpot": 50}})
    template = ClusterTemplate(config, bounds(config, Objective(LEVEL)), 8)
    trial = Trial(config, Verdict.MEETS, Interval(1.0, 1.0, 1.0), ())
    found = CandidateRow("H100", "jsq", template=template, trial=trial, trials=[trial])
    assert found.beside() is trial
    for less in ({"prefill": -1}, {"decode": -1}):
        assert found.beside(**less) is None


def test_a_rate_of_few_requests_is_found_in_a_longer_window():
    """A cluster that carries less than a hundred requests in the window is no cluster without."""
    config = make_config(BASE | {"topology": "1P1D", "duration": 10, "policy": "jsq"})
    evaluate = Analytic()
    with simulated_by(evaluate):
        found = find(
            Space(config, gpus=["H100"]), HighestRate(Objective(LEVEL, 0.9, (3,))), RunCache(1)
        )

    def above(rate):
        return math.prod(attained(found.best.trial.config.model_copy(
            update={"request_rate": rate}))) - 0.9  # fmt: skip

    rate = brentq(above, 0.01, 5.9)
    assert rate * 10 < 100
    assert found.best.figure.mean == pytest.approx(rate, rel=0.01)
    assert all(
        c.requests.request_rate * c.requests.duration >= 100 - 1e-9 for c in evaluate.configs
    )


def test_the_rate_of_a_dense_model_and_of_priced_co_located_workers():
    base = {"topology": "2C", "duration": 4, "warmup": 0, "input_len": 500, "output_len": 8}
    objective = Objective(parse_slo(["ttft:5000"]), 0.5, (2,))
    for changes, prices in (({"model": "Llama-3.1-8B"}, {}), ({}, {"h100": 2.0})):
        with simulated_by(simulate_summary):
            found = find(
                Space(make_config(base | changes), prices=prices),
                HighestRate(objective),
                RunCache(1),
            )
        assert found.best.figure.mean > 25
        assert found.has_prices == bool(prices)
