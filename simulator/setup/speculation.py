"""What a worker's engines draft, how many drafts they accept, and what results say of it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles import acceptance
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.drafts import Draft, build_draft
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.plane.steps.verify import Drafts, no_drafts
from eldr_sim.simulator.setup.config.speculative import LOOKING_UP, SpeculativeConfig
from eldr_sim.traces.streams import stream

#: What a rejected draft's experts are, in the order of `simulator.plane.steps.verify`.
REJECTED = {
    "next": "those of the recorded token at its place",
    "place": "those of a token at another place of the request",
    "request": "those of any recorded token",
    "none": "those of the token before the drafts",
}


@dataclass(frozen=True, eq=False)
class Speculation:
    """The drafts of a pool's engines."""

    #: ``config``, ``acceptances``, ``draft``: what was asked for, how many drafts are accepted by
    #: the trace's domain (or one for all, named ""), and what drafts.
    config: SpeculativeConfig
    acceptances: dict[str, acceptance.Acceptance]
    draft: Draft
    by_row: bool  #: whether attention reads a sequence's context once for each of its tokens
    key: int  #: of the acceptances' random stream

    @property
    def k(self) -> int:
        """Most drafts of a sequence."""
        return self.config.num_speculative_tokens

    @property
    def lookahead(self) -> int:
        """KV slots beyond a step's tokens: vLLM's for drafts that are computed."""
        return 0 if self.config.method in LOOKING_UP else self.k

    @property
    def placeholders(self) -> int:
        """Drafts that vLLM pads a new sequence with (``pad_spec_decode``): none where their number
        goes by the batch."""
        return 0 if self.config.num_speculative_tokens_per_batch_size else self.k

    @property
    def has_head(self) -> bool:
        """Whether an EAGLE or MTP head drafts, which reads the hidden states of the model."""
        return self.config.method not in (*LOOKING_UP, "draft_model")

    @property
    def tokens_per_plain_step(self) -> float:
        """Estimate the tokens of a plain step's time, by a verify step of 1.5 of them, the middle
        of recorded routing (docs/speculative.md); searches start there."""
        lengths = [each.length for each in self.acceptances.values()]
        return sum(lengths) / len(lengths) / 1.5

    def drafts(self, max_num_seqs: int, cost: StepCost) -> Drafts:
        """Return what compiled code needs; ``cost`` stands where no pass computes."""
        steps, config = self.draft.step_time, self.config
        beyond = (0.0,) * (self.k - config.depth)  # branches of a tree
        return no_drafts(cost if steps is None else steps.cost)._replace(
            k_of=np.array([self.config.drafts_of(n) for n in range(max_num_seqs + 1)], np.int64),
            rates=np.array([each.rates + beyond for each in self.acceptances.values()]),
            counts=np.zeros(self.k + 2, np.int64),
            key=np.array([self.key], np.uint64),
            found=config.lookup_hit_rate,
            reads_by_row=self.by_row,
            lookup_s=self.draft.host_s if steps is None else -1.0,
            request_s=config.draft_host_ms_per_request / 1e3,
            depth=config.depth,
            width=config.eagle_topk,
            rejected=list(REJECTED).index(config.rejected_experts),
            in_a_row=config.rejected_experts == "next" and config.depth == self.k,
        )

    def describe(self) -> dict[str, Any]:
        """Return what results say of the choices."""
        rates = {name: list(each.rates) for name, each in self.acceptances.items()}
        sources = (
            f"{name}: {a.source}" if name else a.source for name, a in self.acceptances.items()
        )
        return {
            "method": self.config.method,
            "num_speculative_tokens": self.k,
            "acceptance_rates": rates.get("", rates),
            "acceptance_source": "; ".join(sources),
            "verify_attention": "rows" if self.by_row else "batch",
            "rejected_drafts_experts": REJECTED[self.config.rejected_experts],
            "draft_host_ms": 1e3 * self.draft.host_s,
            "draft_host_ms_per_request": self.config.draft_host_ms_per_request,
        } | (
            {"lookup_hit_rate": self.config.lookup_hit_rate}
            if self.config.method in LOOKING_UP
            else {}
        )


def acceptance_of(
    given: SpeculativeConfig, model: str, named: str | float | None = None
) -> acceptance.Acceptance:
    """Return the acceptance of as many drafts as can be; raises InputError."""
    n = given.depth
    if named is None and given.synthetic_acceptance_rates is not None:
        return acceptance.Acceptance(given.synthetic_acceptance_rates, "given")
    if named is None and given.synthetic_acceptance_length is not None:
        length = given.synthetic_acceptance_length
        return acceptance.Acceptance(
            acceptance.spent(length, n), "given as a length, the first drafts always accepted"
        )
    if named is None and not isinstance(given.acceptance, dict):
        named = given.acceptance
    if isinstance(named, int | float):
        if not 1 <= named <= n + 1:
            raise InputError("speculative_config.acceptance", f"{named:g}", f"1 to {n + 1}")
        return acceptance.Acceptance(acceptance.rates_of_length(named, n), "given as a length")
    if named is not None and named not in acceptance.list_acceptances() and os.path.exists(named):
        return acceptance.read(named, n)
    return acceptance.shipped(named, model, given.method, n)


def _acceptances(
    given: SpeculativeConfig, model: str, domains: Callable[[], Sequence[str]]
) -> dict[str, acceptance.Acceptance]:
    """Return the acceptance of each of the requests' domains, or one named "" for all."""
    if not isinstance(given.acceptance, dict):
        return {"": acceptance_of(given, model)}
    names, field = domains(), "speculative_config.acceptance"
    if wrong := set(given.acceptance) - {*names, "other"}:
        problem = f"no domain {', '.join(sorted(wrong))}"
        raise InputError(field, problem, f"{', '.join(names)}, other")
    found = {name: given.acceptance.get(name, given.acceptance.get("other")) for name in names}
    if left := [name for name, named in found.items() if named is None]:
        raise InputError(field, f"no value for {', '.join(left)}", "a value for it, or for other")
    return {name: acceptance_of(given, model, named) for name, named in found.items()}


def speculation_of(
    given: SpeculativeConfig | None,
    named: str | None,
    seed: int,
    model: ModelDims,
    parallelism: Parallelism,
    build: Callable[..., StepTimeModel],
    domains: Callable[[], Sequence[str]],
) -> Speculation | None:
    """Return what the engines of a worker draft, None for nothing; ``named``: a published
    acceptance or a file, which overrides ``given``; ``build``: of `build_draft`.
    Raises InputError if the acceptance is unknown, or the model cannot be drafted for so."""
    if given is None or given.num_speculative_tokens == 0:
        return None
    acceptances = (
        _acceptances(given, model.name, domains)
        if named is None
        else {"": acceptance_of(given, model.name, named)}
    )
    draft = build_draft(
        given.method,
        model,
        parallelism,
        build,
        model=given.model,
        host_s=None if given.draft_host_ms is None else given.draft_host_ms / 1e3,
    )
    by_row = model.attention == "mla"
    if given.verify_attention is not None:
        by_row = given.verify_attention == "rows"
    key = int(stream(seed, "acceptance").integers(2**63))
    return Speculation(given, acceptances, draft, by_row, key)
