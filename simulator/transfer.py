"""KV-cache transfers between workers over shared links.

A transfer first pays its set-up and one posting cost a descriptor, then its bytes flow at a rate
that the egress link of the prefill worker and the ingress link of the decode worker share
max-min fairly with the other transfers in flight (progressive filling, Bertsekas and Gallager,
Data Networks, section 6.5.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eldr_sim.simulator.clock import Clock


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


def max_min_rates(flows: Sequence[tuple[int, int]], egress: float, ingress: float) -> list[float]:
    """Share links among flows max-min fairly.

    Parameters
    ----------
    flows
        (source, destination) of each flow; each source has one egress link and each destination
        one ingress link.
    egress, ingress
        Capacity of every egress and ingress link, bytes/s.

    Returns
    -------
    list of float
        Rate of each flow, bytes/s: no flow can get more without taking from one that has less.
    """
    capacity: dict[tuple[str, int], float] = {}
    users: dict[tuple[str, int], list[int]] = {}
    for i, (source, destination) in enumerate(flows):
        for link, rate in ((("out", source), egress), (("in", destination), ingress)):
            capacity[link] = rate
            users.setdefault(link, []).append(i)
    rates = [-1.0] * len(flows)
    while users:
        link = min(users, key=lambda k: (capacity[k] / len(users[k]), k))
        share = max(0.0, capacity[link] / len(users[link]))
        for i in users[link]:
            rates[i] = share
            source, destination = flows[i]
            for other in (("out", source), ("in", destination)):
                if other != link:
                    capacity[other] -= share
                    users[other].remove(i)
                    if not users[other]:
                        del users[other]
        del users[link]
    return rates


@dataclass(slots=True)
class _Flow:
    source: int
    destination: int
    bytes_left: float
    rate: float
    on_done: Callable[[], None]


class TransferNetwork:
    """The transfers in flight between prefill and decode workers."""

    def __init__(self, env: Clock, model: TransferModel) -> None:
        self.env = env
        self.model = model
        self._flows: list[_Flow] = []
        self._updated_s = 0.0
        self._timer = 0  # only the event that carries the current number counts

    def start(
        self,
        source: int,
        destination: int,
        n_bytes: float,
        descriptors: int,
        on_done: Callable[[], None],
    ) -> None:
        """Move ``n_bytes`` from prefill worker ``source`` to decode worker ``destination``."""
        latency = self.model.setup_s + descriptors * self.model.descriptor_s
        flow = _Flow(source, destination, float(n_bytes), 0.0, on_done)

        def begin(_event: object) -> None:
            self._progress()
            self._flows.append(flow)
            self._share()

        self.env.at(self.env.now + latency, begin)

    def _progress(self) -> None:
        elapsed = self.env.now - self._updated_s
        self._updated_s = self.env.now
        for flow in self._flows:
            flow.bytes_left -= flow.rate * elapsed

    def _share(self) -> None:
        flows, egress, ingress = self._flows, self.model.bandwidth, self.model.ingress
        self._timer += 1
        if not flows:
            return
        if len(flows) == 1:
            flows[0].rate = min(egress, ingress)
        else:
            rates = max_min_rates([(f.source, f.destination) for f in flows], egress, ingress)
            for flow, rate in zip(flows, rates, strict=True):
                flow.rate = rate
        soonest = min(flow.bytes_left / flow.rate for flow in flows)
        timer = self._timer

        def expire(_event: object) -> None:
            if timer == self._timer:
                self._complete()

        self.env.at(self.env.now + max(0.0, soonest), expire)

    def _complete(self) -> None:
        self._progress()
        # What flows in a nanosecond, or in the clock's own resolution, is rounding and not data.
        rounding_s = max(1e-9, math.ulp(self.env.now))
        done = [flow for flow in self._flows if flow.bytes_left <= flow.rate * rounding_s]
        self._flows = [flow for flow in self._flows if flow.bytes_left > flow.rate * rounding_s]
        self._share()
        for flow in done:
            flow.on_done()
