"""Does speculative decoding pay, by concurrency and number of drafts?

Each number of drafts runs the same closed loops as a plain engine, paired over seeds; it pays from
the acceptance length on at which a verify step takes no longer than as many plain steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from eldr_sim.errors import InputError
from eldr_sim.parquet import table_of
from eldr_sim.planning.compare.paired import run_paired
from eldr_sim.planning.runs.run_cache import Summary
from eldr_sim.planning.slo import mean_known, paired_percent
from eldr_sim.simulator.outcome.catalogue import Headline, number
from eldr_sim.simulator.results import Written
from eldr_sim.simulator.setup.config.run_config import RunConfig

if TYPE_CHECKING:
    import pyarrow as pa

_REQUESTS = 6  #: requests of a closed loop for each that is in flight


@dataclass(frozen=True)
class DraftRow:
    """A number of drafts at a concurrency, means over seeds. ``speed_up``: the plain TPOT over this
    one, ``low`` to ``high`` its 95% interval (NaN for one seed); below ``break_even_length`` tokens
    a step drafts would not pay."""

    concurrency: int
    drafts: int
    batch: float
    plain_tpot_ms: float
    tpot_ms: float
    speed_up: float
    low: float
    high: float
    acceptance_length: float
    break_even_length: float
    experts_over_plain: float | None
    draft_time_share: float


@dataclass(frozen=True, repr=False)
class DraftComparison(Written):
    """Speed-ups by concurrency and drafts, concurrency first."""

    config: RunConfig
    n_seeds: int
    acceptance_source: str
    rows: tuple[DraftRow, ...]

    @property
    def best(self) -> list[DraftRow]:
        """Return the fastest number of drafts of each concurrency, one that pays or not."""
        found: dict[int, DraftRow] = {}
        for row in self.rows:
            if row.concurrency not in found or row.speed_up > found[row.concurrency].speed_up:
                found[row.concurrency] = row
        return list(found.values())

    @property
    def by_batch(self) -> list[tuple[int, int, int]]:
        """Return the fastest drafts by sequences of a step, as vLLM's
        ``num_speculative_tokens_per_batch_size``: between two concurrencies the rule changes at the
        geometric mean of their batches."""
        ranges: list[tuple[int, int, int]] = []
        best = self.best
        for row, following in zip(best, [*best[1:], None], strict=True):
            first = ranges[-1][1] + 1 if ranges else 1
            last = 65536
            if following is not None:
                last = max(first, round(math.sqrt(row.batch * following.batch)))
            drafts = row.drafts if row.speed_up > 1.0 else 0
            if ranges and ranges[-1][2] == drafts:
                first = ranges.pop()[0]
            ranges.append((first, last, drafts))
        return ranges

    def headline(self) -> Headline:
        """Return the rows, the fastest of each concurrency marked."""
        best = self.best
        rows = [
            (
                str(row.concurrency),
                f"{row.drafts}{' *' if row in best else ''}",
                *map(number, (row.plain_tpot_ms, row.tpot_ms)),
                f"{row.speed_up:.2f}"
                + ("" if math.isnan(row.low) else f" [{row.low:.2f}, {row.high:.2f}]"),
                *map(number, (row.acceptance_length, row.break_even_length)),
                *map(number, (row.experts_over_plain, row.draft_time_share)),
            )
            for row in self.rows
        ]
        columns = (
            "in flight", "drafts", "plain TPOT (ms)", "TPOT (ms)", "speed-up", "acceptance length",
            "pays from", "experts / plain", "time in drafts",
        )  # fmt: skip
        cluster = self.config.cluster
        title = f"{self.config.engine.model} on {cluster.gpu}, {cluster.topology}"
        return Headline(
            f"{title}, {self.compared}, mean over seeds ({self.n_seeds})", columns, rows
        )

    @property
    def compared(self) -> str:
        """Return which drafts are compared, in words."""
        *some, last = map(str, sorted({row.drafts for row in self.rows}))
        numbers = f"{', '.join(some)} and {last}" if some else last
        speculative_config = self.config.steps.speculative_config
        drafter = (
            ""
            if speculative_config is None
            else f" of {speculative_config.model or speculative_config.method}"
        )
        return f"{numbers} draft{'' if numbers == '1' else 's'}{drafter} against none"

    def record(self) -> dict[str, Any]:
        """Return the rows as plain values, ready for JSON."""
        return {
            "config": self.config.model_dump(mode="json"),
            "seeds": self.n_seeds,
            "acceptance_source": self.acceptance_source,
            "num_speculative_tokens_per_batch_size": self.by_batch,
            "drafts": self._known(),
        }

    def tables(self) -> dict[str, pa.Table]:
        """Return the rows."""
        return {"drafts": table_of(self._known())}

    def _known(self) -> list[dict[str, Any]]:
        """Return the rows with None for what one seed does not give."""
        return [{k: None if v != v else v for k, v in asdict(row).items()} for row in self.rows]


def compare_drafts(
    config: RunConfig,
    drafts: Sequence[int],
    concurrencies: Sequence[int],
    n_seeds: int,
    *,
    jobs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> DraftComparison:
    """Run numbers of drafts, and none, at concurrencies; raises InputError as `simulate`.

    ``drafts`` may hold 0, which is none and always runs."""
    speculative_config = config.steps.speculative_config
    short = InputError("drafts", "no answer has a second token to draft", "--output-len 2 or more")
    if config.requests.output_len == 1:
        raise short
    if speculative_config is None:
        raise InputError(
            "drafts", "no method or model is given", "together with --speculative-config"
        )
    if not concurrencies or any(not 1 <= value <= 65536 for value in concurrencies):
        raise InputError("concurrencies", f"{list(concurrencies)}", "numbers of 1 to 65536")
    cut = {k: speculative_config.cut(k) for k in sorted({0, *drafts})}
    if len(cut) < 2:
        problem, num_speculative_tokens = (
            "only 0, which is the reference",
            speculative_config.num_speculative_tokens,
        )
        raise InputError("drafts", problem, f"one or more of 1 to {num_speculative_tokens} as well")
    configs: dict[tuple[int, int], RunConfig] = {}
    for concurrency in sorted(set(concurrencies)):
        requests = config.requests.num_requests or max(24, _REQUESTS * concurrency)
        loop = config.replace(
            max_concurrency=concurrency, num_requests=requests, request_rate="inf", duration=None
        )
        for k, fields in cut.items():
            configs[concurrency, k] = loop.replace(speculative_config=fields)
    names = {f"{n} in flight, {k} drafts": key for key in configs for n, k in (key,)}
    runs = run_paired({name: configs[key] for name, key in names.items()}, n_seeds, jobs, progress)
    found = {key: runs.summaries[name] for name, key in names.items()}
    if any(summary["mean_tpot_ms"] is None for of in found.values() for summary in of):
        raise short
    rows = tuple(_row(n, k, found[n, 0], summaries) for (n, k), summaries in found.items() if k > 0)
    drafting = found[max(found)][0]["speculative_decoding"]
    return DraftComparison(config, n_seeds, drafting["acceptance_source"], rows)


def _row(
    concurrency: int, drafts: int, plain: Sequence[Summary], ours: Sequence[Summary]
) -> DraftRow:
    def mean(tag: str, of: Sequence[Summary] = ours) -> float | None:
        return mean_known([summary[tag] for summary in of])

    tpot, before = mean("mean_tpot_ms") or math.nan, mean("mean_tpot_ms", plain) or math.nan
    by_seed = [[summary["mean_tpot_ms"] for summary in of] for of in (plain, ours)]
    interval = paired_percent(by_seed[0], by_seed[1])
    length = mean("acceptance_length") or 1.0
    return DraftRow(
        concurrency,
        drafts,
        mean("mean_decode_batch") or 0.0,
        before,
        tpot,
        before / tpot,
        1.0 + interval.low / 100.0,
        1.0 + interval.high / 100.0,
        length,
        length * tpot / before,
        mean("verify_experts_over_plain"),
        mean("draft_time_share") or 0.0,
    )
