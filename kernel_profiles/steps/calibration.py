"""Factors that make step times those of a user's own runs (``eldr-sim calibrate``).

A calibration holds four constants: a factor of kernels in small steps, which decode, one of kernels
in large steps, which compute prompts, host time in each step beside the profile's, and a factor of
the API servers' time. A step's GEMMs, experts and collectives read weights as long as it has few
tokens, whoever they belong to: the first factor holds up to `_SMALL` tokens, the second from
`_LARGE` on, and between them their logarithms are interpolated over that of the tokens."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.arrays import Floats
from eldr_sim.errors import InputError
from eldr_sim.inputs import parse_yaml, read_text
from eldr_sim.kernel_profiles.steps.cost_tables import StepCost
from eldr_sim.kernel_profiles.tables.format import provenance_of

#: Tokens of a step from which on kernels compute longer than they read weights, on GPUs of 2020 to
#: 2026: peak FLOP/s over bytes/s is 150 to 600.
_SMALL, _LARGE = 256, 2048


class Measured(BaseModel):
    """What a calibration's runs were of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    gpu: str
    engine: str


class Calibration(BaseModel):
    """Constants that were fitted to a user's runs, as a file of ``eldr-sim calibrate`` has them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    #: Factors of the time of kernels in steps of few tokens, and of many.
    decode_kernels: float = Field(default=1.0, gt=0, le=100)
    prefill_kernels: float = Field(default=1.0, gt=0, le=100)
    #: Host time of a step in addition to the profile's, ms; less where negative.
    host_gap_ms: float = Field(default=0.0, ge=-1000, le=1000)
    #: Factor of the API servers' time.
    front_end: float = Field(default=1.0, gt=0, le=1000)
    of: Measured | None = None  #: None: of all engines
    made: str = ""  #: from which runs, by which version, when

    def fits(self, model: str, gpu: str) -> bool:
        """Whether it is of a model on a GPU; the host's share of it is of all."""
        return self.of is None or (self.of.model, self.of.gpu) == (model, gpu)

    def at(self, tokens: ArrayLike) -> Floats:
        """Return the factor of kernels in steps, by their tokens; shape as ``tokens``."""
        logs = np.log([self.decode_kernels, self.prefill_kernels])
        return np.exp(np.interp(np.log(np.maximum(tokens, 1.0)), np.log([_SMALL, _LARGE]), logs))

    def applied(self, cost: StepCost) -> StepCost:
        """Return a worker's step times with the factors; the host's time is left to the caller."""
        if self.decode_kernels == self.prefill_kernels == 1.0:
            return cost
        small, large = self.decode_kernels, self.prefill_kernels

        def by_tokens(table: Floats) -> Floats:
            factors = self.at(np.arange(len(table)))
            return table * (factors if table.ndim == 1 else factors[:, None])

        return cost._replace(
            moe_s=by_tokens(cost.moe_s),
            mixed_moe_s=by_tokens(cost.mixed_moe_s),
            uniform_moe_s=by_tokens(cost.uniform_moe_s),
            dense_s=by_tokens(cost.dense_s),
            collectives_s=by_tokens(cost.collectives_s),
            head_s=small * cost.head_s,
            attention_s=small * cost.attention_s,
            prompt_alone_s=large * cost.prompt_alone_s,
            prompt_share_s=large * cost.prompt_share_s,
            prompt_floor_s=large * cost.prompt_floor_s,
            prompt_token_s=large * cost.prompt_token_s,
        )

    def provenance(self) -> dict[str, Any]:
        """Return what results say of it."""
        return provenance_of("fitted", self.made or "a calibration file")


def load_calibration(path: str | None) -> Calibration | None:
    """Read a calibration's file; None without one. Raises InputError if it is none."""
    if path is None:
        return None
    text = read_text(path, "calibration")
    return _parsed(text, path)


@lru_cache(maxsize=64)
def _parsed(text: str, path: str) -> Calibration:
    found = parse_yaml(text, "calibration", path)
    try:
        return Calibration.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{path}: {where or 'it'}: {first['msg'].lower()}"
        raise InputError("calibration", problem, "a file of eldr-sim calibrate") from None
