"""Tables of the front end: read, extended, shipped and measured."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.front_end import (
    PARTS,
    FrontEndLatency,
    list_front_ends,
    load_front_end,
)
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata


def make_table(rows, kind="front_end"):
    return LatencyTable(
        TableMetadata(
            kind=kind, gpu="cpu", shape={}, dtype="text", kernel_source="x", framework="x 1",
            provenance="measured", origin="x", device="x",
        ),
        {
            "part": np.array([part for part, _, _ in rows], object),
            "tokens": np.array([tokens for _, tokens, _ in rows]),
            "latency_s": np.array([seconds for _, _, seconds in rows]),
        },
    )  # fmt: skip


ROWS = [("tokenize", 300, 4e-3), ("tokenize", 100, 2e-3), ("event_loop", 100, 1e-3)]
ROWS.append(("http", 100, 5e-4))


def test_curves_are_linear_flat_below_and_go_on_above():
    latency = FrontEndLatency.from_table(make_table(ROWS))
    seconds = latency.time_s("tokenize", [0, 100, 200, 300, 500])
    assert seconds.tolist() == pytest.approx([2e-3, 2e-3, 3e-3, 4e-3, 6e-3])
    assert latency.time_s("http", 9999) == pytest.approx(5e-4)
    assert latency.slower(1.5).slower(2.0).time_s("http", 1) == pytest.approx(15e-4)
    assert latency.slower(2.0).provenance["slowdown"] == "2"


def test_what_is_no_front_end_is_refused(tmp_path):
    with pytest.raises(InputError, match="no rows of 'http'"):
        FrontEndLatency.from_table(make_table(ROWS[:-1]))
    with pytest.raises(InputError, match="no front end"):
        load_front_end(str(tmp_path / "none"))


def test_the_shipped_table_says_what_it_is():
    for name in list_front_ends():
        latency = load_front_end(name.upper())
        assert latency.metadata.provenance == "measured"
        assert "Xeon" in latency.metadata.device
        for part in PARTS:
            assert (np.diff(latency.time_s(part, np.arange(0, 40000, 500))) >= 0).all()
        # A thousand tokens a millisecond is what a tokeniser is known to do at the best.
        assert 0.5e-3 < latency.time_s("tokenize", 1000) < 20e-3
    assert list_front_ends()


class TestMeasured:
    @pytest.fixture
    def tokenizer_file(self, tmp_path):
        tokenizers = pytest.importorskip("tokenizers", reason="needs eldr-sim[frontend]")
        pytest.importorskip("fastapi", reason="needs eldr-sim[frontend]")
        pytest.importorskip("uvicorn", reason="needs eldr-sim[frontend]")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the queue of the server is empty "] * 20, trainer)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path / "tokenizer.json"

    def test_longer_prompts_take_longer_and_the_echo_answers(
        self, tokenizer_file, tmp_path, monkeypatch
    ):
        from eldr_sim.kernel_profiles.profile import front_end

        monkeypatch.setattr(front_end, "_ECHOES", 20)
        text = tmp_path / "text.txt"
        text.write_text("the queue of the server is empty " * 2000)
        table = front_end.measure_front_end(
            tokenizer_file, text=text, name="here", tokens=(16, 4096)
        )
        latency = FrontEndLatency.from_table(table)
        assert table.metadata.device == front_end.cpu_name()
        assert latency.time_s("tokenize", 4000) > 5 * latency.time_s("tokenize", 20)
        assert 1e-5 < latency.time_s("event_loop", 16) < 0.1
        assert 1e-6 <= latency.time_s("http", 16) < 0.1
        table.save(tmp_path / "table.parquet")
        assert load_front_end(str(tmp_path / "table.parquet")).metadata.gpu == "here"

    def test_prompts_differ_and_those_of_a_text_have_the_tokens_that_were_asked_for(
        self, tokenizer_file
    ):
        from eldr_sim.kernel_profiles.profile.front_end import prompts_of
        from eldr_sim.tokenizer import open_tokenizer

        tokenizer = open_tokenizer(tokenizer_file)
        prompts = prompts_of(tokenizer, 200, 5)
        assert len(set(prompts)) == 5
        text = "the queue of the server is empty " * 100
        lengths = [len(tokenizer.encode(p).ids) for p in prompts_of(tokenizer, 200, 5, text)]
        assert all(190 <= length <= 230 for length in lengths)
        with pytest.raises(InputError, match="more than 200"):
            prompts_of(tokenizer, 200, 1, "short")

    def test_a_file_that_is_no_tokenizer_is_one_line(self, run_cli, tmp_path):
        pytest.importorskip("tokenizers", reason="needs eldr-sim[frontend]")
        (tmp_path / "x.json").write_text("{}")
        code, _, err = run_cli(
            "profile", "--frontend", tmp_path / "x.json", "--out", tmp_path / "out"
        )
        assert code == 2
        assert err.startswith("Error: frontend: cannot read")
