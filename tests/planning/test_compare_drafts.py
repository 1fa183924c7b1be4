"""Numbers of drafts against none: speed-ups, where they pay, and the rule by batch."""

import math

import pytest
from click.testing import CliRunner

from eldr_sim.cli.main import cli
from eldr_sim.errors import InputError
from eldr_sim.planning.compare.drafts import DraftComparison, DraftRow, compare_drafts
from eldr_sim.planning.runs.run_cache import RunCache
from eldr_sim.planning.search.axes import Space
from eldr_sim.planning.search.goals import Cheapest, find
from eldr_sim.planning.slo import Objective
from eldr_sim.simulator.setup.config.run_config import ServiceLevel, make_config
from eldr_sim.simulator.setup.config.speculative import SpeculativeConfig

RUN = {
    "trace": "reference-moe", "topology": "1C", "policy": "round_robin", "output_len": 80,
    "input_len": 100, "num_requests": 24,
}  # fmt: skip


def compared(length, drafts=(2,), concurrencies=(4,), seeds=1):
    config = {"method": "mtp", "num_speculative_tokens": 3, "synthetic_acceptance_length": length}
    run = make_config(RUN | {"speculative_config": config})
    return compare_drafts(run, drafts, concurrencies, seeds, jobs=1)


def test_drafts_break_even_where_they_are_said_to():
    (row,) = compared(2.5).rows
    assert row.speed_up == pytest.approx(row.plain_tpot_ms / row.tpot_ms)
    assert row.break_even_length == pytest.approx(row.acceptance_length / row.speed_up)
    assert row.acceptance_length < 2.5  # of the first two of three drafts
    config = {
        "method": "mtp",
        "num_speculative_tokens": 2,
        "synthetic_acceptance_length": row.break_even_length,
    }
    run = make_config(RUN | {"speculative_config": config})
    (even,) = compare_drafts(run, [2], [4], 1, jobs=1).rows
    assert even.speed_up == pytest.approx(1.0, abs=0.06)


def test_drafts_that_are_all_rejected_do_not_pay():
    found = compared(1.0, drafts=(1, 3), concurrencies=(1, 8))
    assert [(row.concurrency, row.drafts) for row in found.rows] == [(1, 1), (1, 3), (8, 1), (8, 3)]
    assert all(row.speed_up < 1.0 for row in found.rows)
    assert found.by_batch == [(1, 65536, 0)]


def row(concurrency, drafts, speed_up):
    nan = math.nan
    batch, tpot = float(concurrency), 1.0 / speed_up
    return DraftRow(concurrency, drafts, batch, 1.0, tpot, speed_up, nan, nan, 2.0, 2 * tpot, 1.5,
                    0.1)  # fmt: skip


def test_the_rule_by_batch_is_the_fastest_of_each_and_vllm_takes_it():
    rows = [row(1, 1, 1.2), row(1, 3, 1.4), row(4, 1, 1.3), row(4, 3, 1.1), row(16, 1, 1.2),
            row(16, 3, 1.1), row(64, 1, 0.9), row(64, 3, 0.8)]  # fmt: skip
    found = DraftComparison(make_config(RUN), 1, "", tuple(rows))
    assert found.by_batch == [(1, 2, 3), (3, 32, 1), (33, 65536, 0)]
    taken = SpeculativeConfig(
        method="mtp",
        num_speculative_tokens=3,
        num_speculative_tokens_per_batch_size=tuple(found.by_batch),
    )
    assert [taken.drafts_of(n) for n in (1, 2, 3, 32, 33, 1000)] == [3, 3, 1, 1, 0, 0]


@pytest.mark.parametrize("logged", [False, True])
def test_without_second_tokens_no_speed_up_is_named(logged, tmp_path):
    """A TPOT that no answer has is no figure, and no rule by batch comes of it."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_length": 2.0}
    fields = {"output_len": 1}
    if logged:
        (tmp_path / "log.csv").write_text("t,i,o\n0,50,1\n1,60,1\n")
        fields = {
            "workload": str(tmp_path / "log.csv"), "columns": "time_s=t,input=i,output=o",
            "input_len": None, "output_len": None, "num_requests": 2,
        }  # fmt: skip
    run = make_config({**RUN, "speculative_config": drafts, **fields})
    with pytest.raises(InputError, match="no answer has a second token"):
        compare_drafts(run, [1], [1], 1, jobs=1)


def test_no_table_holds_the_interval_that_one_seed_has_not():
    found = DraftComparison(make_config(RUN), 1, "", (row(1, 1, 1.2),))
    assert found.tables()["drafts"].to_pylist()[0]["low"] is None
    assert found.record()["drafts"][0]["high"] is None


def test_the_command_prints_and_writes(tmp_path):
    out = tmp_path / "drafts"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items()]
    result = CliRunner().invoke(cli, [
        "compare", *arguments, "--drafts", "0,1,2", "--concurrencies", "2", "--seeds", "2",
        "--jobs", "1", "--out", str(out), "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_length": 2}',
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "num_speculative_tokens_per_batch_size [[1, 65536, " in result.output
    assert "1 and 2 drafts of ngram against none" in result.output
    assert {path.name for path in out.iterdir()} == {"summary.json", "drafts.parquet"}


@pytest.mark.parametrize(
    ("fields", "drafts", "concurrencies", "message"),
    [
        ({}, [1], [4], "drafts: no method or model is given"),
        ({"num_speculative_tokens": 2}, [3], [4], "drafts: 3 .*0 to the 2 of"),
        ({"num_speculative_tokens": 2}, [-1], [4], "drafts: -1 .*0 to the 2 of"),
        ({"num_speculative_tokens": 2}, [0], [4], "drafts: only 0.*1 to 2 as well"),
        ({"num_speculative_tokens": 2}, [1], [0], r"concurrencies: \[0\]"),
    ],
)
def test_bad_input(fields, drafts, concurrencies, message):
    config = fields and {"method": "mtp", "synthetic_acceptance_length": 2.0} | fields
    run = make_config(RUN | {"speculative_config": config or None})
    with pytest.raises(InputError, match=message):
        compare_drafts(run, drafts, concurrencies, 1)


# -- plans --------------------------------------------------------------------------------------

GPT_OSS = {
    "trace": "gpt-oss-20b", "model": "GPT-OSS-20B", "request_rate": 12.0, "num_requests": 240,
    "input_len": 200, "output_len": 100,
    "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3},
}  # fmt: skip


OBJECTIVE = Objective(ServiceLevel(tpot=4.0), 0.9, (2,))


def test_a_plan_chooses_the_drafts():
    """Drafts keep a TPOT on fewer GPUs than plain steps do, or where these cannot at all."""
    answer = find(
        Space(
            make_config(GPT_OSS), axes={"drafts": (0, 3)}, max_gpus=8, tensor_parallel_sizes=(1,)
        ),
        Cheapest(OBJECTIVE),
        RunCache(1),
    )
    cost = {row.policy: row.trial and row.trial.config.n_gpus for row in answer.rows}
    assert set(cost) == {"round_robin, drafts=0", "round_robin, drafts=3"}
    assert cost["round_robin, drafts=3"] is not None
    assert (cost["round_robin, drafts=0"] or 9) > cost["round_robin, drafts=3"]


@pytest.mark.parametrize(
    ("given", "drafts"), [({}, 4), ({}, -1), ({"speculative_config": None}, 1)]
)
def test_plans_and_comparisons_refuse_drafts_alike(given, drafts):
    config = make_config(GPT_OSS | given)
    with pytest.raises(InputError) as planned:
        find(Space(config, axes={"drafts": (drafts,)}), Cheapest(OBJECTIVE))
    with pytest.raises(InputError) as compared:
        compare_drafts(config, [drafts], [4], 1)
    assert str(planned.value) == str(compared.value)
