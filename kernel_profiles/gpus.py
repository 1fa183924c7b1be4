"""GPUs: memory, bandwidth, compute and engines' defaults, by ``data/gpus.json`` with sources."""

import os
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_sim.errors import InputError
from eldr_sim.inputs import read_text
from eldr_sim.kernel_profiles.models import shipped_json

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
    #: Memory that is neither weights nor KV cache: activations, graphs, communicators, runtime.
    engine_reserved_bytes: int = Field(ge=0)
    #: Default of ``vllm serve --max-num-seqs`` on this GPU.
    max_num_seqs: int = Field(ge=1, le=65536)
    #: Default of ``vllm serve --max-num-batched-tokens`` on this GPU.
    max_num_batched_tokens: int = Field(ge=1, le=2**20)
    #: A GPU with the same chip and links but other memory, whose latency tables stand in for this
    #: one's (:mod:`~eldr_sim.kernel_profiles.kernels.sibling_tables`); empty where there is none.
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
    engine_reserved_source: str = _UNSAID  #: where ``engine_reserved_bytes`` comes from
    defaults_source: str = _UNSAID  #: where the two server defaults come from

    def peak_flops(self, *, fp8: bool) -> float:
        """Peak FLOP/s with FP8 or bfloat16 weights; without FP8 units all compute in bfloat16."""
        return self.fp8_flops if fp8 and self.fp8_flops else self.bf16_flops

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
    """Names of the GPUs that ship with the package."""
    return list(_registry())


def load_gpu(name: str | os.PathLike[str]) -> GPU:
    """Find a GPU by name or alias (case, spaces, hyphens do not matter), or by the path of a
    ``gpu.json`` or its folder. Raises InputError: no such GPU, or no readable description."""

    def key(text: str) -> str:
        return "".join(character for character in text.lower() if character.isalnum())

    for gpu in _registry().values():
        if key(os.fspath(name)) in {key(known) for known in (gpu.name, *gpu.aliases)}:
            return gpu
    path = Path(name)
    path = path / "gpu.json" if path.is_dir() else path
    if not path.is_file():
        known = f"{', '.join(list_gpus())}, or the path of a gpu.json"
        raise InputError("gpu", f"unknown GPU {os.fspath(name)!r}", known)
    try:
        return GPU.model_validate_json(read_text(path, "gpu"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "gpu"
        raise InputError("gpu", f"{path}: {where}: {first['msg']}") from None
