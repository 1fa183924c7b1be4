"""Times of attention, GEMM and collective kernels and of an engine's other work, from tables.

A kernel's time may step up where its input grows, when another protocol or tile takes over, and the
next rows stay up. A row that takes half as long again as *both* of its neighbours is a disturbance
of the measurement (of DeepEP's dispatch between 4 GB200 the imported rows say 445, 17,858 and 550
us at 256, 512 and 1,024 tokens): it is left out of the curve, and named."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from eldr_sim.arrays import Bools, Floats
from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.kernels.bounds import UNBOUNDED, AttentionBound, causal_pairs
from eldr_sim.kernel_profiles.kernels.moe_latency import interpolate, mean_and_max, monotone_fit
from eldr_sim.kernel_profiles.tables.format import LatencyTable

SPIKE = 1.5  #: a spike takes this many times as long as the slower of its two neighbours
#: Rows that stay, and are named where results rest on their curve: of all shipped collectives of
#: 1 MiB and more, those that take `SPIKE` times as long as on a GPU of slower links: the GPU, the
#: operation and its GPUs; bytes, us, that other GPU, and its us. `behind_siblings` finds them.
BEHIND = {
    ("B200", "all_gather", 8): (2**24, 103.9, "H200", 66.9),
    ("B300", "all_gather", 8): (2**24, 100.4, "H200", 66.9),
}


def spikes(seconds: ArrayLike) -> Bools:
    """Return which rows of a curve are spikes. ``seconds``: shape [rows], by growing input. The
    smallest and the largest input have one neighbour each, and are never judged."""
    times = np.asarray(seconds, np.float64)
    found = np.zeros(len(times), np.bool_)
    found[1:-1] = times[1:-1] > SPIKE * np.maximum(times[:-2], times[2:])
    return found


def behind_siblings(sizes: Floats, seconds: Floats, slower: tuple[Floats, Floats]) -> Bools:
    """Return which rows take `SPIKE` times as long as a sibling of slower links, from 1 MiB on.
    ``sizes``, ``seconds``: shape [rows]: bytes and times; ``slower``: the same of the sibling."""
    theirs = np.interp(sizes, slower[0], slower[1])
    return np.asarray((sizes >= 2**20) & (seconds > SPIKE * theirs))


def say_behind(gpu: str, operation: str, n_gpus: int) -> list[str]:
    """Return a warning where a shipped curve has a row in `BEHIND`."""
    if (gpu, operation, n_gpus) not in BEHIND:
        return []
    size, us, sibling, theirs = BEHIND[gpu, operation, n_gpus]
    return [
        f"{operation} on {n_gpus} {gpu}: the row of {size:,} bytes takes {us:g} us; on {sibling}, "
        f"with slower links, {theirs:g}"
    ]


def say(what: str, seconds: ArrayLike, sizes: ArrayLike, unit: str) -> list[str]:
    """Return a warning for each spike of a curve, to stand in the results that rest on it.
    ``what``: the kernel and the GPU; ``sizes``: shape [rows], the inputs, in ``unit``."""
    times, inputs = 1e6 * np.asarray(seconds, np.float64), np.asarray(sizes)
    return [
        f"{what}: the row of {inputs[at]:,.0f} {unit} is left out: {times[at]:,.1f} us between "
        f"{times[at - 1]:,.1f} and {times[at + 1]:,.1f}"
        for at in np.flatnonzero(spikes(times)).tolist()
    ]


@dataclass(frozen=True, eq=False)
class GemmLatency:
    """Dense GEMMs ``[m, k] x [k, n]`` on one GPU, linear between the grid's points in m, n and k.
    Larger matrices scale with n and k; past the last m the last slope goes on."""

    #: ``m``, ``n``, ``k``: grid axes, ascending.
    m: Floats
    n: Floats
    k: Floats
    seconds: Floats  #: float64 [n, k, m]

    @classmethod
    def from_table(cls, table: LatencyTable) -> "GemmLatency":
        """Arrange a GEMM table's rows; InputError: no such table, or (n, k) pairs lack an m."""
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

    def time_s(self, n: int, k: int, rows: ArrayLike) -> Floats:
        """Seconds for ``rows`` (m) rows through an n x k matrix."""
        i, u = _bracket(self.n, min(n, self.n[-1]))
        j, v = _bracket(self.k, min(k, self.k[-1]))
        beyond = max(n / self.n[-1], 1.0) * max(k / self.k[-1], 1.0)
        grid = self.seconds
        low = (1 - u) * grid[i, j] + u * grid[i + 1, j]
        high = (1 - u) * grid[i, j + 1] + u * grid[i + 1, j + 1]
        return interpolate(rows, self.m, beyond * ((1 - v) * low + v * high))


def _bracket(knots: Floats, x: float) -> tuple[int, float]:
    """Index of the interval that holds x, and x's place in it from 0 to 1."""
    index = int(np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2))
    return index, max(0.0, float((x - knots[index]) / (knots[index + 1] - knots[index])))


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """One layer's attention of a decode step."""

    #: ``batch``, ``context``: grid axes, ascending; context counts the tokens attended to.
    batch: Floats
    context: Floats
    seconds: Floats  #: float64 [batch, context], whole
    token_s: float  #: seconds to read one sequence's KV of one token at full bandwidth
    tokens_max: int  #: largest ``batch * context`` that was measured
    least: AttentionBound = UNBOUNDED  #: below which no time lies

    @classmethod
    def from_table(cls, table: LatencyTable) -> "DecodeAttention":
        """Arrange a table's rows as a grid. Where memory ended a batch's contexts, time goes on
        with the slope per token of the most tokens measured, bound by bandwidth."""
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
        measured = np.isfinite(grid)
        grid = monotone_fit(monotone_fit(grid, axis=1), axis=0)
        slopes = []
        for i in range(len(batch)):
            last = np.flatnonzero(measured[i])[-2:]
            if len(last) == 2:
                step = (context[last[1]] - context[last[0]]) * batch[i]
                slopes.append((step, (grid[i, last[1]] - grid[i, last[0]]) / step))
        token_s = max(slopes)[1]
        for i in range(len(batch)):
            end = int(np.flatnonzero(measured[i])[-1])
            grid[i, end + 1 :] = grid[i, end] + token_s * batch[i] * (
                context[end + 1 :] - context[end]
            )
        grid = np.maximum.accumulate(grid, axis=1)  # where rows end at odd contexts
        most = int((table.columns["batch"].astype(np.int64) * table.columns["context"]).max())
        return cls(batch, context, grid, token_s, most)

    def time_s(self, batch: Floats, context: Floats) -> Floats:
        """Seconds [len(batch), len(context)]; zero for an empty batch."""
        by_context = np.stack([interpolate(context, self.context, row) for row in self.seconds])
        columns = [interpolate(batch, self.batch, by_context[:, j]) for j in range(len(context))]
        seconds = np.maximum(np.stack(columns, axis=1), self.least.decode_s(batch, context))
        return np.where(batch[:, None] > 0, seconds, 0.0)


@dataclass(frozen=True, eq=False)
class PrefillAttention:
    """One layer's attention of a prefill step, as two curves over the length of a whole prompt."""

    floor_s: float  #: time of the smallest call
    alone_s: Floats  #: float64 [max_tokens + 1]: one prompt of that length alone
    #: float64 [max_tokens + 1]: what a prompt adds to a large call; non-decreasing, 0 at 0.
    share_s: Floats
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

    def no_less(self, least_s: Floats, token_s: float) -> "PrefillAttention":
        """Return the curves raised to ``least_s`` [max_tokens + 1], and reading to ``token_s``."""
        alone_s, share_s = (np.maximum(curve, least_s) for curve in (self.alone_s, self.share_s))
        return replace(self, alone_s=alone_s, share_s=share_s, token_s=max(self.token_s, token_s))


def _extend(knots: Floats, values: Floats, max_tokens: int, window: int) -> Floats:
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
    curves: dict[tuple[str, int], tuple[Floats, Floats]]
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

    def time_s(self, operation: str, n_gpus: int, message_bytes: ArrayLike) -> Floats:
        """Seconds of one collective; raises InputError if it was not measured on ``n_gpus``."""
        if (operation, n_gpus) not in self.curves:
            known = ", ".join(f"{name} on {count}" for name, count in self.curves)
            raise InputError("collective", f"{operation!r} on {n_gpus} GPUs", known)
        return interpolate(message_bytes, *self.curves[operation, n_gpus])


@dataclass(frozen=True, eq=False)
class EngineStepLatency:
    """Engine steps without MoE layers and attention, as a table of kind ``engine_step`` holds them.

    Additive, ``t(tokens, sequences) = f(tokens) + g(sequences)``, both non-decreasing and piecewise
    linear. Rows of decode steps have as many tokens as sequences and do not tell f from g: f bends
    at the tokens of rows that hold prompts, g at the sequences of all rows."""

    #: f: knots, ascending from 0, and seconds; what a step costs at all is f(0).
    tokens: Floats
    tokens_s: Floats
    #: ``sequences``, ``sequences_s``: g: knots, ascending from 0, and seconds; g(0) = 0.
    sequences: Floats
    sequences_s: Floats
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
            problem = "the rows do not separate the cost of a token from that of a sequence"
            allowed = "rows of 2 prompt sizes and 2 numbers of sequences"
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

    def token_part_s(self, tokens: ArrayLike) -> Floats:
        """Seconds f of a step, by its tokens."""
        return interpolate(tokens, self.tokens, self.tokens_s)

    def sequence_part_s(self, sequences: ArrayLike) -> Floats:
        """Seconds g that sequences add, by their number."""
        return interpolate(sequences, self.sequences, self.sequences_s)


def _rises(x: Floats, knots: Floats) -> Floats:
    """Return how much of each interval between knots lies below x; the last one has no end."""
    share = (x[:, None] - knots[:-1]) / np.diff(knots)
    share[:, :-1] = np.minimum(share[:, :-1], 1.0)
    return np.maximum(share, 0.0)
