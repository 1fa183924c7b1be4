"""The metric catalogue: every figure once, the docs made from it, one API for headings."""

import subprocess
import sys

import pytest

from eldr_sim.simulator.outcome.catalogue import (
    HEADLINE,
    METRICS,
    better,
    heading,
    label,
    unit,
    with_table,
)
from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.run_config import make_config

from ..paths import ROOT

PAGE = ROOT / "docs" / "metrics.md"
#: Counts by name are told in docs/metrics.md, but they are no figures.
MAPPINGS = {
    "error_band", "failed_reasons", "limits", "load_growth", "slo_attainment_by_metric",
    "streamed_by_prefill",
}  # fmt: skip


def test_every_figure_of_a_summary_is_in_the_catalogue_and_the_other_way_round():
    config = make_config({"topology": "1P1D", "num_requests": 8, "output_len": 10})
    summary = simulate_summary(config)
    keys = list(summary)
    # What the run itself yields stands between its seed and the limits of its workers.
    figures = set(keys[keys.index("seed") + 1 : keys.index("max_num_seqs")]) - MAPPINGS
    of_plans = {"tokens_per_s_per_user", "tokens_per_s_per_gpu"}
    assert figures | of_plans == set(METRICS)


def test_a_record_is_whole_and_its_heading_its_own():
    assert [metric.tag for metric in METRICS.values()] == list(METRICS)
    headings = [metric.heading for metric in METRICS.values()]
    assert len(set(headings)) == len(headings)
    for metric in METRICS.values():
        assert metric.heading[:1].isupper()
        assert metric.meaning
        assert "\n" not in metric.meaning
        assert "|" not in metric.meaning
        assert metric.unit == "ms" or not metric.tag.endswith("_ms")
    assert set(HEADLINE) <= set(METRICS)


def test_headings_are_those_of_vllm_bench_serve():
    assert label("p99_tpot_ms") == "P99 TPOT (ms)"
    assert label("output_throughput") == "Output token throughput (tok/s)"
    assert label("max_concurrent_requests") == heading("max_concurrent_requests")
    assert (heading("mean_e2el_ms"), unit("mean_e2el_ms")) == ("Mean E2EL", "ms")
    assert [better(tag) for tag in ("p90_itl_ms", "request_goodput", "num_prompts")] == [
        "lower",
        "higher",
        None,
    ]


def test_the_table_of_the_docs_is_made_from_the_catalogue():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), (
        "renew it: python -m eldr_sim.simulator.outcome.catalogue docs/metrics.md"
    )


def test_the_command_renews_the_table(tmp_path):
    page = tmp_path / "metrics.md"
    page.write_text(PAGE.read_text(encoding="utf-8").replace("| lower |", "| higher |"))
    command = [sys.executable, "-m", "eldr_sim.simulator.outcome.catalogue", str(page)]
    subprocess.run(command, check=True)
    assert page.read_text() == PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="catalogue: begin"):
        with_table("no markers")
