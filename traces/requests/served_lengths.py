"""How long the prompts are that ELDR's authors served, by the data sets of their domains.

Their artifact (casys-kaist/ELDR) names the sets and keeps prompts of 4 to 1,024 tokens of Qwen3's
tokenizer. Texts whose licences do not let us have them here are stood for by a median and a spread,
as in `prompt_lengths`, of whose sets these are some more; lengths are lognormal.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eldr_sim.traces.requests.prompt_lengths import DATA_SETS, DataSet, of_mean, pick
from eldr_sim.traces.streams import stream

SHORTEST, LONGEST = 4, 1024  #: tokens of the shortest and the longest prompts; others are left out

_WORD, _LINE = 1.3, 10.0  # tokens of a word, of a line of code: assumed


#: By domain. MBPP, MATH-500, OlympiadBench and AQuA-RAT have no figure: the rest of their domain
#: stands for them. WildChat's languages are not told apart.
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


def served_prompt_lengths(domain: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Draw the prompt tokens of requests by the data sets of their domains.

    Raises InputError if a domain has no data set.
    """
    lengths = np.empty(len(domain), np.int64)
    which, normal = stream(seed, "served-prompt-data-set"), stream(seed, "served-prompt-length")
    for i, name in enumerate(domain):
        one = pick("prompt_lengths", SERVED, name, which.random())
        tokens = 0
        while not SHORTEST <= tokens <= LONGEST:
            tokens = round(one.median * math.exp(one.spread * float(normal.standard_normal())))
        lengths[i] = tokens
    return lengths
