"""What a router knows of engines' prefix caches, by the events that they publish."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from eldr_sim.errors import InputError
from eldr_sim.serving.router.config import make_config
from eldr_sim.serving.router.decisions import build_decode_policy
from eldr_sim.serving.router.kv_events import CachedPrefixes, EventWatch
from eldr_sim.serving.router.proxy import make_app
from eldr_sim.validation.live.engines.servers import free_port

from ..waiting import until
from .fake_engine import FakeEngine
from .router_scene import running

SIZE = 2


def stored(hashes, parent, tokens, **more):
    about = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {"type": "BlockStored", **about, "block_size": SIZE, "lora_id": None, **more}


def removed(*hashes):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def matched(prefixes, tokens):
    return prefixes.matched(prefixes.keys(tokens), len(tokens)).tolist()


def test_a_prompt_finds_the_blocks_whose_tokens_it_begins_with():
    prefixes = CachedPrefixes(2)
    assert matched(prefixes, [1, 2, 3]) == [0, 0]  # nobody has told a block's size
    prefixes.hear(1, [0.0, [stored([7, 8], None, [1, 2, 3, 4]), stored([9], 8, [5, 6])], None])
    assert matched(prefixes, [1, 2, 3, 4, 5, 6, 7]) == [0, 6]
    assert matched(prefixes, [1, 2, 3, 4, 5, 6]) == [0, 4]  # the last token is computed
    assert matched(prefixes, [1, 2, 9, 4, 5]) == [0, 2]
    prefixes.hear(1, [0.0, [removed(8)]])
    assert matched(prefixes, [1, 2, 3, 4, 5, 6, 7]) == [0, 2]
    prefixes.hear(1, [0.0, [{"type": "AllBlocksCleared"}]])
    assert matched(prefixes, [1, 2, 3, 4, 5, 6, 7]) == [0, 0]


def test_batches_are_mappings_or_lists():
    prefixes = CachedPrefixes(1)
    prefixes.hear(0, {"ts": 0.0, "events": [stored([7], None, [1, 2])], "data_parallel_rank": 0})
    assert matched(prefixes, [1, 2, 3]) == [2]


def test_events_of_older_versions_are_lists():
    prefixes = CachedPrefixes(1)
    prefixes.hear(0, [0.0, [["BlockStored", [b"a"], None, [1, 2], SIZE, None]]])
    assert matched(prefixes, [1, 2, 3]) == [2]
    prefixes.hear(0, [0.0, [["BlockRemoved", [b"a"]]]])
    assert matched(prefixes, [1, 2, 3]) == [0]


def test_a_hash_that_is_stored_again_names_the_new_block():
    """As after a reset that the router has missed."""
    prefixes = CachedPrefixes(1)
    for tokens in ([1, 2], [3, 4]):
        prefixes.hear(0, [0.0, [stored([7], None, tokens)]])
    assert matched(prefixes, [1, 2, 5]) == [0]
    assert matched(prefixes, [3, 4, 5]) == [2]


@pytest.mark.parametrize(
    "more", [{"extra_keys": [["salt"]]}, {"lora_id": 3}, {"medium": "CPU"}, {"group_idx": 1}]
)
def test_blocks_that_a_plain_prompt_does_not_find(more):
    prefixes = CachedPrefixes(1)
    prefixes.hear(0, [0.0, [stored([1], None, [5, 6], **more), stored([2], None, [1, 2])]])
    assert matched(prefixes, [5, 6, 7]) == [0]
    assert matched(prefixes, [1, 2, 3]) == [2]


@given(st.data())
def test_it_is_the_longest_run_of_blocks_that_are_there(data):
    """A cache is a set of token tuples, each from the prompt's begin, in blocks of any size."""
    size = data.draw(st.integers(1, 3))
    prefixes, held = CachedPrefixes(1), {}
    letters = st.lists(st.integers(0, 2), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(letters)
        whole = [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            prefixes.hear(0, [0.0, [removed(held.pop(gone))]])
        for at, block in enumerate(whole):
            if block in held:
                continue
            if at and whole[at - 1] not in held:  # vLLM caches no block without the one before
                break
            held[block] = len(held) + 1000 * len(block) + hash(block) % 997
            parent = held[whole[at - 1]] if at else None
            event = stored([held[block]], parent, list(block[-size:])) | {"block_size": size}
            prefixes.hear(0, [0.0, [event]])
    tokens = data.draw(letters)
    run = 0
    while (end := (run + 1) * size) <= len(tokens) and tuple(tokens[:end]) in held:
        run += 1
    assert matched(prefixes, tokens) == [min(run * size, (len(tokens) - 1) // size * size)]


@pytest.fixture
def publishers():
    """Sockets as vLLM has them, and their endpoints."""
    ports = [free_port() for _ in range(2)]
    with zmq.Context() as context:
        sockets = [context.socket(zmq.PUB) for _ in ports]
        for socket, port in zip(sockets, ports, strict=True):
            socket.bind(f"tcp://127.0.0.1:{port}")
        yield sockets, [f"tcp://127.0.0.1:{port}" for port in ports]
        for socket in sockets:
            socket.close(0)


def publish(socket, number, *events):
    body = msgspec.msgpack.encode([0.0, list(events), None])
    socket.send_multipart([b"", number.to_bytes(8, "big"), body])


def test_what_is_lost_counts_as_gone(publishers):
    (first, _), endpoints = publishers
    prefixes = CachedPrefixes(1)

    async def scene():
        task = asyncio.create_task(EventWatch(prefixes, 0, endpoints[0]).listen())
        number = 0
        while not prefixes.block_size:  # until it has subscribed
            publish(first, number, stored([number], None, [8, 9]))
            number += 1
            await asyncio.sleep(0.01)
        publish(first, number, stored([100], None, [1, 2]))
        await until(lambda: matched(prefixes, [1, 2, 3]), [2])
        publish(first, number + 2, stored([101], None, [3, 4]))
        await until(lambda: matched(prefixes, [3, 4, 5]), [2])
        assert matched(prefixes, [1, 2, 3]) == [0]
        publish(first, 0, stored([102], None, [5, 6]))  # it has begun anew
        await until(lambda: matched(prefixes, [5, 6, 7]), [2])
        assert matched(prefixes, [3, 4, 5]) == [0]
        task.cancel()

    asyncio.run(scene())


def test_the_router_sends_a_prompt_where_its_prefix_is(publishers):
    (_, second), endpoints = publishers
    engines = [FakeEngine("first"), FakeEngine("second")]

    async def scene():
        policy = build_decode_policy("cache_aware", 2, computes_prompts=True)
        async with running(engines, policy=policy, kv_events=endpoints) as at:
            prompt = list(range(1, 9))
            number = 0
            while True:  # in turn where nothing is known, so the second gets every other one
                publish(second, number, stored([1, 2, 3], None, prompt[:6]))
                number += 1
                await asyncio.sleep(0.02)
                before = len(engines[0].seen)
                for _ in range(4):
                    assert (await at.ask(prompt=prompt, max_tokens=1))[0] == 200
                if len(engines[0].seen) == before:
                    break
                assert number < 1000
            assert await at.counted("engine_cached_blocks", engine=engines[1].url) == 3
            text = "no /tokenize there: routed, by nothing that is known"
            assert (await at.ask(prompt=text, max_tokens=1))[0] == 200

    asyncio.run(scene())


def test_policies_that_read_caches_need_events():
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]

    def made(policy, *endpoints):
        make_app(make_config(port=0, decode_urls=urls, policy=policy, kv_events=list(endpoints)))

    with pytest.raises(InputError, match="kv_events: 0 of 2 engines; 'llmd' reads"):
        made("llmd")
    with pytest.raises(InputError, match="kv_events: policy 'jsq' reads no caches"):
        made("jsq", "tcp://127.0.0.1:5")
