"""Axes of plans, what other inputs would have answered, and plans that are interrupted."""

import json
import math

import pytest

from eldr_sim.errors import InputError
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search.answer import _kv_bytes
from eldr_sim.planning.search.axes import Axes, Space, parse_axes
from eldr_sim.planning.search.goals import Cheapest, find
from eldr_sim.planning.search.sensitivity import _by_gpu, _inputs
from eldr_sim.planning.search.shapes import shapes
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare

from .analytic import BASE, LEVEL, Analytic, attained, simulated_by

TARGET = 0.9


class Ordered(Analytic):
    """Queues in order of length make decode workers faster by half, and prefill chunks slower."""

    def summary(self, config):
        found = super().summary(config)
        if config.cluster.n_prefill == 0:
            return found | {"slo_attainment": 0.0}
        speed = 1.5 if config.policies.queue_order == "sjf" else 1.0
        ttft, _ = attained(config)
        _, tpot = attained(config.replace(request_rate=config.requests.request_rate / speed))
        return found | {"slo_attainment": ttft * tpot}


def ask(evaluate, config=BASE, sensitivity=False, **arguments):
    with simulated_by(evaluate):
        return find(
            Space(
                make_config(config),
                policies=["jsq", "eldr"],
                gpus=["H100"],
                max_gpus=32,
                tensor_parallel_sizes=[1],
                **arguments,
            ),
            Cheapest(Objective(LEVEL, TARGET, (3,)), sensitivity=sensitivity),
            RunCache(1),
        )


def cheapest(evaluate, config):
    """Fewest GPUs of every cluster of one GPU a worker, by brute force, the smallest first."""
    for gpus in range(2, 33):
        for x in range(1, gpus):
            each = config.replace(topology=f"{x}P{gpus - x}D")
            if evaluate.summary(each)["slo_attainment"] >= TARGET:
                return gpus
    raise AssertionError("none")


def test_any_field_is_an_axis():
    evaluate = Ordered()
    found = ask(evaluate, axes={"queue_order": ["fcfs", "sjf"]})
    base = make_config(BASE | {"goodput": LEVEL})
    for row in found.rows:
        policy, _, order = row.policy.partition(", queue_order=")
        config = base.replace(policy=policy, queue_order=order)
        assert row.cost == cheapest(evaluate, config), row.policy
    assert len(found.rows) == 4
    assert found.best.policy == "eldr, queue_order=sjf"
    assert found.record()["answer"]["policy"] == found.best.policy


def test_an_axis_has_the_memory_share_of_its_own_engine_and_gpu():
    """What nobody has said is each configuration's own default; what somebody has said stays."""
    base = make_config({"engine": "sglang", "policy": "jsq"})
    values = {"engine": ["vllm", "sglang", "trtllm"], "gpu": ["H100", "H200"]}
    for found in Axes(values).configs(base):
        engine, gpu = found.engine.engine, found.cluster.gpu
        own = make_config({"engine": engine, "gpu": gpu, "policy": "jsq"})
        assert found.engine.gpu_memory_utilization == own.engine.gpu_memory_utilization
        assert found.engine.block_size == own.engine.block_size
    said = base.replace(gpu_memory_utilization=0.5)
    assert {one.engine.gpu_memory_utilization for one in Axes(values).configs(said)} == {0.5}


def test_of_clusters_as_cheap_the_smallest_tiers_are_the_answer():
    """The analytic runs know no tiers: each size needs as many GPUs."""
    sizes = parse_axes(["kv_tier=host:8GB..64GB,load=20GB/s"])["kv_tier"]
    found = ask(Ordered(), axes={"kv_tier": sizes[::-1]})
    answer = found.record()["answer"]
    assert found.best.policy.endswith("kv_tier=host:8GB,load=20GB/s")
    made = make_config(BASE | {"topology": answer["topology"]})
    assert answer["kv_tiers_gb"] == 8 * (made.cluster.n_prefill or made.cluster.n_decode)
    everywhere = _kv_bytes(make_config({
        "topology": "3P4D", "tensor_parallel_size": 4, "kv_tier": [
            "a:1GB,load=1GB/s", "b:10GB,load=1GB/s,scope=node", "c:100GB,load=1GB/s,scope=cluster",
        ]}))  # fmt: skip
    assert everywhere == 3e9 + 20e9 + 100e9


def test_axes_are_parsed():
    assert parse_axes(["max_num_seqs=64,128", "queue_order=fcfs,sjf", "max_num_seqs=256"]) == {
        "max_num_seqs": [64, 128, 256], "queue_order": ["fcfs", "sjf"],
    }  # fmt: skip
    assert parse_axes(["policy=jsq,eldr:tau=0.2,layer_mask=0,3"]) == {
        "policy": ["jsq", "eldr:tau=0.2,layer_mask=0,3"]
    }
    tiers = parse_axes(["kv_tier=default,host:126GB,load=20GB/s"])
    configs = list(Axes(tiers).configs(make_config({})))
    assert [config.kv.kv_tier for config in configs] == [(), ("host:126GB,load=20GB/s",)]
    assert Axes(tiers).label(configs[0]) == "round_robin, kv_tier=none"
    assert parse_axes(["block_size=[16, 32]"]) == {"block_size": [16, 32]}
    assert parse_axes(["kv_tier=host:0GB..64GB,load=20GB/s"])["kv_tier"] == [
        [], *([f"host:{size}GB,load=20GB/s"] for size in (1, 2, 4, 8, 16, 32, 64)),
    ]  # fmt: skip
    assert parse_axes(["kv_tier=host:200GB..1TB,load=20GB/s"])["kv_tier"] == [
        ["host:250GB,load=20GB/s"], ["host:500GB,load=20GB/s"], ["host:1000GB,load=20GB/s"],
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"kv_tier: .* a range such as"):
        parse_axes(["kv_tier=host:2TB..1TB,load=20GB/s"])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"topology": ["1P1D"]}, "topology: cannot be an axis of a plan"),
        ({"decode.tensor_parallel_size": [1, 2]}, "cannot be an axis of a plan"),
        ({"seed": [1, 2]}, "seed: cannot be an axis"),
        ({"queue_order": ["fcfs", "fcfs"]}, "queue_order: fcfs, fcfs names a value twice"),
        ({"queue_order": ["best"]}, "queue_order: "),
        ({"speed": [1, 2]}, "speed: no such field"),
    ],
)
def test_what_is_no_axis_is_refused(axes, message):
    with pytest.raises(InputError, match=message):
        list(Axes(axes).configs(make_config({})))


@pytest.mark.parametrize("text", ["queue_order", "=1", "queue_order="])
def test_axes_that_are_none(text):
    with pytest.raises(InputError, match="vary: "):
        parse_axes([text])


# -- sensitivity --------------------------------------------------------------------------------


def test_other_inputs_have_the_answers_that_their_own_plans_have():
    evaluate = Analytic()
    found = ask(evaluate, sensitivity=True)
    assert not ask(evaluate).sensitivity
    base = make_config(BASE | {"goodput": LEVEL, "policy": found.best.policy})
    seen = {}
    for each in found.sensitivity:
        factor = 1 + each.change
        level, rate = LEVEL.model_dump(exclude_none=True), base.requests.request_rate
        if each.name.endswith("bound"):
            level[each.name.split()[0].lower()] *= factor
        if each.name == "time of everything":
            level = {name: bound / factor for name, bound in level.items()}
        if each.name in ("request rate", "time of everything"):
            rate *= factor
        least = cheapest(evaluate, base.replace(request_rate=rate, goodput=level))
        assert each.trial.config.n_gpus == least, each
        assert each.changes == (
            str(each.trial.config.cluster.topology) != str(found.best.config.cluster.topology)
        )
        seen[each.name, round(each.change, 3)] = each.changes
    names = ("request rate", "output tokens", "TTFT bound", "TPOT bound", "time of everything")
    assert set(seen) == {(name, sign) for name in names for sign in (-0.1, 0.1)}
    assert seen["request rate", 0.1]  # more workers
    assert not seen["output tokens", 0.1]  # the analytic cluster knows no lengths


def test_prices_that_are_near_each_other_are_told():
    prices = {"H100": 1.0, "MI300X": 1.3}
    with simulated_by(Analytic()):
        found = find(
            Space(
                make_config(BASE),
                policies=["jsq"],
                max_gpus=40,
                gpus=list(prices),
                prices=prices,
                tensor_parallel_sizes=[1],
            ),
            Cheapest(Objective(LEVEL, TARGET, (3,)), sensitivity=True),
            RunCache(1),
        )
    costs = {row.gpu: row.cost for row in found.rows}
    told = [each for each in found.sensitivity if each.name.startswith("price of")]
    assert len(told) == 4
    for each in told:
        gpu = each.name.removeprefix("price of ")
        changed = {name: c * (1 + each.change * (name == gpu)) for name, c in costs.items()}
        best = min(changed, key=changed.get)
        assert each.trial.config.cluster.gpu == best
        assert each.changes == (best != found.best.gpu)


# -- money and power ----------------------------------------------------------------------------


def test_money_and_power_of_tokens():
    with simulated_by(Analytic()):
        found = find(
            Space(
                make_config(BASE),
                policies=["jsq"],
                gpus=["MI300X"],
                prices={"MI300X": 2.0},
                tensor_parallel_sizes=[1],
            ),
            Cheapest(Objective(LEVEL, TARGET, (3,))),
            RunCache(1),
        )
    answer, gpus = found.record()["answer"], found.best.cost / 2.0
    assert answer["price_per_million_prompt_tokens"] == pytest.approx(
        2.0 * gpus / 3600 / (100 * 20) * 1e6
    )
    joules = 750.0 * gpus / (64 * 20)  # a token
    assert answer["most_kwh_per_million_output_tokens"] == pytest.approx(joules * 1e6 / 3.6e6)


# -- interrupted plans --------------------------------------------------------------------------


class Interrupted(Analytic):
    """Ctrl-C after so many runs."""

    def __init__(self, after=math.inf):
        super().__init__(0.02)
        self.after = after

    def summary(self, config):
        if len(self.configs) > self.after:
            raise KeyboardInterrupt
        return super().summary(config)


def test_an_interrupted_plan_goes_on(run_cli, monkeypatch, tmp_path):
    def planned(evaluate, out, *arguments):
        monkeypatch.setattr("eldr_sim.planning.runs.runner.simulate_summary", evaluate)
        return run_cli(
            "plan", "--slo", "ttft:500,tpot:30", "--attainment", "0.9", "--policy", "jsq",
            "--duration", "60", "--output-len", "64", "--seeds", "3", "--jobs", "1", "-tp", "1",
            "--request-rate", "20", "--max-gpus", "32", "--out", out, *arguments,
        )  # fmt: skip

    whole = Interrupted()
    assert planned(whole, tmp_path / "whole")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"whole"}
    cut = Interrupted(after=10)
    code, _, err = planned(cut, tmp_path / "cut")
    assert code == 130
    assert err.splitlines()[-1].endswith("keeps 10 ended runs; --resume continues.")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "cut.unfinished"}
    code, _, err = planned(Interrupted(), tmp_path / "cut")
    assert (code, "holds a plan, 10 runs done (allowed: --resume" in err) == (2, True)
    rest = Interrupted()
    assert planned(rest, tmp_path / "cut", "--resume")[0] == 0
    assert len(rest.configs) == len(whole.configs) - 10
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "cut"}
    for name in ("plan.json", "points.parquet"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "cut" / "plan.json").read_text())["answer"] is not None


def test_a_plan_without_a_folder_keeps_nothing(run_cli):
    arguments = ["plan", "--slo", "ttft:500", "--request-rate", "20", "--resume"]
    code, _, err = run_cli(*arguments)
    assert (code, err) == (2, "Error: resume: there is no plan to continue without --out "
                              "(allowed: together with --out DIR)\n")  # fmt: skip


def test_a_default_that_leaves_no_memory_is_a_shape_that_does_not_fit():
    """SGLang's own default is below zero there: 16 engines of one H100 with 2,048 tokens each."""
    base = make_config(
        {"engine": "sglang", "model": "Qwen3-235B-A22B-FP8", "gpu": "H100", "topology": "1P1D"}
    )
    wide = [
        shape
        for shape in shapes(base.replace(max_num_batched_tokens=2048), [1], [1, 16])
        if shape.cluster.data_parallel_size == 16
    ]
    assert wide
    for shape in wide:
        with pytest.raises(InputError, match=r"H100 holds 0\.1 GB"):
            prepare(shape)


@pytest.mark.parametrize("topology", ["2P3D", "4C"])
def test_the_prices_of_gpus_add_up_to_that_of_the_cluster(topology):
    fields = {"topology": topology, "price_per_gpu_hour": 2.5, "tensor_parallel_size": 2}
    config = make_config(BASE | fields)
    assert sum(_by_gpu(config).values()) == pytest.approx(config.price_per_hour)


def test_slower_everything_is_the_same_load_in_other_seconds():
    """The work that arrives within a bound stays, whichever way all times change."""
    config = make_config(BASE | {"goodput": "ttft:500,tpot:30"})
    told = [fields for name, _, fields in _inputs(config, 8.0) if name == "time of everything"]
    assert len(told) == 2
    for fields in told:
        assert fields["request_rate"] * fields["ttft"] == pytest.approx(8.0 * 500)
        assert fields["request_rate"] * fields["tpot"] == pytest.approx(8.0 * 30)
