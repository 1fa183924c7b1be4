"""A part that is priced by arithmetic says so: its share of a step, and a command that helps."""

import json
import re
import shlex
import time
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import numpy as np
import pandas as pd
import pytest

from eldr_sim.cli.main import cli
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import list_gpus, load_gpu
from eldr_sim.kernel_profiles.models import list_models, load_model
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.sources import aiconfigurator_import, on_demand
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.kernel_profiles.tables import providers
from eldr_sim.kernel_profiles.tables.library import Engine
from eldr_sim.simulator.setup import engine_specs
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from studies.silicon.roofline_shares import on_fewest_gpus, without_table

from ..on_each import on_each

GPUS = list_gpus()
#: Every third model, each on the next GPU.
PAIRS = [(name, GPUS[n % len(GPUS)]) for n, name in enumerate(list_models()[::3])]
ALL = [(name, gpu) for name in list_models() for gpu in GPUS if (name, gpu) not in PAIRS]


def _check(model, gpu):
    built = on_fewest_gpus(model, gpu, max_num_seqs=16, max_model_len=4096)
    if built is None:
        pytest.skip("fits no two nodes")
    lines = without_table(built)
    # Every part whose label is roofline for want of a table is named in a warning.
    assert [line.split(":")[0] for line in lines] == list(built.missing)
    for line in lines:
        found = re.search(
            r": (\d+)% of a decode step .* To do better: (.*?)( on that|, then)", line
        )
        assert found, line
        assert 0 <= int(found[1]) <= 100
        assert gpu in line
        _parses(found[2])
        assert "eldr-sim profile " in line  # all that can be imported of these models ships


def _parses(text):
    _, *words = shlex.split(text)
    command, context = cli, click.Context(cli)
    while isinstance(command, click.Group):
        command, words = command.get_command(context, words[0]), words[1:]
        assert command is not None, text
    command.make_context(command.name, words)


@pytest.mark.long
@on_each("model, gpu", PAIRS)
def test_a_warning_names_share_and_command(model, gpu):
    _check(model, gpu)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu"), ALL)
def test_all_models_on_all_gpus(model, gpu):
    _check(model, gpu)


@pytest.fixture
def unknown_model(tmp_path):
    """A configuration of no model that is known: nothing of its experts and attention ships."""
    path = tmp_path / "my model" / "config.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps({
            "model_type": "qwen3_moe", "hidden_size": 1536, "num_hidden_layers": 10,
            "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 640,
            "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 8192,
            "torch_dtype": "bfloat16", "norm_topk_prob": True,
        })
    )  # fmt: skip
    return path


def _step_times(model, gpu):
    engine_specs._step_time.cache_clear()
    fields = {"model": str(model), "gpu": gpu, "topology": "1C", "max_model_len": 1024}
    return prepare(make_config(fields)).spec.pools[0].engine.step_time


@pytest.mark.parametrize(
    ("gpu", "measured"), [("H100", "H100"), ("H20", "H100"), ("MI300X", ""), ("L4", "L40S")]
)
def test_a_model_that_is_not_known_may_be_imported(unknown_model, gpu, measured):
    built = build_step_time_model(
        load_model(unknown_model), gpu, max_num_seqs=16, max_model_len=1024,
        max_num_batched_tokens=64, named=str(unknown_model),
    )  # fmt: skip
    lines = [line for line in built.warnings if "To do better" in line]
    for line in lines:
        command = re.search(r"To do better: (.*?)( on that|, then)", line)[1]
        _parses(command)
        assert str(unknown_model) in shlex.split(command)
        assert command.startswith(
            f"eldr-sim tables import --gpu {measured} " if measured else "eldr-sim profile "
        )
    searched = build_step_time_model(
        load_model(unknown_model), gpu, max_num_seqs=16, max_model_len=1024,
        max_num_batched_tokens=64, import_helps=False,
    )  # fmt: skip
    assert not any("tables import" in line for line in searched.warnings)


def _registered():
    """The entry points that the package declares, installed anew or not."""
    declared = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
    return [EntryPoint(name, at, providers.GROUP) for name, at in declared[providers.GROUP].items()]


@pytest.fixture
def _as_declared(monkeypatch):
    monkeypatch.setattr(providers, "entry_points", lambda group: _registered())


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of tables that has SGLang's MoE rows of the model on an H100, and no more."""
    site = tmp_path / "site"
    version = f"9.9.{time.time_ns()}"  # nothing of it is in the cache
    info = site / f"aisimulate-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: aisimulate\nVersion: {version}\n")
    folder = site / "aisimulate_core" / "systems/data/h100_sxm/moe/sglang/0.5.14"
    folder.mkdir(parents=True)
    (site / "aisimulate_core" / "__init__.py").write_text("")
    rows = [
        {"device": "x", "kernel_source": "triton", "moe_dtype": "bfloat16", "hidden_size": 1536,
         "inter_size": 640, "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1,
         "distribution": "balanced", "num_tokens": int(n), "latency": 5.0 + n / 1e3}
        for n in 2 ** np.arange(12)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "moe_perf.parquet")
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.usefixtures("_as_declared", "package")
def test_what_a_package_has_is_imported_once_into_the_cache(unknown_model, monkeypatch):
    for _ in range(2):
        built = _step_times(unknown_model, "H100")
        moe = built.provenance["moe"]
        assert (moe["label"], moe["framework"]) == ("imported", "sglang 0.5.14")
        assert "moe" not in built.missing
        assert not any("tables import" in line for line in built.warnings)  # it was searched
        monkeypatch.setattr(aiconfigurator_import, "best_tables", None)  # read from the cache
    monkeypatch.setattr(on_demand, "_IMPORTER", ("kernel_profiles.sources.packages",))  # another
    with pytest.raises(TypeError):  # it is imported anew
        _step_times(unknown_model, "H100")


@pytest.mark.usefixtures("_as_declared")
def test_a_provider_without_its_package_offers_nothing(monkeypatch, unknown_model):
    from eldr_sim.kernel_profiles.sources import packages

    monkeypatch.setattr(packages, "PACKAGES", {})
    of = load_gpu("H100"), load_model(unknown_model), Parallelism(1), Engine()
    assert providers.provided_tables(*of, ["moe"]) is None


def test_a_provider_that_does_not_load_is_named(monkeypatch, unknown_model):
    broken = EntryPoint("mine", "no_such_module:tables", providers.GROUP)
    monkeypatch.setattr(providers, "entry_points", lambda group: [broken])
    of = load_gpu("H100"), load_model(unknown_model), Parallelism(1), Engine()
    with pytest.raises(InputError, match="'mine' does not load"):
        providers.provided_tables(*of, [])


@pytest.mark.usefixtures("_as_declared", "package")
@pytest.mark.parametrize("missing", [["moe", "gemm"], ["collectives"], []])
def test_parts_that_have_tables_keep_them(unknown_model, missing):
    """An import for want of one part replaces no other part's tables."""
    of = load_gpu("H100"), load_model(unknown_model), Parallelism(1), Engine("sglang")
    offered = providers.provided_tables(*of, missing)
    assert {table.metadata.kind for table in offered} == {"moe"} & set(missing)
