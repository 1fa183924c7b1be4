"""KV events of a simulated engine, over ZeroMQ, as vLLM publishes them (``kv_events.py`` of
vllm/distributed): a topic, a number that counts up, a batch in MessagePack; and a replay endpoint,
which sends the batches from a number on again."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError, needed
from eldr_sim.inputs import parse_json

_END = (-1).to_bytes(8, "big", signed=True)


class KVEventsConfig(BaseModel):
    """vLLM's ``--kv-events-config``. Worker n listens at the ports of the endpoints plus n, as a
    data-parallel rank does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = Field(default=10_000, ge=1)  #: batches that can be replayed
    hwm: int = Field(default=100_000, ge=1)  #: batches that wait for a slow subscriber
    max_queue_size: int = Field(default=100_000, ge=1)  #: of vLLM's; nothing is queued here
    topic: str = ""
    #: Whether batches and events are lists, as vLLM sent them before they became mappings.
    as_lists: bool = False


def parse_kv_events(text: str) -> KVEventsConfig | None:
    """Read ``--kv-events-config``, JSON; None where events are not enabled. Raises InputError."""
    try:
        config = KVEventsConfig.model_validate(parse_json(text, "kv_events_config"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "kv_events_config"
        raise InputError("kv_events_config", f"{where}: {first['msg']}") from None
    if config.publisher not in ("zmq", "null"):
        raise InputError("kv_events_config", f"publisher {config.publisher!r}", "zmq, null")
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


class Publisher:
    """The KV events of worker ``rank``. ``block_size``: tokens. `learn` says what blocks hold,
    `tell` gets their numbers; raises InputError where an endpoint cannot be bound."""

    def __init__(self, config: KVEventsConfig, rank: int, block_size: int) -> None:
        self._zmq = needed("zmq", "kv_events_config")
        self._encode = needed("msgspec.msgpack", "kv_events_config").encode
        self._config, self._rank, self._size = config, rank, block_size
        #: Whether events are lost on the way: numbers go on, batches are not sent.
        self.dropping = False
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        #: By a block's number: that of the block before it, its tokens, and the adapter.
        self._blocks: dict[int, tuple[int | None, list[int], str | None]] = {}
        self._context = self._zmq.Context()
        self._publishing = self._bound(self._zmq.PUB, config.endpoint)
        self._publishing.set_hwm(config.hwm)
        self._replay: Any = None
        if config.replay_endpoint is not None:
            self._replay = self._bound(self._zmq.ROUTER, config.replay_endpoint)

    def _bound(self, kind: int, endpoint: str) -> Any:
        address, colon, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and colon and port.isdecimal():
            endpoint = f"{address}:{int(port) + self._rank}"
        elif self._rank:
            endpoint += f"_dp{self._rank}"
        socket = self._context.socket(kind)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise InputError("kv_events_config", f"{endpoint}: {error.strerror}") from None
        return socket

    @property
    def replay_file(self) -> int | None:
        """What becomes readable when a replay may have been requested; None without an endpoint."""
        return None if self._replay is None else int(self._replay.getsockopt(self._zmq.FD))

    def learn(self, numbers: Sequence[int], tokens: Sequence[int], adapter: str | None) -> None:
        """Note which tokens the blocks of a prompt hold, the first ones."""
        before, size = None, self._size
        for at, number in enumerate(numbers):
            own = list(tokens[at * size : (at + 1) * size])
            if len(own) < size:
                break
            self._blocks.setdefault(number, (before, own, adapter))
            before = number

    def tell(self, stored: Sequence[int], removed: Sequence[int]) -> None:
        """Publish that blocks have come or gone."""
        events: list[dict[str, Any]] = []
        if removed:
            events.append({"type": "BlockRemoved", "block_hashes": [_hash(n) for n in removed]})
            events[-1]["medium"] = "GPU"
        run: list[int] = []
        for number in stored:  # one event for blocks that follow each other
            known = self._blocks.get(number)
            if known is None:
                continue
            if run and known[0] != run[-1]:
                events.append(self._stored(run))
                run = []
            run.append(number)
        if run:
            events.append(self._stored(run))
        self._send(events)

    def clear(self) -> None:
        """Publish that the cache is empty."""
        self._send([{"type": "AllBlocksCleared"}])

    def _stored(self, run: Sequence[int]) -> dict[str, Any]:
        before, _, adapter = self._blocks[run[0]]
        return {
            "type": "BlockStored",
            "block_hashes": [_hash(number) for number in run],
            "parent_block_hash": None if before is None else _hash(before),
            "token_ids": [token for number in run for token in self._blocks[number][1]],
            "block_size": self._size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": adapter,
        }

    def _send(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        batch: Any = {"ts": time.time(), "events": events, "data_parallel_rank": self._rank}
        if self._config.as_lists:
            batch = [batch["ts"], [list(event.values()) for event in events], self._rank]
        number, data = self._number, self._encode(batch)
        self._number += 1
        self._kept.append((number, data))
        if not self.dropping:
            parts = self._config.topic.encode(), number.to_bytes(8, "big"), data
            with suppress(self._zmq.Again):
                self._publishing.send_multipart(parts, self._zmq.NOBLOCK)

    def answer_replays(self) -> None:
        """Send what subscribers have asked for again."""
        while self._replay is not None and self._replay.getsockopt(self._zmq.EVENTS) & 1:
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            first = int.from_bytes(frames[2], "big")
            sent = [(n.to_bytes(8, "big"), data) for n, data in self._kept if n >= first]
            for pair in (*sent, (_END, b"")):
                with suppress(self._zmq.ZMQError):
                    self._replay.send_multipart((*frames[:2], *pair), self._zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets."""
        for socket in (self._publishing, self._replay):
            if socket is not None:
                socket.close(0)
        self._context.term()


def _hash(number: int) -> int:
    """Return a hash of 63 bits that stands for a block's number (the mixer of splitmix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return (mixed ^ mixed >> 31) >> 1
