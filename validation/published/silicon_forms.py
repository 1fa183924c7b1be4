"""What each correction does to the predictions of measured runs, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from eldr_sim.validation.published.silicon import (
    Form,
    case_tables,
    predict_rows,
    silicon_errors,
    simulate_case,
    tokenizer_mode,
)
from eldr_sim.validation.published.silicon_routing import make_routing
from eldr_sim.validation.published.silicon_rows import MeasuredModel, MeasuredRun

_BARE = Form(routing="uniform", frontend=None, padding=False)

#: Predictions by what they take into account. The last ones vary the complete one.
FORMS: dict[str, Form] = {
    "neither": _BARE,
    "padding": Form(routing="uniform", frontend=None),
    "drawn routing": Form(frontend=None, padding=False),
    "padding, drawn routing": Form(frontend=None),
    "front end": Form(routing="uniform", padding=False),
    "front end, padding": Form(routing="uniform"),
    "all": Form(),
    "all, CPU x 0.7": Form(cpu_slowdown=0.7),
    "all, CPU x 1.3": Form(cpu_slowdown=1.3),
    "all, norms by bytes alone": Form(norms=False),
    "all, padded graphs": Form(graphs="dense"),
    "all, padded graphs and experts": Form(graphs="experts"),
}


#: Parts of a co-located request's TTFT by the times that bound them.
PARTS = (
    ("front end", "sent_s", "tokenized_s"),
    ("engine queue", "tokenized_s", "prefill_start_s"),
    ("prefill, its waits for steps", "prefill_start_s", "first_token_s"),
)


def ttft_budget(
    row: MeasuredRun, target: MeasuredModel, moe_kernel: str | None = None
) -> dict[str, float]:
    """Return the parts of a co-located row's mean TTFT, ms, and what the measured one has more."""
    form, kernel = Form(), moe_kernel or target.moe_kernels[0]
    with TemporaryDirectory() as folder:
        work = Path(folder)
        trace = make_routing(work / "trace", form.routing, target)
        tables = case_tables(work / "tables", [row.case], kernel, target, form)
        mode = tokenizer_mode(row.version, target.backend)
        requests = simulate_case(row.case, trace, tables, target, form, mode).requests
    parts = {name: 1e3 * float((requests[end] - requests[at]).mean()) for name, at, end in PARTS}
    return parts | {"not explained": row.ttft_ms - sum(parts.values())}


def forms_table(
    rows: Sequence[MeasuredRun],
    target: MeasuredModel,
    moe_kernel: str | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> pa.Table:
    """Predict all rows in every form.

    Returns
    -------
    table
        A row a form, group (all, each GPU, each GPU and tensor-parallel size) and metric: the
        number of unmarked rows, and the median, 90th percentile and signed median of their errors.
    """
    records = []
    for done, (name, form) in enumerate(FORMS.items()):

        def part(share: float, done: int = done) -> None:
            progress((done + share) / len(FORMS))

        table = predict_rows(rows, target=target, moe_kernel=moe_kernel, form=form, progress=part)
        groups = ((), ("gpu",), ("gpu", "tensor_parallel_size"))
        records += [
            {
                "form": name,
                "group": error.group,
                "metric": error.metric,
                "rows": error.rows,
                "median": error.median,
                "p90": error.p90,
                "signed_median": error.middle,
            }
            for error in silicon_errors(table, groups)
        ]
    return pa.Table.from_pylist(records)
