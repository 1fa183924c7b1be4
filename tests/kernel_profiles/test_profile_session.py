"""A profile's journal, budget, resumption and timing, with made-up tasks. No torch needed."""

import json
import sys

import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.profile import session
from eldr_sim.kernel_profiles.profile.device import Device, differing_facts, gpu_entry
from eldr_sim.kernel_profiles.profile.measurement_plan import (
    PARTS,
    Outcome,
    Target,
    Task,
    make_plan,
)
from eldr_sim.kernel_profiles.profile.records import MAIN, Record
from eldr_sim.kernel_profiles.profile.timing import MAX_CALLS, CpuTimer, Timing, rotation
from eldr_sim.kernel_profiles.tables.format import load_table

FACTS = {"device": "a card", "driver_version": "550", "power.limit": "700 W", "torch": "2"}
DEVICE = Device("cpu", "a-card", FACTS, 32 << 20, 16 << 30, CpuTimer())
HEADER = {"device": "a-card", "facts": FACTS, "copy_bandwidth": 1e10, "gemm_flops": 1e12}
MODEL = load_model("Qwen3-30B-A3B")


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def tasks(clock, n=6, *, broken=(), seconds=10.0, ran=None):
    def make(index):
        def run(_workbench):
            clock.now += seconds
            if index in broken:
                raise InputError("moe", "no such library")
            if ran is not None:
                ran.append(index)
            row = {"tokens": index + 1}
            timing = Timing(1e-6 * (index + 1), 1e-6, 2e-6, 5)
            shape = {"hidden_size": 8}
            record = Record(MAIN, "elementwise", shape, "bfloat16", "k", "torch 2", row, timing)
            return Outcome([record], {"index": index})

        return Task(f"task {index}", "elementwise", f"group {index % 2}", 0, run)

    return [make(index) for index in range(n)]


def journal(path):
    return session.Journal.create(path / session.JOURNAL, HEADER)


def measure(made, book, clock, budget):
    return session.measure(made, DEVICE, book, clock() + budget, lambda share, task: None, clock)


def test_a_budget_ends_the_session_and_resuming_repeats_nothing(tmp_path):
    clock, ran = Clock(), []
    measure(tasks(clock, ran=ran), journal(tmp_path), clock, 25)
    assert ran == [0, 1, 2]  # the third began in time
    again = session.Journal.read(tmp_path / session.JOURNAL)
    measure(tasks(clock, ran=ran), again, clock, 1000)
    assert ran == [0, 1, 2, 3, 4, 5]
    whole = session.Journal.read(tmp_path / session.JOURNAL)
    assert [r.row["tokens"] for r in whole.records] == [1, 2, 3, 4, 5, 6]
    found = session.write(whole, DEVICE, tasks(clock), {}, 1.0)
    (path,) = found.tables
    assert load_table(path).columns["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found.summary["coverage"]["group 0"] == {"done": 3, "planned": 3}


def test_a_group_that_cannot_be_measured_is_left_out_with_its_reason(tmp_path):
    clock, ran = Clock(), []
    made = tasks(clock, broken=(2,), ran=ran)
    skipped = measure(made, journal(tmp_path), clock, 1000)
    assert ran == [0, 1, 3, 5]
    assert skipped == {"group 0": "moe: no such library"}


def test_an_interruption_loses_no_task_and_a_cut_line_is_dropped(tmp_path):
    clock = Clock()
    book = journal(tmp_path)

    def interrupted(_workbench):
        raise KeyboardInterrupt

    made = tasks(clock)
    made[3] = Task("task 3", "elementwise", "group 1", 0, interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(made, book, clock, 1000)
    assert len(session.Journal.read(book.path).outcomes) == 3
    with book.path.open("a") as file:
        file.write('{"task": "task 3", "rec')  # killed while writing
    again = session.Journal.read(book.path)
    assert list(again.outcomes) == ["task 0", "task 1", "task 2"]
    ran = []
    measure(tasks(clock, ran=ran), again, clock, 1000)
    assert ran == [3, 4, 5]
    assert len(session.Journal.read(book.path).outcomes) == 6


@pytest.mark.parametrize("fact", ["driver_version", "power.limit", "torch", "clocks.max.sm"])
def test_the_same_card_with_another_setting_is_not_merged(tmp_path, fact):
    journal(tmp_path)
    other = Device("cpu", "a-card", {**FACTS, fact: "other"}, 1, 1, CpuTimer())
    with pytest.raises(InputError, match=f"{fact}.*other"):
        session.open_journal(tmp_path, other, resume=True)
    assert session.open_journal(tmp_path, DEVICE, resume=True).outcomes == {}


def test_facts_that_one_profile_lacks_differ():
    assert differing_facts({"a": "1"}, {"a": "1"}) == []
    assert differing_facts({"a": "1"}, {}) == ["a: 1, not recorded"]


def test_folders_in_use_are_refused(tmp_path):
    journal(tmp_path)
    with pytest.raises(InputError, match="--resume"):
        session.open_journal(tmp_path, DEVICE, resume=False)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not a profile"):
        session.open_journal(other, DEVICE, resume=False)
    with pytest.raises(InputError, match="a file"):
        session.open_journal(other / "notes.txt", DEVICE, resume=False)


@pytest.mark.parametrize("text", ["", "{}\n", '{"format": 2}\n', "[1]\n", "nonsense\n"])
def test_what_is_no_journal_is_refused(tmp_path, text):
    path = tmp_path / session.JOURNAL
    path.write_text(text)
    with pytest.raises(InputError, match=r"journal|damaged"):
        session.Journal.read(path)


def test_too_few_points_make_no_table(tmp_path):
    clock = Clock()
    book = journal(tmp_path)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "window": 0}
    timing = Timing(1e-6, 1e-6, 1e-6, 5)
    row = {"batch": 1, "context": 64}
    record = Record(MAIN, "attention_decode", shape, "bfloat16", "k", "torch 2", row, timing)
    book.add("one", Outcome([record]))
    found = session.write(book, DEVICE, tasks(clock), {}, 1.0)
    assert found.tables == []
    assert not list(tmp_path.glob("*.parquet"))
    assert "too few rows" in next(iter(found.summary["incomplete_tables"].values()))


def test_an_unknown_device_gets_a_gpu_entry_that_runs_accept(tmp_path):
    session.write(journal(tmp_path), DEVICE, [], {}, 1.0)
    for name in (tmp_path, tmp_path / "gpu.json"):
        assert load_gpu(name) == gpu_entry(DEVICE, 1e10, 1e12)
    summary = json.loads((tmp_path / "profile.json").read_text())
    assert summary["facts"] == FACTS


def test_a_broken_gpu_entry_is_told(tmp_path):
    (tmp_path / "gpu.json").write_text('{"name": "x"}')
    with pytest.raises(InputError, match="memory_bytes"):
        load_gpu(tmp_path)
    with pytest.raises(InputError, match="unknown GPU"):
        load_gpu(tmp_path / "missing.json")


def test_a_plan_is_coarse_first_and_needs_no_torch():
    plan = make_plan([Target(MODEL)], DEVICE)
    levels = [task.level for task in plan]
    assert levels == sorted(levels)
    assert {task.part for task in plan} == set(PARTS)
    assert {task.part for task in plan if task.level == 0} >= {"moe", "attention", "gemm"}
    assert len({task.key for task in plan}) == len(plan)


def test_two_models_share_what_they_share():
    one = {task.key for task in make_plan([Target(MODEL)], DEVICE)}
    both = {task.key for task in make_plan([Target(MODEL), Target(MODEL)], DEVICE)}
    assert both == one


def test_a_gemm_plan_goes_on_with_the_matrices_of_the_earlier_one():
    plan = make_plan([Target(MODEL)], DEVICE, ["gemm"], [(640, 96)])
    keys = {task.key for task in plan}
    assert {"gemm 1x640x2048", "gemm 1x128x96", "gemm 1x640x96"} <= keys


def test_shards_are_planned_as_a_rank_computes_them():
    model = load_model("Qwen3-235B-A22B")
    cut, spread = (Target(model, Parallelism(4, ep)) for ep in (False, True))
    assert (cut.moe.intermediate, cut.moe.n_ranks, cut.moe.owned) == (384, 1, 128)
    assert (spread.moe.intermediate, spread.moe.n_ranks, spread.moe.owned) == (1536, 4, 32)
    assert cut.attention_shapes[0]["n_heads"] == 16
    assert "expert_parallel_size" in spread.moe_identity


def test_unknown_parts_are_refused():
    with pytest.raises(InputError, match="host-gap"):
        make_plan([Target(MODEL)], DEVICE, ["moe", "magic"])


@pytest.mark.parametrize(
    ("touched", "copy", "calls", "copies"),
    [(10.0, 1000.0, 30, 1), (1000.0, 1000.0, 2, 1), (1.0, 10.0, 300, 30), (0.0, 1.0, 300, 300)],
)
def test_a_round_touches_three_caches(touched, copy, calls, copies):
    assert rotation(touched, copy, 100) == (calls, copies)
    assert rotation(touched, copy, 1 << 40)[0] == MAX_CALLS


def test_a_timer_takes_turns_and_reports_quartiles():
    clock = Clock()
    seen = []

    def call(name, seconds):
        def run():
            seen.append(name)
            clock.now += seconds

        return run

    timer = CpuTimer(target_s=0.0, min_repeats=8, clock=clock)
    rounds = [[call("a", 1.0), call("b", 2.0)], [call("c", 3.0), call("d", 4.0)]]
    timing = timer.time(rounds)
    assert seen == list("dacbdacbd")  # one warm-up call, then round by round
    assert (timing.q1_s, timing.median_s, timing.q3_s, timing.repeats) == (1.75, 2.5, 3.25, 8)


def test_without_torch_one_line_names_the_command(run_cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = run_cli("profile", "--device", "cpu", "--out", tmp_path / "o")
    assert code == 2
    assert err.strip().splitlines() == [
        "Error: profile: torch is not installed (allowed: pip install 'eldr-sim[profile]')"
    ]
    assert not out
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--budget", "soon"], "budget"),
        (["--budget", "0"], "budget"),
        (["--model", "No-Such-Model"], "model"),
        (["--tensor-parallel-size", "5"], "tensor_parallel_size"),
    ],
)
def test_bad_options_are_one_line(run_cli, tmp_path, arguments, word):
    code, _, err = run_cli("profile", "--device", "cpu", "--out", tmp_path / "o", *arguments)
    assert code == 2
    assert err.startswith(f"Error: {word}")
    assert len(err.strip().splitlines()) == 1
