"""KV transfers in flight: bytes that flow over links, which they share max-min fairly.

A transfer takes the link by which its sender sends and that by which its receiver receives. All
rates rise together, and those over a full link stop (progressive filling: Bertsekas and Gallager,
Data Networks, section 6.5.2)."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import simpy

from eldr_sim.arrays import Floats
from eldr_sim.simulator.reference.requests import Request

if TYPE_CHECKING:
    from eldr_sim.simulator.reference.reference_cluster import ReferenceCluster

#: A link: whether it is the one out of a worker, and the worker.
Link = tuple[bool, int]


@dataclass(eq=False)
class Flow:
    """A KV transfer in progress."""

    request: Request
    links: tuple[Link, Link]
    bytes_left: float
    rate: float = 0.0


def fair_rates(flows: list[tuple[Link, Link]], capacity: dict[Link, float]) -> list[float]:
    """Return the max-min fair rate of each flow, by the links that it takes."""
    rates: dict[int, float] = {}
    rising = set(range(len(flows)))
    while rising:
        shares = {}
        for link in {link for i in rising for link in flows[i]}:
            users = [i for i in range(len(flows)) if link in flows[i]]
            left = capacity[link] - sum(rates[i] for i in users if i in rates)
            shares[link] = left / sum(i in rising for i in users)
        level = min(shares.values())
        full = {link for link, share in shares.items() if share == level}
        stopped = {i for i in rising if full.intersection(flows[i])}
        rates |= dict.fromkeys(stopped, level)
        rising -= stopped
    return [rates[i] for i in range(len(flows))]


class Links:
    """The transfers in flight. ``rates``: bytes/s of the links into the workers, then out."""

    def __init__(self, cluster: "ReferenceCluster", rates: Floats) -> None:
        self.cluster, self.env = cluster, cluster.env
        n = len(rates) // 2
        self.bandwidth = {(out, w): float(rates[out * n + w]) for out in (False, True)
                          for w in range(n)}  # fmt: skip
        self.capacity = dict(self.bandwidth)
        self.flows: list[Flow] = []
        self.updated = 0.0
        self.next_end: simpy.Event | None = None

    def begin(self, request: Request, source: int, target: int, n_bytes: float) -> None:
        """Let the bytes of a transfer flow from now on."""
        self._progress()
        self.flows.append(Flow(request, ((True, source), (False, target)), n_bytes))
        self._share()

    def drop(self, request: Request) -> None:
        """Take out an unfinished transfer, if it is in flight."""
        self._progress()
        left = [flow for flow in self.flows if flow.request is not request]
        if len(left) < len(self.flows):
            self.flows = left
            self._share()

    def scale(self, worker: int, share: float) -> None:
        """Let both links of a worker have a share of their bandwidth."""
        self._progress()
        for link in ((True, worker), (False, worker)):
            self.capacity[link] = self.bandwidth[link] * share
        self._share()

    def _progress(self) -> None:
        elapsed, self.updated = self.env.now - self.updated, self.env.now
        for flow in self.flows:
            flow.bytes_left -= flow.rate * elapsed

    def _share(self) -> None:
        """Give the transfers their rates anew, and wait for the end of the first one."""
        self.env.postpone([self.next_end], math.inf)
        if not self.flows:
            return
        rates = fair_rates([flow.links for flow in self.flows], self.capacity)
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.rate = rate
        soonest = min(flow.bytes_left / flow.rate for flow in self.flows)
        self.next_end = self.env.call_at(self.env.now + max(0.0, soonest), self._end)

    def _end(self) -> None:
        """Let the transfers end whose bytes have flowed; what flows in a nanosecond, or in the
        clock's resolution, is rounding and not data."""
        self._progress()
        rounding = max(1e-9, math.ulp(self.env.now))
        done = [flow for flow in self.flows if flow.bytes_left <= flow.rate * rounding]
        self.flows = [flow for flow in self.flows if flow not in done]
        self._share()
        for flow in done:
            self.cluster.transferred(flow.request)
