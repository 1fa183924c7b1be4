"""The shell completes names, and files where files may be given, without the compiler."""

import json
import os
import subprocess
import sys

import pytest

from eldr_sim.kernel_profiles.gpus import list_gpus
from eldr_sim.kernel_profiles.models import list_models
from eldr_sim.policies import registry
from eldr_sim.policies.choice import BUILT_IN
from eldr_sim.simulator.setup.config.run_config import WORKLOADS
from eldr_sim.traces.requests.texts import NAMED_WORKLOADS
from eldr_sim.traces.routing.format import builtin_traces

from ..on_each import on_each

# click asks a program to complete by these variables; COMP_CWORD is the word to complete. One
# process answers all: what one line imports is there for the next ones, and none may import these.
SCRIPT = """
import contextlib, io, json, os, sys
from eldr_sim.cli.main import main

def complete(words):
    os.environ |= {"COMP_WORDS": " ".join(["eldr-sim", *words]), "COMP_CWORD": str(len(words))}
    out = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    found = {"numba", "scipy", "pandas", "matplotlib"} & set(sys.modules)
    assert not found, (words, found)
    return [line.split(",", 1) for line in out.buffer.getvalue().decode().splitlines()]

lines = json.load(sys.stdin)
sys.argv = ["eldr-sim"]
print(json.dumps([complete(words) for words in lines]))
"""


@pytest.fixture(scope="module")
def complete():
    """A function that returns the (type, value) of what is offered for the last word."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"_ELDR_SIM_COMPLETE": "bash_complete"},
        input=json.dumps(LINES),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip(map(tuple, LINES), json.loads(done.stdout), strict=True))
    return lambda *words: [tuple(line) for line in found[words]]


def plain(names):
    return [("plain", name) for name in names]


OFFERED = [
    (["wh"], plain(["what-if"])),
    (["run", "--policy", ""], plain(BUILT_IN["decode"])),
    (["run", "--policy", "MARG"], plain(["marginal_cost"])),
    (["run", "--prefill-policy", "p"], plain(["preble", "prefix_hash"])),
    (["run", "--kv-transfer", "o"], plain(["observed"])),
    (["run", "--model", "mixtral-8x7"], [("file", "mixtral-8x7"), ("plain", "Mixtral-8x7B")]),
    (["run", "--set", "decode.gpu=b2"], [("plain", "decode.gpu=B200")]),
    (["run", "--trace", "r"], [("dir", "r"), ("plain", "reference-moe")]),
    (["run", "--workload", "t"], [("file", "t"), ("plain", "task"), ("plain", "trace")]),
    (["run", "--num-pro"], plain(["--num-prompts"])),
    (["compare", "--policy", "jsq,el"], plain(["jsq,eldr"])),
    (["plan", "--gpu", "h100,mi300"], [("file", "h100,mi300"), ("plain", "h100,MI300X")]),
    (["fit", "--workload", "l"], [("file", "l"), ("plain", "language")]),
    (["trace", "inspect", "ref"], [("dir", "ref"), ("plain", "reference-moe")]),
    (["gpus", "--model", "phi"], [("file", "phi"), ("plain", "Phi-3.5-MoE")]),
    (["profile", "--model", "x,phi"], [("file", "x,phi"), ("plain", "x,Phi-3.5-MoE")]),
    (["what-if", "--tog"], plain(["--together"])),
]
NAMES = [["run", f"--{option}", ""] for option in ("model", "gpu", "trace")]
LINES = [words for words, _ in OFFERED] + NAMES


@on_each("words, offered", OFFERED)
def test_what_is_offered(complete, words, offered):
    assert complete(*words) == offered


def test_no_name_is_forgotten(complete):
    assert {name for _, name in complete("run", "--model", "")} == {"", *list_models()}
    assert {name for _, name in complete("run", "--gpu", "")} == {"", *list_gpus()}
    assert {name for _, name in complete("run", "--trace", "")} == {"", *builtin_traces()}
    assert set(WORKLOADS) == set(NAMED_WORKLOADS)
    for decision in registry.DECISIONS:
        for name in BUILT_IN[decision]:
            found = registry.find(decision, name)
            assert (found.name, found.decision) == (name, decision)
            assert registry._flaw(found) == ""
