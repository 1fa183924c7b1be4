"""How many descriptors NIXL posts for KV transfers after it has merged neighbours: prints the table
of docs/parallelism.md. A prefill and a decode worker take KV blocks as vLLM does
(``vllm/v1/core/block_pool.py``); descriptors become one where both sides' blocks follow each other
upwards (NIXL, ``nixlAgent::makeXferReq``)."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eldr_sim.arrays import Ints

BLOCK = 16
PREFILL_TOKENS_S, TRANSFER_S = 40e3, 0.02
Lengths = Callable[[np.random.Generator, int], Ints]


@dataclass(frozen=True)
class Load:
    """Requests: how many, a second, lengths; blocks of the two workers; a decode step, s."""

    requests: int
    rate: float
    prompt: Lengths
    output: Lengths
    prefill_blocks: int
    decode_blocks: int
    step_s: float = 0.02


def shares(load: Load, seed: int = 0) -> tuple[float, float, float]:
    """Return which share of the descriptors stays, of the first 5% and of the second half of the
    requests, and the blocks of one of these."""
    rng = np.random.default_rng(seed)
    free = [deque(range(1, load.prefill_blocks)), deque(range(1, load.decode_blocks))]
    prompt, output = (f(rng, load.requests) for f in (load.prompt, load.output))
    events: list[tuple[float, int, int]] = []  # when, what, which request
    end = 0.0
    for i, arrival in enumerate(np.cumsum(rng.exponential(1 / load.rate, load.requests))):
        events.append((max(end, arrival), 0, i))
        end = max(end, arrival) + prompt[i] / PREFILL_TOKENS_S
        events.append((end, 1, i))
    heapq.heapify(events)
    held: list[dict[int, list[int]]] = [{}, {}]
    tokens = prompt.copy()
    counts = []
    while events:
        now, what, i = heapq.heappop(events)
        blocks = -(-int(prompt[i]) // BLOCK)
        if what == 0:
            held[0][i] = [free[0].popleft() for _ in range(blocks)]
        elif what == 1 and len(free[1]) < blocks:
            heapq.heappush(events, (now + 0.05, 1, i))
        elif what == 1:
            held[1][i] = [free[1].popleft() for _ in range(blocks)]
            apart = (np.diff(held[0][i]) != 1) | (np.diff(held[1][i]) != 1)
            counts.append((blocks, 1 + int(apart.sum())))
            heapq.heappush(events, (now + TRANSFER_S, 2, i))
            heapq.heappush(events, (now + TRANSFER_S + load.step_s * BLOCK, 3, i))
        elif what == 2:
            free[0].extend(reversed(held[0].pop(i)))
        else:
            tokens[i] += BLOCK
            if tokens[i] >= prompt[i] + output[i]:
                free[1].extend(reversed(held[1].pop(i)))
                continue
            if free[1]:
                held[1][i].append(free[1].popleft())
            heapq.heappush(events, (now + load.step_s * BLOCK, 3, i))
    found = np.array(counts)
    first, late = found[: len(found) // 20], found[len(found) // 2 :]
    return *((part[:, 1].sum() / part[:, 0].sum()) for part in (first, late)), late[:, 0].mean()


def fixed(length: int) -> Lengths:
    """Return a source of equal lengths."""
    return lambda rng, n: np.full(n, length)


def lognormal(median: float, sigma: float) -> Lengths:
    """Return a source of log-normal lengths of a block or more."""
    return lambda rng, n: np.maximum(BLOCK, rng.lognormal(np.log(median), sigma, n)).astype(int)


LOADS = {
    "prompts of 5,000, outputs of 250": Load(
        4000, 5.6, fixed(5000), fixed(250), 40_000, 25_000, 0.007
    ),
    "Azure's conversations (means 1,155, 211)": Load(
        20_000, 20, lognormal(800, 0.9), lognormal(150, 0.9), 30_000, 30_000
    ),
    "long prompts (mean 12,000)": Load(
        4000, 2, lognormal(10_000, 0.6), lognormal(250, 0.8), 40_000, 60_000
    ),
    "prompts of 80, outputs of 96": Load(50_000, 60, fixed(80), fixed(96), 30_000, 30_000),
}

if __name__ == "__main__":
    print("| load | blocks a request | first 5% | second half |\n|---|---|---|---|")
    for name, load in LOADS.items():
        first, late, blocks = shares(load)
        print(f"| {name} | {blocks:.0f} | {first:.0%} | {late:.0%} |")
