"""Features of a live engine: loads that exercise them, and their simulation."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from eldr_sim.validation.live.calibration.engine_calibration import Clock
from eldr_sim.validation.live.engines.client import send_turns
from eldr_sim.validation.live.engines.load import Load, LoadRequest
from eldr_sim.validation.live.features import check as feature_check
from eldr_sim.validation.live.features.feature_setups import (
    FEATURES,
    PREFIX,
    TURNS,
    Sent,
    feature_load,
    figures,
    lengths_of,
    live_figures,
    replay,
    simulate_sent,
)

from ...waiting import until
from .test_live_client import engine, info

SLICES = {"code": (4, 100), "math": (100, 250)}


def made(name, **changes):
    told = {"rate": 20.0, "duration_s": 3.0, "seed": 5, "repeat": 0, "prefix": "r"} | changes
    return feature_load(name, SLICES, lengths=lengths_of(name, 6, 8), **told)


def test_requests_of_a_domain_share_its_prefix():
    load, most = made("shared prefixes")
    prefixes = {(r.domain, tuple(r.prompt[:PREFIX])) for r in load.requests}
    assert len(prefixes) == len({domain for domain, _ in prefixes}) == 2
    assert len({tuple(r.prompt[PREFIX:]) for r in load.requests}) == len(load.requests)
    assert most is None


def test_turns_go_on_with_the_one_before():
    load, _ = made("conversations")
    for i, request in enumerate(load.requests):
        first = load.requests[i - i % TURNS]
        assert request.parent == (i - 1 if i % TURNS else -1)
        assert (request.domain, request.send_s) == (first.domain, first.send_s)
        assert (request.gap_s > 0) == bool(i % TURNS)


def test_a_turn_is_sent_after_its_gap_behind_prompt_and_answer(serve_app):
    seen = []

    async def answer(body, write):
        for token in range(1, body["max_tokens"] + 1):
            choice = {"index": 0, "text": "", "token_ids": [200 + token]}
            choice["prompt_token_ids"] = [9, 9]
            event = {"choices": [choice], "usage": {"completion_tokens": token}}
            await write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())

    requests = (
        LoadRequest("a", "code", [1, 2], 3, 0.0),
        LoadRequest("b", "code", [3], 2, 0.0, parent=0, gap_s=0.05),
    )
    table, contexts = send_turns(Load(info(), requests), serve_app(engine(answer, seen)), model="m")
    assert contexts == [[1, 2, 201, 202, 203], [1, 2, 201, 202, 203, 3, 201, 202]]
    assert seen[1][2]["prompt"] == contexts[0] + [3]
    assert table["prompt_len"].to_pylist() == [2, 6]
    rows = table.to_pylist()
    assert rows[1]["sent_s"] - rows[0]["token_s"][-1] >= 0.05


def test_a_closed_loop_has_so_many_in_flight(serve_app):
    flight, peaks = [0], []

    async def answer(body, write):
        flight[0] += 1
        peaks.append(flight[0])
        await until(lambda: len(peaks) >= 3)
        await asyncio.sleep(0.02)  # for a fourth one
        event = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        await write(f"data: {json.dumps(event)}\n\n".encode())
        flight[0] -= 1

    requests = tuple(LoadRequest(f"{i}", "code", [1], 2, 0.0) for i in range(7))
    url = serve_app(engine(answer))
    send_turns(Load(info(), requests), url, model="m", max_concurrency=3)
    assert max(peaks) == 3


def sent_of(run, contexts):
    names = [f"{i}" for i in range(len(contexts))]
    requests = tuple(
        LoadRequest(name, "a", tokens[:n], out, 0.0)
        for name, tokens, n, out in zip(
            names, contexts, run.requests["prompt_len"].to_pylist(),
            run.requests["output_len"].to_pylist(), strict=True,
        )
    )  # fmt: skip
    return Sent(
        Load(run.info.load, requests), run.requests, contexts, {}, Clock(*[np.empty(0)] * 2)
    )


def simulated(run, sent, calibrated, tmp_path, fields):
    return simulate_sent(
        sent, fields, engine=run.info.engines[0], max_model_len=run.info.max_model_len,
        trace=run.trace.path if hasattr(run.trace, "path") else tmp_path / "trace", **calibrated,
    )  # fmt: skip


def test_without_a_feature_it_is_the_simulation_of_a_recorded_run(
    make_live_run, calibrated, tmp_path
):
    """Another way to the same: `simulate_run` builds its cluster by itself."""
    run, replayed = make_live_run("colocated", seed=4)
    own = [[i] * n for i, n in enumerate(run.requests["prompt_len"].to_pylist())]
    ours, _ = simulated(run, sent_of(run, own), calibrated, tmp_path, {})
    moments = replayed.timestamps
    theirs = figures({"ttft": moments.ttft_s, "tpot": moments.tpot_s, "e2el": moments.e2el_s})
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert live_figures(sent_of(run, own)) == pytest.approx(theirs, rel=1e-6)


def test_times_are_those_of_the_moment_on_a_machine_that_changes_its_speed(
    make_live_run, calibrated, tmp_path
):
    """Half as fast after the last arrival, to which the clock's mean of a long run says nothing."""
    run, _ = make_live_run("colocated", seed=4)
    own = [[i] * n for i, n in enumerate(run.requests["prompt_len"].to_pylist())]
    sent = sent_of(run, own)
    begin = float(np.min(run.requests["sent_s"].to_numpy()))
    slow = Clock(np.array([begin - 1, begin + 1e4, begin + 2e4]), np.array([2.0, 2.0, 1.0]))
    alone = sent.requests.slice(0, 1)  # of several, queues differ
    one = replace(
        sent, load=Load(sent.load.info, sent.load.requests[:1]), requests=alone, contexts=own[:1]
    )
    plain, _ = simulated(run, one, calibrated, tmp_path, {})
    late, _ = simulated(run, replace(one, clock=slow), calibrated, tmp_path, {})
    assert late["tpot p50"] == pytest.approx(2 * plain["tpot p50"], rel=1e-6)


def test_a_closed_loop_sends_a_way_after_an_end(make_live_run, calibrated):
    """On engines half as fast, too: each request behind the one whose seat it took."""
    run, _ = make_live_run("colocated", seed=4, n=12)
    column = run.requests.column_names.index("token_s")
    ends = pa.array([[float(i)] for i in range(12)])
    run = replace(run, requests=run.requests.set_column(column, "token_s", ends))
    lengths = run.requests["prompt_len"].to_numpy()
    sent = replace(sent_of(run, [[i] * n for i, n in enumerate(lengths)]), max_concurrency=3)
    way = calibrated["calibrated"].info
    for slowness in (1.0, 2.0):
        clock = Clock(np.array([-1e4, 1e4]), np.array([slowness, slowness]))
        again = replay(
            replace(sent, clock=clock), {}, engine=run.info.engines[0],
            max_model_len=run.info.max_model_len, trace=run.trace.path, **calibrated,
        )  # fmt: skip
        requests = again.record.requests[again.rows]
        gaps = requests["sent_s"][3:] - requests["finish_s"][:-3]
        assert gaps == pytest.approx(way.ingress_s.of(lengths[3:]) + way.egress_s, rel=1e-6)


def test_prompts_share_the_blocks_whose_tokens_are_equal(make_live_run, calibrated, tmp_path):
    """Far apart, each finds what those before it have in common with it, but for its last token."""
    run, _ = make_live_run("colocated", seed=4, n=12)
    lengths = run.requests["prompt_len"].to_pylist()
    own = [[0] * min(n, 20) + [i] * max(0, n - 20) for i, n in enumerate(lengths)]
    apart = run.requests.set_column(
        run.requests.column_names.index("sent_s"), "sent_s", [np.arange(12) * 100.0]
    )
    sent = replace(sent_of(run, own), requests=apart)
    _, summary = simulated(run, sent, calibrated, tmp_path, {"enable_prefix_caching": True})
    hits, size = 0, run.info.engines[0].block_size
    for i, tokens in enumerate(own):
        common = [next((j for j, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b),
                       min(len(tokens), len(other))) for other in own[:i]]  # fmt: skip
        hits += min(max(common, default=0), len(tokens) - 1) // size * size
    assert summary["prefix_cache_hits"] == hits > 0
    assert summary["prefix_cache_queries"] == sum(lengths)


def test_the_page_says_error_and_noise_and_what_was_counted():
    live = [{f"{n} p{q}": 10.0 + r for n, q in feature_check.features.FIGURES} for r in (0.0, 2.0)]
    ours = [dict.fromkeys(live[0], 12.1)] * 2
    found = feature_check._errors(live, ours)
    tpot = found["tpot p50"]
    assert tpot["noise_percent"] == pytest.approx(100 * 2 / 11)
    assert tpot["abs_error_percent"] == pytest.approx((21 + 100 * 0.1 / 12) / 2)
    assert tpot["verdict"] == "within the noise"
    assert found["e2el p50"].get("verdict") is None
    row = {"feature": "prefix-cache", "load": "shared prefixes", "machine": {"cores": "2"},
           "versions": {"vllm": "0"}, "doubts": ["moe spreads"],
           "without": {"figures": found, "counters": {}}}  # fmt: skip
    counted = {"prefix_cache_hits": {"live": [128.0, 128.0], "simulated": [128.0, 256.0]}}
    row["with"] = {"figures": found, "counters": counted}
    text = feature_check.page([row])
    assert "| prefix-cache | prefix_cache_hits | 128, 128 | 128, 256 |" in text
    assert "not to be trusted**: moe spreads." in text
    assert "11.0, 12.1: +10.0% +- 18.2" in text
    assert set(FEATURES) >= {"prefix-cache", "async-scheduling", "defaults", "synthetic-drafts"}


def test_drafts_are_accepted_with_the_prescribed_rates_on_a_cpu():
    """The kernel accepts a draft whose probability is not below the draw."""
    torch = pytest.importorskip("torch")
    from eldr_sim.validation.live.engines.plugin import accepting

    n, k = 4000, 3
    ends = torch.arange(k, (n + 1) * k, k, dtype=torch.int32)
    drafts = torch.randint(0, 50, (n * k,), dtype=torch.int32)
    drafts[1::3][:1000] = -1  # no draft there
    draws = torch.rand(n * k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rates = torch.tensor([0.8, 0.75, 0.5])
    target, limit = accepting(ends, drafts, draws, rates, 50)
    at = torch.arange(n * k), drafts.clamp(min=0).to(torch.int64)
    accepted = (target[at] >= limit).view(n, k).to(torch.float64)
    assert not accepted[:1000, 1].any()
    for place, rate in enumerate(rates.tolist()):
        share = float(accepted[1000:, place].mean())
        assert abs(share - rate) < 4 * (rate * (1 - rate) / 3000) ** 0.5
