"""Policies of other packages: the worked example really installs, and broken ones are named."""

import importlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies import plugins, registry
from eldr_sim.policies.base import PolicyContext, RequestInfo, RouterPolicy, Workers, gives_rules
from eldr_sim.policies.choice import FIELDS
from eldr_sim.policies.scaling.base import Target
from eldr_sim.simulator.results import write_result
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config, read_config

from ..paths import ROOT

EXAMPLE = ROOT / "docs" / "example_policy"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example package, installed by pip into a folder of its own, without the network."""
    for tool, oldest in (("pip", 23), ("setuptools", 80)):
        try:
            found = int(version(tool).split(".")[0])
        except PackageNotFoundError:
            found = 0
        if found < oldest:
            pytest.skip(f"building the example needs {tool} {oldest} or later, here is {found}")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "example")
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--disable-pip-version-check",
            "--target",
            str(target),
            str(source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


def context(n_workers=6, seed=0):
    return PolicyContext(n_workers, np.random.default_rng(seed))


def test_the_example_package_is_found_by_name(installed, monkeypatch):
    with pytest.raises(InputError, match="unknown policy 'p3c'"):
        registry.decode_policy("p3c", context())
    monkeypatch.syspath_prepend(str(installed))
    assert "p3c" in registry.names("decode")
    assert "p3c" not in registry.names("prefill")
    policy = registry.decode_policy("p3c", context())
    assert isinstance(policy, RouterPolicy)
    loads = np.array([5, 4, 3, 2, 1, 0])
    picks = [policy.select(RequestInfo(0, 10, 0), Workers.idle(loads)) for _ in range(600)]
    # The best of three of six never takes one of the two most loaded.
    assert set(picks) == {2, 3, 4, 5}
    assert picks.count(5) == pytest.approx(300, abs=60)
    everyone = registry.decode_policy("P3C:choices=9", context())
    assert everyone.select(RequestInfo(0, 1, 0), Workers.idle([3, 2, 1, 0, 2, 3])) == 3
    with pytest.raises(InputError, match=r"policy\.choices: '0'"):
        registry.decode_policy("p3c:choices=0", context())
    assert make_config({"policy": {"name": "p3c", "choices": 2}}).policies.policy == "p3c:choices=2"
    again = registry.decode_policy("p3c", context())
    assert [again.select(RequestInfo(0, 10, 0), Workers.idle(loads)) for _ in range(600)] == picks


@pytest.mark.long
def test_the_page_runs_the_example_package(installed, monkeypatch, run_cli):
    monkeypatch.syspath_prepend(str(installed))
    page = (ROOT / "docs" / "policies.md").read_text()
    block = page.partition("```console\n")[2].partition("```")[0]
    install, *commands = block.splitlines()
    assert install == "pip install ./docs/example_policy"
    assert EXAMPLE == ROOT / "docs" / "example_policy"
    for command in commands:
        code, out, error = run_cli(*command.split()[1:], "--num-requests", "10")
        assert code == 0, error
        assert "p3c" in out or "own_gpu" in command


def test_the_example_package_makes_every_decision_of_a_run(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    own = {
        "policy": "p3c", "prefill_policy": "fewest_tokens", "queue_order": "longest",
        "expert_placement": "striped", "replica_choice": "own_gpu",
        "autoscale": "one_for_eight",
    }  # fmt: skip
    ours = {"replica_choice": "hash"}
    fields = {
        "topology": "2P4D", "num_requests": 20, "output_len": 4, "data_parallel_size": 3,
        "enable_expert_parallel": True, "num_redundant_experts": 121, "request_rate": 200,
        "all2all_backend": "deepep_ll",  # by default every GPU gets all tokens
    }  # fmt: skip
    result = simulate(make_config(fields | own))
    assert own.items() <= result.config["config"].items()
    assert result.summary["completed"] == 20
    for column in ("prefill_worker", "decode_worker"):
        assert len(set(result.requests[column].to_pylist())) > 2
    other = simulate(make_config(fields | own | ours))
    # What goes to another GPU. Dealt out to 3 GPUs, the two copies of an expert (of 128) lie on
    # two of them; to 2 or 4 they would lie on one, and no choice would change what is sent.
    steps = (result.record.decode_group_steps, other.record.decode_group_steps)
    assert steps[0]["pairs"].sum() == steps[1]["pairs"].sum()
    assert steps[0]["inside_bytes"].sum() < 0.7 * steps[1]["inside_bytes"].sum()


ROUTER = "from eldr_sim.policies.base import Needs, RouterPolicy\nclass Policy(RouterPolicy):\n"
SELECTS = " def select(self, r, l): ..."
BROKEN = {
    "imports": ("import nothing_of_that_name", "does not load"),
    "value": ("Policy = 3", "is not a class"),
    "nameless": (ROUTER + " decision = 'decode'\n" + SELECTS, "has no name"),
    "undecided": (
        ROUTER + " name = 'x'\n decision = 'lunch'\n" + SELECTS,
        "decision='lunch', not one of decode, prefill",
    ),
    "other": (
        ROUTER + " name = 'x'\n decision = 'queue'\n" + SELECTS,
        "makes decision 'queue' and is not a QueueOrder",
    ),
    "idle": (ROUTER + " name = 'x'\n decision = 'decode'", "has no method select"),
    "needless": (
        ROUTER + " name = 'x'\n decision = 'decode'\n needs = 3\n" + SELECTS,
        r"has needs=3, not Needs\(\.\.\.\)",
    ),
    "blind": (
        ROUTER + " name = 'x'\n decision = 'decode'\n"
        " needs = Needs(columns=frozenset({'load'}))\n" + SELECTS,
        "needs columns load, not of ",
    ),
    "scored": (
        ROUTER + " name = 'x'\n decision = 'decode'\n needs = Needs(signature=True)\n" + SELECTS,
        "needs signature=True, not of count, prob, logit",
    ),
    "deaf": (
        ROUTER + " name = 'x'\n decision = 'decode'\n def on_complete(self, r, w): ...\n" + SELECTS,
        r"has method on_complete, and needs\.ends is False",
    ),
    "mute": (
        ROUTER + " name = 'x'\n decision = 'prefill'\n needs = Needs(blocks=True)\n" + SELECTS,
        r"has no method on_blocks, and needs\.blocks is True",
    ),
    "usurper": (
        ROUTER + " name = 'jsq'\n decision = 'decode'\n" + SELECTS,
        "takes the built-in name 'jsq'",
    ),
}


def package(folder, module, source, points):
    """Lay out an installed package by hand: a module and its .dist-info."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_is_named_and_leaves_the_built_ins_alone(kind, tmp_path, monkeypatch):
    source, problem = BROKEN[kind]
    module = f"eldr_broken_{kind}"
    package(tmp_path, module, source, {"mine": f"{module}:Policy"})
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=problem) as caught:
        registry.names("decode")
    assert module in str(caught.value)
    assert "'mine'" in str(caught.value)
    assert (
        registry.decode_policy("jsq", context()).select(
            RequestInfo(0, 1, 0), Workers.idle(np.ones(6))
        )
        == 0
    )


def test_two_packages_may_not_share_a_name(tmp_path, monkeypatch):
    source = ROUTER + " name = 'twice'\n decision = 'prefill'\n" + SELECTS
    for module in ("eldr_twin_a", "eldr_twin_b"):
        package(tmp_path, module, source, {"twice": f"{module}:Policy"})
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(InputError, match="offers 'twice', which another package has"):
        registry.names("prefill")


def test_one_package_may_offer_both_decisions(tmp_path, monkeypatch):
    source = (
        "from eldr_sim.policies.base import RouterPolicy\n"
        "class D(RouterPolicy):\n name = 'same'\n decision = 'decode'\n"
        " def __init__(self, c): self.c = c\n def select(self, r, l): return 0\n"
        "class P(D):\n decision = 'prefill'\n"
    )
    points = {"same_d": "eldr_both:D", "same_p": "eldr_both:P"}
    package(tmp_path, "eldr_both", source, points)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert type(registry.decode_policy("same", context())).__name__ == "D"
    assert type(registry.prefill_policy("same", context())).__name__ == "P"


WORKING = {
    "decode": "def select(self, request, workers):\n  return 0",
    "prefill": "def select(self, request, workers):\n  return 0",
    "queue": "def keys(self, requests):\n  return requests.prompt_len",
    "replica": "def choose(self, home, experts, placement, layer, node, prompts):\n"
    "  return slots_of_experts(placement.expert[layer])[experts, 0]",
    "placement": "def place(self, group):\n"
    "  ranks = np.arange(group.n_experts) % group.n_ranks\n"
    "  return Placement.of_ranks(np.tile(ranks, (group.n_layers, 1)), group.n_ranks)",
    "scaling": "def decide(self, fleet):\n  return ()",
}
KIND = {
    "decode": "RouterPolicy",
    "prefill": "RouterPolicy",
    "queue": "QueueOrder",
    "placement": "PlacementPolicy",
    "replica": "ReplicaChoice",
    "scaling": "Autoscaler",
}
MISTAKES = [
    (
        "decode",
        "workers.loads[request.request_id - 999]",
        "select of request 0 raises IndexError: ",
    ),
    ("decode", "99", r"select of request 0 returns 99 \(allowed: the index of a worker, 0 to 1"),
    ("decode", "1.0", r"select of request 0 returns 1\.0 \(allowed"),
    ("prefill", "{}[0]", r"select of request 0 raises KeyError: 0 \(eldr_mine\.py, line 11\)"),
    ("queue", "requests.prompt_len / None", "keys raises TypeError: "),
    ("queue", "[1.0]", r"keys returns \[1\.0\] \(allowed: 5 numbers, one a request\)"),
    ("replica", "1 / 0", "choose in layer 0 raises ZeroDivisionError: division by zero "),
    (
        "replica",
        "experts + 1",
        r"choose in layer 0 returns .* \(allowed: slots of the tokens\' experts, ",
    ),
    (
        "scaling",
        "[fleet.now_s, 1]",
        r"decide at 0\.01 s returns .* \(allowed: Target and Switch of ",
    ),
    ("placement", "None.ranks", "place for engines 0 to 1 raises AttributeError: "),
    ("placement", "None", r"place for engines 0 to 1 returns None \(allowed: a Placement of 128 "),
]


def offer(decision, method, folder, monkeypatch, base=None):
    """Install a package whose policy ``mine`` makes a decision."""
    base = f"({KIND[decision]})" if base is None else base
    source = (
        "import numpy as np\nfrom eldr_sim.policies.base import RouterPolicy\n"
        "from eldr_sim.policies.queue.orders import QueueOrder\n"
        "from eldr_sim.policies.placement.base import Placement, PlacementPolicy\n"
        "from eldr_sim.policies.replicas.base import ReplicaChoice, slots_of_experts\n"
        "from eldr_sim.policies.scaling.base import Autoscaler\n"
        f"class Policy{base}:\n name = 'mine'\n decision = '{decision}'\n {method}\n"
    )
    package(folder, "eldr_mine", source, {"mine": "eldr_mine:Policy"})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "eldr_mine", raising=False)
    importlib.invalidate_caches()
    fields = {"topology": "1P2D", "num_requests": 5, "output_len": 4}
    if decision in ("placement", "replica"):
        fields |= {"topology": "2C", "data_parallel_size": 2, "enable_expert_parallel": True}
    if decision == "replica":
        fields |= {"num_redundant_experts": 32, "expert_placement": "eplb:load=none"}
    return fields | {FIELDS[decision]: "mine:interval=0.01" if decision == "scaling" else "mine"}


@pytest.mark.parametrize("decision", WORKING)
def test_a_policy_of_another_package_makes_each_decision(decision, tmp_path, monkeypatch):
    fields = offer(decision, WORKING[decision], tmp_path, monkeypatch, base="")  # any class will do
    assert simulate(make_config(fields)).summary["completed"] == 5


@pytest.mark.parametrize(("decision", "returned", "message"), MISTAKES)
def test_a_mistake_in_a_policy_is_one_line_that_names_it(
    decision, returned, message, tmp_path, monkeypatch
):
    head, _, _ = WORKING[decision].partition("\n")
    fields = offer(decision, f"{head}\n  return {returned}", tmp_path, monkeypatch)
    with pytest.raises(
        InputError, match=rf"^\w+: 'mine' of package eldr_mine: {message}"
    ) as caught:
        simulate(make_config(fields))
    assert "\n" not in str(caught.value)
    assert (caught.value.__cause__ is None) == ("returns" in message)


_GROUP = SimpleNamespace(n_experts=4, n_layers=1, n_ranks=2)
_EXPERTS = SimpleNamespace(expert=np.array([[0, 1, 2, 3]]))
#: What a policy is asked, by the method, and answers that are good.
ASKED = {
    "select": ((None, SimpleNamespace(loads=[0, 0])), [0, np.int64(1), None]),
    "keys": ((SimpleNamespace(prompt_len=np.arange(2)),), [[1, 0.5], np.ones(2)]),
    "decide": (
        (SimpleNamespace(pools=[SimpleNamespace(name="decode")]),),
        [(), [Target("decode", 0)], [Target("decode", np.int64(2))]],
    ),
    "place": ((_GROUP,), []),
    "update": ((_GROUP,), [None]),
    "choose": ((None, np.array([1, 2]), _EXPERTS, 0), [np.array([1, 2]), [1, 2]]),
}
JUNK = [
    "x", -1, 2, 1.5, float("nan"), object(), [None], [object()], [float("nan"), 1], ["x", "y"],
    [Target("decode", "x")], [Target("decode", 1.5)], [Target("decode", -1)],
    [Target("decode", 1), Target("elsewhere", 1)], np.zeros((2, 2)), SimpleNamespace(n_ranks=2),
]  # fmt: skip


@pytest.mark.parametrize("method", ASKED)
def test_no_answer_but_a_good_one_is_taken(method):
    """And what is none raises nothing by itself, whatever it is."""
    arguments, good = ASKED[method]
    check = plugins._ANSWERS[method]
    assert not any(check(arguments, answer) for answer in good)
    assert all(check(arguments, answer) for answer in JUNK)


def test_what_a_policy_inherits_decides_how_it_is_asked(tmp_path, monkeypatch):
    """A subclass of a policy of ours is asked for rules, unless it selects itself."""
    source = "from eldr_sim.policies.routing.decode import JoinShortestQueuePolicy as J\n"
    source += (
        "class A(J):\n name = 'a'\nclass B(J):\n name = 'b'\n def select(self, r, w): return 0\n"
    )
    package(tmp_path, "eldr_heirs", source, {"a": "eldr_heirs:A", "b": "eldr_heirs:B"})
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert gives_rules(registry.decode_policy("jsq", context()))
    assert gives_rules(registry.decode_policy("a", context()))
    assert not gives_rules(registry.decode_policy("b", context()))


def test_a_heir_of_any_policy_is_one():
    """It has what those above it have, however far above."""
    for decision in FIELDS:
        for name in registry.names(decision):
            heir = registry.find(decision, name)
            for _ in range(2):
                heir = type("Heir", (heir,), {"name": "heir"})
                assert registry._flaw(heir) == "", (decision, name)


def test_a_policy_gets_what_it_declares_and_no_more(tmp_path, monkeypatch):
    source = (
        ROUTER.replace("Policy(Router", "{0}(Router")
        + " name = '{0}'\n decision = 'decode'\n needs = Needs({1})\n"
        " def __init__(self, context): self.context = context\n" + SELECTS + "\n"
    )
    words = {"a": "", "b": "experts=True", "c": "costs=True", "d": "future=True"}
    package(
        tmp_path,
        "eldr_needs",
        "".join(source.format(name, needs) for name, needs in words.items()),
        {name: f"eldr_needs:{name}" for name in words},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    given = {
        "calibration": "experts", "artifact": "experts", "step_times": "costs",
        "prefill_work": "costs", "rank_moe": "costs", "all_to_all": "costs",
        "placements": "costs", "future": "future",
    }  # fmt: skip
    whole = PolicyContext(2, np.random.default_rng(0), **dict.fromkeys(given, len))
    for name, needs in words.items():
        seen = registry.decode_policy(name, whole).context
        assert {key for key in given if vars(seen)[key] is not None} == {
            key for key, need in given.items() if needs.startswith(need)
        }
        assert registry.needs("policy", name).routing == (name in "bd")


def test_the_traceback_of_a_mistake_is_behind_debug(tmp_path, monkeypatch, run_cli):
    package(
        tmp_path,
        "eldr_late",
        ROUTER + " name = 'late'\n decision = 'decode'\n def __init__(self, c): 1 / 0\n"
        " def select(self, r, w): return 0\n",
        {"late": "eldr_late:Policy"},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("eldr_sim.command._tracebacks", False)  # what --debug sets ends here
    words = ["run", "--policy", "late", "--topology", "1P2D", "--num-requests", "5"]
    for debug in ([], ["--debug"]):
        code, _, error = run_cli(*debug, *words)
        assert code == 2
        line = "'late' of package eldr_late: its constructor raises ZeroDivisionError: division"
        assert line in error.splitlines()[-1]
        assert ("Traceback" in error) == bool(debug)


MINE = """
from eldr_sim.policies.choice import Parameters

class Last:
    def select(self, request, workers):
        return len(workers.loads) - 1

class Options(Parameters):
    back: int = 1

class Back(Last):
    decision = "decode"
    Parameters = Options
    def __init__(self, context, parameters):
        self.back = parameters.back
    def select(self, request, workers):
        return len(workers.loads) - self.back

class Short:
    def keys(self, requests):
        return requests.prompt_len

class Empty:
    pass

class Wrong:
    def select(self, request, workers):
        return 1 / 0
"""


def test_classes_of_a_file_are_policies_of_the_decision_that_asks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    fields = {"topology": "2P3D", "request_rate": 20, "duration": 2, "warmup": 0, "output_len": 5}
    config = make_config({
        **fields, "policy": "./mine.py:Last", "prefill_policy": "mine.py:Last",
        "queue_order": "./mine.py:Short",
    })  # fmt: skip
    result = simulate(config)
    served = result.requests.to_pandas()
    assert set(served.decode_worker) == {2}
    assert set(served.prefill_worker) == {1}
    back = config.replace(policy="./mine.py:Back:back=2", prefill_policy="round_robin")
    assert back.policies.policy == "./mine.py:Back:back=2"
    assert (
        make_config({**fields, "policy": "./mine.py:Back:back=1"}).policies.policy
        == "./mine.py:Back"
    )
    assert set(simulate(back).requests.to_pandas().decode_worker) == {1}
    # A result's configuration runs again from any folder.
    write_result(result, tmp_path / "deep" / "out")
    monkeypatch.chdir(tmp_path / "deep")
    kept = json.loads((tmp_path / "deep" / "out" / "config.json").read_text())["config"]
    assert kept["policy"] == "../../mine.py:Last"
    again = make_config(read_config(tmp_path / "deep" / "out" / "config.json"))
    assert simulate(again).requests.equals(result.requests)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("./none.py:Last", "policy: cannot read none.py: No such file"),
        ("./mine.py:None_", "policy: mine.py has no class 'None_' .allowed: Last, Options|Param"),
        ("./mine.py:Empty", "policy: ./mine.py:Empty has no method select"),
        ("./broken.py:Last", "policy: broken.py does not load: SyntaxError"),
        ("./mine.py:Back:front=1", "policy.front: './mine.py:Back' has no such parameter"),
        ("./mine.py:Wrong", r"'./mine.py:Wrong' of mine.py: select of request 0 raises ZeroDiv.*"
         r"mine.py, line \d+"),
    ],
)  # fmt: skip
def test_broken_files_are_one_line(choice, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(InputError, match=said):
        simulate(make_config({"policy": choice, "topology": "1P2D", "num_requests": 3}))
    with pytest.raises(InputError, match="decides 'decode'"):
        make_config({"prefill_policy": "./mine.py:Back"})
