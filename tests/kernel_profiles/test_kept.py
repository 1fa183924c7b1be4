"""What is made from the tables that ship, kept in the cache."""

import os

import numpy as np
import pytest

from eldr_sim import cache
from eldr_sim.kernel_profiles import kept
from eldr_sim.kernel_profiles.kernels.front_end import list_front_ends, load_front_end
from eldr_sim.kernel_profiles.steps import step_time

from ..on_each import on_each

MODELS = "Qwen3-30B-A3B", "Qwen3-8B", "DeepSeek-V3.2", "Kimi-Linear-48B-A3B", "GPT-OSS-20B"
SIZE = {"max_num_seqs": 8, "max_model_len": 4096, "max_num_batched_tokens": 512}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
    kept._sources.cache_clear()
    yield tmp_path / cache.KERNELS
    kept._sources.cache_clear()


def built(model):
    """Build step times as another process would."""
    step_time._parts.cache_clear()
    times = step_time.build_step_time_model(model, "H200", **SIZE)
    step_time._parts.cache_clear()
    tables = [np.asarray(table).tobytes() for table in (*times.cost, *times.unpadded)]
    return tables, {name: repr(value) for name, value in vars(times).items()}


@on_each("model", MODELS)
def test_kept_kernels_give_the_times_of_those_that_are_made(model, home, monkeypatch):
    """Of models with tables, of the nearest shape, dense, with states and sparse attention."""
    made = built(model)
    with monkeypatch.context() as only_kept:
        only_kept.setattr(step_time, "Parts", None)
        assert built(model) == made


def test_damaged_files_and_those_of_other_sources_are_made_again(home, monkeypatch):
    made = built("Qwen3-30B-A3B")
    (path,) = home.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        assert built("Qwen3-30B-A3B") == made
        assert path.read_bytes() == whole
    path.chmod(0o666)
    monkeypatch.setattr(cache, "_warned", False)
    with pytest.warns(match="others may write"):
        assert built("Qwen3-30B-A3B") == made


def test_other_sources_have_kernels_of_their_own(home, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    source = tmp_path / "data" / "table.csv"
    monkeypatch.setattr(kept, "_FOLDER", str(tmp_path / "data"))
    found = []
    for number, text in enumerate(("a", "b", "b")):
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
            os.utime(source, ns=(0, number))
        kept._sources.cache_clear()
        found.append(kept.kept("asked", lambda number=number: number))
    assert found == [0, 1, 1]


def test_a_kept_front_end_is_the_one_that_ships(home, monkeypatch):
    (name, *_) = list_front_ends()
    made = load_front_end(name).time_s("http", [1, 10_000])
    monkeypatch.setattr("eldr_sim.kernel_profiles.kernels.front_end.shipped_tables", None)
    assert (load_front_end(name.upper()).time_s("http", [1, 10_000]) == made).all()
