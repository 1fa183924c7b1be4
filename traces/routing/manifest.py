"""The manifest of a routing trace: what it is, how it is stored and where it came from.

Expert ids, ``[token, layer, top_k]``, are plain (``experts.npy``, uint8, or uint16 beyond 256
experts, memory-mapped) or ``experts.npy.xz``, with LZMA's literal and position contexts aligned to
the ``top_k`` ids of a layer: the embedded trace (50.0 MB plain) takes 20.2 MB, 21.9 with LZMA's
defaults, 24.1 with zstd-22. Rank groups say how much of the gate's order ids keep: ``[1] * top_k``
all, ``[4, 4]`` which four of eight came first, None nothing. A model of a smaller top-k can be
served where a group ends there; ids that ascend within few groups compress best."""

import lzma
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.arrays import Array
from eldr_sim.errors import InputError
from eldr_sim.inputs import array_limit, check_arrays, parse_array, parse_json, read_text

Encoding = Literal["npy", "xz"]

FILE_NAMES: dict[Encoding, str] = {"npy": "experts.npy", "xz": "experts.npy.xz"}

_DICTIONARY = 1 << 26  #: LZMA looks back this far, bytes; a reader needs as much memory


def check_groups(groups: Sequence[int] | None, top_k: int, field: str) -> list[int] | None:
    """Return rank groups in a manifest's form; raise InputError unless they sum to ``top_k``."""
    if groups is None:
        return None
    sizes = [int(size) for size in groups]
    if not sizes or min(sizes) < 1 or sum(sizes) != top_k:
        raise InputError(field, f"rank groups {sizes}", f"positive sizes that sum to top_k {top_k}")
    return None if len(sizes) == 1 else sizes


def save_ids(path: Path, ids: Array, encoding: Encoding) -> None:
    """Write a file of expert ids; compressing takes about a second per megabyte."""
    if encoding == "npy":
        np.save(path, ids)
        return
    row = ids.shape[2] * ids.itemsize
    aligned = min((row & -row).bit_length() - 1, 4)  # log2 of the bytes to align to, at most 16
    filters = [
        {
            "id": lzma.FILTER_LZMA2,
            "preset": 6,
            "dict_size": _DICTIONARY,
            "lc": 0,
            "lp": aligned,
            "pb": aligned,
        }
    ]
    with lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=filters) as file:
        np.save(file, ids)


def load_ids(path: Path, encoding: Encoding) -> Array:
    """Read expert ids: memory-mapped if plain, into memory if compressed; raises InputError."""
    try:
        ids: Array
        check_arrays(path, str(path), mapped=encoding == "npy")
        if encoding == "npy":
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            unpacked = lzma.LZMADecompressor().decompress(path.read_bytes(), array_limit())
            ids = parse_array(unpacked, path, str(path))
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from None
    except (lzma.LZMAError, ValueError, EOFError) as error:
        kind = FILE_NAMES[encoding].removeprefix("experts")
        raise InputError(
            str(path), f"truncated or not a {kind} file: {f'{error}'.splitlines()[0]}"
        ) from None
    return ids


BUILTIN = Path(__file__).parents[1] / "data"  #: folder of the traces that come with the package
#: Name of the embedded trace of this project's own model, which `open_trace` opens by itself.
REFERENCE_TRACE = "reference-moe"

#: Begins the notes of a synthetic trace; what it was made of follows.
SYNTHETIC = "Synthetic routing, "

#: In the notes of drawn traces without a difference between prompts and answers.
ONE_PROCESS = "prompts and answers choose experts by one process"

_UNTUNED = ("; changed by hand, tuned to nothing", "; given another shape, which nothing confirms")

Provenance = Literal["recorded", "synthetic", "imported"]


class Manifest(BaseModel):
    """What a routing trace is and where it came from."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    #: Version of this format; 1 has the defaults of ``encoding``, ``rank_groups``, ``prompt_rows``.
    format_version: Literal[1, 2] = 2
    model: str = Field(min_length=1)  #: the model whose gates chose the experts
    n_layers: int = Field(ge=1)  #: MoE layers recorded
    n_experts: int = Field(ge=1, le=65536)  #: routed experts per layer
    top_k: int = Field(ge=1)  #: experts chosen per token and layer
    #: How much of the gate's order the ids of a token keep, see ``encoding``; None: nothing.
    rank_groups: list[int] | None = None
    prompt_rows: bool = True  #: whether prompt tokens have rows; false for a decode-only trace
    #: The only phase that was recorded, of which the trace has made both; None: each was.
    recorded_phase: Literal["prompt", "generated"] | None = None
    #: The share of a request's recorded tokens that stands for its prompt, first; None as above.
    prompt_share: float | None = Field(default=None, gt=0, lt=1)
    encoding: Encoding = "npy"  #: how the expert ids are stored, see ``encoding``
    #: Domain names; a request's ``domain`` is an index into this list.
    domains: list[str] = Field(min_length=1)
    captured_by: str  #: how the expert ids were captured
    source_data: str  #: the prompts: data set, version, licence
    tool_versions: dict[str, str]  #: versions of the tools that recorded or converted the trace
    checksum: str = Field(pattern=r"^[0-9a-f]{64}$")  #: SHA-256 of the file of expert ids
    requests_checksum: str = Field(pattern=r"^[0-9a-f]{64}$")  #: SHA-256 of ``requests.parquet``
    #: SHA-256 of ``gate_scores.npz``; None where the trace has none.
    gate_scores_checksum: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    n_requests: int = Field(ge=1)  #: rows of ``requests.parquet``
    n_tokens: int = Field(ge=1)  #: rows of expert ids: recorded tokens of all requests
    #: ``recorded`` from a model that ran, ``synthetic`` (drawn), or ``imported`` from another
    #: project.
    provenance: Provenance
    notes: str = ""  #: whatever a reader of results should know

    @property
    def experts_file(self) -> str:
        """Name of the file of expert ids."""
        return FILE_NAMES[self.encoding]


def one_phase(manifest: Manifest) -> str | None:
    """Say what stands for prompts and generated tokens where only one phase was recorded."""
    if manifest.prompt_share is None:
        return None
    return (
        f"all tokens of the routing trace were recorded as {manifest.recorded_phase} tokens: the "
        f"first {100 * manifest.prompt_share:g}% of each request stand for its prompt, the rest "
        "for what it generates"
    )


def rests_on(manifest: Manifest, model: str) -> str:
    """Say what a run's routing rests on: recorded, fitted to recorded tokens, or a preset."""
    if manifest.provenance == "synthetic":
        source = manifest.notes.removeprefix(SYNTHETIC).rstrip(".") or "synthetic"
        # Traces keep the words that they were made with.
        source = source.replace(*_UNTUNED)
    else:
        phase = f"{manifest.recorded_phase} " if manifest.recorded_phase else ""
        name = manifest.model.split(" (")[0]
        source = f"{manifest.n_tokens:,} recorded {phase}tokens of {name}"
    own = model.lower().removesuffix("-fp8") in manifest.model.lower()
    return source if own else f"{source}; nothing was recorded of {model}"


_FITTED = re.compile(r"fitted to ([\d,]+) recorded tokens of (\S+)")


def in_short(manifest: Manifest, model: str) -> str:
    """Say in at most 53 characters where a run's routing comes from, and whether its prompts and
    answers choose experts by one process; `rests_on` says all of it."""
    own = model.lower().removesuffix("-fp8")
    if manifest.provenance != "synthetic":
        tokens = f"recorded, {_count(manifest.n_tokens)}"
        if phase := manifest.recorded_phase:
            other = "answers" if phase == "prompt" else "prompts"
            return f"{tokens} {phase} tokens for {other} too"
        return f"{tokens} tokens" + ("" if own in manifest.model.lower() else " of another model")
    fit = _FITTED.search(manifest.notes)
    if fit is None:
        return "forced as benchmarks do" if "forced" in manifest.notes else "drawn, of no recording"
    source = f"{fit[1]} tokens" if own in fit[2].lower() else "other model"
    alike = ONE_PROCESS in manifest.notes
    return f"drawn, {source}" + ("; prompts, answers by one process" if alike else "")


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens < 1e6 else f"{tokens / 1e6:.0f} million"


def builtin_traces() -> list[str]:
    """Return the names of the traces that come with the package."""
    return sorted(p.parent.name.replace("_", "-") for p in BUILTIN.glob("*/manifest.json"))


def folder_of(path_or_name: str | os.PathLike[str]) -> Path:
    """Return the folder of an embedded trace, which wins over another folder, or of a path; raises
    InputError."""
    if isinstance(path_or_name, str) and path_or_name in builtin_traces():
        return BUILTIN / path_or_name.replace("-", "_")
    path = Path(path_or_name)
    if not path.is_dir():
        problem = f"{str(path_or_name)!r} is neither an embedded trace nor a folder"
        allowed = ", ".join([*builtin_traces(), "path of a trace folder"])
        raise InputError("trace", problem, allowed)
    return path


def manifest_error(field: str, error: ValidationError) -> InputError:
    """Return the first problem of a manifest as one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return InputError(field, f"{where}: {first['msg']}, got {first['input']!r:.60}")


def read_manifest(path: Path) -> Manifest:
    """Read and check ``manifest.json``; raises InputError."""
    raw = parse_json(read_text(path, str(path)), str(path))
    if not isinstance(raw, dict):
        raise InputError(str(path), f"holds a JSON {type(raw).__name__}", "a JSON object")
    version = raw.get("format_version")
    if version not in (1, 2):
        raise InputError(str(path), f"format_version {version!r}", "1, 2")
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        raise manifest_error(str(path), error) from None
    if manifest.top_k > manifest.n_experts:
        problem = f"top_k {manifest.top_k} exceeds n_experts {manifest.n_experts}"
        raise InputError(str(path), problem)
    check_groups(manifest.rank_groups, manifest.top_k, str(path))
    if (manifest.recorded_phase is None) != (manifest.prompt_share is None):
        raise InputError(str(path), "recorded_phase or prompt_share alone", "both, or neither")
    if len(set(manifest.domains)) != len(manifest.domains):
        raise InputError(str(path), "domains are not unique")
    return manifest
