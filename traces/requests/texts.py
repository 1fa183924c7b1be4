"""The texts that requests are dealt from: domains and lengths, not what a model makes of them.

A routing trace has those that it recorded (`RoutingTrace.texts`); for a model without experts they
are drawn, as a drawn trace of any model has them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from eldr_sim.errors import InputError
from eldr_sim.traces.requests.prompt_lengths import draw_prompt_lengths

DOMAIN_MIXES: dict[str, dict[str, float]] = {
    "task": {"code": 2779, "math": 2744, "medical": 2545, "legal": 3600},
    "language": {"en": 60.2, "zh": 14.8, "ru": 9.45, "fr": 3.15},
}
"""Weight of each domain in the named workloads; see `MIX_SOURCES`."""

MIX_SOURCES: dict[str, str] = {
    "task": "prompts per domain in ELDR Sec. 6, Datasets",
    "language": "derived: ELDR gives English + Chinese as about 75% of WildChat and the four "
    "languages as 87.6% (Fig. 5, Sec. 6); the first two are split 53:13 as WildChat-1M's turns "
    "are; Russian to French 3:1 is an assumption",
}
"""Source of each mix."""

NAMED_WORKLOADS = (*DOMAIN_MIXES, "trace", "chat", "agent")
"""Workloads without a file; all but the first two have the domains of the routing trace, as its
serving requests have them. The last two are sessions."""


def wanted_domains(
    workload: str, *mixes: Mapping[str, float] | None
) -> tuple[tuple[str, float], ...]:
    """Return the domains to draw, with weights: those of mixes that are given, evenly; else the
    workload's own mix; else all, evenly. Raises InputError if a mix names another domain."""
    known = [name for mix in DOMAIN_MIXES.values() for name in mix]
    named = dict.fromkeys(name for mix in mixes if mix is not None for name in mix)
    for name in named:
        if name not in known:
            raise InputError(
                "domain_mix",
                f"{name!r} is not a domain that can be drawn (a recorded trace has its own "
                "domains)",
                ", ".join(known),
            )
    weights = dict.fromkeys(named, 1.0) or DOMAIN_MIXES.get(workload) or dict.fromkeys(known, 1.0)
    return tuple(weights.items())


#: Prompts drawn of each split: twice as many to serve change no median by a point
#: (studies/synthetic); ELDR calibrates on 1,000 (Sec. 6).
SERVING, CALIBRATION = 1000, 1000
OUTPUT_LEN = 64  #: generated tokens: more change no median either


@dataclass(frozen=True, eq=False)
class PromptSource:
    """Prompts with their answers, one array entry each."""

    name: str  #: where they are from, for errors
    domains: list[str]  #: names of the domains
    domain: NDArray[np.int16]  #: int16 ``[texts]``, index into ``domains``
    #: ``prompt_len``, ``output_len``: int32 ``[texts]``, tokens.
    prompt_len: NDArray[np.int32]
    output_len: NDArray[np.int32]
    #: bool ``[texts]``: whether requests are dealt from it; others are for fitting policies.
    served: NDArray[np.bool_]
    has_rows: bool = False  #: whether the tokens of prompts were recorded, one by one

    def __len__(self) -> int:
        return len(self.domain)

    def of_domain(self, name: str) -> NDArray[np.int64]:
        """Return the served texts of a domain; raises InputError if there are none."""
        found = np.flatnonzero((self.domain == self.domains.index(name)) & self.served)
        if not len(found):
            raise InputError("trace", f"{self.name} has no serving request of domain {name!r}")
        return found


@lru_cache(maxsize=8)
def draw_texts(domains: tuple[tuple[str, float], ...]) -> PromptSource:
    """Draw the served texts of domains with weights, as long as those of their data sets."""
    names = [name for mix in DOMAIN_MIXES.values() for name in mix]
    weights = dict(domains)
    shares = [weights.get(name, 0.0) / sum(weights.values()) for name in names]
    domain = np.concatenate([take_turns(shares, n) for n in (CALIBRATION, SERVING)])
    prompt_len = draw_prompt_lengths([names[d] for d in domain], seed=0)[CALIBRATION:]
    used, domain = np.unique(domain, return_inverse=True)
    return PromptSource(
        "drawn",
        [names[d] for d in used],
        domain[CALIBRATION:].astype(np.int16),
        prompt_len.astype(np.int32),
        np.full(SERVING, OUTPUT_LEN, np.int32),
        np.ones(SERVING, bool),
    )


def resolve_domain_mix(
    texts: PromptSource,
    workload: str,
    domain_mix: Mapping[str, float] | None = None,
    field: str = "domain_mix",
) -> tuple[dict[str, float], str]:
    """Return the share of each domain, positive with sum 1, and a phrase on its source: the
    workload's own, for ``trace`` and logs the served texts', or the weights given. Raises
    InputError, naming ``field``, if a weight is not finite and at least 0, all are 0, or the texts
    lack a domain."""
    if domain_mix is None:
        missing = [name for name in DOMAIN_MIXES.get(workload, {}) if name not in texts.domains]
        if missing:
            problem = f"{workload} needs domain {missing[0]!r}, which trace {texts.name} lacks"
            allowed = f"--workload trace, or a domain mix of {', '.join(texts.domains)}"
            raise InputError("workload", problem, allowed)
        if workload in DOMAIN_MIXES:
            weights, source = DOMAIN_MIXES[workload], MIX_SOURCES[workload]
        else:
            serving = np.bincount(texts.domain[texts.served], minlength=len(texts.domains))
            weights = dict(zip(texts.domains, serving.tolist(), strict=True))
            source = "shares of the trace's serving split"
    else:
        weights, source = dict(domain_mix), "given"
    for name, weight in weights.items():
        if name not in texts.domains:
            problem = f"{name!r} is not a domain of trace {texts.name}"
            raise InputError(field, problem, ", ".join(texts.domains))
        if not math.isfinite(weight) or weight < 0:
            raise InputError(field, f"weight of {name} is {weight}", "a finite number >= 0")
    total = sum(weights.values())
    if total <= 0:
        raise InputError(field, "all weights are 0")
    if not math.isfinite(total):
        raise InputError(field, "the weights sum to more than a float holds", "smaller weights")
    total = math.fsum(weights.values())
    return (
        {name: weights[name] / total for name in texts.domains if weights.get(name, 0) > 0},
        source,
    )


def take_turns(shares: Sequence[float], n: int) -> NDArray[np.int64]:
    """Return the domain of each of ``n`` texts, evenly mixed; one at least of a domain."""
    exact = np.asarray(shares, dtype=np.float64) * n
    counts = np.where(exact > 0, np.maximum(np.floor(exact), 1), 0).astype(np.int64)
    behind = np.argsort(counts - exact, kind="stable")
    counts[behind[: max(n - int(counts.sum()), 0)]] += 1
    place = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    domain = np.repeat(np.arange(len(counts)), counts)
    return domain[np.argsort(place, kind="stable")][:n]
