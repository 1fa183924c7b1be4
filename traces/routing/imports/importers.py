"""Import of routing that other tools recorded, in the formats of `formats`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eldr_sim.errors import InputError
from eldr_sim.inputs import reading
from eldr_sim.traces.routing.calibration import check_fraction, split_calibration
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.imports.dumps import ImportedRouting
from eldr_sim.traces.routing.imports.formats import READERS, detect_format
from eldr_sim.traces.routing.writer import check_target, write_trace

DECODE_ONLY = (
    "Decode-only: the experts of prompt tokens are missing. Policies without signatures replay its "
    "decodes; the policies eldr and marginal_cost, eldr-sim fit, prefix signatures and the "
    "prefill-decode correlation need a trace with prompt rows; --prompt-share makes one of it."
)
"""Message about what a decode-only trace cannot do."""


def import_trace(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str | None = None,
    n_experts: int | None = None,
    domain: str = "all",
    ranked: bool = False,
    prompt_share: float | None = None,
    calibration_fraction: float = 0.5,
    notes: str = "",
    **about: Any,
) -> RoutingTrace:
    """Import a file of chosen experts as a routing trace.

    Raises InputError if the file is not of its format, a share is not within (0, 1), the number of
    experts is unknown, generated tokens or ``prompt_share`` are missing or both given, or ``out``
    may not be replaced. ``format``: of `formats.READERS`, detected by default; ``n_experts``,
    ``domain``: where the file does not say; ``ranked``: ids stand in the gate's order;
    ``prompt_share``: of tokens of one phase, how many stand for the prompt; ``notes``: what the
    file says is added; ``about``: of `write_trace`."""
    check_fraction(calibration_fraction)
    check_target(out, about.get("force", False))
    source = Path(path)
    kind = format or detect_format(source)
    if kind not in READERS:
        raise InputError("format", repr(kind), ", ".join(READERS))
    with reading(str(source), f"not a file of the format {kind}", "what docs/formats.md says"):
        imported = READERS[kind](source)
    phase = imported.phase
    if prompt_share is not None:
        imported = _parted(imported, prompt_share, source)
    elif phase == "prompt":
        problem = f"{source} has prompt tokens only"
        raise InputError("prompt_share", problem, "a share that stands for the prompt")
    experts = imported.n_experts or n_experts
    if experts is None:
        problem = f"{source} does not say how many experts a layer has"
        raise InputError("experts", problem, "a number")
    if imported.domain is None:
        names, domains = [domain] * len(imported.request_id), [domain]
    else:
        names, domains = imported.domain, imported.domains
    return write_trace(
        out,
        experts=imported.experts,
        request_id=imported.request_id,
        domain=names,
        prompt_len=imported.prompt_len,
        output_len=imported.output_len,
        is_calibration=split_calibration(names, calibration_fraction),
        n_experts=experts,
        domains=domains,
        notes=" ".join(part for part in (notes, imported.notes) if part),
        gate_scores=imported.gate_scores,
        rank_groups=[1] * imported.experts.shape[-1] if ranked or imported.ranked else None,
        prompt_rows=imported.phase == "both",
        recorded_phase=None if prompt_share is None or phase == "both" else phase,
        prompt_share=prompt_share,
        **{"tool_versions": {}, "provenance": "imported"} | about,
    )


def _parted(imported: ImportedRouting, share: float, source: Path) -> ImportedRouting:
    """Let the first share of each request's rows stand for its prompt; leave requests of one."""
    if not 0 < share < 1:
        raise InputError("prompt_share", f"got {share}", "a number between 0 and 1")
    if imported.phase == "both":
        raise InputError("prompt_share", f"{source} has prompts and generated tokens", "none")
    rows = imported.prompt_len if imported.phase == "prompt" else imported.output_len
    kept = np.flatnonzero(rows > 1)
    if not len(kept):
        raise InputError(str(source), "no request of two or more tokens")
    prompt = np.clip((rows * share + 0.5).astype(np.int64), 1, rows - 1)
    left_out = len(rows) - len(kept)
    notes = f"{left_out} requests of a single token are left out." if left_out else ""
    return replace(
        imported,
        experts=imported.experts[np.repeat(rows > 1, rows)],
        request_id=[imported.request_id[i] for i in kept],
        domain=None if imported.domain is None else [imported.domain[i] for i in kept],
        prompt_len=prompt[kept],
        output_len=(rows - prompt)[kept],
        phase="both",
        notes=" ".join(part for part in (imported.notes, notes) if part),
    )
