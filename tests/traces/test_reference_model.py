"""The reference model: its architecture, training, checkpoints and recorded routing."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra reference-model")
pytest.importorskip("safetensors", reason="needs the extra reference-model")
pytest.importorskip("tokenizers", reason="needs the extra reference-model")

import torch.nn.functional as F  # noqa: E402

from eldr_sim.errors import InputError  # noqa: E402
from eldr_sim.traces.routing.format import open_trace  # noqa: E402
from eldr_sim.traces.routing.imports.importers import import_trace  # noqa: E402
from studies.reference_model import data, export, record, train  # noqa: E402
from studies.reference_model.__main__ import main  # noqa: E402
from studies.reference_model.model import (  # noqa: E402
    KVCache,
    ModelConfig,
    Qwen3Moe,
    _experts_grouped,
    _ExpertsFunction,
)
from studies.reference_model.train import evaluate, evaluation_text  # noqa: E402

TINY = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    n_experts=12,
    top_k=3,
    expert_size=16,
    context=40,
)
QUICK = train.TrainConfig(sequences=4, steps=12, warmup_steps=2, save_minutes=1e9)
WORDS = {
    "cooking": "stir boil simmer the soup with salt pepper and a spoon of butter",
    "sailing": "haul hoist trim the sail with wind waves and a knot of rope",
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """Two domains of 60 documents, each of 60 words of its domain's."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for domain, words in WORDS.items():
        documents = [" ".join(rng.choice(words.split(), 60)) for _ in range(60)]
        text = f"\n{data.SEPARATOR}\n".join(documents)
        (folder / f"{domain}.txt").write_text(text + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def documents(text_folder):
    return data.split_documents(data.read_documents(text_folder), 0.5)


@pytest.fixture(scope="module")
def checkpoint(documents, tmp_path_factory):
    """A trained tiny model."""
    out = tmp_path_factory.mktemp("checkpoint")
    train.train(documents, out, TINY, replace(QUICK, steps=25))
    return out


def scattered(config=TINY, seed=0):
    """Return a random model whose logits and gates are far from even."""
    torch.manual_seed(seed)
    model = Qwen3Moe(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def test_logits_gates_and_gradients_equal_transformers(tmp_path):
    transformers = pytest.importorskip(
        "transformers", minversion="5", reason="the oracle is transformers' Qwen3-MoE"
    )
    model = scattered()
    tokenizer = data.train_tokenizer({"d": ["some words"]}, TINY.vocab_size)
    export.save_checkpoint(model, tokenizer, tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(oracle).__name__ == "Qwen3MoeForCausalLM"
    ids = torch.randint(0, TINY.vocab_size, (2, TINY.context))
    theirs = oracle(ids, output_router_logits=True)
    hidden, routing = model(ids)
    torch.testing.assert_close(model.logits(hidden), theirs.logits, rtol=1e-5, atol=1e-5)
    for ours, logits in zip(routing, theirs.router_logits, strict=True):
        torch.testing.assert_close(ours.logits, logits.view_as(ours.logits), rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.experts, logits.view_as(ours.logits).topk(TINY.top_k).indices)

    target = torch.randint(0, TINY.vocab_size, ids.shape)
    model.loss(hidden, target).backward()
    F.cross_entropy(theirs.logits.flatten(0, 1), target.flatten()).backward()
    gradients = {name: p.grad for name, p in oracle.named_parameters()}
    close = {"rtol": 1e-4, "atol": 1e-6}
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}"
        for name, p in layer.named_parameters():
            if name == "mlp.gate_up":
                want = gradients[f"{prefix}.mlp.experts.gate_up_proj"].transpose(1, 2)
            elif name == "mlp.down":
                want = gradients[f"{prefix}.mlp.experts.down_proj"].transpose(1, 2)
            else:
                want = gradients[f"{prefix}.{name}"]
            torch.testing.assert_close(p.grad, want, **close)
    embedding = gradients["model.embed_tokens.weight"]
    torch.testing.assert_close(model.embed_tokens.weight.grad, embedding, **close)


def test_tokenizer_loads_in_transformers(checkpoint):
    transformers = pytest.importorskip("transformers", minversion="5")
    _, ours = export.load_checkpoint(checkpoint)
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = "stir the soup\n\nand  haul 12 sails, señor 风"
    assert theirs(text).input_ids == ours.encode(text).ids
    assert theirs.decode(ours.encode(text).ids) == text
    assert theirs.eos_token_id == 0


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_by_group_equal_experts_one_by_one(tokens):
    """Forward and gradients, with experts that no token chose and groups of any size."""
    torch.manual_seed(tokens)
    n_experts, d, inner, k = 9, 8, 6, 2
    x, weights = torch.randn(tokens, d), torch.rand(tokens, k)
    chosen = torch.stack([torch.randperm(n_experts - 2)[:k] for _ in range(tokens)])
    gate_up, down = torch.randn(n_experts, d, 2 * inner), torch.randn(n_experts, inner, d)
    target = torch.randn(tokens, d)

    def one_by_one(x, weights, chosen, gate_up, down):
        rows = []
        for t in range(tokens):
            row = torch.zeros(d)
            for j, e in enumerate(chosen[t].tolist()):
                gate, up = (x[t] @ gate_up[e]).chunk(2)
                row = row + weights[t, j] * ((F.silu(gate) * up) @ down[e])
            rows.append(row)
        return torch.stack(rows)

    def results(function):
        leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
        out = function(leaves[0], leaves[1], chosen, *leaves[2:])
        (out * target).sum().backward()
        return out, [leaf.grad for leaf in leaves]

    want, want_gradients = results(one_by_one)
    got, gradients = results(_ExpertsFunction.apply)
    torch.testing.assert_close(got, want)
    for gradient, wanted in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


def test_grouped_experts_of_gpus_agree():
    """`grouped_mm` wants bfloat16 and sizes in 16 bytes; here only that it is used rightly."""
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(30)])
    x, weights = torch.randn(30, 16).bfloat16(), torch.rand(30, 2)
    gate_up, down = 0.3 * torch.randn(8, 16, 32), 0.3 * torch.randn(8, 16, 16)
    got = _experts_grouped(x, weights, chosen, gate_up, down)
    want = _ExpertsFunction.apply(x, weights, chosen, gate_up, down)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_sliced_loss_is_cross_entropy():
    model = scattered()
    hidden = torch.randn(2, 150, TINY.hidden_size)
    targets = torch.randint(0, TINY.vocab_size, (2, 150))

    def results(enabled):
        model.zero_grad()
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model.loss(leaf, targets)
        (3 * loss).backward()
        return loss.item(), leaf.grad, model.embed_tokens.weight.grad.clone()

    loss, d_hidden, d_embedding = results(True)
    want, want_hidden, want_embedding = results(False)
    assert loss == pytest.approx(want, rel=1e-3)
    assert (d_hidden - want_hidden).norm() < 0.01 * want_hidden.norm()
    assert (d_embedding - want_embedding).norm() < 0.01 * want_embedding.norm()


def test_balance_loss_is_one_when_even_and_n_experts_when_one_expert_takes_all():
    model = scattered()
    _, routing = model(torch.randint(0, TINY.vocab_size, (2, 8)))
    n, e = 24, TINY.n_experts
    even = routing[0]._replace(
        logits=torch.zeros(n, e),
        probabilities=torch.full((n, e), 1 / e),
        experts=torch.arange(n * 3).view(n, 3) % e,
    )
    one = even._replace(
        probabilities=F.one_hot(torch.zeros(n, dtype=torch.long), e).float(),
        experts=torch.zeros(n, 1, dtype=torch.long),
    )
    assert train.balance_loss([even, even]).item() == pytest.approx(2)
    assert train.balance_loss([one]).item() == pytest.approx(e)


def test_cache_changes_nothing():
    model = scattered()
    ids = torch.randint(0, TINY.vocab_size, (3, 12))
    whole, _ = model(ids)
    cache = KVCache(TINY, 3, 12, torch.float32, torch.device("cpu"))
    parts = [
        model(ids[:, :7], cache)[0],
        *(model(ids[:, t : t + 1], cache)[0] for t in range(7, 12)),
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_documents_split_without_overlap_and_by_content_only(text_folder):
    texts = data.read_documents(text_folder)
    assert list(texts) == sorted(WORDS)
    assert {len(t) for t in texts.values()} == {60}
    split = data.split_documents(texts, 0.5)
    for name, whole in texts.items():
        parts = [split.train[name], split.calibration[name], split.serving[name]]
        assert all(parts)
        assert sorted(parts[0] + parts[1] + parts[2]) == sorted(whole)
        assert len(set().union(*map(set, parts))) == sum(len(set(p)) for p in parts)
    # Another order, or a copy with other blanks, moves nothing.
    shuffled = {name: [f" {t}\n" for t in reversed(whole)] for name, whole in texts.items()}
    again = data.split_documents(shuffled, 0.5)
    for name in texts:
        assert {t.strip() for t in again.train[name]} == set(split.train[name])
    assert data.split_documents(texts, 0.5, seed=1).train != split.train


def test_separators_side_by_side_and_at_the_ends_make_no_document(tmp_path):
    s = data.SEPARATOR
    (tmp_path / "a.txt").write_text(f"{s}\none\n{s}\n{s}\ntwo {s} and\nmore\n{s}\n")
    assert data.read_documents(tmp_path)["a"] == ["one", f"two {s} and\nmore"]


def test_training_learns_and_tells_held_out_loss(documents, checkpoint):
    log = [json.loads(line) for line in (checkpoint / train.LOG_FILE).read_text().splitlines()]
    described = export.read_description(checkpoint)
    assert described["documents"] == documents.description()
    assert described["figures"]["step"] == 25
    assert described["figures"]["tokens"] == 25 * 4 * TINY.context
    # Uniform over the vocabulary is log(300) = 5.7 nats.
    assert log[-1]["mean_loss"] < 5.0
    model, tokenizer = export.load_checkpoint(checkpoint)
    text = evaluation_text(documents, tokenizer, TINY.context)
    assert evaluate(model, text, "cpu")["mean_loss"] == log[-1]["mean_loss"]


def test_same_seed_same_weights_even_when_interrupted(documents, tmp_path):
    def weights(folder):
        return (folder / "model.safetensors").read_bytes()

    train.train(documents, tmp_path / "whole", TINY, QUICK)

    saves = 0

    def interrupt(entry):
        nonlocal saves
        saves += "mean_loss" in entry
        if saves == 3:
            raise KeyboardInterrupt

    often = replace(QUICK, save_minutes=0.0)
    with pytest.raises(KeyboardInterrupt):
        train.train(documents, tmp_path / "parts", TINY, often, log=interrupt)
    state = torch.load(tmp_path / "parts" / train.STATE_FILE)
    assert state["step"] == 2
    train.train(documents, tmp_path / "parts", TINY, QUICK, resume=True)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")

    train.train(documents, tmp_path / "other", TINY, replace(QUICK, seed=1))
    assert weights(tmp_path / "other") != weights(tmp_path / "whole")


SMALL = record.RecordConfig(
    calibration=6, serving=10, prompt_lengths=(8, 11), output_len=9, batch=3, exact=True
)


def brute_force(model, prompt, draws, temperature):
    """Generate and record one request, every token by a forward pass over all before it."""
    ids = prompt.tolist()
    for u in draws:
        hidden, _ = model(torch.tensor([ids]))
        p = torch.softmax(model.logits(hidden)[0, -1, 1:].double() / temperature, 0).numpy()
        ids.append(1 + int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right")))
    _, routing = model(torch.tensor([ids]))
    gate = torch.stack([layer.logits for layer in routing], 1)
    order = gate.argsort(-1, descending=True)[..., : TINY.top_k]
    n = len(prompt)
    return ids, order.numpy(), gate[:n].softmax(-1).sum(0).numpy(), gate[:n].sum(0).numpy()


def test_recording_equals_brute_force(documents, checkpoint):
    model, tokenizer = export.load_checkpoint(checkpoint)
    prompts = record.choose_prompts(documents, tokenizer, SMALL)
    routing = record.record(checkpoint, prompts, SMALL)
    assert routing.experts.dtype == np.uint8
    start = 0
    with torch.no_grad():
        for q, prompt in enumerate(prompts.tokens):
            draws = np.random.default_rng([SMALL.seed, 1, q]).random(SMALL.output_len)
            ids, experts, prob, logit = brute_force(model, prompt, draws, SMALL.temperature)
            end = start + len(prompt) + SMALL.output_len
            assert routing.token_ids[start:end].tolist() == ids
            np.testing.assert_array_equal(routing.experts[start:end], experts)
            np.testing.assert_allclose(routing.gate_prob[q], prob, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(routing.gate_logit[q], logit, rtol=1e-3, atol=1e-4)
            start = end
    assert start == len(routing.experts)
    assert 0 not in routing.token_ids


def test_prompts_come_from_their_own_held_out_documents(documents, checkpoint):
    _, tokenizer = export.load_checkpoint(checkpoint)
    prompts = record.choose_prompts(documents, tokenizer, SMALL)
    assert prompts.is_calibration.tolist() == [True] * 6 + [False] * 10
    assert np.bincount(prompts.domain[:6]).tolist() == [3, 3]
    assert np.bincount(prompts.domain[6:]).tolist() == [5, 5]
    assert {len(ids) for ids in prompts.tokens} == {8, 11}
    assert prompts.per_document == 1
    for ids, d, calibration in zip(
        prompts.tokens, prompts.domain, prompts.is_calibration, strict=True
    ):
        part = documents.calibration if calibration else documents.serving
        name = documents.domains[d]
        assert any(tokenizer.decode(ids.tolist()).strip() in text for text in part[name])


def test_several_prompts_of_one_document_do_not_overlap():
    rng = np.random.default_rng(0)
    long = np.arange(100, dtype=np.uint16)
    short = np.arange(200, 215, dtype=np.uint16)
    turns = list(record._windows([long, short, short[:5]], 12, rng))
    assert [len(turn) for turn in turns] == [2, *[1] * 7]
    seen = np.concatenate([window for turn in turns for window in turn])
    assert len(seen) == 9 * 12
    assert len(np.unique(seen)) == len(seen)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line; returns exit code, standard output, standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["studies.reference_model", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def record_arguments(checkpoint, text, out, **changes):
    options = {
        "out": out,
        "source-data": "made up",
        "calibration": 4,
        "serving": 6,
        "prompt-lengths": "8,11",
        "output-len": 5,
        "gate-scores": 3,
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["record", checkpoint, text, *(x for k, v in options.items() for x in (f"--{k}", v))]


def test_record_command_writes_a_trace_and_an_archive(text_folder, checkpoint, tmp_path, command):
    one, archive = tmp_path / "one", tmp_path / "all.npz"
    code, out, err = command(*record_arguments(checkpoint, text_folder, one, npz=archive))
    assert (code, err) == (0, "")
    assert "10 requests, 142 tokens, 3 layers; at most 1 prompts from one document" in out
    trace = open_trace(one)
    assert trace.is_calibration.tolist() == [True] * 4 + [False] * 6
    assert trace.domains == sorted(WORDS)
    assert trace.manifest.provenance == "recorded"
    assert trace.gate_scores.requests.tolist() == [0, 1, 2, 4, 5, 6]

    imported = import_trace(
        archive, tmp_path / "two", model="m", captured_by="c", source_data="s", tool_versions={},
        calibration_fraction=0.4,
    )  # fmt: skip
    # The archive has the gate's order, the trace only which half of it came first.
    half = -(-trace.top_k // 2)
    assert trace.manifest.rank_groups == [half, trace.top_k - half]
    for part in (slice(half), slice(half, None)):
        np.testing.assert_array_equal(
            np.sort(imported.experts[..., part]), trace.experts[..., part]
        )
    np.testing.assert_array_equal(imported.is_calibration, trace.is_calibration)
    every = np.arange(10)
    # The probabilities of a token sum to one.
    total = imported.prompt_scores(every, "prob").sum(-1)
    np.testing.assert_allclose(total, np.tile(trace.prompt_len[:, None], 3), rtol=1e-3)
    with np.load(archive) as stored:
        assert stored["split"].tolist() == [0] * 4 + [1] * 6
        assert stored["token_ids"].shape == (142,)


def test_two_processes_record_the_same_bytes(text_folder, checkpoint, tmp_path, command):
    for name, processes in (("one", 1), ("two", 2)):
        out = tmp_path / name
        assert command(*record_arguments(checkpoint, text_folder, out, processes=processes))[0] == 0
    for file in ("experts.npy.xz", "requests.parquet", "gate_scores.npz", "manifest.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0}, "temperature: got 0.0 (allowed: more than 0)"),
        ({"output_len": 0}, "output_len: got 0 (allowed: more than 0)"),
        ({"output_len": 90}, "output_len: prompts and outputs span 101 tokens (allowed: 40,"),
        ({"serving": 4000}, "serving documents hold"),
        ({"prompt_lengths": "8,x"}, "prompt_lengths: got '8,x' (allowed: numbers with commas)"),
        ({"processes": 0}, "processes: got 0 (allowed: at least 1)"),
        ({"gate_scores": -1}, "gate_scores: got -1 (allowed: 0 or more)"),
        ({"domains": "cooking"}, "No such option"),
    ],
)
def test_record_refuses_settings_in_one_line(
    changes, message, text_folder, checkpoint, tmp_path, command
):
    out = tmp_path / "out"
    code, _, err = command(*record_arguments(checkpoint, text_folder, out, **changes))
    assert code == 2
    assert message in err
    assert message == "No such option" or err.count("\n") == 1
    assert not out.exists()


def test_record_refuses_what_is_no_checkpoint_or_not_its_text(
    text_folder, checkpoint, tmp_path, command
):
    def error(*arguments):
        code, _, err = command(*record_arguments(*arguments))
        assert code == 2
        assert err.startswith("Error: ")
        assert err.count("\n") == 1
        return err

    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    assert "training.json: No such file" in error(empty, text_folder, out)
    assert "is not a folder" in error(checkpoint, tmp_path / "none", out)
    assert "cooking.txt: No such file" in error(checkpoint, empty, out)
    other = tmp_path / "other"
    other.mkdir()
    for name in WORDS:
        content = (text_folder / f"{name}.txt").read_text()
        (other / f"{name}.txt").write_text(content + f"{data.SEPARATOR}\none more\n")
    assert "is not the text" in error(checkpoint, other, out)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    assert "model.safetensors: cannot be used" in error(broken, text_folder, out)
    assert not out.exists()
    assert "exists (allowed: a new folder, or --force)" in error(checkpoint, text_folder, empty)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "steps: give either steps or minutes"),
        (["--steps", "1", "--minutes", "1"], "steps: give either steps or minutes"),
        (["--steps", "0"], "steps: got 0 (allowed: more than 0)"),
        (["--steps", "1", "--held-out", "1.5"], "held_out: got 1.5"),
        (["--steps", "1", "--domains", "cooking,nothing"], "nothing.txt: No such file"),
        (["--steps", "1", "--resume"], "has no training_state.pt"),
    ],
)
def test_train_refuses_settings_in_one_line(arguments, message, text_folder, tmp_path, command):
    out = tmp_path / "out"
    code, _, err = command("train", text_folder, "--out", out, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_train_does_not_overwrite_a_checkpoint(documents, checkpoint):
    with pytest.raises(InputError, match=r"holds a checkpoint \(allowed: a new folder, or resume"):
        train.train(documents, checkpoint, TINY, QUICK)


def test_without_torch_one_line_names_the_extra(text_folder, tmp_path, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = command("train", text_folder, "--out", tmp_path / "out", "--steps", "1")
    assert code == 2
    assert err == (
        "Error: reference model: needs torch (allowed: pip install '.[reference-model]')\n"
    )
