"""Groups of engines that change their width: each width is the group of that width, and no request
is lost between them.
"""

import numpy as np
import pytest

from eldr_sim import RunConfig
from eldr_sim.errors import InputError
from eldr_sim.policies.placement.base import Placement
from eldr_sim.simulator.control.control_api import Worker
from eldr_sim.simulator.control.record import DRAINING, OFF, READY
from eldr_sim.simulator.control.relocation import expert_links, expert_moves, transfer_of
from eldr_sim.simulator.outcome.worker_hours import worker_seconds
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.expected_step import scaling_facts
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.simulation import Simulation

from ..on_each import on_each
from .first_placement import placement_of

ELASTIC = RunConfig(
    trace="reference-moe", topology="1C", policy="jsq", data_parallel_size=8,
    enable_expert_parallel=True, enable_elastic_ep=True, min_workers="4", request_rate=60,
    num_requests=120, warmup=0, input_len=300, output_len=24, max_num_seqs=32,
)  # fmt: skip


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "deepep_ht"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_width_is_the_group_of_that_width(width, backend):
    """Two engines hold 64 of 128 experts each; at any width they have as many instances."""
    config = ELASTIC.replace(all2all_backend=backend, min_workers="2")
    fixed = simulate(config.replace(
        data_parallel_size=width, enable_elastic_ep=False, min_workers="1",
        num_redundant_experts=64 * width - 128,
    ))  # fmt: skip
    same = simulate(config.replace(autoscale=f"none:n={width}"))
    assert same.requests.drop_columns("retries").equals(fixed.requests)
    assert same.steps.equals(fixed.steps)
    assert same.summary["kv_blocks_per_worker"] == fixed.summary["kv_blocks_per_worker"]
    hours = width * same.record.end_s / 3600
    assert same.summary["scaling"]["gpu_hours"] == pytest.approx(hours, rel=1e-6)


def test_what_has_no_effect_is_named():
    still = simulate(ELASTIC).summary["without_effect"]
    assert not any("min_workers" in line for line in still)
    fixed = {"enable_elastic_ep": False, "min_workers": "1", "autoscale": "none:n=1"}
    named = simulate(ELASTIC.replace(**fixed, width_pause=1.0))
    assert any("width_pause" in line for line in named.summary["without_effect"])


def test_a_group_may_fill_a_node_in_part():
    """Six engines on nodes of four: all pairs are there; all-to-alls are those of two nodes."""
    config = ELASTIC.replace(gpus_per_node=4, all2all_backend="deepep_ht")
    result = simulate(config.replace(autoscale="none:n=6"))
    record = result.record
    tokens = record.decode_steps["tokens"].sum() + record.decode_steps["chunk_tokens"].sum()
    model = prepare(config).model
    pairs = record.decode_group_steps["pairs"].sum()
    assert pairs == tokens * model.top_k * model.n_moe_layers
    assert record.decode_group_steps["between_bytes"].sum() > 0
    assert set(record.decode_steps["worker"]) == set(range(6))


def act(*deeds, **fields):
    """Run what is done to engines at times, s."""
    sim = Simulation(ELASTIC.replace(**fields), absent=[f"decode:{n}" for n in range(4, 8)])
    for at, deed, *numbers in deeds:
        for number in numbers:
            worker = Worker("decode", number)
            sim.env.at(at, lambda _, deed=deed, worker=worker: getattr(sim.cluster, deed)(worker))
    return sim.run()


def test_engines_that_come_serve_after_a_pause_and_nobody_else_is_changed_before():
    narrow = act()
    wider = act((1.0, "start", 4, 5, 6, 7), width_pause=0.5)
    steps, before = wider.record.decode_group_steps, narrow.record.decode_group_steps
    done = steps["start"] < 1.0
    first = int(done.sum()) - 1  # in progress at 1 s, it ends half a second later
    assert first > 5
    assert steps[:first].tolist() == before[:first].tolist()
    assert steps["end"][first] == pytest.approx(before["end"][first] + 0.5)
    assert (steps["start"][first + 1 :] >= steps["end"][first]).all()
    late = wider.record.decode_steps
    assert (late["start"][late["worker"] >= 4] > 1.5).all()
    assert set(late["worker"]) == set(range(8))
    assert wider.record.completed.all()
    (moved,) = wider.record.relocations
    assert moved["stall_s"] == 0.5
    assert wider.summary["relocations"] == 1
    assert wider.summary["mean_tpot_ms"] > 0


def test_what_a_change_moves_takes_the_links():
    """From 4 ranks of 32 experts to 8: the new ones get theirs from those that hold them."""
    result = act((1.0, "start", 4, 5, 6, 7))
    (moved,) = result.record.relocations
    config = ELASTIC.replace(autoscale="none:n=8")
    prepared = prepare(config)
    engine, model = prepared.spec.decode, prepared.model
    assert engine.n_redundant == 128
    narrow = np.broadcast_to(np.arange(128), (prepared.trace.manifest.n_layers, 128))
    before = Placement(narrow, narrow // 32, 8)
    after = placement_of(config, prepared, "decode")
    links = expert_links(engine.step_time.gpu, model.bytes_per_expert, 8, 8)
    whole = transfer_of(expert_moves(before, after, 128, 8), links, model.n_moe_layers)
    assert whole.experts == model.n_moe_layers * 128  # the four that were there keep theirs
    assert moved["experts"] == whole.experts
    assert moved["stall_s"] == pytest.approx(whole.seconds)
    parts = "vllm:weights=0.1,imports=0,image=0,warm_up=0,graphs=2"
    (moved,) = act((1.0, "start", 4), start_up=parts, num_requests=400).record.relocations
    assert moved["stall_s"] == pytest.approx(2.0 + moved["transfer_s"])
    assert moved["asked_s"] == pytest.approx(1.0 + 0.1 + 2.0)


def test_engines_leave_from_the_end_when_they_have_nothing_left():
    result = act(
        (0.5, "start", 4, 5), (1.0, "stop", 5, 4), width_pause=0.0, output_len=60,
        request_rate=100, num_requests=600,
    )  # fmt: skip
    record = result.record
    assert record.completed.all()
    gone = {
        row["worker"]: row["at_s"] for row in record.states
        if row["state"] == OFF and row["at_s"] > 0
    }  # fmt: skip
    assert gone[5] <= gone[4]
    steps = record.decode_steps
    for number in (4, 5):
        mine = steps[steps["worker"] == number]
        assert mine["start"].min() > 0.5
        assert mine["end"].max() <= gone[number]
    assert worker_seconds(record, [8], 0.0, record.end_s).sum() == pytest.approx(8 * record.end_s)


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once_whatever_comes_and_goes(seed):
    rng = np.random.default_rng(seed)
    sim = Simulation(
        ELASTIC.replace(
            start_up="0.3", width_pause=0.05, retry="migrate", max_retries=10**6, num_requests=300,
            request_rate=80, min_workers="2", expert_placement="eplb" if seed == 2 else "linear",
        ),
        absent=[f"decode:{n}" for n in range(4, 8)],
    )  # fmt: skip

    def operator():
        for _ in range(60):
            yield sim.env.timeout(float(rng.exponential(0.05)))
            states = sim.cluster.states["decode"]
            serving = sum(what == READY for what in states)
            if rng.random() < 0.5:
                free = [n for n, what in enumerate(states) if what in (OFF, DRAINING)]
                if free:
                    sim.cluster.start(Worker("decode", free[0]))
            else:
                going = [n for n, what in enumerate(states) if what not in (OFF, DRAINING)]
                if len(going) > 2 and serving > 2:
                    timeout = float(rng.choice([0.05, np.inf]))
                    sim.cluster.stop(Worker("decode", going[-1]), timeout)

    sim.env.process(operator())
    record = sim.run().record
    assert (np.sort(record.numbers) == np.arange(300)).all()
    assert set(record.outcomes()) == {"completed"}
    assert len(record.relocations) > 5
    groups = np.sort(record.decode_group_steps, order="start")
    assert (groups["start"][1:] >= groups["end"][:-1] - 1e-12).all()  # one step at a time


def test_an_autoscaler_counts_engines():
    result = simulate(ELASTIC.replace(
        autoscale="hpa:interval=0.5,target=4,down_s=2", load="ladder:20,200,20@4", start_up="0.5",
        initial_workers="4", num_requests=None,
    ))  # fmt: skip
    scaling = result.summary["scaling"]
    assert result.record.completed.all()
    assert scaling["starts"] > 0 < scaling["stops"]
    assert 4 < scaling["mean_workers"]["decode"] < 8
    ready = scaling["replicas"]["decode"]["ready"]
    assert [min(ready), max(ready)] == [4, 8]
    whole = 8 * result.record.end_s / 3600
    assert 0.5 * whole < scaling["gpu_hours"] < whole


@on_each(
    "changes, said",
    [
        ({"data_parallel_size": 1}, "enable_elastic_ep"),
        ({"topology": "2C"}, "enable_elastic_ep"),
        ({"eplb_interval": 100, "expert_placement": "eplb"}, "enable_elastic_ep"),
        ({"fail": "decode:0@3"}, "enable_elastic_ep"),
        ({"min_workers": "3"}, "min_workers: 3 decode engines cannot hold 128"),
        ({"min_workers": "9"}, "min_workers"),
        ({"min_workers": "1"}, "min_workers"),
        ({"width_pause": -1}, "width_pause"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        simulate(ELASTIC.replace(**changes))


@pytest.mark.parametrize(("deed", "number"), [("stop", 1), ("start", 6), ("fail", 3)])
def test_engines_come_and_go_at_the_end_alone(deed, number):
    with pytest.raises(InputError, match=deed):
        act((0.5, deed, number))


def test_engines_do_not_switch_pools():
    prefill = {"data_parallel_size": 1, "tensor_parallel_size": 8}
    config = ELASTIC.replace(topology="1P1D", min_workers="1,4", prefill=prefill)
    with pytest.raises(InputError, match="switch"):
        Simulation(config).cluster.switch(Worker("decode", 3), "prefill")


@pytest.mark.parametrize("width", [4, 8])
def test_a_rule_knows_what_a_group_of_each_width_takes(width, monkeypatch):
    """As of the fixed group of that width, and for how long a change has it stand still."""
    known = {}

    def note(pools, *rest):
        elastic = any(pool.is_elastic for pool in pools)
        known[elastic] = (facts := scaling_facts(pools, *rest)).of("decode")
        return facts

    monkeypatch.setattr("eldr_sim.simulator.control.scaling.scaling_facts", note)
    config = ELASTIC.replace(all2all_backend="deepep_ht", num_requests=20, autoscale="seconds")
    simulate(config)
    fixed = {
        "data_parallel_size": width, "enable_elastic_ep": False, "min_workers": "1",
        "num_redundant_experts": 32 * width - 128,
    }  # fmt: skip
    simulate(config.replace(**fixed))
    elastic, same = known[True].widths[width], known[False]
    for batch, context in ((1, 300.0), (8, 500.0), (32, 1000.0)):
        assert elastic.step_s(batch, context) == pytest.approx(same.step_s(batch, context))
    assert elastic.prompt_s(300) == pytest.approx(same.prompt_s(300))
    assert elastic.step_s(32, 500.0) != pytest.approx(known[True].widths[5].step_s(32, 500.0))
    assert known[True].pause_s(4, 8) > known[True].pause_s(8, 4) == 0.0
    (moved,) = act((1.0, "start", 4, 5, 6, 7), all2all_backend="deepep_ht").record.relocations
    assert known[True].pause_s(4, 8) == pytest.approx(moved["stall_s"])
