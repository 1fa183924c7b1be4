"""Models with layers of linear attention (Gated DeltaNet): counts, memory, times, transfers."""

import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels import roofline
from eldr_sim.kernel_profiles.kernels.flops import prefill_flops
from eldr_sim.kernel_profiles.kernels.kernel_latency import DecodeAttention, PrefillAttention
from eldr_sim.kernel_profiles.models import LONGEST, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources.aiconfigurator import linear_attention_tables
from eldr_sim.kernel_profiles.steps.parts import Parts
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata
from eldr_sim.kernel_profiles.tables.library import Engine
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.memory import least_block_size, state_blocks
from eldr_sim.simulator.setup.prepare import prepare

#: Qwen3.5 with four layers, of which one attends, and few experts.
CONFIG = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "hidden_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
        "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128, "max_position_embeddings": 4096,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    },
}  # fmt: skip

#: As many layers and experts as the trace that ships; five of the layers attend.
ROUTED = {"num_hidden_layers": 10, "full_attention_interval": 2, "num_experts": 128,
          "num_experts_per_tok": 8}  # fmt: skip


def model_file(folder, **changes):
    config = CONFIG | {"text_config": CONFIG["text_config"] | changes}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_parameters_of_each_matrix(tmp_path):
    """By hand, of one layer of each kind; queries come with a gate as wide as they are."""
    model = load_model(model_file(tmp_path))
    assert (model.n_linear_layers, model.n_full_layers, model.attention_gate) == (3, 1, True)
    keys, values = 4 * 32, 8 * 32
    linear = 512 * (2 * keys + 2 * values) + 512 * 2 * 8 + values * 512
    linear += 4 * (2 * keys + values) + 2 * 8 + 32
    full = 512 * (2 * 8 + 2 * 2) * 64 + 8 * 64 * 512 + 2 * 64
    assert model.attention_params == 3 * linear + full


def test_a_layer_list_says_which_layers_attend(tmp_path):
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    assert load_model(model_file(tmp_path, layer_types=types)).n_linear_layers == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype 'float8'"),
        ({"linear_num_key_heads": 0}, "3 linear layers of heads"),
        ({"layer_types": ["linear_attention"] * 4}, "n_linear_layers 4 of 4 layers"),
    ],
)
def test_what_cannot_be(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        load_model(model_file(tmp_path, **changes))


def test_a_state_is_as_large_for_every_context_and_is_sharded_by_heads(tmp_path):
    model = load_model(model_file(tmp_path))
    state = 3 * (8 * 32 * 32 * 4 + 2 * 3 * (2 * 4 + 8) * 32)
    assert model.state_bytes == state
    assert model.kv_bytes(100) - state == 100 * 2 * 2 * 2 * 64
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 64
    assert Parallelism(4).shard(model).state_bytes == state / 4
    with pytest.raises(InputError, match="heads of linear attention"):
        Parallelism(8).shard(model)
    half = load_model(model_file(tmp_path, mamba_ssm_dtype="bfloat16"))
    assert state - half.state_bytes == 3 * 8 * 32 * 32 * 2


def test_flops_of_a_token_do_not_grow_in_linear_layers(tmp_path):
    model = load_model(model_file(tmp_path))
    near, far = (prefill_flops(model, 1, cached) for cached in (0, 1000))
    assert far - near == 1000 * 2 * 8 * 2 * 64  # the one layer that attends: 2 FLOPs, K and V
    without = model.active_params - model.embedding_params - model.lm_head_params
    assert near == 2 * without + 3 * 6 * 8 * 32**2 + 2 * 8 * 2 * 64


def test_only_attending_layers_take_longer_for_longer_contexts(tmp_path):
    """Against the roofline of each layer, added up; a chunk after others costs what it adds."""
    model, gpu = load_model(model_file(tmp_path)), load_gpu("H100")
    steps = build_step_time_model(model, gpu, max_num_seqs=64, max_model_len=4096)
    states, chunks = roofline.linear_attention(gpu, model, 4096)
    full = roofline.decode_attention(gpu, model, False)

    def decode(batch, context):
        return steps.parts(batch, batch * context, activated=[2.0] * 4).attention

    for batch in (1, 7, 64):
        for context in (16, 1600):
            one = np.array([float(batch)]), np.array([float(context)])
            expected = float((3 * states.time_s(*one) + full.time_s(*one))[0, 0])
            assert decode(batch, context) == pytest.approx(expected)
    alone = roofline.prefill_attention(gpu, model, False, 4096)
    whole = steps.parts(chunks=[(0, 2000)]).attention
    assert whole == pytest.approx(3 * chunks.alone_s[2000] + alone.alone_s[2000])


def test_drafts_write_a_state_for_each_token(tmp_path):
    """A sequence that verifies three drafts reads its state once and writes it four times."""
    model, gpu = load_model(model_file(tmp_path)), load_gpu("H100")
    states, _ = roofline.linear_attention(gpu, model, 16)
    kinds = {"max_num_seqs": 8, "max_model_len": 64}
    plain, drafted = (
        build_step_time_model(model, gpu, **kinds, tokens_per_sequence=n).cost for n in (1, 4)
    )
    more = states.time_s(np.array([8 * 2.5]), np.zeros(1)) - states.time_s(
        np.array([8.0]), np.zeros(1)
    )
    assert drafted.attention_s[8, 0] - plain.attention_s[8, 0] == pytest.approx(3 * more[0, 0])


def test_tables_hold_for_every_context_and_longer_prompts_go_on_in_a_line():
    shape = {"n_key_heads": 2, "n_value_heads": 8, "head_dim": 128}
    about = {"gpu": "H100", "shape": shape, "dtype": "bfloat16", "kernel_source": "a test",
             "framework": "none", "provenance": "measured", "origin": "made up",
             "device": "H100"}  # fmt: skip
    batch, context = np.meshgrid([1, 4], [1, LONGEST], indexing="ij")
    columns = {"batch": batch.ravel(), "context": context.ravel(),
               "latency_s": 1e-6 * batch.ravel()}  # fmt: skip
    columns = {k: v.astype(np.int32) if k != "latency_s" else v for k, v in columns.items()}
    decode = DecodeAttention.from_table(
        LatencyTable(TableMetadata(kind="attention_decode", **about), columns)
    )
    assert decode.token_s == 0.0
    assert decode.time_s(np.array([2.0]), np.array([1.0, 1e6])).tolist() == [
        [pytest.approx(2e-6)] * 2
    ]
    columns = {"batch": np.ones(2, np.int32), "new_tokens": np.array([1000, 2000], np.int32),
               "latency_s": np.array([1e-3, 2e-3])}  # fmt: skip
    prefill = PrefillAttention.from_table(
        LatencyTable(TableMetadata(kind="attention_prefill", **about), columns), 8000, 0.0
    )
    assert prefill.alone_s[8000] == pytest.approx(8e-3)  # four times, not sixteen


def test_states_take_blocks_and_bound_who_runs(tmp_path):
    """Room for the state and a block of four requests: no more run at once. Where as many layers
    attend as keep a state, states fill one block, which is as large as a layer's state."""
    model = load_model(model_file(tmp_path, **ROUTED))
    size = least_block_size(model, 16)
    assert (size, state_blocks(model, size)) == (80, 1)
    assert state_blocks(model, 16) == -(-model.state_bytes // (16 * model.kv_bytes_per_token)) > 1
    fields = {
        "model": str(tmp_path / "config.json"), "gpu": "H100", "topology": "1C", "seed": 3,
        "num_requests": 30, "request_rate": "inf", "input_len": 16, "output_len": 16,
        "num_gpu_blocks_override": 4 * 2 + 1, "enable_prefix_caching": False,
    }  # fmt: skip
    result = simulate(make_config(fields))
    assert result.record.decode_steps["sequences"].max() == 4
    assert result.record.completed.all()


def test_blocks_are_as_large_as_a_layer_s_state(tmp_path):
    """vLLM says 528 tokens of Qwen3.5-4B on one GPU (vllm#40696): 32 heads of 128 x 128 float32 and
    a convolution of 4 over 8,192 features, of 4,096 bytes of KV a token."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    states = {"linear_num_key_heads": 16, "linear_num_value_heads": 32,
              "linear_key_head_dim": 128, "linear_value_head_dim": 128}  # fmt: skip
    model = load_model(model_file(tmp_path, **heads, **states))
    assert least_block_size(model, 16) == 528
    assert least_block_size(model, 1024) == 1024
    assert least_block_size(load_model("Qwen3-8B"), 16) == 16


def test_prefixes_of_models_with_states_are_reused_in_whole_blocks(tmp_path):
    """80 tokens are a block of vLLM's; SGLang keeps its pages of 16."""
    path = model_file(tmp_path, **ROUTED)
    hits = {}
    for engine, prefix in (("vllm", 79), ("vllm", 170), ("sglang", 79)):
        fields = {"model": str(path), "gpu": "H100", "topology": "1C", "num_requests": 6,
                  "engine": engine, "request_rate": 1.0, "input_len": 200, "output_len": 2,
                  "prefix_len": prefix, "num_prefixes": 1, "block_size": 16,
                  "warmup": 0.0}  # fmt: skip
        requests = simulate(make_config(fields)).record.requests
        hits[engine, prefix] = int(requests["cached_tokens"].max())
    assert hits == {("vllm", 79): 0, ("vllm", 170): 160, ("sglang", 79): 64}


def test_a_state_is_handed_over_with_the_kv_cache(tmp_path):
    """The only request of a 1P1D takes as much longer as its larger state is."""
    taken = []
    for dtype in ("bfloat16", "float32"):
        model = model_file(tmp_path, **ROUTED, mamba_ssm_dtype=dtype)
        fields = {"model": str(model), "gpu": "H100", "topology": "1P1D", "num_requests": 1,
                  "request_rate": 1.0, "input_len": 160, "output_len": 4,
                  "block_size": 160, "warmup": 0.0}  # fmt: skip
        config = make_config(fields)
        requests = simulate(config).record.requests
        start, end = requests["transfer_start_s"][0], requests["transfer_end_s"][0]
        taken.append(end - start)
    bandwidth = prepare(config).spec.transfer.bandwidth
    more = 5 * 8 * 32 * 32 * 2
    assert taken[1] - taken[0] == pytest.approx(more / bandwidth, rel=1e-6)


def test_kernels_that_an_eager_step_launches():
    """Counted by hand of Qwen3.5-397B under SGLang, which rotates inside attention."""
    model, gpu = load_model("Qwen3.5-397B-A17B"), load_gpu("B200")
    fused, seconds = (
        Parts(model, gpu, Parallelism(8), (), 1024, engine=Engine(name)).launches_s()
        for name in ("trtllm", "sglang")
    )
    mlp = 1 + 7 + 2 + 1 + 3  # gate, experts, shared MLP with its activation, its own gate
    attends = 2 + 1 + 1 + 2 + 2  # norms, norm of queries and keys, attention, linears, gate
    keeps = 2 + 3 + 14  # norms, linears, kernels
    kernels = 60 * mlp + 15 * attends + 45 * keeps
    assert fused / gpu.launch_s == pytest.approx(kernels)
    assert seconds / gpu.launch_s == pytest.approx(kernels + 60 * 2)  # all-reduces


def test_rows_that_the_package_measured():
    """B200 under SGLang, an eighth of Qwen3.5-397B, 64 sequences: convolution and delta rule."""
    pytest.importorskip("aiconfigurator_core")
    model = Parallelism(8).shard(load_model("Qwen3.5-397B-A17B"))
    decode, prefill = linear_attention_tables("B200", model, "sglang")
    at = decode.columns["batch"] == 64
    assert decode.columns["latency_s"][at] == pytest.approx([15.88e-6] * 2, rel=1e-3)
    assert sorted(decode.columns["context"][at]) == [1, LONGEST]
    assert prefill.metadata.shape == {"n_key_heads": 2, "n_value_heads": 8, "head_dim": 128}
