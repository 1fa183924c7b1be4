"""A campaign against a real vLLM, small and short.

Run with ``pytest -m live tests/validation/live/test_live_vllm.py``.
About four minutes on two cores. What it measures is not judged: other tests may run beside it.
"""

import importlib.util
import json

import pytest

from eldr_sim.validation.live.campaign import Campaign, LoadShape, record_campaign
from eldr_sim.validation.live.engines.load import write_model
from eldr_sim.validation.live.engines.servers import EngineOptions
from eldr_sim.validation.live.report.live_report import write_report

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
    pytest.skip("needs vLLM and NIXL, see docs/live.md", allow_module_level=True)

pytestmark = pytest.mark.live


@pytest.mark.parametrize("setup", ["colocated", "1P1D", "1P2D"])
def test_campaign(setup, tmp_path):
    model = tmp_path / "model"
    write_model(model, num_hidden_layers=2, num_experts=16, num_experts_per_tok=4)
    campaign = Campaign(
        tmp_path / "campaign",
        EngineOptions(str(model), 1024, 8, 128),
        loads=(LoadShape(0.4, "recorded", 1.0), LoadShape(0.8, "fixed", 0.3)),
        policies=("round_robin", "eldr"),
        repeats=1,
        duration_s=4.0,
        prompt_len=32,
        output_len=32,
    )
    folders = record_campaign(campaign, [setup], lambda what, share: None)
    report = tmp_path / "report"
    write_report(campaign.out, report)
    found = json.loads((report / "comparison.json").read_text())["comparison"]
    assert found["distinct"]
    assert all(row["wrong_layers"] == 0 for row in found["distinct"])
    assert all(row["matched_wrong"] == 0 for row in found["distinct"])
    assert all(row["incomplete"] == 0 for row in found["runs"])
    calibration = json.loads((campaign.calibration(setup) / "calibration.json").read_text())
    assert calibration["seconds"] < 300
    # Whoever goes on finds nothing left to record.
    before = {folder: folder.stat().st_mtime_ns for folder in folders}
    assert record_campaign(campaign, [setup], lambda what, share: None) == folders
    assert {folder: folder.stat().st_mtime_ns for folder in folders} == before
