"""Speculative decoding as vLLM's ``--speculative-config`` spells it."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_json
from eldr_sim.kernel_profiles.acceptance import rates_of_length
from eldr_sim.simulator.setup.config.option import Option

#: Other engines' names of a method.
_METHODS = {
    "nextn": "mtp", "eagle": "eagle3", "eagle3": "eagle3", "standalone": "draft_model",
    "draft_target": "draft_model", "ngram": "ngram", "mtp": "mtp",
}  # fmt: skip
LOOKING_UP = ("ngram", "suffix")  #: methods that look drafts up in the tokens so far
Share = Annotated[float, Field(ge=0, le=1)]


class SpeculativeConfig(BaseModel):
    """What drafts tokens, how many, and how many of them are accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
    lookup_hit_rate: float = Field(default=1.0, gt=0, le=1)
    """Share of the steps before which ``ngram`` or ``suffix`` finds drafts; the others verify
    none."""
    acceptance: str | dict[str, str | float] | None = None
    """Name of a shipped acceptance; a file with the text of vLLM's or SGLang's metrics endpoint or
    a benchmark's result; or one of these, or a length, for each of the trace's domains, ``other``
    for those not named. That of the model and method when none is given."""
    num_steps: int | None = Field(default=None, ge=1)
    """Draft passes, of which as many drafts can be accepted; fewer than the drafts where these are
    a tree. As many as drafts when not given."""
    eagle_topk: int = Field(default=1, ge=1, le=32)
    """Branches of a tree of drafts."""
    rejected_experts: Literal["next", "place", "request", "none"] = "next"
    """The recorded experts that a rejected draft takes: those of the token at its place (``next``),
    of another place of its request, of any request, or of the token before the drafts. The further
    branches of a tree take those of other places."""
    verify_attention: Literal["batch", "rows"] | None = None
    """Whether attention of a verify step reads the context once for all tokens of a sequence
    (``batch``) or once for each (``rows``); ``rows`` for MLA, ``batch`` otherwise when not
    given."""
    draft_host_ms: float | None = Field(default=None, ge=0)
    """Host and launches of each draft pass, or of one look-up, ms; as derived from a published run
    when not given."""
    draft_host_ms_per_request: float = Field(default=0.0, ge=0)
    """Host of each request in a step with drafts, ms, where that does not overlap with the GPU."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        k, rates = self.depth, self.synthetic_acceptance_rates
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
        if self.lookup_hit_rate < 1 and self.method not in LOOKING_UP:
            problem = f"{self.lookup_hit_rate:g} for {self.method}"
            raise _error("lookup_hit_rate", problem, f"1, or {' or '.join(LOOKING_UP)}")
        num_speculative_tokens = self.num_speculative_tokens
        if not (
            k == num_speculative_tokens
            if self.eagle_topk == 1
            else k <= num_speculative_tokens <= self.eagle_topk * (1 + (k - 1) * self.eagle_topk)
        ):
            problem = (
                f"{k} passes of {self.eagle_topk} branches for {num_speculative_tokens} drafts"
            )
            raise _error("num_steps", problem, "as many as drafts, or a tree that holds them")
        by_batch = self.num_speculative_tokens_per_batch_size or ()
        if by_batch and self.eagle_topk > 1:
            name = "num_speculative_tokens_per_batch_size"
            raise _error(name, "of a tree", "drafts in a row (eagle_topk 1)")
        at = 1
        for first, last, drafts in by_batch:
            if first != at or last < first or not 0 <= drafts <= k:
                problem = f"{[first, last, drafts]} where sequences {at} and more are next"
                allowed = f"ranges one after the other from 1 on, of 0 to {k} drafts"
                raise _error("num_speculative_tokens_per_batch_size", problem, allowed)
            at = last + 1
        return self

    @property
    def depth(self) -> int:
        """Most drafts that a step accepts."""
        return self.num_speculative_tokens if self.num_steps is None else self.num_steps

    def drafts_of(self, batch: int) -> int:
        """Return the drafts of each of ``batch`` sequences."""
        found = self.num_speculative_tokens
        for first, _, drafts in self.num_speculative_tokens_per_batch_size or ():
            if batch >= first:
                found = drafts
        return found

    def cut(self, k: int) -> dict[str, Any] | None:
        """Return the fields of the first ``k`` drafts, with their acceptances; None for 0.

        Raises:
            InputError: For more drafts than these, or a negative number.
        """
        if not 0 <= k <= self.num_speculative_tokens:
            allowed = f"0 to the {self.num_speculative_tokens} of --speculative-config"
            raise InputError("drafts", str(k), allowed)
        if k in (0, self.num_speculative_tokens):
            own = {"num_speculative_tokens_per_batch_size": None}
            return self.model_dump() | own if k else None
        rates = self.synthetic_acceptance_rates
        if self.synthetic_acceptance_length is not None:
            rates = rates_of_length(self.synthetic_acceptance_length, self.depth)
        changed = {
            "num_speculative_tokens": k, "num_steps": None, "eagle_topk": 1,
            "num_speculative_tokens_per_batch_size": None, "synthetic_acceptance_length": None,
            "synthetic_acceptance_rates": None if rates is None else rates[:k],
        }  # fmt: skip
        return self.model_dump() | changed


def _error(field: str, problem: str, allowed: str) -> InputError:
    return InputError(f"speculative_config.{field}", problem, allowed)


def _parsed(value: Any) -> Any:
    if isinstance(value, str):
        value = parse_json(value, "speculative_config")
    if value is not None and not isinstance(value, dict | SpeculativeConfig):
        allowed = '{"method": "mtp", "num_speculative_tokens": 3}'
        raise InputError("speculative_config", f"{value!r}", allowed)
    return _spelled(value) if isinstance(value, dict) else value


def _spelled(given: dict[str, Any]) -> dict[str, Any]:
    """Return fields in vLLM's names where SGLang's options or TensorRT-LLM's fields stand."""
    fields = {name.replace("-", "_").removeprefix("speculative_"): v for name, v in given.items()}
    kind = "algorithm" if "algorithm" in fields else "decoding_type"
    if (word := fields.pop(kind, None)) is None:  # vLLM's names of a model's own layer, too
        return given | {"method": "mtp"} if str(given.get("method")).endswith("_mtp") else given
    model = next((fields.pop(n) for n in _MODELS if n in fields), None)
    method = _METHODS.get(str(word).lower())
    if kind == "algorithm" and str(word).lower() == "eagle":
        method = "mtp" if model is None else "eagle"  # the model's own layer where no head is named
    if method is None:
        raise InputError(f"speculative_config.{kind}", f"{word!r}", ", ".join(_METHODS))
    fields["method"] = method
    if model is not None:
        fields["model"] = model
    if kind == "algorithm":
        _count_drafts(fields)
    else:
        lengths = [
            fields.pop(n) for n in ("num_nextn_predict_layers", "max_draft_len") if n in fields
        ]
        fields["num_speculative_tokens"] = lengths[0] if lengths else 1
    return fields


def _count_drafts(fields: dict[str, Any]) -> None:
    """Turn SGLang's passes, branches and tokens of a verify step, the sampled one included, into
    drafts, in place; as SGLang does where none is given, or there are no branches
    (``_handle_eagle_family`` and ``_handle_ngram``, 0.5.23)."""
    steps, tokens = fields.get("num_steps"), fields.pop("num_draft_tokens", None)
    if fields["method"] == "ngram":
        fields.pop("num_steps", None)
        fields["num_speculative_tokens"] = (12 if tokens is None else tokens) - 1
        return
    if steps is None and tokens is None and "eagle_topk" not in fields:
        steps = fields["num_steps"] = 3
    chain = fields.get("eagle_topk", 1) == 1
    if steps is None or (tokens is None and not chain):
        missing = "num_steps" if steps is None else "num_draft_tokens"
        allowed = "num_steps, eagle_topk and num_draft_tokens together, or none of them"
        raise _error(missing, "missing", allowed)
    fields["num_speculative_tokens"] = steps if chain else tokens - 1


_MODELS = ("draft_model_path", "model_dir", "model")  #: other engines' names of a draft model


#: Of a run: the mapping, or its JSON text.
Speculative = Annotated[SpeculativeConfig | None, BeforeValidator(_parsed), Option(metavar="JSON")]
