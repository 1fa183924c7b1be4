"""Sessions against queueing theory, by hand, and as laws of conservation."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.run import offered_load, simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.traces.requests.load import Load
from eldr_sim.traces.requests.request_columns import make_requests
from eldr_sim.traces.requests.session_shape import session_shape
from eldr_sim.traces.routing.format import open_trace

from ..on_each import on_each

CHAT = {
    "trace": "reference-moe", "workload": "chat", "sessions": 20, "topology": "2C", "policy": "jsq",
    "turns": "4", "think_time": "exponential:2", "new_tokens": "90", "output_len": 40,
    "prefix_len": 512,
}  # fmt: skip


def requests_of(**changes):
    config = make_config(CHAT | changes)
    return simulate(config), offered_load(config, prepare(config).trace)[0]


@pytest.fixture(scope="module")
def closed(make_workload, make_cluster, make_step_time):
    """Users who think and are served one at a time: (N, Z, S) -> times from arrival to end, s."""

    def run(users, think_s, service_s, turns, seed=0, step_s=0.01):
        rng = np.random.default_rng(seed)
        n = users * turns
        tokens = rng.geometric(step_s / service_s, n)
        gaps = rng.exponential(think_s, n)
        work = make_workload(np.repeat(np.sort(gaps[:users]), turns), 1, tokens)
        parent = np.arange(-1, n - 1, dtype=np.int32)
        parent[::turns] = -1
        session = np.repeat(np.arange(users, dtype=np.int32), turns)
        work = replace(work, parent=parent, gap_s=gaps, session=session)
        step_time = make_step_time(
            1, 1, 8, constant=step_s, prefill=(0.0, 0.0), max_context=int(tokens.max()) + 1
        )
        record = make_cluster(work, step_time=step_time, max_num_seqs=1).run()
        assert record.completed.all()
        return record, gaps

    return run


def mva(users, think_s, service_s):
    """Mean response of a closed network of a delay and a queue (Reiser and Lavenberg 1980)."""
    queue = 0.0
    for n in range(1, users + 1):
        response = service_s * (1.0 + queue)
        queue = n / (response + think_s) * response
    return response


@pytest.mark.parametrize(
    ("users", "think_s"), [(10, 10.0), pytest.param(50, 50.0, marks=pytest.mark.slow)]
)
def test_closed_loop_is_mean_value_analysis(closed, users, think_s):
    turns, found = 40_000 // users, []
    for seed in range(3):
        record, _ = closed(users, think_s, 0.9, turns, seed)
        requests = record.requests
        # All users are there from when the last has begun until the first leaves for good.
        ends = requests["finish_s"].reshape(-1)[np.argsort(record.numbers)].reshape(users, turns)
        steady = (requests["arrival_s"] > 300) & (requests["arrival_s"] < ends[:, -1].min())
        found += (requests["finish_s"] - requests["arrival_s"])[steady].tolist()
    assert mva(10, 10.0, 0.9) == pytest.approx(2.24, abs=0.005)
    assert np.mean(found) == pytest.approx(mva(users, think_s, 0.9), rel=0.02)


def test_one_user_never_waits_and_the_interactive_law_holds(closed):
    record, gaps = closed(1, 3.0, 0.5, 200)
    requests = record.requests[np.argsort(record.numbers)]
    service = requests["output_len"] * 0.01
    assert requests["finish_s"] - requests["arrival_s"] == pytest.approx(service)
    assert requests["arrival_s"][1:] == pytest.approx(requests["finish_s"][:-1] + gaps[1:])
    record, gaps = closed(8, 3.0, 0.5, 500)
    requests = record.requests
    start, end = 50.0, float(np.sort(requests["finish_s"])[-900])
    here = np.clip(requests["finish_s"], start, end) - np.clip(requests["arrival_s"], start, end)
    done = (requests["finish_s"] > start) & (requests["finish_s"] < end)
    number = here.sum() / (end - start)  # Little: N = X R, and the others of the 8 think
    rate = done.sum() / (end - start)
    response = (requests["finish_s"] - requests["arrival_s"])[done].mean()
    assert number == pytest.approx(rate * response, rel=0.02)
    assert rate * (response + 3.0) == pytest.approx(8, rel=0.05)


def test_a_user_finds_all_whole_blocks_of_prompt_and_answer():
    result, work = requests_of(sessions=3, topology="1C", max_active_sessions=1, output_len=45)
    rows = result.requests.to_pandas().sort_values("request_id")
    before = work.parent[rows.request_id]
    context = work.prompt_len[before].astype(int) + work.output_len[before] - 1
    assert (rows.cached_tokens[before >= 0] == (context // 16 * 16)[before >= 0]).all()
    assert result.summary["prefix_cache_hit_rate"] == pytest.approx(
        result.summary["ideal_prefix_cache_hit_rate"], abs=1e-12
    )
    assert [row["turn"] for row in result.summary["sessions"]["by_turn"]] == [1, 2, 3, 4]


def test_prefill_workers_lack_the_answers():
    result, work = requests_of(sessions=3, topology="1P1D", max_active_sessions=1, output_len=45)
    rows = result.requests.to_pandas().sort_values("request_id")
    before = work.parent[rows.request_id]
    found = work.prompt_len[before] // 16 * 16
    assert (rows.cached_tokens[before >= 0] == found[before >= 0]).all()


def test_prefill_workers_pull_the_answers():
    one = {"sessions": 3, "topology": "1P1D", "max_active_sessions": 1, "output_len": 45}
    result, work = requests_of(**one, answer_kv="pull")
    rows = result.requests.to_pandas().sort_values("request_id")
    before = work.parent[rows.request_id]
    context = work.prompt_len[before].astype(int) + work.output_len[before] - 1
    assert (rows.cached_tokens[before >= 0] == (context // 16 * 16)[before >= 0]).all()
    pulled = context // 16 * 16 - work.prompt_len[before] // 16 * 16
    assert (rows.loaded_tokens[before >= 0] == pulled[before >= 0]).all()
    assert result.summary["prefix_cache_hit_rate"] == pytest.approx(
        result.summary["ideal_prefix_cache_hit_rate"], abs=1e-12
    )


def test_policies_see_the_same_users():
    (one, work), (other, same) = requests_of(policy="jsq"), requests_of(policy="random")
    for name in ("prompt_len", "output_len", "gap_s", "parent", "text", "replay_offset"):
        assert (getattr(work, name) == getattr(same, name)).all()
    assert one.requests["finish_s"] != other.requests["finish_s"]
    for result in (one, other):  # a turn comes its gap after the turn before
        rows = result.requests.to_pandas().set_index("request_id")
        later = np.flatnonzero(work.parent >= 0)
        came = rows.arrival_s[later].to_numpy()
        assert came == pytest.approx(
            rows.finish_s[work.parent[later]].to_numpy() + work.gap_s[later], abs=1e-9
        )


def test_what_is_told_of_the_trace_is_of_the_requests_that_came():
    """Sessions come in another order than they are drawn in; lengths are those of all turns."""
    result, work = requests_of(sessions=60, request_rate=4)
    told, rows = result.summary["trace"], result.record.requests
    assert told["isl"]["mean"] == pytest.approx(work.prompt_len.mean(), abs=1e-3)
    met = 0
    for same in {(row["decode_worker"], row["trace_request"]) for row in rows}:
        mine = rows[(rows["decode_worker"] == same[0]) & (rows["trace_request"] == same[1])]
        mine = np.sort(mine, order="decode_start_s")
        met += (mine["decode_start_s"][1:] < mine["finish_s"][:-1]).sum()
    assert (told["copies_share"] > 0) == (met > 0)


def test_sessions_are_limited():
    result, work = requests_of(sessions=30, max_active_sessions=4)
    rows = result.requests.to_pandas()
    session = work.session[rows.request_id]
    begin = rows.groupby(session).arrival_s.min().to_numpy()
    end = rows.groupby(session).finish_s.max().to_numpy()
    active = [((begin <= at) & (end > at)).sum() for at in begin]
    assert max(active) == 4
    assert (np.diff(begin) >= 0).all()
    assert begin[4:] == pytest.approx(np.sort(end)[: len(begin) - 4])  # at once when one ends


@pytest.mark.parametrize("most", [None, 4])
def test_whoever_goes_on_with_a_failed_turn_never_comes(most):
    """And leaves its session's place to the next, where places are limited."""
    result, work = requests_of(
        sessions=40, max_model_len=1100, new_tokens="uniform:10,400", max_active_sessions=most
    )
    rows, figures = result.requests.to_pandas(), result.summary["sessions"]
    too_long = work.prompt_len + work.output_len > 1100
    lost = too_long.copy()
    for i in np.flatnonzero(work.parent >= 0):
        lost[i] |= lost[work.parent[i]]
    assert set(rows.request_id[rows.outcome == "completed"]) == set(np.flatnonzero(~lost))
    assert figures["turns_begun"] == sum(
        figures[f"turns_{how}"] for how in ("completed", "unfinished", "abandoned")
    )
    failed = Counter(rows.outcome)["exceeds_max_model_len"]
    assert figures["turns_abandoned"] == failed == figures["abandoned"] > 5
    assert figures["begun"] == 40 == figures["completed"] + figures["abandoned"]


def test_a_window_measures_whoever_comes_in_it():
    result, _ = requests_of(sessions=None, duration=20, warmup=10, request_rate=2)
    rows = result.requests.to_pandas()
    inside = (rows.arrival_s >= 10) & (rows.arrival_s < 30)
    assert (rows.measured == inside).all()
    assert inside.sum() > 60
    assert (rows.outcome[inside] == "completed").all()


def test_joins_wait_for_all(make_workload, make_cluster):
    from eldr_sim.simulator.plane.sessions import make_sessions

    work = replace(
        make_workload([0.0, 0.0, 0.0, 0.0], 8, [3, 30, 4, 4]),
        parent=np.array([-1, 0, 0, 1], np.int32),
        gap_s=np.array([0.0, 0.5, 0.5, 0.0]),
        session=np.zeros(4, np.int32),
    )
    made = make_sessions(work, (0.0, np.inf))
    assert made.children[made.first[0] : made.first[1]].tolist() == [1, 2]
    record = make_cluster(work).run()
    rows = record.requests[np.argsort(record.numbers)]
    assert rows["arrival_s"][1:3] == pytest.approx(rows["finish_s"][0] + 0.5)
    assert rows["arrival_s"][3] == pytest.approx(rows["finish_s"][1])
    assert rows["finish_s"][2] < rows["finish_s"][1] - 0.005
    after = np.array([-1, 0, 0, 2], np.int32)
    joined = replace(work, parent=after, joins=np.array([[3, 1]], np.int32))
    record = make_cluster(joined).run()
    rows = record.requests[np.argsort(record.numbers)]
    assert rows["arrival_s"][3] == pytest.approx(rows["finish_s"][1])


def test_a_recorded_agent_waits_for_its_sub_agents(tmp_path):
    """Two workers run beside each other; the next turn comes when both are done."""

    def call(at, tokens, *ids, took=1.0):
        return {"t": at, "type": "s", "in": tokens, "out": 30, "hash_ids": ids, "api_time": took}

    line = {
        "id": "trace_1",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            call(0.0, 100, 1, 2),
            {"type": "subagent", "t": 1.5, "requests": [call(0.0, 64, 1), call(2.0, 130, 1, 5, 6)]},
            {"type": "subagent", "t": 1.5, "requests": [call(1.5, 300, 1, 7, 8, 9, 10)]},
            call(5.5, 150, 1, 2, 3),
            {"type": "subagent", "t": 7.0, "requests": [call(0.5, 64, 1)]},
        ],
    }
    path = tmp_path / "weka.jsonl"
    path.write_text("\n".join(json.dumps(line | {"id": name}) for name in "ab"))
    result, work = requests_of(
        workload=str(path), sessions=None, turns=None, think_time=None, new_tokens=None,
        output_len="recorded", prefix_len=0, arrivals="closed", max_active_sessions=1,
    )  # fmt: skip
    assert result.summary["completed"] == 12
    rows = result.requests.to_pandas().set_index("request_id").sort_index()
    for session in (0, 1):
        own = np.flatnonzero(work.session == session)
        at = {int(p): int(i) for i, p in zip(own, work.prompt_len[own], strict=True) if p != 64}
        inner = [int(i) for i in own if work.prompt_len[i] == 64]
        come, end = rows.arrival_s, rows.finish_s
        assert come[inner[0]] == pytest.approx(end[at[100]] + 0.5)
        assert come[at[130]] == pytest.approx(end[inner[0]] + 1.0)
        assert come[at[300]] == pytest.approx(end[at[100]] + 0.5)
        assert come[at[150]] == pytest.approx(max(end[at[130]], end[at[300]]) + 1.0)
        assert come[inner[1]] == pytest.approx(end[at[150]] + 1.0)
    assert rows.arrival_s[work.session == 1].min() >= rows.finish_s[work.session == 0].max() - 1e-9


def test_turns_of_aiperf_come_so_long_after_the_answer(tmp_path):
    """A next turn finds what was said before, and 4P alone cannot know the answers' length."""
    turns = [{"text": "x" * 400}, {"text": "y" * 100, "delay": 500}]
    path = tmp_path / "multi_turn.jsonl"
    path.write_text("\n".join(json.dumps({"session_id": each, "turns": turns}) for each in "ab"))
    changes = dict.fromkeys(("sessions", "turns", "think_time", "new_tokens"))
    changes |= {"workload": str(path), "prefix_len": 0, "arrivals": "closed", "topology": "1C"}
    result, work = requests_of(**changes)
    rows = result.requests.to_pandas().set_index("request_id").sort_index()
    for i in np.flatnonzero(work.parent >= 0):
        assert (work.prompt_len[work.parent[i]], work.prompt_len[i]) == (100, 165)
        assert rows.arrival_s[i] == pytest.approx(rows.finish_s[work.parent[i]] + 0.5)
        assert rows.cached_tokens[i] == 128  # full blocks of 100 + 39 tokens
    with pytest.raises(InputError, match="without output_length"):
        requests_of(**changes | {"topology": "1P", "output_len": None})


@pytest.mark.parametrize(
    ("history", "kept"), [("no_reasoning:1", 512), ("last:700", 512), ("reset:1000", 512)]
)
def test_histories_break_the_chain(history, kept):
    shape = session_shape("chat", 16, history, turns="8", new_tokens="90")
    load = Load("chat", 1.0, num_requests=5, output_len=41, prefix_len=512, session=shape)
    work = make_requests(open_trace("reference-moe").texts, load)
    longest = {"no_reasoning:1": 10**6, "last:700": 790, "reset:1000": 1000}[history]
    assert work.prompt_len.max() <= longest
    for i in np.flatnonzero(work.parent >= 0).tolist():
        before = int(work.parent[i])
        one, other = work.blocks(before), work.blocks(i)
        same = int((one[: len(other)] == other[: len(one)]).sum())
        answered = int(work.prompt_len[before]) + 41
        if history.startswith("no"):
            assert same == work.prompt_len[before] // 16
            assert work.prompt_len[i] == work.prompt_len[before] + 90
        elif work.prompt_len[i] != answered + 90:  # cut
            assert same == kept // 16
        else:
            assert same == len(one)


@on_each(
    "changes, field",
    [
        ({"turns": "lognormal:4"}, "turns"),
        ({"turns": "0"}, "turns"),
        ({"turns": "uniform:0.5,4"}, "turns"),
        ({"calls_per_turn": "1.5"}, "calls_per_turn"),
        ({"new_tokens": "exponential:0"}, "new_tokens"),
        ({"think_time": "-3"}, "think_time"),
        ({"history": "some"}, "history"),
        ({"prompts": "shared"}, "prompts"),
        ({"workload": "task", "arrivals": "closed"}, "arrivals"),
        ({"sessions_file": "x.csv"}, "sessions_file"),
    ],
)
def test_what_contradicts_itself_is_refused(changes, field):
    with pytest.raises(InputError) as caught:
        requests_of(**changes)
    assert caught.value.field == field


def test_who_has_a_first_token_in_time_stays(tmp_path):
    rows = requests_of(request_rate=20)[0].record.requests
    waited = rows["first_token_s"] - rows["arrival_s"]
    patience_s = float(np.quantile(waited, 0.8))
    assert patience_s < np.quantile(rows["finish_s"] - rows["arrival_s"], 0.2)
    events = tmp_path / "events.yaml"
    events.write_text(f"[{{cancel: 1, patience_s: {patience_s}}}]")
    result, _ = requests_of(request_rate=20, events=str(events))
    requests = result.record.requests
    left = np.array(result.record.outcomes()) == "cancelled"
    done = np.array(result.record.outcomes()) == "completed"
    waited = requests["first_token_s"] - requests["arrival_s"]
    assert left.any()
    assert done.sum() > left.sum()
    assert (waited[done] <= patience_s + 1e-9).all()
    gone = (requests["finish_s"] - requests["arrival_s"])[left]
    assert (gone >= patience_s - 1e-9).all()


def test_clients_give_up_so_long_after_a_turn_has_come(tmp_path):
    """Whichever turn it is; who is served sooner does not give up."""
    rows = requests_of()[0].record.requests
    events = tmp_path / "events.yaml"
    for share in (0.7, 0.9):
        after_s = float(np.quantile(rows["finish_s"] - rows["arrival_s"], share))
        events.write_text(f"[{{cancel: 1, after_s: {after_s}}}]")
        result, work = requests_of(events=str(events))
        requests = result.record.requests
        took = requests["finish_s"] - requests["arrival_s"]
        left = np.array(result.record.outcomes()) == "cancelled"
        assert left.any()
        assert (work.parent[result.record.numbers[~left]] >= 0).sum() > 10
        steps = result.steps.to_pandas()
        assert took.max() <= after_s + (steps.end_s - steps.start_s).max()
        assert (took[left] >= after_s - 1e-9).all()


def test_users_send_what_has_failed_again():
    """Their sessions go on; else those end with it. Who waits so long counts it in TTFT."""
    fails = {"request_rate": 20, "fail": "decode:0@1.5s+1s", "retry": "never"}
    lost, _ = requests_of(**fails)
    again, _ = requests_of(**fails, user_retry_s=0.75)
    assert lost.summary["sessions"]["abandoned"] > 0
    assert again.summary["sessions"]["completed"] == CHAT["sessions"]
    rows, tries = again.record.requests, again.record.retries
    assert tries.sum() >= (np.array(lost.record.outcomes()) == "worker_lost").sum() > 0
    assert (rows["first_token_s"][tries > 0] >= 1.5 + 0.75).all()
    assert again.record.decode_steps["outputs"].sum() > rows["output_len"].sum()  # twice
