"""What is known of the pools of an autoscaler beforehand, and of the load."""

from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from typing import NamedTuple


class Offered(NamedTuple):
    """Requests that come in a stretch of time, and means of their tokens."""

    requests: float
    prompt_tokens: float
    output_tokens: float


class PoolFacts(NamedTuple):
    """What is known of a pool beforehand: its part, its workers' speed, and how they start."""

    name: str
    computes: bool  #: prompts
    decodes: bool
    engines: int  #: of a worker
    gpus: int  #: of a worker
    max_num_seqs: int
    kv_tokens: int  #: that an engine has room for
    start_up_s: float
    switch_s: float
    #: Seconds of an engine for a prompt of a number of tokens, in steps with others like it.
    prompt_s: Callable[[int], float]
    #: Seconds of a step of a number of sequences at a mean context, of uniform routing, or of the
    #: trace's shares where engines share experts.
    step_s: Callable[[int, float], float]
    token_budget: int = 8192  #: of a step
    #: Facts by the engines that are there, of a group whose engines come and go.
    widths: Mapping[int, "PoolFacts"] = MappingProxyType({})
    #: Seconds for which such a group stands still when it goes from a width to another.
    pause_s: Callable[[int, int], float] = lambda before, after: 0.0

    def decode_batch(self, context: float, itl_s: float, prompts_s: float = 0.0) -> int:
        """Return the largest batch, >= 1, with steps of at most ``itl_s``, given ``prompts_s`` for
        each sequence's share of prompts, and KV that fits."""
        low, high = 1, max(1, min(self.max_num_seqs, int(self.kv_tokens // max(context, 1.0))))
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.step_s(middle, context) + middle * prompts_s <= itl_s
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def work_s(
        self,
        prompt: float,
        output: float,
        cached: float = 0.0,
        itl_s: float = 0.05,
        mixed: bool = True,
    ) -> float:
        """Return the worker seconds of a request of these lengths, in tokens, in this pool: its
        prompt, and its share of decode steps as full as ``itl_s`` allows. A ``mixed`` worker's step
        of b sequences also computes the prompts of b / ``output`` others."""
        seconds = self.prompt_s(max(1, round(prompt - cached))) if self.computes else 0.0
        if self.decodes and output > 0.0:
            context = 64.0 * max(1, round((prompt + output / 2.0) / 64.0))
            batch = self.decode_batch(context, itl_s, seconds / output if mixed else 0.0)
            seconds += output * self.step_s(batch, context) / batch
        return seconds / self.engines

    def fewest(self, do: Callable[["PoolFacts", int], bool]) -> int:
        """Return the fewest workers, at least 1, that do; the most where none of a group's do."""
        if not self.widths:
            return next(n for n in count(1) if do(self, n))
        enough = (n for n, facts in sorted(self.widths.items()) if do(facts, n))
        return next(enough, max(self.widths))


class ScalingContext(NamedTuple):
    """What an autoscaler is built from: `PolicyContext.scaling`."""

    pools: tuple[PoolFacts, ...]
    #: The requests from one time, s, to another, which only a timetable and an oracle know.
    known: Callable[[float, float], Offered]

    def of(self, pool: str) -> PoolFacts:
        """Return what is known of a pool."""
        return next(facts for facts in self.pools if facts.name == pool)
