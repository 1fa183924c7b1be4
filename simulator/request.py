"""A request on its way through the cluster, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from eldr_sim.simulator.prefix_cache import BlockTable, Prompt

#: ``Request.outcome`` of a request that generated all its tokens.
COMPLETED = "completed"
#: Its prompt or its whole context is longer than the model's context.
TOO_LONG = "exceeds_max_model_len"
#: Its whole context would not fit into an otherwise empty KV cache.
NO_KV_ROOM = "exceeds_kv_cache"
#: Not measured: it arrived outside the window and was still open when the last measured one ended.
AFTER_WINDOW = "run_ended_after_window"
#: The run stopped at its time limit because the cluster could not serve the load.
OVERLOADED = "unserved_at_time_limit"


@dataclass(slots=True)
class Request:
    """One request; times are seconds of simulated time, negative while still to come."""

    index: int
    arrival_s: float
    prompt_len: int
    output_len: int
    domain: int
    trace_request: int
    #: Replay window in the decoder's bit sets: first row, length, and where the replay begins.
    window_row: int
    window_len: int
    window_offset: int
    measured: bool

    sent_s: float = -1.0  # left the client; later than arrival under --max-concurrency
    prefill_worker: int = -1
    decode_worker: int = -1
    prefill_start_s: float = -1.0
    prefill_end_s: float = -1.0
    transfer_start_s: float = -1.0
    transfer_end_s: float = -1.0
    decode_start_s: float = -1.0  # joined the decode batch
    finish_s: float = -1.0
    outcome: str = ""
    preemptions: int = 0

    cached_tokens: int = -1  # prompt tokens found in the prefix cache, once admitted there
    computed: int = 0  # prompt tokens that the prefill worker has, computed or from its cache
    prompt: Prompt | None = None  # from the head of the prefill queue until the KV is pulled
    block_table: BlockTable | None = None  # held on the prefill worker
    decode_blocks: int = 0  # held on the decode worker before it joined the batch
    generated: int = 0  # output tokens, kept up to date at preemption only
    last_token_s: float = -1.0  # of the token before its last preemption
