"""Forms fitted to a profile, with errors on the fifth of the grid that was held out; effects.

Three forms of a MoE layer's time are fitted to four fifths of the evenly loaded points:

- ``linear``: ``a + b * distinct + c * tokens``, up to 128 tokens.
- ``max_form``: the form of :mod:`eldr_sim.kernel_profiles.kernels.moe_latency` for imported tables.
- ``grid``: linear interpolation, which is what a run uses (then through all points).

Tables are held beside those that ship with the package, on points that both have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from eldr_sim.arrays import Bools, Floats
from eldr_sim.kernel_profiles.kernels import kernel_latency, moe_latency
from eldr_sim.kernel_profiles.profile.grid import FORCED, MoEPoint, held_out
from eldr_sim.kernel_profiles.profile.links import fit_transfer
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata
from eldr_sim.kernel_profiles.tables.library import shipped_tables

DECODE_TOKENS = 128  #: batches that the linear form is fitted and scored on
_BYTES_PER_WEIGHT = {"bfloat16": 2.0, "fp8_block": 1.0, "w4a16_mxfp4": 17 / 32}


def even_rows(table: LatencyTable) -> tuple[Floats, Floats, Floats]:
    """Batch, distinct experts and seconds of the evenly loaded rows."""
    rows = np.asarray(table.columns["routing"]) == FORCED
    batch, distinct, latency = (
        np.asarray(table.columns[name])[rows].astype(np.float64)
        for name in ("batch", "distinct_experts", "latency_s")
    )
    return batch, distinct, latency


def _linear(batch: Floats, distinct: Floats, latency: Floats) -> tuple[float, float, float]:
    """Least squares of relative errors, no coefficient negative."""
    design = np.stack([np.ones(len(batch)), distinct, batch], axis=1)
    (a, b, c), _ = nnls(design / latency[:, None], np.ones(len(batch)))
    return float(a), float(b), float(c)


def moe_report(table: LatencyTable) -> dict[str, Any]:
    """Fit the three forms to a MoE table and score them on the held-out points: mean and largest
    relative error of ``linear`` (with a, b, c, us), ``max_form`` and ``grid`` up to 128 tokens, of
    the latter two on all, too; and the number of points."""
    shape = table.metadata.shape
    ranks = shape.get("expert_parallel_size", 1)
    n_experts, top_k = shape["n_experts"] // ranks, shape["top_k"] / ranks
    batch, distinct, latency = even_rows(table)
    points = [MoEPoint(int(b), int(d)) for b, d in zip(batch, distinct, strict=True)]
    hidden = held_out(points)
    out = np.array([point in hidden for point in points])
    decode = batch <= DECODE_TOKENS
    kept = ~out
    coefficients = _linear(*(values[kept & decode] for values in (batch, distinct, latency)))
    a, b, c = coefficients

    def score(
        predict: Callable[[Floats, Floats], Floats], rows: Bools, name: str
    ) -> dict[str, float]:
        return moe_latency.mean_and_max(
            name, np.abs(predict(batch[rows], distinct[rows]) / latency[rows] - 1)
        )

    report: dict[str, Any] = {
        "points": len(points),
        "held_out": int(out.sum()),
        "linear": {
            "a_us": a * 1e6,
            "b_us": b * 1e6,
            "c_us": c * 1e6,
            **score(lambda x, d: a + b * d + c * x, out & decode, "held_out"),
            **score(lambda x, d: a + b * d + c * x, kept & decode, "fitted"),
        },
    }
    train = batch[kept], distinct[kept], latency[kept]
    for name, model in (
        ("max_form", moe_latency.fit_max_form(*train, n_experts, top_k)),
        ("grid", moe_latency.fit_grid(*train, n_experts, top_k)),
    ):
        report[name] = {
            **score(model.time_s, out & decode, "held_out"),
            **score(model.time_s, out, "held_out_all_batches"),
        }
    return report


def _by_point(table: LatencyTable) -> dict[tuple[int, int, str], float]:
    rows = table.rows("batch", "distinct_experts", "routing", "latency_s")
    return {(int(b), int(d), str(r)): float(t) for b, d, r, t in rows}


def effects(tables: Mapping[str, Sequence[LatencyTable]]) -> dict[str, Any]:
    """Ratios of times that differ in one thing, by MoE table: ``skew`` over the even load at the
    same batch and count; ``warm_cache`` and ``eager`` over the table used."""
    report: dict[str, Any] = {}
    for table in tables.get("", []):
        if table.metadata.kind != "moe":
            continue
        base = _by_point(table)
        meta = table.metadata
        shape = ",".join(f"{key}={value}" for key, value in meta.shape.items())
        name = f"{meta.kernel_source} {meta.dtype} {shape}"
        skew: dict[str, list[float]] = {}
        for (batch, count, routing), seconds in base.items():
            even = base.get((batch, count, FORCED))
            if routing != FORCED and even:
                skew.setdefault(routing, []).append(seconds / even)
        entry: dict[str, Any] = {
            "skew": {routing: _spread(ratios) for routing, ratios in sorted(skew.items())}
        }
        for folder in ("warm_cache", "eager"):
            for other in tables.get(folder, []):
                keys = ("kind", "shape", "dtype", "kernel_source")
                if all(getattr(other.metadata, key) == getattr(meta, key) for key in keys):
                    ratios = {
                        f"{point[0]}x{point[1]}": seconds / base[point]
                        for point, seconds in _by_point(other).items()
                        if point in base and point[2] == FORCED
                    }
                    entry[folder] = {**_spread(list(ratios.values())), "points": ratios}
        report[name] = entry
    return report


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    if not ratios:
        return {}
    low, middle, high = np.quantile(ratios, (0.0, 0.5, 1.0))
    return {"min": float(low), "median": float(middle), "max": float(high), "n": len(ratios)}


def expert_bytes(table: LatencyTable) -> float:
    """Bytes of one expert's weights as stored (FP8's few scales left out)."""
    shape = table.metadata.shape
    weights = 3 * shape["hidden_size"] * shape["expert_intermediate_size"]
    return weights * _BYTES_PER_WEIGHT[table.metadata.dtype]


def bandwidth_report(tables: Sequence[LatencyTable], copy_bandwidth: float) -> dict[str, Any]:
    """Weight bytes a second at batches 16 to 64, half to all experts, and the share of copy
    bandwidth; below 85% a note names the linear form's rest: fixed part, or reading."""
    report: dict[str, Any] = {}
    for table in tables:
        if table.metadata.kind != "moe" or table.metadata.dtype not in _BYTES_PER_WEIGHT:
            continue
        batch, distinct, latency = even_rows(table)
        owned = table.metadata.shape["n_experts"] // table.metadata.shape.get(
            "expert_parallel_size", 1
        )
        rows = (batch >= 16) & (batch <= 64) & (distinct >= owned / 2)
        if rows.sum() == 0:
            continue
        shares = distinct[rows] * expert_bytes(table) / latency[rows] / copy_bandwidth
        entry: dict[str, Any] = {"share_of_copy_bandwidth": _spread(shares.tolist())}
        decode = batch <= DECODE_TOKENS
        if shares.min() < 0.85 and decode.sum() > 3:
            a, b, c = _linear(batch[decode], distinct[decode], latency[decode])
            total = float(np.median(latency[rows]))
            reading = b * float(np.median(distinct[rows]))
            streaming = expert_bytes(table) / b / copy_bandwidth if b else 0.0
            entry["held_back_by"] = (
                f"of {total * 1e6:.0f} us in the median {a * 1e6:.0f} us are fixed and "
                f"{c * float(np.median(batch[rows])) * 1e6:.0f} us grow with tokens; the "
                f"{reading * 1e6:.0f} us that grow with experts read at {streaming:.0%} of the "
                "copy bandwidth"
            )
        report[f"{table.metadata.kernel_source} {table.metadata.dtype} {table.metadata.shape}"] = (
            entry
        )
    return report


def chunk_report(tables: Sequence[LatencyTable]) -> list[dict[str, float]]:
    """How well a prompt's time less its cached part's, `step_time`'s rule, tells a chunk's."""
    rows = []
    for chunk in tables:
        if chunk.metadata.kind != "attention_chunk":
            continue
        for whole in tables:
            meta = whole.metadata
            if meta.kind != "attention_prefill" or meta.shape != chunk.metadata.shape:
                continue
            last = int(chunk.columns["context"].max())
            curve = kernel_latency.PrefillAttention.from_table(whole, last, 0.0)
            for new, context, seconds in chunk.rows("new_tokens", "context", "latency_s"):
                told = curve.floor_s + curve.alone_s[context] - curve.alone_s[context - new]
                row = {"new_tokens": new, "context": context, "measured_us": seconds * 1e6}
                rows.append(row | {"by_difference_us": float(told) * 1e6})
    return rows


def transfer_report(tables: Sequence[LatencyTable]) -> dict[str, float]:
    """Set-up, descriptor and bandwidth terms of KV transfers, with the fit's errors."""
    for table in tables:
        if table.metadata.kind == "kv_transfer":
            rows = table.rows("message_bytes", "descriptors", "latency_s")
            fitted = fit_transfer({(size, count): seconds for size, count, seconds in rows})
            return {
                "setup_us": fitted.setup_s * 1e6,
                "descriptor_us": fitted.descriptor_s * 1e6,
                "bandwidth_gb_s": fitted.bandwidth / 1e9,
                "mean_error": fitted.mean_error,
                "max_error": fitted.max_error,
            }
    return {}


@dataclass(frozen=True)
class Difference:
    """One point of two tables."""

    #: ``kind``, ``point``: what was timed.
    kind: str
    point: str
    #: ``measured_us``, ``other_us``: here, and in the other table.
    measured_us: float
    other_us: float
    #: The other table's origin, which states no driver, clocks or power cap.
    other: str
    likely: str  #: what is known to make the two differ there; empty where nothing is

    @property
    def ratio(self) -> float:
        """Measured here over the other."""
        return self.measured_us / self.other_us


def differences(
    table: LatencyTable, cache_bytes: int, others: Sequence[LatencyTable] | None = None
) -> list[Difference]:
    """Compare a measured table with shipped ones of the same GPU, kernel kind, shape and dtype, at
    their points inside the measured grid, between which it is interpolated as in a run.

    Skewed MoE rows, with expected and not counted experts, are left out. ``cache_bytes``:
    last-level cache of the device; ``others``: tables to compare with; else the shipped ones."""
    if others is None:
        others = [one.load() for one in shipped_tables() if _same(table.metadata, one.metadata)]
    found = []
    for other in others:
        if _same(table.metadata, other.metadata):
            found += list(_points(table, other, cache_bytes))
    return found


def _same(one: TableMetadata, other: TableMetadata) -> bool:
    keys = ("kind", "gpu", "shape", "dtype")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _points(table: LatencyTable, other: LatencyTable, cache_bytes: int) -> Iterator[Difference]:
    kind, ours = table.metadata.kind, table.columns

    def made(point: str, measured_s: float, other_s: float, likely: str = "") -> Difference:
        meta = other.metadata
        origin = f"{meta.framework} {meta.kernel_source}, {meta.provenance}"
        return Difference(kind, point, measured_s * 1e6, other_s * 1e6, origin, likely)

    if kind == "moe":
        latency = moe_latency.fit_moe_latency(table)
        low, high = ours["distinct_experts"].min(), ours["distinct_experts"].max()
        names = ("batch", "distinct_experts", "routing", "latency_s")
        for batch, distinct, routing, seconds in other.rows(*names):
            inside = batch <= latency.batch_max and low <= distinct <= high
            if not inside or str(routing).startswith("power_law"):
                continue
            cached = distinct * expert_bytes(table) <= cache_bytes
            yield made(
                f"batch {batch}, {distinct:g} experts",
                float(latency.time_s(batch, distinct)),
                seconds,
                "its weights fit into the cache, which the other table did not flush"
                if cached
                else "other tiles for many tokens an expert"
                if batch > 128
                else "",
            )
    elif kind == "attention_decode":
        decode = kernel_latency.DecodeAttention.from_table(table)
        for batch, context, seconds in other.rows("batch", "context", "latency_s"):
            if (
                ours["batch"].min() <= batch <= ours["batch"].max()
                and ours["context"].min() <= context <= ours["context"].max()
                and batch * context <= decode.tokens_max
            ):
                here = decode.time_s(np.array([float(batch)]), np.array([float(context)]))
                yield made(
                    f"batch {batch}, context {context}",
                    float(here[0, 0]),
                    seconds,
                    "contiguous keys here, paged there",
                )
    elif kind == "gemm":
        gemm = kernel_latency.GemmLatency.from_table(table)
        pairs = set(zip(ours["n"].tolist(), ours["k"].tolist(), strict=True))
        for m, n, k, seconds in other.rows("m", "n", "k", "latency_s"):
            if (n, k) in pairs and m <= gemm.m[-1]:
                cached = 2 * n * k <= cache_bytes
                yield made(
                    f"m {m}, n {n}, k {k}",
                    float(gemm.time_s(n, k, float(m))),
                    seconds,
                    "its matrix fits into the cache, which the other table did not flush"
                    if cached
                    else "",
                )
