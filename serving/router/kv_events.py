"""Which prefixes live engines have cached, by the events that vLLM publishes over ZeroMQ.

With ``--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'``: a topic, a
number that counts up, a batch in MessagePack (``vllm/distributed/kv_events.py``). A block's event
has its tokens and the block before it, so prompts are compared by tokens, not vLLM's hashes."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from eldr_sim.arrays import Ints
from eldr_sim.errors import needed
from eldr_sim.simulator.control.known_blocks import PublishedBlocks, matched_tokens

_ROOT = 0
#: Names of an event's values where it comes as a list, as older versions of vLLM send it.
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED = ("block_hashes", "medium")
_NUMBER_BYTES = 8


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

    def hear(self, engine: int, batch: Sequence[Any]) -> None:
        """Take note of a batch of events: its time, and the events, each a mapping or a list."""
        for event in batch[1]:
            if isinstance(event, Mapping):
                kind, about = event["type"], event
            else:
                kind, values = event[0], event[1:]
                names = _STORED if kind == "BlockStored" else _REMOVED
                about = dict(zip(names, values, strict=False))
            if about.get("group_idx") or about.get("medium") not in (None, "GPU"):
                continue
            if kind == "BlockStored":
                self._stored(engine, about)
            elif kind == "BlockRemoved":
                self._removed(engine, about["block_hashes"])
            elif kind == "AllBlocksCleared":
                self.cleared(engine)

    def _stored(self, engine: int, about: Mapping[str, Any]) -> None:
        known, size = self._keys[engine], int(about["block_size"])
        self.block_size = self.block_size or size
        parent = about["parent_block_hash"]
        begins = _ROOT if parent is None else known.get(parent)
        extra = about.get("extra_keys") or ()
        if begins is None or size != self.block_size or any(extra) or about.get("lora_id"):
            return
        keys = prefix_keys(about["token_ids"], size, begins)
        known |= zip(about["block_hashes"], keys, strict=False)
        self._published.on_blocks(engine, keys, ())

    def _removed(self, engine: int, hashes: Sequence[Any]) -> None:
        known = self._keys[engine]
        gone = [known.pop(name) for name in hashes if name in known]
        self._published.on_blocks(engine, (), gone)


def require_zmq() -> None:
    """Raise InputError if what reads events is not installed."""
    for package in ("zmq", "msgspec"):
        needed(package, "kv_events")


async def watch_events(prefixes: CachedPrefixes, endpoints: Sequence[str]) -> None:
    """Tell which prefixes are cached by what engines publish at ``endpoints`` (``tcp://...``, in
    their order), until cancelled. Where messages do not follow each other, what was known is
    forgotten."""
    with needed("zmq.asyncio", "kv_events").Context() as context:
        await asyncio.gather(
            *(_listen(context, prefixes, i, endpoint) for i, endpoint in enumerate(endpoints))
        )


async def _listen(context: Any, prefixes: CachedPrefixes, engine: int, endpoint: str) -> None:
    decode = needed("msgspec.msgpack", "kv_events").decode
    with context.socket(needed("zmq", "kv_events").SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        expected = None
        while True:
            _topic, number, batch = await socket.recv_multipart()
            told = int.from_bytes(number[:_NUMBER_BYTES], "big")
            if expected not in (None, told):
                prefixes.cleared(engine)
            expected = told + 1
            prefixes.hear(engine, decode(batch))
