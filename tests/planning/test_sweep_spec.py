"""A sweep's YAML as points: what each type expands to, and bad input in one line."""

import math

import pytest
import yaml

from eldr_sim.errors import InputError
from eldr_sim.planning.runs.runner import config_key
from eldr_sim.planning.runs.sweep_spec import first_change, make_spec, read_spec
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each


def spec_of(text):
    return make_spec(yaml.safe_load(text))


def test_grid_is_every_combination_with_paired_seeds():
    spec = spec_of("""
        config: {topology: 1P1D, goodput: {ttft: 500}}
        sweep:
          type: grid
          parameters:
            policy: [jsq, eldr]
            request_rate: [5, .inf]
            goodput.tpot: [20, 30, 40]
        multiRun: {numRuns: 3, confidenceLevel: 0.9}
        randomSeed: 7
    """)
    assert [tuple(p.parameters.values()) for p in spec.points] == [
        (policy, rate, bound)
        for policy in ("jsq", "eldr")
        for rate in (5.0, math.inf)
        for bound in (20.0, 30.0, 40.0)
    ]
    assert spec.confidence == 0.9
    for point in spec.points:
        assert [config.requests.seed for config in point.configs] == [7, 8, 9]
        for config in point.configs:
            assert config.cluster.topology == "1P1D"
            assert config.output.goodput.ttft == 500.0  # what is not swept stays
            assert config.output.goodput.tpot == point.parameters["goodput.tpot"]
            assert config.policies.policy == point.parameters["policy"]
    assert spec.points[0].name == "policy=jsq, request_rate=5, goodput.tpot=20"


def test_zip_goes_through_its_lists_together():
    spec = spec_of("""
        sweep:
          type: zip
          parameters: {domain_mix.code: [0.25, 0.5], domain_mix.math: [0.75, 0.5]}
    """)
    assert [point.configs[0].routing.domain_mix for point in spec.points] == [
        {"code": 0.25, "math": 0.75},
        {"code": 0.5, "math": 0.5},
    ]


def test_scenarios_merge_into_the_base():
    spec = spec_of("""
        config: {topology: 1P1D, goodput: {ttft: 500, tpot: 30}}
        sweep:
          type: scenarios
          runs:
            - {name: base}
            - {name: strict, goodput: {tpot: 20}}
            - {name: dotted, goodput.tpot: 10, policy: {name: eldr, layer_mask: [0, 2]}}
    """)
    assert [point.name for point in spec.points] == ["base", "strict", "dotted"]
    assert [point.configs[0].output.goodput.ttft for point in spec.points] == [500.0] * 3
    # The parameters of all, also where a scenario keeps the base's.
    assert [point.parameters["goodput.tpot"] for point in spec.points] == [30.0, 20.0, 10.0]
    assert [point.configs[0].policies.policy for point in spec.points] == [
        "round_robin",
        "round_robin",
        "eldr:layer_mask=0,2",
    ]


def test_a_policys_parameters_are_dot_paths():
    spec = spec_of(
        "{config: {policy: eldr}, sweep: {type: grid, parameters: {policy.tau: [0.1, 0.2]}}}"
    )
    assert [point.configs[0].policies.policy for point in spec.points] == ["eldr", "eldr:tau=0.2"]
    assert [point.parameters["policy.tau"] for point in spec.points] == [0.1, 0.2]


def test_a_base_seed_is_the_first_seed():
    spec = spec_of(
        "{config: {seed: 5}, sweep: {type: grid, parameters: {burstiness: [0.1]}}, "
        "multiRun: {numRuns: 2}}"
    )
    assert [config.requests.seed for config in spec.points[0].configs] == [5, 6]


def test_key_tells_configurations_apart():
    spec = spec_of("{sweep: {type: grid, parameters: {burstiness: [0.1, 0.1, 0.2]}}}")
    keys = [config_key(point.configs[0]) for point in spec.points]
    assert keys[0] == keys[1] != keys[2]


def test_a_folder_counts_by_what_it_holds(tmp_path):
    """A command that is resumed draws the same routing into another folder."""

    def key(folder, checksum):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "manifest.json").write_text(checksum)
        return config_key(make_config({"policy": "jsq", "trace": str(tmp_path / folder)}))

    assert key("a", "one") == key("b", "one") != key("a", "two")


GRID = "sweep: {type: grid, parameters: {burstiness: [0.1]}}"
BAD = [
    ("5", "sweep: the file has no sweep"),
    ("{sweep: 3}", "sweep: "),
    ("{sweep: {type: gird}}", "sweep.type: "),
    ("{sweep: {parameters: {burstiness: [1]}}}", "sweep.type: "),
    ("{sweep: {type: grid}}", "sweep.parameters: "),
    ("{sweep: {type: grid, parameters: {}}}", "sweep.parameters: "),
    ("{sweep: {type: grid, parameters: {policy: jsq}}}", "sweep.parameters.policy: "),
    ("{sweep: {type: grid, parameters: {policy: []}}}", "sweep.parameters.policy: "),
    ("{sweep: {type: grid, parameters: {polcy: [jsq]}}}", "polcy: no such field in point 0"),
    ("{sweep: {type: grid, parameters: {goodput.tft: [1]}}}", "goodput.tft: no such field"),
    ("{sweep: {type: grid, parameters: {burstiness: [0.1, -2]}}}", "burstiness: -2: "),
    ("{sweep: {type: grid, parameters: {topology: [8PD]}}}", "topology: '8PD' in point 0"),
    (
        "{sweep: {type: grid, parameters: {burstiness.x: [1]}}, config: {burstiness: 0.1}}",
        "burstiness.x: 'burstiness' has no fields",
    ),
    ("{sweep: {type: grid, parameters: {seed: [1, 2]}}}", "sweep: seed is not a parameter"),
    (
        "{sweep: {type: zip, parameters: {burstiness: [0.1], policy: [a, b]}}}",
        "sweep: lists of different",
    ),
    ("{sweep: {type: scenarios, runs: [{policy: jsq}]}}", "sweep.runs.0.name: "),
    ("{sweep: {type: scenarios, runs: [{name: a}, {name: a}]}}", "sweep: two scenarios"),
    ("{sweep: {type: latin_hypercube}}", "sweep.type: "),
    (f"{{{GRID}, multirun: {{}}}}", "multirun: no such field"),
    (f"{{{GRID}, multiRun: {{numRuns: 0}}}}", "multiRun.numRuns: "),
    (f"{{{GRID}, multiRun: {{confidenceLevel: 1}}}}", "multiRun.confidenceLevel: "),
    (f"{{{GRID}, randomSeed: -1}}", "randomSeed: "),
    (f"{{{GRID}, randomSeed: 1, config: {{seed: 1}}}}", "config.seed: together with randomSeed"),
    (f"{{{GRID}, config: {{topolgy: 1P1D}}}}", "topolgy: no such field"),
    (f"{{{GRID}, config: 5}}", "config: "),
]


@on_each("text, message", BAD)
def test_bad_sweep_is_one_line(text, message):
    with pytest.raises(InputError) as error:
        spec_of(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_file_that_is_no_yaml(tmp_path):
    path = tmp_path / "sweep.yaml"
    with pytest.raises(InputError, match="cannot read"):
        read_spec(path)
    path.write_text("sweep: [")
    with pytest.raises(InputError, match="is not YAML"):
        read_spec(path)


def test_first_change_names_the_place():
    old = {"a": {"b": [1, 2], "c": 3}}
    assert first_change(old, {"a": {"b": [1, 2], "c": 3}}) is None
    assert first_change(old, {"a": {"b": [1, 2], "c": 4}}) == "a.c was 3 and is 4"
    assert first_change(old, {"a": {"b": [1], "c": 3}}) == "a.b was [1, 2] and is [1]"
    assert first_change(old, {"a": {"b": [1, 2]}}) == "a.c is gone"
    assert first_change(old, {"a": old["a"], "d": 1}) == "d is new"
