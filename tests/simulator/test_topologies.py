"""Clusters of named pools: spellings are values of them, and what a file may not say."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from eldr_sim.errors import InputError
from eldr_sim.simulator.plane.state import MAX_POOLS
from eldr_sim.simulator.run import prepare, simulate
from eldr_sim.simulator.setup.config.pools import MOST_POOLS
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.simulation import Simulation

from ..on_each import on_each
from ..paths import ROOT

BASE = {
    "trace": "reference-moe", "policy": "jsq", "num_requests": 150, "request_rate": 60,
    "warmup": 1, "output_len": 24, "prefill_policy": "round_robin",
}  # fmt: skip
PAGE = (ROOT / "docs" / "parallelism.md").read_text()
EXAMPLE = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]


def run(topology, **fields):
    return simulate(make_config(BASE | fields | {"topology": topology}))


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("2P4D", {"p": {"workers": 2, "then": "d"}, "d": {"workers": 4}}),
        ("3C", {"all": {"workers": 3}}),
        ("2P", {"p": {"workers": 2, "then": "none"}}),
        # Pools that are alike behind one router are one.
        ("2P4D", {"a": {"workers": 1, "then": ["x", "y"]}, "x": {"workers": 1},
                  "y": {"workers": 3}, "b": {"workers": 1, "then": ["y", "x"]}}),
        ("3C", {"a": {"workers": 1}, "b": {"workers": 2}}),
    ],
)  # fmt: skip
def test_a_spelling_is_a_value_of_pools(text, pools):
    fields = {"output_len": None} if text == "2P" else {}
    spelled, named = run(text, **fields), run(pools, **fields)
    assert named.requests.equals(spelled.requests)
    assert named.steps.equals(spelled.steps)
    assert named.summary["mean_ttft_ms"] == spelled.summary["mean_ttft_ms"]
    limits, same = dict(named.summary["limits"]), dict(spelled.summary["limits"])
    # Seconds that engines are there are added pool by pool: the last digit may differ.
    assert limits.pop("utilisation") == pytest.approx(same.pop("utilisation"), rel=1e-12)
    assert limits == same


def test_as_many_pools_may_be_named_as_the_plane_has_room_for():
    assert MOST_POOLS == MAX_POOLS


def test_the_example_of_the_page_runs_as_it_stands(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/cluster.yaml").write_text(EXAMPLE)
    assert yaml.safe_load((ROOT / "docs" / "cluster.yaml").read_text()) == yaml.safe_load(EXAMPLE)
    command = re.search(r"eldr-sim (run --topology docs/cluster.*)", PAGE)[1].split()
    code, out, err = run_cli(*command, "--duration", "2", "--out", "result")
    assert code == 0, err
    assert "1 decode-h200" in out
    Path("docs/cluster.yaml").unlink()  # a result needs it no more
    code, _, err = run_cli("run", "--config", "result/config.json", "--duration", "2")
    assert code == 0, err


def test_two_gpus_behind_one_router_and_workers_that_do_both():
    pools = {
        "prefill": {"workers": 2, "then": ["slow", "fast"]},
        "slow": {"workers": 1, "gpu": "A100"},
        "fast": {"workers": 1, "gpu": "H200"},
        "mixed": {"workers": 1},
    }
    result = run(pools, policy="round_robin")
    requests = result.record.requests
    assert result.record.completed.all()
    # Requests come to workers 0 and 1 (prefill) and 2 (mixed), in turn.
    assert (requests["prefill_worker"] == np.arange(len(requests)) % 3).all()
    mixed = requests["prefill_worker"] == 2
    # Those who decode are counted from the mixed one on; no cache leaves it.
    assert (requests["decode_worker"][mixed] == 0).all()
    assert set(requests["decode_worker"][~mixed].tolist()) == {1, 2}
    assert (requests["transfer_start_s"][mixed] < 0.0).all()
    assert (requests["transfer_end_s"][~mixed] > 0.0).all()
    steps = result.record.decode_steps
    alone = steps[steps["sequences"] == 1]
    slow, fast = (
        np.median((alone["end"] - alone["start"])[alone["worker"] == worker]) for worker in (1, 2)
    )
    assert slow > 1.2 * fast
    assert set(result.summary["pools"]) == set(pools)
    assert result.summary["pools"]["slow"]["gpu"] == "A100-SXM-80GB" or "A100" in str(
        result.summary["pools"]["slow"]["gpu"]
    )


def test_a_wider_receiver_gets_its_cache_as_soon_as_in_a_cluster_of_its_own():
    """Alone on the links, a transfer takes what it takes where its pool is the only one."""
    model = {"num_requests": 6, "request_rate": 0.5, "policy": "round_robin", "output_len": 4}
    wide = {"workers": 1, "tensor_parallel_size": 2}

    def seconds(*pools):
        names = [f"d{number}" for number in range(len(pools))]
        named = dict(zip(names, pools, strict=True))
        requests = run({"p": {"workers": 1, "then": names}} | named, **model).record.requests
        took = requests["transfer_end_s"] - requests["transfer_start_s"]
        return took[requests["decode_worker"] == len(pools) - 1], requests["decode_worker"]

    both, worker = seconds({"workers": 1}, wide)
    own, _ = seconds(wide)
    assert both == pytest.approx(own[worker == 1])


def test_processes_name_pools_as_the_file_does():
    fields = BASE | {"topology": {"a": {"workers": 1}, "b": {"workers": 1}}, "policy": "jsq"}
    sim = Simulation(make_config(fields))
    sim.cluster.fail(sim.cluster.pool("b")[0])
    requests = sim.run().record.requests
    assert set(requests["decode_worker"].tolist()) == {0}
    with pytest.raises(InputError, match=r"pool: 'decode' \(allowed: a, b\)"):
        sim.cluster.pool("decode")


@on_each("pools, said", [
        ({}, "topology: 0 pools"),
        ({"a": {}}, "topology.a.workers: not given"),
        ({"a": {"workers": 0}}, "topology.a.workers: 0: "),
        ({"a": {"workers": 1, "gpus": "H100"}}, r"topology.a.gpus: no such field \(allowed: gpu"),
        ({"A b": {"workers": 1}}, "topology: pool 'A b'"),
        ({"a": {"workers": 1, "then": "b"}}, "topology.a.then: 'b' is not another pool"),
        ({"a": {"workers": 1, "then": "a"}}, "topology.a.then: 'a' is not another pool"),
        (
            {"a": {"workers": 1, "then": "b"}, "b": {"workers": 1, "then": "c"},
             "c": {"workers": 1}},
            "topology.a.then: 'b' hands over requests itself",
        ),
        (
            {"a": {"workers": 1, "then": ["x", "y"]}, "b": {"workers": 1, "then": "x"},
             "x": {"workers": 1}, "y": {"workers": 1}},
            "topology.a.then: shares only some targets with another pool",
        ),
        ({"a": {"workers": 1, "then": "none"}, "b": {"workers": 1}}, "some requests would end"),
    ])  # fmt: skip
def test_a_bad_file_is_an_input_error(pools, said):
    with pytest.raises(InputError, match=said):
        make_config({"topology": pools})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policy": "marginal_cost"}, "step times"),
        ({"fail": "c:0@1s"}, r"no such worker \(allowed: p:0, a:0, b:0\)"),
    ],
)
def test_what_pools_that_differ_cannot_do(fields, said):
    pools = {"p": {"workers": 1, "then": ["a", "b"]}, "a": {"workers": 1},
             "b": {"workers": 1, "gpu": "H200"}}  # fmt: skip
    with pytest.raises(InputError, match=said):
        run(pools, **fields)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(InputError, match="topology"):
        make_config({"topology": str(tmp_path / "none.yaml")})
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(InputError, match="does not hold a mapping"):
        make_config({"topology": str(tmp_path / "list.yaml")})


def test_paths_in_a_file_are_kept_with_the_result():
    config = make_config({"topology": {"a": {"workers": 2, "price_per_gpu_hour": 2.0}}})
    assert (config.n_gpus, config.price_per_hour) == (2, 4.0)
    assert make_config(config.model_dump(mode="json")) == config
    assert prepare(config).spec.names == ["a"]
