"""The pages hold: every link leads somewhere, every command line parses, examples run."""

import itertools
import re
import shlex
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import pytest

import eldr_sim
from eldr_sim.cli.compare import varied
from eldr_sim.cli.main import cli
from eldr_sim.cli.run_options import config_from_options
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.models import load_model
from eldr_sim.planning.studies.figures import choose
from eldr_sim.policies.choice import split
from eldr_sim.simulator.setup.config.groups import RUN_FIELDS
from eldr_sim.simulator.setup.config.run_config import RunConfig

from ..on_each import on_each
from ..paths import ROOT
from .documented import ABSENT, FILES, MY_TRACE, NOT_RUN, SHORT, short_form, write_files

DOCS = ROOT / "docs"
#: Lines that `.ci/run` runs, after the install that they stand behind.
ELSEWHERE = {"README.md": [["run", "--policy", "eldr", "--topology", "8P16D"]]}
STUDIES = [*sorted(ROOT.glob("studies/*/*.md")), ROOT / "tests" / "benchmarks" / "README.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *STUDIES]
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.M | re.S)


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page, *languages):
    found = BLOCK.finditer(page.read_text())
    return [textwrap.dedent(block[3]) for block in found if block[2] in languages]


def lines(page):
    """Return the command lines of each block of a page, continued ones as one."""
    return [block.replace("\\\n", " ").splitlines() for block in blocks(page, "sh", "bash")]


def commands(page):
    """Return the words of each ``eldr-sim`` command line of a page, shell variables written out."""
    found = []
    for block in lines(page):
        known = {}
        for line in block:
            for variable, value in known.items():
                line = line.replace(f"${variable}", value)
            if setting := re.fullmatch(r"([A-Z]\w*)=(\S+)", line):
                known[setting[1]] = setting[2]
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            ends = [i for i, word in enumerate(words) if word in ("&&", "|", "&")]
            for before, after in itertools.pairwise([-1, *ends, len(words)]):
                first, *rest = words[before + 1 : after] or [""]
                if Path(first).name == "eldr-sim":
                    found.append(rest)
    return found


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


def parsed(words):
    """Return the command of some words and the values of its options, as click reads them."""
    command, path, rest = cli, [], list(words)
    while isinstance(command, click.Group):
        path.append(rest.pop(0))
        command = command.get_command(click.Context(cli), path[-1])
        assert command is not None, f"no command {' '.join(path)}"
    with pytest.MonkeyPatch.context() as patch:  # the files that it names are not here
        patch.setattr(click.Path, "convert", lambda self, value, *rest: Path(value))
        context = command.make_context(" ".join(path), rest)
    return context.info_name, context.params


def test_pages_are_found():
    assert len(PAGES) > 25
    assert len(COMMANDS) > 70
    assert next(w for _, w in COMMANDS if "--gpus" in w)[:3] == ["plan", "--gpus", "10"]


def test_descriptions_say_that_routing_is_drawn_by_default():
    """Of the package, the command, the module and the site; no recording is replayed unless asked
    for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    for text in (
        project["description"],
        site["site_description"],
        cli.help,
        eldr_sim.__doc__,
        (ROOT / "README.md").read_text(),
    ):
        assert "drawn" in text
        assert "real expert routing" not in text
        assert "real per-token" not in text


def test_the_version_is_described_in_words():
    page = (DOCS / "python.md").read_text()
    assert "| `__version__` | The version of the installed package" in page
    assert str.__doc__.split("\n")[0] not in page


def test_no_page_holds_a_merge_that_was_not_ended():
    marks = re.compile(r"^(<{7} |={7}$|>{7} )", re.M)
    pages = [page for page in [*PAGES, ROOT / "CHANGELOG.md"] if marks.search(page.read_text())]
    assert pages == []


def test_every_link_leads_to_a_file_and_a_heading():
    broken = []
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists():
                broken.append(f"{name(page)}: {link}")
            elif anchor and anchor not in anchors(target):
                broken.append(f"{name(page)}: no heading {link}")
            elif DOCS in page.parents and DOCS not in target.resolve().parents:
                broken.append(f"{name(page)}: {link} is not in the site")
    assert broken == []


def anchors(page):
    """Return a page's anchors: its own, and those that GitHub and Python-Markdown make."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    own = set(re.findall(r'<a id="([^"]+)">', page.read_text()))
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return own | {re.sub(way, "-", heading) for heading in plain for way in (r"\s", r"[-\s]+")}


def test_every_page_is_in_the_site_s_navigation():
    def pages(part):
        if isinstance(part, str):
            return [part]
        values = part.values() if isinstance(part, dict) else part
        return [page for value in values for page in pages(value)]

    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    named = pages(site["nav"])
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_line_parses(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs")  # files that pages ship
    for words in commands(page):
        command, options = parsed(words)
        run = RUN_FIELDS.keys() | {"settings", "config_file"}
        if {"request_rate", "seed", "model"} <= options.keys() and command != "trace synthesize":
            if command == "compare":  # lists of values
                options |= {name: values[0] for name, values in varied((), options).items()}
            given = {key: value for key, value in options.items() if key in run}
            if not Path(str(options["model"])).suffix and options["model"] != "live/model":
                config_from_options(given)
            for policy in [p for text in options.get("policies") or () for p in split(text)]:
                RunConfig(policy=policy)


@on_each("page", PAGES)
def test_every_model_and_gpu_of_a_command_exists(page):
    """Those that are names; files are made by the reader."""
    for words in commands(page):
        command, options = parsed(words)
        models = options.get("models") or ()
        models = models.split(",") if isinstance(models, str) else models
        models = [*str(options.get("model") or "").split(","), *models]
        if not command.startswith("validate "):  # whose models are choices, which click checked
            for model in [str(one) for one in models if one]:
                assert model.startswith(("/", "./")) or "/" in model or load_model(model), words
        gpus = [options.get("gpu"), *str(options.get("gpus") or "").split(",")]
        for gpu in [str(one) for one in gpus if one]:
            assert "/" in gpu or gpu.isdigit() or load_gpu(gpu), words


def spans(page):
    """Return the words of each command that stands in a sentence, without ``eldr-sim``."""
    text = BLOCK.sub("", page.read_text())
    found = []
    for span in re.findall(r"`([^`\n]+)`", text):
        first, *rest = span.split()
        if first == "eldr-sim" or (first in cli.list_commands(click.Context(cli)) and rest):
            found.append(rest if first == "eldr-sim" else [first, *rest])
    return [words for words in found if words and not words[0].isupper()]


@on_each("page", PAGES)
def test_commands_in_sentences_name_commands_and_options_that_exist(page):
    for words in spans(page):
        command, known = cli, set()
        for word in words:
            if word.startswith("--"):
                known |= {each for one in command.params for each in one.opts}
                known |= {each for one in command.params for each in one.secondary_opts}
                assert word.partition("=")[0] in known | {"--help"}, words
            elif isinstance(command, click.Group):
                found = command.get_command(click.Context(cli), word)
                assert found is not None, words
                command = found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_figure_of_reproduce_exists(page, run_cli, monkeypatch):
    """Of blocks and of sentences; no figure is made."""

    def chosen(names, known):
        assert choose(names, known)
        return []

    monkeypatch.setattr("eldr_sim.cli.study.choose", chosen)
    short = [short_form(line.words) or line.words for line in named_needs(page)]
    for words in [*commands(page), *spans(page), *short]:
        if words[0] == "reproduce" and len(words) > 2:
            for option in {"--out", "--log"} & set(words):  # folders and files of the reader
                at = words.index(option)
                words = words[:at] + words[at + 2 :]
            code, _, error = run_cli(*words)
            assert code == 0, (words, error)


# --- Whole, in a quick form ----------------------------------------------------------------------

#: What makes a command quick.
QUICK = {
    "run": ["--duration", "1", "--warmup", "0.5"],
    "compare": ["--duration", "1", "--warmup", "0.5", "--seeds", "2", "--jobs", "1"],
    "what-if": ["--seeds", "2", "--jobs", "1"],
    "explain": [],
    "report": [],
    "sweep": ["--jobs", "1"],
    "policies": [],
    "trace inspect": [],
}
#: Commands of the README that `test_a_page_as_it_stands` alone runs: no option makes them quick.
LONG = {"plan", "trace synthesize", "fit", "reproduce eldr"}


@pytest.mark.long
@pytest.mark.parametrize(
    "page", ["README.md", "docs/questions.md", "docs/explain.md", "docs/faults.md"]
)
def test_examples_run(page, run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    Path("docs").mkdir()
    Path("docs/sweep_eldr_figure_11.yaml").write_text(FILES["sweep.yaml"])
    for words in commands(ROOT / page):
        command, options = parsed(words)
        if command in QUICK:
            more = QUICK[command]
            if options.get("concurrencies"):
                more = ["--num-requests", "20", "--seeds", "2", "--jobs", "1", "--warmup", "0"]
            elif options.get("sessions"):
                more = ["--sessions", "10", "--seeds", "2", "--jobs", "1"]
            elif options.get("autoscale"):
                more = ["--load", "ladder:2,4@5", "--start-up", "1", "--seeds", "2"]
            elif options.get("num_requests"):
                more = ["--num-requests", "20"]
            elif options.get("busiest"):
                more = []
            code, out, err = run_cli(*words, *more)
            assert code == 0, (words, out, err)
        elif page in ("README.md", "docs/questions.md"):
            assert command in LONG or words in [line.words for line in README if line.needs], words


class Line(NamedTuple):
    """A command line of a page, and what it says that it needs besides the install."""

    text: str
    words: list[str]
    needs: list[str]
    minutes: bool


def named_needs(page):
    """Return the lines of a page that are one command of eldr-sim."""
    found = []
    for line in itertools.chain(*lines(page)):
        text, _, comment = line.partition("  #")
        if text.startswith("eldr-sim "):
            said = re.search(r"needs ([^;]*)", comment)
            needs = re.split(r", | and ", said[1].strip().rstrip(")")) if said else []
            minutes = "minutes" in comment
            found.append(Line(text.strip(), shlex.split(text)[1:], needs, minutes))
    return found


README = named_needs(ROOT / "README.md") + named_needs(DOCS / "questions.md")
#: What each extra that is named there installs.
EXTRAS = {
    "[aiconfigurator]": ["aiconfigurator_core"],
    "[capture]": ["torch", "transformers"],
    "[live]": ["aiohttp", "prometheus_client"],
    "[plot]": ["matplotlib", "plotly"],
    "[profile]": ["torch", "triton"],
    "vLLM": ["vllm"],
}


@pytest.mark.parametrize(
    "line", [line for line in README if line.needs], ids=lambda line: line.text
)
def test_readme_says_what_a_line_needs(line, run_cli, tmp_path, monkeypatch):
    """After the README's own install, in a new folder, it is one line that names it."""
    monkeypatch.chdir(tmp_path)
    for need in line.needs:
        for module in EXTRAS.get(need, []):
            monkeypatch.setitem(sys.modules, module, None)
    code, _, error = run_cli(*line.words)
    assert code == 2
    last = error.splitlines()[-1]
    assert last.startswith("Error: ")
    assert any(need in last for need in line.needs), last


def written(words):
    """Return the folders and files that a command writes."""
    _, options = parsed(words)
    return [str(options[key]) for key in ("out", "report", "freeze") if options.get(key)]


@on_each("page", PAGES)
def test_a_line_names_the_files_that_it_needs(page):
    """Each is in the checkout, made by a line before, or named behind ``needs``."""
    made = []
    for line in named_needs(page):
        out = written(line.words)
        for word in set(line.words) - set(out):
            is_file = "/" in word.replace("B/s", "") or Path(word).suffix in (
                ".csv",
                ".json",
                ".jsonl",
                ".npz",
                ".yaml",
            )
            known = [*made, *line.needs, *(f"./{need}" for need in line.needs)]
            known += [word] if "://" in word or (ROOT / word).exists() else []
            if is_file:
                assert any(word == one or word.startswith(f"{one}/") for one in known), line.text
        made += out


#: Commands that serve until they are stopped.
STAYS = ("explore", "router", "serve")


def here(need):
    """Return whether an extra is installed."""
    return need in EXTRAS and all(find_spec(module) for module in EXTRAS[need])


def not_run(page):
    """Return the lines of a page that nothing here can run, and those that read what they write."""
    missing, found = [], []
    for line in named_needs(page):
        reads = any(word.startswith(one) for word in line.words for one in missing)
        absent = any(need in ABSENT and not here(need) for need in line.needs)
        if reads or (absent and short_form(line.words) is None):
            missing += written(line.words)
            found.append(line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_line_is_run_or_listed(page):
    """What a line needs is installed, brought by the tests, made by a line before it, or listed."""
    listed, made = NOT_RUN.get(name(page), []), ["my-trace", "new.csv", *FILES]
    unrun = [" ".join(line.words) for line in not_run(page)]
    for text in unrun:
        assert any(text.startswith(one) for one in listed), f"no test runs {text}"
    if not any(here(need) for need in ABSENT):  # nothing is listed that runs
        assert len(unrun) == len(listed)
    for line in named_needs(page):
        short = short_form(line.words)
        if " ".join(line.words) not in unrun:
            parsed(short or line.words)
            assert short or not line.minutes, f"no short form of {line.text}"
            known = [need for need in line.needs if need in EXTRAS or need in made]
            assert short or known == line.needs, f"no sample for {line.text}"
        made += written(line.words)
    alone = [line.words for line in named_needs(page)]
    assert [words for words in commands(page) if words not in alone] == ELSEWHERE.get(
        name(page), []
    )


def test_every_short_form_is_used():
    texts = [f"{' '.join(line.words)} " for page in PAGES for line in named_needs(page)]
    assert [one for one in SHORT if not any(text.startswith(one) for text in texts)] == []


def serves(words, folder):
    """Start a command that serves, until it says where, and end it."""
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if "http://" in line and " is down" not in line:
                break
        process.terminate()
        said += process.stdout
        return process.wait(60), "".join(said)
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_as_it_stands(page, tmp_path):
    """Every line, in order, in a folder with the checkout's files and small ones of a reader; lines
    of minutes in their short form; prints the times."""
    for folder in ("docs", "tests", "studies"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    write_files(tmp_path)
    program = str(Path(sys.executable).with_name("eldr-sim"))
    chosen = [line for line in named_needs(page) if line not in not_run(page)]
    failed = []
    if any("my-trace" in line.words for line in chosen):
        subprocess.run([program, *MY_TRACE], cwd=tmp_path, check=True, capture_output=True)
    for line in chosen:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        words = [program, *(short_form(line.words, port) or line.words)]
        command = parsed(words[1:])[0]
        if command != "validate published":  # which continues; others are alternatives
            for out in written(line.words):
                shutil.rmtree(tmp_path / out, ignore_errors=True)
        if "--compare" in words:
            write_files(tmp_path, measured=True)
        begun = time.monotonic()
        if command in STAYS:
            code, said = serves(words, tmp_path)
        else:
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
            code, said = done.returncode, done.stderr
        print(f"{time.monotonic() - begun:6.1f} s  {' '.join(words[1:])}", flush=True)
        if code not in (0, 143 if command in STAYS else 0) or "Traceback" in said:
            failed.append((line.text, said[-2000:]))
    assert failed == []


@pytest.mark.parametrize(
    "page",
    ["docs/python.md", "docs/engines.md", pytest.param("docs/planning.md", marks=pytest.mark.slow)],
)
def test_python_examples_run(page, capsys, tmp_path, monkeypatch):
    """As they stand, but for shorter runs."""

    def quick(function):
        def shorter(*given, **more):
            less = {} if "num_requests" in more else {"duration": 2, "warmup": 1}
            return function(*given, **more | less)

        return shorter

    monkeypatch.chdir(tmp_path)
    for function in ("run", "plan"):
        whole = getattr(eldr_sim, function)
        monkeypatch.setattr(eldr_sim, function, quick(whole), raising=False)
    for block in blocks(ROOT / page, "python"):
        if "Simulation(" in block:  # tests/simulator/test_simulation.py runs it
            continue
        exec(compile(block, page, "exec"), {})
    assert capsys.readouterr().out
