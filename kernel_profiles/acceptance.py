"""How many drafts are accepted: shipped acceptances with their sources, and rates from lengths.

Rates are unconditional, by position, as vLLM counts them: rate ``i`` is the share of verify steps
that accept at least ``i`` drafts, so they never rise. The acceptance length is the tokens that a
step yields, the sampled one included: one more than the sum of the rates."""

import re
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json, read_text
from eldr_sim.kernel_profiles.shipped_data import shipped_json

_FIELD = "speculative_config.acceptance"
_SAMPLE = re.compile(r"(?:vllm|sglang):(spec_\w+?)(?:_total)?(?:\{(.*)\})?\s+([-+.\deE]+)\s*$")
_POSITION = re.compile(r'position="(\d+)"')

#: Of a published mean alone nobody knows the distribution.
_CONSTANT = "each draft accepted alike, given the one before"


class Acceptance(NamedTuple):
    """The acceptance for a number of drafts."""

    rates: tuple[float, ...]  #: by position
    source: str

    @property
    def length(self) -> float:
        """Mean tokens that a step yields."""
        return 1.0 + sum(self.rates)


def rates_of_length(length: float, n: int) -> tuple[float, ...]:
    """Return the rates of ``n`` drafts that make an acceptance length, 1 to ``n + 1``: each
    accepted with ``a``, given the one before, ``(1 - a ** (n + 1)) / (1 - a)``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**i for i in range(n + 1)) < length else (low, a)
    return tuple(high**i for i in range(1, n + 1))


def spent(length: float, n: int) -> tuple[float, ...]:
    """Return the rates of ``n`` drafts as engines make them of a synthetic length: first ones
    always, one with the share left, none after it: the least variance (vLLM, SGLang)."""
    return tuple(min(1.0, max(0.0, length - 1.0 - i)) for i in range(n))


def read(path: str, n: int) -> Acceptance:
    """Return the acceptance of ``n`` drafts that an engine has had; raises InputError if the file
    says nothing of it.

    ``path``: a metrics endpoint's text (vLLM's ``spec_decode_num_drafts`` and
    ``..._accepted_tokens_per_pos`` of all engines, SGLang's ``spec_accept_length``, their mean), or
    JSON of ``vllm bench serve``, SGLang's ``bench_serving`` or a run; ``n``: see `shipped`."""
    try:
        acceptance = _read(path, n)
        known = all(0.0 <= b <= a <= 1.0 for a, b in pairwise((1.0, *acceptance.rates)))
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        known = False
    if not known:
        allowed = "shares of accepted drafts that do not rise"
        raise InputError(_FIELD, f"{path} has no figures of acceptance", allowed)
    return acceptance


def _read(path: str, n: int) -> Acceptance:
    text = read_text(path, _FIELD)
    entry: dict[str, Any] = {"name": path, "text": "measured", "source": "metrics endpoint"}
    if text.lstrip().startswith("{"):
        document = parse_json(text, _FIELD)
        document = document.get("speculative_decoding") or document
        entry["source"] = "benchmark's result"
        tokens, drafts = (
            document.get(f"spec_decode_{x}", 0) for x in ("draft_tokens", "num_drafts")
        )
        rates = document.get("spec_decode_per_position_acceptance_rates") or document.get(
            "acceptance_rates"
        )
        length = document.get("spec_decode_acceptance_length") or document.get("accept_length")
        k = tokens / drafts if tokens and drafts else n
    else:
        samples = [m.groups() for m in map(_SAMPLE.match, text.splitlines()) if m]
        drafts = sum(float(v) for name, _, v in samples if name == "spec_decode_num_drafts")
        by_position: dict[int, float] = {}
        for name, labels, value in samples:
            if name.endswith("_per_pos") and (at := _POSITION.search(labels or "")):
                by_position[int(at[1])] = by_position.get(int(at[1]), 0.0) + float(value)
        rates = [by_position[i] / drafts for i in sorted(by_position)] if drafts else None
        lengths = [float(v) for name, _, v in samples if name == "spec_accept_length" and float(v)]
        length, k = (sum(lengths) / len(lengths) if lengths else None), n
    if rates:
        entry["rates"] = rates
    elif length:
        if not 1.0 <= float(length) <= round(k) + 1.0:
            problem = f"{path}: a mean length of {float(length):g} with {round(k)} drafts"
            raise InputError(_FIELD, problem, "1 to the number of drafts + 1")
        entry["lengths"] = {str(round(k)): float(length)}
    else:
        problem = f"{path}: no accepted drafts"
        raise InputError(_FIELD, problem, "vLLM's or SGLang's metrics or result")
    return _of(entry, n)


def shipped(name: str | None, model: str, method: str, n: int) -> Acceptance:
    """Return a published acceptance of ``n`` drafts a step; raises InputError if there is none.

    ``name``: of one that ships; None takes that of ``model`` and ``method``. Drafts beyond the
    published ones are never accepted, which is a lower bound; between two published numbers of
    drafts a length lies on the line between theirs, also a lower bound, since each further draft
    adds less. The source says so."""
    if name is None:
        own = [e for e in _entries().values() if e.get("model") == model and e["method"] == method]
        if not own:
            problem = f"no published acceptance rates of {method} for {model}"
            allowed = "synthetic_acceptance_rates, synthetic_acceptance_length, or acceptance: "
            raise InputError(_FIELD, problem, allowed + ", ".join(_entries()))
        entry = own[0]
    elif name in _entries():
        entry = _entries()[name]
    else:
        raise InputError(_FIELD, f"unknown acceptance {name!r}", ", ".join(_entries()))
    return _of(entry, n)


def _of(entry: dict[str, Any], n: int) -> Acceptance:
    """Return the acceptance of ``n`` drafts of one that is known by rates or lengths."""
    source = f"{entry['name']} ({entry['text']}): {entry['source']}"
    if "rates" in entry:
        rates = list(entry["rates"][:n])
        if len(rates) < n:
            source += f"; no draft after the {len(rates)}th is known: none is accepted"
        rates += [0.0] * (n - len(rates))
        return Acceptance(tuple(rates), source)
    lengths = {int(drafts): float(length) for drafts, length in entry["lengths"].items()}
    source = f"{source}; {_CONSTANT}"
    fewer, more = (max((k for k in lengths if k <= n), default=None),
                   min((k for k in lengths if k >= n), default=None))  # fmt: skip
    if more is None:
        assert fewer is not None
        source += f"; known up to {fewer} drafts: of {n} none after them is accepted"
        return Acceptance((*rates_of_length(lengths[fewer], fewer), *[0.0] * (n - fewer)), source)
    if fewer is None:
        source += f"; known from {more} drafts on: the first {n} of them"
        return Acceptance(rates_of_length(lengths[more], more)[:n], source)
    length = lengths[fewer]
    if fewer != more:
        length += (lengths[more] - length) * (n - fewer) / (more - fewer)
        source += f"; {length:.2f} with {n} drafts, on the line between those of {fewer} and {more}"
    return Acceptance(rates_of_length(length, n), source)


def list_acceptances() -> list[str]:
    """Return the names of the acceptances that ship."""
    return list(_entries())


@lru_cache(maxsize=1)
def _entries() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in shipped_json("acceptance")["acceptances"]}
