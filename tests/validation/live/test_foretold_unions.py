"""Distinct experts of live steps, beside those that prompts foretell."""

import numpy as np
import pyarrow as pa
import pytest

from eldr_sim.policies.routing.activation import fit_activation
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation.live.calibration.setup_calibration import calibrated_requests
from eldr_sim.validation.live.live_run import REQUESTS, STEPS, LiveRun, RunInfo
from eldr_sim.validation.live.report.figures import foretold_unions

LAYERS, EXPERTS, TOP_K, PROMPT, OUTPUT = 2, 24, 2, 8, 6


def routing(folder, n, seed, calibration, kinds=4):
    """Requests of some kinds, whose tokens choose among four experts of their kind."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(kinds, size=n)
    first = np.repeat(kind * 4, PROMPT + OUTPUT)[:, None]
    experts = np.stack(
        [first + np.argsort(rng.random((len(first), 4)), axis=1)[:, :TOP_K] for _ in range(LAYERS)],
        axis=1,
    )
    trace = write_trace(
        folder, experts=experts, request_id=[f"{seed}-{i}" for i in range(n)],
        domain=["a", "b"] * (n // 2), prompt_len=[PROMPT] * n, output_len=[OUTPUT] * n,
        is_calibration=np.full(n, calibration), model="tiny", n_experts=EXPERTS,
        domains=["a", "b"], captured_by="a test", source_data="random", tool_versions={},
        provenance="synthetic",
    )  # fmt: skip
    return trace, experts


def run_of(trace, experts, batches, prompts=()):
    """A run of decode steps of these batches, as an engine that counts its experts logs them."""
    rng, rows = np.random.default_rng(1), []
    for number, batch in enumerate(batches):
        members = rng.choice(trace.n_requests, batch, replace=False)
        at = PROMPT if number not in prompts else 0
        places = members * (PROMPT + OUTPUT) + at
        tokens = 1 if at else PROMPT
        seen = np.concatenate([experts[place : place + tokens] for place in places])
        distinct = [len(np.unique(seen[:, layer])) for layer in range(LAYERS)]
        moments = [float(number)] * 4
        rows.append(["decode0", *moments, 0.0, 0.0, members.tolist(), [at] * batch,
                     [tokens] * batch, distinct, None])  # fmt: skip
    n = trace.n_requests
    requests = pa.table(
        [[str(i) for i in range(n)], ["a"] * n, [PROMPT] * n, [OUTPUT] * n, [0.0] * n, [0.0] * n,
         [0.0] * n, [0] * n, [[0.0]] * n], schema=REQUESTS,
    )  # fmt: skip
    info = RunInfo.model_construct(
        engines=[type("Engine", (), {"name": "decode0", "role": "decode"})]
    )
    return LiveRun(info, requests, pa.table(list(zip(*rows, strict=True)), schema=STEPS), trace)


@pytest.fixture
def both(tmp_path):
    calibration, _ = routing(tmp_path / "calibration", 40, 0, True)
    return calibration, *routing(tmp_path / "run", 20, 1, False)


def test_figures_are_those_of_plain_loops(both):
    """Alone and mixed steps are left out, and every expectation is summed expert by expert."""
    calibration, trace, experts = both
    batches = [1, 2, 3, 5, 8, 8, 4, 2, 3]
    run = run_of(trace, experts, batches, prompts=(5,))
    found = foretold_unions(run, calibration)
    model = fit_activation(calibrated_requests(calibration))
    predicted = [model.predict(c) for c in trace.prompt_counts(np.arange(trace.n_requests))]
    live, ours = [], []
    for number, row in enumerate(run.steps.to_pylist()):
        if number in (0, 5):
            continue
        live.append(sum(row["distinct"]) / LAYERS)
        total = 0.0
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                idle = 1.0
                for request in row["request"]:
                    idle *= 1 - predicted[request][layer, expert]
                total += 1 - idle
        ours.append(total / LAYERS)
    assert found["steps"] == 7
    assert found["live"] == pytest.approx(np.mean(live))
    assert found["by_prompts"] == pytest.approx(np.mean(ours), rel=2e-3)  # the grid of 2^-12
    error = 100 * np.mean(np.abs(np.array(ours) / live - 1))
    assert found["by_prompts_error_percent"] == pytest.approx(error, abs=0.3)


def test_prompts_explain_what_kinds_decide(both):
    """Steps of a batch size differ by how many kinds meet; the mean of requests knows nothing."""
    calibration, trace, experts = both
    found = foretold_unions(run_of(trace, experts, [4] * 60), calibration)
    assert found["explained_percent"] > 60
    assert found["by_prompts_error_percent"] < found["by_mean_error_percent"]


def test_prompts_that_tell_nothing_explain_nothing(tmp_path):
    """Where a prompt's kind is not its answer's, prompts explain no step."""
    calibration, _ = routing(tmp_path / "calibration", 40, 0, True)
    trace, experts = routing(tmp_path / "run", 20, 1, False)
    other, _ = routing(tmp_path / "other", 20, 7, False)
    run = run_of(trace, experts, [4] * 60)
    astray = LiveRun(run.info, run.requests, run.steps, other)
    assert foretold_unions(astray, calibration)["explained_percent"] < 10


def test_without_such_steps_there_are_no_figures(both):
    calibration, trace, experts = both
    found = foretold_unions(run_of(trace, experts, [1, 1]), calibration)
    assert found["steps"] == 0
    assert found["live"] is None
    assert found["explained_percent"] is None
