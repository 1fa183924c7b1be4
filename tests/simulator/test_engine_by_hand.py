"""Engines by hand: what each step takes, and who is in it."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.simulator.setup.transfer import TransferModel

from ..watching import free_blocks
from .random_clusters import Books


def by_hand(step_s=0.0, token_s=0.0, chunk_step_s=0.0, seqs=8, tokens=300):
    """Step times of which a test can think.

    ``step_s`` seconds where a step decodes, and where it computes contexts ``chunk_step_s`` and
    ``token_s`` a token of them.
    """
    cost = StepCost(
        n_moe_layers=2,
        n_experts=70,
        moe_s=np.zeros((seqs + 1, 71)),
        mixed_moe_s=np.zeros((tokens + 1, 71)),
        uniform_moe_s=np.zeros(tokens + 1),
        dense_s=np.zeros(tokens + 1),
        collectives_s=np.zeros(tokens + 1),
        host_s=0.0,
        head_s=np.zeros(seqs + 1),
        attention_s=np.full((seqs + 1, 2), float(step_s)),
        context_stride=16,
        prompt_alone_s=np.zeros(tokens + 1),
        prompt_share_s=token_s * np.arange(tokens + 1.0),
        prompt_floor_s=float(chunk_step_s),
        prompt_token_s=0.0,
    )
    return SimpleNamespace(cost=cost, n_moe_layers=2, n_experts=70)


@pytest.fixture
def one_decode_worker(make_cluster, make_workload, run_watched):
    """Run requests whose prompts take no time; a decode step takes 1 s, a recomputed token 0.5."""

    def run(arrival_s, prompt_len, output_len, *, latency_s=0.0, watch=None, **engine):
        cluster = make_cluster(
            make_workload(arrival_s, prompt_len, output_len),
            prefill={"step_time": by_hand()},
            decode={"step_time": by_hand(1.0, 0.5), **engine},
            transfer=TransferModel(latency_s, 0.0, 1e30, "test"),
            decode_policy=Books(1),
            enable_prefix_caching=False,  # a preempted context is computed again from its beginning
        )
        record = cluster.run() if watch is None else run_watched(cluster, lambda: watch(cluster))
        assert record.completed.all()
        return record, cluster.arrays.reported[: len(record.requests), 0].tolist()

    return run


def columns(record, *names):
    return [record.decode_steps[name].tolist() for name in names]


def test_first_come_first_served_by_places(one_decode_worker):
    record, order = one_decode_worker([0.0, 0.1, 0.2, 0.3], 4, [3, 1, 2, 1], max_num_seqs=2)
    # Place 1: request 0 in steps 0-3. Place 2: request 1 joins at 1, 2 at 2, 3 at 3 (place 1).
    assert record.requests["decode_start_s"] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert record.requests["finish_s"].tolist() == [3.0, 2.0, 4.0, 4.0]
    assert order == [1, 0, 2, 3]


def test_a_large_request_at_the_head_holds_the_small_ones_back(one_decode_worker):
    """10 blocks of 4: request 0 holds 6, so 1 (5 blocks) waits, and 2 (1 block) behind it."""
    record, order = one_decode_worker([0.0, 0.1, 0.2], [21, 17, 1], [3, 1, 1], n_blocks=10)
    assert record.requests["decode_start_s"] == pytest.approx([0.0, 3.0, 3.0])
    assert order == [0, 1, 2]


def test_blocks_are_reserved_before_the_transfer(one_decode_worker):
    held = []

    def watch(cluster):
        now = (float(cluster.arrays.clock["now"][0]), 10 - free_blocks(cluster)[1])
        if not held or now != held[-1]:
            held.append(now)

    one_decode_worker([0.0], [9], [4], latency_s=2.5, n_blocks=10, watch=watch)
    # 3 blocks while the transfer flies, and still at 12 tokens; all free at the end.
    steps = [(3.5, 3), (4.5, 3), (5.5, 3)]
    assert held == [(0.0, 0), (0.0, 3), (2.5, 3), *steps, (6.5, 0)]


def test_preemption_by_hand(one_decode_worker):
    """Blocks of 4 tokens, 4 blocks, prompts of 4 (context 3 when they join) and 6 outputs.

    Both grow to 2 blocks in their second step and want a third in their sixth. Request 1, which
    joined last, gives way at 5: 5 of its tokens are out. Request 0 ends at 6, and request 1
    recomputes 3 + 5 tokens, 0.5 s each, in the step that decodes its last token.
    """
    record, _ = one_decode_worker([0.0, 0.0], 4, 6, n_blocks=4)
    assert record.requests["preemptions"].tolist() == [0, 1]
    assert columns(record, "sequences", "chunk_tokens", "joined", "chunks") == [
        [2, 2, 2, 2, 2, 1, 1], [0, 0, 0, 0, 0, 0, 8], [2, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1]
    ]  # fmt: skip
    assert record.requests["finish_s"].tolist() == [6.0, 6.0 + 1.0 + 4.0]
    assert record.gaps.tolist() == [(5.0, 11.0)]  # from its fifth token at 5 to its sixth at 11


def test_recomputation_is_chunked_to_the_token_budget(one_decode_worker):
    """As above with 4 tokens a step: chunks of 4, 4 and 0 beside the token that is decoded."""
    record, _ = one_decode_worker([0.0, 0.0], 4, 6, n_blocks=4, max_num_batched_tokens=4)
    assert columns(record, "sequences", "chunk_tokens") == [
        [2, 2, 2, 2, 2, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 4, 4, 0]
    ]  # fmt: skip
    assert record.requests["finish_s"][1] == 6.0 + 2.0 + 2.0 + 1.0


def test_blocks_of_the_next_step_are_not_given_away(one_decode_worker):
    """Request 0 wants its last block at 2, when request 1 could have had it."""
    record, order = one_decode_worker([0.0, 0.5], [7, 3], [4, 1], n_blocks=3)
    assert record.requests["preemptions"].tolist() == [0, 0]
    assert order == [1, 0]
    record, order = one_decode_worker([0.0, 1.5], [7, 3], [4, 1], n_blocks=3)
    assert record.requests["preemptions"].tolist() == [0, 0]
    assert order == [0, 1]


def test_a_window_goes_around_and_a_block_lasts(make_cluster, make_workload):
    """Three tokens of one request: 2 + 1 + 2 distinct experts, at 32, 33 and 34 tokens."""
    workload = make_workload([1.0], [32], [3])
    workload.replay_offset[:] = 1
    step_time = by_hand()
    step_time.n_moe_layers, step_time.n_experts = 1, 3
    step_time.cost = step_time.cost._replace(
        n_moe_layers=1,
        moe_s=np.tile([0.0, 1.0, 2.0, 3.0], (9, 1)),
        host_s=0.5,
        attention_s=np.tile([0.0, 16.0, 32.0], (9, 1)),  # 1 s a token, beyond the last knot too
    )
    cluster = make_cluster(
        workload, step_time=step_time, prefill={"step_time": by_hand()}, decode={"n_blocks": 9}
    )
    window = cluster.requests["window_row"][0]
    cluster.requests["window_len"] = 2
    cluster.arrays.bits[window : window + 2] = [[0b1], [0b110]]
    record = cluster.run()
    # 0.5 on the host, 1 s an expert, 1 s a token of context.
    assert record.decode_steps["end"].tolist() == [35.5, 70.0, 106.5]
    assert columns(record, "active", "busiest", "context") == [[2, 1, 2]] * 2 + [[32, 33, 34]]
    assert record.requests["first_token_s"].tolist() == [35.5]
    assert free_blocks(cluster)[1] == 9


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(2, 6),
    n_prefill=st.integers(0, 2),
    prefill_budget=st.sampled_from([1, 3, 100]),
)
def test_requests_of_one_time_share_a_step_whatever_the_order_of_events(
    make_cluster, make_workload, seed, n, n_prefill, prefill_budget
):
    """The engine may wake several times before a step begins: what it has scheduled stays.

    Prompts take no time, but with few tokens a step so many events that the decode worker wakes
    for each of them.
    """
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(2, 30, n), rng.integers(1, 9, n)
    cluster = make_cluster(
        make_workload(np.full(n, 0.25), prompts, outputs),
        n_prefill=n_prefill,
        prefill={"step_time": by_hand(), "max_num_batched_tokens": prefill_budget},
        decode={"step_time": by_hand(1.0), "max_num_batched_tokens": 300},
    )
    record = cluster.run()
    alive = [int((outputs > step).sum()) for step in range(outputs.max())]
    assert columns(record, "sequences", "joined") == [alive, [n] + [0] * (len(alive) - 1)]
    assert columns(record, "start", "end") == [
        [0.25 + step + later for step in range(len(alive))] for later in (0.0, 1.0)
    ]


@pytest.mark.parametrize(("async_scheduling", "joins_at"), [(False, 1.0), (True, 2.0)])
@pytest.mark.parametrize("comes_at", [0.5, 1.0])
def test_async_scheduling_has_planned_the_next_step_already(
    make_cluster, make_workload, async_scheduling, joins_at, comes_at
):
    """Request 1 comes in the first step of 1 s, or as it ends."""
    cluster = make_cluster(
        make_workload([0.0, comes_at], 4, [5, 2]),
        n_prefill=0,
        step_time=by_hand(1.0),
        async_scheduling=async_scheduling,
    )
    requests = cluster.run().requests
    assert requests["prefill_start_s"].tolist() == [0.0, joins_at]
    assert requests["finish_s"].tolist() == [5.0, joins_at + 2.0]


@pytest.mark.parametrize(
    ("prompts", "outputs", "steps"),
    [
        ([21, 6], [2, 3], [(1, 13), (1, 8), (2, 4), (1, 0)]),
        ([21], [2], [(0, 16), (1, 4), (1, 0)]),  # nobody else is there
        ([9, 2], [1, 4], [(1, 9), (2, 0), (1, 0), (1, 0)]),  # the 9th token is one too many
    ],
)
def test_a_long_prompt_leaves_others_room(make_cluster, make_workload, prompts, outputs, steps):
    """Of steps of 16 tokens it takes 8; the last token of a prompt is decoded."""
    cluster = make_cluster(
        make_workload([0.0] * len(prompts), prompts, outputs),
        n_prefill=0,
        step_time=by_hand(1.0, chunk_step_s=1.0),
        max_num_batched_tokens=16,
        threshold=8,
    )
    log = cluster.run().decode_steps
    assert log[["sequences", "chunk_tokens"]].tolist() == steps


# -- prefill workers by hand -------------------------------------------------------------------


@pytest.fixture
def one_prefill_worker(make_cluster, make_workload):
    """Run prompts; a step takes 1 s, and each cache is pulled ``pull_s`` after its prompt's end."""

    def run(arrival_s, prompt_len, *, pull_s=0.0, **engine):
        cluster = make_cluster(
            make_workload(arrival_s, prompt_len, 1),
            prefill={"step_time": by_hand(chunk_step_s=1.0), **engine},
            decode={"step_time": by_hand(2.0**-10)},
            transfer=TransferModel(pull_s, 0.0, 1e30, "test"),
        )
        record = cluster.run()
        assert record.completed.all()
        names = ["start", "end", "chunks", "chunk_tokens"]
        return record.requests, record.prefill_steps[names].tolist()

    return run


def test_chunks_fill_the_budget_and_begun_prompts_go_first(one_prefill_worker):
    requests, steps = one_prefill_worker([0.0, 0.0, 0.5], [5, 17, 4], max_num_batched_tokens=10)
    # Request 1 begins beside 0, fills a step alone, and leaves room for all of 2 at its end.
    assert steps == [(0.0, 1.0, 2, 10), (1.0, 2.0, 1, 10), (2.0, 3.0, 2, 6)]
    assert requests["prefill_start_s"].tolist() == [0.0, 0.0, 2.0]
    assert requests["prefill_end_s"].tolist() == [1.0, 3.0, 3.0]
    assert requests["prefill_worker"].tolist() == [0, 0, 0]


def test_places_bound_the_prompts_of_a_step(one_prefill_worker):
    requests, steps = one_prefill_worker([0.0] * 5, 2, max_num_seqs=2)
    assert [step[2:] for step in steps] == [(2, 4), (2, 4), (1, 2)]
    assert requests["prefill_end_s"].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_prompt_without_blocks_waits_and_nobody_overtakes_it(one_prefill_worker):
    """Blocks of 4, 5 blocks: request 0 holds 3 until pulled at 3.5, so 1 (3 blocks) waits."""
    requests, steps = one_prefill_worker([0.0, 0.1, 0.2], [9, 12, 1], n_blocks=5, pull_s=2.5)
    assert steps == [(0.0, 1.0, 1, 9), (3.5, 4.5, 2, 13)]
    assert requests["prefill_start_s"].tolist() == [0.0, 3.5, 3.5]


def test_an_idle_worker_starts_at_once_and_a_busy_one_at_its_next_step(one_prefill_worker):
    requests, _ = one_prefill_worker([0.25, 0.5, 7.0], 4)
    assert requests["prefill_start_s"].tolist() == [0.25, 1.25, 7.0]


@pytest.mark.parametrize("token_s", [0.0, 0.5])
def test_routing_takes_its_time_and_that_of_each_prompt_token(make_cluster, make_workload, token_s):
    """Prompts of 4 tokens: the decode worker hears of them two seconds later, and one for all."""
    cluster = make_cluster(make_workload([1.0], 4, 2), routing_s=1.0, routing_token_s=token_s)
    (request,) = cluster.run().requests
    late = request["transfer_start_s"] - request["prefill_end_s"]
    assert late == pytest.approx(1.0 + 4 * token_s)
