"""The KV blocks of an engine, and its prefix cache.

vLLM's ``vllm/v1/core/block_pool.py`` (`BlockPool`) and ``kv_cache_manager.py``
(`KVCacheManager`)."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.setup.memory import WindowBlocks


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
    """What sequences need, take and give back.

    Layers with sliding windows stand in groups (``KVCacheCoordinator``, ``SlidingWindowManager``):
    each takes its blocks from the one pool, as many as the layers with full attention, but
    frees those that no window reaches any more."""

    def __init__(
        self, n_blocks: int, block_size: int, max_model_len: int, *,
        caching: bool, lookahead: int, drops_block: bool, windows: WindowBlocks,
        in_flight: int, keeps_ends: bool,
    ) -> None:  # fmt: skip
        self.pool, self.size, self.max_model_len = BlockPool(n_blocks), block_size, max_model_len
        self.caching, self.lookahead, self.drops_block = caching, lookahead, drops_block
        self.groups, self.window, self.keeps_ends = windows.groups, windows.window, keeps_ends
        self.reach = -(-(self.window - 1) // block_size)  #: blocks that the next token needs
        self.cap = windows.cap(block_size, in_flight, max_model_len)

    @property
    def n_free(self) -> int:
        """The blocks that no request holds."""
        return len(self.pool.free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold."""
        return 1.0 - self.n_free / self.pool.n_blocks

    def find(self, key: Any) -> Any:
        """Return a cached block of a key, None if there is none."""
        return self.pool.find(key)

    def held(self, request: Request) -> int:
        """Return the blocks of a request's context."""
        return len(request.tables[self])

    def needed(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence lacks for its next step: room for what it computes and
        for as many drafts again, up to the longest context (``allocate_slots``)."""
        return self.lacking(sequence, sequence.context + sequence.rejected + sequence.tokens)

    def lacking(self, sequence: Sequence, tokens: int) -> int:
        """Return the blocks that a sequence lacks for its first tokens, and for drafts."""
        slots = min(tokens + self.lookahead, self.max_model_len)
        lacking = max(0, -(-slots // self.size) - self.held(sequence.request))
        return lacking * (1 + self.groups)

    def keys(self, request: Request, tokens: int) -> list[Any]:
        """Return what tells the full blocks of a context's first tokens from all others: what
        prompts share, then the request itself, which only it can find, after a preemption."""
        n, shared = tokens // self.size, request.block_keys
        return (shared + [(number, request) for number in range(len(shared), n)])[:n]

    def computed_blocks(self, request: Request, tokens: int) -> tuple[list[list[Any]], int]:
        """Return the cached blocks of a context of ``tokens`` tokens, by group, and the end of
        those that layers with full attention alone have (``find_longest_cache_hit``), 0: of none.

        The last token must be computed: its logits are needed. Where an EAGLE or MTP head drafts
        and KV caches are handed over, the last cached block is computed again."""
        drop, blocks = int(self.drops_block), []
        limit = (tokens - 1) // self.size + (drop if self.groups else 0)
        keys = self.keys(request, tokens)[:limit] if self.caching else []
        for key in keys:
            block = self.pool.find(key)
            if block is None:
                break
            blocks.append(block)
        blocks = blocks[: max(0, len(blocks) - drop)]
        if not self.groups:
            return [blocks], 0
        n = max(0, self.window_end(keys[: len(blocks) + drop], self.reach + drop) - drop)
        first = max(0, n - self.reach)
        windows: list[list[Any]] = [
            [None] * first + [self.pool.find((group, key)) for key in keys[first:n]]
            for group in range(self.groups)
        ]
        return [blocks[:n], *windows], len(blocks) if len(blocks) > n else 0

    def window_end(self, keys: list[Any], reach: int) -> int:
        """Return the end of the last ``reach`` blocks in a row that all groups have, or of those
        from the first on."""
        run = 0
        for number in range(len(keys) - 1, -1, -1):
            found = all(self.pool.find((group, keys[number])) for group in range(self.groups))
            run = run + 1 if found else 0
            if run >= reach:
                return number + run
        return run

    def allocate(
        self, request: Request, tokens: int, ahead: int, reserved: int, chunk: int | None,
        padded: int, fetches: bool,
    ) -> int | None:  # fmt: skip
        """Take the blocks of a context and of ``ahead`` tokens more; returns its cached tokens.
        None if not enough are free beside ``reserved`` blocks, which running sequences need.

        With ``chunk``, take those of the first tokens that are computed, and of drafts, if the
        whole context fits (``full_sequence_must_fit``), and of ``padded`` placeholder drafts where
        one token is left to compute. If the context is fetched, no window reaches its begin."""
        (computed, *windows), junction = self.computed_blocks(request, tokens)
        found, skipped = len(computed), 0
        if fetches and self.groups:
            skipped = max(0, tokens - self.window + 1) // self.size
            windows = [[None] * skipped + window[skipped:] for window in windows]
        touched: list[Block] = computed + [block for window in windows for block in window if block]
        idle = sum(block.holders == 0 for block in touched)

        def fits(blocks: int, most: int) -> bool:
            beside = self.groups * max(0, min(blocks, most) - max(skipped, found))
            needed = blocks - found + beside + request.window_blocks + idle
            return bool(needed + reserved <= self.n_free)

        slots = min(tokens + ahead, self.max_model_len)
        if chunk is not None:
            if not fits(-(-tokens // self.size), self.cap):
                return None
            cached = found * self.size
            padded = padded if tokens == cached + 1 else 0
            if padded and padded >= chunk:
                return None  # it is not computed rather than computed without them
            drafts = self.lookahead + padded
            slots = min(min(tokens, cached + chunk) + drafts, self.max_model_len)
        n = -(-slots // self.size)
        if not fits(n, n):
            return None
        for block in touched:
            self.pool.touch(block)
        for table in (computed, *windows):
            table += [self.pool.take() for _ in range(n - len(table))]
        request.tables[self] = computed
        request.windows[self] = [*windows, [self.pool.take() for _ in range(request.window_blocks)]]
        request.found[self], request.ends[self] = found, self.ends(request, junction)
        return found * self.size

    def ends(self, request: Request, junction: int) -> tuple[int, ...] | None:
        """Return where windows of a context end that others may find (``replay_boundaries``): where
        the same prompt goes on, or where others have parted from it; None: everywhere."""
        if not self.keeps_ends:
            return None
        last, drop = (request.prompt_len - 1) // self.size, int(self.drops_block)
        ends = {last} if not drop else {max(1, last), max(1, request.prompt_len // self.size)}
        return (*ends, junction + drop) if junction else (*ends,)

    def grow(self, request: Request, n: int) -> None:
        """Take ``n`` blocks for a request."""
        for table in (request.tables[self], *request.windows[self][: self.groups]):
            table += [self.pool.take() for _ in range(n // (1 + self.groups))]

    def slide(self, request: Request, computed: int) -> None:
        """Free the blocks that no window reaches any more, when ``computed`` tokens have KV
        (``remove_skipped_blocks``)."""
        if self.groups:
            self.cache_blocks(request, computed)
        for table in request.windows[self][: self.groups]:
            first = min(max(0, computed - self.window + 1) // self.size, len(table))
            gone = [block for block in table[:first] if block is not None]
            table[:first] = [None] * first
            self.pool.give_back(gone)

    def cache_blocks(self, request: Request, tokens: int) -> None:
        """Let others find the full blocks of the first ``tokens`` tokens."""
        if not self.caching:
            return
        full, ends = self.keys(request, tokens), request.ends[self]
        for key, block in zip(full, request.tables[self], strict=False):
            self.pool.publish(block, key, request.number)
        reach = self.reach + self.drops_block
        for group, table in enumerate(request.windows[self][: self.groups]):
            for number, (key, block) in enumerate(zip(full, table, strict=False)):
                kept = ends is None or any(end - reach <= number < end for end in ends)
                if block is not None and kept:
                    self.pool.publish(block, (group, key), request.number)

    def release(self, request: Request) -> None:
        """Give all blocks of a request back, group by group."""
        for table in (request.tables.pop(self), *request.windows.pop(self)):
            self.pool.give_back(block for block in table if block is not None)
