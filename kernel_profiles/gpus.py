"""GPUs: memory, bandwidth, compute and engines' defaults, by ``data/gpus.json`` with sources."""

import os
import re
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kernel_profiles.shipped_data import shipped_json

_UNSAID = "the user's gpu.json, which names no source"


class GPU(BaseModel):
    """One GPU and the node it sits in."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str  #: short name, as accepted by :func:`load_gpu`
    aliases: tuple[str, ...] = ()  #: other names
    memory_bytes: int = Field(gt=0)  #: device memory
    memory_bandwidth: float = Field(gt=0)  #: peak HBM bandwidth, bytes per second
    bf16_flops: float = Field(gt=0)  #: peak dense bfloat16 tensor throughput, FLOP per second
    #: Peak dense FP8 tensor throughput; 0 where the hardware has none.
    fp8_flops: float = Field(ge=0)
    #: Peak dense FP4 tensor throughput; 0 where the hardware has none.
    fp4_flops: float = Field(default=0, ge=0)
    #: Network line rate per GPU, one direction, bytes per second.
    nic_bandwidth: float = Field(gt=0)
    #: Bandwidth to the other GPUs of the node, one direction, bytes per second.
    intra_node_bandwidth: float = Field(gt=0)
    #: Links to the node's peers that share this bandwidth; 0: a switch gives all of it to any peer.
    intra_node_links: int = Field(default=0, ge=0)
    #: Bandwidth that copies from pinned host memory reach, bytes per second; 0 where unknown.
    host_bandwidth: float = Field(default=0, ge=0)
    #: Host time to launch one kernel without CUDA graphs, seconds; None where nobody has said.
    launch_s: float | None = Field(default=None, gt=0)
    #: The same of a step that vLLM has compiled; None: ``launch_s``.
    compiled_launch_s: float | None = Field(default=None, gt=0)
    #: Memory that is neither weights nor KV cache: activations, graphs, communicators, runtime.
    engine_reserved_bytes: int = Field(ge=0)
    #: Default of ``vllm serve --max-num-seqs`` on this GPU.
    max_num_seqs: int = Field(ge=1, le=65536)
    #: Default of ``vllm serve --max-num-batched-tokens`` on this GPU.
    max_num_batched_tokens: int = Field(ge=1, le=2**20)
    #: A GPU of the same architecture whose latency tables, scaled by part, stand in for this one's
    #: (:mod:`~eldr_sim.kernel_profiles.kernels.sibling_tables`); empty where there is none.
    sibling: str = ""
    #: Published rents of a GPU-hour, lowest and highest, USD: shown, not used (``--price`` is).
    rent_usd: tuple[float, float] | None = None
    rent_source: str = ""  #: where and when the rents were published
    power_w: float = Field(default=0, ge=0)  #: most power that it draws, W; 0 where unknown
    power_source: str = ""  #: where that comes from
    source: str = _UNSAID  #: where the hardware figures come from
    #: Where ``host_bandwidth`` comes from: its provenance, then the evidence.
    host_bandwidth_source: str = ""
    launch_source: str = ""  #: where ``launch_s`` comes from
    compiled_launch_source: str = ""  #: where ``compiled_launch_s`` comes from
    engine_reserved_source: str = _UNSAID  #: where ``engine_reserved_bytes`` comes from
    defaults_source: str = _UNSAID  #: where the two server defaults come from

    def peak_flops(self, *, fp8: bool) -> float:
        """Peak FLOP/s with FP8 or bfloat16 weights; without FP8 units all compute in bfloat16."""
        return self.fp8_flops if fp8 and self.fp8_flops else self.bf16_flops

    def most_flops(self, dtype: str) -> float:
        """Highest peak FLOP/s that kernels of a type of weights can reach: of FP4 weights with FP4
        or FP8 activations, of FP8 and INT8 weights FP8, of others bfloat16, where the units
        exist."""
        narrow = self.fp4_flops if "fp4" in dtype else 0.0
        if narrow or dtype.startswith(("fp8", "mxfp8")) or dtype == "int8":
            return max(narrow, self.fp8_flops, self.bf16_flops)
        return self.bf16_flops

    def peer_bandwidth(self, n_gpus: int) -> float:
        """Bandwidth of one GPU to the others in a group of ``n_gpus`` of its node, bytes/s."""
        if self.intra_node_links == 0:
            return self.intra_node_bandwidth
        return self.intra_node_bandwidth / self.intra_node_links * (n_gpus - 1)

    def kv_cache_bytes(self, weight_bytes: int, memory_utilization: float = 0.9) -> int:
        """Memory left for KV blocks by ``--gpu-memory-utilization``, as vLLM sizes its cache;
        InputError: none is left beside the weights, or it is not in (0, 1]."""
        if not 0 < memory_utilization <= 1:
            raise InputError("gpu_memory_utilization", f"{memory_utilization!r}", "0 < x <= 1")
        budget = int(self.memory_bytes * memory_utilization)
        left = budget - weight_bytes - self.engine_reserved_bytes
        if left <= 0:
            raise InputError(
                "gpu",
                f"{self.name} holds {budget / 1e9:.1f} GB at utilization {memory_utilization}, "
                f"but weights need {weight_bytes / 1e9:.1f} GB "
                f"and the engine {self.engine_reserved_bytes / 1e9:.1f} GB",
                "a larger GPU, a smaller model, or more GPUs per worker",
            )
        return left


@lru_cache(maxsize=1)
def _registry() -> dict[str, GPU]:
    data = shipped_json("gpus")
    return {entry["name"]: GPU(**{**data["common"], **entry}) for entry in data["gpus"]}


def list_gpus() -> list[str]:
    """Return the names of the GPUs that ship with the package.

    Returns:
        Names, sorted.
    """
    return list(_registry())


class _Name(NamedTuple):
    """What a GPU's name says, as drivers, clouds and users write it."""

    words: str  #: without vendor, memory and form factor: ``h100``, ``rtxpro6000``
    form: str  #: ``pcie``, ``nvl``, or empty for the others
    memory: int  #: gigabytes; 0 where it says none


_VENDORS = r"nvidia|amd|instinct|tesla|geforce|workstation|server|edition|blackwell|tensorcore|gpu"
_FORMS = r"sxm\d?|oam|hbm\d?e?|gddr\d?x?|ac|nvl\d+|mega"


def _read_name(text: str) -> _Name:
    """Split a name; ``NVIDIA-H100-80GB-HBM3`` and ``H100-SXM5-80GB`` are both H100 of 80 GB."""
    words = re.findall(r"[a-z0-9.]+", text.lower().replace("_", " "))
    memory = next((int(m[1]) for w in words if (m := re.fullmatch(r"(\d+)(?:gb|gib|g)", w))), 0)
    form = next((w for w in ("pcie", "nvl") if w in words), "")
    dropped = re.compile(rf"{_VENDORS}|{_FORMS}|pcie|nvl|\d+(?:gb|gib|g)")
    kept = "".join(word for word in words if not dropped.fullmatch(word))
    return _Name(kept or "".join(words), form, memory)


def _key(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


def _family(name: str) -> str:
    """Return the family of a cloud's instance type, of any size (``p5`` of ``p5.48xlarge``,
    ``a3-highgpu`` of ``a3-highgpu-8g``); empty for other names."""
    match = re.fullmatch(r"([a-z0-9-]+)(?:\.\d*(?:xlarge|metal)|-\d+g)", name.lower())
    return match[1] if match else ""


def _named(name: str) -> GPU | None:
    """Return the known GPU of a name: equal but for case and punctuation, else by what it says."""
    gpus, family = _registry().values(), _family(name)
    for gpu in gpus:
        keys = {_key(known) for known in (gpu.name, *gpu.aliases)}
        families = {_family(alias) for alias in gpu.aliases} - {""}
        if _key(name) in keys or (family and family in families):
            return gpu
    wanted = _read_name(name)
    for gpu in gpus:
        known = _read_name(gpu.name)
        alike = known.words == wanted.words and known.form == wanted.form
        # Drivers, vendors and clouds round the memory to a few per cent.
        if alike and (not wanted.memory or abs(gpu.memory_bytes / 2**30 / wanted.memory - 1) < 0.1):
            return gpu
    return None


def load_gpu(name: str | os.PathLike[str]) -> GPU:
    """Return the description of a GPU.

    Args:
        name: the name that drivers, clouds or data sheets use, or the path of a ``gpu.json`` or of
            its folder.

    Returns:
        Rates, memory and links of the GPU.

    Raises:
        InputError: no GPU has this name, or the description cannot be read.
    """
    gpu = _named(os.fspath(name))
    if gpu is not None:
        return gpu
    path = Path(name)
    path = path / "gpu.json" if path.is_dir() else path
    if not path.is_file():
        near = [one for one in list_gpus() if _read_name(one).words == _read_name(str(name)).words]
        known = f"{', '.join(near or list_gpus())}, or the path of a gpu.json"
        by_key = {_key(one): one for one in list_gpus()}
        wanted = re.sub(r"^\d+x(?=[a-z])", "", _key(_read_name(str(name)).words))  # 8xH100
        close = " or ".join(by_key[one] for one in get_close_matches(wanted, by_key))
        hint = f": did you mean {close}?" if close else ""
        raise InputError("gpu", f"unknown GPU {os.fspath(name)!r}{hint}", known)
    try:
        return GPU.model_validate_json(read_text(path, "gpu"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "gpu"
        raise InputError("gpu", f"{path}: {where}: {first['msg']}") from None
