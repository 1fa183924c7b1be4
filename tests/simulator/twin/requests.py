"""A request and what it lives through."""

from dataclasses import dataclass, field

from eldr_sim.policies.base import RequestInfo


@dataclass(eq=False)
class Request:
    """A request and what it lives through; times that have not come are negative."""

    number: int
    arrival_s: float
    prompt: int
    output: int
    measured: bool
    token_experts: list  #: of each prompt token; empty where nobody asks
    window: list  #: experts of the tokens that it decodes, read round and round
    block_keys: list  #: of its full KV blocks that others may share
    info: RequestInfo
    sent_s: float = -1.0
    tokenized_s: float = -1.0
    prefill_start_s: float = -1.0
    prefill_end_s: float = -1.0
    transfer_start_s: float = -1.0
    transfer_end_s: float = -1.0
    decode_start_s: float = -1.0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    last_token_s: float = -1.0
    prefill_worker: int = -1
    decode_worker: int = -1
    preemptions: int = 0
    cached_tokens: int = -1
    decode_cached_tokens: int = -1
    queue_key: float = 0.0  #: the lowest is admitted first
    queued_s: float = -1.0  #: came to the engine that it waits at
    ticket: int = -1  #: its place among those that came to that engine
    reserved: int = -1  #: its place among those whose KV cache a decode worker fetches
    generated: int = 0
    outcome: str = ""
    kv_here: bool = False
    token_s: list = field(default_factory=list)  #: when each token came
    window_blocks: int = 0  #: KV blocks that its sliding windows take
    tables: dict = field(default_factory=dict)  #: worker -> its KV blocks there
    windows: dict = field(default_factory=dict)  #: worker -> those of its sliding windows

    def experts(self, position):
        """Experts of the token at ``position`` of the context when a chunk computes it."""
        if position < self.prompt:
            return self.token_experts[position]
        return self.decode_experts(position - self.prompt + 1)

    def decode_experts(self, generated):
        """Experts of the token that is fed after ``generated`` tokens."""
        return self.window[generated % len(self.window)]


@dataclass(eq=False)
class Sequence:
    """A running request: ``cached`` of the ``context`` tokens before the next one have KV."""

    request: Request
    cached: int
    context: int
    chunk: int = 0  #: tokens that the next step computes
    tokens: int = 1  #: that a decode step computes, drafts and placeholders among them
    drafts: int = 0  #: that it verifies
    got: int = 0  #: output tokens of its last step
    ticket: int = 0  #: its place among those that the engine has admitted
