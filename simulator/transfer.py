"""What a KV transfer between workers costs.

A transfer first pays its set-up and one posting cost a descriptor, then its bytes flow over links
that it shares with others (:mod:`~eldr_sim.simulator.network`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TransferModel:
    """Cost of one KV transfer: ``setup_s + descriptors * descriptor_s + bytes / bandwidth``.

    Parameters
    ----------
    setup_s
        Seconds before the first descriptor is posted.
    descriptor_s
        Seconds to post one descriptor.
    bandwidth
        Bytes per second of one worker's link that a transfer alone achieves.
    source
        Where the figures come from.
    ingress_bandwidth
        The same of a decode worker's link where it is another than a prefill worker's.
    """

    setup_s: float
    descriptor_s: float
    bandwidth: float
    source: str
    ingress_bandwidth: float | None = None

    @property
    def ingress(self) -> float:
        """Bytes per second of a decode worker's link."""
        return self.bandwidth if self.ingress_bandwidth is None else self.ingress_bandwidth

    def over(self, egress_nic: float, ingress_nic: float) -> TransferModel:
        """Return the model on workers whose NICs have these line rates, bytes/s."""
        return replace(
            self,
            bandwidth=min(self.bandwidth, egress_nic),
            ingress_bandwidth=min(self.ingress, ingress_nic),
        )


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
        descriptor_s=6.7e-3 / 1785,
        bandwidth=6.3e9,
        source="derived: vLLM NIXL log lines (70 MB / 56 and 167 MB / 1,785 descriptors), set-up "
        "from the Mooncake + vLLM fit",
    ),
}
