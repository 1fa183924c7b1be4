"""Requests as columns, from the log or the draw to the run."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from eldr_sim.arrays import Bools, Floats, Int32s, Ints, Words
from eldr_sim.traces.requests.logs.log_columns import others_each_round
from eldr_sim.traces.requests.prefixes import Ranges, join_ranges


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests in order of arrival, one array entry each."""

    arrival_s: Floats  #: float64 ``[n]``, seconds, ascending, whole nanoseconds
    #: int32 ``[n]``, tokens to prefill and to generate, each at least 1.
    prompt_len: Int32s
    output_len: Int32s
    #: int32 ``[n]``: prompt of the `PromptSource`, or that of its last block for blocks of a log.
    text: Int32s
    domain: NDArray[np.int16]  #: int16 ``[n]``, index into the texts' domains
    session: Int32s  #: int32 ``[n]``; requests of one conversation share a number
    #: Request ``i``'s blocks, ``prefix_hash[prefix_indptr[i]:prefix_indptr[i + 1]]`` (uint64):
    #: equal numbers, equal tokens up to the block's end (`log_columns.chain_blocks`), of its
    #: prompt, and of its answer where another request goes on with it. What has no block is shared
    #: with no other.
    prefix_hash: Words
    prefix_indptr: Ints
    #: int32, as long as `prefix_hash`: text that the block's tokens are of.
    prefix_text: Int32s
    #: Tokens of a prefix block, 0: none; a prompt's last may be partial.
    prefix_block_tokens: int
    #: What the requests were made of, for the result: plain values, ready for JSON.
    description: dict[str, Any]
    #: int32 ``[n]``: the lowest is served first, as in vLLM; None where requests have none.
    priority: Int32s | None = None
    #: int32 and float64 ``[n]``, or None: the request before it that one goes on with, -1: none;
    #: how long after its end it comes, s.
    parent: Int32s | None = None
    gap_s: Floats | None = None
    #: int32 ``[k, 2]``: a request with a parent, and another one whose end it waits for, too.
    joins: Int32s | None = None
    #: bool ``[n]``: whether a request's blocks are those of its answer, too; None: of no request.
    answered: Bools | None = None
    #: Number of requests at the start that only warm caches, before the measured window (`lanes`).
    n_warming: int = 0

    @property
    def n_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    def __len__(self) -> int:
        return len(self.arrival_s)

    def blocks(self, request: int) -> Words:
        """Return the prefix block hashes of one request's prompt, uint64 ``[n_blocks]``."""
        begin, end = self.prefix_indptr[request : request + 2]
        return self.prefix_hash[begin:end][: int(self._reach(self.prompt_len[request]))]

    @property
    def n_prompt_blocks(self) -> Ints:
        """Blocks of each prompt, int64 ``[n]``: the last one may be partial."""
        reach: Ints = self._reach(self.prompt_len)
        return np.minimum(np.diff(self.prefix_indptr), reach)

    def _reach(self, tokens: Any) -> Any:
        """Return the number of blocks that each number of tokens begins, int64."""
        return -(-tokens.astype(np.int64) // max(1, self.prefix_block_tokens))

    @property
    def prefixes_to_come(self) -> bool:
        """Whether there is room for blocks that no request has yet: they are sent with requests."""
        return len(self.prefix_hash) > 0 and not self.prefix_indptr[-1]

    def repeated(self, rounds: int) -> Self:
        """Return ``rounds`` copies of these requests, each with its own sessions and prefixes."""
        n_blocks = int(self.prefix_indptr[-1])
        begins = self.prefix_indptr[:-1] + np.arange(rounds)[:, None] * n_blocks
        same = {name: v for name, v in vars(self).items() if isinstance(v, np.ndarray)}
        changed: dict[str, Any] = {name: np.tile(v, rounds) for name, v in same.items()} | {
            "parent": None,
            "gap_s": None,
            "joins": None,
            "session": others_each_round(self.session, rounds),
            "prefix_hash": others_each_round(self.prefix_hash, rounds),
            "prefix_indptr": np.append(begins.ravel(), rounds * n_blocks),
        }
        return replace(self, **changed)

    def prompt_ranges(self, request: int, *, answer: bool = False) -> Ranges:
        """Return which texts the tokens of a prompt are of, and of its ``answer`` if asked."""
        own, length = int(self.text[request]), int(self.prompt_len[request])
        length += int(self.output_len[request]) if answer else 0
        begin, end = self.prefix_indptr[request : request + 2].tolist()
        size = self.prefix_block_tokens
        parts = [
            (source, i * size, min((i + 1) * size, length))
            for i, source in enumerate(self.prefix_text[begin:end].tolist())
            if i * size < length
        ]
        covered = parts[-1][2] if parts else 0
        return join_ranges([*parts, (own, covered, length)] if covered < length else parts)
