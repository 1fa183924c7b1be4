"""A profile's tables beside those that ship with the package, on points that both have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eldr_sim.kernel_profiles.kernels.kernel_latency import DecodeAttention, GemmLatency
from eldr_sim.kernel_profiles.kernels.moe_latency import fit_moe_latency
from eldr_sim.kernel_profiles.profile.table_fit import expert_bytes
from eldr_sim.kernel_profiles.tables.format import LatencyTable, TableMetadata
from eldr_sim.kernel_profiles.tables.library import shipped_tables


@dataclass(frozen=True)
class Difference:
    """One point of two tables."""

    #: ``kind``, ``point``: what was timed.
    kind: str
    point: str
    #: ``measured_us``, ``other_us``: here, and in the other table.
    measured_us: float
    other_us: float
    #: The other table's origin. It states neither driver, clocks nor power cap, so that the cards
    #: may be set differently.
    other: str
    likely: str  #: what is known to make the two differ there; empty where nothing is

    @property
    def ratio(self) -> float:
        """Measured here over the other."""
        return self.measured_us / self.other_us


def differences(
    table: LatencyTable, cache_bytes: int, others: Sequence[LatencyTable] | None = None
) -> list[Difference]:
    """Compare a measured table with shipped ones of the same GPU, kernel kind, shape and dtype.

    At the other table's points inside the measured grid; between measured points it is
    interpolated, as a run does. MoE rows of skewed routing, whose experts are only expected, are
    left out.

    ``cache_bytes``: last-level cache of the device; ``others``: tables to compare with; the shipped
    ones when not given.
    """
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
        latency = fit_moe_latency(table)
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
        decode = DecodeAttention.from_table(table)
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
        gemm = GemmLatency.from_table(table)
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
