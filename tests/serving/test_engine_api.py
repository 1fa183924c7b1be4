"""What the simulated server answers as an engine would: fields of requests, KV events, faults."""

import asyncio
import importlib
import json

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from eldr_sim.errors import InputError
from eldr_sim.guard import Guard
from eldr_sim.serving.http import Intake, Limits
from eldr_sim.serving.router.kv_events import CachedPrefixes, EventWatch
from eldr_sim.serving.simulated import asked as asked_fields
from eldr_sim.serving.simulated.admin import Admin
from eldr_sim.serving.simulated.asked import Parser, stopped
from eldr_sim.serving.simulated.kv_events import Publisher, parse_kv_events
from eldr_sim.serving.simulated.server import Service, by_header
from eldr_sim.validation.live.engines.servers import free_port

from ..waiting import until
from .test_simulated import CHAT, CONFIG, SPEED, TEXT, against, events, served

RESPONSES = "/v1/responses"
ALONE = CONFIG.replace(topology="1C")


def asking(*requests, **options):
    """Return status and JSON of requests ``(path, body)`` to a new service."""

    async def talk(session, _url):
        found = []
        for path, body in requests:
            async with session.post(path, json=body) as answer:
                found.append((answer.status, await answer.json(), answer.headers))
        return found

    return against(Service(CONFIG, speed=SPEED, **options), talk)


def test_several_prompts_and_answers():
    ((status, found, _),) = asking(
        (TEXT, {"prompt": ["a" * 40, "b" * 28], "n": 2, "max_tokens": 3, "ignore_eos": True})
    )
    assert status == 200
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 17
    assert found["usage"]["completion_tokens"] == 12

    async def talk(session, _url):
        body = {"prompt": ["a", "b", "c"], "max_tokens": 4, "ignore_eos": True, "stream": True}
        return await events(await session.post(TEXT, json=body))

    texts = ["", "", ""]
    for piece in against(Service(CONFIG, speed=SPEED), talk):
        choice = piece["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == [" tok" * 4] * 3


@pytest.mark.parametrize(
    ("n", "stops", "tokens", "letters"),
    [
        (9, ["xyz"], 9, None), (9, [" tok"], 1, 0), (9, ["tok"], 1, 1), (9, ["k t"], 2, 3),
        (9, ["k tok tok "], 4, 3), (2, ["k tok tok "], 2, None), (9, ["xyz", "ok"], 1, 2),
    ],
)  # fmt: skip
def test_stops_by_hand(n, stops, tokens, letters):
    assert stopped(n, stops) == (tokens, letters)


def test_stop_logprobs_and_tools():
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = asking(
        (TEXT, body | {"stop": ["k t"]}),
        (TEXT, body | {"logprobs": 1}),
        (CHAT, chat | {"logprobs": True, "top_logprobs": 1}),
        (CHAT, chat | {"tools": tools, "tool_choice": "auto", "frobnicate": 1}),
        (CHAT, chat | {"response_format": {"type": "text"}, "model": "mine"}),
        adapters=["mine"],
    )
    assert [status for status, *_ in found] == [200] * 5
    stop, probable, spoken, tool, adapted = (answer for _, answer, _ in found)
    assert stop["choices"][0]["text"] == " to"
    assert stop["choices"][0]["finish_reason"] == "stop"
    assert stop["usage"]["completion_tokens"] == 2
    assert probable["choices"][0]["logprobs"]["token_logprobs"] == [0.0] * 5
    assert len(spoken["choices"][0]["logprobs"]["content"]) == 3
    assert tool["choices"][0]["finish_reason"] == "length"
    assert found[3][2]["X-Eldr-Sim-Ignored"] == "frobnicate"
    assert adapted["model"] == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_say_where_each_token_stands(stream):
    """Offsets of a stream's pieces go on where the one before ended."""
    body = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True, "logprobs": 1, "stream": stream}

    async def talk(session, _url):
        answer = await session.post(TEXT, json=body)
        return await events(answer) if stream else [await answer.json()]

    text, tokens, offsets = "", [], []
    for piece in against(Service(CONFIG, speed=SPEED), talk):
        choice = piece["choices"][0]
        said = choice["logprobs"] or {"tokens": [], "text_offset": []}
        text, tokens = text + choice["text"], tokens + said["tokens"]
        offsets += said["text_offset"]
    assert ("".join(tokens), len(tokens)) == (text, 5)
    assert offsets == [len("".join(tokens[:at])) for at in range(5)]


REFUSED = (
    {"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"logprobs": 99}, {"logprobs": "x"},
    {"n": -1},
    {"use_beam_search": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 3},
    {"priority": 1},
    {"guided_json": {}}, {"structured_outputs": {}}, {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema"}}, {"response_format": "x"},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function"}}, {"tools": {}}, {"stop": 3}, {"stop": [""]},
    {"stop": ["a"] * 99},
    {"stop_token_ids": "x"}, {"kv_transfer_params": {"do_remote_decode": True}},
    {"min_tokens": 99},
    {"max_tokens": 1.5}, {"n": 10**400}, {"max_tokens": 10**400}, {"stream_options": {}},
    {"prompt": [[]]}, {"prompt": [1 << 40]},
    {"prompt": [-1]},
    {"prompt": {}}, {"model": "other"}, {"audio": {}}, {"prompt_embeds": "x"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "module", "body"),
    [
        ("completion", "completion_create_params.CompletionCreateParamsBase", {"prompt": "x"}),
        ("chat", "chat.completion_create_params.CompletionCreateParamsBase",
         {"messages": [{"role": "user", "content": "x"}]}),
        ("response", "responses.response_create_params.ResponseCreateParamsBase", {"input": "x"}),
    ],
)  # fmt: skip
def test_every_field_of_openai_s_client_is_read_without_effect_or_refused(kind, module, body):
    """A field that OpenAI adds fails here until it is decided what becomes of it."""
    pytest.importorskip("openai")
    params = importlib.import_module(f"openai.types.{module.rpartition('.')[0]}")
    fields = set(getattr(params, module.rpartition(".")[2]).__annotations__)
    parser = Parser("m", [], None, 1000)
    assert not parser.read(json.dumps(body).encode(), kind).ignored
    for name in fields - set(body):
        for value in ("odd", 7, True, ["odd"], {"odd": 1}):
            try:
                asked = parser.read(json.dumps(body | {name: value}).encode(), kind)
            except ValueError as error:
                said = f"{error}"
            else:
                said, refused = name, (*asked.ignored, *asked_fields._REFUSED)
                assert name not in refused, (name, value)
            assert said.startswith(name), (name, value)
    if kind == "response":
        for more in ({"verbosity": "high"}, {"format": {"type": "json_schema"}}):
            with pytest.raises(ValueError, match=next(iter(more))):
                parser.read(json.dumps(body | {"text": more}).encode(), kind)


def test_what_is_not_simulated_is_refused_and_named():
    found = asking(*((TEXT, {"prompt": "x", "max_tokens": 2} | more) for more in REFUSED))
    for more, (status, answer, _) in zip(REFUSED, found, strict=True):
        assert status == 400, more
        name = next(iter(more))
        assert name.partition("_")[0] in answer["error"]["message"], more
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    found = asking(
        (CHAT, {"messages": [{"role": "user", "content": image}]}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": [{"type": "function_call"}]}),
        (RESPONSES, {"input": "x", "previous_response_id": "y"}),
        (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}),
        (RESPONSES, {"input": "x", "n": 2}),
    )
    assert [status for status, *_ in found] == [400] * 8


def test_responses():
    body = {"input": "hello there", "instructions": "be", "max_output_tokens": 4}
    ((status, found, _),) = asking((RESPONSES, body))
    assert status == 200
    assert (found["object"], found["status"]) == ("response", "incomplete")
    assert found["output"][0]["content"][0]["text"] == " tok" * 4
    assert found["usage"]["output_tokens"] == 4

    async def talk(session, url):
        sdk = pytest.importorskip("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        kinds, text = [], ""
        async with sdk:
            asked = {"model": "Qwen3-30B-A3B", "input": "hello", "max_output_tokens": 3}
            whole = await sdk.responses.create(**asked)
            async for event in await sdk.responses.create(**asked, stream=True):
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
        return whole.output_text, text, kinds

    whole, text, kinds = against(Service(CONFIG, speed=SPEED), talk)
    assert whole == text == " tok" * 3
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


def test_other_paths_of_engines():
    async def talk(session, _url):
        found = {}
        for path in ("/version", "/ping", "/load", "/get_model_info", "/get_server_info",
                     "/model_info", "/server_info", "/get_load", "/health_generate",
                     "/v1/models"):  # fmt: skip
            async with session.get(path) as answer:
                text = await answer.text()
                found[path] = answer.status, json.loads(text) if text else None
        async with session.post("/tokenize", json={"prompt": "a" * 9}) as answer:
            found["tokens"] = await answer.json()
        async with session.post("/detokenize", json={"tokens": [1]}) as answer:
            found["text"] = answer.status
        return found

    found = against(Service(CONFIG, speed=SPEED, adapters=["mine"]), talk)
    assert {found[path][0] for path in found if path.startswith("/")} == {200}
    assert [model["id"] for model in found["/v1/models"][1]["data"]] == ["Qwen3-30B-A3B", "mine"]
    assert found["/server_info"] == found["/get_server_info"]
    idle = {"num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert found["/get_load"][1][0] == idle | {"dp_rank": 0}
    assert found["tokens"]["count"] == 3
    assert found["text"] == 400


def test_metrics_of_sglang():
    async def talk(session, _url):
        await (await session.post(TEXT, json={"prompt": [1] * 9, "max_tokens": 4})).json()
        return await (await session.get("/metrics")).text()

    text = against(Service(ALONE.replace(engine="sglang"), speed=SPEED), talk)
    names = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
    assert not any(name.startswith("vllm:") for name in names)
    assert {"num_running_reqs", "num_queue_reqs", "token_usage", "num_requests_total",
            "time_to_first_token_seconds_bucket", "prompt_tokens_total"} <= {
        name.removeprefix("sglang:") for name in names}  # fmt: skip


# --- KV events ---


def kv_events(**changes):
    about = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{free_port()}"}
    return parse_kv_events(json.dumps(about | changes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"), ("[]", "kv_events_config"), ('{"publisher": "x"}', "publisher"),
        ('{"port": 3}', "port"), ('{"buffer_steps": 0}', "buffer_steps"),
    ],
)  # fmt: skip
def test_configurations_that_are_wrong(text, said):
    with pytest.raises(InputError, match=said):
        parse_kv_events(text)
    assert parse_kv_events("{}") is None


@pytest.mark.parametrize("as_lists", [False, True])
def test_a_listener_knows_what_the_cache_holds(as_lists):
    """The router's reader of vLLM's events finds of each prompt what the engine finds."""
    config = kv_events(as_lists=as_lists)
    service = Service(ALONE.replace(num_gpu_blocks_override=200), speed=SPEED, kv_events=config)
    prefixes = CachedPrefixes(1)

    async def talk(session, _url):
        watch, (publisher,) = EventWatch(prefixes, 0, config.endpoint), service.publishers
        listening = asyncio.create_task(watch.listen())
        while watch._expected < 0:  # until it has subscribed
            body = {"prompt": [publisher._number + 100] * 64, "max_tokens": 1}
            await (await session.post(TEXT, json=body)).json()
        agreed = []
        for number in range(30):  # 200 blocks hold the last ones of these
            prompt = [7 + number % 3] * 64 + [number] * (64 + 16 * number)
            matched = prefixes.matched(prefixes.keys(prompt), len(prompt)).tolist()
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            answer = await (await session.post(TEXT, json=body)).json()
            found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            agreed.append((matched[0], found))
            await until(lambda: watch._expected == publisher._number)
        listening.cancel()
        return agreed

    agreed = against(service, talk)
    assert all(matched == found for matched, found in agreed), agreed
    assert sum(found > 0 for _, found in agreed) > 20
    assert prefixes.blocks_of(0) <= 200


def number_of(parts):
    return int.from_bytes(parts[1], "big")


def test_batches_are_replayed():
    config = kv_events(replay_endpoint=f"tcp://127.0.0.1:{free_port()}", topic="kv@m")
    service = Service(ALONE, speed=SPEED, kv_events=config)

    async def talk(session, _url):
        with zmq.asyncio.Context() as context:
            live, again = context.socket(zmq.SUB), context.socket(zmq.REQ)
            live.subscribe(b"kv@")
            live.connect(config.endpoint)
            (publisher,), number, heard = service.publishers, 0, []
            while not await live.poll(10):  # until it has subscribed
                number += 1
                body = {"prompt": [number] * 40, "max_tokens": 1}
                await (await session.post(TEXT, json=body)).json()
            for number in range(-3, 0):
                body = {"prompt": [-number] * 50, "max_tokens": 1}
                await (await session.post(TEXT, json=body)).json()
            while not heard or number_of(heard[-1]) + 1 < publisher._number:
                heard.append(await live.recv_multipart())
            dealer = context.socket(zmq.DEALER)
            dealer.connect(config.replay_endpoint)
            await dealer.send_multipart([b"", heard[1][1]])
            replayed = []
            while not replayed or replayed[-1][1] != (-1).to_bytes(8, "big", signed=True):
                replayed.append(await asyncio.wait_for(dealer.recv_multipart(), 50))
            for socket in (live, again, dealer):
                socket.close(0)
        return heard, replayed

    heard, replayed = against(service, talk)
    first = number_of(heard[0])
    assert [number_of(parts) for parts in heard] == list(range(first, first + len(heard)))
    assert len(heard) >= 3
    assert [parts[1:] for parts in replayed[:-1]] == [parts[1:] for parts in heard[1:]]
    event = msgspec.msgpack.decode(heard[0][2])["events"][0]
    assert (event["type"], event["block_size"], event["parent_block_hash"]) == (
        "BlockStored", 16, None,
    )  # fmt: skip
    assert len(event["block_hashes"]) * 16 == len(event["token_ids"]) == 32


def test_adapters_and_salts_share_no_blocks():
    async def talk(session, _url):
        found = []
        for more in ({}, {"model": "mine"}, {"cache_salt": "x"}, {}, {"model": "mine"}):
            body = {"prompt": [3] * 64, "max_tokens": 1} | more
            answer = await (await session.post(TEXT, json=body)).json()
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    assert against(Service(ALONE, speed=SPEED, adapters=["mine"]), talk) == [0, 0, 0, 48, 48]


def test_an_endpoint_that_is_taken_is_one_line():
    config = kv_events()
    first = Publisher(config, 0, 16)
    with pytest.raises(InputError, match="kv_events_config: tcp://"):
        Publisher(config, 0, 16)
    first.close()


# --- fleets and faults ---


def test_a_header_names_the_worker():
    intake = Intake(Limits())
    services = [Service(ALONE, speed=SPEED, intake=intake) for _ in range(3)]

    async def run():
        app = by_header(services, "X-Worker", Guard())
        async with served(app) as url, aiohttp.ClientSession(base_url=url) as session:
            statuses = []
            for worker in ("0", "2", "2", "3", "", "-1", "²"):
                headers = {"X-Worker": worker} if worker.isascii() else {}
                body = {"prompt": "x", "max_tokens": 1}
                async with session.post(TEXT, json=body, headers=headers) as answer:
                    statuses.append(answer.status)
            return statuses

    assert asyncio.run(run()) == [200, 200, 200, 400, 400, 400, 400]
    counts = [int((s.core.cluster.requests["outcome"] > 0).sum()) for s in services]
    assert counts == [1, 0, 2]


def test_faults_on_demand():
    config = kv_events()
    services = [Service(ALONE, speed=SPEED, kv_events=config)]

    async def run():
        service = services[0]
        async with (
            served(service.app()) as url,
            served(Admin(services).app()) as admin,
            aiohttp.ClientSession(base_url=url) as session,
            aiohttp.ClientSession(base_url=admin) as faults,
        ):

            async def act(action, **body):
                async with faults.post(f"/workers/0/{action}", json=body) as answer:
                    return answer.status, await answer.json()

            async def ask(**more):
                body = {"prompt": [1] * 64, "max_tokens": 4, "ignore_eos": True} | more
                async with session.post(TEXT, json=body) as answer:
                    return answer.status, await answer.json()

            assert (await ask())[0] == 200
            assert (await act("slow", factor=4.0))[1]["slow"] == 4.0
            assert service.core.speed == SPEED / 4
            await act("slow", factor=1)
            await act("drain", on=True)
            assert (await session.get("/health")).status == 503
            assert (await ask())[0] == 503
            await act("drain", on=False)
            await act("hang", on=True)
            waiting = asyncio.ensure_future(ask())
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await act("hang", on=False)
            assert (await waiting)[0] == 200
            cached = (await ask())[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 48
            long = asyncio.ensure_future(ask(max_tokens=20_000))
            await until(lambda: len(service.core.open), 1)
            assert (await act("kill", on=True))[1]["requests"] == 0
            with pytest.raises(aiohttp.ClientError):
                await long
            with pytest.raises(aiohttp.ClientError):
                await session.get("/health")
            await act("kill", on=False)
            cached = (await ask())[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == 0
            await act("drop_kv_events", on=True)
            assert service.publishers[0].dropping
            await act("delay_metrics", seconds=0.2)
            begun = asyncio.get_running_loop().time()
            await session.get("/metrics")
            assert asyncio.get_running_loop().time() - begun >= 0.2
            for action, body in (("slow", {}), ("slow", {"factor": 0}), ("hang", {"on": 1}),
                                 ("slow", {"factor": "x"}), ("slow", {"factor": 2,
                                 "x": 1})):  # fmt: skip
                assert (await act(action, **body))[0] == 400
            assert (await act("explode"))[0] == 404
            async with faults.post("/workers/7/slow", json={"factor": 2}) as answer:
                assert answer.status == 404
            evil = {"Origin": "http://evil.example"}
            async with faults.post("/workers/0/kill", json={"on": True}, headers=evil) as answer:
                assert answer.status == 403
            async with faults.get("/workers") as answer:
                assert (await answer.json())[0]["drop_kv_events"]

    asyncio.run(run())
