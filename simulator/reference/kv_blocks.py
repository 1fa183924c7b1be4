"""The KV blocks of an engine, and its prefix cache.

vLLM's ``vllm/v1/core/block_pool.py`` (`BlockPool`) and ``kv_cache_manager.py``
(`KVCacheManager`)."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eldr_sim.simulator.reference.requests import Request, Sequence


@dataclass(eq=False)
class Block:
    """A KV block; ``key`` stands for its tokens and all before them, None: it cannot be found."""

    key: Any = None
    holders: int = 0  #: vLLM: ``ref_cnt``
    writer: int = -1  #: the request whose tokens are in it


class BlockPool:
    """The free blocks in the order in which they are taken; those with a key can still be found."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks, self.evictions = n_blocks, 0
        self.free = OrderedDict.fromkeys(Block() for _ in range(n_blocks))
        #: Of each key the blocks that have it, the oldest first.
        self.cached: dict[Any, list[Block]] = {}

    def find(self, key: Any) -> Block | None:
        """Return the oldest block of a key."""
        return self.cached[key][0] if key in self.cached else None

    def touch(self, block: Block) -> None:
        """Hold a block that was found."""
        if block.holders == 0:
            del self.free[block]
        block.holders += 1

    def take(self) -> Block:
        """Take the next free block; its contents are lost."""
        block, _ = self.free.popitem(last=False)
        if block.key is not None:
            self.cached[block.key].remove(block)
            if not self.cached[block.key]:
                del self.cached[block.key]
            block.key = None
            self.evictions += 1
        block.holders = 1
        return block

    def publish(self, block: Block, key: Any, writer: int) -> None:
        """Let others find a full block."""
        if block.key is None:
            block.key, block.writer = key, writer
            self.cached.setdefault(key, []).append(block)

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Free blocks, the last first, so that the end of a context is evicted before its begin.
        Those without a key are taken before all others (``free_blocks``)."""
        blank = []
        for block in reversed(list(blocks)):
            block.holders -= 1
            if block.holders == 0 and block.key is None:
                blank.append(block)
            elif block.holders == 0:
                self.free[block] = None
        for block in reversed(blank):
            self.free[block] = None
            self.free.move_to_end(block, last=False)


class KVCacheManager:
    """What sequences need, take and give back."""

    def __init__(
        self, n_blocks: int, block_size: int, max_model_len: int, *,
        caching: bool, lookahead: int, drops_block: bool,
    ) -> None:  # fmt: skip
        self.pool, self.size, self.max_model_len = BlockPool(n_blocks), block_size, max_model_len
        self.caching, self.lookahead, self.drops_block = caching, lookahead, drops_block

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        return 1.0 - len(self.pool.free) / self.pool.n_blocks

    def needed(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence lacks for its next step: room for what it computes and
        for as many drafts again, up to the longest context (``allocate_slots``)."""
        slots = sequence.context + sequence.rejected + sequence.tokens + self.lookahead
        table = sequence.request.tables[self]
        return max(0, -(-min(slots, self.max_model_len) // self.size) - len(table))

    def keys(self, request: Request, tokens: int) -> list[Any]:
        """Return what tells the full blocks of a context's first tokens from all others: what
        prompts share, then the request itself, which only it can find, after a preemption."""
        n, shared = tokens // self.size, request.block_keys
        return (shared + [(number, request) for number in range(len(shared), n)])[:n]

    def computed_blocks(self, request: Request, tokens: int) -> list[Block]:
        """Return the cached blocks of a context of ``tokens`` tokens (``get_computed_blocks``).

        The last token must be computed: its logits are needed. Where an EAGLE or MTP head drafts
        and KV caches are handed over, the last cached block is computed again."""
        blocks = []
        for key in self.keys(request, tokens - 1) if self.caching else ():
            block = self.pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks[:-1] if self.drops_block else blocks

    def allocate(
        self, request: Request, tokens: int, ahead: int, reserved: int, chunk: int | None,
        padded: int,
    ) -> int | None:  # fmt: skip
        """Take the blocks of a context and of ``ahead`` tokens more; returns its cached tokens.
        None if not enough are free beside ``reserved`` blocks, which running sequences need.

        With ``chunk``, take those of the first tokens that are computed, and of drafts, if the
        whole context fits (``full_sequence_must_fit``), and of ``padded`` placeholder drafts where
        one token is left to compute."""
        computed_blocks = self.computed_blocks(request, tokens)
        slots = min(tokens + ahead, self.max_model_len)
        new, beside = -(-slots // self.size) - len(computed_blocks), request.window_blocks
        idle = sum(block.holders == 0 for block in computed_blocks)
        if chunk is not None:
            whole = -(-tokens // self.size) - len(computed_blocks)
            if whole + beside + idle + reserved > len(self.pool.free):
                return None
            cached = len(computed_blocks) * self.size
            padded = padded if tokens == cached + 1 else 0
            if padded and padded >= chunk:
                return None  # it is not computed rather than computed without them
            drafts = self.lookahead + padded
            slots = min(min(tokens, cached + chunk) + drafts, self.max_model_len)
            new = -(-slots // self.size) - len(computed_blocks)
        if new + beside + idle + reserved > len(self.pool.free):
            return None
        for block in computed_blocks:
            self.pool.touch(block)
        request.tables[self] = computed_blocks + [self.pool.take() for _ in range(new)]
        request.windows[self] = [self.pool.take() for _ in range(beside)]
        request.found[self] = len(computed_blocks)
        return len(computed_blocks) * self.size

    def needed_for(self, sequence: Sequence, tokens: int) -> int:
        """Return the blocks that a sequence lacks for its first tokens, and for drafts."""
        slots = min(tokens + self.lookahead, self.max_model_len)
        return max(0, -(-slots // self.size) - len(sequence.request.tables[self]))

    def grow(self, sequence: Sequence, n: int) -> None:
        """Take ``n`` blocks for a sequence."""
        for _ in range(n):
            sequence.request.tables[self].append(self.pool.take())

    def cache_blocks(self, request: Request, tokens: int) -> None:
        """Let others find the full blocks of the first ``tokens`` tokens."""
        if self.caching:
            full = self.keys(request, tokens)
            for key, block in zip(full, request.tables[self], strict=False):
                self.pool.publish(block, key, request.number)

    def release(self, request: Request) -> None:
        """Give all blocks of a request back, those of windows with the last of its context."""
        self.pool.give_back(request.tables.pop(self) + request.windows.pop(self))
