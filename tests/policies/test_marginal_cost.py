"""Routing by predicted step time: a twin from scratch, and what the cluster tells the policy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.kernel_profiles.steps.step_time import build_step_time_model
from eldr_sim.policies.base import Needs, PolicyContext, RequestInfo, RouterPolicy, Workers
from eldr_sim.policies.eldr.artifact import fit
from eldr_sim.policies.eldr.router import EldrParameters, EldrPolicy
from eldr_sim.policies.routing.activation import fit_activation, independent_tokens, of_tokens
from eldr_sim.policies.routing.decode import JoinShortestQueuePolicy
from eldr_sim.policies.routing.marginal_cost import (
    MarginalCostParameters,
    MarginalCostPolicy,
    OraclePolicy,
    expected_step_s,
)
from eldr_sim.simulator.control import run_policies
from eldr_sim.simulator.plane import router
from eldr_sim.simulator.run import build_cluster, offered_load, prepare, simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.traces.routing.calibration import CalibrationSet, calibration_set
from eldr_sim.traces.routing.format import open_trace

from ..watching import new_steps

N_LAYERS, N_EXPERTS, MODEL_LAYERS, SEATS = 2, 8, 5, 6
NONE = np.zeros(0, np.int64)


def make_step_times(seed=0):
    """Rising tables of no particular shape."""
    r = np.random.default_rng(seed)

    def rising(*shape):
        table = 1e-4 * r.random(shape)
        for axis in range(len(shape)):
            table = table.cumsum(axis=axis)
        return table

    moe = rising(SEATS + 1, N_EXPERTS + 1)
    moe[0] = moe[:, 0] = 0.0
    nothing = np.zeros(SEATS + 1)
    return StepCost(
        n_moe_layers=MODEL_LAYERS,
        n_experts=N_EXPERTS,
        moe_s=moe,
        mixed_moe_s=moe,
        uniform_moe_s=nothing,
        dense_s=rising(SEATS + 1),
        collectives_s=rising(SEATS + 1),
        host_s=1e-4 * r.random(),
        head_s=rising(SEATS + 1),
        attention_s=rising(SEATS + 1, 5),
        context_stride=64,
        prompt_alone_s=nothing,
        prompt_share_s=nothing,
        prompt_floor_s=0.0,
        prompt_token_s=0.0,
    )


def make_calibration(seed=0, n=20):
    r = np.random.default_rng(seed)
    share = r.dirichlet(np.full(N_EXPERTS, 0.3), (n, N_LAYERS))
    return CalibrationSet(
        counts=(r.poisson(share * 50) + 1).astype(np.uint16),
        decode_activation=np.minimum(2 * share, 1).astype(np.float32),
        domain=np.zeros(n, np.int16),
        domains=["all"],
        requests=np.arange(n),
        trace_checksum="",
    )


def context(n_workers=4, **values):
    rest = {"step_times": make_step_times(), "calibration": make_calibration()}
    return PolicyContext(n_workers, np.random.default_rng(0), **(rest | values))


def growths_from_scratch(times, residents, load, new):
    """Growth of ``b t^2`` by ``new`` on a worker, from all (activation, prompt) that are there."""

    def step(here, batch):
        if batch == 0:
            return 0.0
        at = min(batch, SEATS)
        moe = 0.0
        for layer in range(len(new[0])):
            distinct = 0.0
            for e in range(N_EXPERTS):
                idle = 1.0
                for activation, _ in here:
                    idle *= 1.0 - min(activation[layer][e], 1 - 2**-12)
                distinct += 1.0 - idle
            moe += np.interp(distinct, np.arange(N_EXPERTS + 1), times.moe_s[at])
        knots = times.context_stride * np.arange(times.attention_s.shape[1])
        mean_context = sum(prompt for _, prompt in here) / batch
        attention = np.interp(mean_context, knots, times.attention_s[at])
        fixed = times.dense_s[at] + times.collectives_s[at] + times.host_s + times.head_s[at]
        whole = fixed + attention + moe * times.n_moe_layers / len(new[0])
        return whole * max(1.0, batch / SEATS)

    now, then = step(residents, load), step([*residents, new], load + 1)
    return (load + 1) * then**2 - load * now**2


def history(policy, activations, prompts, n_workers, seed):
    """Dispatch and complete at random; yield what each decision saw, and what it was."""
    r = np.random.default_rng(seed)
    loads = np.zeros(n_workers, np.int64)
    residents = [{} for _ in range(n_workers)]
    for request, activation in enumerate(activations):
        info = RequestInfo(request, prompts[request], 0, signature=activation[1])
        before = [list(here.values()) for here in residents]
        chosen = policy.select(info, Workers.idle(loads))
        yield before, loads.copy(), (activation[0], prompts[request]), chosen
        loads[chosen] += 1
        residents[chosen][request] = (activation[0], prompts[request])
        for worker in range(n_workers):
            for gone in [x for x in residents[worker] if r.random() < 0.15]:
                del residents[worker][gone]
                loads[worker] -= 1
                policy.on_complete(gone, worker)


def with_affinity(affinity, n_workers, seed=0, **values):
    """A policy, and the context that it was made in, whose fit has a centroid a worker."""
    calibration = make_calibration(seed, 40)
    rarer = replace(calibration, counts=calibration.counts - 1)  # experts that some never choose
    made = context(n_workers, calibration=rarer, artifact=fit(rarer, n_workers, 0), **values)
    return MarginalCostPolicy(made, MarginalCostParameters(affinity=affinity)), made


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32), n_workers=st.integers(1, 5), affinity=st.sampled_from([0.3, 2.0])
)
def test_affinity_multiplies_the_growth(seed, n_workers, affinity):
    """The twin from scratch, times ``1 + affinity (s* - s)``; the first refit comes after 5 s."""
    times = make_step_times(seed)
    policy, made = with_affinity(affinity, n_workers, seed, step_times=times)
    model, eldr = fit_activation(made.calibration), EldrPolicy(made)
    counts = make_calibration(seed + 1, 30).counts
    prompts = np.random.default_rng(seed).integers(1, 250, len(counts)).tolist()
    asked = [(model.predict(c), c) for c in counts]
    similar = eldr.similarities(counts)
    steps = history(policy, asked, prompts, n_workers, seed)
    for (before, loads, new, chosen), near in zip(steps, similar, strict=True):
        costs = [
            growths_from_scratch(times, before[w], int(loads[w]), new)
            * (1 + affinity * (near.max() - near[w]))
            for w in range(n_workers)
        ]
        assert costs[chosen] <= min(costs) + 2e-3 * abs(min(costs)) + 1e-9


def test_boundless_affinity_goes_to_the_nearest_centroid_as_it_is_refitted():
    """As `eldr` does with a tau of 0, whatever the time that it costs."""
    policy, made = with_affinity(1e9, 4)
    eldr = EldrPolicy(made, EldrParameters(tau=0))
    counts = make_calibration(5, 200).counts
    refitted = set()
    for i, each in enumerate(counts):
        workers = Workers.idle(np.zeros(4, np.int64))._replace(now_s=0.1 * i)
        request = RequestInfo(i, 10, 0, signature=each)
        assert policy.select(request, workers) == eldr.select(request, workers)
        refitted.add(eldr._online.served.centroids.tobytes())
    assert len(refitted) > 5


def test_affinity_needs_signatures():
    with pytest.raises(InputError, match="co-located workers do not have"):
        with_affinity(0.5, 4, computes_prompts=True, rank_moe=())
    policy, _ = with_affinity(0.5, 3)
    loads = np.array([2, 0, 1])
    assert policy.select(RequestInfo(0, 10, 0), Workers.idle(loads)) == 1  # without: by time alone


@given(seed=st.integers(0, 2**32), n_workers=st.integers(1, 5), oracle=st.booleans())
def test_every_decision_is_that_of_a_twin_from_scratch(seed, n_workers, oracle):
    r = np.random.default_rng(seed)
    times, calibration = make_step_times(seed), make_calibration(seed)
    n = 30
    prompts = r.integers(1, 250, n).tolist()
    if oracle:
        truth = r.beta(0.3, 1.0, (n, MODEL_LAYERS, N_EXPERTS))
        activations = [(truth[i], None) for i in range(n)]
        policy = OraclePolicy(
            context(n_workers, step_times=times, future=lambda request: truth[request])
        )
    else:
        model = fit_activation(calibration)
        counts = make_calibration(seed + 1, n).counts
        activations = [(model.predict(c), c) for c in counts]
        policy = MarginalCostPolicy(context(n_workers, step_times=times, calibration=calibration))
    for before, loads, new, chosen in history(policy, activations, prompts, n_workers, seed):
        growths = [
            growths_from_scratch(times, before[w], int(loads[w]), new) for w in range(n_workers)
        ]
        # The policy rounds probabilities to 2^-12: costs this close are equal to it.
        assert growths[chosen] <= min(growths) + 2e-3 * abs(min(growths)) + 1e-9


def test_step_times_are_those_of_the_step_time_model():
    model = build_step_time_model("Qwen3-30B-A3B", "H100", max_num_seqs=64, max_model_len=4096)
    r = np.random.default_rng(0)
    loads = np.array([0, 1, 7, 64, 96])
    mean_context = r.uniform(1, 4000, len(loads))
    distinct = r.uniform(0, 128, (len(loads), 6))
    seconds = [
        expected_step_s(model.cost, loads[w], mean_context[w] * loads[w], distinct[w])
        for w in range(len(loads))
    ]
    assert seconds[0] == 0.0
    for w in range(1, len(loads)):
        layers = np.tile(distinct[w], 8)
        expected = model.decode_s(layers, min(int(loads[w]), 64), mean_context[w])
        # 96 requests on 64 seats take turns.
        assert seconds[w] == pytest.approx(expected * (1.5 if loads[w] == 96 else 1.0), rel=1e-12)


@pytest.mark.parametrize("padding", ["dense", "experts"])
def test_policies_decide_on_step_times_before_cuda_graphs_pad_them(padding, monkeypatch):
    """Padding makes a step's time flat within a graph's size, where the marginal time of a
    request's own experts vanishes: engines pay for it, and every policy decides without it."""
    given = {}

    def spied(name):
        build = getattr(run_policies, name)

        def note(word, context):
            given[name] = context.step_times
            return build(word, context)

        monkeypatch.setattr(run_policies, name, note)

    built = ("decode_policy", "prefill_policy", "queue_order")
    for name in built:
        spied(name)
    config = make_config({
        "trace": "reference-moe", "topology": "1P2D", "policy": "jsq", "num_requests": 5,
        "output_len": 4, "queue_order": "sjf_residence", "max_num_seqs": 24,
        "cudagraph_padding": padding,
    })  # fmt: skip
    prepared = prepare(config)
    build_cluster(config, prepared, *offered_load(config, prepared.trace))
    plain = build_step_time_model(
        prepared.model, prepared.step_time.gpu, max_num_seqs=24,
        max_model_len=prepared.step_time.max_model_len,
    )  # fmt: skip
    assert given.keys() == set(built)
    for name, times in given.items():
        for table in ("moe_s", "mixed_moe_s", "uniform_moe_s", "dense_s", "collectives_s"):
            n = min(len(getattr(times, table)), len(getattr(plain.cost, table)))
            assert (getattr(times, table)[:n] == getattr(plain.cost, table)[:n]).all(), name
    padded = prepared.step_time.cost
    assert (padded.dense_s[:17] != plain.cost.dense_s[:17]).any()


def test_gpus_of_a_worker_share_its_experts():
    """Half the experts a GPU: the table has half the columns, and is read at half the union."""
    whole = make_step_times()
    half = whole._replace(moe_s=np.ascontiguousarray(whole.moe_s[:, : N_EXPERTS // 2 + 1]))
    at_half = expected_step_s(whole, 3, 90.0, np.array([2.0, 3.5]))
    assert expected_step_s(half, 3, 90.0, np.array([4.0, 7.0])) == pytest.approx(at_half)


def test_workers_that_look_alike_are_served_in_turn():
    policy = MarginalCostPolicy(context(4))
    counts = make_calibration().counts[0]
    loads = np.zeros(4, np.int64)
    chosen = []
    for request in range(8):
        worker = policy.select(RequestInfo(request, 10, 0, signature=counts), Workers.idle(loads))
        policy.on_complete(request, worker)
        chosen.append(worker)
    assert chosen == [0, 1, 2, 3] * 2


def test_full_workers_do_not_attract():
    """Every expert is active on a full worker, so one more request adds none: it still waits."""
    policy = MarginalCostPolicy(context(2))
    counts = make_calibration().counts
    loads = np.array([5 * SEATS, 0])
    for request in range(SEATS):
        assert (
            policy.select(
                RequestInfo(request, 10, 0, signature=counts[request]), Workers.idle(loads)
            )
            == 1
        )


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_requests_beyond_the_places_take_turns(turns):
    """So many full batches of one mean context: each waits for all of them."""
    cost, activated = context(1).require_step_times("test"), np.full(2, 5.0)
    full = expected_step_s(cost, SEATS, 7 * SEATS, activated)
    load = turns * SEATS
    assert expected_step_s(cost, load, 7 * load, activated) == pytest.approx(turns * full)


def test_a_request_without_signature_gets_the_calibration_mean():
    policy = MarginalCostPolicy(context(2))
    mean = fit_activation(make_calibration()).mean_activation
    rounded, _ = policy.usage(RequestInfo(0, 10, 0))
    np.testing.assert_allclose(rounded, mean, atol=2**-12)


def test_equal_signature_ids_are_predicted_once():
    policy = MarginalCostPolicy(context(2))
    counts = make_calibration().counts
    first = policy.usage(RequestInfo(0, 10, 0, signature=counts[0], signature_id=7))
    assert policy.usage(RequestInfo(1, 10, 0, signature=counts[0], signature_id=7)) is first
    fresh = policy.usage(RequestInfo(2, 10, 0, signature=counts[0]))
    assert (fresh[0] == first[0]).all()
    assert (fresh[1] == first[1]).all()


def test_what_a_policy_needs_must_be_there():
    with pytest.raises(InputError, match="step times"):
        MarginalCostPolicy(context(step_times=None))
    with pytest.raises(InputError, match="calibration"):
        MarginalCostPolicy(context(calibration=None))
    with pytest.raises(InputError, match="future"):
        OraclePolicy(context())
    narrow = make_step_times()._replace(n_experts=4)
    with pytest.raises(InputError, match="8 experts, but the model has 4"):
        MarginalCostPolicy(context(step_times=narrow))
    with pytest.raises(KeyError):
        MarginalCostPolicy(context()).on_complete(0, 0)


# --- inside the simulator ---

SMALL = {"topology": "2P4D", "num_requests": 80, "request_rate": 60, "output_len": 40}


def small_cluster(**values):
    config = make_config(SMALL | values)
    setting = prepare(config)
    return build_cluster(config, setting, *offered_load(config, setting.trace))


@pytest.mark.parametrize("delay_ms", [0.0, 200.0])
@pytest.mark.parametrize("policy", ["marginal_cost", "oracle"])
def test_residents_are_the_loads_and_leave_nothing_behind(
    run_to_rest, policy, delay_ms, monkeypatch
):
    monkeypatch.setattr(router, "decisions_of", lambda *_: None)  # it is asked
    cluster = small_cluster(policy=policy, load_report_delay_ms=delay_ms)
    decode = cluster.routers[1].policy
    real, seen = decode.select, []

    def select(request, workers):
        placed = [worker for _, worker in decode._greedy._resident]
        counted = np.bincount(placed, minlength=len(workers.loads)).tolist()
        assert counted == workers.loads.tolist()
        seen.append(request.request_id)
        return real(request, workers)

    decode.select = select
    record = run_to_rest(cluster)  # with the reports that are still under way when the run ends
    assert record.completed.all()
    assert sorted(seen) == list(range(80))
    greedy = decode._greedy
    assert not greedy._resident
    assert (greedy._unions.idle == 1.0).all()
    assert (greedy._unions.activated == 0.0).all()
    assert (greedy.books.prompt_tokens == 0).all()


class Listener(RouterPolicy):
    """Joins the shortest queue and writes down what it has heard at every decision."""

    name = "listener"
    needs = Needs(ends=True)

    def __init__(self, n_workers=4):
        self.shortest = JoinShortestQueuePolicy(PolicyContext(n_workers, np.random.default_rng(0)))
        self.heard, self.decisions, self.cluster = [], [], None

    def select(self, request, workers):
        now = float(self.cluster.arrays.clock["now"][0])
        self.decisions.append((now, len(self.heard)))
        return self.shortest.select(request, workers)

    def on_complete(self, request_id, worker):
        self.heard.append((request_id, worker))


@pytest.mark.parametrize("delay_s", [0.0, 0.03])
def test_completions_are_reported_when_the_load_falls(
    make_cluster, make_workload, run_to_rest, delay_s
):
    """At every decision the policy knows those that have ended ``delay_s`` ago; later, all."""
    rng = np.random.default_rng(3)
    n, policy = 80, Listener()
    workload = make_workload(
        np.cumsum(rng.exponential(0.004, n)), rng.integers(1, 30, n), rng.integers(1, 40, n)
    )
    policy.cluster = cluster = make_cluster(
        workload, n_prefill=2, n_decode=4, load_report_delay_s=delay_s, decode_policy=policy
    )
    requests = run_to_rest(cluster).requests
    order = np.argsort(requests["finish_s"], kind="stable")
    ends = requests["finish_s"][order] + delay_s
    assert len(policy.decisions) == n
    assert len({known for _, known in policy.decisions}) > 10
    for now, known in policy.decisions:
        assert known == (ends <= now).sum()
    expected = list(zip(order.tolist(), requests["decode_worker"][order].tolist(), strict=True))
    assert sorted(policy.heard) == sorted(expected)
    times = requests["finish_s"][[request for request, _ in policy.heard]]
    assert (np.diff(times) >= 0).all()


def test_a_run_that_ends_has_told_of_every_completion(make_cluster, make_workload):
    """Also of those after the last decision."""
    policy = Listener(2)
    policy.cluster = cluster = make_cluster(
        make_workload(np.zeros(6), 4, [1, 2, 3, 4, 5, 6]), n_decode=2, decode_policy=policy
    )
    record = cluster.run()
    assert record.completed.all()
    assert sorted(request for request, _ in policy.heard) == list(range(6))


@pytest.mark.parametrize("output_len", [40, 300])
@pytest.mark.parametrize("replay", ["own", "same_domain"])
def test_oracle_sees_the_rows_that_the_worker_replays(run_watched, output_len, replay):
    """The run is watched event by event and the bit-set rows of each step are noted."""
    cluster = small_cluster(
        policy="oracle", topology="1P1D", num_requests=6, output_len=output_len, trace_replay=replay
    )
    rows, seen = {request: [] for request in range(6)}, [0, 0]
    arrays = cluster.arrays

    def note():
        decoding = [(w, step) for w, step in new_steps(cluster, seen) if step["sequences"] > 0]
        assert len(decoding) <= 1
        for worker, step in decoding:
            members = arrays.engines.sequences["request"][worker, : step["sequences"]]
            for request, row in zip(members.tolist(), arrays.scratch.rows.tolist(), strict=False):
                rows[request].append(row)

    futures = [cluster.routers[1].policy._future(request) for request in range(6)]
    run_watched(cluster, note)
    for request in range(6):
        assert len(rows[request]) == output_len
        active = np.unpackbits(arrays.bits[rows[request]].view(np.uint8), axis=1, bitorder="little")
        expected = active.mean(axis=0).reshape(48, 128)
        np.testing.assert_allclose(futures[request], expected, rtol=1e-12)
    assert all(np.isclose(future.sum(axis=1), 8).all() for future in futures)


def test_runs_repeat_bit_by_bit():
    for policy in ("marginal_cost", "oracle"):
        config = make_config(SMALL | {"policy": policy})
        first, again = simulate(config), simulate(config)
        assert first.summary == again.summary
        assert first.requests.equals(again.requests)


def test_knowing_more_lowers_the_active_experts():
    """JSQ knows loads, marginal_cost the prefill as well, the oracle the future."""
    active = [
        simulate(
            make_config(
                {"policy": policy, "topology": "4P8D", "request_rate": 25}
                | {"duration": 20, "warmup": 10, "trace_replay": "same_domain"}
            )
        ).summary["mean_active_experts_per_step"]
        for policy in ("jsq", "marginal_cost", "oracle")
    ]
    assert active[0] > 1.05 * active[1]
    assert active[1] > 1.03 * active[2]


@pytest.mark.parametrize("policy", ["marginal_cost", "oracle"])
def test_workers_of_several_gpus_are_served(policy):
    values = {"topology": "1P2D", "num_requests": 20, "output_len": 20, "policy": policy}
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    summary = simulate(make_config(SMALL | values | parallel)).summary
    assert summary["completed"] == 20


def test_drafts_activate_what_neighbouring_tokens_do():
    """Neighbours choose alike beyond what their request explains."""
    calibration = calibration_set(open_trace("gpt-oss-20b"), workload="trace")
    effective = [independent_tokens(calibration, n) for n in (1, 2, 4)]
    assert effective[0] == 1.0
    assert 1.5 < effective[1] < 1.95
    assert 2.4 < effective[2] < 3.6
    share = np.array([0.0, 0.25, 1.0])
    assert of_tokens(share, 3.0) == pytest.approx(1 - (1 - share) ** 3)
    assert of_tokens(share, 1.5) == pytest.approx(1 - (1 - share) * (1 - share / 2))


def test_a_verify_step_computes_all_tokens():
    model = build_step_time_model(
        "Qwen3-30B-A3B", "H100", max_num_seqs=64, max_model_len=4096, tokens_per_sequence=4
    )
    activated = np.full(6, 40.0)
    seconds = expected_step_s(model.cost, 8, 8 * 500, activated, 4)
    parts = step_parts(model.cost, 8, 32, 8 * 500.0, NONE, NONE, 32, activated, False)
    assert seconds == pytest.approx(total_s(parts))
    full = expected_step_s(model.cost, 64, 64 * 500, activated, 4)
    assert expected_step_s(model.cost, 96, 96 * 500, activated, 4) == pytest.approx(1.5 * full)


def test_marginal_cost_serves_drafts():
    config = {
        "trace": "gpt-oss-20b", "model": "GPT-OSS-20B", "topology": "1P4D",
        "policy": "marginal_cost", "num_requests": 60,
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3},
    }  # fmt: skip
    summary = simulate(make_config(config)).summary
    assert summary["completed"] == 60
    assert summary["acceptance_length"] > 2
