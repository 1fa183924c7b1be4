"""What a KV transfer between workers costs: its set-up, a posting cost a descriptor, then its bytes
over links that it shares with others (:mod:`~eldr_sim.simulator.plane.network`)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from eldr_sim.errors import InputError
from eldr_sim.kernel_profiles.models import ModelDims
from eldr_sim.kernel_profiles.parallel import Parallelism


class Pull(NamedTuple):
    """The GPUs between which a request's KV cache moves."""

    receivers: int = 1  #: GPUs of the decode worker: each pulls its own KV heads
    senders: int = 1  #: GPUs of the prefill worker that have something to send
    sources: int = 1  #: GPUs that each receiver pulls from


def pull_between(model: ModelDims, prefill: Parallelism, decode: Parallelism) -> Pull:
    """Return which GPUs of a prefill worker those of a decode worker pull from, as vLLM's
    NixlConnector (``kv_connector/v1/nixl``): a part of what one GPU holds, all that several hold,
    or under MLA the latent cache from one.

    Raises InputError if neither tensor-parallel size divides the other, as vLLM demands."""
    senders, receivers = prefill.tensor_parallel_size, decode.tensor_parallel_size
    if max(senders, receivers) % min(senders, receivers):
        problem = f"{senders} GPUs a prefill worker and {receivers} a decode worker"
        raise InputError("tensor_parallel_size", problem, "sizes where one divides the other")
    heads = 1 if model.attention == "mla" else model.n_kv_heads
    sources = max(1, min(senders, heads) // receivers)
    return Pull(receivers, min(senders, receivers * sources), sources)


@dataclass(frozen=True)
class TransferModel:
    """Cost of one KV transfer: ``setup_s + descriptors * descriptor_s + bytes / bandwidth``."""

    setup_s: float  #: seconds before the first descriptor is posted
    #: Seconds to post the descriptors of one block and KV tensor: one a GPU that it comes from.
    descriptor_s: float
    bandwidth: float  #: bytes per second of one worker's link that a transfer alone achieves
    source: str  #: where the figures come from
    #: The same of a decode worker's link where it is another than a prefill worker's.
    ingress_bandwidth: float | None = None

    @property
    def ingress(self) -> float:
        """Bytes per second of a decode worker's link."""
        return self.bandwidth if self.ingress_bandwidth is None else self.ingress_bandwidth

    def over(
        self, egress_nic: float, ingress_nic: float, pull: Pull | None = None
    ) -> "TransferModel":
        """Return the model of one decode GPU's transfer over NICs of such line rates, bytes/s."""
        pull = pull or Pull()
        return replace(
            self,
            descriptor_s=self.descriptor_s * pull.sources,
            bandwidth=min(self.bandwidth, egress_nic * pull.senders / pull.receivers),
            ingress_bandwidth=min(self.ingress, ingress_nic),
        )


MEASURED_DESCRIPTORS = 1785  #: most descriptors of a transfer that ``observed`` rests on


def provenance(source: str) -> dict[str, str]:
    """Return what a result says of a preset: the label that its source begins with, and more."""
    label, _, origin = source.partition(": ")
    return {"label": label, "origin": origin, "kernel_source": ""}


class HandOver(NamedTuple):
    """What a hand-over takes beside the transfer and the decode worker's own steps."""

    seconds: float
    source: str


#: Named presets of ``--handover``.
HAND_OVERS = {
    "none": HandOver(0.0, "roofline: engines and proxy take no time, a bound from below"),
    # From the prefill worker's token to the client's first one: 197 ms, of which 29 transfer and 58
    # the decode worker's step that computes that token again, waiting for it included: simulated.
    "vllm_nixl": HandOver(
        0.197 - 0.029 - 0.058,
        "derived: vLLM of August 2026, NixlConnector, 3P1D on one node, blocks of 64 tokens, p50 "
        "(vllm-project/vllm issue 50913, pull request 51919)",
    ),
}


#: Named presets of ``--kv-transfer``.
PRESETS = {
    "ideal": TransferModel(
        setup_s=20.9e-6,
        descriptor_s=0.0,
        bandwidth=42.6e9,
        source="published: nixlbench, 400G NIC: 42.6 GB/s from DRAM, 20.9 us for 4 KB (H200, CX7); "
        "descriptor cost not counted",
    ),
    # Two transfers of vLLM's NIXL log: 70 MB in 56 descriptors took 9.9 ms, 167 MB in 1,785 took
    # 38.7 ms of which 6.7 ms posting. With Mooncake's set-up of 0.38 ms the bytes moved at 7.5 and
    # 5.3 GB/s; the preset takes the geometric mean.
    "observed": TransferModel(
        setup_s=0.38e-3,
        descriptor_s=6.7e-3 / MEASURED_DESCRIPTORS,
        bandwidth=6.3e9,
        source="derived: vLLM NIXL log lines (70 MB / 56 and 167 MB / 1,785 descriptors), set-up "
        "from the Mooncake + vLLM fit",
    ),
}
