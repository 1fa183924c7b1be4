"""SGLang's prefix cache: the contexts of an engine in a tree, of which whole leaves are evicted.

``srt/mem_cache/radix_cache.py`` (`RadixCache`) and ``common.py`` of SGLang 0.5.9. A node has the
blocks up to where contexts part. Looking a context up makes its nodes the last ones used; when
blocks are missing, the unheld leaf that was used least recently goes, with all its blocks, and then
perhaps its parent. Blocks that were computed twice are kept once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from eldr_sim.simulator.reference.kv_blocks import KVCacheManager
from eldr_sim.simulator.reference.requests import Request


@dataclass(eq=False)
class Node:
    """Blocks that some contexts have, behind those of ``parent``, None: the root."""

    keys: list[Any]
    parent: Node | None
    used: int = 0  #: its last use, as a number that grows (``last_access_time``)
    holders: int = 0  #: running requests with contexts that end here or behind it (``lock_ref``)
    children: dict[Any, Node] = field(default_factory=dict)  #: by their first key


class RadixCache(KVCacheManager):
    """The KV blocks of an engine: blank ones, those in the tree, and those that a request has
    beside the tree, for what others cannot find yet."""

    def __init__(self, n_blocks: int, *args: Any, **more: Any) -> None:
        super().__init__(n_blocks, *args, **more)
        self.root, self.clock, self.blank = Node([], None), count(1), n_blocks
        self.last: dict[Request, Node] = {}  #: where the context of a running request ends,
        self.inside: dict[Request, int] = {}  #: the blocks of it in the tree,
        self.beside: dict[Request, int] = {}  #: and beside it

    @property
    def n_free(self) -> int:
        """The blocks that are free or not held."""
        return self.blank + sum(len(node.keys) for node in self.nodes() if not node.holders)

    def nodes(self) -> Iterator[Node]:
        """Go through the tree."""
        todo = list(self.root.children.values())
        while todo:
            yield (node := todo.pop())
            todo += node.children.values()

    def find(self, key: Any) -> Any:
        """Return the node that has a key, None if there is none."""
        return next((node for node in self.nodes() if key in node.keys), None)

    def held(self, request: Request) -> int:
        """Return the blocks of a request's context."""
        return self.inside[request] + self.beside[request]

    # --- the tree ---

    def use(self, keys: list[Any]) -> tuple[Node, int]:
        """Return the last node of a context that is there, and the end of it; a node of which it
        has a part is split (``match_prefix``)."""
        node, n, now = self.root, 0, next(self.clock)
        while n < len(keys) and keys[n] in node.children:
            node = node.children[keys[n]]
            node.used, rest = now, keys[n : n + len(node.keys)]
            same = next((i for i, key in enumerate(rest) if key != node.keys[i]), len(rest))
            n += same
            if same < len(node.keys):
                return self.split(node, same), n
        return node, n

    def split(self, lower: Node, n: int) -> Node:
        """Let the first ``n`` blocks of a node be its parent; returns that."""
        parent = lower.parent
        assert parent is not None
        upper = Node(lower.keys[:n], parent, next(self.clock), lower.holders)
        parent.children[upper.keys[0]] = upper
        lower.keys, lower.parent = lower.keys[n:], upper
        upper.children[lower.keys[0]] = lower
        return upper

    def insert(self, keys: list[Any]) -> tuple[Node, int]:
        """Put a context into the tree; returns its last node, and what has been there before."""
        node, n = self.use(keys)
        if n < len(keys):
            node.children[keys[n]] = node = Node(keys[n:], node, next(self.clock))
        return node, n

    def path(self, node: Node | None) -> Iterator[Node]:
        """Go from a node up to below the root."""
        while node is not None and node is not self.root:
            yield node
            node = node.parent

    def hold(self, last: Node, by: int) -> None:
        """Let one request more, or less (-1), hold a context."""
        for node in self.path(last):
            node.holders += by

    def make_room(self, n: int) -> None:
        """Evict ``n`` blocks, or more, if fewer are blank (``evict_from_tree_cache``)."""
        gone = 0 if self.blank < n else n
        while gone < n:
            leaves = [node for node in self.nodes() if not (node.children or node.holders)]
            if not leaves:
                return
            leaf = min(leaves, key=lambda node: node.used)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.keys[0]]
            self.blank += len(leaf.keys)
            gone += len(leaf.keys)
            self.pool.evictions += len(leaf.keys)

    # --- requests ---

    def look_up(self, request: Request) -> tuple[int, int]:
        """Return how many blocks of a context are cached, and how many of them no request holds.
        The last token must be computed."""
        keys = self.keys(request, request.tokens - 1) if self.caching else []
        node, n = self.use(keys)
        return n, sum(len(node.keys) for node in self.path(node) if not node.holders)

    def admit(self, request: Request) -> int:
        """Let a request hold what is there of its context; returns those tokens."""
        node, n = self.use(self.keys(request, request.tokens - 1) if self.caching else [])
        self.hold(node, 1)
        self.last[request], self.inside[request], self.beside[request] = node, n, 0
        request.tables[self], request.windows[self], request.found[self] = [], [], n
        self.make_room(request.window_blocks)
        self.blank -= request.window_blocks
        return n * self.size

    def grow(self, request: Request, n: int) -> None:
        """Take ``n`` blank blocks for a request."""
        self.beside[request] += n
        self.blank -= n

    def cache_blocks(self, request: Request, tokens: int) -> None:
        """Let others find the full blocks of the first ``tokens`` tokens
        (``cache_unfinished_req``)."""
        keys, before = self.keys(request, tokens) if self.caching else [], self.inside[request]
        if len(keys) <= before:
            return
        node, there = self.insert(keys)
        self.blank += max(0, there - before)  # others have computed them, too
        self.hold(node, 1)
        self.hold(self.last[request], -1)
        self.beside[request] -= len(keys) - before
        self.last[request], self.inside[request] = node, len(keys)

    def release(self, request: Request) -> None:
        """Give the blocks of a request back; what is in the tree stays there."""
        self.blank += self.beside.pop(request) + request.window_blocks
        self.hold(self.last.pop(request), -1)
        del self.inside[request], request.tables[self], request.windows[self]
