"""Prefill and decode workers at their own ports: what they hand over, and how long it takes."""

import asyncio

import aiohttp
import pytest

from eldr_sim import RunConfig
from eldr_sim.errors import InputError
from eldr_sim.serving.router.config import make_config as make_router
from eldr_sim.serving.router.proxy import make_app
from eldr_sim.serving.simulated.handover import workers_of
from eldr_sim.serving.simulated.server import Service
from eldr_sim.simulator.simulation import Simulation
from eldr_sim.validation.live.engines.client import send_load
from eldr_sim.validation.live.engines.load import Load, LoadRequest

from .test_simulated import SPEED, TEXT, events, in_background, served

MODEL = "Llama-3.1-8B"
CONFIG = RunConfig(
    model=MODEL, topology="2P2D", policy="jsq", num_requests=64, warmup=0, frontend="none",
)  # fmt: skip
FETCH = {"do_remote_decode": True}


def services_of(config, speed=SPEED):
    return [Service(worker.config, speed=speed, rank=rank, role=worker.role)
            for rank, worker in enumerate(workers_of(config))]  # fmt: skip


def at_ports(services, talk):
    """Return what ``talk(ask)`` returns; ``ask(worker, body)`` posts a completion."""

    async def run():
        async with (
            served(services[0].app()) as first,
            served(services[-1].app()) as last,
            aiohttp.ClientSession() as session,
        ):

            async def ask(worker, body):
                url = f"{(first, last)[worker]}{TEXT}"
                async with session.post(url, json=body) as answer:
                    if answer.content_type == "text/event-stream":
                        return await events(answer)
                    return answer.status, await answer.json()

            return await talk(ask)

    return asyncio.run(run())


@pytest.mark.parametrize("prompt_len", [1, 16, 17, 3000])
def test_the_two_halves_take_as_long_as_in_one_cluster(prompt_len):
    services = services_of(CONFIG.replace(topology="1P1D"))

    async def talk(ask):
        body = {"prompt": [7] * prompt_len, "max_tokens": 1, "kv_transfer_params": FETCH}
        status, answer = await ask(0, body)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 1
        params = answer["kv_transfer_params"]
        assert params["do_remote_prefill"]
        assert not params["do_remote_decode"]
        assert len(params["remote_block_ids"][0]) == -(-prompt_len // 16)
        body |= {"max_tokens": 5, "ignore_eos": True, "kv_transfer_params": params}
        pieces = await ask(1, body | {"stream": True})
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == " tok" * 5

    at_ports(services, talk)
    whole = Simulation(CONFIG.replace(topology="1P1D"), arrivals=False, prefixes=True)
    whole.cluster.submit(prompt_len, 5)
    whole.advance(60.0)
    one, prefill, decode = (
        source.requests[0]
        for source in (whole.cluster, services[0].core.cluster, services[1].core.cluster)
    )
    for record, begin, end in (
        (prefill, "arrival_s", "prefill_end_s"),
        (decode, "transfer_start_s", "transfer_end_s"),
        (decode, "transfer_end_s", "first_token_s"),
        (decode, "first_token_s", "finish_s"),
    ):
        assert record[end] - record[begin] == pytest.approx(one[end] - one[begin], abs=1e-6)
    assert decode["transfer_start_s"] - decode["arrival_s"] == pytest.approx(0.0, abs=1e-6)


def test_what_a_worker_does_not_do_is_refused_and_named():
    services = services_of(CONFIG.replace(topology="1P1D"))
    body = {"prompt": [7] * 30, "max_tokens": 1}
    good = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x",
            "remote_host": "h", "remote_port": 1}  # fmt: skip
    cases = [
        (0, {"max_tokens": 2}, "max_tokens"), (0, {"n": 2}, "n:"),
        (0, {"prompt": ["a", "b"]}, "n:"), (0, {"kv_transfer_params": good}, "do_remote_prefill"),
        (0, {"kv_transfer_params": [1]}, "no object"), (1, {}, "computes no prompts"),
        (1, {"kv_transfer_params": FETCH}, "computes no prompts"),
        *((1, {"kv_transfer_params": good | {name: None}}, name) for name in good),
    ]  # fmt: skip

    async def talk(ask):
        return [await ask(worker, body | more) for worker, more, _ in cases]

    for (_, more, named), (status, answer) in zip(cases, at_ports(services, talk), strict=True):
        assert status == 400, more
        assert named in answer["error"]["message"], more


def test_our_router_serves_through_prefill_and_decode_ports():
    services = services_of(CONFIG)
    with in_background(*services) as urls:
        router = make_router(
            prefill_urls=urls[:2], decode_urls=urls[2:], policy="round_robin",
            prefill_policy="round_robin", port=0,
        )  # fmt: skip

        class Front:
            def app(self):
                return make_app(router)

        with in_background(Front()) as (front,):
            requests = [
                LoadRequest(f"r{n}", "all", [n] * 60, output_len=12, send_s=0.01 * n)
                for n in range(16)
            ]
            table = send_load(Load(None, tuple(requests)), front, model=MODEL)
    assert table.num_rows == 16
    ended = [int((s.core.cluster.requests["outcome"] == 1).sum()) for s in services]
    assert ended == [8] * 4
    assert [len(service.core.engines()) for service in services] == [1] * 4


def test_pools_keep_their_own_options():
    config = CONFIG.replace(prefill={"gpu": "H200"}, decode={"gpu": "MI300X"})
    prefill, *_, decode = workers_of(config)
    Service(prefill.config, role="prefill")
    blocks = [Service(w.config, role=w.role).core.kv_blocks() for w in (prefill, decode)]
    assert blocks[0] < blocks[1]
    for more in ({"topology": "2P"}, {"conditional_disagg": "tokens:100"}):
        with pytest.raises(InputError, match=next(iter(more))):
            workers_of(CONFIG.replace(**more))
