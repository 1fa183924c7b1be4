"""What prefix caches of any size would find in requests with block hashes, in one pass, by stack
distance (Mattson, Gecsei, Slutz and Traiger, IBM Systems Journal 1970): how many other blocks were
used since.

Each request looks up the blocks of its prompt, then uses those of prompt and answer, the last
first, as engines free them."""

from typing import Any, NamedTuple

import numpy as np

from eldr_sim.arrays import Array, Bools, Ints
from eldr_sim.jit import njit
from eldr_sim.traces.requests.columns import Requests


class Reuse(NamedTuple):
    """Which requests find which blocks; tokens are those of prompts."""

    #: int64 ``[blocks of prompts]``, of blocks that a cache without bounds would find: blocks used
    #: since then, and tokens of each.
    distance: Ints
    tokens: Ints
    ideal: Ints  #: int64 ``[requests]``: tokens that a cache without bounds would find
    n_tokens: int  #: of all prompts
    common_tokens: int  #: of prompts, in the blocks that all requests begin with
    block_tokens: int

    def hit_rate(self, blocks: int) -> float:
        """Return the share of prompt tokens that a cache of a number of blocks finds."""
        return int(self.tokens[self.distance < blocks].sum()) / self.n_tokens

    @property
    def ideal_hit_rate(self) -> float:
        """Share of prompt tokens that a cache without bounds finds."""
        return int(self.ideal.sum()) / self.n_tokens

    @property
    def common_share(self) -> float:
        """Share of prompt tokens that all requests begin with: any cache finds them."""
        return self.common_tokens / self.n_tokens


def blocks_of(requests: Requests) -> tuple[Array, ...]:
    """Return what compiled code reads of requests, int64: blocks by numbers from 0, where each
    request's begin, those of its prompt, tokens of prompt and known answer, and tokens of the
    prompt."""
    _, blocks = np.unique(requests.prefix_hash, return_inverse=True)
    prompt_len = requests.prompt_len.astype(np.int64)
    context = prompt_len.copy()
    if requests.answered is not None:
        context += np.where(requests.answered, requests.output_len - 1, 0)
    where = requests.prefix_indptr, requests.n_prompt_blocks
    return blocks.astype(np.int64), *where, context, prompt_len


def reuse_of(requests: Requests, granule: int = 1, served: Bools | None = None) -> Reuse:
    """Return what requests, in their order, find of those before them. ``granule``: tokens of an
    engine's KV block: found are whole ones, never a prompt's last token; ``served``: bool
    ``[requests]``: which take part."""
    served = np.ones(len(requests), bool) if served is None else served
    size, n = requests.prefix_block_tokens, len(requests)
    read = blocks_of(requests)
    blocks = read[0]
    distance, tokens = np.empty((2, len(blocks)), np.int64)
    ideal = np.zeros(n, np.int64)
    passes = _pass(read, served, size, granule, distance, tokens, ideal) if size else 0
    common = 0
    if size:
        begins = requests.prefix_indptr[:-1][served]
        least = int(requests.n_prompt_blocks[served].min())
        first = blocks[begins[0] : begins[0] + least]
        while common < len(first) and (blocks[begins + common] == first[common]).all():
            common += 1
    prompts = requests.prompt_len[served]
    in_common = np.minimum(prompts, common * size).sum(dtype=np.int64)
    return Reuse(
        distance[:passes], tokens[:passes], ideal, int(prompts.sum(dtype=np.int64)),
        int(in_common), size,
    )  # fmt: skip


@njit()
def _sum(tree: Any, at: int) -> int:
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@njit()
def _add(tree: Any, at: int, n: int) -> None:
    """Add to an entry of a Fenwick tree, counted from 1."""
    while at < tree.shape[0]:
        tree[at] += n
        at += at & -at


@njit()
def _pass(
    read: Any, served: Any, size: int, granule: int, distance: Any, tokens: Any, ideal: Any
) -> int:
    """Fill in what is found; return how many blocks are."""
    blocks, indptr, n_prompt, context, prompt = read
    n_blocks = blocks.max() + 1 if blocks.shape[0] else 0
    used = np.full(n_blocks, -1)  # when each block was used last,
    reach = np.zeros(n_blocks, np.int64)  # and tokens of it that are known
    tree = np.zeros(blocks.shape[0] + 1, np.int64)  # Fenwick: uses that are the last of a block
    now, n_found = 0, 0
    for i in range(prompt.shape[0]):
        if not served[i]:
            continue
        begin, end = indptr[i], indptr[i + 1]
        deepest, got = -1, 0
        for k in range(begin, begin + n_prompt[i]):
            block = blocks[k]
            start = (k - begin) * size
            known = min(reach[block], min(start + size, prompt[i] - 1) - start)
            if used[block] < 0 or known <= 0:
                break
            deepest = max(deepest, _sum(tree, now) - _sum(tree, used[block] + 1))
            whole = (start + known) // granule * granule
            distance[n_found], tokens[n_found] = deepest, whole - got
            n_found += 1
            got = whole
            if known < size:
                break
        ideal[i] = got
        for k in range(end - 1, begin - 1, -1):
            block = blocks[k]
            if used[block] >= 0:
                _add(tree, used[block] + 1, -1)
            used[block] = now
            now += 1
            _add(tree, now, 1)
            reach[block] = max(reach[block], min(size, context[i] - (k - begin) * size))
    return n_found
