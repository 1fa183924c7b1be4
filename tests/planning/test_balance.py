"""Diagnosis from counters, on loads whose skew is known by construction."""

import numpy as np
import pytest
from click.testing import CliRunner

from eldr_sim.cli.main import cli
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.planning.balance import examine, rank_skew
from eldr_sim.policies.placement.base import Placement
from eldr_sim.policies.replicas.metro import MetroParameters
from eldr_sim.traces.routing.counters import Counters

RANKS, EXPERTS = 8, 128


def counters(*windows, of="experts"):
    """Return counters of windows, each [experts], in two equal layers."""
    counts = np.array([[own, own] for own in windows], dtype=float)
    return Counters(counts, of, np.empty(0), "test")


@pytest.fixture(scope="module")
def step_time():
    return build_step_time_model(
        load_model("Qwen3-30B-A3B"), load_gpu("H100"), max_num_seqs=2048, max_model_len=4096,
        max_num_batched_tokens=2048, parallelism=Parallelism(1, True, RANKS),
    )  # fmt: skip


def first_rank(factor):
    """Return loads where each expert of the first rank has ``factor`` times the others' load."""
    load = np.full(EXPERTS, 1000.0)
    load[: EXPERTS // RANKS] *= factor
    return load


@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0])
def test_the_skew_is_that_of_the_construction(step_time, factor):
    found = examine(counters(first_rank(factor)), step_time, RANKS, 256)
    assert found.skew == pytest.approx([factor * RANKS / (factor + RANKS - 1)] * 2)
    now, eplb = found.options[:2]
    assert now.busiest == pytest.approx(found.skew[0])
    assert eplb.busiest == pytest.approx(1.0, abs=0.02 if factor == 5.0 else 1e-9)


def test_prompts_gain_what_the_skew_costs_and_even_loads_gain_nothing(step_time):
    skewed, even = (
        examine(counters(first_rank(factor)), step_time, RANKS, 2048 * RANKS, prompts=True)
        for factor in (3.0, 1.0)
    )
    assert skewed.options[1].step_ms < 0.9 * skewed.options[0].step_ms
    assert even.options[1].step_ms == pytest.approx(even.options[0].step_ms, rel=0.02)


def test_redundant_experts_activate_more_in_decode_and_metro_fewer(step_time):
    load = np.random.default_rng(0).dirichlet(np.full(EXPERTS, 0.5)) * 1e6
    options = examine(counters(load), step_time, RANKS, 256, redundant=[32]).options
    of = {each.name: each for each in options}
    assert of["EPLB, even"].busiest_experts > of["EPLB"].busiest_experts
    assert of["EPLB, metro"].busiest_experts < of["EPLB, even"].busiest_experts


def test_copies_share_the_load_of_their_expert():
    """Ranks hold experts 0 and 1, 0 and 2, 3 and 4: 6 / 2 + 1, 6 / 2 + 1, 2 + 2 tokens."""
    expert, rank = np.array([[0, 1, 0, 2, 3, 4]]), np.array([[0, 0, 1, 1, 2, 2]])
    placement = Placement(expert, rank, 3)
    assert rank_skew(np.array([[6.0, 1.0, 1.0, 2.0, 2.0]]), placement) == pytest.approx([1.0])


def test_placements_are_judged_on_the_second_half(step_time):
    even = examine(counters(first_rank(5.0), first_rank(1.0)), step_time, RANKS, 256)
    assert even.options[0].busiest == pytest.approx(1.0)
    alone = examine(counters(first_rank(1.0)), step_time, RANKS, 256)
    assert even.options[0].step_ms == alone.options[0].step_ms


def test_metro_takes_its_overhead_in_each_layer_and_no_more(step_time):
    load = np.random.default_rng(0).dirichlet(np.full(EXPERTS, 0.5)) * 1e6
    options = examine(counters(load), step_time, RANKS, 256, redundant=[32]).options
    of = {each.name: each.moe_ms for each in options}
    overhead_ms = 1e-3 * MetroParameters().overhead_us * step_time.n_moe_layers
    assert overhead_ms < of["EPLB, metro"] < of["EPLB, even"] + overhead_ms


def test_a_skew_that_moves_is_not_kept(step_time):
    load = np.random.default_rng(1).dirichlet(np.full(EXPERTS, 0.3)) * 1e6
    lasting = examine(counters(load, load), step_time, RANKS, 256)
    moved = examine(counters(load, load[::-1]), step_time, RANKS, 256)
    assert lasting.kept == pytest.approx(1.0)
    assert lasting.correlation == pytest.approx(1.0)
    assert moved.kept < 0.3
    assert moved.options[1].busiest > lasting.options[1].busiest


def test_ranks_and_logs_have_skew_alone(step_time):
    by_rank = examine(counters([3.0] + [1.0] * 7, of="ranks"), step_time, RANKS, 256)
    assert by_rank.skew == pytest.approx([2.4, 2.4])
    assert not by_rank.options
    logged = Counters(np.empty((0, 0, 0)), "ranks", np.array([0.5, 0.25]), "a log")
    assert examine(logged, step_time, RANKS, 256).halves == (2.0, 4.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (counters(np.ones(64)), "64 experts a layer"),
        (Counters(np.ones((1, 60, EXPERTS)), "experts", np.empty(0), ""), "60 layers"),
        (counters(np.ones(4), of="ranks"), "4 ranks were counted"),
    ],
)
def test_counters_of_another_model_are_refused(step_time, given, said):
    with pytest.raises(InputError, match=said):
        examine(given, step_time, RANKS, 256)


def test_the_command_says_what_helps(tmp_path):
    rows = [f"0,{e},{load}" for e, load in enumerate(first_rank(4.0))]
    (tmp_path / "x.csv").write_text("\n".join(["layer,expert,count", *rows]))
    made = CliRunner().invoke(cli, ["balance", str(tmp_path / "x.csv"), "--prompts"])
    assert made.exit_code == 0, made.output
    assert "the busiest GPU has 2.91 times the mean load" in made.output
    assert "Best: EPLB" in made.output
    assert "not known from one window" in made.output
    (tmp_path / "y.csv").write_text("layer,expert,count\n0,0,x")
    refused = CliRunner().invoke(cli, ["balance", str(tmp_path / "y.csv")])
    assert refused.exit_code != 0
    assert "line 2: not numbers" in str(refused.exception) + refused.output
