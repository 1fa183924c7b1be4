"""Drafts that decode steps verify: acceptance, tokens, costs and memory by closed forms."""

from itertools import product

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.acceptance import rates_of_length, shipped, spent
from eldr_sim.simulator.run import simulate, simulate_summary
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare

from ..on_each import on_each

RUN = {
    "trace": "reference-moe", "topology": "2C", "num_requests": 60, "request_rate": "inf",
    "output_len": 60, "input_len": 100,
}  # fmt: skip


def drafts(k=3, method="mtp", **more):
    """Return the fields of a configuration that drafts."""
    return {"method": method, "num_speculative_tokens": k} | more


def run(config, **fields):
    return simulate(make_config(RUN | fields | {"speculative_config": config}))


# -- acceptance ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "k"), [(1.0, 3), (1.86, 3), (2.41, 3), (3.999, 3), (4.06, 8)])
def test_rates_make_their_length(length, k):
    rates = rates_of_length(length, k)
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)
    given = np.array(rates[1:]) / np.maximum(rates[:-1], 1e-300)
    if length > 1:
        assert given == pytest.approx(rates[0], rel=1e-9)


@pytest.mark.parametrize(("length", "k"), [(1.0, 3), (1.86, 3), (3.2, 3), (4.0, 3), (4.06, 8)])
def test_a_length_is_spent_in_shares_that_do_not_rise(length, k):
    rates = spent(length, k)
    assert 1 + sum(rates) == pytest.approx(length)
    assert all(0 <= rate <= 1 for rate in rates)
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(0 < rate < 1 for rate in rates) <= 1


def test_shipped_acceptances_are_those_of_their_sources():
    assert shipped(None, "GPT-OSS-20B", "eagle3", 3).rates == (0.717, 0.512, 0.334)
    assert shipped("glm-5.2", "", "mtp", 8).length == pytest.approx(4.06)
    taken = shipped("qwen3-30b-a3b-eagle3", "", "eagle3", 2)
    assert taken.rates == shipped("qwen3-30b-a3b-eagle3", "", "eagle3", 3).rates[:2]


def test_an_acceptance_of_other_numbers_of_drafts_is_a_lower_bound_and_says_so():
    longer = shipped(None, "GPT-OSS-20B", "eagle3", 4)
    assert longer.rates[3] == 0.0
    assert "no draft after the 3th is known" in longer.source
    between = shipped("deepseek-v3-mtp", "", "mtp", 3)  # published: 1.87 with 1, 3.2 with 7
    assert between.length == pytest.approx(1.87 + (3.2 - 1.87) * 2 / 6)
    assert "2.31 with 3 drafts, on the line between those of 1 and 7" in between.source
    beyond = shipped("qwen3-30b-a3b-eagle3", "", "eagle3", 7)
    assert beyond.length == pytest.approx(1.86)
    assert "known up to 3 drafts" in beyond.source
    first = shipped("qwen3-30b-a3b-eagle3", "", "eagle3", 1)
    assert "known from 3 drafts on: the first 1 of them" in first.source
    assert "on the line" not in shipped("glm-5.2", "", "mtp", 5).source


def test_counters_are_those_of_the_rates():
    """Dynamo's mocker: 0.85, then 0.3 of these, then none: 2.105 tokens a step."""
    rates = [0.85, 0.255, 0.0, 0.0, 0.0]
    result = run(drafts(5, synthetic_acceptance_rates=rates), output_len=400, num_requests=100)
    told = result.summary["speculative_decoding"]
    n = told["spec_decode_num_drafts"]
    for rate, accepted in zip(rates, told["spec_decode_num_accepted_tokens_per_pos"], strict=True):
        assert abs(accepted / n - rate) <= 3 * np.sqrt(rate * (1 - rate) / n)
    assert told["spec_decode_num_draft_tokens"] == 5 * n
    sigma = np.sqrt(0.15 * 0 + 0.595 * 1 + 0.255 * 4 - 1.105**2) / np.sqrt(n)
    assert abs(result.summary["acceptance_length"] - 2.105) <= 3 * sigma


def test_every_policy_meets_the_same_acceptances():
    """INV-16."""
    config = drafts(synthetic_acceptance_rates=[0.7, 0.5, 0.2])
    by_policy = [run(config, policy=name).record.drafted for name in ("jsq", "round_robin")]
    assert by_policy[0].tolist() == by_policy[1].tolist()
    other = run(config, policy="jsq", seed=1).record.drafted
    assert by_policy[0].tolist() != other.tolist()


# -- tokens and steps ---------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "steps"), [(4.0, 1 + -(-59 // 4)), (1.0, 60)])
def test_all_or_none_accepted(length, steps):
    """The first step has no drafts; then all are accepted, or none, which computes as many."""
    result = run(drafts(synthetic_acceptance_length=length), num_requests=1, topology="1C")
    log = result.record.decode_steps
    log = log[log["sequences"] > 0]
    assert len(log) == steps
    assert log["tokens"].tolist() == [1] + [4] * (steps - 1)
    assert log["outputs"].sum() == 60
    assert result.summary["tokens_per_step"] == pytest.approx(60 / steps)
    gaps = (log["end"] - log["start"])[1:]
    assert result.summary["mean_itl_ms"] == pytest.approx(1e3 * gaps.sum() / 59)
    assert result.summary["mean_tpot_ms"] == pytest.approx(1e3 * gaps.sum() / 59)
    if length == 4.0:
        assert result.summary["median_itl_ms"] == 0.0  # three of four tokens come with another


@pytest.mark.parametrize(
    ("output_len", "length", "fields", "steps"),
    [(60, 4.0, {}, 2), (58, 4.0, {}, 0), (60, 1.0, {}, 0),
     (60, 4.0, {"async_scheduling": False}, 0), (60, 4.0, {"engine": "sglang"}, 0)],
)  # fmt: skip
def test_who_ends_by_its_drafts_rides_one_more_step(output_len, length, fields, steps):
    """As 1 + 14 x 4 + 3 tokens, where the last step might have given one; vLLM alone. The third
    request ends the run."""
    config = drafts(synthetic_acceptance_length=length)
    result = run(config, topology="1C", num_requests=3, request_rate=0.5, output_len=output_len,
                 **fields)  # fmt: skip
    log = result.record.decode_steps
    more = log[(log["sequences"] == 0) & (log["tokens"] > 0)]
    assert more["tokens"].tolist() == [4] * steps
    assert more["outputs"].tolist() == [0] * steps
    ends = result.record.requests["finish_s"][:2].tolist()
    assert more["start"].tolist() == ends[:steps]
    before = log[np.isin(log["end"], ends)]
    assert steps == 0 or (more["end"] - more["start"]) == pytest.approx(
        before["end"] - before["start"], rel=0.2
    )


def test_a_joining_request_is_padded_on_a_decode_worker():
    result = run(drafts(synthetic_acceptance_length=4.0), topology="1P1D", num_requests=1)
    log = result.record.decode_steps
    assert log["tokens"].tolist() == [4] * len(log)
    assert log["outputs"].tolist() == [1] + [4] * 14 + [3]
    looked_up = run(drafts(method="ngram", synthetic_acceptance_length=4.0), topology="1P1D",
                    num_requests=1)  # fmt: skip
    assert looked_up.record.decode_steps["tokens"][0] == 4  # vLLM pads whatever drafts


@pytest.mark.parametrize(
    ("method", "topology", "engine", "lost"),
    [("mtp", "1P1D", "vllm", 1), ("eagle3", "1P1D", "vllm", 1), ("ngram", "1P1D", "vllm", 0),
     ("mtp", "1C", "vllm", 0), ("mtp", "1P1D", "sglang", 0)],
)  # fmt: skip
def test_a_head_behind_a_connector_computes_the_last_cached_block_again(
    method, topology, engine, lost
):
    """vLLM's ``use_eagle_block_drop``: 5 of 6 blocks of the shared prefix are found."""
    told = drafts(method=method, synthetic_acceptance_length=2.0)
    config = make_config(RUN | {"topology": topology, "engine": engine, "prefix_len": 96,
                                "speculative_config": told, "num_requests": 9,
                                "block_size": 16})  # fmt: skip
    cached = simulate(config).record.requests["cached_tokens"]
    assert set(cached.tolist()) <= {0, 96 - 16 * lost}
    assert max(cached) == 96 - 16 * lost


def test_tokens_and_blocks_are_conserved_when_blocks_are_short():
    """INV-3: Preemption, rejected drafts and lookahead slots lose no token and no block."""
    config = drafts(synthetic_acceptance_rates=[0.7, 0.5, 0.2])
    result = run(config, num_gpu_blocks_override=60, block_size=8, max_num_seqs=16)
    requests = result.record.requests
    assert result.record.completed.all()
    assert requests["preemptions"].sum() > 0
    assert result.record.decode_steps["outputs"].sum() == requests["output_len"].sum()


def test_no_drafts_are_a_plain_run():
    plain = run(None)
    none = run(drafts(0))
    by_batch = run(drafts(2, acceptance="glm-5.2",
                          num_speculative_tokens_per_batch_size=[[1, 9999, 0]]))  # fmt: skip
    for other in (none, by_batch):
        for name in ("start", "end", "tokens", "outputs", "active"):
            ours, theirs = (r.record.decode_steps[name] for r in (other, plain))
            assert ours.tolist() == theirs.tolist()
    assert "speculative_decoding" not in none.summary


def test_drafts_by_batch():
    ranges = [[1, 4, 3], [5, 8, 1], [9, 64, 0]]
    config = drafts(acceptance="glm-5.2", num_speculative_tokens_per_batch_size=ranges)
    result = run(config, topology="1C", max_num_seqs=12, random_range_ratio=0.5,
                 async_scheduling=False)  # fmt: skip
    log = result.record.decode_steps
    before, now = log[:-1], log[1:]
    steady = (now["joined"] == 0) & (now["sequences"] > 0)
    for first, last, k in ranges:
        at = steady & (before["sequences"] >= first) & (before["sequences"] <= last)
        assert at.any()
        assert (now["tokens"][at] == now["sequences"][at] * (1 + k)).all()


# -- costs, memory, groups ----------------------------------------------------------------------


def test_a_look_up_finds_drafts_before_some_steps_only():
    """As many verify steps as the rate says, and no token fewer: what is not drafted is a step."""
    rates, k = [0.7, 0.5, 0.2], 3
    config = drafts(k, method="ngram", synthetic_acceptance_rates=rates, lookup_hit_rate=0.4)
    result = run(config, output_len=400, num_requests=100)
    counted = result.summary["speculative_decoding"]
    verified, accepted = (
        counted[f"spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens")
    )
    steps = 100 * 399 - accepted  # each yields a token, and what it accepts
    # The first step of a request verifies none; the last may accept more than it needs.
    assert verified / steps == pytest.approx(0.4, abs=4 * (0.24 / steps) ** 0.5 + 0.004)
    assert accepted / verified == pytest.approx(sum(rates), rel=0.02)
    assert counted["lookup_hit_rate"] == 0.4
    always = run(config | {"lookup_hit_rate": 1.0}, output_len=400, num_requests=100)
    plain = run(None, output_len=400, num_requests=100)
    means = [each.summary["tokens_per_step"] for each in (plain, result, always)]
    assert means == sorted(means)
    assert means[1] == pytest.approx(1 + 0.4 * sum(rates), rel=0.02)


@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3", "draft_model", "ngram"])
def test_drafts_are_never_free(method):
    model = {"model": "Llama-3.1-8B"} if method == "draft_model" else {}
    config = drafts(method=method, synthetic_acceptance_length=2.0, **model)
    result = run(config, num_requests=8, tensor_parallel_size=2 if model else 1)
    assert 0.02 < result.summary["draft_time_share"] < 0.8
    provenance = result.summary["provenance"]
    assert provenance["draft_host"]["label"] == "derived"
    assert ("draft" in provenance) == (method != "ngram")
    assert any("look-up" in line for line in result.summary["latency_warnings"]) == (
        method == "ngram"
    )


def test_a_draft_pass_is_what_its_layers_take():
    """One sequence, one draft: the step less the plain parts is one pass of one layer."""
    fields = {"topology": "1C", "num_requests": 1}
    slow, fast = (
        run(drafts(1, synthetic_acceptance_length=1.0, draft_host_ms=ms), **fields)
        for ms in (1.0, 0.25)
    )
    difference = slow.record.decode_steps["draft_s"] - fast.record.decode_steps["draft_s"]
    assert difference == pytest.approx(0.75e-3)
    each = run(
        drafts(1, synthetic_acceptance_length=1.0, draft_host_ms=0.25, draft_host_ms_per_request=2),
        **fields,
    )
    difference = each.record.decode_steps["draft_s"] - fast.record.decode_steps["draft_s"]
    assert difference == pytest.approx(2e-3 * (each.record.decode_steps["sequences"] > 0))


def test_drafts_take_memory():
    config = RUN | {"topology": "1P1D"}
    plain = prepare(make_config(config)).spec.decode
    drafting = prepare(
        make_config(config | {"speculative_config": drafts(acceptance="glm-5.2")})
    ).spec.decode
    draft, model = drafting.speculation.draft, drafting.step_time.model
    assert draft.kv_bytes_per_token * model.n_layers == model.kv_bytes_per_token
    left = plain.n_blocks * 16 * model.kv_bytes_per_token - draft.weight_bytes
    per_block = 16 * (model.kv_bytes_per_token + draft.kv_bytes_per_token)
    assert abs(drafting.n_blocks - left / per_block) <= 2


def test_attention_by_row_takes_longer():
    fields = {"topology": "1C", "num_requests": 8, "input_len": 2000}
    by_row, by_batch = (
        run(drafts(synthetic_acceptance_length=2.0, verify_attention=way), **fields).summary
        for way in ("rows", "batch")
    )
    assert by_row["mean_tpot_ms"] > by_batch["mean_tpot_ms"]
    assert by_row["speculative_decoding"]["verify_attention"] == "rows"


def test_groups_dispatch_all_tokens_of_a_verify_step():
    group = {"data_parallel_size": 4, "enable_expert_parallel": True, "topology": "1P1D"}
    result = run(drafts(synthetic_acceptance_rates=[0.7, 0.5, 0.2]), **group)
    log, groups = result.record.decode_steps, result.record.decode_group_steps
    model = prepare(make_config(RUN | group)).model
    first = np.cumsum(groups["n_busy"]) - groups["n_busy"]
    tokens = np.add.reduceat(log["tokens"] + log["chunk_tokens"], first)
    assert groups["pairs"].tolist() == (tokens * model.top_k * model.n_moe_layers).tolist()
    assert (log["draft_s"][log["sequences"] > 0] > 3e-3 * 0.66).all()
    assert result.record.completed.all()
    assert log["outputs"].sum() == result.record.requests["output_len"].sum()


def test_a_dense_model_drafts():
    fields = {"trace": None, "model": "Llama-3.1-8B", "topology": "1C", "num_requests": 4}
    plain = simulate_summary(make_config(RUN | fields))
    summary = run(drafts(method="eagle3"), **fields).summary
    assert summary["verify_experts_over_plain"] is None
    assert summary["acceptance_length"] == pytest.approx(2.606, abs=0.4)
    assert summary["mean_tpot_ms"] < plain["mean_tpot_ms"]


# -- what is refused ----------------------------------------------------------------------------


@on_each(
    "fields, message",
    [
        (drafts(), "no published acceptance rates of mtp for Qwen3-30B-A3B"),
        (drafts(acceptance="best"), "unknown acceptance 'best'"),
        (drafts(synthetic_acceptance_rates=[0.5]), r"\[0.5\] for 3 drafts"),
        (drafts(synthetic_acceptance_rates=[0.5, 0.6, 0.1]), "that do not rise"),
        (drafts(synthetic_acceptance_length=4.5), "1 to 4"),
        (drafts(synthetic_acceptance_length=2, acceptance="glm-5.2"), "given twice"),
        (drafts(num_speculative_tokens_per_batch_size=[[2, 9, 1]]), "sequences 1 and more"),
        (drafts(method="draft_model"), "a draft_model's, or a head"),
        (drafts(method="draft_model", model="Mixtral-8x7B", acceptance="glm-5.2"), "dense model"),
        (drafts(method="medusa"), "speculative_config.method"),
        (drafts(lookup_hit_rate=0.5, acceptance="glm-5.2"), "lookup_hit_rate: 0.5 for mtp"),
        (drafts(33), "num_speculative_tokens"),
        ("{", "not valid JSON"),
        ("3", "'3'"),
    ],
)
def test_bad_input(fields, message):
    if message == "'3'":
        message = "speculative_config: 3"
    with pytest.raises(InputError, match=message):
        run(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 128}, "64 of 4 tokens each"),
        ({"topology": "1P", "output_len": None}, "there is nothing to draft"),
        ({"trace": None, "model": "Llama-3.1-8B"}, "no multi-token-prediction layer"),
    ],
)
def test_runs_that_cannot_draft(fields, message):
    with pytest.raises(InputError, match=message):
        run(drafts(acceptance="glm-5.2"), **fields)


# -- other spellings, trees, domains, files, alternatives -----------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2,
             "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3},
            ("mtp", 2, 2, 1),
        ),
        (
            {"--speculative-algorithm": "EAGLE3", "speculative-num-steps": 3,
             "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 16},
            ("eagle3", 15, 3, 4),
        ),
        ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}, ("mtp", 3, 3, 1)),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}, ("ngram", 7, 7, 1)),
        ({"speculative_algorithm": "NGRAM"}, ("ngram", 11, 11, 1)),
        ({"speculative_algorithm": "EAGLE"}, ("mtp", 3, 3, 1)),
        ({"decoding_type": "MTP", "num_nextn_predict_layers": 3}, ("mtp", 3, 3, 1)),
        ({"decoding_type": "Eagle", "max_draft_len": 4}, ("eagle3", 4, 4, 1)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, ("mtp", 1, 1, 1)),
        ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, ("mtp", 2, 2, 1)),
    ],
)  # fmt: skip
def test_other_engines_spellings(theirs, ours):
    names = {name.removeprefix("--"): value for name, value in theirs.items()}
    drafting = make_config(RUN | {"speculative_config": names}).steps.speculative_config
    assert (drafting.method, drafting.num_speculative_tokens, drafting.depth,
            drafting.eagle_topk) == ours  # fmt: skip


def sglangs_tokens(steps, topk, tokens):
    """Return what SGLang verifies of a sequence in a step; None where it does not start, or the
    best drafts of its tree may leave out all of the last pass."""
    if (steps, topk, tokens) == (None, None, None):
        return 4
    if steps is None:
        return None
    if topk in (None, 1):
        return steps + 1
    drafted = topk + (steps - 1) * topk * topk
    return tokens if tokens and steps < tokens <= drafted + 1 else None


def test_sglangs_numbers_are_the_tokens_that_it_verifies(n_cases):
    """Whatever a line gives of passes, branches and tokens: as many tokens are verified, and as
    many accepted, as by SGLang, and what it does not start with is refused by name."""
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    cases = list(product((None, 2, 3, 5), (None, 1, 2, 4), (None, 4, 6, 8)))
    for case in cases:
        words = {f"speculative_{n}": v for n, v in zip(names, case, strict=True) if v is not None}
        fields = RUN | {"speculative_config": {"speculative_algorithm": "EAGLE3"} | words}
        if (tokens := sglangs_tokens(*case)) is None:
            with pytest.raises(InputError, match=r"num_steps|num_draft_tokens: missing"):
                make_config(fields)
            continue
        ours = make_config(fields).steps.speculative_config
        assert (ours.num_speculative_tokens + 1, ours.depth) == (tokens, case[0] or 3), case
    n_cases(len(cases), fixed=True)


def test_sglang_runs_48_requests_where_it_speculates():
    fields = RUN | {"engine": "sglang", "topology": "1C"}
    config = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": None}
    config["synthetic_acceptance_length"] = 2.0
    asked = ({}, {"speculative_config": config}, {"speculative_config": config, "max_num_seqs": 96})
    made = [prepare(make_config(fields | more)).spec.decode for more in asked]
    assert [engine.max_num_seqs for engine in made] == [2048, 48, 96]


def test_a_tree_accepts_as_many_as_its_passes():
    """All rows are verified, at most a path is accepted, and branches activate more experts."""
    fields = {"num_requests": 1, "topology": "1C", "output_len": 300}
    tree = {"method": "eagle3", "num_speculative_tokens": 8, "num_steps": 3, "eagle_topk": 4}
    wide, chain = (
        run(config | {"synthetic_acceptance_length": 4.0}, **fields)
        for config in (tree, drafts(method="eagle3"))
    )
    log = wide.record.decode_steps
    log = log[log["sequences"] > 0]
    assert log["tokens"].tolist()[1:] == [9] * (len(log) - 1)
    assert set(log["outputs"].tolist()[1:-1]) == {4}
    assert log["outputs"].tolist() == chain.record.decode_steps["outputs"][-len(log) :].tolist()
    more, less = (r.summary["verify_experts_over_plain"] for r in (wide, chain))
    assert more > 1.2 * less
    group = {"data_parallel_size": 2, "enable_expert_parallel": True, "topology": "1P1D"}
    shared = run(tree | {"synthetic_acceptance_length": 2.0}, **group, num_requests=20)
    assert shared.record.decode_steps["outputs"].sum() == 20 * 60


def test_alternatives_for_rejected_drafts_change_experts_alone():
    """Acceptances are the same, and the union grows from no other experts to any request's."""
    config = drafts(synthetic_acceptance_rates=[0.7, 0.5, 0.3])
    fields = {"max_concurrency": 1, "topology": "1C", "num_requests": 8, "trace": "gpt-oss-20b",
              "model": "GPT-OSS-20B"}  # fmt: skip
    over, counters = {}, []
    for choice in ("none", "next", "place", "request"):
        result = run(config | {"rejected_experts": choice}, **fields)
        over[choice] = result.summary["verify_experts_over_plain"]
        counters.append(result.record.drafted.tolist())
        told = result.summary["speculative_decoding"]["rejected_drafts_experts"]
        assert told.startswith("those of")
    assert counters == [counters[0]] * 4
    assert over["none"] < over["next"] < over["place"] < over["request"]
    everything = drafts(synthetic_acceptance_length=4.0)
    same = {
        run(everything | {"rejected_experts": choice}, **fields).summary["mean_tpot_ms"]
        for choice in ("none", "next", "request")
    }
    assert len(same) == 1  # nothing is rejected


def test_acceptance_by_domain():
    config = drafts(1, acceptance={"code": "mtp-code", "other": 1.5})
    result = run(config, num_requests=200, domain_mix={"code": 1, "math": 1})
    told = result.summary["speculative_decoding"]
    rates = told["acceptance_rates"]
    assert (rates["code"], rates["math"]) == ([0.91], [pytest.approx(0.5)])
    code = int((result.record.requests["domain"] == list(rates).index("code")).sum())
    steps = {0.91: code * 59 / 1.91, 0.5: (200 - code) * 59 / 1.5}
    expected = sum(rate * n for rate, n in steps.items()) / sum(steps.values())
    share = told["spec_decode_num_accepted_tokens"] / told["spec_decode_num_drafts"]
    assert 0 < code < 200
    assert share == pytest.approx(expected, abs=0.02)
    with pytest.raises(InputError, match="no domain cod"):
        run(drafts(1, acceptance={"cod": 1.5}))
    with pytest.raises(InputError, match="no value for"):
        run(drafts(1, acceptance={"code": 1.5}), domain_mix={"code": 1, "math": 1})


VLLM = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 200.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 8e1
vllm:spec_decode_num_accepted_tokens_per_pos_created{position="1"} 1.7e9
"""
SGLANG = 'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:spec_accept_rate{tp_rank="0"} 0.5\n'
BENCH = '{"spec_decode_num_drafts": 5, "spec_decode_per_position_acceptance_rates": [1.0, 0.6]}'


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        (VLLM, (0.8, 0.4, 0.0)),
        (BENCH, (1.0, 0.6, 0.0)),
        (SGLANG, rates_of_length(2.5, 3)),
        ('{"accept_length": 2.5}', rates_of_length(2.5, 3)),
        (
            '{"spec_decode_acceptance_length": 2.5, "spec_decode_draft_tokens": 20, '
            '"spec_decode_num_drafts": 10}',
            (*rates_of_length(2.5, 2), 0.0),
        ),
    ],
)
def test_a_users_own_acceptance(tmp_path, text, rates):
    (tmp_path / "metrics.txt").write_text(text)
    config = drafts(acceptance=str(tmp_path / "metrics.txt"))
    drafting = prepare(make_config(RUN | {"speculative_config": config})).spec.decode.speculation
    assert drafting.acceptances[""].rates == pytest.approx(rates)
    over = RUN | {"acceptance": config["acceptance"], "speculative_config": drafts()}
    drafting = prepare(make_config(over)).spec.decode.speculation
    assert drafting.acceptances[""].rates == pytest.approx(rates)
    with pytest.raises(InputError, match="there is no speculative decoding"):
        run(None, acceptance="glm-5.2")
    (tmp_path / "none.txt").write_text("vllm:num_requests_running 3\n")
    with pytest.raises(InputError, match="no accepted drafts"):
        run(drafts(acceptance=str(tmp_path / "none.txt")))
    name = "vllm:spec_decode_num_"
    place = name + 'accepted_tokens_per_pos_total{position="0"}'
    for text in (f"{name}drafts_total -4\n{place} 5\n", f"{name}drafts_total 4\n{place} 5\n",
                 '{"acceptance_rates": [0.5, 0.7]}', '{"acceptance_rates": "most"}',
                 '{"accept_length": "two"}', '{"accept_length": -3}',
                 '{"accept_length": 9}'):  # fmt: skip
        (tmp_path / "none.txt").write_text(text)
        with pytest.raises(InputError, match=r"no figures of acceptance|a mean length of"):
            run(drafts(acceptance=str(tmp_path / "none.txt")))


def test_a_pool_drafts_by_itself():
    fields = {"topology": "1P1D", "num_requests": 8}
    config = {"speculative_config": drafts(synthetic_acceptance_length=2.0)}
    own = simulate(make_config(RUN | fields | {"decode": config}))
    assert own.summary["acceptance_length"] == pytest.approx(2.0)  # one draft, always
    both = run(config["speculative_config"], **fields)
    assert own.record.drafted.tolist() == both.record.drafted.tolist()
    spec = prepare(make_config(RUN | fields | {"decode": config})).spec
    assert spec.prefill.speculation is None


def test_a_synthetic_length_is_spent_on_the_first_drafts():
    """As vLLM: 2.4 of four tokens are one draft always, the second in 40% of the steps."""
    result = run(drafts(synthetic_acceptance_length=2.4), num_requests=100, output_len=200)
    told = result.summary["speculative_decoding"]
    assert told["acceptance_rates"] == pytest.approx([1.0, 0.4, 0.0])
    assert told["spec_decode_num_accepted_tokens_per_pos"][0] == told["spec_decode_num_drafts"]


def test_pools_may_draft_differently():
    """Two decode pools of two and three drafts, and one that drafts nothing, behind one router."""
    first, second = ({"workers": 1, "speculative_config": drafts(k, synthetic_acceptance_length=k)}
                     for k in (2, 3))  # fmt: skip
    pools = {"p": {"workers": 1, "then": ["plain", "a", "b"]}, "plain": {"workers": 1}}
    topology = pools | {"a": first, "b": second}
    summary = run(None, topology=topology, num_requests=30).summary
    told = summary["speculative_decoding"]
    assert [summary["pools"][name].get("drafts") for name in topology] == [None, None, 2, 3]
    by_place = told["spec_decode_num_accepted_tokens_per_pos"]
    steps = told["spec_decode_num_drafts"]  # each accepts its first draft, and "b" its second
    assert by_place[0] == steps > by_place[1] > 0 == by_place[2]
    assert told["spec_decode_num_draft_tokens"] == 2 * (steps - by_place[1]) + 3 * by_place[1]
    assert summary["acceptance_length"] == pytest.approx(1 + sum(by_place) / steps)
