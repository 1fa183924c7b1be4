"""Routers that know caches: their rules by hand, and what must hold of any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.policies.base import PolicyContext, RequestInfo, Workers
from eldr_sim.policies.registry import decode_policy, prefill_policy
from eldr_sim.policies.routing.seconds import PromptSeconds, SecondsPolicy, prompt_s
from eldr_sim.simulator.run import simulate
from eldr_sim.simulator.setup.config.run_config import make_config
from eldr_sim.simulator.setup.prepare import prepare

from ..on_each import on_each

AWARE = ("dynamo_kv", "lmetric", "llmd", "cache_aware", "preble", "load_aware", "session")
CHAT = {
    "trace": "reference-moe", "workload": "chat", "sessions": 12, "policy": "jsq", "turns": "4",
    "think_time": "exponential:2", "new_tokens": "90", "output_len": 40, "prefix_len": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def cost():
    return prepare(make_config({"trace": "reference-moe", "topology": "1P1D"})).step_time.cost


def context(n=3, **given):
    return PolicyContext(n, np.random.default_rng(0), **given)


def view(loads, matched, **columns):
    return Workers.idle(loads)._replace(
        matched=np.asarray(matched), **{name: np.asarray(v) for name, v in columns.items()}
    )


def pick(word, workers, prompt=1000, number=0, **of):
    policy = prefill_policy(word, context(len(workers.loads)))
    return policy.select(RequestInfo(number, prompt, 0, **of), workers)


def test_prompts_split_by_what_is_left_of_them():
    for cached in ([4500, 0, 0, 0], [0, 4500, 0, 0]):
        workers = view([0] * 4, cached)
        assert pick("split:tokens=1000", workers, 5000) == cached.index(4500)
        assert pick("split:tokens=1000,remaining=no", workers, 5000) in (2, 3)
    assert pick("split:tokens=400", view([0] * 4, [0, 0, 500, 0])) == 2


def test_tokens_in_tiers_count_by_their_credit():
    tiers = {"reachable": [0, 800], "load_s": [0.0, 0.1]}
    for word, blind in (("dynamo_kv", "dynamo_kv:tier=0"), ("llmd", "llmd:tier=0")):
        assert pick(word, view([0, 0], [0, 0], **tiers)) == 1
        assert pick(word, view([0, 0], [1, 0], **tiers)) == 1
        assert pick(blind, view([0, 0], [1, 0], **tiers)) == 0


def test_seconds_load_what_takes_less_time(cost):
    for load_s, expected in ((0.0, 1), (10.0, 0)):
        tiers = {"reachable": [0, 1600], "load_s": [0.0, load_s]}
        made = context(2, step_times=cost)
        policy = prefill_policy("seconds", made)
        request = RequestInfo(0, 2000, 0)
        assert policy.select(request, view([0, 0], [0, 0], **tiers)) == expected
        blind = prefill_policy("seconds:tiers=false", made)
        assert blind.select(request, view([0, 0], [0, 0], **tiers)) == 0


def test_cached_tokens_are_no_work_that_waits():
    """900 of 1,000 tokens are cached at the first worker: after it, 100 wait there, not 1,000."""
    policy = prefill_policy("lmetric", context(2))
    assert policy.select(RequestInfo(0, 1000, 0), view([0, 0], [900, 0])) == 0
    # 100 + 500 tokens against 500 + 200 of a longer prompt elsewhere.
    assert policy.select(RequestInfo(1, 700, 0), view([0, 0], [200, 0])) == 0
    assert policy.queued.tolist() == [600, 0]
    policy.on_complete(0, 0)
    assert policy.queued.tolist() == [500, 0]


def test_the_load_of_a_dead_worker_is_no_imbalance():
    workers = view([200, 30, 10], [0, 700, 0], healthy=[False, True, True])
    assert pick("cache_aware", workers) == 1


def test_rules_by_hand():
    # Dynamo: blocks that are queued and not matched; its credit weighs the latter.
    policy = prefill_policy("dynamo_kv", context(2))
    assert policy.select(RequestInfo(0, 1000, 0), view([0, 0], [0, 600])) == 1
    assert policy.select(RequestInfo(1, 1000, 0), view([0, 1], [0, 300])) == 0  # 1000 to 1100
    policy.on_complete(0, 1)
    assert policy.queued.tolist() == [1000, 0]
    assert pick("dynamo_kv:credit=0,load=1", view([1, 0], [900, 0])) == 1
    # LMetric: (work + 1000 - match) x (requests + 1).
    assert pick("lmetric", view([1, 0], [400, 0])) == 1
    assert pick("lmetric", view([1, 0], [600, 0])) == 0
    # llm-d: 3 x match + 2 x (fewest waiting) + 2 x free KV blocks.
    usage = {"waiting": [4, 0], "kv_usage": [0.0, 0.0]}
    assert pick("llmd", view([0, 0], [600, 0], **usage)) == 1
    assert pick("llmd", view([0, 0], [700, 0], **usage)) == 0
    assert pick("llmd", view([0, 0], [700, 0], **usage | {"kv_usage": [0.1, 0.0]})) == 1
    # SGLang: the best match above a share, unless loads differ by so much.
    assert pick("cache_aware", view([9, 0], [400, 0])) == 0
    assert pick("cache_aware", view([9, 0], [300, 0])) == 1
    assert pick("cache_aware:absolute=8", view([9, 0], [400, 0])) == 1
    # Preble: more matched than not; production-stack: share less excess load.
    assert pick("preble", view([9, 0], [501, 0])) == 0
    assert pick("preble", view([0, 0, 0], [500, 0, 0])) == 0
    assert pick("load_aware", view([3, 1], [900, 0])) == 1
    assert pick("load_aware:beta=0.5", view([3, 1], [900, 0])) == 0


def test_a_session_has_no_worker_while_all_are_dead():
    policy = prefill_policy("session", context(2))
    request = RequestInfo(0, 9, 0, session=5)
    dead = view([0, 0], [0, 0], healthy=[False, False])
    assert policy.select(request, dead) is None
    assert policy.select(request, dead) is None
    assert policy.select(request, view([1, 0], [0, 0])) == 1
    assert policy.select(request, view([0, 9], [0, 0])) == 1


def test_a_session_keeps_its_worker_for_its_lifetime():
    policy = prefill_policy("session:lifetime_s=10", context(3))
    first = policy.select(RequestInfo(0, 9, 0, session=5), view([0, 1, 1], [0, 0, 0]))
    busy = view([7, 1, 1], [0, 0, 0])
    assert first == 0
    assert policy.select(RequestInfo(1, 9, 0, session=5), busy._replace(now_s=10.0)) == 0
    assert policy.select(RequestInfo(2, 9, 0, session=6), busy._replace(now_s=10.0)) != 0
    assert policy.select(RequestInfo(3, 9, 0, session=5), busy._replace(now_s=20.0)) == 0
    assert policy.select(RequestInfo(4, 9, 0, session=5), busy._replace(now_s=30.5)) != 0


@on_each("word", [*AWARE, "seconds"])
def test_equals_are_served_in_turn(word, cost):
    policy = prefill_policy(word, context(4, step_times=cost))
    chosen = [
        policy.select(RequestInfo(i, 100, 0, session=i), view([0] * 4, [0] * 4)) for i in range(8)
    ]
    assert np.bincount(chosen).tolist() == [2, 2, 2, 2]


@on_each("word", [*AWARE, "seconds"])
def test_sick_workers_get_nothing(word, cost):
    policy = prefill_policy(word, context(3, step_times=cost))
    sick = view([0, 5, 5], [90, 0, 0])._replace(healthy=np.array([False, True, True]))
    assert policy.select(RequestInfo(0, 100, 0), sick) in (1, 2)
    nobody = sick._replace(healthy=np.zeros(3, bool))
    assert policy.select(RequestInfo(1, 100, 0), nobody) is None


def test_seconds_go_where_the_prompt_is_computed_first(cost):
    """To A, which has some of the prompt, iff its wait and the rest take less than B's whole."""
    whole, rest = prompt_s(cost, 4000, 0, 8192), prompt_s(cost, 1000, 3000, 8192)
    assert rest < whole
    for wait, chosen in ((whole - rest - 1e-3, 0), (whole - rest + 1e-3, 1)):
        policy = prefill_policy("seconds", context(2, step_times=cost))
        policy._prompts.send(0, 0.0, wait)
        assert policy.select(RequestInfo(0, 4000, 0), view([1, 0], [3000, 0])) == chosen
        # A worker without requests has no wait, whatever was predicted.
        policy._prompts.send(0, 0.0, 99.0)
        assert policy.select(RequestInfo(1, 4000, 0), view([0, 0], [3000, 0])) == 0


def test_prompts_take_what_their_chunks_do(cost):
    assert prompt_s(cost, 3000, 500, 1024) == pytest.approx(
        sum(prompt_s(cost, n, at, 8192) for n, at in ((1024, 500), (1024, 1524), (952, 2548)))
    )
    prompts = PromptSeconds(cost, context(2))
    _, own = prompts.of(RequestInfo(0, 1000, 0), view([0, 0], [0, 999]))
    assert own == pytest.approx([prompt_s(cost, 1000, 0, 8192), prompt_s(cost, 1, 999, 8192)])
    prompts.send(0, 50.0, 3.0)
    later = view([1, 1], [0, 0])._replace(now_s=51.0)
    assert prompts.of(RequestInfo(1, 1000, 0), later)[0] == pytest.approx([2.0, 0.0])


def test_one_worker_leaves_no_choice():
    fields = CHAT | {"topology": "1P1D"}
    tables = [
        simulate(make_config(fields | {"prefill_policy": word})).requests
        for word in ("least_loaded", *AWARE, "seconds")
    ]
    assert all(table == tables[0] for table in tables)


@pytest.mark.parametrize("topology", ["2P2D", "2C"])
def test_what_a_router_knows_is_what_the_engine_finds(topology, monkeypatch):
    """Where nothing happens between a decision and the admission."""
    from eldr_sim.policies.routing.kv_aware import KVAwarePolicy

    known, select = {}, KVAwarePolicy.select

    def spied(self, request, workers):
        worker = select(self, request, workers)
        known[request.request_id] = int(workers.matched[worker])
        return worker

    monkeypatch.setattr(KVAwarePolicy, "select", spied)
    field = "policy" if topology == "2C" else "prefill_policy"
    fields = CHAT | {"topology": topology, field: "llmd", "max_active_sessions": 1}
    rows = simulate(make_config(fields)).requests.to_pandas().set_index("request_id")
    assert len(known) == len(rows) == 48
    assert all(rows.cached_tokens[i] == tokens for i, tokens in known.items())
    assert sum(known.values()) > 0.5 * rows.prompt_len.sum()


def test_affinity_finds_what_balance_loses():
    fields = CHAT | {"topology": "4P2D", "sessions": 60}
    hits = {
        word: simulate(make_config(fields | {"prefill_policy": word})).summary[
            "prefix_cache_hit_rate"
        ]
        for word in ("round_robin", "session", "seconds")
    }
    assert hits["round_robin"] < hits["seconds"] <= hits["session"] + 0.02


@pytest.mark.parametrize("topology", ["2P2D", "2C"])
def test_seconds_decodes_with_and_without_experts(topology):
    fields = CHAT | {"topology": topology, "sessions": 30, "prefill_policy": "seconds"}
    for word in ("seconds", "seconds:experts=false", "seconds:tokens=40"):
        summary = simulate(make_config(fields | {"policy": word})).summary
        assert summary["completed"] == 120
        if topology == "2C":
            assert summary["prefix_cache_hit_rate"] > 0.6


def test_a_first_turn_counts_what_it_adds_to_steps_for_all_that_follow(monkeypatch):
    asked, place = [], SecondsPolicy.select

    def noting(policy, request, workers):
        inner = policy._place
        policy._place = lambda *of: asked.append((request.session, of[3][0])) or inner(*of)
        chosen = place(policy, request, workers)
        policy._place = inner
        return chosen

    monkeypatch.setattr(SecondsPolicy, "select", noting)
    fields = CHAT | {"sessions": 12, "policy": "seconds:tokens=40,horizon=5", "topology": "2C"}
    simulate(make_config(fields))
    seen = set()
    for session, tokens in asked:
        assert tokens == (40.0 if session in seen else 200.0)
        seen.add(session)
    assert len(seen) < len(asked)
    # Where KV caches are handed over, a turn's prefix lies where its prompt was computed.
    plain, ahead = (
        simulate(make_config(fields | {"topology": "2P2D", "policy": word}))
        for word in ("seconds", "seconds:horizon=5")
    )
    assert plain.requests.equals(ahead.requests)


def test_seconds_needs_experts_on_one_gpu():
    fields = CHAT | {
        "topology": "1P2D", "tensor_parallel_size": 2, "enable_expert_parallel": True,
        "policy": "seconds",
    }  # fmt: skip
    with pytest.raises(InputError, match="several GPUs"):
        simulate(make_config(fields))


def hit_rate(**fields):
    summary = simulate(make_config(CHAT | {"topology": "3P1D", "sessions": 30} | fields)).summary
    return summary["prefix_cache_hit_rate"]


def test_a_router_that_remembers_enough_knows_what_caches_hold():
    """Where nothing is evicted and prompts are computed before the next one comes."""
    fields = {"prefill_policy": "llmd:queue=0,kv=0", "max_active_sessions": 1}
    assert hit_rate(**fields, kv_signal="approx:ttl=1e9") == hit_rate(**fields)


def test_what_a_router_has_forgotten_it_does_not_find():
    """With nothing known at all, the rule is its load part alone."""
    fields = {"prefill_policy": "llmd", "request_rate": 3}  # never two at once
    blind = hit_rate(prefill_policy="llmd:prefix=0", request_rate=3)
    assert hit_rate(**fields, kv_signal="approx:ttl=0.000001") == blind
    few, enough = (hit_rate(**fields, kv_signal=f"approx:tokens={n}") for n in (16, 10**6))
    assert blind < enough <= hit_rate(**fields) + 0.03
    assert few < enough


def test_routers_that_act_by_themselves_know_less():
    fields = {"prefill_policy": "llmd", "max_active_sessions": 6}
    one, four = (hit_rate(**fields, kv_signal=f"approx:routers={n}") for n in (1, 4))
    assert four < one - 0.05


@pytest.mark.parametrize("topology", ["3P1D", "3C"])
def test_engines_that_publish_late_are_known_late(topology):
    field = "prefill_policy" if topology == "3P1D" else "policy"
    fields = {field: "cache_aware:threshold=0", "topology": topology, "max_active_sessions": 6}
    often, seldom, never = (
        hit_rate(**fields, signal_interval_ms=interval) for interval in (1.0, 30_000.0, 1e9)
    )
    assert abs(often - hit_rate(**fields)) < 0.02
    assert never < seldom < often


@pytest.mark.parametrize("seed", range(3))
def test_what_was_published_is_what_caches_hold(seed, monkeypatch):
    """Small caches, so that blocks go, too."""
    from eldr_sim.simulator.control import known_blocks
    from eldr_sim.simulator.control.policy_calls import PolicyCalls
    from eldr_sim.simulator.plane.kv.kv_cache import match

    compared, ask = [], PolicyCalls.ask

    def spied(self, cluster, number, request):
        chosen, kv = ask(self, cluster, number, request), cluster.arrays.engines.kv
        self.hear(at_once=True)
        held = np.zeros(3, np.int64)
        match(kv, 0, request, int(cluster.workload.prompt_len[request]), held)
        sizes = cluster.workload.prefix_block_tokens, cluster.spec.block_size
        blocks = cluster.workload.blocks(request).tolist()
        found = self._known.match(request, blocks, range(3), 0.0)
        tokens = int(cluster.workload.prompt_len[request])
        known = known_blocks.matched_tokens(found, tokens, *sizes)
        compared.append((held.tolist(), known.tolist()))
        return chosen

    monkeypatch.setattr(PolicyCalls, "ask", spied)
    hit_rate(prefill_policy="llmd", signal_interval_ms=5.0, num_gpu_blocks_override=300, seed=seed)
    held, known = zip(*compared, strict=True)
    assert held == known
    assert np.sum(held) > 0


@pytest.mark.parametrize(
    "text", ["approximate", "exact:ttl=3", "approx:ttl=0", "approx:routers=1.5", "approx:tokens=x"]
)
def test_bad_signals_are_refused(text):
    with pytest.raises(InputError, match="kv_signal"):
        make_config(CHAT | {"kv_signal": text})


def test_tokens_in_a_cache_are_not_counted_again_as_those_of_a_tier():
    """What a worker can reach includes what it has cached: 400 cached are worth less than 800 in a
    tier at 0.75 each."""
    tiers = {"reachable": [400, 800], "load_s": [0.0, 0.1]}
    assert pick("dynamo_kv", view([0, 0], [400, 0], **tiers)) == 1
    assert pick("dynamo_kv:tier=0.49", view([0, 0], [400, 0], **tiers)) == 0


def test_blocks_that_decode_count_where_workers_decode():
    """A worker of a longer match goes behind one whose running requests hold fewer tokens."""
    policy = decode_policy("dynamo_kv", context(2, computes_prompts=True))
    for running, chosen in (([699, 0], 0), ([701, 0], 1)):
        workers = view([1, 1], [700, 0], running_tokens=running, waiting_tokens=[0, 0])
        assert policy.select(RequestInfo(0, 1000, 0), workers) == chosen
    alone = prefill_policy("dynamo_kv", context(2))
    workers = view([1, 1], [700, 0], running_tokens=[10**6, 0])
    assert alone.select(RequestInfo(0, 1000, 0), workers) == 0


def with_dead(loads, matched, **columns):
    """Return a view of workers of which the first is dead."""
    workers = view(loads, matched, **columns)
    return workers._replace(healthy=np.arange(len(loads)) > 0)


@pytest.mark.parametrize("word", ["dynamo_kv", "lmetric", "llmd", "cache_aware", "preble"])
@given(data=st.data())
def test_a_dead_worker_decides_nothing(word, data):
    """Among the healthy ones the choice is the same whatever the dead one has, holds or waits for.

    `load_aware` compares with the mean load of all, as production-stack does."""
    columns = ("waiting", "waiting_tokens", "running_tokens")
    tokens = st.integers(0, 1000)
    rows = {
        name: data.draw(st.lists(tokens, min_size=3, max_size=3), name)
        for name in ("loads", "matched", *columns)
    }
    usage = data.draw(st.lists(st.floats(0, 1), min_size=3, max_size=3), "kv_usage")
    chosen = []
    for dead in (0, 990):
        of = {name: [dead, *values] for name, values in rows.items()}
        workers = with_dead(
            of["loads"], of["matched"], **{name: of[name] for name in columns},
            kv_usage=[dead / 1000, *usage],
        )  # fmt: skip
        policy = prefill_policy(word, context(4))
        policy.queued[:] = [dead, *rows["waiting_tokens"]]
        chosen.append(policy.select(RequestInfo(0, 1000, 0), workers))
    assert chosen[0] == chosen[1]
    assert chosen[0] in (1, 2, 3)


def test_dead_workers_by_hand():
    # llm-d: two more waiting requests are the whole span, which outweighs half a match.
    waiting = {"waiting": [100, 0, 2], "kv_usage": [0.0] * 3}
    assert pick("llmd", with_dead([0, 0, 0], [0, 0, 500], **waiting)) == 1
    # SGLang: the longest match of those that live is short, so loads decide.
    assert pick("cache_aware", with_dead([0, 5, 1], [900, 100, 0])) == 2
    # Preble: more than half is matched by one that lives, which has more work.
    policy = prefill_policy("preble", context(3))
    policy.queued[:] = [0, 2000, 0]
    assert policy.select(RequestInfo(0, 1000, 0), with_dead([0] * 3, [900, 600, 0])) == 1


def test_load_above_a_small_mean_counts_in_requests():
    """production-stack divides by the mean load, and by one request where that is less."""
    workers = view([1, 0, 0, 0], [900, 0, 0, 0])  # a quarter of a request on average
    assert pick("load_aware:beta=0.5", workers) == 0
    assert pick("load_aware", workers) != 0
    assert pick("load_aware:beta=0.5", view([9, 3, 3, 3], [400, 0, 0, 0])) != 0


def test_where_rules_change_sides():
    # SGLang: loads differ by more than the bound, and by more than the ratio.
    assert pick("cache_aware:absolute=9", view([9, 0], [400, 0])) == 0
    assert pick("cache_aware:absolute=5", view([80, 70], [400, 0])) == 0
    assert pick("cache_aware:absolute=5,relative=1.1", view([80, 70], [400, 0])) == 1
    # llm-d's split: a prompt of as many tokens is long.
    assert pick("split:tokens=1000", view([0] * 4, [0] * 4), 1000) in (2, 3)
    assert pick("split:tokens=1000", view([0] * 4, [0] * 4), 999) in (0, 1)
    # Preble: half of a prompt is not more than the rest of it.
    for matched, chosen in ((500, 1), (501, 0)):
        policy = prefill_policy("preble", context(2))
        policy.queued[:] = [2000, 0]
        assert policy.select(RequestInfo(0, 1000, 0), view([0, 0], [matched, 0])) == chosen
