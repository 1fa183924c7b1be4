"""Pools of different GPUs: what follows the pool, and what a pool that is none leaves alone."""

import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.plane import state
from eldr_sim.simulator.run import prepare, simulate
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config, set_field
from eldr_sim.simulator.setup.transfer import PRESETS

BASE = {"topology": "2P3D", "request_rate": 20, "duration": 4, "warmup": 2, "output_len": 32}
SHORT = ["--topology", "1P2D", "--request-rate", "10", "--duration", "3", "--warmup", "1"]
SHORT += ["--output-len", "20"]


def run(**values):
    return simulate(make_config(BASE | values))


@pytest.fixture(scope="module")
def base():
    return run()


@pytest.mark.parametrize(
    "pools",
    [
        {"decode": {"gpu": "h100"}, "prefill": {"gpu": "H100-SXM"}},
        {"gpu": "a100", "prefill": {"gpu": "h100"}, "decode": {"gpu": "H100"}},  # warned of
        {"decode": {"max_num_seqs": 1024}},
    ],
)
def test_a_pool_equal_to_the_base_changes_nothing(base, pools):
    result = run(**pools)
    said = {"gpu"} if "gpu" in pools else set()
    assert {line.split()[0] for line in result.summary["without_effect"]} == said
    assert result.summary | {"without_effect": []} == base.summary
    assert result.requests == base.requests
    assert result.steps == base.steps


def test_only_the_pool_itself_changes(base):
    """A100 prefill steps are slower than H100's, and a decode step of one batch is the same."""
    other = run(prefill={"gpu": "a100"})
    before, after = (
        table[table.measured] for table in (base.requests.to_pandas(), other.requests.to_pandas())
    )
    assert (
        after.prefill_end_s - after.prefill_start_s > before.prefill_end_s - before.prefill_start_s
    ).all()
    ours, theirs = (prepare(make_config(BASE | p)) for p in ({}, {"prefill": {"gpu": "a100"}}))
    assert ours.step_time is theirs.step_time
    assert theirs.spec.prefill.step_time is prepare(make_config(BASE | {"gpu": "A100"})).step_time
    assert other.summary["median_tpot_ms"] == pytest.approx(base.summary["median_tpot_ms"], rel=0.1)


def test_every_setting_follows_the_gpu_of_its_pool():
    mixed = prepare(make_config(BASE | {"prefill": {"gpu": "a100"}, "decode": {"gpu": "mi300x"}}))
    for engine, gpu in ((mixed.spec.prefill, "A100"), (mixed.spec.decode, "MI300X")):
        alone = prepare(make_config(BASE | {"gpu": gpu})).spec.decode
        assert engine == alone
        assert engine.step_time.gpu.name == gpu


def test_summary_names_both_pools_and_the_weaker_of_their_sources(base):
    assert base.summary["gpu"] == "H100"
    assert "prefill_workers" not in base.summary
    mixed = run(prefill={"gpu": "a100"}, decode={"gpu": "mi300x"}).summary
    assert mixed["gpu"] == "A100 (prefill) and MI300X (decode)"
    assert mixed["provenance"]["prefill.moe"]["label"] == "imported"
    assert mixed["provenance"]["decode.moe"]["label"] == "fitted"
    assert mixed["weakest_provenance"] == "derived"
    assert mixed["prefill_workers"]["max_num_batched_tokens"] == 2048
    assert mixed["max_num_batched_tokens"] == 16384


def test_links_have_the_speed_of_their_own_nic():
    model = PRESETS["ideal"].over(10e9, 40e9)
    assert (model.bandwidth, model.ingress) == (10e9, 40e9)
    model = PRESETS["ideal"].over(100e9, 100e9)
    assert model.bandwidth == model.ingress == PRESETS["ideal"].bandwidth


def test_each_gpu_hour_has_the_price_of_its_pool():
    config = make_config(
        BASE
        | {"price_per_gpu_hour": 2.0, "decode": {"price_per_gpu_hour": 3.0}, "gpu": "H200"}
        | {"tensor_parallel_size": 2}
    )
    assert config.price_per_hour == (2 * 2.0 + 3 * 3.0) * 2
    assert make_config(BASE | {"decode": {"price_per_gpu_hour": 3.0}}).price_per_hour is None
    assert make_config(BASE | {"price_per_gpu_hour": 0.0}).price_per_hour == 0.0


def test_prefill_workers_hold_prompts_and_decode_workers_outputs_too(make_cluster, make_workload):
    """Prompts of 20 and 40 tokens with 30 more to generate, blocks of 4."""
    workload = make_workload([0.0, 1.0], [20, 40], 30)
    for prefill, decode, served in ((10, 18, [1, 1]), (9, 18, [1, 0]), (10, 17, [1, 0])):
        cluster = make_cluster(workload, prefill={"n_blocks": prefill}, decode={"n_blocks": decode})
        assert cluster.run().completed.tolist() == served


def test_old_configurations_still_load():
    old = json.loads(make_config({}).model_dump_json())
    del old["prefill"], old["decode"]
    assert make_config(old) == RunConfig()
    assert make_config(json.loads(RunConfig().model_dump_json())) == RunConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"gpu": "H1000"}}, "gpu: unknown GPU 'H1000'"),
        ({"decode": {"gup": "H100"}}, "decode.gup: no such field"),
        ({"prefill": {"max_num_seqs": 0}}, "prefill.max_num_seqs: 0"),
        ({"prefill": {"max_num_seqs": 512, "max_num_batched_tokens": 256}}, "max_num_batched_t"),
    ],
)
def test_bad_pool(values, message):
    with pytest.raises(InputError) as error:
        prepare(make_config(BASE | values))
    assert str(error.value).startswith(message)


def test_options_name_the_pool(run_cli, tmp_path):
    out = tmp_path / "result"
    path = tmp_path / "run.yaml"
    path.write_text("decode: {gpu: a100, max_num_seqs: 64}\n")
    code, text, _ = run_cli(
        "run", *SHORT, "--config", path, "--set", "decode.gpu=h200", "--set", "prefill.gpu=a100",
        "--out", out,
    )  # fmt: skip
    assert code == 0
    assert "Qwen3-30B-A3B on A100 (prefill) and H200 (decode)" in " ".join(text.split())
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["decode"]["gpu"], config["decode"]["max_num_seqs"]) == ("h200", 64)


def test_dot_paths_set_fields_and_copy_what_they_change():
    inner = {"gpu": "H100"}
    values = {"decode": inner}
    set_field(values, "decode.max_num_seqs", 8)
    set_field(values, "goodput.ttft", 500)
    set_field(values, "policy", "jsq")
    assert values == {
        "decode": {"gpu": "H100", "max_num_seqs": 8},
        "goodput": {"ttft": 500},
        "policy": "jsq",
    }
    assert inner == {"gpu": "H100"}
    set_field(values, "policy.name", "eldr")
    set_field(values, "policy.tau", 0.2)
    assert values["policy"] == {"name": "eldr", "tau": 0.2}
    with pytest.raises(InputError, match="'topology' has no fields"):
        set_field({"topology": "1P1D"}, "topology.x", 1)


def test_co_located_workers_are_one_pool():
    pooled = run(topology="3C", decode={"gpu": "h200"}, policy="jsq")
    alone = run(topology="3C", gpu="H200", policy="jsq")
    assert pooled.summary == alone.summary
    assert (
        make_config({"topology": "3C", "decode": {"price_per_gpu_hour": 2.0}}).price_per_hour == 6
    )
    with pytest.raises(InputError, match="prefill: co-located workers form one pool"):
        run(topology="3C", prefill={"gpu": "h200"})


# -- where KV comes from, and who goes on ------------------------------------------------------


@pytest.fixture
def some_load(make_workload):
    rng = np.random.default_rng(4)
    n = 60
    return make_workload(
        np.cumsum(rng.exponential(0.004, n)), rng.integers(1, 60, n), rng.integers(1, 20, n)
    )


def test_prompts_that_nobody_takes_over_end_where_they_are_computed(make_cluster, some_load):
    """The oracle: then it is a cluster of prefill workers, whatever stands behind them."""
    some_load.output_len[:] = 1
    apart = make_cluster(some_load, n_prefill=2, n_decode=3, n_blocks=60)
    alone = make_cluster(some_load, n_prefill=2, n_decode=0, n_blocks=60)
    apart.arrays.engines.pools["then"][0] = state.NO_POOL
    one, other = apart.run(), alone.run()
    assert other.completed.all()
    for name in other.requests.dtype.names:
        np.testing.assert_array_equal(one.requests[name], other.requests[name], err_msg=name)
    np.testing.assert_array_equal(one.prefill_steps, other.prefill_steps)
    assert len(one.decode_steps) == 0
