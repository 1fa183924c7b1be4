"""KV blocks of a prefill worker with a prefix cache, and a signature row beside each block.

The rules are those of vLLM's v1 engine (``vllm/v1/core/block_pool.py`` and
``kv_cache_manager.py``): a prompt is cut into blocks of ``block_size`` tokens; a full block has a
hash that stands for its tokens and all before them; requests whose prompts begin with the same
blocks share them by reference. A block that nobody holds keeps its contents until it is needed for
others: blocks without a hash go first, then the least recently freed. A prompt's blocks are freed
from its last to its first, so that the tails of prefixes are evicted before their heads. A hit
never covers the last token of a prompt, whose logits are needed, so at least one is computed.

ELDR's signature cache (Sec. 4.4) is a row a block, co-indexed with the blocks and of the same
lifetime: the experts that the block's tokens chose, written when they are prefilled, whichever
request did that. A request's signature is the sum over its blocks. Here a row is kept as what it is
the sum of, the trace rows that its tokens replay (:data:`~eldr_sim.traces.prompts.Ranges`), and
the sum is taken when the router asks: equal ranges have equal counts, so those of a prompt that
comes back need no second sum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from eldr_sim.traces.prompts import Ranges, clip_ranges, join_ranges


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt as the cache sees it.

    Attributes
    ----------
    n_tokens
        Its length, at least 1.
    block_hashes
        Hashes of its full blocks in order, each standing for all tokens up to its block's end.
        Full blocks beyond the last hash are never shared.
    ranges
        The trace rows that its tokens replay, from token 0 on.
    """

    n_tokens: int
    block_hashes: Sequence[int] = ()
    ranges: Ranges = ()


class KVBlock:
    """A full KV block that can be found by its hash, and its signature row.

    Attributes
    ----------
    block_hash
        Hash under which it is found.
    writer
        The signature row, by reference: this prompt's tokens at the block's place were prefilled
        into it. A block has the same place in every prompt that shares it, as its hash covers all
        tokens before.
    n_held
        Requests that hold it.
    """

    __slots__ = ("block_hash", "n_held", "writer")

    def __init__(self, block_hash: int, writer: Prompt) -> None:
        self.block_hash = block_hash
        self.writer = writer
        self.n_held = 1


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that a request holds.

    Attributes
    ----------
    prompt
        What they are for.
    blocks
        Leading blocks of the prompt that can be found, those for the first ``n_cached`` tokens were
        found.
    n_private
        Number of the blocks after them: not full yet, or without a hash. Nobody can tell one from
        another, so a count is all there is of them.
    n_cached
        Tokens that need no prefill.
    """

    prompt: Prompt
    blocks: list[KVBlock]
    n_private: int
    n_cached: int

    def ranges(self, block_size: int) -> Ranges:
        """Return the trace rows that the blocks' signature rows are the sum of, joined."""
        if self.n_cached == 0:
            return self.prompt.ranges
        parts: list[tuple[int, int, int]] = []
        start = 0
        found = self.blocks[: self.n_cached // block_size]
        for writer, group in groupby(found, attrgetter("writer")):
            stop = start + block_size * sum(1 for _ in group)
            parts += clip_ranges(writer.ranges, start, stop)
            start = stop
        parts += clip_ranges(self.prompt.ranges, start, self.prompt.n_tokens)
        return join_ranges(parts)


class PrefixCache:
    """The KV blocks of one worker.

    Parameters
    ----------
    n_blocks, block_size
        Blocks of the worker; tokens a block.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        # vLLM's queue of free blocks has those without a hash in front, then the others from the
        # least recently freed on.
        self._n_blank = n_blocks
        self._evictable: OrderedDict[KVBlock, None] = OrderedDict()
        self._spare: list[KVBlock] = []  # evicted, to be written anew: cheaper than making others
        self._by_hash: dict[int, KVBlock] = {}
        # As in vLLM a block that is prefilled twice is there twice; the copies take over, in order
        # of age, when the one that is found is evicted.
        self._copies: dict[int, OrderedDict[KVBlock, None]] = {}

    @property
    def n_free(self) -> int:
        """Blocks that no request holds, those with cached contents included."""
        return self._n_blank + len(self._evictable)

    def allocate(self, prompt: Prompt) -> BlockTable | None:
        """Hold the blocks of a prompt, those in the cache by reference; None if too few are free.

        Nothing changes where None is returned.
        """
        size = self.block_size
        found = self._find(prompt.block_hashes, (prompt.n_tokens - 1) // size)
        n_new = -(-prompt.n_tokens // size) - len(found)
        n_idle = sum(block.n_held == 0 for block in found)
        if n_new + n_idle > self.n_free:
            return None
        for block in found:
            if block.n_held == 0:
                del self._evictable[block]
            block.n_held += 1
        self._evict(max(0, n_new - self._n_blank))
        self._n_blank -= n_new
        return BlockTable(prompt, found, n_new, len(found) * size)

    def publish(self, table: BlockTable, n_tokens: int) -> None:
        """Let others find the full blocks of a prompt's first ``n_tokens`` tokens.

        As in vLLM this happens when the tokens are scheduled: within a step a layer writes the keys
        and values of all requests before it reads those of any.
        """
        prompt, blocks, by_hash = table.prompt, table.blocks, self._by_hash
        begun, spare = len(blocks), self._spare
        for block_hash in prompt.block_hashes[begun : n_tokens // self.block_size]:
            if spare:
                block = spare.pop()
                block.block_hash, block.writer, block.n_held = block_hash, prompt, 1
            else:
                block = KVBlock(block_hash, prompt)
            blocks.append(block)
            if by_hash.setdefault(block_hash, block) is not block:
                self._copies.setdefault(block_hash, OrderedDict())[block] = None
        table.n_private -= len(blocks) - begun

    def free(self, table: BlockTable) -> None:
        """Give the blocks of a request back; contents that can be found stay until evicted."""
        for block in reversed(table.blocks):
            block.n_held -= 1
            if block.n_held == 0:
                self._evictable[block] = None
        self._n_blank += table.n_private
        table.blocks, table.n_private = [], 0

    def _find(self, hashes: Sequence[int], limit: int) -> list[KVBlock]:
        """Return the cached blocks of the longest prefix of ``hashes``, at most ``limit``."""
        found: list[KVBlock] = []
        for block_hash in hashes[:limit]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _evict(self, n: int) -> None:
        """Make the ``n`` least recently freed blocks blank, their signature rows with them."""
        by_hash, copies_of = self._by_hash, self._copies
        for _ in range(n):
            block = self._evictable.popitem(last=False)[0]
            block_hash = block.block_hash
            if block_hash not in copies_of:
                del by_hash[block_hash]
            else:
                copies = copies_of[block_hash]
                if by_hash[block_hash] is block:
                    by_hash[block_hash] = copies.popitem(last=False)[0]
                else:
                    del copies[block]
                if not copies:
                    del copies_of[block_hash]
            self._spare.append(block)
            self._n_blank += 1
