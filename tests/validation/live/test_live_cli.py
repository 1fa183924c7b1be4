"""What ``eldr-sim validate vllm`` says of bad input: one line, exit code 2, nothing written."""

import importlib.util
import json

import pytest

needs_no_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here"
)
URL = "http://127.0.0.1:1"


def refused(run_cli, out, *arguments):
    code, _, error = run_cli("validate", "vllm", "--out", out, *arguments)
    assert code == 2
    assert error.count("\n") == 1
    return error


@needs_no_vllm
def test_without_vllm_nothing_is_begun(run_cli, tmp_path):
    assert "vLLM is not installed" in refused(run_cli, tmp_path / "live")
    assert not (tmp_path / "live").exists()


@pytest.mark.parametrize("text", [URL, f"{URL}=", "/a/folder", "=/a/folder"])
def test_an_endpoint_needs_url_and_folder(run_cli, tmp_path, text):
    error = refused(run_cli, tmp_path / "live", "--decode-url", text)
    assert "decode_url" in error
    assert "URL=DIR" in error
    assert not (tmp_path / "live").exists()


def test_endpoints_need_their_logs_and_a_model(run_cli, tmp_path):
    out, log = tmp_path / "live", tmp_path / "log"
    assert "log folder" in refused(run_cli, out, "--decode-url", f"{URL}={log}", "--model", "m")
    log.mkdir()
    assert "--model DIR" in refused(run_cli, out, "--decode-url", f"{URL}={log}")
    assert not out.exists()


def test_another_campaign_is_left_alone(run_cli, tmp_path):
    out, model = tmp_path / "live", tmp_path / "model"
    out.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    text = json.dumps({"seed": 7})
    (out / "campaign.json").write_text(text)
    error = refused(run_cli, out, "--decode-url", f"{URL}={tmp_path}", "--model", str(model))
    assert "other options" in error
    assert (out / "campaign.json").read_text() == text
    assert [path.name for path in out.iterdir()] == ["campaign.json"]


@pytest.mark.parametrize(
    ("text", "problem"), [("code", "NAME=WEIGHT"), ("poetry=1", "code, math, medical, legal")]
)
def test_a_domain_mix_names_domains_and_weights(run_cli, tmp_path, text, problem):
    pytest.importorskip("aiohttp")
    assert problem in refused(run_cli, tmp_path / "live", "--domain-mix", text)
    assert not (tmp_path / "live").exists()
