"""Capture from transformers against a brute-force twin: one request, no cache, no padding.

The twin computes every gate by hand from the hidden states that enter it, in float64 numpy.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.traces.routing.capture.captured import write_captured
from eldr_sim.traces.routing.format import open_trace

torch = pytest.importorskip("torch", reason="needs the extra 'capture'")
transformers = pytest.importorskip(
    "transformers", minversion="5.19", reason="needs the extra 'capture'"
)

from eldr_sim.traces.routing.capture.gates import GATES, find_gates  # noqa: E402
from eldr_sim.traces.routing.capture.hf import capture_transformers  # noqa: E402

VOCAB, E, K, LAYERS = 97, 12, 3, 3
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "num_experts_per_tok": K,
    "eos_token_id": 96,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": E,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}
#: Family -> class of its configuration and what differs; decoder layers with a gate.
FAMILIES = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": E, "moe_intermediate_size": 24}),
    "qwen3_moe_mixed": (
        "Qwen3MoeConfig",
        {"num_experts": E, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": E,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_experts": E,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": E}),
    "mixtral": ("MixtralConfig", {"num_local_experts": E, "sliding_window": 6}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": E,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": E}),
    "deepseek_v2": ("DeepseekV2Config", {**MLA, "first_k_dense_replace": 1}),
    "deepseek_v2_groups": (
        "DeepseekV2Config",
        {**MLA, **GROUPS, "first_k_dense_replace": 0, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, **GROUPS, "first_k_dense_replace": 1}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **GROUPS,
            "n_routed_experts": E,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 2,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "enable_moe_block": True,
            "num_experts": E,
            "top_k_experts": K,
            "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
    ),
}
MOE_LAYERS = {"qwen3_moe_mixed": [0, 2], "deepseek_v2": [1, 2], "deepseek_v3": [1, 2]}
MOE_LAYERS |= {"glm4_moe": [2]}
PROMPTS = [[5, 17, 3], [60, 61, 62, 63, 64, 65, 66, 2], [9], [12, 40, 80, 33, 7], [70, 71]]


def make_model(family, seed=0):
    name, changes = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # what starts as all zeros or ones would not show a mistake
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in key or key.endswith(("router.bias", "sinks")):
                value.normal_(0, 0.3)
            elif "per_expert_scale" in key:
                value.uniform_(0.5, 2.0)
            elif "gate.weight" in key or "router.weight" in key or "router.proj" in key:
                value.normal_(0, 0.3)
    return model


@pytest.fixture(scope="module")
def models():
    made = {}
    return lambda family: made.setdefault(family, make_model(family))


def by_hand(gate, hidden):
    """The ranked experts, probabilities and raw scores of a gate, in float64."""
    config = getattr(gate, "config", None)
    kind = type(gate).__name__

    def array(tensor):
        return tensor.detach().double().numpy()

    x = array(hidden).reshape(-1, hidden.shape[-1])
    if kind == "Gemma4TextRouter":
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + gate.eps)
        x = x * array(gate.scale) * hidden.shape[-1] ** -0.5
        logits = x @ array(gate.proj.weight).T
    else:
        logits = x @ array(gate.weight).T
        if kind == "GptOssTopKRouter":
            logits = logits + array(gate.bias)
    if kind in ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter"):
        prob = 1 / (1 + np.exp(-logits))
        choice = prob + array(gate.e_score_correction_bias)
        best_two = np.sort(choice.reshape(len(x), 4, -1), -1)[..., -2:].sum(-1)
        choice = keep_groups(choice, best_two)
        weight = prob
    else:
        prob = np.exp(logits - logits.max(-1, keepdims=True))
        prob /= prob.sum(-1, keepdims=True)
        choice, weight = prob, prob
        if kind == "DeepseekV2TopkRouter" and gate.topk_method == "group_limited_greedy":
            choice = keep_groups(prob, prob.reshape(len(x), 4, -1).max(-1))
        if kind == "Gemma4TextRouter":
            weight = prob * array(gate.per_expert_scale)
            assert config.top_k_experts == K
    ids = np.argsort(-choice, axis=-1)[:, :K]
    order = np.argsort(-np.take_along_axis(weight, ids, -1), axis=-1)
    return np.take_along_axis(ids, order, -1), prob, logits


def keep_groups(choice, group_score):
    best = np.argsort(-group_score, axis=-1)[:, :2]
    kept = np.zeros_like(group_score, dtype=bool)
    np.put_along_axis(kept, best, True, -1)
    return np.where(np.repeat(kept, choice.shape[-1] // 4, axis=-1), choice, -np.inf)


def gate_inputs(model, ids):
    """Whole forward pass of one sequence: hidden states that enter each gate, and the logits."""
    gates = find_gates(model)
    seen = {}
    handles = [
        g.module.register_forward_pre_hook(
            lambda _, args, layer=g.layer: seen.update({layer: args[0]})
        )
        for g in gates
    ]
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return [(g.module, seen[g.layer]) for g in gates], logits


def twin(model, prompt, new_tokens, stop=None):
    """Greedy generation without a cache; the rows of prompt and generated tokens."""
    ids = list(prompt)
    for _ in range(new_tokens):
        logits = gate_inputs(model, ids)[1][-1].clone()
        if stop is not None and len(ids) == len(prompt):
            logits[stop] = -torch.inf
        token = int(logits.argmax())
        if token == stop:
            break
        ids.append(token)
    hands = [by_hand(gate, hidden) for gate, hidden in gate_inputs(model, ids)[0]]
    rows = np.stack([hand[0] for hand in hands], axis=1)
    prob = np.stack([hand[1][: len(prompt)].sum(0) for hand in hands])
    logit = np.stack([hand[2][: len(prompt)].sum(0) for hand in hands])
    return rows, prob, logit


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_equals_brute_force(models, family):
    model = models(family)
    captured = capture_transformers(
        model,
        PROMPTS,
        max_new_tokens=6,
        batch_size=3,
        temperature=0,
        ignore_eos=True,
        gate_scores=True,
    )
    assert captured.layers == MOE_LAYERS.get(family, [0, 1, 2])
    assert (captured.n_experts, captured.n_decoder_layers) == (E, LAYERS)
    for q, prompt in enumerate(PROMPTS):
        rows, prob, logit = twin(model, prompt, 6)
        assert len(rows) == len(prompt) + 6
        np.testing.assert_array_equal(captured.experts[q], rows)
        np.testing.assert_allclose(captured.prob[q], prob, rtol=1e-4, atol=1e-5)
        if family == "gemma4":
            assert captured.logit is None
        else:
            np.testing.assert_allclose(captured.logit[q], logit, rtol=1e-3, atol=1e-3)


def test_every_known_gate_is_tested():
    tested = {type(gate.module).__name__ for f in FAMILIES for gate in find_gates(make_model(f))}
    assert tested == set(GATES)


@pytest.mark.parametrize(("request_", "position"), [(0, 3), (1, 0)])
def test_a_request_ends_before_its_stop_token(models, request_, position):
    """Also where the stop token is the first that the model would generate: it may not be."""
    model = models("olmoe")
    greedy = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(gate_inputs(model, ids)[1][-1].argmax()))
        greedy.append(ids[len(prompt) :])
    stop = greedy[request_][position]
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = stop
    try:
        captured = capture_transformers(
            model, PROMPTS, max_new_tokens=8, batch_size=2, temperature=0
        )
    finally:
        model.generation_config.eos_token_id = own
    lengths = []
    for q, prompt in enumerate(PROMPTS):
        rows = twin(model, prompt, 8, stop=stop)[0]
        np.testing.assert_array_equal(captured.experts[q], rows)
        lengths.append(len(rows) - len(prompt))
    assert min(lengths) >= 1
    assert position == 0 or min(lengths) < 8


def test_sampling_follows_its_seed(models):
    model = models("qwen3_moe")
    a, b, c = (
        capture_transformers(model, PROMPTS, max_new_tokens=5, seed=seed, ignore_eos=True)
        for seed in (1, 1, 2)
    )
    assert all(np.array_equal(x, y) for x, y in zip(a.experts, b.experts, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a.experts, c.experts, strict=True))
    for q, prompt in enumerate(PROMPTS):  # the prompts' rows do not depend on it
        np.testing.assert_array_equal(a.experts[q][: len(prompt)], c.experts[q][: len(prompt)])


def test_models_own_settings_come_back(models):
    model = models("qwen3_moe")
    own = model.generation_config
    capture_transformers(model, [[1, 2]], max_new_tokens=1)
    assert model.generation_config is own
    assert not any(gate.module._forward_hooks for gate in find_gates(model))


def test_unknown_gate_is_told_in_one_line(models):
    model = make_model("olmoe")
    gate = model.model.layers[1].mlp.gate
    gate.__class__ = type("StrangeRouter", (type(gate),), {})
    with pytest.raises(InputError, match=r"the gate StrangeRouter of OlmoeForCausalLM .*allowed"):
        capture_transformers(model, PROMPTS)
    dense = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1
        )
    )
    with pytest.raises(InputError, match="Qwen3ForCausalLM has no known MoE gate"):
        capture_transformers(dense, [[1]])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": [[VOCAB]], "max_new_tokens": 1}, "token id 97 is not in the vocabulary"),
        ({"max_new_tokens": 125}, "exceed the model's 128"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"temperature": -1}, "temperature: got -1"),
    ],
)
def test_bad_input_is_one_line(models, changes, problem):
    arguments = {"token_ids": PROMPTS} | changes
    with pytest.raises(InputError, match=problem):
        capture_transformers(models("olmoe"), **arguments)


def test_command_makes_a_valid_trace(models, tmp_path, run_cli):
    model = models("deepseek_v3")
    model.save_pretrained(tmp_path / "tiny-deepseek")
    lines = [
        {"prompt": p, "topic": "a" if i % 2 else "b", "request_id": f"r{i}"}
        for i, p in enumerate(PROMPTS)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "trace"
    model_dir = tmp_path / "tiny-deepseek"
    command = ["trace", "capture", "transformers", model_dir, "--prompts", file, "--out", out]
    flags = (
        "--domain-field topic --max-new-tokens 4 --max-prompt-tokens 5 --batch-size 2 "
        "--temperature 0 --ignore-eos --gate-scores --dtype float32"
    )
    code, text, _ = run_cli(*command, *flags.split())
    assert code == 0
    assert "5 requests" in text
    trace = open_trace(out)
    assert trace.request_id == [f"r{i}" for i in range(5)]
    assert trace.prompt_len.tolist() == [3, 5, 1, 5, 2]
    assert trace.output_len.tolist() == [4] * 5
    assert (trace.n_layers, trace.n_experts, trace.top_k) == (2, E, K)
    assert trace.manifest.model == "tiny-deepseek"
    assert trace.manifest.provenance == "recorded"
    assert "decoder layers 1-2 of 0-2" in trace.manifest.notes
    assert trace.gate_scores.kinds == ["prob", "logit"]
    assert str(tmp_path) not in (out / "manifest.json").read_text()
    rows = twin(model, PROMPTS[3], 4)[0]
    first = trace.first_row[3]
    np.testing.assert_array_equal(trace.experts[first : first + 9], rows)
    code, _, error = run_cli(*command)
    assert (code, error.count("\n")) == (2, 1)
    assert "exists" in error


def test_text_prompts_go_through_the_tokenizer(models, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from eldr_sim.traces.routing.capture.prompts import Prompt, tokenize

    vocabulary = {"<unk>": 0, "hello": 1, "world": 2, "user": 3, "says": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }} says {{ m['content'] }}{% endfor %}"
    )
    fast.save_pretrained(tmp_path)
    prompts = [
        Prompt("a", "d", "hello world hello"),
        Prompt("b", "d", [7, 8]),
        Prompt("c", "d", [{"role": "user", "content": "world"}]),
    ]
    assert tokenize(str(tmp_path), prompts) == [[1, 2, 1], [7, 8], [3, 4, 2]]
    assert tokenize(str(tmp_path), prompts, max_prompt_tokens=1) == [[1], [7], [3]]
    with pytest.raises(InputError, match="r has no token"):
        tokenize(str(tmp_path), [Prompt("r", "d", "  ")])
    with pytest.raises(InputError, match="has no tokenizer"):
        tokenize(str(Path(tmp_path) / "none"), [Prompt("r", "d", "hello")])


def test_trace_keeps_prompt_scores_of_every_request(models, tmp_path):
    from eldr_sim.traces.routing.capture.prompts import Prompt

    captured = capture_transformers(
        models("gemma4"), PROMPTS, max_new_tokens=2, gate_scores=True, ignore_eos=True
    )
    prompts = [Prompt(f"r{i}", "d", p) for i, p in enumerate(PROMPTS)]
    trace = write_captured(tmp_path / "t", captured, prompts, model="m", source_data="none")
    scores = trace.prompt_scores([1, 2], "prob")
    np.testing.assert_allclose(scores.sum(-1), [[8] * 3, [1] * 3], rtol=1e-5)
