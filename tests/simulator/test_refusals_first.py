"""What is refused is refused before a routing trace is read or drawn."""

import warnings
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.simulator import run
from eldr_sim.simulator.setup import prepare, run_routing
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import make_config

from .test_neutral_fields import NEUTRAL
from .test_neutral_fields import REFUSED as REFUSED_FIELDS

CO_LOCATED = {"topology": "2C"}
REFUSED = [
    {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "acceptance": "best"}},
    {"acceptance": "glm-5.2"},
    {"moe_backend": "marlin"},
    {"gpu": "abacus"},
    {"model": "Qwen99"},
    {"model": "DeepSeek-R1", "gpu": "A100-80GB"},
    {"enable_elastic_ep": True},
    {"scheduler_recv_interval": 3},
    {"tokenizer_mode": "microbatch_parallel", "frontend": "none"},
    {"conditional_disagg": "sometimes"},
    {"conditional_disagg": "noncached:64", "policy": "eldr"},
    CO_LOCATED | {"conditional_disagg": "noncached:64"},
    CO_LOCATED | {"prefill": {"max_num_seqs": 4}},
    {"topology": "2P", "output_len": 5},
    {"topology": "2P", "decode": {"max_num_seqs": 4}},
    {"kv_reserve": "arrival", "policy": "eldr"},
    {"num_gpu_blocks_override": 0},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_refusals_come_before_routing(fields, monkeypatch):
    """INV-12."""

    def drawn(*_):
        raise AssertionError("routing was drawn")

    monkeypatch.setattr(prepare, "trace_of", drawn)
    with pytest.raises(InputError):
        prepare.prepare(make_config({"topology": "1P1D", "policy": "jsq"} | fields))


TWO_GPUS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
LOG = "timestamp,input_length,output_length\n" + "".join(f"{i},100,10\n" for i in range(30))
#: Refused when requests are made, or policies, faults and the autoscaler are.
REFUSED_LATER = [
    CO_LOCATED | {"policy": "eldr"},
    {"workload": "missing.csv"},
    {"workload": "nosuch"},
    {"workload": "bad.csv"},
    {"workload": "empty.csv"},
    {"workload": "log.csv"},
    {"workload": "log.csv", "time_unit": "s", "log_from": "500s"},
    {"workload": "log.csv", "columns": "time_s=zz"},
    {"fail": ["decode:9@1s+1s"]},
    {"fail": ["x:0@1s+1s"]},
    {"events": "missing.yaml"},
    {"autoscale": "hpa", "fail": ["decode:0@1s+1s"]},
    {"autoscale": "hpa", "min_workers": [5]},
    {"autoscale": "hpa", "min_workers": [1, 1, 1]},
    {"autoscale": "hpa", "initial_workers": [3]},
    {"warmup": 100, "num_requests": 5},
    {"request_rate": 1e-9, "duration": 5},
    {"load": "nosuch"},
    {"domain_mix": {"nosuch": 1.0}},
    {"domain_mix": {"code": -1}},
    {"policy": "eldr:tau=-3"},
    {"policy": "jsq:x=1"},
    {"prefill_policy": "saturation:margin=-1"},
    {"queue_order": "nosuch"},
    {"autoscale": "hpa", "gpu_budget": 1},
    {"autoscale": "hpa", "gpu_budget": 1, "topology": "2P2D", "initial_workers": [1]},
    {"autoscale": "none:n=1", "gpu_budget": 2, "topology": "2P2D", "min_workers": [2, 1]},
    TWO_GPUS | {"expert_placement": "eldr"},
    TWO_GPUS | {"expert_placement": "home"},
    TWO_GPUS | {"expert_placement": "eldr", "policy": "domain"},
    TWO_GPUS | {"expert_placement": "eldr", "policy": "marginal_cost"},
    TWO_GPUS | {"policy": "seconds"},
    TWO_GPUS | CO_LOCATED | {"policy": "seconds"},
    {"trace": "nosuch"},
]


@pytest.mark.parametrize("fields", REFUSED_LATER, ids=str)
def test_refusals_of_loads_and_policies_come_before_routing(fields, monkeypatch, tmp_path):
    def drawn(*_):
        raise AssertionError("routing was drawn")

    monkeypatch.chdir(tmp_path)
    for name, text in (("bad", "a,b\n1,2\n"), ("empty", LOG[:40]), ("log", LOG)):
        (tmp_path / f"{name}.csv").write_text(text)
    monkeypatch.setattr(run_routing, "drawn_trace", drawn)
    if "trace" not in fields:
        monkeypatch.setattr(prepare, "trace_of", drawn)
    given = {"topology": "1P1D", "policy": "jsq"} | fields
    with pytest.raises(InputError):
        run.simulate(make_config(given))
    with pytest.raises(InputError):
        run.prepare_run(make_config(given))


FINE = [
    TWO_GPUS | {"expert_placement": "eldr", "policy": "eldr"},
    TWO_GPUS | {"expert_placement": "eplb", "policy": "jsq"},
    TWO_GPUS | {"policy": "marginal_cost"},
    {"autoscale": "hpa", "gpu_budget": 2},
    {"autoscale": "hpa", "gpu_budget": 2, "topology": "2P2D", "initial_workers": [1]},
    {"autoscale": "none:n=1", "gpu_budget": 2, "topology": "2P2D"},
]


@pytest.mark.parametrize("fields", FINE, ids=str)
def test_nothing_right_is_refused_early(fields, monkeypatch):
    def drawn(*_):
        raise KeyError("routing was drawn")

    monkeypatch.setattr(prepare, "trace_of", drawn)
    with pytest.raises(KeyError, match="drawn"):
        run.prepare_run(make_config({"topology": "1P1D", "policy": "jsq"} | fields))


@pytest.mark.parametrize("policy", ["jsq", "eldr", "domain", "marginal_cost", "oracle"])
def test_what_is_right_comes_to_routing(policy, monkeypatch, tmp_path):
    """The checks refuse nothing that only routing can tell."""

    def drawn(*_):
        raise KeyError("routing was drawn")

    monkeypatch.setattr(prepare, "trace_of", drawn)
    for topology in ("1P1D", "2C"):
        if topology == "2C" and policy in ("eldr", "marginal_cost"):
            continue  # no prefill makes the signatures that they read
        with pytest.raises(KeyError, match="drawn"):
            run.prepare_run(make_config({"topology": topology, "policy": policy}))


#: Values of fields, besides the declared choices: each is right beside something.
VALUES = {
    **{name: [value] for name, value in (NEUTRAL | REFUSED_FIELDS).items() if value is not None},
    "topology": ["1P1D", "2P2D", "2C", "2P", "1P1D1X"],
    "policy": [*registry.names("decode"), "eldr:tau=0.2", "jsq:x=1"],
    "prefill_policy": registry.names("prefill"),
    "queue_order": registry.names("queue"),
    "expert_placement": registry.names("placement"),
    "replica_choice": registry.names("replica"),
    "autoscale": registry.names("scaling"),
    "data_parallel_size": [1, 2], "tensor_parallel_size": [1, 2], "num_redundant_experts": [0, 8],
    "workload": ["task", "language", "chat", "agent", "missing.csv"],
    "fail": [("decode:0@1s+1s",), ("prefill:0@1s",), ("worker:0@1s",)],
    "domain_mix": [{"code": 1.0}, {"nosuch": 1.0}],
    "gpu_budget": [1, 8], "kv_signal": ["exact", "approx:ttl=120"], "output_len": [1, 4],
    "conditional_disagg": ["noncached:0", "noncached:64", "seconds"],
    "speculative_config": [
        {"method": method, "num_speculative_tokens": 2} for method in ("ngram", "mtp", "eagle3")
    ],
    "max_num_batched_tokens": [2, 512], "max_model_len": [64, 32768], "load": ["sine:1,4,period=9"],
    "min_workers": [(1,), (1, 1), (3,)], "initial_workers": [(1,), (1, 1)], "tables": [],
    "trace": [], "model": [], "gpu": ["h100", "b200", "mi300x"], "extra_llm_api_options": [],
}  # fmt: skip
CHOICES = {
    name: choices for name, field in RUN_FIELDS.items()
    if (choices := [one for one in get_args(field.annotation) if isinstance(one, str)])
}  # fmt: skip


@st.composite
def some_fields(draw):
    """Two to five fields of a run with values that may or may not fit."""
    names = sorted(name for name in VALUES | CHOICES if VALUES.get(name, True))
    chosen = draw(st.lists(st.sampled_from(names), min_size=2, max_size=5, unique=True))
    return {name: draw(st.sampled_from(VALUES.get(name) or CHOICES[name])) for name in chosen}


@given(some_fields())
def test_a_refused_combination_is_refused_before_drawing(fields):
    """INV-12: what is not refused without routing runs."""
    base = {"topology": "1P1D", "policy": "jsq", "num_requests": 6, "output_len": 3, "warmup": 0}
    try:
        config = make_config(base | fields)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(run_routing, "drawn_trace", None)  # drawing would be a TypeError
            run.check_run(config)
    except InputError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.simulate(config)


def test_nothing_is_drawn_twice(monkeypatch):
    """Routing of a model and its domains, in the checks, the run and a second run alike."""
    drawn, real = [], run_routing.drawn_trace

    def count(*given, **more):
        drawn.append(given)
        return real(*given, **more)

    monkeypatch.setattr(run_routing, "drawn_trace", count)
    run_routing._drawn.cache_clear()
    for policy in ("jsq", "eldr"):
        config = make_config({"topology": "1P1D", "policy": policy, "num_requests": 6, "warmup": 0})
        run.check_run(config)
        run.simulate(config)
    assert len(drawn) == 1
