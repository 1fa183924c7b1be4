"""The estimate of steps of engines that share experts, against exact steps and in closed form."""

import numpy as np
import pytest

from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.expected_step import ExpectedStep, activated
from eldr_sim.simulator.setup.prepare import prepare

from ..on_each import on_each
from .first_placement import placement_of

PROMPT, OUTPUT = 64, 48
CELLS = [
    ("allgather_reducescatter", 4, 4, {}),
    ("allgather_reducescatter", 8, 32, {}),
    ("allgather_reducescatter", 8, 64, {"decode": {"expert_placement": "eplb"}}),
    ("allgather_alltoall", 8, 16, {}),
    ("nccl_alltoall", 4, 32, {}),
    ("pplx", 8, 16, {}),
    ("deepep_ll", 8, 8, {}),
    ("deepep_ll", 16, 16, {}),
    ("deepep_ll", 8, 64, {"decode": {"num_redundant_experts": 16, "expert_placement": "eplb"}}),
    ("deepep_ht", 4, 16, {"gpus_per_node": 2}),
    ("deepep_ht", 16, 32, {"tensor_parallel_size": 1}),
    ("deepep_ll", 4, 32, {"tensor_parallel_size": 2, "gpus_per_node": 4}),
]


def made(backend, engines, **fields):
    """A group under a trace that repeats nothing, its configuration and what it reads."""
    config = make_config(
        {
            "topology": "1P1D", "trace": "reference-moe", "policy": "jsq", "gpu": "H200",
            "frontend": "none",
            "data_parallel_size": engines, "enable_expert_parallel": True,
            "all2all_backend": backend, "input_len": PROMPT, "output_len": OUTPUT,
        } | fields
    )  # fmt: skip
    prepared = prepare(config)
    return config, prepared


def work_of(config, prepared, role="decode"):
    engine = getattr(prepared.spec, role)
    return ExpectedStep(
        engine, placement_of(config, prepared, role), prepared.trace, role == "prefill"
    )


@on_each("backend, engines, batch, fields", CELLS)
def test_steps_are_estimated_within_5_percent(backend, engines, batch, fields):
    """All engines decode equal batches: exact steps of a run against the step on mean work."""
    total = engines * batch
    load = {"num_requests": total, "request_rate": "inf"}
    config, prepared = made(backend, engines, **fields, **load)
    record = simulate(config).record
    steps = record.decode_group_steps
    full = steps[steps["pairs"] >= 0.95 * steps["pairs"].max()]
    tokens = full["pairs"].mean() / (8 * 48)
    assert len(full) >= 3
    assert tokens > 0.8 * total
    work = work_of(config, prepared)
    found = work.layers(round(tokens))
    for part in ("moe_s", "dispatch_s", "combine_s"):
        exact = full[part].mean()
        assert getattr(found, part) == pytest.approx(exact, rel=0.12), part
    exact = (full["end"] - full["start"]).mean()
    each = round(tokens / engines)
    assert 0.95 <= work.decode_s(each, PROMPT + OUTPUT / 2) / exact <= 1.02


@pytest.mark.parametrize(
    ("backend", "ranks", "batch", "m"),
    [
        ("deepep_ll", 4, 32, 2),
        ("deepep_ll", 4, 32, 1),
        ("allgather_reducescatter", 4, 64, 2),
        ("deepep_ht", 8, 48, 3),
        ("pplx", 4, 64, 3),
    ],
)
def test_steps_with_experts_on_gpus_of_their_own_are_estimated(backend, ranks, batch, m):
    """Micro-batches through the four stages, as exact steps: `disaggregated`."""
    total, engines = 4 * batch, 4
    fields = {"topology": f"1P{engines}A{ranks}F", "micro_batches": m, "gpus_per_node": 4}
    config, prepared = made(backend, engines, **fields, num_requests=total, request_rate="inf")
    steps = simulate(config).record.decode_group_steps
    full = steps[steps["pairs"] >= 0.95 * steps["pairs"].max()]
    assert full["pairs"].mean() / (8 * 48) > 0.8 * total
    each = round(full["pairs"].mean() / (8 * 48) / engines)
    exact = (full["end"] - full["start"]).mean()
    assert 0.94 <= work_of(config, prepared).decode_s(each, PROMPT + OUTPUT / 2) / exact <= 1.03


def test_prompts_of_groups_are_estimated():
    config, prepared = made("deepep_ht", 4, num_requests=400, request_rate="inf")
    record = simulate(config).record
    steps = record.prefill_group_steps
    tokens = steps["pairs"] // (8 * 48)
    full = steps[tokens == tokens.max()]
    exact = (full["end"] - full["start"]).mean()
    each = int(tokens.max()) // 4
    found = work_of(config, prepared, "prefill").prefill_s([(0, PROMPT)] * (each // PROMPT))
    assert found == pytest.approx(exact, rel=0.06)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_uniform_shares_in_closed_form(tokens):
    """The busiest rank of uniform routing has E/R (1 - (1 - k/E)^B) experts, and B k / R pairs."""
    config, prepared = made("deepep_ll", 8)
    work = work_of(config, prepared)
    work.shares = np.full_like(work.shares, 8 / 128)
    work.pairs = np.full_like(work.pairs, 8 / 8)
    found = work.layers(tokens)
    each = 16 * (1 - (1 - 8 / 128) ** tokens)
    np.testing.assert_allclose(work._active(tokens), each)
    assert found.busiest_pairs == pytest.approx(48 * tokens)
    np.testing.assert_allclose(activated(np.array([0.0, 1.0]), tokens), [0.0, 1.0])


def test_copies_of_experts_are_activated_in_turn():
    """n tokens of an expert of two copies activate min(n, 2) of them, by drawing them."""
    config, prepared = made(
        "deepep_ll", 8, decode={"num_redundant_experts": 128}, replica_choice="even"
    )
    work = work_of(config, prepared)
    assert (work.copies == 2).all()
    n = np.random.default_rng(1).binomial(20, work.shares, (4000, *work.shares.shape))
    drawn = np.minimum(n, 2).mean(axis=0).sum(axis=-1)
    np.testing.assert_allclose(work._active(20).sum(axis=-1), drawn, rtol=0.01)
