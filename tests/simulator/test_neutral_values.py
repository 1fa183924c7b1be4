"""An option whose value changes nothing changes nothing: every byte of a result stays equal."""

import itertools
import json
import random

from bounds import draw, run

from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config

from ..on_each import on_each

BASE = {
    "trace": "reference-moe", "topology": "1P2D", "policy": "jsq", "num_requests": 40,
    "request_rate": 80, "output_len": 20, "input_len": 200, "warmup": 0,
}  # fmt: skip
CO_LOCATED = {"topology": "2C"}
SGLANG = {"engine": "sglang"}
#: Values that change nothing, with the fields of the run beside them.
NEUTRAL = [
    ({}, {"max_concurrency": 100_000}),
    ({}, {"price_per_gpu_hour": 3.0}),
    ({}, {"goodput": {"e2el": 1e9}}),
    ({}, {"burstiness": 1.0}),
    ({}, {"kv_signal": "exact"}),
    ({}, {"max_retries": 5}),
    ({}, {"gpu_memory_utilization": 0.92}),
    ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}),
    ({}, {"speculative_config": {"method": "suffix", "num_speculative_tokens": 0}}),
    ({}, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 0}}),
    (CO_LOCATED, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}),
    (SGLANG | CO_LOCATED, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 0}}),
    ({}, {"conditional_disagg": "noncached:0"}),
    (SGLANG, {"conditional_disagg": "noncached:0"}),
    (SGLANG, {"conditional_disagg": "isl_bounding:0,0.7"}),
    (SGLANG, {"kv_reserve": "arrival"}),
    (SGLANG, {"schedule_conservativeness": 1.0}),
    ({}, {"kv_reserve": "prompt_end"}),
    ({}, {"fail": ("decode:0@100000s+1s",)}),
    ({}, {"autoscale": "none:n=1,2"}),
    ({}, {"num_redundant_experts": 0}),
    ({}, {"prefix_len": 0}),
    ({}, {"random_range_ratio": 0.0}),
]
#: Figures of what was asked for, and those that only the neutral option has.
_OWN = {
    "max_concurrency", "cost_per_million_output_tokens", "request_goodput", "slo_attainment",
    "slo_attainment_by_metric", "faults", "scaling", "without_effect", "speculative_decoding",
    "latency_warnings",
}  # fmt: skip


def _outcome(fields):
    result = simulate(make_config(BASE | fields))
    return result.requests, result.steps, _figures(result)


def _figures(result):
    figures = {name: of for name, of in result.summary.items() if name not in _OWN}
    return json.dumps(figures, sort_keys=True)


@on_each("beside, neutral", NEUTRAL)
def test_a_neutral_value_changes_nothing(beside, neutral, n_cases):
    """INV-11."""
    n_cases(1, fixed=True)
    requests, *rest = _outcome(beside)
    others, *other_rest = _outcome(beside | neutral)
    assert requests == others.select(requests.column_names)  # faults add a column
    assert rest == other_rest


#: Those of any cluster that does not have the field, nor one of these.
ANYWHERE = [
    ({"max_concurrency": 100_000}, {"sessions", "load", "max_active_sessions"}),
    ({"price_per_gpu_hour": 3.0}, set()),
    ({"goodput": {"e2el": 1e9}}, set()),
    ({"max_retries": 5}, {"fail", "events"}),
    ({"user_retry_s": 5.0}, {"fail", "events"}),
    ({"fail": ("decode:0@100000s+1s",)}, {"autoscale", "events", "width_pause"}),
    ({"num_redundant_experts": 0}, set()),
    ({"prefix_len": 0}, set()),
    ({"random_range_ratio": 0.0}, set()),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, set()),
    ({"conditional_disagg": "noncached:0"}, set()),
]


def test_neutral_values_change_no_random_cluster(n_cases):
    """INV-11, on clusters of `bounds`: whatever else is given."""
    changed, equal, rng, n = [], 0, random.Random(7), n_cases(10)
    seeds = itertools.count()
    while equal + len(changed) < n:
        seed = next(seeds)
        fields = draw(seed)
        _, before = run(fields)
        known = fields.keys()
        fit = [of for of, no in ANYWHERE if not known & (of.keys() | no)]
        neutral = rng.choice(fit)
        if before is None:
            continue
        both = fields | neutral
        _, after = run(both)
        if after is None or not neutral.keys() <= both.keys():  # refused beside these
            continue
        figures = [
            (one.requests.select(before.requests.column_names), one.steps, _figures(one))
            for one in (before, after)
        ]
        if figures[0] == figures[1]:
            equal += 1
        else:
            changed.append((seed, neutral))
    assert changed == []


def test_sglang_says_that_it_reserves_late_where_decode_workers_compute_prompts():
    told = make_config(BASE | SGLANG | {"conditional_disagg": "noncached:64"})
    (warning,) = [w for w in simulate(told).summary["latency_warnings"] if "kv-reserve" in w]
    assert "--conditional-disagg" in warning
    given = told.replace(kv_reserve="prompt_end")
    assert not [w for w in simulate(given).summary["latency_warnings"] if "kv-reserve" in w]
