"""How long the prompts of the workloads ``task`` and ``language`` are. ELDR (Sec. 6, Datasets)
names data sets alone: each has a median and a spread here, measured or from a published mean, at
`CHARACTERS` a token where that counts characters, without chat template. Lengths are lognormal."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from eldr_sim.arrays import Ints
from eldr_sim.errors import InputError
from eldr_sim.traces.streams import stream

CHARACTERS = 4.0  #: characters of English text or code a token
#: Tokens beyond which lengths are cut: a drawn token costs time, and few prompts are longer.
SHORTEST, LONGEST = 8, 512


@dataclass(frozen=True)
class DataSet:
    """Prompts of one source: how many of a domain's, their median length and its spread."""

    #: ``name``, ``prompts``: the data set, and its prompts in ELDR's mix: its weight in the domain.
    name: str
    prompts: float
    median: float  #: tokens
    spread: float  #: standard deviation of the logarithm of the length
    source: str  #: where the figures are from


USUAL = 0.5  #: spread of HumanEval, for data sets of which only a mean is known


def of_mean(
    name: str, prompts: float, tokens: float, source: str, spread: float = USUAL
) -> DataSet:
    """Return a data set with a mean prompt of ``tokens`` tokens."""
    return DataSet(name, prompts, tokens * math.exp(-(spread**2) / 2), spread, source)


# A question of 116.6 words, four options of 3.5 (means, Jin et al. 2021, arXiv 2009.13081,
# statistics of USMLE); 1.3 tokens a word is assumed.
_MEDQA = 1.3 * (116.6 + 4 * 3.5)
# Tokens of Llama 2 of user messages (Zhao et al. 2024, "WildChat", arXiv 2405.01470, Table 1).
_WILD = math.sqrt(math.log(1 + (1609.18 / 295.58) ** 2))
_WILDCHAT = of_mean("WildChat", 1, 295.58, "mean, deviation of a message, arXiv 2405.01470", _WILD)

#: By domain. DS-1000, MBPP (of code, 1,475 prompts), MATH-500, OlympiadBench and others (of math,
#: 1,425) have no figure: the rest stand for them, as WildChat's for each of its languages.
DATA_SETS: dict[str, tuple[DataSet, ...]] = {
    "code": (
        DataSet("HumanEval", 164, 396 / CHARACTERS, 0.51, "measured, 5-95% 173-915 characters"),
        of_mean("BigCodeBench", 1140, 663.2 / CHARACTERS,
                "mean characters of the instructions, its data card"),
    ),
    "math": (DataSet("GSM8K", 1319, 222 / CHARACTERS, 0.39, "measured, 5-95% 119-431 characters"),),
    "medical": (
        DataSet("PubMedQA", 1000, 91 / CHARACTERS, 0.32, "measured, 5-95% 52-148 characters"),
        of_mean("MedQA", 1273, _MEDQA, "mean words, arXiv 2009.13081"),
        of_mean("MMLU, professional medicine", 272, _MEDQA, "MedQA's: the same exam"),
    ),
    "legal": (
        of_mean("CaseHOLD", 3600, 5_989_952 / 3600 / CHARACTERS,
                "bytes of LexGLUE's test set, which has 3,600 prompts as ELDR's domain"),
    ),
    **dict.fromkeys(("en", "zh", "ru", "fr"), (_WILDCHAT,)),
}  # fmt: skip


def draw_prompt_lengths(domain: Sequence[str], seed: int) -> Ints:
    """Draw the prompt tokens of requests by their domains' data sets; raises InputError."""
    lengths = np.empty(len(domain), np.int64)
    rng = stream(seed, "synthetic-prompt-data-set")
    which, normal = rng.random(len(domain)), stream(seed, "synthetic-prompt-length")
    for i, name in enumerate(domain):
        one = pick("prompt_len", DATA_SETS, name, float(which[i]))
        tokens = one.median * math.exp(one.spread * float(normal.standard_normal()))
        lengths[i] = round(min(max(tokens, SHORTEST), LONGEST))
    return lengths


def pick(field: str, known: Mapping[str, tuple[DataSet, ...]], domain: str, at: float) -> DataSet:
    """Return a domain's data set at a share ``at`` of its prompts, 0 to 1; raises InputError."""
    sets = known.get(domain)
    if sets is None:
        raise InputError(field, f"no data set of domain {domain!r}", ", ".join(known))
    until = list(accumulate(one.prompts for one in sets))
    return sets[bisect_right(until, at * until[-1])]


FEWEST, MOST = 4, 1024  #: tokens of prompts that ELDR's authors served; others are left out

_WORD, _LINE = 1.3, 10.0  # tokens of a word, of a line of code: assumed


#: By domain, of ELDR's artifact (casys-kaist/ELDR). MBPP, MATH-500, OlympiadBench and AQuA-RAT have
#: no figure: the rest of their domain stands for them. WildChat's languages are not told apart.
SERVED: dict[str, tuple[DataSet, ...]] = DATA_SETS | {
    "code": (
        *DATA_SETS["code"],
        of_mean("DS-1000", 1000, 140 * _WORD + 8.9 * _LINE,
                "mean words of a problem, lines of its code, arXiv 2211.11501"),
    ),
    "medical": (
        # Its context has three to four paragraphs, of which the first is served.
        of_mean("PubMedQA, with a paragraph", 1000, (14.4 + 238.9 / 3.3) * _WORD,
                "mean words of question and context, arXiv 1909.06146"),
        *DATA_SETS["medical"][1:],
    ),
}  # fmt: skip


def served_prompt_lengths(domain: Sequence[str], seed: int) -> Ints:
    """Draw the prompt tokens of requests by their domains' data sets; raises InputError."""
    lengths = np.empty(len(domain), np.int64)
    which, normal = stream(seed, "served-prompt-data-set"), stream(seed, "served-prompt-length")
    for i, name in enumerate(domain):
        one = pick("prompt_lengths", SERVED, name, which.random())
        tokens = 0
        while not FEWEST <= tokens <= MOST:
            tokens = round(one.median * math.exp(one.spread * float(normal.standard_normal())))
        lengths[i] = tokens
    return lengths
