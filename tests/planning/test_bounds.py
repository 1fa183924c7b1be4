"""Lower bounds on workers are such: where drafts are lucky, requests refused, logs cut."""

import dataclasses

import numpy as np
import pytest

from eldr_sim.planning.search.bounds import bounds
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.run import offered_load, simulate_summary
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare

LEVEL = {"goodput": {"ttft": 1000, "tpot": 12}}
BASE = {"trace": "reference-moe", "gpu": "A100", "output_len": 64, "duration": 8, "warmup": 2}


def bound(fields, load=None):
    config = make_config(BASE | LEVEL | fields)
    return bounds(config, Objective(config.output.goodput, 0.9), load)


def test_lucky_drafts_lower_the_bound():
    """Every draft may be accepted, so that a step yields all of them and a token more."""
    plain = bound({"request_rate": 9000}).n_decode
    assert plain > 20
    for k in (1, 3):
        drafts = {"method": "ngram", "num_speculative_tokens": k}
        drafts["synthetic_acceptance_length"] = 1.0 + k
        found = bound({"request_rate": 9000, "speculative_config": drafts}).n_decode
        assert found <= np.ceil(plain / (1 + k)) + 1


def test_a_bound_with_drafts_holds_in_simulations():
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "draft_host_ms": 0.0}
    drafts["synthetic_acceptance_length"] = 4.0
    fields = BASE | LEVEL | {"request_rate": 60, "speculative_config": drafts, "output_len": 128}
    for n in (1, 2, 3):
        config = make_config(fields | {"topology": f"4P{n}D", "duration": 3, "warmup": 1})
        if simulate_summary(config)["slo_attainment"] >= 0.9:
            assert bounds(config, Objective(config.output.goodput, 0.9)).n_decode <= n
            return
    pytest.fail("no cluster is good enough to be bounded")


def test_refused_requests_need_no_workers():
    """One request in twenty is far longer than ``max_model_len``: it counts neither as a prompt nor
    as tokens to generate."""
    config = make_config(BASE | LEVEL | {"request_rate": 2000, "max_model_len": 4096})
    workload, window = offered_load(config, prepare(config).trace)
    prompts, outputs = workload.prompt_len.copy(), workload.output_len.copy()
    prompts[::20], outputs[::20] = 60_000, 60_000
    longer = dataclasses.replace(workload, prompt_len=prompts, output_len=outputs)
    objective = Objective(config.output.goodput, 0.9)
    plain, found = (
        bounds(config, objective, (workload, window)),
        bounds(config, objective, (longer, window)),
    )
    assert found.impossible == ""
    assert plain.n_prefill > 3
    assert plain.n_decode > 3
    assert found.n_prefill <= plain.n_prefill
    assert found.n_decode <= plain.n_decode


@pytest.mark.parametrize("stages", [2, 4])
def test_workers_of_several_stages_compute_as_many_prompts(stages):
    fields = {name: value for name, value in BASE.items() if name != "output_len"}
    fields |= {"request_rate": 4000, "topology": "8P", "goodput": {"ttft": 1000}}

    def fewest(n):
        config = make_config(fields | {"pipeline_parallel_size": n})
        return bounds(config, Objective(config.output.goodput, 0.9)).n_prefill

    plain = fewest(1)
    assert plain > 8
    assert fewest(stages) == pytest.approx(plain / stages, abs=1)


def test_a_log_outside_of_its_window_needs_no_workers(tmp_path):
    rows = [(0.005 * i, 300, 16) for i in range(4000)]
    rows = [(t, 300 if 5 <= t < 15 else 6000, 16 if 5 <= t < 15 else 900) for t, _, _ in rows]
    text = "\n".join(["start,in,out", *(f"{t:.3f},{p},{o}" for t, p, o in rows)])
    (tmp_path / "log.csv").write_text(text + "\n")
    fields = {name: value for name, value in BASE.items() if name not in ("duration", "output_len")}
    fields |= LEVEL | {"workload": str(tmp_path / "log.csv")}
    fields |= {"columns": "time_s=start,input=in,output=out", "topology": "1P1D"}
    config = make_config(fields | {"log_from": "5s", "log_to": "15s", "warmup": 1})
    workload, window = offered_load(config, prepare(config).trace)
    inside = (workload.arrival_s >= window[0]) & (workload.arrival_s < window[1])
    assert workload.prompt_len[inside].max() == 300
    if inside.all():
        pytest.skip("nothing is replayed before or behind the window")
    short = dataclasses.replace(
        workload, prompt_len=np.full_like(workload.prompt_len, 300),
        output_len=np.full_like(workload.output_len, 16),
    )  # fmt: skip
    objective = Objective(config.output.goodput, 0.9)
    found, plain = bounds(config, objective), bounds(config, objective, (short, window))
    assert (found.n_prefill, found.n_decode) == (plain.n_prefill, plain.n_decode)
