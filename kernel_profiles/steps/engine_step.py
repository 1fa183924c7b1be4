"""What an engine step costs besides its MoE layers and attention, from rows of a whole engine.

A table of kind ``engine_step`` holds everything else of a step as the engine runs it: scheduling,
embedding, norms, dense GEMMs, lm_head, sampling, output. Its time is taken to be additive::

    t(tokens, sequences) = f(tokens) + g(sequences)

with f and g non-decreasing and piecewise linear. Rows of decode steps have as many tokens as
sequences, so they alone do not tell f from g: f bends at the tokens of rows that hold prompts, g
at the sequences of all rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.moe_latency import interpolate, mean_and_max
from eldr_sim.kernel_profiles.tables.format import LatencyTable

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EngineStepLatency:
    """Engine steps without MoE layers and attention."""

    #: ``tokens``, ``tokens_s``: f: knots, ascending from 0, and seconds; what a step costs at all
    #: is f(0).
    tokens: FloatArray
    tokens_s: FloatArray
    #: ``sequences``, ``sequences_s``: g: knots, ascending from 0, and seconds; g(0) = 0.
    sequences: FloatArray
    sequences_s: FloatArray
    #: Relative errors on the table's rows: ``rows_mean`` and ``rows_max``.
    fit_error: dict[str, float]

    @classmethod
    def from_table(cls, table: LatencyTable) -> "EngineStepLatency":
        """Fit f and g by least squares of the rows' relative errors, weighted by their repeats.
        Raises InputError: another kind of table, or one that does not tell f from g."""
        from scipy.optimize import nnls  # takes long to import

        if table.metadata.kind != "engine_step":
            raise InputError("table", f"kind {table.metadata.kind!r}", "engine_step")
        columns = table.columns
        tokens = columns["tokens"].astype(np.float64)
        sequences = columns["sequences"].astype(np.float64)
        latency = columns["latency_s"].astype(np.float64)
        prompts = tokens > sequences
        if len(np.unique(tokens[prompts])) < 2 or len(np.unique(sequences)) < 2:
            problem = "these rows do not tell what a token costs from what a sequence costs"
            allowed = "rows of 2 sizes of prompts and of 2 numbers of sequences"
            raise InputError("table", problem, allowed)
        # No knot of f below the smallest prompt: there only decode rows could hold it.
        f_knots = np.concatenate([[0.0], np.unique(tokens[prompts])[1:]])
        g_knots = np.concatenate([[0.0], np.unique(sequences)])
        design = np.hstack([np.ones((len(tokens), 1)), _rises(tokens, f_knots)])
        design = np.hstack([design, _rises(sequences, g_knots)])
        weight = np.sqrt(columns.get("repeats", np.ones(len(tokens))))
        found, _ = nnls(design * (weight / latency)[:, None], weight)
        found = np.round(found, 14)  # what LAPACK returns differs between processors
        f_s = np.cumsum(found[: len(f_knots)])
        g_s = np.concatenate([[0.0], np.cumsum(found[len(f_knots) :])])
        errors = mean_and_max("rows", np.abs(design @ found / latency - 1))
        return cls(f_knots, f_s, g_knots, g_s, errors)

    def token_part_s(self, tokens: ArrayLike) -> FloatArray:
        """Seconds f of a step of so many tokens."""
        return interpolate(tokens, self.tokens, self.tokens_s)

    def sequence_part_s(self, sequences: ArrayLike) -> FloatArray:
        """Seconds g that so many sequences add."""
        return interpolate(sequences, self.sequences, self.sequences_s)


def _rises(x: FloatArray, knots: FloatArray) -> FloatArray:
    """Return how much of each interval between knots lies below x; the last one has no end."""
    share = (x[:, None] - knots[:-1]) / np.diff(knots)
    share[:, :-1] = np.minimum(share[:, :-1], 1.0)
    return np.maximum(share, 0.0)
