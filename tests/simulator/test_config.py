"""Run configurations: defaults, YAML, and one clear line for each wrong field."""

import math

import pytest
import yaml
from pydantic import ValidationError

from eldr_sim.docstrings import described_fields
from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.choice import split
from eldr_sim.simulator.setup.config.groups import GROUPS, RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import (
    Pool,
    RunConfig,
    get_field,
    make_config,
    parse_topology,
    read_config,
    set_field,
)
from eldr_sim.simulator.setup.config.speculative import SpeculativeConfig

from ..on_each import on_each


def test_defaults_are_those_of_the_paper_run():
    config = make_config({})
    assert (config.engine.model, config.cluster.gpu, config.requests.workload) == (
        "Qwen3-30B-A3B",
        "H100",
        "task",
    )
    assert config.requests.effective_rate == 60.0
    assert (config.requests.duration_s, config.requests.warmup_s) == (120.0, 30.0)
    assert config.effective_output_len == 512


def test_a_request_log_keeps_its_own_rate_and_lengths():
    config = make_config({"workload": "log.csv"})
    assert config.requests.effective_rate is None
    assert config.effective_output_len == "recorded"


def test_num_requests_has_no_warmup_unless_asked():
    assert make_config({"num_requests": 10}).requests.warmup_s == 0.0
    assert make_config({"num_requests": 10, "warmup": 3}).requests.warmup_s == 3.0


@pytest.mark.parametrize("text", ["inf", "Infinity", ".inf", math.inf])
def test_infinite_rate(text):
    assert make_config({"request_rate": text}).requests.request_rate == math.inf


@pytest.mark.parametrize(
    ("text", "workers"),
    [("8P16D", (8, 16)), ("1p1d", (1, 1)), (" 64P128D ", (64, 128)), ("4p", (4, 0))],
)
def test_topology(text, workers):
    assert parse_topology(text) == workers


@on_each("text", ["8P0D", "0P8D", "P16", "0P", "16D", "", "8P16", "-1P2D", "1.5P2D"])
def test_bad_topology(text):
    with pytest.raises(InputError, match=r"topology: .*such as 8P16D"):
        make_config({"topology": text})


@pytest.mark.parametrize(
    ("mask", "read"), [("greedy", "greedy"), ("3,0", (0, 3)), ([2, 1], (1, 2)), (4, (4,))]
)
def test_layer_mask(mask, read):
    config = make_config({"policy": {"name": "eldr", "layer_mask": mask}})
    spelled = ",".join(map(str, read)) if isinstance(read, tuple) else read
    assert config.policies.policy == f"eldr:layer_mask={spelled}"
    assert registry.parameters("decode", config.policies.policy).layer_mask == read
    assert get_field(config, "policy.layer_mask") == read
    assert get_field(config, "policy.tau") == 0.1
    assert get_field(config, "prefill_policy.tau") is None
    assert make_config(config.model_dump(mode="json")) == config


@on_each(
    "spelling, canonical",
    [
        ("jsq", "jsq"),
        ("JSQ", "jsq"),
        ({"name": "jsq"}, "jsq"),
        ("eldr:", "eldr"),
        ("eldr:tau=0.1", "eldr"),  # the default
        ("eldr:tau=.2", "eldr:tau=0.2"),
        ({"name": "ELDR", "tau": 0.2}, "eldr:tau=0.2"),
        ("eldr:layer_mask=5,3,0,tau=0.2", "eldr:tau=0.2,layer_mask=0,3,5"),
        (" eldr: layer_mask = 0, 3 ", "eldr:layer_mask=0,3"),
        ({"name": "eldr", "artifact": "a,b=c:d.npz"}, "eldr:artifact=a,b=c:d.npz"),
        ("marginal_cost:routing_overhead_ms=1", "marginal_cost:routing_overhead_ms=1.0"),
    ],
)
def test_a_policy_has_one_word(spelling, canonical):
    config = make_config({"policy": spelling})
    assert config.policies.policy == canonical
    if "=c" not in canonical:  # a file's name with a comma and an equals sign needs the mapping
        assert make_config({"policy": config.policies.policy}) == config


def test_a_list_of_policies():
    listed = "jsq, eldr:tau=0.2,layer_mask=0,3 ,p2c,,eldr"
    assert split(listed) == ["jsq", "eldr:tau=0.2,layer_mask=0,3", "p2c", "eldr"]
    assert split("") == []


def test_replace_validates_and_reaches_into_groups():
    base = make_config({"policy": "eldr", "decode": {"max_num_seqs": 8}})
    changed = base.replace(decode={"gpu": "H200"}, policy={"tau": 0.2}, seed=3)
    assert (changed.policies.policy, changed.requests.seed) == ("eldr:tau=0.2", 3)
    assert (changed.cluster.decode.gpu, changed.cluster.decode.max_num_seqs) == ("H200", 8)
    assert (
        changed.replace(policy={"layer_mask": "all"}).policies.policy
        == "eldr:tau=0.2,layer_mask=all"
    )
    assert (
        make_config({}).replace(policy={"name": "eldr", "tau": 0.2}).policies.policy
        == "eldr:tau=0.2"
    )
    assert base.replace(domain_mix={"code": 1.0}).routing.domain_mix == {"code": 1.0}
    assert base.replace(decode=Pool()).cluster.decode == Pool()
    for copy in (base.replace, lambda **update: base.model_copy(update=update)):
        with pytest.raises(InputError, match="polcy: no such field"):
            copy(polcy="jsq")
        with pytest.raises(InputError, match="topology: 'many'"):
            copy(topology="many")
    assert base.model_copy() == base
    with pytest.raises(ValidationError, match="topolgy"):
        RunConfig(topolgy="1P1D")
    with pytest.raises(ValidationError, match="xPyD"):
        RunConfig(topology="1P0D")


def eldr(**parameters):
    return {"policy": {"name": "eldr", **parameters}}


@on_each(
    "values, message",
    [
        (eldr(signature="tfidf"), "policy.signature: 'tfidf': input should be 'count-idf', "),
        (eldr(layer_mask="1,x"), "policy.layer_mask: '1,x': allowed are greedy, all, or layer "),
        (eldr(layer_mask=[0, 0]), "policy.layer_mask: [0, 0]: allowed are greedy, all, or layer "),
        (eldr(clustering="median"), "policy.clustering: 'median': input should be 'balanced' or "),
        (eldr(tau=1.5), "policy.tau: 1.5"),
        (eldr(tau="nan"), "policy.tau: 'nan'"),
        (eldr(tua=1), "policy.tua: 'eldr' has no such parameter (allowed: "),
        ({"policy": "p2c:tau=0.1"}, "policy.tau: 'p2c' has no such parameter (allowed: none)"),
        ({"policy": "eldr:0.2"}, "policy: 'eldr:0.2' (allowed: NAME or NAME:PARAMETER=VALUE,...)"),
        ({"policy": {"tau": 0.2}}, "policy: {'tau': 0.2} has no name"),
        ({"policy": 3}, "policy: 3 (allowed: a policy, such as jsq or eldr:tau=0.2)"),
        ({"policy": "elder"}, "policy: unknown policy 'elder' (allowed: cache_aware, domain"),
        ({"prefill_policy": "jsq"}, "prefill_policy: unknown policy 'jsq' (allowed: cache_aware"),
        ({"layer_mask": "all"}, "layer_mask: is a parameter of the policy (allowed: policy.layer_"),
        ({"request_rate": -1}, "request_rate: -1: input should be greater than 0"),
        ({"request_rate": "nan"}, "request_rate: 'nan'"),
        ({"request_rate": 0}, "request_rate: 0"),
        ({"burstiness": "inf"}, "burstiness: 'inf'"),
        ({"duration": math.nan}, "duration: nan"),
        ({"duration": -3}, "duration: -3"),
        ({"warmup": -3}, "warmup: -3"),
        ({"output_len": 0}, "output_len: 0"),
        ({"output_len": "long"}, "output_len: 'long'"),
        ({"seed": -1}, "seed: -1"),
        ({"tau": 0.1}, "tau: is a parameter of the policy (allowed: policy.tau, as in --policy "),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization: 1.2"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0"),
        ({"kv_transfer": "fast"}, "kv_transfer: 'fast'"),
        ({"goodput": {"ttft": -1}}, "goodput.ttft: -1"),
        ({"goodput": {"latency": 1}}, "goodput.latency: no such field"),
        ({"polcy": "eldr"}, "polcy: no such field"),
    ],
)
def test_bad_field_is_named_in_one_line(values, message):
    with pytest.raises(InputError) as error:
        make_config(values)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_yaml_and_a_results_config_read_alike(tmp_path):
    flat, nested = tmp_path / "run.yaml", tmp_path / "config.json"
    flat.write_text("policy: jsq\nrequest_rate: .inf\nnum_requests: 5\n")
    nested.write_text(
        '{"config": {"policy": "jsq", "request_rate": "inf", "num_requests": 5}, "versions": {}}'
    )
    assert make_config(read_config(flat)) == make_config(read_config(nested))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- 1\n- 2", "does not hold a mapping"),
        ("3: x", "does not hold a mapping"),
    ],
)
def test_unreadable_config(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_config(path)


def test_missing_config(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_config(tmp_path / "none.yaml")


def test_every_field_says_what_it_is():
    for kind in [*GROUPS.values(), Pool, SpeculativeConfig]:
        fields = described_fields(kind)
        assert [name for name, field in fields.items() if not field.description] == []


# -- groups --------------------------------------------------------------------------------------


def test_fields_may_stand_in_their_groups(tmp_path):
    grouped = {
        "policies": {"policy": {"name": "eldr", "tau": 0.2}, "queue_order": "sjf"},
        "requests": {"workload": "language", "request_rate": 20},
        "cluster": {"topology": "2P4D", "decode": {"gpu": "H200", "tensor_parallel_size": 2}},
        "engine": {"block_size": 32},
        "output": {"goodput": {"ttft": 100}},
        "seed": 3,
    }
    config = make_config(grouped)
    assert config == RunConfig(**grouped)
    assert config.policies.policy == "eldr:tau=0.2"
    assert (config.requests.workload, config.engine.block_size, config.requests.seed) == (
        "language",
        32,
        3,
    )
    assert config.pool("decode").tensor_parallel_size == 2
    assert config.pool("prefill").tensor_parallel_size == 1
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(grouped))
    assert make_config(read_config(path)) == config
    assert make_config(config.model_dump(mode="json")) == config
    changed = config.replace(engine={"block_size": 16}, cluster={"decode": {"gpu": "H100"}})
    assert (changed.engine.block_size, changed.cluster.decode.gpu) == (16, "H100")
    assert changed.cluster.decode.tensor_parallel_size == 2
    assert get_field(config, "engine.block_size") == 32
    assert get_field(config, "cluster.decode.gpu") == "H200"
    values = {}
    set_field(values, "policies.policy.tau", 0.3)
    set_field(values, "requests.seed", 1)
    assert values["seed"] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": {"policy": "jsq"}}, "engine.policy: no such field (allowed: engine, "),
        ({"engine": {"blok_size": 1}}, "engine.blok_size: no such field"),
        ({"block_size": 1, "engine": {"block_size": 2}}, "block_size: given twice"),
        ({"engine": 3}, "engine: 3"),
        ({"requests": {"request_rate": -1}}, "request_rate: -1"),
        ({"cluster": {"decode": {"gup": "H100"}}}, "decode.gup: no such field"),
    ],
)
def test_bad_groups(values, message):
    with pytest.raises(InputError) as error:
        make_config(values)
    assert str(error.value).startswith(message)


def test_a_group_is_a_configuration_of_its_own():
    assert {name for group in GROUPS.values() for name in group.model_fields} == set(RUN_FIELDS)
    assert sum(len(group.model_fields) for group in GROUPS.values()) == len(RUN_FIELDS)
    config = make_config({})
    for title, group in GROUPS.items():
        assert isinstance(getattr(config, title), group)


@on_each(
    "text, way",
    [
        ("config: {seed: 1}\nsweep: {type: grid, parameters: {seed: [1]}}", "eldr-sim sweep"),
        ("title: a\nbase: {}\nfigures: {}", "eldr-sim study run"),
        ("apiVersion: v1\nkind: Deployment", "--from-manifest"),
        ("services: {vllm: {image: vllm/vllm-openai}}", "--from-manifest"),
        ("architectures: [Qwen3ForCausalLM]\nhidden_size: 8", "--model"),
        ("load: {type: constant, stages: [{rate: 4, duration: 9}]}", "--request-rate"),
    ],
)
def test_a_file_that_is_no_configuration_leads_to_its_place(text, way, tmp_path):
    """A sweep's base ran in silence, the others met an unknown field."""
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError) as refused:
        read_config(tmp_path / "a.yaml")
    assert way in refused.value.allowed
