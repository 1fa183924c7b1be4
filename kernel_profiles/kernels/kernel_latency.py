"""Times of attention, GEMM and collective kernels, interpolated from latency tables."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.moe_latency import interpolate, monotone_fit
from eldr_sim.kernel_profiles.kernels.spikes import say, spikes
from eldr_sim.kernel_profiles.tables.format import LatencyTable

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class GemmLatency:
    """Dense GEMMs ``[m, k] x [k, n]`` on one GPU.

    Linear between the grid's points in m, n and k: exact for kernels bound by bandwidth, whose
    time follows n * k, and for kernels bound by compute, whose time follows m * n * k. Matrices
    larger than the grid's scale with n and k; past the last m the last slope goes on.
    """

    #: ``m``, ``n``, ``k``: grid axes, ascending.
    m: FloatArray
    n: FloatArray
    k: FloatArray
    seconds: FloatArray  #: float64 [n, k, m]

    @classmethod
    def from_table(cls, table: LatencyTable) -> "GemmLatency":
        """Arrange a GEMM table's rows as a grid. Raises InputError: not a GEMM table, or (n, k)
        pairs that lack some m."""
        if table.metadata.kind != "gemm":
            raise InputError("table", f"kind {table.metadata.kind!r}", "gemm")
        axes = {name: np.unique(table.columns[name]) for name in "mnk"}
        grid = np.full([len(axes[name]) for name in "nkm"], np.nan)
        where = tuple(np.searchsorted(axes[name], table.columns[name]) for name in "nkm")
        grid[where] = table.columns["latency_s"]
        for j in range(1, len(axes["n"])):  # the largest matrices may be missing: scale with n
            gap = np.isnan(grid[j])
            grid[j][gap] = (grid[j - 1] * axes["n"][j] / axes["n"][j - 1])[gap]
        if np.isnan(grid).any():
            raise InputError("table", "the GEMM grid has holes", "all m for every (n, k)")
        m, n, k = (axes[name].astype(np.float64) for name in "mnk")
        return cls(m, n, k, monotone_fit(grid))

    def time_s(self, n: int, k: int, rows: ArrayLike) -> FloatArray:
        """Seconds for ``rows`` (m) rows through an n x k matrix."""
        i, u = _bracket(self.n, min(n, self.n[-1]))
        j, v = _bracket(self.k, min(k, self.k[-1]))
        beyond = max(n / self.n[-1], 1.0) * max(k / self.k[-1], 1.0)
        grid = self.seconds
        low = (1 - u) * grid[i, j] + u * grid[i + 1, j]
        high = (1 - u) * grid[i, j + 1] + u * grid[i + 1, j + 1]
        return interpolate(rows, self.m, beyond * ((1 - v) * low + v * high))


def _bracket(knots: FloatArray, x: float) -> tuple[int, float]:
    """Index of the interval that holds x, and x's place in it from 0 to 1."""
    index = int(np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2))
    return index, max(0.0, float((x - knots[index]) / (knots[index + 1] - knots[index])))


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """One layer's attention of a decode step."""

    #: ``batch``, ``context``: grid axes, ascending; context counts the tokens attended to.
    batch: FloatArray
    context: FloatArray
    seconds: FloatArray  #: float64 [batch, context], whole
    token_s: float  #: seconds to read one sequence's KV of one token at full bandwidth
    tokens_max: int  #: largest ``batch * context`` that was measured

    @classmethod
    def from_table(cls, table: LatencyTable) -> "DecodeAttention":
        """Arrange a table's rows as a grid and fill the corner that was not measured.

        Memory limits what can be measured to ``batch * context``. Where a batch's contexts end,
        time goes on with the slope per token read of the most tokens measured: the kernel is
        bound by bandwidth there.
        """
        if table.metadata.kind != "attention_decode":
            raise InputError("table", f"kind {table.metadata.kind!r}", "attention_decode")
        batch, context = (
            np.unique(table.columns[name]).astype(np.float64) for name in ("batch", "context")
        )
        if len(batch) < 2 or len(context) < 2:
            raise InputError("table", "too few rows", "2 batches and 2 contexts at least")
        grid = np.full((len(batch), len(context)), np.inf)
        rows = np.searchsorted(batch, table.columns["batch"])
        grid[rows, np.searchsorted(context, table.columns["context"])] = table.columns["latency_s"]
        for row in grid:  # a point that failed lies on the line between its neighbours
            found = np.flatnonzero(np.isfinite(row))
            inner = slice(0, found[-1] + 1)
            row[inner] = np.interp(context[inner], context[found], row[found])
        known = np.isfinite(grid)
        grid = monotone_fit(monotone_fit(grid, axis=1), axis=0)
        slopes = []
        for i in range(len(batch)):
            last = np.flatnonzero(known[i])[-2:]
            if len(last) == 2:
                step = (context[last[1]] - context[last[0]]) * batch[i]
                slopes.append((step, (grid[i, last[1]] - grid[i, last[0]]) / step))
        token_s = max(slopes)[1]
        for i in range(len(batch)):
            end = int(np.flatnonzero(known[i])[-1])
            grid[i, end + 1 :] = grid[i, end] + token_s * batch[i] * (
                context[end + 1 :] - context[end]
            )
        grid = np.maximum.accumulate(grid, axis=1)  # where rows end at odd contexts
        most = int((table.columns["batch"].astype(np.int64) * table.columns["context"]).max())
        return cls(batch, context, grid, token_s, most)

    def time_s(self, batch: FloatArray, context: FloatArray) -> FloatArray:
        """Seconds [len(batch), len(context)]; zero for an empty batch."""
        by_context = np.stack([interpolate(context, self.context, row) for row in self.seconds])
        columns = [interpolate(batch, self.batch, by_context[:, j]) for j in range(len(context))]
        return np.where(batch[:, None] > 0, np.stack(columns, axis=1), 0.0)


@dataclass(frozen=True, eq=False)
class PrefillAttention:
    """One layer's attention of a prefill step, as two curves over the length of a whole prompt."""

    floor_s: float  #: time of the smallest call
    alone_s: FloatArray  #: float64 [max_tokens + 1]: one prompt of that length alone
    #: float64 [max_tokens + 1]: what a prompt of that length adds to a call that is already large;
    #: non-decreasing, 0 at 0.
    share_s: FloatArray
    token_s: float  #: least time to read the KV of one cached token

    @classmethod
    def from_table(cls, table: LatencyTable, max_tokens: int, token_s: float) -> "PrefillAttention":
        """Build the curves from whole-prompt rows. The time of longer prompts grows with the pairs
        under the causal mask: with the square of the length, linearly where a window or a state
        limits them."""
        if table.metadata.kind != "attention_prefill":
            raise InputError("table", f"kind {table.metadata.kind!r}", "attention_prefill")
        batch, tokens = table.columns["batch"], table.columns["new_tokens"]
        latency = table.columns["latency_s"]
        floor = float(latency.min())
        lengths = np.unique(tokens)
        alone, share = [], []
        for length in lengths:
            at = tokens == length
            largest = np.argmax(np.where(at, batch, 0))
            alone.append(latency[at][np.argmin(batch[at])])
            share.append((latency[largest] - floor) / batch[largest])
        knots = np.concatenate([[0.0], lengths])
        shape = table.metadata.shape
        # MLA has none; of linear attention a token attends to the state alone, of compressed
        # attention to a choice of entries: beyond the rows time grows with the tokens.
        flat = "n_value_heads" in shape or "compression" in shape
        window = 1 if flat else shape.get("window", 0)
        curves = [np.concatenate([[floor], monotone_fit(alone)])]
        curves.append(np.concatenate([[0.0], monotone_fit(share)]))
        alone_s, share_s = (_extend(knots, curve, max_tokens, window) for curve in curves)
        return cls(floor, alone_s, share_s, token_s)


def causal_pairs(tokens: FloatArray, window: int = 0) -> FloatArray:
    """Pairs of a query and a key under the causal mask of a whole prompt; window 0 means none."""
    pairs = tokens * (tokens + 1) / 2
    if window:
        past = np.maximum(tokens - window, 0.0)
        pairs -= past * (past + 1) / 2
    return pairs


def _extend(knots: FloatArray, values: FloatArray, max_tokens: int, window: int) -> FloatArray:
    """Values at 0 .. max_tokens: linear between knots, beyond them in proportion to the pairs."""
    tokens = np.arange(max_tokens + 1.0)
    curve = np.interp(tokens, knots, values)
    past = tokens > knots[-1]
    curve[past] = values[-1] * (
        causal_pairs(tokens[past], window) / causal_pairs(knots[-1:], window)
    )
    return np.maximum.accumulate(curve)


@dataclass(frozen=True, eq=False)
class CollectiveLatency:
    """Collectives between the GPUs of one node."""

    #: By (operation, number of GPUs): message sizes in bytes, and seconds.
    curves: dict[tuple[str, int], tuple[FloatArray, FloatArray]]
    warnings: dict[tuple[str, int], list[str]]  #: of each curve: rows that are left out

    @classmethod
    def from_table(cls, table: LatencyTable) -> "CollectiveLatency":
        """Arrange a table's rows by operation and number of GPUs; `spikes` are left out."""
        if table.metadata.kind != "collective":
            raise InputError("table", f"kind {table.metadata.kind!r}", "collective")
        columns = table.columns
        curves, warnings = {}, {}
        keys = zip(columns["operation"].tolist(), columns["n_gpus"].tolist(), strict=True)
        for operation, n_gpus in sorted(set(keys)):
            rows = (columns["operation"] == operation) & (columns["n_gpus"] == n_gpus)
            order = np.argsort(columns["message_bytes"][rows])
            sizes = columns["message_bytes"][rows][order].astype(np.float64)
            seconds = columns["latency_s"][rows][order]
            what = f"{operation} between {n_gpus} {table.metadata.gpu}"
            warnings[operation, int(n_gpus)] = say(what, seconds, sizes, "bytes")
            kept = ~spikes(seconds)
            curves[operation, int(n_gpus)] = (sizes[kept], monotone_fit(seconds[kept]))
        return cls(curves, warnings)

    def time_s(self, operation: str, n_gpus: int, message_bytes: ArrayLike) -> FloatArray:
        """Seconds of one collective over ``message_bytes`` bytes. Raises InputError: the operation
        was not measured between so many GPUs."""
        if (operation, n_gpus) not in self.curves:
            known = ", ".join(f"{name} on {count}" for name, count in self.curves)
            raise InputError("collective", f"{operation!r} on {n_gpus} GPUs", known)
        return interpolate(message_bytes, *self.curves[operation, n_gpus])
