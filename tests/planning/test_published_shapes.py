"""Shapes of a wide expert-parallel deployment whose order was measured and published.

llm-d measured GLM-5.2-FP8 on H200, output tokens/s: workers of 8 engines in both pools 1,501; of 8
and 16 engines 3,233; of 16 and 16 5,647; two of 16 and one of 16 6,647 (llm-d-autoscaling #1568).
What stands in here: dense MLA for its sparse attention (its KV cache is as large), drawn routing of
its dimensions, and one load of 8,192 tokens in and 512 out for theirs, which is not published in
full. So the order is held against theirs, and no figure.
"""

import json
import math

import pytest

from eldr_sim.simulator.run import simulate_summary
from eldr_sim.simulator.setup.config.run_config import make_config

#: Prefill workers, engines of each, decode workers, engines of each; measured tokens/s.
SHAPES = {(1, 8, 1, 8): 1501, (1, 8, 1, 16): 3233, (1, 16, 1, 16): 5647, (2, 16, 1, 16): 6647}
#: Dimensions of its config.json, in the terms of the architecture that stands in.
GLM = {
    "model_type": "deepseek_v3", "num_hidden_layers": 78, "first_k_dense_replace": 3,
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "vocab_size": 154880, "max_position_embeddings": 202752, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


@pytest.mark.slow
def test_glm_5_2_on_h200_in_the_order_that_was_measured(drawn_routing, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM))
    found, kv = {}, {}
    for shape, measured in SHAPES.items():
        n_prefill, prefill, n_decode, decode = shape
        run = simulate_summary(
            make_config(
                {
                    "model": str(path), "gpu": "H200", "topology": f"{n_prefill}P{n_decode}D",
                    "enable_expert_parallel": True, "all2all_backend": "deepep_ll",
                    "data_parallel_size": decode, "kv_cache_dtype": "fp8", "policy": "jsq",
                    "prefill": {"data_parallel_size": prefill, "all2all_backend": "deepep_ht"},
                    "input_len": 8192, "output_len": 512, "max_concurrency": 256,
                    "request_rate": math.inf, "num_requests": 512,
                }
            )
        )  # fmt: skip
        found[shape] = run["output_throughput"]
        kv[decode] = run["kv_blocks_per_worker"] * 16
        print(f"{shape}: {found[shape]:.0f} tokens/s, measured {measured}; KV {kv[decode]} tokens")
    assert sorted(found, key=found.__getitem__) == sorted(SHAPES, key=SHAPES.__getitem__)
    assert kv[16] > 2 * kv[8]  # 182,000 and 990,000 tokens a rank there
