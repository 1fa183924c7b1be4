"""Which prefixes live engines have cached, by the events that vLLM publishes over ZeroMQ.

With ``--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'``: a topic, a
number that counts up, a batch in MessagePack (``vllm/distributed/kv_events.py``). A block's event
has its tokens and the block before it, so prompts are compared by tokens, not vLLM's hashes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from eldr_sim.arrays import Ints
from eldr_sim.errors import needed
from eldr_sim.simulator.control.known_blocks import PublishedBlocks, matched_tokens

_ROOT = 0
#: Names of an event's values where it comes as a list, as older versions of vLLM send it.
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED = ("block_hashes", "medium")
_NUMBER_BYTES = 8
_HASH = (int, bytes, str)
#: Most tokens of a block, blocks of an engine (16 tokens each: 64 million tokens) and bytes of a
#: message that are believed.
_MOST_BLOCK_SIZE, _MOST_BLOCKS, _MOST_BYTES = 1 << 16, 4_000_000, 64 << 20
_RECONNECT_S = 0.2


def prefix_keys(tokens: Sequence[int], size: int, parent: int = _ROOT) -> list[int]:
    """Return a number for each whole block of tokens, which stands for all tokens up to its end."""
    keys = []
    for end in range(size, len(tokens) + 1, size):
        parent = hash((parent, *tokens[end - size : end]))
        keys.append(parent)
    return keys


class CachedPrefixes:
    """The prefixes that each engine's cache holds, as its events say. Blocks of LoRA adapters,
    images or salted requests, of later groups of a hybrid model, and those that lie elsewhere than
    on the GPU are left out."""

    def __init__(self, n_engines: int) -> None:
        self._published = PublishedBlocks(n_engines)
        #: By the engine's own hashes of its blocks: their keys.
        self._keys: list[dict[Any, int]] = [{} for _ in range(n_engines)]
        self.block_size = 0  #: tokens of a block, as the engines say; 0 before the first event

    def keys(self, tokens: Sequence[int]) -> list[int]:
        """Return the keys of a prompt's whole blocks; none before an engine has told a block."""
        return prefix_keys(tokens, self.block_size) if self.block_size else []

    def matched(self, keys: Sequence[int], prompt_len: int) -> Ints:
        """Return how many of a prompt's tokens, 1 or more, each engine has: ``[n_engines]``."""
        blocks = self._published.match(0, keys, range(len(self._keys)), 0.0)
        size = max(1, self.block_size)
        return matched_tokens(blocks, prompt_len, size, size)

    def blocks_of(self, engine: int) -> int:
        """Return how many blocks an engine holds."""
        return len(self._keys[engine])

    def cleared(self, engine: int) -> None:
        """Take note that an engine's cache is empty."""
        self._published.on_blocks(engine, (), list(self._keys[engine].values()))
        self._keys[engine].clear()

    def hear(self, engine: int, batch: object) -> None:
        """Apply a batch of events: a time, and the events; batch and events are mappings or, in
        older versions of vLLM, lists. Events of unknown kinds are ignored. Raises MalformedEvent,
        and then has applied a part at most."""
        events = batch.get("events") if isinstance(batch, Mapping) else None
        if _is_list(batch) and len(batch) > 1:
            events = batch[1]
        if not _is_list(events):
            raise MalformedEvent("a batch is a time and a list of events")
        for event in events:
            if isinstance(event, Mapping):
                kind, about = event.get("type"), event
            elif _is_list(event) and event:
                kind, values = event[0], event[1:]
                names = _STORED if kind == "BlockStored" else _REMOVED
                about = dict(zip(names, values, strict=False))
            else:
                kind, about = None, {}
            if not isinstance(kind, str):
                raise MalformedEvent("an event without a type")
            if about.get("group_idx") or about.get("medium") not in (None, "GPU"):
                continue
            if kind == "BlockStored":
                self._stored(engine, about)
            elif kind == "BlockRemoved":
                self._removed(engine, _hashes(about))
            elif kind == "AllBlocksCleared":
                self.cleared(engine)

    def _stored(self, engine: int, about: Mapping[str, Any]) -> None:
        known, size, hashes = self._keys[engine], about.get("block_size"), _hashes(about)
        tokens, parent = about.get("token_ids"), about.get("parent_block_hash")
        if type(size) is not int or not 1 <= size <= _MOST_BLOCK_SIZE:
            raise MalformedEvent(f"block_size is not a whole number from 1 to {_MOST_BLOCK_SIZE}")
        if not _is_list(tokens) or len(tokens) < size * len(hashes):
            raise MalformedEvent("token_ids is not a list of the blocks' tokens")
        if not set(map(type, tokens)) <= {int}:
            raise MalformedEvent("token_ids holds something else than whole numbers")
        if parent is not None and not isinstance(parent, _HASH):
            raise MalformedEvent("parent_block_hash is not a number or bytes")
        begins = _ROOT if parent is None else known.get(parent)
        extra = about.get("extra_keys") or ()
        if not _is_list(extra):
            raise MalformedEvent("extra_keys is not a list")
        salted = any(extra) or about.get("lora_id") or about.get("lora_name")
        if begins is None or salted or size != (self.block_size or size):
            return
        if len(known) + len(hashes) > _MOST_BLOCKS:
            raise MalformedEvent(f"more than {_MOST_BLOCKS:,} blocks that were not removed")
        self.block_size = size
        keys = prefix_keys(tokens, size, begins)[: len(hashes)]
        self._removed(engine, hashes)  # a hash that is stored again names a new block
        known |= zip(hashes, keys, strict=True)
        self._published.on_blocks(engine, keys, ())

    def _removed(self, engine: int, hashes: Sequence[Any]) -> None:
        known = self._keys[engine]
        gone = [known.pop(name) for name in hashes if name in known]
        self._published.on_blocks(engine, (), gone)


class MalformedEvent(ValueError):
    """A message that does not follow vLLM's schema."""


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _hashes(about: Mapping[str, Any]) -> Sequence[Any]:
    hashes = about.get("block_hashes")
    if not (_is_list(hashes) and all(isinstance(one, _HASH) for one in hashes)):
        raise MalformedEvent("block_hashes is not a list of numbers or bytes")
    return hashes


def require_zmq() -> None:
    """Raise InputError if what reads events is not installed."""
    for package in ("zmq", "msgspec"):
        needed(package, "kv_events")


class EventWatch:
    """What an engine publishes at ``endpoint`` (``tcp://...``), applied to ``prefixes``.
    ``problem``: called with what was wrong with a message, None after a good one."""

    def __init__(
        self,
        prefixes: CachedPrefixes,
        engine: int,
        endpoint: str,
        problem: Callable[[str | None], None] = lambda _problem: None,
    ) -> None:
        self._prefixes, self._engine, self._endpoint = prefixes, engine, endpoint
        self._problem, self._expected = problem, -1

    async def listen(self) -> None:
        """Apply messages until cancelled. Where they do not follow each other, or one is malformed,
        what was known of the engine is forgotten; after a malformed one the connection is made
        anew."""
        zmq, contexts = needed("zmq", "kv_events"), needed("zmq.asyncio", "kv_events")
        with contexts.Context() as context:
            while True:
                self._prefixes.cleared(self._engine)
                self._expected = -1
                with context.socket(zmq.SUB) as socket:
                    socket.set(zmq.LINGER, 0)
                    socket.set(zmq.MAXMSGSIZE, _MOST_BYTES)
                    socket.subscribe(b"")
                    socket.connect(self._endpoint)
                    try:
                        while True:
                            self._apply(await socket.recv_multipart())
                            await asyncio.sleep(0)  # a flood must not stop the router
                    except MalformedEvent as error:
                        self._problem(str(error))
                await asyncio.sleep(_RECONNECT_S)

    def _apply(self, parts: Sequence[bytes]) -> None:
        msgspec = needed("msgspec", "kv_events")
        if len(parts) != 3 or len(parts[1]) != _NUMBER_BYTES:
            raise MalformedEvent("a message has a topic, a number of 8 bytes and a batch")
        number = int.from_bytes(parts[1], "big")
        if self._expected not in (-1, number):
            self._prefixes.cleared(self._engine)
        self._expected = number + 1
        try:
            batch = msgspec.msgpack.decode(parts[2])
        except (msgspec.DecodeError, ValueError, RecursionError, MemoryError, TypeError) as error:
            raise MalformedEvent(f"no MessagePack: {error}") from None
        self._prefixes.hear(self._engine, batch)
        self._problem(None)
