"""Latency table format v1: one Parquet file, its columns and where its numbers come from.

The file's schema carries one JSON document under the key ``eldr_sim.latency_table``: a
:class:`TableMetadata`. Columns depend on the kind of kernel (``_COLUMNS``), besides ``latency_s``,
the median in seconds.

Optional columns: ``latency_q1_s``, ``latency_q3_s`` (quartiles) and ``repeats``. Imported tables
lack them where their origin gives one number only. ``distinct_experts`` is fractional where only
its expectation is known."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.inputs import regular_file
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kinds import AnyPath
from eldr_sim.lazy import Lazy
from eldr_sim.outputs import whole_file
from eldr_sim.parquet import numbers, read_table, text_errors

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = Lazy("pyarrow"), Lazy("pyarrow.parquet")

FORMAT_VERSION = 1
_METADATA_KEY = b"eldr_sim.latency_table"

Provenance = Literal["measured", "imported", "published", "fitted", "derived", "roofline"]
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)  #: from strongest to weakest
#: What a reader is told beside a label.
IN_WORDS: dict[str, str] = {
    "measured": "on this device", "imported": "measured by others",
    "published": "in a paper or log", "fitted": "to end-to-end figures",
    "derived": "from such by a rule", "roofline": "by arithmetic",
}  # fmt: skip

Kind = Literal[
    "moe",
    "attention_decode",
    "attention_prefill",
    "gemm",
    "collective",
    "all_to_all",
    "attention_chunk",
    "elementwise",
    "host_gap",
    "kv_transfer",
    "engine_step",
    "front_end",
]
#: Columns by kind, and whether they hold integers, floats or strings.
_COLUMNS: dict[Kind, dict[str, str]] = {
    "moe": {"batch": "i", "distinct_experts": "f", "routing": "s"},
    # Context: tokens attended to, the new one included.
    "attention_decode": {"batch": "i", "context": "i"},
    # All tokens of the sequence are new: nothing is cached.
    "attention_prefill": {"batch": "i", "new_tokens": "i"},
    "gemm": {"m": "i", "n": "i", "k": "i"},  # rows, out features, in features
    "collective": {"operation": "s", "n_gpus": "i", "message_bytes": "i"},
    # Phase: dispatch or combine; tokens of each GPU, routed uniformly.
    "all_to_all": {"backend": "s", "phase": "s"}
    | dict.fromkeys(("n_gpus", "hidden_size", "top_k", "n_experts", "tokens"), "i"),
    "attention_chunk": {"new_tokens": "i", "context": "i"},  # context: cached and new tokens
    "elementwise": {"tokens": "i"},  # norms, rotary embedding and KV writes of one layer
    # A decode step's time less the sum of its kernels, of the whole model.
    "host_gap": {"batch": "i"},
    "kv_transfer": {"message_bytes": "i", "descriptors": "i"},
    # An engine step but for MoE layers and attention.
    "engine_step": {"tokens": "i", "sequences": "i"},
    # On a CPU. Part: tokenize, event_loop or http; tokens of a prompt.
    "front_end": {"part": "s", "tokens": "i"},
}
_OPTIONAL = {"latency_q1_s": "f", "latency_q3_s": "f", "repeats": "i"}


#: Storage of a model's experts, and the ``dtype`` of the MoE tables that serve it.
MOE_DTYPES = {
    "bfloat16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "mxfp4": "w4a16_mxfp4",
    "int4": "int4_wo", "nvfp4": "nvfp4", "nvfp4_wo": "w4a16_nvfp4", "int4_g64": "int4_wo_g64",
    "int4_g128": "int4_wo_g128", "int8": "int8", "int8_wo": "int8_wo", "mxfp8": "mxfp8",
}  # fmt: skip


def dtypes_of(kind: Kind) -> dict[str, Any]:
    """Return numpy's types of a kind's columns but the times, where tables are made of rows."""
    known = {"i": np.int32, "f": np.float64, "s": object}
    return {
        name: np.int64 if "bytes" in name else known[type_]
        for name, type_ in _COLUMNS[kind].items()
    }


def weakest(labels: Iterable[str]) -> Provenance:
    """The weakest provenance among ``labels``. Raises InputError: no label, or an unknown one."""
    ranks = []
    for label in labels:
        if label not in PROVENANCES:
            raise InputError("provenance", f"{label!r}", ", ".join(PROVENANCES))
        ranks.append(PROVENANCES.index(label))
    if not ranks:
        raise InputError("provenance", "no label given")
    return PROVENANCES[max(ranks)]


#: Kinds of table that a layer of attention has.
ATTENTION: tuple[Kind, Kind] = ("attention_decode", "attention_prefill")


def provenance_of(label: str, origin: str, kernel_source: str = "", **more: Any) -> dict[str, Any]:
    """Return what results say of where a time comes from."""
    return {"label": label, "origin": origin, "kernel_source": kernel_source} | more


def parts_by_provenance(provenance: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the parts of a step's time by label, strongest first, by a summary's ``provenance``
    (``pool.part`` where pools differ), hand-over not among them."""
    found: dict[str, list[str]] = {}
    for name, source in provenance.items():
        part = name.rpartition(".")[2].replace("_", " ")
        parts = found.setdefault(source["label"], [])
        if part not in (*parts, "kv transfer", "handover"):
            parts.append(part)
    return {label: found[label] for label in PROVENANCES if found.get(label)}


class TableMetadata(BaseModel):
    """What a latency table measures, and why to believe it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1  #: version of this format
    kind: Kind  #: kind of kernel
    #: Name of the GPU, as in :mod:`eldr_sim.kernel_profiles.gpus`; of the CPU for ``front_end``.
    gpu: str
    #: What identifies the kernel besides the rows (:func:`moe_shape`, ...); may be empty.
    shape: dict[str, int]
    #: Type of weights (MoE, GEMM, MLA's projections), KV cache (attention) or message.
    dtype: str
    kernel_source: str  #: which kernel ran
    framework: str  #: engine or library, with its version, such as ``vllm 0.24.0``
    provenance: Provenance  #: how the numbers came about
    #: The data's source: package and file, paper and section, or the command that measured it.
    origin: str
    device: str  #: device name as the driver reports it
    driver: str = ""  #: driver version; empty when the origin does not tell
    versions: dict[str, str] = {}  #: versions of further tools
    date: str = ""  #: day of measurement or import, ISO 8601
    #: Relative errors of the model fitted to the table, by the name of the check.
    fit_error: dict[str, float] = {}
    notes: str = ""  #: what a reader must know


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """Rows of one kernel on one GPU."""

    metadata: TableMetadata  #: what was measured
    columns: Mapping[str, NDArray[Any]]  #: arrays of equal length by column name; times in seconds

    def __post_init__(self) -> None:
        _validate(self)

    def __len__(self) -> int:
        return len(self.columns["latency_s"])

    @property
    def source(self) -> dict[str, Any]:
        """What results say of times that come from this table."""
        of = self.metadata
        return provenance_of(of.provenance, of.origin, of.kernel_source, framework=of.framework)

    def saying(self, **metadata: Any) -> "LatencyTable":
        """Return the same rows with other words about them."""
        return LatencyTable(self.metadata.model_copy(update=metadata), self.columns)

    def rows(self, *names: str) -> list[tuple[Any, ...]]:
        """Return the values of some columns, row by row, as Python's own."""
        return list(zip(*(self.columns[name].tolist() for name in names), strict=True))

    def save(self, path: AnyPath) -> None:
        """Write the table as Parquet; the file appears whole or not at all."""
        arrays = {name: pa.array(values) for name, values in self.columns.items()}
        table = pa.table(arrays).replace_schema_metadata(
            {_METADATA_KEY: self.metadata.model_dump_json().encode()}
        )
        with whole_file(Path(path)) as temporary:
            pq.write_table(table, temporary, compression="zstd", compression_level=19)


def table_of(
    points: Iterable[tuple[Any, ...]], seconds: ArrayLike, about: TableMetadata
) -> LatencyTable:
    """Make a table of points, values of the kind's columns in their order, and their times, s."""
    columns = zip(dtypes_of(about.kind).items(), zip(*points, strict=True), strict=True)
    made = {name: np.array(values, dtype) for (name, dtype), values in columns}
    return LatencyTable(about, made | {"latency_s": np.asarray(seconds, np.float64)})


def load_table(path: AnyPath) -> LatencyTable:
    """Read and validate a latency table; raises InputError if it is missing or breaks a rule."""
    path = regular_file(path, "table")
    metadata = _read_metadata(path)
    try:
        data = read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise InputError("table", f"cannot read {path}: {error}") from None
    columns: dict[str, NDArray[Any]] = {}
    for name in data.column_names:
        values = data.column(name)
        if values.null_count:
            raise InputError("table", f"{path}: column {name!r} holds nulls")
        columns[name] = numbers(values)
    try:
        return LatencyTable(metadata, columns)
    except InputError as error:
        raise InputError("table", f"{path}: {error}") from None


def load_tables(folder: AnyPath | None) -> tuple[LatencyTable, ...]:
    """Load the latency tables of a user's folder.

    Args:
        folder: the folder; None: no tables.

    Returns:
        The tables.

    Raises:
        InputError: the folder has no table, or one is invalid (`load_table`).
    """
    if folder is None:
        return ()
    paths = sorted(Path(folder).glob("*.parquet"))
    if not paths:
        raise InputError("tables", f"{folder} holds no latency table", "a folder of .parquet files")
    return tuple(load_table(path) for path in paths)


def _read_metadata(path: Path) -> TableMetadata:
    try:
        with text_errors():
            raw = (pq.read_schema(path).metadata or {}).get(_METADATA_KEY)
    except (OSError, pa.ArrowException) as error:
        raise InputError("table", f"cannot read {path}: {error}") from None
    if raw is None:
        raise InputError("table", f"{path} is not a latency table", "format v1 metadata")
    try:
        document = json.loads(raw)
        version = document.get("format_version")
        if version != FORMAT_VERSION:
            raise InputError("table", f"{path}: format version {version!r}", str(FORMAT_VERSION))
        return TableMetadata(**document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError("table", f"{path}: bad metadata: {where}: {first['msg']}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise InputError("table", f"{path}: bad metadata: {error}") from None


def _validate(table: LatencyTable) -> None:
    """Raise InputError unless columns, types, lengths and values obey the format."""
    required = {**_COLUMNS[table.metadata.kind], "latency_s": "f"}
    missing = [name for name in required if name not in table.columns]
    if missing:
        raise InputError("columns", f"missing {', '.join(missing)}", ", ".join(required))
    unknown = [name for name in table.columns if name not in {**required, **_OPTIONAL}]
    if unknown:
        raise InputError("columns", f"unknown {', '.join(unknown)}", ", ".join(required))
    lengths = {len(values) for values in table.columns.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise InputError("columns", f"lengths {sorted(lengths)}", "equal and not zero")
    for name, values in table.columns.items():
        wanted = {**required, **_OPTIONAL}[name]
        kind = values.dtype.kind
        if wanted == "s":
            if kind not in "OUT" or not all(isinstance(value, str) for value in values):
                raise InputError(name, f"type {values.dtype}", "text")
        elif kind not in ("iu" if wanted == "i" else "f"):
            expected = "integers" if wanted == "i" else "floats"
            raise InputError(name, f"type {values.dtype}", expected)
        elif not np.isfinite(values).all() or (values <= 0).any():
            bad = int(np.flatnonzero(~(np.isfinite(values) & (values > 0)))[0])
            raise InputError(name, f"row {bad} is {values[bad]}", "finite and positive")
    keys = table.rows(*(name for name in required if name != "latency_s"))
    if len(set(keys)) != len(keys):
        raise InputError("columns", "two rows measure the same point")


def moe_shape(
    hidden: int, intermediate: int, n_experts: int, top_k: int, expert_parallel_size: int = 1
) -> dict[str, int]:
    """Shape of a MoE layer on one GPU as it identifies a table; ``intermediate``: of the GPU's
    shard. Under expert parallelism routing is over ``n_experts``, while ``distinct_experts`` counts
    those of the measured rank, ``n_experts / expert_parallel_size`` of them."""
    shape = {
        "hidden_size": hidden,
        "expert_intermediate_size": intermediate,
        "n_experts": n_experts,
        "top_k": top_k,
    }
    if expert_parallel_size > 1:
        shape["expert_parallel_size"] = expert_parallel_size
    return shape


def attention_shape(
    n_heads: int, n_kv_heads: int, head_dim: int, window: int, kv_dtype: str = "bfloat16"
) -> dict[str, int]:
    """Shape of one layer's attention as it identifies a table; ``window`` 0 means none."""
    shape = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "window": window}
    return shape | _kv_bits(kv_dtype)


def _kv_bits(kv_dtype: str) -> dict[str, int]:
    """Tell tables of an FP8 KV cache from those of bfloat16."""
    return {"kv_bits": 8} if kv_dtype == "fp8" else {}


def mla_shape(
    n_heads: int, hidden: int, q_lora_rank: int, kv_lora_rank: int, kv_dtype: str = "bfloat16"
) -> dict[str, int]:
    """Shape of one layer's multi-head latent attention as it identifies a table. Such tables time
    the whole module, projections included; their ``dtype`` is that of these."""
    return {
        "n_heads": n_heads,
        "hidden_size": hidden,
        "q_lora_rank": q_lora_rank,
        "kv_lora_rank": kv_lora_rank,
    } | _kv_bits(kv_dtype)


def linear_attention_shape(part: ModelDims) -> dict[str, int]:
    """Shape of one layer's linear attention as it identifies a table: of Gated DeltaNet where
    nothing else is said. Its tables are those of attention. It takes as long whatever the
    context."""
    shape = {
        "n_key_heads": part.linear_key_heads,
        "n_value_heads": part.linear_value_heads,
        "head_dim": part.linear_head_dim,
    }
    if part.linear_kind == "kda":
        shape["kda"] = 1
    elif part.linear_kind == "mamba2":
        shape["value_head_dim"] = part.linear_value_head_dim or part.linear_head_dim
    return shape


def moe_shape_of(part: ModelDims, expert_parallel_size: int = 1) -> dict[str, int]:
    """Shape of a MoE layer of a GPU's part of a model; see :func:`moe_shape`."""
    width = part.expert_intermediate_size
    shape = moe_shape(part.expert_width, width, part.n_experts, part.top_k, expert_parallel_size)
    return shape if part.gated_mlp else shape | {"matrices": part.mlp_matrices}


def attention_shapes(
    part: ModelDims, kv_dtype: str = "bfloat16"
) -> list[tuple[bool, int, dict[str, int]]]:
    """Whether it slides, layers, and shape of each kind of attention of a GPU's part of a model."""
    if part.attention == "mla":
        ranks = part.q_lora_rank, part.kv_lora_rank
        shape = mla_shape(part.n_heads, part.hidden_size, *ranks, kv_dtype)
        shape |= {"index_heads": part.index_heads} if part.index_topk else {}
        shape |= {"compression": min(part.compressed_layers)[0]} if part.compressed_layers else {}
        windows = [(True, part.n_sliding_layers, shape | {"window": part.sliding_window})]
        return [*windows[: bool(part.n_sliding_layers)], (False, part.n_full_layers, shape)]
    shapes = []
    for kind, n in part.attention_kinds:
        shape = attention_shape(*part.heads(kind), part.sliding_window if kind else 0, kv_dtype)
        if part.v_head_dim:
            shape["v_head_dim"] = part.v_head_dim
        choosing = 0 if kind else part.n_choosing_layers
        if choosing:
            index = {"index_heads": part.index_heads, "index_topk": part.index_topk}
            shapes.append((kind, choosing, shape | index))
        if n > choosing:
            shapes.append((kind, n - choosing, shape))
    return shapes


def has_projections(shape: Mapping[str, int]) -> bool:
    """Whether tables of such attention time whole modules, projections included: of MLA, and of
    MiniMax-M3's sparse attention."""
    return "kv_lora_rank" in shape or "index_topk" in shape


def elementwise_shape(part: ModelDims) -> dict[str, int]:
    """Shape of one layer's norms, rotary embedding and KV writes as it identifies a table."""
    names = ("hidden_size", "n_heads", "n_kv_heads", "head_dim")
    return {name: getattr(part, name) for name in names}


def engine_step_shape(n_layers: int, hidden: int, vocab: int) -> dict[str, int]:
    """Shape of what an engine runs besides MoE layers and attention as it identifies a table."""
    return {"n_layers": n_layers, "hidden_size": hidden, "vocab_size": vocab}


_LETTERS = {
    "hidden_size": "h", "expert_intermediate_size": "i", "n_experts": "e", "top_k": "k",
    "expert_parallel_size": "ep", "n_heads": "q", "n_kv_heads": "kv", "head_dim": "d",
    "window": "w", "index_heads": "x", "index_topk": "t", "v_head_dim": "dv",
    "value_head_dim": "lw", "kda": "kda", "matrices": "mm", "compression": "m",
    "n_key_heads": "lk", "n_value_heads": "lv", "n_layers": "l", "vocab_size": "v", "n_nodes": "n",
    "q_lora_rank": "r", "kv_lora_rank": "c", "kv_bits": "b",
}  # fmt: skip


def table_name(metadata: TableMetadata) -> str:
    """Return the file name of a latency table.

    Args:
        metadata: of the table.

    Returns:
        GPU, kind, shape, data type and framework, joined.
    """
    shape = [f"{_LETTERS[name]}{value}" for name, value in metadata.shape.items()]
    parts = [metadata.gpu, metadata.kind, *shape, metadata.dtype, metadata.framework]
    return "_".join(parts).lower().replace(" ", "-").replace("/", "-") + ".parquet"


def save_tables(tables: Iterable[LatencyTable], folder: Path) -> list[Path]:
    """Write tables into a folder, each under its name; return the files."""
    paths = []
    for table in tables:
        paths.append(folder / table_name(table.metadata))
        table.save(paths[-1])
    return paths
