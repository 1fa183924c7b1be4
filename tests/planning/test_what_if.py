"""What-ifs: pairs share their requests, a change is alone, and wrong ones are told in one line."""

import json
import math
import re
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.compare.what_if import (
    FIGURES,
    REQUEST_FIELDS,
    change_fields,
    read_base,
    vary,
)
from eldr_sim.planning.compare.what_if import what_if as make_what_if
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.requests import RoutingConfig, WorkloadConfig
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each

BASE = {"topology": "1P2D", "request_rate": 10, "duration": 3, "warmup": 1, "output_len": 20}


class Analytic:
    """Figures that are the seed's luck times what the configuration says."""

    def __init__(self):
        self.configs = []

    def __call__(self, config):
        self.configs.append(config)
        return self.summary(config)

    def summary(self, config):
        luck = np.random.default_rng([config.requests.seed, 1]).normal(10.0, 1.0)
        value = (
            luck
            * {"jsq": 1.0, "eldr": 0.9}.get(config.policies.policy, 1.2)
            * config.engine.gpu_memory_utilization
        )
        return dict.fromkeys(FIGURES, value) | {
            "seed": config.requests.seed,
            "num_prompts": 30,
            "completed": 30,
            "failed": 0,
            "provenance": {},
            "cost_per_million_output_tokens": None,
            "slo_attainment": 0.0,
        }


def what_if(base, changes, evaluate, **arguments):
    with mock.patch("eldr_sim.planning.runs.runner.simulate_summary", evaluate):
        return make_what_if(base, changes, jobs=1, **arguments)


def test_a_redundant_expert_is_priced_in_kv_blocks():
    """Beside the goodput of each: a GPU's fall is its slots more times the bytes of an expert."""
    base = make_config(
        {
            "topology": "1P2D",
            "data_parallel_size": 4,
            "enable_expert_parallel": True,
            "num_requests": 20,
            "output_len": 8,
            "goodput": {"tpot": 1000},
            "decode": {"expert_placement": "eplb"},
        }
    )
    changes = [f"decode.num_redundant_experts={n}" for n in (16, 64)]
    found = make_what_if(base, changes, n_seeds=1, jobs=1)
    model = load_model(base.engine.model)
    block_bytes = base.engine.block_size * model.kv_bytes_per_token
    each = model.n_moe_layers * model.bytes_per_expert
    assert each % block_bytes == 0  # of this model: no rounding hides a byte
    for change, slots in zip(found.changes, (16 // 4, 64 // 4), strict=True):
        effects = {effect.metric: effect for effect in change.effects}
        blocks = effects["kv_blocks_per_worker"]
        assert blocks.reference_mean - blocks.mean == slots * each // block_bytes
        assert effects["request_goodput"].mean > 0


def test_pairs_share_their_luck_and_changes_stand_alone():
    evaluate = Analytic()
    base = make_config(BASE | {"policy": "jsq", "gpu_memory_utilization": 0.85, "seed": 3})
    found = what_if(
        base, ["policy=eldr", "gpu_memory_utilization=0.935"], evaluate, n_seeds=4, together=True
    )
    asked = [
        (c.policies.policy, c.engine.gpu_memory_utilization, c.requests.seed)
        for c in evaluate.configs
    ]
    assert asked == [
        (policy, share, seed)
        for policy, share in (("jsq", 0.85), ("eldr", 0.85), ("jsq", 0.935), ("eldr", 0.935))
        for seed in (3, 4, 5, 6)
    ]
    effects = {c.name: {e.metric: e for e in c.effects} for c in found.changes}
    for name, percent in (
        ("policy=eldr", -10.0),
        ("gpu_memory_utilization=0.935", 10.0),
        (None, -1.0),
    ):
        effect = effects[name or "policy=eldr gpu_memory_utilization=0.935"]["median_tpot_ms"]
        # The luck is the same on both sides of a pair, so no spread is left.
        assert (effect.percent, effect.low, effect.high) == pytest.approx((percent,) * 3)
        assert effect.mean == pytest.approx(effect.reference_mean * (1 + percent / 100))
    for change in found.changes:
        assert change.other_requests == ()
        assert math.isnan({e.metric: e for e in change.effects}["slo_attainment"].percent)
    json.dumps(found.record(), allow_nan=False)


def test_interval_is_students_t_over_the_seeds():
    class Noisy(Analytic):
        def summary(self, config):
            noise = np.random.default_rng(
                [config.requests.seed, config.policies.policy == "eldr"]
            ).normal(0, 0.5)
            return super().summary(config) | {"median_tpot_ms": 10.0 + noise}

    evaluate = Noisy()
    base = make_config(BASE | {"policy": "jsq"})
    found = what_if(base, ["policy=eldr"], evaluate, n_seeds=5)
    before, after = (
        np.array([evaluate.summary(c)["median_tpot_ms"] for c in evaluate.configs[part]])
        for part in (slice(0, 5), slice(5, 10))
    )
    expected = stats.ttest_1samp(100 * (after / before - 1), 0.0).confidence_interval(0.95)
    effect = found.changes[0].effects[0]
    assert (effect.low, effect.high) == pytest.approx((expected.low, expected.high))


@on_each(
    "change, fields",
    [
        ("decode.gpu=h200", ()),
        ("topology=2P2D", ()),
        ("request_rate=20", ("request_rate",)),
        ("output_len=40", ("output_len",)),
        ("workload=language duration=4", ("workload", "duration")),
        ("prompts=shared", ("prompts",)),
        ("warmup=0", ("warmup",)),
        ("workload=chat turns=8", ("workload", "turns")),
    ],
)
def test_changes_of_the_requests_are_told(change, fields):
    found = what_if(make_config(BASE), [change], Analytic(), n_seeds=1)
    assert found.changes[0].other_requests == fields


def test_every_field_of_the_load_tells_of_other_requests():
    groups = WorkloadConfig, RoutingConfig
    fields = {name for group in groups for name in group.model_fields}
    assert fields - set(REQUEST_FIELDS) == {"max_concurrency"}  # the client sends the same later


def test_simulated_pairs_serve_the_same_requests():
    found = make_what_if(make_config(BASE), ["decode.gpu=h200"], n_seeds=2, jobs=1)
    for before, after in zip(found.base, found.changes[0].summaries, strict=True):
        for key in ("num_prompts", "total_input_tokens", "seed"):
            assert before[key] == after[key]
    effect = {e.metric: e for e in found.changes[0].effects}["median_tpot_ms"]
    assert effect.high < 0


def test_values_are_texts_and_fields_are_dot_paths():
    values = {"decode": {"max_num_seqs": 8, "gpu": None}, "policy": "jsq"}
    changed = change_fields(
        values, "decode.gpu=h200 policy.tau=0.2 policy.layer_mask=0,3 goodput.ttft=500"
    )
    assert changed == {
        "decode": {"max_num_seqs": 8, "gpu": "h200"},
        "policy": {"name": "jsq", "tau": "0.2", "layer_mask": "0,3"},
        "goodput": {"ttft": "500"},
    }
    assert values == {"decode": {"max_num_seqs": 8, "gpu": None}, "policy": "jsq"}
    assert change_fields({}, "max_num_seqs=null") == {"max_num_seqs": None}
    default = RUN_FIELDS["policy"].default
    assert change_fields({}, "policy.tau=1") == {"policy": {"name": default, "tau": "1"}}
    named = change_fields({"policy": {"name": "eldr", "tau": 1}}, "policy.name=jsq")
    assert named == {"policy": {"name": "jsq", "tau": 1}}


@on_each(
    "changes, message",
    [
        ([], "set: no change"),
        ([""], "set: an empty change"),
        (["policy"], "set: 'policy' (allowed: FIELD=VALUE"),
        (["=eldr"], "set: '=eldr'"),
        (["'policy=eldr"], "set: "),
        (["polcy=eldr"], "polcy: no such field"),
        (["decode.gup=h200"], "decode.gup: no such field"),
        (["topology.x=1"], "topology.x: 'topology' has no fields"),
        (["policy.tau=2"], "policy.tau: 'round_robin' has no such parameter"),
        (["policy=eldr policy.tau=2"], "policy.tau: '2': input should be less than or equal to 1"),
        (["policy=round_robin"], "set: policy=round_robin has no effect on the base run"),
        (["seed=2", "seed=2"], "set: a change is given twice"),
    ],
)
def test_bad_change(changes, message):
    evaluate = Analytic()
    with pytest.raises(InputError) as error:
        what_if(make_config(BASE), changes, evaluate)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert evaluate.configs == []


def test_base_is_a_folder_a_config_or_yaml(tmp_path):
    folder = tmp_path / "result"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": BASE, "versions": {}}))
    (tmp_path / "run.yaml").write_text(json.dumps(BASE))
    for path in (folder, folder / "config.json", tmp_path / "run.yaml"):
        assert read_base(path) == BASE
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError):
            read_base(path)


def test_command_line(run_cli, tmp_path):
    base, out = tmp_path / "run.yaml", tmp_path / "out"
    base.write_text(json.dumps(BASE | {"goodput": {"ttft": 100}}))
    code, text, err = run_cli(
        "what-if", base, "--set", "decode.gpu=h200", "--set", "request_rate=20", "--seeds", 2,
        "--jobs", 1, "--out", out,
    )  # fmt: skip
    assert code == 0
    assert "Base: round_robin, 1 prefill + 2 decode workers" in text
    assert "decode.gpu=h200\nfigure " in text
    assert "Warning: request_rate=20: request_rate makes other requests" in err
    assert {path.name for path in out.iterdir()} == {"what_if.json", "runs.parquet"}
    runs = pq.read_table(out / "runs.parquet").to_pandas()
    assert runs.change.tolist() == ["base"] * 2 + ["decode.gpu=h200"] * 2 + ["request_rate=20"] * 2
    assert runs.seed.tolist() == [0, 1] * 3
    code, _, err = run_cli("what-if", base, "--set", "policy.tau=0.2", "--out", out)
    assert (code, err.startswith("Error: out: ")) == (2, True)
    code, _, err = run_cli("what-if", tmp_path / "none", "--set", "policy.tau=0.2")
    assert (code, err.startswith("Error: config: cannot read")) == (2, True)


def test_a_fault_is_a_change_like_others(run_cli, tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(json.dumps(BASE | {"goodput": {"tpot": 50}, "output_len": 60}))
    fault = "fail=decode:1@2s+1s"
    code, text, err = run_cli(
        "what-if", base, "--set", fault, "--set", f"{fault} retry=migrate",
        "--seeds", "2", "--jobs", "1",
    )  # fmt: skip
    assert code == 0, err
    before, *changes = re.split(r"(?m)^fail=", text)
    assert "recover" not in before
    assert len(changes) == 2
    for change in changes:
        assert re.search(r"goodput \S+ before, \S+ during, \S+ after req/s; \d of 2", change)


def test_values_are_compared_with_the_first_in_every_combination():
    """The base holds the first value of each field, and every other combination is a change."""
    evaluate = Analytic()
    axes = {"policy": ["jsq", "eldr"], "gpu_memory_utilization": [0.9, 0.8]}
    with mock.patch("eldr_sim.planning.runs.runner.simulate_summary", evaluate):
        found = vary(make_config(BASE), axes, n_seeds=2, jobs=1)
    assert found.base_name == "policy=jsq gpu_memory_utilization=0.9"
    assert [change.name for change in found.changes] == [
        "policy=jsq gpu_memory_utilization=0.8",
        "policy=eldr gpu_memory_utilization=0.9",
        "policy=eldr gpu_memory_utilization=0.8",
    ]
    gains = {c.name: c.effects[0].percent for c in found.changes}
    assert gains["policy=eldr gpu_memory_utilization=0.9"] == pytest.approx(-10.0)
    assert found.record()["base"] == found.base_name
    assert found.named()[0][0] == found.base_name


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"policy": ["jsq"]}, "two values or more"),
        ({"policy": ["jsq", "jsq"]}, "a value is given twice"),
        ({"polcy": ["jsq", "eldr"]}, "polcy"),
        ({"topology": ["1P2D", "2Q"]}, "topology"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(axes, message):
    with pytest.raises(InputError, match=message):
        vary(make_config(BASE), axes)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--topology", "2C,1P1D"], ["topology=2C", "topology=1P1D"]),
        (["--vary", "topology=2C,1P1D"], ["topology=2C", "topology=1P1D"]),
        (["--topology", "1C", "--gpu", "H100,H200"], ["gpu=H100", "gpu=H200"]),
        (
            ["--topology", "2C", "--vary", "enable_prefix_caching=true,false"],
            ["enable_prefix_caching=true", "enable_prefix_caching=false"],
        ),
    ],
)
def test_compare_takes_lists_of_clusters(run_cli, tmp_path, options, names):
    small = ["--trace", "reference-moe", "--request-rate", "10", "--duration", "2", "--warmup", "0"]
    out = ["--seeds", "1", "--out", str(tmp_path / "c")]
    code, output, errors = run_cli("compare", *options, *small, "--output-len", "8", *out)
    assert code == 0, errors
    assert all(name in output for name in names)
    record = json.loads((tmp_path / "c" / "what_if.json").read_text())
    assert [record["base"], *(change["name"] for change in record["changes"])] == names


def test_compare_of_values_takes_no_other_comparison(run_cli):
    code, _, errors = run_cli("compare", "--topology", "2C,1P1D", "--drafts", "0,1")
    assert code == 2
    assert "drafts: given together with values of topology" in errors
    _, _, errors = run_cli("compare", "--topology", "2C,1P1D", "--vary", "topology=2C,3C")
    assert "topology: in --vary and in --topology" in errors


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ["Qwen3-30B-A3B", "Qwen3-31B"]}, "unknown model 'Qwen3-31B': did you mean"),
        ({"gpu": ["H100", "H1OO"]}, "gpu"),
        ({"fail": ["decode:1@1s", "decode:9@1s"]}, "no such worker"),
        ({"decode.gpu": ["H100", "L4"]}, "L4 holds 23.7 GB"),
    ],
)
def test_values_are_refused_before_anything_runs(values, message):
    def runs(_config):
        pytest.fail("a run began")

    with (
        mock.patch("eldr_sim.planning.runs.runner.simulate_summary", runs),
        pytest.raises(InputError, match=message),
    ):
        vary(make_config(BASE), values, n_seeds=1, jobs=1)
