"""A recorded live run, simulated again: every token once, at its time, with its own experts."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.traces.routing.calibration import calibration_set
from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation.live.calibration.engine_calibration import (
    Delay,
    DriftModel,
    EngineCalibration,
    device_of,
    model_of,
    read_calibration,
    write_calibration,
)
from eldr_sim.validation.live.live_run import read_live_run, write_live_run
from eldr_sim.validation.live.report.comparison import compare_runs
from eldr_sim.validation.live.simulated.simulated_run import check_run, simulate_run
from eldr_sim.validation.live.simulated.timestamps import live_timestamps

SETUPS = ["colocated", "1P1D", "1P2D"]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("rate", [20.0, 2000.0])
def test_every_token_is_computed_once_within_the_budget(make_live_run, setup, rate):
    run, replayed = make_live_run(setup, rate=rate)
    prompt, output = (run.requests[f"{k}_len"].to_numpy() for k in ("prompt", "output"))
    computed = {"prefill": {}, "decode": {}}
    for step in replayed.steps.to_pylist():
        assert sum(step["tokens"]) <= 48
        assert len(step["request"]) <= 8 + (setup != "1P1D")
        assert len(set(step["request"])) == len(step["request"])
        role = "prefill" if step["engine"].startswith("prefill") else "decode"
        for request, position, tokens in zip(
            step["request"], step["position"], step["tokens"], strict=True
        ):
            done = computed[role].setdefault(request, [])
            done += range(position, position + tokens)
    for request in range(len(prompt)):
        last = prompt[request] + output[request] - 1
        if setup == "colocated":
            assert computed["decode"][request] == list(range(last))
        else:
            assert computed["prefill"][request] == list(range(prompt[request]))
            assert computed["decode"][request] == list(range(prompt[request] - 1, last))


@pytest.mark.parametrize("setup", SETUPS)
def test_simulated_steps_have_the_distinct_experts_of_their_tokens(make_live_run, setup):
    """The recording counts them token by token, the simulator's loop by bit sets."""
    run, replayed = make_live_run(setup, rate=500.0)
    active = replayed.steps["active"].to_pylist()
    logged = run.steps["distinct"].to_pylist()
    assert any(a is not None for a in active)
    for simulated, counted in zip(active, logged, strict=True):
        assert simulated in (None, sum(counted))


def test_a_prefill_step_takes_the_time_of_its_own_experts(make_live_run, live_calibration):
    run, _ = make_live_run("1P1D", rate=500.0)
    engine = run.info.engines[0]
    step_time = live_calibration.step_time(model_of(run.info.model), engine, 512)
    checked = 0
    for step in run.steps.to_pylist():
        if step["engine"] == "prefill0":
            chunks = list(zip(step["position"], step["tokens"], strict=True))
            attention = step_time.parts(chunks=chunks).attention
            assert step["attention_s"] == pytest.approx(attention, rel=1e-6)
            checked += len(step["request"]) > 1
    assert checked > 3


@pytest.mark.parametrize("setup", SETUPS)
def test_timestamps_read_back_from_the_recording_are_those_simulated(
    make_live_run, live_calibration, setup
):
    run, replayed = make_live_run(setup, rate=200.0)
    live, simulated = live_timestamps(run, live_calibration.info), replayed.timestamps
    for name, moments in vars(simulated).items():
        if name == "token_s":
            assert all(map(np.array_equal, moments, live.token_s))
        elif isinstance(moments, np.ndarray):
            np.testing.assert_allclose(getattr(live, name), moments, atol=1e-12, err_msg=name)
    for of in ("ttft", "e2el"):
        total = sum(simulated.components(of).values())
        np.testing.assert_allclose(total, getattr(simulated, f"{of}_s"), atol=1e-12)


def test_with_priorities_short_prompts_are_served_first(make_live_run):
    """More requests than one engine serves: prompts begin rather by length than as they came."""
    _, in_order = make_live_run("colocated", rate=400.0, n=60, seed=4)
    run, shortest = make_live_run("colocated", rate=400.0, n=60, seed=4, queue_order="sjf")
    prompt = run.requests["prompt_len"].to_numpy()

    def correlation(replayed):
        first = np.array([times[0] for times in replayed.timestamps.token_s])
        return np.corrcoef(prompt[8:], first[8:])[0, 1]  # the first eight find places

    assert correlation(shortest) > 0.7 > 0.4 > correlation(in_order)


def test_one_request_takes_the_times_of_its_way(make_live_run, live_calibration):
    run, replayed = make_live_run("1P1D", n=3, rate=0.1)
    info, moments = live_calibration.info, replayed.timestamps
    prompt = run.requests["prompt_len"].to_numpy()
    np.testing.assert_allclose(moments.queued_s - moments.sent_s, 2e-3 + 1e-5 * prompt)
    np.testing.assert_allclose(moments.handed_s - moments.prefill_end_s, 4e-3 + 2e-5 * prompt)
    blocks = -(-prompt // 4)
    # 3 layers of keys and values, 2 heads of 16 in 2 bytes.
    moved = 1e-3 + blocks * 6 * 1e-5 + blocks * 4 * 3 * 2 * 2 * 16 * 2 / 1e8
    np.testing.assert_allclose(moments.decode_start_s - moments.handed_s, moved, atol=1e-8)
    np.testing.assert_allclose(moments.last_token_s - moments.last_step_s, info.egress_s)


def test_the_proxy_s_eldr_policy_takes_its_fit_from_a_file(make_live_run, tmp_path):
    rng = np.random.default_rng(5)
    trace = write_trace(
        tmp_path / "trace",
        experts=np.argsort(rng.random((40 * 10, 3, 70)), axis=-1)[..., :3],
        request_id=[str(i) for i in range(40)],
        domain=["a", "b"] * 20,
        prompt_len=[6] * 40,
        output_len=[4] * 40,
        is_calibration=[True] * 40,
        model="tiny",
        n_experts=70,
        domains=["a", "b"],
        captured_by="a test",
        source_data="random",
        tool_versions={},
        provenance="synthetic",
    )
    chosen = calibration_set(trace, workload="log", domain_mix={"a": 0.5, "b": 0.5})
    fit(chosen, 2, seed=0).save(tmp_path / "artifact.npz")
    run, replayed = make_live_run("1P2D", policy="eldr", artifact=tmp_path / "artifact.npz")
    assert set(replayed.engine.tolist()) == {0, 1}
    alternate, _ = make_live_run("1P2D", artifact=tmp_path / "artifact.npz")  # which it ignores
    assert run.requests["engine"] != alternate.requests["engine"]


@pytest.mark.parametrize("setup", ["colocated", "1P1D"])
def test_few_kv_blocks_preempt(make_live_run, live_calibration, setup):
    """Preempted requests have their first and last token; the others every one."""
    run, enough = make_live_run(setup, rate=5000.0)
    engines = [e.model_copy(update={"n_blocks": 30}) for e in run.info.engines]
    small = replace(run, info=run.info.model_copy(update={"engines": engines}))
    replayed = simulate_run(small, live_calibration)
    moments = replayed.timestamps
    unknown = np.array([np.isnan(times).any() for times in moments.token_s])
    assert 0 < unknown.sum() < len(unknown)
    assert np.isfinite(moments.ttft_s).all()
    assert np.isfinite(moments.e2el_s).all()
    assert moments.last_token_s.max() > enough.timestamps.last_token_s.max()
    generated = sum(replayed.steps["batch"].drop_null().to_pylist())
    assert generated == run.requests["output_len"].to_numpy().sum()
    compared = compare_runs([(small, replayed)], live_calibration).summary
    assert compared["distinct"][0]["matched_steps"] == 0  # compositions are not known
    assert compared["runs"][0]["simulated_mean_batch"] > 0


def test_a_slower_machine_is_known_by_its_probe(make_live_run, live_calibration):
    """A recording in which every time is stretched, probes included, is predicted as well."""
    run, replayed = make_live_run("colocated", n=20, rate=100.0)
    drift = DriftModel(reference_s=1e-3, moe=1.0, attention=1.0, rest=1.0, step=1.0)
    info = live_calibration.info
    slow_info = info.model_copy(
        update={
            "drift": drift,
            "egress_s": 2 * info.egress_s,
            "ingress_s": Delay(base_s=2 * info.ingress_s.base_s,
                               per_token_s=2 * info.ingress_s.per_token_s),
        }
    )  # fmt: skip
    steps = run.steps.to_pydict()
    for name in ("start_s", "end_s", "moe_s", "attention_s"):
        steps[name] = [2 * t for t in steps[name]]
    steps["probe_s"] = [2e-3] * run.steps.num_rows
    place = run.requests.schema.get_field_index("sent_s")
    sent = pa.array(2 * run.requests["sent_s"].to_numpy())
    slow = replace(
        run,
        requests=run.requests.set_column(place, "sent_s", sent),
        steps=pa.table(steps, schema=run.steps.schema),
    )
    again = simulate_run(slow, EngineCalibration(slow_info, live_calibration.tables))
    np.testing.assert_allclose(
        again.timestamps.last_step_s, 2 * replayed.timestamps.last_step_s, rtol=1e-9
    )
    rows = compare_runs([(slow, again)], EngineCalibration(slow_info, live_calibration.tables))
    (step,) = [
        row
        for row in rows.summary["steps"]
        if (row["role"], row["group"], row["component"]) == ("colocated", "all", "moe")
    ]
    assert step["p90_percent"] < 1e-3


def test_a_recording_and_a_calibration_survive_the_disk(make_live_run, live_calibration, tmp_path):
    run, replayed = make_live_run("1P1D", n=5)
    (tmp_path / "run").mkdir()
    write_live_run(tmp_path / "run", run.info, run.requests, run.steps)
    (tmp_path / "run" / "trace").symlink_to(run.trace.path)
    write_calibration(tmp_path, live_calibration.info, live_calibration.tables)
    again = simulate_run(read_live_run(tmp_path / "run"), read_calibration(tmp_path))
    assert again.steps == replayed.steps


def test_run_simulates_the_calibrated_server(make_live_run, live_calibration, tmp_path, run_cli):
    """One request alone takes the steps of the calibration's own formulas."""
    run, _ = make_live_run("colocated", n=5)
    engine = run.info.engines[0]
    write_calibration(tmp_path, live_calibration.info, live_calibration.tables)
    device = device_of(live_calibration.gpu.name, engine, 1 << 34)
    (tmp_path / "gpu.json").write_text(device.model_dump_json())
    model = tmp_path / "model" / "config.json"
    model.parent.mkdir()
    model.write_text(json.dumps(run.info.model))
    base = [
        "run", "--model", model, "--tables", tmp_path / "tables", "--topology", "1C",
        "--trace", run.trace.path, "--workload", "trace",
        "--request-rate", "1", "--num-prompts", "1",
    ]  # fmt: skip
    engine_options = [
        "--gpu", tmp_path, "--max-model-len", "512", "--block-size", engine.block_size,
        "--num-gpu-blocks-override", engine.n_blocks, "--no-enable-prefix-caching",
        "--no-async-scheduling", "--out", tmp_path / "result",
    ]  # fmt: skip
    code, _, error = run_cli(*base)
    assert code == 2
    assert "is of some machine, the run of H100" in error
    code, _, error = run_cli(*base, *engine_options)
    assert code == 0, error
    summary = json.loads((tmp_path / "result" / "summary.json").read_text())
    assert {part["label"] for part in summary["provenance"].values()} == {"measured"}
    steps = pq.read_table(tmp_path / "result" / "steps.parquet").to_pylist()
    alone = [s for s in steps if (s["batch"], s["tokens"]) == (1, 1)]
    assert alone
    for step in alone:
        attention_s = 3 * (2e-5 + 1e-7 * step["context_tokens"])
        moe_s = 3 * (3e-4 + 2e-5 * 3 + 1e-5)
        taken = moe_s + attention_s + (2e-3 + 2e-5 + 1e-4)
        assert step["end_s"] - step["start_s"] == pytest.approx(taken, rel=0.02)


def test_what_does_not_fit_is_refused(make_live_run, live_calibration, tmp_path):
    run, _ = make_live_run("1P1D", n=5)
    longer = run.requests.set_column(
        run.requests.schema.get_field_index("output_len"),
        "output_len",
        pa.array(run.trace.output_len + 2, "int32"),
    )
    with pytest.raises(InputError, match="a row for every token"):
        check_run(replace(run, requests=longer))
    config = run.info.model | {"num_hidden_layers": 4}
    deeper = replace(run, info=run.info.model_copy(update={"model": config}))
    with pytest.raises(InputError, match="3 layers"):
        check_run(deeper)
    for kind in ("moe", "engine_step"):
        some = [t for t in live_calibration.tables if t.metadata.kind != kind]
        with pytest.raises(InputError, match=f"no table of this model for {kind}"):
            simulate_run(run, EngineCalibration(live_calibration.info, some))
    with pytest.raises(InputError, match="cannot read"):
        read_calibration(tmp_path)
    (tmp_path / "calibration.json").write_text('{"egress_s": -1}')
    with pytest.raises(InputError, match="holds no calibration"):
        read_calibration(tmp_path)
