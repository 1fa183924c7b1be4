"""A request, and a running sequence of an engine (vLLM: ``vllm/v1/request.py``)."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from eldr_sim.simulator.control.run_inputs import RunInputs


@dataclass(eq=False)
class Request:
    """What a request asks for and lives through; times, s, are negative while still to come.

    A request has computed tokens and wanted tokens, and engines close the gap: ``prompt_len``
    tokens are given, ``output_len`` wanted, ``generated`` have come."""

    number: int
    arrival_s: float
    prompt_len: int
    output_len: int
    measured: bool
    domain: int
    #: The experts of its decoded tokens: rows of `Replay.bits`, read round and round.
    window_row: int
    window_len: int
    window_offset: int
    window_blocks: int  #: KV blocks that its sliding windows and linear states take
    block_keys: list[Any]  #: of its full KV blocks that others may share, in order
    queue_key: float = 0.0  #: of the queue order: the lowest is admitted first

    sent_s: float = -1.0
    tokenized_s: float = -1.0
    prefill_start_s: float = -1.0
    prefill_end_s: float = -1.0
    transfer_start_s: float = -1.0
    transfer_end_s: float = -1.0
    decode_start_s: float = -1.0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    last_token_s: float = -1.0  #: of the token before its last preemption
    token_s: list[float] = field(default_factory=list)  #: when each token came
    generated: int = 0
    preemptions: int = 0
    outcome: str = ""  #: one of `state.OUTCOMES`
    watched: bool = False  #: a process waits for its end

    worker: int = -1  #: where it is, or was last
    source: int = -1  #: the worker whose KV cache it takes over; -1: it computes its own
    reserved: int = -1  #: the worker that has blocks for it before its prompt is computed
    kv_here: bool = False  #: the KV cache that it takes over has arrived
    cached_tokens: int = -1  #: of its prompt, found in the prefix cache where it is computed,
    decode_cached_tokens: int = -1  #: and where it is decoded
    queued_s: float = -1.0  #: when it came to the engine that it waits at,
    ticket: int = -1  #: and its place among those that came there
    fetched: int = -1  #: its place among the KV caches that are fetched
    tables: dict[Any, list[Any]] = field(default_factory=dict)  #: engine -> its KV blocks there
    #: engine -> those of each group of sliding layers, None where no window reaches them any more,
    #: and of states.
    windows: dict[Any, list[list[Any]]] = field(default_factory=dict)
    #: engine -> where windows end that can be found, in blocks; None: anywhere
    ends: dict[Any, tuple[int, ...] | None] = field(default_factory=dict)
    found: dict[Any, int] = field(default_factory=dict)  #: engine -> blocks found in its cache
    on_the_way: simpy.Event | None = None  #: the hand-over or the transfer that is to begin
    reports: dict[int, simpy.Event] = field(default_factory=dict)  #: that routers are to hear

    @property
    def tokens(self) -> int:
        """The tokens of its context that are known."""
        return self.prompt_len + self.generated

    @property
    def priority(self) -> tuple[float, int]:
        """Its place in the queue order, and then by arrival."""
        return self.queue_key, self.number


@dataclass(eq=False)
class Sequence:
    """A request that runs: ``cached`` of the ``context`` tokens before the next one have KV.

    The last token of a context is not computed ahead: the step that decodes it yields the next
    token, which may be the step of the last chunk."""

    request: Request
    cached: int
    context: int
    ticket: int  #: its place among those that the engine has admitted
    tokens: int = 1  #: that a decode step computes for it, drafts and placeholders among them
    chunk: int = 0  #: tokens of its context that the next step computes
    drafts: int = 0  #: that the next step verifies
    got: int = 0  #: output tokens of its last step,
    flying: int = 0  #: and tokens that it computed: KV that the engine does not count on yet
    rejected: int = 0  #: drafts of its last step, which the next one is planned without knowing
    decodes: bool = False  #: a step has decoded a token of it
    joined_at: int = 0  #: tokens of its context when it was computed (SGLang)
    rested: bool = False  #: it has a token, and sits steps of prompts out (SGLang)

    @property
    def prompt_done(self) -> bool:
        """Whether all of its context is computed."""
        return self.cached == self.context


def make_requests(inputs: RunInputs) -> list[Request]:
    """Return the requests of a workload, none of which has arrived."""
    spec, workload, replay = inputs.spec, inputs.workload, inputs.replay
    tokens = workload.prompt_len.astype(np.int64) + workload.output_len
    beside = spec.windows.of(tokens, spec.block_size).tolist()
    start, end = inputs.window
    requests = []
    for i in range(len(workload)):
        arrival, replayed = float(workload.arrival_s[i]), int(workload.decode_request[i])
        request = Request(
            number=i,
            arrival_s=arrival,
            prompt_len=int(workload.prompt_len[i]),
            output_len=int(workload.output_len[i]),
            measured=start <= arrival < end,
            domain=int(workload.domain[i]),
            window_row=int(replay.first_row[replayed]),
            window_len=int(replay.length[replayed]),
            window_offset=int(workload.replay_offset[i]),
            window_blocks=beside[i],
            block_keys=_block_keys(inputs, i),
        )
        if inputs.queue_keys is not None:
            request.queue_key = float(inputs.queue_keys[i])
        requests.append(request)
    return requests


def _block_keys(inputs: RunInputs, i: int) -> list[Any]:
    """Return what stands for the tokens of each full KV block and all before them: its number, and
    the hash of the prompt's block that its last token lies in (vLLM: ``hash_block_tokens``)."""
    workload, size = inputs.workload, inputs.spec.block_size
    hashes, prefix = workload.blocks(i).tolist(), workload.prefix_block_tokens
    context = int(workload.prompt_len[i])
    if workload.answered is not None and workload.answered[i]:  # another request goes on with it
        context += int(workload.output_len[i]) - 1
    keys: list[Any] = []
    for number in range(context // size if prefix else 0):
        last = ((number + 1) * size - 1) // prefix
        if last >= len(hashes):
            break
        keys.append((number, hashes[last]))
    return keys
