"""Which experts the tokens of a step activate: a bit set of each token, of all MoE layers.

A decoded token replays a row of its request's window in the trace, a prompt's token the row of a
prompt of the trace; what a trace lacks is filled as `setup.replay` says."""

import numpy as np

from eldr_sim.arrays import Ints, Words
from eldr_sim.simulator.control.run_inputs import RunInputs
from eldr_sim.simulator.reference.requests import Request


class Experts:
    """The bit sets of a run's tokens, ``uint64 [tokens, layers * words]``, and their counts."""

    def __init__(self, inputs: RunInputs) -> None:
        self.bits, self._prompts = inputs.replay.bits, inputs.prompts
        self.period, self._text = inputs.replay.period, inputs.workload.text
        self.n_layers = inputs.spec.decode.step_time.n_moe_layers
        self._masks = inputs.expert_masks

    def decoded(self, request: Request, first: int, n: int) -> Words:
        """Return the rows of the tokens that are fed after ``first`` generated ones and on."""
        rows = (request.window_offset + first + np.arange(n)) % request.window_len
        return self.bits[request.window_row + rows]

    def context(self, request: Request, start: int, stop: int) -> Words:
        """Return the rows of the tokens ``[start, stop)`` of a context that chunks compute."""
        prompt = request.prompt_len
        found = self._prompt(request, start, min(stop, prompt))
        if stop <= prompt:
            return found
        first = max(start, prompt)  # generated tokens; the window begins with the prompt's last
        return np.concatenate([found, self.decoded(request, first - prompt + 1, stop - first)])

    def _prompt(self, request: Request, start: int, stop: int) -> Words:
        """Return the rows of prompt tokens: token ``p`` replays row ``p`` of a trace's prompt,
        round; layers beyond the trace's take its layers again, from another part of the prompt."""
        rows, width = self._prompts, self.bits.shape[1]
        assert rows is not None, "prompts without rows route uniformly"
        token = np.arange(start, max(start, stop))
        source = np.full(len(token), self._text[request.number])
        if size := rows.prefix_block_tokens:
            first, end = rows.prefix_indptr[request.number : request.number + 2]
            shared = token // size < end - first
            source[shared] = rows.prefix_trace_request[first + token[shared] // size]
        span, base = rows.length[source].astype(np.int64), rows.first_row[source]
        tile_width = rows.bits.shape[1]
        tiles = -(-width // tile_width)
        parts = [rows.bits[base + (token + tile * span // tiles) % span] for tile in range(tiles)]
        return np.concatenate(parts, axis=1)[:, :width]

    def activated(self, tokens: Words, worker: int) -> tuple[int, Ints]:
        """Return how many experts the tokens activate in all layers, and by layer those of the
        busiest of the worker's ranks, for which the layer waits."""
        union = np.bitwise_or.reduce(tokens, axis=0)
        held = union[None, :]
        if self._masks is not None and self._masks.shape[1] > 1:
            held = union & self._masks[worker]
        counts = np.bitwise_count(held).astype(np.int64)
        by_layer = counts.reshape(len(held), self.n_layers or 1, -1).sum(axis=2)
        return int(by_layer.sum()), by_layer.max(axis=0)
