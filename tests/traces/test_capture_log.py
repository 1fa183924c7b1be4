"""The log of the vLLM plug-in, joining it with requests, and reading prompts: without an engine."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture import vllm_engine
from eldr_sim.traces.routing.capture.captured import calibration_split, check_options
from eldr_sim.traces.routing.capture.collect import collect
from eldr_sim.traces.routing.capture.prompts import Prompt, read_prompts
from eldr_sim.traces.routing.capture.step_log import (
    Header,
    StepLog,
    external_ids,
    logged_rows,
    read_log,
)
from eldr_sim.traces.routing.capture.vllm_engine import failure, from_routed_experts
from eldr_sim.traces.routing.format import open_trace

from ..on_each import on_each
from ..waiting import wait_until

LAYERS, E, K = [1, 2, 5], 300, 4


def header(**changes):
    about = {
        "model": "folder/tiny",
        "layers": LAYERS,
        "n_decoder_layers": 6,
        "n_experts": E,
        "top_k": K,
        "engine": "vLLM 0, test",
        "tool_versions": {"vllm": "0"},
    }
    return Header(**(about | changes))


def chosen(tokens, seed=0, n_experts=E):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, len(LAYERS), n_experts)), axis=-1)[..., :K]


def write_log(folder, requests, *, chunk=3, names=None, head=None):
    """Log requests ``{name: (prompt, experts)}`` together, ``chunk`` tokens of each a step."""
    log = StepLog(folder, head or header())
    at = dict.fromkeys(requests, 0)
    while at:
        rows, parts, new = [], [], {}
        for name in list(at):
            prompt, experts = requests[name]
            take = min(chunk, len(experts) - at[name])
            rows.append((name, at[name], take))
            parts.append(experts[at[name] : at[name] + take])
            if at[name] == 0:
                new[name] = prompt
            at[name] += take
            if at[name] == len(experts):
                del at[name]
        log.step(rows, np.concatenate(parts), new)
    log.close()


def three(tmp_path, **options):
    requests = {
        "cmpl-alpha-0-0123abcd": ([5, 6, 7], chosen(8, 1)),
        "cmpl-beta-0-4567abcd": ([8], chosen(3, 2)),
        "chatcmpl-gamma-89abcdef": ([9] * 5, chosen(11, 3)),
    }
    write_log(tmp_path / "log", requests, **options)
    return {name.split("-")[1]: experts for name, (_, experts) in requests.items()}


@st.composite
def schedules(draw):
    """Requests, and steps that compute their tokens in chunks, some of them again."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    steps, at = [], [0] * len(lengths)
    while any(a < n for a, n in zip(at, lengths, strict=True)):
        step = []
        for q, n in enumerate(lengths):
            if 0 < at[q] < n and draw(st.integers(0, 5)) == 5:
                at[q] = 0  # preempted: computed from the start again
            if at[q] < n:
                take = n - at[q] - draw(st.integers(0, n - at[q] - 1))
                step.append((q, at[q], take))
                at[q] += take
        steps.append((draw(st.integers(0, 1)), draw(st.permutations(step))))
    return lengths, steps


@given(schedules())
def test_requests_come_back_whole(tmp_path_factory, schedule):
    """Whatever the chunks, the preemptions, the order within a step and the worker."""
    lengths, steps = schedule
    folder = tmp_path_factory.mktemp("log")
    experts = [chosen(n, seed) for seed, n in enumerate(lengths)]
    logs = [StepLog(folder, header()), StepLog(folder, header())]
    for worker, step in steps:
        logs[worker].step(
            [(f"r{q}", start, count) for q, start, count in step],
            np.concatenate([experts[q][start : start + count] for q, start, count in step]),
            {f"r{q}": [q] for q, start, _ in step if start == 0},
        )
    for log in logs:
        log.close()
    found, requests = read_log(folder)
    assert found == header()
    assert {request.request_id for request in requests} == {f"r{q}" for q in range(len(lengths))}
    for request in requests:
        q = int(request.request_id[1:])
        assert request.missing == 0
        assert request.prompt == [q]
        np.testing.assert_array_equal(request.experts, experts[q])
    logged = sum(count for _, step in steps for _, _, count in step)
    assert logged_rows(folder) == logged


def test_rows_that_were_never_computed_are_counted(tmp_path):
    log = StepLog(tmp_path, header())
    log.step([("r", 16, 3)], chosen(3), {"r": list(range(18))})
    log.close()
    (request,) = read_log(tmp_path)[1]
    assert (request.missing, len(request.experts)) == (16, 19)
    with pytest.raises(InputError, match=r"16 of the 19 tokens of r .*no-enable-prefix-caching"):
        collect(tmp_path, [Prompt("r", "d", None)])


def test_prefill_and_decode_workers_share_a_request(tmp_path):
    """The prefill worker's log ends with the prompt, the decode worker's begins with its last."""
    experts = chosen(9)
    for position, part, suffix in ((0, experts[:6], "aaaaaaaa"), (5, experts[5:], "bbbbbbbb")):
        log = StepLog(tmp_path, header())
        name = f"cmpl-one-0-{suffix}"
        log.step([(name, position, len(part))], part, {name: [1, 2, 3, 4, 5, 6]})
        log.close()
    (request,) = read_log(tmp_path)[1]
    np.testing.assert_array_equal(request.experts, experts)


def test_log_of_an_engine_that_died_is_read_up_to_its_last_step(tmp_path):
    three(tmp_path)
    (lines,) = (tmp_path / "log").glob("*.jsonl")
    text = lines.read_text()
    lines.write_text(text + '{"rows":[["cmpl-al')
    ids = lines.with_suffix(".ids")
    ids.write_bytes(ids.read_bytes() + b"\x01\x02\x03")  # rows of a step that no line names
    assert len(read_log(tmp_path / "log")[1]) == 3
    lines.write_text(text.replace('"prompts":{}', '"prompts":', 1))
    with pytest.raises(InputError, match=r":3: is not a step"):
        read_log(tmp_path / "log")
    lines.write_text(text)
    ids.write_bytes(ids.read_bytes()[:40])
    with pytest.raises(InputError, match=r"names .* rows, steps-.*\.ids has"):
        read_log(tmp_path / "log")
    ids.unlink()
    with pytest.raises(InputError, match=r"\.ids: No such file"):
        read_log(tmp_path / "log")


def test_broken_logs_are_told_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"holds no steps"):
        read_log(tmp_path)
    three(tmp_path)
    write_log(tmp_path / "log", {"x": ([1], chosen(2))}, head=header(layers=[0, 1, 2]))
    with pytest.raises(InputError, match="one model"):
        read_log(tmp_path / "log")
    for file in (tmp_path / "log").glob("*.jsonl"):
        file.write_text("{}\n")
    with pytest.raises(InputError, match="has no header"):
        read_log(tmp_path / "log")


@pytest.mark.parametrize(
    ("internal", "client"),
    [
        ("cmpl-bench-7-0-0a1b2c3d", "bench-7"),
        ("cmpl-bench-7-0-0a1b2c3d", "cmpl-bench-7-0"),
        ("chatcmpl-bench-7-0a1b2c3d", "bench-7"),
        ("3-0a1b2c3d", "3"),
        ("plain", "plain"),
        ("cmpl-a-2-0a1b2c3d", "a-2"),
    ],
)
def test_clients_name_of_a_request(internal, client):
    assert client in external_ids(internal)


def test_second_prompt_of_a_call_is_not_taken_for_the_first():
    assert "a" not in external_ids("cmpl-a-1-0a1b2c3d")


def test_collect_makes_a_trace(tmp_path, run_cli):
    experts = three(tmp_path)
    requests = tmp_path / "requests.jsonl"
    rows = [
        {"request_id": "gamma", "domain": "chat"},
        {"request_id": "alpha", "domain": "text", "split": "calibration"},
        {"request_id": "nobody", "domain": "text"},
    ]
    requests.write_text("\n".join(map(json.dumps, rows)))
    command = ["trace", "capture", "collect", tmp_path / "log", "--requests", requests]
    code, out, error = run_cli(*command, "--out", tmp_path / "trace")
    assert code == 0
    assert "2 requests, 19 tokens, 3 layers, 300 experts, top-4" in out
    assert error.splitlines() == [
        "Left out: 1 requests are not in the log, such as nobody",
        "Left out: 1 requests of the log that requests.jsonl does not name",
    ]
    trace = open_trace(tmp_path / "trace")
    np.testing.assert_array_equal(
        trace.experts, np.concatenate([experts["gamma"], experts["alpha"]])
    )
    assert trace.experts.dtype == np.uint16
    assert trace.prompt_len.tolist() == [5, 3]
    assert trace.output_len.tolist() == [6, 5]
    assert trace.is_calibration.tolist() == [True, True]  # chat has one request only
    assert trace.manifest.model == "tiny"
    assert trace.manifest.notes.startswith("MoE layers: decoder layers 1-2, 5 of 0-5")
    code, _, error = run_cli(*command, "--out", tmp_path / "trace")
    assert (code, error.count("\n")) == (2, 1)


def test_collect_by_token_ids(tmp_path):
    first, second = chosen(4, 1), chosen(5, 2)
    write_log(tmp_path, {"x-0123abcd": ([1, 2], first), "y-0123abcd": ([1, 2], second)})
    same = [Prompt("a", "d", [1, 2]), Prompt("b", "d", [1, 2]), Prompt("c", "d", [1, 2])]
    collected = collect(tmp_path, same)
    assert [prompt.request_id for prompt in collected.prompts] == ["a", "b"]
    assert collected.absent == ["c"]
    np.testing.assert_array_equal(collected.captured.experts[1], second)


def test_collect_leaves_out_what_did_not_generate(tmp_path):
    write_log(tmp_path, {"a": ([1, 2], chosen(2)), "b": ([1, 2], chosen(3))})
    collected = collect(tmp_path, [Prompt("a", "d", None), Prompt("b", "d", None)])
    assert collected.unfinished == ["a"]
    with pytest.raises(InputError, match="none of the 1 requests that are in it has a generated"):
        collect(tmp_path, [Prompt("a", "d", None), Prompt("z", "d", None)])
    with pytest.raises(InputError, match="none of the 1 requests is among the 2"):
        collect(tmp_path, [Prompt("z", "d", None)])


def test_prompts_are_read(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "hello", "domain": "a"},
        {"prompt": [1, 2], "domain": "b", "request_id": "mine", "split": "serving"},
        {"prompt": [{"role": "user", "content": "hi"}], "domain": "a"},
    ]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    prompts = read_prompts(file)
    assert [p.request_id for p in prompts] == ["a-0000", "mine", "a-0001"]
    assert [p.split for p in prompts] == [None, "serving", None]
    assert [p.content for p in prompts] == [row["prompt"] for row in rows]


@on_each(
    "text, problem",
    [
        ("", "holds no prompt"),
        ("{", r"p\.jsonl:1: is not valid JSON"),
        ("[1]", "holds a JSON list"),
        ('{"prompt": "x"}', "domain is None"),
        ('{"prompt": "x", "domain": 3}', "domain is 3"),
        ('{"prompt": "", "domain": "d"}', "prompt is ''"),
        ('{"prompt": [], "domain": "d"}', r"prompt is \[\]"),
        ('{"prompt": [1, -2], "domain": "d"}', "prompt is"),
        ('{"prompt": [true], "domain": "d"}', "prompt is"),
        ('{"prompt": [{"role": "user"}], "domain": "d"}', "prompt is"),
        ('{"domain": "d", "request_id": "r"}', "prompt is None"),
        ('{"prompt": "x", "domain": "d", "request_id": 3}', "request_id is 3"),
        ('{"prompt": "x", "domain": "d", "split": "test"}', "split is 'test'"),
        ('{"prompt": "x", "domain": "d", "request_id": "r"}\n' * 2, "'r' comes more than once"),
    ],
)
def test_bad_prompts_are_one_line(tmp_path, text, problem):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=problem) as error:
        read_prompts(file)
    assert "\n" not in str(error.value)


def test_split_keeps_what_a_prompt_says():
    prompts = [Prompt(str(i), "ab"[i % 2], [1]) for i in range(10)]
    prompts[0] = Prompt("0", "a", [1], "serving")
    prompts[9] = Prompt("9", "b", [1], "calibration")
    calibration = calibration_split(prompts, 0.5)
    # a: 2 4 6 8 open, first two; b: 1 3 5 7 open, first two, and 9 by name
    assert np.flatnonzero(calibration).tolist() == [1, 2, 3, 4, 9]
    with pytest.raises(InputError, match="calibration_fraction: got 1"):
        check_options("new", False, 1.0)


def test_routed_experts_of_vllm(tmp_path):
    """Dense layers are zeros in vLLM's arrays and no layers of the trace."""
    array = np.zeros((7, 6, K), dtype=np.uint8)
    array[:, LAYERS] = chosen(7, n_experts=32)
    captured = from_routed_experts([array, array[:5]], [4, 2], [4, 4])
    assert captured.layers == LAYERS
    np.testing.assert_array_equal(captured.experts[1], chosen(7, n_experts=32)[:5])
    with pytest.raises(InputError, match="experts of 7 tokens for 4 of a prompt and 5"):
        from_routed_experts([array], [4], [5])


def test_reason_of_a_failure_is_one_line():
    log = """INFO starting
(Worker pid=3) ERROR 11-21 [x.py:1] Traceback (most recent call last):
(Worker pid=3) ERROR 11-21 [x.py:1] ValueError: No model at folder/x
Exception: WorkerProc initialization failed due to an exception in a background process.
"""
    assert failure(log) == "ValueError: No model at folder/x"
    log = """pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, no model type `x`. [type=value_error]
    For further information visit https://errors.pydantic.dev
"""
    assert failure(log) == "no model type `x`. [type=value_error]"
    assert failure("a\nkilled\n") == "failed: killed"
    assert failure("") == "failed without a word"


def test_interrupt_leaves_no_process_of_vllm_behind(tmp_path, monkeypatch):
    """vLLM starts processes of its own; they must end with it."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/pid\nwait\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))

    def interrupt():
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vllm_engine._run(tmp_path / "job.json", "plugin", interrupt)
    grandchild = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{grandchild}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z")  # init reaps it


def test_what_is_not_installed_is_told_in_one_line(tmp_path, monkeypatch, run_cli):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": [1], "domain": "d"}')
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    for engine, name in (("vllm", "vLLM"), ("transformers", "torch")):
        code, _, error = run_cli(
            "trace", "capture", engine, "m", "--prompts", file, "--out", tmp_path / "t"
        )
        assert (code, error.count("\n")) == (2, 1)
        assert f"{name} is not installed" in error
        assert "pip install" in error


def test_plugin_costs_nothing_where_it_is_not_asked_for():
    code = (
        "import sys; from eldr_sim.traces.routing.capture.vllm_plugin import register; register(); "
        "print(sorted({'torch', 'vllm', 'numpy', 'numba', 'pyarrow'} & set(sys.modules)))"
    )
    environment = {"PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_nothing_of_the_engines_process_imports_numba():
    """vLLM 0.32 on a CPU does not start where it is imported."""
    code = (
        "import sys; import eldr_sim.traces.routing.capture.vllm_run, "
        "eldr_sim.traces.routing.capture.step_log, "
        "eldr_sim.traces.routing.capture.gates; print('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class FakeRouter:
    """A router of vLLM: unsorted top-k of its scores."""

    global_num_experts = E

    def _compute_routing(self, scores):
        import torch

        weights, ids = torch.topk(scores, K, sorted=False)
        return weights.flip(-1), ids.flip(-1).to(torch.int32)


def test_plugin_logs_the_ranked_experts_of_each_request(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="needs the extra 'capture'")
    from eldr_sim.traces.routing.capture.vllm_plugin import _Recorder

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0"))
    blocks = {
        "model.layers.0.mlp": SimpleNamespace(),
        "model.layers.2.mlp.experts": SimpleNamespace(router=FakeRouter()),
        "model.layers.1.mlp.experts": SimpleNamespace(router=FakeRouter()),
    }
    runner = SimpleNamespace(
        get_model=lambda: SimpleNamespace(named_modules=lambda: blocks.items()),
        device=torch.device("cpu"),
        model_config=SimpleNamespace(
            dtype=torch.float32, model="m", hf_text_config=SimpleNamespace(num_hidden_layers=3)
        ),
    )
    recorder = _Recorder(runner, str(tmp_path))

    def step(tokens, new=(), cached=()):
        total = sum(tokens.values())
        # Engines pad batches: rows beyond the scheduled tokens mean nothing.
        scores = {n: torch.rand(total + 2, E) for n in blocks if n.endswith("experts")}
        for name, value in scores.items():
            blocks[name].router._compute_routing(value)
        recorder.step(
            [*tokens, "waiting"],
            SimpleNamespace(
                num_scheduled_tokens=tokens,
                total_num_scheduled_tokens=total,
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=n, num_computed_tokens=0, prompt_token_ids=p)
                    for n, p in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[n for n, _ in cached], num_computed_tokens=[c for _, c in cached]
                ),
            ),
        )
        both = torch.stack([scores[f"model.layers.{k}.mlp.experts"] for k in (1, 2)], 1)
        return both.argsort(-1, descending=True)[:total, :, :K].numpy()

    one = step({"a": 3, "b": 2}, new=[("a", [1, 2, 3, 4]), ("b", [5, 6])])
    two = step({"b": 1, "a": 2}, cached=[("a", 3), ("b", 2)])
    about, requests = read_log(tmp_path)
    assert about.layers == [1, 2]
    assert [r.prompt for r in requests] == [[1, 2, 3, 4], [5, 6]]
    np.testing.assert_array_equal(requests[0].experts, np.concatenate([one[:3], two[1:]]))
    np.testing.assert_array_equal(requests[1].experts, np.concatenate([one[3:], two[:1]]))
    # A layer whose router is not called (a fused kernel) must not repeat the step before.
    del blocks["model.layers.2.mlp.experts"]
    with pytest.raises(RuntimeError, match=r"layers \[2\] did not show the experts of all 1"):
        step_without_one(blocks, recorder)


def step_without_one(blocks, recorder):
    import torch

    blocks["model.layers.1.mlp.experts"].router._compute_routing(torch.rand(1, E))
    recorder.step(
        ["a"],
        SimpleNamespace(
            num_scheduled_tokens={"a": 1},
            total_num_scheduled_tokens=1,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["a"], num_computed_tokens=[5]),
        ),
    )
