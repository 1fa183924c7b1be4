"""Import of routing that other tools recorded, in the formats of `import_formats`."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from eldr_sim import __version__
from eldr_sim.errors import InputError
from eldr_sim.traces.routing.calibration import check_fraction, split_calibration
from eldr_sim.traces.routing.encoding import Encoding
from eldr_sim.traces.routing.format import RoutingTrace
from eldr_sim.traces.routing.imports.formats import READERS, detect_format
from eldr_sim.traces.routing.imports.imported import ImportedRouting
from eldr_sim.traces.routing.manifest import Provenance
from eldr_sim.traces.routing.writer import write_trace

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
    model: str,
    captured_by: str,
    source_data: str,
    tool_versions: Mapping[str, str],
    format: str | None = None,
    n_experts: int | None = None,
    domain: str = "all",
    ranked: bool = False,
    prompt_share: float | None = None,
    encoding: Encoding = "npy",
    provenance: Provenance = "imported",
    notes: str = "",
    calibration_fraction: float = 0.5,
    force: bool = False,
) -> RoutingTrace:
    """Import a file of chosen experts as a routing trace.

    Raises InputError if the file is not of its format, a fraction or share is not within (0, 1),
    the number of experts is unknown, the file has no generated tokens and ``prompt_share`` is None,
    it has both and ``prompt_share`` is given, or ``out`` exists and ``force`` is false.

    Parameters
    ----------
    path
        The file or folder.
    out
        Trace folder to make.
    model, captured_by, source_data, tool_versions, provenance, notes
        See `Manifest`; what the file says of itself is added to the notes.
    format
        One of `import_formats.READERS`; by default detected from the content.
    n_experts
        Experts per layer, where the file does not say.
    domain
        Domain of the requests, where the file knows none.
    ranked
        The ids of a token stand in the gate's order, the highest score first.
    prompt_share
        Where the file has tokens of one phase only: the first share of each request's that is to
        stand for its prompt, the rest for its generated tokens.
    encoding
        See `write_trace`.
    calibration_fraction
        See `split_calibration`.
    force
        Replace ``out`` if it is there.
    """
    check_fraction(calibration_fraction)
    source = Path(path)
    kind = format or detect_format(source)
    if kind not in READERS:
        raise InputError("format", repr(kind), ", ".join(READERS))
    imported = READERS[kind](source)
    phase = imported.phase
    if prompt_share is not None:
        imported = _parted(imported, prompt_share, source)
    elif phase == "prompt":
        raise InputError(
            "prompt_share", f"{source} has prompt tokens only", "a share that stands for the prompt"
        )
    experts = imported.n_experts or n_experts
    if experts is None:
        raise InputError(
            "experts", f"{source} does not say how many experts a layer has", "a number"
        )
    if imported.domain is None:
        names, domains = [domain] * len(imported.request_id), [domain]
    else:
        names, domains = imported.domain, imported.domains
    top_k = imported.experts.shape[-1]
    return write_trace(
        out,
        experts=imported.experts,
        request_id=imported.request_id,
        domain=names,
        prompt_len=imported.prompt_len,
        output_len=imported.output_len,
        is_calibration=split_calibration(names, calibration_fraction),
        model=model,
        n_experts=experts,
        domains=domains,
        captured_by=captured_by,
        source_data=source_data,
        tool_versions={**tool_versions, "eldr-sim": __version__, "numpy": np.__version__},
        provenance=provenance,
        notes=" ".join(part for part in (notes, imported.notes) if part),
        gate_scores=imported.gate_scores,
        rank_groups=[1] * top_k if ranked or imported.ranked else None,
        prompt_rows=imported.phase == "both",
        recorded_phase=None if prompt_share is None or phase == "both" else phase,
        prompt_share=prompt_share,
        encoding=encoding,
        force=force,
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
