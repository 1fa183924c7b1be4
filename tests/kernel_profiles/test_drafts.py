"""The memory that what drafts takes: its own matrices, not those that it shares."""

from types import SimpleNamespace

import pytest

from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.drafts import build_draft

BUILD = SimpleNamespace(label="roofline", warnings=())


def weights(method, target, ranks=1):
    return build_draft(
        method, target, Parallelism(ranks), lambda *_arguments: BUILD
    ).weight_bytes  # fmt: skip


def attention_params(model):
    heads = model.n_heads + 2 * model.n_kv_heads
    return model.hidden_size * model.head_dim * (heads + model.n_heads)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B"])
def test_an_mtp_head_is_a_layer_and_a_projection(name):
    """It shares the embedding and the lm_head."""
    target = load_model(name)
    one_less = type(target)(**target.model_dump() | {"n_layers": target.n_layers - 1, "hf_id": ""})
    layer = target.weight_bytes - one_less.weight_bytes
    projection = 2 * 2 * target.hidden_size**2
    assert weights("mtp", target) == pytest.approx(layer + projection, rel=1e-3)


@pytest.mark.parametrize(("method", "states", "tokens"), [("eagle", 2, 0), ("eagle3", 3, 32_000)])
def test_an_eagle_head_is_a_dense_layer_and_its_own_lm_head(method, states, tokens):
    """EAGLE's lm_head is the model's; EAGLE-3 has one of 32,000 tokens. Both share the rest."""
    target = load_model("Qwen3-30B-A3B")
    hidden = target.hidden_size
    params = attention_params(target) + 3 * hidden * 4 * hidden
    params += states * hidden**2 + tokens * hidden
    assert weights(method, target) == pytest.approx(2 * params, rel=1e-3)
    assert weights(method, target, 2) == pytest.approx(params + states * hidden**2, rel=1e-3)


@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_head_caches_keys_and_values_of_one_layer(method, ranks):
    target = load_model("Qwen3-30B-A3B")
    draft = build_draft(method, target, Parallelism(ranks), lambda *_arguments: BUILD)
    layer = 2 * 2 * target.n_kv_heads * target.head_dim
    assert draft.kv_bytes_per_token == layer / ranks
