"""MoE-Prefill's workloads as request logs: Table 2's mix, and four lengths without shared prefixes.

From the paper (arXiv 2605.02960, Table 2) come the datasets, their requests, tokens in all and
shortest and longest prompts. Assumed are

- lengths: of greatest entropy at that mean, an exponential cut off at both ends, at evenly spaced
  quantiles, so that totals hold at any scale;
- prefixes: a header of a dataset's prompts, and a document that siblings share (:data:`DATASETS`);
  the paper says high, medium or low, and that documents come with questions;
- order: datasets mixed at random, the siblings of a document together.

``sharing``, 0 to 1, scales both. Of the regimes' lengths, lost in the text but 128K tokens (10
million tokens each), 1K, 8K and 32K are assumed."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from eldr_sim.kinds import AnyPath
from eldr_sim.outputs import whole_file

BLOCK_TOKENS = 16  #: tokens of a hashed block, vLLM's KV block


class Dataset(NamedTuple):
    """A dataset of Table 2, and its assumed prefixes."""

    name: str
    requests: int
    tokens: int  #: of all requests
    shortest: int
    longest: int
    prefix_share: str  #: the paper's word
    header: int  #: tokens that all its prompts begin with
    document_share: float  #: of the tokens behind the header: those that siblings share
    siblings: int  #: requests to a document


#: Table 2: 73,800 requests, 37.9 million tokens.
DATASETS = (
    Dataset("MoralStories", 24_000, 3_300_000, 100, 200, "high", 80, 0.0, 1),
    Dataset("MMLU", 24_000, 5_800_000, 50, 500, "low", 32, 0.0, 1),
    Dataset("BoolQ", 12_000, 2_700_000, 200, 600, "low", 32, 0.0, 1),
    Dataset("IMDB", 12_000, 5_500_000, 300, 2_000, "low", 32, 0.0, 1),
    Dataset("QuALITY", 1_200, 10_500_000, 4_000, 12_000, "high", 32, 0.95, 10),
    Dataset("ArXiv", 600, 10_100_000, 6_000, 131_072, "medium", 32, 0.95, 2),
)

#: Tokens of a prompt; only the last is the paper's.
REGIMES = {"short": 1024, "medium": 8192, "long": 32_768, "ultra-long": 131_072}
REGIME_TOKENS = 10_000_000  #: tokens of a regime


class Prompt(NamedTuple):
    """A request: its dataset, its tokens, and the ids of its full blocks."""

    dataset: str
    tokens: int
    blocks: tuple[int, ...]


def lengths(dataset: Dataset, n: int) -> Ints:
    """Return ``n`` prompt lengths, ascending: quantiles of the greatest entropy, an exponential
    density between the ends at the rate that gives the mean."""
    width = float(dataset.longest - dataset.shortest)
    mean = (dataset.tokens / dataset.requests - dataset.shortest) / width

    def excess(rate: float) -> float:
        return 1 / rate - 1 / math.expm1(rate) - mean

    rate = brentq(excess, 1e-6, 500.0) if mean < 0.5 else brentq(excess, -500.0, -1e-6)
    places = (np.arange(n) + 0.5) / n
    drawn = -np.log1p(places * np.expm1(-rate)) / rate
    rounded: Ints = np.rint(dataset.shortest + width * drawn).astype(np.int64)
    return rounded


def real_world(sharing: float = 1.0, scale: float = 1.0, seed: int = 0) -> list[Prompt]:
    """Return Table 2's workload in queue order; ``sharing``, 0 to 1, of prefixes; ``scale`` of each
    dataset's requests. Raises InputError if out of range."""
    if not 0 <= sharing <= 1:
        raise InputError("sharing", f"{sharing!r}", "0 to 1")
    if not 0 < scale <= 1:
        raise InputError("scale", f"{scale!r}", "0 < scale <= 1")
    groups: list[list[Prompt]] = []
    fresh = 0
    for data in DATASETS:
        header = range(fresh, fresh + int(sharing * data.header) // BLOCK_TOKENS)
        fresh = header.stop
        n_documents = max(1, round(scale * data.requests / data.siblings))
        for tokens in lengths(data, n_documents).tolist():
            document = sharing * (data.header + data.document_share * (tokens - data.header))
            shared = max(int(document) // BLOCK_TOKENS, len(header))
            if data.siblings == 1:
                shared = len(header)
            common = range(fresh, fresh + shared - len(header))
            fresh = common.stop
            group = []
            for _ in range(data.siblings):
                own = range(fresh, fresh + tokens // BLOCK_TOKENS - shared)
                fresh = own.stop
                group.append(Prompt(data.name, tokens, (*header, *common, *own)))
            groups.append(group)
    order = np.random.default_rng(seed).permutation(len(groups))
    return [prompt for number in order for prompt in groups[number]]


def regime(name: str, tokens: int = REGIME_TOKENS) -> list[Prompt]:
    """Return the prompts of one length of :data:`REGIMES`, of ``tokens`` tokens together, one each.
    Raises InputError if there is no such regime."""
    if name not in REGIMES:
        raise InputError("regime", f"{name!r}", ", ".join(REGIMES))
    length = REGIMES[name]
    n_blocks = length // BLOCK_TOKENS
    return [
        Prompt(name, length, tuple(range(i * n_blocks, (i + 1) * n_blocks)))
        for i in range(max(1, round(tokens / length)))
    ]


def write_log(
    prompts: Sequence[Prompt], path: AnyPath, rate: float = math.inf, arrivals: int = 0
) -> None:
    """Write prompts as a Mooncake log, one output token each, all at once or ``rate`` a second
    (Poisson, seed ``arrivals``, to the millisecond)."""
    gaps = np.random.default_rng(arrivals).exponential(1e3 / rate, len(prompts))
    times = np.rint(np.cumsum(gaps)).astype(np.int64).tolist()
    with whole_file(Path(path)) as partial, partial.open("w", encoding="utf-8") as file:
        for prompt, arrival in zip(prompts, times, strict=True):
            line = {
                "timestamp_ms": arrival,
                "input_length": prompt.tokens,
                "output_length": 1,
                "hash_ids": prompt.blocks,
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
