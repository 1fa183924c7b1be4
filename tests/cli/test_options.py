"""Options as users of vLLM know them, and a help that fits on screens."""

import json
import re
import sys
from pathlib import Path
from typing import get_args

import click
import pyarrow.parquet as pq
import pytest

from eldr_sim.cli import synthetic
from eldr_sim.cli.decorators import OUTPUT, OWN
from eldr_sim.cli.main import cli
from eldr_sim.cli.run_options import TITLES, config_from_options, run_options
from eldr_sim.errors import InputError
from eldr_sim.policies.choice import BUILT_IN
from eldr_sim.simulator.setup.config.groups import GROUPS as CONFIG_GROUPS
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import ServiceLevel
from eldr_sim.traces.routing.imports import importers

from ..on_each import on_each

#: Commands that take the options of a run.
HELPED = "run", "compare", "plan", "explore", "serve", "validate bench"


def parse(*arguments):
    """Return the configuration that a command's options give."""

    @click.command()
    @run_options()
    def command(**options):
        return config_from_options(options)

    return command.main([str(argument) for argument in arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("alias", "field"),
    [
        ("--num-prompts", "num_requests"),
        ("--num-requests", "num_requests"),
        ("-tp", "tensor_parallel_size"),
        ("--tp", "tensor_parallel_size"),
        ("--tensor-parallel-size", "tensor_parallel_size"),
        ("--max-model-len", "max_model_len"),
    ],
)
def test_spellings_of_vllm(alias, field):
    assert parse(alias, 4).value(field) == 4


@pytest.mark.parametrize(
    "command", ["plan", "profile", "tables import", "trace capture vllm", "validate vllm"]
)
def test_tp_is_known_wherever_its_long_form_is(command):
    context = click.Context(cli)
    found = cli
    for word in command.split():
        found = found.get_command(context, word)
    spellings = [set(param.opts) for param in found.params]
    assert {"--tensor-parallel-size", "-tp", "--tp"} in spellings


@pytest.mark.parametrize(
    "arguments",
    [
        ["--goodput", "ttft:500,tpot:30"],
        ["--goodput", "ttft:500", "--goodput", "tpot:30"],
        ["--goodput", " ttft:500 , tpot:30 "],
    ],
)
def test_goodput_takes_one_word_or_several(arguments):
    assert parse(*arguments).output.goodput == ServiceLevel(ttft=500, tpot=30)


@on_each("command, field", [("run --goodput", "goodput"), ("plan --request-rate 9 --slo", "slo")])
@on_each("bounds", ["ttft", "ttft:1,ttft:2", "ttft:x", "itl:5", "ttft:-1"])
def test_a_bad_bound_is_one_line(run_cli, command, field, bounds):
    code, _, err = run_cli(*command.split(), bounds)
    assert code == 2
    assert re.fullmatch(rf"Error: {field}: .*\n", err)


@pytest.mark.parametrize("words", HELPED)
def test_the_help_shows_at_most_forty_options(words, run_cli):
    """Those that people use, in the order of the groups; the rest is a search away."""
    code, text, _ = run_cli(*words.split(), "--help")
    shown = re.findall(r"^  (-.*)", text, re.MULTILINE)
    assert code == 0
    assert 20 <= len(shown) <= 40
    titles = re.findall(r"^([A-Z][\w ]*):$", text, re.MULTILINE)
    order = dict.fromkeys((OWN, *TITLES.values(), OUTPUT))
    assert titles == [title for title in order if title in titles]
    for option in ("--config", "--set", "--help"):
        assert any(option in line for line in shown)
    assert "eldr-sim options" in text
    assert run_cli(*words.split(), "--help-all")[1].count("\n") == 1


def test_the_help_names_the_policies(run_cli):
    _, out, _ = run_cli("run", "--help")
    assert [name for name in (*BUILT_IN["decode"], *BUILT_IN["prefill"]) if name not in out] == []


def test_words_of_a_field_are_its_metavar(run_cli):
    _, out, _ = run_cli("options", "kv-transfer")
    words = get_args(RUN_FIELDS["kv_transfer"].annotation)
    assert f"--kv-transfer {'|'.join(words)}" in out


def test_a_domain_mix_is_one_word_of_names_and_weights():
    config = parse("--domain-mix", "code=2, math=0.5", "--domain-mix-end", "zh=1")
    assert config.routing.domain_mix == {"code": 2.0, "math": 0.5}
    assert config.routing.domain_mix_end == {"zh": 1.0}
    assert config == config.replace(domain_mix="code=2,math=0.5")


@pytest.mark.parametrize("text", ["code", "code=", "=1", "code=x", "code=nan", "code=1,code=2"])
def test_a_bad_domain_mix_is_one_line(run_cli, text):
    code, _, err = run_cli("run", "--domain-mix", text)
    assert code == 2
    assert re.fullmatch(r"Error: domain_mix: .*NAME=WEIGHT.*\n", err)


def test_requests_have_the_domains_of_a_trace_by_weight(run_cli, tmp_path):
    out = tmp_path / "result"
    code, _, err = run_cli(
        "run", "--workload", "language", "--domain-mix", "legal=1,zh=3", "--num-requests", 200,
        "--topology", "1P2D", "--output-len", 2, "--out", out,
    )  # fmt: skip
    assert code == 0, err
    domains = pq.read_table(out / "requests.parquet")["domain"].to_pylist()
    assert set(domains) == {"legal", "zh"}
    assert abs(domains.count("zh") - 150) < 4 * (200 * 0.75 * 0.25) ** 0.5


def test_the_schema_has_every_field_and_group(run_cli):
    code, out, _ = run_cli("schema")
    document = json.loads(out)
    fields = document["properties"]
    assert code == 0
    assert set(fields) == set(RUN_FIELDS) | set(CONFIG_GROUPS)
    assert document["additionalProperties"] is False
    assert fields["policy"]["anyOf"][1]["required"] == ["name"]
    for title, group in CONFIG_GROUPS.items():
        whole = fields[title].get("anyOf", [fields[title]])[-1]
        assert set(whole["properties"]) == set(group.model_fields)


@pytest.mark.parametrize(
    ("words", "field", "package"),
    [
        ("run --num-requests 1 --out out --plot", "plot", "matplotlib"),
        ("plan --slo ttft:500 --request-rate 9 --out out --plot", "plot", "matplotlib"),
        ("trace inspect reference-moe --out out --plot", "plot", "matplotlib"),
        ("fit --decoders 2 --out out --report report", "plot", "matplotlib"),
        ("reproduce metro --quick --out out", "plot", "matplotlib"),
        ("report out", "report", "plotly"),
    ],
)
def test_pictures_that_cannot_be_drawn_are_said_first(
    words, field, package, run_cli, tmp_path, monkeypatch
):
    """One line with what to install, before anything runs; the install has neither package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    code, out, error = run_cli(*words.split())
    said = f"Error: {field}: {package} is not installed (allowed: pip install 'eldr-sim[plot]')"
    assert (code, out, error.splitlines()[-1]) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


def commands(group=cli, above=()):
    """Yield every command with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from commands(found, (*above, name))
        else:
            yield (*above, name), found


WRITTEN = [
    (" ".join(words), param.opts[0])
    for words, command in commands()
    for param in command.params
    if param.opts[0] in ("--out", "--report", "--freeze")
]


@on_each("named", WRITTEN)
def test_what_cannot_be_written_is_refused_before_anything_runs(named):
    words, option = named
    found = {" ".join(each): command for each, command in commands()}[words]
    param = next(param for param in found.params if option in param.opts)
    out = Path("/dev/null/x")
    with pytest.raises(InputError, match=f"{param.name}: cannot write {out}: Not a directory"):
        param.callback(click.Context(found), param, out)


def test_existing_traces_are_kept_before_anything_is_drawn(run_cli, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_preset", lambda *_: pytest.fail("drawn"))
    monkeypatch.setattr(importers, "detect_format", lambda *_: pytest.fail("read"))
    about = ("--model", "m", "--captured-by", "a", "--source-data", "b", "--out", tmp_path)
    for words in (
        ("synthesize", "--preset", "Mixtral-8x7B", "--out", tmp_path),
        ("import", "x.npz", *about),
    ):
        code, _, error = run_cli("trace", *words)
        assert (code, "exists (allowed: a new folder, or --force)" in error) == (2, True), error
