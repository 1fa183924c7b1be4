"""Drafts: how many of them a verify step accepts, and what drafting takes.

A decoding sequence computes its sampled token and its drafts in one step, and gets one token more
than were accepted (Leviathan et al., arXiv 2211.17192). Each acceptance is drawn from the seed, the
request and the position, so that it is the same under every policy and engine."""

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.kernel_profiles.steps.step_cost import step_parts, total_s
from eldr_sim.simulator.reference.requests import Request, Sequence
from eldr_sim.simulator.setup.cluster_spec import EngineSpec

_MASK = (1 << 64) - 1
_NO_CHUNKS = np.zeros(0, np.int64)


class Speculation:
    """What an engine drafts. ``counts``: verify steps of sequences by the drafts accepted, and last
    all drafts verified."""

    def __init__(self, engine: EngineSpec) -> None:
        assert engine.speculation is not None
        cost = engine.step_time.cost
        self.drafts = engine.speculation.drafts(engine.max_num_seqs, cost)
        self.counts = [0] * (engine.speculation.k + 2)

    def attended(self, sequences: int, tokens: int, context: int) -> tuple[int, int]:
        """Return the sequences that attention is priced for, and the tokens that these read: some
        kernels read a context once for each token of a sequence (``verify_attention``)."""
        if self.drafts.reads_by_row and tokens > sequences:
            each = tokens // sequences
            return tokens, context * tokens // sequences + tokens * (each + 1) // 2
        return sequences, context + tokens

    def outputs(self, sequence: Sequence) -> int:
        """Return what a sequence gets: one token, and the drafts that are accepted in turn."""
        request, n_outputs = sequence.request, 0
        if sequence.drafts:
            share = self._share(request, request.generated)
            kind = request.domain if len(self.drafts.rates) > 1 else 0
            n_outputs = int((share < self.drafts.rates[kind, : sequence.drafts]).sum())
            self.counts[n_outputs] += 1
            self.counts[-1] += sequence.drafts
        return min(1 + n_outputs, request.output_len - request.generated)

    def proposed(self, request: Request, batch: int) -> int:
        """Return the drafts of a sequence's next step, in a batch of this many sequences; none
        where a look-up (n-gram) finds nothing."""
        if self.drafts.found < 1.0:
            share = self._share(request, (1 << 40) + request.generated)
            if share >= self.drafts.found:
                return 0
        return int(self.drafts.k_of[batch])

    def _share(self, request: Request, position: int) -> float:
        """Draw from 0 to 1: SplitMix64 (Steele, Lea, Flood 2014) of seed, request, position."""
        x = int(self.drafts.key[0]) + request.number * 0x9E3779B97F4A7C15
        x = (x + position * 0xD1B54A32D192ED03) & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        return ((x ^ x >> 31) >> 11) / 2**53

    def seconds(
        self, batch: int, tokens: int, context: int, chunks: tuple[Ints, Ints], uniform: bool,
        first: Ints, later: Ints,
    ) -> float:  # fmt: skip
        """Return the seconds of the passes behind a step, or of its look-up.

        The first pass is over all that the step computes, each other over a token a sequence.
        ``first``, ``later``: experts that these activate in the only MoE layer of a head."""
        drafts, k = self.drafts, int(self.drafts.k_of[batch])
        if drafts.lookup_s >= 0.0:
            return drafts.lookup_s + batch * drafts.request_s if min(k, batch) else 0.0
        if k == 0:
            return 0.0
        one = step_parts(
            drafts.cost, batch, tokens, context + tokens, *chunks, batch, first, uniform
        )
        seconds = total_s(one)
        for i in range(1, min(k, drafts.depth) if batch else 1):
            read = context + tokens + i * batch
            alone = _NO_CHUNKS, _NO_CHUNKS
            one = step_parts(drafts.cost, batch, batch, read, *alone, batch, later, False)
            seconds += total_s(one)
        return float(seconds + batch * drafts.request_s)
