"""Presets are fields like others, which options override, and print as a file of fields."""

import pytest
from click.testing import CliRunner

from eldr_sim.cli.main import cli
from eldr_sim.cli.options import config_from_options
from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.presets import PRESETS, preset_fields

EVERY = [f"{name}:{model}" for name, preset in PRESETS.items() for model in preset.models]


@pytest.mark.parametrize("name", EVERY)
def test_a_printed_preset_is_the_preset(name, tmp_path):
    printed = CliRunner().invoke(cli, ["presets", name])
    assert printed.exit_code == 0
    file = tmp_path / "preset.yaml"
    file.write_text(printed.stdout)
    config = config_from_options({"config_file": file})
    assert config == config_from_options({"preset": name})
    assert config.model == name.partition(":")[2]


def test_eldr_artifact_is_what_the_authors_gave_their_engines():
    """Section 1 of the artifact's facts: 8P16D, no window, 64-token blocks for gpt-oss."""
    config = config_from_options({"preset": "eldr-artifact:gpt-oss-120b", "request_rate": "100"})
    assert (config.n_prefill, config.n_decode, config.n_gpus) == (8, 16, 24)
    assert (config.block_size, config.max_model_len, config.output_len) == (64, 4096, 512)
    assert (config.num_requests, config.warmup_s) == (12_000, 0.0)
    assert config_from_options({"preset": "eldr-artifact"}).block_size == 16


def test_options_and_files_override_a_preset(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("request_rate: 20\nblock_size: 32\n")
    config = config_from_options(
        {"preset": "eldr-artifact", "config_file": file, "block_size": "8", "prefill_gpu": "H100"}
    )
    assert (config.block_size, config.num_requests) == (8, 2400)
    assert config.pool("prefill").gpu == "H100"
    assert config_from_options({"preset": "eldr-artifact", "num_requests": "5"}).num_requests == 5
    assert config_from_options({"preset": "eldr-artifact", "duration": "9"}).num_requests is None
    by_model = config_from_options({"preset": "eldr-artifact", "model": "GPT-OSS-120B"})
    assert (by_model.model, by_model.block_size) == ("GPT-OSS-120B", 64)


def test_presets_that_there_are_not():
    with pytest.raises(InputError, match=r"preset: no preset 'eldr' \(allowed: eldr-artifact"):
        preset_fields("eldr", {})
    with pytest.raises(InputError, match=r"has no model 'Mixtral' \(allowed: Qwen3-30B-A3B"):
        preset_fields("eldr-artifact:Mixtral", {})
