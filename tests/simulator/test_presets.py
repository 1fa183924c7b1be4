"""Presets are fields like others, which options override, and print as a file of fields."""

import numpy as np
import pytest
from click.testing import CliRunner

from eldr_sim.cli.main import cli
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.errors import InputError
from eldr_sim.simulator.setup.config.presets import PRESETS, preset_fields
from eldr_sim.traces.requests.load_shapes import load_shape

from ..on_each import on_each

EVERY = [f"{name}:{model}" for name, preset in PRESETS.items() for model in preset.models]
EVERY += [f"{name}+warm-up" for name in EVERY if PRESETS[name.partition(":")[0]].warm_up]


@on_each("name", EVERY)
def test_a_printed_preset_is_the_preset(name, tmp_path):
    printed = CliRunner().invoke(cli, ["presets", name])
    assert printed.exit_code == 0
    file = tmp_path / "preset.yaml"
    file.write_text(printed.stdout)
    config = config_from_options({"config_file": file})
    assert config == config_from_options({"preset": name})
    assert config.engine.model == name.partition(":")[2].removesuffix("+warm-up")


def test_eldr_artifact_is_what_the_authors_gave_their_engines():
    """Section 1 of the artifact's facts: 8P16D, no window, 64-token blocks for gpt-oss."""
    config = config_from_options({"preset": "eldr-artifact:gpt-oss-120b", "request_rate": "100"})
    assert (config.cluster.n_prefill, config.cluster.n_decode, config.n_gpus) == (8, 16, 24)
    assert (config.engine.block_size, config.engine.max_model_len, config.requests.output_len) == (
        64,
        4096,
        512,
    )
    assert (config.requests.num_requests, config.requests.warmup_s) == (12_000, 0.0)
    assert config_from_options({"preset": "eldr-artifact"}).engine.block_size == 16


def test_options_and_files_override_a_preset(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("request_rate: 20\nblock_size: 32\n")
    config = config_from_options(
        {
            "preset": "eldr-artifact",
            "config_file": file,
            "block_size": "8",
            "settings": (("prefill.gpu", "H100"),),
        }
    )
    assert (config.engine.block_size, config.requests.num_requests) == (8, 2400)
    assert config.pool("prefill").gpu == "H100"
    assert (
        config_from_options({"preset": "eldr-artifact", "num_requests": "5"}).requests.num_requests
        == 5
    )
    assert (
        config_from_options({"preset": "eldr-artifact", "duration": "9"}).requests.num_requests
        is None
    )
    by_model = config_from_options({"preset": "eldr-artifact", "model": "GPT-OSS-120B"})
    assert (by_model.engine.model, by_model.engine.block_size) == ("GPT-OSS-120B", 64)


def test_a_warm_up_comes_before_the_cell_and_is_drained():
    """3,840 requests at 64/s, a minute without any, then 120 s at the rate, which alone count."""
    options = {"preset": "eldr-artifact+warm-up", "request_rate": "20", "policy": "eldr"}
    config = config_from_options(options)
    assert (config.requests.num_requests, config.requests.warmup_s, config.requests.duration_s) == (
        None,
        120.0,
        120.0,
    )
    shape = load_shape(config.requests.load)
    arrival_s = shape.draw(config.requests.effective_rate, 1.0, 360.0, None, 0)
    counts = np.histogram(arrival_s, [0.0, 60.0, 120.0, 240.0, 360.0])[0]
    assert counts[1] == counts[3] == 0
    assert counts[0] == pytest.approx(3840, abs=4 * 3840**0.5)
    assert counts[2] == pytest.approx(2400, abs=4 * 2400**0.5)


def test_presets_that_there_are_not():
    with pytest.raises(InputError, match=r"no preset 'best-known.warm-up' \(allowed: eldr-artif"):
        preset_fields("best-known+warm-up", {})
    with pytest.raises(InputError, match=r"no preset 'eldr-artifact.cold' \(allowed: eldr-artif"):
        preset_fields("eldr-artifact+cold", {})
    with pytest.raises(InputError, match=r"preset: no preset 'eldr' \(allowed: eldr-artifact"):
        preset_fields("eldr", {})
    with pytest.raises(InputError, match=r"has no model 'Mixtral' \(allowed: Qwen3-30B-A3B"):
        preset_fields("eldr-artifact:Mixtral", {})
