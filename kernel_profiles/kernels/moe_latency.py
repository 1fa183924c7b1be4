"""Time of one MoE layer over (batch, distinct experts), fitted to a latency table.

The larger of reading weights and computing::

    t(batch, distinct) = max(G(distinct) * (1 + C(batch) / G(E)), G(0) + batch * token_s)

G is the cost of reading the weights of ``distinct`` experts, plus the layer's fixed cost G(0). C is
what more tokens add when all E experts are read: they slow the reading in proportion, since kernels
switch to other tiles. ``token_s``, compute time per token, is the slope between the table's largest
batches; it matters where many tokens share few experts.

Most tables lie on the diagonal ``distinct = min(E, k * batch)``. Off it, on the public grid of an
RTX PRO 6000 (16 experts or more), the form errs by 2% up to 128 tokens, 7% at most (a plain sum G +
C by 5%, 22%); at 512 tokens on few experts it reads up to 24% low, as that grid ends before compute
dominates.

Under expert parallelism all tokens reach a rank's kernels, which sort them and choose tiles by
them, but only its E / R experts are read and about 1 / R of the pairs computed. Tables measured so
(``expert_parallel_size``) are fitted over the rank's own experts; else :meth:`MoELatency.on_rank`
reads the whole layer's function at the rank's count. A profile's full grid of forced routing needs
no form: :class:`MoEGrid` interpolates it; its skewed rows (``forced_zipf_*``) are not fitted."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Bools, Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.rounding import each
from eldr_sim.kernel_profiles.tables.format import LatencyTable

_DECODE_TOKENS = 128  # rows up to here make the linear fit; beyond, kernels change their tiling


def uniform_distinct(batch: ArrayLike, n_experts: int, top_k: float) -> Floats:
    """Expected distinct experts when every token picks ``top_k`` of ``n_experts`` uniformly. ``E *
    (1 - (1 - k / E) ** batch)``: every expert is missed by a token with chance 1 - k / E."""
    tokens = np.asarray(batch, dtype=np.float64)
    if not n_experts:
        return np.zeros_like(tokens)
    missed = tokens * math.log1p(-min(top_k / n_experts, 1 - 1e-12))
    return -n_experts * each(math.expm1, missed)


def monotone_fit(values: ArrayLike, axis: int = -1) -> Floats:
    """Non-decreasing sequence closest to ``values`` by least squares of their logarithms.

    Pool-adjacent-violators (Barlow et al. 1972): a run of timings that falls, by a disturbance or
    another kernel, gets its geometric mean. ``values``: any shape, 0 or more; zero or infinite
    entries stay; ``axis``: along which the sequences run."""
    fitted = np.moveaxis(np.array(values, dtype=np.float64), axis, -1)
    for at in np.ndindex(fitted.shape[:-1]):
        known = np.isfinite(fitted[at]) & (fitted[at] > 0)
        row = fitted[at][known]
        if (np.diff(row) < 0).any():
            # The C library's logarithms: unlike NumPy's they are the same on any processor.
            pooled = _pooled([math.log(value) for value in row.tolist()])
            fitted[at][known] = each(math.exp, pooled)
    return np.moveaxis(fitted, -1, axis)


def _pooled(row: list[float]) -> list[float]:
    """Pool adjacent violators of one sequence."""
    means: list[float] = []
    counts: list[int] = []
    for value in row:
        mean, count = value, 1
        while means and means[-1] >= mean:
            mean = (mean * count + means[-1] * counts[-1]) / (count + counts[-1])
            count += counts.pop()
            means.pop()
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts).tolist()


def mean_and_max(name: str, errors: ArrayLike) -> dict[str, float]:
    """Return relative errors as a table's ``fit_error`` has them; nothing where there are none."""
    values = np.asarray(errors, dtype=np.float64)
    if not len(values):
        return {}
    return {f"{name}_mean": float(values.mean()), f"{name}_max": float(values.max())}


def interpolate(x: ArrayLike, knots: Floats, values: Floats) -> Floats:
    """Piecewise linear through (knots, values); beyond the last knot its last slope goes on."""
    points = np.asarray(x, dtype=np.float64)
    inside = np.interp(points, knots, values)
    if len(knots) < 2:
        return inside
    slope = max(0.0, (values[-1] - values[-2]) / (knots[-1] - knots[-2]))
    return np.asarray(inside + slope * np.maximum(points - knots[-1], 0.0), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class MoELatency:
    """Seconds of one MoE layer, gate excluded."""

    #: Experts that the GPU holds, and how many of them a token picks in the mean.
    n_experts: int
    top_k: float
    expert_s: Floats  #: G: float64 [n_experts + 1], seconds by distinct experts; non-decreasing
    #: ``batch_knots``, ``batch_s``: C: piecewise linear; non-decreasing, C(0) = 0.
    batch_knots: Floats
    batch_s: Floats
    token_s: float  #: compute seconds per token
    #: Time by tokens under skewed routing, which fills tiles unevenly; empty without such rows.
    unbalanced_knots: Floats = field(default_factory=lambda: np.empty(0))
    unbalanced_s: Floats = field(default_factory=lambda: np.empty(0))
    fit_error: dict[str, float] = field(default_factory=dict)  #: relative errors by name of check
    #: ``least_expert_s``, ``least_pair_s``: no time is below reading the experts, or computing the
    #: token-expert pairs, at the GPU's peaks (`bounds.expert_s`).
    least_expert_s: float = 0.0
    least_pair_s: float = 0.0

    @property
    def batch_max(self) -> int:
        """Largest batch that was measured."""
        return int(self.batch_knots[-1])

    def time_s(self, batch: ArrayLike, distinct: ArrayLike) -> Floats:
        """Seconds at (batch, distinct experts), no less than the GPU's peaks allow; arrays
        broadcast, distinct may be fractional."""
        tokens, experts = (np.asarray(x, dtype=np.float64) for x in (batch, distinct))
        seconds = self._form_s(tokens, experts)
        np.maximum(seconds, self.least_expert_s * experts, out=seconds)
        return np.maximum(seconds, self.least_pair_s * self.top_k * tokens, out=seconds)

    def _form_s(self, batch: Floats, distinct: Floats) -> Floats:
        """Seconds by the form that was fitted, a new array."""
        experts = np.interp(distinct, np.arange(self.n_experts + 1.0), self.expert_s)
        slowed = 1 + interpolate(batch, self.batch_knots, self.batch_s) / self.expert_s[-1]
        seconds: Floats = np.asarray(experts * slowed)
        np.maximum(seconds, self.expert_s[0] + self.token_s * batch, out=seconds)
        return seconds

    def grid_s(self, max_batch: int) -> Floats:
        """Table [max_batch + 1, n_experts + 1] of seconds; row 0 and column 0 are zero."""
        batch = np.arange(max_batch + 1.0)[:, None]
        grid = self.time_s(batch, np.arange(self.n_experts + 1.0)[None, :])
        grid[0, :] = 0.0
        grid[:, 0] = 0.0
        return grid

    def mixed_grid_s(self, max_tokens: int) -> Floats:
        """Table [max_tokens + 1, n_experts + 1] of seconds for steps with prompts: as
        :meth:`prefill_s`, with the distinct experts given."""
        grid = self.grid_s(max_tokens)
        if len(self.unbalanced_knots):
            tokens = np.arange(max_tokens + 1.0)
            skewed = interpolate(tokens, self.unbalanced_knots, self.unbalanced_s)
            np.maximum(grid[1:, 1:], skewed[1:, None], out=grid[1:, 1:])
        return grid

    def on_rank(self, n_ranks: int) -> "MoELatency":
        """Return this layer as one of ``n_ranks`` expert-parallel GPUs computes it. Reading ``d``
        of the rank's experts at a batch takes as long as reading ``d`` of all of them; compute,
        balanced or not, shrinks to the rank's share of the token-expert pairs."""
        if n_ranks == 1:
            return self
        rank_experts = self.n_experts // n_ranks
        floor = self.expert_s[0]
        return replace(
            self,
            n_experts=rank_experts,
            top_k=self.top_k / n_ranks,
            expert_s=self.expert_s[: rank_experts + 1],
            batch_s=self.batch_s * (self.expert_s[rank_experts] / self.expert_s[-1]),
            token_s=self.token_s / n_ranks,
            unbalanced_s=floor + (self.unbalanced_s - floor) / n_ranks,
        )

    def rank_grid_s(self, tokens: Floats, slots: int, prompts: bool) -> Floats:
        """Table [tokens, slots + 1] of seconds of a rank, by its number of expert slots.

        ``tokens``: that this layer's GPU computes, at ``top_k`` experts each; ``slots``: beyond
        those that were measured the last expert's cost goes on; ``prompts``: whether steps hold
        prompts: then skewed routing must be computed."""
        counts = np.arange(slots + 1.0)
        grid = self.time_s(tokens[:, None], np.minimum(counts, self.n_experts)[None, :])
        beyond = np.maximum(counts - self.n_experts, 0.0)
        if beyond.any():
            ends = np.array([[self.n_experts - 1.0, self.n_experts]])
            grid += beyond * np.diff(self.time_s(tokens[:, None], ends), axis=1)
        if prompts and len(self.unbalanced_knots):
            skewed = interpolate(tokens, self.unbalanced_knots, self.unbalanced_s)
            grid = np.where(tokens[:, None] > 0, np.maximum(grid, skewed[:, None]), grid)
        # More experts never take less; more tokens may, where the kernel changes its tile.
        return np.ascontiguousarray(np.maximum.accumulate(grid, 1))

    def prefill_s(self, tokens: ArrayLike) -> Floats:
        """Seconds of one layer over a prefill of ``tokens``: the larger of reading the experts
        expected of uniform routing, and computing skewed routing."""
        counts = np.asarray(tokens, dtype=np.float64)
        distinct = uniform_distinct(counts, self.n_experts, self.top_k)
        balanced = self.time_s(counts, distinct)
        if not len(self.unbalanced_knots):
            return balanced
        return np.maximum(balanced, interpolate(counts, self.unbalanced_knots, self.unbalanced_s))


class NoExperts(MoELatency):
    """The layer that a dense model has not: it takes no time."""

    def __init__(self) -> None:
        none = np.zeros(1)
        super().__init__(0, 0.0, none, np.array([2.0**31]), none, 0.0)

    def time_s(self, batch: ArrayLike, distinct: ArrayLike) -> Floats:
        """Return zeros."""
        return np.zeros(np.broadcast_shapes(np.shape(batch), np.shape(distinct)))


@dataclass(frozen=True, eq=False)
class MoEGrid(MoELatency):
    """One MoE layer through the points of a full grid, linear in between."""

    #: Batches of the grid, ascending.
    knots: Floats = field(default_factory=lambda: np.empty(0))
    #: float64 [knots, n_experts + 1]: seconds by distinct experts; beyond reach the last slope.
    grid_knots_s: Floats = field(default_factory=lambda: np.empty((0, 0)))

    def _form_s(self, batch: Floats, distinct: Floats) -> Floats:
        """Seconds through the grid; past the last batch its last slope goes on."""
        tokens, experts = np.broadcast_arrays(batch, distinct)
        column = np.clip(experts.astype(np.intp), 0, self.n_experts - 1)
        part = np.clip(experts - column, 0.0, 1.0)
        row = np.clip(np.searchsorted(self.knots, tokens, side="right") - 1, 0, None)
        row = np.minimum(row, max(len(self.knots) - 2, 0))
        above = np.minimum(row + 1, len(self.knots) - 1)
        low, high = (
            (1 - part) * self.grid_knots_s[i, column] + part * self.grid_knots_s[i, column + 1]
            for i in (row, above)
        )
        width = np.maximum(self.knots[above] - self.knots[row], 1.0)
        share = np.maximum((tokens - self.knots[row]) / width, 0.0)
        inside = (1 - share) * low + share * high
        beyond = high + np.maximum(high - low, 0.0) * (share - 1)
        return np.asarray(np.where(share > 1, beyond, inside), dtype=np.float64)

    def on_rank(self, n_ranks: int) -> MoELatency:
        """Return one of ``n_ranks`` GPUs' layer: with 1 / n_ranks of the pairs, a batch costs what
        one ``n_ranks`` times smaller costs with all experts."""
        if n_ranks == 1:
            return self
        form = super().on_rank(n_ranks)
        assert isinstance(form, MoEGrid)
        return replace(
            form,
            batch_knots=self.batch_knots * n_ranks,
            knots=self.knots * n_ranks,
            grid_knots_s=self.grid_knots_s[:, : self.n_experts // n_ranks + 1],
        )


def fit_grid(
    batch: Floats, distinct: Floats, latency: Floats, n_experts: int, top_k: float
) -> MoEGrid:
    """Arrange exact rows as a grid, beside the form fitted to them."""
    knots = np.unique(batch)
    counts = np.arange(n_experts + 1.0)
    rows, slopes = [], []
    for tokens in knots:
        at = np.flatnonzero(batch == tokens)
        at = at[np.argsort(distinct[at])]
        levels, values = distinct[at], monotone_fit(latency[at])
        slopes.append(np.diff(values) / np.diff(levels))
        rows.append((levels, values))
    known = [i for i, slope in enumerate(slopes) if len(slope)]
    grid = np.empty((len(knots), n_experts + 1))
    for i, (levels, values) in enumerate(rows):
        # A batch that was measured at one count takes the slopes of the nearest batch with more.
        near = min(known, key=lambda j: abs(j - i)) if known else None
        first, last = (0.0, 0.0) if near is None else (slopes[near][0], slopes[near][-1])
        grid[i] = np.interp(counts, levels, values)
        grid[i] -= first * np.maximum(levels[0] - counts, 0.0)
        grid[i] += last * np.maximum(counts - levels[-1], 0.0)
    form = fit_max_form(batch, distinct, latency, n_experts, top_k)
    fields = {name: getattr(form, name) for name in MoELatency.__dataclass_fields__}
    fields["batch_knots"] = np.unique(np.concatenate([[0.0], knots]))
    fields["batch_s"] = interpolate(fields["batch_knots"], form.batch_knots, form.batch_s)
    floor = latency.min() * 1e-3
    return MoEGrid(**fields, knots=knots, grid_knots_s=np.maximum(grid, floor))


def fit_moe_latency(table: LatencyTable) -> MoELatency:
    """Fit the form of this module to a table. Raises InputError: not a MoE table, or too few rows.

    Exact rows (``balanced`` routing) are followed point by point; so is a profile's grid of forced
    routing (:class:`MoEGrid`), with the profile's errors on held-out rows. Expectations only
    get ``a + b * distinct + c * batch`` up to 128 tokens, and their own excess over it beyond."""
    if table.metadata.kind != "moe":
        raise InputError("table", f"kind {table.metadata.kind!r}", "moe")
    shape = table.metadata.shape
    ranks = shape.get("expert_parallel_size", 1)
    n_experts, top_k = shape["n_experts"] // ranks, shape["top_k"] / ranks
    batch = table.columns["batch"].astype(np.float64)
    distinct = table.columns["distinct_experts"].astype(np.float64)
    latency = table.columns["latency_s"].astype(np.float64)
    routing = table.columns["routing"]
    skewed = np.array([str(r).startswith("power_law") for r in routing])
    if len(batch) < 4:
        raise InputError("table", f"{len(batch)} rows", "at least 4 to fit a MoE layer")
    forced = np.array([str(r) == "forced" for r in routing])
    inexact = ("power_law", "forced_zipf")
    exact = np.array([not str(r).startswith(inexact) for r in routing])
    fitted: MoELatency
    if forced.any():
        grid = fit_grid(batch[exact], distinct[exact], latency[exact], n_experts, top_k)
        return replace(grid, fit_error=dict(table.metadata.fit_error))
    if exact.any():
        fitted = _follow(batch[exact], distinct[exact], latency[exact], n_experts, top_k)
    else:
        fitted = _linear(batch, distinct, latency, n_experts, top_k)
    knots, values = np.empty(0), np.empty(0)
    if skewed.any():
        knots, values = _mildest_skew(table, batch, latency)
    errors = dict(fitted.fit_error)
    decode = skewed & (batch <= _DECODE_TOKENS)
    if exact.any() and decode.any():
        off = np.abs(fitted.time_s(batch[decode], distinct[decode]) / latency[decode] - 1)
        errors |= mean_and_max("power_law", off)
    return replace(fitted, unbalanced_knots=knots, unbalanced_s=values, fit_error=errors)


def _mildest_skew(table: LatencyTable, batch: Floats, latency: Floats) -> tuple[Floats, Floats]:
    routing = table.columns["routing"]
    mildest = min({str(r) for r in routing if str(r).startswith("power_law")})
    rows = np.flatnonzero(routing == mildest)
    rows = rows[np.argsort(batch[rows])]
    return batch[rows], monotone_fit(latency[rows])


def _follow(
    batch: Floats, distinct: Floats, latency: Floats, n_experts: int, top_k: float
) -> MoELatency:
    """The form through exact rows, with leave-one-out errors over the distinct counts."""
    model = fit_max_form(batch, distinct, latency, n_experts, top_k)
    errors = mean_and_max("rows", np.abs(model.time_s(batch, distinct) / latency - 1))
    levels = np.unique(distinct)
    left_out = []
    for level in levels[1:-1]:
        keep = distinct != level
        without = fit_max_form(batch[keep], distinct[keep], latency[keep], n_experts, top_k)
        gone = ~keep
        left_out += list(np.abs(without.time_s(batch[gone], distinct[gone]) / latency[gone] - 1))
    return replace(model, fit_error=errors | mean_and_max("leave_one_out", left_out))


def fit_max_form(
    batch: Floats, distinct: Floats, latency: Floats, n_experts: int, top_k: float
) -> MoELatency:
    """Split exact rows into G and C: C from the rows with the most distinct experts, which on the
    balanced diagonal are the batches past E / k.

    Below the first of them C is a straight line to C(0) = 0, with the slope from there to four
    times that batch. G is what remains, averaged where a count was measured at several batches."""
    top = distinct == distinct.max()
    order = np.argsort(batch[top])
    knots, flat = np.unique(batch[top][order]), monotone_fit(latency[top][order])
    if len(knots) != len(flat):
        raise InputError("table", "several exact rows at one (batch, distinct experts) point")
    start = knots[0]
    span = np.interp(4 * start, knots, flat) - flat[0]
    slope = span / (min(4 * start, knots[-1]) - start) if len(knots) > 1 else 0.0
    c_knots = np.concatenate([[0.0], knots])
    c_values = np.concatenate([[0.0], slope * start + flat - flat[0]])
    whole = flat[0] - slope * start  # G(E)
    rest = latency / (1 + interpolate(batch, c_knots, c_values) / whole)
    rest[top] = whole
    levels = np.unique(distinct)
    g_values = monotone_fit([rest[distinct == level].mean() for level in levels])
    counts = np.arange(n_experts + 1.0)
    g = interpolate(counts, levels, g_values)
    if len(levels) > 1:  # below the smallest measured count its first slope goes on, never below 0
        first = (g_values[1] - g_values[0]) / (levels[1] - levels[0])
        below = counts < levels[0]
        g[below] = np.maximum(g_values[0] - first * (levels[0] - counts[below]), 0.0)
    return MoELatency(n_experts, top_k, g, c_knots, c_values, _compute_slope(knots, flat, g[0]))


def _compute_slope(batch: Floats, latency: Floats, floor: float) -> float:
    """Seconds per token between the two largest batches; no row lies below floor + slope."""
    sizes = np.unique(batch)[-2:]
    if len(sizes) < 2:
        return 0.0
    low, high = (latency[batch == size].min() for size in sizes)
    bound = np.min((latency - floor) / batch)
    return float(np.clip((high - low) / (sizes[1] - sizes[0]), 0.0, max(bound, 0.0)))


def _linear(
    batch: Floats, distinct: Floats, latency: Floats, n_experts: int, top_k: float
) -> MoELatency:
    """Least squares of relative errors on a + b * distinct + c * batch, all coefficients >= 0."""
    from scipy.optimize import nnls  # takes long to import

    decode = batch <= _DECODE_TOKENS

    def solve(rows: Bools) -> MoELatency:
        design = np.stack([np.ones(rows.sum()), distinct[rows], batch[rows]], axis=1)
        (a, b, c), _ = nnls(design / latency[rows][:, None], np.ones(int(rows.sum())))
        g = a + b * np.arange(n_experts + 1.0)
        knots = np.array([0.0, float(_DECODE_TOKENS)])
        return MoELatency(n_experts, top_k, g, knots, c * knots, _compute_slope(batch, latency, a))

    model = solve(decode)
    residual = np.abs(model.time_s(batch, distinct) / latency - 1)[decode]
    left_out = []
    for tokens in np.unique(batch[decode]):
        gone = decode & (batch == tokens)
        without = solve(decode & ~gone)
        left_out += list(np.abs(without.time_s(batch[gone], distinct[gone]) / latency[gone] - 1))
    weights = np.interp(distinct, np.arange(n_experts + 1.0), model.expert_s)
    excess = (latency / weights - 1) * model.expert_s[-1]
    large = np.unique(batch[~decode])
    beyond = [max(excess[batch == tokens].min(), model.batch_s[-1]) for tokens in large]
    return replace(
        model,
        batch_knots=np.concatenate([model.batch_knots, large]),
        batch_s=np.maximum.accumulate(monotone_fit(np.concatenate([model.batch_s, beyond]))),
        fit_error=mean_and_max("rows", residual) | mean_and_max("leave_one_out", left_out),
    )
