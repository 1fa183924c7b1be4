"""Names of models as people write them: repository ids with dates, ``-Instruct`` and organisation.

Checkpoints of one architecture that were trained further have the same dimensions, so that words
which say how a model was trained or when leave its times as they are. Words of its size, its
precision or another architecture do not."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

_TRAINED = frozenset(
    ("instruct", "chat", "it", "hf", "thinking", "base", "bf16", "meta", "nvidia", "pt", "preview",
     "latest", "reasoning")
)  # fmt: skip
#: Dates: 2507 and 0528, 20250514, 2025-05, and versions of a release such as v0.1.
_DATE = re.compile(r"(2[3-9](0[1-9]|1[0-2])|(0[1-9]|1[0-2])([0-2]\d|3[01])|20\d{2}(\d{2}){0,2}"
                   r"|v0\.\d)$")  # fmt: skip
#: Names without an entry, by those of models with the same configuration.
_SAME = {
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-nvfp4": "deepseek-v3.1-nvfp4",
    "deepseek-r1-nvfp4-v2": "deepseek-v3.1-nvfp4",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3.1-terminus": "deepseek-v3",
    "deepseek-v3-nvfp4": "deepseek-v3.1-nvfp4",
    "glm-4.6": "glm-4.5",
    "glm-4.6-fp8": "glm-4.5-fp8",
    "glm-4.7": "glm-4.5",
    "glm-4.7-fp8": "glm-4.5-fp8",
    "deepseek-v3.2-exp": "deepseek-v3.2",
    "deepseek-v3.2-speciale": "deepseek-v3.2",
    "glm-5.1-fp8": "glm-5-fp8",
    "kimi-k2.6": "kimi-k2.5",
    "kimi-k2-thinking": "kimi-k2.5",  # INT4 experts, unlike Kimi-K2
    "llama-3-70b": "llama-3.1-70b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-3.3-70b-fp8": "llama-3.1-70b-fp8",
    "llama-3.3-70b-nvfp4": "llama-3.1-70b-nvfp4",
    "minimax-m2.1": "minimax-m2",
    "minimax-m2.7": "minimax-m2.5",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "qwq-32b": "qwen2.5-32b",
}


def plain(name: str) -> str:
    """Return a name without organisation, dates and words of training, in lower case."""
    words = re.split(r"[-_\s:]+", name.strip().strip("/").rsplit("/", 1)[-1].lower())
    first, *others = words if words[0] not in ("meta", "nvidia") else words[1:] or words
    whole = "-".join([first, *others])
    if whole in _SAME:
        return _SAME[whole]
    kept = [word for word in others if word not in _TRAINED and not _DATE.match(word)]
    found = "-".join([first, *("nvfp4" if word == "fp4" else word for word in kept)])
    return _SAME.get(found, found)


def says_bf16(name: str) -> bool:
    """Whether a name asks for 16-bit weights, which is another model where they are quantized."""
    return "bf16" in re.split(r"[-_\s:]+", name.lower())


def matching(wanted: str, known: Mapping[str, Iterable[str]]) -> str | None:
    """Return the model that a name is of; None: none, or several. ``known``: the spellings of
    each; an exact one goes before one that is equal but for dates and training."""
    lower = wanted.strip().lower()
    for spell in (str.lower, plain):
        asked = spell(lower)
        found = [model for model, names in known.items() if asked in map(spell, names)]
        if found:
            return found[0]
    return None


def nearest(wanted: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names that are most like one that is not."""
    by_plain: dict[str, str] = {}
    for name in known:
        by_plain.setdefault(plain(name), name)
    close = get_close_matches(plain(wanted), by_plain, most, cutoff=0.5)
    return [by_plain[one] for one in close]
