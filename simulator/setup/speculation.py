"""What a worker's engines draft, how many drafts they accept, and what results say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.acceptance import Acceptance, rates_of_length, shipped
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Parallelism
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.steps.drafts import Draft, build_draft
from eldr_sim.kernel_profiles.steps.step_time import StepTimeModel
from eldr_sim.simulator.plane.steps.verify import Drafts, no_drafts
from eldr_sim.simulator.setup.config import RunConfig
from eldr_sim.simulator.setup.speculative_config import LOOKING_UP, SpeculativeConfig
from eldr_sim.traces.streams import stream

#: What a rejected draft's experts are, see `simulator.plane.steps.verify`.
REJECTED = "those of the recorded token at its place"


@dataclass(frozen=True, eq=False)
class Speculation:
    """The drafts of a pool's engines."""

    #: ``config``, ``acceptance``, ``draft``: what was asked for, how many drafts are accepted, and
    #: what drafts.
    config: SpeculativeConfig
    acceptance: Acceptance
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

    def drafts(self, max_num_seqs: int, cost: StepCost) -> Drafts:
        """Return what compiled code needs; ``cost`` stands where no pass computes."""
        steps = self.draft.step_time
        return no_drafts(cost if steps is None else steps.cost)._replace(
            k_of=np.array([self.config.drafts_of(n) for n in range(max_num_seqs + 1)], np.int64),
            rates=np.array(self.acceptance.rates),
            counts=np.zeros(self.k + 2, np.int64),
            key=np.array([self.key], np.uint64),
            reads_by_row=self.by_row,
            lookup_s=self.draft.host_s if steps is None else -1.0,
        )

    def describe(self) -> dict[str, Any]:
        """Return what results say of the choices."""
        return {
            "method": self.config.method,
            "num_speculative_tokens": self.k,
            "acceptance_rates": list(self.acceptance.rates),
            "acceptance_source": self.acceptance.source,
            "verify_attention": "rows" if self.by_row else "batch",
            "rejected_drafts_experts": REJECTED,
            "draft_host_ms": 1e3 * self.draft.host_s,
        }


def acceptance_of(given: SpeculativeConfig, model: str, k: int) -> Acceptance:
    """Return the acceptance of ``k`` drafts; raises InputError where nobody knows it."""
    if given.synthetic_acceptance_rates is not None:
        return Acceptance(given.synthetic_acceptance_rates, "given")
    if given.synthetic_acceptance_length is not None:
        rates = rates_of_length(given.synthetic_acceptance_length, k)
        return Acceptance(rates, "given as a length")
    return shipped(given.acceptance, model, given.method, k)


def speculation_of(
    config: RunConfig,
    model: ModelDims,
    parallelism: Parallelism,
    build: Callable[..., StepTimeModel],
) -> Speculation | None:
    """Return what the engines of a worker draft; None where they draft nothing.

    ``build`` is as of `build_draft`.

    Raises InputError if nobody knows how many drafts are accepted, or the model cannot be drafted
    for so.
    """
    given = config.speculative_config
    if given is None or given.num_speculative_tokens == 0:
        return None
    acceptance = acceptance_of(given, model.name, given.num_speculative_tokens)
    if not config.generates:
        problem = "requests end with their prompts: there is nothing to draft"
        raise InputError("speculative_config", problem, "not given")
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
    key = int(stream(config.seed, "acceptance").integers(2**63))
    return Speculation(given, acceptance, draft, by_row, key)
