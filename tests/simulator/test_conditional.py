"""Conditional disaggregation: its limits are plain clusters, its thresholds exact."""

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import load_gpu
from eldr_sim.kernel_profiles.kernels.flops import peak_flops, prefill_work
from eldr_sim.simulator.plane.entry import BUSY, EITHER, SECONDS, SHORT
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.conditional import NEVER, Conditional, parse_conditional
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare
from eldr_sim.simulator.setup.transfer import TransferModel


@pytest.fixture(scope="module")
def run(make_cluster, make_step_time):
    def run(work, rule=NEVER, transfer=None, **rest):
        longest = int((work.prompt_len + work.output_len).max())
        step_time = make_step_time(
            8, 1, 8, constant=0.01, prefill=(0.0, 0.001), max_context=longest + 1, max_tokens=1024
        )
        more = {} if transfer is None else {"transfer": transfer}
        record = make_cluster(
            work, step_time=step_time, prompts=False, conditional=rule,
            max_num_batched_tokens=512, decode_policy="jsq", **more, **rest,
        ).run()  # fmt: skip
        assert record.completed.all()
        return record.requests

    return run


def mixed(make_workload, n=200, gap_s=0.05):
    rng = np.random.default_rng(5)
    return make_workload(
        np.cumsum(rng.exponential(gap_s, n)), rng.integers(1, 400, n), rng.integers(1, 20, n)
    )


def test_the_limits_are_plain_clusters(make_workload, run):
    work = mixed(make_workload)
    plain = run(work, n_prefill=2, n_decode=2)
    never = run(work, Conditional(int(SHORT), 0.0, 1.0), n_prefill=2, n_decode=2)
    assert never.tobytes() == plain.tobytes()
    always = run(work, Conditional(int(SHORT), np.inf, 1.0), n_prefill=2, n_decode=2)
    together = run(work, n_prefill=0, n_decode=2)
    for name in ("first_token_s", "finish_s", "prefill_start_s", "decode_worker", "cached_tokens"):
        assert (always[name] == together[name]).all(), name
    assert (always["transfer_start_s"] < 0).all()


def test_short_prompts_stay(make_workload, run):
    work = mixed(make_workload)
    requests = run(work, Conditional(int(SHORT), 100.0, 1.0), n_prefill=1, n_decode=2)
    local = requests["transfer_start_s"] < 0
    assert (local == (requests["prompt_len"] < 100)).all()
    assert 0.1 < local.mean() < 0.5


@pytest.mark.parametrize("rule", [SHORT, EITHER])
def test_prompts_stay_only_if_enough_of_them_is_cached(make_workload, run, rule):
    """Nothing is cached here, so all of a prompt is left, which is more than any share below 1."""
    work = mixed(make_workload)
    plain = run(work, n_prefill=2, n_decode=2)
    most = run(work, Conditional(int(rule), np.inf, 0.99), n_prefill=2, n_decode=2)
    assert most.tobytes() == plain.tobytes()
    all_of_it = run(work, Conditional(int(rule), np.inf, 1.0), n_prefill=2, n_decode=2)
    assert (all_of_it["transfer_start_s"] < 0).all()


def test_turns_stay_once_their_history_is_cached():
    """With one decode worker, a local prompt computes exactly what is not cached there."""
    chat = {
        "trace": "reference-moe", "topology": "1P1D", "workload": "chat", "sessions": 6,
        "think_time": "1", "output_len": 30, "policy": "jsq", "turns": "6", "new_tokens": "90",
    }  # fmt: skip
    rows = simulate(
        make_config(chat | {"conditional_disagg": "isl_bounding:2000,0.4"})
    ).record.requests
    left = (rows["prompt_len"] - rows["cached_tokens"]) / rows["prompt_len"]
    local = rows["transfer_start_s"] < 0
    assert 0.1 < local.mean() < 0.9
    assert (left[local] <= 0.4).all()


def test_prompts_stay_while_prefill_workers_are_busy(make_workload, run):
    """A prompt of 900 tokens, and two behind it, of which prefill workers may have much to do."""
    work = make_workload(np.array([0.0, 0.1, 0.8]), np.array([900, 40, 40]), 4)
    requests = run(work, Conditional(int(BUSY), entry_load=0.5), n_prefill=1, n_decode=1)
    # The second comes while the first chunk of 512 tokens is computed: 388 are to do, .76 of a
    # step's budget; the third while these are.
    assert (requests["transfer_start_s"] < 0).tolist() == [False, True, False]
    requests = run(work, Conditional(int(BUSY), entry_load=0.8), n_prefill=1, n_decode=1)
    assert not (requests["transfer_start_s"] < 0).any()


@pytest.mark.parametrize("slower", [0.99, 1.01])
def test_seconds_stay_where_a_transfer_takes_longer_than_others_wait(make_workload, run, slower):
    """A batch of two waits while 300 tokens are computed; the transfer takes about as long."""
    work = make_workload(np.array([0.0, 0.0, 1.3]), np.array([2, 2, 300]), np.array([400, 400, 2]))
    alone = 0.001 * 300
    transfer = TransferModel(0.0, 0.0, 300 / (2 * alone * slower), "test")
    requests = run(work, Conditional(int(SECONDS)), transfer, n_prefill=1, n_decode=1)
    assert (requests["transfer_start_s"][2] < 0) == (slower > 1)


@pytest.mark.parametrize(
    "text", ["isl", "isl_bounding:x", "isl_bounding:1,2,3", "seconds:1", "noncached:-4"]
)
def test_bad_rules_are_refused(text):
    with pytest.raises(InputError) as refused:
        parse_conditional(text)
    assert refused.value.field == "conditional_disagg"


def test_rules():
    assert parse_conditional("isl_bounding") == Conditional(int(SHORT), 2048.0, 0.7)
    assert parse_conditional("noncached:64") == Conditional(int(SHORT), 64.0, 1.0)
    with pytest.raises(InputError, match="does not hand over prompts"):
        prepare(make_config({"topology": "2C", "conditional_disagg": "seconds"}))


def test_prompts_that_stay_are_computed_tokens_of_no_prefill_worker():
    """The steps' tokens by pool; a prefill worker's FLOPs are those of the prompts that it gets."""
    chat = {
        "trace": "reference-moe", "topology": "1P2D", "workload": "chat", "sessions": 10,
        "think_time": "1", "output_len": 30, "policy": "jsq",
    }  # fmt: skip
    result = simulate(make_config(chat | {"conditional_disagg": "noncached:2000"}))
    summary, record = result.summary, result.record
    rows, seconds = record.requests, summary["duration"]
    tokens = [steps["chunk_tokens"].sum() for steps in (record.prefill_steps, record.decode_steps)]
    assert min(tokens) > 1000
    assert summary["computed_prompt_throughput"] == pytest.approx(sum(tokens) / seconds)
    moved = rows[rows["transfer_start_s"] >= 0]
    work = prefill_work(prepare(make_config(chat)).model)
    flops = sum(
        work.flops(int(row["prompt_len"] - row["cached_tokens"]), int(row["cached_tokens"]))
        for row in moved
    )
    peak = peak_flops(prepare(make_config(chat)).model, load_gpu("H100"))
    assert summary["prefill_mfu"] == pytest.approx(flops / peak / seconds)
