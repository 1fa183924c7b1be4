"""Prompts of live loads that are stretches of text."""

import json

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.validation.live.engines.load import domains_of, make_load, read_texts
from eldr_sim.validation.live.live_run import LoadInfo

LENGTHS = {"prompt_len": 7, "output_len": 5, "prompt_range": (4, 30), "output_range": (2, 20)}


def info(n=40):
    return LoadInfo(name="load", request_rate=10.0, burstiness=1.0, lengths="fixed",
                    num_requests=n, seed=3)  # fmt: skip


def test_prompts_are_stretches_of_their_domain():
    texts = {"en": np.arange(100, 400, dtype=np.int32), "fr": np.arange(900, 907, dtype=np.int32)}
    load = make_load(info(), texts, **LENGTHS)
    begins = set()
    for request in load.requests:
        first = request.prompt[0]
        assert request.prompt == list(range(first, first + 7))
        assert set(request.prompt) <= set(texts[request.domain].tolist())
        begins.add((request.domain, first))
    assert ("fr", 900) in begins
    assert len(begins) > 15
    assert load == make_load(info(), texts, **LENGTHS)


def test_a_text_is_longer_than_a_prompt():
    with pytest.raises(InputError, match="texts: en has 6 tokens"):
        make_load(info(), {"en": np.arange(6, dtype=np.int32)}, **LENGTHS)


@pytest.fixture
def model(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({}))
    return folder


def test_texts_are_read_by_the_models_tokenizer(tmp_path, model):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "play.txt").write_text("to be or not to be")
    (texts / "other.txt").write_text("be that")
    assert domains_of(texts) == ["other", "play"]
    found = read_texts(texts, str(model))
    assert {name: ids.tolist() for name, ids in found.items()} == {
        "other": [2, 0],
        "play": [1, 2, 3, 4, 1, 2],
    }
    (texts / "bad.txt").write_bytes(b"\xff\xfe\xff")
    read_texts.cache_clear()
    with pytest.raises(InputError, match=r"texts: bad\.txt"):
        read_texts(texts, str(model))


def test_what_is_missing_is_said(tmp_path, model):
    with pytest.raises(InputError, match=r"texts: .* has no text"):
        domains_of(tmp_path)
    (tmp_path / "en.txt").write_text("to be")
    with pytest.raises(InputError, match=r"model: .*tokenizer\.json is not there"):
        read_texts(tmp_path, str(tmp_path))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--feature", "ngram"], "texts: with --feature, loads make their own prompts"),
        (["--domain-mix", "code=1"], "unknown domain 'code' (allowed: en)"),
    ],
)
def test_the_command_refuses_what_does_not_go_together(run_cli, tmp_path, more, said):
    pytest.importorskip("aiohttp")
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    (texts / "en.txt").write_text("to be")
    code, _, error = run_cli("validate", "vllm", "--out", out, "--texts", str(texts), *more)
    assert code == 2
    assert said in error
    assert error.count("\n") == 1
    assert not out.exists()
