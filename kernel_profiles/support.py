"""How well a model's times are known on each GPU, by engine and precision."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.gpus import GPU, list_gpus, load_gpu
from eldr_sim.kernel_profiles.models import ModelDims, list_models, load_model
from eldr_sim.kernel_profiles.parallel import NODE_GPUS, Parallelism
from eldr_sim.kernel_profiles.steps.parts import Parts
from eldr_sim.kernel_profiles.tables.library import Engine
from eldr_sim.kinds import Progress, no_progress

ENGINES = ("vllm", "sglang", "trtllm")
#: Parts of a step that tables are of, those that take most of it.
_PARTS = ("moe", "attention", "linear_attention", "gemm")
_NOT_SUPPORTED = "not supported"
_MOST_GPUS = 2 * NODE_GPUS
_TOKENS = 8192  # of the contexts that are looked at


class Support(NamedTuple):
    """What is known of a model of one precision on one GPU."""

    model: str
    precision: str  #: of its experts, or of its MLPs where it is dense
    gpu: str
    n_gpus: int  #: fewest that hold it with room for KV caches; 0: a node or two do not
    known: dict[str, str]  #: by engine: measured, derived, roofline or not supported


def precisions(model: ModelDims) -> list[ModelDims]:
    """Return the known models that differ from one in how it is stored alone, itself first."""
    found = {_stored(model): model}
    for other in map(load_model, list_models()):
        if _shape(other) == _shape(model):
            found.setdefault(_stored(other), other)
    return list(found.values())


def _stored(model: ModelDims) -> tuple[str, ...]:
    """Return how its experts, its MLPs and its attention are stored."""
    experts: tuple[str, ...] = () if model.is_dense else (model.expert_dtype,)
    return (*experts, model.dtype_of("mlp"), model.linear_dtype)


def _shape(model: ModelDims) -> dict[str, Any]:
    """Return all but names and storage."""
    apart = {"name", "hf_id", "source", "published_source", "published_total_params",
             "published_active_params", "expert_dtype", "linear_dtype", "mlp_dtype", "state_dtype",
             "head_dtype", "kv_cache_dtype", "max_position_embeddings"}  # fmt: skip
    return model.model_dump(exclude=apart)


def support(
    model: ModelDims, gpus: Sequence[str] | None = None, progress: Progress = no_progress
) -> Iterator[Support]:
    """Yield what is known of each precision of a model on each GPU, or on those named;
    ``progress`` receives the share done."""
    names = list_gpus() if gpus is None else gpus
    pairs = [(dims, name) for dims in precisions(model) for name in names]
    for done, (dims, name) in enumerate(pairs, 1):
        yield _on(dims, name)
        progress(done / len(pairs))


def _on(model: ModelDims, name: str) -> Support:
    gpu = load_gpu(name)
    size = 1
    while size <= _MOST_GPUS:
        layout = Parallelism(size)
        if _fits(model, gpu, layout):
            by_kind = {}
            for engine in ENGINES:
                parts = Parts(model, gpu, layout, (), _TOKENS, engine=Engine(engine))
                by_kind[engine] = _known(parts.provenance, engine)
            return Support(model.name, _stored(model)[0], gpu.name, size, by_kind)
        size *= 2
    by_kind = dict.fromkeys(ENGINES, _NOT_SUPPORTED)
    return Support(model.name, _stored(model)[0], gpu.name, 0, by_kind)


def _fits(model: ModelDims, gpu: GPU, layout: Parallelism) -> bool:
    """Return whether GPUs hold a model and a context; not if it cannot be spread so."""
    try:
        free = gpu.kv_cache_bytes(layout.weight_bytes(model))
        return free > _TOKENS * layout.kv_bytes_per_token(model)
    except InputError:
        return False


def _known(provenance: dict[str, dict[str, Any]], engine: str) -> str:
    """Return the weakest word for the parts of a step: rows of another engine make it derived."""
    labels = set()
    for part in _PARTS:
        of = provenance.get(part)
        if of is None:
            continue
        if of["label"] == "roofline":
            return "roofline"
        own = str(of.get("framework", "")).startswith(("vllm", "sglang", "trtllm"))
        other = own and not str(of["framework"]).startswith(engine)
        weak = of["label"] in ("derived", "fitted") or other
        labels.add("derived" if weak else "measured")
    return "derived" if "derived" in labels else "measured" if labels else "roofline"
