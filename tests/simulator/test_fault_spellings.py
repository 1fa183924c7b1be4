"""How faults are written, which are refused, and what is said of their effects."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.simulator.outcome.fault_metrics import fault_figures, time_to_recover
from eldr_sim.simulator.setup.config.fault_spellings import (
    Cancel,
    check_fits,
    in_cluster,
    parse_fail,
    read_events,
)
from eldr_sim.simulator.setup.config.run_config import ServiceLevel, make_config
from eldr_sim.simulator.setup.fault_plan import Fault

from ..on_each import on_each


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("decode:3@60s+30s", Fault("fail", "decode", 3, 60.0, 30.0)),
        ("Prefill:0@1.5", Fault("fail", "prefill", 0, 1.5)),
        (" decode:12@0s+2.5 ", Fault("fail", "decode", 12, 0.0, 2.5)),
    ],
)
def test_the_short_spelling(text, fault):
    assert parse_fail(text) == fault


def test_a_fault_is_said_as_it_is_spelled():
    assert str(parse_fail("decode:3@60s+30s")) == "fail decode:3 @60s+30s"


@on_each(
    "text",
    ["decode3@60", "decode:3", "decode:-1@2", "decode:1@x", "decode:1@1e99", 7, {"a": 1}, [3]],
)
def test_a_bad_spelling_is_an_input_error(text):
    with pytest.raises(InputError, match="fail"):
        make_config({"fail": text})


def test_spellings_of_several_are_one():
    one = make_config({"fail": "decode:1@2s, prefill:0@3s+1s"})
    assert one == make_config({"fail": ["decode:1@2s", "prefill:0@3s+1s"]})
    assert one == make_config({"fail": ["decode:1@2s,prefill:0@3s+1s"]})
    assert one == make_config(json.loads(one.model_dump_json()))
    assert make_config({"fail": None}) == make_config({"fail": []}) == make_config({})


EVENTS = [
    {"fail": "decode:3", "at_s": 60, "for_s": 30},
    {"hang": "decode:1", "at_s": 20, "for_s": 5},
    {"slow": "prefill:2", "factor": 1.5, "at_s": 10},
    {"drain": "prefill:0", "at_s": 40},
    {"join": "decode:4", "at_s": 60, "start_up_s": 45},
    {"link": "prefill:1", "bandwidth": 0.25, "at_s": 5, "for_s": 9},
    {"cancel": 0.05, "after_s": 10},
]


def test_a_file_of_events(tmp_path):
    path = tmp_path / "events.yaml"
    path.write_text(json.dumps(EVENTS))
    faults, cancels = read_events(str(path))
    assert faults == [
        Fault("fail", "decode", 3, 60, 30), Fault("hang", "decode", 1, 20, 5),
        Fault("slow", "prefill", 2, 10, math.inf, 1.5), Fault("drain", "prefill", 0, 40),
        Fault("join", "decode", 4, 60, 45), Fault("link", "prefill", 1, 5, 9, 0.25),
    ]  # fmt: skip
    assert cancels == [Cancel(0.05, 10)]
    check_fits(faults, {"prefill": 3, "decode": 5}, True)


@on_each(
    "event, said",
    [
        ("fail", "mapping"),
        ({"at_s": 1}, "not one of them"),
        ({"fail": "decode:0", "hang": "decode:1", "at_s": 1}, "not one of them"),
        ({"fail": "decode", "at_s": 1}, "not a worker"),
        ({"fail": "decode:0"}, "at_s"),
        ({"fail": "decode:0", "at_s": "1"}, "at_s"),
        ({"fail": "decode:0", "at_s": math.nan}, "at_s"),
        ({"hang": "decode:0", "at_s": 1}, "for_s"),
        ({"slow": "decode:0", "at_s": 1}, "factor"),
        ({"link": "decode:0", "at_s": 1, "bandwidth": 0}, "bandwidth"),
        ({"fail": "decode:0", "at_s": 1, "until_s": 3}, "until_s"),
        ({"cancel": 2, "after_s": 1}, "share"),
    ],
)
def test_a_bad_event_is_an_input_error(tmp_path, event, said):
    path = tmp_path / "events.yaml"
    path.write_text(json.dumps([event]))
    with pytest.raises(InputError, match=said):
        read_events(str(path))


@pytest.mark.parametrize(
    ("texts", "topology"),
    [
        (["decode:2@1s"], (1, 2)),
        (["prefill:0@1s"], (0, 2)),
        (["decode:0@1s", "decode:0@9s"], (1, 1)),
        (["decode:0@1s+8s", "decode:0@9s"], (1, 1)),
        (["gpu:1@2s"], (1, 1)),
    ],
)
def test_what_cannot_be_is_an_input_error(texts, topology):
    workers = dict(zip(("prefill", "decode"), topology, strict=True))
    faults = [parse_fail(text) for text in texts]
    with pytest.raises(InputError, match="events"):
        check_fits(faults, workers, all(topology))


@pytest.mark.parametrize("text", ["worker:1@1s+2s", "decode:1@1s+2s"])
def test_workers_of_a_colocated_cluster_are_called_workers(text):
    fault = in_cluster(parse_fail(text), make_config({"topology": "4C"}).pools)
    assert (fault.pool, fault.where) == ("decode", "worker:1")
    assert str(fault) == "fail worker:1 @1s+2s"


@pytest.mark.parametrize(
    ("text", "topology", "allowed"),
    [
        ("worker:4@1s", "4C", "worker:0 to 3"),
        ("prefill:0@1s", "4C", "worker:0 to 3"),
        ("worker:0@1s", "2P4D", "prefill:0 to 1, decode:0 to 3"),
        ("decode:4@1s", "2P4D", "decode:0 to 3"),
    ],
)
def test_a_worker_that_does_not_exist_is_answered_with_those_that_do(text, topology, allowed):
    config = make_config({"topology": topology})
    fault = in_cluster(parse_fail(text), config.pools)
    workers = {pool.name: pool.workers for pool in config.pools}
    with pytest.raises(InputError) as error:
        check_fits([fault], workers, True)
    assert error.value.allowed == allowed


def test_slow_steps_mix_with_a_death():
    slow = Fault("slow", "decode", 0, 2.0, 5.0, 2.0)
    check_fits(
        [slow, parse_fail("decode:0@3s+1s"), Fault("link", "decode", 0, 4.0, 9.0, 0.5)],
        {"prefill": 1, "decode": 1},
        True,
    )
    with pytest.raises(InputError, match="overlap"):
        check_fits(
            [slow, Fault("link", "decode", 0, 2.5, 1.0, 0.5), slow],
            {"prefill": 1, "decode": 1},
            True,
        )


def test_time_to_recover_is_where_goodness_returns():
    """One request ends each 0.1 s; those of [20, 27) s are bad."""
    ended = np.arange(0.0, 60.0, 0.1)
    good = (ended < 20.0) | (ended >= 27.0)
    # 95% of the 5 s from second 26.9 on are good: the next whole second is the 27th.
    assert time_to_recover(ended, good, 0.0, 20.0, 25.0, 60.0) == 7.0
    assert time_to_recover(ended, np.ones(600, bool), 0.0, 20.0, 25.0, 60.0) == 0.0
    assert time_to_recover(ended, ended < 20.0, 0.0, 20.0, 25.0, 60.0) is None
    stalled = ended[good]  # nothing ends in these 7 s: bad where nothing ends in 5 s from then on
    none_bad = np.ones(len(stalled), bool)
    assert time_to_recover(stalled, none_bad, 0.0, 20.0, 25.0, 60.0) == 3.0
    assert time_to_recover(ended, good, 20.0, 20.0, 25.0, 60.0) is None


def test_what_dips_a_second_after_the_end_is_not_the_faults():
    """The fault is over at 25 s; requests of [30, 31) s are bad: seen from the 26th second on."""
    ended = np.arange(0.0, 60.0, 0.1)
    good = (ended < 30.0) | (ended >= 31.0)
    assert time_to_recover(ended, good, 0.0, 20.0, 25.0, 60.0) == 0.0
    # Those of [29.5, 30.5) s are seen in the stretch from the fault's end on, which counts.
    good = (ended < 29.5) | (ended >= 30.5)
    assert time_to_recover(ended, good, 0.0, 20.0, 25.0, 60.0) == 11.0


def test_figures_of_faults_by_hand():
    """One request ends a second; the first three are not measured."""
    n = 40
    fields = ("arrival_s", "sent_s", "first_token_s", "finish_s")
    kinds = [("measured", bool), ("outcome", int), ("output_len", int)]
    requests = np.zeros(n, [*kinds, *((name, float) for name in fields)])
    requests["measured"], requests["output_len"] = np.arange(n) >= 3, 2
    requests["arrival_s"] = requests["sent_s"] = np.arange(n)
    requests["first_token_s"] = requests["finish_s"] = np.arange(n) + 0.5
    record = SimpleNamespace(
        requests=requests, window=(0.0, 40.0), end_s=40.0, completed=np.ones(n, bool),
        retries=np.where(np.arange(n) == 1, 5, np.where(np.arange(n) == 9, 2, 0)),
    )  # fmt: skip
    join, fail = Fault("join", "decode", 0, 5.0, 15.0), parse_fail("decode:0@10s+10s")
    found = fault_figures(record, ServiceLevel(ttft=1000), (join, fail))
    assert (found["retried"], found["retries"]) == (1, 2)
    missing, dead = found["events"]
    assert missing["goodput_before"] is None  # who joins was missing from the beginning
    assert missing["goodput_during"] == missing["goodput_after"] == 1.0
    assert (dead["goodput_before"], dead["time_to_recover_s"]) == (1.0, 0.0)
