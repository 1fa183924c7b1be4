"""The proxy before live engines: its decisions, its signatures, and what passes through it."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

from eldr_sim.errors import InputError
from eldr_sim.policies import registry
from eldr_sim.policies.base import Needs, PolicyContext, RequestInfo, RouterPolicy
from eldr_sim.serving.router.config import ProxyConfig, read_config
from eldr_sim.serving.router.decisions import EngineSignals, Router, build_decode_policy
from eldr_sim.serving.router.proxy import make_app
from eldr_sim.serving.router.request_handler import SignatureReader
from eldr_sim.serving.router.signals import parse_metrics
from eldr_sim.traces.routing.capture.step_log import Header, StepLog
from eldr_sim.validation.live.engines.client import join_proxy_log, prefill_ahead, send_load
from eldr_sim.validation.live.engines.load import make_load
from eldr_sim.validation.live.live_run import LoadInfo

from ..random_artifact import random_artifact

LAYERS, E, K = 2, 8, 2


def chosen(tokens, seed=0):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, LAYERS, E)), axis=-1)[..., :K]


def header(**changes):
    about = {"model": "m", "layers": [0, 3], "n_decoder_layers": 4, "n_experts": E, "top_k": K}
    return Header(**(about | {"engine": "test", "tool_versions": {}} | changes))


def counted(experts):
    """Count plainly, token by token."""
    total = np.zeros((LAYERS, E), int)
    for token in experts:
        for layer, ids in enumerate(token):
            for expert in ids:
                total[layer, expert] += 1
    return total


# --- decisions ---


class Witness(RouterPolicy):
    """Passes decisions on to a policy and writes down what the simulator tells it."""

    name = "witness"
    needs = Needs(ends=True)

    def __init__(self, policy):
        self.policy, self.events = policy, []

    def select(self, request, workers):
        worker = self.policy.select(request, workers)
        self.events.append(("dispatch", request, workers.loads.tolist(), worker))
        return worker

    def on_complete(self, request_id, worker):
        self.events.append(("complete", request_id, None, worker))


@pytest.mark.parametrize("name", ["round_robin", "jsq", "eldr", "p2c", "random"])
def test_proxy_and_simulator_decide_alike(name, make_workload, make_cluster, run_to_rest):
    """The same order of dispatches and completions gives the same loads and the same workers."""
    n, workers = 120, 3

    def policy():
        artifact = random_artifact(workers, LAYERS, E)
        context = PolicyContext(workers, np.random.default_rng(5), artifact=artifact)
        return registry.decode_policy("eldr:tau=0.3" if name == "eldr" else name, context)

    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.002, n))
    workload = make_workload(arrivals, rng.integers(1, 20, n), rng.integers(1, 60, n))
    witness = Witness(policy())
    cluster = make_cluster(
        workload,
        n_prefill=2,
        n_decode=workers,
        decode_policy=witness,
        signatures=lambda ranges: (ranges[0][0], counted(chosen(9, seed=ranges[0][0]))),
    )
    run_to_rest(cluster)
    dispatches = [event for event in witness.events if event[0] == "dispatch"]
    assert len(dispatches) == n
    assert len(witness.events) == 2 * n
    assert len({tuple(loads) for _, _, loads, _ in dispatches}) > 10
    assert len({worker for *_, worker in dispatches}) > 1

    router = Router(policy(), workers)
    for kind, what, loads, worker in witness.events:
        if kind == "dispatch":
            assert router.workers.loads.tolist() == loads
            assert router.dispatch(what._replace(signature_id=None)) == worker
        else:
            router.complete(what, worker)
    assert not router.workers.loads.any()


def test_policy_hears_of_completions_after_the_load_has_fallen():
    class Listener(RouterPolicy):
        name = "listener"
        needs = Needs(ends=True)

        def select(self, request, workers):
            return 1

        def on_complete(self, request_id, worker):
            heard.append((request_id, worker, router.workers.loads.tolist()))

    heard = []
    router = Router(Listener(None), 2)
    router.dispatch(RequestInfo(7, 1, 0))
    router.complete(7, 1)
    assert heard == [(7, 1, [0, 0])]


# --- signatures ---


def test_signatures_are_read_while_the_log_grows(tmp_path):
    """In chunks, with a preemption, several requests a step, and from two prefill engines."""
    reader = SignatureReader([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(InputError, match="request one is not in the log"):
        reader.counts("one")
    first, second = (StepLog(tmp_path / name, header()) for name in "ab")
    one, two, three = chosen(6, 1), chosen(3, 2), chosen(4, 3)
    a, b, c = (f"cmpl-{name}-0-0123456{i}" for i, name in enumerate(("one", "two", "three")))
    first.step([(a, 0, 4)], one[:4], {a: [1] * 5})
    first.step([(b, 0, 3), (a, 0, 2)], np.concatenate([two, one[:2]]), {b: [2] * 3})
    second.step([(c, 0, 4)], three, {c: [3] * 4})
    np.testing.assert_array_equal(reader.counts("two"), counted(two))
    np.testing.assert_array_equal(reader.counts("three"), counted(three))
    first.step([(a, 2, 4)], one[2:], {})  # the last row is a generated token
    counts = reader.counts("one")
    assert counts.dtype == np.uint32
    np.testing.assert_array_equal(counts, counted(one[:5]))
    with pytest.raises(InputError, match="request one is not in the log"):
        reader.counts("one")


def test_prompts_that_were_not_computed_whole_have_no_signature(tmp_path):
    log = StepLog(tmp_path, header())
    log.step([("cached", 2, 3)], chosen(3), {"cached": [1] * 5})
    log.step([("half", 0, 3)], chosen(3), {"half": [1] * 5})
    reader = SignatureReader([tmp_path])
    for name in ("cached", "half"):
        with pytest.raises(InputError, match=f"of {name} were never computed .*prefix-caching"):
            reader.counts(name)


def test_log_that_is_being_written(tmp_path):
    log = StepLog(tmp_path, header())
    log.step([("r", 0, 2)], chosen(2), {"r": [1, 2]})
    (file,) = tmp_path.glob("*.jsonl")
    text = file.read_text()
    file.write_text(text[:-5])  # the line is on its way
    reader = SignatureReader([tmp_path])
    with pytest.raises(InputError, match="not in the log"):
        reader.counts("r")
    file.write_text(text)
    np.testing.assert_array_equal(reader.counts("r"), counted(chosen(2)))


# --- what passes through ---


class Engine:
    """A server that prefills and decodes like vLLM, and logs experts where it is told to."""

    def __init__(self, name, *, log=None):
        self.name, self.log, self.seen, self.in_flight, self.most = name, log, [], 0, 0

    @property
    def app(self):
        web = pytest.importorskip("aiohttp.web", reason="pip install 'eldr-sim[live]'")
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def complete(self, request):
        from aiohttp import web

        body, name = await request.json(), request.headers["X-Request-Id"]
        self.seen.append((name, body))
        prompt = body["prompt"]
        if self.log is not None:
            experts = chosen(len(prompt), seed=len(self.seen))
            self.log.step([(f"cmpl-{name}-0-00000000", 0, len(prompt))], experts, {
                f"cmpl-{name}-0-00000000": prompt
            })  # fmt: skip
        if not body.get("stream"):
            return web.json_response(
                {
                    "choices": [{"text": "thrown away"}],
                    "usage": {"prompt_tokens": len(prompt)},
                    "kv_transfer_params": {"remote_engine_id": self.name, "of": name},
                }
            )
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in range(1, body["max_tokens"] + 1):
            await asyncio.sleep(0.001)
            chunk = {"choices": [{"text": ""}], "usage": {"completion_tokens": token}}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response


def a_load(n=12, rate=300.0):
    about = LoadInfo(
        name="t", request_rate=rate, burstiness=1.0, lengths="fixed", num_requests=n, seed=0
    )
    limits = {"prompt_range": (1, 99), "output_range": (1, 99)}
    return make_load(about, {"d": (4, 90)}, prompt_len=7, output_len=6, **limits)


def config(tmp_path, decode, prefill=(), **changes):
    about = {"port": 1, "decode_urls": decode, "prefill_urls": prefill, "retries": 0}
    about["log"] = str(tmp_path / "proxy.jsonl")
    return ProxyConfig(**(about | changes))


def test_prefill_then_decode(serve_app, tmp_path):
    """2P2D: in turn, ids and KV parameters passed on, times in order, joined by request."""
    prefills, decodes = ([Engine(f"{kind}{i}") for i in range(2)] for kind in "pd")
    urls = [[serve_app(engine.app) for engine in group] for group in (prefills, decodes)]
    about = config(tmp_path, urls[1], urls[0])
    made = a_load()
    sent = send_load(made, serve_app(make_app(about)), model="m")
    table = join_proxy_log(sent, about.log)
    assert table.schema == sent.schema
    assert [len(engine.seen) for engine in prefills] == [6, 6]
    prefilled_by = {name: engine.name for engine in prefills for name, _ in engine.seen}
    for engine in prefills:
        for _, body in engine.seen:
            assert body["max_tokens"] == 1
            assert "stream" not in body
            assert "stream_options" not in body
            assert body["kv_transfer_params"]["do_remote_decode"] is True
    decoded = {}
    for index, engine in enumerate(decodes):
        for name, body in engine.seen:
            decoded[name] = index, body
    routed = sorted(table.to_pylist(), key=lambda row: row["routed_s"])
    assert [row["engine"] for row in routed] == [0, 1] * 6  # round robin
    for request, row in zip(made.requests, table.to_pylist(), strict=True):
        index, body = decoded[request.request_id]
        assert row["engine"] == index
        assert (body["prompt"], body["max_tokens"]) == (request.prompt, 6)
        where = prefilled_by[request.request_id]
        assert body["kv_transfer_params"] == {"remote_engine_id": where, "of": request.request_id}
        moments = [row["sent_s"], row["prefilled_s"], row["routed_s"], *row["token_s"]]
        assert moments == sorted(moments)
        assert len(row["token_s"]) == 6


def test_router_of_colocated_engines(serve_app, tmp_path):
    engines = [Engine(f"c{i}") for i in range(3)]
    about = config(tmp_path, [serve_app(engine.app) for engine in engines], policy="jsq")
    table = join_proxy_log(send_load(a_load(), serve_app(make_app(about)), model="m"), about.log)
    assert sum(len(engine.seen) for engine in engines) == 12
    assert table["prefilled_s"].null_count == 12
    assert table["routed_s"].null_count == 0
    assert all("kv_transfer_params" not in body for engine in engines for _, body in engine.seen)


@pytest.mark.parametrize("ahead", [False, True])
def test_eldr_gets_the_signatures_of_the_prefill_engine(serve_app, tmp_path, ahead):
    """Also where the prompts were computed before the load is sent."""
    artifact = random_artifact(2, LAYERS, E)
    artifact.save(tmp_path / "fit.npz")
    prefill = Engine("p", log=StepLog(tmp_path / "capture", header()))
    decodes = [Engine(f"d{i}") for i in range(2)]
    prefill_url = serve_app(prefill.app)
    about = config(
        tmp_path,
        [serve_app(engine.app) for engine in decodes],
        [] if ahead else [prefill_url],
        prefilled=ahead,
        policy=f"eldr:tau=0,artifact={tmp_path / 'fit.npz'}",
        capture=[str(tmp_path / "capture")],
    )
    made = a_load(rate=1e5)
    if ahead:
        made = prefill_ahead(made, prefill_url, model="m")
        assert [name for name, _ in prefill.seen] == [r.request_id for r in made.requests]
    table = join_proxy_log(send_load(made, serve_app(make_app(about)), model="m"), about.log)
    assert len(prefill.seen) == 12
    engine = dict(zip(table["request_id"].to_pylist(), table["engine"].to_pylist(), strict=True))
    nearest = {}
    for number, (name, body) in enumerate(prefill.seen, 1):
        assert (body["max_tokens"], "stream" in body) == (1, False)
        x = (counted(chosen(7, seed=number)) * artifact.idf).ravel()
        nearest[name] = int(np.argmax(artifact.centroids @ x))  # tau 0: the most similar one
    assert engine == nearest
    assert len(set(nearest.values())) == 2
    for decode in decodes:
        for name, body in decode.seen:
            assert body["kv_transfer_params"] == {"remote_engine_id": "p", "of": name}


def test_prompts_cannot_be_computed_ahead_without_a_kv_connector(serve_app):
    web = pytest.importorskip("aiohttp.web", reason="pip install 'eldr-sim[live]'")

    async def no_connector(_request):
        return web.json_response({"kv_transfer_params": None})

    app = web.Application()
    app.router.add_post("/v1/completions", no_connector)
    for url in (serve_app(app), "http://127.0.0.1:1"):
        with pytest.raises(InputError, match="request request-0: http"):
            prefill_ahead(a_load(2), url, model="m")


def test_engines_that_fail(serve_app, tmp_path):
    """The client hears what was wrong, and the load of the engine falls again."""
    web = pytest.importorskip("aiohttp.web", reason="pip install 'eldr-sim[live]'")

    def app(answer):
        made = web.Application()
        made.router.add_post("/v1/completions", answer)
        return made

    async def refuse(_request):
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async def no_connector(_request):
        return web.json_response({"usage": {"prompt_tokens": 1}, "kv_transfer_params": None})

    async def break_off(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        request.transport.abort()
        return response

    bad, nowhere = serve_app(app(refuse)), "http://127.0.0.1:1"
    good = serve_app(Engine("d").app)
    for decode, prefill, message in (
        (good, [bad], "HTTP 400: .*too long"),
        (good, [nowhere], "HTTP 503: .*no prefill engine is up"),
        (good, [serve_app(app(no_connector))], "HTTP 502: .*kv-transfer-config"),
        (bad, [], "HTTP 400: .*too long"),
        (nowhere, [], "HTTP 503: .*no decode engine is up"),
        (serve_app(app(break_off)), [], "request request-0: "),
    ):
        about = config(tmp_path, [decode], prefill)
        with pytest.raises(InputError, match=message):
            send_load(a_load(1), serve_app(make_app(about)), model="m", timeout_s=20)


# --- configuration and log ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "nonsense"}, "unknown policy 'nonsense'"),
        ({"policy": "eldr"}, "needs a routing artifact, and none was given"),
        ({"policy": "domain"}, "needs calibration requests"),
        ({"policy": "eldr:artifact=fit.npz"}, "prefill: missing"),
        ({"policy": "eldr:artifact=fit.npz", "prefilled": True}, "capture: missing"),
        ({"policy": "eldr:artifact=none.npz"}, "none.npz"),
        ({"policy": "eldr:tau=2"}, "tau"),
    ],
)
def test_policies_that_cannot_be_used(tmp_path, monkeypatch, changes, message):
    pytest.importorskip("aiohttp", reason="pip install 'eldr-sim[live]'")
    random_artifact(2, LAYERS, E).save(tmp_path / "fit.npz")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        make_app(config(tmp_path, ["http://a", "http://b"], **changes))


def test_broken_configuration_is_one_line(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(InputError, match="cannot read"):
        read_config(file)
    for text in ('{"port": 1, "log": "x", "decode_urls": []}', '{"prot": 1}', "{"):
        file.write_text(text)
        with pytest.raises(InputError):
            read_config(file)
    command = [sys.executable, "-m", "eldr_sim.serving.router.proxy", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_join_wants_every_request_once(serve_app, tmp_path):
    about = config(tmp_path, [serve_app(Engine("c").app)])
    sent = send_load(a_load(2), serve_app(make_app(about)), model="m")
    lines = (tmp_path / "proxy.jsonl").read_text().splitlines()
    other = tmp_path / "other.jsonl"
    for kept, message in (
        (lines[:1], "lists request request-1 0 times"),
        ([*lines, lines[0]], "lists request request-0 2 times"),
        (["[]"], "proxy log"),
        (["{"], "proxy log"),
    ):
        other.write_text("\n".join(kept) + "\n")
        with pytest.raises(InputError, match=message):
            join_proxy_log(sent, other)
    with pytest.raises(InputError, match="proxy log"):
        join_proxy_log(sent, tmp_path / "absent")


# --- what engines publish, and requests that are held ---

METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1000"}} 1.0
"""


def test_metrics_of_vllm_become_the_view():
    found = parse_metrics(METRICS.format(running=3.0, waiting=2.0, usage=0.25))
    assert found == (2, 3, 0.25, 4000)
    with pytest.raises(InputError, match=r"^metrics: .*num_requests_waiting"):
        parse_metrics("up 1\n")


def test_data_parallel_engines_are_added_up_and_their_usage_averaged():
    lines = METRICS.format(running=3, waiting=2, usage=0.25).splitlines()
    other = METRICS.format(running=1, waiting=4, usage=0.75).replace('engine="0"', 'engine="1"')
    samples = [line for line in other.splitlines() if not line.startswith("#")]
    text = "\n".join(
        line + "".join(f"\n{s}" for s in samples if s and s.split("{")[0] == line.split("{")[0])
        for line in lines
    )
    assert parse_metrics(text + "\n") == (6, 4, 0.5, 16_000)


class Fixed(RouterPolicy):
    """Always names the same engine."""

    name = "fixed"

    def select(self, request, workers):
        return 1


def test_an_engine_that_may_not_be_used_is_replaced_by_the_least_loaded():
    """A policy may ignore ``healthy``; no request goes to an engine that is down or excluded."""
    router = Router(Fixed(None), 4)
    router.workers.loads[:] = [5, 0, 2, 3]
    assert router.dispatch(RequestInfo(0, 5, 0)) == 1
    assert router.dispatch(RequestInfo(1, 5, 0), without=[1]) == 2
    assert router.dispatch(RequestInfo(2, 5, 0), without=[1, 2]) == 3
    router.set_health(1, False)
    assert router.dispatch(RequestInfo(3, 5, 0)) == 2
    assert router.workers.loads.tolist() == [5, 1, 4, 4]


@pytest.mark.parametrize(("waiting", "tokens"), [(0, 0), (1, 40), (2, 60), (3, 70), (9, 70)])
def test_waiting_tokens_are_those_of_the_prompts_sent_last(waiting, tokens):
    router = Router(Fixed(None), 2)
    for number, length in enumerate((10, 20, 40)):
        router.dispatch(RequestInfo(number, length, 0))
    router.publish([None, EngineSignals(waiting, 3, 0.5, 800)])
    assert router.workers.waiting_tokens.tolist() == [0, tokens]


def test_a_router_sees_what_engines_publish():
    class Watching(RouterPolicy):
        name = "watching"

        def select(self, request, workers):
            return 0

    router = Router(Watching(None), 2)
    for number, length in enumerate((10, 20, 40)):
        router.dispatch(RequestInfo(number, length, 0))
    router.complete(1, 0)
    router.publish([parse_metrics(METRICS.format(running=1, waiting=1, usage=0.5)), None])
    workers = router.workers
    assert workers.healthy.tolist() == [True, True]  # told by /health alone
    assert (workers.waiting[0], workers.running[0], workers.kv_usage[0]) == (1, 1, 0.5)
    assert (workers.waiting_tokens[0], workers.running_tokens[0]) == (40, 8000)
    assert workers.loads.tolist() == [2, 0]


def test_a_request_is_held_until_the_policy_names_an_engine(serve_app, tmp_path):
    """At most two in flight; all are served, and the proxy has read the engine's metrics."""
    web = pytest.importorskip("aiohttp.web", reason="pip install 'eldr-sim[live]'")
    usages, most = [], 2

    class Careful(RouterPolicy):
        name = "careful"

        def select(self, request, workers):
            usages.append(float(workers.kv_usage[0]))
            return None if workers.loads[0] >= most else 0

    async def metrics(_request):
        return web.Response(text=METRICS.format(running=0, waiting=0, usage=0.125))

    engine = Engine("d")
    app = engine.app
    app.router.add_get("/metrics", metrics)
    about = config(tmp_path, [serve_app(app)], signal_interval_ms=5)
    table = send_load(a_load(), serve_app(make_app(about, Careful(None))), model="m")
    assert len(engine.seen) == table.num_rows == 12
    assert engine.most == most
    assert len(usages) > 12
    assert set(usages) <= {0.0, 0.125}
    assert 0.125 in usages


def test_a_client_that_leaves_while_its_request_is_held():
    class Full(RouterPolicy):
        name = "full"

        def select(self, request, workers):
            return 0 if workers.loads[0] < 1 else None

    async def scene():
        router = Router(Full(None), 1)
        assert await router.route(RequestInfo(0, 5, 0)) == 0
        leaving, staying = (
            asyncio.create_task(router.route(RequestInfo(number, 5, 0))) for number in (1, 2)
        )
        await asyncio.sleep(0)
        assert router.n_held == 2
        leaving.cancel()
        await asyncio.sleep(0)
        assert router.n_held == 1
        router.complete(0, 0)
        assert await staying == 0
        router.complete(2, 0)
        assert router.workers.loads.tolist() == [0]
        # The router has just named an engine when the client leaves.
        assert await router.route(RequestInfo(3, 5, 0)) == 0
        late = asyncio.create_task(router.route(RequestInfo(4, 5, 0)))
        await asyncio.sleep(0)
        router.complete(3, 0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert router.workers.loads.tolist() == [0]

    asyncio.run(scene())


def test_the_policy_does_not_see_engines_that_failed_a_request():
    """The next in turn, not the least loaded in the place of one that was tried."""
    router = Router(build_decode_policy("round_robin", 3), 3)
    for engine in range(3):
        router.set_health(engine, healthy=True)
    router.workers.loads[:] = 0, 3, 1
    assert router.dispatch(RequestInfo(0, 5, 0), without=[0]) == 1
