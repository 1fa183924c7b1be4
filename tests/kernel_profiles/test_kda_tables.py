"""Tables of Kimi Delta Attention: which kernels add up to a layer, and that what ships is used."""

import pandas as pd
import pytest

from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources import aiconfigurator
from eldr_sim.kernel_profiles.tables.format import linear_attention_shape
from eldr_sim.kernel_profiles.tables.library import Engine, find_table

from ..on_each import on_each

KEYS = ["batch_size", "seq_len"]


def points_of(*rows):
    return pd.DataFrame(rows, columns=["kernel_source", *KEYS, "latency"])


def test_a_layer_is_a_convolution_and_one_delta_rule():
    """Short and long prompts take other kernels; what fuses both is not counted beside them."""
    points = points_of(
        ("causal_conv1d_update", 1, 1, 0.002), ("fused_recurrent_kda", 1, 1, 0.003),
        ("causal_conv1d_fn", 1, 512, 0.01), ("flashkda_fwd", 1, 512, 0.04),
        ("kda_fused_decode", 1, 1, 0.004), ("flashkda_fwd", 1, 1024, 0.08),
    )  # fmt: skip
    found = aiconfigurator._kda_points(points, KEYS)
    assert found[KEYS].to_numpy().tolist() == [[1, 1], [1, 512]]
    assert found.latency.tolist() == pytest.approx([0.005, 0.05])


def test_a_convolution_that_times_its_launch_is_left_out():
    points = points_of(
        ("causal_conv1d_fn_qkv3", 1, 1, 0.78), ("flashkda_fwd", 1, 1, 0.02),
        ("causal_conv1d_fn_qkv3", 1, 64, 0.79), ("flashkda_fwd", 1, 64, 0.02),
    )  # fmt: skip
    assert aiconfigurator._kda_points(points, KEYS).empty


@on_each("gpu", ["H100", "H200", "B200", "B300", "GB200"])
@on_each("kind", ["attention_decode", "attention_prefill"])
def test_prompts_and_decoding_of_kimi_k3_have_measured_tables(gpu, kind):
    for n_gpus in (1, 2, 4):
        shape = linear_attention_shape(Parallelism(n_gpus).shard(load_model("Kimi-K3")))
        found = find_table(kind, gpu, shape=shape, engine=Engine("vllm"))
        assert found is not None
        assert found.metadata.provenance == "imported"


def test_mamba_takes_no_rows_of_a_delta_rule():
    model = next(m for m in map(load_model, list_models()) if m.linear_kind == "mamba2")
    assert model.n_linear_layers
    assert not list(aiconfigurator.linear_attention_tables("H200", model))
