"""`trace inspect`: what it prints; a folder that appears whole or not at all."""

import csv
import itertools
import json

import numpy as np
import pytest

from eldr_sim.traces.routing.writer import write_trace
from eldr_sim.validation import trace_report

from ..golden_output import check_golden


@pytest.fixture
def tiny(tmp_path):
    """Thirty-two ranked requests of two domains, each with a taste of its own."""
    rng = np.random.default_rng(7)
    domain = np.arange(32) % 2
    taste = np.ones((2, 3, 12))
    taste[0, :, :4] = taste[1, :, 4:8] = 0.2
    rows = np.repeat(domain, 10)
    ids = np.argsort(rng.exponential(taste[rows]), axis=-1)[..., :4]
    return write_trace(
        tmp_path / "tiny",
        experts=ids,
        request_id=[f"r{i}" for i in range(32)],
        domain=[("code", "prose")[d] for d in domain],
        prompt_len=[6] * 32,
        output_len=[4] * 32,
        is_calibration=np.arange(32) < 16,
        model="tiny",
        n_experts=12,
        domains=["code", "prose"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
        rank_groups=[1] * 4,
    )


def test_inspect_is_golden(tiny, run_cli):
    code, out, err = run_cli("trace", "inspect", tiny.path)
    assert (code, err) == (0, "")
    check_golden("trace_inspect_tiny.txt", out)


PARTS = [
    "coactivation",
    "copies",
    "distinct_experts",
    "domain_divergence",
    "expert_heatmap",
    "load_skew",
    "next_layer",
    "prefill_decode",
]


def test_report_is_whole(tiny, run_cli, tmp_path):
    code, out, err = run_cli("trace", "inspect", tiny.path, "--out", tmp_path / "r", "--plot")
    assert (code, err) == (0, "")
    assert out.endswith(f"Wrote {tmp_path / 'r'}\n")
    names = sorted(p.name for p in (tmp_path / "r").iterdir())
    assert names == sorted(
        [f"{p}.{k}" for p in PARTS for k in ("csv", "png")] + ["statistics.json"]
    )
    figures = json.loads((tmp_path / "r" / "statistics.json").read_text())
    assert figures["manifest"]["model"] == "tiny"
    assert set(figures["rho"]) == {"all"}

    # Each share of the heat map, from the rows themselves.
    with (tmp_path / "r" / "expert_heatmap.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 12
    for row in rows[::5]:
        layer, expert = int(row["layer"]), int(row["expert"])
        share = {}
        for d, name in enumerate(tiny.domains):
            decoded = [tiny.experts[10 * q + 6 : 10 * q + 10, layer] for q in range(d, 32, 2)]
            share[name] = np.mean([(ids == expert).any(axis=1) for ids in decoded])
        assert float(row["share"]) == pytest.approx(share[row["domain"]], abs=1e-6)
        mean = np.mean(list(share.values()))
        over = share[row["domain"]] / mean if mean else 0
        assert float(row["over_mean"]) == pytest.approx(over, abs=1e-4)

    # The pairs of neighbours, counted one by one over the serving requests' tokens.
    with (tmp_path / "r" / "coactivation.csv").open() as file:
        (layer, *_) = csv.DictReader(file)
    serving = [r for q in np.flatnonzero(~tiny.is_calibration) for r in range(10 * q, 10 * q + 10)]
    same = [
        a // 3 == b // 3
        for ids in tiny.experts[serving, 0].tolist()
        for a, b in itertools.combinations(ids, 2)
    ]
    assert float(layer["neighbours"]) == pytest.approx(np.mean(same), abs=1e-6)

    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir() if p.suffix != ".png"}
    code, _, err = run_cli("trace", "inspect", tiny.path, "--out", tmp_path / "r")
    assert code == 2
    assert "exists" in err
    run_cli("trace", "inspect", tiny.path, "--out", tmp_path / "r", "--force")
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}


def test_report_without_pictures_and_prompts(tiny, run_cli, tmp_path):
    decodes = [row for q in range(32) for row in range(10 * q + 6, 10 * q + 10)]
    write_trace(
        tmp_path / "decodes",
        experts=tiny.experts[decodes],
        request_id=tiny.request_id,
        domain=["only"] * 32,
        prompt_len=[6] * 32,
        output_len=[4] * 32,
        is_calibration=[False] * 32,
        model="tiny",
        n_experts=12,
        domains=["only"],
        captured_by="test",
        source_data="drawn",
        tool_versions={},
        provenance="synthetic",
        prompt_rows=False,
    )
    code, out, err = run_cli("trace", "inspect", tmp_path / "decodes", "--out", tmp_path / "r")
    assert (code, err) == (0, "")
    assert "Decode-only" in out
    names = sorted(p.name for p in (tmp_path / "r").iterdir())
    # Without a calibration split no groups are fitted.
    assert names == sorted([f"{p}.csv" for p in PARTS[1:-1]] + ["statistics.json"])


def test_failed_picture_leaves_nothing(tiny, run_cli, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr(trace_report, "_draw_heat", broken)
    with pytest.raises(RuntimeError, match="no ink"):
        run_cli("trace", "inspect", tiny.path, "--out", tmp_path / "r", "--plot")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny"]


@pytest.mark.parametrize("flag", ["--plot", "--force"])
def test_flags_need_out(tiny, run_cli, flag):
    code, _, err = run_cli("trace", "inspect", tiny.path, flag)
    assert code == 2
    assert f"{flag} without --out" in err
