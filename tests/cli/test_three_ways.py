"""A field of a run has one meaning by its flag, by ``--set`` and in a file."""

import re
from itertools import product

import click
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.cli.run_options import complete_setting, config_from_options, is_switch, run_options
from eldr_sim.errors import InputError
from eldr_sim.policies.choice import BUILT_IN, DECISION_OF
from eldr_sim.simulator.setup.config.groups import GROUP_OF, RUN_FIELDS
from eldr_sim.simulator.setup.config.option import option_of, words_of
from eldr_sim.simulator.setup.config.pools import Pool
from eldr_sim.simulator.setup.config.run_config import RunConfig, make_config, read_config
from eldr_sim.simulator.setup.config.spellings import PATHS, POOLS, meant, parse_value, spellings

from ..on_each import on_each

#: Texts that fields take or refuse: numbers, times, words, lists, distributions, nothing.
TEXTS = (
    "1", "4", "0", "-1", "0.5", "1e3", "inf", "nan", "10m", "1,2", "auto", "null", "default",
    "a=1,b=2", "4,sd=2", "vllm", "2P2D", "x", "recorded", "true", "no", "H200", "[1, 2]",
    "{a: 1}", "ttft:500,tpot:30", "host:1GB,load=2GB/s", "decode:0@5", "last:100", "exact",
    '{"method": "ngram", "num_speculative_tokens": 2}', "eldr:tau=0.2", "least_loaded", "hpa",
    "", "0.24", "noncached:5", "grace",
)  # fmt: skip


def made(make):
    """Return what a way to give a field leads to: a configuration, or the error's line."""
    try:
        return make()
    except InputError as error:
        return re.sub(r"'(\S+)'", r"\1", str(error))  # a number of a file has no quotes


@click.command()
@run_options()
def command(**options):
    return config_from_options(options)


def by_words(*words):
    return lambda: command.main(list(words), standalone_mode=False)


def by_file(folder, values):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return lambda: make_config(read_config(path))


def flag_of(path, text):
    """Return the words that give a field by its flag; none where it has no flag for a value."""
    field = RUN_FIELDS.get(path)
    if field is None:
        return None
    flag = f"--{path.replace('_', '-')}"
    if is_switch(field):
        switches = {"true": [flag], "no": [f"--no-{flag[2:]}"]}
        return switches.get(text)
    return [f"{flag}={text}"]


def in_file(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def some_texts(path, field, folder):
    """Return texts that the field takes, and texts that it refuses: two and two are enough."""
    taken, refused = [], []
    decision = DECISION_OF.get(path.rpartition(".")[2])
    file = folder / "a.yaml"
    file.write_text("{}")
    for text in dict.fromkeys((*words_of(field), *BUILT_IN.get(decision, ()), *TEXTS, str(file))):
        found = made(lambda text=text: make_config(in_file(path, parse_value(text, path))))
        (taken if isinstance(found, RunConfig) else refused).append(text)
        if len(taken) > 1 and refused:
            break
    return [*taken[:2], *refused[:2]], bool(taken)


@pytest.mark.long
@on_each("path", PATHS)
def test_the_three_ways_give_one_configuration(path, tmp_path):
    """Also where a value is refused: the line is the same."""
    field = RUN_FIELDS[path] if path in RUN_FIELDS else Pool.model_fields[path.partition(".")[2]]
    group = GROUP_OF[path.partition(".")[0]]
    texts, taken = some_texts(path, field, tmp_path)
    assert taken
    for text in texts:
        ways = [by_words("--set", f"{path}={text}"), by_words("--set", f"{group}.{path}={text}")]
        if (words := flag_of(path, text)) is not None:
            ways.append(by_words(*words))
        value = parse_value(text, path)
        ways += [by_file(tmp_path, in_file(spelled, value))
                 for spelled in (path, f"{group}.{path}")]  # fmt: skip
        found = [made(way) for way in ways]
        assert [each for each in found if each != found[0]] == [], text


NUMBERS = [n for n in PATHS if {int, float} & {RUN_FIELDS[n].annotation if n in RUN_FIELDS else 0}]


@given(path=st.sampled_from(NUMBERS), number=st.one_of(st.integers(-2, 10**7), st.floats(-1, 1e6)))
def test_a_number_is_itself_in_a_file(path, number):
    """Not as text, but as YAML and Python have it."""
    typed = made(by_words("--set", f"{path}={number!r}"))
    direct = made(lambda: make_config({path: number}))
    assert typed == direct or isinstance(typed, str) == isinstance(direct, str) is True


def test_what_options_hold_inside_is_set_beside_them():
    got = by_words("--policy", "eldr", "--set", "policy.tau=0.2", "--goodput", "ttft:500",
                   "--set", "goodput.tpot=30", "--set", "decode.gpu=H200", "--set",
                   "decode.max_num_seqs=4", "--speculative-config",
                   '{"method": "ngram", "num_speculative_tokens": 2}', "--set",
                   "speculative_config.num_speculative_tokens=3")()  # fmt: skip
    assert got.policies.policy == "eldr:tau=0.2"
    assert (got.output.goodput.ttft, got.output.goodput.tpot) == (500, 30)
    assert got.cluster.decode == Pool(gpu="H200", max_num_seqs=4)
    assert got.steps.speculative_config.num_speculative_tokens == 3


def test_a_repeated_option_is_repeated_in_set():
    one, two = "decode:0@5", "decode:1@6"
    by_flag = by_words("--fail", one, "--fail", two)()
    assert by_words("--set", f"fail={one}", "--set", f"fail={two}")() == by_flag


@on_each("name", [n for n in PATHS if n in RUN_FIELDS and n != "fail"])
def test_a_field_by_two_ways_at_once_is_refused(name):
    text = (words_of(RUN_FIELDS[name]) or ("1",))[0]
    words = flag_of(name, "true" if is_switch(RUN_FIELDS[name]) else text)
    with pytest.raises(InputError, match="given twice"):
        by_words(*words, "--set", f"{name}={text}")()


@pytest.mark.parametrize("text", ["", "x", "=1", "gpu", " =2"])
def test_a_setting_without_field_or_value_is_one_line(text):
    with pytest.raises(InputError, match=r"^set: .* \(allowed: FIELD=VALUE such as"):
        by_words("--set", text)()


def typos(name):
    """Yield a name with a letter left out, doubled, or two changed over."""
    for i in range(2, len(name) - 1):
        yield name[:i] + name[i + 1 :]
        yield name[:i] + name[i] + name[i:]


@pytest.mark.long
@on_each("name", [name for name in RUN_FIELDS if name not in POOLS])
def test_a_slip_leads_to_the_field(name):
    for slip in typos(name):
        assert slip in spellings() or name in meant(slip), slip


def test_every_spelling_leads_to_its_field():
    for name, field in RUN_FIELDS.items():
        for alias in option_of(name, field).aliases:
            assert meant(alias) == [name]
            assert meant(alias.lstrip("-").replace("-", "_")) == [name]
    for pool, name in product(POOLS, Pool.model_fields):
        assert meant(f"--{pool}-{name.replace('_', '-')}") == [f"{pool}.{name}"]


def test_completion_knows_every_path_and_group():
    context, param = click.Context(command), command.params[0]
    assert {item.value for item in complete_setting(context, param, "")} == {
        f"{path}=" for path in PATHS
    }
    for name, group in GROUP_OF.items():
        if name not in POOLS:
            found = complete_setting(context, param, f"{group}.{name}")
            assert f"{group}.{name}=" in {item.value for item in found}
    for name, field in RUN_FIELDS.items():
        for word in words_of(field):
            found = complete_setting(context, param, f"{name}={word[:2]}")
            assert f"{name}={word}" in {item.value for item in found}


def test_the_reference_finds_every_option(run_cli):
    whole = run_cli("options")[1]
    for path in PATHS:
        shown = f"--set {path}=" if "." in path else f"--{path.replace('_', '-')}"
        assert shown in whole
    for word in ("kv_tier", "--kv-tier", "speculative", "decode.gpu", "engine.max_num_seqs"):
        code, out, _ = run_cli("options", word)
        assert code == 0
        assert out.count("\n") < whole.count("\n") / 3
    assert "unit: tokens; default: 16" in " ".join(run_cli("options", "block_size")[1].split())
    code, _, err = run_cli("options", "no such thing")
    assert (code, err.count("\n")) == (2, 1)
