"""Speculative decoding as vLLM's ``--speculative-config`` spells it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json

#: Methods that look drafts up in the tokens so far.
LOOKING_UP = ("ngram", "suffix")
Share = Annotated[float, Field(ge=0, le=1)]


class SpeculativeConfig(BaseModel):
    """What drafts tokens, how many, and how many of them are accepted."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    method: Literal["mtp", "eagle", "eagle3", "draft_model", "ngram", "suffix"]
    """``mtp``: the model's own multi-token-prediction layer; ``eagle``, ``eagle3``: a head of one
    layer; ``draft_model``: a small dense model; ``ngram``, ``suffix``: tokens that came before."""
    num_speculative_tokens: int = Field(ge=0, le=32)
    """Drafts of each sequence and step; 0 drafts nothing."""
    model: str | None = None
    """Of ``draft_model``: a known dense model or its config.json; of ``eagle`` and ``eagle3`` the
    head's config.json, a head of the served model's widths when not given."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """Drafts by the sequences of a step, as (first, last, drafts); beyond the last range as many as
    in it."""
    rejection_sample_method: Literal["synthetic"] = "synthetic"
    """Acceptances are drawn: no tokens are computed here."""
    synthetic_acceptance_rates: tuple[Share, ...] | None = None
    """Share of the steps that accept at least 1, 2, ... drafts."""
    synthetic_acceptance_length: float | None = Field(default=None, ge=1)
    """Mean tokens that a step yields, the sampled one included."""
    acceptance: str | None = None
    """Name of a shipped acceptance; that of the model and method when none is given."""
    verify_attention: Literal["batch", "rows"] | None = None
    """Whether attention of a verify step reads the context once for all tokens of a sequence
    (``batch``) or once for each (``rows``); ``rows`` for MLA, ``batch`` otherwise when not
    given."""
    draft_host_ms: float | None = Field(default=None, ge=0)
    """Host and launches of each draft pass, or of one look-up, ms; as derived from a published run
    when not given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        k, rates = self.num_speculative_tokens, self.synthetic_acceptance_rates
        given = [self.acceptance, rates, self.synthetic_acceptance_length]
        if sum(value is not None for value in given) > 1:
            names = "acceptance, synthetic_acceptance_rates, synthetic_acceptance_length"
            raise _error("acceptance", "given twice", f"one of {names}")
        if rates is not None and (len(rates) != k or list(rates) != sorted(rates, reverse=True)):
            problem = f"{list(rates)} for {k} drafts"
            raise _error("synthetic_acceptance_rates", problem, f"{k} shares that do not rise")
        if (length := self.synthetic_acceptance_length) is not None and length > k + 1:
            raise _error("synthetic_acceptance_length", f"{length:g}", f"1 to {k + 1}")
        if (self.method == "draft_model") != (self.model is not None) and (
            self.method not in ("eagle", "eagle3")
        ):
            raise _error("model", f"{self.model!r} for {self.method}", "a draft_model's, or a head")
        at = 1
        for first, last, drafts in self.num_speculative_tokens_per_batch_size or ():
            if first != at or last < first or not 0 <= drafts <= k:
                problem = f"{[first, last, drafts]} where sequences {at} and more are next"
                allowed = f"ranges one after the other from 1 on, of 0 to {k} drafts"
                raise _error("num_speculative_tokens_per_batch_size", problem, allowed)
            at = last + 1
        return self

    def drafts_of(self, batch: int) -> int:
        """Return the drafts of each of ``batch`` sequences."""
        found = self.num_speculative_tokens
        for first, _, drafts in self.num_speculative_tokens_per_batch_size or ():
            if batch >= first:
                found = drafts
        return found


def _error(field: str, problem: str, allowed: str) -> InputError:
    return InputError(f"speculative_config.{field}", problem, allowed)


def _parsed(value: Any) -> Any:
    if isinstance(value, str):
        value = parse_json(value, "speculative_config")
    if value is not None and not isinstance(value, dict | SpeculativeConfig):
        allowed = '{"method": "mtp", "num_speculative_tokens": 3}'
        raise InputError("speculative_config", f"{value!r}", allowed)
    return value


#: Of a run: the mapping, or its JSON text.
Speculative = Annotated[SpeculativeConfig | None, BeforeValidator(_parsed)]
