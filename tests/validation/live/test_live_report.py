"""The report of a campaign: its text says what its figures say, and what missed."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.tables.format import LatencyTable
from eldr_sim.validation.live.calibration.engine_calibration import write_calibration
from eldr_sim.validation.live.live_run import write_live_run
from eldr_sim.validation.live.report import live_report
from eldr_sim.validation.live.report.live_report import write_report

pytestmark = pytest.mark.long

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
MACHINE = {"cpu": "a processor", "cores": "2"}
VERSIONS = {"vllm": "0.32.0", "eldr-sim": "0.1.0"}


def stretched(run, factor):
    """The run with all its tokens and steps later or longer by a factor."""
    sent = run.requests["sent_s"].to_numpy()
    tokens = [
        [s + factor * (t - s) for t in times]
        for s, times in zip(sent, run.requests["token_s"].to_pylist(), strict=True)
    ]
    index = run.requests.schema.get_field_index("token_s")
    column = pa.array(tokens, run.requests.schema.types[index])
    return replace(run, requests=run.requests.set_column(index, "token_s", column))


def write_campaign(folder, runs, calibrated):
    for number, run in enumerate(runs):
        base = folder / "runs" / f"{number:03}"
        base.mkdir(parents=True)
        info = run.info.model_copy(update={"machine": MACHINE, "versions": VERSIONS})
        write_live_run(base, info, run.requests, run.steps)
        (base / "trace").symlink_to(run.trace.path)
    for setup in {run.info.setup for run in runs}:
        (folder / "calibration" / setup).mkdir(parents=True)
        write_calibration(folder / "calibration" / setup, calibrated.info, calibrated.tables)
    return folder


@pytest.fixture
def no_pictures(monkeypatch):
    """Most of a report's time goes into its pictures, which `written` has."""
    monkeypatch.setattr(live_report, "draw_pictures", lambda *_: [])


@pytest.fixture(scope="module")
def live_runs(make_live_run):
    """Two set-ups, two repeats that differ by 4%; ``late`` has tokens 30% later than it should."""
    cells = [
        ("colocated", "round_robin", "steady", 60.0, 1.0),
        ("colocated", "round_robin", "late", 250.0, 1.3),
        ("1P2D", "round_robin", "steady", 60.0, 1.0),
        ("1P2D", "jsq", "steady", 60.0, 1.0),
    ]
    return [
        stretched(
            make_live_run(setup, rate=rate, policy=policy, load=load, repeat=repeat, n=60)[0],
            factor * (1 + 0.04 * repeat),
        )
        for setup, policy, load, rate, factor in cells
        for repeat in (0, 1)
    ]


@pytest.fixture(scope="module")
def written(live_runs, live_calibration, tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    # Backwards: the report has its own order.
    campaign = write_campaign(folder / "campaign", live_runs[::-1], live_calibration)
    shares = []
    document = write_report(campaign, folder / "report", progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return folder / "report", json.loads(json.dumps(document))


def tables(text):
    """The tables of a Markdown text: (heading, columns, rows of cells)."""
    found, heading, lines = [], "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("| "):
            lines.append([cell.strip(" *") for cell in line.strip("|").split(" | ")])
        elif lines:
            columns = [column.strip(" |*`") for column in lines[0]]
            found.append(
                (heading, columns, [dict(zip(columns, r, strict=True)) for r in lines[2:]])
            )
            lines = []
    return found


def numbers(cell):
    return [float(number) for number in NUMBER.findall(cell)]


def close(cell, *values, digits=1):
    """Whether a cell shows these values and no others, rounded."""
    shown = numbers(cell)
    expected = [value for value in values if value is not None]
    return len(shown) == len(expected) and all(
        abs(a - b) <= 0.5000001 * 10**-digits for a, b in zip(shown, expected, strict=True)
    )


def one(rows, **keys):
    (row,) = (r for r in rows if keys.items() <= r.items())
    return row


@pytest.mark.slow
def test_the_page_is_made_of_comparison_json_alone(written):
    folder, document = written
    assert json.loads((folder / "comparison.json").read_text()) == document
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert "None" not in text
    assert not re.search(r"\b(nan|inf)\b", text)


def test_the_headline_shows_the_figures(written):
    folder, document = written
    (table,) = (t for t in tables((folder / "README.md").read_text()) if t[0] == "Goals")
    assert len(table[2]) == len(document["headline"]) == 2 * 5
    for cells, row in zip(table[2], document["headline"], strict=True):
        assert cells["set-up"] == row["setup"]
        assert cells["figure"].lower() == row["figure"]
        error, noise = cells["error ± noise, means of the loads"].split(" ± ")
        assert close(error, row["error_percent"])
        assert close(noise, row["noise_percent"])
        assert cells["without drift"] == f"{row['raw_percent']:.1f}%"
        assert close(cells["goal"], row["goal_percent"])
        assert cells["verdict"] == row["verdict"]
        if row["loads"] is not None:
            worst = cells["worst load: error ± noise"]
            error, noise = worst.split(" (")[0].split(" ± ")
            assert close(error, row["worst_percent"])
            assert close(noise, row["worst_noise_percent"])
            assert row["worst_load"] in worst
            assert (row["worst_policy"] in worst) == (row["setup"] == "1P2D")
            mine = [
                r
                for r in document["paired"]
                if r["setup"] == row["setup"] and f"{r['metric']} {r['statistic']}" == row["figure"]
            ]
            for key, of in (("error_percent", "abs_error_percent"), ("noise_percent",) * 2):
                assert row[key] == pytest.approx(np.mean([r[of] for r in mine]), rel=1e-4)
            assert close(cells["loads at or under it"], row["loads_met"], row["loads"], digits=0)


def test_tables_of_a_setup_show_the_figures(written):
    folder, document = written
    comparison = document["comparison"]
    text = (folder / "README.md").read_text()
    found = tables(text)
    seen = 0
    for setup in ("colocated", "1P2D"):
        loads, steps = (t for t in found if t[0] == setup)
        for cells in loads[2]:
            names = {"setup": setup, "load": cells["load"]}
            names["policy"] = cells.get("policy", "round_robin")
            for column, metric, statistic in (
                ("TTFT p50, ms", "ttft", "p50"),
                ("TPOT p50, ms", "tpot", "p50"),
                ("TPOT p99, ms", "tpot", "p99"),
                ("E2E p50, ms", "e2el", "p50"),
            ):
                row = one(document["paired"], **names, metric=metric, statistic=statistic)
                keys = ("live_ms", "simulated_ms", "error_percent", "noise_percent")
                assert close(cells[column], *(row[key] for key in keys))
                seen += 1
            components = [
                c for c in ("queue", "prefill", "transfer", "decode", "host") if c in cells
            ]
            assert ("transfer" in components) == (setup == "1P2D")
            for name in components:
                of = {"of": "e2el", "repeat": None, "component": name}
                row = one(comparison["components"], **names, **of)
                assert close(cells[name], row["difference_ms"], digits=2)
                seen += 1
            runs = [r for r in comparison["runs"] if names.items() <= r.items()]
            assert close(cells["repeats"], len(runs), digits=0)
            batch = np.mean([r["mean_batch"] for r in runs])
            largest = max(r["max_batch"] for r in runs)
            assert close(cells["decode batch: mean, max"], batch, largest)
        for cells in steps[2]:
            names = {"setup": setup, "role": cells["engine"], "group": cells["steps"]}
            row = one(comparison["steps"], **names, component="step")
            assert close(cells["number"], row["steps"], digits=0)
            assert close(cells["live, ms"], row["live_ms"], digits=2)
            assert close(cells["predicted, ms"], row["predicted_ms"], digits=2)
            assert close(cells["error: median, p90"], row["median_percent"], row["p90_percent"])
            assert close(cells["bias"], row["bias_percent"])
            for part in ("moe", "attention", "rest"):
                value = one(comparison["steps"], **names, component=part)["bias_percent"]
                assert close(cells[part], value)
                seen += 1
        at = {(r["role"], r["group"]): r for r in comparison["steps"] if r["setup"] == setup
              and r["component"] == "step"}  # fmt: skip
        role = "colocated" if setup == "colocated" else "decode"
        for batch in ("1", "2-3", "4-7"):
            row = at[role, f"batch {batch}"]
            shown = f" {batch}: {row['median_percent']:.1f}%, {row['p90_percent']:.1f}%"
            assert shown in text
    assert seen > 40


def test_policies_are_compared_live_and_simulated(written):
    folder, document = written
    (table,) = (t for t in tables((folder / "README.md").read_text()) if t[0] == "Decode policies")
    (cells,) = table[2]
    assert (cells["load"], cells["policy"]) == ("steady", "jsq")
    for column in ("TPOT p50", "TPOT p99", "TTFT p50"):
        metric, statistic = column.lower().split()
        keys = {"setup": "1P2D", "load": "steady", "metric": metric, "statistic": statistic}
        row = one(document["policies"], **keys, policy="jsq")
        shown = (row["live_percent"], row["simulated_percent"], row["noise_percent"])
        assert close(cells[column], *shown)
        mine, other = (
            one(document["paired"], **keys, policy=policy) for policy in ("jsq", "round_robin")
        )
        live = 100 * (mine["live_ms"] / other["live_ms"] - 1)
        assert row["live_percent"] == pytest.approx(live, abs=1e-3)
        assert row["noise_percent"] == max(mine["noise_percent"], other["noise_percent"])


def test_a_missed_goal_is_named_with_its_component(written):
    folder, document = written
    text = (folder / "README.md").read_text()
    missed = {(r["setup"], r["load"], r["figure"]) for r in document["missed"]}
    expected = {("colocated", "late", f) for f in ("tpot p50", "tpot p99", "ttft p50")}
    assert missed == expected
    for row in document["missed"]:
        metric, statistic = row["figure"].split()
        paired = one(
            document["paired"], setup="colocated", load="late", metric=metric, statistic=statistic
        )
        assert paired["verdict"] == "missed"
        assert row["error_percent"] == paired["error_percent"]
        # The tokens were moved apart behind the engine's back: only the way to the client can
        # have caused it.
        assert row["component"] == "host"
        parts = {
            r["of"]: r["difference_ms"]
            for r in document["comparison"]["components"]
            if (r["setup"], r["load"], r["repeat"]) == ("colocated", "late", None)
            and r["component"] == "host"
        }
        after = parts["e2el"] - parts["ttft"]
        assert row["difference_ms"] == pytest.approx(
            parts["ttft"] if metric == "ttft" else after, rel=1e-4
        )
        name = f"{metric.upper()} {statistic}"
        (line,) = (x for x in text.splitlines() if x.startswith(f"- colocated, {name} at late "))
        assert f"{row['error_percent']:+.1f}%" in line
        assert f"{row['component']}, live {row['live_ms']:.2f} ms" in line
    verdicts = {(r["setup"], r["figure"]): r["verdict"] for r in document["headline"]}
    assert verdicts["colocated", "tpot p50"] == "missed"
    assert verdicts["1P2D", "tpot p50"] == "met"
    assert verdicts["colocated", "decode step p90"] == "met"


@pytest.mark.usefixtures("no_pictures")
def test_slower_tables_miss_the_steps(live_runs, live_calibration, tmp_path):
    slow = [
        LatencyTable(t.metadata, {**t.columns, "latency_s": 1.5 * t.columns["latency_s"]})
        if t.metadata.kind == "moe"
        else t
        for t in live_calibration.tables
    ]
    calibrated = replace(live_calibration, tables=slow)
    campaign = write_campaign(tmp_path / "campaign", live_runs[:1], calibrated)
    document = write_report(campaign, tmp_path / "report")
    assert not (tmp_path / "report" / "policies.csv").exists()
    for statistic in ("median", "p90"):
        row = one(document["missed"], figure=f"decode step {statistic}")
        assert row["component"] == "moe"
        assert row["predicted_ms"] == pytest.approx(1.5 * row["live_ms"], rel=1e-4)
    row = one(document["missed"], figure="decode step median")
    assert row["of_step_percent"] == pytest.approx(row["error_percent"], rel=1e-3)
    text = (tmp_path / "report" / "README.md").read_text()
    assert (
        f"- colocated, decode step median {row['error_percent']:.1f}% (goal 5%): moe, live" in text
    )
    assert one(document["headline"], figure="tpot p50")["noise_percent"] is None


@pytest.mark.usefixtures("no_pictures")
def test_queue_orders_stand_beside_each_other(make_live_run, live_calibration, tmp_path):
    runs = [
        make_live_run("colocated", rate=300.0, n=40, seed=4, load=load, repeat=repeat,
                      queue_order=order)[0]
        for load, order in (("busy", "fcfs"), ("busy, sjf", "sjf"))
        for repeat in (0, 1)
    ]  # fmt: skip
    campaign = write_campaign(tmp_path / "campaign", runs, live_calibration)
    document = write_report(campaign, tmp_path / "report")
    row = one(document["orders"], figure="mean wait")
    assert row["repeats"] == 2
    queue = {
        load: one(document["comparison"]["components"], load=load, of="e2el", component="queue",
                  repeat=0)
        for load in ("busy", "busy, sjf")
    }  # fmt: skip
    change = 100 * (queue["busy, sjf"]["live_ms"] / queue["busy"]["live_ms"] - 1)
    assert row["live_percent"] == pytest.approx(change, rel=1e-4)
    assert row["live_percent"] < -10
    assert row["simulated_percent"] == pytest.approx(row["live_percent"], rel=1e-3)
    assert row["noise_percent"] == pytest.approx(0.0, abs=1e-6)  # the repeats are the same run
    assert one(document["orders"], figure="p99 TTFT")["live_fcfs_ms"] > 0
    assert "## Queue orders" in (tmp_path / "report" / "README.md").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_tables_that_are_not_to_be_trusted_are_said_first(live_runs, live_calibration, tmp_path):
    info = live_calibration.info.model_copy(update={"doubts": ["moe: a doubt"]})
    campaign = write_campaign(
        tmp_path / "campaign", live_runs[:1], replace(live_calibration, info=info)
    )
    write_report(campaign, tmp_path / "report")
    text = (tmp_path / "report" / "README.md").read_text()
    assert "**The tables of colocated are not to be trusted**: moe: a doubt." in text


@pytest.mark.usefixtures("no_pictures")
def test_repeats_that_differ_as_much_excuse_an_error(live_runs, live_calibration, tmp_path):
    runs = [live_runs[0], stretched(live_runs[1], 1.3)]
    campaign = write_campaign(tmp_path / "campaign", runs, live_calibration)
    document = write_report(campaign, tmp_path / "report")
    row = one(document["headline"], figure="tpot p50")
    assert 5.0 < row["worst_percent"] < row["worst_noise_percent"]
    assert row["verdict"] == "within the noise floor"
    assert document["missed"] == []
    text = (tmp_path / "report" / "README.md").read_text()
    assert "No goal is missed." in text
    assert "| within the noise floor |" in text


@pytest.mark.usefixtures("no_pictures")
def test_the_worst_tenth_of_the_steps_may_have_another_cause(live_runs, live_calibration, tmp_path):
    """MoE layers are predicted 1.6 times as slow; the steps of one batch lost 30 ms elsewhere."""
    run, moe = live_runs[0], "moe_s"
    start, end = (run.steps[name].to_numpy() for name in ("start_s", "end_s"))
    batch = np.array([len(request) for request in run.steps["request"].to_pylist()])
    sizes, counts = np.unique(batch, return_counts=True)
    late_batch = sizes[np.argmin(np.abs(counts / len(batch) - 1 / 6))]  # all its steps: no noise
    late = np.where(batch == late_batch, 0.03, 0.0)
    faster = run.steps[moe].to_numpy() / 1.6
    shift = np.concatenate([[0.0], np.cumsum(late - 0.6 * faster)[:-1]])
    columns = {"start_s": start + shift, "end_s": end + shift + late - 0.6 * faster, moe: faster}
    steps = run.steps
    for name, values in columns.items():
        steps = steps.set_column(steps.schema.get_field_index(name), name, pa.array(values))
    campaign = write_campaign(tmp_path / "campaign", [replace(run, steps=steps)], live_calibration)
    document = write_report(campaign, tmp_path / "report")
    causes = {r["figure"]: r["component"] for r in document["missed"] if r["load"] is None}
    assert causes == {"decode step median": "moe", "decode step p90": "rest"}
    text = (tmp_path / "report" / "README.md").read_text()
    assert "ms a step of the worst tenth; its median difference is" in text


def test_what_was_not_run_is_said(written):
    folder, document = written
    text = (folder / "README.md").read_text()
    assert "## 1P1D\n\nNot run.\n" in text
    common = ["no decode batch above 8 (asked for: 16)", "no load of fixed lengths"]
    few = "fewer than 3 repeats of 2 of 2 loads"
    lacking = document["not_run"]
    assert lacking["1P1D"] == ["not run"]
    assert lacking["colocated"] == ["2 of 4 loads", few, *common, "no bursty load"]
    assert {"no run of eldr", "1 of 4 loads", few, common[1]} < set(lacking["1P2D"])
    for setup, what in lacking.items():
        assert f"- {setup}: {', '.join(what)}." in text


def test_pictures_are_drawn_and_on_the_page(written):
    folder, document = written
    text = (folder / "README.md").read_text()
    files = {row["file"] for row in document["pictures"]}
    assert files == {path.name for path in folder.glob("*.png")}
    assert {row["kind"] for row in document["pictures"]} == {
        "cdf",
        "components",
        "distinct",
        "steps",
    }
    for name in files:
        assert f"]({name})" in text
        with Image.open(folder / name) as picture:
            corner = picture.convert("RGB").getpixel((0, 0))
            assert corner == (255, 255, 255)
            assert len(picture.getcolors(picture.width * picture.height)) > 8


def test_csv_files_hold_the_tables(written):
    folder, document = written
    comparison = document["comparison"]
    for name, rows in (
        ("paired", document["paired"]),
        ("policies", document["policies"]),
        ("steps", comparison["steps"]),
        ("components", comparison["components"]),
    ):
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            read = list(csv.DictReader(file))
        shown = [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
        assert read == shown


def test_the_campaign_is_described(written):
    folder, document = written
    found = tables((folder / "README.md").read_text())
    engines, loads = (t[2] for t in found if t[0] == "What was run")
    assert [row["engines"] for row in engines] == ["colocated0", "prefill0", "decode0, decode1"]
    steady = one(loads, load="steady")
    assert steady["requests/s (requests)"] == "colocated 60 (60), 1P2D 60 (60)"
    assert json.dumps(document["model"]) in (folder / "README.md").read_text()
    (times,) = (t[2] for t in found if t[0] == "Calibration")
    for setup in ("colocated", "1P2D"):
        of = document["calibration"][setup]
        cells = {row[""]: row[setup] for row in times}
        assert close(cells["wall time"], of["seconds"], digits=0)
        assert close(cells["from the end of a step to the client"], 1e3 * of["egress_s"], digits=3)
        ingress = (1e3 * of["ingress_s"]["base_s"], 1e6 * of["ingress_s"]["per_token_s"])
        assert close(cells["from the post to the engine's queue"], *ingress, digits=3)
        assert (cells["KV transfer"] == "-") == (setup == "colocated")
        moe = one(of["tables"], kind="moe")
        assert cells["table `moe`"] == f"{moe['rows']}, measured"


@pytest.mark.slow
def test_the_same_campaign_gives_the_same_bytes(live_runs, live_calibration, tmp_path):
    campaign = write_campaign(tmp_path / "campaign", live_runs[:1], live_calibration)
    for name in ("one", "two"):
        write_report(campaign, tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def broken(campaign, how):
    if how == "no runs":
        for path in campaign.glob("runs/*/run.json"):
            path.unlink()
    elif how == "no calibration":
        (campaign / "calibration" / "colocated" / "calibration.json").unlink()
    elif how == "no steps":
        (campaign / "runs" / "000" / "steps.parquet").unlink()
    elif how == "the same run twice":
        text = (campaign / "runs" / "000" / "run.json").read_text()
        (campaign / "runs" / "001" / "run.json").write_text(text)
    elif how == "another machine":
        path = campaign / "runs" / "001" / "run.json"
        path.write_text(path.read_text().replace("a processor", "a better one"))
    elif how == "another build":
        path = campaign / "runs" / "001" / "run.json"
        path.write_text(path.read_text().replace("0.32.0", "0.33.0"))
    elif how == "another load":
        path = campaign / "runs" / "001" / "run.json"
        path.write_text(path.read_text().replace('"burstiness": 1.0', '"burstiness": 0.5'))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no runs", "holds no runs"),
        ("no calibration", "cannot read"),
        ("no steps", "cannot read"),
        ("the same run twice", "two runs are colocated round_robin steady #0"),
        ("another machine", "has another machine"),
        ("another build", "has another build"),
        ("another load", "has another load of that name"),
    ],
)
def test_a_broken_campaign_is_refused_in_one_line(
    live_runs, live_calibration, tmp_path, how, message
):
    campaign = write_campaign(tmp_path / "campaign", live_runs[:2], live_calibration)
    broken(campaign, how)
    with pytest.raises(InputError, match=message) as caught:
        write_report(campaign, tmp_path / "report")
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"campaign"}


@pytest.mark.usefixtures("no_pictures")
def test_only_a_report_is_replaced(written, live_runs, live_calibration, tmp_path):
    campaign = write_campaign(tmp_path / "campaign", live_runs[:1], live_calibration)
    out = tmp_path / "report"
    write_report(campaign, out)
    with pytest.raises(InputError, match="exists"):
        write_report(campaign, out)
    (out / "stale.png").touch()
    write_report(campaign, out, force=True)
    assert not (out / "stale.png").exists()
    with pytest.raises(InputError, match="is not a result"):
        write_report(campaign, campaign, force=True)
