"""The KV blocks of a worker."""

from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    """A KV block; ``key`` stands for its tokens and all before them."""

    key: object = None
    holders: int = 0
    writer: int = -1


class KVBlocks:
    """vLLM's block pool: a queue of free blocks, of which those with a key can still be found."""

    def __init__(self, n_blocks):
        self.free = [Block() for _ in range(n_blocks)]  # the first one is taken next
        self.published = []  # the oldest first
        self.evictions = 0

    def find(self, key):
        return next((block for block in self.published if block.key == key), None)

    def hold(self, block):
        if block.holders == 0:
            self.free.remove(block)
        block.holders += 1

    def take(self):
        """Take a free block; what was in it is lost."""
        block = self.free.pop(0)
        if block.key is not None:
            self.published.remove(block)
            block.key = None
            self.evictions += 1
        block.holders = 1
        return block

    def publish(self, block, key, writer):
        if block.key is None:
            block.key, block.writer = key, writer
            self.published.append(block)

    def give_back(self, table):
        """Free a table's blocks from the last to the first: those without contents go first."""
        blank, full = [], []
        for block in reversed(table):
            block.holders -= 1
            if block.holders == 0:
                (blank if block.key is None else full).append(block)
        self.free = blank + self.free + full
