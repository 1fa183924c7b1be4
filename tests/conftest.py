"""What several rooms test with; each room's own fixtures are in its folder.

Small synthetic models, workloads and clusters, so that the simulator is tested without tables.
Their fixtures are factories of session scope: hypothesis may call them many times within a test.
"""

import gc
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

# Without bytecode every process of the suite compiles all that it imports.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# Threads of so small products cost more than they save, most of all on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What a shell starts in the background ignores Ctrl-C, which some tests are about.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
from hypothesis import settings

from .paths import ROOT, SHARED

# The suite has a cache of its own, which lasts: kernels are compiled where it is first imported.
os.environ["ELDR_SIM_CACHE"] = str(ROOT / ".pytest_cache" / "eldr-sim")
os.environ.pop("ELDR_SIM_CACHE_SIZE", None)

from eldr_sim.cli.main import main
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.policies import registry
from eldr_sim.policies.base import PolicyContext
from eldr_sim.simulator.control import compiled_cluster as cluster_module
from eldr_sim.simulator.control.compiled_cluster import CompiledCluster
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.plane import loop
from eldr_sim.simulator.setup import run_routing
from eldr_sim.simulator.setup.cluster_spec import ClusterSpec, EngineSpec, make_pools
from eldr_sim.simulator.setup.config.groups import EngineConfig
from eldr_sim.simulator.setup.replay import Replay
from eldr_sim.simulator.setup.transfer import TransferModel
from eldr_sim.traces.routing import format
from eldr_sim.traces.routing.format import open_trace
from eldr_sim.traces.routing.imports.importers import import_trace
from eldr_sim.traces.routing.manifest import BUILTIN
from eldr_sim.traces.routing.synthetic.drawn import drawn_trace
from eldr_sim.traces.workload import Workload

from .random_rows import random_prompts, random_rows

# The same examples on every run and every machine, however slow; look for new and more ones with
# ``pytest --hypothesis-profile explore``.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=400)
settings.load_profile("default")

#: Where two processes run the suite, each of them half of it (``--dist worksteal``), the second one
#: begins with rooms that compile little, while the first one compiles what both need.
ORDER = {"house": 1, "test_docs": 2, "kernel_profiles": 3, "simulator": 4}


def pytest_collection_modifyitems(items):
    def place(item):
        room = item.path.relative_to(ROOT / "tests").parts[0]
        return ORDER.get(item.path.stem, ORDER.get(room, 0))

    items.sort(key=place)


class Hang(BaseException):
    """A test does not end; not an `Exception`, which hypothesis would try to reproduce."""


class Watch:
    """Raises `Hang` in a test that waits for a minute (for five, where it has child processes), or
    computes for two: a busy machine makes computing slow, and waiting no longer."""

    EVERY_S, LEAST, WAITS_S, WITH_CHILDREN_S, COMPUTES_S = 5.0, 0.01, 60.0, 300.0, 300.0

    def __init__(self):
        self.begin = self.used = sum(os.times()[:4])
        self.since_s = time.monotonic()

    def __call__(self, _number, _frame):
        used, now_s = sum(os.times()[:4]), time.monotonic()
        if used - self.begin > self.COMPUTES_S:
            raise Hang(f"it has computed for {self.COMPUTES_S:.0f} s")
        waits_s = now_s - self.since_s
        if used - self.used > self.LEAST * max(waits_s, self.EVERY_S):
            self.used, self.since_s = used, now_s
        elif waits_s > (self.WITH_CHILDREN_S if has_children() else self.WAITS_S):
            raise Hang(f"it has waited for {waits_s:.0f} s")


def has_children():
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that hangs. The alarm repeats: an event loop may swallow the first one."""
    if not hasattr(os, "waitid") or item.get_closest_marker("slow"):
        return (yield)
    before = signal.signal(signal.SIGALRM, Watch())
    signal.setitimer(signal.ITIMER_REAL, Watch.EVERY_S, Watch.EVERY_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_addoption(parser):
    parser.addoption(
        "--cases", type=int, default=1, help="times the usual number of cases of generators"
    )


@pytest.fixture
def n_cases(request, record_property):
    """Return how many cases a generator tries; the summary of the tests prints it."""

    def counted(usual, fixed=False):
        n = usual if fixed else usual * request.config.getoption("--cases")
        record_property("cases", n)
        return n

    return counted


def pytest_terminal_summary(terminalreporter):
    """Print the generators' cases, by test."""
    counts = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        name = report.nodeid.partition("[")[0]
        own = [n for kind, n in report.user_properties if kind == "cases"]
        if own and report.when == "call":
            counts[name] = counts.get(name, 0) + sum(own)
    if counts:
        terminalreporter.section(f"{sum(counts.values()):,} cases of generators")
        for name, n in sorted(counts.items()):
            terminalreporter.line(f"{n:>7,}  {name}")


def pytest_collection_finish():
    """Thousands of tests stay until the end: the collector need not look at them, nor so often."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


#: A transfer that takes no time: set-up and posting cost nothing, the link is never a limit.
FREE_TRANSFER = TransferModel(0.0, 0.0, 1e30, "test")


@pytest.fixture(scope="session", autouse=True)
def embedded_routing():
    """Replay the embedded trace where a run of this process names none; see `drawn_routing`.

    Runs in other processes draw theirs, unless they name a trace.
    """
    embedded = open_trace("reference-moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_routing, "drawn_trace", lambda model, shape, domains, band: embedded)
        yield


@pytest.fixture(scope="session", autouse=True)
def embedded_ids():
    """Unpack the expert ids of an embedded trace once, a second of each test that reads them."""
    unpacked = cache(format.load_ids)

    def load_ids(path, encoding):
        load = unpacked if BUILTIN in path.parents else unpacked.__wrapped__
        return load(path, encoding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format, "load_ids", load_ids)
        yield


@pytest.fixture
def drawn_routing(monkeypatch):
    """Draw the routing of runs that name none: where the default is the subject."""
    monkeypatch.setattr(run_routing, "drawn_trace", drawn_trace)
    run_routing._drawn.cache_clear()
    yield
    run_routing._drawn.cache_clear()


@dataclass
class FakeStepTime:
    """What the simulator reads of a ``StepTimeModel``: the tables that a test has made up."""

    cost: StepCost
    n_experts: int

    @property
    def n_moe_layers(self):
        return self.cost.n_moe_layers


@pytest.fixture(scope="session")
def make_step_time():
    """Step times: all tables random, or ``constant`` seconds a step that decodes.

    With ``constant`` nothing but the number of tokens counts. Computing ``n`` tokens of contexts
    takes ``prefill = (base, slope)``: ``base + slope * n`` seconds, on a prefill worker as a step
    of its own, on a decode worker (what preemption lost) in addition to ``constant``. A step of a
    co-located worker that holds prompts takes ``base + slope * n`` for its ``n`` tokens, the
    decoded ones among them. Exact in binary where base, slope and ``constant`` are, with one or
    two layers.

    The tables end at ``max_num_seqs`` sequences, ``max_tokens`` tokens a step and ``max_context``
    tokens a sequence.
    """

    def make(
        max_num_seqs=8,
        n_layers=2,
        n_experts=70,
        *,
        seed=0,
        constant=None,
        prefill=(1e-3, 1e-4),
        max_tokens=256,
        max_context=256,
        stride=16,
    ):
        rng = np.random.default_rng(seed)
        sequences, tokens = max_num_seqs + 1, max(max_tokens, max_num_seqs) + 1
        knots = -(-max_context // stride) + 2

        def rising(*shape):
            return np.cumsum(rng.random(shape), -1)

        if constant is None:
            cost = StepCost(
                n_moe_layers=n_layers,
                n_experts=n_experts,
                moe_s=rising(sequences, n_experts + 1) * 1e-5,
                mixed_moe_s=rising(tokens, n_experts + 1) * 1e-5,
                uniform_moe_s=rising(tokens) * 2e-5,
                dense_s=rising(tokens) * 1e-4 + 1e-4,
                collectives_s=rng.random(tokens) * 1e-4,
                host_s=float(rng.random()) * 1e-4,
                head_s=rng.random(sequences) * 1e-4,
                attention_s=rising(sequences, knots) * 1e-5,
                context_stride=stride,
                prompt_alone_s=rising(max_context + 1) * 2e-6,
                prompt_share_s=rising(max_context + 1) * 1e-6,
                prompt_floor_s=1e-5,
                prompt_token_s=5e-7,
            )
        else:
            base, slope = prefill
            chunk_s = base + slope * np.arange(float(tokens))
            cost = StepCost(
                n_moe_layers=n_layers,
                n_experts=n_experts,
                moe_s=np.full((sequences, n_experts + 1), constant / n_layers),
                mixed_moe_s=np.tile(chunk_s[:, None] / n_layers, n_experts + 1),
                uniform_moe_s=chunk_s / n_layers,
                dense_s=np.zeros(tokens),
                collectives_s=np.zeros(tokens),
                host_s=0.0,
                head_s=np.zeros(sequences),
                attention_s=np.zeros((sequences, knots)),
                context_stride=stride,
                prompt_alone_s=np.zeros(max_context + 1),
                prompt_share_s=np.zeros(max_context + 1),
                prompt_floor_s=0.0,
                prompt_token_s=0.0,
            )
        return FakeStepTime(cost, n_experts)

    return make


@pytest.fixture(scope="session")
def make_workload():
    """A workload of given arrivals and lengths over ``windows`` trace requests."""

    def make(arrival_s, prompt_len, output_len, *, windows=5, seed=0):
        n = len(arrival_s)
        rng = np.random.default_rng(seed)
        which = rng.integers(windows, size=n).astype(np.int32)
        return Workload(
            arrival_s=np.asarray(arrival_s, float),
            prompt_len=np.broadcast_to(prompt_len, n).astype(np.int32),
            output_len=np.broadcast_to(output_len, n).astype(np.int32),
            text=which,
            decode_request=which,
            replay_offset=rng.integers(3, size=n).astype(np.int32),
            domain=np.zeros(n, np.int16),
            session=np.arange(n, dtype=np.int32),
            prefix_hash=np.empty(0, np.uint64),
            prefix_indptr=np.zeros(n + 1, np.int64),
            prefix_text=np.empty(0, np.int32),
            prefix_block_tokens=0,
            description={},
        )

    return make


@pytest.fixture(scope="session")
def make_cluster(make_step_time):
    """A cluster over a workload; every engine setting can be given.

    ``prefill`` and ``decode`` hold what an ``EngineSpec`` of that pool has of its own. Policies
    are names or objects. ``prompts`` are ``PromptRows``, True for random ones or False for none;
    by default co-located workers (``n_prefill=0``) have random ones. By default a prompt's
    signature is a zero matrix that stands for the trace request of its first token.
    """

    def make(
        workload,
        *,
        step_time=None,
        n_prefill=1,
        n_decode=1,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1 << 20,
        block_size=4,
        n_blocks=1 << 20,
        prefill=None,
        decode=None,
        transfer=FREE_TRANSFER,
        load_report_delay_s=0.0,
        async_scheduling=False,
        max_concurrency=None,
        threshold=None,
        enable_prefix_caching=True,
        decode_policy="jsq",
        prefill_policy="least_loaded",
        signatures=None,
        prompts=None,
        expert_masks=None,
        queue_keys=None,
        window=(0.0, np.inf),
        time_limit_s=np.inf,
        kv_bytes_per_token=1,
        n_kv_tensors=2,
        seed=0,
        **rest,
    ):
        if step_time is None:
            longest = int((workload.prompt_len + workload.output_len).max(initial=1))
            step_time = make_step_time(
                max_num_seqs, seed=seed, max_tokens=max_num_batched_tokens, max_context=longest
            )
        rng = np.random.default_rng([seed, 1])
        windows = 1 + max(
            int(getattr(workload, name).max(initial=0))
            for name in ("text", "decode_request", "prefix_text")
        )
        length = rng.integers(3, 9, size=windows)
        first = np.cumsum(length) - length
        layers, experts = step_time.n_moe_layers, step_time.n_experts
        bits = random_rows(rng, int(length.sum()), layers, experts)
        if prompts is True or (prompts is None and n_prefill == 0):
            prompts = random_prompts(rng, workload, windows, layers, experts)
        elif prompts is False:
            prompts = None
        engine = EngineSpec(step_time, max_num_seqs, max_num_batched_tokens, n_blocks)
        spec = ClusterSpec(
            pools=make_pools(
                n_prefill,
                n_decode,
                replace(engine, **(prefill or {})),
                replace(engine, **(decode or {})),
            ),
            max_model_len=max_model_len,
            block_size=block_size,
            transfer=transfer,
            load_report_delay_s=load_report_delay_s,
            scheduler=EngineConfig(
                async_scheduling=async_scheduling, long_prefill_token_threshold=threshold
            ),
            max_concurrency=max_concurrency,
            enable_prefix_caching=enable_prefix_caching,
            **rest,
        )
        check_tables(spec, workload)
        counts = {q: np.zeros((1, 1), np.int64) for q in range(windows)}
        routers = []
        for policy, make_policy, n, stream in (
            (prefill_policy, registry.prefill_policy, n_prefill, 2),
            (decode_policy, registry.decode_policy, n_decode, 3),
        ):
            if isinstance(policy, str) and n > 0:
                policy = make_policy(
                    policy, PolicyContext(n, np.random.default_rng([seed, stream]))
                )
            if n > 0:
                routers.append(policy)
        inputs = RunInputs(
            spec,
            [
                SimpleNamespace(
                    n_kv_tensors=n_kv_tensors, kv_bytes_per_token=kv_bytes_per_token, state_bytes=0
                )
            ]
            * len(spec.pools),
            workload,
            Replay(bits, first, length),
            signatures or (lambda ranges: (ranges[0][0], counts[ranges[0][0]])),
            routers,
            window,
            time_limit_s,
            expert_masks,
            prompts=prompts,
            queue_keys=queue_keys,
        )
        return CompiledCluster(inputs)

    return make


def check_tables(spec, workload):
    """Compiled code reads beyond the end of a table without a word."""
    served = workload.prompt_len.astype(int) + workload.output_len
    capacity = min(spec.max_model_len, spec.decode.n_blocks * spec.block_size)
    longest = int(served[served <= capacity].max(initial=0))
    for engine in (spec.prefill, spec.decode):
        cost = engine.step_time.cost
        sequences = min(engine.max_num_seqs, len(workload))
        tokens = min(engine.max_num_batched_tokens, int(served.sum()))
        assert len(cost.moe_s) == len(cost.attention_s) == len(cost.head_s) > sequences
        assert len(cost.dense_s) == len(cost.collectives_s) == len(cost.uniform_moe_s)
        assert len(cost.dense_s) > max(tokens, sequences), "make_step_time(max_tokens=...)"
        assert len(cost.mixed_moe_s) == len(cost.dense_s)
        assert len(cost.prompt_alone_s) == len(cost.prompt_share_s)
        assert len(cost.prompt_alone_s) > longest, "make_step_time(max_context=...)"


@pytest.fixture(scope="session")
def run_to_rest():
    """Run a cluster and then its leftovers: requests not measured, load reports on their way.

    The record is that of the whole time; a run without an end fails.
    """

    def run(cluster, max_pauses=2):
        pauses = 0

        def paused(share):
            nonlocal pauses
            pauses += share < 1.0
            assert pauses <= max_pauses, f"no end in sight at {clock['now']} s"

        clock = cluster.arrays.clock[0]
        cluster.run(paused)
        clock["open_measured"] += 1 << 40
        while clock["n_events"] > 0:
            if cluster.advance(np.inf) == loop.PAUSED:
                paused(0.0)
        clock["open_measured"] -= 1 << 40
        return cluster.record(float(clock["now"]))

    return run


@pytest.fixture(scope="session")
def run_watched():
    """Run a cluster one event at a time; ``watch()`` is called in between and at the end.

    Now and then two events pass, where a router is asked between them.
    """

    def run(cluster, watch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster_module, "_EVENTS_A_CALL", 1)
            return cluster.run(lambda _share: watch())

    return run


@pytest.fixture(scope="session")
def earlier_recording(tmp_path_factory):
    """An earlier recording of a reference model, 6 layers, as imported; with it its archive."""
    source = SHARED / "data" / "routing" / "reference_moe" / "sampled.npz"
    if not source.is_file():
        pytest.skip("the archive of the earlier recording is not here")
    trace = import_trace(
        source,
        tmp_path_factory.mktemp("earlier") / "trace",
        model="reference model of 6 layers",
        captured_by="forward passes of the model",
        source_data="held-out chunks of eight domains",
        tool_versions={},
    )
    return trace, source


@pytest.fixture
def run_cli(capsys, monkeypatch):
    """Run the command line in this process; returns exit code, standard output and error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["eldr-sim", *map(str, arguments)])
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # not ``-m pytest``
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
